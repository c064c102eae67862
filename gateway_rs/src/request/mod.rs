//! A request that can't be wrong. Every door (OpenAI chat, OpenAI completions, native gRPC) fills a [`Draft`]; only
//! [`Draft::validate`] makes a [`Request`] of it (`draft.rs`), so each rule on ranges, sizes and relations between fields
//! stands there once, and every refusal names the field as that door's clients know it. Conversations are put in normal
//! form in `chat.rs`.
//!
//! What is left to others: JSON types are [`crate::openai`]'s, rendering messages is [`crate::template`]'s, whether a
//! schema can be enforced is [`crate::schema`]'s. Counting the prompt's tokens comes later (it costs more than all of
//! this); [`Request::resolve_max_tokens`] is the one check that needs the count.

mod chat;
mod draft;

use std::time::Duration;

use serde_json::Value;

pub(crate) use self::chat::{check_message, check_template_kwargs, check_tool};
use self::draft::offered_tools;
pub use self::{
    chat::{parse_arguments, ChatMessage, ChatPrompt, Content, RawChat, RawMessage, Role, ToolCall},
    draft::{deadline_from_ms, deadline_from_text, ms_from_text, Draft, GuidedDraft, Limits, SamplingDraft},
};
use crate::error::{ApiError, ErrorCode};
use crate::schema::Guided;
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
