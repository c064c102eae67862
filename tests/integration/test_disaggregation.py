"""Prompts computed on one worker and answered on another: what the client sees, and what becomes of it when one of them
dies.

The workers are scripted, so that each can be stopped at any point; no KV moves between them (``tests/contract`` has
that, and ``test_disaggregation_real.py``). Each test ends with the proof that nothing is held anywhere, of either
worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from headrace.v1 import types_pb2, worker_pb2
from tests.conftest import CALL_FAILED
from tests.support.clients import MODES, STREAMED
from tests.support.mesh import Lab, Mesh
from tests.support.scripted import Entry, ScriptedWorker
from tests.support.toy import EOS, ToyModel
from tests.support.waiting import eventually

STALL_S = 0.8
PROMPT = "a prompt that is long enough"
PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
STREAM = STREAMED[0]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    mesh = Mesh(
        tmp_path_factory.mktemp("apart"),
        [ToyModel("toy")],
        router={"stall_timeout_s": STALL_S},
        scheduler={"disaggregation": "always", "disaggregation_min_tokens": 20},
    ).start()
    yield mesh
    mesh.stop()


@pytest.fixture
async def lab(mesh: Mesh, request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    lab = Lab(mesh)
    yield lab
    await lab.close(check=not request.node.stash.get(CALL_FAILED, False))


async def pair(lab: Lab) -> tuple[ScriptedWorker, ScriptedWorker]:
    """One that computes prompts, one that answers."""
    return await lab.worker(slots=4, role=PREFILL), await lab.worker(slots=4, role=DECODE)


async def half(lab: Lab, which: str, index: int = 0) -> Entry:
    async def found() -> Entry | None:
        halves = [entry for entry in lab.journal if entry.half == which]
        return halves[index] if len(halves) > index else None

    entry = await eventually(found, f"the half that is to {which}")
    assert entry is not None
    return entry


async def proceeded(entry: Entry) -> list[int]:
    assert entry.proceeded is not None
    async with asyncio.timeout(10):
        return await asyncio.shield(entry.proceeded)


@pytest.mark.parametrize("mode", MODES)
async def test_two_workers_make_one_answer(lab: Lab, mode: str) -> None:
    one, other = await pair(lab)
    lab.bench.play_half("produce", "'a'; END:length")
    lab.bench.play_half("fetch", "'bc'; 'd'; END")
    answer = await lab.ask(PROMPT, mode=mode)
    assert answer.text == "abcd"
    produce, fetch = await half(lab, "produce"), await half(lab, "fetch")
    assert (produce.worker, fetch.worker) == (one, other)
    assert await proceeded(fetch) == [97]
    # It is asked where and by what the other one was told to keep it.
    asked = fetch.submit.handoff.fetch
    assert (asked.worker_address, asked.kv_state_tag) == (one.address, "scripted")
    assert asked.reference == produce.submit.handoff.produce.reference
    assert len(asked.reference) == 32
    assert produce.prompt_ids == fetch.prompt_ids
    assert (produce.submit.epoch, fetch.submit.epoch) == (1, 1)
    assert produce.submit.lease != fetch.submit.lease
    assert len(await lab.released(2)) == 2
    metrics = await lab.metrics()
    assert metrics["headrace_router_usage_mismatches_total"] == 0


@pytest.mark.parametrize("mode", STREAMED)
async def test_the_first_token_does_not_wait_for_the_second_worker(lab: Lab, mode: str) -> None:
    await pair(lab)
    lab.bench.play_half("produce", "'a'; END:length")
    lab.bench.play_half("fetch", "'b'; END", gated=True)
    answer = await lab.open(PROMPT, mode=mode)
    assert await answer.piece() == "a"
    fetch = await half(lab, "fetch")
    # The lease of the prompt is over by then.
    assert [release.lease for release in await lab.released(1)] == [(await half(lab, "produce")).submit.lease]
    fetch.release(2)
    assert (await answer.rest()).text == "ab"


@pytest.mark.parametrize("script", ["DIE", "ERR:OVERLOADED", "ERR:INTERNAL", "HANG"])
async def test_a_prompt_that_comes_to_nothing_is_computed_where_it_is_answered(lab: Lab, script: str) -> None:
    await pair(lab)
    before = (await lab.metrics())["headrace_router_handoffs_lost_total"]
    lab.bench.play_half("produce", script)
    lab.bench.play_half("fetch", "'abcd'; END")
    answer = await lab.ask(PROMPT, mode=STREAM)
    assert answer.text == "abcd"
    fetch = await half(lab, "fetch")
    assert await proceeded(fetch) == []
    assert fetch.submit.epoch == 1
    assert len(lab.journal) == 2
    assert (await lab.metrics())["headrace_router_handoffs_lost_total"] == before + 1


async def test_the_prompts_worker_dies_before_its_first_token(lab: Lab) -> None:
    one, _ = await pair(lab)
    lab.bench.play_half("produce", "'a'; END:length", gated=True)
    lab.bench.play_half("fetch", "'abcd'; END")
    answer = await lab.open(PROMPT, mode=STREAM)
    await half(lab, "produce")
    await one.crash()
    assert (await answer.rest()).text == "abcd"


async def test_the_prompts_worker_dies_after_its_first_token(lab: Lab) -> None:
    one, _ = await pair(lab)
    lab.bench.play_half("produce", "'a'; DIE")
    lab.bench.play_half("fetch", "'bcd'; END", gated=True)
    answer = await lab.open(PROMPT, mode=STREAM)
    assert await answer.piece() == "a"
    fetch = await half(lab, "fetch")
    # Whether the KV still comes is between the two of them.
    assert await proceeded(fetch) == [97]
    await one.crash()
    fetch.release(2)
    assert (await answer.rest()).text == "abcd"


async def test_the_answers_worker_dies_before_the_first_token(lab: Lab) -> None:
    _, other = await pair(lab)
    lab.bench.play_half("produce", "'a'; END:length", gated=True)
    answer = await lab.open(PROMPT, mode=STREAM)
    produce = await half(lab, "produce")
    await half(lab, "fetch")
    await lab.worker(slots=4, role=DECODE)
    lab.play("'abcd'; END")
    await other.crash()
    assert (await answer.rest()).text == "abcd"
    # A second attempt keeps to one worker.
    last = lab.journal[-1]
    assert (last.half, last.submit.epoch, last.submit.resumed_tokens) == ("", 2, 0)
    await produce.ended()
    assert produce.cancelled


@pytest.mark.parametrize("said", ["", "bc"])
async def test_the_answers_worker_dies_after_the_first_token(lab: Lab, said: str) -> None:
    _, other = await pair(lab)
    lab.bench.play_half("produce", "'a'; END:length")
    lab.bench.play_half("fetch", f"'{said or 'x'}'; HANG", gated=True)
    answer = await lab.open(PROMPT, mode=STREAM)
    assert await answer.piece() == "a"
    fetch = await half(lab, "fetch")
    assert await proceeded(fetch) == [97]
    if said:
        fetch.release()
        assert await answer.piece() == said
    await lab.worker(slots=4, role=DECODE)
    lab.play("'bcd'; END" if not said else "'d'; END")
    await other.crash()
    assert (await answer.rest()).text == "abcd"
    last = lab.journal[-1]
    assert (last.half, last.submit.epoch, last.submit.resumed_tokens) == ("", 2, 1 + len(said))
    assert last.prompt == PROMPT + "a" + said


async def test_whoever_is_left_serves_all(lab: Lab) -> None:
    """With nobody left to answer, the one that is for prompts does it all."""
    one, other = await pair(lab)
    lab.bench.play_half("produce", "'a'; END:length")
    lab.bench.play_half("fetch", "'b'; HANG")
    answer = await lab.open(PROMPT, mode=STREAM)
    assert await answer.piece() == "a"
    lab.play("'cd'; END")
    await half(lab, "fetch")
    await eventually(lambda: _said(lab, "fetch"), "the answer has gone on")
    await other.crash()
    assert (await answer.rest()).text == "abcd"
    assert lab.journal[-1].worker is one


async def _said(lab: Lab, which: str) -> bool:
    return bool((await half(lab, which)).sent)


@pytest.mark.parametrize("after_the_first", [False, True])
async def test_a_client_that_leaves_frees_both(lab: Lab, after_the_first: bool) -> None:
    await pair(lab)
    lab.bench.play_half("produce", "'a'; END:length" if after_the_first else "HANG")
    lab.bench.play_half("fetch", "HANG")
    answer = await lab.open(PROMPT, mode=STREAM)
    fetch = await half(lab, "fetch")
    if after_the_first:
        assert await answer.piece() == "a"
    answer.leave()
    await fetch.ended()
    assert fetch.cancelled
    assert len(await lab.released(2)) == 2


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_of_one_token_ends_with_it(lab: Lab, mode: str) -> None:
    await pair(lab)
    turns = (
        (f"[{EOS}]; END", {}, ""),
        ("'a'; END:length", {"max_tokens": 1}, "a"),
        ("'a'; END:length", {"stop": "a"}, ""),
    )
    for turn, (script, params, text) in enumerate(turns):
        lab.bench.play_half("produce", script)
        lab.bench.play_half("fetch", "HANG")
        # What begins like another is not computed again.
        answer = await lab.ask(f"{turn} {PROMPT}", params, mode=mode)
        assert answer.text == text
        fetch = await half(lab, "fetch", turn)
        await fetch.ended()
        assert fetch.choices[0].cancel_reason == types_pb2.OUTCOME_STOP


async def test_what_must_be_whole_or_is_short_is_not_parted(lab: Lab) -> None:
    _, other = await pair(lab)
    for text, params in (
        ("short", {}),
        (PROMPT, {"n": 2}),
        (PROMPT, {"response_format": {"type": "json_object"}}),
    ):
        answer = await lab.ask(text, params, mode="plain")
        assert answer.status == 200
        assert (lab.journal[-1].half, lab.journal[-1].worker) == ("", other)


async def test_many_at_once_come_to_their_ends(lab: Lab) -> None:
    one, other = await pair(lab)
    for number in range(12):
        lab.bench.play_half("produce", ("'a'; END:length", "DIE" if number == 5 else "ERR:OVERLOADED")[number % 3 == 2])
        lab.bench.play_half("fetch", "'b'; +5; 'c'; END")
    answers = await asyncio.gather(*(lab.ask(f"{number:02} {PROMPT}", mode=STREAM) for number in range(12)))
    # Those whose prompt came to nothing have no 'a': the script of who answers has none.
    assert {answer.text for answer in answers} <= {"abc", "bc"}
    assert one.idle or one.journal
    assert other.journal
