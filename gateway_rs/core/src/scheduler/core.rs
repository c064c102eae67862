//! The decisions themselves. See the module's text for the contract with the driver.
//!
//! What holds after every step:
//!
//! - an ask is answered once: granted or refused, or it was withdrawn, or its router is gone;
//! - nothing is granted after its deadline;
//! - a worker holds at most `limit` choices by grants of ours (leases that routers announce are facts and are counted too),
//!   except that a worker with nothing to do takes any request it can ever run;
//! - at most `max_queued` asks wait;
//! - whoever waits could not be placed when it was last looked at, and is looked at when a worker that could serve it changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rand::{rngs::SmallRng, SeedableRng};
use serde::{Deserialize, Serialize};

use super::{
    actions::{Action, Grant, Reason, Refusal},
    events::{Ask, Books, Class, Event, LeaseId, Link, Load, Outcome, RunningLease, WorkerHello},
    fair::{Accounts, OUTPUT_WEIGHT},
    fleet::{kv_tokens, Choice, Fleet, Lease, Phase, ANSWER_KV_TOKENS},
    lending::Lending,
    lengths::{Lengths, Root},
    map::{Key, Map},
    queue::{Place, Plan, Queue, Waiting, AGING_S},
    rate::Rate,
};
use crate::{
    cost::Shape,
    place::{self, Placer},
};

/// Asks looked at when a worker has room and the first in line does not fit it.
const LOOKAHEAD: usize = 32;

/// So many asks may be served past one that does not fit; then the next worker that could serve it keeps its room for it.
pub const PASS_LIMIT: u32 = 64;

/// Pools that one ask may name.
const MAX_POOLS: usize = 16;

/// Routers hear of changes in the fleet at most so often: many workers that come at once are one change.
const FLEET_INTERVAL_S: f64 = 0.05;

/// The driver called later than agreed by more than this: we were stopped, not the workers silent.
const LATE_S: f64 = 0.25;

/// How long a worker takes to come back, more or less; the hint when there is none.
const UNAVAILABLE_RETRY_MS: u32 = 1000;

/// Asks of other workers that one with nothing to do looks at.
const STEAL_LOOKAHEAD: usize = 8;

/// What is shed must be late by so much more than predicted.
const SHED_MARGIN: f64 = 1.2;

/// Prompts are cut so that a step stays within this share of the time between tokens.
const CHUNK_SHARE: f64 = 0.9;

/// A request that was put aside so often is left alone.
const MAX_PREEMPTED: u32 = 2;

/// Nor is one put aside that has said more than this share of what it is expected to say.
const PREEMPT_UNTIL: f64 = 0.8;

/// What the configuration sets.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Asks that wait at once.
    pub max_queued: usize,
    /// How often a worker reports.
    pub heartbeat_s: f64,
    /// Reports missed in a row before a silent worker is out.
    pub heartbeats_missed: u32,
    /// Time for a router to come back before its leases end.
    pub router_grace_s: f64,
    /// Leases for a worker, as a multiple of its slots.
    pub queue_factor: f64,
    /// The rule that places.
    #[serde(deserialize_with = "by_name")]
    pub placement: place::Policy,
    /// From the ask to the first token, for each class; asks may say otherwise. What a class is due by orders the queue.
    pub ttft_target_s: [f64; 3],
    /// Between tokens after the first, for each class; asks may say otherwise.
    pub tpot_target_s: [f64; 3],
    /// A worker is given the next prompt when the ones that it has need no more than this.
    pub dispatch_ahead_s: f64,
    /// What was never started and cannot meet its own deadline or target any more is refused instead of served late.
    pub shed: bool,
    /// Batch requests are put aside for interactive ones.
    pub preempt: bool,
    /// Workers are told how many prompt tokens to compute beside decoding: at least and at most. 0 at most = they are not.
    pub chunk_tokens: [u32; 2],
    /// Predicted prefill that a pool is given, as a share of its workers' time; 0 = no limit.
    pub prefill_share: f64,
    /// Tokens that a tenant may have ahead of others in a round.
    pub fair_quantum_tokens: f64,
    /// Shares of tenants; 1 for those not named.
    pub tenant_weights: BTreeMap<String, f64>,
    /// Lend room to routers while nothing waits.
    pub credits: bool,
}

fn by_name<'de, D: serde::Deserializer<'de>>(from: D) -> Result<place::Policy, D::Error> {
    let name = String::deserialize(from)?;
    name.parse().map_err(serde::de::Error::custom)
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            max_queued: 4096,
            heartbeat_s: 0.25,
            heartbeats_missed: 12,
            router_grace_s: 5.0,
            queue_factor: 1.25,
            placement: place::Policy::default(),
            ttft_target_s: [1.0, 5.0, 60.0],
            tpot_target_s: [0.1, 0.2, 1.0],
            dispatch_ahead_s: 0.1,
            shed: true,
            preempt: true,
            chunk_tokens: [128, 8192],
            prefill_share: 0.0,
            fair_quantum_tokens: 16_384.0,
            tenant_weights: BTreeMap::new(),
            credits: false,
        }
    }
}

impl Policy {
    /// A worker that is silent for so long is out.
    pub fn silence_s(&self) -> f64 {
        self.heartbeat_s * f64::from(self.heartbeats_missed)
    }

    /// Between the tokens of that one's answer.
    pub fn tpot_target_s(&self, ask: &Ask) -> f64 {
        ask.tpot_target_s.unwrap_or(self.tpot_target_s[ask.class.rank()])
    }
}

/// A router, over its reconnections.
#[derive(Debug)]
pub struct Router {
    /// Its stream; None = it is away.
    pub link: Option<Link>,
    /// What it holds.
    pub leases: BTreeSet<LeaseId>,
    /// The stream whose shares it may still use: while it is away, those of its last one.
    shares: Option<Link>,
    /// Requests of late.
    pub(super) demand: Rate,
    /// When its leases end, while it is away.
    expires_s: f64,
}

/// Things that should not happen, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Oddities {
    /// Releases of leases that are not held: the worker was lost, or it is the second one.
    pub release_unknown: u64,
    /// Releases of another router's leases.
    pub release_foreign: u64,
    /// Leases that two routers announce.
    pub lease_collision: u64,
}

/// What was predicted and what came, added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Predictions {
    /// First tokens compared.
    pub count: u64,
    /// From the grants to them, predicted.
    pub predicted_s: f64,
    /// And observed.
    pub observed_s: f64,
    /// How far off each was.
    pub error_s: f64,
}

/// What was done beside placing, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Measures {
    /// Refused because they would have been late.
    pub shed: u64,
    /// Put aside.
    pub preempted: u64,
    /// And taken up again.
    pub resumed: u64,
    /// Given to another worker than the one that they waited for.
    pub stolen: u64,
}

/// All that the scheduler knows and decides.
#[derive(Debug)]
pub struct Core {
    pub(super) policy: Policy,
    pub(super) fleet: Fleet,
    pub(super) queue: Queue,
    pub(super) routers: BTreeMap<Arc<str>, Router>,
    pub(super) oddities: Oddities,
    rng: SmallRng,
    placer: Placer,
    lengths: Lengths,
    predictions: Predictions,
    measures: Measures,
    /// Workers to be looked at when they have computed enough of what they have.
    gates: BTreeSet<(Key, Link)>,
    gate_of: Map<Link, Key>,
    /// Predicted prefill that each pool may still be given, in ms, and as of when.
    prefill_left: BTreeMap<Arc<str>, (f64, f64)>,
    pub(super) now_s: f64,
    next_lease: LeaseId,
    pub(super) routers_by_link: Map<Link, Arc<str>>,
    /// Routers that are away, by when their leases end.
    away: BTreeSet<(Key, Arc<str>)>,
    completions: Rate,
    fleet_told_s: f64,
    /// Just started: routers may be quicker to come back than workers, so a pool nobody has heard of may still come.
    settled_s: Option<f64>,
    seen_pools: BTreeSet<Arc<str>>,
    silence_check_s: f64,
    pub(super) lending: Lending,
    pub(super) actions: Vec<Action>,
}

impl Core {
    /// A scheduler that knows nobody. Lease numbers go up from `first_lease`: from elsewhere at each start, so that old
    /// leases stay apart.
    pub fn new(policy: Policy, seed: u64, now_s: f64, first_lease: LeaseId) -> Self {
        Self {
            fleet: Fleet::new(policy.queue_factor),
            queue: Queue::new(Accounts::new(
                policy.fair_quantum_tokens,
                policy
                    .tenant_weights
                    .iter()
                    .map(|(name, weight)| (Arc::from(name.as_str()), *weight)),
            )),
            routers: BTreeMap::new(),
            oddities: Oddities::default(),
            rng: SmallRng::seed_from_u64(seed),
            placer: Placer::new(policy.placement),
            lengths: Lengths::default(),
            predictions: Predictions::default(),
            measures: Measures::default(),
            gates: BTreeSet::new(),
            gate_of: Map::default(),
            prefill_left: BTreeMap::new(),
            now_s,
            next_lease: first_lease,
            routers_by_link: Map::default(),
            away: BTreeSet::new(),
            completions: Rate::new(now_s),
            fleet_told_s: f64::NEG_INFINITY,
            settled_s: Some(now_s + policy.silence_s()),
            seen_pools: BTreeSet::new(),
            silence_check_s: f64::INFINITY,
            lending: Lending::default(),
            actions: Vec::new(),
            policy,
        }
    }

    // The two functions of the driver's contract.

    /// Takes in an event and appends what to do. `now_s` never goes back.
    pub fn step(&mut self, now_s: f64, event: Event, actions: &mut Vec<Action>) {
        self.forgive_our_own_absence(now_s);
        self.now_s = now_s;
        self.pass_time();
        match event {
            Event::Asked { link, ask } => self.asked(link, ask),
            Event::Progressed {
                link,
                lease,
                output_tokens,
            } => self.progressed(link, lease, output_tokens),
            Event::Released { link, lease, books } => self.released(link, lease, &books),
            Event::WorkerReported { link, load } => self.worker_reported(link, *load),
            Event::Withdrawn { link, ask } => self.withdrawn(link, ask),
            Event::RouterJoined {
                link,
                router_id,
                running,
            } => self.router_joined(link, router_id, running),
            Event::RouterLost { link } => self.router_lost(link),
            Event::WorkerJoined { link, hello } => self.worker_joined(link, *hello),
            Event::WorkerLost { link } => self.remove_worker(link),
            Event::BlocksChanged { link, change } => self.fleet.blocks(link, change),
            Event::Placed {
                link,
                lease,
                worker,
                ask,
            } => self.placed(link, lease, worker, &ask),
            Event::KnowsShares { link, number } => self.knows_shares(link, number),
            Event::Tick => {}
        }
        if self.fleet.changed && self.now_s >= self.fleet_told_s + FLEET_INTERVAL_S {
            self.fleet.changed = false;
            self.fleet_told_s = self.now_s;
            self.actions.push(Action::FleetChanged);
        }
        self.lend();
        actions.append(&mut self.actions);
    }

    /// When to call `step` at the latest; None = not before something happens.
    pub fn next_wakeup(&self) -> Option<f64> {
        let mut earliest_s = self.silence_check_s;
        if let Some((expires_s, _)) = self.away.first() {
            earliest_s = earliest_s.min(expires_s.0);
        }
        if let Some(deadline_s) = self.queue.next_deadline() {
            earliest_s = earliest_s.min(deadline_s);
        }
        if let Some((gate_s, _)) = self.gates.first() {
            earliest_s = earliest_s.min(gate_s.0);
        }
        if self.fleet.changed {
            earliest_s = earliest_s.min(self.fleet_told_s + FLEET_INTERVAL_S);
        }
        if let Some(settled_s) = self.settled_s {
            earliest_s = earliest_s.min(settled_s);
        }
        if let Some(look_s) = self.lending.next_s() {
            earliest_s = earliest_s.min(look_s);
        }
        (earliest_s < f64::INFINITY).then_some(earliest_s)
    }

    pub(super) fn placer(&self) -> &Placer {
        &self.placer
    }

    // What people and drivers may look at.

    /// Workers and leases.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Asks that wait.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Routers, those that are away for a moment too.
    pub fn routers(&self) -> &BTreeMap<Arc<str>, Router> {
        &self.routers
    }

    /// First tokens as predicted and as they came.
    pub fn predictions(&self) -> Predictions {
        self.predictions
    }

    /// What was done beside placing.
    pub fn measures(&self) -> Measures {
        self.measures
    }

    /// What should not have happened.
    pub fn oddities(&self) -> Oddities {
        self.oddities
    }

    // Time.

    fn forgive_our_own_absence(&mut self, now_s: f64) {
        if self.fleet.workers.is_empty() {
            return;
        }
        if let Some(due_s) = self.next_wakeup() {
            let late_s = now_s - due_s;
            if late_s > LATE_S {
                // Their reports may be waiting in our sockets, unread.
                for worker in self.fleet.workers.values_mut() {
                    worker.heard_s += late_s;
                }
            }
        }
    }

    fn pass_time(&mut self) {
        while let Some(place) = self.queue.expired(self.now_s) {
            let waited_s = self
                .queue
                .get(place)
                .map_or(0.0, |waiting| self.now_s - waiting.arrived_s);
            let message = format!("the deadline passed in the queue, after {waited_s:.2} s");
            self.refuse_waiting(place, Reason::DeadlineExceeded, message, 0);
        }
        self.queue.age(self.now_s);
        if self.silence_check_s <= self.now_s {
            self.drop_silent_workers();
        }
        while self
            .away
            .first()
            .is_some_and(|(expires_s, _)| expires_s.0 <= self.now_s)
        {
            if let Some((_, router_id)) = self.away.pop_first() {
                self.forget_router(&router_id);
            }
        }
        while let Some(&(gate_s, link)) = self.gates.first() {
            if gate_s.0 > self.now_s {
                break;
            }
            self.close_gate(link);
            self.offer(link);
        }
        if self.settled_s.is_some_and(|settled_s| settled_s <= self.now_s) {
            self.settled_s = None;
            self.seen_pools.clear();
            self.refuse_stranded(&self.queue.everything());
        }
    }

    fn drop_silent_workers(&mut self) {
        let silence_s = self.policy.silence_s();
        let silent = |heard_s: f64| heard_s + silence_s <= self.now_s;
        let workers = self.fleet.workers.values();
        let out: Vec<_> = workers
            .filter(|each| silent(each.heard_s))
            .map(|each| (each.link, each.heard_s))
            .collect();
        for (link, heard_s) in out {
            let message = format!("no report for {:.2} s", self.now_s - heard_s);
            self.actions.push(Action::WorkerDropped { link, message });
            self.remove_worker(link);
        }
        // Gone through once per silence or so and not at each report: whoever reports meanwhile only moves later.
        let heard = self.fleet.workers.values().map(|worker| worker.heard_s);
        self.silence_check_s = heard.fold(f64::INFINITY, f64::min) + silence_s;
    }

    // Routers.

    fn router_joined(&mut self, link: Link, router_id: Arc<str>, running: Vec<RunningLease>) {
        let router = self.routers.entry(router_id.clone()).or_insert_with(|| Router {
            link: None,
            leases: BTreeSet::new(),
            shares: None,
            demand: Rate::new(self.now_s),
            expires_s: 0.0,
        });
        let before = router.link.replace(link);
        self.away.remove(&(Key(router.expires_s), router_id.clone()));
        let held = router.leases.clone();
        if let Some(old) = before {
            let message = "this router has opened another stream".to_owned();
            self.actions.push(Action::RouterDropped { link: old, message });
            self.leave_queue(old);
            self.routers_by_link.remove(&old);
        }
        // What it places from now on is within the shares of this stream; what runs from before is announced.
        if let Some(old) = self
            .routers
            .get_mut(&router_id)
            .and_then(|router| router.shares.replace(link))
        {
            self.lending.ledger.leave(old);
        }
        self.lending.ledger.join(link);
        self.routers_changed();
        self.routers_by_link.insert(link, router_id.clone());
        let announced: BTreeSet<_> = running.iter().map(|each| each.lease).collect();
        for &id in held.difference(&announced) {
            self.free(id);
        }
        for each in running {
            self.take_over(&router_id, each);
        }
    }

    fn take_over(&mut self, router_id: &Arc<str>, running: RunningLease) {
        if let Some(known) = self.fleet.leases.get(&running.lease) {
            if known.router_id != *router_id {
                self.oddities.lease_collision += 1;
            }
            return;
        }
        self.hold(Lease {
            id: running.lease,
            router_id: router_id.clone(),
            instance_id: running.instance_id,
            request_id: running.request_id,
            tenant: running.tenant,
            choices: 1,
            prompt_tokens: running.prompt_tokens,
            kv_tokens: u64::from(running.prompt_tokens),
            granted_s: self.now_s,
            class: Class::Standard,
            // It has been running for a while: its router says nothing of its first token any more.
            phase: Phase::Decode,
            prefill_ms: 0.0,
            predicted_ttft_s: None,
            charged: None,
            root: Root {
                tenant: Arc::from(""),
                block: 0,
            },
            output_tokens: 0,
            max_tokens: running.max_tokens,
            tpot_target_s: self.policy.tpot_target_s[Class::Standard.rank()],
            preempted: MAX_PREEMPTED,
            by_credit: None,
        });
    }

    pub(super) fn hold(&mut self, lease: Lease) {
        if let Some(router) = self.routers.get_mut(&lease.router_id) {
            router.leases.insert(lease.id);
        }
        self.fleet.hold(self.now_s, lease);
    }

    fn router_lost(&mut self, link: Link) {
        let Some(router_id) = self.routers_by_link.remove(&link) else {
            return;
        };
        self.leave_queue(link);
        let Some(router) = self.routers.get_mut(&router_id) else {
            return;
        };
        router.link = None;
        // It may have placed more than it could still say.
        if router.leases.is_empty() && !self.lending.ledger.trusts(link) {
            self.forget_router(&router_id);
        } else {
            router.expires_s = self.now_s + self.policy.router_grace_s;
            self.away.insert((Key(router.expires_s), router_id));
        }
    }

    fn leave_queue(&mut self, link: Link) {
        for place in self.queue.of_link(link) {
            self.remove_waiting(place);
        }
    }

    fn forget_router(&mut self, router_id: &str) {
        if let Some(router) = self.routers.remove(router_id) {
            if let Some(shares) = router.shares {
                self.lending.ledger.leave(shares);
            }
            for id in router.leases {
                self.free(id);
            }
            self.routers_changed();
        }
    }

    // Asks.

    fn asked(&mut self, link: Link, ask: Box<Ask>) {
        if !self.routers_by_link.contains_key(&link) {
            return;
        }
        if self.queue.find(link, ask.number).is_some() {
            let message = format!("ask {} was asked twice", ask.number);
            self.actions.push(Action::RouterDropped { link, message });
            self.router_lost(link);
            return;
        }
        if let Some(refusal) = self.refusal(link, &ask) {
            self.actions.push(Action::Refused(Box::new(refusal)));
            return;
        }
        self.demanded(link);
        let due_s = self.due_s(&ask);
        let class = ask.class;
        let place = self.queue.add(self.now_s, due_s, link, ask);
        if self.place_newcomer(place) {
            return;
        }
        if class == Class::Interactive && self.policy.preempt && self.make_room(place) {
            return;
        }
        // It may have been shed.
        if self.queue.get(place).is_none() {
            return;
        }
        let pools = self.queue.get(place).map(|waiting| waiting.ask.pools.clone());
        for pool in pools.unwrap_or_default() {
            self.stop_lending(&pool);
        }
        let limit = self.policy.max_queued;
        if self.queue.len() > limit {
            let message = format!("{} requests wait already (limit {limit})", self.queue.len() - 1);
            let retry_after_ms = self.drain_ms();
            self.refuse_waiting(place, Reason::Overloaded, message, retry_after_ms);
        } else if let Some(waiting) = self.queue.get(place) {
            self.actions.push(self.waits(waiting));
        }
    }

    /// Why an ask cannot even wait, if so.
    fn refusal(&self, link: Link, ask: &Ask) -> Option<Refusal> {
        let refuse = |reason, message| {
            Some(Refusal {
                link,
                ask: ask.number,
                reason,
                message,
                retryable: false,
                retry_after_ms: 0,
            })
        };
        if ask.deadline_s.is_some_and(|deadline_s| deadline_s <= self.now_s) {
            let message = "the deadline had passed before the request was queued";
            return refuse(Reason::DeadlineExceeded, message.to_owned());
        }
        let pools = &ask.pools;
        let twice = pools
            .iter()
            .enumerate()
            .any(|(index, pool)| pools[..index].contains(pool));
        if pools.is_empty() || pools.len() > MAX_POOLS || twice {
            let message = format!("pools: expected 1 to {MAX_POOLS} different ones, got {}", pools.len());
            return refuse(Reason::InvalidArgument, message);
        }
        if ask.choices < 1 {
            return refuse(Reason::InvalidArgument, "choices: must be at least 1, got 0".to_owned());
        }
        if let Some(refusal) = self.stranded(link, ask) {
            return Some(refusal);
        }
        // Not even an idle worker could do it.
        let left_s = ask
            .deadline_s
            .filter(|_| self.policy.shed)
            .map(|deadline_s| deadline_s - self.now_s)?;
        let pools = ask.pools.iter().filter_map(|name| self.fleet.pools.get(name));
        let mut soonest_s = f64::INFINITY;
        for pool in pools {
            soonest_s = soonest_s.min(self.fleet.soonest_first_token_s(pool, ask)?);
        }
        if soonest_s.is_finite() && soonest_s > left_s {
            let message =
                format!("an idle worker needs {soonest_s:.2} s for the first token; the deadline is in {left_s:.2} s");
            return refuse(Reason::DeadlineExceeded, message);
        }
        None
    }

    /// When an ask's first token is due: its order in the queue.
    fn due_s(&self, ask: &Ask) -> f64 {
        let target_s = ask.ttft_target_s.unwrap_or(self.policy.ttft_target_s[ask.class.rank()]);
        (self.now_s + target_s).min(ask.deadline_s.unwrap_or(f64::INFINITY))
    }

    /// The refusal of an ask that no worker as they are now could ever run; None when some could, or may come.
    fn stranded(&self, link: Link, ask: &Ask) -> Option<Refusal> {
        let pools = || ask.pools.iter().filter_map(|name| self.fleet.pools.get(name));
        if pools().any(|pool| self.fleet.can_ever_run(pool, ask)) {
            return None;
        }
        let mut refusal = Refusal {
            link,
            ask: ask.number,
            reason: Reason::ContextLengthExceeded,
            message: String::new(),
            retryable: false,
            retry_after_ms: 0,
        };
        let longest = pools()
            .filter(|pool| !pool.ready.is_empty())
            .map(|pool| pool.max_prompt_tokens)
            .max();
        if let Some(longest) = longest.filter(|&longest| ask.prompt_tokens > longest) {
            let tokens = ask.prompt_tokens;
            refusal.message = format!("the prompt has {tokens} tokens; the longest that a worker takes is {longest}");
            return Some(refusal);
        }
        if self.may_still_come(ask) {
            return None;
        }
        refusal.reason = Reason::Unavailable;
        refusal.retryable = true;
        refusal.retry_after_ms = UNAVAILABLE_RETRY_MS;
        refusal.message = if longest.is_some() {
            "every worker that could run this has just failed it".to_owned()
        } else {
            format!("no worker is ready in {}", ask.pools.join(", "))
        };
        Some(refusal)
    }

    fn may_still_come(&self, ask: &Ask) -> bool {
        self.settled_s.is_some() && !ask.pools.iter().any(|pool| self.seen_pools.contains(pool))
    }

    /// Some workers are gone: refuse those of these asks that nobody is left for.
    fn refuse_stranded(&mut self, places: &[Place]) {
        for &place in places {
            let waiting = self.queue.get(place);
            if let Some(refusal) = waiting.and_then(|waiting| self.stranded(waiting.link, &waiting.ask)) {
                self.remove_waiting(place);
                self.actions.push(Action::Refused(Box::new(refusal)));
            }
        }
    }

    fn refuse_waiting(&mut self, place: Place, reason: Reason, message: String, retry_after_ms: u32) {
        if let Some(waiting) = self.remove_waiting(place) {
            self.actions.push(Action::Refused(Box::new(Refusal {
                link: waiting.link,
                ask: waiting.ask.number,
                reason,
                message,
                retryable: reason != Reason::DeadlineExceeded,
                retry_after_ms,
            })));
        }
    }

    fn withdrawn(&mut self, link: Link, ask: u64) {
        // Otherwise its answer is under way, and a release will answer that.
        if let Some(place) = self.queue.find(link, ask) {
            self.remove_waiting(place);
        }
    }

    /// It does not wait any more, and is not served either.
    fn remove_waiting(&mut self, place: Place) -> Option<Waiting> {
        let waiting = self.take_waiting(place)?;
        self.queue.accounts.close(waiting.account);
        Some(waiting)
    }

    fn take_waiting(&mut self, place: Place) -> Option<Waiting> {
        self.unplan(place);
        let waiting = self.queue.remove(place)?;
        if let Some(link) = waiting.reserved {
            self.unreserve(link, place);
        }
        Some(waiting)
    }

    fn plan(&mut self, place: Place, choice: &Choice) {
        let plan = Plan {
            worker: choice.link,
            prefill_ms: choice.prefill_ms,
            hit_tokens: choice.hit_tokens,
        };
        self.queue.plan(place, plan);
        self.fleet.plan(self.now_s, choice.link, choice.prefill_ms, true);
        self.watch_gate(choice.link);
    }

    fn unplan(&mut self, place: Place) {
        if let Some(plan) = self.queue.unplan(place) {
            self.fleet.plan(self.now_s, plan.worker, plan.prefill_ms, false);
        }
    }

    fn waits(&self, waiting: &Waiting) -> Action {
        let pools = waiting.ask.pools.iter();
        let position = pools.map(|pool| self.queue.position(waiting, pool)).min().unwrap_or(1);
        let rate = self.completions.per_s(self.now_s);
        Action::Waits {
            link: waiting.link,
            ask: waiting.ask.number,
            position: position as u32,
            estimate_ms: if rate > 0.0 {
                milliseconds(position as f64 / rate)
            } else {
                0
            },
        }
    }

    /// When a refused request may find room: once what waits now has been served, as far as one can tell.
    fn drain_ms(&self) -> u32 {
        let rate = self.completions.per_s(self.now_s);
        let wait_s = if rate > 0.0 {
            self.queue.len() as f64 / rate
        } else {
            1.0
        };
        milliseconds(wait_s.clamp(0.1, 60.0))
    }

    // Placement.

    /// Finds a worker for one ask. Those before it in line were tried when they came, and since. True when it has been
    /// granted; when its worker is busy with prompts, it waits for that one.
    fn place_newcomer(&mut self, place: Place) -> bool {
        let mut busy: Option<Choice> = None;
        for at in 0..MAX_POOLS {
            let Some((waiting, name)) = self
                .queue
                .get(place)
                .and_then(|waiting| waiting.ask.pools.get(at).map(|name| (waiting, name)))
            else {
                break;
            };
            let found = self
                .fleet
                .choose(self.now_s, name, &waiting.ask, &mut self.placer, &mut self.rng);
            let Some(choice) = found else {
                continue;
            };
            if !self.is_busy(choice.link) {
                self.grant(place, &choice);
                return true;
            }
            busy = busy.or(Some(choice));
        }
        if let Some(choice) = busy {
            self.plan(place, &choice);
        }
        false
    }

    /// Whether a worker has prompts enough for now, as far as its predictions can be trusted; or its pool has.
    fn is_busy(&mut self, link: Link) -> bool {
        let Some(worker) = self.fleet.workers.get(&link) else {
            return false;
        };
        if !self.fleet.kinds.trusted(worker.kind) {
            return false;
        }
        let ahead_ms = self.policy.dispatch_ahead_s * 1e3;
        let fed = !worker.prefilling.is_empty() && worker.fed_ms(self.now_s) > ahead_ms;
        fed || (self.policy.prefill_share > 0.0 && self.prefill_left_ms(link) <= 0.0)
    }

    /// Prefill that a worker's pool may still be given. A second's share can be saved up.
    fn prefill_left_ms(&mut self, link: Link) -> f64 {
        let Some(worker) = self.fleet.workers.get(&link) else {
            return 0.0;
        };
        let name = &worker.hello.pool;
        let ready = self.fleet.pools.get(name).map_or(0, |pool| pool.ready.len());
        let rate_ms = self.policy.prefill_share * ready as f64 * 1e3;
        let (left_ms, at_s) = self.prefill_left.get(name).copied().unwrap_or((rate_ms, self.now_s));
        let left_ms = (left_ms + rate_ms * (self.now_s - at_s)).min(rate_ms);
        self.prefill_left.insert(name.clone(), (left_ms, self.now_s));
        left_ms
    }

    /// Looks at a worker again when it has computed enough.
    fn watch_gate(&mut self, link: Link) {
        let Some(worker) = self.fleet.workers.get(&link) else {
            return;
        };
        let mut gate_s = worker.fed_until_s(self.policy.dispatch_ahead_s * 1e3);
        if self.policy.prefill_share > 0.0 {
            let ready = self
                .fleet
                .pools
                .get(&worker.hello.pool)
                .map_or(1, |pool| pool.ready.len().max(1));
            let missing_ms = -self
                .prefill_left
                .get(&worker.hello.pool)
                .map_or(0.0, |left| left.0)
                .min(0.0);
            gate_s = gate_s.max(self.now_s + missing_ms / (self.policy.prefill_share * ready as f64 * 1e3));
        }
        self.close_gate(link);
        // Not at this very moment again: what can be done now is done.
        let gate_s = Key(gate_s.max(self.now_s + 1e-3));
        self.gates.insert((gate_s, link));
        self.gate_of.insert(link, gate_s);
    }

    fn close_gate(&mut self, link: Link) {
        if let Some(gate_s) = self.gate_of.remove(&link) {
            self.gates.remove(&(gate_s, link));
        }
    }

    /// A worker may have room: give it to those whose turn it is.
    pub(super) fn offer(&mut self, link: Link) {
        while let Some((place, choice)) = self.next_for(link) {
            if !self.shed_if_late(place, &choice) {
                self.grant(place, &choice);
            }
        }
        if self.queue.waits_for(link) {
            self.watch_gate(link);
        } else {
            self.close_gate(link);
        }
    }

    /// The next in line that this worker can run now.
    fn next_for(&mut self, link: Link) -> Option<(Place, Choice)> {
        let worker = self.fleet.workers.get(&link)?;
        let (pool, open, reserved) = (worker.hello.pool.clone(), worker.open(), worker.reserved_for);
        if !open && reserved.is_none() {
            return None;
        }
        if !worker.aside.is_empty() {
            self.go_on(link);
        }
        if !self.queue.waits_in(&pool) || self.is_busy(link) {
            return None;
        }
        let own = self.next_planned(link);
        let worker = self.fleet.workers.get(&link)?;
        let may_steal = own.is_none() && worker.waiting() == 0 && reserved.is_none();
        let own_turn = own
            .and_then(|place| self.queue.get(place))
            .map(|waiting| self.queue.turn(waiting));
        let (mut next, mut wants_room, mut looked_at) = (None, None, 0);
        for waiting in self.queue.in_turn(&pool).take(LOOKAHEAD) {
            // One of its own comes first.
            if own_turn.is_some_and(|turn| turn <= self.queue.turn(waiting)) {
                break;
            }
            let kept_for_another = reserved.is_some_and(|place| place != waiting.place);
            if kept_for_another || !worker.can_ever_run(&waiting.ask) {
                continue;
            }
            if let Some(plan) = waiting.plan.filter(|plan| self.is_of(plan.worker, &pool)) {
                looked_at += 1;
                if may_steal && looked_at <= STEAL_LOOKAHEAD && worker.has_room(&waiting.ask) {
                    if let Some(choice) = self.better_than(link, &plan, &waiting.ask) {
                        next = Some((waiting.place, choice));
                        break;
                    }
                }
                continue;
            }
            if worker.has_room(&waiting.ask) {
                let (choice, _) = self.fleet.consider(self.now_s, link, &waiting.ask, &self.placer)?;
                next = Some((waiting.place, choice));
                break;
            }
            if waiting.passed >= PASS_LIMIT && waiting.reserved.is_none() {
                wants_room = Some(waiting.place);
                break;
            }
        }
        if next.is_none() && wants_room.is_none() && reserved.is_none() {
            let place = own?;
            let (choice, _) = self
                .fleet
                .consider(self.now_s, link, &self.queue.get(place)?.ask, &self.placer)?;
            return Some((place, choice));
        }
        if let Some(place) = wants_room {
            self.reserve(link, place);
        }
        if next.is_some_and(|(place, _)| self.queue.get(place).is_some_and(|waiting| waiting.plan.is_some())) {
            self.measures.stolen += 1;
        }
        next
    }

    /// The first of those that wait for this worker; who does not fit any more waits for any.
    fn next_planned(&mut self, link: Link) -> Option<Place> {
        loop {
            let worker = self.fleet.workers.get(&link)?;
            let waiting = self.queue.planned(link).next()?;
            if worker.open() && worker.can_ever_run(&waiting.ask) && worker.has_room(&waiting.ask) {
                return Some(waiting.place);
            }
            let place = waiting.place;
            self.unplan(place);
        }
    }

    fn is_of(&self, link: Link, pool: &str) -> bool {
        self.fleet
            .workers
            .get(&link)
            .is_some_and(|worker| &*worker.hello.pool == pool)
    }

    /// That worker as a choice, if it is better than waiting for the one that was planned.
    fn better_than(&self, link: Link, plan: &Plan, ask: &Ask) -> Option<Choice> {
        let (here, here_score) = self.fleet.consider(self.now_s, link, ask, &self.placer)?;
        let (there, there_score) = self.fleet.consider(self.now_s, plan.worker, ask, &self.placer)?;
        // Its own prompt is counted there.
        let there_score = there_score - plan.prefill_ms.min(there.pending_ms);
        (here_score < there_score).then_some(here)
    }

    /// Refuses what was never started and will be late by what it asked for itself.
    fn shed_if_late(&mut self, place: Place, choice: &Choice) -> bool {
        let Some(waiting) = self.queue.get(place) else {
            return true;
        };
        let ask = &waiting.ask;
        let kind = self.fleet.workers.get(&choice.link).map(|worker| worker.kind);
        let trusted = kind.is_some_and(|kind| self.fleet.kinds.trusted(kind));
        if !self.policy.shed || ask.class == Class::Batch || !trusted {
            return false;
        }
        let target_s = ask
            .ttft_target_s
            .map_or(f64::INFINITY, |target_s| waiting.arrived_s + target_s);
        let due_s = target_s.min(ask.deadline_s.unwrap_or(f64::INFINITY));
        let first_s = SHED_MARGIN * choice.prefill_ms / 1e3;
        if self.now_s + first_s <= due_s {
            return false;
        }
        let left_s = due_s - self.now_s;
        let message = format!("its first token needs {first_s:.2} s more and is due in {left_s:.2} s");
        let retry_after_ms = self.drain_ms();
        self.measures.shed += 1;
        self.refuse_waiting(place, Reason::Overloaded, message, retry_after_ms);
        true
    }

    // Batch requests give way.

    /// Puts batch work aside for an ask that finds no room; true when it runs.
    fn make_room(&mut self, place: Place) -> bool {
        let Some(waiting) = self.queue.get(place).filter(|waiting| waiting.plan.is_none()) else {
            return false;
        };
        let Some((link, victim)) = self.victim(&waiting.ask) else {
            return false;
        };
        self.fleet.put_aside(self.now_s, victim);
        self.measures.preempted += 1;
        self.actions.push(Action::Preempt { link, lease: victim });
        let fits = |core: &Self| {
            let worker = core.fleet.workers.get(&link)?;
            let ask = &core.queue.get(place)?.ask;
            (worker.open() && worker.has_room(ask)).then_some(())?;
            core.fleet.consider(core.now_s, link, ask, &core.placer)
        };
        match fits(self) {
            Some((choice, _)) => {
                self.grant(place, &choice);
                true
            }
            None => false,
        }
    }

    /// The batch request that gives way for this ask: of those that are far from their end, the one whose answer has cost
    /// least.
    fn victim(&self, ask: &Ask) -> Option<(Link, LeaseId)> {
        let pools = ask.pools.iter().filter_map(|name| self.fleet.pools.get(name));
        let workers = pools
            .flat_map(|pool| pool.ready.iter())
            .filter_map(|link| self.fleet.workers.get(link));
        let leases = workers
            .filter(|worker| worker.can_ever_run(ask) && worker.held.batch() > 0)
            .flat_map(|worker| {
                worker
                    .held
                    .ids()
                    .filter_map(|id| self.fleet.leases.get(&id))
                    .map(move |lease| (worker.link, lease))
            });
        let may_give_way = leases.filter(|(_, lease)| {
            let expected = self
                .lengths
                .expected(&lease.root, lease.output_tokens, lease.max_tokens);
            lease.class == Class::Batch
                && lease.preempted < MAX_PREEMPTED
                && lease.phase == Phase::Decode
                && f64::from(lease.output_tokens) <= PREEMPT_UNTIL * f64::from(expected.max(1))
        });
        let cost = |lease: &Lease| lease.prompt_tokens + lease.output_tokens;
        let found = may_give_way.min_by_key(|(_, lease)| (cost(lease), lease.id));
        found.map(|(link, lease)| (link, lease.id))
    }

    /// Takes up what was put aside at a worker with room, when nobody of a higher class waits or it has waited long enough.
    fn go_on(&mut self, link: Link) {
        while let Some(worker) = self.fleet.workers.get(&link) {
            let Some(&(since, id)) = worker.aside.first() else {
                return;
            };
            let Some(lease) = self.fleet.leases.get(&id) else {
                return;
            };
            let choices = u64::from(lease.choices);
            let room = worker.held.is_empty()
                || worker.held.choices() + choices <= u64::from(worker.slots) && worker.has_kv(lease.kv_tokens);
            let aged = self.now_s - since.0 >= 2.0 * AGING_S;
            let first = self.queue.in_turn(&worker.hello.pool).next();
            let others_first = first.is_some_and(|waiting| waiting.rank() < Class::Batch.rank());
            if !room || (others_first && !aged) || !worker.ready() {
                return;
            }
            self.fleet.go_on(self.now_s, link, id);
            self.measures.resumed += 1;
            self.actions.push(Action::Resume { link, lease: id });
        }
    }

    /// Counts against whoever is first in that pool's line and is not the one that is served.
    fn count_pass(&mut self, pool: &str, served: Place) {
        let first = self.queue.in_turn(pool).next().map(|waiting| waiting.place);
        if let Some(first) = first.filter(|&first| first != served) {
            if let Some(waiting) = self.queue.get_mut(first) {
                waiting.passed += 1;
            }
        }
    }

    fn reserve(&mut self, link: Link, place: Place) {
        if let (Some(worker), Some(waiting)) = (self.fleet.workers.get_mut(&link), self.queue.get_mut(place)) {
            worker.reserved_for = Some(place);
            waiting.reserved = Some(link);
        }
        self.fleet.reorder(link);
    }

    fn unreserve(&mut self, link: Link, place: Place) {
        if let Some(worker) = self.fleet.workers.get_mut(&link) {
            if worker.reserved_for == Some(place) {
                worker.reserved_for = None;
                self.fleet.reorder(link);
            }
        }
    }

    fn grant(&mut self, place: Place, choice: &Choice) {
        let link = choice.link;
        let Some(pool) = self.fleet.workers.get(&link).map(|worker| worker.hello.pool.clone()) else {
            return;
        };
        self.count_pass(&pool, place);
        let first = self.queue.in_turn(&pool).next();
        let credit_waits = first.is_some_and(|first| self.queue.accounts.has_credit(first.account));
        let Some(waiting) = self.take_waiting(place) else {
            return;
        };
        let (Some(worker), Some(router_id)) = (self.fleet.workers.get(&link), self.routers_by_link.get(&waiting.link))
        else {
            return;
        };
        let (ask, hello, id) = (&waiting.ask, &worker.hello, self.next_lease);
        let root = Root::of(ask);
        let expected = if ask.expected_output_tokens > 0 {
            ask.expected_output_tokens
        } else {
            self.lengths.expected(&root, 0, ask.max_tokens)
        };
        let uncached = ask.prompt_tokens - choice.hit_tokens.min(ask.prompt_tokens);
        let charge = f64::from(uncached) + OUTPUT_WEIGHT * f64::from(ask.choices) * f64::from(expected);
        if !credit_waits {
            self.queue.accounts.next_round(waiting.account);
        }
        self.queue.accounts.charge(waiting.account, charge);
        let first_ms = self
            .fleet
            .kinds
            .first_token_ms(worker.kind, worker.pace, uncached, choice.hit_tokens);
        let predicted_ttft_s = first_ms.map(|first_ms| (worker.fed_ms(self.now_s) + first_ms) / 1e3);
        self.actions.push(Action::Granted(Box::new(Grant {
            link: waiting.link,
            ask: ask.number,
            lease: id,
            worker: link,
            worker_id: hello.worker_id.clone(),
            instance_id: hello.instance_id.clone(),
            address: hello.address.clone(),
            pool: pool.clone(),
            class: ask.class,
            queue_s: self.now_s - waiting.arrived_s,
            predicted_ttft_s,
            cached_tokens: choice.hit_tokens,
            token_allowance: 0,
        })));
        let mut kv = kv_tokens(ask);
        if ask.expected_output_tokens == 0 {
            // Less where answers are short; not more, see there.
            let spared = ANSWER_KV_TOKENS.saturating_sub(expected).min(ANSWER_KV_TOKENS);
            kv = kv
                .saturating_sub(u64::from(ask.choices) * u64::from(spared))
                .max(u64::from(ask.prompt_tokens));
        }
        let lease = Lease {
            id,
            router_id: router_id.clone(),
            instance_id: hello.instance_id.clone(),
            request_id: ask.request_id.clone(),
            tenant: ask.tenant.clone(),
            choices: ask.choices,
            prompt_tokens: ask.prompt_tokens,
            kv_tokens: kv,
            granted_s: self.now_s,
            class: ask.class,
            phase: Phase::Prefill,
            prefill_ms: choice.prefill_ms,
            predicted_ttft_s,
            charged: Some((waiting.account, charge)),
            root,
            output_tokens: 0,
            max_tokens: ask.max_tokens,
            tpot_target_s: self.policy.tpot_target_s(ask),
            // Who has waited so long that it came up a class is not put aside again.
            preempted: if waiting.rank() < ask.class.rank() {
                MAX_PREEMPTED
            } else {
                0
            },
            by_credit: None,
        };
        self.next_lease += 1;
        if self.policy.prefill_share > 0.0 {
            self.prefill_left_ms(link);
            if let Some((left_ms, _)) = self.prefill_left.get_mut(&pool) {
                *left_ms -= choice.prefill_ms;
            }
        }
        self.hold(lease);
        self.fleet.believe(link, &waiting.ask.block_hashes);
        self.room_changed(link);
    }

    // Leases.

    fn progressed(&mut self, link: Link, id: LeaseId, output_tokens: u32) {
        let router_id = self.routers_by_link.get(&link);
        let Some(lease) = self
            .fleet
            .leases
            .get_mut(&id)
            .filter(|lease| router_id == Some(&lease.router_id))
        else {
            return;
        };
        if let Some(predicted_s) = lease.predicted_ttft_s.take() {
            let observed_s = self.now_s - lease.granted_s;
            self.predictions.count += 1;
            self.predictions.predicted_s += predicted_s;
            self.predictions.observed_s += observed_s;
            self.predictions.error_s += (observed_s - predicted_s).abs();
        }
        if let Some(worker) = self.fleet.progress(self.now_s, id, output_tokens) {
            self.offer(worker);
        }
    }

    fn released(&mut self, link: Link, id: LeaseId, books: &Books) {
        let Some(lease) = self.fleet.leases.get(&id) else {
            self.oddities.release_unknown += 1;
            return;
        };
        if self.routers_by_link.get(&link) != Some(&lease.router_id) {
            self.oddities.release_foreign += 1;
            return;
        }
        self.completions.add(self.now_s, 1.0);
        if books.outcome != Outcome::Cut {
            self.lengths
                .observe(&lease.root, books.completion_tokens / lease.choices.max(1));
        }
        if let Some((account, charged)) = lease.charged {
            let uncached = books.prompt_tokens.saturating_sub(books.cached_prompt_tokens);
            let actual = f64::from(uncached) + OUTPUT_WEIGHT * f64::from(books.completion_tokens);
            self.queue.accounts.charge(account, actual - charged);
        }
        self.free(id);
    }

    /// The one way by which a lease ends while its worker lives.
    fn free(&mut self, id: LeaseId) {
        let Some((lease, worker)) = self.fleet.free(self.now_s, id) else {
            return;
        };
        self.forget_lease(&lease);
        if let Some(link) = worker {
            self.settled_by_credit(&lease, link);
            self.room_changed(link);
            self.offer(link);
        }
    }

    fn forget_lease(&mut self, lease: &Lease) {
        if let Some(router) = self.routers.get_mut(&lease.router_id) {
            router.leases.remove(&lease.id);
        }
        if let Some((account, _)) = lease.charged {
            self.queue.accounts.close(account);
        }
    }

    // Workers.

    fn worker_joined(&mut self, link: Link, hello: WorkerHello) {
        let refuse = |message, already_joined| Action::JoinRefused {
            link,
            message,
            already_joined,
        };
        let fields = [
            ("worker_id", &hello.worker_id),
            ("instance_id", &hello.instance_id),
            ("pool", &hello.pool),
            ("address", &hello.address),
        ];
        let missing: Vec<_> = fields
            .iter()
            .filter(|(_, value)| value.is_empty())
            .map(|(name, _)| *name)
            .collect();
        if !missing.is_empty() {
            let message = format!("hello: {} must not be empty", missing.join(", "));
            self.actions.push(refuse(message, false));
            return;
        }
        if self.fleet.instance(&hello.instance_id).is_some() {
            let message = format!("instance {} is joined already", hello.instance_id);
            self.actions.push(refuse(message, true));
            return;
        }
        // Two processes cannot listen at one address, so whoever was there before is gone.
        for previous in self.fleet.at_address(&hello.address) {
            let message = format!("instance {} is at {} now", hello.instance_id, hello.address);
            self.actions.push(Action::WorkerDropped {
                link: previous,
                message,
            });
            self.remove_worker(previous);
        }
        let contradiction = self.fleet.contradiction(&hello);
        if !contradiction.is_empty() {
            let message = format!("contradicts the other workers of pool {}: {contradiction}", hello.pool);
            self.actions.push(refuse(message, false));
            return;
        }
        if self.settled_s.is_some() {
            self.seen_pools.insert(hello.pool.clone());
        }
        self.fleet.join(self.now_s, link, hello);
        self.silence_check_s = self.silence_check_s.min(self.now_s + self.policy.silence_s());
        self.actions.push(Action::Welcomed {
            link,
            heartbeat_ms: milliseconds(self.policy.heartbeat_s),
        });
    }

    fn worker_reported(&mut self, link: Link, load: Load) {
        let Some(worker) = self.fleet.workers.get(&link) else {
            return;
        };
        let pool = worker.hello.pool.clone();
        let served = self.longest(&pool);
        let changed = self.fleet.report(self.now_s, link, load, self.policy.heartbeat_s);
        let shorter = self.longest(&pool) < served;
        let ready = self.fleet.workers.get(&link).is_some_and(|worker| worker.ready());
        if changed && (!ready || shorter) {
            if let Some(place) = self.fleet.workers.get(&link).and_then(|worker| worker.reserved_for) {
                self.give_room_up(link, place);
            }
            let planned: Vec<_> = self.queue.planned(link).map(|waiting| waiting.place).collect();
            for &place in &planned {
                self.unplan(place);
            }
            self.serves_less(&pool, shorter);
            for place in planned {
                self.place_newcomer(place);
            }
        }
        self.set_chunk(link);
        self.room_changed(link);
        self.offer(link);
    }

    /// Tells a worker how many prompt tokens go beside its decoding, when that has changed much.
    fn set_chunk(&mut self, link: Link) {
        let [floor, most] = self.policy.chunk_tokens;
        let Some(worker) = self.fleet.workers.get_mut(&link) else {
            return;
        };
        let decoding = worker.held.choices().saturating_sub(worker.prefilling.len() as u64) as u32;
        if most == 0 || decoding == 0 {
            return;
        }
        let target_ms = CHUNK_SHARE * 1e3 * worker.held.tpot_target_s().unwrap_or(f64::INFINITY);
        let step = Shape::decode(decoding, worker.load.context_tokens);
        let kinds = &self.fleet.kinds;
        let Some(chunk) = kinds.chunk_tokens(worker.kind, worker.pace, &step, target_ms, floor.min(most), most) else {
            return;
        };
        let before = f64::from(worker.chunk_tokens.unwrap_or(0));
        if (f64::from(chunk) - before).abs() > 0.1 * before {
            worker.chunk_tokens = Some(chunk);
            self.actions.push(Action::SetChunk {
                link,
                chunk_tokens: chunk,
            });
        }
    }

    fn longest(&self, pool: &str) -> u32 {
        self.fleet.pools.get(pool).map_or(0, |pool| pool.max_prompt_tokens)
    }

    fn remove_worker(&mut self, link: Link) {
        let Some(worker) = self.fleet.workers.get(&link) else {
            return;
        };
        let (pool, reserved) = (worker.hello.pool.clone(), worker.reserved_for);
        let served = self.longest(&pool);
        self.close_gate(link);
        let planned: Vec<_> = self.queue.planned(link).map(|waiting| waiting.place).collect();
        for &place in &planned {
            self.unplan(place);
        }
        let Some((_, leases)) = self.fleet.remove(link) else {
            return;
        };
        self.unlend(link);
        for lease in &leases {
            self.forget_lease(lease);
        }
        if let Some(place) = reserved {
            self.give_room_up(link, place);
        }
        self.serves_less(&pool, self.longest(&pool) < served);
        // They find another worker, or wait for any.
        for place in planned {
            self.place_newcomer(place);
        }
    }

    /// A worker keeps no room any more.
    fn give_room_up(&mut self, link: Link, place: Place) {
        if let Some(waiting) = self.queue.get_mut(place) {
            waiting.reserved = None;
        }
        self.unreserve(link, place);
    }

    /// A worker takes nothing any more, or its pool only shorter prompts: who waits may have nobody left. With others left,
    /// only they who refuse some of them can be concerned.
    fn serves_less(&mut self, pool: &str, shorter: bool) {
        let places = if shorter {
            self.queue.of_pool(pool)
        } else {
            self.queue.picky(pool)
        };
        self.refuse_stranded(&places);
    }
}

fn milliseconds(seconds: f64) -> u32 {
    (seconds.min(3600.0) * 1000.0).ceil() as u32
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
impl Core {
    /// What holds after every step.
    pub(super) fn check(&self) {
        assert!(self.queue.len() <= self.policy.max_queued);
        self.fleet.check();
        self.queue.check();
        let by_router: Vec<_> = self
            .routers
            .values()
            .flat_map(|router| router.leases.iter().copied())
            .collect();
        let mut all: Vec<_> = self.fleet.leases.keys().copied().collect();
        let mut of_routers = by_router;
        all.sort_unstable();
        of_routers.sort_unstable();
        assert_eq!(of_routers, all, "each lease is one router's");
        for router in self.routers.values() {
            let away = self
                .away
                .iter()
                .any(|(_, id)| self.routers.get(id).is_some_and(|each| std::ptr::eq(each, router)));
            assert_eq!(router.link.is_none(), away);
        }
        for worker in self.fleet.workers.values() {
            if let Some(place) = worker.reserved_for {
                assert_eq!(self.queue.get(place).unwrap().reserved, Some(worker.link));
            }
        }
    }

    /// Nothing is left of anything.
    pub(super) fn check_empty(&self) {
        assert!(self.queue.is_empty() && self.away.is_empty() && self.routers_by_link.is_empty());
        for worker in self.fleet.workers.values() {
            assert!(worker.held.is_empty() && worker.unreported.is_empty() && worker.reserved_for.is_none());
        }
        self.fleet.check_empty();
    }

    /// The score of each worker that could take this now, by looking at all of them; None = nobody could.
    pub(super) fn brute_force(&self, now_s: f64, pool: &str, ask: &Ask) -> Option<BTreeMap<Link, f64>> {
        let pool = &self.fleet.pools[pool];
        let fits = |link: &Link| {
            let worker = &self.fleet.workers[link];
            worker.open() && worker.can_ever_run(ask) && worker.has_room(ask)
        };
        let fitting = pool.ready.iter().copied().filter(fits);
        let score = |link| self.fleet.consider(now_s, link, ask, &self.placer).unwrap().1;
        let scores: BTreeMap<_, _> = fitting.map(|link| (link, score(link))).collect();
        (!scores.is_empty()).then_some(scores)
    }

    /// As if so many had been served past it.
    pub(super) fn pass_over(&mut self, place: Place, times: u32) {
        self.queue.get_mut(place).unwrap().passed = times;
    }
}
