"""The arguments of ``LLM``: pydantic models that refuse what they don't know."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, StrEnum, auto
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from tensorrt_llm.version import RELEASE


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


class LoadFormat(Enum):
    """Of weights."""

    AUTO = 0
    DUMMY = 1
    VISION_ONLY = 2


class QuantAlgo(StrEnum):
    """Methods of quantisation, as checkpoints name them."""

    FP8 = auto()
    FP8_BLOCK_SCALES = auto()
    FP8_PER_CHANNEL_PER_TOKEN = auto()
    NVFP4 = auto()
    W4A16_AWQ = auto()
    W4A8_AWQ = auto()
    W4A16_GPTQ = auto()
    W4A8_MXFP4_FP8 = auto()
    W4A16_MXFP4 = auto()
    W8A16 = auto()
    W4A16 = auto()
    INT8 = auto()
    MIXED_PRECISION = auto()
    NO_QUANT = auto()


class KvCacheConfig(_Strict):
    """See the contract's list."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = Field(default=0.9, ge=0, le=1)
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: Literal["auto", "float16", "bfloat16", "float32", "fp8", "nvfp4"] = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: int = 32
    use_kv_cache_manager_v2: bool = False
    max_util_for_resume: float = 0.95

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 2 or value & (value - 1):
            raise ValueError("tokens_per_block must be a power of two greater than 1")
        return value


class SchedulerConfig(_Strict):
    """See the contract's list."""

    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    dynamic_batch_config: Any = None


class CudaGraphConfig(_Strict):
    """See the contract's list."""

    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


class MoeConfig(_Strict):
    """See the contract's list."""

    backend: Literal["AUTO", "CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"] = "AUTO"
    max_num_tokens: int | None = None
    load_balancer: Any = None
    disable_finalize_fusion: bool = False
    use_low_precision_moe_combine: bool = False


class AttentionDpConfig(_Strict):
    """See the contract's list."""

    enable_balance: bool = False
    timeout_iters: int = 50
    batching_wait_iters: int = 10


class LoraConfig(_Strict):
    """See the contract's list."""

    lora_dir: list[str] = Field(default_factory=list)
    lora_ckpt_source: str = "hf"
    max_lora_rank: int = 64
    lora_target_modules: list[str] = Field(default_factory=list)
    trtllm_modules_to_hf_modules: dict[str, str] = Field(default_factory=dict)
    max_loras: int | None = None
    max_cpu_loras: int | None = None


class CacheTransceiverConfig(_Strict):
    """See the contract's list."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None
    kv_transfer_sender_future_timeout_ms: int | None = 1000


class NGramDecodingConfig(_Strict):
    """See the contract's list."""

    decoding_type: Literal["NGram"] = "NGram"
    max_draft_len: int | None = None
    speculative_model: str | None = None
    load_format: str | None = None
    max_matching_ngram_size: int = 2
    is_keep_all: bool = True
    is_use_oldest: bool = True
    is_public_pool: bool = True


@dataclass(frozen=True)
class _TokenRange:
    token_start: int
    token_end: int | None = None
    priority: int = 35
    duration_ms: timedelta | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise ValueError("priority must be from 0 to 100")
        if self.token_end is not None and self.token_end <= self.token_start:
            raise ValueError("token_end must be after token_start")


@dataclass(frozen=True)
class KvCacheRetentionConfig:
    """What of a request's KV is kept for how long."""

    token_range_retention_configs: list[_TokenRange] = field(default_factory=list)
    decode_retention_priority: int = 35
    decode_duration_ms: timedelta | None = None
    TokenRangeRetentionConfig = _TokenRange


class TorchLlmArgs(_Strict):
    """All that ``LLM`` takes."""

    model: Any
    tokenizer: Any = None
    tokenizer_mode: Literal["auto", "slow"] = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    custom_tokenizer: str | None = None
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    gpus_per_node: int | None = None
    moe_cluster_parallel_size: int | None = None
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    enable_attention_dp: bool = False
    attention_dp_config: AttentionDpConfig | None = None
    enable_lm_head_tp_in_adp: bool = False
    pp_partition: list[int] | None = None
    cp_config: dict[str, Any] | None = None
    load_format: Any = "auto"
    checkpoint_format: str | None = None
    checkpoint_loader: Any = None
    model_kwargs: dict[str, Any] | None = None
    force_dynamic_quantization: bool = False
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    max_batch_size: int | None = 2048
    max_num_tokens: int | None = 8192
    max_seq_len: int | None = None
    max_input_len: int | None = 1024
    max_beam_width: int | None = 1
    enable_chunked_prefill: bool = False
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    batch_wait_timeout_ms: float = 0
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0
    disable_overlap_scheduler: bool = False
    cuda_graph_config: CudaGraphConfig | None = Field(default_factory=CudaGraphConfig)
    torch_compile_config: Any = None
    enable_autotuner: bool = True
    attn_backend: str = "TRTLLM"
    moe_config: MoeConfig = Field(default_factory=MoeConfig)
    nvfp4_gemm_config: Any = None
    allreduce_strategy: str | None = "AUTO"
    sampler_type: str = "auto"
    speculative_config: NGramDecodingConfig | None = None
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None
    batched_logits_processor: Any = None
    enable_lora: bool = False
    lora_config: LoraConfig | None = None
    peft_cache_config: Any = None
    stream_interval: int = 1
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    cache_transceiver_config: CacheTransceiverConfig | None = None
    kv_connector_config: Any = None
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    max_stats_len: int = 1000
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    return_perf_metrics: bool = False
    perf_metrics_max_requests: int = 0
    print_iter_log: bool = False
    otlp_traces_endpoint: str | None = None
    orchestrator_type: Literal["rpc", "ray"] | None = None
    ray_worker_extension_cls: str | None = None
    env_overrides: dict[str, str] | None = None
    enable_sleep: bool = False
    mm_encoder_only: bool = False
    sparse_attention_config: Any = None
    garbage_collection_gen0_threshold: int = 20000
    backend: Literal["pytorch", "_autodeploy"] | None = "pytorch"

    if RELEASE >= (1, 3):
        encode_only: bool = False
        mx_config: Any = None
        multimodal_config: Any = None
        post_processor_hook: Any = None
        telemetry_config: Any = None


#: Of the engine class for TensorRT plans.
TENSORRT_ONLY = frozenset({"build_config", "fast_build", "quant_config", "calib_config", "enable_build_cache"})
