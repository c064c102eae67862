//! The data plane's configuration: the `[router]` table of the one configuration file, checked by Python
//! (`services/headrace/config.py` has each key's meaning), with the models' prepared folders.

use std::path::PathBuf;

use headrace_core::routing::{agreement::Measure, choice::Wish};
use serde::Deserialize;

use crate::request::SamplingDraft;

/// Everything the data plane needs to know at start.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PlaneConfig {
    pub router_id: String,
    pub http_address: String,
    pub grpc_address: String,
    pub scheduler: String,
    pub cache: String,
    pub threads: usize,
    pub max_body_bytes: usize,
    pub max_open_requests: usize,
    pub max_unread_tokens: usize,
    pub max_choices: u32,
    pub max_deadline_s: f64,
    pub max_index_bytes: usize,
    pub place_attempts: u32,
    pub resume_attempts: u32,
    pub stall_timeout_s: f64,
    pub header_timeout_s: f64,
    pub drain_grace_s: f64,
    pub settle_s: f64,
    pub tokenizer_cache_mib: usize,
    pub special_tokens_in_content: SpecialTokensInContent,
    /// Empty: none.
    pub shadow_log: PathBuf,
    pub models: Vec<ModelFolder>,
    /// Names that are served by several models.
    #[serde(default)]
    pub aliases: Vec<AliasConfig>,
    pub telemetry: Telemetry,
    /// Who may ask; empty: everybody.
    #[serde(default)]
    pub tenants_file: PathBuf,
    /// None: everything in plain text.
    #[serde(default)]
    pub tls: Option<TlsConfig>,
    /// None: no batches are kept here.
    #[serde(default)]
    pub batches: Option<BatchesConfig>,
}

/// Sockets in a folder of this process's own, to which nobody else has access: who speaks there need not prove who it is.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchesConfig {
    /// Where this process's Python side answers `headrace.v1.BatchService`.
    pub service: PathBuf,
    /// Where it asks in tenants' names: the HTTP API, without keys.
    pub door: PathBuf,
    /// Of one file.
    pub max_file_bytes: u64,
}

/// What becomes of a special token's text in what clients put into a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpecialTokensInContent {
    /// It stays text.
    Text,
    /// It is that special token, as in the reference implementation.
    Control,
}

/// The `[tls]` table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct TlsConfig {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub authority: PathBuf,
    pub server_name: String,
    pub doors: bool,
    pub client_certificates: bool,
}

/// A model that clients can ask for.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct ModelFolder {
    pub name: String,
    pub folder: PathBuf,
    pub sampling: SamplingDraft,
}

/// A name that clients can ask for, and the models that serve it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct AliasConfig {
    pub name: String,
    pub variants: Vec<VariantConfig>,
    pub quality: Wish,
    pub floor: f64,
    pub fallback: Vec<String>,
    pub fallback_after_s: f64,
    pub degraded_text: String,
    pub escalate: Escalate,
    pub escalate_below: f64,
    pub escalate_tokens: u32,
    pub shadow_share: f64,
    pub shadows_at_once: usize,
    pub shadow_deadline_s: f64,
    pub agreement: Measure,
}

/// When a smaller variant's whole answer is not given, and the best one's is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Escalate {
    /// Never.
    Never,
    /// It says that it cannot help.
    Refusal,
}

/// One of the models behind a name.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct VariantConfig {
    pub model: String,
    pub quality: f64,
    pub threshold: f64,
    pub difficulty: PathBuf,
    pub gpu_hour_dollars: f64,
    pub canary_of: String,
    pub weight: f64,
}

/// Traces and logs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct Telemetry {
    pub otlp_endpoint: String,
    pub sample_ratio: f64,
    pub log_level: String,
    pub log_content: bool,
}
