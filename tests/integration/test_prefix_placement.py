"""Requests go to the worker that holds the beginning of their prompt, by the cache's news: placed by the router within
its shares, or asked for at the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from headrace import _gateway
from headrace.v1 import cache_pb2, cache_pb2_grpc
from tests.conftest import CALL_FAILED
from tests.support.mesh import Lab, Mesh
from tests.support.scripted import BLOCK_TOKENS, ScriptedWorker
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

HEAD = "all of these begin alike. " * 40


@pytest.fixture(scope="module", params=[True, False], ids=["shares", "asks"])
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder: Path = tmp_path_factory.mktemp("mesh")
    mesh = Mesh(folder, [ToyModel("toy", context_tokens=4096)], scheduler={"credits": request.param}).start()
    yield mesh
    mesh.stop()


@pytest.fixture
async def lab(mesh: Mesh, request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    lab = Lab(mesh)
    yield lab
    await lab.close(check=not request.node.stash.get(CALL_FAILED, False))


class Publisher:
    """The block news of a scripted worker."""

    def __init__(self, lab: Lab, worker: ScriptedWorker) -> None:
        self._channel = grpc.aio.insecure_channel(lab.mesh.cache)
        self._call = cache_pb2_grpc.CacheServiceStub(self._channel).PublishBlocks()
        self._hello = cache_pb2.BlocksHello(
            worker_id=worker.worker_id, instance_id=worker.instance_id, pool="toy", next_sequence=1
        )

    async def hold(self, *blocks: int) -> None:
        """The worker holds these, and nothing else."""
        await self._call.write(cache_pb2.PublishBlocksRequest(hello=self._hello))
        assert (await self._call.read()).snapshot
        chain = cache_pb2.BlockEvent.Stored(hashes=blocks)
        snapshot = cache_pb2.BlockSnapshot(next_sequence=1, chains=[chain] if blocks else [])
        await self._call.write(cache_pb2.PublishBlocksRequest(snapshot=snapshot))

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


async def test_the_holder_is_chosen(lab: Lab) -> None:
    workers = [await lab.worker(slots=8) for _ in range(3)]
    await lab.ask(HEAD, mode="plain")
    ids = (await lab.entry()).prompt_ids
    publishers = [Publisher(lab, worker) for worker in workers]
    try:
        for publisher, worker in zip(publishers, workers, strict=True):
            names = _gateway.block_hashes(ids, BLOCK_TOKENS, "toy") if worker is workers[1] else []
            await publisher.hold(*names)

        async def followed() -> bool:
            stats = await lab.cache_stats()
            # Scheduler and router.
            return stats.watchers == 2 and stats.workers == 3 and stats.blocks > 10

        await eventually(followed, "all follow")

        async def chosen() -> bool:
            asked = [await lab.ask(HEAD + f"and end otherwise {turn}", mode="plain") for turn in range(6)]
            assert {answer.status for answer in asked} == {200}
            return all(entry.worker is workers[1] for entry in lab.journal[-6:])

        # News is on its way: a few may go elsewhere.
        await eventually(chosen, "the holder is chosen, time and again")
    finally:
        await asyncio.gather(*(publisher.close() for publisher in publishers))


@pytest.mark.parametrize("mode", ["plain", "grpc"])
async def test_nothing_is_shared_across_salts(lab: Lab, mode: str) -> None:
    """Neither KV nor answers; a request without a salt shares with those that have none."""
    await lab.worker(slots=8)
    text = f"{mode}: {HEAD}"
    for salt in ("a", "a", "b", ""):
        await lab.ask(text, {"cache_salt": salt} if salt else None, mode=mode)
    reused = [entry.cached_prompt_tokens > 0 for entry in lab.journal]
    assert reused == [False, True, False, False]
    salts = [entry.submit.cache_salt for entry in lab.journal]
    assert salts[0] == salts[1]
    assert len({*salts}) == 3
    assert salts[3] == b""
    # The client's own word does not travel.
    assert b"a" not in salts
    fixed = {"temperature": 0}
    for salt in ("a", "b"):
        answer = await lab.ask(text, fixed | {"cache_salt": salt}, mode=mode)
        assert not answer.cached_answer
    assert (await lab.ask(text, fixed | {"cache_salt": "a"}, mode=mode)).cached_answer
