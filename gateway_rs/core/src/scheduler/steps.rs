//! What a worker's steps may take: prompts beside decoding, and batch work beside others.

use super::{
    actions::Action,
    core::Core,
    events::{Class, Link},
    worker::Worker,
};
use crate::cost::Shape;

/// Prompts are cut so that a step stays within this share of the time between tokens.
const CHUNK_SHARE: f64 = 0.9;

/// And those of batch work beside others within this share of that, so that newcomers are not held up by it either.
const BATCH_SHARE: f64 = 0.5;

/// What batch work has of a step, its prompts as well as what decodes, makes the others' step take at most so many times as
/// long: who is slower is there for longer, and newcomers wait for more of them.
const BATCH_SLOWDOWN: f64 = 1.25;

/// Batch prompts beside others go on by so many tokens a step at least.
const BATCH_FLOOR_TOKENS: u32 = 4;

/// See [`Action::SetLimits`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepLimits {
    /// Prompt tokens.
    pub chunk_tokens: u32,
    /// Of them, those of batch prompts beside others' decoding.
    pub batch_chunk_tokens: u32,
    /// Batch sequences that decode beside others.
    pub batch_sequences: u32,
}

impl StepLimits {
    fn differs(&self, told: &Self) -> bool {
        let pairs = [
            (self.chunk_tokens, told.chunk_tokens),
            (self.batch_chunk_tokens, told.batch_chunk_tokens),
            (self.batch_sequences, told.batch_sequences),
        ];
        (pairs.iter()).any(|&(now, told)| (f64::from(now) - f64::from(told)).abs() > 0.1 * f64::from(told))
    }
}

impl Core {
    /// How many times as long a prompt takes beside what a worker decodes; None when nobody can say.
    pub(super) fn slowdown(&self, link: Link) -> Option<f64> {
        let worker = self.fleet.workers.get(&link)?;
        let target_ms = CHUNK_SHARE * 1e3 * worker.held.tpot_target_s()?;
        let step = Shape::decode(worker.decoding(), worker.load.context_tokens);
        self.fleet.kinds.slowdown(worker.kind, worker.pace, &step, target_ms)
    }

    /// Tells a worker what goes into a step, when that has changed much.
    pub(super) fn set_step_limits(&mut self, link: Link) {
        let Some(worker) = self.fleet.workers.get(&link) else {
            return;
        };
        let Some(limits) = self.step_limits(worker) else {
            return;
        };
        if !limits.differs(&worker.step_limits.unwrap_or_default()) {
            return;
        }
        let pair_tokens = self.fleet.kinds.pair_tokens(worker.kind);
        if let Some(worker) = self.fleet.workers.get_mut(&link) {
            worker.step_limits = Some(limits);
        }
        self.actions.push(Action::SetLimits {
            link,
            limits,
            pair_tokens,
        });
    }

    /// None while nothing decodes there, or nobody can say.
    fn step_limits(&self, worker: &Worker) -> Option<StepLimits> {
        let [floor, most] = self.policy.chunk_tokens;
        let decoding = worker.held.choices().saturating_sub(worker.prefilling.len() as u64) as u32;
        if most == 0 || decoding == 0 {
            return None;
        }
        let kinds = &self.fleet.kinds;
        let context_each = worker.load.context_tokens as f64 / f64::from(decoding);
        let decode = |sequences: u32| Shape::decode(sequences, (context_each * f64::from(sequences)) as u64);
        let chunk = |step: &Shape, target_ms, floor: u32| {
            kinds.chunk_tokens(worker.kind, worker.pace, step, target_ms, floor.min(most), most)
        };
        let target_ms = CHUNK_SHARE * 1e3 * worker.held.tpot_target_s().unwrap_or(f64::INFINITY);
        let others = decoding - self.batch_decoding(worker).min(decoding);
        // While all is batch work, what is told of it is for the first other request that comes.
        let beside = decode(others.max(1));
        let beside_ms = kinds.step_ms(worker.kind, worker.pace, &beside)?;
        let batch_ms = (BATCH_SLOWDOWN * beside_ms).min(BATCH_SHARE * target_ms);
        let batch_sequences = kinds
            .decodes_within(worker.kind, worker.pace, &beside, context_each, batch_ms, worker.slots)?
            .max(1);
        let computed = if others > 0 {
            others + batch_sequences.min(decoding - others)
        } else {
            decoding
        };
        let chunk_tokens = chunk(&decode(computed), target_ms, floor)?;
        // The floor is for those whose first token waits; batch work is not worth anybody's pace.
        let batch_chunk_tokens = chunk(&beside, batch_ms, BATCH_FLOOR_TOKENS)?.min(chunk_tokens);
        Some(StepLimits {
            chunk_tokens,
            batch_chunk_tokens,
            batch_sequences,
        })
    }

    /// Batch requests whose prompts have been computed there.
    fn batch_decoding(&self, worker: &Worker) -> u32 {
        if worker.held.batch() == 0 {
            return 0;
        }
        let leases = worker.prefilling.iter().filter_map(|id| self.fleet.leases.get(id));
        let batch = leases.filter(|lease| lease.class == Class::Batch);
        let prefilling: u64 = batch.map(|lease| u64::from(lease.choices)).sum();
        worker.held.batch().saturating_sub(prefilling) as u32
    }
}
