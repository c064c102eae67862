"""An engine that batches here: a thread that drives the batch composer and a *backend*, which computes its steps.

The thread owns composer and backend; commands come in through a mailbox and each step's results go out in one call.
While the backend computes (llama.cpp and waiting both release the GIL), the event loop builds and writes the frames
of the step before.

What this module leaves to others: what a step holds (``composer.py``), how it is computed (``engines/``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from headrace.errors import EngineError, error
from headrace.v1 import types_pb2, worker_pb2
from headrace.worker.composer import Composer, Drawn, HandedBlocks, Limits, Sequence, Step
from headrace.worker.engine import KvBlock, Outcome, Request, StepCost, StepLimits, StepResult
from headrace.worker.kv import HashBlocks, Intake

log = logging.getLogger(__name__)

T = TypeVar("T")

#: While there is work, the published load is renewed so often; making it goes through all requests.
_LOAD_EVERY_S = 0.05
#: A step that gives up less than this is not worth breaking off.
_INTERRUPT_FROM_TOKENS = 64
_PAUSE_S = 0.005
#: Steps that may fail one after another before the engine counts as broken.
_MAX_FAILURES = 3


class Interrupted(Exception):
    """The step was broken off, as asked for; what it computed does not count."""


class Backend(Protocol):
    """Computes steps. All but ``interrupt``, ``check`` and ``describe`` are called from the loop's thread only."""

    def open(self) -> Limits:
        """Loads and warms up. Raises ModelError or EngineError."""

    #: Bytes of a full block's KV as ``read_block`` gives it, after ``open``; 0 = KV stays here.
    kv_block_bytes: int

    def describe(self) -> types_pb2.ModelDescription:
        """After ``open``; without the limits, which the loop adds."""

    def read_block(self, lane: int, start: int, end: int) -> bytes:
        """The KV of a lane at positions ``start`` to ``end``, a full block. Raises EngineError."""

    async def check(self, request: Request) -> types_pb2.Error | None:
        """See ``Engine.check``; on the event loop's thread."""

    def execute(self, step: Step) -> Drawn:
        """Applies the operations, computes, draws. Raises Interrupted; or EngineError, after which it can go on."""

    def release(self, sequence: Sequence) -> None:
        """The sequence is over; what the backend kept in ``sequence.sampler`` can go."""

    def interrupt(self) -> None:
        """Breaks off the step under way, or the next one. From any thread."""

    def close(self) -> None:
        """Frees everything. Also after a failed ``open``."""

    async def aclose(self) -> None:
        """Ends what ``check`` has started; on the event loop's thread."""


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: int
    choice: int | None
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class _PutAside:
    key: int


@dataclass(frozen=True, slots=True)
class _GoOn:
    key: int


@dataclass(frozen=True, slots=True)
class _BeginIntake:
    request: Request
    answer: Callable[[Intake | None], None]


@dataclass(frozen=True, slots=True)
class _TakeIn:
    intake: Intake
    kv: bytes
    answer: Callable[[bool], None]


_Command = Request | _Cancel | StepLimits | _PutAside | _GoOn
_Question = _BeginIntake | _TakeIn


class _Intake:
    """A ``KvIntake`` whose other end is the engine's thread."""

    def __init__(self, loop: BatchLoop, intake: Intake, block_bytes: int) -> None:
        self._loop = loop
        self._intake = intake
        self._block_bytes = block_bytes
        self.first_block = intake.blocks

    def take(self, kv: bytes) -> asyncio.Future[bool]:
        """See ``KvIntake.take``."""
        if len(kv) == self._block_bytes:
            return self._loop.ask(False, lambda answer: _TakeIn(self._intake, kv, answer))
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        future.set_result(False)
        return future


class BatchLoop:
    """An ``Engine`` around a backend."""

    def __init__(
        self,
        backend: Backend,
        *,
        hash_blocks: HashBlocks | None = None,
        keep_prefixes: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._hash_blocks = hash_blocks
        self._keep_prefixes = keep_prefixes
        self._clock = clock
        self._mailbox: deque[_Command] = deque()
        #: KV that comes from other workers; of each no more than its sender's window.
        self._questions: deque[_Question] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._limits: Limits | None = None
        self._load = worker_pb2.Load()
        self._load_s = 0.0
        self._iteration = 0
        self._step_began_s: float | None = None
        #: Since the last step there was nothing to compute.
        self._rested = True
        #: The requests of a step that is worth breaking off; those of them that have been cancelled meanwhile.
        self._interruptible: frozenset[int] = frozenset()
        self._cancelled: set[int] = set()
        #: The step under way is worth breaking off for whoever comes and is no batch work.
        self._yields = False
        self._on_step: Callable[[StepResult], None] = lambda result: None
        self._on_failure: Callable[[str], None] = lambda reason: None

    # --- the engine protocol, on the event loop's thread --------------------------------------------------------------

    async def start(self, on_step: Callable[[StepResult], None], on_failure: Callable[[str], None]) -> None:
        """See ``Engine.start``."""
        self._on_step, self._on_failure = on_step, on_failure
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Limits] = loop.create_future()

        def tell(limits: Limits | None, failure: BaseException | None) -> None:
            if opened.done():
                return
            if failure is not None:
                opened.set_exception(failure)
            elif limits is not None:
                opened.set_result(limits)

        def main() -> None:
            try:
                limits = self._backend.open()
            except BaseException as failure:
                self._backend.close()
                loop.call_soon_threadsafe(tell, None, failure)
                return
            self._run(limits, lambda: _ignore(loop.call_soon_threadsafe(tell, limits, None)))

        self._thread = threading.Thread(target=main, name="engine", daemon=True)
        self._thread.start()
        self._limits = await opened

    def describe(self) -> types_pb2.ModelDescription:
        """See ``Engine.describe``."""
        limits = self._limits
        assert limits is not None, "describe comes after start"
        description = self._backend.describe()
        description.block_tokens = limits.block_tokens
        description.kv_blocks = limits.kv_blocks
        description.slots = limits.slots
        description.context_tokens = limits.context_tokens
        return description

    @property
    def moves_kv(self) -> bool:
        """See ``Engine.moves_kv``."""
        return self._backend.kv_block_bytes > 0

    @property
    def kv_token_bytes(self) -> int:
        """See ``Engine.kv_token_bytes``."""
        return self._backend.kv_block_bytes // self._limits.block_tokens if self._limits is not None else 0

    async def intake(self, request: Request) -> _Intake:
        """See ``Engine.intake``. Raises EngineError when the engine is gone."""
        intake: Intake | None = await self.ask(None, lambda answer: _BeginIntake(request, answer))
        if intake is None:
            raise EngineError("the engine is stopped")
        return _Intake(self, intake, self._backend.kv_block_bytes)

    def ask(self, otherwise: T, question: Callable[[Callable[[T], None]], _Question]) -> asyncio.Future[T]:
        """Puts a question to the engine's thread; ``otherwise`` when there is nobody to answer it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(value: T) -> None:
            if not future.done():
                future.set_result(value)

        def answer(value: T) -> None:
            # Its loop may be closed by now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, value)

        if self._stopping or self._thread is None or not self._thread.is_alive():
            settle(otherwise)
        else:
            self._questions.append(question(answer))
            self._wake.set()
        return future

    async def check(self, request: Request) -> types_pb2.Error | None:
        """See ``Engine.check``."""
        return await self._backend.check(request)

    def submit(self, request: Request) -> types_pb2.Error | None:
        """See ``Engine.submit``. What only the composer can refuse comes as a finish."""
        if self._stopping or self._thread is None or not self._thread.is_alive():
            return error(types_pb2.ERROR_CODE_UNAVAILABLE, "the engine is stopped", retryable=True)
        limits = self._limits
        if limits is not None and len(self._mailbox) > limits.slots + limits.max_waiting:
            return error(types_pb2.ERROR_CODE_OVERLOADED, "the engine's mailbox is full", retryable=True)
        self._post(request)
        if self._yields and request.request_class != types_pb2.REQUEST_CLASS_BATCH:
            self._yields = False
            self._backend.interrupt()
        return None

    def cancel(self, key: int, choice: int | None, outcome: Outcome) -> None:
        """See ``Engine.cancel``."""
        self._post(_Cancel(key, choice, outcome))
        interruptible = self._interruptible
        if choice is None and key in interruptible:
            self._cancelled.add(key)
            if interruptible <= self._cancelled:
                self._backend.interrupt()

    def put_aside(self, key: int) -> None:
        """See ``Engine.put_aside``."""
        self._post(_PutAside(key))

    def go_on(self, key: int) -> None:
        """See ``Engine.go_on``."""
        self._post(_GoOn(key))

    def set_limits(self, limits: StepLimits) -> None:
        """See ``Engine.set_limits``."""
        self._post(limits)

    def load(self) -> worker_pb2.Load:
        """See ``Engine.load``."""
        load = worker_pb2.Load()
        load.CopyFrom(self._load)
        return load

    def step_age_s(self) -> float:
        """See ``Engine.step_age_s``."""
        began = self._step_began_s
        return 0.0 if began is None else max(0.0, self._clock() - began)

    async def stop(self) -> None:
        """See ``Engine.stop``."""
        self._stopping = True
        self._wake.set()
        self._backend.interrupt()
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, 10.0)
            if thread.is_alive():
                log.error("the engine's thread does not end: its step hangs")
        await self._backend.aclose()

    def _post(self, command: _Command) -> None:
        self._mailbox.append(command)
        self._wake.set()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self, limits: Limits, started: Callable[[], None]) -> None:
        composer = Composer(limits, self._hash_blocks, keep_prefixes=self._keep_prefixes)
        try:
            self._publish(composer, self._clock())
            started()
            failures = 0
            while not self._stopping:
                # What ended last is kept now, and not while the next one waits.
                if composer.at_rest and not self._mailbox and not self._questions:
                    self._rested = True
                    self._wake.wait()
                self._wake.clear()
                now = self._clock()
                self._take_commands(composer, now)
                failures = failures + 1 if not self._step(composer, now) else 0
                if failures >= _MAX_FAILURES:
                    raise EngineError(f"{failures} steps in a row failed")
        except BaseException as failure:
            log.exception("the engine broke")
            self._on_failure(str(failure) or type(failure).__name__)
        finally:
            self._backend.close()
            self._refuse_questions()

    def _refuse_questions(self) -> None:
        """Nobody waits for an answer from a thread that is gone."""
        while self._questions:
            question = self._questions.popleft()
            if isinstance(question, _BeginIntake):
                question.answer(None)
            else:
                question.answer(False)

    def _take_commands(self, composer: Composer, now: float) -> None:
        while self._mailbox:
            command = self._mailbox.popleft()
            if isinstance(command, Request):
                refusal = composer.submit(command, now)
                if refusal is not None:
                    composer.reject(command, refusal)
            elif isinstance(command, _Cancel):
                composer.cancel(command.key, command.choice, command.outcome, now)
            elif isinstance(command, _PutAside):
                composer.put_aside(command.key, now)
            elif isinstance(command, _GoOn):
                composer.go_on(command.key)
            else:
                composer.set_limits(command)
        while self._questions:
            question = self._questions.popleft()
            if isinstance(question, _BeginIntake):
                question.answer(composer.begin_intake(question.request))
            else:
                question.answer(composer.intake(question.intake, question.kv))

    def _step(self, composer: Composer, now: float) -> bool:
        """One iteration; False when the backend could not compute it."""
        step = composer.plan(now)
        cost, good = None, True
        if step.empty and not composer.idle:
            # All that is here was put aside, or nothing fits, which the accounts rule out: no reason to burn a CPU.
            self._rested = True
            self._wake.wait(_PAUSE_S)
        if not step.empty or step.operations:
            self._step_began_s = now
            step.follows, self._rested = not self._rested, False
            try:
                self._guard(step)
                drawn = self._backend.execute(step)
                ended = self._clock()
                composer.complete(step, drawn, ended)
                if not step.empty:
                    self._iteration += 1
                    pairs = sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in step.chunks)
                    cost = StepCost(step.prefill_tokens, step.decode_tokens, step.context_tokens, ended - now, pairs)
                    now = ended
            except Interrupted:
                composer.abandon(step, self._clock())
            except EngineError as failure:
                log.error("a step of %d requests failed: %s", len(step.decodes) + len(step.chunks), failure)
                why = error(types_pb2.ERROR_CODE_INTERNAL, f"the engine failed: {failure}", retryable=True)
                composer.fail(step, why, self._clock())
                good = False
            finally:
                self._step_began_s = None
                self._interruptible, self._yields = frozenset(), False
        deltas, blocks = composer.take_results()
        for sequence in composer.take_released():
            self._backend.release(sequence)
        if composer.idle or now - self._load_s >= _LOAD_EVERY_S:
            self._publish(composer, now)
        if deltas or blocks or cost is not None:
            self._on_step(StepResult(self._iteration, deltas, cost, blocks))
        if handed := composer.take_handed():
            # The first id has gone ahead.
            kv = [block for each in handed for block in self._read(each, composer.limits.block_tokens)]
            self._on_step(StepResult(self._iteration, [], None, [], kv))
        return good

    def _read(self, handed: HandedBlocks, size: int) -> Iterator[KvBlock]:
        for index in range(handed.first, handed.end):
            kv: bytes | None = None
            try:
                kv = self._backend.read_block(handed.lane, index * size, (index + 1) * size)
            except EngineError as failure:
                log.error("KV for another worker could not be read: %s", failure)
            yield KvBlock(handed.key, index, kv)

    def _guard(self, step: Step) -> None:
        """Lets a cancellation break the step off when nobody else needs it, and others when it is batch work's."""
        if step.prefill_tokens >= _INTERRUPT_FROM_TOKENS:
            self._yields = step.yields
            self._cancelled.clear()
            touched = [*step.decodes, *(chunk.sequence for chunk in step.chunks)]
            self._interruptible = frozenset(sequence.request.key for sequence in touched)

    def _publish(self, composer: Composer, now: float) -> None:
        self._load = composer.load(self._iteration)
        self._load_s = now


def _ignore(_: object) -> None:
    """For a call whose answer says nothing."""
