//! Prompts that are computed on one worker and answered on another.
//!
//! A worker that is there for prompts only is one more place where a prompt may be computed; what it costs is the way of the
//! KV. So by the rule that places everything the prompt goes there when what it delays there, and that way, are less than what
//! it would delay where it is answered: its own wait, and the answers that it would slow down. Who answers is the worker
//! that would have had the whole request.
//!
//! It is not sent where it would be late itself while it is not here: to spare others is worth no target.
//!
//! Both workers give room under leases of their own, which one grant names. A prompt waits here for its worker as any other
//! does. Nothing of such a worker is lent to routers, and they ask for every request that may part.

use super::{
    admission::SHED_MARGIN,
    core::Core,
    events::{Ask, Link},
    placement::{LOOKAHEAD, STEAL_LOOKAHEAD},
    policy::Disaggregation,
    pool::Part,
    queue::Place,
    search::Choice,
};
use crate::place::{Candidate, Placer, Policy};

impl Core {
    /// Whether that worker computes prompts for others now.
    pub(super) fn is_for_prompts(&self, link: Link) -> bool {
        let worker = self.fleet.workers.get(&link).filter(|worker| worker.prompts_only());
        let pool = worker.and_then(|worker| self.fleet.pools.get(&worker.hello.pool));
        pool.is_some_and(|pool| !pool.lacks_answerers())
    }

    /// Whether an ask waits for its prompt to be computed on a worker for prompts.
    pub(super) fn waits_for_prompts(&self, place: Place) -> bool {
        let plan = self.queue.get(place).and_then(|waiting| waiting.plan);
        plan.is_some_and(|plan| self.is_for_prompts(plan.worker) && !self.blocked.contains(&plan.worker))
    }

    /// Whether that is weighed for an ask at all. A later attempt keeps to one worker.
    fn parts(&self, ask: &Ask) -> bool {
        let policy = &self.policy;
        policy.disaggregation != Disaggregation::Off
            && ask.may_part
            && ask.choices == 1
            && ask.epoch <= 1
            && ask.avoid_instances.is_empty()
            && ask.prompt_tokens >= policy.disaggregation_min_tokens
    }

    /// The worker where an ask's prompt is better computed than at the one that would answer it; None = nowhere.
    pub(super) fn apart(&mut self, place: Place, here: &Choice) -> Option<Choice> {
        let waiting = self.queue.get(place)?;
        let ask = &waiting.ask;
        let answers = self.fleet.workers.get(&here.link)?;
        let pool = answers.hello.pool.clone();
        let uncached = ask.prompt_tokens.saturating_sub(here.hit_tokens);
        let worth = uncached >= self.policy.disaggregation_min_tokens && self.parts(ask);
        if !worth || answers.prompts_only() || !self.fleet.pools.get(&pool)?.has_prefill() {
            return None;
        }
        let there = self
            .fleet
            .choose(self.now_s, &pool, Part::Prompt, ask, &mut self.placer, &mut self.rng)?;
        self.is_better_apart(place, here, &there).then_some(there)
    }

    /// Whether a prompt delays less there, with the way of its KV, than where it is answered.
    fn is_better_apart(&self, place: Place, here: &Choice, there: &Choice) -> bool {
        let workers = &self.fleet.workers;
        let (Some(answers), Some(computes), Some(waiting)) =
            (workers.get(&here.link), workers.get(&there.link), self.queue.get(place))
        else {
            return false;
        };
        if !computes.hands_over_to(answers) {
            return false;
        }
        if self.policy.disaggregation == Disaggregation::Always {
            return true;
        }
        let kinds = &self.fleet.kinds;
        let trusted = kinds.trusted(answers.kind) && kinds.trusted(computes.kind);
        // Nobody is made late to spare others.
        let first_ms = |choice: &Choice| choice.pending_ms + choice.prefill_ms;
        let here_ms = self.slowdown(here.link).unwrap_or(1.0) * first_ms(here);
        let left_ms = (waiting.urgency().due.0 - self.now_s) * 1e3;
        if SHED_MARGIN * first_ms(there) > left_ms && here_ms < first_ms(there) {
            return false;
        }
        let lacks = waiting.ask.prompt_tokens.saturating_sub(here.hit_tokens);
        let apart_ms = self.delay_ms(there, &waiting.ask) + kinds.move_ms(answers.kind, lacks);
        trusted && apart_ms < self.delay_ms(here, &waiting.ask)
    }

    /// What a prompt delays at a worker, itself and others, in ms: the default rule's measure, whatever the rule is.
    fn delay_ms(&self, choice: &Choice, ask: &Ask) -> f64 {
        let Some(worker) = self.fleet.workers.get(&choice.link) else {
            return f64::INFINITY;
        };
        let candidate = Candidate {
            pending_prefill_ms: choice.why.pending_prefill_ms,
            prefill_ms: choice.why.prefill_ms,
            decoding: choice.why.decoding,
            waiting: choice.why.waiting,
            gives_way: choice.why.gives_way,
            ..Candidate::default()
        };
        Placer::new(Policy::MarginalDelay).score(&self.fleet.kinds.request(worker.kind, worker.pace, ask), &candidate)
    }

    /// Whether both workers could take their parts now.
    pub(super) fn can_part(&self, place: Place, here: &Choice, there: &Choice) -> bool {
        self.fits(place, here.link, here.hit_tokens)
            && self.fits(place, there.link, there.hit_tokens)
            && !self.is_behind(place, there.link)
            && !self.is_busy(place, there.link)
    }

    /// A worker for prompts may have the time for some.
    pub(super) fn offer_prompts(&mut self, link: Link) {
        self.blocked.remove(&link);
        while let Some((place, choice, answers)) = self.next_prompt(link) {
            if !self.shed_if_late(place, choice.link, choice.prefill_ms) {
                match answers {
                    Some(here) => self.grant_apart(place, &choice, &here),
                    None => self.grant(place, &choice),
                }
            }
        }
    }

    /// Room to answer has come where that worker serves: those who only lacked that may go on.
    pub(super) fn unblock(&mut self, link: Link) {
        while let Some(worker) = self.fleet.workers.get(&link).filter(|worker| worker.open()) {
            let pool = worker.hello.pool.clone();
            let first = self.blocked.iter().copied().find(|&blocked| self.is_of(blocked, &pool));
            let Some(blocked) = first else {
                return;
            };
            self.offer_prompts(blocked);
            if self.blocked.contains(&blocked) {
                return;
            }
        }
    }

    /// What a worker for prompts computes next, and who answers that; None there: it does all of it.
    fn next_prompt(&mut self, link: Link) -> Option<(Place, Choice, Option<Choice>)> {
        let pool = self.fleet.workers.get(&link)?.hello.pool.clone();
        if let Some(place) = self.next_planned(link) {
            let ask = &self.queue.get(place)?.ask;
            let (there, _) = self.fleet.consider(self.now_s, link, ask, true, &self.placer)?;
            if !self.parts(ask) {
                return Some((place, there, None));
            }
            let here = self
                .fleet
                .choose(self.now_s, &pool, Part::Answer, ask, &mut self.placer, &mut self.rng);
            if let Some(here) = here.filter(|here| self.fits(place, here.link, here.hit_tokens)) {
                let workers = &self.fleet.workers;
                let hands_over = workers.get(&link)?.hands_over_to(workers.get(&here.link)?);
                return Some(match hands_over {
                    true => (place, there, Some(here)),
                    false => (place, here, None),
                });
            }
            self.blocked.insert(link);
            self.stop_lending(&pool);
            return None;
        }
        self.prompt_to_take_over(link, &pool)
    }

    /// For a worker with nothing to do, a prompt that waits for another and would be sooner here.
    fn prompt_to_take_over(&mut self, link: Link, pool: &str) -> Option<(Place, Choice, Option<Choice>)> {
        let worker = self.fleet.workers.get(&link)?;
        if !worker.open() || !worker.held.is_empty() || self.queue.waits_for(link) || !self.queue.waits_in(pool) {
            return None;
        }
        let waiting = self.queue.in_turn(pool).take(LOOKAHEAD);
        let may = waiting.filter(|waiting| self.parts(&waiting.ask) && worker.can_ever_run(&waiting.ask));
        let places: Vec<Place> = may.take(STEAL_LOOKAHEAD).map(|waiting| waiting.place).collect();
        for place in places {
            let ask = &self.queue.get(place)?.ask;
            let here = self
                .fleet
                .choose(self.now_s, pool, Part::Answer, ask, &mut self.placer, &mut self.rng);
            let Some(here) = here.filter(|here| self.fits(place, here.link, here.hit_tokens)) else {
                continue;
            };
            let waiting = self.queue.get(place)?;
            let planned_tokens = waiting.plan.map_or(0, |plan| plan.hit_tokens);
            let (there, score) =
                self.fleet
                    .consider_beside(self.now_s, link, &waiting.ask, false, planned_tokens, &self.placer)?;
            let sooner = match waiting.plan {
                Some(plan) if self.is_for_prompts(plan.worker) => self
                    .fleet
                    .planned_score(self.now_s, &plan, &waiting.ask, there.hit_tokens, &self.placer)
                    .is_some_and(|planned| score < planned),
                _ => self.is_better_apart(place, &here, &there),
            };
            let lacks = waiting.ask.prompt_tokens.saturating_sub(here.hit_tokens);
            if sooner && lacks >= self.policy.disaggregation_min_tokens && self.can_part(place, &here, &there) {
                self.measures.stolen += 1;
                return Some((place, there, Some(here)));
            }
        }
        None
    }
}
