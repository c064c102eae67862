"""Who holds which KV blocks, for the scheduler: it follows the cache's news. The cache being away is no error.

Messages go as they came, in bytes, through the core, which says what is to be sent back. What is known is used for a
while when the cache is away, and then forgotten: it would be wrong too often.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

from headrace import _gateway
from headrace.calling import Backoff, begin, keep_calling
from headrace.tls import Tls
from headrace.v1 import cache_pb2

#: So long what is known of blocks is used while the cache is away.
BLOCKS_LAST_S = 10.0

_METHOD = f"/{cache_pb2.DESCRIPTOR.services_by_name['CacheService'].full_name}/WatchBlocks"


class BlocksLink:
    """One WatchBlocks stream."""

    def __init__(
        self,
        address: str,
        core: _gateway.Scheduler,
        tls: Tls | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._core = core
        self._tls = tls
        self._now = now
        self._heard_s = now()

    async def run(self) -> None:
        """Never returns."""
        await keep_calling("cache", self._address, self._tls, self._once)

    async def _once(self, link: grpc.aio.Channel, backoff: Backoff) -> None:
        if self._now() - self._heard_s > BLOCKS_LAST_S:
            self._core.blocks_away()
        call = link.stream_stream(_METHOD, None, None)()  # type: ignore[call-arg]
        connected = False
        try:
            await begin(call, self._core.blocks_known())
            async for message in call:
                connected = True
                backoff.reset()
                lost = self._core.blocks_message(message)
                if lost is not None:
                    await call.write(lost)
        finally:
            if connected:
                self._heard_s = self._now()
            call.cancel()
