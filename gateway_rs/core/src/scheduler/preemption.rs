//! Batch requests give way to interactive ones that find no room, and go on later.

use super::{
    actions::Action,
    core::Core,
    events::{Ask, Class, LeaseId, Link},
    leases::{Lease, Phase},
    queue::{Place, Urgency, Waiting, AGING_S},
};

/// A request that was put aside so often is left alone.
pub(super) const MAX_PREEMPTED: u32 = 2;

/// Nor is one put aside that has said more than this share of what it is expected to say.
const PREEMPT_UNTIL: f64 = 0.8;

impl Core {
    /// Puts batch work aside for an ask that finds no room; true when it runs.
    pub(super) fn make_room(&mut self, place: Place) -> bool {
        // What waits for its turn alone is not helped.
        let lacks_room = |waiting: &&Waiting| match waiting.plan {
            Some(plan) => !self.fits(place, plan.worker, plan.hit_tokens),
            None => true,
        };
        let Some(waiting) = self.queue.get(place).filter(lacks_room) else {
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
            let (choice, _) = core.fleet.consider(core.now_s, link, ask, false, &core.placer)?;
            (worker.open() && worker.has_room(ask, choice.hit_tokens)).then_some(choice)
        };
        match fits(self) {
            Some(choice) => {
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
    pub(super) fn go_on(&mut self, link: Link) {
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
            if let Some(lease) = self.fleet.leases.get_mut(&id).filter(|_| aged) {
                // It has waited its time: nobody goes before it again.
                lease.preempted = MAX_PREEMPTED;
                lease.urgency = Urgency {
                    rank: Class::Interactive.rank(),
                    due: since,
                };
            }
            self.measures.resumed += 1;
            self.actions.push(Action::Resume { link, lease: id });
        }
    }
}
