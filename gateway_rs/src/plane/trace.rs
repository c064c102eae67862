//! Spans: one trace for each request, one span for each stage, under the client's own trace when it has one.
//!
//! Context is a value that travels with the request (as `traceparent` in each message), never something attached to a task:
//! links are multiplexed. Without an endpoint nothing is recorded, and a client's context is still passed on.

use std::{
    borrow::Cow,
    time::{Duration, SystemTime},
};

use opentelemetry::{
    trace::{
        Span as _, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId,
        TraceState, Tracer, TracerProvider,
    },
    Context, KeyValue, Value,
};
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::{
    trace::{BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider},
    Resource,
};

/// As often as the Python services export.
const EXPORT_EVERY: Duration = Duration::from_secs(1);

/// Makes spans, or nothing at all.
pub struct Tracing {
    provider: Option<SdkTracerProvider>,
    tracer: Option<SdkTracer>,
    /// Prompts and answers may be put on spans.
    pub log_content: bool,
}

impl Tracing {
    /// Exports to that OTLP/gRPC endpoint; empty = no spans. Must be called inside the runtime.
    pub fn start(endpoint: &str, sample_ratio: f64, log_content: bool) -> Result<Self, String> {
        if endpoint.is_empty() {
            return Ok(Self {
                provider: None,
                tracer: None,
                log_content,
            });
        }
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .build()
            .map_err(|error| format!("telemetry.otlp_endpoint {endpoint:?}: {error}"))?;
        let config = BatchConfigBuilder::default().with_scheduled_delay(EXPORT_EVERY).build();
        let processor = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
        let provider = SdkTracerProvider::builder()
            .with_span_processor(processor)
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(sample_ratio))))
            .with_resource(Resource::builder().with_service_name("headrace-router").build())
            .build();
        Ok(Self {
            tracer: Some(provider.tracer("headrace")),
            provider: Some(provider),
            log_content,
        })
    }

    /// The request's own span, under the client's `traceparent` when that is one.
    pub fn root(&self, operation: &str, model: &str, traceparent: &str) -> Span {
        match &self.tracer {
            None => Span::Passing(parse(traceparent).map(|_| traceparent.to_owned()).unwrap_or_default()),
            Some(tracer) => {
                let parent = parse(traceparent)
                    .map_or_else(Context::new, |context| Context::new().with_remote_span_context(context));
                Span::start(tracer, format!("{operation} {model}"), SpanKind::Server, &parent)
            }
        }
    }

    /// Sends what is not sent yet.
    pub fn stop(&self) {
        if let Some(provider) = &self.provider {
            if let Err(error) = provider.shutdown() {
                super::log::warn(&format!("spans were not all exported: {error}"));
            }
        }
    }
}

/// One stage of one request. Ends when dropped, however the request ends.
pub enum Span {
    /// Nothing is recorded; the client's traceparent (or nothing) is passed on.
    Passing(String),
    /// Recorded.
    Recording(Box<(SdkTracer, opentelemetry_sdk::trace::Span)>),
}

/// A span as its stages see it.
pub struct Parent(Option<Box<(SdkTracer, SpanContext)>>, String);

impl Parent {
    /// Begins a stage.
    pub fn child(&self, name: &'static str, kind: SpanKind) -> Span {
        match &self.0 {
            None => Span::Passing(self.1.clone()),
            Some(parts) => {
                let parent = Context::new().with_remote_span_context(parts.1.clone());
                Span::start(&parts.0, name, kind, &parent)
            }
        }
    }
}

impl Span {
    fn start(tracer: &SdkTracer, name: impl Into<Cow<'static, str>>, kind: SpanKind, parent: &Context) -> Self {
        let builder = SpanBuilder::from_name(name).with_kind(kind);
        let span = tracer.build_with_context(builder, parent);
        Self::Recording(Box::new((tracer.clone(), span)))
    }

    /// What its stages need, wherever they begin.
    pub fn parent(&self) -> Parent {
        match self {
            Self::Passing(traceparent) => Parent(None, traceparent.clone()),
            Self::Recording(parts) => {
                let context = parts.1.span_context().clone();
                Parent(Some(Box::new((parts.0.clone(), context))), String::new())
            }
        }
    }

    /// What the next service continues from; empty = no trace.
    pub fn traceparent(&self) -> String {
        match self {
            Self::Passing(traceparent) => traceparent.clone(),
            Self::Recording(parts) => {
                let context = parts.1.span_context();
                format!(
                    "00-{}-{}-{:02x}",
                    context.trace_id(),
                    context.span_id(),
                    context.trace_flags().to_u8()
                )
            }
        }
    }

    /// Whether attributes are worth computing.
    pub fn is_recording(&self) -> bool {
        matches!(self, Self::Recording(parts) if parts.1.is_recording())
    }

    /// Sets an attribute.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Self::Recording(parts) = self {
            parts.1.set_attribute(KeyValue::new(key, value));
        }
    }

    /// Marks it failed.
    pub fn fail(&mut self, description: String) {
        if let Self::Recording(parts) = self {
            parts.1.set_status(Status::error(description));
        }
    }

    /// Something that happened at a moment inside it.
    pub fn event(&mut self, name: &'static str, at: SystemTime) {
        if let Self::Recording(parts) = self {
            parts.1.add_event_with_timestamp(name, at, Vec::new());
        }
    }
}

/// A W3C traceparent; None when it is not one.
fn parse(traceparent: &str) -> Option<SpanContext> {
    let mut parts = traceparent.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let lower_hex =
        |text: &str, len| text.len() == len && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if !lower_hex(version, 2) || version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    if !lower_hex(trace, 32) || !lower_hex(span, 16) || !lower_hex(flags, 2) {
        return None;
    }
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        TraceFlags::new(u8::from_str_radix(flags, 16).ok()?),
        true,
        TraceState::default(),
    );
    context.is_valid().then_some(context)
}

#[cfg(test)]
mod tests {
    use super::{parse, Tracing};

    #[test]
    fn only_a_traceparent_is_taken_for_one() {
        let good = "00-11111111111111111111111111111111-2222222222222222-01";
        assert!(parse(good).is_some());
        for bad in [
            "",
            "00",
            "00-1-2-01",
            "ff-11111111111111111111111111111111-2222222222222222-01",
            "00-00000000000000000000000000000000-2222222222222222-01",
            "00-1111111111111111111111111111111G-2222222222222222-01",
            "00-11111111111111111111111111111111-2222222222222222-01-x",
        ] {
            assert!(parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn without_an_endpoint_the_clients_context_is_passed_on() {
        let tracing = Tracing::start("", 1.0, false).unwrap_or_else(|error| unreachable!("{error}"));
        let good = "00-11111111111111111111111111111111-2222222222222222-01";
        assert_eq!(tracing.root("chat", "model", good).traceparent(), good);
        assert_eq!(tracing.root("chat", "model", "junk").traceparent(), "");
    }
}
