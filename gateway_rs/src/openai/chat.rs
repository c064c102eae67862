//! `POST /v1/chat/completions`: the body.

use super::fields::{read_common, read_tool_choice, Fields};
use super::messages::{read_chat, read_tools};
use crate::error::ApiError;
use crate::request::{Door, Draft, Prompt};

/// The draft in a body. The model's limits come after: [`Draft::validate`].
pub fn parse(body: &[u8]) -> Result<Draft, ApiError> {
    let mut fields = Fields::of_body(body)?;
    let model = fields.model()?;
    let mut chat = read_chat(&mut fields)?;
    let tools = read_tools(&mut fields)?;
    let tool_choice = read_tool_choice(&mut fields, !tools.is_empty())?;
    chat.tools = tool_choice.offered(tools);
    let mut draft = Draft::new(Door::Chat, model, vec![Prompt::Chat(chat)]);
    draft.tool_choice = tool_choice;
    draft.only_one_call = fields.boolean("parallel_tool_calls")? == Some(false);
    read_common(&mut fields, &mut draft)?;
    read_max_completion_tokens(&mut fields, &mut draft)?;
    read_logprobs(&mut fields, &mut draft)?;
    Ok(draft)
}

/// OpenAI's later name for `max_tokens`. Two names with two values can't both be meant.
fn read_max_completion_tokens(fields: &mut Fields, draft: &mut Draft) -> Result<(), ApiError> {
    const NAME: &str = "max_completion_tokens";
    let Some(tokens) = fields.integer(NAME)? else {
        return Ok(());
    };
    match draft.max_tokens {
        Some(other) if other != tokens => Err(ApiError::invalid(
            NAME,
            format!("max_tokens is {other} and {NAME} is {tokens}; give one of them"),
        )),
        _ => {
            draft.max_tokens = Some(tokens);
            draft.max_tokens_param = Some(NAME);
            Ok(())
        }
    }
}

fn read_logprobs(fields: &mut Fields, draft: &mut Draft) -> Result<(), ApiError> {
    let enabled = fields.flag("logprobs")?;
    let top = fields.integer("top_logprobs")?;
    if top.is_some() && !enabled {
        return Err(ApiError::invalid(
            "top_logprobs",
            "top_logprobs is allowed only with \"logprobs\": true",
        ));
    }
    draft.top_logprobs = enabled.then(|| top.unwrap_or(0));
    Ok(())
}
