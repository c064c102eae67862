//! `/v1/files` and `/v1/batches` at the HTTP door, in OpenAI's form.

use std::{future::Future, sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::{multipart::Field, DefaultBodyLimit, FromRequest as _, Multipart, Path, Query, Request, State},
    http::{
        header::{CONTENT_DISPOSITION, CONTENT_LENGTH, CONTENT_TYPE},
        request::Parts,
        HeaderValue, StatusCode,
    },
    response::Response,
    routing::{get, post},
    Router,
};
use bytes::{Bytes, BytesMut};
use serde::{de::DeserializeOwned, Deserialize};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::{wrappers::ReceiverStream, StreamExt as _};

use super::{error_of, of, request, Batches};
use crate::{
    error::{ApiError, ErrorCode},
    openai::batches::{batch_body, deleted_body, expires_after, file_body, page_body, parse_create},
    plane::{
        http::{failure, header, identify, json, read},
        tenants::Tenant,
        Plane,
    },
    proto::{
        download_file_response::Part as Sent,
        upload_file_request::{Header, Part},
        Batch, CancelBatchRequest, DeleteFileRequest, DownloadFileRequest, File, GetBatchRequest, GetFileRequest,
        ListBatchesRequest, ListFilesRequest, UploadFileRequest,
    },
};

/// Bytes of a file are passed on in parts of about this size.
const PART_BYTES: usize = 256 * 1024;

/// What a form has around its file, at most.
const FORM_BYTES: u64 = 64 * 1024;

type SharedPlane = State<Arc<Plane>>;

/// The paths.
pub fn routes() -> Router<Arc<Plane>> {
    Router::new()
        // The bound on files is their own.
        .route(
            "/v1/files",
            post(upload).get(list_files).layer(DefaultBodyLimit::disable()),
        )
        .route("/v1/files/{id}", get(get_file).delete(delete_file))
        .route("/v1/files/{id}/content", get(content))
        .route("/v1/batches", post(create_batch).get(list_batches))
        .route("/v1/batches/{id}", get(get_batch))
        .route("/v1/batches/{id}/cancel", post(cancel_batch))
}

fn answer(result: Result<Value, ApiError>) -> Response {
    match result {
        Ok(body) => json(StatusCode::OK, body.to_string()),
        Err(error) => failure(&error),
    }
}

/// Who asks, and the way to what is asked for.
fn way<'a>(plane: &'a Plane, head: &Parts) -> Result<(&'a Batches, Arc<Tenant>), ApiError> {
    let tenant = identify(plane, &head.headers, &head.extensions)?;
    Ok((of(plane)?, tenant))
}

fn query<T: DeserializeOwned>(head: &Parts) -> Result<T, ApiError> {
    let read = Query::<T>::try_from_uri(&head.uri);
    read.map(|Query(query)| query)
        .map_err(|error| ApiError::new(ErrorCode::InvalidArgument, error.body_text()))
}

fn missing() -> ApiError {
    ApiError::new(ErrorCode::Internal, "an answer lacks what it is about")
}

async fn upload(State(plane): SharedPlane, request: Request) -> Response {
    answer(take_upload(&plane, request).await)
}

async fn take_upload(plane: &Plane, asked: Request) -> Result<Value, ApiError> {
    let (head, body) = asked.into_parts();
    let (batches, tenant) = way(plane, &head)?;
    let _transfer = batches.transfer()?;
    let announced = header(&head.headers, CONTENT_LENGTH.as_str()).parse::<u64>();
    if announced.is_ok_and(|bytes| bytes > batches.max_file_bytes.saturating_add(FORM_BYTES)) {
        let_finish(swallow(body)).await;
        let message = format!("the file has more bytes than the limit of {}", batches.max_file_bytes);
        return Err(ApiError::new(ErrorCode::TooLarge, message).with_param("file"));
    }
    let form = Multipart::from_request(Request::from_parts(head, body), &());
    let form = form
        .await
        .map_err(|error| ApiError::new(ErrorCode::InvalidArgument, error.body_text()))?;
    let (sender, receiver) = mpsc::channel(4);
    let mut client = batches.client();
    let answering = client.upload_file(request(&tenant, ReceiverStream::new(receiver)));
    let feeding = feed(form, sender, Duration::from_secs_f64(plane.config.header_timeout_s));
    tokio::pin!(answering, feeding);
    let answered = tokio::select! {
        answered = &mut answering => {
            // What is refused is refused before all has come.
            let_finish(feeding).await;
            answered
        }
        // Whatever went wrong, the stream ends without the word that it is complete.
        fed = &mut feeding => {
            fed?;
            answering.await
        }
    };
    let answer = answered.map_err(|failed| error_of(&failed))?.into_inner();
    Ok(file_body(&answer.file.ok_or_else(missing)?))
}

/// A client that is refused hears of it only once it has sent what it wants to send, or much of it: most read no answer
/// before, and a connection that is closed under them takes the answer along.
async fn let_finish(reading: impl Future) {
    const MOST: Duration = Duration::from_secs(10);
    let _ = tokio::time::timeout(MOST, reading).await;
}

async fn swallow(body: Body) {
    let mut parts = body.into_data_stream();
    while let Some(Ok(_)) = parts.next().await {}
}

/// The form's fields, as they come.
async fn feed(mut form: Multipart, sender: mpsc::Sender<UploadFileRequest>, idle: Duration) -> Result<(), ApiError> {
    let broken = |error: axum::extract::multipart::MultipartError| {
        ApiError::new(
            ErrorCode::InvalidArgument,
            format!("the form could not be read: {}", error.body_text()),
        )
    };
    // Where nobody listens any more, the answer says why, and the rest is read for the client's sake.
    let send = |part| {
        let sending = sender.send(UploadFileRequest { part: Some(part) });
        async { drop(sending.await) }
    };
    let mut header = Header::default();
    let (mut anchor, mut seconds) = (None, None);
    let mut has_file = false;
    while let Some(mut field) = within(idle, form.next_field()).await?.map_err(broken)? {
        match field.name().unwrap_or_default() {
            "file" if has_file => return Err(ApiError::invalid("file", "one file is uploaded at a time")),
            "file" => {
                has_file = true;
                header.filename = field.file_name().unwrap_or_default().to_owned();
                send(Part::Header(header.clone())).await;
                let mut gathered = BytesMut::new();
                while let Some(bytes) = within(idle, field.chunk()).await?.map_err(broken)? {
                    gathered.extend_from_slice(&bytes);
                    if gathered.len() >= PART_BYTES {
                        send(Part::Data(gathered.split().freeze())).await;
                    }
                }
                if !gathered.is_empty() {
                    send(Part::Data(gathered.freeze())).await;
                }
            }
            "purpose" => header.purpose = short(field, "purpose", idle).await?,
            "expires_after[anchor]" => anchor = Some(short(field, "expires_after.anchor", idle).await?),
            "expires_after[seconds]" => seconds = Some(short(field, "expires_after.seconds", idle).await?),
            // Fields of later versions are let be.
            _ => while within(idle, field.chunk()).await?.map_err(broken)?.is_some() {},
        }
    }
    if !has_file {
        return Err(ApiError::invalid("file", "a file is needed"));
    }
    if anchor.is_some() || seconds.is_some() {
        let (anchor, seconds) = (anchor.unwrap_or_default(), seconds.unwrap_or_default());
        header.expires_after_s = expires_after(&anchor, &seconds, "expires_after")?;
    }
    send(Part::Header(header)).await;
    send(Part::Complete(true)).await;
    Ok(())
}

/// A field that is a word.
async fn short(mut field: Field<'_>, name: &str, idle: Duration) -> Result<String, ApiError> {
    const MOST: usize = 256;
    let mut text = Vec::new();
    loop {
        let chunk = within(idle, field.chunk()).await?;
        match chunk.map_err(|error| ApiError::invalid(name, error.body_text()))? {
            None => break,
            Some(bytes) if text.len() + bytes.len() <= MOST => text.extend_from_slice(&bytes),
            Some(_) => {
                return Err(ApiError::invalid(
                    name,
                    format!("this field is longer than {MOST} bytes"),
                ))
            }
        }
    }
    String::from_utf8(text).map_err(|_| ApiError::invalid(name, "this field is not text"))
}

async fn within<T>(idle: Duration, reading: impl Future<Output = T>) -> Result<T, ApiError> {
    tokio::time::timeout(idle, reading).await.map_err(|_| {
        let message = format!("nothing of the form arrived within {} s", idle.as_secs_f64());
        ApiError::new(ErrorCode::InvalidArgument, message)
    })
}

#[derive(Deserialize)]
struct FilesQuery {
    #[serde(default)]
    after: String,
    #[serde(default)]
    limit: u32,
    #[serde(default)]
    purpose: String,
    #[serde(default)]
    order: String,
}

async fn list_files(State(plane): SharedPlane, asked: Request) -> Response {
    let (head, _) = asked.into_parts();
    let listed = async {
        let (batches, tenant) = way(&plane, &head)?;
        let query: FilesQuery = query(&head)?;
        let ascending = match query.order.as_str() {
            "" | "desc" => false,
            "asc" => true,
            _ => return Err(ApiError::invalid("order", "the order is 'asc' or 'desc'")),
        };
        let message = ListFilesRequest {
            after: query.after,
            limit: query.limit,
            purpose: query.purpose,
            ascending,
        };
        let listed = batches.client().list_files(request(&tenant, message)).await;
        let page = listed.map_err(|failed| error_of(&failed))?.into_inner();
        Ok(page_body(page.files.iter().map(file_body).collect(), page.has_more))
    };
    answer(listed.await)
}

async fn get_file(State(plane): SharedPlane, Path(id): Path<String>, asked: Request) -> Response {
    let (head, _) = asked.into_parts();
    let found = async {
        let (batches, tenant) = way(&plane, &head)?;
        let found = batches.client().get_file(request(&tenant, GetFileRequest { id })).await;
        let found = found.map_err(|failed| error_of(&failed))?.into_inner();
        Ok(file_body(&found.file.ok_or_else(missing)?))
    };
    answer(found.await)
}

async fn delete_file(State(plane): SharedPlane, Path(id): Path<String>, asked: Request) -> Response {
    let (head, _) = asked.into_parts();
    let deleted = async {
        let (batches, tenant) = way(&plane, &head)?;
        let message = DeleteFileRequest { id: id.clone() };
        let deleted = batches.client().delete_file(request(&tenant, message)).await;
        deleted.map_err(|failed| error_of(&failed))?;
        Ok(deleted_body(&id))
    };
    answer(deleted.await)
}

async fn content(State(plane): SharedPlane, Path(id): Path<String>, asked: Request) -> Response {
    send_content(&plane, id, asked)
        .await
        .unwrap_or_else(|error| failure(&error))
}

async fn send_content(plane: &Plane, id: String, asked: Request) -> Result<Response, ApiError> {
    let (head, _) = asked.into_parts();
    let (batches, tenant) = way(plane, &head)?;
    let transfer = batches.transfer()?;
    let message = DownloadFileRequest { id, offset: 0 };
    let opened = batches.client().download_file(request(&tenant, message)).await;
    let mut parts = opened.map_err(|failed| error_of(&failed))?.into_inner();
    let first = parts.message().await.map_err(|failed| error_of(&failed))?;
    let Some(Sent::File(file)) = first.and_then(|first| first.part) else {
        return Err(missing());
    };
    // A part that fails cuts the answer off below the length that was announced.
    let bytes = parts.map(move |part| {
        let _ = &transfer;
        part.map(|part| match part.part {
            Some(Sent::Data(bytes)) => bytes,
            _ => Bytes::new(),
        })
    });
    let mut response = Response::new(Body::from_stream(bytes));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(file.bytes));
    headers.insert(CONTENT_DISPOSITION, disposition(&file));
    Ok(response)
}

fn disposition(file: &File) -> HeaderValue {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_' | ' ');
    let name: String = file
        .filename
        .chars()
        .map(|letter| if plain(letter) { letter } else { '_' })
        .collect();
    let text = format!("attachment; filename=\"{name}\"");
    HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static("attachment"))
}

fn told(batch: Option<Batch>) -> Result<Value, ApiError> {
    Ok(batch_body(&batch.ok_or_else(missing)?))
}

async fn create_batch(State(plane): SharedPlane, asked: Request) -> Response {
    let (head, body) = asked.into_parts();
    let made = async {
        let (batches, tenant) = way(&plane, &head)?;
        let message = parse_create(&read(&plane, &head.headers, body).await?)?;
        let made = batches.client().create_batch(request(&tenant, message)).await;
        told(made.map_err(|failed| error_of(&failed))?.into_inner().batch)
    };
    answer(made.await)
}

#[derive(Deserialize)]
struct BatchesQuery {
    #[serde(default)]
    after: String,
    #[serde(default)]
    limit: u32,
}

async fn list_batches(State(plane): SharedPlane, asked: Request) -> Response {
    let (head, _) = asked.into_parts();
    let listed = async {
        let (batches, tenant) = way(&plane, &head)?;
        let query: BatchesQuery = query(&head)?;
        let message = ListBatchesRequest {
            after: query.after,
            limit: query.limit,
        };
        let listed = batches.client().list_batches(request(&tenant, message)).await;
        let page = listed.map_err(|failed| error_of(&failed))?.into_inner();
        Ok(page_body(page.batches.iter().map(batch_body).collect(), page.has_more))
    };
    answer(listed.await)
}

async fn get_batch(State(plane): SharedPlane, Path(id): Path<String>, asked: Request) -> Response {
    let (head, _) = asked.into_parts();
    let found = async {
        let (batches, tenant) = way(&plane, &head)?;
        let found = batches
            .client()
            .get_batch(request(&tenant, GetBatchRequest { id }))
            .await;
        told(found.map_err(|failed| error_of(&failed))?.into_inner().batch)
    };
    answer(found.await)
}

async fn cancel_batch(State(plane): SharedPlane, Path(id): Path<String>, asked: Request) -> Response {
    let (head, _) = asked.into_parts();
    let cancelled = async {
        let (batches, tenant) = way(&plane, &head)?;
        let message = CancelBatchRequest { id };
        let cancelled = batches.client().cancel_batch(request(&tenant, message)).await;
        told(cancelled.map_err(|failed| error_of(&failed))?.into_inner().batch)
    };
    answer(cancelled.await)
}
