"""The books of engines that batch by themselves, with a driver whose engine does what the test says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.support.waiting import eventually

from headrace.errors import EngineError
from headrace.v1 import types_pb2
from headrace.worker import selfbatched
from headrace.worker.engine import Delta, Guided, Request, Sampling, StepCost, StepLimits, StepResult, Stopping
from headrace.worker.selfbatched import Inbox, KvState, Room, Run, SelfBatched

STOP, LENGTH = types_pb2.OUTCOME_STOP, types_pb2.OUTCOME_LENGTH
CANCELLED, DEADLINE, FAILED = types_pb2.OUTCOME_CANCELLED, types_pb2.OUTCOME_DEADLINE, types_pb2.OUTCOME_FAILED
REJECTED = types_pb2.OUTCOME_REJECTED
EOS = 9


async def until(true: Callable[[], bool]) -> None:
    async def look() -> bool:
        return true()

    await eventually(look, "what was waited for")


class Scripted:
    """A driver; its engine is the test."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.aborted: list[Run] = []
        self.inbox: Any = None
        self.killed = self.closed = 0
        self.opening: Exception | None = None
        self.state = KvState(3, 7)

    async def open(self, inbox: Inbox) -> Room:
        self.inbox = inbox
        if self.opening is not None:
            raise self.opening
        return Room(slots=4, context_tokens=40, block_tokens=4, kv_blocks=50)

    def describe(self) -> types_pb2.ModelDescription:
        return types_pb2.ModelDescription(engine="scripted")

    async def check(self, request: Request) -> types_pb2.Error | None:
        return None

    def refuse(self, request: Request) -> types_pb2.Error | None:
        return None

    def begin(self, run: Run) -> None:
        self.runs.append(run)

    def abort(self, run: Run) -> None:
        self.aborted.append(run)

    def kv(self) -> KvState:
        return self.state

    def kill(self) -> None:
        self.killed += 1

    async def close(self) -> None:
        self.closed += 1

    # What the engine says.

    def say(self, run: Run, *ids: int, cached: int = 0, end: types_pb2.Outcome | None = None) -> None:
        if ids:
            self.inbox.tokens(run, list(ids), None, cached)
        if end is not None:
            self.inbox.ended(run, end)
        self.inbox.stepped(len(self.runs))


class Desk:
    """An engine and what it has told."""

    def __init__(self, **options: Any) -> None:
        self.driver = Scripted()
        self.now = 100.0
        settings = {"slots": 2, "max_waiting": 8, "stall_timeout_s": 1e6} | options
        self.engine = SelfBatched(self.driver, **({"clock": lambda: self.now} | settings))
        self.deltas: list[Delta] = []
        self.results: list[StepResult] = []
        self.failures: list[str] = []

    async def start(self) -> Desk:
        await self.engine.start(self._on_step, self.failures.append)
        return self

    def _on_step(self, result: StepResult) -> None:
        self.results.append(result)
        self.deltas += result.deltas

    def submit(self, key: int, *, n: int = 1, max_tokens: int = 5, **more: Any) -> types_pb2.Error | None:
        stopping = Stopping(max_tokens, eos_ids=frozenset({EOS}))
        sampling = Sampling(seeds=tuple(range(10, 10 + n)))
        return self.engine.submit(
            Request(**({"key": key, "prompt_ids": [1, 2, 3]} | more), stopping=stopping, sampling=sampling)
        )

    def ids(self, key: int, choice: int = 0) -> list[int]:
        found: list[int] = []
        for delta in self.deltas:
            if (delta.key, delta.choice) == (key, choice):
                assert delta.first_index == len(found)
                found += delta.ids
        return found

    def ends(self) -> dict[tuple[int, int], int]:
        found: dict[tuple[int, int], int] = {}
        for delta in self.deltas:
            if delta.finish is not None:
                assert (delta.key, delta.choice) not in found, "two ends"
                found[delta.key, delta.choice] = delta.finish.outcome
        return found

    async def settle(self) -> None:
        """What goes out by itself has gone."""
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = await Desk().start()
    yield made
    await made.engine.stop()


async def test_turns_go_by_when_first_ids_are_due_and_at_most_so_many_run(desk: Desk) -> None:
    for key, due_s in ((1, 60.0), (2, 60.0), (3, 60.0), (4, 1.0)):
        desk.submit(key, due_s=due_s)
    assert [run.request.key for run in desk.driver.runs] == [1, 2]
    load = desk.engine.load()
    assert (load.running_requests, load.waiting_requests, load.slots) == (2, 2, 2)
    assert (load.kv_blocks_used, load.kv_blocks_cached, load.kv_blocks_total) == (3, 4, 50)
    desk.driver.say(desk.driver.runs[0], 5, EOS, end=STOP)
    assert [run.request.key for run in desk.driver.runs] == [1, 2, 4]
    desk.engine.set_limits(StepLimits(slots=3))
    assert [run.request.key for run in desk.driver.runs] == [1, 2, 4, 3]


async def test_batch_work_waits_for_others_until_it_is_overdue_and_then_one_at_a_time(desk: Desk) -> None:
    batch = types_pb2.REQUEST_CLASS_BATCH
    for key in (1, 2, 3, 4):
        desk.submit(key, due_s=desk.now + 60, request_class=batch)
    desk.submit(5, due_s=desk.now + 90)
    for place in range(2):
        desk.driver.say(desk.driver.runs[place], EOS, end=STOP)
    assert [run.request.key for run in desk.driver.runs] == [1, 2, 5, 3]
    desk.submit(8, due_s=desk.now + 60, request_class=batch)
    desk.now += 100
    for key in (6, 7):
        desk.submit(key, due_s=desk.now + 2)
    for place in range(2, 6):
        desk.driver.say(desk.driver.runs[place], EOS, end=STOP)
    # Of 4 and 8, which are both overdue, 8 stays when 4 has gone.
    assert [run.request.key for run in desk.driver.runs] == [1, 2, 5, 3, 4, 6, 8, 7]


async def test_a_full_queue_and_a_long_prompt_are_refused_with_numbers(desk: Desk) -> None:
    refusals = [desk.submit(key) for key in range(1, 14)]
    assert refusals[:12] == [None] * 12
    assert refusals[12] is not None
    assert (refusals[12].code, refusals[12].retryable) == (types_pb2.ERROR_CODE_OVERLOADED, True)
    other = await Desk().start()
    other.submit(1, prompt_ids=[1] * 40, n=2)
    await other.settle()
    assert other.ends() == {(1, 0): REJECTED, (1, 1): REJECTED}
    assert other.deltas[0].finish is not None
    assert other.deltas[0].finish.error is not None
    assert "40 tokens and the context holds 40" in other.deltas[0].finish.error.message
    await other.engine.stop()


async def test_choices_follow_the_first_which_computes_the_prompt(desk: Desk) -> None:
    desk.submit(1, n=2)
    (first,) = desk.driver.runs
    assert (first.seed, first.prompt_ids) == (10, [1, 2, 3])
    desk.driver.say(first, 5, cached=2)
    second = desk.driver.runs[1]
    assert second.seed == 11
    desk.driver.say(second, 6, 7, cached=3)
    desk.driver.say(first, EOS, end=STOP)
    desk.driver.say(second, 8, end=LENGTH)
    assert (desk.ids(1, 0), desk.ids(1, 1)) == ([5, EOS], [6, 7, 8])
    # Only the first way through the prompt is told.
    assert [delta.cached_prompt_tokens for delta in desk.deltas if delta.cached_prompt_tokens is not None] == [2]
    last = desk.deltas[-1].finish
    assert last is not None
    assert (last.prompt_tokens, last.cached_prompt_tokens, last.completion_tokens) == (3, 2, 5)
    assert desk.engine.load().completion_tokens_total == 5


async def test_when_the_first_choice_goes_the_next_takes_its_place(desk: Desk) -> None:
    desk.submit(1, n=3)
    desk.engine.cancel(1, 0, CANCELLED)
    desk.driver.inbox.ended(desk.driver.runs[0], CANCELLED)
    desk.driver.inbox.stepped(1)
    assert [run.sequence.choice for run in desk.driver.runs] == [0, 1]
    desk.driver.say(desk.driver.runs[1], end=FAILED)
    assert [run.sequence.choice for run in desk.driver.runs] == [0, 1, 2]
    desk.driver.say(desk.driver.runs[2], EOS, end=STOP)
    assert desk.ends() == {(1, 0): CANCELLED, (1, 1): FAILED, (1, 2): STOP}


async def test_an_end_that_was_decided_here_stands_and_what_comes_after_is_nobodys(desk: Desk) -> None:
    desk.submit(1)
    (run,) = desk.driver.runs
    desk.driver.say(run, 5)
    desk.engine.cancel(1, None, DEADLINE)
    desk.engine.cancel(1, None, CANCELLED)
    assert desk.driver.aborted == [run]
    assert desk.ends() == {}
    desk.driver.say(run, 6)
    desk.driver.say(run, 7, end=LENGTH)
    desk.driver.say(run, 8, end=STOP)
    assert (desk.ids(1), desk.ends()) == ([5], {(1, 0): DEADLINE})
    desk.engine.cancel(1, None, CANCELLED)
    await desk.settle()
    assert desk.ends() == {(1, 0): DEADLINE}


async def test_what_waits_is_cancelled_at_once(desk: Desk) -> None:
    for key in (1, 2, 3):
        desk.submit(key)
    desk.engine.cancel(3, None, CANCELLED)
    await desk.settle()
    assert desk.ends() == {(3, 0): CANCELLED}
    assert desk.engine.load().waiting_requests == 0


async def test_an_engine_that_does_not_stop_is_not_waited_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfbatched, "ABORT_TIMEOUT_S", 0.0)
    desk.submit(1)
    desk.engine.cancel(1, None, CANCELLED)
    await until(lambda: bool(desk.ends()))
    assert desk.ends() == {(1, 0): CANCELLED}
    # Its place is free; what still comes of it harms nobody.
    desk.driver.say(desk.driver.runs[0], 5, end=STOP)
    assert desk.engine.load().running_requests == 0


async def test_a_deadline_that_is_past_runs_nothing(desk: Desk) -> None:
    desk.submit(1, deadline_s=desk.now - 1)
    await desk.settle()
    assert desk.ends() == {(1, 0): DEADLINE}
    assert desk.driver.runs == []


async def test_both_ends_at_once_are_a_stop(desk: Desk) -> None:
    desk.submit(1, max_tokens=2)
    desk.driver.say(desk.driver.runs[0], 5, EOS, end=LENGTH)
    assert desk.ends() == {(1, 0): STOP}


async def test_put_aside_and_gone_on_with(desk: Desk) -> None:
    desk.submit(1)
    (run,) = desk.driver.runs
    desk.driver.say(run, 5, 6)
    desk.engine.put_aside(1)
    assert desk.driver.aborted == [run]
    # One more was under way.
    desk.driver.say(run, 7, end=CANCELLED)
    assert desk.engine.load().running_requests == 0
    desk.engine.go_on(1)
    again = desk.driver.runs[1]
    assert (again.prompt_ids, again.max_tokens, again.own_prompt_tokens) == ([1, 2, 3, 5, 6, 7], 2, 3)
    desk.driver.say(again, 8, EOS, end=STOP)
    assert (desk.ids(1), desk.ends()) == ([5, 6, 7, 8, EOS], {(1, 0): STOP})


async def test_who_goes_on_before_the_engine_has_stopped_begins_again_then(desk: Desk) -> None:
    desk.submit(1)
    (run,) = desk.driver.runs
    desk.driver.say(run, 5)
    desk.engine.put_aside(1)
    desk.engine.go_on(1)
    assert len(desk.driver.runs) == 1
    desk.driver.say(run, end=CANCELLED)
    assert desk.driver.runs[1].prompt_ids == [1, 2, 3, 5]


async def test_a_guided_request_is_not_put_aside(desk: Desk) -> None:
    desk.submit(1, guided=Guided("regex", "a*"))
    desk.engine.put_aside(1)
    assert desk.driver.aborted == []


async def test_put_aside_with_nothing_left_to_say_is_an_end(desk: Desk) -> None:
    desk.submit(1, max_tokens=2)
    (run,) = desk.driver.runs
    desk.engine.put_aside(1)
    desk.driver.say(run, 5, 6, end=CANCELLED)
    assert desk.ends() == {(1, 0): LENGTH}


async def test_costs_carry_the_context_and_the_counts_are_of_now(desk: Desk) -> None:
    desk.submit(1)
    desk.submit(2)
    desk.driver.say(desk.driver.runs[0], 5, 6)
    desk.driver.inbox.stepped(7, StepCost(0, 1, 0, 0.01))
    cost = desk.results[-1].cost
    assert cost is not None
    assert cost.context_tokens == 5
    load = desk.engine.load()
    assert (load.iteration, load.context_tokens, load.running_prompt_tokens) == (7, 5, 3)


async def test_a_silent_engine_is_killed_and_a_quiet_one_asked() -> None:
    silent = await Desk(stall_timeout_s=0.4).start()
    silent.submit(1)
    silent.now += 0.3
    assert silent.engine.step_age_s() == pytest.approx(0.3)
    silent.now += 0.2
    await until(lambda: bool(silent.failures))
    assert silent.driver.killed == 1
    assert silent.failures == ["no sign of life for 0.5 s (limit 0.4 s)"]
    assert silent.submit(2) is not None
    await silent.engine.stop()
    quiet = await Desk(canary_s=5.0).start()
    quiet.now += 6.0
    await until(lambda: bool(quiet.driver.runs))
    (canary,) = quiet.driver.runs
    assert quiet.engine.load().running_requests == 0
    assert (len(canary.prompt_ids), canary.max_tokens) == (1, 1)
    quiet.driver.say(canary, 5, end=LENGTH)
    assert quiet.deltas == []
    await quiet.engine.stop()


async def test_a_failure_is_told_once_and_a_failed_start_closes() -> None:
    desk = await Desk().start()
    desk.driver.inbox.failed("it broke")
    desk.driver.inbox.failed("again")
    assert desk.failures == ["it broke"]
    await desk.engine.stop()
    broken = Desk()
    broken.driver.opening = EngineError("no")
    with pytest.raises(EngineError):
        await broken.start()
    assert broken.driver.closed == 1


async def test_any_interleaving_ends_each_choice_once() -> None:
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    desk = await Desk(slots=3).start()
    asked: dict[int, int] = {}
    live: list[Run] = []
    for _ in range(3000):
        live += [run for run in desk.driver.runs if run not in live]
        what = dice.random()
        key = dice.choice(list(asked)) if asked else 0
        if what < 0.1:
            number, n = len(asked) + 1, dice.choice([1, 1, 2, 3])
            if desk.submit(number, n=n, due_s=dice.choice([1.0, 60.0])) is None:
                asked[number] = n
        elif what < 0.15:
            desk.engine.cancel(key, dice.choice([None, 0, 1]), CANCELLED)
        elif what < 0.2:
            desk.engine.put_aside(key)
        elif what < 0.27:
            desk.engine.go_on(key)
        elif running := [run for run in live if run.sequence.run is run]:
            run = dice.choice(running)
            if run in desk.driver.aborted and dice.random() < 0.5:
                desk.driver.say(run, end=CANCELLED)
            else:
                left = run.max_tokens - (len(run.sequence.ids) - (len(run.prompt_ids) - 3))
                end = STOP if dice.random() < 0.2 else LENGTH if left <= 1 else None
                desk.driver.say(run, EOS if end == STOP else dice.randrange(5), end=end)
        if dice.random() < 0.1:
            await asyncio.sleep(0)
        assert desk.engine.load().running_requests <= 3, f"seed {seed}"
    for key in asked:
        desk.engine.go_on(key)
        desk.engine.cancel(key, None, CANCELLED)
    while running := [run for run in desk.driver.runs if run.sequence.run is run]:
        desk.driver.say(running[0], end=CANCELLED)
    await desk.settle()
    assert set(desk.ends()) == {(key, choice) for key, n in asked.items() for choice in range(n)}, f"seed {seed}"
    for key, n in asked.items():
        for choice in range(n):
            assert len(desk.ids(key, choice)) <= 5, f"seed {seed}"
    assert desk.engine.load().running_requests == desk.engine.load().waiting_requests == 0
    await desk.engine.stop()


async def test_a_run_that_the_engine_has_lost_fails_while_others_go_on() -> None:
    desk = await Desk(stall_timeout_s=5.0).start()
    desk.submit(1)
    desk.submit(2)
    lost, other = desk.driver.runs
    desk.driver.say(lost, 5)
    desk.driver.say(other, 5)
    desk.now += 4.0
    desk.driver.say(other, 6)
    desk.now += 4.0
    desk.driver.say(other, 7)
    await until(lambda: desk.driver.aborted == [lost])
    desk.driver.say(lost, end=CANCELLED)
    desk.driver.say(other, EOS, end=STOP)
    assert desk.ends() == {(1, 0): FAILED, (2, 0): STOP}
    failed = next(delta.finish for delta in desk.deltas if delta.key == 1 and delta.finish is not None)
    assert failed.error is not None
    assert failed.error.retryable
    assert "nothing of it for 5 s, while others went on" in failed.error.message
    assert desk.failures == []
    await desk.engine.stop()


async def test_an_engine_that_stops_what_nobody_cancelled_has_failed_it(desk: Desk) -> None:
    desk.submit(1)
    desk.driver.say(desk.driver.runs[0], 5, end=CANCELLED)
    assert desk.ends() == {(1, 0): FAILED}


async def test_time_put_aside_is_no_silence() -> None:
    desk = await Desk(stall_timeout_s=5.0).start()
    desk.submit(1)
    desk.submit(2)
    aside, other = desk.driver.runs
    desk.driver.say(aside, 5)
    desk.driver.say(other, 5)
    desk.engine.put_aside(1)
    desk.driver.say(aside, end=CANCELLED)
    for token in (6, 7, 8):
        desk.now += 4.0
        desk.driver.say(other, token)
    desk.engine.go_on(1)
    desk.driver.say(other, EOS, end=STOP)
    desk.engine._end_lost()
    assert desk.driver.aborted == [aside]
    desk.driver.say(desk.driver.runs[2], EOS, end=STOP)
    assert desk.ends() == {(1, 0): STOP, (2, 0): STOP}
    await desk.engine.stop()
