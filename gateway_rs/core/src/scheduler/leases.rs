//! Leases: the right to run one request on one worker instance, and sets of them with their sums.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    events::{Ask, Class, LeaseId, Link},
    fair::AccountId,
    lengths::Root,
    map::Key,
    queue::Urgency,
};

/// KV that an answer is expected to take at most, before it is there. Optimistic on purpose: a worker that runs out lets its
/// requests wait, while room kept for answers that end early is lost.
pub const ANSWER_KV_TOKENS: u32 = 64;

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
    /// The [`marks`](crate::index::marks) of what of it the worker did not hold: it will, because of this.
    pub blocks: Vec<u64>,
    /// KV that it is expected to take.
    pub kv_tokens: u64,
    /// When it began, or went on after it was put aside.
    pub granted_s: f64,
    /// When it began first.
    pub first_granted_s: f64,
    /// Whose turn it was.
    pub class: Class,
    /// How far it is.
    pub phase: Phase,
    /// Predicted work of its prompt.
    pub prefill_ms: f64,
    /// Prompt tokens that its worker has to compute for it.
    pub uncached_tokens: u32,
    /// Among prompts at its worker.
    pub urgency: Urgency,
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
    /// Times its answer was put aside.
    pub preempted: u32,
    /// It has waited so long, or was put aside so often, that it gives way to nobody any more.
    pub stays: bool,
    /// The router's stream, when it placed this by itself.
    pub by_credit: Option<Link>,
    /// Its request's entry in the books; 0 = it has none.
    pub booking: u64,
    /// Only the prompt, and the first token: the answer has a lease of its own elsewhere.
    pub prompt_only: bool,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Its prompt waits or is being computed.
    Prefill,
    /// Its prompt is computed elsewhere, and the KV comes from there.
    Arriving,
    /// Its answer grows.
    Decode,
    /// It was put aside and holds no slot and no KV.
    Aside,
}

/// A set of leases and what they add up to.
#[derive(Clone, Debug, Default)]
pub struct Held {
    /// By the time they were granted.
    pub(super) leases: BTreeSet<(Key, LeaseId)>,
    pub(super) choices: u64,
    pub(super) prompt_tokens: u64,
    pub(super) kv_tokens: u64,
    pub(super) batch: u64,
    /// Batch requests.
    batch_requests: usize,
    /// Their targets between tokens, and how many have each.
    pub(super) tpot_targets: BTreeMap<Key, u32>,
}

fn batch_choices(lease: &Lease) -> u64 {
    if lease.class == Class::Batch {
        u64::from(lease.choices)
    } else {
        0
    }
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
    pub fn batch(&self) -> u64 {
        self.batch
    }

    /// How many are batch requests.
    pub fn batch_requests(&self) -> usize {
        self.batch_requests
    }

    /// KV that all are expected to take.
    pub fn kv_tokens(&self) -> u64 {
        self.kv_tokens
    }

    /// Their numbers, oldest first.
    pub fn ids(&self) -> impl Iterator<Item = LeaseId> + '_ {
        self.leases.iter().map(|&(_, id)| id)
    }

    pub(super) fn add(&mut self, lease: &Lease) {
        if self.leases.insert((Key(lease.granted_s), lease.id)) {
            self.choices += u64::from(lease.choices);
            self.prompt_tokens += u64::from(lease.prompt_tokens);
            self.kv_tokens += lease.kv_tokens;
            self.batch += batch_choices(lease);
            self.batch_requests += usize::from(lease.class == Class::Batch);
            *self.tpot_targets.entry(Key(lease.tpot_target_s)).or_default() += 1;
        }
    }

    pub(super) fn discard(&mut self, lease: &Lease) {
        if self.leases.remove(&(Key(lease.granted_s), lease.id)) {
            self.choices -= u64::from(lease.choices);
            self.prompt_tokens -= u64::from(lease.prompt_tokens);
            self.kv_tokens -= lease.kv_tokens;
            self.batch -= batch_choices(lease);
            self.batch_requests -= usize::from(lease.class == Class::Batch);
            if let Some(count) = self.tpot_targets.get_mut(&Key(lease.tpot_target_s)) {
                *count -= 1;
                if *count == 0 {
                    self.tpot_targets.remove(&Key(lease.tpot_target_s));
                }
            }
        }
    }

    pub(super) fn contains(&self, lease: &Lease) -> bool {
        self.leases.contains(&(Key(lease.granted_s), lease.id))
    }

    pub(super) fn oldest(&self) -> Option<(f64, LeaseId)> {
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
