from headrace.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Quality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUALITY_UNSPECIFIED: _ClassVar[Quality]
    QUALITY_FULL: _ClassVar[Quality]
    QUALITY_TOLERANT: _ClassVar[Quality]
QUALITY_UNSPECIFIED: Quality
QUALITY_FULL: Quality
QUALITY_TOLERANT: Quality

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "ids", "sampling", "stopping", "guided", "logprobs", "lora", "deadline_ms", "bypass_cache", "session_id", "bypass_prefix_cache", "cache_salt", "ttft_target_ms", "tpot_target_ms", "quality")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    CLASS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_CACHE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    ids: TokenIds
    sampling: SamplingOptions
    stopping: StoppingOptions
    guided: _types_pb2.Guided
    logprobs: _types_pb2.LogprobOptions
    lora: str
    deadline_ms: int
    bypass_cache: bool
    session_id: str
    bypass_prefix_cache: bool
    cache_salt: str
    ttft_target_ms: int
    tpot_target_ms: int
    quality: Quality
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., stopping: _Optional[_Union[StoppingOptions, _Mapping]] = ..., guided: _Optional[_Union[_types_pb2.Guided, _Mapping]] = ..., logprobs: _Optional[_Union[_types_pb2.LogprobOptions, _Mapping]] = ..., lora: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., bypass_cache: bool = ..., session_id: _Optional[str] = ..., bypass_prefix_cache: bool = ..., cache_salt: _Optional[str] = ..., ttft_target_ms: _Optional[int] = ..., tpot_target_ms: _Optional[int] = ..., quality: _Optional[_Union[Quality, str]] = ..., **kwargs) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools_json", "no_generation_prompt", "template_kwargs_json", "tool_use", "required_tool", "single_tool_call")
    class ToolUse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TOOL_USE_UNSPECIFIED: _ClassVar[Chat.ToolUse]
        TOOL_USE_AUTO: _ClassVar[Chat.ToolUse]
        TOOL_USE_NONE: _ClassVar[Chat.ToolUse]
        TOOL_USE_REQUIRED: _ClassVar[Chat.ToolUse]
    TOOL_USE_UNSPECIFIED: Chat.ToolUse
    TOOL_USE_AUTO: Chat.ToolUse
    TOOL_USE_NONE: Chat.ToolUse
    TOOL_USE_REQUIRED: Chat.ToolUse
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    NO_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_USE_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_TOOL_FIELD_NUMBER: _ClassVar[int]
    SINGLE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: _containers.RepeatedScalarFieldContainer[str]
    no_generation_prompt: bool
    template_kwargs_json: str
    tool_use: Chat.ToolUse
    required_tool: str
    single_tool_call: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[_Iterable[str]] = ..., no_generation_prompt: bool = ..., template_kwargs_json: _Optional[str] = ..., tool_use: _Optional[_Union[Chat.ToolUse, str]] = ..., required_tool: _Optional[str] = ..., single_tool_call: bool = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "parts", "name", "tool_calls", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    parts: _containers.RepeatedScalarFieldContainer[str]
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., parts: _Optional[_Iterable[str]] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments_json")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "seed", "n")
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
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    n: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class StoppingOptions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "ignore_eos", "stop", "stop_ids", "include_stop")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: bool = ..., stop: _Optional[_Iterable[str]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., include_stop: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finish", "usage")
    class Started(_message.Message):
        __slots__ = ("request_id", "model", "prompt_tokens", "created_s")
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        MODEL_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        CREATED_S_FIELD_NUMBER: _ClassVar[int]
        request_id: str
        model: str
        prompt_tokens: int
        created_s: int
        def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., created_s: _Optional[int] = ...) -> None: ...
    class Delta(_message.Message):
        __slots__ = ("choice", "text", "ids", "logprobs", "tool_calls")
        CHOICE_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_NUMBER: _ClassVar[int]
        IDS_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
        choice: int
        text: str
        ids: _containers.RepeatedScalarFieldContainer[int]
        logprobs: _containers.RepeatedCompositeFieldContainer[TextLogprobs]
        tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallPart]
        def __init__(self, choice: _Optional[int] = ..., text: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TextLogprobs, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallPart, _Mapping]]] = ...) -> None: ...
    class Finish(_message.Message):
        __slots__ = ("choice", "outcome", "stop_string", "stop_id")
        CHOICE_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        STOP_STRING_FIELD_NUMBER: _ClassVar[int]
        STOP_ID_FIELD_NUMBER: _ClassVar[int]
        choice: int
        outcome: _types_pb2.Outcome
        stop_string: str
        stop_id: int
        def __init__(self, choice: _Optional[int] = ..., outcome: _Optional[_Union[_types_pb2.Outcome, str]] = ..., stop_string: _Optional[str] = ..., stop_id: _Optional[int] = ...) -> None: ...
    class FinalUsage(_message.Message):
        __slots__ = ("usage", "cached_answer", "variant", "fallback")
        USAGE_FIELD_NUMBER: _ClassVar[int]
        CACHED_ANSWER_FIELD_NUMBER: _ClassVar[int]
        VARIANT_FIELD_NUMBER: _ClassVar[int]
        FALLBACK_FIELD_NUMBER: _ClassVar[int]
        usage: _types_pb2.Usage
        cached_answer: bool
        variant: str
        fallback: str
        def __init__(self, usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., cached_answer: bool = ..., variant: _Optional[str] = ..., fallback: _Optional[str] = ...) -> None: ...
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    started: GenerateResponse.Started
    delta: GenerateResponse.Delta
    finish: GenerateResponse.Finish
    usage: GenerateResponse.FinalUsage
    def __init__(self, started: _Optional[_Union[GenerateResponse.Started, _Mapping]] = ..., delta: _Optional[_Union[GenerateResponse.Delta, _Mapping]] = ..., finish: _Optional[_Union[GenerateResponse.Finish, _Mapping]] = ..., usage: _Optional[_Union[GenerateResponse.FinalUsage, _Mapping]] = ...) -> None: ...

class ToolCallPart(_message.Message):
    __slots__ = ("index", "id", "name", "arguments_json")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments_json: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ...) -> None: ...

class TextLogprob(_message.Message):
    __slots__ = ("id", "bytes", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    bytes: bytes
    logprob: float
    def __init__(self, id: _Optional[int] = ..., bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class TextLogprobs(_message.Message):
    __slots__ = ("drawn", "top")
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    drawn: TextLogprob
    top: _containers.RepeatedCompositeFieldContainer[TextLogprob]
    def __init__(self, drawn: _Optional[_Union[TextLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TextLogprob, _Mapping]]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    class Model(_message.Message):
        __slots__ = ("name", "context_tokens", "vocab_size", "ready_workers", "tokenizer_sha256", "variants")
        NAME_FIELD_NUMBER: _ClassVar[int]
        CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
        READY_WORKERS_FIELD_NUMBER: _ClassVar[int]
        TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
        VARIANTS_FIELD_NUMBER: _ClassVar[int]
        name: str
        context_tokens: int
        vocab_size: int
        ready_workers: int
        tokenizer_sha256: str
        variants: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, name: _Optional[str] = ..., context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., ready_workers: _Optional[int] = ..., tokenizer_sha256: _Optional[str] = ..., variants: _Optional[_Iterable[str]] = ...) -> None: ...
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ListModelsResponse.Model]
    def __init__(self, models: _Optional[_Iterable[_Union[ListModelsResponse.Model, _Mapping]]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("ids", "context_tokens")
    IDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    context_tokens: int
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., context_tokens: _Optional[int] = ...) -> None: ...

class ShowUsageRequest(_message.Message):
    __slots__ = ("question",)
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    question: _types_pb2.UsageQuestion
    def __init__(self, question: _Optional[_Union[_types_pb2.UsageQuestion, _Mapping]] = ...) -> None: ...

class ShowUsageResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _types_pb2.UsageReport
    def __init__(self, report: _Optional[_Union[_types_pb2.UsageReport, _Mapping]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "ids", "skip_special")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    model: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special: bool
    def __init__(self, model: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., skip_special: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
