//! The scheduler's decisions: who runs each request, and when.
//!
//! A function of its inputs: no clock, sockets, tasks or randomness of its own. The live service, the simulator and tests
//! are drivers of the same core:
//!
//! ```text
//! Core::new(policy: Policy, seed: u64, now_s: f64, first_lease: LeaseId)
//! core.step(now_s: f64, event: Event, actions: &mut Vec<Action>)   // appends; time never goes back
//! core.next_wakeup() -> Option<f64>                                 // call step(.., Event::Tick, ..) then, at the latest
//! ```
//!
//! The driver's duties, in this order: turn what happened into one event and step with the time of *now*; carry out the
//! actions in their order; step with [`events::Event::Tick`] when the time of `next_wakeup` has come.

pub mod actions;
pub mod events;
pub mod fair;
pub mod fleet;
pub mod kinds;
pub mod leases;
pub mod lengths;
pub mod pool;
pub mod prompts;
pub mod queue;
pub mod search;
pub mod steps;
pub mod worker;

mod admission;
mod apart;
mod core;
mod lending;
pub(crate) mod map;
mod members;
mod placement;
mod policy;
mod preemption;
mod rate;
mod spending;
#[cfg(test)]
mod tests;

pub use self::{
    core::{Core, Measures, Oddities, Predictions, Router},
    placement::PASS_LIMIT,
    policy::{Disaggregation, Policy},
};
