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
