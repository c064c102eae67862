"""Values over a socket between a worker and the child in which its engine runs: a length, then a pickle.

Both ends are the same program on one machine, so pickle is as good a form as any and the quickest. A child's death
closes its end whatever killed it, and the other end hears of it at once.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

_HEAD = struct.Struct("<I")


def pack(value: object) -> bytes:
    """A frame."""
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body)) + body


def read(sock: socket.socket) -> Any:
    """The next value from a blocking socket. Raises EOFError."""
    (size,) = _HEAD.unpack(_exactly(sock, _HEAD.size))
    return pickle.loads(_exactly(sock, size))


def _exactly(sock: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        part = sock.recv(size - len(got))
        if not part:
            raise EOFError("the other end is gone")
        got += part
    return bytes(got)


class Frames(asyncio.Protocol):
    """One end on an event loop."""

    def __init__(self, on_value: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_value = on_value
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()

    def send(self, value: object) -> None:
        """Writes it; nothing happens when the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(value))

    def close(self) -> None:
        """No more."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        begin, end = 0, len(buffer)
        while end - begin >= _HEAD.size:
            (size,) = _HEAD.unpack_from(buffer, begin)
            after = begin + _HEAD.size + size
            if after > end:
                break
            value = pickle.loads(memoryview(buffer)[begin + _HEAD.size : after])
            begin = after
            self._on_value(value)
        del buffer[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()
