"""Side data and dice: what belongs to a token travels with its id, what belongs to a request depends on it alone."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from tests.support.clients import MODES, STREAMED, HttpExchange
from tests.support.mesh import Lab
from tests.support.scripted import logprobs_of

ON = {"logprobs": True}


def joined(entries: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


@pytest.mark.parametrize("mode", MODES)
async def test_bytes_stand_beside_their_ids(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("[240 159]; [153 130]; 'ok'; END")
    answer = (await lab.ask("go", ON, mode=mode)).succeeded()
    entries = answer.logprobs[0]
    assert [entry["bytes"] for entry in entries] == [[240], [159], [153], [130], [111], [107]]
    assert joined(entries).decode() == answer.text == "🙂ok"
    for entry, token_id in zip(entries, [240, 159, 153, 130, 111, 107], strict=True):
        assert entry["logprob"] == pytest.approx(logprobs_of(token_id, 0).drawn.logprob)
        assert entry["top_logprobs"] == []


@pytest.mark.parametrize("mode", MODES)
async def test_held_text_keeps_its_entries(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'a'; '\\n'; 'E'; 'n'; 'd'; END")
    answer = (await lab.ask("go", ON | {"stop": ["\nEND"]}, mode=mode)).succeeded()
    assert joined(answer.logprobs[0]) == b"a\nEnd" == answer.text.encode()
    assert len(answer.logprobs[0]) == 5


@pytest.mark.parametrize("mode", MODES)
async def test_what_comes_after_the_end_has_no_entry(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'abcd'; 'Q' [900] 'x' 'y'")
    answer = (await lab.ask("go", ON | {"max_tokens": 6}, mode=mode)).succeeded()
    # The id that ended it has no text; it may have an entry, but nothing after it may.
    assert joined(answer.logprobs[0]).startswith(b"abcdQ")
    assert not any(entry["bytes"] in ([120], [121]) for entry in answer.logprobs[0])
    await (await lab.entry()).ended()


@pytest.mark.parametrize("mode", MODES)
async def test_a_stop_string_takes_its_entries_with_it(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'done'; '\\n'; 'END'; HANG")
    answer = (await lab.ask("go", ON | {"stop": ["\nEND"]}, mode=mode)).succeeded()
    assert joined(answer.logprobs[0]) == b"done"
    await (await lab.entry()).ended()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top", [0, 2])
async def test_the_drawn_id_is_always_there(lab: Lab, mode: str, top: int) -> None:
    await lab.worker()
    lab.play("'xy'; END")
    answer = (await lab.ask("go", ON | {"top_logprobs": top}, mode=mode)).succeeded()
    for entry, letter in zip(answer.logprobs[0], b"xy", strict=True):
        assert entry["bytes"] == [letter]
        assert len(entry["top_logprobs"]) == top
        assert letter not in [other["bytes"][0] for other in entry["top_logprobs"]]
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
    if top:
        assert [other["bytes"] for other in answer.logprobs[0][0]["top_logprobs"]] == [[65], [66]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
async def test_no_value_that_is_no_json(lab: Lab, mode: str, value: float) -> None:
    await lab.worker()
    lab.play("'ab'; END", logprobs={0: value})
    answer = (await lab.ask("go", ON, mode=mode)).succeeded()
    first, second = (entry["logprob"] for entry in answer.logprobs[0])
    assert first == pytest.approx(-9999.0)
    assert second == pytest.approx(logprobs_of(98, 0).drawn.logprob)


async def test_legacy_offsets_go_on_over_all_events(lab: Lab) -> None:
    await lab.worker()
    lab.play("'c'; 'd'; END")
    body = {"model": "toy", "prompt": "ab", "echo": True, "logprobs": 1, "stream": True, "max_tokens": 5}
    exchange = await HttpExchange.open(lab.mesh.http, "POST", "/v1/completions", json.dumps(body).encode())
    events = []
    while (data := await exchange.event()) not in (None, "[DONE]"):
        events.append(json.loads(data))
    exchange.leave()
    choices = [choice for event in events for choice in event["choices"]]
    parts = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
    assert "".join(choice["text"] for choice in choices) == "abcd"
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 1, 2, 3]
    assert [token for part in parts for token in part["tokens"]] == ["a", "b", "c", "d"]
    values = [value for part in parts for value in part["token_logprobs"]]
    assert values[0] is None
    assert values[1:] == pytest.approx([logprobs_of(token_id, 0).drawn.logprob for token_id in b"bcd"])


@pytest.mark.parametrize("mode", MODES)
async def test_no_entries_when_not_asked_for(lab: Lab, mode: str) -> None:
    await lab.worker()
    answer = (await lab.ask("go", mode=mode)).succeeded()
    assert not any(answer.logprobs.values())
    assert not lab.journal[0].submit.logprobs.enabled


@pytest.mark.parametrize("mode", MODES)
async def test_a_seed_is_the_requests_own(lab: Lab, mode: str) -> None:
    """Alone, beside others, in a batch."""
    await lab.worker(slots=8)
    alone = (await lab.ask("mine", {"seed": 42}, mode=mode)).succeeded()
    others = [{"seed": 7}, {}, {"seed": 42}] + [{"seed": 42}] * 5
    await asyncio.gather(*(lab.ask("mine", params, mode=mode) for params in others))
    seeds = [entry.seeds for entry in lab.journal]
    assert seeds[0] == [42]
    assert sum(given == [42] for given in seeds) == 7
    assert alone.text == "ok"


@pytest.mark.parametrize("mode", MODES)
async def test_choices_have_seeds_of_their_own(lab: Lab, mode: str) -> None:
    await lab.worker(slots=3)
    for _ in range(2):
        (await lab.ask("go", {"seed": 42, "n": 3}, mode=mode)).succeeded()
    first, second = (entry.seeds for entry in lab.journal)
    assert first == second
    assert len(set(first)) == 3


@pytest.mark.parametrize("mode", MODES)
async def test_without_a_seed_each_request_draws_its_own(lab: Lab, mode: str) -> None:
    await lab.worker()
    for _ in range(2):
        (await lab.ask("go", mode=mode)).succeeded()
    first, second = (entry.seeds for entry in lab.journal)
    assert len(first) == len(second) == 1
    assert first != second


@pytest.mark.parametrize("mode", STREAMED)
@pytest.mark.parametrize("given", [{"seed": 9}, {}])
async def test_a_move_keeps_the_seed(lab: Lab, mode: str, given: dict[str, Any]) -> None:
    await lab.worker()
    await lab.worker()
    lab.play("ERR:UNAVAILABLE")
    lab.play("'a'; DIE")
    lab.play("'b'; END")
    await lab.worker()
    (await lab.ask("go", given, mode=mode)).succeeded()
    seeds = [entry.seeds for entry in lab.journal]
    assert len(seeds) == 3
    assert seeds[0] == seeds[1] == seeds[2]


@pytest.mark.parametrize("mode", MODES)
async def test_parameters_reach_the_worker_resolved(lab: Lab, mode: str) -> None:
    await lab.worker()
    params = {
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 3},
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [13],
    }
    (await lab.ask("go", params, mode=mode)).succeeded()
    (await lab.ask("go", mode=mode)).succeeded()
    told, default = (entry.submit for entry in lab.journal)
    assert told.sampling.temperature == pytest.approx(0.5)
    assert told.sampling.top_k == 40
    assert told.sampling.top_p == pytest.approx(0.9)
    assert told.sampling.min_p == pytest.approx(0.05)
    assert told.sampling.frequency_penalty == pytest.approx(0.25)
    assert told.sampling.presence_penalty == pytest.approx(-0.25)
    assert told.sampling.repetition_penalty == pytest.approx(1.5)
    assert dict(told.sampling.logit_bias) == {5: 3}
    assert (told.stopping.max_tokens, told.stopping.min_tokens, told.stopping.ignore_eos) == (9, 2, True)
    assert list(told.stopping.stop_ids) == [13]
    assert default.sampling.temperature == 1
    assert default.sampling.top_p == 1
    assert default.sampling.repetition_penalty == 1
    assert list(default.stopping.eos_ids) == [900]


@pytest.mark.parametrize("mode", MODES)
async def test_a_models_own_sampling_is_for_those_who_say_nothing_of_it(lab: Lab, mode: str) -> None:
    await lab.worker(model="toy-sampling")
    for params in ({"n": 2, "seed": 4}, {"temperature": 0}, {"top_p": 0.5}):
        (await lab.ask(f"go {mode}", params, mode=mode)).succeeded()
    default, greedy, other = (entry.submit.sampling for entry in lab.journal)
    assert (default.temperature, default.top_k, default.top_p) == (0.25, 7, 1)
    assert (greedy.temperature, greedy.top_k, greedy.top_p) == (0, 0, 1)
    assert (other.temperature, other.top_k, other.top_p) == (1, 0, 0.5)
