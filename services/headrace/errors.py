"""What can go wrong, as one tree.

::

    HeadraceError
    ├── ConfigError      a setting is wrong; the process stops before it opens a port
    ├── ModelError       a model's files cannot be had or read
    └── EngineError      an engine refused a request or broke

Refusals that a core foresees are values (``headrace.v1.Error`` with a code from a closed list), not exceptions;
exceptions are for bugs and the outside world. ``gateway_rs/src/error.rs`` is what the router says to clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.v1 import types_pb2


class HeadraceError(Exception):
    """Base of all; its text is written for people and safe to show."""


class ConfigError(HeadraceError):
    """A setting is wrong: the text names the key, the limit and the value."""


class ModelError(HeadraceError):
    """A model's files cannot be had or read."""


class EngineError(HeadraceError):
    """An engine refused a request or broke."""


def error(
    code: types_pb2.ErrorCode, message: str, *, retryable: bool = False, retry_after_ms: int = 0, param: str = ""
) -> types_pb2.Error:
    """A refusal as a value."""
    # Here, so that a process without Python's gRPC (the router) needs none of it for the exceptions.
    from headrace.v1 import types_pb2

    return types_pb2.Error(code=code, message=message, retryable=retryable, retry_after_ms=retry_after_ms, param=param)
