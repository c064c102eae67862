//! What we believe of each worker, and since when.
//!
//! Load is the set of leases held for a worker *instance*, never a number moved by hand: [`Held`] is that set and the only
//! place where its sums are written. A worker that restarts is a new instance with an empty set. What workers report refines
//! the belief (prompts already computed, KV shared between requests) but does not replace it: a report is always a little
//! old.
//!
//! Each pool keeps its workers that can take something now in an [`Order`], least loaded first: finding the best is O(1)
//! when it fits, moving one O(log n). No request scans the fleet. What this module leaves to `core.rs`: whose turn it is,
//! and all answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    sync::Arc,
};

use rand::Rng;

use crate::credits::Room;

use super::{
    events::{Ask, Capabilities, Description, LeaseId, Link, Load, WorkerHello, WorkerState},
    map::{Key, Map},
};

/// A running answer weighs on its batch as much as so many prompt tokens still to be computed. A stand-in for the cost
/// model: with it, requests of like size spread by count and a long prompt counts for several.
pub const ANSWER_WEIGHT_TOKENS: u64 = 64;

/// Differences below this do not decide: what is nearly equal is drawn by lot.
const GRAIN_TOKENS: u64 = 16;

/// KV that an answer is expected to take when nobody says. Optimistic on purpose: a worker that runs out lets its requests
/// wait, while room kept for answers that end early is lost.
pub const ANSWER_KV_TOKENS: u32 = 64;

/// Workers looked at for one ask that does not fit on the better ones. A bound on work, not on luck: whoever is not looked at
/// is asked the other way round at its next report.
const MAX_CANDIDATES: usize = 64;

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
    /// The router's stream, when it placed this by itself.
    pub by_credit: Option<Link>,
}

/// A set of leases and what they add up to.
#[derive(Clone, Debug, Default)]
pub struct Held {
    /// By the time they were granted.
    leases: BTreeSet<(Key, LeaseId)>,
    choices: u64,
    prompt_tokens: u64,
    kv_tokens: u64,
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
        }
    }

    fn discard(&mut self, lease: &Lease) {
        if self.leases.remove(&(Key(lease.granted_s), lease.id)) {
            self.choices -= u64::from(lease.choices);
            self.prompt_tokens -= u64::from(lease.prompt_tokens);
            self.kv_tokens -= lease.kv_tokens;
        }
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
    /// Room that routers may use by themselves and, for all we know, do not yet.
    pub promised: Room,
    /// The one ask that this worker keeps its room for.
    pub reserved_for: Option<u64>,
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
    fn new(link: Link, hello: WorkerHello, now_s: f64, queue_factor: f64) -> Self {
        let mut worker = Self {
            link,
            hello,
            load: Load::default(),
            heard_s: now_s,
            held: Held::default(),
            unreported: Held::default(),
            promised: Room::NONE,
            reserved_for: None,
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

    /// Leased prompt tokens that are still to be computed.
    pub fn pending_prompt_tokens(&self) -> u64 {
        self.held
            .prompt_tokens
            .min(self.reported_prompt_tokens + self.unreported.prompt_tokens)
    }

    /// KV held by requests, and what is known to come.
    pub fn kv_demand_tokens(&self) -> u64 {
        self.reported_kv_tokens + self.unreported.kv_tokens
    }

    /// How loaded it is, to compare workers of one pool. Lower is better; 0 is idle.
    fn pressure(&self) -> f64 {
        let work = self.pending_prompt_tokens() + ANSWER_WEIGHT_TOKENS * self.held.choices;
        (work / GRAIN_TOKENS) as f64 / f64::from(self.slots)
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
        let demand = self.kv_demand_tokens() + self.promised.kv_tokens + kv_tokens(ask);
        self.kv_tokens_total == 0 || demand <= self.kv_tokens_total
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

    /// Least first, among equals starting anywhere.
    pub fn from_least<'a>(&'a self, rng: &'a mut impl Rng) -> impl Iterator<Item = Link> + 'a {
        self.buckets.values().flat_map(move |bucket| {
            let start = if bucket.len() > 1 {
                rng.random_range(0..bucket.len())
            } else {
                0
            };
            bucket[start..].iter().chain(&bucket[..start]).copied()
        })
    }
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
    /// Those that can take something now.
    pub order: Order<Key>,
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
    instances: Map<Arc<str>, Link>,
    queue_factor: f64,
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
            instances: Map::default(),
            queue_factor,
            unjoined: Map::default(),
        }
    }

    /// The worker of that instance, if it is here.
    pub fn instance(&self, instance_id: &str) -> Option<&Worker> {
        self.workers.get(self.instances.get(instance_id)?)
    }

    /// Takes in a worker whose description fits its pool's.
    pub(super) fn join(&mut self, now_s: f64, link: Link, hello: WorkerHello) {
        let mut worker = Worker::new(link, hello, now_s, self.queue_factor);
        let hello = &worker.hello;
        let waiting = self.unjoined.remove(&hello.instance_id).unwrap_or_default();
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
            order: Order::default(),
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
        worker.load.state = WorkerState::Unhealthy;
        if let Some(pool) = self.pools.get_mut(&worker.hello.pool) {
            pool.order.remove(link);
            pool.workers.remove(&link);
            pool.refresh_ready(&mut worker);
            if pool.workers.is_empty() {
                self.pools.remove(&worker.hello.pool);
            }
        }
        let leases = worker.held.ids().filter_map(|id| self.leases.remove(&id)).collect();
        self.touch();
        Some((worker, leases))
    }

    /// Takes in a report; true when what the pool can serve changed. What was granted up to `lag_s` ago may not be in it.
    pub(super) fn report(&mut self, now_s: f64, link: Link, load: Load, lag_s: f64) -> bool {
        let Some(worker) = self.workers.get_mut(&link) else {
            return false;
        };
        worker.load = load;
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

    /// A lease begins.
    pub(super) fn hold(&mut self, lease: Lease) {
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
                }
                self.reorder(link);
            }
        }
        self.leases.insert(lease.id, lease);
    }

    /// A lease ends; returns it, and the worker that has more room now.
    pub(super) fn free(&mut self, id: LeaseId) -> Option<(Lease, Option<Link>)> {
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

    /// The least loaded worker of that pool that can run this now.
    pub fn choose(&self, pool: &Pool, ask: &Ask, rng: &mut impl Rng) -> Option<Link> {
        let fits = |link: &Link| {
            self.workers
                .get(link)
                .is_some_and(|worker| worker.can_ever_run(ask) && worker.has_room(ask))
        };
        let found = pool.order.from_least(rng).take(MAX_CANDIDATES).find(fits);
        found
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

impl Pool {
    fn reorder(&mut self, worker: &Worker) {
        if worker.open() {
            self.order.put(worker.link, Key(worker.pressure()));
        } else {
            self.order.remove(worker.link);
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
            held += worker.held.len();
            let pool = &self.pools[&worker.hello.pool];
            assert!(pool.workers.contains(&worker.link));
            assert_eq!(
                pool.order.contains(worker.link),
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
            .all(|pool| !pool.workers.is_empty() && pool.order.len() <= pool.ready.len()));
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
