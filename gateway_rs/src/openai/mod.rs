//! The OpenAI HTTP API as values: bodies in, [`Draft`](crate::request::Draft)s out; answers in, bodies and events out.
//!
//! - [`chat`], [`completions`]: what a client may ask, field by field, with the types that JSON doesn't give. Ranges and
//!   relations are [`crate::request`]'s.
//! - [`batches`]: files and batches.
//! - [`tokens`]: `/tokenize` and `/detokenize`, as vLLM has them.
//! - [`write`]: bodies and server-sent events.
//!
//! Unknown fields are ignored; null is the same as absent; of a key written twice the last holds. A field that asks for
//! what we can't do is refused by name rather than ignored. No JSON makes any of this panic.

pub mod batches;
pub mod chat;
pub mod completions;
mod fields;
mod messages;
pub mod tokens;
pub mod write;

#[cfg(test)]
mod tests;

pub use fields::{parse_class, parse_quality};
