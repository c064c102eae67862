//! A smaller variant's answer on trial, where its alias is configured so: it is held back until it is known whether the best
//! variant's is given instead.
//!
//! Two things are held against it: that the model is not sure of its first ids, and that it only says that it cannot help.
//! The first is known early, so streams wait for it too; the second is looked at where nothing leaves before the end anyway.
//! Both runs are paid for.

use std::sync::Arc;

use headrace_core::routing::refusal::is_refusal;

use super::fell::Turn;
use crate::{
    plane::{
        config::Escalate,
        routes::{Alias, Route},
    },
    request::{Door, Request},
};

/// What one request's answer is held against.
pub struct Rules {
    alias: Arc<Alias>,
    /// The best variant's.
    pub hop: usize,
    /// A refusal.
    refusal: bool,
    /// Less confidence than this, in so many first ids; 0 ids: it is not asked for.
    least_confidence: f32,
    pub judged_tokens: u32,
}

/// What is known so far.
pub enum Verdict {
    /// Not enough.
    Open,
    /// It stands.
    Stands,
    /// The best variant is to answer, for that reason.
    Falls(&'static str),
}

impl Rules {
    /// None: whatever comes may leave at once.
    pub fn of(request: &Request, route: &Route, turn: &Turn) -> Option<Self> {
        let (alias, hop) = (route.alias.as_ref()?, turn.escalates_to?);
        // One answer, of which nothing leaves ahead of it.
        if request.prompts.len() != 1 || request.sampling.n != 1 || request.echo {
            return None;
        }
        if !turn.hops.iter().any(|hop| alias.is_smaller(&route.hops[*hop].name)) {
            return None;
        }
        let config = &alias.config;
        let is_stream = request.stream || request.door == Door::Native;
        let refusal = config.escalate == Escalate::Refusal && !is_stream;
        // Ids that a grammar forces say nothing of the model.
        let judged = config.escalate_below > 0.0 && request.guided.is_none();
        (refusal || judged).then(|| Self {
            alias: alias.clone(),
            hop,
            refusal,
            least_confidence: config.escalate_below as f32,
            judged_tokens: if judged { config.escalate_tokens } else { 0 },
        })
    }

    /// The best variant's pool.
    pub fn best(&self) -> &str {
        &self.alias.variants[0].model.name
    }

    /// Whether that pool's answers are on trial.
    pub fn concern(&self, pool: &str) -> bool {
        self.alias.is_smaller(pool)
    }

    /// Of what has come from that pool; empty: none is known yet, or none made it. `confidence`: None before it is known.
    pub fn judge(
        &self,
        pool: &str,
        is_over: bool,
        confidence: impl FnOnce() -> Option<f32>,
        text: impl FnOnce() -> Option<String>,
    ) -> Verdict {
        if pool.is_empty() && !is_over {
            return Verdict::Open;
        }
        if !self.concern(pool) {
            return Verdict::Stands;
        }
        if self.judged_tokens > 0 {
            match confidence() {
                None => return Verdict::Open,
                Some(confidence) if confidence < self.least_confidence => return Verdict::Falls("low_confidence"),
                Some(_) => {}
            }
        }
        match (self.refusal, is_over) {
            (false, _) => Verdict::Stands,
            (true, false) => Verdict::Open,
            (true, true) if text().is_some_and(|text| is_refusal(&text)) => Verdict::Falls("refusal"),
            (true, true) => Verdict::Stands,
        }
    }
}
