//! What the prefix index says of its memory is what the allocator has given it, to the byte.
#![allow(unsafe_code)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use headrace_core::index::{Limits, PrefixIndex, NO_BLOCK};
use rand::{rngs::StdRng, Rng, SeedableRng};

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator does it; a number is kept beside.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = LIVE.try_with(|live| live.set(live.get().wrapping_add(layout.size())));
        System.alloc(layout)
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let _ = LIVE.try_with(|live| live.set(live.get().wrapping_sub(layout.size())));
        System.dealloc(at, layout);
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn memory_is_counted_to_the_byte() {
    for seed in 0..20 {
        let mut dice = StdRng::seed_from_u64(seed);
        let limits = Limits {
            bytes: 1 << dice.random_range(10..22),
            root_share: 0.5,
        };
        let before = LIVE.get();
        let mut index = PrefixIndex::new(limits, seed);
        for step in 0..3000_u64 {
            let worker = dice.random_range(0..40);
            let from = dice.random_range(0..3000);
            let blocks: Vec<u64> = (1..dice.random_range(2..40)).map(|block| from * 100 + block).collect();
            match dice.random_range(0..20) {
                0 => index.clear(worker),
                1..=5 => index.remove(worker, &blocks),
                _ => index.store(worker, NO_BLOCK, &blocks),
            }
            drop(blocks);
            assert_eq!(
                index.bytes(),
                LIVE.get().wrapping_sub(before),
                "seed {seed}, step {step}"
            );
            assert!(index.bytes() <= limits.bytes, "seed {seed}, step {step}");
        }
        drop(index);
        assert_eq!(LIVE.get(), before);
    }
}

/// `cargo test --release -p headrace-core --test index_memory -- --ignored`: a minute or two on a quiet machine.
#[test]
#[ignore = "long, and takes 2 GB"]
fn a_hundred_million_blocks_stay_within_the_bound() {
    const CHAIN: u64 = 2000;
    for mib in [256, 3072] {
        let limits = Limits {
            bytes: mib << 20,
            root_share: 0.5,
        };
        let (mut index, before) = (PrefixIndex::new(limits, 1), LIVE.get());
        // All that comes is kept where there is room for it; a quarter of the bound is not for blocks.
        let kept = 100_000_000.min(limits.bytes as u64 * 3 / 4 / 21);
        for chain in 0..100_000_000 / CHAIN {
            let blocks: Vec<u64> = (1..=CHAIN).map(|at| (chain * CHAIN + at) * 0x9e37_79b9).collect();
            for part in 0..blocks.len().div_ceil(64) {
                let parent = (part * 64).checked_sub(1).map_or(NO_BLOCK, |at| blocks[at]);
                let end = blocks.len().min(part * 64 + 64);
                index.store((chain % 64) as u32, parent, &blocks[part * 64..end]);
            }
            drop(blocks);
            assert_eq!(index.bytes(), LIVE.get().wrapping_sub(before), "chain {chain}");
            assert!(index.bytes() <= limits.bytes, "chain {chain}");
        }
        assert!(index.len() as u64 >= kept, "{} of {kept}", index.len());
    }
}
