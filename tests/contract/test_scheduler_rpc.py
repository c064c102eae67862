"""The scheduler's contract over real gRPC: Place, Join, GetFleet, their errors, metrics, spans, and the end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from tests.support.waiting import eventually

from headrace import serving, tracing
from headrace.config import SchedulerConfig, TelemetryConfig
from headrace.scheduler.service import FULL_NAME, SchedulerService, add_to_server
from headrace.serving import Service
from headrace.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, worker_pb2

TIMEOUT_S = 20.0
TRACE = "1" * 32

CONFIG = SchedulerConfig(
    address="127.0.0.1:0",
    metrics_address="127.0.0.1:0",
    queue_factor=1.0,
    # Peers in these tests speak when they have something to say.
    heartbeat_s=60.0,
)


class Scheduler:
    """A scheduler on loopback and its peers."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.service = Service("scheduler", config.address, metrics_address=config.metrics_address)
        self.servicer = SchedulerService(config, self.service.registry)
        self.service.add(add_to_server, self.servicer, FULL_NAME)

    async def start(self) -> None:
        await self.service.start()
        self.service.spawn(self.servicer.keep_time(), "clock")
        await self.service.set_ready(True)
        self.channel = serving.channel(self.service.address)
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.service.stop(0.0)

    async def fleet(self) -> scheduler_pb2.GetFleetResponse:
        return await self.stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=TIMEOUT_S)

    async def metrics(self) -> dict[str, float]:
        """Series and values."""
        lines = generate_latest(self.service.registry).decode().splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    async def router(self, router_id: str = "r", **hello: Any) -> Router:
        router = Router(self.stub.Place())
        await router.send(hello=scheduler_pb2.RouterHello(router_id=router_id, **hello))
        # The view that comes first of all.
        await router.seen(lambda: router.fleets)
        return router

    async def worker(self, name: str = "w", state: int = worker_pb2.WORKER_STATE_READY, **of: Any) -> Worker:
        worker = Worker(self.stub.Join(), name, **of)
        await worker.hello()
        assert (await worker.read()).welcome.heartbeat_ms
        await worker.report(state)
        return worker


class Router:
    """One Place stream, and all it was told."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.fleets: list[scheduler_pb2.FleetView] = []
        self.answers: list[scheduler_pb2.Placement] = []

    async def send(self, **parts: Any) -> None:
        await self.call.write(scheduler_pb2.PlaceRequest(**parts))

    async def ask(self, *numbers: int, **of: Any) -> None:
        asks = []
        for number in numbers:
            fields: dict[str, Any] = {"request_id": f"req-{number}", "pools": ["p"], "prompt_tokens": 5, "n": 1}
            asks.append(scheduler_pb2.PlaceRequest.Ask(ask=number, **(fields | of)))
        await self.send(asks=asks)

    async def release(self, lease: int) -> None:
        await self.send(releases=[scheduler_pb2.Release(lease=lease, outcome=types_pb2.OUTCOME_STOP)])

    async def seen(self, until: Any) -> None:
        """Read on until that is so."""
        async with asyncio.timeout(TIMEOUT_S):
            while not until():
                message = await self.call.read()
                assert message is not grpc.aio.EOF, await self.call.details()
                self.answers += message.placements
                if message.HasField("fleet"):
                    self.fleets.append(message.fleet)

    async def more(self) -> None:
        """Read on until there is another answer."""
        before = len(self.answers)
        await self.seen(lambda: len(self.answers) > before)

    async def answer(self, number: int, kind: str) -> Any:
        """The answer of that kind to that ask."""

        def those() -> list[Any]:
            return [
                getattr(answer, kind)
                for answer in self.answers
                if answer.ask == number and answer.WhichOneof("answer") == kind
            ]

        await self.seen(those)
        (only,) = those()
        return only


class Worker:
    """One Join stream."""

    def __init__(self, call: Any, name: str, pool: str = "p", slots: int = 1, model: str = "m") -> None:
        self.call, self.name, self.pool = call, name, pool
        self.instance = f"{name}-instance"
        self.description = types_pb2.ModelDescription(model=model, slots=slots, context_tokens=100, block_tokens=4)

    async def hello(self, **changes: Any) -> None:
        fields = {
            "worker_id": self.name,
            "instance_id": self.instance,
            "pool": self.pool,
            "address": f"{self.name}:1",
            "description": self.description,
        }
        await self.call.write(scheduler_pb2.JoinRequest(hello=scheduler_pb2.JoinHello(**(fields | changes))))

    async def report(self, state: int = worker_pb2.WORKER_STATE_READY, **load: Any) -> None:
        await self.call.write(scheduler_pb2.JoinRequest(load=worker_pb2.Load(state=state, **load)))  # type: ignore[arg-type]

    async def read(self) -> scheduler_pb2.JoinResponse:
        message = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
        assert message is not grpc.aio.EOF, await self.call.details()
        return message

    async def ended(self) -> grpc.StatusCode:
        return await asyncio.wait_for(self.call.code(), TIMEOUT_S)


@asynccontextmanager
async def scheduler_of(**config: Any) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(dataclasses.replace(CONFIG, **config))
    await scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop()


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    async with scheduler_of() as made:
        yield made


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter, before = InMemorySpanExporter(), tracing._tracing
    tracing.setup("scheduler", TelemetryConfig(), exporter)
    yield exporter
    tracing.shutdown()
    tracing._tracing = before


async def test_ask_grant_queue_release(scheduler: Scheduler) -> None:
    worker = await scheduler.worker()
    router = await scheduler.router()
    await router.ask(1, 2)
    grant = await router.answer(1, "grant")
    assert (grant.worker_id, grant.instance_id, grant.address) == ("w", worker.instance, "w:1")
    assert grant.lease
    queued = await router.answer(2, "queued")
    assert queued.position == 1
    fleet = await scheduler.fleet()
    assert (fleet.queued_asks, fleet.routers, fleet.leases) == (1, 1, 1)
    assert [(each.worker_id, each.leases, each.load.state) for each in fleet.workers] == [("w", 1, 2)]
    await router.release(grant.lease)
    second = await router.answer(2, "grant")
    assert second.lease != grant.lease
    await router.release(second.lease)
    await eventually(lambda: no_leases(scheduler), "no leases")


async def no_leases(scheduler: Scheduler) -> bool:
    fleet = await scheduler.fleet()
    return not (fleet.leases or fleet.queued_asks or any(each.leases for each in fleet.workers))


async def test_many_asks_in_one_message(scheduler: Scheduler) -> None:
    await scheduler.worker(slots=500)
    router = await scheduler.router()
    await router.ask(*range(500))
    await router.seen(lambda: len(router.answers) == 500)
    assert {answer.ask for answer in router.answers} == set(range(500))
    assert len({answer.grant.lease for answer in router.answers}) == 500
    await router.send(releases=[scheduler_pb2.Release(lease=answer.grant.lease) for answer in router.answers])
    await eventually(lambda: no_leases(scheduler), "no leases")


async def test_a_withdrawn_ask_is_not_answered(scheduler: Scheduler) -> None:
    """C06 a."""
    await scheduler.worker()
    router = await scheduler.router()
    await router.ask(1, 2, 3)
    grant = await router.answer(1, "grant")
    await router.send(withdrawals=[2])
    await router.release(grant.lease)
    await router.answer(3, "grant")
    assert [answer.WhichOneof("answer") for answer in router.answers if answer.ask == 2] == ["queued"]
    assert (await scheduler.metrics())["headrace_scheduler_withdrawals_total"] == 1


async def test_an_ask_and_its_withdrawal_in_one_message(scheduler: Scheduler) -> None:
    await scheduler.worker()
    router = await scheduler.router()
    await router.ask(1)
    await router.answer(1, "grant")
    ask = scheduler_pb2.PlaceRequest.Ask(ask=2, pools=["p"], prompt_tokens=1, n=1)
    await router.send(asks=[ask], withdrawals=[2])
    await router.answer(2, "queued")
    await eventually(lambda: queued(scheduler, 0), "an empty queue")


async def queued(scheduler: Scheduler, count: int) -> bool:
    return (await scheduler.fleet()).queued_asks == count


async def test_refusals_say_why_and_when(scheduler: Scheduler) -> None:
    await scheduler.worker()
    router = await scheduler.router()
    await router.ask(1, pools=[])
    assert (await router.answer(1, "rejected")).code == types_pb2.ERROR_CODE_INVALID_ARGUMENT
    await router.ask(2, prompt_tokens=100)
    too_long = await router.answer(2, "rejected")
    assert (too_long.code, too_long.retryable) == (types_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, False)
    assert "100 tokens" in too_long.message
    await router.ask(3, time_left_ms=0)
    assert (await router.answer(3, "rejected")).code == types_pb2.ERROR_CODE_DEADLINE_EXCEEDED
    await router.ask(4, avoid_instances=["w-instance"])
    avoided = await router.answer(4, "rejected")
    assert (avoided.code, avoided.retryable) == (types_pb2.ERROR_CODE_UNAVAILABLE, True)
    assert avoided.retry_after_ms > 0
    series = await scheduler.metrics()
    assert series['headrace_scheduler_rejections_total{code="context_length_exceeded"}'] == 1


async def test_an_overfull_queue(scheduler: Scheduler) -> None:
    async with scheduler_of(max_queued=1) as small:
        await small.worker()
        router = await small.router()
        await router.ask(1, 2, 3)
        refused = await router.answer(3, "rejected")
        assert (refused.code, refused.retryable) == (types_pb2.ERROR_CODE_OVERLOADED, True)
        assert refused.retry_after_ms > 0


async def test_a_deadline_in_the_queue(scheduler: Scheduler) -> None:
    """C07 a, over the wire: the timer wakes the core."""
    await scheduler.worker()
    router = await scheduler.router()
    await router.ask(1)
    await router.ask(2, time_left_ms=30)
    assert (await router.answer(2, "rejected")).code == types_pb2.ERROR_CODE_DEADLINE_EXCEEDED


async def test_the_fleet_is_told_first_and_at_changes(scheduler: Scheduler) -> None:
    router = await scheduler.router()
    assert list(router.fleets[0].pools) == []
    worker = await scheduler.worker()
    await router.seen(lambda: router.fleets[-1].pools and router.fleets[-1].pools[0].ready_workers == 1)
    (pool,) = router.fleets[-1].pools
    assert (pool.name, list(pool.addresses), pool.description.model) == ("p", ["w:1"], "m")
    await worker.report(worker_pb2.WORKER_STATE_DRAINING)
    await router.seen(lambda: router.fleets[-1].pools[0].ready_workers == 0)
    await worker.call.done_writing()
    await router.seen(lambda: not router.fleets[-1].pools)
    assert await worker.ended() == grpc.StatusCode.OK


async def test_hello_comes_first(scheduler: Scheduler) -> None:
    place, join = scheduler.stub.Place(), scheduler.stub.Join()
    await place.write(scheduler_pb2.PlaceRequest(withdrawals=[1]))
    await join.write(scheduler_pb2.JoinRequest(load=worker_pb2.Load()))
    assert await place.code() == await join.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_that_says_too_little(scheduler: Scheduler) -> None:
    worker = Worker(scheduler.stub.Join(), "w")
    await worker.hello(address="")
    assert await worker.ended() == grpc.StatusCode.INVALID_ARGUMENT
    assert "address" in await worker.call.details()


async def test_a_worker_of_another_model(scheduler: Scheduler) -> None:
    await scheduler.worker("a")
    other = Worker(scheduler.stub.Join(), "b", model="other")
    await other.hello()
    assert await other.ended() == grpc.StatusCode.INVALID_ARGUMENT
    assert "'other'" in await other.call.details()


async def test_an_instance_joins_once(scheduler: Scheduler) -> None:
    worker = await scheduler.worker()
    twin = Worker(scheduler.stub.Join(), "w")
    await twin.hello()
    assert await twin.ended() == grpc.StatusCode.ALREADY_EXISTS
    router = await scheduler.router()
    await router.ask(1)
    assert (await router.answer(1, "grant")).instance_id == worker.instance


async def test_a_silent_worker_is_out(scheduler: Scheduler) -> None:
    async with scheduler_of(heartbeat_s=0.02, heartbeats_missed=2) as strict:
        worker = await strict.worker()
        assert await worker.ended() == grpc.StatusCode.UNAVAILABLE
        assert "no report" in await worker.call.details()
        assert not (await strict.fleet()).workers


async def test_leases_end_with_their_worker(scheduler: Scheduler) -> None:
    worker = await scheduler.worker()
    router = await scheduler.router()
    await router.ask(1, 2)
    grant = await router.answer(1, "grant")
    worker.call.cancel()
    assert (await router.answer(2, "rejected")).code == types_pb2.ERROR_CODE_UNAVAILABLE
    assert await no_leases(scheduler)
    await router.release(grant.lease)
    again = await scheduler.worker("w2")
    await router.ask(3)
    assert (await router.answer(3, "grant")).instance_id == again.instance


async def test_a_lost_router_leaves_the_queue_at_once_and_its_leases_later() -> None:
    async with scheduler_of(router_grace_s=0.05) as scheduler:
        await scheduler.worker()
        lost, other = await scheduler.router("lost"), await scheduler.router("other")
        await lost.ask(1, 2)
        await lost.answer(1, "grant")
        await lost.answer(2, "queued")
        await other.ask(7)
        assert (await other.answer(7, "queued")).position == 2
        lost.call.cancel()
        await other.answer(7, "grant")
        fleet = await scheduler.fleet()
        assert (fleet.queued_asks, fleet.leases, fleet.routers) == (0, 1, 1)


async def test_a_router_comes_back_with_its_leases(scheduler: Scheduler) -> None:
    await scheduler.worker(slots=2)
    router = await scheduler.router()
    await router.ask(1, 2)
    kept, dropped = await router.answer(1, "grant"), await router.answer(2, "grant")
    router.call.cancel()
    running = scheduler_pb2.RouterHello.RunningLease(lease=kept.lease, instance_id=kept.instance_id)
    back = await scheduler.router(running=[running])
    fleet = await scheduler.fleet()
    assert (fleet.leases, fleet.routers) == (1, 1)
    assert dropped.lease != kept.lease
    await back.release(kept.lease)
    await eventually(lambda: no_leases(scheduler), "no leases")


async def test_spans_of_a_placement(scheduler: Scheduler, exporter: InMemorySpanExporter) -> None:
    """C15 a, c: under the router's span, through the queue, ended however it ends."""
    await scheduler.worker()
    router = await scheduler.router()
    for number in (1, 2, 3):
        await router.ask(number, trace=types_pb2.TraceContext(traceparent=f"00-{TRACE}-{number:016x}-01"))
    await router.ask(4, prompt_tokens=500, trace=types_pb2.TraceContext(traceparent=f"00-{TRACE}-{4:016x}-01"))
    await router.ask(5)
    grant = await router.answer(1, "grant")
    await router.answer(5, "queued")
    await router.send(withdrawals=[2])
    await router.release(grant.lease)
    await router.answer(3, "grant")
    spans = {span.parent.span_id: span for span in exporter.get_finished_spans() if span.parent}
    outcomes = {parent: (span.attributes or {})["headrace.outcome"] for parent, span in spans.items()}
    assert outcomes == {1: "granted", 2: "cancelled", 3: "granted", 4: "rejected"}
    assert len(exporter.get_finished_spans()) == 4, "what isn't traced has no span"
    for span in spans.values():
        assert span.name == "scheduler.place"
        assert f"{span.get_span_context().trace_id:032x}" == TRACE
    assert (spans[3].attributes or {})["headrace.worker_id"] == "w"


async def test_series_of_workers_that_are_gone_are_gone(scheduler: Scheduler) -> None:
    """C15 f, e: labels from closed lists, and from the fleet as it is."""
    before = set(await scheduler.metrics())
    for index in range(20):
        worker = await scheduler.worker(f"w{index}")
        worker.call.cancel()
    await eventually(lambda: no_workers(scheduler), "no workers")
    router = await scheduler.router()
    for number in range(50):
        await router.ask(number, tenant=f"t{number}", request_id=f"x{number}", pools=[f"p{number}"], session_id="s")
    await router.send(withdrawals=list(range(50)))
    await eventually(lambda: queued(scheduler, 0), "an empty queue")
    after = {name for name in await scheduler.metrics() if name.startswith("headrace")}
    assert after <= before


async def no_workers(scheduler: Scheduler) -> bool:
    return not (await scheduler.fleet()).workers


async def test_the_end(scheduler: Scheduler) -> None:
    """Streams end with UNAVAILABLE, new ones are refused, nobody hangs."""
    worker = await scheduler.worker()
    router = await scheduler.router()
    await router.ask(1, 2)
    await router.answer(2, "queued")
    stopping = asyncio.Event()
    stopping.set()
    running = asyncio.create_task(
        scheduler.service.run_until_stopped(drain=scheduler.servicer.drain, grace_s=TIMEOUT_S, stopping=stopping)
    )
    assert await router.call.code() == await worker.ended() == grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(running, TIMEOUT_S)


async def test_streams_are_refused_while_draining(scheduler: Scheduler) -> None:
    await asyncio.wait_for(scheduler.servicer.drain(), TIMEOUT_S)
    for call in (scheduler.stub.Place(), scheduler.stub.Join()):
        assert await call.code() == grpc.StatusCode.UNAVAILABLE


async def test_two_hundred_that_leave_at_random_moments(scheduler: Scheduler) -> None:
    """C06 h at the scheduler: asks, withdrawals and releases in any order leave nothing."""
    for name in ("a", "b"):
        await scheduler.worker(name, slots=4)
    routers = [await scheduler.router(f"r{index}") for index in range(4)]

    async def clients(router: Router, first: int) -> None:
        for number in range(first, first + 50):
            await router.ask(number)
            if number % 3 == 0:
                await router.send(withdrawals=[number])
            released = set()
            while True:
                for answer in router.answers:
                    if answer.HasField("grant") and answer.ask not in released:
                        released.add(answer.ask)
                        await router.release(answer.grant.lease)
                if number % 3 == 0 or number in released:
                    break
                await router.more()
        # Grants that crossed a withdrawal: what the router does is to release them.
        await router.ask(first + 1000)
        await router.seen(lambda: any(a.ask == first + 1000 and a.HasField("grant") for a in router.answers))
        held = [answer.grant.lease for answer in router.answers if answer.HasField("grant")]
        await router.send(releases=[scheduler_pb2.Release(lease=lease) for lease in held])

    async with asyncio.timeout(60):
        await asyncio.gather(*(clients(router, index * 100) for index, router in enumerate(routers)))
    await eventually(lambda: no_leases(scheduler), "no leases")
