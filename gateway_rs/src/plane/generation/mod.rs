//! A request's way, top to bottom: prepare, look up, place, run; then text, until every choice has ended.
//!
//! A [`Generation`] is polled by the connection that waits for it and owns everything the request holds: dropping it, at
//! whatever await, withdraws its question, cancels its run, gives its lease back and abandons its lead.
//!
//! Each of its prompts is a part (`part.rs`), and each try to have it answered is an attempt (`attempt.rs`), which looks up,
//! places and runs. Ids are committed once, by index.
//!
//! Where a name has several variants, the request has a route (`routes.rs`), and is prepared for one hop of it at a time
//! (`prepared.rs`). Until something was shown it may fall to the next one on it (`fell.rs`); afterwards it stays with the
//! variant that began. So what a smaller variant answers may be held back, on trial (`trial.rs`).

mod attempt;
mod fell;
mod part;
mod prepared;
mod trial;

use std::{
    future::Future,
    pin::Pin,
    sync::{atomic::Ordering, Arc},
    task::{ready, Context, Poll, Waker},
    time::{Duration, Instant},
};

use opentelemetry::trace::SpanKind;
use tokio::time::Sleep;
use tokio_util::sync::WaitForCancellationFutureOwned;

use headrace_core::routing::rollout::Ended;

use self::{
    fell::{reason, Fell, CACHED, DEGRADED},
    part::Part,
    prepared::{turn, Base, PromptIds, Shared},
    trial::Verdict,
};
use super::{
    answer::{outcome_of_all, Sink},
    model::Model,
    open::{Books, OpenRequest},
    routes::{self, Route},
    shadow::{self, Compared},
    tenants::Tenant,
    Plane,
};
use crate::{
    blocks,
    error::{ApiError, ErrorCode},
    ledger::outcome_name,
    request::Request,
};

/// A client that leaves so shortly before its deadline has met it.
const CLIENT_AHEAD: Duration = Duration::from_millis(50);

/// What the door knows of a request.
pub struct Call {
    /// Validated.
    pub request: Request,
    /// Who may serve it.
    pub route: Route,
    /// Who asks.
    pub tenant: Arc<Tenant>,
    /// Its id for people.
    pub request_id: String,
    /// Counted, with its span.
    pub open: OpenRequest,
    /// When it came.
    pub arrived: Instant,
    /// The nearer of the client's and the call's own.
    pub deadline: Option<Instant>,
}

/// How far a generation has come.
pub enum Step {
    /// The sink got something; more comes.
    More,
    /// Every choice has ended.
    Done,
    /// It did not succeed; what the sink got before stands.
    Failed(ApiError),
}

/// A request on its way.
pub struct Generation {
    plane: Arc<Plane>,
    shared: Arc<Shared>,
    open: OpenRequest,
    parts: Vec<Part>,
    /// It is being prepared for another variant.
    turning: Option<Turning>,
    fell: Fell,
    timer: Option<Pin<Box<Sleep>>>,
    stopping: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Who is woken by `stopping`.
    waker: Option<Waker>,
    over: bool,
}

/// A request that is being prepared for a hop of its route.
type Turning = Pin<Box<dyn Future<Output = Result<(Arc<Shared>, Vec<PromptIds>), ApiError>> + Send>>;

impl Generation {
    /// Counts the prompts and starts every part. Errors: what the template refuses, a prompt or an answer that cannot fit.
    pub async fn prepare(plane: &Arc<Plane>, call: Call) -> Result<Self, ApiError> {
        let Call {
            request,
            route,
            tenant,
            request_id,
            mut open,
            arrived,
            deadline,
        } = call;
        let cache_salt = request.cache_salt.as_deref().unwrap_or_default();
        let base = Arc::new(Base {
            salt: blocks::salt(tenant.prefix_scope(), cache_salt),
            request,
            route,
            tenant,
            request_id,
            arrived,
            deadline,
            is_shadow: open.is_shadow(),
        });
        let mut fell = Fell::default();
        let prepared = async {
            if base.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(ApiError::deadline_exceeded());
            }
            let mut span = open.stage("prepare", SpanKind::Internal);
            if base.route.hops[0].name != base.route.meant.name {
                fell.reason = reason(ErrorCode::Unavailable);
            }
            let (shared, prompts) = loop {
                match turn(plane.clone(), base.clone(), fell.turn(&base.route)).await {
                    Ok(turned) => break turned,
                    // Another variant may hold more.
                    Err(error) if error.code == ErrorCode::ContextLengthExceeded => {
                        fell.give_up(&base.route, "");
                        fell.hop = fell.next(&base.route).ok_or(error)?;
                        fell.reason = reason(ErrorCode::ContextLengthExceeded);
                    }
                    Err(error) => return Err(error),
                }
            };
            open.books.prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len() as u32).sum();
            span.set("gen_ai.usage.input_tokens", i64::from(open.books.prompt_tokens));
            drop(span);
            if let Some(alias) = &base.route.alias {
                open.span.set("headrace.route.alias", alias.config.name.clone());
                open.span.set("headrace.route.meant", base.route.meant.name.clone());
                open.span.set("headrace.route.why", base.route.why.name());
            }
            let parts = start(plane, &shared, prompts, &open, &fell)?;
            Ok((shared, parts))
        };
        match prepared.await {
            Ok((shared, parts)) => Ok(Self {
                plane: plane.clone(),
                timer: None,
                stopping: Box::pin(plane.stopping.clone().cancelled_owned()),
                waker: None,
                turning: None,
                fell,
                shared,
                open,
                parts,
                over: false,
            }),
            Err(error) => {
                open.fail(&error);
                Err(error)
            }
        }
    }

    /// All that the only choice of the only prompt says, calls of tools as the model writes them.
    pub fn text(&self) -> Option<String> {
        match self.parts.as_slice() {
            [part] => part.text(),
            _ => None,
        }
    }

    /// Whose words it is answered in now.
    pub fn model(&self) -> &Arc<Model> {
        &self.shared.model
    }

    /// Drives it; whatever leaves goes to the sink. After Done or Failed it must not be polled again.
    pub fn poll(&mut self, context: &mut Context<'_>, sink: &mut impl Sink) -> Poll<Step> {
        let mut step = self.poll_parts(context, sink);
        if step.is_pending() {
            step = self.poll_timer(context);
        }
        if matches!(step, Poll::Ready(Step::Failed(_))) {
            self.parts.iter_mut().for_each(|part| part.release(sink));
        }
        self.keep_books();
        if let Poll::Ready(step) = &step {
            match step {
                Step::More => {}
                Step::Done => {
                    self.over = true;
                    self.account();
                    self.shadow();
                    let outcome = outcome_of_all(self.parts.iter().map(|part| part.outcome()));
                    self.open.end(outcome_name(outcome));
                }
                Step::Failed(error) => {
                    self.over = true;
                    self.parts.iter_mut().for_each(|part| part.stop(error));
                    self.open.fail(error);
                }
            }
        }
        step
    }

    /// What it has cost so far.
    pub fn books(&self) -> &Books {
        &self.open.books
    }

    /// Ids of all prompts.
    pub fn prompt_tokens(&self) -> u32 {
        self.open.books.prompt_tokens
    }

    fn poll_parts(&mut self, context: &mut Context<'_>, sink: &mut impl Sink) -> Poll<Step> {
        loop {
            if self.turning.is_some() {
                match ready!(self.poll_turning(context)) {
                    Ok(()) => sink.model(&self.shared.model),
                    Err(error) if self.fall(&error) => continue,
                    Err(error) => return Poll::Ready(Step::Failed(error)),
                }
            }
            match self.poll_each(context, sink) {
                Err(error) if self.fall(&error) => {}
                Err(error) => return Poll::Ready(Step::Failed(error)),
                Ok(Poll::Pending) => return Poll::Pending,
                Ok(_) if self.judge(sink) => {}
                Ok(step) => return step,
            }
        }
    }

    /// What is held of a smaller variant's answer leaves, or is given up for the best one's. True: it goes on, and nothing left.
    fn judge(&mut self, sink: &mut impl Sink) -> bool {
        let (Some(trial), [part]) = (&self.shared.trial, self.parts.as_mut_slice()) else {
            return false;
        };
        match part.verdict() {
            Verdict::Open => return true,
            Verdict::Falls(why) if self.plane.is_served(trial.best()) && !self.fell.has_tried(trial.hop) => {
                self.fell.escalate(trial.hop, why, &part.reject());
                self.turn();
                return true;
            }
            Verdict::Stands | Verdict::Falls(_) => part.release(sink),
        }
        false
    }

    /// A share of what smaller variants answered is compared with the best one's answer.
    fn shadow(&self) {
        let route = &self.shared.route;
        let (Some(alias), [part]) = (&route.alias, self.parts.as_slice()) else {
            return;
        };
        let request = &self.shared.request;
        let plain = request.prompts.len() == 1 && request.logprobs.is_none() && !request.echo;
        if !plain || !request.is_deterministic() || part.is_cached() {
            return;
        }
        let (Some(number), Some(answer)) = (part.smaller_variant(alias), part.text()) else {
            return;
        };
        shadow::consider(&self.plane, alias, || Compared {
            alias: alias.clone(),
            number,
            request: request.clone(),
            features: route.features.unwrap_or_default(),
            expected: route.expected,
            answer,
        });
    }

    fn poll_each(&mut self, context: &mut Context<'_>, sink: &mut impl Sink) -> Result<Poll<Step>, ApiError> {
        let (mut progress, mut done) = (false, true);
        for part in self.parts.iter_mut().filter(|part| !part.is_over()) {
            match part.poll(context, sink, &self.open) {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => progress = true,
                Poll::Ready(Err(error)) => return Err(error),
            }
            done &= part.is_over();
        }
        Ok(match (done, progress) {
            (true, _) => Poll::Ready(Step::Done),
            (false, true) => Poll::Ready(Step::More),
            (false, false) => Poll::Pending,
        })
    }

    fn poll_turning(&mut self, context: &mut Context<'_>) -> Poll<Result<(), ApiError>> {
        let Some(turning) = &mut self.turning else {
            return Poll::Ready(Ok(()));
        };
        let turned = ready!(turning.as_mut().poll(context));
        self.turning = None;
        let started = turned.and_then(|(shared, prompts)| {
            self.open.books.prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len() as u32).sum();
            self.parts = start(&self.plane, &shared, prompts, &self.open, &self.fell)?;
            self.shared = shared;
            Ok(())
        });
        Poll::Ready(started)
    }

    /// Takes the next hop, while nothing was shown and where another variant may do what this one couldn't. True when it has.
    fn fall(&mut self, error: &ApiError) -> bool {
        let route = &self.shared.route;
        let shown = self.parts.iter().any(Part::is_shown);
        let late = self.shared.deadline.is_some_and(|deadline| deadline <= Instant::now());
        if shown || late || route.alias.is_none() || reason(error.code).is_empty() {
            return false;
        }
        let mut pool = String::new();
        for left in self.parts.iter_mut().map(|part| part.give_way(error)) {
            self.fell.take(&left);
            if pool.is_empty() {
                pool = left.pool;
            }
        }
        self.fell.give_up(route, &pool);
        if let Some(hop) = self.fell.next(route) {
            self.fell.hop = hop;
            self.fell.reason = reason(error.code);
            self.turn();
            return true;
        }
        self.resort(error)
    }

    /// Makes the request ready for the hop that it is at.
    fn turn(&mut self) {
        let base = self.shared.base.clone();
        let next = self.fell.turn(&base.route);
        self.turning = Some(Box::pin(turn(self.plane.clone(), base, next)));
    }

    /// No variant serves it: an answer that was given before, or a text for such times, where the configuration has them.
    fn resort(&mut self, error: &ApiError) -> bool {
        let Some(alias) = self.shared.route.alias.clone().filter(|_| !self.shared.route.strict) else {
            return false;
        };
        let named = |step: &str| alias.config.fallback.iter().any(|each| each == step);
        if named(CACHED) && !std::mem::replace(&mut self.fell.cached, true) {
            self.fell.reason = CACHED;
            self.parts.iter_mut().for_each(|part| part.recall(error, &alias));
            return true;
        }
        let free = self.shared.request.guided.is_none() && self.shared.request.logprobs.is_none();
        if named(DEGRADED) && free && !std::mem::replace(&mut self.fell.degraded, true) {
            self.fell.reason = DEGRADED;
            self.parts
                .iter_mut()
                .for_each(|part| part.degrade(&alias.config.degraded_text));
            return true;
        }
        false
    }

    /// The deadline, workers that have fallen silent, and the end of the process.
    fn poll_timer(&mut self, context: &mut Context<'_>) -> Poll<Step> {
        // Looked at once for each waker; then a flag tells, without the lock of all who wait for the same.
        let registered = self
            .waker
            .as_ref()
            .is_some_and(|waker| waker.will_wake(context.waker()));
        if !registered {
            self.waker = Some(context.waker().clone());
        }
        let stopping = !registered || self.plane.is_stopping.load(Ordering::Relaxed);
        if stopping && self.stopping.as_mut().poll(context).is_ready() {
            let error = ApiError::new(
                ErrorCode::Draining,
                "this router stopped before the answer was complete",
            );
            return Poll::Ready(Step::Failed(error));
        }
        let stall = Duration::from_secs_f64(self.plane.config.stall_timeout_s);
        loop {
            let deadline = self.shared.deadline;
            let timer = self.timer.get_or_insert_with(|| {
                let first = Instant::now() + stall;
                Box::pin(tokio::time::sleep_until(
                    deadline.map_or(first, |deadline| deadline.min(first)).into(),
                ))
            });
            ready!(timer.as_mut().poll(context));
            let now = Instant::now();
            if deadline.is_some_and(|deadline| deadline <= now) {
                return Poll::Ready(Step::Failed(ApiError::deadline_exceeded()));
            }
            let (mut longest, mut failed) = (Duration::ZERO, None);
            for part in &mut self.parts {
                match part.silence(stall, &self.open) {
                    Ok(Some(silence)) => longest = longest.max(silence),
                    Ok(None) => context.waker().wake_by_ref(),
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            let next = now + (stall - longest).max(Duration::from_millis(1));
            timer
                .as_mut()
                .reset(deadline.map_or(next, |deadline| deadline.min(next)).into());
            if let Some(error) = failed {
                if !self.fall(&error) {
                    return Poll::Ready(Step::Failed(error));
                }
                context.waker().wake_by_ref();
            }
        }
    }

    fn keep_books(&mut self) {
        let mut books = Books {
            prompt_tokens: self.open.books.prompt_tokens,
            wasted_tokens: self.fell.wasted_tokens,
            cached_answer: true,
            ..Books::default()
        };
        self.parts.iter().for_each(|part| part.count(&mut books));
        self.open.books = books;
    }

    /// Whose worker answered, and why it was not that of the variant it was meant for. Nobody's where there is only one.
    pub fn served(&self) -> Option<Served<'_>> {
        let route = &self.shared.route;
        route.alias.as_ref()?;
        let part = self.parts.first()?;
        let variant = part.variant();
        let fallback = match variant == route.meant.name {
            true => "",
            false if part.is_cached() => CACHED,
            // A better one had room when that one had none.
            false if self.fell.reason.is_empty() => reason(ErrorCode::Overloaded),
            false => self.fell.reason,
        };
        Some(Served { variant, fallback })
    }

    /// Writes down who answered, for those who watch its name's variants.
    fn account(&self) {
        let route = &self.shared.route;
        let Some(alias) = &route.alias else { return };
        let now_s = self.plane.routes.now_s();
        for part in self.parts.iter().filter(|part| !part.is_cached()) {
            let ttft_s = part.first().map(|first| self.open.since_arrival_s(first));
            alias.ended(now_s, part.variant(), Ended { failed: false, ttft_s });
        }
        if let Some(Served { variant, fallback }) = self.served() {
            routes::count(&self.plane.metrics, route, variant, fallback);
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        self.keep_books();
        // A client's own timer runs ahead of ours by the way that its request took: it left because of the deadline.
        let passed = |deadline: Instant| deadline <= Instant::now() + CLIENT_AHEAD;
        if self.shared.deadline.is_some_and(passed) {
            let error = ApiError::deadline_exceeded();
            self.parts.iter_mut().for_each(|part| part.stop(&error));
            self.open.fail(&error);
        }
    }
}

/// Who answered a request of a name with several variants.
#[derive(Clone, Copy, Debug)]
pub struct Served<'a> {
    /// The variant; empty for a text that none made.
    pub variant: &'a str,
    /// Why it is not the one that the request was meant for; empty when it is.
    pub fallback: &'static str,
}

fn start(
    plane: &Arc<Plane>,
    shared: &Arc<Shared>,
    prompts: Vec<PromptIds>,
    open: &OpenRequest,
    fell: &Fell,
) -> Result<Vec<Part>, ApiError> {
    let parts = prompts.into_iter().enumerate();
    parts
        .map(|(index, prompt)| Part::new(plane, shared, index, prompt, open, fell))
        .collect()
}
