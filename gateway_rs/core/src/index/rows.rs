//! Where blocks stand: in rows of sixteen places, all blocks of a row with the same holders.
//!
//! A chain's blocks stand side by side as far as they can, so whoever has found one compares the next name with the next
//! place and looks nothing up. A row need not be one chain's: ends of chains and short ones share rows, each where it has
//! room to grow, so a block by itself takes no more memory than others.

use std::sync::atomic::{AtomicU16, Ordering};

use super::table::{more, Entries, Pieces, Table, NONE};

/// Places in a row: as many as a `u16` has bits.
pub(super) const WIDTH: usize = 16;

/// Rows allocated at once.
const PIECE: usize = 128;

/// Look-ups at once.
const AT_ONCE: usize = 16;

/// A place: its row times [`WIDTH`], and where in it.
pub(super) type Place = u32;

/// The row of a place.
pub(super) fn row_of(place: Place) -> u32 {
    place / WIDTH as u32
}

/// The bit of a place in its row's masks.
pub(super) fn bit(place: Place) -> u16 {
    1 << (place as usize % WIDTH)
}

/// The places of a mask, rising.
pub(super) fn places(row: u32, mask: u16) -> impl Iterator<Item = Place> {
    (0..WIDTH as u32)
        .filter(move |at| mask >> at & 1 == 1)
        .map(move |at| row * WIDTH as u32 + at)
}

/// What is looked at of every row comes first.
#[derive(Debug)]
pub(super) struct Row {
    /// Who holds its blocks; NONE = it is not in use.
    pub set: u32,
    /// Neighbours in the ring of its set's rows, those with room first; of a row that is not in use, the next such.
    pub before: u32,
    pub after: u32,
    /// Which places have a block.
    pub taken: u16,
    /// Which of them were used since the hand came by.
    pub used: AtomicU16,
    /// Names, scrambled.
    keys: [u64; WIDTH],
    /// The next in each one's bucket.
    next: [u32; WIDTH],
    roots: [u32; WIDTH],
}

impl Default for Row {
    fn default() -> Self {
        Self {
            set: NONE,
            before: NONE,
            after: NONE,
            taken: 0,
            used: AtomicU16::new(0),
            keys: [0; WIDTH],
            next: [NONE; WIDTH],
            roots: [NONE; WIDTH],
        }
    }
}

impl Row {
    pub fn is_full(&self) -> bool {
        self.taken == u16::MAX
    }

    /// Written only when it is news: readers on several threads share the line.
    pub fn mark_used(&self, mask: u16) {
        if self.used.load(Ordering::Relaxed) & mask != mask {
            self.used.fetch_or(mask, Ordering::Relaxed);
        }
    }

    /// The longest stretch of free places: where it begins, and how long it is.
    pub fn gap(&self) -> (usize, usize) {
        // After each turn those are left from which so many are free.
        let (mut left, mut from, mut room) = (!self.taken, 0, 0);
        while left != 0 {
            from = left.trailing_zeros() as usize;
            left &= left >> 1;
            room += 1;
        }
        (from, room)
    }

    /// Which of its blocks are of that root.
    pub fn of_root(&self, root: u32) -> u16 {
        let of = (0..WIDTH).filter(|&at| self.roots[at] == root);
        of.fold(0, |mask, at| mask | 1 << at) & self.taken
    }
}

/// High bits of a product are the good ones.
fn hash(key: u64) -> u64 {
    key >> 32
}

impl Entries for Pieces<Row, PIECE> {
    fn hash(&self, at: Place) -> u64 {
        hash(self[row_of(at)].keys[at as usize % WIDTH])
    }

    fn next(&self, at: Place) -> Place {
        self[row_of(at)].next[at as usize % WIDTH]
    }

    fn set_next(&mut self, at: Place, next: Place) {
        self[row_of(at)].next[at as usize % WIDTH] = next;
    }
}

/// All rows, and where each block is.
#[derive(Debug)]
pub(super) struct Rows {
    rows: Pieces<Row, PIECE>,
    by_key: Table,
    /// The first row that is not in use.
    free: u32,
    max_rows: usize,
    seed: u64,
    multiplier: u64,
    inverse: u64,
}

impl Rows {
    /// None yet, in not more than so much memory. `multiplier` is odd.
    pub fn new(max_bytes: usize, seed: u64, multiplier: u64) -> Self {
        // Newton's iteration doubles the bits that are right, of which there are three to begin with.
        let inverse = (0..5).fold(multiplier, |inverse, _| {
            inverse.wrapping_mul(2_u64.wrapping_sub(multiplier.wrapping_mul(inverse)))
        });
        Self {
            rows: Pieces::default(),
            by_key: Table::default(),
            free: NONE,
            max_rows: most_rows(max_bytes),
            seed,
            multiplier,
            inverse,
        }
    }

    /// Blocks that are in.
    pub fn blocks(&self) -> usize {
        self.by_key.len()
    }

    /// Rows that there are, in use or not.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Blocks that there is ever room for.
    pub fn max_blocks(&self) -> usize {
        self.max_rows * WIDTH
    }

    pub fn bytes(&self) -> usize {
        self.rows.bytes() + self.by_key.bytes()
    }

    pub fn row(&self, row: u32) -> &Row {
        &self.rows[row]
    }

    pub fn row_mut(&mut self, row: u32) -> &mut Row {
        &mut self.rows[row]
    }

    pub fn root(&self, place: Place) -> u32 {
        self.rows[row_of(place)].roots[place as usize % WIDTH]
    }

    pub fn name(&self, place: Place) -> u64 {
        self.stands_at(place).wrapping_mul(self.inverse) ^ self.seed
    }

    fn key(&self, block: u64) -> u64 {
        (block ^ self.seed).wrapping_mul(self.multiplier)
    }

    fn stands_at(&self, place: Place) -> u64 {
        self.rows[row_of(place)].keys[place as usize % WIDTH]
    }

    // Finding.

    pub fn find(&self, block: u64) -> Option<Place> {
        self.find_key(self.key(block))
    }

    fn find_key(&self, key: u64) -> Option<Place> {
        self.by_key.find(&self.rows, hash(key), |at| self.stands_at(at) == key)
    }

    /// Whether that block stands beside the one at `before`, and where.
    pub fn beside(&self, before: Place, block: u64) -> Option<Place> {
        let place = before + 1;
        let is = row_of(place) == row_of(before)
            && self.rows[row_of(place)].taken & bit(place) != 0
            && self.stands_at(place) == self.key(block);
        is.then_some(place)
    }

    /// How many of these blocks stand side by side in one row, of which the first is there.
    pub fn stretch(&self, place: Place, blocks: &[u64]) -> usize {
        let (row, from) = (&self.rows[row_of(place)], place as usize % WIDTH);
        let (taken, mut count) = (row.taken >> from, 1);
        for (&key, &block) in row.keys[from + 1..].iter().zip(&blocks[1..]) {
            if key != self.key(block) || taken >> count & 1 == 0 {
                break;
            }
            count += 1;
        }
        count
    }

    /// The same for blocks each of which stands before the one before it: what is given up goes from its end.
    pub fn stretch_back(&self, place: Place, blocks: &[u64]) -> usize {
        let (row, from) = (&self.rows[row_of(place)], place as usize % WIDTH);
        let before = (0..from).rev().zip(&blocks[1..]);
        let same = before.take_while(|&(at, &block)| row.keys[at] == self.key(block) && row.taken >> at & 1 == 1);
        1 + same.count()
    }

    /// The blocks in turn while they are known, as stretches: where each begins, and how many blocks it is.
    pub fn walk<'a>(&'a self, blocks: &'a [u64]) -> impl Iterator<Item = (Place, usize)> + 'a {
        let (mut walk, mut at) = (Walk::new(self), 0);
        std::iter::from_fn(move || {
            let rest = blocks.get(at..).filter(|rest| !rest.is_empty())?;
            let place = walk.find(rest, at)?;
            let count = self.stretch(place, rest);
            walk.step = count;
            at += count;
            Some((place, count))
        })
    }

    // Changing.

    /// A row that is not in use; None when there is no memory for one.
    pub fn take_row(&mut self) -> Option<u32> {
        if self.free == NONE {
            let from = self.rows.len();
            if from == self.max_rows {
                return None;
            }
            self.rows.grow(self.max_rows - from);
            for row in (from as u32..self.rows.len() as u32).rev() {
                self.give_back(row);
            }
        }
        let row = self.free;
        self.free = self.rows[row].after;
        Some(row)
    }

    /// The row is not in use any more.
    pub fn give_back(&mut self, row: u32) {
        let free = std::mem::replace(&mut self.free, row);
        let row = &mut self.rows[row];
        row.set = NONE;
        row.after = free;
        *row.used.get_mut() = 0;
    }

    /// Whether there is a row to take without growing.
    pub fn has_free_row(&self) -> bool {
        self.free != NONE
    }

    #[cfg(test)]
    pub fn free_rows(&self) -> usize {
        let in_use = |row: &u32| *row != NONE;
        std::iter::successors(Some(self.free).filter(in_use), |&row| {
            Some(self.rows[row].after).filter(in_use)
        })
        .count()
    }

    /// A block that is not in comes to stand there.
    pub fn put(&mut self, place: Place, block: u64, root: u32) {
        let (key, at) = (self.key(block), place as usize % WIDTH);
        let row = &mut self.rows[row_of(place)];
        row.taken |= bit(place);
        row.keys[at] = key;
        row.roots[at] = root;
        self.by_key.insert(&mut self.rows, place);
    }

    /// The block that stands there goes.
    pub fn take_out(&mut self, place: Place) {
        self.by_key.remove(&mut self.rows, place);
        let row = &mut self.rows[row_of(place)];
        row.taken &= !bit(place);
        *row.used.get_mut() &= !bit(place);
    }

    // The ring of a set's rows: `first` is the set's.

    /// Puts a row in: to the front when it has room, otherwise to the end.
    pub fn link(&mut self, row: u32, first: &mut u32) {
        if *first == NONE {
            self.rows[row].before = row;
            self.rows[row].after = row;
            *first = row;
            return;
        }
        let last = self.rows[*first].before;
        self.rows[last].after = row;
        self.rows[*first].before = row;
        self.rows[row].before = last;
        self.rows[row].after = *first;
        if !self.rows[row].is_full() {
            *first = row;
        }
    }

    pub fn unlink(&mut self, row: u32, first: &mut u32) {
        let (before, after) = (self.rows[row].before, self.rows[row].after);
        self.rows[before].after = after;
        self.rows[after].before = before;
        if *first == row {
            *first = if after == row { NONE } else { after };
        }
    }
}

/// Looks ahead: where the last stretch was so long, the next ones will be too, and their beginnings are all over the
/// memory. Looked up together they take little longer than one, as it is the waiting for memory that takes time.
struct Walk<'a> {
    rows: &'a Rows,
    /// Of the last stretch.
    step: usize,
    /// What the look-ups found: each its key, the first place of its bucket, and whether that is it.
    ahead: [(u64, Place, bool); AT_ONCE],
    /// Of which block the first is.
    from: usize,
    /// How far apart they are; 0 = there are none.
    apart: usize,
}

impl<'a> Walk<'a> {
    fn new(rows: &'a Rows) -> Self {
        Self {
            rows,
            step: 0,
            ahead: [(0, NONE, false); AT_ONCE],
            from: 0,
            apart: 0,
        }
    }

    /// Where the first of the blocks is, which is number `at` of all.
    fn find(&mut self, blocks: &[u64], at: usize) -> Option<Place> {
        if self.step == 0 {
            // The first alone: most prompts that are not known are not from their beginning on.
            return self.rows.find(blocks[0]);
        }
        let known = |walk: &Self| {
            let steps = (at - walk.from).checked_div(walk.apart)?;
            (walk.from + steps * walk.apart == at)
                .then(|| walk.ahead.get(steps).copied())
                .flatten()
        };
        if known(self).is_none() {
            self.look_up(blocks, at);
        }
        match known(self)? {
            (_, NONE, _) => None,
            (_, place, true) => Some(place),
            (key, ..) => self.rows.find_key(key),
        }
    }

    fn look_up(&mut self, blocks: &[u64], at: usize) {
        (self.from, self.apart) = (at, self.step);
        let mut keys = [0; AT_ONCE];
        for (key, &block) in keys.iter_mut().zip(blocks.iter().step_by(self.apart)) {
            *key = self.rows.key(block);
        }
        let firsts = self.rows.by_key.firsts(keys.map(hash));
        // Here, so that memory is asked for all of them before the first is waited for.
        let found = firsts.map(|place| if place == NONE { 0 } else { self.rows.stands_at(place) });
        self.ahead = std::array::from_fn(|each| (keys[each], firsts[each], found[each] == keys[each]));
    }
}

/// Rows that fit into so much memory with the table that finds their blocks.
fn most_rows(bytes: usize) -> usize {
    let bytes_of = |rows: usize| {
        let pieces = rows.div_ceil(PIECE);
        let table = Table::bytes_for(rows * WIDTH);
        rows * size_of::<Row>() + (pieces + more(pieces)) * size_of::<Box<[Row]>>() + table
    };
    // By halves, from too many.
    let (mut fits, mut too_many) = (0, (bytes / size_of::<Row>() + 1).min(NONE as usize / WIDTH));
    while too_many - fits > 1 {
        let middle = fits + (too_many - fits) / 2;
        if bytes_of(middle) <= bytes {
            fits = middle;
        } else {
            too_many = middle;
        }
    }
    fits
}
