"""HTTP at its edges: what clients that are not the SDK send."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

import pytest

from tests.integration.conftest import MODELS
from tests.support.clients import http
from tests.support.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    LARGEST_FRAME,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Connection,
    Http2Request,
    header_block,
)
from tests.support.mesh import Lab, Mesh

HEADER_TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One that is impatient with slow senders, and takes few requests at once."""
    router = {"header_timeout_s": HEADER_TIMEOUT_S, "max_open_requests": 4, "max_body_bytes": 4096}
    mesh = Mesh(tmp_path_factory.mktemp("edges"), MODELS, router=router).start()
    yield mesh
    mesh.stop()


def request(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


BODY = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "go"}]}).encode()


async def connect(lab: Lab) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = lab.mesh.http.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


async def response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line)
        return int(head.split()[1]), await reader.readexactly(length)


async def test_one_connection_serves_many_requests(lab: Lab) -> None:
    await lab.worker()
    reader, writer = await connect(lab)
    for text in ("one", "two", "three"):
        lab.play(f"'{text}'; END")
        writer.write(request(BODY, f"content-length: {len(BODY)}"))
        status, body = await response(reader)
        assert status == 200
        assert json.loads(body)["choices"][0]["message"]["content"] == text
    writer.close()


async def test_pipelined_requests_are_answered_in_order(lab: Lab) -> None:
    await lab.worker()
    lab.play("'one'; END")
    lab.play("'two'; END")
    reader, writer = await connect(lab)
    writer.write(request(BODY, f"content-length: {len(BODY)}") * 2)
    for text in ("one", "two"):
        _, body = await response(reader)
        assert json.loads(body)["choices"][0]["message"]["content"] == text
    writer.close()


async def test_a_body_in_chunks_after_an_expectation(lab: Lab) -> None:
    await lab.worker()
    reader, writer = await connect(lab)
    writer.write(request(b"", "transfer-encoding: chunked", "expect: 100-continue"))
    async with asyncio.timeout(5):
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
    for part in (BODY[:10], BODY[10:]):
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
    writer.write(b"0\r\n\r\n")
    status, _ = await response(reader)
    assert status == 200
    writer.close()


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"P",
        PREFACE[:-1],
        b"POST /v1/chat/comp",
        request(b"", "content-length: 1000"),
        request(b"{", "content-length: 1000"),
    ],
    ids=["nothing", "a letter", "half a preface", "half a line", "no body", "half a body"],
)
async def test_a_sender_that_stops_is_let_go(lab: Lab, start: bytes) -> None:
    reader, writer = await connect(lab)
    writer.write(start)
    async with asyncio.timeout(HEADER_TIMEOUT_S * 20):
        answer = await reader.read()
    assert not answer or answer.split()[1] in (b"400", b"408")
    writer.close()


@pytest.mark.parametrize("start", [b"", PREFACE[:5]], ids=["nothing", "half a preface"])
async def test_a_grpc_client_that_says_nothing_is_let_go(lab: Lab, start: bytes) -> None:
    host, port = lab.mesh.grpc.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(start)
    async with asyncio.timeout(HEADER_TIMEOUT_S * 20):
        with contextlib.suppress(ConnectionError):
            # Its own preface may come first; then the end.
            await reader.read()
    writer.close()


@pytest.mark.parametrize(
    "parts",
    [
        [b"POST /v1/chat/completions HTTP/1.1\r\n", *[b"x-%d: y\r\n" % number for number in range(10_000)]],
        [request(b"", "content-length: 4000"), *[b" "] * 4000],
    ],
    ids=["headers", "body"],
)
async def test_a_sender_that_dribbles_is_let_go(lab: Lab, parts: list[bytes]) -> None:
    """Each time a little, so that the connection is never idle: what counts is when all of it is there."""
    reader, writer = await connect(lab)
    sent = 0

    async def dribble() -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                sent += 1
                await asyncio.sleep(HEADER_TIMEOUT_S / 20)  # not a wait for a state: the pace is what is tested

    sender = asyncio.create_task(dribble())
    async with asyncio.timeout(HEADER_TIMEOUT_S * 20):
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert not answer or answer.split()[1] in (b"400", b"408")
    sender.cancel()
    assert sent < len(parts)
    writer.close()
    await lab.nothing_remains()


GENERATE = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/headrace.v1.InferenceService/Generate"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)


@pytest.mark.parametrize("dribbles", [False, True], ids=["half a message", "a byte at a time"])
async def test_a_grpc_message_that_does_not_come_is_not_waited_for(lab: Lab, dribbles: bool) -> None:
    connection = await Connection.open(lab.mesh.grpc)
    connection.send(HEADERS, 1, header_block(*GENERATE), END_HEADERS)
    connection.send(DATA, 1, b"\x00" + (1000).to_bytes(4, "big") + b"\x0a")

    async def dribble() -> None:
        while dribbles:
            connection.send(DATA, 1, b"\x00")
            await asyncio.sleep(HEADER_TIMEOUT_S / 20)  # not a wait for a state: the pace is what is tested

    sender = asyncio.create_task(dribble())
    async with asyncio.timeout(HEADER_TIMEOUT_S * 20):
        frames = connection.frames()
        while (frame := await anext(frames)).stream != 1 or not (frame.kind == RST_STREAM or frame.flags & END_STREAM):
            pass
    sender.cancel()
    connection.close()
    await lab.nothing_remains()


@pytest.mark.parametrize("door", ["http", "grpc"])
@pytest.mark.parametrize("kind", [DATA, HEADERS, SETTINGS], ids=["data", "headers", "settings"])
async def test_a_frame_over_the_limit_ends_its_connection_alone(lab: Lab, door: str, kind: int) -> None:
    await lab.worker()
    connection = await Connection.open(getattr(lab.mesh, door))
    connection.send(kind, 0 if kind == SETTINGS else 1, bytes(LARGEST_FRAME + 6), END_HEADERS if kind == HEADERS else 0)
    async with asyncio.timeout(10):
        seen = [frame async for frame in connection.frames()]
    assert int.from_bytes(seen[-1].payload[4:8], "big") == FRAME_SIZE_ERROR, seen
    assert seen[-1].kind == GOAWAY
    connection.close()
    (await lab.ask("go", mode="plain")).succeeded()


@pytest.mark.parametrize("door", ["http", "grpc"])
async def test_headers_without_an_end_are_not_gathered(lab: Lab, door: str) -> None:
    """Each frame is within its limit."""
    connection = await Connection.open(getattr(lab.mesh, door))
    connection.send(HEADERS, 1, header_block(*GENERATE))
    more = header_block(*((f"x-{number}", "y" * 120) for number in range(100)))
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 10_000 and not connection.reader.at_eof():
            connection.send(CONTINUATION, 1, more)
            await connection.writer.drain()
            sent += 1
    assert sent < 10_000
    connection.close()
    await lab.nothing_remains()


async def test_headers_over_the_limit_are_refused(lab: Lab) -> None:
    reader, writer = await connect(lab)
    with contextlib.suppress(ConnectionError):
        writer.write(request(b"", "content-length: 0", *[f"x-{number}: {'y' * 1000}" for number in range(99)]))
        await writer.drain()
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionError):
            answer = await reader.read()
            assert not answer or answer.split()[1] == b"431"
    writer.close()
    await lab.nothing_remains()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused(lab: Lab, chunked: bool) -> None:
    reader, writer = await connect(lab)
    big = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "x" * 5000}]}).encode()
    if chunked:
        body = f"{len(big):x}\r\n".encode() + big + b"\r\n0\r\n\r\n"
        writer.write(request(body, "transfer-encoding: chunked"))
    else:
        writer.write(request(big, f"content-length: {len(big)}"))
    status, body = await response(reader)
    assert status == 413
    assert json.loads(body)["error"]["code"] == "too_large"
    writer.close()


async def test_too_many_open_requests_are_refused_and_may_come_again(lab: Lab) -> None:
    await lab.worker(slots=8)
    for _ in range(4):
        lab.play("'a'; END", gated=True)
    held = [await lab.open("go", mode=mode) for mode in ("stream", "plain", "grpc", "stream")]
    entries = [await lab.entry(number) for number in range(4)]
    for mode in ("plain", "stream", "grpc"):
        failure = (await lab.ask("go", mode=mode)).refused(429, code="overloaded")
        assert failure.retry_after_s
    for entry in entries:
        entry.release(2)
    for answer in held:
        (await answer.rest()).succeeded()
    (await lab.ask("go", mode="plain")).succeeded()


async def test_http2_with_prior_knowledge(lab: Lab) -> None:
    await lab.worker()
    lab.play("'two'; END")
    client = await Http2Request.open(lab.mesh.http, "/v1/chat/completions", BODY)
    assert json.loads(await client.data())["choices"][0]["message"]["content"] == "two"
    client.close()


async def test_the_small_pages(lab: Lab) -> None:
    await lab.worker()
    for path in ("/health", "/live", "/metrics", "/v1/models"):
        assert (await http(lab.mesh.http, "GET", path))[0] == 200
