//! A scheduler that places each request the moment it comes, for comparing placement rules alone.
//!
//! No queue, no classes: requests wait at the workers. Knows what workers report, its own placements, and who has a first
//! token; so it is what a router without a scheduler could do.

use std::sync::Arc;

use ahash::{HashMap, HashMapExt};
use rand::rngs::StdRng;
use rand::SeedableRng;

use super::Scheduler;
use crate::cost::{CostModel, CostTable};
use crate::index::{Overlap, PrefixIndex, NO_BLOCK};
use crate::place::{Candidate, Placer, Policy, Request, Why, BLOCK_TOKENS};
use crate::scheduler::actions::{Action, Grant, Reason, Refusal};
use crate::scheduler::events::{Ask, BlockChange, Event, LeaseId, Link, Load};

#[derive(Debug)]
struct Worker {
    link: Link,
    id: Arc<str>,
    instance: Arc<str>,
    address: Arc<str>,
    pool: Arc<str>,
    cost: CostModel,
    load: Load,
    block_tokens: u32,
    /// Predicted work of prompts without a first token.
    prefill_ms: f64,
    /// Those prompts' uncached tokens.
    prefill_tokens: u64,
    waiting: u32,
    decoding: u32,
    active_tokens: u64,
}

#[derive(Debug)]
struct Lease {
    worker: Link,
    prefill_ms: f64,
    prefill_tokens: u32,
    tokens: u32,
    decoding: bool,
}

/// See the module's text.
#[derive(Debug)]
pub struct Direct {
    placer: Placer,
    rng: StdRng,
    tables: Vec<Arc<CostTable>>,
    workers: Vec<Worker>,
    index: PrefixIndex,
    leases: HashMap<LeaseId, Lease>,
    next_lease: LeaseId,
}

impl Direct {
    /// Places by that rule. `tables` are the cost tables that workers name.
    #[must_use]
    pub fn new(policy: Policy, seed: u64, tables: Vec<Arc<CostTable>>) -> Self {
        Self {
            placer: Placer::new(policy),
            rng: StdRng::seed_from_u64(seed ^ 0x9E37_79B9),
            tables,
            workers: Vec::new(),
            index: PrefixIndex::default(),
            leases: HashMap::new(),
            next_lease: 1,
        }
    }

    fn worker(&mut self, link: Link) -> Option<&mut Worker> {
        self.workers.iter_mut().find(|each| each.link == link)
    }

    fn asked(&mut self, router: Link, ask: &Ask, actions: &mut Vec<Action>) {
        let mut overlaps: Vec<Overlap> = Vec::new();
        self.index.overlap(&ask.block_hashes, &mut overlaps);
        let able: Vec<usize> = (0..self.workers.len())
            .filter(|&at| ask.pools.contains(&self.workers[at].pool))
            .collect();
        let candidates: Vec<Candidate> = able
            .iter()
            .map(|&at| {
                let worker = &self.workers[at];
                let blocks = overlaps
                    .iter()
                    .find(|each| Link::from(each.worker) == worker.link)
                    .map_or(0, |each| each.blocks);
                let hit_tokens = (blocks * worker.block_tokens).min(ask.prompt_tokens.saturating_sub(1));
                // What the worker has computed of them since, as far as it says: of one prompt from its start, mostly, and the
                // beginning of a prompt costs less than its end.
                let pending_tokens = worker.load.waiting_prompt_tokens + worker.load.running_prompt_tokens;
                let done_tokens = worker.prefill_tokens.saturating_sub(pending_tokens);
                let done_ms = worker
                    .cost
                    .prefill_ms(u32::try_from(done_tokens).unwrap_or(u32::MAX), 0);
                let least_ms =
                    worker.cost.prefill_ms(BLOCK_TOKENS, 0) / f64::from(BLOCK_TOKENS) * pending_tokens as f64;
                Candidate {
                    pending_prefill_ms: (worker.prefill_ms - done_ms).max(least_ms),
                    pending_prefill_tokens: worker.prefill_tokens.min(pending_tokens),
                    prefill_ms: worker.cost.prefill_ms(ask.prompt_tokens - hit_tokens, hit_tokens),
                    hit_tokens,
                    decoding: worker.decoding,
                    waiting: worker.waiting,
                    active_tokens: worker.active_tokens,
                    cached_tokens: self.index.held_by(worker.link as u32) as u64 * u64::from(worker.block_tokens),
                }
            })
            .collect();
        let block_ms = able
            .first()
            .map_or(0.0, |&at| self.workers[at].cost.prefill_ms(BLOCK_TOKENS, 0));
        let request = Request {
            prompt_tokens: ask.prompt_tokens,
            block_ms,
        };
        let Some(chosen) = self.placer.choose(&request, &candidates, &mut self.rng) else {
            actions.push(Action::Refused(Box::new(Refusal {
                link: router,
                ask: ask.number,
                reason: Reason::Unavailable,
                message: "no worker serves it".to_owned(),
                retryable: true,
                retry_after_ms: 0,
            })));
            return;
        };
        let (candidate, lease) = (candidates[chosen], self.next_lease);
        let why = Why::new(&candidate, self.placer.score(&request, &candidate));
        self.next_lease += 1;
        let worker = &mut self.workers[able[chosen]];
        let new_tokens = ask.prompt_tokens - candidate.hit_tokens;
        worker.waiting += 1;
        worker.prefill_ms += candidate.prefill_ms;
        worker.prefill_tokens += u64::from(new_tokens);
        worker.active_tokens += u64::from(ask.prompt_tokens);
        // Until the next report says so itself.
        worker.load.waiting_prompt_tokens += u64::from(new_tokens);
        let held = Lease {
            worker: worker.link,
            prefill_ms: candidate.prefill_ms,
            prefill_tokens: new_tokens,
            tokens: ask.prompt_tokens,
            decoding: false,
        };
        self.leases.insert(lease, held);
        actions.push(Action::Granted(Box::new(Grant {
            link: router,
            ask: ask.number,
            lease,
            worker: worker.link,
            worker_id: Arc::clone(&worker.id),
            instance_id: Arc::clone(&worker.instance),
            address: Arc::clone(&worker.address),
            pool: Arc::clone(&worker.pool),
            class: ask.class,
            queue_s: 0.0,
            predicted_ttft_s: None,
            cached_tokens: candidate.hit_tokens,
            why,
            token_allowance: 0,
        })));
    }

    fn prefilled(&mut self, number: LeaseId, ended: bool) {
        let Some(lease) = self.leases.get_mut(&number) else {
            return;
        };
        let was_decoding = std::mem::replace(&mut lease.decoding, true);
        let (link, prefill_ms, prefill_tokens, tokens) =
            (lease.worker, lease.prefill_ms, lease.prefill_tokens, lease.tokens);
        if ended {
            self.leases.remove(&number);
        }
        let Some(worker) = self.worker(link) else { return };
        if !was_decoding {
            worker.waiting -= 1;
            worker.decoding += 1;
            worker.prefill_ms = (worker.prefill_ms - prefill_ms).max(0.0);
            worker.prefill_tokens -= u64::from(prefill_tokens);
        }
        if ended {
            worker.decoding -= 1;
            worker.active_tokens -= u64::from(tokens);
        }
    }
}

impl Scheduler for Direct {
    fn step(&mut self, _now_s: f64, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::WorkerJoined { link, hello } => {
                let table = self
                    .tables
                    .iter()
                    .find(|table| *table.name == *hello.description.cost_table);
                self.workers.push(Worker {
                    link,
                    id: hello.worker_id,
                    instance: hello.instance_id,
                    address: hello.address,
                    pool: hello.pool,
                    cost: CostModel::new(table.cloned()),
                    load: Load::default(),
                    block_tokens: hello.description.block_tokens,
                    prefill_ms: 0.0,
                    prefill_tokens: 0,
                    waiting: 0,
                    decoding: 0,
                    active_tokens: 0,
                });
            }
            Event::WorkerLost { link } => {
                self.workers.retain(|each| each.link != link);
                self.leases.retain(|_, lease| lease.worker != link);
                self.index.clear(link as u32);
            }
            Event::WorkerReported { link, load } => {
                if let Some(worker) = self.worker(link) {
                    worker.load = *load;
                }
            }
            Event::BlocksChanged { link, change } => match change {
                BlockChange::Stored(blocks) => self.index.store(link as u32, NO_BLOCK, &blocks),
                BlockChange::Removed(blocks) => self.index.remove(link as u32, &blocks),
                BlockChange::Cleared => self.index.clear(link as u32),
            },
            Event::Asked { link, ask } => self.asked(link, &ask, actions),
            Event::Progressed { lease, .. } => self.prefilled(lease, false),
            Event::Released { lease, .. } => self.prefilled(lease, true),
            Event::RouterJoined { .. }
            | Event::RouterLost { .. }
            | Event::Withdrawn { .. }
            | Event::Placed { .. }
            | Event::KnowsShares { .. }
            | Event::Tick => {}
        }
    }

    fn next_wakeup(&self) -> Option<f64> {
        None
    }
}
