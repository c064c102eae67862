"""What can go wrong, as one tree, and the one table that turns it into a gRPC status.

::

    HeadraceError
    ├── ConfigError      a setting is wrong; the process stops before it opens a port
    ├── ModelError       a model's files cannot be had or read
    └── EngineError      an engine refused a request or broke

Refusals that a core foresees are values (``headrace.v1.Error`` with a code from a closed list), not exceptions;
exceptions are for bugs and the outside world. ``gateway_rs/src/error.rs`` is this table's twin for what the router says
to clients.
"""

from __future__ import annotations

import grpc

from headrace.v1 import types_pb2


class HeadraceError(Exception):
    """Base of all; its text is written for people and safe to show."""


class ConfigError(HeadraceError):
    """A setting is wrong: the text names the key, the limit and the value."""


class ModelError(HeadraceError):
    """A model's files cannot be had or read."""


class EngineError(HeadraceError):
    """An engine refused a request or broke."""


#: Each code of the closed list, and the status by which it leaves a gRPC service.
STATUS: dict[types_pb2.ErrorCode, grpc.StatusCode] = {
    types_pb2.ERROR_CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    types_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    types_pb2.ERROR_CODE_MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    types_pb2.ERROR_CODE_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    types_pb2.ERROR_CODE_UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    types_pb2.ERROR_CODE_PERMISSION_DENIED: grpc.StatusCode.PERMISSION_DENIED,
    types_pb2.ERROR_CODE_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    types_pb2.ERROR_CODE_RATE_LIMIT_EXCEEDED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    types_pb2.ERROR_CODE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_CODE_DRAINING: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_CODE_DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
    types_pb2.ERROR_CODE_WORKER_LOST: grpc.StatusCode.UNAVAILABLE,
    types_pb2.ERROR_CODE_UNSUPPORTED: grpc.StatusCode.INVALID_ARGUMENT,
    types_pb2.ERROR_CODE_CANCELLED: grpc.StatusCode.CANCELLED,
    types_pb2.ERROR_CODE_INTERNAL: grpc.StatusCode.INTERNAL,
}


def error(
    code: types_pb2.ErrorCode, message: str, *, retryable: bool = False, retry_after_ms: int = 0, param: str = ""
) -> types_pb2.Error:
    """A refusal as a value."""
    return types_pb2.Error(code=code, message=message, retryable=retryable, retry_after_ms=retry_after_ms, param=param)
