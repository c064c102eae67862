"""HTTP/2, one frame at a time: for what no well-behaved library would send.

`Peer` is a worker that speaks gRPC by hand, so that a test can reset its stream or say GOAWAY at a chosen moment;
`Http2Request` is a client of one request that leaves by RST_STREAM. Both know just enough of the protocol for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from headrace.v1 import worker_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8, 0x9
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1

#: Error codes of RST_STREAM and GOAWAY.
NO_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 0x0, 0x6, 0x7, 0x8
#: Of a frame, unless the other side allows more.
LARGEST_FRAME = 2**14
LARGE_WINDOW = 2**30


@dataclass(frozen=True)
class Frame:
    """One frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    def encoded(self) -> bytes:
        head = struct.pack(">I", len(self.payload))[1:] + bytes([self.kind, self.flags])
        return head + struct.pack(">I", self.stream) + self.payload


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """The next frame. Raises IncompleteReadError at the connection's end."""
    head = await reader.readexactly(9)
    size = int.from_bytes(head[:3], "big")
    return Frame(head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF, await reader.readexactly(size))


def header_block(*pairs: tuple[str, str]) -> bytes:
    """Headers in the plainest form of HPACK: literals without indexing or compression (all shorter than 127)."""
    block = b""
    for name, value in pairs:
        block += b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


class Connection:
    """Frames over one socket; answers SETTINGS and PING by itself and gives the other side all the window it wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, kind: int, stream: int = 0, payload: bytes = b"", flags: int = 0) -> None:
        self.writer.write(Frame(kind, flags, stream, payload).encoded())

    @classmethod
    async def open(cls, address: str) -> Connection:
        """A client's, with prior knowledge."""
        host, port = address.rsplit(":", 1)
        connection = cls(*await asyncio.open_connection(host, int(port)))
        connection.writer.write(PREFACE)
        connection.begin()
        return connection

    def begin(self) -> None:
        self.send(SETTINGS, payload=struct.pack(">HI", 0x4, LARGE_WINDOW))
        self.send(WINDOW_UPDATE, payload=struct.pack(">I", LARGE_WINDOW))

    def reset(self, stream: int, code: int) -> None:
        self.send(RST_STREAM, stream, struct.pack(">I", code))

    def go_away(self, last_stream: int, code: int = NO_ERROR) -> None:
        self.send(GOAWAY, payload=struct.pack(">II", last_stream, code))

    async def frames(self) -> AsyncIterator[Frame]:
        """What the other side sends, until the connection ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                frame = await read_frame(self.reader)
                if frame.kind == SETTINGS and not frame.flags & ACK:
                    self.send(SETTINGS, flags=ACK)
                elif frame.kind == PING and not frame.flags & ACK:
                    self.send(PING, payload=frame.payload, flags=ACK)
                else:
                    yield frame

    def close(self) -> None:
        self.writer.transport.abort()


class Http2Request:
    """One POST over HTTP/2 with prior knowledge."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._frames = connection.frames()

    @classmethod
    async def open(
        cls,
        address: str,
        path: str,
        body: bytes,
        headers: Sequence[tuple[str, str]] = (("content-type", "application/json"),),
    ) -> Http2Request:
        connection = await Connection.open(address)
        pseudo = ((":method", "POST"), (":scheme", "http"), (":authority", address), (":path", path))
        connection.send(HEADERS, 1, header_block(*pseudo, *headers), END_HEADERS)
        connection.send(DATA, 1, body, END_STREAM)
        await connection.writer.drain()
        return cls(connection)

    async def data(self, timeout_s: float = 10.0) -> bytes:
        """The next bytes of the body; empty at its end."""
        async with asyncio.timeout(timeout_s):
            async for frame in self._frames:
                if frame.kind == DATA and frame.payload:
                    return frame.payload
                if frame.kind == RST_STREAM or (frame.flags & END_STREAM and frame.kind in (DATA, HEADERS)):
                    return b""
        return b""

    def leave(self) -> None:
        """Resets the stream; the connection stays."""
        self.connection.reset(1, CANCEL)

    def close(self) -> None:
        self.connection.close()


class Peer:
    """A worker's gRPC server made of single frames: welcomes, and hands each submission to the test."""

    def __init__(self) -> None:
        self.port = 0
        #: (connection, stream, submission), as they come.
        self.submits: asyncio.Queue[tuple[Connection, int, worker_pb2.Submit]] = asyncio.Queue()
        self.connections: list[Connection] = []
        #: Streams are reset with this instead of being welcomed.
        self.refuse: int | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Peer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self.connections:
            connection.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @staticmethod
    def say(connection: Connection, stream: int, message: worker_pb2.RunResponse) -> None:
        """One gRPC message in one DATA frame."""
        raw = message.SerializeToString()
        connection.send(DATA, stream, b"\x00" + struct.pack(">I", len(raw)) + raw)

    def tell(self, connection: Connection, stream: int, submit: worker_pb2.Submit, index: int, ids: bytes) -> None:
        """Ids of the first choice."""
        delta = worker_pb2.TokenDelta(request=submit.request, epoch=submit.epoch, first_index=index, ids=list(ids))
        if index == 0:
            delta.cached_prompt_tokens = 0
        self.say(connection, stream, worker_pb2.RunResponse(iteration=index + 1, deltas=[delta]))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        connection = Connection(reader, writer)
        self.connections.append(connection)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readexactly(len(PREFACE))
            connection.begin()
            received: dict[int, bytes] = {}
            async for frame in connection.frames():
                if frame.kind == HEADERS:
                    self._welcome(connection, frame.stream)
                elif frame.kind == DATA:
                    rest = received.get(frame.stream, b"") + frame.payload
                    while len(rest) >= 5 and len(rest) >= 5 + (size := int.from_bytes(rest[1:5], "big")):
                        request = worker_pb2.RunRequest.FromString(rest[5 : 5 + size])
                        rest = rest[5 + size :]
                        for submit in request.submits:
                            await self.submits.put((connection, frame.stream, submit))
                    received[frame.stream] = rest
        connection.close()

    def _welcome(self, connection: Connection, stream: int) -> None:
        if self.refuse is not None:
            connection.reset(stream, self.refuse)
            return
        headers = header_block((":status", "200"), ("content-type", "application/grpc"))
        connection.send(HEADERS, stream, headers, END_HEADERS)
        self.say(connection, stream, self.welcome)

    #: The first message on every stream; the test says who this is.
    welcome = worker_pb2.RunResponse()
