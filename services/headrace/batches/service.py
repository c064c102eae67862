"""``headrace.v1.BatchService``, for the router's doors: they say who asks, this keeps files and batches and runs them.

It serves on a socket in a folder of this process's own, so that nobody but the doors can speak in a tenant's name. What
values may be is decided here, for both doors. While another process has the store (the router before this one, a second
one on the machine) or its database is away, calls are told so and the store is tried again each second: of two routers
with the same folder, one is the other's standby.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from headrace import postgres
from headrace.batches import lines
from headrace.batches.door import InnerDoor
from headrace.batches.postgres import PostgresStore
from headrace.batches.runner import Background, Runner, Settings
from headrace.batches.store import Batch, Bounds, Facts, File, SqliteStore, Store, StoreError
from headrace.config import BatchesConfig
from headrace.errors import error
from headrace.serving import SERVER_OPTIONS
from headrace.status import STATUS
from headrace.v1 import batches_pb2, batches_pb2_grpc, types_pb2

log = logging.getLogger(__name__)

#: In whose name a call is made; the doors set it, and only they reach the socket.
TENANT = "x-headrace-tenant-bin"

PART_BYTES = 256 * 1024
MAX_PAGE_FILES, MAX_PAGE_BATCHES, PAGE_BATCHES = 10_000, 100, 20
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512
MIN_WINDOW_S, MAX_WINDOW_S = 1, 30 * 86_400
#: Between tries for the store, between looks for what is to be deleted, and between words for the page of metrics.
OPEN_EVERY_S, EXPIRE_EVERY_S, SHOW_EVERY_S = 1.0, 60.0, 2.0

_CODES = {
    "not_found": types_pb2.ERROR_CODE_NOT_FOUND,
    "invalid": types_pb2.ERROR_CODE_INVALID_ARGUMENT,
    "limit": types_pb2.ERROR_CODE_RATE_LIMIT_EXCEEDED,
    "full": types_pb2.ERROR_CODE_UNAVAILABLE,
    "busy": types_pb2.ERROR_CODE_UNAVAILABLE,
    "away": types_pb2.ERROR_CODE_UNAVAILABLE,
}
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Refused(Exception):
    """A call ends with this error."""

    def __init__(self, why: types_pb2.Error) -> None:
        super().__init__(why.message)
        self.why = why


def invalid(param: str, message: str) -> Refused:
    """The caller's mistake in that field."""
    return Refused(error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, message, param=param))


class BatchService(batches_pb2_grpc.BatchServiceServicer):
    """Files and batches of one router."""

    def __init__(
        self,
        config: BatchesConfig,
        owner: str,
        door: Path,
        *,
        show: Callable[[str], None] = lambda _standing: None,
        wall_s: Callable[[], float] = time.time,
    ):
        """``show`` is told every few seconds how batches stand, for the page of metrics."""
        self._config = config
        self._show = show
        # A process may have the name of one before it, which has still a lease.
        self._owner = f"{owner}-{secrets.token_hex(4)}"
        self._door = InnerDoor(door)
        self._wall_s = wall_s
        self._background: Background | None = None
        self._runner: Runner | None = None
        self._server: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # -- its life

    async def start(self, socket: Path) -> None:
        """Serves there, and opens the store as soon as nobody else has it. Raises ConfigError."""
        if self._config.database:
            postgres.check("batches.database")
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        batches_pb2_grpc.add_BatchServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{socket}")
        await self._server.start()
        self._tasks.append(asyncio.create_task(self._keep(), name="batches"))

    async def _keep(self) -> None:
        """The store's whole life."""
        store = await self._open()
        config = self._config
        self._background = Background(store)
        settings = Settings(
            lines.Bounds(config.max_lines, config.max_line_bytes),
            config.max_lines_at_once,
            config.max_batches_at_once,
            config.lease_s,
            config.keep_files_s,
        )
        self._runner = Runner(self._background, self._door, settings, self._owner, new_file_id, wall_s=self._wall_s)
        self._tasks.append(asyncio.create_task(self._runner.run(), name="batch runner"))
        self._tasks.append(asyncio.create_task(self._keep_showing(self._runner), name="batch metrics"))
        while True:
            try:
                # Batches are kept as long as files are, but those of files that are kept for ever a year.
                keep_s = config.keep_files_s or 365 * 86_400.0
                await self._background.do(store.expire, self._wall_s(), keep_s)
            except StoreError as failure:
                log.warning("batches: %s", failure)
            except Exception:
                log.exception("batches: nothing could be deleted")
            await asyncio.sleep(EXPIRE_EVERY_S)

    async def _keep_showing(self, runner: Runner) -> None:
        while True:
            try:
                standing = await self._do(self._store.standing, self._wall_s())
                running = runner.lines_under_way
                shown = {
                    "open": standing.open,
                    "queued_lines": max(standing.lines - running, 0),
                    "running_lines": running,
                    "completed_lines": runner.completed_lines,
                    "failed_lines": runner.failed_lines,
                    "oldest_s": standing.oldest_s,
                    "due_s": standing.due_s,
                }
                self._show(json.dumps(shown))
            except StoreError as failure:
                log.debug("batches: nothing could be shown: %s", failure)
            await asyncio.sleep(SHOW_EVERY_S)

    async def _open(self) -> Store:
        told = ""
        while True:
            try:
                return await asyncio.to_thread(open_store, self._config)
            except StoreError as failure:
                # Once for each reason, not once a second.
                if str(failure) != told:
                    log.warning("batches: %s; trying again", failure)
                    told = str(failure)
            await asyncio.sleep(OPEN_EVERY_S)

    async def stop(self, grace_s: float) -> None:
        """Lets lines that are under way end within the grace; the rest goes on with the next start."""
        if self._runner is not None:
            await self._runner.stop(grace_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0.5)
        await self._door.close()
        if self._background is not None:
            await asyncio.to_thread(self._background.close)

    async def _do(self, method: Callable[..., Any], *values: Any, **named: Any) -> Any:
        assert self._background is not None
        return await self._background.do(method, *values, **named)

    @property
    def _store(self) -> Store:
        if self._background is None:
            message = "the batches of this router are not open yet: another one has their store, or it cannot be used"
            raise Refused(error(types_pb2.ERROR_CODE_UNAVAILABLE, message, retryable=True, retry_after_ms=1000))
        return self._background.store

    # -- files

    async def UploadFile(self, requests: AsyncIterator[Any], context: Any) -> Any:
        """See the proto."""
        async with _answering(context) as tenant:
            file_id = new_file_id()
            path = await self._do(self._store.begin_upload, tenant, file_id)
            try:
                header, size = await self._receive(requests, path)
                now_s = int(self._wall_s())
                kept_s = header.expires_after_s or self._config.keep_files_s
                file = File(
                    file_id, header.purpose, header.filename, size, now_s, int(now_s + kept_s) if kept_s else None
                )
                await self._do(self._store.add_file, tenant, file)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            return batches_pb2.UploadFileResponse(file=_file(file))

    async def _receive(self, requests: AsyncIterator[Any], path: Path) -> tuple[Any, int]:
        """The bytes into that file, and on the disk."""
        header, size, complete = batches_pb2.UploadFileRequest.Header(), 0, False
        limit = self._config.max_file_bytes
        with await _on_disk(open, path, "wb") as file:
            async for request in requests:
                kind = request.WhichOneof("part")
                if kind == "header":
                    header.MergeFrom(request.header)
                    _check_header(header, whole=False)
                elif kind == "data":
                    size += len(request.data)
                    if size > limit:
                        message = f"the file has more bytes than the limit of {limit}"
                        raise Refused(error(types_pb2.ERROR_CODE_TOO_LARGE, message, param="file"))
                    await _on_disk(file.write, request.data)
                elif kind == "complete":
                    complete = request.complete
            if not complete:
                raise invalid("file", "the upload was cut off: it did not say that it is complete")
            _check_header(header, whole=True)
            await _on_disk(_sync, file)
        return header, size

    async def GetFile(self, request: Any, context: Any) -> Any:
        """See the proto."""
        async with _answering(context) as tenant:
            file = await self._do(self._store.get_file, tenant, request.id, self._wall_s())
            return batches_pb2.GetFileResponse(file=_file(file))

    async def ListFiles(self, request: Any, context: Any) -> Any:
        """See the proto."""
        async with _answering(context) as tenant:
            files, more = await self._do(
                self._store.list_files,
                tenant,
                self._wall_s(),
                after=request.after,
                limit=_limit(request.limit, MAX_PAGE_FILES, MAX_PAGE_FILES),
                purpose=request.purpose,
                ascending=request.ascending,
            )
            return batches_pb2.ListFilesResponse(files=[_file(file) for file in files], has_more=more)

    async def DeleteFile(self, request: Any, context: Any) -> Any:
        """See the proto."""
        async with _answering(context) as tenant:
            await self._do(self._store.delete_file, tenant, request.id, self._wall_s())
            return batches_pb2.DeleteFileResponse()

    async def DownloadFile(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """See the proto."""
        async with _answering(context) as tenant:
            file = await self._do(self._store.get_file, tenant, request.id, self._wall_s())
            if request.offset > file.bytes:
                raise invalid("offset", f"the file has {file.bytes} bytes, got offset {request.offset}")
            # Deleted meanwhile, it is read to its end all the same.
            path = await self._do(self._store.path, file)
            with await _on_disk(open, path, "rb") as content:
                content.seek(request.offset)
                yield batches_pb2.DownloadFileResponse(file=_file(file))
                while data := await _on_disk(content.read, PART_BYTES):
                    yield batches_pb2.DownloadFileResponse(data=data)

    # -- batches

    async def CreateBatch(self, request: Any, context: Any) -> Any:
        """See the proto."""
        async with _answering(context) as tenant:
            window_s = _check_batch(request)
            now_s = int(self._wall_s())
            facts = Facts(
                request.endpoint,
                request.input_file_id,
                request.completion_window,
                now_s,
                now_s + window_s,
                dict(request.metadata),
                request.output_expires_after_s or None,
            )
            batch = Batch(f"batch_{secrets.token_hex(16)}", tenant, "validating", facts)
            try:
                await self._do(self._store.add_batch, batch, self._wall_s())
            except StoreError as failure:
                if failure.kind == "not_found":
                    failure.param = "input_file_id"
                raise
            self._nudge()
            return batches_pb2.CreateBatchResponse(batch=_batch(batch))

    async def GetBatch(self, request: Any, context: Any) -> Any:
        """See the proto."""
        async with _answering(context) as tenant:
            batch = await self._do(self._store.get_batch, tenant, request.id)
            return batches_pb2.GetBatchResponse(batch=_batch(batch))

    async def ListBatches(self, request: Any, context: Any) -> Any:
        """See the proto."""
        async with _answering(context) as tenant:
            limit = _limit(request.limit, PAGE_BATCHES, MAX_PAGE_BATCHES)
            batches, more = await self._do(self._store.list_batches, tenant, after=request.after, limit=limit)
            return batches_pb2.ListBatchesResponse(batches=[_batch(batch) for batch in batches], has_more=more)

    async def CancelBatch(self, request: Any, context: Any) -> Any:
        """See the proto."""
        async with _answering(context) as tenant:
            batch = await self._do(self._store.cancel, tenant, request.id, self._wall_s())
            self._nudge()
            return batches_pb2.CancelBatchResponse(batch=_batch(batch))

    def _nudge(self) -> None:
        if self._runner is not None:
            self._runner.nudge()


def open_store(config: BatchesConfig) -> Store:
    """Raises StoreError."""
    folder, bounds = Path(config.data_dir), Bounds(config.max_files, config.max_open_batches)
    if config.database:
        return PostgresStore(config.database, folder, bounds)
    return SqliteStore(folder, bounds)


def new_file_id() -> str:
    """Never the same, and not to be guessed."""
    return f"file-{secrets.token_hex(16)}"


def _limit(asked: int, default: int, most: int) -> int:
    if asked > most:
        raise invalid("limit", f"limit must be 1 to {most}, got {asked}")
    return asked or default


def _check_header(header: Any, *, whole: bool) -> None:
    if header.purpose != "batch" and (whole or header.purpose):
        raise invalid("purpose", f"the purpose must be 'batch', got {header.purpose[:64]!r}")
    if len(header.filename) > 255:
        raise invalid("file", f"the file's name has {len(header.filename)} characters, the limit is 255")


def _check_batch(request: Any) -> int:
    """The window in seconds. Raises Refused."""
    if request.endpoint not in lines.ENDPOINTS:
        raise invalid("endpoint", f"the endpoint must be one of {', '.join(lines.ENDPOINTS)}")
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", request.completion_window)
    window_s = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not MIN_WINDOW_S <= window_s <= MAX_WINDOW_S:
        raise invalid("completion_window", "the window must be a time like '24h' (s, m, h, d), of 30 days at most")
    if len(request.metadata) > MAX_METADATA:
        raise invalid("metadata", f"there are {len(request.metadata)} entries, the limit is {MAX_METADATA}")
    for name, value in request.metadata.items():
        if len(name) > MAX_METADATA_NAME or len(value) > MAX_METADATA_VALUE:
            limits = f"{MAX_METADATA_NAME} and {MAX_METADATA_VALUE} characters"
            raise invalid("metadata", f"names and values may have {limits}, got {len(name)} and {len(value)}")
    return window_s


def _sync(file: Any) -> None:
    import os

    file.flush()
    os.fsync(file.fileno())


async def _on_disk(method: Callable[..., Any], *values: Any) -> Any:
    """A file's method, off the loop. Raises StoreError "full" when the disk takes no more."""
    try:
        return await asyncio.to_thread(method, *values)
    except OSError as failure:
        reason = failure.strerror or failure
        raise StoreError("full", f"the disk of batches.data_dir cannot be used: {reason}") from failure


@contextlib.asynccontextmanager
async def _answering(context: Any) -> AsyncIterator[str]:
    """The tenant of a call; what goes wrong becomes its status."""
    try:
        metadata = dict(context.invocation_metadata() or ())
        yield metadata.get(TENANT, b"").decode()
    except Refused as refused:
        await _abort(context, refused.why)
    except StoreError as failure:
        await _abort(context, error(_CODES[failure.kind], str(failure), param=failure.param))


async def _abort(context: Any, why: types_pb2.Error) -> None:
    """Ends the call with a rich status, as the doors read it."""
    status = STATUS[why.code]
    reason = types_pb2.ErrorCode.Name(why.code).removeprefix("ERROR_CODE_")
    details = [_packed(error_details_pb2.ErrorInfo(reason=reason, domain="headrace"))]
    if why.retry_after_ms:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(why.retry_after_ms)
        details.append(_packed(retry))
    if why.param:
        field = error_details_pb2.BadRequest.FieldViolation(field=why.param, description=why.message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[field])))
    rich = status_pb2.Status(code=code_pb2.Code.Value(status.name), message=why.message, details=details)
    await context.abort(status, why.message, (("grpc-status-details-bin", rich.SerializeToString()),))


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _file(file: File) -> batches_pb2.File:
    return batches_pb2.File(
        id=file.id,
        bytes=file.bytes,
        created_s=file.created_s,
        expires_s=file.expires_s or 0,
        filename=file.filename,
        purpose=file.purpose,
    )


def _batch(batch: Batch) -> batches_pb2.Batch:
    facts = batch.facts
    times = ("created", "in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling")
    shown = not batch.open
    return batches_pb2.Batch(
        id=batch.id,
        status=f"BATCH_STATUS_{batch.status.upper()}",
        endpoint=facts.endpoint,
        input_file_id=facts.input_file_id,
        completion_window=facts.completion_window,
        metadata=facts.metadata,
        # Names are drawn before the files are there.
        output_file_id=facts.output_file_id if shown else "",
        error_file_id=facts.error_file_id if shown else "",
        request_counts=batches_pb2.Batch.RequestCounts(
            total=batch.total, completed=batch.completed, failed=batch.failed
        ),
        errors=[
            batches_pb2.Batch.LineError(code=each.code, message=each.message, line=each.line, param=each.param)
            for each in facts.errors
        ],
        usage=batches_pb2.Batch.BatchUsage(
            prompt_tokens=batch.prompt_tokens,
            cached_prompt_tokens=batch.cached_prompt_tokens,
            completion_tokens=batch.completion_tokens,
        ),
        cancelled_s=facts.cancelled_s or 0,
        **{f"{name}_s": getattr(facts, f"{name}_s") or 0 for name in times},
    )
