//! Token ids to text: all at once, or one at a time, which is what a stream shows of an answer as soon as it can be shown.
//!
//! A token may end within a character. [`StreamDecoder`] keeps those bytes (three at most) until the character is
//! complete or can't be completed any more; everything else leaves at once. Stop strings, deltas and log probabilities
//! are the caller's: this only makes text. A token costs its own length, however long the answer is.

use std::sync::Arc;

use crate::tokenize::pieces::{Content, TokenTable};
use crate::tokenize::Tokenizer;

/// The text of one answer in the making. Each choice of each request has its own.
pub struct StreamDecoder {
    source: Source,
    skip_special: bool,
    /// Special tokens that have a text all the same.
    shown: Arc<[u32]>,
    edge: Edge,
}

/// Where the shown text ends, over a table.
struct Edge {
    /// A decoder that strips drops one space before anything was shown, never later.
    strip_space: bool,
    /// The beginning of a character; between calls at most three bytes.
    pending: Vec<u8>,
    /// What waits is of byte tokens.
    of_bytes: bool,
    /// Of a run of byte tokens: each has one U+FFFD, until the run ends, as the reference has for all of such a run.
    bad_run: bool,
}

enum Source {
    Table(Arc<TokenTable>),
    Context(Context),
}

impl StreamDecoder {
    /// A decoder for one answer of `tokenizer`'s model. With `skip_special`, special tokens have no text.
    #[must_use]
    pub fn new(tokenizer: &Arc<Tokenizer>, skip_special: bool) -> Self {
        if tokenizer.decodes_in_context() {
            let context = Context {
                tokenizer: Arc::clone(tokenizer),
                shown: Vec::new(),
                held: Vec::new(),
            };
            return Self::from_source(Source::Context(context), skip_special, false, false);
        }
        Self::from_table(Arc::clone(tokenizer.pieces()), skip_special)
    }

    /// A decoder over the pieces alone.
    #[must_use]
    pub fn from_table(table: Arc<TokenTable>, skip_special: bool) -> Self {
        let (strip_space, of_bytes) = (table.strips_first_space(), table.has_byte_tokens());
        Self::from_source(Source::Table(table), skip_special, strip_space, of_bytes)
    }

    fn from_source(source: Source, skip_special: bool, strip_space: bool, of_bytes: bool) -> Self {
        let edge = Edge {
            strip_space,
            pending: Vec::new(),
            of_bytes,
            bad_run: false,
        };
        Self {
            source,
            skip_special,
            shown: Arc::default(),
            edge,
        }
    }

    /// The text goes on after a prompt, rather than being a text of its own: a space at its start stays.
    #[must_use]
    pub fn continuing(mut self) -> Self {
        self.edge.strip_space = false;
        self
    }

    /// These have a text, special or not. Not for the few tokenizers that decode in context.
    #[must_use]
    pub fn showing(mut self, ids: &Arc<[u32]>) -> Self {
        self.shown = ids.clone();
        self
    }

    /// Appends to `out` what `id` completes: nothing, or all text up to the last complete character. Bytes that can't
    /// become a character give one U+FFFD per maximal part, byte tokens one each. An id the vocabulary lacks has no text.
    #[inline]
    pub fn push(&mut self, id: u32, out: &mut String) {
        let table = match &mut self.source {
            Source::Table(table) => table,
            Source::Context(context) => return context.push(id, self.skip_special, out),
        };
        let Some((content, special)) = table.get(id) else {
            return;
        };
        if special && self.skip_special && !self.shown.contains(&id) {
            return self.edge.end_pending(out);
        }
        match content {
            Content::Text(text) => {
                // Complete text ends what waits, since no character continues with the first byte of another.
                if !text.is_empty() {
                    self.edge.end_pending(out);
                }
                self.edge.show(text, out);
            }
            Content::Byte(byte) => self.edge.push_byte(byte, out),
            Content::Raw(bytes) => {
                self.edge.strip_space = false;
                self.edge.pending.extend_from_slice(bytes);
                show_complete(&mut self.edge.pending, out);
            }
        }
    }

    /// Whether bytes wait for the rest of their character.
    #[must_use]
    pub fn holds_bytes(&self) -> bool {
        match &self.source {
            Source::Table(_) => !self.edge.pending.is_empty(),
            Source::Context(context) => !context.held.is_empty(),
        }
    }

    /// The end of the answer: bytes that still wait become one U+FFFD. Nothing waits afterwards.
    pub fn finish(&mut self, out: &mut String) {
        match &mut self.source {
            Source::Table(_) => self.edge.end_pending(out),
            Source::Context(context) => context.show(self.skip_special, out),
        }
    }
}

impl Edge {
    #[inline]
    fn show(&mut self, text: &str, out: &mut String) {
        out.push_str(match text.strip_prefix(' ') {
            Some(rest) if self.strip_space => rest,
            _ => text,
        });
        self.strip_space &= text.is_empty();
    }

    fn push_byte(&mut self, byte: u8, out: &mut String) {
        if self.bad_run {
            return out.push(char::REPLACEMENT_CHARACTER);
        }
        self.pending.push(byte);
        let mut waiting = std::mem::take(&mut self.pending);
        match std::str::from_utf8(&waiting) {
            Ok(text) => self.show(text, out),
            Err(error) if error.error_len().is_none() => {
                self.pending = waiting;
                return;
            }
            Err(_) => {
                self.bad_run = true;
                self.strip_space = false;
                waiting.iter().for_each(|_| out.push(char::REPLACEMENT_CHARACTER));
            }
        }
        waiting.clear();
        self.pending = waiting;
    }

    /// Turns what waits into one U+FFFD, as it is the beginning of one character and so one maximal part; of byte tokens
    /// each has its own.
    #[inline]
    fn end_pending(&mut self, out: &mut String) {
        self.bad_run = false;
        if !self.pending.is_empty() {
            let count = if self.of_bytes { self.pending.len() } else { 1 };
            (0..count).for_each(|_| out.push(char::REPLACEMENT_CHARACTER));
            self.strip_space = false;
            self.pending.clear();
        }
    }
}

impl Tokenizer {
    /// The text of `ids`.
    ///
    /// The same as Hugging Face `decode`, but that in a byte-level vocabulary a skipped special token ends a character in
    /// the making. A [`StreamDecoder`] gives the same, but what it has shown of a run of byte tokens before it turned out
    /// to be no UTF-8 stands.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        if let Some(text) = self.decoded_by_reference(ids, skip_special) {
            return text;
        }
        let pieces = self.pieces();
        if pieces.has_byte_tokens() {
            return decode_with_byte_runs(pieces, ids, skip_special);
        }
        let mut text = String::with_capacity(ids.len() * 5);
        let mut decoder = StreamDecoder::from_table(Arc::clone(pieces), skip_special);
        for id in ids {
            decoder.push(*id, &mut text);
        }
        decoder.finish(&mut text);
        text
    }
}

/// The text of all ids over a table with byte tokens. A run of these is text if all of it is UTF-8; else each of them is one
/// U+FFFD.
fn decode_with_byte_runs(table: &TokenTable, ids: &[u32], skip_special: bool) -> String {
    fn end(run: &mut Vec<u8>, text: &mut String) {
        match std::str::from_utf8(run) {
            Ok(whole) => text.push_str(whole),
            Err(_) => run.iter().for_each(|_| text.push(char::REPLACEMENT_CHARACTER)),
        }
        run.clear();
    }
    let (mut text, mut run) = (String::with_capacity(ids.len() * 5), Vec::new());
    for &id in ids {
        // What has no text is not there, and ends no run.
        let Some((content, special)) = table.get(id) else {
            continue;
        };
        if special && skip_special {
            continue;
        }
        match content {
            Content::Byte(byte) => run.push(byte),
            Content::Text(piece) => {
                end(&mut run, &mut text);
                text.push_str(piece);
            }
            Content::Raw(bytes) => {
                end(&mut run, &mut text);
                text.push_str(&String::from_utf8_lossy(bytes));
            }
        }
    }
    end(&mut run, &mut text);
    if table.strips_first_space() && text.starts_with(' ') {
        text.remove(0);
    }
    text
}

/// Moves everything but the beginning of a last character from `pending` to `out`.
fn show_complete(pending: &mut Vec<u8>, out: &mut String) {
    let mut rest = pending.as_slice();
    loop {
        let error = match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                rest = &[];
                break;
            }
            Err(error) => error,
        };
        let (valid, tail) = rest.split_at(error.valid_up_to());
        out.push_str(&String::from_utf8_lossy(valid));
        rest = tail;
        let Some(bad) = error.error_len() else { break };
        out.push(char::REPLACEMENT_CHARACTER);
        rest = &tail[bad..];
    }
    let shown = pending.len() - rest.len();
    pending.drain(..shown);
}

/// Decoding for models whose decoder looks at several tokens at once (WordPiece, Metaspace, ...): the reference decodes
/// a short window with and without the new tokens, and the difference is the new text.
struct Context {
    tokenizer: Arc<Tokenizer>,
    /// The last tokens whose text has left; at most [`Context::SHOWN`].
    shown: Vec<u32>,
    /// Tokens whose text ends in U+FFFD so far; at most [`Context::HELD`].
    held: Vec<u32>,
}

impl Context {
    /// Decoders look one token back; more only makes the window robust against tokens without text.
    const SHOWN: usize = 6;
    /// A character has at most four bytes, so whoever waits longer waits in vain.
    const HELD: usize = 4;

    fn push(&mut self, id: u32, skip_special: bool, out: &mut String) {
        if skip_special && self.tokenizer.is_special(id) {
            return self.show(skip_special, out);
        }
        self.held.push(id);
        let fresh = self.fresh(skip_special);
        if !fresh.ends_with(char::REPLACEMENT_CHARACTER) || self.held.len() >= Self::HELD {
            self.show(skip_special, out);
        }
    }

    fn show(&mut self, skip_special: bool, out: &mut String) {
        if self.held.is_empty() {
            return;
        }
        out.push_str(&self.fresh(skip_special));
        self.shown.append(&mut self.held);
        let surplus = self.shown.len().saturating_sub(Self::SHOWN);
        self.shown.drain(..surplus);
    }

    /// What the held tokens add to the text of the shown ones.
    fn fresh(&self, skip_special: bool) -> String {
        let before = self.tokenizer.decode(&self.shown, skip_special);
        let all: Vec<u32> = self.shown.iter().chain(&self.held).copied().collect();
        let after = self.tokenizer.decode(&all, skip_special);
        // Text that has left can't be called back: where the decoder rewrote some of it, what differs is new.
        let same: usize = before
            .chars()
            .zip(after.chars())
            .take_while(|(a, b)| a == b)
            .map(|(a, _)| a.len_utf8())
            .sum();
        after.get(same..).unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Ids 0 to 255 are bytes; 300 and 301 are three syllables cut within the second; 900 is special.
    fn toy() -> Arc<TokenTable> {
        let mut entries: Vec<(u32, Vec<u8>, bool)> = (0..=255u8).map(|b| (u32::from(b), vec![b], false)).collect();
        entries.push((300, vec![0xEC, 0x82, 0xBC, 0xEA, 0xB2], false));
        entries.push((301, vec![0xB9, 0xEC, 0x82, 0xB4], false));
        entries.push((302, "\u{FFFD}".into(), false));
        entries.push((900, b"<eos>".to_vec(), true));
        Arc::new(TokenTable::from_pieces(entries).unwrap())
    }

    /// The text after each step, a step being some ids, and then that of the end.
    fn deltas(steps: &[&[u32]]) -> Vec<String> {
        let mut decoder = StreamDecoder::from_table(toy(), true);
        let mut shown: Vec<String> = steps
            .iter()
            .map(|step| {
                let mut out = String::new();
                step.iter().for_each(|id| decoder.push(*id, &mut out));
                out
            })
            .collect();
        let mut out = String::new();
        decoder.finish(&mut out);
        shown.push(out);
        shown
    }

    #[test]
    fn a_character_leaves_when_it_is_complete() {
        assert_eq!(deltas(&[&[240, 159], &[153, 130], &[111, 107]]), ["", "🙂", "ok", ""]);
    }

    #[test]
    fn complete_text_is_not_held_back_with_what_is_not() {
        assert_eq!(deltas(&[&[300], &[301]]), ["삼", "겹살", ""]);
    }

    #[test]
    fn the_end_turns_waiting_bytes_into_one_replacement() {
        assert_eq!(deltas(&[&[240, 159]]), ["", "\u{FFFD}"]);
        assert_eq!(deltas(&[&[240, 159, 153]]), ["", "\u{FFFD}"]);
    }

    #[test]
    fn hopeless_bytes_leave_with_the_byte_that_makes_them_hopeless() {
        assert_eq!(deltas(&[&[195], &[65], &[66]]), ["", "\u{FFFD}A", "B", ""]);
        assert_eq!(deltas(&[&[153, 130], &[120]]), ["\u{FFFD}\u{FFFD}", "x", ""]);
        assert_eq!(deltas(&[&[0xE0], &[0x80]]), ["", "\u{FFFD}\u{FFFD}", ""]);
    }

    #[test]
    fn nothing_is_composed_and_a_genuine_replacement_is_not_withheld() {
        assert_eq!(deltas(&[&[101], &[204, 129]]), ["e", "\u{301}", ""]);
        assert_eq!(deltas(&[&[302], &[121]]), ["\u{FFFD}", "y", ""]);
    }

    #[test]
    fn a_special_token_has_no_text_and_ends_what_waits() {
        assert_eq!(deltas(&[&[240, 159], &[900], &[153]]), ["", "\u{FFFD}", "\u{FFFD}", ""]);
        let mut decoder = StreamDecoder::from_table(toy(), false);
        let mut out = String::new();
        [104, 900].iter().for_each(|id| decoder.push(*id, &mut out));
        assert_eq!(out, "h<eos>");
    }

    #[test]
    fn an_unknown_id_has_no_text() {
        assert_eq!(
            deltas(&[&[240, 159], &[777], &[153, 130], &[5_000_000]]),
            ["", "", "🙂", "", ""]
        );
    }

    #[test]
    fn only_the_first_space_of_a_whole_text_is_stripped() {
        let table = TokenTable::from_pieces(vec![
            (1, b" a".to_vec(), false),
            (2, b" ".to_vec(), false),
            (3, vec![], false),
        ])
        .unwrap()
        .stripping_first_space(true);
        let table = Arc::new(table);
        let text = |ids: &[u32], continuing: bool| {
            let mut decoder = StreamDecoder::from_table(Arc::clone(&table), true);
            if continuing {
                decoder = decoder.continuing();
            }
            let mut out = String::new();
            ids.iter().for_each(|id| decoder.push(*id, &mut out));
            out
        };
        assert_eq!(text(&[1, 1], false), "a a");
        assert_eq!(text(&[3, 1, 1], false), "a a");
        assert_eq!(text(&[2, 1], false), " a");
        assert_eq!(text(&[1, 1], true), " a a");
    }

    #[test]
    fn what_waits_stays_small_however_long_the_answer() {
        let mut decoder = StreamDecoder::from_table(toy(), true);
        let mut out = String::new();
        for _ in 0..100_000 {
            decoder.push(0xF0, &mut out);
            assert!(decoder.edge.pending.len() <= 3 && decoder.edge.pending.capacity() <= 64);
        }
        assert_eq!(out.chars().count(), 99_999);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn any_bytes_give_what_the_whole_gives(bytes in proptest::collection::vec(interesting_byte(), 0..24)) {
            let ids: Vec<u32> = bytes.iter().map(|b| u32::from(*b)).collect();
            let mut decoder = StreamDecoder::from_table(toy(), true);
            let mut out = String::new();
            ids.iter().for_each(|id| decoder.push(*id, &mut out));
            decoder.finish(&mut out);
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes));
        }
    }

    /// Bytes at the edges of UTF-8's ranges, where the rules change.
    fn interesting_byte() -> impl Strategy<Value = u8> {
        prop_oneof![
            Just(b'a'),
            proptest::sample::select(vec![
                0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xDF, 0xE0, 0xE1, 0xED, 0xEE, 0xEF, 0xF0, 0xF1,
                0xF4, 0xF5, 0xFF,
            ]),
            any::<u8>(),
        ]
    }
}
