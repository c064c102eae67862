//! The scheduler behind its wire messages: bytes of requests in, bytes of responses out, for each stream.
//!
//! What decides is [`headrace_core::scheduler`]; what does I/O is `services/headrace/scheduler/service.py`. Between them
//! this turns messages into events and actions into messages (`step.rs`, `wire.rs`), and counts what people want to see
//! (`stats.rs`). No clock, no sockets.

mod stats;
mod step;
mod wire;

use std::{
    collections::{btree_map, hash_map, BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use headrace_core::blocks::Blocks;
use headrace_core::budgets::{Answer, Budgets, Entry, Kept, Limits as SpendingLimits, Prices};
use headrace_core::index::Limits;
use headrace_core::scheduler::{
    events::{Event, Link},
    worker::Worker,
    Core, Policy,
};
use prost::Message;
use serde::Deserialize;

pub(crate) use self::wire::class_of;
use self::{
    stats::Counts,
    step::Step,
    wire::{books, core_load, pool_view, running_lease, worker_hello},
};
use crate::{block_news, ledger, proto};

/// A core and its streams.
pub struct Scheduler {
    core: Core,
    /// Streams of routers that have said hello, with their ids.
    routers: BTreeMap<Link, String>,
    workers: HashMap<Link, WorkerStream>,
    /// Asks whose trace is recorded, while they are unanswered.
    traced: BTreeSet<(Link, u64)>,
    /// Workers that a router has been told of, on its stream.
    named: BTreeSet<(Link, Link)>,
    /// What routers have settled and have not been told to be durable.
    acks: ledger::Acks,
    counts: Counts,
    wait_buckets_s: Vec<f64>,
    /// The fleet as routers are told, and which version of it.
    view: Option<(u64, Vec<u8>)>,
}

/// A worker's stream that has said hello.
struct WorkerStream {
    name: String,
    /// As it came, for people.
    load: proto::Load,
}

/// What a message, or time, led to. To be carried out in this order: `spans`, `sends`, then the rest.
#[derive(Default)]
pub struct Effects {
    /// Whole messages to a stream each; those to a router may be concatenated.
    pub sends: Vec<(Link, Vec<u8>)>,
    /// All routers are owed [`Scheduler::fleet_view`].
    pub fleet_changed: bool,
    /// Streams to be ended after what was sent.
    pub ends: Vec<End>,
    /// Asks whose trace is recorded: what began and what ended, in order.
    pub spans: Vec<Span>,
    /// For the log.
    pub notes: Vec<String>,
    /// The ledger has something to do: [`Scheduler::ledger_take`].
    pub ledger: bool,
}

/// How the books are kept.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Books {
    /// There is a ledger.
    keeps: bool,
    /// Limits are drawn from a store that other schedulers use too.
    shared: bool,
    /// Unix time, less the caller's.
    unix_offset_s: f64,
    /// Dollars for an hour of a worker.
    worker_hour: f64,
    /// The same, by pool.
    worker_hours: BTreeMap<String, f64>,
    /// Seconds for a token of a prompt and of an answer, as measured before this start, by pool.
    measured: BTreeMap<String, (f64, f64)>,
}

/// What a tenant may spend, and its share.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantSettings {
    limits: SpendingLimits,
    weight: f64,
}

/// A stream to be ended.
pub struct End {
    /// Which.
    pub link: Link,
    /// How.
    pub status: Status,
    /// Why, for people.
    pub message: String,
}

/// The status that a stream ends with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// The peer's mistake.
    InvalidArgument,
    /// This instance has joined.
    AlreadyExists,
    /// The scheduler's decision.
    Unavailable,
}

/// The span of an ask, from its arrival to its answer.
pub enum Span {
    /// It came.
    Began {
        /// The router's stream.
        link: Link,
        /// Its number there.
        ask: u64,
        /// For people.
        request_id: String,
        /// Its class.
        class: &'static str,
        /// Length of its prompt.
        prompt_tokens: u32,
        /// The router's span.
        traceparent: String,
        /// And what travels with it.
        tracestate: String,
    },
    /// It was granted.
    Granted {
        /// The router's stream.
        link: Link,
        /// Its number there.
        ask: u64,
        /// Where.
        worker_id: String,
        /// How long it waited.
        queue_s: f64,
    },
    /// It was refused, for that reason.
    Rejected {
        /// The router's stream.
        link: Link,
        /// Its number there.
        ask: u64,
        /// Why.
        reason: &'static str,
    },
    /// Its client left.
    Withdrawn {
        /// The router's stream.
        link: Link,
        /// Its number there.
        ask: u64,
    },
}

impl Scheduler {
    /// A scheduler that knows nobody; see [`Core::new`]. `wait_buckets_s`: bounds for the histogram of waits, ascending.
    /// `limits`: for what is known of workers' blocks.
    pub fn new(
        policy: Policy,
        wait_buckets_s: Vec<f64>,
        seed: u64,
        now_s: f64,
        first_lease: u64,
        limits: Limits,
    ) -> Self {
        let mut core = Core::new(policy, seed, now_s, first_lease);
        *core.blocks_mut() = Blocks::new(limits, seed);
        Self {
            core,
            routers: BTreeMap::new(),
            workers: HashMap::new(),
            traced: BTreeSet::new(),
            named: BTreeSet::new(),
            acks: ledger::Acks::default(),
            counts: Counts::default(),
            wait_buckets_s,
            view: None,
        }
    }

    /// A message of a router's stream. Errors: why the stream must end, for people.
    pub fn router_message(&mut self, now_s: f64, link: Link, message: &[u8]) -> Result<Effects, String> {
        let message = proto::PlaceRequest::decode(message).map_err(|error| format!("not a PlaceRequest: {error}"))?;
        let mut step = Step::new(self, now_s);
        if let btree_map::Entry::Vacant(newcomer) = step.scheduler.routers.entry(link) {
            let hello = message.hello.filter(|hello| !hello.router_id.is_empty());
            let hello = hello.ok_or("the first message must have a hello with router_id")?;
            newcomer.insert(hello.router_id.clone());
            let running: Vec<_> = hello.running.into_iter().map(running_lease).collect();
            let note = format!(
                "router {} joins, with {} running leases",
                hello.router_id,
                running.len()
            );
            step.effects.notes.push(note);
            let fleet = step.scheduler.fleet_view();
            step.effects.sends.push((link, fleet));
            step.event(Event::RouterJoined {
                link,
                router_id: hello.router_id.into(),
                running,
                bookings: hello.bookings,
            });
        }
        for progress in message.progress {
            step.event(Event::Progressed {
                link,
                lease: progress.lease,
                output_tokens: progress.output_tokens,
            });
        }
        // What it has placed comes before what it has ended, and before what it knows.
        for placed in message.placed {
            step.placed(link, placed);
        }
        if message.shares_known > 0 {
            step.event(Event::KnowsShares {
                link,
                number: message.shares_known,
            });
        }
        // Releases before asks: they make room for them. Withdrawals last: one may be of an ask in this very message.
        for release in message.releases {
            step.event(Event::Released {
                link,
                lease: release.lease,
                books: books(&release),
            });
        }
        // Settlements make room as well; and what has been settled is asked no more.
        for settlement in message.settlements {
            step.event(Event::Settled {
                link,
                number: settlement.number,
                settlement: Box::new(ledger::settlement(settlement)),
            });
        }
        for ask in message.asks {
            step.ask(link, ask);
        }
        for ask in message.withdrawals {
            if step.scheduler.core.queue().find(link, ask).is_some() {
                step.scheduler.counts.withdrawals += 1;
            }
            if step.scheduler.traced.remove(&(link, ask)) {
                step.effects.spans.push(Span::Withdrawn { link, ask });
            }
            step.event(Event::Withdrawn { link, ask });
        }
        Ok(step.done())
    }

    /// A router's stream has ended.
    pub fn router_lost(&mut self, now_s: f64, link: Link) -> Effects {
        self.traced.retain(|(of, _)| *of != link);
        self.named.retain(|(router, _)| *router != link);
        self.acks.forget(link);
        let mut effects = self.one(now_s, Event::RouterLost { link });
        if let Some(name) = self.routers.remove(&link) {
            effects.notes.push(format!("router {name} is out"));
        }
        effects
    }

    /// A message of a worker's stream. Errors: why the stream must end, for people.
    pub fn worker_message(&mut self, now_s: f64, link: Link, message: &[u8]) -> Result<Effects, String> {
        let message = proto::JoinRequest::decode(message).map_err(|error| format!("not a JoinRequest: {error}"))?;
        let mut step = Step::new(self, now_s);
        if let hash_map::Entry::Vacant(entry) = step.scheduler.workers.entry(link) {
            let hello = message.hello.ok_or("the first message must have a hello")?;
            let name = format!(
                "worker {} (instance {}, pool {}, {})",
                hello.worker_id, hello.instance_id, hello.pool, hello.address
            );
            let load = proto::Load::default();
            entry.insert(WorkerStream { name, load });
            step.event(Event::WorkerJoined {
                link,
                hello: Box::new(worker_hello(hello)),
            });
        }
        for orphan in message.orphans {
            let usage = orphan.usage.unwrap_or_default();
            step.event(Event::Orphaned {
                booking: orphan.booking,
                output_tokens: usage.completion_tokens,
                cached_tokens: usage.cached_prompt_tokens,
            });
        }
        if let Some(mut load) = message.load {
            let steps = std::mem::take(&mut load.steps);
            let event = Event::WorkerReported {
                link,
                load: Box::new(core_load(&load, &steps)),
            };
            if let Some(stream) = step.scheduler.workers.get_mut(&link) {
                stream.load = load;
            }
            step.event(event);
        }
        Ok(step.done())
    }

    /// A worker's stream has ended.
    pub fn worker_lost(&mut self, now_s: f64, link: Link) -> Effects {
        let mut effects = self.one(now_s, Event::WorkerLost { link });
        if let Some(stream) = self.workers.remove(&link) {
            effects.notes.push(format!("{} is out", stream.name));
        }
        effects
    }

    /// Opens the books, before anything happens, with what an earlier start kept.
    pub fn open_books(&mut self, now_s: f64, books: Books, tenants: BTreeMap<String, TenantSettings>, kept: Vec<Kept>) {
        let mut prices = Prices::new(books.worker_hour, books.worker_hours);
        for (pool, (prompt_s, output_s)) in &books.measured {
            prices.restore(pool, *prompt_s, *output_s);
        }
        let budgets = Budgets::new(books.keeps, books.shared, books.unix_offset_s);
        self.core.set_books(budgets, prices);
        self.set_tenants(now_s, tenants);
        self.core.restore(now_s, kept);
    }

    /// What tenants may spend, and their shares.
    pub fn set_tenants(&mut self, now_s: f64, tenants: BTreeMap<String, TenantSettings>) {
        let names = tenants.into_iter().map(|(name, each)| (Arc::<str>::from(name), each));
        let (mut limits, mut weights) = (Vec::new(), Vec::new());
        for (name, each) in names {
            limits.push((name.clone(), each.limits));
            weights.push((name, each.weight));
        }
        self.core.set_tenants(now_s, limits, weights);
    }

    /// What the ledger has to do next, in order; when all of it is durable, [`Self::ledger_done`].
    pub fn ledger_take(&mut self, most: usize) -> Vec<Entry> {
        self.core.budgets_mut().take(most).iter().cloned().collect()
    }

    /// It is.
    pub fn ledger_done(&mut self, now_s: f64, answers: Vec<Answer>) -> Effects {
        self.one(now_s, Event::LedgerDone { answers })
    }

    /// Seconds for a token of a prompt and of an answer, by pool, as measured.
    pub fn measured(&self) -> BTreeMap<String, (f64, f64)> {
        let measured = self.core.prices().measured();
        measured.map(|(pool, token_s)| (pool.to_string(), token_s)).collect()
    }

    /// The first message of a stream that follows the cache's block news.
    pub fn blocks_known(&self) -> Vec<u8> {
        block_news::known(self.core.fleet().blocks()).encode_to_vec()
    }

    /// A message of that stream; what to send back when something was missing. Errors: why the stream must end.
    pub fn blocks_message(&mut self, message: &[u8]) -> Result<Option<Vec<u8>>, String> {
        let message = proto::WatchBlocksResponse::decode(message)
            .map_err(|error| format!("not a WatchBlocksResponse: {error}"))?;
        let lost = block_news::receive(message, |work| work(self.core.blocks_mut()));
        Ok(lost.map(|lost| lost.encode_to_vec()))
    }

    /// The cache has been away for long.
    pub fn blocks_away(&mut self) {
        self.core.blocks_mut().lose_all();
    }

    /// Time has passed.
    pub fn tick(&mut self, now_s: f64) -> Effects {
        self.one(now_s, Event::Tick)
    }

    /// When to tick at the latest.
    pub fn next_wakeup(&self) -> Option<f64> {
        self.core.next_wakeup()
    }

    /// What routers are told of the fleet as it is now: a whole message.
    pub fn fleet_view(&mut self) -> Vec<u8> {
        let fleet = self.core.fleet();
        match &self.view {
            Some((version, bytes)) if *version == fleet.version => bytes.clone(),
            _ => {
                let view = proto::FleetView {
                    pools: fleet.view().iter().map(pool_view).collect(),
                };
                let message = proto::PlaceResponse {
                    fleet: Some(view),
                    ..proto::PlaceResponse::default()
                };
                let bytes = message.encode_to_vec();
                self.view = Some((fleet.version, bytes.clone()));
                bytes
            }
        }
    }

    /// The fleet as believed, for people: a `GetFleetResponse`.
    pub fn fleet(&self, now_s: f64) -> Vec<u8> {
        let fleet = self.core.fleet();
        let worker = |worker: &Worker| proto::get_fleet_response::Worker {
            worker_id: worker.hello.worker_id.to_string(),
            instance_id: worker.hello.instance_id.to_string(),
            pool: worker.hello.pool.to_string(),
            address: worker.hello.address.to_string(),
            load: self.workers.get(&worker.link).map(|stream| stream.load.clone()),
            leases: worker.held.len() as u32,
            leased_tokens: worker.held.kv_tokens(),
            silent_s: (now_s - worker.heard_s).max(0.0) as f32,
        };
        let message = proto::GetFleetResponse {
            workers: fleet.workers.values().map(worker).collect(),
            queued_asks: self.core.queue().len() as u32,
            routers: self.core.routers().len() as u32,
            leases: fleet.leases.len() as u32,
        };
        message.encode_to_vec()
    }

    fn one(&mut self, now_s: f64, event: Event) -> Effects {
        let mut step = Step::new(self, now_s);
        step.event(event);
        step.done()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn scheduler() -> Scheduler {
        Scheduler::new(Policy::default(), vec![0.1, 1.0], 1, 0.0, 1, Limits::default())
    }

    fn hello() -> proto::PlaceRequest {
        proto::PlaceRequest {
            hello: Some(proto::RouterHello {
                router_id: "r".into(),
                ..proto::RouterHello::default()
            }),
            ..proto::PlaceRequest::default()
        }
    }

    fn asks(numbers: std::ops::Range<u64>) -> proto::PlaceRequest {
        let ask = |ask| proto::place_request::Ask {
            ask,
            pools: vec!["p".into()],
            prompt_tokens: 5,
            ..proto::place_request::Ask::default()
        };
        proto::PlaceRequest {
            asks: numbers.map(ask).collect(),
            ..proto::PlaceRequest::default()
        }
    }

    fn worker(slots: u32) -> proto::JoinRequest {
        proto::JoinRequest {
            hello: Some(proto::JoinHello {
                worker_id: "w".into(),
                instance_id: "i".into(),
                pool: "p".into(),
                address: "w:1".into(),
                description: Some(proto::ModelDescription {
                    slots,
                    ..proto::ModelDescription::default()
                }),
                ..proto::JoinHello::default()
            }),
            load: Some(proto::Load {
                state: proto::WorkerState::Ready as i32,
                ..proto::Load::default()
            }),
            orphans: Vec::new(),
        }
    }

    #[test]
    fn the_answers_to_one_message_are_one_message() {
        let mut scheduler = scheduler();
        scheduler.worker_message(0.0, 1, &worker(4).encode_to_vec()).unwrap();
        scheduler.router_message(0.0, 2, &hello().encode_to_vec()).unwrap();
        let effects = scheduler.router_message(0.0, 2, &asks(0..8).encode_to_vec()).unwrap();
        let [(2, bytes)] = &effects.sends[..] else {
            unreachable!("{:?}", effects.sends);
        };
        let response = proto::PlaceResponse::decode(&bytes[..]).unwrap();
        let kinds = response.placements.iter().map(|placement| match placement.answer {
            Some(proto::placement::Answer::Grant(_)) => "grant",
            Some(proto::placement::Answer::Queued(_)) => "queued",
            _ => "other",
        });
        let expected = ["grant"; 5].into_iter().chain(["queued"; 3]);
        assert!(kinds.eq(expected));
    }

    #[test]
    fn what_cannot_be_understood_ends_the_stream() {
        let mut scheduler = scheduler();
        assert!(scheduler.router_message(0.0, 1, &asks(0..1).encode_to_vec()).is_err());
        assert!(scheduler.router_message(0.0, 1, b"\xff").is_err());
        assert!(scheduler.worker_message(0.0, 2, b"").is_err());
    }
}
