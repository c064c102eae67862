//! Credits: room on workers that the scheduler lends to routers, so that they place requests without asking.
//!
//! While nothing waits, a question costs a round trip and answers what was clear before. So the scheduler gives each router
//! a *share* of each worker's free room: a limit on what that router may have running there by its own decision. The router
//! places within it at once, and reports what it has placed and what has ended. When a share is used up, or the scheduler
//! has taken it back because requests wait, the router asks as before, and the scheduler alone decides whose turn it is.
//!
//! Two sides that only know each other's messages: [`Ledger`] (scheduler) and [`Holder`] (router). Each direction of their
//! stream keeps its order; nothing is assumed of how long a message takes. What makes overcommitting impossible:
//!
//! - a share is a limit and not a number of permits, so room that comes free at the router is its own again without a word;
//! - shares are numbered, and the router says which it has last taken in, *after* all that it has placed before. Until then
//!   the scheduler counts the largest limit that may still be in force there;
//! - so what a router has running is never more than `max(limits that may be in force, what it has reported)`, and those
//!   sums, with all leases that were granted, are kept below the worker's capacity.

mod holder;
mod ledger;
#[cfg(test)]
mod tests;

use crate::scheduler::events::LeaseId;

pub use self::{
    holder::{Grantor, Holder, Outlook, Taken, Wanted},
    ledger::{Ledger, Share},
};

/// Leases that a router makes are told apart from the scheduler's by this bit.
pub const OWN_LEASE: LeaseId = 1 << 63;

/// Room on a worker: lent, used or free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Answers generated at once.
    pub choices: u64,
    /// Tokens of KV.
    pub kv_tokens: u64,
}

impl Room {
    /// None at all.
    pub const NONE: Self = Self {
        choices: 0,
        kv_tokens: 0,
    };

    /// Whether this is at most that.
    pub fn fits(self, into: Self) -> bool {
        self.choices <= into.choices && self.kv_tokens <= into.kv_tokens
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            choices: self.choices.saturating_add(other.choices),
            kv_tokens: self.kv_tokens.saturating_add(other.kv_tokens),
        }
    }

    /// What is left, nothing where that is more.
    pub fn less(self, other: Self) -> Self {
        Self {
            choices: self.choices.saturating_sub(other.choices),
            kv_tokens: self.kv_tokens.saturating_sub(other.kv_tokens),
        }
    }

    /// The larger of each.
    pub fn most(self, other: Self) -> Self {
        Self {
            choices: self.choices.max(other.choices),
            kv_tokens: self.kv_tokens.max(other.kv_tokens),
        }
    }

    /// The smaller of each.
    pub fn least(self, other: Self) -> Self {
        Self {
            choices: self.choices.min(other.choices),
            kv_tokens: self.kv_tokens.min(other.kv_tokens),
        }
    }
}
