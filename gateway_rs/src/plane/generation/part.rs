//! One prompt of a request, with its choices, over all its attempts.
//!
//! A worker that is lost before anything was shown costs a new attempt elsewhere; one that is lost in mid-answer is followed
//! by another that goes on from the committed ids, where that is exact. Its entry in the books is settled once.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{ready, Context, Poll},
    time::{Duration, Instant},
};

use headrace_core::routing::rollout::Ended;

use super::{
    attempt::{over_budget, Attempt, Opened, Origin, Past, Wanted},
    fell::{Fell, Left},
    prepared::{PromptIds, Shared},
    trial::Verdict,
};
use crate::{
    error::{ApiError, ErrorCode},
    plane::{
        answer::{prompt_entries, Answer, Ending, Entry, Finish, Sink},
        booking::Booking,
        legs::Legs,
        links::{
            cache::{Found, Lead},
            worker::RunEnd,
        },
        model::Model,
        open::{Books, OpenRequest},
        routes::{Alias, Variant},
        trace::Span,
        Plane,
    },
    proto::{self, Outcome, TokenDelta},
    request::{Door, Prompt},
    stops::StopSet,
    tools::CallPart,
};

/// So long a stored answer is waited for when no variant can answer.
const RECALL: Duration = Duration::from_millis(500);

/// See the module's text.
pub struct Part {
    wanted: Wanted,
    /// Index of its first choice.
    first_choice: u32,
    answer: Answer,
    state: State,
    deltas: Vec<TokenDelta>,
    lead: Option<Lead>,
    /// Whose worker has it, or had it.
    pool: String,
    run_span: Option<Span>,
    epoch: u32,
    attempts: u32,
    resumes: u32,
    avoid: Vec<String>,
    echoed: bool,
    cached_prompt_tokens: u32,
    wasted_tokens: u32,
    cached_answer: bool,
    /// The text is the configuration's.
    degraded: bool,
    first: Option<Instant>,
    /// None: it asks nobody for anything.
    booking: Option<Booking>,
}

enum State {
    Opening(Pin<Box<dyn Future<Output = Result<Opened, ApiError>> + Send>>),
    Running(Legs),
    Over,
}

impl Part {
    /// Asks for its first attempt. Errors: an answer that cannot fit.
    pub fn new(
        plane: &Arc<Plane>,
        shared: &Arc<Shared>,
        index: usize,
        prompt: PromptIds,
        open: &OpenRequest,
        fell: &Fell,
    ) -> Result<Self, ApiError> {
        let request = &shared.request;
        let max_tokens = request.resolve_max_tokens(prompt.ids.len(), shared.context_tokens)?;
        if max_tokens == 0 && request.logprobs.is_some() {
            return Err(ApiError::unsupported(
                "max_tokens",
                "log-probabilities of a prompt need max_tokens of at least 1",
            ));
        }
        let ending = Ending {
            eos_ids: if request.stopping.ignore_eos {
                Vec::new()
            } else {
                shared.eos_ids.clone()
            },
            stop_ids: request.stopping.stop_ids.clone(),
            stop_strings: request.stopping.stop.clone(),
            stop_set: Arc::new(StopSet::new(&request.stopping.stop, request.stopping.include_stop)),
            max_tokens,
            min_tokens: request.stopping.min_tokens,
            held: shared.trial.is_some(),
            entries: request.logprobs.is_some() || request.door == Door::Native,
            logprobs: request.logprobs.is_some(),
            judged_tokens: shared.trial.as_ref().map_or(0, |trial| trial.judged_tokens),
            skip_special: true,
            shown_ids: shared.model.tool_mark_ids.clone(),
            tools: request.tool_rules(shared.model.tool_format, rand::random),
        };
        let booking = (max_tokens > 0).then(|| Booking::open(&plane.scheduler, shared.settlement()));
        let mut part = Self {
            answer: Answer::new(&shared.model.tokenizer, request.sampling.n, ending),
            first_choice: index as u32 * request.sampling.n,
            wanted: Wanted {
                plane: plane.clone(),
                shared: shared.clone(),
                prompt_ids: prompt.ids,
                block_hashes: prompt.block_hashes,
                seeds: request.seeds(rand::random),
                max_tokens,
                booking: booking.as_ref().map_or(0, Booking::id),
            },
            state: State::Over,
            deltas: Vec::new(),
            lead: None,
            pool: String::new(),
            run_span: None,
            epoch: fell.epoch,
            attempts: 0,
            resumes: 0,
            avoid: fell.avoid.clone(),
            echoed: !request.echo,
            cached_prompt_tokens: 0,
            wasted_tokens: 0,
            cached_answer: false,
            degraded: false,
            first: None,
            booking,
        };
        part.start(open);
        Ok(part)
    }

    /// Drives it to the next thing that leaves, or its end.
    pub fn poll(
        &mut self,
        context: &mut Context<'_>,
        sink: &mut impl Sink,
        open: &OpenRequest,
    ) -> Poll<Result<(), ApiError>> {
        let sink = &mut Offset {
            sink,
            first_choice: self.first_choice,
        };
        loop {
            match &mut self.state {
                State::Over => return Poll::Ready(Ok(())),
                State::Opening(opening) => match ready!(opening.as_mut().poll(context)) {
                    Err(error) => {
                        self.state = State::Over;
                        return Poll::Ready(Err(self.refused(error)));
                    }
                    Ok(Opened::Replay(answer, origin)) => {
                        self.replay(answer, origin, sink)?;
                        return Poll::Ready(Ok(()));
                    }
                    Ok(Opened::Run {
                        run,
                        span,
                        lead,
                        pool,
                        queue_s,
                        allowance,
                    }) => {
                        if let Some(booking) = &mut self.booking {
                            booking.runs(&pool, queue_s, allowance);
                        }
                        self.wanted.plane.metrics.attempts.inc();
                        self.run_span = Some(span);
                        self.pool = pool;
                        // A later attempt has no lookup of its own; the lead stays with the request.
                        self.lead = self.lead.take().or(lead);
                        self.state = State::Running(run);
                    }
                },
                State::Running(run) => {
                    let end = ready!(run.poll(context, &mut self.deltas));
                    self.echo(sink);
                    if let Some(failure) = self.take(sink)? {
                        self.failed(failure, open)?;
                        continue;
                    }
                    if self.answer.is_done() {
                        self.finish();
                        return Poll::Ready(Ok(()));
                    }
                    match end {
                        None => return Poll::Ready(Ok(())),
                        Some(RunEnd::Lost(reason)) => self.lost(&reason, open)?,
                        Some(RunEnd::Unread) => {
                            let limit = self.wanted.plane.config.max_unread_tokens;
                            let message = format!("the client left more than {limit} tokens unread");
                            return Poll::Ready(Err(ApiError::new(ErrorCode::Cancelled, message)));
                        }
                        Some(RunEnd::Finished) => {
                            return Poll::Ready(Err(ApiError::internal("the worker ended without an end")))
                        }
                    }
                }
            }
        }
    }

    /// Nothing more comes.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Something has left: no other variant may take over.
    pub fn is_shown(&self) -> bool {
        self.answer.is_shown() || (self.wanted.shared.request.echo && self.echoed)
    }

    /// How it ended: see [`Answer::outcome`].
    pub fn outcome(&self) -> Outcome {
        self.answer.outcome()
    }

    /// The only choice's text.
    pub fn text(&self) -> Option<String> {
        let ids = self.answer.committed()?;
        Some(self.wanted.shared.model.tokenizer.decode(ids, true))
    }

    /// Whose words it is answered in: that variant's pool; empty for a text that no model made, or before there is any.
    pub fn variant(&self) -> &str {
        if self.degraded {
            ""
        } else {
            &self.pool
        }
    }

    /// Whether what there is of an answer on trial stands; one that is on none does.
    pub fn verdict(&self) -> Verdict {
        let trial = self.wanted.shared.trial.as_ref().filter(|_| self.answer.is_held());
        trial.map_or(Verdict::Stands, |trial| {
            let confidence = || self.answer.confidence();
            trial.judge(self.variant(), self.is_over(), confidence, || self.text())
        })
    }

    /// What was held leaves, and what comes from now on does at once.
    pub fn release(&mut self, sink: &mut impl Sink) {
        self.answer.release(&mut Offset {
            sink,
            first_choice: self.first_choice,
        });
        self.settle_whole();
    }

    /// The number of the variant that answers, when it is one of less quality than the best.
    pub fn smaller_variant(&self, alias: &Alias) -> Option<usize> {
        let number = alias.number(self.variant())?;
        alias.is_smaller(self.variant()).then_some(number)
    }

    /// The answer came from the response cache.
    pub fn is_cached(&self) -> bool {
        self.cached_answer
    }

    /// When its first id came.
    pub fn first(&self) -> Option<Instant> {
        self.first
    }

    /// Adds what it has cost so far.
    pub fn count(&self, books: &mut Books) {
        books.completion_tokens += self.answer.completion_tokens();
        books.cached_prompt_tokens += self.cached_prompt_tokens;
        books.wasted_tokens += self.wasted_tokens;
        books.cached_answer &= self.cached_answer;
        books.first = [books.first, self.first].into_iter().flatten().min();
    }

    /// How long its worker has shown no progress; one that is silent for `stall` is given up. None: it goes on in another
    /// way, for which it must be polled.
    pub fn silence(&mut self, stall: Duration, open: &OpenRequest) -> Result<Option<Duration>, ApiError> {
        let State::Running(run) = &mut self.state else {
            return Ok(Some(Duration::ZERO));
        };
        let silence = run.silence();
        if silence < stall {
            return Ok(Some(silence));
        }
        if !run.go_on_alone() {
            let reason = format!("the worker has been silent for {:.1} s", silence.as_secs_f64());
            self.lost(&reason, open)?;
        }
        Ok(None)
    }

    /// The request failed: what this part still runs is of no use.
    pub fn stop(&mut self, error: &ApiError) {
        let outcome = match error.code {
            ErrorCode::DeadlineExceeded => Outcome::Deadline,
            ErrorCode::Cancelled => Outcome::Cancelled,
            ErrorCode::WorkerLost => Outcome::WorkerLost,
            ErrorCode::RateLimitExceeded | ErrorCode::InsufficientQuota => Outcome::Budget,
            _ => Outcome::Failed,
        };
        self.stop_run(outcome);
        self.settle(outcome);
        self.lead = None;
    }

    /// Another variant is to answer, however good this one is: stops, and what came is paid for.
    pub fn reject(&mut self) -> Left {
        let outcome = match self.answer.is_done() {
            true => self.answer.outcome(),
            false => Outcome::Cancelled,
        };
        self.stop_run(outcome);
        if let Some(booking) = &mut self.booking {
            booking.saves_nothing();
        }
        self.settle(outcome);
        self.lead = None;
        self.leave()
    }

    /// Another variant is to answer what this one could not: stops.
    pub fn give_way(&mut self, error: &ApiError) -> Left {
        self.stop(error);
        self.leave()
    }

    /// Forgets all that came, and tells what is to be known of it.
    fn leave(&mut self) -> Left {
        let left = Left {
            pool: self.pool.clone(),
            avoid: std::mem::take(&mut self.avoid),
            epoch: self.epoch,
            wasted_tokens: std::mem::take(&mut self.wasted_tokens) + self.answer.completion_tokens(),
        };
        self.answer.reset(&self.wanted.shared.model.tokenizer);
        left
    }

    /// Looks for an answer that a variant gave before; without one, the error stands.
    pub fn recall(&mut self, error: &ApiError, alias: &Alias) {
        let mut keys = Vec::new();
        if self.wanted.is_cacheable() {
            let own = &self.wanted.shared.model;
            let alike = |variant: &&Variant| variant.model.name != own.name && variant.model.reads_like(own);
            let others = alias.variants.iter().filter(alike);
            keys.extend(others.map(|variant| (variant.model.name.clone(), self.wanted.key(&variant.model))));
        }
        let (cache, error) = (self.wanted.plane.cache.clone(), error.clone());
        self.state = State::Opening(Box::pin(async move {
            let Some(cache) = cache else { return Err(error) };
            for (name, key) in keys {
                let asked = cache.ask(key.to_vec().into(), String::new());
                // Whoever is generating it may be waiting as we were.
                if let Ok(Found::Hit(answer)) = tokio::time::timeout(RECALL, asked).await {
                    return Ok(Opened::Replay(answer, Origin::Cache(name)));
                }
            }
            Err(error)
        }));
    }

    /// Answers with a text that no model made.
    pub fn degrade(&mut self, text: &str) {
        self.degraded = true;
        let ids = self.wanted.shared.model.tokenizer.encode(text);
        let choice = proto::answer::Choice {
            ids,
            outcome: Outcome::Stop as i32,
            ..Default::default()
        };
        let answer = proto::Answer {
            prompt_tokens: self.wanted.prompt_ids.len() as u32,
            choices: vec![choice; self.choices() as usize],
        };
        self.state = State::Opening(Box::pin(async move { Ok(Opened::Replay(answer, Origin::Configured)) }));
    }

    // --- its attempts -----------------------------------------------------------------------------------------------

    /// Asks for the next attempt: the first one looks the answer up, every one asks for a worker.
    fn start(&mut self, open: &OpenRequest) {
        self.epoch += 1;
        self.attempts += 1;
        self.run_span = None;
        if self.wanted.max_tokens == 0 {
            // Only the echo is wanted: nobody has to run anything.
            let echo = proto::Answer {
                prompt_tokens: self.wanted.prompt_ids.len() as u32,
                choices: Vec::new(),
            };
            self.state = State::Opening(Box::pin(async move { Ok(Opened::Replay(echo, Origin::Nothing)) }));
            return;
        }
        let past = Past {
            epoch: self.epoch,
            committed: self.committed(),
            pool: &self.pool,
            avoid: &self.avoid,
        };
        let attempt = Attempt::new(&self.wanted, &past, self.attempts == 1, open.span.parent());
        self.state = State::Opening(Box::pin(attempt.open()));
    }

    fn choices(&self) -> u32 {
        self.wanted.shared.request.sampling.n
    }

    fn committed(&self) -> &[u32] {
        self.answer.committed().unwrap_or_default()
    }

    /// Hands what came to the answer. A failure that the worker reports is given back.
    fn take(&mut self, sink: &mut impl Sink) -> Result<Option<ApiError>, ApiError> {
        let mut deltas = std::mem::take(&mut self.deltas);
        let taken = deltas.drain(..).try_fold(None, |failure, delta| {
            let failed = self.take_one(&delta, sink)?;
            Ok(failure.or(failed))
        });
        self.deltas = deltas;
        taken
    }

    fn take_one(&mut self, delta: &TokenDelta, sink: &mut impl Sink) -> Result<Option<ApiError>, ApiError> {
        if delta.epoch != self.epoch {
            return Ok(None);
        }
        if let Some(cached) = delta.cached_prompt_tokens {
            self.cached_prompt_tokens = cached.min(self.wanted.prompt_ids.len() as u32);
        }
        if !delta.ids.is_empty() && self.first.is_none() {
            self.first = Some(Instant::now());
        }
        if !delta.prompt_logprobs.is_empty() {
            let entries = prompt_entries(&self.wanted.prompt_ids, &delta.prompt_logprobs);
            (0..self.choices()).for_each(|choice| sink.prompt(choice, &entries));
        }
        let within = self.within_allowance(delta);
        let delta = within.as_ref().unwrap_or(delta);
        let finished = match self.answer.push(delta, sink) {
            Ok(finished) => finished,
            Err(gap) => {
                self.stop_run(Outcome::Failed);
                return Err(ApiError::internal(format!("the worker sent {}", gap.0)));
            }
        };
        if let Some(allowance) = self.allowance().filter(|_| !self.answer.is_done()) {
            if self.answer.completion_tokens() >= allowance {
                return Err(over_budget(allowance));
            }
        }
        let Some(finish) = &delta.finish else {
            if finished && !self.answer.is_done() {
                if let State::Running(run) = &self.state {
                    run.stop_choice(delta.choice, Outcome::Stop);
                }
            }
            return Ok(None);
        };
        if let Some(usage) = finish.usage {
            self.compare(&usage);
        }
        Ok((!finished).then(|| worker_error(finish)))
    }

    /// What the request may have over all choices, when that is less than it asked for.
    fn allowance(&self) -> Option<u32> {
        let allowance = self.booking.as_ref().map_or(0, |booking| booking.allowance);
        (allowance > 0).then_some(allowance)
    }

    /// A delta that reaches the allowance, as far as it goes; None = it doesn't.
    fn within_allowance(&self, delta: &TokenDelta) -> Option<TokenDelta> {
        let left = self.allowance()?.saturating_sub(self.answer.completion_tokens()) as usize;
        if delta.ids.len() < left {
            return None;
        }
        let mut within = delta.clone();
        within.ids.truncate(left);
        within.logprobs.truncate(left);
        // That the worker calls it a length is our doing: it was told to stop there.
        let length = |finish: &proto::token_delta::Finish| finish.outcome == Outcome::Length as i32;
        if delta.ids.len() > left || within.finish.as_deref().is_some_and(length) {
            within.finish = None;
        }
        Some(within)
    }

    /// Our count is the one that holds; that the worker's differs is worth knowing.
    fn compare(&self, usage: &proto::Usage) {
        let prompt = (self.wanted.prompt_ids.len() + self.resumed()) as u32;
        let several = self.choices() > 1;
        let ours = self.answer.completion_tokens() - self.resumed() as u32;
        // With several choices the others are still under way.
        if usage.prompt_tokens != prompt || (!several && usage.completion_tokens != ours && self.answer.is_done()) {
            self.wanted.plane.metrics.usage_mismatches.inc();
        }
    }

    fn resumed(&self) -> usize {
        self.answer.resumed()
    }

    /// The prompt's own text comes first, when it was asked for (its log-probabilities bring it along).
    fn echo(&mut self, sink: &mut impl Sink) {
        if std::mem::replace(&mut self.echoed, true) || self.wanted.shared.request.logprobs.is_some() {
            return;
        }
        let index = (self.first_choice / self.choices()) as usize;
        let text = match self.wanted.shared.request.prompts.get(index) {
            Some(Prompt::Text(text)) => text.clone(),
            _ => self.wanted.shared.model.tokenizer.decode(&self.wanted.prompt_ids, true),
        };
        (0..self.choices()).for_each(|choice| sink.delta(choice, &text, &[]));
    }

    fn replay(&mut self, answer: proto::Answer, origin: Origin, sink: &mut impl Sink) -> Result<(), ApiError> {
        self.state = State::Over;
        self.echo(sink);
        if self.wanted.max_tokens == 0 {
            self.pool.clone_from(&self.wanted.shared.model.name);
            let finish = Finish {
                outcome: Outcome::Length,
                stop_string: None,
                stop_id: None,
            };
            (0..self.choices()).for_each(|choice| sink.finish(choice, &finish));
            return Ok(());
        }
        if let Origin::Cache(pool) = origin {
            self.cached_answer = true;
            if let Some(booking) = &mut self.booking {
                booking.replayed(&pool);
            }
            self.cached_prompt_tokens = self.wanted.prompt_ids.len() as u32;
            self.pool = pool;
        }
        self.first = Some(Instant::now());
        for delta in Answer::replay(answer) {
            self.answer
                .push(&delta, sink)
                .map_err(|gap| ApiError::internal(format!("the cache sent {}", gap.0)))?;
        }
        match self.answer.is_done() {
            true => {
                self.settle_whole();
                Ok(())
            }
            false => Err(ApiError::internal("the cached answer has no end")),
        }
    }

    /// Every choice has ended: the worker is told if it doesn't know, and the answer may be given again.
    fn finish(&mut self) {
        self.stop_run(Outcome::Stop);
        self.settle_whole();
        // An answer of another variant is not what was asked for under that name.
        let own = self.pool == self.wanted.shared.model.name;
        if let Some(lead) = self.lead.take().filter(|_| own) {
            lead.fill(self.answer.stored(self.wanted.prompt_ids.len() as u32));
        }
    }

    /// The answer is there, and stands as far as is known.
    fn settle_whole(&mut self) {
        if self.answer.is_done() && !self.answer.is_held() {
            self.settle(self.answer.outcome());
        }
    }

    /// Into the books with it, once.
    fn settle(&mut self, outcome: Outcome) {
        let Some(booking) = &mut self.booking else {
            return;
        };
        let ours = matches!(outcome, Outcome::Failed | Outcome::WorkerLost);
        if self.degraded || (ours && !self.answer.is_shown()) {
            // No model made that text; or nobody saw what a model made, for a fault of ours.
            booking.settle(Outcome::Failed, proto::Usage::default());
            return;
        }
        let taken = self.answer.completion_tokens();
        let whole = self.answer.is_done();
        booking.settle(
            outcome,
            proto::Usage {
                prompt_tokens: self.wanted.prompt_ids.len() as u32,
                cached_prompt_tokens: self.cached_prompt_tokens,
                completion_tokens: if whole { taken } else { booking.cut_tokens(taken) },
            },
        );
    }

    fn stop_run(&mut self, reason: Outcome) {
        if let State::Running(run) = std::mem::replace(&mut self.state, State::Over) {
            if let Some(booking) = &mut self.booking {
                booking.ran(&run.books(), self.answer.resumed() as u32);
            }
            run.stop(reason, self.answer.completion_tokens() - self.answer.resumed() as u32);
        }
        self.run_span = None;
    }

    /// The worker said that it can't. Another one may, as long as nothing was shown.
    fn failed(&mut self, failure: ApiError, open: &OpenRequest) -> Result<(), ApiError> {
        let again =
            failure.retryable && !self.answer.is_shown() && self.attempts < self.wanted.plane.config.place_attempts;
        if let Some(span) = &mut self.run_span {
            span.fail(failure.openai_code().to_owned());
        }
        self.avoid_current();
        self.blame();
        self.stop_run(Outcome::Failed);
        if !again {
            return Err(failure);
        }
        self.restart(open);
        Ok(())
    }

    /// The worker is gone. Go on elsewhere, start again elsewhere, or end with what there is.
    fn lost(&mut self, reason: &str, open: &OpenRequest) -> Result<(), ApiError> {
        if let Some(span) = &mut self.run_span {
            span.fail("worker_lost".to_owned());
        }
        self.avoid_current();
        self.blame();
        self.stop_run(Outcome::WorkerLost);
        let config = &self.wanted.plane.config;
        if self.is_resumable() && self.resumes < config.resume_attempts {
            self.resumes += 1;
            self.wanted.plane.metrics.resumes.inc();
            self.answer.rebase();
            self.start(open);
            return Ok(());
        }
        if !self.answer.is_shown() && self.attempts < config.place_attempts {
            self.restart(open);
            return Ok(());
        }
        Err(ApiError::new(
            ErrorCode::WorkerLost,
            format!("the worker was lost: {reason}"),
        ))
    }

    /// What was committed can be carried whole: one choice, and no grammar whose position is the worker's.
    fn is_resumable(&self) -> bool {
        !self.committed().is_empty() && self.wanted.shared.request.guided.is_none()
    }

    fn restart(&mut self, open: &OpenRequest) {
        self.wasted_tokens += self.answer.completion_tokens();
        if let Some(booking) = &mut self.booking {
            booking.restarts();
        }
        self.answer.reset(&self.wanted.shared.model.tokenizer);
        self.start(open);
    }

    /// The variant's worker failed it, whoever serves it in the end.
    fn blame(&self) {
        if let Some(alias) = &self.wanted.shared.route.alias {
            let ended = Ended {
                failed: true,
                ttft_s: None,
            };
            alias.ended(self.wanted.plane.routes.now_s(), &self.pool, ended);
        }
    }

    fn avoid_current(&mut self) {
        if let State::Running(run) = &self.state {
            self.avoid.push(run.instance_id().to_owned());
        }
    }

    /// What the client is told when no worker was to be had.
    fn refused(&self, error: ApiError) -> ApiError {
        match self.answer.is_shown() && error.code != ErrorCode::DeadlineExceeded {
            true => ApiError::new(
                ErrorCode::WorkerLost,
                format!("the worker was lost, and no other took over: {}", error.message),
            ),
            false => error,
        }
    }
}

impl Drop for Part {
    /// Its client left: what came until now is what it cost.
    fn drop(&mut self) {
        if matches!(self.state, State::Running(_)) {
            self.stop_run(Outcome::Cancelled);
        }
        self.settle(Outcome::Cancelled);
    }
}

/// Why a worker ended a choice without success.
fn worker_error(finish: &proto::token_delta::Finish) -> ApiError {
    match (Outcome::try_from(finish.outcome), &finish.error) {
        (Ok(Outcome::Deadline), _) => ApiError::deadline_exceeded(),
        (_, Some(error)) => ApiError::from(error.clone()),
        (Ok(Outcome::Cancelled), None) => ApiError::internal("the worker cancelled the request").with_retryable(true),
        _ => ApiError::internal("the worker failed the request without a reason"),
    }
}

/// Puts a part's choices where they belong among the request's.
struct Offset<'a, S> {
    sink: &'a mut S,
    first_choice: u32,
}

impl<S: Sink> Sink for Offset<'_, S> {
    fn prompt(&mut self, choice: u32, entries: &[Entry]) {
        self.sink.prompt(self.first_choice + choice, entries);
    }

    fn delta(&mut self, choice: u32, text: &str, entries: &[Entry]) {
        self.sink.delta(self.first_choice + choice, text, entries);
    }

    fn calls(&mut self, choice: u32, parts: &[CallPart]) {
        self.sink.calls(self.first_choice + choice, parts);
    }

    fn finish(&mut self, choice: u32, finish: &Finish) {
        self.sink.finish(self.first_choice + choice, finish);
    }

    fn model(&mut self, model: &Arc<Model>) {
        self.sink.model(model);
    }
}
