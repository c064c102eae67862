"""The legacy interface, and parameters that both HTTP doors share with the native one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.clients import HTTP_MODES, MODES, Answer
from tests.support.mesh import Lab

LEGACY = "/v1/completions"


async def complete(lab: Lab, prompt: Any, params: dict[str, Any] | None = None, *, mode: str) -> Answer:
    return await lab.ask("", {"prompt": prompt} | (params or {}), mode=mode, path=LEGACY)


@pytest.mark.parametrize("mode", HTTP_MODES)
@pytest.mark.parametrize(
    "prompt", ["abc", [97, 98, 99], ["abc"], [[97, 98, 99]]], ids=["text", "ids", "texts", "lists"]
)
async def test_a_prompt_in_four_forms(lab: Lab, mode: str, prompt: Any) -> None:
    await lab.worker()
    lab.play("'ok'; END")
    answer = (await complete(lab, prompt, mode=mode)).succeeded()
    assert (answer.text, answer.usage) == ("ok", (3, 2, 5))
    assert lab.journal[0].prompt_ids == [97, 98, 99]


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_several_prompts_with_several_choices(lab: Lab, mode: str) -> None:
    await lab.worker(slots=4)
    lab.bench.play_for("a", "'a0'; END", "'a11'; END:length")
    lab.bench.play_for("bc", "'b000'; END", "'b1'; END")
    answer = (await complete(lab, ["a", "bc"], {"n": 2}, mode=mode)).succeeded()
    assert [answer.text_of(choice) for choice in range(4)] == ["a0", "a11", "b000", "b1"]
    assert answer.finishes == {0: "stop", 1: "length", 2: "stop", 3: "stop"}
    assert answer.usage == (3, 11, 14)


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_when_one_of_several_prompts_fails_all_do(lab: Lab, mode: str) -> None:
    await lab.worker(slots=4)
    lab.bench.play_for("a", "'a'; HANG")
    lab.bench.play_for("b", "'b'; ERR:INTERNAL")
    answer = await complete(lab, ["a", "b"], mode=mode)
    assert answer.failure is not None
    assert not answer.done
    for entry in lab.journal:
        await entry.ended()
    await lab.nothing_remains()
    assert len(lab.books.released) == 2


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_an_echo_comes_before_every_choice(lab: Lab, mode: str) -> None:
    await lab.worker(slots=2)
    lab.play("'x'; END", "'y'; END")
    answer = (await complete(lab, "ab", {"echo": True, "n": 2}, mode=mode)).succeeded()
    assert (answer.text_of(0), answer.text_of(1)) == ("abx", "aby")
    assert answer.usage == (2, 2, 4)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([], "prompt"), ("", "prompt"), (7, "prompt"), ([1, "a"], "prompt"), ([999999], "prompt"), ([[]], "prompt")],
)
@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_prompts_that_are_none(lab: Lab, mode: str, prompt: Any, param: str) -> None:
    await lab.worker()
    failure = (await complete(lab, prompt, mode=mode)).refused(400)
    assert (failure.param or "").startswith(param)
    assert lab.journal == []


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_the_stop_may_be_left_in(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'ab'; 'EN'; 'Dx'; HANG")
    answer = await lab.ask("go", {"stop": ["END"], "include_stop_str_in_output": True}, mode=mode)
    assert (answer.succeeded().text, answer.finish, answer.completion_tokens) == ("abEND", "stop", 5)
    await (await lab.entry()).ended()


@pytest.mark.parametrize("mode", MODES)
async def test_a_stop_id_ends_it(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'ab'; 'z'; 'c'; HANG")
    answer = (await lab.ask("go", {"stop_token_ids": [ord("z")]}, mode=mode)).succeeded()
    assert (answer.finish, answer.completion_tokens) == ("stop", 3)
    assert answer.text in ("ab", "abz")
    await (await lab.entry()).ended()


@pytest.mark.parametrize("mode", MODES)
async def test_nothing_ends_it_before_min_tokens(lab: Lab, mode: str) -> None:
    """An engine obeys too; if it does not, the answer still goes on."""
    await lab.worker()
    lab.play("'a'; [900]; 'b'; 'c'; [900]; 'd'; HANG")
    answer = (await lab.ask("go", {"min_tokens": 4}, mode=mode)).succeeded()
    assert (answer.text, answer.completion_tokens) == ("abc", 5)
    await (await lab.entry()).ended()


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_the_nearer_deadline_holds(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("HANG")
    headers = {"x-headrace-deadline-ms": "60000"}
    (await lab.ask("go", {"deadline_ms": 300}, mode=mode, headers=headers)).refused(504, code="deadline_exceeded")
    entry = await lab.entry()
    assert entry.time_left_ms is not None
    assert entry.time_left_ms <= 300


@pytest.mark.parametrize("mode", HTTP_MODES)
@pytest.mark.parametrize(("name", "number"), [("interactive", 1), ("standard", 2), ("batch", 3)])
async def test_the_class_reaches_worker_and_scheduler(lab: Lab, mode: str, name: str, number: int) -> None:
    await lab.worker()
    (await lab.ask("go", mode=mode, headers={"x-headrace-class": name})).succeeded()
    assert getattr(lab.journal[0].submit, "class") == number
    (ask,) = lab.books.asks.values()
    assert getattr(ask, "class") == number
    (await lab.ask("go", mode=mode, headers={"x-headrace-class": "first"})).refused(400)


async def test_what_the_scheduler_is_told(lab: Lab) -> None:
    await lab.worker(slots=2)
    params = {"max_tokens": 9, "n": 2}
    headers = {"x-headrace-session": "mine", "x-request-id": "my-id", "x-headrace-deadline-ms": "9000"}
    (await lab.ask("0123456789", params, mode="plain", headers=headers)).succeeded()
    (ask,) = lab.books.asks.values()
    assert (ask.request_id, ask.session_id, list(ask.pools)) == ("my-id", "mine", ["toy"])
    assert (ask.prompt_tokens, ask.max_tokens, ask.n, ask.epoch) == (10, 9, 2, 1)
    assert 0 < ask.time_left_ms <= 9000
    # Two full blocks of four.
    assert len(ask.block_hashes) == 2
    await lab.ask("01234567xx", params, mode="plain")
    other = list(lab.books.asks.values())[-1]
    assert list(other.block_hashes) == list(ask.block_hashes)
    await lab.ask("0123456x89", params, mode="plain")
    other = list(lab.books.asks.values())[-1]
    assert other.block_hashes[0] == ask.block_hashes[0]
    assert other.block_hashes[1] != ask.block_hashes[1]


@pytest.mark.parametrize("mode", MODES)
async def test_latency_targets_reach_the_scheduler(lab: Lab, mode: str) -> None:
    await lab.worker()
    if mode == "grpc":
        (await lab.ask("go", {"ttft_target_ms": 2500, "tpot_target_ms": 40}, mode=mode)).succeeded()
    else:
        headers = {"x-headrace-ttft-ms": "2500", "x-headrace-tpot-ms": "40.2"}
        (await lab.ask("go", mode=mode, headers=headers)).succeeded()
    (await lab.ask("go again", mode=mode)).succeeded()
    asked, silent = lab.books.asks.values()
    assert (asked.ttft_target_ms, asked.tpot_target_ms) == (2500, 40)
    # The class's own hold then.
    assert not silent.HasField("ttft_target_ms")
    assert not silent.HasField("tpot_target_ms")


async def test_the_same_request_id_twice_at_once(lab: Lab) -> None:
    """It is a name for people, and nothing hangs on it."""
    await lab.worker(slots=2)
    lab.bench.play_for("one", "'1'; END")
    lab.bench.play_for("two", "'2'; END")
    headers = {"x-request-id": "same"}
    answers = await asyncio.gather(*(lab.ask(text, mode="plain", headers=headers) for text in ("one", "two")))
    assert [answer.succeeded().text for answer in answers] == ["1", "2"]


@pytest.mark.parametrize("mode", MODES)
async def test_sixteen_choices(lab: Lab, mode: str) -> None:
    await lab.worker(slots=4)
    lab.play(*(f"'{number:x}'; 'x'; END" for number in range(16)))
    answer = (await lab.ask("go", {"n": 16}, mode=mode)).succeeded()
    assert [answer.text_of(number) for number in range(16)] == [f"{number:x}x" for number in range(16)]
    assert answer.usage == (2, 32, 34)
