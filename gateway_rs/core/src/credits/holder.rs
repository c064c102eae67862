//! The router's side: what it may place by itself, and where it does best.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rand::{seq::index, RngCore};

use super::Room;
use crate::{
    place::{charged_tokens, Candidate, Placer, Request, Why},
    scheduler::events::Link,
};

/// Workers looked at for one request. The best of so many drawn ones is among the best few in a hundred of all, and the cost
/// does not grow with the fleet.
const CANDIDATES: usize = 32;

/// What the scheduler believes of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outlook {
    /// Predicted work of prompts that it has and has not computed yet.
    pub pending_prefill_ms: f64,
    /// Predicted work of one prompt token.
    pub prefill_ms_per_token: f64,
    /// Requests that decode.
    pub decoding: u32,
    /// Requests that wait or whose prompt is partly computed.
    pub waiting: u32,
    /// With more work than this waiting there, a prompt has to be asked for: it would not begin at once, and whose turn it
    /// is then is the scheduler's to say. None = no limit.
    pub ahead_ms: Option<f64>,
    /// Requests that may part, with so many prompt tokens to compute there, have to be asked for; 0 = none.
    pub ask_from_tokens: u32,
}

/// What placing a request asks of its prompt.
#[derive(Clone, Copy, Debug)]
pub struct Prompt {
    /// Its length.
    pub tokens: u32,
    /// It may be better computed on a worker for prompts, of which there are no shares: then it is the scheduler's to say.
    pub may_part: bool,
}

/// All that one router holds.
#[derive(Debug, Default)]
pub struct Holder {
    workers: BTreeMap<Link, Held>,
    pools: BTreeMap<Arc<str>, Pool>,
    known: u64,
    stream: u64,
}

/// Room that a request has taken. Given back once, when it has ended.
#[derive(Debug, PartialEq)]
pub struct Taken {
    /// Where it runs.
    pub worker: Link,
    /// What it takes.
    pub room: Room,
    /// Why there.
    pub why: Why,
    stream: u64,
    /// News of the worker until then.
    heard: u64,
}

#[derive(Debug)]
struct Held {
    pool: Arc<str>,
    limit: Room,
    used: Room,
    /// As the scheduler said last, with what was placed here since and has not ended.
    outlook: Outlook,
    /// How often it has said so.
    heard: u64,
    /// Where it stands among its pool's open ones.
    at: Option<usize>,
}

#[derive(Debug, Default)]
struct Pool {
    /// Those with some room left.
    open: Vec<Link>,
    placer: Placer,
}

impl Holder {
    /// A share came. `outlook` is what the scheduler believes of the worker now.
    pub fn receive(&mut self, number: u64, worker: Link, pool: &Arc<str>, room: Room, outlook: Outlook) {
        self.known = self.known.max(number);
        let held = self.workers.entry(worker).or_insert_with(|| Held {
            pool: pool.clone(),
            limit: Room::NONE,
            used: Room::NONE,
            outlook,
            heard: 0,
            at: None,
        });
        held.limit = room;
        held.outlook = outlook;
        held.heard += 1;
        self.settle(worker);
    }

    /// News of a worker without a new share.
    pub fn hear(&mut self, worker: Link, outlook: Outlook) {
        if let Some(held) = self.workers.get_mut(&worker) {
            held.outlook = outlook;
            held.heard += 1;
        }
    }

    /// The last share that was taken in: said to the scheduler after all that was placed before.
    pub fn known(&self) -> u64 {
        self.known
    }

    /// A new stream begins: what runs has been announced, and is the scheduler's to count. Nothing may be placed until new
    /// shares come, whose numbers begin anew.
    pub fn reset(&mut self) {
        *self = Self {
            stream: self.stream + 1,
            ..Self::default()
        };
    }

    /// Takes room for a request of a pool on the worker where it does best; None when no share has room for it, or that
    /// worker has too much to do before it. `hits`:
    /// workers that hold some of the prompt, or will, and how many tokens of it.
    pub fn place(
        &mut self,
        pool: &str,
        prompt: Prompt,
        room: Room,
        hits: &BTreeMap<Link, u32>,
        avoid: &BTreeSet<Link>,
        rng: &mut dyn RngCore,
    ) -> Option<Taken> {
        let prompt_tokens = prompt.tokens;
        let open = self.pools.get_mut(pool)?;
        let drawn: BTreeSet<usize> = if open.open.len() <= CANDIDATES {
            (0..open.open.len()).collect()
        } else {
            let drawn = index::sample(rng, open.open.len(), CANDIDATES).into_iter();
            let of_pool = |link: &Link| self.workers.get(link).filter(|held| &*held.pool == pool);
            drawn.chain(hits.keys().filter_map(|link| of_pool(link)?.at)).collect()
        };
        let mut block_ms = 0.0_f64;
        let (workers, candidates): (Vec<Link>, Vec<Candidate>) = drawn
            .into_iter()
            .filter_map(|at| {
                let worker = open.open[at];
                let held = self.workers.get(&worker)?;
                if avoid.contains(&worker) || !held.used.plus(room).fits(held.limit) {
                    return None;
                }
                let outlook = &held.outlook;
                block_ms = block_ms.max(outlook.prefill_ms_per_token * f64::from(charged_tokens(prompt_tokens)));
                let hit_tokens = hits.get(&worker).copied().unwrap_or(0).min(prompt_tokens);
                let candidate = Candidate {
                    pending_prefill_ms: outlook.pending_prefill_ms,
                    prefill_ms: outlook.prefill_ms_per_token * f64::from(prompt_tokens - hit_tokens),
                    hit_tokens,
                    decoding: outlook.decoding,
                    waiting: outlook.waiting,
                    ..Candidate::default()
                };
                Some((worker, candidate))
            })
            .unzip();
        let request = Request {
            prompt_tokens,
            block_ms,
        };
        let chosen = open.placer.choose(&request, &candidates, rng)?;
        let (worker, candidate) = (workers[chosen], &candidates[chosen]);
        let held = self.workers.get_mut(&worker)?;
        let ask_from = held.outlook.ask_from_tokens;
        let parts = prompt.may_part && ask_from > 0 && prompt_tokens - candidate.hit_tokens >= ask_from;
        let pending_ms = held.outlook.pending_prefill_ms;
        if parts || held.outlook.ahead_ms.is_some_and(|ahead_ms| pending_ms > ahead_ms) {
            return None;
        }
        held.used = held.used.plus(room);
        // Its own placements count at once: what the scheduler says of them comes later.
        held.outlook.pending_prefill_ms += candidate.prefill_ms;
        held.outlook.waiting += 1;
        let why = Why::new(candidate, open.placer.score(&request, candidate));
        let heard = held.heard;
        self.settle(worker);
        Some(Taken {
            worker,
            room,
            why,
            stream: self.stream,
            heard,
        })
    }

    /// Whether that was placed on this stream.
    pub fn knows(&self, taken: &Taken) -> bool {
        taken.stream == self.stream
    }

    /// A request has ended. What was placed on an earlier stream has been announced, and is none of these shares' any more.
    pub fn give_back(&mut self, taken: Taken) {
        if !self.knows(&taken) {
            return;
        }
        if let Some(held) = self.workers.get_mut(&taken.worker) {
            held.used = held.used.less(taken.room);
            if held.heard == taken.heard {
                let outlook = &mut held.outlook;
                outlook.waiting = outlook.waiting.saturating_sub(1);
                outlook.pending_prefill_ms = (outlook.pending_prefill_ms - taken.why.prefill_ms).max(0.0);
            }
        }
        self.settle(taken.worker);
    }

    /// Puts a worker among the open ones, or takes it out, or forgets it.
    fn settle(&mut self, worker: Link) {
        let Some(held) = self.workers.get_mut(&worker) else {
            return;
        };
        let pool = self.pools.entry(held.pool.clone()).or_default();
        let open = held.used.choices < held.limit.choices && held.used.kv_tokens < held.limit.kv_tokens;
        match (open, held.at) {
            (true, None) => {
                held.at = Some(pool.open.len());
                pool.open.push(worker);
            }
            (false, Some(at)) => {
                held.at = None;
                pool.open.swap_remove(at);
                let forgotten = held.limit == Room::NONE && held.used == Room::NONE;
                if let Some(&moved) = pool.open.get(at) {
                    if let Some(moved) = self.workers.get_mut(&moved) {
                        moved.at = Some(at);
                    }
                }
                if forgotten {
                    self.workers.remove(&worker);
                }
            }
            (false, None) if held.limit == Room::NONE && held.used == Room::NONE => {
                self.workers.remove(&worker);
            }
            _ => {}
        }
    }
}
