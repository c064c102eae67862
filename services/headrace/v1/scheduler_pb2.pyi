from headrace.v1 import types_pb2 as _types_pb2
from headrace.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlaceRequest(_message.Message):
    __slots__ = ("hello", "asks", "withdrawals", "releases", "progress", "placed", "shares_known", "settlements")
    class Placed(_message.Message):
        __slots__ = ("lease", "worker", "ask")
        LEASE_FIELD_NUMBER: _ClassVar[int]
        WORKER_FIELD_NUMBER: _ClassVar[int]
        ASK_FIELD_NUMBER: _ClassVar[int]
        lease: int
        worker: int
        ask: PlaceRequest.Ask
        def __init__(self, lease: _Optional[int] = ..., worker: _Optional[int] = ..., ask: _Optional[_Union[PlaceRequest.Ask, _Mapping]] = ...) -> None: ...
    class Ask(_message.Message):
        __slots__ = ("ask", "request_id", "tenant", "pools", "prompt_tokens", "block_hashes", "max_tokens", "n", "expected_output_tokens", "time_left_ms", "avoid_instances", "session_id", "trace", "epoch", "ttft_target_ms", "tpot_target_ms", "may_part", "shadow", "booking", "alias", "committed_tokens", "spent_ms")
        ASK_FIELD_NUMBER: _ClassVar[int]
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        TENANT_FIELD_NUMBER: _ClassVar[int]
        CLASS_FIELD_NUMBER: _ClassVar[int]
        POOLS_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
        MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
        N_FIELD_NUMBER: _ClassVar[int]
        EXPECTED_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        TIME_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
        AVOID_INSTANCES_FIELD_NUMBER: _ClassVar[int]
        SESSION_ID_FIELD_NUMBER: _ClassVar[int]
        TRACE_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        TTFT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
        TPOT_TARGET_MS_FIELD_NUMBER: _ClassVar[int]
        MAY_PART_FIELD_NUMBER: _ClassVar[int]
        SHADOW_FIELD_NUMBER: _ClassVar[int]
        BOOKING_FIELD_NUMBER: _ClassVar[int]
        ALIAS_FIELD_NUMBER: _ClassVar[int]
        COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        SPENT_MS_FIELD_NUMBER: _ClassVar[int]
        ask: int
        request_id: str
        tenant: str
        pools: _containers.RepeatedScalarFieldContainer[str]
        prompt_tokens: int
        block_hashes: _containers.RepeatedScalarFieldContainer[int]
        max_tokens: int
        n: int
        expected_output_tokens: int
        time_left_ms: int
        avoid_instances: _containers.RepeatedScalarFieldContainer[str]
        session_id: str
        trace: _types_pb2.TraceContext
        epoch: int
        ttft_target_ms: int
        tpot_target_ms: int
        may_part: bool
        shadow: bool
        booking: int
        alias: str
        committed_tokens: int
        spent_ms: int
        def __init__(self, ask: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., pools: _Optional[_Iterable[str]] = ..., prompt_tokens: _Optional[int] = ..., block_hashes: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., n: _Optional[int] = ..., expected_output_tokens: _Optional[int] = ..., time_left_ms: _Optional[int] = ..., avoid_instances: _Optional[_Iterable[str]] = ..., session_id: _Optional[str] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ..., epoch: _Optional[int] = ..., ttft_target_ms: _Optional[int] = ..., tpot_target_ms: _Optional[int] = ..., may_part: bool = ..., shadow: bool = ..., booking: _Optional[int] = ..., alias: _Optional[str] = ..., committed_tokens: _Optional[int] = ..., spent_ms: _Optional[int] = ..., **kwargs) -> None: ...
    class Progress(_message.Message):
        __slots__ = ("lease", "output_tokens")
        LEASE_FIELD_NUMBER: _ClassVar[int]
        OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        lease: int
        output_tokens: int
        def __init__(self, lease: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ASKS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWALS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    SHARES_KNOWN_FIELD_NUMBER: _ClassVar[int]
    SETTLEMENTS_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    asks: _containers.RepeatedCompositeFieldContainer[PlaceRequest.Ask]
    withdrawals: _containers.RepeatedScalarFieldContainer[int]
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    progress: _containers.RepeatedCompositeFieldContainer[PlaceRequest.Progress]
    placed: _containers.RepeatedCompositeFieldContainer[PlaceRequest.Placed]
    shares_known: int
    settlements: _containers.RepeatedCompositeFieldContainer[Settlement]
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., asks: _Optional[_Iterable[_Union[PlaceRequest.Ask, _Mapping]]] = ..., withdrawals: _Optional[_Iterable[int]] = ..., releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[PlaceRequest.Progress, _Mapping]]] = ..., placed: _Optional[_Iterable[_Union[PlaceRequest.Placed, _Mapping]]] = ..., shares_known: _Optional[int] = ..., settlements: _Optional[_Iterable[_Union[Settlement, _Mapping]]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "running", "bookings")
    class RunningLease(_message.Message):
        __slots__ = ("lease", "instance_id", "request_id", "tenant", "prompt_tokens", "max_tokens", "booking")
        LEASE_FIELD_NUMBER: _ClassVar[int]
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
        TENANT_FIELD_NUMBER: _ClassVar[int]
        PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
        MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
        BOOKING_FIELD_NUMBER: _ClassVar[int]
        lease: int
        instance_id: str
        request_id: str
        tenant: str
        prompt_tokens: int
        max_tokens: int
        booking: int
        def __init__(self, lease: _Optional[int] = ..., instance_id: _Optional[str] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., booking: _Optional[int] = ...) -> None: ...
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BOOKINGS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    running: _containers.RepeatedCompositeFieldContainer[RouterHello.RunningLease]
    bookings: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, router_id: _Optional[str] = ..., running: _Optional[_Iterable[_Union[RouterHello.RunningLease, _Mapping]]] = ..., bookings: _Optional[_Iterable[int]] = ...) -> None: ...

class Settlement(_message.Message):
    __slots__ = ("number", "booking", "request_id", "tenant", "session_id", "alias", "pool", "placed_s", "outcome", "ran", "replayed", "usage", "wasted_tokens", "queue_s", "ttft_s", "decode_s", "kv_block_s", "best_pool", "shadow")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BOOKING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    CLASS_FIELD_NUMBER: _ClassVar[int]
    PLACED_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    RAN_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WASTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    BEST_POOL_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    number: int
    booking: int
    request_id: str
    tenant: str
    session_id: str
    alias: str
    pool: str
    placed_s: float
    outcome: _types_pb2.Outcome
    ran: bool
    replayed: bool
    usage: _types_pb2.Usage
    wasted_tokens: int
    queue_s: float
    ttft_s: float
    decode_s: float
    kv_block_s: float
    best_pool: str
    shadow: bool
    def __init__(self, number: _Optional[int] = ..., booking: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., alias: _Optional[str] = ..., pool: _Optional[str] = ..., placed_s: _Optional[float] = ..., outcome: _Optional[_Union[_types_pb2.Outcome, str]] = ..., ran: bool = ..., replayed: bool = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., wasted_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., kv_block_s: _Optional[float] = ..., best_pool: _Optional[str] = ..., shadow: bool = ..., **kwargs) -> None: ...

class Release(_message.Message):
    __slots__ = ("lease", "outcome", "usage", "kv_block_s", "ttft_s", "decode_s")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    lease: int
    outcome: _types_pb2.Outcome
    usage: _types_pb2.Usage
    kv_block_s: float
    ttft_s: float
    decode_s: float
    def __init__(self, lease: _Optional[int] = ..., outcome: _Optional[_Union[_types_pb2.Outcome, str]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., kv_block_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class PlaceResponse(_message.Message):
    __slots__ = ("placements", "fleet", "shares", "settled")
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    FLEET_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    fleet: FleetView
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    settled: int
    def __init__(self, placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., fleet: _Optional[_Union[FleetView, _Mapping]] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., settled: _Optional[int] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("number", "worker", "choices", "kv_tokens", "pending_prefill_ms", "prefill_ms_per_token", "prefill_ms_per_pair", "placed", "decoding", "waiting", "grantor", "gone", "ask_from_tokens", "ahead_ms", "idle_ms")
    class Grantor(_message.Message):
        __slots__ = ("worker_id", "instance_id", "address", "pool", "block_tokens")
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        POOL_FIELD_NUMBER: _ClassVar[int]
        BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
        worker_id: str
        instance_id: str
        address: str
        pool: str
        block_tokens: int
        def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., address: _Optional[str] = ..., pool: _Optional[str] = ..., block_tokens: _Optional[int] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_PER_PAIR_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GRANTOR_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ASK_FROM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    number: int
    worker: int
    choices: int
    kv_tokens: int
    pending_prefill_ms: float
    prefill_ms_per_token: float
    prefill_ms_per_pair: float
    placed: int
    decoding: int
    waiting: int
    grantor: Share.Grantor
    gone: bool
    ask_from_tokens: int
    ahead_ms: float
    idle_ms: float
    def __init__(self, number: _Optional[int] = ..., worker: _Optional[int] = ..., choices: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., pending_prefill_ms: _Optional[float] = ..., prefill_ms_per_token: _Optional[float] = ..., prefill_ms_per_pair: _Optional[float] = ..., placed: _Optional[int] = ..., decoding: _Optional[int] = ..., waiting: _Optional[int] = ..., grantor: _Optional[_Union[Share.Grantor, _Mapping]] = ..., gone: bool = ..., ask_from_tokens: _Optional[int] = ..., ahead_ms: _Optional[float] = ..., idle_ms: _Optional[float] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("ask", "grant", "queued", "rejected")
    ASK_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    ask: int
    grant: Grant
    queued: Queued
    rejected: _types_pb2.Error
    def __init__(self, ask: _Optional[int] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ..., rejected: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("lease", "worker_id", "instance_id", "address", "token_allowance", "queue_s", "reason", "prefill", "pool")
    class Prefill(_message.Message):
        __slots__ = ("lease", "worker_id", "instance_id", "address", "kv_state_tag", "reason")
        LEASE_FIELD_NUMBER: _ClassVar[int]
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        KV_STATE_TAG_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        lease: int
        worker_id: str
        instance_id: str
        address: str
        kv_state_tag: str
        reason: PlacementReason
        def __init__(self, lease: _Optional[int] = ..., worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., address: _Optional[str] = ..., kv_state_tag: _Optional[str] = ..., reason: _Optional[_Union[PlacementReason, _Mapping]] = ...) -> None: ...
    LEASE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ALLOWANCE_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    lease: int
    worker_id: str
    instance_id: str
    address: str
    token_allowance: int
    queue_s: float
    reason: PlacementReason
    prefill: Grant.Prefill
    pool: str
    def __init__(self, lease: _Optional[int] = ..., worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., address: _Optional[str] = ..., token_allowance: _Optional[int] = ..., queue_s: _Optional[float] = ..., reason: _Optional[_Union[PlacementReason, _Mapping]] = ..., prefill: _Optional[_Union[Grant.Prefill, _Mapping]] = ..., pool: _Optional[str] = ...) -> None: ...

class PlacementReason(_message.Message):
    __slots__ = ("hit_tokens", "prefill_ms", "pending_prefill_ms", "decoding", "waiting", "score", "gives_way")
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    GIVES_WAY_FIELD_NUMBER: _ClassVar[int]
    hit_tokens: int
    prefill_ms: float
    pending_prefill_ms: float
    decoding: int
    waiting: int
    score: float
    gives_way: int
    def __init__(self, hit_tokens: _Optional[int] = ..., prefill_ms: _Optional[float] = ..., pending_prefill_ms: _Optional[float] = ..., decoding: _Optional[int] = ..., waiting: _Optional[int] = ..., score: _Optional[float] = ..., gives_way: _Optional[int] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("position", "estimate_ms")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATE_MS_FIELD_NUMBER: _ClassVar[int]
    position: int
    estimate_ms: int
    def __init__(self, position: _Optional[int] = ..., estimate_ms: _Optional[int] = ...) -> None: ...

class FleetView(_message.Message):
    __slots__ = ("pools",)
    class Pool(_message.Message):
        __slots__ = ("name", "description", "ready_workers", "workers", "addresses")
        NAME_FIELD_NUMBER: _ClassVar[int]
        DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
        READY_WORKERS_FIELD_NUMBER: _ClassVar[int]
        WORKERS_FIELD_NUMBER: _ClassVar[int]
        ADDRESSES_FIELD_NUMBER: _ClassVar[int]
        name: str
        description: _types_pb2.ModelDescription
        ready_workers: int
        workers: int
        addresses: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, name: _Optional[str] = ..., description: _Optional[_Union[_types_pb2.ModelDescription, _Mapping]] = ..., ready_workers: _Optional[int] = ..., workers: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[FleetView.Pool]
    def __init__(self, pools: _Optional[_Iterable[_Union[FleetView.Pool, _Mapping]]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("hello", "load", "orphans")
    class Orphan(_message.Message):
        __slots__ = ("booking", "usage")
        BOOKING_FIELD_NUMBER: _ClassVar[int]
        USAGE_FIELD_NUMBER: _ClassVar[int]
        booking: int
        usage: _types_pb2.Usage
        def __init__(self, booking: _Optional[int] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ...) -> None: ...
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    hello: JoinHello
    load: _worker_pb2.Load
    orphans: _containers.RepeatedCompositeFieldContainer[JoinRequest.Orphan]
    def __init__(self, hello: _Optional[_Union[JoinHello, _Mapping]] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., orphans: _Optional[_Iterable[_Union[JoinRequest.Orphan, _Mapping]]] = ...) -> None: ...

class JoinHello(_message.Message):
    __slots__ = ("worker_id", "instance_id", "pool", "address", "description", "startup_s", "role", "kv_token_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STARTUP_S_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    pool: str
    address: str
    description: _types_pb2.ModelDescription
    startup_s: float
    role: _worker_pb2.WorkerRole
    kv_token_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., pool: _Optional[str] = ..., address: _Optional[str] = ..., description: _Optional[_Union[_types_pb2.ModelDescription, _Mapping]] = ..., startup_s: _Optional[float] = ..., role: _Optional[_Union[_worker_pb2.WorkerRole, str]] = ..., kv_token_bytes: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("welcome", "drain", "set_limits", "preempt", "resume", "set_heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SET_LIMITS_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SET_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: JoinWelcome
    drain: Drain
    set_limits: SetLimits
    preempt: Preempt
    resume: Resume
    set_heartbeat: SetHeartbeat
    def __init__(self, welcome: _Optional[_Union[JoinWelcome, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., set_limits: _Optional[_Union[SetLimits, _Mapping]] = ..., preempt: _Optional[_Union[Preempt, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., set_heartbeat: _Optional[_Union[SetHeartbeat, _Mapping]] = ...) -> None: ...

class JoinWelcome(_message.Message):
    __slots__ = ("heartbeat_ms",)
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ms: int
    def __init__(self, heartbeat_ms: _Optional[int] = ...) -> None: ...

class SetHeartbeat(_message.Message):
    __slots__ = ("heartbeat_ms",)
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ms: int
    def __init__(self, heartbeat_ms: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace_ms",)
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    def __init__(self, grace_ms: _Optional[int] = ...) -> None: ...

class Preempt(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class SetLimits(_message.Message):
    __slots__ = ("chunk_tokens", "slots", "pair_tokens", "batch_chunk_tokens", "batch_sequences")
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PAIR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    chunk_tokens: int
    slots: int
    pair_tokens: float
    batch_chunk_tokens: int
    batch_sequences: int
    def __init__(self, chunk_tokens: _Optional[int] = ..., slots: _Optional[int] = ..., pair_tokens: _Optional[float] = ..., batch_chunk_tokens: _Optional[int] = ..., batch_sequences: _Optional[int] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("question",)
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    question: _types_pb2.UsageQuestion
    def __init__(self, question: _Optional[_Union[_types_pb2.UsageQuestion, _Mapping]] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: _types_pb2.UsageReport
    def __init__(self, report: _Optional[_Union[_types_pb2.UsageReport, _Mapping]] = ...) -> None: ...

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFleetResponse(_message.Message):
    __slots__ = ("workers", "queued_asks", "routers", "leases")
    class Worker(_message.Message):
        __slots__ = ("worker_id", "instance_id", "pool", "address", "load", "leases", "leased_tokens", "silent_s")
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        POOL_FIELD_NUMBER: _ClassVar[int]
        ADDRESS_FIELD_NUMBER: _ClassVar[int]
        LOAD_FIELD_NUMBER: _ClassVar[int]
        LEASES_FIELD_NUMBER: _ClassVar[int]
        LEASED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        SILENT_S_FIELD_NUMBER: _ClassVar[int]
        worker_id: str
        instance_id: str
        pool: str
        address: str
        load: _worker_pb2.Load
        leases: int
        leased_tokens: int
        silent_s: float
        def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., pool: _Optional[str] = ..., address: _Optional[str] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., leases: _Optional[int] = ..., leased_tokens: _Optional[int] = ..., silent_s: _Optional[float] = ...) -> None: ...
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ASKS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[GetFleetResponse.Worker]
    queued_asks: int
    routers: int
    leases: int
    def __init__(self, workers: _Optional[_Iterable[_Union[GetFleetResponse.Worker, _Mapping]]] = ..., queued_asks: _Optional[int] = ..., routers: _Optional[int] = ..., leases: _Optional[int] = ...) -> None: ...
