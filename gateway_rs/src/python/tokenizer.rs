//! `headrace._gateway.Tokenizer`: the tokenizer as Python sees it. The work is [`crate::tokenize`]'s; the interpreter
//! lock is released while it runs.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use pyo3::exceptions::{PyFileNotFoundError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyInt, PyList};

use crate::detok::StreamDecoder;
use crate::tokenize::{Tokenizer, TokenizerError};

/// Adds the classes of this file to the extension module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyTokenizer>()?;
    module.add_class::<PyStreamDecoder>()
}

fn to_python(error: TokenizerError) -> PyErr {
    let message = error.to_string();
    match error {
        TokenizerError::Read { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            PyFileNotFoundError::new_err(message)
        }
        TokenizerError::Read { .. } => PyOSError::new_err(message),
        TokenizerError::Invalid(_) | TokenizerError::Vocabulary(_) => PyValueError::new_err(message),
    }
}

/// One model's tokenizer: text to ids and back, with the ids of Hugging Face `tokenizers`.
#[pyclass(name = "Tokenizer", module = "headrace._gateway", frozen)]
pub(super) struct PyTokenizer {
    pub(super) inner: Arc<Tokenizer>,
    /// Each id as Python's integer, made when the first list is: a list of new ones takes as long as their encoding.
    ints: PyOnceLock<Vec<Py<PyInt>>>,
}

impl PyTokenizer {
    fn new(inner: Tokenizer) -> Self {
        Self {
            inner: Arc::new(inner),
            ints: PyOnceLock::new(),
        }
    }

    fn list<'py>(&self, py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, PyList>> {
        let int = |id: u32| {
            let Ok(int) = id.into_pyobject(py);
            int
        };
        let all = || (0..self.inner.vocab_size() as u32).map(|id| int(id).unbind()).collect();
        let ints = self.ints.get_or_init(py, all);
        let shared = |id: &u32| match ints.get(*id as usize) {
            Some(shared) => shared.bind(py).clone(),
            None => int(*id),
        };
        PyList::new(py, ids.iter().map(shared))
    }
}

#[pymethods]
impl PyTokenizer {
    /// Loads a `tokenizer.json`. Raises FileNotFoundError, OSError, or ValueError for what is no usable tokenizer.
    #[staticmethod]
    fn from_file(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(Self::new(py.detach(|| Tokenizer::from_file(path)).map_err(to_python)?))
    }

    /// Loads the text of a `tokenizer.json`. Raises ValueError.
    #[staticmethod]
    fn from_json(py: Python<'_>, json: &str) -> PyResult<Self> {
        let loaded = py.detach(|| Tokenizer::from_bytes(json.as_bytes()));
        Ok(Self::new(loaded.map_err(to_python)?))
    }

    /// The ids of `text`; nothing is put around it. Special tokens written in the text are recognised, unless
    /// `specials` is false (for what users type).
    #[pyo3(signature = (text, *, specials = true))]
    fn encode<'py>(&self, py: Python<'py>, text: &str, specials: bool) -> PyResult<Bound<'py, PyList>> {
        let ids = py.detach(|| {
            if specials {
                self.inner.encode(text)
            } else {
                self.inner.encode_plain(text)
            }
        });
        self.list(py, &ids)
    }

    /// `encode` for each text, on so many threads (0: one for each CPU); texts are taken by whoever is free.
    #[pyo3(signature = (texts, *, specials = true, threads = 0))]
    #[allow(clippy::needless_pass_by_value)] // PyO3 extracts owned values.
    fn encode_batch<'py>(
        &self,
        py: Python<'py>,
        texts: Vec<PyBackedStr>,
        specials: bool,
        threads: usize,
    ) -> PyResult<Vec<Bound<'py, PyList>>> {
        let encode = |text: &str| {
            if specials {
                self.inner.encode(text)
            } else {
                self.inner.encode_plain(text)
            }
        };
        let encoded = py.detach(|| {
            let cpus = || std::thread::available_parallelism().map_or(1, usize::from);
            let threads = if threads == 0 { cpus() } else { threads.min(MAX_THREADS) };
            in_parallel(&texts, threads, |text| encode(text))
        });
        encoded.iter().map(|ids| self.list(py, ids)).collect()
    }

    /// The text of `ids`. Bytes that aren't UTF-8 give U+FFFD; ids the vocabulary lacks have no text.
    #[pyo3(signature = (ids, *, skip_special = true))]
    fn decode(&self, py: Python<'_>, ids: Vec<u32>, skip_special: bool) -> String {
        py.detach(|| self.inner.decode(&ids, skip_special))
    }

    /// A decoder for one answer, an id at a time. `continuing`: after a prompt, so that a space at its start stays.
    #[pyo3(signature = (skip_special = true, *, continuing = false))]
    fn stream_decoder(&self, skip_special: bool, continuing: bool) -> PyStreamDecoder {
        let decoder = StreamDecoder::new(&self.inner, skip_special);
        PyStreamDecoder {
            inner: if continuing { decoder.continuing() } else { decoder },
        }
    }

    /// The bytes of `id`, not necessarily complete UTF-8; None for an id the vocabulary lacks.
    fn token_bytes<'py>(&self, py: Python<'py>, id: u32) -> Option<Bound<'py, PyBytes>> {
        self.inner.token_bytes(id).map(|bytes| PyBytes::new(py, bytes))
    }

    /// How the vocabulary spells `id`, or None.
    fn token_str(&self, id: u32) -> Option<&str> {
        self.inner.token_str(id)
    }

    /// The id with the vocabulary's spelling `token`, or None.
    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether `id` is a special token.
    fn is_special(&self, id: u32) -> bool {
        self.inner.is_special(id)
    }

    /// One more than the largest id.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.inner.vocab_size()
    }

    /// SHA-256 of the file's bytes, in hexadecimal.
    #[getter]
    fn hash(&self) -> &str {
        self.inner.hash()
    }

    /// Who encodes: `fast:<pattern family>` or `reference:<reason>`.
    #[getter]
    fn plan(&self) -> &str {
        self.inner.plan()
    }

    fn __repr__(&self) -> String {
        format!(
            "Tokenizer(plan={:?}, vocab_size={})",
            self.inner.plan(),
            self.inner.vocab_size()
        )
    }
}

/// More threads than this never help, and each costs memory.
const MAX_THREADS: usize = 256;

/// `work` on each item, in order, by at most so many threads.
fn in_parallel<T: Sync, R: Send>(items: &[T], threads: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = threads.min(items.len());
    if threads <= 1 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let take = || {
        let mut done = Vec::new();
        while let Some((index, item)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            items.get(index).map(|item| (index, item))
        } {
            done.push((index, work(item)));
        }
        done
    };
    let mut results: Vec<(usize, R)> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(take)).collect();
        let mut results = take();
        for other in others {
            match other.join() {
                Ok(done) => results.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

/// The text of one answer in the making.
#[pyclass(name = "StreamDecoder", module = "headrace._gateway")]
struct PyStreamDecoder {
    inner: StreamDecoder,
}

#[pymethods]
impl PyStreamDecoder {
    /// The text that `ids` complete, one after another.
    #[allow(clippy::needless_pass_by_value)] // PyO3 extracts owned values.
    fn push_all(&mut self, ids: Vec<u32>) -> String {
        let mut out = String::new();
        ids.iter().for_each(|id| self.inner.push(*id, &mut out));
        out
    }

    /// The text that `id` completes, often the empty string within a character.
    fn push(&mut self, id: u32) -> String {
        let mut out = String::new();
        self.inner.push(id, &mut out);
        out
    }

    /// The end of the answer: what still waits, as one U+FFFD.
    fn finish(&mut self) -> String {
        let mut out = String::new();
        self.inner.finish(&mut out);
        out
    }
}
