//! How far a request has fallen along its route, and what may still serve it. Pure.

use std::sync::Arc;

use super::part::Left;
use crate::{
    error::ErrorCode,
    plane::routes::{Alias, Route},
};

/// What serves when no variant does, as the configuration names it.
pub const CACHED: &str = "cached";
pub const DEGRADED: &str = "degraded";

/// Why a request falls to the next variant, for people; empty for what no other variant would mend.
pub fn reason(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::Overloaded => "overloaded",
        ErrorCode::Unavailable | ErrorCode::WorkerLost | ErrorCode::Internal => "failed",
        ErrorCode::ContextLengthExceeded => "too_long",
        _ => "",
    }
}

/// How far a request has fallen along its route.
#[derive(Default)]
pub struct Fell {
    /// The hop that it is at, and by their bits those that are of no use any more.
    pub hop: usize,
    tried: u64,
    /// Why it fell, for people; empty: it did not.
    pub reason: &'static str,
    /// What serves when no variant does was tried.
    pub cached: bool,
    pub degraded: bool,
    /// Its first answer was no help.
    pub escalated: bool,
    /// Ids thrown away before the last hop.
    pub wasted_tokens: u32,
    /// Instances that failed it, and attempts that were made.
    pub avoid: Vec<String>,
    pub epoch: u32,
}

impl Fell {
    /// What one part of it leaves behind.
    pub fn take(&mut self, left: &Left) {
        self.wasted_tokens += left.wasted_tokens;
        self.avoid.extend_from_slice(&left.avoid);
        self.epoch = self.epoch.max(left.epoch);
    }

    /// That hop did not serve it. `pool`: whose worker failed it; empty when none of those that were asked had one for it.
    pub fn give_up(&mut self, route: &Route, pool: &str) {
        self.tried |= 1 << self.hop;
        let asked = route.together(self.hop);
        let failed = |hop: &usize| pool.is_empty() || route.hops[*hop].name == pool;
        asked.into_iter().filter(failed).for_each(|hop| self.tried |= 1 << hop);
    }

    /// The first hop that may still be of use.
    pub fn next(&self, route: &Route) -> Option<usize> {
        (0..route.hops.len()).find(|hop| self.tried & (1 << hop) == 0)
    }

    /// Something is left, beside the pools that are asked now, that could serve it.
    pub fn has_more(&self, route: &Route) -> bool {
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
