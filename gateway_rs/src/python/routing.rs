//! What routing sees of a request and makes of it, for `headrace route`: the rules that the data plane applies.

use std::path::Path;

use headrace_core::routing::{
    agreement::{Interval, Measure},
    choice::{self, Candidate, Wish},
    difficulty::Classifier,
    features::{Features, COUNT, NAMES},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    openai::{chat, completions},
    plane::{
        config::AliasConfig,
        routes::{classifier, seen},
    },
    request::Draft,
};

/// Adds this file's functions to the extension module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(route_feature_names, module)?)?;
    module.add_function(wrap_pyfunction!(route_features, module)?)?;
    module.add_function(wrap_pyfunction!(route_agreement, module)?)?;
    module.add_function(wrap_pyfunction!(route_compare, module)?)?;
    module.add_function(wrap_pyfunction!(route_interval, module)?)?;
    module.add_function(wrap_pyfunction!(route_explain, module)?)
}

#[allow(clippy::needless_pass_by_value)] // As map_err calls it.
fn wrong(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn draft(body: &str) -> PyResult<Draft> {
    let chat = chat::parse(body.as_bytes());
    match chat {
        Ok(draft) => Ok(draft),
        Err(error) if error.param.as_deref() == Some("messages") => completions::parse(body.as_bytes()).map_err(wrong),
        Err(error) => Err(wrong(error)),
    }
}

/// The features' names, in order.
#[pyfunction]
fn route_feature_names() -> Vec<&'static str> {
    NAMES.to_vec()
}

/// The features of a request: the body of a chat or a completion. Raises ValueError.
#[pyfunction]
fn route_features(body: &str) -> PyResult<Vec<f32>> {
    Ok(seen(&draft(body)?).to_vec())
}

/// The agreement that a classifier (its file's text) expects. Raises ValueError.
#[pyfunction]
#[allow(clippy::needless_pass_by_value)] // PyO3 extracts owned values.
fn route_agreement(classifier: &str, features: Vec<f32>) -> PyResult<f32> {
    let features: Features = features
        .try_into()
        .map_err(|_| wrong(format!("features: expected {COUNT} numbers")))?;
    Ok(Classifier::parse(classifier).map_err(wrong)?.agreement(&features))
}

/// How far two answers agree, from 0 to 1; `measure` is "words" or "exact".
#[pyfunction]
fn route_compare(measure: &str, one: &str, other: &str) -> PyResult<f32> {
    match measure {
        "words" => Ok(Measure::Words.of(one, other)),
        "exact" => Ok(Measure::Exact.of(one, other)),
        _ => Err(wrong(format!("measure: expected words or exact, got {measure}"))),
    }
}

/// The mean of so many numbers from 0 to 1 with that sum, and the interval of 95 %: (mean, low, high).
#[pyfunction]
fn route_interval(count: usize, sum: f64) -> (f64, f64, f64) {
    let Interval { mean, low, high, .. } = Interval::of(count, sum);
    (mean, low, high)
}

/// Where a request of an alias would go, with every variant there and nothing measured yet: JSON. Raises ValueError.
#[pyfunction]
fn route_explain(alias_json: &str, body: &str, quality: &str) -> PyResult<String> {
    let alias: AliasConfig = serde_json::from_str(alias_json).map_err(wrong)?;
    let wish = match quality.is_empty() {
        true => alias.quality,
        false => Wish::from_name(quality).ok_or_else(|| wrong(format!("quality: {quality} is none")))?,
    };
    let features = seen(&draft(body)?);
    let mut candidates = Vec::new();
    for variant in &alias.variants {
        let number = |name: &str| alias.variants.iter().position(|other| other.model == name);
        candidates.push(Candidate {
            permitted: true,
            ready: true,
            quality: variant.quality as f32,
            expected: classifier(variant).map_err(wrong)?.agreement(&features),
            threshold: variant.threshold as f32,
            is_fallback: alias.fallback.contains(&variant.model),
            replaces: number(&variant.canary_of).map(|of| (of, variant.weight as f32)),
        });
    }
    // A session that no new version gets.
    let order = choice::order(&candidates, wish, 0.0, 1.0).ok_or_else(|| wrong("the alias has no variant"))?;
    let name = |number: &usize| alias.variants[*number].model.clone();
    let variants = alias.variants.iter().zip(&candidates).map(|(variant, candidate)| {
        serde_json::json!({
            "model": variant.model, "expected": candidate.expected, "threshold": candidate.threshold,
            "classifier": if variant.difficulty == Path::new("") { "default".to_owned() } else { variant.difficulty.display().to_string() },
        })
    });
    let features: serde_json::Map<_, _> = NAMES
        .iter()
        .zip(features)
        .map(|(name, value)| ((*name).to_owned(), value.into()))
        .collect();
    Ok(serde_json::json!({
        "alias": alias.name, "meant": name(&order.meant), "why": order.why.name(),
        "order": order.hops.iter().map(name).collect::<Vec<_>>(), "variants": variants.collect::<Vec<_>>(), "features": features,
    })
    .to_string())
}
