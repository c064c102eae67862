//! Wire messages as the core's values, and its values as messages.

use std::sync::Arc;

use headrace_core::{
    place::Why,
    scheduler::{
        actions::Reason,
        events::{
            Ask, Books, Capabilities, Class, Description, Load, Outcome, Role, RunningLease, StepReport, WorkerHello,
            WorkerState,
        },
        pool::PoolView,
    },
};

use crate::proto;

// Messages to values.

pub fn class_of(class: i32) -> Class {
    match proto::RequestClass::try_from(class) {
        Ok(proto::RequestClass::Interactive) => Class::Interactive,
        Ok(proto::RequestClass::Batch) => Class::Batch,
        _ => Class::Standard,
    }
}

fn texts(from: Vec<String>) -> Vec<Arc<str>> {
    from.into_iter().map(Arc::from).collect()
}

fn seconds(ms: u32) -> f64 {
    f64::from(ms) / 1000.0
}

pub fn core_ask(now_s: f64, ask: proto::place_request::Ask) -> Ask {
    Ask {
        number: ask.ask,
        request_id: ask.request_id.into(),
        // What only measures quality is nobody's to pay.
        tenant: if ask.shadow { "".into() } else { ask.tenant.into() },
        class: class_of(ask.class),
        pools: texts(ask.pools),
        prompt_tokens: ask.prompt_tokens,
        block_hashes: ask.block_hashes,
        max_tokens: ask.max_tokens,
        choices: ask.n.max(1),
        expected_output_tokens: ask.expected_output_tokens,
        deadline_s: ask.time_left_ms.map(|left_ms| now_s + seconds(left_ms)),
        arrived_s: Some(now_s - seconds(ask.spent_ms)),
        ttft_target_s: ask.ttft_target_ms.map(seconds),
        tpot_target_s: ask.tpot_target_ms.map(seconds),
        avoid_instances: texts(ask.avoid_instances),
        session_id: ask.session_id.into(),
        epoch: ask.epoch,
        booking: ask.booking,
        alias: ask.alias.into(),
        committed_tokens: ask.committed_tokens,
        may_part: ask.may_part,
    }
}

pub fn running_lease(running: proto::router_hello::RunningLease) -> RunningLease {
    RunningLease {
        lease: running.lease,
        instance_id: running.instance_id.into(),
        request_id: running.request_id.into(),
        tenant: running.tenant.into(),
        prompt_tokens: running.prompt_tokens,
        max_tokens: running.max_tokens,
        booking: running.booking,
    }
}

pub fn books(release: &proto::Release) -> Books {
    let usage = release.usage.unwrap_or_default();
    Books {
        outcome: match release.outcome() {
            proto::Outcome::Stop | proto::Outcome::ToolCalls => Outcome::Stop,
            proto::Outcome::Length => Outcome::Length,
            _ => Outcome::Cut,
        },
        prompt_tokens: usage.prompt_tokens,
        cached_prompt_tokens: usage.cached_prompt_tokens,
        completion_tokens: usage.completion_tokens,
        kv_block_s: release.kv_block_s.into(),
        ttft_s: release.ttft_s.into(),
        decode_s: release.decode_s.into(),
    }
}

pub fn worker_hello(hello: proto::JoinHello) -> WorkerHello {
    let role = match hello.role() {
        proto::WorkerRole::Prefill => Role::Prefill,
        proto::WorkerRole::Decode => Role::Decode,
        proto::WorkerRole::Unspecified => Role::Both,
    };
    WorkerHello {
        role,
        kv_token_bytes: hello.kv_token_bytes,
        worker_id: hello.worker_id.into(),
        instance_id: hello.instance_id.into(),
        pool: hello.pool.into(),
        address: hello.address.into(),
        description: description(hello.description.unwrap_or_default()),
        startup_s: hello.startup_s.into(),
    }
}

fn description(from: proto::ModelDescription) -> Description {
    let capabilities = from.capabilities.unwrap_or_default();
    Description {
        model: from.model.into(),
        engine: from.engine.into(),
        engine_version: from.engine_version.into(),
        weights_sha256: from.weights_sha256.into(),
        quantization: from.quantization.into(),
        tokenizer_sha256: from.tokenizer_sha256.into(),
        template_sha256: from.template_sha256.into(),
        vocab_size: from.vocab_size,
        context_tokens: from.context_tokens,
        eos_ids: from.eos_ids,
        block_tokens: from.block_tokens,
        kv_blocks: from.kv_blocks,
        slots: from.slots,
        capabilities: Capabilities {
            guided: texts(capabilities.guided),
            lora: texts(capabilities.lora),
            logprobs: capabilities.logprobs,
            prompt_logprobs: capabilities.prompt_logprobs,
            kv_handoff: capabilities.kv_handoff,
            batch_invariant: capabilities.batch_invariant,
        },
        kv_state_tag: from.kv_state_tag.into(),
        cost_table: from.cost_table.into(),
    }
}

pub fn core_load(load: &proto::Load, steps: &[proto::StepReport]) -> Load {
    Load {
        state: match load.state() {
            proto::WorkerState::Ready => WorkerState::Ready,
            proto::WorkerState::Draining => WorkerState::Draining,
            proto::WorkerState::Unhealthy => WorkerState::Unhealthy,
            proto::WorkerState::Starting | proto::WorkerState::Unspecified => WorkerState::Starting,
        },
        waiting_requests: load.waiting_requests,
        running_requests: load.running_requests,
        waiting_prompt_tokens: load.waiting_prompt_tokens,
        running_prompt_tokens: load.running_prompt_tokens,
        context_tokens: load.context_tokens,
        kv_blocks_total: load.kv_blocks_total,
        kv_blocks_used: load.kv_blocks_used,
        kv_blocks_cached: load.kv_blocks_cached,
        slots: load.slots,
        iteration: load.iteration,
        steps: steps.iter().map(step_report).collect(),
        kv_received_bytes: load.kv_received_bytes_total,
        kv_receive_s: load.kv_receive_s_total,
    }
}

fn step_report(step: &proto::StepReport) -> StepReport {
    StepReport {
        prefill_tokens: step.prefill_tokens,
        prefill_pairs: step.prefill_pairs,
        decode_tokens: step.decode_tokens,
        context_tokens: step.context_tokens,
        duration_s: f64::from(step.duration_us) / 1e6,
    }
}

// Values to messages.

impl From<Why> for proto::PlacementReason {
    fn from(why: Why) -> Self {
        Self {
            hit_tokens: why.hit_tokens,
            prefill_ms: why.prefill_ms as f32,
            pending_prefill_ms: why.pending_prefill_ms as f32,
            decoding: why.decoding,
            waiting: why.waiting,
            gives_way: why.gives_way,
            score: why.score as f32,
        }
    }
}

pub fn code(reason: Reason) -> proto::ErrorCode {
    match reason {
        Reason::InvalidArgument => proto::ErrorCode::InvalidArgument,
        Reason::ContextLengthExceeded => proto::ErrorCode::ContextLengthExceeded,
        Reason::Unavailable => proto::ErrorCode::Unavailable,
        Reason::Overloaded => proto::ErrorCode::Overloaded,
        Reason::DeadlineExceeded => proto::ErrorCode::DeadlineExceeded,
        Reason::RateLimitExceeded => proto::ErrorCode::RateLimitExceeded,
        Reason::InsufficientQuota => proto::ErrorCode::InsufficientQuota,
    }
}

fn strings(from: &[Arc<str>]) -> Vec<String> {
    from.iter().map(ToString::to_string).collect()
}

pub fn pool_view(view: &PoolView) -> proto::fleet_view::Pool {
    let described = &view.description;
    let able = &described.capabilities;
    proto::fleet_view::Pool {
        name: view.name.to_string(),
        description: Some(proto::ModelDescription {
            model: described.model.to_string(),
            engine: described.engine.to_string(),
            engine_version: described.engine_version.to_string(),
            weights_sha256: described.weights_sha256.to_string(),
            quantization: described.quantization.to_string(),
            tokenizer_sha256: described.tokenizer_sha256.to_string(),
            template_sha256: described.template_sha256.to_string(),
            vocab_size: described.vocab_size,
            context_tokens: described.context_tokens,
            eos_ids: described.eos_ids.clone(),
            block_tokens: described.block_tokens,
            kv_blocks: described.kv_blocks,
            slots: described.slots,
            capabilities: Some(proto::Capabilities {
                guided: strings(&able.guided),
                logprobs: able.logprobs,
                prompt_logprobs: able.prompt_logprobs,
                lora: strings(&able.lora),
                kv_handoff: able.kv_handoff,
                batch_invariant: able.batch_invariant,
            }),
            kv_state_tag: described.kv_state_tag.to_string(),
            cost_table: described.cost_table.to_string(),
        }),
        ready_workers: view.ready_workers as u32,
        workers: view.workers as u32,
        addresses: strings(&view.addresses),
    }
}
