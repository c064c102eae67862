//! What the scheduler's configuration sets.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::events::Ask;
use crate::place;

/// What the configuration sets.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Asks that wait at once.
    pub max_queued: usize,
    /// How often a worker reports, at most.
    pub heartbeat_s: f64,
    /// Reports of all workers in a second, about: in a larger fleet each reports less often.
    pub reports_per_s: f64,
    /// Reports missed in a row before a silent worker is out.
    pub heartbeats_missed: u32,
    /// Time for a router to come back before its leases end.
    pub router_grace_s: f64,
    /// Leases for a worker, as a multiple of its slots.
    pub queue_factor: f64,
    /// The rule that places.
    #[serde(deserialize_with = "by_name")]
    pub placement: place::Policy,
    /// From the ask to the first token, for each class; asks may say otherwise. What a class is due by orders the queue.
    pub ttft_target_s: [f64; 3],
    /// Between tokens after the first, for each class; asks may say otherwise.
    pub tpot_target_s: [f64; 3],
    /// A worker is given the next prompt when the ones that it has need no more than this, or than filling a step takes.
    pub dispatch_ahead_s: f64,
    /// What was never started and cannot meet its own deadline or target any more is refused instead of served late.
    pub shed: bool,
    /// Batch requests are put aside for interactive ones.
    pub preempt: bool,
    /// Workers are told how many prompt tokens to compute beside decoding: at least and at most. 0 at most = they are not.
    pub chunk_tokens: [u32; 2],
    /// Predicted prefill that a pool is given, as a share of its workers' time; 0 = no limit.
    pub prefill_share: f64,
    /// Tokens that a tenant may have ahead of others in a round.
    pub fair_quantum_tokens: f64,
    /// Shares of tenants; 1 for those not named.
    pub tenant_weights: BTreeMap<String, f64>,
    /// Lend room to routers while nothing waits.
    pub credits: bool,
    /// When prompts are computed on other workers than their answers.
    pub disaggregation: Disaggregation,
    /// Prompt tokens to be computed from which that is weighed.
    pub disaggregation_min_tokens: u32,
}

/// When a prompt is computed on a worker that is there for prompts only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Disaggregation {
    /// Where it delays least, the way of the KV included.
    #[default]
    Auto,
    /// Whenever there is one.
    Always,
    /// Never.
    Off,
}

fn by_name<'de, D: serde::Deserializer<'de>>(from: D) -> Result<place::Policy, D::Error> {
    let name = String::deserialize(from)?;
    name.parse().map_err(serde::de::Error::custom)
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            max_queued: 4096,
            heartbeat_s: 0.25,
            reports_per_s: 500.0,
            heartbeats_missed: 12,
            router_grace_s: 5.0,
            queue_factor: 1.25,
            placement: place::Policy::default(),
            ttft_target_s: [1.0, 5.0, 60.0],
            tpot_target_s: [0.1, 0.2, 1.0],
            dispatch_ahead_s: 0.1,
            shed: true,
            preempt: true,
            chunk_tokens: [128, 8192],
            prefill_share: 0.0,
            fair_quantum_tokens: 16_384.0,
            tenant_weights: BTreeMap::new(),
            credits: false,
            disaggregation: Disaggregation::default(),
            disaggregation_min_tokens: 1024,
        }
    }
}

impl Policy {
    /// Whether room is lent: routers place by the one rule that they know.
    pub fn lends(&self) -> bool {
        self.credits && self.placement == place::Policy::MarginalDelay
    }

    /// A worker that is silent for so long is out, in a fleet in which each reports at `heartbeat_s`.
    pub fn silence_s(&self) -> f64 {
        self.heartbeat_s * f64::from(self.heartbeats_missed)
    }

    /// How often each of so many workers should report. What a report costs is bounded by this, whatever the fleet's size;
    /// leases, releases and progress come by themselves, so that placement loses nothing by older reports.
    pub(super) fn pace_s(&self, workers: usize) -> f64 {
        self.heartbeat_s.max(workers as f64 / self.reports_per_s)
    }

    /// Between the tokens of that one's answer.
    pub fn tpot_target_s(&self, ask: &Ask) -> f64 {
        ask.tpot_target_s.unwrap_or(self.tpot_target_s[ask.class.rank()])
    }
}
