//! What a simulation showed: a record for each request, and their sums.

use serde::Serialize;

use super::workload::Request;
use crate::scheduler::events::Class;

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fate {
    /// It has not.
    #[default]
    Pending,
    /// With its last token.
    Finished,
    /// Refused, or given up before it was started.
    Rejected,
}

/// One request's life.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// When it came.
    pub arrival_s: f64,
    /// When its first token was due.
    pub due_s: f64,
    /// When it came.
    pub first_token_s: Option<f64>,
    /// When its last token came.
    pub finished_s: Option<f64>,
    /// Length of its prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens that were in KV.
    pub cached_tokens: u32,
    /// Length of its answer.
    pub output_tokens: u32,
    /// What was told of that beforehand; 0 = nothing.
    pub expected_output_tokens: u32,
    /// Whose it was.
    pub tenant: u32,
    /// Its class.
    pub class: Class,
    /// Where it ran last.
    pub worker: u32,
    /// Workers lost under it.
    pub attempts: u32,
    /// How it ended.
    pub fate: Fate,
}

impl Record {
    /// Of a request that comes at `arrival_s`.
    #[must_use]
    pub fn new(request: &Request, arrival_s: f64) -> Self {
        Self {
            arrival_s,
            prompt_tokens: request.prompt_tokens,
            output_tokens: request.output_tokens,
            tenant: request.tenant,
            class: request.class,
            ..Self::default()
        }
    }

    /// Arrival to first token.
    #[must_use]
    pub fn ttft_s(&self) -> Option<f64> {
        self.first_token_s.map(|at_s| at_s - self.arrival_s)
    }

    /// First token to last.
    #[must_use]
    pub fn decode_s(&self) -> Option<f64> {
        Some(self.finished_s? - self.first_token_s?)
    }

    /// Mean time between tokens after the first; None for answers of one token.
    #[must_use]
    pub fn tpot_s(&self) -> Option<f64> {
        let gaps = self.output_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some(self.decode_s()? / f64::from(gaps))
    }

    /// Whether it finished with its first token when due and its pace within the target.
    #[must_use]
    pub fn good(&self, tpot_target_s: f64) -> bool {
        self.fate == Fate::Finished
            && self.first_token_s.is_some_and(|at_s| at_s <= self.due_s)
            && self.tpot_s().is_none_or(|tpot_s| tpot_s <= tpot_target_s)
    }
}

/// All records of a run.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// In the workload's order.
    pub records: Vec<Record>,
    /// Requests that gave up their KV and computed it again.
    pub preemptions: u64,
    /// Requests whose prompt was computed on another worker than their answer.
    pub parted: u64,
    /// Placements by routers without asking.
    pub unasked: u64,
    /// Steps of all workers.
    pub steps: u64,
    /// Seconds in which workers computed, over all.
    pub busy_s: f64,
    /// From the first arrival to the end.
    pub span_s: f64,
    /// What goodput asked for.
    pub tpot_target_s: f64,
}

/// Of some values: empty is all zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// Half are below.
    pub p50: f64,
    /// Nine in ten are below.
    pub p90: f64,
    /// 99 in a hundred are below.
    pub p99: f64,
}

impl Spread {
    /// Of these values.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_unstable_by(f64::total_cmp);
        let last = values.len() - 1;
        // Linear between ranks, as people expect of a median of two.
        let at = |share: f64| {
            let rank = share * last as f64;
            let (low, high) = (rank.floor() as usize, rank.ceil() as usize);
            values[low] + (values[high] - values[low]) * rank.fract()
        };
        Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
        }
    }
}

/// A run in figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Requests.
    pub requests: u64,
    /// Those that finished.
    pub finished: u64,
    /// Those that were refused or given up.
    pub rejected: u64,
    /// Share of all requests that met both targets.
    pub goodput: f64,
    /// Seconds to the first token, of those that had one.
    pub ttft_s: Spread,
    /// Seconds between tokens, of those that finished.
    pub tpot_s: Spread,
    /// Seconds from arrival to the last token.
    pub latency_s: Spread,
    /// Share of prompt tokens that were in KV, of requests that were started.
    pub hit: f64,
    /// Tokens of finished answers per second.
    pub output_tokens_per_s: f64,
    /// Times that a request gave up its KV.
    pub preemptions: u64,
    /// Requests whose prompt was computed on another worker than their answer.
    pub parted: u64,
    /// Placements by routers without asking, over requests.
    pub unasked: f64,
    /// Steps of all workers.
    pub steps: u64,
    /// How long it took, in the simulation.
    pub span_s: f64,
}

impl Outcome {
    /// In figures, over the records that `wanted` says.
    #[must_use]
    pub fn summary(&self, wanted: impl Fn(&Record) -> bool) -> Summary {
        let records: Vec<&Record> = self.records.iter().filter(|each| wanted(each)).collect();
        let started = records.iter().filter(|each| each.first_token_s.is_some());
        let prompt: u64 = started.clone().map(|each| u64::from(each.prompt_tokens)).sum();
        let cached: u64 = started.map(|each| u64::from(each.cached_tokens)).sum();
        let finished = records.iter().filter(|each| each.fate == Fate::Finished);
        let output: u64 = finished.clone().map(|each| u64::from(each.output_tokens)).sum();
        let good = records.iter().filter(|each| each.good(self.tpot_target_s)).count();
        Summary {
            requests: records.len() as u64,
            finished: finished.clone().count() as u64,
            rejected: records.iter().filter(|each| each.fate == Fate::Rejected).count() as u64,
            goodput: good as f64 / records.len().max(1) as f64,
            ttft_s: Spread::of(records.iter().filter_map(|each| each.ttft_s()).collect()),
            tpot_s: Spread::of(finished.clone().filter_map(|each| each.tpot_s()).collect()),
            latency_s: Spread::of(
                finished
                    .filter_map(|each| Some(each.finished_s? - each.arrival_s))
                    .collect(),
            ),
            hit: cached as f64 / (prompt as f64).max(1.0),
            output_tokens_per_s: output as f64 / self.span_s.max(1e-9),
            preemptions: self.preemptions,
            parted: self.parted,
            unasked: self.unasked as f64 / self.records.len().max(1) as f64,
            steps: self.steps,
            span_s: self.span_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spreads_are_between_ranks() {
        let spread = Spread::of(vec![4.0, 1.0, 3.0, 2.0]);
        assert_eq!((spread.mean, spread.p50), (2.5, 2.5));
        assert!((spread.p99 - 3.97).abs() < 1e-9);
        assert_eq!(Spread::of(Vec::new()), Spread::default());
    }

    #[test]
    fn good_is_finished_in_time_and_at_pace() {
        let record = Record {
            due_s: 2.0,
            first_token_s: Some(2.0),
            finished_s: Some(3.0),
            output_tokens: 11,
            fate: Fate::Finished,
            ..Record::default()
        };
        assert!(record.good(0.1));
        assert!(!record.good(0.099));
        assert!(!Record {
            due_s: 1.9,
            ..record.clone()
        }
        .good(0.1));
        assert!(!Record {
            fate: Fate::Rejected,
            ..record.clone()
        }
        .good(0.1));
        assert!(
            Record {
                output_tokens: 1,
                finished_s: Some(2.0),
                ..record
            }
            .good(0.001),
            "one token has no pace"
        );
    }
}
