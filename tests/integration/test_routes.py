"""Names that several variants serve: who is asked, who may serve instead, and what the answer says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace import routing
from headrace.v1 import router_pb2, types_pb2
from tests.support.clients import MODES
from tests.support.mesh import Lab, Mesh
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

MODELS = (
    ToyModel("large"),
    ToyModel("small"),
    # Other words: what it is asked is other ids.
    ToyModel("odd", pieces={300: b"ok"}),
    ToyModel("new"),
)


def alias(name: str, *variants: str, **settings: object) -> str:
    """`variants`: TOML of each; `settings`: TOML of the alias."""
    head = "".join(f"{key} = {value}\n" for key, value in ({"shadow_share": 0.0, "floor": 0.0} | settings).items())
    tables = "".join(f"[[aliases.variants]]\n{variant}\n" for variant in variants)
    return f'[[aliases]]\nname = "{name}"\n{head}{tables}'


def model(name: str, **settings: object) -> str:
    return f'model = "{name}"\n' + "".join(f"{key} = {value}\n" for key, value in settings.items())


EASY, HARD = {"threshold": 0.0}, {"threshold": 1.0}
CHAIN = '["small", "odd", "cached", "degraded"]'
ALIASES = (
    alias("easy", model("large"), model("small", **EASY))
    + alias("hard", model("large"), model("small", **HARD))
    + alias("chain", model("large"), model("small", **HARD), model("odd", **HARD), fallback=CHAIN, fallback_after_s=0.3)
    + alias(
        "watched",
        model("large"),
        model("small", **EASY),
        shadow_share=1.0,
        shadows_at_once=4,
        floor=0.9,
        shadow_deadline_s=1.0,
        escalate='"refusal"',
    )
    + alias("unsure", model("large"), model("small", **EASY), escalate_below=0.5, escalate_tokens=4)
    + alias("trial", model("large"), model("new", canary_of='"large"', weight=1.0))
)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("routes")
    router = {"place_attempts": 2, "shadow_log": str(folder / "shadows.jsonl")}
    mesh = Mesh(folder, MODELS, aliases=ALIASES, router=router).start()
    yield mesh
    mesh.stop()


async def served(lab: Lab, name: str, text: str = "go", headers: dict[str, str] | None = None) -> tuple[str, str, str]:
    """The answer's text, who gave it, and why not the one it was meant for."""
    body = {"model": name, "prompt": text, "max_tokens": 8, "temperature": 0}
    status, answered, content = await lab.post("/v1/completions", body, headers)
    assert status == 200, content
    assert content["model"] == name
    return content["choices"][0]["text"], answered["x-headrace-variant"], answered.get("x-headrace-fallback", "")


async def test_a_request_goes_where_its_difficulty_and_its_wish_say(lab: Lab) -> None:
    await lab.worker("large")
    await lab.worker("small")
    for name, wish, variant in [
        ("easy", "", "small"),
        ("easy", "full", "large"),
        ("hard", "", "large"),
        ("hard", "tolerant", "small"),
    ]:
        lab.play(f"'{variant}'; END")
        headers = {"x-headrace-quality": wish} if wish else {}
        assert await served(lab, name, f"{name} {wish}", headers) == (variant, variant, "")
        assert lab.journal[-1].worker.model.name == variant
    assert (await lab.metrics())['headrace_router_routed_total{model="hard",variant="small",why="tolerant"}'] == 1


async def test_both_doors_know_the_name_and_its_variants(lab: Lab) -> None:
    await lab.worker("small")
    await lab.worker("large")
    lab.client.model = "easy"
    for mode in MODES:
        lab.play("'ok'; END")
        assert (await lab.ask(f"by {mode}", mode=mode)).succeeded().text == "ok"
    listed = await lab.client.stub.ListModels(router_pb2.ListModelsRequest())
    first = listed.models[0]
    assert (first.name, list(first.variants), first.ready_workers) == ("easy", ["large", "small"], 2)
    _, _, content = await lab.get("/v1/models")
    names = [each["id"] for each in content["data"]]
    assert names == ["easy", "hard", "chain", "watched", "unsure", "trial", "large", "small", "odd", "new"]
    request = router_pb2.GenerateRequest(model="easy", text="who", quality=router_pb2.QUALITY_FULL)
    lab.play("'ok'; END")
    [usage] = [event.usage async for event in lab.client.stub.Generate(request) if event.HasField("usage")]
    assert (usage.variant, usage.fallback) == ("large", "")
    status, _, content = await lab.post("/v1/completions", {"model": "easy", "prompt": "x", "quality": "best"})
    assert (status, content["error"]["param"]) == (400, "quality")


async def test_a_better_variant_serves_when_the_chosen_one_has_no_room(lab: Lab) -> None:
    await lab.worker("small", slots=1)
    await lab.worker("large", slots=1)
    lab.bench.play_for("first", "'one'; END", gated=True)
    lab.client.model = "easy"
    first = await lab.open("first", mode="stream")
    held = await lab.entry()
    assert held.worker.model.name == "small"
    lab.play("'two'; END")
    assert await served(lab, "easy", "second") == ("two", "large", "overloaded")
    held.release(3)
    (await first.rest()).succeeded()


async def test_no_worse_variant_serves_unless_it_is_named(lab: Lab) -> None:
    await lab.worker("small")
    body = {"model": "hard", "prompt": "x", "max_tokens": 4}
    status, _, content = await lab.post("/v1/completions", body)
    assert (status, content["error"]["code"]) == (503, "unavailable")
    lab.play("'ok'; END")
    assert await served(lab, "chain") == ("ok", "small", "failed")
    status, _, _ = await lab.post("/v1/completions", body | {"model": "chain"}, {"x-headrace-quality": "full"})
    assert status == 503


async def test_who_has_no_room_in_time_is_passed_over(lab: Lab) -> None:
    await lab.worker("large", slots=1)
    await lab.worker("odd", slots=1)
    lab.bench.play_for("first", "'one'; END", gated=True)
    lab.client.model = "chain"
    first = await lab.open("first", mode="stream")
    held = await lab.entry()
    lab.play("[300]; END")
    assert await served(lab, "chain", "second") == ("ok", "odd", "overloaded")
    held.release(3)
    (await first.rest()).succeeded()


@pytest.mark.parametrize("fault", ["DIE", "ERR:INTERNAL"])
async def test_a_variant_that_fails_is_followed_by_the_next(lab: Lab, fault: str) -> None:
    await lab.worker("large")
    await lab.worker("small")
    lab.play(fault)
    lab.play("'next'; END")
    assert await served(lab, "chain", fault) == ("next", "small", "failed")
    assert [entry.worker.model.name for entry in lab.journal] == ["large", "small"]


async def test_what_has_begun_stays_with_its_variant(lab: Lab) -> None:
    await lab.worker("large")
    await lab.worker("small")
    lab.client.model = "chain"
    lab.play("'ab'; DIE")
    answer = await lab.ask("begun", mode="stream")
    answer.broken("worker_lost")
    assert answer.text == "ab"
    assert [entry.worker.model.name for entry in lab.journal] == ["large"]


async def test_when_nobody_serves_a_stored_answer_does_and_then_a_text(lab: Lab) -> None:
    small = await lab.worker("small")
    lab.play("'kept'; END")
    assert await served(lab, "chain", "asked before") == ("kept", "small", "failed")
    await small.stop()
    lab.workers.remove(small)
    await lab.sees("small", 0)
    assert await served(lab, "chain", "asked before") == ("kept", "small", "cached")
    text, variant, why = await served(lab, "chain", "never asked")
    assert (text, variant, why) == ("The serv", "", "degraded")


async def test_an_answer_of_another_variant_is_not_stored_under_the_chosen_ones_name(lab: Lab) -> None:
    await lab.worker("small", slots=1)
    await lab.worker("large", slots=1)
    lab.bench.play_for("first", "'one'; END", gated=True)
    lab.client.model = "easy"
    first = await lab.open("first", mode="stream")
    held = await lab.entry()
    lab.play("'two'; END")
    assert await served(lab, "easy", "again") == ("two", "large", "overloaded")
    held.release(3)
    (await first.rest()).succeeded()
    lab.play("'small'; END")
    assert await served(lab, "easy", "again") == ("small", "small", "")


async def test_a_new_version_gets_its_share_only_when_it_is_there(lab: Lab) -> None:
    await lab.worker("large")
    lab.play("'old'; END")
    assert await served(lab, "trial", "cold") == ("old", "large", "")
    await lab.worker("new")
    lab.play("'new'; END")
    assert await served(lab, "trial", "warm") == ("new", "new", "")


async def test_a_new_version_that_fails_is_taken_back(lab: Lab) -> None:
    await lab.worker("large")
    await lab.worker("new")
    failures = 0
    while (new := (await state(lab, "trial"))["variants"][1])["rolled_back"] is None:
        lab.play("ERR:INTERNAL")
        lab.play("'old'; END")
        assert await served(lab, "trial", f"failing {failures}") == ("old", "large", "failed")
        failures += 1
        assert failures <= 12
    assert "requests failed" in new["rolled_back"]
    assert new["share"] == 0.0
    lab.play("'old'; END")
    assert await served(lab, "trial", "taken back") == ("old", "large", "")
    assert lab.journal[-1].worker.model.name == "large"


async def state(lab: Lab, name: str) -> dict[str, Any]:
    status, _, content = await lab.get("/routes")
    assert status == 200
    return next(alias for alias in content["aliases"] if alias["name"] == name)


async def compared(lab: Lab, samples: int) -> dict[str, Any]:
    async def enough() -> dict[str, Any]:
        small = (await state(lab, "watched"))["variants"][1]
        return small if small["agreement"]["samples"] >= samples else {}

    return await eventually(enough, f"{samples} comparisons")


async def test_what_a_smaller_variant_answers_is_compared_and_moves_its_threshold(lab: Lab, mesh: Mesh) -> None:
    await lab.worker("large")
    await lab.worker("small")
    before = await lab.metrics()
    for number in range(20):
        lab.play("'a b'; END")
        lab.play("'a c'; END")
        assert await served(lab, "watched", f"secret {number}") == ("a b", "small", "")
        await compared(lab, number + 1)
    small = await compared(lab, 20)
    assert small["agreement"]["mean"] == pytest.approx(0.5)
    # Under the floor of 0.9: one step up from 0.
    assert small["threshold"] == pytest.approx(0.05)
    after = await lab.metrics()
    shadow = 'headrace_router_tokens_total{model="watched",kind="shadow_completion"}'
    assert after[shadow] - before.get(shadow, 0) == 20 * 3
    told = 'headrace_router_tokens_total{model="watched",kind="completion"}'
    assert after[told] - before.get(told, 0) == 20 * 3
    asks = [ask for ask in lab.books.asks.values() if ask.shadow]
    assert len(asks) == 20
    assert {(ask.tenant, getattr(ask, "class")) for ask in asks} == {("", types_pb2.REQUEST_CLASS_BATCH)}
    lines = [json.loads(line) for line in (mesh.folder / "shadows.jsonl").read_text().splitlines()]
    assert {line["agreement"] for line in lines} == {0.5}
    assert "secret" not in str(lines)
    features, agreements, _ = routing.read_examples([mesh.folder / "shadows.jsonl"])
    assert (len(features), set(agreements)) == (20, {0.5})


async def test_a_shadow_that_finds_no_worker_is_given_up_and_nobody_waits_for_it(lab: Lab) -> None:
    await lab.worker("small")
    lost = (await state(lab, "watched"))["shadows_lost"]
    lab.play("'a'; END")
    assert await served(lab, "watched", "alone", {"x-headrace-quality": "tolerant"}) == ("a", "small", "")

    async def given_up() -> bool:
        return bool((await state(lab, "watched"))["shadows_lost"] == lost + 1)

    await eventually(given_up, "the shadow is given up")


async def test_a_refusal_is_answered_again_by_the_best_one_where_it_is_wished(lab: Lab) -> None:
    await lab.worker("large")
    await lab.worker("small")
    refusal = "I cannot"
    lab.play(f"'{refusal}'; END")
    lab.play("'gladly'; END")
    tolerant = {"x-headrace-quality": "tolerant"}
    assert await served(lab, "watched", "refused", tolerant) == ("gladly", "large", "refusal")
    lab.play(f"'{refusal}'; END")
    assert await served(lab, "easy", "refused") == (refusal, "small", "")


#: Log-probabilities of as many ids of which the model is sure; the scripted worker's own are those of one that is not.
SURE = dict.fromkeys(range(8), -0.1)
LOW = 'headrace_router_fallbacks_total{model="unsure",reason="low_confidence"}'


async def test_where_the_model_is_not_sure_the_best_one_answers_and_both_are_paid_for(lab: Lab) -> None:
    await lab.worker("large")
    await lab.worker("small")
    before = (await lab.metrics()).get(LOW, 0)
    for number, mode in enumerate(MODES):
        lab.client.model = "unsure"
        # It would go on: it is stopped as soon as it is known, and nothing of it is shown.
        lab.play("'ab'; 'cde'; HANG")
        lab.play("'gladly'; END")
        answer = (await lab.ask(f"asked by {mode}", {"temperature": 0}, mode=mode)).succeeded()
        assert (answer.text, answer.logprobs.get(0, [])) == ("gladly", [])
        small, large = await lab.entry(2 * number), await lab.entry(2 * number + 1)
        await small.ended()
        assert small.cancelled
        assert [entry.worker.model.name for entry in (small, large)] == ["small", "large"]
        assert (small.submit.logprobs.enabled, large.submit.logprobs.enabled) == (True, False)
        assert answer.usage == (len(large.submit.prompt_ids), 6, len(large.submit.prompt_ids) + 6)
    assert (await lab.metrics())[LOW] - before == len(MODES)

    async def settled() -> bool:
        return len(lab.books.settlements) == 2 * len(MODES)

    await eventually(settled, "all are settled")
    paid = [(each.pool, each.usage.completion_tokens, each.best_pool) for each in lab.books.settlements]
    # What was rejected saved nothing.
    assert paid == [("small", 5, ""), ("large", 6, "large")] * len(MODES)
    body = {"model": "unsure", "prompt": "who", "max_tokens": 8}
    for stream in (False, True):
        lab.play("'abcd'; HANG")
        lab.play("'ok'; END")
        _, headers, _ = await lab.post("/v1/completions", body | {"stream": stream})
        assert (headers["x-headrace-variant"], headers["x-headrace-fallback"]) == ("large", "low_confidence")


@pytest.mark.parametrize("mode", MODES)
async def test_where_it_is_sure_its_answer_stands_and_goes_on_at_once(lab: Lab, mode: str) -> None:
    await lab.worker("large")
    await lab.worker("small")
    lab.client.model = "unsure"
    lab.play("'ab'; 'cd'; 'ef'; END", gated=True, logprobs=SURE)
    answer = await lab.open("go", mode=mode)
    entry = await lab.entry()
    entry.release(2)
    if mode != "plain":
        shown = await answer.piece()
        while shown != "abcd":
            shown = (shown or "") + (await answer.piece() or "")
            assert "abcd".startswith(shown)
        entry.release()
        assert await answer.piece() == "ef"
    entry.release(2)
    assert (await answer.rest()).succeeded().text == "abcdef"
    assert len(lab.journal) == 1
    assert answer.answer.logprobs.get(0, []) == []


async def test_a_short_answer_is_judged_at_its_end_and_again_when_it_is_given_again(lab: Lab) -> None:
    await lab.worker("large")
    await lab.worker("small")
    lab.play("'no'; END")
    lab.play("'yes'; END")
    assert await served(lab, "unsure", "short") == ("yes", "large", "low_confidence")
    assert await served(lab, "unsure", "short") == ("yes", "large", "cached")
    assert len(lab.journal) == 2
    lab.play("'so'; END", logprobs=SURE)
    assert await served(lab, "unsure", "sure") == ("so", "small", "")
    assert await served(lab, "unsure", "sure") == ("so", "small", "")
    assert len(lab.journal) == 3


async def test_log_probabilities_that_were_asked_for_are_those_of_who_answers(lab: Lab) -> None:
    await lab.worker("large")
    await lab.worker("small")
    lab.client.model = "unsure"
    for script, how, shown in [("'abcd'; HANG", {}, "yes"), ("'abcd'; END", {"logprobs": SURE}, "abcd")]:
        lab.play(script, **how)
        if shown == "yes":
            lab.play("'yes'; END")
        answer = (await lab.ask("go", {"logprobs": True, "top_logprobs": 2}, mode="stream")).succeeded()
        assert answer.text == shown
        assert "".join(entry["token"] for entry in answer.logprobs[0]) == shown
        assert {len(entry["top_logprobs"]) for entry in answer.logprobs[0]} == {2}


async def test_without_the_best_one_what_there_is_stands(lab: Lab) -> None:
    await lab.worker("small")
    lab.play("'abcdef'; END")
    assert await served(lab, "unsure", "without it") == ("abcdef", "small", "")
    assert lab.journal[-1].submit.logprobs.enabled
    await lab.worker("large")
    lab.play("'no'; END")
    lab.play("ERR:INTERNAL")
    # It fails: the smaller one's answer, which is stored by now, is given without being judged once more.
    assert await served(lab, "unsure", "failing") == ("no", "small", "")
    assert [entry.worker.model.name for entry in lab.journal] == ["small", "small", "large"]


async def test_what_is_held_when_the_deadline_passes_is_shown(lab: Lab) -> None:
    await lab.worker("large")
    await lab.worker("small")
    lab.client.model = "unsure"
    lab.play("'ab'; HANG")
    answer = await lab.ask("go", mode="stream", headers={"x-headrace-deadline-ms": "300"})
    answer.broken("deadline_exceeded")
    assert answer.text == "ab"


async def test_a_worker_that_is_lost_while_its_answer_is_held_is_followed_by_another(lab: Lab) -> None:
    await lab.worker("large")
    await lab.worker("small")
    await lab.worker("small")
    lab.client.model = "unsure"
    lab.play("'ab'; DIE", logprobs=SURE)
    lab.play("'cd'; 'ef'; END", logprobs=SURE)
    answer = (await lab.ask("go", mode="stream")).succeeded()
    assert answer.text == "abcdef"
    assert [entry.worker.model.name for entry in lab.journal] == ["small", "small"]


async def test_changed_aliases_come_into_force_and_wrong_ones_do_not(lab: Lab, mesh: Mesh) -> None:
    await lab.worker("large")
    file = mesh.folder / "router.toml"
    former = file.read_text()

    async def names() -> list[str]:
        _, _, content = await lab.get("/routes")
        return [alias["name"] for alias in content["aliases"]]

    async def named(name: str, *, there: bool) -> bool:
        return (name in await names()) == there

    try:
        file.write_text(former.replace('name = "hard"', 'name = "harder"'))
        await eventually(lambda: named("harder", there=True), "the fresh alias")
        assert "hard" not in await names()
        lab.play("'ok'; END")
        assert (await served(lab, "harder"))[1] == "large"
        file.write_text(former.replace('name = "hard"', 'name = "easy"'))

        async def told() -> bool:
            return "the former aliases stay in force" in mesh.processes["router"].tail()

        await eventually(told, "the router tells of it")
        assert "harder" in await names()
    finally:
        file.write_text(former)
        await eventually(lambda: named("hard", there=True), "the former alias")
