//! Conversations in normal form: what templates render, whichever door they came by.

use serde_json::{Map, Value};

use crate::error::{shorten, type_name, ApiError};

/// A conversation in normal form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatPrompt {
    /// At least one.
    pub messages: Vec<ChatMessage>,
    /// JSON objects as in OpenAI's `tools`; empty when the client forbade their use.
    pub tools: Vec<Value>,
    /// Extra variables for the template.
    pub template_kwargs: Map<String, Value>,
    /// Open the assistant's turn.
    pub add_generation_prompt: bool,
}

/// Who says a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The operator's frame.
    System,
    /// OpenAI's later name for system.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// A tool's result.
    Tool,
}

impl Role {
    /// The role of that name. `function`, which came before `tool`, is the same thing.
    pub fn parse(name: &str, param: &str) -> Result<Self, ApiError> {
        match name {
            "system" => Ok(Self::System),
            "developer" => Ok(Self::Developer),
            "user" => Ok(Self::User),
            "assistant" => Ok(Self::Assistant),
            "tool" | "function" => Ok(Self::Tool),
            _ => Err(ApiError::invalid(
                param,
                format!(
                    "a role must be one of system, developer, user, assistant, tool; got {}",
                    shorten(name)
                ),
            )),
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// What a message says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Content {
    /// Absent or null.
    #[default]
    Absent,
    /// One text.
    Text(String),
    /// Texts, in order.
    Parts(Vec<String>),
}

/// One message in normal form.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatMessage {
    /// Who says it.
    pub role: Role,
    /// What is said.
    pub content: Content,
    /// Who of several, or the tool's name.
    pub name: Option<String>,
    /// An assistant's calls.
    pub tool_calls: Vec<ToolCall>,
    /// Which call a tool's message answers.
    pub tool_call_id: Option<String>,
    /// An assistant's thoughts, where the client gives them back.
    pub reasoning: Option<String>,
}

impl ChatMessage {
    /// A message of one text.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Self {
            role,
            content: Content::Text(text.into()),
            name: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            reasoning: None,
        }
    }
}

/// An assistant's call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Its id; may be empty in old histories.
    pub id: String,
    /// The function's name.
    pub name: String,
    /// The arguments, parsed: templates are written for an object.
    pub arguments: Map<String, Value>,
}

/// The arguments of a tool call, from the JSON text that clients send. Nothing and null are no arguments.
pub fn parse_arguments(text: &str, param: &str) -> Result<Map<String, Value>, ApiError> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(arguments)) => Ok(arguments),
        Ok(Value::Null) => Ok(Map::new()),
        Ok(other) => Err(ApiError::invalid(
            param,
            format!("arguments must be a JSON object, got {}", type_name(&other)),
        )),
        Err(error) => Err(ApiError::invalid(
            param,
            format!("arguments must be a JSON object as text: {error}"),
        )),
    }
}

/// A chat as the native door has it, before it is put in normal form.
#[derive(Clone, Debug, Default)]
pub struct RawChat {
    /// In order.
    pub messages: Vec<RawMessage>,
    /// Each a JSON object as text.
    pub tools_json: Vec<String>,
    /// Open the assistant's turn.
    pub add_generation_prompt: bool,
    /// A JSON object as text; empty = none.
    pub template_kwargs_json: String,
}

/// A message as the native door has it.
#[derive(Clone, Debug, Default)]
pub struct RawMessage {
    /// The role's name.
    pub role: String,
    /// One text.
    pub content: Option<String>,
    /// Instead of content: texts.
    pub parts: Vec<String>,
    /// Empty = none.
    pub name: String,
    /// Calls: id, function name, arguments as JSON text.
    pub tool_calls: Vec<(String, String, String)>,
    /// Empty = none.
    pub tool_call_id: String,
}

impl RawChat {
    /// The chat in normal form.
    pub fn normalise(self) -> Result<ChatPrompt, ApiError> {
        if self.messages.is_empty() {
            return Err(ApiError::invalid("chat.messages", "at least one message is needed"));
        }
        let messages = self
            .messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| message.normalise(index))
            .collect::<Result<_, _>>()?;
        let tools = self
            .tools_json
            .iter()
            .enumerate()
            .map(|(index, text)| parse_object(text, &format!("chat.tools_json[{index}]")).map(Value::Object))
            .collect::<Result<Vec<_>, _>>()?;
        for (index, tool) in tools.iter().enumerate() {
            check_tool(tool, &format!("chat.tools_json[{index}]"))?;
        }
        let template_kwargs = if self.template_kwargs_json.is_empty() {
            Map::new()
        } else {
            parse_object(&self.template_kwargs_json, "chat.template_kwargs_json")?
        };
        check_template_kwargs(&template_kwargs, "chat.template_kwargs_json")?;
        Ok(ChatPrompt {
            messages,
            tools,
            template_kwargs,
            add_generation_prompt: self.add_generation_prompt,
        })
    }
}

impl RawMessage {
    fn normalise(self, index: usize) -> Result<ChatMessage, ApiError> {
        let at = format!("chat.messages[{index}]");
        let role = Role::parse(&self.role, &format!("{at}.role"))?;
        let content = match (self.content, self.parts) {
            (Some(_), parts) if !parts.is_empty() => {
                return Err(ApiError::invalid(
                    format!("{at}.parts"),
                    "give content or parts, not both",
                ))
            }
            (Some(text), _) => Content::Text(text),
            (None, parts) if parts.is_empty() => Content::Absent,
            (None, parts) => Content::Parts(parts),
        };
        let tool_calls = self
            .tool_calls
            .into_iter()
            .enumerate()
            .map(|(call, (id, name, arguments))| {
                let at = format!("{at}.tool_calls[{call}]");
                let arguments = parse_arguments(&arguments, &format!("{at}.arguments_json"))?;
                Ok(ToolCall { id, name, arguments })
            })
            .collect::<Result<Vec<_>, ApiError>>()?;
        let message = ChatMessage {
            role,
            content,
            name: Some(self.name).filter(|name| !name.is_empty()),
            tool_calls,
            tool_call_id: Some(self.tool_call_id).filter(|id| !id.is_empty()),
            reasoning: None,
        };
        check_message(&message, &at)?;
        Ok(message)
    }
}

/// Rules between the fields of one message.
pub(crate) fn check_message(message: &ChatMessage, at: &str) -> Result<(), ApiError> {
    if !message.tool_calls.is_empty() && message.role != Role::Assistant {
        return Err(ApiError::invalid(
            format!("{at}.tool_calls"),
            format!("only an assistant calls tools, not role '{}'", message.role.name()),
        ));
    }
    // An assistant's turn may be empty (it was once answered so); others must say something, if only "".
    if message.content == Content::Absent && message.role != Role::Assistant {
        return Err(ApiError::invalid(
            format!("{at}.content"),
            format!("a message of role '{}' must have content", message.role.name()),
        ));
    }
    Ok(())
}

/// The shape of one entry of `tools`.
pub(crate) fn check_tool(tool: &Value, param: &str) -> Result<(), ApiError> {
    let Some(tool) = tool.as_object() else {
        return Err(ApiError::invalid(param, "a tool must be an object"));
    };
    if tool.get("type").and_then(Value::as_str) != Some("function") {
        return Err(ApiError::invalid(
            format!("{param}.type"),
            "a tool's type must be 'function'",
        ));
    }
    let Some(function) = tool.get("function").and_then(Value::as_object) else {
        return Err(ApiError::invalid(
            format!("{param}.function"),
            "a tool must have an object 'function'",
        ));
    };
    match function.get("name").and_then(Value::as_str) {
        Some(name) if !name.is_empty() => {}
        _ => {
            return Err(ApiError::invalid(
                format!("{param}.function.name"),
                "a function must have a name",
            ))
        }
    }
    match function.get("parameters") {
        None | Some(Value::Null | Value::Object(_)) => Ok(()),
        Some(other) => Err(ApiError::invalid(
            format!("{param}.function.parameters"),
            format!("parameters must be a JSON schema object, got {}", type_name(other)),
        )),
    }
}

/// Variables that a template gets from us and that no client may put something else under.
const RESERVED_VARIABLES: [&str; 8] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
    "namespace",
];

pub(crate) fn check_template_kwargs(kwargs: &Map<String, Value>, param: &str) -> Result<(), ApiError> {
    match kwargs.keys().find(|key| RESERVED_VARIABLES.contains(&key.as_str())) {
        Some(key) => Err(ApiError::invalid(
            param,
            format!("'{key}' is the template's own and can't be replaced"),
        )),
        None => Ok(()),
    }
}

fn parse_object(text: &str, param: &str) -> Result<Map<String, Value>, ApiError> {
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(ApiError::invalid(
            param,
            format!("must be a JSON object, got {}", type_name(&other)),
        )),
        Err(error) => Err(ApiError::invalid(param, format!("must be a JSON object: {error}"))),
    }
}
