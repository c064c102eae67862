//! The search for the worker that is to run an ask.
//!
//! Each pool keeps its workers that can take something in an order, least delayed first (`pool.rs`), so that the best by the
//! marginal delay is found without a scan of the fleet: a worker that holds nothing of the prompt differs from its like only
//! in the work that waits there, P, and the factor (1 + R)(1 + W), which are the order's key, or, without any work, in how
//! long it has been idle; the holders of a prefix are scored one by one.

use std::{cell::Cell, ops::Bound};

use rand::RngCore;

use super::{
    events::{Ask, Link},
    fleet::Fleet,
    kinds::{KindId, Pace},
    map::{Key, Map},
    pool::{by_lot, Part, Pool},
    queue::Plan,
    worker::Worker,
};
use crate::{
    blocks::Blocks,
    index::Overlap,
    place::{copy_ms, Candidate, Placer, Policy, Request, Why, NOBODY},
};

/// Workers looked at for one ask that does not fit on the better ones. A bound on work, not on luck: whoever is not looked at
/// is asked the other way round at its next report.
const MAX_CANDIDATES: usize = 64;

/// Holders of a prefix that are scored before all others, those with the most of it first.
const MAX_HOLDERS: usize = 64;

/// A worker for an ask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Its stream.
    pub link: Link,
    /// Prompt tokens that it is believed to hold.
    pub hit_tokens: u32,
    /// Predicted work of the rest.
    pub prefill_ms: f64,
    /// Predicted work that waits there before it.
    pub pending_ms: f64,
    /// For people.
    pub why: Why,
}

impl Fleet {
    /// Leading blocks of a prompt that a worker holds, or will because of other prompts.
    pub(super) fn leading(&self, worker: &Worker, ask: &Ask, planned: bool) -> u32 {
        let held = self.blocks.index().leading(worker.number, &ask.block_hashes);
        self.expected
            .leading(worker.number, &ask.block_hashes, held, u32::from(planned))
    }

    /// Leading blocks of a prompt that a worker holds now.
    pub(super) fn held_blocks(&self, link: Link, ask: &Ask) -> usize {
        let number = self.workers.get(&link).map(|worker| worker.number);
        number.map_or(0, |number| {
            self.blocks.index().leading(number, &ask.block_hashes) as usize
        })
    }

    /// Who holds which blocks, as far as is known.
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    pub(super) fn blocks_mut(&mut self) -> &mut Blocks {
        &mut self.blocks
    }

    /// The worker of that pool to run that part of this, by the rule; it has a slot or batch work that could give it one, if
    /// perhaps not yet the time or the KV.
    pub(super) fn choose(
        &mut self,
        now_s: f64,
        pool: &str,
        part: Part,
        ask: &Ask,
        placer: &mut Placer,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let mut overlaps = std::mem::take(&mut self.overlaps);
        overlaps.clear();
        self.expected
            .overlap(self.blocks.index(), &ask.block_hashes, &mut overlaps);
        let search = Search {
            fleet: self,
            pool: self.pools.get(pool)?,
            now_s,
            part,
            ask,
            looked_at: Cell::new(0),
        };
        let choice = if placer.policy() == Policy::MarginalDelay {
            search.least_delay(placer, &mut overlaps, rng)
        } else {
            search.by_rule(placer, &overlaps, rng)
        };
        let looked_at = search.looked_at.get();
        self.looked_at += looked_at;
        self.overlaps = overlaps;
        choice
    }

    /// That worker as a choice for this ask, and its score by the rule. `planned`: it waits for that worker, so some of what
    /// is expected there is its own.
    pub(super) fn consider(
        &self,
        now_s: f64,
        link: Link,
        ask: &Ask,
        planned: bool,
        placer: &Placer,
    ) -> Option<(Choice, f64)> {
        self.consider_beside(now_s, link, ask, planned, 0, placer)
    }

    /// The same, beside another that holds so much of the prompt.
    pub(super) fn consider_beside(
        &self,
        now_s: f64,
        link: Link,
        ask: &Ask,
        planned: bool,
        most_tokens: u32,
        placer: &Placer,
    ) -> Option<(Choice, f64)> {
        let worker = self.workers.get(&link)?;
        let hit_tokens = worker.hit_tokens(ask, self.leading(worker, ask, planned));
        let candidate = worker.candidate(now_s, &self.kinds, ask, hit_tokens, most_tokens);
        let request = self.kinds.request(worker.kind, worker.pace, ask);
        let score = placer.score(&request, &candidate);
        Some((choice(link, &candidate, score), score))
    }

    /// The score of a worker for an ask that waits for it, without counting that, beside another that holds so much of the
    /// prompt.
    pub(super) fn planned_score(
        &self,
        now_s: f64,
        plan: &Plan,
        ask: &Ask,
        most_tokens: u32,
        placer: &Placer,
    ) -> Option<f64> {
        let worker = self.workers.get(&plan.worker)?;
        let mut candidate = worker.candidate(now_s, &self.kinds, ask, plan.hit_tokens, most_tokens);
        candidate.waiting = candidate.waiting.saturating_sub(1);
        candidate.pending_prefill_ms = (candidate.pending_prefill_ms - plan.prefill_ms).max(0.0);
        Some(placer.score(&self.kinds.request(worker.kind, worker.pace, ask), &candidate))
    }

    /// The soonest that an idle worker of the pool would have the first token of this; None when nobody can say.
    pub(super) fn soonest_first_token_s(&self, pool: &Pool, ask: &Ask) -> Option<f64> {
        let mut overlaps = Vec::new();
        self.expected
            .overlap(self.blocks.index(), &ask.block_hashes, &mut overlaps);
        let of = |&(kind, pace): &(KindId, Pace)| {
            let block_tokens = self.kinds.block_tokens(kind);
            let blocks = overlaps.iter().map(|each| each.blocks).max().unwrap_or(0);
            let hit = (blocks * block_tokens).min(ask.prompt_tokens.saturating_sub(1));
            self.kinds.first_token_ms(kind, pace, ask.prompt_tokens - hit, hit)
        };
        let mut soonest: Option<f64> = None;
        for key in pool
            .ready
            .iter()
            .filter_map(|link| self.workers.get(link))
            .map(|each| (each.kind, each.pace))
            .take(MAX_CANDIDATES)
        {
            let ms = of(&key)?;
            soonest = Some(soonest.map_or(ms, |least| least.min(ms)));
        }
        soonest.map(|ms| ms / 1e3)
    }
}

fn choice(link: Link, candidate: &Candidate, score: f64) -> Choice {
    Choice {
        link,
        hit_tokens: candidate.hit_tokens,
        prefill_ms: candidate.prefill_ms,
        pending_ms: candidate.pending_prefill_ms,
        why: Why::new(candidate, score),
    }
}

/// A search for a worker.
struct Search<'a> {
    fleet: &'a Fleet,
    pool: &'a Pool,
    now_s: f64,
    part: Part,
    ask: &'a Ask,
    looked_at: Cell<u64>,
}

impl<'a> Search<'a> {
    fn fitting(&self, link: Link) -> Option<&'a Worker> {
        self.looked_at.set(self.looked_at.get() + 1);
        let worker = self.fleet.workers.get(&link)?;
        let suits = self.pool.suits(self.part, worker.prompts_only(), self.ask);
        let fits = suits && worker.can_ever_run(self.ask) && self.pool.has_slots(worker, self.ask);
        fits.then_some(worker)
    }

    /// The least marginal delay, exactly, by lot among equals.
    fn least_delay(&self, placer: &Placer, overlaps: &mut [Overlap], rng: &mut dyn RngCore) -> Option<Choice> {
        let kinds = &self.fleet.kinds;
        // Those who hold most of the prompt are scored one by one.
        let first = overlaps.len().min(MAX_HOLDERS);
        if first < overlaps.len() {
            overlaps.select_nth_unstable_by_key(first, |each| std::cmp::Reverse(each.blocks));
        }
        let left_blocks = overlaps[first..].iter().map(|each| each.blocks).max().unwrap_or(0);
        let holders: Vec<(&Worker, u32)> = overlaps[..first]
            .iter()
            .filter_map(|overlap| {
                let link = self.fleet.numbers.get(&overlap.worker).copied();
                let worker = self.fitting(link.filter(|link| self.pool.workers.contains(link))?)?;
                Some((worker, overlap.blocks))
            })
            .collect();
        let most = holders
            .iter()
            .map(|&(worker, blocks)| worker.hit_tokens(self.ask, blocks));
        let most_tokens = most.max().unwrap_or(0);
        let mut best: Option<(f64, Choice)> = None;
        let mut consider = |worker: &Worker, blocks: u32| {
            let hit_tokens = worker.hit_tokens(self.ask, blocks);
            let candidate = worker.candidate(self.now_s, kinds, self.ask, hit_tokens, most_tokens);
            let score = placer.score(&kinds.request(worker.kind, worker.pace, self.ask), &candidate);
            if best.as_ref().is_none_or(|(least, _)| score < *least) {
                best = Some((score, choice(worker.link, &candidate, score)));
            }
            best.as_ref().map_or(f64::INFINITY, |(least, _)| *least)
        };
        let mut least = f64::INFINITY;
        for (worker, blocks) in holders {
            least = consider(worker, blocks);
        }
        // Nobody else holds more than that much, so nobody else's delay is less than it would be with it.
        let mut looked_at = 0;
        for (&(prompts_only, kind, pace), orders) in &self.pool.orders {
            if !self.pool.suits(self.part, prompts_only, self.ask) {
                continue;
            }
            let order = orders.of(self.ask.class);
            let request = kinds.request(kind, pace, self.ask);
            let most_hit = (left_blocks * kinds.block_tokens(kind)).min(self.ask.prompt_tokens.saturating_sub(1));
            let work_ms = |hit: u32| kinds.prefill_ms(kind, pace, self.ask.prompt_tokens - hit, hit);
            let least_work_ms = work_ms(most_hit);
            let least_copy_ms = copy_ms(work_ms, most_hit, most_tokens);
            let bound = |factor: u64, pending_prefill_ms: f64, idle_ms: f64| {
                let like = Candidate {
                    pending_prefill_ms,
                    prefill_ms: least_work_ms,
                    copy_ms: least_copy_ms,
                    // Only who has nothing to do is in the first of the orders.
                    idle_ms: if factor == NOBODY { idle_ms } else { 0.0 },
                    gives_way: (factor - NOBODY).min(u64::from(u32::MAX)) as u32,
                    ..Candidate::default()
                };
                placer.score(&request, &like)
            };
            let mut from = Bound::Unbounded;
            // One factor after the other, from the least; within it from the least work that waits.
            'factors: while let Some((&(factor, _), _)) = order.buckets.range((from, Bound::Unbounded)).next() {
                if bound(factor, 0.0, f64::INFINITY) >= least {
                    break;
                }
                for (&(at, idle_at), bucket) in order.buckets.range((from, Bound::Unbounded)) {
                    let (pending_ms, idle_ms) = {
                        let ms = (idle_at.0 - self.now_s) * 1e3;
                        (ms.max(0.0), (-ms).max(0.0))
                    };
                    if at != factor || bound(factor, pending_ms, idle_ms) >= least {
                        break;
                    }
                    for link in by_lot(bucket, rng) {
                        looked_at += 1;
                        if looked_at > MAX_CANDIDATES && least < f64::INFINITY {
                            break 'factors;
                        }
                        if let Some(worker) = self.fitting(link) {
                            let blocks = if left_blocks == 0 {
                                0
                            } else {
                                self.fleet.leading(worker, self.ask, false)
                            };
                            least = consider(worker, blocks);
                            if left_blocks == 0 {
                                break;
                            }
                        }
                        if looked_at > 4 * MAX_CANDIDATES {
                            break 'factors;
                        }
                    }
                }
                from = Bound::Excluded((factor, Key(f64::INFINITY)));
            }
        }
        best.map(|(_, choice)| choice)
    }

    /// By a rule that has to see all candidates.
    fn by_rule(&self, placer: &mut Placer, overlaps: &[Overlap], rng: &mut dyn RngCore) -> Option<Choice> {
        let blocks: Map<u32, u32> = overlaps.iter().map(|each| (each.worker, each.blocks)).collect();
        let links = self.pool.ready.iter().copied();
        let fitting: Vec<&Worker> = links.filter_map(|link| self.fitting(link)).collect();
        let candidate = |worker: &&Worker| {
            let hit_tokens = worker.hit_tokens(self.ask, blocks.get(&worker.number).copied().unwrap_or(0));
            worker.candidate(self.now_s, &self.fleet.kinds, self.ask, hit_tokens, 0)
        };
        let candidates: Vec<Candidate> = fitting.iter().map(candidate).collect();
        let first = fitting.first()?;
        let request: Request = self.fleet.kinds.request(first.kind, first.pace, self.ask);
        let chosen = placer.choose(&request, &candidates, rng)?;
        let score = placer.score(&request, &candidates[chosen]);
        Some(choice(fitting[chosen].link, &candidates[chosen], score))
    }
}
