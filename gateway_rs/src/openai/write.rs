//! The bodies and server-sent events of OpenAI answers, written straight into a buffer.
//!
//! The events of one stream differ only in the choice's number and its text, so a [`ChunkWriter`] builds the rest once.
//! Nothing here decides what is sent when: that, and which text is safe to show, is the plane's. The order it keeps: for
//! each choice [`ChunkWriter::role`] (chat only), [`ChunkWriter::text`]s, [`ChunkWriter::finish`]; then
//! [`ChunkWriter::usage`] when asked for, and [`DONE`]. A stream that doesn't succeed has neither a finish nor [`DONE`]:
//! it ends with [`push_error_event`].

use crate::error::ApiError;
use crate::tools::CallPart;

/// The last event of a stream that succeeded.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// What a log-probability that isn't a finite number is written as: likelihood 0 has no JSON.
const LOGPROB_FLOOR: f32 = -9999.0;

/// Which answer is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerKind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}

/// How a choice ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// By the model or a stop string.
    Stop,
    /// By `max_tokens` or the context.
    Length,
    /// With calls of tools.
    ToolCalls,
}

impl FinishReason {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// What a request cost, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: u64,
    /// Of these, with KV from earlier.
    pub cached_tokens: u64,
    /// Of all choices.
    pub completion_tokens: u64,
}

/// The log-probabilities at one token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob<'a> {
    /// The token's own bytes, which may be a part of a character.
    pub bytes: &'a [u8],
    /// Absent for a prompt's first token, which nothing predicted.
    pub logprob: Option<f32>,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<Alternative<'a>>,
}

/// A token that could have been.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alternative<'a> {
    /// The token's own bytes.
    pub bytes: &'a [u8],
    /// Natural logarithm.
    pub logprob: f32,
}

/// Where the next token of a choice begins in its text, in characters: what the legacy interface calls `text_offset`.
/// One for each choice, kept over all its events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextOffset {
    chars: u64,
}

impl TextOffset {
    /// Takes a token; returns where it begins. One that begins within a character begins where that does.
    fn advance(&mut self, bytes: &[u8]) -> u64 {
        let within = bytes.first().is_some_and(|byte| is_continuation(*byte));
        let start = self.chars.saturating_sub(u64::from(within));
        self.chars += bytes.iter().filter(|byte| !is_continuation(**byte)).count() as u64;
        start
    }
}

fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

/// Writes one stream's events.
#[derive(Clone, Debug)]
pub struct ChunkWriter {
    kind: AnswerKind,
    include_usage: bool,
    /// From `data: ` to the opening of `choices`.
    head: Vec<u8>,
    /// From the end of `choices` on.
    tail: &'static [u8],
}

impl ChunkWriter {
    /// A writer for the answer with that id, made at that Unix time, by that model (as the client called it).
    #[must_use]
    pub fn new(kind: AnswerKind, id: &str, created_s: i64, model: &str, include_usage: bool) -> Self {
        let object = match kind {
            AnswerKind::Chat => "chat.completion.chunk",
            AnswerKind::Completion => "text_completion",
        };
        let mut head = b"data: ".to_vec();
        push_head(&mut head, id, object, created_s, model);
        let tail: &[u8] = if include_usage {
            b"],\"usage\":null}\n\n"
        } else {
            b"]}\n\n"
        };
        Self {
            kind,
            include_usage,
            head,
            tail,
        }
    }

    /// A chat's first event for a choice: who speaks. The legacy interface has none.
    pub fn role(&self, out: &mut Vec<u8>, choice: u32) {
        if self.kind == AnswerKind::Chat {
            self.open(out, choice);
            out.extend_from_slice(
                b",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}",
            );
            out.extend_from_slice(self.tail);
        }
    }

    /// New text of a choice.
    pub fn text(&self, out: &mut Vec<u8>, choice: u32, text: &str) {
        self.open_text(out, choice, text);
        out.extend_from_slice(b",\"logprobs\":null,\"finish_reason\":null}");
        out.extend_from_slice(self.tail);
    }

    /// New text of a choice, and its tokens' log-probabilities.
    pub fn text_with_logprobs(
        &self,
        out: &mut Vec<u8>,
        choice: u32,
        text: &str,
        tokens: &[TokenLogprob<'_>],
        offset: &mut TextOffset,
    ) {
        self.open_text(out, choice, text);
        out.extend_from_slice(b",\"logprobs\":");
        push_logprobs(out, self.kind, tokens, offset);
        out.extend_from_slice(b",\"finish_reason\":null}");
        out.extend_from_slice(self.tail);
    }

    /// Parts of a choice's calls of tools. The legacy interface has none.
    pub fn calls(&self, out: &mut Vec<u8>, choice: u32, parts: &[CallPart]) {
        if self.kind == AnswerKind::Chat {
            self.open(out, choice);
            out.extend_from_slice(b",\"delta\":{\"tool_calls\":[");
            push_list(out, parts, push_call_part);
            out.extend_from_slice(b"]},\"logprobs\":null,\"finish_reason\":null}");
            out.extend_from_slice(self.tail);
        }
    }

    /// A choice's last event.
    pub fn finish(&self, out: &mut Vec<u8>, choice: u32, reason: FinishReason) {
        self.open(out, choice);
        out.extend_from_slice(match self.kind {
            AnswerKind::Chat => b",\"delta\":{}".as_slice(),
            AnswerKind::Completion => b",\"text\":\"\"",
        });
        out.extend_from_slice(b",\"logprobs\":null,\"finish_reason\":\"");
        out.extend_from_slice(reason.name().as_bytes());
        out.extend_from_slice(b"\"}");
        out.extend_from_slice(self.tail);
    }

    /// The stream's usage, as the event before [`DONE`]. Nothing, when it wasn't asked for.
    pub fn usage(&self, out: &mut Vec<u8>, usage: &Usage) {
        if self.include_usage {
            out.extend_from_slice(&self.head);
            out.extend_from_slice(b"],\"usage\":");
            push_usage(out, usage);
            out.extend_from_slice(b"}\n\n");
        }
    }

    fn open(&self, out: &mut Vec<u8>, choice: u32) {
        out.extend_from_slice(&self.head);
        out.extend_from_slice(b"{\"index\":");
        push_number(out, u64::from(choice));
    }

    fn open_text(&self, out: &mut Vec<u8>, choice: u32, text: &str) {
        out.reserve(self.head.len() + text.len() + 128);
        self.open(out, choice);
        match self.kind {
            AnswerKind::Chat => {
                out.extend_from_slice(b",\"delta\":{\"content\":\"");
                push_string(out, text);
                out.extend_from_slice(b"\"}");
            }
            AnswerKind::Completion => {
                out.extend_from_slice(b",\"text\":\"");
                push_string(out, text);
                out.push(b'"');
            }
        }
    }
}

/// The last event of a stream that began and didn't succeed.
pub fn push_error_event(out: &mut Vec<u8>, error: &ApiError) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(error.to_openai_json().as_bytes());
    out.extend_from_slice(b"\n\n");
}

/// One choice of a whole answer.
#[derive(Clone, Debug)]
pub struct Choice<'a> {
    /// All of its text.
    pub text: &'a str,
    /// Its calls of tools, whole.
    pub calls: &'a [CallPart],
    /// When asked for.
    pub logprobs: Option<Vec<TokenLogprob<'a>>>,
    /// How it ended.
    pub finish_reason: FinishReason,
}

/// The body of a whole answer; choices in order of their index.
#[must_use]
pub fn answer_body(
    kind: AnswerKind,
    id: &str,
    created_s: i64,
    model: &str,
    choices: &[Choice<'_>],
    usage: &Usage,
) -> Vec<u8> {
    let object = match kind {
        AnswerKind::Chat => "chat.completion",
        AnswerKind::Completion => "text_completion",
    };
    let text_bytes: usize = choices.iter().map(|choice| choice.text.len() + 160).sum();
    let mut out = Vec::with_capacity(384 + text_bytes);
    push_head(&mut out, id, object, created_s, model);
    for (index, choice) in choices.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        push_choice(&mut out, kind, index, choice);
    }
    out.extend_from_slice(b"],\"usage\":");
    push_usage(&mut out, usage);
    out.push(b'}');
    out
}

fn push_choice(out: &mut Vec<u8>, kind: AnswerKind, index: usize, choice: &Choice<'_>) {
    out.extend_from_slice(b"{\"index\":");
    push_number(out, index as u64);
    match kind {
        AnswerKind::Chat => {
            out.extend_from_slice(b",\"message\":{\"role\":\"assistant\",\"content\":");
            if choice.text.is_empty() && !choice.calls.is_empty() {
                out.extend_from_slice(b"null");
            } else {
                out.push(b'"');
                push_string(out, choice.text);
                out.push(b'"');
            }
            out.extend_from_slice(b",\"refusal\":null");
            if !choice.calls.is_empty() {
                out.extend_from_slice(b",\"tool_calls\":[");
                push_list(out, choice.calls, push_call);
                out.push(b']');
            }
            out.push(b'}');
        }
        AnswerKind::Completion => {
            out.extend_from_slice(b",\"text\":\"");
            push_string(out, choice.text);
            out.push(b'"');
        }
    }
    out.extend_from_slice(b",\"logprobs\":");
    match &choice.logprobs {
        Some(tokens) => push_logprobs(out, kind, tokens, &mut TextOffset::default()),
        None => out.extend_from_slice(b"null"),
    }
    out.extend_from_slice(b",\"finish_reason\":\"");
    out.extend_from_slice(choice.finish_reason.name().as_bytes());
    out.extend_from_slice(b"\"}");
}

/// A part of a call, for a stream.
fn push_call_part(out: &mut Vec<u8>, part: &CallPart) {
    out.extend_from_slice(b"{\"index\":");
    push_number(out, part.index.into());
    out.push(b',');
    push_call_members(out, part);
}

/// A whole call.
fn push_call(out: &mut Vec<u8>, call: &CallPart) {
    out.push(b'{');
    push_call_members(out, call);
}

fn push_call_members(out: &mut Vec<u8>, part: &CallPart) {
    if let Some(begun) = &part.begun {
        out.extend_from_slice(b"\"id\":\"");
        push_string(out, &begun.id);
        out.extend_from_slice(b"\",\"type\":\"function\",");
    }
    out.extend_from_slice(b"\"function\":{");
    if let Some(begun) = &part.begun {
        out.extend_from_slice(b"\"name\":\"");
        push_string(out, &begun.name);
        out.extend_from_slice(b"\",");
    }
    out.extend_from_slice(b"\"arguments\":\"");
    push_string(out, &part.arguments);
    out.extend_from_slice(b"\"}}");
}

/// Up to the opening of `choices`.
fn push_head(out: &mut Vec<u8>, id: &str, object: &str, created_s: i64, model: &str) {
    out.extend_from_slice(b"{\"id\":\"");
    push_string(out, id);
    out.extend_from_slice(b"\",\"object\":\"");
    out.extend_from_slice(object.as_bytes());
    out.extend_from_slice(b"\",\"created\":");
    out.extend_from_slice(created_s.to_string().as_bytes());
    out.extend_from_slice(b",\"model\":\"");
    push_string(out, model);
    out.extend_from_slice(b"\",\"choices\":[");
}

fn push_usage(out: &mut Vec<u8>, usage: &Usage) {
    out.extend_from_slice(b"{\"prompt_tokens\":");
    push_number(out, usage.prompt_tokens);
    out.extend_from_slice(b",\"completion_tokens\":");
    push_number(out, usage.completion_tokens);
    out.extend_from_slice(b",\"total_tokens\":");
    push_number(out, usage.prompt_tokens + usage.completion_tokens);
    out.extend_from_slice(b",\"prompt_tokens_details\":{\"cached_tokens\":");
    push_number(out, usage.cached_tokens);
    out.extend_from_slice(b"}}");
}

fn push_logprobs(out: &mut Vec<u8>, kind: AnswerKind, tokens: &[TokenLogprob<'_>], offset: &mut TextOffset) {
    match kind {
        AnswerKind::Chat => push_chat_logprobs(out, tokens),
        AnswerKind::Completion => push_legacy_logprobs(out, tokens, offset),
    }
}

fn push_chat_logprobs(out: &mut Vec<u8>, tokens: &[TokenLogprob<'_>]) {
    out.extend_from_slice(b"{\"content\":[");
    push_list(out, tokens, |out, token| {
        push_chat_token(out, token.bytes, token.logprob.unwrap_or(0.0));
        out.extend_from_slice(b",\"top_logprobs\":[");
        push_list(out, &token.top, |out, top| {
            push_chat_token(out, top.bytes, top.logprob);
            out.push(b'}');
        });
        out.extend_from_slice(b"]}");
    });
    out.extend_from_slice(b"],\"refusal\":null}");
}

/// A token without its closing brace.
fn push_chat_token(out: &mut Vec<u8>, bytes: &[u8], logprob: f32) {
    out.extend_from_slice(b"{\"token\":\"");
    push_string(out, &String::from_utf8_lossy(bytes));
    out.extend_from_slice(b"\",\"logprob\":");
    push_logprob(out, logprob);
    out.extend_from_slice(b",\"bytes\":[");
    push_list(out, bytes, |out, byte| push_number(out, u64::from(*byte)));
    out.push(b']');
}

fn push_legacy_logprobs(out: &mut Vec<u8>, tokens: &[TokenLogprob<'_>], offset: &mut TextOffset) {
    out.extend_from_slice(b"{\"tokens\":[");
    push_list(out, tokens, |out, token| push_legacy_token(out, token.bytes));
    out.extend_from_slice(b"],\"token_logprobs\":[");
    push_list(out, tokens, |out, token| match token.logprob {
        Some(logprob) => push_logprob(out, logprob),
        None => out.extend_from_slice(b"null"),
    });
    out.extend_from_slice(b"],\"top_logprobs\":[");
    push_list(out, tokens, |out, token| {
        if token.logprob.is_none() {
            out.extend_from_slice(b"null");
            return;
        }
        out.push(b'{');
        push_list(out, &token.top, |out, top| {
            push_legacy_token(out, top.bytes);
            out.push(b':');
            push_logprob(out, top.logprob);
        });
        out.push(b'}');
    });
    out.extend_from_slice(b"],\"text_offset\":[");
    push_list(out, tokens, |out, token| push_number(out, offset.advance(token.bytes)));
    out.extend_from_slice(b"]}");
}

/// A token as the legacy interface spells it. Parts of characters are spelt by their bytes, as OpenAI does: they are keys
/// there, and two that look the same would be one.
fn push_legacy_token(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(b'"');
    match std::str::from_utf8(bytes) {
        Ok(text) => push_string(out, text),
        Err(_) => {
            out.extend_from_slice(b"bytes:");
            for byte in bytes {
                out.extend_from_slice(b"\\\\x");
                push_hex(out, *byte);
            }
        }
    }
    out.push(b'"');
}

fn push_list<T>(out: &mut Vec<u8>, items: &[T], mut push: impl FnMut(&mut Vec<u8>, &T)) {
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        push(out, item);
    }
}

fn push_logprob(out: &mut Vec<u8>, logprob: f32) {
    // NaN is not at least the floor, and neither it nor infinity may reach the client.
    let finite = if logprob.is_finite() && logprob > LOGPROB_FLOOR {
        logprob
    } else {
        LOGPROB_FLOOR
    };
    out.extend_from_slice(format!("{finite:?}").as_bytes());
}

fn push_number(out: &mut Vec<u8>, number: u64) {
    let mut digits = [0_u8; 20];
    let mut at = digits.len();
    let mut rest = number;
    loop {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

const HEX: &[u8; 16] = b"0123456789abcdef";

fn push_hex(out: &mut Vec<u8>, byte: u8) {
    out.push(HEX[usize::from(byte >> 4)]);
    out.push(HEX[usize::from(byte & 15)]);
}

/// Bytes of UTF-8 that must be looked at: what JSON escapes, and the first bytes of the characters that some clients take
/// for ends of lines (U+0085, U+2028, U+2029), though server-sent events don't.
static SPECIAL: [bool; 256] = special_bytes();

const fn special_bytes() -> [bool; 256] {
    let mut special = [false; 256];
    let mut byte = 0;
    while byte < 0x20 {
        special[byte] = true;
        byte += 1;
    }
    special[b'"' as usize] = true;
    special[b'\\' as usize] = true;
    special[0xC2] = true;
    special[0xE2] = true;
    special
}

/// Appends the inside of a JSON string.
pub fn push_string(out: &mut Vec<u8>, text: &str) {
    let bytes = text.as_bytes();
    let mut start = 0;
    let mut at = 0;
    while at < bytes.len() {
        if !SPECIAL[usize::from(bytes[at])] {
            at += 1;
            continue;
        }
        let (len, escape) = escape_at(&bytes[at..]);
        if let Some(escape) = escape {
            out.extend_from_slice(&bytes[start..at]);
            escape.push(out, bytes[at]);
            start = at + len;
        }
        at += len;
    }
    out.extend_from_slice(&bytes[start..]);
}

enum Escape {
    /// A backslash and this.
    Short(u8),
    /// `\u00xx` of the byte itself.
    Control,
    /// This.
    Line(&'static [u8]),
}

impl Escape {
    fn push(self, out: &mut Vec<u8>, byte: u8) {
        match self {
            Self::Short(letter) => out.extend_from_slice(&[b'\\', letter]),
            Self::Control => {
                out.extend_from_slice(b"\\u00");
                push_hex(out, byte);
            }
            Self::Line(escaped) => out.extend_from_slice(escaped),
        }
    }
}

/// How many bytes to step over, and how they are escaped, if they are.
fn escape_at(bytes: &[u8]) -> (usize, Option<Escape>) {
    match bytes {
        [byte @ (b'"' | b'\\'), ..] => (1, Some(Escape::Short(*byte))),
        [b'\n', ..] => (1, Some(Escape::Short(b'n'))),
        [b'\r', ..] => (1, Some(Escape::Short(b'r'))),
        [b'\t', ..] => (1, Some(Escape::Short(b't'))),
        [0xC2, 0x85, ..] => (2, Some(Escape::Line(b"\\u0085"))),
        [0xE2, 0x80, 0xA8, ..] => (3, Some(Escape::Line(b"\\u2028"))),
        [0xE2, 0x80, 0xA9, ..] => (3, Some(Escape::Line(b"\\u2029"))),
        [0xC2 | 0xE2, ..] => (1, None),
        _ => (1, Some(Escape::Control)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{json, Value};

    use super::*;
    use crate::error::ErrorCode;

    fn writer(kind: AnswerKind, include_usage: bool) -> ChunkWriter {
        ChunkWriter::new(kind, "id-1", 7, "to\"y", include_usage)
    }

    /// The events in a buffer, each a JSON object.
    fn events(out: &[u8]) -> Vec<Value> {
        let text = std::str::from_utf8(out).expect("UTF-8");
        assert!(text.is_empty() || text.ends_with("\n\n"));
        text.split_terminator("\n\n")
            .map(|event| serde_json::from_str(event.strip_prefix("data: ").expect("data")).expect(event))
            .collect()
    }

    fn token<'a>(bytes: &'a [u8], logprob: f32, top: &[(&'a [u8], f32)]) -> TokenLogprob<'a> {
        TokenLogprob {
            bytes,
            logprob: Some(logprob),
            top: top
                .iter()
                .map(|(bytes, logprob)| Alternative {
                    bytes,
                    logprob: *logprob,
                })
                .collect(),
        }
    }

    const USAGE: Usage = Usage {
        prompt_tokens: 7,
        cached_tokens: 0,
        completion_tokens: 3,
    };

    #[test]
    fn a_chat_stream_with_usage() {
        let writer = writer(AnswerKind::Chat, true);
        let mut out = Vec::new();
        writer.role(&mut out, 0);
        writer.text(&mut out, 0, "a\n");
        writer.finish(&mut out, 0, FinishReason::Stop);
        writer.usage(&mut out, &USAGE);
        let event = |choices: Value, usage: Value| {
            json!({"id": "id-1", "object": "chat.completion.chunk", "created": 7, "model": "to\"y", "choices": choices,
                "usage": usage})
        };
        let choice = |delta: Value, reason: Value| json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason}]);
        let usage = json!({"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0}});
        assert_eq!(
            events(&out),
            [
                event(
                    choice(json!({"role": "assistant", "content": ""}), Value::Null),
                    Value::Null
                ),
                event(choice(json!({"content": "a\n"}), Value::Null), Value::Null),
                event(choice(json!({}), json!("stop")), Value::Null),
                event(json!([]), usage),
            ]
        );
    }

    #[test]
    fn a_stream_without_usage_never_speaks_of_it() {
        for kind in [AnswerKind::Chat, AnswerKind::Completion] {
            let writer = writer(kind, false);
            let mut out = Vec::new();
            writer.role(&mut out, 3);
            writer.text(&mut out, 3, "a");
            writer.finish(&mut out, 3, FinishReason::Length);
            writer.usage(&mut out, &USAGE);
            for event in events(&out) {
                assert_eq!(event.get("usage"), None);
                assert_eq!(event["choices"][0]["index"], 3);
            }
        }
    }

    #[test]
    fn a_legacy_stream() {
        let writer = writer(AnswerKind::Completion, false);
        let mut out = Vec::new();
        writer.role(&mut out, 1);
        writer.text(&mut out, 1, "a");
        writer.finish(&mut out, 1, FinishReason::Length);
        let events = events(&out);
        assert_eq!(events.len(), 2);
        assert_eq!(events[0]["object"], "text_completion");
        assert_eq!(
            events[0]["choices"][0],
            json!({"index": 1, "text": "a", "logprobs": null, "finish_reason": null})
        );
        assert_eq!(
            events[1]["choices"][0],
            json!({"index": 1, "text": "", "logprobs": null, "finish_reason": "length"})
        );
    }

    #[test]
    fn chat_logprobs_stand_beside_their_tokens() {
        let mut out = Vec::new();
        let tokens = [
            token(&[240, 159], -0.5, &[(&[240, 159], -0.5), (b"a", -1.25)]),
            token(&[153, 130], f32::NEG_INFINITY, &[]),
            token(b"x", f32::NAN, &[(b"y", f32::INFINITY)]),
        ];
        writer(AnswerKind::Chat, false).text_with_logprobs(&mut out, 0, "🙂", &tokens, &mut TextOffset::default());
        let logprobs = &events(&out)[0]["choices"][0]["logprobs"];
        assert_eq!(
            logprobs["content"],
            json!([
                {"token": "\u{fffd}", "logprob": -0.5, "bytes": [240, 159], "top_logprobs": [
                    {"token": "\u{fffd}", "logprob": -0.5, "bytes": [240, 159]},
                    {"token": "a", "logprob": -1.25, "bytes": [97]}]},
                {"token": "\u{fffd}\u{fffd}", "logprob": -9999.0, "bytes": [153, 130], "top_logprobs": []},
                {"token": "x", "logprob": -9999.0, "bytes": [120], "top_logprobs": [
                    {"token": "y", "logprob": -9999.0, "bytes": [121]}]},
            ])
        );
    }

    #[test]
    fn legacy_offsets_run_on_over_the_events() {
        let writer = writer(AnswerKind::Completion, false);
        let (mut out, mut offset) = (Vec::new(), TextOffset::default());
        let first = TokenLogprob {
            bytes: b"a",
            logprob: None,
            top: Vec::new(),
        };
        writer.text_with_logprobs(
            &mut out,
            0,
            "ab",
            &[first, token(b"b", -1.0, &[(b"b", -1.0)])],
            &mut offset,
        );
        writer.text_with_logprobs(
            &mut out,
            0,
            "cd",
            &[token(b"c", -1.0, &[]), token(b"d", -2.0, &[])],
            &mut offset,
        );
        let events = events(&out);
        assert_eq!(
            events[0]["choices"][0]["logprobs"],
            json!({"tokens": ["a", "b"], "token_logprobs": [null, -1.0], "top_logprobs": [null, {"b": -1.0}],
                "text_offset": [0, 1]})
        );
        assert_eq!(events[1]["choices"][0]["logprobs"]["text_offset"], json!([2, 3]));
    }

    #[test]
    fn legacy_parts_of_characters_are_told_apart() {
        let (mut out, mut offset) = (Vec::new(), TextOffset::default());
        let tokens = [
            token("é".as_bytes(), -1.0, &[]),
            token(&[240, 159], -1.0, &[(&[240, 159], -1.0), (&[240, 158], -2.0)]),
            token(&[153, 130], -1.0, &[]),
            token(b"x", -1.0, &[]),
        ];
        writer(AnswerKind::Completion, false).text_with_logprobs(&mut out, 0, "é🙂x", &tokens, &mut offset);
        let logprobs = events(&out)[0]["choices"][0]["logprobs"].clone();
        assert_eq!(
            logprobs["tokens"],
            json!(["é", "bytes:\\xf0\\x9f", "bytes:\\x99\\x82", "x"])
        );
        assert_eq!(
            logprobs["top_logprobs"][1],
            json!({"bytes:\\xf0\\x9f": -1.0, "bytes:\\xf0\\x9e": -2.0})
        );
        assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 2]));
    }

    #[test]
    fn whole_answers() {
        let choices = [
            Choice {
                text: "a\"",
                calls: &[],
                logprobs: None,
                finish_reason: FinishReason::Stop,
            },
            Choice {
                text: "b",
                calls: &[],
                logprobs: Some(vec![token(b"b", -0.0, &[])]),
                finish_reason: FinishReason::Length,
            },
        ];
        let body = answer_body(AnswerKind::Chat, "id", 1, "toy", &choices, &USAGE);
        let body: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(body["object"], "chat.completion");
        assert_eq!(
            body["choices"][0],
            json!({"index": 0, "message": {"role": "assistant", "content": "a\"", "refusal": null}, "logprobs": null,
                "finish_reason": "stop"})
        );
        assert_eq!(body["choices"][1]["logprobs"]["content"][0]["token"], "b");
        assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
        assert_eq!(body["usage"]["total_tokens"], 10);
        let body = answer_body(AnswerKind::Completion, "id", 1, "toy", &choices, &USAGE);
        let body: Value = serde_json::from_slice(&body).expect("JSON");
        assert_eq!(
            body["choices"][0],
            json!({"index": 0, "text": "a\"", "logprobs": null, "finish_reason": "stop"})
        );
        assert_eq!(body["choices"][1]["logprobs"]["text_offset"], json!([0]));
    }

    #[test]
    fn calls_of_tools() {
        let first = CallPart {
            index: 1,
            begun: Some(crate::tools::Begun {
                id: "call_1".into(),
                name: "f\"".into(),
            }),
            arguments: "{\"a\"".into(),
        };
        let more = CallPart {
            arguments: ":1}".into(),
            ..CallPart::default()
        };
        let mut out = Vec::new();
        writer(AnswerKind::Chat, false).calls(&mut out, 2, &[first.clone(), more]);
        let choice = &events(&out)[0]["choices"][0];
        assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(2), &Value::Null));
        assert_eq!(
            choice["delta"],
            json!({"tool_calls": [
                {"index": 1, "id": "call_1", "type": "function", "function": {"name": "f\"", "arguments": "{\"a\""}},
                {"index": 0, "function": {"arguments": ":1}"}},
            ]})
        );
        for (text, content) in [("", Value::Null), ("so", json!("so"))] {
            let whole = Choice {
                text,
                calls: std::slice::from_ref(&first),
                logprobs: None,
                finish_reason: FinishReason::ToolCalls,
            };
            let body = answer_body(AnswerKind::Chat, "id", 1, "toy", &[whole], &USAGE);
            let body: Value = serde_json::from_slice(&body).expect("JSON");
            assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");
            assert_eq!(
                body["choices"][0]["message"],
                json!({"role": "assistant", "content": content, "refusal": null, "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "f\"", "arguments": "{\"a\""}}]})
            );
        }
    }

    #[test]
    fn an_error_event() {
        let mut out = Vec::new();
        push_error_event(&mut out, &ApiError::new(ErrorCode::WorkerLost, "line\nbreak"));
        let event = &events(&out)[0];
        assert_eq!(event["error"]["code"], "worker_lost");
        assert_eq!(event["error"]["message"], "line\nbreak");
    }

    proptest! {
        #[test]
        fn strings_come_back_and_break_no_line(text in "(\\PC|[\\x00-\\x1f\"\\\\\u{7f}\u{85}\u{2028}\u{2029}â\u{a0}]){0,24}") {
            let mut out = vec![b'"'];
            push_string(&mut out, &text);
            out.push(b'"');
            let written = std::str::from_utf8(&out).expect("UTF-8");
            prop_assert_eq!(serde_json::from_str::<String>(written).expect("JSON"), text);
            let breaks = |c: char| c.is_ascii_control() && c != '\u{7f}' || matches!(c, '\u{85}' | '\u{2028}' | '\u{2029}');
            prop_assert!(!written.contains(breaks));
        }

        #[test]
        fn numbers_are_decimal(number in any::<u64>()) {
            let mut out = Vec::new();
            push_number(&mut out, number);
            prop_assert_eq!(out, number.to_string().into_bytes());
        }

        #[test]
        fn logprobs_are_always_json(logprob in any::<f32>()) {
            let mut out = Vec::new();
            push_logprob(&mut out, logprob);
            let read: f64 = serde_json::from_slice(&out).expect("JSON");
            prop_assert!(read >= f64::from(LOGPROB_FLOOR));
        }
    }
}
