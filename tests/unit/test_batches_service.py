"""The service behind the doors, without them: who is named is asked for, and what a disk says is passed on."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.waiting import eventually

from headrace.batches import service as module
from headrace.batches.service import TENANT, BatchService
from headrace.batches.store import Bounds, SqliteStore
from headrace.client import ClientError, error_of
from headrace.config import BatchesConfig
from headrace.v1 import batches_pb2, batches_pb2_grpc

METADATA = ((TENANT, "größe".encode()),)


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Any]:
    service = BatchService(BatchesConfig(data_dir=str(tmp_path / "data")), "me", tmp_path / "no-door")
    await service.start(tmp_path / "socket")
    async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'socket'}") as channel:
        yield batches_pb2_grpc.BatchServiceStub(channel)  # type: ignore[no-untyped-call]
    await service.stop(0.0)


def parts(text: bytes) -> list[Any]:
    upload = batches_pb2.UploadFileRequest
    return [
        upload(header=upload.Header(filename="in.jsonl", purpose="batch")),
        upload(data=text),
        upload(complete=True),
    ]


async def refused(call: Any) -> ClientError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return error_of(failed.value)


async def is_open(stub: Any) -> None:
    async def answers() -> bool:
        try:
            await stub.ListFiles(batches_pb2.ListFilesRequest(), metadata=METADATA)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    await eventually(answers, "the store is open")


async def test_a_full_disk_is_said_so_and_leaves_nothing(
    stub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await is_open(stub)

    def full(_file: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "_sync", full)
    failed = await refused(stub.UploadFile(iter(parts(b"{}\n")), metadata=METADATA))
    assert (failed.code, "No space left" in str(failed)) == ("unavailable", True)
    assert os.listdir(tmp_path / "data" / "uploads") == os.listdir(tmp_path / "data" / "files") == []
    monkeypatch.undo()
    file = (await stub.UploadFile(iter(parts(b"{}\n")), metadata=METADATA)).file
    listed = await stub.ListFiles(batches_pb2.ListFilesRequest(), metadata=METADATA)
    assert [each.id for each in listed.files] == [file.id]
    others = await stub.ListFiles(batches_pb2.ListFilesRequest(), metadata=((TENANT, b"other"),))
    assert not others.files


async def test_while_another_has_the_store_calls_may_be_tried_again(tmp_path: Path) -> None:
    held = SqliteStore(tmp_path / "data", Bounds(10, 10))
    service = BatchService(BatchesConfig(data_dir=str(tmp_path / "data")), "me", tmp_path / "no-door")
    await service.start(tmp_path / "socket")
    try:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path / 'socket'}") as channel:
            stub: Any = batches_pb2_grpc.BatchServiceStub(channel)  # type: ignore[no-untyped-call]
            failed = await refused(stub.ListFiles(batches_pb2.ListFilesRequest(), metadata=METADATA))
            assert (failed.code, failed.retry_after_s) == ("unavailable", 1.0)
            held.close()
            await is_open(stub)
    finally:
        await service.stop(0.0)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (batches_pb2.ListFilesRequest(limit=10_001), "limit"),
        (batches_pb2.ListFilesRequest(after="file-none"), "after"),
    ],
)
async def test_what_cannot_be_is_refused_with_its_field(stub: Any, asked: Any, param: str) -> None:
    await is_open(stub)
    assert (await refused(stub.ListFiles(asked, metadata=METADATA))).param == param
