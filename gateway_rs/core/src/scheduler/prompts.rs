//! Prompts that a worker has yet to compute, and when it will have done so.
//!
//! Each worker has two sums of them: of all, and of those that are no batch work, which is all that somebody sees before
//! whom batch work stands back.

use super::leases::Lease;

/// What a worker has been given to compute, and what waits for it in the queue.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompts {
    /// Requests that were given to it and have no first token.
    given: u32,
    /// Predicted work of their prompts.
    given_ms: f64,
    /// What of them it has to compute.
    given_tokens: u64,
    /// Asks that wait for it.
    planned: u32,
    planned_ms: f64,
    planned_tokens: u64,
    /// When it will have computed all of these.
    done_at_s: f64,
}

impl Default for Prompts {
    fn default() -> Self {
        Self {
            given: 0,
            given_ms: 0.0,
            given_tokens: 0,
            planned: 0,
            planned_ms: 0.0,
            planned_tokens: 0,
            done_at_s: f64::NEG_INFINITY,
        }
    }
}

impl Prompts {
    /// Requests that were given to it and have no first token.
    pub fn given(&self) -> u32 {
        self.given
    }

    /// What of their prompts it has to compute.
    pub fn given_tokens(&self) -> u64 {
        self.given_tokens
    }

    /// Predicted work of their prompts, what of it is done included.
    pub fn given_ms(&self) -> f64 {
        self.given_ms
    }

    /// Asks that wait for it.
    pub fn planned(&self) -> u32 {
        self.planned
    }

    /// All that wait.
    pub fn waiting(&self) -> u32 {
        self.given + self.planned
    }

    /// When it will have computed them, or had.
    pub fn done_at_s(&self) -> f64 {
        self.done_at_s
    }

    fn all_ms(&self) -> f64 {
        (self.given_ms + self.planned_ms).max(0.0)
    }

    /// Predicted work that is left.
    pub fn pending_ms(&self, now_s: f64) -> f64 {
        if self.waiting() == 0 {
            return 0.0;
        }
        ((self.done_at_s - now_s) * 1e3).clamp(0.0, self.all_ms())
    }

    /// And its tokens, about.
    pub fn pending_tokens(&self, now_s: f64) -> u64 {
        let tokens = (self.given_tokens + self.planned_tokens) as f64;
        (self.pending_ms(now_s) / self.all_ms().max(1e-9) * tokens) as u64
    }

    /// Of what is left, what it has been given.
    pub fn fed_ms(&self, now_s: f64) -> f64 {
        (self.pending_ms(now_s) - self.planned_ms).max(0.0)
    }

    /// When no more than that is left of what it has been given.
    pub fn fed_until_s(&self, ahead_ms: f64) -> f64 {
        self.done_at_s - (self.planned_ms + ahead_ms) / 1e3
    }

    pub(super) fn give(&mut self, now_s: f64, lease: &Lease) {
        self.given += 1;
        self.given_ms += lease.prefill_ms;
        self.given_tokens += u64::from(lease.uncached_tokens);
        self.add(now_s, lease.prefill_ms);
    }

    /// It has been computed, or need not be any more; what of the work was left stays, until [`drop`](Self::drop) or
    /// [`bound`](Self::bound).
    pub(super) fn take(&mut self, lease: &Lease) {
        self.given -= 1;
        self.given_ms -= lease.prefill_ms;
        self.given_tokens -= u64::from(lease.uncached_tokens);
    }

    pub(super) fn plan(&mut self, now_s: f64, prefill_ms: f64, tokens: u32) {
        self.planned += 1;
        self.planned_ms += prefill_ms;
        self.planned_tokens += u64::from(tokens);
        self.add(now_s, prefill_ms);
    }

    pub(super) fn unplan(&mut self, now_s: f64, prefill_ms: f64, tokens: u32) {
        self.planned -= 1;
        self.planned_ms -= prefill_ms;
        self.planned_tokens -= u64::from(tokens);
        self.drop(now_s, prefill_ms);
    }

    fn add(&mut self, now_s: f64, ms: f64) {
        self.done_at_s = self.done_at_s.max(now_s) + ms / 1e3;
    }

    /// So much less is to be computed than was thought.
    pub(super) fn drop(&mut self, now_s: f64, ms: f64) {
        self.done_at_s = (self.done_at_s - ms / 1e3).max(now_s);
        self.bound(now_s);
    }

    /// No more waits than what there is.
    pub(super) fn bound(&mut self, now_s: f64) {
        if self.given == 0 {
            self.given_ms = 0.0;
        }
        if self.planned == 0 {
            self.planned_ms = 0.0;
        }
        self.done_at_s = self.done_at_s.min(now_s + self.all_ms() / 1e3);
    }

    /// Of what it has been given, that much work is left.
    pub(super) fn believe(&mut self, now_s: f64, left_ms: f64) {
        self.done_at_s = now_s + (left_ms + self.planned_ms) / 1e3;
        self.bound(now_s);
    }
}
