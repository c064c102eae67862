"""A character is wider than a token: text comes out when it is complete, waits while it may still become so, and both
modes agree byte for byte."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.clients import MODES, STREAMED
from tests.support.mesh import Lab
from tests.support.scripted import counting
from tests.support.waiting import eventually

REPLACEMENT = "\ufffd"


@pytest.mark.parametrize("mode", MODES)
async def test_a_character_over_two_steps_comes_whole(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("[240 159]; [153 130]; 'ok'; END")
    answer = (await lab.ask("go", mode=mode)).succeeded()
    assert answer.text == "🙂ok"
    assert answer.deltas[0].startswith("🙂")
    assert not any(REPLACEMENT in piece for _, piece in answer.pieces)
    assert answer.completion_tokens == 6


@pytest.mark.parametrize("mode", STREAMED)
async def test_what_is_complete_is_not_held_back(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("[300]; [301]; END", gated=True)
    answer = await lab.open("go", mode=mode)
    entry = await lab.entry()
    entry.release()
    assert await answer.piece() == "삼"
    entry.release()
    assert await answer.piece() == "겹살"
    entry.release()
    assert (await answer.rest()).succeeded().text == "삼겹살"


@pytest.mark.parametrize("mode", MODES)
async def test_bytes_that_end_incomplete_are_one_replacement(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("[240 159]; END:length")
    answer = (await lab.ask("go", {"max_tokens": 2}, mode=mode)).succeeded()
    assert (answer.text, answer.finish, answer.completion_tokens) == (REPLACEMENT, "length", 2)


@pytest.mark.parametrize("mode", STREAMED)
async def test_a_hopeless_byte_does_not_wait(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("[195]; 'A'; 'B'; END", gated=True)
    answer = await lab.open("go", mode=mode)
    entry = await lab.entry()
    entry.release(2)
    seen = ""
    while seen != REPLACEMENT + "A":
        piece = await answer.piece()
        assert piece is not None
        seen += piece
    entry.release(2)
    assert (await answer.rest()).succeeded().text == REPLACEMENT + "AB"


async def test_a_hopeless_byte_in_a_plain_answer(lab: Lab) -> None:
    await lab.worker()
    lab.play("[195]; 'A'; 'B'; END")
    assert (await lab.ask("go", mode="plain")).succeeded().text == REPLACEMENT + "AB"


@pytest.mark.parametrize("mode", MODES)
async def test_streams_share_no_state(lab: Lab, mode: str) -> None:
    await lab.worker(slots=2)
    lab.bench.play_for("one", "[240 159]; [153 130]; END", gated=True)
    lab.bench.play_for("two", "[153 130]; 'x'; END", gated=True)
    asked = [asyncio.create_task(lab.ask(text, mode=mode)) for text in ("one", "two")]
    entries = {entry.prompt: entry for entry in [await lab.entry(0), await lab.entry(1)]}
    entries["one"].release()
    await eventually(lambda: _sent(entries["one"], 2), "the first half is sent")
    entries["two"].release(3)
    await entries["two"].ended()
    entries["one"].release(2)
    one, two = await asyncio.gather(*asked)
    assert one.succeeded().text == "🙂"
    assert two.succeeded().text == REPLACEMENT * 2 + "x"


async def _sent(entry: object, count: int) -> bool:
    return len(entry.sent) >= count  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", MODES)
async def test_text_is_not_composed(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'e'; [204 129]; END")
    answer = (await lab.ask("go", mode=mode)).succeeded()
    assert answer.text.encode() == bytes([0x65, 0xCC, 0x81])


async def test_a_step_costs_the_same_late_in_a_long_answer(lab: Lab) -> None:
    """By the router's CPU time, which neighbours on the machine do not change."""
    await lab.worker("toy-long")
    steps = 3000
    lab.play(counting(4 * steps, wait_ms=0))
    router = lab.mesh.processes["router"]
    asked = asyncio.create_task(lab.ask("go", {"max_tokens": 4 * steps}, mode="plain", timeout_s=120.0))
    entry = await lab.entry()
    spent = [router.cpu_s()]
    for part in (1, 3, 4):
        await eventually(lambda part=part: _sent(entry, part * steps), f"{part} parts sent", 120.0)
        spent.append(router.cpu_s())
    answer = (await asked).succeeded()
    assert answer.completion_tokens == 4 * steps
    first, last = spent[1] - spent[0], spent[3] - spent[2]
    # Work that grew with what was already said would make it seven times; the clock ticks in hundredths.
    assert last <= 3 * first + 0.1
