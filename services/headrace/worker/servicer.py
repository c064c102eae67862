"""The worker's driver: streams become calls of the engine, step results become frames; membership and health.

Each iteration of the engine makes one call on the loop (``_on_step``), which sorts its deltas to the routers' streams;
``serving.Outbox`` turns what is ready into one message. A router that does not read is cut when its outbox is full, and
with its stream all its requests end.

States: STARTING (loads), READY, DRAINING (takes nothing new, finishes what runs), UNHEALTHY (a step hangs, or the
engine is gone). What this module leaves to others: what a request may be (``validate.py``), batching, KV, engines,
and the calls that the worker makes itself (``links.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import socket
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace import metrics, tracing
from headrace.config import WorkerConfig
from headrace.errors import error
from headrace.serving import Outbox, StreamError, exchange
from headrace.tls import Tls
from headrace.v1 import scheduler_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from headrace.worker.blocks import BlockLog
from headrace.worker.engine import (
    Delta,
    Engine,
    Finish,
    Handoff,
    Outcome,
    Request,
    StepCost,
    StepLimits,
    StepResult,
    TokenLogprobs,
)
from headrace.worker.handoffs import Handoffs
from headrace.worker.transfer import Progress, Received, Waiters, give, take
from headrace.worker.validate import CLASS_TTFT_S, begun, request_of

log = logging.getLogger(__name__)

FULL_NAME = "headrace.v1.WorkerService"

STARTING = worker_pb2.WORKER_STATE_STARTING
READY = worker_pb2.WORKER_STATE_READY
DRAINING = worker_pb2.WORKER_STATE_DRAINING
UNHEALTHY = worker_pb2.WORKER_STATE_UNHEALTHY

#: Deltas that wait for one router's stream; some 10 s of a full batch.
_MAX_UNREAD = 32768
_DELTAS_IN_MESSAGE = 4096
_STEPS_IN_REPORT = 64
#: Of each router's requests, and of those whose router was lost: so many of the last ones are told of.
_ENDED_KEPT = 1024
_ORPHANS_KEPT = 8192
#: For KV that has been computed to begin to come.
_BEGIN_S = 1.0

#: What a router may give as the reason of a cancellation, and how the request then ends.
_CANCEL_OUTCOMES = {
    types_pb2.OUTCOME_STOP: types_pb2.OUTCOME_STOP,
    types_pb2.OUTCOME_DEADLINE: types_pb2.OUTCOME_DEADLINE,
}
_OUTCOME_NAMES = {
    types_pb2.OUTCOME_STOP: "stop",
    types_pb2.OUTCOME_LENGTH: "length",
    types_pb2.OUTCOME_DEADLINE: "deadline",
    types_pb2.OUTCOME_CANCELLED: "cancelled",
    types_pb2.OUTCOME_REJECTED: "rejected",
    types_pb2.OUTCOME_FAILED: "failed",
}


@dataclass(eq=False, slots=True)
class _Open:
    """A request that has not ended, on its router's stream."""

    stream: RouterStream
    key: int
    number: int
    epoch: int
    request_id: str
    choices: int
    span: tracing.Span
    began_ns: int
    submitted_s: float
    lease: int
    booking: int
    #: Its grammar is being compiled, or its KV fetched: the engine does not know it yet.
    checking: asyncio.Task[None] | None = None
    ended: set[int] = field(default_factory=set)
    #: Given to its router so far.
    given: int = 0
    cached_prompt_tokens: int = 0

    #: How its answer begins, where its prompt is another worker's to compute.
    proceed: asyncio.Future[worker_pb2.Proceed] | None = None
    #: Of its answer, ids that the engine knows as a part of the prompt; of the prompt, tokens whose KV was fetched.
    begun: int = 0
    fetched_tokens: int = 0
    prompt_tokens: int = 0
    #: What to run when the engine's own fetching fails, before anything has come of it.
    otherwise: Request | None = None

    def told(self) -> _Given:
        """What is kept of it."""
        return self.booking, self.given, self.cached_prompt_tokens


#: A booking, the ids that its router was given, and how much of its prompt was reused.
_Given = tuple[int, int, int]


class RouterStream:
    """One Run stream, or another door's request that goes the same way."""

    def __init__(self) -> None:
        self.router_id = ""
        self.greeted = False
        self.outbox: Outbox[_Item] = Outbox(_MAX_UNREAD, batch=_DELTAS_IN_MESSAGE)
        self.requests: dict[int, _Open] = {}
        #: Those that ended last: their router may be lost before it has booked them.
        self.ended: deque[_Given] = deque(maxlen=_ENDED_KEPT)


#: What waits on a stream.
_Item = worker_pb2.RunWelcome | tuple[_Open, Delta]


class WorkerMetrics(Collector):
    """Gauges are read from the engine when somebody looks."""

    def __init__(self, registry: CollectorRegistry, load: Callable[[], worker_pb2.Load], received: Received) -> None:
        self._load = load
        self.received = received
        self.finished = dict.fromkeys(_OUTCOME_NAMES.values(), 0)
        self.steps = 0
        self.given = 0
        self.queue = Histogram(
            "headrace_worker_queue_seconds",
            "From arrival to the engine's start",
            buckets=metrics.WAIT_BUCKETS_S,
            registry=registry,
        )
        self.prefill = Histogram(
            "headrace_worker_prefill_seconds",
            "From the engine's start to the first id",
            buckets=metrics.TTFT_BUCKETS_S,
            registry=registry,
        )
        self.step = Histogram(
            "headrace_worker_step_seconds",
            "One engine iteration",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0),
            registry=registry,
        )
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        # Without it, registering would collect once, for the names.
        return ()

    def collect(self) -> Iterable[Metric]:
        load = self._load()
        finished = CounterMetricFamily("headrace_worker_requests", "Choices that ended, by outcome", labels=["outcome"])
        for outcome, count in self.finished.items():
            finished.add_metric([outcome], count)
        yield finished
        requests = GaugeMetricFamily("headrace_worker_open_requests", "Requests now", labels=["state"])
        requests.add_metric(["waiting"], load.waiting_requests)
        requests.add_metric(["running"], load.running_requests)
        yield requests
        blocks = GaugeMetricFamily("headrace_worker_kv_blocks", "KV blocks, free ones on demand", labels=["state"])
        blocks.add_metric(["used"], load.kv_blocks_used)
        blocks.add_metric(["free"], load.kv_blocks_total - load.kv_blocks_used)
        yield blocks
        yield GaugeMetricFamily("headrace_worker_kept_blocks", "Blocks kept for reuse", value=load.kv_blocks_cached)
        tokens = CounterMetricFamily("headrace_worker_tokens", "Tokens", labels=["kind"])
        tokens.add_metric(["prompt"], load.prompt_tokens_total)
        tokens.add_metric(["cached_prompt"], load.cached_prompt_tokens_total)
        tokens.add_metric(["completion"], load.completion_tokens_total)
        # Those of answers, but for what was computed when nobody wanted it any more: what the ledger must have.
        tokens.add_metric(["given"], self.given)
        yield tokens
        drafts = CounterMetricFamily("headrace_worker_draft_tokens", "Ids guessed ahead, by fate", labels=["fate"])
        drafts.add_metric(["accepted"], load.accepted_draft_tokens_total)
        drafts.add_metric(["refused"], load.draft_tokens_total - load.accepted_draft_tokens_total)
        yield drafts
        handed = GaugeMetricFamily(
            "headrace_worker_handoff_bytes", "KV kept for other workers", value=load.kv_handoff_bytes
        )
        yield handed
        came = CounterMetricFamily("headrace_worker_kv_received_bytes", "KV that came from other workers")
        came.add_metric([], load.kv_received_bytes_total)
        yield came
        fetches = CounterMetricFamily("headrace_worker_kv_fetches", "KV fetched, by how it ended", labels=["result"])
        fetches.add_metric(["complete"], self.received.complete)
        fetches.add_metric(["broken"], self.received.broken)
        yield fetches
        yield CounterMetricFamily("headrace_worker_iterations", "Engine iterations", value=load.iteration)


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The rpcs, and what stands between them and the engine. ``start`` must be awaited; ``watch`` runs beside."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        registry: CollectorRegistry,
        *,
        class_ttft_s: Mapping[int, float] = CLASS_TTFT_S,
        now: Callable[[], float] = time.monotonic,
        tls: Tls | None = None,
    ) -> None:
        """``class_ttft_s``: when a request's first id is due, by its class; its own target comes before that."""
        self._class_ttft_s = class_ttft_s
        self.worker_id = config.worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self.instance_id = uuid.uuid4().hex
        self.state = STARTING
        self.description = types_pb2.ModelDescription()
        self.blocks = BlockLog()
        #: Called after each change of state, and after new block events.
        self.on_state: Callable[[], None] = lambda: None
        self.on_blocks: Callable[[], None] = lambda: None
        #: Called with requests whose router was lost.
        self.on_orphans: Callable[[list[scheduler_pb2.JoinRequest.Orphan]], None] = lambda orphans: None
        #: The last of them, for a scheduler that is new.
        self.orphans: deque[scheduler_pb2.JoinRequest.Orphan] = deque(maxlen=_ORPHANS_KEPT)
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._config = config
        self._engine = engine
        self._now = now
        self._tls = tls
        #: KV for other workers, and from them.
        self._handoffs = Handoffs(config.handoff_mib * 2**20)
        self._takers = Waiters()
        self._received = Received()
        self._metrics = WorkerMetrics(registry, self.load, self._received)
        self._steps: deque[StepCost] = deque(maxlen=_STEPS_IN_REPORT)
        self._streams: set[RouterStream] = set()
        self._open: dict[int, _Open] = {}
        #: Keys of requests that the scheduler had put aside.
        self._aside: set[int] = set()
        self._keys = 0
        self._iteration = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life --------------------------------------------------------------------------------------------------------

    async def start(self, model: str) -> None:
        """Starts the engine; READY when this returns. Raises ModelError or EngineError."""
        loop = asyncio.get_running_loop()

        def on_step(result: StepResult) -> None:
            _call_soon(loop, self._on_step, result)

        def on_failure(reason: str) -> None:
            _call_soon(loop, self._on_failure, reason)

        await self._engine.start(on_step, on_failure)
        self.description = self._engine.describe()
        self.description.model = model
        # It may have been told to leave meanwhile.
        if self.state == STARTING:
            self._set_state(READY)

    async def watch(self) -> None:
        """The watchdog: a step that takes too long makes the worker unhealthy, its end makes it ready again."""
        limit_s = self._config.stall_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            age_s = self._engine.step_age_s()
            if self.state == READY and age_s > limit_s:
                log.error("the engine's step has been running for %.1f s (limit %.1f s)", age_s, limit_s)
                self._set_state(UNHEALTHY)
                self._end_streams("the engine is stuck")
            elif self.state == UNHEALTHY and age_s < limit_s and not self.failure.done():
                log.info("the engine's step came to its end")
                self._set_state(READY)

    async def drain(self) -> None:
        """Takes nothing new and returns when all that runs has ended."""
        if self.state in (STARTING, READY):
            self._set_state(DRAINING)
        try:
            await self._idle.wait()
        finally:
            # Also when the grace is over: what still runs is cut with a status that says so. Frames go out first.
            self._end_streams("the worker is leaving")

    async def stop(self) -> None:
        """Ends the engine, and with it whatever still runs."""
        self._end_streams("the worker is leaving")
        await self._engine.stop()

    def load(self) -> worker_pb2.Load:
        """As it is now, without the steps."""
        load = self._engine.load()
        load.state = self.state
        load.kv_received_bytes_total = self._received.bytes
        load.kv_receive_s_total = self._received.seconds
        load.kv_handoff_bytes = self._handoffs.bytes
        return load

    def report(self) -> worker_pb2.Load:
        """The load with the steps since the last report."""
        load = self.load()
        load.steps.extend(
            worker_pb2.StepReport(
                prefill_tokens=step.prefill_tokens,
                decode_tokens=step.decode_tokens,
                context_tokens=step.context_tokens,
                duration_us=int(step.duration_s * 1e6),
                prefill_pairs=step.prefill_pairs,
            )
            for step in self._steps
        )
        self._steps.clear()
        return load

    def on_command(self, command: scheduler_pb2.JoinResponse) -> None:
        """What the scheduler wants."""
        match command.WhichOneof("command"):
            case "drain":
                if self.state == READY:
                    self._set_state(DRAINING)
            case "set_limits":
                self._engine.set_limits(_step_limits(command.set_limits))
            case "preempt":
                for open_ in self._of_lease(command.preempt.lease):
                    self._aside.add(open_.key)
                    self._engine.put_aside(open_.key)
            case "resume":
                for open_ in self._of_lease(command.resume.lease):
                    self._aside.discard(open_.key)
                    self._engine.go_on(open_.key)

    def on_scheduler_lost(self) -> None:
        """Nobody is left to say when those that were put aside may go on: they do now."""
        for key in self._aside:
            self._engine.go_on(key)
        self._aside.clear()

    def _of_lease(self, lease: int) -> list[_Open]:
        # Rare enough to look through all of them.
        return [open_ for open_ in self._open.values() if lease and open_.lease == lease and open_.checking is None]

    def _set_state(self, state: worker_pb2.WorkerState) -> None:
        self.state = state
        self.on_state()

    def _on_failure(self, reason: str) -> None:
        if not self.failure.done():
            self.failure.set_result(reason)
        self._set_state(UNHEALTHY)
        self._end_streams("the engine is gone")

    def _end_streams(self, reason: str) -> None:
        for stream in self._streams:
            stream.outbox.close(StreamError(grpc.StatusCode.UNAVAILABLE, reason))

    # --- rpcs --------------------------------------------------------------------------------------------------------

    async def Run(
        self, request_iterator: AsyncIterator[worker_pb2.RunRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """A router's stream."""
        if not self.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is not ready")
        with self.attached() as stream:

            def receive(message: worker_pb2.RunRequest) -> None:
                self._from_router(stream, message)

            await exchange(request_iterator, context, receive=receive, outbox=stream.outbox, encode=self._frame)

    async def PullKv(self, request: worker_pb2.PullKvRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Another worker takes the KV that was computed for it."""
        if not self.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is not ready")
        await give(self._handoffs, self._takers, self.description.kv_state_tag, request, context)

    @property
    def serving(self) -> bool:
        """Streams are taken."""
        return self.state not in (STARTING, UNHEALTHY)

    @contextlib.contextmanager
    def attached(self) -> Iterator[RouterStream]:
        """A stream among the others; with it, all its requests end."""
        stream = RouterStream()
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)
            orphans = [*stream.ended, *(open_.told() for open_ in stream.requests.values())]
            for open_ in list(stream.requests.values()):
                self._abandon(open_)
            self._tell_of(orphans)

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DescribeResponse:
        """Who it is."""
        return worker_pb2.DescribeResponse(
            worker_id=self.worker_id, instance_id=self.instance_id, description=self.description, state=self.state
        )

    async def GetLoad(
        self, request: worker_pb2.GetLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetLoadResponse:
        """What it holds."""
        return worker_pb2.GetLoadResponse(load=self.load())

    # --- in ----------------------------------------------------------------------------------------------------------

    def _from_router(self, stream: RouterStream, message: worker_pb2.RunRequest) -> None:
        if not stream.greeted:
            if not message.HasField("hello"):
                raise StreamError(grpc.StatusCode.INVALID_ARGUMENT, "the first message must have a hello")
            if (wanted := message.hello.instance_id) and wanted != self.instance_id:
                raise StreamError(
                    grpc.StatusCode.FAILED_PRECONDITION, f"this is instance {self.instance_id}, not {wanted}"
                )
            stream.greeted = True
            stream.router_id = message.hello.router_id
            stream.outbox.put(
                worker_pb2.RunWelcome(
                    worker_id=self.worker_id, instance_id=self.instance_id, description=self.description
                )
            )
        for submit in message.submits:
            self.submit(stream, submit)
        for cancel in message.cancels:
            self.cancel(stream, cancel)
        for proceed in message.proceeds:
            open_ = stream.requests.get(proceed.request)
            # Its end may have crossed this on the way.
            expected = open_.proceed if open_ is not None and open_.epoch == proceed.epoch else None
            if expected is not None and not expected.done():
                expected.set_result(proceed)

    def submit(self, stream: RouterStream, submit: worker_pb2.Submit) -> None:
        """A request; its deltas come to the stream's outbox. Raises StreamError."""
        if submit.request in stream.requests:
            raise StreamError(grpc.StatusCode.INVALID_ARGUMENT, f"request number {submit.request} is in use")
        self._keys += 1
        span = tracing.start("worker.run", submit.trace.traceparent, kind="server", tracestate=submit.trace.tracestate)
        open_ = _Open(
            stream=stream,
            key=self._keys,
            number=submit.request,
            epoch=submit.epoch,
            request_id=submit.request_id,
            choices=max(len(submit.sampling.seeds), 1),
            span=span,
            began_ns=time.time_ns(),
            submitted_s=self._now(),
            lease=submit.lease,
            booking=submit.booking,
        )
        stream.requests[submit.request] = self._open[open_.key] = open_
        self._idle.clear()
        if span.recording:
            _describe_span(span, submit)
        if (refusal := self._not_now()) is not None:
            self._refuse(open_, refusal)
            return
        request = request_of(submit, open_.key, self.description, self._now, self._class_ttft_s)
        if isinstance(request, types_pb2.Error):
            self._refuse(open_, request)
        elif submit.handoff.HasField("fetch"):
            open_.proceed = asyncio.get_running_loop().create_future()
            open_.checking = asyncio.create_task(self._fetch(open_, request, submit.handoff.fetch))
        elif (refusal := self._keep_for_another(request, submit.handoff)) is not None:
            self._refuse(open_, refusal)
        elif request.guided is not None:
            open_.checking = asyncio.create_task(self._check(open_, request))
        elif (refusal := self._engine.submit(request)) is not None:
            self._refuse(open_, refusal)

    def _not_now(self) -> types_pb2.Error | None:
        if self.state == DRAINING:
            return error(types_pb2.ERROR_CODE_DRAINING, "the worker is draining", retryable=True)
        if self.state != READY:
            return error(types_pb2.ERROR_CODE_UNAVAILABLE, "the worker is not ready", retryable=True)
        most = self.description.slots + self._config.max_waiting
        if len(self._open) > most:
            text = f"{most} requests are in the worker, its limit"
            return error(types_pb2.ERROR_CODE_OVERLOADED, text, retryable=True)
        return None

    # --- prefill and decode apart ------------------------------------------------------------------------------------

    def _keep_for_another(self, request: Request, handoff: worker_pb2.KvHandoff) -> types_pb2.Error | None:
        """Opens the hand-off of a request whose answer is another worker's."""
        if request.handoff is None or not self._engine.moves_kv:
            return None
        reference = handoff.produce.reference
        keep_s = min(handoff.produce.keep_ms / 1000 or math.inf, self._config.handoff_keep_s)
        if not reference:
            return error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, "a KV hand-off needs a reference", param="handoff")
        if not self._handoffs.open(request, reference, self.description.block_tokens, keep_s):
            return error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, "the reference is in use", param="handoff")
        self._takers.opened(reference)
        return None

    def _handed_over(self, key: int, finish: Finish) -> None:
        """A request that may have a hand-off has ended."""
        if finish.outcome not in (types_pb2.OUTCOME_STOP, types_pb2.OUTCOME_LENGTH):
            self._handoffs.give_up(key)
        elif (expires_s := self._handoffs.computed(key, self._now())) is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, expires_s - self._now()), lambda: self._handoffs.expire(self._now()))

    async def _fetch(self, open_: _Open, request: Request, fetch: worker_pb2.KvHandoff.Fetch) -> None:
        """Has its KV brought here, and the request begun when its router says how. Whatever does not come is
        computed."""
        fetching: asyncio.Task[None] | None = None
        size, progress = self.description.block_tokens, Progress()
        if self._engine.moves_kv:
            work = take(fetch, request, size, self._engine.intake, self._tls, self._received, progress)
            fetching = asyncio.create_task(work)
        assert open_.proceed is not None
        try:
            proceed = await open_.proceed
            made = begun(request, list(proceed.ids), self.description)
            if fetching is not None and proceed.ids and not isinstance(made, types_pb2.Error):
                # It has all been computed; who has not begun to give by now may have lost it.
                patience_s = self._config.handoff_timeout_s
                await asyncio.wait([fetching], timeout=patience_s if progress.begun else min(_BEGIN_S, patience_s))
        finally:
            if fetching is not None and not fetching.done():
                fetching.cancel()
                await asyncio.wait([fetching])
        if isinstance(made, types_pb2.Error):
            open_.checking = None
            self._refuse(open_, made)
            return
        open_.begun, open_.fetched_tokens = len(proceed.ids), progress.blocks * size
        if made.stopping.max_tokens < 1:
            open_.checking = None
            self._finish(open_, 0, types_pb2.OUTCOME_LENGTH, None)
            return
        reference = proceed.kv_reference or fetch.reference
        if not self._engine.moves_kv and proceed.ids and reference:
            # Such an engine fetches by itself, and begins its answer with the id that it finds there.
            open_.otherwise, open_.begun, open_.prompt_tokens = made, 0, len(request.prompt_ids)
            made = dataclasses.replace(request, handoff=Handoff(reference))
        if made.guided is not None:
            await self._check(open_, made)
            return
        open_.checking = None
        refusal = (None if self.serving else self._not_now()) or self._engine.submit(made)
        if refusal is not None:
            self._refuse(open_, refusal)

    async def _check(self, open_: _Open, request: Request) -> None:
        """Has its grammar compiled before the engine sees it."""
        try:
            refusal = await self._engine.check(request)
        except asyncio.CancelledError:
            raise
        except Exception as failure:
            log.exception("a request could not be checked")
            refusal = error(types_pb2.ERROR_CODE_INTERNAL, f"it could not be checked: {failure}")
        open_.checking = None
        # Choices that were cancelled meanwhile have had their end.
        if refusal is None:
            refusal = self._not_now() or self._engine.submit(request)
        if refusal is not None:
            self._refuse(open_, refusal)
            return
        for choice in open_.ended:
            self._engine.cancel(open_.key, choice, types_pb2.OUTCOME_CANCELLED)

    def cancel(self, stream: RouterStream, cancel: worker_pb2.Cancel) -> None:
        """A request, or one choice of it, is not wanted any more."""
        open_ = stream.requests.get(cancel.request)
        # Its end may have crossed this on the way.
        if open_ is None or open_.epoch != cancel.epoch:
            return
        outcome = _CANCEL_OUTCOMES.get(cancel.reason, types_pb2.OUTCOME_CANCELLED)
        choice = cancel.choice if cancel.HasField("choice") else None
        if open_.checking is None:
            self._engine.cancel(open_.key, choice, outcome)
            return
        if choice is None:
            open_.checking.cancel()
        for each in range(open_.choices) if choice is None else (choice,):
            self._finish(open_, each, outcome, None)

    def _abandon(self, open_: _Open) -> None:
        """Its stream is gone: nobody is left to be told."""
        if open_.checking is not None:
            open_.checking.cancel()
        else:
            self._engine.cancel(open_.key, None, types_pb2.OUTCOME_CANCELLED)
        if open_.span.recording:
            open_.span.set("headrace.outcome", "cancelled")
            open_.span.fail("the router's stream ended")
        self._metrics.finished["cancelled"] += open_.choices - len(open_.ended)
        self._handoffs.give_up(open_.key)
        self._close(open_)

    def _tell_of(self, lost: list[_Given]) -> None:
        """A router is gone: what it was given, nobody else can say."""
        orphans = [
            scheduler_pb2.JoinRequest.Orphan(
                booking=booking,
                usage=types_pb2.Usage(completion_tokens=given, cached_prompt_tokens=cached),
            )
            for booking, given, cached in lost
            if booking
        ]
        if orphans:
            self.orphans.extend(orphans)
            self.on_orphans(orphans)

    def _refuse(self, open_: _Open, why: types_pb2.Error) -> None:
        for choice in range(open_.choices):
            self._finish(open_, choice, types_pb2.OUTCOME_REJECTED, why)

    def _finish(self, open_: _Open, choice: int, outcome: Outcome, why: types_pb2.Error | None) -> None:
        """An end that did not come from the engine."""
        if choice in open_.ended or choice >= open_.choices:
            return
        finish = Finish(outcome, why, 0, 0, 0, self._now() - open_.submitted_s, 0.0, 0.0, 0.0)
        self._deliver(open_, Delta(open_.key, choice, open_.begun, [], finish=finish))

    # --- out ---------------------------------------------------------------------------------------------------------

    def _on_step(self, result: StepResult) -> None:
        """What one iteration brought."""
        self._iteration = result.iteration
        if result.cost is not None:
            self._steps.append(result.cost)
            self._metrics.step.observe(result.cost.duration_s)
        for delta in result.deltas:
            open_ = self._open.get(delta.key)
            if open_ is None or delta.choice in open_.ended:
                continue
            if open_.proceed is not None and not self._continues(open_, delta):
                continue
            self._deliver(open_, delta)
        for block in result.kv:
            self._handoffs.add(block.key, block.index, block.kv)
        if result.blocks:
            self.blocks.add(result.blocks)
            self.on_blocks()

    def _continues(self, open_: _Open, delta: Delta) -> bool:
        """A delta of a request whose prompt another worker has computed, as its router counts; False = it is not for
        it."""
        if open_.otherwise is not None:
            again, open_.otherwise = open_.otherwise, None
            if not delta.ids and delta.finish is not None and delta.finish.error is not None:
                # The engine could not fetch it: computed here, it goes on from the same id.
                log.warning("a request's KV could not be fetched: %s", delta.finish.error.message)
                open_.begun = len(again.prompt_ids) - open_.prompt_tokens
                if (refusal := self._engine.submit(again)) is not None:
                    self._refuse(open_, refusal)
                return False
        delta.first_index += open_.begun
        if delta.cached_prompt_tokens is not None:
            delta.cached_prompt_tokens = max(0, delta.cached_prompt_tokens - open_.fetched_tokens)
        if (finish := delta.finish) is not None:
            finish.prompt_tokens = max(0, finish.prompt_tokens - open_.begun)
            finish.completion_tokens += open_.begun
            finish.cached_prompt_tokens = max(0, finish.cached_prompt_tokens - open_.fetched_tokens)
        return True

    def _deliver(self, open_: _Open, delta: Delta) -> None:
        open_.stream.outbox.put((open_, delta))
        open_.given += len(delta.ids)
        self._metrics.given += len(delta.ids)
        if delta.cached_prompt_tokens is not None:
            open_.cached_prompt_tokens = delta.cached_prompt_tokens
        if delta.finish is not None:
            open_.ended.add(delta.choice)
            self._metrics.finished[_OUTCOME_NAMES.get(delta.finish.outcome, "failed")] += 1
            if len(open_.ended) == open_.choices:
                self._handed_over(open_.key, delta.finish)
                self._end(open_, delta.finish)

    def _end(self, open_: _Open, finish: Finish) -> None:
        if finish.outcome != types_pb2.OUTCOME_REJECTED:
            self._metrics.queue.observe(finish.queue_s)
            if finish.completion_tokens:
                self._metrics.prefill.observe(finish.prefill_s)
        if open_.span.recording:
            _end_span(open_, finish)
        self._close(open_)

    def _close(self, open_: _Open) -> None:
        open_.span.end()
        open_.stream.requests.pop(open_.number, None)
        open_.stream.ended.append(open_.told())
        self._open.pop(open_.key, None)
        self._aside.discard(open_.key)
        if not self._open:
            self._idle.set()

    def _frame(self, items: list[_Item]) -> worker_pb2.RunResponse:
        frame = worker_pb2.RunResponse(iteration=self._iteration)
        add = frame.deltas.add
        for item in items:
            if isinstance(item, tuple):
                _fill(add(), *item)
            else:
                frame.welcome.CopyFrom(item)
        return frame


def _step_limits(told: scheduler_pb2.SetLimits) -> StepLimits:
    return StepLimits(
        chunk_tokens=told.chunk_tokens or None,
        slots=told.slots or None,
        pair_tokens=told.pair_tokens,
        batch_chunk_tokens=told.batch_chunk_tokens,
        batch_sequences=told.batch_sequences,
    )


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], value: object) -> None:
    try:
        loop.call_soon_threadsafe(function, value)
    except RuntimeError:
        # The loop is closed: the process is going.
        log.debug("a step came after the end")


def _fill(message: worker_pb2.TokenDelta, open_: _Open, delta: Delta) -> None:
    """Written in place: most deltas are one id, and there are as many as tokens."""
    message.request = open_.number
    message.epoch = open_.epoch
    if delta.choice:
        message.choice = delta.choice
    message.first_index = delta.first_index
    message.ids.extend(delta.ids)
    if delta.cached_prompt_tokens is not None:
        message.cached_prompt_tokens = delta.cached_prompt_tokens
    if delta.logprobs is not None:
        message.logprobs.extend(_logprobs(each) for each in delta.logprobs)
    if delta.prompt_logprobs is not None:
        message.prompt_logprobs.extend(_logprobs(each) for each in delta.prompt_logprobs)
    if delta.kv_reference:
        message.kv_reference = delta.kv_reference
    if delta.finish is not None:
        _fill_finish(message.finish, delta.finish)


def _logprobs(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    message = types_pb2.TokenLogprobs()
    message.drawn.id, message.drawn.logprob = logprobs.drawn
    for token, logprob in logprobs.top:
        message.top.add(id=token, logprob=logprob)
    return message


def _fill_finish(message: worker_pb2.TokenDelta.Finish, finish: Finish) -> None:
    message.outcome = finish.outcome
    if finish.error is not None:
        message.error.CopyFrom(finish.error)
    message.usage.prompt_tokens = finish.prompt_tokens
    message.usage.cached_prompt_tokens = finish.cached_prompt_tokens
    message.usage.completion_tokens = finish.completion_tokens
    message.queue_s, message.prefill_s = finish.queue_s, finish.prefill_s
    message.decode_s, message.kv_block_s = finish.decode_s, finish.kv_block_s


def _describe_span(span: tracing.Span, submit: worker_pb2.Submit) -> None:
    span.set("rpc.system.name", "grpc")
    span.set("rpc.method", f"{FULL_NAME}/Run")
    span.set("headrace.request_id", submit.request_id)
    span.set("headrace.epoch", submit.epoch)
    span.set("gen_ai.request.id", submit.request_id)
    span.set("gen_ai.request.model", submit.model)
    span.set("gen_ai.request.n", len(submit.sampling.seeds))
    span.set("gen_ai.request.max_tokens", submit.stopping.max_tokens)
    span.set("gen_ai.request.temperature", submit.sampling.temperature)
    span.set("gen_ai.request.top_p", submit.sampling.top_p)


def _end_span(open_: _Open, finish: Finish) -> None:
    """The stages, known only now, and vLLM's attributes, for dashboards that were made for it."""
    span, began_ns = open_.span, open_.began_ns
    scheduled_ns = began_ns + int(finish.queue_s * 1e9)
    first_ns = scheduled_ns + int(finish.prefill_s * 1e9)
    end_ns = first_ns + int(finish.decode_s * 1e9)
    tracing.record("worker.queue", span.traceparent, start_ns=began_ns, end_ns=scheduled_ns)
    if finish.prefill_s or finish.completion_tokens:
        prefill = {"headrace.cached_prompt_tokens": finish.cached_prompt_tokens}
        tracing.record("worker.prefill", span.traceparent, start_ns=scheduled_ns, end_ns=first_ns, attributes=prefill)
    if finish.completion_tokens:
        decode = {"headrace.completion_tokens": finish.completion_tokens}
        tracing.record("worker.decode", span.traceparent, start_ns=first_ns, end_ns=end_ns, attributes=decode)
        span.set("gen_ai.latency.time_to_first_token", finish.queue_s + finish.prefill_s)
    span.set("gen_ai.latency.time_in_queue", finish.queue_s)
    span.set("gen_ai.latency.time_in_model_prefill", finish.prefill_s)
    span.set("gen_ai.latency.time_in_model_decode", finish.decode_s)
    span.set("gen_ai.latency.time_in_model_inference", finish.prefill_s + finish.decode_s)
    span.set("gen_ai.latency.e2e", finish.queue_s + finish.prefill_s + finish.decode_s)
    for old, new, value in (
        ("prompt_tokens", "input_tokens", finish.prompt_tokens),
        ("completion_tokens", "output_tokens", finish.completion_tokens),
    ):
        span.set(f"gen_ai.usage.{old}", value)
        span.set(f"gen_ai.usage.{new}", value)
    span.set("headrace.outcome", _OUTCOME_NAMES.get(finish.outcome, "failed"))
    if finish.outcome in (types_pb2.OUTCOME_FAILED, types_pb2.OUTCOME_REJECTED):
        span.fail(types_pb2.ErrorCode.Name(finish.error.code) if finish.error else "failed")
