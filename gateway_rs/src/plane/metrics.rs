//! What Prometheus sees of the router. Labels take values only from closed lists (configured models, doors, outcomes, codes),
//! so that no client can make series.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{text::encode, EncodeLabelSet},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

/// Buckets of the OpenTelemetry GenAI conventions, in seconds.
const TTFT_S: [f64; 16] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
];
const TPOT_S: [f64; 13] = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
const DURATION_S: [f64; 14] = [
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
];

/// Where a request came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, prometheus_client::encoding::EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Door {
    Http,
    Grpc,
    /// Nobody's: the router asks itself, to measure quality.
    Shadow,
}

/// `model` is a configured name or "other".
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct ModelLabel {
    pub model: String,
}

/// `outcome` is one of the closed list, or the code of a refusal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct RequestLabels {
    pub door: Door,
    pub model: String,
    pub outcome: &'static str,
}

/// `kind` is "prompt", "cached_prompt", "completion" or "wasted", or one of these after "shadow_".
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct TokenLabels {
    pub model: String,
    pub kind: &'static str,
}

/// `result` is "hit", "lead" or "away".
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct LookupLabels {
    pub result: &'static str,
}

/// `variant` is a configured model or empty, `why` from a closed list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct RouteLabels {
    pub model: String,
    pub variant: String,
    pub why: &'static str,
}

/// `reason` is from a closed list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct FallbackLabels {
    pub model: String,
    pub reason: &'static str,
}

/// Of one variant of a name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct VariantLabels {
    pub model: String,
    pub variant: String,
}

/// `status` is one of those of a batch that is not over.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct BatchLabels {
    pub status: &'static str,
}

/// `state` is "queued" or "running".
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct LineLabels {
    pub state: &'static str,
}

/// `result` is "completed" or "failed".
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct AnswerLabels {
    pub result: &'static str,
}

/// `ids` is "encoded" or "remembered".
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
#[allow(missing_docs)]
pub struct MessageLabels {
    pub model: String,
    pub ids: &'static str,
}

/// A number that is not whole.
pub type Real = Gauge<f64, AtomicU64>;

/// All series of the router.
#[allow(missing_docs)]
pub struct Metrics {
    registry: Registry,
    pub requests: Family<RequestLabels, Counter>,
    pub open_requests: Gauge,
    pub connections: Gauge,
    pub tokens: Family<TokenLabels, Counter>,
    pub usage_mismatches: Counter,
    pub lookups: Family<LookupLabels, Counter>,
    pub routed: Family<RouteLabels, Counter>,
    pub fallbacks: Family<FallbackLabels, Counter>,
    pub agreement: Family<VariantLabels, Real>,
    pub agreement_low: Family<VariantLabels, Real>,
    pub agreement_high: Family<VariantLabels, Real>,
    pub agreement_samples: Family<VariantLabels, Gauge>,
    pub threshold: Family<VariantLabels, Real>,
    pub attempts: Counter<u64, AtomicU64>,
    pub resumes: Counter,
    /// See where they are registered.
    pub handoffs: Counter,
    /// See where they are registered.
    pub handoffs_lost: Counter,
    pub batches: Family<BatchLabels, Gauge>,
    pub batch_lines: Family<LineLabels, Gauge>,
    pub batch_answers: Family<AnswerLabels, Counter<u64, AtomicU64>>,
    pub batch_oldest_s: Real,
    pub batch_due_s: Real,
    pub message_bytes: Family<MessageLabels, Counter<u64, AtomicU64>>,
    pub leases: Gauge,
    pub worker_links: Gauge,
    pub ttft_s: Family<ModelLabel, Histogram>,
    pub tpot_s: Family<ModelLabel, Histogram>,
    pub duration_s: Family<ModelLabel, Histogram>,
}

impl Default for Metrics {
    /// Every metric registered, nothing counted.
    fn default() -> Self {
        let mut registry = Registry::with_prefix("headrace_router");
        let metrics = Self {
            requests: Family::default(),
            open_requests: Gauge::default(),
            connections: Gauge::default(),
            tokens: Family::default(),
            usage_mismatches: Counter::default(),
            lookups: Family::default(),
            routed: Family::default(),
            fallbacks: Family::default(),
            agreement: Family::default(),
            agreement_low: Family::default(),
            agreement_high: Family::default(),
            agreement_samples: Family::default(),
            threshold: Family::default(),
            attempts: Counter::default(),
            resumes: Counter::default(),
            handoffs: Counter::default(),
            handoffs_lost: Counter::default(),
            batches: Family::default(),
            batch_lines: Family::default(),
            batch_answers: Family::default(),
            batch_oldest_s: Real::default(),
            batch_due_s: Real::default(),
            message_bytes: Family::default(),
            leases: Gauge::default(),
            worker_links: Gauge::default(),
            ttft_s: Family::new_with_constructor(|| Histogram::new(TTFT_S)),
            tpot_s: Family::new_with_constructor(|| Histogram::new(TPOT_S)),
            duration_s: Family::new_with_constructor(|| Histogram::new(DURATION_S)),
            registry: Registry::default(),
        };
        let Self {
            requests,
            open_requests,
            connections,
            tokens,
            usage_mismatches,
            lookups,
            routed,
            fallbacks,
            agreement,
            agreement_low,
            agreement_high,
            agreement_samples,
            threshold,
            attempts,
            resumes,
            handoffs,
            handoffs_lost,
            batches,
            batch_lines,
            batch_answers,
            batch_oldest_s,
            batch_due_s,
            message_bytes,
            leases,
            worker_links,
            ttft_s,
            tpot_s,
            duration_s,
            ..
        } = &metrics;
        registry.register("requests", "Requests ended, by outcome or refusal", requests.clone());
        registry.register("open_requests", "Requests in the router now", open_requests.clone());
        registry.register("connections", "Open HTTP connections", connections.clone());
        registry.register(
            "tokens",
            "Tokens of ended requests; wasted ones were produced but not delivered",
            tokens.clone(),
        );
        registry.register(
            "usage_mismatches",
            "Times a worker's count of tokens was not ours",
            usage_mismatches.clone(),
        );
        registry.register("lookups", "Response cache lookups", lookups.clone());
        registry.register(
            "routed",
            "Requests of names with several variants, by who answered and why it was meant to",
            routed.clone(),
        );
        registry.register(
            "fallbacks",
            "Requests that were answered by another than the one they were meant for",
            fallbacks.clone(),
        );
        for (name, help, family) in [
            (
                "agreement",
                "Mean agreement of a smaller variant's answers with the best one's",
                agreement,
            ),
            (
                "agreement_low",
                "Lower bound of the mean agreement, 95 %",
                agreement_low,
            ),
            (
                "agreement_high",
                "Upper bound of the mean agreement, 95 %",
                agreement_high,
            ),
            (
                "threshold",
                "Agreement to expect before a request goes to the variant",
                threshold,
            ),
        ] {
            registry.register(name, help, family.clone());
        }
        registry.register(
            "agreement_samples",
            "Answers that the mean agreement is of",
            agreement_samples.clone(),
        );
        registry.register(
            "attempts",
            "Requests handed to workers, retries included",
            attempts.clone(),
        );
        registry.register("resumes", "Answers that went on at another worker", resumes.clone());
        registry.register(
            "handoffs",
            "Prompts given to another worker than the one that answers",
            handoffs.clone(),
        );
        registry.register(
            "handoffs_lost",
            "Of these, those that it did not compute: the one that answers did",
            handoffs_lost.clone(),
        );
        registry.register(
            "batches",
            "Batches that are not over, all that are kept where this router keeps them",
            batches.clone(),
        );
        registry.register(
            "batch_lines",
            "Lines of these without an answer: queued ones by whoever has them, running ones in this router",
            batch_lines.clone(),
        );
        registry.register(
            "batch_answers",
            "Lines of batches that this router has written an answer to",
            batch_answers.clone(),
        );
        registry.register(
            "batch_oldest_seconds",
            "Since the oldest batch that is not over was created",
            batch_oldest_s.clone(),
        );
        registry.register(
            "batch_due_seconds",
            "Until the first window of these ends; 0 = there is none",
            batch_due_s.clone(),
        );
        registry.register(
            "message_bytes",
            "Bytes of long messages, by whether their ids were made or were known from an earlier prompt",
            message_bytes.clone(),
        );
        registry.register("leases", "Leases held now", leases.clone());
        registry.register("worker_links", "Open streams to workers", worker_links.clone());
        registry.register(
            "time_to_first_token_seconds",
            "From the request to its first token",
            ttft_s.clone(),
        );
        registry.register(
            "time_per_output_token_seconds",
            "Mean time between an answer's tokens",
            tpot_s.clone(),
        );
        registry.register(
            "request_duration_seconds",
            "From the request to its end",
            duration_s.clone(),
        );
        Self { registry, ..metrics }
    }
}

/// The series of one model, found once and not for each request.
#[allow(missing_docs)]
pub struct ModelMetrics {
    /// A configured name, or "other".
    pub model: String,
    pub prompt_tokens: Counter,
    pub cached_prompt_tokens: Counter,
    pub completion_tokens: Counter,
    pub wasted_tokens: Counter,
    pub ttft_s: Histogram,
    pub tpot_s: Histogram,
    pub duration_s: Histogram,
}

/// The series of one variant's quality.
#[allow(missing_docs)]
pub struct QualityMetrics {
    pub agreement: Real,
    pub low: Real,
    pub high: Real,
    pub samples: Gauge,
    pub threshold: Real,
}

impl Metrics {
    /// That model's series; zero when nothing was counted yet.
    pub fn of_model(&self, model: &str) -> ModelMetrics {
        let tokens = |kind| {
            let labels = TokenLabels {
                model: model.to_owned(),
                kind,
            };
            self.tokens.get_or_create_owned(&labels)
        };
        let label = ModelLabel {
            model: model.to_owned(),
        };
        ModelMetrics {
            prompt_tokens: tokens("prompt"),
            cached_prompt_tokens: tokens("cached_prompt"),
            completion_tokens: tokens("completion"),
            wasted_tokens: tokens("wasted"),
            ttft_s: self.ttft_s.get_or_create_owned(&label),
            tpot_s: self.tpot_s.get_or_create_owned(&label),
            duration_s: self.duration_s.get_or_create_owned(&label),
            model: model.to_owned(),
        }
    }

    /// What is shown of a variant's quality.
    pub fn quality_of(&self, labels: &VariantLabels) -> QualityMetrics {
        QualityMetrics {
            agreement: self.agreement.get_or_create_owned(labels),
            low: self.agreement_low.get_or_create_owned(labels),
            high: self.agreement_high.get_or_create_owned(labels),
            samples: self.agreement_samples.get_or_create_owned(labels),
            threshold: self.threshold.get_or_create_owned(labels),
        }
    }

    /// The series of what measures a name's quality: its tokens are told apart, its times are nobody's.
    pub fn of_shadows(&self, model: &str) -> ModelMetrics {
        let tokens = |kind| {
            let labels = TokenLabels {
                model: model.to_owned(),
                kind,
            };
            self.tokens.get_or_create_owned(&labels)
        };
        ModelMetrics {
            prompt_tokens: tokens("shadow_prompt"),
            cached_prompt_tokens: tokens("shadow_cached_prompt"),
            completion_tokens: tokens("shadow_completion"),
            wasted_tokens: tokens("shadow_wasted"),
            ..self.of_model("shadow")
        }
    }

    /// The text that Prometheus scrapes.
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
