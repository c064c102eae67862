//! Whose worker, and when: a newcomer finds one, a worker with room finds whose turn it is, and the lease is made.

use super::{
    actions::{Action, Grant, Prefill},
    admission::MAX_POOLS,
    core::Core,
    events::{Ask, Link},
    fair::OUTPUT_WEIGHT,
    leases::{kv_tokens, Lease, Phase, ANSWER_KV_TOKENS},
    lengths::Root,
    map::Key,
    pool::Part,
    queue::{Place, Plan},
    search::Choice,
    worker::Worker,
};
use crate::index::marks;

/// Asks looked at when a worker has room and the first in line does not fit it.
pub(super) const LOOKAHEAD: usize = 32;

/// So many asks may be served past one that does not fit; then the next worker that could serve it keeps its room for it.
pub const PASS_LIMIT: u32 = 64;

/// Asks of other workers that one with nothing to do looks at.
pub(super) const STEAL_LOOKAHEAD: usize = 8;

impl Core {
    /// Finds a worker for one ask. Those before it in line were tried when they came, and since. True when it has been
    /// granted; when its worker is busy with prompts before it or has no KV for it yet, it waits for that one: another would
    /// have to compute what this one holds.
    pub(super) fn place_newcomer(&mut self, place: Place) -> bool {
        let mut busy: Option<Choice> = None;
        for at in 0..MAX_POOLS {
            let Some((waiting, name)) = self
                .queue
                .get(place)
                .and_then(|waiting| waiting.ask.pools.get(at).map(|name| (waiting, name)))
            else {
                break;
            };
            let (ask, part) = (&waiting.ask, Part::Answer);
            let found = self
                .fleet
                .choose(self.now_s, name, part, ask, &mut self.placer, &mut self.rng);
            let Some(choice) = found else {
                continue;
            };
            if let Some(there) = self.apart(place, &choice) {
                if self.can_part(place, &choice, &there) {
                    self.grant_apart(place, &there, &choice);
                    return true;
                }
                busy = busy.or(Some(there));
                continue;
            }
            if self.fits(place, choice.link, choice.hit_tokens)
                && !self.is_behind(place, choice.link)
                && !self.is_busy(place, choice.link)
                && !self.is_throttled(choice.link)
            {
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

    /// Whether a worker has room for an ask now.
    pub(super) fn fits(&self, place: Place, link: Link, hit_tokens: u32) -> bool {
        let (worker, waiting) = (self.fleet.workers.get(&link), self.queue.get(place));
        worker
            .zip(waiting)
            .is_some_and(|(worker, waiting)| worker.open() && worker.has_room(&waiting.ask, hit_tokens))
    }

    /// Whether somebody whose turn is before that ask's waits for that worker already: what needs little room would
    /// otherwise overtake for ever.
    pub(super) fn is_behind(&self, place: Place, link: Link) -> bool {
        let (first, waiting) = (self.queue.planned(link).next(), self.queue.get(place));
        first
            .zip(waiting)
            .is_some_and(|(first, waiting)| self.queue.turn(first) < self.queue.turn(waiting))
    }

    /// Whether a worker has enough to compute before that ask, as far as its predictions can be trusted.
    pub(super) fn is_busy(&self, place: Place, link: Link) -> bool {
        let (Some(worker), Some(waiting)) = (self.fleet.workers.get(&link), self.queue.get(place)) else {
            return false;
        };
        let ahead_ms = self.ahead_ms(worker);
        self.fleet.kinds.trusted(worker.kind)
            && worker.prompts.fed_ms(self.now_s) > ahead_ms
            && worker.before_ms(self.now_s, waiting.urgency(), &self.fleet.leases) > ahead_ms
    }

    /// A worker is given the next prompt when what it has to compute takes no longer than this. A slow one gets what fills
    /// its steps: several short prompts in one take less than each in its own.
    pub(super) fn ahead_ms(&self, worker: &Worker) -> f64 {
        let chunk_tokens = worker
            .step_limits
            .map_or(self.policy.chunk_tokens[0], |told| told.chunk_tokens);
        let chunk_ms = self.fleet.kinds.prefill_ms(worker.kind, worker.pace, chunk_tokens, 0);
        chunk_ms.max(self.policy.dispatch_ahead_s * 1e3)
    }

    /// Whether a worker's pool has been given its share of prefill, as far as predictions can be trusted.
    fn is_throttled(&mut self, link: Link) -> bool {
        let kind = self.fleet.workers.get(&link).map(|worker| worker.kind);
        self.policy.prefill_share > 0.0
            && !self.is_for_prompts(link)
            && kind.is_some_and(|kind| self.fleet.kinds.trusted(kind))
            && self.prefill_left_ms(link) <= 0.0
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

    /// Looks at a worker again when it has computed enough. What else it may lack, its reports and releases tell.
    pub(super) fn watch_gate(&mut self, link: Link) {
        let first = self.queue.planned(link).next().map(|waiting| waiting.place);
        let held_back = first.is_some_and(|place| self.is_busy(place, link)) || self.is_throttled(link);
        let Some(worker) = self.fleet.workers.get(&link).filter(|_| held_back) else {
            self.close_gate(link);
            return;
        };
        let mut gate_s = worker.prompts.fed_until_s(self.ahead_ms(worker));
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

    pub(super) fn close_gate(&mut self, link: Link) {
        if let Some(gate_s) = self.gate_of.remove(&link) {
            self.gates.remove(&(gate_s, link));
        }
    }

    /// A worker may have room: give it to those whose turn it is.
    pub(super) fn offer(&mut self, link: Link) {
        if self.is_for_prompts(link) {
            self.offer_prompts(link);
        } else {
            while let Some((place, choice)) = self.next_for(link) {
                if !self.shed_if_late(place, choice.link, choice.prefill_ms) {
                    self.grant_or_part(place, &choice);
                }
            }
            if !self.blocked.is_empty() {
                self.unblock(link);
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
        if !self.queue.waits_in(&pool) || self.is_throttled(link) {
            return None;
        }
        let own = self.next_planned(link);
        let worker = self.fleet.workers.get(&link)?;
        let idle = own.is_none() && worker.held.is_empty() && reserved.is_none();
        let own_turn = own
            .and_then(|place| self.queue.get(place))
            .map(|waiting| self.queue.turn(waiting));
        let (mut next, mut wants_room, mut looked_at) = (None, None, 0);
        for waiting in self.queue.in_turn(&pool).take(LOOKAHEAD) {
            // One of its own comes first; and who comes later has no less before it.
            if own_turn.is_some_and(|turn| turn <= self.queue.turn(waiting)) || self.is_busy(waiting.place, link) {
                break;
            }
            let kept_for_another = reserved.is_some_and(|place| place != waiting.place);
            if kept_for_another || worker.owes(&waiting.ask) || !worker.can_ever_run(&waiting.ask) {
                continue;
            }
            if let Some(plan) = waiting.plan.filter(|plan| self.is_of(plan.worker, &pool)) {
                looked_at += 1;
                if idle && looked_at <= STEAL_LOOKAHEAD {
                    if let Some(choice) = self.better_than(link, &plan, &waiting.ask) {
                        next = Some((waiting.place, choice));
                        break;
                    }
                }
                continue;
            }
            let (choice, _) = self
                .fleet
                .consider(self.now_s, link, &waiting.ask, false, &self.placer)?;
            if worker.has_room(&waiting.ask, choice.hit_tokens) {
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
                .consider(self.now_s, link, &self.queue.get(place)?.ask, true, &self.placer)?;
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

    /// The first of those that wait for this worker, when it has the time and the KV; who finds no slot any more waits for
    /// any worker.
    pub(super) fn next_planned(&mut self, link: Link) -> Option<Place> {
        loop {
            let worker = self.fleet.workers.get(&link)?;
            let waiting = self.queue.planned(link).next()?;
            let (place, ask) = (waiting.place, &waiting.ask);
            if worker.open() && worker.can_ever_run(ask) && worker.has_slots(ask) {
                let hit_tokens = waiting.plan.map_or(0, |plan| plan.hit_tokens);
                return (self.fits(place, link, hit_tokens) && !self.is_busy(place, link)).then_some(place);
            }
            self.unplan(place);
        }
    }

    pub(super) fn is_of(&self, link: Link, pool: &str) -> bool {
        self.fleet
            .workers
            .get(&link)
            .is_some_and(|worker| &*worker.hello.pool == pool)
    }

    /// That worker as a choice, if it is better than waiting for the one that was planned.
    fn better_than(&self, link: Link, plan: &Plan, ask: &Ask) -> Option<Choice> {
        let (here, here_score) =
            self.fleet
                .consider_beside(self.now_s, link, ask, false, plan.hit_tokens, &self.placer)?;
        let there_score = self
            .fleet
            .planned_score(self.now_s, plan, ask, here.hit_tokens, &self.placer)?;
        (here_score < there_score).then_some(here)
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

    pub(super) fn unreserve(&mut self, link: Link, place: Place) {
        if let Some(worker) = self.fleet.workers.get_mut(&link) {
            if worker.reserved_for == Some(place) {
                worker.reserved_for = None;
                self.fleet.reorder(link);
            }
        }
    }

    /// Its turn has come at that worker; another may compute its prompt, if it can do so now and it did not wait for one
    /// such in vain.
    fn grant_or_part(&mut self, place: Place, choice: &Choice) {
        let there = match self.waits_for_prompts(place) {
            true => None,
            false => self.apart(place, choice),
        };
        match there.filter(|there| self.can_part(place, choice, there)) {
            Some(there) => self.grant_apart(place, &there, choice),
            None => self.grant(place, choice),
        }
    }

    /// The whole request at one worker.
    pub(super) fn grant(&mut self, place: Place, choice: &Choice) {
        self.grant_both(place, choice, None);
    }

    /// The prompt at one worker, the answer at another.
    pub(super) fn grant_apart(&mut self, place: Place, there: &Choice, here: &Choice) {
        self.measures.parted += 1;
        self.grant_both(place, here, Some(there));
    }

    fn grant_both(&mut self, place: Place, choice: &Choice, there: Option<&Choice>) {
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
        // Where the prompt is computed.
        let (computes, at) = there
            .and_then(|there| Some((self.fleet.workers.get(&there.link)?, there)))
            .unwrap_or((worker, choice));
        let (ask, hello, id) = (&waiting.ask, &worker.hello, self.next_lease);
        let root = Root::of(ask);
        let expected = if ask.expected_output_tokens > 0 {
            ask.expected_output_tokens
        } else {
            self.lengths.expected(&root, 0, ask.max_tokens)
        };
        let uncached = ask.prompt_tokens - at.hit_tokens.min(ask.prompt_tokens);
        let charge = f64::from(uncached) + OUTPUT_WEIGHT * f64::from(ask.choices) * f64::from(expected);
        if !credit_waits {
            self.queue.accounts.next_round(waiting.account);
        }
        self.queue.accounts.charge(waiting.account, charge);
        let price = self.prices.of(&pool);
        self.budgets.runs(ask.booking, &pool, price);
        let token_allowance = self.budgets.allowance(ask.booking);
        let first_ms = self
            .fleet
            .kinds
            .first_token_ms(computes.kind, computes.pace, uncached, at.hit_tokens);
        let before_ms = computes.before_ms(self.now_s, waiting.urgency(), &self.fleet.leases);
        let slowdown = self.slowdown(at.link).unwrap_or(1.0);
        let predicted_ttft_s = first_ms.map(|first_ms| slowdown * (before_ms + first_ms) / 1e3);
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
            cached_tokens: at.hit_tokens,
            why: choice.why,
            token_allowance,
            prefill: there.map(|there| Prefill {
                lease: id + 1,
                worker: there.link,
                worker_id: computes.hello.worker_id.clone(),
                instance_id: computes.hello.instance_id.clone(),
                address: computes.hello.address.clone(),
                kv_state_tag: computes.hello.description.kv_state_tag.clone(),
                why: there.why,
            }),
        })));
        let mut kv = kv_tokens(ask);
        if ask.expected_output_tokens == 0 {
            // Less where answers are short; not more, see there.
            let spared = ANSWER_KV_TOKENS.saturating_sub(expected).min(ANSWER_KV_TOKENS);
            kv = kv
                .saturating_sub(u64::from(ask.choices) * u64::from(spared))
                .max(u64::from(ask.prompt_tokens));
        }
        let mut lease = Lease {
            id,
            router_id: router_id.clone(),
            instance_id: hello.instance_id.clone(),
            request_id: ask.request_id.clone(),
            tenant: ask.tenant.clone(),
            choices: ask.choices,
            prompt_tokens: ask.prompt_tokens,
            blocks: marks(&ask.block_hashes, self.fleet.held_blocks(link, ask)),
            kv_tokens: kv,
            granted_s: self.now_s,
            first_granted_s: self.now_s,
            class: ask.class,
            phase: Phase::Prefill,
            prefill_ms: at.prefill_ms,
            uncached_tokens: uncached,
            urgency: waiting.urgency(),
            predicted_ttft_s,
            charged: Some((waiting.account, charge)),
            root,
            output_tokens: 0,
            max_tokens: ask.max_tokens,
            tpot_target_s: self.policy.tpot_target_s(ask),
            preempted: 0,
            // Who has waited so long that it came up a class is not put aside.
            stays: waiting.has_moved_up(),
            by_credit: None,
            booking: ask.booking,
            prompt_only: false,
        };
        self.next_lease += 1;
        if let Some(there) = there {
            let computes = Lease {
                id: self.next_lease,
                instance_id: computes.hello.instance_id.clone(),
                blocks: marks(&ask.block_hashes, self.fleet.held_blocks(there.link, ask)),
                kv_tokens: u64::from(ask.prompt_tokens) + 1,
                max_tokens: 1,
                charged: None,
                // The books are the answer's.
                booking: 0,
                stays: false,
                prompt_only: true,
                ..lease.clone()
            };
            self.next_lease += 1;
            self.hold(computes);
            self.fleet.believe(there.link, &waiting.ask.block_hashes);
            self.room_changed(there.link);
            lease.phase = Phase::Arriving;
            (lease.prefill_ms, lease.uncached_tokens, lease.predicted_ttft_s) = (0.0, 0, None);
        } else if self.policy.prefill_share > 0.0 {
            self.prefill_left_ms(link);
            if let Some((left_ms, _)) = self.prefill_left.get_mut(&pool) {
                *left_ms -= choice.prefill_ms;
            }
        }
        self.hold(lease);
        self.fleet.believe(link, &waiting.ask.block_hashes);
        self.room_changed(link);
    }
}
