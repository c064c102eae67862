//! What work costs, in milliseconds: the one model that placement, queue, admission and the simulator share.
//!
//! A [`Shape`] says what an engine iteration computes, a [`CostTable`] what it takes on a GPU that somebody measured, and a
//! [`CostModel`] what it takes on *this* worker: it begins at a table (or at nothing) and follows the steps that the worker
//! reports. It also says how far its own predictions were off; whoever would act on one asks [`CostModel::trusted`] first.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// What one engine iteration computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shape {
    /// Sequences that decode, one token each.
    pub decodes: u32,
    /// Tokens in their KV, over all of them.
    pub context_tokens: u64,
    /// Prompt tokens, over all chunks in the step.
    pub chunk_tokens: u32,
    /// Pairs of tokens that the chunks' attention looks at: for a chunk of c behind k tokens, c (k + c / 2).
    pub chunk_pairs: f64,
}

impl Shape {
    /// A step without prompt tokens.
    #[must_use]
    pub fn decode(decodes: u32, context_tokens: u64) -> Self {
        Self {
            decodes,
            context_tokens,
            ..Self::default()
        }
    }

    /// The same step with `tokens` prompt tokens more, of a prompt that has `cached` before them.
    #[must_use]
    pub fn with_chunk(mut self, tokens: u32, cached: u32) -> Self {
        self.chunk_tokens += tokens;
        self.chunk_pairs += pairs(tokens, cached);
        self
    }
}

fn pairs(tokens: u32, cached: u32) -> f64 {
    f64::from(tokens) * (f64::from(cached) + f64::from(tokens) / 2.0)
}

/// What computing prompts adds to a worker's work, in chunks of any size. Not a wait: a short prompt alone takes a whole step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PromptCost {
    /// For each token, without attention.
    pub token_ms: f64,
    /// For each pair of tokens in attention.
    pub pair_ms: f64,
}

impl PromptCost {
    /// Of `new` prompt tokens behind `cached` ones.
    #[must_use]
    pub fn prefill_ms(&self, new: u32, cached: u32) -> f64 {
        self.token_ms * f64::from(new) + self.pair_ms * pairs(new, cached)
    }
}

/// What a chunk takes, in prompt tokens without attention, each pair of tokens counting `pair_tokens` of them.
#[must_use]
pub fn chunk_weight(tokens: u32, computed: u32, pair_tokens: f64) -> f64 {
    f64::from(tokens) + pair_tokens * pairs(tokens, computed)
}

/// The largest chunk behind `computed` tokens whose [`chunk_weight`] is within `weight`.
#[must_use]
pub fn chunk_within(weight: f64, computed: u32, pair_tokens: f64) -> u32 {
    // c (1 + p k) + p c^2 / 2 = w, solved in the form that p = 0 does not break.
    let linear = 1.0 + pair_tokens * f64::from(computed);
    let tokens = 2.0 * weight.max(0.0) / (linear + (linear * linear + 2.0 * pair_tokens * weight.max(0.0)).sqrt());
    // A hair more, so that the weight of a whole number gives that number.
    (tokens + 1e-6) as u32
}

/// What a worker computes of prompts in a step, at the beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkLimits {
    /// As it was last told by the scheduler.
    pub told: u32,
    /// Its own, beside running streams.
    pub own: u32,
    /// And in a step in which nothing decodes, or little beside what waits; the engine's bound, whatever it is told.
    pub idle: u32,
    /// How many prompt tokens take as long as one pair of tokens in attention; 0 = not known.
    pub pair_tokens: f64,
}

/// What of prompts one step may take. The rule of live workers and of simulated ones.
///
/// Beside streams that run as little as they are owed, unless more requests begin than would be held up (a burst then takes
/// fewer steps, and all of it is done sooner). In tokens without attention: farther into a prompt a chunk is smaller.
#[derive(Clone, Copy, Debug)]
pub struct StepBudget {
    weight: f64,
    tokens: u32,
    pair_tokens: f64,
}

impl StepBudget {
    /// For a step in which so many sequences decode and so many begin: their prompt is being computed, or could be.
    #[must_use]
    pub fn new(limits: ChunkLimits, decoding: u32, beginning: u32) -> Self {
        let most = limits.own.max(limits.idle);
        let told = limits.told.min(most);
        let owed = decoding > 0 && (told < limits.own || beginning <= decoding);
        Self {
            weight: chunk_weight(if owed { told } else { most }, 0, limits.pair_tokens),
            tokens: most,
            pair_tokens: limits.pair_tokens,
        }
    }

    /// Whether another chunk may begin.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.weight >= 1.0 && self.tokens > 0
    }

    /// The next chunk: of `left` tokens of a prompt, behind `computed` of them. One token at least while it is open, so that
    /// prefill never stands still.
    pub fn take(&mut self, left: u32, computed: u32) -> u32 {
        if !self.is_open() {
            return 0;
        }
        let tokens = chunk_within(self.weight, computed, self.pair_tokens).max(1);
        let tokens = tokens.min(self.tokens).min(left);
        self.weight -= chunk_weight(tokens, computed, self.pair_tokens);
        self.tokens -= tokens;
        tokens
    }
}

/// A table that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// Not the JSON of a table.
    #[error("not a cost table: {0}")]
    Json(#[from] serde_json::Error),
    /// Values without meaning.
    #[error("cost table {name}: {reason}")]
    Value {
        /// The table.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// No table of that name is built in.
    #[error("no cost table {name}; there are {known}")]
    Unknown {
        /// As asked for.
        name: String,
        /// All names.
        known: String,
    },
}

/// Measured step times of one model on one kind of worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CostTable {
    /// What it is asked for by.
    pub name: String,
    /// Kind of GPU.
    pub gpu: String,
    /// Model whose layers were measured.
    pub model: String,
    /// GPUs that hold one worker's model.
    pub tensor_parallel: u32,
    /// Where the figures are from, and what was derived.
    pub source: String,
    /// (tokens in the step, ms) for all but attention, tokens rising; linear between, level before, the last slope behind.
    pub step_ms: Vec<(u32, f64)>,
    /// For each pair of tokens that prefill's attention looks at ([`Shape::chunk_pairs`]).
    pub attention_pair_ms: f64,
    /// For each token of the decoding sequences' KV.
    pub context_token_ms: f64,
    /// KV that one worker holds, in tokens.
    pub kv_tokens: u64,
}

impl CostTable {
    /// A table from its JSON.
    ///
    /// # Errors
    /// Not a table, or one whose values can't be times.
    pub fn parse(json: &str) -> Result<Self, TableError> {
        let table: Self = serde_json::from_str(json)?;
        table.check()?;
        Ok(table)
    }

    /// The tables that come with the package.
    ///
    /// # Errors
    /// Never: the tests read them all.
    pub fn builtin() -> Result<Vec<Self>, TableError> {
        Ok(serde_json::from_str(include_str!("../data/cost_tables.json"))?)
    }

    /// The built-in table of that name.
    ///
    /// # Errors
    /// There is none; the error says which there are.
    pub fn named(name: &str) -> Result<Self, TableError> {
        let tables = Self::builtin()?;
        let known: Vec<&str> = tables.iter().map(|table| table.name.as_str()).collect();
        let known = known.join(", ");
        let found = tables.into_iter().find(|table| table.name == name);
        found.ok_or_else(|| TableError::Unknown {
            name: name.to_owned(),
            known,
        })
    }

    fn check(&self) -> Result<(), TableError> {
        let is_time = |ms: f64| ms.is_finite() && ms >= 0.0;
        let reason = if self.step_ms.len() < 2 {
            "step_ms needs at least two rows"
        } else if !self.step_ms.windows(2).all(|pair| pair[0].0 < pair[1].0) {
            "step_ms: tokens must rise"
        } else if !self.step_ms.windows(2).all(|pair| pair[0].1 <= pair[1].1) {
            "step_ms: more tokens must not take less time"
        } else if !self.step_ms.iter().all(|row| is_time(row.1) && row.1 > 0.0) {
            "step_ms: times must be above 0"
        } else if !is_time(self.attention_pair_ms) || !is_time(self.context_token_ms) {
            "attention_pair_ms and context_token_ms must not be negative"
        } else if self.kv_tokens == 0 {
            "kv_tokens must be above 0"
        } else {
            return Ok(());
        };
        Err(TableError::Value {
            name: self.name.clone(),
            reason: reason.to_owned(),
        })
    }

    /// All but attention, for so many tokens.
    #[must_use]
    pub fn linear_ms(&self, tokens: u32) -> f64 {
        let rows = &self.step_ms;
        let after = rows.partition_point(|row| row.0 < tokens);
        match after {
            0 => rows.first().map_or(0.0, |row| row.1),
            _ => {
                let high = after.min(rows.len() - 1);
                let ((n0, ms0), (n1, ms1)) = (rows[high - 1], rows[high]);
                ms0 + (ms1 - ms0) / f64::from(n1 - n0) * (f64::from(tokens) - f64::from(n0))
            }
        }
    }

    /// What such a step takes.
    #[must_use]
    pub fn step_ms(&self, shape: &Shape) -> f64 {
        let tokens = shape.decodes + shape.chunk_tokens;
        if tokens == 0 {
            return 0.0;
        }
        self.linear_ms(tokens)
            + self.context_token_ms * shape.context_tokens as f64
            + self.attention_pair_ms * shape.chunk_pairs
    }

    /// Time for each prompt token in steps that are well filled, without attention.
    #[must_use]
    pub fn prompt_token_ms(&self) -> f64 {
        self.linear_ms(FULL_CHUNK_TOKENS) / f64::from(FULL_CHUNK_TOKENS)
    }
}

/// The largest number above `low`, up to `high`, that fits, where all below one that fits do; else `low`.
fn largest(mut low: u32, mut high: u32, fits: impl Fn(u32) -> bool) -> u32 {
    while low < high {
        let middle = high - (high - low) / 2;
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// A chunk of which no one says that it is small: where a token's time is taken from.
const FULL_CHUNK_TOKENS: u32 = 2048;

/// Observations that a table is worth against what is seen.
const TABLE_WEIGHT: f64 = 5.0;

/// Each step makes older ones count less by this: the model follows some 1,000 steps.
const MEMORY: f64 = 0.999;

/// A prediction off by more than so many times the usual is an outlier, and pulls only as much as one at that distance.
const HUBER: f64 = 3.0;

/// Errors remembered; the model's own error is said over these.
const ERRORS: usize = 128;

/// Steps before a model without a table says anything, and in which one with a table looks for its worker's scale.
const FIRST_STEPS: u64 = 16;

/// Half the predictions further off than this, and the model is worth nothing.
const WORTHLESS: f64 = 0.5;

const TERMS: usize = 5;

/// Those that a table has: a step's constant is in its first row already, and two of them couldn't be told apart.
const TABLE_TERMS: usize = 4;

/// How far predictions were off lately, as a share of what was then measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelError {
    /// Steps compared since the start.
    pub steps: u64,
    /// Half were off by less.
    pub median: f64,
    /// Nine in ten were off by less.
    pub p90: f64,
}

/// What work costs on one worker (or one kind of worker).
///
/// A step's time is a sum of five terms, each with a coefficient that is never negative: with a table, the table's time for
/// decoding, its attention, the chunks' time, their attention; without one, the counts themselves and a constant. The
/// coefficients follow the reported steps by least squares on relative errors, in which an outlier pulls no more than a
/// step three times as far off as usual, and older steps fade. So a step's time rises with its work, whatever is reported.
///
/// A table may be of another GPU, or of the same one at another clock: so its scale comes first, from the median of some
/// steps, and the terms one by one only then. Errors against a scale that is six times off would weigh 36 times as much as
/// those after it, and a handful of first steps would decide for the next thousand.
#[derive(Clone, Debug)]
pub struct CostModel {
    table: Option<Arc<CostTable>>,
    coefficients: [f64; TERMS],
    /// Weighted sums of products of terms, and of terms with the measured time.
    products: [[f64; TERMS]; TERMS],
    targets: [f64; TERMS],
    steps: u64,
    /// The first steps' terms and times, until the table's scale is known.
    first: Vec<([f64; TERMS], f64)>,
    /// Of the last predictions, as shares, in a ring.
    errors: Vec<f64>,
    error: ModelError,
}

impl CostModel {
    /// Begins at a table, or at nothing.
    #[must_use]
    pub fn new(table: Option<Arc<CostTable>>) -> Self {
        let mut model = Self {
            coefficients: [0.0; TERMS],
            products: [[0.0; TERMS]; TERMS],
            targets: [0.0; TERMS],
            steps: 0,
            first: Vec::new(),
            errors: Vec::new(),
            error: ModelError::default(),
            table,
        };
        if model.table.is_some() {
            model.begin_at(1.0);
        }
        // A little resistance, so that a term which never appears stays where it is.
        for term in 0..TERMS {
            model.products[term][term] += 1e-9;
            model.targets[term] += 1e-9 * model.coefficients[term];
        }
        model
    }

    /// Each of the table's terms counts so many times, as if it had been seen alone so.
    fn begin_at(&mut self, scale: f64) {
        for term in 0..TABLE_TERMS {
            self.coefficients[term] = scale;
            self.products[term][term] = TABLE_WEIGHT / (scale * scale);
            self.targets[term] = TABLE_WEIGHT / scale;
        }
    }

    /// The table it began at.
    #[must_use]
    pub fn table(&self) -> Option<&CostTable> {
        self.table.as_deref()
    }

    /// What each coefficient is multiplied with. In units that make them of like size.
    fn terms(&self, shape: &Shape) -> [f64; TERMS] {
        match &self.table {
            Some(table) => {
                let base_ms = if shape.decodes > 0 {
                    table.linear_ms(shape.decodes)
                } else {
                    0.0
                };
                let with_chunk_ms = if shape.chunk_tokens > 0 {
                    table.linear_ms(shape.decodes + shape.chunk_tokens)
                } else {
                    base_ms
                };
                [
                    base_ms,
                    table.context_token_ms * shape.context_tokens as f64,
                    with_chunk_ms - base_ms,
                    table.attention_pair_ms * shape.chunk_pairs,
                    0.0,
                ]
            }
            None => [
                f64::from(shape.decodes),
                shape.context_tokens as f64 * 1e-3,
                f64::from(shape.chunk_tokens),
                shape.chunk_pairs * 1e-3,
                1.0,
            ],
        }
    }

    /// What such a step takes; 0 for a model without a table that has seen too few.
    #[must_use]
    pub fn step_ms(&self, shape: &Shape) -> f64 {
        if shape.decodes + shape.chunk_tokens == 0 {
            return 0.0;
        }
        let terms = self.terms(shape);
        dot(&terms, &self.coefficients)
    }

    /// What computing `new` prompt tokens behind `cached` ones adds to the worker's work; its wait is
    /// [`Self::first_token_ms`].
    #[must_use]
    pub fn prefill_ms(&self, new: u32, cached: u32) -> f64 {
        self.prompt_cost().prefill_ms(new, cached)
    }

    /// What prompts cost, all 0 for a model that knows nothing.
    #[must_use]
    pub fn prompt_cost(&self) -> PromptCost {
        let (token_ms, pair_ms) = match &self.table {
            Some(table) => (table.prompt_token_ms(), table.attention_pair_ms),
            None => (1.0, 1e-3),
        };
        PromptCost {
            token_ms: self.coefficients[2] * token_ms,
            pair_ms: self.coefficients[3] * pair_ms,
        }
    }

    /// How soon the first token of such a prompt comes from a worker that does nothing else.
    #[must_use]
    pub fn first_token_ms(&self, new: u32, cached: u32) -> f64 {
        let alone = Shape::default().with_chunk(new.min(FULL_CHUNK_TOKENS), cached);
        self.prefill_ms(new, cached).max(self.step_ms(&alone))
    }

    /// How many prompt tokens, within `floor..=most`, to add to such a step so that prompts are computed fastest while the
    /// step takes at most `target_ms`.
    ///
    /// Mostly as many as the target allows, since they share the step's other work; but where a GPU computes a smaller
    /// number at a better rate (kernels have steps of their own), that many. The floor holds even when the step takes
    /// longer: prefill never stands still.
    #[must_use]
    pub fn chunk_tokens(&self, step: &Shape, cached: u32, target_ms: f64, floor: u32, most: u32) -> u32 {
        if floor >= most {
            return most;
        }
        let ms = |tokens: u32| self.step_ms(&step.with_chunk(tokens, cached));
        let within = largest(floor, most, |tokens| ms(tokens) <= target_ms);
        let mut best = within;
        let rate = |tokens: u32| f64::from(step.chunk_tokens + tokens) / ms(tokens).max(1e-9);
        // Between its rows a table is linear, so nothing between them is better than both ends.
        for &(row, _) in self.table.iter().flat_map(|table| &table.step_ms).rev() {
            let tokens = row.saturating_sub(step.decodes + step.chunk_tokens);
            if tokens >= floor && tokens < within && rate(tokens) > rate(best) {
                best = tokens;
            }
        }
        best
    }

    /// How many sequences more, each of so much context, can decode in such a step while it takes at most `target_ms`;
    /// `most` at most.
    #[must_use]
    pub fn decodes_within(&self, step: &Shape, context_each: f64, target_ms: f64, most: u32) -> u32 {
        largest(0, most, |more| {
            let mut with = *step;
            with.decodes += more;
            with.context_tokens += (context_each * f64::from(more)) as u64;
            self.step_ms(&with) <= target_ms
        })
    }

    /// How many prompt tokens take as long as one pair of tokens in attention; 0 when that is not known.
    #[must_use]
    pub fn pair_tokens(&self) -> f64 {
        let cost = self.prompt_cost();
        let pair_tokens = cost.pair_ms / cost.token_ms;
        if pair_tokens.is_finite() {
            pair_tokens.clamp(0.0, 1.0)
        } else {
            0.0
        }
    }

    /// Learns from a step that the worker reports. A time that can't be one is not looked at.
    pub fn observe(&mut self, shape: &Shape, measured_ms: f64) {
        if !measured_ms.is_finite() || measured_ms <= 0.0 || shape.decodes + shape.chunk_tokens == 0 {
            return;
        }
        let terms = self.terms(shape);
        let predicted_ms = dot(&terms, &self.coefficients);
        let speaks = self.table.is_some() || self.steps >= FIRST_STEPS;
        if speaks {
            self.remember((measured_ms - predicted_ms).abs() / measured_ms);
        }
        self.steps += 1;
        if self.table.is_some() && self.steps <= FIRST_STEPS {
            self.find_scale(terms, measured_ms);
        } else {
            self.learn(&terms, measured_ms, speaks);
        }
    }

    /// One of the first steps beside a table. After the last of them all are learned from.
    fn find_scale(&mut self, terms: [f64; TERMS], measured_ms: f64) {
        self.first.push((terms, measured_ms));
        let ratio = |(terms, measured_ms): &([f64; TERMS], f64)| measured_ms / terms.iter().sum::<f64>().max(1e-6);
        let mut ratios: Vec<f64> = self.first.iter().map(ratio).collect();
        ratios.sort_unstable_by(f64::total_cmp);
        self.begin_at(ratios[ratios.len() / 2]);
        if self.steps == FIRST_STEPS {
            for (terms, measured_ms) in std::mem::take(&mut self.first) {
                self.learn(&terms, measured_ms, true);
            }
        }
    }

    /// Takes one step into the least squares.
    fn learn(&mut self, terms: &[f64; TERMS], measured_ms: f64, speaks: bool) {
        let predicted_ms = dot(terms, &self.coefficients);
        let mut weight = 1.0;
        if speaks && self.error.steps >= FIRST_STEPS {
            // A prediction of nothing has nothing to be measured against.
            let relative = (measured_ms - predicted_ms).abs() / predicted_ms.max(1e-6);
            let usual = HUBER * self.error.median.max(0.02);
            weight = (usual / relative).min(1.0);
        }
        // Relative errors count, so that long steps don't drown short ones. By what is predicted where that is known: a
        // stall would otherwise make itself small.
        let scale_ms = if speaks { predicted_ms.max(1e-3) } else { measured_ms };
        let weight = weight / (scale_ms * scale_ms);
        for row in 0..TERMS {
            for column in 0..TERMS {
                self.products[row][column] = MEMORY * self.products[row][column] + weight * terms[row] * terms[column];
            }
            self.targets[row] = MEMORY * self.targets[row] + weight * terms[row] * measured_ms;
        }
        let rounds = if speaks { 8 } else { 64 };
        for _ in 0..rounds {
            self.descend();
        }
    }

    /// One round of coordinate descent to the least squares without negative coefficients.
    fn descend(&mut self) {
        for term in 0..TERMS {
            let curvature = self.products[term][term];
            if curvature > 1e-12 {
                let gradient = self.targets[term] - dot(&self.products[term], &self.coefficients);
                self.coefficients[term] = (self.coefficients[term] + gradient / curvature).max(0.0);
            }
        }
    }

    fn remember(&mut self, share: f64) {
        let at = (self.error.steps as usize) % ERRORS;
        match self.errors.get_mut(at) {
            Some(slot) => *slot = share,
            None => self.errors.push(share),
        }
        self.error.steps += 1;
        if self.error.steps % 8 == 0 {
            let mut sorted = self.errors.clone();
            sorted.sort_unstable_by(f64::total_cmp);
            self.error.median = sorted[sorted.len() / 2];
            self.error.p90 = sorted[sorted.len() * 9 / 10];
        }
    }

    /// How far its predictions were off lately; zeros before any were compared.
    #[must_use]
    pub fn error(&self) -> ModelError {
        self.error
    }

    /// Whether a decision may rest on it: it has been compared with enough steps, and wasn't far off.
    #[must_use]
    pub fn trusted(&self) -> bool {
        self.error.steps >= 2 * FIRST_STEPS && self.error.median <= WORTHLESS
    }
}

fn dot(left: &[f64; TERMS], right: &[f64; TERMS]) -> f64 {
    left.iter().zip(right).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn a100() -> Arc<CostTable> {
        Arc::new(CostTable::named("a100-llama3-8b").expect("built in"))
    }

    fn any_shape(rng: &mut impl Rng) -> Shape {
        let decodes = rng.random_range(0..64);
        let chunk = if decodes == 0 || rng.random_bool(0.5) {
            rng.random_range(1..1500)
        } else {
            0
        };
        Shape::decode(decodes, u64::from(decodes) * rng.random_range(50..4000))
            .with_chunk(chunk, rng.random_range(0..9000))
    }

    #[test]
    fn built_in_tables_are_sound_and_found_by_name() {
        let tables = CostTable::builtin().expect("readable");
        assert!(tables.len() >= 6);
        for table in tables {
            table.check().expect("sound");
            assert_eq!(CostTable::named(&table.name).expect("found"), table);
        }
        let error = CostTable::named("abacus").expect_err("unknown").to_string();
        assert!(error.contains("abacus") && error.contains("a100-llama3-8b"), "{error}");
    }

    #[test]
    fn tables_interpolate_and_refuse_what_is_no_time() {
        let table = a100();
        assert_eq!(table.linear_ms(1), 10.0);
        assert_eq!(table.linear_ms(8), 10.0);
        assert!((table.linear_ms(768) - (34.8 + 75.6) / 2.0).abs() < 1e-9);
        assert!((table.linear_ms(6144) - (275.0 + 129.0)).abs() < 1e-9);
        // 32 sequences of 1,000 tokens and a chunk of 224 behind 512.
        let shape = Shape::decode(32, 32_000).with_chunk(224, 512);
        let expected = 19.6 + 9.36e-5 * 32_000.0 + 3.36e-6 * 224.0 * (512.0 + 112.0);
        assert!((table.step_ms(&shape) - expected).abs() < 1e-9);
        assert_eq!(table.step_ms(&Shape::default()), 0.0);
        for bad in [
            r#""step_ms":[[8,1.0]],"attention_pair_ms":0,"context_token_ms":0,"kv_tokens":1"#,
            r#""step_ms":[[8,1.0],[8,2.0]],"attention_pair_ms":0,"context_token_ms":0,"kv_tokens":1"#,
            r#""step_ms":[[8,2.0],[9,1.0]],"attention_pair_ms":0,"context_token_ms":0,"kv_tokens":1"#,
            r#""step_ms":[[8,1.0],[9,2.0]],"attention_pair_ms":-1,"context_token_ms":0,"kv_tokens":1"#,
            r#""step_ms":[[8,1.0],[9,2.0]],"attention_pair_ms":0,"context_token_ms":0,"kv_tokens":0"#,
        ] {
            let json = format!(r#"{{"name":"x","gpu":"","model":"","tensor_parallel":1,"source":"",{bad}}}"#);
            assert!(CostTable::parse(&json).is_err(), "{json}");
        }
    }

    #[test]
    fn a_chunk_farther_in_is_as_much_shorter_as_its_attention_takes() {
        let mut rng = rand::rngs::StdRng::seed_from_u64(7);
        for _ in 0..2000 {
            let (tokens, computed) = (rng.random_range(1..9000), rng.random_range(0..200_000));
            let pair_tokens = [0.0, 1e-9, 1e-5, 1e-3, 0.5][rng.random_range(0..5)];
            let weight = chunk_weight(tokens, computed, pair_tokens);
            assert_eq!(
                chunk_within(weight, computed, pair_tokens),
                tokens,
                "{computed} {pair_tokens}"
            );
            assert!(chunk_within(weight, computed + 1000, pair_tokens) <= tokens);
            let other = chunk_within(weight * 0.7, computed, pair_tokens);
            assert!(chunk_weight(other, computed, pair_tokens) <= weight * 0.7 + 1e-3);
            assert!(chunk_weight(other + 1, computed, pair_tokens) > weight * 0.7 - 1e-3);
        }
        assert_eq!(chunk_within(-1.0, 5, 0.1), 0);
    }

    #[test]
    fn chunk_is_what_computes_prompts_fastest_in_time() {
        let model = CostModel::new(Some(a100()));
        let table = model.table().expect("given");
        for (decodes, context, cached, target_ms) in [
            (30, 60_000, 4000, 90.0),
            (0, 0, 0, 90.0),
            (200, 400_000, 0, 90.0),
            (1, 9, 80_000, 90.0),
        ] {
            let step = Shape::decode(decodes, context);
            let chunk = model.chunk_tokens(&step, cached, target_ms, 128, 8192);
            let rate = |tokens: u32| f64::from(tokens) / model.step_ms(&step.with_chunk(tokens, cached));
            let fits = |tokens: &u32| model.step_ms(&step.with_chunk(*tokens, cached)) <= target_ms;
            let best = (128..8192).filter(fits).map(rate).fold(0.0, f64::max);
            assert!(fits(&chunk), "{chunk}");
            // Attention makes the rate curve a little between the rows.
            assert!(rate(chunk) >= 0.99 * best, "{chunk}: {} < {best}", rate(chunk));
        }
        // 512 tokens take 34.8 ms and 1,024 take 75.6: alone, the smaller chunk is better; with much to share, the larger.
        assert_eq!(model.chunk_tokens(&Shape::default(), 0, 90.0, 128, 8192), 512);
        assert!(model.chunk_tokens(&Shape::decode(60, 300_000), 0, 90.0, 128, 8192) > 512);
        assert!(table.linear_ms(1024) > 2.0 * table.linear_ms(512));
        let step = Shape::decode(30, 60_000);
        assert_eq!(model.chunk_tokens(&step, 4000, 1.0, 128, 8192), 128, "the floor holds");
        assert_eq!(model.chunk_tokens(&step, 4000, 1e9, 128, 50), 50);
    }

    #[test]
    fn a_table_is_corrected_by_what_is_reported() {
        let (table, mut rng) = (a100(), StdRng::seed_from_u64(1));
        let mut model = CostModel::new(Some(Arc::clone(&table)));
        // This worker takes 1.4 times as long to decode and 0.8 times to prefill.
        let truth = |shape: &Shape| {
            let decode_ms = table.step_ms(&Shape::decode(shape.decodes, shape.context_tokens));
            1.4 * decode_ms + 0.8 * (table.step_ms(shape) - decode_ms)
        };
        for _ in 0..600 {
            let shape = any_shape(&mut rng);
            let noise = rng.random_range(0.97..1.03);
            model.observe(&shape, truth(&shape) * noise);
        }
        assert!(model.trusted());
        assert!(model.error().median < 0.03, "{:?}", model.error());
        for _ in 0..200 {
            let shape = any_shape(&mut rng);
            let off = model.step_ms(&shape) / truth(&shape) - 1.0;
            assert!(off.abs() < 0.1, "{shape:?}: {off}");
        }
        assert!((model.prefill_ms(2000, 0) / CostModel::new(Some(table)).prefill_ms(2000, 0) - 0.8).abs() < 0.05);
    }

    #[test]
    fn a_table_of_another_scale_is_as_good_as_its_own() {
        for (seed, scale) in (0..).zip([0.02, 0.2, 1.0, 6.0, 50.0]) {
            let (table, mut rng) = (a100(), StdRng::seed_from_u64(seed));
            let mut model = CostModel::new(Some(Arc::clone(&table)));
            let truth = |shape: &Shape| scale * table.step_ms(shape);
            for seen in 0..200 {
                let shape = any_shape(&mut rng);
                // What a busy machine adds, and a stall now and then, from the first steps on.
                let added_ms = if seen % 10 == 3 {
                    100.0
                } else {
                    rng.random_range(0.0..1.0)
                };
                model.observe(&shape, truth(&shape) + scale * added_ms);
            }
            assert!(model.trusted(), "{scale}");
            assert!(model.error().median < 0.06, "{scale}: {:?}", model.error());
            for _ in 0..200 {
                let shape = any_shape(&mut rng);
                let off = model.step_ms(&shape) / truth(&shape) - 1.0;
                assert!(off.abs() < 0.2, "{scale} {shape:?}: {off}");
            }
        }
    }

    #[test]
    fn stalls_do_not_move_the_model() {
        let (table, mut rng) = (a100(), StdRng::seed_from_u64(2));
        let mut model = CostModel::new(Some(Arc::clone(&table)));
        for round in 0..1000 {
            let shape = any_shape(&mut rng);
            // One step in twenty stands still for two seconds.
            let stall_ms = if round % 20 == 19 { 2000.0 } else { 0.0 };
            model.observe(&shape, table.step_ms(&shape) * rng.random_range(0.98..1.02) + stall_ms);
        }
        for _ in 0..200 {
            let shape = any_shape(&mut rng);
            let off = model.step_ms(&shape) / table.step_ms(&shape) - 1.0;
            assert!(off.abs() < 0.15, "{shape:?}: {off}");
        }
        let error = model.error();
        assert!(error.median < 0.1, "{error:?}");
    }

    #[test]
    fn without_a_table_all_is_learned_and_nothing_is_claimed_before() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut model = CostModel::new(None);
        let truth = |shape: &Shape| {
            let (chunk, decodes) = (f64::from(shape.chunk_tokens), f64::from(shape.decodes));
            4.0 + 6.0 * decodes + 3.0 * chunk + 2e-3 * shape.context_tokens as f64 + 1e-4 * shape.chunk_pairs
        };
        assert_eq!(model.prefill_ms(100, 0), 0.0);
        for seen in 0..500 {
            assert!(seen >= 40 || !model.trusted());
            let shape = any_shape(&mut rng);
            model.observe(&shape, truth(&shape) * rng.random_range(0.95..1.05));
        }
        assert!(model.trusted());
        for _ in 0..200 {
            let shape = any_shape(&mut rng);
            let off = model.step_ms(&shape) / truth(&shape) - 1.0;
            assert!(off.abs() < 0.1, "{shape:?}: {off}");
        }
    }

    #[test]
    fn a_model_that_is_always_wrong_says_so() {
        let mut rng = StdRng::seed_from_u64(4);
        let mut model = CostModel::new(Some(a100()));
        for _ in 0..400 {
            let factor = f64::powf(10.0, rng.random_range(-2.0..2.0));
            model.observe(&any_shape(&mut rng), 20.0 * factor);
        }
        assert!(!model.trusted(), "{:?}", model.error());
    }

    #[test]
    fn what_is_no_time_is_not_looked_at() {
        let mut model = CostModel::new(Some(a100()));
        let shape = Shape::decode(4, 1000);
        let before_ms = model.step_ms(&shape);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            model.observe(&shape, bad);
        }
        model.observe(&Shape::default(), 5.0);
        assert_eq!(model.step_ms(&shape), before_ms);
    }

    proptest! {
        /// Whatever is reported, predictions stay finite and more work never takes less time.
        #[test]
        fn steps_rise_with_work(
            seed in any::<u64>(), with_table in any::<bool>(), reports in prop::collection::vec(1e-3_f64..1e5, 0..120),
            decodes in 1_u32..200, context in 0_u64..1_000_000, chunk in 0_u32..8000, more in 0_u32..8000,
        ) {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut model = CostModel::new(with_table.then(a100));
            for measured_ms in reports {
                model.observe(&any_shape(&mut rng), measured_ms);
            }
            let small = Shape::decode(decodes, context).with_chunk(chunk, 100);
            let large = Shape::decode(decodes, context + u64::from(more)).with_chunk(chunk + more, 100);
            let (small_ms, large_ms) = (model.step_ms(&small), model.step_ms(&large));
            prop_assert!(small_ms.is_finite() && small_ms >= 0.0);
            prop_assert!(large_ms >= small_ms - 1e-6, "{} < {}", large_ms, small_ms);
            prop_assert!(model.prefill_ms(chunk + more, 0) >= model.prefill_ms(chunk, 0));
        }
    }
}
