//! The special tokens' texts: which special tokens a text may hold, and whether a string could be part of one.

use std::ops::Range;

use aho_corasick::{AhoCorasick, Anchored, Input, StartKind};

/// Which special tokens are looked for in a text.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Specials<'a> {
    /// All that are written in it.
    Anywhere,
    /// None: what is written like one is text.
    Nowhere,
    /// Those that touch none of these ranges of bytes, which are in order and don't overlap.
    Outside(&'a [Range<usize>]),
}

impl Specials<'_> {
    /// Where the text of a special token, found at `range`, isn't one: whence to look on. `None` where it is one.
    pub(crate) fn refuses(self, range: &Range<usize>) -> Option<usize> {
        match self {
            Self::Anywhere => None,
            Self::Nowhere => Some(range.end),
            Self::Outside(ranges) => {
                let before_end = ranges.partition_point(|typed| typed.start < range.end);
                let last = before_end.checked_sub(1).and_then(|index| ranges.get(index))?;
                // What follows the typed part may begin another.
                (last.end > range.start).then(|| last.end.min(range.end))
            }
        }
    }
}

/// The texts of a vocabulary's special tokens.
#[derive(Debug)]
pub struct SpecialTexts {
    /// Sorted.
    texts: Vec<String>,
    /// Their bytes from the last to the first, sorted.
    reversed: Vec<Vec<u8>>,
    automaton: Option<AhoCorasick>,
    /// All texts, with [`SpecialTexts::BORDER`] between.
    joined: String,
    longest: usize,
    first_bytes: [bool; 256],
    last_bytes: [bool; 256],
}

impl SpecialTexts {
    const BORDER: char = '\0';

    /// The texts; empty ones and those with a NUL, which no rendering can make, are left out.
    pub(crate) fn new(texts: impl Iterator<Item = String>) -> Self {
        let mut texts: Vec<String> = texts
            .filter(|text| !text.is_empty() && !text.contains(Self::BORDER))
            .collect();
        texts.sort_unstable();
        let mut reversed: Vec<Vec<u8>> = texts.iter().map(|text| text.bytes().rev().collect()).collect();
        reversed.sort_unstable();
        let (mut first_bytes, mut last_bytes) = ([false; 256], [false; 256]);
        for text in &texts {
            if let ([first, ..], [.., last]) = (text.as_bytes(), text.as_bytes()) {
                first_bytes[usize::from(*first)] = true;
                last_bytes[usize::from(*last)] = true;
            }
        }
        let automaton = AhoCorasick::builder().start_kind(StartKind::Both).build(&texts);
        Self {
            automaton: automaton.ok().filter(|_| !texts.is_empty()),
            longest: texts.iter().map(String::len).max().unwrap_or(0),
            joined: texts.join(&Self::BORDER.to_string()),
            texts,
            reversed,
            first_bytes,
            last_bytes,
        }
    }

    /// The texts, sorted.
    pub(crate) fn texts(&self) -> &[String] {
        &self.texts
    }

    /// Whether `string`, which stands somewhere in a longer text and may lose white space at its ends on the way there,
    /// can share a character with the text of a special token. Linear, and fast where there are no such characters.
    pub(crate) fn may_touch(&self, string: &str) -> bool {
        self.may_hold_beginning(string) || self.may_complete(string.trim_start())
    }

    /// Whether a special token's text begins in `string`, or might at its end, if more followed.
    pub(crate) fn may_hold_beginning(&self, string: &str) -> bool {
        let automaton = self.automaton.as_ref();
        automaton.is_some_and(|automaton| automaton.is_match(string) || self.may_begin(string))
    }

    /// Whether a special token's text begins at `at` in `string`, which has no white space at its end, or might, if more
    /// followed. Costs no more than the longest of the texts.
    pub(crate) fn begins_at(&self, string: &str, at: usize) -> bool {
        let Some(rest) = string.get(at..) else { return false };
        if !rest
            .bytes()
            .next()
            .is_some_and(|first| self.first_bytes[usize::from(first)])
        {
            return false;
        }
        if rest.len() < self.longest {
            let place = self.texts.partition_point(|text| text.as_str() < rest);
            if self.texts.get(place).is_some_and(|text| text.starts_with(rest)) {
                return true;
            }
        }
        let input = Input::new(rest).anchored(Anchored::Yes);
        self.automaton
            .as_ref()
            .is_some_and(|automaton| automaton.find(input).is_some())
    }

    /// Whether the end of `string` may begin a special token's text that something else completes.
    fn may_begin(&self, string: &str) -> bool {
        let string = string.trim_end();
        let from = string.len().saturating_sub(self.longest);
        (from..string.len()).any(|at| string.is_char_boundary(at) && self.begins_at(string, at))
    }

    /// Whether the start of `string`, or all of it, may continue a special token's text that something else began.
    fn may_complete(&self, string: &str) -> bool {
        let whole = string.trim_end();
        if !whole.is_empty()
            && whole.len() < self.longest
            && !whole.contains(Self::BORDER)
            && self.joined.contains(whole)
        {
            return true;
        }
        let start = &string.as_bytes()[..string.len().min(self.longest)];
        (0..start.len())
            .filter(|last| self.last_bytes[usize::from(start[*last])])
            .any(|last| {
                let end: Vec<u8> = start[..=last].iter().rev().copied().collect();
                let place = self.reversed.partition_point(|text| *text < end);
                self.reversed.get(place).is_some_and(|text| text.starts_with(&end))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts() -> SpecialTexts {
        SpecialTexts::new(
            ["<|im_start|>", "<|im_end|>", "<s>", "[INST]"]
                .iter()
                .map(|text| (*text).to_owned()),
        )
    }

    #[test]
    fn strings_that_could_share_a_character_with_a_special_token_are_told() {
        for string in [
            "a <|im_start|> b",
            "<s>",
            "a <",
            "a <|im_",
            "a <|im_ \n",
            "> said he",
            " start|>x",
            "im_st",
            " INST ",
            "[",
        ] {
            assert!(texts().may_touch(string), "{string:?}");
        }
        for string in [
            "",
            "  ",
            "hello there",
            "a < b",
            "x <|im_x",
            "a > b",
            "x[0]",
            "\0",
            "<|",
            "Q",
        ] {
            assert_eq!(texts().may_touch(string), string == "<|", "{string:?}");
        }
        assert!(!SpecialTexts::new(std::iter::empty()).may_touch("<s>"));
    }

    #[test]
    fn a_special_token_is_refused_where_it_touches_typed_text() {
        let specials = Specials::Outside(&[3..5, 9..10]);
        for (range, whence) in [
            (0..3, None),
            (5..9, None),
            (0..4, Some(4)),
            (4..7, Some(5)),
            (2..12, Some(10)),
            (9..10, Some(10)),
            (10..12, None),
        ] {
            assert_eq!(specials.refuses(&range), whence, "{range:?}");
        }
    }
}
