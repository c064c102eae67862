"""Streams that are kept open: what ends them, and what does not."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from headrace import calling
from headrace.calling import Backoff, begin, keep_calling


def failed() -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), "cancelled")


async def test_a_cancellation_ends_it_even_where_the_call_makes_an_error_of_it() -> None:
    begun = asyncio.Event()
    calls = 0

    async def once(_: grpc.aio.Channel, backoff: Backoff) -> None:
        nonlocal calls
        calls += 1
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if calls > 1:
                raise
            raise failed() from None

    task = asyncio.create_task(keep_calling("cache", "127.0.0.1:1", None, once))
    await begun.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
    assert calls == 1


@pytest.mark.parametrize("error", [failed(), asyncio.CancelledError(), asyncio.InvalidStateError("closed")])
async def test_a_call_that_ends_by_itself_is_made_again(error: BaseException) -> None:
    calls = 0
    again = asyncio.Event()

    async def once(_: grpc.aio.Channel, backoff: Backoff) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error
        again.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(keep_calling("cache", "127.0.0.1:1", None, once))
    await asyncio.wait_for(again.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == 2


class Stuck:
    """A call whose connection neither comes nor fails."""

    async def write(self, _: object) -> None:
        await asyncio.Event().wait()


async def test_a_connection_that_neither_comes_nor_fails_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calling, "BEGIN_TIMEOUT_S", 0.01)
    again = asyncio.Event()
    links = []

    async def once(link: grpc.aio.Channel, backoff: Backoff) -> None:
        links.append(link)
        if len(links) > 1:
            again.set()
        await begin(Stuck(), None)

    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(keep_calling("cache", "127.0.0.1:1", None, once))
        await asyncio.wait_for(again.wait(), 10)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
    assert links[0] is not links[1], "the next try has a connection of its own"
    assert "no connection within 0.01 s" in caplog.text
