//! A request as a door reads it, and all the rules that make a [`Request`] of it.

use std::collections::BTreeMap;
use std::time::Duration;

use headrace_core::routing::choice::Wish;
use serde::Deserialize;
use serde_json::Value;

use super::{Class, Door, Field, Prompt, Request, Sampling, Stopping, ToolChoice};
use crate::error::{shorten, ApiError};
use crate::schema::{self, Guided};
use crate::tools;

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
    /// For requests that say nothing of how ids are drawn.
    pub sampling: SamplingDraft,
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
            sampling: SamplingDraft::default(),
        }
    }
}

/// What OpenAI's legacy interface allows in `logprobs`.
const MAX_LEGACY_LOGPROBS: u32 = 5;
const MAX_REPETITION_PENALTY: f64 = 10.0;
const MAX_LABEL_BYTES: usize = 256;

/// How ids are drawn, as a request or a model's maker says it. Absent = OpenAI's default.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct SamplingDraft {
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
}

impl SamplingDraft {
    /// Within the ranges. The error names the field as that door does.
    pub fn check(&self, door: Door) -> Result<Sampling, ApiError> {
        let real = |field: Field, value: Option<f64>, low: f64, high: f64, default: f32| {
            in_range(door.name(field), value, low, high, default)
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
        let mut top_k = self.top_k(door)?;
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
            logit_bias: Vec::new(),
            seed: None,
            n: 1,
        })
    }

    fn top_k(&self, door: Door) -> Result<u32, ApiError> {
        match self.top_k {
            None | Some(-1) => Ok(0),
            Some(k) if k >= 0 => Ok(u32::try_from(k).unwrap_or(u32::MAX)),
            Some(k) => Err(ApiError::invalid(
                door.name(Field::TopK),
                format!("top_k must be at least 1, or 0 or -1 for all; got {k}"),
            )),
        }
    }
}

/// A request as a door reads it: right in type, not yet checked in value. Absent = the default.
#[derive(Clone, Debug)]
pub struct Draft {
    /// By which interface it came.
    pub door: Door,
    /// The model's name.
    pub model: String,
    /// At least one.
    pub prompts: Vec<Prompt>,
    /// See [`SamplingDraft`].
    pub sampling: SamplingDraft,
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
            sampling: SamplingDraft::default(),
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

    /// All or nothing of the model's defaults: beside a temperature that the client chose, OpenAI's hold, so that 0 is
    /// the likeliest id and no more.
    fn sampling(&self, n: u32, limits: &Limits) -> Result<Sampling, ApiError> {
        let says_nothing = self.sampling == SamplingDraft::default();
        let said = if says_nothing { &limits.sampling } else { &self.sampling };
        Ok(Sampling {
            logit_bias: self.logit_bias(limits)?,
            seed: self.seed,
            n,
            ..said.check(self.door)?
        })
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

pub fn offered_tools(prompts: &[Prompt]) -> &[Value] {
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
