"""What each lever saved, as every way of asking tells it: HTTP, gRPC, and the command that reads the ledger itself."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.v1 import router_pb2, router_pb2_grpc, types_pb2
from tests.support.clients import http
from tests.support.mesh import Mesh
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

SMART = """
[[aliases]]
name = "smart"
shadow_share = 1.0
[[aliases.variants]]
model = "large"
[[aliases.variants]]
model = "small"
"""


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    worker = {
        "address": "127.0.0.1:0",
        "metrics_address": "127.0.0.1:0",
        "model": "large",
        "engine": "sim",
        "sim_step_ms": 8.0,
    }
    mesh = Mesh(tmp_path, [ToyModel("large"), ToyModel("small")], aliases=SMART, worker=worker).start()
    try:
        small = mesh.launch(
            "worker", key="small", scheduler=mesh.scheduler, cache=mesh.cache, model="small", sim_step_ms=1.0
        )
        small.ready()
        yield mesh
    finally:
        mesh.kill()


async def ask(mesh: Mesh, model: str, prompt: str, **headers: str) -> dict[str, str]:
    body = {"model": model, "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    status, headers, said = await http(mesh.http, "POST", "/v1/completions", body, headers)
    assert status == 200, said
    return headers


async def by_model(mesh: Mesh) -> dict[str, dict[str, Any]]:
    status, _, said = await http(mesh.http, "GET", "/v1/usage?by=model")
    assert status == 200, said
    return {line["model"]: line for line in [*said["data"], {"model": "all"} | said["total"]]}


async def test_what_levers_saved_is_told_alike_everywhere(mesh: Mesh) -> None:
    async def priced() -> bool:
        """Both have been measured, and what is asked from now on has a price."""
        for model in ("large", "small"):
            await ask(mesh, model, "measured", **{"x-headrace-cache": "bypass"})
        used = await by_model(mesh)
        return all(used.get(model, {}).get("dollars", 0) > 0 for model in ("large", "small"))

    await eventually(priced, "tokens have a price", 30.0)
    tolerant = {"x-headrace-quality": "tolerant"}
    assert (await ask(mesh, "smart", "asked once", **tolerant))["x-headrace-variant"] == "small"

    async def told() -> dict[str, Any] | None:
        used = await by_model(mesh)
        # Its shadow has a row too, by the time that it costs something.
        return used if used.get("smart", {}).get("requests") == 1 and used["all"]["shadow_dollars"] > 0 else None

    first = await eventually(told, "it is in the ledger, and its shadow")
    smart = first["smart"]
    assert smart["response_cache_saved_dollars"] == smart["batch_saved_dollars"] == smart["shadow_dollars"] == 0
    # A step of the large one takes eight times as long.
    assert 4 * smart["dollars"] < smart["variants_saved_dollars"] < 12 * smart["dollars"]
    assert (await ask(mesh, "smart", "asked once", **tolerant))["x-headrace-cached"] == "true"

    async def again() -> dict[str, Any] | None:
        used = await by_model(mesh)
        return used if used["smart"]["requests"] == 2 else None

    then = await eventually(again, "the stored answer is in the ledger")
    smart = then["smart"]
    assert smart["dollars"] == first["smart"]["dollars"], "it cost nothing"
    assert smart["response_cache_saved_dollars"] > 0
    assert smart["variants_saved_dollars"] > first["smart"]["variants_saved_dollars"]

    async with grpc.aio.insecure_channel(mesh.grpc) as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        asked = router_pb2.ShowUsageRequest(question=types_pb2.UsageQuestion(by=["model"]))
        lines = {line.group["model"]: line for line in (await stub.ShowUsage(asked)).report.lines}
    command = [sys.executable, "-P", "-m", "headrace", "usage", "--by", "model", "--json", "--config"]
    process = await asyncio.create_subprocess_exec(
        *command, str(mesh.folder / "scheduler.toml"), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    (read,) = [line for line in json.loads(out)["lines"] if line["model"] == "smart"]
    for lever in ("prefix_cache", "response_cache", "variants", "batch"):
        name = f"{lever}_saved_dollars"
        assert getattr(lines["smart"], name) == smart[name] == read[name]
