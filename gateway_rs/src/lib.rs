//! The hot path of headrace.
//!
//! The map:
//! - [`request`] is what a request may be, [`openai`] how HTTP clients write one and read its answer, [`template`],
//!   [`typed`] and [`tokenize`] make ids of it, [`detok`] and [`stops`] make text of ids, [`blocks`] names prefixes and answers,
//!   [`schema`] says which forms of answer may be asked for. All of these are pure: values in, values out.
//! - [`scheduler`] puts the scheduler's core (`headrace-core`) behind its wire messages, [`block_news`] the prefix index.
//! - [`plane`] alone does network: the router's data plane (axum, tonic, tokio).
//! - `python` alone knows PyO3; `memory` is the allocator.

pub mod block_news;
pub mod blocks;
mod date;
pub mod detok;
pub mod error;
mod ledger;
mod memory;
pub mod openai;
pub mod plane;
pub mod proto;
mod python;
pub mod request;
pub mod scheduler;
pub mod schema;
pub mod stops;
pub mod template;
pub mod tokenize;
pub mod tools;
pub mod typed;
