//! The character classes that the pre-tokenisation patterns speak of, for every codepoint.
//!
//! They must be those of the regex engine inside the reference (Oniguruma, Unicode 16), not those of this compiler's
//! standard library, which may know a newer Unicode. `classes_table.rs` is generated from that very engine by
//! `tests/tokenizer_classes.rs`, which also fails when the two differ.

use std::sync::LazyLock;

use super::classes_table::RANGES;

/// A set of classes, one bit each; the class of one character has exactly one bit.
pub(crate) type ClassSet = u16;

/// Upper and title case letters (`\p{Lu}`, `\p{Lt}`).
pub(crate) const UPPER: ClassSet = 1 << 0;
/// Lower case letters (`\p{Ll}`).
pub(crate) const LOWER: ClassSet = 1 << 1;
/// Letters without case (`\p{Lm}`, `\p{Lo}`).
pub(crate) const UNCASED: ClassSet = 1 << 2;
/// Marks (`\p{M}`).
pub(crate) const MARK: ClassSet = 1 << 3;
/// Numbers (`\p{N}`).
pub(crate) const NUMBER: ClassSet = 1 << 4;
/// U+0020.
pub(crate) const SPACE: ClassSet = 1 << 5;
/// Carriage return and line feed.
pub(crate) const NEWLINE: ClassSet = 1 << 6;
/// The other white space (`\s`).
pub(crate) const BLANK: ClassSet = 1 << 7;
/// Punctuation, symbols, controls, unassigned: everything else.
pub(crate) const OTHER: ClassSet = 1 << 8;
/// Not a character: the end of the text. In no set of the patterns.
pub(crate) const END: ClassSet = 1 << 15;

/// `\p{L}`
pub(crate) const LETTER: ClassSet = UPPER | LOWER | UNCASED;
/// `\s`
pub(crate) const WHITE: ClassSet = SPACE | NEWLINE | BLANK;
/// `[^\s\p{L}\p{N}]`
pub(crate) const SYMBOL: ClassSet = MARK | OTHER;

const BLOCK: usize = 256;

/// Codepoint to class, in two stages: the block of 256 codepoints, then the place within it.
pub(crate) struct Classes {
    ascii: [ClassSet; 128],
    blocks: Vec<u16>,
    classes: Vec<[ClassSet; BLOCK]>,
}

/// The one table, built on first use (a millisecond).
pub(crate) static CLASSES: LazyLock<Classes> = LazyLock::new(|| Classes::from_ranges(RANGES));

impl Classes {
    /// From (first codepoint, class number) of each range, in order; class number n is bit n.
    fn from_ranges(ranges: &[(u32, u8)]) -> Self {
        let mut table = Self {
            ascii: [OTHER; 128],
            blocks: Vec::new(),
            classes: Vec::new(),
        };
        let mut ranges = ranges.iter().copied().peekable();
        let mut class = OTHER;
        for block_start in (0..=char::MAX as u32).step_by(BLOCK) {
            let mut block = [OTHER; BLOCK];
            for (codepoint, slot) in (block_start..).zip(block.iter_mut()) {
                while let Some((_, number)) = ranges.next_if(|(first, _)| *first <= codepoint) {
                    class = 1 << number;
                }
                *slot = class;
            }
            let known = table.classes.iter().rposition(|other| *other == block);
            let index = known.unwrap_or_else(|| {
                table.classes.push(block);
                table.classes.len() - 1
            });
            // At most 0x1100 blocks, so the index fits.
            table.blocks.push(index as u16);
        }
        if let Some(first) = table.classes.first() {
            table.ascii.copy_from_slice(&first[..128]);
        }
        table
    }

    /// The class of an ASCII byte.
    #[inline(always)]
    pub(crate) fn of_ascii(&self, byte: u8) -> ClassSet {
        self.ascii[usize::from(byte & 0x7F)]
    }

    /// The class of a codepoint.
    #[inline(always)]
    pub(crate) fn of(&self, codepoint: u32) -> ClassSet {
        let block = self.blocks.get(codepoint as usize / BLOCK).copied().unwrap_or_default();
        self.classes
            .get(usize::from(block))
            .map_or(OTHER, |classes| classes[codepoint as usize % BLOCK])
    }
}
