//! The router's data plane: the only part of the crate that does network.
//!
//! A request's way: a door ([`http`] or [`grpc`]) reads and validates it, [`generation`] carries it through prepare, look
//! up, place and run over the [`links`], [`answer`] turns the ids that come back into text and decides the end, and the
//! door writes it out. Nothing here takes Python's lock.
//!
//! What is deliberately absent: a task or a channel for each request (a request is polled by the connection that waits for
//! it), a scan of the fleet, an unbounded queue.

pub mod answer;
mod arriving;
pub mod batches;
mod booking;
pub mod compute;
pub mod config;
mod files;
pub mod generation;
pub mod grpc;
pub mod http;
pub mod legs;
pub mod links;
pub mod log;
pub mod metrics;
pub mod model;
pub mod open;
mod opening;
pub mod routes;
pub mod server;
pub mod shadow;
pub mod sse;
pub mod tenants;
pub mod tls;
pub mod trace;
mod usage;

use std::{
    collections::HashMap,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        Arc,
    },
    time::Duration,
};

use headrace_core::blocks::Blocks;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

use self::{
    batches::Batches,
    compute::Compute,
    config::PlaneConfig,
    links::{cache::Cache, scheduler::Scheduler, worker::Workers},
    metrics::{Metrics, ModelMetrics},
    model::Model,
    routes::{Route, Routes},
    tenants::{Tenant, Tenants},
    tls::Tls,
    trace::Tracing,
};
use crate::{
    error::{ApiError, ErrorCode},
    proto::{fleet_view::Pool, ModelDescription},
    request::{Draft, Limits, Prompt},
};

/// What all requests share.
pub struct Plane {
    /// As checked at start.
    pub config: PlaneConfig,
    /// By name.
    pub models: HashMap<String, Arc<Model>>,
    /// In the order of the configuration.
    pub model_names: Vec<String>,
    /// Names that several of them serve.
    pub routes: Routes,
    /// Pools as they were when they last had workers, by the names of their models.
    described: RwLock<HashMap<String, Arc<Pool>>>,
    /// Who asks.
    pub tenants: Arc<Tenants>,
    /// "Who runs it, and when?"
    pub scheduler: Arc<Scheduler>,
    /// "What do we already have?"; None = no cache.
    pub cache: Option<Arc<Cache>>,
    /// "Run it."
    pub workers: Arc<Workers>,
    /// Files and batches; None = they are not kept here.
    pub batches: Option<Batches>,
    /// Where long bodies and prompts are worked on.
    pub compute: Compute,
    /// For Prometheus.
    pub metrics: Metrics,
    /// Of these, each model's; and those of models that are not there.
    pub series: HashMap<String, Arc<ModelMetrics>>,
    /// See `series`.
    pub other_series: Arc<ModelMetrics>,
    /// For OpenTelemetry.
    pub tracing: Tracing,
    /// Nothing new is taken.
    pub draining: AtomicBool,
    /// The grace is over: what still runs is ended.
    pub stopping: CancellationToken,
    /// The same, set before it.
    pub is_stopping: AtomicBool,
    /// Requests in the router now.
    pub open: AtomicUsize,
    /// Unix time of the start, for `created` of models.
    pub started_s: u64,
}

impl Plane {
    /// Opens the links, over TLS when there is one; must be called inside the runtime.
    pub fn start(
        config: PlaneConfig,
        models: Vec<Model>,
        tls: Option<Arc<Tls>>,
        compute: Compute,
    ) -> Result<Arc<Self>, String> {
        let telemetry = &config.telemetry;
        let tracing = Tracing::start(&telemetry.otlp_endpoint, telemetry.sample_ratio, telemetry.log_content)?;
        let model_names: Vec<String> = models.iter().map(|model| model.name.clone()).collect();
        let models: HashMap<_, _> = models
            .into_iter()
            .map(|model| (model.name.clone(), Arc::new(model)))
            .collect();
        let tokenizers: HashMap<String, String> = models
            .values()
            .map(|model| (model.name.clone(), model.tokenizer.hash().to_owned()))
            .collect();
        let accept = Box::new(move |description: &ModelDescription| same_tokenizer(&tokenizers, description));
        let router_id = config.router_id.clone();
        let metrics = Metrics::default();
        let limits = headrace_core::index::Limits {
            bytes: config.max_index_bytes,
            ..Default::default()
        };
        let blocks = Arc::new(RwLock::new(Blocks::new(limits, rand::random())));
        let routes = Routes::new(models.clone());
        routes.set(&config.aliases, &metrics)?;
        Ok(Arc::new(Self {
            tenants: Arc::new(Tenants::load(&config.tenants_file)?),
            scheduler: Scheduler::start(router_id.clone(), config.scheduler.clone(), tls.clone(), blocks.clone()),
            cache: (!config.cache.is_empty()).then(|| Cache::start(config.cache.clone(), tls.clone(), blocks)),
            workers: Arc::new(Workers::new(router_id, config.max_unread_tokens, accept, tls)),
            batches: config.batches.as_ref().map(Batches::start),
            compute,
            series: model_names
                .iter()
                .map(|name| (name.clone(), Arc::new(metrics.of_model(name))))
                .collect(),
            other_series: Arc::new(metrics.of_model("other")),
            routes,
            described: RwLock::default(),
            metrics,
            tracing,
            draining: AtomicBool::new(false),
            stopping: CancellationToken::new(),
            is_stopping: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            started_s: unix_s(),
            models,
            model_names,
            config,
        }))
    }

    /// The model of that name, or the best that serves it, if that tenant may know of it. Errors: MODEL_NOT_FOUND.
    pub fn model_for(&self, tenant: &Tenant, name: &str) -> Result<Arc<Model>, ApiError> {
        let best = || self.routes.get(name).map(|alias| alias.variants[0].model.clone());
        let found = tenant.sees(name).then(|| self.models.get(name).cloned().or_else(best));
        found.flatten().ok_or_else(|| ApiError::model_not_found(name))
    }

    /// Where a request goes. Errors: MODEL_NOT_FOUND.
    pub fn route(&self, tenant: &Tenant, draft: &Draft) -> Result<Route, ApiError> {
        if let Some(model) = self.models.get(&draft.model) {
            return Ok(Route::only(model.clone()));
        }
        let alias = self.routes.get(&draft.model);
        let alias = alias.ok_or_else(|| ApiError::model_not_found(&draft.model))?;
        let fleet = self.scheduler.fleet();
        let ready = |pool: &str| fleet.get(pool).is_some_and(|pool| pool.ready_workers > 0);
        self.routes.choose(&alias, tenant, draft, ready)
    }

    /// The names that clients can ask for, and the best model behind each; names with several variants first.
    pub fn names(&self) -> Vec<(String, Arc<Model>)> {
        let table = self.routes.table();
        let aliases = table
            .names
            .iter()
            .filter_map(|name| Some((name.clone(), table.get(name)?.variants[0].model.clone())));
        let models = self
            .model_names
            .iter()
            .filter_map(|name| Some((name.clone(), self.models.get(name)?.clone())));
        aliases.chain(models).collect()
    }

    /// The pool that serves a model, as it was described last: what its workers answered may be given again after they left.
    pub fn described(&self, model: &str) -> Option<Arc<Pool>> {
        let Some(pool) = self.pool(model).filter(|pool| pool.description.is_some()) else {
            return self.described.read().get(model).cloned();
        };
        let known = |known: &Arc<Pool>| Arc::ptr_eq(known, &pool) || known.description == pool.description;
        if !self.described.read().get(model).is_some_and(known) {
            self.described.write().insert(model.to_owned(), pool.clone());
        }
        Some(pool)
    }

    /// The weights behind a pool, and how they are run; empty when no worker has said.
    pub fn version(&self, pool: &str) -> String {
        let pool = self.described(pool);
        let description = pool.as_ref().and_then(|pool| pool.description.as_ref());
        description.map_or_else(String::new, |description| {
            let (engine, weights) = (&description.engine, &description.weights_sha256);
            format!("{engine} {weights} {}", description.quantization)
        })
    }

    /// Whether a pool's workers tell log-probabilities.
    pub fn tells_logprobs(&self, pool: &str) -> bool {
        let pool = self.described(pool);
        let description = pool.as_ref().and_then(|pool| pool.description.as_ref());
        let able = description.and_then(|description| description.capabilities.as_ref());
        able.is_some_and(|able| able.logprobs)
    }

    /// The pool that serves a model, as the scheduler last described it.
    pub fn pool(&self, model: &str) -> Option<Arc<Pool>> {
        self.scheduler.pool(model)
    }

    /// The ids of a text or a chat, and the model's context. Texts may be longer than the context here, by a bounded factor.
    pub async fn tokenize(&self, model: &Arc<Model>, prompt: Prompt) -> Result<(Vec<u32>, u32), ApiError> {
        let context_tokens = self.context_tokens(model);
        let (model, most) = (model.clone(), context_tokens.saturating_mul(16));
        let bytes = match &prompt {
            Prompt::Text(text) => text.len(),
            Prompt::Chat(_) | Prompt::Ids(_) => usize::MAX,
        };
        let work = move || model.encode_prompt(&prompt, most, "messages");
        let ids = self.compute.run(bytes, work).await?;
        Ok((ids, context_tokens))
    }

    /// Prompt and answer together: what the model was made for, or less where its workers hold less.
    pub fn context_tokens(&self, model: &Model) -> u32 {
        let pool = self.pool(&model.name);
        let limit = pool
            .as_ref()
            .and_then(|pool| pool.description.as_ref())
            .map_or(0, |description| description.context_tokens);
        match limit {
            0 => model.context_tokens,
            limit => limit.min(model.context_tokens),
        }
    }

    /// The bounds that a request for that model is checked against.
    pub fn limits(&self, model: &Model) -> Limits {
        Limits {
            max_choices: self.config.max_choices,
            max_deadline: Duration::try_from_secs_f64(self.config.max_deadline_s).unwrap_or(Duration::MAX),
            sampling: model.sampling.clone(),
            ..Limits::new(model.vocab_size, self.context_tokens(model))
        }
    }

    /// Whether a pool has workers that take requests.
    pub fn is_served(&self, pool: &str) -> bool {
        self.pool(pool).is_some_and(|pool| pool.ready_workers > 0)
    }

    /// Whether a request would be served now.
    pub fn is_ready(&self) -> bool {
        !self.draining.load(Ordering::Relaxed)
            && self.scheduler.is_connected()
            && self
                .scheduler
                .fleet()
                .values()
                .any(|pool| pool.ready_workers > 0 && self.models.contains_key(&pool.name))
    }

    /// Nothing is open any more, for the drain.
    pub fn is_idle(&self) -> bool {
        self.open.load(Ordering::Relaxed) == 0
    }

    /// The grace is over.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.stopping.cancel();
    }

    /// Returns a moment after the grace is over: those who were told of it have had time to read it.
    pub async fn stopped(&self) {
        self.stopping.cancelled().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }

    /// Errors: DRAINING when the process is stopping.
    pub fn admit(&self) -> Result<(), ApiError> {
        if self.draining.load(Ordering::Relaxed) {
            let error = ApiError::new(ErrorCode::Draining, "this router is stopping");
            return Err(error.with_retry_after(Duration::from_secs(1)));
        }
        Ok(())
    }
}

fn same_tokenizer(tokenizers: &HashMap<String, String>, description: &ModelDescription) -> Result<(), String> {
    match tokenizers.get(&description.model) {
        Some(ours) if description.tokenizer_sha256.is_empty() || *ours == description.tokenizer_sha256 => Ok(()),
        Some(ours) => {
            let reason = format!(
                "worker's tokenizer for model {} is {}, the router's is {ours}",
                description.model, description.tokenizer_sha256
            );
            log::warn(&reason);
            Err(reason)
        }
        None => Ok(()),
    }
}

/// Unix time.
pub fn unix_s() -> u64 {
    since_1970().as_secs()
}

/// The same, with its fraction.
pub fn unix_s_f64() -> f64 {
    since_1970().as_secs_f64()
}

fn since_1970() -> Duration {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default()
}
