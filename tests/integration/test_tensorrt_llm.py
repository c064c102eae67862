"""The whole mesh before a worker with the tensorrt_llm engine, on the stand-in."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import MODELS
from tests.support import standin
from tests.support.clients import MODES
from tests.support.mesh import Lab, Mesh
from tests.support.waiting import eventually

WORKER = {"address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0", "engine": "tensorrt_llm", "model": "toy-roles"}


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    """Ids of the stand-in's model are the toy model's bytes of ASCII."""
    environment = standin.environment(vocab_size=127, step_s=0.002)
    mesh = Mesh(tmp_path, MODELS, worker=WORKER | {"slots": 8}, environment=environment).start()
    yield mesh
    mesh.stop() if mesh.processes["worker"].popen.poll() is None else mesh.kill()


def _child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


async def test_chats_come_to_their_end_and_reuse_what_was_said(mesh: Mesh) -> None:
    lab = Lab(mesh)
    lab.client.model = "toy-roles"
    try:
        await lab.sees("toy-roles", 1)
        texts = set()
        for mode in MODES:
            # Seeded: even this model draws another id than its likeliest now and then.
            answer = await lab.ask("x" * 60, {"max_tokens": 12, "seed": 5}, mode=mode)
            assert answer.finishes == {0: "length"}
            assert answer.usage is not None
            assert answer.usage[1] == 12
            texts.add(answer.text)
        assert len(texts) == 1
        more = await lab.ask("x" * 60 + "y" * 20, {"max_tokens": 3}, mode=MODES[0])
        assert more.cached_tokens is not None
        assert more.cached_tokens >= 48
        await lab.nothing_remains()
    finally:
        await lab.close(check=False)


async def test_a_killed_engine_costs_its_streams_and_takes_its_worker_with_it(mesh: Mesh) -> None:
    lab = Lab(mesh)
    lab.client.model = "toy-roles"
    try:
        await lab.sees("toy-roles", 1)
        answer = await lab.open("x", {"max_tokens": 400}, mode="stream")
        assert await answer.piece()
        worker = mesh.processes["worker"]
        os.kill(_child_of(worker.pid), signal.SIGKILL)
        whole = await answer.rest()
        whole.broken("worker_lost")

        async def ended() -> bool:
            return worker.popen.poll() is not None

        await eventually(ended, "the worker's end")
        assert worker.popen.returncode != 0
        assert "killed by SIGKILL" in worker.tail()
        await lab.sees("toy-roles", 0)
    finally:
        await lab.close(check=False)
