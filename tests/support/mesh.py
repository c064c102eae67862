"""A real mesh for tests: router, scheduler and cache as processes of their own, scripted workers in the test's process.

A `Mesh` is the processes, kept for many tests; a `Lab` is one test's use of it: its scripted workers, its client, and
the proof at its end that nothing remained on any service. All on 127.0.0.1 with ports of the system's choice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from headrace.config import TlsConfig
from headrace.tls import load as load_tls
from headrace.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    router_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
    worker_pb2,
)
from tests.support.clients import Answer, Client, OpenAnswer, http
from tests.support.http2 import Peer
from tests.support.scripted import Bench, Entry, ScriptedWorker
from tests.support.tap import Books, SchedulerTap
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

SERVICES = Path(__file__).parents[2] / "services"
#: Asks the kernel to be told of the parent's death (PR_SET_PDEATHSIG, which exec keeps), then becomes the command.
MORTAL = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, int(sys.argv[1])); "
    "os.getppid() == int(sys.argv[2]) or sys.exit(1); os.execv(sys.argv[3], sys.argv[3:])"
)
READY_WITHIN_S = 60.0
STOP_WITHIN_S = 20.0


class Process:
    """One command of headrace as a process of its own; what it logs goes to a file."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        death: signal.Signals = signal.SIGKILL,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """It gets the signal `death` when this thread is gone: a test run that is killed leaves nothing behind."""
        more = dict(environment or {})
        paths = os.pathsep.join(filter(None, (str(SERVICES), more.pop("PYTHONPATH", ""))))
        self.name = name
        self.log = log
        with log.open("ab") as errors:
            # A session of its own, so that a Ctrl-C in the terminal is the test's alone.
            self.popen = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", MORTAL, str(int(death)), str(os.getpid())),
                    *(sys.executable, "-m", "headrace", *arguments),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                # Spans are sent soon, where they are sent at all.
                env=os.environ
                | {"XDG_STATE_HOME": str(log.parent)}
                | more
                | {"PYTHONPATH": paths, "OTEL_BSP_SCHEDULE_DELAY": "100"},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def ready(self, timeout_s: float = READY_WITHIN_S) -> dict[str, str]:
        """The ready line."""
        assert self.popen.stdout is not None
        until_s = time.monotonic() + timeout_s
        raw = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.popen.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise AssertionError(f"{self.name} is not ready after {timeout_s} s:\n{self.tail()}")
                data = os.read(self.popen.stdout.fileno(), 65536)
                if not data:
                    raise AssertionError(f"{self.name} ended with {self.popen.wait()}:\n{self.tail()}")
                raw += data
                for line in raw.split(b"\n")[:-1]:
                    with contextlib.suppress(ValueError):
                        said = json.loads(line)
                        if isinstance(said, dict) and "ready" in said:
                            return said

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Asks it to end, and waits until it has. Returns its exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        try:
            code = self.popen.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {STOP_WITHIN_S} s:\n{self.tail()}") from None
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def cpu_s(self) -> float:
        """CPU time that it used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Its resident memory."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024


class Mesh:
    """Scheduler, cache and router; toy models as their configuration names them."""

    def __init__(
        self,
        folder: Path,
        models: Sequence[ToyModel],
        *,
        sources: dict[str, str] | None = None,
        router: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        cache: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
        otlp_endpoint: str = "",
        tls: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        tenants: dict[str, Any] | None = None,
        aliases: str = "",
        batches: dict[str, Any] | None = None,
        ledger: dict[str, Any] | None = None,
        log_level: str = "warning",
    ) -> None:
        """`sources` are further models by name, as a configuration gives them; `worker` starts a real worker, with
        `environment` beside this process's.

        `aliases`: those tables of the configuration, as TOML.
        `tls`: that table of the configuration. Scripted workers need it too, and a lab speaks plain text only.
        """
        self.folder = folder
        self._environment = environment
        self.models = {model.name: model for model in models}
        self._sources = sources or {}
        self._aliases = aliases
        self._settings = {
            "router": {"http_address": "127.0.0.1:0", "grpc_address": "127.0.0.1:0", "threads": 2} | (router or {}),
            # One lease a slot: what does not run now waits in the scheduler, not in a worker.
            "scheduler": {
                "address": "127.0.0.1:0",
                "metrics_address": "127.0.0.1:0",
                "queue_factor": 1.0,
                "heartbeat_s": 0.1,
                "heartbeats_missed": 50,
            }
            | (scheduler or {}),
            "cache": {"address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0"} | (cache or {}),
            "worker": worker or {},
            "telemetry": {"otlp_endpoint": otlp_endpoint, "log_level": log_level},
            "tls": tls or {},
            "tenants": tenants or {},
            "batches": batches or {},
            "ledger": {"database": str(folder / "ledger.db")} | (ledger or {}),
            "prices": {"worker_hour": 3.6},
        }
        self.processes: dict[str, Process] = {}
        self.ready: dict[str, dict[str, str]] = {}
        self.tap: SchedulerTap | None = None

    def start(self) -> Mesh:
        try:
            sources = {name: str(model.write(self.folder)) for name, model in self.models.items()} | self._sources
            self._models_toml = "".join(
                f"[[models]]\nname = {json.dumps(name)}\nsource = {json.dumps(source)}\n"
                for name, source in sources.items()
            )
            self._models_toml += self._aliases
            self.launch("cache")
            self.ready["cache"] = self.processes["cache"].ready()
            self.launch("scheduler", cache=self.cache)
            self.ready["scheduler"] = self.processes["scheduler"].ready()
            self.tap = SchedulerTap(self.scheduler, load_tls(TlsConfig(**self._settings["tls"])))
            self.launch("router", scheduler=self.tap.address, cache=self.cache)
            self.ready["router"] = self.processes["router"].ready()
            if self._settings["worker"]:
                self.launch("worker", scheduler=self.scheduler, cache=self.cache)
                self.ready["worker"] = self.processes["worker"].ready(READY_WITHIN_S * 3)
        except BaseException:
            self.kill()
            raise
        return self

    def launch(self, name: str, *, key: str = "", **more: Any) -> Process:
        """Starts that service's process; the further settings go to its own section. `key`: a second one's name."""
        settings = {section: dict(values) for section, values in self._settings.items()}
        settings[name] |= more
        toml = self._models_toml + "".join(
            f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
            for section, values in settings.items()
        )
        key = key or name
        file = self.folder / f"{key}.toml"
        file.write_text(toml)
        process = Process(key, [name, "--config", str(file)], self.folder / f"{key}.log", environment=self._environment)
        self.processes[key] = process
        return process

    def stop(self) -> None:
        """Ends all, the router first; each must leave in order."""
        codes = {}
        try:
            for name in [name for name in ("router", "worker", "scheduler", "cache") if name in self.processes]:
                codes[name] = self.processes[name].stop()
                if name == "router" and self.tap is not None:
                    self.tap.stop()
        finally:
            self.kill()
        assert set(codes.values()) == {0}, (codes, self.logs())

    def kill(self) -> None:
        for process in self.processes.values():
            if process.popen.poll() is None:
                process.kill()

    def logs(self, lines: int = 30) -> str:
        return "\n".join(f"--- {name}\n{process.tail(lines)}" for name, process in self.processes.items())

    @property
    def scheduler(self) -> str:
        return self.ready["scheduler"]["address"]

    @property
    def cache(self) -> str:
        return self.ready["cache"]["address"]

    @property
    def http(self) -> str:
        return self.ready["router"]["http"]

    @property
    def grpc(self) -> str:
        return self.ready["router"]["grpc"]


class Lab:
    """One test's use of a mesh."""

    def __init__(self, mesh: Mesh, router: str = "router") -> None:
        """`router`: which one, where there are several."""
        self.mesh = mesh
        self.router = router
        self.bench = Bench()
        self.client = Client(mesh.ready[router]["http"], mesh.ready[router]["grpc"])
        self.workers: list[ScriptedWorker] = []
        assert mesh.tap is not None
        self.books: Books = mesh.tap.turn_page()
        self._channels = [grpc.aio.insecure_channel(address) for address in (mesh.scheduler, mesh.cache)]
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self._channels[0])
        self._cache = cache_pb2_grpc.CacheServiceStub(self._channels[1])

    # -- workers and scripts

    async def worker(self, model: str = "toy", *, served_by: Peer | None = None, **how: Any) -> ScriptedWorker:
        """A scripted worker that has joined, and that the router knows; a peer may stand in its place on the wire."""
        self.client.model = model
        before = await self.ready_workers(model)
        worker = ScriptedWorker(self.mesh.models[model], self.bench, **how)
        if served_by is not None:
            worker.advertise = f"127.0.0.1:{served_by.port}"
            served_by.welcome = worker_pb2.RunResponse(welcome=worker.welcome())
        self.workers.append(worker)
        await worker.start(self.mesh.scheduler)
        await self.sees(model, before + 1)
        return worker

    async def sees(self, model: str, workers: int) -> None:
        """Waits until the router counts so many ready workers."""

        async def counted() -> bool:
            return await self.ready_workers(model) == workers

        await eventually(counted, f"{workers} ready workers of {model}")

    async def ready_workers(self, model: str) -> int:
        listed = await self.client.stub.ListModels(router_pb2.ListModelsRequest(), wait_for_ready=True, timeout=10)
        return sum(item.ready_workers for item in listed.models if item.name == model)

    def play(self, *scripts: str, **how: Any) -> None:
        self.bench.play(*scripts, **how)

    @property
    def journal(self) -> list[Entry]:
        return self.bench.journal

    async def entry(self, index: int = 0, timeout_s: float = 10.0) -> Entry:
        return await self.bench.entry(index, timeout_s)

    # -- asking

    async def ask(self, text: str = "go", params: dict[str, Any] | None = None, *, mode: str, **how: Any) -> Answer:
        return await self.client.ask(text, params, mode=mode, **how)

    async def open(
        self, text: str = "go", params: dict[str, Any] | None = None, *, mode: str, **how: Any
    ) -> OpenAnswer:
        return await self.client.open(text, params, mode=mode, **how)

    async def get(self, path: str) -> tuple[int, dict[str, str], Any]:
        return await http(self.client.http_address, "GET", path)

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        return await http(self.client.http_address, "POST", path, body, headers)

    # -- looking at the services

    async def fleet(self) -> scheduler_pb2.GetFleetResponse:
        return await self._scheduler.GetFleet(scheduler_pb2.GetFleetRequest())

    async def cache_stats(self) -> cache_pb2.GetStatsResponse:
        return await self._cache.GetStats(cache_pb2.GetStatsRequest())

    async def metrics(self) -> dict[str, float]:
        """The router's series, by name and labels as they stand on the page."""
        status, _, text = await self.get("/metrics")
        assert status == 200
        return series(text)

    async def remains(self) -> dict[str, float]:
        """What is still held anywhere for a request; empty when nothing is."""
        fleet, stats, metrics = await self.fleet(), await self.cache_stats(), await self.metrics()
        held = {
            "leases": fleet.leases,
            "queued asks": fleet.queued_asks,
            "leases of workers": sum(worker.leases for worker in fleet.workers),
            "leased tokens": sum(worker.leased_tokens for worker in fleet.workers),
            "flights": stats.flights,
            "waiters": stats.waiters,
            "open requests": metrics["headrace_router_open_requests"],
            "busy workers": sum(not worker.idle for worker in self.workers),
            "unbalanced leases": 0 if self.books.balanced else 1,
        }
        return {name: value for name, value in held.items() if value}

    async def nothing_remains(self, timeout_s: float = 5.0) -> None:
        """Waits until no service holds anything for any request."""
        left: dict[str, float] = {}

        async def gone() -> bool:
            nonlocal left
            left = await self.remains()
            return not left

        try:
            await eventually(gone, "nothing remains", timeout_s)
        except AssertionError:
            raise AssertionError(f"still held after {timeout_s} s: {left}") from None

    async def released(self, count: int = 1) -> list[scheduler_pb2.Release]:
        """The books' releases, as soon as there are so many."""

        async def enough() -> list[scheduler_pb2.Release]:
            return self.books.released if len(self.books.released) >= count else []

        return await eventually(enough, f"{count} releases")

    # -- the end

    async def close(self, *, check: bool = True) -> None:
        """Proves that nothing remained (unless the test failed anyway), and takes the workers away."""
        try:
            if check:
                await self.nothing_remains()
        finally:
            for worker in self.workers:
                await worker.stop()
            await self._emptied()
            await self.hang_up()

    async def hang_up(self) -> None:
        """Closes its own connections."""
        await self.client.close()
        for channel in self._channels:
            await channel.close()

    async def _emptied(self) -> None:
        ours = {worker.instance_id for worker in self.workers}

        async def left() -> bool:
            fleet = await self.fleet()
            return not any(worker.instance_id in ours for worker in fleet.workers)

        await eventually(left, "our workers are out of the fleet")
        for model in {worker.model.name for worker in self.workers}:
            await self.sees(model, 0)


def series(text: str) -> dict[str, float]:
    """A Prometheus page as a table."""
    table = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            table[name] = float(value)
    return table


def outcomes(releases: Sequence[scheduler_pb2.Release]) -> list[str]:
    return [types_pb2.Outcome.Name(release.outcome).removeprefix("OUTCOME_").lower() for release in releases]
