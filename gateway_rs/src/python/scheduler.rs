//! `headrace._gateway.Scheduler`: the scheduler's decisions for the service that does its I/O. The work is
//! [`crate::scheduler`]'s; the interpreter lock is released while it runs.

use std::{collections::BTreeMap, sync::Arc};

use headrace_core::{
    budgets::{Answer, Entry, Kept, MeterKey, Price},
    cost,
    index::Limits,
    scheduler::{
        events::{Class, Link},
        pool, Policy,
    },
};
use parking_lot::Mutex;
use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyBytes, PyList, PyTuple},
};

use crate::scheduler::{self, Books, Effects, Span, Status, TenantSettings};

/// Adds this file's part to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<StepBudget>()?;
    module.add_class::<Scheduler>()?;
    module.add_function(wrap_pyfunction!(slots_to_stay, module)?)
}

/// Of a worker's slots, those that overdue batch work may keep.
#[pyfunction]
fn slots_to_stay(slots: u64) -> u64 {
    pool::slots_to_stay(slots)
}

/// What of prompts one step of a worker may take.
#[pyclass(module = "headrace._gateway")]
struct StepBudget(cost::StepBudget);

#[pymethods]
impl StepBudget {
    #[new]
    fn new(told: u32, own: u32, idle: u32, pair_tokens: f64, decoding: u32, beginning: u32) -> Self {
        let limits = cost::ChunkLimits {
            told,
            own,
            idle,
            pair_tokens,
        };
        Self(cost::StepBudget::new(limits, decoding, beginning))
    }

    /// Whether another part of a prompt may begin.
    #[getter]
    fn open(&self) -> bool {
        self.0.is_open()
    }

    /// The next part: of `left` tokens behind `computed` of the same prompt.
    fn take(&mut self, left: u32, computed: u32) -> u32 {
        self.0.take(left, computed)
    }
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

    /// Opens the books, before anything else; see `_gateway.pyi`. Raises ValueError.
    fn open_books(
        &self,
        now_s: f64,
        books_json: &str,
        tenants_json: &str,
        kept: Vec<Bound<'_, PyTuple>>,
    ) -> PyResult<()> {
        let books: Books = from_json(books_json)?;
        let kept = kept.iter().map(kept_from_python).collect::<PyResult<Vec<_>>>()?;
        self.0.lock().open_books(now_s, books, from_json(tenants_json)?, kept);
        Ok(())
    }

    /// What tenants may spend, and their shares. Raises ValueError.
    fn set_tenants(&self, now_s: f64, tenants_json: &str) -> PyResult<()> {
        let tenants: BTreeMap<String, TenantSettings> = from_json(tenants_json)?;
        self.0.lock().set_tenants(now_s, tenants);
        Ok(())
    }

    /// What the ledger has to do next, in order.
    fn ledger_take<'py>(&self, py: Python<'py>, most: usize) -> PyResult<Bound<'py, PyList>> {
        let entries = py.detach(|| self.0.lock().ledger_take(most));
        let list = PyList::empty(py);
        for entry in &entries {
            list.append(entry_to_python(py, entry)?)?;
        }
        Ok(list)
    }

    /// All of it is durable; one answer for each.
    fn ledger_done<'py>(&self, py: Python<'py>, now_s: f64, answers: Vec<(u64, u64)>) -> PyResult<Bound<'py, PyTuple>> {
        let answers = answers
            .into_iter()
            .map(|(first, second)| Answer { first, second })
            .collect();
        to_python(py, py.detach(|| self.0.lock().ledger_done(now_s, answers)))
    }

    /// Seconds for a token of a prompt and of an answer, by pool, as measured.
    fn measured(&self) -> BTreeMap<String, (f64, f64)> {
        self.0.lock().measured()
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

/// `(sends, fleet_changed, ends, spans, notes, ledger)`, as `_gateway.pyi` describes them.
fn to_python(py: Python<'_>, effects: Effects) -> PyResult<Bound<'_, PyTuple>> {
    let sends = effects
        .sends
        .iter()
        .map(|(link, bytes)| (*link, PyBytes::new(py, bytes)));
    let sends = PyList::new(py, sends.collect::<Vec<_>>())?;
    let mut effects = effects;
    let ends = std::mem::take(&mut effects.ends).into_iter().map(|end| {
        let status = match end.status {
            Status::InvalidArgument => "INVALID_ARGUMENT",
            Status::AlreadyExists => "ALREADY_EXISTS",
            Status::Unavailable => "UNAVAILABLE",
        };
        (end.link, status, end.message)
    });
    let ends = PyList::new(py, ends.collect::<Vec<_>>())?;
    let spans = PyList::empty(py);
    for span in std::mem::take(&mut effects.spans) {
        spans.append(span_to_python(py, span)?)?;
    }
    let Effects {
        fleet_changed,
        notes,
        ledger,
        ..
    } = effects;
    (sends, fleet_changed, ends, spans, notes, ledger).into_pyobject(py)
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

fn from_json<T: serde::de::DeserializeOwned>(text: &str) -> PyResult<T> {
    serde_json::from_str(text).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// A tuple whose first word is the kind; what follows is in the order of `services/headrace/ledger/store.py`.
fn entry_to_python<'py>(py: Python<'py>, entry: &Entry) -> PyResult<Bound<'py, PyTuple>> {
    // Unix times are milliseconds there, and bookings have a sign, as databases want it.
    let ms = |seconds: f64| (seconds * 1000.0).round() as i64;
    let meter = |meter: &MeterKey| (meter.tenant.to_string(), meter.of.name(), meter.of.id());
    match entry {
        Entry::Row(row) => {
            let of = &row.of;
            let who = (
                of.booking as i64,
                &*of.request_id,
                ms(of.placed_s),
                &*of.tenant,
                &*of.session,
                &*of.alias,
                &*of.pool,
                of.class.name(),
                &*of.outcome,
            );
            let tokens = (
                of.prompt_tokens,
                of.cached_tokens,
                of.output_tokens,
                of.wasted_tokens,
                row.replayed_prompt_tokens,
                row.replayed_output_tokens,
            );
            let times = (of.queue_s, of.ttft_s, of.decode_s, of.kv_block_s);
            let money = (
                row.nano_dollars,
                row.prefix_saved_nano_dollars,
                row.answer_saved_nano_dollars,
                row.variant_saved_nano_dollars,
                row.price.prompt,
                row.price.output,
                i32::from(of.shadow),
            );
            concatenated(
                py,
                [
                    ("row",).into_pyobject(py)?,
                    who.into_pyobject(py)?,
                    tokens.into_pyobject(py)?,
                    times.into_pyobject(py)?,
                    money.into_pyobject(py)?,
                ],
            )
        }
        Entry::Keep(kept) => {
            let who = (
                kept.booking as i64,
                &*kept.router,
                &*kept.request_id,
                &*kept.tenant,
                &*kept.session,
                &*kept.alias,
                &*kept.pool,
                kept.class.name(),
                ms(kept.placed_s),
            );
            let held = (
                kept.prompt_tokens,
                kept.tokens,
                kept.nano_dollars,
                kept.allowance,
                kept.price.prompt,
                kept.price.output,
            );
            concatenated(
                py,
                [
                    ("keep",).into_pyobject(py)?,
                    who.into_pyobject(py)?,
                    held.into_pyobject(py)?,
                ],
            )
        }
        Entry::Forget(booking) => ("forget", *booking as i64).into_pyobject(py),
        Entry::Look {
            meter: key,
            want,
            limit,
        } => {
            let (tenant, kind, id) = meter(key);
            let (from_s, to_s) = key.of.window_s().unwrap_or((0, 0));
            ("look", tenant, kind, id, from_s * 1000, to_s * 1000, *want, *limit).into_pyobject(py)
        }
        Entry::Return { meter: key, drawn } => {
            let (tenant, kind, id) = meter(key);
            ("return", tenant, kind, id, *drawn).into_pyobject(py)
        }
    }
}

fn concatenated<'py, const N: usize>(
    py: Python<'py>,
    parts: [Bound<'py, PyTuple>; N],
) -> PyResult<Bound<'py, PyTuple>> {
    PyTuple::new(py, parts.iter().flatten().collect::<Vec<_>>())
}

fn kept_from_python(kept: &Bound<'_, PyTuple>) -> PyResult<Kept> {
    let text = |at: usize| -> PyResult<Arc<str>> { Ok(kept.get_item(at)?.extract::<String>()?.into()) };
    let class = text(7)?;
    Ok(Kept {
        booking: kept.get_item(0)?.extract::<i64>()? as u64,
        router: text(1)?,
        request_id: text(2)?,
        tenant: text(3)?,
        session: text(4)?,
        alias: text(5)?,
        pool: text(6)?,
        class: Class::ALL
            .into_iter()
            .find(|each| each.name() == &*class)
            .unwrap_or_default(),
        placed_s: kept.get_item(8)?.extract::<i64>()? as f64 / 1000.0,
        prompt_tokens: kept.get_item(9)?.extract()?,
        tokens: kept.get_item(10)?.extract()?,
        nano_dollars: kept.get_item(11)?.extract()?,
        allowance: kept.get_item(12)?.extract()?,
        price: Price {
            prompt: kept.get_item(13)?.extract()?,
            output: kept.get_item(14)?.extract()?,
        },
    })
}
