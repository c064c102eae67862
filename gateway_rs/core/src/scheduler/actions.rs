//! What the scheduler wants done: the outputs of `Core::step`, for the driver to carry out in order.
//!
//! Each ask is answered by exactly one [`Action::Granted`] or [`Action::Refused`], unless it was withdrawn or its router
//! lost; at most one [`Action::Waits`] comes before it.

use std::sync::Arc;

use super::{
    events::{Class, LeaseId, Link},
    steps::StepLimits,
};
use crate::{
    credits::{Outlook, Share},
    place::Why,
};

/// Something to do.
#[derive(Clone, Debug)]
pub enum Action {
    /// The ask may run there, under that lease, until a release, the worker's loss or its router's.
    Granted(Box<Grant>),
    /// The ask is in the queue.
    Waits {
        /// The router's stream.
        link: Link,
        /// Its number there.
        ask: u64,
        /// From 1.
        position: u32,
        /// 0 = not known.
        estimate_ms: u32,
    },
    /// The ask will not run.
    Refused(Box<Refusal>),
    /// A request is settled: tell its router when so many entries of the books are done
    /// ([`crate::budgets::Budgets::done_entries`]).
    Settled {
        /// The router's stream.
        link: Link,
        /// The router's number for it.
        number: u64,
        /// So many.
        entries: u64,
    },
    /// The worker is in the fleet.
    Welcomed {
        /// Its stream.
        link: Link,
        /// How often it should report.
        heartbeat_ms: u32,
    },
    /// The worker should report more or less often than before.
    Paced {
        /// Its stream.
        link: Link,
        /// So often.
        heartbeat_ms: u32,
    },
    /// The worker is not taken in: end its stream.
    JoinRefused {
        /// Its stream.
        link: Link,
        /// For people.
        message: String,
        /// This instance is joined already, on another stream.
        already_joined: bool,
    },
    /// The worker is out by the scheduler's decision: end its stream.
    WorkerDropped {
        /// Its stream.
        link: Link,
        /// For people.
        message: String,
    },
    /// The router broke the protocol, or was replaced: end its stream.
    RouterDropped {
        /// Its stream.
        link: Link,
        /// For people.
        message: String,
    },
    /// What routers know of the fleet is no longer true: send them the core's view of it.
    FleetChanged,
    /// A router may have so much running on a worker by its own decision.
    Lent {
        /// The limit.
        share: Share,
        /// What is believed of the worker.
        outlook: Outlook,
    },
    /// What is believed of a worker has changed: for a router that holds a share of it.
    News {
        /// The router's stream.
        link: Link,
        /// The worker's.
        worker: Link,
        /// What is believed now.
        outlook: Outlook,
    },
    /// A worker is gone, and a router's share of it.
    Unlent {
        /// The router's stream.
        link: Link,
        /// The worker's.
        worker: Link,
    },
    /// What the worker may compute in one step.
    SetLimits {
        /// The worker's stream.
        link: Link,
        /// What goes into a step.
        limits: StepLimits,
        /// How many prompt tokens take as long as one pair of tokens in attention.
        pair_tokens: f64,
    },
    /// Let the worker put that request aside, freeing its slot and KV, until it is resumed. It keeps its lease and what it
    /// has said. A worker that has already ended it does nothing.
    Preempt {
        /// The worker's stream.
        link: Link,
        /// The request's lease.
        lease: LeaseId,
    },
    /// Let the worker go on with a request that was put aside.
    Resume {
        /// The worker's stream.
        link: Link,
        /// The request's lease.
        lease: LeaseId,
    },
}

/// An ask may run.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The router's stream.
    pub link: Link,
    /// The ask's number there.
    pub ask: u64,
    /// The right to run.
    pub lease: LeaseId,
    /// The worker's stream.
    pub worker: Link,
    /// Its name.
    pub worker_id: Arc<str>,
    /// Its start.
    pub instance_id: Arc<str>,
    /// host:port of its WorkerService.
    pub address: Arc<str>,
    /// Where it serves.
    pub pool: Arc<str>,
    /// The ask's.
    pub class: Class,
    /// How long it waited here.
    pub queue_s: f64,
    /// From now to the first token, as predicted; None = the model cannot say.
    pub predicted_ttft_s: Option<f64>,
    /// Prompt tokens whose KV the worker is believed to hold.
    pub cached_tokens: u32,
    /// Why there, for people.
    pub why: Why,
    /// Tokens over all choices; 0 = no limit of its own.
    pub token_allowance: u32,
    /// Where its prompt is to be computed, when that is another worker.
    pub prefill: Option<Prefill>,
}

/// A prompt may be computed there for a worker that answers, under a lease of its own, until the first token.
#[derive(Clone, Debug)]
pub struct Prefill {
    /// The right to do so.
    pub lease: LeaseId,
    /// The worker's stream.
    pub worker: Link,
    /// Its name.
    pub worker_id: Arc<str>,
    /// Its start.
    pub instance_id: Arc<str>,
    /// host:port of its WorkerService.
    pub address: Arc<str>,
    /// Of the KV that it gives.
    pub kv_state_tag: Arc<str>,
    /// Why there, for people.
    pub why: Why,
}

/// Why an ask will not run.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The router's stream.
    pub link: Link,
    /// The ask's number there.
    pub ask: u64,
    /// The reason.
    pub reason: Reason,
    /// For people: the limit and the value.
    pub message: String,
    /// The same request may succeed later.
    pub retryable: bool,
    /// When; 0 = no hint.
    pub retry_after_ms: u32,
}

/// The reasons of refusals; each is one of the mesh's error codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The ask makes no sense.
    InvalidArgument,
    /// No worker takes a prompt of that length.
    ContextLengthExceeded,
    /// Nobody serves it now.
    Unavailable,
    /// The queue is full, or no wait could end in time.
    Overloaded,
    /// Its deadline passed.
    DeadlineExceeded,
    /// A limit of its tenant, of which there is room again soon.
    RateLimitExceeded,
    /// A limit of its tenant, of which there is no room soon.
    InsufficientQuota,
}

impl Reason {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid_argument",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::Unavailable => "unavailable",
            Self::Overloaded => "overloaded",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::RateLimitExceeded => "rate_limit_exceeded",
            Self::InsufficientQuota => "insufficient_quota",
        }
    }
}
