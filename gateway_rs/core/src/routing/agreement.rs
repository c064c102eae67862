//! How far two answers to one request say the same, from 0 to 1, and how sure a mean of such numbers is.

use std::collections::HashMap;

/// What is compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Measure {
    /// The F1 of their words, counted as often as they stand: 1 = the same words, 0 = none in common.
    #[default]
    Words,
    /// 1 when the words are the same in the same order, else 0.
    Exact,
}

impl Measure {
    /// Of two texts; case, punctuation and white space count for nothing.
    #[must_use]
    pub fn of(self, one: &str, other: &str) -> f32 {
        let (one, other) = (words(one), words(other));
        if one == other {
            return 1.0;
        }
        match self {
            Self::Exact => 0.0,
            Self::Words => f1(&one, &other),
        }
    }
}

/// Words in lower case; a text without any is its marks.
fn words(text: &str) -> Vec<String> {
    let split = text.split(|letter: char| !letter.is_alphanumeric());
    let words: Vec<String> = split.filter(|word| !word.is_empty()).map(str::to_lowercase).collect();
    match words.is_empty() {
        true => text.split_whitespace().map(str::to_owned).collect(),
        false => words,
    }
}

fn f1(one: &[String], other: &[String]) -> f32 {
    let mut counts: HashMap<&str, u32> = HashMap::new();
    for word in one {
        *counts.entry(word).or_default() += 1;
    }
    let mut common = 0_u32;
    for word in other {
        if let Some(count) = counts.get_mut(word.as_str()).filter(|count| **count > 0) {
            *count -= 1;
            common += 1;
        }
    }
    2.0 * common as f32 / (one.len() + other.len()).max(1) as f32
}

/// A mean of numbers from 0 to 1, and the interval that holds the true one 95 times of 100 (Wilson's; for what is not only
/// 0 and 1 it is wider than needed).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// How many.
    pub count: usize,
    /// Their mean; 0 when there are none.
    pub mean: f64,
    /// Its bounds.
    pub low: f64,
    /// See `low`.
    pub high: f64,
}

impl Interval {
    /// Of so many numbers with that sum.
    #[must_use]
    pub fn of(count: usize, sum: f64) -> Self {
        const Z: f64 = 1.96;
        if count == 0 {
            return Self {
                count,
                mean: 0.0,
                low: 0.0,
                high: 1.0,
            };
        }
        let (n, mean) = (count as f64, (sum / count as f64).clamp(0.0, 1.0));
        let middle = (mean + Z * Z / (2.0 * n)) / (1.0 + Z * Z / n);
        let half = Z / (1.0 + Z * Z / n) * (mean * (1.0 - mean) / n + Z * Z / (4.0 * n * n)).sqrt();
        Self {
            count,
            mean,
            low: (middle - half).max(0.0),
            high: (middle + half).min(1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_count_and_marks_do_not() {
        assert_eq!(Measure::Words.of("Paris.", "paris"), 1.0);
        assert_eq!(
            Measure::Exact.of(" The  capital is Paris!", "the capital is paris"),
            1.0
        );
        assert_eq!(Measure::Exact.of("Paris", "Lyon"), 0.0);
        assert_eq!(Measure::Exact.of("a b", "b a"), 0.0);
        assert_eq!(Measure::Words.of("a b", "b a"), 1.0);
        assert!((Measure::Words.of("it is Paris", "it is Lyon") - 2.0 / 3.0).abs() < 1e-6);
        assert_eq!(Measure::Words.of("", ""), 1.0);
        assert_eq!(Measure::Words.of("", "x"), 0.0);
        assert_eq!(Measure::Words.of("!", "?"), 0.0);
    }

    #[test]
    fn the_interval_narrows_and_holds_the_mean() {
        let (few, many) = (Interval::of(10, 9.0), Interval::of(1000, 900.0));
        for each in [few, many] {
            assert!(each.low <= each.mean && each.mean <= each.high);
        }
        assert!(many.high - many.low < (few.high - few.low) / 5.0);
        assert_eq!((Interval::of(0, 0.0).low, Interval::of(0, 0.0).high), (0.0, 1.0));
        assert!(Interval::of(20, 20.0).low > 0.8 && Interval::of(20, 20.0).high <= 1.0);
    }
}
