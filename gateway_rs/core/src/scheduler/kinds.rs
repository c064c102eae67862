//! What work costs on each kind of worker, and how single ones differ.
//!
//! Workers of one model, engine and cost table are of one kind and share a [`CostModel`], which all their steps teach. A
//! worker whose steps keep taking longer (or shorter) than its kind's has a [`Pace`] of its own, in coarse steps, so that
//! few groups of equals remain.

use std::sync::Arc;

use super::{
    events::{Ask, Description, StepReport},
    map::Map,
};
use crate::{
    cost::{CostModel, CostTable, ModelError, PromptCost, Shape},
    place::{charged_tokens, Request},
};

/// A kind of worker, by number.
pub type KindId = usize;

/// Milliseconds that a prompt token is taken to cost before anything is known: only their relations matter then.
const UNKNOWN_TOKEN_MS: f64 = 1.0;

/// One step of a pace.
const PACE_STEP: f64 = 1.2;

/// Predictions compared before a worker's steps say something of it rather than of its kind.
const FIRST_STEPS: u64 = 64;

/// How far a worker's steps must be from its kind's for another pace, in steps.
const PACE_SLACK: f64 = 0.75;

/// Prompts never stand still: a step's floor is computed even when decoding alone takes the target.
const MOST_SLOWDOWN: f64 = 5.0;

/// How a worker differs from its kind: it takes `PACE_STEP` to the power of this times as long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pace(i8);

impl Pace {
    /// So many times as long.
    pub fn times(self) -> f64 {
        PACE_STEP.powi(i32::from(self.0))
    }
}

/// What a worker's steps say of its pace.
#[derive(Clone, Copy, Debug, Default)]
pub struct Drift {
    /// Logarithm of what its steps take over its kind's, smoothed.
    off: f64,
    /// The pace that follows.
    pub pace: Pace,
}

impl Drift {
    fn observe(&mut self, ratio: f64) {
        // An outlier pulls no more than a step.
        let step = PACE_STEP.ln();
        self.off += 0.02 * (ratio.ln() - self.off).clamp(-step, step);
        let steps = self.off / step;
        if (steps - f64::from(self.pace.0)).abs() > PACE_SLACK {
            self.pace = Pace(steps.round().clamp(-12.0, 12.0) as i8);
        }
    }
}

/// KV of a token of a model of 8B parameters, for workers that do not say.
const USUAL_KV_TOKEN_BYTES: u32 = 128 * 1024;

/// What moving KV takes before any was moved: 1 GiB/s, worth as much as that was seen.
const FIRST_MOVED_BYTES: f64 = 64.0 * 1024.0 * 1024.0;
const FIRST_MOVED_MS: f64 = 62.5;

/// Of KV that was moved earlier, what still counts after each report of more.
const MOVED_MEMORY: f64 = 0.9;

/// Kinds that are remembered while nobody is of them, for workers that come back.
const MAX_UNUSED: usize = 64;

#[derive(Debug)]
struct Kind {
    key: [Arc<str>; 4],
    name: String,
    model: CostModel,
    block_tokens: u32,
    /// Workers that are of it now.
    workers: u32,
    /// KV of one token; 0 = nobody has said.
    kv_token_bytes: u32,
    /// KV that came to them of late, and how long that took; from a guess on.
    moved_bytes: f64,
    moved_ms: f64,
}

/// All kinds of workers that are here, and of some that were.
#[derive(Debug, Default)]
pub struct Kinds {
    kinds: Vec<Kind>,
    by_description: Map<[Arc<str>; 4], KindId>,
}

impl Kinds {
    /// The kind of a worker that joins and describes itself so; it counts as one of it until it leaves.
    pub fn of(&mut self, described: &Description) -> KindId {
        let key = [
            &described.model,
            &described.engine,
            &described.quantization,
            &described.cost_table,
        ]
        .map(Arc::clone);
        if let Some(&kind) = self.by_description.get(&key) {
            self.kinds[kind].workers += 1;
            return kind;
        }
        // A table that is not known is no table: its steps will tell.
        let table = CostTable::named(&described.cost_table).ok().map(Arc::new);
        let parts = key.iter().filter(|part| !part.is_empty());
        let made = Kind {
            name: parts.map(|part| &**part).collect::<Vec<_>>().join("/"),
            key: key.clone(),
            model: CostModel::new(table),
            block_tokens: described.block_tokens,
            workers: 1,
            kv_token_bytes: 0,
            moved_bytes: FIRST_MOVED_BYTES,
            moved_ms: FIRST_MOVED_MS,
        };
        let unused = self.kinds.iter().filter(|kind| kind.workers == 0).count();
        let kind = match self.kinds.iter().position(|kind| kind.workers == 0) {
            Some(kind) if unused >= MAX_UNUSED => {
                self.by_description.remove(&self.kinds[kind].key);
                self.kinds[kind] = made;
                kind
            }
            _ => {
                self.kinds.push(made);
                self.kinds.len() - 1
            }
        };
        self.by_description.insert(key, kind);
        kind
    }

    /// A worker of that kind is gone.
    pub fn leave(&mut self, kind: KindId) {
        self.kinds[kind].workers -= 1;
    }

    /// Work of that many prompt tokens behind cached ones. Never 0.
    pub fn prefill_ms(&self, kind: KindId, pace: Pace, new: u32, cached: u32) -> f64 {
        self.prompt_cost(kind, pace).prefill_ms(new.max(1), cached)
    }

    /// What prompts cost; proportional to tokens before anything is known.
    pub fn prompt_cost(&self, kind: KindId, pace: Pace) -> PromptCost {
        let mut cost = self.kinds[kind].model.prompt_cost();
        if cost == PromptCost::default() {
            cost.token_ms = UNKNOWN_TOKEN_MS;
        }
        PromptCost {
            token_ms: cost.token_ms * pace.times(),
            pair_ms: cost.pair_ms * pace.times(),
        }
    }

    /// From a standing start to the first token; None when the model is not to be trusted.
    pub fn first_token_ms(&self, kind: KindId, pace: Pace, new: u32, cached: u32) -> Option<f64> {
        self.trusted(kind)
            .then(|| self.kinds[kind].model.first_token_ms(new, cached) * pace.times())
    }

    /// How many times as long prompts take beside so much decoding, in steps that keep to a target; None as above.
    pub fn slowdown(&self, kind: KindId, pace: Pace, step: &Shape, target_ms: f64) -> Option<f64> {
        let decode_ms = self.kinds[kind].model.step_ms(step) * pace.times();
        self.trusted(kind)
            .then(|| (target_ms / (target_ms - decode_ms).max(target_ms / MOST_SLOWDOWN)).max(1.0))
    }

    /// The most prompt tokens beside so much decoding that keep a step within the target; None as above.
    pub fn chunk_tokens(
        &self,
        kind: KindId,
        pace: Pace,
        step: &Shape,
        target_ms: f64,
        floor: u32,
        most: u32,
    ) -> Option<u32> {
        let model = &self.kinds[kind].model;
        self.trusted(kind)
            .then(|| model.chunk_tokens(step, 0, target_ms / pace.times(), floor, most))
    }

    /// What such a step takes; None as above.
    pub fn step_ms(&self, kind: KindId, pace: Pace, step: &Shape) -> Option<f64> {
        let model = &self.kinds[kind].model;
        self.trusted(kind).then(|| model.step_ms(step) * pace.times())
    }

    /// How many sequences more, each of so much context, can decode in such a step that keeps within the target; None as
    /// above.
    pub fn decodes_within(
        &self,
        kind: KindId,
        pace: Pace,
        step: &Shape,
        context_each: f64,
        target_ms: f64,
        most: u32,
    ) -> Option<u32> {
        let model = &self.kinds[kind].model;
        self.trusted(kind)
            .then(|| model.decodes_within(step, context_each, target_ms / pace.times(), most))
    }

    /// How many prompt tokens take as long as one pair of tokens in attention.
    pub fn pair_tokens(&self, kind: KindId) -> f64 {
        self.kinds[kind].model.pair_tokens()
    }

    /// Whether a decision may rest on predictions for that kind.
    pub fn trusted(&self, kind: KindId) -> bool {
        self.kinds[kind].model.trusted()
    }

    /// What a placement rule asks of a request.
    pub fn request(&self, kind: KindId, pace: Pace, ask: &Ask) -> Request {
        Request {
            prompt_tokens: ask.prompt_tokens,
            block_ms: self.prefill_ms(kind, pace, charged_tokens(ask.prompt_tokens), 0),
        }
    }

    /// A worker of that kind has so much KV for a token.
    pub fn says_kv(&mut self, kind: KindId, token_bytes: u32) {
        if token_bytes > 0 {
            self.kinds[kind].kv_token_bytes = token_bytes;
        }
    }

    /// So much KV came to a worker of that kind, in so long.
    pub fn moved(&mut self, kind: KindId, bytes: u64, seconds: f64) {
        if bytes > 0 && seconds > 0.0 {
            let kind = &mut self.kinds[kind];
            kind.moved_bytes = MOVED_MEMORY * kind.moved_bytes + bytes as f64;
            kind.moved_ms = MOVED_MEMORY * kind.moved_ms + seconds * 1e3;
        }
    }

    /// What the KV of so many tokens takes to come to a worker of that kind.
    pub fn move_ms(&self, kind: KindId, tokens: u32) -> f64 {
        let kind = &self.kinds[kind];
        let token_bytes = match kind.kv_token_bytes {
            0 => USUAL_KV_TOKEN_BYTES,
            bytes => bytes,
        };
        f64::from(tokens) * f64::from(token_bytes) * kind.moved_ms / kind.moved_bytes
    }

    /// Tokens of its KV blocks.
    pub fn block_tokens(&self, kind: KindId) -> u32 {
        self.kinds[kind].block_tokens
    }

    /// Learns from a worker's steps.
    pub fn observe(&mut self, kind: KindId, drift: &mut Drift, steps: &[StepReport]) {
        let model = &mut self.kinds[kind].model;
        for step in steps {
            let mut shape = Shape::decode(step.decode_tokens, step.context_tokens).with_chunk(step.prefill_tokens, 0);
            if step.prefill_pairs > 0.0 {
                shape.chunk_pairs = step.prefill_pairs;
            }
            let measured_ms = step.duration_s * 1e3;
            let predicted_ms = model.step_ms(&shape);
            if model.error().steps >= FIRST_STEPS && predicted_ms > 0.0 && measured_ms > 0.0 {
                drift.observe(measured_ms / predicted_ms);
            }
            // What it would have taken at its kind's pace.
            model.observe(&shape, measured_ms / drift.pace.times());
        }
    }

    /// Name and error of each kind that is here.
    pub fn errors(&self) -> impl Iterator<Item = (&str, ModelError)> {
        let here = self.kinds.iter().filter(|kind| kind.workers > 0);
        here.map(|kind| (kind.name.as_str(), kind.model.error()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_prompts_do_not_make_short_ones_look_dear() {
        let mut kinds = Kinds::default();
        let table = "a100-llama3-8b";
        let kind = kinds.of(&Description {
            cost_table: table.into(),
            ..Description::default()
        });
        let truth = CostTable::named(table).expect("built in");
        let before_ms = kinds.prefill_ms(kind, Pace::default(), 1000, 0);
        let mut drift = Drift::default();
        // Chunks of 2,048 far behind in long prompts: their attention costs more than all else.
        for behind in (0..400).map(|round| 40_000 + 100 * round) {
            let shape = Shape::decode(4, 8000).with_chunk(2048, behind);
            let step = StepReport {
                prefill_tokens: shape.chunk_tokens,
                prefill_pairs: shape.chunk_pairs,
                decode_tokens: shape.decodes,
                context_tokens: shape.context_tokens,
                duration_s: truth.step_ms(&shape) / 1e3,
            };
            kinds.observe(kind, &mut drift, &[step]);
        }
        let after_ms = kinds.prefill_ms(kind, Pace::default(), 1000, 0);
        assert!((after_ms / before_ms - 1.0).abs() < 0.02, "{before_ms} {after_ms}");
        assert_eq!(drift.pace, Pace::default());
    }

    #[test]
    fn kinds_of_workers_that_are_gone_are_forgotten_in_the_end() {
        let mut kinds = Kinds::default();
        let described = |model: usize| Description {
            model: format!("m{model}").into(),
            ..Description::default()
        };
        let kept = kinds.of(&described(0));
        for model in 1..1000 {
            let kind = kinds.of(&described(model));
            assert_eq!(kinds.of(&described(model)), kind);
            kinds.leave(kind);
            kinds.leave(kind);
        }
        assert!(kinds.kinds.len() <= MAX_UNUSED + 2 && kinds.by_description.len() == kinds.kinds.len());
        assert_eq!(
            kinds.errors().map(|(name, _)| name.to_owned()).collect::<Vec<_>>(),
            ["m0"]
        );
        assert_eq!(kinds.of(&described(0)), kept);
    }
}
