"""The thread that keeps the core's books: it takes what there is to do, does it, and says so on the loop.

One batch is under way at a time: while it is being committed, the next one gathers. A database that cannot be used is
tried again for ever; meanwhile requests of tenants with limits wait, and then are refused, and routers keep what has
ended until it is written.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from headrace import _gateway
from headrace.ledger.shared import SharedMeters
from headrace.ledger.store import Answer, Store, StoreError

log = logging.getLogger(__name__)

_BATCH = 1024
_RETRY_S = 0.5
_HOUSEKEEPING_S = 600.0


class LedgerWriter:
    """Must be told by :meth:`wake` when there is something to do."""

    def __init__(
        self,
        core: _gateway.Scheduler,
        store: Store,
        shared: SharedMeters | None,
        done: Callable[[list[Answer]], None],
        *,
        retention_s: float,
    ) -> None:
        """``done`` is called on the running loop, with one answer for each of what was taken."""
        self._core = core
        self._store = store
        self._shared = shared
        self._done = done
        self._retention_s = retention_s
        self._loop = asyncio.get_running_loop()
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There is something to do. From any thread."""
        self._work.set()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Writes what there is, and ends."""
        self._stopping = True
        self._work.set()
        await asyncio.to_thread(self._thread.join, grace_s)
        if self._thread.is_alive():
            log.error("the ledger's database does not answer: the last books are not written")

    def _run(self) -> None:
        next_s = time.monotonic()
        while True:
            stopping = self._stopping
            self._work.wait(0.0 if stopping else max(0.0, next_s - time.monotonic()))
            self._work.clear()
            while self._one_batch():
                pass
            if stopping or time.monotonic() >= next_s:
                next_s = time.monotonic() + _HOUSEKEEPING_S
                self._keep_house(stopping)
            if stopping:
                break
        self._store.close()
        if self._shared is not None:
            self._shared.close()

    def _one_batch(self) -> bool:
        entries = self._core.ledger_take(_BATCH)
        if not entries:
            return False
        answers: list[Answer] | None = None
        told = False
        while True:
            try:
                if answers is None:
                    answers = self._store.carry_out(entries, shared=self._shared is not None)
                if self._shared is not None:
                    answers = self._shared.carry_out(entries, answers)
                break
            except StoreError as error:
                if not told:
                    log.error("the ledger cannot be written, %d entries wait: %s", len(entries), error)
                    told = True
                if self._stopping:
                    return False
                time.sleep(_RETRY_S)
        if told:
            log.info("the ledger can be written again")
        heard = threading.Event()

        def tell(answers: list[Answer]) -> None:
            self._done(answers)
            heard.set()

        try:
            self._loop.call_soon_threadsafe(tell, answers)
        except RuntimeError:
            # The loop is closed: the process is going, and what was taken is written.
            return False
        # The core gives the same entries until it has heard.
        while not heard.wait(0.5):
            if self._loop.is_closed():
                return False
        return True

    def _keep_house(self, stopping: bool) -> None:
        try:
            self._store.keep_token_times(self._core.measured())
            while not stopping and self._store.forget_before(time.time() - self._retention_s):
                pass
        except StoreError as error:
            log.warning("the ledger's housekeeping failed: %s", error)
