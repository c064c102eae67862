"""The batch composer: what does the next step compute, and for whom? Iteration-level continuous batching.

A core without clock, threads or engine. Its driver (``loop.py``, and tests) goes round::

    step = composer.plan(now)          # ends what is overdue, makes room, admits, chooses
    ... apply step.operations to the engine, compute, draw one id for each of step.rows ...
    composer.complete(step, drawn, now)  # or abandon(step), or fail(step, error, now)
    deltas, changes = composer.take_results()

and may call ``submit`` and ``cancel`` at any point between, ``put_aside`` and ``go_on`` between steps. The rules:

- Every sequence that decodes is in every step; beside them at most ``chunk_tokens`` of prompts are computed (fewer far
  into a prompt, where attention takes its part), in that order, so that no running stream waits longer than
  such a step; ``idle_chunk_tokens`` while nothing decodes, or more wait for their first token than decode. New
  sequences join at the next step, finished ones leave at once.
- KV comes from ``kv.py`` with its hard bound. Blocks for a prompt are taken on admission, blocks for the answer when
  they are needed. When there are none left, what is only held for reuse goes first; then the youngest sequence is put
  back into the queue and will be computed again. The oldest can therefore always go on, and nothing deadlocks; what
  could not fit alone is refused on submission.
- Order is by when first ids are due (``turns.py``): who is due first is computed first, as the scheduler expects.
  Whoever waits is due in the end, so none starves.
- Batch work comes after all others and makes way for their first ids: the youngest is put back where there is no slot
  or KV for a prompt, all of it stands still while that is computed, though not longer than ``YIELD_S`` at a time, and
  ``Step.yields`` says that a step computes prompts of batch work only, which are worth breaking off. Of what is overdue
  a small part makes way no more.
- Where it pays, ids are guessed ahead for sequences that decode (``drafts.py``), and computed in the same step. What
  the model would not have drawn is given up again.
- A hand-off's first half ends with its first id; its prompt's full blocks are named as they are computed
  (``take_handed``), to be read before the next step. The second half's KV comes as if it had been kept (``intake``).
- Choices are sequences of their own: the first computes the prompt, the others share its blocks.
- Every choice ends exactly once, with an outcome.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from headrace._gateway import StepBudget
from headrace.errors import error
from headrace.v1 import types_pb2, worker_pb2
from headrace.worker.drafts import Drafted, Guesser, Lookup, Speculation
from headrace.worker.engine import (
    BlockChange,
    Delta,
    Finish,
    Outcome,
    Request,
    StepLimits,
    TokenLogprobs,
)
from headrace.worker.kv import HashBlocks, Intake, KvAccounts, Lane, Operation, Scope
from headrace.worker.turns import FIRST_TO_MAKE_WAY, Order, Turns, by_order, order_of

#: Batch work stands still no longer than this for the first ids of others: half of its target between tokens.
YIELD_S = 0.5


@dataclass(frozen=True)
class Limits:
    """The bounds that a composer keeps."""

    slots: int
    kv_blocks: int
    block_tokens: int
    context_tokens: int
    chunk_tokens: int
    #: Prompt tokens in a step in which nothing decodes, or little beside what waits.
    idle_chunk_tokens: int
    max_waiting: int
    #: Blocks that the engine can keep for reuse beside its KV; None: it keeps them in it, as far as there is room.
    keep_beside: int | None = None
    #: Of these, on disk.
    on_disk: int = 0
    #: Ids that may be guessed ahead for each sequence in a step; 0 = none.
    draft_tokens: int = 0
    #: The engine has a drafting model.
    drafting: bool = False


@dataclass(slots=True)
class Drawn:
    """What the sampler brought for the rows of a step: one id a row, and what only some rows have."""

    ids: Seq[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    #: Rows after which nothing may follow (a grammar is complete).
    ended: frozenset[int] = frozenset()
    #: Rows that could not be drawn.
    errors: Mapping[int, types_pb2.Error] = field(default_factory=dict)
    #: For chunks that ask for them: the prompt's log-probabilities, by the chunk's place in the step.
    prompt_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    #: For rows with a draft: the ids after the row's own, one for each drafted id that was drawn.
    further: Mapping[int, list[int]] = field(default_factory=dict)
    #: For rows of ``Step.guesses``: what the drafting model says next, and how many ids it has yet to read.
    guessed: Mapping[int, tuple[list[int], int]] = field(default_factory=dict)
    #: Ids that it computed at once, and the seconds that took.
    guessing: Seq[tuple[int, float]] = ()
    #: Whether what is kept on disk is sooner loaded than computed.
    disk_pays: bool = True


class Sequence:
    """One choice of a request. Engines read it and may keep what is theirs in ``sampler``."""

    __slots__ = (
        "_blocks_since_s",
        "choice",
        "computed",
        "drafted",
        "ended",
        "ids",
        "kv_block_s",
        "lane",
        "lookup",
        "order",
        "prefilled",
        "prompt_tokens",
        "request",
        "sampler",
        "state",
    )

    def __init__(self, state: _RequestState, choice: int, order: Order) -> None:
        self.state = state
        self.request = state.request
        self.choice = choice
        self.order = order
        #: Prompt and answer.
        self.ids = list(state.request.prompt_ids)
        self.prompt_tokens = len(self.ids)
        #: Of ids, those whose KV is there.
        self.computed = 0
        self.lane: Lane | None = None
        #: All ids up to the last drawn one have been computed once since it was admitted: it decodes.
        self.prefilled = False
        self.ended = False
        self.kv_block_s = 0.0
        self._blocks_since_s = 0.0
        self.sampler: Any = None
        #: Set when ids may be guessed ahead for it.
        self.lookup: Lookup | None = None
        self.drafted: Drafted | None = None

    @property
    def drawn(self) -> int:
        """Ids of the answer so far."""
        return len(self.ids) - self.prompt_tokens

    @property
    def makes_way(self) -> bool:
        """It is batch work that is put back, and stands still, for others."""
        return self.order[0]

    @property
    def aside(self) -> bool:
        """Its request stands still."""
        return self.state.aside is not None

    def settle(self, now: float) -> None:
        """Brings ``kv_block_s`` up to date; call before the blocks change."""
        if self.lane is not None:
            self.kv_block_s += self.lane.blocks * (now - self._blocks_since_s)
        self._blocks_since_s = now


class _RequestState:
    """What the choices of one request have in common."""

    __slots__ = (
        "admitted_s",
        "announced",
        "aside",
        "cached_prompt_tokens",
        "completion_tokens",
        "context_left",
        "end_ids",
        "first_token_s",
        "handed_blocks",
        "open_choices",
        "prompt_logprobs",
        "request",
        "scope",
        "sequences",
        "submitted_s",
    )

    def __init__(self, request: Request, now: float, context_tokens: int) -> None:
        self.request = request
        self.submitted_s = now
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_prompt_tokens = 0
        self.completion_tokens = 0
        self.end_ids = request.stopping.end_ids
        self.context_left = min(request.stopping.max_tokens, context_tokens - len(request.prompt_ids))
        #: Of its prompt, blocks that were named for another worker; None = its answer is not another's.
        self.handed_blocks: int | None = None
        if request.handoff is not None:
            self.handed_blocks, self.context_left = 0, 1
        self.prompt_logprobs: list[TokenLogprobs] = []
        #: The first delta has gone, with what goes only there.
        self.announced = False
        self.open_choices = request.n
        #: Sequences that stand still, outside all queues, until the request may go on; None: it is not put aside.
        self.aside: list[Sequence] | None = None
        self.scope = Scope(request.lora, request.cache_salt, None if request.reuse_prefix else request.key)
        self.sequences: list[Sequence] = []


@dataclass(slots=True)
class Chunk:
    """A part of a sequence's ids to be computed."""

    sequence: Sequence
    lane: Lane
    start: int
    count: int
    #: It reaches the last known id, so the next one is drawn.
    last: bool
    #: Logits are wanted at each position.
    all_logits: bool
    #: Other choices that join when the prompt is computed, with the lanes made for them.
    forks: list[tuple[Sequence, Lane]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HandedBlocks:
    """These blocks of a request's prompt are computed and on that lane, until the next step."""

    key: int
    lane: int
    first: int
    end: int


@dataclass(slots=True)
class Step:
    """One step: apply ``operations`` in order, then compute decodes and chunks together."""

    operations: list[Operation]
    #: Each computes its last id.
    decodes: list[Sequence]
    chunks: list[Chunk]
    #: For whom an id is drawn, and from which of the step's outputs (positions with logits, in the order computed).
    rows: list[Sequence]
    outputs: list[int]
    prefill_tokens: int
    context_tokens: int
    #: By place in ``decodes``: ids to compute after the last one; each has an output too.
    drafts: dict[int, list[int]] = field(default_factory=dict)
    planned_s: float = 0.0
    #: Its prompts are of batch work that makes way: somebody else's may break it off.
    yields: bool = False
    #: By place in ``decodes``: so many ids are to be guessed by the drafting model when this step's are drawn.
    guesses: dict[int, int] = field(default_factory=dict)
    #: Who has guessed each of ``drafts``.
    guessers: dict[int, Guesser] = field(default_factory=dict)
    #: It comes right after another: whoever computes it has not been idle.
    follows: bool = False

    @property
    def decode_tokens(self) -> int:
        """Computed for sequences that decode, drafts included; the first so many outputs are theirs."""
        return len(self.decodes) + sum(map(len, self.drafts.values()))

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.chunks


class Composer:
    """See the module's text."""

    def __init__(self, limits: Limits, hash_blocks: HashBlocks | None = None, *, keep_prefixes: bool = True) -> None:
        self.limits = limits
        self.slots = limits.slots
        self.chunk_tokens = limits.chunk_tokens
        #: How many prompt tokens take as long as one pair of tokens in attention, as the scheduler has learned.
        self.pair_tokens = 0.0
        #: Prompt tokens of batch work in a step in which others decode.
        self.batch_chunk_tokens = limits.chunk_tokens
        #: Sequences of batch work that decode beside others, in turns; 0 = all.
        self.batch_sequences = 0
        #: The last of them that had its turn.
        self._batch_turn = FIRST_TO_MAKE_WAY
        self._turns: Turns[Sequence] = Turns()
        self.kv = KvAccounts(
            limits.kv_blocks,
            limits.block_tokens,
            limits.slots,
            hash_blocks=hash_blocks,
            keep=keep_prefixes,
            keep_beside=limits.keep_beside,
            on_disk=limits.on_disk,
        )
        self.speculation = Speculation(limits.draft_tokens)
        self._states: dict[int, _RequestState] = {}
        #: Both in order.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        #: Sequences with a lane; _running may still list some that have just lost theirs.
        self._seated = 0
        self._arrivals = 0
        self._deadlines: list[tuple[float, int]] = []
        #: Since when batch work stands still; None = it does not.
        self._still_since_s: float | None = None
        self._deltas: list[Delta] = []
        self._released: list[Sequence] = []
        self._handed: list[HandedBlocks] = []
        self.prompt_tokens_total = 0
        self.cached_prompt_tokens_total = 0
        self.completion_tokens_total = 0

    # --- in ----------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> types_pb2.Error | None:
        """Queues it, or says why not."""
        if refusal := self._refusal(request):
            return refusal
        self._arrivals += 1
        state = self._states[request.key] = _RequestState(request, now, self.limits.context_tokens)
        state.sequences = [
            Sequence(state, choice, order_of(request, self._arrivals, choice)) for choice in range(request.n)
        ]
        # The others follow when the first has computed the prompt.
        self._enqueue(state.sequences[0])
        if request.deadline_s is not None:
            if len(self._deadlines) > 2 * len(self._states) + 1024:
                # Most requests end long before their deadline.
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._states]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline_s, request.key))
        self.prompt_tokens_total += len(request.prompt_ids)
        return None

    def reject(self, request: Request, why: types_pb2.Error) -> None:
        """Ends all choices of a request that was refused."""
        for choice in range(request.n):
            finish = Finish(types_pb2.OUTCOME_REJECTED, why, len(request.prompt_ids), 0, 0, 0.0, 0.0, 0.0, 0.0)
            self._deltas.append(Delta(request.key, choice, 0, [], finish=finish))

    def cancel(self, key: int, choice: int | None, outcome: Outcome, now: float) -> None:
        """Ends it, or one choice of it, with that outcome; its KV is free at once."""
        state = self._states.get(key)
        if state is None:
            return
        for sequence in list(state.sequences):
            if not sequence.ended and choice in (None, sequence.choice):
                self._end(sequence, outcome, now)
        # When the first choice went before it had computed the prompt, the next one does it.
        self._start_orphans(state)

    def put_aside(self, key: int, now: float) -> None:
        """The request stands still and holds no slot and no KV, but what is kept for reuse, until :meth:`go_on`."""
        state = self._states.get(key)
        if state is None or state.aside is not None:
            return
        state.aside = [
            sequence
            for sequence in state.sequences
            if not sequence.ended and (sequence.lane is not None or self._is_waiting(sequence))
        ]
        for sequence in state.aside:
            if sequence.lane is None:
                self._dequeue(sequence)
            else:
                self._unseat(sequence, now, keep=sequence.request.reuse_prefix)
                sequence.computed = 0
                sequence.prefilled = False
        self._compact()

    def go_on(self, key: int) -> None:
        """The request waits for its turn again, as if it had been so all the time."""
        state = self._states.get(key)
        if state is None or state.aside is None:
            return
        sequences, state.aside = state.aside, None
        for sequence in sequences:
            if not sequence.ended:
                self._enqueue(sequence)
        self._start_orphans(state)

    def set_limits(self, limits: StepLimits) -> None:
        """See ``Engine.set_limits``."""
        if limits.chunk_tokens:
            self.chunk_tokens = min(limits.chunk_tokens, self.limits.idle_chunk_tokens)
            self.pair_tokens = limits.pair_tokens
            self.batch_chunk_tokens = limits.batch_chunk_tokens or self.chunk_tokens
            self.batch_sequences = limits.batch_sequences
        if limits.slots:
            self.slots = min(limits.slots, self.limits.slots)

    def begin_intake(self, request: Request) -> Intake:
        """KV of its prompt will come from another worker, by ``intake``, before the request itself."""
        intake = Intake(request.prompt_ids, Scope(request.lora, request.cache_salt))
        self.kv.begin_intake(intake)
        return intake

    def intake(self, intake: Intake, kv: bytes) -> bool:
        """The KV of its next block. False = no more of it is wanted."""
        return self.kv.take_in(intake, kv)

    def _refusal(self, request: Request) -> types_pb2.Error | None:
        prompt = len(request.prompt_ids)
        if prompt + 1 > self.limits.context_tokens:
            return error(
                types_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {prompt} tokens and the context holds {self.limits.context_tokens}, answer included",
                param="messages",
            )
        most = min(prompt + request.stopping.max_tokens, self.limits.context_tokens)
        if (blocks := self.kv.blocks_for(most)) > self.kv.total_blocks:
            return error(
                types_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
                f"prompt and answer may take {most} tokens, {blocks} KV blocks of {self.limits.block_tokens}; "
                f"this worker has {self.kv.total_blocks}",
                param="max_tokens",
            )
        if self._seated + len(self._waiting) >= self.slots + self.limits.max_waiting:
            return error(
                types_pb2.ERROR_CODE_OVERLOADED,
                f"{len(self._waiting)} requests wait in the engine, the limit is {self.limits.max_waiting}",
                retryable=True,
            )
        return None

    # --- the step ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Step:
        """The next step; empty when there is nothing to compute (its operations still count)."""
        self._expire(now)
        self._compact()
        self._turns.stay((self._running, self._waiting), self.slots, now)
        still = self._make_way(now)
        stands_still = self._stands_still(still)
        decodes: list[Sequence] = []
        context = beginning = 0
        for sequence in self._running:
            # An older one may have just pushed it out.
            if sequence.lane is None or sequence in stands_still:
                continue
            if not sequence.prefilled:
                beginning += 1
                continue
            tokens = len(sequence.ids)
            if tokens > sequence.lane.blocks * self.limits.block_tokens and not self._grow(sequence, tokens, now):
                continue
            decodes.append(sequence)
            context += tokens
        # A prompt that waits is computed first: drafts are for what would else be the step's idle width.
        quiet = self.limits.draft_tokens and not beginning and not self._waiting
        drafts, guessers = self._drafts(decodes, now) if quiet else ({}, {})
        guesses = self._guesses(decodes, guessers) if quiet and self.limits.drafting else {}
        rows, outputs = list(decodes), list(range(len(decodes)))
        output = len(decodes)
        if drafts:
            outputs, output = [], 0
            for place in range(len(decodes)):
                outputs.append(output)
                output += 1 + len(drafts.get(place, ()))
        batch_most = self.batch_chunk_tokens if self._has_others() else self.limits.idle_chunk_tokens
        budget = self._budget(len(decodes), beginning)
        chunks = self._chunks(budget, output, rows, outputs, now, None if still else batch_most)
        prefill, yields = 0, True
        for chunk in chunks:
            prefill += chunk.count
            yields = yields and chunk.sequence.makes_way
        operations = self.kv.take_operations()
        step = Step(operations, decodes, chunks, rows, outputs, prefill, context, drafts, now, yields)
        step.guesses, step.guessers = guesses, guessers
        return step

    def _has_others(self) -> bool:
        """Whether somebody is here, or is next, whom batch prompts in the same step would hold up."""
        if any(sequence.lane is not None and not sequence.makes_way for sequence in self._running):
            return True
        return bool(self._waiting) and not self._waiting[0].makes_way

    def _stands_still(self, still: bool) -> set[Sequence]:
        """The batch work that has no part in the next step: all of it, or what decodes and does not have its turn."""
        batch = [sequence for sequence in self._running if sequence.lane is not None and sequence.makes_way]
        if still:
            return set(batch)
        decoding = [sequence for sequence in batch if sequence.prefilled]
        if not 0 < self.batch_sequences < len(decoding):
            return set()
        if not any(each.lane is not None and each.prefilled and not each.makes_way for each in self._running):
            return set()
        after = [sequence for sequence in decoding if sequence.order > self._batch_turn]
        turns = [*after, *(sequence for sequence in decoding if sequence.order <= self._batch_turn)]
        self._batch_turn = turns[self.batch_sequences - 1].order
        return set(turns[self.batch_sequences :])

    def _make_way(self, now: float) -> bool:
        """Whether batch work stands still in the next step."""
        has_batch = ahead = False
        for sequence in self._running:
            if sequence.lane is not None:
                if sequence.makes_way:
                    has_batch = True
                elif not sequence.prefilled:
                    ahead = True
        if has_batch and not ahead and self._waiting and not self._waiting[0].makes_way:
            ahead = self._admit_over_batch(now) is not None
        if not (has_batch and ahead):
            self._still_since_s = None
            return False
        if self._still_since_s is None:
            self._still_since_s = now
        if now - self._still_since_s < YIELD_S:
            return True
        self._still_since_s = now
        return False

    def _admit_over_batch(self, now: float) -> Sequence | None:
        """Gives the first of those waiting, which is not batch work, its place, at the cost of the youngest that is."""
        while (newcomer := self._admit(now)) is None:
            youngest = next((each for each in reversed(self._running) if each.lane is not None), None)
            if youngest is None or not youngest.makes_way:
                return None
            self._preempt(youngest, now)
        return newcomer

    def complete(self, step: Step, drawn: Drawn, now: float) -> None:
        """The step has been computed, and these ids were drawn."""
        self.kv.disk_pays = drawn.disk_pays
        for place, chunk in enumerate(step.chunks):
            self._computed(chunk, drawn.prompt_logprobs.get(place), now)
        if self.limits.draft_tokens and not step.chunks and step.decodes:
            own_s = sum(duration_s for _, duration_s in drawn.guessing)
            self.speculation.step_took(step.decode_tokens, now - step.planned_s - own_s)
        for tokens, duration_s in drawn.guessing:
            self.speculation.guessing_took(tokens, duration_s)
        logprobs, errors, ended = drawn.logprobs, drawn.errors, drawn.ended
        plain = not (logprobs or errors or ended or step.drafts)
        for row, (sequence, token) in enumerate(zip(step.rows, drawn.ids, strict=True)):
            # Cancelled while it was computed.
            if sequence.lane is None:
                continue
            if plain:
                self._append(sequence, token, None, False, now)
            elif row in errors:
                self._end(sequence, types_pb2.OUTCOME_FAILED, now, errors[row])
            else:
                self._append(sequence, token, logprobs.get(row), row in ended, now)
                if row in step.drafts:
                    further = drawn.further.get(row, [])
                    self.speculation.learn(step.guessers[row], len(step.drafts[row]), len(further))
                    self._take_draft(sequence, step.drafts[row], further, now)
        for row, (guessed, behind) in drawn.guessed.items():
            if (drafted := step.decodes[row].drafted) is not None:
                drafted.ids, drafted.at, drafted.behind = guessed, len(step.decodes[row].ids), behind

    def abandon(self, step: Step, now: float) -> None:
        """The step was broken off: whatever it had computed is undone and will be computed again."""
        for chunk in step.chunks:
            for twin, lane in chunk.forks:
                self._put_back(twin, lane, now)
        touched = [*step.decodes, *(chunk.sequence for chunk in step.chunks)]
        for sequence in touched:
            if sequence.lane is not None:
                self.kv.undo(sequence.lane, sequence.computed)

    def fail(self, step: Step, why: types_pb2.Error, now: float) -> None:
        """The step broke: all requests in it fail, the others go on."""
        self.abandon(step, now)
        for sequence in [*step.decodes, *(chunk.sequence for chunk in step.chunks)]:
            for other in list(sequence.state.sequences):
                if not other.ended:
                    self._end(other, types_pb2.OUTCOME_FAILED, now, why)

    # --- out ---------------------------------------------------------------------------------------------------------

    def take_results(self) -> tuple[list[Delta], list[BlockChange]]:
        """What has come since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas, self.kv.take_changes()

    def take_released(self) -> list[Sequence]:
        """Sequences that have ended since the last call, for an engine that keeps something for each."""
        released, self._released = self._released, []
        return released

    def take_handed(self) -> list[HandedBlocks]:
        """What the last step has computed for other workers: to be read before the next one's operations."""
        handed, self._handed = self._handed, []
        return handed

    @property
    def idle(self) -> bool:
        return not self._states

    @property
    def at_rest(self) -> bool:
        """Idle, and the engine need not do anything either."""
        return self.idle and not self.kv.has_operations

    def load(self, iteration: int) -> worker_pb2.Load:
        """All counts are made from what is there now; none is moved by hand."""
        waiting = running = waiting_prompt = running_prompt = context = 0
        for state in self._states.values():
            if state.aside is not None:
                continue
            if state.admitted_s is None:
                waiting += 1
                waiting_prompt += len(state.request.prompt_ids)
                continue
            running += 1
            for sequence in state.sequences:
                if sequence.ended:
                    continue
                if sequence.lane is None:
                    waiting_prompt += len(sequence.ids) - 1 if sequence.drawn else 0
                elif sequence.prefilled:
                    context += len(sequence.ids)
                else:
                    running_prompt += len(sequence.ids) - sequence.computed
        return worker_pb2.Load(
            waiting_requests=waiting,
            running_requests=running,
            waiting_prompt_tokens=waiting_prompt,
            running_prompt_tokens=running_prompt,
            context_tokens=context,
            kv_blocks_total=self.kv.total_blocks,
            kv_blocks_used=self.kv.used_blocks,
            kv_blocks_cached=self.kv.cached_blocks,
            slots=self.slots,
            iteration=iteration,
            prompt_tokens_total=self.prompt_tokens_total,
            cached_prompt_tokens_total=self.cached_prompt_tokens_total,
            completion_tokens_total=self.completion_tokens_total,
            draft_tokens_total=self.speculation.drafted_total,
            accepted_draft_tokens_total=self.speculation.accepted_total,
        )

    # --- inside: guessing ahead --------------------------------------------------------------------------------------

    def _drafts(self, decodes: list[Sequence], now: float) -> tuple[dict[int, list[int]], dict[int, Guesser]]:
        """Ids guessed for this step, by place, and by whom; only into room that nobody else asks for."""
        found: dict[int, list[int]] = {}
        guessers: dict[int, Guesser] = {}
        for place, sequence in enumerate(decodes):
            lookup, drafted = sequence.lookup, sequence.drafted
            if lookup is None or sequence.lane is None:
                continue
            left = self._room_for_drafts(sequence)
            if left > 0 and (draft := lookup.draft(sequence.ids, left)):
                found[place], guessers[place] = draft, lookup
            if drafted is None or not drafted.ids or drafted.at != len(sequence.ids) or left < 1:
                continue
            if place not in found or drafted.acceptance > guessers[place].acceptance:
                found[place], guessers[place] = drafted.ids[:left], drafted
        if not found:
            return {}, {}
        count = self.speculation.count([each.acceptance for each in guessers.values()], len(decodes))
        if count == 0:
            for each in guessers.values():
                each.rest()
            return {}, {}
        fitting = {place: self._fit(decodes[place], draft[:count], now) for place, draft in found.items()}
        return {place: draft for place, draft in fitting.items() if draft}, guessers

    def _guesses(self, decodes: list[Sequence], guessers: dict[int, Guesser]) -> dict[int, int]:
        """How many ids the drafting model is to guess after this step, by place; ``guessers`` of its drafts."""
        rows: dict[int, tuple[Drafted, int]] = {}
        for place, sequence in enumerate(decodes):
            lookup = sequence.lookup
            if lookup is None or sequence.lane is None or self._room_for_drafts(sequence) < 2:
                continue
            if sequence.drafted is None:
                sequence.drafted = Drafted(self.speculation.of_all.acceptance, len(sequence.ids))
            if guessers.get(place) is lookup and lookup.acceptance >= sequence.drafted.acceptance:
                # Its answer repeats what was said, and will go on to: that costs nothing.
                sequence.drafted.behind += 1
                continue
            left = sequence.request.stopping.max_tokens - sequence.drawn
            rows[place] = (sequence.drafted, min(left, sequence.state.context_left - sequence.drawn))
        count = self.speculation.count_guessed(list(rows.values()), len(decodes)) if rows else 0
        if count == 0:
            for drafted, _ in rows.values():
                drafted.behind += 1
                drafted.rest()
            self.speculation.of_all.rest()
            return {}
        return dict.fromkeys(rows, count)

    def _room_for_drafts(self, sequence: Sequence) -> int:
        """The id that is due is not one of them."""
        return min(self.limits.draft_tokens, sequence.state.context_left - sequence.drawn - 1)

    def _fit(self, sequence: Sequence, draft: list[int], now: float) -> list[int]:
        lane = sequence.lane
        assert lane is not None
        # Each of those seated may need a block soon.
        if self.kv.available_blocks > self._seated:
            sequence.settle(now)
            self.kv.grow(lane, len(sequence.ids) + len(draft))
        return draft[: lane.blocks * self.limits.block_tokens - len(sequence.ids)]

    def _take_draft(self, sequence: Sequence, draft: list[int], further: list[int], now: float) -> None:
        """The ids that the draft has saved steps for; what was computed beyond them is given up."""
        for token in further:
            if sequence.lane is None:
                # It has ended.
                return
            self._append(sequence, token, None, False, now)
        if sequence.lane is not None and len(further) < len(draft):
            self.kv.undo(sequence.lane, sequence.computed)

    # --- inside: choosing --------------------------------------------------------------------------------------------

    def _budget(self, decoding: int, beginning: int) -> StepBudget:
        """What of prompts the next step may take."""
        beginning += max(0, min(len(self._waiting), self.slots - self._seated))
        own, idle = self.limits.chunk_tokens, self.limits.idle_chunk_tokens
        return StepBudget(self.chunk_tokens, own, idle, self.pair_tokens, decoding, beginning)

    def _chunks(
        self,
        budget: StepBudget,
        output: int,
        rows: list[Sequence],
        outputs: list[int],
        now: float,
        batch_most: int | None,
    ) -> list[Chunk]:
        """Parts of prompts for this step, in order: of those begun, and of those that wait, while there is room.
        ``batch_most``: how much of batch work; None: it stands still."""
        batch_left = batch_most or 0
        # What has no part in this step can be put back.
        admit = self._admit_over_batch if batch_most is None else self._admit
        chunks: list[Chunk] = []
        # Of those seated now: a fork takes its place among the running, and its prompt is not to be computed.
        begun = [sequence for sequence in self._running if sequence.lane is not None and not sequence.prefilled]
        at, can_begin = 0, True
        while budget.open:
            sequence = begun[at] if at < len(begun) else None
            waits = can_begin and bool(self._waiting) and (batch_left > 0 or not self._waiting[0].makes_way)
            if waits and (sequence is None or self._waiting[0].order < sequence.order):
                newcomer = admit(now)
                if newcomer is None:
                    # Those that have begun go on.
                    can_begin = False
                    continue
                sequence = newcomer
            else:
                at += 1
            if sequence is None:
                break
            batch = sequence.makes_way
            if batch and batch_left <= 0:
                continue
            output = self._chunk(sequence, budget, output, chunks, rows, outputs, now, batch_left if batch else None)
            if batch:
                batch_left -= chunks[-1].count
        return chunks

    def _chunk(
        self,
        sequence: Sequence,
        budget: StepBudget,
        output: int,
        chunks: list[Chunk],
        rows: list[Sequence],
        outputs: list[int],
        now: float,
        most: int | None = None,
    ) -> int:
        """Adds the next part of that prompt; returns how many outputs the step has with it."""
        lane, state = sequence.lane, sequence.state
        assert lane is not None
        all_logits = state.request.logprobs.prompt and not state.announced and sequence.choice == 0
        if state.request.reuse_prefix and not all_logits:
            there = self.kv.advance(lane, sequence.ids, sequence.computed)
            self._count_cached(sequence, there - sequence.computed)
            sequence.computed = there
        left = len(sequence.ids) - sequence.computed
        count = budget.take(left if most is None else min(left, most), sequence.computed)
        last = sequence.computed + count == len(sequence.ids)
        chunk = Chunk(sequence, lane, sequence.computed, count, last, all_logits)
        chunks.append(chunk)
        if last:
            if sequence.drawn == 0:
                self._plan_forks(chunk, now)
            drawers = [sequence, *(twin for twin, _ in chunk.forks)]
            rows.extend(drawers)
            outputs.extend([output + (count - 1 if all_logits else 0)] * len(drawers))
        return output + (count if all_logits else int(last))

    def _admit(self, now: float) -> Sequence | None:
        """The first of those waiting, when there is a slot and room for its ids."""
        if not self._waiting or self._seated >= self.slots:
            return None
        sequence = self._waiting[0]
        state = sequence.state
        # Each running sequence may need a block soon; without that room it would push the newcomer out again.
        lane = self.kv.admit(
            sequence.ids,
            state.scope,
            reuse=state.request.reuse_prefix and not state.request.logprobs.prompt,
            headroom=self._seated,
        )
        if lane is None:
            return None
        del self._waiting[0]
        self._seat(sequence, lane, now)
        sequence.computed = self.kv.there(lane)
        if state.admitted_s is None:
            state.admitted_s = now
        self._count_cached(sequence, sequence.computed)
        return sequence

    def _seat(self, sequence: Sequence, lane: Lane, now: float) -> None:
        sequence.settle(now)
        sequence.lane = lane
        self._seated += 1
        bisect.insort(self._running, sequence, key=by_order)

    def _unseat(self, sequence: Sequence, now: float, *, keep: bool) -> None:
        lane = sequence.lane
        assert lane is not None
        sequence.settle(now)
        self.kv.close(lane, sequence.ids, sequence.computed, keep=keep)
        sequence.lane = None
        self._seated -= 1

    def _plan_forks(self, chunk: Chunk, now: float) -> None:
        """Gives the other choices their lanes; those for which there is no slot or room queue for themselves."""
        first = chunk.sequence
        for twin in first.state.sequences:
            if twin is first or twin.ended or twin.lane is not None or twin.drawn or self._is_waiting(twin):
                continue
            lane = self.kv.fork(chunk.lane) if self._seated < self.slots else None
            if lane is None:
                self._enqueue(twin)
                continue
            self._seat(twin, lane, now)
            chunk.forks.append((twin, lane))

    def _grow(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Room for the sequence's next id, at the cost of younger ones; False when it is itself the youngest."""
        lane = sequence.lane
        assert lane is not None
        sequence.settle(now)
        while not self.kv.grow(lane, tokens):
            victim = next(other for other in reversed(self._running) if other.lane is not None)
            self._preempt(victim, now)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        # What it has computed stays for reuse while nobody needs the room: then going on costs little.
        self._unseat(sequence, now, keep=sequence.request.reuse_prefix)
        sequence.computed = 0
        sequence.prefilled = False
        self._enqueue(sequence)

    # --- inside: accounting ------------------------------------------------------------------------------------------

    def _computed(self, chunk: Chunk, prompt_logprobs: list[TokenLogprobs] | None, now: float) -> None:
        sequence, lane = chunk.sequence, chunk.lane
        if sequence.lane is not lane:
            # It ended meanwhile, so its forks have nothing to share.
            for twin, twin_lane in chunk.forks:
                self._put_back(twin, twin_lane, now)
            return
        sequence.computed = chunk.start + chunk.count
        self.kv.commit(lane, sequence.ids, sequence.computed)
        self._hand_over(sequence, lane)
        if prompt_logprobs is not None:
            if chunk.start == 0:
                sequence.state.prompt_logprobs = []
            sequence.state.prompt_logprobs.extend(prompt_logprobs)
        if not chunk.last:
            return
        sequence.prefilled = True
        if self.limits.draft_tokens and sequence.lookup is None and _can_guess(sequence.request):
            sequence.lookup = Lookup()
        for twin, twin_lane in chunk.forks:
            if twin.lane is twin_lane:
                twin.settle(now)
                self.kv.join(twin_lane, lane, sequence.computed)
                twin.computed = sequence.computed
                twin.prefilled = True

    def _hand_over(self, sequence: Sequence, lane: Lane) -> None:
        state = sequence.state
        full = min(sequence.computed, sequence.prompt_tokens) // self.limits.block_tokens
        if state.handed_blocks is not None and full > state.handed_blocks:
            self._handed.append(HandedBlocks(state.request.key, lane.id, state.handed_blocks, full))
            state.handed_blocks = full

    def _append(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, must_end: bool, now: float
    ) -> None:
        state = sequence.state
        ids = sequence.ids
        index = len(ids) - sequence.prompt_tokens
        # What was decoded is computed: all but the id that has just been drawn.
        sequence.computed = len(ids)
        ids.append(token)
        state.completion_tokens += 1
        self.completion_tokens_total += 1
        if state.first_token_s is None:
            state.first_token_s = now
        delta = Delta(state.request.key, sequence.choice, index, [token])
        if logprobs is not None:
            delta.logprobs = [logprobs]
        if not state.announced:
            self._announce(state, delta)
        self._deltas.append(delta)
        drawn = index + 1
        if must_end or (token in state.end_ids and drawn > state.request.stopping.min_tokens):
            self._end(sequence, types_pb2.OUTCOME_STOP, now, delta=delta)
        elif drawn >= state.context_left:
            self._end(sequence, types_pb2.OUTCOME_LENGTH, now, delta=delta)

    def _announce(self, state: _RequestState, delta: Delta) -> None:
        """What goes with a request's first delta."""
        state.announced = True
        delta.cached_prompt_tokens = state.cached_prompt_tokens
        if state.request.logprobs.prompt:
            delta.prompt_logprobs, state.prompt_logprobs = state.prompt_logprobs, []

    def _count_cached(self, sequence: Sequence, tokens: int) -> None:
        """Only the first choice's first way through the prompt counts: later ways are the worker's own affair."""
        state = sequence.state
        if tokens > 0 and sequence.choice == state.sequences[0].choice and not state.announced and not sequence.drawn:
            state.cached_prompt_tokens += tokens
            self.cached_prompt_tokens_total += tokens

    def _end(
        self,
        sequence: Sequence,
        outcome: Outcome,
        now: float,
        why: types_pb2.Error | None = None,
        delta: Delta | None = None,
    ) -> None:
        """The one way out: everything it held is free, and its finish is on its way."""
        state = sequence.state
        sequence.ended = True
        self._turns.ended(sequence)
        if sequence.lane is not None:
            keep = sequence.request.reuse_prefix and outcome != types_pb2.OUTCOME_FAILED
            self._unseat(sequence, now, keep=keep)
        else:
            self._dequeue(sequence)
        state.open_choices -= 1
        if state.open_choices == 0:
            del self._states[state.request.key]
        self._released.append(sequence)
        if delta is None:
            delta = Delta(state.request.key, sequence.choice, sequence.drawn, [])
            self._deltas.append(delta)
        admitted = state.admitted_s if state.admitted_s is not None else now
        first = state.first_token_s if state.first_token_s is not None else now
        delta.finish = Finish(
            outcome=outcome,
            error=why,
            prompt_tokens=len(state.request.prompt_ids),
            cached_prompt_tokens=state.cached_prompt_tokens,
            completion_tokens=state.completion_tokens,
            queue_s=admitted - state.submitted_s,
            prefill_s=max(0.0, first - admitted),
            decode_s=max(0.0, now - first),
            kv_block_s=sum(other.kv_block_s for other in state.sequences),
        )

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            self.cancel(key, None, types_pb2.OUTCOME_DEADLINE, now)

    def _start_orphans(self, state: _RequestState) -> None:
        if state.aside is not None:
            return
        first = next((sequence for sequence in state.sequences if not sequence.ended), None)
        if first is not None and first.lane is None and not first.drawn and not self._is_waiting(first):
            self._enqueue(first)

    def _put_back(self, twin: Sequence, lane: Lane, now: float) -> None:
        """A fork that cannot join queues for itself."""
        if twin.lane is lane:
            self._unseat(twin, now, keep=False)
            self._enqueue(twin)

    def _enqueue(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=by_order)

    def _place(self, sequence: Sequence) -> int:
        """Its index among those that wait; -1 = it does not."""
        index = bisect.bisect_left(self._waiting, sequence.order, key=by_order)
        return index if index < len(self._waiting) and self._waiting[index] is sequence else -1

    def _is_waiting(self, sequence: Sequence) -> bool:
        return self._place(sequence) >= 0

    def _dequeue(self, sequence: Sequence) -> None:
        if (index := self._place(sequence)) >= 0:
            del self._waiting[index]

    def _compact(self) -> None:
        self._running = [sequence for sequence in self._running if sequence.lane is not None]


def _can_guess(request: Request) -> bool:
    """Its ids follow from the logits alone, so that a draft can be held against them."""
    sampling = request.sampling
    greedy = sampling.temperature == 0 or sampling.top_k == 1
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    plain = penalties == (1.0, 0.0, 0.0) and not sampling.logit_bias and request.guided is None
    return greedy and plain and not request.logprobs.enabled and not request.stopping.min_tokens
