//! A new version beside the old one: its share of the requests, and when that is taken back.
//!
//! Both are watched alike, over their last requests. The new version is rolled back when it surely fails more often than the
//! old one, or when surely more of its first tokens come later than nine of ten of the old one's. Rolled back it stays,
//! until it is configured anew. Time is an argument.

use std::collections::VecDeque;

/// Requests of a version that are looked at.
const KEPT: usize = 256;

/// How old they may be.
const AGE_S: f64 = 900.0;

/// How sure a difference must be, in standard errors: more than for one look, because it is looked at after each request.
const SURE: f64 = 3.5;

/// Of the old version's first tokens, the share that is called late.
const LATE: f64 = 0.1;

/// When a new version is taken back.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Requests of the new version before anything is decided.
    pub requests: usize,
    /// Failures more than of the old version, as a share of requests.
    pub failures: f64,
    /// Late first tokens more than of the old version, as a share.
    pub late: f64,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            requests: 10,
            failures: 0.05,
            late: 0.2,
        }
    }
}

/// How one request went.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// By the fault of who served it.
    pub failed: bool,
    /// From its arrival to the first token; None: there was none.
    pub ttft_s: Option<f32>,
}

#[derive(Clone, Debug, Default)]
struct Watched(VecDeque<(f64, Ended)>);

impl Watched {
    fn push(&mut self, now_s: f64, ended: Ended) {
        self.0.push_back((now_s, ended));
        while self.0.len() > KEPT || self.0.front().is_some_and(|(at_s, _)| now_s - at_s > AGE_S) {
            self.0.pop_front();
        }
    }

    fn failed(&self) -> usize {
        self.0.iter().filter(|(_, ended)| ended.failed).count()
    }

    fn ttfts_s(&self) -> impl Iterator<Item = f32> + '_ {
        self.0.iter().filter_map(|(_, ended)| ended.ttft_s)
    }
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// In force.
    Old,
    /// On trial.
    New,
}

/// A rollback, with its reason for people.
#[derive(Clone, Debug, PartialEq)]
pub struct RolledBack {
    /// When.
    pub at_s: f64,
    /// Why.
    pub why: String,
}

/// One new version's trial.
#[derive(Clone, Debug, Default)]
pub struct Rollout {
    rules: Rules,
    old: Watched,
    new: Watched,
    back: Option<RolledBack>,
}

impl Rollout {
    /// Nothing seen yet.
    #[must_use]
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            ..Self::default()
        }
    }

    /// The new version's share: what is configured, or nothing.
    #[must_use]
    pub fn share(&self, configured: f32) -> f32 {
        match self.back {
            Some(_) => 0.0,
            None => configured,
        }
    }

    /// Why and when it was taken back.
    #[must_use]
    pub fn rolled_back(&self) -> Option<&RolledBack> {
        self.back.as_ref()
    }

    /// Requests and failures of a version of late.
    #[must_use]
    pub fn seen(&self, version: Version) -> (usize, usize) {
        let watched = match version {
            Version::Old => &self.old,
            Version::New => &self.new,
        };
        (watched.0.len(), watched.failed())
    }

    /// Takes in how a request went. True when the new version has been taken back by it.
    pub fn ended(&mut self, now_s: f64, version: Version, ended: Ended) -> bool {
        match version {
            Version::Old => self.old.push(now_s, ended),
            Version::New => self.new.push(now_s, ended),
        }
        if self.back.is_some() || version == Version::Old || self.new.0.len() < self.rules.requests {
            return false;
        }
        let why = self.fails_more().or_else(|| self.is_slower());
        self.back = why.map(|why| RolledBack { at_s: now_s, why });
        self.back.is_some()
    }

    fn fails_more(&self) -> Option<String> {
        let (new, old) = (self.seen(Version::New), self.seen(Version::Old));
        // An old version that nobody has asked is taken for one that never fails.
        let (old_rate, new_rate) = (share(old.1, old.0), share(new.1, new.0));
        let surely = surely_more(new, old);
        (new_rate - old_rate > self.rules.failures && surely).then(|| {
            format!(
                "{} of its last {} requests failed, of the old version's {} of {}",
                new.1, new.0, old.1, old.0
            )
        })
    }

    fn is_slower(&self) -> Option<String> {
        let mut old: Vec<f32> = self.old.ttfts_s().collect();
        let new = self.new.ttfts_s().count();
        if old.len() < self.rules.requests || new < self.rules.requests {
            return None;
        }
        old.sort_by(f32::total_cmp);
        let late_s = old[((old.len() as f64 * (1.0 - LATE)) as usize).min(old.len() - 1)];
        let late_old = old.iter().filter(|ttft_s| **ttft_s > late_s).count();
        let late_new = self.new.ttfts_s().filter(|ttft_s| *ttft_s > late_s).count();
        let more = share(late_new, new) - share(late_old, old.len()).max(LATE);
        (more > self.rules.late && surely_more((new, late_new), (old.len(), late_old))).then(|| {
            format!("{late_new} of its last {new} first tokens came after {late_s:.3} s, which nine of ten of the old version's meet")
        })
    }
}

fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Whether a share is surely higher than another: the test of two proportions, with one more success and failure each.
fn surely_more(one: (usize, usize), other: (usize, usize)) -> bool {
    let share = |(whole, part): (usize, usize)| (part as f64 + 0.5) / (whole as f64 + 1.0);
    let variance = |seen: (usize, usize)| share(seen) * (1.0 - share(seen)) / (seen.0 as f64 + 1.0);
    let other = if other.0 == 0 { (KEPT, 0) } else { other };
    share(one) - share(other) > SURE * (variance(one) + variance(other)).sqrt()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rand::{rngs::SmallRng, Rng as _, SeedableRng as _};

    use super::*;

    fn ended(failed: bool, ttft_s: f32) -> Ended {
        Ended {
            failed,
            ttft_s: (!failed).then_some(ttft_s),
        }
    }

    /// Requests of both, one a second; when the new version was taken back, after how many of its own.
    fn trial(seed: u64, new: (f64, f32), old: (f64, f32), requests: usize) -> Option<usize> {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut rollout = Rollout::new(Rules::default());
        let mut count = 0;
        for at in 0..requests {
            let version = if rng.random::<f64>() < 0.3 {
                Version::New
            } else {
                Version::Old
            };
            let (failures, ttft_s) = if version == Version::New { new } else { old };
            let failed = rng.random::<f64>() < failures;
            let ttft_s = ttft_s * (0.5 + rng.random::<f32>());
            count += usize::from(version == Version::New);
            if rollout.ended(at as f64, version, ended(failed, ttft_s)) {
                assert_eq!(rollout.share(0.3), 0.0);
                return Some(count);
            }
        }
        assert_eq!(rollout.share(0.3), 0.3);
        None
    }

    #[test]
    fn a_version_that_fails_is_taken_back_soon() {
        for seed in 0..50 {
            let count = trial(seed, (0.5, 0.1), (0.01, 0.1), 2000);
            assert!(count.is_some_and(|count| count <= 60), "seed {seed}: {count:?}");
        }
    }

    #[test]
    fn a_version_that_is_slow_is_taken_back() {
        for seed in 0..50 {
            let count = trial(seed, (0.0, 0.2), (0.0, 0.1), 2000);
            assert!(count.is_some_and(|count| count <= 120), "seed {seed}: {count:?}");
        }
    }

    #[test]
    fn one_that_is_no_worse_stays() {
        let gone = (0..200)
            .filter(|seed| trial(*seed, (0.02, 0.1), (0.02, 0.1), 3000).is_some())
            .count();
        assert!(gone <= 6, "{gone} of 200 sound versions were taken back");
    }

    #[test]
    fn failures_of_both_are_not_its_fault() {
        for seed in 0..50 {
            assert_eq!(trial(seed, (0.4, 0.1), (0.6, 0.1), 1000), None, "seed {seed}");
        }
    }

    #[test]
    fn it_says_why_and_stays_back() {
        let mut rollout = Rollout::new(Rules::default());
        (0..9).for_each(|at| assert!(!rollout.ended(f64::from(at), Version::New, ended(true, 0.0))));
        assert!(rollout.ended(9.0, Version::New, ended(true, 0.0)));
        let back = rollout.rolled_back().unwrap();
        assert_eq!(back.at_s, 9.0);
        assert!(back.why.starts_with("10 of its last 10"), "{}", back.why);
        assert!(!rollout.ended(10.0, Version::New, ended(false, 0.1)));
        assert!(rollout.rolled_back().is_some());
    }
}
