"""The worker's own calls: it joins the scheduler and tells the cache of its blocks, for as long as it lives.

Both streams are tried again for ever, with backoff and jitter; neither being away is an error of any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc

from headrace.calling import Backoff, begin, keep_calling
from headrace.tls import Tls
from headrace.v1 import cache_pb2, cache_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from headrace.worker.blocks import BlockLog

log = logging.getLogger(__name__)

_EVENTS_IN_MESSAGE = 512
#: Until the scheduler has said how often it wants to hear.
_DEFAULT_HEARTBEAT_S = 0.25


class SchedulerLink:
    """Membership: hello, then a report each heartbeat and at once when the state changes; commands come back."""

    def __init__(
        self,
        address: str,
        hello: Callable[[], scheduler_pb2.JoinHello],
        report: Callable[[], worker_pb2.Load],
        on_command: Callable[[scheduler_pb2.JoinResponse], None],
        tls: Tls | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._hello = hello
        self._report = report
        self._on_lost = on_lost
        self._on_command = on_command
        self._tls = tls
        self._changed = asyncio.Event()
        self._reported = asyncio.Event()
        self._joined = False
        #: Requests whose router was lost: all that are known, for a new stream; and those to be told on this one.
        self.known_orphans: Callable[[], list[scheduler_pb2.JoinRequest.Orphan]] = list
        self._orphans: list[scheduler_pb2.JoinRequest.Orphan] = []

    def tell_of(self, orphans: list[scheduler_pb2.JoinRequest.Orphan]) -> None:
        """These requests' router was lost."""
        if self._joined:
            self._orphans += orphans
            self._changed.set()

    def state_changed(self) -> None:
        """Report at once."""
        self._reported.clear()
        self._changed.set()

    async def reported(self) -> None:
        """Returns when the last change of state has been told, or at once when nobody listens."""
        if self._joined:
            await self._reported.wait()

    async def run(self) -> None:
        """Never returns."""
        await keep_calling("scheduler", self._address, self._tls, self._once)

    async def _once(self, link: grpc.aio.Channel, backoff: Backoff) -> None:
        call = scheduler_pb2_grpc.SchedulerServiceStub(link).Join()  # type: ignore[no-untyped-call]
        reader: asyncio.Task[None] | None = None
        heartbeat_s = _DEFAULT_HEARTBEAT_S

        async def read() -> None:
            nonlocal heartbeat_s
            async for message in call:
                backoff.reset()
                if message.WhichOneof("command") == "welcome":
                    heartbeat_s = max(message.welcome.heartbeat_ms / 1000, 0.01)
                    self._joined = True
                    self._changed.set()
                    log.info("joined the scheduler at %s", self._address)
                elif message.WhichOneof("command") == "set_heartbeat":
                    heartbeat_s = max(message.set_heartbeat.heartbeat_ms / 1000, 0.01)
                    # The wait under way is the old one.
                    self._changed.set()
                else:
                    self._on_command(message)

        try:
            self._orphans.clear()
            hello = scheduler_pb2.JoinRequest(hello=self._hello(), load=self._report(), orphans=self.known_orphans())
            await begin(call, hello)
            reader = asyncio.create_task(read())
            while not reader.done():
                # One timer for both: whichever comes first, the next report counts from it.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), heartbeat_s)
                self._changed.clear()
                orphans, self._orphans = self._orphans, []
                await call.write(scheduler_pb2.JoinRequest(load=self._report(), orphans=orphans))
                if not self._changed.is_set():
                    self._reported.set()
            await reader
        finally:
            if self._joined:
                self._on_lost()
            self._joined = False
            self._reported.set()
            if reader is not None:
                reader.cancel()
            call.cancel()


class CacheLink:
    """Block events, from where the cache wants them on."""

    def __init__(
        self, address: str, hello: Callable[[], cache_pb2.BlocksHello], blocks: BlockLog, tls: Tls | None = None
    ) -> None:
        self._address = address
        self._hello = hello
        self._blocks = blocks
        self._tls = tls
        self._grown = asyncio.Event()
        self._leaving = False

    def leave(self) -> None:
        """Says what is still to be said, and goodbye; ``run`` returns."""
        self._leaving = True
        self._grown.set()

    def grown(self) -> None:
        """The log has new events."""
        self._grown.set()

    async def run(self) -> None:
        """Returns only after ``leave``."""
        await keep_calling("cache", self._address, self._tls, self._once, lambda: self._leaving)

    async def _once(self, link: grpc.aio.Channel, backoff: Backoff) -> None:
        call = cache_pb2_grpc.CacheServiceStub(link).PublishBlocks()  # type: ignore[no-untyped-call]
        wants: asyncio.Queue[cache_pb2.PublishBlocksResponse] = asyncio.Queue(16)

        async def read() -> None:
            async for message in call:
                await wants.put(message)
                self._grown.set()

        await begin(call, cache_pb2.PublishBlocksRequest(hello=self._hello()))
        reader = asyncio.create_task(read())
        reader.add_done_callback(lambda _: self._grown.set())
        next_: int | None = None
        try:
            while not reader.done():
                while not wants.empty():
                    backoff.reset()
                    want = wants.get_nowait()
                    if want.WhichOneof("want") == "snapshot":
                        snapshot = self._blocks.snapshot()
                        await call.write(cache_pb2.PublishBlocksRequest(snapshot=snapshot))
                        next_ = snapshot.next_sequence
                    else:
                        next_ = want.resume_from
                if next_ is not None:
                    async for message in self._messages(next_):
                        await call.write(message)
                        next_ = message.events[-1].sequence + 1
                    if self._blocks.since(next_, 0) is None:
                        # Fallen behind what is kept: a new hello says so, and a snapshot will be wanted.
                        return
                if self._leaving:
                    await call.done_writing()
                    break
                await self._grown.wait()
                self._grown.clear()
            await reader
        finally:
            reader.cancel()
            call.cancel()

    async def _messages(self, sequence: int) -> AsyncIterator[cache_pb2.PublishBlocksRequest]:
        while events := self._blocks.since(sequence, _EVENTS_IN_MESSAGE):
            yield cache_pb2.PublishBlocksRequest(events=events)
            sequence = events[-1].sequence + 1
