"""A mesh for benchmarks: headrace's services and whatever stands beside them, each a process whose cost can be read.

All on 127.0.0.1, on ports of the system's choice. The figures that hold on a shared machine are CPU seconds (user and
system, all threads) and ratios within one run; wall times are for the machine of that minute.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
#: Where `cargo build --release --examples` leaves the mock worker and the load client.
EXAMPLES = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "examples"
READY_WITHIN_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class BenchError(Exception):
    """A benchmark could not be run; the text says why."""


class Process:
    """One child in a session of its own; what it logs goes to a file, what it says is read line by line."""

    def __init__(self, name: str, command: Sequence[str], log: Path, *, talks: bool = False) -> None:
        self.name = name
        self.log = log
        self._lines: list[bytes] = []
        self._partial = b""
        with log.open("ab") as errors:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ
                | {
                    "PYTHONPATH": str(ROOT / "services"),
                    "HEADRACE_PARENT_PID": str(os.getpid()),
                    # Its ledger too belongs to this run.
                    "XDG_STATE_HOME": str(log.parent),
                },
                start_new_session=True,
            )

    def says(self, timeout_s: float = READY_WITHIN_S) -> dict[str, Any]:
        """The next line of JSON that it prints. Raises BenchError when it ends or stays silent."""
        out = self._pipe(self.popen.stdout)
        until_s = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while True:
                while self._lines:
                    with contextlib.suppress(ValueError):
                        said = json.loads(self._lines.pop(0))
                        if isinstance(said, dict):
                            return said
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise BenchError(f"{self.name} said nothing within {timeout_s} s:\n{self.tail()}")
                data = os.read(out.fileno(), 65536)
                if not data:
                    raise BenchError(f"{self.name} ended with {self.popen.wait()}:\n{self.tail()}")
                *lines, self._partial = (self._partial + data).split(b"\n")
                self._lines += lines

    def tell(self, command: str) -> dict[str, Any]:
        """Sends a line to its stdin, and waits for its answer."""
        pipe = self._pipe(self.popen.stdin)
        pipe.write(command.encode() + b"\n")
        pipe.flush()
        return self.says()

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def cpu_s(self) -> float:
        """CPU seconds so far, user and system, of all its threads and of the processes it started."""
        return sum(int(fields[11]) + int(fields[12]) for fields in self._stats()) / _TICKS_PER_S

    def rss_mb(self) -> float:
        """Resident memory, in 10^6 bytes; of the processes it started, too."""
        return sum(int(fields[21]) for fields in self._stats()) * _PAGE_BYTES / 1e6

    def _stats(self) -> Iterator[list[str]]:
        """What the kernel counts of each process of its session."""
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = file.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.popen.pid:
                    yield fields

    def kill(self) -> None:
        """Ends it and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


class Mesh:
    """The processes of one run, by name. A context manager: leaving it kills all of them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
        self.processes: dict[str, Process] = {}
        self.ready: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Mesh:
        # Told to end, this process leaves the `with` as after a Ctrl-C; should it be killed, the services see it.
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, name: str, command: Sequence[str], *, talks: bool = False) -> Process:
        """Starts a process and waits for its ready line."""
        process = Process(name, command, self.folder / f"{name}.log", talks=talks)
        self.processes[name] = process
        self.ready[name] = process.says()
        return process

    def service(self, service: str, *, name: str = "", **settings: Any) -> Process:
        """One of headrace's services; the settings are those of its own section."""
        pairs = [word for key, value in settings.items() for word in ("--set", f"{service}.{key}={value}")]
        config = ["--config", str(self.config)] if self.config.exists() else []
        return self.start(name or service, [sys.executable, "-P", "-m", "headrace", service, *config, *pairs])

    @property
    def config(self) -> Path:
        """The configuration file of all services, if somebody writes it."""
        return self.folder / "headrace.toml"

    def core(self, *, cache: bool = True, scheduler: dict[str, Any] | None = None, **router: Any) -> None:
        """Scheduler, cache and router; the settings are the router's, and ``scheduler`` those of the scheduler."""
        inner = {"address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0"}
        if cache:
            self.service("cache", **inner)
        self.service("scheduler", cache=self.cache, **inner, **(scheduler or {}))
        doors = {"http_address": "127.0.0.1:0", "grpc_address": "127.0.0.1:0"}
        self.service("router", scheduler=self.scheduler, cache=self.cache, **doors, **router)

    @property
    def scheduler(self) -> str:
        return str(self.ready["scheduler"]["address"])

    @property
    def cache(self) -> str:
        """Empty when there is none."""
        return str(self.ready["cache"]["address"]) if "cache" in self.ready else ""

    @property
    def http(self) -> str:
        return str(self.ready["router"]["http"])

    @property
    def grpc(self) -> str:
        return str(self.ready["router"]["grpc"])

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by process."""
        return {name: process.cpu_s() for name, process in self.processes.items()}

    @contextlib.contextmanager
    def spent(self) -> Iterator[dict[str, float]]:
        """CPU seconds that each process spends inside; filled in on leaving."""
        spent: dict[str, float] = {}
        before = self.cpu_s()
        yield spent
        spent |= {name: after_s - before.get(name, 0.0) for name, after_s in self.cpu_s().items()}


def build_examples() -> None:
    """The mock worker and the load client, as cargo has them. Raises BenchError when they cannot be built."""
    cargo = shutil.which("cargo") or str(Path.home() / ".cargo/bin/cargo")
    try:
        subprocess.run([cargo, "build", "--release", "--quiet", "--examples"], cwd=ROOT, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"cannot build the mock worker and the load client: {error}") from error


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which that share lies; None when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
