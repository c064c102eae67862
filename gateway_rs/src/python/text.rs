//! Chat templates, stop strings and block names for Python.
//!
//! Work that grows with its input is done with the GIL released. Errors are `ValueError`s whose text is written for people.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use serde_json::{Map, Value};

use crate::blocks::{self, Seed};
use crate::openai::chat;
use crate::request::{ChatPrompt, Prompt};
use crate::stops::{self, StopSet};
use crate::template::{self, RenderOptions};
use crate::typed;

use super::tokenizer::PyTokenizer;

/// Adds this file's classes and functions to the extension module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ChatTemplate>()?;
    module.add_class::<StopMatcher>()?;
    module.add_function(wrap_pyfunction!(block_hashes, module)?)
}

/// A model's chat template.
#[pyclass(frozen, module = "headrace._gateway")]
pub struct ChatTemplate(template::ChatTemplate);

#[pymethods]
impl ChatTemplate {
    #[new]
    #[pyo3(signature = (source, bos_token = "", eos_token = ""))]
    fn new(py: Python<'_>, source: &str, bos_token: &str, eos_token: &str) -> PyResult<Self> {
        py.detach(|| template::ChatTemplate::new(source, bos_token, eos_token))
            .map(Self)
            .map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// The prompt text of messages (a JSON array as in OpenAI's API), with the checks and the normal form of the router.
    #[pyo3(signature = (messages_json, *, tools_json = None, template_kwargs_json = None, add_generation_prompt = true, now_s = 0, max_bytes = 16_777_216))]
    #[allow(clippy::too_many_arguments)] // Named by the caller.
    fn render(
        &self,
        py: Python<'_>,
        messages_json: &str,
        tools_json: Option<&str>,
        template_kwargs_json: Option<&str>,
        add_generation_prompt: bool,
        now_s: i64,
        max_bytes: usize,
    ) -> PyResult<String> {
        py.detach(|| {
            let chat = chat_prompt(messages_json, tools_json, template_kwargs_json, add_generation_prompt)?;
            let options = RenderOptions {
                now_s,
                max_bytes,
                param: "messages",
            };
            self.0.render(&chat, &options).map_err(|error| error.to_string())
        })
        .map_err(PyValueError::new_err)
    }

    /// The ids of that prompt text. What the messages hold of special tokens' texts is text, unless `typed_specials`.
    #[pyo3(signature = (tokenizer, messages_json, *, tools_json = None, template_kwargs_json = None, add_generation_prompt = true, typed_specials = false, now_s = 0, max_bytes = 16_777_216))]
    #[allow(clippy::too_many_arguments)] // Named by the caller.
    fn encode(
        &self,
        py: Python<'_>,
        tokenizer: &PyTokenizer,
        messages_json: &str,
        tools_json: Option<&str>,
        template_kwargs_json: Option<&str>,
        add_generation_prompt: bool,
        typed_specials: bool,
        now_s: i64,
        max_bytes: usize,
    ) -> PyResult<Vec<u32>> {
        py.detach(|| {
            let chat = chat_prompt(messages_json, tools_json, template_kwargs_json, add_generation_prompt)?;
            let options = RenderOptions {
                now_s,
                max_bytes,
                param: "messages",
            };
            let tokenizer = &tokenizer.inner;
            if typed_specials {
                let text = self.0.render(&chat, &options).map_err(|error| error.to_string())?;
                return Ok(tokenizer.encode(&text));
            }
            let rendered = typed::render(&self.0, &chat, &options, tokenizer.special_texts());
            let rendered = rendered.map_err(|error| error.to_string())?;
            tokenizer
                .encode_bounded(&rendered.text, &rendered.typed, None, usize::MAX)
                .map_err(|error| error.to_string())
        })
        .map_err(PyValueError::new_err)
    }
}

/// The conversation of these fields, with the checks and the normal form of the router.
fn chat_prompt(
    messages_json: &str,
    tools_json: Option<&str>,
    template_kwargs_json: Option<&str>,
    add_generation_prompt: bool,
) -> Result<ChatPrompt, String> {
    let fields = [
        ("messages", Some(messages_json)),
        ("tools", tools_json),
        ("chat_template_kwargs", template_kwargs_json),
    ];
    let body = chat_body(&fields, add_generation_prompt)?;
    let draft = chat::parse(&body).map_err(|error| error.to_string())?;
    match draft.prompts.into_iter().next() {
        Some(Prompt::Chat(chat)) => Ok(chat),
        _ => Err("there are no messages".to_owned()),
    }
}

/// A chat body of these fields, so that Python's messages go the way of everybody's.
fn chat_body(fields: &[(&str, Option<&str>)], add_generation_prompt: bool) -> Result<Vec<u8>, String> {
    let mut body = Map::new();
    body.insert("model".into(), "any".into());
    body.insert("add_generation_prompt".into(), add_generation_prompt.into());
    for (name, text) in fields {
        if let Some(text) = text {
            let value: Value = serde_json::from_str(text).map_err(|error| format!("{name}: not JSON: {error}"))?;
            body.insert((*name).into(), value);
        }
    }
    serde_json::to_vec(&body).map_err(|error| error.to_string())
}

/// Looks for stop strings in text that comes in pieces.
#[pyclass(frozen, module = "headrace._gateway")]
pub struct StopMatcher(Mutex<stops::StopMatcher>);

#[pymethods]
impl StopMatcher {
    #[new]
    #[pyo3(signature = (stops, include_stop = false))]
    #[allow(clippy::needless_pass_by_value)] // PyO3 extracts owned values.
    fn new(stops: Vec<String>, include_stop: bool) -> Self {
        let set = Arc::new(StopSet::new(&stops, include_stop));
        Self(Mutex::new(stops::StopMatcher::new(set)))
    }

    /// Takes text; returns what is safe to show.
    fn push(&self, py: Python<'_>, text: &str) -> String {
        py.detach(|| {
            let mut out = String::new();
            self.lock().push(text, &mut out);
            out
        })
    }

    /// The answer has ended by itself; returns what was held.
    fn finish(&self) -> String {
        let mut out = String::new();
        self.lock().finish(&mut out);
        out
    }

    /// The place in the list of the stop string that ended the answer, or None.
    #[getter]
    fn stopped(&self) -> Option<usize> {
        self.lock().stopped()
    }
}

impl StopMatcher {
    fn lock(&self) -> std::sync::MutexGuard<'_, stops::StopMatcher> {
        // Nothing in a matcher can panic half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The names of the full prefix blocks of `ids`. To continue a chain, give the name of the block before as `parent`.
#[pyfunction]
#[pyo3(signature = (ids, block_tokens, model, adapter = "", salt = None, parent = 0))]
#[allow(clippy::needless_pass_by_value)] // PyO3 extracts owned values.
fn block_hashes(
    py: Python<'_>,
    ids: Vec<u32>,
    block_tokens: usize,
    model: &str,
    adapter: &str,
    salt: Option<&[u8]>,
    parent: u64,
) -> PyResult<Vec<u64>> {
    if block_tokens == 0 {
        return Err(PyValueError::new_err("block_tokens must be at least 1"));
    }
    Ok(py.detach(|| {
        let seed = Seed::new(model, adapter, salt.unwrap_or_default());
        blocks::block_hashes_after(parent, &ids, block_tokens, seed)
    }))
}
