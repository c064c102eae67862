//! An answer in the making: ids in, text out, and the decision where it ends. Pure: no clock, no network.
//!
//! The end of an answer is decided here, exactly once for each choice, on ids and text together: an end-of-sequence or stop
//! id, a stop string, or the token limit. What a worker sends after that is not looked at. Everything that belongs to a token
//! (its log-probabilities, its bytes) travels with its id and leaves together with its text.

use std::{collections::VecDeque, sync::Arc};

use headrace_core::routing::confidence::confidence;

use super::model::Model;
use crate::{
    detok::StreamDecoder,
    proto::{answer as stored, Outcome, TokenDelta, TokenLogprobs},
    stops::{StopMatcher, StopSet},
    tokenize::Tokenizer,
    tools::{CallPart, ToolParser, ToolRules},
};

/// Where the parts of an answer go: SSE events, gRPC messages, or one body.
pub trait Sink {
    /// The prompt's ids with their log-probabilities (none for the first), before anything else, when both were asked for.
    fn prompt(&mut self, choice: u32, entries: &[Entry]);
    /// Text that will not be taken back, with the ids that it completes when [`Ending::entries`] is set.
    fn delta(&mut self, choice: u32, text: &str, entries: &[Entry]);
    /// Parts of calls of tools.
    fn calls(&mut self, choice: u32, parts: &[CallPart]);
    /// The choice is over.
    fn finish(&mut self, choice: u32, finish: &Finish);
    /// What comes is in that model's ids. Nothing came before.
    fn model(&mut self, model: &Arc<Model>);
}

/// One id and what belongs to it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The id.
    pub id: u32,
    /// When they were asked for.
    pub logprobs: Option<TokenLogprobs>,
    start: usize,
    end: usize,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Stop, length or tool calls.
    pub outcome: Outcome,
    /// The stop string that did it.
    pub stop_string: Option<String>,
    /// The id that did it.
    pub stop_id: Option<u32>,
}

/// When the answer to one request ends, and what is wanted of it.
#[derive(Clone, Debug)]
pub struct Ending {
    /// All ids by which the model says that it is done; empty when they are to be ignored.
    pub eos_ids: Vec<u32>,
    /// The client's own.
    pub stop_ids: Vec<u32>,
    /// The client's own.
    pub stop_strings: Vec<String>,
    /// The same, prepared.
    pub stop_set: Arc<StopSet>,
    /// For each choice.
    pub max_tokens: u32,
    /// Before so many ids nothing but `max_tokens` ends it.
    pub min_tokens: u32,
    /// Nothing leaves before [`Answer::release`].
    pub held: bool,
    /// Hand out ids with the text.
    pub entries: bool,
    /// And their log-probabilities. They may come without, for [`Answer::confidence`].
    pub logprobs: bool,
    /// So many first ids say how sure the model is; 0 = that is not asked.
    pub judged_tokens: u32,
    /// Leave special tokens out of the text, but for `shown_ids`.
    pub skip_special: bool,
    /// Special tokens that have a text, because calls of tools are told by them.
    pub shown_ids: Arc<[u32]>,
    /// Look for calls of tools.
    pub tools: Option<ToolRules>,
}

/// A worker that broke the contract; the text says how.
#[derive(Debug, PartialEq, Eq)]
pub struct Gap(pub String);

/// All choices of one request.
pub struct Answer {
    ending: Ending,
    choices: Vec<Choice>,
    /// Something was handed to the sink: it can't be done again from the start.
    shown: bool,
    /// What came while it was held.
    kept: Vec<Kept>,
    /// Room for the text and calls of one delta, kept from one to the next.
    out: Out,
}

/// What would have left with one delta.
struct Kept {
    choice: u32,
    out: Out,
    entries: Vec<Entry>,
    finish: Option<Finish>,
}

/// What leaves with one delta.
#[derive(Default)]
struct Out {
    text: String,
    calls: Vec<CallPart>,
}

struct Choice {
    decoder: StreamDecoder,
    matcher: Option<StopMatcher>,
    tools: Option<ToolParser>,
    ids: Vec<u32>,
    logprobs: Vec<TokenLogprobs>,
    /// Of the running attempt: ids that earlier attempts committed.
    base: usize,
    /// Bytes of text that the decoder gave, and of these, the bytes that left.
    decoded_bytes: usize,
    emitted_bytes: usize,
    waiting: VecDeque<Entry>,
    finish: Option<Finish>,
    /// Room for the text of one id.
    fresh: String,
}

impl Answer {
    /// Nothing yet, of `choices` choices.
    pub fn new(tokenizer: &Arc<Tokenizer>, choices: u32, ending: Ending) -> Self {
        let matcher = (!ending.stop_strings.is_empty()).then(|| StopMatcher::new(ending.stop_set.clone()));
        let choice = |number| Choice {
            decoder: StreamDecoder::new(tokenizer, ending.skip_special)
                .continuing()
                .showing(&ending.shown_ids),
            matcher: matcher.clone(),
            tools: ending.tools.clone().map(|rules| ToolParser::new(rules, number)),
            ids: Vec::new(),
            logprobs: Vec::new(),
            base: 0,
            decoded_bytes: 0,
            emitted_bytes: 0,
            waiting: VecDeque::new(),
            finish: None,
            fresh: String::new(),
        };
        Self {
            choices: (0..choices).map(choice).collect(),
            ending,
            shown: false,
            kept: Vec::new(),
            out: Out::default(),
        }
    }

    /// Takes ids of a choice in; true when the choice is over with them.
    /// An id whose index was taken before is left out; one that leaves a gap is the worker's fault.
    pub fn push(&mut self, delta: &TokenDelta, sink: &mut impl Sink) -> Result<bool, Gap> {
        let Some(choice) = self.choices.get_mut(delta.choice as usize) else {
            return Err(Gap(format!("choice {} of {}", delta.choice, self.choices.len())));
        };
        if choice.finish.is_some() {
            return Ok(true);
        }
        let first = choice.base + delta.first_index as usize;
        if first > choice.ids.len() {
            return Err(Gap(format!("index {first} after {} ids", choice.ids.len())));
        }
        let out = &mut self.out;
        out.text.clear();
        out.calls.clear();
        let mut entries = Vec::new();
        let known = choice.ids.len() - first;
        let mut logprobs = delta.logprobs.iter();
        for (index, &id) in delta.ids.iter().enumerate() {
            let logprobs = logprobs.next();
            if index < known {
                continue;
            }
            choice.take(id, logprobs, &self.ending, out);
            if choice.finish.is_some() {
                break;
            }
        }
        if let (None, Some(finish)) = (&choice.finish, &delta.finish) {
            let outcome = Outcome::try_from(finish.outcome).unwrap_or(Outcome::Failed);
            if matches!(outcome, Outcome::Stop | Outcome::Length | Outcome::ToolCalls) {
                choice.end(
                    Finish {
                        outcome,
                        stop_string: None,
                        stop_id: None,
                    },
                    &self.ending,
                    out,
                );
            }
        }
        choice.settle(out);
        choice.release(&mut entries);
        let finish = choice.finish.as_ref();
        match self.ending.held {
            true => self.kept.push(Kept {
                choice: delta.choice,
                out: std::mem::take(out),
                entries,
                finish: finish.cloned(),
            }),
            false => self.shown |= out.leave(delta.choice, &entries, finish, &self.ending, sink),
        }
        Ok(choice.finish.is_some())
    }

    /// Nothing leaves for now.
    pub fn is_held(&self) -> bool {
        self.ending.held
    }

    /// What was held leaves, and what comes from now on does at once.
    pub fn release(&mut self, sink: &mut impl Sink) {
        self.ending.held = false;
        for kept in std::mem::take(&mut self.kept) {
            let finish = kept.finish.as_ref();
            self.shown |= kept.out.leave(kept.choice, &kept.entries, finish, &self.ending, sink);
        }
    }

    /// How sure the model is of the only choice, by its first ids; None until they are there. Nothing speaks against an
    /// answer that came without log-probabilities.
    pub fn confidence(&self) -> Option<f32> {
        let [choice] = self.choices.as_slice() else { return None };
        let judged = self.ending.judged_tokens as usize;
        if choice.ids.len() < judged && choice.finish.is_none() {
            return None;
        }
        let drawn = choice.logprobs.iter().take(judged).filter_map(|one| one.drawn.as_ref());
        Some(confidence(drawn.map(|drawn| drawn.logprob)).unwrap_or(1.0))
    }

    /// Every choice is over.
    pub fn is_done(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    /// How it ended: see [`outcome_of_all`].
    pub fn outcome(&self) -> Outcome {
        let finishes = self.choices.iter().filter_map(|choice| choice.finish.as_ref());
        outcome_of_all(finishes.map(|finish| finish.outcome))
    }

    /// Whether that choice is over.
    pub fn is_finished(&self, choice: u32) -> bool {
        self.choices
            .get(choice as usize)
            .is_some_and(|choice| choice.finish.is_some())
    }

    /// Something has left: only going on is possible, not doing it again.
    pub fn is_shown(&self) -> bool {
        self.shown
    }

    /// Ids over all choices, each up to and including the one that ended it.
    pub fn completion_tokens(&self) -> u32 {
        self.choices.iter().map(|choice| choice.ids.len() as u32).sum()
    }

    /// The ids of the only choice, to go on from elsewhere; None when there are several.
    pub fn committed(&self) -> Option<&[u32]> {
        match self.choices.as_slice() {
            [choice] => Some(&choice.ids),
            _ => None,
        }
    }

    /// Ids that earlier attempts committed.
    pub fn resumed(&self) -> usize {
        self.choices.first().map_or(0, |choice| choice.base)
    }

    /// Forgets all that came; only while nothing was shown.
    pub fn reset(&mut self, tokenizer: &Arc<Tokenizer>) {
        *self = Self::new(tokenizer, self.choices.len() as u32, self.ending.clone());
    }

    /// The next attempt counts its ids from 0 again.
    pub fn rebase(&mut self) {
        for choice in &mut self.choices {
            choice.base = choice.ids.len();
        }
    }

    /// What the response cache keeps; only of a finished answer.
    pub fn stored(&self, prompt_tokens: u32) -> crate::proto::Answer {
        crate::proto::Answer {
            prompt_tokens,
            choices: self
                .choices
                .iter()
                .map(|choice| stored::Choice {
                    ids: choice.ids.clone(),
                    logprobs: choice.logprobs.clone(),
                    outcome: choice
                        .finish
                        .as_ref()
                        .map_or(Outcome::Unspecified, |finish| finish.outcome) as i32,
                })
                .collect(),
        }
    }

    /// A stored answer as a worker would have sent it.
    pub fn replay(stored: crate::proto::Answer) -> Vec<TokenDelta> {
        let choices = stored.choices.into_iter().zip(0..);
        choices
            .map(|(choice, number)| TokenDelta {
                choice: number,
                ids: choice.ids,
                logprobs: choice.logprobs,
                finish: Some(Box::new(crate::proto::token_delta::Finish {
                    outcome: choice.outcome,
                    ..Default::default()
                })),
                ..TokenDelta::default()
            })
            .collect()
    }
}

/// Of several that ended well: length when any was cut, tool calls when any called tools, else stop.
pub fn outcome_of_all(each: impl Iterator<Item = Outcome>) -> Outcome {
    each.fold(Outcome::Stop, |all, one| match (all, one) {
        (Outcome::Length, _) | (_, Outcome::Length) => Outcome::Length,
        (Outcome::ToolCalls, _) | (_, Outcome::ToolCalls) => Outcome::ToolCalls,
        _ => Outcome::Stop,
    })
}

impl Out {
    /// Hands it to the sink; true when there was anything.
    fn leave(
        &self,
        choice: u32,
        entries: &[Entry],
        finish: Option<&Finish>,
        ending: &Ending,
        sink: &mut impl Sink,
    ) -> bool {
        let says = !self.text.is_empty() || (ending.entries && !entries.is_empty());
        if says {
            sink.delta(choice, &self.text, entries);
        }
        if !self.calls.is_empty() {
            sink.calls(choice, &self.calls);
        }
        if let Some(finish) = finish {
            sink.finish(choice, finish);
        }
        says || !self.calls.is_empty() || finish.is_some()
    }
}

impl Choice {
    fn take(&mut self, id: u32, logprobs: Option<&TokenLogprobs>, ending: &Ending, out: &mut Out) {
        self.ids.push(id);
        let wanted = ending.logprobs || self.logprobs.len() < ending.judged_tokens as usize;
        self.logprobs.extend(logprobs.filter(|_| wanted).cloned());
        let may_end = self.ids.len() > ending.min_tokens as usize;
        if may_end && (ending.eos_ids.contains(&id) || ending.stop_ids.contains(&id)) {
            let finish = Finish {
                outcome: Outcome::Stop,
                stop_string: None,
                stop_id: Some(id),
            };
            return self.end(finish, ending, out);
        }
        let mut fresh = std::mem::take(&mut self.fresh);
        fresh.clear();
        self.decoder.push(id, &mut fresh);
        if ending.entries {
            let start = self.waiting.back().map_or(self.decoded_bytes, |entry| entry.end);
            // A token whose character is not complete yet leaves with the byte that completes it.
            let end = self.decoded_bytes + fresh.len() + usize::from(self.decoder.holds_bytes());
            self.waiting.push_back(Entry {
                id,
                logprobs: logprobs.filter(|_| ending.logprobs).cloned(),
                start,
                end,
            });
        }
        self.emit(&fresh, ending, out);
        self.fresh = fresh;
        if self.finish.is_none() && self.ids.len() >= ending.max_tokens as usize {
            self.end(
                Finish {
                    outcome: Outcome::Length,
                    stop_string: None,
                    stop_id: None,
                },
                ending,
                out,
            );
        }
    }

    /// Text of the decoder on its way out, through the stop strings.
    fn emit(&mut self, fresh: &str, ending: &Ending, out: &mut Out) {
        self.decoded_bytes += fresh.len();
        let before = out.text.len();
        match &mut self.matcher {
            None => out.text.push_str(fresh),
            Some(matcher) => {
                if let Some(stop) = matcher.push(fresh, &mut out.text) {
                    let stop_string = ending.stop_strings.get(stop).cloned();
                    self.finish = Some(Finish {
                        outcome: Outcome::Stop,
                        stop_string,
                        stop_id: None,
                    });
                }
            }
        }
        self.pass(before, out);
    }

    /// Text that left the stop strings, from there on, goes through the calls of tools.
    fn pass(&mut self, from: usize, out: &mut Out) {
        self.emitted_bytes += out.text.len() - from;
        let Some(tools) = &mut self.tools else { return };
        let passed = out.text.split_off(from);
        tools.push(&passed, &mut out.text, &mut out.calls);
        if tools.is_over() && self.finish.is_none() {
            self.finish = Some(Finish {
                outcome: Outcome::ToolCalls,
                stop_string: None,
                stop_id: None,
            });
        }
    }

    /// At the end, what was held of a call that is none leaves, and an answer that ended with calls says so.
    fn settle(&mut self, out: &mut Out) {
        let Some(finish) = &mut self.finish else { return };
        if let Some(mut tools) = self.tools.take() {
            tools.finish(&mut out.text);
            if tools.calls() > 0 && finish.outcome == Outcome::Stop {
                finish.outcome = Outcome::ToolCalls;
            }
        }
    }

    /// Everything that was held leaves; a stop string that the last bytes complete still counts.
    fn end(&mut self, finish: Finish, ending: &Ending, out: &mut Out) {
        let mut fresh = String::new();
        self.decoder.finish(&mut fresh);
        self.emit(&fresh, ending, out);
        if self.finish.is_some() {
            return;
        }
        let before = out.text.len();
        if let Some(matcher) = &mut self.matcher {
            matcher.finish(&mut out.text);
        }
        self.pass(before, out);
        self.finish.get_or_insert(finish);
    }

    /// Moves the entries whose text has left.
    fn release(&mut self, entries: &mut Vec<Entry>) {
        while let Some(entry) = self.waiting.front() {
            let gone = match &self.finish {
                None => entry.end <= self.emitted_bytes,
                // Cut within a token: the token was begun, so it belongs to the answer.
                Some(_) => entry.start < self.emitted_bytes || entry.end <= self.emitted_bytes,
            };
            if !gone {
                break;
            }
            entries.extend(self.waiting.pop_front());
        }
        if self.finish.is_some() {
            self.waiting.clear();
        }
    }
}

/// The ids of a prompt with their log-probabilities, as entries.
pub fn prompt_entries(ids: &[u32], logprobs: &[TokenLogprobs]) -> Vec<Entry> {
    let later = logprobs
        .iter()
        .map(|one| Some(one.clone()))
        .chain(std::iter::repeat(None));
    let all = std::iter::once(None).chain(later);
    let entry = |(&id, logprobs)| Entry {
        id,
        logprobs,
        start: 0,
        end: 0,
    };
    ids.iter().zip(all).map(entry).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{proto::token_delta, tokenize::pieces::byte_to_char};

    const EOS: u32 = 900;

    /// One id a byte; 900 ends an answer and has no text.
    fn toy() -> Arc<Tokenizer> {
        let mut vocabulary: BTreeMap<String, u32> = (0..=255_u8)
            .map(|byte| (byte_to_char(byte).to_string(), byte.into()))
            .collect();
        vocabulary.insert("<eos>".to_owned(), EOS);
        let byte_level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        let document = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "pre_tokenizer": byte_level, "decoder": byte_level,
            "added_tokens": [{"id": EOS, "content": "<eos>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                      "vocab": vocabulary, "merges": []},
        });
        Arc::new(Tokenizer::from_bytes(document.to_string().as_bytes()).unwrap())
    }

    fn ending(stops: &[&str], max_tokens: u32) -> Ending {
        Ending {
            eos_ids: vec![EOS],
            stop_ids: Vec::new(),
            stop_strings: stops.iter().map(|&stop| stop.to_owned()).collect(),
            stop_set: Arc::new(StopSet::new(stops, false)),
            max_tokens,
            min_tokens: 0,
            held: false,
            entries: true,
            logprobs: false,
            judged_tokens: 0,
            skip_special: true,
            shown_ids: Arc::default(),
            tools: None,
        }
    }

    /// Everything that left, and how each choice ended.
    #[derive(Clone, Debug, Default, PartialEq)]
    struct Seen {
        text: String,
        ids: Vec<u32>,
        finish: Option<Finish>,
        calls: String,
    }

    impl Sink for Seen {
        fn prompt(&mut self, _: u32, _: &[Entry]) {}

        fn delta(&mut self, _: u32, text: &str, entries: &[Entry]) {
            assert_eq!(self.finish, None, "nothing leaves after the end");
            self.text.push_str(text);
            self.ids.extend(entries.iter().map(|entry| entry.id));
        }

        fn calls(&mut self, _: u32, parts: &[CallPart]) {
            assert_eq!(self.finish, None, "nothing leaves after the end");
            for part in parts {
                if let Some(begun) = &part.begun {
                    self.calls += &format!("{}:", begun.name);
                }
                self.calls += &part.arguments;
            }
        }

        fn finish(&mut self, _: u32, finish: &Finish) {
            assert_eq!(self.finish.replace(finish.clone()), None, "a choice ends once");
        }

        fn model(&mut self, _: &Arc<Model>) {}
    }

    fn delta(first_index: usize, ids: &[u32]) -> TokenDelta {
        TokenDelta {
            first_index: first_index as u32,
            ids: ids.to_vec(),
            ..TokenDelta::default()
        }
    }

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    fn answer(steps: &[&[u32]], ending: Ending) -> (Seen, u32) {
        let mut answer = Answer::new(&toy(), 1, ending);
        let (mut seen, mut index) = (Seen::default(), 0);
        for step in steps {
            if !answer.push(&delta(index, step), &mut seen).unwrap() {
                index += step.len();
            }
        }
        (seen, answer.completion_tokens())
    }

    #[test]
    fn the_token_limit_and_the_end_id_in_one_step() {
        let mut last = bytes("Q");
        last.extend([EOS, 120, 121]);
        let (seen, tokens) = answer(&[&bytes("abcd"), &last], ending(&[], 6));
        assert_eq!((seen.text.as_str(), tokens), ("abcdQ", 6));
        assert_eq!(seen.ids, bytes("abcdQ"));
        assert_eq!(seen.finish.unwrap().stop_id, Some(EOS));
    }

    #[test]
    fn held_text_leaves_with_its_ids_or_not_at_all() {
        let (seen, _) = answer(
            &[&bytes("a"), &bytes("\nEn"), &bytes("d"), &[EOS]],
            ending(&["\nEND"], 64),
        );
        assert_eq!((seen.text.as_str(), seen.ids), ("a\nEnd", bytes("a\nEnd")));
        let (seen, tokens) = answer(&[&bytes("done"), &bytes("\nENDx")], ending(&["\nEND"], 64));
        assert_eq!((seen.text.as_str(), tokens), ("done", 8));
        assert_eq!(seen.ids, bytes("done"));
        assert_eq!(seen.finish.unwrap().stop_string.as_deref(), Some("\nEND"));
    }

    #[test]
    fn an_unfinished_character_at_the_limit_is_one_replacement() {
        let (seen, tokens) = answer(&[&[240, 159]], ending(&[], 2));
        assert_eq!((seen.text.as_str(), tokens), ("\u{fffd}", 2));
        assert_eq!(seen.ids, [240, 159]);
        assert_eq!(seen.finish.unwrap().outcome, Outcome::Length);
    }

    #[test]
    fn an_index_is_committed_once_and_a_gap_is_a_fault() {
        let mut answer = Answer::new(&toy(), 1, ending(&[], 64));
        let mut seen = Seen::default();
        answer.push(&delta(0, &bytes("abc")), &mut seen).unwrap();
        answer.push(&delta(1, &bytes("bcd")), &mut seen).unwrap();
        assert_eq!(seen.text, "abcd");
        assert!(answer.push(&delta(5, &bytes("x")), &mut seen).is_err());
        assert!(answer
            .push(
                &TokenDelta {
                    choice: 1,
                    ..delta(0, &bytes("x"))
                },
                &mut seen
            )
            .is_err());
    }

    fn unsure(first_index: usize, ids: &[u32], probability: f32) -> TokenDelta {
        let drawn = |&id| TokenLogprobs {
            drawn: Some(crate::proto::Logprob {
                id,
                logprob: probability.ln(),
            }),
            top: Vec::new(),
        };
        TokenDelta {
            logprobs: ids.iter().map(drawn).collect(),
            ..delta(first_index, ids)
        }
    }

    #[test]
    fn what_is_held_leaves_when_it_is_released_and_the_rest_at_once() {
        let rules = Ending {
            held: true,
            ..ending(&[], 64)
        };
        let (whole, _) = answer(&[&bytes("abc"), &bytes("d"), &[EOS]], ending(&[], 64));
        let mut held = Answer::new(&toy(), 1, rules);
        let mut seen = Seen::default();
        held.push(&delta(0, &bytes("abc")), &mut seen).unwrap();
        assert_eq!((&seen, held.is_shown()), (&Seen::default(), false));
        // What was not shown can be done again.
        held.reset(&toy());
        held.push(&delta(0, &bytes("a")), &mut seen).unwrap();
        held.push(&delta(1, &bytes("bc")), &mut seen).unwrap();
        held.release(&mut seen);
        assert_eq!((seen.text.as_str(), held.is_shown()), ("abc", true));
        held.push(&delta(3, &bytes("d")), &mut seen).unwrap();
        held.push(&delta(4, &[EOS]), &mut seen).unwrap();
        assert_eq!(seen, whole);
    }

    #[test]
    fn first_ids_say_how_sure_the_model_is() {
        let rules = Ending {
            judged_tokens: 3,
            ..ending(&[], 64)
        };
        let sure = |answer: &Answer| answer.confidence().map(|sure| (sure * 100.0).round());
        let mut judged = Answer::new(&toy(), 1, rules.clone());
        let mut seen = Seen::default();
        judged.push(&unsure(0, &bytes("ab"), 0.5), &mut seen).unwrap();
        assert_eq!(sure(&judged), None);
        // However many ids come at once, the first ones count.
        judged.push(&unsure(2, &bytes("c"), 0.5), &mut seen).unwrap();
        judged.push(&unsure(3, &bytes("defg"), 0.01), &mut seen).unwrap();
        assert_eq!(sure(&judged), Some(50.0));
        let mut short = Answer::new(&toy(), 1, rules.clone());
        short.push(&unsure(0, &[97, EOS], 0.25), &mut Seen::default()).unwrap();
        assert_eq!(sure(&short), Some(25.0));
        let mut silent = Answer::new(&toy(), 1, rules);
        silent.push(&delta(0, &bytes("abc")), &mut Seen::default()).unwrap();
        assert_eq!(sure(&silent), Some(100.0));
    }

    #[test]
    fn log_probabilities_that_nobody_asked_for_are_not_shown() {
        /// Those that were handed out.
        struct Shown(Vec<bool>);
        impl Sink for Shown {
            fn prompt(&mut self, _: u32, _: &[Entry]) {}
            fn delta(&mut self, _: u32, _: &str, entries: &[Entry]) {
                self.0.extend(entries.iter().map(|entry| entry.logprobs.is_some()));
            }
            fn calls(&mut self, _: u32, _: &[CallPart]) {}
            fn finish(&mut self, _: u32, _: &Finish) {}
            fn model(&mut self, _: &Arc<Model>) {}
        }
        for asked in [false, true] {
            let rules = Ending {
                logprobs: asked,
                judged_tokens: 1,
                ..ending(&[], 64)
            };
            let (mut answer, mut shown) = (Answer::new(&toy(), 1, rules), Shown(Vec::new()));
            answer.push(&unsure(0, &bytes("ab"), 0.5), &mut shown).unwrap();
            assert_eq!(shown.0, [asked, asked]);
            // The response cache keeps what is needed to judge it again, or all that was asked for.
            let stored = &answer.stored(1).choices[0];
            assert_eq!(stored.logprobs.len(), if asked { 2 } else { 1 });
        }
    }

    fn with_tools(max_tokens: u32, only_one: bool) -> Ending {
        Ending {
            tools: Some(ToolRules {
                format: crate::tools::ToolFormat::Marked,
                names: vec!["f".to_owned()].into(),
                only_one,
                seed: 0,
            }),
            ..ending(&["STOP"], max_tokens)
        }
    }

    #[test]
    fn calls_are_told_from_text_and_end_the_answer_as_such() {
        let said = "So: <tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>";
        let mut ids = bytes(said);
        ids.push(EOS);
        let (seen, tokens) = answer(&[&ids], with_tools(500, false));
        assert_eq!((seen.text.as_str(), seen.calls.as_str()), ("So: ", "f:{\"a\": 1}"));
        assert_eq!(
            (seen.finish.unwrap().outcome, tokens as usize),
            (Outcome::ToolCalls, ids.len())
        );
        // Their ids all leave too.
        assert_eq!(seen.ids, bytes(said));
        // Cut by the limit it is not complete, and what may have been a call is text.
        let (seen, _) = answer(&[&ids], with_tools(60, false));
        assert_eq!(
            (seen.calls.as_str(), seen.finish.unwrap().outcome),
            ("f:{\"a\": 1}", Outcome::Length)
        );
        let (seen, _) = answer(&[&ids], with_tools(20, false));
        assert_eq!(
            (seen.text.as_str(), seen.finish.unwrap().outcome),
            (&said[..20], Outcome::Length)
        );
        // All choices together are what a request is booked as.
        let mut both = Answer::new(&toy(), 2, with_tools(500, false));
        for (choice, said) in [(0, ids.clone()), (1, vec![EOS])] {
            let delta = TokenDelta {
                choice,
                ..delta(0, &said)
            };
            both.push(&delta, &mut Seen::default()).unwrap();
        }
        assert_eq!(both.outcome(), Outcome::ToolCalls);
        // One call is enough.
        let (seen, tokens) = answer(&[&ids], with_tools(500, true));
        assert_eq!(
            (seen.finish.unwrap().outcome, tokens as usize),
            (Outcome::ToolCalls, said.find("</").unwrap())
        );
    }

    #[test]
    fn only_a_success_of_the_worker_ends_a_choice() {
        let mut answer = Answer::new(&toy(), 1, ending(&[], 64));
        let mut seen = Seen::default();
        for (outcome, ended) in [
            (Outcome::Failed, false),
            (Outcome::Cancelled, false),
            (Outcome::Stop, true),
        ] {
            let finish = token_delta::Finish {
                outcome: outcome as i32,
                ..Default::default()
            };
            let last = TokenDelta {
                finish: Some(Box::new(finish)),
                ..delta(0, &[])
            };
            assert_eq!(answer.push(&last, &mut seen).unwrap(), ended);
        }
    }

    proptest! {
        /// However the ids are cut into steps, and whatever attempts they come from, the answer is the same; and so is
        /// one that is given again from the cache.
        #[test]
        fn any_cut_gives_the_same_answer(
            ids in proptest::collection::vec(prop_oneof![97_u32..101, Just(195), Just(169), Just(240), Just(EOS)], 1..40),
            cuts in proptest::collection::vec((1_usize..6, any::<bool>()), 40),
            max_tokens in 1_u32..40,
            call in any::<bool>(),
        ) {
            let rules = || Ending {
                stop_strings: ["cab", "ab", "dé"].map(str::to_owned).into(),
                stop_set: Arc::new(StopSet::new(["cab", "ab", "dé"].as_slice(), false)),
                ..with_tools(max_tokens + if call { 30 } else { 0 }, false)
            };
            let mut ids = ids;
            if call {
                ids.splice(0..0, bytes("<tool_call>{\"name\":\"f\",\"arguments\":{\""));
            }
            let (whole, tokens) = answer(&[&ids], rules());
            let mut parts = Answer::new(&toy(), 1, rules());
            let (mut seen, mut index, mut rest) = (Seen::default(), 0, ids.as_slice());
            for (size, lost) in cuts {
                let (step, later) = rest.split_at(size.min(rest.len()));
                if parts.push(&delta(index, step), &mut seen).unwrap() {
                    break;
                }
                (rest, index) = (later, index + step.len());
                if lost {
                    // The worker is lost; the next attempt counts from what was committed.
                    parts.rebase();
                    index = 0;
                }
            }
            prop_assert_eq!(&seen, &whole);
            prop_assert_eq!(parts.completion_tokens(), tokens);
            if parts.is_done() {
                let mut again = Answer::new(&toy(), 1, rules());
                let mut replayed = Seen::default();
                for delta in Answer::replay(parts.stored(1)) {
                    again.push(&delta, &mut replayed).unwrap();
                }
                prop_assert_eq!(replayed, whole);
            }
        }
    }
}
