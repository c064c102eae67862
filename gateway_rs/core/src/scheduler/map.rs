//! Maps whose order of iteration is the same in every run: decisions must not depend on a process's luck.

use std::{cmp::Ordering, collections::HashMap, hash::BuildHasher};

/// A hash map with a fixed seed. Its keys come from our own processes, not from strangers.
pub type Map<K, V> = HashMap<K, V, Fixed>;

/// The hasher of [`Map`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Fixed;

impl BuildHasher for Fixed {
    type Hasher = ahash::AHasher;

    fn build_hasher(&self) -> ahash::AHasher {
        const STATE: ahash::RandomState = ahash::RandomState::with_seeds(
            0x243f_6a88_85a3_08d3,
            0x1319_8a2e_0370_7344,
            0xa409_3822_299f_31d0,
            0x082e_fa98_ec4e_6c89,
        );
        STATE.build_hasher()
    }
}

/// A number of seconds (or of anything) as a key.
#[derive(Clone, Copy, Debug, Default)]
pub struct Key(pub f64);

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}
