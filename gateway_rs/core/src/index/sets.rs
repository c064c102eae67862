//! Who holds blocks: sets of workers, equal ones once, and which sets each worker is in.

use super::{
    table::{more, Entries, Pieces, Table, NONE},
    WorkerId,
};

const PIECE: usize = 64;

/// Workers that hold the same blocks.
#[derive(Debug)]
pub(super) struct Set {
    /// Rising.
    pub workers: Box<[WorkerId]>,
    /// The sum of the workers' own.
    hash: u64,
    /// The next in its bucket; of a set that is not in use, the next such.
    next: u32,
    /// One of the rows of its blocks, of which there is a ring.
    pub first: u32,
}

impl Default for Set {
    fn default() -> Self {
        Self {
            workers: Box::default(),
            hash: 0,
            next: NONE,
            first: NONE,
        }
    }
}

impl Entries for Pieces<Set, PIECE> {
    fn hash(&self, at: u32) -> u64 {
        self[at].hash
    }

    fn next(&self, at: u32) -> u32 {
        self[at].next
    }

    fn set_next(&mut self, at: u32, next: u32) {
        self[at].next = next;
    }
}

/// Mixes bits: what a worker adds to the hash of the sets it is in.
pub(super) fn worker_hash(worker: WorkerId) -> u64 {
    let mixed = (u64::from(worker) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

#[derive(Debug, Default)]
pub(super) struct Worker {
    /// The sets that it is in, rising.
    pub sets: Vec<u32>,
    pub blocks: usize,
}

/// All sets and workers. NONE is the set of nobody.
#[derive(Debug)]
pub(super) struct Sets {
    pub sets: Pieces<Set, PIECE>,
    by_workers: Table,
    /// The first that is not in use.
    free: u32,
    pub workers: Vec<Worker>,
    /// What sets and workers own beside their places.
    pub owned_bytes: usize,
}

impl Default for Sets {
    fn default() -> Self {
        Self {
            sets: Pieces::default(),
            by_workers: Table::default(),
            free: NONE,
            workers: Vec::new(),
            owned_bytes: 0,
        }
    }
}

impl Sets {
    pub fn bytes(&self) -> usize {
        let workers = self.workers.capacity() * size_of::<Worker>();
        self.sets.bytes() + self.by_workers.bytes() + workers + self.owned_bytes
    }

    pub fn of(&self, set: u32) -> &[WorkerId] {
        if set == NONE {
            &[]
        } else {
            &self.sets[set].workers
        }
    }

    pub fn is_of(&self, set: u32, worker: WorkerId) -> bool {
        self.of(set).binary_search(&worker).is_ok()
    }

    /// The set that is that one and the worker, made when there is none; None when there is no room for it.
    pub fn with(&mut self, set: u32, worker: WorkerId, room: usize) -> Option<u32> {
        let workers = self.of(set);
        let at = workers.partition_point(|&each| each < worker);
        let hash = self.hash_of(set).wrapping_add(worker_hash(worker));
        let is = |other: u32| {
            let other = &self.sets[other].workers;
            other.len() == workers.len() + 1
                && other[at] == worker
                && other[..at] == workers[..at]
                && other[at + 1..] == workers[at..]
        };
        if let Some(found) = self.by_workers.find(&self.sets, hash, is) {
            return Some(found);
        }
        let made = [&workers[..at], &[worker], &workers[at..]].concat();
        self.make(made.into(), hash, room)
    }

    /// The set that is that one less one of its several workers.
    pub fn without(&mut self, set: u32, worker: WorkerId, room: usize) -> Option<u32> {
        let workers = self.of(set);
        let at = workers.partition_point(|&each| each < worker);
        let hash = self.hash_of(set).wrapping_sub(worker_hash(worker));
        let is = |other: u32| {
            let other = &self.sets[other].workers;
            other.len() + 1 == workers.len() && other[..at] == workers[..at] && other[at..] == workers[at + 1..]
        };
        if let Some(found) = self.by_workers.find(&self.sets, hash, is) {
            return Some(found);
        }
        let made = [&workers[..at], &workers[at + 1..]].concat();
        self.make(made.into(), hash, room)
    }

    fn hash_of(&self, set: u32) -> u64 {
        if set == NONE {
            0
        } else {
            self.sets[set].hash
        }
    }

    fn make(&mut self, workers: Box<[WorkerId]>, hash: u64, room: usize) -> Option<u32> {
        let most = workers.iter().max().map_or(0, |&worker| worker as usize + 1);
        let mut needed = workers.len() * size_of::<WorkerId>() + self.by_workers.growth_bytes();
        if self.free == NONE {
            needed += self.sets.growth_bytes(PIECE);
        }
        if most > self.workers.capacity() {
            needed += (most - self.workers.capacity() + more(most)) * size_of::<Worker>();
        }
        let full = |&worker: &WorkerId| match self.workers.get(worker as usize) {
            Some(worker) if worker.sets.len() < worker.sets.capacity() => 0,
            Some(worker) => more(worker.sets.len()) * size_of::<u32>(),
            None => more(0) * size_of::<u32>(),
        };
        needed += workers.iter().map(full).sum::<usize>();
        if needed > room {
            return None;
        }
        if most > self.workers.capacity() {
            self.workers.reserve_exact(most - self.workers.len() + more(most));
        }
        if most > self.workers.len() {
            self.workers.resize_with(most, Worker::default);
        }
        if self.free == NONE {
            let from = self.sets.len();
            self.sets.grow(PIECE);
            for set in (from as u32..self.sets.len() as u32).rev() {
                self.sets[set].next = self.free;
                self.free = set;
            }
        }
        let set = self.free;
        self.free = self.sets[set].next;
        for &worker in &workers {
            let of = &mut self.workers[worker as usize].sets;
            if of.len() == of.capacity() {
                self.owned_bytes += more(of.len()) * size_of::<u32>();
                of.reserve_exact(more(of.len()));
            }
            let at = of.partition_point(|&each| each < set);
            of.insert(at, set);
        }
        self.owned_bytes += size_of_val(&*workers);
        self.sets[set] = Set {
            workers,
            hash,
            ..Set::default()
        };
        self.by_workers.insert(&mut self.sets, set);
        Some(set)
    }

    /// A set without blocks is none.
    pub fn drop_if_empty(&mut self, set: u32) {
        if self.sets[set].first != NONE {
            return;
        }
        self.by_workers.remove(&mut self.sets, set);
        let workers = std::mem::take(&mut self.sets[set].workers);
        self.owned_bytes -= size_of_val(&*workers);
        for &worker in &workers {
            let of = &mut self.workers[worker as usize].sets;
            if let Ok(at) = of.binary_search(&set) {
                of.remove(at);
            }
        }
        self.sets[set].next = self.free;
        self.free = set;
    }

    /// The worker is in no set: what it owned goes.
    pub fn give_back(&mut self, worker: WorkerId) {
        if let Some(left) = self.workers.get_mut(worker as usize) {
            self.owned_bytes -= left.sets.capacity() * size_of::<u32>();
            left.sets = Vec::new();
        }
    }
}
