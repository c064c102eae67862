//! How likely a smaller variant answers a request as the best one would: logistic regression on [`features`], calibrated by
//! a monotone curve. `headrace route train` writes the parameters; here they are only used.

use serde::Deserialize;

use super::features::{Features, COUNT, NAMES};

/// The form of the parameters that this reads.
const VERSION: u32 = 1;

/// What is wrong with a file of parameters.
#[derive(Debug, thiserror::Error)]
pub enum Wrong {
    /// Not JSON of that form.
    #[error("{0}")]
    Form(#[from] serde_json::Error),
    /// Of another version.
    #[error("version: this program reads {VERSION}, the file is of {0}")]
    Version(u32),
    /// Trained on other features.
    #[error("features: not those of this program ({COUNT} of them); train it anew")]
    Features,
    /// Numbers that cannot be.
    #[error("{0}")]
    Numbers(&'static str),
}

/// Trained parameters.
#[derive(Clone, Debug)]
pub struct Classifier {
    mean: Features,
    scale: Features,
    /// How far from the mean a feature counts, in scales.
    reach: f32,
    weights: Features,
    bias: f32,
    /// Rising scores and what they came to.
    curve: Vec<(f32, f32)>,
}

#[derive(Deserialize)]
struct File {
    version: u32,
    features: Vec<String>,
    mean: Vec<f32>,
    scale: Vec<f32>,
    #[serde(default = "unlimited")]
    reach: f32,
    weights: Vec<f32>,
    bias: f32,
    isotonic: Isotonic,
}

fn unlimited() -> f32 {
    f32::INFINITY
}

#[derive(Deserialize)]
struct Isotonic {
    scores: Vec<f32>,
    values: Vec<f32>,
}

impl Classifier {
    /// From a file's text.
    pub fn parse(text: &str) -> Result<Self, Wrong> {
        let file: File = serde_json::from_str(text)?;
        if file.version != VERSION {
            return Err(Wrong::Version(file.version));
        }
        if file.features != NAMES {
            return Err(Wrong::Features);
        }
        let sized = [&file.mean, &file.scale, &file.weights]
            .iter()
            .all(|row| row.len() == COUNT && row.iter().all(|value| value.is_finite()));
        let above_0 = |value: &f32| *value > 0.0;
        if !sized || !file.bias.is_finite() || !file.scale.iter().all(above_0) || !above_0(&file.reach) {
            return Err(Wrong::Numbers(
                "mean, scale, weights: one finite number for each feature, scales and reach above 0",
            ));
        }
        let Isotonic { scores, values } = file.isotonic;
        let rising = |row: &[f32]| row.windows(2).all(|pair| pair[0] <= pair[1]);
        let within = values.iter().all(|value| (0.0..=1.0).contains(value));
        if scores.is_empty() || scores.len() != values.len() || !rising(&scores) || !rising(&values) || !within {
            return Err(Wrong::Numbers(
                "isotonic: as many values as scores, both rising, values from 0 to 1",
            ));
        }
        let of = |row: Vec<f32>| std::array::from_fn(|at| row[at]);
        Ok(Self {
            mean: of(file.mean),
            scale: of(file.scale),
            reach: file.reach,
            weights: of(file.weights),
            bias: file.bias,
            curve: scores.into_iter().zip(values).collect(),
        })
    }

    /// The expected agreement with the best variant's answer, from 0 to 1.
    #[must_use]
    pub fn agreement(&self, features: &Features) -> f32 {
        // Of prompts unlike all that it was trained on it knows no more than of the last ones like them.
        let scaled = |at: usize| ((features[at] - self.mean[at]) / self.scale[at]).clamp(-self.reach, self.reach);
        let sum: f32 = (0..COUNT).map(|at| self.weights[at] * scaled(at)).sum();
        let score = 1.0 / (1.0 + (-(sum + self.bias)).exp());
        let above = self.curve.partition_point(|(known, _)| *known < score);
        match (
            above.checked_sub(1).and_then(|below| self.curve.get(below)),
            self.curve.get(above),
        ) {
            (None, Some((_, value))) | (Some((_, value)), None) => *value,
            (Some((from, low)), Some((to, high))) => {
                low + (high - low) * (score - from) / (to - from).max(f32::EPSILON)
            }
            (None, None) => 0.0,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::routing::features::{of, Facts};

    fn file(change: impl FnOnce(&mut serde_json::Value)) -> String {
        let mut weights = vec![0.0; COUNT];
        weights[0] = -1.0;
        let mut file = serde_json::json!({
            "version": 1, "features": NAMES, "mean": vec![2.0; COUNT], "scale": vec![1.0; COUNT], "weights": weights,
            "bias": 0.0, "isotonic": {"scores": [0.25, 0.5, 0.75], "values": [0.1, 0.5, 0.9]},
        });
        change(&mut file);
        file.to_string()
    }

    #[test]
    fn the_curve_is_followed_between_its_points_and_held_beyond_them() {
        let classifier = Classifier::parse(&file(|_| ())).unwrap();
        let at = |length: f32| {
            let mut row = [2.0; COUNT];
            row[0] = length;
            classifier.agreement(&row)
        };
        assert!((at(2.0) - 0.5).abs() < 1e-6);
        assert!((at(-100.0) - 0.9).abs() < 1e-6);
        assert!((at(100.0) - 0.1).abs() < 1e-6);
        let between = at(1.5);
        assert!(between > 0.5 && between < 0.9, "{between}");
    }

    #[test]
    fn beyond_its_reach_a_feature_says_no_more() {
        let classifier = Classifier::parse(&file(|file| file["reach"] = 0.5.into())).unwrap();
        let at = |length: f32| {
            let mut row = [2.0; COUNT];
            row[0] = length;
            classifier.agreement(&row)
        };
        assert!(at(1.8) > at(1.9));
        assert_eq!(at(1.5), at(-100.0));
        assert_eq!(at(2.5), at(1e9));
        assert!(Classifier::parse(&file(|file| file["reach"] = 0.into())).is_err());
    }

    #[test]
    fn a_file_that_cannot_be_right_is_refused_by_name() {
        for (change, why) in [
            (
                Box::new(|file: &mut serde_json::Value| file["version"] = 2.into()) as Box<dyn FnOnce(&mut _)>,
                "version",
            ),
            (
                Box::new(|file: &mut serde_json::Value| file["features"] = serde_json::json!(["x"])),
                "features",
            ),
            (
                Box::new(|file: &mut serde_json::Value| file["scale"][3] = 0.into()),
                "scale",
            ),
            (
                Box::new(|file: &mut serde_json::Value| {
                    file["isotonic"]["values"] = serde_json::json!([0.9, 0.5, 0.1])
                }),
                "isotonic",
            ),
        ] {
            let error = Classifier::parse(&file(change)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn the_default_is_readable_and_says_something() {
        let classifier = Classifier::parse(crate::routing::DEFAULT_CLASSIFIER).unwrap();
        for text in ["hi", "Prove that there are infinitely many primes, step by step."] {
            let facts = Facts {
                bytes: text.len(),
                messages: 1,
                max_tokens: Some(32),
                ..Facts::default()
            };
            let agreement = classifier.agreement(&of(text, &facts));
            assert!((0.0..=1.0).contains(&agreement), "{agreement}");
        }
    }
}
