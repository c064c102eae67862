//! A request that can't be wrong. Every door (OpenAI chat, OpenAI completions, native gRPC) fills a [`Draft`]; only
//! [`Draft::validate`] makes a [`Request`] of it, so each rule on ranges, sizes and relations between fields stands here
//! once, and every refusal names the field as that door's clients know it.
//!
//! What is left to others: JSON types are [`crate::openai`]'s, rendering messages is [`crate::template`]'s, whether a
//! schema can be enforced is [`crate::schema`]'s. Counting the prompt's tokens comes later (it costs more than all of
//! this); [`Request::resolve_max_tokens`] is the one check that needs the count.

use std::collections::BTreeMap;
use std::time::Duration;

use headrace_core::routing::choice::Wish;
use serde_json::{Map, Value};

use crate::error::{shorten, type_name, ApiError, ErrorCode};
use crate::schema::{self, Guided};
use crate::tools::{self, ToolFormat, ToolRules};

/// By which interface a request came in. Decides nothing but how fields are called and which defaults apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Door {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `headrace.v1.InferenceService`
    Native,
}

/// The headers of the latency targets: OpenAI's bodies have no field for them.
pub const TTFT_HEADER: &str = "x-headrace-ttft-ms";
/// See [`TTFT_HEADER`].
pub const TPOT_HEADER: &str = "x-headrace-tpot-ms";

/// A field that more than one door has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Prompt,
    Temperature,
    TopK,
    TopP,
    MinP,
    RepetitionPenalty,
    FrequencyPenalty,
    PresencePenalty,
    LogitBias,
    N,
    MaxTokens,
    MinTokens,
    Stop,
    StopIds,
    TopLogprobs,
    Deadline,
    TtftTarget,
    TpotTarget,
    ToolChoice,
}

impl Door {
    fn name(self, field: Field) -> &'static str {
        let (openai, native) = match field {
            Field::Prompt => match self {
                Self::Chat => ("messages", ""),
                Self::Completions => ("prompt", ""),
                Self::Native => ("", "prompt"),
            },
            Field::Temperature => ("temperature", "sampling.temperature"),
            Field::TopK => ("top_k", "sampling.top_k"),
            Field::TopP => ("top_p", "sampling.top_p"),
            Field::MinP => ("min_p", "sampling.min_p"),
            Field::RepetitionPenalty => ("repetition_penalty", "sampling.repetition_penalty"),
            Field::FrequencyPenalty => ("frequency_penalty", "sampling.frequency_penalty"),
            Field::PresencePenalty => ("presence_penalty", "sampling.presence_penalty"),
            Field::LogitBias => ("logit_bias", "sampling.logit_bias"),
            Field::N => ("n", "sampling.n"),
            Field::MaxTokens => ("max_tokens", "stopping.max_tokens"),
            Field::MinTokens => ("min_tokens", "stopping.min_tokens"),
            Field::Stop => ("stop", "stopping.stop"),
            Field::StopIds => ("stop_token_ids", "stopping.stop_ids"),
            Field::TopLogprobs => match self {
                Self::Completions => ("logprobs", ""),
                _ => ("top_logprobs", "logprobs.top"),
            },
            Field::Deadline => ("deadline_ms", "deadline_ms"),
            Field::ToolChoice => ("tool_choice", "chat.tool_use"),
            Field::TtftTarget => (TTFT_HEADER, "ttft_target_ms"),
            Field::TpotTarget => (TPOT_HEADER, "tpot_target_ms"),
        };
        if self == Self::Native {
            native
        } else {
            openai
        }
    }
}

/// Whose turn comes first when there isn't enough for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Class {
    /// People wait for it.
    Interactive,
    /// The default.
    #[default]
    Standard,
    /// Waits for idle capacity.
    Batch,
}

impl Class {
    const ALL: [Self; 3] = [Self::Interactive, Self::Standard, Self::Batch];

    /// As clients and files write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Interactive => "interactive",
            Self::Standard => "standard",
            Self::Batch => "batch",
        }
    }

    /// The class of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.name() == name)
    }
}

/// What the answer continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Continued as it is.
    Text(String),
    /// Rendered by the model's own template.
    Chat(ChatPrompt),
    /// Given to the model as they are.
    Ids(Vec<u32>),
}

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

/// How the next token is drawn; nothing is left to the engine's defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 = greedy; at most 2.
    pub temperature: f32,
    /// 0 = all.
    pub top_k: u32,
    /// In (0, 1]; 1 = off.
    pub top_p: f32,
    /// In [0, 1]; 0 = off.
    pub min_p: f32,
    /// 1 = off.
    pub repetition_penalty: f32,
    /// In [-2, 2].
    pub frequency_penalty: f32,
    /// In [-2, 2].
    pub presence_penalty: f32,
    /// By rising id, each once; ids are in the vocabulary, values in [-100, 100].
    pub logit_bias: Vec<(u32, f32)>,
    /// The client's; absent = drawn for each request.
    pub seed: Option<u64>,
    /// Choices for each prompt; at least 1.
    pub n: u32,
}

/// When an answer ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stopping {
    /// As asked for; absent = what the context leaves. 0 only with `echo`.
    pub max_tokens: Option<u32>,
    /// Before so many ids the answer doesn't end by itself.
    pub min_tokens: u32,
    /// End-of-sequence ids don't end the answer.
    pub ignore_eos: bool,
    /// None empty.
    pub stop: Vec<String>,
    /// In the vocabulary.
    pub stop_ids: Vec<u32>,
    /// Leave the stop string in the answer.
    pub include_stop: bool,
}

/// What the client said of the use of its tools.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum ToolChoice {
    /// The model's own choice.
    #[default]
    Auto,
    /// No use of them.
    None,
    /// One of them is called.
    Required,
    /// This one is called.
    Named(String),
}

impl ToolChoice {
    /// The tools as the template gets them.
    pub(crate) fn offered(&self, tools: Vec<Value>) -> Vec<Value> {
        match self {
            // A model can't call what it isn't shown.
            Self::None => Vec::new(),
            _ => tools,
        }
    }
}

/// Bounds that come from the configuration and from the model.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Ids of the model are below this.
    pub vocab_size: u32,
    /// Prompt and answer together.
    pub context_tokens: u32,
    /// Largest `n`.
    pub max_choices: u32,
    /// Prompts times `n` at most, in one request.
    pub max_total_choices: u32,
    /// Stop strings.
    pub max_stop: usize,
    /// Bytes of one stop string: so much text may be held back.
    pub max_stop_bytes: usize,
    /// Stop ids.
    pub max_stop_ids: usize,
    /// Entries of `logit_bias`.
    pub max_logit_bias: usize,
    /// Largest `top_logprobs`.
    pub max_top_logprobs: u32,
    /// Longest deadline a client may ask for, and longest latency target.
    pub max_deadline: Duration,
    /// Bounds on schemas, patterns and grammars.
    pub schema: schema::Limits,
}

impl Limits {
    /// The usual bounds, for a model of that vocabulary and context.
    #[must_use]
    pub fn new(vocab_size: u32, context_tokens: u32) -> Self {
        Self {
            vocab_size,
            context_tokens,
            max_choices: 16,
            max_total_choices: 128,
            max_stop: 4,
            max_stop_bytes: 1024,
            max_stop_ids: 128,
            max_logit_bias: 1024,
            max_top_logprobs: 20,
            max_deadline: Duration::from_secs(3600),
            schema: schema::Limits::default(),
        }
    }
}

/// What OpenAI's legacy interface allows in `logprobs`.
const MAX_LEGACY_LOGPROBS: u32 = 5;
const MAX_REPETITION_PENALTY: f64 = 10.0;
const MAX_LABEL_BYTES: usize = 256;

/// A request as a door reads it: right in type, not yet checked in value. Absent = the default.
#[derive(Clone, Debug)]
pub struct Draft {
    /// By which interface it came.
    pub door: Door,
    /// The model's name.
    pub model: String,
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// See [`Sampling`].
    pub temperature: Option<f64>,
    /// −1 and 0 = all.
    pub top_k: Option<i64>,
    /// See [`Sampling`].
    pub top_p: Option<f64>,
    /// See [`Sampling`].
    pub min_p: Option<f64>,
    /// See [`Sampling`].
    pub repetition_penalty: Option<f64>,
    /// See [`Sampling`].
    pub frequency_penalty: Option<f64>,
    /// See [`Sampling`].
    pub presence_penalty: Option<f64>,
    /// Id and value; a later entry for the same id holds.
    pub logit_bias: Vec<(i64, f64)>,
    /// See [`Sampling`].
    pub seed: Option<u64>,
    /// Choices.
    pub n: Option<i64>,
    /// See [`Stopping`].
    pub max_tokens: Option<i64>,
    /// How the client called it, where its door has two names.
    pub max_tokens_param: Option<&'static str>,
    /// See [`Stopping`].
    pub min_tokens: Option<i64>,
    /// See [`Stopping`].
    pub ignore_eos: bool,
    /// See [`Stopping`].
    pub stop: Vec<String>,
    /// See [`Stopping`].
    pub stop_ids: Vec<i64>,
    /// See [`Stopping`].
    pub include_stop: bool,
    /// The drawn ids' log-probabilities are wanted, and those of so many others.
    pub top_logprobs: Option<i64>,
    /// What the answer must look like.
    pub guided: Option<GuidedDraft>,
    /// What the client said of the use of its tools.
    pub tool_choice: ToolChoice,
    /// An answer ends with its first call of a tool.
    pub only_one_call: bool,
    /// A LoRA adapter; empty = none.
    pub lora: String,
    /// See [`Class`].
    pub class: Class,
    /// Which of a model's variants may answer.
    pub quality: Option<Wish>,
    /// Time to the whole answer.
    pub deadline: Option<Duration>,
    /// See [`Request`].
    pub ttft_target_ms: Option<f64>,
    /// See [`Request`].
    pub tpot_target_ms: Option<f64>,
    /// Answer as a stream.
    pub stream: bool,
    /// A stream ends with its usage.
    pub include_usage: bool,
    /// The answer begins with the prompt.
    pub echo: bool,
    /// Neither answer from the response cache nor store in it.
    pub bypass_cache: bool,
    /// Don't reuse KV of earlier prompts.
    pub bypass_prefix_cache: bool,
    /// Requests of one conversation; empty = none.
    pub session_id: String,
    /// KV and answers are shared only among requests with the same one.
    pub cache_salt: String,
}

/// A wish for a form, with the name of the field it came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuidedDraft {
    /// The form.
    pub guided: Guided,
    /// What can't be enforced is refused rather than left out.
    pub strict: bool,
    /// The field, as the client named it.
    pub param: &'static str,
}

impl Draft {
    /// An empty draft with everything at its default.
    pub fn new(door: Door, model: impl Into<String>, prompts: Vec<Prompt>) -> Self {
        Self {
            door,
            model: model.into(),
            prompts,
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: None,
            frequency_penalty: None,
            presence_penalty: None,
            logit_bias: Vec::new(),
            seed: None,
            n: None,
            max_tokens: None,
            max_tokens_param: None,
            min_tokens: None,
            ignore_eos: false,
            stop: Vec::new(),
            stop_ids: Vec::new(),
            include_stop: false,
            top_logprobs: None,
            guided: None,
            tool_choice: ToolChoice::Auto,
            only_one_call: false,
            lora: String::new(),
            class: Class::Standard,
            quality: None,
            deadline: None,
            ttft_target_ms: None,
            tpot_target_ms: None,
            stream: false,
            include_usage: false,
            echo: false,
            bypass_cache: false,
            bypass_prefix_cache: false,
            session_id: String::new(),
            cache_salt: String::new(),
        }
    }

    /// The request, if all of it is right.
    pub fn validate(self, limits: &Limits) -> Result<Request, ApiError> {
        if self.model.is_empty() {
            return Err(ApiError::invalid("model", "a model's name is needed"));
        }
        let n = self.choices(limits)?;
        self.check_prompts(n, limits)?;
        let sampling = self.sampling(n, limits)?;
        let logprobs = self.logprobs(limits)?;
        let max_tokens_param = self.max_tokens_param.unwrap_or(self.door.name(Field::MaxTokens));
        let (max_tokens, min_tokens) = self.lengths(max_tokens_param)?;
        self.check_stop(limits)?;
        let stop_ids = self.stop_ids(limits)?;
        let wishes = self.guided.clone().into_iter().chain(self.required_call()?);
        let wishes: Vec<GuidedDraft> = wishes.collect();
        if let [one, forced] = wishes.as_slice() {
            let message = format!("a required call of a tool leaves no room for {}", one.param);
            return Err(ApiError::invalid(forced.param, message));
        }
        let wish = wishes.into_iter().next();
        if let Some(GuidedDraft { guided, strict, param }) = &wish {
            schema::admit(guided, *strict, &limits.schema).map_err(|refusal| refusal.into_error(param))?;
        }
        let guided = wish.map(|draft| draft.guided);
        if let Some(deadline) = self.deadline {
            if deadline > limits.max_deadline {
                return Err(ApiError::invalid(
                    self.door.name(Field::Deadline),
                    format!(
                        "a deadline must be at most {} ms, got {}",
                        limits.max_deadline.as_millis(),
                        deadline.as_millis()
                    ),
                ));
            }
        }
        let ttft_target_ms = self.target_ms(Field::TtftTarget, self.ttft_target_ms, limits)?;
        let tpot_target_ms = self.target_ms(Field::TpotTarget, self.tpot_target_ms, limits)?;
        Ok(Request {
            door: self.door,
            sampling,
            stopping: Stopping {
                max_tokens,
                min_tokens,
                ignore_eos: self.ignore_eos,
                stop: self.stop,
                stop_ids,
                include_stop: self.include_stop,
            },
            logprobs,
            guided,
            tool_choice: self.tool_choice,
            only_one_call: self.only_one_call,
            lora: label(self.lora, "lora")?,
            class: self.class,
            deadline: self.deadline,
            ttft_target_ms,
            tpot_target_ms,
            stream: self.stream,
            include_usage: self.include_usage,
            echo: self.echo,
            bypass_cache: self.bypass_cache,
            bypass_prefix_cache: self.bypass_prefix_cache,
            session_id: label(self.session_id, "session_id")?,
            cache_salt: label(self.cache_salt, "cache_salt")?,
            model: self.model,
            prompts: self.prompts,
            max_tokens_param,
        })
    }

    /// The form that a required call of a tool gives an answer.
    fn required_call(&self) -> Result<Option<GuidedDraft>, ApiError> {
        let name = match &self.tool_choice {
            ToolChoice::Auto | ToolChoice::None => return Ok(None),
            ToolChoice::Required => None,
            ToolChoice::Named(name) => Some(name.as_str()),
        };
        let param = self.door.name(Field::ToolChoice);
        let tools = offered_tools(&self.prompts);
        let (schema, strict) =
            tools::required_call(tools, name).map_err(|message| ApiError::invalid(param, message))?;
        Ok(Some(GuidedDraft {
            guided: Guided::JsonSchema(schema),
            strict,
            param,
        }))
    }

    fn choices(&self, limits: &Limits) -> Result<u32, ApiError> {
        let n = self.n.unwrap_or(1);
        u32::try_from(n)
            .ok()
            .filter(|n| (1..=limits.max_choices).contains(n))
            .ok_or_else(|| {
                let message = format!("n must be between 1 and {}, got {n}", limits.max_choices);
                ApiError::invalid(self.door.name(Field::N), message)
            })
    }

    fn check_prompts(&self, n: u32, limits: &Limits) -> Result<(), ApiError> {
        let param = self.door.name(Field::Prompt);
        if self.prompts.is_empty() {
            return Err(ApiError::invalid(param, "a prompt is needed"));
        }
        let choices = self.prompts.len() as u64 * u64::from(n);
        // n alone is bounded already, so one prompt always passes.
        let most = u64::from(limits.max_total_choices.max(limits.max_choices));
        if choices > most {
            return Err(ApiError::invalid(
                param,
                format!(
                    "{} prompts with n = {n} make {choices} choices; at most {most} are allowed",
                    self.prompts.len()
                ),
            ));
        }
        for prompt in &self.prompts {
            match prompt {
                Prompt::Text(_) => {}
                Prompt::Chat(chat) => {
                    if chat.messages.is_empty() {
                        return Err(ApiError::invalid(param, "at least one message is needed"));
                    }
                }
                Prompt::Ids(ids) => {
                    if let Some(id) = ids.iter().find(|id| **id >= limits.vocab_size) {
                        return Err(not_in_vocabulary(param, i64::from(*id), limits));
                    }
                }
            }
        }
        Ok(())
    }

    fn sampling(&self, n: u32, limits: &Limits) -> Result<Sampling, ApiError> {
        let real = |field: Field, value: Option<f64>, low: f64, high: f64, default: f32| {
            in_range(self.door.name(field), value, low, high, default)
        };
        let temperature = real(Field::Temperature, self.temperature, 0.0, 2.0, 1.0)?;
        let mut top_p = real(Field::TopP, self.top_p, 0.0, 1.0, 1.0)?;
        let min_p = real(Field::MinP, self.min_p, 0.0, 1.0, 0.0)?;
        let frequency_penalty = real(Field::FrequencyPenalty, self.frequency_penalty, -2.0, 2.0, 0.0)?;
        let presence_penalty = real(Field::PresencePenalty, self.presence_penalty, -2.0, 2.0, 0.0)?;
        let repetition_penalty = real(
            Field::RepetitionPenalty,
            self.repetition_penalty,
            f64::from(f32::MIN_POSITIVE),
            MAX_REPETITION_PENALTY,
            1.0,
        )?;
        let mut top_k = self.top_k()?;
        // "The smallest set that holds at least 0" is the likeliest id alone. Engines read 0 in more than one way, so
        // they never see it.
        if top_p < f32::MIN_POSITIVE {
            (top_k, top_p) = (1, 1.0);
        }
        Ok(Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            frequency_penalty,
            presence_penalty,
            logit_bias: self.logit_bias(limits)?,
            seed: self.seed,
            n,
        })
    }

    fn top_k(&self) -> Result<u32, ApiError> {
        match self.top_k {
            None | Some(-1) => Ok(0),
            Some(k) if k >= 0 => Ok(u32::try_from(k).unwrap_or(u32::MAX)),
            Some(k) => Err(ApiError::invalid(
                self.door.name(Field::TopK),
                format!("top_k must be at least 1, or 0 or -1 for all; got {k}"),
            )),
        }
    }

    fn logit_bias(&self, limits: &Limits) -> Result<Vec<(u32, f32)>, ApiError> {
        let param = self.door.name(Field::LogitBias);
        if self.logit_bias.len() > limits.max_logit_bias {
            return Err(ApiError::invalid(
                param,
                format!(
                    "logit_bias must have at most {} entries, got {}",
                    limits.max_logit_bias,
                    self.logit_bias.len()
                ),
            ));
        }
        let mut biases = BTreeMap::new();
        for (id, bias) in &self.logit_bias {
            let known = in_vocabulary(*id, limits).ok_or_else(|| not_in_vocabulary(param, *id, limits))?;
            biases.insert(known, in_range(param, Some(*bias), -100.0, 100.0, 0.0)?);
        }
        Ok(biases.into_iter().collect())
    }

    fn logprobs(&self, limits: &Limits) -> Result<Option<u32>, ApiError> {
        let most = match self.door {
            Door::Completions => MAX_LEGACY_LOGPROBS.min(limits.max_top_logprobs),
            Door::Chat | Door::Native => limits.max_top_logprobs,
        };
        let param = self.door.name(Field::TopLogprobs);
        self.top_logprobs
            .map(|top| {
                u32::try_from(top)
                    .ok()
                    .filter(|top| *top <= most)
                    .ok_or_else(|| ApiError::invalid(param, format!("{param} must be between 0 and {most}, got {top}")))
            })
            .transpose()
    }

    /// A latency target in whole milliseconds, 1 at least: 0 could never be met.
    fn target_ms(&self, field: Field, target_ms: Option<f64>, limits: &Limits) -> Result<Option<u32>, ApiError> {
        let most_ms = limits.max_deadline.as_secs_f64() * 1000.0;
        target_ms
            .map(|ms| {
                (ms > 0.0 && ms <= most_ms)
                    .then(|| ms.round().max(1.0) as u32)
                    .ok_or_else(|| {
                        let param = self.door.name(field);
                        let message = format!("{param} must be above 0 and at most {most_ms} ms, got {ms}");
                        ApiError::invalid(param, message)
                    })
            })
            .transpose()
    }

    fn lengths(&self, max_tokens_param: &'static str) -> Result<(Option<u32>, u32), ApiError> {
        // To answer with the prompt and no more is legal where the prompt can be echoed.
        let least = i64::from(!self.echo);
        let max_tokens = match self.max_tokens {
            None => None,
            Some(tokens) if tokens >= least => Some(u32::try_from(tokens).unwrap_or(u32::MAX)),
            Some(tokens) => {
                return Err(ApiError::invalid(
                    max_tokens_param,
                    format!("{max_tokens_param} must be at least {least}, got {tokens}"),
                ))
            }
        };
        let min_tokens_param = self.door.name(Field::MinTokens);
        let asked = self.min_tokens.unwrap_or(0);
        let Ok(min_tokens) = u32::try_from(asked) else {
            return Err(ApiError::invalid(
                min_tokens_param,
                format!("{min_tokens_param} must be between 0 and {max_tokens_param}, got {asked}"),
            ));
        };
        if let Some(max_tokens) = max_tokens.filter(|max_tokens| min_tokens > *max_tokens) {
            return Err(ApiError::invalid(
                min_tokens_param,
                format!("{min_tokens_param} must be at most {max_tokens_param}, {max_tokens}; got {min_tokens}"),
            ));
        }
        Ok((max_tokens, min_tokens))
    }

    fn check_stop(&self, limits: &Limits) -> Result<(), ApiError> {
        let refuse = |message: String| Err(ApiError::invalid(self.door.name(Field::Stop), message));
        if self.stop.len() > limits.max_stop {
            return refuse(format!(
                "at most {} stop strings, got {}",
                limits.max_stop,
                self.stop.len()
            ));
        }
        if self.stop.iter().any(String::is_empty) {
            return refuse("a stop string must not be empty".into());
        }
        match self.stop.iter().find(|stop| stop.len() > limits.max_stop_bytes) {
            Some(stop) => refuse(format!(
                "a stop string must have at most {} bytes, got {}",
                limits.max_stop_bytes,
                stop.len()
            )),
            None => Ok(()),
        }
    }

    fn stop_ids(&self, limits: &Limits) -> Result<Vec<u32>, ApiError> {
        let param = self.door.name(Field::StopIds);
        if self.stop_ids.len() > limits.max_stop_ids {
            return Err(ApiError::invalid(
                param,
                format!("at most {} stop ids, got {}", limits.max_stop_ids, self.stop_ids.len()),
            ));
        }
        self.stop_ids
            .iter()
            .map(|id| in_vocabulary(*id, limits).ok_or_else(|| not_in_vocabulary(param, *id, limits)))
            .collect()
    }
}

fn offered_tools(prompts: &[Prompt]) -> &[Value] {
    match prompts {
        [Prompt::Chat(chat)] => &chat.tools,
        _ => &[],
    }
}

/// A number within bounds. What isn't a number (NaN) is in no range.
fn in_range(param: &str, value: Option<f64>, low: f64, high: f64, default: f32) -> Result<f32, ApiError> {
    match value {
        None => Ok(default),
        Some(value) if (low..=high).contains(&value) => Ok(value as f32),
        Some(value) => {
            let low = if low == f64::from(f32::MIN_POSITIVE) {
                "above 0".into()
            } else {
                format!("at least {low}")
            };
            Err(ApiError::invalid(
                param,
                format!("{param} must be {low} and at most {high}, got {value}"),
            ))
        }
    }
}

fn in_vocabulary(id: i64, limits: &Limits) -> Option<u32> {
    u32::try_from(id).ok().filter(|id| *id < limits.vocab_size)
}

fn not_in_vocabulary(param: &str, id: i64, limits: &Limits) -> ApiError {
    ApiError::invalid(
        param,
        format!(
            "a token id must be between 0 and {}, got {id}",
            limits.vocab_size.saturating_sub(1)
        ),
    )
}

/// A short name that is passed on as it is; empty = none.
fn label(text: String, param: &str) -> Result<Option<String>, ApiError> {
    if text.len() > MAX_LABEL_BYTES {
        return Err(ApiError::invalid(
            param,
            format!("{param} must have at most {MAX_LABEL_BYTES} bytes, got {}", text.len()),
        ));
    }
    Ok(Some(text).filter(|text| !text.is_empty()))
}

/// A client's wish for a deadline, in milliseconds. 0 is a deadline that has passed.
pub fn deadline_from_ms(ms: f64, param: &str) -> Result<Duration, ApiError> {
    if !(ms >= 0.0 && ms.is_finite()) {
        return Err(ApiError::invalid(
            param,
            format!("a deadline must be a number of milliseconds from 0 on, got {ms}"),
        ));
    }
    Ok(Duration::try_from_secs_f64(ms / 1000.0).unwrap_or(Duration::MAX))
}

/// The same, from the text of a header.
pub fn deadline_from_text(text: &str, param: &str) -> Result<Duration, ApiError> {
    deadline_from_ms(ms_from_text(text, param)?, param)
}

/// A number of milliseconds, from the text of a header.
pub fn ms_from_text(text: &str, param: &str) -> Result<f64, ApiError> {
    text.trim().parse().map_err(|_| {
        let message = format!("{param} must be a number of milliseconds, got {}", shorten(text));
        ApiError::invalid(param, message)
    })
}

/// A validated request. Made only by [`Draft::validate`].
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// By which interface it came.
    pub door: Door,
    /// The model's name.
    pub model: String,
    /// At least one. Choice `i` of prompt `p` has the index `p * n + i`.
    pub prompts: Vec<Prompt>,
    /// How the next token is drawn.
    pub sampling: Sampling,
    /// When an answer ends.
    pub stopping: Stopping,
    /// When set, log-probabilities are wanted: the drawn id's, and those of so many likeliest.
    pub logprobs: Option<u32>,
    /// What the answer must look like.
    pub guided: Option<Guided>,
    /// What the client said of the use of its tools.
    pub tool_choice: ToolChoice,
    /// An answer ends with its first call of a tool.
    pub only_one_call: bool,
    /// A LoRA adapter.
    pub lora: Option<String>,
    /// Whose turn comes first.
    pub class: Class,
    /// Time to the whole answer, from arrival; zero has passed already.
    pub deadline: Option<Duration>,
    /// The first token is wanted within so long; absent = the class's target.
    pub ttft_target_ms: Option<u32>,
    /// Each further token is wanted within so long; absent = the class's target.
    pub tpot_target_ms: Option<u32>,
    /// Answer as a stream.
    pub stream: bool,
    /// A stream ends with its usage.
    pub include_usage: bool,
    /// The answer begins with the prompt.
    pub echo: bool,
    /// Neither answer from the response cache nor store in it.
    pub bypass_cache: bool,
    /// Don't reuse KV of earlier prompts.
    pub bypass_prefix_cache: bool,
    /// Requests of one conversation.
    pub session_id: Option<String>,
    /// KV and answers are shared only among requests with the same one.
    pub cache_salt: Option<String>,
    /// How this client calls `max_tokens`. Private, so that nobody makes a `Request` by hand.
    max_tokens_param: &'static str,
}

impl Request {
    /// Choices over all prompts.
    #[must_use]
    pub fn total_choices(&self) -> usize {
        self.prompts.len() * self.sampling.n as usize
    }

    /// How many ids each choice may have, once the prompt is counted: as asked for, or what the context leaves. 0 only
    /// when the client asked for the echo alone.
    pub fn resolve_max_tokens(&self, prompt_tokens: usize, context_tokens: u32) -> Result<u32, ApiError> {
        let prompt_param = self.door.name(Field::Prompt);
        if prompt_tokens == 0 {
            return Err(ApiError::invalid(prompt_param, "the prompt has no tokens"));
        }
        let echo_alone = self.stopping.max_tokens == Some(0);
        let context = context_tokens as usize;
        if prompt_tokens > context || (prompt_tokens == context && !echo_alone) {
            return Err(ApiError::new(
                ErrorCode::ContextLengthExceeded,
                format!(
                    "the model's context is {context_tokens} tokens; the prompt has {prompt_tokens}, which leaves none \
                     for the answer"
                ),
            )
            .with_param(prompt_param));
        }
        let room = u32::try_from(context - prompt_tokens).unwrap_or(u32::MAX);
        let max_tokens = self.stopping.max_tokens.unwrap_or(room);
        if max_tokens > room {
            return Err(ApiError::new(
                ErrorCode::ContextLengthExceeded,
                format!(
                    "the model's context is {context_tokens} tokens; the prompt has {prompt_tokens} and {} asks for \
                     {max_tokens}",
                    self.max_tokens_param
                ),
            )
            .with_param(self.max_tokens_param));
        }
        if self.stopping.min_tokens > max_tokens {
            let param = self.door.name(Field::MinTokens);
            return Err(ApiError::invalid(
                param,
                format!(
                    "{param} asks for {}, the prompt of {prompt_tokens} tokens leaves {room} of the model's context of \
                     {context_tokens}",
                    self.stopping.min_tokens
                ),
            ));
        }
        Ok(max_tokens)
    }

    /// The error for a prompt that was given up while it was being counted (`at_least` tokens so far).
    #[must_use]
    pub fn prompt_too_long(&self, at_least: usize, context_tokens: u32) -> ApiError {
        ApiError::new(
            ErrorCode::ContextLengthExceeded,
            format!("the model's context is {context_tokens} tokens; the prompt has at least {at_least}"),
        )
        .with_param(self.door.name(Field::Prompt))
    }

    /// What to look for in the answers, given how the model calls tools by itself.
    pub fn tool_rules(&self, format: Option<ToolFormat>, draw: impl FnOnce() -> u64) -> Option<ToolRules> {
        let tools = offered_tools(&self.prompts);
        let format = match self.tool_choice {
            ToolChoice::Auto | ToolChoice::None => format,
            ToolChoice::Required | ToolChoice::Named(_) => Some(ToolFormat::Bare),
        };
        (!tools.is_empty()).then(|| {
            Some(ToolRules {
                format: format?,
                names: tools.iter().map(|tool| tools::name(tool).to_owned()).collect(),
                only_one: self.only_one_call,
                seed: draw(),
            })
        })?
    }

    /// Whether the same request always has the same answer, so that a stored one may be given again.
    #[must_use]
    pub fn is_deterministic(&self) -> bool {
        self.sampling.temperature == 0.0 || self.sampling.top_k == 1
    }

    /// One seed for each of a prompt's choices. The client's seed is the first choice's own, so that a request alone
    /// draws what the client can draw again; `draw` serves who gave none.
    pub fn seeds(&self, mut draw: impl FnMut() -> u64) -> Vec<u64> {
        let first = self.sampling.seed.unwrap_or_else(&mut draw);
        (0..u64::from(self.sampling.n))
            .map(|choice| if choice == 0 { first } else { mix(first, choice) })
            .collect()
    }
}

/// A seed for a further choice (SplitMix64), far from its neighbours': seeds 1 and 2 share no choice.
fn mix(seed: u64, choice: u64) -> u64 {
    let mut z = seed.wrapping_add(choice.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
