//! The measured quality of a smaller variant, and the threshold that follows from it.
//!
//! A share of what the smaller variant answered is answered by the best one too; their agreement comes here. When it falls
//! under the floor, fewer requests go to the smaller variant; when it is surely above, more do again, down to the configured
//! threshold. Moves are apart: each is judged by samples that came after the last one. Time is an argument.

use std::collections::VecDeque;

use super::agreement::Interval;

/// Samples that a report is made of.
const KEPT: usize = 512;

/// How the threshold moves.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Where it starts, and how far down it comes back.
    pub threshold: f32,
    /// The least mean agreement.
    pub floor: f32,
    /// By so much it rises; it comes back by half of that.
    pub step: f32,
    /// Samples between two moves.
    pub samples: usize,
    /// When the threshold is so high that nothing can be measured, it comes back a step after so long.
    pub retry_s: f64,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            threshold: 0.8,
            floor: 0.0,
            step: 0.05,
            samples: 20,
            retry_s: 600.0,
        }
    }
}

/// The threshold of one variant.
#[derive(Clone, Debug)]
pub struct Quality {
    rules: Rules,
    threshold: f32,
    /// Since the last move.
    fresh: (usize, f64),
    /// The last of them, for reports.
    kept: VecDeque<f32>,
    sum: f64,
    /// Of the last sample or move.
    heard_s: f64,
    moves: u64,
}

impl Quality {
    /// Nothing measured yet.
    #[must_use]
    pub fn new(rules: Rules, now_s: f64) -> Self {
        Self {
            threshold: rules.threshold,
            rules,
            fresh: (0, 0.0),
            kept: VecDeque::new(),
            sum: 0.0,
            heard_s: now_s,
            moves: 0,
        }
    }

    /// The same measures under other rules.
    pub fn set_rules(&mut self, rules: Rules) {
        if rules.threshold > self.rules.threshold || rules.floor != self.rules.floor {
            self.fresh = (0, 0.0);
        }
        if rules.threshold != self.rules.threshold {
            self.threshold = rules.threshold;
        }
        self.rules = rules;
    }

    /// Requests whose expected agreement is at least this may go to the variant. Above 1: none.
    pub fn threshold(&mut self, now_s: f64) -> f32 {
        let is_closed = self.threshold > 1.0 - self.rules.step;
        if is_closed && self.threshold > self.rules.threshold && now_s - self.heard_s >= self.rules.retry_s {
            self.move_to(self.threshold - self.rules.step, now_s);
        }
        self.threshold
    }

    /// Takes in the agreement of one request.
    pub fn observe(&mut self, now_s: f64, agreement: f32) {
        let agreement = agreement.clamp(0.0, 1.0);
        self.heard_s = now_s;
        self.kept.push_back(agreement);
        self.sum += f64::from(agreement);
        if self.kept.len() > KEPT {
            self.sum -= f64::from(self.kept.pop_front().unwrap_or_default());
        }
        self.fresh.0 += 1;
        self.fresh.1 += f64::from(agreement);
        if self.fresh.0 < self.rules.samples {
            return;
        }
        let (measured, floor) = (Interval::of(self.fresh.0, self.fresh.1), f64::from(self.rules.floor));
        if measured.mean < floor {
            self.move_to((self.threshold + self.rules.step).min(1.0 + self.rules.step), now_s);
        } else if measured.low > floor && self.threshold > self.rules.threshold {
            let lower = self.threshold - self.rules.step / 2.0;
            self.move_to(lower.max(self.rules.threshold), now_s);
        }
    }

    fn move_to(&mut self, threshold: f32, now_s: f64) {
        self.threshold = threshold;
        self.fresh = (0, 0.0);
        self.heard_s = now_s;
        self.moves += 1;
    }

    /// The agreement that was measured of late.
    #[must_use]
    pub fn measured(&self) -> Interval {
        Interval::of(self.kept.len(), self.sum)
    }

    /// How often the threshold moved.
    #[must_use]
    pub fn moves(&self) -> u64 {
        self.moves
    }
}

#[cfg(test)]
mod tests {
    use rand::{rngs::SmallRng, Rng as _, SeedableRng as _};

    use super::*;

    fn rules() -> Rules {
        Rules {
            threshold: 0.7,
            floor: 0.9,
            ..Rules::default()
        }
    }

    /// Answers agree with chance p when their estimate is p: what a well calibrated classifier gives.
    fn run(quality: &mut Quality, rng: &mut SmallRng, requests: usize, from_s: f64, worse: f32) -> f64 {
        let mut agreed = (0.0, 0.0_f64);
        for at in 0..requests {
            let now_s = from_s + at as f64;
            let estimate = rng.random::<f32>();
            if estimate >= quality.threshold(now_s) {
                let agreement = f32::from(u8::from(rng.random::<f32>() < estimate - worse));
                quality.observe(now_s, agreement);
                agreed = (agreed.0 + f64::from(agreement), agreed.1 + 1.0);
            }
        }
        agreed.0 / agreed.1.max(1.0)
    }

    #[test]
    fn quality_under_the_floor_raises_the_threshold_until_it_holds() {
        for seed in 0..20 {
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut quality = Quality::new(rules(), 0.0);
            run(&mut quality, &mut rng, 4000, 0.0, 0.1);
            assert!(
                quality.threshold(4000.0) > 0.75,
                "seed {seed}: {}",
                quality.threshold(4000.0)
            );
            let held = run(&mut quality, &mut rng, 20_000, 4000.0, 0.1);
            assert!(held > 0.82, "seed {seed}: {held}");
        }
    }

    #[test]
    fn it_comes_back_when_quality_does_and_no_lower_than_configured() {
        let mut quality = Quality::new(rules(), 0.0);
        (0..60).for_each(|at| quality.observe(f64::from(at), 0.0));
        assert!((quality.threshold(60.0) - 0.85).abs() < 1e-6);
        (0..2000).for_each(|at| quality.observe(f64::from(60 + at), 1.0));
        assert_eq!(quality.threshold(2060.0), 0.7);
        assert!(quality.moves() >= 9);
    }

    #[test]
    fn a_threshold_does_not_swing_around_quality_at_the_floor() {
        let mut quality = Quality::new(Rules { floor: 0.5, ..rules() }, 0.0);
        // Just at the floor: neither too bad nor surely good.
        (0..1000).for_each(|at| quality.observe(f64::from(at), f32::from(at % 2 == 0)));
        assert_eq!(quality.moves(), 0);
    }

    #[test]
    fn what_is_shut_is_tried_again_after_a_while() {
        let mut quality = Quality::new(rules(), 0.0);
        let mut now_s = 0.0;
        while quality.threshold(now_s) <= 1.0 {
            now_s += 1.0;
            quality.observe(now_s, 0.0);
        }
        let moves = quality.moves();
        assert!(quality.threshold(now_s + 599.0) > 1.0);
        assert!(quality.threshold(now_s + 601.0) <= 1.0);
        assert_eq!(quality.moves(), moves + 1);
    }

    #[test]
    fn a_report_is_of_the_last_samples_only() {
        let mut quality = Quality::new(rules(), 0.0);
        (0..1000).for_each(|at| quality.observe(f64::from(at), 0.0));
        (0..KEPT).for_each(|at| quality.observe(at as f64, 1.0));
        let measured = quality.measured();
        assert_eq!((measured.count, measured.mean), (KEPT, 1.0));
    }
}
