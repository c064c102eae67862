//! What is asked for in a simulation: requests read from public traces, or made up.
//!
//! Readers take text, never files. Each error names the line.

use std::sync::Arc;

use ahash::{HashMap, HashMapExt};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;

use crate::scheduler::events::Class;

/// One request of a workload.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Since the start.
    pub arrival_s: f64,
    /// Length of its prompt.
    pub prompt_tokens: u32,
    /// Length of its answer, at least 1. Never known to a policy.
    pub output_tokens: u32,
    /// Names of the prompt's full blocks.
    pub blocks: Arc<[u64]>,
    /// Whose it is: a place in [`Workload::tenants`].
    pub tenant: u32,
    /// Whose turn comes first.
    pub class: Class,
    /// The request whose answer this one follows in a conversation.
    pub after: Option<u32>,
}

/// Requests in the order of their arrival.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    /// Them.
    pub requests: Vec<Request>,
    /// Tokens of a block that has a name.
    pub block_tokens: u32,
    /// Arrivals are known to so many seconds only; a run spreads them within.
    pub quantum_s: f64,
    /// In a closed loop, who has been answered pauses at least so long.
    pub pause_s: f64,
    /// Names of tenants.
    pub tenants: Vec<String>,
}

/// A trace that can't be read.
#[derive(Debug, thiserror::Error)]
#[error("{format} trace, line {line}: {reason}")]
pub struct TraceError {
    format: &'static str,
    line: usize,
    reason: String,
}

/// A conversation's next turn comes so long after an answer at least.
pub(super) const PAUSE_S: f64 = 1.0;

/// Mooncake's traces name blocks of so many tokens.
pub const MOONCAKE_BLOCK_TOKENS: u32 = 512;

/// Block size of workloads that name no blocks.
const DEFAULT_BLOCK_TOKENS: u32 = 16;

impl Workload {
    fn sorted(mut requests: Vec<Request>, block_tokens: u32, quantum_s: f64) -> Self {
        requests.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
        Self {
            requests,
            block_tokens,
            quantum_s,
            pause_s: 0.0,
            tenants: vec![String::new()],
        }
    }

    /// Mooncake's format: a JSON object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, the
    /// chained names of blocks of 512 tokens. Where stamps are quantised, the quantum is found.
    ///
    /// # Errors
    /// The first line that isn't such an object.
    pub fn mooncake(text: &str) -> Result<Self, TraceError> {
        #[derive(Deserialize)]
        struct Row {
            timestamp: f64,
            input_length: u32,
            output_length: u32,
            hash_ids: Vec<u64>,
        }
        let mut requests = Vec::new();
        for (line, row) in lines(text) {
            let row: Row = serde_json::from_str(row).map_err(|error| TraceError {
                format: "mooncake",
                line,
                reason: error.to_string(),
            })?;
            let full = (row.input_length / MOONCAKE_BLOCK_TOKENS) as usize;
            if row.hash_ids.len() < full {
                return Err(TraceError {
                    format: "mooncake",
                    line,
                    reason: format!("{} hash_ids for {} full blocks", row.hash_ids.len(), full),
                });
            }
            requests.push(Request {
                arrival_s: row.timestamp / 1000.0,
                prompt_tokens: row.input_length.max(1),
                output_tokens: row.output_length.max(1),
                blocks: row.hash_ids[..full].into(),
                ..Request::default()
            });
        }
        let quantum_s = quantum_s(&requests);
        Ok(Self::sorted(requests, MOONCAKE_BLOCK_TOKENS, quantum_s))
    }

    /// Azure's 2023 format: CSV with the columns `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.
    ///
    /// # Errors
    /// The first line that isn't such a row.
    pub fn azure(text: &str) -> Result<Self, TraceError> {
        let mut requests: Vec<Request> = Vec::new();
        let mut start_s = None;
        for (line, row) in lines(text).filter(|(_, row)| !row.starts_with("TIMESTAMP")) {
            let fail = |reason: &str| TraceError {
                format: "azure",
                line,
                reason: format!("{reason} in {row:?}"),
            };
            let mut fields = row.split(',');
            let at_s = fields.next().and_then(stamp_s).ok_or_else(|| fail("no time"))?;
            let mut tokens = || fields.next().and_then(|field| field.trim().parse::<u32>().ok());
            let (prompt, output) = (
                tokens().ok_or_else(|| fail("no length"))?,
                tokens().ok_or_else(|| fail("no length"))?,
            );
            requests.push(Request {
                arrival_s: at_s - *start_s.get_or_insert(at_s),
                prompt_tokens: prompt.max(1),
                output_tokens: output.max(1),
                ..Request::default()
            });
        }
        Ok(Self::sorted(requests, DEFAULT_BLOCK_TOKENS, 0.0))
    }

    /// What an engine measured: a JSON object a line with `arrival_time` (s), `input_toks`, `output_toks`.
    ///
    /// # Errors
    /// The first line that isn't such an object.
    pub fn measured(text: &str) -> Result<Self, TraceError> {
        #[derive(Deserialize)]
        struct Row {
            arrival_time: f64,
            input_toks: u32,
            output_toks: u32,
        }
        let mut requests = Vec::new();
        for (line, row) in lines(text) {
            let row: Row = serde_json::from_str(row).map_err(|error| TraceError {
                format: "measured",
                line,
                reason: error.to_string(),
            })?;
            requests.push(Request {
                arrival_s: row.arrival_time,
                prompt_tokens: row.input_toks.max(1),
                output_tokens: row.output_toks.max(1),
                ..Request::default()
            });
        }
        let start_s = requests.iter().map(|each| each.arrival_s).fold(f64::INFINITY, f64::min);
        requests.iter_mut().for_each(|each| each.arrival_s -= start_s);
        Ok(Self::sorted(requests, DEFAULT_BLOCK_TOKENS, 0.0))
    }

    /// A slice of ServeGen's clients, each with its own rate, burstiness and lengths. `duration_s` from `start_s` on.
    ///
    /// # Errors
    /// The first line or data set that can't be read.
    pub fn servegen(
        clients: &[ServegenClient<'_>],
        start_s: f64,
        duration_s: f64,
        seed: u64,
    ) -> Result<Self, TraceError> {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut requests = Vec::new();
        for (tenant, client) in (0_u32..).zip(clients) {
            client.draw(tenant, start_s, duration_s, &mut rng, &mut requests)?;
        }
        let mut workload = Self::sorted(requests, DEFAULT_BLOCK_TOKENS, 0.0);
        workload.tenants = clients.iter().map(|client| client.name.to_owned()).collect();
        Ok(workload)
    }

    /// Made up: see [`Synthetic`].
    #[must_use]
    pub fn synthetic(like: &Synthetic, seed: u64) -> Self {
        like.draw(seed)
    }

    /// From the first request to the last.
    #[must_use]
    pub fn span_s(&self) -> f64 {
        self.requests.last().map_or(0.0, |last| last.arrival_s) + self.quantum_s
    }

    /// Finds conversations: each request follows the latest one before it whose whole prompt it begins with, as far as
    /// blocks tell, when that is more than what most requests share. For closed loops.
    pub fn chain_sessions(&mut self) {
        self.pause_s = PAUSE_S;
        // Which request last ended with this block.
        let mut ends: HashMap<u64, u32> = HashMap::new();
        for at in 0..self.requests.len() {
            let (before, from) = self.requests.split_at_mut(at);
            let request = &mut from[0];
            // The first block is the system prompt's, which all share.
            let shared = request.blocks.iter().skip(1).rev().find_map(|block| ends.remove(block));
            request.after = shared.filter(|&earlier| before[earlier as usize].arrival_s < request.arrival_s);
            if let Some(last) = request.blocks.last() {
                ends.insert(*last, at as u32);
            }
        }
    }
}

fn lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty())
}

/// Seconds of "2023-11-16 18:17:03.9799600", since some midnight before.
fn stamp_s(text: &str) -> Option<f64> {
    let (day, time) = text.trim().split_once(' ')?;
    let mut date = day.split('-').map(|field| field.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    // Days since a March long ago, by the calendar that repeats every 400 years.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    let mut clock = time.split(':');
    let hours: f64 = clock.next()?.parse().ok()?;
    let minutes: f64 = clock.next()?.parse().ok()?;
    let seconds: f64 = clock.next()?.parse().ok()?;
    Some(days as f64 * 86_400.0 + hours * 3600.0 + minutes * 60.0 + seconds)
}

/// Stamps that should be the same differ by so much, in traces that were quantised by a clock.
const STAMP_SLACK_S: f64 = 0.01;

/// What all arrivals are a multiple of, nearly, when it is a second or more; 0 otherwise. `requests` in any order.
fn quantum_s(requests: &[Request]) -> f64 {
    let mut stamps: Vec<f64> = requests.iter().map(|request| request.arrival_s).collect();
    stamps.sort_unstable_by(f64::total_cmp);
    stamps.dedup_by(|later, earlier| *later - *earlier <= STAMP_SLACK_S);
    let (Some(&first), Some(&last)) = (stamps.first(), stamps.last()) else {
        return 0.0;
    };
    let mut gaps: Vec<f64> = stamps.windows(2).map(|pair| pair[1] - pair[0]).collect();
    gaps.sort_unstable_by(f64::total_cmp);
    // The most usual gap, where most quanta have an arrival; the least, where many have none.
    let candidates = [gaps.get(gaps.len() / 2), gaps.first()].into_iter().flatten();
    let fitting = candidates.map(|&gap_s| (last - first) / ((last - first) / gap_s).round());
    let is_quantum = |&quantum_s: &f64| {
        let off_s = |stamp: f64| (stamp - first) - ((stamp - first) / quantum_s).round() * quantum_s;
        quantum_s >= 1.0 && stamps.iter().all(|&stamp| off_s(stamp).abs() <= STAMP_SLACK_S)
    };
    // To the millisecond that stamps are told in.
    let found = fitting.into_iter().find(is_quantum);
    found.map_or(0.0, |quantum_s| (quantum_s * 1e3).round() / 1e3)
}

/// One client of a ServeGen pool: the text of its two files.
#[derive(Clone, Copy, Debug)]
pub struct ServegenClient<'a> {
    /// For people.
    pub name: &'a str,
    /// `chunk-N-trace.csv`: window start (s), rate (1/s), CV, `Gamma` or `Weibull`, shape, scale.
    pub trace: &'a str,
    /// `chunk-N-dataset.json`, unpacked: lengths by window.
    pub dataset: &'a str,
}

/// Draws by cumulative probability.
struct Lengths(Vec<(f64, u32)>);

impl Lengths {
    /// From `"{17: 0.25, 30: 0.75}"`.
    fn parse(text: &str) -> Option<Self> {
        let mut sum = 0.0;
        let mut cumulative = Vec::new();
        for pair in text
            .trim()
            .trim_matches(['{', '}'])
            .split(',')
            .filter(|pair| !pair.trim().is_empty())
        {
            let (value, share) = pair.split_once(':')?;
            sum += share.trim().parse::<f64>().ok()?;
            cumulative.push((sum, value.trim().trim_matches(['\'', '"']).parse::<f64>().ok()? as u32));
        }
        (sum > 0.0).then_some(Self(cumulative))
    }

    fn at(&self, uniform: f64) -> u32 {
        let sum = self.0.last().map_or(0.0, |last| last.0);
        let at = self.0.partition_point(|each| each.0 < uniform * sum);
        self.0.get(at).or(self.0.last()).map_or(1, |each| each.1).max(1)
    }
}

impl ServegenClient<'_> {
    fn draw(
        &self,
        tenant: u32,
        start_s: f64,
        duration_s: f64,
        rng: &mut StdRng,
        out: &mut Vec<Request>,
    ) -> Result<(), TraceError> {
        let lengths = self.lengths()?;
        let fail = |line: usize, reason: &str| TraceError {
            format: "servegen",
            line,
            reason: format!("{reason} (client {})", self.name),
        };
        let mut rows = Vec::new();
        for (line, row) in lines(self.trace) {
            let fields: Vec<&str> = row.split(',').map(str::trim).collect();
            let number = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok());
            let window_s = number(0).ok_or_else(|| fail(line, "no window start"))?;
            // Blank windows are gaps in the log.
            let rate = number(1).filter(|rate| rate.is_finite() && *rate > 0.0);
            rows.push((
                window_s,
                rate,
                number(2).filter(|cv| cv.is_finite() && *cv > 0.0).unwrap_or(1.0),
            ));
        }
        for (at, &(window_s, rate, cv)) in rows.iter().enumerate() {
            let until_s = rows.get(at + 1).map_or(window_s + 600.0, |next| next.0);
            let (from_s, until_s) = (window_s.max(start_s), until_s.min(start_s + duration_s));
            let Some(rate) = rate.filter(|_| from_s < until_s) else {
                continue;
            };
            let mut at_s = from_s;
            loop {
                at_s += gamma_gap(rng, rate, cv);
                if at_s >= until_s {
                    break;
                }
                // Both lengths of one variate, as upstream draws them.
                let uniform = rng.random::<f64>();
                let (input, output) = nearest(&lengths, at_s);
                out.push(Request {
                    arrival_s: at_s - start_s,
                    prompt_tokens: input.at(uniform),
                    output_tokens: output.at(uniform),
                    tenant,
                    ..Request::default()
                });
            }
        }
        Ok(())
    }

    fn lengths(&self) -> Result<Vec<(f64, Lengths, Lengths)>, TraceError> {
        let fail = |reason: String| TraceError {
            format: "servegen",
            line: 1,
            reason: format!("{reason} (data set of client {})", self.name),
        };
        let windows: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(self.dataset).map_err(|error| fail(error.to_string()))?;
        let mut filled = Vec::new();
        for (start, window) in &windows {
            let start_s = start
                .parse::<f64>()
                .map_err(|error| fail(format!("window {start:?}: {error}")))?;
            let field = |name: &str| {
                window
                    .get(name)
                    .and_then(serde_json::Value::as_str)
                    .and_then(Lengths::parse)
            };
            if let (Some(input), Some(output)) = (field("input_tokens"), field("output_tokens")) {
                filled.push((start_s, input, output));
            }
        }
        if filled.is_empty() {
            return Err(fail("no window with lengths".to_owned()));
        }
        Ok(filled)
    }
}

/// The lengths of the filled window that is nearest.
fn nearest(windows: &[(f64, Lengths, Lengths)], at_s: f64) -> (&Lengths, &Lengths) {
    let mut best = &windows[0];
    for each in windows {
        if (each.0 - at_s).abs() < (best.0 - at_s).abs() {
            best = each;
        }
    }
    (&best.1, &best.2)
}

/// A gap between arrivals of that rate, Gamma distributed with that coefficient of variation.
fn gamma_gap(rng: &mut impl Rng, rate: f64, cv: f64) -> f64 {
    let shape = 1.0 / (cv * cv);
    gamma(rng, shape) / (shape * rate)
}

/// Marsaglia and Tsang's method.
fn gamma(rng: &mut impl Rng, shape: f64) -> f64 {
    if shape < 1.0 {
        let boost = (1.0 - rng.random::<f64>()).powf(1.0 / shape);
        return gamma(rng, shape + 1.0) * boost;
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = normal(rng);
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && (1.0 - rng.random::<f64>()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

pub(super) fn normal(rng: &mut impl Rng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
}

/// A made-up workload: Poisson arrivals, log-normal lengths, prompts that begin with one of some roots.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Synthetic {
    /// How many.
    pub requests: u32,
    /// Arrivals a second.
    pub rate_per_s: f64,
    /// Mean length of prompts.
    pub prompt_tokens: f64,
    /// Mean length of answers.
    pub output_tokens: f64,
    /// Standard deviation of the lengths' logarithms.
    pub sigma: f64,
    /// Different beginnings.
    pub roots: u32,
    /// Tokens that those who begin alike share.
    pub shared_tokens: u32,
    /// Tokens of a block that has a name.
    pub block_tokens: u32,
    /// Tenants; the first asks as much as all others together.
    pub tenants: u32,
    /// Share of requests of class batch; the others are interactive.
    pub batch_share: f64,
    /// In a closed loop, so many clients that ask again as soon as they are answered; 0 = arrivals at the rate.
    pub clients: u32,
}

impl Default for Synthetic {
    fn default() -> Self {
        Self {
            requests: 10_000,
            rate_per_s: 20.0,
            prompt_tokens: 1000.0,
            output_tokens: 200.0,
            sigma: 0.8,
            roots: 32,
            shared_tokens: 512,
            block_tokens: 64,
            tenants: 1,
            batch_share: 0.0,
            clients: 0,
        }
    }
}

impl Synthetic {
    /// From JSON; fields left out have their defaults.
    ///
    /// # Errors
    /// Not JSON, an unknown field, or a value that can't be drawn from.
    pub fn parse(json: &str) -> Result<Self, TraceError> {
        let fail = |reason: String| TraceError {
            format: "synthetic",
            line: 1,
            reason,
        };
        let like: Self = serde_json::from_str(json).map_err(|error| fail(error.to_string()))?;
        let lengths = [like.rate_per_s, like.prompt_tokens, like.output_tokens];
        if like.requests == 0 || !lengths.iter().all(|value| value.is_finite() && *value > 0.0) {
            return Err(fail(
                "requests, rate_per_s, prompt_tokens and output_tokens must be above 0".to_owned(),
            ));
        }
        if !(like.sigma.is_finite() && (0.0..=4.0).contains(&like.sigma)) {
            return Err(fail(format!("sigma must be 0 to 4 (is {})", like.sigma)));
        }
        Ok(like)
    }

    fn draw(&self, seed: u64) -> Workload {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut at_s = 0.0;
        let length = |rng: &mut StdRng, mean: f64| {
            let normal = normal(rng);
            (mean * (self.sigma * normal - self.sigma * self.sigma / 2.0).exp())
                .round()
                .clamp(1.0, 1e6) as u32
        };
        let block_tokens = self.block_tokens.max(1);
        let shared_blocks = self.shared_tokens / block_tokens;
        let mut fresh = u64::from(self.roots) * u64::from(shared_blocks + 1);
        let requests = (0..self.requests)
            .map(|number| {
                if self.clients == 0 {
                    at_s -= (1.0 - rng.random::<f64>()).ln() / self.rate_per_s;
                }
                let own = length(&mut rng, (self.prompt_tokens - f64::from(self.shared_tokens)).max(1.0));
                let prompt_tokens = self.shared_tokens + own;
                let root = u64::from(rng.random_range(0..self.roots.max(1)));
                let full = prompt_tokens / block_tokens;
                let blocks = (0..full)
                    .map(|depth| {
                        if depth < shared_blocks {
                            return root * u64::from(shared_blocks) + u64::from(depth);
                        }
                        fresh += 1;
                        fresh
                    })
                    .collect();
                let others = self.tenants.max(1);
                let tenant = if rng.random_bool(0.5) {
                    0
                } else {
                    rng.random_range(0..others)
                };
                let class = if rng.random_bool(self.batch_share.clamp(0.0, 1.0)) {
                    Class::Batch
                } else {
                    Class::Interactive
                };
                Request {
                    arrival_s: at_s,
                    prompt_tokens,
                    output_tokens: length(&mut rng, self.output_tokens),
                    blocks,
                    tenant,
                    class,
                    after: number.checked_sub(self.clients).filter(|_| self.clients > 0),
                }
            })
            .collect();
        let mut workload = Workload::sorted(requests, block_tokens, 0.0);
        workload.tenants = (0..self.tenants.max(1))
            .map(|number| format!("tenant-{number}"))
            .collect();
        workload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_of_a_quantum_may_be_off_by_some_milliseconds() {
        let quantum = |stamps_ms: &[u64]| {
            let row =
                |ms: &u64| format!(r#"{{"timestamp": {ms}, "input_length": 1, "output_length": 1, "hash_ids": []}}"#);
            let text: Vec<String> = stamps_ms.iter().map(row).collect();
            Workload::mooncake(&text.join("\n")).expect("readable").quantum_s
        };
        assert_eq!(quantum(&[0, 0, 3000, 5999, 6000, 9001, 12003, 14999]), 3.0);
        // Not every quantum has an arrival.
        assert_eq!(quantum(&[0, 6000, 9000, 15_001, 21_000]), 3.0);
        assert_eq!(quantum(&[0, 0, 3000, 5900, 6000]), 0.0);
        assert_eq!(quantum(&[0, 40, 277, 471, 529, 2469]), 0.0);
        assert_eq!((quantum(&[7, 7]), quantum(&[5])), (0.0, 0.0));
    }

    #[test]
    fn mooncake_rows_become_requests() {
        let text = concat!(
            "{\"timestamp\": 3000, \"input_length\": 1100, \"output_length\": 5, \"hash_ids\": [0, 7, 8]}\n\n",
            "{\"timestamp\": 0, \"input_length\": 100, \"output_length\": 0, \"hash_ids\": [0]}\n",
        );
        let workload = Workload::mooncake(text).expect("readable");
        assert_eq!(workload.quantum_s, 3.0);
        assert_eq!(workload.requests.len(), 2);
        let (first, second) = (&workload.requests[0], &workload.requests[1]);
        assert_eq!(
            (
                first.arrival_s,
                first.prompt_tokens,
                first.output_tokens,
                first.blocks.len()
            ),
            (0.0, 100, 1, 0)
        );
        assert_eq!(
            (second.arrival_s, &second.blocks[..]),
            (3.0, &[0_u64, 7][..]),
            "the last block is not full"
        );
        let error = Workload::mooncake("{\"timestamp\": 0}")
            .expect_err("no lengths")
            .to_string();
        assert!(error.contains("line 1") && error.contains("input_length"), "{error}");
        let error = Workload::mooncake("\n{\"timestamp\":0,\"input_length\":600,\"output_length\":1,\"hash_ids\":[]}");
        assert!(error.expect_err("no hashes").to_string().contains("line 2"));
    }

    #[test]
    fn azure_rows_become_requests() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
            2023-11-30 23:59:59.5000000,374,44\n2023-12-01 00:00:01.0000000,396,109\n";
        let workload = Workload::azure(text).expect("readable");
        assert_eq!(workload.requests[1].arrival_s, 1.5);
        assert_eq!(
            (workload.requests[1].prompt_tokens, workload.requests[1].output_tokens),
            (396, 109)
        );
        let error = Workload::azure("2023-11-30 23:59:59,many,1")
            .expect_err("no number")
            .to_string();
        assert!(error.contains("line 1") && error.contains("many"), "{error}");
        assert!(Workload::azure("yesterday,1,1").is_err());
    }

    #[test]
    fn measured_rows_start_at_nought() {
        let text = "{\"input_toks\": 5, \"output_toks\": 6, \"arrival_time\": 1787267980.5}\n";
        let workload = Workload::measured(text).expect("readable");
        assert_eq!(
            (workload.requests[0].arrival_s, workload.requests[0].prompt_tokens),
            (0.0, 5)
        );
    }

    #[test]
    fn servegen_clients_keep_their_rates_and_lengths() {
        let client = ServegenClient {
            name: "7",
            trace: "0,5.0,2.0,Gamma,0.25,0.8\n600,,,,,\n1200,1.0,1.0,Weibull,1,1\n",
            dataset: r#"{"0": {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{10: 1.0}"}, "21600": {}}"#,
        };
        let workload = Workload::servegen(&[client], 0.0, 1800.0, 1).expect("readable");
        let in_window = |from: f64| {
            let inside = |each: &&Request| each.arrival_s >= from && each.arrival_s < from + 600.0;
            workload.requests.iter().filter(inside).count()
        };
        assert!((2700..3300).contains(&in_window(0.0)), "{}", in_window(0.0));
        assert_eq!(in_window(600.0), 0);
        assert!((500..700).contains(&in_window(1200.0)), "{}", in_window(1200.0));
        assert!(workload
            .requests
            .iter()
            .all(|each| [100, 300].contains(&each.prompt_tokens) && each.output_tokens == 10));
        let bad = ServegenClient {
            dataset: "{}",
            ..client
        };
        assert!(Workload::servegen(&[bad], 0.0, 1.0, 1).is_err());
    }

    #[test]
    fn made_up_requests_are_as_asked_for() {
        let like = Synthetic {
            requests: 20_000,
            tenants: 3,
            batch_share: 0.25,
            ..Synthetic::default()
        };
        let workload = Workload::synthetic(&like, 9);
        let mean = |of: &dyn Fn(&Request) -> f64| workload.requests.iter().map(of).sum::<f64>() / 20_000.0;
        assert!((mean(&|each| f64::from(each.prompt_tokens)) / like.prompt_tokens - 1.0).abs() < 0.05);
        assert!((mean(&|each| f64::from(each.output_tokens)) / like.output_tokens - 1.0).abs() < 0.05);
        assert!((workload.span_s() * like.rate_per_s / 20_000.0 - 1.0).abs() < 0.05);
        assert!((mean(&|each| f64::from(u8::from(each.class == Class::Batch))) - 0.25).abs() < 0.02);
        assert!(workload
            .requests
            .iter()
            .all(|each| each.blocks.len() as u32 == each.prompt_tokens / 64));
        let again = Workload::synthetic(&like, 9);
        assert!(workload
            .requests
            .iter()
            .zip(&again.requests)
            .all(|(a, b)| a.arrival_s == b.arrival_s && a.blocks == b.blocks));
    }

    #[test]
    fn conversations_are_found_by_what_they_begin_with() {
        let row = |at: u32, blocks: &[u64]| Request {
            arrival_s: f64::from(at),
            blocks: blocks.into(),
            ..Request::default()
        };
        let mut workload = Workload {
            requests: vec![
                row(0, &[0, 1, 2]),
                row(1, &[0, 9]),
                row(2, &[0, 1, 2, 3, 4]),
                row(3, &[0, 1, 2, 3, 4, 5]),
            ],
            ..Workload::default()
        };
        workload.chain_sessions();
        let after: Vec<_> = workload.requests.iter().map(|each| each.after).collect();
        assert_eq!(after, [None, None, Some(0), Some(2)]);
    }
}
