//! The certificates of a process: what is usable is decided here for Python's services too.

use std::path::PathBuf;

use pyo3::{exceptions::PyValueError, prelude::*};

use crate::plane::tls;

/// Adds this file's part to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Certificates>()
}

/// A certificate, its key and the authority of peers, in PEM files that may change.
#[pyclass(module = "headrace._gateway", frozen)]
struct Certificates(tls::Certificates);

#[pymethods]
impl Certificates {
    /// Reads and checks the files. Raises ValueError, naming the setting.
    #[staticmethod]
    fn load(py: Python<'_>, certificate: PathBuf, key: PathBuf, authority: PathBuf) -> PyResult<Self> {
        let files = tls::Files {
            certificate,
            key,
            authority,
        };
        let loaded = py.detach(|| tls::Certificates::load(files));
        loaded.map(Self).map_err(PyValueError::new_err)
    }

    /// Looks at the files; True when new ones are in force. Raises ValueError, once, when new ones cannot be used.
    fn refresh(&self, py: Python<'_>) -> PyResult<bool> {
        match py.detach(|| self.0.refresh()) {
            tls::Look::Same => Ok(false),
            tls::Look::Fresh(_) => Ok(true),
            tls::Look::Refused(reason) => Err(PyValueError::new_err(reason)),
        }
    }

    /// Certificate, key and authority, as PEM, all of the same state of the files.
    fn current(&self) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let current = self.0.current();
        (
            current.certificate_pem.clone(),
            current.key_pem.clone(),
            current.authority_pem.clone(),
        )
    }
}
