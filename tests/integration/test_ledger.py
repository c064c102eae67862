"""What tenants may spend, and the ledger: limits at both doors, answers cut at an allowance, and books that are exact
whatever is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from headrace import tenants
from headrace.ledger import usage
from headrace.ledger.store import Store
from headrace.v1 import router_pb2, router_pb2_grpc, types_pb2
from tests.support.clients import BrokenBody, http
from tests.support.mesh import Mesh, series
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

KEYS: dict[str, str] = {}


def token(size: int) -> str:
    """Not random, so that a failure can be repeated."""
    return f"{len(KEYS) * 7 + size:0{2 * size}x}"


def add(folder: Path, name: str, **how: Any) -> None:
    with tenants.changing(folder / "tenants.json") as known:
        KEYS[name] = tenants.add(known, name, now_s=time.time(), token=token, **how)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder: Path = tmp_path_factory.mktemp("ledger")
    add(folder, "boss", roles=["admin"])
    add(folder, "free")
    add(folder, "minute", limits={"tokens_per_minute": 200})
    add(folder, "day", limits={"tokens_per_day": 300})
    add(folder, "session", limits={"session_tokens": 100})
    add(folder, "single", limits={"concurrent_requests": 1})
    add(folder, "killed", limits={"tokens_per_day": 3000})
    mesh = Mesh(
        folder,
        [ToyModel("toy", context_tokens=2048)],
        tenants={"file": str(folder / "tenants.json")},
        scheduler={"router_grace_s": 1.0},
        # The same for the scheduler that is started again at another port.
        ledger={"name": "one"},
        # Which router is out is told there.
        log_level="info",
        worker={
            "address": "127.0.0.1:0",
            "metrics_address": "127.0.0.1:0",
            "model": "toy",
            "engine": "sim",
            "slots": 16,
            "sim_step_ms": 2.0,
        },
    )
    mesh.start()
    yield mesh
    mesh.stop()


@pytest.fixture
async def up(mesh: Mesh) -> Mesh:
    async def ready() -> bool:
        return (await http(mesh.http, "GET", "/health"))[0] == 200

    await eventually(ready, "the router is ready")
    return mesh


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def ask(
    mesh: Mesh,
    name: str,
    *,
    tokens: int,
    text: str = "go",
    headers: dict[str, str] | None = None,
    door: str = "router",
    **more: Any,
) -> tuple[int, dict[str, str], Any]:
    body = {"model": "toy", "prompt": text, "max_tokens": tokens, "ignore_eos": True, "temperature": 1} | more
    return await http(mesh.ready[door]["http"], "POST", "/v1/completions", body, bearer(name) | (headers or {}))


def rows(mesh: Mesh, tenant: str) -> list[dict[str, Any]]:
    """What the ledger has of a tenant, oldest first."""
    names = "outcome, prompt_tokens, cached_tokens, output_tokens, replayed_output_tokens, nano_dollars, session"
    with contextlib.closing(Store.open(str(mesh.folder / "ledger.db"), "", write=False)) as store:
        found = store.query(f"SELECT {names} FROM requests WHERE tenant = ? ORDER BY placed_ms", (tenant,))
    return [dict(zip(names.split(", "), row, strict=True)) for row in found]


async def written(mesh: Mesh, tenant: str, count: int) -> list[dict[str, Any]]:
    async def there() -> list[dict[str, Any]]:
        found = rows(mesh, tenant)
        return found if len(found) >= count else []

    return await eventually(there, f"{count} rows of {tenant}")


async def test_a_request_is_a_row_with_its_tokens_and_dollars(up: Mesh) -> None:
    status, _, answer = await ask(up, "free", tokens=40, text="once upon", headers={"x-headrace-session": "s1"})
    assert status == 200
    (row,) = await written(up, "free", 1)
    assert (row["outcome"], row["prompt_tokens"], row["output_tokens"]) == (
        "length",
        answer["usage"]["prompt_tokens"],
        40,
    )
    assert row["session"] == "s1"
    # Repeated and deterministic: the second is an answer of the cache, which spends nothing.
    for _ in range(2):
        await ask(up, "free", tokens=30, text="again", temperature=0)
    found = await written(up, "free", 3)
    assert [(row["output_tokens"], row["replayed_output_tokens"]) for row in found[1:]] == [(30, 0), (0, 30)]
    assert found[2]["prompt_tokens"] == 0
    # What steps took has been measured by now, so that tokens have a price.
    await ask(up, "free", tokens=20)
    assert (await written(up, "free", 4))[3]["nano_dollars"] > 0


async def test_the_openai_client_is_told_when_to_come_back(up: Mesh) -> None:
    # Not at a minute's end: both requests must be of one.
    await asyncio.sleep(max(0.0, time.time() % 60 - 50))
    client = openai.AsyncOpenAI(base_url=f"http://{up.http}/v1", api_key=KEYS["minute"], max_retries=0)
    async with client:
        done = await client.completions.create(
            model="toy", prompt="go", max_tokens=150, extra_body={"ignore_eos": True}
        )
        assert done.usage is not None
        assert done.usage.completion_tokens == 150
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="toy", prompt="go", max_tokens=150)
    assert refused.value.code == "rate_limit_exceeded"
    assert "tokens_per_minute: the limit is 200" in refused.value.message
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    assert "x-should-retry" not in refused.value.response.headers


async def test_a_used_up_quota_is_no_reason_to_come_back(up: Mesh) -> None:
    status, _, _ = await ask(up, "day", tokens=200)
    assert status == 200
    # It may have what is left, and ends there: an error after what was shown.
    body = {"model": "toy", "prompt": "go", "max_tokens": 500, "ignore_eos": True, "stream": True, "temperature": 1}
    status, _, events = await http(up.http, "POST", "/v1/completions", body, bearer("day"))
    assert status == 200
    shown = [json.loads(line[6:]) for line in str(events).splitlines() if line.startswith("data: {")]
    assert shown[-1]["error"]["code"] == "insufficient_quota"
    assert len(shown) > 10
    # Until its row is durable, what it cost is held and not spent.
    found = await written(up, "day", 2)
    status, headers, answer = await ask(up, "day", tokens=5)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (
        429,
        "insufficient_quota",
        "insufficient_quota",
    )
    assert "tokens_per_day: the limit is 300; 300 are spent" in answer["error"]["message"]
    assert "retry-after" not in headers
    assert headers["x-should-retry"] == "false"
    assert [row["outcome"] for row in found] == ["length", "budget"]
    assert sum(row["prompt_tokens"] + row["output_tokens"] for row in found) == 300
    async with grpc.aio.insecure_channel(up.grpc) as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        request = router_pb2.GenerateRequest(model="toy", text="go")
        call = stub.Generate(request, metadata=[("authorization", f"Bearer {KEYS['day']}")])

        async def drained() -> None:
            async for _ in call:
                pass

        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await drained()
        assert failed.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "tokens_per_day" in (failed.value.details() or "")


async def test_sessions_and_requests_at_once_have_limits(up: Mesh) -> None:
    one, other = {"x-headrace-session": "one"}, {"x-headrace-session": "other"}
    assert (await ask(up, "session", tokens=90, headers=one))[0] == 200
    await written(up, "session", 1)
    status, _, answer = await ask(up, "session", tokens=90, headers=one)
    assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
    assert (await ask(up, "session", tokens=90, headers=other))[0] == 200
    assert (await ask(up, "session", tokens=300))[0] == 200
    statuses = [status for status, _, _ in await asyncio.gather(*(ask(up, "single", tokens=50) for _ in range(4)))]
    assert sorted(statuses) == [200, 429, 429, 429]
    assert (await ask(up, "single", tokens=50))[0] == 200


async def test_limits_follow_the_file(up: Mesh) -> None:
    add(up.folder, "late")

    async def known() -> bool:
        return (await ask(up, "late", tokens=100))[0] == 200

    await eventually(known, "the new key is known")
    with tenants.changing(up.folder / "tenants.json") as file:
        tenants.limit(file, "late", limits={"tokens_per_day": 90})

    async def full() -> bool:
        status, _, answer = await ask(up, "late", tokens=1)
        return status == 429 and "tokens_per_day: the limit is 90; " in answer["error"]["message"]

    await eventually(full, "what was spent before counts too")


async def test_usage_is_a_tenants_own_and_an_admins_all(up: Mesh) -> None:
    await ask(up, "free", tokens=10)
    await written(up, "free", 1)
    status, _, answer = await http(up.http, "GET", "/v1/usage?by=tenant", None, bearer("free"))
    assert status == 200
    (line,) = answer["data"]
    assert line["tenant"] == "free"
    assert line["tokens"] == sum(row["prompt_tokens"] + row["output_tokens"] for row in rows(up, "free"))
    status, _, answer = await http(up.http, "GET", "/v1/usage?tenant=boss", None, bearer("free"))
    assert (status, answer["error"]["code"]) == (403, "permission_denied")
    status, _, answer = await http(up.http, "GET", "/v1/usage?by=colour", None, bearer("boss"))
    assert (status, answer["error"]["code"]) == (400, "invalid_argument")
    async with grpc.aio.insecure_channel(up.grpc) as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        asked = router_pb2.ShowUsageRequest(question=types_pb2.UsageQuestion(by=["tenant", "model"]))
        shown = await stub.ShowUsage(asked, metadata=[("authorization", f"Bearer {KEYS['boss']}")])
    assert "free" in {line.group["tenant"] for line in shown.report.lines}
    assert {line.group["model"] for line in shown.report.lines} == {"toy"}
    assert shown.report.total.requests == sum(line.requests for line in shown.report.lines)


async def given_tokens(mesh: Mesh) -> float:
    status, _, text = await http(mesh.ready["worker"]["metrics"], "GET", "/metrics")
    assert status == 200
    return series(text)['headrace_worker_tokens_total{kind="given"}']


async def test_books_are_exact_when_a_router_and_the_scheduler_are_killed(up: Mesh) -> None:
    """Three routers spend one budget; one of them and then the scheduler die in the middle."""
    mesh = up
    for name in ("second", "third"):
        mesh.launch("router", key=name, scheduler=mesh.scheduler, cache=mesh.cache)
        mesh.ready[name] = mesh.processes[name].ready()
    doors = ["router", "second", "third"]
    answered = 0

    async def spend(door: str) -> None:
        nonlocal answered
        while True:
            try:
                status, _, answer = await ask(mesh, "killed", tokens=60, door=door)
            except (OSError, BrokenBody):
                return  # its router is dead
            if status == 200:
                answered += answer["usage"]["total_tokens"]
            elif status == 429 and answer["error"]["code"] == "insufficient_quota":
                return
            else:
                await asyncio.sleep(
                    0.05
                )  # not a wait for a state: clients that are refused come again, but not at once

    clients = [asyncio.create_task(spend(door)) for door in doors for _ in range(3)]

    async def some() -> bool:
        return answered > 500

    await eventually(some, "some is spent")
    mesh.processes["third"].popen.send_signal(signal.SIGKILL)

    async def known() -> bool:
        return re.search("router .* is out", mesh.processes["scheduler"].log.read_text()) is not None

    await eventually(known, "the scheduler knows that a router is lost")
    address = mesh.scheduler
    mesh.processes["scheduler"].kill()
    mesh.launch("scheduler", cache=mesh.cache, address=address)
    mesh.processes["scheduler"].ready()
    await asyncio.wait_for(asyncio.gather(*clients), 60)

    async def exact() -> bool:
        with contextlib.closing(Store.open(str(mesh.folder / "ledger.db"), "", write=False)) as store:
            total = usage.ask(store, usage.Question(())).total.output_tokens
            left = store.query("SELECT COUNT(*) FROM open_bookings")
        return left == [(0,)] and total == await given_tokens(mesh)

    await eventually(exact, "the ledger has what the worker gave", 20.0)
    found = rows(mesh, "killed")
    spent = sum(row["prompt_tokens"] + row["output_tokens"] for row in found)
    assert answered <= spent <= 3000
    # The budget was used, up to less than the shortest answer worth beginning.
    assert spent > 3000 - 60, found
    mesh.processes["second"].stop()
