"""The batch composer and its KV accounts, driven with a fake engine that keeps the KV cell by cell.

The fake is the oracle: it applies the composer's operations literally, computes each chunk into cells that remember the
ids before them, and refuses a step whose lane does not hold exactly the KV of the ids that the composer believes
computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._gateway import slots_to_stay
from headrace.v1 import types_pb2
from headrace.worker.composer import YIELD_S, Composer, Drawn, Limits, Sequence, Step
from headrace.worker.engine import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Delta,
    Guided,
    LogprobOptions,
    Request,
    Sampling,
    StepLimits,
    Stopping,
    TokenLogprobs,
)
from headrace.worker.kv import CopyLane, LoadBlock, MoveBlock, SaveBlock, TrimLane
from headrace.worker.validate import CLASS_TTFT_S

EOS = 99
BATCH = types_pb2.REQUEST_CLASS_BATCH
STOP, LENGTH = types_pb2.OUTCOME_STOP, types_pb2.OUTCOME_LENGTH
CANCELLED, DEADLINE, FAILED = types_pb2.OUTCOME_CANCELLED, types_pb2.OUTCOME_DEADLINE, types_pb2.OUTCOME_FAILED


def limits(**changes: int | None) -> Limits:
    values = {
        "slots": 4,
        "kv_blocks": 64,
        "block_tokens": 4,
        "context_tokens": 64,
        "chunk_tokens": 8,
        "idle_chunk_tokens": 16,
        "max_waiting": 1000,
    }
    return Limits(**(values | changes))


def request(
    key: int,
    prompt: list[int] | str,
    *,
    max_tokens: int = 4,
    n: int = 1,
    min_tokens: int = 0,
    ignore_eos: bool = False,
    stop_ids: frozenset[int] = frozenset(),
    salt: bytes = b"",
    lora: str = "",
    reuse: bool = True,
    class_: types_pb2.RequestClass = types_pb2.REQUEST_CLASS_INTERACTIVE,
    due_s: float = 0.0,
    deadline_s: float | None = None,
    prompt_logprobs: bool = False,
) -> Request:
    ids = [ord(c) for c in prompt] if isinstance(prompt, str) else prompt
    return Request(
        key=key,
        prompt_ids=ids,
        stopping=Stopping(max_tokens, min_tokens, ignore_eos, stop_ids, frozenset({EOS})),
        sampling=Sampling(seeds=tuple(range(n))),
        cache_salt=salt,
        lora=lora,
        reuse_prefix=reuse,
        request_class=class_,
        due_s=due_s,
        deadline_s=deadline_s,
        logprobs=LogprobOptions(prompt=prompt_logprobs),
    )


class FakeKv:
    """Lanes of cells; a cell is known by all ids up to it."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.lanes: dict[int, dict[int, Cell]] = {}
        self.places: dict[int, list[Cell]] = {}
        self.texts: dict[int, tuple[int, ...]] = {}

    def apply(self, step: Step) -> None:
        for operation in step.operations:
            if isinstance(operation, SaveBlock):
                saved = self.lanes[operation.lane]
                self.places[operation.place] = [saved[p] for p in range(operation.start, operation.end)]
            elif isinstance(operation, LoadBlock):
                target = self.lanes.setdefault(operation.lane, {})
                for position, cell in zip(
                    range(operation.start, operation.end), self.places[operation.place], strict=True
                ):
                    assert position not in target, "a cell is loaded over another"
                    target[position] = Cell(cell.text)
            elif isinstance(operation, MoveBlock):
                self.places[operation.target] = self.places.pop(operation.source)
            elif isinstance(operation, TrimLane):
                lane = self.lanes.get(operation.lane, {})
                end = operation.end if operation.end >= 0 else 1 << 30
                for position in [p for p in lane if operation.start <= p < end]:
                    del lane[position]
            else:
                assert isinstance(operation, CopyLane)
                source = self.lanes[operation.source]
                target = self.lanes.setdefault(operation.target, {})
                for position in range(operation.start, operation.end):
                    assert position not in target, "a cell is copied over another"
                    target[position] = source[position]

    def compute(self, lane_id: int, ids: list[int], start: int, count: int) -> None:
        lane = self.lanes.setdefault(lane_id, {})
        assert sorted(lane) == list(range(start)), f"lane {lane_id} holds {sorted(lane)}, not the first {start}"
        for position in range(start):
            assert lane[position].text == tuple(ids[: position + 1]), "KV of other text"
        for position in range(start, start + count):
            lane[position] = Cell(tuple(ids[: position + 1]))
        cells = {id(cell) for held in self.lanes.values() for cell in held.values()}
        assert len(cells) <= self.bound, f"{len(cells)} cells, the bound is {self.bound}"


class Cell:
    def __init__(self, text: tuple[int, ...]) -> None:
        self.text = text


def next_id(sequence: Sequence) -> int:
    """Some id that depends on text and choice alone."""
    return hash((tuple(sequence.ids), sequence.choice)) % 90


def often_said(text: list[int], choice: int) -> int:
    """The same, of a text that repeats itself."""
    return hash((tuple(text[-2:]), choice)) % 7


@dataclass
class World:
    """A composer, its fake engine and the answers as a client sees them."""

    limits: Limits
    draw: Callable[[Any], int] = next_id
    #: What a drafting model says after those ids; and how long each of its steps takes.
    guess: Callable[[list[int], int], int] | None = None
    guess_s: float = 0.0
    #: From a plan to its completion.
    step_s: float = 0.0
    hashing: bool = True
    now: float = 0.0
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    deltas: list[Delta] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.composer = Composer(self.limits, self.hash_blocks if self.hashing else None)
        self.kv = FakeKv(self.limits.kv_blocks * self.limits.block_tokens)
        self.requests: dict[int, Request] = {}

    def hash_blocks(self, ids: list[int], lora: str, salt: bytes) -> list[int]:
        size = self.limits.block_tokens
        return [
            hash((tuple(ids[: (i + 1) * size]), lora, salt)) & 0xFFFF_FFFF_FFFF_FFFF for i in range(len(ids) // size)
        ]

    def submit(self, request: Request) -> types_pb2.Error | None:
        """Due by its class, where the test says nothing else."""
        if not request.due_s:
            request = replace(request, due_s=self.now + CLASS_TTFT_S[request.request_class])
        refusal = self.composer.submit(request, self.now)
        if refusal is None:
            self.requests[request.key] = request
        return refusal

    def plan(self) -> Step:
        self.now += 1.0
        step = self.composer.plan(self.now)
        self.check_step(step)
        self.kv.apply(step)
        for place, sequence in enumerate(step.decodes):
            assert sequence.lane is not None
            draft = step.drafts.get(place, [])
            self.kv.compute(sequence.lane.id, [*sequence.ids, *draft], len(sequence.ids) - 1, 1 + len(draft))
        for chunk in step.chunks:
            self.kv.compute(chunk.lane.id, chunk.sequence.ids, chunk.start, chunk.count)
        return step

    def complete(self, step: Step) -> None:
        prompt_logprobs = {
            place: [
                TokenLogprobs((chunk.sequence.ids[p + 1], -1.0), [])
                for p in range(chunk.start, chunk.start + chunk.count)
                if p + 1 < chunk.sequence.prompt_tokens
            ]
            for place, chunk in enumerate(step.chunks)
            if chunk.all_logits
        }
        drawn = Drawn([self.draw(sequence) for sequence in step.rows], prompt_logprobs=prompt_logprobs)
        drawn.further = {row: self.further(step.rows[row], draft, drawn.ids[row]) for row, draft in step.drafts.items()}
        self.now += self.step_s
        if self.guess is not None:
            drawn.guessed = {
                row: (self.guesses(step.decodes[row], drawn, row, n), 0) for row, n in step.guesses.items()
            }
            drawn.guessing = [(len(step.guesses), self.guess_s)] * max(step.guesses.values(), default=0)
            self.now += self.guess_s * len(drawn.guessing)
        self.composer.complete(step, drawn, self.now)
        self.collect()

    def guesses(self, sequence: Sequence, drawn: Drawn, row: int, count: int) -> list[int]:
        assert self.guess is not None
        text = [*sequence.ids, drawn.ids[row], *drawn.further.get(row, ())]
        known = len(text)
        for _ in range(count):
            text.append(self.guess(text, sequence.choice))
        return text[known:]

    def further(self, sequence: Sequence, draft: list[int], token: int) -> list[int]:
        """What the model draws after each drafted id that it has drawn itself."""
        ids, found = [*sequence.ids, token], []
        for guessed in draft:
            if guessed != token:
                break
            as_if = SimpleNamespace(ids=ids, choice=sequence.choice, request=sequence.request)
            as_if.drawn = len(ids) - sequence.prompt_tokens
            token = self.draw(as_if)
            ids.append(token)
            found.append(token)
        return found

    def step(self) -> Step:
        step = self.plan()
        self.steps.append(step)
        self.complete(step)
        return step

    def run(self, most: int = 10_000) -> None:
        for _ in range(most):
            if self.composer.idle:
                return
            self.step()
        raise AssertionError(f"not done after {most} steps: starved or stuck")

    def check_step(self, step: Step) -> None:
        assert len(step.rows) == len(step.outputs)
        chunk_bound = self.composer.chunk_tokens
        crowded = chunk_bound >= self.limits.chunk_tokens and len(step.decodes) < self.without_prompt()
        if crowded or not step.decodes:
            chunk_bound = max(chunk_bound, self.limits.idle_chunk_tokens)
        # Several short beginnings have less of attention than one part of that length: more tokens take as long.
        chunk_bound = min(chunk_bound + self.composer.pair_tokens * chunk_bound**2 / 2, self.limits.idle_chunk_tokens)
        assert sum(chunk.count for chunk in step.chunks) == step.prefill_tokens <= chunk_bound
        assert all(0 < len(draft) <= self.limits.draft_tokens for draft in step.drafts.values())
        assert all(chunk.count > 0 for chunk in step.chunks), "at least one id of each chunk is computed"
        in_step = [*step.decodes, *(chunk.sequence for chunk in step.chunks)]
        in_step += [twin for chunk in step.chunks for twin, _ in chunk.forks]
        assert len({id(sequence) for sequence in in_step}) == len(in_step) <= self.limits.slots
        kv = self.composer.kv
        assert kv.used_blocks <= kv.total_blocks
        queued = [*(one for one in self.composer._running if one.lane is not None), *self.composer._waiting]
        stays = [one for one in queued if one.request.request_class == BATCH and not one.makes_way]
        assert len(stays) <= slots_to_stay(self.limits.slots)
        kept_in_kv = kv.cached_blocks if self.limits.keep_beside is None else 0
        assert kv.used_blocks + kept_in_kv <= kv.total_blocks

    def without_prompt(self) -> int:
        """Sequences whose prompt is not computed yet."""
        running = [one for one in self.composer._running if one.lane is not None and not one.prefilled]
        return len(self.composer._waiting) + len(running)

    def collect(self) -> None:
        deltas, changes = self.composer.take_results()
        self.composer.take_released()
        for delta in deltas:
            self.deltas.append(delta)
            place = (delta.key, delta.choice)
            assert place not in self.outcomes, "something after the end"
            answer = self.answers.setdefault(place, [])
            assert delta.first_index == len(answer), "indices have a gap"
            answer.extend(delta.ids)
            if delta.cached_prompt_tokens is not None:
                assert delta.key not in self.cached
                self.cached[delta.key] = delta.cached_prompt_tokens
            if delta.finish is not None:
                self.outcomes[place] = delta.finish.outcome
                assert delta.finish.kv_block_s >= 0
                assert delta.finish.queue_s >= 0
        for change in changes:
            if isinstance(change, BlocksStored):
                assert change.parent == 0 or change.parent in self.held
                assert not self.held & set(change.hashes)
                self.held |= set(change.hashes)
            elif isinstance(change, BlocksRemoved):
                assert set(change.hashes) <= self.held
                self.held -= set(change.hashes)
            else:
                assert isinstance(change, BlocksCleared)
                self.held.clear()

    def check_rest(self) -> None:
        """Nothing is held for anybody, and all that is left is for reuse."""
        load = self.composer.load(0)
        assert (load.waiting_requests, load.running_requests, load.kv_blocks_used) == (0, 0, 0)
        assert (load.waiting_prompt_tokens, load.running_prompt_tokens, load.context_tokens) == (0, 0, 0)
        if self.hashing:
            assert load.kv_blocks_cached == len(self.held)
        self.composer.kv.clear_cached()
        assert self.composer.kv.cached_blocks == 0
        self.kv.apply(self.composer.plan(self.now))
        assert not any(self.kv.lanes.values()), "cells that nobody accounts for"
        self.collect()
        assert not self.held


def alone(request: Request) -> list[list[int]]:
    """The answers that a request gets when nothing else runs."""
    world = World(limits(slots=64, kv_blocks=4096, context_tokens=64))
    world.submit(request)
    world.run()
    return [world.answers[request.key, choice] for choice in range(request.n)]


# --- examples ---------------------------------------------------------------------------------------------------------


def test_a_request_runs_to_its_limit() -> None:
    world = World(limits())
    world.submit(request(1, "hello", max_tokens=3))
    world.run()
    assert world.outcomes == {(1, 0): LENGTH}
    assert len(world.answers[1, 0]) == 3
    world.check_rest()


@pytest.mark.parametrize(
    ("changes", "length", "outcome"),
    [
        ({}, 2, STOP),
        ({"min_tokens": 2}, 3, STOP),
        ({"ignore_eos": True}, 6, LENGTH),
        ({"ignore_eos": True, "stop_ids": frozenset({EOS})}, 2, STOP),
        ({"stop_ids": frozenset({7})}, 1, STOP),
    ],
)
def test_ends(changes: dict[str, int], length: int, outcome: int) -> None:
    script = [7, EOS, EOS, EOS, EOS, EOS]
    world = World(limits(), draw=lambda sequence: script[sequence.drawn])
    world.submit(request(1, "abc", max_tokens=6, **changes))  # type: ignore[arg-type]
    world.run()
    assert (len(world.answers[1, 0]), world.outcomes[1, 0]) == (length, outcome)


def test_prompts_are_chunked_beside_decoding_and_decoding_never_pauses() -> None:
    world = World(limits(chunk_tokens=8, idle_chunk_tokens=16))
    world.submit(request(1, "ab", max_tokens=20))
    world.step()
    world.submit(request(2, [5] * 40, max_tokens=2))
    for _ in range(5):
        step = world.step()
        assert len(step.decodes) == 1
        assert step.prefill_tokens == 8
    assert len(world.answers[1, 0]) == 6
    assert len(world.answers[2, 0]) == 1


def test_a_step_is_as_large_as_an_idle_one_while_more_wait_for_it_than_it_holds_up() -> None:
    world = World(limits(slots=8, chunk_tokens=8, idle_chunk_tokens=16))
    world.submit(request(0, list(range(100, 108)), max_tokens=50))
    world.step()
    for key in range(1, 5):
        world.submit(request(key, list(range(key * 200, key * 200 + 12)), max_tokens=50))
    # One is running and four wait; then two and three; then three and two; and so on.
    assert [world.step().prefill_tokens for _ in range(5)] == [16, 16, 8, 8, 0]
    world = World(limits(slots=8, chunk_tokens=8, idle_chunk_tokens=16))
    world.composer.chunk_tokens = 4
    world.submit(request(0, list(range(100, 108)), max_tokens=50))
    world.step()
    for key in range(1, 5):
        world.submit(request(key, list(range(key * 200, key * 200 + 12)), max_tokens=50))
    assert world.step().prefill_tokens == 4, "who asked for less gets less"


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e-4, 0.01, 0.2, 1.0]),
    st.integers(1, 15),
)
def test_a_step_holds_less_of_a_prompt_the_farther_in_it_is(prompts: list[int], pair_tokens: float, told: int) -> None:
    world = World(limits(slots=8, kv_blocks=400, context_tokens=400, chunk_tokens=16, idle_chunk_tokens=16))
    world.composer.chunk_tokens, world.composer.pair_tokens = told, pair_tokens
    world.submit(request(0, [7], max_tokens=350, ignore_eos=True))
    world.step()
    for key, length in enumerate(prompts, 1):
        world.submit(request(key, [key * 1000 + at for at in range(length)], max_tokens=1))
    before = dict.fromkeys(range(1, len(prompts) + 1), 0)
    while any((key, 0) not in world.outcomes for key in before):
        step = world.plan()
        weight = sum(chunk.count + pair_tokens * chunk.count * (chunk.start + chunk.count / 2) for chunk in step.chunks)
        bound = told + pair_tokens * told**2 / 2
        # Prefill never stands still: the last part may be the one token that is always computed.
        assert weight <= bound + 1e-3 or step.chunks[-1].count == 1
        assert step.decodes
        assert 0 < step.prefill_tokens <= 16
        for chunk in step.chunks:
            assert chunk.start == before[chunk.sequence.request.key]
            before[chunk.sequence.request.key] += chunk.count
        world.complete(step)
    assert list(before.values()) == prompts


def test_a_new_request_joins_the_next_step_and_leaves_at_once() -> None:
    world = World(limits())
    world.submit(request(1, "abc", max_tokens=9))
    world.step()
    world.submit(request(2, "xyz", max_tokens=1))
    step = world.step()
    assert [sequence.request.key for sequence in step.rows] == [1, 2]
    assert world.outcomes == {(2, 0): LENGTH}
    assert len(world.step().rows) == 1


def test_cached_prefix_is_reused_but_one_id_is_always_computed() -> None:
    world = World(limits())
    for key, prompt in enumerate(["01234567", "01234567", "0123456", "012345678"], start=1):
        world.submit(request(key, prompt, max_tokens=1))
        world.run()
    assert world.cached == {1: 0, 2: 7, 3: 6, 4: 8}
    world.check_rest()


def test_identity_of_a_block() -> None:
    world = World(limits())
    prompt = "abcdefghij"
    runs = [
        request(1, prompt, max_tokens=1, salt=b"t1"),
        request(2, prompt, max_tokens=1, salt=b"t2"),
        request(3, prompt, max_tokens=1, salt=b"t1"),
        request(4, prompt, max_tokens=1, lora="X"),
        request(5, prompt, max_tokens=1, salt=b"X"),
        request(6, prompt, max_tokens=1),
        request(7, prompt, max_tokens=1, reuse=False),
        request(8, "9999" + prompt[4:], max_tokens=1),
        request(9, prompt, max_tokens=1),
    ]
    for each in runs:
        world.submit(each)
        world.run()
    assert world.cached == {1: 0, 2: 0, 3: 8, 4: 0, 5: 0, 6: 0, 7: 0, 8: 0, 9: 8}
    world.check_rest()


def test_colliding_hashes_are_not_a_hit() -> None:
    world = World(limits(), hashing=False)
    world.composer = Composer(world.limits, lambda ids, lora, salt: [7] * (len(ids) // 4))
    for key, prompt in enumerate(["aaaabbbbc", "ddddeeeef"]):
        world.composer.submit(request(key, prompt, max_tokens=1), 0.0)
        while not world.composer.idle:
            step = world.plan()
            world.composer.complete(step, Drawn([1] * len(step.rows)), 0.0)
    deltas, _ = world.composer.take_results()
    assert [delta.cached_prompt_tokens for delta in deltas] == [0, 0]


def test_the_answer_is_reused_by_the_next_turn() -> None:
    world = World(limits())
    world.submit(request(1, "0123", max_tokens=9))
    world.run()
    turn = [ord(c) for c in "0123"] + world.answers[1, 0] + [1, 2, 3]
    world.submit(request(2, turn, max_tokens=1))
    world.run()
    # 4 + 9 ids, of which the last was never computed.
    assert world.cached[2] == 12


def test_a_crowd_with_one_prefix_computes_it_once() -> None:
    world = World(limits(slots=8, kv_blocks=64, context_tokens=128))
    shared = list(range(40))
    for key in range(8):
        world.submit(request(key, [*shared, 50 + key, 60], max_tokens=2))
    world.run()
    computed = sum(step.prefill_tokens for step in world.steps)
    # The second may begin in the step that computes the first one's end.
    assert 42 + 7 * 2 <= computed <= 42 + 7 * 2 + 16
    assert sum(world.cached.values()) == 8 * 42 - computed
    world.check_rest()


def test_choices_share_the_prompt() -> None:
    world = World(limits(kv_blocks=16))
    world.submit(request(1, "0123456789", n=3, max_tokens=5))
    world.step()
    assert world.composer.kv.used_blocks <= 2 + 3
    assert [len(world.answers[1, choice]) for choice in range(3)] == [1, 1, 1]
    world.run()
    assert sum(step.prefill_tokens for step in world.steps) == 10
    assert [world.answers[1, choice] for choice in range(3)] == alone(request(1, "0123456789", n=3, max_tokens=5))
    finishes = [delta.finish for delta in world.deltas if delta.finish is not None]
    assert finishes[-1].completion_tokens == 15
    world.check_rest()


def test_a_choice_is_cancelled_alone_and_the_first_one_before_the_prompt_is_computed() -> None:
    world = World(limits())
    world.submit(request(1, [3] * 30, n=3, max_tokens=3))
    world.step()
    world.composer.cancel(1, 0, CANCELLED, world.now)
    world.run()
    assert world.outcomes == {(1, 0): CANCELLED, (1, 1): LENGTH, (1, 2): LENGTH}
    world.check_rest()


def test_memory_that_runs_out_pushes_out_the_youngest() -> None:
    # Three requests that grow to 6 blocks each, in 12.
    world = World(limits(kv_blocks=12, context_tokens=24))
    requests = [request(key, [key] * 4, max_tokens=20) for key in range(3)]
    for each in requests:
        world.submit(each)
    world.run()
    assert set(world.outcomes.values()) == {LENGTH}
    for each in requests:
        assert [world.answers[each.key, 0]] == alone(each)
    ends = [delta.key for delta in world.deltas if delta.finish]
    assert ends[0] == 0
    world.check_rest()


def test_what_is_put_aside_makes_room_and_goes_on_where_it_was() -> None:
    world = World(limits(slots=1))
    slow, quick = request(1, "abcdefgh", max_tokens=12), request(2, "xyz", max_tokens=2)
    expected = alone(slow)
    world.submit(slow)
    for _ in range(5):
        world.step()
    said = len(world.answers[1, 0])
    assert 0 < said < 12
    world.composer.put_aside(1, world.now)
    load = world.composer.load(0)
    assert (load.running_requests, load.waiting_requests, load.kv_blocks_used) == (0, 0, 0)
    world.submit(quick)
    for _ in range(5):
        world.step()
    assert world.outcomes == {(2, 0): LENGTH}
    assert len(world.answers[1, 0]) == said
    world.composer.go_on(1)
    world.run()
    assert world.answers[1, 0] == expected[0]
    world.check_rest()


def test_what_is_put_aside_ends_at_its_deadline_and_with_its_router() -> None:
    world = World(limits(slots=1))
    world.submit(request(1, "abc", deadline_s=5.0))
    world.submit(request(2, "abc"))
    for key in (1, 2):
        world.composer.put_aside(key, world.now)
    world.composer.cancel(2, None, CANCELLED, world.now)
    world.run(10)
    assert world.outcomes == {(1, 0): DEADLINE, (2, 0): CANCELLED}
    world.check_rest()


def test_what_can_never_fit_is_refused_with_numbers() -> None:
    world = World(limits(kv_blocks=4, context_tokens=64))
    refusal = world.submit(request(1, [1] * 10, max_tokens=10))
    assert refusal is not None
    assert refusal.code == types_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
    assert "20 tokens" in refusal.message
    assert "has 4" in refusal.message
    too_long = world.submit(request(2, [1] * 64, max_tokens=1))
    assert too_long is not None
    assert "64" in too_long.message
    assert world.submit(request(3, [1] * 10, max_tokens=6)) is None


def test_a_full_queue_is_a_retryable_refusal() -> None:
    world = World(limits(slots=1, max_waiting=1))
    assert world.submit(request(1, "a")) is None
    assert world.submit(request(2, "b")) is None
    refusal = world.submit(request(3, "c"))
    assert refusal is not None
    assert refusal.retryable
    assert refusal.code == types_pb2.ERROR_CODE_OVERLOADED


def test_deadline_stops_within_one_step_running_or_waiting() -> None:
    world = World(limits(slots=1))
    world.submit(request(1, "ab", max_tokens=50, deadline_s=3.5))
    world.submit(request(2, "cd", max_tokens=50, deadline_s=2.5))
    world.run()
    assert world.outcomes == {(1, 0): DEADLINE, (2, 0): DEADLINE}
    assert (len(world.answers[1, 0]), len(world.answers[2, 0])) == (3, 0)
    world.check_rest()


def test_who_is_due_first_goes_first_but_nobody_starves() -> None:
    world = World(limits(slots=1))
    world.submit(request(0, "a", max_tokens=2))
    world.step()
    world.submit(request(1, "b", max_tokens=2, due_s=world.now + 60))
    for key in range(2, 100):
        world.submit(request(key, "c", max_tokens=2, due_s=world.now + 1))
        world.step()
        world.step()
    order = [delta.key for delta in world.deltas if delta.finish]
    assert order.index(2) < order.index(1)
    assert 1 in order


def test_a_prompt_that_is_due_sooner_goes_before_one_that_has_begun() -> None:
    world = World(limits(slots=4))
    world.submit(request(1, "a" * 50, max_tokens=2, due_s=60))
    world.step()
    began = world.composer.load(0).running_prompt_tokens
    assert 0 < began < 50
    world.submit(request(2, "b" * 20, max_tokens=2, due_s=1))
    world.run()
    firsts = [delta.key for delta in world.deltas if delta.first_index == 0 and delta.ids]
    assert firsts == [2, 1]
    world.check_rest()


def test_prompt_logprobs_come_with_the_first_delta_one_for_each_id_but_the_first() -> None:
    world = World(limits())
    world.submit(request(1, "0123456789", max_tokens=2))
    world.run()
    world.submit(request(2, "0123456789" * 4, max_tokens=2, prompt_logprobs=True))
    world.run()
    first = next(delta for delta in world.deltas if delta.key == 2)
    assert first.prompt_logprobs is not None
    assert [each.drawn[0] for each in first.prompt_logprobs] == [ord(c) for c in "0123456789" * 4][1:]
    assert world.cached[2] == 0


def test_an_abandoned_step_is_computed_again() -> None:
    world = World(limits())
    world.submit(request(1, "0123456789", n=2, max_tokens=3))
    world.composer.abandon(world.plan(), world.now)
    world.run()
    assert [world.answers[1, choice] for choice in range(2)] == alone(request(1, "0123456789", n=2, max_tokens=3))
    world.check_rest()


def test_a_failed_step_fails_those_in_it_only() -> None:
    world = World(limits(slots=1))
    world.submit(request(1, "ab", n=1))
    world.submit(request(2, "cd"))
    step = world.plan()
    world.composer.fail(step, types_pb2.Error(code=types_pb2.ERROR_CODE_INTERNAL), world.now)
    world.collect()
    world.run()
    assert world.outcomes == {(1, 0): FAILED, (2, 0): LENGTH}
    world.check_rest()


# --- properties -------------------------------------------------------------------------------------------------------

prompts = st.one_of(
    # Few different ids, and common beginnings: much to share.
    st.lists(st.integers(0, 1), min_size=1, max_size=30),
    st.builds(
        lambda head, tail: [1, 2, 3, 4] * head + tail,
        st.integers(0, 6),
        st.lists(st.integers(0, 9), min_size=1, max_size=8),
    ),
)


@st.composite
def requests_(draw: st.DrawFn) -> Request:
    return request(
        0,
        draw(prompts),
        max_tokens=draw(st.integers(1, 24)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        min_tokens=draw(st.integers(0, 4)),
        ignore_eos=draw(st.booleans()),
        salt=draw(st.sampled_from([b"", b"", b"s"])),
        reuse=draw(st.sampled_from([True, True, True, False])),
        class_=draw(st.sampled_from([types_pb2.REQUEST_CLASS_INTERACTIVE, types_pb2.REQUEST_CLASS_BATCH])),
        due_s=draw(st.sampled_from([0.0, 1.0, 60.0])),
        deadline_s=draw(st.one_of(st.none(), st.floats(1.0, 60.0))),
        prompt_logprobs=draw(st.sampled_from([False, False, False, True])),
    )


events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), requests_()),
        st.tuples(st.just("cancel"), st.tuples(st.integers(0, 30), st.sampled_from([None, 0, 1]))),
        st.tuples(st.just("step"), st.integers(1, 6)),
        # The step is computed while a cancellation arrives.
        st.tuples(st.just("cancel_within"), st.integers(0, 30)),
        st.tuples(st.just("abandon"), st.none()),
        st.tuples(st.just("put_aside"), st.integers(1, 30)),
        st.tuples(st.just("go_on"), st.integers(1, 30)),
        st.tuples(st.just("slots"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(
    events=events,
    kv_blocks=st.integers(8, 40),
    beside=st.none() | st.integers(0, 30),
    drafts=st.sampled_from([0, 1, 5]),
    drafting=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_interleaving_keeps_the_books(
    events: list[tuple[str, object]], kv_blocks: int, beside: int | None, drafts: int, drafting: bool, seed: int
) -> None:
    dice = random.Random(seed)
    ends = {}

    def guess(text: list[int], choice: int) -> int:
        return dice.randrange(90) if dice.random() < 0.3 else says(text, choice)

    def says(text: list[int], choice: int) -> int:
        return often_said(text, choice) if drafts else hash((tuple(text), choice)) % 90

    def draw(sequence: Sequence) -> int:
        place = (sequence.request.key, sequence.choice, sequence.drawn)
        return ends.setdefault(place, EOS if dice.random() < 0.1 else says(sequence.ids, sequence.choice))

    on_disk = (beside or 0) // 2
    bounds = limits(
        kv_blocks=kv_blocks,
        keep_beside=beside,
        on_disk=on_disk,
        context_tokens=60,
        draft_tokens=drafts,
        drafting=drafting,
    )
    world = World(bounds, draw=draw, guess=guess if drafting else None)
    cancelled: set[int] = set()
    key = 0
    for what, value in events:
        if what == "submit":
            assert isinstance(value, Request)
            key += 1
            world.submit(
                Request(**{name: getattr(value, name) for name in Request.__slots__ if name != "key"}, key=key)
            )
        elif what == "cancel":
            assert isinstance(value, tuple)
            cancelled.add(value[0])
            world.composer.cancel(value[0], value[1], CANCELLED, world.now)
            world.collect()
        elif what == "step":
            assert isinstance(value, int)
            for _ in range(value):
                world.step()
        elif what == "cancel_within":
            assert isinstance(value, int)
            step = world.plan()
            cancelled.add(value)
            world.composer.cancel(value, None, CANCELLED, world.now)
            world.complete(step)
        elif what == "abandon":
            world.composer.abandon(world.plan(), world.now)
            world.collect()
        elif what == "put_aside":
            assert isinstance(value, int)
            world.composer.put_aside(value, world.now)
        elif what == "go_on":
            assert isinstance(value, int)
            world.composer.go_on(value)
        else:
            assert isinstance(value, int)
            world.composer.slots = value
    for key in world.requests:
        world.composer.go_on(key)
    world.run()
    expected = {(key, choice) for key, each in world.requests.items() for choice in range(each.n)}
    assert set(world.outcomes) == expected, "each choice ends exactly once"
    for (key, choice), outcome in world.outcomes.items():
        answer = world.answers[key, choice]
        stopping = world.requests[key].stopping
        assert len(answer) <= stopping.max_tokens
        if outcome == STOP:
            assert answer[-1] == EOS
            assert len(answer) > stopping.min_tokens
        elif outcome == LENGTH:
            room = 60 - len(world.requests[key].prompt_ids)
            assert len(answer) == min(stopping.max_tokens, room)
        elif outcome == CANCELLED:
            assert key in cancelled
        else:
            assert outcome == DEADLINE
            assert world.requests[key].deadline_s is not None
        # Whatever was beside it, pushed out or shared, the ids are those of the text before them.
        text = list(world.requests[key].prompt_ids)
        for index, token in enumerate(answer):
            assert token == ends[key, choice, index]
            assert token == EOS or token == says(text, choice)
            text.append(token)
    world.check_rest()


def test_what_is_guessed_right_saves_steps_and_changes_no_id() -> None:
    def draw(sequence: Sequence) -> int:
        return often_said(sequence.ids, sequence.choice)

    answers, steps = [], []
    for drafts in (0, 4):
        world = World(limits(draft_tokens=drafts), draw=draw)
        world.submit(request(1, [1, 2, 3, 1, 2, 3, 1, 2], max_tokens=40, ignore_eos=True))
        world.run()
        answers.append(world.answers[1, 0])
        steps.append(len(world.steps))
        assert world.outcomes[1, 0] == LENGTH
        load = world.composer.load(0)
        assert (load.draft_tokens_total > 0) == (drafts > 0)
        assert load.accepted_draft_tokens_total <= load.draft_tokens_total
        world.check_rest()
    assert answers[0] == answers[1]
    assert steps[1] < 0.6 * steps[0]


@pytest.mark.parametrize(("guess_s", "pays"), [(0.02, True), (2.0, False)])
def test_a_drafting_model_saves_steps_while_it_pays_and_changes_no_id(guess_s: float, pays: bool) -> None:
    """A step takes as long, whatever is in it; every fourth guess is wrong. Nothing of the text repeats."""

    def says(text: list[int], choice: int) -> int:
        return hash(tuple(text)) % 80 + 10

    def guess(text: list[int], choice: int) -> int:
        return says(text, choice) if len(text) % 4 else 5

    answers, took, tried = [], [], 0
    for model in (None, guess):
        world = World(
            limits(draft_tokens=4, drafting=model is not None, context_tokens=256),
            draw=lambda sequence: says(sequence.ids, 0),
            guess=model,
            guess_s=guess_s,
            step_s=1.0,
        )
        world.submit(request(1, [1, 2, 3], max_tokens=200, ignore_eos=True))
        world.run()
        answers.append(world.answers[1, 0])
        took.append(world.now)
        tried = sum(map(bool, (step.guesses for step in world.steps)))
        load = world.composer.load(0)
        assert load.accepted_draft_tokens_total <= load.draft_tokens_total
        world.check_rest()
    assert answers[0] == answers[1]
    if pays:
        assert took[1] < 0.6 * took[0]
    else:
        # It has tried, and has left off.
        assert 0 < tried < 10
        assert took[1] < took[0] + 10 * guess_s


def test_nothing_is_guessed_where_more_than_the_logits_decides() -> None:
    for changes in (
        {"sampling": Sampling(temperature=1.0)},
        {"sampling": Sampling(frequency_penalty=1.0)},
        {"sampling": Sampling(logit_bias={3: 1.0})},
        {"logprobs": LogprobOptions(enabled=True)},
        {"guided": Guided("regex", "a*")},
        {"stopping": Stopping(30, min_tokens=2)},
    ):
        world = World(limits(draft_tokens=4), draw=lambda sequence: often_said(sequence.ids, sequence.choice))
        world.submit(Request(**({"key": 1, "prompt_ids": [1, 2, 3, 1, 2, 3], "stopping": Stopping(30)} | changes)))
        world.run()
        assert not any(step.drafts for step in world.steps), changes


# --- batch work makes way ---------------------------------------------------------------------------------------------


def in_step(step: Step) -> set[int]:
    """The requests that take part."""
    return {sequence.request.key for sequence in (*step.decodes, *(chunk.sequence for chunk in step.chunks))}


def test_batch_work_stands_still_while_a_prompt_of_others_is_computed() -> None:
    world = World(limits(chunk_tokens=4))
    world.submit(request(1, "batch", max_tokens=30, class_=BATCH))
    world.submit(request(2, "other", max_tokens=30))
    world.step()
    world.step()
    assert in_step(world.step()) == {1, 2}
    world.submit(request(3, "a prompt of three steps", max_tokens=4))
    world.now -= 0.9
    steps = []
    while not world.answers.get((3, 0)):
        steps.append(world.step())
        world.now -= 0.95
    assert len(steps) > 2
    for step in steps:
        assert in_step(step) == {2, 3}, "who decodes and is no batch work is in every step"
    assert in_step(world.step()) == {1, 2, 3}
    world.run()
    assert len(world.answers[1, 0]) == 30


def test_batch_work_does_not_stand_still_for_ever() -> None:
    world = World(limits(chunk_tokens=4))
    world.submit(request(1, "batch", max_tokens=100, class_=BATCH))
    world.step()
    world.submit(request(2, "other", max_tokens=100))
    world.step()
    waited = 0
    for key in range(3, 40):
        # There is always a prompt of somebody else.
        world.submit(request(key, f"prompt {key}", max_tokens=1))
        step = world.step()
        world.now -= 0.8
        waited = 0 if 1 in in_step(step) else waited + 1
        assert waited <= YIELD_S / 0.2 + 1


def test_batch_prompts_go_slower_beside_others_who_decode() -> None:
    world = World(limits(chunk_tokens=8, idle_chunk_tokens=16))
    world.composer.batch_chunk_tokens = 3
    world.submit(request(1, "other", max_tokens=6))
    world.step()
    for key in (2, 3):
        world.submit(request(key, f"a batch prompt, {key}", max_tokens=2, class_=BATCH))
    counts = []
    while not world.answers.get((1, 0)) or len(world.answers[1, 0]) < 6:
        step = world.step()
        if 1 in in_step(step):
            counts.append([chunk.count for chunk in step.chunks])
    assert len(counts) > 2
    assert counts == [[3]] * len(counts)
    # Among themselves they take what a step has.
    assert sum(chunk.count for chunk in world.step().chunks) > 3
    world.run()
    assert {key: len(ids) for (key, _), ids in world.answers.items()} == {1: 6, 2: 2, 3: 2}


def test_a_batch_prompt_does_not_fill_the_step_of_anothers_prompt() -> None:
    world = World(limits(chunk_tokens=8, idle_chunk_tokens=64))
    world.composer.batch_chunk_tokens = 3
    world.submit(request(1, "a prompt of somebody", max_tokens=3))
    world.submit(request(2, "a batch prompt that has room beside it", max_tokens=3, class_=BATCH))
    counts = {chunk.sequence.request.key: chunk.count for chunk in world.step().chunks}
    assert counts == {1: len("a prompt of somebody"), 2: 3}
    world.run()
    assert {key: len(ids) for (key, _), ids in world.answers.items()} == {1: 3, 2: 3}


def test_batch_sequences_take_turns_beside_others_who_decode() -> None:
    world = World(limits(slots=6))
    for key in range(1, 6):
        world.submit(request(key, f"batch {key}", max_tokens=40, class_=BATCH))
    world.step()
    world.step()
    assert in_step(world.step()) == {1, 2, 3, 4, 5}
    world.composer.set_limits(StepLimits(chunk_tokens=64, batch_sequences=2))
    assert in_step(world.step()) == {1, 2, 3, 4, 5}, "nobody is there whom it would hold up"
    world.submit(request(6, "other", max_tokens=20))
    world.step()
    turns = [in_step(world.step()) for _ in range(10)]
    assert all(6 in turn and len(turn) == 3 for turn in turns)
    counts = {key: sum(key in turn for turn in turns) for key in range(1, 6)}
    assert counts == dict.fromkeys(range(1, 6), 4)
    world.run()
    assert {key: len(ids) for (key, _), ids in world.answers.items()} == {**dict.fromkeys(range(1, 6), 40), 6: 20}
    alone = World(limits())
    alone.submit(request(3, "batch 3", max_tokens=40, class_=BATCH))
    alone.run()
    assert world.answers[3, 0] == alone.answers[3, 0]


@pytest.mark.parametrize("bound", [{"slots": 2}, {"kv_blocks": 8}])
def test_the_youngest_batch_work_is_put_back_for_others(bound: dict[str, int]) -> None:
    world = World(limits(**bound))
    for key in (1, 2):
        world.submit(request(key, "a batch prompt", max_tokens=8, class_=BATCH))
    world.step()
    world.step()
    world.submit(request(3, "another", max_tokens=8))
    assert in_step(world.step()) == {3}
    assert in_step(world.step()) == {1, 3}
    world.run()
    assert {key: len(ids) for (key, _), ids in world.answers.items()} == {1: 8, 2: 8, 3: 8}
    alone = World(limits())
    alone.submit(request(2, "a batch prompt", max_tokens=8, class_=BATCH))
    alone.run()
    assert world.answers[2, 0] == alone.answers[2, 0], "nothing of it is lost"


def test_who_is_batch_work_too_puts_nobody_back() -> None:
    world = World(limits(slots=2))
    for key in (1, 2, 3):
        world.submit(request(key, "batch", max_tokens=6, class_=BATCH))
    for _ in range(4):
        assert in_step(world.step()) == {1, 2}
    world.run()


def test_a_step_of_batch_prompts_may_be_broken_off_and_others_may_not() -> None:
    world = World(limits())
    world.submit(request(1, "batch", class_=BATCH))
    assert world.plan().yields
    mixed = World(limits())
    mixed.submit(request(1, "batch", class_=BATCH))
    mixed.submit(request(2, "other"))
    assert not mixed.plan().yields
    overdue = World(limits(chunk_tokens=4, idle_chunk_tokens=4))
    overdue.submit(request(1, "a long batch prompt", class_=BATCH))
    overdue.step()
    overdue.now += 100.0
    overdue.submit(request(2, "a long prompt of another"))
    step = overdue.step()
    assert (in_step(step), step.yields) == ({1}, False), "it stays, and is due before who comes now"


@pytest.mark.parametrize(("slots", "stay"), [(4, 1), (32, 2)])
def test_a_backlog_that_is_older_than_its_target_holds_up_nobody_but_in_a_part_of_the_slots(
    slots: int, stay: int
) -> None:
    world = World(limits(slots=slots, kv_blocks=64 * slots, chunk_tokens=512, idle_chunk_tokens=512))
    for key in range(1, 2 * slots):
        world.submit(request(key, [key % 90], max_tokens=60, ignore_eos=True, class_=BATCH))
    world.step()
    world.now += 1000.0
    # So many that together they want all slots but those in which batch work stays.
    others = list(range(1000, 1000 + slots - stay))
    for key in others:
        world.submit(request(key, "an answer at once", max_tokens=20, ignore_eos=True))
    for _ in range(slots):
        running = in_step(world.step())
        if set(others) <= running:
            break
    assert set(others) <= running
    assert len(running - set(others)) == stay
    world.submit(request(2000, "one more than there are slots for", max_tokens=2))
    assert 2000 not in in_step(world.step())
    world.run()


def test_batch_work_that_is_overdue_does_not_starve_beside_others_without_end() -> None:
    world = World(limits())
    for key in range(1, 7):
        world.submit(request(key, f"batch {key}", max_tokens=8, class_=BATCH))
    batch = {(key, 0) for key in range(1, 7)}
    for key in range(1000, 4000):
        if batch <= world.outcomes.keys():
            break
        # More come than there are slots for.
        if len(world.composer._waiting) < 20:
            world.submit(request(key, f"another {key}", max_tokens=8))
        world.step()
    assert batch <= world.outcomes.keys(), "starved"
    world.run()
    world.check_rest()
