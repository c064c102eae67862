"""A stream that a service keeps open to another one: tried again for ever, with backoff and jitter."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from headrace.serving import CHANNEL_OPTIONS, channel
from headrace.tls import Tls

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S, _LAST_BACKOFF_S = 0.05, 2.0

#: For a stream's first message to leave. gRPC was seen to wait without end, neither connected nor failed, on a machine
#: with too much to do (``tests/contract/test_block_soak.py``, three thousand restarts in).
BEGIN_TIMEOUT_S = 20.0

#: A try has a connection of its own, so that the next one does not wait for what this one has waited for.
_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))


class Backoff:
    """Waits longer each time, never twice the same."""

    def __init__(self, dice: random.Random | None = None) -> None:
        self._dice = dice or random.Random()
        self._next_s = _FIRST_BACKOFF_S

    def reset(self) -> None:
        """The last try went well."""
        self._next_s = _FIRST_BACKOFF_S

    def next_s(self) -> float:
        """How long to wait now."""
        wait_s = self._next_s * self._dice.uniform(0.5, 1.5)
        self._next_s = min(self._next_s * 2, _LAST_BACKOFF_S)
        return wait_s


async def begin(call: Any, hello: Any) -> None:
    """Writes a stream's first message. Raises TimeoutError when there is no connection in time."""
    async with asyncio.timeout(BEGIN_TIMEOUT_S):
        await call.write(hello)


async def keep_calling(
    name: str,
    address: str,
    tls: Tls | None,
    once: Callable[[grpc.aio.Channel, Backoff], Awaitable[None]],
    leaving: Callable[[], bool] = lambda: False,
) -> None:
    """Do ``once`` again and again: it opens a stream (with :func:`begin`), serves it to its end, and resets the backoff
    when that works."""
    backoff = Backoff()
    heard = True
    task = asyncio.current_task()
    assert task is not None
    while not leaving():
        try:
            # A new one each time: a channel keeps the certificates that it was made with.
            async with channel(address, tls, _OPTIONS) as link:
                await once(link, backoff)
            reason = "it closed the stream"
        except grpc.aio.AioRpcError as failure:
            reason = f"{failure.code().name}: {failure.details()}"
        except TimeoutError:
            reason = f"no connection within {BEGIN_TIMEOUT_S:g} s"
        except asyncio.InvalidStateError as failure:
            # The stream was closed under the writer.
            reason = str(failure)
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            # gRPC raises this for a call that was cancelled, too.
            reason = "the call was cancelled"
        if task.cancelling():
            # And it may answer a cancellation of ours with an error of the call's.
            raise asyncio.CancelledError
        if leaving():
            return
        # Once for each time that it goes away, not once a try.
        if heard:
            log.warning("the %s at %s is away (%s); trying again", name, address, reason)
        wait_s = backoff.next_s()
        heard = wait_s <= 2 * _FIRST_BACKOFF_S
        await asyncio.sleep(wait_s)
