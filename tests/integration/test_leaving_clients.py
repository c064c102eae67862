"""The reader leaves, or stops reading: the generation ends with it, everything it held is given back, and the books say
what was made."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass

import pytest

from headrace.v1 import types_pb2
from tests.support.clients import STREAMED, BrokenBody, OpenAnswer
from tests.support.http2 import Http2Request
from tests.support.mesh import Lab
from tests.support.scripted import Entry, counting
from tests.support.waiting import eventually

#: How a client goes: mode, and whether its socket is reset.
WAYS = {
    "stream by FIN": ("stream", False),
    "stream by RST": ("stream", True),
    "plain by FIN": ("plain", False),
    "plain by RST": ("plain", True),
    "gRPC by cancelling": ("grpc", False),
}
STREAM_WAYS = [way for way, (mode, _) in WAYS.items() if mode != "plain"]


@dataclass
class Leaver:
    """A client that asks, and then goes."""

    answer: OpenAnswer
    reset: bool

    @classmethod
    async def come(cls, lab: Lab, way: str, text: str = "1234567", **params: object) -> Leaver:
        mode, reset = WAYS[way]
        return cls(await lab.open(text, params, mode=mode), reset)

    def go(self) -> None:
        self.answer.leave(reset=self.reset)


async def sent(entry: Entry, ids: int) -> None:
    async def enough() -> bool:
        return len(entry.sent) >= ids

    await eventually(enough, f"{ids} ids are sent")


@pytest.mark.parametrize("way", WAYS)
async def test_in_the_queue(lab: Lab, way: str) -> None:
    await lab.worker(slots=1)
    lab.play("'a'; END", gated=True)
    first = await lab.open("first", mode="stream")
    entry = await lab.entry()

    second = await Leaver.come(lab, way)

    async def queued() -> bool:
        return (await lab.fleet()).queued_asks == 1

    await eventually(queued, "the second is queued")
    second.go()

    async def withdrawn() -> bool:
        return (await lab.fleet()).queued_asks == 0

    await eventually(withdrawn, "the second has left the queue")
    entry.release(2)
    assert (await first.rest()).succeeded().text == "a"
    await lab.nothing_remains()
    assert len(lab.journal) == 1


@pytest.mark.parametrize("way", WAYS)
async def test_before_the_first_id(lab: Lab, way: str) -> None:
    await lab.worker(slots=1)
    lab.play("+20000; " + counting(10))
    client = await Leaver.come(lab, way)
    entry = await lab.entry()
    client.go()
    await entry.ended()
    assert entry.cancelled
    assert entry.sent == []
    await lab.nothing_remains()
    assert lab.books.released[0].outcome == types_pb2.OUTCOME_CANCELLED


@pytest.mark.parametrize("way", WAYS)
async def test_in_mid_answer(lab: Lab, way: str) -> None:
    await lab.worker("toy-long", slots=1)
    lab.play(counting(1000))
    client = await Leaver.come(lab, way)
    entry = await lab.entry()
    if WAYS[way][0] == "plain":
        await sent(entry, 3)
        seen = 0
    else:
        pieces = [await client.answer.piece() for _ in range(3)]
        seen = len("".join(piece or "" for piece in pieces))
    client.go()
    await entry.ended()
    assert entry.cancelled
    assert len(entry.sent) <= 25
    (release,) = await lab.released()
    assert release.outcome == types_pb2.OUTCOME_CANCELLED
    assert release.usage.prompt_tokens == 7
    assert seen <= release.usage.completion_tokens <= len(entry.sent)


async def test_by_resetting_an_http2_stream(lab: Lab) -> None:
    await lab.worker("toy-long", slots=1)
    lab.play(counting(1000))
    body = {"model": "toy-long", "stream": True, "messages": [{"role": "user", "content": "1234567"}]}
    client = await Http2Request.open(lab.mesh.http, "/v1/chat/completions", json.dumps(body).encode())
    entry = await lab.entry()
    seen = b""
    while b'"content":"2"' not in seen:
        seen += await client.data()
    client.leave()
    await entry.ended()
    assert entry.cancelled
    assert len(entry.sent) <= 25
    await lab.nothing_remains()
    client.close()


@pytest.mark.parametrize("way", WAYS)
async def test_all_choices_end(lab: Lab, way: str) -> None:
    await lab.worker("toy-long", slots=3)
    lab.play(counting(1000))
    client = await Leaver.come(lab, way, n=3)
    entry = await lab.entry()
    await sent(entry, 6)
    client.go()
    await entry.ended()
    assert len(entry.choices) == 3
    assert entry.cancelled
    assert all(len(choice.sent) <= 25 for choice in entry.choices)


@pytest.mark.parametrize("way", WAYS)
async def test_after_the_worker_is_done_but_before_the_client_read_it(lab: Lab, way: str) -> None:
    await lab.worker()
    lab.play("'abc'; END")
    client = await Leaver.come(lab, way)
    await (await lab.entry()).ended()
    client.go()
    await lab.nothing_remains()
    assert len(lab.books.released) == 1


@pytest.mark.parametrize("mode", STREAMED)
async def test_a_client_that_stops_reading_is_bounded(lab: Lab, mode: str) -> None:
    """100,000 ids of a hundred bytes for somebody who does not read, beside somebody who does."""
    await lab.worker("toy-long", slots=2)
    step = f"[{' '.join(['1000'] * 20)}]"
    lab.bench.play_for("slow", "; ".join([step] * 5000) + "; END:length")
    lab.bench.play_for("other", "'a'; 'b'; 'c'; END", gated=True)
    router = lab.mesh.processes["router"]
    before = router.rss_bytes()
    slow = await lab.open("slow", mode=mode, receive_buffer=4096)
    await slow.piece()
    entry = await lab.entry()
    other = await lab.open("other", mode="stream")
    waiting = await lab.entry(1)
    for expected in "abc":
        waiting.release()
        assert await other.piece() == expected
    await entry.ended(30)
    assert entry.cancelled
    assert len(entry.sent) < 100_000
    # Unread tokens and the sockets' own buffers; without a bound it would be the ten million bytes of text, as events.
    assert router.rss_bytes() - before < 24 * 2**20
    waiting.release()
    assert (await other.rest()).succeeded().text == "abc"
    if mode == "stream":
        # What was under way may still be read; it ends without looking like a success.
        try:
            assert not (await slow.rest()).done
        except BrokenBody:
            assert not slow.answer.done
    else:
        await slow.rest()
        slow.answer.broken("cancelled")
    await lab.nothing_remains()
    outcomes = sorted(release.outcome for release in lab.books.released)
    assert outcomes == [types_pb2.OUTCOME_STOP, types_pb2.OUTCOME_CANCELLED]


async def test_many_clients_that_leave_at_any_moment(lab: Lab, slow: bool) -> None:
    """The same zeros, and memory as before."""
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    await lab.worker("toy-long", slots=8)
    router = lab.mesh.processes["router"]

    async def one() -> None:
        way = dice.choice(list(WAYS))
        moment_s = dice.choice([0.0, 0.001, 0.01, 0.05, 0.1]) * dice.random()
        lab.play(dice.choice([counting(50), "+200; " + counting(10), "'abc'; END", "HANG"]))
        client = await Leaver.come(lab, way, n=dice.choice([1, 1, 3]), max_tokens=50)
        await asyncio.sleep(moment_s)  # not a wait for a state: the moment is what is varied
        client.go()

    async def batch(count: int) -> None:
        for _ in range(count // 10):
            await asyncio.gather(*(one() for _ in range(10)))
        lab.bench.clear()
        await lab.nothing_remains(20)

    try:
        await batch(50)
        before = router.rss_bytes()
        await batch(1000 if slow else 100)
    except Exception as error:
        raise AssertionError(f"with seed {seed}") from error
    assert router.rss_bytes() - before < 16 * 2**20
    lab.play("'fine'; END")
    assert (await lab.ask("go", mode="plain")).succeeded().text == "fine"


async def test_a_connection_that_only_opens(lab: Lab) -> None:
    """Nothing is asked, half is asked, or the body never comes: no request is counted as open."""
    host, port = lab.mesh.http.rsplit(":", 1)
    for start in (b"", b"POST /v1/chat/completions HT", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(start)
        await writer.drain()
        writer.transport.abort()
        del reader
    await lab.nothing_remains()
