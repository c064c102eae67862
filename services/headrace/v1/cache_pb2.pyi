from headrace.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupRequest(_message.Message):
    __slots__ = ("asks", "fills", "abandons", "withdrawals")
    class Ask(_message.Message):
        __slots__ = ("ask", "key", "trace")
        ASK_FIELD_NUMBER: _ClassVar[int]
        KEY_FIELD_NUMBER: _ClassVar[int]
        TRACE_FIELD_NUMBER: _ClassVar[int]
        ask: int
        key: bytes
        trace: _types_pb2.TraceContext
        def __init__(self, ask: _Optional[int] = ..., key: _Optional[bytes] = ..., trace: _Optional[_Union[_types_pb2.TraceContext, _Mapping]] = ...) -> None: ...
    class Fill(_message.Message):
        __slots__ = ("ask", "answer")
        ASK_FIELD_NUMBER: _ClassVar[int]
        ANSWER_FIELD_NUMBER: _ClassVar[int]
        ask: int
        answer: Answer
        def __init__(self, ask: _Optional[int] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ...) -> None: ...
    ASKS_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    ABANDONS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWALS_FIELD_NUMBER: _ClassVar[int]
    asks: _containers.RepeatedCompositeFieldContainer[LookupRequest.Ask]
    fills: _containers.RepeatedCompositeFieldContainer[LookupRequest.Fill]
    abandons: _containers.RepeatedScalarFieldContainer[int]
    withdrawals: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, asks: _Optional[_Iterable[_Union[LookupRequest.Ask, _Mapping]]] = ..., fills: _Optional[_Iterable[_Union[LookupRequest.Fill, _Mapping]]] = ..., abandons: _Optional[_Iterable[int]] = ..., withdrawals: _Optional[_Iterable[int]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("replies",)
    class Reply(_message.Message):
        __slots__ = ("ask", "hit", "lead")
        ASK_FIELD_NUMBER: _ClassVar[int]
        HIT_FIELD_NUMBER: _ClassVar[int]
        LEAD_FIELD_NUMBER: _ClassVar[int]
        ask: int
        hit: Answer
        lead: LookupResponse.Lead
        def __init__(self, ask: _Optional[int] = ..., hit: _Optional[_Union[Answer, _Mapping]] = ..., lead: _Optional[_Union[LookupResponse.Lead, _Mapping]] = ...) -> None: ...
    class Lead(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[LookupResponse.Reply]
    def __init__(self, replies: _Optional[_Iterable[_Union[LookupResponse.Reply, _Mapping]]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("prompt_tokens", "choices")
    class Choice(_message.Message):
        __slots__ = ("ids", "logprobs", "outcome")
        IDS_FIELD_NUMBER: _ClassVar[int]
        LOGPROBS_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        ids: _containers.RepeatedScalarFieldContainer[int]
        logprobs: _containers.RepeatedCompositeFieldContainer[_types_pb2.TokenLogprobs]
        outcome: _types_pb2.Outcome
        def __init__(self, ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_types_pb2.TokenLogprobs, _Mapping]]] = ..., outcome: _Optional[_Union[_types_pb2.Outcome, str]] = ...) -> None: ...
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    choices: _containers.RepeatedCompositeFieldContainer[Answer.Choice]
    def __init__(self, prompt_tokens: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[Answer.Choice, _Mapping]]] = ...) -> None: ...

class PublishBlocksRequest(_message.Message):
    __slots__ = ("hello", "events", "snapshot")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    hello: BlocksHello
    events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
    snapshot: BlockSnapshot
    def __init__(self, hello: _Optional[_Union[BlocksHello, _Mapping]] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ..., snapshot: _Optional[_Union[BlockSnapshot, _Mapping]] = ...) -> None: ...

class BlocksHello(_message.Message):
    __slots__ = ("worker_id", "instance_id", "pool", "block_tokens", "oldest_sequence", "next_sequence")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    instance_id: str
    pool: str
    block_tokens: int
    oldest_sequence: int
    next_sequence: int
    def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., pool: _Optional[str] = ..., block_tokens: _Optional[int] = ..., oldest_sequence: _Optional[int] = ..., next_sequence: _Optional[int] = ...) -> None: ...

class BlockEvent(_message.Message):
    __slots__ = ("sequence", "stored", "removed", "cleared")
    class Stored(_message.Message):
        __slots__ = ("parent", "hashes")
        PARENT_FIELD_NUMBER: _ClassVar[int]
        HASHES_FIELD_NUMBER: _ClassVar[int]
        parent: int
        hashes: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, parent: _Optional[int] = ..., hashes: _Optional[_Iterable[int]] = ...) -> None: ...
    class Removed(_message.Message):
        __slots__ = ("hashes",)
        HASHES_FIELD_NUMBER: _ClassVar[int]
        hashes: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, hashes: _Optional[_Iterable[int]] = ...) -> None: ...
    class Cleared(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: BlockEvent.Stored
    removed: BlockEvent.Removed
    cleared: BlockEvent.Cleared
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[_Union[BlockEvent.Stored, _Mapping]] = ..., removed: _Optional[_Union[BlockEvent.Removed, _Mapping]] = ..., cleared: _Optional[_Union[BlockEvent.Cleared, _Mapping]] = ...) -> None: ...

class BlockSnapshot(_message.Message):
    __slots__ = ("next_sequence", "chains")
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    chains: _containers.RepeatedCompositeFieldContainer[BlockEvent.Stored]
    def __init__(self, next_sequence: _Optional[int] = ..., chains: _Optional[_Iterable[_Union[BlockEvent.Stored, _Mapping]]] = ...) -> None: ...

class PublishBlocksResponse(_message.Message):
    __slots__ = ("resume_from", "snapshot")
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    resume_from: int
    snapshot: bool
    def __init__(self, resume_from: _Optional[int] = ..., snapshot: bool = ...) -> None: ...

class WatchBlocksRequest(_message.Message):
    __slots__ = ("known", "lost")
    class Known(_message.Message):
        __slots__ = ("instance_id", "next_sequence")
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
        instance_id: str
        next_sequence: int
        def __init__(self, instance_id: _Optional[str] = ..., next_sequence: _Optional[int] = ...) -> None: ...
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    known: _containers.RepeatedCompositeFieldContainer[WatchBlocksRequest.Known]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, known: _Optional[_Iterable[_Union[WatchBlocksRequest.Known, _Mapping]]] = ..., lost: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchBlocksResponse(_message.Message):
    __slots__ = ("news",)
    class News(_message.Message):
        __slots__ = ("instance_id", "gone", "snapshot", "events")
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        GONE_FIELD_NUMBER: _ClassVar[int]
        SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
        EVENTS_FIELD_NUMBER: _ClassVar[int]
        instance_id: str
        gone: bool
        snapshot: BlockSnapshot
        events: _containers.RepeatedCompositeFieldContainer[BlockEvent]
        def __init__(self, instance_id: _Optional[str] = ..., gone: bool = ..., snapshot: _Optional[_Union[BlockSnapshot, _Mapping]] = ..., events: _Optional[_Iterable[_Union[BlockEvent, _Mapping]]] = ...) -> None: ...
    NEWS_FIELD_NUMBER: _ClassVar[int]
    news: _containers.RepeatedCompositeFieldContainer[WatchBlocksResponse.News]
    def __init__(self, news: _Optional[_Iterable[_Union[WatchBlocksResponse.News, _Mapping]]] = ...) -> None: ...

class FindPrefixRequest(_message.Message):
    __slots__ = ("pool", "hashes")
    POOL_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    pool: str
    hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pool: _Optional[str] = ..., hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class FindPrefixResponse(_message.Message):
    __slots__ = ("holders",)
    class Holder(_message.Message):
        __slots__ = ("worker_id", "instance_id", "blocks")
        WORKER_ID_FIELD_NUMBER: _ClassVar[int]
        INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
        BLOCKS_FIELD_NUMBER: _ClassVar[int]
        worker_id: str
        instance_id: str
        blocks: int
        def __init__(self, worker_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[FindPrefixResponse.Holder]
    def __init__(self, holders: _Optional[_Iterable[_Union[FindPrefixResponse.Holder, _Mapping]]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("answers", "answer_bytes", "hits", "misses", "flights", "waiters", "blocks", "workers", "block_bytes", "watchers")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    FLIGHTS_FIELD_NUMBER: _ClassVar[int]
    WAITERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WATCHERS_FIELD_NUMBER: _ClassVar[int]
    answers: int
    answer_bytes: int
    hits: int
    misses: int
    flights: int
    waiters: int
    blocks: int
    workers: int
    block_bytes: int
    watchers: int
    def __init__(self, answers: _Optional[int] = ..., answer_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., flights: _Optional[int] = ..., waiters: _Optional[int] = ..., blocks: _Optional[int] = ..., workers: _Optional[int] = ..., block_bytes: _Optional[int] = ..., watchers: _Optional[int] = ...) -> None: ...
