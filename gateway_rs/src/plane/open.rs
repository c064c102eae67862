//! A request in the router: counted while it is open, written into the books once, however it ends.

use std::{
    sync::{atomic::Ordering, Arc},
    time::{Duration, Instant},
};

use opentelemetry::trace::SpanKind;

use super::{
    metrics::{Door, ModelMetrics, RequestLabels},
    trace::Span,
    Plane,
};
use crate::error::{ApiError, ErrorCode};

/// The books of one request, over all its prompts and choices.
#[derive(Clone, Debug, Default)]
pub struct Books {
    /// Ids of the prompts.
    pub prompt_tokens: u32,
    /// Of these, those whose KV was reused, or all for a cached answer.
    pub cached_prompt_tokens: u32,
    /// Ids of the answers, each up to and including the one that ended it.
    pub completion_tokens: u32,
    /// Ids that came but were thrown away by starting again.
    pub wasted_tokens: u32,
    /// The answer came from the response cache.
    pub cached_answer: bool,
    /// When the first id came.
    pub first: Option<Instant>,
}

/// Counts one open request; its end (or its drop: the client left) is counted exactly once.
pub struct OpenRequest {
    plane: Arc<Plane>,
    door: Door,
    series: Arc<ModelMetrics>,
    arrived: Instant,
    /// The request's own span.
    pub span: Span,
    /// Kept up to date while it runs.
    pub books: Books,
    ended: bool,
}

impl OpenRequest {
    /// Errors: OVERLOADED when too many are open, DRAINING.
    pub fn new(
        plane: &Arc<Plane>,
        door: Door,
        model: &str,
        operation: &str,
        traceparent: &str,
        arrived: Instant,
    ) -> Result<Self, ApiError> {
        plane.admit()?;
        let open = plane.open.fetch_add(1, Ordering::Relaxed);
        plane.metrics.open_requests.inc();
        let alias = plane.routes.get(model);
        let series = match (&alias, door) {
            (Some(alias), Door::Shadow) => &alias.shadow_series,
            (Some(alias), _) => &alias.series,
            (None, _) => plane.series.get(model).unwrap_or(&plane.other_series),
        };
        let mut span = plane.tracing.root(operation, &series.model, traceparent);
        if span.is_recording() {
            span.set("gen_ai.operation.name", operation.to_owned());
            span.set("gen_ai.provider.name", "headrace");
            span.set("gen_ai.request.model", series.model.clone());
        }
        let mut request = Self {
            plane: plane.clone(),
            door,
            series: series.clone(),
            arrived,
            span,
            books: Books::default(),
            ended: false,
        };
        let limit = plane.config.max_open_requests;
        if open >= limit {
            let error = ApiError::new(
                ErrorCode::Overloaded,
                format!("{open} requests are open, the limit is {limit}"),
            )
            .with_retry_after(Duration::from_secs(1));
            request.fail(&error);
            return Err(error);
        }
        Ok(request)
    }

    /// Nobody waits for it.
    pub fn is_shadow(&self) -> bool {
        self.door == Door::Shadow
    }

    /// From its arrival to that moment.
    pub fn since_arrival_s(&self, moment: Instant) -> f32 {
        moment.saturating_duration_since(self.arrived).as_secs_f32()
    }

    /// A stage of it.
    pub fn stage(&self, name: &'static str, kind: SpanKind) -> Span {
        self.span.parent().child(name, kind)
    }

    /// It was refused or failed.
    pub fn fail(&mut self, error: &ApiError) {
        self.span.set("error.type", error.openai_code());
        self.span.fail(error.openai_code().to_owned());
        self.end(error.openai_code());
    }

    /// It ended; `outcome` is from a closed list.
    pub fn end(&mut self, outcome: &'static str) {
        if self.ended {
            return;
        }
        self.ended = true;
        self.plane.open.fetch_sub(1, Ordering::Relaxed);
        let metrics = &self.plane.metrics;
        metrics.open_requests.dec();
        let labels = RequestLabels {
            door: self.door,
            model: self.series.model.clone(),
            outcome,
        };
        metrics.requests.get_or_create(&labels).inc();
        let books = &self.books;
        let series = &self.series;
        series.prompt_tokens.inc_by(books.prompt_tokens.into());
        series.cached_prompt_tokens.inc_by(books.cached_prompt_tokens.into());
        series.completion_tokens.inc_by(books.completion_tokens.into());
        series.wasted_tokens.inc_by(books.wasted_tokens.into());
        let duration_s = self.arrived.elapsed().as_secs_f64();
        series.duration_s.observe(duration_s);
        if let Some(first) = books.first {
            let ttft_s = first.saturating_duration_since(self.arrived).as_secs_f64();
            series.ttft_s.observe(ttft_s);
            self.span.set("gen_ai.server.time_to_first_token", ttft_s);
            if books.completion_tokens > 1 {
                let tpot_s = (duration_s - ttft_s) / f64::from(books.completion_tokens - 1);
                series.tpot_s.observe(tpot_s);
            }
        }
        self.span.set("headrace.outcome", outcome);
        self.span
            .set("gen_ai.usage.input_tokens", i64::from(books.prompt_tokens));
        self.span
            .set("gen_ai.usage.output_tokens", i64::from(books.completion_tokens));
        self.span.set(
            "headrace.usage.cached_input_tokens",
            i64::from(books.cached_prompt_tokens),
        );
        self.span.set("headrace.cached_answer", books.cached_answer);
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.end("cancelled");
    }
}

/// The client's id for the request when it is one that may be written into a header and a log, else one of ours.
pub fn request_id(asked: &str) -> String {
    let usable = !asked.is_empty() && asked.len() <= 128 && asked.bytes().all(|byte| byte.is_ascii_graphic());
    match usable {
        true => asked.to_owned(),
        false => format!("req-{:032x}", rand::random::<u128>()),
    }
}
