"""Files and batches at both doors: as the official SDK expects them, within bounds, and each tenant's its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace import tenants
from headrace.client import ClientError, error_of
from headrace.v1 import batches_pb2, batches_pb2_grpc
from tests.support.clients import http
from tests.support.mesh import Mesh
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

openai = pytest.importorskip("openai")

KEYS: dict[str, str] = {}
URL = "/v1/completions"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder: Path = tmp_path_factory.mktemp("batches")
    with tenants.changing(folder / "tenants.json") as known:
        for number, (name, limits) in enumerate(
            {"one": {}, "two": {}, "small": {"models": ["other"]}, "fast": {"classes": ["interactive"]}}.items()
        ):
            KEYS[name] = tenants.add(
                known, name, now_s=time.time(), token=lambda size, number=number: f"{number:0{2 * size}x}", **limits
            )
    mesh = Mesh(
        folder,
        [ToyModel("toy", context_tokens=256), ToyModel("other")],
        tenants={"file": str(folder / "tenants.json")},
        batches={"data_dir": str(folder / "data"), "max_file_bytes": 100_000, "max_lines": 500, "max_files": 100},
        worker={
            "address": "127.0.0.1:0",
            "metrics_address": "127.0.0.1:0",
            "model": "toy",
            "engine": "sim",
            "slots": 16,
            "sim_step_ms": 1.0,
            "sim_prefill_tokens_per_s": 1e6,
        },
    )
    mesh.start()
    yield mesh
    mesh.stop()


@pytest.fixture
async def up(mesh: Mesh) -> Mesh:
    async def ready() -> bool:
        health = (await http(mesh.http, "GET", "/health"))[0]
        return health == 200 and (await http(mesh.http, "GET", "/v1/files", None, bearer("one")))[0] == 200

    await eventually(ready, "the router is ready, with its batches")
    return mesh


@pytest.fixture
async def client(up: Mesh) -> AsyncIterator[Any]:
    async with sdk(up, "one") as client:
        yield client


def sdk(mesh: Mesh, name: str) -> Any:
    return openai.AsyncOpenAI(base_url=f"http://{mesh.http}/v1", api_key=KEYS[name], max_retries=0)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def line(custom_id: str, prompt: str = "hello", url: str = URL, **body: Any) -> dict[str, Any]:
    asked = {"model": "toy", "prompt": prompt, "max_tokens": 4, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": asked}


def jsonl(*lines: Any) -> bytes:
    return b"".join((text if isinstance(text, bytes) else json.dumps(text).encode()) + b"\n" for text in lines)


async def start(client: Any, *lines: Any, url: str = URL, **how: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, **{"completion_window": "24h"} | how)


async def ends(client: Any, batch: Any, timeout_s: float = 20.0) -> Any:
    async def over() -> Any:
        now = await client.batches.retrieve(batch.id)
        return now if now.status in ("completed", "failed", "expired", "cancelled") else None

    return await eventually(over, f"{batch.id} is over", timeout_s)


async def content(client: Any, file_id: str) -> list[Any]:
    return [json.loads(text) for text in (await client.files.content(file_id)).text.splitlines()]


async def test_the_sdk_takes_a_batch_from_file_to_answers(client: Any) -> None:
    lines = [line(f"c{number}", f"prompt {number}") for number in range(100)]
    lines.insert(50, line("bad", temperature=-1))
    batch = await start(client, *lines, metadata={"about": "tests"})
    assert (batch.object, batch.status, batch.endpoint, batch.completion_window) == ("batch", "validating", URL, "24h")
    assert batch.metadata == {"about": "tests"}
    assert batch.expires_at == batch.created_at + 86_400
    batch = await ends(client, batch)
    assert (batch.status, batch.errors) == ("completed", None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (101, 100, 1)
    assert batch.usage.output_tokens == 400
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    output = await content(client, batch.output_file_id)
    assert [each["custom_id"] for each in output] == [f"c{number}" for number in range(100)]
    for each in output:
        response = each["response"]
        assert (response["status_code"], each["error"]) == (200, None)
        assert response["body"]["usage"]["completion_tokens"] == 4
        assert response["body"]["choices"][0]["finish_reason"] == "length"
        assert response["request_id"]
    (refused,) = await content(client, batch.error_file_id)
    assert (refused["custom_id"], refused["response"]["status_code"]) == ("bad", 400)
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    file = await client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.bytes == len((await client.files.content(file.id)).content)


async def test_chats_are_answered_too(client: Any) -> None:
    url = "/v1/chat/completions"
    body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}
    batch = await ends(
        client, await start(client, {"custom_id": "a", "method": "POST", "url": url, "body": body}, url=url)
    )
    (answer,) = await content(client, batch.output_file_id)
    assert answer["response"]["body"]["object"] == "chat.completion"


async def test_the_sdk_lists_and_deletes_files(client: Any) -> None:
    made = [await client.files.create(file=(f"{name}.jsonl", b"{}\n"), purpose="batch") for name in "abc"]
    listed = [file async for file in client.files.list(limit=2, purpose="batch")]
    assert [file.id for file in listed][:3] == [file.id for file in reversed(made)]
    oldest = await client.files.list(limit=1, order="asc")
    assert oldest.data[0].created_at <= made[0].created_at
    assert oldest.has_more
    file = await client.files.retrieve(made[0].id)
    assert (file.filename, file.bytes, file.purpose, file.status) == ("a.jsonl", 3, "batch", "processed")
    assert file.expires_at == file.created_at + 30 * 86_400
    assert (await client.files.content(file.id)).content == b"{}\n"
    deleted = await client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(file.id)
    soon = await client.files.create(
        file=("d.jsonl", b"{}\n"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert soon.expires_at == soon.created_at + 3600
    for file in (*made[1:], soon):
        await client.files.delete(file.id)


async def test_a_file_with_mistakes_fails_with_errors_by_line(client: Any) -> None:
    texts = (line("a"), b"{", line("a"), line("b", url="/v1/chat/completions"), line("c", model="none"), line("d"))
    batch = await ends(client, await start(client, *texts))
    assert (batch.status, batch.request_counts.total, batch.output_file_id) == ("failed", 0, None)
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_url"),
        (5, "model_not_found"),
    ]
    empty = await ends(client, await start(client))
    assert [error.code for error in empty.errors.data] == ["empty_file"]
    many = await ends(client, await start(client, *(line(str(number)) for number in range(501))))
    assert [error.code for error in many.errors.data] == ["too_many_lines"]


async def test_a_batch_is_cancelled_and_keeps_what_is_done(client: Any, up: Mesh) -> None:
    batch = await start(client, *(line(f"c{number}", max_tokens=200) for number in range(400)))

    async def some() -> bool:
        return bool((await client.batches.retrieve(batch.id)).request_counts.completed)

    await eventually(some, "some lines are done")
    with pytest.raises(openai.BadRequestError, match="not finished"):
        await client.files.delete(batch.input_file_id)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    batch = await ends(client, batch)
    assert batch.status == "cancelled"
    assert 0 < batch.request_counts.completed < 400
    assert len(await content(client, batch.output_file_id)) == batch.request_counts.completed
    with pytest.raises(openai.BadRequestError):
        await client.batches.cancel(batch.id)

    async def quiet() -> bool:
        _, _, page = await http(up.http, "GET", "/metrics")
        return "headrace_router_open_requests 0\n" in page

    await eventually(quiet, "what was under way has ended")


async def test_how_batches_stand_is_on_the_page_of_metrics(up: Mesh, client: Any) -> None:
    async def page() -> dict[str, float]:
        _, _, text = await http(up.http, "GET", "/metrics")
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("headrace_router_batch"))
        return {name.removeprefix("headrace_router_"): float(value) for name, value in lines}

    async def at_rest() -> bool:
        """No batch is open, and the answers are those of all that there ever were."""
        completed = failed = 0
        for name in KEYS:
            async with sdk(up, name) as client:
                counts = [each.request_counts async for each in client.batches.list(limit=100)]
            completed += sum(each.completed for each in counts)
            failed += sum(each.failed for each in counts)
        shown = await page()
        answers = [shown.get(f'batch_answers_total{{result="{result}"}}') for result in ("completed", "failed")]
        lines = [shown.get(f'batch_lines{{state="{state}"}}') for state in ("queued", "running")]
        return answers == [completed, failed] and lines == [0, 0] and shown['batches{status="in_progress"}'] == 0

    await eventually(at_rest, "what was before is over")
    # For some seconds, and more than go at once.
    long = [line(f"c{number}", max_tokens=240) for number in range(400)]
    batch = await start(client, *long, line("bad", temperature=-1))

    async def busy() -> bool:
        shown = await page()
        lines = [shown[f'batch_lines{{state="{state}"}}'] for state in ("queued", "running")]
        return all([*lines, shown['batches{status="in_progress"}']]) and shown["batch_due_seconds"] > 86_000

    await eventually(busy, "its lines are shown")
    assert (await ends(client, batch, 60.0)).status == "completed"

    await eventually(at_rest, "its answers are counted")
    assert (await page())["batch_oldest_seconds"] == 0


async def test_what_is_late_is_told_so(client: Any) -> None:
    batch = await start(
        client, line("quick"), *(line(f"c{number}", max_tokens=200) for number in range(300)), completion_window="2s"
    )
    batch = await ends(client, batch)
    assert (batch.status, batch.request_counts.completed + batch.request_counts.failed) == ("expired", 301)
    output, errors = await content(client, batch.output_file_id), await content(client, batch.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert {each["custom_id"] for each in output}.isdisjoint(each["custom_id"] for each in errors)
    assert len(output) + len(errors) == 301


async def test_batches_are_listed_in_pages(client: Any) -> None:
    made = [await ends(client, await start(client, line("a"))) for _ in range(3)]
    listed = [batch.id async for batch in client.batches.list(limit=2)]
    assert listed[:3] == [batch.id for batch in reversed(made)]
    page = await client.batches.list(limit=1, after=made[1].id)
    assert page.data[0].id == made[0].id
    with pytest.raises(openai.NotFoundError):
        await client.batches.list(after="batch_none")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"input_file_id": ""}, "input_file_id"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused_with_its_field(client: Any, wrong: Any, param: str) -> None:
    file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"} | wrong
    with pytest.raises(openai.BadRequestError) as refused:
        await client.batches.create(**asked)
    assert refused.value.param == param
    await client.files.delete(file.id)


async def test_an_upload_has_bounds(client: Any, up: Mesh) -> None:
    for size in (100_001, 5_000_000):
        with pytest.raises(openai.APIStatusError, match="100000") as refused:
            await client.files.create(file=("big.jsonl", b"x" * size), purpose="batch")
        assert refused.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("in.jsonl", b"{}"), purpose="fine-tune")
    status, _, said = await http(up.http, "POST", "/v1/files", {"file": "x"}, bearer("one"))
    assert (status, said["error"]["type"]) == (400, "invalid_request_error")
    assert list((up.folder / "data" / "uploads").iterdir()) == []


async def test_a_tenant_has_so_many_files(up: Mesh) -> None:
    async with sdk(up, "two") as client:

        async def upload() -> Any:
            return await client.files.create(file=("in.jsonl", b"{}\n"), purpose="batch")

        made = [await upload() for _ in range(100)]
        with pytest.raises(openai.RateLimitError, match="the limit is 100"):
            await upload()
        for file in made:
            await client.files.delete(file.id)


async def test_what_is_a_tenants_is_nobody_elses(client: Any, up: Mesh) -> None:
    batch = await ends(client, await start(client, line("mine", "a secret")))
    async with sdk(up, "two") as other:
        assert [file async for file in other.files.list()] == []
        assert [each async for each in other.batches.list()] == []
        for call, name in (
            (other.files.retrieve, batch.input_file_id),
            (other.files.content, batch.output_file_id),
            (other.files.delete, batch.output_file_id),
            (other.batches.retrieve, batch.id),
            (other.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call(name)
        with pytest.raises(openai.NotFoundError) as refused:
            await other.batches.create(input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h")
        assert refused.value.param == "input_file_id"
    # Names of tenants that a client writes mean nothing at the doors.
    forged = {"x-headrace-tenant": b"one".hex(), "x-headrace-tenant-bin": "b25l"}
    assert (await http(up.http, "GET", "/v1/files", None, forged))[0] == 401
    status, _, said = await http(up.http, "GET", "/v1/files", None, bearer("two") | forged)
    assert (status, said["data"]) == (200, [])
    assert "a secret" not in up.logs(1000)


async def test_lines_are_within_what_a_tenant_may(up: Mesh) -> None:
    async with sdk(up, "small") as small:
        batch = await ends(small, await start(small, line("a")))
        assert [error.code for error in batch.errors.data] == ["model_not_found"]
    async with sdk(up, "fast") as fast:
        batch = await ends(fast, await start(fast, line("a")))
        (refused,) = await content(fast, batch.error_file_id)
        assert refused["response"]["status_code"] == 403


async def test_grpc_is_the_same(up: Mesh) -> None:
    metadata = (("authorization", f"Bearer {KEYS['one']}"),)
    async with grpc.aio.insecure_channel(up.grpc) as channel:
        stub = batches_pb2_grpc.BatchServiceStub(channel)
        Upload, header = batches_pb2.UploadFileRequest, batches_pb2.UploadFileRequest.Header
        text = jsonl(*(line(f"c{number}") for number in range(50)))
        parts = [Upload(header=header(filename="in.jsonl", purpose="batch"))]
        parts += [Upload(data=text[at : at + 1000]) for at in range(0, len(text), 1000)]

        async def refused(call: Any) -> ClientError:
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call
            return error_of(failed.value)

        cut = await refused(stub.UploadFile(iter(parts), metadata=metadata))
        assert (cut.code, cut.param) == ("invalid_argument", "file")
        assert (await refused(stub.UploadFile(iter(parts)))).code == "unauthenticated"
        file = (await stub.UploadFile(iter([*parts, Upload(complete=True)]), metadata=metadata)).file
        assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(text), "batch")
        asked = batches_pb2.CreateBatchRequest(input_file_id=file.id, endpoint=URL, completion_window="1h")
        batch = (await stub.CreateBatch(asked, metadata=metadata)).batch

        async def done() -> Any:
            now = (await stub.GetBatch(batches_pb2.GetBatchRequest(id=batch.id), metadata=metadata)).batch
            return now if now.status == batches_pb2.BATCH_STATUS_COMPLETED else None

        batch = await eventually(done, "it is completed")
        assert batch.request_counts.completed == 50
        got, told = b"", None
        wanted = batches_pb2.DownloadFileRequest(id=batch.output_file_id, offset=10)
        async for part in stub.DownloadFile(wanted, metadata=metadata):
            if part.WhichOneof("part") == "file":
                told = part.file
            else:
                got += part.data
        assert told is not None
        assert len(got) == told.bytes - 10
        listed = await stub.ListBatches(batches_pb2.ListBatchesRequest(limit=1), metadata=metadata)
        assert ([each.id for each in listed.batches], listed.has_more) == ([batch.id], True)
        gone = await refused(stub.GetFile(batches_pb2.GetFileRequest(id="file-none"), metadata=metadata))
        assert (gone.code, gone.param, gone.status) == ("not_found", "id", grpc.StatusCode.NOT_FOUND)
        late = await refused(stub.CancelBatch(batches_pb2.CancelBatchRequest(id=batch.id), metadata=metadata))
        assert late.code == "invalid_argument"


async def test_a_second_router_on_the_same_store_stands_by(up: Mesh) -> None:
    process = up.launch("router", key="second", scheduler=up.scheduler, cache=up.cache)
    try:
        ready = await asyncio.to_thread(process.ready)
        status, headers, said = await http(ready["http"], "GET", "/v1/batches", None, bearer("one"))
        assert (status, said["error"]["code"], headers["retry-after"]) == (503, "unavailable", "1")
    finally:
        process.stop()
        del up.processes["second"]
