//! A request's way, top to bottom: prepare, look up, place, run; then text, until every choice has ended.
//!
//! A [`Generation`] is polled by the connection that waits for it and owns everything the request holds: dropping it, at
//! whatever await, withdraws its question, cancels its run, gives its lease back and abandons its lead.
//!
//! A worker that is lost before anything was shown costs a new attempt elsewhere; one that is lost in mid-answer is followed
//! by another that goes on from the committed ids, where that is exact. Ids are committed once, by index.
//!
//! Where a name has several variants, the request has a route (`routes.rs`). Until something was shown it may fall to the next
//! one on it; afterwards it stays with the variant that began.

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

use headrace_core::routing::{refusal::is_refusal, rollout::Ended};

use super::{
    answer::{outcome_of_all, prompt_entries, Answer, Ending, Entry, Finish, Sink},
    booking::Booking,
    config::Escalate,
    legs::{Legs, Prefill},
    links::{
        cache::{Found, Lead},
        scheduler::{left_ms, spent_ms, Granted, Lease},
        worker::RunEnd,
    },
    metrics::LookupLabels,
    model::Model,
    open::OpenRequest,
    routes::{self, Alias, Route},
    shadow::{self, Compared},
    tenants::Tenant,
    trace::{Parent, Span},
    Plane,
};
use crate::{
    blocks,
    error::{ApiError, ErrorCode},
    ledger::outcome_name,
    proto::{
        self,
        kv_handoff::{Fetch, Produce, Role},
        place_request::Ask,
        KvHandoff, Outcome, Submit, TokenDelta, TraceContext,
    },
    request::{Class, Door, Prompt, Request},
    schema::Guided,
    stops::StopSet,
    tools::CallPart,
};

/// So long a stored answer is waited for when no variant can answer.
const RECALL: Duration = Duration::from_millis(500);

/// So long KV is kept for the worker that answers, at most; it has begun to fetch it long before.
const HANDOFF_KEEP: Duration = Duration::from_secs(30);

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

/// How far a request has fallen along its route.
#[derive(Default)]
struct Fell {
    /// The hop that it is at, and by their bits those that are of no use any more.
    hop: usize,
    tried: u64,
    /// Why it fell, for people; empty: it did not.
    reason: &'static str,
    /// What serves when no variant does was tried.
    cached: bool,
    degraded: bool,
    /// Its first answer was no help.
    escalated: bool,
    /// Ids thrown away before the last hop.
    wasted_tokens: u32,
    /// Instances that failed it, and attempts that were made.
    avoid: Vec<String>,
    epoch: u32,
}

/// What all attempts for a request need, whoever serves it.
struct Base {
    request: Request,
    route: Route,
    tenant: Arc<Tenant>,
    request_id: String,
    /// Of everything that is kept of its prompts.
    salt: Vec<u8>,
    arrived: Instant,
    deadline: Option<Instant>,
    is_shadow: bool,
}

/// What all attempts need for one hop of the route.
struct Shared {
    base: Arc<Base>,
    model: Arc<Model>,
    /// The pools that are asked, in order; the model's own first.
    pools: Vec<String>,
    /// So long a worker is waited for; then the next hop is taken.
    patience: Option<Duration>,
    context_tokens: u32,
    eos_ids: Vec<u32>,
    /// The weights and how they are run.
    model_version: String,
    block_tokens: u32,
}

impl std::ops::Deref for Shared {
    type Target = Base;

    fn deref(&self) -> &Base {
        &self.base
    }
}

impl Shared {
    /// The model, as the client named it.
    fn asked_for(&self) -> &str {
        let alias = self.route.alias.as_ref();
        alias.map_or(&self.model.name, |alias| &alias.config.name)
    }

    /// `more`: something else could serve it.
    fn new(plane: &Plane, base: &Arc<Base>, hop: usize, more: bool) -> Self {
        let route = &base.route;
        let model = route.hops[hop].clone();
        let pool = plane.described(&model.name);
        let description = pool.as_ref().and_then(|pool| pool.description.as_ref());
        let more_eos_ids = description.map_or(&[][..], |description| &description.eos_ids);
        let mut eos_ids = model.eos_ids.clone();
        eos_ids.extend(more_eos_ids.iter().filter(|id| !model.eos_ids.contains(id)));
        let patience = route.alias.as_ref().map_or(0.0, |alias| alias.config.fallback_after_s);
        let name = |hop: usize| route.hops[hop].name.clone();
        Self {
            pools: route.together(hop).into_iter().map(name).collect(),
            patience: (more && patience > 0.0).then(|| Duration::from_secs_f64(patience)),
            context_tokens: plane.context_tokens(&model),
            eos_ids,
            model_version: plane.version(&model.name),
            block_tokens: description.map_or(0, |description| description.block_tokens),
            model,
            base: base.clone(),
        }
    }
}

/// A prompt as the rest of the mesh knows it.
struct PromptIds {
    ids: Vec<u32>,
    /// Of its full blocks.
    block_hashes: Vec<u64>,
}

/// One prompt of the request, with its choices.
struct Part {
    plane: Arc<Plane>,
    shared: Arc<Shared>,
    prompt_ids: Vec<u32>,
    block_hashes: Vec<u64>,
    seeds: Vec<u64>,
    max_tokens: u32,
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

enum Opened {
    Replay(proto::Answer, Origin),
    Run {
        run: Legs,
        span: Span,
        lead: Option<Lead>,
        pool: String,
        queue_s: f32,
        allowance: u32,
    },
}

/// Where an answer comes from that no worker makes now.
#[derive(Clone, PartialEq, Eq)]
enum Origin {
    /// There is none: only the echo is wanted.
    Nothing,
    /// That variant made it.
    Cache(String),
    /// The configuration has it.
    Configured,
}

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
                return Err(deadline_exceeded());
            }
            let mut span = open.stage("prepare", SpanKind::Internal);
            if base.route.hops[0].name != base.route.meant.name {
                fell.reason = reason(ErrorCode::Unavailable);
            }
            let (shared, prompts) = loop {
                match turn(plane.clone(), base.clone(), fell.hop, fell.has_more(&base.route)).await {
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
        self.keep_books();
        if let Poll::Ready(step) = &step {
            match step {
                Step::More => {}
                Step::Done => {
                    self.over = true;
                    self.account();
                    self.shadow();
                    let outcome = outcome_of_all(self.parts.iter().map(|part| part.answer.outcome()));
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
    pub fn books(&self) -> &super::open::Books {
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
                Ok(Poll::Ready(Step::Done)) if self.escalate() => {}
                Ok(step) => return step,
            }
        }
    }

    /// A smaller variant has answered only that it cannot help, and nothing of it was sent: the best one is asked instead.
    fn escalate(&mut self) -> bool {
        let route = &self.shared.route;
        let Some(alias) = route.alias.as_ref().filter(|_| !self.shared.request.stream) else {
            return false;
        };
        let wanted = alias.config.escalate == Escalate::Refusal && self.shared.request.door != Door::Native;
        let [part] = self.parts.as_slice() else { return false };
        let best = &alias.variants[0].model;
        let hop = route.hops.iter().position(|model| model.name == best.name);
        let (Some(hop), true) = (hop, wanted && part.is_smaller(alias) && !self.fell.escalated) else {
            return false;
        };
        let is_ready = self.plane.pool(&best.name).is_some_and(|pool| pool.ready_workers > 0);
        if !is_ready || !part.text().is_some_and(|text| is_refusal(&text)) {
            return false;
        }
        self.fell.escalated = true;
        self.fell.reason = "refusal";
        self.fell.wasted_tokens += part.wasted_tokens + part.answer.completion_tokens();
        self.fell.epoch = part.epoch;
        self.fell.hop = hop;
        let base = self.shared.base.clone();
        self.turning = Some(Box::pin(turn(self.plane.clone(), base, hop, false)));
        true
    }

    /// A share of what smaller variants answered is compared with the best one's answer.
    fn shadow(&self) {
        let route = &self.shared.route;
        let (Some(alias), [part]) = (&route.alias, self.parts.as_slice()) else {
            return;
        };
        let request = &self.shared.request;
        let plain = request.prompts.len() == 1 && request.logprobs.is_none() && !request.echo;
        if !plain || !request.is_deterministic() || part.cached_answer || part.degraded || !part.is_smaller(alias) {
            return;
        }
        let (Some(number), Some(answer)) = (alias.number(&part.pool), part.text()) else {
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
        for part in &mut self.parts {
            if matches!(part.state, State::Over) {
                continue;
            }
            let mut sink = Offset {
                sink,
                first_choice: part.first_choice,
            };
            match part.poll(context, &mut sink, &self.open) {
                Poll::Pending => {}
                Poll::Ready(Ok(())) => progress = true,
                Poll::Ready(Err(error)) => return Err(error),
            }
            done &= matches!(part.state, State::Over);
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
        for part in &mut self.parts {
            part.stop(error);
            self.fell.wasted_tokens += part.answer.completion_tokens() + std::mem::take(&mut part.wasted_tokens);
            part.answer.reset(&part.shared.model.tokenizer);
            self.fell.avoid.append(&mut part.avoid);
            self.fell.epoch = self.fell.epoch.max(part.epoch);
        }
        let failed = self.parts.iter().find(|part| !part.pool.is_empty());
        self.fell.give_up(route, failed.map_or("", |part| part.pool.as_str()));
        if let Some(hop) = self.fell.next(route) {
            self.fell.hop = hop;
            self.fell.reason = reason(error.code);
            let (base, more) = (self.shared.base.clone(), self.fell.has_more(route));
            self.turning = Some(Box::pin(turn(self.plane.clone(), base, hop, more)));
            return true;
        }
        self.resort(error)
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
                return Poll::Ready(Step::Failed(deadline_exceeded()));
            }
            let (mut longest, mut failed) = (Duration::ZERO, None);
            for part in &mut self.parts {
                let State::Running(run) = &mut part.state else {
                    continue;
                };
                let silence = run.silence();
                if silence < stall {
                    longest = longest.max(silence);
                    continue;
                }
                if run.go_on_alone() {
                    continue;
                }
                let reason = format!("the worker has been silent for {:.1} s", silence.as_secs_f64());
                if let Err(error) = part.lost(&reason, &self.open) {
                    failed = Some(error);
                    break;
                }
                // Its new question must be polled.
                context.waker().wake_by_ref();
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
        let books = &mut self.open.books;
        let sum = |count: fn(&Part) -> u32| self.parts.iter().map(count).sum();
        books.completion_tokens = sum(|part| part.answer.completion_tokens());
        books.cached_prompt_tokens = sum(|part| part.cached_prompt_tokens);
        books.wasted_tokens = self.fell.wasted_tokens + sum(|part| part.wasted_tokens);
        books.cached_answer = self.parts.iter().all(|part| part.cached_answer);
        books.first = self.parts.iter().filter_map(|part| part.first).min();
    }

    /// Whose worker answered, and why it was not that of the variant it was meant for. Nobody's where there is only one.
    pub fn served(&self) -> Option<Served<'_>> {
        let route = &self.shared.route;
        route.alias.as_ref()?;
        let part = self.parts.first()?;
        let variant = if part.degraded { "" } else { part.pool.as_str() };
        let fallback = match variant == route.meant.name {
            true => "",
            false if part.cached_answer => CACHED,
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
        for part in self.parts.iter().filter(|part| !part.cached_answer && !part.degraded) {
            let ttft_s = part.first.map(|first| self.open.since_arrival_s(first));
            alias.ended(now_s, &part.pool, Ended { failed: false, ttft_s });
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
            let error = deadline_exceeded();
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

/// What serves when no variant does, as the configuration names it.
const CACHED: &str = "cached";
const DEGRADED: &str = "degraded";

/// Why a request falls to the next variant, for people; empty for what no other variant would mend.
fn reason(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::Overloaded => "overloaded",
        ErrorCode::Unavailable | ErrorCode::WorkerLost | ErrorCode::Internal => "failed",
        ErrorCode::ContextLengthExceeded => "too_long",
        _ => "",
    }
}

impl Fell {
    /// That hop did not serve it. `pool`: whose worker failed it; empty when none of those that were asked had one for it.
    fn give_up(&mut self, route: &Route, pool: &str) {
        self.tried |= 1 << self.hop;
        let asked = route.together(self.hop);
        let failed = |hop: &usize| pool.is_empty() || route.hops[*hop].name == pool;
        asked.into_iter().filter(failed).for_each(|hop| self.tried |= 1 << hop);
    }

    /// The first hop that may still be of use.
    fn next(&self, route: &Route) -> Option<usize> {
        (0..route.hops.len()).find(|hop| self.tried & (1 << hop) == 0)
    }

    /// Something is left, beside the pools that are asked now, that could serve it.
    fn has_more(&self, route: &Route) -> bool {
        let asked = route
            .together(self.hop)
            .into_iter()
            .fold(self.tried, |tried, hop| tried | 1 << hop);
        let named = |alias: &Arc<Alias>| {
            alias
                .config
                .fallback
                .iter()
                .any(|step| step == CACHED || step == DEGRADED)
        };
        let resorts = !route.strict && route.alias.as_ref().is_some_and(named);
        asked.trailing_ones() < route.hops.len() as u32 || resorts
    }
}

/// Makes the request ready for a hop of its route.
async fn turn(
    plane: Arc<Plane>,
    base: Arc<Base>,
    hop: usize,
    more: bool,
) -> Result<(Arc<Shared>, Vec<PromptIds>), ApiError> {
    let shared = Arc::new(Shared::new(&plane, &base, hop, more));
    let prompts = encode(&plane, &shared).await?;
    Ok((shared, prompts))
}

/// Starts every part.
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

/// The prompts' ids and blocks; long ones are worked on away from the threads that serve streams.
async fn encode(plane: &Plane, shared: &Arc<Shared>) -> Result<Vec<PromptIds>, ApiError> {
    let bytes: usize = shared.request.prompts.iter().map(weight).sum();
    let shared = shared.clone();
    let work = move || {
        let lora = shared.request.lora.as_deref().unwrap_or_default();
        let seed = blocks::Seed::new(&shared.model.name, lora, &shared.salt);
        let encode = |prompt| {
            let ids = shared.model.encode(&shared.request, prompt, shared.context_tokens)?;
            let block_hashes = blocks::block_hashes(&ids, shared.block_tokens as usize, seed);
            Ok(PromptIds { ids, block_hashes })
        };
        shared.request.prompts.iter().map(encode).collect()
    };
    plane.compute.run(bytes, work).await
}

fn weight(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Ids(_) => 0,
        Prompt::Chat(chat) => {
            let content = |message: &crate::request::ChatMessage| match &message.content {
                crate::request::Content::Absent => 0,
                crate::request::Content::Text(text) => text.len(),
                crate::request::Content::Parts(parts) => parts.iter().map(String::len).sum(),
            };
            // Rendering costs something for each message, however short.
            chat.messages.iter().map(|message| content(message) + 64).sum()
        }
    }
}

impl Part {
    fn new(
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
            entries: request.logprobs.is_some() || request.door == Door::Native,
            skip_special: true,
            shown_ids: shared.model.tool_mark_ids.clone(),
            tools: request.tool_rules(shared.model.tool_format, rand::random),
        };
        let mut part = Self {
            answer: Answer::new(&shared.model.tokenizer, request.sampling.n, ending),
            seeds: request.seeds(rand::random),
            first_choice: index as u32 * request.sampling.n,
            plane: plane.clone(),
            shared: shared.clone(),
            prompt_ids: prompt.ids,
            block_hashes: prompt.block_hashes,
            max_tokens,
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
            booking: (max_tokens > 0).then(|| Booking::open(&plane.scheduler, account(shared))),
        };
        part.start(open);
        Ok(part)
    }

    /// Asks for the next attempt: the first one looks the answer up, every one asks for a worker.
    fn start(&mut self, open: &OpenRequest) {
        self.epoch += 1;
        self.attempts += 1;
        self.run_span = None;
        if self.max_tokens == 0 {
            // Only the echo is wanted: nobody has to run anything.
            let echo = proto::Answer {
                prompt_tokens: self.prompt_ids.len() as u32,
                choices: Vec::new(),
            };
            self.state = State::Opening(Box::pin(async move { Ok(Opened::Replay(echo, Origin::Nothing)) }));
            return;
        }
        let attempt = Attempt {
            plane: self.plane.clone(),
            shared: self.shared.clone(),
            submit: self.submit(),
            ask: self.ask(),
            key: (self.attempts == 1 && self.is_cacheable()).then(|| self.key(&self.shared.model)),
            patience: self.shared.patience.filter(|_| self.committed().is_empty()),
            parent: open.span.parent(),
        };
        self.state = State::Opening(Box::pin(attempt.open()));
    }

    fn is_cacheable(&self) -> bool {
        let request = &self.shared.request;
        // The prompt's log-probabilities are not stored.
        let stores_all = !(request.echo && request.logprobs.is_some());
        self.plane.cache.is_some() && request.is_deterministic() && !request.bypass_cache && stores_all
    }

    /// The name of what that model answers, which reads as ours does.
    fn key(&self, model: &Model) -> [u8; 32] {
        let own = model.name == self.shared.model.name;
        let other = if own {
            String::new()
        } else {
            self.plane.version(&model.name)
        };
        let scope = blocks::Scope {
            tenant: &self.shared.tenant.name,
            model: &model.name,
            model_version: if own { &self.shared.model_version } else { &other },
            tokenizer: model.tokenizer.hash(),
            template: &model.template_sha256,
            eos_ids: &self.shared.eos_ids,
        };
        blocks::answer_key(&scope, &[(&self.prompt_ids, self.max_tokens)], &self.shared.request)
    }

    fn committed(&self) -> &[u32] {
        self.answer.committed().unwrap_or_default()
    }

    fn submit(&self) -> Submit {
        let request = &self.shared.request;
        let committed = self.committed();
        let sampling = &request.sampling;
        Submit {
            request_id: self.shared.request_id.clone(),
            epoch: self.epoch,
            model: self.shared.model.name.clone(),
            prompt_ids: [&self.prompt_ids, committed].concat(),
            sampling: Some(proto::Sampling {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                repetition_penalty: sampling.repetition_penalty,
                frequency_penalty: sampling.frequency_penalty,
                presence_penalty: sampling.presence_penalty,
                logit_bias: sampling.logit_bias.iter().copied().collect(),
                seeds: self.seeds.clone(),
            }),
            stopping: Some(proto::Stopping {
                max_tokens: self.max_tokens - committed.len() as u32,
                min_tokens: request.stopping.min_tokens.saturating_sub(committed.len() as u32),
                ignore_eos: request.stopping.ignore_eos,
                stop_ids: request.stopping.stop_ids.clone(),
                eos_ids: self.shared.eos_ids.clone(),
            }),
            guided: request.guided.as_ref().map(guided),
            logprobs: request.logprobs.map(|top| proto::LogprobOptions {
                enabled: true,
                top,
                prompt: request.echo,
            }),
            lora: request.lora.clone().unwrap_or_default(),
            class: class(request.class) as i32,
            resumed_tokens: committed.len() as u32,
            booking: self.booking.as_ref().map_or(0, Booking::id),
            cache_salt: self.shared.salt.clone(),
            bypass_prefix_cache: request.bypass_prefix_cache,
            ttft_target_ms: request.ttft_target_ms,
            ..Submit::default()
        }
    }

    fn ask(&self) -> Ask {
        let (request, committed) = (&self.shared.request, self.committed().len() as u32);
        Ask {
            request_id: self.shared.request_id.clone(),
            tenant: self.shared.tenant.name.clone(),
            class: class(request.class) as i32,
            pools: match committed {
                0 => self.shared.pools.clone(),
                // What has begun goes on with the same variant.
                _ => vec![self.pool.clone()],
            },
            prompt_tokens: self.prompt_ids.len() as u32 + committed,
            block_hashes: self.block_hashes.clone(),
            max_tokens: self.max_tokens - committed,
            n: request.sampling.n,
            avoid_instances: self.avoid.clone(),
            session_id: request.session_id.clone().unwrap_or_default(),
            epoch: self.epoch,
            // A resumed answer has had its first token.
            ttft_target_ms: request.ttft_target_ms.filter(|_| committed == 0),
            tpot_target_ms: request.tpot_target_ms,
            shadow: self.shared.is_shadow,
            booking: self.booking.as_ref().map_or(0, Booking::id),
            alias: self.shared.asked_for().to_owned(),
            committed_tokens: committed,
            may_part: self.may_part(),
            ..Ask::default()
        }
    }

    /// Whether its prompt may be computed on another worker: what must be done whole in one place may not, nor what a
    /// grammar guides, whose position is the worker's.
    fn may_part(&self) -> bool {
        let request = &self.shared.request;
        let whole = request.bypass_prefix_cache || (request.echo && request.logprobs.is_some());
        request.sampling.n == 1 && request.guided.is_none() && !whole && self.committed().is_empty()
    }

    fn poll(
        &mut self,
        context: &mut Context<'_>,
        sink: &mut impl Sink,
        open: &OpenRequest,
    ) -> Poll<Result<(), ApiError>> {
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
                        self.plane.metrics.attempts.inc();
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
                            let limit = self.plane.config.max_unread_tokens;
                            let message = format!("the client left more than {limit} tokens unread");
                            return Poll::Ready(Err(ApiError::new(ErrorCode::Cancelled, message)));
                        }
                        Some(RunEnd::Finished) => return Poll::Ready(Err(internal("the worker ended without an end"))),
                    }
                }
            }
        }
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
            self.cached_prompt_tokens = cached.min(self.prompt_ids.len() as u32);
        }
        if !delta.ids.is_empty() && self.first.is_none() {
            self.first = Some(Instant::now());
        }
        if !delta.prompt_logprobs.is_empty() {
            let entries = prompt_entries(&self.prompt_ids, &delta.prompt_logprobs);
            (0..self.shared.request.sampling.n).for_each(|choice| sink.prompt(choice, &entries));
        }
        let within = self.within_allowance(delta);
        let delta = within.as_ref().unwrap_or(delta);
        let finished = match self.answer.push(delta, sink) {
            Ok(finished) => finished,
            Err(gap) => {
                self.stop_run(Outcome::Failed);
                return Err(internal(format!("the worker sent {}", gap.0)));
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
        let prompt = (self.prompt_ids.len() + self.resumed()) as u32;
        let several = self.shared.request.sampling.n > 1;
        let ours = self.answer.completion_tokens() - self.resumed() as u32;
        // With several choices the others are still under way.
        if usage.prompt_tokens != prompt || (!several && usage.completion_tokens != ours && self.answer.is_done()) {
            self.plane.metrics.usage_mismatches.inc();
        }
    }

    fn resumed(&self) -> usize {
        self.answer.resumed()
    }

    /// The prompt's own text comes first, when it was asked for (its log-probabilities bring it along).
    fn echo(&mut self, sink: &mut impl Sink) {
        if std::mem::replace(&mut self.echoed, true) || self.shared.request.logprobs.is_some() {
            return;
        }
        let text = match self
            .shared
            .request
            .prompts
            .get((self.first_choice / self.shared.request.sampling.n) as usize)
        {
            Some(Prompt::Text(text)) => text.clone(),
            _ => self.shared.model.tokenizer.decode(&self.prompt_ids, true),
        };
        (0..self.shared.request.sampling.n).for_each(|choice| sink.delta(choice, &text, &[]));
    }

    fn replay(&mut self, answer: proto::Answer, origin: Origin, sink: &mut impl Sink) -> Result<(), ApiError> {
        self.state = State::Over;
        self.echo(sink);
        if self.max_tokens == 0 {
            self.pool.clone_from(&self.shared.model.name);
            let finish = Finish {
                outcome: Outcome::Length,
                stop_string: None,
                stop_id: None,
            };
            (0..self.shared.request.sampling.n).for_each(|choice| sink.finish(choice, &finish));
            return Ok(());
        }
        if let Origin::Cache(pool) = origin {
            self.cached_answer = true;
            if let Some(booking) = &mut self.booking {
                booking.replayed(&pool);
            }
            self.cached_prompt_tokens = self.prompt_ids.len() as u32;
            self.pool = pool;
        }
        self.first = Some(Instant::now());
        for delta in Answer::replay(answer) {
            self.answer
                .push(&delta, sink)
                .map_err(|gap| internal(format!("the cache sent {}", gap.0)))?;
        }
        match self.answer.is_done() {
            true => {
                self.settle(self.answer.outcome());
                Ok(())
            }
            false => Err(internal("the cached answer has no end")),
        }
    }

    /// Every choice has ended: the worker is told if it doesn't know, and the answer may be given again.
    fn finish(&mut self) {
        self.stop_run(Outcome::Stop);
        self.settle(self.answer.outcome());
        // An answer of another variant is not what was asked for under that name.
        let own = self.pool == self.shared.model.name;
        if let Some(lead) = self.lead.take().filter(|_| own) {
            lead.fill(self.answer.stored(self.prompt_ids.len() as u32));
        }
    }

    /// A variant of less quality than the best has it.
    fn is_smaller(&self, alias: &Alias) -> bool {
        let number = alias.number(&self.pool);
        number.is_some_and(|number| number > 0 && alias.variants[number].is_own())
    }

    /// The only choice's text.
    fn text(&self) -> Option<String> {
        let ids = self.answer.committed()?;
        Some(self.shared.model.tokenizer.decode(ids, true))
    }

    /// Something has left: no other variant may take over.
    fn is_shown(&self) -> bool {
        self.answer.is_shown() || (self.shared.request.echo && self.echoed)
    }

    /// Looks for an answer that a variant gave before; without one, the error stands.
    fn recall(&mut self, error: &ApiError, alias: &Alias) {
        let mut keys = Vec::new();
        if self.is_cacheable() {
            let alike = |variant: &&routes::Variant| {
                variant.model.name != self.shared.model.name && variant.model.reads_like(&self.shared.model)
            };
            let others = alias.variants.iter().filter(alike);
            keys.extend(others.map(|variant| (variant.model.name.clone(), self.key(&variant.model))));
        }
        let (cache, error) = (self.plane.cache.clone(), error.clone());
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
    fn degrade(&mut self, text: &str) {
        self.degraded = true;
        let ids = self.shared.model.tokenizer.encode(text);
        let choice = proto::answer::Choice {
            ids,
            outcome: Outcome::Stop as i32,
            ..Default::default()
        };
        let answer = proto::Answer {
            prompt_tokens: self.prompt_ids.len() as u32,
            choices: vec![choice; self.shared.request.sampling.n as usize],
        };
        self.state = State::Opening(Box::pin(async move { Ok(Opened::Replay(answer, Origin::Configured)) }));
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
                prompt_tokens: self.prompt_ids.len() as u32,
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

    /// The request failed: what this part still runs is of no use.
    fn stop(&mut self, error: &ApiError) {
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

    /// The worker said that it can't. Another one may, as long as nothing was shown.
    fn failed(&mut self, failure: ApiError, open: &OpenRequest) -> Result<(), ApiError> {
        let again = failure.retryable && !self.answer.is_shown() && self.attempts < self.plane.config.place_attempts;
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
        let config = &self.plane.config;
        if self.is_resumable() && self.resumes < config.resume_attempts {
            self.resumes += 1;
            self.plane.metrics.resumes.inc();
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
        !self.committed().is_empty() && self.shared.request.guided.is_none()
    }

    fn restart(&mut self, open: &OpenRequest) {
        self.wasted_tokens += self.answer.completion_tokens();
        if let Some(booking) = &mut self.booking {
            booking.restarts();
        }
        self.answer.reset(&self.shared.model.tokenizer);
        self.start(open);
    }

    /// The variant's worker failed it, whoever serves it in the end.
    fn blame(&self) {
        if let Some(alias) = &self.shared.route.alias {
            let ended = Ended {
                failed: true,
                ttft_s: None,
            };
            alias.ended(self.plane.routes.now_s(), &self.pool, ended);
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

/// Who asks, for what: the part of a settlement that is known before.
fn account(shared: &Shared) -> proto::Settlement {
    let request = &shared.request;
    proto::Settlement {
        request_id: shared.request_id.clone(),
        // Nobody asked for what only measures quality, and nobody pays.
        tenant: match shared.is_shadow {
            true => String::new(),
            false => shared.tenant.name.clone(),
        },
        session_id: request.session_id.clone().unwrap_or_default(),
        alias: shared.asked_for().to_owned(),
        pool: shared.model.name.clone(),
        class: class(request.class) as i32,
        best_pool: match &shared.route.alias {
            Some(alias) => alias.variants[0].model.name.clone(),
            None => String::new(),
        },
        shadow: shared.is_shadow,
        ..proto::Settlement::default()
    }
}

/// One attempt, from the question to the run.
struct Attempt {
    plane: Arc<Plane>,
    shared: Arc<Shared>,
    submit: Submit,
    ask: Ask,
    /// When the answer may be looked up.
    key: Option<[u8; 32]>,
    /// So long a worker is waited for.
    patience: Option<Duration>,
    /// Of the stages' spans.
    parent: Parent,
}

impl Attempt {
    async fn open(mut self) -> Result<Opened, ApiError> {
        let lead = match self.look_up().await {
            Found::Hit(answer) => {
                return Ok(Opened::Replay(answer, Origin::Cache(self.shared.model.name.clone())));
            }
            Found::Lead(lead) => Some(lead),
            Found::Nothing => None,
        };
        let mut span = self.parent.child("place", SpanKind::Client);
        self.ask.trace = trace(&span);
        let must_ask = self.shared.tenant.limited && !self.shared.is_shadow;
        let (arrived, deadline) = (self.shared.arrived, self.shared.deadline);
        let ask = std::mem::take(&mut self.ask);
        let placing = self.plane.scheduler.place(ask, arrived, deadline, must_ask);
        let placed = match self.patience {
            None => placing.await,
            Some(patience) => tokio::time::timeout(patience, placing)
                .await
                .unwrap_or_else(|_| Err(waited(patience))),
        };
        let Granted { grant, lease, prefill } =
            placed.inspect_err(|error| span.fail(error.openai_code().to_owned()))?;
        span.set("headrace.worker", grant.worker_id.clone());
        span.set("headrace.queue_s", f64::from(grant.queue_s));
        if let Some(reason) = &grant.reason {
            span.set("headrace.place.hit_tokens", i64::from(reason.hit_tokens));
            span.set("headrace.place.prefill_ms", f64::from(reason.prefill_ms));
            span.set(
                "headrace.place.pending_prefill_ms",
                f64::from(reason.pending_prefill_ms),
            );
            span.set("headrace.place.decoding", i64::from(reason.decoding));
            span.set("headrace.place.waiting", i64::from(reason.waiting));
            span.set("headrace.place.score", f64::from(reason.score));
        }
        drop(span);
        let mut span = self.parent.child("run", SpanKind::Client);
        span.set("headrace.worker", grant.worker_id);
        span.set("headrace.epoch", i64::from(self.submit.epoch));
        let pool = match grant.pool.is_empty() {
            true => self.shared.model.name.clone(),
            false => grant.pool,
        };
        self.submit.model.clone_from(&pool);
        self.submit.lease = grant.lease;
        let (queue_s, allowance) = (grant.queue_s, grant.token_allowance);
        if let (Some(stopping), true) = (&mut self.submit.stopping, allowance > 0) {
            let left = allowance.saturating_sub(self.submit.resumed_tokens);
            if left == 0 {
                return Err(over_budget(allowance));
            }
            stopping.max_tokens = stopping.max_tokens.min(left);
            stopping.min_tokens = stopping.min_tokens.min(stopping.max_tokens);
        }
        self.submit.time_left_ms = left_ms(self.shared.deadline);
        self.submit.spent_ms = spent_ms(self.shared.arrived);
        self.submit.trace = trace(&span);
        let prefill = grant
            .prefill
            .zip(prefill)
            .map(|(where_, lease)| self.prefill(where_, lease));
        let link = self.plane.workers.link(&grant.instance_id, &grant.address);
        let run = Legs::new(link.submit(self.submit, Some(lease)), prefill);
        Ok(Opened::Run {
            run,
            span,
            lead,
            pool,
            queue_s,
            allowance,
        })
    }

    /// Has the prompt computed at another worker, and the one that answers told where its KV is to be had.
    fn prefill(&mut self, at: proto::grant::Prefill, lease: Lease) -> Prefill {
        let mut span = self.parent.child("prefill", SpanKind::Client);
        span.set("headrace.worker", at.worker_id);
        let reference = format!("{:032x}", rand::random::<u128>());
        let submit = Submit {
            lease: at.lease,
            trace: trace(&span),
            handoff: handoff(Role::Produce(Produce {
                keep_ms: HANDOFF_KEEP.as_millis() as u32,
                reference: reference.clone(),
            })),
            ..self.submit.clone()
        };
        self.submit.handoff = handoff(Role::Fetch(Fetch {
            worker_address: at.address.clone(),
            reference,
            kv_state_tag: at.kv_state_tag,
        }));
        let run = self
            .plane
            .workers
            .link(&at.instance_id, &at.address)
            .submit(submit, Some(lease));
        self.plane.metrics.handoffs.inc();
        Prefill::new(run, span, self.plane.metrics.handoffs_lost.clone())
    }

    async fn look_up(&self) -> Found {
        let (Some(key), Some(cache)) = (self.key, &self.plane.cache) else {
            return Found::Nothing;
        };
        let mut span = self.parent.child("lookup", SpanKind::Client);
        let found = cache.ask(key.to_vec().into(), span.traceparent()).await;
        let result = match &found {
            Found::Hit(_) => "hit",
            Found::Lead(_) => "lead",
            Found::Nothing => "away",
        };
        span.set("headrace.lookup", result);
        self.plane.metrics.lookups.get_or_create(&LookupLabels { result }).inc();
        found
    }
}

fn handoff(role: Role) -> Option<KvHandoff> {
    Some(KvHandoff { role: Some(role) })
}

fn trace(span: &Span) -> Option<TraceContext> {
    let traceparent = span.traceparent();
    (!traceparent.is_empty()).then(|| TraceContext {
        traceparent,
        ..TraceContext::default()
    })
}

fn guided(guided: &Guided) -> proto::Guided {
    use proto::guided::{Choices, Kind};
    let kind = match guided.clone() {
        Guided::JsonSchema(schema) => Kind::JsonSchema(schema),
        Guided::JsonObject => Kind::JsonObject(true),
        Guided::Regex(regex) => Kind::Regex(regex),
        Guided::Grammar(grammar) => Kind::Grammar(grammar),
        Guided::Choice(texts) => Kind::Choice(Choices { texts }),
    };
    proto::Guided { kind: Some(kind) }
}

fn class(class: Class) -> proto::RequestClass {
    match class {
        Class::Interactive => proto::RequestClass::Interactive,
        Class::Standard => proto::RequestClass::Standard,
        Class::Batch => proto::RequestClass::Batch,
    }
}

/// Why a worker ended a choice without success.
fn worker_error(finish: &proto::token_delta::Finish) -> ApiError {
    match (Outcome::try_from(finish.outcome), &finish.error) {
        (Ok(Outcome::Deadline), _) => deadline_exceeded(),
        (_, Some(error)) => ApiError::from(error.clone()),
        (Ok(Outcome::Cancelled), None) => internal("the worker cancelled the request").with_retryable(true),
        _ => internal("the worker failed the request without a reason"),
    }
}

fn waited(patience: Duration) -> ApiError {
    let message = format!("no worker had room within {} s", patience.as_secs_f64());
    ApiError::new(ErrorCode::Overloaded, message).with_retry_after(Duration::from_secs(1))
}

fn over_budget(allowance: u32) -> ApiError {
    let message = format!("a limit of this key's tenant left {allowance} tokens for this answer, and they are used up");
    ApiError::new(ErrorCode::InsufficientQuota, message)
}

fn deadline_exceeded() -> ApiError {
    ApiError::new(ErrorCode::DeadlineExceeded, "the request's deadline has passed")
}

fn internal(reason: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorCode::Internal, reason.to_string())
}

impl From<proto::Error> for ApiError {
    fn from(error: proto::Error) -> Self {
        let mut ours = Self::new(ErrorCode::from_number(error.code), error.message).with_retryable(error.retryable);
        if error.retry_after_ms > 0 {
            ours = ours.with_retry_after(Duration::from_millis(error.retry_after_ms.into()));
        }
        match error.param.is_empty() {
            true => ours,
            false => ours.with_param(error.param),
        }
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

/// Nothing is open any more, for the drain.
pub fn is_idle(plane: &Plane) -> bool {
    plane.open.load(Ordering::Relaxed) == 0
}
