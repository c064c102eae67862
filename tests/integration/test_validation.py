"""Bad requests stay at the door: refused as a status before anything is queued, with the field named, in every mode;
and the worker's journal knows nothing of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.clients import ABSENT, HTTP_MODES, MODES, Unsupported, http, native
from tests.support.mesh import Lab

#: What is asked beside the text "1234567", and the field that is named.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature below": ({"temperature": -0.1}, "temperature"),
    "temperature above": ({"temperature": 2.5}, "temperature"),
    "temperature a word": ({"temperature": "hot"}, "temperature"),
    "temperature a list": ({"temperature": [1]}, "temperature"),
    "top_p above": ({"top_p": 1.5}, "top_p"),
    "top_p below": ({"top_p": -0.5}, "top_p"),
    "top_k a fraction": ({"top_k": 0.01}, "top_k"),
    "top_k below": ({"top_k": -2}, "top_k"),
    "min_p above": ({"min_p": 1.5}, "min_p"),
    "frequency_penalty above": ({"frequency_penalty": 2.5}, "frequency_penalty"),
    "presence_penalty below": ({"presence_penalty": -2.5}, "presence_penalty"),
    "repetition_penalty none": ({"repetition_penalty": 0}, "repetition_penalty"),
    "no choices": ({"n": 0}, "n"),
    "a million choices": ({"n": 1_000_000}, "n"),
    "a huge number of choices": ({"n": 2**70}, "n"),
    "max_tokens none": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens below": ({"max_tokens": -1}, "max_tokens"),
    "max_tokens a fraction": ({"max_tokens": 1.5}, "max_tokens"),
    "max_tokens a word": ({"max_tokens": "ten"}, "max_tokens"),
    "max_completion_tokens none": ({"max_completion_tokens": 0}, "max_completion_tokens"),
    "min_tokens above max_tokens": ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    "bias for a word": ({"logit_bias": {"AI": -100}}, "logit_bias"),
    "bias for an id that is not there": ({"logit_bias": {"999999": 1}}, "logit_bias"),
    "bias above": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "bias a word": ({"logit_bias": {"5": "much"}}, "logit_bias"),
    "top_logprobs alone": ({"top_logprobs": 3}, "top_logprobs"),
    "top_logprobs above": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs below": ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    "an empty stop": ({"stop": [""]}, "stop"),
    "five stops": ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    "a stop that is a number": ({"stop": [7]}, "stop"),
    "a stop id that is not there": ({"stop_token_ids": [999999]}, "stop_token_ids"),
    "a seed that is a word": ({"seed": "x"}, "seed"),
    "no messages in it": ({"messages": []}, "messages"),
    "no messages": ({"messages": ABSENT}, "messages"),
    "messages a word": ({"messages": "hi"}, "messages"),
    "a message without a role": ({"messages": [{"content": "x"}]}, "messages[0].role"),
    "an unknown role": ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    "no model": ({"model": ABSENT}, "model"),
    "a stream that is a word": ({"stream": "yes"}, "stream"),
}

#: How the native API calls some of these fields.
NATIVE = {
    "stop_token_ids": "stop_ids",
    "top_logprobs": "top",
    "messages": "prompt",
    "messages[0].role": "role",
}


def expressible(params: dict[str, Any]) -> bool:
    body = {"model": "toy", "messages": [{"role": "user", "content": "1234567"}]} | params
    try:
        # An empty prompt is absent from the message altogether, and so is what protobuf takes for its default.
        native({key: value for key, value in body.items() if value is not ABSENT})
    except (Unsupported, KeyError):
        return False
    return params not in ({"messages": []}, {"model": ABSENT}, {"stream": "yes"})


ROWS = [
    (mode, case) for case, (params, _) in REFUSED.items() for mode in MODES if mode != "grpc" or expressible(params)
]


async def still_serves(lab: Lab, mode: str) -> None:
    """A good request is answered, and is the only one that a worker ever saw."""
    lab.play("'good'; END")
    assert (await lab.ask("1234567", mode=mode)).succeeded().text == "good"
    assert [entry.prompt for entry in lab.journal] == ["1234567"]
    assert len(lab.books.grants) == 1


@pytest.mark.parametrize(("mode", "case"), ROWS)
async def test_a_wrong_field_is_refused_by_name(lab: Lab, mode: str, case: str) -> None:
    params, param = REFUSED[case]
    await lab.worker()
    answer = await lab.ask("1234567", params, mode=mode)
    failure = answer.refused(400)
    if mode == "grpc":
        assert (failure.param or "").split(".")[-1] == NATIVE.get(param, param), failure
    else:
        assert failure.param == param
        assert failure.type == "invalid_request_error"
    await still_serves(lab, mode)


@pytest.mark.parametrize("mode", HTTP_MODES)
@pytest.mark.parametrize("header", ["x-headrace-ttft-ms", "x-headrace-tpot-ms"])
@pytest.mark.parametrize("value", ["0", "-5", "soon", "nan", "inf", "3600001"])
async def test_a_latency_target_that_is_none_is_refused_by_header(lab: Lab, mode: str, header: str, value: str) -> None:
    await lab.worker()
    failure = (await lab.ask("1234567", mode=mode, headers={header: value})).refused(400, code="invalid_argument")
    assert failure.param == header
    assert value.lower() in failure.message.lower()
    if value == "3600001":
        assert "at most 3600000 ms" in failure.message
    await still_serves(lab, mode)


@pytest.mark.parametrize("field", ["ttft_target_ms", "tpot_target_ms"])
@pytest.mark.parametrize("value", [0, 3_600_001, 2**32 - 1])
async def test_a_latency_target_that_is_none_is_refused_by_field(lab: Lab, field: str, value: int) -> None:
    await lab.worker()
    failure = (await lab.ask("1234567", {field: value}, mode="grpc")).refused(400)
    assert failure.param == field
    assert failure.message.endswith(f"must be above 0 and at most 3600000 ms, got {value}")
    await still_serves(lab, "grpc")


@pytest.mark.parametrize("mode", MODES)
async def test_the_context_is_counted_with_the_answer(lab: Lab, mode: str) -> None:
    await lab.worker()
    failure = (await lab.ask("1234567", {"max_tokens": 58}, mode=mode)).refused(400, code="context_length_exceeded")
    assert "64" in failure.message
    assert "58" in failure.message
    lab.play("'good'; END")
    assert (await lab.ask("1234567", {"max_tokens": 57}, mode=mode)).succeeded().text == "good"
    assert [entry.submit.stopping.max_tokens for entry in lab.journal] == [57]


@pytest.mark.parametrize("mode", MODES)
async def test_without_max_tokens_the_context_is_the_limit(lab: Lab, mode: str) -> None:
    await lab.worker()
    (await lab.ask("1234567", mode=mode)).succeeded()
    assert lab.journal[0].submit.stopping.max_tokens == 57
    (await lab.ask("x" * 64, mode=mode)).refused(400, code="context_length_exceeded")


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_two_limits_that_differ_are_refused(lab: Lab, mode: str) -> None:
    await lab.worker()
    (await lab.ask("1234567", {"max_tokens": 5, "max_completion_tokens": 6}, mode=mode)).refused(400)
    (await lab.ask("1234567", {"max_tokens": 5, "max_completion_tokens": 5}, mode=mode)).succeeded()
    assert [entry.submit.stopping.max_tokens for entry in lab.journal] == [5]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("params", [{"stop": None}, {"stop": []}, {"max_tokens": None}, {"temperature": None}])
async def test_null_is_the_same_as_absent(lab: Lab, mode: str, params: dict[str, Any]) -> None:
    await lab.worker()
    if mode == "grpc" and "stop" not in params:
        params = {}
    lab.play("'good'; END")
    assert (await lab.ask("1234567", params, mode=mode)).succeeded().text == "good"


@pytest.mark.parametrize("mode", HTTP_MODES)
async def test_unknown_fields_are_left_alone(lab: Lab, mode: str) -> None:
    await lab.worker()
    (await lab.ask("1234567", {"user": "me", "store": False, "no_such_field": {"a": 1}}, mode=mode)).succeeded()


@pytest.mark.parametrize("mode", MODES)
async def test_an_unknown_model(lab: Lab, mode: str) -> None:
    await lab.worker()
    (await lab.ask("1234567", {"model": "nope"}, mode=mode)).refused(404, code="model_not_found")
    await still_serves(lab, mode)


RAW = {
    "no JSON": (b"hello", "application/json", 400),
    "half of it": (b'{"model": "toy", ', "application/json", 400),
    "a list": (b"[]", "application/json", 400),
    "nothing": (b"", "application/json", 400),
    "no UTF-8": (b'{"model": "\xff"}', "application/json", 400),
    "half a surrogate pair": (
        b'{"model":"toy","messages":[{"role":"user","content":"\\ud83d"}]}',
        "application/json",
        400,
    ),
    "not a number": (
        b'{"model":"toy","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        "application/json",
        400,
    ),
    "deeply nested": (b"[" * 100_000, "application/json", 400),
    "the wrong type": (b"model=toy", "application/x-www-form-urlencoded", 415),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("case", RAW)
async def test_a_body_that_is_no_request(lab: Lab, case: str, path: str) -> None:
    raw, kind, expected = RAW[case]
    await lab.worker()
    status, headers, body = await http(lab.mesh.http, "POST", path, raw, {"content-type": kind})
    assert status == expected, body
    assert headers["content-type"].startswith("application/json")
    assert set(body["error"]) >= {"message", "type", "param", "code"}
    await still_serves(lab, "plain")


async def test_a_legacy_request_for_the_echo_alone(lab: Lab) -> None:
    await lab.worker()
    params = {"echo": True, "max_tokens": 0}
    answer = await lab.ask("ab", params, mode="plain", path="/v1/completions")
    assert answer.succeeded().text == "ab"
    assert answer.usage == (2, 0, 2)


@pytest.mark.parametrize("mode", MODES)
async def test_twenty_thousand_messages_do_not_hold_up_others(lab: Lab, mode: str) -> None:
    await lab.worker(slots=2)
    lab.play("'a'; 'b'; END", gated=True)
    other = await lab.open("other", mode="stream")
    entry = await lab.entry()
    entry.release()
    assert await other.piece() == "a"
    many = {"messages": [{"role": "user", "content": "x"}] * 20_000}
    refusal = asyncio.create_task(lab.ask("", many, mode=mode))
    status, _, _ = await lab.get("/health")
    assert status == 200
    entry.release(2)
    assert (await other.rest()).succeeded().text == "ab"
    (await asyncio.wait_for(refusal, 5)).refused(400, code="context_length_exceeded")
    await still_serves_after_other(lab, mode)


async def still_serves_after_other(lab: Lab, mode: str) -> None:
    lab.play("'good'; END")
    assert (await lab.ask("1234567", mode=mode)).succeeded().text == "good"
    assert [entry.prompt for entry in lab.journal] == ["other", "1234567"]


async def test_paths_and_methods_that_are_not_there(lab: Lab) -> None:
    for method, path, expected in [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ]:
        status, headers, body = await http(lab.mesh.http, method, path)
        assert status == expected
        assert headers["content-type"].startswith("application/json")
        assert body["error"]["message"]


async def test_tokenize_and_detokenize_agree(lab: Lab) -> None:
    await lab.worker()
    status, _, body = await lab.post("/tokenize", {"model": "toy", "prompt": "é!"})
    assert (status, body["tokens"]) == (200, [195, 169, 33])
    status, _, body = await lab.post("/detokenize", {"model": "toy", "tokens": [195, 169, 33]})
    assert (status, body["prompt"]) == (200, "é!")
    for path, bad in [
        ("/tokenize", {"model": "nope", "prompt": "x"}),
        ("/detokenize", {"model": "nope", "tokens": [1]}),
    ]:
        status, _, body = await lab.post(path, bad)
        assert (status, body["error"]["code"]) == (404, "model_not_found")
    status, _, body = await lab.post("/detokenize", {"model": "toy", "tokens": [999999]})
    assert status == 400, json.dumps(body)


async def test_models_are_listed(lab: Lab) -> None:
    await lab.worker()
    status, _, body = await lab.get("/v1/models")
    assert status == 200
    assert body["object"] == "list"
    assert {item["id"] for item in body["data"]} == set(lab.mesh.models)
    assert all(item["object"] == "model" for item in body["data"])
