//! Asks that come, wait, leave, and are refused: at once, when they are late, or when nobody is left for them.

use super::{
    actions::{Action, Reason, Refusal},
    core::{milliseconds, Core},
    events::{Ask, Class, Link},
    map::Key,
    queue::{Place, Plan, Waiting},
    search::Choice,
};
use crate::index::marks;

/// Pools that one ask may name.
pub(super) const MAX_POOLS: usize = 16;

/// How long a worker takes to come back, more or less; the hint when there is none.
const UNAVAILABLE_RETRY_MS: u32 = 1000;

/// What is shed must be late by so much more than predicted.
pub(super) const SHED_MARGIN: f64 = 1.2;

impl Core {
    pub(super) fn asked(&mut self, link: Link, ask: Box<Ask>) {
        if !self.routers_by_link.contains_key(&link) {
            return;
        }
        if self.queue.find(link, ask.number).is_some() || self.parking.contains(link, ask.number) {
            let message = format!("ask {} was asked twice", ask.number);
            self.actions.push(Action::RouterDropped { link, message });
            self.router_lost(link);
            return;
        }
        if let Some(refusal) = self.refusal(link, &ask) {
            self.actions.push(Action::Refused(Box::new(refusal)));
            return;
        }
        if let Some(ask) = self.may_spend(link, ask) {
            self.enqueue(link, ask);
        }
    }

    /// An ask that may run is placed, or waits for its turn.
    pub(super) fn enqueue(&mut self, link: Link, ask: Box<Ask>) {
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
        // Of a worker that only prompts are computed on nothing is lent.
        if !self.waits_for_prompts(place) {
            let pools = self.queue.get(place).map(|waiting| waiting.ask.pools.clone());
            for pool in pools.unwrap_or_default() {
                self.stop_lending(&pool);
            }
        }
        let limit = self.policy.max_queued;
        if self.queue.len() > limit {
            // No class is refused for what a lower one has piled up.
            let least = self.queue.least().unwrap_or(place);
            let message = format!("{} requests wait already (limit {limit})", self.queue.len() - 1);
            let retry_after_ms = self.drain_ms();
            self.refuse_waiting(least, Reason::Overloaded, message, retry_after_ms);
        }
        if let Some(waiting) = self.queue.get(place) {
            self.actions.push(self.waits(waiting));
        }
    }

    /// Why an ask cannot even wait, if so.
    pub(super) fn refusal(&self, link: Link, ask: &Ask) -> Option<Refusal> {
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
    pub(super) fn due_s(&self, ask: &Ask) -> f64 {
        let target_s = ask.ttft_target_s.unwrap_or(self.policy.ttft_target_s[ask.class.rank()]);
        let arrived_s = ask.arrived_s.unwrap_or(self.now_s);
        (arrived_s + target_s).min(ask.deadline_s.unwrap_or(f64::INFINITY))
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
    pub(super) fn refuse_stranded(&mut self, places: &[Place]) {
        for &place in places {
            let waiting = self.queue.get(place);
            if let Some(refusal) = waiting.and_then(|waiting| self.stranded(waiting.link, &waiting.ask)) {
                self.remove_waiting(place);
                self.actions.push(Action::Refused(Box::new(refusal)));
            }
        }
    }

    pub(super) fn refuse_waiting(&mut self, place: Place, reason: Reason, message: String, retry_after_ms: u32) {
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

    pub(super) fn withdrawn(&mut self, link: Link, ask: u64) {
        // Otherwise its answer is under way, and a release will answer that.
        if let Some(place) = self.queue.find(link, ask) {
            self.remove_waiting(place);
        } else {
            self.parking.remove(|of, number| of == link && number == ask);
        }
    }

    /// It does not wait any more, and is not served either.
    pub(super) fn remove_waiting(&mut self, place: Place) -> Option<Waiting> {
        let waiting = self.take_waiting(place)?;
        self.queue.accounts.close(waiting.account);
        Some(waiting)
    }

    pub(super) fn take_waiting(&mut self, place: Place) -> Option<Waiting> {
        self.unplan(place);
        let waiting = self.queue.remove(place)?;
        if let Some(link) = waiting.reserved {
            self.unreserve(link, place);
        }
        Some(waiting)
    }

    pub(super) fn plan(&mut self, place: Place, choice: &Choice) {
        let Some(waiting) = self.queue.get(place) else {
            return;
        };
        let held_blocks = self.fleet.held_blocks(choice.link, &waiting.ask);
        let plan = Plan {
            worker: choice.link,
            prefill_ms: choice.prefill_ms,
            hit_tokens: choice.hit_tokens,
            held_blocks,
            uncached_tokens: waiting.ask.prompt_tokens.saturating_sub(choice.hit_tokens),
        };
        let missing = marks(&waiting.ask.block_hashes, held_blocks);
        let class = waiting.ask.class;
        self.fleet.plan(self.now_s, class, &plan, &missing, true);
        self.queue.plan(place, plan);
        self.watch_gate(choice.link);
        self.watch_late(place, choice.prefill_ms);
    }

    /// Looks at an ask that waits for a worker again when it is too late for it, rather than at its turn: until then it
    /// would be counted there, and its client would wait for an answer that is known.
    fn watch_late(&mut self, place: Place, prefill_ms: f64) {
        let own_s = self.queue.get(place).map_or(f64::INFINITY, own_due_s);
        let late_s = own_s - SHED_MARGIN * prefill_ms / 1e3;
        if self.policy.shed && late_s < f64::INFINITY {
            // Past the moment itself, at which it would just do.
            let late_s = Key(late_s.max(self.now_s) + 1e-3);
            self.lates.insert((late_s, place));
            self.late_of.insert(place, late_s);
        }
    }

    pub(super) fn unwatch_late(&mut self, place: Place) {
        if let Some(late_s) = self.late_of.remove(&place) {
            self.lates.remove(&(late_s, place));
        }
    }

    pub(super) fn unplan(&mut self, place: Place) {
        self.unwatch_late(place);
        let Some(plan) = self.queue.unplan(place) else {
            return;
        };
        if let Some(waiting) = self.queue.get(place) {
            let missing = marks(&waiting.ask.block_hashes, plan.held_blocks);
            self.fleet.plan(self.now_s, waiting.ask.class, &plan, &missing, false);
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

    /// Refuses what was never started and will be late by what it asked for itself, with so much to compute at a worker.
    pub(super) fn shed_if_late(&mut self, place: Place, link: Link, prefill_ms: f64) -> bool {
        let Some(waiting) = self.queue.get(place) else {
            return true;
        };
        let ask = &waiting.ask;
        let kind = self.fleet.workers.get(&link).map(|worker| worker.kind);
        let trusted = kind.is_some_and(|kind| self.fleet.kinds.trusted(kind));
        if !self.policy.shed || ask.class == Class::Batch || !trusted {
            return false;
        }
        let due_s = own_due_s(waiting);
        let first_s = SHED_MARGIN * self.slowdown(link).unwrap_or(1.0) * prefill_ms / 1e3;
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
}

/// When the first token is due by what the request asked for itself.
fn own_due_s(waiting: &Waiting) -> f64 {
    let ask = &waiting.ask;
    let arrived_s = ask.arrived_s.unwrap_or(waiting.arrived_s);
    let target_s = ask.ttft_target_s.map_or(f64::INFINITY, |target_s| arrived_s + target_s);
    target_s.min(ask.deadline_s.unwrap_or(f64::INFINITY))
}
