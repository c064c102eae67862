"""The configuration of all services: one TOML file, parsed once at start into frozen values.

Unknown keys are refused and so are values out of range, before a service opens a port. Each key carries its meaning
(``headrace config`` prints them); the reason for a default stands beside it. Addresses are ``host:port``; port 0 lets
the system choose. Values come in layers, each checked by the same rules: a command's own defaults, the file, and
``section.key=value`` overrides. What this module leaves to others: where a model's files come from (``models.py``) and
the command line (``cli.py``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace import _gateway, postgres
from headrace.errors import ConfigError

#: What an address is for: to listen on (port 0 = the system chooses), or to reach somebody at (a real port).
AddressKind = Literal["listen", "peer"]


def setting(
    default: Any,
    meaning: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    address: AddressKind | None = None,
    optional: bool = False,
) -> Any:
    """A configuration key: its default, its meaning for people, and what is allowed.

    ``minimum`` and ``maximum`` are inclusive; ``choices`` are the only texts allowed; an ``address`` is ``host:port``,
    and may be empty only when ``optional``.
    """
    metadata = {
        "meaning": meaning,
        "minimum": minimum,
        "maximum": maximum,
        "choices": tuple(choices),
        "address": address,
        "optional": optional,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """One model that clients can ask for: a pool of workers serves it."""

    name: str = setting("smollm2-135m", "name that clients ask for; also the name of its pool")
    source: str = setting(
        "embedded", "'embedded' (SmolLM2-135M-Instruct), a .gguf file, or a folder with tokenizer.json"
    )
    quantization: str = setting(
        "auto",
        "weights of a GGUF source; auto = the embedded model's fastest exact form for this CPU, others as-shipped "
        "(twice as fast for the embedded one, too, on a CPU with AMX)",
        choices=("auto", "as-shipped", "BF16", "F16", "Q8_0", "Q4_0", "Q4_K_M"),
    )
    chat_template: str = setting("", "file with a Jinja template to use instead of the model's own")
    sampling: str = setting(
        "model",
        "for requests that say nothing of sampling: model = as its makers recommend (generation_config.json, "
        "general.sampling of a GGUF; temperature 1 if they do not), neutral = temperature 1, or numbers as in "
        "'temperature=0.2, top_p=0.9'",
    )


@dataclass(frozen=True)
class VariantConfig:
    """One of the models behind an alias. The first listed is the best; what is measured is measured against it."""

    model: str = setting("", "its name under [[models]]; also the name of its pool")
    quality: float = setting(
        1.0, "agreement with the best variant's answers, until it is measured", minimum=0.0, maximum=1.0
    )
    threshold: float = setting(
        # The classifier is calibrated: of requests with this estimate, so many answers agree.
        0.8,
        "requests of which at least this agreement is expected may go here; it moves up by itself",
        minimum=0.0,
        maximum=1.0,
    )
    difficulty: str = setting("", "classifier, as `headrace route train` writes it; empty = the one that comes along")
    gpu_hour_dollars: float = setting(0.0, "price of an hour of one of its workers, for reports", minimum=0.0)
    canary_of: str = setting("", "the variant that this is a new version of; empty = one of its own")
    weight: float = setting(
        0.05, "a new version's share of the old one's requests, always the same sessions", minimum=0.0, maximum=1.0
    )


@dataclass(frozen=True)
class AliasConfig:
    """A name that clients ask for and that several models serve."""

    name: str = setting("", "name that clients ask for")
    variants: tuple[VariantConfig, ...] = setting((), "models that serve it, best first")
    quality: str = setting(
        "routed",
        "what requests get that say nothing: by difficulty, the best variant, or the smallest that is good enough",
        choices=("routed", "full", "tolerant"),
    )
    floor: float = setting(
        # Below it, fewer requests go to the smaller variant.
        0.8,
        "least mean agreement of a smaller variant's answers with the best one's, as measured",
        minimum=0.0,
        maximum=1.0,
    )
    fallback: tuple[str, ...] = setting(
        (), "what may serve when the chosen and better ones can't: models of worse quality, 'cached', 'degraded'"
    )
    fallback_after_s: float = setting(
        2.0, "a worker is waited for so long before the next may serve; 0 = as long as it takes", minimum=0.0
    )
    degraded_text: str = setting(
        "The service is overloaded. Please try again later.", "the answer that 'degraded' stands for"
    )
    escalate: str = setting(
        "never",
        "when a smaller variant's whole answer (not a stream) is replaced by the best one's",
        choices=("never", "refusal"),
    )
    escalate_below: float = setting(
        0.0,
        "where a smaller variant is less sure of its first tokens (the geometric mean of their probabilities), the "
        "best one answers; 0 = not looked at",
        minimum=0.0,
        maximum=1.0,
    )
    escalate_tokens: int = setting(
        # Held back until then, so they cost a stream's first token as much time.
        16,
        "so many first tokens say how sure it is; they are held back as long, in streams too",
        minimum=1,
        maximum=256,
    )
    shadow_share: float = setting(
        0.02, "share of a smaller variant's answers that the best one answers too, to compare", minimum=0.0, maximum=1.0
    )
    shadows_at_once: int = setting(1, "of these, so many at once; others are left out", minimum=0, maximum=64)
    shadow_deadline_s: float = setting(30.0, "one that is not answered by then is given up", minimum=0.1)
    agreement: str = setting(
        "words",
        "how two answers are compared: F1 of their words, or equal words in equal order",
        choices=("words", "exact"),
    )


@dataclass(frozen=True)
class RouterConfig:
    """The router: clients, text, tokenizers, templates."""

    http_address: str = setting("127.0.0.1:8080", "OpenAI HTTP API, /health and /metrics", address="listen")
    grpc_address: str = setting("127.0.0.1:8081", "native gRPC API", address="listen")
    scheduler: str = setting("127.0.0.1:8082", "the scheduler's address", address="peer")
    cache: str = setting("127.0.0.1:8083", "the cache's address; empty = no cache", address="peer", optional=True)
    threads: int = setting(0, "threads of the data plane; 0 = one for each CPU", minimum=0, maximum=256)
    max_body_bytes: int = setting(
        # A 5 MB prompt must pass; a megabyte of text is some 250k tokens, more than any context served today.
        16 * 2**20,
        "largest request body, on HTTP and gRPC",
        minimum=1024,
        maximum=2**30,
    )
    max_open_requests: int = setting(16384, "requests in the router at once; more are refused with 429", minimum=1)
    max_unread_tokens: int = setting(
        # Some 10 s of a fast answer: a reader that far behind is not coming back soon.
        4096,
        "tokens a client may leave unread before its generation is stopped",
        minimum=1,
    )
    max_choices: int = setting(16, "largest n", minimum=1, maximum=128)
    max_deadline_s: float = setting(3600.0, "longest deadline or latency target a client may ask for", minimum=0.001)
    max_index_bytes: int = setting(64 * 2**20, "memory for who holds which KV blocks, by the cache's news", minimum=0)
    tokenizer_cache_mib: int = setting(
        16,
        "MiB of memory for each model's encoded messages: of a conversation's next turn only the new ones are encoded; "
        "0 = none",
        minimum=0,
        maximum=1 << 16,
    )
    place_attempts: int = setting(
        3, "workers to try for a request of which nothing was shown yet", minimum=1, maximum=16
    )
    resume_attempts: int = setting(
        1, "times to go on elsewhere when a worker is lost in mid-answer", minimum=0, maximum=8
    )
    stall_timeout_s: float = setting(
        30.0, "a worker that sends nothing at all for so long while it owes tokens is given up", minimum=0.05
    )
    header_timeout_s: float = setting(
        15.0, "time for a client to send its request's headers, and again its body", minimum=0.1
    )
    drain_grace_s: float = setting(30.0, "time for open streams to finish after SIGTERM", minimum=0.0)
    settle_s: float = setting(
        0.0, "time to keep serving after readiness went off, for load balancers to notice", minimum=0.0
    )
    special_tokens_in_content: str = setting(
        "text",
        "what '<|im_start|>' (any special token's text) is within a chat's messages, names, tool calls and tools:"
        " text, or that control token",
        choices=("text", "control"),
    )
    shadow_log: str = setting(
        "",
        "file to which each comparison of a smaller variant is written, for `headrace route train`: numbers only,"
        " unless telemetry.log_content is on; empty = none",
    )


@dataclass(frozen=True)
class SchedulerConfig:
    """The scheduler: who runs it, and when."""

    address: str = setting("127.0.0.1:8082", "gRPC address", address="listen")
    metrics_address: str = setting(
        "127.0.0.1:9082", "Prometheus /metrics and /health; empty = none", address="listen", optional=True
    )
    cache: str = setting(
        "127.0.0.1:8083",
        "the cache's address, for who holds which KV blocks; empty = none",
        address="peer",
        optional=True,
    )
    max_index_bytes: int = setting(256 * 2**20, "memory for who holds which KV blocks, by the cache's news", minimum=0)
    max_queued: int = setting(4096, "requests waiting at once; more are rejected with a retry hint", minimum=0)
    heartbeat_s: float = setting(
        0.25,
        "how often a worker reports, at most",
        minimum=0.01,
        maximum=60.0,
    )
    reports_per_s: float = setting(
        # One costs the scheduler 0.1 to 0.3 ms, nearly all of it gRPC's. Placement hardly needs them: it follows leases
        # and routers' progress.
        500.0,
        "reports of all workers in a second, about; in a larger fleet each reports less often",
        minimum=1.0,
    )
    heartbeats_missed: int = setting(
        # A Python worker under a starved CPU can be late by a second; the broken stream is noticed at once anyway.
        12,
        "reports missed in a row before a silent worker is out",
        minimum=2,
    )
    router_grace_s: float = setting(5.0, "time for a router to come back before its leases end", minimum=0.0)
    queue_factor: float = setting(
        # One request waiting in the engine hides the round trip; more only take the choice away from the scheduler.
        1.25,
        "leases for a worker, as a multiple of its slots",
        minimum=1.0,
        maximum=16.0,
    )
    credits: bool = setting(
        True,
        "lend routers room on workers while nothing waits, so that they place without asking; by marginal_delay only",
    )
    placement: str = setting(
        "marginal_delay", "rule by which a worker is chosen", choices=_gateway.placement_policies()
    )
    interactive_ttft_s: float = setting(
        # Targets order the queue and size prompts' chunks; nothing is refused for missing its class's.
        1.0,
        "target of interactive requests for the first token",
        minimum=0.001,
    )
    standard_ttft_s: float = setting(5.0, "target of standard requests for the first token", minimum=0.001)
    batch_ttft_s: float = setting(60.0, "target of batch requests for the first token", minimum=0.001)
    interactive_tpot_s: float = setting(0.1, "target of interactive requests between tokens", minimum=0.001)
    standard_tpot_s: float = setting(0.2, "target of standard requests between tokens", minimum=0.001)
    batch_tpot_s: float = setting(1.0, "target of batch requests between tokens", minimum=0.001)
    dispatch_ahead_s: float = setting(
        # Enough to hide the round trip and a step; what waits here can still be put in order, and moved.
        0.1,
        "a worker gets the next prompt when the ones it has need no longer than this, or than filling a step takes",
        minimum=0.0,
    )
    shed: bool = setting(
        True, "refuse what cannot meet its own deadline or target any more, once predictions can be trusted"
    )
    preempt: bool = setting(True, "put batch requests aside for interactive ones that find no room")
    min_chunk_tokens: int = setting(256, "fewest prompt tokens beside decoding that a worker is told", minimum=1)
    max_chunk_tokens: int = setting(
        8192, "most prompt tokens beside decoding that a worker is told; 0 = workers keep their own", minimum=0
    )
    prefill_share: float = setting(
        0.0, "prefill that a pool is given, as a share of its workers' time; 0 = no limit", minimum=0.0, maximum=1.0
    )
    disaggregation: str = setting(
        "auto",
        "compute prompts on prefill workers and answer on others: auto = where that delays least, always, off",
        choices=("auto", "always", "off"),
    )
    disaggregation_min_tokens: int = setting(
        # Below it a hand-off's own messages and waits outweigh what it saves.
        1024,
        "prompt tokens to be computed from which that is weighed",
        minimum=1,
    )
    fair_quantum_tokens: int = setting(
        # A few requests: less follows the shares more closely, more follows deadlines more closely.
        16384,
        "tokens that a tenant may be ahead of others that wait",
        minimum=1,
    )
    tenant_weights: str = setting("", "shares of tenants, like 'gold=3,trial=0.5'; 1 for all others")
    drain_grace_s: float = setting(10.0, "time for streams to finish after SIGTERM", minimum=0.0)


@dataclass(frozen=True)
class CacheConfig:
    """The cache: answers that may be given again, and who holds which KV blocks."""

    address: str = setting("127.0.0.1:8083", "gRPC address", address="listen")
    metrics_address: str = setting(
        "127.0.0.1:9083", "Prometheus /metrics and /health; empty = none", address="listen", optional=True
    )
    max_answer_bytes: int = setting(256 * 2**20, "memory for finished answers", minimum=0)
    ttl_s: float = setting(3600.0, "how long a finished answer may be given again", minimum=0.0)
    max_index_bytes: int = setting(
        # About 35 bytes a block, however many workers hold it: seven million blocks.
        256 * 2**20,
        "memory for the prefix index: who holds which KV blocks",
        minimum=0,
    )
    max_root_share: float = setting(
        0.5,
        "share of the prefix index for prompts that begin alike, while others want room",
        minimum=0.0,
        maximum=1.0,
    )
    max_waiters: int = setting(
        4096, "requests that wait for one that is being generated; more generate their own", minimum=0
    )
    drain_grace_s: float = setting(5.0, "time for streams to finish after SIGTERM", minimum=0.0)


@dataclass(frozen=True)
class WorkerConfig:
    """A worker: one engine, its batch and its KV."""

    address: str = setting("127.0.0.1:0", "gRPC address", address="listen")
    advertise: str = setting(
        "", "address that routers use to reach it; empty = the one it listens on", address="peer", optional=True
    )
    metrics_address: str = setting(
        "127.0.0.1:0", "Prometheus /metrics and /health; empty = none", address="listen", optional=True
    )
    worker_id: str = setting("", "name in logs and metrics; empty = host and process")
    scheduler: str = setting(
        "127.0.0.1:8082",
        "the scheduler's address; empty = none (routers are told by hand)",
        address="peer",
        optional=True,
    )
    cache: str = setting(
        "127.0.0.1:8083", "the cache's address, for block events; empty = none", address="peer", optional=True
    )
    model: str = setting("smollm2-135m", "the model to serve, by its name under [[models]]")
    engine: str = setting(
        "llama_cpp",
        "what generates: a real engine, or timed ids",
        choices=("llama_cpp", "tensorrt_llm", "trtllm_grpc", "openengine", "sim"),
    )
    slots: int = setting(16, "choices generated at once", minimum=1, maximum=4096)
    context_tokens: int = setting(0, "prompt and answer of one request; 0 = what the model was made for", minimum=0)
    kv_tokens: int = setting(
        16384,
        # Not tensorrt_llm, which sizes its KV by itself.
        "tokens of KV in all: the engine's hard memory bound, or what one behind gRPC is said to have",
        minimum=16,
    )
    block_tokens: int = setting(16, "tokens of one KV block", minimum=1, maximum=512)
    chunk_tokens: int = setting(
        # Some 100 to 200 ms of prefill on one core: the longest a running stream waits for a neighbour's prompt.
        256,
        "prompt tokens computed in one step beside running streams",
        minimum=1,
        maximum=65536,
    )
    max_waiting: int = setting(256, "requests waiting in the engine; more are refused (retryable)", minimum=0)
    threads: int = setting(
        1, "threads of one llama.cpp step; two spin against any busy neighbour", minimum=1, maximum=256
    )
    weights_memory: str = setting(
        # A quarter of the available memory, see `_COPIED_PART`.
        "auto",
        "llama_cpp engine: own = a copy on huge pages, as the system has them, for faster decoding; shared = the "
        "file's pages, which all workers of a machine share; auto = own where there is plenty of memory",
        choices=("auto", "own", "shared"),
    )
    prefix_cache: bool = setting(True, "reuse the KV of prompts with the same beginning")
    prefix_cache_mib: int = setting(
        # Beside the KV and not in it: llama.cpp's attention looks at every cell up to the last one in use, whoever's it
        # is, so that what is kept there makes each step of everybody slower.
        1024,
        "llama_cpp engine: MiB of memory for the KV of prompts that no request uses now; taken as it fills",
        minimum=0,
        maximum=1 << 20,
    )
    prefix_cache_disk_mib: int = setting(
        0,
        "llama_cpp engine: MiB of disk for what that memory has no room for; taken at the start, used while loading "
        "from it takes less time than computing, and gone with the worker",
        minimum=0,
        maximum=1 << 24,
    )
    prefix_cache_dir: str = setting("", "where on disk; empty = beside the model's weights")
    role: str = setting(
        # What it is for, not what it can: see `scheduler.disaggregation`.
        "both",
        "what it is for: prefill = computes prompts for others, decode = answers, both",
        choices=("both", "prefill", "decode"),
    )
    handoff_mib: int = setting(
        512, "MiB of memory for KV that is computed here and fetched by other workers", minimum=0, maximum=1 << 20
    )
    handoff_keep_s: float = setting(30.0, "how long such KV is kept for whoever is to fetch it", minimum=0.1)
    handoff_timeout_s: float = setting(
        10.0,
        "time for the rest of a prompt's KV to come, once it is computed; then the rest is computed here",
        minimum=0.1,
    )
    engine_address: str = setting(
        "",
        "trtllm_grpc and openengine engines: where it serves (trtllm-serve --grpc)",
        address="peer",
        optional=True,
    )
    engine_start_timeout_s: float = setting(3600.0, "the same engines: time to become ready", minimum=0.1)
    trtllm_service: bool = setting(
        False, "serve trtllm.TrtllmService too, the protocol of trtllm-serve --grpc, for gateways that speak it"
    )
    openengine_service: bool = setting(False, "serve OpenEngine v1 too, for gateways that speak it")
    draft_tokens: int = setting(
        # Off: answers that repeat their prompt gain, the others pay a little for trying.
        0,
        "llama_cpp engine: ids guessed ahead in one step, from the prompt and by draft_model, as far as that pays; "
        "0 = none",
        minimum=0,
        maximum=32,
    )
    draft_model: str = setting(
        "",
        "llama_cpp engine: a smaller model of the same vocabulary that guesses ahead (needs draft_tokens): a source as "
        "under [[models]]; empty = none",
    )
    draft_quantization: str = setting(
        "auto",
        "weights of draft_model",
        choices=("auto", "as-shipped", "BF16", "F16", "Q8_0", "Q4_0", "Q4_K_M"),
    )
    draft_kv_tokens: int = setting(
        4096, "tokens of KV that draft_model keeps in all; more sequences are not guessed for", minimum=64
    )
    stall_timeout_s: float = setting(60.0, "a step that takes longer makes the worker unhealthy", minimum=0.1)
    drain_grace_s: float = setting(30.0, "time for running requests to finish after SIGTERM", minimum=0.0)
    sim_prefill_tokens_per_s: float = setting(8000.0, "sim engine: prompt tokens per second", minimum=0.001)
    sim_step_ms: float = setting(10.0, "sim engine: a decoding step of one sequence", minimum=0.0)
    sim_step_ms_per_sequence: float = setting(
        0.1, "sim engine: added for each further sequence in the step", minimum=0.0
    )
    sim_cost_table: str = setting(
        "",
        "sim engine: wait what this cost table says, as the simulator does, in place of the three above; "
        "`headrace sim --gpu list` shows them; empty = none",
        optional=True,
    )
    sim_slowdown: float = setting(
        1.0, "sim engine: all its times are multiplied by this, as the simulator's by `slowdown`", minimum=0.001
    )
    sim_output_tokens: int = setting(0, "sim engine: ids before it ends an answer by itself; 0 = never", minimum=0)


@dataclass(frozen=True)
class TensorRtLlmConfig:
    """The tensorrt_llm engine, in TensorRT-LLM's own words. Slots, context and blocks are the worker's settings."""

    model: str = setting("", "checkpoint: a folder or a Hugging Face id; empty = the source under [[models]]")
    extra_llm_api_options: str = setting(
        "", "YAML or JSON file with any further arguments of LLM, over all of these; empty = none"
    )
    backend: str = setting("pytorch", "executor", choices=("pytorch", "_autodeploy"))
    tensor_parallel_size: int = setting(1, "GPUs that share each layer", minimum=1)
    pipeline_parallel_size: int = setting(1, "stages of layers, each on its own GPUs", minimum=1)
    context_parallel_size: int = setting(1, "GPUs that share a context", minimum=1)
    moe_tensor_parallel_size: int = setting(0, "GPUs that share each expert; 0 = TensorRT-LLM's choice", minimum=0)
    moe_expert_parallel_size: int = setting(0, "GPUs that divide the experts; 0 = TensorRT-LLM's choice", minimum=0)
    gpus_per_node: int = setting(0, "GPUs of each node; 0 = those that are visible", minimum=0)
    moe_backend: str = setting(
        "",
        "kernels of experts; empty = TensorRT-LLM's choice",
        choices=("", "AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"),
    )
    enable_attention_dp: bool = setting(False, "each tensor-parallel rank schedules requests of its own")
    attention_dp_balance: bool = setting(False, "with it: ranks wait a little so that their batches are even")
    orchestrator_type: str = setting("", "who starts the ranks; empty = MPI", choices=("", "rpc", "ray"))
    dtype: str = setting("auto", "of weights that are not quantised")
    load_format: str = setting("auto", "weights, or random ones for measurements", choices=("auto", "dummy"))
    trust_remote_code: bool = setting(False, "run code that comes with the checkpoint")
    max_num_tokens: int = setting(8192, "tokens of one step, prompts and answers together", minimum=16)
    enable_chunked_prefill: bool = setting(
        # Without it a prompt longer than a step is refused.
        True,
        "compute long prompts in several steps",
    )
    kv_cache_free_gpu_memory_fraction: float = setting(
        0.9, "KV's share of the memory that is free beside the weights", minimum=0.01, maximum=1.0
    )
    kv_cache_max_tokens: int = setting(0, "tokens of KV at most; 0 = as many as fit", minimum=0)
    kv_cache_dtype: str = setting("auto", "of KV", choices=("auto", "float16", "bfloat16", "float32", "fp8", "nvfp4"))
    kv_cache_host_cache_size: int = setting(0, "bytes of main memory for KV that nobody uses now", minimum=0)
    kv_cache_event_buffer_max_size: int = setting(
        # Read 20 times a second: a burst of prompts of a million tokens fits.
        65536,
        "block events that may wait to be read; more are lost, and what is held is learned anew",
        minimum=1024,
    )
    interactive_retention_priority: int = setting(
        50, "how long interactive requests' KV is kept, against 35 of standard ones", minimum=0, maximum=100
    )
    batch_retention_priority: int = setting(20, "the same of batch requests", minimum=0, maximum=100)
    capacity_scheduler_policy: str = setting(
        "GUARANTEED_NO_EVICT",
        "whether a request starts when all it may ever need is free, or at once, to be paused when it is not",
        choices=("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"),
    )
    context_chunking_policy: str = setting(
        "",
        "which prompts get a step's room; empty = TensorRT-LLM's choice",
        choices=("", "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"),
    )
    disable_overlap_scheduler: bool = setting(False, "do not prepare a step while the one before is computed")
    cuda_graph_max_batch_size: int = setting(0, "largest batch that is captured; 0 = TensorRT-LLM's choice", minimum=0)
    cuda_graph_enable_padding: bool = setting(
        # Batches between the captured sizes would run without a graph.
        True,
        "round batches up to a captured size",
    )
    attn_backend: str = setting("TRTLLM", "attention kernels", choices=("TRTLLM", "FLASHINFER", "VANILLA"))
    allreduce_strategy: str = setting("AUTO", "how ranks add up")
    sampler_type: str = setting(
        "auto",
        "sampler; with TensorRT-LLM 1.2 only TRTLLMSampler does penalties",
        choices=("auto", "TorchSampler", "TRTLLMSampler"),
    )
    guided_decoding_backend: str = setting(
        "xgrammar", "compiler of schemas and grammars; empty = none", choices=("", "xgrammar", "llguidance")
    )
    stream_interval: int = setting(1, "steps between two deliveries of an answer's tokens", minimum=1)
    speculative_decoding_type: str = setting(
        "",
        "how tokens are guessed ahead; empty = not at all",
        choices=("", "NGram", "Eagle", "Eagle3", "MTP", "Draft_Target", "PARD", "AUTO"),
    )
    max_draft_len: int = setting(4, "tokens guessed ahead at most", minimum=1)
    speculative_model: str = setting("", "the model that guesses, where there is one")
    cache_transceiver_backend: str = setting(
        "",
        "how KV goes from a worker that computes prompts to one that decodes; empty = not at all",
        choices=("", "DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"),
    )
    kv_transfer_timeout_ms: int = setting(
        # TensorRT-LLM 1.2 would wait for ever for what never comes.
        60_000,
        "time for KV to be fetched, and to come",
        minimum=1,
    )
    lora_adapters: str = setting("", "adapters, like 'legal=/models/legal,sql=/models/sql'")
    max_lora_rank: int = setting(64, "largest rank of an adapter", minimum=1)
    max_loras: int = setting(0, "adapters on the GPU at once; 0 = TensorRT-LLM's choice", minimum=0)
    start_timeout_s: float = setting(
        # Half a terabyte of weights from a network disk, then kernels to tune and graphs to capture.
        3600.0,
        "time for the engine to load and to warm up",
        minimum=0.1,
    )
    shutdown_timeout_s: float = setting(15.0, "time for the engine to shut down before it is killed", minimum=0.1)
    canary_s: float = setting(
        # A dead engine is found before a request is.
        20.0,
        "a quiet engine is asked for one token so often; 0 = never",
        minimum=0.0,
    )


@dataclass(frozen=True)
class TelemetryConfig:
    """Traces and logs."""

    otlp_endpoint: str = setting("", "OTLP/gRPC endpoint for traces, like http://127.0.0.1:4317; empty = no traces")
    sample_ratio: float = setting(
        1.0, "share of requests traced when the caller does not say", minimum=0.0, maximum=1.0
    )
    log_level: str = setting("info", "least serious level to log", choices=("debug", "info", "warning", "error"))
    log_content: bool = setting(False, "put prompts and answers on spans; off because they are the clients' own")


@dataclass(frozen=True)
class TenantsConfig:
    """Who may ask."""

    file: str = setting(
        "", "tenants and their keys, as `headrace tenants` writes them; routers follow it; empty = everybody may ask"
    )


@dataclass(frozen=True)
class BatchesConfig:
    """Files and batches: work that waits behind everything else."""

    data_dir: str = setting(
        # `headrace up` has one of its own. A router that nobody told where to keep clients' files keeps none.
        "",
        "folder of this router's own for files, batches and their answers; empty = it keeps none",
    )
    database: str = setting(
        "",
        "postgresql://... (needs headrace[postgres]) by which several routers share files and batches, bytes too;"
        " data_dir then has copies only; empty = a SQLite file in data_dir",
    )
    max_file_bytes: int = setting(200 * 2**20, "largest file", minimum=1)
    max_lines: int = setting(50_000, "requests in one file", minimum=1, maximum=1_000_000)
    max_line_bytes: int = setting(2**20, "longest line of a file", minimum=64, maximum=2**30)
    max_files: int = setting(
        1000, "files that one tenant may keep, those of answers too; then it must delete some", minimum=1
    )
    max_open_batches: int = setting(64, "batches of one tenant that are not finished", minimum=1)
    keep_files_s: float = setting(
        30 * 86_400.0, "how long files are kept when nothing else is asked for; 0 = until they are deleted", minimum=0.0
    )
    max_lines_at_once: int = setting(
        # A bound, not an aim: how many run follows from what brings more tokens a second.
        256,
        "lines under way at once, of all batches",
        minimum=1,
        maximum=16_384,
    )
    max_batches_at_once: int = setting(4, "batches run side by side; others wait, tenants take turns", minimum=1)
    lease_s: float = setting(
        5.0, "a runner that says nothing for so long has lost its batches to others", minimum=0.5, maximum=600.0
    )


@dataclass(frozen=True)
class LedgerConfig:
    """The ledger: one row for each request, kept by the scheduler, and what tenants have spent."""

    database: str = setting(
        "auto",
        "where: auto = a SQLite file in $XDG_STATE_HOME/headrace (else ~/.local/state/headrace), a file, or"
        " postgresql://... (needs headrace[postgres]); empty = none: limits count from each start",
    )
    name: str = setting("", "this scheduler's name there, the same over restarts; empty = scheduler.address")
    shared: str = setting(
        "",
        "redis://host:port/number of a Redis or Valkey server (needs headrace[redis]) by which several schedulers share"
        " tenants' limits; empty = this one has them to itself",
    )
    retention_days: float = setting(
        # A month's dollars are counted from rows.
        400.0,
        "rows are deleted when they are older",
        minimum=32.0,
    )


@dataclass(frozen=True)
class PricesConfig:
    """What capacity costs. A token's price follows from the steps that workers are measured to take."""

    worker_hour: float = setting(0.0, "dollars for an hour of one worker, with all its GPUs", minimum=0.0)
    pools: str = setting("", "the same for pools by name, like 'small=0.8,large=7.2'; worker_hour for all others")


@dataclass(frozen=True)
class TlsConfig:
    """TLS. With the three files, every link is mutual TLS and the router's doors speak TLS; without: plain text."""

    certificate: str = setting(
        "", "PEM file: this service's certificate, then those up to its authority; empty = no TLS"
    )
    key: str = setting("", "PEM file: its private key, not encrypted")
    authority: str = setting("", "PEM file: the authorities whose certificates are trusted, in peers and in clients")
    server_name: str = setting("", "name that peers' certificates must carry; empty = the host of their address")
    doors: bool = setting(True, "TLS at the router's HTTP and gRPC doors too, with the same certificate")
    client_certificates: bool = setting(False, "clients must show a certificate of the authority at the doors")

    @property
    def on(self) -> bool:
        """Whether there is TLS at all."""
        return bool(self.certificate)


@dataclass(frozen=True)
class Config:
    """All services' configuration."""

    models: tuple[ModelConfig, ...] = field(default_factory=lambda: (ModelConfig(),))
    aliases: tuple[AliasConfig, ...] = ()
    router: RouterConfig = field(default_factory=RouterConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    tensorrt_llm: TensorRtLlmConfig = field(default_factory=TensorRtLlmConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    tls: TlsConfig = field(default_factory=TlsConfig)
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    prices: PricesConfig = field(default_factory=PricesConfig)
    batches: BatchesConfig = field(default_factory=BatchesConfig)

    def served(self) -> tuple[str, ...]:
        """The models that a mesh on one box serves: the worker's own, and those behind aliases, each once."""
        behind = [variant.model for alias in self.aliases for variant in alias.variants]
        return tuple(dict.fromkeys([self.worker.model, *behind]))

    def model(self, name: str) -> ModelConfig:
        """The model of that name. Raises ConfigError when there is none."""
        for model in self.models:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in self.models) or "none"
        raise ConfigError(f"worker.model: no model named {name!r} under [[models]] (there are: {known})")


def load(path: Path | None, overrides: Sequence[str] = (), base: Mapping[str, str] | None = None) -> Config:
    """The effective configuration. Raises ConfigError, naming the key.

    ``path`` is a TOML file (None = no file). ``overrides`` are ``section.key=value`` and win over the file; ``base``
    gives ``section.key: value`` that the file wins over, for a command with defaults of its own.
    """
    if path is None:
        return parse("", "configuration", overrides, base)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read configuration {path}: {reason}") from error
    return parse(text, str(path), overrides, base)


def parse(
    text: str, name: str = "configuration", overrides: Sequence[str] = (), base: Mapping[str, str] | None = None
) -> Config:
    """The configuration in a TOML text, with layers as in :func:`load`. Raises ConfigError, naming the key."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: {error}") from error
    for where, value in (base or {}).items():
        _put(table, where, value, over=False)
    for override in overrides:
        where, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override}: expected section.key=value")
        _put(table, where.strip(), value, over=True)
    config: Config = _read(Config, table, "")
    if "model" not in table.get("worker", {}) and config.models:
        # A file that names its models need not say twice which one to serve.
        config = dataclasses.replace(config, worker=dataclasses.replace(config.worker, model=config.models[0].name))
    _check(config)
    return config


def _put(table: dict[str, Any], where: str, text: str, *, over: bool) -> None:
    """Set a key from a text, typed as the key is."""
    section, dot, key = where.partition(".")
    kind = typing.get_type_hints(Config).get(section)
    if not dot or not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        sections = ", ".join(item.name for item in dataclasses.fields(Config) if item.name not in _LISTS)
        hint = f" ({section} are listed in the file only)" if section in _LISTS else ""
        raise ConfigError(f"{where}: expected section.key with a section of {sections}{hint}")
    hints = typing.get_type_hints(kind)
    if key not in hints:
        raise ConfigError(f"{where}: unknown key (known: {', '.join(sorted(hints))})")
    values = table.setdefault(section, {})
    if isinstance(values, dict) and (over or key not in values):
        values[key] = _typed(hints[key], text, where)


def _typed(hint: type, text: str, where: str) -> Any:
    if hint is bool:
        if text not in ("true", "false"):
            raise ConfigError(f"{where}: expected true or false, got {text!r}")
        return text == "true"
    try:
        # Python reads more than TOML writes ("1_0" both, " 1 " and "١" only Python); the bounds check the rest.
        return hint(text)
    except ValueError as error:
        raise ConfigError(f"{where}: expected {_NAMES[hint]}, got {text!r}") from error


#: Sections that are lists of tables.
_LISTS = ("models", "aliases")

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _check(config: Config) -> None:
    """What single keys cannot say."""
    if not config.models:
        raise ConfigError("models: at least one model is needed")
    names = [model.name for model in config.models]
    if len(set(names)) != len(names):
        raise ConfigError(f"models: names must differ, got {', '.join(names)}")
    for index, model in enumerate(config.models):
        if not model.name or model.name.split() != [model.name]:
            raise ConfigError(f"models[{index}].name: expected a name without spaces, got {model.name!r}")
        if not model.source:
            raise ConfigError(f"models[{index}].source: must not be empty")
    config.model(config.worker.model)
    for index, alias in enumerate(config.aliases):
        _check_alias(config, alias, f"aliases[{index}]", names)
        names.append(alias.name)
    tenant_weights(config.scheduler.tenant_weights)
    pool_prices(config.prices.pools)
    if config.ledger.shared and not config.ledger.database:
        raise ConfigError("ledger.shared: needs ledger.database: what this scheduler has spent is counted from rows")
    if config.batches.database and not config.batches.database.startswith(postgres.SCHEMES):
        raise ConfigError("batches.database: expected postgresql://...")
    if config.batches.database and not config.batches.data_dir:
        raise ConfigError("batches.database: needs batches.data_dir, for what is on its way")
    worker = config.worker
    # Other engines size their KV by themselves.
    accounted = worker.engine in ("llama_cpp", "sim")
    if accounted and worker.block_tokens > worker.kv_tokens:
        raise ConfigError(
            f"worker.block_tokens: must be at most worker.kv_tokens ({worker.kv_tokens}), got {worker.block_tokens}"
        )
    if accounted and worker.context_tokens > worker.kv_tokens:
        # Such a request could wait for ever: it never fits.
        raise ConfigError(
            f"worker.context_tokens: must be at most worker.kv_tokens ({worker.kv_tokens}), got {worker.context_tokens}"
        )
    if worker.draft_model and not worker.draft_tokens:
        raise ConfigError("worker.draft_model: needs worker.draft_tokens above 0")
    if worker.engine in ("trtllm_grpc", "openengine") and not worker.engine_address:
        raise ConfigError(f"worker.engine_address: the {worker.engine} engine needs it")
    for section in ("router", "scheduler", "cache", "worker"):
        _check_listeners(section, getattr(config, section))
    endpoint = config.telemetry.otlp_endpoint
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"telemetry.otlp_endpoint: expected http://host:port or https://host:port, got {endpoint!r}")
    _check_tls(config.tls)


#: Variants of one alias: so many pools a request may name.
_MOST_VARIANTS = 16


def _check_alias(config: Config, alias: AliasConfig, where: str, taken: Sequence[str]) -> None:
    if not alias.name or alias.name.split() != [alias.name]:
        raise ConfigError(f"{where}.name: expected a name without spaces, got {alias.name!r}")
    if alias.name in taken:
        raise ConfigError(f"{where}.name: {alias.name!r} is a model or alias already")
    if not 1 <= len(alias.variants) <= _MOST_VARIANTS:
        raise ConfigError(f"{where}.variants: expected 1 to {_MOST_VARIANTS}, got {len(alias.variants)}")
    models = [variant.model for variant in alias.variants]
    known = [model.name for model in config.models]
    for number, variant in enumerate(alias.variants):
        here = f"{where}.variants[{number}]"
        if variant.model not in known:
            raise ConfigError(
                f"{here}.model: no model named {variant.model!r} under [[models]] (there are: {', '.join(known)})"
            )
        if variant.model in models[:number]:
            raise ConfigError(f"{here}.model: {variant.model!r} is listed twice")
        old = next((other for other in alias.variants if other.model == variant.canary_of), None)
        if variant.canary_of and (old is None or old is variant or old.canary_of):
            raise ConfigError(f"{here}.canary_of: expected another variant of this alias, got {variant.canary_of!r}")
    if alias.variants[0].canary_of:
        raise ConfigError(f"{where}.variants[0].canary_of: the first variant is the best one, not a new version")
    for step in alias.fallback:
        if step not in ("cached", "degraded", *models):
            raise ConfigError(
                f"{where}.fallback: expected 'cached', 'degraded' or one of {', '.join(models)}, got {step!r}"
            )


def _check_tls(tls: TlsConfig) -> None:
    """All of it or nothing: who asks for a part must not get plain text."""
    files = {name: getattr(tls, name) for name in ("certificate", "key", "authority")}
    if any(files.values()) and (missing := [name for name, path in files.items() if not path]):
        raise ConfigError(f"tls.{missing[0]}: must not be empty when another of {', '.join(files)} is set")
    if tls.client_certificates and not (tls.on and tls.doors):
        raise ConfigError("tls.client_certificates: needs TLS at the doors (tls.certificate and tls.doors)")


def tenant_weights(text: str) -> dict[str, float]:
    """Shares by tenant. Raises ConfigError."""
    return _numbers(text, "scheduler.tenant_weights", "tenant=share")


def pool_prices(text: str) -> dict[str, float]:
    """Dollars for a worker's hour, by pool. Raises ConfigError."""
    return _numbers(text, "prices.pools", "pool=dollars")


def _numbers(text: str, key: str, form: str) -> dict[str, float]:
    """Names with numbers above 0."""
    numbers: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not equals or not name or not (0.0 < number < math.inf):
            raise ConfigError(f"{key}: expected {form} with a number above 0, got {part!r}")
        numbers[name] = number
    return numbers


def _check_listeners(section: str, values: Any) -> None:
    """One process cannot listen twice on one address."""
    seen: dict[str, str] = {}
    for item in dataclasses.fields(values):
        address = getattr(values, item.name)
        if item.metadata["address"] != "listen" or not address or address.endswith(":0"):
            continue
        if address in seen:
            raise ConfigError(f"{section}.{item.name}: {address} is {section}.{seen[address]} already")
        seen[address] = item.name


def split_address(address: str, key: str = "address") -> tuple[str, int]:
    """Host and port of ``host:port`` (``[::1]:8080`` for IPv6). Raises ConfigError, naming the key."""
    host, colon, port_text = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    well_formed = colon and host and port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    if not well_formed or (":" in host) != bracketed or any(letter in host for letter in "/ []"):
        raise ConfigError(f"{key}: expected host:port, got {address!r}")
    port = int(port_text)
    if port > 65535:
        raise ConfigError(f"{key}: port must be at most 65535, got {port}")
    return host, port


def _read(kind: Any, table: Any, path: str) -> Any:
    if not isinstance(table, dict):
        raise ConfigError(f"{path or 'configuration'}: expected a table, got {_shown(table)}")
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            raise ConfigError(f"{where}: unknown key (known: {', '.join(sorted(known))})")
        values[key] = _value(hints[key], value, where, known[key].metadata)
    return kind(**values)


def _value(hint: Any, value: Any, where: str, metadata: Mapping[str, Any]) -> Any:
    if dataclasses.is_dataclass(hint):
        return _read(hint, value, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where}: expected a list, got {_shown(value)}")
        inner = typing.get_args(hint)[0]
        return tuple(_value(inner, item, f"{where}[{index}]", metadata) for index, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        value = float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where}: expected {_NAMES[hint]}, got {_shown(value)}")
    if isinstance(value, str):
        _check_text(value, where, metadata)
    elif not isinstance(value, bool):
        _check_number(value, where, metadata)
    return value


def _check_text(value: str, where: str, metadata: Mapping[str, Any]) -> None:
    if any(letter < " " or letter == "\x7f" or "\ud800" <= letter <= "\udfff" for letter in value):
        raise ConfigError(f"{where}: must be text without control characters, got {value!r}")
    if metadata["choices"] and value not in metadata["choices"]:
        raise ConfigError(f"{where}: must be one of {', '.join(metadata['choices'])}, got {value!r}")
    if metadata["address"] and not (metadata["optional"] and not value):
        _, port = split_address(value, where)
        if metadata["address"] == "peer" and port == 0:
            raise ConfigError(f"{where}: needs a real port, got {value!r}")


def _check_number(value: float, where: str, metadata: Mapping[str, Any]) -> None:
    # TOML writes nan and inf, and nan passes every comparison.
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}: expected a finite number, got {value}")
    if abs(value) >= 2**63:
        raise ConfigError(f"{where}: must be less than 2^63, got {_shown(value)}")
    minimum, maximum = metadata["minimum"], metadata["maximum"]
    if minimum is not None and value < minimum:
        raise ConfigError(f"{where}: must be at least {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ConfigError(f"{where}: must be at most {maximum}, got {value}")


def _shown(value: Any) -> str:
    """A wrong value, as far as it helps."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain values, for JSON."""
    table = dataclasses.asdict(config)
    table["models"] = list(table["models"])
    table["aliases"] = [{**alias, "variants": list(alias["variants"])} for alias in table["aliases"]]
    return table


def to_toml(config: Config, *, comments: bool = True) -> str:
    """The configuration as TOML that :func:`parse` reads back, each key's meaning as a comment before it."""
    parts = [_section("[[models]]", model, comments) for model in config.models]
    for alias in config.aliases:
        parts.append(_section("[[aliases]]", alias, comments))
        parts += [_section("[[aliases.variants]]", variant, comments) for variant in alias.variants]
    for item in dataclasses.fields(Config):
        if item.name not in _LISTS:
            parts.append(_section(f"[{item.name}]", getattr(config, item.name), comments))
    return "\n".join(parts)


def _section(header: str, values: Any, comments: bool) -> str:
    lines = []
    if comments:
        lines.append(f"# {(type(values).__doc__ or '').strip()}")
    lines.append(header)
    for item in dataclasses.fields(values):
        if item.name == "variants":
            continue
        if comments:
            lines.append(f"# {item.metadata['meaning']}{_bounds(item.metadata)}")
        lines.append(f"{item.name} = {_toml_value(getattr(values, item.name))}")
    return "\n".join(lines) + "\n"


def _bounds(metadata: Mapping[str, Any]) -> str:
    if metadata["choices"]:
        return f" ({', '.join(metadata['choices'])})"
    minimum, maximum = metadata["minimum"], metadata["maximum"]
    if minimum is not None and maximum is not None:
        return f" ({minimum} to {maximum})"
    return f" (at least {minimum})" if minimum is not None else ""


def _toml_value(value: bool | int | float | str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, str):
        # A JSON string is a TOML basic string but for DEL, which is refused as a control character.
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
