//! Meters: what is counted against one limit of one tenant.

use std::sync::Arc;

use super::{Limits, Tenant};

const DAY_S: i64 = 86_400;
const MINUTE_S: i64 = 60;

/// Which of a tenant's limits, and of what.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Of {
    /// Requests at once.
    Concurrent,
    /// Tokens of that minute since 1970.
    Minute(i64),
    /// Tokens of that day since 1970, UTC.
    Day(i64),
    /// Billionths of a dollar of that month since year 0, UTC.
    Month(i64),
    /// Tokens of that session.
    Session(Arc<str>),
}

impl Of {
    /// The limit's name, as `headrace tenants limit` and the tenants' file have it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Concurrent => "concurrent_requests",
            Self::Minute(_) => "tokens_per_minute",
            Self::Day(_) => "tokens_per_day",
            Self::Month(_) => "dollars_per_month",
            Self::Session(_) => "session_tokens",
        }
    }

    /// Which one of that name.
    pub fn id(&self) -> String {
        match self {
            Self::Concurrent => String::new(),
            Self::Minute(index) | Self::Day(index) | Self::Month(index) => index.to_string(),
            Self::Session(session) => session.to_string(),
        }
    }

    /// Unix seconds from when and before when requests count that were placed; None = always.
    pub fn window_s(&self) -> Option<(i64, i64)> {
        match *self {
            Self::Minute(index) => Some((index * MINUTE_S, (index + 1) * MINUTE_S)),
            Self::Day(index) => Some((index * DAY_S, (index + 1) * DAY_S)),
            Self::Month(index) => Some((month_begins_s(index), month_begins_s(index + 1))),
            Self::Concurrent | Self::Session(_) => None,
        }
    }
}

/// One meter of one tenant.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MeterKey {
    /// Whose.
    pub tenant: Tenant,
    /// What.
    pub of: Of,
}

/// What is counted. In tokens, billionths of a dollar, or requests.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    /// What rows have spent is known.
    pub known: bool,
    /// By rows that are durable.
    pub spent: u64,
    /// By bookings.
    pub held: u64,
    /// Of the shared store; where limits are not shared, nothing.
    pub drawn: u64,
    /// A look is under way.
    pub looking: bool,
    /// The shared store had no more to give; it is not asked again before then.
    pub short_until_s: f64,
    /// When anybody last wanted something of it.
    pub used_s: f64,
}

impl Meter {
    /// What is left of a limit.
    pub fn room(&self, limit: u64) -> u64 {
        limit.saturating_sub(self.spent.saturating_add(self.held))
    }
}

/// The meters of a request that is placed then, each with its limit.
pub fn meters_of(tenant: &Tenant, limits: &Limits, session: &Arc<str>, unix_s: f64) -> Vec<(MeterKey, u64)> {
    let second = unix_s.floor() as i64;
    let day = second.div_euclid(DAY_S);
    let mut meters = Vec::new();
    let mut add = |limit: u64, of: Of| {
        if limit > 0 {
            let tenant = tenant.clone();
            meters.push((MeterKey { tenant, of }, limit));
        }
    };
    add(limits.concurrent_requests, Of::Concurrent);
    add(limits.tokens_per_minute, Of::Minute(second.div_euclid(MINUTE_S)));
    add(limits.tokens_per_day, Of::Day(day));
    add(limits.nano_dollars_per_month, Of::Month(month_of(day)));
    if !session.is_empty() {
        add(limits.session_tokens, Of::Session(session.clone()));
    }
    meters
}

impl Limits {
    /// Whether there is any.
    pub fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// The month of a day since 1970, counted from year 0. By the civil calendar, whose years begin in March here.
fn month_of(day: i64) -> i64 {
    let shifted = day + 719_468;
    let era = shifted.div_euclid(146_097);
    let of_era = shifted.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    // March is 0, and January and February are the next year's.
    (year_of_era + era * 400) * 12 + month + 2
}

fn month_begins_s(index: i64) -> i64 {
    let (year, month) = ((index - 2).div_euclid(12), (index - 2).rem_euclid(12));
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let of_era = 365 * year_of_era + year_of_era / 4 - year_of_era / 100 + (153 * month + 2) / 5;
    (era * 146_097 + of_era - 719_468) * DAY_S
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn months_are_those_of_the_calendar() {
        let month = |second: i64| month_of(second.div_euclid(DAY_S));
        for (second, year, of_year) in [
            (0, 1970, 1),
            (951_782_400, 2000, 2),    // 2000-02-29
            (951_868_800, 2000, 3),    // 2000-03-01
            (1_767_225_599, 2025, 12), // 2025-12-31 23:59:59
            (1_767_225_600, 2026, 1),
            (4_107_542_400, 2100, 3), // after a February of 28 days
        ] {
            assert_eq!(month(second), year * 12 + of_year - 1, "{second}");
        }
        for index in 1970 * 12..2200 * 12 {
            let begins_s = month_begins_s(index);
            assert_eq!((month(begins_s), month(begins_s - 1)), (index, index - 1));
        }
    }
}
