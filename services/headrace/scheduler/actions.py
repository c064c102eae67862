"""What the scheduler's core wants done: the outputs of ``core.step``, for the driver to carry out in order.

Each ask is answered by exactly one :class:`Granted` or :class:`Refused`, unless it was withdrawn or its router lost; at
most one :class:`Waits` comes before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Granted:
    """The ask may run there, under that lease, until a Released, the worker's loss or its router's."""

    link: int
    ask: int
    lease: int
    worker_id: str
    instance_id: str
    address: str
    queue_s: float
    pool: str
    request_class: int
    #: Tokens over all choices; 0 = no limit of its own.
    token_allowance: int = 0


@dataclass(frozen=True, slots=True)
class Waits:
    """The ask is in the queue."""

    link: int
    ask: int
    #: From 1.
    position: int
    #: 0 = not known.
    estimate_ms: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The ask won't run."""

    link: int
    ask: int
    code: types_pb2.ErrorCode
    message: str
    retryable: bool = False
    #: 0 = no hint.
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The worker is in the fleet."""

    link: int
    heartbeat_ms: int


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """The worker isn't taken in: end its stream."""

    link: int
    message: str
    #: This instance is joined already, on another stream.
    already_joined: bool = False


@dataclass(frozen=True, slots=True)
class WorkerDropped:
    """The worker is out by the scheduler's decision: end its stream."""

    link: int
    message: str


@dataclass(frozen=True, slots=True)
class RouterDropped:
    """The router broke the protocol, or was replaced: end its stream."""

    link: int
    message: str


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """What routers know of the fleet is no longer true: send them ``core.fleet.view()``."""


Action = Granted | Waits | Refused | Welcomed | JoinRefused | WorkerDropped | RouterDropped | FleetChanged
