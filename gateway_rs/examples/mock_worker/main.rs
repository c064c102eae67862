//! A worker without an engine, for benchmarks of everything in front of one: it joins a scheduler, takes what a router
//! submits, and plays one and the same id at a given pace. It costs so little that it is never the limit.
//!
//! Like an engine it steps: one frame for each step and router, with the new ids of all requests; a first id leaves at
//! once. `phases` spreads the requests over so many engines that step out of turn (on one stream). With `interval-ms` 0
//! it steps as fast as the router reads.
//!
//! When each request came and each id left is kept, by the request's seed, and written to a file on demand: a client
//! on the same machine has stamps of the same clock, so the way of each single id is known.
//!
//!     mock_worker --scheduler 127.0.0.1:8082 --model smollm2-135m --token-id 28120 --interval-ms 20
//!
//! With `--mark TEXT` it also answers over plain HTTP (see `sse`), and with `--model-folder PATH` by vLLM's gRPC contract
//! (see `vllm`). With `--workers N` it is so many workers, each with a port of its own, that join over a few connections.
//!
//! Commands come by stdin, one a line: `set KEY=VALUE ...`, `reset`, `dump FILE`; each is answered by a line. The end of
//! stdin ends the process.

#[path = "../common/mod.rs"]
mod common;
mod sse;
mod steps;
mod vllm;

use std::{
    collections::HashMap,
    fmt::Write as _,
    io::BufRead as _,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_core::Stream;
use headrace_gateway::proto::{
    join_response::Command,
    scheduler_service_client::SchedulerServiceClient,
    token_delta::Finish,
    worker_service_server::{WorkerService, WorkerServiceServer},
    Cancel, Capabilities, DescribeRequest, DescribeResponse, GetLoadRequest, GetLoadResponse, JoinHello, JoinRequest,
    Load, ModelDescription, Outcome, PullKvRequest, PullKvResponse, RunRequest, RunResponse, RunWelcome, Submit,
    TokenDelta, Usage, WorkerState,
};
use parking_lot::Mutex;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{mpsc, oneshot},
};
use tokio_stream::{
    wrappers::{ReceiverStream, TcpListenerStream},
    StreamExt as _,
};
use tonic::{
    transport::{Channel, Endpoint, Server},
    Request, Response, Status, Streaming,
};

use common::{now_ns, say, Arguments, Failure};

/// More ids than a benchmark produces; past it nothing is kept.
const MAX_STAMPS: usize = 8_000_000;
const MAX_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// Frames that wait for the connection: enough to keep it busy, few enough that a stamp is the time of sending.
const FRAMES_AHEAD: usize = 2;
/// A scheduler's connection has so many streams and more.
const WORKERS_PER_CONNECTION: usize = 1000;

/// How fast ids come.
#[derive(Clone, Copy)]
struct Pace {
    interval: Duration,
    tokens_per_frame: u32,
    phases: u32,
}

impl Pace {
    fn set(&mut self, pair: &str) -> Result<(), Failure> {
        let (key, value) = pair
            .split_once('=')
            .ok_or_else(|| format!("expected KEY=VALUE, got {pair}"))?;
        match key {
            "interval_ms" => self.interval = Duration::try_from_secs_f64(value.parse::<f64>()? / 1e3)?,
            "tokens_per_frame" => self.tokens_per_frame = value.parse::<u32>()?.max(1),
            "phases" => self.phases = value.parse::<u32>()?.max(1),
            _ => return Err(format!("unknown key {key}").into()),
        }
        Ok(())
    }
}

/// When a request came and when each of its ids left.
#[derive(Default)]
struct Stamps {
    received_ns: u64,
    sent_ns: Vec<u64>,
}

#[derive(Default)]
struct Log {
    requests: HashMap<u64, Stamps>,
    stamps: usize,
}

impl Log {
    /// So many ids of a request leave now.
    fn stamp(&mut self, seed: u64, ids: usize, at_ns: u64) {
        if self.stamps < MAX_STAMPS {
            self.stamps += ids;
            let sent_ns = &mut self.requests.entry(seed).or_default().sent_ns;
            sent_ns.resize(sent_ns.len() + ids, at_ns);
        }
    }
}

struct Mock {
    worker_id: String,
    instance_id: String,
    description: ModelDescription,
    token_id: u32,
    pace: Mutex<Pace>,
    log: Mutex<Log>,
    load: Mutex<Load>,
}

/// One choice under way.
struct Playing {
    request: u64,
    epoch: u32,
    choice: u32,
    /// By which the client knows it.
    seed: u64,
    prompt_tokens: u32,
    sent: u32,
    max_tokens: u32,
}

impl Playing {
    /// Its next ids; the last ones carry the end.
    fn step(&mut self, mock: &Mock, tokens: u32) -> TokenDelta {
        let tokens = tokens.min(self.max_tokens - self.sent);
        let mut delta = self.delta();
        delta.ids = vec![mock.token_id; tokens as usize];
        delta.cached_prompt_tokens = (self.sent == 0).then_some(0);
        self.sent += tokens;
        if self.is_over() {
            delta.finish = Some(Box::new(self.finish(Outcome::Length)));
        }
        delta
    }

    fn is_over(&self) -> bool {
        self.sent == self.max_tokens
    }

    fn delta(&self) -> TokenDelta {
        TokenDelta {
            request: self.request,
            epoch: self.epoch,
            choice: self.choice,
            first_index: self.sent,
            ..TokenDelta::default()
        }
    }

    fn finish(&self, outcome: Outcome) -> Finish {
        Finish {
            outcome: outcome as i32,
            usage: Some(Usage {
                prompt_tokens: self.prompt_tokens,
                cached_prompt_tokens: 0,
                completion_tokens: self.sent,
            }),
            ..Finish::default()
        }
    }
}

/// What plays for one router.
struct Batch {
    mock: Arc<Mock>,
    /// By phase.
    groups: Vec<Vec<Playing>>,
    count: usize,
    submitted: usize,
    iteration: u64,
    /// What is to leave with the next frame, whatever the pace.
    ready: Vec<(TokenDelta, u64)>,
}

impl Batch {
    fn new(mock: Arc<Mock>) -> Self {
        Self {
            mock,
            groups: Vec::new(),
            count: 0,
            submitted: 0,
            iteration: 0,
            ready: Vec::new(),
        }
    }

    fn take(&mut self, message: RunRequest) {
        let received_ns = now_ns();
        let pace = *self.mock.pace.lock();
        for submit in message.submits {
            self.submit(submit, pace, received_ns);
        }
        for cancel in message.cancels {
            self.cancel(&cancel);
        }
    }

    fn submit(&mut self, submit: Submit, pace: Pace, received_ns: u64) {
        self.groups
            .resize_with(self.groups.len().max(pace.phases as usize), Vec::new);
        let seeds = submit.sampling.map(|sampling| sampling.seeds).unwrap_or_default();
        let max_tokens = submit.stopping.map_or(1, |stopping| stopping.max_tokens).max(1);
        let phase = self.submitted % pace.phases as usize;
        self.submitted += 1;
        if let Some(seed) = seeds.first() {
            let mut log = self.mock.log.lock();
            log.requests.entry(*seed).or_default().received_ns = received_ns;
        }
        for choice in 0..seeds.len().max(1) {
            let mut playing = Playing {
                request: submit.request,
                epoch: submit.epoch,
                choice: choice as u32,
                seed: seeds.get(choice).copied().unwrap_or_default(),
                prompt_tokens: submit.prompt_ids.len() as u32,
                sent: 0,
                max_tokens,
            };
            let delta = playing.step(&self.mock, pace.tokens_per_frame);
            self.ready.push((delta, playing.seed));
            if !playing.is_over() {
                self.groups[phase].push(playing);
                self.count += 1;
            }
        }
    }

    fn cancel(&mut self, cancel: &Cancel) {
        let is_meant = |playing: &Playing| {
            playing.request == cancel.request
                && playing.epoch == cancel.epoch
                && cancel.choice.is_none_or(|choice| choice == playing.choice)
        };
        for group in &mut self.groups {
            group.retain(|playing| {
                let goes_on = !is_meant(playing);
                if !goes_on {
                    self.count -= 1;
                    let mut delta = playing.delta();
                    delta.finish = Some(Box::new(playing.finish(Outcome::Cancelled)));
                    self.ready.push((delta, playing.seed));
                }
                goes_on
            });
        }
    }

    /// One step of the requests of a phase.
    fn step(&mut self, phase: usize, tokens: u32) {
        let Some(group) = self.groups.get_mut(phase) else {
            return;
        };
        for playing in group.iter_mut() {
            self.ready.push((playing.step(&self.mock, tokens), playing.seed));
        }
        let before = group.len();
        group.retain(|playing| !playing.is_over());
        self.count -= before - group.len();
    }

    /// All that is ready as one frame, stamped.
    fn frame(&mut self) -> RunResponse {
        self.iteration += 1;
        let mut log = self.mock.log.lock();
        let at = now_ns();
        let mut deltas = Vec::with_capacity(self.ready.len());
        for (delta, seed) in self.ready.drain(..) {
            log.stamp(seed, delta.ids.len(), at);
            deltas.push(delta);
        }
        let mut load = self.mock.load.lock();
        load.running_requests = self.count as u32;
        load.iteration = self.iteration;
        RunResponse {
            iteration: self.iteration,
            deltas,
            ..RunResponse::default()
        }
    }
}

/// One router's stream, until it ends.
async fn play(mock: Arc<Mock>, mut requests: Streaming<RunRequest>, frames: mpsc::Sender<Result<RunResponse, Status>>) {
    let mut batch = Batch::new(mock.clone());
    let mut due = Instant::now();
    let mut phase = 0;
    loop {
        let pace = *mock.pace.lock();
        let every = pace.interval / pace.phases;
        let idle = batch.count == 0;
        tokio::select! {
            biased;
            message = requests.message() => match message {
                Ok(Some(message)) => batch.take(message),
                _ => return,
            },
            () = tokio::time::sleep_until(due.into()), if batch.count > 0 && !pace.interval.is_zero() => {
                batch.step(phase, pace.tokens_per_frame);
                phase = (phase + 1) % pace.phases as usize;
                due += every;
                if due + pace.interval < Instant::now() {
                    // As an engine that was held up: it does not make up for the steps it missed.
                    due = Instant::now() + every;
                }
            },
            () = std::future::ready(()), if batch.count > 0 && pace.interval.is_zero() => {
                (0..batch.groups.len()).for_each(|phase| batch.step(phase, pace.tokens_per_frame));
            },
        }
        if idle {
            due = Instant::now() + every;
        }
        if batch.ready.is_empty() {
            continue;
        }
        let Ok(permit) = frames.reserve().await else { return };
        permit.send(Ok(batch.frame()));
    }
}

struct Door(Arc<Mock>);

#[tonic::async_trait]
impl WorkerService for Door {
    type RunStream = Pin<Box<dyn Stream<Item = Result<RunResponse, Status>> + Send>>;

    async fn run(&self, request: Request<Streaming<RunRequest>>) -> Result<Response<Self::RunStream>, Status> {
        let mock = self.0.clone();
        let (frames, outgoing) = mpsc::channel(FRAMES_AHEAD);
        let welcome = RunWelcome {
            worker_id: mock.worker_id.clone(),
            instance_id: mock.instance_id.clone(),
            description: Some(mock.description.clone()),
        };
        let first = RunResponse {
            welcome: Some(welcome),
            ..RunResponse::default()
        };
        frames
            .try_send(Ok(first))
            .map_err(|error| Status::internal(error.to_string()))?;
        tokio::spawn(play(mock, request.into_inner(), frames));
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }

    async fn describe(&self, _request: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        Ok(Response::new(DescribeResponse {
            worker_id: self.0.worker_id.clone(),
            instance_id: self.0.instance_id.clone(),
            description: Some(self.0.description.clone()),
            state: WorkerState::Ready as i32,
        }))
    }

    async fn get_load(&self, _request: Request<GetLoadRequest>) -> Result<Response<GetLoadResponse>, Status> {
        Ok(Response::new(GetLoadResponse {
            load: Some(self.0.load.lock().clone()),
        }))
    }

    type PullKvStream = Pin<Box<dyn Stream<Item = Result<PullKvResponse, Status>> + Send>>;

    async fn pull_kv(&self, _request: Request<PullKvRequest>) -> Result<Response<Self::PullKvStream>, Status> {
        Err(Status::unimplemented("this worker has no KV"))
    }
}

/// Membership of all its workers, for as long as the process lives.
fn join_all(mock: &Arc<Mock>, scheduler: &str, addresses: &[String]) -> Result<(), Failure> {
    for (chunk, first) in addresses
        .chunks(WORKERS_PER_CONNECTION)
        .zip((0..).step_by(WORKERS_PER_CONNECTION))
    {
        let channel = Endpoint::from_shared(format!("http://{scheduler}"))?.connect_lazy();
        for (address, number) in chunk.iter().zip(first..) {
            tokio::spawn(join(mock.clone(), channel.clone(), address.clone(), number));
        }
    }
    Ok(())
}

async fn join(mock: Arc<Mock>, scheduler: Channel, address: String, number: usize) {
    loop {
        // The scheduler may not be up yet, or stop before us; either is seen by what it then does not get.
        let _ = join_once(&mock, scheduler.clone(), &address, number).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn join_once(mock: &Arc<Mock>, scheduler: Channel, address: &str, number: usize) -> Result<(), Failure> {
    let mut client = SchedulerServiceClient::new(scheduler);
    let (reports, outgoing) = mpsc::channel(4);
    let report = |hello| {
        let load = Some(mock.load.lock().clone());
        JoinRequest {
            hello,
            load,
            ..JoinRequest::default()
        }
    };
    let hello = JoinHello {
        worker_id: format!("{}-{number}", mock.worker_id),
        instance_id: format!("{}-{number}", mock.instance_id),
        pool: mock.description.model.clone(),
        address: address.to_owned(),
        description: Some(mock.description.clone()),
        startup_s: 0.0,
        ..JoinHello::default()
    };
    reports.send(report(Some(hello))).await?;
    let mut commands = client.join(ReceiverStream::new(outgoing)).await?.into_inner();
    let mut heartbeat = Duration::from_millis(250);
    loop {
        tokio::select! {
            command = commands.message() => match command? {
                Some(response) => if let Some(Command::Welcome(welcome)) = response.command {
                    heartbeat = Duration::from_millis(welcome.heartbeat_ms.max(10).into());
                },
                None => return Ok(()),
            },
            () = tokio::time::sleep(heartbeat) => reports.send(report(None)).await?,
        }
    }
}

/// Obeys stdin until it ends.
fn obey(mock: &Mock) -> Result<(), Failure> {
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (command, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match command {
            "set" => {
                let mut pace = *mock.pace.lock();
                rest.split_whitespace().try_for_each(|pair| pace.set(pair))?;
                *mock.pace.lock() = pace;
            }
            "reset" => *mock.log.lock() = Log::default(),
            "dump" => std::fs::write(rest, dump(&mock.log.lock()))?,
            _ => return Err(format!("unknown command {command}").into()),
        }
        say(r#"{"done":true}"#)?;
    }
    Ok(())
}

/// A line for each request: its seed, when it came, when each id left; nanoseconds.
fn dump(log: &Log) -> String {
    let mut text = String::new();
    for (seed, stamps) in &log.requests {
        let _ = write!(text, "{seed} {}", stamps.received_ns);
        for sent_ns in &stamps.sent_ns {
            let _ = write!(text, " {sent_ns}");
        }
        text.push('\n');
    }
    text
}

/// What it says of itself: as much of everything as any benchmark needs.
fn description(arguments: &mut Arguments) -> Result<ModelDescription, Failure> {
    let block_tokens = arguments.take("block-tokens", 16)?;
    Ok(ModelDescription {
        model: arguments.take("model", "smollm2-135m".to_owned())?,
        engine: "mock".to_owned(),
        tokenizer_sha256: arguments.take("tokenizer-sha256", String::new())?,
        vocab_size: arguments.take("vocab-size", 49152)?,
        context_tokens: arguments.take("context-tokens", 131_072)?,
        block_tokens,
        kv_blocks: 64_000_000 / block_tokens,
        slots: arguments.take("slots", 4096)?,
        capabilities: Some(Capabilities::default()),
        ..ModelDescription::default()
    })
}

/// The worker's contract at one port.
async fn serve(mock: Arc<Mock>, listener: TcpListener) -> Result<(), tonic::transport::Error> {
    let service = WorkerServiceServer::new(Door(mock))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    Server::builder()
        .initial_stream_window_size(4 * 1024 * 1024)
        .initial_connection_window_size(8 * 1024 * 1024)
        .add_service(service)
        .serve_with_incoming(incoming(listener))
        .await
}

/// Accepted connections: a frame must not wait for the next one's sake.
fn incoming(listener: TcpListener) -> impl Stream<Item = std::io::Result<TcpStream>> {
    TcpListenerStream::new(listener).map(|accepted| {
        accepted.and_then(|socket| {
            socket.set_nodelay(true)?;
            Ok(socket)
        })
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let mut arguments = Arguments::read()?;
    let scheduler = arguments.take("scheduler", String::new())?;
    let worker_id = arguments.take("worker-id", "mock".to_owned())?;
    let token_id = arguments.take("token-id", 100)?;
    let mark = arguments.take("mark", String::new())?;
    let model_folder = arguments.take("model-folder", String::new())?;
    let workers = arguments.take("workers", 1_usize)?;
    let description = description(&mut arguments)?;
    let mut pace = Pace {
        interval: Duration::ZERO,
        tokens_per_frame: arguments.take("tokens-per-frame", 1)?,
        phases: arguments.take("phases", 1)?,
    };
    pace.set(&format!(
        "interval_ms={}",
        arguments.take("interval-ms", "20".to_owned())?
    ))?;
    arguments.finish()?;
    let load = Load {
        state: WorkerState::Ready as i32,
        kv_blocks_total: description.kv_blocks,
        slots: description.slots,
        ..Load::default()
    };
    let mock = Arc::new(Mock {
        instance_id: format!("{worker_id}-{}", now_ns()),
        worker_id,
        description,
        token_id,
        pace: Mutex::new(pace),
        log: Mutex::default(),
        load: Mutex::new(load),
    });
    let mut addresses = Vec::new();
    for _ in 0..workers.max(1) {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        addresses.push(listener.local_addr()?.to_string());
        tokio::spawn(serve(mock.clone(), listener));
    }
    let address = &addresses[0];
    let http = TcpListener::bind("127.0.0.1:0").await?;
    let http_address = http.local_addr()?;
    if !mark.is_empty() {
        tokio::spawn(sse::serve(mock.clone(), http, mark));
    }
    let vllm = TcpListener::bind("127.0.0.1:0").await?;
    let vllm_address = vllm.local_addr()?;
    if !model_folder.is_empty() {
        tokio::spawn(vllm::serve(mock.clone(), vllm, model_folder));
    }
    if !scheduler.is_empty() {
        join_all(&mock, &scheduler, &addresses)?;
    }
    let (over, ended) = oneshot::channel();
    std::thread::spawn(move || over.send(obey(&mock)));
    say(&format!(
        r#"{{"ready":"mock_worker","address":"{address}","http":"{http_address}","vllm":"{vllm_address}"}}"#
    ))?;
    ended.await?
}
