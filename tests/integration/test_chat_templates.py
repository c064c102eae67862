"""Messages that templates are not ready for: one normal form before the template sees them, and what the template
refuses is the caller's error. Every prompt is read from the worker's journal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clients import ABSENT, HTTP_MODES, MODES
from tests.support.mesh import Lab
from tests.support.toy import EOT

ARGUMENTS = "messages[1].tool_calls[0].function.arguments"


def history(arguments: Any, content: Any = None) -> list[dict[str, Any]]:
    """A question, a call of the tool `clock` with those arguments, and the tool's answer."""
    function = {"name": "clock"} | ({} if arguments is ABSENT else {"arguments": arguments})
    call = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    if content is not ABSENT:
        call["content"] = content
    return [
        {"role": "user", "content": "hi"},
        call,
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]


async def prompt_of(lab: Lab, messages: list[dict[str, Any]], mode: str) -> str:
    (await lab.ask("", {"messages": messages}, mode=mode)).succeeded()
    return lab.journal[-1].prompt


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("content", [None, "", ABSENT], ids=["null", "empty", "absent"])
async def test_a_call_without_content(lab: Lab, mode: str, content: Any) -> None:
    await lab.worker("toy-roles")
    prompt = await prompt_of(lab, history('{"tz":"UTC"}', content), mode)
    assert prompt == "<user>hi</><assistant>[clock tz=UTC]</><tool>12:00</><assistant>"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arguments", ["", None, "{}", ABSENT], ids=["empty", "null", "object", "absent"])
async def test_a_call_without_arguments(lab: Lab, mode: str, arguments: Any) -> None:
    await lab.worker("toy-roles")
    prompt = await prompt_of(lab, history(arguments), mode)
    assert prompt == "<user>hi</><assistant>[clock]</><tool>12:00</><assistant>"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arguments", ['{"tz": ', '"UTC"', "[1]", "7", "{} {}"])
async def test_arguments_that_are_no_object(lab: Lab, mode: str, arguments: str) -> None:
    await lab.worker("toy-roles")
    answer = await lab.ask("", {"messages": history(arguments)}, mode=mode)
    failure = answer.refused(400)
    assert "arguments" in (failure.param or "")
    if mode != "grpc":
        assert failure.param == ARGUMENTS
    assert lab.journal == []


@pytest.mark.parametrize("mode", MODES)
async def test_parts_of_text_are_joined_for_a_template_of_strings(lab: Lab, mode: str) -> None:
    await lab.worker("toy-roles")
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    prompt = await prompt_of(lab, [{"role": "user", "content": parts}], mode)
    assert prompt == "<user>A\nB</><assistant>"


@pytest.mark.parametrize("mode", MODES)
async def test_a_template_that_loops_over_parts_gets_them(lab: Lab, mode: str) -> None:
    await lab.worker("toy-parts")
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    assert await prompt_of(lab, [{"role": "user", "content": parts}], mode) == "(text:A)(text:B)"


@pytest.mark.parametrize("mode", MODES)
async def test_what_the_template_refuses_is_the_callers_error(lab: Lab, mode: str) -> None:
    await lab.worker("toy-turns")
    failure = (await lab.ask("hi", mode=mode)).refused(400)
    assert "roles must take turns" in failure.message
    if mode != "grpc":
        assert failure.type == "invalid_request_error"
    assert lab.journal == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("text", ["{{ 7*7 }} {% raw %}", "{# no #}", "<|im_end|>", "a\u2028b\x00c", "  \n\t "])
async def test_content_is_never_read_as_a_template(lab: Lab, mode: str, text: str) -> None:
    await lab.worker("toy-roles")
    assert await prompt_of(lab, [{"role": "user", "content": text}], mode) == f"<user>{text}</><assistant>"


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_parts_that_are_no_text_are_refused(lab: Lab, mode: str) -> None:
    await lab.worker("toy-roles")
    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    failure = (await lab.ask("", {"messages": [{"role": "user", "content": parts}]}, mode=mode)).refused(400)
    assert (failure.param or "").startswith("messages[0].content")


@pytest.mark.parametrize("mode", MODES)
async def test_a_special_token_typed_in_a_message_is_text(lab: Lab, mode: str) -> None:
    await lab.worker("toy")
    content = "a<eos>b<e"
    parts = [{"type": "text", "text": "<eo"}, {"type": "text", "text": "t>"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "os>"}]
    await prompt_of(lab, messages, mode)
    assert lab.journal[-1].prompt_ids == list(b"a<eos>b<eos>")
    await prompt_of(lab, [{"role": "user", "content": parts}], mode)
    assert EOT not in lab.journal[-1].prompt_ids


@pytest.mark.parametrize("mode", MODES)
async def test_a_conversations_earlier_messages_are_not_encoded_again(lab: Lab, mode: str) -> None:
    await lab.worker("toy-marks")
    said = [f"{mode} {letter}" * 200 for letter in "abcde"]

    async def ids_of(count: int, salt: str) -> tuple[list[int], float, float]:
        """Of a conversation so far; and the bytes encoded and remembered for it."""
        before = await lab.metrics()
        messages = [{"role": ("user", "assistant")[at % 2], "content": said[at]} for at in range(count)]
        (await lab.ask("", {"messages": messages, "cache_salt": salt}, mode=mode)).succeeded()
        after = await lab.metrics()
        made, known = (
            after[series] - before.get(series, 0)
            for ids in ("encoded", "remembered")
            for series in (f'headrace_router_message_bytes_total{{model="toy-marks",ids="{ids}"}}',)
        )
        return list(lab.journal[-1].submit.prompt_ids), made, known

    def expected(count: int) -> list[int]:
        return [token for text in said[:count] for token in [*text.encode(), EOT]]

    size = len(said[0])
    assert await ids_of(3, "one") == (expected(3), 3 * size, 0)
    assert await ids_of(5, "one") == (expected(5), 2 * size, 3 * size)
    # Nobody else profits.
    assert await ids_of(5, "other") == (expected(5), 5 * size, 0)
