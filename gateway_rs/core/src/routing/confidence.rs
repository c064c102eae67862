//! How sure a model was of an answer: the geometric mean of the probabilities that it gave to the ids it chose.
//!
//! A mean over ids, so that long answers are not less sure than short ones; over the first ones only, so that it is known
//! before the rest is computed.

/// An id of less probability (or of none, as a bias may force it) counts as this.
const LEAST_LOGPROB: f32 = -20.0;

/// From their log-probabilities, in (0, 1]; None for no ids.
#[must_use]
pub fn confidence(logprobs: impl IntoIterator<Item = f32>) -> Option<f32> {
    // What is no number is as unlikely as can be.
    let bounded = |logprob: f32| {
        f64::from(if logprob > LEAST_LOGPROB {
            logprob.min(0.0)
        } else {
            LEAST_LOGPROB
        })
    };
    let (sum, count) =
        (logprobs.into_iter().map(bounded)).fold((0.0, 0_u32), |(sum, count), one| (sum + one, count + 1));
    (count > 0).then(|| (sum / f64::from(count)).exp() as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_geometric_mean_whatever_the_length() {
        let of = |probabilities: &[f32]| confidence(probabilities.iter().map(|one| one.ln()));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[1.0, 1.0]), Some(1.0));
        for length in [1, 3, 100] {
            let sure = of(&vec![0.5; length]).unwrap_or_default();
            assert!((sure - 0.5).abs() < 1e-6, "{sure}");
        }
        let mixed = of(&[0.9, 0.1]).unwrap_or_default();
        assert!((mixed - 0.3).abs() < 1e-6, "{mixed}");
    }

    #[test]
    fn what_is_no_probability_is_the_least_or_the_most() {
        let least = LEAST_LOGPROB.exp();
        assert_eq!(confidence([f32::NEG_INFINITY]), Some(least));
        assert_eq!(confidence([f32::NAN]), Some(least));
        assert_eq!(confidence([-9999.0]), Some(least));
        assert_eq!(confidence([0.5]), Some(1.0));
    }
}
