"""Who may ask: keys at both doors, what a tenant may see and use, and that nothing of one tenant's reaches another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import tenants
from headrace.client import Client, ClientError
from tests.support.clients import http
from tests.support.mesh import Mesh
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

KEYS: dict[str, str] = {}


def token(size: int) -> str:
    """Not random, so that a failure can be repeated."""
    return f"{len(KEYS) * 7 + size:0{2 * size}x}"


def change(mesh: Mesh, name: str, **limits: Any) -> None:
    with tenants.changing(mesh.folder / "tenants.json") as known:
        KEYS[name] = tenants.add(known, name, now_s=time.time(), token=token, **limits)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder: Path = tmp_path_factory.mktemp("tenants")
    mesh = Mesh(
        folder,
        [ToyModel("toy", context_tokens=256), ToyModel("other")],
        tenants={"file": str(folder / "tenants.json")},
        worker={
            "address": "127.0.0.1:0",
            "metrics_address": "127.0.0.1:0",
            "model": "toy",
            "engine": "sim",
            "slots": 4,
        },
    )
    change(mesh, "one")
    change(mesh, "two")
    change(mesh, "friend", shares_prefixes=True)
    change(mesh, "mate", shares_prefixes=True)
    change(mesh, "small", models=["toy"], classes=["batch"])
    mesh.start()
    yield mesh
    mesh.stop()


@pytest.fixture
async def up(mesh: Mesh) -> Mesh:
    """Ready without a key: health is for load balancers."""

    async def ready() -> bool:
        return (await http(mesh.http, "GET", "/health"))[0] == 200

    await eventually(ready, "the router is ready")
    return mesh


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def ask(mesh: Mesh, name: str, text: str, headers: dict[str, str] | None = None) -> tuple[int, Any, bool]:
    body = {"model": "toy", "prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    status, answered, content = await http(mesh.http, "POST", "/v1/completions", body, bearer(name) | (headers or {}))
    return status, content, "x-headrace-cached" in answered


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer hr-wrong-key"}, {"Authorization": "Basic x"}])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/toy"),
    ],
)
async def test_who_is_not_known_gets_nothing(up: Mesh, method: str, path: str, headers: dict[str, str]) -> None:
    body = None if method == "GET" else {"model": "toy", "prompt": "x", "messages": [], "tokens": [1]}
    status, _, content = await http(up.http, method, path, body, headers)
    assert (status, content["error"]["type"]) == (401, "authentication_error")
    assert "hr-wrong-key" not in str(content)


async def test_grpc_takes_the_same_keys(up: Mesh) -> None:
    async with Client(up.grpc, api_key="") as client:
        for call in (
            client.list_models(),
            client.tokenize(text="a", model="toy"),
            client.detokenize([65], model="toy"),
        ):
            with pytest.raises(ClientError, match="API key") as refused:
                await call
            assert refused.value.code == "unauthenticated"
        with pytest.raises(ClientError, match="API key"):
            await client.complete(text="a", model="toy")
    async with Client(up.grpc, api_key=KEYS["one"]) as client:
        assert [model.name for model in await client.list_models()] == ["toy", "other"]
        assert (
            await client.complete(text="a", model="toy", max_tokens=3, ignore_eos=True)
        ).usage.completion_tokens == 3
    async with Client(up.grpc, api_key=KEYS["small"]) as client:
        assert [model.name for model in await client.list_models()] == ["toy"]


async def test_a_tenant_sees_and_uses_what_it_may(up: Mesh) -> None:
    _, _, listed = await http(up.http, "GET", "/v1/models", None, bearer("small"))
    assert [model["id"] for model in listed["data"]] == ["toy"]
    assert (await http(up.http, "GET", "/v1/models/other", None, bearer("small")))[0] == 404
    body = {"model": "other", "prompt": "x"}
    assert (await http(up.http, "POST", "/v1/completions", body, bearer("small")))[0] == 404
    assert (await http(up.http, "POST", "/tokenize", body, bearer("small")))[0] == 404
    status, content, _ = await ask(up, "small", "class")
    assert (status, content["error"]["code"]) == (403, "permission_denied")
    assert "its classes: batch" in content["error"]["message"]
    assert (await ask(up, "small", "class", {"x-headrace-class": "batch"}))[0] == 200


async def test_an_answer_of_one_tenant_is_never_anothers(up: Mesh) -> None:
    async def cached(name: str) -> bool:
        return (await ask(up, name, "the same question"))[2]

    assert not await cached("one")
    await eventually(lambda: cached("one"), "its own answer is stored")
    assert not await cached("two")
    assert not await cached("friend"), "sharing prefixes shares no answers"


async def test_prefixes_are_shared_only_by_those_who_agreed(up: Mesh) -> None:
    text = "a prompt of several blocks, so that some of it can be found again: " * 2

    async def reused(name: str) -> int:
        status, content, _ = await ask(up, name, text, {"x-headrace-cache": "bypass"})
        assert status == 200, content
        return int((content["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    assert await reused("one") == 0
    assert await reused("one") > 0
    assert await reused("two") == 0
    assert await reused("friend") == 0
    assert await reused("mate") > 0


async def test_the_file_is_followed(up: Mesh) -> None:
    path = up.folder / "tenants.json"

    async def answers(name: str, wanted: int) -> bool:
        return (await ask(up, name, "hello"))[0] == wanted

    change(up, "late")
    await eventually(lambda: answers("late", 200), "a new tenant is known")
    before = path.read_text()
    path.write_text("{")
    with tenants.changing(up.folder / "other.json") as known:
        tenants.add(known, "x", now_s=0.0, token=token)
    assert await answers("late", 200), "what cannot be read changes nothing"
    path.write_text(before)
    with tenants.changing(path) as known:
        tenants.revoke(known, "late")
    await eventually(lambda: answers("late", 401), "a revoked key is of no use")
