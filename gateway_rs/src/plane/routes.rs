//! Names that are served by several variants: as they are configured, and as they are now.
//!
//! What a request's difficulty is, in which order variants are asked, and when a threshold or a new version's share moves
//! is `headrace_core::routing`'s; here those rules meet requests, pools and the clock.

use std::{collections::HashMap, fs, sync::Arc, time::Instant};

use headrace_core::routing::{
    choice::{self, Candidate, Order, Why, Wish},
    difficulty::Classifier,
    features::{self, Facts, Features},
    quality::{Quality, Rules},
    rollout::{self, Ended, Rollout, Version},
    DEFAULT_CLASSIFIER,
};
use parking_lot::{Mutex, RwLock};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    config::{AliasConfig, VariantConfig},
    log,
    metrics::{FallbackLabels, Metrics, ModelMetrics, RouteLabels},
    model::Model,
    shadow,
    tenants::Tenant,
};
use crate::{
    error::ApiError,
    request::{ChatMessage, Content, Draft, Prompt, Role},
};

/// All of them.
pub struct Routes {
    models: HashMap<String, Arc<Model>>,
    table: RwLock<Arc<Table>>,
    started: Instant,
}

/// As they were configured last.
#[derive(Default)]
pub struct Table {
    by_name: HashMap<String, Arc<Alias>>,
    /// In the order of the configuration.
    pub names: Vec<String>,
}

impl Table {
    /// The one of that name.
    pub fn get(&self, name: &str) -> Option<&Arc<Alias>> {
        self.by_name.get(name)
    }
}

/// One name.
pub struct Alias {
    /// As configured.
    pub config: AliasConfig,
    /// Best first.
    pub variants: Vec<Variant>,
    /// What requests of that name count under.
    pub series: Arc<ModelMetrics>,
    /// The same for what measures its quality.
    pub shadow_series: Arc<ModelMetrics>,
    state: Arc<Mutex<State>>,
}

/// One of those who serve it.
pub struct Variant {
    /// Its words, and its pool's name.
    pub model: Arc<Model>,
    /// As configured.
    pub config: VariantConfig,
    classifier: Arc<Classifier>,
    /// The one that it is a new version of.
    replaces: Option<usize>,
    is_fallback: bool,
}

/// What changes by itself; of each variant. It outlives a change of the configuration that leaves the variants as they are.
pub struct State {
    /// The measured quality and the threshold.
    pub quality: Vec<Quality>,
    /// Of new versions.
    pub rollouts: Vec<Option<Rollout>>,
    /// Requests meant for each.
    pub meant: Vec<u64>,
    /// Shadows under way, and those that came to nothing.
    pub shadows: usize,
    /// See `shadows`.
    pub shadows_lost: u64,
}

/// Where a request goes.
#[derive(Clone)]
pub struct Route {
    /// None: a model that is asked for by its own name.
    pub alias: Option<Arc<Alias>>,
    /// Whom to ask, in order; never empty.
    pub hops: Vec<Arc<Model>>,
    /// Of these, so many may serve it at once.
    pub equals: usize,
    /// Whom it is meant for.
    pub meant: Arc<Model>,
    /// Why.
    pub why: Why,
    /// What was seen of it.
    pub features: Option<Features>,
    /// Nothing worse than the best will do.
    pub strict: bool,
    /// The agreement that was expected of the one it is meant for.
    pub expected: f32,
}

impl Route {
    /// To one model and nowhere else.
    pub fn only(model: Arc<Model>) -> Self {
        Self {
            alias: None,
            meant: model.clone(),
            hops: vec![model],
            equals: 1,
            why: Why::Only,
            strict: false,
            features: None,
            expected: 1.0,
        }
    }

    /// The pools that may be asked together for that hop, it first: those whose prompts are the same ids, and at first only
    /// those that answer no worse.
    pub fn together(&self, hop: usize) -> Vec<usize> {
        let first = &self.hops[hop];
        let many = if hop == 0 { self.equals } else { self.hops.len() };
        let alike = |other: &usize| *other != hop && self.hops[*other].reads_like(first);
        std::iter::once(hop).chain((0..many).filter(alike)).collect()
    }
}

impl Routes {
    /// None yet.
    pub fn new(models: HashMap<String, Arc<Model>>) -> Self {
        Self {
            models,
            table: RwLock::default(),
            started: Instant::now(),
        }
    }

    /// Puts these in the place of the former ones. The error is for people: which setting, and why.
    pub fn set(&self, aliases: &[AliasConfig], metrics: &Metrics) -> Result<(), String> {
        let former = self.table();
        let mut table = Table::default();
        for config in aliases {
            let former = former.by_name.get(&config.name).map(Arc::as_ref);
            let alias = self.alias(config, former, metrics)?;
            table.names.push(config.name.clone());
            table.by_name.insert(config.name.clone(), Arc::new(alias));
        }
        *self.table.write() = Arc::new(table);
        Ok(())
    }

    /// Those in force.
    pub fn table(&self) -> Arc<Table> {
        self.table.read().clone()
    }

    /// The one of that name.
    pub fn get(&self, name: &str) -> Option<Arc<Alias>> {
        self.table.read().by_name.get(name).cloned()
    }

    /// Seconds since the start: the time that the rules know.
    pub fn now_s(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    fn alias(&self, config: &AliasConfig, former: Option<&Alias>, metrics: &Metrics) -> Result<Alias, String> {
        let name = &config.name;
        let number = |model: &str| config.variants.iter().position(|variant| variant.model == model);
        let variant = |variant: &VariantConfig| {
            let model = self.models.get(&variant.model);
            let model = model.ok_or_else(|| {
                format!(
                    "aliases.{name}: {} is no model that this router has loaded; restart it",
                    variant.model
                )
            })?;
            Ok(Variant {
                model: model.clone(),
                classifier: Arc::new(classifier(variant)?),
                replaces: number(&variant.canary_of),
                is_fallback: config.fallback.contains(&variant.model),
                config: variant.clone(),
            })
        };
        let variants = config
            .variants
            .iter()
            .map(variant)
            .collect::<Result<Vec<_>, String>>()?;
        let same = |former: &&Alias| {
            let pairs = || former.config.variants.iter().zip(&config.variants);
            former.config.variants.len() == config.variants.len()
                && pairs()
                    .all(|(was, is)| was.model == is.model && was.canary_of == is.canary_of && was.weight == is.weight)
        };
        let rules = |variant: &Variant| Rules {
            threshold: variant.config.threshold as f32,
            floor: config.floor as f32,
            ..Rules::default()
        };
        let state = match former.filter(same) {
            Some(former) => {
                let mut state = former.state.lock();
                for (quality, variant) in state.quality.iter_mut().zip(&variants) {
                    quality.set_rules(rules(variant));
                }
                former.state.clone()
            }
            None => {
                let now_s = self.now_s();
                let trial = |variant: &Variant| variant.replaces.map(|_| Rollout::new(rollout::Rules::default()));
                Arc::new(Mutex::new(State {
                    quality: variants
                        .iter()
                        .map(|variant| Quality::new(rules(variant), now_s))
                        .collect(),
                    rollouts: variants.iter().map(trial).collect(),
                    meant: vec![0; variants.len()],
                    shadows: 0,
                    shadows_lost: 0,
                }))
            }
        };
        Ok(Alias {
            series: Arc::new(metrics.of_model(name)),
            shadow_series: Arc::new(metrics.of_shadows(name)),
            config: config.clone(),
            variants,
            state,
        })
    }

    /// Where a request goes. `ready`: whether a pool of that name takes requests. Errors: MODEL_NOT_FOUND for ids of a
    /// tokenizer that no variant has.
    pub fn choose(
        &self,
        alias: &Arc<Alias>,
        tenant: &Tenant,
        draft: &Draft,
        ready: impl Fn(&str) -> bool,
    ) -> Result<Route, ApiError> {
        let wish = draft.quality.unwrap_or(alias.config.quality);
        let features = (wish == Wish::Routed && alias.variants.len() > 1).then(|| seen(draft));
        // Ids mean something in one vocabulary only: the best variant's, which is the one that /tokenize speaks.
        let has_ids = !draft.logit_bias.is_empty()
            || !draft.stop_ids.is_empty()
            || draft.prompts.iter().any(|prompt| matches!(prompt, Prompt::Ids(_)));
        let best = &alias.variants[0].model;
        let now_s = self.now_s();
        let mut state = alias.state.lock();
        let candidate = |(number, variant): (usize, &Variant)| Candidate {
            permitted: !has_ids || variant.model.tokenizer.hash() == best.tokenizer.hash(),
            ready: ready(&variant.model.name),
            quality: state.believed(number, variant),
            expected: features
                .as_ref()
                .map_or(0.0, |features| variant.classifier.agreement(features)),
            threshold: state.quality[number].threshold(now_s),
            is_fallback: variant.is_fallback,
            replaces: variant.replaces.map(|of| {
                let share = variant.config.weight as f32;
                (
                    of,
                    state.rollouts[number]
                        .as_ref()
                        .map_or(share, |rollout| rollout.share(share)),
                )
            }),
        };
        let candidates: Vec<Candidate> = alias.variants.iter().enumerate().map(candidate).collect();
        let dice = dice(&alias.config.name, &tenant.name, &draft.session_id);
        let order = choice::order(&candidates, wish, tenant.quality_floor(), dice);
        let order: Order = order.ok_or_else(|| ApiError::model_not_found(&draft.model))?;
        state.meant[order.meant] += 1;
        drop(state);
        let model = |number: usize| alias.variants[number].model.clone();
        Ok(Route {
            hops: order.hops.iter().map(|number| model(*number)).collect(),
            equals: order.equals,
            meant: model(order.meant),
            why: order.why,
            strict: wish == Wish::Full,
            features,
            expected: candidates[order.meant].expected,
            alias: Some(alias.clone()),
        })
    }
}

impl Variant {
    /// It has a quality of its own; a new version is to have its old one's.
    pub fn is_own(&self) -> bool {
        self.replaces.is_none()
    }
}

impl State {
    fn believed(&self, number: usize, variant: &Variant) -> f32 {
        /// Fewer say nothing.
        const ENOUGH: usize = 20;
        let measured = self.quality[number].measured();
        match measured.count >= ENOUGH {
            true => measured.mean as f32,
            false => variant.config.quality as f32,
        }
    }
}

impl Alias {
    /// The number of the variant of that name.
    pub fn number(&self, model: &str) -> Option<usize> {
        self.variants.iter().position(|variant| variant.model.name == model)
    }

    /// It answers with less quality than the best one.
    pub fn is_smaller(&self, model: &str) -> bool {
        let number = self.number(model);
        number.is_some_and(|number| number > 0 && self.variants[number].is_own())
    }

    /// Shows what was measured.
    pub fn show(&self, metrics: &Metrics, now_s: f64) {
        let mut state = self.state.lock();
        for (number, variant) in self.variants.iter().enumerate().skip(1) {
            if variant.is_own() {
                let measured = state.quality[number].measured();
                let shown = metrics.quality_of(&shadow::labels(self, number));
                shown.agreement.set(measured.mean);
                shown.low.set(measured.low);
                shown.high.set(measured.high);
                shown.samples.set(measured.count as i64);
                shown.threshold.set(state.quality[number].threshold(now_s).into());
            }
        }
    }

    /// How it stands, for people and machines. `ready`: workers of a pool that take requests.
    pub fn status(&self, now_s: f64, ready: impl Fn(&str) -> u32) -> serde_json::Value {
        let mut state = self.state.lock();
        let state = &mut *state;
        let variant = |(number, variant): (usize, &Variant)| {
            let measured = state.quality[number].measured();
            let rollout = state.rollouts[number].as_ref();
            let back = rollout.and_then(|rollout| rollout.rolled_back());
            let share = variant.config.weight as f32;
            serde_json::json!({
                "model": variant.model.name,
                "ready_workers": ready(&variant.model.name),
                "meant": state.meant[number],
                "configured_quality": variant.config.quality,
                "threshold": state.quality[number].threshold(now_s),
                "threshold_moves": state.quality[number].moves(),
                "agreement": {"mean": measured.mean, "low": measured.low, "high": measured.high, "samples": measured.count},
                "gpu_hour_dollars": variant.config.gpu_hour_dollars,
                "canary_of": variant.config.canary_of,
                "share": rollout.map(|rollout| rollout.share(share)),
                "requests_and_failures": rollout.map(|rollout| rollout.seen(Version::New)),
                "rolled_back": back.map(|back| &back.why),
            })
        };
        let variants: Vec<_> = self.variants.iter().enumerate().map(variant).collect();
        serde_json::json!({
            "name": self.config.name, "floor": self.config.floor, "measure": self.config.agreement,
            "shadow_share": self.config.shadow_share, "shadows": state.shadows, "shadows_lost": state.shadows_lost,
            "variants": variants,
        })
    }

    /// What changes by itself.
    pub fn state(&self) -> parking_lot::MutexGuard<'_, State> {
        self.state.lock()
    }

    /// A request of that name has been served, or not, by that variant.
    pub fn ended(&self, now_s: f64, variant: &str, ended: Ended) {
        let Some(number) = self.number(variant) else { return };
        let trial = |(new, variant): (usize, &Variant)| match variant.replaces {
            Some(_) if new == number => Some((new, Version::New)),
            Some(old) if old == number => Some((new, Version::Old)),
            _ => None,
        };
        let trials: Vec<_> = self.variants.iter().enumerate().filter_map(trial).collect();
        if trials.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        for (new, version) in trials {
            let Some(rollout) = &mut state.rollouts[new] else {
                continue;
            };
            if rollout.ended(now_s, version, ended) {
                let why = rollout.rolled_back().map_or("", |back| &back.why);
                let model = &self.variants[new].model.name;
                log::warn(&format!("{}: {model} gets no more requests: {why}", self.config.name));
            }
        }
    }
}

/// As configured. The error is for people.
pub fn classifier(variant: &VariantConfig) -> Result<Classifier, String> {
    let path = &variant.difficulty;
    let text = match path.as_os_str().is_empty() {
        true => DEFAULT_CLASSIFIER.to_owned(),
        false => fs::read_to_string(path)
            .map_err(|error| format!("aliases: difficulty: cannot read {}: {error}", path.display()))?,
    };
    Classifier::parse(&text).map_err(|error| format!("aliases: difficulty: {}: {error}", path.display()))
}

/// What can be seen of a request, in the classifier's terms.
pub fn seen(draft: &Draft) -> Features {
    let mut facts = Facts {
        max_tokens: draft.max_tokens.and_then(|most| u32::try_from(most).ok()),
        guided: draft.guided.is_some(),
        ..Facts::default()
    };
    let last = match draft.prompts.first() {
        Some(Prompt::Text(text)) => {
            facts.messages = 1;
            facts.bytes = text.len();
            text.as_str()
        }
        Some(Prompt::Chat(chat)) => {
            facts.messages = chat.messages.len();
            facts.bytes = chat.messages.iter().map(bytes).sum();
            facts.tools = !chat.tools.is_empty();
            let asked = chat.messages.iter().rev().find(|message| message.role == Role::User);
            asked.or(chat.messages.last()).map_or("", text)
        }
        Some(Prompt::Ids(ids)) => {
            facts.messages = 1;
            facts.bytes = ids.len() * 4;
            ""
        }
        None => "",
    };
    features::of(last, &facts)
}

fn bytes(message: &ChatMessage) -> usize {
    match &message.content {
        Content::Absent => 0,
        Content::Text(text) => text.len(),
        Content::Parts(parts) => parts.iter().map(String::len).sum(),
    }
}

fn text(message: &ChatMessage) -> &str {
    match &message.content {
        Content::Absent => "",
        Content::Text(text) => text,
        Content::Parts(parts) => parts.last().map_or("", String::as_str),
    }
}

/// From 0 to 1, the same for all requests of a session.
fn dice(alias: &str, tenant: &str, session: &str) -> f32 {
    match session.is_empty() {
        true => rand::random(),
        false => {
            let named = [alias, "\0", tenant, "\0", session].concat();
            // As many bits as an f32 holds.
            (xxh3_64(named.as_bytes()) >> 40) as f32 / (1_u64 << 24) as f32
        }
    }
}

/// Counts where a request went and whether that was where it was meant to go.
pub fn count(metrics: &Metrics, route: &Route, variant: &str, fallback: &'static str) {
    let Some(alias) = &route.alias else { return };
    let labels = RouteLabels {
        model: alias.config.name.clone(),
        variant: variant.to_owned(),
        why: route.why.name(),
    };
    metrics.routed.get_or_create(&labels).inc();
    if !fallback.is_empty() {
        let labels = FallbackLabels {
            model: alias.config.name.clone(),
            reason: fallback,
        };
        metrics.fallbacks.get_or_create(&labels).inc();
    }
}
