"""A request that can't have its first token when its own target says so is refused, with a hint when to come again, at
both doors; its time counts from when it came to the router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from headrace.client import Client, ClientError
from tests.support.mesh import Lab, Mesh
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

#: A second of prefill, by the worker's cost table, and next to nothing.
LONG, SHORT = "long " * 2400, "short " * 40
TARGET_S = 1.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    worker = {
        "engine": "sim",
        "model": "toy",
        "sim_cost_table": "a100-llama3-8b",
        "kv_tokens": 131072,
        "chunk_tokens": 2048,
    }
    folder: Path = tmp_path_factory.mktemp("mesh")
    mesh = Mesh(folder, [ToyModel("toy", context_tokens=16384)], worker=worker).start()
    yield mesh
    mesh.stop()


@asynccontextmanager
async def busy(lab: Lab, client: Client) -> AsyncIterator[None]:
    """Work of a higher class for many seconds: whatever else comes waits."""

    async def one(number: int) -> None:
        await client.complete(
            text=f"{number} {LONG}", model="toy", max_tokens=1, request_class="interactive", bypass_cache=True
        )

    tasks = [asyncio.create_task(one(number)) for number in range(5)]

    async def waits() -> bool:
        return (await lab.fleet()).queued_asks > 0

    try:
        await eventually(waits, "some of them wait in the scheduler")
        yield
    finally:
        await asyncio.gather(*tasks)


async def test_what_its_target_rules_out_is_refused_with_a_hint(mesh: Mesh) -> None:
    lab = Lab(mesh)
    await lab.sees("toy", 1)
    async with grpc.aio.insecure_channel(mesh.grpc) as channel:
        client = Client(channel=channel)
        # Until the scheduler trusts its predictions, nothing is held back or refused by them.
        for _ in range(4):
            await client.complete(text=SHORT, model="toy", max_tokens=24, ignore_eos=True, bypass_cache=True)
        # With time enough it is served, target or not.
        await client.complete(text=SHORT, model="toy", max_tokens=2, ttft_target_s=30.0, bypass_cache=True)
        async with busy(lab, client):
            began_s = time.monotonic()
            by_grpc = asyncio.create_task(
                client.complete(text=SHORT, model="toy", max_tokens=2, ttft_target_s=TARGET_S, bypass_cache=True)
            )
            body = {"model": "toy", "messages": [{"role": "user", "content": SHORT}], "max_tokens": 2}
            status, headers, said = await lab.post(
                "/v1/chat/completions", body, {"x-headrace-ttft-ms": str(round(TARGET_S * 1000))}
            )
            assert (status, said["error"]["code"]) == (429, "overloaded"), said
            assert 1 <= int(headers["retry-after"]) <= 60
            with pytest.raises(ClientError) as refused:
                await by_grpc
            assert (refused.value.code, refused.value.status) == ("overloaded", grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert refused.value.retry_after_s is not None
            assert 0 < refused.value.retry_after_s <= 60
            # When it was certain, not when its turn came.
            assert time.monotonic() - began_s < TARGET_S + 2.0
            # Who asked for no target is served late instead.
            answer = await client.complete(text=SHORT, model="toy", max_tokens=2, bypass_cache=True)
            assert len(answer.choices[0].ids) == 2
    await lab.close()
