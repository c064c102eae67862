//! What Python sees of the crate: the module `headrace._gateway`. Nothing outside this folder knows PyO3.
//! `services/headrace/_gateway.pyi` is its description, checked against the built module.

mod blocks;
mod router;
mod routing;
mod scheduler;
mod sim;
mod text;
mod tls;
mod tokenizer;

use pyo3::prelude::*;

/// The extension module `headrace._gateway`.
#[pymodule]
fn _gateway(module: &Bound<'_, PyModule>) -> PyResult<()> {
    crate::memory::set_up();
    blocks::register(module)?;
    router::register(module)?;
    routing::register(module)?;
    scheduler::register(module)?;
    sim::register(module)?;
    text::register(module)?;
    tls::register(module)?;
    tokenizer::register(module)
}
