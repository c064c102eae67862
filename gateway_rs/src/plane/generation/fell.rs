//! How far a request has fallen along its route, and what may still serve it. Pure.

use std::sync::Arc;

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
    /// Its first answer was not good enough. Until something fails, only the best variant is asked then.
    pub escalated: bool,
    only_best: bool,
    /// Ids thrown away before the last hop.
    pub wasted_tokens: u32,
    /// Instances that failed it, and attempts that were made.
    pub avoid: Vec<String>,
    pub epoch: u32,
}

/// What a part leaves behind.
pub struct Left {
    /// Whose worker had it; empty: nobody's.
    pub pool: String,
    /// Instances that failed it.
    pub avoid: Vec<String>,
    /// Attempts that were made.
    pub epoch: u32,
    /// Ids that came.
    pub wasted_tokens: u32,
}

/// Which hop of its route a request is made ready for.
#[derive(Clone, Debug)]
pub struct Turn {
    /// Those whose pools are asked, that one first.
    pub hops: Vec<usize>,
    /// Something else could serve it.
    pub has_more: bool,
    /// The best variant's, where it may be asked after a smaller one has answered.
    pub escalates_to: Option<usize>,
}

impl Fell {
    /// What one part of it leaves behind.
    pub fn take(&mut self, left: &Left) {
        self.wasted_tokens += left.wasted_tokens;
        self.avoid.extend_from_slice(&left.avoid);
        self.epoch = self.epoch.max(left.epoch);
    }

    /// Its first answer is not good enough: the best variant, at that hop, is asked instead.
    pub fn escalate(&mut self, hop: usize, why: &'static str, left: &Left) {
        self.take(left);
        (self.escalated, self.only_best) = (true, true);
        (self.hop, self.reason) = (hop, why);
    }

    /// That hop was of no use.
    pub fn has_tried(&self, hop: usize) -> bool {
        self.tried & (1 << hop) != 0
    }

    /// The hops whose pools are asked now, the present one first.
    fn asked(&self, route: &Route) -> Vec<usize> {
        match self.only_best {
            true => vec![self.hop],
            false => route.together(self.hop),
        }
    }

    /// What it is to be made ready for.
    pub fn turn(&self, route: &Route) -> Turn {
        let best = route.alias.as_ref().map(|alias| &alias.variants[0].model.name);
        let best = best.and_then(|best| route.hops.iter().position(|model| model.name == *best));
        Turn {
            hops: self.asked(route),
            has_more: self.has_more(route),
            escalates_to: best.filter(|best| !self.escalated && !self.has_tried(*best)),
        }
    }

    /// That hop did not serve it. `pool`: whose worker failed it; empty when none of those that were asked had one for it.
    pub fn give_up(&mut self, route: &Route, pool: &str) {
        self.tried |= 1 << self.hop;
        let asked = self.asked(route);
        self.only_best = false;
        let failed = |hop: &usize| pool.is_empty() || route.hops[*hop].name == pool;
        asked.into_iter().filter(failed).for_each(|hop| self.tried |= 1 << hop);
    }

    /// The first hop that may still be of use.
    pub fn next(&self, route: &Route) -> Option<usize> {
        (0..route.hops.len()).find(|hop| !self.has_tried(*hop))
    }

    /// Something is left, beside the pools that are asked now, that could serve it.
    fn has_more(&self, route: &Route) -> bool {
        let asked = self.asked(route);
        let asked = asked.into_iter().fold(self.tried, |tried, hop| tried | 1 << hop);
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
