"""Where an answer ends: decided on text and ids together, once, and nothing of the end is shown."""

from __future__ import annotations

import asyncio

import pytest

from headrace.v1 import types_pb2
from tests.support.clients import MODES, STREAMED
from tests.support.mesh import Lab
from tests.support.waiting import eventually

REPLACEMENT = "\ufffd"


@pytest.mark.parametrize("mode", STREAMED)
async def test_the_tail_that_may_be_a_stop_is_held_and_the_rest_is_not(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'done'; '\\n'; 'E'; 'N'; 'D'; 'x'; HANG", gated=True)
    answer = await lab.open("go", {"stop": ["\nEND"]}, mode=mode)
    entry = await lab.entry()
    entry.release()
    assert await answer.piece() == "done"
    entry.release(4)
    whole = (await answer.rest()).succeeded()
    assert (whole.text, whole.finish, whole.completion_tokens) == ("done", "stop", 8)
    assert not any("\n" in piece for _, piece in whole.pieces)
    await entry.ended()
    assert entry.choices[0].cancelled_s is not None
    assert entry.choices[0].cancel_reason == types_pb2.OUTCOME_STOP
    assert bytes(entry.sent) == b"done\nEND"


#: Stop strings, script, text, finish, completion tokens.
ENDS = {
    "found over steps": (["\nEND"], "'done'; '\\n'; 'E'; 'N'; 'D'; 'x'; HANG", "done", "stop", 8),
    "almost found": (["\nEND"], "'a'; '\\n'; 'E'; 'n'; 'd'; END", "a\nEnd", "stop", 5),
    "first in the text": (["zz", "mid"], "'x mid y zz'; HANG", "x ", "stop", 5),
    "first in the text, other order": (["mid", "zz"], "'x mid y zz'; HANG", "x ", "stop", 5),
    "two at once, the longer began first": (["bc", "abc"], "'a'; 'b'; 'c'; HANG", "", "stop", 3),
    "two at once, other order": (["abc", "bc"], "'a'; 'b'; 'c'; HANG", "", "stop", 3),
    "inside a character's bytes": (["é"], "'caf'; [195]; [169]; HANG", "caf", "stop", 5),
    "held to the worker's own end": (["END"], "'ab'; 'EN'; END", "abEN", "stop", 4),
    "held to the limit": (["END"], "'ab'; 'EN'; END:length", "abEN", "length", 4),
    "one string, not a list": ("zz", "'azzb'; HANG", "a", "stop", 3),
    "overlapping itself": (["aab"], "'a'; 'a'; 'a'; 'b'; HANG", "a", "stop", 4),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ENDS)
async def test_stop_strings(lab: Lab, mode: str, case: str) -> None:
    stop, script, text, finish, tokens = ENDS[case]
    await lab.worker()
    lab.play(script)
    answer = (await lab.ask("go", {"stop": stop}, mode=mode)).succeeded()
    assert (answer.text, answer.finish, answer.completion_tokens) == (text, finish, tokens)
    assert not any(REPLACEMENT in piece for _, piece in answer.pieces)
    # What streams showed on the way is a beginning of the answer at every moment: nothing was taken back.
    assert "".join(answer.deltas) == text
    await (await lab.entry()).ended()


@pytest.mark.parametrize("mode", MODES)
async def test_an_end_id_in_the_middle_of_a_step(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'abcd'; 'Q' [900] 'x' 'y'")
    answer = (await lab.ask("go", {"max_tokens": 6}, mode=mode)).succeeded()
    assert (answer.text, answer.finish, answer.completion_tokens) == ("abcdQ", "stop", 6)
    await (await lab.entry()).ended()


@pytest.mark.parametrize("mode", MODES)
async def test_every_end_id_of_the_model_ends_it(lab: Lab, mode: str) -> None:
    await lab.worker("toy-two-ends")
    lab.play("'hi'; [901]; 'zz'; HANG")
    answer = (await lab.ask("go", mode=mode)).succeeded()
    assert (answer.text, answer.finish, answer.completion_tokens) == ("hi", "stop", 3)
    entry = await lab.entry()
    assert sorted(entry.submit.stopping.eos_ids) == [900, 901]
    await entry.ended()


@pytest.mark.parametrize("mode", MODES)
async def test_the_limit_holds_even_when_the_worker_goes_on(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'abc'; 'defg'; HANG")
    answer = (await lab.ask("go", {"max_tokens": 5}, mode=mode)).succeeded()
    assert (answer.text, answer.finish, answer.completion_tokens) == ("abcde", "length", 5)
    await (await lab.entry()).ended()


@pytest.mark.parametrize("mode", MODES)
async def test_ignore_eos_goes_on(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'a'; [900]; 'b'; END:length")
    answer = (await lab.ask("go", {"ignore_eos": True, "max_tokens": 3}, mode=mode)).succeeded()
    assert (answer.text, answer.finish, answer.completion_tokens) == ("ab", "length", 3)


@pytest.mark.parametrize("mode", STREAMED)
async def test_a_held_tail_is_not_kept_for_the_next_request(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'a'; 'E'; 'N'; HANG", gated=True)
    answer = await lab.open("go", {"stop": ["END"]}, mode=mode)
    entry = await lab.entry()
    entry.release()
    assert await answer.piece() == "a"
    entry.release(2)

    async def held() -> bool:
        return bytes(entry.sent) == b"aEN"

    await eventually(held, "EN is sent")
    answer.leave()
    await entry.ended()
    lab.play("'D'; 'o'; END")
    assert (await lab.ask("go", {"stop": ["END"]}, mode=mode)).succeeded().text == "Do"


@pytest.mark.parametrize("mode", MODES)
async def test_each_choice_ends_by_itself(lab: Lab, mode: str) -> None:
    await lab.worker(slots=2)
    lab.play("'a'; 'END'; HANG", "'E'; 'Nope'; END")
    answer = (await lab.ask("go", {"n": 2, "stop": ["END"]}, mode=mode)).succeeded()
    assert (answer.text_of(0), answer.text_of(1)) == ("a", "ENope")
    assert answer.finishes == {0: "stop", 1: "stop"}


async def test_requests_side_by_side_hold_their_own_tails(lab: Lab) -> None:
    await lab.worker(slots=2)
    lab.bench.play_for("one", "'E'; 'N'; 'D'; HANG")
    lab.bench.play_for("two", "'N'; 'D'; 'E'; END")
    one, two = await asyncio.gather(*(lab.ask(text, {"stop": ["END"]}, mode="stream") for text in ("one", "two")))
    assert (one.succeeded().text, two.succeeded().text) == ("", "NDE")
