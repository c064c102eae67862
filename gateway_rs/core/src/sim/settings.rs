//! A simulation's settings as people and other languages write them: one JSON object, every field checked.

use std::sync::Arc;

use serde::Deserialize;

use super::engine::{Chunk, EngineConfig, Order, CHUNK_MOST, HOST_BLOCK_MS};
use super::outcome::Outcome;
use super::workload::Workload;
use super::{Config, Fault, Group, OnProgress};
use crate::cost::{CostTable, TableError};
use crate::place::{self, UnknownPolicy};
use crate::scheduler::{self, Core};

/// Settings that can't be run.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// Not such an object.
    #[error("simulation settings: {0}")]
    Json(#[from] serde_json::Error),
    /// A cost table that isn't one.
    #[error(transparent)]
    Table(#[from] TableError),
    /// A placement rule that isn't one.
    #[error(transparent)]
    Policy(#[from] UnknownPolicy),
    /// A value out of its range.
    #[error("{field} must be {range} (is {value})")]
    Range {
        /// Which.
        field: &'static str,
        /// What it may be.
        range: &'static str,
        /// What it is.
        value: String,
    },
}

/// One group of workers that are alike.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GroupSettings {
    /// Their pool.
    pub pool: String,
    /// How many.
    pub workers: u32,
    /// Of these, so many are for prompts only.
    pub prefill_workers: u32,
    /// KV of one token, in bytes.
    pub kv_token_bytes: u32,
    /// What a worker's network carries, in gigabytes a second.
    pub network_gb_per_s: f64,
    /// A built-in table's name.
    pub cost_table: String,
    /// A table of one's own, in place of a built-in one.
    pub table: Option<CostTable>,
    /// All times are multiplied by this.
    pub slowdown: f64,
    /// Requests that may be started at once.
    pub max_batch: u32,
    /// The most prompt tokens in a step, whoever sizes it.
    pub chunk_tokens: u32,
    /// Blocks on the device; 0 = as many as the table says.
    pub kv_blocks: u32,
    /// Blocks of the host tier.
    pub host_blocks: u32,
    /// What loading a block from the host adds to a step.
    pub host_block_ms: f64,
}

impl Default for GroupSettings {
    fn default() -> Self {
        Self {
            pool: "pool".to_owned(),
            workers: 8,
            prefill_workers: 0,
            // Llama 3 8B with KV of 16 bits, and 100 Gbit/s.
            kv_token_bytes: 131_072,
            network_gb_per_s: 12.5,
            cost_table: "a100-llama3-8b".to_owned(),
            table: None,
            slowdown: 1.0,
            max_batch: 256,
            chunk_tokens: CHUNK_MOST,
            kv_blocks: 0,
            host_blocks: 0,
            host_block_ms: HOST_BLOCK_MS,
        }
    }
}

/// See the module's text; fields left out have these defaults.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Who serves.
    pub groups: Vec<GroupSettings>,
    /// Routers. They place by themselves, as live ones do, when the scheduler's settings say `credits`.
    pub routers: u32,
    /// What a message takes between a router and the scheduler.
    pub router_delay_s: f64,
    /// What the live scheduler's configuration would say, but for the next field and `shed`.
    pub scheduler: scheduler::Policy,
    /// The placement rule.
    pub policy: String,
    /// `fcfs`, `edf`, `sjf` or `shortest_output`.
    pub order: String,
    /// `dynamic`, `scheduler`, or tokens of a step.
    pub chunk: String,
    /// What can't be in time is given up by the scheduler.
    pub shed: bool,
    /// And by the workers, before they begin it. Live ones do not.
    pub worker_shed: bool,
    /// Arrivals come so many times as fast as in the workload.
    pub speed: f64,
    /// A turn of a conversation comes when the one before is answered.
    pub closed_loop: bool,
    /// Mean age of what the scheduler knows from workers.
    pub staleness_s: f64,
    /// The first token is due after this...
    pub ttft_target_s: f64,
    /// ...or after so many times what the prompt takes alone.
    pub ttft_times_alone: f64,
    /// Between tokens.
    pub tpot_target_s: f64,
    /// Standard deviation of the logarithm of expected over true answer lengths; null = nobody knows lengths.
    pub length_sigma: Option<f64>,
    /// (when, which worker, seconds down).
    pub faults: Vec<(f64, u32, f64)>,
    /// Draws arrivals and all else.
    pub seed: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            groups: vec![GroupSettings::default()],
            routers: 1,
            router_delay_s: 0.0,
            scheduler: scheduler::Policy::default(),
            policy: place::Policy::default().to_string(),
            order: "edf".to_owned(),
            chunk: "dynamic".to_owned(),
            shed: true,
            worker_shed: true,
            speed: 1.0,
            closed_loop: false,
            staleness_s: 0.0,
            ttft_target_s: 2.0,
            ttft_times_alone: 3.0,
            tpot_target_s: 0.1,
            length_sigma: None,
            faults: Vec::new(),
            seed: 1,
        }
    }
}

impl Settings {
    /// From JSON.
    ///
    /// # Errors
    /// Not JSON, or a field that isn't one of these.
    pub fn parse(json: &str) -> Result<Self, SettingsError> {
        Ok(serde_json::from_str(json)?)
    }

    /// Checked, for a workload with blocks of so many tokens.
    ///
    /// # Errors
    /// The first value that can't be run.
    pub fn check(&self, block_tokens: u32) -> Result<(Config, scheduler::Policy), SettingsError> {
        let positive = |field, value: f64| in_range(field, "a number above 0", value, |value| value > 0.0);
        let natural = |field, value: f64| in_range(field, "a number, 0 or above", value, |value| value >= 0.0);
        positive("speed", self.speed)?;
        positive("tpot_target_s", self.tpot_target_s)?;
        natural("staleness_s", self.staleness_s)?;
        natural("router_delay_s", self.router_delay_s)?;
        in_range("routers", "1 to 64", f64::from(self.routers), |value| {
            (1.0..=64.0).contains(&value)
        })?;
        natural("ttft_target_s", self.ttft_target_s)?;
        natural("ttft_times_alone", self.ttft_times_alone)?;
        natural("length_sigma", self.length_sigma.unwrap_or(0.0))?;
        let workers: u32 = self.groups.iter().map(|group| group.workers).sum();
        in_range("workers", "1 to 4096 in all", f64::from(workers), |value| {
            (1.0..=4096.0).contains(&value)
        })?;
        for &(at_s, worker, down_s) in &self.faults {
            natural("faults: time", at_s)?;
            positive("faults: seconds down", down_s)?;
            in_range("faults: worker", "one of the workers", f64::from(worker), |value| {
                value < f64::from(workers)
            })?;
        }
        let groups: Result<Vec<Group>, SettingsError> = self
            .groups
            .iter()
            .map(|group| self.group(group, block_tokens))
            .collect();
        let faults = self
            .faults
            .iter()
            .map(|&(at_s, worker, down_s)| Fault { at_s, worker, down_s });
        let config = Config {
            groups: groups?,
            routers: self.routers,
            router_delay_s: self.router_delay_s,
            speed: self.speed,
            closed_loop: self.closed_loop,
            staleness_s: self.staleness_s,
            ttft_target_s: self.ttft_target_s,
            ttft_times_alone: self.ttft_times_alone,
            tpot_target_s: self.tpot_target_s,
            length_sigma: self.length_sigma,
            faults: faults.collect(),
            seed: self.seed,
        };
        let decides = scheduler::Policy {
            placement: self.policy.parse()?,
            shed: self.shed,
            ..self.scheduler.clone()
        };
        Ok((config, decides))
    }

    /// Runs a workload; see [`super::run`].
    ///
    /// # Errors
    /// As [`Self::check`].
    pub fn run(&self, workload: &Workload, progress: OnProgress<'_>) -> Result<Option<Outcome>, SettingsError> {
        let (config, decides) = self.check(workload.block_tokens)?;
        let core = Core::new(decides, self.seed, 0.0, 1);
        Ok(super::run(&config, workload, core, progress))
    }

    fn group(&self, group: &GroupSettings, block_tokens: u32) -> Result<Group, SettingsError> {
        in_range("slowdown", "a number above 0", group.slowdown, |value| value > 0.0)?;
        in_range("host_block_ms", "a number, 0 or above", group.host_block_ms, |value| {
            value >= 0.0
        })?;
        in_range(
            "prefill_workers",
            "fewer than workers",
            f64::from(group.prefill_workers),
            |value| value == 0.0 || value < f64::from(group.workers),
        )?;
        in_range(
            "network_gb_per_s",
            "a number above 0",
            group.network_gb_per_s,
            |value| value > 0.0,
        )?;
        in_range("max_batch", "1 or above", f64::from(group.max_batch), |value| {
            value >= 1.0
        })?;
        in_range("chunk_tokens", "1 or above", f64::from(group.chunk_tokens), |value| {
            value >= 1.0
        })?;
        let table = match &group.table {
            // Again by the checks for tables that are read.
            Some(table) => CostTable::parse(&serde_json::to_string(table)?)?,
            None => CostTable::named(&group.cost_table)?,
        };
        let order = match self.order.as_str() {
            "fcfs" => Order::Fcfs,
            "edf" => Order::Edf,
            "sjf" => Order::Sjf,
            "shortest_output" => Order::ShortestOutput,
            other => return Err(range("order", "fcfs, edf, sjf or shortest_output", other)),
        };
        let chunk = match self.chunk.as_str() {
            "dynamic" => Chunk::Dynamic,
            "scheduler" => Chunk::Scheduler,
            tokens => match tokens.parse() {
                Ok(tokens) if tokens > group.max_batch => Chunk::Fixed(tokens),
                _ => {
                    return Err(range(
                        "chunk",
                        "dynamic, scheduler, or a number above max_batch",
                        tokens,
                    ))
                }
            },
        };
        Ok(Group {
            pool: group.pool.as_str().into(),
            workers: group.workers,
            prefill_workers: group.prefill_workers,
            kv_token_bytes: group.kv_token_bytes,
            network_bytes_per_s: group.network_gb_per_s * 1e9,
            engine: EngineConfig {
                table: Arc::new(table),
                slowdown: group.slowdown,
                max_batch: group.max_batch,
                chunk,
                chunk_tokens: group.chunk_tokens,
                tpot_target_s: self.tpot_target_s,
                order,
                shed: self.shed && self.worker_shed,
                block_tokens: block_tokens.max(1),
                kv_blocks: group.kv_blocks,
                host_blocks: group.host_blocks,
                host_block_ms: group.host_block_ms,
            },
        })
    }
}

fn range(field: &'static str, range: &'static str, value: &str) -> SettingsError {
    SettingsError::Range {
        field,
        range,
        value: value.to_owned(),
    }
}

fn in_range(
    field: &'static str,
    text: &'static str,
    value: f64,
    fits: impl Fn(f64) -> bool,
) -> Result<(), SettingsError> {
    if value.is_finite() && fits(value) {
        Ok(())
    } else {
        Err(range(field, text, &value.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(json: &str) -> String {
        let checked = Settings::parse(json).and_then(|settings| settings.check(16));
        checked.err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn errors_name_field_range_and_value() {
        assert_eq!(error("{}"), "");
        for (json, words) in [
            (r#"{"speed": 0}"#, ["speed", "above 0", "is 0"]),
            (
                r#"{"scheduler": {"dispatch_behind_s": 1}}"#,
                ["unknown field", "dispatch_behind_s", "dispatch_ahead_s"],
            ),
            (r#"{"order": "lifo"}"#, ["order", "fcfs", "lifo"]),
            (r#"{"chunk": "12"}"#, ["chunk", "max_batch", "12"]),
            (r#"{"policy": "best"}"#, ["policy", "lmetric", "best"]),
            (
                r#"{"groups": [{"cost_table": "abacus"}]}"#,
                ["abacus", "a100-llama3-8b", "cost table"],
            ),
            (r#"{"groups": []}"#, ["workers", "1 to 4096", "is 0"]),
            (r#"{"routers": 0}"#, ["routers", "1 to 64", "is 0"]),
            (
                r#"{"faults": [[1, 8, 2]]}"#,
                ["faults: worker", "one of the workers", "8"],
            ),
            (r#"{"spede": 1}"#, ["spede", "unknown field", "speed"]),
        ] {
            let error = error(json);
            assert!(words.iter().all(|word| error.contains(word)), "{json}: {error}");
        }
    }
}
