//! Ids of stretches of text that were encoded a while ago: a conversation's next turn encodes its new messages only.
//!
//! A stretch is what lies between two added tokens, nearly always one message of a conversation. The reference encodes
//! each by itself: its ids follow from its text, and from whether it begins the whole text, and from nothing around it.
//! So a stretch met again has the same ids, whatever prompt it is in. Found by a hash, and held against the whole text:
//! no two texts are taken for each other.
//!
//! What is kept for one *scope* (a tenant, and a salt within it) is found by no other: nobody learns from the time that
//! an answer takes what others have asked.

use std::sync::{
    atomic::{AtomicU64, Ordering},
    Arc,
};

use ahash::RandomState;
use quick_cache::{sync::Cache, DefaultHashBuilder, OptionsBuilder, Weighter};

/// Shorter stretches are encoded sooner than found.
const FROM_BYTES: usize = 256;
/// Each has its own lock and its part of the memory; no stretch is larger than such a part.
const SHARDS: usize = 8;
/// Of an entry beside its text and ids.
const ENTRY_BYTES: usize = 160;

/// A bounded memory of stretches, for one tokenizer. `Sync`; a lock is held for finding and putting, not for encoding.
pub struct Stretches {
    kept: Cache<u64, Arc<Stretch>, Bytes>,
    hasher: RandomState,
    from_bytes: usize,
    /// Of texts whose ids were known.
    pub found_bytes: AtomicU64,
    /// Of texts that are long enough to be kept, but were not known.
    pub encoded_bytes: AtomicU64,
}

/// The memory, as one request sees it.
#[derive(Clone, Copy)]
pub struct Remembered<'a> {
    /// The memory.
    pub stretches: &'a Stretches,
    /// Whose.
    pub scope: &'a [u8],
}

struct Stretch {
    scope: Box<[u8]>,
    first: bool,
    text: Box<str>,
    ids: Box<[u32]>,
}

#[derive(Clone)]
struct Bytes;

impl Weighter<u64, Arc<Stretch>> for Bytes {
    fn weight(&self, _: &u64, stretch: &Arc<Stretch>) -> u64 {
        (stretch.text.len() + 4 * stretch.ids.len() + stretch.scope.len() + ENTRY_BYTES) as u64
    }
}

impl Stretches {
    /// A memory of that many bytes; `None` for 0.
    #[must_use]
    pub fn new(bytes: usize) -> Option<Self> {
        let options = OptionsBuilder::new()
            .shards(SHARDS)
            // Messages have some kilobyte.
            .estimated_items_capacity((bytes / 1024).max(SHARDS))
            .weight_capacity(bytes as u64)
            .build()
            .ok()
            .filter(|_| bytes > 0)?;
        Some(Self {
            kept: Cache::with_options(
                options,
                Bytes,
                DefaultHashBuilder::default(),
                quick_cache::sync::DefaultLifecycle::default(),
            ),
            hasher: RandomState::new(),
            from_bytes: FROM_BYTES,
            found_bytes: AtomicU64::new(0),
            encoded_bytes: AtomicU64::new(0),
        })
    }

    /// One that keeps short stretches, too.
    #[cfg(test)]
    pub(crate) fn of_any_length(bytes: usize) -> Self {
        Self {
            from_bytes: 1,
            ..Self::new(bytes).expect("more than 0")
        }
    }
}

impl Remembered<'_> {
    /// Appends the ids of `text`: those it had, or what `encode` appends, which says whether it appended all.
    pub(crate) fn or_encode(
        self,
        text: &str,
        first: bool,
        ids: &mut Vec<u32>,
        encode: impl FnOnce(&mut Vec<u32>) -> bool,
    ) -> bool {
        let Self { stretches, scope } = self;
        if text.len() < stretches.from_bytes {
            return encode(ids);
        }
        let key = stretches.hasher.hash_one((scope, first, text));
        if let Some(kept) = stretches.kept.get(&key) {
            if *kept.text == *text && kept.first == first && *kept.scope == *scope {
                stretches.found_bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
                ids.extend_from_slice(&kept.ids);
                return true;
            }
        }
        stretches.encoded_bytes.fetch_add(text.len() as u64, Ordering::Relaxed);
        let before = ids.len();
        let whole = encode(ids);
        if whole {
            let stretch = Stretch {
                scope: scope.into(),
                first,
                text: text.into(),
                ids: ids[before..].into(),
            };
            stretches.kept.insert(key, Arc::new(stretch));
        }
        whole
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "a stretch";

    /// How often a text had to be encoded, of those asked for in turn; its ids are always right.
    fn encoded(stretches: &Stretches, asked: &[(&[u8], bool, &str)]) -> usize {
        let mut times = 0;
        for (scope, first, text) in asked {
            let mut ids = vec![7];
            let wanted: Vec<u32> = text.bytes().map(u32::from).chain([u32::from(*first)]).collect();
            let whole = Remembered { stretches, scope }.or_encode(text, *first, &mut ids, |ids| {
                times += 1;
                ids.extend(&wanted);
                true
            });
            assert!(whole);
            assert_eq!(ids, [&[7][..], &wanted].concat());
        }
        times
    }

    #[test]
    fn a_stretch_is_encoded_once_for_each_scope_and_place() {
        let stretches = Stretches::of_any_length(1 << 20);
        let once: [(&[u8], bool, &str); 4] = [
            (b"", false, TEXT),
            (b"", true, TEXT),
            (b"tenant", false, TEXT),
            (b"", false, "another"),
        ];
        assert_eq!(encoded(&stretches, &once), 4);
        assert_eq!(encoded(&stretches, &once), 0);
    }

    #[test]
    fn short_stretches_are_not_kept() {
        let stretches = Stretches::new(1 << 20).expect("some memory");
        let short: (&[u8], bool, &str) = (b"", false, TEXT);
        assert_eq!(encoded(&stretches, &[short, short]), 2);
        let long = TEXT.repeat(FROM_BYTES);
        let long: (&[u8], bool, &str) = (b"", false, &long);
        assert_eq!(encoded(&stretches, &[long, long]), 1);
        assert!(Stretches::new(0).is_none());
    }

    #[test]
    fn what_was_broken_off_is_not_kept() {
        let stretches = Stretches::of_any_length(1 << 20);
        let remembered = Remembered {
            stretches: &stretches,
            scope: b"",
        };
        let mut ids = Vec::new();
        assert!(!remembered.or_encode(TEXT, false, &mut ids, |ids| {
            ids.push(1);
            false
        }));
        assert_eq!(encoded(&stretches, &[(b"", false, TEXT)]), 1);
    }

    #[test]
    fn its_memory_is_bounded() {
        let bytes = 1 << 16;
        let stretches = Stretches::of_any_length(bytes);
        for round in 0..2_000 {
            let text = format!("{round} ").repeat(1 + round % 50);
            encoded(&stretches, &[(b"", false, &text)]);
            assert!(stretches.kept.weight() <= bytes as u64);
        }
        assert!(stretches.kept.len() > 8);
        // Larger than its part of the memory.
        let huge = TEXT.repeat(bytes);
        assert_eq!(encoded(&stretches, &[(b"", false, &huge), (b"", false, &huge)]), 2);
    }
}
