"""One box: all services as child processes of this one, watched until it is told to stop.

In order: prepare the model, start cache and scheduler, start router and workers on the addresses that those got, wait
until the router sees the workers. A child that dies after that is started again, with growing pauses and on the
addresses it had at first, so that the others find it again. On SIGINT, SIGTERM or SIGHUP all are stopped, from the door
inwards: router, workers, then scheduler and cache; each gets its drain grace, then SIGKILL. A second signal kills at
once.

Of the user's configuration file only ``[[aliases]]`` are followed while all is up: workers of models that become needed
are started, then the router is shown the new ones. What else changed in it is told, and needs a restart.

No process is left behind, whatever happens to this one: each child leads a process group of its own, which is killed as
a whole, and asks the kernel to be killed when its parent dies (``__main__.py``). Being in a session of its own it also
never sees the terminal's Ctrl-C: only this process decides when it stops.

Its place: ``headrace up``. What it leaves to others: what a service does (``python -m headrace SERVICE``), model files
(``models.py``), how progress looks (``terminal.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from headrace import config as configuration
from headrace import tls as certificates
from headrace.config import Config, ModelConfig, split_address
from headrace.errors import ConfigError, HeadraceError
from headrace.process import changes, state_folder
from headrace.tls import ClientTls

#: The environment variable by which a child knows whom not to outlive.
PARENT_PID = "HEADRACE_PARENT_PID"

#: Services open their ports within a second or two; the engine of a large model takes minutes to load.
SERVICE_READY_TIMEOUT_S = 60.0
WORKER_READY_TIMEOUT_S = 900.0
#: From the last ready line until the router sees all workers.
MESH_READY_TIMEOUT_S = 60.0
#: Beyond its own drain grace a service has this long to end, before it is killed.
STOP_MARGIN_S = 5.0
#: Pauses before a child is started again: double each time, and back to the first after it ran for a while.
RESTART_FIRST_S = 0.5
RESTART_LONGEST_S = 30.0
RESTART_FORGIVEN_S = 60.0
#: A log file is started anew at this size, keeping the one before.
LOG_BYTES = 16 * 2**20
#: Shown when a child fails.
TAIL_LINES = 20

_MAX_LINE_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024
_LOOK_EVERY_S = 0.1


class UpError(HeadraceError):
    """The mesh could not be brought up; ``details`` are the last lines of the log of whoever failed."""

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


@dataclass(frozen=True)
class Spec:
    """One child: which service, with which settings beside the common file."""

    #: "router", "worker-2".
    name: str
    #: What ``python -m headrace`` is told to be.
    service: str
    #: ``section.key=value``.
    settings: tuple[str, ...]
    #: Fields of its ready line, and the settings that would make it choose the same address again.
    addresses: Mapping[str, str]
    ready_timeout_s: float
    grace_s: float


@dataclass(frozen=True)
class Mesh:
    """The running mesh, as its users need to know it."""

    http: str
    grpc: str
    scheduler: str
    cache: str
    workers: tuple[Mapping[str, str], ...]
    model: str
    logs: Path
    #: The doors speak TLS.
    tls: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For the ready line."""
        workers = [dict(worker) for worker in self.workers]
        table = {**vars(self), "workers": workers, "logs": str(self.logs)}
        return {"ready": "up", **table, "pid": os.getpid()}


class Reporter(Protocol):
    """Whom to tell how it goes. Phases: "model", "services", "engine"."""

    def begin(self, phase: str) -> None:
        """A phase begins."""

    def progress(self, phase: str, text: str, fraction: float) -> None:
        """How far it is, from 0 to 1. May come from another thread."""

    def end(self, phase: str) -> None:
        """It is done."""

    def warn(self, text: str) -> None:
        """Something happened that people should know."""

    def changed(self, text: str) -> None:
        """Something else is in force now."""

    def ready(self, mesh: Mesh) -> None:
        """All is up."""

    def stopping(self) -> None:
        """All is being stopped."""


#: The command line of a child: its spec, its settings as they are now, and the common configuration file.
Command = Callable[[Spec, Sequence[str], Path], list[str]]
#: The user's configuration file, and how it is read again.
Again = tuple[Path, Callable[[], Config]]
#: ``models.prepare``.
Prepare = Callable[..., object]
#: Wait until the router at this address sees so many ready workers of this model.
Probe = Callable[[str, str, int], Awaitable[None]]


def headrace_command(spec: Spec, settings: Sequence[str], config_file: Path) -> list[str]:
    """The real thing. ``-P``: a file in the current folder must not stand in for a module."""
    sets = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-P", "-m", "headrace", spec.service, "--config", str(config_file), *sets]


def effective_config(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    model: str = "",
    engine: str = "",
    http_port: int | None = None,
    grpc_port: int | None = None,
) -> Config:
    """The configuration of a one-box mesh: internal ports are chosen by the system unless they are configured.

    ``model`` is a name under ``[[models]]``, or a ``.gguf`` file or folder, which then is the only model.
    """
    base = {
        "scheduler.address": "127.0.0.1:0",
        "scheduler.metrics_address": "127.0.0.1:0",
        "cache.address": "127.0.0.1:0",
        "cache.metrics_address": "127.0.0.1:0",
        "batches.data_dir": str(state_folder() / "batches"),
        "ledger.database": str(state_folder() / "ledger.db"),
    }
    more = [f"worker.engine={engine}"] if engine else []
    config = configuration.load(path, (*overrides, *more), base)
    for key, port in (("http_address", http_port), ("grpc_address", grpc_port)):
        if port is not None:
            host = getattr(config.router, key).rpartition(":")[0]
            more.append(f"router.{key}={host}:{port}")
    known = {item.name for item in config.models}
    if model in known:
        more.append(f"worker.model={model}")
    config = configuration.load(path, (*overrides, *more), base)
    if not model or model in known:
        return config
    return _with_model_at(config, model)


def _with_model_at(config: Config, where: str) -> Config:
    source = Path(where).expanduser()
    if where != "embedded" and not source.exists():
        known = ", ".join(item.name for item in config.models)
        raise ConfigError(f"--model: {where!r} is neither a model of the configuration ({known}) nor a file or folder")
    if where == "embedded":
        chosen = ModelConfig()
    else:
        chosen = ModelConfig(name="-".join(source.resolve().stem.split()) or "model", source=str(source.resolve()))
    worker = dataclasses.replace(config.worker, model=chosen.name)
    return dataclasses.replace(config, models=(chosen,), aliases=(), worker=worker)


@dataclass(frozen=True)
class Plan:
    """What to bring up."""

    config: Config
    #: Of each model that is served.
    workers: int = 1
    #: Beside those, for prompts only.
    prefill_workers: int = 0
    #: None = a new temporary folder.
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"--workers: must be at least 1, got {self.workers}")
        if self.prefill_workers < 0:
            raise ConfigError(f"--prefill-workers: must be at least 0, got {self.prefill_workers}")
        count = (self.workers + self.prefill_workers) * len(self.config.served())
        worker = self.config.worker
        for key in ("address", "metrics_address", "advertise"):
            value = getattr(worker, key)
            if count > 1 and value and not value.endswith(":0"):
                raise ConfigError(f"worker.{key}: {count} workers cannot share {value}; use port 0")
        if not worker.scheduler:
            raise ConfigError("worker.scheduler: must not be empty for workers started by 'up'")

    @property
    def uses_cache(self) -> bool:
        """Somebody is configured to ask it."""
        return bool(self.config.router.cache or self.config.worker.cache)

    def cache_specs(self) -> list[Spec]:
        """The cache, if there is one: all others need to know it."""
        names = {"address": "address", "metrics": "metrics_address"}
        return [self._service("cache", (), names, self.config.cache.drain_grace_s)] if self.uses_cache else []

    def scheduler_specs(self, cache: str) -> list[Spec]:
        """The scheduler, whom the outer ones need to know (cache: empty = there is none)."""
        names = {"address": "address", "metrics": "metrics_address"}
        followed = cache if self.config.scheduler.cache else ""
        settings = [f"scheduler.cache={followed}"]
        return [self._service("scheduler", settings, names, self.config.scheduler.drain_grace_s)]

    def outer_specs(self, scheduler: str, cache: str, served: Sequence[str]) -> list[Spec]:
        """Those who need to know the addresses of the inner ones (cache: empty = there is none). Numbers of workers
        follow the order of ``served``, so that further models at its end change none of those before."""
        router, worker = self.config.router, self.config.worker
        settings = [f"router.scheduler={scheduler}"] + ([f"router.cache={cache}"] if router.cache else [])
        names = {"http": "http_address", "grpc": "grpc_address"}
        specs = [self._service("router", settings, names, router.drain_grace_s + router.settle_s)]
        models = [(model, "worker") for model in served for _ in range(self.workers)]
        prefill = [(model, "prefill") for model in served for _ in range(self.prefill_workers)]
        for index, (model, kind) in [*enumerate(models, 1), *enumerate(prefill, 1)]:
            name = worker.worker_id or "worker"
            worker_id = name if worker.worker_id and len(models) == 1 else f"{name}-{index}"
            if kind == "prefill":
                worker_id = f"{worker.worker_id}-prefill-{index}" if worker.worker_id else f"prefill-{index}"
            settings = [f"worker.worker_id={worker_id}", f"worker.scheduler={scheduler}"]
            settings += ["worker.role=prefill"] if kind == "prefill" else []
            settings += [f"worker.model={model}"] if model != worker.model else []
            settings += [f"worker.cache={cache}"] if worker.cache else []
            names = {"address": "address", "metrics": "metrics_address"}
            spec = self._service("worker", settings, names, worker.drain_grace_s, WORKER_READY_TIMEOUT_S)
            specs.append(dataclasses.replace(spec, name=f"{kind}-{index}"))
        return specs

    @staticmethod
    def _service(
        service: str,
        settings: Sequence[str],
        names: Mapping[str, str],
        grace_s: float,
        ready_timeout_s: float = SERVICE_READY_TIMEOUT_S,
    ) -> Spec:
        addresses = {name: f"{service}.{key}" for name, key in names.items()}
        return Spec(service, service, tuple(settings), addresses, ready_timeout_s, grace_s)


def reachable(address: str) -> str:
    """Where to reach, from this machine, somebody who listens on that address."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host) + f":{port}"


def check_ports(config: Config) -> None:
    """Raise ConfigError when one of the doors is taken, before anything is started or loaded."""
    options = {"http_address": "--http-port", "grpc_address": "--grpc-port"}
    for key, option in options.items():
        address = getattr(config.router, key)
        host, port = split_address(address, f"router.{key}")
        try:
            family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
        except OSError as error:
            raise ConfigError(
                f"router.{key}: cannot listen on {address}: {error.strerror}; choose another port with {option}"
            ) from error


@dataclass
class Backoff:
    """How long to pause before a child is started again."""

    pause_s: float = 0.0

    def next(self, ran_s: float) -> float:
        """The pause, after it ran for so long."""
        grown = RESTART_FIRST_S if ran_s >= RESTART_FORGIVEN_S or not self.pause_s else self.pause_s * 2
        self.pause_s = min(grown, RESTART_LONGEST_S)
        return self.pause_s


@dataclass
class Log:
    """A child's output: in a file of bounded size, its last lines at hand."""

    path: Path
    max_bytes: int = LOG_BYTES
    _tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    _file: BinaryIO | None = None

    def write(self, line: bytes) -> None:
        """Add a line. A disk that is full must not stop the mesh; then only the last lines are there."""
        self._tail.append(line)
        with contextlib.suppress(OSError):
            if self._file is not None and self._file.tell() + len(line) > self.max_bytes:
                self.close()
                os.replace(self.path, self.path.with_suffix(".1.log"))
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            self._file.write(line + b"\n")

    def tail(self) -> list[str]:
        """The last lines."""
        return [line.decode("utf-8", "replace") for line in self._tail]

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class _Pipe:
    """A pipe whose reading end is on the loop."""

    reader: asyncio.StreamReader
    transport: asyncio.BaseTransport
    write_end: int
    taken: bool = False

    def take(self) -> _Pipe:
        """Whoever takes it closes its transport."""
        self.taken = True
        return self


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[_Pipe]:
    """The writing end is open inside only: a child that was started there has its own."""
    read_end, write_end = os.pipe()
    try:
        reader = asyncio.StreamReader(limit=_READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        file = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
        pipe = _Pipe(reader, transport, write_end)
        try:
            yield pipe
        finally:
            if not pipe.taken:
                transport.close()
    finally:
        os.close(write_end)


class Child:
    """One service's process, through all its lives."""

    def __init__(self, spec: Spec, command: Command, config_file: Path, log: Log) -> None:
        self.spec = spec
        self.log = log
        #: Its last ready line.
        self.ready: Mapping[str, str] = {}
        self._command = command
        self._config_file = config_file
        self._pinned: dict[str, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._group_killed = False
        self._readers: list[asyncio.Task[None]] = []
        self._ready_line: asyncio.Future[Mapping[str, str]] | None = None

    @property
    def running(self) -> bool:
        """Its process lives."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it and wait for its ready line. Raises UpError; then no process of it is left."""
        settings = (*self.spec.settings, *(f"{key}={value}" for key, value in self._pinned.items()))
        command = self._command(self.spec, settings, self._config_file)
        self.log.write(f"--- {' '.join(command)}".encode())
        environment = {**os.environ, PARENT_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        self._ready_line = asyncio.get_running_loop().create_future()
        self._group_killed = False
        # Pipes of our own: asyncio's make its wait() wait for their end too, and a child's child may hold them.
        async with _pipe() as out, _pipe() as err:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=out.write_end,
                    stderr=err.write_end,
                    start_new_session=True,
                    env=environment,
                )
            except OSError as error:
                raise UpError(f"{self.spec.name}: cannot start {command[0]}: {error.strerror}") from error
            self._readers = [
                asyncio.create_task(self._read(out.take(), self._look_for_ready)),
                asyncio.create_task(self._read(err.take(), None)),
            ]
        try:
            self.ready = await self._first_words()
        except BaseException:
            self.kill()
            await self.wait()
            raise
        self._pinned = {key: self.ready[name] for name, key in self.spec.addresses.items() if self.ready.get(name)}

    async def _first_words(self) -> Mapping[str, str]:
        assert self._ready_line is not None
        ended = asyncio.create_task(self.wait())
        try:
            limit_s = self.spec.ready_timeout_s
            either: set[asyncio.Future[Any]] = {self._ready_line, ended}
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if self._ready_line.done():
            words = self._ready_line.result()
            if missing := [name for name in self.spec.addresses if name not in words]:
                raise UpError(f"{self.spec.name}: its ready line does not say {missing[0]!r}", self.log.tail())
            return words
        how = f"ended before it was ready ({self.ending()})" if ended.done() else f"was not ready within {limit_s:g} s"
        raise UpError(f"{self.spec.name} {how}; its log: {self.log.path}", self.log.tail())

    def _look_for_ready(self, line: bytes) -> None:
        assert self._ready_line is not None
        if self._ready_line.done() or not line.startswith(b"{"):
            return
        with contextlib.suppress(ValueError):
            words = json.loads(line)
            if isinstance(words, dict) and words.get("ready") == self.spec.service:
                self._ready_line.set_result({key: str(value) for key, value in words.items()})

    async def _read(self, pipe: _Pipe, see: Callable[[bytes], None] | None) -> None:
        """Its output, line by line, for as long as it has any: a full pipe would stop it."""
        rest = b""
        try:
            while data := await pipe.reader.read(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self.log.write(line)
                    if see is not None:
                        see(line)
            if rest:
                self.log.write(rest)
        finally:
            pipe.transport.close()

    async def wait(self) -> None:
        """Until its process has ended, and all that it wrote was read. Kills what it has left behind."""
        if self._process is None:
            return
        await self._process.wait()
        if not self._group_killed:
            # Now and only now: later the number may be another group's.
            self._group_killed = True
            self._signal(signal.SIGKILL)
        # Its pipes close with its group. Whoever took one out of the group is not waited for.
        await asyncio.wait(self._readers, timeout=1.0)
        for reader in self._readers:
            reader.cancel()

    def ending(self) -> str:
        """How its process ended."""
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return "running"
        if code >= 0:
            return f"exit code {code}"
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
        return f"killed by signal {-code}"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def terminate(self) -> None:
        """Ask it to drain and end."""
        if self.running:
            self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it has started."""
        if self.running:
            self._signal(signal.SIGKILL)


class Supervisor:
    """Brings the mesh up, keeps it up, takes it down. Use it once."""

    def __init__(
        self,
        plan: Plan,
        reporter: Reporter,
        *,
        again: Again | None = None,
        command: Command = headrace_command,
        prepare: Prepare | None = None,
        probe: Probe | None = None,
    ) -> None:
        """``again``: the user's file, and how to read it as the plan's configuration was read."""
        self._plan = plan
        self._reporter = reporter
        self._again = again
        #: Models that have workers.
        self._served = list(plan.config.served())
        self._command = command
        self._prepare = prepare
        self._tls = ClientTls.of(plan.config.tls)
        self._probe = probe if probe is not None else functools.partial(workers_seen, tls=self._tls)
        self._children: dict[str, Child] = {}
        self._keepers: set[asyncio.Task[None]] = set()
        self._restarts = 0
        self._folder = Path()
        self._config_file = Path()
        #: Set to stop, and to stop without any grace.
        self.stop = asyncio.Event()
        self.kill = asyncio.Event()

    async def run(self) -> None:
        """Up, until told to stop, and down again. Raises HeadraceError when it can't be brought up."""
        check_ports(self._plan.config)
        certificates.load(self._plan.config.tls)
        with _folder(self._plan.log_dir) as (self._folder, keep_folder):
            try:
                await self._race(self._bring_up())
                await self._race(self._follow())
            except BaseException:
                if self._children:
                    keep_folder()
                raise
            finally:
                await self._take_down()
            if self._restarts:
                keep_folder()

    async def _race(self, work: Awaitable[None]) -> None:
        """Do the work unless told to stop meanwhile."""
        working: asyncio.Future[Any] = asyncio.ensure_future(work)
        stopping: asyncio.Future[Any] = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.wait({working, stopping})
        if not working.cancelled():
            working.result()

    async def _bring_up(self) -> None:
        plan, config = self._plan, self._plan.config
        self._config_file = self._folder / "headrace.toml"
        self._write_config(config)
        await self._phase("model", self._prepare_models(config.models, config.served()))
        await self._phase("services", self._start_inner())
        outer = self._outer_specs(plan, self._served)
        await self._phase("engine", self._start_outer(outer, self._served))
        router = self._children["router"].ready
        workers = tuple(self._children[spec.name].ready for spec in outer if spec.service == "worker")
        self._reporter.ready(
            Mesh(
                http=reachable(router["http"]),
                grpc=reachable(router["grpc"]),
                scheduler=self._inner("scheduler"),
                cache=self._inner("cache"),
                workers=tuple({key: value for key, value in worker.items() if key != "ready"} for worker in workers),
                model=config.worker.model,
                logs=self._folder,
                tls=self._tls is not None,
            )
        )

    def _write_config(self, config: Config) -> None:
        """The file that all children read, put in place whole: the router follows it."""
        fresh = self._config_file.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_text(configuration.to_toml(config), encoding="utf-8")
        fresh.replace(self._config_file)

    def _inner(self, service: str) -> str:
        """Where to reach it; empty = there is none."""
        child = self._children.get(service)
        return "" if child is None else reachable(child.ready["address"])

    def _outer_specs(self, plan: Plan, served: Sequence[str]) -> list[Spec]:
        return plan.outer_specs(self._inner("scheduler"), self._inner("cache"), served)

    async def _follow(self) -> None:
        """Puts changed aliases of the user's file in force. Never returns."""
        if self._again is None:
            await self.stop.wait()
            return
        path, read = self._again
        async for _ in changes(path):
            try:
                await self._change(await asyncio.to_thread(read))
            except (HeadraceError, OSError) as error:
                self._reporter.warn(f"{path}: the former aliases stay in force: {error}")

    async def _change(self, fresh: Config) -> None:
        current = self._plan.config
        others = [item.name for item in dataclasses.fields(Config) if item.name != "aliases"]
        if changed := [name for name in others if getattr(fresh, name) != getattr(current, name)]:
            what = f"only [[aliases]] are followed; what changed under {', '.join(changed)} needs a restart"
            self._reporter.warn(f"{what} of headrace up")
        if fresh.aliases == current.aliases:
            return
        config = dataclasses.replace(current, aliases=fresh.aliases)
        known = {model.name for model in current.models}
        if unknown := [model for model in config.served() if model not in known]:
            raise ConfigError(f"{unknown[0]} was not under [[models]] when headrace up was started; it needs a restart")
        plan = dataclasses.replace(self._plan, config=config)
        more = [model for model in config.served() if model not in self._served]
        if more:
            await self._serve_too(plan, more)
        self._write_config(config)
        self._plan = plan
        said = "the aliases have changed"
        if more:
            said += f"; workers of {', '.join(more)} were started"
        if idle := [model for model in self._served if model not in config.served()]:
            said += f"; those of {', '.join(idle)} stay, as models under their own names, until a restart"
        self._reporter.changed(said)

    async def _serve_too(self, plan: Plan, more: Sequence[str]) -> None:
        """Starts workers of further models, or leaves nothing of them."""
        models = [model for model in plan.config.models if model.name in more]
        await self._phase("model", self._prepare_models(models, more))
        served = [*self._served, *more]
        specs = [spec for spec in self._outer_specs(plan, served) if spec.name not in self._children]
        try:
            await self._phase("engine", self._start_outer(specs, more))
        except UpError:
            names = {f"keep {spec.name}" for spec in specs}
            for keeper in [keeper for keeper in self._keepers if keeper.get_name() in names]:
                keeper.cancel()
            children = [self._children.pop(spec.name) for spec in specs if spec.name in self._children]
            await asyncio.gather(*(self._stop_one(child) for child in children))
            raise
        self._served = served

    async def _phase(self, name: str, work: Awaitable[None]) -> None:
        self._reporter.begin(name)
        await work
        self._reporter.end(name)

    async def _prepare_models(self, models: Sequence[ModelConfig], served: Collection[str]) -> None:
        """In a thread that ends with the process: loading can't be interrupted, and files are put in place whole."""
        prepare = self._prepare if self._prepare is not None else _models_prepare()
        engine = self._plan.config.worker.engine
        for model in models:
            weights = model.name in served and engine == "llama_cpp"

            def work(model: ModelConfig = model, weights: bool = weights) -> None:
                prepare(
                    model.source, model.quantization, model.chat_template, weights=weights, progress=self._on_progress
                )

            await _in_daemon_thread(work)

    def _on_progress(self, text: str, fraction: float) -> None:
        self._reporter.progress("model", text, fraction)

    async def _start_inner(self) -> None:
        await self._start(self._plan.cache_specs())
        await self._start(self._plan.scheduler_specs(self._inner("cache")))

    async def _start_outer(self, specs: Sequence[Spec], models: Sequence[str]) -> None:
        await self._start(specs)
        workers = sum(spec.service == "worker" for spec in specs)
        address = reachable(self._children["router"].ready["grpc"])
        try:
            async with asyncio.timeout(MESH_READY_TIMEOUT_S):
                for model in models:
                    await self._probe(address, model, self._plan.workers)
        except TimeoutError as error:
            raise UpError(
                f"the router does not see {workers} ready worker(s) within {MESH_READY_TIMEOUT_S:g} s; "
                f"logs: {self._folder}",
                self._children["router"].log.tail(),
            ) from error

    async def _start(self, specs: Sequence[Spec]) -> None:
        """Start these side by side; each is kept from its first ready line on."""
        try:
            async with asyncio.TaskGroup() as starting:
                for spec in specs:
                    log = Log(self._folder / f"{spec.name}.log")
                    child = Child(spec, self._command, self._config_file, log)
                    self._children[spec.name] = child
                    starting.create_task(self._start_one(child))
        except* HeadraceError as group:
            raise _first(group) from None

    async def _start_one(self, child: Child) -> None:
        await child.start()
        keeper = asyncio.create_task(self._keep(child), name=f"keep {child.spec.name}")
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)

    async def _keep(self, child: Child) -> None:
        """Start it again whenever it ends."""
        now_s = asyncio.get_running_loop().time
        backoff = Backoff()
        while True:
            began_s = now_s()
            await child.wait()
            what = f"{child.spec.name} ended ({child.ending()})"
            while True:
                self._restarts += 1
                pause_s = backoff.next(now_s() - began_s)
                self._reporter.warn(f"{what}; starting it again in {pause_s:g} s (log: {child.log.path})")
                await asyncio.sleep(pause_s)
                began_s = now_s()
                try:
                    await child.start()
                except UpError as error:
                    last = f": {error.details[-1]}" if error.details else ""
                    what = f"{error}{last}"
                    continue
                self._reporter.warn(f"{child.spec.name} is ready again")
                break

    async def _take_down(self) -> None:
        """From the door inwards. Returns when no child's process is left."""
        try:
            if any(child.running for child in self._children.values()):
                self._reporter.stopping()
            keepers = tuple(self._keepers)
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            for services in (("router",), ("worker",), ("scheduler", "cache")):
                group = [child for child in self._children.values() if child.spec.service in services]
                await asyncio.gather(*(self._stop_one(child) for child in group))
        finally:
            for child in self._children.values():
                child.kill()
                child.log.close()

    async def _stop_one(self, child: Child) -> None:
        if not child.running:
            return
        child.terminate()
        ended, killed = asyncio.create_task(child.wait()), asyncio.create_task(self.kill.wait())
        limit_s = child.spec.grace_s + STOP_MARGIN_S
        await asyncio.wait({ended, killed}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()
        if not ended.done():
            if not self.kill.is_set():
                self._reporter.warn(f"{child.spec.name} did not end within {limit_s:g} s and is killed")
            child.kill()
        await ended


def _first(group: BaseExceptionGroup[HeadraceError]) -> HeadraceError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, HeadraceError)
    return error


def _models_prepare() -> Prepare:
    from headrace import models

    return models.prepare


async def _in_daemon_thread(work: Callable[[], None]) -> None:
    """Run this in a thread that does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not done.cancelled():
            done.set_result(None) if error is None else done.set_exception(error)

    def run() -> None:
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:
            failure = error
        # The loop is closed when we were told to stop meanwhile.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, failure)

    threading.Thread(target=run, name="prepare", daemon=True).start()
    await done


@contextlib.contextmanager
def _folder(log_dir: Path | None) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Where logs and the common configuration lie. A temporary one goes with us, unless it is to be kept."""
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir: cannot make {log_dir}: {error.strerror}") from error
        yield log_dir, lambda: None
        return
    temporary = Path(tempfile.mkdtemp(prefix="headrace-"))
    kept: list[bool] = []
    try:
        yield temporary, lambda: kept.append(True)
    finally:
        if not kept:
            shutil.rmtree(temporary, ignore_errors=True)


async def workers_seen(address: str, model: str, count: int, tls: ClientTls | None = None) -> None:
    """Wait until the router sees so many ready workers of this model."""
    from headrace.client import Client, ClientError

    async with Client(address, tls=tls) as client:
        while True:
            try:
                for listed in await client.list_models():
                    if listed.name == model and listed.ready_workers >= count:
                        return
            except ClientError as error:
                # It takes only those with a key, of whom we are not one: the workers' own word has to do.
                if error.code == "unauthenticated":
                    return
            await asyncio.sleep(_LOOK_EVERY_S)


@contextlib.contextmanager
def stop_signals(supervisor: Supervisor) -> Iterator[None]:
    """The first signal stops, the second kills."""
    loop = asyncio.get_running_loop()
    numbers: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def on_signal() -> None:
        (supervisor.kill if supervisor.stop.is_set() else supervisor.stop).set()

    # What was ignored on purpose (nohup) stays so.
    numbers = tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def run(plan: Plan, reporter: Reporter, again: Again | None = None) -> None:
    """``headrace up``."""
    supervisor = Supervisor(plan, reporter, again=again)
    with stop_signals(supervisor):
        await supervisor.run()
