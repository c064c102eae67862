//! How answers leave by HTTP: server-sent events as they come, or one body at the end.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::Frame;

use super::{
    answer::{Entry, Finish, Sink},
    generation::{Generation, Step},
    model::Model,
    open::Books,
};
use crate::{
    openai::write::{
        answer_body, push_error_event, Alternative, AnswerKind, Choice, ChunkWriter, FinishReason, TextOffset,
        TokenLogprob, Usage, DONE,
    },
    proto::Outcome,
    tools::CallPart,
};

/// A sink that writes events into a buffer.
pub struct Events {
    writer: ChunkWriter,
    model: Arc<Model>,
    choices: Vec<Opened>,
    out: Vec<u8>,
}

#[derive(Clone, Default)]
struct Opened {
    began: bool,
    offset: TextOffset,
}

impl Events {
    /// Events of an answer of so many choices, under the name that was asked for.
    pub fn new(kind: AnswerKind, name: &str, model: Arc<Model>, choices: usize, include_usage: bool) -> Self {
        Self {
            writer: ChunkWriter::new(kind, &answer_id(kind), super::unix_s() as i64, name, include_usage),
            model,
            choices: vec![Opened::default(); choices],
            out: Vec::new(),
        }
    }

    /// Nothing waits to be sent.
    pub fn is_empty(&self) -> bool {
        self.out.is_empty()
    }

    fn begin(&mut self, choice: u32) {
        if let Some(opened) = self.choices.get_mut(choice as usize) {
            if !std::mem::replace(&mut opened.began, true) {
                self.writer.role(&mut self.out, choice);
            }
        }
    }

    fn write(&mut self, choice: u32, text: &str, entries: &[Entry]) {
        self.begin(choice);
        let tokens = logprobs(&self.model, entries);
        match self.choices.get_mut(choice as usize) {
            Some(opened) if !tokens.is_empty() => {
                self.writer
                    .text_with_logprobs(&mut self.out, choice, text, &tokens, &mut opened.offset);
            }
            _ => self.writer.text(&mut self.out, choice, text),
        }
    }

    fn end(&mut self, books: &Books) {
        self.writer.usage(&mut self.out, &usage(books));
        self.out.extend_from_slice(DONE);
    }
}

impl Sink for Events {
    fn prompt(&mut self, choice: u32, entries: &[Entry]) {
        let text = text_of(&self.model, entries);
        self.write(choice, &text, entries);
    }

    fn delta(&mut self, choice: u32, text: &str, entries: &[Entry]) {
        self.write(choice, text, entries);
    }

    fn calls(&mut self, choice: u32, parts: &[CallPart]) {
        self.begin(choice);
        self.writer.calls(&mut self.out, choice, parts);
    }

    fn finish(&mut self, choice: u32, finish: &Finish) {
        self.begin(choice);
        self.writer.finish(&mut self.out, choice, reason(finish));
    }

    fn model(&mut self, model: &Arc<Model>) {
        self.model = model.clone();
    }
}

/// A generation as the body of a response. Polled only while the client reads; dropped when it leaves.
pub struct SseBody {
    generation: Option<Generation>,
    events: Events,
}

impl SseBody {
    /// The rest of an answer whose first step was taken.
    pub fn new(generation: Generation, events: Events, first: Step) -> Self {
        let mut body = Self {
            generation: Some(generation),
            events,
        };
        body.take(first);
        body
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::More => {}
            Step::Done => {
                if let Some(generation) = self.generation.take() {
                    self.events.end(generation.books());
                }
            }
            Step::Failed(error) => {
                self.generation = None;
                push_error_event(&mut self.events.out, &error);
            }
        }
    }
}

impl http_body::Body for SseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        loop {
            if !this.events.is_empty() {
                let bytes = std::mem::take(&mut this.events.out);
                return Poll::Ready(Some(Ok(Frame::data(bytes.into()))));
            }
            let Some(generation) = &mut this.generation else {
                return Poll::Ready(None);
            };
            match generation.poll(context, &mut this.events) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(step) => this.take(step),
            }
        }
    }
}

/// A sink that keeps everything for one body.
pub struct Collected {
    model: Arc<Model>,
    choices: Vec<Whole>,
}

#[derive(Clone, Default)]
struct Whole {
    text: String,
    calls: Vec<CallPart>,
    entries: Vec<Entry>,
    finish: Option<FinishReason>,
    /// The prompt's ids come first in `entries` and their text is to be made of them.
    prompt: Vec<Entry>,
}

impl Collected {
    /// Of so many choices, in that model's ids.
    pub fn new(model: Arc<Model>, choices: usize) -> Self {
        Self {
            model,
            choices: vec![Whole::default(); choices],
        }
    }

    /// The body of the whole answer, under the name that was asked for.
    pub fn body(&self, kind: AnswerKind, name: &str, books: &Books) -> Vec<u8> {
        let model = &*self.model;
        let texts: Vec<String> = self
            .choices
            .iter()
            .map(|whole| text_of(model, &whole.prompt) + &whole.text)
            .collect();
        let choices: Vec<_> = self
            .choices
            .iter()
            .zip(&texts)
            .map(|(whole, text)| {
                let mut tokens = logprobs(model, &whole.prompt);
                tokens.extend(logprobs(model, &whole.entries));
                Choice {
                    text,
                    calls: &whole.calls,
                    logprobs: (!tokens.is_empty()).then_some(tokens),
                    finish_reason: whole.finish.unwrap_or(FinishReason::Stop),
                }
            })
            .collect();
        answer_body(
            kind,
            &answer_id(kind),
            super::unix_s() as i64,
            name,
            &choices,
            &usage(books),
        )
    }
}

impl Sink for Collected {
    fn prompt(&mut self, choice: u32, entries: &[Entry]) {
        if let Some(whole) = self.choices.get_mut(choice as usize) {
            whole.prompt.extend_from_slice(entries);
        }
    }

    fn delta(&mut self, choice: u32, text: &str, entries: &[Entry]) {
        if let Some(whole) = self.choices.get_mut(choice as usize) {
            whole.text.push_str(text);
            whole.entries.extend_from_slice(entries);
        }
    }

    fn calls(&mut self, choice: u32, parts: &[CallPart]) {
        let Some(whole) = self.choices.get_mut(choice as usize) else {
            return;
        };
        for part in parts {
            match whole.calls.get_mut(part.index as usize) {
                Some(call) => call.arguments.push_str(&part.arguments),
                None => whole.calls.push(part.clone()),
            }
        }
    }

    fn finish(&mut self, choice: u32, finish: &Finish) {
        if let Some(whole) = self.choices.get_mut(choice as usize) {
            whole.finish = Some(reason(finish));
        }
    }

    fn model(&mut self, model: &Arc<Model>) {
        self.model = model.clone();
    }
}

fn answer_id(kind: AnswerKind) -> String {
    let prefix = match kind {
        AnswerKind::Chat => "chatcmpl",
        AnswerKind::Completion => "cmpl",
    };
    format!("{prefix}-{:032x}", rand::random::<u128>())
}

fn reason(finish: &Finish) -> FinishReason {
    match finish.outcome {
        Outcome::Length => FinishReason::Length,
        Outcome::ToolCalls => FinishReason::ToolCalls,
        _ => FinishReason::Stop,
    }
}

fn usage(books: &Books) -> Usage {
    Usage {
        prompt_tokens: books.prompt_tokens.into(),
        cached_tokens: books.cached_prompt_tokens.into(),
        completion_tokens: books.completion_tokens.into(),
    }
}

fn text_of(model: &Model, entries: &[Entry]) -> String {
    let ids: Vec<u32> = entries.iter().map(|entry| entry.id).collect();
    model.tokenizer.decode(&ids, true)
}

/// Log-probabilities as the writers want them; nothing when none were asked for.
fn logprobs<'a>(model: &'a Model, entries: &[Entry]) -> Vec<TokenLogprob<'a>> {
    let bytes = |id: u32| model.tokenizer.token_bytes(id).unwrap_or_default();
    // A prompt's first id has none of its own but stands in the list all the same.
    if entries.iter().all(|entry| entry.logprobs.is_none()) {
        return Vec::new();
    }
    let one = |entry: &Entry| TokenLogprob {
        bytes: bytes(entry.id),
        logprob: entry
            .logprobs
            .as_ref()
            .and_then(|logprobs| logprobs.drawn.as_ref())
            .map(|drawn| drawn.logprob),
        top: entry
            .logprobs
            .iter()
            .flat_map(|logprobs| &logprobs.top)
            .map(|top| Alternative {
                bytes: bytes(top.id),
                logprob: top.logprob,
            })
            .collect(),
    };
    entries.iter().map(one).collect()
}
