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
use serde::Deserialize;

use super::{
    actions::{Action, Grant, Reason, Refusal},
    events::{Ask, Event, LeaseId, Link, Load, RunningLease, WorkerHello},
    fleet::{kv_tokens, Fleet, Lease},
    lending::Lending,
    map::{Key, Map},
    queue::{Place, Queue, Waiting},
    rate::Rate,
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
    /// Lend room to routers while nothing waits.
    pub credits: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            max_queued: 4096,
            heartbeat_s: 0.25,
            heartbeats_missed: 12,
            router_grace_s: 5.0,
            queue_factor: 1.25,
            credits: false,
        }
    }
}

impl Policy {
    /// A worker that is silent for so long is out.
    pub fn silence_s(&self) -> f64 {
        self.heartbeat_s * f64::from(self.heartbeats_missed)
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

/// All that the scheduler knows and decides.
#[derive(Debug)]
pub struct Core {
    pub(super) policy: Policy,
    pub(super) fleet: Fleet,
    pub(super) queue: Queue,
    pub(super) routers: BTreeMap<Arc<str>, Router>,
    pub(super) oddities: Oddities,
    rng: SmallRng,
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
            queue: Queue::default(),
            routers: BTreeMap::new(),
            oddities: Oddities::default(),
            rng: SmallRng::seed_from_u64(seed),
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
            Event::Released { link, lease, .. } => self.released(link, lease),
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
            Event::Placed {
                link,
                lease,
                worker,
                ask,
            } => self.placed(link, lease, worker, &ask),
            Event::KnowsShares { link, number } => self.knows_shares(link, number),
            Event::Progressed { .. } | Event::BlocksChanged { .. } | Event::Tick => {}
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
            by_credit: None,
        });
    }

    pub(super) fn hold(&mut self, lease: Lease) {
        if let Some(router) = self.routers.get_mut(&lease.router_id) {
            router.leases.insert(lease.id);
        }
        self.fleet.hold(lease);
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
        let place = self.queue.add(self.now_s, link, ask);
        if self.place_newcomer(place) {
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
        self.stranded(link, ask)
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

    fn remove_waiting(&mut self, place: Place) -> Option<Waiting> {
        let waiting = self.queue.remove(place)?;
        if let Some(link) = waiting.reserved {
            self.unreserve(link, place);
        }
        Some(waiting)
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

    /// Tries all workers for one ask. Those before it in line were tried when they came, and since.
    fn place_newcomer(&mut self, place: Place) -> bool {
        let Some(waiting) = self.queue.get(place) else {
            return false;
        };
        for name in &waiting.ask.pools {
            let Some(pool) = self.fleet.pools.get(name) else {
                continue;
            };
            if let Some(link) = self.fleet.choose(pool, &waiting.ask, &mut self.rng) {
                self.grant(link, place);
                return true;
            }
        }
        false
    }

    /// A worker may have room: give it to those whose turn it is.
    pub(super) fn offer(&mut self, link: Link) {
        while let Some(place) = self.next_for(link) {
            self.grant(link, place);
        }
    }

    /// The next in line that this worker can run now.
    fn next_for(&mut self, link: Link) -> Option<Place> {
        let worker = self.fleet.workers.get(&link)?;
        if !worker.open() && worker.reserved_for.is_none() {
            return None;
        }
        let mut wants_room = None;
        for waiting in self.queue.in_turn(&worker.hello.pool).take(LOOKAHEAD) {
            let kept_for_another = worker.reserved_for.is_some_and(|place| place != waiting.place);
            if kept_for_another || !worker.can_ever_run(&waiting.ask) {
                continue;
            }
            if worker.has_room(&waiting.ask) {
                return Some(waiting.place);
            }
            if waiting.passed >= PASS_LIMIT && waiting.reserved.is_none() {
                wants_room = Some(waiting.place);
                break;
            }
        }
        if let Some(place) = wants_room {
            self.reserve(link, place);
        }
        None
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

    fn grant(&mut self, link: Link, place: Place) {
        let Some(pool) = self.fleet.workers.get(&link).map(|worker| worker.hello.pool.clone()) else {
            return;
        };
        self.count_pass(&pool, place);
        let Some(waiting) = self.remove_waiting(place) else {
            return;
        };
        let (Some(worker), Some(router_id)) = (self.fleet.workers.get(&link), self.routers_by_link.get(&waiting.link))
        else {
            return;
        };
        let (ask, hello, id) = (&waiting.ask, &worker.hello, self.next_lease);
        self.actions.push(Action::Granted(Box::new(Grant {
            link: waiting.link,
            ask: ask.number,
            lease: id,
            worker: link,
            worker_id: hello.worker_id.clone(),
            instance_id: hello.instance_id.clone(),
            address: hello.address.clone(),
            pool,
            class: ask.class,
            queue_s: self.now_s - waiting.arrived_s,
            predicted_ttft_s: None,
            cached_tokens: 0,
            token_allowance: 0,
        })));
        let lease = Lease {
            id,
            router_id: router_id.clone(),
            instance_id: hello.instance_id.clone(),
            request_id: ask.request_id.clone(),
            tenant: ask.tenant.clone(),
            choices: ask.choices,
            prompt_tokens: ask.prompt_tokens,
            kv_tokens: kv_tokens(ask),
            granted_s: self.now_s,
            by_credit: None,
        };
        self.next_lease += 1;
        self.hold(lease);
        self.room_changed(link);
    }

    // Leases.

    fn released(&mut self, link: Link, id: LeaseId) {
        let Some(lease) = self.fleet.leases.get(&id) else {
            self.oddities.release_unknown += 1;
            return;
        };
        if self.routers_by_link.get(&link) != Some(&lease.router_id) {
            self.oddities.release_foreign += 1;
            return;
        }
        self.completions.add(self.now_s, 1.0);
        self.free(id);
    }

    /// The one way by which a lease ends while its worker lives.
    fn free(&mut self, id: LeaseId) {
        let Some((lease, worker)) = self.fleet.free(id) else {
            return;
        };
        if let Some(router) = self.routers.get_mut(&lease.router_id) {
            router.leases.remove(&id);
        }
        if let Some(link) = worker {
            self.settled_by_credit(&lease, link);
            self.room_changed(link);
            self.offer(link);
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
            self.serves_less(&pool, shorter);
        }
        self.room_changed(link);
        self.offer(link);
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
        let Some((_, leases)) = self.fleet.remove(link) else {
            return;
        };
        self.unlend(link);
        for lease in leases {
            if let Some(router) = self.routers.get_mut(&lease.router_id) {
                router.leases.remove(&lease.id);
            }
        }
        if let Some(place) = reserved {
            self.give_room_up(link, place);
        }
        self.serves_less(&pool, self.longest(&pool) < served);
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

    /// As if so many had been served past it.
    pub(super) fn pass_over(&mut self, place: Place, times: u32) {
        self.queue.get_mut(place).unwrap().passed = times;
    }
}
