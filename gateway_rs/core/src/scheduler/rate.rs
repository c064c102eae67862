//! How often something happens, lately.

/// Events per second over the last while, decaying exponentially.
#[derive(Clone, Debug)]
pub struct Rate {
    started_s: f64,
    at_s: f64,
    count: f64,
}

/// The last while.
const WINDOW_S: f64 = 10.0;

impl Rate {
    /// Nothing yet.
    pub fn new(now_s: f64) -> Self {
        Self {
            started_s: now_s,
            at_s: now_s,
            count: 0.0,
        }
    }

    /// So much more.
    pub fn add(&mut self, now_s: f64, amount: f64) {
        self.count = self.decayed(now_s) + amount;
        self.at_s = now_s;
    }

    /// How much a second.
    pub fn per_s(&self, now_s: f64) -> f64 {
        // What the window could have seen since the start: a young rate is not a low one.
        let window_s = WINDOW_S * -(-(now_s - self.started_s) / WINDOW_S).exp_m1();
        self.decayed(now_s) / window_s.max(0.1)
    }

    fn decayed(&self, now_s: f64) -> f64 {
        self.count * ((self.at_s - now_s) / WINDOW_S).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_rate_is_seen_soon_and_forgotten_later() {
        let mut rate = Rate::new(0.0);
        assert_eq!(rate.per_s(0.0), 0.0);
        for step in 0..100 {
            rate.add(f64::from(step) / 10.0, 1.0);
        }
        assert!((rate.per_s(10.0) - 10.0).abs() < 1.0, "{}", rate.per_s(10.0));
        assert!(rate.per_s(100.0) < 0.01);
    }
}
