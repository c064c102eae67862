//! The mock's third door: vLLM's gRPC contract, by which smg reaches an engine when it tokenises by itself. Of its
//! messages only what a benchmark needs is written down here; both sides skip fields that they don't know.

use std::{convert::Infallible, future::Future, pin::Pin, sync::Arc, task};

use prost::Message;
use tokio::{net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    body::Body,
    server::{Grpc, NamedService, ServerStreamingService, UnaryService},
    transport::Server,
    Request, Response, Status,
};
use tonic_prost::ProstCodec;
use tower_service::Service;

use super::{incoming, now_ns, steps, Mock, Pace, MAX_MESSAGE_BYTES};

/// Messages that wait for one answer's reader.
const AHEAD: usize = 4;

#[derive(Clone, PartialEq, Message)]
struct GenerateRequest {
    #[prost(message, optional, tag = "2")]
    tokenized: Option<TokenizedInput>,
    #[prost(message, optional, tag = "4")]
    sampling_params: Option<SamplingParams>,
}

#[derive(Clone, PartialEq, Message)]
struct TokenizedInput {
    #[prost(uint32, repeated, tag = "2")]
    input_ids: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct SamplingParams {
    #[prost(uint32, optional, tag = "8")]
    max_tokens: Option<u32>,
    #[prost(int32, optional, tag = "24")]
    seed: Option<i32>,
}

/// A `oneof` of two.
#[derive(Clone, PartialEq, Message)]
struct GenerateResponse {
    #[prost(message, optional, tag = "1")]
    chunk: Option<Chunk>,
    #[prost(message, optional, tag = "2")]
    complete: Option<Complete>,
}

#[derive(Clone, PartialEq, Message)]
struct Chunk {
    #[prost(uint32, repeated, tag = "1")]
    token_ids: Vec<u32>,
    #[prost(uint32, tag = "2")]
    prompt_tokens: u32,
    #[prost(uint32, tag = "3")]
    completion_tokens: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Complete {
    #[prost(string, tag = "2")]
    finish_reason: String,
    #[prost(uint32, tag = "3")]
    prompt_tokens: u32,
    #[prost(uint32, tag = "4")]
    completion_tokens: u32,
}

#[derive(Clone, PartialEq, Message)]
struct HealthCheckResponse {
    #[prost(bool, tag = "1")]
    healthy: bool,
}

#[derive(Clone, PartialEq, Message)]
struct GetModelInfoResponse {
    #[prost(string, tag = "1")]
    model_path: String,
    #[prost(bool, tag = "2")]
    is_generation: bool,
    #[prost(uint32, tag = "3")]
    max_context_length: u32,
    #[prost(uint32, tag = "4")]
    vocab_size: u32,
    #[prost(string, tag = "6")]
    served_model_name: String,
    #[prost(string, tag = "7")]
    tokenizer_path: String,
    #[prost(string, tag = "8")]
    model_type: String,
    #[prost(string, repeated, tag = "9")]
    architectures: Vec<String>,
    #[prost(int32, tag = "13")]
    max_req_input_len: i32,
}

#[derive(Clone, PartialEq, Message)]
struct GetServerInfoResponse {
    #[prost(string, tag = "5")]
    server_type: String,
}

/// Any message of which nothing matters.
#[derive(Clone, PartialEq, Message)]
struct Anything {}

struct Playing {
    responses: mpsc::Sender<Result<GenerateResponse, Status>>,
    seed: u64,
    prompt_tokens: u32,
    sent: u32,
    max_tokens: u32,
}

impl steps::Playing for Playing {
    async fn step(&mut self, mock: &Mock, pace: Pace) -> bool {
        let tokens = pace.tokens_per_frame.min(self.max_tokens - self.sent);
        self.sent += tokens;
        mock.log.lock().stamp(self.seed, tokens as usize, now_ns());
        let chunk = Chunk {
            token_ids: vec![mock.token_id; tokens as usize],
            prompt_tokens: self.prompt_tokens,
            completion_tokens: tokens,
        };
        let response = GenerateResponse {
            chunk: Some(chunk),
            complete: None,
        };
        let there = self.responses.send(Ok(response)).await.is_ok();
        if self.sent < self.max_tokens {
            return there;
        }
        let complete = Complete {
            finish_reason: "length".to_owned(),
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.sent,
        };
        let last = GenerateResponse {
            chunk: None,
            complete: Some(complete),
        };
        // Whoever has left needs no end.
        let _ = self.responses.send(Ok(last)).await;
        false
    }
}

/// Takes connections for as long as the process lives. `model_folder` is where a gateway finds the tokenizer.
pub async fn serve(
    mock: Arc<Mock>,
    listener: TcpListener,
    model_folder: String,
) -> Result<(), tonic::transport::Error> {
    let (submit, submitted) = mpsc::channel(4096);
    tokio::spawn(steps::play(mock.clone(), submitted));
    let engine = Engine {
        mock,
        model_folder: model_folder.into(),
        submit,
    };
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter
        .set_service_status("", tonic_health::ServingStatus::Serving)
        .await;
    Server::builder()
        .initial_connection_window_size(8 * 1024 * 1024)
        .add_service(health)
        .add_service(engine)
        .serve_with_incoming(incoming(listener))
        .await
}

#[derive(Clone)]
struct Engine {
    mock: Arc<Mock>,
    model_folder: Arc<str>,
    submit: mpsc::Sender<Playing>,
}

impl NamedService for Engine {
    const NAME: &'static str = "vllm.grpc.engine.VllmEngine";
}

type Boxed<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;

impl Service<http::Request<Body>> for Engine {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Boxed<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> task::Poll<Result<(), Infallible>> {
        task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let engine = self.clone();
        let model = self.mock.description.model.clone();
        let folder = self.model_folder.to_string();
        let context_tokens = self.mock.description.context_tokens;
        let vocab_size = self.mock.description.vocab_size;
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
            Ok(match method.as_str() {
                "Generate" => {
                    Grpc::new(ProstCodec::default())
                        .max_decoding_message_size(MAX_MESSAGE_BYTES)
                        .server_streaming(Generate(engine), request)
                        .await
                }
                "HealthCheck" => answer(HealthCheckResponse { healthy: true }, request).await,
                "GetModelInfo" => {
                    let info = GetModelInfoResponse {
                        model_path: folder.clone(),
                        is_generation: true,
                        max_context_length: context_tokens,
                        vocab_size,
                        served_model_name: model,
                        tokenizer_path: folder,
                        model_type: "llama".to_owned(),
                        architectures: vec!["LlamaForCausalLM".to_owned()],
                        max_req_input_len: context_tokens as i32,
                    };
                    answer(info, request).await
                }
                "GetServerInfo" => {
                    let info = GetServerInfoResponse {
                        server_type: "vllm-grpc".to_owned(),
                    };
                    answer(info, request).await
                }
                "Abort" | "FlushCache" => answer(Anything {}, request).await,
                other => Status::unimplemented(other).into_http(),
            })
        })
    }
}

/// One answer to whatever is asked.
async fn answer<M: Message + Default + Clone + 'static>(
    message: M,
    request: http::Request<Body>,
) -> http::Response<Body> {
    Grpc::new(ProstCodec::<M, Anything>::default())
        .unary(Same(message), request)
        .await
}

struct Same<M>(M);

impl<M: Message + Clone + 'static> UnaryService<Anything> for Same<M> {
    type Response = M;
    type Future = std::future::Ready<Result<Response<M>, Status>>;

    fn call(&mut self, _: Request<Anything>) -> Self::Future {
        std::future::ready(Ok(Response::new(self.0.clone())))
    }
}

struct Generate(Engine);

impl ServerStreamingService<GenerateRequest> for Generate {
    type Response = GenerateResponse;
    type ResponseStream = ReceiverStream<Result<GenerateResponse, Status>>;
    type Future = Boxed<Response<Self::ResponseStream>, Status>;

    fn call(&mut self, request: Request<GenerateRequest>) -> Self::Future {
        let Engine { mock, submit, .. } = self.0.clone();
        Box::pin(async move {
            let asked = request.into_inner();
            let sampling = asked.sampling_params.unwrap_or_default();
            let seed = sampling.seed.unwrap_or_default() as u64;
            mock.log.lock().requests.entry(seed).or_default().received_ns = now_ns();
            let (responses, outgoing) = mpsc::channel(AHEAD);
            let playing = Playing {
                responses,
                seed,
                prompt_tokens: asked.tokenized.map_or(0, |input| input.input_ids.len() as u32),
                sent: 0,
                max_tokens: sampling.max_tokens.unwrap_or(16).max(1),
            };
            let gone = |_| Status::unavailable("the mock is stopping");
            submit.send(playing).await.map_err(gone)?;
            Ok(Response::new(ReceiverStream::new(outgoing)))
        })
    }
}
