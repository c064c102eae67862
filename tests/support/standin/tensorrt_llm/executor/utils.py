"""Errors of the executor."""


class RequestError(RuntimeError):
    """One request failed; the engine goes on."""


class CppExecutorError(RuntimeError):
    """The engine failed."""
