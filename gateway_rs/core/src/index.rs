//! Who holds which prefix blocks: exact, from workers' own reports.
//!
//! A block's name is the chained hash of itself and all before it, so two prompts that share a name share the whole prefix
//! up to there. Workers are small numbers that the caller gives and may give again after [`PrefixIndex::remove_worker`].
//! Memory is the caller's bound: it grows with what workers say they hold, and nothing else.

use ahash::{HashMap, HashMapExt, HashSet};

/// A worker, as the caller numbers it.
pub type WorkerId = u32;

/// Workers that hold one block. Most blocks are held by one.
#[derive(Clone, Debug)]
enum Holders {
    One(WorkerId),
    /// Rising.
    Many(Vec<WorkerId>),
}

impl Holders {
    fn as_slice(&self) -> &[WorkerId] {
        match self {
            Self::One(worker) => std::slice::from_ref(worker),
            Self::Many(workers) => workers,
        }
    }

    fn add(&mut self, worker: WorkerId) {
        match self {
            Self::One(only) if *only == worker => {}
            Self::One(only) => *self = Self::Many(vec![worker.min(*only), worker.max(*only)]),
            Self::Many(workers) => {
                if let Err(at) = workers.binary_search(&worker) {
                    workers.insert(at, worker);
                }
            }
        }
    }

    /// Whether nobody is left.
    fn remove(&mut self, worker: WorkerId) -> bool {
        match self {
            Self::One(only) => *only == worker,
            Self::Many(workers) => {
                if let Ok(at) = workers.binary_search(&worker) {
                    workers.remove(at);
                }
                if let [only] = workers[..] {
                    *self = Self::One(only);
                }
                false
            }
        }
    }
}

/// A worker and how many leading blocks of a prompt it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The worker.
    pub worker: WorkerId,
    /// Blocks; never 0.
    pub blocks: u32,
}

/// Block name to workers, and back.
#[derive(Clone, Debug, Default)]
pub struct PrefixIndex {
    holders: HashMap<u64, Holders>,
    held: HashMap<WorkerId, HashSet<u64>>,
}

impl PrefixIndex {
    /// Holds nothing.
    #[must_use]
    pub fn new() -> Self {
        Self {
            holders: HashMap::new(),
            held: HashMap::new(),
        }
    }

    /// Different blocks that somebody holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.holders.len()
    }

    /// Whether nobody holds anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// Blocks that a worker holds.
    #[must_use]
    pub fn held_by(&self, worker: WorkerId) -> usize {
        self.held.get(&worker).map_or(0, HashSet::len)
    }

    /// Whether a worker holds that block.
    #[must_use]
    pub fn holds(&self, worker: WorkerId, block: u64) -> bool {
        self.held.get(&worker).is_some_and(|held| held.contains(&block))
    }

    /// Leading blocks that a worker holds without a gap.
    #[must_use]
    pub fn leading(&self, worker: WorkerId, blocks: &[u64]) -> u32 {
        let held = self.held.get(&worker);
        held.map_or(0, |held| {
            blocks.iter().take_while(|block| held.contains(block)).count() as u32
        })
    }

    /// The worker holds that block now.
    pub fn add(&mut self, worker: WorkerId, block: u64) {
        if self.held.entry(worker).or_default().insert(block) {
            self.holders
                .entry(block)
                .and_modify(|holders| holders.add(worker))
                .or_insert(Holders::One(worker));
        }
    }

    /// The worker no longer holds that block.
    pub fn remove(&mut self, worker: WorkerId, block: u64) {
        if self.held.get_mut(&worker).is_some_and(|held| held.remove(&block)) {
            self.release(worker, block);
        }
    }

    /// The worker holds nothing any more. Takes as long as it held blocks.
    pub fn remove_worker(&mut self, worker: WorkerId) {
        for block in self.held.remove(&worker).unwrap_or_default() {
            self.release(worker, block);
        }
    }

    fn release(&mut self, worker: WorkerId, block: u64) {
        if self
            .holders
            .get_mut(&block)
            .is_some_and(|holders| holders.remove(worker))
        {
            self.holders.remove(&block);
        }
    }

    /// Appends each worker that holds the first block, with the number of leading blocks it holds without a gap.
    ///
    /// Walks only while somebody matches: a prompt that nobody knows costs one look-up.
    pub fn overlap(&self, blocks: &[u64], out: &mut Vec<Overlap>) {
        let Some(first) = blocks.first().and_then(|block| self.holders.get(block)) else {
            return;
        };
        let start = out.len();
        out.extend(first.as_slice().iter().map(|&worker| Overlap { worker, blocks: 1 }));
        let mut matching = out.len() - start;
        for (depth, block) in (2_u32..).zip(&blocks[1..]) {
            let Some(holders) = self.holders.get(block) else { return };
            let holders = holders.as_slice();
            // Those who still match stay in front, in rising order; both lists are sorted.
            let (mut kept, mut at) = (0, 0);
            for each in 0..matching {
                let worker = out[start + each].worker;
                at += holders[at..].partition_point(|&holder| holder < worker);
                if holders.get(at) == Some(&worker) {
                    out[start + each].blocks = depth;
                    out.swap(start + kept, start + each);
                    kept += 1;
                }
            }
            if kept == 0 {
                return;
            }
            matching = kept;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use ahash::HashSetExt;

    use super::*;

    fn overlaps(index: &PrefixIndex, blocks: &[u64]) -> BTreeMap<WorkerId, u32> {
        let mut out = Vec::new();
        index.overlap(blocks, &mut out);
        let map: BTreeMap<_, _> = out.iter().map(|each| (each.worker, each.blocks)).collect();
        assert_eq!(map.len(), out.len(), "each worker once");
        map
    }

    #[test]
    fn counts_leading_blocks_without_a_gap() {
        let mut index = PrefixIndex::new();
        for block in [1, 2, 3] {
            index.add(7, block);
        }
        index.add(8, 1);
        index.add(8, 3);
        assert_eq!(overlaps(&index, &[1, 2, 3, 4]), BTreeMap::from([(7, 3), (8, 1)]));
        assert_eq!(overlaps(&index, &[9, 1]), BTreeMap::new());
        assert_eq!(overlaps(&index, &[]), BTreeMap::new());
        index.remove_worker(7);
        assert_eq!(overlaps(&index, &[1, 2, 3]), BTreeMap::from([(8, 1)]));
        index.remove(8, 1);
        index.remove(8, 3);
        assert!(index.is_empty());
    }

    #[derive(Clone, Debug)]
    enum Change {
        Add(WorkerId, u64),
        Remove(WorkerId, u64),
        Gone(WorkerId),
    }

    fn any_change() -> impl Strategy<Value = Change> {
        prop_oneof![
            8 => (0_u32..6, 0_u64..12).prop_map(|(worker, block)| Change::Add(worker, block)),
            4 => (0_u32..6, 0_u64..12).prop_map(|(worker, block)| Change::Remove(worker, block)),
            1 => (0_u32..6).prop_map(Change::Gone),
        ]
    }

    proptest! {
        /// The same as a list of pairs that is searched through.
        #[test]
        fn agrees_with_a_plain_list(
            changes in prop::collection::vec(any_change(), 0..80), prompt in prop::collection::vec(0_u64..12, 0..6),
        ) {
            let (mut index, mut plain) = (PrefixIndex::new(), HashSet::new());
            for change in changes {
                match change {
                    Change::Add(worker, block) => { index.add(worker, block); plain.insert((worker, block)); }
                    Change::Remove(worker, block) => { index.remove(worker, block); plain.remove(&(worker, block)); }
                    Change::Gone(worker) => { index.remove_worker(worker); plain.retain(|pair| pair.0 != worker); }
                }
            }
            let leading = |worker| prompt.iter().take_while(|&&block| plain.contains(&(worker, block))).count() as u32;
            let expected = (0..6).map(|worker| (worker, leading(worker))).filter(|pair| pair.1 > 0).collect();
            prop_assert_eq!(overlaps(&index, &prompt), expected);
            let blocks: HashSet<u64> = plain.iter().map(|pair| pair.1).collect();
            prop_assert_eq!(index.len(), blocks.len());
            for worker in 0..6 {
                prop_assert_eq!(index.held_by(worker), plain.iter().filter(|pair| pair.0 == worker).count());
            }
        }
    }
}
