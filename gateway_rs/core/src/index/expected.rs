//! Blocks that workers do not hold yet but will: those of prompts that they have just been given.
//!
//! Until a worker has computed a prompt and its news have come, nobody else knows; without this, prompts that come at once
//! and begin alike would be computed on as many workers as there are. Bounded by the prompts that are under way.

use ahash::HashMap;
use smallvec::SmallVec;

use super::{Overlap, PrefixIndex, WorkerId};

/// So many blocks of a prompt are all written down, and farther in each [`STRIDE`]th: a long prompt has thousands, of which
/// the name of each says that all before it are the same too. What is expected there is known to so many blocks, no more
/// than there are.
const ALL_UNTIL: usize = 256;
const STRIDE: usize = 16;

fn is_mark(at: usize) -> bool {
    at < ALL_UNTIL || (at + 1) % STRIDE == 0
}

/// Of a prompt's blocks, those to be expected of a worker that holds so many of them.
#[must_use]
pub fn marks(blocks: &[u64], held: usize) -> Vec<u64> {
    let rest = blocks.iter().enumerate().skip(held);
    rest.filter(|&(at, _)| is_mark(at)).map(|(_, &block)| block).collect()
}

/// Block name to workers, each with how many of its prompts want it.
#[derive(Debug, Default)]
pub struct Expected {
    // Mostly one worker, without memory of its own.
    workers: HashMap<u64, SmallVec<[(WorkerId, u32); 1]>>,
}

impl Expected {
    /// Whether nothing is expected of anybody.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }

    /// The worker will hold these, because of one prompt: its [`marks`].
    pub fn add(&mut self, worker: WorkerId, blocks: &[u64]) {
        self.workers.reserve(blocks.len());
        for &block in blocks {
            let workers = self.workers.entry(block).or_default();
            match workers.iter_mut().find(|each| each.0 == worker) {
                Some(known) => known.1 += 1,
                None => workers.push((worker, 1)),
            }
        }
    }

    /// That prompt is over: what it left is in the index.
    pub fn remove(&mut self, worker: WorkerId, blocks: &[u64]) {
        for block in blocks {
            let Some(workers) = self.workers.get_mut(block) else {
                continue;
            };
            if let Some(at) = workers.iter().position(|each| each.0 == worker) {
                workers[at].1 -= 1;
                if workers[at].1 == 0 {
                    workers.swap_remove(at);
                }
            }
            if workers.is_empty() {
                self.workers.remove(block);
            }
        }
    }

    /// The worker is gone. Takes as long as there are blocks that anybody will hold.
    pub fn clear(&mut self, worker: WorkerId) {
        self.workers.retain(|_, workers| {
            workers.retain(|each| each.0 != worker);
            !workers.is_empty()
        });
    }

    /// Leading blocks that a worker will hold without a gap, of which it holds so many now. What not more than `own` prompts
    /// want does not count.
    #[must_use]
    pub fn leading(&self, worker: WorkerId, blocks: &[u64], held: u32, own: u32) -> u32 {
        let comes = |block: &u64| {
            let workers = self.workers.get(block);
            workers.is_some_and(|workers| workers.iter().any(|each| each.0 == worker && each.1 > own))
        };
        let rest = blocks.iter().enumerate().skip(held as usize);
        let marked = rest.filter(|&(at, _)| is_mark(at));
        let last = marked.take_while(|(_, block)| comes(block)).last();
        last.map_or(held, |(at, _)| at as u32 + 1)
    }

    /// [`PrefixIndex::overlap`], with what is expected.
    pub fn overlap(&self, index: &PrefixIndex, blocks: &[u64], out: &mut Vec<Overlap>) {
        let start = out.len();
        index.overlap(blocks, out);
        let (false, Some(first)) = (self.is_empty(), blocks.first()) else {
            return;
        };
        for each in &mut out[start..] {
            each.blocks = self.leading(each.worker, blocks, each.blocks, 0);
        }
        for &(worker, _) in self.workers.get(first).map_or(&[][..], SmallVec::as_slice) {
            if !index.holds(worker, *first) {
                let blocks = self.leading(worker, blocks, 0, 0);
                out.push(Overlap { worker, blocks });
            }
        }
    }
}
