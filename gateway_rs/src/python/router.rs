//! The router's data plane as one object: Python starts it, watches it and stops it; nothing of a request comes here.

use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
};

use crate::plane::{
    batches::Standing,
    config::{AliasConfig, PlaneConfig},
    server::Server,
};

/// Adds this file's part to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Router>()
}

/// The data plane of one router process.
#[pyclass(module = "headrace._gateway")]
struct Router {
    server: Option<Server>,
}

#[pymethods]
impl Router {
    /// Opens both ports and the links. `config_json` is a `PlaneConfig`. Raises ValueError when a setting is wrong.
    #[staticmethod]
    fn start(py: Python<'_>, config_json: &str) -> PyResult<Self> {
        let config: PlaneConfig =
            serde_json::from_str(config_json).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let server = py.detach(|| Server::start(config)).map_err(PyValueError::new_err)?;
        Ok(Self { server: Some(server) })
    }

    /// `host:port` of HTTP.
    #[getter]
    fn http_address(&self) -> PyResult<String> {
        Ok(self.running()?.http_address.to_string())
    }

    /// `host:port` of gRPC.
    #[getter]
    fn grpc_address(&self) -> PyResult<String> {
        Ok(self.running()?.grpc_address.to_string())
    }

    /// Puts these names with several variants in the place of the former ones: a list of `AliasConfig`. Raises ValueError.
    fn set_aliases(&self, py: Python<'_>, aliases_json: &str) -> PyResult<()> {
        let aliases: Vec<AliasConfig> =
            serde_json::from_str(aliases_json).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let server = self.running()?;
        py.detach(|| server.set_aliases(&aliases))
            .map_err(PyValueError::new_err)
    }

    /// What is shown of batches on the page of metrics: a `Standing`. Raises ValueError when it is none.
    fn show_batches(&self, standing_json: &str) -> PyResult<()> {
        let standing: Standing =
            serde_json::from_str(standing_json).map_err(|error| PyValueError::new_err(error.to_string()))?;
        self.running()?.show_batches(&standing);
        Ok(())
    }

    /// Takes nothing new and waits for open streams, within the grace of the configuration.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let server = self.running()?;
        py.detach(|| server.drain());
        Ok(())
    }

    /// Ends what still runs and closes the ports. Stopping twice does nothing.
    fn stop(&mut self, py: Python<'_>) {
        if let Some(server) = self.server.take() {
            py.detach(|| server.stop());
        }
    }
}

impl Router {
    fn running(&self) -> PyResult<&Server> {
        self.server
            .as_ref()
            .ok_or_else(|| PyRuntimeError::new_err("the router is stopped"))
    }
}
