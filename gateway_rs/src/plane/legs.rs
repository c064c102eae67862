//! The runs of one attempt: one worker's, or two of which one computes the prompt and the other answers.
//!
//! With two, both are asked at once. The prompt's worker says the first id, which goes to the client as any id does; the
//! other is told then how its answer begins, and has fetched the KV meanwhile. Whatever becomes of the prompt's worker costs no
//! attempt: the other computes what it lacks. So an attempt has the fate of the worker that answers, and ids have one order,
//! in which each is taken once.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use prometheus_client::metrics::counter::Counter;

use super::{
    links::worker::{Books, Run, RunEnd},
    trace::Span,
};
use crate::proto::{Outcome, TokenDelta};

/// See the module's text. Dropping it cancels what still runs and gives the leases back.
pub struct Legs {
    answer: Run,
    /// Boxed: most attempts have none.
    prefill: Option<Box<Prefill>>,
}

/// A prompt on its way at another worker.
pub struct Prefill {
    run: Run,
    span: Span,
    /// Counts those that came to nothing.
    lost: Counter,
    ids: Vec<u32>,
    kv_reference: String,
    cached_prompt_tokens: u32,
}

impl Prefill {
    /// `lost` counts it when nothing comes of it.
    pub fn new(run: Run, span: Span, lost: Counter) -> Self {
        Self {
            run,
            span,
            lost,
            ids: Vec::new(),
            kv_reference: String::new(),
            cached_prompt_tokens: 0,
        }
    }

    /// Takes in what came; what the client may see goes on to `deltas`. True when its part is over.
    fn take(&mut self, came: Vec<TokenDelta>, end: Option<&RunEnd>, deltas: &mut Vec<TokenDelta>) -> bool {
        let mut over = end.is_some();
        for mut delta in came {
            self.ids.extend(&delta.ids);
            self.cached_prompt_tokens = delta.cached_prompt_tokens.unwrap_or(self.cached_prompt_tokens);
            if !delta.kv_reference.is_empty() {
                self.kv_reference = std::mem::take(&mut delta.kv_reference);
            }
            if let Some(finish) = delta.finish.take() {
                over = true;
                match finish.outcome() {
                    // The model was done with one id; otherwise only this worker is.
                    Outcome::Stop => delta.finish = Some(finish),
                    Outcome::Length => {}
                    outcome => self.span.fail(outcome.as_str_name().to_owned()),
                }
            }
            if !delta.ids.is_empty() {
                deltas.push(delta);
            }
        }
        if let (Some(RunEnd::Lost(reason)), true) = (end, self.ids.is_empty()) {
            self.span.fail(reason.clone());
        }
        over
    }
}

impl Legs {
    /// `prefill`: where the prompt is computed, when the answer's worker was told to fetch it from there.
    pub fn new(answer: Run, prefill: Option<Prefill>) -> Self {
        Self {
            answer,
            prefill: prefill.map(Box::new),
        }
    }

    /// Moves what came into `deltas`. Ready(None) = more may come; Ready(Some) = no more after these.
    pub fn poll(&mut self, context: &mut Context<'_>, deltas: &mut Vec<TokenDelta>) -> Poll<Option<RunEnd>> {
        if let Some(prefill) = &mut self.prefill {
            let mut came = Vec::new();
            if let Poll::Ready(end) = prefill.run.poll(context, &mut came) {
                if prefill.take(came, end.as_ref(), deltas) {
                    self.proceed();
                } else {
                    // The rest of it is still to come.
                    context.waker().wake_by_ref();
                }
            }
        }
        match self.answer.poll(context, deltas) {
            Poll::Pending if !deltas.is_empty() => Poll::Ready(None),
            polled => polled,
        }
    }

    /// The prompt's worker has done its part, or will not: the other one goes on from there.
    fn proceed(&mut self) {
        if let Some(prefill) = self.prefill.take() {
            if prefill.ids.is_empty() {
                prefill.lost.inc();
            }
            prefill.run.stop(Outcome::Stop, u32::MAX);
            self.answer
                .proceed(prefill.ids, prefill.kv_reference, prefill.cached_prompt_tokens);
        }
    }

    /// The worker that was silent for too long was that of the prompt: does without it.
    pub fn go_on_alone(&mut self) -> bool {
        let had = self.prefill.is_some();
        self.proceed();
        had
    }

    /// How long the worker whose turn it is has shown no progress.
    pub fn silence(&self) -> Duration {
        self.prefill
            .as_ref()
            .map_or(&self.answer, |prefill| &prefill.run)
            .silence()
    }

    /// Stops one choice of several; the others go on.
    pub fn stop_choice(&self, choice: u32, reason: Outcome) {
        self.answer.stop_choice(choice, reason);
    }

    /// Stops whatever still runs, says why, and how many of the ids that came were taken.
    pub fn stop(&self, reason: Outcome, taken_tokens: u32) {
        if let Some(prefill) = &self.prefill {
            prefill.run.stop(reason, taken_tokens);
        }
        self.answer.stop(reason, taken_tokens);
    }

    /// What it has cost so far, where it is answered: the first id counts there, whoever drew it.
    pub fn books(&self) -> Books {
        self.answer.books()
    }

    /// The worker instance that answers.
    pub fn instance_id(&self) -> &str {
        self.answer.instance_id()
    }
}
