"""Calls of tools: what a model writes between its marks reaches clients as calls, whole and in parts, by both doors."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from headrace import client as native
from headrace.client import Outcome
from tests.support.mesh import Lab

MODEL = "toy-tools"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
ASK: list[Any] = [{"role": "user", "content": "hi"}]

#: Text, then two calls, cut within marks, names and characters.
TWO_CALLS = (
    '\'Let me see.\\n<tool\'; \'_call>\\n{"name": "wea\'; \'ther", "arguments": {"city": "K\'; [195]; [182]'
    ' \'ln"}}\\n</tool_call>\\n<tool_call>\'; \'{"name": "clock", "arguments": {}}</tool_call>\'; END'
)
CALLS = [("weather", '{"city": "Köln"}'), ("clock", "{}")]


def sdk(lab: Lab) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{lab.mesh.http}/v1", api_key="none", max_retries=0)


async def test_calls_in_one_body(lab: Lab) -> None:
    await lab.worker(MODEL)
    lab.play(TWO_CALLS)
    async with sdk(lab) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER, CLOCK])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see.\n"
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()] == CALLS
    assert len({call.id for call in choice.message.tool_calls or ()}) == 2
    assert "<tools>weather;clock;</tools>" in lab.journal[-1].prompt


async def test_calls_as_they_come(lab: Lab) -> None:
    await lab.worker(MODEL)
    lab.play(TWO_CALLS)
    text, calls, parts = "", list[list[str]](), 0
    async with sdk(lab) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[WEATHER, CLOCK], stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    parts += 1
                    assert call.function is not None
                    if call.id:
                        assert call.index == len(calls)
                        calls.append([call.function.name or "", ""])
                    calls[call.index][1] += call.function.arguments or ""
                if choice.finish_reason:
                    assert choice.finish_reason == "tool_calls"
    assert (text, [tuple(call) for call in calls]) == ("Let me see.\n", CALLS)
    # Arguments don't wait for their end.
    assert parts > 2


async def test_calls_by_the_native_door(lab: Lab) -> None:
    await lab.worker(MODEL)
    lab.play(TWO_CALLS)
    async with native.Client(lab.mesh.grpc) as client:
        answer = await client.complete(model=MODEL, messages=ASK, tools=[WEATHER, CLOCK])
    assert answer.outcome is Outcome.TOOL_CALLS
    assert answer.text == "Let me see.\n"
    assert [(call.name, call.arguments) for call in answer.choices[0].tool_calls] == CALLS


async def test_a_stored_answer_calls_again(lab: Lab) -> None:
    await lab.worker(MODEL)
    lab.play(TWO_CALLS)
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [WEATHER, CLOCK], "temperature": 0}
    async with sdk(lab) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(**asked)
            assert answer.choices[0].finish_reason == "tool_calls"
            calls = answer.choices[0].message.tool_calls or ()
            assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    assert len(lab.journal) == 1


async def test_one_call_at_most(lab: Lab) -> None:
    await lab.worker(MODEL)
    lab.play(TWO_CALLS)
    async with sdk(lab) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[WEATHER, CLOCK], parallel_tool_calls=False
        )
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in answer.choices[0].message.tool_calls or ()] == ["weather"]


@pytest.mark.parametrize("tools", [[], [WEATHER]], ids=["no tools", "no call"])
async def test_what_is_no_call_is_text(lab: Lab, tools: list[Any]) -> None:
    await lab.worker(MODEL)
    said = "'<tool_call>{\"name\": 7}'; END" if tools else TWO_CALLS
    lab.play(said)
    async with sdk(lab) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=ASK, tools=tools or openai.NOT_GIVEN)
    assert answer.choices[0].finish_reason == "stop"
    assert "<tool_call>" in (answer.choices[0].message.content or "")
    assert not answer.choices[0].message.tool_calls


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
)
async def test_a_required_call_is_a_form_for_the_engine(lab: Lab, choice: Any) -> None:
    await lab.worker(MODEL)
    lab.play('\'{"name": "weather", "arguments": {"city": "Bonn"}}\'; END')
    async with sdk(lab) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[WEATHER, CLOCK], tool_choice=choice
        )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bonn"})
    schema = json.loads(lab.journal[-1].submit.guided.json_schema)
    names = [form["properties"]["name"]["const"] for form in schema.get("anyOf", [schema])]
    assert names == (["weather", "clock"] if choice == "required" else ["weather"])


async def test_a_tool_that_was_not_offered_cannot_be_required(lab: Lab) -> None:
    await lab.worker(MODEL)
    async with sdk(lab) as client:
        with pytest.raises(openai.BadRequestError, match=r"no tool 'map' \(tools: weather, clock\)"):
            await client.chat.completions.create(
                model=MODEL,
                messages=ASK,
                tools=[WEATHER, CLOCK],
                tool_choice={"type": "function", "function": {"name": "map"}},
            )
    assert lab.journal == []
