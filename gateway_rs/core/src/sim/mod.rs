//! Discrete-event simulation of a mesh: workloads, workers, and the scheduler that serves live ones.
//!
//! A [`run`] keeps the clock. It asks the scheduler for each request as a router would, or lets the router place it within
//! what it was lent, hands granted ones to simulated workers, and tells the scheduler what workers and routers would tell
//! it, as late as configured. Every draw comes from the run's seed: the same configuration, workload and seed give the same
//! outcome to the last bit.

pub mod engine;
pub mod kv;
pub mod outcome;
pub mod router;
pub mod settings;
pub mod workload;

use std::cmp::Ordering;
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::Arc;

use ahash::{HashMap, HashMapExt};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use self::engine::{Engine, EngineConfig, Job, Said};
use self::outcome::{Fate, Outcome, Record};
use self::router::Router;
use self::workload::Workload;
use crate::cost::CostModel;
use crate::credits::Grantor;
use crate::scheduler::actions::{Action, Grant};
use crate::scheduler::events::{
    Ask, BlockChange, Books, Capabilities, Class, Description, Event, LeaseId, Link, Load, Outcome as Ending, Role,
    WorkerHello, WorkerState,
};
use crate::scheduler::Core;

/// Workers that are alike.
#[derive(Clone, Debug)]
pub struct Group {
    /// Their pool.
    pub pool: Arc<str>,
    /// How many.
    pub workers: u32,
    /// Of these, the first so many are for prompts only.
    pub prefill_workers: u32,
    /// KV of one token, and what a worker's network carries, in bytes.
    pub kv_token_bytes: u32,
    /// In a second.
    pub network_bytes_per_s: f64,
    /// How they run.
    pub engine: EngineConfig,
}

/// A worker is lost, and comes back empty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// When.
    pub at_s: f64,
    /// Which, over all groups.
    pub worker: u32,
    /// For how long.
    pub down_s: f64,
}

/// How a workload is run.
#[derive(Clone, Debug)]
pub struct Config {
    /// Who serves.
    pub groups: Vec<Group>,
    /// Routers; each request comes to one of them by lot.
    pub routers: u32,
    /// What a message takes between a router and the scheduler.
    pub router_delay_s: f64,
    /// Arrivals come so many times as fast as in the workload.
    pub speed: f64,
    /// A turn of a conversation comes when the one before is answered, after the workload's own pause.
    pub closed_loop: bool,
    /// Mean age of what the scheduler knows from workers; 0 = exact.
    pub staleness_s: f64,
    /// The first token is due after this.
    pub ttft_target_s: f64,
    /// Or after so many times what the prompt takes on an idle, empty worker, if that is longer.
    pub ttft_times_alone: f64,
    /// Between tokens.
    pub tpot_target_s: f64,
    /// Standard deviation of the logarithm of expected over true answer lengths; None = nobody knows lengths.
    pub length_sigma: Option<f64>,
    /// Workers lost.
    pub faults: Vec<Fault>,
    /// Draws arrivals and all else.
    pub seed: u64,
}

/// How long a router waits before it asks again for a request whose worker was lost.
const RETRY_S: f64 = 0.01;

/// The first router's stream.
const FIRST_ROUTER: Link = 1;

#[derive(Debug)]
enum What {
    Arrive(u32),
    Ask(u32),
    StepEnds {
        worker: u32,
        version: u64,
    },
    Report {
        worker: u32,
        instance: u64,
    },
    Deliver {
        worker: u32,
        instance: u64,
        events: Vec<Event>,
    },
    /// A router says something to the scheduler.
    Tell(Box<Event>),
    /// And the scheduler to a router; of whom it lends something, where that is news.
    Hear {
        router: u32,
        action: Box<Action>,
        grantor: Option<Grantor>,
    },
    /// The KV of a request has come to who answers it.
    Arrived {
        request: u32,
        epoch: u32,
    },
    Fail(u32),
    Restart(u32),
    Wake,
}

struct Timed {
    at_s: f64,
    order: u64,
    what: What,
}

impl PartialEq for Timed {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Timed {}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timed {
    fn cmp(&self, other: &Self) -> Ordering {
        // A heap gives the largest: the earliest, and of those the first that was planned.
        other.at_s.total_cmp(&self.at_s).then(other.order.cmp(&self.order))
    }
}

struct Worker {
    engine: Engine,
    group: usize,
    /// Its stream; 0 = it is down.
    link: Link,
    instance: u64,
    /// What was planned for its engine before is void.
    version: u64,
    /// It is in the list of those.
    dirty: bool,
    prompts_only: bool,
    /// Its network has sent or got all KV by then.
    network_free_s: f64,
    received_bytes: u64,
    receive_s: f64,
    /// Requests that it answers whose KV is not there yet.
    arriving: BTreeSet<u32>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    router: u32,
    lease: LeaseId,
    worker: u32,
    epoch: u32,
    /// Of attempts before.
    said: u32,
    /// Where its prompt is computed, or was, while the answer has not begun.
    prefill: Option<PrefillLeg>,
}

#[derive(Clone, Copy, Debug)]
struct PrefillLeg {
    lease: LeaseId,
    worker: u32,
    instance: u64,
    granted_s: f64,
}

/// What a worker is given of a request.
#[derive(Clone, Copy, Debug)]
enum Half {
    /// All of it, of which so much was said before.
    Whole { said: u32 },
    /// The prompt and the first token.
    Prompt,
    /// What follows, with its KV from elsewhere if that has come.
    Answer { said: u32, has_kv: bool },
}

/// KV of so many tokens is sent after the last of a prompt is computed.
const LAST_CHUNK_TOKENS: u32 = 2048;

/// What a run shows while it goes on; whoever returns false stops it.
pub type OnProgress<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// Runs a workload. None when `progress` stopped it; it is called with requests ended and requests in all.
pub fn run(config: &Config, workload: &Workload, scheduler: Core, progress: OnProgress<'_>) -> Option<Outcome> {
    let mut run = Run::new(config, workload, scheduler);
    run.begin();
    let all = workload.requests.len() as u64;
    let mut told = 0_u64;
    while let Some(timed) = run.events.pop() {
        run.now_s = timed.at_s;
        run.handle(timed.what);
        if run.ended >= told + 1024 || run.ended == all {
            told = run.ended;
            if !progress(run.ended, all) {
                return None;
            }
        }
        if run.ended == all {
            break;
        }
    }
    Some(run.finish())
}

struct Run<'a> {
    config: &'a Config,
    workload: &'a Workload,
    scheduler: Core,
    rng: StdRng,
    now_s: f64,
    events: BinaryHeap<Timed>,
    order: u64,
    routers: Vec<Router>,
    workers: Vec<Worker>,
    by_link: HashMap<Link, u32>,
    next_link: Link,
    next_instance: u64,
    records: Vec<Record>,
    progress: Vec<Progress>,
    /// Requests that follow each, in a closed loop.
    followers: HashMap<u32, Vec<u32>>,
    by_lease: HashMap<LeaseId, u32>,
    pools: Vec<Arc<str>>,
    /// What a prompt takes on an idle worker of the first group.
    alone: CostModel,
    ended: u64,
    parted: u64,
    /// Requests that were placed without asking, counting each attempt.
    unasked: u64,
    wakes_s: f64,
    actions: Vec<Action>,
    said: Vec<Said>,
    /// Workers whose state the scheduler doesn't know.
    dirty: Vec<u32>,
    heartbeat_s: f64,
}

impl<'a> Run<'a> {
    fn new(config: &'a Config, workload: &'a Workload, scheduler: Core) -> Self {
        let count = workload.requests.len();
        let mut pools: Vec<Arc<str>> = Vec::new();
        for group in &config.groups {
            if !pools.contains(&group.pool) {
                pools.push(Arc::clone(&group.pool));
            }
        }
        let table = config.groups.first().map(|group| Arc::clone(&group.engine.table));
        Self {
            config,
            workload,
            scheduler,
            rng: StdRng::seed_from_u64(config.seed),
            now_s: 0.0,
            events: BinaryHeap::new(),
            order: 0,
            routers: (0..config.routers)
                .map(|number| Router::new(number, config.seed))
                .collect(),
            workers: Vec::new(),
            by_link: HashMap::new(),
            next_link: FIRST_ROUTER + Link::from(config.routers),
            next_instance: 1,
            records: Vec::with_capacity(count),
            progress: vec![Progress::default(); count],
            followers: HashMap::new(),
            by_lease: HashMap::new(),
            pools,
            alone: CostModel::new(table),
            ended: 0,
            parted: 0,
            unasked: 0,
            wakes_s: f64::INFINITY,
            actions: Vec::new(),
            said: Vec::new(),
            dirty: Vec::new(),
            heartbeat_s: f64::INFINITY,
        }
    }

    fn plan(&mut self, at_s: f64, what: What) {
        self.order += 1;
        self.events.push(Timed {
            at_s,
            order: self.order,
            what,
        });
    }

    fn begin(&mut self) {
        for number in 0..self.config.routers {
            self.tell(Event::RouterJoined {
                bookings: Vec::new(),
                link: FIRST_ROUTER + Link::from(number),
                router_id: format!("router-{number}").into(),
                running: Vec::new(),
            });
        }
        for (group, each) in self.config.groups.iter().enumerate() {
            for index in 0..each.workers {
                let worker = self.workers.len() as u32;
                self.workers.push(Worker {
                    engine: Engine::new(each.engine.clone()),
                    group,
                    link: 0,
                    instance: 0,
                    version: 0,
                    dirty: false,
                    prompts_only: index < each.prefill_workers,
                    network_free_s: 0.0,
                    received_bytes: 0,
                    receive_s: 0.0,
                    arriving: BTreeSet::new(),
                });
                self.join(worker);
            }
        }
        for (number, fault) in (0..).zip(&self.config.faults) {
            self.plan(fault.at_s, What::Fail(number));
        }
        let mut lot = StdRng::seed_from_u64(!self.config.seed);
        for number in 0..self.workload.requests.len() as u32 {
            self.progress[number as usize].router = lot.random_range(0..self.config.routers);
            let request = &self.workload.requests[number as usize];
            // Only that much is known of when it came.
            let spread_s = self.rng.random::<f64>() * self.workload.quantum_s;
            let at_s = (request.arrival_s + spread_s) / self.config.speed;
            self.records.push(Record::new(request, at_s));
            match request.after.filter(|_| self.config.closed_loop) {
                Some(before) => self.followers.entry(before).or_default().push(number),
                None => self.plan(at_s, What::Arrive(number)),
            }
        }
    }

    fn join(&mut self, worker: u32) {
        let (link, instance) = (self.next_link, self.next_instance);
        (self.next_link, self.next_instance) = (link + 1, instance + 1);
        let each = &mut self.workers[worker as usize];
        (each.link, each.instance) = (link, instance);
        let engine = each.engine.config();
        let description = Description {
            // Whoever is in one pool serves one model, whatever its table was measured with.
            model: Arc::clone(&self.config.groups[each.group].pool),
            engine: "sim".into(),
            context_tokens: u32::try_from(each.engine.most_tokens()).unwrap_or(u32::MAX),
            block_tokens: engine.block_tokens,
            kv_blocks: (each.engine.most_tokens() / u64::from(engine.block_tokens)) as u32,
            slots: engine.max_batch,
            cost_table: engine.table.name.as_str().into(),
            capabilities: Capabilities {
                kv_handoff: true,
                ..Capabilities::default()
            },
            ..Description::default()
        };
        let hello = WorkerHello {
            worker_id: format!("worker-{worker}").into(),
            instance_id: format!("instance-{instance}").into(),
            pool: Arc::clone(&self.config.groups[each.group].pool),
            address: format!("10.0.{}.{}:7001", worker / 250, worker % 250).into(),
            description,
            startup_s: 0.0,
            role: if each.prompts_only { Role::Prefill } else { Role::Both },
            kv_token_bytes: self.config.groups[each.group].kv_token_bytes,
        };
        self.by_link.insert(link, worker);
        self.tell(Event::WorkerJoined {
            link,
            hello: Box::new(hello),
        });
        let events = self.report(worker);
        events.into_iter().for_each(|event| self.tell(event));
        if self.config.staleness_s > 0.0 {
            // Not all at once.
            let first_s = self.now_s + self.rng.random::<f64>() * self.config.staleness_s;
            self.plan(first_s, What::Report { worker, instance });
        }
    }

    /// Without staleness a worker reports what changes; a scheduler that listens for silence hears from it besides.
    fn expect_heartbeats(&mut self, link: Link, heartbeat_ms: u32) {
        self.heartbeat_s = f64::from(heartbeat_ms.max(1)) / 1000.0;
        let Some(&worker) = self.by_link.get(&link).filter(|_| self.config.staleness_s <= 0.0) else {
            return;
        };
        let instance = self.workers[worker as usize].instance;
        self.plan(self.now_s + self.heartbeat_s, What::Report { worker, instance });
    }

    fn handle(&mut self, what: What) {
        match what {
            What::Arrive(number) => {
                self.arrive(number);
                self.ask(number);
            }
            What::Ask(number) => self.ask(number),
            What::StepEnds { worker, version } => {
                let each = &mut self.workers[worker as usize];
                if each.version == version {
                    each.engine.advance(self.now_s, &mut self.said);
                    self.engine_moved(worker);
                }
            }
            What::Report { worker, instance } => {
                if self.workers[worker as usize].instance == instance {
                    let events = self.report(worker);
                    let (age_s, now_s) = (self.config.staleness_s, self.now_s);
                    // What is known is between half and one and a half times as old.
                    let deliver = What::Deliver {
                        worker,
                        instance,
                        events,
                    };
                    self.plan(now_s + age_s / 2.0, deliver);
                    let pause_s = if age_s > 0.0 { age_s } else { self.heartbeat_s };
                    self.plan(now_s + pause_s, What::Report { worker, instance });
                }
            }
            What::Deliver {
                worker,
                instance,
                events,
            } => {
                if self.workers[worker as usize].instance == instance {
                    events.into_iter().for_each(|event| self.tell(event));
                }
            }
            What::Tell(event) => self.heard(*event),
            What::Hear {
                router,
                action,
                grantor,
            } => self.told(router, *action, grantor),
            What::Arrived { request, epoch } => self.arrived(request, epoch),
            What::Fail(number) => self.fail(number),
            What::Restart(worker) => self.join(worker),
            // Others may have been planned before it for later.
            What::Wake if self.now_s < self.wakes_s => {}
            What::Wake => {
                self.wakes_s = f64::INFINITY;
                self.tell(Event::Tick);
            }
        }
    }

    /// Tells the scheduler, and does what it says.
    fn tell(&mut self, event: Event) {
        let mut actions = std::mem::take(&mut self.actions);
        self.scheduler.step(self.now_s, event, &mut actions);
        for action in actions.drain(..) {
            self.act(action);
        }
        self.actions = actions;
        if let Some(at_s) = self.scheduler.next_wakeup().filter(|at_s| *at_s < self.wakes_s) {
            self.wakes_s = at_s;
            self.plan(at_s.max(self.now_s), What::Wake);
        }
    }

    /// A request's router says something to the scheduler.
    fn say(&mut self, event: Event) {
        if self.config.router_delay_s > 0.0 {
            self.plan(self.now_s + self.config.router_delay_s, What::Tell(Box::new(event)));
        } else {
            self.heard(event);
        }
    }

    fn heard(&mut self, event: Event) {
        if matches!(event, Event::Asked { .. } | Event::Released { .. }) {
            self.catch_up();
        }
        self.tell(event);
    }

    fn router(&mut self, request: u32) -> &mut Router {
        &mut self.routers[self.progress[request as usize].router as usize]
    }

    fn link(&self, request: u32) -> Link {
        FIRST_ROUTER + Link::from(self.progress[request as usize].router)
    }

    /// The scheduler says something to a router.
    fn reply(&mut self, link: Link, action: Action) {
        let (router, mut grantor) = ((link - FIRST_ROUTER) as u32, None);
        if let Action::Lent { share, .. } = &action {
            let worker = self.scheduler.fleet().workers.get(&share.worker);
            grantor = worker.map(|worker| Grantor {
                pool: Arc::clone(&worker.hello.pool),
                number: worker.number(),
                block_tokens: worker.hello.description.block_tokens,
            });
        }
        if self.config.router_delay_s > 0.0 {
            let hear = What::Hear {
                router,
                action: Box::new(action),
                grantor,
            };
            self.plan(self.now_s + self.config.router_delay_s, hear);
        } else {
            self.told(router, action, grantor);
        }
    }

    fn told(&mut self, router: u32, action: Action, grantor: Option<Grantor>) {
        match action {
            Action::Granted(grant) => self.granted(&grant),
            Action::Refused(refusal) => self.end(refusal.ask as u32, Fate::Rejected),
            other => {
                if let Some(number) = self.routers[router as usize].hear(self.now_s, &other, grantor) {
                    let link = FIRST_ROUTER + Link::from(router);
                    // Not within the step that said it.
                    let event = Box::new(Event::KnowsShares { link, number });
                    self.plan(self.now_s + self.config.router_delay_s, What::Tell(event));
                }
            }
        }
    }

    /// Without staleness, the scheduler knows everything before it decides.
    fn catch_up(&mut self) {
        if self.config.staleness_s > 0.0 {
            return;
        }
        while let Some(worker) = self.dirty.pop() {
            let events = self.report(worker);
            events.into_iter().for_each(|event| self.tell(event));
        }
    }

    fn report(&mut self, worker: u32) -> Vec<Event> {
        let each = &mut self.workers[worker as usize];
        each.dirty = false;
        if each.link == 0 {
            return Vec::new();
        }
        let (link, load) = (each.link, each.engine.load());
        let changes: Vec<BlockChange> = each.engine.kv().take_changes();
        let mut events: Vec<Event> = changes
            .into_iter()
            .map(|change| Event::BlocksChanged { link, change })
            .collect();
        let kv = each.engine.kv();
        let load = Load {
            state: WorkerState::Ready,
            waiting_requests: load.waiting,
            running_requests: load.prefilling + load.decoding,
            waiting_prompt_tokens: load.waiting_tokens,
            running_prompt_tokens: load.prefilling_tokens,
            context_tokens: load.context_tokens,
            kv_blocks_total: kv.device_blocks() as u32,
            kv_blocks_used: kv.used() as u32,
            kv_blocks_cached: kv.cached() as u32,
            slots: each.engine.config().max_batch,
            iteration: each.engine.iteration(),
            steps: each.engine.take_steps(),
            kv_received_bytes: each.received_bytes,
            kv_receive_s: each.receive_s,
        };
        events.push(Event::WorkerReported {
            link,
            load: Box::new(load),
        });
        events
    }

    fn arrive(&mut self, number: u32) {
        let request = &self.workload.requests[number as usize];
        let alone_s = self.alone.first_token_ms(request.prompt_tokens, 0) / 1000.0;
        let record = &mut self.records[number as usize];
        record.arrival_s = self.now_s;
        record.due_s = self.now_s + self.config.ttft_target_s.max(self.config.ttft_times_alone * alone_s);
        if let Some(sigma) = self.config.length_sigma {
            let expected = f64::from(request.output_tokens) * (sigma * workload::normal(&mut self.rng)).exp();
            record.expected_output_tokens = expected.round().clamp(1.0, 1e6) as u32;
        }
    }

    fn ask(&mut self, number: u32) {
        let request = &self.workload.requests[number as usize];
        let (record, progress) = (&self.records[number as usize], self.progress[number as usize]);
        let ask = Ask {
            number: u64::from(number),
            request_id: "".into(),
            tenant: self
                .workload
                .tenants
                .get(request.tenant as usize)
                .map_or("", String::as_str)
                .into(),
            class: request.class,
            pools: self.pools.clone(),
            prompt_tokens: request.prompt_tokens + progress.said,
            block_hashes: request.blocks.to_vec(),
            max_tokens: request.output_tokens - progress.said,
            choices: 1,
            expected_output_tokens: record.expected_output_tokens,
            arrived_s: Some(record.arrival_s),
            ttft_target_s: Some(record.due_s - record.arrival_s),
            tpot_target_s: Some(self.config.tpot_target_s),
            epoch: progress.epoch + 1,
            may_part: true,
            ..Ask::default()
        };
        let (link, ask) = (self.link(number), Box::new(ask));
        let blocks = self.scheduler.fleet().blocks().index();
        match self.routers[progress.router as usize].place(self.now_s, &ask, blocks) {
            None => self.say(Event::Asked { link, ask }),
            Some((lease, worker)) => {
                self.unasked += 1;
                self.say(Event::Placed {
                    link,
                    lease,
                    worker,
                    ask,
                });
                self.begin_at(number, lease, worker, None);
            }
        }
    }

    fn granted(&mut self, grant: &Grant) {
        let prefill = grant.prefill.as_ref();
        self.begin_at(
            grant.ask as u32,
            grant.lease,
            grant.worker,
            prefill.map(|prefill| (prefill.lease, prefill.worker)),
        );
    }

    /// A request goes to its worker, or its prompt to one and its answer to another.
    fn begin_at(&mut self, number: u32, lease: LeaseId, worker: Link, prefill: Option<(LeaseId, Link)>) {
        let Some(&worker) = self.by_link.get(&worker) else {
            // It is gone, and its router has not heard of it.
            let now_s = self.now_s;
            self.router(number).give_back(now_s, number);
            self.plan(self.now_s + RETRY_S, What::Ask(number));
            return;
        };
        let progress = &mut self.progress[number as usize];
        progress.lease = lease;
        progress.worker = worker;
        progress.epoch += 1;
        let said = progress.said;
        self.by_lease.insert(lease, number);
        self.records[number as usize].worker = worker;
        let at = prefill.and_then(|(lease, worker)| Some((lease, *self.by_link.get(&worker)?)));
        progress.prefill = at.map(|(lease, worker)| PrefillLeg {
            lease,
            worker,
            instance: self.workers[worker as usize].instance,
            granted_s: self.now_s,
        });
        match at {
            Some((_, computes)) => {
                self.workers[worker as usize].arriving.insert(number);
                self.parted += 1;
                self.submit(number, computes, Half::Prompt);
            }
            None => self.submit(number, worker, Half::Whole { said }),
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Granted(ref grant) => self.reply(grant.link, action),
            Action::Refused(ref refusal) => self.reply(refusal.link, action),
            Action::Lent { share, .. } => self.reply(share.router, action),
            Action::News { link, .. } | Action::Unlent { link, .. } => self.reply(link, action),
            Action::SetLimits {
                link,
                limits,
                pair_tokens,
            } => {
                if let Some(&worker) = self.by_link.get(&link) {
                    self.workers[worker as usize]
                        .engine
                        .set_chunk(limits.chunk_tokens, pair_tokens);
                }
            }
            Action::Welcomed { link, heartbeat_ms } => self.expect_heartbeats(link, heartbeat_ms),
            Action::Paced { heartbeat_ms, .. } => self.heartbeat_s = f64::from(heartbeat_ms.max(1)) / 1000.0,
            Action::Preempt { link, lease } => self.set_aside(link, lease, true),
            Action::Resume { link, lease } => self.set_aside(link, lease, false),
            Action::Waits { .. }
            | Action::JoinRefused { .. }
            | Action::WorkerDropped { .. }
            | Action::RouterDropped { .. }
            | Action::Settled { .. }
            | Action::FleetChanged => {}
        }
    }

    fn submit(&mut self, number: u32, worker: u32, half: Half) {
        let request = &self.workload.requests[number as usize];
        let record = &self.records[number as usize];
        let said = match half {
            Half::Prompt => 0,
            Half::Answer { said, .. } | Half::Whole { said } => said,
        };
        let job = Job {
            request: number,
            prompt_tokens: request.prompt_tokens + said,
            output_tokens: match half {
                Half::Prompt => 1,
                _ => request.output_tokens - said,
            },
            blocks: Arc::clone(&request.blocks),
            arrival_s: record.arrival_s,
            due_s: record.due_s,
            expected_output_tokens: record.expected_output_tokens,
            is_batch: record.class == Class::Batch,
            may_shed: said == 0 && !matches!(half, Half::Answer { .. }),
            has_kv: matches!(half, Half::Answer { has_kv: true, .. }),
        };
        let each = &mut self.workers[worker as usize];
        if u64::from(request.prompt_tokens) + u64::from(request.output_tokens) + 1 > each.engine.most_tokens() {
            self.said.push(Said::Shed { request: number });
        } else {
            each.engine.submit(self.now_s, job, &mut self.said);
        }
        self.engine_moved(worker);
    }

    fn set_aside(&mut self, link: Link, lease: LeaseId, aside: bool) {
        let (Some(&worker), Some(&number)) = (self.by_link.get(&link), self.by_lease.get(&lease)) else {
            return;
        };
        let engine = &mut self.workers[worker as usize].engine;
        if aside {
            engine.pause(self.now_s, number, &mut self.said);
        } else {
            engine.resume(self.now_s, number, &mut self.said);
        }
        self.engine_moved(worker);
    }

    /// Plans the end of the engine's step, and passes on what it said.
    fn engine_moved(&mut self, worker: u32) {
        let each = &mut self.workers[worker as usize];
        if !std::mem::replace(&mut each.dirty, true) && self.config.staleness_s <= 0.0 {
            self.dirty.push(worker);
        }
        each.version += 1;
        let version = each.version;
        if let Some(at_s) = each.engine.busy_until() {
            self.plan(at_s, What::StepEnds { worker, version });
        }
        let said = std::mem::take(&mut self.said);
        for each in &said {
            let (Said::First { request, .. } | Said::Finished { request } | Said::Shed { request }) = *each;
            let leg = self.progress[request as usize]
                .prefill
                .filter(|leg| leg.worker == worker);
            if let Some(leg) = leg {
                self.prompt_says(*each, leg);
                continue;
            }
            match *each {
                Said::First { request, cached_tokens } => {
                    let (record, lease) = (
                        &mut self.records[request as usize],
                        self.progress[request as usize].lease,
                    );
                    if record.first_token_s.is_none() {
                        record.first_token_s = Some(self.now_s);
                        record.cached_tokens = cached_tokens;
                    }
                    self.router(request).begun(request);
                    self.say(Event::Progressed {
                        link: self.link(request),
                        lease,
                        output_tokens: 1,
                    });
                }
                Said::Finished { request } => {
                    self.records[request as usize].finished_s = Some(self.now_s);
                    self.release(request, Ending::Stop);
                    self.end(request, Fate::Finished);
                }
                Said::Shed { request } => {
                    self.release(request, Ending::Cut);
                    self.end(request, Fate::Rejected);
                }
            }
        }
        if self.said.is_empty() {
            self.said = said;
            self.said.clear();
        }
    }

    /// What the worker says that computes a prompt whose answer is another's.
    fn prompt_says(&mut self, said: Said, leg: PrefillLeg) {
        let lease = leg.lease;
        match said {
            Said::First { request, cached_tokens } => {
                let record = &mut self.records[request as usize];
                record.first_token_s = Some(self.now_s);
                record.cached_tokens = cached_tokens;
                self.progress[request as usize].said = 1;
                self.say(Event::Progressed {
                    link: self.link(request),
                    lease,
                    output_tokens: 1,
                });
            }
            Said::Finished { request } => {
                self.end_prompt(request, lease);
                if self.workload.requests[request as usize].output_tokens <= 1 {
                    self.leave_answerer(request);
                    self.records[request as usize].finished_s = Some(self.now_s);
                    self.release(request, Ending::Stop);
                    self.end(request, Fate::Finished);
                    return;
                }
                let epoch = self.progress[request as usize].epoch;
                let at_s = self.moved_by(request, leg);
                self.plan(at_s, What::Arrived { request, epoch });
            }
            Said::Shed { request } => {
                self.leave_answerer(request);
                self.end_prompt(request, lease);
                self.release(request, Ending::Cut);
                self.end(request, Fate::Rejected);
            }
        }
    }

    /// When the KV of a prompt that has just been computed is all there. It is sent as it is computed, by one network that
    /// each of the two workers has; the last chunk's share can only follow.
    fn moved_by(&mut self, request: u32, leg: PrefillLeg) -> f64 {
        let asked = &self.workload.requests[request as usize];
        let progress = &self.progress[request as usize];
        let (here, there) = (progress.worker as usize, leg.worker as usize);
        let (from, to) = (
            &self.config.groups[self.workers[there].group],
            &self.config.groups[self.workers[here].group],
        );
        let rate = from.network_bytes_per_s.min(to.network_bytes_per_s);
        let held = self.workers[here].engine.kv().leading(&asked.blocks) as u32 * to.engine.block_tokens;
        let lacks = asked.prompt_tokens.saturating_sub(held);
        let move_s = |tokens: u32| f64::from(tokens) * f64::from(to.kv_token_bytes) / rate;
        let compute_s = self.alone.prefill_ms(lacks.max(1), asked.prompt_tokens - lacks) * from.engine.slowdown / 1e3;
        let began_s = (self.now_s - compute_s).max(leg.granted_s);
        let free_s = self.workers[here]
            .network_free_s
            .max(self.workers[there].network_free_s);
        let sent_s = began_s.max(free_s) + move_s(lacks);
        self.workers[here].network_free_s = sent_s;
        self.workers[there].network_free_s = sent_s;
        self.workers[here].received_bytes += u64::from(lacks) * u64::from(to.kv_token_bytes);
        self.workers[here].receive_s += move_s(lacks);
        sent_s.max(self.now_s + move_s(lacks.min(LAST_CHUNK_TOKENS)))
    }

    fn arrived(&mut self, request: u32, epoch: u32) {
        let progress = &mut self.progress[request as usize];
        if progress.epoch != epoch {
            return;
        }
        let Some(leg) = progress.prefill.take() else {
            return;
        };
        let (worker, said) = (progress.worker, progress.said);
        // What its source lost on the way is computed here.
        let has_kv =
            self.workers[leg.worker as usize].instance == leg.instance && self.workers[leg.worker as usize].link != 0;
        self.workers[worker as usize].arriving.remove(&request);
        self.submit(request, worker, Half::Answer { said, has_kv });
    }

    fn leave_answerer(&mut self, request: u32) {
        let progress = &mut self.progress[request as usize];
        progress.prefill = None;
        let worker = progress.worker;
        self.workers[worker as usize].arriving.remove(&request);
    }

    /// The lease of a prompt is over.
    fn end_prompt(&mut self, request: u32, lease: LeaseId) {
        self.say(Event::Released {
            link: self.link(request),
            lease,
            books: Books::default(),
        });
    }

    fn release(&mut self, number: u32, outcome: Ending) {
        let (request, record) = (&self.workload.requests[number as usize], &self.records[number as usize]);
        let lease = self.progress[number as usize].lease;
        self.by_lease.remove(&lease);
        let finished = outcome == Ending::Stop;
        let books = Books {
            outcome,
            prompt_tokens: request.prompt_tokens,
            cached_prompt_tokens: record.cached_tokens,
            completion_tokens: if finished { request.output_tokens } else { 0 },
            kv_block_s: 0.0,
            ttft_s: record.ttft_s().unwrap_or(0.0),
            decode_s: record.decode_s().unwrap_or(0.0),
        };
        let link = self.link(number);
        let now_s = self.now_s;
        self.router(number).give_back(now_s, number);
        self.say(Event::Released { link, lease, books });
    }

    fn end(&mut self, number: u32, fate: Fate) {
        self.records[number as usize].fate = fate;
        self.ended += 1;
        for next in self.followers.remove(&number).unwrap_or_default() {
            let (before, after) = (
                &self.workload.requests[number as usize],
                &self.workload.requests[next as usize],
            );
            // What the client did in the workload: the gap, less what an answer took on an idle worker.
            let answer_s = self.config.tpot_target_s / 2.0 * f64::from(before.output_tokens);
            let think_s = (after.arrival_s - before.arrival_s - answer_s).max(self.workload.pause_s);
            let at_s = self.now_s + think_s;
            self.records[next as usize].arrival_s = at_s;
            self.plan(at_s, What::Arrive(next));
        }
    }

    fn fail(&mut self, number: u32) {
        let fault = self.config.faults[number as usize];
        let worker = fault.worker;
        let Some(each) = self.workers.get_mut(worker as usize).filter(|each| each.link != 0) else {
            return;
        };
        let link = std::mem::take(&mut each.link);
        each.version += 1;
        let lost = each.engine.kill(self.now_s);
        let arriving = std::mem::take(&mut each.arriving);
        self.by_link.remove(&link);
        self.tell(Event::WorkerLost { link });
        for request in arriving {
            // Whoever computes its prompt need not any more.
            let leg = self.progress[request as usize].prefill.take();
            let progress = self.progress[request as usize];
            self.by_lease.remove(&progress.lease);
            self.records[request as usize].attempts += 1;
            if let Some(leg) = leg.filter(|_| progress.said == 0) {
                self.workers[leg.worker as usize]
                    .engine
                    .cancel(self.now_s, request, &mut self.said);
                self.engine_moved(leg.worker);
                self.end_prompt(request, leg.lease);
            }
            self.plan(self.now_s + RETRY_S, What::Ask(request));
        }
        for (request, said) in lost {
            if self.progress[request as usize]
                .prefill
                .is_some_and(|leg| leg.worker == worker)
            {
                // Who is to answer computes it all.
                self.leave_answerer(request);
                let worker = self.progress[request as usize].worker;
                self.submit(request, worker, Half::Whole { said: 0 });
                continue;
            }
            let progress = &mut self.progress[request as usize];
            progress.said += said;
            self.routers[progress.router as usize].give_back(self.now_s, request);
            self.by_lease.remove(&progress.lease);
            self.records[request as usize].attempts += 1;
            self.plan(self.now_s + RETRY_S, What::Ask(request));
        }
        self.plan(self.now_s + fault.down_s, What::Restart(worker));
    }

    fn finish(self) -> Outcome {
        Outcome {
            preemptions: self.workers.iter().map(|each| each.engine.preemptions()).sum(),
            steps: self.workers.iter().map(|each| each.engine.iteration()).sum(),
            busy_s: self.workers.iter().map(|each| each.engine.busy_s()).sum(),
            parted: self.parted,
            unasked: self.unasked,
            span_s: self.now_s,
            tpot_target_s: self.config.tpot_target_s,
            records: self.records,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::settings::Settings;
    use super::workload::{Request, Synthetic};
    use super::*;

    #[test]
    fn the_live_core_serves_a_simulated_mesh() {
        let workload = made_up(2000, 40.0);
        let json = r#"{"shed": false, "faults": [[5, 0, 4], [12, 1, 4]], "groups": [{"workers": 4}]}"#;
        let run = || simulated(json, &workload);
        let (outcome, again) = (run(), run());
        let summary = outcome.summary(|_| true);
        assert_eq!((summary.finished, summary.rejected), (2000, 0));
        assert!(summary == again.summary(|_| true));
    }

    fn simulated(json: &str, workload: &Workload) -> Outcome {
        let settings = Settings::parse(json).expect("settings");
        let outcome = settings.run(workload, &mut |_, _| true).expect("sound");
        outcome.expect("not stopped")
    }

    #[test]
    fn tenants_share_a_worker_whose_kv_is_short() {
        let like = Synthetic {
            requests: 1500,
            rate_per_s: 30.0,
            roots: 1500,
            shared_tokens: 0,
            tenants: 3,
            ..Synthetic::default()
        };
        let workload = Workload::synthetic(&like, 1);
        let settings = r#"{"shed": false, "groups": [{"workers": 1, "kv_blocks": 512}]}"#;
        let outcome = simulated(settings, &workload);
        // The first asks for twice as much as each of the others, all for more than there is.
        let until_s = 45.0;
        let mut had = [0.0; 3];
        for each in &outcome.records {
            if let (Some(first_s), Some(finished_s)) = (each.first_token_s, each.finished_s) {
                let part = ((until_s - first_s) / (finished_s - first_s).max(1e-9)).clamp(0.0, 1.0);
                let prompt = if first_s < until_s { each.prompt_tokens } else { 0 };
                had[each.tenant as usize] += f64::from(prompt) + 2.0 * part * f64::from(each.output_tokens);
            }
        }
        // As VTC: 2 max(L, 2 M), with M the KV of a batch.
        let bound = 2.0 * 2.0 * 512.0 * 64.0;
        let (most, least) = (
            had.iter().copied().fold(0.0, f64::max),
            had.iter().copied().fold(f64::INFINITY, f64::min),
        );
        assert!(most - least <= bound && least > most / 2.0, "{had:?}");
    }

    fn made_up(requests: u32, rate_per_s: f64) -> Workload {
        let like = Synthetic {
            requests,
            rate_per_s,
            ..Synthetic::default()
        };
        Workload::synthetic(&like, 7)
    }

    #[test]
    fn the_seed_decides_all() {
        let workload = made_up(500, 60.0);
        let run = |seed: u32| {
            let json = format!(
                r#"{{"seed": {seed}, "staleness_s": 0.05, "faults": [[2, 1, 3]], "groups": [{{"workers": 3}}]}}"#
            );
            let outcome = simulated(&json, &workload);
            outcome
                .records
                .iter()
                .map(|each| (each.first_token_s, each.finished_s, each.worker))
                .collect::<Vec<_>>()
        };
        assert!(run(1) == run(1));
        assert!(run(1) != run(2));
    }

    #[test]
    fn every_request_ends_even_when_workers_are_lost() {
        let workload = made_up(2000, 40.0);
        let outcome = simulated(
            r#"{"shed": false, "staleness_s": 0.5, "faults": [[5, 0, 4], [12, 1, 4], [30, 2, 60]], "groups": [{"workers": 4}]}"#,
            &workload,
        );
        let summary = outcome.summary(|_| true);
        assert_eq!((summary.finished, summary.rejected), (2000, 0));
        let resumed: Vec<&Record> = outcome.records.iter().filter(|each| each.attempts > 0).collect();
        assert!(!resumed.is_empty());
        for each in &outcome.records {
            let (first_s, finished_s) = (each.first_token_s.expect("has one"), each.finished_s.expect("finished"));
            assert!(each.arrival_s < first_s && first_s <= finished_s);
        }
        // Nobody is placed on a worker that is down.
        let on = |worker: u32, from_s: f64, until_s: f64| {
            let inside = |each: &&Record| {
                each.worker == worker && each.attempts == 0 && each.arrival_s > from_s && each.arrival_s < until_s
            };
            outcome.records.iter().filter(inside).count()
        };
        assert_eq!(on(0, 5.0, 9.0), 0);
        assert!(on(0, 10.0, 20.0) > 0);
    }

    #[test]
    fn routers_place_most_by_themselves_while_little_waits() {
        let run = |routers: u32, rate_per_s: f64| {
            let json = format!(
                r#"{{"shed": false, "staleness_s": 0.1, "routers": {routers}, "router_delay_s": 0.002,
                     "scheduler": {{"credits": true}}, "groups": [{{"workers": 8}}]}}"#
            );
            let outcome = simulated(&json, &made_up(2000, rate_per_s));
            let summary = outcome.summary(|_| true);
            assert_eq!((summary.finished, summary.rejected), (2000, 0));
            assert!(summary == simulated(&json, &made_up(2000, rate_per_s)).summary(|_| true));
            summary.unasked
        };
        for routers in [1, 4] {
            let (idle, busy) = (run(routers, 20.0), run(routers, 200.0));
            assert!(idle > 0.9 && busy < idle / 2.0, "{routers}: {idle} {busy}");
        }
        let asked = simulated(r#"{"routers": 3, "router_delay_s": 0.1}"#, &made_up(200, 5.0));
        assert_eq!(asked.unasked, 0);
        // There and back.
        assert!(asked.records.iter().all(|each| each.ttft_s() > Some(0.2)));
    }

    #[test]
    fn every_request_ends_whoever_places_it_and_whoever_is_lost() {
        let outcome = simulated(
            r#"{"shed": false, "staleness_s": 0.2, "routers": 3, "router_delay_s": 0.05,
                "scheduler": {"credits": true}, "groups": [{"workers": 4}],
                "faults": [[5, 0, 4], [12, 1, 4], [12.02, 3, 0.01], [30, 2, 60]]}"#,
            &made_up(2000, 40.0),
        );
        let summary = outcome.summary(|_| true);
        assert_eq!((summary.finished, summary.rejected), (2000, 0));
        assert!(summary.unasked > 0.1 && outcome.records.iter().any(|each| each.attempts > 0));
    }

    #[test]
    fn prompts_part_from_answers_and_every_request_ends_whoever_is_lost() {
        let like = Synthetic {
            requests: 600,
            rate_per_s: 12.0,
            prompt_tokens: 5000.0,
            ..Synthetic::default()
        };
        let workload = Workload::synthetic(&like, 7);
        let run = |how: &str, faults: &str| {
            let json = format!(
                r#"{{"shed": false, "faults": [{faults}], "scheduler": {{"disaggregation": "{how}"}},
                     "groups": [{{"workers": 6, "prefill_workers": 2}}]}}"#
            );
            simulated(&json, &workload)
        };
        let faults = "[5, 0, 4], [9, 1, 4], [20, 3, 5], [31, 4, 60], [40, 0, 9]";
        for how in ["always", "auto", "off"] {
            for faults in ["", faults] {
                let outcome = run(how, faults);
                let summary = outcome.summary(|_| true);
                assert_eq!((summary.finished, summary.rejected), (600, 0), "{how} {faults}");
                assert_eq!(outcome.parted > 0, how != "off");
                for each in &outcome.records {
                    let (first_s, finished_s) =
                        (each.first_token_s.expect("has one"), each.finished_s.expect("finished"));
                    assert!(each.arrival_s < first_s && first_s <= finished_s);
                }
            }
        }
        // Whoever answers is not slowed down by others' prompts.
        let tpot = |how| run(how, "").summary(|_| true).tpot_s;
        let (apart, together) = (tpot("always"), tpot("off"));
        assert!(apart.p99 < together.p99 / 1.5, "{apart:?} {together:?}");
    }

    #[test]
    fn kv_takes_the_time_that_its_way_needs() {
        let request = |at_s: f64| Request {
            arrival_s: at_s,
            prompt_tokens: 10_000,
            output_tokens: 100,
            ..Request::default()
        };
        let workload = Workload {
            requests: vec![request(0.0), request(0.0)],
            block_tokens: 64,
            ..Workload::default()
        };
        let finished_s = |gb_per_s: f64| {
            let json = format!(
                r#"{{"shed": false, "scheduler": {{"disaggregation": "always"}},
                     "groups": [{{"workers": 2, "prefill_workers": 1, "network_gb_per_s": {gb_per_s}}}]}}"#
            );
            let outcome = simulated(&json, &workload);
            assert_eq!(outcome.parted, 2);
            outcome.records[0].finished_s.expect("finished")
        };
        // 1.3 GB: hidden behind the prompt, but for its end; or in the open.
        let (fast_s, slow_s) = (finished_s(100.0), finished_s(0.1));
        assert!((12.0..13.2).contains(&(slow_s - fast_s)), "{fast_s} {slow_s}");
    }

    #[test]
    fn without_a_worker_requests_are_refused() {
        let workload = made_up(50, 10.0);
        let outcome = simulated(r#"{"faults": [[0, 0, 1000]], "groups": [{"workers": 1}]}"#, &workload);
        assert_eq!(outcome.summary(|_| true).rejected, 50);
    }

    #[test]
    fn twice_the_speed_is_half_the_time_and_more_wait() {
        let workload = made_up(1000, 10.0);
        let (slow, fast) = (
            simulated(r#"{"speed": 1}"#, &workload),
            simulated(r#"{"speed": 2}"#, &workload),
        );
        assert!((slow.records[999].arrival_s / fast.records[999].arrival_s - 2.0).abs() < 1e-9);
        assert!(fast.summary(|_| true).tpot_s.mean > slow.summary(|_| true).tpot_s.mean);
    }

    #[test]
    fn turns_of_a_closed_loop_follow_the_answer() {
        let turn = |at_s: f64, blocks: &[u64]| Request {
            arrival_s: at_s,
            prompt_tokens: 64 * blocks.len() as u32 + 1,
            output_tokens: 2000,
            blocks: blocks.into(),
            ..Request::default()
        };
        let mut workload = Workload {
            requests: vec![turn(0.0, &[1, 2]), turn(3.0, &[1, 2, 3]), turn(4.0, &[1, 2, 3, 4])],
            block_tokens: 64,
            ..Workload::default()
        };
        workload.chain_sessions();
        let open = simulated("{}", &workload);
        assert!(open.records[1].arrival_s < open.records[0].finished_s.expect("finished"));
        let closed = simulated(r#"{"closed_loop": true}"#, &workload);
        for turn in 1..3 {
            let before_s = closed.records[turn - 1].finished_s.expect("finished");
            assert!((closed.records[turn].arrival_s - before_s - workload.pause_s).abs() < 1e-9);
        }
    }

    #[test]
    fn a_slow_worker_gets_less_and_unequal_pools_share_the_work() {
        let workload = made_up(3000, 60.0);
        let outcome = simulated(
            r#"{"groups": [{"workers": 2}, {"workers": 2, "slowdown": 4}, {"workers": 1, "cost_table": "h100-llama3.1-8b"}]}"#,
            &workload,
        );
        let mut taken = [0; 5];
        outcome.records.iter().for_each(|each| taken[each.worker as usize] += 1);
        assert!(taken[2] + taken[3] < (taken[0] + taken[1]) * 2 / 3, "{taken:?}");
        assert!(taken[4] > taken[0], "{taken:?}");
    }

    #[test]
    fn progress_is_told_and_may_stop_the_run() {
        let workload = made_up(3000, 100.0);
        let mut told = Vec::new();
        let mut tell = |ended, all| {
            told.push((ended, all));
            true
        };
        let settings = Settings::default();
        assert!(settings.run(&workload, &mut tell).expect("sound").is_some());
        assert_eq!(told.last(), Some(&(3000, 3000)));
        assert!(settings.run(&workload, &mut |_, _| false).expect("sound").is_none());
    }
}
