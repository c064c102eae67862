//! What people want to see of the scheduler: figures for metrics, as JSON.

use std::collections::BTreeMap;

use headrace_core::{
    cost::ModelError,
    scheduler::{events::WorkerState, Measures, Predictions},
};
use serde::Serialize;

use super::Scheduler;

/// Counted since the start.
#[derive(Default, Serialize)]
pub struct Counts {
    pub placements: [u64; 3],
    /// Of those, by routers themselves.
    pub by_credit: [u64; 3],
    pub rejections: BTreeMap<&'static str, u64>,
    pub withdrawals: u64,
    pub queue_wait: [Histogram; 3],
}

/// Counts of values by bucket, the last one without bound, and their sum.
#[derive(Default, Serialize)]
pub struct Histogram {
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    /// Counts one.
    pub fn observe(&mut self, buckets: &[f64], value: f64) {
        self.counts.resize(buckets.len() + 1, 0);
        let bucket = buckets.partition_point(|&bound| bound < value);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
        self.sum += value;
    }
}

impl Scheduler {
    /// Figures for metrics, as JSON.
    pub fn stats(&self) -> String {
        let fleet = self.core.fleet();
        let pools = fleet.pools.values().map(|pool| {
            let mut states: BTreeMap<_, u64> = WorkerState::ALL.iter().map(|state| (state.name(), 0)).collect();
            let mut leases: BTreeMap<&str, usize> = BTreeMap::new();
            for worker in pool.workers.iter().filter_map(|link| fleet.workers.get(link)) {
                *states.entry(worker.load.state.name()).or_default() += 1;
                *leases.entry(&worker.hello.worker_id).or_default() += worker.held.len();
            }
            (&*pool.name, PoolStats { states, leases })
        });
        let oddities = self.core.oddities();
        let stats = Stats {
            queued: self.core.queue().depth_by_class(),
            leases: fleet.leases.len(),
            routers: self.core.routers().len(),
            pools: pools.collect(),
            oddities: [
                ("release_unknown", oddities.release_unknown),
                ("release_foreign", oddities.release_foreign),
                ("lease_collision", oddities.lease_collision),
            ]
            .into(),
            ttft: self.core.predictions(),
            steps: (fleet.kinds.errors())
                .map(|(kind, error)| {
                    let ModelError { steps, median, p90 } = error;
                    (kind, StepStats { steps, median, p90 })
                })
                .collect(),
            measures: self.core.measures(),
            books: BooksStats {
                open: self.core.budgets().open(),
                behind: self.core.budgets().behind(),
                parked: self.core.parked(),
            },
            blocks: BlockStats {
                holdings: fleet.blocks().index().holdings(),
                bytes: fleet.blocks().index().bytes(),
                gaps: fleet.blocks().gaps(),
            },
            counts: &self.counts,
        };
        serde_json::to_string(&stats).unwrap_or_default()
    }
}

#[derive(Serialize)]
struct Stats<'a> {
    queued: [usize; 3],
    leases: usize,
    routers: usize,
    pools: BTreeMap<&'a str, PoolStats<'a>>,
    oddities: BTreeMap<&'static str, u64>,
    ttft: Predictions,
    /// By kind of worker.
    steps: BTreeMap<&'a str, StepStats>,
    measures: Measures,
    books: BooksStats,
    blocks: BlockStats,
    counts: &'a Counts,
}

/// What is known of workers' blocks.
#[derive(Serialize)]
struct BlockStats {
    holdings: usize,
    bytes: usize,
    gaps: u64,
}

/// Bookings that are open, entries that are not durable, and asks that wait for that.
#[derive(Serialize)]
struct BooksStats {
    open: usize,
    behind: usize,
    parked: usize,
}

#[derive(Serialize)]
struct StepStats {
    steps: u64,
    median: f64,
    p90: f64,
}

#[derive(Serialize)]
struct PoolStats<'a> {
    /// Workers by state.
    states: BTreeMap<&'static str, u64>,
    /// Leases by worker.
    leases: BTreeMap<&'a str, usize>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_counted_up_to_their_bounds() {
        let mut histogram = Histogram::default();
        for value in [0.05, 0.1, 0.5, 2.0] {
            histogram.observe(&[0.1, 1.0], value);
        }
        assert_eq!(histogram.counts, [2, 1, 1]);
    }
}
