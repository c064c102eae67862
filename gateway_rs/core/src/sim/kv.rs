//! A simulated worker's KV: blocks on the device, shared by name, and a tier of host memory behind them.
//!
//! A named block is a full block of some prompt and all before it; requests that share a prefix hold it together. What
//! nobody holds stays for reuse until its place is needed, least recently used first, and then goes to the host tier, from
//! where it is loaded again. Tails and answers have no name: they are counted, and free when their request ends.

use std::collections::VecDeque;

use ahash::{HashMap, HashMapExt};

use crate::scheduler::events::BlockChange;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tier {
    Device,
    Host,
}

#[derive(Clone, Copy, Debug)]
struct Named {
    tier: Tier,
    /// Requests that hold it; only on the device.
    refs: u32,
    /// When it was last let go; the entry of a queue with another stamp is of before.
    stamp: u64,
}

/// What a request got to start with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// Leading named blocks that it holds now.
    pub named: usize,
    /// Of those, loaded from the host.
    pub loaded: usize,
    /// Blocks without a name.
    pub private: usize,
}

/// One worker's blocks.
#[derive(Debug)]
pub struct Kv {
    device_blocks: usize,
    host_blocks: usize,
    named: HashMap<u64, Named>,
    private: usize,
    on_device: usize,
    on_host: usize,
    /// On the device and held by nobody.
    idle: usize,
    device_queue: VecDeque<(u64, u64)>,
    host_queue: VecDeque<(u64, u64)>,
    stamp: u64,
    changes: Vec<BlockChange>,
}

impl Kv {
    /// Empty, of so many blocks.
    #[must_use]
    pub fn new(device_blocks: usize, host_blocks: usize) -> Self {
        Self {
            device_blocks,
            host_blocks,
            named: HashMap::new(),
            private: 0,
            on_device: 0,
            on_host: 0,
            idle: 0,
            device_queue: VecDeque::new(),
            host_queue: VecDeque::new(),
            stamp: 0,
            changes: Vec::new(),
        }
    }

    /// Blocks on the device.
    #[must_use]
    pub fn device_blocks(&self) -> usize {
        self.device_blocks
    }

    /// Held by requests.
    #[must_use]
    pub fn used(&self) -> usize {
        self.private + self.on_device - self.idle
    }

    /// Kept for reuse on the device.
    #[must_use]
    pub fn cached(&self) -> usize {
        self.idle
    }

    /// Kept for reuse on the host.
    #[must_use]
    pub fn on_host(&self) -> usize {
        self.on_host
    }

    fn free(&self) -> isize {
        self.device_blocks as isize - (self.private + self.on_device) as isize
    }

    /// What came and went since the last call.
    pub fn take_changes(&mut self) -> Vec<BlockChange> {
        std::mem::take(&mut self.changes)
    }

    /// Whether there is something to take.
    #[must_use]
    pub fn changed(&self) -> bool {
        !self.changes.is_empty()
    }

    fn stored(&mut self, block: u64) {
        match self.changes.last_mut() {
            Some(BlockChange::Stored(blocks)) => blocks.push(block),
            _ => self.changes.push(BlockChange::Stored(vec![block])),
        }
    }

    fn removed(&mut self, block: u64) {
        match self.changes.last_mut() {
            Some(BlockChange::Removed(blocks)) => blocks.push(block),
            _ => self.changes.push(BlockChange::Removed(vec![block])),
        }
    }

    /// Leading blocks that are here, in either tier.
    #[must_use]
    pub fn leading(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|block| self.named.contains_key(block)).count()
    }

    /// Takes `total` blocks for a request, of which the leading ones of `blocks` are reused where they are here, and leaves
    /// `spare` for those who run. None, and nothing taken, when they aren't there.
    pub fn start(&mut self, blocks: &[u64], total: usize, spare: usize) -> Option<Start> {
        let named = self.leading(blocks).min(total);
        let here = blocks[..named].iter().map(|block| self.named[block]);
        let idle = here
            .clone()
            .filter(|each| each.tier == Tier::Device && each.refs == 0)
            .count();
        let on_device = here.filter(|each| each.tier == Tier::Device).count();
        let available = self.free().max(0) as usize + self.idle - idle;
        if total - on_device + spare > available {
            return None;
        }
        for block in &blocks[..named] {
            self.hold(*block);
        }
        self.private += total - named;
        self.make_room();
        Some(Start {
            named,
            loaded: named - on_device,
            private: total - named,
        })
    }

    /// One block more for an answer that grows; whether there was one.
    pub fn grow(&mut self) -> bool {
        if self.free() <= 0 && self.idle == 0 {
            return false;
        }
        self.private += 1;
        self.make_room();
        true
    }

    /// A block without a name is full now, and is this one.
    pub fn name(&mut self, block: u64) {
        self.private -= 1;
        self.hold(block);
        self.make_room();
    }

    /// A request ends: it held these and so many without a name.
    pub fn release(&mut self, named: &[u64], private: usize) {
        self.private -= private;
        // The end of a prefix is of use to fewer, so it goes first.
        for block in named.iter().rev() {
            self.stamp += 1;
            let stamp = self.stamp;
            if let Some(each) = self.named.get_mut(block) {
                each.refs = each.refs.saturating_sub(1);
                if each.refs == 0 {
                    each.stamp = stamp;
                    self.idle += 1;
                    self.device_queue.push_back((*block, stamp));
                }
            }
        }
        if self.device_queue.len() > 4 * self.device_blocks + 64 {
            let named = &self.named;
            let current = |pair: &(u64, u64)| named.get(&pair.0).is_some_and(|each| is_idle(each, pair.1));
            self.device_queue.retain(current);
        }
    }

    /// All is lost.
    pub fn clear(&mut self) {
        *self = Self::new(self.device_blocks, self.host_blocks);
        self.changes.push(BlockChange::Cleared);
    }

    fn hold(&mut self, block: u64) {
        match self.named.get_mut(&block) {
            Some(each) => {
                match (each.tier, each.refs) {
                    (Tier::Device, 0) => self.idle -= 1,
                    (Tier::Device, _) => {}
                    (Tier::Host, _) => {
                        each.tier = Tier::Device;
                        self.on_host -= 1;
                        self.on_device += 1;
                    }
                }
                each.refs += 1;
            }
            None => {
                let held = Named {
                    tier: Tier::Device,
                    refs: 1,
                    stamp: 0,
                };
                self.named.insert(block, held);
                self.on_device += 1;
                self.stored(block);
            }
        }
    }

    fn make_room(&mut self) {
        while self.free() < 0 {
            let Some((block, stamp)) = self.device_queue.pop_front() else {
                return;
            };
            let Some(each) = self.named.get_mut(&block) else {
                continue;
            };
            if !is_idle(each, stamp) {
                continue;
            }
            self.idle -= 1;
            self.on_device -= 1;
            if self.host_blocks == 0 {
                self.named.remove(&block);
                self.removed(block);
            } else {
                each.tier = Tier::Host;
                self.on_host += 1;
                self.host_queue.push_back((block, stamp));
                self.trim_host();
            }
        }
    }

    fn trim_host(&mut self) {
        while self.on_host > self.host_blocks || self.host_queue.len() > 4 * self.host_blocks + 64 {
            let Some((block, stamp)) = self.host_queue.pop_front() else {
                return;
            };
            let current = |each: &Named| each.tier == Tier::Host && each.stamp == stamp;
            if self.named.get(&block).is_some_and(current) {
                self.named.remove(&block);
                self.on_host -= 1;
                self.removed(block);
            }
        }
    }
}

fn is_idle(each: &Named, stamp: u64) -> bool {
    each.tier == Tier::Device && each.refs == 0 && each.stamp == stamp
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn prefixes_are_shared_and_kept_until_their_place_is_needed() {
        let mut kv = Kv::new(6, 0);
        let first = kv.start(&[1, 2], 3, 0).expect("room");
        assert_eq!((first.named, first.private), (0, 3));
        kv.name(1);
        kv.name(2);
        let second = kv.start(&[1, 2, 3], 4, 0).expect("room");
        assert_eq!((second.named, second.loaded, second.private), (2, 0, 2));
        assert_eq!(kv.used(), 5);
        assert!(kv.start(&[], 2, 0).is_none());
        kv.release(&[1, 2], 1);
        kv.release(&[1, 2], 2);
        assert_eq!((kv.used(), kv.cached()), (0, 2));
        // Five of six: block 2, the end of the prefix, has to go; block 1 stays.
        kv.start(&[], 5, 0).expect("room");
        assert_eq!((kv.leading(&[1]), kv.leading(&[1, 2])), (1, 1));
    }

    #[test]
    fn what_leaves_the_device_is_loaded_from_the_host() {
        let mut kv = Kv::new(2, 1);
        kv.start(&[1, 2], 2, 0).expect("room");
        kv.name(1);
        kv.name(2);
        kv.release(&[1, 2], 0);
        kv.start(&[], 1, 0).expect("room");
        assert_eq!((kv.on_host(), kv.leading(&[1, 2])), (1, 2));
        kv.release(&[], 1);
        let start = kv.start(&[1, 2], 2, 0).expect("room");
        assert_eq!((start.named, start.loaded), (2, 1));
    }

    proptest! {
        /// Whatever happens, no more is on the device than fits, books add up, and the changes tell what is here.
        #[test]
        fn books_add_up(
            device in 1_usize..12, host in 0_usize..6,
            acts in prop::collection::vec((0_u8..4, 0_u64..4, 1_usize..8), 0..80),
        ) {
            let mut kv = Kv::new(device, host);
            // (names held, names still to give, unnamed)
            let mut running: Vec<(Vec<u64>, Vec<u64>, usize)> = Vec::new();
            let mut told = BTreeSet::new();
            for (act, root, size) in acts {
                let blocks: Vec<u64> = (0..size as u64 - 1).map(|depth| root * 100 + depth).collect();
                match act {
                    0 => if let Some(start) = kv.start(&blocks, size, 0) {
                        running.push((blocks[..start.named].to_vec(), blocks[start.named..].to_vec(), start.private));
                    }
                    1 => if let Some((held, rest, private)) = running.last_mut() {
                        if !rest.is_empty() {
                            let block = rest.remove(0);
                            kv.name(block);
                            held.push(block);
                            *private -= 1;
                        }
                    }
                    2 => if let Some((_, _, private)) = running.last_mut() {
                        *private += usize::from(kv.grow());
                    }
                    _ => if !running.is_empty() {
                        let (held, _, private) = running.remove(size % running.len());
                        kv.release(&held, private);
                    }
                }
                for change in kv.take_changes() {
                    match change {
                        BlockChange::Stored(blocks) => told.extend(blocks),
                        BlockChange::Removed(blocks) => blocks.iter().for_each(|block| { told.remove(block); }),
                        BlockChange::Cleared => told.clear(),
                    }
                }
                let held: BTreeSet<u64> = running.iter().flat_map(|each| each.0.iter().copied()).collect();
                let private: usize = running.iter().map(|each| each.2).sum();
                prop_assert_eq!(kv.used(), held.len() + private);
                prop_assert!(kv.used() + kv.cached() <= device, "{} + {} > {}", kv.used(), kv.cached(), device);
                prop_assert!(kv.on_host() <= host);
                prop_assert_eq!(told.len(), held.len() + kv.cached() + kv.on_host());
                prop_assert!(held.is_subset(&told));
            }
        }
    }
}
