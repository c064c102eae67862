//! The native door: `headrace.v1.InferenceService`, with health and reflection.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{ready, Context, Poll},
    time::{Duration, Instant},
};

use futures_core::Stream;
use headrace_core::routing::choice::Wish;
use tokio::net::TcpListener;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::{body::Body, metadata::MetadataMap, transport::Server, Code, Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt};
use tower::util::{MapRequestLayer, MapResponseLayer};

use super::{
    answer::{Entry, Finish, Sink},
    arriving::Arriving,
    generation::{Call, Generation, Step},
    log,
    metrics::Door as Entrance,
    model::Model,
    open::{request_id, OpenRequest},
    opening::Opening,
    server::incoming,
    tenants::Tenant,
    tls::Tls,
    Plane,
};
use crate::{
    error::{ApiError, ErrorCode, GrpcCode},
    proto::{
        self,
        generate_request::Prompt as AskedPrompt,
        generate_response::{Delta, Event, FinalUsage, Finish as FinishEvent, Started},
        inference_service_server::{InferenceService, InferenceServiceServer},
        list_models_response, tokenize_request, DetokenizeRequest, DetokenizeResponse, GenerateRequest,
        GenerateResponse, ListModelsRequest, ListModelsResponse, ShowUsageRequest, ShowUsageResponse, TextLogprob,
        TextLogprobs, TokenizeRequest, TokenizeResponse, ToolCallPart, Usage,
    },
    request::{ChatPrompt, Class, Door, Draft, GuidedDraft, Prompt, RawChat, RawMessage, ToolChoice},
    schema::Guided,
    tools::CallPart,
};

/// How the paths of the native door's own calls begin.
const INFERENCE: &str = "/headrace.v1.InferenceService/";

/// Serves until told to close, then lets open streams end.
pub async fn serve(plane: Arc<Plane>, listener: TcpListener, tls: Option<Arc<Tls>>, closing: CancellationToken) {
    let (reporter, health) = tonic_health::server::health_reporter();
    let watched = tokio::spawn(report_health(plane.clone(), reporter));
    let described = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    // Many clients still speak the older version.
    let (reflection, reflection_alpha) = match (described().build_v1(), described().build_v1alpha()) {
        (Ok(reflection), Ok(alpha)) => (reflection, alpha),
        (Err(error), _) | (_, Err(error)) => return log::warn(&format!("gRPC reflection cannot start: {error}")),
    };
    let limit = plane.config.max_body_bytes;
    let timeout = Duration::from_secs_f64(plane.config.header_timeout_s);
    let inference = InferenceServiceServer::new(Inference(plane.clone()))
        .max_decoding_message_size(limit)
        .max_encoding_message_size(super::links::MAX_MESSAGE_BYTES);
    let server = Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
        .layer(MapResponseLayer::new(move |response| name_too_large(response, limit)))
        .layer(MapRequestLayer::new(move |request| hurry(request, timeout)))
        .add_service(health)
        .add_service(reflection)
        .add_service(reflection_alpha)
        .add_service(super::batches::grpc::service(plane.clone()))
        .add_service(inference);
    let closed = closing.clone().cancelled_owned();
    let serving = async {
        match tls {
            Some(tls) => {
                let incoming = tls.incoming(listener, closing);
                let opened = incoming.map(|stream| stream.map(|stream| Opening::new(stream, timeout)));
                server.serve_with_incoming_shutdown(opened, closed).await
            }
            None => {
                let opened = incoming(listener).map(|stream| stream.map(|stream| Opening::new(stream, timeout)));
                server.serve_with_incoming_shutdown(opened, closed).await
            }
        }
    };
    tokio::select! {
        result = serving => if let Err(error) = result {
            log::warn(&format!("the gRPC server ended: {error}"));
        },
        () = plane.stopped() => {}
    }
    watched.abort();
}

/// tonic answers a message over the limit with OUT_OF_RANGE, which nothing of ours ever says.
fn name_too_large(response: http::Response<Body>, limit: usize) -> http::Response<Body> {
    match response.headers().get("grpc-status") {
        Some(code) if code == "11" => {
            let message = format!("the message is larger than the limit of {limit} bytes");
            status(&ApiError::new(ErrorCode::TooLarge, message)).into_http()
        }
        _ => response,
    }
}

/// What is asked of models is one message, which has to come in time; uploads and reflection are streams.
fn hurry(request: http::Request<Body>, timeout: Duration) -> http::Request<Body> {
    let late = |timeout: Duration| {
        let message = format!("the message did not arrive within {} s", timeout.as_secs_f64());
        status(&ApiError::new(ErrorCode::InvalidArgument, message))
    };
    match request.uri().path().starts_with(INFERENCE) {
        true => request.map(|body| Body::new(Arriving::new(body, timeout, late))),
        false => request,
    }
}

/// Standard health follows readiness.
async fn report_health(plane: Arc<Plane>, reporter: tonic_health::server::HealthReporter) {
    let mut told = None;
    loop {
        let ready = plane.is_ready();
        if told != Some(ready) {
            told = Some(ready);
            let status = match ready {
                true => tonic_health::ServingStatus::Serving,
                false => tonic_health::ServingStatus::NotServing,
            };
            reporter.set_service_status("", status).await;
            reporter
                .set_service_status("headrace.v1.InferenceService", status)
                .await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

struct Inference(Arc<Plane>);

impl Inference {
    fn identify(&self, metadata: &MetadataMap) -> Result<Arc<Tenant>, ApiError> {
        self.0.tenants.identify(text(metadata, "authorization"))
    }
}

#[tonic::async_trait]
impl InferenceService for Inference {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let arrived = Instant::now();
        let (metadata, _, asked) = request.into_parts();
        let plane = &self.0;
        let operation = if matches!(asked.prompt, Some(AskedPrompt::Chat(_))) {
            "chat"
        } else {
            "text_completion"
        };
        let traceparent = text(&metadata, "traceparent");
        let mut open = OpenRequest::new(plane, Entrance::Grpc, &asked.model, operation, traceparent, arrived)
            .map_err(|error| status(&error))?;
        let refuse = |open: &mut OpenRequest, error: ApiError| {
            open.fail(&error);
            status(&error)
        };
        let known = self.identify(&metadata).and_then(|tenant| {
            plane.model_for(&tenant, &asked.model)?;
            Ok(tenant)
        });
        let tenant = known.map_err(|error| refuse(&mut open, error))?;
        let drafted = draft(asked).and_then(|draft| {
            tenant.may(&draft.model, draft.class)?;
            let route = plane.route(&tenant, &draft)?;
            Ok((draft.validate(&plane.limits(&route.hops[0]))?, route))
        });
        let (request, route) = drafted.map_err(|error| refuse(&mut open, error))?;
        let asked_ms = [request.deadline, grpc_timeout(&metadata)];
        let deadline = asked_ms
            .into_iter()
            .flatten()
            .min()
            .and_then(|left| arrived.checked_add(left));
        let request_id = request_id(text(&metadata, "x-request-id"));
        let started = Started {
            request_id: request_id.clone(),
            model: request.model.clone(),
            prompt_tokens: 0,
            created_s: super::unix_s() as i64,
        };
        let call = Call {
            request,
            route,
            tenant,
            request_id,
            open,
            arrived,
            deadline,
        };
        let generation = Generation::prepare(plane, call).await.map_err(|error| status(&error))?;
        let mut sink = GrpcSink {
            model: generation.model().clone(),
            events: VecDeque::new(),
        };
        let prompt_tokens = generation.prompt_tokens();
        sink.put(Event::Started(Started {
            prompt_tokens,
            ..started
        }));
        Ok(Response::new(Box::pin(Answering {
            generation: Some(generation),
            sink,
            failure: None,
        })))
    }

    async fn list_models(&self, request: Request<ListModelsRequest>) -> Result<Response<ListModelsResponse>, Status> {
        let plane = &self.0;
        let tenant = self.identify(request.metadata()).map_err(|error| status(&error))?;
        let ready = |pool: &str| plane.pool(pool).map_or(0, |pool| pool.ready_workers);
        let describe = |(name, model): (String, Arc<Model>)| {
            let alias = plane.routes.get(&name);
            let variants = alias.iter().flat_map(|alias| &alias.variants);
            let variants: Vec<String> = variants.map(|variant| variant.model.name.clone()).collect();
            list_models_response::Model {
                context_tokens: plane.context_tokens(&model),
                vocab_size: model.vocab_size,
                ready_workers: match variants.is_empty() {
                    true => ready(&name),
                    false => variants.iter().map(|variant| ready(variant)).sum(),
                },
                tokenizer_sha256: model.tokenizer.hash().to_owned(),
                name,
                variants,
            }
        };
        let names = plane.names().into_iter();
        let models = names.filter(|(name, _)| tenant.sees(name)).map(describe).collect();
        Ok(Response::new(ListModelsResponse { models }))
    }

    async fn show_usage(&self, request: Request<ShowUsageRequest>) -> Result<Response<ShowUsageResponse>, Status> {
        let tenant = self.identify(request.metadata()).map_err(|error| status(&error))?;
        let question = request.into_inner().question.unwrap_or_default();
        let report = super::usage::answer(&self.0, &tenant, question).await;
        let report = Some(report.map_err(|error| status(&error))?);
        Ok(Response::new(ShowUsageResponse { report }))
    }

    async fn tokenize(&self, request: Request<TokenizeRequest>) -> Result<Response<TokenizeResponse>, Status> {
        let tenant = self.identify(request.metadata()).map_err(|error| status(&error))?;
        let asked = request.into_inner();
        let prompt = match asked.input {
            Some(tokenize_request::Input::Text(text)) => Ok(Prompt::Text(text)),
            Some(tokenize_request::Input::Chat(asked)) => chat(asked).map(Prompt::Chat),
            None => Err(ApiError::invalid("input", "give text or chat")),
        };
        let result = async {
            let model = self.0.model_for(&tenant, &asked.model)?;
            self.0.tokenize(&model, prompt?).await
        };
        let (ids, context_tokens) = result.await.map_err(|error| status(&error))?;
        Ok(Response::new(TokenizeResponse { ids, context_tokens }))
    }

    async fn detokenize(&self, request: Request<DetokenizeRequest>) -> Result<Response<DetokenizeResponse>, Status> {
        let tenant = self.identify(request.metadata()).map_err(|error| status(&error))?;
        let asked = request.into_inner();
        let result = self
            .0
            .model_for(&tenant, &asked.model)
            .and_then(|model| model.detokenize(&asked.ids, asked.skip_special));
        let text = result.map_err(|error| status(&error))?;
        Ok(Response::new(DetokenizeResponse { text }))
    }
}

/// A generation as a stream of messages and one status.
struct Answering {
    generation: Option<Generation>,
    sink: GrpcSink,
    failure: Option<ApiError>,
}

impl Stream for Answering {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            if let Some(event) = this.sink.events.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if let Some(failure) = this.failure.take() {
                return Poll::Ready(Some(Err(status(&failure))));
            }
            let Some(generation) = &mut this.generation else {
                return Poll::Ready(None);
            };
            match ready!(generation.poll(context, &mut this.sink)) {
                Step::More => {}
                Step::Done => {
                    let (books, served) = (generation.books(), generation.served());
                    let usage = Usage {
                        prompt_tokens: books.prompt_tokens,
                        cached_prompt_tokens: books.cached_prompt_tokens,
                        completion_tokens: books.completion_tokens,
                    };
                    this.sink.put(Event::Usage(FinalUsage {
                        usage: Some(usage),
                        cached_answer: books.cached_answer,
                        variant: served.map_or(String::new(), |served| served.variant.to_owned()),
                        fallback: served.map_or(String::new(), |served| served.fallback.to_owned()),
                    }));
                    this.generation = None;
                }
                Step::Failed(error) => {
                    this.failure = Some(error);
                    this.generation = None;
                }
            }
        }
    }
}

struct GrpcSink {
    model: Arc<Model>,
    events: VecDeque<GenerateResponse>,
}

impl GrpcSink {
    fn put(&mut self, event: Event) {
        self.events.push_back(GenerateResponse { event: Some(event) });
    }

    fn logprobs(&self, entry: &Entry) -> Option<TextLogprobs> {
        let one = |logprob: &proto::Logprob| TextLogprob {
            id: logprob.id,
            bytes: self
                .model
                .tokenizer
                .token_bytes(logprob.id)
                .unwrap_or_default()
                .to_vec(),
            logprob: finite(logprob.logprob),
        };
        entry.logprobs.as_ref().map(|logprobs| TextLogprobs {
            drawn: logprobs.drawn.as_ref().map(one),
            top: logprobs.top.iter().map(one).collect(),
        })
    }
}

impl Sink for GrpcSink {
    fn prompt(&mut self, _: u32, _: &[Entry]) {}

    fn delta(&mut self, choice: u32, text: &str, entries: &[Entry]) {
        let delta = Delta {
            choice,
            text: text.to_owned(),
            ids: entries.iter().map(|entry| entry.id).collect(),
            logprobs: entries.iter().filter_map(|entry| self.logprobs(entry)).collect(),
            tool_calls: Vec::new(),
        };
        self.put(Event::Delta(delta));
    }

    fn calls(&mut self, choice: u32, parts: &[CallPart]) {
        let part = |part: &CallPart| {
            let begun = part.begun.clone();
            let (id, name) = begun.map(|begun| (begun.id, begun.name)).unwrap_or_default();
            ToolCallPart {
                index: part.index,
                id,
                name,
                arguments_json: part.arguments.clone(),
            }
        };
        self.put(Event::Delta(Delta {
            choice,
            tool_calls: parts.iter().map(part).collect(),
            ..Delta::default()
        }));
    }

    fn finish(&mut self, choice: u32, finish: &Finish) {
        self.put(Event::Finish(FinishEvent {
            choice,
            outcome: finish.outcome as i32,
            stop_string: finish.stop_string.clone().unwrap_or_default(),
            stop_id: finish.stop_id,
        }));
    }

    fn model(&mut self, model: &Arc<Model>) {
        self.model = model.clone();
    }
}

/// JSON and people have no infinity.
pub fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() {
        logprob.max(-9999.0)
    } else {
        -9999.0
    }
}

fn draft(asked: GenerateRequest) -> Result<Draft, ApiError> {
    let (mut tool_choice, mut only_one_call) = (ToolChoice::Auto, false);
    let prompt = match asked.prompt {
        Some(AskedPrompt::Text(text)) => Prompt::Text(text),
        Some(AskedPrompt::Ids(ids)) => Prompt::Ids(ids.ids),
        Some(AskedPrompt::Chat(asked)) => {
            (tool_choice, only_one_call) = (chosen(&asked)?, asked.single_tool_call);
            let mut chat = chat(asked)?;
            chat.tools = tool_choice.offered(chat.tools);
            Prompt::Chat(chat)
        }
        None => return Err(ApiError::invalid("prompt", "give text, chat or ids")),
    };
    let mut draft = Draft::new(Door::Native, asked.model, vec![prompt]);
    (draft.tool_choice, draft.only_one_call) = (tool_choice, only_one_call);
    if let Some(sampling) = asked.sampling {
        draft.sampling.temperature = sampling.temperature.map(f64::from);
        draft.sampling.top_k = sampling.top_k.map(i64::from);
        draft.sampling.top_p = sampling.top_p.map(f64::from);
        draft.sampling.min_p = sampling.min_p.map(f64::from);
        draft.sampling.repetition_penalty = sampling.repetition_penalty.map(f64::from);
        draft.sampling.frequency_penalty = sampling.frequency_penalty.map(f64::from);
        draft.sampling.presence_penalty = sampling.presence_penalty.map(f64::from);
        draft.logit_bias = sampling
            .logit_bias
            .into_iter()
            .map(|(id, bias)| (id.into(), bias.into()))
            .collect();
        draft.seed = sampling.seed;
        draft.n = sampling.n.map(i64::from);
    }
    if let Some(stopping) = asked.stopping {
        draft.max_tokens = stopping.max_tokens.map(i64::from);
        draft.min_tokens = stopping.min_tokens.map(i64::from);
        draft.ignore_eos = stopping.ignore_eos;
        draft.stop = stopping.stop;
        draft.stop_ids = stopping.stop_ids.into_iter().map(i64::from).collect();
        draft.include_stop = stopping.include_stop;
    }
    if let Some(logprobs) = asked.logprobs {
        if logprobs.prompt {
            return Err(ApiError::unsupported(
                "logprobs.prompt",
                "log-probabilities of a prompt are given by /v1/completions with echo",
            ));
        }
        if !logprobs.enabled && logprobs.top > 0 {
            return Err(ApiError::invalid("logprobs.top", "logprobs.top needs logprobs.enabled"));
        }
        draft.top_logprobs = logprobs.enabled.then_some(logprobs.top.into());
    }
    draft.guided = asked.guided.and_then(|guided| guided.kind).map(guided);
    draft.lora = asked.lora;
    draft.class = match proto::RequestClass::try_from(asked.class) {
        Ok(proto::RequestClass::Interactive) => Class::Interactive,
        Ok(proto::RequestClass::Batch) => Class::Batch,
        Ok(proto::RequestClass::Standard | proto::RequestClass::Unspecified) => Class::Standard,
        Err(_) => return Err(ApiError::invalid("class", format!("{} is not a class", asked.class))),
    };
    draft.quality = match proto::Quality::try_from(asked.quality) {
        Ok(proto::Quality::Unspecified) => None,
        Ok(proto::Quality::Full) => Some(Wish::Full),
        Ok(proto::Quality::Tolerant) => Some(Wish::Tolerant),
        Err(_) => {
            return Err(ApiError::invalid(
                "quality",
                format!("{} is not a quality", asked.quality),
            ))
        }
    };
    draft.deadline = (asked.deadline_ms > 0).then(|| Duration::from_millis(asked.deadline_ms.into()));
    draft.ttft_target_ms = asked.ttft_target_ms.map(f64::from);
    draft.tpot_target_ms = asked.tpot_target_ms.map(f64::from);
    draft.bypass_cache = asked.bypass_cache;
    draft.bypass_prefix_cache = asked.bypass_prefix_cache;
    draft.session_id = asked.session_id;
    draft.cache_salt = asked.cache_salt;
    draft.stream = true;
    Ok(draft)
}

fn guided(kind: proto::guided::Kind) -> GuidedDraft {
    use proto::guided::Kind;
    let (guided, param) = match kind {
        Kind::JsonSchema(schema) => (Guided::JsonSchema(schema), "guided.json_schema"),
        Kind::JsonObject(_) => (Guided::JsonObject, "guided.json_object"),
        Kind::Regex(regex) => (Guided::Regex(regex), "guided.regex"),
        Kind::Grammar(grammar) => (Guided::Grammar(grammar), "guided.grammar"),
        Kind::Choice(choice) => (Guided::Choice(choice.texts), "guided.choice"),
    };
    GuidedDraft {
        guided,
        strict: true,
        param,
    }
}

fn chosen(asked: &proto::Chat) -> Result<ToolChoice, ApiError> {
    use proto::chat::ToolUse;
    let choice = match (ToolUse::try_from(asked.tool_use), asked.required_tool.as_str()) {
        (Ok(ToolUse::Unspecified | ToolUse::Auto), "") => ToolChoice::Auto,
        (Ok(ToolUse::None), "") => ToolChoice::None,
        (Ok(ToolUse::Required), "") => ToolChoice::Required,
        (Ok(ToolUse::Required | ToolUse::Unspecified), name) => ToolChoice::Named(name.to_owned()),
        (Ok(_), _) => {
            let message = "a required tool goes with a tool_use of REQUIRED";
            return Err(ApiError::invalid("chat.required_tool", message));
        }
        (Err(_), _) => {
            return Err(ApiError::invalid(
                "chat.tool_use",
                format!("{} is not a use of tools", asked.tool_use),
            ))
        }
    };
    match choice {
        ToolChoice::Required | ToolChoice::Named(_) if asked.tools_json.is_empty() => {
            let message = "a tool can be called only when tools are given";
            Err(ApiError::invalid("chat.tool_use", message))
        }
        choice => Ok(choice),
    }
}

fn chat(asked: proto::Chat) -> Result<ChatPrompt, ApiError> {
    let message = |message: proto::ChatMessage| RawMessage {
        role: message.role,
        content: message.content,
        parts: message.parts,
        name: message.name,
        tool_calls: message
            .tool_calls
            .into_iter()
            .map(|call| (call.id, call.name, call.arguments_json))
            .collect(),
        tool_call_id: message.tool_call_id,
    };
    let raw = RawChat {
        messages: asked.messages.into_iter().map(message).collect(),
        tools_json: asked.tools_json,
        add_generation_prompt: !asked.no_generation_prompt,
        template_kwargs_json: asked.template_kwargs_json,
    };
    raw.normalise()
}

/// A value of the metadata; empty when there is none.
pub fn text<'a>(metadata: &'a MetadataMap, key: &str) -> &'a str {
    metadata
        .get(key)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

/// The call's own deadline: up to eight digits and a unit. What is not that sets none.
fn grpc_timeout(metadata: &MetadataMap) -> Option<Duration> {
    let value = text(metadata, "grpc-timeout");
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

/// An error as a rich status: ErrorInfo always, RetryInfo and BadRequest where they say something.
pub fn status(error: &ApiError) -> Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(
        error.openai_code().to_uppercase(),
        "headrace",
        std::collections::HashMap::new(),
    );
    if let Some(wait) = error.retry_after {
        details.set_retry_info(Some(wait));
    }
    if let (Some(param), GrpcCode::InvalidArgument | GrpcCode::NotFound) = (&error.param, error.grpc()) {
        details.add_bad_request_violation(param, &error.message);
    }
    Status::with_error_details(Code::from_i32(error.grpc() as i32), &error.message, details)
}
