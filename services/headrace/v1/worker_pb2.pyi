from headrace.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_UNHEALTHY: _ClassVar[WorkerState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_UNHEALTHY: WorkerState

class RunRequest(_message.Message):
    __slots__ = ("hello", "submits", "cancels", "proceeds")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    PROCEEDS_FIELD_NUMBER: _ClassVar[int]
    hello: RunHello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedCompositeFieldContainer[Cancel]
    proceeds: _containers.RepeatedCompositeFieldContainer[Proceed]
    def __init__(self, hello: _Optional[_Union[RunHello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[_Union[Cancel, _Mapping]]] = ..., proceeds: _Optional[_Iterable[_Union[Proceed, _Mapping]]] = ...) -> None: ...

class RunHello(_message.Message):
    __slots__ = ("router_id", "instance_id")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    instance_id: str
    def __init__(self, router_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "request_id", "epoch", "lease", "model", "prompt_ids", "sampling", "stopping", "guided", "logprobs", "lora", "cache_salt", "handoff", "time_left_ms", "trace", "resumed_tokens", "bypass_prefix_cache", "booking", "ttft_target_ms", "spent_ms")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    GUIDED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    CLASS_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    BOOKING_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
    SPENT_MS_FIELD_NUMBER: _ClassVar[int]
    request: int
    request_id: str
    epoch: int
    lease: int
    model: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.Sampling
    stopping: _types_pb2.Stopping
    guided: _types_pb2.Guided
    logprobs: _types_pb2.LogprobOptions
    lora: str
    cache_salt: bytes
    handoff: KvHandoff
    time_left_ms: int
    trace: _types_pb2.TraceContext
    resumed_tokens: int
    bypass_prefix_cache: bool
    booking: int
    ttft_target_ms: int
    spent_ms: int
    def __init__(self, request: _Optional[int] = ..., request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease: _Optional[int] = ..., model: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.Sampling, _Mapping]] = ..., stopping: _Optional[_Union[_types_pb2.Stopping, _Mapping]] = ..., guided: _Optional[_Union[_types_pb2.Guided, _Mapping]] = ..., logprobs: _Optional[_Union[_types_pb2.LogprobOptions, _Mapping]] = ..., lora: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., handoff: _Optional[_Union[KvHandoff, _Mapping]] = ..., time_left_ms: _Optional[int] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., resumed_tokens: _Optional[int] = ..., bypass_prefix_cache: bool = ..., booking: _Optional[int] = ..., ttft_target_ms: _Optional[int] = ..., spent_ms: _Optional[int] = ..., **kwargs) -> None: ...

class KvHandoff(_message.Message):
    __slots__ = ("produce", "fetch")
    class Produce(_message.Message):
        __slots__ = ("keep_ms", "reference")
        KEEP_MS_FIELD_NUMBER: _ClassVar[int]
        REFERENCE_FIELD_NUMBER: _ClassVar[int]
        keep_ms: int
        reference: str
        def __init__(self, keep_ms: _Optional[int] = ..., reference: _Optional[str] = ...) -> None: ...
    class Fetch(_message.Message):
        __slots__ = ("worker_address", "reference", "kv_state_tag")
        WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
        REFERENCE_FIELD_NUMBER: _ClassVar[int]
        KV_STATE_TAG_FIELD_NUMBER: _ClassVar[int]
        worker_address: str
        reference: str
        kv_state_tag: str
        def __init__(self, worker_address: _Optional[str] = ..., reference: _Optional[str] = ..., kv_state_tag: _Optional[str] = ...) -> None: ...
    PRODUCE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    produce: KvHandoff.Produce
    fetch: KvHandoff.Fetch
    def __init__(self, produce: _Optional[_Union[KvHandoff.Produce, _Mapping]] = ..., fetch: _Optional[_Union[KvHandoff.Fetch, _Mapping]] = ...) -> None: ...

class Proceed(_message.Message):
    __slots__ = ("request", "epoch", "ids", "kv_reference")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    KV_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    request: int
    epoch: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    kv_reference: str
    def __init__(self, request: _Optional[int] = ..., epoch: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., kv_reference: _Optional[str] = ...) -> None: ...

class PullKvRequest(_message.Message):
    __slots__ = ("reference", "kv_state_tag", "cache_salt", "lora", "first_block", "wait_ms")
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    KV_STATE_TAG_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    reference: str
    kv_state_tag: str
    cache_salt: bytes
    lora: str
    first_block: int
    wait_ms: int
    def __init__(self, reference: _Optional[str] = ..., kv_state_tag: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., lora: _Optional[str] = ..., first_block: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class PullKvResponse(_message.Message):
    __slots__ = ("block", "offset", "block_bytes", "kv", "ids", "waited", "end_blocks")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    END_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    block_bytes: int
    kv: bytes
    ids: _containers.RepeatedScalarFieldContainer[int]
    waited: bool
    end_blocks: int
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., block_bytes: _Optional[int] = ..., kv: _Optional[bytes] = ..., ids: _Optional[_Iterable[int]] = ..., waited: bool = ..., end_blocks: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request", "epoch", "choice", "reason")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request: int
    epoch: int
    choice: int
    reason: _types_pb2.Outcome
    def __init__(self, request: _Optional[int] = ..., epoch: _Optional[int] = ..., choice: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.Outcome, str]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("welcome", "iteration", "deltas")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    welcome: RunWelcome
    iteration: int
    deltas: _containers.RepeatedCompositeFieldContainer[TokenDelta]
    def __init__(self, welcome: _Optional[_Union[RunWelcome, _Mapping]] = ..., iteration: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[TokenDelta, _Mapping]]] = ...) -> None: ...

class RunWelcome(_message.Message):
    __slots__ = ("worker_id", "instance_id", "description")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    description: _types_pb2.ModelDescription
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., description: _Optional[_Union[_types_pb2.ModelDescription, _Mapping]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("request", "epoch", "choice", "first_index", "ids", "logprobs", "finish", "cached_prompt_tokens", "prompt_logprobs", "kv_reference")
    class Finish(_message.Message):
        __slots__ = ("outcome", "error", "usage", "queue_s", "prefill_s", "decode_s", "kv_block_s")
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        USAGE_FIELD_NUMBER: _ClassVar[int]
        QUEUE_S_FIELD_NUMBER: _ClassVar[int]
        PREFILL_S_FIELD_NUMBER: _ClassVar[int]
        DECODE_S_FIELD_NUMBER: _ClassVar[int]
        KV_BLOCK_S_FIELD_NUMBER: _ClassVar[int]
        outcome: _types_pb2.Outcome
        error: _types_pb2.Error
        usage: _types_pb2.Usage
        queue_s: float
        prefill_s: float
        decode_s: float
        kv_block_s: float
        def __init__(self, outcome: _Optional[_Union[_types_pb2.Outcome, str]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., kv_block_s: _Optional[float] = ...) -> None: ...
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KV_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    request: int
    epoch: int
    choice: int
    first_index: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    finish: TokenDelta.Finish
    cached_prompt_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
    kv_reference: str
    def __init__(self, request: _Optional[int] = ..., epoch: _Optional[int] = ..., choice: _Optional[int] = ..., first_index: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[TokenDelta.Finish, _Mapping]] = ..., cached_prompt_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., kv_reference: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("worker_id", "instance_id", "description", "state")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    description: _types_pb2.ModelDescription
    state: WorkerState
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., description: _Optional[_Union[_types_pb2.ModelDescription, _Mapping]] = ..., state: _Optional[_Union[WorkerState, str]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: Load
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("state", "waiting_requests", "running_requests", "waiting_prompt_tokens", "running_prompt_tokens", "context_tokens", "kv_blocks_total", "kv_blocks_used", "kv_blocks_cached", "slots", "iteration", "steps", "prompt_tokens_total", "cached_prompt_tokens_total", "completion_tokens_total", "draft_tokens_total", "accepted_draft_tokens_total", "kv_received_bytes_total", "kv_receive_s_total", "kv_handoff_bytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_RECEIVED_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_RECEIVE_S_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_HANDOFF_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    waiting_requests: int
    running_requests: int
    waiting_prompt_tokens: int
    running_prompt_tokens: int
    context_tokens: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_blocks_cached: int
    slots: int
    iteration: int
    steps: _containers.RepeatedCompositeFieldContainer[StepReport]
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    completion_tokens_total: int
    draft_tokens_total: int
    accepted_draft_tokens_total: int
    kv_received_bytes_total: int
    kv_receive_s_total: float
    kv_handoff_bytes: int
    def __init__(self, state: _Optional[_Union[WorkerState, str]] = ..., waiting_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ..., running_prompt_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., slots: _Optional[int] = ..., iteration: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepReport, _Mapping]]] = ..., prompt_tokens_total: _Optional[int] = ..., cached_prompt_tokens_total: _Optional[int] = ..., completion_tokens_total: _Optional[int] = ..., draft_tokens_total: _Optional[int] = ..., accepted_draft_tokens_total: _Optional[int] = ..., kv_received_bytes_total: _Optional[int] = ..., kv_receive_s_total: _Optional[float] = ..., kv_handoff_bytes: _Optional[int] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("prefill_tokens", "decode_tokens", "context_tokens", "duration_us", "prefill_pairs")
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURATION_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIRS_FIELD_NUMBER: _ClassVar[int]
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    duration_us: int
    prefill_pairs: float
    def __init__(self, prefill_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., duration_us: _Optional[int] = ..., prefill_pairs: _Optional[float] = ...) -> None: ...
