"""One set of books: what the router counted is what every reply form, the scheduler and the metrics read."""

from __future__ import annotations

import pytest

from headrace.v1 import types_pb2
from tests.support.clients import ABSENT, MODES
from tests.support.mesh import Lab, outcomes
from tests.support.waiting import eventually


async def test_usage_comes_last_and_only_once_when_asked_for(lab: Lab) -> None:
    await lab.worker()
    lab.play("'a'; 'bc'; END")
    answer = (await lab.ask("1234567", {"stream_options": {"include_usage": True}}, mode="stream")).succeeded()
    *content, usage, done = answer.events
    assert done is None
    assert all(event["usage"] is None for event in content)
    assert all(event["choices"] for event in content)
    assert usage["choices"] == []
    assert answer.usage == (7, 3, 10)
    assert content[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in event["choices"][0]["delta"] for event in content[1:])


@pytest.mark.parametrize("options", [ABSENT, None, {}, {"include_usage": False}], ids=["absent", "null", "empty", "no"])
async def test_no_usage_when_not_asked_for(lab: Lab, options: object) -> None:
    await lab.worker()
    lab.play("'a'; 'bc'; END")
    answer = (await lab.ask("1234567", {"stream_options": options}, mode="stream")).succeeded()
    assert answer.usage is None
    assert all(event["choices"] for event in answer.events[:-1])
    assert not any(event.get("usage") for event in answer.events[:-1])


@pytest.mark.parametrize("mode", MODES)
async def test_choices_are_counted_together(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'abc'; END", "'abcde'; END")
    answer = (await lab.ask("1234567", {"n": 2}, mode=mode)).succeeded()
    assert (answer.text_of(0), answer.text_of(1)) == ("abc", "abcde")
    assert answer.finishes == {0: "stop", 1: "stop"}
    assert answer.usage == (7, 8, 15)


@pytest.mark.parametrize("mode", MODES)
async def test_reused_prompt_tokens_are_told(lab: Lab, mode: str) -> None:
    await lab.worker()
    first = (await lab.ask("0123456789", mode=mode)).succeeded()
    second = (await lab.ask("0123456789", mode=mode)).succeeded()
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    assert first.usage == second.usage == (10, 2, 12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("told", ["none", 99])
async def test_the_workers_own_count_is_not_believed(lab: Lab, mode: str, told: object) -> None:
    await lab.worker()
    before = (await lab.metrics())["headrace_router_usage_mismatches_total"]
    lab.play("'a'; 'bc'; END", usage=told)
    answer = (await lab.ask("1234567", mode=mode)).succeeded()
    assert answer.usage == (7, 3, 10)
    (release,) = await lab.released()
    assert (release.usage.prompt_tokens, release.usage.completion_tokens) == (7, 3)
    if told == 99:

        async def noted() -> bool:
            return (await lab.metrics())["headrace_router_usage_mismatches_total"] == before + 1

        await eventually(noted, "the difference is noted")


async def test_stream_options_of_a_plain_request_are_refused(lab: Lab) -> None:
    await lab.worker()
    for options in ({"include_usage": True}, {}):
        answer = await lab.ask("1234567", {"stream": False, "stream_options": options}, mode="plain")
        answer.refused(400, "stream_options")
    assert lab.journal == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_broken_answer_is_counted_once(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'ab'; DIE")
    answer = await lab.ask("1234567", mode=mode)
    assert answer.failure is not None
    assert not answer.done
    (release,) = await lab.released()
    assert (release.usage.prompt_tokens, release.usage.completion_tokens) == (7, 2)
    assert release.outcome == types_pb2.OUTCOME_WORKER_LOST
    await lab.nothing_remains()
    assert outcomes(lab.books.released) == ["worker_lost"]


@pytest.mark.parametrize("mode", MODES)
async def test_every_book_has_the_same_numbers(lab: Lab, mode: str) -> None:
    """The answer's usage, the scheduler's release and the token metric."""
    await lab.worker()
    prompt, completion = (
        f'headrace_router_tokens_total{{model="toy",kind="{kind}"}}' for kind in ("prompt", "completion")
    )
    before = await lab.metrics()
    lab.play("'abc'; 'de'; END")
    answer = (await lab.ask("12345", {"stop": ["d"]}, mode=mode)).succeeded()
    assert (answer.text, answer.usage) == ("abc", (5, 4, 9))
    (release,) = await lab.released()
    assert (release.usage.prompt_tokens, release.usage.completion_tokens) == (5, 4)

    async def counted() -> bool:
        after = await lab.metrics()
        added = [after.get(name, 0) - before.get(name, 0) for name in (prompt, completion)]
        return added == [5, 4]

    await eventually(counted, "the metric has the same numbers")
