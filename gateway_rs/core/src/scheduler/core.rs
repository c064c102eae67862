//! Events in, actions out, and time. See the module's text for the contract with the driver; the decisions are in
//! `members.rs`, `admission.rs`, `placement.rs`, `preemption.rs` and `lending.rs`.
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
use serde::Serialize;

use super::{
    actions::{Action, Reason},
    events::{Event, LeaseId, Link},
    fair::Accounts,
    fleet::Fleet,
    lending::Lending,
    lengths::Lengths,
    map::{Key, Map},
    policy::Policy,
    queue::{Place, Queue},
    rate::Rate,
    spending::Parking,
    worker::Worker,
};
use crate::{
    blocks::Blocks,
    budgets::{Budgets, Prices},
    place::Placer,
};

/// Routers hear of changes in the fleet at most so often: many workers that come at once are one change.
const FLEET_INTERVAL_S: f64 = 0.05;

/// A worker that was told to report rarely has missed so many reports at least before it is out.
const LEAST_MISSED: f64 = 3.0;

/// The driver called later than agreed by more than this: we were stopped, not the workers silent.
const LATE_S: f64 = 0.25;

/// A router, over its reconnections.
#[derive(Debug)]
pub struct Router {
    /// Its stream; None = it is away.
    pub link: Option<Link>,
    /// What it holds.
    pub leases: BTreeSet<LeaseId>,
    /// The stream whose shares it may still use: while it is away, those of its last one.
    pub(super) shares: Option<Link>,
    /// Requests of late.
    pub(super) demand: Rate,
    /// When its leases end, while it is away.
    pub(super) expires_s: f64,
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
    /// Prompts computed on another worker than their answers.
    pub parted: u64,
}

/// All that the scheduler knows and decides.
#[derive(Debug)]
pub struct Core {
    pub(super) policy: Policy,
    pub(super) fleet: Fleet,
    pub(super) queue: Queue,
    pub(super) routers: BTreeMap<Arc<str>, Router>,
    pub(super) oddities: Oddities,
    pub(super) rng: SmallRng,
    pub(super) placer: Placer,
    pub(super) lengths: Lengths,
    pub(super) predictions: Predictions,
    pub(super) measures: Measures,
    /// Workers to be looked at when they have computed enough of what they have.
    pub(super) gates: BTreeSet<(Key, Link)>,
    pub(super) gate_of: Map<Link, Key>,
    /// When each ask that waits for a worker can't be in time there any more, by its own deadline or target.
    pub(super) lates: BTreeSet<(Key, Place)>,
    pub(super) late_of: Map<Place, Key>,
    /// Predicted prefill that each pool may still be given, in ms, and as of when.
    pub(super) prefill_left: BTreeMap<Arc<str>, (f64, f64)>,
    pub(super) now_s: f64,
    pub(super) next_lease: LeaseId,
    pub(super) routers_by_link: Map<Link, Arc<str>>,
    /// Routers that are away, by when their leases end.
    pub(super) away: BTreeSet<(Key, Arc<str>)>,
    pub(super) completions: Rate,
    pub(super) fleet_told_s: f64,
    /// Just started: routers may be quicker to come back than workers, so a pool nobody has heard of may still come.
    pub(super) settled_s: Option<f64>,
    pub(super) seen_pools: BTreeSet<Arc<str>>,
    pub(super) silence_check_s: f64,
    pub(super) lending: Lending,
    pub(super) budgets: Budgets,
    pub(super) prices: Prices,
    pub(super) parking: Parking,
    /// Workers for prompts that have the time for one, and nobody to answer it.
    pub(super) blocked: BTreeSet<Link>,
    pub(super) actions: Vec<Action>,
}

impl Core {
    /// A scheduler that knows nobody. Lease numbers go up from `first_lease`: from elsewhere at each start, so that old
    /// leases stay apart.
    pub fn new(policy: Policy, seed: u64, now_s: f64, first_lease: LeaseId) -> Self {
        Self {
            fleet: Fleet::new(policy.queue_factor, policy.preempt),
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
            lates: BTreeSet::new(),
            late_of: Map::default(),
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
            budgets: Budgets::default(),
            prices: Prices::default(),
            parking: Parking::default(),
            blocked: BTreeSet::new(),
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
                bookings,
            } => self.router_joined(link, router_id, running, bookings),
            Event::RouterLost { link } => self.router_lost(link),
            Event::WorkerJoined { link, hello } => self.worker_joined(link, *hello),
            Event::WorkerLost { link } => self.remove_worker(link),
            Event::BlocksChanged { link, change } => self.fleet.blocks_changed(link, change),
            Event::Placed {
                link,
                lease,
                worker,
                ask,
            } => self.placed(link, lease, worker, &ask),
            Event::KnowsShares { link, number } => self.knows_shares(link, number),
            Event::Settled {
                link,
                number,
                settlement,
            } => self.settled(link, number, *settlement),
            Event::Orphaned {
                booking,
                output_tokens,
                cached_tokens,
            } => self.budgets.grows(booking, output_tokens, cached_tokens),
            Event::LedgerDone { answers } => self.ledger_done(&answers),
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
        if let Some((late_s, _)) = self.lates.first() {
            earliest_s = earliest_s.min(late_s.0);
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
        if let Some(parked_s) = self.parking.next_s() {
            earliest_s = earliest_s.min(parked_s);
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

    /// Who holds which blocks, to be told of it by whoever knows. It decides nothing by itself.
    pub fn blocks_mut(&mut self) -> &mut Blocks {
        self.fleet.blocks_mut()
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

    pub(super) fn pass_time(&mut self) {
        while let Some(place) = self.queue.expired(self.now_s) {
            let waited_s = self
                .queue
                .get(place)
                .map_or(0.0, |waiting| self.now_s - waiting.arrived_s);
            let message = format!("the deadline passed in the queue, after {waited_s:.2} s");
            self.refuse_waiting(place, Reason::DeadlineExceeded, message, 0);
        }
        let pools = &self.fleet.pools;
        self.queue.age(self.now_s, |pool| {
            pools.get(pool).map_or(1, |pool| pool.more_may_stay())
        });
        self.pass_time_in_books();
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
        while let Some(&(late_s, place)) = self.lates.first() {
            if late_s.0 > self.now_s {
                break;
            }
            self.unwatch_late(place);
            let plan = self.queue.get(place).and_then(|waiting| waiting.plan);
            if let Some(plan) = plan.filter(|plan| self.shed_if_late(place, plan.worker, plan.prefill_ms)) {
                self.offer(plan.worker);
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
        let until_s = |worker: &Worker| worker.heard_s + silence_s.max(LEAST_MISSED * worker.heartbeat_s);
        let workers = self.fleet.workers.values();
        let out: Vec<_> = workers
            .filter(|each| until_s(each) <= self.now_s)
            .map(|each| (each.link, each.heard_s))
            .collect();
        for (link, heard_s) in out {
            let message = format!("no report for {:.2} s", self.now_s - heard_s);
            self.actions.push(Action::WorkerDropped { link, message });
            self.remove_worker(link);
        }
        // Gone through once per silence or so and not at each report: whoever reports meanwhile only moves later.
        self.silence_check_s = self.fleet.workers.values().map(until_s).fold(f64::INFINITY, f64::min);
    }
}

pub(super) fn milliseconds(seconds: f64) -> u32 {
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
    pub(super) fn brute_force(&self, now_s: f64, pool: &str, ask: &super::events::Ask) -> Option<BTreeMap<Link, f64>> {
        let pool = &self.fleet.pools[pool];
        let fits = |link: &Link| {
            let worker = &self.fleet.workers[link];
            let suits = pool.suits(super::pool::Part::Answer, worker.prompts_only(), ask);
            suits && worker.can_ever_run(ask) && pool.has_slots(worker, ask)
        };
        let fitting = pool.ready.iter().copied().filter(fits);
        let beside = |link, most_tokens| {
            let found = self
                .fleet
                .consider_beside(now_s, link, ask, false, most_tokens, &self.placer);
            found.unwrap()
        };
        let most_tokens = fitting
            .clone()
            .map(|link| beside(link, 0).0.hit_tokens)
            .max()
            .unwrap_or(0);
        let scores: BTreeMap<_, _> = fitting.map(|link| (link, beside(link, most_tokens).1)).collect();
        (!scores.is_empty()).then_some(scores)
    }

    /// As if so many had been served past it.
    pub(super) fn pass_over(&mut self, place: super::queue::Place, times: u32) {
        self.queue.get_mut(place).unwrap().passed = times;
    }
}
