//! Who holds which prefix blocks, by workers' own reports, in bounded memory.
//!
//! A block's name is the chained hash of itself and all before it, so two prompts that share a name share the whole prefix
//! up to there. Workers are small numbers that the caller gives and may give again after [`PrefixIndex::clear`].
//!
//! Blocks are few words each. *Who* holds a block is a set of workers, and equal sets are one: all blocks of a prefix that
//! the same workers hold share a set, which lists its blocks, so
//!
//! - a match walks the prompt's names and compares a number for each, whoever holds them;
//! - a worker that leaves costs as much as it held blocks;
//! - a second holder costs no memory.
//!
//! Readers need no more than a shared reference, and no change takes longer for the index being large (`table.rs`), so a
//! lock around it is never held for long; what is long by nature ([`PrefixIndex::clear`]) can be done in parts.
//!
//! Memory is counted to the byte and bounded. When there is no room left, what was not used of late makes some: a hand goes
//! round over the blocks, and takes those that nobody has matched or stored again since it last came by. What begins with
//! a block whose continuations have more than their share already (a *root*) makes room among these, so that one hot prompt
//! cannot push out all others. That a block is held is not known any more then, which is all: the index is a hint.

mod expected;
mod table;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};

pub use self::expected::Expected;
use self::table::{more, Entry, Pieces, Table, NONE};

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
const NODE_PART: (usize, usize) = (3, 4);

/// Blocks that one search for room looks at before it takes what comes: a bound on a writer's work.
const MAX_LOOKED_AT: usize = 4096;

/// Blocks of a prompt looked up at once.
const AT_ONCE: usize = 16;

const NODES: usize = 2048;
const SETS: usize = 64;
const ROOTS: usize = 256;

/// A block that somebody holds.
#[derive(Debug)]
struct Node {
    /// Its name, scrambled.
    key: u64,
    /// The next in its bucket; of a node that is not in use, the next such.
    next: u32,
    /// Who holds it; NONE = not in use.
    set: u32,
    /// Neighbours in the list of its set.
    before: u32,
    after: u32,
    root: u32,
    /// Since the hand came by.
    used: AtomicBool,
}

impl Default for Node {
    fn default() -> Self {
        Self {
            key: 0,
            next: NONE,
            set: NONE,
            before: NONE,
            after: NONE,
            root: NONE,
            used: AtomicBool::new(false),
        }
    }
}

impl Entry for Node {
    fn hash(&self) -> u64 {
        spread(self.key)
    }

    fn next(&self) -> u32 {
        self.next
    }

    fn set_next(&mut self, next: u32) {
        self.next = next;
    }
}

/// The high bits of a product are the good ones.
fn spread(key: u64) -> u64 {
    key >> 32
}

/// Workers that hold the same blocks, and these.
#[derive(Debug)]
struct Set {
    /// Rising.
    workers: Box<[WorkerId]>,
    /// The sum of the workers' own.
    hash: u64,
    /// The next in its bucket; of a set that is not in use, the next such.
    next: u32,
    first: u32,
    blocks: u32,
}

impl Default for Set {
    fn default() -> Self {
        Self {
            workers: Box::default(),
            hash: 0,
            next: NONE,
            first: NONE,
            blocks: 0,
        }
    }
}

impl Entry for Set {
    fn hash(&self) -> u64 {
        self.hash
    }

    fn next(&self) -> u32 {
        self.next
    }

    fn set_next(&mut self, next: u32) {
        self.next = next;
    }
}

/// What a worker adds to the hash of the sets it is in.
fn worker_hash(worker: WorkerId) -> u64 {
    let mixed = (u64::from(worker) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// The beginning that chains of blocks have in common.
#[derive(Debug)]
struct Root {
    blocks: u32,
    /// Of one that is not in use, the next such.
    next: u32,
}

impl Default for Root {
    fn default() -> Self {
        Self { blocks: 0, next: NONE }
    }
}

#[derive(Debug, Default)]
struct Worker {
    /// The sets that it is in, rising.
    sets: Vec<u32>,
    blocks: usize,
}

/// Block name to workers, and back.
#[derive(Debug)]
pub struct PrefixIndex {
    nodes: Pieces<Node, NODES>,
    by_key: Table,
    free_node: u32,
    sets: Pieces<Set, SETS>,
    by_workers: Table,
    free_set: u32,
    roots: Pieces<Root, ROOTS>,
    free_root: u32,
    workers: Vec<Worker>,
    /// What sets and workers own beside their places.
    owned_bytes: usize,
    /// Blocks held by workers, each counted for each of its holders.
    holdings: usize,
    hand: usize,
    max_nodes: usize,
    max_side_bytes: usize,
    max_root_blocks: u32,
    evicted: u64,
    refused: u64,
    seed: u64,
    multiplier: u64,
    inverse: u64,
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
        let multiplier = worker_hash(seed as u32 ^ (seed >> 32) as u32) | 1;
        // Newton's iteration doubles the bits that are right, of which there are three to begin with.
        let inverse = (0..5).fold(multiplier, |inverse, _| {
            inverse.wrapping_mul(2_u64.wrapping_sub(multiplier.wrapping_mul(inverse)))
        });
        let node_bytes = limits.bytes / NODE_PART.1 * NODE_PART.0;
        let max_nodes = most_nodes(node_bytes);
        Self {
            nodes: Pieces::default(),
            by_key: Table::default(),
            free_node: NONE,
            sets: Pieces::default(),
            by_workers: Table::default(),
            free_set: NONE,
            roots: Pieces::default(),
            free_root: NONE,
            workers: Vec::new(),
            owned_bytes: 0,
            holdings: 0,
            hand: 0,
            max_nodes,
            max_side_bytes: limits.bytes - node_bytes,
            max_root_blocks: (max_nodes as f64 * limits.root_share) as u32,
            evicted: 0,
            refused: 0,
            seed,
            multiplier,
            inverse,
        }
    }

    /// Different blocks that somebody holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_key.len()
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
        self.nodes.bytes() + self.by_key.bytes() + self.side_bytes()
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
        self.workers.get(worker as usize).map_or(0, |worker| worker.blocks)
    }

    /// Whether a worker holds that block.
    #[must_use]
    pub fn holds(&self, worker: WorkerId, block: u64) -> bool {
        self.find(block)
            .is_some_and(|node| self.is_of(self.nodes[node].set, worker))
    }

    /// Leading blocks that a worker holds without a gap.
    #[must_use]
    pub fn leading(&self, worker: WorkerId, blocks: &[u64]) -> u32 {
        blocks.iter().take_while(|&&block| self.holds(worker, block)).count() as u32
    }

    /// The worker holds these blocks now, each the child of the one before it; the first one's parent is
    /// [`NO_BLOCK`] when a prompt begins with it. What follows a block that is not known is not taken in: it would not be
    /// found.
    pub fn store(&mut self, worker: WorkerId, parent: u64, blocks: &[u64]) {
        let mut root = match parent {
            NO_BLOCK => NONE,
            parent => match self.find(parent) {
                Some(node) => self.nodes[node].root,
                None => {
                    self.refused += blocks.len() as u64;
                    return;
                }
            },
        };
        for (at, &block) in blocks.iter().enumerate() {
            let node = match self.find(block) {
                Some(node) => Some(node),
                None => self.insert(block, &mut root),
            };
            if !node.is_some_and(|node| self.hold(worker, node)) {
                self.refused += (blocks.len() - at) as u64;
                return;
            }
            if let Some(node) = node {
                root = self.nodes[node].root;
            }
        }
    }

    /// The worker no longer holds these blocks.
    pub fn remove(&mut self, worker: WorkerId, blocks: &[u64]) {
        for &block in blocks {
            if let Some(node) = self.find(block) {
                self.release(worker, node);
            }
        }
    }

    /// The worker holds nothing any more. Takes as long as it held blocks.
    pub fn clear(&mut self, worker: WorkerId) {
        while !self.clear_some(worker, usize::MAX) {}
    }

    /// A part of [`Self::clear`]: at most so many blocks. True when nothing is left.
    pub fn clear_some(&mut self, worker: WorkerId, most: usize) -> bool {
        let mut left = most;
        while let Some(&set) = self.workers.get(worker as usize).and_then(|worker| worker.sets.last()) {
            let node = self.sets[set].first;
            if left == 0 {
                return false;
            }
            self.release(worker, node);
            left -= 1;
        }
        if let Some(left) = self.workers.get_mut(worker as usize) {
            self.owned_bytes -= left.sets.capacity() * size_of::<u32>();
            left.sets = Vec::new();
        }
        true
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
        for node in self.walk(blocks) {
            let node = &self.nodes[node];
            if node.set != set {
                let holders = &self.sets[node.set].workers;
                if depth == 0 {
                    out.extend(holders.iter().map(|&worker| Overlap { worker, blocks: 0 }));
                    matching = holders.len();
                } else {
                    matching = keep(&mut out[start..], matching, holders, depth);
                }
                set = node.set;
                if matching == 0 {
                    break;
                }
            }
            depth += 1;
            // Written only when it is news: readers on several threads share the line.
            if !node.used.load(Ordering::Relaxed) {
                node.used.store(true, Ordering::Relaxed);
            }
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
        let sets = self.workers.get(worker as usize).map_or(&[][..], |worker| &worker.sets);
        for &set in sets {
            let mut node = self.sets[set].first;
            while node != NONE {
                let at = &self.nodes[node];
                by_root.entry(at.root).or_default().push(self.name(at.key));
                node = at.after;
            }
        }
        by_root.into_values().collect()
    }

    // Names.

    fn key(&self, block: u64) -> u64 {
        (block ^ self.seed).wrapping_mul(self.multiplier)
    }

    fn name(&self, key: u64) -> u64 {
        key.wrapping_mul(self.inverse) ^ self.seed
    }

    fn find(&self, block: u64) -> Option<u32> {
        let key = self.key(block);
        self.by_key.find(&self.nodes, spread(key), |node| node.key == key)
    }

    /// The blocks in turn, while somebody holds them. Several are looked up at once: they are all over the memory, and it
    /// is the waiting for it that takes time.
    fn walk<'a>(&'a self, blocks: &'a [u64]) -> impl Iterator<Item = u32> + 'a {
        // One alone first: most prompts that are not known are not from their beginning on.
        let (first, rest) = blocks.split_at(blocks.len().min(1));
        let first = first.iter().map(|&block| self.find(block));
        let rest = rest.chunks(AT_ONCE).flat_map(move |chunk| {
            let mut keys = [0; AT_ONCE];
            for (key, &block) in keys.iter_mut().zip(chunk) {
                *key = self.key(block);
            }
            let firsts = self.by_key.firsts(keys.map(spread));
            let found = firsts.map(|node| if node == NONE { 0 } else { self.nodes[node].key });
            (0..chunk.len()).map(move |at| {
                let is_first = firsts[at] != NONE && found[at] == keys[at];
                is_first.then_some(firsts[at]).or_else(|| {
                    self.by_key
                        .find(&self.nodes, spread(keys[at]), |node| node.key == keys[at])
                })
            })
        });
        first.chain(rest).map_while(|node| node)
    }

    // Blocks.

    /// A block that nobody holds yet; it must be held at once. None when there is no room for it.
    fn insert(&mut self, block: u64, root: &mut u32) -> Option<u32> {
        let node = self.take_node(*root)?;
        if *root == NONE {
            let Some(made) = self.take_root() else {
                self.nodes[node].next = self.free_node;
                self.free_node = node;
                return None;
            };
            *root = made;
        }
        self.roots[*root].blocks += 1;
        let key = self.key(block);
        let made = &mut self.nodes[node];
        made.key = key;
        made.root = *root;
        made.set = NONE;
        // It has the whole round to be wanted.
        *made.used.get_mut() = false;
        self.by_key.insert(&mut self.nodes, node);
        Some(node)
    }

    fn take_node(&mut self, root: u32) -> Option<u32> {
        if self.free_node == NONE {
            let left = self.max_nodes - self.nodes.len();
            if left == 0 {
                self.evict(root)?;
            } else {
                let from = self.nodes.len();
                self.nodes.grow(left);
                for node in (from..self.nodes.len()).rev() {
                    self.nodes[node as u32].next = self.free_node;
                    self.free_node = node as u32;
                }
            }
        }
        let node = self.free_node;
        self.free_node = self.nodes[node].next;
        Some(node)
    }

    /// Makes room for a block of that root by giving one up.
    fn evict(&mut self, root: u32) -> Option<()> {
        let of_its_own = root != NONE && self.roots[root].blocks > self.max_root_blocks;
        let mut victim = None;
        for _ in 0..(2 * self.nodes.len()).min(MAX_LOOKED_AT) {
            // Down, so that the end of a chain goes before its beginning.
            self.hand = if self.hand == 0 { self.nodes.len() } else { self.hand } - 1;
            let node = &mut self.nodes[self.hand as u32];
            if node.set == NONE || (of_its_own && node.root != root) {
                continue;
            }
            if !std::mem::replace(node.used.get_mut(), false) {
                victim = Some(self.hand as u32);
                break;
            }
            victim = victim.or(Some(self.hand as u32));
        }
        let victim = victim?;
        self.evicted += 1;
        self.forget(victim, self.nodes[victim].set);
        Some(())
    }

    /// A block is given up for all who hold it.
    fn forget(&mut self, node: u32, set: u32) {
        let holders = self.sets[set].workers.len();
        for at in 0..holders {
            let worker = self.sets[set].workers[at];
            self.workers[worker as usize].blocks -= 1;
        }
        self.holdings -= holders;
        self.leave(node);
        self.drop_node(node);
    }

    fn drop_node(&mut self, node: u32) {
        self.by_key.remove(&mut self.nodes, node);
        let root = self.nodes[node].root;
        self.roots[root].blocks -= 1;
        if self.roots[root].blocks == 0 {
            self.roots[root].next = self.free_root;
            self.free_root = root;
        }
        self.nodes[node].set = NONE;
        self.nodes[node].next = self.free_node;
        self.free_node = node;
    }

    fn take_root(&mut self) -> Option<u32> {
        if self.free_root == NONE {
            if !self.affords(self.roots.growth_bytes(ROOTS)) {
                return None;
            }
            let from = self.roots.len();
            self.roots.grow(ROOTS);
            for root in (from..self.roots.len()).rev() {
                self.roots[root as u32].next = self.free_root;
                self.free_root = root as u32;
            }
        }
        let root = self.free_root;
        self.free_root = self.roots[root].next;
        Some(root)
    }

    // Who holds them.

    fn is_of(&self, set: u32, worker: WorkerId) -> bool {
        set != NONE && self.sets[set].workers.binary_search(&worker).is_ok()
    }

    /// Whether the worker holds that block now: False when there is no room for it.
    fn hold(&mut self, worker: WorkerId, node: u32) -> bool {
        let set = self.nodes[node].set;
        if self.is_of(set, worker) {
            *self.nodes[node].used.get_mut() = true;
            return true;
        }
        let Some(with) = self.set_with(set, worker) else {
            if set == NONE {
                self.drop_node(node);
            }
            return false;
        };
        *self.nodes[node].used.get_mut() |= set != NONE;
        self.leave(node);
        self.enter(node, with);
        self.workers[worker as usize].blocks += 1;
        self.holdings += 1;
        true
    }

    fn release(&mut self, worker: WorkerId, node: u32) {
        let set = self.nodes[node].set;
        if !self.is_of(set, worker) {
            return;
        }
        if self.sets[set].workers.len() > 1 {
            let Some(without) = self.set_without(set, worker) else {
                // No room to say who is left.
                self.refused += 1;
                self.forget(node, set);
                return;
            };
            self.leave(node);
            self.enter(node, without);
        } else {
            self.leave(node);
            self.drop_node(node);
        }
        self.workers[worker as usize].blocks -= 1;
        self.holdings -= 1;
    }

    /// Puts a block into the list of its new set.
    fn enter(&mut self, node: u32, set: u32) {
        let first = std::mem::replace(&mut self.sets[set].first, node);
        self.sets[set].blocks += 1;
        if first != NONE {
            self.nodes[first].before = node;
        }
        let entered = &mut self.nodes[node];
        entered.set = set;
        entered.before = NONE;
        entered.after = first;
    }

    /// Takes a block out of its set's list; a set without blocks is none.
    fn leave(&mut self, node: u32) {
        let (set, before, after) = {
            let node = &self.nodes[node];
            (node.set, node.before, node.after)
        };
        if set == NONE {
            return;
        }
        if after != NONE {
            self.nodes[after].before = before;
        }
        if before == NONE {
            self.sets[set].first = after;
        } else {
            self.nodes[before].after = after;
        }
        self.sets[set].blocks -= 1;
        if self.sets[set].blocks == 0 {
            self.drop_set(set);
        }
    }

    /// The set that is that one and the worker; NONE is the empty one. None = there is no room for it.
    fn set_with(&mut self, set: u32, worker: WorkerId) -> Option<u32> {
        let workers: &[WorkerId] = if set == NONE { &[] } else { &self.sets[set].workers };
        let hash = if set == NONE { 0 } else { self.sets[set].hash }.wrapping_add(worker_hash(worker));
        let at = workers.partition_point(|&each| each < worker);
        let is = |other: &Set| {
            other.workers.len() == workers.len() + 1
                && other.workers[at] == worker
                && other.workers[..at] == workers[..at]
                && other.workers[at + 1..] == workers[at..]
        };
        if let Some(found) = self.by_workers.find(&self.sets, hash, is) {
            return Some(found);
        }
        let made = [&workers[..at], &[worker], &workers[at..]].concat();
        self.make_set(made.into(), hash)
    }

    fn set_without(&mut self, set: u32, worker: WorkerId) -> Option<u32> {
        let workers = &self.sets[set].workers;
        let hash = self.sets[set].hash.wrapping_sub(worker_hash(worker));
        let at = workers.partition_point(|&each| each < worker);
        let is = |other: &Set| {
            other.workers.len() + 1 == workers.len()
                && other.workers[..at] == workers[..at]
                && other.workers[at..] == workers[at + 1..]
        };
        if let Some(found) = self.by_workers.find(&self.sets, hash, is) {
            return Some(found);
        }
        let made = [&workers[..at], &workers[at + 1..]].concat();
        self.make_set(made.into(), hash)
    }

    fn make_set(&mut self, workers: Box<[WorkerId]>, hash: u64) -> Option<u32> {
        let most = workers.iter().max().map_or(0, |&worker| worker as usize + 1);
        let mut needed = workers.len() * size_of::<WorkerId>() + self.by_workers.growth_bytes();
        if self.free_set == NONE {
            needed += self.sets.growth_bytes(SETS);
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
        if !self.affords(needed) {
            return None;
        }
        if most > self.workers.capacity() {
            self.workers.reserve_exact(most - self.workers.len() + more(most));
        }
        if most > self.workers.len() {
            self.workers.resize_with(most, Worker::default);
        }
        if self.free_set == NONE {
            let from = self.sets.len();
            self.sets.grow(SETS);
            for set in (from..self.sets.len()).rev() {
                self.sets[set as u32].next = self.free_set;
                self.free_set = set as u32;
            }
        }
        let set = self.free_set;
        self.free_set = self.sets[set].next;
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

    fn drop_set(&mut self, set: u32) {
        self.by_workers.remove(&mut self.sets, set);
        let workers = std::mem::take(&mut self.sets[set].workers);
        self.owned_bytes -= size_of_val(&*workers);
        for &worker in &workers {
            let of = &mut self.workers[worker as usize].sets;
            if let Ok(at) = of.binary_search(&set) {
                of.remove(at);
            }
        }
        self.sets[set].next = self.free_set;
        self.free_set = set;
    }

    // Memory.

    fn side_bytes(&self) -> usize {
        self.sets.bytes()
            + self.by_workers.bytes()
            + self.roots.bytes()
            + self.workers.capacity() * size_of::<Worker>()
            + self.owned_bytes
    }

    fn affords(&self, bytes: usize) -> bool {
        self.side_bytes() + bytes <= self.max_side_bytes
    }
}

/// Blocks that fit into so much memory with the table that finds them.
fn most_nodes(bytes: usize) -> usize {
    let bytes_of = |nodes: usize| {
        let pieces = nodes.div_ceil(NODES);
        nodes * size_of::<Node>() + (pieces + more(pieces)) * size_of::<Box<[Node]>>() + Table::bytes_for(nodes)
    };
    // By halves, from too many.
    let (mut fits, mut too_many) = (0, (bytes / size_of::<Node>() + 1).min(NONE as usize));
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
