"""The one table that turns a code of the closed list into a gRPC status; ``gateway_rs/src/error.rs`` is its twin.

Apart from ``errors.py`` because the router's process needs the exceptions, and no gRPC of Python's.
"""

from __future__ import annotations

import grpc

from headrace.v1 import types_pb2

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
    types_pb2.ERROR_CODE_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
}
