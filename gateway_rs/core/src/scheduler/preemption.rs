//! Batch requests give way to interactive ones that find no room, and go on later.

use std::cmp::Reverse;

use super::{
    actions::Action,
    core::Core,
    events::{Ask, Class, LeaseId, Link},
    leases::{Lease, Phase},
    queue::{Place, Urgency, Waiting, AGING_S},
    worker::Worker,
};

/// An answer that was put aside so often is left alone, if not too many are.
pub(super) const MAX_PREEMPTED: u32 = 8;

/// One that has said more than this share of what it is expected to say is put aside last.
const PREEMPT_UNTIL: f64 = 0.8;

/// Workers of a pool that are looked at.
const MOST_LOOKED_AT: usize = 32;

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
        let planned = waiting.plan.map(|plan| plan.worker);
        let Some((link, victim)) = self.victim(&waiting.ask, planned) else {
            return false;
        };
        self.fleet.put_aside(self.now_s, victim);
        self.measures.preempted += 1;
        self.actions.push(Action::Preempt { link, lease: victim });
        // It is not one of those who wait there before it.
        self.unplan(place);
        let Some(ask) = self.queue.get(place).map(|waiting| &waiting.ask) else {
            return false;
        };
        let found = self.fleet.consider(self.now_s, link, ask, false, &self.placer);
        let Some((choice, _)) = found else {
            return false;
        };
        if self.fits(place, link, choice.hit_tokens) {
            self.grant(place, &choice);
            return true;
        }
        if planned.is_some() {
            self.plan(place, &choice);
        }
        false
    }

    /// The batch request that gives way for this ask: at the worker that it waits for, else where others take the fewest
    /// slots and there is one.
    fn victim(&self, ask: &Ask, planned: Option<Link>) -> Option<(Link, LeaseId)> {
        let pools = ask.pools.iter().filter_map(|name| self.fleet.pools.get(name));
        let workers = pools.flat_map(|pool| pool.makes_way.links().take(MOST_LOOKED_AT));
        (planned.into_iter().chain(workers))
            .filter_map(|link| self.fleet.workers.get(&link))
            .find_map(|worker| {
                let lease = worker.can_ever_run(ask).then(|| self.victim_of(worker)).flatten()?;
                Some((worker.link, lease))
            })
    }

    /// Of a worker's batch requests: the last of those that wait there, which have cost nothing; else, of those that are
    /// far from their end, the one whose answer has cost least; else one that is near it.
    fn victim_of(&self, worker: &Worker) -> Option<LeaseId> {
        let leases = worker.held.ids().filter_map(|id| self.fleet.leases.get(&id));
        let may_give_way = leases.filter(|lease| lease.class == Class::Batch && !lease.stays);
        let standing = |lease: &Lease| match lease.phase {
            Phase::Prefill => {
                // One that no report has told of may not be there yet.
                let waits = !lease.prompt_only && !worker.unreported.contains(lease);
                waits.then_some((0, 0, Reverse(lease.id)))
            }
            Phase::Decode => {
                let expected = self
                    .lengths
                    .expected(&lease.root, lease.output_tokens, lease.max_tokens);
                let near = f64::from(lease.output_tokens) > PREEMPT_UNTIL * f64::from(expected.max(1));
                let cost = lease.prompt_tokens + lease.output_tokens;
                Some((1 + u32::from(near), cost, Reverse(0)))
            }
            _ => None,
        };
        let found = may_give_way.filter_map(|lease| Some((standing(lease)?, lease.id)));
        found.min().map(|(_, id)| id)
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
            // What has said nothing yet is put aside again and again.
            let waits_since_s = if lease.output_tokens == 0 {
                lease.first_granted_s
            } else {
                since.0
            };
            let aged = lease.stays || self.now_s - waits_since_s >= 2.0 * AGING_S;
            let first = self.queue.in_turn(&worker.hello.pool).next();
            let others_first = first.is_some_and(|waiting| waiting.rank() < Class::Batch.rank());
            if !room || !worker.ready() {
                return;
            }
            // It has waited its time: nobody goes before it again.
            let stays = aged && self.fleet.stay(link, id);
            if others_first && !stays {
                return;
            }
            self.fleet.go_on(self.now_s, link, id);
            if let Some(lease) = self.fleet.leases.get_mut(&id).filter(|_| stays) {
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
