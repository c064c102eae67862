"""An engine that batches inside itself: what is left to do here are the books of its runs.

``loop.py`` is for engines that compute a batch which is composed here. Others (TensorRT-LLM, a server behind gRPC)
compose it themselves: they are given *runs*, one for each choice of a request, and bring ids when they please. A
``Driver`` speaks to such an engine; ``SelfBatched`` is the ``Engine`` around it, with all that they have in common:

- Whose turn it is: at most ``slots`` runs are in the engine, the others wait here, in the order of ``turns.py``.
  Of a request's choices the first computes the prompt; the others follow when it has a token, so that they find its KV.
- Every choice ends exactly once. An end that is wanted here (a cancellation, a deadline) is asked of the engine and
  told when the engine has stopped; an engine that does not stop within ``ABORT_TIMEOUT_S`` is not waited for.
- To put a request aside is to abort its runs and to begin them again from their ids. A grammar could not follow, nor KV
  that is handed over once, so such a request goes on.
- A run that had begun to answer and brings nothing for ``stall_timeout_s``, while others go on, has been lost by the
  engine: it is stopped, and fails.
- An engine with runs and without a sign of life for ``stall_timeout_s`` hangs. When it is quiet, a *canary* of one
  token is sent now and then, so that a dead engine is found before a request is. What hangs so does not come back: the
  driver ends it, and the failure is reported.

Everything happens on the event loop; a driver with threads or processes brings their words there.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from headrace.errors import EngineError, error
from headrace.v1 import types_pb2, worker_pb2
from headrace.worker.engine import (
    BlockChange,
    Delta,
    Finish,
    KvIntake,
    Outcome,
    Request,
    StepCost,
    StepLimits,
    StepResult,
    Stopping,
    TokenLogprobs,
)
from headrace.worker.turns import Order, Turns, by_order, order_of

log = logging.getLogger(__name__)

#: For an engine to say that it has stopped a run.
ABORT_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.1

STOP, LENGTH = types_pb2.OUTCOME_STOP, types_pb2.OUTCOME_LENGTH
CANCELLED, DEADLINE = types_pb2.OUTCOME_CANCELLED, types_pb2.OUTCOME_DEADLINE
FAILED, REJECTED = types_pb2.OUTCOME_FAILED, types_pb2.OUTCOME_REJECTED


@dataclass(frozen=True, slots=True)
class Room:
    """What the engine has; its KV is its own affair."""

    slots: int
    context_tokens: int
    block_tokens: int
    kv_blocks: int


@dataclass(frozen=True, slots=True)
class KvState:
    """The engine's KV as it last told of it."""

    used_blocks: int = 0
    #: Blocks that can be found again, also those in use.
    held_blocks: int = 0
    #: Since start: ids guessed ahead, and those of them that were right.
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Run:
    """One choice in the engine, from a beginning to an end. Drivers read it."""

    __slots__ = ("id", "max_tokens", "min_tokens", "prompt_ids", "seed", "sequence")

    def __init__(self, number: int, sequence: _Sequence) -> None:
        stopping, produced = sequence.request.stopping, len(sequence.ids)
        self.id = number
        self.sequence = sequence
        #: With what of the answer was there before.
        self.prompt_ids = [*sequence.request.prompt_ids, *sequence.ids]
        self.max_tokens = sequence.max_tokens - produced
        self.min_tokens = max(0, stopping.min_tokens - produced)
        self.seed = sequence.request.sampling.seeds[sequence.choice]

    @property
    def request(self) -> Request:
        """Whose it is."""
        return self.sequence.request

    @property
    def own_prompt_tokens(self) -> int:
        """Of ``prompt_ids``, those that are prompt and not answer."""
        request = self.request
        return len(request.prompt_ids) - request.resumed_tokens


class Inbox(Protocol):
    """What a driver tells, on the event loop's thread."""

    def tokens(self, run: Run, ids: list[int], logprobs: list[TokenLogprobs] | None, cached_tokens: int | None) -> None:
        """New ids; ``cached_tokens`` of its prompt were reused (as of the first; None = told at its end)."""

    def ended(
        self, run: Run, outcome: Outcome, why: types_pb2.Error | None = None, cached_tokens: int | None = None
    ) -> None:
        """It is out of the engine: STOP or LENGTH by its own end, CANCELLED when aborted, or FAILED, REJECTED."""

    def handed_over(self, run: Run, reference: str) -> None:
        """Its prompt's KV waits to be fetched by another worker; after its one id, before its end."""

    def stepped(self, iteration: int, cost: StepCost | None = None, blocks: list[BlockChange] | None = None) -> None:
        """All of that iteration has been told: now it goes out. ``cost.context_tokens`` is filled in here."""

    def failed(self, reason: str) -> None:
        """The engine is gone."""


class Driver(Protocol):
    """Speaks to one engine. All on the event loop; nothing but what is awaited takes time."""

    async def open(self, inbox: Inbox) -> Room:
        """Loads and warms up. Raises ModelError or EngineError."""

    def describe(self) -> types_pb2.ModelDescription:
        """After ``open``; without the numbers of ``Room``."""

    async def check(self, request: Request) -> types_pb2.Error | None:
        """See ``Engine.check``."""

    def refuse(self, request: Request) -> types_pb2.Error | None:
        """Why this engine, as it is set up, cannot do it."""

    def begin(self, run: Run) -> None:
        """Starts it. ``tokens`` and one ``ended`` follow."""

    def abort(self, run: Run) -> None:
        """Stops it; ``ended`` follows in a moment."""

    def kv(self) -> KvState:
        """As of a moment ago."""

    def kill(self) -> None:
        """Ends an engine that hangs; ``close`` follows."""

    async def close(self) -> None:
        """Ends the engine, by force where it must. Idempotent."""


class _Sequence:
    """One choice. ``run`` is set while it is in the engine."""

    __slots__ = (
        "aborting",
        "began_s",
        "choice",
        "ended",
        "heard_s",
        "ids",
        "kv_block_s",
        "max_tokens",
        "order",
        "request",
        "run",
        "started",
        "state",
        "why",
    )

    def __init__(self, state: _State, choice: int, order: Order, max_tokens: int) -> None:
        self.state = state
        self.request = state.request
        self.choice = choice
        self.order = order
        self.max_tokens = max_tokens
        #: Of the answer.
        self.ids: list[int] = []
        #: It has been in the engine, or waits for it; the others wait for the first choice.
        self.started = False
        self.ended = False
        self.run: Run | None = None
        self.began_s = 0.0
        #: Its run is being stopped: to end so; or, with UNSPECIFIED, to be begun again.
        self.aborting: Outcome | None = None
        self.why: types_pb2.Error | None = None
        #: When the engine last brought ids of it.
        self.heard_s = 0.0
        self.kv_block_s = 0.0

    @property
    def aside(self) -> bool:
        """Its request stands still."""
        return self.state.aside


@dataclass(eq=False, slots=True)
class _State:
    """What the choices of a request have in common."""

    request: Request
    submitted_s: float
    end_ids: frozenset[int]
    internal: bool = False
    admitted_s: float | None = None
    first_token_s: float | None = None
    cached_tokens: int | None = None
    open_choices: int = 0
    aside: bool = False
    sequences: list[_Sequence] = field(default_factory=list)
    deadline: asyncio.TimerHandle | None = None


class SelfBatched:
    """An ``Engine`` around a driver; and the driver's inbox."""

    def __init__(
        self,
        driver: Driver,
        *,
        slots: int,
        max_waiting: int,
        stall_timeout_s: float,
        canary_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``canary_s``: after so long without work a canary is sent; 0 = never."""
        self._driver = driver
        self._slots = slots
        self._max_waiting = max_waiting
        self._stall_timeout_s = stall_timeout_s
        self._canary_s = canary_s
        self._clock = clock
        self._room = Room(slots, 0, 1, 0)
        self._states: dict[int, _State] = {}
        #: In order.
        self._waiting: list[_Sequence] = []
        self._running: set[_Sequence] = set()
        self._turns: Turns[_Sequence] = Turns()
        self._numbers = itertools.count(1)
        self._deltas: list[Delta] = []
        self._iteration = 0
        self._alive_s = 0.0
        self._busy_s = 0.0
        #: Prompt tokens, those of them reused, tokens of answers that have ended.
        self._totals = [0, 0, 0]
        self._flushing = False
        self._over = False
        self._watch: asyncio.Task[None] | None = None
        self._on_step: Callable[[StepResult], None] = lambda result: None
        self._on_failure: Callable[[str], None] = lambda reason: None

    # --- the engine protocol ----------------------------------------------------------------------------------------

    async def start(self, on_step: Callable[[StepResult], None], on_failure: Callable[[str], None]) -> None:
        """See ``Engine.start``."""
        self._on_step, self._on_failure = on_step, on_failure
        try:
            self._room = await self._driver.open(self)
        except BaseException:
            self._over = True
            await self._driver.close()
            raise
        if self._over:
            raise EngineError("the engine went away as soon as it was ready")
        self._slots = min(self._slots, self._room.slots)
        self._alive_s = self._busy_s = self._clock()
        self._watch = asyncio.create_task(self._look(), name="engine watch")

    def describe(self) -> types_pb2.ModelDescription:
        """See ``Engine.describe``."""
        description, room = self._driver.describe(), self._room
        description.block_tokens = room.block_tokens
        description.kv_blocks = room.kv_blocks
        description.slots = room.slots
        description.context_tokens = room.context_tokens
        return description

    #: See ``Engine.moves_kv``: such engines send KV themselves.
    moves_kv = False
    kv_token_bytes = 0

    async def intake(self, request: Request) -> KvIntake:
        """See ``Engine.intake``."""
        raise EngineError("this engine takes no KV")

    async def check(self, request: Request) -> types_pb2.Error | None:
        """See ``Engine.check``."""
        return await self._driver.check(request)

    def submit(self, request: Request) -> types_pb2.Error | None:
        """See ``Engine.submit``."""
        if self._over:
            return error(types_pb2.ERROR_CODE_UNAVAILABLE, "the engine is stopped", retryable=True)
        if len(self._waiting) >= self._max_waiting + self._slots:
            text = f"{len(self._waiting)} choices wait for the engine, its limit"
            return error(types_pb2.ERROR_CODE_OVERLOADED, text, retryable=True)
        if (refusal := self._driver.refuse(request)) is not None:
            return refusal
        self._take(request, internal=False)
        return None

    def cancel(self, key: int, choice: int | None, outcome: Outcome) -> None:
        """See ``Engine.cancel``."""
        state = self._states.get(key)
        if state is None:
            return
        for sequence in state.sequences if choice is None else state.sequences[choice : choice + 1]:
            self._end_early(sequence, outcome)
        self._flush_soon()

    def put_aside(self, key: int) -> None:
        """See ``Engine.put_aside``."""
        state = self._states.get(key)
        if state is None or state.request.guided is not None or state.request.handoff is not None:
            return
        state.aside = True
        for sequence in state.sequences:
            if sequence.run is not None and sequence.aborting is None:
                sequence.aborting = types_pb2.OUTCOME_UNSPECIFIED
                self._abort(sequence)
            else:
                self._dequeue(sequence)

    def go_on(self, key: int) -> None:
        """See ``Engine.go_on``."""
        state = self._states.get(key)
        if state is None or not state.aside:
            return
        state.aside = False
        for sequence in state.sequences:
            if sequence.started and not sequence.ended and sequence.run is None:
                self._enqueue(sequence)
        self._admit()

    def set_limits(self, limits: StepLimits) -> None:
        """See ``Engine.set_limits``. Of a step's parts the engine itself decides."""
        if limits.slots:
            self._slots = min(limits.slots, self._room.slots)
            self._admit()

    def load(self) -> worker_pb2.Load:
        """See ``Engine.load``."""
        running = [sequence for sequence in self._running if not sequence.state.internal]
        kv = self._driver.kv()
        prompt, cached, completion = self._totals
        return worker_pb2.Load(
            waiting_requests=len(self._waiting),
            running_requests=len(running),
            waiting_prompt_tokens=sum(len(sequence.request.prompt_ids) for sequence in self._waiting),
            running_prompt_tokens=sum(len(sequence.request.prompt_ids) for sequence in running if not sequence.ids),
            context_tokens=self._context_tokens(),
            kv_blocks_total=self._room.kv_blocks,
            # What the engine says is of a moment ago.
            kv_blocks_used=kv.used_blocks if self._running else 0,
            kv_blocks_cached=max(0, kv.held_blocks - (kv.used_blocks if self._running else 0)),
            draft_tokens_total=kv.drafted_tokens,
            accepted_draft_tokens_total=kv.accepted_tokens,
            slots=self._slots,
            iteration=self._iteration,
            prompt_tokens_total=prompt,
            cached_prompt_tokens_total=cached,
            completion_tokens_total=completion + sum(len(sequence.ids) for sequence in running),
        )

    def _context_tokens(self) -> int:
        """In the KV of all that decodes. Counted when somebody asks, rather than with each token."""
        return sum(len(each.request.prompt_ids) + len(each.ids) for each in self._running if each.ids)

    def step_age_s(self) -> float:
        """See ``Engine.step_age_s``: since the last sign of life of an engine that owes some."""
        return max(0.0, self._clock() - self._alive_s) if self._running and not self._over else 0.0

    async def stop(self) -> None:
        """See ``Engine.stop``."""
        self._over = True
        if self._watch is not None:
            self._watch.cancel()
        for state in self._states.values():
            if state.deadline is not None:
                state.deadline.cancel()
        await self._driver.close()

    # --- the driver's inbox -----------------------------------------------------------------------------------------

    def tokens(self, run: Run, ids: list[int], logprobs: list[TokenLogprobs] | None, cached_tokens: int | None) -> None:
        """See ``Inbox.tokens``."""
        sequence = run.sequence
        if sequence.run is not run or not ids:
            return
        state = sequence.state
        delta = Delta(state.request.key, sequence.choice, len(sequence.ids), ids, logprobs)
        if state.first_token_s is None:
            state.first_token_s = self._clock()
            self._totals[0] += len(state.request.prompt_ids)
            self._start_others(state)
        if state.cached_tokens is None and cached_tokens is not None:
            self._totals[1] += cached_tokens
            delta.cached_prompt_tokens = state.cached_tokens = cached_tokens
        if sequence.aborting:
            # Its end has been decided; what still comes is nobody's.
            return
        sequence.ids += ids
        sequence.heard_s = self._alive_s
        if not state.internal:
            self._deltas.append(delta)

    def ended(
        self, run: Run, outcome: Outcome, why: types_pb2.Error | None = None, cached_tokens: int | None = None
    ) -> None:
        """See ``Inbox.ended``."""
        sequence = run.sequence
        if sequence.run is not run:
            return
        state = sequence.state
        # Only now, of the first run: later ones find what it has computed.
        first_run = sequence.choice == 0 and len(run.prompt_ids) == len(state.request.prompt_ids)
        late = cached_tokens if first_run and sequence.ids and state.cached_tokens is None else None
        if late is not None:
            self._totals[1] += late
            state.cached_tokens = late
        self._out_of_engine(sequence)
        aborting, sequence.aborting = sequence.aborting, None
        if aborting == types_pb2.OUTCOME_UNSPECIFIED and outcome == CANCELLED:
            if len(sequence.ids) >= sequence.max_tokens:
                self._finish(sequence, LENGTH, None)
            elif not sequence.state.aside:
                self._enqueue(sequence)
            return
        if aborting:
            outcome, why = aborting, sequence.why
        elif outcome == CANCELLED:
            outcome = FAILED
            why = error(types_pb2.ERROR_CODE_INTERNAL, "the engine stopped it, and nobody had asked", retryable=True)
        elif outcome == LENGTH and sequence.ids and sequence.ids[-1] in sequence.state.end_ids:
            # Both at once: the engine looks at the length first.
            outcome = STOP
        self._finish(sequence, outcome, why)
        if late is not None and not state.internal:
            self._deltas[-1].cached_prompt_tokens = late

    def handed_over(self, run: Run, reference: str) -> None:
        """See ``Inbox.handed_over``."""
        sequence = run.sequence
        if sequence.run is not run or sequence.aborting:
            return
        last = self._deltas[-1] if self._deltas else None
        if last is None or last.key != sequence.request.key:
            # Its id has left already.
            last = Delta(sequence.request.key, sequence.choice, len(sequence.ids), [])
            self._deltas.append(last)
        last.kv_reference = reference

    def stepped(self, iteration: int, cost: StepCost | None = None, blocks: list[BlockChange] | None = None) -> None:
        """See ``Inbox.stepped``."""
        self._alive_s = self._clock()
        self._iteration = max(self._iteration, iteration)
        self._admit()
        deltas, self._deltas = self._deltas, []
        if cost is not None:
            cost = replace(cost, context_tokens=self._context_tokens())
        if deltas or cost is not None or blocks:
            self._on_step(StepResult(self._iteration, deltas, cost, blocks or []))

    def failed(self, reason: str) -> None:
        """See ``Inbox.failed``."""
        if not self._over:
            self._over = True
            log.error("the engine is gone: %s", reason)
            self._on_failure(reason)

    # --- turns ------------------------------------------------------------------------------------------------------

    def _take(self, request: Request, *, internal: bool) -> None:
        now = self._clock()
        state = _State(request, now, request.stopping.end_ids, internal)
        room = self._room.context_tokens - len(request.prompt_ids)
        most = min(request.stopping.max_tokens, room)
        number = next(self._numbers)
        state.sequences = [
            _Sequence(state, choice, order_of(request, number, choice), most) for choice in range(request.n)
        ]
        state.open_choices = request.n
        self._states[request.key] = state
        if room < 1:
            text = f"the prompt has {len(request.prompt_ids)} tokens and the context holds {self._room.context_tokens}"
            why = error(types_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, f"{text}, answer included", param="prompt")
            for sequence in state.sequences:
                self._finish(sequence, REJECTED, why)
            self._flush_soon()
            return
        if request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            left_s = request.deadline_s - now
            if left_s <= 0:
                self.cancel(request.key, None, DEADLINE)
                return
            state.deadline = loop.call_later(left_s, self.cancel, request.key, None, DEADLINE)
        self._start(state.sequences[0])
        self._admit()

    def _start(self, sequence: _Sequence) -> None:
        if not sequence.started and not sequence.ended:
            sequence.started = True
            if not sequence.state.aside:
                self._enqueue(sequence)

    def _start_others(self, state: _State) -> None:
        for sequence in state.sequences:
            self._start(sequence)

    def _admit(self) -> None:
        """Those whose turn it is go into the engine."""
        while self._waiting and len(self._running) < self._slots and not self._over:
            now = self._clock()
            self._turns.stay((self._waiting,), self._slots, now)
            sequence = self._waiting.pop(0)
            if not self._running:
                # It owes something from now on.
                self._alive_s = now
            run = sequence.run = Run(next(self._numbers), sequence)
            sequence.began_s = sequence.heard_s = now
            if sequence.state.admitted_s is None:
                sequence.state.admitted_s = now
            self._running.add(sequence)
            self._driver.begin(run)

    def _enqueue(self, sequence: _Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=by_order)

    def _dequeue(self, sequence: _Sequence) -> None:
        index = bisect.bisect_left(self._waiting, sequence.order, key=by_order)
        if index < len(self._waiting) and self._waiting[index] is sequence:
            del self._waiting[index]

    # --- ends -------------------------------------------------------------------------------------------------------

    def _end_early(self, sequence: _Sequence, outcome: Outcome, why: types_pb2.Error | None = None) -> None:
        if sequence.ended:
            return
        sequence.why = sequence.why or why
        if sequence.run is None:
            self._dequeue(sequence)
            self._finish(sequence, outcome, why)
        elif sequence.aborting is None:
            sequence.aborting = outcome
            self._abort(sequence)
        elif sequence.aborting == types_pb2.OUTCOME_UNSPECIFIED:
            sequence.aborting = outcome

    def _abort(self, sequence: _Sequence) -> None:
        run = sequence.run
        assert run is not None
        self._driver.abort(run)
        asyncio.get_running_loop().call_later(ABORT_TIMEOUT_S, self._not_waited_for, sequence, run)

    def _not_waited_for(self, sequence: _Sequence, run: Run) -> None:
        if sequence.run is run and not self._over:
            log.warning("the engine did not stop a run within %.0f s: its KV may be lost", ABORT_TIMEOUT_S)
            self.ended(run, CANCELLED)
            self._flush_soon()

    def _out_of_engine(self, sequence: _Sequence) -> None:
        self._running.discard(sequence)
        sequence.run = None
        self._busy_s = now = self._clock()
        # The prompt's blocks for the whole time, the answer's as they came: evenly, near enough.
        blocks: float = math.ceil(len(sequence.request.prompt_ids) / self._room.block_tokens)
        blocks += len(sequence.ids) / self._room.block_tokens / 2
        sequence.kv_block_s += blocks * (now - sequence.began_s)

    def _finish(self, sequence: _Sequence, outcome: Outcome, why: types_pb2.Error | None) -> None:
        state, now = sequence.state, self._clock()
        sequence.ended = True
        self._turns.ended(sequence)
        state.open_choices -= 1
        if state.open_choices == 0:
            del self._states[state.request.key]
            if state.deadline is not None:
                state.deadline.cancel()
        elif not any(other.started and not other.ended for other in state.sequences):
            # The others waited for this one.
            self._start(next(other for other in state.sequences if not other.ended))
        if state.internal:
            return
        self._totals[2] += len(sequence.ids)
        admitted = state.admitted_s if state.admitted_s is not None else now
        first = state.first_token_s if state.first_token_s is not None else now
        finish = Finish(
            outcome=outcome,
            error=why,
            prompt_tokens=len(state.request.prompt_ids),
            cached_prompt_tokens=state.cached_tokens or 0,
            completion_tokens=sum(len(other.ids) for other in state.sequences),
            queue_s=admitted - state.submitted_s,
            prefill_s=max(0.0, first - admitted),
            decode_s=max(0.0, now - first),
            kv_block_s=sum(other.kv_block_s for other in state.sequences),
        )
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.key == state.request.key and last.choice == sequence.choice:
            # With its last ids, as a driver tells them one after the other.
            last.finish = finish
            return
        self._deltas.append(Delta(state.request.key, sequence.choice, len(sequence.ids), [], finish=finish))

    def _flush_soon(self) -> None:
        """What has no iteration of the engine goes out by itself."""
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        alive_s = self._alive_s
        self.stepped(self._iteration)
        # That was our own doing.
        self._alive_s = alive_s

    # --- the watch --------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while not self._over:
            await asyncio.sleep(min(_LOOK_EVERY_S, self._stall_timeout_s / 4))
            if (age_s := self.step_age_s()) > self._stall_timeout_s:
                self._driver.kill()
                self.failed(f"no sign of life for {age_s:.1f} s (limit {self._stall_timeout_s:g} s)")
                continue
            self._end_lost()
            if self._canary_s and not self._running and self._clock() - self._busy_s > self._canary_s:
                self._take(_canary(next(self._numbers)), internal=True)

    def _end_lost(self) -> None:
        before_s = self._alive_s - self._stall_timeout_s
        for sequence in [each for each in self._running if each.ids and each.heard_s < before_s]:
            if sequence.aborting is None:
                text = f"the engine brought nothing of it for {self._stall_timeout_s:g} s, while others went on"
                why = error(types_pb2.ERROR_CODE_INTERNAL, text, retryable=True)
                log.warning("a run is lost: %s", text)
                self._end_early(sequence, FAILED, why)


def _canary(number: int) -> Request:
    """One token, of nobody. Keys of requests are positive."""
    return Request(-number, [0], Stopping(1, ignore_eos=True), cache_salt=b"canary")
