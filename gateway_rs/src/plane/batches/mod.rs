//! Files and batches: what both doors pass on to this process's Python side, which keeps them (`services/headrace/batches`).
//!
//! These are requests of people and programs that wait for minutes, so each may cost a call: over a socket that only
//! this process's user can reach, in the tenant's name, as `headrace.v1.BatchService`. Keys, TLS, bounds of bodies and
//! forms of errors are thus those of every other request. Bytes of files pass through in parts and are never held whole.

pub mod grpc;
pub mod http;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{atomic::Ordering, Arc},
};

use hyper_util::rt::TokioIo;
use tokio::{
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tonic::{
    metadata::MetadataValue,
    transport::{Channel, Endpoint, Uri},
    Code, Request, Status,
};
use tonic_types::StatusExt;

use super::{
    config::BatchesConfig,
    links::MAX_MESSAGE_BYTES,
    metrics::{AnswerLabels, BatchLabels, LineLabels, Metrics},
    tenants::Tenant,
    Plane,
};
use crate::{
    error::{ApiError, ErrorCode},
    proto::batch_service_client::BatchServiceClient,
};

/// In whose name a call is made, as bytes.
const TENANT: &str = "x-headrace-tenant-bin";

/// Files that are on their way at once, up and down: each has a buffer here.
const MAX_TRANSFERS: usize = 64;

/// What is shown of them on the page of metrics. Their keeper says it every few seconds.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Standing {
    open: BTreeMap<String, i64>,
    queued_lines: i64,
    running_lines: i64,
    completed_lines: u64,
    failed_lines: u64,
    oldest_s: f64,
    due_s: f64,
}

/// Of a batch that is not over.
const STATUSES: [&str; 4] = ["validating", "in_progress", "finalizing", "cancelling"];

impl Standing {
    /// Puts it there.
    pub fn show(&self, metrics: &Metrics) {
        for status in STATUSES {
            let count = self.open.get(status).copied().unwrap_or(0);
            metrics.batches.get_or_create(&BatchLabels { status }).set(count);
        }
        for (state, count) in [("queued", self.queued_lines), ("running", self.running_lines)] {
            metrics.batch_lines.get_or_create(&LineLabels { state }).set(count);
        }
        for (result, count) in [("completed", self.completed_lines), ("failed", self.failed_lines)] {
            let answers = metrics.batch_answers.get_or_create(&AnswerLabels { result });
            // They are counted where they are written.
            answers.inner().store(count, Ordering::Relaxed);
        }
        metrics.batch_oldest_s.set(self.oldest_s);
        metrics.batch_due_s.set(self.due_s);
    }
}

/// The way to where they are kept.
pub struct Batches {
    client: BatchServiceClient<Channel>,
    transfers: Arc<Semaphore>,
    /// Of one file.
    pub max_file_bytes: u64,
}

impl Batches {
    /// Connects when it is needed.
    pub fn start(config: &BatchesConfig) -> Self {
        let socket: PathBuf = config.service.clone();
        let connect = tower::service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        });
        // The name is only for form: the connector decides.
        let channel = Endpoint::from_static("http://batches").connect_with_connector_lazy(connect);
        Self {
            client: BatchServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES),
            transfers: Arc::new(Semaphore::new(MAX_TRANSFERS)),
            max_file_bytes: config.max_file_bytes,
        }
    }

    /// Something to call.
    pub fn client(&self) -> BatchServiceClient<Channel> {
        self.client.clone()
    }

    /// The right to move a file, until it is dropped. Errors: OVERLOADED.
    pub fn transfer(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.transfers.clone().try_acquire_owned().map_err(|_| {
            let message = format!("{MAX_TRANSFERS} files are on their way, which is the limit");
            ApiError::new(ErrorCode::Overloaded, message).with_retry_after(std::time::Duration::from_secs(1))
        })
    }
}

/// Where they are kept. Errors: UNAVAILABLE where they are not.
pub fn of(plane: &Plane) -> Result<&Batches, ApiError> {
    plane.admit()?;
    plane.batches.as_ref().ok_or_else(|| {
        let message = "this router keeps no files and batches (batches.data_dir is not set)";
        ApiError::new(ErrorCode::Unavailable, message)
    })
}

/// A call in a tenant's name.
pub fn request<T>(tenant: &Tenant, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let name = MetadataValue::from_bytes(tenant.name.as_bytes());
    request.metadata_mut().insert_bin(TENANT, name);
    request
}

/// What the other side said, or that it said nothing.
pub fn error_of(status: &Status) -> ApiError {
    let named = status.get_details_error_info().and_then(|info| {
        let same = |code: &ErrorCode| code.openai_code().eq_ignore_ascii_case(&info.reason);
        ErrorCode::ALL.into_iter().find(same)
    });
    let Some(code) = named else {
        let code = match status.code() {
            Code::Cancelled => ErrorCode::Cancelled,
            Code::Internal | Code::Unknown => ErrorCode::Internal,
            _ => ErrorCode::Unavailable,
        };
        return ApiError::new(code, "files and batches cannot be reached in this router");
    };
    let mut error = ApiError::new(code, status.message());
    if let Some(field) = status
        .get_details_bad_request()
        .and_then(|bad| bad.field_violations.into_iter().next())
    {
        error = error.with_param(field.field);
    }
    if let Some(wait) = status.get_details_retry_info().and_then(|retry| retry.retry_delay) {
        error = error.with_retry_after(wait);
    }
    error
}
