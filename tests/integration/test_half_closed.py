"""Clients that end their side of a connection, over HTTP/1 and HTTP/2: who has left, and who is owed an answer."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.v1 import router_pb2, types_pb2
from tests.support.http2 import DATA, END_STREAM, HEADERS, Http2Request
from tests.support.mesh import Lab
from tests.support.scripted import Entry

MODES = ("plain", "stream")
#: Closing a socket then resets it.
LINGER_NOT = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def request(mode: str) -> bytes:
    """The whole request of one of OpenAI's chats."""
    body = {"model": "toy", "messages": [{"role": "user", "content": "go"}], "stream": mode == "stream"}
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    yield reader, writer
    writer.transport.abort()


@pytest.mark.parametrize("begun", [False, True], ids=["before the answer", "in mid-answer"])
@pytest.mark.parametrize("mode", MODES)
async def test_who_says_no_more_has_left(lab: Lab, mode: str, begun: bool) -> None:
    """Also while nothing comes that could be written."""
    await lab.worker(slots=1)
    lab.play("'a'; HANG" if begun else "HANG")
    async with connected(lab.mesh.http) as (reader, writer):
        writer.write(request(mode))
        entry = await lab.entry()
        if begun and mode == "stream":
            async with asyncio.timeout(10):
                await reader.readuntil(b'"content":"a"')
        writer.write_eof()
        await entry.ended()
    await is_cancelled(lab, entry)


# --- HTTP/2, where each request is ended by itself --------------------------------------------------------------------

GRPC_HEADERS = (("content-type", "application/grpc"), ("te", "trailers"))


async def ask(lab: Lab, door: str) -> Http2Request:
    """One request that is ended (END_STREAM) with its last byte, as HTTP/2's clients do."""
    if door == "http":
        body = json.dumps({"model": "toy", "stream": True, "messages": [{"role": "user", "content": "go"}]}).encode()
        return await Http2Request.open(lab.mesh.http, "/v1/chat/completions", body)
    message = router_pb2.GenerateRequest(model="toy", text="go").SerializeToString()
    body = b"\x00" + struct.pack(">I", len(message)) + message
    return await Http2Request.open(lab.mesh.grpc, "/headrace.v1.InferenceService/Generate", body, GRPC_HEADERS)


@pytest.mark.parametrize("door", ["http", "grpc"])
async def test_a_request_that_is_ended_gets_the_whole_answer(lab: Lab, door: str) -> None:
    await lab.worker()
    lab.play("'a'; 'b'; END", gated=True)
    client = await ask(lab, door)
    entry = await lab.entry()
    entry.release(3)
    seen, over = b"", False
    async with asyncio.timeout(10):
        async for frame in client.connection.frames():
            seen += frame.payload if frame.kind == DATA else b""
            over = bool(frame.flags & END_STREAM) and frame.kind in (DATA, HEADERS)
            if over:
                break
    assert over
    if door == "http":
        assert b'"content":"a"' in seen
        assert b'"content":"b"' in seen
        assert seen.endswith(b"data: [DONE]\n\n")
    else:
        events = messages(seen)
        kinds = [event.WhichOneof("event") for event in events]
        assert (kinds[0], kinds[-2:]) == ("started", ["finish", "usage"])
        assert "".join(event.delta.text for event in events) == "ab"
    client.close()


@pytest.mark.parametrize("how", ["no more on the connection", "reset of the stream", "reset of the connection"])
@pytest.mark.parametrize("door", ["http", "grpc"])
async def test_a_client_of_http2_that_goes_is_cancelled(lab: Lab, door: str, how: str) -> None:
    await lab.worker(slots=1)
    lab.play("'a'; HANG")
    client = await ask(lab, door)
    entry = await lab.entry()
    assert await client.data()
    if how == "no more on the connection":
        client.connection.writer.write_eof()
    elif how == "reset of the stream":
        client.leave()
    else:
        client.connection.writer.get_extra_info("socket").setsockopt(*LINGER_NOT)
        client.close()
    await entry.ended()
    await is_cancelled(lab, entry)
    client.close()


def messages(data: bytes) -> list[router_pb2.GenerateResponse]:
    """The gRPC messages in there."""
    found = []
    while data:
        size = int.from_bytes(data[1:5], "big")
        found.append(router_pb2.GenerateResponse.FromString(data[5 : 5 + size]))
        data = data[5 + size :]
    return found


async def is_cancelled(lab: Lab, entry: Entry) -> None:
    assert entry.cancelled
    await lab.nothing_remains()
    assert [release.outcome for release in lab.books.released] == [types_pb2.OUTCOME_CANCELLED]
