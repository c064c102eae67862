"""The scheduler's driver: streams, the clock, spans and metrics.

It decides nothing. Every message goes as it came, in bytes, through the core (``_gateway.Scheduler``) on the one loop;
what the core wants sent goes to the streams' outboxes and is written with whatever else is ready by then.
Spans (``scheduler.place``, from the ask to its answer) are made here for asks whose trace is recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace import _gateway, metrics, process, serving, tenants, tls, tracing
from headrace.config import Config, SchedulerConfig, pool_prices, tenant_weights
from headrace.errors import ConfigError
from headrace.ledger import usage
from headrace.ledger.shared import SharedMeters
from headrace.ledger.store import Answer, Store, StoreError, database_of
from headrace.ledger.writer import LedgerWriter
from headrace.scheduler.blocks import BlocksLink
from headrace.serving import Outbox, StreamError, exchange
from headrace.v1 import scheduler_pb2, types_pb2

if TYPE_CHECKING:
    from headrace._gateway import _Effects

log = logging.getLogger(__name__)

FULL_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name

#: Messages that wait for one router's stream; it is behind by seconds then, and gets a new stream.
_MAX_UNREAD = 65536

# In the order of the core's ranks.
_CLASS_NAMES = ("interactive", "standard", "batch")

_CODE_NAMES = tuple(name.removeprefix("ERROR_CODE_").lower() for name, _ in types_pb2.ErrorCode.items())


class SchedulerMetrics(Collector):
    """All is read from the core when somebody looks, so the series of a worker that is gone are gone with it."""

    def __init__(self, registry: CollectorRegistry, core: _gateway.Scheduler) -> None:
        self._core = core
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        # Without it, registering would collect once, for the names.
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = json.loads(self._core.stats())
        counts = stats["counts"]
        yield _by_class(CounterMetricFamily, "placements", "Requests given to a worker", counts["placements"])
        yield _by_class(
            CounterMetricFamily, "credit_placements", "Of those, given by routers themselves", counts["by_credit"]
        )
        rejections = CounterMetricFamily("headrace_scheduler_rejections", "Requests refused", labels=["code"])
        # All series from the start: a counter that appears with its first event has no rate for it.
        for code in _CODE_NAMES:
            rejections.add_metric([code], counts["rejections"].get(code, 0))
        yield rejections
        yield CounterMetricFamily(
            "headrace_scheduler_withdrawals",
            "Requests whose client left before their answer",
            value=counts["withdrawals"],
        )
        waits = HistogramMetricFamily(
            "headrace_scheduler_queue_wait_seconds", "From the ask to the grant", labels=["class"]
        )
        for name, histogram in zip(_CLASS_NAMES, counts["queue_wait"], strict=True):
            waits.add_metric([name], _buckets(metrics.WAIT_BUCKETS_S, histogram["counts"]), histogram["sum"])
        yield waits
        yield _by_class(GaugeMetricFamily, "queued", "Requests that wait", stats["queued"])
        yield GaugeMetricFamily("headrace_scheduler_leases", "Leases held", value=stats["leases"])
        yield GaugeMetricFamily("headrace_scheduler_routers", "Routers, those in grace too", value=stats["routers"])
        workers = GaugeMetricFamily("headrace_scheduler_workers", "Workers of a pool", labels=["pool", "state"])
        leases = GaugeMetricFamily("headrace_scheduler_worker_leases", "Leases of a worker", labels=["pool", "worker"])
        for pool, of_pool in stats["pools"].items():
            for state, count in of_pool["states"].items():
                workers.add_metric([pool, state], count)
            for worker_id, count in of_pool["leases"].items():
                leases.add_metric([pool, worker_id], count)
        yield workers
        yield leases
        yield from _predictions(stats)
        measures = CounterMetricFamily("headrace_scheduler_measures", "What was done beside placing", labels=["kind"])
        for kind, count in stats["measures"].items():
            measures.add_metric([kind], count)
        yield measures
        blocks = stats["blocks"]
        yield GaugeMetricFamily("headrace_scheduler_blocks", "Block holdings that are known", value=blocks["holdings"])
        yield GaugeMetricFamily("headrace_scheduler_block_bytes", "Memory of the prefix index", value=blocks["bytes"])
        yield CounterMetricFamily("headrace_scheduler_block_gaps", "Lost block events", value=blocks["gaps"])
        books = stats["books"]
        yield GaugeMetricFamily(
            "headrace_scheduler_open_bookings", "Requests whose books are open", value=books["open"]
        )
        yield GaugeMetricFamily(
            "headrace_scheduler_unwritten_entries", "What the ledger has yet to write", value=books["behind"]
        )
        yield GaugeMetricFamily("headrace_scheduler_parked", "Requests that wait for the ledger", value=books["parked"])
        oddities = CounterMetricFamily("headrace_scheduler_oddities", "What should not happen", labels=["kind"])
        for kind, count in stats["oddities"].items():
            oddities.add_metric([kind], count)
        yield oddities


def _predictions(stats: dict[str, Any]) -> Iterable[Metric]:
    """How good the cost model is: first tokens against what was predicted at the grant, and steps."""
    ttft = stats["ttft"]
    yield CounterMetricFamily("headrace_scheduler_ttft_compared", "First tokens compared", value=ttft["count"])
    seconds = CounterMetricFamily(
        "headrace_scheduler_ttft_seconds", "From grants to first tokens, added up", labels=["kind"]
    )
    for kind in ("predicted", "observed", "error"):
        seconds.add_metric([kind], ttft[f"{kind}_s"])
    yield seconds
    error = GaugeMetricFamily(
        "headrace_scheduler_step_error_ratio",
        "How far predicted step times were off of late, as a share of the measured",
        labels=["kind", "quantile"],
    )
    compared = CounterMetricFamily("headrace_scheduler_steps_compared", "Steps compared", labels=["kind"])
    for kind, model in stats["steps"].items():
        error.add_metric([kind, "0.5"], model["median"])
        error.add_metric([kind, "0.9"], model["p90"])
        compared.add_metric([kind], model["steps"])
    yield error
    yield compared


def _by_class(family: Any, name: str, meaning: str, values: list[float]) -> Any:
    made = family(f"headrace_scheduler_{name}", meaning, labels=["class"])
    for class_name, value in zip(_CLASS_NAMES, values, strict=True):
        made.add_metric([class_name], value)
    return made


def _buckets(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them; no counts at all are zeros."""
    names = [*(str(bound) for bound in bounds), "+Inf"]
    return list(zip(names, itertools.accumulate(counts or [0] * len(names)), strict=True))


class _RouterStream:
    """One Place stream."""

    def __init__(self, link: int) -> None:
        self.link = link
        # None stands for "the fleet, as it is when this is written".
        self.outbox: Outbox[bytes | None] = Outbox(_MAX_UNREAD, size=lambda item: len(item or b""))
        self.fleet_owed = False
        self.spans: dict[int, tracing.Span] = {}

    def owe_fleet(self) -> None:
        if not self.fleet_owed:
            self.fleet_owed = self.outbox.put(None)


class _WorkerStream:
    """One Join stream. Each message down is one command."""

    def __init__(self, link: int) -> None:
        self.link = link
        self.outbox: Outbox[bytes] = Outbox(1024, batch=1)


class SchedulerService:
    """The rpcs, on bytes: see :func:`add_to_server`. ``keep_time`` must run beside the server."""

    def __init__(
        self,
        config: SchedulerConfig,
        registry: CollectorRegistry,
        *,
        now: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        policy = {
            "max_queued": config.max_queued,
            "heartbeat_s": config.heartbeat_s,
            "reports_per_s": config.reports_per_s,
            "heartbeats_missed": config.heartbeats_missed,
            "router_grace_s": config.router_grace_s,
            "queue_factor": config.queue_factor,
            "credits": config.credits,
            "placement": config.placement,
            "ttft_target_s": (config.interactive_ttft_s, config.standard_ttft_s, config.batch_ttft_s),
            "tpot_target_s": (config.interactive_tpot_s, config.standard_tpot_s, config.batch_tpot_s),
            "dispatch_ahead_s": config.dispatch_ahead_s,
            "shed": config.shed,
            "preempt": config.preempt,
            "chunk_tokens": (config.min_chunk_tokens, config.max_chunk_tokens),
            "prefill_share": config.prefill_share,
            "disaggregation": config.disaggregation,
            "disaggregation_min_tokens": config.disaggregation_min_tokens,
            "fair_quantum_tokens": config.fair_quantum_tokens,
            "tenant_weights": tenant_weights(config.tenant_weights),
        }
        self._now = now
        self._weights = tenant_weights(config.tenant_weights)
        self.core = _gateway.Scheduler(
            json.dumps(policy),
            wait_buckets_s=metrics.WAIT_BUCKETS_S,
            seed=(rng or random.Random()).getrandbits(64),
            now_s=now(),
            # By the wall clock, so that leases of an earlier start aren't taken for ours: room for a million a
            # millisecond.
            first_lease=(time.time_ns() // 1_000_000) << 20,
            max_index_bytes=config.max_index_bytes,
        )
        self.metrics = SchedulerMetrics(registry, self.core)
        self._links = itertools.count(1)
        self._routers: dict[int, _RouterStream] = {}
        self._workers: dict[int, _WorkerStream] = {}
        self._stopping = False
        self._idle = asyncio.Event()
        self._rearm = asyncio.Event()
        self._armed_s: float | None = None
        self._writer: LedgerWriter | None = None
        #: Where the ledger is; empty = there is none.
        self.database = ""

    # rpcs

    async def Place(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        """A router's stream."""
        await self._refuse_when_stopping(context)
        stream = _RouterStream(next(self._links))
        self._routers[stream.link] = stream

        def receive(message: bytes) -> None:
            self._receive(self.core.router_message, stream.link, message)

        def encode(items: list[bytes | None]) -> bytes:
            parts = [item for item in items if item is not None]
            if len(parts) < len(items):
                stream.fleet_owed = False
                parts.append(self.core.fleet_view())
            return b"".join(parts)

        try:
            await exchange(request_iterator, context, receive=receive, outbox=stream.outbox, encode=encode)
        finally:
            del self._routers[stream.link]
            self._carry_out(self.core.router_lost(self._now(), stream.link))
            for span in stream.spans.values():
                _end_span(span, "router_lost")
            self._note_idle()

    async def Join(
        self, request_iterator: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        """A worker's stream."""
        await self._refuse_when_stopping(context)
        stream = _WorkerStream(next(self._links))
        self._workers[stream.link] = stream

        def receive(message: bytes) -> None:
            self._receive(self.core.worker_message, stream.link, message)

        try:
            await exchange(
                request_iterator, context, receive=receive, outbox=stream.outbox, encode=lambda items: items[0]
            )
        finally:
            del self._workers[stream.link]
            self._carry_out(self.core.worker_lost(self._now(), stream.link))
            self._note_idle()

    async def GetFleet(self, request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        """The fleet as believed."""
        return self.core.fleet(self._now())

    # The books.

    def open_books(
        self,
        books: dict[str, Any],
        known: tenants.Tenants,
        store: Store | None = None,
        shared: SharedMeters | None = None,
        *,
        retention_s: float = 0.0,
    ) -> None:
        """Before anything else, inside the loop: what was left open is taken up, and from now on a ledger is kept."""
        keeps = {
            "keeps": store is not None,
            "shared": shared is not None,
            "unix_offset_s": time.time() - self._now(),
            "measured": store.token_times() if store is not None else {},
        }
        left = store.open_bookings() if store is not None else []
        self.core.open_books(self._now(), json.dumps(books | keeps), self._settings(known), left)
        if store is not None:
            self._writer = LedgerWriter(self.core, store, shared, self._ledger_done, retention_s=retention_s)
            self._writer.wake()

    def set_tenants(self, known: tenants.Tenants) -> None:
        """Limits and weights that are in force from now on."""
        self.core.set_tenants(self._now(), self._settings(known))

    def _settings(self, known: tenants.Tenants) -> str:
        """What the core is told of tenants. A weight that the file leaves at 1 is the configuration's."""

        def weight(name: str, tenant: tenants.Tenant) -> float:
            return tenant.weight if tenant.weight != 1.0 else self._weights.get(name, 1.0)

        return json.dumps(
            {name: {"limits": each.limits.for_core(), "weight": weight(name, each)} for name, each in known.items()}
        )

    def _ledger_done(self, answers: list[Answer]) -> None:
        self._carry_out(self.core.ledger_done(self._now(), answers))

    async def close_books(self) -> None:
        """Writes what there is."""
        if self._writer is not None:
            await self._writer.stop()

    async def GetUsage(
        self, request: scheduler_pb2.GetUsageRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.GetUsageResponse:
        """What the ledger says. A long look holds nobody up: it has a thread and a connection of its own."""
        if not self.database:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no ledger is kept (ledger.database is empty)")
        try:
            return await asyncio.to_thread(_look_up, self.database, request.question)
        except ConfigError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StoreError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

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
                self._carry_out(self.core.tick(self._now()))

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

    async def _refuse_when_stopping(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        if self._stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler is stopping")

    # What comes, and what it leads to.

    def _receive(self, take: Callable[[float, int, bytes], _Effects], link: int, message: bytes) -> None:
        try:
            effects = take(self._now(), link, message)
        except ValueError as error:
            raise StreamError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        self._carry_out(effects)

    def _carry_out(self, effects: _Effects) -> None:
        sends, fleet_changed, ends, spans, notes, ledger = effects
        if ledger and self._writer is not None:
            self._writer.wake()
        for span in spans:
            self._span(*span)
        for link, message in sends:
            # A stream that takes no more is ending; a router asks again on its next one, or its leases expire.
            if (stream := self._routers.get(link) or self._workers.get(link)) is not None:
                stream.outbox.put(message)
        if fleet_changed:
            for router in self._routers.values():
                router.owe_fleet()
        for note in notes:
            log.info("%s", note)
        for link, status, reason in ends:
            if (stream := self._routers.get(link) or self._workers.get(link)) is not None:
                stream.outbox.close(StreamError(grpc.StatusCode[status], reason))
        wakeup_s = self.core.next_wakeup()
        if wakeup_s is not None and (self._armed_s is None or wakeup_s < self._armed_s):
            self._rearm.set()

    def _span(self, kind: str, link: int, ask: int, attributes: tuple[Any, ...], context: tuple[str, ...]) -> None:
        stream = self._routers.get(link)
        if stream is None:
            return
        if kind == "began":
            traceparent, tracestate = context
            span = tracing.start("scheduler.place", traceparent, kind="server", tracestate=tracestate)
            if span.recording:
                names = ("headrace.request_id", "headrace.class", "headrace.prompt_tokens")
                span.set("rpc.system.name", "grpc")
                span.set("rpc.method", f"{FULL_NAME}/Place")
                for name, value in zip(names, attributes, strict=True):
                    span.set(name, value)
                stream.spans[ask] = span
            return
        if (began := stream.spans.pop(ask, None)) is None:
            return
        if kind == "granted":
            worker_id, queue_s = attributes
            began.set("headrace.worker_id", worker_id)
            began.set("headrace.queue_s", queue_s)
        elif kind == "rejected":
            began.fail(attributes[0])
        _end_span(began, kind)


def _look_up(database: str, asked: types_pb2.UsageQuestion) -> scheduler_pb2.GetUsageResponse:
    question = usage.Question(
        list(asked.by),
        asked.tenant if asked.HasField("tenant") else None,
        asked.from_s if asked.HasField("from_s") else None,
        asked.to_s if asked.HasField("to_s") else None,
    )
    store = Store.open(database, "", write=False)
    try:
        answer = usage.ask(store, question)
    finally:
        store.close()
    lines = [types_pb2.UsageLine(**line.to_message()) for line in (*answer.lines, answer.total)]
    return scheduler_pb2.GetUsageResponse(report=types_pb2.UsageReport(lines=lines[:-1], total=lines[-1]))


def _end_span(span: tracing.Span, outcome: str) -> None:
    span.set("headrace.outcome", outcome)
    span.end()


def add_to_server(servicer: SchedulerService, server: grpc.aio.Server) -> None:
    """Add the service to a server. Messages are handed on as bytes: the core reads and writes them."""
    handlers = {
        "Place": grpc.stream_stream_rpc_method_handler(servicer.Place),
        "Join": grpc.stream_stream_rpc_method_handler(servicer.Join),
        "GetFleet": grpc.unary_unary_rpc_method_handler(servicer.GetFleet),
        "GetUsage": grpc.unary_unary_rpc_method_handler(
            servicer.GetUsage,
            request_deserializer=scheduler_pb2.GetUsageRequest.FromString,
            response_serializer=scheduler_pb2.GetUsageResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(FULL_NAME, handlers),))


def _open_books(config: Config, servicer: SchedulerService, known: tenants.Tenants) -> None:
    ledger, prices = config.ledger, config.prices
    store = shared = None
    if database := database_of(ledger):
        try:
            store = Store.open(database, ledger.name or config.scheduler.address)
        except ConfigError as error:
            # Nobody asked for this one: a machine without a place for it serves all the same.
            if ledger.database != "auto" or ledger.shared:
                raise
            log.warning("no ledger is kept, and limits count from this start: %s", error)
    if store is not None:
        servicer.database = database
        if ledger.shared:
            shared = SharedMeters(ledger.shared, store.name)
    books = {"worker_hour": prices.worker_hour, "worker_hours": pool_prices(prices.pools)}
    servicer.open_books(books, known, store, shared, retention_s=ledger.retention_days * 86_400)


async def run(config: Config) -> None:
    """Be the scheduler, until told to stop."""
    process.configure_logging(config.telemetry)
    tracing.setup("scheduler", config.telemetry)
    own = config.scheduler
    certificates = tls.load(config.tls)
    service = serving.Service("scheduler", own.address, metrics_address=own.metrics_address, tls=certificates)
    servicer = SchedulerService(own, service.registry)
    known = tenants.Following(Path(config.tenants.file) if config.tenants.file else None)
    _open_books(config, servicer, known.tenants)
    service.spawn(known.watch(servicer.set_tenants), "tenants")
    service.add(add_to_server, servicer, FULL_NAME)
    await service.start()
    service.spawn(servicer.keep_time(), "clock")
    if own.cache:
        service.spawn(BlocksLink(own.cache, servicer.core, certificates).run(), "blocks")
    try:
        await service.run_until_stopped(announce=True, drain=servicer.drain, grace_s=own.drain_grace_s)
    finally:
        await servicer.close_books()
        tracing.shutdown()
