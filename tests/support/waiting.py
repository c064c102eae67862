"""Waiting for a state of another process: look again until it is so, under a limit."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
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


class Lag:
    """How late this machine wakes up who sleeps, on average: what a busy one adds wherever a process waits for another.

    A context manager; `mean_s` is known after it.
    """

    mean_s = 0.0

    def __enter__(self) -> Lag:
        self._late_s: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.is_set():
            before_s = time.monotonic()
            time.sleep(LOOK_EVERY_S)
            self._late_s.append(time.monotonic() - before_s - LOOK_EVERY_S)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.mean_s = statistics.fmean(self._late_s or [0.0])
