"""The cache's driver: streams become calls of the cores, their replies become messages; the clock is kept here.

It decides nothing but what an answer is that may be stored. Everything runs on the one loop, so there is nothing to
lock. Block news goes as it came, in bytes, through the hub (``_gateway.BlockHub``). Spans (``cache.lookup``, from the
ask to its reply) and metrics are made here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace import _gateway, process, serving, tls, tracing
from headrace.cache import responses
from headrace.config import CacheConfig, Config
from headrace.serving import Outbox, StreamError, exchange
from headrace.v1 import cache_pb2, types_pb2

log = logging.getLogger(__name__)

FULL_NAME = cache_pb2.DESCRIPTOR.services_by_name["CacheService"].full_name

#: A key is a digest; what is much longer isn't one.
MAX_KEY_BYTES = 256

#: Replies that wait for one router's stream.
_MAX_UNREAD = 65536

#: How an answer ended that may be given again. All else was cut, and another time goes further.
_FINISHED = frozenset({types_pb2.OUTCOME_STOP, types_pb2.OUTCOME_LENGTH, types_pb2.OUTCOME_TOOL_CALLS})


class CacheMetrics(Collector):
    """Read from the cores when somebody looks."""

    def __init__(self, registry: CollectorRegistry, answers: responses.Responses, blocks: _gateway.BlockHub) -> None:
        self._answers = answers
        self._blocks = blocks
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        # Without it, registering would collect once, for the names.
        return ()

    def collect(self) -> Iterable[Metric]:
        answers, blocks = self._answers, self._blocks
        lookups = CounterMetricFamily("headrace_cache_lookups", "Asks by what they were told", labels=["result"])
        lookups.add_metric(["hit"], answers.hits)
        lookups.add_metric(["lead"], answers.misses)
        yield lookups
        yield GaugeMetricFamily("headrace_cache_answers", "Answers stored", value=answers.answers)
        yield GaugeMetricFamily("headrace_cache_answer_bytes", "Memory they count for", value=answers.bytes)
        yield CounterMetricFamily("headrace_cache_evictions", "Answers given up for room", value=answers.evictions)
        yield GaugeMetricFamily("headrace_cache_flights", "Keys being generated", value=answers.flights)
        yield GaugeMetricFamily("headrace_cache_waiters", "Asks that wait for one", value=answers.waiters)
        yield GaugeMetricFamily("headrace_cache_blocks", "Block holdings in the prefix index", value=blocks.holdings)
        yield GaugeMetricFamily("headrace_cache_block_bytes", "Memory of the prefix index", value=blocks.memory_bytes)
        yield CounterMetricFamily("headrace_cache_block_evictions", "Blocks given up for room", value=blocks.evicted)
        yield CounterMetricFamily("headrace_cache_block_gaps", "Lost block events", value=blocks.gaps)
        yield GaugeMetricFamily("headrace_cache_workers", "Workers that publish blocks", value=blocks.workers)
        yield GaugeMetricFamily("headrace_cache_watchers", "Streams that follow blocks", value=blocks.watchers)


class _RouterStream:
    """One Lookup stream."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.outbox: Outbox[responses.Reply] = Outbox(_MAX_UNREAD, size=_reply_bytes)
        self.spans: dict[int, tracing.Span] = {}

    def end_span(self, ask: int, result: str) -> None:
        span = self.spans.pop(ask, None)
        if span is not None:
            span.set("headrace.cache.result", result)
            span.end()


class _WorkerStream:
    """One PublishBlocks stream."""

    def __init__(self, link: int) -> None:
        self.link = link
        self.outbox: Outbox[bytes] = Outbox(64, batch=1)


class _WatcherStream:
    """One WatchBlocks stream. What it is owed is the hub's to know; in the outbox stands that there is something."""

    def __init__(self, link: int) -> None:
        self.link = link
        self.outbox: Outbox[None] = Outbox(2)
        self.owed = False

    def owe(self) -> None:
        """There may be news."""
        if not self.owed:
            self.owed = self.outbox.put(None)


class CacheService:
    """The rpcs, see :func:`add_to_server`. ``keep_time`` must run beside the server."""

    def __init__(
        self, config: CacheConfig, registry: CollectorRegistry, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self.answers = responses.Responses(config.max_answer_bytes, config.ttl_s, config.max_waiters)
        self.blocks = _gateway.BlockHub(
            config.max_index_bytes, root_share=config.max_root_share, seed=secrets.randbits(64)
        )
        CacheMetrics(registry, self.answers, self.blocks)
        self._links = itertools.count(1)
        self._routers: dict[int, _RouterStream] = {}
        self._workers: dict[int, _WorkerStream] = {}
        self._watchers: dict[int, _WatcherStream] = {}
        self._stopping = False
        self._idle = asyncio.Event()
        self._rearm = asyncio.Event()

    # rpcs

    async def Lookup(
        self,
        request_iterator: AsyncIterator[cache_pb2.LookupRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """A router's stream."""
        await self._refuse_when_stopping(context)
        stream = _RouterStream(next(self._links))
        self._routers[stream.owner] = stream

        def receive(message: cache_pb2.LookupRequest) -> None:
            self._from_router(stream, message)

        try:
            await exchange(request_iterator, context, receive=receive, outbox=stream.outbox, encode=_response)
        finally:
            del self._routers[stream.owner]
            self._reply(self.answers.lose(stream.owner))
            for ask in list(stream.spans):
                stream.end_span(ask, "router_lost")
            self._note_idle()

    async def PublishBlocks(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        """A worker's stream."""
        await self._refuse_when_stopping(context)
        stream = _WorkerStream(next(self._links))
        self._workers[stream.link] = stream

        def receive(message: bytes) -> None:
            with _ending_the_stream():
                want, woken = self.blocks.worker_message(stream.link, message)
            if want is not None:
                stream.outbox.put(want)
            self._wake(woken)

        try:
            await exchange(
                request_iterator, context, receive=receive, outbox=stream.outbox, encode=lambda items: items[0]
            )
        finally:
            del self._workers[stream.link]
            self.blocks.worker_lost(self._now(), stream.link)
            self._rearm.set()
            self._note_idle()

    async def WatchBlocks(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        """A scheduler's or router's stream."""
        await self._refuse_when_stopping(context)
        stream = _WatcherStream(next(self._links))
        self._watchers[stream.link] = stream

        def receive(message: bytes) -> None:
            with _ending_the_stream():
                self.blocks.watcher_message(self._now(), stream.link, message)
            stream.owe()
            self._rearm.set()

        def encode(_: list[None]) -> bytes:
            stream.owed = False
            news, more = self.blocks.news(stream.link)
            if more:
                stream.owe()
            return news

        try:
            await exchange(request_iterator, context, receive=receive, outbox=stream.outbox, encode=encode)
        finally:
            del self._watchers[stream.link]
            self.blocks.watcher_lost(stream.link)
            self._note_idle()

    async def FindPrefix(
        self, request: cache_pb2.FindPrefixRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> cache_pb2.FindPrefixResponse:
        """Who holds the longest part of this."""
        return cache_pb2.FindPrefixResponse(
            holders=[
                cache_pb2.FindPrefixResponse.Holder(worker_id=worker_id, instance_id=instance_id, blocks=blocks)
                for worker_id, instance_id, blocks in self.blocks.find(request.pool, request.hashes)
            ]
        )

    async def GetStats(
        self, request: cache_pb2.GetStatsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> cache_pb2.GetStatsResponse:
        """What is held."""
        return cache_pb2.GetStatsResponse(
            answers=self.answers.answers,
            answer_bytes=self.answers.bytes,
            hits=self.answers.hits,
            misses=self.answers.misses,
            flights=self.answers.flights,
            waiters=self.answers.waiters,
            blocks=self.blocks.holdings,
            workers=self.blocks.workers,
            block_bytes=self.blocks.memory_bytes,
            watchers=self.blocks.watchers,
        )

    # Running.

    async def keep_time(self) -> None:
        """Forget what workers held that did not come back."""
        while True:
            self._rearm.clear()
            wakeup_s = self.blocks.next_wakeup()
            delay_s = None if wakeup_s is None else max(wakeup_s - self._now(), 0.0)
            try:
                async with asyncio.timeout(delay_s):
                    await self._rearm.wait()
            except TimeoutError:
                self._wake(self.blocks.tick(self._now()))

    async def drain(self) -> None:
        """End all streams: routers go on without a cache, workers and watchers come back to the next one."""
        self._stopping = True
        error = StreamError(grpc.StatusCode.UNAVAILABLE, "the cache is stopping")
        for router in self._routers.values():
            router.outbox.close(error)
        for worker in self._workers.values():
            worker.outbox.close(error)
        for watcher in self._watchers.values():
            watcher.outbox.close(error)
        self._note_idle()
        await self._idle.wait()

    def _note_idle(self) -> None:
        if self._stopping and not (self._routers or self._workers or self._watchers):
            self._idle.set()

    async def _refuse_when_stopping(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the cache is stopping")

    # Messages.

    def _from_router(self, stream: _RouterStream, message: cache_pb2.LookupRequest) -> None:
        # Fills first: they may answer the asks. Withdrawals last: one may be of an ask in this very message.
        for fill in message.fills:
            self._fill(stream.owner, fill)
        for number in message.abandons:
            self._reply(self.answers.end(stream.owner, number))
        for ask in message.asks:
            self._ask(stream, ask)
        for number in message.withdrawals:
            stream.end_span(number, "cancelled")
            self._reply(self.answers.end(stream.owner, number))

    def _ask(self, stream: _RouterStream, ask: cache_pb2.LookupRequest.Ask) -> None:
        if not 1 <= len(ask.key) <= MAX_KEY_BYTES:
            limit = f"a key must have 1 to {MAX_KEY_BYTES} bytes, got {len(ask.key)}"
            raise StreamError(grpc.StatusCode.INVALID_ARGUMENT, limit)
        try:
            reply = self.answers.ask(self._now(), stream.owner, ask.ask, bytes(ask.key))
        except responses.Misuse as error:
            raise StreamError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        span = tracing.start("cache.lookup", ask.trace.traceparent, kind="server", tracestate=ask.trace.tracestate)
        if span.recording:
            span.set("rpc.system.name", "grpc")
            span.set("rpc.method", f"{FULL_NAME}/Lookup")
            span.set("headrace.cache.waited", reply is None)
            stream.spans[ask.ask] = span
        if reply is not None:
            self._reply([reply])

    def _fill(self, owner: int, fill: cache_pb2.LookupRequest.Fill) -> None:
        choices = fill.answer.choices
        if choices and all(choice.outcome in _FINISHED for choice in choices):
            replies = self.answers.fill(self._now(), owner, fill.ask, fill.answer.SerializeToString())
        else:
            log.warning("a fill whose answer isn't finished counts as an abandon")
            replies = self.answers.end(owner, fill.ask)
        self._reply(replies)

    def _reply(self, replies: Iterable[responses.Reply]) -> None:
        for reply in replies:
            stream = self._routers.get(reply.owner)
            # A stream that takes no more is ending, and then abandons what it leads.
            if stream is not None:
                stream.end_span(reply.ask, "hit" if isinstance(reply, responses.Hit) else "lead")
                stream.outbox.put(reply)

    def _wake(self, watchers: Iterable[int]) -> None:
        for link in watchers:
            if (stream := self._watchers.get(link)) is not None:
                stream.owe()


@contextlib.contextmanager
def _ending_the_stream() -> Iterator[None]:
    """A message that can't be understood ends its stream."""
    try:
        yield
    except ValueError as error:
        raise StreamError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error


def _reply_bytes(reply: responses.Reply) -> int:
    return len(reply.answer) if isinstance(reply, responses.Hit) else 0


def _response(replies: list[responses.Reply]) -> cache_pb2.LookupResponse:
    return cache_pb2.LookupResponse(replies=[_reply_message(reply) for reply in replies])


def _reply_message(reply: responses.Reply) -> cache_pb2.LookupResponse.Reply:
    message = cache_pb2.LookupResponse.Reply(ask=reply.ask)
    if isinstance(reply, responses.Hit):
        message.hit.MergeFromString(reply.answer)
        # An answer without a field set is still a hit.
        message.hit.SetInParent()
    else:
        message.lead.SetInParent()
    return message


def add_to_server(servicer: CacheService, server: grpc.aio.Server) -> None:
    """Add the service to a server. Messages about blocks are handed on as bytes: the hub reads and writes them."""
    handlers = {
        "Lookup": grpc.stream_stream_rpc_method_handler(
            servicer.Lookup,
            request_deserializer=cache_pb2.LookupRequest.FromString,
            response_serializer=cache_pb2.LookupResponse.SerializeToString,
        ),
        "PublishBlocks": grpc.stream_stream_rpc_method_handler(servicer.PublishBlocks),
        "WatchBlocks": grpc.stream_stream_rpc_method_handler(servicer.WatchBlocks),
        "FindPrefix": grpc.unary_unary_rpc_method_handler(
            servicer.FindPrefix,
            request_deserializer=cache_pb2.FindPrefixRequest.FromString,
            response_serializer=cache_pb2.FindPrefixResponse.SerializeToString,
        ),
        "GetStats": grpc.unary_unary_rpc_method_handler(
            servicer.GetStats,
            request_deserializer=cache_pb2.GetStatsRequest.FromString,
            response_serializer=cache_pb2.GetStatsResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(FULL_NAME, handlers),))


async def run(config: Config) -> None:
    """Be the cache, until told to stop."""
    process.configure_logging(config.telemetry)
    tracing.setup("cache", config.telemetry)
    own = config.cache
    certificates = tls.load(config.tls)
    service = serving.Service("cache", own.address, metrics_address=own.metrics_address, tls=certificates)
    servicer = CacheService(own, service.registry)
    service.add(add_to_server, servicer, FULL_NAME)
    await service.start()
    service.spawn(servicer.keep_time(), "clock")
    try:
        await service.run_until_stopped(announce=True, drain=servicer.drain, grace_s=own.drain_grace_s)
    finally:
        tracing.shutdown()
