"""The scheduler's driver: calls become events, actions become calls, the clock is kept here.

It decides nothing. Every message is stepped through ``core.py`` on the one loop, so there is nothing to lock; what the
core wants sent goes to the streams' outboxes and is written with whatever else is ready by then.
Spans (``scheduler.place``, from the ask to its answer) and metrics are made here too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace import errors, metrics, serving, tls, tracing
from headrace.config import Config, SchedulerConfig
from headrace.scheduler import actions, events
from headrace.scheduler.core import Core, Policy
from headrace.serving import Outbox, StreamError, exchange
from headrace.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, worker_pb2

log = logging.getLogger(__name__)

FULL_NAME = "headrace.v1.SchedulerService"

#: Answers that wait for one router's stream; it is behind by seconds then, and gets a new stream.
_MAX_UNREAD = 65536

_CLASS_NAMES: dict[int, str] = {
    types_pb2.REQUEST_CLASS_INTERACTIVE: "interactive",
    types_pb2.REQUEST_CLASS_STANDARD: "standard",
    types_pb2.REQUEST_CLASS_BATCH: "batch",
}
# In the order of the queue's ranks.
_RANK_NAMES = ("interactive", "standard", "batch")
_STATE_NAMES: dict[int, str] = {
    worker_pb2.WORKER_STATE_STARTING: "starting",
    worker_pb2.WORKER_STATE_READY: "ready",
    worker_pb2.WORKER_STATE_DRAINING: "draining",
    worker_pb2.WORKER_STATE_UNHEALTHY: "unhealthy",
}


def class_name(request_class: int) -> str:
    """The class for people; what isn't said, or not known, is standard."""
    return _CLASS_NAMES.get(request_class, "standard")


_CODE_NAMES: dict[int, str] = {
    number: name.removeprefix("ERROR_CODE_").lower() for name, number in types_pb2.ErrorCode.items()
}


class SchedulerMetrics(Collector):
    """What can be counted as it happens is; what the core knows is read from it when somebody looks.

    So the series of a worker that is gone are gone with it.
    """

    def __init__(self, registry: CollectorRegistry, core: Core) -> None:
        self._core = core
        self.placements = Counter(
            "headrace_scheduler_placements", "Requests given to a worker", ["class"], registry=registry
        )
        self.rejections = Counter("headrace_scheduler_rejections", "Requests refused", ["code"], registry=registry)
        self.withdrawals = Counter(
            "headrace_scheduler_withdrawals", "Requests whose client left before their answer", registry=registry
        )
        self.queue_wait = Histogram(
            "headrace_scheduler_queue_wait_seconds",
            "From the ask to the grant",
            ["class"],
            buckets=metrics.WAIT_BUCKETS_S,
            registry=registry,
        )
        # All series from the start: a counter that appears with its first event has no rate for it.
        for name in _RANK_NAMES:
            self.placements.labels(name)
            self.queue_wait.labels(name)
        for code in _CODE_NAMES.values():
            self.rejections.labels(code)
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        # Without it, registering would collect once, for the names.
        return ()

    def collect(self) -> Iterable[Metric]:
        core = self._core
        queued = GaugeMetricFamily("headrace_scheduler_queued", "Requests that wait", labels=["class"])
        for name, depth in zip(_RANK_NAMES, core.queue.depth_by_rank(), strict=True):
            queued.add_metric([name], depth)
        yield queued
        yield GaugeMetricFamily("headrace_scheduler_leases", "Leases held", value=len(core.fleet.leases))
        yield GaugeMetricFamily("headrace_scheduler_routers", "Routers, those in grace too", value=len(core.routers))
        workers = GaugeMetricFamily("headrace_scheduler_workers", "Workers of a pool", labels=["pool", "state"])
        leases = GaugeMetricFamily("headrace_scheduler_worker_leases", "Leases of a worker", labels=["pool", "worker"])
        for pool in core.fleet.pools.values():
            states = dict.fromkeys(_STATE_NAMES.values(), 0)
            of_worker: dict[str, int] = {}
            for worker in pool.workers.values():
                states[_STATE_NAMES.get(worker.load.state, "starting")] += 1
                of_worker[worker.worker_id] = of_worker.get(worker.worker_id, 0) + len(worker.held)
            for state, count in states.items():
                workers.add_metric([pool.name, state], count)
            for worker_id, count in of_worker.items():
                leases.add_metric([pool.name, worker_id], count)
        yield workers
        yield leases
        oddities = CounterMetricFamily("headrace_scheduler_oddities", "What should not happen", labels=["kind"])
        for kind, count in core.oddities.items():
            oddities.add_metric([kind], count)
        yield oddities


class _RouterStream:
    """One Place stream."""

    def __init__(self, link: int) -> None:
        self.link = link
        self.joined = False
        # None stands for "the fleet, as it is when this is written".
        self.outbox: Outbox[scheduler_pb2.Placement | None] = Outbox(_MAX_UNREAD)
        self.fleet_owed = False
        self.spans: dict[int, tracing.Span] = {}

    def owe_fleet(self) -> None:
        if not self.fleet_owed:
            self.fleet_owed = self.outbox.put(None)

    def end_span(self, ask: int, outcome: str) -> tracing.Span | None:
        span = self.spans.pop(ask, None)
        if span is not None:
            span.set("headrace.outcome", outcome)
            span.end()
        return span


class _WorkerStream:
    """One Join stream. Each message down is one command."""

    def __init__(self, link: int) -> None:
        self.link = link
        self.name = ""
        self.outbox: Outbox[scheduler_pb2.JoinResponse] = Outbox(64, batch=1)


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """The rpcs. ``keep_time`` must run beside the server."""

    def __init__(
        self,
        config: SchedulerConfig,
        registry: CollectorRegistry,
        *,
        now: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        policy = Policy(
            max_queued=config.max_queued,
            heartbeat_s=config.heartbeat_s,
            heartbeats_missed=config.heartbeats_missed,
            router_grace_s=config.router_grace_s,
            queue_factor=config.queue_factor,
        )
        self._now = now
        # By the wall clock, so that leases of an earlier start aren't taken for ours: room for a million a millisecond.
        first_lease = (time.time_ns() // 1_000_000) << 20
        self.core = Core(policy, rng or random.Random(), now(), first_lease)
        self.metrics = SchedulerMetrics(registry, self.core)
        self._links = itertools.count(1)
        self._routers: dict[int, _RouterStream] = {}
        self._workers: dict[int, _WorkerStream] = {}
        self._stopping = False
        self._idle = asyncio.Event()
        self._rearm = asyncio.Event()
        self._armed_s: float | None = None

    # rpcs

    async def Place(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.PlaceRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """A router's stream."""
        await self._refuse_when_stopping(context)
        stream = _RouterStream(next(self._links))
        self._routers[stream.link] = stream

        def receive(message: scheduler_pb2.PlaceRequest) -> None:
            self._from_router(stream, message)

        def encode(items: list[scheduler_pb2.Placement | None]) -> scheduler_pb2.PlaceResponse:
            response = scheduler_pb2.PlaceResponse(placements=[item for item in items if item is not None])
            if len(response.placements) < len(items):
                stream.fleet_owed = False
                response.fleet.CopyFrom(self.core.fleet.view())
            return response

        try:
            await exchange(request_iterator, context, receive=receive, outbox=stream.outbox, encode=encode)
        finally:
            del self._routers[stream.link]
            self._step(events.RouterLost(stream.link))
            for ask in list(stream.spans):
                stream.end_span(ask, "router_lost")
            self._note_idle()

    async def Join(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.JoinRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """A worker's stream."""
        await self._refuse_when_stopping(context)
        stream = _WorkerStream(next(self._links))
        self._workers[stream.link] = stream

        def receive(message: scheduler_pb2.JoinRequest) -> None:
            self._from_worker(stream, message)

        try:
            await exchange(
                request_iterator, context, receive=receive, outbox=stream.outbox, encode=lambda items: items[0]
            )
        finally:
            del self._workers[stream.link]
            if stream.name:
                log.info("%s is out", stream.name)
                self._step(events.WorkerLost(stream.link))
            self._note_idle()

    async def GetFleet(
        self, request: scheduler_pb2.GetFleetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.GetFleetResponse:
        """The fleet as believed."""
        now_s, fleet = self._now(), self.core.fleet
        return scheduler_pb2.GetFleetResponse(
            workers=[
                scheduler_pb2.GetFleetResponse.Worker(
                    worker_id=worker.worker_id,
                    instance_id=worker.instance_id,
                    pool=worker.pool,
                    address=worker.address,
                    load=worker.load,
                    leases=len(worker.held),
                    leased_tokens=worker.held.kv_tokens,
                    silent_s=max(now_s - worker.heard_s, 0.0),
                )
                for worker in fleet.workers.values()
            ],
            queued_asks=len(self.core.queue),
            routers=len(self.core.routers),
            leases=len(fleet.leases),
        )

    # Running.

    async def keep_time(self) -> None:
        """Wake the core when it wants to be."""
        while True:
            self._rearm.clear()
            self._armed_s = self.core.next_wakeup()
            delay_s = None if self._armed_s is None else max(self._armed_s - self._now(), 0.0)
            try:
                async with asyncio.timeout(delay_s):
                    await self._rearm.wait()
            except TimeoutError:
                self._step(events.Tick())

    async def drain(self) -> None:
        """End all streams. Nothing is lost: routers go on with what runs, and announce it to the next scheduler."""
        self._stopping = True
        error = StreamError(grpc.StatusCode.UNAVAILABLE, "the scheduler is stopping")
        for router in self._routers.values():
            router.outbox.close(error)
        for worker in self._workers.values():
            worker.outbox.close(error)
        self._note_idle()
        await self._idle.wait()

    def _note_idle(self) -> None:
        if self._stopping and not self._routers and not self._workers:
            self._idle.set()

    async def _refuse_when_stopping(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler is stopping")

    # Messages become events.

    def _from_router(self, stream: _RouterStream, message: scheduler_pb2.PlaceRequest) -> None:
        if not stream.joined:
            if not message.hello.router_id:
                raise StreamError(
                    grpc.StatusCode.INVALID_ARGUMENT, "the first message must have a hello with router_id"
                )
            stream.joined = True
            running = tuple(
                events.RunningLease(
                    lease=lease.lease,
                    instance_id=lease.instance_id,
                    request_id=lease.request_id,
                    tenant=lease.tenant,
                    prompt_tokens=lease.prompt_tokens,
                    max_tokens=lease.max_tokens,
                )
                for lease in message.hello.running
            )
            stream.owe_fleet()
            log.info("router %s joins, with %d running leases", message.hello.router_id, len(running))
            self._step(events.RouterJoined(stream.link, message.hello.router_id, running))
        # Releases first: they make room for the asks. Withdrawals last: one may be of an ask in this very message.
        for release in message.releases:
            self._step(_released(stream.link, release))
        for ask in message.asks:
            self._ask(stream, ask)
        for number in message.withdrawals:
            if stream.end_span(number, "cancelled") is not None or (stream.link, number) in self.core.queue:
                self.metrics.withdrawals.inc()
            self._step(events.Withdrawn(stream.link, number))

    def _ask(self, stream: _RouterStream, ask: scheduler_pb2.PlaceRequest.Ask) -> None:
        span = tracing.start("scheduler.place", ask.trace.traceparent, kind="server", tracestate=ask.trace.tracestate)
        if span.recording and ask.ask not in stream.spans:
            span.set("rpc.system.name", "grpc")
            span.set("rpc.method", f"{FULL_NAME}/Place")
            span.set("headrace.request_id", ask.request_id)
            span.set("headrace.class", class_name(getattr(ask, "class")))
            span.set("headrace.prompt_tokens", ask.prompt_tokens)
            stream.spans[ask.ask] = span
        deadline_s = self._now() + ask.time_left_ms / 1000 if ask.HasField("time_left_ms") else None
        self._step(
            events.Asked(
                stream.link,
                events.Ask(
                    number=ask.ask,
                    request_id=ask.request_id,
                    pools=tuple(ask.pools),
                    prompt_tokens=ask.prompt_tokens,
                    max_tokens=ask.max_tokens,
                    choices=ask.n or 1,
                    request_class=getattr(ask, "class"),
                    deadline_s=deadline_s,
                    expected_output_tokens=ask.expected_output_tokens,
                    avoid_instances=frozenset(ask.avoid_instances),
                    tenant=ask.tenant,
                    session_id=ask.session_id,
                    epoch=ask.epoch,
                    block_hashes=tuple(ask.block_hashes),
                ),
            )
        )

    def _from_worker(self, stream: _WorkerStream, message: scheduler_pb2.JoinRequest) -> None:
        if not stream.name:
            if not message.HasField("hello"):
                raise StreamError(grpc.StatusCode.INVALID_ARGUMENT, "the first message must have a hello")
            hello = message.hello
            stream.name = f"worker {hello.worker_id} (instance {hello.instance_id}, pool {hello.pool}, {hello.address})"
            self._step(
                events.WorkerJoined(
                    link=stream.link,
                    worker_id=hello.worker_id,
                    instance_id=hello.instance_id,
                    pool=hello.pool,
                    address=hello.address,
                    description=hello.description,
                    startup_s=hello.startup_s,
                )
            )
        if message.HasField("load"):
            self._step(events.WorkerReported(stream.link, message.load))

    # Actions become messages.

    def _step(self, event: events.Event) -> None:
        for action in self.core.step(self._now(), event):
            self._carry_out(action)
        wakeup_s = self.core.next_wakeup()
        if wakeup_s is not None and (self._armed_s is None or wakeup_s < self._armed_s):
            self._rearm.set()

    def _carry_out(self, action: actions.Action) -> None:
        match action:
            case actions.Granted():
                self._granted(action)
            case actions.Waits():
                queued = scheduler_pb2.Queued(position=action.position, estimate_ms=action.estimate_ms)
                self._answer(action.link, scheduler_pb2.Placement(ask=action.ask, queued=queued))
            case actions.Refused():
                self._refused(action)
            case actions.FleetChanged():
                for stream in self._routers.values():
                    if stream.joined:
                        stream.owe_fleet()
            case actions.Welcomed():
                log.info("%s joins", self._workers[action.link].name)
                welcome = scheduler_pb2.JoinWelcome(heartbeat_ms=action.heartbeat_ms)
                self._workers[action.link].outbox.put(scheduler_pb2.JoinResponse(welcome=welcome))
            case actions.JoinRefused():
                status = grpc.StatusCode.ALREADY_EXISTS if action.already_joined else grpc.StatusCode.INVALID_ARGUMENT
                self._end_worker(action.link, StreamError(status, action.message))
            case actions.WorkerDropped():
                self._end_worker(action.link, StreamError(grpc.StatusCode.UNAVAILABLE, action.message))
            case actions.RouterDropped():
                log.warning("router stream %d is dropped: %s", action.link, action.message)
                if (stream_of := self._routers.get(action.link)) is not None:
                    stream_of.outbox.close(StreamError(grpc.StatusCode.INVALID_ARGUMENT, action.message))

    def _granted(self, action: actions.Granted) -> None:
        name = class_name(action.request_class)
        self.metrics.placements.labels(name).inc()
        self.metrics.queue_wait.labels(name).observe(action.queue_s)
        if (stream := self._routers.get(action.link)) is not None and (
            span := stream.spans.get(action.ask)
        ) is not None:
            span.set("headrace.worker_id", action.worker_id)
            span.set("headrace.queue_s", action.queue_s)
            stream.end_span(action.ask, "granted")
        grant = scheduler_pb2.Grant(
            lease=action.lease,
            worker_id=action.worker_id,
            instance_id=action.instance_id,
            address=action.address,
            token_allowance=action.token_allowance,
            queue_s=action.queue_s,
        )
        self._answer(action.link, scheduler_pb2.Placement(ask=action.ask, grant=grant))

    def _refused(self, action: actions.Refused) -> None:
        name = _CODE_NAMES[action.code]
        self.metrics.rejections.labels(name).inc()
        if (stream := self._routers.get(action.link)) is not None and (
            span := stream.spans.get(action.ask)
        ) is not None:
            span.fail(name)
            stream.end_span(action.ask, "rejected")
        rejected = errors.error(
            action.code,
            action.message,
            retryable=action.retryable,
            retry_after_ms=action.retry_after_ms,
        )
        self._answer(action.link, scheduler_pb2.Placement(ask=action.ask, rejected=rejected))

    def _answer(self, link: int, placement: scheduler_pb2.Placement) -> None:
        stream = self._routers.get(link)
        # A stream that takes no more is ending; the router asks again on its next one, or its leases expire.
        if stream is not None:
            stream.outbox.put(placement)

    def _end_worker(self, link: int, error: StreamError) -> None:
        stream = self._workers.get(link)
        if stream is not None:
            log.warning("%s: %s", stream.name, error.details)
            stream.outbox.close(error)


def _released(link: int, release: scheduler_pb2.Release) -> events.Released:
    return events.Released(
        link=link,
        lease=release.lease,
        outcome=release.outcome,
        prompt_tokens=release.usage.prompt_tokens,
        cached_prompt_tokens=release.usage.cached_prompt_tokens,
        completion_tokens=release.usage.completion_tokens,
        kv_block_s=release.kv_block_s,
        ttft_s=release.ttft_s,
        decode_s=release.decode_s,
    )


async def run(config: Config) -> None:
    """Be the scheduler, until told to stop."""
    serving.configure_logging(config.telemetry)
    tracing.setup("scheduler", config.telemetry)
    own = config.scheduler
    certificates = tls.load(config.tls)
    service = serving.Service("scheduler", own.address, metrics_address=own.metrics_address, tls=certificates)
    servicer = SchedulerService(own, service.registry)
    service.add(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, servicer, FULL_NAME)
    await service.start()
    service.spawn(servicer.keep_time(), "clock")
    try:
        await service.run_until_stopped(announce=True, drain=servicer.drain, grace_s=own.drain_grace_s)
    finally:
        tracing.shutdown()
