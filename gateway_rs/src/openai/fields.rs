//! A JSON object whose fields are taken out one by one, each with its type checked and its name at hand.

use headrace_core::routing::choice::Wish;
use serde_json::{Map, Value};

use crate::error::{shorten, type_name, ApiError, ErrorCode};
use crate::request::{deadline_from_ms, Class, Draft, GuidedDraft, ToolChoice};
use crate::schema::Guided;

/// The fields of a body.
pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// The object that a body is. The body's size is the caller's to limit, its depth is bounded by serde_json (128).
    pub fn of_body(body: &[u8]) -> Result<Self, ApiError> {
        if has_too_many_values(body) {
            return Err(ApiError::new(
                ErrorCode::TooLarge,
                format!("the body has more than {MAX_VALUES} JSON values"),
            ));
        }
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(other) => Err(ApiError::new(
                ErrorCode::InvalidArgument,
                format!("the body must be a JSON object, got {}", type_name(&other)),
            )),
            Err(error) => Err(ApiError::new(
                ErrorCode::InvalidArgument,
                format!("the body isn't valid JSON: {error}"),
            )),
        }
    }

    /// Takes a field; null is as good as absent.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.0.swap_remove(name).filter(|value| !value.is_null())
    }

    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(name, "true or false", &other)),
        }
    }

    pub fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        Ok(self.boolean(name)?.unwrap_or(false))
    }

    pub fn real(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match value.as_f64() {
                Some(real) => Ok(Some(real)),
                None => Err(wrong_type(name, "a number", &value)),
            },
        }
    }

    pub fn integer(&mut self, name: &str) -> Result<Option<i64>, ApiError> {
        self.take(name).map(|value| integer(&value, name)).transpose()
    }

    pub fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(name, "a string", &other)),
        }
    }

    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong_type(name, "an array", &other)),
        }
    }

    pub fn object(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(other) => Err(wrong_type(name, "an object", &other)),
        }
    }

    /// A number of any 64 bits: a client's −1 and its 2⁶⁴−1 are the same seed.
    pub fn seed(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(value) => match value.as_u64().or_else(|| value.as_i64().map(|seed| seed as u64)) {
                Some(seed) => Ok(Some(seed)),
                None => Err(wrong_type(name, "an integer of 64 bits", &value)),
            },
        }
    }

    pub fn model(&mut self) -> Result<String, ApiError> {
        self.text("model")?
            .filter(|model| !model.is_empty())
            .ok_or_else(|| ApiError::invalid("model", "a model's name is needed"))
    }

    /// A wish that can be granted only when it is not made.
    pub fn refuse_flag(&mut self, name: &str) -> Result<(), ApiError> {
        if self.flag(name)? {
            return Err(ApiError::unsupported(name, format!("'{name}' isn't supported")));
        }
        Ok(())
    }
}

/// A value of two bytes on the wire takes 72 in memory, so their number is bounded too: a million ids fill any context.
const MAX_VALUES: usize = 1_000_000;

fn has_too_many_values(body: &[u8]) -> bool {
    if body.len() <= MAX_VALUES {
        return false;
    }
    let (mut values, mut in_string, mut escaped) = (0, false, false);
    for byte in body {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b',' | b'[' | b'{' if !in_string => values += 1,
            _ => {}
        }
    }
    values > MAX_VALUES
}

/// A whole number, also when it is written with a fraction of nothing. Far ones are the farthest: all bounds are nearer.
pub(super) fn integer(value: &Value, name: &str) -> Result<i64, ApiError> {
    if let Some(integer) = value.as_i64() {
        return Ok(integer);
    }
    if value.is_u64() {
        return Ok(i64::MAX);
    }
    match value.as_f64() {
        // `as` saturates.
        Some(real) if real.fract() == 0.0 => Ok(real as i64),
        Some(real) => Err(ApiError::invalid(
            name,
            format!("{name} must be a whole number, got {real}"),
        )),
        None => Err(wrong_type(name, "an integer", value)),
    }
}

pub(super) fn wrong_type(name: &str, wanted: &str, value: &Value) -> ApiError {
    ApiError::invalid(name, format!("{name} must be {wanted}, got {}", type_name(value)))
}

/// The fields that chat and completions share.
pub(super) fn read_common(fields: &mut Fields, draft: &mut Draft) -> Result<(), ApiError> {
    read_sampling(fields, draft)?;
    read_stopping(fields, draft)?;
    read_stream(fields, draft)?;
    read_guided(fields, draft)?;
    read_class(fields, draft)?;
    draft.quality = fields
        .text("quality")?
        .map(|quality| parse_quality(&quality, "quality"))
        .transpose()?;
    // Checked, that a client learns of its mistake; nothing depends on it.
    fields.text("user")?;
    draft.lora = fields.text("lora")?.unwrap_or_default();
    draft.session_id = fields.text("session_id")?.unwrap_or_default();
    draft.cache_salt = fields.text("cache_salt")?.unwrap_or_default();
    draft.bypass_cache = fields.flag("bypass_cache")?;
    draft.bypass_prefix_cache = fields.flag("bypass_prefix_cache")?;
    draft.deadline = fields
        .real("deadline_ms")?
        .map(|ms| deadline_from_ms(ms, "deadline_ms"))
        .transpose()?;
    Ok(())
}

fn read_sampling(fields: &mut Fields, draft: &mut Draft) -> Result<(), ApiError> {
    draft.sampling.temperature = fields.real("temperature")?;
    draft.sampling.top_p = fields.real("top_p")?;
    draft.sampling.top_k = fields.integer("top_k")?;
    draft.sampling.min_p = fields.real("min_p")?;
    draft.sampling.repetition_penalty = fields.real("repetition_penalty")?;
    draft.sampling.frequency_penalty = fields.real("frequency_penalty")?;
    draft.sampling.presence_penalty = fields.real("presence_penalty")?;
    draft.seed = fields.seed("seed")?;
    draft.n = fields.integer("n")?;
    draft.logit_bias = logit_bias(fields)?;
    Ok(())
}

fn logit_bias(fields: &mut Fields) -> Result<Vec<(i64, f64)>, ApiError> {
    const NAME: &str = "logit_bias";
    let Some(biases) = fields.object(NAME)? else {
        return Ok(Vec::new());
    };
    biases
        .iter()
        .map(|(key, bias)| {
            let id = key
                .parse()
                .map_err(|_| ApiError::invalid(NAME, format!("the keys must be token ids, got {}", shorten(key))))?;
            let bias = bias
                .as_f64()
                .ok_or_else(|| wrong_type(NAME, "numbers by token id", bias))?;
            Ok((id, bias))
        })
        .collect()
}

fn read_stopping(fields: &mut Fields, draft: &mut Draft) -> Result<(), ApiError> {
    draft.max_tokens = fields.integer("max_tokens")?;
    draft.min_tokens = fields.integer("min_tokens")?;
    draft.ignore_eos = fields.flag("ignore_eos")?;
    draft.include_stop = fields.flag("include_stop_str_in_output")?;
    draft.stop = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => stops.into_iter().map(stop_string).collect::<Result<_, _>>()?,
        Some(other) => return Err(wrong_type("stop", "a string or an array of strings", &other)),
    };
    draft.stop_ids = fields
        .list("stop_token_ids")?
        .unwrap_or_default()
        .iter()
        .map(|id| integer(id, "stop_token_ids"))
        .collect::<Result<_, _>>()?;
    Ok(())
}

fn stop_string(value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(stop) => Ok(stop),
        other => Err(wrong_type("stop", "strings", &other)),
    }
}

fn read_stream(fields: &mut Fields, draft: &mut Draft) -> Result<(), ApiError> {
    draft.stream = fields.flag("stream")?;
    if let Some(options) = fields.object("stream_options")? {
        if !draft.stream {
            return Err(ApiError::invalid(
                "stream_options",
                "stream_options is allowed only with \"stream\": true",
            ));
        }
        draft.include_usage = match options.get("include_usage") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(include)) => *include,
            Some(other) => return Err(wrong_type("stream_options.include_usage", "true or false", other)),
        };
    }
    Ok(())
}

/// OpenAI's `response_format` and vLLM's `guided_*`: one of them at most.
fn read_guided(fields: &mut Fields, draft: &mut Draft) -> Result<(), ApiError> {
    let mut found: Option<GuidedDraft> = response_format(fields)?;
    let mut add = |param: &'static str, guided: Option<Guided>| match (guided, &found) {
        (None, _) => Ok(()),
        (Some(_), Some(other)) => Err(ApiError::invalid(
            param,
            format!("only one of {} and {param} is allowed", other.param),
        )),
        (Some(guided), None) => {
            // vLLM's clients ask for guidance to have it, so it is strict.
            found = Some(GuidedDraft {
                guided,
                strict: true,
                param,
            });
            Ok(())
        }
    };
    add("guided_json", guided_json(fields)?)?;
    add("guided_regex", fields.text("guided_regex")?.map(Guided::Regex))?;
    add("guided_grammar", fields.text("guided_grammar")?.map(Guided::Grammar))?;
    add("guided_choice", guided_choice(fields)?)?;
    draft.guided = found;
    Ok(())
}

fn guided_json(fields: &mut Fields) -> Result<Option<Guided>, ApiError> {
    match fields.take("guided_json") {
        None => Ok(None),
        Some(Value::String(schema)) => Ok(Some(Guided::JsonSchema(schema))),
        Some(Value::Object(schema)) => Ok(Some(Guided::JsonSchema(Value::Object(schema).to_string()))),
        Some(other) => Err(wrong_type("guided_json", "a JSON schema", &other)),
    }
}

fn guided_choice(fields: &mut Fields) -> Result<Option<Guided>, ApiError> {
    const NAME: &str = "guided_choice";
    let Some(choices) = fields.list(NAME)? else {
        return Ok(None);
    };
    choices
        .into_iter()
        .map(|choice| match choice {
            Value::String(text) => Ok(text),
            other => Err(wrong_type(NAME, "an array of strings", &other)),
        })
        .collect::<Result<_, _>>()
        .map(|texts| Some(Guided::Choice(texts)))
}

fn response_format(fields: &mut Fields) -> Result<Option<GuidedDraft>, ApiError> {
    const NAME: &str = "response_format";
    let Some(mut format) = fields.object(NAME)? else {
        return Ok(None);
    };
    let (guided, strict) = match format.get("type").and_then(Value::as_str) {
        Some("text") => return Ok(None),
        Some("json_object") => (Guided::JsonObject, false),
        Some("json_schema") => match format.swap_remove("json_schema") {
            Some(Value::Object(named)) => named_schema(named)?,
            _ => {
                return Err(ApiError::invalid(
                    NAME,
                    "a response_format of type 'json_schema' needs an object 'json_schema'",
                ))
            }
        },
        Some(other) => {
            return Err(ApiError::invalid(
                NAME,
                format!(
                    "the type must be one of text, json_object, json_schema; got {}",
                    shorten(other)
                ),
            ))
        }
        None => return Err(ApiError::invalid(NAME, "response_format needs a 'type'")),
    };
    Ok(Some(GuidedDraft {
        guided,
        strict,
        param: NAME,
    }))
}

fn named_schema(mut named: Map<String, Value>) -> Result<(Guided, bool), ApiError> {
    const NAME: &str = "response_format";
    match named.get("name") {
        None | Some(Value::Null | Value::String(_)) => {}
        Some(other) => return Err(wrong_type(NAME, "given a 'name' that is a string", other)),
    }
    let strict = match named.get("strict") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(strict)) => *strict,
        Some(other) => return Err(wrong_type(NAME, "given a 'strict' that is true or false", other)),
    };
    match named.swap_remove("schema") {
        Some(Value::Object(schema)) => Ok((Guided::JsonSchema(Value::Object(schema).to_string()), strict)),
        Some(other) => Err(wrong_type(NAME, "given a 'schema' that is an object", &other)),
        None => Err(ApiError::invalid(NAME, "json_schema needs a 'schema'")),
    }
}

/// Our own `class`, or else OpenAI's `service_tier`.
fn read_class(fields: &mut Fields, draft: &mut Draft) -> Result<(), ApiError> {
    let tier = fields.text("service_tier")?;
    if let Some(class) = fields.text("class")? {
        draft.class = parse_class(&class, "class")?;
    } else if let Some(tier) = tier {
        draft.class = match tier.as_str() {
            "auto" | "default" | "scale" => Class::Standard,
            "flex" => Class::Batch,
            "priority" => Class::Interactive,
            other => {
                return Err(ApiError::invalid(
                    "service_tier",
                    format!(
                        "must be one of auto, default, flex, scale, priority; got {}",
                        shorten(other)
                    ),
                ))
            }
        };
    }
    Ok(())
}

/// A class by its name, from the field or header called `param`.
pub fn parse_class(name: &str, param: &str) -> Result<Class, ApiError> {
    Class::from_name(name).ok_or_else(|| {
        ApiError::invalid(
            param,
            format!("must be one of interactive, standard, batch; got {}", shorten(name)),
        )
    })
}

/// What is wished of quality by its name, from the field or header called `param`.
pub fn parse_quality(name: &str, param: &str) -> Result<Wish, ApiError> {
    Wish::from_name(name)
        .filter(|wish| *wish != Wish::Routed)
        .ok_or_else(|| ApiError::invalid(param, format!("must be full or tolerant; got {}", shorten(name))))
}

/// `tool_choice`, given whether there are tools.
pub(super) fn read_tool_choice(fields: &mut Fields, tools: bool) -> Result<ToolChoice, ApiError> {
    const NAME: &str = "tool_choice";
    let forced = |choice| match tools {
        true => Ok(choice),
        false => Err(ApiError::invalid(
            NAME,
            "a tool can be called only when 'tools' are given",
        )),
    };
    match fields.take(NAME) {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => forced(ToolChoice::Required),
            other => Err(ApiError::invalid(
                NAME,
                format!(
                    "must be 'auto', 'none', 'required' or a function; got {}",
                    shorten(other)
                ),
            )),
        },
        Some(Value::Object(choice)) => {
            let name = choice.get("function").and_then(|function| function.get("name"));
            match (choice.get("type").and_then(Value::as_str), name.and_then(Value::as_str)) {
                (Some("function"), Some(name)) => forced(ToolChoice::Named(name.to_owned())),
                (Some("function"), None) => Err(ApiError::invalid(NAME, "a function must have a name")),
                _ => Err(ApiError::unsupported(NAME, "the object's type must be 'function'")),
            }
        }
        Some(other) => Err(wrong_type(NAME, "a string or an object", &other)),
    }
}
