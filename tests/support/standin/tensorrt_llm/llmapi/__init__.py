"""The LLM API."""

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import CompletionOutput, GenerationResult
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

from .llm import LLM, RequestOutput
from .llm_args import (
    AttentionDpConfig,
    CacheTransceiverConfig,
    CudaGraphConfig,
    KvCacheConfig,
    KvCacheRetentionConfig,
    LoadFormat,
    LoraConfig,
    MoeConfig,
    NGramDecodingConfig,
    QuantAlgo,
    SchedulerConfig,
    TorchLlmArgs,
)

LlmArgs = TorchLlmArgs

__all__ = [
    "LLM",
    "AttentionDpConfig",
    "CacheTransceiverConfig",
    "CompletionOutput",
    "CudaGraphConfig",
    "DisaggregatedParams",
    "GenerationResult",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "KvCacheRetentionConfig",
    "LlmArgs",
    "LoRARequest",
    "LoadFormat",
    "LoraConfig",
    "MoeConfig",
    "NGramDecodingConfig",
    "QuantAlgo",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TorchLlmArgs",
]
