//! Byte-pair encoding of one piece of text, out of bytes or of characters: exactly the reference's merges, without its
//! strings.
//!
//! By cost: the piece is a token (nine pieces in ten); it was merged a short while ago; a short piece is merged in arrays
//! on the stack; a long one with a heap, O(n log n) for any bytes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ahash::AHashMap;

use super::scan::codepoint;

/// No token, no merge.
pub(crate) const NONE: u32 = u32::MAX;

/// The ids and ranks that fit a slot of the pair table.
pub(crate) const MAX_IDS: usize = 1 << 21;
pub(crate) const MAX_MERGES: usize = (1 << 22) - 1;

/// Pieces of up to this many symbols are merged by scanning for the least rank; the scan is O(n²), but on so few it
/// beats the heap.
const SHORT: usize = 62;

/// Bits of a place among the symbols of a short piece; with a rank (22 bits) it fits 32 bits.
const PLACE_BITS: u32 = 6;
const PLACE_MASK: u32 = (1 << PLACE_BITS) - 1;

/// One merge of the model: the ids of a pair and of what it becomes. Its rank is its place in the list.
pub(crate) struct Merge {
    pub(crate) left: u32,
    pub(crate) right: u32,
    pub(crate) merged: u32,
}

/// The model: tables only, immutable.
pub(crate) struct Bpe {
    alphabet: Alphabet,
    pairs: PairTable,
    /// The id that the merge of each rank makes.
    merged: Vec<u32>,
    words: WordTable,
}

/// The symbols that merging begins with. A piece has no more symbols than bytes.
pub(crate) enum Alphabet {
    /// One for each byte; [`NONE`] for bytes without a token, which the reference drops silently.
    Bytes(Box<[u32; 256]>),
    /// One for each character of UTF-8.
    Characters(Characters),
}

/// The ids of characters, and what stands for those without one.
pub(crate) struct Characters {
    /// By the upper bits of a codepoint, which block; block 0 is empty.
    blocks: Box<[u16]>,
    ids: Vec<[u32; Characters::BLOCK]>,
    unknown: Unknown,
}

/// What a character without an id becomes.
pub(crate) enum Unknown {
    /// One symbol for each of its bytes (byte fallback).
    Bytes(Box<[u32; 256]>),
    /// One symbol for each such character, or, fused, for each run of them.
    Token { id: u32, fused: bool },
}

impl Characters {
    const BLOCK: usize = 128;

    pub(crate) fn new(known: impl Iterator<Item = (char, u32)>, unknown: Unknown) -> Self {
        let blocks = vec![0; (char::MAX as usize + 1).div_ceil(Self::BLOCK)].into_boxed_slice();
        let mut table = Self {
            blocks,
            ids: vec![[NONE; Self::BLOCK]],
            unknown,
        };
        for (c, id) in known {
            let block = &mut table.blocks[c as usize / Self::BLOCK];
            if *block == 0 {
                // At most 0x2200 blocks, so the index fits.
                *block = table.ids.len() as u16;
                table.ids.push([NONE; Self::BLOCK]);
            }
            table.ids[usize::from(*block)][c as usize % Self::BLOCK] = id;
        }
        table
    }

    /// The id of a character, or [`NONE`].
    #[inline(always)]
    pub(crate) fn id(&self, codepoint: u32) -> u32 {
        let block = self
            .blocks
            .get(codepoint as usize / Self::BLOCK)
            .copied()
            .unwrap_or_default();
        self.ids
            .get(usize::from(block))
            .map_or(NONE, |ids| ids[codepoint as usize % Self::BLOCK])
    }

    /// Whether a run of characters without an id is one symbol.
    pub(crate) fn fuses_unknown(&self) -> bool {
        matches!(self.unknown, Unknown::Token { fused: true, .. })
    }
}

impl Alphabet {
    /// Calls `symbol` with the id of each symbol of `piece`, in order.
    #[inline(always)]
    fn for_each_symbol(&self, piece: &[u8], mut symbol: impl FnMut(u32)) {
        match self {
            Self::Bytes(ids) => {
                for byte in piece {
                    let id = ids[usize::from(*byte)];
                    if id != NONE {
                        symbol(id);
                    }
                }
            }
            Self::Characters(characters) => {
                let mut at = 0;
                let mut after_unknown = false;
                while let Some(lead) = piece.get(at) {
                    let (codepoint, len) = match lead {
                        0..0x80 => (u32::from(*lead), 1),
                        _ => codepoint(piece, at, *lead),
                    };
                    let id = characters.id(codepoint);
                    if id != NONE {
                        symbol(id);
                    } else {
                        match &characters.unknown {
                            Unknown::Bytes(ids) => piece[at..piece.len().min(at + len)]
                                .iter()
                                .for_each(|byte| symbol(ids[usize::from(*byte)])),
                            Unknown::Token { fused: true, .. } if after_unknown => {}
                            Unknown::Token { id, .. } => symbol(*id),
                        }
                    }
                    after_unknown = id == NONE;
                    at += len;
                }
            }
        }
    }
}

/// What one encoding at a time needs for itself: memory for long pieces, and the pieces merged lately. Belongs to one
/// model.
#[derive(Default)]
pub(crate) struct Scratch {
    symbols: Vec<Symbol>,
    /// Rank (upper half) and place of pairs, least first.
    queue: BinaryHeap<Reverse<u64>>,
    /// Two megabytes: nearly all words are of two or three tokens.
    cache: Cache<Key, 3, 16>,
    /// Those of more. A fourth of that.
    many_cache: Cache<Key, 11, 13>,
    /// Of longer pieces: names in code, words in scripts of three bytes a character. A fourth, too.
    long_cache: Cache<LongKey, 23, 12>,
}

#[derive(Clone, Copy)]
struct Symbol {
    /// [`NONE`] once merged into the symbol on its left.
    id: u32,
    /// The rank of this symbol's pair with the next one, or [`NONE`].
    rank: u32,
    previous: u32,
    next: u32,
}

impl Scratch {
    /// Gives back what one extraordinary piece needed.
    pub(crate) fn trim(&mut self) {
        const USUAL_SYMBOLS: usize = 1 << 14;
        if self.symbols.capacity() > USUAL_SYMBOLS {
            self.symbols = Vec::new();
            self.queue = BinaryHeap::new();
        }
    }
}

impl Bpe {
    /// The model of this alphabet, merges and tokens (bytes and id). With `whole_words` each token is taken whole
    /// wherever a piece equals it (`ignore_merges`); otherwise only where merging would give the same.
    ///
    /// Ids must be below [`MAX_IDS`] and merges no more than [`MAX_MERGES`].
    pub(crate) fn new(alphabet: Alphabet, merges: &[Merge], tokens: &[(Vec<u8>, u32)], whole_words: bool) -> Self {
        let mut model = Self {
            alphabet,
            pairs: PairTable::new(merges),
            merged: merges.iter().map(|merge| merge.merged).collect(),
            words: WordTable::with_capacity(0),
        };
        let mut words = WordTable::with_capacity(tokens.len());
        let mut scratch = Scratch::default();
        let mut ids = Vec::new();
        for (bytes, id) in tokens {
            ids.clear();
            if !whole_words {
                model.merge(bytes, &mut scratch, &mut ids);
            }
            if whole_words || ids == [*id] {
                words.insert(bytes, *id);
            }
        }
        model.words = words;
        model
    }

    /// What merging begins with.
    pub(crate) fn alphabet(&self) -> &Alphabet {
        &self.alphabet
    }

    /// Appends the ids of the piece `text[start..end]`, which isn't empty.
    #[inline(always)]
    pub(crate) fn encode(&self, text: &[u8], start: usize, end: usize, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let len = end - start;
        if len > INLINE {
            self.encode_long(text, start, end, scratch, ids);
            return;
        }
        let key = Key::of(text, start, len);
        let hash = key.hash();
        match self.words.get(key, hash) {
            NONE => self.merge_cached(key, hash, &text[start..end], scratch, ids),
            id => ids.push(id),
        }
    }

    /// [`Bpe::encode`] for a piece that fits no [`Key`].
    #[inline(never)]
    fn encode_long(&self, text: &[u8], start: usize, end: usize, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let piece = &text[start..end];
        let key = LongKey::of(piece);
        if let Some(known) = key.and_then(|key| scratch.long_cache.get(key, key.hash())) {
            ids.extend_from_slice(known);
            return;
        }
        let before = ids.len();
        match self.words.get_long(piece) {
            NONE => self.merge(piece, scratch, ids),
            id => ids.push(id),
        }
        if let Some(key) = key {
            scratch.long_cache.put(key, key.hash(), &ids[before..]);
        }
    }

    /// [`Bpe::merge`] for a short piece, which may have been merged before.
    #[inline(never)]
    fn merge_cached(&self, key: Key, hash: u64, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let known = scratch.cache.get(key, hash);
        if let Some(known) = known.or_else(|| scratch.many_cache.get(key, hash)) {
            ids.extend_from_slice(known);
            return;
        }
        let before = ids.len();
        self.merge_short(piece, ids);
        let made = &ids[before..];
        if !scratch.cache.put(key, hash, made) {
            scratch.many_cache.put(key, hash, made);
        }
    }

    /// Appends the ids of `piece` by merging.
    #[inline(never)]
    fn merge(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        if piece.len() <= SHORT {
            self.merge_short(piece, ids);
        } else {
            self.merge_long(piece, scratch, ids);
        }
    }

    fn merge_short(&self, piece: &[u8], ids: &mut Vec<u32>) {
        // A list linked by places, so that nothing moves: 0 is before the first symbol and `len + 1` after the last.
        let mut symbols = [NONE; SHORT + 2];
        let mut next = [0u8; SHORT + 2];
        let mut previous = [0u8; SHORT + 2];
        // By the place of its left symbol, each pair's rank and that place in one number: the least is what merges
        // first, of equal ranks the leftmost.
        let mut pairs = [NONE; SHORT + 2];
        let mut len = 0;
        self.alphabet.for_each_symbol(piece, |id| {
            len += 1;
            symbols[len] = id;
        });
        for place in 0..=len {
            next[place] = place as u8 + 1;
            previous[place + 1] = place as u8;
        }
        for (place, pair) in pairs.iter_mut().enumerate().take(len).skip(1) {
            *pair = self.ranked_pair(&symbols, place, place + 1);
        }
        loop {
            #[cfg(test)]
            super::work::count(1);
            let least = pairs[..=len].iter().copied().min().unwrap_or(NONE);
            if least == NONE {
                break;
            }
            let left = (least & PLACE_MASK) as usize;
            let right = usize::from(next[left]);
            let after = usize::from(next[right]);
            let before = usize::from(previous[left]);
            symbols[left] = self.merged[(least >> PLACE_BITS) as usize];
            symbols[right] = NONE;
            next[left] = after as u8;
            previous[after] = left as u8;
            pairs[right] = NONE;
            pairs[left] = if after <= len {
                self.ranked_pair(&symbols, left, after)
            } else {
                NONE
            };
            if before > 0 {
                pairs[before] = self.ranked_pair(&symbols, before, left);
            }
        }
        ids.extend(symbols[1..=len].iter().copied().filter(|id| *id != NONE));
    }

    #[inline(always)]
    fn ranked_pair(&self, symbols: &[u32; SHORT + 2], left: usize, right: usize) -> u32 {
        match self.pairs.rank(symbols[left], symbols[right]) {
            NONE => NONE,
            rank => rank << PLACE_BITS | left as u32,
        }
    }

    fn merge_long(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let Scratch { symbols, queue, .. } = scratch;
        let entry = |rank: u32, at: u32| Reverse(u64::from(rank) << 32 | u64::from(at));
        symbols.clear();
        queue.clear();
        self.alphabet.for_each_symbol(piece, |id| {
            let place = symbols.len() as u32;
            symbols.push(Symbol {
                id,
                rank: NONE,
                previous: place.wrapping_sub(1),
                next: place + 1,
            });
        });
        for at in 1..symbols.len() {
            let rank = self.pairs.rank(symbols[at - 1].id, symbols[at].id);
            symbols[at - 1].rank = rank;
            if rank != NONE {
                queue.push(entry(rank, at as u32 - 1));
            }
        }
        while let Some(Reverse(pair)) = queue.pop() {
            #[cfg(test)]
            super::work::count(1);
            let (rank, at) = ((pair >> 32) as u32, pair as u32);
            let left = symbols[at as usize];
            // An entry is stale when its pair has changed since; the pair's own entry is elsewhere in the queue.
            if left.id == NONE || left.rank != rank {
                continue;
            }
            let right = symbols[left.next as usize];
            symbols[left.next as usize].id = NONE;
            let id = self.merged[rank as usize];
            let mut joined = Symbol {
                id,
                rank: NONE,
                previous: left.previous,
                next: right.next,
            };
            if let Some(next) = symbols.get_mut(right.next as usize) {
                next.previous = at;
                joined.rank = self.pairs.rank(id, next.id);
                if joined.rank != NONE {
                    queue.push(entry(joined.rank, at));
                }
            }
            symbols[at as usize] = joined;
            if let Some(previous) = symbols.get_mut(left.previous as usize) {
                previous.rank = self.pairs.rank(previous.id, id);
                if previous.rank != NONE {
                    queue.push(entry(previous.rank, left.previous));
                }
            }
        }
        ids.extend(symbols.iter().map(|symbol| symbol.id).filter(|id| *id != NONE));
    }
}

/// Pair of ids to rank: open addressing, eight bytes a slot, so a lookup is one cache line nearly always.
struct PairTable {
    /// left (21 bits), right (21), rank (22); [`PairTable::EMPTY`] where nothing is.
    slots: Box<[u64]>,
    shift: u32,
}

impl PairTable {
    const EMPTY: u64 = u64::MAX;
    const RANK_BITS: u32 = 22;

    fn new(merges: &[Merge]) -> Self {
        let len = (merges.len() * 2).next_power_of_two().max(16);
        let mut table = Self {
            slots: vec![Self::EMPTY; len].into_boxed_slice(),
            shift: 64 - len.trailing_zeros(),
        };
        for (rank, merge) in (0u64..).zip(merges) {
            // Of a pair that is listed twice, the reference keeps the later rank.
            let key = Self::key(merge.left, merge.right);
            let at = table.find(key);
            table.slots[at] = key << Self::RANK_BITS | rank;
        }
        table
    }

    #[inline(always)]
    fn key(left: u32, right: u32) -> u64 {
        u64::from(left) << 21 | u64::from(right)
    }

    /// The slot that holds `key`, or the empty one where it belongs. There always is one: half are empty.
    #[inline(always)]
    fn find(&self, key: u64) -> usize {
        let mut at = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize;
        loop {
            at &= self.slots.len() - 1;
            let slot = self.slots[at];
            if slot >> Self::RANK_BITS == key || slot == Self::EMPTY {
                return at;
            }
            at += 1;
        }
    }

    #[inline(always)]
    fn rank(&self, left: u32, right: u32) -> u32 {
        let slot = self.slots[self.find(Self::key(left, right))];
        if slot == Self::EMPTY {
            return NONE;
        }
        (slot & ((1 << Self::RANK_BITS) - 1)) as u32
    }
}

/// Bytes of a piece that fit a [`Key`].
const INLINE: usize = 15;

/// A piece of at most [`INLINE`] bytes as a number: its bytes, zeros, and in the last byte its length.
#[derive(Clone, Copy, Default, PartialEq)]
struct Key([u64; 2]);

/// By length: which bits of sixteen bytes are the piece's.
const KEY_MASKS: [[u64; 2]; 16] = {
    let mut masks = [[0; 2]; 16];
    let mut len = 0;
    while len < 16 {
        masks[len] = if len < 8 {
            [(1 << (8 * len)) - 1, 0]
        } else {
            [u64::MAX, (1 << (8 * (len - 8))) - 1]
        };
        len += 1;
    }
    masks
};

impl Key {
    /// The key of `text[start..start + len]`.
    #[inline(always)]
    fn of(text: &[u8], start: usize, len: usize) -> Self {
        let chunk = match text.get(start..).and_then(|rest| rest.first_chunk::<16>()) {
            Some(chunk) => *chunk,
            None => {
                // Within 16 bytes of the text's end.
                let mut chunk = [0; 16];
                let rest = text.get(start..).unwrap_or_default();
                chunk[..rest.len()].copy_from_slice(rest);
                chunk
            }
        };
        let bits = u128::from_le_bytes(chunk);
        let mask = KEY_MASKS[len & INLINE];
        Self([
            bits as u64 & mask[0],
            (bits >> 64) as u64 & mask[1] | (len as u64) << 56,
        ])
    }

    /// A hash whose upper bits are good.
    #[inline(always)]
    fn hash(self) -> u64 {
        let product = u128::from(self.0[0] ^ 0x9E37_79B9_7F4A_7C15) * u128::from(self.0[1] ^ 0xD6E8_FEB8_6659_FD93);
        (product as u64 ^ (product >> 64) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }
}

/// The same for a longer piece, of at most [`LongKey::BYTES`].
#[derive(Clone, Copy, Default, PartialEq)]
struct LongKey([u64; 4]);

impl LongKey {
    const BYTES: usize = 31;

    #[inline(always)]
    fn of(piece: &[u8]) -> Option<Self> {
        if piece.len() > Self::BYTES {
            return None;
        }
        let mut chunk = [0; Self::BYTES + 1];
        chunk[..piece.len()].copy_from_slice(piece);
        chunk[Self::BYTES] = piece.len() as u8;
        let mut words = [0; 4];
        for (word, bytes) in words.iter_mut().zip(chunk.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        Some(Self(words))
    }

    fn hash(self) -> u64 {
        let [a, b, c, d] = self.0;
        Key([a, b]).hash() ^ Key([c, d]).hash().rotate_left(32)
    }
}

/// Whole piece to id: open addressing over keys, and a map for the pieces that don't fit one.
struct WordTable {
    slots: Box<[Word]>,
    shift: u32,
    long: AHashMap<Box<[u8]>, u32>,
    longest: usize,
}

#[derive(Clone, Copy)]
struct Word {
    key: Key,
    /// [`NONE`] where nothing is.
    id: u32,
}

impl WordTable {
    fn with_capacity(words: usize) -> Self {
        let len = (words * 2).next_power_of_two().max(16);
        Self {
            slots: vec![
                Word {
                    key: Key::default(),
                    id: NONE
                };
                len
            ]
            .into_boxed_slice(),
            shift: 64 - len.trailing_zeros(),
            long: AHashMap::new(),
            longest: 0,
        }
    }

    fn insert(&mut self, bytes: &[u8], id: u32) {
        self.longest = self.longest.max(bytes.len());
        if bytes.len() > INLINE {
            self.long.insert(bytes.into(), id);
            return;
        }
        let key = Key::of(bytes, 0, bytes.len());
        let at = self.find(key, key.hash());
        self.slots[at] = Word { key, id };
    }

    #[inline(always)]
    fn find(&self, key: Key, hash: u64) -> usize {
        let mut at = (hash >> self.shift) as usize;
        loop {
            at &= self.slots.len() - 1;
            let slot = &self.slots[at];
            if slot.key == key || slot.id == NONE {
                return at;
            }
            at += 1;
        }
    }

    /// The id of the piece with this key, or [`NONE`].
    #[inline(always)]
    fn get(&self, key: Key, hash: u64) -> u32 {
        self.slots[self.find(key, hash)].id
    }

    /// The id of `piece`, which is longer than a key, or [`NONE`].
    fn get_long(&self, piece: &[u8]) -> u32 {
        if piece.len() > self.longest {
            return NONE;
        }
        self.long.get(piece).copied().unwrap_or(NONE)
    }
}

/// The pieces met last that were merged, with up to `IDS` ids, for those that are met again: direct mapped, 2^`BITS`
/// slots, overwritten on collision. An entry depends on nothing but its piece's bytes, so the cache never changes an answer.
struct Cache<K, const IDS: usize, const BITS: u32> {
    /// Empty until first used.
    slots: Vec<Cached<K, IDS>>,
}

/// Whole cache lines, or halves.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Cached<K, const IDS: usize> {
    /// The default key has length 0, which no piece has.
    key: K,
    len: u32,
    ids: [u32; IDS],
}

impl<K, const IDS: usize, const BITS: u32> Default for Cache<K, IDS, BITS> {
    fn default() -> Self {
        Self { slots: Vec::new() }
    }
}

impl<K: Copy + Default + PartialEq, const IDS: usize, const BITS: u32> Cache<K, IDS, BITS> {
    #[inline(always)]
    fn get(&self, key: K, hash: u64) -> Option<&[u32]> {
        let slot = self.slots.get((hash >> (64 - BITS)) as usize)?;
        if slot.key != key {
            return None;
        }
        slot.ids.get(..slot.len as usize)
    }

    /// False when it has no room for so many ids.
    fn put(&mut self, key: K, hash: u64, ids: &[u32]) -> bool {
        if ids.len() > IDS {
            return false;
        }
        if self.slots.is_empty() {
            let empty = Cached {
                key: K::default(),
                len: 0,
                ids: [0; IDS],
            };
            self.slots = vec![empty; 1 << BITS];
        }
        let slot = &mut self.slots[(hash >> (64 - BITS)) as usize];
        slot.key = key;
        slot.len = ids.len() as u32;
        slot.ids[..ids.len()].copy_from_slice(ids);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A model over a small alphabet: each byte is its own id, except that `absent` bytes have none; token 256 + n is
    /// what merge n makes.
    fn model(pairs: &[(u32, u32)], absent: &[u8]) -> (Bpe, Vec<Merge>) {
        let mut byte_ids = [NONE; 256];
        for byte in 0..=255u8 {
            if !absent.contains(&byte) {
                byte_ids[usize::from(byte)] = u32::from(byte);
            }
        }
        let merges = || {
            (256..)
                .zip(pairs)
                .map(|(merged, (left, right))| Merge {
                    left: *left,
                    right: *right,
                    merged,
                })
                .collect::<Vec<_>>()
        };
        (
            Bpe::new(Alphabet::Bytes(Box::new(byte_ids)), &merges(), &[], false),
            merges(),
        )
    }

    /// Merging as it is defined: of all pairs the one of least rank, leftmost first, again and again.
    fn by_definition(model: &Bpe, merges: &[Merge], piece: &[u8]) -> Vec<u32> {
        let mut ids = Vec::new();
        model.alphabet.for_each_symbol(piece, |id| ids.push(id));
        loop {
            let rank_at = |i: usize| {
                merges
                    .iter()
                    .rposition(|merge| (merge.left, merge.right) == (ids[i], ids[i + 1]))
            };
            let best = (0..ids.len().saturating_sub(1))
                .filter_map(|i| Some((rank_at(i)?, i)))
                .min();
            let Some((rank, at)) = best else { return ids };
            ids.splice(at..at + 2, [merges[rank].merged]);
        }
    }

    fn encode(merge: impl Fn(&mut Scratch, &mut Vec<u32>)) -> Vec<u32> {
        let mut ids = Vec::new();
        merge(&mut Scratch::default(), &mut ids);
        ids
    }

    #[test]
    fn bytes_without_a_token_vanish_and_their_neighbours_merge() {
        let (model, _) = model(&[(u32::from(b'a'), u32::from(b'b'))], &[4]);
        assert_eq!(encode(|scratch, ids| model.merge(b"a\x04b", scratch, ids)), [256]);
        assert_eq!(encode(|scratch, ids| model.merge(b"\x04", scratch, ids)), [0u32; 0]);
    }

    #[test]
    fn pieces_of_every_length_are_found_whole_and_zeros_are_bytes() {
        let words: Vec<(Vec<u8>, u32)> = (1..40u32).map(|len| (vec![b'x'; len as usize], len)).collect();
        let bpe = Bpe::new(Alphabet::Bytes(Box::new([NONE; 256])), &[], &words, true);
        let text = [b'x'; 64];
        let mut scratch = Scratch::default();
        for (word, id) in &words {
            for start in 0..64 - word.len() {
                let (end, mut ids) = (start + word.len(), Vec::new());
                bpe.encode(&text, start, end, &mut scratch, &mut ids);
                assert_eq!(ids, [*id]);
            }
        }
        let key = Key::of(b"x\0", 0, 2);
        assert_eq!(bpe.words.get(key, key.hash()), NONE);
        assert_eq!(bpe.words.get_long(&text[..50]), NONE);
    }

    #[test]
    fn merging_a_long_piece_is_not_quadratic() {
        let (model, _) = model(&[(97, 97), (256, 256), (257, 257), (258, 97), (97, 98)], &[]);
        for unit in ["a", "ab", "aab", "z"] {
            let steps = |repeats: usize| {
                let piece = unit.repeat(repeats);
                let (mut scratch, mut ids) = (Scratch::default(), Vec::new());
                super::super::work::counted(|| model.merge(piece.as_bytes(), &mut scratch, &mut ids)) as f64
                    / piece.len() as f64
            };
            let (short, long) = (steps(1_000), steps(16_000));
            assert!(long <= short * 1.5 + 0.1, "{unit:?}: {short} to {long} steps a byte");
        }
    }

    #[test]
    fn pieces_met_before_have_the_same_ids() {
        let (model, merges) = model(&[(97, 97), (256, 256), (257, 98), (98, 97)], &[]);
        let text = b"aab".repeat(20);
        let mut scratch = Scratch::default();
        for _ in 0..2 {
            for start in 0..3 {
                for end in start + 1..text.len() {
                    let mut ids = Vec::new();
                    model.encode(&text, start, end, &mut scratch, &mut ids);
                    assert_eq!(ids, by_definition(&model, &merges, &text[start..end]));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn both_ways_of_merging_are_the_definition(
            pairs in proptest::collection::vec((0u32..12, 0u32..12), 0..12),
            piece in proptest::collection::vec(0u8..4, 0..SHORT),
        ) {
            // Ids below 4 are the bytes 0 to 3, the others what earlier merges made.
            let pairs: Vec<(u32, u32)> = (0u32..).zip(pairs).map(|(made, (left, right))| {
                let id = |n: u32| { let n = n % (4 + made); if n < 4 { n } else { 252 + n } };
                (id(left), id(right))
            }).collect();
            let (model, merges) = model(&pairs, &[]);
            let expected = by_definition(&model, &merges, &piece);
            prop_assert_eq!(&encode(|_, ids| model.merge_short(&piece, ids)), &expected);
            prop_assert_eq!(&encode(|scratch, ids| model.merge_long(&piece, scratch, ids)), &expected);
        }
    }
}
