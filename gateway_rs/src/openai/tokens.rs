//! `POST /tokenize` and `POST /detokenize`, as vLLM has them: bodies in and out.

use super::completions::read_ids;
use super::fields::Fields;
use super::messages::{read_chat, read_tools};
use super::write::push_string;
use crate::error::ApiError;
use crate::request::Prompt;

/// What to tokenise.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest {
    /// The model's name.
    pub model: String,
    /// Text or a chat.
    pub prompt: Prompt,
    /// Let the tokenizer add what it adds to every text (a begin-of-text id, mostly). Off for a chat, whose template
    /// writes that itself.
    pub add_special_tokens: bool,
}

/// What to turn back into text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// The model's name.
    pub model: String,
    /// In order; whether the model has them is the caller's to check.
    pub ids: Vec<u32>,
}

/// The request in a body of `/tokenize`.
pub fn parse_tokenize(body: &[u8]) -> Result<TokenizeRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let model = fields.model()?;
    let asked = fields.boolean("add_special_tokens")?;
    if let Some(text) = fields.text("prompt")? {
        return Ok(TokenizeRequest {
            model,
            prompt: Prompt::Text(text),
            add_special_tokens: asked.unwrap_or(true),
        });
    }
    let mut chat = read_chat(&mut fields).map_err(|error| match error.param.as_deref() {
        Some("messages") => ApiError::invalid("prompt", "a prompt or messages are needed"),
        _ => error,
    })?;
    chat.tools = read_tools(&mut fields)?;
    Ok(TokenizeRequest {
        model,
        prompt: Prompt::Chat(chat),
        add_special_tokens: asked.unwrap_or(false),
    })
}

/// The request in a body of `/detokenize`.
pub fn parse_detokenize(body: &[u8]) -> Result<DetokenizeRequest, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let model = fields.model()?;
    let tokens = fields
        .list("tokens")?
        .ok_or_else(|| ApiError::invalid("tokens", "token ids are needed"))?;
    Ok(DetokenizeRequest {
        model,
        ids: read_ids(&tokens, "tokens")?,
    })
}

/// The body that answers `/tokenize`.
#[must_use]
pub fn tokenize_body(ids: &[u32], context_tokens: u32) -> Vec<u8> {
    let mut out = format!(
        "{{\"count\":{},\"max_model_len\":{context_tokens},\"tokens\":[",
        ids.len()
    )
    .into_bytes();
    for (index, id) in ids.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        out.extend_from_slice(id.to_string().as_bytes());
    }
    out.extend_from_slice(b"]}");
    out
}

/// The body that answers `/detokenize`.
#[must_use]
pub fn detokenize_body(text: &str) -> Vec<u8> {
    let mut out = b"{\"prompt\":\"".to_vec();
    push_string(&mut out, text);
    out.extend_from_slice(b"\"}");
    out
}
