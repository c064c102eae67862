//! What a token costs: the price of a worker's hour over what its steps are measured to take.
//!
//! Each step says how many prompt tokens and how many answers it computed and how long it took. A line through those of a
//! pool, fitted to the last while, tells what a token of either kind takes; both are then scaled so that together they are
//! exactly the time that the workers were busy. Idle time is nobody's.

use std::{collections::BTreeMap, sync::Arc};

/// What was measured counts half after so many seconds of busy time.
const HALF_S: f64 = 600.0;

/// In millionths of a millionth of a dollar for each token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Price {
    /// Of a prompt, computed and not reused.
    pub prompt: u64,
    /// Of an answer.
    pub output: u64,
}

impl Price {
    /// In billionths of a dollar, rounded up.
    pub fn of(self, prompt_tokens: u64, output_tokens: u64) -> u64 {
        let prompt = u128::from(self.prompt) * u128::from(prompt_tokens);
        let output = u128::from(self.output) * u128::from(output_tokens);
        u64::try_from((prompt + output).div_ceil(1000)).unwrap_or(u64::MAX)
    }

    /// The higher of each.
    pub fn most(self, other: Self) -> Self {
        Self {
            prompt: self.prompt.max(other.prompt),
            output: self.output.max(other.output),
        }
    }
}

/// What each pool's tokens take.
#[derive(Clone, Debug, Default)]
pub struct Prices {
    worker_hour: f64,
    worker_hours: BTreeMap<String, f64>,
    measured: BTreeMap<Arc<str>, Measured>,
}

/// Sums of products over the last while.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    prompt: f64,
    output: f64,
    busy_s: f64,
    prompt_prompt: f64,
    prompt_output: f64,
    output_output: f64,
    prompt_s: f64,
    output_s: f64,
}

impl Measured {
    fn add(&mut self, prompt: f64, output: f64, took_s: f64) {
        let keep = (-took_s / HALF_S).exp2();
        for sum in [
            &mut self.prompt,
            &mut self.output,
            &mut self.busy_s,
            &mut self.prompt_prompt,
            &mut self.prompt_output,
            &mut self.output_output,
            &mut self.prompt_s,
            &mut self.output_s,
        ] {
            *sum *= keep;
        }
        self.prompt += prompt;
        self.output += output;
        self.busy_s += took_s;
        self.prompt_prompt += prompt * prompt;
        self.prompt_output += prompt * output;
        self.output_output += output * output;
        self.prompt_s += prompt * took_s;
        self.output_s += output * took_s;
    }

    /// Seconds for a token of a prompt and of an answer.
    fn token_s(&self) -> (f64, f64) {
        let determinant = self.prompt_prompt * self.output_output - self.prompt_output * self.prompt_output;
        let singular = determinant <= 1e-9 * self.prompt_prompt * self.output_output;
        let (mut prompt_s, mut output_s) = match singular {
            true => (1.0, 1.0),
            false => (
                (self.prompt_s * self.output_output - self.output_s * self.prompt_output) / determinant,
                (self.output_s * self.prompt_prompt - self.prompt_s * self.prompt_output) / determinant,
            ),
        };
        // Nothing takes less than no time: then the other kind takes it all.
        if prompt_s < 0.0 {
            (prompt_s, output_s) = (0.0, 1.0);
        } else if output_s < 0.0 {
            (prompt_s, output_s) = (1.0, 0.0);
        }
        let told_s = prompt_s * self.prompt + output_s * self.output;
        match told_s > 0.0 {
            true => (prompt_s * self.busy_s / told_s, output_s * self.busy_s / told_s),
            false => (0.0, 0.0),
        }
    }
}

impl Prices {
    /// Nothing is measured. Dollars for an hour of a worker: of pools by name, and of all others.
    pub fn new(worker_hour: f64, worker_hours: BTreeMap<String, f64>) -> Self {
        Self {
            worker_hour,
            worker_hours,
            measured: BTreeMap::new(),
        }
    }

    /// A step of a pool's worker.
    pub fn step(&mut self, pool: &Arc<str>, prompt_tokens: u32, output_tokens: u32, took_s: f64) {
        if took_s > 0.0 && prompt_tokens + output_tokens > 0 {
            let measured = match self.measured.get_mut(pool) {
                Some(measured) => measured,
                None => self.measured.entry(pool.clone()).or_default(),
            };
            measured.add(prompt_tokens.into(), output_tokens.into(), took_s);
        }
    }

    /// What a token costs there now; nothing before anything was measured.
    pub fn of(&self, pool: &str) -> Price {
        let Some(measured) = self.measured.get(pool) else {
            return Price::default();
        };
        let hour = self.worker_hours.get(pool).copied().unwrap_or(self.worker_hour);
        let (prompt_s, output_s) = measured.token_s();
        let price = |token_s: f64| (token_s * hour / 3600.0 * 1e12).round() as u64;
        Price {
            prompt: price(prompt_s),
            output: price(output_s),
        }
    }

    /// Seconds for a token of a prompt and of an answer, by pool.
    pub fn measured(&self) -> impl Iterator<Item = (&Arc<str>, (f64, f64))> {
        self.measured.iter().map(|(pool, measured)| (pool, measured.token_s()))
    }

    /// As it was measured before this start.
    pub fn restore(&mut self, pool: &str, prompt_s: f64, output_s: f64) {
        // As two steps of a moment: what is measured from now on soon outweighs them.
        let measured = self.measured.entry(Arc::from(pool)).or_default();
        measured.add(1.0, 0.0, prompt_s.max(0.0));
        measured.add(0.0, 1.0, output_s.max(0.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_cost_what_their_steps_took() {
        let pool: Arc<str> = Arc::from("p");
        let mut prices = Prices::new(3.6, BTreeMap::new());
        assert_eq!(prices.of("p"), Price::default());
        // 0.1 ms a prompt token, 2 ms an answer's.
        for step in 1..100_u32 {
            let (prompt, output) = (step % 7 * 32, step % 5 + 1);
            let took_s = 1e-4 * f64::from(prompt) + 2e-3 * f64::from(output);
            prices.step(&pool, prompt, output, took_s);
        }
        // A dollar is a thousand seconds.
        let price = prices.of("p");
        assert!(price.prompt.abs_diff(100_000) < 10, "{price:?}");
        assert!(price.output.abs_diff(2_000_000) < 10, "{price:?}");
        assert_eq!(
            price.of(10_000, 500),
            (price.prompt * 10_000 + price.output * 500).div_ceil(1000)
        );
        prices.worker_hours.insert("p".into(), 7.2);
        assert!(prices.of("p").output.abs_diff(4_000_000) < 20);
    }

    #[test]
    fn all_of_the_busy_time_is_somebodys() {
        let pool: Arc<str> = Arc::from("p");
        let mut prices = Prices::default();
        let (mut prompts, mut outputs, mut busy_s) = (0.0, 0.0, 0.0);
        for step in 0..50_u32 {
            // Whatever the times look like, also where a line would want a negative price.
            let (prompt, output) = (step % 3 * 100, 4 + step % 2);
            let took_s = 1e-3 / f64::from(1 + step % 4);
            prices.step(&pool, prompt, output, took_s);
            prompts += f64::from(prompt);
            outputs += f64::from(output);
            busy_s += took_s;
        }
        let (prompt_s, output_s) = prices.measured["p"].token_s();
        assert!(prompt_s >= 0.0 && output_s >= 0.0);
        assert!((prompt_s * prompts + output_s * outputs - busy_s).abs() < 1e-4 * busy_s);
    }
}
