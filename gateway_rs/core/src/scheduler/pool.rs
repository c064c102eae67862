//! The workers that serve one variant: what they agree on, who of them takes something, and in which order of delay.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rand::{Rng, RngCore};

use super::{
    events::{Ask, Capabilities, Class, Description, Link},
    kinds::{KindId, Pace},
    map::{Key, Map},
    worker::Worker,
};

/// Of a pool's slots one in so many may be held by requests that have waited too long to be passed over once more. Without a
/// bound all of a backlog is of that kind after a minute; with one, the oldest always gets on.
const STAYING_PART: u64 = 16;

/// So many of these slots, at least one. Workers keep to it, too.
#[must_use]
pub fn slots_to_stay(slots: u64) -> u64 {
    (slots / STAYING_PART).max(1)
}

/// Things by a key, least first; those of equal keys form a bucket, in no order.
#[derive(Debug)]
pub struct Order<K> {
    pub(super) buckets: BTreeMap<K, Vec<Link>>,
    pub(super) at: Map<Link, (K, usize)>,
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

    /// The least key.
    pub fn first(&self) -> Option<K> {
        self.buckets.keys().next().copied()
    }

    /// Everybody.
    pub fn links(&self) -> impl Iterator<Item = Link> + '_ {
        self.buckets.values().flatten().copied()
    }
}

/// Workers that can take something, least delayed first: for batch work, and for those before whom it stands back, also by
/// giving them its slots.
#[derive(Debug, Default)]
pub(super) struct Orders {
    batch: Order<(u64, Key)>,
    others: Order<(u64, Key)>,
}

impl Orders {
    /// For somebody of that class.
    pub fn of(&self, class: Class) -> &Order<(u64, Key)> {
        if class == Class::Batch {
            &self.batch
        } else {
            &self.others
        }
    }

    fn put(&mut self, link: Link, worker: &Worker) {
        if worker.open() {
            self.batch.put(link, worker.standing(Class::Batch));
        } else {
            self.batch.remove(link);
        }
        self.others.put(link, worker.standing(Class::Interactive));
    }

    fn remove(&mut self, link: Link) {
        self.batch.remove(link);
        self.others.remove(link);
    }

    fn is_empty(&self) -> bool {
        self.others.is_empty()
    }
}

/// Starting anywhere, all of a bucket.
pub(super) fn by_lot<'a>(bucket: &'a [Link], rng: &mut dyn RngCore) -> impl Iterator<Item = Link> + 'a {
    let start = if bucket.len() > 1 {
        rng.random_range(0..bucket.len())
    } else {
        0
    };
    bucket[start..].iter().chain(&bucket[..start]).copied()
}
/// Workers whose predictions differ by nothing but what they hold: for prompts only, kind, pace.
pub(super) type Group = (bool, KindId, Pace);

/// What a worker is sought for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// A whole request, or its answer.
    Answer,
    /// A prompt whose answer is another's.
    Prompt,
}

/// The workers that serve one variant.
#[derive(Debug)]
pub struct Pool {
    /// Its name.
    pub name: Arc<str>,
    /// What all its workers agree on.
    pub(super) identity: Identity,
    /// All of them, by their streams.
    pub workers: BTreeSet<Link>,
    /// Those that are ready.
    pub ready: BTreeSet<Link>,
    /// Those that can take something.
    pub(super) orders: BTreeMap<Group, Orders>,
    /// In which of these each is.
    pub(super) at: Map<Link, Group>,
    /// Those that run batch requests, by the slots that others take or would have to wait for, less those that there are;
    /// the first to join first among equals.
    pub(super) makes_way: Order<(i64, Link)>,
    /// Batch requests give way to interactive ones.
    pub(super) preempt: bool,
    /// Slots of those that are ready.
    pub(super) slots: u64,
    /// Leases that give way to nobody though their class would.
    pub(super) staying: u64,
    /// The longest prompt that a ready worker can serve.
    pub max_prompt_tokens: u32,
    /// How many ready workers serve prompts up to that length; and of those that are for prompts only.
    pub(super) serve: BTreeMap<u32, usize>,
    pub(super) serve_prompts: BTreeMap<u32, usize>,
}

/// What must be the same for all workers of a pool, or one request could have two answers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Identity {
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
    pub(super) fn of(described: &Description) -> Self {
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
    pub(super) fn difference(&self, other: &Self) -> String {
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
impl Pool {
    /// Whether somebody ready is there for prompts only.
    pub fn has_prefill(&self) -> bool {
        !self.serve_prompts.is_empty()
    }

    /// Whether nobody ready is there for answers: then those for prompts do all.
    pub fn lacks_answerers(&self) -> bool {
        self.serve.is_empty()
    }

    /// Whether that worker is one of those that are sought.
    pub(super) fn suits(&self, part: Part, prompts_only: bool, ask: &Ask) -> bool {
        match part {
            Part::Prompt => prompts_only,
            // Nor does it matter what a worker is for when others have just failed.
            Part::Answer => !prompts_only || self.lacks_answerers() || !ask.avoid_instances.is_empty(),
        }
    }

    pub(super) fn reorder(&mut self, worker: &Worker) {
        let (link, group) = (worker.link, (worker.prompts_only(), worker.kind, worker.pace));
        let takes = worker.open() || self.preempt && worker.could_make_way(1);
        if self.at.get(&link).is_some_and(|at| *at != group) || !takes {
            self.leave_order(link);
        }
        if takes {
            self.at.insert(link, group);
            self.orders.entry(group).or_default().put(link, worker);
        }
        if worker.ready() && worker.held.batch() > 0 {
            self.makes_way.put(link, (worker.taken_by_others(), link));
        } else {
            self.makes_way.remove(link);
        }
    }

    /// How many more may have waited so long that nobody goes before them.
    pub(super) fn more_may_stay(&self) -> u64 {
        slots_to_stay(self.slots).saturating_sub(self.staying)
    }

    /// Whether a worker has slots for this ask, or has batch requests that could give it theirs.
    pub(super) fn has_slots(&self, worker: &Worker, ask: &Ask) -> bool {
        let may_push = self.preempt && ask.class == Class::Interactive;
        if may_push && worker.could_make_way(ask.choices) {
            return true;
        }
        worker.open() && worker.has_slots(ask) && !(may_push && self.crowds(worker, ask))
    }

    /// Whether this interactive ask would wait at that worker for others like it, while one has only batch requests to push
    /// out of their slots.
    fn crowds(&self, worker: &Worker, ask: &Ask) -> bool {
        let choices = i64::from(ask.choices);
        let fits = |taken: i64| taken + choices <= 0;
        !fits(worker.taken_by_others()) && self.makes_way.first().is_some_and(|(taken, _)| fits(taken))
    }

    pub(super) fn leave_order(&mut self, link: Link) {
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
    pub(super) fn refresh_ready(&mut self, worker: &mut Worker) -> bool {
        let slots = if worker.ready() { u64::from(worker.slots) } else { 0 };
        self.slots = self.slots + slots - worker.counted_slots;
        worker.counted_slots = slots;
        let serves = worker.ready().then_some(worker.max_prompt_tokens);
        let counts = if worker.prompts_only() {
            &mut self.serve_prompts
        } else {
            &mut self.serve
        };
        // Almost every report changes nothing.
        if serves == worker.serves_prompt_tokens {
            return false;
        }
        if let Some(before) = worker.serves_prompt_tokens {
            self.ready.remove(&worker.link);
            if let Some(count) = counts.get_mut(&before) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(&before);
                }
            }
        }
        if let Some(now) = serves {
            self.ready.insert(worker.link);
            *counts.entry(now).or_default() += 1;
        }
        worker.serves_prompt_tokens = serves;
        let counts = if self.serve.is_empty() {
            &self.serve_prompts
        } else {
            &self.serve
        };
        self.max_prompt_tokens = counts.last_key_value().map_or(0, |(&tokens, _)| tokens);
        true
    }
}
pub(super) fn common(all: &[&Capabilities]) -> Capabilities {
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
