//! What headrace decides: the cost model, placement, the scheduler, and the simulator that drives them.
//!
//! Pure: no clock, sockets, tasks or randomness of its own. Time and generators are arguments, so the live service and
//! the simulator are two drivers of the same code. The extension (`gateway_rs`) is the only user.

pub mod blocks;
pub mod budgets;
pub mod cost;
pub mod credits;
pub mod index;
pub mod place;
pub mod routing;
pub mod scheduler;
pub mod sim;
