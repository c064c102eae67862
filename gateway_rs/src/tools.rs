//! Calls of tools in a model's answer: its text in; text, and calls as they grow, out. Pure.
//!
//! Models write calls in their own ways ([`ToolFormat`]), which their chat templates show. The name of a call leaves as soon
//! as its arguments begin, the arguments as they come. What only looked like a call is text after all and leaves as it
//! was written. However the text is cut into pieces, what leaves is the same.

use std::sync::Arc;

use serde_json::Value;

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once for each call: Hermes, Qwen.
    Marked,
    /// The answer is the object itself, with `parameters`, perhaps after `<|python_tag|>`: Llama 3. Also what an engine is
    /// held to when a call is required.
    Bare,
    /// `[TOOL_CALLS]` and a list of objects, or a name, `[ARGS]` and the arguments: Mistral.
    Listed,
}

impl ToolFormat {
    /// What a chat template shows of it; None when it shows nothing that is known here.
    #[must_use]
    pub fn of_template(source: &str) -> Option<Self> {
        if source.contains("[TOOL_CALLS]") {
            Some(Self::Listed)
        } else if source.contains("<tool_call>") {
            // With `<function=` the call is no JSON.
            (!source.contains("<function=")).then_some(Self::Marked)
        } else {
            let llama = source.contains("\"parameters\"") && source.contains("<|start_header_id|>");
            (llama || source.contains("<|python_tag|>")).then_some(Self::Bare)
        }
    }

    /// Texts that tell calls from the rest. Where they are special tokens, they must not be left out of the text.
    #[must_use]
    pub fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Marked => &["<tool_call>", "</tool_call>"],
            Self::Bare => &["<|python_tag|>"],
            Self::Listed => &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        }
    }
}

/// What is looked for in an answer.
#[derive(Clone, Debug)]
pub struct ToolRules {
    /// How the model writes calls.
    pub format: ToolFormat,
    /// The tools that were offered.
    pub names: Arc<[String]>,
    /// The answer ends with its first call.
    pub only_one: bool,
    /// Makes the ids of calls; another one for each request.
    pub seed: u64,
}

/// A part of a call. The first part of each has a name and an id.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallPart {
    /// Which call, from 0.
    pub index: u32,
    /// With the first part.
    pub begun: Option<Begun>,
    /// JSON text that goes on where the last part ended.
    pub arguments: String,
}

/// What a call begins with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begun {
    /// To be named by the tool's answer.
    pub id: String,
    /// The tool.
    pub name: String,
}

/// The name of one of `tools`.
pub(crate) fn name(tool: &Value) -> &str {
    let name = tool.get("function").and_then(|function| function.get("name"));
    name.and_then(Value::as_str).unwrap_or_default()
}

/// The JSON schema of an answer that is a call of one of the tools, or of that one; and whether it must be kept to the
/// letter. Names come before arguments, so that these can leave as they come. The error says what is wrong.
pub(crate) fn required_call(tools: &[Value], wanted: Option<&str>) -> Result<(String, bool), String> {
    let callable: Vec<&Value> = tools
        .iter()
        .filter(|tool| wanted.is_none_or(|wanted| name(tool) == wanted))
        .collect();
    let function = |tool: &Value, field: &str| tool.get("function").and_then(|function| function.get(field)).cloned();
    let mut definitions = Vec::new();
    let mut calls = Vec::new();
    for tool in &callable {
        let mut parameters = match function(tool, "parameters") {
            Some(parameters @ Value::Object(_)) => parameters,
            _ => serde_json::json!({"type": "object", "properties": {}, "additionalProperties": false}),
        };
        // References start at the whole schema's root.
        for key in ["$defs", "definitions"] {
            if let Some(found) = parameters.as_object_mut().and_then(|parameters| parameters.remove(key)) {
                definitions.push(format!(r#""{key}":{found},"#));
            }
        }
        calls.push(format!(
            r#"{{"type":"object","properties":{{"name":{{"const":{}}},"arguments":{parameters}}},"required":["name","arguments"],"additionalProperties":false}}"#,
            Value::from(name(tool)),
        ));
    }
    let strict = callable
        .iter()
        .any(|tool| function(tool, "strict").and_then(|strict| strict.as_bool()) == Some(true));
    match (calls.as_slice(), wanted) {
        ([], Some(wanted)) => {
            let names: Vec<&str> = tools.iter().map(name).collect();
            Err(format!("there is no tool '{wanted}' (tools: {})", names.join(", ")))
        }
        ([], None) => Err("a tool can be called only when tools are given".to_owned()),
        ([call], _) => Ok((format!("{{{}{}", definitions.concat(), &call[1..]), strict)),
        _ if !definitions.is_empty() => {
            Err("tools whose parameters have $defs can be required by name, one at a time".to_owned())
        }
        _ => Ok((format!(r#"{{"anyOf":[{}]}}"#, calls.join(",")), strict)),
    }
}

/// Bytes of what may be a call that are held back before it is one.
const MAX_HELD_BYTES: usize = 64 * 1024;

/// Looks for calls in one choice's text.
#[derive(Clone, Debug)]
pub struct ToolParser {
    rules: ToolRules,
    choice: u32,
    state: State,
    /// Text that has not left: what may be a mark, or a call from its mark on.
    held: String,
    calls: u32,
}

#[derive(Clone, Debug)]
enum State {
    /// Nothing but white space yet, where a call can only be the whole answer.
    Start,
    /// A mark may come.
    Text,
    /// Nothing is looked for any more.
    Plain,
    /// Within an object, or the name before it; the place in what is held.
    Call(Scan),
    /// Behind an object.
    Behind,
}

impl ToolParser {
    /// Nothing has come yet.
    #[must_use]
    pub fn new(rules: ToolRules, choice: u32) -> Self {
        let state = match rules.format {
            ToolFormat::Bare => State::Start,
            _ => State::Text,
        };
        Self {
            rules,
            choice,
            state,
            held: String::new(),
            calls: 0,
        }
    }

    /// Calls that have begun.
    #[must_use]
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// The one call that was allowed is complete.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.rules.only_one && self.calls > 0 && !matches!(self.state, State::Call(_))
    }

    /// Takes text in. What is text leaves to `text`, what is a call's to `parts`.
    pub fn push(&mut self, fresh: &str, text: &mut String, parts: &mut Vec<CallPart>) {
        self.held.push_str(fresh);
        while !self.is_over() && self.advance(text, parts) {}
    }

    /// The answer is over: what was held and is no call leaves.
    pub fn finish(&mut self, text: &mut String) {
        let of_a_call = self.has_begun() || matches!(self.state, State::Behind);
        // White space between calls and after them is nobody's.
        let is_nobodys = self.calls > 0 && self.held.trim().is_empty();
        if !(of_a_call || is_nobodys) {
            text.push_str(&self.held);
        }
        self.held.clear();
        self.state = State::Plain;
    }

    /// One step; false when it takes more text to go on.
    fn advance(&mut self, text: &mut String, parts: &mut Vec<CallPart>) -> bool {
        match &mut self.state {
            State::Plain => {
                text.push_str(&self.held);
                self.held.clear();
                false
            }
            State::Start => self.start(),
            State::Text => self.look(text),
            State::Behind => self.behind(),
            State::Call(scan) => {
                let scanned = scan.run(&self.held);
                let may_be = scanned != Scanned::Wrong && self.begin(parts);
                if self.has_begun() {
                    self.go_on(parts);
                }
                match scanned {
                    Scanned::More if may_be && self.held.len() <= MAX_HELD_BYTES => false,
                    Scanned::Call if may_be => self.end_call(),
                    _ if self.has_begun() => scanned != Scanned::More && self.end_call(),
                    _ => self.no_call(text),
                }
            }
        }
    }

    fn has_begun(&self) -> bool {
        matches!(&self.state, State::Call(scan) if scan.begun)
    }

    /// Bare: the answer is a call when it begins like one.
    fn start(&mut self) -> bool {
        let rest = self.held.trim_start();
        let mark = ToolFormat::Bare.marks()[0];
        let after = rest.strip_prefix(mark).unwrap_or(rest).trim_start();
        if after.starts_with('{') {
            let at = self.held.len() - after.len();
            self.state = State::Call(Scan::bare(at));
        } else if !after.is_empty() && !mark.starts_with(after) {
            self.state = State::Plain;
        } else {
            return false;
        }
        true
    }

    fn look(&mut self, text: &mut String) -> bool {
        let mark = self.rules.format.marks()[0];
        if let Some(at) = self.held.find(mark) {
            let before = &self.held[..at];
            if self.calls == 0 || !before.trim().is_empty() {
                text.push_str(before);
            }
            self.held.drain(..at);
            self.state = State::Call(Scan::after_mark(self.rules.format, mark.len()));
            return true;
        }
        let keep = beginning_of(&self.held, mark);
        // White space behind a call waits for what comes.
        if self.calls == 0 || !self.held[..self.held.len() - keep].trim().is_empty() {
            text.push_str(&self.held[..self.held.len() - keep]);
            self.held.drain(..self.held.len() - keep);
        }
        false
    }

    /// The call begins, once it is sure that it is one. False when it is none.
    fn begin(&mut self, parts: &mut Vec<CallPart>) -> bool {
        let State::Call(scan) = &mut self.state else {
            return false;
        };
        if scan.begun || !scan.is_callable() {
            return scan.begun || !scan.done;
        }
        let Some(name) = &scan.name else { return false };
        // An object may just be the answer, where nothing else marks a call.
        if scan.bare && !self.rules.names.contains(name) {
            return false;
        }
        parts.push(CallPart {
            index: self.calls,
            begun: Some(Begun {
                id: call_id(&self.rules, self.choice, self.calls),
                name: name.clone(),
            }),
            arguments: String::new(),
        });
        scan.begun = true;
        self.calls += 1;
        true
    }

    /// Arguments that have come leave.
    fn go_on(&mut self, parts: &mut Vec<CallPart>) {
        let State::Call(scan) = &mut self.state else { return };
        let arguments = scan.take_arguments(&self.held);
        if arguments.is_empty() {
            return;
        }
        let index = self.calls - 1;
        match parts.last_mut() {
            Some(last) if last.index == index => last.arguments.push_str(&arguments),
            _ => parts.push(CallPart {
                index,
                begun: None,
                arguments,
            }),
        }
    }

    /// It was text after all.
    fn no_call(&mut self, text: &mut String) -> bool {
        text.push_str(&self.held);
        self.held.clear();
        self.state = match self.rules.format {
            ToolFormat::Marked => State::Text,
            _ => State::Plain,
        };
        true
    }

    fn end_call(&mut self) -> bool {
        if let State::Call(scan) = &self.state {
            self.held.drain(..scan.at);
            self.state = State::Behind;
        }
        true
    }

    fn behind(&mut self) -> bool {
        let rest = self.held.trim_start();
        let at = self.held.len() - rest.len();
        match self.rules.format {
            ToolFormat::Marked => {
                let mark = ToolFormat::Marked.marks()[1];
                if rest.starts_with(mark) {
                    self.held.drain(..at + mark.len());
                } else if mark.starts_with(rest) {
                    return false;
                }
                self.state = State::Text;
            }
            ToolFormat::Bare | ToolFormat::Listed => {
                let after = rest.trim_start_matches([',', ';', ']']).trim_start();
                if after.starts_with('{') {
                    self.held.drain(..self.held.len() - after.len());
                    self.state = State::Call(match self.rules.format {
                        ToolFormat::Bare => Scan::bare(0),
                        _ => Scan::object(0),
                    });
                } else if after.is_empty() {
                    return false;
                } else if self.rules.format == ToolFormat::Listed {
                    self.held.drain(..self.held.len() - after.len());
                    self.state = State::Text;
                } else {
                    self.state = State::Plain;
                }
            }
        }
        true
    }
}

/// Bytes at the end of `text` that may be the beginning of `mark`.
fn beginning_of(text: &str, mark: &str) -> usize {
    (1..mark.len().min(text.len() + 1))
        .rev()
        .find(|&length| text.as_bytes().ends_with(&mark.as_bytes()[..length]))
        .unwrap_or(0)
}

/// Mistral's templates take ids of nine letters and digits only; others take anything.
fn call_id(rules: &ToolRules, choice: u32, index: u32) -> String {
    const LETTERS: &[u8] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    let (prefix, letters) = match rules.format {
        ToolFormat::Listed => ("", 9),
        _ => ("call_", 20),
    };
    let bytes: Vec<u8> = [rules.seed, (u64::from(choice) << 32) | u64::from(index)]
        .iter()
        .flat_map(|part| part.to_le_bytes())
        .collect();
    let mut state = xxhash_rust::xxh3::xxh3_128(&bytes);
    let mut id = prefix.to_owned();
    for _ in 0..letters {
        id.push(char::from(LETTERS[(state % LETTERS.len() as u128) as usize]));
        state /= LETTERS.len() as u128;
    }
    id
}

#[derive(Clone, Copy, PartialEq)]
enum Scanned {
    /// The object is complete.
    Call,
    More,
    /// Not what a call looks like.
    Wrong,
}

/// Reads one call as far as it has come.
#[derive(Clone, Debug)]
struct Scan {
    /// Bytes of what is held that were read.
    at: usize,
    stage: Stage,
    name: Option<String>,
    /// Where the arguments are, as far as they were read; a string is JSON within JSON.
    arguments: Option<(usize, usize)>,
    arguments_done: bool,
    /// Of the arguments, what has left.
    left: usize,
    /// Nothing but the object itself tells that it is a call.
    bare: bool,
    done: bool,
    begun: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Stage {
    /// Behind a mark of [`ToolFormat::Listed`]: a list or a name.
    ListOrName,
    Open,
    /// A key, or the end of an empty object.
    Key,
    Colon(Key),
    Value(Key),
    /// Within a value.
    Within(Key, Json),
    /// `,` or the end.
    Comma,
    /// Arguments that no object encloses.
    Alone(Json),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Key {
    Name,
    Arguments,
    Other,
}

impl Scan {
    fn object(at: usize) -> Self {
        Self {
            at,
            stage: Stage::Open,
            name: None,
            arguments: None,
            arguments_done: false,
            left: 0,
            bare: false,
            done: false,
            begun: false,
        }
    }

    fn bare(at: usize) -> Self {
        Self {
            bare: true,
            ..Self::object(at)
        }
    }

    fn after_mark(format: ToolFormat, at: usize) -> Self {
        let stage = match format {
            ToolFormat::Listed => Stage::ListOrName,
            _ => Stage::Open,
        };
        Self {
            stage,
            ..Self::object(at)
        }
    }

    /// It is sure that this is a call.
    fn is_callable(&self) -> bool {
        self.name.is_some() && (self.arguments.is_some() || (self.done && !self.bare))
    }

    fn take_arguments(&mut self, held: &str) -> String {
        let Some((start, end)) = self.arguments else {
            // A call without arguments has an empty object of them.
            let is_news = self.done && std::mem::replace(&mut self.left, 2) == 0;
            return if is_news { "{}".to_owned() } else { String::new() };
        };
        let written = &held[start..end];
        if written.starts_with('{') {
            let fresh = written[self.left..].to_owned();
            self.left = written.len();
            return fresh;
        }
        if !self.arguments_done || std::mem::replace(&mut self.left, written.len()) > 0 {
            return String::new();
        }
        match serde_json::from_str::<serde_json::Value>(written) {
            Ok(serde_json::Value::String(text)) => text,
            Ok(serde_json::Value::Null) | Err(_) => "{}".to_owned(),
            Ok(_) => written.to_owned(),
        }
    }

    fn run(&mut self, held: &str) -> Scanned {
        let scanned = self.read(held);
        self.done = scanned == Scanned::Call;
        scanned
    }

    fn read(&mut self, held: &str) -> Scanned {
        let bytes = held.as_bytes();
        loop {
            let within = matches!(self.stage, Stage::Within(..) | Stage::Alone(_) | Stage::ListOrName);
            while !within && bytes.get(self.at).is_some_and(u8::is_ascii_whitespace) {
                self.at += 1;
            }
            let Some(&byte) = bytes.get(self.at) else {
                return Scanned::More;
            };
            let rest = &held[self.at..];
            match &mut self.stage {
                Stage::ListOrName => match rest.find(['{', '"']) {
                    None if rest.len() > 256 => return Scanned::Wrong,
                    None => return Scanned::More,
                    Some(end) => {
                        let head = rest[..end].trim();
                        self.at += end;
                        if matches!(head, "" | "[") {
                            self.stage = Stage::Open;
                            continue;
                        }
                        let name = head.split('[').next().unwrap_or_default().trim();
                        if name.is_empty() || name.contains(char::is_whitespace) || bytes[self.at] != b'{' {
                            return Scanned::Wrong;
                        }
                        self.name = Some(name.to_owned());
                        self.arguments = Some((self.at, self.at));
                        self.stage = Stage::Alone(Json::default());
                    }
                },
                Stage::Open => {
                    if byte != b'{' {
                        return Scanned::Wrong;
                    }
                    self.at += 1;
                    self.stage = Stage::Key;
                }
                Stage::Key => match byte {
                    b'}' if self.name.is_some() => {
                        self.at += 1;
                        self.stage = Stage::Comma;
                        return Scanned::Call;
                    }
                    b'"' => {
                        let Some(length) = string_length(rest) else {
                            return Scanned::More;
                        };
                        let key = match &rest[..length] {
                            "\"name\"" => Key::Name,
                            "\"arguments\"" | "\"parameters\"" => Key::Arguments,
                            "\"type\"" | "\"id\"" => Key::Other,
                            // An answer that is JSON need not wait for its end.
                            _ if self.bare => return Scanned::Wrong,
                            _ => Key::Other,
                        };
                        self.at += length;
                        self.stage = Stage::Colon(key);
                    }
                    _ => return Scanned::Wrong,
                },
                Stage::Colon(key) => {
                    if byte != b':' {
                        return Scanned::Wrong;
                    }
                    self.at += 1;
                    self.stage = Stage::Value(*key);
                }
                Stage::Value(Key::Name) => {
                    if byte != b'"' {
                        return Scanned::Wrong;
                    }
                    let Some(length) = string_length(rest) else {
                        return Scanned::More;
                    };
                    let Ok(name) = serde_json::from_str::<String>(&rest[..length]) else {
                        return Scanned::Wrong;
                    };
                    self.name = Some(name);
                    self.at += length;
                    self.stage = Stage::Comma;
                }
                Stage::Value(key) => {
                    if *key == Key::Arguments {
                        self.arguments = Some((self.at, self.at));
                    }
                    self.stage = Stage::Within(*key, Json::default());
                }
                Stage::Within(key, json) => {
                    let key = *key;
                    let (read, done) = json.read(rest);
                    self.at += read;
                    if key == Key::Arguments {
                        if let Some((_, end)) = &mut self.arguments {
                            *end = self.at;
                        }
                        self.arguments_done = done;
                    }
                    if !done {
                        return Scanned::More;
                    }
                    self.stage = Stage::Comma;
                }
                Stage::Comma => {
                    self.at += 1;
                    match byte {
                        b',' => self.stage = Stage::Key,
                        b'}' if self.name.is_some() => return Scanned::Call,
                        _ => return Scanned::Wrong,
                    }
                }
                Stage::Alone(json) => {
                    let (read, done) = json.read(rest);
                    self.at += read;
                    if let Some((_, end)) = &mut self.arguments {
                        *end = self.at;
                    }
                    if !done {
                        return Scanned::More;
                    }
                    self.arguments_done = true;
                    return Scanned::Call;
                }
            }
        }
    }
}

/// Bytes of the JSON string that `text` begins with, quotes included; None when it is not complete.
fn string_length(text: &str) -> Option<usize> {
    let mut escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let is_end = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        is_end
    })?;
    Some(end + 2)
}

/// Finds the end of a JSON value without looking at what is in it.
#[derive(Clone, Debug, Default, PartialEq)]
struct Json {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Json {
    /// Bytes that belong to the value, and whether it ends with them.
    fn read(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                self.in_string = self.escaped || byte != b'"';
                self.escaped = byte == b'\\' && !self.escaped;
                if !self.in_string && self.depth == 0 {
                    return (at + 1, true);
                }
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                // Of a number or a word at the top, this is the end of what it is in.
                b'}' | b']' | b',' if self.depth == 0 => return (at, true),
                b'}' | b']' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                _ => {}
            }
        }
        (text.len(), false)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(format: ToolFormat) -> ToolRules {
        ToolRules {
            format,
            names: vec!["f".to_owned(), "get weather".to_owned()].into(),
            only_one: false,
            seed: 7,
        }
    }

    /// The text and the calls of an answer that comes in such pieces.
    fn parse(rules: ToolRules, pieces: impl Iterator<Item = String>) -> (String, Vec<(String, String)>) {
        let mut parser = ToolParser::new(rules, 0);
        let (mut text, mut parts) = (String::new(), Vec::new());
        for piece in pieces {
            parser.push(&piece, &mut text, &mut parts);
        }
        parser.finish(&mut text);
        let mut calls: Vec<(String, String)> = Vec::new();
        for part in parts {
            assert_eq!(part.begun.is_some(), part.index as usize == calls.len());
            if let Some(begun) = part.begun {
                calls.push((begun.name, String::new()));
            }
            calls[part.index as usize].1.push_str(&part.arguments);
        }
        assert_eq!(parser.calls() as usize, calls.len());
        (text, calls)
    }

    /// The same whether it comes whole or a character at a time.
    fn calls(format: ToolFormat, answer: &str) -> (String, Vec<(String, String)>) {
        let whole = parse(rules(format), std::iter::once(answer.to_owned()));
        let bit_by_bit = parse(rules(format), answer.chars().map(String::from));
        assert_eq!(whole, bit_by_bit, "{answer}");
        whole
    }

    fn call(name: &str, arguments: &str) -> (String, String) {
        (name.to_owned(), arguments.to_owned())
    }

    #[test]
    fn calls_between_marks() {
        let two = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}\\\"{\"}}\n</tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>\n";
        let (text, found) = calls(ToolFormat::Marked, two);
        assert_eq!(text, "Let me see.\n");
        assert_eq!(found, [call("f", "{\"a\": \"}\\\"{\"}"), call("g", "{}")]);
        // The other way round, as a string, not at all, and with text behind.
        let odd = "<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call><tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"b\\\": 2}\"}</tool_call><tool_call>{\"name\": \"f\"}</tool_call> done";
        let (text, found) = calls(ToolFormat::Marked, odd);
        assert_eq!(text, " done");
        assert_eq!(
            found,
            [call("f", "{\"a\": 1}"), call("f", "{\"b\": 2}"), call("f", "{}")]
        );
    }

    #[test]
    fn what_is_no_call_is_text() {
        for answer in [
            "a <tool b",
            "x <tool_call> is how one writes a call",
            "<tool_call>\n{\"name\": 7}</tool_call>",
            "<tool_call>{\"arguments\": {}}</tool_call>",
            "<tool_call>{\"name\": \"f",
            "<tool_call>",
        ] {
            assert_eq!(calls(ToolFormat::Marked, answer), (answer.to_owned(), vec![]));
        }
        for answer in [
            " {\"name\": \"Alice\", \"parameters\": {\"age\": 3}}",
            "{\"name\": \"f\"}",
            "{\"answer\": {\"name\": \"f\"}}",
            "\n\nHello {\"name\": \"f\", \"parameters\": {}}",
            "<|python",
        ] {
            assert_eq!(calls(ToolFormat::Bare, answer), (answer.to_owned(), vec![]));
        }
        assert_eq!(calls(ToolFormat::Listed, "[TOOL_CALLS] none").0, "[TOOL_CALLS] none");
    }

    #[test]
    fn a_call_that_is_cut_keeps_what_has_come() {
        let cut = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1, 2";
        assert_eq!(
            calls(ToolFormat::Marked, cut),
            (String::new(), vec![call("f", "{\"a\": [1, 2")])
        );
        let unclosed = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_";
        assert_eq!(
            calls(ToolFormat::Marked, unclosed),
            (String::new(), vec![call("f", "{}")])
        );
    }

    #[test]
    fn bare_objects_and_lists() {
        let (text, found) = calls(
            ToolFormat::Bare,
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": null}}; {\"type\": \"function\", \"name\": \"get weather\", \"parameters\": {}}",
        );
        assert_eq!(
            (text.as_str(), found),
            ("", vec![call("f", "{\"a\": null}"), call("get weather", "{}")])
        );
        let (text, found) = calls(
            ToolFormat::Listed,
            "Sure.[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": \"é\"}}, {\"name\": \"g\", \"arguments\": {}}]",
        );
        assert_eq!(
            (text.as_str(), found),
            ("Sure.", vec![call("f", "{\"a\": \"é\"}"), call("g", "{}")])
        );
        let (text, found) = calls(
            ToolFormat::Listed,
            "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}",
        );
        assert_eq!(
            (text.as_str(), found),
            ("", vec![call("f", "{\"a\": 1}"), call("g", "{}")])
        );
    }

    #[test]
    fn one_call_and_no_more() {
        let one = ToolRules {
            only_one: true,
            ..rules(ToolFormat::Marked)
        };
        let answer = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call> x";
        let (text, found) = parse(one, std::iter::once(answer.to_owned()));
        assert_eq!((text.as_str(), found), ("", vec![call("f", "{}")]));
    }

    #[test]
    fn what_is_required_can_be_enforced() {
        use crate::schema::{self, Guided};
        let tools = [
            serde_json::json!({"type": "function", "function": {"name": "f", "parameters": {
                "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
                "$defs": {"n": {"type": "integer"}}}}}),
            serde_json::json!({"type": "function", "function": {"name": "g", "strict": true}}),
        ];
        for (some, wanted) in [
            (&tools[..1], None),
            (&tools[..], Some("f")),
            (&tools[1..], None),
            (&tools[..], Some("g")),
        ] {
            let (schema, strict) = required_call(some, wanted).unwrap();
            assert_eq!(
                schema::admit(&Guided::JsonSchema(schema.clone()), true, &schema::Limits::default()),
                Ok(()),
                "{schema}"
            );
            assert!(schema.find("name").unwrap() < schema.find("arguments").unwrap());
            assert_eq!(
                strict,
                some.len() == 1 && name(&some[0]) != "f" || wanted.is_some_and(|wanted| wanted != "f")
            );
        }
        assert!(required_call(&tools, Some("x"))
            .unwrap_err()
            .contains("there is no tool 'x' (tools: f, g"));
        assert!(required_call(&tools, None).unwrap_err().contains("$defs"));
        let plain = [
            tools[1].clone(),
            serde_json::json!({"type": "function", "function": {"name": "k"}}),
        ];
        assert!(required_call(&plain, None).unwrap().0.starts_with("{\"anyOf\":["));
    }

    #[test]
    fn ids_differ_and_suit_the_format() {
        let ids = |format| -> Vec<String> { (0..3).map(|index| call_id(&rules(format), index % 2, index)).collect() };
        for (format, length) in [(ToolFormat::Listed, 9), (ToolFormat::Marked, 25)] {
            let ids = ids(format);
            assert!(ids.iter().all(|id| id.len() == length));
            assert!(ids[0] != ids[1] && ids[1] != ids[2] && ids[0] != ids[2]);
        }
    }

    #[test]
    fn formats_by_template() {
        for (source, format) in [
            (
                "{%- if tools %}<tool_call>\n{\"name\": <function-name>",
                Some(ToolFormat::Marked),
            ),
            ("<tool_call>\n<function=example>", None),
            (
                "<|start_header_id|> {\"name\": x, \"parameters\": y}",
                Some(ToolFormat::Bare),
            ),
            ("[TOOL_CALLS] [", Some(ToolFormat::Listed)),
            ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ] {
            assert_eq!(ToolFormat::of_template(source), format, "{source}");
        }
    }

    proptest! {
        /// Nothing is lost and nothing panics, whatever a model writes; and no cut makes a difference.
        #[test]
        fn any_text_in_any_pieces(
            parts in proptest::collection::vec(prop_oneof![
                Just("<tool_call>"), Just("</tool_call>"), Just("[TOOL_CALLS]"), Just("[ARGS]"), Just("<|python_tag|>"),
                Just("{"), Just("}"), Just("["), Just("]"), Just("\"name\""), Just("\"f\""), Just(":"), Just(","), Just(" "),
                Just("\"arguments\""), Just("\"parameters\""), Just("\""), Just("\\"), Just("é"), Just("null"), Just("x"),
                Just("<tool_call>{\"name\":\"f\",\"arguments\":{\"a\":1}}"),
            ], 0..40),
            format in prop_oneof![Just(ToolFormat::Marked), Just(ToolFormat::Bare), Just(ToolFormat::Listed)],
        ) {
            let answer = parts.concat();
            let (text, found) = parse(rules(format), answer.chars().map(String::from));
            if found.is_empty() {
                prop_assert_eq!(text, answer);
            } else {
                prop_assert!(text.len() < answer.len());
            }
        }
    }
}
