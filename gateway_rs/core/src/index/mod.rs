//! Who holds which prefix blocks, by workers' own reports, in bounded memory.
//!
//! A block's name is the chained hash of itself and all before it, so two prompts that share a name share the whole prefix
//! up to there. Workers are small numbers that the caller gives and may give again after [`PrefixIndex::clear`].
//!
//! Blocks are some twenty bytes each. *Who* holds a block is a set of workers, and equal sets are one (`sets.rs`); what one
//! set holds stands in rows of sixteen blocks, those of a chain side by side (`rows.rs`), so
//!
//! - a match looks up one block of a row and compares the names of the others, whoever holds them;
//! - a worker that leaves costs as much as it held rows;
//! - a second holder costs no memory.
//!
//! Readers need no more than a shared reference, and no change takes longer for the index being large (`table.rs`), so a
//! lock around it is never held for long; what is long by nature ([`PrefixIndex::clear`]) can be done in parts.
//!
//! Memory is counted to the byte and bounded. When there is no room left, what was not used of late makes some: a hand goes
//! round over the rows, and empties those of which nobody has matched or stored a block again since it last came by. What
//! begins with a block whose continuations have more than their share already (a *root*) makes room among these, so that
//! one hot prompt cannot push out all others. That a block is held is not known any more then, which is all: the index is
//! a hint.

mod expected;
mod roots;
mod rows;
mod sets;
mod table;
#[cfg(test)]
mod tests;

pub use self::expected::{marks, Expected};
use self::{
    roots::Roots,
    rows::{bit, places, row_of, Place, Rows, WIDTH},
    sets::{worker_hash, Sets},
    table::NONE,
};

/// A worker, as the caller numbers it: small, since memory goes with the largest.
pub type WorkerId = u32;

/// The name of no block.
pub const NO_BLOCK: u64 = 0;

/// A worker and how many leading blocks of a prompt it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The worker.
    pub worker: WorkerId,
    /// Blocks; never 0.
    pub blocks: u32,
}

/// What an index may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Memory in all.
    pub bytes: usize,
    /// Share of the blocks that those of one root may have while others want room.
    pub root_share: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 1 << 30,
            root_share: 0.5,
        }
    }
}

/// Of the memory, for blocks; the rest is for sets, roots and workers.
const ROW_PART: (usize, usize) = (3, 4);

/// Rows that one search for room looks at before it takes what comes: a bound on a writer's work.
const MAX_LOOKED_AT: usize = 256;

/// Block name to workers, and back.
#[derive(Debug)]
pub struct PrefixIndex {
    rows: Rows,
    sets: Sets,
    roots: Roots,
    /// Blocks held by workers, each counted for each of its holders.
    holdings: usize,
    hand: usize,
    max_side_bytes: usize,
    max_root_blocks: u32,
    evicted: u64,
    refused: u64,
}

impl Default for PrefixIndex {
    fn default() -> Self {
        Self::new(Limits::default(), 0)
    }
}

impl PrefixIndex {
    /// Holds nothing. `seed` should be secret where clients choose what is hashed: it decides which blocks share a bucket.
    #[must_use]
    pub fn new(limits: Limits, seed: u64) -> Self {
        let row_bytes = limits.bytes / ROW_PART.1 * ROW_PART.0;
        let rows = Rows::new(row_bytes, seed, worker_hash(seed as u32 ^ (seed >> 32) as u32) | 1);
        Self {
            // Of one block there is always room.
            max_root_blocks: ((rows.max_blocks() as f64 * limits.root_share) as u32).max(1),
            rows,
            sets: Sets::default(),
            roots: Roots::default(),
            holdings: 0,
            hand: 0,
            max_side_bytes: limits.bytes - row_bytes,
            evicted: 0,
            refused: 0,
        }
    }

    /// Different blocks that somebody holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.blocks()
    }

    /// Whether nobody holds anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks held, each counted for each of its holders.
    #[must_use]
    pub fn holdings(&self) -> usize {
        self.holdings
    }

    /// Memory allocated, to the byte.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.rows.bytes() + self.side_bytes()
    }

    fn side_bytes(&self) -> usize {
        self.sets.bytes() + self.roots.bytes()
    }

    /// What sets and roots may still take.
    fn side_room(&self) -> usize {
        self.max_side_bytes.saturating_sub(self.side_bytes())
    }

    /// Blocks given up for want of room.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Holdings that were not taken in: the block before them is not known, or there is no room for who holds them.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Blocks that a worker holds.
    #[must_use]
    pub fn held_by(&self, worker: WorkerId) -> usize {
        self.sets.workers.get(worker as usize).map_or(0, |worker| worker.blocks)
    }

    /// Whether a worker holds that block.
    #[must_use]
    pub fn holds(&self, worker: WorkerId, block: u64) -> bool {
        let found = self.rows.find(block);
        found.is_some_and(|place| self.sets.is_of(self.set_of(place), worker))
    }

    /// Leading blocks that a worker holds without a gap.
    #[must_use]
    pub fn leading(&self, worker: WorkerId, blocks: &[u64]) -> u32 {
        let stretches = self.rows.walk(blocks);
        let held = stretches.take_while(|&(place, _)| self.sets.is_of(self.set_of(place), worker));
        held.map(|(_, count)| count as u32).sum()
    }

    /// Appends each worker that holds the first block, with the number of leading blocks it holds without a gap.
    ///
    /// Walks only while somebody matches: a prompt that nobody knows costs one look-up.
    pub fn overlap(&self, blocks: &[u64], out: &mut Vec<Overlap>) {
        let start = out.len();
        // Those who still match stay in front, in rising order.
        let mut matching = 0;
        let mut set = NONE;
        let mut depth = 0;
        for (place, count) in self.rows.walk(blocks) {
            let row = self.rows.row(row_of(place));
            if row.set != set {
                let holders = self.sets.of(row.set);
                if depth == 0 {
                    out.extend(holders.iter().map(|&worker| Overlap { worker, blocks: 0 }));
                    matching = holders.len();
                } else {
                    matching = keep(&mut out[start..], matching, holders, depth);
                }
                set = row.set;
                if matching == 0 {
                    break;
                }
            }
            depth += count as u32;
            row.mark_used(side_by_side(place, count));
        }
        for each in &mut out[start..start + matching] {
            each.blocks = depth;
        }
    }

    /// What a worker holds, as lists of blocks that begin with a prompt's first block or follow one that is in an earlier
    /// list: [`Self::store`] of each, without a parent, makes an index that says the same of it.
    #[must_use]
    pub fn held(&self, worker: WorkerId) -> Vec<Vec<u64>> {
        let mut by_root = std::collections::BTreeMap::<u32, Vec<u64>>::new();
        let sets = self.sets.workers.get(worker as usize);
        for &set in sets.map_or(&[][..], |worker| &worker.sets) {
            let first = self.sets.sets[set].first;
            let mut row = first;
            loop {
                for place in places(row, self.rows.row(row).taken) {
                    by_root
                        .entry(self.rows.root(place))
                        .or_default()
                        .push(self.rows.name(place));
                }
                row = self.rows.row(row).after;
                if row == first {
                    break;
                }
            }
        }
        by_root.into_values().collect()
    }

    // What workers say.

    /// The worker holds these blocks now, each the child of the one before it; the first one's parent is
    /// [`NO_BLOCK`] when a prompt begins with it. What follows a block that is not known is not taken in: it would not be
    /// found.
    pub fn store(&mut self, worker: WorkerId, parent: u64, blocks: &[u64]) {
        let mut before = None;
        if parent != NO_BLOCK {
            before = self.rows.find(parent);
            if before.is_none() {
                self.refused += blocks.len() as u64;
                return;
            }
        }
        let mut rest = blocks;
        while !rest.is_empty() {
            let beside = before.and_then(|before| self.rows.beside(before, rest[0]));
            let (count, last) = match beside.or_else(|| self.rows.find(rest[0])) {
                Some(place) => self.hold(worker, place, rest, before),
                None => self.insert(worker, rest, before),
            };
            if count == 0 {
                self.refused += rest.len() as u64;
                return;
            }
            rest = &rest[count..];
            before = Some(last);
        }
    }

    /// The worker no longer holds these blocks.
    pub fn remove(&mut self, worker: WorkerId, blocks: &[u64]) {
        let mut rest = blocks;
        while let Some(&first) = rest.first() {
            let mut count = 1;
            if let Some(place) = self.rows.find(first) {
                count = self.rows.stretch(place, rest);
                let mut from = place;
                if count == 1 {
                    // What is given up goes from its end.
                    count = self.rows.stretch_back(place, rest);
                    from = place + 1 - count as u32;
                }
                self.release(worker, row_of(place), side_by_side(from, count));
            }
            rest = &rest[count..];
        }
    }

    /// The worker holds nothing any more. Takes as long as it held blocks.
    pub fn clear(&mut self, worker: WorkerId) {
        while !self.clear_some(worker, usize::MAX) {}
    }

    /// A part of [`Self::clear`]: at most so many blocks. True when nothing is left.
    pub fn clear_some(&mut self, worker: WorkerId, most: usize) -> bool {
        let mut left = most;
        while let Some(&set) = self
            .sets
            .workers
            .get(worker as usize)
            .and_then(|worker| worker.sets.last())
        {
            if left == 0 {
                return false;
            }
            let row = self.sets.sets[set].first;
            let mut mask = self.rows.row(row).taken;
            while mask.count_ones() as usize > left {
                mask &= mask - 1;
            }
            left -= mask.count_ones() as usize;
            self.release(worker, row, mask);
        }
        self.sets.give_back(worker);
        true
    }

    // Who holds a block.

    fn set_of(&self, place: Place) -> u32 {
        self.rows.row(row_of(place)).set
    }

    /// The worker holds the first of these blocks, which is there, and what stands beside it: how many now, and where the
    /// last of them is; 0 when there is no room to say so.
    fn hold(&mut self, worker: WorkerId, place: Place, blocks: &[u64], before: Option<Place>) -> (usize, Place) {
        let count = self.rows.stretch(place, blocks);
        let (row, mask) = (row_of(place), side_by_side(place, count));
        let set = self.set_of(place);
        self.rows.row(row).mark_used(mask);
        if self.sets.is_of(set, worker) {
            return (count, place + count as u32 - 1);
        }
        let Some(with) = self.sets.with(set, worker, self.side_room()) else {
            return (0, place);
        };
        let (moved, last) = self.transfer(row, mask, with, blocks.len(), before);
        let moved = moved.count_ones() as usize;
        self.sets.workers[worker as usize].blocks += moved;
        self.holdings += moved;
        (moved, last)
    }

    /// The worker no longer holds these blocks of a row.
    fn release(&mut self, worker: WorkerId, row: u32, mask: u16) {
        let set = self.rows.row(row).set;
        if !self.sets.is_of(set, worker) {
            return;
        }
        let mut gone = mask;
        if self.sets.of(set).len() == 1 {
            self.take_out(row, mask);
            self.sets.drop_if_empty(set);
        } else {
            let without = self.sets.without(set, worker, self.side_room());
            gone = without.map_or(0, |without| {
                self.transfer(row, mask, without, mask.count_ones() as usize, None).0
            });
            if gone != mask {
                // No room to say who is left.
                self.refused += u64::from((mask & !gone).count_ones());
                self.forget(row, mask & !gone, NONE);
            }
        }
        let count = gone.count_ones() as usize;
        self.sets.workers[worker as usize].blocks -= count;
        self.holdings -= count;
    }

    /// Another set holds these blocks of a row: which of them, as far as there is room, and where the last of them is.
    /// `want` and `before` are [`Self::place`]'s.
    fn transfer(&mut self, row: u32, mask: u16, to: u32, want: usize, mut before: Option<Place>) -> (u16, Place) {
        let from = self.rows.row(row).set;
        let mut last = row * WIDTH as u32 + mask.ilog2();
        if self.rows.row(row).taken == mask {
            self.rows.unlink(row, &mut self.sets.sets[from].first);
            self.rows.row_mut(row).set = to;
            self.rows.link(row, &mut self.sets.sets[to].first);
            self.sets.drop_if_empty(from);
            return (mask, last);
        }
        let mut moved = 0_u16;
        for place in places(row, mask) {
            let root = self.rows.root(place);
            let Some(new) = self.place(to, root, want - moved.count_ones() as usize, before, row) else {
                self.sets.drop_if_empty(to);
                break;
            };
            let name = self.rows.name(place);
            self.roots.add(root);
            self.take_out(row, bit(place));
            self.put(new, name, root);
            self.rows.row(row_of(new)).mark_used(bit(new));
            moved |= bit(place);
            last = new;
            before = Some(new);
        }
        (moved, last)
    }

    // Where blocks stand.

    /// The first of these blocks, which nobody held: 1 and where it is, or 0 when there is no room for it.
    fn insert(&mut self, worker: WorkerId, blocks: &[u64], before: Option<Place>) -> (usize, Place) {
        let known = before
            .map(|before| self.set_of(before))
            .filter(|&set| self.sets.of(set) == [worker]);
        let Some(set) = known.or_else(|| self.sets.with(NONE, worker, self.side_room())) else {
            return (0, NONE);
        };
        let root = match before {
            Some(before) => Some(self.rows.root(before)),
            None => self.roots.take(self.side_room()),
        };
        // Its root counts it before there is a place, so that it stays whatever makes room.
        let place = root.and_then(|root| {
            self.roots.add(root);
            let place = self.place(set, root, blocks.len(), before, NONE);
            if place.is_none() {
                self.roots.remove(root);
            }
            Some((place?, root))
        });
        let Some((place, root)) = place else {
            self.sets.drop_if_empty(set);
            return (0, NONE);
        };
        self.put(place, blocks[0], root);
        self.sets.workers[worker as usize].blocks += 1;
        self.holdings += 1;
        (1, place)
    }

    /// A free place in a row of that set, for a block of that root of which `want` are to come one after another, the
    /// first of them after the one at `before`. What makes room for it is not in the row `spared`.
    fn place(&mut self, set: u32, root: u32, want: usize, before: Option<Place>, spared: u32) -> Option<Place> {
        if let Some(beside) = before.map(|before| before + 1) {
            let row = self.rows.row(row_of(beside - 1));
            if row_of(beside) == row_of(beside - 1) && row.set == set && row.taken & bit(beside) == 0 {
                return Some(beside);
            }
        }
        if want < WIDTH {
            if let Some(place) = self.gap(set, want) {
                return Some(place);
            }
        }
        if let Some(row) = self.take_row(set) {
            return Some(row * WIDTH as u32);
        }
        if let Some(place) = self.gap(set, 1) {
            return Some(place);
        }
        self.make_room(set, root, spared);
        match self.take_row(set) {
            Some(row) => Some(row * WIDTH as u32),
            None => self.gap(set, 1),
        }
    }

    /// A place in the set's first row for so many in turn.
    fn gap(&self, set: u32, want: usize) -> Option<Place> {
        let row = self.sets.sets[set].first;
        if row == NONE {
            return None;
        }
        let (from, room) = self.rows.row(row).gap();
        // One alone may be the end of a chain that grows, as may be what stands before it.
        let at = if want == 1 { from + room / 2 } else { from };
        (room >= want).then(|| row * WIDTH as u32 + at as u32)
    }

    fn take_row(&mut self, set: u32) -> Option<u32> {
        let row = self.rows.take_row()?;
        self.rows.row_mut(row).set = set;
        self.rows.link(row, &mut self.sets.sets[set].first);
        Some(row)
    }

    /// A block comes to stand in a place that is free.
    fn put(&mut self, place: Place, block: u64, root: u32) {
        self.rows.put(place, block, root);
        let row = row_of(place);
        if self.rows.row(row).is_full() {
            self.relink(row);
        }
    }

    /// These blocks of a row are nowhere any more. The caller sees to the set's being dropped, if it is empty now.
    fn take_out(&mut self, row: u32, mask: u16) {
        let was_full = self.rows.row(row).is_full();
        for place in places(row, mask) {
            self.roots.remove(self.rows.root(place));
            self.rows.take_out(place);
        }
        if self.rows.row(row).taken == 0 {
            let set = self.rows.row(row).set;
            self.rows.unlink(row, &mut self.sets.sets[set].first);
            self.rows.give_back(row);
        } else if was_full {
            self.relink(row);
        }
    }

    /// A row that has room stands at the front of its ring, one that has not at the end.
    fn relink(&mut self, row: u32) {
        let first = &mut self.sets.sets[self.rows.row(row).set].first;
        self.rows.unlink(row, first);
        self.rows.link(row, first);
    }

    /// Gives up blocks until there is a row to take, or a free place in one of the set's.
    fn make_room(&mut self, set: u32, root: u32, spared: u32) {
        let of_its_own = self.roots.blocks(root) > self.max_root_blocks;
        let mut next_best = None;
        for _ in 0..(2 * self.rows.len()).min(MAX_LOOKED_AT) {
            // Down, so that the end of a chain goes before its beginning.
            self.hand = if self.hand == 0 { self.rows.len() } else { self.hand } - 1;
            let number = self.hand as u32;
            let row = self.rows.row_mut(number);
            let mask = if of_its_own { row.of_root(root) } else { row.taken };
            if mask == 0 || number == spared {
                continue;
            }
            let used = row.used.get_mut();
            if *used & mask != 0 {
                *used &= !mask;
                next_best = next_best.or(Some((number, mask)));
                continue;
            }
            self.forget(number, mask, set);
            if self.has_room(set) {
                return;
            }
        }
        if let Some((row, mask)) = next_best {
            let mask = mask & self.rows.row(row).taken;
            if mask != 0 {
                self.forget(row, mask, set);
            }
        }
    }

    fn has_room(&self, set: u32) -> bool {
        let first = self.sets.sets[set].first;
        self.rows.has_free_row() || (first != NONE && !self.rows.row(first).is_full())
    }

    /// Blocks of a row are given up for all who hold them; the set `kept` stays, be it empty.
    fn forget(&mut self, row: u32, mask: u16, kept: u32) {
        let (set, count) = (self.rows.row(row).set, mask.count_ones() as usize);
        for at in 0..self.sets.of(set).len() {
            let worker = self.sets.of(set)[at];
            self.sets.workers[worker as usize].blocks -= count;
        }
        self.holdings -= count * self.sets.of(set).len();
        self.evicted += count as u64;
        self.take_out(row, mask);
        if set != kept {
            self.sets.drop_if_empty(set);
        }
    }
}

/// The mask of so many places of a row, from that one on.
fn side_by_side(from: Place, count: usize) -> u16 {
    (((1_u32 << count) - 1) << (from as usize % WIDTH)) as u16
}

/// Of the first `matching`, those who are among the holders move to the front; the others have matched `depth` blocks.
fn keep(of: &mut [Overlap], matching: usize, holders: &[WorkerId], depth: u32) -> usize {
    let (mut kept, mut at) = (0, 0);
    for each in 0..matching {
        let worker = of[each].worker;
        at += holders[at..].partition_point(|&holder| holder < worker);
        if holders.get(at) == Some(&worker) {
            of.swap(kept, each);
            kept += 1;
        } else {
            of[each].blocks = depth;
        }
    }
    kept
}
