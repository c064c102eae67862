//! What may happen to the scheduler: the inputs of `Core::step`.
//!
//! Values only. A router or worker is named by its [`Link`], a number that the driver gives to each stream and never
//! uses again: when a peer comes back on a new stream before the old one is seen to be broken, the two cannot be confused.
//! Times are seconds on the driver's clock.

use std::sync::Arc;

use crate::budgets::{Answer, Booking, Settlement};

/// One stream of a router or worker.
pub type Link = u64;

/// The number of a lease: the right to run one request on one worker instance.
pub type LeaseId = u64;

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A router opened its Place stream. What it does not announce of its earlier leases is over.
    RouterJoined {
        /// Its stream.
        link: Link,
        /// Its name, the same over reconnections.
        router_id: Arc<str>,
        /// What still runs.
        running: Vec<RunningLease>,
        /// Bookings that it has yet to settle, or to hear of that they are.
        bookings: Vec<Booking>,
    },
    /// A router's Place stream ended.
    RouterLost {
        /// Its stream.
        link: Link,
    },
    /// A request wants to run.
    Asked {
        /// The router's stream.
        link: Link,
        /// The request.
        ask: Box<Ask>,
    },
    /// A router has placed a request by itself, within a share of its.
    Placed {
        /// The router's stream.
        link: Link,
        /// The lease's number: the router's choice, unlike any other.
        lease: LeaseId,
        /// The worker's stream, as the share named it.
        worker: Link,
        /// The request. Its number does not count.
        ask: Box<Ask>,
    },
    /// A router knows all shares up to that number, and has reported all that it placed before.
    KnowsShares {
        /// The router's stream.
        link: Link,
        /// The last one.
        number: u64,
    },
    /// A request has ended; its router is told when this is durable.
    Settled {
        /// The router's stream.
        link: Link,
        /// The router's number for it, counting up.
        number: u64,
        /// What it cost.
        settlement: Box<Settlement>,
    },
    /// A worker has lost the router of a request, to which it had given so much.
    Orphaned {
        /// The request's.
        booking: Booking,
        /// Of its last attempt.
        output_tokens: u32,
        /// Of its prompt.
        cached_tokens: u32,
    },
    /// All that was taken from the books ([`crate::budgets::Budgets::take`]) has been done.
    LedgerDone {
        /// One for each.
        answers: Vec<Answer>,
    },
    /// The client of an ask left; no answer is owed any more.
    Withdrawn {
        /// The router's stream.
        link: Link,
        /// Its number there.
        ask: u64,
    },
    /// An answer grows. Once with the first token, and now and then later: each time the count has doubled is enough.
    Progressed {
        /// The router's stream.
        link: Link,
        /// Whose.
        lease: LeaseId,
        /// Tokens so far, over all choices.
        output_tokens: u32,
    },
    /// The end of a lease, with its books.
    Released {
        /// The router's stream.
        link: Link,
        /// The lease.
        lease: LeaseId,
        /// The books.
        books: Books,
    },
    /// A worker opened its Join stream. It takes nothing before its first report says that it is ready.
    WorkerJoined {
        /// Its stream.
        link: Link,
        /// Who it is.
        hello: Box<WorkerHello>,
    },
    /// A heartbeat with the worker's load.
    WorkerReported {
        /// Its stream.
        link: Link,
        /// As it is now.
        load: Box<Load>,
    },
    /// A worker's KV blocks came or went.
    BlocksChanged {
        /// The worker's stream.
        link: Link,
        /// Which.
        change: BlockChange,
    },
    /// A worker's Join stream ended.
    WorkerLost {
        /// Its stream.
        link: Link,
    },
    /// Nothing but that time has passed.
    Tick,
}

/// Whose turn comes first when there is not enough for all. In order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Somebody waits for each word.
    Interactive,
    /// The default.
    #[default]
    Standard,
    /// Waits for idle capacity; is not shed.
    Batch,
}

impl Class {
    /// All, highest first.
    pub const ALL: [Self; 3] = [Self::Interactive, Self::Standard, Self::Batch];

    /// Its place in the order; 0 is the highest.
    pub fn rank(self) -> usize {
        self as usize
    }

    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Standard => "standard",
            Self::Batch => "batch",
        }
    }
}

/// One request that wants to run.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The router's number for it on its stream.
    pub number: u64,
    /// For people.
    pub request_id: Arc<str>,
    /// Whose it is; empty = nobody's in particular.
    pub tenant: Arc<str>,
    /// Whose turn.
    pub class: Class,
    /// In order of preference.
    pub pools: Vec<Arc<str>>,
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Chained hashes of the prompt's full blocks.
    pub block_hashes: Vec<u64>,
    /// Tokens at most for each choice; 0 = not said.
    pub max_tokens: u32,
    /// Answers wanted.
    pub choices: u32,
    /// Tokens for each choice that the router expects; 0 = the scheduler's own estimate.
    pub expected_output_tokens: u32,
    /// It must be over by then.
    pub deadline_s: Option<f64>,
    /// When it came to its router; None = when it is asked.
    pub arrived_s: Option<f64>,
    /// From then to the first token; None = its class's.
    pub ttft_target_s: Option<f64>,
    /// Between tokens after the first; None = its class's.
    pub tpot_target_s: Option<f64>,
    /// Worker instances that have just failed it.
    pub avoid_instances: Vec<Arc<str>>,
    /// The conversation it belongs to; empty = none.
    pub session_id: Arc<str>,
    /// The attempt, from 1.
    pub epoch: u32,
    /// The request's entry in the books ([`crate::budgets`]), the same for all attempts; 0 = it has none.
    pub booking: u64,
    /// The model, as the client named it.
    pub alias: Arc<str>,
    /// Of the prompt, what is the answer's own beginning, which earlier attempts brought.
    pub committed_tokens: u32,
    /// Its prompt may be computed on another worker than its answer.
    pub may_part: bool,
}

impl Default for Ask {
    fn default() -> Self {
        let none: Arc<str> = Arc::from("");
        Self {
            number: 0,
            request_id: none.clone(),
            tenant: none.clone(),
            class: Class::Standard,
            pools: Vec::new(),
            prompt_tokens: 0,
            block_hashes: Vec::new(),
            max_tokens: 0,
            choices: 1,
            expected_output_tokens: 0,
            deadline_s: None,
            arrived_s: None,
            ttft_target_s: None,
            tpot_target_s: None,
            avoid_instances: Vec::new(),
            session_id: none.clone(),
            epoch: 1,
            booking: 0,
            alias: none,
            committed_tokens: 0,
            may_part: false,
        }
    }
}

/// A lease that a router holds from before its stream, or the scheduler, broke.
#[derive(Clone, Debug)]
pub struct RunningLease {
    /// Its number.
    pub lease: LeaseId,
    /// Where it runs.
    pub instance_id: Arc<str>,
    /// For people.
    pub request_id: Arc<str>,
    /// Whose it is.
    pub tenant: Arc<str>,
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Tokens at most for each choice; 0 = not said.
    pub max_tokens: u32,
    /// Its request's entry in the books; 0 = it has none.
    pub booking: Booking,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The model ended its answer.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
    /// It did not end by itself: deadline, budget, the client, a fault, or not said.
    #[default]
    Cut,
}

/// What a request cost.
#[derive(Clone, Debug, Default)]
pub struct Books {
    /// How it ended.
    pub outcome: Outcome,
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Of those, whose KV was reused.
    pub cached_prompt_tokens: u32,
    /// Tokens of all choices.
    pub completion_tokens: u32,
    /// KV blocks held, times seconds.
    pub kv_block_s: f64,
    /// From the ask to the first token; 0 = none came.
    pub ttft_s: f64,
    /// From the first token to the last.
    pub decode_s: f64,
}

/// Who a worker is.
#[derive(Clone, Debug, Default)]
pub struct WorkerHello {
    /// Its name, the same over restarts.
    pub worker_id: Arc<str>,
    /// New for each start of the process.
    pub instance_id: Arc<str>,
    /// What it serves in.
    pub pool: Arc<str>,
    /// host:port of its WorkerService.
    pub address: Arc<str>,
    /// What it serves.
    pub description: Description,
    /// Start of the process to ready.
    pub startup_s: f64,
    /// What it is for.
    pub role: Role,
    /// KV of one token, in bytes; 0 = not said.
    pub kv_token_bytes: u32,
}

/// What a worker is for, where prompts are computed apart from answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Role {
    /// Whole requests.
    #[default]
    Both,
    /// Prompts whose answers are others'. Whole requests only when nobody else is there for them.
    Prefill,
    /// Answers, and prompts where that is better.
    Decode,
}

/// What serves a model: enough to know that two processes speak of the same thing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Description {
    /// The name that clients ask for.
    pub model: Arc<str>,
    /// What computes.
    pub engine: Arc<str>,
    /// Its version.
    pub engine_version: Arc<str>,
    /// Of the weights.
    pub weights_sha256: Arc<str>,
    /// Of the weights: "BF16", "Q8_0", ...
    pub quantization: Arc<str>,
    /// Of tokenizer.json.
    pub tokenizer_sha256: Arc<str>,
    /// Of the chat template.
    pub template_sha256: Arc<str>,
    /// Ids of the model.
    pub vocab_size: u32,
    /// Prompt and answer of one request.
    pub context_tokens: u32,
    /// Ids that end an answer.
    pub eos_ids: Vec<u32>,
    /// Tokens of one KV block.
    pub block_tokens: u32,
    /// KV in all; 0 = not said.
    pub kv_blocks: u32,
    /// Choices in one batch at most.
    pub slots: u32,
    /// What its engine can do.
    pub capabilities: Capabilities,
    /// KV states are exchanged between workers with the same tag.
    pub kv_state_tag: Arc<str>,
    /// The cost table that its predictions start from; empty = none, they are learned.
    pub cost_table: Arc<str>,
}

/// What an engine can do beside generating.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Capabilities {
    /// Kinds of guided answers.
    pub guided: Vec<Arc<str>>,
    /// LoRA adapters by name.
    pub lora: Vec<Arc<str>>,
    /// Log-probabilities of answers.
    pub logprobs: bool,
    /// And of prompts.
    pub prompt_logprobs: bool,
    /// Gives KV away and takes it.
    pub kv_handoff: bool,
    /// A seeded request gives the same ids whatever runs beside it.
    pub batch_invariant: bool,
}

/// A worker's state as it says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WorkerState {
    /// Loading or warming up.
    #[default]
    Starting,
    /// Takes requests.
    Ready,
    /// Takes nothing new, finishes what runs.
    Draining,
    /// The engine is stuck or gone.
    Unhealthy,
}

impl WorkerState {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Starting, Self::Ready, Self::Draining, Self::Unhealthy];

    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// A worker's load.
#[derive(Clone, Debug, Default)]
pub struct Load {
    /// What it takes.
    pub state: WorkerState,
    /// Requests waiting to be started.
    pub waiting_requests: u32,
    /// Requests started.
    pub running_requests: u32,
    /// Prompt tokens not yet computed, of waiting requests.
    pub waiting_prompt_tokens: u64,
    /// And of running ones.
    pub running_prompt_tokens: u64,
    /// Context tokens of all decoding requests.
    pub context_tokens: u64,
    /// KV in all; 0 = as described.
    pub kv_blocks_total: u32,
    /// Held by requests.
    pub kv_blocks_used: u32,
    /// Held only for reuse; given up on demand.
    pub kv_blocks_cached: u32,
    /// Choices in one batch at most; 0 = as described.
    pub slots: u32,
    /// The engine's step count.
    pub iteration: u64,
    /// Steps since the last report; the cost model learns from these.
    pub steps: Vec<StepReport>,
    /// KV that came from other workers since the start, in bytes, and the time that it took.
    pub kv_received_bytes: u64,
    /// In seconds, without what it waited to be computed.
    pub kv_receive_s: f64,
}

/// What one engine step did and what it cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepReport {
    /// Prompt tokens computed.
    pub prefill_tokens: u32,
    /// Pairs of tokens that their attention looked at ([`crate::cost::Shape::chunk_pairs`]); 0 = not said.
    pub prefill_pairs: f64,
    /// Sequences that decoded.
    pub decode_tokens: u32,
    /// Context of those.
    pub context_tokens: u64,
    /// How long it took.
    pub duration_s: f64,
}

/// KV blocks that came or went.
#[derive(Clone, Debug, PartialEq)]
pub enum BlockChange {
    /// These are held now, each the child of the one before it.
    Stored(Vec<u64>),
    /// These are not any more.
    Removed(Vec<u64>),
    /// Nothing is held any more.
    Cleared,
}
