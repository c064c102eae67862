//! What can go wrong with a client's request: a closed list of codes, and the one place that turns a code into a gRPC
//! status, an HTTP status and an OpenAI error body.
//!
//! The list is `headrace.v1.ErrorCode`; `services/headrace/status.py` is its twin in Python. Pure: writing the answer to
//! a socket is `plane`'s.

use std::fmt;
use std::time::Duration;

use serde_json::Value;

/// Why a request was refused or failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ErrorCode {
    /// The caller's mistake; the same request will fail again.
    InvalidArgument = 1,
    /// The prompt, or the prompt and the tokens asked for, exceed the model's context.
    ContextLengthExceeded = 2,
    /// No model has that name.
    ModelNotFound = 3,
    /// A body or message is over the size limit.
    TooLarge = 4,
    /// Who asks is not known.
    Unauthenticated = 5,
    /// Who asks may not.
    PermissionDenied = 6,
    /// Bounded queues are full, or no wait could end before the deadline.
    Overloaded = 7,
    /// A limit of the caller's own was reached.
    RateLimitExceeded = 8,
    /// No worker can serve this now.
    Unavailable = 9,
    /// This process is stopping.
    Draining = 10,
    /// The request's time is over.
    DeadlineExceeded = 11,
    /// The worker was lost and the request could not go on elsewhere.
    WorkerLost = 12,
    /// A valid request that this engine cannot do.
    Unsupported = 13,
    /// The client went away, stopped reading, or cancelled.
    Cancelled = 14,
    /// A fault of our own.
    Internal = 15,
    /// No file or batch has that name.
    NotFound = 16,
    /// A limit of the caller's own was reached, and there is no room again soon.
    InsufficientQuota = 17,
}

/// The statuses of gRPC that we use, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum GrpcCode {
    /// CANCELLED
    Cancelled = 1,
    /// INVALID_ARGUMENT
    InvalidArgument = 3,
    /// DEADLINE_EXCEEDED
    DeadlineExceeded = 4,
    /// NOT_FOUND
    NotFound = 5,
    /// PERMISSION_DENIED
    PermissionDenied = 7,
    /// RESOURCE_EXHAUSTED
    ResourceExhausted = 8,
    /// INTERNAL
    Internal = 13,
    /// UNAVAILABLE
    Unavailable = 14,
    /// UNAUTHENTICATED
    Unauthenticated = 16,
}

impl ErrorCode {
    /// The whole list.
    pub const ALL: [Self; 17] = [
        Self::InvalidArgument,
        Self::ContextLengthExceeded,
        Self::ModelNotFound,
        Self::TooLarge,
        Self::Unauthenticated,
        Self::PermissionDenied,
        Self::Overloaded,
        Self::RateLimitExceeded,
        Self::Unavailable,
        Self::Draining,
        Self::DeadlineExceeded,
        Self::WorkerLost,
        Self::Unsupported,
        Self::Cancelled,
        Self::Internal,
        Self::NotFound,
        Self::InsufficientQuota,
    ];

    /// The code with that number of `headrace.v1.ErrorCode`. A number that is not on the list (a newer peer's) is a fault
    /// that we cannot name: internal.
    #[must_use]
    pub fn from_number(number: i32) -> Self {
        Self::ALL
            .into_iter()
            .find(|code| code.number() == number)
            .unwrap_or(Self::Internal)
    }

    /// Its number in `headrace.v1.ErrorCode`.
    #[must_use]
    pub fn number(self) -> i32 {
        self as i32
    }

    /// The gRPC status it leaves by.
    #[must_use]
    pub fn grpc(self) -> GrpcCode {
        match self {
            Self::InvalidArgument | Self::ContextLengthExceeded | Self::Unsupported => GrpcCode::InvalidArgument,
            Self::ModelNotFound | Self::NotFound => GrpcCode::NotFound,
            Self::TooLarge | Self::Overloaded | Self::RateLimitExceeded | Self::InsufficientQuota => {
                GrpcCode::ResourceExhausted
            }
            Self::Unauthenticated => GrpcCode::Unauthenticated,
            Self::PermissionDenied => GrpcCode::PermissionDenied,
            Self::Unavailable | Self::Draining | Self::WorkerLost => GrpcCode::Unavailable,
            Self::DeadlineExceeded => GrpcCode::DeadlineExceeded,
            Self::Cancelled => GrpcCode::Cancelled,
            Self::Internal => GrpcCode::Internal,
        }
    }

    /// The HTTP status it leaves by: that of its gRPC status, but a size and a lost worker have their own.
    #[must_use]
    pub fn http_status(self) -> u16 {
        match self {
            Self::TooLarge => return 413,
            // Whose fault it is matters to proxies and to those who read their logs: we are there, what is behind us isn't.
            Self::WorkerLost => return 502,
            _ => {}
        }
        match self.grpc() {
            GrpcCode::InvalidArgument => 400,
            GrpcCode::Unauthenticated => 401,
            GrpcCode::PermissionDenied => 403,
            GrpcCode::NotFound => 404,
            GrpcCode::ResourceExhausted => 429,
            GrpcCode::Unavailable => 503,
            GrpcCode::DeadlineExceeded => 504,
            GrpcCode::Cancelled | GrpcCode::Internal => 500,
        }
    }

    /// The `type` of an OpenAI error body.
    #[must_use]
    pub fn openai_type(self) -> &'static str {
        match self {
            Self::InvalidArgument | Self::ContextLengthExceeded | Self::TooLarge | Self::Unsupported => {
                "invalid_request_error"
            }
            Self::ModelNotFound | Self::NotFound => "not_found_error",
            Self::Unauthenticated => "authentication_error",
            Self::PermissionDenied => "permission_error",
            Self::Overloaded | Self::RateLimitExceeded => "rate_limit_error",
            Self::InsufficientQuota => "insufficient_quota",
            Self::Unavailable
            | Self::Draining
            | Self::DeadlineExceeded
            | Self::WorkerLost
            | Self::Cancelled
            | Self::Internal => "server_error",
        }
    }

    /// The `code` of an OpenAI error body, and the reason of a gRPC `ErrorInfo` (there in capitals).
    #[must_use]
    pub fn openai_code(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::ModelNotFound => "model_not_found",
            Self::NotFound => "not_found",
            Self::TooLarge => "too_large",
            Self::Unauthenticated => "unauthenticated",
            Self::PermissionDenied => "permission_denied",
            Self::Overloaded => "overloaded",
            Self::RateLimitExceeded => "rate_limit_exceeded",
            Self::Unavailable => "unavailable",
            Self::Draining => "draining",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::WorkerLost => "worker_lost",
            Self::Unsupported => "unsupported",
            Self::Cancelled => "cancelled",
            Self::Internal => "internal",
            Self::InsufficientQuota => "insufficient_quota",
        }
    }

    /// Whether the same request may succeed later or elsewhere, provided that nothing of it was shown.
    #[must_use]
    pub fn retryable(self) -> bool {
        match self {
            Self::Overloaded | Self::RateLimitExceeded | Self::Unavailable | Self::Draining | Self::WorkerLost => true,
            Self::InvalidArgument
            | Self::ContextLengthExceeded
            | Self::ModelNotFound
            | Self::NotFound
            | Self::TooLarge
            | Self::Unauthenticated
            | Self::PermissionDenied
            | Self::DeadlineExceeded
            | Self::Unsupported
            | Self::Cancelled
            | Self::Internal
            | Self::InsufficientQuota => false,
        }
    }
}

/// A refusal or a failure, as the client is told it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// Which of the closed list.
    pub code: ErrorCode,
    /// For people: the limit and the value. Never a prompt or an answer.
    pub message: String,
    /// The field at fault, as the client named it.
    pub param: Option<String>,
    /// When to try again.
    pub retry_after: Option<Duration>,
    /// Whether the same request may succeed later or elsewhere, and nothing of it was shown.
    pub retryable: bool,
    /// The HTTP status, where it is not the code's own.
    status: Option<u16>,
}

impl ApiError {
    /// An error of that code; retryable as the code is.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            param: None,
            retry_after: None,
            retryable: code.retryable(),
            status: None,
        }
    }

    /// The caller's mistake in that field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message).with_param(param)
    }

    /// A valid wish in that field which this engine cannot fulfil.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unsupported, message).with_param(param)
    }

    /// No model has that name.
    #[must_use]
    pub fn model_not_found(model: &str) -> Self {
        Self::new(
            ErrorCode::ModelNotFound,
            format!("there is no model named {}", shorten(model)),
        )
        .with_param("model")
    }

    /// The request's time is over.
    #[must_use]
    pub fn deadline_exceeded() -> Self {
        Self::new(ErrorCode::DeadlineExceeded, "the request's deadline has passed")
    }

    /// A fault of our own, or of a worker.
    #[must_use]
    pub fn internal(reason: impl fmt::Display) -> Self {
        Self::new(ErrorCode::Internal, reason.to_string())
    }

    /// The body has a content type other than JSON: 415 on HTTP.
    #[must_use]
    pub fn unsupported_media_type() -> Self {
        Self {
            status: Some(415),
            ..Self::new(
                ErrorCode::InvalidArgument,
                "the body must be JSON, with 'content-type: application/json'",
            )
        }
    }

    /// With the field at fault.
    #[must_use]
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// With a time to wait before another try.
    #[must_use]
    pub fn with_retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }

    /// With the retry hint set by who knows better than the code does.
    #[must_use]
    pub fn with_retryable(mut self, retryable: bool) -> Self {
        self.retryable = retryable;
        self
    }

    /// The HTTP status.
    #[must_use]
    pub fn http_status(&self) -> u16 {
        self.status.unwrap_or_else(|| self.code.http_status())
    }

    /// The gRPC status.
    #[must_use]
    pub fn grpc(&self) -> GrpcCode {
        self.code.grpc()
    }

    /// The `type` of an OpenAI error body.
    #[must_use]
    pub fn openai_type(&self) -> &'static str {
        self.code.openai_type()
    }

    /// The `code` of an OpenAI error body.
    #[must_use]
    pub fn openai_code(&self) -> &'static str {
        self.code.openai_code()
    }

    /// The whole seconds of a `retry-after` header, rounded up so that nobody comes too early.
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u64> {
        self.retry_after
            .map(|wait| wait.as_secs() + u64::from(wait.subsec_nanos() > 0))
    }

    /// The body of an OpenAI error: `{"error":{"message":…,"type":…,"param":…,"code":…}}`.
    #[must_use]
    pub fn to_openai_json(&self) -> String {
        serde_json::json!({
            "error": {
                "message": self.message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.openai_code(),
            }
        })
        .to_string()
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.param {
            Some(param) => write!(formatter, "{}: {}: {}", self.openai_code(), param, self.message),
            None => write!(formatter, "{}: {}", self.openai_code(), self.message),
        }
    }
}

impl std::error::Error for ApiError {}

/// What a JSON value is, in JSON's own words.
pub(crate) fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A client's own words, quoted and cut so that an error stays readable.
pub(crate) fn shorten(text: &str) -> String {
    const SHOWN: usize = 64;
    if text.chars().nth(SHOWN).is_none() {
        return format!("'{text}'");
    }
    let head: String = text.chars().take(SHOWN).collect();
    format!("'{head}…'")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_statuses_and_an_openai_body() {
        for code in ErrorCode::ALL {
            let error = ApiError::new(code, "why \"so\"\n").with_param("field");
            assert_eq!(ErrorCode::from_number(code.number()), code);
            assert!((400..600).contains(&error.http_status()), "{code:?}");
            let body: serde_json::Value = serde_json::from_str(&error.to_openai_json()).expect("JSON");
            assert_eq!(body["error"]["message"], "why \"so\"\n");
            assert_eq!(body["error"]["param"], "field");
            assert_eq!(body["error"]["code"], code.openai_code());
            assert_eq!(body["error"]["type"], code.openai_type());
            let callers_fault = error.http_status() < 500 && error.http_status() != 429;
            assert!(
                !(callers_fault && error.retryable),
                "{code:?}: a retry could never succeed"
            );
        }
    }

    #[test]
    fn numbers_and_names_are_unlike_each_other() {
        let mut numbers: Vec<i32> = ErrorCode::ALL.iter().map(|code| code.number()).collect();
        let mut names: Vec<&str> = ErrorCode::ALL.iter().map(|code| code.openai_code()).collect();
        numbers.dedup();
        names.sort_unstable();
        names.dedup();
        assert_eq!((numbers.len(), names.len()), (17, 17));
        assert_eq!(numbers, (1..=17).collect::<Vec<_>>());
        assert_eq!(ErrorCode::from_number(99), ErrorCode::Internal);
    }

    #[test]
    fn statuses_are_those_of_the_conventions() {
        let status = |code: ErrorCode| (code.grpc() as i32, code.http_status());
        assert_eq!(status(ErrorCode::InvalidArgument), (3, 400));
        assert_eq!(status(ErrorCode::ContextLengthExceeded), (3, 400));
        assert_eq!(status(ErrorCode::ModelNotFound), (5, 404));
        assert_eq!(status(ErrorCode::TooLarge), (8, 413));
        assert_eq!(status(ErrorCode::Unauthenticated), (16, 401));
        assert_eq!(status(ErrorCode::PermissionDenied), (7, 403));
        assert_eq!(status(ErrorCode::RateLimitExceeded), (8, 429));
        assert_eq!(status(ErrorCode::Unavailable), (14, 503));
        assert_eq!(status(ErrorCode::DeadlineExceeded), (4, 504));
        assert_eq!(ApiError::unsupported_media_type().http_status(), 415);
    }

    #[test]
    fn a_wait_is_rounded_up_to_seconds() {
        let error = ApiError::new(ErrorCode::Overloaded, "full");
        assert_eq!(error.retry_after_s(), None);
        assert_eq!(
            error.clone().with_retry_after(Duration::from_millis(1)).retry_after_s(),
            Some(1)
        );
        assert_eq!(error.with_retry_after(Duration::from_secs(2)).retry_after_s(), Some(2));
    }

    #[test]
    fn long_words_of_the_client_are_cut() {
        assert_eq!(shorten("né"), "'né'");
        assert_eq!(shorten(&"é".repeat(65)), format!("'{}…'", "é".repeat(64)));
    }
}
