//! `messages` and `tools` of a body, put in normal form. Histories that were once answered stay answerable: contents may
//! be missing, null, text or parts; arguments may be text or an object already; the forms before `tools` are understood.

use serde_json::{Map, Value};

use super::fields::{wrong_type, Fields};
use crate::error::{shorten, ApiError};
use crate::request::{
    check_message, check_template_kwargs, check_tool, parse_arguments, ChatMessage, ChatPrompt, Content, Role, ToolCall,
};

const MAX_TOOLS: usize = 128;

/// The chat of a body, without its tools.
pub(super) fn read_chat(fields: &mut Fields) -> Result<ChatPrompt, ApiError> {
    let Some(messages) = fields.list("messages")? else {
        return Err(ApiError::invalid("messages", "messages are needed"));
    };
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "at least one message is needed"));
    }
    let messages = messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| read_message(message, index))
        .collect::<Result<_, _>>()?;
    let mut template_kwargs = fields.object("chat_template_kwargs")?.unwrap_or_default();
    check_template_kwargs(&template_kwargs, "chat_template_kwargs")?;
    if let Some(effort) = fields.text("reasoning_effort")? {
        template_kwargs
            .entry("reasoning_effort")
            .or_insert(Value::String(effort));
    }
    if fields.take("chat_template").is_some() {
        return Err(ApiError::unsupported(
            "chat_template",
            "a chat is rendered by the model's own template; use /v1/completions for text of another form",
        ));
    }
    fields.refuse_flag("continue_final_message")?;
    Ok(ChatPrompt {
        messages,
        tools: Vec::new(),
        template_kwargs,
        add_generation_prompt: fields.boolean("add_generation_prompt")?.unwrap_or(true),
    })
}

/// `tools`, or the older `functions`.
pub(super) fn read_tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let (name, tools) = match fields.list("tools")? {
        Some(tools) => ("tools", tools),
        None => {
            let functions = fields.list("functions")?.unwrap_or_default();
            ("functions", functions.into_iter().map(function_tool).collect())
        }
    };
    if tools.len() > MAX_TOOLS {
        return Err(ApiError::invalid(
            name,
            format!("at most {MAX_TOOLS} tools are allowed, got {}", tools.len()),
        ));
    }
    for (index, tool) in tools.iter().enumerate() {
        check_tool(tool, &format!("{name}[{index}]"))?;
    }
    Ok(tools)
}

fn function_tool(function: Value) -> Value {
    let mut tool = Map::new();
    tool.insert("type".into(), "function".into());
    tool.insert("function".into(), function);
    Value::Object(tool)
}

fn read_message(message: Value, index: usize) -> Result<ChatMessage, ApiError> {
    let Value::Object(message) = message else {
        return Err(wrong_type(&format!("messages[{index}]"), "an object", &message));
    };
    let place = Place { index };
    let mut fields = message;
    let role = match take(&mut fields, "role") {
        Some(Value::String(role)) => Role::parse(&role, &place.of("role"))?,
        Some(other) => return Err(wrong_type(&place.of("role"), "a string", &other)),
        None => return Err(ApiError::invalid(place.of("role"), "a message needs a role")),
    };
    let mut content = match take(&mut fields, "content") {
        None => Content::Absent,
        Some(Value::String(text)) => Content::Text(text),
        Some(Value::Array(parts)) => read_parts(parts, role, &place)?,
        Some(other) => {
            return Err(wrong_type(
                &place.of("content"),
                "a string or an array of parts",
                &other,
            ))
        }
    };
    let refusal = text_field(&mut fields, "refusal", &place)?;
    if let (Content::Absent, Some(refusal)) = (&content, refusal) {
        content = Content::Text(refusal);
    }
    let message = ChatMessage {
        role,
        content,
        name: text_field(&mut fields, "name", &place)?,
        tool_calls: read_tool_calls(&mut fields, &place)?,
        tool_call_id: text_field(&mut fields, "tool_call_id", &place)?,
        reasoning: match text_field(&mut fields, "reasoning_content", &place)? {
            Some(text) => Some(text),
            None => text_field(&mut fields, "reasoning", &place)?,
        },
    };
    check_message(&message, &format!("messages[{index}]"))?;
    Ok(message)
}

/// Where a field of a message stands; written out only when something is wrong.
struct Place {
    index: usize,
}

impl Place {
    fn of(&self, field: &str) -> String {
        format!("messages[{}].{field}", self.index)
    }
}

fn take(fields: &mut Map<String, Value>, name: &str) -> Option<Value> {
    fields.swap_remove(name).filter(|value| !value.is_null())
}

fn text_field(fields: &mut Map<String, Value>, name: &str, place: &Place) -> Result<Option<String>, ApiError> {
    match take(fields, name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(wrong_type(&place.of(name), "a string", &other)),
    }
}

fn read_parts(parts: Vec<Value>, role: Role, place: &Place) -> Result<Content, ApiError> {
    let texts = parts
        .into_iter()
        .enumerate()
        .map(|(index, part)| read_part(part, role, place, index))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Content::Parts(texts))
}

fn read_part(part: Value, role: Role, place: &Place, index: usize) -> Result<String, ApiError> {
    let at = |field: &str| place.of(&format!("content[{index}]{field}"));
    let Value::Object(mut part) = part else {
        return Err(wrong_type(&at(""), "an object", &part));
    };
    let (field, kind) = match part.get("type").and_then(Value::as_str) {
        Some("text") => ("text", "text"),
        Some("refusal") if role == Role::Assistant => ("refusal", "refusal"),
        Some(kind) => {
            return Err(ApiError::unsupported(
                at(".type"),
                format!("only parts of type 'text' are supported, got {}", shorten(kind)),
            ))
        }
        None => return Err(ApiError::invalid(at(".type"), "a part needs a type")),
    };
    match part.swap_remove(field) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(wrong_type(&at(&format!(".{field}")), "a string", &other)),
        None => Err(ApiError::invalid(
            at(&format!(".{field}")),
            format!("a part of type '{kind}' needs '{field}'"),
        )),
    }
}

/// `tool_calls`, or the older `function_call`.
fn read_tool_calls(fields: &mut Map<String, Value>, place: &Place) -> Result<Vec<ToolCall>, ApiError> {
    let calls = match take(fields, "tool_calls") {
        Some(Value::Array(calls)) => calls,
        Some(other) => return Err(wrong_type(&place.of("tool_calls"), "an array", &other)),
        None => {
            return match take(fields, "function_call") {
                Some(function) => Ok(vec![read_function(
                    function,
                    String::new(),
                    &place.of("function_call"),
                )?]),
                None => Ok(Vec::new()),
            }
        }
    };
    calls
        .into_iter()
        .enumerate()
        .map(|(index, call)| {
            let at = place.of(&format!("tool_calls[{index}]"));
            let Value::Object(mut call) = call else {
                return Err(wrong_type(&at, "an object", &call));
            };
            match call.get("type") {
                None | Some(Value::Null) => {}
                Some(Value::String(kind)) if kind == "function" => {}
                Some(_) => {
                    return Err(ApiError::unsupported(
                        format!("{at}.type"),
                        "only calls of type 'function' are supported",
                    ))
                }
            }
            let id = match take(&mut call, "id") {
                None => String::new(),
                Some(Value::String(id)) => id,
                Some(other) => return Err(wrong_type(&format!("{at}.id"), "a string", &other)),
            };
            let function = take(&mut call, "function")
                .ok_or_else(|| ApiError::invalid(format!("{at}.function"), "a call needs a function"))?;
            read_function(function, id, &format!("{at}.function"))
        })
        .collect()
}

fn read_function(function: Value, id: String, at: &str) -> Result<ToolCall, ApiError> {
    let Value::Object(mut function) = function else {
        return Err(wrong_type(at, "an object", &function));
    };
    let name = match take(&mut function, "name") {
        Some(Value::String(name)) => name,
        Some(other) => return Err(wrong_type(&format!("{at}.name"), "a string", &other)),
        None => return Err(ApiError::invalid(format!("{at}.name"), "a function needs a name")),
    };
    let at = format!("{at}.arguments");
    let arguments = match take(&mut function, "arguments") {
        None => Map::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => parse_arguments(&text, &at)?,
        Some(other) => return Err(wrong_type(&at, "a JSON object as text", &other)),
    };
    Ok(ToolCall { id, name, arguments })
}
