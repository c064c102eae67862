//! Chat templates: the model's own Jinja template makes one prompt text of a conversation.
//!
//! The messages come in normal form ([`ChatPrompt`]) and leave it here for what this template is written for: contents as
//! text or as lists of parts, null or empty contents, a `developer` role or none. Which of these it is, is read from the
//! template's source once, when the model is loaded. A client's text is only ever a value: nothing in it is Jinja.
//!
//! Templates come with models and are trusted to mean well, not to be right: steps and output are bounded, and whatever a
//! template refuses is the caller's error. The output is what Hugging Face `apply_chat_template` gives (Python's ways of
//! printing values included); tokenising it is left to others.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use crate::date::strftime;
use crate::error::{ApiError, ErrorCode};
use crate::request::{ChatMessage, ChatPrompt, Content, Role, ToolCall};
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::Regex;

/// Steps of the template engine for one rendering: 250 for each of 20,000 messages, far over any context, and a bound
/// on the time (well under a second) for a template that loops.
const FUEL: u64 = 5_000_000;
const NAME: &str = "chat_template";

/// A template that can't be used at all.
#[derive(Debug, thiserror::Error)]
#[error("the chat template can't be used: {0}")]
pub struct TemplateError(String);

/// A model's chat template, ready to render. Immutable and `Sync`.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
    traits: Traits,
}

/// What a rendering depends on beside the conversation.
#[derive(Clone, Copy, Debug)]
pub struct RenderOptions<'a> {
    /// Unix time, for templates that tell the date (in UTC).
    pub now_s: i64,
    /// Bytes of prompt that can't fit the model's context whatever they are.
    pub max_bytes: usize,
    /// How the client calls its messages.
    pub param: &'a str,
}

/// What a template expects, as read from its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Traits {
    /// Loops over contents: give them as lists of parts.
    loops_over_parts: bool,
    /// Asks whether a content is a string: one given as text may stay so.
    asks_for_strings: bool,
    /// Asks whether a content is none: give nothing as none, where others get "".
    asks_for_none: bool,
    /// Knows the role `developer`; others get `system`.
    knows_developer: bool,
}

impl ChatTemplate {
    /// Prepares a template. The tokens are what it may write as `bos_token` and `eos_token`.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(print_like_python);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json_filter);
        environment.add_filter("string", |value: &Value| display(value));
        environment.add_filter("upper", |value: &Value| display(value).to_uppercase());
        environment.add_filter("lower", |value: &Value| display(value).to_lowercase());
        environment.add_test("iterable", is_iterable);
        environment.add_test("sequence", is_sequence);
        let source = without_generation_tags(source);
        let traits = Traits::of(&source);
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| TemplateError(describe(&error)))?;
        Ok(Self {
            environment,
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            traits,
        })
    }

    /// The prompt text of a conversation.
    pub fn render(&self, chat: &ChatPrompt, options: &RenderOptions<'_>) -> Result<String, ApiError> {
        let failure = match self.try_render(chat, options, Manner::of(self.traits)) {
            Ok(text) => return Ok(text),
            Err(failure) => failure,
        };
        if failure.is_of_the_template() {
            for manner in Manner::of(self.traits).others(chat) {
                if let Ok(text) = self.try_render(chat, options, manner) {
                    return Ok(text);
                }
            }
        }
        Err(failure.into_error(options))
    }

    fn try_render(&self, chat: &ChatPrompt, options: &RenderOptions<'_>, manner: Manner) -> Result<String, Failure> {
        let context = self.context(chat, options.now_s, manner);
        let mut out = BoundedText {
            bytes: Vec::with_capacity(4096.min(options.max_bytes)),
            max_bytes: options.max_bytes,
            full: false,
        };
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render_captured_to(context, &mut out).map(|_| ()));
        if out.full {
            return Err(Failure::TooLong);
        }
        rendered.map_err(Failure::Template)?;
        String::from_utf8(out.bytes).map_err(|_| Failure::TooLong)
    }

    fn context(&self, chat: &ChatPrompt, now_s: i64, manner: Manner) -> Value {
        let mut context: BTreeMap<&str, Value> = chat
            .template_kwargs
            .iter()
            .map(|(name, value)| (name.as_str(), Value::from_serialize(value)))
            .collect();
        let messages: Vec<Value> = chat.messages.iter().map(|message| manner.message(message)).collect();
        context.insert("messages", Value::from(messages));
        // None rather than undefined, as Hugging Face has it: templates ask for the one or the other.
        let tools = if chat.tools.is_empty() {
            Value::from(())
        } else {
            Value::from_serialize(&chat.tools)
        };
        context.insert("tools", tools);
        context.entry("documents").or_insert_with(|| Value::from(()));
        context.insert("add_generation_prompt", Value::from(chat.add_generation_prompt));
        context.insert("bos_token", Value::from(self.bos_token.as_str()));
        context.insert("eos_token", Value::from(self.eos_token.as_str()));
        // A value of the context rather than a function of the environment: the clock is this rendering's.
        context.insert(
            "strftime_now",
            Value::from_function(move |format: String| strftime(&format, now_s)),
        );
        Value::from_iter(context)
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ChatTemplate")
            .field("traits", &self.traits)
            .finish_non_exhaustive()
    }
}

/// How messages are given to a template.
#[derive(Clone, Copy, Debug)]
struct Manner {
    traits: Traits,
    /// Arguments of tool calls as JSON text rather than as an object.
    arguments_as_text: bool,
}

impl Manner {
    fn of(traits: Traits) -> Self {
        Self {
            traits,
            arguments_as_text: false,
        }
    }

    /// What else to try with a template that choked: some join arguments to a text, which an object can't be; some ask
    /// for none in one place and take text for granted in another.
    fn others(self, chat: &ChatPrompt) -> impl Iterator<Item = Self> {
        let with_text = chat
            .messages
            .iter()
            .any(|message| !message.tool_calls.is_empty())
            .then_some(Self {
                arguments_as_text: true,
                ..self
            });
        let without_none = self.traits.asks_for_none.then_some(Self {
            traits: Traits {
                asks_for_none: false,
                ..self.traits
            },
            ..self
        });
        with_text.into_iter().chain(without_none)
    }

    fn message(self, message: &ChatMessage) -> Value {
        let role = match message.role {
            Role::Developer if !self.traits.knows_developer => Role::System,
            role => role,
        };
        let mut fields = vec![
            ("role", Value::from(role.name())),
            ("content", self.traits.content(message)),
        ];
        let mut text = |name, value: &Option<String>| {
            if let Some(value) = value {
                fields.push((name, Value::from(value.as_str())));
            }
        };
        text("name", &message.name);
        text("tool_call_id", &message.tool_call_id);
        text("reasoning_content", &message.reasoning);
        if !message.tool_calls.is_empty() {
            let calls: Vec<Value> = message.tool_calls.iter().map(|call| self.tool_call(call)).collect();
            fields.push(("tool_calls", Value::from(calls)));
        }
        Value::from_iter(fields)
    }

    fn tool_call(self, call: &ToolCall) -> Value {
        let mut arguments = Value::from_serialize(&call.arguments);
        if self.arguments_as_text {
            arguments = Value::from(to_json(&arguments).unwrap_or_default());
        }
        let function = Value::from_iter([("name", Value::from(call.name.as_str())), ("arguments", arguments)]);
        Value::from_iter([
            ("id", Value::from(call.id.as_str())),
            ("type", Value::from("function")),
            ("function", function),
        ])
    }
}

enum Failure {
    TooLong,
    Template(Error),
}

impl Failure {
    /// Neither a bound nor a refusal on purpose.
    fn is_of_the_template(&self) -> bool {
        match self {
            Self::TooLong => false,
            Self::Template(error) => raised(error).is_none() && error.kind() != ErrorKind::OutOfFuel,
        }
    }

    fn into_error(self, options: &RenderOptions<'_>) -> ApiError {
        match self {
            Self::TooLong => ApiError::new(
                ErrorCode::ContextLengthExceeded,
                format!(
                    "the messages make a prompt of more than {} bytes, which can't fit the model's context",
                    options.max_bytes
                ),
            )
            .with_param(options.param),
            Self::Template(error) if error.kind() == ErrorKind::OutOfFuel => ApiError::invalid(
                options.param,
                format!("the chat template takes more than {FUEL} steps for these messages"),
            ),
            Self::Template(error) => match raised(&error) {
                Some(sentence) => ApiError::invalid(options.param, sentence),
                None => ApiError::invalid(
                    options.param,
                    format!("the chat template can't render these messages: {}", describe(&error)),
                ),
            },
        }
    }
}

/// What went wrong and where, without the surroundings.
fn describe(error: &Error) -> String {
    let line = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    match error.detail() {
        Some(detail) => format!("{}: {detail}{line}", error.kind()),
        None => format!("{}{line}", error.kind()),
    }
}

/// Where the template writes to.
struct BoundedText {
    bytes: Vec<u8>,
    max_bytes: usize,
    full: bool,
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.max_bytes {
            self.full = true;
            return Err(io::Error::other("the prompt is too long"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A sentence that the template raised.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(sentence: &Value) -> Result<Value, Error> {
    let sentence = display(sentence);
    Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(sentence)))
}

fn raised(error: &Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(Raised(sentence)) = error.downcast_ref::<Raised>() {
            return Some(sentence.clone());
        }
        source = error.source();
    }
    None
}

/// As Jinja has it: nothing can be walked through, a text can.
fn is_iterable(value: &Value) -> bool {
    !matches!(value.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number)
}

/// As Jinja has it: whatever has a length and can be indexed.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
}

/// `{% generation %}` marks what a model is trained on; for a prompt it says nothing.
fn without_generation_tags(source: &str) -> String {
    let replace = |source: &str, tag: &str, with: &str| match Regex::new(&format!(r"\{{%([-+]?)\s*{tag}\s*([-+]?)%\}}"))
    {
        Ok(tag) => tag
            .replace_all(source, format!("{{%${{1}} {with} ${{2}}%}}"))
            .into_owned(),
        Err(_) => source.to_owned(),
    };
    replace(&replace(source, "generation", "if true"), "endgeneration", "endif")
}

impl Traits {
    fn of(source: &str) -> Self {
        let has = |pattern: &str| Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(source));
        Self {
            loops_over_parts: loops_over_parts(source),
            asks_for_strings: has(r"\bis\s+(not\s+)?string\b"),
            asks_for_none: has(r#"\bcontent['"]?\s*\]?\s*\)?\s*(is\s+(not\s+)?|[=!]=\s*)[Nn]one\b"#),
            knows_developer: has(r#"['"]developer['"]"#),
        }
    }

    fn content(self, message: &ChatMessage) -> Value {
        match &message.content {
            Content::Absent => self.nothing(),
            // Clients write "nothing but tool calls" in either way.
            Content::Text(text) if text.is_empty() && !message.tool_calls.is_empty() => self.nothing(),
            Content::Text(text) if self.loops_over_parts && !self.asks_for_strings => parts(std::slice::from_ref(text)),
            Content::Text(text) => Value::from(text.as_str()),
            Content::Parts(texts) if self.loops_over_parts => parts(texts),
            Content::Parts(texts) => Value::from(texts.join("\n")),
        }
    }

    fn nothing(self) -> Value {
        if self.asks_for_none {
            Value::from(())
        } else if self.loops_over_parts && !self.asks_for_strings {
            parts(&[])
        } else {
            Value::from("")
        }
    }
}

fn parts(texts: &[String]) -> Value {
    texts
        .iter()
        .map(|text| Value::from_iter([("type", Value::from("text")), ("text", Value::from(text.as_str()))]))
        .collect()
}

/// Whether a template loops over a content: over the attribute itself, over a variable set from it, or over anything
/// called `content` (a macro's argument).
fn loops_over_parts(source: &str) -> bool {
    let content = r#"(\.content\b|\[\s*['"]content['"]\s*\])"#;
    let has = |pattern: &str| Regex::new(pattern).is_ok_and(|pattern| pattern.is_match(source));
    if has(&format!(
        r"\bfor\s+\w+\s+in\s+\w+(\[[^\]]*\])*{content}\s*(%\}}|-%\}}|\||\bif\b)"
    )) || has(r"\bfor\s+\w+\s+in\s+content\s*(%\}|-%\}|\||\bif\b)")
    {
        return true;
    }
    let Ok(sets) = Regex::new(&format!(r"\bset\s+(\w+)\s*=\s*\w+(\[[^\]]*\])*{content}\s*-?%\}}")) else {
        return false;
    };
    let looped = sets.captures_iter(source).filter_map(|set| set.get(1)).any(|variable| {
        has(&format!(
            r"\bfor\s+\w+\s+in\s+{}\s*(%\}}|-%\}}|\||\bif\b)",
            variable.as_str()
        ))
    });
    looped
}

/// `{{ value }}`, as Python prints it.
fn print_like_python(out: &mut Output<'_>, _: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&display(value)),
    };
    written.map_err(|_| Error::new(ErrorKind::WriteFailure, "the prompt can't be written"))
}

/// Python's `str(value)`.
fn display(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut out = String::new();
            repr(value, &mut out, 0);
            out
        }
    }
}

/// Values within values that are printed; deeper ones can't come out of JSON.
const MAX_DEPTH: usize = 256;

/// Python's `repr(value)`.
fn repr(value: &Value, out: &mut String, depth: usize) {
    if depth > MAX_DEPTH {
        out.push('…');
        return;
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => quote_like_python(value.as_str().unwrap_or_default(), out),
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                repr(&key, out, depth + 1);
                out.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), out, depth + 1);
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                repr(&item, out, depth + 1);
            }
            out.push(']');
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn quote_like_python(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if u32::from(c) < 0x20 || u32::from(c) == 0x7F => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(real) => python_float(real),
        Err(_) => value.to_string(),
    }
}

/// Python's `repr` of a float: the shortest digits that give it back, with an exponent below 1e-4 and from 1e16 on.
fn python_float(real: f64) -> String {
    if real.is_nan() {
        return "NaN".into();
    }
    if real.is_infinite() {
        return if real > 0.0 {
            "Infinity".into()
        } else {
            "-Infinity".into()
        };
    }
    let scientific = format!("{real:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{real:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// The filter `tojson`, as Hugging Face replaces it: not escaped for HTML, and `{"a": 1}`.
fn to_json_filter(value: &Value, ensure_ascii: Option<bool>, options: Kwargs) -> Result<String, Error> {
    let ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .or(ensure_ascii)
        .unwrap_or(false);
    let indent = options.get::<Option<usize>>("indent")?;
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    options.assert_all_used()?;
    let mut style = JsonStyle::new(indent, sort_keys, ascii);
    if let Some([item, key]) = separators.as_deref() {
        (style.item_separator, style.key_separator) = (item.clone(), key.clone());
    }
    let mut out = String::new();
    style.write(value, &mut out, 0)?;
    Ok(out)
}

fn to_json(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    JsonStyle::new(None, false, false).write(value, &mut out, 0)?;
    Ok(out)
}

/// How Python's `json.dumps` writes.
struct JsonStyle {
    indent: Option<usize>,
    sort_keys: bool,
    ascii: bool,
    item_separator: String,
    key_separator: String,
}

impl JsonStyle {
    fn new(indent: Option<usize>, sort_keys: bool, ascii: bool) -> Self {
        Self {
            indent,
            sort_keys,
            ascii,
            item_separator: if indent.is_some() { "," } else { ", " }.into(),
            key_separator: ": ".into(),
        }
    }

    fn write(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        let refuse = |what: &str| {
            Err(Error::new(
                ErrorKind::BadSerialization,
                format!("{what} can't be written as JSON"),
            ))
        };
        if depth > MAX_DEPTH {
            return refuse("a value this deep");
        }
        match value.kind() {
            ValueKind::Undefined => return refuse("an undefined value"),
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.items(out, depth, '{', '}', keys, |key, out| {
                    match key.as_str() {
                        Some(name) => self.string(name, out),
                        None => self.string(&display(&key), out),
                    }
                    out.push_str(&self.key_separator);
                    self.write(&value.get_item(&key)?, out, depth + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(out, depth, '[', ']', items, |item, out| {
                    self.write(&item, out, depth + 1)
                })?;
            }
            _ => return refuse("this kind of value"),
        }
        Ok(())
    }

    fn items(
        &self,
        out: &mut String,
        depth: usize,
        open: char,
        close: char,
        items: Vec<Value>,
        mut write: impl FnMut(Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        let some = !items.is_empty();
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(out, depth + 1);
            write(item, out)?;
        }
        if some {
            self.new_line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = self.indent {
            out.push('\n');
            // A wide indent on deep values would be a way to run out of memory.
            out.extend(std::iter::repeat_n(' ', indent.min(16) * depth));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if u32::from(c) < 0x20 || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::chat;
    use crate::request::Prompt;

    const CASE: &str =
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}\
        [{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}]{% endfor %}\
        {% endif %}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

    /// The template in SmolLM2's own GGUF.
    const SMOLLM2: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
        {{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}\
        {% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

    const OPTIONS: RenderOptions<'_> = RenderOptions {
        // 2024-07-26 13:05:09 UTC
        now_s: 1_721_999_109,
        max_bytes: 1 << 20,
        param: "messages",
    };

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, "<s>", "</s>").expect("a template")
    }

    fn chat_of(fields: &str) -> Result<ChatPrompt, ApiError> {
        let body = format!(r#"{{"model":"toy",{fields}}}"#);
        let draft = chat::parse(body.as_bytes())?;
        match draft.prompts.into_iter().next() {
            Some(Prompt::Chat(chat)) => Ok(chat),
            other => unreachable!("a chat is a chat: {other:?}"),
        }
    }

    /// The prompt that a template makes of the fields of a chat body.
    fn render(source: &str, fields: &str) -> Result<String, ApiError> {
        template(source).render(&chat_of(fields)?, &OPTIONS)
    }

    fn rendered(source: &str, fields: &str) -> String {
        render(source, fields).expect(fields)
    }

    fn user(content: &str) -> String {
        format!(r#""messages":[{{"role":"user","content":{content}}}]"#)
    }

    /// Case C03's history, with these fields in the assistant's message and these arguments.
    fn history(content: &str, arguments: &str) -> String {
        format!(
            r#""messages":[{{"role":"user","content":"hi"}},
            {{"role":"assistant",{content}"tool_calls":[{{"id":"1","type":"function","function":{{"name":"clock"{arguments}}}}}]}},
            {{"role":"tool","tool_call_id":"1","content":"12:00"}}]"#
        )
    }

    #[test]
    fn a_call_without_content_is_not_the_word_none() {
        for content in [r#""content":null,"#, "", r#""content":"","#, r#""content":[],"#] {
            assert_eq!(
                rendered(CASE, &history(content, r#","arguments":"{\"tz\":\"UTC\"}""#)),
                "<user>hi</><assistant>[clock tz=UTC]</><tool>12:00</><assistant>",
                "{content}"
            );
        }
    }

    #[test]
    fn a_call_without_arguments() {
        for arguments in [
            "",
            r#","arguments":"""#,
            r#","arguments":null"#,
            r#","arguments":"{}""#,
            r#","arguments":{}"#,
        ] {
            assert_eq!(
                rendered(CASE, &history("", arguments)),
                "<user>hi</><assistant>[clock]</><tool>12:00</><assistant>",
                "{arguments}"
            );
        }
    }

    #[test]
    fn arguments_that_are_no_object_are_the_callers_error() {
        for arguments in [r#""{\"tz\": ""#, r#""\"UTC\"""#, r#""[1]""#, "7", "[1]"] {
            let error = render(CASE, &history("", &format!(r#","arguments":{arguments}"#))).expect_err(arguments);
            assert_eq!(error.http_status(), 400);
            assert_eq!(
                error.param.as_deref(),
                Some("messages[1].tool_calls[0].function.arguments")
            );
        }
    }

    #[test]
    fn parts_are_joined_where_a_template_wants_text() {
        let parts = r#"[{"type":"text","text":"A"},{"type":"text","text":"B"}]"#;
        assert_eq!(rendered(CASE, &user(parts)), "<user>A\nB</><assistant>");
    }

    #[test]
    fn a_template_that_loops_over_parts_gets_them() {
        let parts = user(r#"[{"type":"text","text":"A"},{"type":"text","text":"B"}]"#);
        for source in [
            "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}",
            "{% for m in messages %}{%- for p in m['content'] -%}({{ p['text'] }}){% endfor %}{% endfor %}",
            "{% for p in messages[0]['content'] if p.type == 'text' %}({{ p.text }}){% endfor %}",
            "{% for m in messages %}{% set c = m['content'] %}{% for p in c | list %}({{ p.text }}){% endfor %}{% endfor %}",
            "{% macro show(content) %}{% for p in content %}({{ p.text }}){% endfor %}{% endmacro %}{{ show(messages[0].content) }}",
        ] {
            assert_eq!(rendered(source, &parts), "(A)(B)", "{source}");
            assert_eq!(rendered(source, &user(r#""A""#)), "(A)", "{source}: text is one part");
        }
    }

    #[test]
    fn text_stays_text_where_a_template_asks_which_it_is() {
        let source = "{% for m in messages %}{% if m.content is string %}={{ m.content }}{% else %}\
            {% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}";
        assert_eq!(rendered(source, &user(r#""A""#)), "=A");
        assert_eq!(rendered(source, &user(r#"[{"type":"text","text":"A"}]"#)), "(A)");
    }

    #[test]
    fn nothing_is_none_only_where_a_template_asks_for_none() {
        let source =
            "{% for m in messages %}{% if m['content'] is none %}-{% else %}{{ m['content'] }}{% endif %}{% endfor %}";
        assert_eq!(rendered(source, &history(r#""content":null,"#, "")), "hi-12:00");
        assert_eq!(rendered(source, &history(r#""content":"","#, "")), "hi-12:00");
        assert_eq!(rendered(source, &user(r#""""#)), "");
    }

    #[test]
    fn what_a_template_raises_is_the_callers_error() {
        let source = "{% if messages|length > 1 %}{{ raise_exception('roles must take turns') }}{% endif %}";
        let two = r#""messages":[{"role":"user","content":"a"},{"role":"user","content":"b"}]"#;
        let error = render(source, two).expect_err("raised");
        assert_eq!(
            (error.http_status(), error.openai_type()),
            (400, "invalid_request_error")
        );
        assert_eq!(error.message, "roles must take turns");
        let in_macro = "{% macro check() %}{{ raise_exception('no ' ~ 7) }}{% endmacro %}{{ check() }}";
        assert_eq!(render(in_macro, two).expect_err("raised").message, "no 7");
    }

    #[test]
    fn what_a_template_chokes_on_is_the_callers_error() {
        for source in [
            "{{ messages[0].content.nothing.there }}",
            "{{ 1 + 'a' }}",
            "{{ messages[0].content.frobnicate() }}",
        ] {
            let error = render(source, &user(r#""a""#)).expect_err(source);
            assert_eq!(error.http_status(), 400, "{source}");
            assert_eq!(error.param.as_deref(), Some("messages"));
        }
    }

    #[test]
    fn content_is_never_a_template() {
        let content = r"{{ 7*7 }} {% raw %} {# x #} {% endgeneration %}";
        assert_eq!(
            rendered(CASE, &user(&format!("\"{content}\""))),
            format!("<user>{content}</><assistant>")
        );
    }

    #[test]
    fn smollm2() {
        assert_eq!(
            rendered(SMOLLM2, &user(r#""Hello""#)),
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
             <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        );
        let developer = r#""messages":[{"role":"developer","content":"Be brief."},{"role":"user","content":"Hi"}],
            "add_generation_prompt":false"#;
        assert_eq!(
            rendered(SMOLLM2, developer),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        );
    }

    #[test]
    fn a_template_that_knows_developers_meets_them() {
        let source = "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}";
        assert_eq!(
            rendered(source, r#""messages":[{"role":"developer","content":"x"}]"#),
            "developer!"
        );
    }

    /// In the manner of Llama 3.1: a date, a system turn cut out of the list, tools as indented JSON, `ipython` results.
    #[test]
    fn in_the_manner_of_llama() {
        let source = "\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now('%d %b %Y') %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '[system]' + date_string + '|' + system_message + '\\n' }}
{%- if tools is not none and tools is defined %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '[' + message['role'] + ']' + message['content'] | trim + '\\n' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception('one tool-call at once!') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{\"name\": \"' + tool_call.name + '\", \"parameters\": ' }}
        {{- tool_call.arguments | tojson }}
        {{- '}' }}
    {%- else %}
        {{- '[ipython]' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]' }}
{%- endif %}
";
        let fields = r#""messages":[{"role":"system","content":" Be kind. "},{"role":"user","content":"hi "},
            {"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function",
                "function":{"name":"f","arguments":"{\"b\":1.0,\"a\":[true,null,\"é\"]}"}}]},
            {"role":"tool","content":"12:00"}],
            "tools":[{"type":"function","function":{"name":"f"}}]"#;
        assert_eq!(
            rendered(source, fields),
            "<s>[system]26 Jul 2024|Be kind.\n{\n    \"type\": \"function\",\n    \"function\": {\n        \"name\": \"f\"\n    }\n}\
             [user]hi\n{\"name\": \"f\", \"parameters\": {\"b\": 1.0, \"a\": [true, null, \"é\"]}}[ipython]12:00[assistant]"
        );
    }

    /// In the manner of Qwen: a namespace, a loop from the end, strings cut up, neighbours compared.
    #[test]
    fn in_the_manner_of_qwen() {
        let source = "\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == 'user' and not (message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{{- ns.last_query_index }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '[a:' + reasoning.strip('\\n') + ':' + content.lstrip('\\n') + ']' }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- tool_call.name + tool_call.arguments | tojson }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '[tools' }}{%- endif %}
        {{- '|' + message.content }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- ']' }}{%- endif %}
    {%- else %}
        {{- '[' + message.role + ':' + message.content + ']' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
";
        let fields = r#""messages":[{"role":"user","content":"q"},{"role":"assistant","content":"<think>\nhm\n</think>\n\nyes"},
            {"role":"user","content":"r"},{"role":"assistant","reasoning_content":"\nso\n","content":"","tool_calls":
                [{"id":"1","type":"function","function":{"name":"f","arguments":"{\"items\":1}"}}]},
            {"role":"tool","content":"1"},{"role":"tool","content":"2"}],"chat_template_kwargs":{"enable_thinking":false}"#;
        assert_eq!(
            rendered(source, fields),
            "2[user:q][a:hm:yes][user:r][a:so:]f{\"items\": 1}[tools|1|2]<think></think>"
        );
    }

    /// In the manner of Mistral: filters over the messages, alternation checked, loop controls, a macro.
    #[test]
    fn in_the_manner_of_mistral() {
        let source = "\
{%- macro turn(m) -%}[INST] {{ m.content.strip() }}[/INST]{%- endmacro -%}
{{ bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages | rejectattr('role', 'eq', 'system') %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if m.content == 'stop' %}{% break %}{% endif %}
    {%- if m.content == 'skip' %}{% continue %}{% endif %}
    {%- if m.role == 'user' %}{{ turn(m) }}{% else %}{{ ' ' + m.content|trim + eos_token }}{% endif %}
{%- endfor %}
{{- users|length }}{{ users | map(attribute='content') | join(',') }}{{ documents }}";
        let fields = r#""messages":[{"role":"system","content":"x"},{"role":"user","content":" a "},
            {"role":"assistant","content":"skip"},{"role":"user","content":"b"},{"role":"assistant","content":"c"},
            {"role":"user","content":"stop"}]"#;
        assert_eq!(
            rendered(source, fields),
            "<s>[INST] a[/INST][INST] b[/INST] c</s>3 a ,b,stopNone"
        );
        let error = render(source, r#""messages":[{"role":"assistant","content":"a"}]"#).expect_err("raised");
        assert!(error.message.ends_with("must alternate user/assistant"), "{error}");
    }

    #[test]
    fn arguments_are_text_where_a_template_joins_them_to_text() {
        let source = "{% for m in messages %}{% for c in m.tool_calls %}{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endfor %}";
        assert_eq!(
            rendered(source, &history("", r#","arguments":"{\"a\":1}""#)),
            "<{\"a\": 1}>"
        );
    }

    #[test]
    fn a_template_that_asks_for_none_and_forgets_it_elsewhere() {
        let source = "{% for m in messages %}{{ m.content.strip() }}{% if m.content is none %}-{% endif %}{% endfor %}";
        assert_eq!(rendered(source, &history("", "")), "hi12:00");
    }

    #[test]
    fn an_argument_may_be_called_like_a_method() {
        assert_eq!(
            rendered(CASE, &history("", r#","arguments":"{\"items\":1,\"keys\":[]}""#)),
            "<user>hi</><assistant>[clock items=1 keys=[]]</><tool>12:00</><assistant>"
        );
    }

    #[test]
    fn values_are_printed_as_python_prints_them() {
        let fields = r#""messages":[{"role":"user","content":"x"}],"chat_template_kwargs":
            {"v":{"a":[true,null,1,2.0,1e-7,1e16,-0.5,"it's","\"q\"\n"],"b":{}}}"#;
        assert_eq!(
            rendered(
                "{{ v }} {{ v.a[0] }} {{ none }} {{ nothing }} {{ v.b|string }} {{ 7 / 2 }} {{ 7 // 2 }}",
                fields
            ),
            r#"{'a': [True, None, 1, 2.0, 1e-07, 1e+16, -0.5, "it's", '"q"\n'], 'b': {}} True None  {} 3.5 3"#
        );
    }

    #[test]
    fn tojson_is_that_of_hugging_face() {
        let fields = r#""messages":[{"role":"user","content":"x"}],"chat_template_kwargs":
            {"v":{"b":[1,"<é&'\u007f\u0001>",1e16],"a":{},"c":[]}}"#;
        assert_eq!(
            rendered("{{ v|tojson }}", fields),
            "{\"b\": [1, \"<é&'\u{7f}\\u0001>\", 1e+16], \"a\": {}, \"c\": []}"
        );
        assert_eq!(
            rendered(
                "{{ v|tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}",
                fields
            ),
            "{\"a\":{},\"b\":[1,\"<\\u00e9&'\u{7f}\\u0001>\",1e+16],\"c\":[]}"
        );
        assert_eq!(
            rendered("{{ v|tojson(indent=2) }}", fields),
            "{\n  \"b\": [\n    1,\n    \"<é&'\u{7f}\\u0001>\",\n    1e+16\n  ],\n  \"a\": {},\n  \"c\": []\n}"
        );
        assert!(render("{{ nothing|tojson }}", fields).is_err());
    }

    #[test]
    fn tests_of_kind_are_those_of_jinja() {
        let source = "{% for v in [none, 'a', [], {}, 1] %}\
            {{ v is iterable }} {{ v is sequence }} {{ v is mapping }} {{ v is string }};{% endfor %}{{ tools is none }}";
        assert_eq!(
            rendered(source, &user(r#""x""#)),
            "False False False False;True True False True;True True False False;True True True False;\
             False False False False;True"
        );
    }

    #[test]
    fn training_tags_say_nothing() {
        let source =
            "{% for m in messages %}\n  {%- generation -%}  {{ m.content }}  {%- endgeneration %}{% endfor %}.";
        assert_eq!(rendered(source, &user(r#""a""#)), "a.");
    }

    #[test]
    fn blocks_take_their_lines_with_them() {
        let source = "a\n  {% if true %}\nb\n  {% endif %}\nc\n";
        assert_eq!(rendered(source, &user(r#""x""#)), "a\nb\nc");
    }

    #[test]
    fn a_rendering_is_bounded_in_bytes_and_in_steps() {
        let long = user(&format!("\"{}\"", "x".repeat(200)));
        let options = RenderOptions {
            max_bytes: 100,
            ..OPTIONS
        };
        let error = template(CASE)
            .render(&chat_of(&long).expect("a chat"), &options)
            .expect_err("long");
        assert_eq!(error.code, ErrorCode::ContextLengthExceeded);
        let endless = "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}";
        assert_eq!(
            render(endless, &user(r#""x""#)).expect_err("endless").http_status(),
            400
        );
    }

    #[test]
    fn twenty_thousand_messages_are_within_the_bounds() {
        let message = r#"{"role":"user","content":"x"}"#;
        let fields = format!(r#""messages":[{}]"#, vec![message; 20_000].join(","));
        assert_eq!(
            rendered(CASE, &fields).len(),
            20_000 * "<user>x</>".len() + "<assistant>".len()
        );
    }

    #[test]
    fn a_template_that_is_none_is_refused_when_it_is_loaded() {
        let error = ChatTemplate::new("{% for %}", "", "").expect_err("broken");
        assert!(error.to_string().contains("line 1"), "{error}");
    }

    #[test]
    fn a_client_cannot_replace_what_is_the_templates_own() {
        let fields = r#""messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"bos_token":"y"}"#;
        assert_eq!(
            render(CASE, fields).expect_err("reserved").param.as_deref(),
            Some("chat_template_kwargs")
        );
    }

    #[test]
    fn dates() {
        let all = "%Y-%m-%d %H:%M:%S %y %-d %e %I%p %B %b %A %a %j %F %T %Z %% %Q %";
        assert_eq!(
            strftime(all, OPTIONS.now_s),
            "2024-07-26 13:05:09 24 26 26 01PM July Jul Friday Fri 208 2024-07-26 13:05:09 UTC % %Q %"
        );
        assert_eq!(strftime("%F %a %j", 951_782_400), "2000-02-29 Tue 060");
        assert_eq!(strftime("%F %a %-m", -1), "1969-12-31 Wed 12");
        assert_eq!(strftime("%F %I", 4_102_444_800), "2100-01-01 12");
    }
}
