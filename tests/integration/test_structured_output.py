"""Structured output asks for no trust: what can't be compiled or enforced is refused at the door, no worker sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.clients import HTTP_MODES, MODES, STREAMED
from tests.support.mesh import Lab

INTEGER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def schema(value: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value} | more}}


def pattern(text: str) -> dict[str, Any]:
    return schema({"type": "object", "properties": {"a": {"type": "string", "pattern": text}}, "required": ["a"]})


@pytest.mark.parametrize("mode", MODES)
async def test_a_bad_pattern_is_refused_first_and_after_a_good_one(lab: Lab, mode: str) -> None:
    await lab.worker()
    for _ in range(2):
        failure = (await lab.ask("go", pattern("foo**"), mode=mode)).refused(400)
        if mode != "grpc":
            assert (failure.param or "").startswith("response_format")
        lab.play("'{}'; END")
        (await lab.ask("go", schema({"type": "object"}), mode=mode)).succeeded()
    assert len(lab.journal) == 2
    assert all(entry.submit.guided.json_schema for entry in lab.journal)


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_text_is_as_if_absent(lab: Lab, mode: str) -> None:
    await lab.worker()
    (await lab.ask("go", {"response_format": {"type": "text"}}, mode=mode)).succeeded()
    assert not lab.journal[0].submit.HasField("guided")


REFUSED = {
    "an unknown form": {"response_format": {"type": "yaml"}},
    "no form": {"response_format": {}},
    "no schema": {"response_format": {"type": "json_schema"}},
    "an empty schema object": {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    "a schema that is a number": schema(7),
    "a schema that is a text": schema("{}"),
    "a form that is a text": {"response_format": "json"},
    "an unknown type": schema({"type": "banana"}),
    "properties that are a list": schema({"type": "object", "properties": []}),
    "a reference to nowhere": schema({"$ref": "#/$defs/nope"}),
    "a reference outside": schema({"$ref": "https://example.com/schema.json"}),
    "an unclosed pattern": pattern("(a"),
}


@pytest.mark.parametrize("mode", HTTP_MODES)
@pytest.mark.parametrize("case", REFUSED)
async def test_a_form_that_is_none_is_refused(lab: Lab, mode: str, case: str) -> None:
    await lab.worker()
    failure = (await lab.ask("go", REFUSED[case], mode=mode)).refused(400)
    assert (failure.param or "").startswith("response_format")
    (await lab.ask("go", mode=mode)).succeeded()
    assert len(lab.journal) == 1


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_a_keyword_that_cannot_be_enforced_is_named(lab: Lab, mode: str) -> None:
    await lab.worker()
    value = {"type": "object", "properties": {"a": {"type": "integer"}}, "if": {"required": ["a"]}, "then": False}
    failure = (await lab.ask("go", schema(value, strict=True), mode=mode)).refused(400)
    assert (failure.param or "").startswith("response_format")
    assert "if" in failure.message or "then" in failure.message
    assert lab.journal == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_schema_that_is_too_much_is_refused_and_holds_up_nobody(lab: Lab, mode: str) -> None:
    await lab.worker(slots=2)
    lab.play("'a'; 'b'; END", gated=True)
    other = await lab.open("other", mode="stream")
    entry = await lab.entry()
    entry.release()
    assert await other.piece() == "a"
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(100_000)}}
    too_much = (schema(deep), schema(wide), pattern("(a{1,1000}){1,1000}"), pattern("(" * 2000 + "a" + ")*" * 2000))
    asked = [asyncio.create_task(lab.ask("go", params, mode=mode)) for params in too_much]
    entry.release(2)
    assert (await other.rest()).succeeded().text == "ab"
    for refusal in asked:
        (await refusal).refused(400)
    assert len(lab.journal) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_the_cut_of_a_form_is_a_length(lab: Lab, mode: str) -> None:
    """The grammar itself is the engine's; the router says truly how it ended."""
    await lab.worker()
    lab.play("'{\"a'; END:length")
    answer = (await lab.ask("go", schema(INTEGER) | {"max_tokens": 3}, mode=mode)).succeeded()
    assert (answer.text, answer.finish) == ('{"a', "length")
    assert json.loads(lab.journal[0].submit.guided.json_schema) == INTEGER


@pytest.mark.parametrize("mode", STREAMED)
async def test_deltas_join_to_what_parses(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'{\"a\":\"\\\\'; 'u00'; 'e9 ' [195]; [169]; '\\\\'; 'n\"}'; END")
    answer = (await lab.ask("go", {"response_format": {"type": "json_object"}}, mode=mode)).succeeded()
    assert json.loads(answer.text) == {"a": "é é\n"}
    assert lab.journal[0].submit.guided.json_object
