//! Simulation for Python: workloads, runs and their records. The work is `headrace_core::sim`'s, with the interpreter's lock
//! released; a run asks for signals now and then, so that Ctrl-C ends it.

use headrace_core::cost::{CostTable, Shape};
use headrace_core::place::Policy;
use headrace_core::scheduler::events::Class;
use headrace_core::sim::outcome::{Fate, Outcome, Record};
use headrace_core::sim::settings::Settings;
use headrace_core::sim::workload::{ServegenClient, Synthetic, Workload};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Adds this file's classes and functions to the extension module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyWorkload>()?;
    module.add_class::<PyOutcome>()?;
    module.add_class::<PyCostTable>()?;
    module.add_function(wrap_pyfunction!(simulate, module)?)?;
    module.add_function(wrap_pyfunction!(cost_tables, module)?)?;
    module.add_function(wrap_pyfunction!(placement_policies, module)?)
}

#[allow(clippy::needless_pass_by_value)] // As map_err calls it.
fn wrong(error: impl std::error::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Requests of a trace, or made up.
#[pyclass(name = "Workload", module = "headrace._gateway", frozen)]
struct PyWorkload(Workload);

#[pymethods]
impl PyWorkload {
    /// Mooncake's format.
    #[staticmethod]
    fn mooncake(py: Python<'_>, text: &str) -> PyResult<Self> {
        py.detach(|| Workload::mooncake(text)).map(Self).map_err(wrong)
    }

    /// Azure's format of 2023.
    #[staticmethod]
    fn azure(py: Python<'_>, text: &str) -> PyResult<Self> {
        py.detach(|| Workload::azure(text)).map(Self).map_err(wrong)
    }

    /// What an engine measured.
    #[staticmethod]
    fn measured(py: Python<'_>, text: &str) -> PyResult<Self> {
        py.detach(|| Workload::measured(text)).map(Self).map_err(wrong)
    }

    /// ServeGen's clients: (name, text of the trace file, text of the data set).
    #[staticmethod]
    #[allow(clippy::needless_pass_by_value)] // PyO3 extracts owned values.
    fn servegen(
        py: Python<'_>,
        clients: Vec<(String, String, String)>,
        start_s: f64,
        duration_s: f64,
        seed: u64,
    ) -> PyResult<Self> {
        py.detach(|| {
            let client = |(name, trace, dataset)| ServegenClient { name, trace, dataset };
            let texts = clients
                .iter()
                .map(|each| (each.0.as_str(), each.1.as_str(), each.2.as_str()));
            let clients: Vec<ServegenClient<'_>> = texts.map(client).collect();
            Workload::servegen(&clients, start_s, duration_s, seed)
        })
        .map(Self)
        .map_err(wrong)
    }

    /// Made up.
    #[staticmethod]
    fn synthetic(py: Python<'_>, settings_json: &str, seed: u64) -> PyResult<Self> {
        let like = Synthetic::parse(settings_json).map_err(wrong)?;
        Ok(Self(py.detach(|| Workload::synthetic(&like, seed))))
    }

    /// The same with conversations found, for closed loops.
    fn with_sessions(&self, py: Python<'_>) -> Self {
        py.detach(|| {
            let mut workload = self.0.clone();
            workload.chain_sessions();
            Self(workload)
        })
    }

    /// The first so many requests.
    fn first(&self, requests: usize) -> Self {
        let mut workload = self.0.clone();
        workload.requests.truncate(requests);
        Self(workload)
    }

    fn __len__(&self) -> usize {
        self.0.requests.len()
    }

    #[getter]
    fn span_s(&self) -> f64 {
        self.0.span_s()
    }

    #[getter]
    fn block_tokens(&self) -> u32 {
        self.0.block_tokens
    }

    #[getter]
    fn tenants(&self) -> Vec<String> {
        self.0.tenants.clone()
    }
}

/// Runs a workload. `progress` is called with requests ended and requests in all.
#[pyfunction]
#[pyo3(signature = (workload, settings_json, progress = None))]
#[allow(clippy::needless_pass_by_value)] // PyO3 extracts owned values.
fn simulate(
    py: Python<'_>,
    workload: &Bound<'_, PyWorkload>,
    settings_json: &str,
    progress: Option<Py<PyAny>>,
) -> PyResult<PyOutcome> {
    let settings = Settings::parse(settings_json).map_err(wrong)?;
    let workload = &workload.get().0;
    let mut stopped = None;
    let outcome = py.detach(|| {
        let mut on_progress = |ended: u64, all: u64| {
            let told = Python::attach(|py| {
                py.check_signals()?;
                progress
                    .as_ref()
                    .map_or(Ok(()), |progress| progress.call1(py, (ended, all)).map(drop))
            });
            stopped = told.err();
            stopped.is_none()
        };
        settings.run(workload, &mut on_progress)
    });
    let outcome = outcome.map_err(wrong)?;
    match (outcome, stopped) {
        (Some(outcome), _) => Ok(PyOutcome(outcome)),
        (None, Some(error)) => Err(error),
        (None, None) => Err(PyValueError::new_err("the simulation was stopped")),
    }
}

/// What a run showed.
#[pyclass(name = "Outcome", module = "headrace._gateway", frozen)]
struct PyOutcome(Outcome);

#[pymethods]
impl PyOutcome {
    /// Figures as JSON, over all requests, or those of a class or tenant.
    #[pyo3(signature = (*, request_class = None, tenant = None))]
    fn summary_json(&self, py: Python<'_>, request_class: Option<&str>, tenant: Option<u32>) -> PyResult<String> {
        let class = match request_class {
            None => None,
            Some(name) => Some(
                Class::ALL
                    .into_iter()
                    .find(|class| class.name() == name)
                    .ok_or_else(|| PyValueError::new_err(format!("no request class {name}")))?,
            ),
        };
        let wanted = |each: &Record| {
            class.is_none_or(|class| each.class == class) && tenant.is_none_or(|tenant| each.tenant == tenant)
        };
        serde_json::to_string(&py.detach(|| self.0.summary(wanted))).map_err(wrong)
    }

    /// A value of each request, in the workload's order; NaN where it has none.
    fn column(&self, py: Python<'_>, name: &str) -> PyResult<Vec<f64>> {
        let none = f64::NAN;
        let of: fn(&Record) -> Option<f64> = match name {
            "arrival_s" => |each| Some(each.arrival_s),
            "due_s" => |each| Some(each.due_s),
            "first_token_s" => |each| each.first_token_s,
            "finished_s" => |each| each.finished_s,
            "ttft_s" => Record::ttft_s,
            "tpot_s" => Record::tpot_s,
            "prompt_tokens" => |each| Some(f64::from(each.prompt_tokens)),
            "cached_tokens" => |each| Some(f64::from(each.cached_tokens)),
            "output_tokens" => |each| Some(f64::from(each.output_tokens)),
            "tenant" => |each| Some(f64::from(each.tenant)),
            "worker" => |each| Some(f64::from(each.worker)),
            "attempts" => |each| Some(f64::from(each.attempts)),
            "rejected" => |each| Some(f64::from(u8::from(each.fate == Fate::Rejected))),
            _ => return Err(PyValueError::new_err(format!("no column {name}"))),
        };
        Ok(py.detach(|| self.0.records.iter().map(|each| of(each).unwrap_or(none)).collect()))
    }

    fn __len__(&self) -> usize {
        self.0.records.len()
    }
}

/// Measured step times.
#[pyclass(name = "CostTable", module = "headrace._gateway", frozen)]
struct PyCostTable(CostTable);

#[pymethods]
impl PyCostTable {
    /// A built-in one.
    #[staticmethod]
    fn named(name: &str) -> PyResult<Self> {
        CostTable::named(name).map(Self).map_err(wrong)
    }

    /// One of one's own.
    #[staticmethod]
    fn parse(json: &str) -> PyResult<Self> {
        CostTable::parse(json).map(Self).map_err(wrong)
    }

    /// As JSON.
    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).map_err(wrong)
    }

    /// Seconds that a step takes.
    #[pyo3(signature = (decodes, context_tokens, chunks = Vec::new()))]
    #[allow(clippy::needless_pass_by_value)] // PyO3 extracts owned values.
    fn step_s(&self, decodes: u32, context_tokens: u64, chunks: Vec<(u32, u32)>) -> f64 {
        let add = |shape: Shape, &(tokens, cached): &(u32, u32)| shape.with_chunk(tokens, cached);
        let shape = chunks.iter().fold(Shape::decode(decodes, context_tokens), add);
        self.0.step_ms(&shape) / 1000.0
    }

    #[getter]
    fn kv_tokens(&self) -> u64 {
        self.0.kv_tokens
    }
}

/// The built-in cost tables as a JSON array.
#[pyfunction]
fn cost_tables() -> PyResult<String> {
    let tables = CostTable::builtin().map_err(wrong)?;
    serde_json::to_string(&tables).map_err(wrong)
}

/// Names of the placement rules.
#[pyfunction]
fn placement_policies() -> Vec<String> {
    Policy::ALL.iter().map(ToString::to_string).collect()
}
