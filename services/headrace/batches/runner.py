"""Works batches off: claims them, sends their lines to the router's inner door, writes down what came back.

A batch is worked on by one runner at a time, under a lease that is renewed while it lasts (``store.py``). A line is
sent until it has an answer that is its own: what says "later" (429, 503) or was lost on the way (500, 502) is sent
again, the former for as long as the batch's window lasts, the latter a bounded number of times, so that a line which
brings workers down does not do so for ever. How many run at once is ``pace.py``'s. Answers are written in gathered
transactions: while one is being written, those that come meanwhile wait for the next.

The clock, the store and the way to the door are arguments. Bodies are never logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headrace.batches import lines
from headrace.batches.lines import Line
from headrace.batches.pace import Pace
from headrace.batches.store import Answer, Batch, Claim, LeaseLost, LineError, Store, StoreError
from headrace.errors import HeadraceError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Times that a line is sent whose answer was lost, or a fault of ours.
MAX_ATTEMPTS = 5
#: Before the second time; twice as long before each further one.
LOST_WAIT_S = 0.25
#: Between tries of what does not work at all: a disk that is full, a door that is closed.
RETRY_S = 1.0
#: Lines read at once.
_READ_LINES = 64
_READ_BYTES = 4 * 2**20
_LOST = (500, 502)
_LATER = (429, 503)


@dataclass(frozen=True)
class Reply:
    """What the door said to a line."""

    status: int
    body: bytes
    request_id: str = ""
    retry_after_s: float | None = None


class Door(Protocol):
    """The way to the router's inner door, in a tenant's name. Raises OSError or HeadraceError when there is none."""

    async def ask(self, tenant: str, endpoint: str, body: bytes, request_id: str) -> Reply:
        """One request of class ``batch``."""

    async def models(self, tenant: str) -> Collection[str] | None:
        """The models that it may ask; None when it may ask nothing any more, which each line will be told."""


@dataclass(frozen=True)
class Settings:
    """How batches are run."""

    bounds: lines.Bounds
    #: Lines under way, of all batches.
    max_lines_at_once: int
    #: Batches that are run side by side.
    max_batches_at_once: int
    lease_s: float
    #: Output files are kept so long; 0 = for ever.
    keep_files_s: float


class Background:
    """The store's methods, from one thread of their own, so that a disk that is slow holds up nothing else."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def do(self, method: Callable[..., T], *values: Any, **named: Any) -> T:
        """One call. Raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: method(*values, **named))

    def close(self) -> None:
        """Waits for what is under way."""
        self._thread.shutdown(wait=True)
        self.store.close()


class Runner:
    """All batches of one store."""

    def __init__(
        self,
        background: Background,
        door: Door,
        settings: Settings,
        owner: str,
        draw_file_id: Callable[[], str],
        *,
        wall_s: Callable[[], float] = time.time,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._do = background.do
        self._store = background.store
        self._door = door
        self._settings = settings
        self._owner = owner
        self._draw = draw_file_id
        self._wall_s = wall_s
        self._clock_s = clock_s
        self._at_once = asyncio.Semaphore(settings.max_lines_at_once)
        self._works: dict[str, _Work] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._stopping = False
        #: Lines that were answered here, well and otherwise.
        self.completed_lines = self.failed_lines = 0

    def nudge(self) -> None:
        """There is a batch, or one was cancelled: look now."""
        self._news.set()
        for work in self._works.values():
            work.look.set()

    @property
    def lines_under_way(self) -> int:
        """Lines that were sent and have no answer yet."""
        return sum(len(work.under_way) for work in self._works.values())

    async def run(self) -> None:
        """Until it is stopped. Batches of others are looked for every half lease."""
        while not self._stopping:
            self._news.clear()
            try:
                await self._claim_all()
            except StoreError as error:
                log.warning("batches: %s", error)
            except Exception:
                log.exception("batches could not be looked for")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self._settings.lease_s / 2)

    async def _claim_all(self) -> None:
        while not self._stopping:
            busy = len(self._works) >= self._settings.max_batches_at_once
            # What only has to be ended never waits for what runs.
            claim = await self._do(self._store.claim, self._owner, self._wall_s(), self._settings.lease_s, ending=busy)
            if claim is None:
                return
            work = _Work(claim, Pace(self._settings.max_lines_at_once, self._clock_s()))
            self._works[claim.batch.id] = work
            task = asyncio.create_task(self._work(work), name=claim.batch.id)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self, grace_s: float) -> None:
        """Sends nothing more, waits for what is under way, writes it down and leaves the batches to whoever comes."""
        self._stopping = True
        self.nudge()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for work in self._works.values():
            work.cut.set()
            work.look.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        for task in self._tasks:
            task.cancel()

    # -- one batch

    async def _work(self, work: _Work) -> None:
        claim = work.claim
        beating = asyncio.create_task(self._keep_lease(work))
        try:
            while True:
                try:
                    await self._steps(work)
                    break
                except (StoreError, OSError) as error:
                    log.warning("batch %s waits: %s", claim.batch.id, error)
                    if self._stopping:
                        break
                    await asyncio.sleep(RETRY_S)
        except LeaseLost:
            log.warning("batch %s is another runner's now", claim.batch.id)
        except Exception:
            log.exception("batch %s could not be worked on", claim.batch.id)
            # A fault of ours: not at once again.
            await asyncio.sleep(10 * RETRY_S)
        finally:
            beating.cancel()
            for task in work.under_way:
                task.cancel()
            self._works.pop(claim.batch.id, None)
            with contextlib.suppress(StoreError):
                await self._do(self._store.release, claim)
            self._news.set()

    async def _keep_lease(self, work: _Work) -> None:
        """Renews it, and learns on the way that it was cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(work.look.wait(), self._settings.lease_s / 3)
            work.look.clear()
            try:
                batch = await self._do(self._store.renew, work.claim, self._wall_s(), self._settings.lease_s)
                work.cancelled = work.cancelled or batch.status == "cancelling"
            except LeaseLost:
                work.lost = True
            except StoreError as error:
                log.warning("batch %s: its lease was not renewed: %s", work.claim.batch.id, error)
            work.wake.set()

    async def _steps(self, work: _Work) -> None:
        """From where it stands to its end, or to where it must be left."""
        batch = await self._do(self._store.renew, work.claim, self._wall_s(), self._settings.lease_s)
        path = await self._do(self._store.input_path, batch)
        if not batch.facts.ending and not await asyncio.to_thread(path.exists):
            # Somebody else's hand was in the folder: it will not come back by itself.
            lost = LineError("input_lost", "the input file is not there any more")
            await self._do(self._store.refuse, work.claim, [lost], self._wall_s())
            return
        if batch.status == "validating":
            count, errors = await self._check(batch, path)
            if errors:
                await self._do(self._store.refuse, work.claim, errors, self._wall_s())
                return
            batch = await self._do(self._store.begin, work.claim, count, self._wall_s())
        ending: str | None = batch.facts.ending
        if not ending:
            work.cancelled = work.cancelled or batch.status == "cancelling"
            ending = await self._answer_all(work, batch, path)
            if ending is None:
                return
        await self._do(
            self._store.finalize, work.claim, ending, self._draw, self._wall_s(), self._settings.keep_files_s
        )
        log.info("batch %s is %s", batch.id, ending)

    async def _check(self, batch: Batch, path: Path) -> tuple[int, list[LineError]]:
        models = await self._models(batch.tenant)
        bounds = self._settings.bounds

        def check() -> tuple[int, list[LineError]]:
            with open(path, "rb") as file:
                return lines.check(lines.bounded(file, bounds.max_line_bytes), batch.facts.endpoint, models, bounds)

        return await asyncio.to_thread(check)

    async def _models(self, tenant: str) -> Collection[str] | None:
        """The door's word, once it answers."""
        while True:
            try:
                return await self._door.models(tenant)
            except (OSError, HeadraceError) as error:
                if self._stopping:
                    raise OSError("stopping") from error
                log.warning("batches: the router's inner door does not answer: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _answer_all(self, work: _Work, batch: Batch, path: Path) -> str | None:
        """Until each line has an answer; how it ended, or None when it is left to others."""
        answered = await self._do(self._store.answered_lines, work.claim)
        source = _Source(path, self._settings.bounds.max_line_bytes, answered)
        writing: asyncio.Task[None] | None = None
        try:
            while True:
                work.wake.clear()
                if work.lost:
                    raise LeaseLost(batch.id)
                expired = self._wall_s() >= batch.facts.expires_s
                leaving = self._stopping or work.cancelled or expired
                if not leaving:
                    await self._send_more(work, batch, source)
                elif not self._stopping or work.cut.is_set():
                    await work.drop()
                if writing is not None and writing.done():
                    writing.result()
                    writing = None
                if work.unwritten and writing is None:
                    writing = asyncio.create_task(self._write(work))
                done = source.at_end and not work.again
                if (leaving or done) and not work.under_way and writing is None:
                    break
                await self._wait(work, writing)
            if work.cancelled:
                return "cancelled"
            if done:
                return "completed"
            if expired:
                await self._give_up(work, source)
                return "expired"
            return None
        finally:
            if writing is not None:
                writing.cancel()
            source.close()

    async def _wait(self, work: _Work, writing: asyncio.Task[None] | None) -> None:
        """Until there is something to do, or the pace's pause is over; the window and the stop are looked at anyway."""
        waking = asyncio.create_task(work.wake.wait())
        pause_s = work.pace.not_before_s - self._clock_s()
        timeout_s = min(max(pause_s, 0.01), 1.0) if work.hungry else 1.0
        await asyncio.wait(
            {waking, writing} if writing else {waking}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        waking.cancel()

    async def _send_more(self, work: _Work, batch: Batch, source: _Source) -> None:
        """As many lines as there is room for; not more answers than that wait to be written either."""
        limit = work.pace.limit
        room = work.pace.room(len(work.under_way), self._clock_s())
        work.hungry = len(work.under_way) < limit and not (source.at_end and not work.again)
        room = min(room, 2 * self._settings.max_lines_at_once - len(work.unwritten))
        for _ in range(room):
            if work.again:
                line, attempt = work.again.popleft()
            else:
                found = await source.next()
                if found is None:
                    break
                line, attempt = found, 1
            task = asyncio.create_task(self._ask(work, batch, line, attempt))
            work.under_way.add(task)
            task.add_done_callback(work.on_done)

    async def _ask(self, work: _Work, batch: Batch, line: Line, attempt: int) -> None:
        """A line, once: its answer is to be written, or it is to be sent again."""
        identity = line_id(batch.id, line.number)
        try:
            async with self._at_once:
                sent_s = self._clock_s()
                reply = await self._reply(batch, line, identity)
            now_s = self._clock_s()
            if reply.status in _LATER:
                work.pace.pushed_back(reply.retry_after_s, sent_s, now_s)
                work.again.append((line, attempt))
            elif reply.status in _LOST and attempt < MAX_ATTEMPTS:
                await asyncio.sleep(LOST_WAIT_S * 2 ** (attempt - 1))
                work.again.append((line, attempt + 1))
            else:
                answer = lines.answered(line, identity, reply.status, reply.request_id or identity, reply.body)
                full = len(work.under_way) >= work.pace.limit
                work.pace.ended(answer.prompt_tokens + answer.completion_tokens, sent_s, now_s, full=full)
                work.unwritten.append(answer)
        except asyncio.CancelledError:
            work.again.append((line, attempt))
            raise

    async def _reply(self, batch: Batch, line: Line, identity: str) -> Reply:
        try:
            return await self._door.ask(batch.tenant, batch.facts.endpoint, line.body, identity)
        except OSError as error:
            # The door is in our own process: it is closing, or out of descriptors.
            log.debug("batch %s: the inner door: %s", batch.id, error)
            return Reply(503, b"")
        except HeadraceError as error:
            # An answer that broke off, or is larger than any should be.
            message = {"message": str(error), "type": "server_error", "param": None, "code": "internal"}
            return Reply(502, json.dumps({"error": message}).encode())

    async def _write(self, work: _Work) -> None:
        """What has come so far, in one transaction; again, when the disk takes no more, until it does."""
        answers = list(work.unwritten)
        while True:
            try:
                await self._add(work, answers)
                break
            except StoreError as error:
                log.warning("batch %s: answers wait to be written: %s", work.claim.batch.id, error)
                if self._stopping:
                    # They are asked again by whoever goes on.
                    break
                await asyncio.sleep(RETRY_S)
        for _ in answers:
            work.unwritten.popleft()

    async def _add(self, work: _Work, answers: list[Answer]) -> None:
        await self._do(self._store.add_answers, work.claim, answers)
        succeeded = sum(answer.succeeded for answer in answers)
        self.completed_lines += succeeded
        self.failed_lines += len(answers) - succeeded

    async def _give_up(self, work: _Work, source: _Source) -> None:
        """Its window is over: each line without an answer is told so."""
        message = "this request could not be executed before the completion window expired"
        batch = work.claim.batch

        def told(line: Line) -> Answer:
            return lines.not_answered(line, line_id(batch.id, line.number), "batch_expired", message)

        answers = [told(line) for line, _ in work.again]
        work.again.clear()
        while (line := await source.next()) is not None:
            answers.append(told(line))
            if len(answers) >= 1000:
                await self._add(work, answers)
                answers = []
        await self._add(work, answers)


@dataclass
class _Work:
    """A batch that is worked on."""

    claim: Claim
    pace: Pace
    under_way: set[asyncio.Task[None]] = field(default_factory=set)
    #: To be sent again, with the number of the attempt.
    again: deque[tuple[Line, int]] = field(default_factory=deque)
    unwritten: deque[Answer] = field(default_factory=deque)
    #: Something happened that the sender should look at.
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    #: The lease's keeper should look now.
    look: asyncio.Event = field(default_factory=asyncio.Event)
    #: The grace is over.
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    lost: bool = False
    #: More could be sent but for the pace's pause.
    hungry: bool = False

    def on_done(self, task: asyncio.Task[None]) -> None:
        """A line's task has ended."""
        self.under_way.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("batch %s: a line's task failed", self.claim.batch.id, exc_info=task.exception())
            # Its line is lost to this claim: the next one finds it without an answer.
            self.lost = True
        self.wake.set()

    async def drop(self) -> None:
        """Ends what is under way, without an answer."""
        tasks = list(self.under_way)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class _Source:
    """The lines of an input that have no answer yet, in order, a few read ahead."""

    def __init__(self, path: Path, max_line_bytes: int, answered: Collection[int]) -> None:
        self._lines = self._unanswered(path, max_line_bytes, answered)
        self._ahead: deque[Line] = deque()
        self.at_end = False

    @staticmethod
    def _unanswered(path: Path, max_line_bytes: int, answered: Collection[int]) -> Generator[Line, None, None]:
        with open(path, "rb") as file:
            for number, text in lines.numbered(lines.bounded(file, max_line_bytes)):
                if number not in answered:
                    yield lines.parse(number, text)

    def close(self) -> None:
        """Reads no more."""
        # A read that is under way in its thread cannot be; the file is closed when that is over.
        with contextlib.suppress(ValueError):
            self._lines.close()

    async def next(self) -> Line | None:
        """The next one; None at the end."""
        if not self._ahead and not self.at_end:
            self._ahead.extend(await asyncio.to_thread(self._read))
        if not self._ahead:
            self.at_end = True
            return None
        return self._ahead.popleft()

    def _read(self) -> list[Line]:
        read: list[Line] = []
        size = 0
        for line in self._lines:
            read.append(line)
            size += len(line.body)
            if len(read) >= _READ_LINES or size >= _READ_BYTES:
                break
        return read


def line_id(batch_id: str, number: int) -> str:
    """A line's own id: the same each time that it is sent."""
    digest = hashlib.blake2b(f"{batch_id} {number}".encode(), digest_size=16).hexdigest()
    return f"batch_req_{digest}"
