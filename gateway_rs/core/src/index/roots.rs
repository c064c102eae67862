//! The beginnings that chains of blocks have in common: how many blocks each has.

use super::table::{Pieces, NONE};

const PIECE: usize = 256;

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

/// All of them. One without blocks is not in use.
#[derive(Debug)]
pub(super) struct Roots {
    roots: Pieces<Root, PIECE>,
    free: u32,
}

impl Default for Roots {
    fn default() -> Self {
        Self {
            roots: Pieces::default(),
            free: NONE,
        }
    }
}

impl Roots {
    pub fn bytes(&self) -> usize {
        self.roots.bytes()
    }

    pub fn blocks(&self, root: u32) -> u32 {
        self.roots[root].blocks
    }

    /// One without blocks, which must be given some; None when there is no room for it.
    pub fn take(&mut self, room: usize) -> Option<u32> {
        if self.free == NONE {
            if self.roots.growth_bytes(PIECE) > room {
                return None;
            }
            let from = self.roots.len();
            self.roots.grow(PIECE);
            for root in (from as u32..self.roots.len() as u32).rev() {
                self.give_back(root);
            }
        }
        let root = self.free;
        self.free = self.roots[root].next;
        Some(root)
    }

    fn give_back(&mut self, root: u32) {
        self.roots[root].next = self.free;
        self.free = root;
    }

    /// It has a block more.
    pub fn add(&mut self, root: u32) {
        self.roots[root].blocks += 1;
    }

    /// It has a block less.
    pub fn remove(&mut self, root: u32) {
        self.roots[root].blocks -= 1;
        if self.roots[root].blocks == 0 {
            self.give_back(root);
        }
    }

    #[cfg(test)]
    pub fn in_use(&self) -> usize {
        let is = |root: &u32| *root != NONE;
        let free = std::iter::successors(Some(self.free).filter(is), |&root| {
            Some(self.roots[root].next).filter(is)
        });
        self.roots.len() - free.count()
    }
}
