//! `headrace._gateway.PrefixIndex` and `BlockHub`: who holds which prefix blocks. The work is `headrace_core`'s and
//! [`crate::block_news`]'s; the interpreter lock is released while it runs.

use headrace_core::{
    blocks::{Link, PART},
    index::{self, Limits, Overlap, WorkerId},
};
use parking_lot::{Mutex, RwLock};
use pyo3::{buffer::PyBuffer, exceptions::PyValueError, prelude::*, types::PyBytes};

use crate::block_news::Hub;

/// Adds this file's part to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<BlockHub>()?;
    module.add_class::<PrefixIndex>()
}

fn limits(max_bytes: usize, root_share: f64) -> Limits {
    Limits {
        bytes: max_bytes,
        root_share,
    }
}

/// Names of blocks: an array of 64-bit numbers (`array("Q")`), which is copied as it is, or any sequence of numbers.
struct Hashes(Vec<u64>);

impl<'py> FromPyObject<'_, 'py> for Hashes {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        match PyBuffer::<u64>::get(&object) {
            Ok(buffer) => buffer.to_vec(object.py()).map(Self),
            Err(_) => object.extract().map(Self),
        }
    }
}

/// Who holds which prefix blocks. Shareable between threads.
#[pyclass(frozen, module = "headrace._gateway")]
struct PrefixIndex(RwLock<index::PrefixIndex>);

#[pymethods]
impl PrefixIndex {
    /// One that knows nothing and takes no more memory than that.
    #[new]
    #[pyo3(signature = (max_bytes, *, root_share = 0.5, seed = 0))]
    fn new(max_bytes: usize, root_share: f64, seed: u64) -> Self {
        Self(RwLock::new(index::PrefixIndex::new(
            limits(max_bytes, root_share),
            seed,
        )))
    }

    /// The worker holds these blocks now, each the child of the one before it; 0 = a prompt begins with the first.
    fn store(&self, py: Python<'_>, worker: WorkerId, parent: u64, hashes: Hashes) {
        let hashes = hashes.0;
        py.detach(|| {
            let mut parent = parent;
            for part in hashes.chunks(PART) {
                self.0.write().store(worker, parent, part);
                parent = part.last().copied().unwrap_or(parent);
            }
        });
    }

    /// The worker no longer holds these.
    fn remove(&self, py: Python<'_>, worker: WorkerId, hashes: Vec<u64>) {
        py.detach(|| hashes.chunks(PART).for_each(|part| self.0.write().remove(worker, part)));
    }

    /// The worker holds nothing any more.
    fn clear(&self, py: Python<'_>, worker: WorkerId) {
        py.detach(|| while !self.0.write().clear_some(worker, PART) {});
    }

    /// Workers that hold the first block, each with how many leading blocks it holds without a gap.
    fn find(&self, py: Python<'_>, hashes: Hashes) -> Vec<(WorkerId, u32)> {
        let hashes = hashes.0;
        py.detach(|| {
            let mut overlaps: Vec<Overlap> = Vec::new();
            self.0.read().overlap(&hashes, &mut overlaps);
            overlaps.iter().map(|each| (each.worker, each.blocks)).collect()
        })
    }

    /// Different blocks that somebody holds.
    fn __len__(&self) -> usize {
        self.0.read().len()
    }

    /// Blocks held, each counted for each of its holders.
    #[getter]
    fn holdings(&self) -> usize {
        self.0.read().holdings()
    }

    /// Memory allocated.
    #[getter]
    fn memory_bytes(&self) -> usize {
        self.0.read().bytes()
    }
}

/// The cache's part of block news: follows workers, and lets schedulers and routers follow.
#[pyclass(frozen, module = "headrace._gateway")]
struct BlockHub(Mutex<Hub>);

#[pymethods]
impl BlockHub {
    /// One that knows nobody. `seed` should be secret: it decides which blocks share a bucket.
    #[new]
    #[pyo3(signature = (max_bytes, *, root_share = 0.5, seed = 0))]
    fn new(max_bytes: usize, root_share: f64, seed: u64) -> Self {
        Self(Mutex::new(Hub::new(limits(max_bytes, root_share), seed)))
    }

    /// A message of a worker's stream: what to send back, and the watchers that there is news for. Raises ValueError when
    /// the stream must end for it.
    fn worker_message<'py>(
        &self,
        py: Python<'py>,
        link: Link,
        message: &[u8],
    ) -> PyResult<(Option<Bound<'py, PyBytes>>, Vec<Link>)> {
        let effects = py.detach(|| self.0.lock().worker_message(link, message));
        let (want, woken) = effects.map_err(PyValueError::new_err)?;
        Ok((want.map(|want| PyBytes::new(py, &want)), woken))
    }

    /// A worker's stream has ended.
    fn worker_lost(&self, py: Python<'_>, now_s: f64, link: Link) {
        py.detach(|| self.0.lock().worker_lost(now_s, link));
    }

    /// A message of a watcher's stream, for which there may be news now. Raises ValueError when the stream must end for it.
    fn watcher_message(&self, py: Python<'_>, now_s: f64, link: Link, message: &[u8]) -> PyResult<()> {
        py.detach(|| self.0.lock().watcher_message(now_s, link, message))
            .map_err(PyValueError::new_err)
    }

    /// A watcher's stream has ended.
    fn watcher_lost(&self, link: Link) {
        self.0.lock().watcher_lost(link);
    }

    /// What a watcher is to hear next, and whether there is more: a message, empty when there is nothing.
    fn news<'py>(&self, py: Python<'py>, link: Link) -> (Bound<'py, PyBytes>, bool) {
        let (news, more) = py.detach(|| self.0.lock().news(link));
        (PyBytes::new(py, &news), more)
    }

    /// Time has passed: the watchers that there is news for.
    fn tick(&self, py: Python<'_>, now_s: f64) -> Vec<Link> {
        py.detach(|| self.0.lock().tick(now_s))
    }

    /// When to tick at the latest; None = not before something happens.
    fn next_wakeup(&self) -> Option<f64> {
        self.0.lock().hub().next_wakeup()
    }

    /// Who holds the beginning of a prefix, longest first: `(worker_id, instance_id, blocks)`.
    fn find(&self, py: Python<'_>, pool: &str, hashes: Vec<u64>) -> Vec<(String, String, u32)> {
        let found = py.detach(|| self.0.lock().find(pool, &hashes));
        let row = |holder: headrace_core::blocks::Holder| {
            (
                holder.worker_id.to_string(),
                holder.instance_id.to_string(),
                holder.blocks,
            )
        };
        found.into_iter().map(row).collect()
    }

    /// Blocks held, each counted for each of its holders.
    #[getter]
    fn holdings(&self) -> usize {
        self.0.lock().hub().blocks().index().holdings()
    }

    /// Memory of the index.
    #[getter]
    fn memory_bytes(&self) -> usize {
        self.0.lock().hub().blocks().index().bytes()
    }

    /// Blocks given up for want of room.
    #[getter]
    fn evicted(&self) -> u64 {
        self.0.lock().hub().blocks().index().evicted()
    }

    /// Lost events.
    #[getter]
    fn gaps(&self) -> u64 {
        self.0.lock().hub().blocks().gaps()
    }

    /// Workers whose stream is open.
    #[getter]
    fn workers(&self) -> usize {
        self.0.lock().hub().workers()
    }

    /// Schedulers and routers that follow.
    #[getter]
    fn watchers(&self) -> usize {
        self.0.lock().hub().watchers()
    }
}
