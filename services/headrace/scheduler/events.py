"""What may happen to the scheduler: the inputs of ``core.step``.

Values only. A router or worker is named by its *link*, a number that the driver gives to each stream and never uses
again: when a peer comes back on a new stream before the old one is seen to be broken, the two can't be confused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.v1 import types_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class Ask:
    """One request that wants to run: ``PlaceRequest.Ask`` with its deadline made absolute."""

    number: int
    request_id: str
    #: In order of preference.
    pools: tuple[str, ...]
    prompt_tokens: int
    max_tokens: int = 0
    choices: int = 1
    request_class: int = types_pb2.REQUEST_CLASS_STANDARD
    #: On the core's clock; None = none.
    deadline_s: float | None = None
    #: 0 = unknown.
    expected_output_tokens: int = 0
    avoid_instances: frozenset[str] = frozenset()
    tenant: str = ""
    session_id: str = ""
    epoch: int = 1
    block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunningLease:
    """A lease that a router holds from before its stream, or the scheduler, broke."""

    lease: int
    instance_id: str
    request_id: str = ""
    tenant: str = ""
    prompt_tokens: int = 0
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouterJoined:
    """A router opened its Place stream. What it doesn't announce of its earlier leases is over."""

    link: int
    router_id: str
    running: tuple[RunningLease, ...] = ()


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A router's Place stream ended."""

    link: int


@dataclass(frozen=True, slots=True)
class Asked:
    link: int
    ask: Ask


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The client of an ask left; no answer is owed any more."""

    link: int
    ask: int


@dataclass(frozen=True, slots=True)
class Released:
    """The end of a lease, with its books."""

    link: int
    lease: int
    outcome: int = types_pb2.OUTCOME_UNSPECIFIED
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    kv_block_s: float = 0.0
    #: 0 = no first token came.
    ttft_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker opened its Join stream. It takes nothing before its first report says that it is ready."""

    link: int
    worker_id: str
    instance_id: str
    pool: str
    address: str
    description: types_pb2.ModelDescription = field(default_factory=types_pb2.ModelDescription)
    startup_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A heartbeat with the worker's load."""

    link: int
    load: worker_pb2.Load


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's Join stream ended."""

    link: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing but that time has passed."""


Event = RouterJoined | RouterLost | Asked | Withdrawn | Released | WorkerJoined | WorkerReported | WorkerLost | Tick
