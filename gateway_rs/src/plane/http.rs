//! The HTTP door: OpenAI's API, tokenizer calls, health and metrics.

use std::{
    future::poll_fn,
    sync::{atomic::Ordering, Arc},
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    extract::{Path, Request, State},
    http::{
        header::{AUTHORIZATION, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER},
        request::Parts,
        Extensions, HeaderMap, HeaderValue, StatusCode,
    },
    response::Response,
    routing::{get, post},
    Extension, Router,
};
use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};

use super::{
    generation::{Call, Generation, Served, Step},
    metrics::{Door, MessageLabels},
    model::Model,
    open::{request_id, OpenRequest},
    sse::{Collected, Events, SseBody},
    tenants::Tenant,
    usage, Plane,
};
use crate::{
    error::{ApiError, ErrorCode},
    openai::{
        chat, completions, parse_class, parse_quality,
        tokens::{detokenize_body, parse_detokenize, parse_tokenize, tokenize_body},
        write::AnswerKind,
    },
    request::{deadline_from_text, ms_from_text, Draft, TPOT_HEADER, TTFT_HEADER},
};

type SharedPlane = State<Arc<Plane>>;

/// Header names of ours, with [`TTFT_HEADER`] and [`TPOT_HEADER`]. `traceparent` and `x-request-id` are everybody's.
const DEADLINE: &str = "x-headrace-deadline-ms";
const CLASS: &str = "x-headrace-class";
const QUALITY: &str = "x-headrace-quality";
const CACHE: &str = "x-headrace-cache";
const SESSION: &str = "x-headrace-session";
const CACHED: &str = "x-headrace-cached";
/// Who answered, where a model has several variants, and why it was not the one that the request was meant for.
const VARIANT: &str = "x-headrace-variant";
const FALLBACK: &str = "x-headrace-fallback";
const REQUEST_ID: &str = "x-request-id";
/// At the inner door: in whose name, its bytes in hexadecimal digits. Elsewhere it means nothing.
const TENANT: &str = "x-headrace-tenant";

/// That a request came by the inner door, where tenants are named and bring no keys.
#[derive(Clone, Copy)]
struct Inner;

/// The inner door, for this process's own work in tenants' names.
pub fn inner_routes(plane: Arc<Plane>) -> Router {
    routes(plane).layer(Extension(Inner))
}
/// OpenAI's.
const SHOULD_RETRY: &str = "x-should-retry";

/// Every path of the door.
pub fn routes(plane: Arc<Plane>) -> Router {
    Router::new()
        .route(
            "/v1/chat/completions",
            post(|State(plane): SharedPlane, request: Request| generate(plane, AnswerKind::Chat, request)),
        )
        .route(
            "/v1/completions",
            post(|State(plane): SharedPlane, request: Request| generate(plane, AnswerKind::Completion, request)),
        )
        .route("/v1/models", get(models))
        .route("/v1/models/{model}", get(model))
        .route("/routes", get(route_states))
        .route(
            "/tokenize",
            post(|State(plane): SharedPlane, request: Request| wrap_tokenize(plane, request)),
        )
        .route(
            "/detokenize",
            post(|State(plane): SharedPlane, request: Request| wrap_detokenize(plane, request)),
        )
        .merge(super::batches::http::routes())
        .route("/v1/usage", get(show_usage))
        .route("/health", get(health))
        .route("/live", get(|| async { json(StatusCode::OK, r#"{"status":"live"}"#) }))
        .route("/metrics", get(metrics))
        .fallback(|| async { refusal(StatusCode::NOT_FOUND, "no such path") })
        .method_not_allowed_fallback(|| async {
            refusal(StatusCode::METHOD_NOT_ALLOWED, "this path has another method")
        })
        .with_state(plane)
}

/// Chat and legacy completions: the same way, two ways of writing.
async fn generate(plane: Arc<Plane>, kind: AnswerKind, request: Request) -> Response {
    let arrived = Instant::now();
    let (parts, body) = request.into_parts();
    let request_id = request_id(header(&parts.headers, REQUEST_ID));
    let answered = answer(&plane, kind, &parts, body, &request_id, arrived).await;
    with_request_id(answered.unwrap_or_else(|error| failure(&error)), &request_id)
}

async fn answer(
    plane: &Arc<Plane>,
    kind: AnswerKind,
    parts: &Parts,
    body: Body,
    request_id: &str,
    arrived: Instant,
) -> Result<Response, ApiError> {
    plane.admit()?;
    let headers = &parts.headers;
    let drafted = async {
        // Before its body: who is not known sends us nothing.
        let tenant = identify(plane, headers, &parts.extensions)?;
        let body = read(plane, headers, body).await?;
        Ok((draft(plane, kind, headers, body).await?, tenant))
    };
    let drafted = drafted.await;
    let operation = match kind {
        AnswerKind::Chat => "chat",
        AnswerKind::Completion => "text_completion",
    };
    let name = drafted.as_ref().map_or("", |(draft, _)| draft.model.as_str());
    let mut open = OpenRequest::new(
        plane,
        Door::Http,
        name,
        operation,
        header(headers, "traceparent"),
        arrived,
    )?;
    let checked = drafted.and_then(|(draft, tenant)| {
        tenant.may(&draft.model, draft.class)?;
        let route = plane.route(&tenant, &draft)?;
        Ok((draft.validate(&plane.limits(&route.hops[0]))?, route, tenant))
    });
    let (request, route, tenant) = checked.inspect_err(|error| open.fail(error))?;
    let deadline = request.deadline.and_then(|left| arrived.checked_add(left));
    let (stream, include_usage, choices) = (request.stream, request.include_usage, request.total_choices());
    let name = request.model.clone();
    let call = Call {
        request,
        route,
        tenant,
        request_id: request_id.to_owned(),
        open,
        arrived,
        deadline,
    };
    let generation = Generation::prepare(plane, call).await?;
    let model = generation.model().clone();
    match stream {
        true => stream_answer(generation, Events::new(kind, &name, model, choices, include_usage)).await,
        false => whole_answer(generation, kind, &name, choices).await,
    }
}

/// Waits for the first of the answer, so that what fails before it is a status and not an event.
async fn stream_answer(mut generation: Generation, mut events: Events) -> Result<Response, ApiError> {
    let step = poll_fn(|context| generation.poll(context, &mut events)).await;
    if let Step::Failed(error) = &step {
        if events.is_empty() {
            return Err(error.clone());
        }
    }
    let mut marked = HeaderMap::new();
    mark(&mut marked, &generation);
    let body = SseBody::new(generation, events, step);
    let mut response = Response::new(Body::new(body));
    *response.headers_mut() = marked;
    let headers = response.headers_mut();
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that buffer would undo the streaming.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

async fn whole_answer(
    mut generation: Generation,
    kind: AnswerKind,
    name: &str,
    choices: usize,
) -> Result<Response, ApiError> {
    let mut collected = Collected::new(generation.model().clone(), choices);
    loop {
        match poll_fn(|context| generation.poll(context, &mut collected)).await {
            Step::More => {}
            Step::Done => break,
            Step::Failed(error) => return Err(error),
        }
    }
    let mut response = json(StatusCode::OK, collected.body(kind, name, generation.books()));
    mark(response.headers_mut(), &generation);
    Ok(response)
}

/// Says where an answer comes from.
fn mark(headers: &mut HeaderMap, generation: &Generation) {
    if generation.books().cached_answer {
        headers.insert(CACHED, HeaderValue::from_static("true"));
    }
    if let Some(Served { variant, fallback }) = generation.served() {
        if let Ok(variant) = HeaderValue::from_str(variant) {
            headers.insert(VARIANT, variant);
        }
        if !fallback.is_empty() {
            headers.insert(FALLBACK, HeaderValue::from_static(fallback));
        }
    }
}

/// Who asks. Errors: UNAUTHENTICATED.
pub fn identify(plane: &Plane, headers: &HeaderMap, extensions: &Extensions) -> Result<Arc<Tenant>, ApiError> {
    if extensions.get::<Inner>().is_some() {
        return plane.tenants.named(&from_hex(header(headers, TENANT)));
    }
    plane.tenants.identify(header(headers, AUTHORIZATION.as_str()))
}

fn from_hex(text: &str) -> String {
    let digits = text
        .as_bytes()
        .chunks(2)
        .map(|pair| std::str::from_utf8(pair).unwrap_or_default());
    let bytes: Vec<u8> = digits.map_while(|pair| u8::from_str_radix(pair, 16).ok()).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The whole body, within its bounds of size and time.
pub async fn read(plane: &Plane, headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    let kind = header(headers, CONTENT_TYPE.as_str())
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    if !(kind.is_empty() || kind == "application/json" || kind.ends_with("+json")) {
        return Err(ApiError::unsupported_media_type());
    }
    let limit = plane.config.max_body_bytes;
    let too_large = |size: &str| {
        ApiError::new(
            ErrorCode::TooLarge,
            format!("the body has {size} bytes, the limit is {limit}"),
        )
    };
    let announced = header(headers, CONTENT_LENGTH.as_str());
    if announced.parse::<usize>().is_ok_and(|size| size > limit) {
        return Err(too_large(announced));
    }
    let timeout = Duration::from_secs_f64(plane.config.header_timeout_s);
    match tokio::time::timeout(timeout, Limited::new(body, limit).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large("more")),
        Ok(Err(error)) => Err(ApiError::new(
            ErrorCode::InvalidArgument,
            format!("the body could not be read: {error}"),
        )),
        Err(_) => Err(ApiError::new(
            ErrorCode::InvalidArgument,
            format!("the body did not arrive within {} s", timeout.as_secs_f64()),
        )),
    }
}

async fn draft(plane: &Plane, kind: AnswerKind, headers: &HeaderMap, body: Bytes) -> Result<Draft, ApiError> {
    let parse = match kind {
        AnswerKind::Chat => chat::parse,
        AnswerKind::Completion => completions::parse,
    };
    let mut draft = plane.compute.run(body.len(), move || parse(&body)).await?;
    if let Some(text) = asked(headers, DEADLINE) {
        let asked = deadline_from_text(text, DEADLINE)?;
        draft.deadline = Some(draft.deadline.map_or(asked, |body| body.min(asked)));
    }
    let target_ms = |name| asked(headers, name).map(|text| ms_from_text(text, name)).transpose();
    draft.ttft_target_ms = target_ms(TTFT_HEADER)?;
    draft.tpot_target_ms = target_ms(TPOT_HEADER)?;
    if let Some(text) = asked(headers, CLASS) {
        draft.class = parse_class(text, CLASS)?;
    }
    if let Some(text) = asked(headers, QUALITY) {
        draft.quality = Some(parse_quality(text, QUALITY)?);
    }
    match asked(headers, CACHE) {
        None => {}
        Some("bypass") => draft.bypass_cache = true,
        Some(_) => return Err(ApiError::invalid(CACHE, "the only value is 'bypass'")),
    }
    if let Some(text) = asked(headers, SESSION) {
        draft.session_id = text.to_owned();
    }
    Ok(draft)
}

async fn wrap_tokenize(plane: Arc<Plane>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let result = async {
        plane.admit()?;
        let tenant = identify(&plane, &parts.headers, &parts.extensions)?;
        let body = read(&plane, &parts.headers, body).await?;
        let asked = plane.compute.run(body.len(), move || parse_tokenize(&body)).await?;
        let model = plane.model_for(&tenant, &asked.model)?;
        plane.tokenize(&model, asked.prompt).await
    };
    match result.await {
        Ok((ids, context_tokens)) => json(StatusCode::OK, tokenize_body(&ids, context_tokens)),
        Err(error) => failure(&error),
    }
}

async fn wrap_detokenize(plane: Arc<Plane>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let result = async {
        plane.admit()?;
        let tenant = identify(&plane, &parts.headers, &parts.extensions)?;
        let body = read(&plane, &parts.headers, body).await?;
        let asked = plane.compute.run(body.len(), move || parse_detokenize(&body)).await?;
        plane.model_for(&tenant, &asked.model)?.detokenize(&asked.ids, false)
    };
    match result.await {
        Ok(text) => json(StatusCode::OK, detokenize_body(&text)),
        Err(error) => failure(&error),
    }
}

async fn models(State(plane): SharedPlane, request: Request) -> Response {
    let tenant = match identify(&plane, request.headers(), request.extensions()) {
        Ok(tenant) => tenant,
        Err(error) => return failure(&error),
    };
    let names = plane.names().into_iter();
    let models: Vec<_> = names
        .filter(|(name, _)| tenant.sees(name))
        .map(|(name, model)| describe(&plane, &name, &model))
        .collect();
    json(
        StatusCode::OK,
        serde_json::json!({"object": "list", "data": models}).to_string(),
    )
}

async fn model(State(plane): SharedPlane, Path(name): Path<String>, request: Request) -> Response {
    let found = identify(&plane, request.headers(), request.extensions()).and_then(|tenant| {
        let model = plane.model_for(&tenant, &name)?;
        Ok(describe(&plane, &name, &model))
    });
    match found {
        Ok(model) => json(StatusCode::OK, model.to_string()),
        Err(error) => failure(&error),
    }
}

/// How names with several variants stand.
async fn route_states(State(plane): SharedPlane, request: Request) -> Response {
    let tenant = match identify(&plane, request.headers(), request.extensions()) {
        Ok(tenant) => tenant,
        Err(error) => return failure(&error),
    };
    let ready = |pool: &str| plane.pool(pool).map_or(0, |pool| pool.ready_workers);
    let (table, now_s) = (plane.routes.table(), plane.routes.now_s());
    let seen = table
        .names
        .iter()
        .filter(|name| tenant.sees(name))
        .filter_map(|name| table.get(name));
    let states: Vec<_> = seen.map(|alias| alias.status(now_s, ready)).collect();
    json(StatusCode::OK, serde_json::json!({ "aliases": states }).to_string())
}

fn describe(plane: &Plane, name: &str, model: &Model) -> serde_json::Value {
    serde_json::json!({
        "id": name,
        "object": "model",
        "created": plane.started_s,
        "owned_by": "headrace",
        "max_model_len": plane.context_tokens(model),
    })
}

async fn show_usage(State(plane): SharedPlane, request: Request) -> Response {
    let asked = identify(&plane, request.headers(), request.extensions())
        .and_then(|tenant| Ok((tenant, usage::parse(request.uri())?)));
    drop(request);
    let answered = match asked {
        Ok((tenant, question)) => usage::answer(&plane, &tenant, question).await,
        Err(error) => Err(error),
    };
    match answered {
        Ok(report) => json(StatusCode::OK, usage::body(&report)),
        Err(error) => failure(&error),
    }
}

async fn health(State(plane): SharedPlane) -> Response {
    match plane.is_ready() {
        true => json(StatusCode::OK, r#"{"status":"ok"}"#),
        false => json(StatusCode::SERVICE_UNAVAILABLE, r#"{"status":"not ready"}"#),
    }
}

async fn metrics(State(plane): SharedPlane) -> Response {
    plane.metrics.leases.set(plane.scheduler.leases() as i64);
    plane.metrics.worker_links.set(plane.workers.count() as i64);
    for model in plane.models.values() {
        for (ids, bytes) in model.message_bytes() {
            let labels = MessageLabels {
                model: model.name.clone(),
                ids,
            };
            let counter = plane.metrics.message_bytes.get_or_create(&labels);
            counter.inner().store(bytes, Ordering::Relaxed);
        }
    }
    let mut response = Response::new(Body::from(plane.metrics.render()));
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// A header's value; empty when there is none.
pub fn header<'a>(headers: &'a HeaderMap, name: &str) -> &'a str {
    asked(headers, name).unwrap_or_default()
}

fn asked<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn with_request_id(mut response: Response, request_id: &str) -> Response {
    if let Ok(value) = HeaderValue::from_str(request_id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// An answer in JSON.
pub fn json(status: StatusCode, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// An error in OpenAI's form.
pub fn failure(error: &ApiError) -> Response {
    let status = StatusCode::from_u16(error.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json(status, error.to_openai_json());
    if let Some(seconds) = error.retry_after_s() {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if error.http_status() == 429 && !error.retryable {
        // OpenAI's clients try again at any 429 that does not say this.
        response
            .headers_mut()
            .insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    response
}

fn refusal(status: StatusCode, message: &str) -> Response {
    let mut response = failure(&ApiError::new(ErrorCode::InvalidArgument, message));
    *response.status_mut() = status;
    response
}
