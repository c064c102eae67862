"""HTTP/1.1 and server-sent events from the client's side, as lean as a load generator wants them.

:class:`ResponseParser` and :class:`EventParser` are pure: bytes in, what they mean out, whatever way the bytes were
cut. :class:`Connection` is their driver over one socket: one request at a time, kept alive between them, one await for
each read rather than for each event.

Its place: ``bench.py``. What it leaves to others: TLS, redirects, compression, proxies, pipelining. An endpoint that
wants those is not what is being measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from headrace.errors import HeadraceError

#: A status line with all headers.
MAX_HEAD_BYTES = 64 * 1024
#: One line of a stream; an event with many log-probabilities is some tens of kilobytes.
MAX_LINE_BYTES = 16 * 2**20
#: The body of an answer that is no stream.
MAX_BODY_BYTES = 16 * 2**20

_READ_BYTES = 64 * 1024
_NO_BODY = (204, 304)


class HttpError(HeadraceError):
    """The peer doesn't speak HTTP as it should, or went away in mid-answer."""


@dataclass
class ResponseParser:
    """One response. ``feed`` returns the body's bytes that are there; ``done`` says that it is complete."""

    status: int = 0
    #: Names in lower case; of a repeated one the last.
    headers: dict[str, str] = field(default_factory=dict)
    done: bool = False
    #: The connection may be used for a further request.
    reusable: bool = False
    _buffer: bytes = b""
    # What of the buffer was taken already. It is cut off once a feed, not once a chunk.
    _at: int = 0
    # What is read next: "head", then "length", "close", or "size" and "chunk" and "chunk end" in turn, then "trailer".
    _state: str = "head"
    _left: int = 0

    def feed(self, data: bytes) -> bytes:
        """Take what came from the socket. Raises HttpError."""
        self._buffer = self._buffer + data if self._buffer else data
        body: list[bytes] = []
        while not self.done and self._step(body):
            pass
        self._buffer, self._at = self._buffer[self._at :], 0
        return body[0] if len(body) == 1 else b"".join(body)

    def end(self) -> None:
        """The peer closed the connection. Raises HttpError when that is too early."""
        if self._state == "close":
            self.done = True
        if not self.done:
            raise HttpError("the connection was closed in mid-answer" if self.status else "the connection was closed")

    def _step(self, body: list[bytes]) -> bool:
        """Take one piece off the buffer; False when it isn't whole yet."""
        if self._state == "head":
            return self._head()
        if self._state == "size":
            return self._size()
        if self._state == "trailer":
            return self._trailer()
        if self._state == "chunk end":
            return self._chunk_end()
        return self._body(body)

    def _body(self, body: list[bytes]) -> bool:
        if self._at == len(self._buffer):
            return False
        end = len(self._buffer) if self._state == "close" else min(self._at + self._left, len(self._buffer))
        body.append(self._buffer[self._at : end])
        self._left -= end - self._at
        self._at = end
        if self._left == 0 and self._state == "length":
            self.done = True
        elif self._left == 0 and self._state == "chunk":
            self._state = "chunk end"
        return True

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n", self._at)
        if (end if end >= 0 else len(self._buffer)) - self._at > MAX_HEAD_BYTES:
            raise HttpError(f"the answer's headers are larger than {MAX_HEAD_BYTES} bytes")
        if end < 0:
            return False
        lines = self._buffer[self._at : end].decode("latin-1").split("\r\n")
        self._at = end + 4
        found = re.match(r"HTTP/1\.([01]) (\d{3})( |$)", lines[0])
        if found is None:
            raise HttpError(f"not an HTTP/1.1 answer: {lines[0][:80]!r}")
        status = int(found[2])
        if status < 200:
            # An interim answer; the real one follows.
            return True
        self.status = status
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise HttpError(f"not an HTTP header: {line[:80]!r}")
            self.headers[name.lower()] = value.strip()
        self._begin_body(http_1_0=found[1] == "0")
        return True

    def _begin_body(self, *, http_1_0: bool) -> None:
        connection = self.headers.get("connection", "").lower()
        self.reusable = "close" not in connection and (not http_1_0 or "keep-alive" in connection)
        length = self.headers.get("content-length")
        if self.status in _NO_BODY:
            self.done = True
        elif self.headers.get("transfer-encoding", "").lower() == "chunked":
            self._state = "size"
        elif "transfer-encoding" in self.headers:
            raise HttpError(f"transfer encoding {self.headers['transfer-encoding']!r} is not understood")
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise HttpError(f"not a content length: {length[:80]!r}")
            self._state, self._left = "length", int(length)
            self.done = self._left == 0
        else:
            self._state, self.reusable = "close", False

    def _size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        text = line.partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", text):
            raise HttpError(f"not a chunk's size: {line[:80]!r}")
        self._left = int(text, 16)
        self._state = "chunk" if self._left else "trailer"
        return True

    def _chunk_end(self) -> bool:
        line = self._line()
        if line is None:
            return False
        if line:
            raise HttpError("a chunk is longer than its size says")
        self._state = "size"
        return True

    def _trailer(self) -> bool:
        line = self._line()
        if line is None:
            return False
        self.done = not line
        return True

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            if len(self._buffer) - self._at > MAX_HEAD_BYTES:
                raise HttpError("a line of the chunked body has no end")
            return None
        line = self._buffer[self._at : end]
        self._at = end + 2
        return line


_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventParser:
    """A ``text/event-stream``: ``feed`` returns the data of each event that is complete with these bytes."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._skip_newline = False

    def feed(self, data: bytes) -> list[str]:
        """Take bytes of the body. Raises HttpError when a line has no end."""
        if self._skip_newline and data:
            # The last bytes ended with CR; an LF now is the second half of that line's end.
            data = data.removeprefix(b"\n")
            self._skip_newline = False
        whole = self._rest + data if self._rest else data
        lines = whole.split(b"\n") if b"\r" not in whole else _LINE_END.split(whole)
        self._skip_newline = whole.endswith(b"\r")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE_BYTES:
            raise HttpError(f"an event's line is longer than {MAX_LINE_BYTES} bytes")
        events = []
        for line in lines:
            if line[:5] == b"data:":
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data).decode("utf-8", "replace"))
                self._data = []
        return events


class Connection:
    """One socket to one server; one request at a time. It connects when needed and again when it was closed."""

    def __init__(self, host: str, port: int, *, tls: ssl.SSLContext | None = None, server_name: str = "") -> None:
        """In plain text without ``tls``. ``server_name``: expected in the server's certificate instead of the host."""
        self._host = host
        self._port = port
        self._tls = tls
        self._server_name = (server_name or host) if tls is not None else None
        self._socket: Path | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._first = b""
        #: Of the answer under way, or the last one.
        self.response = ResponseParser()

    @classmethod
    def to_socket(cls, socket: Path) -> Self:
        """A connection to a server on this machine, by the path of its socket."""
        connection = cls("localhost", 0)
        connection._socket = socket
        return connection

    async def send(self, method: str, path: str, body: bytes = b"", headers: tuple[str, ...] = ()) -> None:
        """Write a request and read its answer up to the end of its head. Raises HttpError or OSError."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        head = (
            f"{method} {path} HTTP/1.1",
            f"Host: {host}:{self._port}",
            f"Content-Length: {len(body)}",
            *(("Content-Type: application/json",) if body else ()),
            *headers,
        )
        if self._reader is not None and self._reader.at_eof():
            # Kept too long: the server has closed it meanwhile. Later than here a request isn't sent again, as the
            # server may have read it.
            await self.close()
        if self._writer is None and self._socket is not None:
            self._reader, self._writer = await asyncio.open_unix_connection(self._socket, limit=_READ_BYTES)
        elif self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._host, self._port, limit=_READ_BYTES, ssl=self._tls, server_hostname=self._server_name
            )
        self.response = ResponseParser()
        self._writer.write("\r\n".join((*head, "", "")).encode() + body)
        await self._writer.drain()
        self._first = b""
        while not self.response.status:
            self._first = await self._read()

    async def _read(self) -> bytes:
        assert self._reader is not None
        data = await self._reader.read(_READ_BYTES)
        if not data:
            self.response.end()
            return b""
        return self.response.feed(data)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer's body as it comes. Raises HttpError or OSError.

        Whoever leaves it before the end must close the connection.
        """
        if self._first:
            yield self._first
        while not self.response.done:
            if piece := await self._read():
                yield piece
        if not self.response.reusable:
            await self.close()

    async def body(self) -> bytes:
        """The answer's body, whole. Raises HttpError or OSError."""
        parts: list[bytes] = []
        size = 0
        async for piece in self.pieces():
            parts.append(piece)
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise HttpError(f"the answer is larger than {MAX_BODY_BYTES} bytes")
        return b"".join(parts)

    async def close(self) -> None:
        """Drop the connection; an answer under way is given up, which the server sees. Safe to call again."""
        writer, self._reader, self._writer = self._writer, None, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
