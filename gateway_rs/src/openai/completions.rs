//! `POST /v1/completions`: the body.

use serde_json::Value;

use super::fields::{integer, read_common, wrong_type, Fields};
use crate::error::ApiError;
use crate::request::{Door, Draft, Prompt};

const PROMPT: &str = "prompt";
const PROMPT_FORMS: &str = "a string, an array of strings, an array of token ids, or an array of such arrays";

/// The draft in a body. The model's limits come after: [`Draft::validate`].
pub fn parse(body: &[u8]) -> Result<Draft, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let model = fields.model()?;
    let prompt = fields
        .take(PROMPT)
        .ok_or_else(|| ApiError::invalid(PROMPT, "a prompt is needed"))?;
    let mut draft = Draft::new(Door::Completions, model, read_prompts(prompt)?);
    read_common(&mut fields, &mut draft)?;
    draft.echo = fields.flag("echo")?;
    draft.top_logprobs = fields.integer("logprobs")?;
    check_best_of(&mut fields, &draft)?;
    if fields.text("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::unsupported("suffix", "'suffix' isn't supported"));
    }
    Ok(draft)
}

fn read_prompts(prompt: Value) -> Result<Vec<Prompt>, ApiError> {
    match prompt {
        Value::String(text) => Ok(vec![Prompt::Text(text)]),
        Value::Array(items) if items.is_empty() => Err(ApiError::invalid(PROMPT, "a prompt is needed")),
        Value::Array(items) if items[0].is_number() => Ok(vec![Prompt::Ids(read_ids(&items, PROMPT)?)]),
        Value::Array(items) => items
            .into_iter()
            .map(|item| match item {
                Value::String(text) => Ok(Prompt::Text(text)),
                Value::Array(ids) => Ok(Prompt::Ids(read_ids(&ids, PROMPT)?)),
                other => Err(wrong_type(PROMPT, PROMPT_FORMS, &other)),
            })
            .collect(),
        other => Err(wrong_type(PROMPT, PROMPT_FORMS, &other)),
    }
}

/// Token ids; whether the model has them is checked later.
pub(super) fn read_ids(items: &[Value], param: &str) -> Result<Vec<u32>, ApiError> {
    items
        .iter()
        .map(|item| {
            let id = integer(item, param)?;
            u32::try_from(id).map_err(|_| ApiError::invalid(param, format!("a token id can't be {id}")))
        })
        .collect()
}

/// We never draw more choices than we show.
fn check_best_of(fields: &mut Fields, draft: &Draft) -> Result<(), ApiError> {
    const NAME: &str = "best_of";
    let n = draft.n.unwrap_or(1);
    match fields.integer(NAME)? {
        Some(best_of) if best_of < n => Err(ApiError::invalid(
            NAME,
            format!("best_of must be at least n, {n}; got {best_of}"),
        )),
        Some(best_of) if best_of > n => Err(ApiError::unsupported(
            NAME,
            format!("best_of over n isn't supported; n is {n}, best_of {best_of}"),
        )),
        _ => Ok(()),
    }
}
