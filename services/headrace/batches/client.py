"""Files and batches from the client's side, over the native gRPC API. Every failure is a :class:`ClientError`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from headrace.client import SHORT_CALL_TIMEOUT_S, Client, error_of
from headrace.errors import HeadraceError
from headrace.v1 import batches_pb2, batches_pb2_grpc

_PART_BYTES = 256 * 1024

#: How a batch stands, as OpenAI calls it.
STATUSES = {
    number: name.removeprefix("BATCH_STATUS_").lower() for name, number in batches_pb2.BatchStatus.items() if number
}
#: Nothing more happens to it.
OVER = ("completed", "failed", "expired", "cancelled")

#: Told of bytes that were moved, and of how many there are.
Moved = Callable[[int, int], None]


class BatchClient:
    """Beside a :class:`Client`, on its connection and with its key."""

    def __init__(self, client: Client) -> None:
        self._stub: Any = batches_pb2_grpc.BatchServiceStub(client._channel)  # type: ignore[no-untyped-call]
        self._metadata = client.metadata

    async def upload(self, path: Path, moved: Moved = lambda *_: None) -> batches_pb2.File:
        """Sends a file of requests. Raises ClientError; HeadraceError when it cannot be read."""

        async def parts() -> AsyncIterator[batches_pb2.UploadFileRequest]:
            header = batches_pb2.UploadFileRequest.Header(filename=path.name[-255:], purpose="batch")
            yield batches_pb2.UploadFileRequest(header=header)
            sent = 0
            with file:
                while data := await asyncio.to_thread(file.read, _PART_BYTES):
                    yield batches_pb2.UploadFileRequest(data=data)
                    sent += len(data)
                    moved(sent, size)
            yield batches_pb2.UploadFileRequest(complete=True)

        try:
            file = await asyncio.to_thread(open, path, "rb")
            size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise HeadraceError(f"cannot read {path}: {error.strerror}") from error
        with _client_errors():
            answered: batches_pb2.UploadFileResponse = await self._stub.UploadFile(parts(), metadata=self._metadata)
        return answered.file

    async def download(self, file_id: str, path: Path, moved: Moved = lambda *_: None) -> None:
        """Its bytes into that file, which appears when they are all there. Raises ClientError, HeadraceError."""
        beside = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with await asyncio.to_thread(open, beside, "wb") as file:
                async for data in self.content(file_id, moved):
                    await asyncio.to_thread(file.write, data)
            os.replace(beside, path)
        except OSError as error:
            raise HeadraceError(f"cannot write {path}: {error.strerror}") from error
        finally:
            beside.unlink(missing_ok=True)

    async def content(self, file_id: str, moved: Moved = lambda *_: None) -> AsyncIterator[bytes]:
        """Its bytes, in parts. Raises ClientError."""
        asked = batches_pb2.DownloadFileRequest(id=file_id)
        got = size = 0
        with _client_errors():
            async for part in self._stub.DownloadFile(asked, metadata=self._metadata):
                if part.WhichOneof("part") == "file":
                    size = part.file.bytes
                else:
                    got += len(part.data)
                    yield part.data
                    moved(got, size)

    async def create(
        self, file_id: str, endpoint: str, window: str = "24h", metadata: Mapping[str, str] | None = None
    ) -> batches_pb2.Batch:
        """Raises ClientError."""
        asked = batches_pb2.CreateBatchRequest(
            input_file_id=file_id, endpoint=endpoint, completion_window=window, metadata=metadata or {}
        )
        made: batches_pb2.CreateBatchResponse = await self._short(self._stub.CreateBatch, asked)
        return made.batch

    async def get(self, batch_id: str) -> batches_pb2.Batch:
        """Raises ClientError."""
        asked = batches_pb2.GetBatchRequest(id=batch_id)
        found: batches_pb2.GetBatchResponse = await self._short(self._stub.GetBatch, asked)
        return found.batch

    async def cancel(self, batch_id: str) -> batches_pb2.Batch:
        """Raises ClientError."""
        asked = batches_pb2.CancelBatchRequest(id=batch_id)
        found: batches_pb2.CancelBatchResponse = await self._short(self._stub.CancelBatch, asked)
        return found.batch

    async def list(self, limit: int) -> list[batches_pb2.Batch]:
        """The newest ones, at most so many. Raises ClientError."""
        listed: list[batches_pb2.Batch] = []
        more = True
        while more and len(listed) < limit:
            asked = batches_pb2.ListBatchesRequest(
                after=listed[-1].id if listed else "", limit=min(100, limit - len(listed))
            )
            page = await self._short(self._stub.ListBatches, asked)
            listed += page.batches
            more = page.has_more
        return listed

    async def _short(self, method: Callable[..., Any], asked: Any) -> Any:
        with _client_errors():
            return await method(asked, timeout=SHORT_CALL_TIMEOUT_S, metadata=self._metadata)


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None


def to_dict(batch: batches_pb2.Batch) -> dict[str, Any]:
    """A batch for machines: the names of OpenAI's where there are such, times as Unix seconds."""
    counts, usage = batch.request_counts, batch.usage
    times = {
        f"{name}_at": getattr(batch, f"{name}_s") or None
        for name in (
            *("created", "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling"),
            "cancelled",
        )
    }
    return {
        "id": batch.id,
        "status": STATUSES.get(batch.status, "unknown"),
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "metadata": dict(batch.metadata),
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "cached_input_tokens": usage.cached_prompt_tokens,
            "output_tokens": usage.completion_tokens,
        },
        "errors": [
            {"line": error.line or None, "code": error.code, "message": error.message, "param": error.param or None}
            for error in batch.errors
        ],
        **times,
    }
