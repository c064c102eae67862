"""KV on its way from worker to worker: the two ends of ``PullKv``.

The end that gives (:func:`give`) sends blocks from the hand-offs' store as they come; the transport's flow control
holds it back, and a taker that does not read is cut off. The end that takes (:func:`take`) believes nothing: parts must
be in order and of the size that was said, and a block's ids must be the prompt's own. Whatever goes wrong, the blocks
before it are of use, and the rest is computed where it is needed: nothing here is an error of a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from headrace.errors import EngineError
from headrace.serving import channel
from headrace.tls import Tls
from headrace.v1 import worker_pb2, worker_pb2_grpc
from headrace.worker.engine import KvIntake, Request
from headrace.worker.handoffs import Handoffs, Kept, Refused

log = logging.getLogger(__name__)

#: KV in one message, at most.
PART_BYTES = 2**20
#: The longest that a taker may wait for a hand-off to begin.
MAX_WAIT_S = 10.0
#: Takers that wait so; each is a stream, of which there is a bound too.
_MAX_WAITING = 1024
#: A block larger than that is no block.
_MAX_BLOCK_BYTES = 256 * 2**20
#: KV that the engine has not taken in yet, while more is read.
_WINDOW_BYTES = 32 * 2**20


@dataclass(slots=True)
class Received:
    """What has come since the worker's start, and how."""

    bytes: int = 0
    #: Without the time that KV had to be waited for because it was not computed.
    seconds: float = 0.0
    complete: int = 0
    broken: int = 0


@dataclass(slots=True)
class Progress:
    """How far the taking of one hand-off is."""

    #: The other worker knows of it.
    begun: bool = False
    #: Blocks that the engine has taken.
    blocks: int = 0


class Waiters:
    """Takers that came before what they want."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Event] = {}

    def opened(self, reference: str) -> None:
        """A hand-off began."""
        if (event := self._waiting.get(reference)) is not None:
            event.set()

    async def wait(self, reference: str, seconds: float) -> None:
        """Until it begins, or so long."""
        if reference in self._waiting or len(self._waiting) >= _MAX_WAITING:
            return
        event = self._waiting[reference] = asyncio.Event()
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return
        finally:
            del self._waiting[reference]


async def give(
    handoffs: Handoffs,
    waiters: Waiters,
    tag: str,
    request: worker_pb2.PullKvRequest,
    context: grpc.aio.ServicerContext[Any, Any],
) -> None:
    """Serves one ``PullKv``."""
    if request.kv_state_tag != tag:
        text = f"KV of {request.kv_state_tag!r} is not to be had here, where it is {tag!r}"
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)

    def find() -> Kept | Refused:
        try:
            return handoffs.take(request.reference, request.lora, request.cache_salt, request.first_block)
        except Refused as refused:
            return refused

    kept = find()
    if isinstance(kept, Refused) and not kept.known and request.wait_ms:
        await waiters.wait(request.reference, min(request.wait_ms / 1000, MAX_WAIT_S))
        kept = find()
    if isinstance(kept, Refused):
        code = grpc.StatusCode.FAILED_PRECONDITION if kept.known else grpc.StatusCode.NOT_FOUND
        await context.abort(code, str(kept))
        return
    news = asyncio.Event()
    kept.on_news = news.set
    waited = False
    try:
        await context.send_initial_metadata(())
        while not kept.over:
            if kept.failed:
                await context.abort(grpc.StatusCode.ABORTED, "the prompt will not be computed, or its time is over")
            block = handoffs.take_block(kept)
            if block is None:
                news.clear()
                waited = True
                await news.wait()
                continue
            async with asyncio.timeout(kept.keep_s):
                await _send(context, kept, *block, waited=waited)
            waited = False
        await context.write(worker_pb2.PullKvResponse(waited=waited, end_blocks=min(kept.cut_at, kept.total)))
    except TimeoutError:
        await context.abort(grpc.StatusCode.ABORTED, f"nothing was read for {kept.keep_s:g} s")
    finally:
        handoffs.drop(kept)


async def _send(
    context: grpc.aio.ServicerContext[Any, Any], kept: Kept, block: int, kv: bytes, *, waited: bool
) -> None:
    for offset in range(0, len(kv), PART_BYTES):
        part = worker_pb2.PullKvResponse(
            block=block,
            offset=offset,
            block_bytes=len(kv),
            kv=kv[offset : offset + PART_BYTES],
            ids=kept.block_ids(block) if offset == 0 else (),
            waited=waited and offset == 0,
        )
        await context.write(part)


class _Broken(Exception):
    """What came is not what it should be."""


class _Block:
    """A block in the making, out of its parts."""

    def __init__(self, request: Request, size: int, first_block: int) -> None:
        self._request = request
        self._size = size
        self._next = first_block
        self._kv = bytearray()

    def add(self, part: worker_pb2.PullKvResponse) -> bytes | None:
        """The block's KV, when this part completes it. Raises _Broken."""
        start = self._next * self._size
        if part.block != self._next or part.offset != len(self._kv):
            raise _Broken(f"block {part.block} from {part.offset} came where {self._next} from {len(self._kv)} was due")
        if start + self._size > len(self._request.prompt_ids):
            raise _Broken("more blocks came than the prompt has")
        if part.offset == 0 and list(part.ids) != self._request.prompt_ids[start : start + self._size]:
            raise _Broken(f"block {part.block} is of another prompt")
        if not part.kv or len(part.kv) > PART_BYTES or not len(self._kv) + len(part.kv) <= part.block_bytes:
            raise _Broken(f"a part of {len(part.kv)} bytes, of a block of {part.block_bytes}")
        if part.block_bytes > _MAX_BLOCK_BYTES:
            raise _Broken(f"a block of {part.block_bytes} bytes; the limit is {_MAX_BLOCK_BYTES}")
        self._kv += part.kv
        if len(self._kv) < part.block_bytes:
            return None
        kv, self._kv = bytes(self._kv), bytearray()
        self._next += 1
        return kv


async def take(
    fetch: worker_pb2.KvHandoff.Fetch,
    request: Request,
    size: int,
    begin: Callable[[Request], Awaitable[KvIntake]],
    tls: Tls | None,
    received: Received,
    progress: Progress,
) -> None:
    """Fetches the KV of a request's prompt and gives it to the engine, in blocks of ``size`` tokens. Does not raise but
    for its own cancellation: ``progress`` says what came."""
    try:
        await _take(fetch, request, size, begin, tls, received, progress)
        received.complete += 1
    except grpc.aio.AioRpcError as failure:
        received.broken += 1
        log.warning("KV from %s: %s: %s", fetch.worker_address, failure.code().name, failure.details())
    except (_Broken, EngineError) as failure:
        received.broken += 1
        log.warning("KV from %s: %s", fetch.worker_address, failure)


async def _take(
    fetch: worker_pb2.KvHandoff.Fetch,
    request: Request,
    size: int,
    begin: Callable[[Request], Awaitable[KvIntake]],
    tls: Tls | None,
    received: Received,
    progress: Progress,
) -> None:
    intake = await begin(request)
    if intake.first_block >= len(request.prompt_ids) // size:
        # It is all here. The other worker keeps it in vain, for its time.
        return
    # A channel keeps the certificates that it was made with.
    async with channel(fetch.worker_address, tls) as link:
        call = worker_pb2_grpc.WorkerServiceStub(link).PullKv(  # type: ignore[no-untyped-call]
            worker_pb2.PullKvRequest(
                reference=fetch.reference,
                kv_state_tag=fetch.kv_state_tag,
                cache_salt=request.cache_salt,
                lora=request.lora,
                first_block=intake.first_block,
                wait_ms=int(MAX_WAIT_S * 1000),
            )
        )
        try:
            await call.initial_metadata()
            progress.begun = True
            await _read(call, _Block(request, size, intake.first_block), intake, received, progress)
        finally:
            call.cancel()


async def _read(call: Any, block: _Block, intake: KvIntake, received: Received, progress: Progress) -> None:
    #: Given to the engine, and not answered yet.
    pending: deque[tuple[int, Awaitable[bool]]] = deque()
    pending_bytes = 0

    async def settle() -> bool:
        nonlocal pending_bytes
        length, answer = pending.popleft()
        pending_bytes -= length
        wanted = await answer
        progress.blocks += int(wanted)
        return wanted

    asked_s = time.monotonic()
    async for part in call:
        if not part.waited:
            received.seconds += time.monotonic() - asked_s
        if part.HasField("end_blocks"):
            break
        received.bytes += len(part.kv)
        kv = block.add(part)
        if kv is not None:
            pending.append((len(kv), intake.take(kv)))
            pending_bytes += len(kv)
            while pending_bytes > _WINDOW_BYTES:
                if not await settle():
                    return
        asked_s = time.monotonic()
    else:
        raise _Broken("it ended without saying so")
    while pending:
        if not await settle():
            return
