from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_STOP: _ClassVar[Outcome]
    OUTCOME_LENGTH: _ClassVar[Outcome]
    OUTCOME_TOOL_CALLS: _ClassVar[Outcome]
    OUTCOME_DEADLINE: _ClassVar[Outcome]
    OUTCOME_BUDGET: _ClassVar[Outcome]
    OUTCOME_CANCELLED: _ClassVar[Outcome]
    OUTCOME_WORKER_LOST: _ClassVar[Outcome]
    OUTCOME_REJECTED: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]

class RequestClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_CLASS_UNSPECIFIED: _ClassVar[RequestClass]
    REQUEST_CLASS_INTERACTIVE: _ClassVar[RequestClass]
    REQUEST_CLASS_STANDARD: _ClassVar[RequestClass]
    REQUEST_CLASS_BATCH: _ClassVar[RequestClass]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_CODE_UNSPECIFIED: _ClassVar[ErrorCode]
    ERROR_CODE_INVALID_ARGUMENT: _ClassVar[ErrorCode]
    ERROR_CODE_CONTEXT_LENGTH_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_MODEL_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_CODE_TOO_LARGE: _ClassVar[ErrorCode]
    ERROR_CODE_UNAUTHENTICATED: _ClassVar[ErrorCode]
    ERROR_CODE_PERMISSION_DENIED: _ClassVar[ErrorCode]
    ERROR_CODE_OVERLOADED: _ClassVar[ErrorCode]
    ERROR_CODE_RATE_LIMIT_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_UNAVAILABLE: _ClassVar[ErrorCode]
    ERROR_CODE_DRAINING: _ClassVar[ErrorCode]
    ERROR_CODE_DEADLINE_EXCEEDED: _ClassVar[ErrorCode]
    ERROR_CODE_WORKER_LOST: _ClassVar[ErrorCode]
    ERROR_CODE_UNSUPPORTED: _ClassVar[ErrorCode]
    ERROR_CODE_CANCELLED: _ClassVar[ErrorCode]
    ERROR_CODE_INTERNAL: _ClassVar[ErrorCode]
    ERROR_CODE_NOT_FOUND: _ClassVar[ErrorCode]
    ERROR_CODE_INSUFFICIENT_QUOTA: _ClassVar[ErrorCode]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_STOP: Outcome
OUTCOME_LENGTH: Outcome
OUTCOME_TOOL_CALLS: Outcome
OUTCOME_DEADLINE: Outcome
OUTCOME_BUDGET: Outcome
OUTCOME_CANCELLED: Outcome
OUTCOME_WORKER_LOST: Outcome
OUTCOME_REJECTED: Outcome
OUTCOME_FAILED: Outcome
REQUEST_CLASS_UNSPECIFIED: RequestClass
REQUEST_CLASS_INTERACTIVE: RequestClass
REQUEST_CLASS_STANDARD: RequestClass
REQUEST_CLASS_BATCH: RequestClass
ERROR_CODE_UNSPECIFIED: ErrorCode
ERROR_CODE_INVALID_ARGUMENT: ErrorCode
ERROR_CODE_CONTEXT_LENGTH_EXCEEDED: ErrorCode
ERROR_CODE_MODEL_NOT_FOUND: ErrorCode
ERROR_CODE_TOO_LARGE: ErrorCode
ERROR_CODE_UNAUTHENTICATED: ErrorCode
ERROR_CODE_PERMISSION_DENIED: ErrorCode
ERROR_CODE_OVERLOADED: ErrorCode
ERROR_CODE_RATE_LIMIT_EXCEEDED: ErrorCode
ERROR_CODE_UNAVAILABLE: ErrorCode
ERROR_CODE_DRAINING: ErrorCode
ERROR_CODE_DEADLINE_EXCEEDED: ErrorCode
ERROR_CODE_WORKER_LOST: ErrorCode
ERROR_CODE_UNSUPPORTED: ErrorCode
ERROR_CODE_CANCELLED: ErrorCode
ERROR_CODE_INTERNAL: ErrorCode
ERROR_CODE_NOT_FOUND: ErrorCode
ERROR_CODE_INSUFFICIENT_QUOTA: ErrorCode

class Error(_message.Message):
    __slots__ = ("code", "message", "retryable", "retry_after_ms", "param")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    retryable: bool
    retry_after_ms: int
    param: str
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., retryable: bool = ..., retry_after_ms: _Optional[int] = ..., param: _Optional[str] = ...) -> None: ...

class TraceContext(_message.Message):
    __slots__ = ("traceparent", "tracestate")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    tracestate: str
    def __init__(self, traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seeds")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seeds: _Optional[_Iterable[int]] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "ignore_eos", "stop_ids", "eos_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: bool = ..., stop_ids: _Optional[_Iterable[int]] = ..., eos_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Guided(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar", "choice")
    class Choices(_message.Message):
        __slots__ = ("texts",)
        TEXTS_FIELD_NUMBER: _ClassVar[int]
        texts: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    choice: Guided.Choices
    def __init__(self, json_schema: _Optional[str] = ..., json_object: bool = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choice: _Optional[_Union[Guided.Choices, _Mapping]] = ...) -> None: ...

class LogprobOptions(_message.Message):
    __slots__ = ("enabled", "top", "prompt")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    top: int
    prompt: bool
    def __init__(self, enabled: bool = ..., top: _Optional[int] = ..., prompt: bool = ...) -> None: ...

class Logprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("drawn", "top")
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    drawn: Logprob
    top: _containers.RepeatedCompositeFieldContainer[Logprob]
    def __init__(self, drawn: _Optional[_Union[Logprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[Logprob, _Mapping]]] = ...) -> None: ...

class ModelDescription(_message.Message):
    __slots__ = ("model", "engine", "engine_version", "weights_sha256", "quantization", "tokenizer_sha256", "template_sha256", "vocab_size", "context_tokens", "eos_ids", "block_tokens", "kv_blocks", "slots", "capabilities", "kv_state_tag", "cost_table")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_SHA256_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    KV_STATE_TAG_FIELD_NUMBER: _ClassVar[int]
    COST_TABLE_FIELD_NUMBER: _ClassVar[int]
    model: str
    engine: str
    engine_version: str
    weights_sha256: str
    quantization: str
    tokenizer_sha256: str
    template_sha256: str
    vocab_size: int
    context_tokens: int
    eos_ids: _containers.RepeatedScalarFieldContainer[int]
    block_tokens: int
    kv_blocks: int
    slots: int
    capabilities: Capabilities
    kv_state_tag: str
    cost_table: str
    def __init__(self, model: _Optional[str] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., weights_sha256: _Optional[str] = ..., quantization: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., template_sha256: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., eos_ids: _Optional[_Iterable[int]] = ..., block_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., slots: _Optional[int] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., kv_state_tag: _Optional[str] = ..., cost_table: _Optional[str] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("guided", "logprobs", "prompt_logprobs", "lora", "kv_handoff", "batch_invariant")
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    KV_HANDOFF_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    guided: _containers.RepeatedScalarFieldContainer[str]
    logprobs: bool
    prompt_logprobs: bool
    lora: _containers.RepeatedScalarFieldContainer[str]
    kv_handoff: bool
    batch_invariant: bool
    def __init__(self, guided: _Optional[_Iterable[str]] = ..., logprobs: bool = ..., prompt_logprobs: bool = ..., lora: _Optional[_Iterable[str]] = ..., kv_handoff: bool = ..., batch_invariant: bool = ...) -> None: ...

class UsageQuestion(_message.Message):
    __slots__ = ("by", "tenant", "from_s", "to_s")
    BY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FROM_S_FIELD_NUMBER: _ClassVar[int]
    TO_S_FIELD_NUMBER: _ClassVar[int]
    by: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    from_s: float
    to_s: float
    def __init__(self, by: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ..., from_s: _Optional[float] = ..., to_s: _Optional[float] = ...) -> None: ...

class UsageLine(_message.Message):
    __slots__ = ("group", "requests", "prompt_tokens", "cached_prompt_tokens", "output_tokens", "wasted_tokens", "replayed_requests", "replayed_tokens", "dollars", "prefix_cache_saved_dollars", "response_cache_saved_dollars", "variants_saved_dollars", "batch_saved_dollars", "shadow_dollars", "mean_ttft_s", "dollars_per_1k_tokens")
    class GroupEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WASTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DOLLARS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_SAVED_DOLLARS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_CACHE_SAVED_DOLLARS_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_SAVED_DOLLARS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SAVED_DOLLARS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_DOLLARS_FIELD_NUMBER: _ClassVar[int]
    MEAN_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    DOLLARS_PER_1K_TOKENS_FIELD_NUMBER: _ClassVar[int]
    group: _containers.ScalarMap[str, str]
    requests: int
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    wasted_tokens: int
    replayed_requests: int
    replayed_tokens: int
    dollars: float
    prefix_cache_saved_dollars: float
    response_cache_saved_dollars: float
    variants_saved_dollars: float
    batch_saved_dollars: float
    shadow_dollars: float
    mean_ttft_s: float
    dollars_per_1k_tokens: float
    def __init__(self, group: _Optional[_Mapping[str, str]] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., wasted_tokens: _Optional[int] = ..., replayed_requests: _Optional[int] = ..., replayed_tokens: _Optional[int] = ..., dollars: _Optional[float] = ..., prefix_cache_saved_dollars: _Optional[float] = ..., response_cache_saved_dollars: _Optional[float] = ..., variants_saved_dollars: _Optional[float] = ..., batch_saved_dollars: _Optional[float] = ..., shadow_dollars: _Optional[float] = ..., mean_ttft_s: _Optional[float] = ..., dollars_per_1k_tokens: _Optional[float] = ...) -> None: ...

class UsageReport(_message.Message):
    __slots__ = ("lines", "total")
    LINES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[UsageLine]
    total: UsageLine
    def __init__(self, lines: _Optional[_Iterable[_Union[UsageLine, _Mapping]]] = ..., total: _Optional[_Union[UsageLine, _Mapping]] = ...) -> None: ...
