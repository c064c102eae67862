"""Trying again without saying it twice: only what was never shown, or what can truly go on, runs elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from headrace.v1 import types_pb2
from tests.conftest import CALL_FAILED
from tests.integration.conftest import MODELS
from tests.support.clients import MODES, STREAMED
from tests.support.mesh import Lab, Mesh
from tests.support.scripted import ScriptedWorker

OBJECT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def unresuming_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One whose router never goes on elsewhere."""
    mesh = Mesh(tmp_path_factory.mktemp("unresuming"), MODELS, router={"resume_attempts": 0}).start()
    yield mesh
    mesh.stop()


@pytest.fixture
async def unresuming(unresuming_mesh: Mesh, request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    lab = Lab(unresuming_mesh)
    yield lab
    await lab.close(check=not request.node.stash.get(CALL_FAILED, False))


async def two_workers(lab: Lab, slots: int = 1) -> tuple[ScriptedWorker, ScriptedWorker]:
    return await lab.worker(slots=slots), await lab.worker(slots=slots)


async def load_with_a_long_answer(lab: Lab) -> ScriptedWorker:
    """A worker with a request under way, so that an idle one is the better choice."""
    worker = await lab.worker(slots=2)
    lab.bench.play_for("long", "'l'; 'm'; END", gated=True)
    return worker


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["refused", "slammed"])
async def test_a_worker_that_cannot_be_reached(lab: Lab, mode: str, how: str) -> None:
    busy = await load_with_a_long_answer(lab)
    long = await lab.open("long", mode="stream")
    held = await lab.entry()
    held.release()
    assert await long.piece() == "l"
    gone = await lab.worker(slots=2)
    if how == "refused":
        await gone.door.shut()
    gone.door.slammed = True
    await gone.door.break_all(settle=False)
    tried = gone.door.accepted
    lab.play("'ok'; END")
    answer = (await lab.ask("1234567", mode=mode)).succeeded()
    assert (answer.text, answer.usage) == ("ok", (7, 2, 9))
    assert gone.journal == []
    assert [entry.worker for entry in lab.journal] == [busy, busy]
    if how == "slammed":
        assert gone.door.accepted >= tried
    # The worker that failed was not chosen again within this request.
    asks = [ask for ask in lab.books.asks.values() if ask.epoch > 1]
    assert all(gone.instance_id in ask.avoid_instances for ask in asks)
    held.release(2)
    (await long.rest()).succeeded()


@pytest.mark.parametrize("mode", STREAMED)
async def test_without_resuming_a_begun_answer_ends_with_its_worker(unresuming: Lab, mode: str) -> None:
    await two_workers(unresuming)
    unresuming.play("'ab'; DIE")
    answer = await unresuming.ask("1234567", mode=mode)
    answer.broken("worker_lost")
    assert answer.text == "ab"
    assert len(unresuming.journal) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_goes_on_elsewhere_with_its_whole_state(lab: Lab, mode: str) -> None:
    await two_workers(lab)
    lab.play("'ab'; DIE")
    lab.play("'cdefghij'; END:length")
    params = {"max_tokens": 10, "min_tokens": 5, "seed": 3}
    answer = await lab.ask("1234567", params, mode=mode, headers={"x-headrace-deadline-ms": "20000"})
    answer.succeeded()
    assert (answer.text, answer.finish, answer.usage) == ("abcdefghij", "length", (7, 10, 17))
    first, second = lab.journal
    assert first.worker is not second.worker
    assert bytes(second.prompt_ids) == b"1234567ab"
    assert (second.submit.stopping.max_tokens, second.submit.stopping.min_tokens) == (8, 3)
    assert first.seeds == second.seeds == [3]
    assert second.submit.resumed_tokens == 2
    assert second.submit.epoch == first.submit.epoch + 1
    assert first.submit.lease != second.submit.lease
    assert second.time_left_ms is not None
    assert first.time_left_ms is not None
    # gRPC clients round what they send up, by less than a hundredth.
    assert second.time_left_ms <= first.time_left_ms <= 20_200
    if mode == "stream":
        deltas = [event["choices"][0] for event in answer.events if event and event["choices"]]
        assert sum("role" in choice["delta"] for choice in deltas) == 1
        assert sum(choice["finish_reason"] is not None for choice in deltas) == 1
    await lab.nothing_remains()
    assert len(lab.books.released) == 2


async def test_a_resumed_answer_has_had_its_first_token(lab: Lab) -> None:
    await two_workers(lab)
    lab.play("'ab'; DIE")
    lab.play("'cd'; END")
    params = {"ttft_target_ms": 60_000, "tpot_target_ms": 50}
    assert (await lab.ask("1234567", params, mode="grpc")).succeeded().text == "abcd"
    first, second = sorted(lab.books.asks.values(), key=lambda ask: ask.epoch)
    assert (first.ttft_target_ms, first.tpot_target_ms) == (60_000, 50)
    assert not second.HasField("ttft_target_ms")
    assert second.tpot_target_ms == 50


@pytest.mark.parametrize("mode", MODES)
async def test_a_character_and_a_held_stop_survive_the_move(lab: Lab, mode: str) -> None:
    await two_workers(lab)
    lab.play("'x' [240 159]; DIE")
    lab.play("[153 130]; 'E'; 'ND'; HANG")
    answer = (await lab.ask("go", {"stop": ["END"]}, mode=mode)).succeeded()
    assert (answer.text, answer.completion_tokens) == ("x🙂", 8)
    assert lab.journal[1].prompt_ids == [*b"gox", 240, 159]


@pytest.mark.parametrize("mode", STREAMED)
@pytest.mark.parametrize("what", ["schema", "two choices", "a held tail"])
async def test_what_cannot_be_carried_is_not_resumed_by_halves(lab: Lab, mode: str, what: str) -> None:
    """Either an error, or the whole state: every choice, the held text, the grammar's position."""
    await two_workers(lab, slots=2)
    params, first, rest, text = {
        "schema": ({"response_format": OBJECT}, "'{'; DIE", "'}'; END", "{}"),
        "two choices": ({"n": 2}, "'ab'; DIE", "'cd'; END", "abcd"),
        "a held tail": ({"stop": ["END"]}, "'aE'; DIE", "'ND'; HANG", "a"),
    }[what]
    lab.play(first)
    lab.play(rest)
    answer = await lab.ask("go", params, mode=mode)
    if answer.failure is not None:
        answer.broken("worker_lost")
        assert text.startswith(answer.text)
        return
    answer.succeeded()
    assert answer.text == text
    assert lab.journal[1].submit.resumed_tokens > 0


ERRORS = {"INVALID_ARGUMENT": 400, "RESOURCE_EXHAUSTED": 413, "UNSUPPORTED": 400, "INTERNAL": 500}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", ERRORS)
async def test_what_can_never_succeed_is_not_tried_again(lab: Lab, mode: str, code: str) -> None:
    await two_workers(lab)
    lab.play(f"ERR:{code}")
    (await lab.ask("go", mode=mode)).refused(ERRORS[code])
    assert len(lab.journal) == 1
    # No mark against the worker: both are still there for the next two.
    assert await lab.ready_workers("toy") == 2
    for _ in range(2):
        (await lab.ask("go", mode=mode)).succeeded()


@pytest.mark.parametrize("mode", MODES)
async def test_a_refusal_before_any_work_runs_elsewhere(lab: Lab, mode: str) -> None:
    await two_workers(lab)
    lab.play("ERR:UNAVAILABLE")
    lab.play("'ok'; END")
    answer = (await lab.ask("1234567", mode=mode)).succeeded()
    assert (answer.text, answer.usage) == ("ok", (7, 2, 9))
    first, second = lab.journal
    assert first.worker is not second.worker
    assert (first.submit.epoch, second.submit.epoch) == (1, 2)
    assert first.seeds == second.seeds


async def test_a_plain_answer_is_one_answer(lab: Lab) -> None:
    """Nothing was shown, so it may be run again or go on; usage counts only what was delivered."""
    await two_workers(lab)
    wasted = 'headrace_router_tokens_total{model="toy",kind="wasted"}'
    before = (await lab.metrics()).get(wasted, 0)
    lab.play("'abcde'; DIE")
    lab.play("'xyz'; END")
    answer = (await lab.ask("1234567", mode="plain")).succeeded()
    assert answer.text in ("xyz", "abcdexyz")
    assert answer.usage is not None
    assert answer.usage[1] == len(answer.text)
    if answer.text == "xyz":
        assert (await lab.metrics()).get(wasted, 0) == before + 5


@pytest.mark.parametrize("mode", MODES)
async def test_attempts_are_bounded(lab: Lab, mode: str) -> None:
    for _ in range(4):
        await lab.worker()
    for _ in range(10):
        lab.play("ERR:UNAVAILABLE")
    (await lab.ask("go", mode=mode)).refused(503)
    assert len(lab.journal) == 3  # router.place_attempts
    assert len({entry.worker.worker_id for entry in lab.journal}) == 3
    await lab.nothing_remains()
    lab.bench.clear()


@pytest.mark.parametrize("mode", MODES)
async def test_each_attempt_has_an_id_and_the_old_one_is_over(lab: Lab, mode: str) -> None:
    await two_workers(lab)
    lab.play("'ab'; DIE")
    lab.play("'c'; END")
    await lab.ask("go", mode=mode)
    first, second = lab.journal
    assert first.choices[0].ended.is_set()
    assert (first.submit.epoch, second.submit.epoch) == (1, 2)
    assert first.submit.request_id == second.submit.request_id
    await lab.nothing_remains()
    outcomes = [release.outcome for release in lab.books.released]
    assert outcomes == [types_pb2.OUTCOME_WORKER_LOST, types_pb2.OUTCOME_STOP]


async def test_a_whole_worker_that_crashes(lab: Lab) -> None:
    """Membership, port and connections go together; what it ran goes on elsewhere."""
    first = await lab.worker(slots=4)
    for number in range(4):
        lab.bench.play_for(f"p{number}", "'ab'; HANG")
    asked = [asyncio.create_task(lab.ask(f"p{number}", mode="stream")) for number in range(4)]
    for number in range(4):
        await lab.entry(number)
    second = await lab.worker(slots=4)
    for number in range(4):
        lab.bench.play_for(f"p{number}ab", "'cd'; END")
    await first.crash()
    answers = await asyncio.gather(*asked)
    # Of those of which nothing had arrived yet, the start is run again.
    assert {answer.succeeded().text for answer in answers} <= {"abcd", "ok"}
    assert len(second.journal) == 4
