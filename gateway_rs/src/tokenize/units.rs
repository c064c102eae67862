//! SentencePiece's BPE (Llama 2, Mistral, Gemma): a whole text is one piece, and merges may cross its words.
//!
//! Merged as a whole, a text would cost n log n with nothing to look up. But every merge joins two neighbours: where no
//! merge of the vocabulary has a left part that ends in one character and a right part that begins with another, these two
//! characters stay apart for ever. A text cut there into *units* has the same ids, since merges on either side don't
//! influence each other and keep their order; and a unit, a word nearly always, can be looked up.
//!
//! Text is in *spaced form* here: the `▁` that the model knows spaces by is written as a space, so that most text need not
//! be copied. In the reference's form no space is left, so the two forms stand for each other one to one.

use std::borrow::Cow;
use std::ops::Range;

use ahash::AHashMap;

use super::bpe::{Alphabet, Bpe, Characters, Scratch, NONE};
use super::scan::{ascii_letters_from, codepoint};

/// The character that SentencePiece writes for a space.
pub(crate) const MARK: char = '▁';

/// Which texts get a space put before them, unless they begin with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Prefix {
    Never,
    /// The one at the very beginning.
    First,
    /// Each stretch between added tokens.
    Always,
}

/// Where a model's texts may be cut.
pub(crate) struct Units {
    /// For two ASCII characters whether they may be joined: bit n, over two words, of the first's for character n.
    ascii: Box<[u64; 256]>,
    /// The same for pairs with other characters: bits by hash, set for all pairs that may be joined and some others.
    others: Box<[u64]>,
    shift: u32,
    /// The reference cuts before every space.
    before_spaces: bool,
    /// Tokens that the reference takes where they are a whole piece, though merging doesn't make them.
    whole: AHashMap<Box<[u8]>, u32>,
}

impl Units {
    /// `joins` are the pairs of characters, in spaced form, that some merge joins.
    pub(crate) fn new(joins: &[(char, char)], before_spaces: bool) -> Self {
        let wide = joins.iter().filter(|(a, b)| !a.is_ascii() || !b.is_ascii()).count();
        // One bit in sixteen at most is set, so hardly a cut is missed.
        let words = (wide / 4).next_power_of_two().max(2);
        let mut units = Self {
            ascii: Box::new([0; 256]),
            others: vec![0; words].into_boxed_slice(),
            shift: 64 - (words * 64).trailing_zeros(),
            before_spaces,
            whole: AHashMap::new(),
        };
        for (a, b) in joins {
            if before_spaces && *b == ' ' {
                continue;
            }
            let (a, b) = (u32::from(*a), u32::from(*b));
            if a < 0x80 && b < 0x80 {
                units.ascii[(a << 1 | b >> 6) as usize] |= 1 << (b & 63);
            } else {
                let bit = units.bit(a, b);
                units.others[bit / 64] |= 1 << (bit % 64);
            }
        }
        units
    }

    /// The same, taking these tokens wherever they are a whole piece.
    pub(crate) fn taking_whole(mut self, tokens: impl Iterator<Item = (Vec<u8>, u32)>) -> Self {
        self.whole = tokens.map(|(bytes, id)| (bytes.into_boxed_slice(), id)).collect();
        self
    }

    /// Appends the ids of `text`, which is one text to the reference, in spaced form. Stops with false soon after `ids`
    /// holds more than `limit`.
    pub(crate) fn encode(
        &self,
        text: &str,
        bpe: &Bpe,
        limit: usize,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> bool {
        if self.whole.is_empty() {
            return self.encode_piece(text, bpe, limit, scratch, ids);
        }
        let mut rest = text;
        while !rest.is_empty() {
            let cut = if self.before_spaces {
                rest.get(1..).and_then(|rest| rest.find(' ')).map(|at| at + 1)
            } else {
                None
            };
            let (piece, after) = rest.split_at(cut.unwrap_or(rest.len()));
            match self.whole.get(piece.as_bytes()) {
                Some(id) => ids.push(*id),
                None => {
                    self.encode_piece(piece, bpe, limit, scratch, ids);
                }
            }
            if ids.len() > limit {
                return false;
            }
            rest = after;
        }
        true
    }

    fn encode_piece(&self, text: &str, bpe: &Bpe, limit: usize, scratch: &mut Scratch, ids: &mut Vec<u32>) -> bool {
        let bytes = text.as_bytes();
        let runs = match bpe.alphabet() {
            Alphabet::Characters(characters) if characters.fuses_unknown() => Some(characters),
            _ => None,
        };
        let mut start = 0;
        while start < bytes.len() {
            let end = self.end(bytes, start, runs);
            bpe.encode(bytes, start, end, scratch, ids);
            if ids.len() > limit {
                return false;
            }
            start = end;
        }
        true
    }

    /// The end of the unit at `start`. `runs` are the known characters where runs of others must not be cut.
    #[inline(always)]
    fn end(&self, bytes: &[u8], start: usize, runs: Option<&Characters>) -> usize {
        let (mut previous, len) = character(bytes, start);
        let mut at = start + len;
        loop {
            #[cfg(test)]
            super::work::count(1);
            if previous < 0x80 && (previous as u8).is_ascii_alphabetic() {
                // Not cutting is always right, and letters seldom can be.
                let letters = ascii_letters_from(bytes, at);
                if letters > 0 {
                    at += letters;
                    previous = u32::from(bytes[at - 1]);
                }
            }
            if at >= bytes.len() {
                return at;
            }
            let (next, len) = character(bytes, at);
            let joined = if previous < 0x80 && next < 0x80 {
                self.ascii[(previous << 1 | next >> 6) as usize & 255] >> (next & 63) & 1 != 0
            } else {
                let bit = self.bit(previous, next);
                self.others[bit / 64] >> (bit % 64) & 1 != 0 && !(self.before_spaces && next == u32::from(b' '))
            };
            let one_run = || runs.is_some_and(|known| known.id(previous) == NONE && known.id(next) == NONE);
            if !joined && !one_run() {
                return at;
            }
            previous = next;
            at += len;
        }
    }

    #[inline(always)]
    fn bit(&self, a: u32, b: u32) -> usize {
        ((u64::from(a) << 21 | u64::from(b)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }
}

/// The codepoint and length of the character at `at`, which is there.
#[inline(always)]
fn character(bytes: &[u8], at: usize) -> (u32, usize) {
    match bytes[at] {
        lead @ 0..0x80 => (u32::from(lead), 1),
        lead => codepoint(bytes, at, lead),
    }
}

/// A text in spaced form, with a space before it if asked.
pub(crate) fn spaced(text: &str, prefix: bool) -> Cow<'_, str> {
    let marked = text.contains(MARK);
    if !prefix && !marked {
        return Cow::Borrowed(text);
    }
    let mut spaced = String::with_capacity(text.len() + 1);
    if prefix {
        spaced.push(' ');
    }
    if marked {
        spaced.extend(text.chars().map(|c| if c == MARK { ' ' } else { c }));
    } else {
        spaced.push_str(text);
    }
    Cow::Owned(spaced)
}

/// Where ranges of bytes of a text are in its spaced form, in which each character is one character, maybe after a prefix.
pub(crate) fn spaced_ranges(
    ranges: impl Iterator<Item = Range<usize>>,
    written: &str,
    prefix: bool,
) -> Vec<Range<usize>> {
    let (mut at, mut shorter) = (0, 0);
    let mut place = |offset: usize| {
        shorter += written[at..offset].matches(MARK).count() * (MARK.len_utf8() - 1);
        at = offset;
        offset + usize::from(prefix) - shorter
    };
    ranges.map(|range| place(range.start)..place(range.end)).collect()
}
