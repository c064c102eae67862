//! Our own encoder: added tokens, normalisation, pieces, merges, in this order and without intermediate strings.

use std::borrow::Cow;
use std::ops::Range;

use parking_lot::Mutex;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::{NormalizedString, Normalizer};

use super::added::{AddedTokens, Part};
use super::bpe::{Bpe, Scratch};
use super::scan::Pattern;
use super::specials::Specials;
use super::stretches::Remembered;
use super::units::{spaced, spaced_ranges, Prefix, Units};

/// A BPE model that [`super::load`] has understood completely.
pub(crate) struct FastEncoder {
    /// Looked for in the text as written.
    pub(crate) added: Option<AddedTokens>,
    /// Looked for in the normalized text.
    pub(crate) added_normalized: Option<AddedTokens>,
    pub(crate) form: Form,
    pub(crate) cut: Cut,
    pub(crate) bpe: Bpe,
    /// Scratches between encodings, as many as ever ran at once, up to [`FastEncoder::MAX_SCRATCHES`].
    pub(crate) scratches: Mutex<Vec<Scratch>>,
}

/// How a text is normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    AsWritten,
    /// Normalization form C.
    Nfc,
    /// `▁` for each space; with `prefix` one more before the text. Kept in spaced form ([`super::units`]).
    Spaced {
        prefix: bool,
    },
}

/// How a normalized text is cut into what is merged by itself.
pub(crate) enum Cut {
    Pattern(Pattern),
    Units { units: Units, prefix: Prefix },
}

/// What goes through one encoding.
struct Encoding<'a> {
    scratch: &'a mut Scratch,
    ids: &'a mut Vec<u32>,
    limit: usize,
    specials: Specials<'a>,
    remembered: Option<Remembered<'a>>,
}

impl Encoding<'_> {
    fn push(&mut self, id: u32) -> bool {
        self.ids.push(id);
        self.ids.len() <= self.limit
    }
}

impl FastEncoder {
    /// A scratch holds some megabyte; beyond this many encodings at once, some begin with a new one.
    const MAX_SCRATCHES: usize = 32;

    /// The family's name, for plans and reports.
    pub(crate) fn name(&self) -> &'static str {
        match &self.cut {
            Cut::Pattern(pattern) => pattern.name(),
            Cut::Units { .. } => "sentencepiece",
        }
    }

    /// Appends the ids of `text`. Stops with false soon after `ids` holds more than `limit`.
    pub(crate) fn encode(
        &self,
        text: &str,
        specials: Specials<'_>,
        remembered: Option<Remembered<'_>>,
        limit: usize,
        ids: &mut Vec<u32>,
    ) -> bool {
        // The lock is held for a push or a pop, never while encoding.
        let mut scratch = self.scratches.lock().pop().unwrap_or_default();
        let within = self.encode_text(
            text,
            &mut Encoding {
                scratch: &mut scratch,
                ids,
                limit,
                specials,
                remembered,
            },
        );
        scratch.trim();
        let mut scratches = self.scratches.lock();
        if scratches.len() < Self::MAX_SCRATCHES {
            scratches.push(scratch);
        }
        within
    }

    fn encode_text(&self, text: &str, to: &mut Encoding<'_>) -> bool {
        let Some(added) = &self.added else {
            return self.encode_written(text, 0, to);
        };
        added.split(text, to.specials, |part| match part {
            Part::Text { start, text } => self.encode_written(text, start, to),
            Part::Token(id) => to.push(id),
        })
    }

    /// A stretch between the added tokens that are looked for in the text as written, and where it begins.
    fn encode_written(&self, written: &str, start: usize, to: &mut Encoding<'_>) -> bool {
        let text = match self.form {
            Form::AsWritten => Cow::Borrowed(written),
            Form::Nfc => nfc(written),
            Form::Spaced { prefix } => spaced(written, prefix && !written.is_empty()),
        };
        let first = start == 0;
        let Some(added) = &self.added_normalized else {
            return self.encode_stretch(&text, first, to);
        };
        let typed;
        let specials = match to.specials {
            Specials::Outside(ranges) => {
                typed = self.normalized_ranges(ranges, written, start, &text);
                Specials::Outside(&typed)
            }
            anywhere_or_nowhere => anywhere_or_nowhere,
        };
        added.split(&text, specials, |part| match part {
            Part::Text { start, text } => self.encode_stretch(text, first && start == 0, to),
            Part::Token(id) => to.push(id),
        })
    }

    /// The `ranges` of a whole text within the normalized form `text` of a stretch that was `written` from `start` on.
    fn normalized_ranges(&self, ranges: &[Range<usize>], written: &str, start: usize, text: &str) -> Vec<Range<usize>> {
        let within = start..start + written.len();
        let ranges = ranges
            .iter()
            .filter(|range| range.start < within.end && range.end > within.start)
            .map(|range| range.start.saturating_sub(start)..range.end.min(within.end) - start);
        match self.form {
            Form::Spaced { prefix } => spaced_ranges(ranges, written, prefix && !written.is_empty()),
            // What became of which character isn't known.
            Form::Nfc if written != text => ranges.take(1).map(|_| 0..text.len()).collect(),
            Form::AsWritten | Form::Nfc => ranges.collect(),
        }
    }

    /// A stretch between all added tokens, normalized.
    fn encode_stretch(&self, text: &str, first: bool, to: &mut Encoding<'_>) -> bool {
        let (limit, scratch, ids) = (to.limit, &mut *to.scratch, &mut *to.ids);
        match to.remembered {
            None => self.cut_and_merge(text, first, limit, scratch, ids),
            Some(remembered) => {
                let encode = |ids: &mut Vec<u32>| self.cut_and_merge(text, first, limit, scratch, ids);
                remembered.or_encode(text, first, ids, encode) && ids.len() <= limit
            }
        }
    }

    fn cut_and_merge(&self, text: &str, first: bool, limit: usize, scratch: &mut Scratch, ids: &mut Vec<u32>) -> bool {
        match &self.cut {
            Cut::Pattern(pattern) => {
                let bytes = text.as_bytes();
                pattern.for_each_piece(text, |start, end| {
                    self.bpe.encode(bytes, start, end, scratch, ids);
                    ids.len() <= limit
                });
                ids.len() <= limit
            }
            Cut::Units { units, prefix } => {
                let may = match prefix {
                    Prefix::Never => false,
                    Prefix::First => first,
                    Prefix::Always => true,
                };
                let prefix = may && !text.is_empty() && !text.starts_with([' ', super::units::MARK]);
                units.encode(&spaced(text, prefix), &self.bpe, limit, scratch, ids)
            }
        }
    }
}

/// Normalization form C by the reference's own (old) tables. Most text is recognised as being in that form already.
fn nfc(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || text.chars().all(is_inert) {
        return Cow::Borrowed(text);
    }
    let mut normalized = NormalizedString::from(text);
    match NFC.normalize(&mut normalized) {
        Ok(()) => Cow::Owned(normalized.get().to_owned()),
        // It has no failing path; and text that wasn't composed is still the text.
        Err(_) => Cow::Borrowed(text),
    }
}

/// Whether form C leaves the character alone whatever its neighbours: a starter without a canonical decomposition other
/// than to what composes again, which no character before it composes with. Deliberately only a part of them: blocks
/// where it is true of each character in every version of Unicode.
pub(crate) fn is_inert(c: char) -> bool {
    matches!(c,
        '\0'..='\u{2FF}'
        // Cyrillic, Armenian, Hebrew, Arabic letters
        | '\u{400}'..='\u{482}' | '\u{48A}'..='\u{52F}' | '\u{531}'..='\u{556}' | '\u{561}'..='\u{587}'
        | '\u{5D0}'..='\u{5EA}' | '\u{620}'..='\u{64A}'
        // Thai consonants, kana, ideographs, Hangul syllables, fullwidth forms
        | '\u{E01}'..='\u{E30}' | '\u{3041}'..='\u{3096}' | '\u{30A1}'..='\u{30FA}' | '\u{4E00}'..='\u{9FFF}'
        | '\u{AC00}'..='\u{D7A3}' | '\u{FF01}'..='\u{FF5E}'
        // Punctuation, emoji
        | '\u{2010}'..='\u{2027}' | '\u{2030}'..='\u{205E}' | '\u{3001}'..='\u{3029}' | '\u{1F300}'..='\u{1FAFF}'
    )
}
