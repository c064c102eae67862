"""The scripted worker: an engine that does as it is told, behind the real worker contract.

It serves `headrace.v1.WorkerService` over real gRPC, joins a real scheduler, plays a script for each request and keeps
a journal of what it was asked and what it sent. A `Bench` holds what the workers of one test share: the scripts still
to be played and the journal. In front of each worker stands a `Door`, a TCP relay that can break every connection
without a word, as the death of a process does.

Of a request whose prompt another worker computes (`KvHandoff`), the script waits until the router says how its answer
begins, and plays what follows; no KV moves here.

A script's steps are separated by `;`, and the ids of one step travel in one frame:

    'ab'          ids 97 and 98 (UTF-8 bytes; `\\n`, `\\t`, `\\'` and `\\\\` are escapes)
    [240 159]     those ids; parts side by side make one step: 'Q' [900] 'x'
    +50           wait 50 ms, with the step count moving as in a long prefill
    END           finished (stop); END:length
    DIE           the connection is gone, no status
    HANG          nothing more comes, while heartbeats go on; so does a script without an end
    ERR:CODE      the request fails: an ErrorCode or a gRPC status name; refused when nothing was sent yet, else failed
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field

import grpc

from headrace.serving import SERVER_OPTIONS
from headrace.serving import channel as open_channel
from headrace.tls import Tls
from headrace.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from tests.support.toy import ToyModel

log = logging.getLogger(__name__)

BLOCK_TOKENS = 4
#: Of longer prompts no blocks are kept.
MOST_KEPT = 100_000
#: What a wait of more than this shows of itself: empty frames with a moved step count.
PROGRESS_S = 0.05

#: A connection on which nothing moved for so long has passed on all it was given.
SETTLE_S = 0.03

#: gRPC status names that a script may use, and the code of our closed list that stands for each. A worker's
#: RESOURCE_EXHAUSTED is about a message's size.
_STATUS_CODES = {
    "RESOURCE_EXHAUSTED": types_pb2.ERROR_CODE_TOO_LARGE,
    "NOT_FOUND": types_pb2.ERROR_CODE_MODEL_NOT_FOUND,
}
_RETRYABLE = {types_pb2.ERROR_CODE_UNAVAILABLE, types_pb2.ERROR_CODE_DRAINING, types_pb2.ERROR_CODE_OVERLOADED}
_OUTCOMES = {"": types_pb2.OUTCOME_STOP, "stop": types_pb2.OUTCOME_STOP, "length": types_pb2.OUTCOME_LENGTH}


# --- scripts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One engine iteration: ids, then perhaps an end or a fault."""

    ids: tuple[int, ...] = ()
    wait_s: float = 0.0
    end: types_pb2.Outcome | None = None
    error: types_pb2.ErrorCode | None = None
    die: bool = False
    hang: bool = False


_PART = re.compile(
    r"\s*(?:'(?P<text>(?:\\.|[^'\\])*)'|\[(?P<ids>[\d\s]*)\]|\+(?P<wait>\d+)|END(?::(?P<end>\w+))?(?P<ended>)"
    r"|(?P<die>DIE)|(?P<hang>HANG)|ERR:(?P<error>\w+)|(?P<next>;))\s*",
    re.DOTALL,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def parse(script: str) -> tuple[Step, ...]:
    """The steps of a script. Raises ValueError where it can't be read."""
    steps: list[Step] = []
    ids: list[int] = []
    at = 0

    def close(**what: object) -> None:
        if ids or what:
            steps.append(Step(tuple(ids), **what))  # type: ignore[arg-type]
            ids.clear()

    while at < len(script):
        part = _PART.match(script, at)
        if part is None:
            raise ValueError(f"cannot read the script from {script[at : at + 20]!r}")
        at = part.end()
        if part["text"] is not None:
            ids += re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), part["text"]).encode()
        elif part["ids"] is not None:
            ids += [int(number) for number in part["ids"].split()]
        elif part["wait"] is not None:
            close()
            steps.append(Step(wait_s=int(part["wait"]) / 1000))
        elif part["ended"] is not None:
            close(end=_OUTCOMES[part["end"] or ""])
        elif part["die"]:
            close(die=True)
        elif part["hang"]:
            close(hang=True)
        elif part["error"]:
            close(error=error_code(part["error"]))
        else:
            close()
    close()
    return tuple(steps)


def error_code(name: str) -> types_pb2.ErrorCode:
    """The code that a script names, by our own name for it or by a gRPC status name."""
    if name in _STATUS_CODES:
        return _STATUS_CODES[name]
    return types_pb2.ErrorCode.Value(f"ERROR_CODE_{name}")


def counting(ids: int, wait_ms: int = 10) -> str:
    """`'0'; +10; '1'; +10; ...`: so many ids, each followed by a wait."""
    wait = f"; +{wait_ms}" if wait_ms else ""
    return "; ".join(f"'{n % 10}'{wait}" for n in range(ids)) + "; END:length"


@dataclass
class Part:
    """What is played for one request: a script for each choice (one serves for all), and what else is odd."""

    scripts: tuple[str, ...]
    #: Each step waits for `Entry.release`.
    gated: bool = False
    #: What the worker reports in the place of its true usage: None = the truth, "none" = nothing, a number = so many.
    usage: int | str | None = None
    #: Log-probabilities in the place of the usual ones, by index in the answer.
    logprobs: dict[int, float] = field(default_factory=dict)
    #: The message of an ERR step.
    message: str = "the script says so"


# --- the journal ------------------------------------------------------------------------------------------------------


@dataclass
class ChoiceEntry:
    """What was sent of one choice, and how it ended."""

    sent: list[int] = field(default_factory=list)
    outcome: types_pb2.Outcome | None = None
    #: Loop time at which it was told to stop, or its link broke; and why (unset when the link broke).
    cancelled_s: float | None = None
    cancel_reason: types_pb2.Outcome | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Entry:
    """One submission, as the worker saw it."""

    worker: ScriptedWorker
    submit: worker_pb2.Submit
    part: Part
    arrived_s: float
    choices: list[ChoiceEntry]
    cached_prompt_tokens: int = 0
    #: How its answer begins, as the router said; only where another worker computes its prompt.
    proceeded: asyncio.Future[list[int]] | None = None
    _steps: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    @property
    def prompt_ids(self) -> list[int]:
        return list(self.submit.prompt_ids)

    @property
    def prompt(self) -> str:
        """The prompt's text (ids below 256 are bytes)."""
        return bytes(token_id for token_id in self.submit.prompt_ids if token_id < 256).decode("utf-8", "replace")

    @property
    def seeds(self) -> list[int]:
        return list(self.submit.sampling.seeds)

    @property
    def time_left_ms(self) -> int | None:
        return self.submit.time_left_ms if self.submit.HasField("time_left_ms") else None

    @property
    def traceparent(self) -> str:
        return self.submit.trace.traceparent

    @property
    def half(self) -> str:
        """Of a hand-off: "produce", "fetch", or none."""
        return self.submit.handoff.WhichOneof("role") or ""

    @property
    def begun(self) -> int:
        """Ids of its answer that are another worker's."""
        return len(self.proceeded.result()) if self.proceeded is not None and self.proceeded.done() else 0

    @property
    def sent(self) -> list[int]:
        """All ids sent, over all choices."""
        return [token_id for choice in self.choices for token_id in choice.sent]

    @property
    def cancelled(self) -> bool:
        return all(choice.cancelled_s is not None for choice in self.choices)

    def release(self, steps: int = 1) -> None:
        """Lets so many steps of a gated script go on."""
        for _ in range(steps):
            self._steps.release()

    async def gate(self) -> None:
        if self.part.gated:
            await self._steps.acquire()

    async def ended(self, timeout_s: float = 5.0) -> None:
        """Waits until no choice runs any more."""
        async with asyncio.timeout(timeout_s):
            for choice in self.choices:
                await choice.ended.wait()


class Bench:
    """What the workers of one test share: scripts still to be played, and the journal of all of them in order."""

    def __init__(self) -> None:
        self.journal: list[Entry] = []
        self._queued: deque[Part] = deque()
        self._by_prompt: dict[str, deque[Part]] = {}
        self._by_half: dict[str, deque[Part]] = {}
        self._written = asyncio.Condition()

    def play(self, *scripts: str, **how: object) -> None:
        """Queues one request's scripts: the next request, wherever it lands, takes them. The rest as in `Part`."""
        self._queued.append(_part(scripts, how))

    def play_for(self, prompt: str, *scripts: str, **how: object) -> None:
        """As `play`, for the next request with exactly that prompt."""
        self._by_prompt.setdefault(prompt, deque()).append(_part(scripts, how))

    def play_half(self, half: str, *scripts: str, **how: object) -> None:
        """As `play`, for the next request that is that half of a hand-off ("produce", "fetch")."""
        self._by_half.setdefault(half, deque()).append(_part(scripts, how))

    def take(self, prompt: str, half: str = "") -> Part:
        """The part for a request; a short answer when nothing was queued."""
        if halves := self._by_half.get(half):
            return halves.popleft()
        if named := self._by_prompt.get(prompt):
            return named.popleft()
        return self._queued.popleft() if self._queued else Part(("'ok'; END",))

    def clear(self) -> None:
        """Forgets what is still to be played."""
        self._queued.clear()
        self._by_prompt.clear()
        self._by_half.clear()

    async def write(self, entry: Entry) -> None:
        async with self._written:
            self.journal.append(entry)
            self._written.notify_all()

    async def entry(self, index: int = 0, timeout_s: float = 10.0) -> Entry:
        """The entry of that place in the journal, as soon as there is one."""
        async with asyncio.timeout(timeout_s), self._written:
            await self._written.wait_for(lambda: len(self.journal) > index)
            return self.journal[index]


def _part(scripts: tuple[str, ...], how: dict[str, object]) -> Part:
    for script in scripts:
        parse(script)  # a script that can't be read fails the test where it stands
    return Part(scripts, **how)  # type: ignore[arg-type]


# --- the door ---------------------------------------------------------------------------------------------------------


class Door:
    """A TCP relay in front of a server, whose connections can be broken or refused at will."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._links: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._moved_s = 0.0
        self._passed = asyncio.Condition()
        #: Bytes passed on from the server.
        self.passed_bytes = 0
        self.port = 0
        #: Connections accepted so far.
        self.accepted = 0
        #: Accept, and reset at once.
        self.slammed = False

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        """No longer listens: new connections are refused. Those that are there stay."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def passed(self, mark: int, timeout_s: float = 2.0) -> None:
        """Waits until more than `mark` bytes have come from the server, though not for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._passed:
                await self._passed.wait_for(lambda: self.passed_bytes > mark)

    async def break_all(self, *, settle: bool = True) -> None:
        """Ends every connection, after what is under way has passed."""
        loop = asyncio.get_running_loop()
        while settle and (left_s := self._moved_s + SETTLE_S - loop.time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)
        for client, server in list(self._links):
            client.close()
            server.transport.abort()

    async def close(self) -> None:
        await self.shut()
        await self.break_all(settle=False)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.slammed:
            writer.transport.abort()
            return
        # A cancelled handler would be reported by asyncio as a failure; here it is the door's own end.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            server_reader, server = await asyncio.open_connection(*self._target)
            link = (writer, server)
            self._links.add(link)
            try:
                await asyncio.gather(self._pump(reader, server), self._pump(server_reader, writer, down=True))
            finally:
                self._links.discard(link)
                server.transport.abort()
        writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, down: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                self._moved_s = asyncio.get_running_loop().time()
                sink.write(data)
                await sink.drain()
                if down:
                    async with self._passed:
                        self.passed_bytes += len(data)
                        self._passed.notify_all()
        # One side's end ends the other: gRPC does not use half-closed connections.
        sink.close()


# --- the worker -------------------------------------------------------------------------------------------------------


class _Link:
    """One Run stream: what it runs, and the frames that are to be written to it (bounded)."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[worker_pb2.RunResponse | None] = asyncio.Queue(maxsize=16)
        self.running: dict[tuple[int, int], dict[asyncio.Task[None], ChoiceEntry]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        #: What its door had passed on when the last frame was made.
        self.mark = -1
        #: With what it ends; None = OK.
        self.status: grpc.StatusCode | None = None

    def find(self, number: int, epoch: int, choice: int | None) -> list[tuple[asyncio.Task[None], ChoiceEntry]]:
        choices = list(self.running.get((number, epoch), {}).items())
        return choices if choice is None else choices[choice : choice + 1]


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker whose engine is a script."""

    def __init__(
        self,
        model: ToyModel,
        bench: Bench | None = None,
        *,
        worker_id: str = "",
        slots: int = 1,
        heartbeats: bool = True,
        tls: Tls | None = None,
        role: worker_pb2.WorkerRole = worker_pb2.WORKER_ROLE_UNSPECIFIED,
    ) -> None:
        self.model = model
        self.tls = tls
        self.role = role
        self.bench = bench or Bench()
        self.worker_id = worker_id or f"scripted-{uuid.uuid4().hex[:8]}"
        self.instance_id = uuid.uuid4().hex
        self.slots = slots
        self.state = worker_pb2.WORKER_STATE_READY
        self.iteration = 0
        #: Whether heartbeats go out by themselves.
        self.heartbeats = heartbeats
        #: Where it tells routers to find it; empty = at its own door.
        self.advertise = ""
        self.welcomed = asyncio.Event()
        self.commands: list[scheduler_pb2.JoinResponse] = []
        #: Added to every index that it tells: a worker that lost ids.
        self.index_shift = 0
        #: Run streams opened so far.
        self.links_opened = 0
        self._blocks: dict[tuple[object, tuple[int, ...]], int] = {}
        self._free = asyncio.Semaphore(slots)
        self._waiting = 0
        self._running: dict[int, int] = {}
        self._links: set[_Link] = set()
        self._load_changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._join_task: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._server: grpc.aio.Server | None = None
        self.door = Door("127.0.0.1", 0)

    # -- life

    async def start(self, scheduler: str = "") -> ScriptedWorker:
        """Listens, and joins that scheduler when one is given."""
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        if self.tls is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            port = self._server.add_secure_port("127.0.0.1:0", self.tls.server_credentials())
        await self._server.start()
        self.door = Door("127.0.0.1", port)
        await self.door.open()
        if scheduler:
            self._join_task = asyncio.create_task(self._join(scheduler))
            async with asyncio.timeout(10):
                await self.welcomed.wait()
        return self

    async def leave(self) -> None:
        """Ends its membership; what runs goes on."""
        if self._join_task is not None:
            self._join_task.cancel()
            await asyncio.gather(self._join_task, return_exceptions=True)
            self._join_task = None

    async def crash(self) -> None:
        """The whole process is gone: membership, connections and the port."""
        await self.door.shut()
        await self.door.break_all()
        await self.leave()

    async def stop(self) -> None:
        """Leaves, and frees everything."""
        await self.leave()
        await self.door.close()
        if self._server is not None:
            await self._server.stop(0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def cut_links(self, status: grpc.StatusCode | None) -> None:
        """Ends every Run stream with that status (None = OK), whatever runs; the connections stay."""
        for link in list(self._links):
            link.status = status
            await link.frames.put(None)

    @property
    def address(self) -> str:
        return self.advertise or f"127.0.0.1:{self.door.port}"

    @property
    def journal(self) -> list[Entry]:
        """This worker's part of the bench's journal."""
        return [entry for entry in self.bench.journal if entry.worker is self]

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs."""
        return not self._waiting and not self._running

    # -- the prefix table: each block by the number of the one before it and its own ids

    def forget(self, ids: Iterable[int] | None = None) -> None:
        """Drops the block that ends this prefix, and with it what lies behind; every block when none is given."""
        if ids is None:
            self._blocks.clear()
            return
        *_, last = self._chain(self._scope(worker_pb2.Submit(model=self.model.name)), tuple(ids))
        self._blocks.pop(last, None)

    @staticmethod
    def _scope(submit: worker_pb2.Submit) -> object:
        return (submit.model, submit.lora, submit.cache_salt)

    def _chain(self, scope: object, ids: tuple[int, ...]) -> Iterator[tuple[object, tuple[int, ...]]]:
        """The keys of the ids' full blocks. Whoever goes on has seen to it that the block before is in the table."""
        parent = scope
        for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
            key = (parent, ids[end - BLOCK_TOKENS : end])
            yield key
            parent = self._blocks.get(key)

    def _reuse(self, submit: worker_pb2.Submit) -> int:
        """Prompt tokens that need not be computed; at least one id always is. All full blocks are kept from now on."""
        if submit.bypass_prefix_cache or len(submit.prompt_ids) > MOST_KEPT:
            return 0
        ids = tuple(submit.prompt_ids)
        known = 0
        for index, key in enumerate(self._chain(self._scope(submit), ids)):
            if key in self._blocks:
                known += known == index
            else:
                self._blocks[key] = next(self._numbers)
        return min(known, (len(ids) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS

    # -- the contract

    async def Run(
        self, request_iterator: AsyncIterator[worker_pb2.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RunResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a hello")
        if first.hello.instance_id not in ("", self.instance_id):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another instance lives here now")
        link = _Link()
        self._links.add(link)
        self.links_opened += 1
        reader = asyncio.create_task(self._read(link, first, request_iterator))
        try:
            yield worker_pb2.RunResponse(welcome=self.welcome())
            while (frame := await link.frames.get()) is not None:
                yield frame
            if link.status is not None:
                await context.abort(link.status, "cut")
        finally:
            reader.cancel()
            self._links.discard(link)
            for key in list(link.running):
                self._cancel(link, *key, choice=None, reason=None)
            for task in list(link.tasks):
                task.cancel()  # also those that only had their end left to tell

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(
            worker_id=self.worker_id, instance_id=self.instance_id, description=self.description(), state=self.state
        )

    async def GetLoad(
        self, request: worker_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetLoadResponse:
        return worker_pb2.GetLoadResponse(load=self.load())

    def welcome(self) -> worker_pb2.RunWelcome:
        return worker_pb2.RunWelcome(
            worker_id=self.worker_id, instance_id=self.instance_id, description=self.description()
        )

    def description(self) -> types_pb2.ModelDescription:
        return types_pb2.ModelDescription(
            model=self.model.name,
            engine="scripted",
            engine_version="1",
            tokenizer_sha256=self.model.tokenizer_sha256,
            template_sha256=self.model.template_sha256,
            vocab_size=self.model.vocab_size,
            context_tokens=self.model.context_tokens,
            eos_ids=self.model.eos_ids,
            block_tokens=BLOCK_TOKENS,
            kv_blocks=50_000_000,
            slots=self.slots,
            capabilities=types_pb2.Capabilities(
                guided=["json_schema", "json_object", "regex", "grammar", "choice"],
                logprobs=True,
                prompt_logprobs=True,
                kv_handoff=True,
            ),
            kv_state_tag="scripted",
        )

    def load(self) -> worker_pb2.Load:
        return worker_pb2.Load(
            state=self.state,
            waiting_requests=self._waiting,
            running_requests=len(self._running),
            kv_blocks_total=50_000_000,
            kv_blocks_cached=len(self._blocks),
            slots=self.slots,
            iteration=self.iteration,
        )

    def set_state(self, state: worker_pb2.WorkerState) -> None:
        self.state = state
        self._load_changed.set()

    # -- requests

    async def _read(
        self, link: _Link, first: worker_pb2.RunRequest, rest: AsyncIterator[worker_pb2.RunRequest]
    ) -> None:
        await self._accept(link, first)
        async for message in rest:
            await self._accept(link, message)
        await link.frames.put(None)

    async def _accept(self, link: _Link, message: worker_pb2.RunRequest) -> None:
        for submit in message.submits:
            await self._begin(link, submit)
        for cancel in message.cancels:
            choice = cancel.choice if cancel.HasField("choice") else None
            self._cancel(link, cancel.request, cancel.epoch, choice, cancel.reason)
        for proceed in message.proceeds:
            for entry in reversed(self.journal):
                if (entry.submit.request, entry.submit.epoch) == (proceed.request, proceed.epoch):
                    assert entry.proceeded is not None
                    entry.proceeded.set_result(list(proceed.ids))
                    break

    async def _begin(self, link: _Link, submit: worker_pb2.Submit) -> None:
        n = max(1, len(submit.sampling.seeds))
        kept = worker_pb2.Submit()
        kept.CopyFrom(submit)
        text = bytes(token_id for token_id in submit.prompt_ids if token_id < 256).decode("utf-8", "replace")
        part = self.bench.take(text, submit.handoff.WhichOneof("role") or "")
        now_s = asyncio.get_running_loop().time()
        entry = Entry(self, kept, part, now_s, [ChoiceEntry() for _ in range(n)], self._reuse(submit))
        if submit.handoff.HasField("fetch"):
            entry.proceeded = asyncio.get_running_loop().create_future()
        running = link.running[submit.request, submit.epoch] = {}
        for index, choice in enumerate(entry.choices):
            script = part.scripts[index] if len(part.scripts) > 1 else part.scripts[0]
            task = asyncio.create_task(self._play(link, entry, index, parse(script)))
            running[task] = choice
            for tasks in (self._tasks, link.tasks):
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        await asyncio.sleep(0)  # a task must have begun before it can be told to stop
        await self.bench.write(entry)

    def _cancel(
        self, link: _Link, number: int, epoch: int, choice: int | None, reason: types_pb2.Outcome | None
    ) -> None:
        for task, record in link.find(number, epoch, choice):
            if not record.ended.is_set():
                record.cancelled_s = asyncio.get_running_loop().time()
                record.cancel_reason = reason
                task.cancel()

    async def _play(self, link: _Link, entry: Entry, index: int, steps: tuple[Step, ...]) -> None:
        choice = entry.choices[index]
        number = next(self._numbers)
        outcome, error = types_pb2.OUTCOME_CANCELLED, None
        try:
            if entry.proceeded is not None:
                await asyncio.shield(entry.proceeded)
            async with self._slot(number):
                outcome, error = await self._steps(link, entry, index, steps)
        except asyncio.CancelledError:
            if choice.cancelled_s is None:
                raise  # the worker itself is being stopped
        finally:
            choice.outcome = outcome
            choice.ended.set()
            key = (entry.submit.request, entry.submit.epoch)
            if all(other.ended.is_set() for other in entry.choices):
                link.running.pop(key, None)
        if link in self._links:
            await self._finish(link, entry, index, outcome, error)

    @contextlib.asynccontextmanager
    async def _slot(self, number: int) -> AsyncIterator[None]:
        self._waiting += 1
        self._load_changed.set()
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        self._running[number] = number
        try:
            yield
        finally:
            del self._running[number]
            self._free.release()
            self._load_changed.set()

    async def _steps(
        self, link: _Link, entry: Entry, index: int, steps: tuple[Step, ...]
    ) -> tuple[types_pb2.Outcome, types_pb2.Error | None]:
        for step in steps:
            if step.wait_s:
                await self._pause(link, step.wait_s)
                continue
            await entry.gate()
            if step.ids:
                await self._send(link, entry, index, step.ids)
            if step.die:
                await self.door.passed(link.mark)
                await self.door.break_all()
                await asyncio.Event().wait()
            if step.hang:
                break
            if step.end is not None:
                return step.end, None
            if step.error is not None:
                refused = not entry.sent
                outcome = types_pb2.OUTCOME_REJECTED if refused else types_pb2.OUTCOME_FAILED
                retryable = step.error in _RETRYABLE and refused
                return outcome, types_pb2.Error(code=step.error, message=entry.part.message, retryable=retryable)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")

    async def _pause(self, link: _Link, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s
        while (left_s := until_s - loop.time()) > 0:
            await asyncio.sleep(min(left_s, PROGRESS_S))
            if loop.time() < until_s:
                await self._frame(link)

    async def _send(self, link: _Link, entry: Entry, index: int, ids: tuple[int, ...]) -> None:
        choice = entry.choices[index]
        delta = worker_pb2.TokenDelta(
            request=entry.submit.request,
            epoch=entry.submit.epoch,
            choice=index,
            first_index=len(choice.sent) + self.index_shift + entry.begun,
            ids=ids,
        )
        if not entry.sent:
            delta.cached_prompt_tokens = entry.cached_prompt_tokens
            if entry.submit.logprobs.prompt:
                delta.prompt_logprobs.extend(
                    logprobs_of(token_id, entry.submit.logprobs.top) for token_id in entry.submit.prompt_ids[1:]
                )
        if entry.submit.logprobs.enabled:
            for offset, token_id in enumerate(ids):
                value = entry.part.logprobs.get(len(choice.sent) + offset)
                delta.logprobs.append(logprobs_of(token_id, entry.submit.logprobs.top, value))
        choice.sent += ids
        await self._frame(link, delta)

    async def _finish(
        self, link: _Link, entry: Entry, index: int, outcome: types_pb2.Outcome, error: types_pb2.Error | None
    ) -> None:
        choice = entry.choices[index]
        finish = worker_pb2.TokenDelta.Finish(outcome=outcome, error=error)
        told = entry.part.usage
        if told is None:
            finish.usage.prompt_tokens = len(entry.submit.prompt_ids)
            finish.usage.cached_prompt_tokens = entry.cached_prompt_tokens
            finish.usage.completion_tokens = len(entry.sent) + entry.begun
        elif isinstance(told, int):
            finish.usage.prompt_tokens = told
            finish.usage.completion_tokens = told
        delta = worker_pb2.TokenDelta(
            request=entry.submit.request,
            epoch=entry.submit.epoch,
            choice=index,
            first_index=len(choice.sent) + entry.begun,
            finish=finish,
        )
        if not entry.sent:
            delta.cached_prompt_tokens = entry.cached_prompt_tokens
        await self._frame(link, delta)

    async def _frame(self, link: _Link, *deltas: worker_pb2.TokenDelta) -> None:
        self.iteration += 1
        link.mark = self.door.passed_bytes
        await link.frames.put(worker_pb2.RunResponse(iteration=self.iteration, deltas=deltas))
        # Each step is an iteration of its own: let the frame out before the next one is made.
        await asyncio.sleep(0)

    # -- membership

    async def _join(self, scheduler: str) -> None:
        async with open_channel(scheduler, self.tls) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while True:
                heartbeat = asyncio.get_running_loop().create_future()
                try:
                    async for response in stub.Join(self._reports(heartbeat)):
                        if response.HasField("welcome") and not heartbeat.done():
                            heartbeat.set_result(response.welcome.heartbeat_ms / 1000)
                            self.welcomed.set()
                        elif response.HasField("drain"):
                            self.commands.append(response)
                            self.set_state(worker_pb2.WORKER_STATE_DRAINING)
                        else:
                            self.commands.append(response)
                except grpc.aio.AioRpcError as error:
                    log.debug("join ended: %s", error.code())
                await asyncio.sleep(0.05)

    async def _reports(self, heartbeat: asyncio.Future[float]) -> AsyncIterator[scheduler_pb2.JoinRequest]:
        yield scheduler_pb2.JoinRequest(
            hello=scheduler_pb2.JoinHello(
                worker_id=self.worker_id,
                instance_id=self.instance_id,
                pool=self.model.name,
                address=self.address,
                description=self.description(),
                startup_s=0.1,
                role=self.role,
            ),
            load=self.load(),
        )
        every_s = await heartbeat
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._load_changed.wait(), every_s)
            self._load_changed.clear()
            if self.heartbeats:
                yield scheduler_pb2.JoinRequest(load=self.load())


def logprobs_of(token_id: int, top: int, value: float | None = None) -> types_pb2.TokenLogprobs:
    """A log-probability that depends on the id alone; the likeliest ids are never the drawn one."""
    likeliest: Iterator[int] = (other for other in itertools.count(65) if other != token_id)
    drawn = -2.0 - (token_id % 16) / 16 if value is None else value
    return types_pb2.TokenLogprobs(
        drawn=types_pb2.Logprob(id=token_id, logprob=drawn),
        top=[
            types_pb2.Logprob(id=other, logprob=-0.25 * (rank + 1))
            for rank, other in enumerate(itertools.islice(likeliest, top))
        ],
    )


WorkerFactory = Callable[..., ScriptedWorker]
