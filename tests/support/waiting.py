"""Waiting for a state of another process: look again until it is so, under a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

#: How often a state that nobody announces is looked at.
LOOK_EVERY_S = 0.01


async def eventually(look: Callable[[], Awaitable[T]], what: str, timeout_s: float = 10.0) -> T:
    """The first true value of `look`. Raises AssertionError, with the last value, when none comes in time."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    while True:
        value = await look()
        if value:
            return value
        assert loop.time() < until_s, f"not within {timeout_s} s: {what} (last: {value!r})"
        await asyncio.sleep(LOOK_EVERY_S)
