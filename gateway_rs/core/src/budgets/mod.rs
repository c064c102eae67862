//! What tenants may spend, and what they have spent: reserved when a request is asked for, settled when it has ended.
//!
//! A *booking* is one request's entry, named by a number that its router draws. It is opened by the first ask with all that
//! the request may cost, and closed once by a [`Settlement`] with what it did cost; attempts and resumptions belong to one
//! booking. Limits are *meters*: a tenant's minute, day, month, session, or requests at once. On each meter
//!
//! ```text
//! spent (rows that are durable) + held (bookings that are open, or whose row is not durable yet) <= limit
//! ```
//!
//! What makes overspending impossible, whatever is lost or comes twice:
//!
//! - a booking holds the most that its request may still cost, and the request is given no more tokens than that;
//! - a booking of a tenant with limits is durable before its request may run, so a restart finds it;
//! - a row counts once: the ledger says whether a booking's row was new, and only then it is counted as spent;
//! - a meter that was not seen from its beginning is looked up in the ledger before anybody is let in by it.
//!
//! Where several schedulers share limits, each spends only what it has *drawn* of a meter from the shared store. That is the
//! only difference: the rule is the same, with the drawn part as the limit.
//!
//! Pure: the ledger and the shared store are the driver's. It takes [`Entry`]s in order ([`Budgets::take`]), carries them
//! out, and says so ([`Budgets::done`]).

mod book;
mod meters;
mod prices;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde::Deserialize;

pub use self::{
    book::{Budgets, Kept, Row, Settlement, Verdict},
    meters::{Meter, MeterKey, Of},
    prices::{Price, Prices},
};

/// The number of a request's entry.
pub type Booking = u64;

/// What a tenant may spend; 0 = as much as it likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Prompt and answer, of requests that were placed within one minute of the clock.
    pub tokens_per_minute: u64,
    /// The same of one day, UTC.
    pub tokens_per_day: u64,
    /// Of one month, UTC, in billionths.
    pub nano_dollars_per_month: u64,
    /// Requests that wait or run.
    pub concurrent_requests: u64,
    /// Of all requests with one session id.
    pub session_tokens: u64,
}

/// Something for the ledger, or the shared store, to do. In order, and the next only when the one before is durable.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// Write the row of a request that has ended, unless there is one, and forget what was kept of it. Answer: whether it
    /// was new.
    Row(Box<Row>),
    /// Keep an open booking, for the next start.
    Keep(Box<Kept>),
    /// Forget what was kept of a booking.
    Forget(Booking),
    /// Look a meter up, and draw so much of it. Answer: what was spent by rows, and what is drawn.
    Look {
        /// Which.
        meter: MeterKey,
        /// To be drawn beyond what is, if there is so much; where limits are shared.
        want: u64,
        /// The limit.
        limit: u64,
    },
    /// What is drawn is only so much from now on: the rest is the others' again.
    Return {
        /// Which.
        meter: MeterKey,
        /// Drawn in all.
        drawn: u64,
    },
}

/// The answer to an [`Entry`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// [`Entry::Row`]: 1 when it was new. [`Entry::Look`]: spent.
    pub first: u64,
    /// [`Entry::Look`]: drawn in all.
    pub second: u64,
}

/// Why an ask is not let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// For people: the limit, and the value.
    pub message: String,
    /// When there may be room; None = not soon, or never.
    pub retry_after_ms: Option<u32>,
}

/// A tenant by name.
pub type Tenant = Arc<str>;
