"""An engine that runs elsewhere, behind gRPC: what is the same whatever protocol its server speaks.

For engines that somebody else starts and keeps. It batches there, so this is a ``Driver`` (``selfbatched.py``): one
call for each choice, whose messages of the same turn of the loop leave in one frame; a call that ends early is an
abort there; the server is asked for its health all the while. A ``Dialect`` (``trtllm_grpc.py``, ``openengine.py``)
knows the messages. What its protocol cannot say exactly, it refuses.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from headrace.config import WorkerConfig
from headrace.errors import EngineError, error
from headrace.models import ModelFolder
from headrace.serving import channel
from headrace.tls import Tls
from headrace.v1 import types_pb2
from headrace.worker.engine import Outcome, Request, TokenLogprobs
from headrace.worker.selfbatched import Inbox, KvState, Room, Run
from headrace.worker.validate import malformed

log = logging.getLogger(__name__)

HEALTH_EVERY_S, HEALTH_TIMEOUT_S = 0.5, 5.0
#: A server that leaves so many looks in a row unanswered is gone. One alone is a machine that was busy.
HEALTH_MISSES = 2
#: That a server answers a request that it will not do, before anything of it.
_REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
)


@dataclass(frozen=True, slots=True)
class Greeting:
    """Who a server is and what it has; 0 = it does not say."""

    version: str
    slots: int = 0
    context_tokens: int = 0
    vocab_size: int = 0
    block_tokens: int = 0
    kv_blocks: int = 0


@dataclass(slots=True)
class News:
    """What one message of a server says of its run. ``end`` is the last word."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    #: Of its prompt, reused; None = not said here.
    cached_tokens: int | None = None
    #: Of KV that waits to be fetched.
    reference: str = ""
    end: Outcome | None = None
    #: For a bad end.
    why: types_pb2.Error | None = None


@dataclass(slots=True)
class Heard:
    """What a run has brought so far."""

    count: int = 0
    last_id: int = -1


class Dialect(Protocol):
    """One protocol, spoken to one server."""

    #: As in ``worker.engine``.
    name: str

    def attach(self, link: grpc.aio.Channel) -> None:
        """The channel to speak on."""

    async def sick(self, timeout_s: float) -> str | None:
        """Why the server says that it does not serve, or None. Raises AioRpcError."""

    async def greet(self) -> Greeting:
        """Who it is; asked once, when it is healthy. Raises EngineError, AioRpcError."""

    def capabilities(self) -> types_pb2.Capabilities:
        """After ``greet``."""

    def kv_state_tag(self) -> str:
        """After ``greet``: KV goes only to engines with the same; empty = to none."""

    def refuse(self, request: Request) -> types_pb2.Error | None:
        """Why this protocol, or this server, cannot do it."""

    def generate(self, run: Run, request_id: str) -> Any:
        """The call: a stream of messages."""

    def read(self, run: Run, heard: Heard, message: Any) -> News:
        """One of them. ``heard`` is as of before it."""

    async def kv(self, timeout_s: float) -> KvState | None:
        """What its KV holds, or None when it does not say. Raises AioRpcError."""


class RemoteEngine:
    """See the module's text."""

    def __init__(self, dialect: Dialect, folder: ModelFolder, worker: WorkerConfig, tls: Tls | None = None) -> None:
        self._dialect = dialect
        self._folder = folder
        self._worker = worker
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._inbox: Inbox | None = None
        self._calls: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._version = ""
        #: Looks at its health, the last ones, that it has not answered.
        self._missed = 0
        self._kv = KvState()
        self._iteration = 0
        self._stepping = False
        #: Other workers may ask the same server, and this one may have asked it before.
        self._prefix = secrets.token_hex(4)

    async def open(self, inbox: Inbox) -> Room:
        """Waits until the server is healthy."""
        self._inbox = inbox
        worker, folder, dialect = self._worker, self._folder, self._dialect
        address = worker.engine_address
        self._channel = channel(address, self._tls)
        dialect.attach(self._channel)
        try:
            async with asyncio.timeout(worker.engine_start_timeout_s):
                while (why := await self._sick()) is not None:
                    log.info("the engine at %s is not ready: %s", address, why)
                    await asyncio.sleep(HEALTH_EVERY_S)
                found = await dialect.greet()
        except (TimeoutError, grpc.aio.AioRpcError) as failure:
            text = failure.details() if isinstance(failure, grpc.aio.AioRpcError) else "it is not ready in time"
            raise EngineError(f"the engine at {address}: {text}") from failure
        if found.vocab_size > folder.vocab_size:
            raise EngineError(
                f"the engine at {address} has a vocabulary of {found.vocab_size} ids, "
                f"the model's folder says {folder.vocab_size}"
            )
        self._version = found.version
        context = worker.context_tokens or folder.context_tokens
        block_tokens = found.block_tokens or worker.block_tokens
        self._watch = asyncio.create_task(self._look(), name="engine health")
        return Room(
            slots=min(worker.slots, found.slots or worker.slots),
            context_tokens=min(context, found.context_tokens or context),
            block_tokens=block_tokens,
            kv_blocks=found.kv_blocks or worker.kv_tokens // block_tokens,
        )

    async def close(self) -> None:
        """Ends the calls; the engine is somebody else's."""
        if self._watch is not None:
            self._watch.cancel()
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)

    def kill(self) -> None:
        """No more of its calls."""
        for task in self._tasks:
            task.cancel()

    def describe(self) -> types_pb2.ModelDescription:
        """Of the folder, and of what the server can do."""
        folder = self._folder
        return types_pb2.ModelDescription(
            engine=self._dialect.name,
            engine_version=self._version,
            quantization=folder.quantization,
            tokenizer_sha256=folder.tokenizer_sha256,
            template_sha256=folder.template_sha256,
            vocab_size=folder.vocab_size,
            eos_ids=folder.eos_ids,
            capabilities=self._dialect.capabilities(),
            kv_state_tag=self._dialect.kv_state_tag(),
        )

    async def check(self, request: Request) -> types_pb2.Error | None:
        """The form of its guide; the engine says the rest."""
        return malformed(request.guided) if request.guided is not None else None

    def refuse(self, request: Request) -> types_pb2.Error | None:
        """See ``Driver.refuse``. ``min_tokens`` holds back one end id there, in every protocol."""
        stopping = request.stopping
        if stopping.min_tokens and (stopping.stop_ids or len(stopping.eos_ids) > 1):
            text = "this engine's min_tokens holds back one end-of-sequence id, and this request has more ends"
            return error(types_pb2.ERROR_CODE_UNSUPPORTED, text, param="min_tokens")
        return self._dialect.refuse(request)

    def begin(self, run: Run) -> None:
        """See ``Driver.begin``."""
        call = self._calls[run.id] = self._dialect.generate(run, f"{self._prefix}-{run.id}")
        task = asyncio.create_task(self._run(run, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort(self, run: Run) -> None:
        """See ``Driver.abort``. A call that ends is an abort there."""
        call = self._calls.get(run.id)
        if call is not None:
            call.cancel()

    def kv(self) -> KvState:
        """As of the last look at its health."""
        return self._kv

    # --- calls ------------------------------------------------------------------------------------------------------

    async def _run(self, run: Run, call: Any) -> None:
        heard, read = Heard(), self._dialect.read
        try:
            async for message in call:
                news = read(run, heard, message)
                self._tell(run, news)
                if news.end is not None:
                    return
                if news.ids:
                    heard.count += len(news.ids)
                    heard.last_id = news.ids[-1]
            self._tell(run, failed("the stream ended without an end"))
        except asyncio.CancelledError:
            # The call's own cancellation looks the same as this task's; after the latter nobody listens any more.
            self._tell(run, News(end=types_pb2.OUTCOME_CANCELLED))
        except grpc.aio.AioRpcError as failure:
            self._tell(run, _ended(failure, heard.count))
        except Exception as failure:
            # A message that is not what the protocol says must not leave its run hanging.
            log.exception("what the engine said was not understood")
            call.cancel()
            self._tell(run, failed(f"{type(failure).__name__}: {failure}"))
        finally:
            self._calls.pop(run.id, None)

    def _tell(self, run: Run, news: News) -> None:
        assert self._inbox is not None
        if news.ids:
            self._inbox.tokens(run, news.ids, news.logprobs, news.cached_tokens)
        if news.reference:
            self._inbox.handed_over(run, news.reference)
        if news.end is not None:
            self._inbox.ended(run, news.end, news.why, news.cached_tokens)
        if news.ids or news.end is not None:
            self._step_soon()

    def _step_soon(self) -> None:
        """All that came in this turn of the loop goes out together."""
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        assert self._inbox is not None
        self._stepping = False
        self._iteration += 1
        self._inbox.stepped(self._iteration)

    # --- health -----------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        assert self._inbox is not None
        tells = True
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            why = await self._sick()
            if why is not None:
                if 0 < self._missed < HEALTH_MISSES:
                    log.warning("the engine at %s has not answered in time: %s", self._worker.engine_address, why)
                    continue
                self._inbox.failed(f"the engine at {self._worker.engine_address} is gone: {why}")
                return
            if tells:
                try:
                    found = await self._dialect.kv(HEALTH_TIMEOUT_S)
                except grpc.aio.AioRpcError as failure:
                    if failure.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                        continue
                    log.warning("the engine does not tell its load: %s", failure.details())
                    found = None
                tells = found is not None
                self._kv = found or KvState()

    async def _sick(self) -> str | None:
        """Why the server does not serve, as it says itself or by its silence; or None."""
        try:
            why = await self._dialect.sick(HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            late = failure.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            self._missed = self._missed + 1 if late else 0
            return f"{failure.code().name}: {failure.details()}"
        self._missed = 0
        return why


def _ended(failure: grpc.aio.AioRpcError, count: int) -> News:
    """How a call ended that brought ``count`` ids."""
    code, text = failure.code(), failure.details() or failure.code().name
    if code == grpc.StatusCode.CANCELLED:
        return News(end=types_pb2.OUTCOME_CANCELLED)
    if code in _REFUSALS and not count:
        return refused(text)
    return failed(text)


def refused(text: str) -> News:
    """The server will not do it."""
    why = error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, f"the engine refused it: {text}")
    return News(end=types_pb2.OUTCOME_REJECTED, why=why)


def failed(text: str, *, retryable: bool = True, code: types_pb2.ErrorCode = types_pb2.ERROR_CODE_INTERNAL) -> News:
    """It went wrong there."""
    why = error(code, f"the engine failed: {text}", retryable=retryable)
    return News(end=types_pb2.OUTCOME_FAILED, why=why)
