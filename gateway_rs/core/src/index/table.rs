//! Memory in pieces of one size, and a hash table over it that grows by one bucket at a time.
//!
//! No operation takes longer for the table being large: nothing is ever copied or hashed again as a whole, so whoever waits
//! for a writer waits for one entry's work. What is allocated is known to the byte.

use std::ops::{Index, IndexMut};

/// No entry.
pub(super) const NONE: u32 = u32::MAX;

/// A growing array that never moves: pieces of `PIECE` entries, the last one perhaps shorter.
#[derive(Debug)]
pub(super) struct Pieces<T, const PIECE: usize> {
    pieces: Vec<Box<[T]>>,
    len: usize,
}

impl<T, const PIECE: usize> Default for Pieces<T, PIECE> {
    fn default() -> Self {
        Self {
            pieces: Vec::new(),
            len: 0,
        }
    }
}

impl<T: Default, const PIECE: usize> Pieces<T, PIECE> {
    /// Entries that there is room for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Room for one more piece, of at most so many entries.
    pub fn grow(&mut self, most: usize) {
        let piece: Box<[T]> = (0..most.min(PIECE)).map(|_| T::default()).collect();
        self.len += piece.len();
        if self.pieces.len() == self.pieces.capacity() {
            self.pieces.reserve_exact(more(self.pieces.len()));
        }
        self.pieces.push(piece);
    }

    /// What `grow` would add to `bytes`.
    pub fn growth_bytes(&self, most: usize) -> usize {
        let list = if self.pieces.len() == self.pieces.capacity() {
            more(self.pieces.len()) * size_of::<Box<[T]>>()
        } else {
            0
        };
        most.min(PIECE) * size_of::<T>() + list
    }

    /// Allocated, beside what entries own themselves.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>() + self.pieces.capacity() * size_of::<Box<[T]>>()
    }
}

/// By how much a list of so many grows.
pub(super) fn more(len: usize) -> usize {
    (len / 2).max(4)
}

impl<T, const PIECE: usize> Index<u32> for Pieces<T, PIECE> {
    type Output = T;

    fn index(&self, at: u32) -> &T {
        &self.pieces[at as usize / PIECE][at as usize % PIECE]
    }
}

impl<T, const PIECE: usize> IndexMut<u32> for Pieces<T, PIECE> {
    fn index_mut(&mut self, at: u32) -> &mut T {
        &mut self.pieces[at as usize / PIECE][at as usize % PIECE]
    }
}

/// What a table finds: numbered entries, chained within their bucket.
pub(super) trait Entries {
    /// An entry's hash, which places it.
    fn hash(&self, at: u32) -> u64;
    /// The next one of its bucket.
    fn next(&self, at: u32) -> u32;
    /// Changes that.
    fn set_next(&mut self, at: u32, next: u32);
}

/// Entries for each two buckets, on average.
const LOAD: usize = 3;

const BUCKETS: usize = 1024;

/// A hash table that grows bucket by bucket (linear hashing). Entries stay where they are.
#[derive(Debug, Default)]
pub(super) struct Table {
    heads: Pieces<Head, BUCKETS>,
    buckets: usize,
    entries: usize,
}

#[derive(Debug)]
struct Head(u32);

impl Default for Head {
    fn default() -> Self {
        Self(NONE)
    }
}

impl Table {
    /// Memory of a table of so many entries.
    pub fn bytes_for(entries: usize) -> usize {
        let pieces = (entries * 2).div_ceil(LOAD).div_ceil(BUCKETS).max(1);
        pieces * BUCKETS * size_of::<Head>() + (pieces + more(pieces)) * size_of::<Box<[Head]>>()
    }

    /// Allocated.
    pub fn bytes(&self) -> usize {
        self.heads.bytes()
    }

    /// What inserting one would add to `bytes`.
    pub fn growth_bytes(&self) -> usize {
        if self.buckets == self.heads.len() {
            self.heads.growth_bytes(BUCKETS)
        } else {
            0
        }
    }

    /// How many are in.
    pub fn len(&self) -> usize {
        self.entries
    }

    fn bucket(&self, hash: u64) -> u32 {
        let mask = self.buckets.next_power_of_two() - 1;
        let at = hash as usize & mask;
        (if at < self.buckets { at } else { at & (mask >> 1) }) as u32
    }

    /// The first entry of that hash that `is` accepts.
    pub fn find(&self, entries: &impl Entries, hash: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        if self.buckets == 0 {
            return None;
        }
        let mut at = self.heads[self.bucket(hash)].0;
        while at != NONE && !is(at) {
            at = entries.next(at);
        }
        (at != NONE).then_some(at)
    }

    /// The first entry of each hash's bucket: so many look-ups at once, that memory may answer them together.
    pub fn firsts<const COUNT: usize>(&self, hashes: [u64; COUNT]) -> [u32; COUNT] {
        if self.buckets == 0 {
            return [NONE; COUNT];
        }
        hashes.map(|hash| self.heads[self.bucket(hash)].0)
    }

    /// Puts in an entry that is not in.
    pub fn insert(&mut self, entries: &mut impl Entries, at: u32) {
        if self.entries * 2 >= self.buckets * LOAD {
            self.split(entries);
        }
        self.entries += 1;
        self.push(entries, at);
    }

    fn push(&mut self, entries: &mut impl Entries, at: u32) {
        let bucket = self.bucket(entries.hash(at));
        let head = &mut self.heads[bucket].0;
        entries.set_next(at, *head);
        *head = at;
    }

    /// Takes out an entry that is in.
    pub fn remove(&mut self, entries: &mut impl Entries, at: u32) {
        let next = entries.next(at);
        let bucket = self.bucket(entries.hash(at));
        let mut before = self.heads[bucket].0;
        if before == at {
            self.heads[bucket].0 = next;
        } else {
            while entries.next(before) != at {
                before = entries.next(before);
            }
            entries.set_next(before, next);
        }
        self.entries -= 1;
    }

    /// One bucket more: it takes over half of an older one.
    fn split(&mut self, entries: &mut impl Entries) {
        if self.buckets == self.heads.len() {
            self.heads.grow(BUCKETS);
        }
        let new = self.buckets as u32;
        self.buckets += 1;
        if new == 0 {
            return;
        }
        let old = new - (self.buckets.next_power_of_two() / 2) as u32;
        let mut at = std::mem::replace(&mut self.heads[old].0, NONE);
        while at != NONE {
            let next = entries.next(at);
            self.push(entries, at);
            at = next;
        }
    }
}
