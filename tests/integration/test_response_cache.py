"""The response cache answers only the same question, and every form of reply is made from the one stored answer.

Each test asks a text of its own, because the cache outlives a test. A hit leaves the journal at 1, a miss at 2.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from tests.support.clients import ABSENT, MODES, STREAMED
from tests.support.mesh import Lab
from tests.support.waiting import eventually

_texts = (f"cache {number}" for number in itertools.count())
#: What makes an answer the only one.
FIXED = {"temperature": 0}


async def stored(lab: Lab, answers: int) -> None:
    async def there() -> bool:
        return (await lab.cache_stats()).answers >= answers

    await eventually(there, f"{answers} answers are stored")


async def twice(
    lab: Lab,
    first: dict[str, Any],
    second: dict[str, Any],
    *,
    modes: tuple[str, str] = ("plain", "plain"),
    texts: tuple[str, str] | None = None,
    **how: Any,
) -> int:
    """Asks twice; returns how often a worker was asked."""
    text = next(_texts)
    before = (await lab.cache_stats()).answers
    one = (await lab.ask((texts or (text, text))[0], FIXED | first, mode=modes[0])).succeeded()
    assert not one.cached_answer
    await stored(lab, before + 1)
    two = (await lab.ask((texts or (text, text))[1], FIXED | second, mode=modes[1], **how)).succeeded()
    assert two.cached_answer == (len(lab.journal) == 1)
    return len(lab.journal)


TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "watch", "parameters": {"type": "object"}}}

#: What the second request changes, and what the first has.
CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_tokens": ({"max_tokens": 10}, {"max_tokens": 11}),
    "min_tokens": ({"min_tokens": 0}, {"min_tokens": 1}),
    "seed": ({"seed": 1}, {"seed": 2}),
    "stop": ({"stop": ["x"]}, {"stop": ["y"]}),
    "stop at all": ({}, {"stop": ["y"]}),
    "stop borders": ({"stop": ["ab", "c"]}, {"stop": ["a", "bc"]}),
    "stop ids": ({"stop_token_ids": [1]}, {"stop_token_ids": [2]}),
    "logit_bias": ({}, {"logit_bias": {"5": 1}}),
    "frequency_penalty": ({}, {"frequency_penalty": 0.5}),
    "response_format": ({}, {"response_format": {"type": "json_object"}}),
    "logprobs": ({}, {"logprobs": True}),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 1}, {"logprobs": True, "top_logprobs": 2}),
    "n": ({}, {"n": 2}),
    "ignore_eos": ({}, {"ignore_eos": True}),
}


@pytest.mark.parametrize("case", CHANGED)
async def test_a_changed_parameter_misses(lab: Lab, case: str) -> None:
    await lab.worker(slots=2)
    assert await twice(lab, *CHANGED[case]) == 2


async def test_another_temperature_misses(lab: Lab) -> None:
    await lab.worker()
    assert await twice(lab, {}, {"temperature": 0.1}) == 2


async def test_another_text_misses(lab: Lab) -> None:
    await lab.worker()
    assert await twice(lab, {}, {}, texts=(next(_texts), next(_texts))) == 2


async def test_another_model_misses(lab: Lab) -> None:
    await lab.worker("toy-two-ends")
    await lab.worker("toy")
    assert await twice(lab, {"model": "toy"}, {"model": "toy-two-ends"}) == 2


@pytest.mark.parametrize("change", ["role", "message", "order", "tools", "tool name", "tool_choice"])
async def test_another_conversation_misses(lab: Lab, change: str) -> None:
    await lab.worker("toy-roles")
    text = next(_texts)
    plain = [{"role": "system", "content": text}, {"role": "user", "content": "b"}]
    first, second = {
        "role": ({"messages": plain}, {"messages": [plain[0], {"role": "assistant", "content": "b"}]}),
        "message": ({"messages": plain}, {"messages": [plain[0], {"role": "user", "content": "c"}]}),
        "order": ({"messages": plain}, {"messages": plain[::-1]}),
        "tools": ({"messages": plain}, {"messages": plain, "tools": [TOOL]}),
        "tool name": ({"messages": plain, "tools": [TOOL]}, {"messages": plain, "tools": [OTHER_TOOL]}),
        "tool_choice": (
            {"messages": plain, "tools": [TOOL]},
            {"messages": plain, "tools": [TOOL], "tool_choice": "none"},
        ),
    }[change]
    assert await twice(lab, first, second) == 2


@pytest.mark.parametrize("written", [{"n": 1}, {"top_p": 1}, {"user": "me"}, {"stop": []}, {"stop": None}])
async def test_a_default_written_out_hits(lab: Lab, written: dict[str, Any]) -> None:
    await lab.worker()
    assert await twice(lab, {}, written) == 1


@pytest.mark.parametrize("modes", list(itertools.product(MODES, MODES)), ids=" then ".join)
async def test_the_form_of_reply_does_not_matter(lab: Lab, modes: tuple[str, str]) -> None:
    await lab.worker()
    assert await twice(lab, {}, {}, modes=modes) == 1


async def test_stream_options_and_trace_headers_do_not_matter(lab: Lab) -> None:
    await lab.worker()
    hit = await twice(
        lab,
        {"stream_options": ABSENT},
        {"stream_options": {"include_usage": True}},
        modes=("stream", "stream"),
        headers={"traceparent": "00-11111111111111111111111111111111-2222222222222222-01", "x-request-id": "mine"},
    )
    assert hit == 1


async def test_the_order_of_keys_does_not_matter(lab: Lab) -> None:
    await lab.worker()
    text = next(_texts)
    body = {"model": "toy", "temperature": 0, "max_tokens": 9, "messages": [{"role": "user", "content": text}]}
    for raw in (json.dumps(body), json.dumps(dict(reversed(body.items())), indent=4)):
        before = (await lab.cache_stats()).answers
        status, headers, _ = await lab.post("/v1/chat/completions", raw.encode())
        assert status == 200
        if not lab.books.released:
            await stored(lab, before + 1)
    assert headers["x-headrace-cached"] == "true"
    assert len(lab.journal) == 1


@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"temperature": 0.7, "seed": 5}, {}])
async def test_an_answer_by_chance_is_never_stored(lab: Lab, params: dict[str, Any]) -> None:
    await lab.worker()
    text = next(_texts)
    for _ in range(2):
        assert not (await lab.ask(text, params, mode="plain")).succeeded().cached_answer
    assert len(lab.journal) == 2


@pytest.mark.parametrize("mode", MODES)
async def test_the_client_can_pass_it_by(lab: Lab, mode: str) -> None:
    await lab.worker()
    text = next(_texts)
    (await lab.ask(text, FIXED, mode="plain")).succeeded()
    if mode == "grpc":
        answer = await _native_bypass(lab, text)
    else:
        answer = await lab.ask(text, FIXED, mode=mode, headers={"x-headrace-cache": "bypass"})
    assert not answer.succeeded().cached_answer
    assert len(lab.journal) == 2


async def _native_bypass(lab: Lab, text: str) -> Any:
    from tests.support.clients import GrpcAnswer, native

    request = native({"model": "toy", "messages": [{"role": "user", "content": text}]} | FIXED)
    request.bypass_cache = True
    return await GrpcAnswer(lab.client.stub.Generate(request)).rest()


@pytest.mark.parametrize("mode", MODES)
async def test_a_stored_answer_looks_like_a_fresh_one(lab: Lab, mode: str) -> None:
    """Role, content, choices, finishes, logprobs, usage, end; but an id of its own."""
    await lab.worker(slots=2)
    text = next(_texts)
    lab.play("'a' [240 159]; [153 130] 'b'; END:length", "'cd'; END")
    params = FIXED | {"n": 2, "logprobs": True, "top_logprobs": 2}
    fresh = (await lab.ask(text, params, mode=mode)).succeeded()

    async def there() -> bool:
        return (await lab.cache_stats()).flights == 0

    await eventually(there, "the answer is stored")
    again = (await lab.ask(text, params, mode=mode)).succeeded()
    assert again.cached_answer
    assert len(lab.journal) == 1
    for choice in (0, 1):
        assert again.text_of(choice) == fresh.text_of(choice)
    assert again.finishes == fresh.finishes == {0: "length", 1: "stop"}
    assert again.roles == fresh.roles
    assert again.logprobs == fresh.logprobs
    assert again.usage == fresh.usage
    assert again.id != fresh.id
    if mode != "grpc":
        assert again.headers.get("content-type") == fresh.headers.get("content-type")
        assert again.headers["x-headrace-cached"] == "true"


@pytest.mark.parametrize("mode", STREAMED)
@pytest.mark.parametrize("how", ["cancelled", "failed", "cut", "expired"])
async def test_an_unfinished_answer_is_not_stored(lab: Lab, mode: str, how: str) -> None:
    await lab.worker()
    text = next(_texts)
    script = {"cancelled": "'ab'; HANG", "failed": "'ab'; ERR:INTERNAL", "cut": "'ab'; DIE", "expired": "'ab'; HANG"}
    lab.play(script[how])
    headers = {"x-headrace-deadline-ms": "300"} if how == "expired" else None
    answer = await lab.open(text, FIXED, mode=mode, headers=headers)
    assert await answer.piece() == "ab"
    if how == "cancelled":
        answer.leave()
    else:
        (await answer.rest()).broken()
    await lab.nothing_remains()
    lab.play("'whole'; END")
    again = (await lab.ask(text, FIXED, mode=mode)).succeeded()
    assert (again.text, again.cached_answer) == ("whole", False)


@pytest.mark.parametrize("mode", MODES)
async def test_the_same_question_at_the_same_moment_is_answered_once(lab: Lab, mode: str) -> None:
    await lab.worker(slots=4)
    text = next(_texts)
    lab.play("'a'; 'b'; END", gated=True)
    asked = [asyncio.create_task(lab.ask(text, FIXED, mode=mode)) for _ in range(5)]

    async def waiting() -> bool:
        return (await lab.cache_stats()).waiters == 4

    await eventually(waiting, "four wait for the one")
    (await lab.entry()).release(3)
    answers = await asyncio.gather(*asked)
    assert [answer.succeeded().text for answer in answers] == ["ab"] * 5
    assert len(lab.journal) == 1
    assert sum(answer.cached_answer for answer in answers) == 4
    assert len({answer.id for answer in answers}) == 5


@pytest.mark.parametrize("how", ["leaves", "fails"])
async def test_when_the_one_gives_up_another_takes_over(lab: Lab, how: str) -> None:
    await lab.worker(slots=4)
    text = next(_texts)
    lab.play("'a'; ERR:INTERNAL" if how == "fails" else "'a'; HANG", gated=True)
    lab.play("'whole'; END")
    first = await lab.open(text, FIXED, mode="stream")
    entry = await lab.entry()
    entry.release()
    assert await first.piece() == "a"
    asked = [asyncio.create_task(lab.ask(text, FIXED, mode="plain")) for _ in range(3)]

    async def waiting() -> bool:
        return (await lab.cache_stats()).waiters == 3

    await eventually(waiting, "three wait for the one")
    if how == "leaves":
        first.leave()
    else:
        entry.release(2)
        (await first.rest()).broken()
    assert [answer.succeeded().text for answer in await asyncio.gather(*asked)] == ["whole"] * 3
    assert len(lab.journal) == 2


async def test_a_waiter_that_leaves_is_forgotten(lab: Lab) -> None:
    await lab.worker(slots=4)
    text = next(_texts)
    lab.play("'a'; END", gated=True)
    first = asyncio.create_task(lab.ask(text, FIXED, mode="plain"))
    entry = await lab.entry()
    second = await lab.open(text, FIXED, mode="plain")

    async def waiting() -> bool:
        return (await lab.cache_stats()).waiters == 1

    async def alone() -> bool:
        return (await lab.cache_stats()).waiters == 0

    await eventually(waiting, "one waits")
    second.leave()
    await eventually(alone, "none waits")
    entry.release(2)
    assert (await first).succeeded().text == "a"
