//! The router's side: what it may place by itself, and where it does best.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
};

use rand::{seq::index, RngCore};

use super::Room;
use crate::{
    cost::PromptCost,
    index::{marks, Expected, Overlap, PrefixIndex, WorkerId},
    place::{charged_tokens, copy_ms, Candidate, Placer, Request, Why},
    scheduler::events::Link,
};

/// Workers looked at for one request. The best of so many drawn ones is among the best few in a hundred of all, and the cost
/// does not grow with the fleet.
const CANDIDATES: usize = 32;

/// Holders of a prompt's beginning that are looked at beside those that are drawn, those with the most of it.
const MAX_HOLDERS: usize = 32;

/// What the scheduler believes of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outlook {
    /// Predicted work of prompts that it has and has not computed yet. It becomes less as time passes.
    pub pending_prefill_ms: f64,
    /// What prompts cost there.
    pub cost: PromptCost,
    /// Requests that decode.
    pub decoding: u32,
    /// Requests that wait or whose prompt is partly computed.
    pub waiting: u32,
    /// How long it has been idle; None = it has something to do.
    pub idle_ms: Option<f64>,
    /// With more work than this waiting there, a prompt has to be asked for: it would not begin at once, and whose turn it
    /// is then is the scheduler's to say. None = no limit.
    pub ahead_ms: Option<f64>,
    /// Requests that may part, with so many prompt tokens to compute there, have to be asked for; 0 = none.
    pub ask_from_tokens: u32,
    /// So many of the requests that its router has placed on this stream are counted in that.
    pub placed: u64,
}

/// A worker of which something may be lent.
#[derive(Clone, Debug)]
pub struct Grantor {
    /// Its pool.
    pub pool: Arc<str>,
    /// Its number in the prefix index.
    pub number: WorkerId,
    /// Tokens of one of its KV blocks; 0 = it has none to share.
    pub block_tokens: u32,
}

/// A request that wants to run.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// Where.
    pub pool: &'a str,
    /// Length of its prompt.
    pub prompt_tokens: u32,
    /// Names of the prompt's full blocks.
    pub blocks: &'a [u64],
    /// What it takes.
    pub room: Room,
    /// Its prompt may be better computed on a worker for prompts, of which there are no shares: then it is the scheduler's
    /// to say.
    pub may_part: bool,
    /// Workers that it is not to run on.
    pub avoid: &'a BTreeSet<Link>,
}

/// All that one router holds.
#[derive(Debug, Default)]
pub struct Holder {
    workers: BTreeMap<Link, Held>,
    pools: BTreeMap<Arc<str>, Pool>,
    /// By their numbers in the prefix index.
    links: HashMap<WorkerId, Link>,
    /// What workers will hold because of what was placed here, and still runs.
    expected: Expected,
    overlaps: Vec<Overlap>,
    /// Requests that were placed here on this stream, and how many of them the scheduler has heard of.
    placed: u64,
    heard: u64,
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
    /// The marks of what of its prompt the worker did not hold.
    blocks: Vec<u64>,
    /// Its first token has come.
    begun: bool,
    /// Its place among all that were placed on its stream.
    number: u64,
    stream: u64,
}

#[derive(Debug)]
struct Held {
    grantor: Grantor,
    limit: Room,
    used: Room,
    /// As the scheduler said last, with what has happened here since.
    outlook: Outlook,
    /// When it will have computed all prompts that wait.
    idle_at_s: f64,
    /// Since when it has had nothing to do, as far as is known here; None = it has something.
    idle_since_s: Option<f64>,
    /// What was placed here and has no first token, of which the scheduler may not have heard: numbers and prompts' work.
    unheard: VecDeque<(u64, f64)>,
    /// Where it stands among those of its pool that lend something.
    at: Option<usize>,
}

impl Held {
    /// The scheduler has heard of what was placed until then.
    fn forget_until(&mut self, number: u64) {
        while self.unheard.front().is_some_and(|&(first, _)| first <= number) {
            self.unheard.pop_front();
        }
    }

    fn pending_ms(&self, now_s: f64) -> f64 {
        if self.outlook.waiting == 0 {
            return 0.0;
        }
        ((self.idle_at_s - now_s) * 1e3).max(0.0)
    }
}

#[derive(Debug, Default)]
struct Pool {
    /// Those of which something is lent, used up or not.
    lent: Vec<Link>,
    placer: Placer,
}

impl Holder {
    /// A worker of which shares may come on this stream.
    pub fn introduce(&mut self, worker: Link, grantor: Grantor) {
        self.links.insert(grantor.number, worker);
        self.workers.entry(worker).or_insert_with(|| Held {
            grantor,
            limit: Room::NONE,
            used: Room::NONE,
            outlook: Outlook::default(),
            idle_at_s: f64::NEG_INFINITY,
            idle_since_s: None,
            unheard: VecDeque::new(),
            at: None,
        });
    }

    /// A worker is gone, and all that was lent of it. What was placed there ends without it.
    pub fn forget(&mut self, worker: Link) {
        let Some(held) = self.workers.get_mut(&worker) else {
            return;
        };
        (held.limit, held.used) = (Room::NONE, Room::NONE);
        self.settle(worker);
        if let Some(held) = self.workers.remove(&worker) {
            self.links.remove(&held.grantor.number);
            self.expected.clear(held.grantor.number);
        }
    }

    /// A share came of a worker that was introduced. `outlook` is what the scheduler believes of the worker now.
    pub fn receive(&mut self, now_s: f64, number: u64, worker: Link, room: Room, outlook: Outlook) {
        self.known = self.known.max(number);
        self.hear(now_s, worker, outlook);
        if let Some(held) = self.workers.get_mut(&worker) {
            held.limit = room;
            self.settle(worker);
        }
    }

    /// News of a worker without a new share.
    pub fn hear(&mut self, now_s: f64, worker: Link, outlook: Outlook) {
        self.heard = self.heard.max(outlook.placed);
        if let Some(held) = self.workers.get_mut(&worker) {
            held.forget_until(outlook.placed);
            held.outlook = outlook;
            held.outlook.waiting += held.unheard.len() as u32;
            let since_s = outlook.idle_ms.map(|idle_ms| now_s - idle_ms / 1e3);
            held.idle_since_s = since_s.filter(|_| held.unheard.is_empty());
            let unheard_ms: f64 = held.unheard.iter().map(|(_, prefill_ms)| prefill_ms).sum();
            held.idle_at_s = now_s + (outlook.pending_prefill_ms + unheard_ms) / 1e3;
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

    /// Takes room for a request on the worker where it does best, of those of which something is lent; None when its share
    /// there has no room for it, or too much is to be done before it: it is asked for then, rather than placed where it does
    /// worse. `index`: who holds which prefix blocks.
    pub fn place(
        &mut self,
        now_s: f64,
        wanted: &Wanted<'_>,
        index: &PrefixIndex,
        rng: &mut dyn RngCore,
    ) -> Option<Taken> {
        let hits = self.hits(wanted, index);
        let pool = self.pools.get_mut(wanted.pool)?;
        let drawn: BTreeSet<usize> = if pool.lent.len() <= CANDIDATES {
            (0..pool.lent.len()).collect()
        } else {
            let drawn = index::sample(rng, pool.lent.len(), CANDIDATES).into_iter();
            let of_pool = |link: &Link| self.workers.get(link).filter(|held| &*held.grantor.pool == wanted.pool);
            drawn.chain(hits.keys().filter_map(|link| of_pool(link)?.at)).collect()
        };
        let mut block_ms = 0.0_f64;
        let may = |worker: &Link| !wanted.avoid.contains(worker);
        let most_tokens = (drawn.iter().map(|&at| &pool.lent[at]))
            .filter_map(|worker| hits.get(worker).filter(|_| may(worker)).copied())
            .max()
            .unwrap_or(0);
        let (workers, candidates): (Vec<Link>, Vec<Candidate>) = drawn
            .into_iter()
            .filter_map(|at| {
                let worker = pool.lent[at];
                let held = self.workers.get(&worker).filter(|_| may(&worker))?;
                let outlook = &held.outlook;
                block_ms = block_ms.max(outlook.cost.prefill_ms(charged_tokens(wanted.prompt_tokens), 0));
                let hit_tokens = hits.get(&worker).copied().unwrap_or(0);
                let work_ms = |held: u32| outlook.cost.prefill_ms(wanted.prompt_tokens - held, held);
                let candidate = Candidate {
                    pending_prefill_ms: held.pending_ms(now_s),
                    prefill_ms: work_ms(hit_tokens),
                    copy_ms: copy_ms(work_ms, hit_tokens, most_tokens),
                    idle_ms: held
                        .idle_since_s
                        .map_or(0.0, |since_s| (now_s - since_s).max(0.0) * 1e3),
                    hit_tokens,
                    decoding: outlook.decoding,
                    waiting: outlook.waiting,
                    ..Candidate::default()
                };
                Some((worker, candidate))
            })
            .unzip();
        let request = Request {
            prompt_tokens: wanted.prompt_tokens,
            block_ms,
        };
        let chosen = pool.placer.choose(&request, &candidates, rng)?;
        let (worker, candidate) = (workers[chosen], &candidates[chosen]);
        let held = self.workers.get_mut(&worker)?;
        let ask_from = held.outlook.ask_from_tokens;
        let parts = wanted.may_part && ask_from > 0 && wanted.prompt_tokens - candidate.hit_tokens >= ask_from;
        let pending_ms = held.pending_ms(now_s);
        let fits = held.used.plus(wanted.room).fits(held.limit);
        if parts || !fits || held.outlook.ahead_ms.is_some_and(|ahead_ms| pending_ms > ahead_ms) {
            return None;
        }
        held.used = held.used.plus(wanted.room);
        // Its own placements count at once: what the scheduler says of them comes later.
        held.idle_at_s = now_s + (pending_ms + candidate.prefill_ms) / 1e3;
        held.idle_since_s = None;
        held.outlook.waiting += 1;
        self.placed += 1;
        held.forget_until(self.heard);
        held.unheard.push_back((self.placed, candidate.prefill_ms));
        let why = Why::new(candidate, pool.placer.score(&request, candidate));
        let grantor = &held.grantor;
        let held_blocks = candidate.hit_tokens.div_ceil(grantor.block_tokens.max(1)) as usize;
        let blocks = marks(wanted.blocks, held_blocks);
        self.expected.add(grantor.number, &blocks);
        Some(Taken {
            worker,
            room: wanted.room,
            why,
            blocks,
            begun: false,
            number: self.placed,
            stream: self.stream,
        })
    }

    /// Workers that hold some of a prompt, or will, and how many tokens of it; those with the most of it.
    fn hits(&mut self, wanted: &Wanted<'_>, index: &PrefixIndex) -> BTreeMap<Link, u32> {
        let overlaps = &mut self.overlaps;
        overlaps.clear();
        self.expected.overlap(index, wanted.blocks, overlaps);
        if overlaps.len() > MAX_HOLDERS {
            overlaps.select_nth_unstable_by_key(MAX_HOLDERS, |each| std::cmp::Reverse(each.blocks));
            overlaps.truncate(MAX_HOLDERS);
        }
        let hit = |overlap: &Overlap| {
            let link = *self.links.get(&overlap.worker)?;
            let block_tokens = self.workers.get(&link)?.grantor.block_tokens;
            // At least the last token is computed.
            let most = wanted.prompt_tokens.saturating_sub(1);
            Some((link, (overlap.blocks * block_tokens).min(most)))
        };
        overlaps.iter().filter_map(hit).collect()
    }

    /// The first token of a request has come: its prompt is computed.
    pub fn begun(&mut self, taken: &mut Taken) {
        if taken.stream != self.stream || std::mem::replace(&mut taken.begun, true) {
            return;
        }
        if let Some(held) = self.workers.get_mut(&taken.worker) {
            held.unheard.retain(|&(number, _)| number != taken.number);
            held.outlook.waiting = held.outlook.waiting.saturating_sub(1);
            held.outlook.decoding += 1;
        }
    }

    /// A request has ended. What was placed on an earlier stream has been announced, and is none of these shares' any more.
    pub fn give_back(&mut self, now_s: f64, taken: Taken) {
        if taken.stream != self.stream {
            return;
        }
        if let Some(held) = self.workers.get_mut(&taken.worker) {
            self.expected.remove(held.grantor.number, &taken.blocks);
            held.used = held.used.less(taken.room);
            if taken.begun {
                held.outlook.decoding = held.outlook.decoding.saturating_sub(1);
            } else {
                held.unheard.retain(|&(number, _)| number != taken.number);
                held.outlook.waiting = held.outlook.waiting.saturating_sub(1);
                held.idle_at_s -= taken.why.prefill_ms / 1e3;
            }
            // What others placed and ended meanwhile makes it a little later: that is not told.
            if held.outlook.decoding + held.outlook.waiting == 0 {
                held.idle_since_s = Some(now_s);
            }
        }
    }

    /// Puts a worker among those of which something is lent, or takes it out.
    fn settle(&mut self, worker: Link) {
        let Some(held) = self.workers.get_mut(&worker) else {
            return;
        };
        let pool = self.pools.entry(held.grantor.pool.clone()).or_default();
        match (held.limit != Room::NONE, held.at) {
            (true, None) => {
                held.at = Some(pool.lent.len());
                pool.lent.push(worker);
            }
            (false, Some(at)) => {
                held.at = None;
                pool.lent.swap_remove(at);
                if let Some(moved) = pool.lent.get(at).and_then(|moved| self.workers.get_mut(moved)) {
                    moved.at = Some(at);
                }
            }
            _ => {}
        }
    }
}
