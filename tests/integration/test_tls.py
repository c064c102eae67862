"""A mesh whose every link is TLS: whom its doors and ports let in, and certificates that change under open streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from headrace import serving
from headrace.client import Client, ClientError, Delta
from headrace.tls import ChannelTls, ClientTls
from headrace.tls import load as load_tls
from headrace.v1 import cache_pb2, cache_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.support.certificates import Authority, Files, own, shown
from tests.support.mesh import SERVICES, Mesh, Process
from tests.support.scripted import ScriptedWorker
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

MODEL = ToyModel("toy", context_tokens=512)
#: A connection that is no TLS, or no peer of ours, is hung up on: what the client sees of it differs.
HUNG_UP = (httpx.TransportError, ssl.SSLError, OSError)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def secured(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mesh, Files]]:
    """A mesh that is mutual TLS to its clients too."""
    folder = tmp_path_factory.mktemp("tls")
    files = authority.issue(folder / "own")
    table: dict[str, Any] = {**files.table(), "client_certificates": True}
    mesh = Mesh(folder, [MODEL], router={"header_timeout_s": 2.0}, tls=table).start()
    yield mesh, files
    mesh.stop()


@pytest.fixture
async def worker(secured: tuple[Mesh, Files]) -> AsyncIterator[ScriptedWorker]:
    mesh, files = secured
    worker = ScriptedWorker(MODEL, slots=4, tls=load_tls(files.config()))
    try:
        await worker.start(mesh.scheduler)
        async with Client(mesh.grpc, tls=files.client()) as client:

            async def seen() -> bool:
                return any(model.ready_workers for model in await client.list_models())

            await eventually(seen, "the router sees the worker")
        yield worker
    finally:
        await worker.stop()


def https(mesh: Mesh, client: ClientTls) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"https://{mesh.http}", verify=client.ssl_context(), timeout=20)


BODY = {"model": "toy", "messages": [{"role": "user", "content": "go"}], "temperature": 1}


async def test_a_request_passes_over_every_link(secured: tuple[Mesh, Files], worker: ScriptedWorker) -> None:
    mesh, files = secured
    worker.bench.play("'ab'; 'c'; END")
    async with https(mesh, files.client()) as client:
        answer = (await client.post("/v1/chat/completions", json=BODY)).json()
    assert answer["choices"][0]["message"]["content"] == "abc"
    worker.bench.play("'de'; END")
    async with Client(f"grpcs://{mesh.grpc}", tls=files.client()) as client:
        assert (await client.complete(text="x", temperature=1)).text == "de"
    # A deterministic one: its answer goes through the cache.
    worker.bench.play("'f'; END")
    async with Client(mesh.grpc, tls=files.client()) as client:
        assert (await client.complete(text="y", temperature=0)).text == "f"

        async def cached() -> bool:
            usage = (await client.complete(text="y", temperature=0)).usage
            return usage is not None and usage.cached_answer

        async with asyncio.timeout(10):
            assert await cached()


async def test_both_protocols_of_http_are_offered(secured: tuple[Mesh, Files]) -> None:
    mesh, files = secured
    for protocol in ("h2", "http/1.1"):
        assert await shown(mesh.http, files.client(), protocol) == own(files)


async def test_the_http_door_lets_in_its_clients_only(secured: tuple[Mesh, Files], tmp_path: Path) -> None:
    mesh, files = secured
    stranger = Authority().issue(tmp_path / "stranger")
    intruder = Files(stranger.certificate, stranger.key, files.authority)
    with pytest.raises(HUNG_UP):
        await httpx.AsyncClient(timeout=20).get(f"http://{mesh.http}/live")
    for client in (files.client(identified=False), intruder.client(), stranger.client()):
        async with https(mesh, client) as connection:
            with pytest.raises(HUNG_UP):
                await connection.get("/live")
    async with https(mesh, files.client()) as connection:
        assert (await connection.get("/live")).status_code == 200


async def test_the_grpc_door_lets_in_its_clients_only(secured: tuple[Mesh, Files], tmp_path: Path) -> None:
    mesh, files = secured
    stranger = Authority().issue(tmp_path / "stranger")
    intruder = Files(stranger.certificate, stranger.key, files.authority)
    for client in (None, files.client(identified=False), intruder.client(), stranger.client()):
        async with Client(mesh.grpc, tls=client) as connection:
            with pytest.raises(ClientError) as refused:
                async with asyncio.timeout(20):
                    await connection.list_models()
            assert refused.value.code == "unavailable"


async def test_the_services_let_in_their_peers_only(
    secured: tuple[Mesh, Files], worker: ScriptedWorker, tmp_path: Path
) -> None:
    mesh, files = secured
    stranger = Authority().issue(tmp_path / "stranger")
    intruder = Files(stranger.certificate, stranger.key, files.authority)
    clients: list[tuple[ChannelTls | None, bool]] = [
        (files.client(), True),
        (None, False),
        (files.client(identified=False), False),
        (intruder.client(), False),
    ]
    for client, welcome in clients:
        for address, call in (
            (mesh.scheduler, lambda link: scheduler_pb2_grpc.SchedulerServiceStub(link).GetFleet(_FLEET, timeout=20)),
            (mesh.cache, lambda link: cache_pb2_grpc.CacheServiceStub(link).GetStats(_STATS, timeout=20)),
        ):
            async with serving.channel(address, client, (("grpc.use_local_subchannel_pool", 1),)) as link:
                if welcome:
                    await call(link)
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(link)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


_FLEET = scheduler_pb2.GetFleetRequest()
_STATS = cache_pb2.GetStatsRequest()


async def test_a_router_gives_nothing_to_a_worker_that_is_no_peer(secured: tuple[Mesh, Files], tmp_path: Path) -> None:
    mesh, files = secured
    # It has come by a membership, and its port shows a certificate of another authority.
    impostor = ScriptedWorker(MODEL, tls=load_tls(Authority().issue(tmp_path / "stranger").config()))
    impostor.bench.play("'no'; END")
    await impostor.start()
    stand_in = ScriptedWorker(MODEL, tls=load_tls(files.config()))
    stand_in.advertise = impostor.address
    await stand_in.start(mesh.scheduler)
    try:
        async with Client(mesh.grpc, tls=files.client()) as client:

            async def seen() -> bool:
                return any(model.ready_workers for model in await client.list_models())

            await eventually(seen, "the router sees the worker")
            with pytest.raises(ClientError) as refused:
                await client.complete(text="x", temperature=1, deadline_s=20)
            assert refused.value.code in ("unavailable", "worker_lost")
        assert not impostor.journal
        assert not stand_in.journal
    finally:
        await stand_in.stop()
        await impostor.stop()


async def test_a_connection_that_never_shakes_hands_is_ended(secured: tuple[Mesh, Files]) -> None:
    mesh, files = secured
    for address in (mesh.http, mesh.grpc):
        host, _, port = address.rpartition(":")
        silent, silent_writer = await asyncio.open_connection(host, int(port))
        context = files.client().ssl_context()
        context.set_alpn_protocols(["h2"])
        shaken, shaken_writer = await asyncio.open_connection(host, int(port), ssl=context)
        # Neither holds up the others.
        assert await shown(address, files.client()) == own(files)
        async with asyncio.timeout(20):
            for reader in (silent, shaken):
                with contextlib.suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
        for writer in (silent_writer, shaken_writer):
            writer.close()


async def test_new_certificates_are_for_new_connections_and_open_streams_go_on(
    secured: tuple[Mesh, Files], worker: ScriptedWorker, authority: Authority
) -> None:
    mesh, files = secured
    before = own(files)
    for _ in range(2):
        worker.bench.play("'a'; 'b'; END", gated=True)
    async with https(mesh, files.client()) as http, Client(mesh.grpc, tls=files.client()) as native:
        by_http = asyncio.create_task(_sse(http))
        by_grpc = asyncio.create_task(_texts(native.generate(text="x", temperature=1)))
        entries = [await worker.bench.entry(index) for index in range(2)]
        for entry in entries:
            entry.release()

        authority.issue(files.certificate.parent)
        after = own(files)
        assert after != before
        # The router's doors, and a port of a Python service.
        for address in (mesh.http, mesh.grpc, mesh.scheduler):

            async def changed(address: str = address) -> bool:
                return await shown(address, files.client()) == after

            await eventually(changed, f"the new certificate is shown at {address}", 20)

        for entry in entries:
            assert entry.sent == [97]
            entry.release(2)
        assert await by_http == "ab"
        assert await by_grpc == "ab"
    # A new link of the router's, with the new certificate.
    fresh = ScriptedWorker(MODEL, tls=load_tls(files.config()))
    await worker.leave()
    fresh.bench.play("'new'; END")
    await fresh.start(mesh.scheduler)
    try:
        async with Client(mesh.grpc, tls=files.client()) as client:

            async def answered() -> bool:
                with contextlib.suppress(ClientError):
                    return (await client.complete(text="z", temperature=1)).text == "new"
                return False

            await eventually(answered, "the new worker answers", 20)
    finally:
        await fresh.stop()


async def _sse(client: httpx.AsyncClient) -> str:
    """The text of a whole stream of events."""
    text, last = "", ""
    async with client.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            last = line.removeprefix("data: ") or last
            if last != "[DONE]" and line:
                text += json.loads(last)["choices"][0]["delta"].get("content") or ""
    assert last == "[DONE]"
    return text


async def _texts(generation: Any) -> str:
    return "".join([event.text async for event in generation if isinstance(event, Delta)])


async def test_files_that_do_not_fit_are_a_mistake_at_the_start(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own")
    other = authority.issue(tmp_path / "other")
    files.key.write_bytes(other.key.read_bytes())
    model = MODEL.write(tmp_path)
    toml = tmp_path / "headrace.toml"
    toml.write_text(
        f'[[models]]\nname = "toy"\nsource = "{model}"\n[worker]\nengine = "sim"\naddress = "127.0.0.1:0"\n'
        '[router]\nhttp_address = "127.0.0.1:0"\ngrpc_address = "127.0.0.1:0"\n'
        '[scheduler]\naddress = "127.0.0.1:0"\n[cache]\naddress = "127.0.0.1:0"\n'
        "[tls]\n" + "".join(f'{name} = "{path}"\n' for name, path in files.table().items())
    )
    for name in ("router", "scheduler", "cache", "worker", "up"):
        code, _, errors = await run(name, "--config", str(toml))
        assert code == 2, errors
        assert "tls.key: " in errors
        assert "is not the key of" in " ".join(errors.split())
        assert "Traceback" not in errors


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "headrace", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(SERVICES), "COLUMNS": "1000"},
    )
    try:
        async with asyncio.timeout(90):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), errors.decode()


async def test_up_with_tls_and_the_clients_that_come_with_it(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own")
    toml = tmp_path / "headrace.toml"
    toml.write_text(
        f'[[models]]\nname = "toy"\nsource = "{MODEL.write(tmp_path)}"\n[worker]\nengine = "sim"\n'
        "[tls]\n" + "".join(f'{name} = "{path}"\n' for name, path in files.table().items())
    )
    arguments = ["up", "--config", str(toml), "--http-port", "0", "--grpc-port", "0", "--json"]
    up = Process("up", arguments, tmp_path / "up.log")
    try:
        mesh = await asyncio.to_thread(up.ready, 90)
        assert mesh["tls"] is True
        # Clients need no certificate here; those of a worker's port do.
        code, _, errors = await run(
            *("chat", "hi", "--target", mesh["grpc"], "--max-tokens", "3", "--stats"), *("--ca", str(files.authority))
        )
        # The simulated engine's ids need not have any text.
        assert code == 0, errors
        assert "output tokens" in errors
        code, _, errors = await run("chat", "hi", "--target", f"grpc://{mesh['grpc']}")
        assert code == 1, errors
        code, _, errors = await run("chat", "hi", "--target", f"grpcs://{mesh['grpc']}")
        assert code == 1, errors
        for target in (f"https://{mesh['http']}", mesh["grpc"]):
            code, said, errors = await run(
                *("bench", "--target", target, "--config", str(toml), "--requests", "4", "--concurrency", "2"),
                *("--prompt-tokens", "8", "--output-tokens", "4", "--warmup", "1", "--json"),
            )
            assert code == 0, errors
            assert json.loads(said)["succeeded"] == 4
        address = mesh["workers"][0]["address"]  # type: ignore[index]
        for client, welcome in ((files.client(identified=False), False), (load_tls(files.config()), True)):
            async with serving.channel(address, client) as link:
                call = worker_pb2_grpc.WorkerServiceStub(link).GetLoad(worker_pb2.GetLoadRequest(), timeout=20)
                if welcome:
                    await call
                    continue
                with pytest.raises(grpc.aio.AioRpcError):
                    await call
        assert await asyncio.to_thread(up.stop) == 0
    finally:
        up.kill()
