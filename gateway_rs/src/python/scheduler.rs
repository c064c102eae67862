//! `headrace._gateway.Scheduler`: the scheduler's decisions for the service that does its I/O. The work is
//! [`crate::scheduler`]'s; the interpreter lock is released while it runs.

use headrace_core::{
    cost,
    index::Limits,
    scheduler::{events::Link, Policy},
};
use parking_lot::Mutex;
use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyBytes, PyList, PyTuple},
};

use crate::scheduler::{self, Effects, Span, Status};

/// Adds this file's part to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(chunk_weight, module)?)?;
    module.add_function(wrap_pyfunction!(chunk_within, module)?)?;
    module.add_class::<Scheduler>()
}

/// What a part of a prompt behind `computed` tokens takes, in prompt tokens without attention.
#[pyfunction]
fn chunk_weight(tokens: u32, computed: u32, pair_tokens: f64) -> f64 {
    cost::chunk_weight(tokens, computed, pair_tokens)
}

/// The largest part behind `computed` tokens that takes no more than that.
#[pyfunction]
fn chunk_within(weight: f64, computed: u32, pair_tokens: f64) -> u32 {
    cost::chunk_within(weight, computed, pair_tokens)
}

/// The scheduler behind its wire messages.
#[pyclass(frozen, module = "headrace._gateway")]
struct Scheduler(Mutex<scheduler::Scheduler>);

#[pymethods]
impl Scheduler {
    /// A scheduler that knows nobody. `policy_json` sets what differs from the defaults. Raises ValueError.
    #[new]
    #[pyo3(signature = (policy_json, *, wait_buckets_s, seed, now_s, first_lease, max_index_bytes = 268_435_456))]
    fn new(
        policy_json: &str,
        wait_buckets_s: Vec<f64>,
        seed: u64,
        now_s: f64,
        first_lease: u64,
        max_index_bytes: usize,
    ) -> PyResult<Self> {
        let policy: Policy =
            serde_json::from_str(policy_json).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let limits = Limits {
            bytes: max_index_bytes,
            ..Limits::default()
        };
        let inner = scheduler::Scheduler::new(policy, wait_buckets_s, seed, now_s, first_lease, limits);
        Ok(Self(Mutex::new(inner)))
    }

    /// A message of a router's stream. Raises ValueError when the stream must end for it.
    fn router_message<'py>(
        &self,
        py: Python<'py>,
        now_s: f64,
        link: Link,
        message: &[u8],
    ) -> PyResult<Bound<'py, PyTuple>> {
        let effects = py.detach(|| self.0.lock().router_message(now_s, link, message));
        to_python(py, effects.map_err(PyValueError::new_err)?)
    }

    /// A router's stream has ended.
    fn router_lost<'py>(&self, py: Python<'py>, now_s: f64, link: Link) -> PyResult<Bound<'py, PyTuple>> {
        to_python(py, py.detach(|| self.0.lock().router_lost(now_s, link)))
    }

    /// A message of a worker's stream. Raises ValueError when the stream must end for it.
    fn worker_message<'py>(
        &self,
        py: Python<'py>,
        now_s: f64,
        link: Link,
        message: &[u8],
    ) -> PyResult<Bound<'py, PyTuple>> {
        let effects = py.detach(|| self.0.lock().worker_message(now_s, link, message));
        to_python(py, effects.map_err(PyValueError::new_err)?)
    }

    /// A worker's stream has ended.
    fn worker_lost<'py>(&self, py: Python<'py>, now_s: f64, link: Link) -> PyResult<Bound<'py, PyTuple>> {
        to_python(py, py.detach(|| self.0.lock().worker_lost(now_s, link)))
    }

    /// Time has passed.
    fn tick<'py>(&self, py: Python<'py>, now_s: f64) -> PyResult<Bound<'py, PyTuple>> {
        to_python(py, py.detach(|| self.0.lock().tick(now_s)))
    }

    /// When to tick at the latest; None = not before something happens.
    fn next_wakeup(&self) -> Option<f64> {
        self.0.lock().next_wakeup()
    }

    /// The first message of a stream that follows the cache's block news: a `WatchBlocksRequest`.
    fn blocks_known<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.0.lock().blocks_known()))
    }

    /// A `WatchBlocksResponse`; what to send back when something was missing. Raises ValueError when its stream must end for
    /// it.
    fn blocks_message<'py>(&self, py: Python<'py>, message: &[u8]) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let lost = py.detach(|| self.0.lock().blocks_message(message));
        Ok(lost.map_err(PyValueError::new_err)?.map(|lost| PyBytes::new(py, &lost)))
    }

    /// The cache has been away for long: what is known of blocks is forgotten.
    fn blocks_away(&self, py: Python<'_>) {
        py.detach(|| self.0.lock().blocks_away());
    }

    /// What routers are told of the fleet: a `PlaceResponse`.
    fn fleet_view<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.0.lock().fleet_view()))
    }

    /// The fleet as believed: a `GetFleetResponse`.
    fn fleet<'py>(&self, py: Python<'py>, now_s: f64) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.0.lock().fleet(now_s)))
    }

    /// Figures for metrics, as JSON.
    fn stats(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.lock().stats())
    }
}

/// `(sends, fleet_changed, ends, spans, notes)`, as `_gateway.pyi` describes them.
fn to_python(py: Python<'_>, effects: Effects) -> PyResult<Bound<'_, PyTuple>> {
    let sends = effects
        .sends
        .iter()
        .map(|(link, bytes)| (*link, PyBytes::new(py, bytes)));
    let sends = PyList::new(py, sends.collect::<Vec<_>>())?;
    let ends = effects.ends.into_iter().map(|end| {
        let status = match end.status {
            Status::InvalidArgument => "INVALID_ARGUMENT",
            Status::AlreadyExists => "ALREADY_EXISTS",
            Status::Unavailable => "UNAVAILABLE",
        };
        (end.link, status, end.message)
    });
    let ends = PyList::new(py, ends.collect::<Vec<_>>())?;
    let spans = PyList::empty(py);
    for span in effects.spans {
        spans.append(span_to_python(py, span)?)?;
    }
    (sends, effects.fleet_changed, ends, spans, effects.notes).into_pyobject(py)
}

fn span_to_python(py: Python<'_>, span: Span) -> PyResult<Bound<'_, PyTuple>> {
    match span {
        Span::Began {
            link,
            ask,
            request_id,
            class,
            prompt_tokens,
            traceparent,
            tracestate,
        } => {
            let attributes = (request_id, class, prompt_tokens);
            ("began", link, ask, attributes, (traceparent, tracestate)).into_pyobject(py)
        }
        Span::Granted {
            link,
            ask,
            worker_id,
            queue_s,
        } => ("granted", link, ask, (worker_id, queue_s), ()).into_pyobject(py),
        Span::Rejected { link, ask, reason } => ("rejected", link, ask, (reason,), ()).into_pyobject(py),
        Span::Withdrawn { link, ask } => ("cancelled", link, ask, (), ()).into_pyobject(py),
    }
}
