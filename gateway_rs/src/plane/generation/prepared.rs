//! A request made ready for one hop of its route: the model, the pools that are asked, and its prompts as the rest of the
//! mesh knows them.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{fell::Turn, trial::Rules};
use crate::{
    blocks,
    error::ApiError,
    plane::{model::Model, routes::Route, tenants::Tenant, Plane},
    proto,
    request::{ChatMessage, Class, Content, Prompt, Request},
};

/// What all attempts for a request need, whoever serves it.
pub struct Base {
    pub request: Request,
    pub route: Route,
    pub tenant: Arc<Tenant>,
    pub request_id: String,
    /// Of everything that is kept of its prompts.
    pub salt: Vec<u8>,
    pub arrived: Instant,
    pub deadline: Option<Instant>,
    pub is_shadow: bool,
}

/// What all attempts need for one hop of the route.
pub struct Shared {
    pub base: Arc<Base>,
    pub model: Arc<Model>,
    /// The pools that are asked, in order; the model's own first.
    pub pools: Vec<String>,
    /// So long a worker is waited for; then the next hop is taken.
    pub patience: Option<Duration>,
    pub context_tokens: u32,
    pub eos_ids: Vec<u32>,
    /// The weights and how they are run.
    pub model_version: String,
    pub block_tokens: u32,
    /// What a smaller variant's answer is held against before it leaves; None: nothing.
    pub trial: Option<Rules>,
}

impl std::ops::Deref for Shared {
    type Target = Base;

    fn deref(&self) -> &Base {
        &self.base
    }
}

impl Shared {
    /// The model, as the client named it.
    pub fn asked_for(&self) -> &str {
        let alias = self.route.alias.as_ref();
        alias.map_or(&self.model.name, |alias| &alias.config.name)
    }

    /// Its class, on the wire.
    pub fn class(&self) -> i32 {
        let class = match self.request.class {
            Class::Interactive => proto::RequestClass::Interactive,
            Class::Standard => proto::RequestClass::Standard,
            Class::Batch => proto::RequestClass::Batch,
        };
        class as i32
    }

    /// Who asks, for what: the part of a settlement that is known before.
    pub fn settlement(&self) -> proto::Settlement {
        let request = &self.request;
        proto::Settlement {
            request_id: self.request_id.clone(),
            // Nobody asked for what only measures quality, and nobody pays.
            tenant: match self.is_shadow {
                true => String::new(),
                false => self.tenant.name.clone(),
            },
            session_id: request.session_id.clone().unwrap_or_default(),
            alias: self.asked_for().to_owned(),
            pool: self.model.name.clone(),
            class: self.class(),
            best_pool: match &self.route.alias {
                Some(alias) => alias.variants[0].model.name.clone(),
                None => String::new(),
            },
            shadow: self.is_shadow,
            ..proto::Settlement::default()
        }
    }

    fn new(plane: &Plane, base: &Arc<Base>, turn: Turn) -> Self {
        let route = &base.route;
        let Turn { hops, has_more, .. } = &turn;
        let model = route.hops[hops[0]].clone();
        let pool = plane.described(&model.name);
        let description = pool.as_ref().and_then(|pool| pool.description.as_ref());
        let more_eos_ids = description.map_or(&[][..], |description| &description.eos_ids);
        let mut eos_ids = model.eos_ids.clone();
        eos_ids.extend(more_eos_ids.iter().filter(|id| !model.eos_ids.contains(id)));
        let patience = route.alias.as_ref().map_or(0.0, |alias| alias.config.fallback_after_s);
        Self {
            pools: hops.iter().map(|hop| route.hops[*hop].name.clone()).collect(),
            patience: (*has_more && patience > 0.0).then(|| Duration::from_secs_f64(patience)),
            context_tokens: plane.context_tokens(&model),
            eos_ids,
            model_version: plane.version(&model.name),
            block_tokens: description.map_or(0, |description| description.block_tokens),
            model,
            trial: Rules::of(&base.request, route, &turn),
            base: base.clone(),
        }
    }
}

/// A prompt as the rest of the mesh knows it.
pub struct PromptIds {
    pub ids: Vec<u32>,
    /// Of its full blocks.
    pub block_hashes: Vec<u64>,
}

/// Makes the request ready for a hop of its route.
pub async fn turn(plane: Arc<Plane>, base: Arc<Base>, turn: Turn) -> Result<(Arc<Shared>, Vec<PromptIds>), ApiError> {
    let shared = Arc::new(Shared::new(&plane, &base, turn));
    let prompts = encode(&plane, &shared).await?;
    Ok((shared, prompts))
}

/// The prompts' ids and blocks; long ones are worked on away from the threads that serve streams.
async fn encode(plane: &Plane, shared: &Arc<Shared>) -> Result<Vec<PromptIds>, ApiError> {
    let bytes: usize = shared.request.prompts.iter().map(weight).sum();
    let shared = shared.clone();
    let work = move || {
        let lora = shared.request.lora.as_deref().unwrap_or_default();
        let seed = blocks::Seed::new(&shared.model.name, lora, &shared.salt);
        let encode = |prompt| {
            let ids = shared
                .model
                .encode(&shared.request, prompt, &shared.salt, shared.context_tokens)?;
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
            let content = |message: &ChatMessage| match &message.content {
                Content::Absent => 0,
                Content::Text(text) => text.len(),
                Content::Parts(parts) => parts.iter().map(String::len).sum(),
            };
            // Rendering costs something for each message, however short.
            chat.messages.iter().map(|message| content(message) + 64).sum()
        }
    }
}
