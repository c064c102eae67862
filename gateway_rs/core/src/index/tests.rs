//! Against a slow model in sets; and what stays when there is no room for all.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering,
};

use proptest::prelude::*;

use super::*;

fn overlaps(index: &PrefixIndex, blocks: &[u64]) -> BTreeMap<WorkerId, u32> {
    let mut out = Vec::new();
    index.overlap(blocks, &mut out);
    to_map(&out)
}

fn to_map(out: &[Overlap]) -> BTreeMap<WorkerId, u32> {
    let map: BTreeMap<_, _> = out.iter().map(|each| (each.worker, each.blocks)).collect();
    assert_eq!(map.len(), out.len(), "each worker once");
    assert!(out.iter().all(|each| each.blocks > 0));
    map
}

impl PrefixIndex {
    /// What holds after every change.
    fn check(&self, limits: Limits) {
        assert!(self.bytes() <= limits.bytes, "{} of {}", self.bytes(), limits.bytes);
        let (mut blocks, mut held, mut owned) = (0, BTreeMap::<WorkerId, usize>::new(), 0);
        let mut roots = BTreeMap::<u32, u32>::new();
        let mut rows = 0;
        for set in 0..self.sets.sets.len() as u32 {
            let of = &self.sets.sets[set];
            if of.workers.is_empty() {
                continue;
            }
            assert!(of.workers.is_sorted_by(|a, b| a < b) && of.first != NONE);
            owned += size_of_val(&*of.workers);
            let (mut number, mut count, mut no_more_room) = (of.first, 0, false);
            loop {
                let row = self.rows.row(number);
                assert_eq!(row.set, set);
                assert_eq!(self.rows.row(row.after).before, number);
                assert!(row.taken != 0 && row.used.load(Ordering::Relaxed) & !row.taken == 0);
                assert!(row.is_full() || !no_more_room, "rows with room come first");
                no_more_room = row.is_full();
                rows += 1;
                for place in places(number, row.taken) {
                    assert_eq!(self.rows.find(self.rows.name(place)), Some(place));
                    *roots.entry(self.rows.root(place)).or_default() += 1;
                    count += 1;
                }
                number = row.after;
                if number == of.first {
                    break;
                }
            }
            blocks += count;
            for &worker in &of.workers {
                *held.entry(worker).or_default() += count;
                assert!(self.sets.workers[worker as usize].sets.binary_search(&set).is_ok());
            }
        }
        assert_eq!(rows + self.rows.free_rows(), self.rows.len());
        assert_eq!(blocks, self.len());
        assert_eq!(held.values().sum::<usize>(), self.holdings());
        for (worker, of) in self.sets.workers.iter().enumerate() {
            assert_eq!(of.blocks, held.get(&(worker as u32)).copied().unwrap_or(0));
            owned += of.sets.capacity() * size_of::<u32>();
        }
        assert_eq!(owned, self.sets.owned_bytes);
        for (&root, &blocks) in &roots {
            assert_eq!(self.roots.blocks(root), blocks);
        }
        assert_eq!(self.roots.in_use(), roots.len());
    }
}

#[test]
fn counts_leading_blocks_without_a_gap() {
    let mut index = PrefixIndex::default();
    index.store(7, NO_BLOCK, &[1, 2, 3]);
    index.store(8, NO_BLOCK, &[1]);
    index.store(8, 2, &[3]);
    assert_eq!(overlaps(&index, &[1, 2, 3, 4]), BTreeMap::from([(7, 3), (8, 1)]));
    assert_eq!(overlaps(&index, &[9, 1]), BTreeMap::new());
    assert_eq!(overlaps(&index, &[]), BTreeMap::new());
    assert_eq!((index.leading(7, &[1, 2, 9]), index.leading(8, &[1, 2, 3])), (2, 1));
    index.clear(7);
    assert_eq!(overlaps(&index, &[1, 2, 3]), BTreeMap::from([(8, 1)]));
    index.remove(8, &[1, 3]);
    assert!(index.is_empty());
}

#[test]
fn what_follows_an_unknown_block_is_not_taken_in() {
    let mut index = PrefixIndex::default();
    index.store(1, 5, &[6, 7]);
    assert_eq!((index.len(), index.refused()), (0, 2));
}

#[test]
fn a_second_holder_costs_no_memory() {
    let mut index = PrefixIndex::default();
    let blocks: Vec<u64> = (1..100_000).collect();
    index.store(0, NO_BLOCK, &blocks);
    let before = index.bytes();
    for worker in 1..64 {
        index.store(worker, NO_BLOCK, &blocks);
    }
    assert!(index.bytes() - before < 16_384, "{} more", index.bytes() - before);
    assert_eq!(index.holdings(), 64 * blocks.len());
    assert_eq!(overlaps(&index, &blocks).len(), 64);
}

#[test]
fn a_worker_can_be_cleared_in_parts() {
    let mut index = PrefixIndex::default();
    let blocks: Vec<u64> = (1..=1000).collect();
    index.store(0, NO_BLOCK, &blocks);
    index.store(1, NO_BLOCK, &blocks[..300]);
    let mut parts = 1;
    while !index.clear_some(0, 100) {
        parts += 1;
    }
    assert_eq!(parts, 10);
    assert_eq!((index.len(), index.held_by(0), index.held_by(1)), (300, 0, 300));
}

#[test]
fn what_was_used_of_late_stays() {
    let limits = Limits {
        bytes: 1 << 20,
        root_share: 1.0,
    };
    let mut index = PrefixIndex::new(limits, 1);
    let chain = |from: u64| (from..from + 100).collect::<Vec<u64>>();
    let mut next = 1;
    while index.evicted() == 0 {
        index.store(0, NO_BLOCK, &chain(next * 1000));
        next += 1;
    }
    let (first, all) = (next, next - 1);
    let matched = chain(first * 1000);
    index.store(0, NO_BLOCK, &matched);
    // Two rounds of others: it is matched now and then, so all of it stays; what is not, goes.
    for round in 0..2 * all {
        assert_eq!(overlaps(&index, &matched), BTreeMap::from([(0, 100)]), "{round}");
        index.store(0, NO_BLOCK, &chain((first + 1 + round) * 1000));
        index.check(limits);
    }
    assert_eq!(overlaps(&index, &chain((first - 1) * 1000)), BTreeMap::new());
}

#[test]
fn a_hot_root_takes_no_more_than_its_share_from_others() {
    let limits = Limits {
        bytes: 1 << 20,
        root_share: 0.25,
    };
    let mut index = PrefixIndex::new(limits, 1);
    let quiet: Vec<Vec<u64>> = (0..20)
        .map(|at| (1..=100).map(|block| 1_000_000 + at * 1000 + block).collect())
        .collect();
    quiet.iter().for_each(|chain| index.store(0, NO_BLOCK, chain));
    // One beginning with no end of continuations, each used at once.
    index.store(1, NO_BLOCK, &[1]);
    for block in 2..200_000 {
        index.store(1, 1, &[block]);
        assert_eq!(overlaps(&index, &[1, block]), BTreeMap::from([(1, 2)]));
        if block % 1000 == 0 {
            quiet
                .iter()
                .for_each(|chain| assert_eq!(overlaps(&index, chain), BTreeMap::from([(0, 100)]), "{block}"));
        }
    }
    assert!(index.evicted() > 100_000);
    index.check(limits);
}

#[test]
fn a_worker_that_will_hold_a_block_counts() {
    let (mut index, mut expected) = (PrefixIndex::default(), Expected::default());
    index.store(1, NO_BLOCK, &[1, 2]);
    expected.add(1, &[3, 4]);
    expected.add(2, &[1, 2, 3]);
    expected.add(2, &[1, 2, 9]);
    let all = |expected: &Expected| {
        let mut out = Vec::new();
        expected.overlap(&index, &[1, 2, 3, 4, 5], &mut out);
        to_map(&out)
    };
    assert_eq!(all(&expected), BTreeMap::from([(1, 4), (2, 3)]));
    expected.remove(2, &[1, 2, 3]);
    assert_eq!(all(&expected), BTreeMap::from([(1, 4), (2, 2)]));
    expected.remove(2, &[1, 2, 9]);
    expected.remove(1, &[3, 4]);
    assert_eq!(all(&expected), BTreeMap::from([(1, 2)]));
    assert!(expected.is_empty());
    expected.add(2, &[1]);
    expected.add(3, &[1]);
    expected.clear(2);
    assert_eq!(all(&expected), BTreeMap::from([(1, 2), (3, 1)]));
}

#[test]
fn what_is_expected_of_long_prompts_is_known_to_some_blocks_and_never_more_than_there_are() {
    let index = PrefixIndex::default();
    let prompt: Vec<u64> = (1..=4000).collect();
    for held in [0, 10, 255, 256, 270, 1000] {
        for shared in [1, 100, 256, 257, 300, 1024, 2003, 4000] {
            // It begins as the prompt does, and goes on otherwise.
            let mut other = prompt.clone();
            other[shared..].iter_mut().for_each(|block| *block += 1 << 40);
            let mut expected = Expected::default();
            expected.add(7, &marks(&other, held));
            let exact = shared.max(held);
            let leading = expected.leading(7, &prompt, held as u32, 0) as usize;
            let least = if exact <= 256 { exact } else { (exact - 15).max(held) };
            assert!((least..=exact).contains(&leading), "{held} {shared}: {leading}");
            if held == 0 {
                let mut out = Vec::new();
                expected.overlap(&index, &prompt, &mut out);
                assert_eq!(to_map(&out), BTreeMap::from([(7, leading as u32)]));
            }
            expected.remove(7, &marks(&other, held));
            assert!(expected.is_empty());
        }
    }
    assert!(marks(&prompt, 0).len() < 500);
}

#[derive(Clone, Debug)]
enum Change {
    Store(WorkerId, u64, Vec<u64>),
    Remove(WorkerId, Vec<u64>),
    Clear(WorkerId),
}

fn any_change(blocks: u64) -> impl Strategy<Value = Change> {
    let some = move || prop::collection::vec(1..blocks, 1..5);
    prop_oneof![
        4 => (0_u32..6, prop_oneof![Just(NO_BLOCK), 1..blocks], some())
            .prop_map(|(worker, parent, blocks)| Change::Store(worker, parent, blocks)),
        4 => (0_u32..6, Just(NO_BLOCK), some()).prop_map(|(worker, parent, blocks)| Change::Store(worker, parent, blocks)),
        4 => (0_u32..6, some()).prop_map(|(worker, blocks)| Change::Remove(worker, blocks)),
        1 => (0_u32..6).prop_map(Change::Clear),
    ]
}

/// A list of pairs that is searched through.
#[derive(Default)]
struct Model(BTreeSet<(WorkerId, u64)>);

impl Model {
    fn holds(&self, worker: WorkerId, block: u64) -> bool {
        self.0.contains(&(worker, block))
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Store(worker, parent, blocks) => {
                if *parent == NO_BLOCK || self.0.iter().any(|pair| pair.1 == *parent) {
                    self.0.extend(blocks.iter().map(|&block| (*worker, block)));
                }
            }
            Change::Remove(worker, blocks) => self.0.retain(|pair| pair.0 != *worker || !blocks.contains(&pair.1)),
            Change::Clear(worker) => self.0.retain(|pair| pair.0 != *worker),
        }
    }
}

fn apply(index: &mut PrefixIndex, change: &Change) {
    match change {
        Change::Store(worker, parent, blocks) => index.store(*worker, *parent, blocks),
        Change::Remove(worker, blocks) => index.remove(*worker, blocks),
        Change::Clear(worker) => index.clear(*worker),
    }
}

/// Prompts that branch: block `at` of branch `branch`, which leaves the one before it after 5 blocks, 10, 15 and so on.
fn branch(branch: u64, length: u64) -> Vec<u64> {
    (0..length).map(|at| 1 + at + 1000 * branch.min(at / 5)).collect()
}

/// As engines do it: chains come in pieces, and go from their end, or from anywhere.
fn any_long_change() -> impl Strategy<Value = Vec<Change>> {
    let chain = || (0_u64..8, 1_u64..60).prop_map(|(at, length)| branch(at, length));
    let store = (0_u32..6, chain(), 1_usize..40).prop_map(|(worker, chain, piece)| {
        let parents = std::iter::once(NO_BLOCK).chain(chain.chunks(piece).filter_map(|piece| piece.last().copied()));
        let pieces = parents.zip(chain.chunks(piece));
        pieces
            .map(|(parent, piece)| Change::Store(worker, parent, piece.to_vec()))
            .collect()
    });
    let remove = (0_u32..6, chain(), 0_usize..60, any::<bool>()).prop_map(|(worker, mut chain, from, backwards)| {
        chain.drain(..from.min(chain.len() - 1));
        if backwards {
            chain.reverse();
        }
        vec![Change::Remove(worker, chain)]
    });
    prop_oneof![6 => store, 4 => remove, 1 => (0_u32..6).prop_map(|worker| vec![Change::Clear(worker)])]
}

proptest! {
    #[test]
    fn rows_agree_with_a_plain_list(
        changes in prop::collection::vec(any_long_change(), 0..40), asked in (0_u64..8, 1_u64..60), seed in any::<u64>(),
    ) {
        let limits = Limits::default();
        let (mut index, mut model) = (PrefixIndex::new(limits, seed), Model::default());
        let prompt = branch(asked.0, asked.1);
        for change in changes.iter().flatten() {
            apply(&mut index, change);
            model.apply(change);
            index.check(limits);
            let leading = |worker| prompt.iter().take_while(|&&block| model.holds(worker, block)).count() as u32;
            let expected = (0..6).map(|worker| (worker, leading(worker))).filter(|pair| pair.1 > 0).collect();
            prop_assert_eq!(overlaps(&index, &prompt), expected);
            prop_assert!((0..6).all(|worker| index.leading(worker, &prompt) == leading(worker)));
            prop_assert_eq!(index.holdings(), model.0.len());
        }
    }

    /// However few rows there are: what is known is so, and a match says no more than that.
    #[test]
    fn rows_that_run_short(
        changes in prop::collection::vec(any_long_change(), 0..80), bytes in 0_usize..30_000, root_share in 0.0_f64..1.0,
        asked in (0_u64..8, 1_u64..60),
    ) {
        let limits = Limits { bytes, root_share };
        let (mut index, mut model) = (PrefixIndex::new(limits, 7), Model::default());
        let prompt = branch(asked.0, asked.1);
        for change in changes.iter().flatten() {
            apply(&mut index, change);
            match change {
                Change::Store(worker, _, blocks) => model.0.extend(blocks.iter().map(|&block| (*worker, block))),
                change => model.apply(change),
            }
            index.check(limits);
            let mut holdings = 0;
            for worker in 0..6 {
                for block in index.held(worker).into_iter().flatten() {
                    prop_assert!(model.holds(worker, block) && index.holds(worker, block));
                    holdings += 1;
                }
                let known = prompt.iter().take_while(|&&block| index.holds(worker, block)).count() as u32;
                prop_assert_eq!(index.leading(worker, &prompt), known);
                prop_assert_eq!(overlaps(&index, &prompt).get(&worker).copied().unwrap_or(0), known);
            }
            prop_assert_eq!(holdings, index.holdings());
        }
    }

    #[test]
    fn agrees_with_a_plain_list(
        changes in prop::collection::vec(any_change(16), 0..80), prompt in prop::collection::vec(1_u64..16, 0..6),
        seed in any::<u64>(),
    ) {
        let limits = Limits::default();
        let (mut index, mut model) = (PrefixIndex::new(limits, seed), Model::default());
        for change in &changes {
            apply(&mut index, change);
            model.apply(change);
            index.check(limits);
        }
        let leading = |worker| prompt.iter().take_while(|&&block| model.0.contains(&(worker, block))).count() as u32;
        let expected = (0..6).map(|worker| (worker, leading(worker))).filter(|pair| pair.1 > 0).collect();
        prop_assert_eq!(overlaps(&index, &prompt), expected);
        let blocks: BTreeSet<u64> = model.0.iter().map(|pair| pair.1).collect();
        prop_assert_eq!((index.len(), index.holdings()), (blocks.len(), model.0.len()));
        let mut copy = PrefixIndex::new(limits, seed.wrapping_add(1));
        for worker in 0..6 {
            let held: BTreeSet<u64> = model.0.iter().filter(|pair| pair.0 == worker).map(|pair| pair.1).collect();
            prop_assert_eq!(index.held_by(worker), held.len());
            prop_assert_eq!(index.leading(worker, &prompt), leading(worker));
            let lists = index.held(worker);
            lists.iter().for_each(|list| copy.store(worker, NO_BLOCK, list));
            let listed: Vec<u64> = lists.into_iter().flatten().collect();
            prop_assert_eq!(listed.len(), held.len());
            prop_assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), held);
        }
        prop_assert_eq!(overlaps(&copy, &prompt), overlaps(&index, &prompt));
    }

    /// However little memory there is: the bound holds, and nothing is said that is not so.
    #[test]
    fn never_over_its_bound(
        changes in prop::collection::vec(any_change(400), 0..400), bytes in 0_usize..40_000, root_share in 0.0_f64..1.0,
    ) {
        let limits = Limits { bytes, root_share };
        let (mut index, mut model) = (PrefixIndex::new(limits, 7), Model::default());
        for change in &changes {
            apply(&mut index, change);
            if let Change::Store(worker, _, blocks) = change {
                // What it did not take in, it may know from before.
                model.0.extend(blocks.iter().map(|&block| (*worker, block)));
            } else {
                model.apply(change);
            }
            index.check(limits);
            for worker in 0..6 {
                for block in index.held(worker).into_iter().flatten() {
                    prop_assert!(model.0.contains(&(worker, block)));
                }
            }
        }
    }
}
