"""HTTP/1.1 answers and event streams, cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import fake_router as fake
from tests.support.fake_router import FakeHttpRouter

from headrace import sse
from headrace.sse import Connection, EventParser, HttpError, ResponseParser


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    """The data, cut at these places (taken modulo its length)."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def read(data: bytes, cuts: list[int]) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    body = b"".join([parser.feed(piece) for piece in pieces_of(data, cuts)])
    return parser, body


CUTS = st.lists(st.integers(0, 10_000), max_size=30)


@given(bodies=st.lists(st.binary(min_size=1, max_size=40), max_size=6), extension=st.booleans(), cuts=CUTS)
def test_a_chunked_body_is_the_same_however_it_is_cut(bodies: list[bytes], extension: bool, cuts: list[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A:b\r\n\r\n"
    sizes = [f"{len(body):X}{';a=b' if extension else ''}\r\n".encode() for body in bodies]
    chunks = [size + body + b"\r\n" for size, body in zip(sizes, bodies, strict=True)]
    parser, body = read(head + b"".join(chunks) + b"0\r\nTrailer: x\r\n\r\n", cuts)
    assert body == b"".join(bodies)
    assert parser.done
    assert parser.reusable
    assert (parser.status, parser.headers["x-a"]) == (200, "b")


@given(body=st.binary(max_size=100), cuts=CUTS)
def test_a_body_of_known_length_ends_with_it(body: bytes, cuts: list[int]) -> None:
    head = f"HTTP/1.1 404 Not Found\r\nCONTENT-LENGTH: {len(body)}\r\n\r\n".encode()
    parser, got = read(head + body, cuts)
    assert (got, parser.done, parser.status) == (body, True, 404)


def test_a_body_of_unknown_length_ends_with_the_connection() -> None:
    parser, body = read(b"HTTP/1.1 200 OK\r\n\r\nabc", [])
    assert (body, parser.done, parser.reusable) == (b"abc", False, False)
    parser.end()
    assert parser.done


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        ("HTTP/1.1 204 No Content\r\n\r\n", True),
        ("HTTP/1.1 200\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n", False),
        ("HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        ("HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n", True),
        ("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
    ],
)
def test_whether_the_connection_can_be_kept(head: str, reusable: bool) -> None:
    parser, body = read(head.encode(), [])
    assert (parser.done, parser.reusable, body) == (True, reusable, b"")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * (sse.MAX_HEAD_BYTES + 1),
        b"x" * (sse.MAX_HEAD_BYTES + 1),
    ],
)
def test_what_is_not_http_is_an_error(data: bytes) -> None:
    with pytest.raises(HttpError):
        read(data, [])


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc"])
def test_an_answer_cut_short_is_an_error(data: bytes) -> None:
    parser, _ = read(data, [])
    with pytest.raises(HttpError, match="closed"):
        parser.end()


LINE_ENDS = st.sampled_from(["\n", "\r\n", "\r"])
EVENT = st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), min_size=1, max_size=3)


@given(events=st.lists(EVENT, max_size=5), end=LINE_ENDS, space=st.booleans(), cuts=CUTS)
def test_events_are_the_same_however_the_stream_is_cut(
    events: list[list[str]], end: str, space: bool, cuts: list[int]
) -> None:
    # Without the space, a leading space of the data itself would be taken for it.
    lead = " " if space else ""
    expected = ["\n".join(lines if space else [line.removeprefix(" ") for line in lines]) for lines in events]
    text = f": comment{end}event: x{end}{end}" + "".join(
        "".join(f"data:{lead}{line}{end}" for line in lines) + f"id: 1{end}{end}" for lines in events
    )
    parser = EventParser()
    got = [event for piece in pieces_of(text.encode(), cuts) for event in parser.feed(piece)]
    assert got == expected


def test_a_line_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 10)
    with pytest.raises(HttpError, match="longer than 10 bytes"):
        EventParser().feed(b"data: 0123456789")


async def test_a_connection_is_kept_and_made_again_when_closed() -> None:
    async with FakeHttpRouter() as router:
        host, port = router.address.split(":")
        connection = Connection(host, int(port))
        for _ in range(2):
            await connection.send("GET", "/v1/models")
            assert b"toy" in await connection.body()
        assert router.connections == 1
        router.hang_up()
        # Until the connection has noticed that the server closed it.
        assert connection._reader is not None
        assert await connection._reader.read() == b""
        await connection.send("GET", "/v1/models")
        await connection.body()
        assert router.connections == 2
        # One that says that it will close is not kept at all.
        router.close = True
        for number in (2, 3):
            await connection.send("GET", "/v1/models")
            await connection.body()
            assert router.connections == number
        await connection.close()
        await connection.close()


async def test_an_answer_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_BODY_BYTES", 5)
    async with FakeHttpRouter(lambda _path, _body: [fake.http_response(200, b"0123456789")]) as router:
        host, port = router.address.split(":")
        connection = Connection(host, int(port))
        await connection.send("GET", "/")
        with pytest.raises(HttpError, match="larger than 5 bytes"):
            await connection.body()
        await connection.close()
