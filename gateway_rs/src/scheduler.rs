//! The scheduler behind its wire messages: bytes of requests in, bytes of responses out, for each stream.
//!
//! What decides is [`headrace_core::scheduler`]; what does I/O is `services/headrace/scheduler/service.py`. Between them
//! this turns messages into events and actions into messages, and counts what people want to see. No clock, no sockets.

use std::{
    collections::{hash_map, BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use headrace_core::blocks::Blocks;
use headrace_core::budgets::{Answer, Budgets, Entry, Kept, Limits as SpendingLimits, Prices};
use headrace_core::cost::ModelError;
use headrace_core::credits::{Outlook, Share};
use headrace_core::index::Limits;
use headrace_core::place::Why;
use headrace_core::scheduler::{
    actions::{Action, Grant, Reason, Refusal},
    events::{
        Ask, Books as LeaseBooks, Capabilities, Class, Description, Event, Link, Load, Outcome, Role, RunningLease,
        StepReport, WorkerHello, WorkerState,
    },
    pool::PoolView,
    worker::Worker,
    Core, Measures, Policy, Predictions,
};
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::{block_news, ledger, proto};

/// A core and its streams.
pub struct Scheduler {
    core: Core,
    /// Streams of routers that have said hello.
    routers: BTreeSet<Link>,
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

/// Counted since the start.
#[derive(Default, Serialize)]
struct Counts {
    placements: [u64; 3],
    /// Of those, by routers themselves.
    by_credit: [u64; 3],
    rejections: BTreeMap<&'static str, u64>,
    withdrawals: u64,
    queue_wait: [Histogram; 3],
}

/// Counts of values by bucket, the last one without bound, and their sum.
#[derive(Default, Serialize)]
struct Histogram {
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn observe(&mut self, buckets: &[f64], value: f64) {
        self.counts.resize(buckets.len() + 1, 0);
        let bucket = buckets.partition_point(|&bound| bound < value);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
        self.sum += value;
    }
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
            routers: BTreeSet::new(),
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
        if !step.scheduler.routers.contains(&link) {
            let hello = message.hello.filter(|hello| !hello.router_id.is_empty());
            let hello = hello.ok_or("the first message must have a hello with router_id")?;
            step.scheduler.routers.insert(link);
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
        self.routers.remove(&link);
        self.traced.retain(|(of, _)| *of != link);
        self.named.retain(|(router, _)| *router != link);
        self.acks.forget(link);
        self.one(now_s, Event::RouterLost { link })
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

    /// Figures for metrics, as JSON.
    pub fn stats(&self) -> String {
        let fleet = self.core.fleet();
        let pools = fleet.pools.values().map(|pool| {
            let mut states: BTreeMap<_, u64> = WorkerState::ALL.iter().map(|state| (state.name(), 0)).collect();
            let mut leases: BTreeMap<&str, usize> = BTreeMap::new();
            for worker in pool.workers.iter().filter_map(|link| fleet.workers.get(link)) {
                *states.entry(worker.load.state.name()).or_default() += 1;
                *leases.entry(&worker.hello.worker_id).or_default() += worker.held.len();
            }
            (&*pool.name, PoolStats { states, leases })
        });
        let oddities = self.core.oddities();
        let stats = Stats {
            queued: self.core.queue().depth_by_class(),
            leases: fleet.leases.len(),
            routers: self.core.routers().len(),
            pools: pools.collect(),
            oddities: [
                ("release_unknown", oddities.release_unknown),
                ("release_foreign", oddities.release_foreign),
                ("lease_collision", oddities.lease_collision),
            ]
            .into(),
            ttft: self.core.predictions(),
            steps: (fleet.kinds.errors())
                .map(|(kind, error)| {
                    let ModelError { steps, median, p90 } = error;
                    (kind, StepStats { steps, median, p90 })
                })
                .collect(),
            measures: self.core.measures(),
            books: BooksStats {
                open: self.core.budgets().open(),
                behind: self.core.budgets().behind(),
                parked: self.core.parked(),
            },
            blocks: BlockStats {
                holdings: fleet.blocks().index().holdings(),
                bytes: fleet.blocks().index().bytes(),
                gaps: fleet.blocks().gaps(),
            },
            counts: &self.counts,
        };
        serde_json::to_string(&stats).unwrap_or_default()
    }

    fn one(&mut self, now_s: f64, event: Event) -> Effects {
        let mut step = Step::new(self, now_s);
        step.event(event);
        step.done()
    }
}

#[derive(Serialize)]
struct Stats<'a> {
    queued: [usize; 3],
    leases: usize,
    routers: usize,
    pools: BTreeMap<&'a str, PoolStats<'a>>,
    oddities: BTreeMap<&'static str, u64>,
    ttft: Predictions,
    /// By kind of worker.
    steps: BTreeMap<&'a str, StepStats>,
    measures: Measures,
    books: BooksStats,
    blocks: BlockStats,
    counts: &'a Counts,
}

/// What is known of workers' blocks.
#[derive(Serialize)]
struct BlockStats {
    holdings: usize,
    bytes: usize,
    gaps: u64,
}

/// Bookings that are open, entries that are not durable, and asks that wait for that.
#[derive(Serialize)]
struct BooksStats {
    open: usize,
    behind: usize,
    parked: usize,
}

#[derive(Serialize)]
struct StepStats {
    steps: u64,
    median: f64,
    p90: f64,
}

#[derive(Serialize)]
struct PoolStats<'a> {
    /// Workers by state.
    states: BTreeMap<&'static str, u64>,
    /// Leases by worker.
    leases: BTreeMap<&'a str, usize>,
}

/// One message on its way through the core.
struct Step<'a> {
    scheduler: &'a mut Scheduler,
    now_s: f64,
    actions: Vec<Action>,
    /// Answers for each router, gathered.
    answers: BTreeMap<Link, Vec<u8>>,
    effects: Effects,
}

impl<'a> Step<'a> {
    fn new(scheduler: &'a mut Scheduler, now_s: f64) -> Self {
        Self {
            scheduler,
            now_s,
            actions: Vec::new(),
            answers: BTreeMap::new(),
            effects: Effects::default(),
        }
    }

    /// Begins the span of an ask whose trace is recorded; false when there is none.
    fn began(&mut self, link: Link, ask: &proto::place_request::Ask) -> bool {
        let Some(trace) = ask.trace.as_ref().filter(|trace| is_sampled(&trace.traceparent)) else {
            return false;
        };
        if !self.scheduler.traced.insert((link, ask.ask)) {
            return false;
        }
        self.effects.spans.push(Span::Began {
            link,
            ask: ask.ask,
            request_id: ask.request_id.clone(),
            class: class_of(ask.class).name(),
            prompt_tokens: ask.prompt_tokens,
            traceparent: trace.traceparent.clone(),
            tracestate: trace.tracestate.clone(),
        });
        true
    }

    fn ask(&mut self, link: Link, ask: proto::place_request::Ask) {
        self.began(link, &ask);
        let ask = Box::new(core_ask(self.now_s, ask));
        self.event(Event::Asked { link, ask });
    }

    fn placed(&mut self, link: Link, placed: proto::place_request::Placed) {
        let ask = placed.ask.unwrap_or_default();
        // The question was not asked, but its place in the trace is the same.
        if self.began(link, &ask) {
            self.scheduler.traced.remove(&(link, ask.ask));
            let worker = self.scheduler.core.fleet().workers.get(&placed.worker);
            self.effects.spans.push(Span::Granted {
                link,
                ask: ask.ask,
                worker_id: worker.map_or_else(String::new, |worker| worker.hello.worker_id.to_string()),
                queue_s: 0.0,
            });
        }
        let ask = core_ask(self.now_s, ask);
        let (counts, rank) = (&mut self.scheduler.counts, ask.class.rank());
        counts.placements[rank] += 1;
        counts.by_credit[rank] += 1;
        counts.queue_wait[rank].observe(&self.scheduler.wait_buckets_s, 0.0);
        self.event(Event::Placed {
            link,
            lease: placed.lease,
            worker: placed.worker,
            ask: Box::new(ask),
        });
    }

    /// Tells a router of a worker: a new limit, or only how it is doing.
    fn share(&mut self, router: Link, worker: Link, share: Option<Share>, outlook: Outlook) {
        let room = share.map(|share| share.room).unwrap_or_default();
        let known = self.scheduler.core.fleet().workers.get(&worker);
        let grantor = known.filter(|_| self.scheduler.named.insert((router, worker)));
        self.send_share(
            router,
            &proto::Share {
                number: share.map_or(0, |share| share.number),
                worker,
                choices: room.choices,
                kv_tokens: room.kv_tokens,
                pending_prefill_ms: outlook.pending_prefill_ms as f32,
                prefill_ms_per_token: outlook.cost.token_ms as f32,
                prefill_ms_per_pair: outlook.cost.pair_ms as f32,
                decoding: outlook.decoding,
                waiting: outlook.waiting,
                ahead_ms: outlook.ahead_ms.map(|ahead_ms| ahead_ms as f32),
                grantor: grantor.map(|worker| proto::share::Grantor {
                    worker_id: worker.hello.worker_id.to_string(),
                    instance_id: worker.hello.instance_id.to_string(),
                    address: worker.hello.address.to_string(),
                    pool: worker.hello.pool.to_string(),
                    block_tokens: worker.hello.description.block_tokens,
                }),
                gone: false,
                ask_from_tokens: outlook.ask_from_tokens,
                placed: outlook.placed,
            },
        );
    }

    fn send_share(&mut self, router: Link, share: &proto::Share) {
        // A message is the concatenation of its fields.
        prost::encoding::message::encode(3, share, self.answers.entry(router).or_default());
    }

    fn event(&mut self, event: Event) {
        self.scheduler.core.step(self.now_s, event, &mut self.actions);
        let mut actions = std::mem::take(&mut self.actions);
        for action in actions.drain(..) {
            self.action(action);
        }
        self.actions = actions;
    }

    fn action(&mut self, action: Action) {
        match action {
            Action::Granted(grant) => self.granted(&grant),
            Action::Refused(refusal) => self.refused(*refusal),
            Action::Waits {
                link,
                ask,
                position,
                estimate_ms,
            } => {
                let queued = proto::Queued { position, estimate_ms };
                self.answer(link, ask, proto::placement::Answer::Queued(queued));
            }
            Action::Lent { share, outlook } => self.share(share.router, share.worker, Some(share), outlook),
            Action::News { link, worker, outlook } => self.share(link, worker, None, outlook),
            Action::Unlent { link, worker } => {
                if !self.scheduler.named.remove(&(link, worker)) {
                    return;
                }
                let gone = proto::Share {
                    worker,
                    gone: true,
                    ..proto::Share::default()
                };
                self.send_share(link, &gone);
            }
            Action::FleetChanged => self.effects.fleet_changed = true,
            Action::Welcomed { link, heartbeat_ms } => {
                let name = self.worker_name(link);
                self.effects.notes.push(format!("{name} joins"));
                self.command(
                    link,
                    proto::join_response::Command::Welcome(proto::JoinWelcome { heartbeat_ms }),
                );
            }
            Action::Paced { link, heartbeat_ms } => {
                let pace = proto::SetHeartbeat { heartbeat_ms };
                self.command(link, proto::join_response::Command::SetHeartbeat(pace));
            }
            Action::SetChunk {
                link,
                chunk_tokens,
                pair_tokens,
            } => {
                let limits = proto::SetLimits {
                    chunk_tokens: Some(chunk_tokens),
                    slots: None,
                    pair_tokens: pair_tokens as f32,
                };
                self.command(link, proto::join_response::Command::SetLimits(limits));
            }
            Action::Settled { link, number, entries } => self.scheduler.acks.add(link, number, entries),
            Action::Preempt { link, lease } => {
                self.command(link, proto::join_response::Command::Preempt(proto::Preempt { lease }));
            }
            Action::Resume { link, lease } => {
                self.command(link, proto::join_response::Command::Resume(proto::Resume { lease }));
            }
            Action::JoinRefused {
                link,
                message,
                already_joined,
            } => {
                let status = if already_joined {
                    Status::AlreadyExists
                } else {
                    Status::InvalidArgument
                };
                self.end(link, status, message);
            }
            Action::WorkerDropped { link, message } => self.end(link, Status::Unavailable, message),
            Action::RouterDropped { link, message } => self.end(link, Status::InvalidArgument, message),
        }
    }

    fn granted(&mut self, grant: &Grant) {
        let (link, ask, rank) = (grant.link, grant.ask, grant.class.rank());
        let scheduler = &mut *self.scheduler;
        scheduler.counts.placements[rank] += 1;
        scheduler.counts.queue_wait[rank].observe(&scheduler.wait_buckets_s, grant.queue_s);
        if scheduler.traced.remove(&(link, ask)) {
            self.effects.spans.push(Span::Granted {
                link,
                ask,
                worker_id: grant.worker_id.to_string(),
                queue_s: grant.queue_s,
            });
        }
        let answer = proto::Grant {
            lease: grant.lease,
            worker_id: grant.worker_id.to_string(),
            instance_id: grant.instance_id.to_string(),
            address: grant.address.to_string(),
            token_allowance: grant.token_allowance,
            queue_s: grant.queue_s as f32,
            reason: Some(grant.why.into()),
            pool: grant.pool.to_string(),
            prefill: grant.prefill.as_ref().map(|prefill| proto::grant::Prefill {
                lease: prefill.lease,
                worker_id: prefill.worker_id.to_string(),
                instance_id: prefill.instance_id.to_string(),
                address: prefill.address.to_string(),
                kv_state_tag: prefill.kv_state_tag.to_string(),
                reason: Some(prefill.why.into()),
            }),
        };
        self.answer(link, ask, proto::placement::Answer::Grant(answer));
    }

    fn refused(&mut self, refusal: Refusal) {
        let (link, ask, reason) = (refusal.link, refusal.ask, refusal.reason.name());
        *self.scheduler.counts.rejections.entry(reason).or_default() += 1;
        if self.scheduler.traced.remove(&(link, ask)) {
            self.effects.spans.push(Span::Rejected { link, ask, reason });
        }
        let answer = proto::Error {
            code: code(refusal.reason) as i32,
            message: refusal.message,
            retryable: refusal.retryable,
            retry_after_ms: refusal.retry_after_ms,
            param: String::new(),
        };
        self.answer(link, ask, proto::placement::Answer::Rejected(answer));
    }

    fn answer(&mut self, link: Link, ask: u64, answer: proto::placement::Answer) {
        let placement = proto::Placement {
            ask,
            answer: Some(answer),
        };
        // A message is the concatenation of its fields.
        prost::encoding::message::encode(1, &placement, self.answers.entry(link).or_default());
    }

    fn command(&mut self, link: Link, command: proto::join_response::Command) {
        let message = proto::JoinResponse { command: Some(command) };
        self.effects.sends.push((link, message.encode_to_vec()));
    }

    fn end(&mut self, link: Link, status: Status, message: String) {
        let name = self.worker_name(link);
        self.effects.notes.push(format!("{name}: {message}"));
        self.effects.ends.push(End { link, status, message });
    }

    fn worker_name(&self, link: Link) -> String {
        let stream = self.scheduler.workers.get(&link);
        stream.map_or_else(|| format!("router stream {link}"), |stream| stream.name.clone())
    }

    fn done(mut self) -> Effects {
        let budgets = self.scheduler.core.budgets();
        self.effects.ledger = budgets.behind() > 0;
        for (link, number) in self.scheduler.acks.due(budgets.done_entries()) {
            prost::encoding::uint64::encode(4, &number, self.answers.entry(link).or_default());
        }
        self.effects.sends.extend(self.answers);
        self.effects
    }
}

/// Whether a W3C traceparent says that its trace is recorded.
fn is_sampled(traceparent: &str) -> bool {
    let flags = traceparent
        .split('-')
        .nth(3)
        .and_then(|flags| u8::from_str_radix(flags, 16).ok());
    flags.is_some_and(|flags| flags & 1 == 1)
}

// Messages to values.

pub(crate) fn class_of(class: i32) -> Class {
    match proto::RequestClass::try_from(class) {
        Ok(proto::RequestClass::Interactive) => Class::Interactive,
        Ok(proto::RequestClass::Batch) => Class::Batch,
        _ => Class::Standard,
    }
}

fn texts(from: Vec<String>) -> Vec<Arc<str>> {
    from.into_iter().map(Arc::from).collect()
}

fn seconds(ms: u32) -> f64 {
    f64::from(ms) / 1000.0
}

fn core_ask(now_s: f64, ask: proto::place_request::Ask) -> Ask {
    Ask {
        number: ask.ask,
        request_id: ask.request_id.into(),
        // What only measures quality is nobody's to pay.
        tenant: if ask.shadow { "".into() } else { ask.tenant.into() },
        class: class_of(ask.class),
        pools: texts(ask.pools),
        prompt_tokens: ask.prompt_tokens,
        block_hashes: ask.block_hashes,
        max_tokens: ask.max_tokens,
        choices: ask.n.max(1),
        expected_output_tokens: ask.expected_output_tokens,
        deadline_s: ask.time_left_ms.map(|left_ms| now_s + seconds(left_ms)),
        arrived_s: Some(now_s - seconds(ask.spent_ms)),
        ttft_target_s: ask.ttft_target_ms.map(seconds),
        tpot_target_s: ask.tpot_target_ms.map(seconds),
        avoid_instances: texts(ask.avoid_instances),
        session_id: ask.session_id.into(),
        epoch: ask.epoch,
        booking: ask.booking,
        alias: ask.alias.into(),
        committed_tokens: ask.committed_tokens,
        may_part: ask.may_part,
    }
}

fn running_lease(running: proto::router_hello::RunningLease) -> RunningLease {
    RunningLease {
        lease: running.lease,
        instance_id: running.instance_id.into(),
        request_id: running.request_id.into(),
        tenant: running.tenant.into(),
        prompt_tokens: running.prompt_tokens,
        max_tokens: running.max_tokens,
        booking: running.booking,
    }
}

fn books(release: &proto::Release) -> LeaseBooks {
    let usage = release.usage.unwrap_or_default();
    LeaseBooks {
        outcome: match release.outcome() {
            proto::Outcome::Stop | proto::Outcome::ToolCalls => Outcome::Stop,
            proto::Outcome::Length => Outcome::Length,
            _ => Outcome::Cut,
        },
        prompt_tokens: usage.prompt_tokens,
        cached_prompt_tokens: usage.cached_prompt_tokens,
        completion_tokens: usage.completion_tokens,
        kv_block_s: release.kv_block_s.into(),
        ttft_s: release.ttft_s.into(),
        decode_s: release.decode_s.into(),
    }
}

fn worker_hello(hello: proto::JoinHello) -> WorkerHello {
    let role = match hello.role() {
        proto::WorkerRole::Prefill => Role::Prefill,
        proto::WorkerRole::Decode => Role::Decode,
        proto::WorkerRole::Unspecified => Role::Both,
    };
    WorkerHello {
        role,
        kv_token_bytes: hello.kv_token_bytes,
        worker_id: hello.worker_id.into(),
        instance_id: hello.instance_id.into(),
        pool: hello.pool.into(),
        address: hello.address.into(),
        description: description(hello.description.unwrap_or_default()),
        startup_s: hello.startup_s.into(),
    }
}

fn description(from: proto::ModelDescription) -> Description {
    let capabilities = from.capabilities.unwrap_or_default();
    Description {
        model: from.model.into(),
        engine: from.engine.into(),
        engine_version: from.engine_version.into(),
        weights_sha256: from.weights_sha256.into(),
        quantization: from.quantization.into(),
        tokenizer_sha256: from.tokenizer_sha256.into(),
        template_sha256: from.template_sha256.into(),
        vocab_size: from.vocab_size,
        context_tokens: from.context_tokens,
        eos_ids: from.eos_ids,
        block_tokens: from.block_tokens,
        kv_blocks: from.kv_blocks,
        slots: from.slots,
        capabilities: Capabilities {
            guided: texts(capabilities.guided),
            lora: texts(capabilities.lora),
            logprobs: capabilities.logprobs,
            prompt_logprobs: capabilities.prompt_logprobs,
            kv_handoff: capabilities.kv_handoff,
            batch_invariant: capabilities.batch_invariant,
        },
        kv_state_tag: from.kv_state_tag.into(),
        cost_table: from.cost_table.into(),
    }
}

fn core_load(load: &proto::Load, steps: &[proto::StepReport]) -> Load {
    Load {
        state: match load.state() {
            proto::WorkerState::Ready => WorkerState::Ready,
            proto::WorkerState::Draining => WorkerState::Draining,
            proto::WorkerState::Unhealthy => WorkerState::Unhealthy,
            proto::WorkerState::Starting | proto::WorkerState::Unspecified => WorkerState::Starting,
        },
        waiting_requests: load.waiting_requests,
        running_requests: load.running_requests,
        waiting_prompt_tokens: load.waiting_prompt_tokens,
        running_prompt_tokens: load.running_prompt_tokens,
        context_tokens: load.context_tokens,
        kv_blocks_total: load.kv_blocks_total,
        kv_blocks_used: load.kv_blocks_used,
        kv_blocks_cached: load.kv_blocks_cached,
        slots: load.slots,
        iteration: load.iteration,
        steps: steps.iter().map(step_report).collect(),
        kv_received_bytes: load.kv_received_bytes_total,
        kv_receive_s: load.kv_receive_s_total,
    }
}

fn step_report(step: &proto::StepReport) -> StepReport {
    StepReport {
        prefill_tokens: step.prefill_tokens,
        prefill_pairs: step.prefill_pairs,
        decode_tokens: step.decode_tokens,
        context_tokens: step.context_tokens,
        duration_s: f64::from(step.duration_us) / 1e6,
    }
}

// Values to messages.

impl From<Why> for proto::PlacementReason {
    fn from(why: Why) -> Self {
        Self {
            hit_tokens: why.hit_tokens,
            prefill_ms: why.prefill_ms as f32,
            pending_prefill_ms: why.pending_prefill_ms as f32,
            decoding: why.decoding,
            waiting: why.waiting,
            score: why.score as f32,
        }
    }
}

fn code(reason: Reason) -> proto::ErrorCode {
    match reason {
        Reason::InvalidArgument => proto::ErrorCode::InvalidArgument,
        Reason::ContextLengthExceeded => proto::ErrorCode::ContextLengthExceeded,
        Reason::Unavailable => proto::ErrorCode::Unavailable,
        Reason::Overloaded => proto::ErrorCode::Overloaded,
        Reason::DeadlineExceeded => proto::ErrorCode::DeadlineExceeded,
        Reason::RateLimitExceeded => proto::ErrorCode::RateLimitExceeded,
        Reason::InsufficientQuota => proto::ErrorCode::InsufficientQuota,
    }
}

fn strings(from: &[Arc<str>]) -> Vec<String> {
    from.iter().map(ToString::to_string).collect()
}

fn pool_view(view: &PoolView) -> proto::fleet_view::Pool {
    let described = &view.description;
    let able = &described.capabilities;
    proto::fleet_view::Pool {
        name: view.name.to_string(),
        description: Some(proto::ModelDescription {
            model: described.model.to_string(),
            engine: described.engine.to_string(),
            engine_version: described.engine_version.to_string(),
            weights_sha256: described.weights_sha256.to_string(),
            quantization: described.quantization.to_string(),
            tokenizer_sha256: described.tokenizer_sha256.to_string(),
            template_sha256: described.template_sha256.to_string(),
            vocab_size: described.vocab_size,
            context_tokens: described.context_tokens,
            eos_ids: described.eos_ids.clone(),
            block_tokens: described.block_tokens,
            kv_blocks: described.kv_blocks,
            slots: described.slots,
            capabilities: Some(proto::Capabilities {
                guided: strings(&able.guided),
                logprobs: able.logprobs,
                prompt_logprobs: able.prompt_logprobs,
                lora: strings(&able.lora),
                kv_handoff: able.kv_handoff,
                batch_invariant: able.batch_invariant,
            }),
            kv_state_tag: described.kv_state_tag.to_string(),
            cost_table: described.cost_table.to_string(),
        }),
        ready_workers: view.ready_workers as u32,
        workers: view.workers as u32,
        addresses: strings(&view.addresses),
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

    #[test]
    fn only_recorded_traces_have_spans() {
        for (traceparent, sampled) in [
            ("00-11111111111111111111111111111111-2222222222222222-01", true),
            ("00-11111111111111111111111111111111-2222222222222222-00", false),
            ("", false),
            ("nonsense", false),
        ] {
            assert_eq!(is_sampled(traceparent), sampled, "{traceparent}");
        }
    }

    #[test]
    fn values_are_counted_up_to_their_bounds() {
        let mut histogram = Histogram::default();
        for value in [0.05, 0.1, 0.5, 2.0] {
            histogram.observe(&[0.1, 1.0], value);
        }
        assert_eq!(histogram.counts, [2, 1, 1]);
    }
}
