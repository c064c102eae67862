//! Which variant of a model a request goes to: pure rules, without clock, chance or text that is kept.
//!
//! A name that clients ask for (an alias) is served by variants, best first: sizes and quantisations that differ in quality
//! and price. [`choice`] puts them in order for one request; [`features`] and [`difficulty`] say how likely a smaller one
//! answers as the best would; [`confidence`] and [`refusal`] say whether one has, of its answer itself; [`quality`] measures that and moves the threshold; [`rollout`] gives a new version its share
//! and takes it back. The router's data plane is the one that calls; it knows pools, caches and answers.

pub mod agreement;
pub mod choice;
pub mod confidence;
pub mod difficulty;
pub mod features;
pub mod quality;
pub mod refusal;
pub mod rollout;

/// The classifier that is used where none is named.
pub const DEFAULT_CLASSIFIER: &str = include_str!("../../data/difficulty.json");
