//! Admission of structured output: may this schema, pattern, grammar or list of choices reach an engine?
//!
//! All of them are untrusted programs. Here they are measured against limits, patterns are compiled apart (with a size
//! limit), and a schema is walked with the eyes of the converter that will turn it into a grammar: llama.cpp's
//! `SchemaConverter`, which picks one branch for each subschema by what it has and ignores the rest without a word. So for
//! each subschema [`Form::of`] names the branch, and every keyword which that branch doesn't read is a refusal when the
//! client asked for strictness. What the converter would choke on is refused always. What is left to the worker: building
//! the grammar itself.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::{Map, Value};

use crate::error::{shorten, type_name, ApiError};

/// What the answer must look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Guided {
    /// A JSON schema, as JSON text.
    JsonSchema(String),
    /// Any JSON object.
    JsonObject,
    /// A regular expression.
    Regex(String),
    /// A grammar in GBNF.
    Grammar(String),
    /// One of these texts.
    Choice(Vec<String>),
}

/// Bounds on what a client may ask an engine to enforce.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of a schema or grammar as text.
    pub max_bytes: usize,
    /// Schemas within schemas.
    pub max_depth: usize,
    /// Subschemas in all.
    pub max_schemas: usize,
    /// Properties of one object. The converter's rule for optional ones grows with the square.
    pub max_properties: usize,
    /// Values of one `enum`, and texts of one choice.
    pub max_choices: usize,
    /// `minItems`, `maxLength`, `{n}` and their like, each: a grammar spells repetitions out.
    pub max_repetitions: u64,
    /// Bytes of one pattern or regular expression.
    pub max_pattern_bytes: usize,
    /// Memory of one compiled pattern.
    pub max_compiled_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_bytes: 64 * 1024,
            max_depth: 32,
            max_schemas: 2048,
            max_properties: 256,
            max_choices: 1000,
            max_repetitions: 1000,
            max_pattern_bytes: 2048,
            max_compiled_bytes: 1024 * 1024,
        }
    }
}

/// Why it was not admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    message: String,
    /// A right wish that can't be fulfilled, rather than a mistake.
    unsupported: bool,
}

impl Refusal {
    fn mistake(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            unsupported: false,
        }
    }

    fn unsupported(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            unsupported: true,
        }
    }

    /// The error for the client, who put it in that field.
    pub fn into_error(self, param: &str) -> ApiError {
        if self.unsupported {
            ApiError::unsupported(param, self.message)
        } else {
            ApiError::invalid(param, self.message)
        }
    }
}

/// Admits or refuses. With `strict`, a keyword that would not be enforced is a refusal that names it.
pub fn admit(guided: &Guided, strict: bool, limits: &Limits) -> Result<(), Refusal> {
    match guided {
        Guided::JsonObject => Ok(()),
        Guided::JsonSchema(text) => {
            check_bytes("the schema", text, limits)?;
            let schema: Value = serde_json::from_str(text)
                .map_err(|error| Refusal::mistake(format!("the schema isn't JSON: {error}")))?;
            admit_schema(&schema, strict, limits)
        }
        Guided::Regex(pattern) => check_pattern(pattern, limits)
            .map_err(|reason| Refusal::mistake(format!("the regular expression can't be used: {reason}"))),
        Guided::Grammar(grammar) => {
            check_bytes("the grammar", grammar, limits)?;
            if grammar.trim().is_empty() {
                return Err(Refusal::mistake("the grammar is empty"));
            }
            Ok(())
        }
        Guided::Choice(texts) => check_choice(texts, limits),
    }
}

fn check_bytes(what: &str, text: &str, limits: &Limits) -> Result<(), Refusal> {
    if text.len() <= limits.max_bytes {
        return Ok(());
    }
    Err(Refusal::mistake(format!(
        "{what} must have at most {} bytes, got {}",
        limits.max_bytes,
        text.len()
    )))
}

fn check_choice(texts: &[String], limits: &Limits) -> Result<(), Refusal> {
    if texts.is_empty() || texts.len() > limits.max_choices {
        return Err(Refusal::mistake(format!(
            "between 1 and {} choices are allowed, got {}",
            limits.max_choices,
            texts.len()
        )));
    }
    if texts.iter().any(String::is_empty) {
        return Err(Refusal::mistake("a choice must not be empty"));
    }
    let bytes: usize = texts.iter().map(String::len).sum();
    if bytes > limits.max_bytes {
        return Err(Refusal::mistake(format!(
            "the choices must have at most {} bytes together, got {bytes}",
            limits.max_bytes
        )));
    }
    Ok(())
}

/// Whether a regular expression compiles, within limits.
fn check_pattern(pattern: &str, limits: &Limits) -> Result<(), String> {
    if pattern.len() > limits.max_pattern_bytes {
        return Err(format!(
            "it must have at most {} bytes, has {}",
            limits.max_pattern_bytes,
            pattern.len()
        ));
    }
    check_quantifiers(pattern, limits)?;
    regex::RegexBuilder::new(pattern)
        .size_limit(limits.max_compiled_bytes)
        .build()
        .map(|_| ())
        .map_err(|error| match error {
            regex::Error::CompiledTooBig(limit) => format!("it needs more than {limit} bytes when compiled"),
            // The last line is the reason; those before it draw the pattern.
            other => {
                let text = other.to_string();
                text.lines()
                    .last()
                    .unwrap_or_default()
                    .trim_start_matches("error: ")
                    .to_string()
            }
        })
}

/// What the regex crate is kinder about than the language of JSON schemas: a quantifier on a quantifier or on nothing. And
/// how often a quantifier may repeat, for a grammar spells that out.
fn check_quantifiers(pattern: &str, limits: &Limits) -> Result<(), String> {
    let mut chars = pattern.char_indices().peekable();
    let mut in_class = false;
    let mut repeatable = false;
    while let Some((at, c)) = chars.next() {
        let quantifies = !in_class && matches!(c, '*' | '+' | '?' | '{');
        if quantifies && !repeatable {
            return Err(format!("nothing to repeat at byte {at}"));
        }
        repeatable = !quantifies;
        match c {
            '\\' => {
                chars.next();
            }
            '[' if !in_class => in_class = true,
            ']' if in_class => in_class = false,
            '(' if !in_class => {
                // What kind of group it is.
                chars.next_if(|(_, c)| *c == '?');
                repeatable = false;
            }
            '|' | '^' if !in_class => repeatable = false,
            '{' if !in_class => {
                check_counts(&pattern[at + 1..], limits)?;
                while chars.next_if(|(_, c)| *c != '}').is_some() {}
                chars.next();
            }
            _ => {}
        }
        if quantifies {
            // Lazy.
            chars.next_if(|(_, c)| *c == '?');
        }
    }
    Ok(())
}

/// The counts of `{1,3}`, given what follows its opening.
fn check_counts(rest: &str, limits: &Limits) -> Result<(), String> {
    let inner = rest.split('}').next().unwrap_or_default();
    match inner
        .split(',')
        .filter_map(|count| count.trim().parse::<u64>().ok())
        .find(|count| *count > limits.max_repetitions)
    {
        Some(count) => Err(format!(
            "it may repeat at most {} times, asks for {count}",
            limits.max_repetitions
        )),
        None => Ok(()),
    }
}

/// Whether a schema can be turned into a grammar, and with `strict` whether that grammar is all the schema says.
pub fn admit_schema(schema: &Value, strict: bool, limits: &Limits) -> Result<(), Refusal> {
    let Value::Object(root) = schema else {
        return Err(Refusal::mistake(format!(
            "a schema must be an object, got {}",
            type_name(schema)
        )));
    };
    let mut walk = Walk {
        root,
        strict,
        limits,
        schemas: 0,
        targets: HashMap::new(),
    };
    walk.check_references(schema)?;
    walk.visit(root, "#", 0)?;
    walk.visit_targets()?;
    walk.check_left_recursion()
}

/// Keywords that say something of a schema but demand nothing of the instance.
const ANNOTATIONS: [&str; 14] = [
    "$schema",
    "$id",
    "$comment",
    "$anchor",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
];

const TYPES: [&str; 7] = ["string", "integer", "number", "boolean", "null", "object", "array"];
const FORMATS: [&str; 9] = [
    "date",
    "time",
    "date-time",
    "uuid",
    "uuid1",
    "uuid2",
    "uuid3",
    "uuid4",
    "uuid5",
];

/// Names of the converter's own rules. It names a `$ref`'s rule by the last part of the reference, so these would be
/// taken for its own.
const RULE_NAMES: [&str; 20] = [
    "root",
    "dot",
    "space",
    "boolean",
    "decimal-part",
    "integral-part",
    "number",
    "integer",
    "value",
    "object",
    "array",
    "uuid",
    "char",
    "string",
    "null",
    "date",
    "time",
    "date-time",
    "date-string",
    "time-string",
];

/// The converter's branches, in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Reference,
    Union,
    Types,
    Constant,
    Enumeration,
    Properties,
    AllOf,
    Tuple,
    List,
    Pattern,
    Format,
    Length,
    AnyObject,
    Primitive,
}

impl Form {
    /// The branch for that subschema; none when the converter knows none.
    fn of(schema: &Map<String, Value>) -> Option<Self> {
        let kind = schema.get("type");
        let is = |name: &str| kind.is_none_or(|kind| kind == name);
        let has = |key: &str| schema.contains_key(key);
        let closed = schema
            .get("additionalProperties")
            .is_some_and(|more| *more != Value::Bool(true));
        if has("$ref") {
            Some(Self::Reference)
        } else if has("oneOf") || has("anyOf") {
            Some(Self::Union)
        } else if kind.is_some_and(Value::is_array) {
            Some(Self::Types)
        } else if has("const") {
            Some(Self::Constant)
        } else if has("enum") {
            Some(Self::Enumeration)
        } else if is("object") && (has("properties") || closed) {
            Some(Self::Properties)
        } else if is("object") && has("allOf") {
            Some(Self::AllOf)
        } else if is("array") && has("items") {
            let tuple = schema.get("items").is_some_and(Value::is_array);
            Some(if tuple { Self::Tuple } else { Self::List })
        } else if is("array") && has("prefixItems") {
            Some(Self::Tuple)
        } else if is("string") && has("pattern") {
            Some(Self::Pattern)
        } else if is("string") && format_of(schema).is_some() {
            Some(Self::Format)
        } else if kind.is_some_and(|kind| kind == "string") && (has("minLength") || has("maxLength")) {
            Some(Self::Length)
        } else if kind.is_some_and(|kind| kind == "object") || schema.is_empty() {
            Some(Self::AnyObject)
        } else if kind.is_some() {
            Some(Self::Primitive)
        } else {
            None
        }
    }

    /// The keywords that this branch reads.
    fn reads(self, key: &str) -> bool {
        match self {
            Self::Reference => key == "$ref",
            // `oneOf` becomes a choice of alternatives too, but nothing keeps two of them from matching.
            Self::Union => key == "anyOf",
            // A type beside it says nothing more than the values do.
            Self::Constant => matches!(key, "const" | "type"),
            Self::Enumeration => matches!(key, "enum" | "type"),
            Self::Types | Self::Primitive => key == "type",
            Self::Properties => matches!(key, "type" | "properties" | "required" | "additionalProperties"),
            Self::AllOf => matches!(key, "type" | "allOf" | "additionalProperties"),
            Self::Tuple => matches!(key, "type" | "items" | "prefixItems"),
            Self::List => matches!(key, "type" | "items" | "minItems" | "maxItems"),
            Self::Pattern => matches!(key, "type" | "pattern"),
            Self::Format => matches!(key, "type" | "format"),
            Self::Length => matches!(key, "type" | "minLength" | "maxLength"),
            Self::AnyObject => matches!(key, "type" | "additionalProperties"),
        }
    }
}

fn format_of(schema: &Map<String, Value>) -> Option<&str> {
    schema
        .get("format")
        .and_then(Value::as_str)
        .filter(|format| FORMATS.contains(format))
}

struct Walk<'a> {
    root: &'a Map<String, Value>,
    strict: bool,
    limits: &'a Limits,
    schemas: usize,
    /// What each reference's last part stands for.
    targets: HashMap<&'a str, &'a str>,
}

impl<'a> Walk<'a> {
    fn visit(&mut self, schema: &'a Map<String, Value>, at: &str, depth: usize) -> Result<(), Refusal> {
        self.schemas += 1;
        if self.schemas > self.limits.max_schemas {
            return Err(Refusal::mistake(format!(
                "the schema must have at most {} subschemas",
                self.limits.max_schemas
            )));
        }
        if depth > self.limits.max_depth {
            return Err(Refusal::mistake(format!(
                "the schema must be at most {} levels deep",
                self.limits.max_depth
            )));
        }
        check_types(schema, at)?;
        let Some(form) = Form::of(schema) else {
            return Err(Refusal::unsupported(format!(
                "{at}: a schema needs a 'type' (or '$ref', 'anyOf', 'const', 'enum') to be enforced"
            )));
        };
        self.check_form(form, schema, at, depth)?;
        if self.strict {
            self.check_unread(form, schema, at)?;
        }
        Ok(())
    }

    /// What this branch reads has the right shape and is within limits.
    fn check_form(
        &mut self,
        form: Form,
        schema: &'a Map<String, Value>,
        at: &str,
        depth: usize,
    ) -> Result<(), Refusal> {
        match form {
            // All of them were checked before.
            Form::Reference => Ok(()),
            Form::Union => {
                let key = if schema.contains_key("oneOf") { "oneOf" } else { "anyOf" };
                self.visit_list(&schema[key], &format!("{at}/{key}"), depth)
            }
            Form::Types | Form::Primitive | Form::AnyObject | Form::Format => Ok(()),
            Form::Constant => check_literal(&schema["const"], at),
            Form::Enumeration => {
                let values = list(&schema["enum"], &format!("{at}/enum"))?;
                if values.is_empty() || values.len() > self.limits.max_choices {
                    return Err(Refusal::mistake(format!(
                        "{at}/enum: between 1 and {} values are allowed, got {}",
                        self.limits.max_choices,
                        values.len()
                    )));
                }
                values.iter().try_for_each(|value| check_literal(value, at))
            }
            Form::Properties => self.check_properties(schema, at, depth),
            Form::AllOf => self.check_all_of(schema, at, depth),
            Form::Tuple => {
                let key = if schema.contains_key("items") {
                    "items"
                } else {
                    "prefixItems"
                };
                self.visit_list(&schema[key], &format!("{at}/{key}"), depth)
            }
            Form::List => {
                let at_items = format!("{at}/items");
                let items = object(&schema["items"], &at_items)?;
                if items.is_empty() {
                    return Err(Refusal::unsupported(format!(
                        "{at_items}: an empty schema can't be enforced; leave 'items' out for any items"
                    )));
                }
                self.visit(items, &at_items, depth + 1)?;
                self.check_bounds(schema, "minItems", "maxItems", at)
            }
            Form::Pattern => {
                let pattern = schema["pattern"]
                    .as_str()
                    .ok_or_else(|| Refusal::mistake(format!("{at}/pattern: must be a string")))?;
                self.check_schema_pattern(pattern, at)
            }
            Form::Length => self.check_bounds(schema, "minLength", "maxLength", at),
        }
    }

    fn visit_list(&mut self, value: &'a Value, at: &str, depth: usize) -> Result<(), Refusal> {
        let schemas = list(value, at)?;
        if schemas.is_empty() {
            return Err(Refusal::mistake(format!("{at}: at least one schema is needed")));
        }
        for (index, schema) in schemas.iter().enumerate() {
            let at = format!("{at}/{index}");
            self.visit(object(schema, &at)?, &at, depth + 1)?;
        }
        Ok(())
    }

    /// All references, wherever they stand: the converter resolves them first, also those in what it doesn't read later.
    fn check_references(&mut self, value: &'a Value) -> Result<(), Refusal> {
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.check_references(item)),
            Value::Object(members) => match members.get("$ref") {
                None => members.values().try_for_each(|member| self.check_references(member)),
                Some(reference) => {
                    // It doesn't look beside a reference.
                    if members
                        .iter()
                        .any(|(key, member)| key != "$ref" && has_reference(member))
                    {
                        return Err(Refusal::unsupported(
                            "a '$ref' can't stand beside others; put it into an 'anyOf' of its own",
                        ));
                    }
                    self.check_reference(reference)
                }
            },
            _ => Ok(()),
        }
    }

    fn check_reference(&mut self, reference: &'a Value) -> Result<(), Refusal> {
        let reference = reference
            .as_str()
            .ok_or_else(|| Refusal::mistake("a '$ref' must be a string"))?;
        if !reference.starts_with("#/") {
            return Err(Refusal::unsupported(format!(
                "only a '$ref' within the schema ('#/…') can be followed, got {}",
                shorten(reference)
            )));
        }
        if self.resolve(reference).is_none() {
            return Err(Refusal::mistake(format!(
                "the '$ref' {} doesn't lead to a schema",
                shorten(reference)
            )));
        }
        let name = reference.rsplit('/').next().unwrap_or_default();
        let taken = self
            .targets
            .insert(name, reference)
            .is_some_and(|other| other != reference);
        if taken || name.is_empty() || RULE_NAMES.contains(&name) {
            return Err(Refusal::unsupported(format!(
                "the '$ref' {} needs a definition of another name; {} is taken",
                shorten(reference),
                shorten(name)
            )));
        }
        Ok(())
    }

    /// The schemas that references lead to. Definitions that nobody refers to are never read.
    fn visit_targets(&mut self) -> Result<(), Refusal> {
        let mut references: Vec<&'a str> = self.targets.values().copied().collect();
        references.sort_unstable();
        for reference in references {
            if let Some(schema) = self.resolve(reference) {
                self.visit(schema, reference, 1)?;
            }
        }
        Ok(())
    }

    /// The schema that a reference leads to. Like the converter, by plain names: no escapes, no array indices.
    fn resolve(&self, reference: &str) -> Option<&'a Map<String, Value>> {
        let mut target = self.root;
        for name in reference.split('/').skip(1) {
            target = target.get(name)?.as_object()?;
        }
        Some(target)
    }

    fn check_properties(&mut self, schema: &'a Map<String, Value>, at: &str, depth: usize) -> Result<(), Refusal> {
        let mut names = BTreeSet::new();
        if let Some(value) = schema.get("properties") {
            let at = format!("{at}/properties");
            let properties = object(value, &at)?;
            if properties.len() > self.limits.max_properties {
                return Err(Refusal::mistake(format!(
                    "{at}: at most {} properties are allowed, got {}",
                    self.limits.max_properties,
                    properties.len()
                )));
            }
            for (name, property) in properties {
                check_name(name, &at)?;
                names.insert(name.as_str());
                let at = format!("{at}/{name}");
                self.visit(object(property, &at)?, &at, depth + 1)?;
            }
        }
        match schema.get("additionalProperties") {
            None | Some(Value::Bool(_)) => {}
            Some(value) => {
                let at = format!("{at}/additionalProperties");
                self.visit(object(value, &at)?, &at, depth + 1)?;
            }
        }
        match required(schema, at)?.iter().find(|name| !names.contains(**name)) {
            Some(name) if self.strict => Err(Refusal::unsupported(format!(
                "{at}/required: {} isn't among the properties, which can't be enforced",
                shorten(name)
            ))),
            _ => Ok(()),
        }
    }

    /// The converter merges the parts' properties and makes all of them required; the rest of each part is lost.
    fn check_all_of(&mut self, schema: &'a Map<String, Value>, at: &str, depth: usize) -> Result<(), Refusal> {
        let at = format!("{at}/allOf");
        self.visit_list(&schema["allOf"], &at, depth)?;
        if !self.strict {
            return Ok(());
        }
        let mut names = HashSet::new();
        for (index, part) in list(&schema["allOf"], &at)?.iter().enumerate() {
            let at = format!("{at}/{index}");
            let mut part = object(part, &at)?;
            if let Some(reference) = part.get("$ref").and_then(Value::as_str) {
                part = self.resolve(reference).unwrap_or(part);
            }
            let Some(properties) = part.get("properties").and_then(Value::as_object) else {
                return Err(Refusal::unsupported(format!(
                    "{at}: only objects with properties can be joined by 'allOf'"
                )));
            };
            if let Some(name) = properties.keys().find(|name| !names.insert(name.as_str())) {
                return Err(Refusal::unsupported(format!(
                    "{at}: the property {} is in two parts of 'allOf'",
                    shorten(name)
                )));
            }
        }
        Ok(())
    }

    fn check_bounds(&self, schema: &Map<String, Value>, low: &str, high: &str, at: &str) -> Result<(), Refusal> {
        let bound = |key: &str| match schema.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(count) if count <= self.limits.max_repetitions => Ok(Some(count)),
                Some(count) => Err(Refusal::unsupported(format!(
                    "{at}/{key}: must be at most {}, got {count}",
                    self.limits.max_repetitions
                ))),
                None => Err(Refusal::mistake(format!(
                    "{at}/{key}: must be a whole number from 0 on"
                ))),
            },
        };
        match (bound(low)?, bound(high)?) {
            (Some(least), Some(most)) if least > most => {
                Err(Refusal::mistake(format!("{at}/{low}: {least} is over {high}, {most}")))
            }
            _ => Ok(()),
        }
    }

    fn check_schema_pattern(&self, pattern: &str, at: &str) -> Result<(), Refusal> {
        check_pattern(pattern, self.limits).map_err(|reason| {
            Refusal::mistake(format!("{at}/pattern: {} can't be used: {reason}", shorten(pattern)))
        })?;
        let unsupported = |what: &str| {
            Err(Refusal::unsupported(format!(
                "{at}/pattern: {} can't be enforced: {what}",
                shorten(pattern)
            )))
        };
        let Some(inner) = pattern.strip_prefix('^').and_then(|rest| rest.strip_suffix('$')) else {
            return unsupported("it must begin with '^' and end with '$'");
        };
        let mut chars = inner.chars().peekable();
        let mut in_class = false;
        while let Some(c) = chars.next() {
            match c {
                '\\' => match chars.next() {
                    Some('[' | ']') => {}
                    Some('(' | ')' | '|' | '{' | '}' | '*' | '+' | '?') if !in_class => {}
                    Some(c) => {
                        return unsupported(&format!("no '\\{c}'; write the characters out, like [0-9] or [.]"));
                    }
                    None => return unsupported("it must end with '$'"),
                },
                // They would have to be written as escapes, which a pattern of the text itself can't say.
                '"' => return unsupported("no quotes"),
                c if c.is_control() => return unsupported("no control characters"),
                '[' if in_class => return unsupported("no '[' inside a class"),
                '[' => {
                    in_class = true;
                    chars.next_if_eq(&'^');
                    if chars.peek() == Some(&']') {
                        return unsupported("no empty class");
                    }
                }
                ']' => in_class = false,
                '&' | '~' | '-' if in_class && chars.peek() == Some(&c) => {
                    return unsupported("no operators inside a class");
                }
                '(' if !in_class && chars.peek() == Some(&'?') => return unsupported("no '(?'"),
                '^' | '$' if !in_class => return unsupported("no anchors inside"),
                '*' | '+' | '?' | '}' if !in_class && chars.peek() == Some(&'?') => {
                    return unsupported("no lazy quantifiers");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Every keyword that this branch leaves unread would be dropped without a word.
    fn check_unread(&self, form: Form, schema: &Map<String, Value>, at: &str) -> Result<(), Refusal> {
        for (key, value) in schema {
            let idle = ANNOTATIONS.contains(&key.as_str())
                || key.starts_with("x-")
                // Demand nothing, though they could.
                || (key == "required" && value.as_array().is_some_and(Vec::is_empty))
                || (key == "additionalProperties" && *value == Value::Bool(true));
            let second = (form == Form::Tuple && key == "prefixItems" && schema.contains_key("items"))
                || (form == Form::AllOf && key == "additionalProperties" && *value != Value::Bool(false));
            if !idle && (second || !form.reads(key)) {
                let hint = if key == "oneOf" { "; use 'anyOf'" } else { "" };
                return Err(Refusal::unsupported(format!(
                    "{at}: the keyword '{key}' can't be enforced here, and the schema is strict{hint}"
                )));
            }
        }
        Ok(())
    }

    /// A schema that is itself before anything was written has no grammar.
    fn check_left_recursion(&self) -> Result<(), Refusal> {
        let mut done = HashSet::new();
        for start in self.targets.values() {
            let mut open = Vec::new();
            if self.returns_to_itself(start, &mut open, &mut done) {
                return Err(Refusal::mistake(format!(
                    "{} refers to itself without end",
                    shorten(start)
                )));
            }
        }
        Ok(())
    }

    fn returns_to_itself(&self, reference: &'a str, open: &mut Vec<&'a str>, done: &mut HashSet<&'a str>) -> bool {
        if done.contains(reference) {
            return false;
        }
        // The chain can't be longer than there are references, and those are bounded by the schemas.
        if open.contains(&reference) {
            return true;
        }
        open.push(reference);
        let mut heads = Vec::new();
        if let Some(schema) = self.resolve(reference) {
            head_references(schema, &mut heads, 0);
        }
        let found = heads.into_iter().any(|head| self.returns_to_itself(head, open, done));
        open.pop();
        done.insert(reference);
        found
    }
}

/// The references with which an instance of that schema may begin.
fn head_references<'a>(schema: &'a Map<String, Value>, heads: &mut Vec<&'a str>, depth: usize) {
    if let Some(reference) = schema.get("$ref") {
        heads.extend(reference.as_str());
    } else if let Some(alternatives) = schema.get("oneOf").or_else(|| schema.get("anyOf")) {
        // Deeper than any admitted schema, there is nothing to look for.
        if depth < 128 {
            for alternative in alternatives
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_object)
            {
                head_references(alternative, heads, depth + 1);
            }
        }
    }
}

fn has_reference(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(has_reference),
        Value::Object(members) => members.contains_key("$ref") || members.values().any(has_reference),
        _ => false,
    }
}

fn check_types(schema: &Map<String, Value>, at: &str) -> Result<(), Refusal> {
    let known = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    let right = match schema.get("type") {
        None => true,
        Some(Value::Array(types)) => !types.is_empty() && types.iter().all(known),
        Some(one) => known(one),
    };
    if right {
        Ok(())
    } else {
        Err(Refusal::mistake(format!(
            "{at}/type: must be one or more of {}",
            TYPES.join(", ")
        )))
    }
}

fn required<'a>(schema: &'a Map<String, Value>, at: &str) -> Result<Vec<&'a str>, Refusal> {
    let Some(value) = schema.get("required") else {
        return Ok(Vec::new());
    };
    let at = format!("{at}/required");
    list(value, &at)?
        .iter()
        .map(|name| {
            name.as_str()
                .ok_or_else(|| Refusal::mistake(format!("{at}: must be a list of names")))
        })
        .collect()
}

fn object<'a>(value: &'a Value, at: &str) -> Result<&'a Map<String, Value>, Refusal> {
    match value {
        Value::Object(object) => Ok(object),
        Value::Bool(_) => Err(Refusal::unsupported(format!(
            "{at}: true and false as schemas can't be enforced"
        ))),
        other => Err(Refusal::mistake(format!(
            "{at}: must be an object, got {}",
            type_name(other)
        ))),
    }
}

fn list<'a>(value: &'a Value, at: &str) -> Result<&'a [Value], Refusal> {
    match value {
        Value::Array(items) => Ok(items),
        other => Err(Refusal::mistake(format!(
            "{at}: must be a list, got {}",
            type_name(other)
        ))),
    }
}

/// A value that must be written as it is. The converter doesn't escape, so what JSON escapes can't be in it.
fn check_literal(value: &Value, at: &str) -> Result<(), Refusal> {
    match value {
        Value::String(text) => check_name(text, at),
        Value::Array(items) => items.iter().try_for_each(|item| check_literal(item, at)),
        Value::Object(members) => members.iter().try_for_each(|(name, member)| {
            check_name(name, at)?;
            check_literal(member, at)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}

fn check_name(text: &str, at: &str) -> Result<(), Refusal> {
    // A member of that name would be taken for a reference, wherever it stands.
    if text == "$ref" {
        return Err(Refusal::unsupported(format!("{at}: '$ref' can't be a name or value")));
    }
    if text.chars().any(|c| matches!(c, '"' | '\\') || c.is_control()) {
        return Err(Refusal::unsupported(format!(
            "{at}: quotes, backslashes and control characters in {} can't be enforced",
            shorten(text)
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn strict(schema: &Value) -> Result<(), Refusal> {
        admit_schema(schema, true, &Limits::default())
    }

    fn lenient(schema: &Value) -> Result<(), Refusal> {
        admit_schema(schema, false, &Limits::default())
    }

    #[track_caller]
    fn refused_always(schema: Value, word: &str) {
        for result in [strict(&schema), lenient(&schema)] {
            let refusal = result.expect_err(word);
            assert!(refusal.message.contains(word), "{schema}: {}", refusal.message);
        }
    }

    #[track_caller]
    fn refused_when_strict(schema: Value, word: &str) {
        let refusal = strict(&schema).expect_err(word);
        assert!(refusal.message.contains(word), "{schema}: {}", refusal.message);
        assert_eq!(lenient(&schema), Ok(()), "{schema}");
    }

    #[test]
    fn what_the_converter_enforces_is_admitted() {
        for schema in [
            json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}),
            json!({"type": "object"}),
            json!({}),
            json!({"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 9}, "minItems": 1, "maxItems": 3}),
            json!({"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}]}),
            json!({"type": ["string", "null"]}),
            json!({"enum": ["a", 1, null, ["b"]]}),
            json!({"type": "string", "enum": ["a"]}),
            json!({"const": {"a": 1}}),
            json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
            json!({"type": "string", "pattern": "^[a-z]{1,3}(-[0-9]+)?$"}),
            json!({"type": "string", "format": "date-time"}),
            json!({"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}},
                "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}}),
            json!({"allOf": [{"type": "object", "properties": {"a": {"type": "string"}}},
                {"$ref": "#/$defs/b"}], "$defs": {"b": {"type": "object", "properties": {"b": {"type": "string"}}}}}),
            json!({"type": "object", "additionalProperties": {"type": "integer"}, "title": "T", "description": "d",
                "x-order": 1, "default": {}}),
        ] {
            assert_eq!(strict(&schema), Ok(()), "{schema}");
            assert_eq!(lenient(&schema), Ok(()), "{schema}");
        }
    }

    #[test]
    fn a_keyword_that_would_be_dropped_is_named() {
        refused_when_strict(json!({"type": "integer", "minimum": 1}), "'minimum'");
        refused_when_strict(json!({"type": "number", "multipleOf": 2}), "'multipleOf'");
        refused_when_strict(json!({"type": "string", "format": "email"}), "'format'");
        refused_when_strict(
            json!({"type": "string", "pattern": "^a$", "maxLength": 1}),
            "'maxLength'",
        );
        refused_when_strict(json!({"type": "string", "enum": ["a"], "minLength": 1}), "'minLength'");
        refused_when_strict(json!({"type": ["string", "null"], "enum": ["a", null]}), "'enum'");
        refused_when_strict(json!({"type": "array", "minItems": 1}), "'minItems'");
        refused_when_strict(
            json!({"type": "array", "items": {"type": "null"}, "uniqueItems": true}),
            "'uniqueItems'",
        );
        refused_when_strict(
            json!({"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "null"}}),
            "'prefixItems'",
        );
        refused_when_strict(
            json!({"type": "object", "patternProperties": {"a": {}}}),
            "'patternProperties'",
        );
        refused_when_strict(json!({"type": "object", "minProperties": 1}), "'minProperties'");
        refused_when_strict(json!({"type": "object", "required": ["a"]}), "'required'");
        refused_when_strict(json!({"type": "object", "anyOf": [{"type": "object"}]}), "'type'");
        refused_when_strict(json!({"oneOf": [{"type": "string"}, {"type": "null"}]}), "'anyOf'");
        refused_when_strict(json!({"type": "string", "not": {"const": "a"}}), "'not'");
        refused_when_strict(json!({"type": "string", "nullable": true}), "'nullable'");
        refused_when_strict(
            json!({"$ref": "#/$defs/a", "minLength": 1, "$defs": {"a": {"type": "string"}}}),
            "'minLength'",
        );
        refused_when_strict(
            json!({"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer", "maximum": 1}}}}}),
            "#/properties/a/properties/b: the keyword 'maximum'",
        );
    }

    #[test]
    fn what_would_come_out_as_something_else_is_refused() {
        refused_when_strict(
            json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}),
            "'b'",
        );
        refused_when_strict(
            json!({"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}},
                {"type": "object", "properties": {"a": {"type": "null"}}}]}),
            "two parts",
        );
        refused_when_strict(
            json!({"allOf": [{"anyOf": [{"type": "object", "properties": {}}]}]}),
            "'allOf'",
        );
    }

    #[test]
    fn what_the_converter_chokes_on_is_refused_always() {
        refused_always(json!(7), "an object");
        refused_always(json!({"type": "yaml"}), "type");
        refused_always(json!({"type": 7}), "type");
        refused_always(json!({"type": []}), "type");
        refused_always(json!({"description": "anything"}), "'type'");
        refused_always(json!({"minimum": 1}), "'type'");
        refused_always(json!({"minLength": 1}), "'type'");
        refused_always(json!({"enum": []}), "enum");
        refused_always(json!({"anyOf": []}), "anyOf");
        refused_always(json!({"anyOf": {}}), "list");
        refused_always(json!({"type": "array", "items": {}}), "items");
        refused_always(json!({"type": "array", "items": true}), "items");
        refused_always(json!({"type": "object", "properties": {"a": true}}), "properties/a");
        refused_always(json!({"type": "object", "properties": 7}), "properties");
        refused_always(
            json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": [7]}),
            "required",
        );
        refused_always(
            json!({"type": "object", "properties": {"a\"b": {"type": "null"}}}),
            "quotes",
        );
        refused_always(
            json!({"type": "object", "properties": {"$ref": {"type": "null"}}}),
            "$ref",
        );
        refused_always(json!({"enum": ["a\\b"]}), "backslashes");
        refused_always(json!({"const": {"a": "\n"}}), "control");
        refused_always(json!({"type": "string", "minLength": -1}), "minLength");
        refused_always(json!({"type": "string", "minLength": 2, "maxLength": 1}), "minLength");
    }

    #[test]
    fn references_lead_somewhere_and_come_to_an_end() {
        refused_always(json!({"$ref": 7}), "string");
        refused_always(json!({"$ref": "#"}), "within the schema");
        refused_always(json!({"$ref": "https://example.com/x"}), "within the schema");
        refused_always(json!({"$ref": "#/$defs/a"}), "doesn't lead");
        refused_always(
            json!({"$ref": "#/$defs/string", "$defs": {"string": {"type": "null"}}}),
            "taken",
        );
        refused_always(
            json!({"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/definitions/a"}], "$defs": {"a": {"type": "null"}},
                "definitions": {"a": {"type": "string"}}}),
            "taken",
        );
        refused_always(
            json!({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "without end",
        );
        refused_always(
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "beside others",
        );
        refused_always(
            json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {}}}}),
            "items",
        );
        refused_always(json!({"type": "null", "default": {"$ref": 7}}), "string");
        let unused = json!({"type": "null", "$defs": {"a": {"type": "array", "items": {}}}});
        assert_eq!(strict(&unused), Ok(()));
        refused_always(
            json!({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]},
                "b": {"$ref": "#/$defs/a"}}}),
            "without end",
        );
    }

    #[test]
    fn patterns_compile_and_are_bounded() {
        let pattern = |pattern: &str| json!({"type": "string", "pattern": pattern});
        for (bad, word) in [
            ("foo**", "nothing to repeat"),
            ("^a+*$", "nothing to repeat"),
            ("^a{2}{3}$", "nothing to repeat"),
            ("^*a$", "nothing to repeat"),
            ("^(+a)$", "nothing to repeat"),
            ("^a|?$", "nothing to repeat"),
            ("^[]a]$", "empty class"),
            ("^[[:alpha:]]$", "inside a class"),
            ("^[a&&b]$", "inside a class"),
            ("^($", "unclosed group"),
            ("^[b-a]$", "range"),
            ("^a{1001}$", "1000"),
            ("^(a{1000}){1000}$", "when compiled"),
            ("a", "begin with"),
            ("^a\\$", "end with"),
            ("^\\d$", "'\\d'"),
            ("^\\.$", "'\\.'"),
            ("^[a\\-]$", "'\\-'"),
            ("^\\n$", "'\\n'"),
            ("^\n$", "control"),
            ("^a\"$", "quotes"),
            ("^[\\w]$", "'\\w'"),
            ("^(?:a)$", "'(?'"),
            ("^a+?$", "lazy"),
            ("^a^b$", "anchors"),
        ] {
            refused_always(pattern(bad), word);
        }
        refused_always(pattern(&format!("^{}$", "a".repeat(2048))), "2048");
        refused_always(json!({"type": "string", "pattern": 7}), "string");
        for good in [
            "^$",
            "^[*+?]{2}\\*\\?$",
            "^\\[a\\]$",
            "^[^\\]a]*$",
            "^[.]$",
            "^(a|b)+[{}]$",
            "^é{2,}$",
        ] {
            assert_eq!(strict(&pattern(good)), Ok(()), "{good}");
        }
    }

    #[test]
    fn size_and_depth_are_bounded() {
        let mut deep = json!({"type": "null"});
        for _ in 0..40 {
            deep = json!({"type": "array", "items": deep});
        }
        refused_always(deep, "deep");
        let wide: Map<String, Value> = (0..257)
            .map(|index| (index.to_string(), json!({"type": "null"})))
            .collect();
        refused_always(json!({"type": "object", "properties": wide}), "256");
        let many: Vec<Value> = (0..2048).map(|_| json!({"type": "null"})).collect();
        refused_always(json!({"anyOf": many}), "2048");
        let values: Vec<Value> = (0..1001).map(Value::from).collect();
        refused_always(json!({"enum": values}), "1000");
        refused_always(json!({"type": "string", "maxLength": 100_000}), "maxLength");
        let long = Guided::JsonSchema(format!(r#"{{"type":"string","title":"{}"}}"#, "x".repeat(65_536)));
        assert!(admit(&long, false, &Limits::default()).is_err());
        let grammar = Guided::Grammar("x".repeat(65_537));
        assert!(admit(&grammar, false, &Limits::default()).is_err());
    }

    #[test]
    fn a_mistake_and_a_wish_too_far_are_told_apart() {
        use crate::error::ErrorCode;

        let code = |schema: Value| strict(&schema).expect_err("refused").into_error("response_format").code;
        assert_eq!(code(json!({"type": "yaml"})), ErrorCode::InvalidArgument);
        assert_eq!(code(json!({"type": "integer", "minimum": 1})), ErrorCode::Unsupported);
    }
}
