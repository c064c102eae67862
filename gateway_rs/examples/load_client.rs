//! A load client that is never the limit: N streams, each sending its next request when the last one is answered.
//!
//! Over HTTP it reads server-sent events off raw sockets and only counts the text that a mock worker's id stands for;
//! over gRPC it is a native client on a few connections; `--protocol worker` is the floor: straight to a worker, by the
//! contract that a router speaks. The time of each id's arrival is kept; with `--stamps FILE` it is written out, by the
//! request's seed, on the clock that `mock_worker` stamps by.
//!
//!     load_client --protocol http --address 127.0.0.1:8080 --streams 32 --requests 96 --tokens 100
//!
//! Prints one line of JSON. Bounded in requests and in time; loopback only.

mod common;

use std::{
    collections::HashMap,
    fmt::Write as _,
    net::SocketAddr,
    sync::{
        atomic::{AtomicUsize, Ordering},
        Arc,
    },
    time::Duration,
};

use aho_corasick::AhoCorasick;
use headrace_gateway::proto::{
    generate_request::Prompt, generate_response::Event, inference_service_client::InferenceServiceClient,
    worker_service_client::WorkerServiceClient, Chat, ChatMessage, GenerateRequest, Outcome, RunHello, RunRequest,
    Sampling, SamplingOptions, Stopping, StoppingOptions, Submit,
};
use parking_lot::Mutex;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::{mpsc, Barrier},
    time::Instant,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};

use common::{now_ns, say, Arguments, Failure};

const MAX_REQUESTS: usize = 1_000_000;
const MAX_STREAMS: usize = 20_000;
/// Kept to be shown.
const FAILURES_SHOWN: usize = 3;
/// Bytes that may hold a part of what is looked for at the end of a read.
const TAIL_BYTES: usize = 64;

/// What to send, and to whom.
struct Plan {
    protocol: String,
    address: String,
    model: String,
    prompts: Vec<Conversation>,
    streams: usize,
    requests: usize,
    tokens: u32,
    temperature: f32,
    first_seed: u64,
    /// Every request has the first seed: they are one question.
    same_seed: bool,
    connections: usize,
    /// Requests begun a second, over all streams; 0 = as fast as they are answered.
    rate: f64,
    timeout: Duration,
    mark: String,
}

/// What is asked: one message, or several, by turns.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Conversation {
    Of(String),
    Turns(Vec<String>),
}

impl Plan {
    /// The texts of a request's messages and who says them, the user first.
    fn messages(&self, number: usize) -> impl Iterator<Item = (&'static str, &str)> {
        let texts = match &self.prompts[number % self.prompts.len()] {
            Conversation::Of(text) => std::slice::from_ref(text),
            Conversation::Turns(texts) => texts,
        };
        let roles = ["user", "assistant"].into_iter().cycle();
        roles.zip(texts.iter().map(String::as_str))
    }

    /// By which the request is known in the stamps.
    fn name(&self, number: usize) -> u64 {
        self.first_seed + number as u64
    }

    fn seed(&self, number: usize) -> u64 {
        self.name(if self.same_seed { 0 } else { number })
    }
}

/// What became of one request.
struct Answered {
    seed: u64,
    sent_ns: u64,
    /// Of each id's arrival.
    came_ns: Vec<u64>,
}

#[derive(Default)]
struct Results {
    answered: Vec<Answered>,
    failed: usize,
    failures: Vec<String>,
}

/// One stream of a protocol.
enum Line {
    Http(HttpLine),
    Grpc(InferenceServiceClient<Channel>),
    Worker(Arc<WorkerLine>),
}

impl Line {
    /// Sends one request and reads its answer to the end; gives the time of sending and of each id.
    async fn ask(&mut self, plan: &Plan, number: usize) -> Result<(u64, Vec<u64>), Failure> {
        match self {
            Self::Http(line) => line.ask(plan, number).await,
            Self::Grpc(client) => ask_grpc(client, plan, number).await,
            Self::Worker(line) => line.ask(plan, number).await,
        }
    }
}

struct HttpLine {
    address: SocketAddr,
    socket: Option<TcpStream>,
    mark: AhoCorasick,
    buffer: Vec<u8>,
}

impl HttpLine {
    async fn connect(plan: &Plan) -> Result<Self, Failure> {
        let mut line = Self {
            address: plan.address.parse()?,
            socket: None,
            mark: AhoCorasick::new([&plan.mark])?,
            buffer: Vec::with_capacity(64 * 1024),
        };
        line.socket().await?;
        Ok(line)
    }

    async fn socket(&mut self) -> Result<&mut TcpStream, Failure> {
        if self.socket.is_none() {
            let socket = TcpStream::connect(self.address).await?;
            socket.set_nodelay(true)?;
            self.socket = Some(socket);
        }
        self.socket.as_mut().ok_or_else(|| "no socket".into())
    }

    async fn ask(&mut self, plan: &Plan, number: usize) -> Result<(u64, Vec<u64>), Failure> {
        let asked = self.exchange(plan, number).await;
        if asked.is_err() {
            // Whatever else is in it belongs to a request that is given up.
            self.socket = None;
        }
        asked
    }

    async fn exchange(&mut self, plan: &Plan, number: usize) -> Result<(u64, Vec<u64>), Failure> {
        let said = plan.messages(number);
        let messages: Vec<_> = said
            .map(|(role, text)| json!({"role": role, "content": text}))
            .collect();
        let body = json!({
            "model": plan.model,
            "messages": messages,
            "max_tokens": plan.tokens,
            "seed": plan.seed(number),
            "temperature": plan.temperature,
            "stream": true,
        })
        .to_string();
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            plan.address,
            body.len()
        );
        let sent_ns = now_ns();
        self.socket().await?.write_all(request.as_bytes()).await?;
        let mut came_ns = Vec::with_capacity(plan.tokens as usize);
        self.buffer.clear();
        let mut is_first = true;
        loop {
            let Some(socket) = &mut self.socket else {
                return Err("no socket".into());
            };
            if socket.read_buf(&mut self.buffer).await? == 0 {
                return Err("the connection was closed".into());
            }
            let at = now_ns();
            if std::mem::take(&mut is_first) && self.buffer.get(9..12) != Some(b"200") {
                return Err(String::from_utf8_lossy(&self.buffer[..self.buffer.len().min(400)]).into());
            }
            let mut counted = 0;
            for found in self.mark.find_iter(&self.buffer) {
                came_ns.push(at);
                counted = found.end();
            }
            // The last chunk of the body. An event never ends like this.
            if self.buffer.ends_with(b"\r\n0\r\n\r\n") {
                return Ok((sent_ns, came_ns));
            }
            let done = counted.max(self.buffer.len().saturating_sub(TAIL_BYTES));
            self.buffer.drain(..done);
        }
    }
}

async fn ask_grpc(
    client: &mut InferenceServiceClient<Channel>,
    plan: &Plan,
    number: usize,
) -> Result<(u64, Vec<u64>), Failure> {
    let message = |(role, text): (&str, &str)| ChatMessage {
        role: role.to_owned(),
        content: Some(text.to_owned()),
        ..ChatMessage::default()
    };
    let chat = Chat {
        messages: plan.messages(number).map(message).collect(),
        ..Chat::default()
    };
    let request = GenerateRequest {
        model: plan.model.clone(),
        prompt: Some(Prompt::Chat(chat)),
        sampling: Some(SamplingOptions {
            temperature: Some(plan.temperature),
            seed: Some(plan.seed(number)),
            ..SamplingOptions::default()
        }),
        stopping: Some(StoppingOptions {
            max_tokens: Some(plan.tokens),
            ..StoppingOptions::default()
        }),
        ..GenerateRequest::default()
    };
    let sent_ns = now_ns();
    let mut events = client.generate(request).await?.into_inner();
    let mut came_ns = Vec::with_capacity(plan.tokens as usize);
    while let Some(response) = events.message().await? {
        if let Some(Event::Delta(delta)) = response.event {
            came_ns.resize(came_ns.len() + delta.ids.len(), now_ns());
        }
    }
    Ok((sent_ns, came_ns))
}

/// Ids of one request that came with one frame.
struct Came {
    at_ns: u64,
    ids: usize,
    is_last: bool,
    failure: Option<String>,
}

/// One `Run` stream that all streams of this process share, as a router's requests do.
struct WorkerLine {
    submits: mpsc::Sender<RunRequest>,
    waiting: Mutex<HashMap<u64, mpsc::Sender<Came>>>,
}

impl WorkerLine {
    async fn connect(plan: &Plan) -> Result<Arc<Self>, Failure> {
        let (submits, outgoing) = mpsc::channel(64);
        let hello = RunHello {
            router_id: "load_client".to_owned(),
            instance_id: String::new(),
        };
        let hello = RunRequest {
            hello: Some(hello),
            ..RunRequest::default()
        };
        submits.send(hello).await?;
        let mut client = WorkerServiceClient::new(channel(&plan.address).await?);
        let mut frames = client.run(ReceiverStream::new(outgoing)).await?.into_inner();
        let line = Arc::new(Self {
            submits,
            waiting: Mutex::default(),
        });
        let reading = line.clone();
        tokio::spawn(async move {
            while let Ok(Some(frame)) = frames.message().await {
                let at_ns = now_ns();
                let waiting = reading.waiting.lock();
                for delta in frame.deltas {
                    let finish = delta.finish.as_ref();
                    let failure = finish.and_then(|finish| match finish.outcome() {
                        Outcome::Stop | Outcome::Length => None,
                        other => Some(format!("{other:?}")),
                    });
                    let came = Came {
                        at_ns,
                        ids: delta.ids.len(),
                        is_last: finish.is_some(),
                        failure,
                    };
                    if let Some(mailbox) = waiting.get(&delta.request) {
                        // There is room for each id on its own.
                        let _ = mailbox.try_send(came);
                    }
                }
            }
            reading.waiting.lock().clear();
        });
        Ok(line)
    }

    async fn ask(&self, plan: &Plan, number: usize) -> Result<(u64, Vec<u64>), Failure> {
        let request = number as u64 + 1;
        let (mailbox, mut came) = mpsc::channel(plan.tokens as usize + 1);
        self.waiting.lock().insert(request, mailbox);
        let submit = Submit {
            request,
            epoch: 1,
            model: plan.model.clone(),
            prompt_ids: (100..140).collect(),
            sampling: Some(Sampling {
                temperature: plan.temperature,
                top_p: 1.0,
                repetition_penalty: 1.0,
                seeds: vec![plan.seed(number)],
                ..Sampling::default()
            }),
            stopping: Some(Stopping {
                max_tokens: plan.tokens,
                ignore_eos: true,
                ..Stopping::default()
            }),
            ..Submit::default()
        };
        let sent_ns = now_ns();
        let message = RunRequest {
            submits: vec![submit],
            ..RunRequest::default()
        };
        self.submits.send(message).await?;
        let mut came_ns = Vec::with_capacity(plan.tokens as usize);
        while let Some(came) = came.recv().await {
            came_ns.resize(came_ns.len() + came.ids, came.at_ns);
            if came.is_last {
                self.waiting.lock().remove(&request);
                return came
                    .failure
                    .map_or(Ok((sent_ns, came_ns)), |failure| Err(failure.into()));
            }
        }
        Err("the worker closed its stream".into())
    }
}

async fn channel(address: &str) -> Result<Channel, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .tcp_nodelay(true)
        .initial_stream_window_size(1024 * 1024)
        .initial_connection_window_size(8 * 1024 * 1024);
    Ok(endpoint.connect().await?)
}

/// All streams, connected before the first request is sent.
async fn connect(plan: &Plan) -> Result<Vec<Line>, Failure> {
    let mut lines = Vec::with_capacity(plan.streams);
    match plan.protocol.as_str() {
        "http" => {
            for _ in 0..plan.streams {
                lines.push(Line::Http(HttpLine::connect(plan).await?));
            }
        }
        "grpc" => {
            let mut channels = Vec::new();
            for _ in 0..plan.connections.min(plan.streams) {
                channels.push(channel(&plan.address).await?);
            }
            let client = |index: usize| InferenceServiceClient::new(channels[index % channels.len()].clone());
            lines.extend((0..plan.streams).map(|index| Line::Grpc(client(index))));
        }
        "worker" => {
            let line = WorkerLine::connect(plan).await?;
            lines.extend((0..plan.streams).map(|_| Line::Worker(line.clone())));
        }
        other => return Err(format!("--protocol: http, grpc or worker, got {other}").into()),
    }
    Ok(lines)
}

/// One stream: its share of the requests, one after the other.
async fn work(
    mut line: Line,
    plan: Arc<Plan>,
    next: Arc<AtomicUsize>,
    results: Arc<Mutex<Results>>,
    begin: Arc<Barrier>,
) {
    begin.wait().await;
    let began = Instant::now();
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        if number >= plan.requests {
            return;
        }
        if plan.rate > 0.0 {
            tokio::time::sleep_until(began + Duration::from_secs_f64(number as f64 / plan.rate)).await;
        }
        let asked = line.ask(&plan, number).await;
        let mut results = results.lock();
        match asked {
            Ok((sent_ns, came_ns)) if came_ns.len() == plan.tokens as usize => results.answered.push(Answered {
                seed: plan.name(number),
                sent_ns,
                came_ns,
            }),
            Ok((_, came_ns)) => results.fail(format!("{} tokens of {}", came_ns.len(), plan.tokens)),
            Err(failure) => results.fail(failure.to_string()),
        }
    }
}

impl Results {
    fn fail(&mut self, why: String) {
        self.failed += 1;
        if self.failures.len() < FAILURES_SHOWN {
            self.failures.push(why);
        }
    }

    /// A line for each request: its seed, when it was sent, when each id came; nanoseconds.
    fn stamps(&self) -> String {
        let mut text = String::new();
        for answered in &self.answered {
            let _ = write!(text, "{} {}", answered.seed, answered.sent_ns);
            for came_ns in &answered.came_ns {
                let _ = write!(text, " {came_ns}");
            }
            text.push('\n');
        }
        text
    }

    fn report(&self, wall: Duration) -> serde_json::Value {
        let tokens: usize = self.answered.iter().map(|answered| answered.came_ns.len()).sum();
        let mut ttft_us: Vec<u64> = self
            .answered
            .iter()
            .filter_map(|answered| Some((answered.came_ns.first()? - answered.sent_ns) / 1000))
            .collect();
        ttft_us.sort_unstable();
        let at = |share: f64| ttft_us.get((ttft_us.len().saturating_sub(1) as f64 * share) as usize);
        json!({
            "wall_s": wall.as_secs_f64(),
            "requests": self.answered.len(),
            "tokens": tokens,
            "failed": self.failed,
            "failures": self.failures,
            "ttft_us": {"p50": at(0.5), "p99": at(0.99)},
        })
    }
}

fn plan(arguments: &mut Arguments) -> Result<Plan, Failure> {
    let file: String = arguments.take("prompts", String::new())?;
    let prompts: Vec<Conversation> = match file.as_str() {
        "" => vec![Conversation::Of(
            "Say hello to all of the people of this small town, please.".to_owned(),
        )],
        file => serde_json::from_slice(&std::fs::read(file)?)?,
    };
    let plan = Plan {
        protocol: arguments.take("protocol", "http".to_owned())?,
        address: arguments.take("address", "127.0.0.1:8080".to_owned())?,
        model: arguments.take("model", "smollm2-135m".to_owned())?,
        prompts,
        streams: arguments.take("streams", 1)?,
        requests: arguments.take("requests", 1)?,
        tokens: arguments.take("tokens", 16)?,
        temperature: arguments.take("temperature", 1.0)?,
        first_seed: arguments.take("first-seed", 1)?,
        same_seed: arguments.take("same-seed", false)?,
        connections: arguments.take("connections", 4)?,
        rate: arguments.take("rate", 0.0)?,
        timeout: Duration::from_secs_f64(arguments.take("timeout-s", 60.0_f64)?.clamp(0.1, 3600.0)),
        mark: arguments.take("mark", " hello".to_owned())?,
    };
    let address: SocketAddr = plan.address.parse()?;
    if !address.ip().is_loopback() {
        return Err("--address: loopback only".into());
    }
    if plan.prompts.is_empty() || plan.mark.is_empty() || plan.connections == 0 {
        return Err("--prompts, --mark and --connections must not be empty".into());
    }
    if !(1..=MAX_STREAMS).contains(&plan.streams) || !(1..=MAX_REQUESTS).contains(&plan.requests) {
        return Err(format!("1 to {MAX_STREAMS} streams and 1 to {MAX_REQUESTS} requests").into());
    }
    Ok(plan)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let mut arguments = Arguments::read()?;
    let stamps: String = arguments.take("stamps", String::new())?;
    let plan = Arc::new(plan(&mut arguments)?);
    arguments.finish()?;
    let lines = connect(&plan).await?;
    let (next, results) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Results::default())));
    let begin = Arc::new(Barrier::new(lines.len() + 1));
    let streams: Vec<_> = lines
        .into_iter()
        .map(|line| tokio::spawn(work(line, plan.clone(), next.clone(), results.clone(), begin.clone())))
        .collect();
    begin.wait().await;
    let began = Instant::now();
    let all = async {
        for stream in streams {
            let _ = stream.await;
        }
    };
    let in_time = tokio::time::timeout(plan.timeout, all).await.is_ok();
    let wall = began.elapsed();
    let mut results = results.lock();
    if !in_time {
        let left = plan.requests - results.answered.len() - results.failed;
        results.failed += left;
        results.failures.push(format!("not answered within {:?}", plan.timeout));
    }
    if !stamps.is_empty() {
        std::fs::write(stamps, results.stamps())?;
    }
    say(&results.report(wall).to_string())
}
