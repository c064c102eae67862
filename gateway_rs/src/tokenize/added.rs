//! Added tokens (`<|im_start|>`): found in the text before anything else, each stretch between them a text of its own.

use aho_corasick::{AhoCorasick, Input, MatchKind};
use regex::Regex;

use super::reference::Reference;
use super::specials::Specials;
use super::units::MARK;

/// A stretch of the text.
pub(crate) enum Part<'a> {
    /// Text, and where it begins.
    Text {
        start: usize,
        text: &'a str,
    },
    Token(u32),
}

/// The added tokens that are looked for in one form of the text: as written, or normalized.
pub(crate) struct AddedTokens {
    automaton: AhoCorasick,
    /// By the automaton's pattern number.
    tokens: Vec<AddedToken>,
    all_special: bool,
    /// One word character, as the reference's regex crate knows it.
    word: Regex,
}

struct AddedToken {
    id: u32,
    special: bool,
    single_word: bool,
    strips_left: bool,
    strips_right: bool,
    /// A special token whose text, where it isn't looked for, merging makes into it all the same.
    made_by_merging: bool,
}

impl AddedTokens {
    /// The tokens to look for in the text as written, and those to look for in the normalized text, which may be in
    /// spaced form ([`super::units`]).
    ///
    /// # Errors
    /// The reason why no automaton could be made.
    pub(crate) fn of(reference: &Reference, spaced: bool) -> Result<(Option<Self>, Option<Self>), String> {
        let (normalized, written): (Vec<_>, Vec<_>) = reference
            .added_tokens()
            .into_iter()
            .partition(|(_, token)| token.normalized);
        // `▁` is no white space, the space that stands for it is.
        if spaced && normalized.iter().any(|(_, token)| token.lstrip || token.rstrip) {
            return Err("a normalized added token that strips spaces".to_owned());
        }
        Ok((
            Self::build(written, reference, false)?,
            Self::build(normalized, reference, spaced)?,
        ))
    }

    fn build(
        added: Vec<(u32, tokenizers::AddedToken)>,
        reference: &Reference,
        spaced: bool,
    ) -> Result<Option<Self>, String> {
        if added.is_empty() {
            return Ok(None);
        }
        // The spelling of a normalized token is its normalized content.
        let patterns: Vec<String> = added
            .iter()
            .map(|(id, token)| reference.spelling(*id).unwrap_or_else(|| token.content.clone()))
            .map(|pattern| if spaced { pattern.replace(MARK, " ") } else { pattern })
            .collect();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(patterns)
            .map_err(|error| format!("added tokens: {error}"))?;
        let tokens: Vec<AddedToken> = added
            .into_iter()
            .map(|(id, token)| {
                let special = reference.is_special(&token.content);
                // By itself, and after what may or may not be merged with it.
                let as_text = ["", "a", " ", "\u{10FFFF}"].map(|before| format!("{before}{}", token.content));
                let made = |text: &String| reference.encode(text, false).is_ok_and(|ids| ids.contains(&id));
                AddedToken {
                    id,
                    special,
                    single_word: token.single_word,
                    strips_left: token.lstrip,
                    strips_right: token.rstrip,
                    made_by_merging: special && as_text.iter().any(made),
                }
            })
            .collect();
        let all_special = tokens.iter().all(|token| token.special);
        let word = Regex::new(r"^\w$").map_err(|error| error.to_string())?;
        Ok(Some(Self {
            automaton,
            tokens,
            all_special,
            word,
        }))
    }

    /// Calls `part` for each stretch of `text`, in order, until it returns false. Special tokens that `specials` refuses
    /// are text. Returns whether it went through.
    pub(crate) fn split<'a>(
        &self,
        text: &'a str,
        specials: Specials<'_>,
        mut part: impl FnMut(Part<'a>) -> bool,
    ) -> bool {
        if self.all_special && matches!(specials, Specials::Nowhere) {
            return part(Part::Text { start: 0, text });
        }
        let stretch = |start: usize, end: usize| Part::Text {
            start,
            text: &text[start..end],
        };
        let (mut done, mut at) = (0, 0);
        while let Some(found) = self.automaton.find(Input::new(text).range(at..)) {
            at = found.end();
            let Some(token) = self.tokens.get(found.pattern().as_usize()) else {
                continue;
            };
            let range = found.range();
            if let Some(whence) = token.special.then(|| specials.refuses(&range)).flatten() {
                at = whence;
                if token.made_by_merging && matches!(specials, Specials::Outside(_)) {
                    // Two texts, so that it isn't.
                    let within = range.start + text[range.start..].chars().next().map_or(1, char::len_utf8);
                    if !part(stretch(done, within)) {
                        return false;
                    }
                    done = within;
                    at = at.max(within);
                }
                continue;
            }
            // A rejected match isn't text to search again: the search goes on after it, as in the reference.
            if token.single_word && !self.stands_alone(text, range) {
                continue;
            }
            let (mut start, mut end) = (found.start(), found.end());
            if token.strips_left {
                start = text[..start].trim_end().len().max(done);
            }
            if token.strips_right {
                end = text.len() - text[end..].trim_start().len();
            }
            if done < start && !part(stretch(done, start)) || !part(Part::Token(token.id)) {
                return false;
            }
            done = end;
        }
        done == text.len() || part(stretch(done, text.len()))
    }

    /// Whether no word character touches the range.
    fn stands_alone(&self, text: &str, range: std::ops::Range<usize>) -> bool {
        let is_word = |c: char| self.word.is_match(c.encode_utf8(&mut [0; 4]));
        let before = text[..range.start].chars().next_back();
        let after = text[range.end..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    }
}
