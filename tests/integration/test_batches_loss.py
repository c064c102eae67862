"""A batch outlives every service: each is killed in turn while it runs, and each of its lines appears once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from headrace.batches.client import STATUSES, BatchClient
from headrace.client import Client, ClientError
from headrace.v1 import batches_pb2
from tests.support.mesh import Mesh
from tests.support.servers import postgres_server
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

T = TypeVar("T")

# The real model's worker takes its time to start again.
pytestmark = pytest.mark.timeout(600)

SERVICES = ("worker", "scheduler", "router", "cache")


def make_mesh(folder: Path, engine: str, **batches: Any) -> Mesh:
    real = engine == "llama_cpp"
    sim = {"sim_step_ms": 2.0, "sim_prefill_tokens_per_s": 1e6}
    return Mesh(
        folder,
        [] if real else [ToyModel("model", context_tokens=256)],
        sources={"model": "embedded"} if real else {},
        batches={"data_dir": str(folder / "data"), "lease_s": 1.0} | batches,
        scheduler={"router_grace_s": 0.5},
        worker={
            "address": "127.0.0.1:0",
            "metrics_address": "127.0.0.1:0",
            "model": "model",
            "engine": engine,
            "slots": 8,
        }
        | ({"kv_tokens": 2048} if real else sim),
    )


@pytest.fixture(params=["sim", pytest.param("llama_cpp", marks=pytest.mark.model)])
def mesh(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mesh]:
    mesh = make_mesh(tmp_path, request.param).start()
    yield mesh
    mesh.stop()


async def restart(mesh: Mesh, name: str) -> None:
    """Kills it without a word, and starts it again where it was."""
    await asyncio.to_thread(mesh.processes[name].kill)
    assert mesh.tap is not None
    where = {
        "cache": {"address": mesh.cache},
        "scheduler": {"address": mesh.scheduler, "cache": mesh.cache},
        "worker": {"scheduler": mesh.scheduler, "cache": mesh.cache},
        "router": {
            "http_address": mesh.http,
            "grpc_address": mesh.grpc,
            "scheduler": mesh.tap.address,
            "cache": mesh.cache,
        },
    }
    process = mesh.launch(name, **where[name])
    mesh.ready[name] = await asyncio.to_thread(process.ready, 120.0)


async def when_there(call: Awaitable[T]) -> T | None:
    """What is answered; None while nobody does."""
    try:
        return await call
    except ClientError as error:
        if error.code != "unavailable":
            raise
        return None


async def test_each_line_appears_once_whatever_is_killed(mesh: Mesh, slow: bool, tmp_path: Path) -> None:
    # Where there is a toy, it is quick.
    count = (2000 if slow else 800) if mesh.models else (200 if slow else 60)
    file = written(tmp_path / "in.jsonl", count)
    async with Client(mesh.grpc) as connection:
        client = BatchClient(connection)

        async def uploaded() -> Any:
            return await when_there(client.upload(file))

        sent = await eventually(uploaded, "the store is open")
        batch = await client.create(sent.id, "/v1/completions")

        async def now() -> batches_pb2.Batch | None:
            return await when_there(client.get(batch.id))

        for at, name in enumerate(SERVICES, start=1):

            async def far(at: int = at) -> bool:
                found = await now()
                return found is not None and found.request_counts.completed >= count * at // (len(SERVICES) + 1)

            await eventually(far, f"{at} of {len(SERVICES) + 1} parts are done", 120.0)
            await restart(mesh, name)

        async def over() -> Any:
            found = await now()
            return found if found is not None and found.status == batches_pb2.BATCH_STATUS_COMPLETED else None

        done = await eventually(over, "the batch is completed", 120.0)
        assert STATUSES[done.status] == "completed"
        await client.download(done.output_file_id, tmp_path / "out.jsonl")
    assert_each_once(done, tmp_path / "out.jsonl", count)


async def test_routers_that_share_a_database_go_on_where_another_was_killed(tmp_path: Path) -> None:
    count = 800
    file = written(tmp_path / "in.jsonl", count)
    with postgres_server(tmp_path) as url:
        mesh = make_mesh(tmp_path, "sim", database=url).start()
        try:
            assert mesh.tap is not None
            mesh._settings["batches"]["data_dir"] = str(tmp_path / "other")
            other = mesh.launch("router", key="other", scheduler=mesh.tap.address, cache=mesh.cache)
            second = (await asyncio.to_thread(other.ready))["grpc"]
            async with Client(mesh.grpc) as one, Client(second) as two:
                clients = [BatchClient(one), BatchClient(two)]
                sent = await eventually(lambda: when_there(clients[0].upload(file)), "the store is open")
                # Asked for at the one, created at the other, and worked at by either.
                batch = await eventually(
                    lambda: when_there(clients[1].create(sent.id, "/v1/completions")), "the other store is open"
                )

                async def half() -> bool:
                    return (await clients[1].get(batch.id)).request_counts.completed >= count // 2

                await eventually(half, "half of it is done", 60.0)
                runner = await runs(url)
                first = f"-{mesh.processes['router'].pid}-" in runner
                killed, left = ("router", clients[1]) if first else ("other", clients[0])
                await asyncio.to_thread(mesh.processes[killed].kill)

                async def over() -> Any:
                    found = await left.get(batch.id)
                    return found if found.status == batches_pb2.BATCH_STATUS_COMPLETED else None

                done = await eventually(over, "the batch is completed", 60.0)
                await left.download(done.output_file_id, tmp_path / "out.jsonl")
            assert_each_once(done, tmp_path / "out.jsonl", count)
        finally:
            mesh.kill()


async def runs(url: str) -> str:
    """Who has the only batch."""
    import psycopg

    def ask() -> str:
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT owner FROM headrace_batches.batches").fetchone()
        assert row is not None
        return str(row[0])

    return await asyncio.to_thread(ask)


def written(file: Path, count: int) -> Path:
    """A batch's input."""
    body = {"model": "model", "max_tokens": 24, "ignore_eos": True}
    asked = {"method": "POST", "url": "/v1/completions"}
    texts = (asked | {"custom_id": f"c{at}", "body": body | {"prompt": f"prompt {at}"}} for at in range(count))
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return file


def assert_each_once(done: batches_pb2.Batch, output: Path, count: int) -> None:
    assert (done.request_counts.completed, done.request_counts.failed) == (count, 0)
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"c{number}" for number in range(count)]
    for answer in answers:
        assert answer["response"]["body"]["usage"]["completion_tokens"] == 24
    assert done.usage.completion_tokens == 24 * count
