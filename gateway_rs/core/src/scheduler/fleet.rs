//! What we believe of each worker, and since when.
//!
//! Load is the set of leases held for a worker *instance*, never a number moved by hand: [`Held`] is that set and the only
//! place where its sums are written. A worker that restarts is a new instance with an empty set. What workers report refines
//! the belief (prompts already computed, KV shared between requests) but does not replace it: a report is always a little
//! old.
//!
//! Each pool keeps its workers that can take something in an [`Order`], least delayed first, so that the best by the
//! marginal delay is found without a scan of the fleet: a worker that holds nothing of the prompt differs from its like only
//! in the work that waits there, P, and the factor (1 + R)(1 + W), which are the order's key; the holders of a prefix are
//! scored one by one. What this module leaves to `core.rs`: whose turn it is, and all answers.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt::Debug,
    ops::Bound,
    sync::Arc,
};

use rand::{Rng, RngCore};

use crate::credits::Room;

use super::{
    events::{Ask, BlockChange, Capabilities, Class, Description, LeaseId, Link, Load, WorkerHello, WorkerState},
    fair::AccountId,
    kinds::{Drift, KindId, Kinds, Pace},
    lengths::Root,
    map::{Key, Map},
};
use crate::{
    index::{Overlap, PrefixIndex, NO_BLOCK},
    place::{Candidate, Placer, Policy, Request, BLOCK_TOKENS},
};

/// KV that an answer is expected to take at most, before it is there. Optimistic on purpose: a worker that runs out lets its
/// requests wait, while room kept for answers that end early is lost.
pub const ANSWER_KV_TOKENS: u32 = 64;

/// Workers looked at for one ask that does not fit on the better ones. A bound on work, not on luck: whoever is not looked at
/// is asked the other way round at its next report.
const MAX_CANDIDATES: usize = 64;

/// Holders of a prefix that are scored before all others, those with the most of it first.
const MAX_HOLDERS: usize = 64;

/// Blocks that a worker which does not report its blocks is believed to hold, when it does not say how many it has.
const BELIEVED_BLOCKS: usize = 4096;

/// The right to run one request on one worker instance.
#[derive(Clone, Debug)]
pub struct Lease {
    /// Its number.
    pub id: LeaseId,
    /// Whose it is.
    pub router_id: Arc<str>,
    /// Where it runs.
    pub instance_id: Arc<str>,
    /// For people.
    pub request_id: Arc<str>,
    /// Whose request.
    pub tenant: Arc<str>,
    /// Answers in the making.
    pub choices: u32,
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// KV that it is expected to take.
    pub kv_tokens: u64,
    /// When it began.
    pub granted_s: f64,
    /// Whose turn it was.
    pub class: Class,
    /// How far it is.
    pub phase: Phase,
    /// Predicted work of its prompt.
    pub prefill_ms: f64,
    /// From the grant to its first token, as predicted; None = the model could not say, or it has come.
    pub predicted_ttft_s: Option<f64>,
    /// Its tenant's account, and what was charged to it; None = it was announced by its router.
    pub charged: Option<(AccountId, f64)>,
    /// What its answer has in common with others.
    pub root: Root,
    /// Tokens that its answers had when they were last heard of.
    pub output_tokens: u32,
    /// Tokens of an answer at most; 0 = not said.
    pub max_tokens: u32,
    /// Between its tokens.
    pub tpot_target_s: f64,
    /// Times it was put aside.
    pub preempted: u32,
    /// The router's stream, when it placed this by itself.
    pub by_credit: Option<Link>,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its prompt waits or is being computed.
    Prefill,
    /// Its answer grows.
    Decode,
    /// It was put aside and holds no slot and no KV.
    Aside,
}

/// A set of leases and what they add up to.
#[derive(Clone, Debug, Default)]
pub struct Held {
    /// By the time they were granted.
    leases: BTreeSet<(Key, LeaseId)>,
    choices: u64,
    prompt_tokens: u64,
    kv_tokens: u64,
    batch: u32,
    /// Their targets between tokens, and how many have each.
    tpot_targets: BTreeMap<Key, u32>,
}

impl Held {
    /// How many.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// Choices of all.
    pub fn choices(&self) -> u64 {
        self.choices
    }

    /// The tightest target between tokens.
    pub fn tpot_target_s(&self) -> Option<f64> {
        self.tpot_targets.first_key_value().map(|(target, _)| target.0)
    }

    /// Those of batch requests.
    pub fn batch(&self) -> u32 {
        self.batch
    }

    /// KV that all are expected to take.
    pub fn kv_tokens(&self) -> u64 {
        self.kv_tokens
    }

    /// Their numbers, oldest first.
    pub fn ids(&self) -> impl Iterator<Item = LeaseId> + '_ {
        self.leases.iter().map(|&(_, id)| id)
    }

    fn add(&mut self, lease: &Lease) {
        if self.leases.insert((Key(lease.granted_s), lease.id)) {
            self.choices += u64::from(lease.choices);
            self.prompt_tokens += u64::from(lease.prompt_tokens);
            self.kv_tokens += lease.kv_tokens;
            self.batch += u32::from(lease.class == Class::Batch);
            *self.tpot_targets.entry(Key(lease.tpot_target_s)).or_default() += 1;
        }
    }

    fn discard(&mut self, lease: &Lease) {
        if self.leases.remove(&(Key(lease.granted_s), lease.id)) {
            self.choices -= u64::from(lease.choices);
            self.prompt_tokens -= u64::from(lease.prompt_tokens);
            self.kv_tokens -= lease.kv_tokens;
            self.batch -= u32::from(lease.class == Class::Batch);
            if let Some(count) = self.tpot_targets.get_mut(&Key(lease.tpot_target_s)) {
                *count -= 1;
                if *count == 0 {
                    self.tpot_targets.remove(&Key(lease.tpot_target_s));
                }
            }
        }
    }

    fn contains(&self, lease: &Lease) -> bool {
        self.leases.contains(&(Key(lease.granted_s), lease.id))
    }

    fn oldest(&self) -> Option<(f64, LeaseId)> {
        self.leases.first().map(|&(granted, id)| (granted.0, id))
    }
}

/// KV that a request is expected to take.
pub fn kv_tokens(ask: &Ask) -> u64 {
    expected_kv_tokens(
        ask.prompt_tokens,
        ask.choices,
        ask.max_tokens,
        ask.expected_output_tokens,
    )
}

/// KV that a prompt and its answers are expected to take; 0 = not said.
pub fn expected_kv_tokens(prompt_tokens: u32, choices: u32, max_tokens: u32, expected_output_tokens: u32) -> u64 {
    let expected = if expected_output_tokens > 0 {
        expected_output_tokens
    } else {
        ANSWER_KV_TOKENS
    };
    let answer = if max_tokens > 0 {
        max_tokens.min(expected)
    } else {
        expected
    };
    u64::from(prompt_tokens) + u64::from(choices) * u64::from(answer)
}

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
}

/// One instance of a worker, as believed.
#[derive(Debug)]
pub struct Worker {
    /// Its stream.
    pub link: Link,
    /// Who it is.
    pub hello: WorkerHello,
    /// As it last reported.
    pub load: Load,
    /// When that was.
    pub heard_s: f64,
    /// The leases that it holds.
    pub held: Held,
    /// Of those, what the last report may not know of yet.
    pub unreported: Held,
    /// Of those, whose prompts are not computed yet.
    pub prefilling: BTreeSet<LeaseId>,
    /// Leases of requests that were put aside, by since when.
    pub aside: BTreeSet<(Key, LeaseId)>,
    /// Room that routers may use by themselves and, for all we know, do not yet.
    pub promised: Room,
    /// The one ask that this worker keeps its room for.
    pub reserved_for: Option<u64>,
    /// Prompt tokens in a step beside decoding, as it was last told.
    pub chunk_tokens: Option<u32>,
    /// What its steps cost.
    pub kind: KindId,
    /// How it differs from its kind.
    pub pace: Pace,
    drift: Drift,
    /// Its number in the prefix index.
    number: u32,
    /// It reports its blocks, so nothing is believed.
    reports_blocks: bool,
    /// Blocks that it was given, oldest first.
    believed: VecDeque<u64>,
    /// Asks that wait for it here.
    planned: u32,
    planned_ms: f64,
    /// Predicted work of prompts that were given to it and have no first token.
    prefilling_ms: f64,
    /// When it will have computed all prompts, those of asks that wait for it here too.
    idle_at_s: f64,
    /// The longest prompt that its pool counts on it for; None = it is not ready.
    serves_prompt_tokens: Option<u32>,
    /// Choices in its batch at most.
    pub slots: u32,
    /// Choices leased at most: a full batch, and a few that hide the round trip.
    pub limit: u64,
    /// Tokens of KV in all; 0 = it does not say.
    pub kv_tokens_total: u64,
    /// The longest prompt that it can serve, with room for one token of answer.
    pub max_prompt_tokens: u32,
    reported_prompt_tokens: u64,
    reported_kv_tokens: u64,
}

impl Worker {
    fn new(link: Link, hello: WorkerHello, now_s: f64, queue_factor: f64, number: u32, kind: KindId) -> Self {
        let mut worker = Self {
            link,
            hello,
            load: Load::default(),
            heard_s: now_s,
            held: Held::default(),
            unreported: Held::default(),
            prefilling: BTreeSet::new(),
            aside: BTreeSet::new(),
            promised: Room::NONE,
            reserved_for: None,
            chunk_tokens: None,
            kind,
            pace: Pace::default(),
            drift: Drift::default(),
            number,
            reports_blocks: false,
            believed: VecDeque::new(),
            planned: 0,
            planned_ms: 0.0,
            prefilling_ms: 0.0,
            idle_at_s: f64::NEG_INFINITY,
            serves_prompt_tokens: None,
            slots: 1,
            limit: 1,
            kv_tokens_total: 0,
            max_prompt_tokens: 0,
            reported_prompt_tokens: 0,
            reported_kv_tokens: 0,
        };
        worker.derive(queue_factor);
        worker
    }

    /// Takes new requests when it has room.
    pub fn ready(&self) -> bool {
        self.load.state == WorkerState::Ready
    }

    /// Takes any request now, as far as leases go.
    pub fn open(&self) -> bool {
        self.ready() && self.reserved_for.is_none() && self.held.choices + self.promised.choices < self.limit
    }

    /// Requests that decode.
    pub fn decoding(&self) -> u32 {
        (self.held.len() - self.prefilling.len()) as u32
    }

    /// Requests whose prompts wait or are being computed, and asks that wait for it here.
    pub fn waiting(&self) -> u32 {
        self.prefilling.len() as u32 + self.planned
    }

    /// Predicted work of prompts that it has not computed, those of asks that wait for it here too.
    pub fn pending_ms(&self, now_s: f64) -> f64 {
        if self.waiting() == 0 {
            return 0.0;
        }
        ((self.idle_at_s - now_s) * 1e3).clamp(0.0, (self.prefilling_ms + self.planned_ms).max(0.0))
    }

    /// Of that, what it has been given.
    pub fn fed_ms(&self, now_s: f64) -> f64 {
        (self.pending_ms(now_s) - self.planned_ms).max(0.0)
    }

    /// When no more than that is left of what it has been given.
    pub fn fed_until_s(&self, ahead_ms: f64) -> f64 {
        self.idle_at_s - (self.planned_ms + ahead_ms) / 1e3
    }

    fn add_prefill(&mut self, now_s: f64, ms: f64) {
        self.idle_at_s = self.idle_at_s.max(now_s) + ms / 1e3;
    }

    /// So much less is to be computed than was thought.
    fn drop_prefill(&mut self, now_s: f64, ms: f64) {
        self.idle_at_s = (self.idle_at_s - ms / 1e3).max(now_s);
        self.bound_prefill(now_s);
    }

    /// No more waits there than what it holds.
    fn bound_prefill(&mut self, now_s: f64) {
        if self.prefilling.is_empty() {
            self.prefilling_ms = 0.0;
        }
        if self.planned == 0 {
            self.planned_ms = 0.0;
        }
        let most_s = (self.prefilling_ms + self.planned_ms).max(0.0) / 1e3;
        self.idle_at_s = self.idle_at_s.min(now_s + most_s);
    }

    /// Where it stands among workers of its kind: the factor by which a prompt there delays others, and when it has
    /// computed what it has.
    fn standing(&self) -> (u64, Key) {
        let factor = (1 + u64::from(self.decoding())) * (1 + u64::from(self.waiting()));
        let idle_at_s = if self.waiting() == 0 {
            f64::NEG_INFINITY
        } else {
            self.idle_at_s
        };
        (factor, Key(idle_at_s))
    }

    fn candidate(&self, now_s: f64, kinds: &Kinds, ask: &Ask, hit_tokens: u32) -> Candidate {
        let pending_prefill_ms = self.pending_ms(now_s);
        let token_ms = kinds.prefill_ms(self.kind, self.pace, BLOCK_TOKENS, 0) / f64::from(BLOCK_TOKENS);
        Candidate {
            pending_prefill_ms,
            pending_prefill_tokens: (pending_prefill_ms / token_ms) as u64,
            prefill_ms: kinds.prefill_ms(self.kind, self.pace, ask.prompt_tokens - hit_tokens, hit_tokens),
            hit_tokens,
            decoding: self.decoding(),
            waiting: self.waiting(),
            active_tokens: self.kv_demand_tokens(),
            cached_tokens: u64::from(self.load.kv_blocks_cached) * u64::from(self.hello.description.block_tokens),
        }
    }

    /// KV held by requests, and what is known to come.
    pub fn kv_demand_tokens(&self) -> u64 {
        self.reported_kv_tokens + self.unreported.kv_tokens
    }

    /// Whether it may have this ask when there is room.
    pub fn can_ever_run(&self, ask: &Ask) -> bool {
        self.ready()
            && ask.prompt_tokens <= self.max_prompt_tokens
            && !ask.avoid_instances.contains(&self.hello.instance_id)
    }

    /// Whether there is room for this ask now. Who has nothing to do has room for anything.
    pub fn has_room(&self, ask: &Ask) -> bool {
        if self.held.is_empty() && self.promised == Room::NONE {
            return true;
        }
        if self.held.choices + self.promised.choices + u64::from(ask.choices) > self.limit {
            return false;
        }
        self.has_kv(kv_tokens(ask))
    }

    /// Whether so much KV more is there.
    pub fn has_kv(&self, tokens: u64) -> bool {
        self.kv_tokens_total == 0 || self.kv_demand_tokens() + self.promised.kv_tokens + tokens <= self.kv_tokens_total
    }

    /// What follows from description and report; kept, because placement asks for it all the time.
    fn derive(&mut self, queue_factor: f64) {
        let (described, load) = (&self.hello.description, &self.load);
        let block_tokens = u64::from(described.block_tokens.max(1));
        self.slots = if load.slots > 0 { load.slots } else { described.slots }.max(1);
        self.limit = ((f64::from(self.slots) * queue_factor) as u64).max(1);
        let blocks = if load.kv_blocks_total > 0 {
            load.kv_blocks_total
        } else {
            described.kv_blocks
        };
        self.kv_tokens_total = u64::from(blocks) * block_tokens;
        let bounds = [u64::from(described.context_tokens), self.kv_tokens_total];
        let bound = bounds
            .into_iter()
            .filter(|&bound| bound > 0)
            .min()
            .unwrap_or(u64::from(u32::MAX));
        self.max_prompt_tokens = (bound - 1).min(u64::from(u32::MAX)) as u32;
        self.reported_prompt_tokens = load.waiting_prompt_tokens + load.running_prompt_tokens;
        self.reported_kv_tokens = u64::from(load.kv_blocks_used) * block_tokens + self.reported_prompt_tokens;
    }
}

/// Things by a key, least first; those of equal keys form a bucket, in no order.
#[derive(Debug)]
pub struct Order<K> {
    buckets: BTreeMap<K, Vec<Link>>,
    at: Map<Link, (K, usize)>,
}

impl<K> Default for Order<K> {
    fn default() -> Self {
        Self {
            buckets: BTreeMap::new(),
            at: Map::default(),
        }
    }
}

impl<K: Ord + Copy> Order<K> {
    /// How many are in.
    pub fn len(&self) -> usize {
        self.at.len()
    }

    /// Whether nobody is in.
    pub fn is_empty(&self) -> bool {
        self.at.is_empty()
    }

    /// Whether that one is in.
    pub fn contains(&self, link: Link) -> bool {
        self.at.contains_key(&link)
    }

    /// Puts one in, or moves it.
    pub fn put(&mut self, link: Link, key: K) {
        if self.at.get(&link).is_some_and(|&(at, _)| at == key) {
            return;
        }
        self.remove(link);
        let bucket = self.buckets.entry(key).or_default();
        self.at.insert(link, (key, bucket.len()));
        bucket.push(link);
    }

    /// Takes one out, if it is in.
    pub fn remove(&mut self, link: Link) {
        let Some((key, index)) = self.at.remove(&link) else {
            return;
        };
        let Some(bucket) = self.buckets.get_mut(&key) else {
            return;
        };
        bucket.swap_remove(index);
        if let Some(&moved) = bucket.get(index) {
            self.at.insert(moved, (key, index));
        }
        if bucket.is_empty() {
            self.buckets.remove(&key);
        }
    }

    /// Everybody.
    pub fn links(&self) -> impl Iterator<Item = Link> + '_ {
        self.buckets.values().flatten().copied()
    }
}

/// Starting anywhere, all of a bucket.
fn by_lot<'a>(bucket: &'a [Link], rng: &mut dyn RngCore) -> impl Iterator<Item = Link> + 'a {
    let start = if bucket.len() > 1 {
        rng.random_range(0..bucket.len())
    } else {
        0
    };
    bucket[start..].iter().chain(&bucket[..start]).copied()
}

/// The workers that serve one variant.
#[derive(Debug)]
pub struct Pool {
    /// Its name.
    pub name: Arc<str>,
    /// What all its workers agree on.
    identity: Identity,
    /// All of them, by their streams.
    pub workers: BTreeSet<Link>,
    /// Those that are ready.
    pub ready: BTreeSet<Link>,
    /// Those that can take something, by kind and pace: so their predictions differ by nothing but what they hold.
    orders: BTreeMap<(KindId, Pace), Order<(u64, Key)>>,
    /// In which of these each is.
    at: Map<Link, (KindId, Pace)>,
    /// The longest prompt that a ready worker can serve.
    pub max_prompt_tokens: u32,
    /// How many ready workers serve prompts up to that length.
    serve: BTreeMap<u32, usize>,
}

/// What must be the same for all workers of a pool, or one request could have two answers.
#[derive(Debug, Clone, PartialEq)]
struct Identity {
    model: Arc<str>,
    weights_sha256: Arc<str>,
    quantization: Arc<str>,
    tokenizer_sha256: Arc<str>,
    template_sha256: Arc<str>,
    vocab_size: u32,
    eos_ids: Vec<u32>,
    /// Routers hash a prompt's blocks once for the whole pool.
    block_tokens: u32,
}

impl Identity {
    fn of(described: &Description) -> Self {
        Self {
            model: described.model.clone(),
            weights_sha256: described.weights_sha256.clone(),
            quantization: described.quantization.clone(),
            tokenizer_sha256: described.tokenizer_sha256.clone(),
            template_sha256: described.template_sha256.clone(),
            vocab_size: described.vocab_size,
            eos_ids: described.eos_ids.clone(),
            block_tokens: described.block_tokens,
        }
    }

    /// How another contradicts, for people; empty = it does not.
    fn difference(&self, other: &Self) -> String {
        let mut found = Vec::new();
        let mut texts = |name: &str, ours: &str, theirs: &str| {
            if ours != theirs {
                found.push(format!("{name} '{theirs}' where the pool has '{ours}'"));
            }
        };
        texts("model", &self.model, &other.model);
        texts("weights_sha256", &self.weights_sha256, &other.weights_sha256);
        texts("quantization", &self.quantization, &other.quantization);
        texts("tokenizer_sha256", &self.tokenizer_sha256, &other.tokenizer_sha256);
        texts("template_sha256", &self.template_sha256, &other.template_sha256);
        texts(
            "vocab_size",
            &self.vocab_size.to_string(),
            &other.vocab_size.to_string(),
        );
        texts(
            "eos_ids",
            &format!("{:?}", self.eos_ids),
            &format!("{:?}", other.eos_ids),
        );
        texts(
            "block_tokens",
            &self.block_tokens.to_string(),
            &other.block_tokens.to_string(),
        );
        found.join("; ")
    }
}

/// What routers are told of a pool.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolView {
    /// Its name.
    pub name: Arc<str>,
    /// What it serves: a request that fits one worker is welcome; a capability is everyone's, because any may be chosen.
    pub description: Description,
    /// Workers that take new requests.
    pub ready_workers: usize,
    /// All.
    pub workers: usize,
    /// Of those that are ready.
    pub addresses: Vec<Arc<str>>,
}

/// All workers and all leases.
#[derive(Debug)]
pub struct Fleet {
    /// By name.
    pub pools: BTreeMap<Arc<str>, Pool>,
    /// By their streams.
    pub workers: BTreeMap<Link, Worker>,
    /// By number.
    pub leases: Map<LeaseId, Lease>,
    /// Routers must be told.
    pub changed: bool,
    /// Moves with each change that routers must be told of.
    pub version: u64,
    /// What work costs.
    pub kinds: Kinds,
    /// Workers that were looked at, over all searches.
    pub looked_at: u64,
    index: PrefixIndex,
    /// Workers by their numbers in the index.
    numbers: Map<u32, Link>,
    last_number: u32,
    instances: Map<Arc<str>, Link>,
    queue_factor: f64,
    overlaps: Vec<Overlap>,
    /// Leases announced for instances that have not joined (yet): a scheduler that comes back hears from routers and workers
    /// in any order.
    unjoined: Map<Arc<str>, BTreeSet<LeaseId>>,
}

impl Fleet {
    pub(super) fn new(queue_factor: f64) -> Self {
        Self {
            pools: BTreeMap::new(),
            workers: BTreeMap::new(),
            leases: Map::default(),
            changed: false,
            version: 0,
            kinds: Kinds::default(),
            looked_at: 0,
            index: PrefixIndex::default(),
            numbers: Map::default(),
            last_number: 0,
            instances: Map::default(),
            queue_factor,
            overlaps: Vec::new(),
            unjoined: Map::default(),
        }
    }

    /// The worker of that instance, if it is here.
    pub fn instance(&self, instance_id: &str) -> Option<&Worker> {
        self.workers.get(self.instances.get(instance_id)?)
    }

    /// Takes in a worker whose description fits its pool's.
    pub(super) fn join(&mut self, now_s: f64, link: Link, hello: WorkerHello) {
        let kind = self.kinds.of(&hello.description);
        self.last_number = self.last_number.wrapping_add(1);
        self.numbers.insert(self.last_number, link);
        let mut worker = Worker::new(link, hello, now_s, self.queue_factor, self.last_number, kind);
        let waiting = self.unjoined.remove(&worker.hello.instance_id).unwrap_or_default();
        for lease in waiting.iter().filter_map(|id| self.leases.get(id)) {
            worker.held.add(lease);
            worker.unreported.add(lease);
        }
        let hello = &worker.hello;
        self.instances.insert(hello.instance_id.clone(), link);
        let pool = self.pools.entry(hello.pool.clone()).or_insert_with(|| Pool {
            name: hello.pool.clone(),
            identity: Identity::of(&hello.description),
            workers: BTreeSet::new(),
            ready: BTreeSet::new(),
            orders: BTreeMap::new(),
            at: Map::default(),
            max_prompt_tokens: 0,
            serve: BTreeMap::new(),
        });
        pool.workers.insert(link);
        self.workers.insert(link, worker);
        self.touch();
    }

    /// How a worker's description differs from its pool's; empty = it fits.
    pub(super) fn contradiction(&self, hello: &WorkerHello) -> String {
        self.pools
            .get(&hello.pool)
            .map(|pool| pool.identity.difference(&Identity::of(&hello.description)))
            .unwrap_or_default()
    }

    /// The instances that say they listen there. Joins are rare, so going through all is fine.
    pub(super) fn at_address(&self, address: &str) -> Vec<Link> {
        self.workers
            .values()
            .filter(|worker| &*worker.hello.address == address)
            .map(|worker| worker.link)
            .collect()
    }

    /// The worker is gone, and its leases with it; returns both.
    pub(super) fn remove(&mut self, link: Link) -> Option<(Worker, Vec<Lease>)> {
        let mut worker = self.workers.remove(&link)?;
        self.instances.remove(&worker.hello.instance_id);
        self.kinds.leave(worker.kind);
        self.numbers.remove(&worker.number);
        self.index.clear(worker.number);
        worker.load.state = WorkerState::Unhealthy;
        if let Some(pool) = self.pools.get_mut(&worker.hello.pool) {
            pool.leave_order(link);
            pool.workers.remove(&link);
            pool.refresh_ready(&mut worker);
            if pool.workers.is_empty() {
                self.pools.remove(&worker.hello.pool);
            }
        }
        let ids: Vec<_> = worker
            .held
            .ids()
            .chain(worker.aside.iter().map(|&(_, id)| id))
            .collect();
        let leases = ids.into_iter().filter_map(|id| self.leases.remove(&id)).collect();
        self.touch();
        Some((worker, leases))
    }

    /// Takes in a report; true when what the pool can serve changed. What was granted up to `lag_s` ago may not be in it.
    pub(super) fn report(&mut self, now_s: f64, link: Link, load: Load, lag_s: f64) -> bool {
        let Some(worker) = self.workers.get_mut(&link) else {
            return false;
        };
        self.kinds.observe(worker.kind, &mut worker.drift, &load.steps);
        worker.pace = worker.drift.pace;
        worker.load = load;
        worker.load.steps = Vec::new();
        worker.heard_s = now_s;
        worker.derive(self.queue_factor);
        while let Some((granted_s, id)) = worker.unreported.oldest() {
            if granted_s >= now_s - lag_s {
                break;
            }
            let Some(lease) = self.leases.get(&id) else {
                break;
            };
            worker.unreported.discard(lease);
        }
        worker.believe_prompts(now_s, &self.kinds, &mut self.leases);
        let Some(pool) = self.pools.get_mut(&worker.hello.pool) else {
            return false;
        };
        pool.reorder(worker);
        let changed = pool.refresh_ready(worker);
        if changed {
            self.touch();
        }
        changed
    }

    /// A lease begins, now.
    pub(super) fn hold(&mut self, now_s: f64, lease: Lease) {
        match self.instances.get(&lease.instance_id) {
            None => {
                self.unjoined
                    .entry(lease.instance_id.clone())
                    .or_default()
                    .insert(lease.id);
            }
            Some(&link) => {
                if let Some(worker) = self.workers.get_mut(&link) {
                    worker.held.add(&lease);
                    worker.unreported.add(&lease);
                    if lease.phase == Phase::Prefill {
                        worker.prefilling.insert(lease.id);
                        worker.prefilling_ms += lease.prefill_ms;
                        worker.add_prefill(now_s, lease.prefill_ms);
                    }
                }
                self.reorder(link);
            }
        }
        self.leases.insert(lease.id, lease);
    }

    /// The prompt of a lease has been computed, or so many tokens have been said; returns its worker when that is news.
    pub(super) fn progress(&mut self, now_s: f64, id: LeaseId, output_tokens: u32) -> Option<Link> {
        let lease = self.leases.get_mut(&id)?;
        lease.output_tokens = lease.output_tokens.max(output_tokens);
        if lease.phase != Phase::Prefill {
            return None;
        }
        lease.phase = Phase::Decode;
        let prefill_ms = lease.prefill_ms;
        let link = *self.instances.get(&lease.instance_id)?;
        let worker = self.workers.get_mut(&link)?;
        if worker.prefilling.remove(&id) {
            worker.prefilling_ms -= prefill_ms;
            worker.bound_prefill(now_s);
        }
        self.reorder(link);
        Some(link)
    }

    /// An ask waits here for that worker, or does not any more.
    pub(super) fn plan(&mut self, now_s: f64, link: Link, prefill_ms: f64, waits: bool) {
        let Some(worker) = self.workers.get_mut(&link) else {
            return;
        };
        if waits {
            worker.planned += 1;
            worker.planned_ms += prefill_ms;
            worker.add_prefill(now_s, prefill_ms);
        } else {
            worker.planned -= 1;
            worker.planned_ms -= prefill_ms;
            worker.drop_prefill(now_s, prefill_ms);
        }
        self.reorder(link);
    }

    /// A request is put aside: it holds no slot and no KV.
    pub(super) fn put_aside(&mut self, now_s: f64, id: LeaseId) {
        let Some(lease) = self.leases.get_mut(&id) else {
            return;
        };
        let Some(&link) = self.instances.get(&lease.instance_id) else {
            return;
        };
        let Some(worker) = self.workers.get_mut(&link) else {
            return;
        };
        worker.held.discard(lease);
        worker.unreported.discard(lease);
        lease.phase = Phase::Aside;
        lease.preempted += 1;
        // Until the next report knows.
        worker.reported_kv_tokens = worker.reported_kv_tokens.saturating_sub(lease.kv_tokens);
        worker.aside.insert((Key(now_s), id));
        self.reorder(link);
    }

    /// It goes on: what it had said is computed again with its prompt.
    pub(super) fn go_on(&mut self, now_s: f64, link: Link, id: LeaseId) {
        let (Some(lease), Some(worker)) = (self.leases.get_mut(&id), self.workers.get_mut(&link)) else {
            return;
        };
        worker.aside.retain(|&(_, aside)| aside != id);
        // As if it began now: no report before this one knows of it.
        lease.granted_s = now_s;
        lease.phase = Phase::Prefill;
        lease.prefill_ms =
            self.kinds
                .prefill_ms(worker.kind, worker.pace, lease.prompt_tokens + lease.output_tokens, 0);
        worker.held.add(lease);
        worker.unreported.add(lease);
        worker.prefilling.insert(id);
        worker.prefilling_ms += lease.prefill_ms;
        worker.add_prefill(now_s, lease.prefill_ms);
        self.reorder(link);
    }

    /// A worker's blocks came or went.
    pub(super) fn blocks(&mut self, link: Link, change: BlockChange) {
        let Some(worker) = self.workers.get_mut(&link) else {
            return;
        };
        if !worker.reports_blocks {
            worker.reports_blocks = true;
            worker.believed.clear();
            self.index.clear(worker.number);
        }
        match change {
            BlockChange::Stored(blocks) => self.index.store(worker.number, NO_BLOCK, &blocks),
            BlockChange::Removed(blocks) => self.index.remove(worker.number, &blocks),
            BlockChange::Cleared => self.index.clear(worker.number),
        }
    }

    /// A worker that does not report its blocks is believed to hold those of the prompts that it was given last.
    pub(super) fn believe(&mut self, link: Link, blocks: &[u64]) {
        let Some(worker) = self.workers.get_mut(&link) else {
            return;
        };
        if worker.reports_blocks || worker.hello.description.block_tokens == 0 {
            return;
        }
        let total = worker.kv_tokens_total / u64::from(worker.hello.description.block_tokens);
        let most = if total == 0 {
            BELIEVED_BLOCKS
        } else {
            (total as usize).min(BELIEVED_BLOCKS)
        };
        for &block in blocks.iter().take(most) {
            if self.index.holds(worker.number, block) {
                continue;
            }
            self.index.store(worker.number, NO_BLOCK, &[block]);
            worker.believed.push_back(block);
            if worker.believed.len() > most {
                if let Some(oldest) = worker.believed.pop_front() {
                    self.index.remove(worker.number, &[oldest]);
                }
            }
        }
    }

    /// A lease ends; returns it, and the worker that has more room now.
    pub(super) fn free(&mut self, now_s: f64, id: LeaseId) -> Option<(Lease, Option<Link>)> {
        let lease = self.leases.remove(&id)?;
        let Some(&link) = self.instances.get(&lease.instance_id) else {
            if let Some(ids) = self.unjoined.get_mut(&lease.instance_id) {
                ids.remove(&id);
                if ids.is_empty() {
                    self.unjoined.remove(&lease.instance_id);
                }
            }
            return Some((lease, None));
        };
        if let Some(worker) = self.workers.get_mut(&link) {
            worker.held.discard(&lease);
            worker.unreported.discard(&lease);
            if worker.prefilling.remove(&id) {
                worker.prefilling_ms -= lease.prefill_ms;
                worker.drop_prefill(now_s, lease.prefill_ms);
            }
            if lease.phase == Phase::Aside {
                worker.aside.retain(|&(_, aside)| aside != id);
            }
        }
        self.reorder(link);
        Some((lease, Some(link)))
    }

    /// So much of a worker is promised now.
    pub(super) fn promise(&mut self, link: Link, promised: Room) {
        if let Some(worker) = self.workers.get_mut(&link) {
            worker.promised = promised;
            self.reorder(link);
        }
    }

    /// Puts a worker where it belongs in its pool's order after any change to it.
    pub(super) fn reorder(&mut self, link: Link) {
        if let Some(worker) = self.workers.get(&link) {
            if let Some(pool) = self.pools.get_mut(&worker.hello.pool) {
                pool.reorder(worker);
            }
        }
    }

    /// Whether some ready worker of that pool may have this ask when there is room.
    pub fn can_ever_run(&self, pool: &Pool, ask: &Ask) -> bool {
        if ask.avoid_instances.is_empty() {
            return !pool.ready.is_empty() && ask.prompt_tokens <= pool.max_prompt_tokens;
        }
        pool.ready
            .iter()
            .filter_map(|link| self.workers.get(link))
            .any(|worker| worker.can_ever_run(ask))
    }

    /// The worker of that pool to run this, by the rule; it has room, if perhaps not yet time.
    pub(super) fn choose(
        &mut self,
        now_s: f64,
        pool: &str,
        ask: &Ask,
        placer: &mut Placer,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let mut overlaps = std::mem::take(&mut self.overlaps);
        overlaps.clear();
        self.index.overlap(&ask.block_hashes, &mut overlaps);
        let search = Search {
            fleet: self,
            pool: self.pools.get(pool)?,
            now_s,
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

    /// That worker as a choice for this ask, and its score by the rule.
    pub(super) fn consider(&self, now_s: f64, link: Link, ask: &Ask, placer: &Placer) -> Option<(Choice, f64)> {
        let worker = self.workers.get(&link)?;
        let hit_tokens = worker.hit_tokens(ask, self.index.leading(worker.number, &ask.block_hashes));
        let candidate = worker.candidate(now_s, &self.kinds, ask, hit_tokens);
        let request = self.kinds.request(worker.kind, worker.pace, ask);
        Some((choice(link, &candidate), placer.score(&request, &candidate)))
    }

    /// The soonest that an idle worker of the pool would have the first token of this; None when nobody can say.
    pub(super) fn soonest_first_token_s(&self, pool: &Pool, ask: &Ask) -> Option<f64> {
        let mut overlaps = Vec::new();
        self.index.overlap(&ask.block_hashes, &mut overlaps);
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

    /// What routers are told.
    pub fn view(&self) -> Vec<PoolView> {
        self.pools.values().map(|pool| self.pool_view(pool)).collect()
    }

    fn pool_view(&self, pool: &Pool) -> PoolView {
        let of = |links: &BTreeSet<Link>| {
            links
                .iter()
                .filter_map(|link| self.workers.get(link))
                .collect::<Vec<_>>()
        };
        let all = of(&pool.workers);
        let described = all.iter().map(|worker| &worker.hello.description);
        let mut description = all
            .first()
            .map(|worker| worker.hello.description.clone())
            .unwrap_or_default();
        description.context_tokens = described.clone().map(|each| each.context_tokens).max().unwrap_or(0);
        description.capabilities = common(&described.map(|each| &each.capabilities).collect::<Vec<_>>());
        PoolView {
            name: pool.name.clone(),
            description,
            ready_workers: pool.ready.len(),
            workers: pool.workers.len(),
            addresses: of(&pool.ready)
                .iter()
                .map(|worker| worker.hello.address.clone())
                .collect(),
        }
    }

    fn touch(&mut self) {
        self.changed = true;
        self.version += 1;
    }
}

fn choice(link: Link, candidate: &Candidate) -> Choice {
    Choice {
        link,
        hit_tokens: candidate.hit_tokens,
        prefill_ms: candidate.prefill_ms,
        pending_ms: candidate.pending_prefill_ms,
    }
}

/// A search for a worker.
struct Search<'a> {
    fleet: &'a Fleet,
    pool: &'a Pool,
    now_s: f64,
    ask: &'a Ask,
    looked_at: Cell<u64>,
}

impl<'a> Search<'a> {
    fn fitting(&self, link: Link) -> Option<&'a Worker> {
        self.looked_at.set(self.looked_at.get() + 1);
        let worker = self.fleet.workers.get(&link)?;
        (worker.open() && worker.can_ever_run(self.ask) && worker.has_room(self.ask)).then_some(worker)
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
        let mut best: Option<(f64, Choice)> = None;
        let mut consider = |worker: &Worker, blocks: u32| {
            let hit_tokens = worker.hit_tokens(self.ask, blocks);
            let candidate = worker.candidate(self.now_s, kinds, self.ask, hit_tokens);
            let score = placer.score(&kinds.request(worker.kind, worker.pace, self.ask), &candidate);
            if best.as_ref().is_none_or(|(least, _)| score < *least) {
                best = Some((score, choice(worker.link, &candidate)));
            }
            best.as_ref().map_or(f64::INFINITY, |(least, _)| *least)
        };
        let mut least = f64::INFINITY;
        for overlap in &overlaps[..first] {
            let link = self.fleet.numbers.get(&overlap.worker).copied();
            let in_pool = link.filter(|link| self.pool.workers.contains(link));
            if let Some(worker) = in_pool.and_then(|link| self.fitting(link)) {
                least = consider(worker, overlap.blocks);
            }
        }
        // Nobody else holds more than that much, so nobody else's delay is less than it would be with it.
        let mut looked_at = 0;
        for (&(kind, pace), order) in &self.pool.orders {
            let request = kinds.request(kind, pace, self.ask);
            let most_hit = (left_blocks * kinds.block_tokens(kind)).min(self.ask.prompt_tokens.saturating_sub(1));
            let least_work_ms = kinds.prefill_ms(kind, pace, self.ask.prompt_tokens - most_hit, most_hit);
            let bound = |factor: u64, pending_prefill_ms: f64| {
                let like = Candidate {
                    pending_prefill_ms,
                    prefill_ms: least_work_ms,
                    decoding: (factor - 1).min(u64::from(u32::MAX)) as u32,
                    ..Candidate::default()
                };
                placer.score(&request, &like)
            };
            let mut from = Bound::Unbounded;
            // One factor after the other, from the least; within it from the least work that waits.
            'factors: while let Some((&(factor, _), _)) = order.buckets.range((from, Bound::Unbounded)).next() {
                if bound(factor, 0.0) >= least {
                    break;
                }
                for (&(at, idle_at), bucket) in order.buckets.range((from, Bound::Unbounded)) {
                    let pending_ms = ((idle_at.0 - self.now_s) * 1e3).max(0.0);
                    if at != factor || bound(factor, pending_ms) >= least {
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
                                self.fleet.index.leading(worker.number, &self.ask.block_hashes)
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
            worker.candidate(self.now_s, &self.fleet.kinds, self.ask, hit_tokens)
        };
        let candidates: Vec<Candidate> = fitting.iter().map(candidate).collect();
        let first = fitting.first()?;
        let request: Request = self.fleet.kinds.request(first.kind, first.pace, self.ask);
        let chosen = placer.choose(&request, &candidates, rng)?;
        Some(choice(fitting[chosen].link, &candidates[chosen]))
    }
}

impl Worker {
    /// Prompt tokens that it need not compute, when it holds so many leading blocks.
    fn hit_tokens(&self, ask: &Ask, blocks: u32) -> u32 {
        (blocks * self.hello.description.block_tokens).min(ask.prompt_tokens.saturating_sub(1))
    }

    /// What the last report says of prompts that wait, and what cannot be in it yet.
    fn believe_prompts(&mut self, now_s: f64, kinds: &Kinds, leases: &mut Map<LeaseId, Lease>) {
        if self.reported_prompt_tokens == 0 && self.load.waiting_requests == 0 && !self.prefilling.is_empty() {
            // Their routers have not said so (yet).
            for id in self.prefilling.clone() {
                if let Some(lease) = leases.get_mut(&id).filter(|lease| !self.unreported.contains(lease)) {
                    lease.phase = Phase::Decode;
                    self.prefilling.remove(&id);
                    self.prefilling_ms -= lease.prefill_ms;
                }
            }
        }
        let prefilling = self.prefilling.iter().filter_map(|id| leases.get(id));
        let unreported = prefilling.filter(|lease| self.unreported.contains(lease));
        let unreported_ms: f64 = unreported.map(|lease| lease.prefill_ms).sum();
        let tokens = self.reported_prompt_tokens.min(u64::from(u32::MAX)) as u32;
        let reported_ms = kinds.prefill_ms(self.kind, self.pace, tokens.min(BLOCK_TOKENS), 0)
            * (f64::from(tokens) / f64::from(BLOCK_TOKENS)).max(1.0);
        self.idle_at_s = now_s + (reported_ms + unreported_ms + self.planned_ms) / 1e3;
        self.bound_prefill(now_s);
    }
}

impl Pool {
    /// Workers that can take something, as far as leases go.
    pub fn open_workers(&self) -> usize {
        self.at.len()
    }

    /// Whether that one can.
    pub fn is_open(&self, link: Link) -> bool {
        self.at.contains_key(&link)
    }

    fn reorder(&mut self, worker: &Worker) {
        let (link, group) = (worker.link, (worker.kind, worker.pace));
        if self.at.get(&link).is_some_and(|at| *at != group) || !worker.open() {
            self.leave_order(link);
        }
        if worker.open() {
            self.at.insert(link, group);
            self.orders.entry(group).or_default().put(link, worker.standing());
        }
    }

    fn leave_order(&mut self, link: Link) {
        if let Some(group) = self.at.remove(&link) {
            if let Some(order) = self.orders.get_mut(&group) {
                order.remove(link);
                if order.is_empty() {
                    self.orders.remove(&group);
                }
            }
        }
    }

    /// Notes what a worker can serve; true when it is another thing than before.
    fn refresh_ready(&mut self, worker: &mut Worker) -> bool {
        let serves = worker.ready().then_some(worker.max_prompt_tokens);
        // Almost every report changes nothing.
        if serves == worker.serves_prompt_tokens {
            return false;
        }
        if let Some(before) = worker.serves_prompt_tokens {
            self.ready.remove(&worker.link);
            if let Some(count) = self.serve.get_mut(&before) {
                *count -= 1;
                if *count == 0 {
                    self.serve.remove(&before);
                }
            }
        }
        if let Some(now) = serves {
            self.ready.insert(worker.link);
            *self.serve.entry(now).or_default() += 1;
        }
        worker.serves_prompt_tokens = serves;
        self.max_prompt_tokens = self.serve.last_key_value().map_or(0, |(&tokens, _)| tokens);
        true
    }
}

fn common(all: &[&Capabilities]) -> Capabilities {
    let Some((first, rest)) = all.split_first() else {
        return Capabilities::default();
    };
    let mut shared = (*first).clone();
    for each in rest {
        shared.guided.retain(|kind| each.guided.contains(kind));
        shared.lora.retain(|name| each.lora.contains(name));
        shared.logprobs &= each.logprobs;
        shared.prompt_logprobs &= each.prompt_logprobs;
        shared.kv_handoff &= each.kv_handoff;
        shared.batch_invariant &= each.batch_invariant;
    }
    shared
}

#[cfg(test)]
impl Fleet {
    /// What holds after every step.
    pub(super) fn check(&self) {
        let mut held = 0;
        for worker in self.workers.values() {
            let sum = |part: &Held| {
                let leases = part.ids().map(|id| &self.leases[&id]);
                leases.fold((0, 0, 0), |(choices, prompt, kv), lease| {
                    (
                        choices + u64::from(lease.choices),
                        prompt + u64::from(lease.prompt_tokens),
                        kv + lease.kv_tokens,
                    )
                })
            };
            for part in [&worker.held, &worker.unreported] {
                assert_eq!(
                    (part.choices, part.prompt_tokens, part.kv_tokens),
                    sum(part),
                    "sums are of what is in the set"
                );
            }
            assert!(worker.unreported.leases.is_subset(&worker.held.leases));
            held += worker.held.len() + worker.aside.len();
            let prefilling: Vec<_> = worker
                .held
                .ids()
                .filter(|id| self.leases[id].phase == Phase::Prefill)
                .collect();
            assert!(worker.prefilling.iter().all(|id| prefilling.contains(id)));
            assert_eq!(worker.prefilling.len(), prefilling.len());
            assert!(worker.aside.iter().all(|(_, id)| self.leases[id].phase == Phase::Aside));
            let sum: f64 = prefilling.iter().map(|id| self.leases[id].prefill_ms).sum();
            assert!(
                (worker.prefilling_ms - sum).abs() < 1e-3 * (1.0 + sum),
                "{} {sum}",
                worker.prefilling_ms
            );
            let pool = &self.pools[&worker.hello.pool];
            assert!(pool.workers.contains(&worker.link));
            assert_eq!(
                pool.is_open(worker.link),
                worker.open(),
                "in the order is who can take something"
            );
            assert_eq!(pool.ready.contains(&worker.link), worker.ready());
            assert_eq!(self.instances.get(&worker.hello.instance_id), Some(&worker.link));
            for id in worker.held.ids() {
                assert_eq!(self.leases[&id].instance_id, worker.hello.instance_id);
            }
        }
        let unjoined: usize = self.unjoined.values().map(BTreeSet::len).sum();
        assert_eq!(held + unjoined, self.leases.len(), "each lease is held once");
        let in_pools: usize = self.pools.values().map(|pool| pool.workers.len()).sum();
        assert_eq!(in_pools, self.workers.len());
        assert!(self
            .pools
            .values()
            .all(|pool| !pool.workers.is_empty() && pool.open_workers() <= pool.ready.len()));
    }

    /// Nothing is left of leases.
    pub(super) fn check_empty(&self) {
        assert!(self.leases.is_empty() && self.unjoined.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(max_tokens: u32, expected_output_tokens: u32, choices: u32) -> Ask {
        Ask {
            prompt_tokens: 100,
            max_tokens,
            expected_output_tokens,
            choices,
            ..Ask::default()
        }
    }

    #[test]
    fn the_kv_of_an_answer_is_what_is_expected_within_its_limit() {
        assert_eq!(kv_tokens(&ask(16, 0, 1)), 116);
        assert_eq!(kv_tokens(&ask(5000, 0, 1)), 100 + u64::from(ANSWER_KV_TOKENS));
        assert_eq!(kv_tokens(&ask(5000, 300, 2)), 700);
        assert_eq!(kv_tokens(&ask(0, 300, 1)), 400);
    }
}
