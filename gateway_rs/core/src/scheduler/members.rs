//! Routers and workers that come and go, and the leases between them.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    actions::Action,
    core::{milliseconds, Core, Router},
    events::{Books, Class, LeaseId, Link, Load, Outcome, RunningLease, WorkerHello},
    fair::OUTPUT_WEIGHT,
    leases::{Lease, Phase},
    lengths::Root,
    map::Key,
    queue::{Place, Urgency},
    rate::Rate,
};
use crate::budgets::Booking;

/// A pace of reports that differs by no more than this factor from the one that a worker was told is no news.
const PACE_GRAIN: f64 = 1.25;

impl Core {
    // Routers.

    pub(super) fn router_joined(
        &mut self,
        link: Link,
        router_id: Arc<str>,
        running: Vec<RunningLease>,
        bookings: Vec<Booking>,
    ) {
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
        self.orphan(&router_id, &bookings.into_iter().collect());
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
            blocks: Vec::new(),
            kv_tokens: u64::from(running.prompt_tokens),
            granted_s: self.now_s,
            first_granted_s: self.now_s,
            class: Class::Standard,
            // It has been running for a while: its router says nothing of its first token any more.
            phase: Phase::Decode,
            prefill_ms: 0.0,
            uncached_tokens: 0,
            urgency: Urgency {
                rank: Class::Standard.rank(),
                due: Key(self.now_s),
            },
            predicted_ttft_s: None,
            charged: None,
            root: Root {
                tenant: Arc::from(""),
                block: 0,
            },
            output_tokens: 0,
            max_tokens: running.max_tokens,
            tpot_target_s: self.policy.tpot_target_s[Class::Standard.rank()],
            preempted: 0,
            stays: false,
            by_credit: None,
            booking: running.booking,
            prompt_only: false,
        });
    }

    pub(super) fn hold(&mut self, lease: Lease) {
        if let Some(router) = self.routers.get_mut(&lease.router_id) {
            router.leases.insert(lease.id);
        }
        self.fleet.hold(self.now_s, lease);
    }

    pub(super) fn router_lost(&mut self, link: Link) {
        let Some(router_id) = self.routers_by_link.remove(&link) else {
            return;
        };
        self.leave_queue(link);
        let Some(router) = self.routers.get_mut(&router_id) else {
            return;
        };
        router.link = None;
        // It may have placed more than it could still say.
        if router.leases.is_empty() && !self.lending.ledger.trusts(link) && !self.budgets.has_open(&router_id) {
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
        self.parking.remove(|of, _| of == link);
    }

    pub(super) fn forget_router(&mut self, router_id: &str) {
        if let Some(router) = self.routers.remove(router_id) {
            if let Some(shares) = router.shares {
                self.lending.ledger.leave(shares);
            }
            for id in router.leases {
                self.free(id);
            }
            self.orphan(router_id, &BTreeSet::new());
            self.routers_changed();
        }
    }
    // Leases.

    pub(super) fn progressed(&mut self, link: Link, id: LeaseId, output_tokens: u32) {
        let router_id = self.routers_by_link.get(&link);
        let Some(lease) = self
            .fleet
            .leases
            .get_mut(&id)
            .filter(|lease| router_id == Some(&lease.router_id))
        else {
            return;
        };
        self.budgets.grows(lease.booking, output_tokens, 0);
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

    pub(super) fn released(&mut self, link: Link, id: LeaseId, books: &Books) {
        let Some(lease) = self.fleet.leases.get(&id) else {
            self.oddities.release_unknown += 1;
            return;
        };
        if self.routers_by_link.get(&link) != Some(&lease.router_id) {
            self.oddities.release_foreign += 1;
            return;
        }
        if !lease.prompt_only {
            self.completions.add(self.now_s, 1.0);
            (self.budgets).grows(lease.booking, books.completion_tokens, books.cached_prompt_tokens);
        }
        if books.outcome != Outcome::Cut && !lease.prompt_only {
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

    pub(super) fn worker_joined(&mut self, link: Link, hello: WorkerHello) {
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
        let heartbeat_s = self.pace(link).unwrap_or(self.policy.heartbeat_s);
        self.actions.push(Action::Welcomed {
            link,
            heartbeat_ms: milliseconds(heartbeat_s),
        });
    }

    pub(super) fn worker_reported(&mut self, link: Link, load: Load) {
        let Some(worker) = self.fleet.workers.get(&link) else {
            return;
        };
        let pool = worker.hello.pool.clone();
        for step in &load.steps {
            self.prices
                .step(&pool, step.prefill_tokens, step.decode_tokens, step.duration_s);
        }
        let served = self.longest(&pool);
        let changed = self.fleet.report(self.now_s, link, load, self.policy.heartbeat_s);
        let shorter = self.longest(&pool) < served;
        if changed
            && self
                .fleet
                .workers
                .get(&link)
                .is_some_and(|worker| worker.prompts_only())
        {
            self.pool_changed(&pool);
        }
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
        self.set_step_limits(link);
        // In answer to its report: so a fleet that grows or shrinks is told bit by bit.
        if let Some(heartbeat_s) = self.pace(link) {
            let heartbeat_ms = milliseconds(heartbeat_s);
            self.actions.push(Action::Paced { link, heartbeat_ms });
        }
        self.room_changed(link);
        self.offer(link);
    }

    /// How often a worker should report, when that is another pace than it was told.
    fn pace(&mut self, link: Link) -> Option<f64> {
        let pace_s = self.policy.pace_s(self.fleet.workers.len());
        let worker = self.fleet.workers.get_mut(&link)?;
        let ratio = pace_s / worker.heartbeat_s;
        // The base pace exactly, whatever was told last: a small fleet is as quick as it was configured.
        let is_news = !(1.0 / PACE_GRAIN..=PACE_GRAIN).contains(&ratio)
            || (pace_s == self.policy.heartbeat_s && worker.heartbeat_s != pace_s);
        is_news.then(|| {
            worker.heartbeat_s = pace_s;
            self.silence_check_s = self.silence_check_s.min(self.now_s + self.policy.silence_s());
            pace_s
        })
    }

    fn longest(&self, pool: &str) -> u32 {
        self.fleet.pools.get(pool).map_or(0, |pool| pool.max_prompt_tokens)
    }

    pub(super) fn remove_worker(&mut self, link: Link) {
        let Some(worker) = self.fleet.workers.get(&link) else {
            return;
        };
        let (pool, reserved, prompts_only) = (worker.hello.pool.clone(), worker.reserved_for, worker.prompts_only());
        let served = self.longest(&pool);
        self.blocked.remove(&link);
        self.close_gate(link);
        let planned: Vec<_> = self.queue.planned(link).map(|waiting| waiting.place).collect();
        for &place in &planned {
            self.unplan(place);
        }
        let Some((_, leases)) = self.fleet.remove(link) else {
            return;
        };
        self.unlend(link);
        if prompts_only {
            self.pool_changed(&pool);
        }
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
