"""The cache's contract over real gRPC: Lookup, PublishBlocks, WatchBlocks, FindPrefix, GetStats, spans, and the end."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from tests.support.waiting import eventually

from headrace import serving, tracing
from headrace.cache.service import FULL_NAME, MAX_KEY_BYTES, CacheService, add_to_server
from headrace.config import CacheConfig, TelemetryConfig
from headrace.serving import Service
from headrace.v1 import cache_pb2, cache_pb2_grpc, types_pb2

TIMEOUT_S = 20.0
TRACE = "1" * 32
CONFIG = CacheConfig(address="127.0.0.1:0", metrics_address="")


def answer(*ids: int, outcome: types_pb2.Outcome = types_pb2.OUTCOME_STOP) -> cache_pb2.Answer:
    return cache_pb2.Answer(prompt_tokens=7, choices=[cache_pb2.Answer.Choice(ids=ids, outcome=outcome)])


class Router:
    """One Lookup stream, and all it was told."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.replies: dict[int, cache_pb2.LookupResponse.Reply] = {}

    async def send(self, **parts: Any) -> None:
        await self.call.write(cache_pb2.LookupRequest(**parts))

    async def ask(self, number: int, key: bytes, traceparent: str = "") -> None:
        trace = types_pb2.TraceContext(traceparent=traceparent)
        await self.send(asks=[cache_pb2.LookupRequest.Ask(ask=number, key=key, trace=trace)])

    async def fill(self, number: int, what: cache_pb2.Answer) -> None:
        await self.send(fills=[cache_pb2.LookupRequest.Fill(ask=number, answer=what)])

    async def reply(self, number: int) -> cache_pb2.LookupResponse.Reply:
        async with asyncio.timeout(TIMEOUT_S):
            while number not in self.replies:
                message = await self.call.read()
                assert message is not grpc.aio.EOF, await self.call.details()
                for reply in message.replies:
                    assert reply.ask not in self.replies, "answered twice"
                    self.replies[reply.ask] = reply
        return self.replies[number]

    async def leads(self, number: int) -> bool:
        return (await self.reply(number)).WhichOneof("what") == "lead"

    async def hit(self, number: int) -> cache_pb2.Answer:
        reply = await self.reply(number)
        assert reply.WhichOneof("what") == "hit"
        return reply.hit


class Cache:
    """A cache on loopback and its peers."""

    def __init__(self, config: CacheConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.service = Service("cache", config.address)
        self.servicer = CacheService(config, self.service.registry, now=now)
        self.service.add(add_to_server, self.servicer, FULL_NAME)

    async def start(self) -> None:
        await self.service.start()
        self.service.spawn(self.servicer.keep_time(), "clock")
        self.channel = serving.channel(self.service.address)
        self.stub = cache_pb2_grpc.CacheServiceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.service.stop(0.0)

    def router(self) -> Router:
        return Router(self.stub.Lookup())

    async def stats(self) -> cache_pb2.GetStatsResponse:
        return await self.stub.GetStats(cache_pb2.GetStatsRequest(), timeout=TIMEOUT_S)

    async def find(self, *hashes: int, pool: str = "p") -> dict[str, int]:
        request = cache_pb2.FindPrefixRequest(pool=pool, hashes=hashes)
        response = await self.stub.FindPrefix(request, timeout=TIMEOUT_S)
        return {holder.worker_id: holder.blocks for holder in response.holders}

    async def worker(self, name: str = "w", **hello: Any) -> tuple[Any, cache_pb2.PublishBlocksResponse]:
        call = self.stub.PublishBlocks()
        fields = {"worker_id": name, "instance_id": f"{name}-1", "pool": "p", "block_tokens": 16} | hello
        await call.write(cache_pb2.PublishBlocksRequest(hello=cache_pb2.BlocksHello(**fields)))
        return call, await asyncio.wait_for(call.read(), TIMEOUT_S)


def stored(sequence: int, *hashes: int) -> cache_pb2.BlockEvent:
    return cache_pb2.BlockEvent(sequence=sequence, stored=cache_pb2.BlockEvent.Stored(hashes=hashes))


def snapshot(next_sequence: int, *chains: tuple[int, ...]) -> cache_pb2.PublishBlocksRequest:
    of = [cache_pb2.BlockEvent.Stored(hashes=chain) for chain in chains]
    return cache_pb2.PublishBlocksRequest(snapshot=cache_pb2.BlockSnapshot(next_sequence=next_sequence, chains=of))


@asynccontextmanager
async def cache_of(now: Callable[[], float] = time.monotonic, **config: Any) -> AsyncIterator[Cache]:
    cache = Cache(dataclasses.replace(CONFIG, **config), now)
    await cache.start()
    try:
        yield cache
    finally:
        await cache.stop()


@pytest.fixture
async def cache() -> AsyncIterator[Cache]:
    async with cache_of() as made:
        yield made


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter, before = InMemorySpanExporter(), tracing._tracing
    tracing.setup("cache", TelemetryConfig(), exporter)
    yield exporter
    tracing.shutdown()
    tracing._tracing = before


async def test_lead_fill_hit(cache: Cache) -> None:
    first, second = cache.router(), cache.router()
    await first.ask(1, b"k")
    assert await first.leads(1)
    await first.fill(1, answer(1, 2, 3))
    await first.ask(2, b"k")
    assert await first.hit(2) == answer(1, 2, 3)
    await second.ask(1, b"k")
    assert await second.hit(1) == answer(1, 2, 3)
    stats = await cache.stats()
    assert (stats.answers, stats.hits, stats.misses, stats.flights, stats.waiters) == (1, 2, 1, 0, 0)
    assert stats.answer_bytes == cache.servicer.answers.bytes > 0


async def test_an_answer_comes_back_whole(cache: Cache) -> None:
    """C11 g: all that was filled, choice by choice."""
    logprobs = types_pb2.TokenLogprobs(
        drawn=types_pb2.Logprob(id=3, logprob=-0.5), top=[types_pb2.Logprob(id=4, logprob=-9999.0)]
    )
    whole = cache_pb2.Answer(
        prompt_tokens=9,
        choices=[
            cache_pb2.Answer.Choice(ids=[3], logprobs=[logprobs], outcome=types_pb2.OUTCOME_TOOL_CALLS),
            cache_pb2.Answer.Choice(outcome=types_pb2.OUTCOME_LENGTH),
        ],
    )
    router = cache.router()
    await router.ask(1, b"k")
    await router.reply(1)
    await router.fill(1, whole)
    await router.ask(2, b"k")
    assert await router.hit(2) == whole


async def test_single_flight_over_two_routers(cache: Cache) -> None:
    first, second = cache.router(), cache.router()
    await first.ask(1, b"k")
    assert await first.leads(1)
    await second.ask(1, b"k")
    await second.ask(2, b"k")
    await eventually(lambda: waiters(cache, 2), "two that wait")
    await second.send(withdrawals=[2])
    await eventually(lambda: waiters(cache, 1), "one that waits")
    await first.fill(1, answer(5))
    assert await second.hit(1) == answer(5)


async def waiters(cache: Cache, count: int) -> bool:
    return (await cache.stats()).waiters == count


@pytest.mark.parametrize(
    "what",
    [
        cache_pb2.LookupRequest(abandons=[1]),
        cache_pb2.LookupRequest(withdrawals=[1]),
        cache_pb2.LookupRequest(fills=[cache_pb2.LookupRequest.Fill(ask=1, answer=cache_pb2.Answer())]),
        cache_pb2.LookupRequest(
            fills=[cache_pb2.LookupRequest.Fill(ask=1, answer=answer(1, outcome=types_pb2.OUTCOME_CANCELLED))]
        ),
    ],
)
async def test_what_was_not_finished_is_not_stored(cache: Cache, what: cache_pb2.LookupRequest) -> None:
    """C11 f."""
    router, other = cache.router(), cache.router()
    await router.ask(1, b"k")
    assert await router.leads(1)
    await other.ask(1, b"k")
    await eventually(lambda: waiters(cache, 1), "one that waits")
    await router.call.write(what)
    assert await other.leads(1)
    assert (await cache.stats()).answers == 0


@pytest.mark.parametrize("how", ["cancel", "half-close"])
async def test_a_router_that_goes_abandons_all_it_leads(cache: Cache, how: str) -> None:
    router, other = cache.router(), cache.router()
    await router.ask(1, b"k")
    await router.ask(2, b"l")
    assert await router.leads(2)
    await other.ask(1, b"k")
    await eventually(lambda: waiters(cache, 1), "one that waits")
    if how == "cancel":
        router.call.cancel()
    else:
        await router.call.done_writing()
    assert await other.leads(1)
    assert (await cache.stats()).flights == 1


async def test_no_memory_for_answers() -> None:
    async with cache_of(max_answer_bytes=0) as cache:
        router = cache.router()
        for number in (1, 2):
            await router.ask(number, b"k")
            assert await router.leads(number)
            await router.fill(number, answer(1))
        assert (await cache.stats()).answers == 0


async def test_large_answers_to_many(cache: Cache) -> None:
    """Replies are gathered by size: twenty of 6 MB are not one message."""
    router = cache.router()
    await router.ask(0, b"k")
    await router.reply(0)
    large = answer(*([100_000] * 2_000_000))
    for number in range(1, 21):
        await router.ask(number, b"k")
    await router.fill(0, large)
    for number in range(1, 21):
        assert len((await router.hit(number)).choices[0].ids) == 2_000_000


@pytest.mark.parametrize("key", [b"", b"k" * (MAX_KEY_BYTES + 1)])
async def test_keys_are_digests(cache: Cache, key: bytes) -> None:
    router = cache.router()
    await router.ask(1, key)
    assert await router.call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(MAX_KEY_BYTES) in await router.call.details()


async def test_a_number_in_use(cache: Cache) -> None:
    router = cache.router()
    await router.ask(1, b"k")
    await router.reply(1)
    await router.ask(1, b"l")
    assert await router.call.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_blocks_are_indexed(cache: Cache) -> None:
    call, want = await cache.worker()
    assert want.snapshot
    await call.write(snapshot(3, (1, 2), (9,)))
    removed = cache_pb2.BlockEvent(sequence=4, removed=cache_pb2.BlockEvent.Removed(hashes=[9]))
    await call.write(cache_pb2.PublishBlocksRequest(events=[stored(3, 3), removed]))
    await eventually(lambda: finds(cache, {"w": 3}, 1, 2, 3, 4), "three blocks")
    assert await cache.find(9) == {}
    assert await cache.find(1, pool="q") == {}
    stats = await cache.stats()
    assert (stats.blocks, stats.workers) == (3, 1)
    await call.write(
        cache_pb2.PublishBlocksRequest(
            events=[cache_pb2.BlockEvent(sequence=5, cleared=cache_pb2.BlockEvent.Cleared())]
        )
    )
    await eventually(lambda: finds(cache, {}, 1), "nothing")


async def finds(cache: Cache, holders: dict[str, int], *hashes: int) -> bool:
    return await cache.find(*hashes) == holders


async def test_a_gap_asks_for_a_snapshot(cache: Cache) -> None:
    call, _ = await cache.worker()
    await call.write(snapshot(0))
    await call.write(cache_pb2.PublishBlocksRequest(events=[stored(5, 1)]))
    assert (await asyncio.wait_for(call.read(), TIMEOUT_S)).snapshot
    await call.write(snapshot(6, (1,)))
    await eventually(lambda: finds(cache, {"w": 1}, 1), "the snapshot")


async def test_a_worker_goes_on_after_a_break(cache: Cache) -> None:
    call, _ = await cache.worker()
    await call.write(snapshot(4, (1,)))
    await eventually(lambda: finds(cache, {"w": 1}, 1), "the snapshot")
    call.cancel()
    await eventually(lambda: finds(cache, {}, 1), "nobody")
    call, want = await cache.worker(oldest_sequence=2, next_sequence=6)
    assert want.WhichOneof("want") == "resume_from"
    assert want.resume_from == 4
    await call.write(cache_pb2.PublishBlocksRequest(events=[stored(4, 2), stored(5, 3)]))
    await eventually(lambda: finds(cache, {"w": 3}, 1, 2, 3), "all three")


async def test_a_worker_that_says_goodbye_is_not_found(cache: Cache) -> None:
    call, _ = await cache.worker()
    await call.write(snapshot(1, (1,)))
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.OK
    assert await cache.find(1) == {}
    assert (await cache.stats()).workers == 0
    # Its next instance takes its place at once.
    await cache.worker(instance_id="w-2")
    assert (await cache.stats()).blocks == 0


class Watcher:
    """One WatchBlocks stream, and what is known by it: the next event and the blocks of each instance."""

    def __init__(self, cache: Cache, known: dict[str, tuple[int, set[int]]] | None = None) -> None:
        self.known = dict(known or {})
        self.snapshots = 0
        self.call = cache.stub.WatchBlocks()

    async def start(self) -> Watcher:
        known = [
            cache_pb2.WatchBlocksRequest.Known(instance_id=name, next_sequence=sequence)
            for name, (sequence, _) in self.known.items()
        ]
        await self.call.write(cache_pb2.WatchBlocksRequest(known=known))
        return self

    async def until(self, *blocks: int, instance: str = "w-1") -> None:
        """Reads until that instance holds just these."""
        async with asyncio.timeout(TIMEOUT_S):
            while self.known.get(instance, (0, set()))[1] != set(blocks):
                message = await self.call.read()
                assert message is not grpc.aio.EOF, await self.call.details()
                for news in message.news:
                    self._take_in(news)

    def _take_in(self, news: cache_pb2.WatchBlocksResponse.News) -> None:
        sequence, held = self.known.get(news.instance_id, (0, set()))
        if news.gone:
            self.known.pop(news.instance_id, None)
            return
        if news.HasField("snapshot"):
            self.snapshots += 1
            sequence = news.snapshot.next_sequence
            held = {block for chain in news.snapshot.chains for block in chain.hashes}
        for event in news.events:
            assert event.sequence == sequence, "no gaps"
            sequence += 1
            held = (held | set(event.stored.hashes)) - set(event.removed.hashes)
            if event.HasField("cleared"):
                held = set()
        self.known[news.instance_id] = (sequence, held)


async def test_blocks_are_fanned_out(cache: Cache) -> None:
    early = await Watcher(cache).start()
    call, _ = await cache.worker()
    await call.write(snapshot(3, (1, 2), (9,)))
    await early.until(1, 2, 9)
    removed = cache_pb2.BlockEvent(sequence=4, removed=cache_pb2.BlockEvent.Removed(hashes=[9]))
    await call.write(cache_pb2.PublishBlocksRequest(events=[stored(3, 3), removed]))
    late = await Watcher(cache).start()
    for watcher in (early, late):
        await watcher.until(1, 2, 3)
        assert watcher.known["w-1"][0] == 5
    stats = await cache.stats()
    assert stats.watchers == 2
    assert stats.block_bytes == cache.servicer.blocks.memory_bytes > 0
    # A stream that breaks goes on where it was.
    early.call.cancel()
    await call.write(cache_pb2.PublishBlocksRequest(events=[stored(5, 4)]))
    await late.until(1, 2, 3, 4)
    again = await Watcher(cache, early.known).start()
    await again.until(1, 2, 3, 4)
    assert again.snapshots == 0


async def test_a_watcher_that_has_lost_track_gets_a_snapshot(cache: Cache) -> None:
    call, _ = await cache.worker()
    await call.write(snapshot(1, (1,)))
    watcher = await Watcher(cache).start()
    await watcher.until(1)
    watcher.known["w-1"] = (0, {7})
    await watcher.call.write(cache_pb2.WatchBlocksRequest(lost=["w-1"]))
    await watcher.until(1)
    assert watcher.snapshots == 2


async def test_a_worker_that_is_gone_is_told_of() -> None:
    now_s = 0.0
    async with cache_of(now=lambda: now_s) as cache:
        call, _ = await cache.worker()
        await call.write(snapshot(1, (1,)))
        watcher = await Watcher(cache).start()
        await watcher.until(1)
        call.cancel()
        await eventually(lambda: finds(cache, {}, 1), "nobody")
        now_s = 10.0
        # Time is looked at when something happens, too.
        (await cache.worker("x"))[0].cancel()
        await watcher.until()
        assert "w-1" not in watcher.known


async def test_hello_comes_first(cache: Cache) -> None:
    call = cache.stub.PublishBlocks()
    await call.write(snapshot(0))
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    call = cache.stub.PublishBlocks()
    await call.write(cache_pb2.PublishBlocksRequest(hello=cache_pb2.BlocksHello(worker_id="w")))
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "instance_id, pool" in await call.details()


async def test_spans_of_lookups(cache: Cache, exporter: InMemorySpanExporter) -> None:
    """C15 h, c."""
    router, other = cache.router(), cache.router()

    def parent(number: int) -> str:
        return f"00-{TRACE}-{number:016x}-01"

    await router.ask(1, b"k", parent(1))
    await router.reply(1)
    await other.ask(2, b"k", parent(2))
    await other.ask(3, b"k", parent(3))
    await other.ask(4, b"k")
    await eventually(lambda: waiters(cache, 3), "three that wait")
    await other.send(withdrawals=[3])
    await eventually(lambda: waiters(cache, 2), "two that wait")
    await router.fill(1, answer(1))
    await other.hit(2)
    await other.hit(4)
    spans = {span.parent.span_id: span for span in exporter.get_finished_spans() if span.parent}
    results = {parent: (span.attributes or {})["headrace.cache.result"] for parent, span in spans.items()}
    assert results == {1: "lead", 2: "hit", 3: "cancelled"}
    assert {span.name for span in spans.values()} == {"cache.lookup"}
    assert (spans[2].attributes or {})["headrace.cache.waited"] is True


async def test_metrics(cache: Cache) -> None:
    router = cache.router()
    await router.ask(1, b"k")
    await router.reply(1)
    text = generate_latest(cache.service.registry).decode()
    assert 'headrace_cache_lookups_total{result="lead"} 1.0' in text
    assert "headrace_cache_flights 1.0" in text


async def test_the_end(cache: Cache) -> None:
    router = cache.router()
    await router.ask(1, b"k")
    await router.reply(1)
    call, _ = await cache.worker()
    watcher = await Watcher(cache).start()
    # Until the cache has it: a stream that a stopping server has not looked at yet is cancelled instead.
    await asyncio.wait_for(watcher.call.read(), TIMEOUT_S)
    stopping = asyncio.Event()
    stopping.set()
    running = asyncio.create_task(
        cache.service.run_until_stopped(drain=cache.servicer.drain, grace_s=TIMEOUT_S, stopping=stopping)
    )
    assert await router.call.code() == await call.code() == await watcher.call.code() == grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(running, TIMEOUT_S)
    assert cache.servicer.answers.leads == 0


async def test_streams_are_refused_while_draining(cache: Cache) -> None:
    await asyncio.wait_for(cache.servicer.drain(), TIMEOUT_S)
    for call in (cache.stub.Lookup(), cache.stub.PublishBlocks(), cache.stub.WatchBlocks()):
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
