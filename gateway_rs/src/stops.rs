//! Where an answer ends: stop strings, found in text that comes in pieces.
//!
//! One [`StopMatcher`] for each choice, over a [`StopSet`] that its request's choices share (it is never written). Text
//! goes in as the detokeniser completes it; what can no longer become a stop string comes out at once. Held is only the
//! longest tail that is the beginning of a stop string. The stop that completes first in the text wins, whatever its place
//! in the list; of two that complete together, the one that began first. A byte costs the same wherever the pieces break.
//!
//! Stop ids are not text and so not here; they are the plane's.

use std::sync::Arc;

/// The stop strings of one request, prepared.
#[derive(Clone, Debug, Default)]
pub struct StopSet {
    stops: Vec<Stop>,
    include_stop: bool,
}

#[derive(Clone, Debug)]
struct Stop {
    text: Box<[u8]>,
    /// For each length of a matched beginning, the next shorter beginning that the matched bytes also end with
    /// (Knuth, Morris, Pratt).
    fallback: Box<[u16]>,
}

impl StopSet {
    /// Longest stop string, in bytes.
    pub const MAX_BYTES: usize = u16::MAX as usize;

    /// The set of these strings. Empty ones never match, nor do those over [`Self::MAX_BYTES`] (requests are held to
    /// much less). With `include_stop`, the text ends behind the stop string instead of before it.
    pub fn new<S: AsRef<str>>(stops: impl IntoIterator<Item = S>, include_stop: bool) -> Self {
        let stops = stops.into_iter().map(|stop| Stop::new(stop.as_ref())).collect();
        Self { stops, include_stop }
    }

    /// Whether nothing can ever match.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stops.is_empty()
    }
}

impl Stop {
    fn new(text: &str) -> Self {
        let text: Box<[u8]> = text.as_bytes().into();
        let usable = text.len() <= StopSet::MAX_BYTES;
        let text = if usable { text } else { Box::default() };
        let mut fallback = vec![0_u16; text.len() + 1].into_boxed_slice();
        let mut matched = 0;
        for at in 1..text.len() {
            matched = extend(&text, &fallback, matched, text[at]);
            fallback[at + 1] = matched;
        }
        Self { text, fallback }
    }

    fn extend(&self, matched: u16, byte: u8) -> u16 {
        extend(&self.text, &self.fallback, matched, byte)
    }

    fn is_complete(&self, matched: u16) -> bool {
        matched > 0 && usize::from(matched) == self.text.len()
    }
}

/// How much of `text` the bytes so far end with, after one more byte.
fn extend(text: &[u8], fallback: &[u16], mut matched: u16, byte: u8) -> u16 {
    loop {
        if text.get(usize::from(matched)) == Some(&byte) {
            return matched + 1;
        }
        if matched == 0 {
            return 0;
        }
        matched = fallback[usize::from(matched)];
    }
}

/// Looks for stop strings in the text of one choice.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    set: Arc<StopSet>,
    /// For each stop, how much of it the text so far ends with.
    matched: Vec<u16>,
    held: String,
    emitted_bytes: u64,
    stopped: Option<usize>,
}

impl StopMatcher {
    /// A matcher at the start of an answer.
    #[must_use]
    pub fn new(set: Arc<StopSet>) -> Self {
        let matched = vec![0; set.stops.len()];
        Self {
            set,
            matched,
            held: String::new(),
            emitted_bytes: 0,
            stopped: None,
        }
    }

    /// Takes text and appends to `out` what is safe to show. Returns the stop (its place in the list) that ended the
    /// answer, now or earlier; behind it nothing comes out any more.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<usize> {
        if self.stopped.is_some() {
            return self.stopped;
        }
        if self.set.is_empty() {
            self.emit(text, out);
            return None;
        }
        match self.scan(text) {
            Some((stop, end)) => {
                self.stopped = Some(stop);
                self.emit_until_stop(stop, &text[..end], out);
            }
            None => self.emit_safe(text, out),
        }
        self.stopped
    }

    /// The answer has ended by itself: appends to `out` what was held.
    pub fn finish(&mut self, out: &mut String) {
        let held = std::mem::take(&mut self.held);
        self.emit(&held, out);
        self.matched.fill(0);
    }

    /// Bytes of text taken and not shown.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    /// Bytes of text shown since the start.
    #[must_use]
    pub fn emitted_bytes(&self) -> u64 {
        self.emitted_bytes
    }

    /// The stop (its place in the list) that ended the answer.
    #[must_use]
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Advances over `text`; at the first byte that completes a stop: which one, and the end of it in `text`.
    fn scan(&mut self, text: &str) -> Option<(usize, usize)> {
        for (at, byte) in text.bytes().enumerate() {
            let mut longest: Option<usize> = None;
            for (index, (stop, matched)) in self.set.stops.iter().zip(&mut self.matched).enumerate() {
                *matched = stop.extend(*matched, byte);
                // Of those that end here, the longest began first.
                if stop.is_complete(*matched)
                    && longest.is_none_or(|other| stop.text.len() > self.set.stops[other].text.len())
                {
                    longest = Some(index);
                }
            }
            if let Some(stop) = longest {
                return Some((stop, at + 1));
            }
        }
        None
    }

    fn emit_until_stop(&mut self, stop: usize, text: &str, out: &mut String) {
        self.held.push_str(text);
        let held = std::mem::take(&mut self.held);
        let hidden = if self.set.include_stop {
            0
        } else {
            self.set.stops[stop].text.len()
        };
        // A stop string begins where a character begins, so this cut is between characters.
        self.emit(&held[..held.len() - hidden], out);
    }

    fn emit_safe(&mut self, text: &str, out: &mut String) {
        let keep = usize::from(self.matched.iter().copied().max().unwrap_or(0));
        if keep <= text.len() {
            let held = std::mem::take(&mut self.held);
            self.emit(&held, out);
            let (safe, tail) = text.split_at(text.len() - keep);
            self.emit(safe, out);
            self.held = held;
            self.held.clear();
            self.held.push_str(tail);
        } else {
            self.held.push_str(text);
            let safe = self.held.len() - keep;
            out.push_str(&self.held[..safe]);
            self.emitted_bytes += safe as u64;
            self.held.drain(..safe);
        }
    }

    fn emit(&mut self, text: &str, out: &mut String) {
        self.emitted_bytes += text.len() as u64;
        out.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stops: &[&str]) -> StopMatcher {
        StopMatcher::new(Arc::new(StopSet::new(stops, false)))
    }

    /// What each push lets out, and which stop ended it.
    fn pushes(matcher: &mut StopMatcher, texts: &[&str]) -> (Vec<String>, Option<usize>) {
        let outs = texts
            .iter()
            .map(|text| {
                let mut out = String::new();
                matcher.push(text, &mut out);
                out
            })
            .collect();
        (outs, matcher.stopped())
    }

    /// All of the text that a whole answer shows.
    fn answer(matcher: &mut StopMatcher, texts: &[&str]) -> (String, Option<usize>) {
        let mut out = String::new();
        for text in texts {
            matcher.push(text, &mut out);
        }
        matcher.finish(&mut out);
        (out, matcher.stopped())
    }

    #[test]
    fn the_head_of_a_stop_string_is_never_shown() {
        let mut matcher = matcher(&["\nEND"]);
        let (outs, stopped) = pushes(&mut matcher, &["done", "\n", "E", "N", "D", "x"]);
        assert_eq!(outs, ["done", "", "", "", "", ""]);
        assert_eq!(stopped, Some(0));
        assert_eq!(matcher.emitted_bytes(), 4);
    }

    #[test]
    fn what_turns_out_to_be_none_is_released_in_order() {
        let mut matcher = matcher(&["\nEND"]);
        let (outs, stopped) = pushes(&mut matcher, &["a", "\n", "E", "n", "d"]);
        assert_eq!(outs, ["a", "", "", "\nEn", "d"]);
        assert_eq!(stopped, None);
        assert_eq!(matcher.held_bytes(), 0);
    }

    #[test]
    fn the_first_to_complete_in_the_text_wins_in_either_order_of_the_list() {
        for stops in [["zz", "mid"], ["mid", "zz"]] {
            let (text, stopped) = answer(&mut matcher(&stops), &["x mid y zz"]);
            assert_eq!(text, "x ");
            assert_eq!(stops[stopped.expect("stopped")], "mid");
        }
    }

    #[test]
    fn of_two_that_complete_together_the_one_that_began_first_wins() {
        for stops in [["bc", "abc"], ["abc", "bc"]] {
            let (text, stopped) = answer(&mut matcher(&stops), &["a", "b", "c"]);
            assert_eq!(text, "");
            assert_eq!(stops[stopped.expect("stopped")], "abc");
        }
    }

    #[test]
    fn a_held_head_belongs_to_its_request_alone() {
        let set = Arc::new(StopSet::new(["END"], false));
        let mut broken_off = StopMatcher::new(Arc::clone(&set));
        broken_off.push("EN", &mut String::new());
        assert_eq!(answer(&mut StopMatcher::new(set), &["D", "o"]), ("Do".into(), None));
    }

    #[test]
    fn a_stop_string_of_one_wide_character() {
        assert_eq!(answer(&mut matcher(&["é"]), &["caf", "é"]), ("caf".into(), Some(0)));
    }

    #[test]
    fn a_character_that_begins_like_a_stop_is_held_whole() {
        // é and è share their first byte.
        let (outs, _) = pushes(&mut matcher(&["éa"]), &["è", "é", "b"]);
        assert_eq!(outs, ["è", "", "éb"]);
    }

    #[test]
    fn a_tail_that_was_held_is_shown_at_the_end() {
        assert_eq!(answer(&mut matcher(&["END"]), &["the E", "N"]), ("the EN".into(), None));
    }

    #[test]
    fn only_the_tail_that_can_still_match_is_held() {
        let mut matcher = matcher(&["aab"]);
        let (outs, _) = pushes(&mut matcher, &["a", "a", "a", "a", "c"]);
        assert_eq!(outs, ["", "", "a", "a", "aac"]);
    }

    #[test]
    fn the_stop_string_stays_when_it_is_asked_for() {
        let mut matcher = StopMatcher::new(Arc::new(StopSet::new(["END"], true)));
        assert_eq!(answer(&mut matcher, &["a E", "NDx"]), ("a END".into(), Some(0)));
    }

    #[test]
    fn without_stop_strings_all_comes_out_at_once() {
        let (outs, stopped) = pushes(&mut matcher(&[]), &["a", "\n", "é"]);
        assert_eq!((outs.concat().as_str(), stopped), ("a\né", None));
        assert_eq!(answer(&mut matcher(&[""]), &["ab"]), ("ab".into(), None));
    }

    #[test]
    fn greedy_words_that_cross_tokens() {
        assert_eq!(
            answer(&mut matcher(&["ha bet"]), &["alpha", " beta", " gamma"]).0,
            "alp"
        );
    }

    /// The slow and obvious way: at each length of the text, whether it ends with a stop.
    fn oracle(stops: &[String], text: &str, include: bool) -> (String, bool) {
        for end in (0..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            let ending = stops
                .iter()
                .filter(|stop| !stop.is_empty() && text[..end].ends_with(stop.as_str()));
            if let Some(longest) = ending.map(String::len).max() {
                let hidden = if include { 0 } else { longest };
                return (text[..end - hidden].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn any_split_gives_what_the_oracle_gives(
            stops in proptest::collection::vec("[abé🙂]{1,4}", 0..=4),
            pieces in proptest::collection::vec("[abcé🙂]{0,5}", 0..12),
            include in any::<bool>(),
        ) {
            let mut matcher = StopMatcher::new(Arc::new(StopSet::new(&stops, include)));
            let (mut out, mut taken) = (String::new(), String::new());
            for piece in &pieces {
                let stopped = matcher.push(piece, &mut out).is_some();
                taken.push_str(piece);
                let (shown, ends) = oracle(&stops, &taken, include);
                prop_assert_eq!(stopped, ends);
                if ends {
                    prop_assert_eq!(&out, &shown);
                    break;
                }
                // Held is exactly the longest tail that is the beginning of a stop.
                let held = (0..=taken.len())
                    .filter(|at| taken.is_char_boundary(*at))
                    .map(|at| &taken[at..])
                    .find(|tail| stops.iter().any(|stop| stop.len() > tail.len() && stop.starts_with(tail)))
                    .map_or(0, str::len);
                prop_assert_eq!(matcher.held_bytes(), held);
                prop_assert_eq!(&out, &taken[..taken.len() - held]);
                prop_assert_eq!(matcher.emitted_bytes(), out.len() as u64);
            }
            matcher.finish(&mut out);
            prop_assert_eq!(out, oracle(&stops, &pieces.concat(), include).0);
        }
    }
}
