"""What the worker's rpcs promise, over a real connection to a worker with the sim engine; and its own calls."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

from headrace import serving, tracing
from headrace.config import TelemetryConfig, WorkerConfig
from headrace.serving import Service
from headrace.tls import Tls
from headrace.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from headrace.worker import servicer as worker_servicer
from headrace.worker.blocks import BlockLog
from headrace.worker.composer import Limits
from headrace.worker.engine import BlocksStored
from headrace.worker.engines.sim import SimBackend
from headrace.worker.links import CacheLink, SchedulerLink
from headrace.worker.loop import BatchLoop
from headrace.worker.servicer import FULL_NAME, WorkerService
from headrace.worker.timing import Timing

PATIENCE_S = 20.0
STOP, LENGTH = types_pb2.OUTCOME_STOP, types_pb2.OUTCOME_LENGTH
CANCELLED, REJECTED = types_pb2.OUTCOME_CANCELLED, types_pb2.OUTCOME_REJECTED
FAST = Timing(prefill_tokens_per_s=1e6, step_s=0.0002, step_s_per_sequence=0.0)
SLOW = Timing(prefill_tokens_per_s=1e6, step_s=0.02, step_s_per_sequence=0.0)


def submit(number: int, prompt: list[int] | None = None, **changes: Any) -> worker_pb2.Submit:
    """A request that is right, unless told otherwise."""
    made = worker_pb2.Submit(
        request=number,
        request_id=f"r{number}",
        epoch=1,
        model="toy",
        prompt_ids=prompt if prompt is not None else [5, 6, 7],
        sampling=types_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, seeds=[1]),
        stopping=types_pb2.Stopping(max_tokens=4),
    )
    made.MergeFrom(worker_pb2.Submit(**changes))
    return made


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    finish: worker_pb2.TokenDelta.Finish | None = None
    cached: int | None = None


class Router:
    """A router's end of one Run stream."""

    def __init__(self, channel: grpc.aio.Channel, hello: worker_pb2.RunHello | None = None) -> None:
        self.call = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        self.hello = hello if hello is not None else worker_pb2.RunHello(router_id="r")
        self.welcome = worker_pb2.RunWelcome()
        self.answers: dict[tuple[int, int], Answer] = {}
        self.frames = 0
        self.news = asyncio.Event()
        self.reader = asyncio.create_task(self._read())

    async def send(self, *submits: worker_pb2.Submit, cancels: list[worker_pb2.Cancel] | None = None) -> None:
        message = worker_pb2.RunRequest(submits=submits, cancels=cancels or [])
        if not self.frames and not self.welcome.worker_id:
            message.hello.CopyFrom(self.hello)
        await self.call.write(message)

    async def _read(self) -> None:
        try:
            async for frame in self.call:
                self.frames += 1
                if frame.HasField("welcome"):
                    self.welcome = frame.welcome
                for delta in frame.deltas:
                    answer = self.answers.setdefault((delta.request, delta.choice), Answer())
                    assert answer.finish is None
                    assert delta.first_index == len(answer.ids)
                    answer.ids.extend(delta.ids)
                    if delta.HasField("cached_prompt_tokens"):
                        answer.cached = delta.cached_prompt_tokens
                    if delta.HasField("finish"):
                        answer.finish = delta.finish
                self.news.set()
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                assert not self.reader.done(), "the stream ended"
                self.news.clear()
                await self.news.wait()

    async def ended(self, number: int, choice: int = 0) -> Answer:
        place = (number, choice)
        await self.until(lambda: place in self.answers and self.answers[place].finish is not None)
        return self.answers[place]

    async def status(self) -> grpc.StatusCode:
        async with asyncio.timeout(PATIENCE_S):
            return await self.call.code()


@dataclass
class Worker:
    service: WorkerService
    server: Service
    channel: grpc.aio.Channel
    backend: SimBackend

    @property
    def stub(self) -> Any:
        return worker_pb2_grpc.WorkerServiceStub(self.channel)

    def router(self, **hello: str) -> Router:
        return Router(self.channel, worker_pb2.RunHello(router_id="r", **hello))

    async def load(self) -> worker_pb2.Load:
        return (await self.stub.GetLoad(worker_pb2.GetLoadRequest())).load

    async def at_rest(self) -> worker_pb2.Load:
        async def quiet() -> worker_pb2.Load | None:
            load = await self.load()
            busy = load.waiting_requests or load.running_requests or load.kv_blocks_used
            return None if busy or self.service._open else load

        load = await eventually(quiet, "a worker at rest", PATIENCE_S)
        assert load is not None
        return load


@asynccontextmanager
async def a_worker(timing: Timing = FAST, tls: Tls | None = None, **settings: Any) -> AsyncIterator[Worker]:
    config = WorkerConfig(worker_id="w", **({"slots": 4, "max_waiting": 64} | settings))
    limits = Limits(
        slots=config.slots,
        kv_blocks=64,
        block_tokens=4,
        context_tokens=200,
        chunk_tokens=16,
        idle_chunk_tokens=32,
        max_waiting=config.max_waiting,
    )
    backend = SimBackend(limits, timing, vocab_size=1000, eos_ids=(900, 901))
    server = Service("worker", "127.0.0.1:0", tls=tls)

    def names(ids: list[int], lora: str, salt: bytes) -> list[int]:
        return [hash((tuple(ids[: 4 * n]), salt)) & (2**64 - 1) for n in range(1, len(ids) // 4 + 1)]

    service = WorkerService(config, BatchLoop(backend, hash_blocks=names), server.registry, tls=tls)
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, service, FULL_NAME)
    await server.start()
    await service.start("toy")
    async with serving.channel(server.address, tls) as channel:
        try:
            yield Worker(service, server, channel, backend)
        finally:
            await service.stop()
            await server.stop(0)


# --- Run -------------------------------------------------------------------------------------------------------------


async def test_the_welcome_comes_first_and_says_who_it_is() -> None:
    async with a_worker() as worker:
        router = worker.router(instance_id=worker.service.instance_id)
        await router.send(submit(1))
        answer = await router.ended(1)
        assert answer.finish is not None
        assert (len(answer.ids), answer.finish.outcome, answer.cached) == (4, LENGTH, 0)
        assert answer.finish.usage == types_pb2.Usage(prompt_tokens=3, completion_tokens=4)
        assert router.welcome.instance_id == worker.service.instance_id
        assert router.welcome.description.model == "toy"
        described = await worker.stub.Describe(worker_pb2.DescribeRequest())
        assert described.description == router.welcome.description
        assert described.state == worker_pb2.WORKER_STATE_READY


async def test_another_instance_and_a_missing_hello_end_the_stream() -> None:
    async with a_worker() as worker:
        router = worker.router(instance_id="somebody")
        await router.send(submit(1))
        assert await router.status() == grpc.StatusCode.FAILED_PRECONDITION
        silent = worker.stub.Run()
        await silent.write(worker_pb2.RunRequest(submits=[submit(1)]))
        async with asyncio.timeout(PATIENCE_S):
            assert await silent.code() == grpc.StatusCode.INVALID_ARGUMENT


def _sampling(**changes: Any) -> types_pb2.Sampling:
    made = types_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, seeds=[1])
    for name, value in changes.items():
        if name == "seeds":
            del made.seeds[:]
            made.seeds.extend(value)
        elif name == "logit_bias":
            made.logit_bias.update(value)
        else:
            setattr(made, name, value)
    return made


BAD: list[tuple[Callable[[worker_pb2.Submit], None], str, int]] = [
    (lambda s: s.prompt_ids.append(1000), "prompt", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: s.ClearField("prompt_ids"), "prompt", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: s.prompt_ids.extend([1] * 197), "prompt", types_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED),
    (lambda s: setattr(s, "model", "other"), "model", types_pb2.ERROR_CODE_MODEL_NOT_FOUND),
    (lambda s: setattr(s, "lora", "x"), "lora", types_pb2.ERROR_CODE_UNSUPPORTED),
    (lambda s: setattr(s.handoff.produce, "keep_ms", 1), "handoff", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: setattr(s.stopping, "max_tokens", 0), "max_tokens", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: setattr(s.stopping, "min_tokens", 9), "min_tokens", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: s.stopping.stop_ids.append(5000), "stop_ids", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: s.sampling.CopyFrom(_sampling(seeds=[])), "n", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: s.sampling.CopyFrom(_sampling(seeds=range(5))), "n", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (
        lambda s: s.sampling.CopyFrom(_sampling(temperature=float("nan"))),
        "temperature",
        types_pb2.ERROR_CODE_INVALID_ARGUMENT,
    ),
    (lambda s: s.sampling.CopyFrom(_sampling(top_p=1.5)), "top_p", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: s.sampling.CopyFrom(_sampling(min_p=-0.1)), "min_p", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (
        lambda s: s.sampling.CopyFrom(_sampling(logit_bias={1000: 1.0})),
        "logit_bias",
        types_pb2.ERROR_CODE_INVALID_ARGUMENT,
    ),
    (lambda s: setattr(s.logprobs, "top", 1000), "top_logprobs", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: setattr(s.guided, "regex", "foo**"), "response_format", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: setattr(s.guided, "json_schema", "{"), "response_format", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
    (lambda s: setattr(s, "resumed_tokens", 3), "resumed_tokens", types_pb2.ERROR_CODE_INVALID_ARGUMENT),
]


async def test_bad_requests_are_refused_by_field_and_harm_nobody() -> None:
    async with a_worker() as worker:
        router = worker.router()
        for number, (spoil, param, code) in enumerate(BAD):
            bad, good = submit(2 * number), submit(2 * number + 1)
            spoil(bad)
            await router.send(bad, good)
            for choice in range(max(len(bad.sampling.seeds), 1)):
                refused = await router.ended(2 * number, choice)
                assert refused.finish is not None
                assert refused.finish.outcome == REJECTED, param
                assert (refused.finish.error.param, refused.finish.error.code) == (param, code)
                assert not refused.ids
            served = await router.ended(2 * number + 1)
            assert served.finish is not None
            assert served.finish.outcome == LENGTH
        load = await worker.at_rest()
        assert load.prompt_tokens_total == 3 * len(BAD)


async def test_one_frame_for_an_iteration() -> None:
    async with a_worker(SLOW) as worker:
        router = worker.router()
        await router.send(*(submit(number, stopping=types_pb2.Stopping(max_tokens=10)) for number in range(4)))
        for number in range(4):
            await router.ended(number)
        # A welcome, and 10 iterations or 11 when not all began together; not 40 frames.
        assert router.frames <= 13


async def test_cancel_frees_and_is_answered_once() -> None:
    async with a_worker(SLOW) as worker:
        router = worker.router()
        long = types_pb2.Stopping(max_tokens=190)
        await router.send(submit(1, stopping=long), submit(2, stopping=long))
        await router.until(lambda: bool(router.answers.get((1, 0), Answer()).ids))
        reasons = {1: types_pb2.OUTCOME_STOP, 2: types_pb2.OUTCOME_BUDGET}
        cancels = [worker_pb2.Cancel(request=n, epoch=1, reason=reason) for n, reason in reasons.items()]
        await router.send(cancels=[worker_pb2.Cancel(request=1, epoch=7), *cancels, *cancels])
        first, second = await router.ended(1), await router.ended(2)
        assert first.finish is not None
        assert second.finish is not None
        assert (first.finish.outcome, second.finish.outcome) == (STOP, CANCELLED)
        await worker.at_rest()


async def test_a_stream_that_ends_takes_its_requests_with_it() -> None:
    async with a_worker(SLOW) as worker:
        gone, stays = worker.router(), worker.router()
        long = types_pb2.Stopping(max_tokens=190)
        await gone.send(*(submit(number, stopping=long) for number in range(10)))
        await stays.send(submit(1, stopping=types_pb2.Stopping(max_tokens=30)))
        await gone.until(lambda: len(gone.answers) >= 3)
        gone.call.cancel()
        answer = await stays.ended(1)
        assert len(answer.ids) == 30
        await worker.at_rest()


async def test_a_full_worker_refuses_and_may_be_tried_again() -> None:
    async with a_worker(SLOW, max_waiting=2) as worker:
        router = worker.router()
        await router.send(*(submit(number, stopping=types_pb2.Stopping(max_tokens=20)) for number in range(20)))
        finishes = [(await router.ended(number)).finish for number in range(20)]
        refused = [finish for finish in finishes if finish is not None and finish.outcome == REJECTED]
        assert len(refused) == 14
        assert all(each.error.retryable and each.error.code == types_pb2.ERROR_CODE_OVERLOADED for each in refused)


async def test_a_deadline_in_time_left() -> None:
    async with a_worker(SLOW) as worker:
        router = worker.router()
        await router.send(submit(1, stopping=types_pb2.Stopping(max_tokens=190), time_left_ms=200))
        answer = await router.ended(1)
        assert answer.finish is not None
        assert answer.finish.outcome == types_pb2.OUTCOME_DEADLINE
        assert len(answer.ids) < 190


async def test_a_reader_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_servicer, "_MAX_UNREAD", 500)
    async with a_worker() as worker:
        # Each answer with its prompt's log-probabilities is some 60 kB; the stream is never read.
        call = worker.stub.Run()
        hello = worker_pb2.RunHello(router_id="r")
        await call.write(worker_pb2.RunRequest(hello=hello))
        wide = types_pb2.LogprobOptions(enabled=True, top=100, prompt=True)
        number = 0

        async def given_up() -> bool:
            nonlocal number
            if not worker.service._streams:
                return True
            submits = [submit(number + n, [3] * 190, logprobs=wide) for n in range(8)]
            number += 8
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                await asyncio.wait_for(call.write(worker_pb2.RunRequest(submits=submits)), 1.0)
            return not worker.service._streams

        await eventually(given_up, "the stream is cut", PATIENCE_S)
        await worker.at_rest()
        call.cancel()


# --- leaving, breaking -----------------------------------------------------------------------------------------------


async def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    async with a_worker(SLOW) as worker:
        router = worker.router()
        await router.send(submit(1, stopping=types_pb2.Stopping(max_tokens=30)))
        await router.until(lambda: (1, 0) in router.answers)
        draining = asyncio.create_task(worker.service.drain())
        await eventually(lambda: _is(worker, worker_pb2.WORKER_STATE_DRAINING), "draining")
        await router.send(submit(2))
        refused = await router.ended(2)
        assert refused.finish is not None
        assert refused.finish.error.code == types_pb2.ERROR_CODE_DRAINING
        assert refused.finish.error.retryable
        answer = await router.ended(1)
        assert len(answer.ids) == 30
        await draining
        assert await router.status() == grpc.StatusCode.UNAVAILABLE


async def _is(worker: Worker, state: int) -> bool:
    return (await worker.load()).state == state


async def test_a_stuck_step_makes_the_worker_unhealthy_and_its_end_makes_it_ready() -> None:
    async with a_worker(stall_timeout_s=0.2) as worker:
        import threading

        release = threading.Event()
        worker.backend._wait = lambda _: release.wait(PATIENCE_S) and False
        watch = asyncio.create_task(worker.service.watch())
        router = worker.router()
        await router.send(submit(1))
        assert await router.status() == grpc.StatusCode.UNAVAILABLE
        assert await _is(worker, worker_pb2.WORKER_STATE_UNHEALTHY)
        refused = worker.router()
        assert await refused.status() == grpc.StatusCode.UNAVAILABLE
        release.set()
        await eventually(lambda: _is(worker, worker_pb2.WORKER_STATE_READY), "ready again")
        watch.cancel()
        await worker.at_rest()


async def test_a_broken_engine_ends_the_streams() -> None:
    async with a_worker() as worker:

        def broken(_: object) -> Any:
            raise RuntimeError("boom")

        worker.backend.execute = broken  # type: ignore[method-assign]
        router = worker.router()
        await router.send(submit(1))
        assert await router.status() == grpc.StatusCode.UNAVAILABLE
        async with asyncio.timeout(PATIENCE_S):
            assert "boom" in await worker.service.failure
        assert await _is(worker, worker_pb2.WORKER_STATE_UNHEALTHY)


# --- spans -----------------------------------------------------------------------------------------------------------


async def test_spans_are_children_of_the_caller_and_end_once() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing.setup("worker", TelemetryConfig(), exporter)
    try:
        async with a_worker() as worker:
            router = worker.router()
            parents = {n: f"00-{n:032x}-{n:016x}-01" for n in (1, 2)}
            long = types_pb2.Stopping(max_tokens=190)
            await router.send(
                submit(1, trace=types_pb2.TraceContext(traceparent=parents[1])),
                submit(2, trace=types_pb2.TraceContext(traceparent=parents[2]), stopping=long),
                submit(3),
            )
            await router.ended(1)
            await router.send(cancels=[worker_pb2.Cancel(request=2, epoch=1, reason=CANCELLED)])
            await router.ended(2)
            await router.ended(3)
        spans = exporter.get_finished_spans()
        roots = {span.context.trace_id: span for span in spans if span.name == "worker.run"}
        assert set(roots) == {1, 2}
        for trace, root in roots.items():
            assert root.parent is not None
            assert root.parent.span_id == trace
            children = [span for span in spans if span.parent and span.parent.span_id == root.context.span_id]
            assert sorted(span.name for span in children) == ["worker.decode", "worker.prefill", "worker.queue"]
        assert roots[1].attributes is not None
        assert roots[1].attributes["gen_ai.usage.completion_tokens"] == 4
        assert roots[1].attributes["gen_ai.latency.time_to_first_token"] >= 0  # type: ignore[operator]
        assert roots[2].attributes is not None
        assert roots[2].attributes["headrace.outcome"] in ("cancelled", "length")
    finally:
        tracing.setup("worker", TelemetryConfig())


# --- the worker's own calls ------------------------------------------------------------------------------------------


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self, heartbeat_ms: int = 10) -> None:
        self.heartbeat_ms = heartbeat_ms
        self.hellos: list[scheduler_pb2.JoinHello] = []
        self.loads: list[worker_pb2.Load] = []
        self.commands: asyncio.Queue[scheduler_pb2.JoinResponse | None] = asyncio.Queue()

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[scheduler_pb2.JoinResponse]:
        async def read() -> None:
            async for message in request_iterator:
                if message.HasField("hello"):
                    self.hellos.append(message.hello)
                self.loads.append(message.load)

        reader = asyncio.create_task(read())
        try:
            yield scheduler_pb2.JoinResponse(welcome=scheduler_pb2.JoinWelcome(heartbeat_ms=self.heartbeat_ms))
            while (command := await self.commands.get()) is not None:
                yield command
        finally:
            reader.cancel()


class FakeCache(cache_pb2_grpc.CacheServiceServicer):
    """Wants what ``want`` says after each hello."""

    def __init__(self, want: Callable[[cache_pb2.BlocksHello], cache_pb2.PublishBlocksResponse]) -> None:
        self.want = want
        self.events: list[cache_pb2.BlockEvent] = []
        self.snapshots: list[cache_pb2.BlockSnapshot] = []
        self.hellos = 0
        self.goodbyes = 0
        self.cut = asyncio.Event()

    async def PublishBlocks(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[cache_pb2.PublishBlocksResponse]:
        first = await anext(request_iterator)
        self.hellos += 1
        yield self.want(first.hello)
        messages = request_iterator.__aiter__()
        while not self.cut.is_set():
            try:
                message = await anext(messages)
            except StopAsyncIteration:
                self.goodbyes += 1
                return
            self.events.extend(message.events)
            if message.HasField("snapshot"):
                self.snapshots.append(message.snapshot)
        self.cut.clear()


@asynccontextmanager
async def served(add: Callable[[Any, grpc.aio.Server], None], servicer: object) -> AsyncIterator[str]:
    server = grpc.aio.server(options=serving.SERVER_OPTIONS)
    add(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_worker_reports_as_often_as_it_was_told_last() -> None:
    scheduler = FakeScheduler(heartbeat_ms=3_600_000)
    async with served(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, scheduler) as address:
        link = SchedulerLink(
            address,
            lambda: scheduler_pb2.JoinHello(worker_id="w"),
            lambda: worker_pb2.Load(state=worker_pb2.WORKER_STATE_READY),
            lambda _: None,
            on_lost=lambda: None,
        )
        task = asyncio.create_task(link.run())
        await asyncio.wait_for(link.reported(), 30)
        faster = scheduler_pb2.JoinResponse(set_heartbeat=scheduler_pb2.SetHeartbeat(heartbeat_ms=10))
        scheduler.commands.put_nowait(faster)
        await _eventually(lambda: len(scheduler.loads) > 6, "heartbeats at the new pace")
        task.cancel()


async def test_joining_reporting_and_joining_again() -> None:
    scheduler = FakeScheduler()
    commands: list[scheduler_pb2.JoinResponse] = []
    lost: list[bool] = []
    state = worker_pb2.WORKER_STATE_READY
    async with served(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, scheduler) as address:
        link = SchedulerLink(
            address,
            lambda: scheduler_pb2.JoinHello(worker_id="w"),
            lambda: worker_pb2.Load(state=state),
            commands.append,
            on_lost=lambda: lost.append(True),
        )
        task = asyncio.create_task(link.run())
        await _eventually(lambda: len(scheduler.loads) > 3, "heartbeats")
        state = worker_pb2.WORKER_STATE_DRAINING
        link.state_changed()
        await _eventually(lambda: scheduler.loads[-1].state == state, "the new state")
        scheduler.commands.put_nowait(scheduler_pb2.JoinResponse(drain=scheduler_pb2.Drain(grace_ms=5)))
        await _eventually(lambda: len(commands) == 1, "a command")
        scheduler.commands.put_nowait(None)
        await _eventually(lambda: len(scheduler.hellos) == 2, "a second hello")
        assert lost == [True]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_is_put_aside_and_goes_on_as_told_or_when_nobody_is_left_to_tell() -> None:
    async with a_worker(SLOW, slots=1) as worker:
        router = worker.router()
        await router.send(submit(1, lease=7, stopping=types_pb2.Stopping(max_tokens=150)))
        await router.until(lambda: len(router.answers.get((1, 0), Answer()).ids) >= 2)
        worker.service.on_command(scheduler_pb2.JoinResponse(preempt=scheduler_pb2.Preempt(lease=7)))
        # Its slot is another's.
        await router.send(submit(2, lease=8))
        await router.ended(2)
        said = len(router.answers[1, 0].ids)
        assert said < 150
        worker.service.on_command(scheduler_pb2.JoinResponse(resume=scheduler_pb2.Resume(lease=7)))
        await router.until(lambda: len(router.answers[1, 0].ids) > said)
        worker.service.on_command(scheduler_pb2.JoinResponse(preempt=scheduler_pb2.Preempt(lease=7)))
        worker.service.on_command(scheduler_pb2.JoinResponse(preempt=scheduler_pb2.Preempt(lease=99)))
        worker.service.on_scheduler_lost()
        answer = await router.ended(1)
        assert (len(answer.ids), answer.finish.outcome if answer.finish else None) == (150, LENGTH)
        await worker.at_rest()


async def _eventually(condition: Callable[[], bool], what: str) -> None:
    async def look() -> bool:
        return condition()

    await eventually(look, what, PATIENCE_S)


def _hello(log: BlockLog) -> Callable[[], cache_pb2.BlocksHello]:
    return lambda: cache_pb2.BlocksHello(oldest_sequence=log.oldest_sequence, next_sequence=log.next_sequence)


async def test_block_events_from_where_the_cache_wants_them() -> None:
    log = BlockLog()
    log.add([BlocksStored(0, (1, 2)), BlocksStored(2, (3,))])
    cache = FakeCache(lambda hello: cache_pb2.PublishBlocksResponse(resume_from=2))
    async with served(cache_pb2_grpc.add_CacheServiceServicer_to_server, cache) as address:
        link = CacheLink(address, _hello(log), log)
        task = asyncio.create_task(link.run())
        await _eventually(lambda: len(cache.events) == 1, "the second event")
        log.add([BlocksStored(3, (4,))])
        link.grown()
        await _eventually(lambda: [event.sequence for event in cache.events] == [2, 3], "the third")
        link.leave()
        async with asyncio.timeout(PATIENCE_S):
            await task
        await _eventually(lambda: cache.goodbyes == 1, "a goodbye")


async def test_a_cache_that_cannot_follow_gets_a_snapshot() -> None:
    log = BlockLog(keep=2)
    for n in range(1, 10):
        log.add([BlocksStored(n - 1, (n,))])
    cache = FakeCache(lambda hello: cache_pb2.PublishBlocksResponse(snapshot=True))
    async with served(cache_pb2_grpc.add_CacheServiceServicer_to_server, cache) as address:
        link = CacheLink(address, _hello(log), log)
        task = asyncio.create_task(link.run())
        await _eventually(lambda: len(cache.snapshots) == 1, "a snapshot")
        (chain,) = cache.snapshots[0].chains
        assert (chain.parent, list(chain.hashes), cache.snapshots[0].next_sequence) == (0, list(range(1, 10)), 10)
        # The stream breaks; what happens meanwhile is more than is kept.
        cache.cut.set()
        log.add([BlocksStored(n, (n + 1,)) for n in range(9, 20)])
        link.grown()
        await _eventually(lambda: len(cache.snapshots) >= 2, "another one")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- the process -----------------------------------------------------------------------------------------------------

_PROCESS = """
import asyncio, sys
from pathlib import Path
from headrace import config
from headrace.worker import service
asyncio.run(service.run(config.load(Path(sys.argv[1]))))
"""


@asynccontextmanager
async def a_process(folder: Path, **settings: Any) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    model = ToyModel("toy").write(folder)
    worker = {"model": "toy", "engine": "sim", "scheduler": "", "cache": "", "kv_tokens": 4096} | settings
    lines = ["[[models]]", 'name = "toy"', f"source = {json.dumps(str(model))}", "[worker]"]
    path = folder / "config.toml"
    path.write_text("\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in worker.items())]))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _PROCESS, str(path), stdout=pipe)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_lets_what_runs_finish(tmp_path: Path) -> None:
    async with a_process(tmp_path, sim_step_ms=20.0) as (process, ready):
        assert ready["ready"] == "worker"
        assert ready["worker_id"]
        async with serving.channel(ready["address"]) as channel:
            router = Router(channel, worker_pb2.RunHello(router_id="r", instance_id=ready["instance_id"]))
            await router.send(submit(1, stopping=types_pb2.Stopping(max_tokens=40)))
            await router.until(lambda: (1, 0) in router.answers)
            process.send_signal(signal.SIGTERM)
            answer = await router.ended(1)
            assert len(answer.ids) == 40
            async with asyncio.timeout(PATIENCE_S):
                assert await process.wait() == 0


async def test_the_grace_has_an_end(tmp_path: Path) -> None:
    async with (
        a_process(tmp_path, sim_step_ms=1000.0, drain_grace_s=0.2) as (process, ready),
        serving.channel(ready["address"]) as channel,
    ):
        router = Router(channel)
        await router.send(submit(1, stopping=types_pb2.Stopping(max_tokens=50)))
        await router.until(lambda: (1, 0) in router.answers)
        process.send_signal(signal.SIGTERM)
        assert await router.status() != grpc.StatusCode.OK
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
