//! One attempt for a part of a request: look up, place, run.
//!
//! Dropping it, at whatever await, withdraws what it has asked and gives back what it was granted.

use std::{sync::Arc, time::Duration};

use opentelemetry::trace::SpanKind;

use super::prepared::Shared;
use crate::{
    blocks,
    error::{ApiError, ErrorCode},
    plane::{
        legs::{Legs, Prefill},
        links::{
            cache::{Found, Lead},
            scheduler::{left_ms, spent_ms, Granted, Lease},
        },
        metrics::LookupLabels,
        model::Model,
        trace::{Parent, Span},
        Plane,
    },
    proto::{
        self,
        kv_handoff::{Fetch, Produce, Role},
        place_request::Ask,
        KvHandoff, Submit, TraceContext,
    },
    schema::Guided,
};

/// So long KV is kept for the worker that answers, at most; it has begun to fetch it long before.
const HANDOFF_KEEP: Duration = Duration::from_secs(30);

/// What a part wants of the mesh, in whichever attempt.
pub struct Wanted {
    pub plane: Arc<Plane>,
    pub shared: Arc<Shared>,
    pub prompt_ids: Vec<u32>,
    pub block_hashes: Vec<u64>,
    pub seeds: Vec<u64>,
    pub max_tokens: u32,
    /// The number of its entry in the books; 0 = none.
    pub booking: u64,
}

/// Where earlier attempts have left it.
pub struct Past<'a> {
    /// The number of this attempt.
    pub epoch: u32,
    /// What is there of the answer, and whose worker made it.
    pub committed: &'a [u32],
    pub pool: &'a str,
    /// Instances that failed it.
    pub avoid: &'a [String],
}

/// What an attempt came to.
pub enum Opened {
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
pub enum Origin {
    /// There is none: only the echo is wanted.
    Nothing,
    /// That variant made it.
    Cache(String),
    /// The configuration has it.
    Configured,
}

impl Wanted {
    /// Whether its answer may be stored, and given again.
    pub fn is_cacheable(&self) -> bool {
        let request = &self.shared.request;
        // The prompt's log-probabilities are not stored.
        let stores_all = !(request.echo && request.logprobs.is_some());
        self.plane.cache.is_some() && request.is_deterministic() && !request.bypass_cache && stores_all
    }

    /// The name of what that model answers, which reads as ours does.
    pub fn key(&self, model: &Model) -> [u8; 32] {
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

    fn submit(&self, past: &Past<'_>) -> Submit {
        let request = &self.shared.request;
        let sampling = &request.sampling;
        Submit {
            request_id: self.shared.request_id.clone(),
            epoch: past.epoch,
            model: self.shared.model.name.clone(),
            prompt_ids: [&self.prompt_ids, past.committed].concat(),
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
                max_tokens: self.max_tokens - past.committed.len() as u32,
                min_tokens: request.stopping.min_tokens.saturating_sub(past.committed.len() as u32),
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
            class: self.shared.class(),
            resumed_tokens: past.committed.len() as u32,
            booking: self.booking,
            cache_salt: self.shared.salt.clone(),
            bypass_prefix_cache: request.bypass_prefix_cache,
            ttft_target_ms: request.ttft_target_ms,
            ..Submit::default()
        }
    }

    fn ask(&self, past: &Past<'_>) -> Ask {
        let (request, committed) = (&self.shared.request, past.committed.len() as u32);
        Ask {
            request_id: self.shared.request_id.clone(),
            tenant: self.shared.tenant.name.clone(),
            class: self.shared.class(),
            pools: match committed {
                0 => self.shared.pools.clone(),
                // What has begun goes on with the same variant.
                _ => vec![past.pool.to_owned()],
            },
            prompt_tokens: self.prompt_ids.len() as u32 + committed,
            block_hashes: self.block_hashes.clone(),
            max_tokens: self.max_tokens - committed,
            n: request.sampling.n,
            avoid_instances: past.avoid.to_vec(),
            session_id: request.session_id.clone().unwrap_or_default(),
            epoch: past.epoch,
            // A resumed answer has had its first token.
            ttft_target_ms: request.ttft_target_ms.filter(|_| committed == 0),
            tpot_target_ms: request.tpot_target_ms,
            shadow: self.shared.is_shadow,
            booking: self.booking,
            alias: self.shared.asked_for().to_owned(),
            committed_tokens: committed,
            may_part: self.may_part(past),
            ..Ask::default()
        }
    }

    /// Whether its prompt may be computed on another worker: what must be done whole in one place may not, nor what a
    /// grammar guides, whose position is the worker's.
    fn may_part(&self, past: &Past<'_>) -> bool {
        let request = &self.shared.request;
        let whole = request.bypass_prefix_cache || (request.echo && request.logprobs.is_some());
        request.sampling.n == 1 && request.guided.is_none() && !whole && past.committed.is_empty()
    }
}

/// See the module's text.
pub struct Attempt {
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
    /// The next one. `looks_up`: the answer may be there already. `parent`: of its stages' spans.
    pub fn new(wanted: &Wanted, past: &Past<'_>, looks_up: bool, parent: Parent) -> Self {
        let shared = &wanted.shared;
        Self {
            plane: wanted.plane.clone(),
            submit: wanted.submit(past),
            ask: wanted.ask(past),
            key: (looks_up && wanted.is_cacheable()).then(|| wanted.key(&shared.model)),
            patience: shared.patience.filter(|_| past.committed.is_empty()),
            parent,
            shared: shared.clone(),
        }
    }

    /// Until it runs, or there is an answer.
    pub async fn open(mut self) -> Result<Opened, ApiError> {
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
            span.set("headrace.place.gives_way", i64::from(reason.gives_way));
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
        if self.is_on_trial(&pool) {
            let unseen = proto::LogprobOptions {
                enabled: true,
                ..proto::LogprobOptions::default()
            };
            self.submit.logprobs.get_or_insert(unseen);
        }
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

    /// How sure that pool's model is of its answer has to be known, and can be.
    fn is_on_trial(&self, pool: &str) -> bool {
        let trial = self.shared.trial.as_ref();
        trial.is_some_and(|trial| trial.judged_tokens > 0 && trial.concern(pool)) && self.plane.tells_logprobs(pool)
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

fn waited(patience: Duration) -> ApiError {
    let message = format!("no worker had room within {} s", patience.as_secs_f64());
    ApiError::new(ErrorCode::Overloaded, message).with_retry_after(Duration::from_secs(1))
}

/// What a tenant's limit left is used up.
pub fn over_budget(allowance: u32) -> ApiError {
    let message = format!("a limit of this key's tenant left {allowance} tokens for this answer, and they are used up");
    ApiError::new(ErrorCode::InsufficientQuota, message)
}
