//! A model as the router knows it: its words, not its weights. Read from a prepared folder at start.

use std::{
    path::Path,
    sync::{atomic::Ordering, Arc},
};

use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::config::{ModelFolder, PlaneConfig, SpecialTokensInContent};
use crate::{
    error::{ApiError, ErrorCode},
    request::{ChatPrompt, Door, Prompt, Request, SamplingDraft},
    template::{ChatTemplate, RenderOptions},
    tokenize::{
        stretches::{Remembered, Stretches},
        EncodeError, Tokenizer,
    },
    tools::ToolFormat,
    typed::{self, Rendered},
};

/// Tokenizer, template and bounds of one model.
pub struct Model {
    /// The name that clients ask for, and of its pool.
    pub name: String,
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    /// SHA-256 of the template's text; empty when there is none.
    pub template_sha256: String,
    /// Prompt and answer together.
    pub context_tokens: u32,
    /// Ids are below this.
    pub vocab_size: u32,
    /// All ids by which the model says that it is done.
    pub eos_ids: Vec<u32>,
    /// How it calls tools, if its template shows it.
    pub tool_format: Option<ToolFormat>,
    /// Tokens by which its calls are told, special or not.
    pub tool_mark_ids: Arc<[u32]>,
    /// Put before a prompt of plain text.
    bos_id: Option<u32>,
    special_tokens_in_content: SpecialTokensInContent,
    /// Encoded a while ago.
    stretches: Option<Stretches>,
    /// For requests that say nothing of how ids are drawn.
    pub sampling: SamplingDraft,
}

/// `model.json` of a prepared folder.
#[derive(Deserialize)]
struct Description {
    context_tokens: u32,
    vocab_size: u32,
    eos_ids: Vec<u32>,
    #[serde(default)]
    bos_token: String,
    #[serde(default)]
    eos_token: String,
    #[serde(default)]
    add_bos: bool,
}

impl Model {
    /// Reads a prepared folder; the error says which file and why.
    pub fn load(plane: &PlaneConfig, config: &ModelFolder) -> Result<Self, String> {
        let read = |name: &str| -> Result<String, String> {
            let path = config.folder.join(name);
            std::fs::read_to_string(&path)
                .map_err(|error| format!("model {}: {}: {error}", config.name, path.display()))
        };
        let failed = |name: &str, error: &dyn std::fmt::Display| {
            format!(
                "model {}: {}: {error}",
                config.name,
                Path::new(&config.folder).join(name).display()
            )
        };
        config
            .sampling
            .check(Door::Chat)
            .map_err(|error| format!("model {}: sampling: {}", config.name, error.message))?;
        let description: Description =
            serde_json::from_str(&read("model.json")?).map_err(|error| failed("model.json", &error))?;
        let tokenizer = Tokenizer::from_file(config.folder.join("tokenizer.json"))
            .map_err(|error| failed("tokenizer.json", &error))?;
        let source = match read("chat_template.jinja") {
            Ok(source) => Some(source),
            Err(_) if !config.folder.join("chat_template.jinja").exists() => None,
            Err(error) => return Err(error),
        };
        let template = source
            .as_deref()
            .map(|source| ChatTemplate::new(source, &description.bos_token, &description.eos_token))
            .transpose()
            .map_err(|error| failed("chat_template.jinja", &error))?;
        let tool_format = source.as_deref().and_then(ToolFormat::of_template);
        let marks = tool_format.map_or(&[][..], ToolFormat::marks);
        Ok(Self {
            name: config.name.clone(),
            template,
            tool_format,
            tool_mark_ids: marks.iter().filter_map(|mark| tokenizer.token_to_id(mark)).collect(),
            template_sha256: source
                .map(|source| hex(&Sha256::digest(source.as_bytes())))
                .unwrap_or_default(),
            context_tokens: description.context_tokens,
            vocab_size: description.vocab_size,
            eos_ids: description.eos_ids,
            bos_id: description
                .add_bos
                .then(|| tokenizer.token_to_id(&description.bos_token))
                .flatten(),
            tokenizer: Arc::new(tokenizer),
            special_tokens_in_content: plane.special_tokens_in_content,
            stretches: Stretches::new(plane.tokenizer_cache_mib << 20),
            sampling: config.sampling.clone(),
        })
    }

    /// Whether the same request has the same ids for it, prompt and answer: it may take the other's place.
    pub fn reads_like(&self, other: &Self) -> bool {
        self.tokenizer.hash() == other.tokenizer.hash()
            && self.template_sha256 == other.template_sha256
            && self.eos_ids == other.eos_ids
            && self.bos_id == other.bos_id
            && self.context_tokens >= other.context_tokens
    }

    /// The ids of a request's prompt; `scope`: who may profit from what is remembered of it. Errors: what the template
    /// refuses, and a prompt that cannot fit.
    pub fn encode(
        &self,
        request: &Request,
        prompt: &Prompt,
        scope: &[u8],
        context_tokens: u32,
    ) -> Result<Vec<u32>, ApiError> {
        let param = if request.door == Door::Native {
            "chat.messages"
        } else {
            "messages"
        };
        let remembered = self.stretches.as_ref().map(|stretches| Remembered { stretches, scope });
        self.encode_at_most(prompt, remembered, context_tokens, param)
            .map_err(|error| match error {
                Refused::TooLong(at_least) => request.prompt_too_long(at_least, context_tokens),
                Refused::Other(error) => error,
            })
    }

    /// Bytes of long messages whose ids were made, and of those whose ids were known.
    pub fn message_bytes(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.stretches.iter().flat_map(|stretches| {
            let counts = [
                ("encoded", &stretches.encoded_bytes),
                ("remembered", &stretches.found_bytes),
            ];
            counts.map(|(ids, bytes)| (ids, bytes.load(Ordering::Relaxed)))
        })
    }

    /// The ids of a prompt, at most so many of them.
    pub fn encode_prompt(&self, prompt: &Prompt, max_tokens: u32, param: &str) -> Result<Vec<u32>, ApiError> {
        self.encode_at_most(prompt, None, max_tokens, param)
            .map_err(|error| match error {
                Refused::TooLong(at_least) => ApiError::new(
                    ErrorCode::ContextLengthExceeded,
                    format!("the text has at least {at_least} tokens, the limit is {max_tokens}"),
                ),
                Refused::Other(error) => error,
            })
    }

    /// The text of ids. Errors: INVALID_ARGUMENT for an id that the model doesn't have.
    pub fn detokenize(&self, ids: &[u32], skip_special: bool) -> Result<String, ApiError> {
        if let Some(id) = ids.iter().find(|id| **id >= self.vocab_size) {
            let message = format!("token id {id} is not below the vocabulary's size {}", self.vocab_size);
            return Err(ApiError::invalid("tokens", message));
        }
        Ok(self.tokenizer.decode(ids, skip_special))
    }

    fn encode_at_most(
        &self,
        prompt: &Prompt,
        remembered: Option<Remembered<'_>>,
        max_tokens: u32,
        param: &str,
    ) -> Result<Vec<u32>, Refused> {
        match prompt {
            Prompt::Ids(ids) => Ok(ids.clone()),
            Prompt::Text(text) => {
                let mut ids = self
                    .tokenizer
                    .encode_bounded(text, &[], remembered, max_tokens as usize)?;
                if let Some(bos) = self.bos_id.filter(|bos| ids.first() != Some(bos)) {
                    ids.insert(0, bos);
                }
                Ok(ids)
            }
            Prompt::Chat(chat) => {
                let Rendered { text, typed } = self.render(chat, max_tokens, param).map_err(Refused::Other)?;
                Ok(self
                    .tokenizer
                    .encode_bounded(&text, &typed, remembered, max_tokens as usize)?)
            }
        }
    }

    /// A conversation as the model's own template writes it; `param` is what the client calls its messages.
    fn render(&self, chat: &ChatPrompt, context_tokens: u32, param: &str) -> Result<Rendered, ApiError> {
        let Some(template) = &self.template else {
            let message = format!(
                "model '{}' has no chat template; give a prompt of text or ids",
                self.name
            );
            return Err(ApiError::invalid(param, message));
        };
        let options = RenderOptions {
            now_s: super::unix_s() as i64,
            max_bytes: (context_tokens as usize).saturating_mul(self.tokenizer.pieces().longest().max(1)),
            param,
        };
        match self.special_tokens_in_content {
            SpecialTokensInContent::Text => typed::render(template, chat, &options, self.tokenizer.special_texts()),
            SpecialTokensInContent::Control => Ok(Rendered {
                text: template.render(chat, &options)?,
                typed: Vec::new(),
            }),
        }
    }
}

/// Why a prompt has no ids.
enum Refused {
    /// It has at least so many.
    TooLong(usize),
    Other(ApiError),
}

impl From<EncodeError> for Refused {
    fn from(error: EncodeError) -> Self {
        match error {
            EncodeError::TooLong { at_least, .. } => Self::TooLong(at_least),
            EncodeError::Failed(reason) => Self::Other(ApiError::new(
                ErrorCode::Internal,
                format!("the tokenizer failed: {reason}"),
            )),
        }
    }
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}
