"""How a service's process begins and ends: its log, the ready line, signals.

Apart from ``serving.py`` because the router, whose ports are the extension's, needs this and no gRPC of Python's.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

from headrace.config import TelemetryConfig
from headrace.errors import ConfigError

#: How often a file that is followed is looked at.
LOOK_EVERY_S = 1.0


def configure_logging(telemetry: TelemetryConfig) -> None:
    """Logs on standard error, in one form for all services. Raises ConfigError for an unknown level."""
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if telemetry.log_level not in levels:
        raise ConfigError(f"telemetry.log_level: must be one of {', '.join(levels)}, got {telemetry.log_level!r}")
    logging.basicConfig(
        level=levels[telemetry.log_level],
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )


def ask_for_huge_pages() -> None:
    """Start this program again, as the same process, with large memory on huge pages; unless somebody has set glibc's
    tunables already, or this is no Linux.

    llama.cpp's weights, KV and working memory are gone through each step: on pages of 4 KiB a step takes some 10 to
    20 % longer where the system gives huge pages only to those who ask. glibc asks for what its malloc gets, and is
    told of it only when a program begins.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ:
        return
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process could take now: the system's estimate, within what its control group (version 2) has
    left. 0 = not known."""
    found: list[int] = []
    with contextlib.suppress(OSError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10)
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        group = root / "sys/fs/cgroup" / next(line for line in lines if line.startswith("0::"))[3:].lstrip("/")
        # "max" where there is no bound, which is no number.
        most = int((group / "memory.max").read_text())
        found.append(max(0, most - int((group / "memory.current").read_text())))
    return min(found, default=0)


def print_ready(name: str, **fields: str) -> None:
    """Tell whoever started this process that it serves, and where: one line of JSON on standard output."""
    sys.stdout.write(json.dumps({"ready": name, **fields}) + "\n")
    sys.stdout.flush()


def state_folder() -> Path:
    """Where a one-box mesh keeps what it must not forget: ``$XDG_STATE_HOME/headrace``, else ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "headrace"


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A folder of mode 0700 for as long as this process lives.

    A process that is killed cannot delete its own, but gives up the lock on it: the next one of the same user and
    prefix deletes what nobody holds. ``prefix`` must be nobody else's.
    """
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _held(left):
            shutil.rmtree(left, ignore_errors=True)
    with contextlib.ExitStack() as lock:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=prefix))
            # Until it is held it looks like one that was left, and another process may have taken it for that.
            with contextlib.suppress(OSError):
                lock.enter_context(_held(folder))
                if folder.exists():
                    break
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The lock on a folder of our own. Raises OSError when it is somebody else's, or held."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.getuid():
            raise PermissionError(f"{folder} is another user's")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


async def changes(path: Path) -> AsyncIterator[None]:
    """Once at first, since it may have changed after it was read, and again whenever a file is another than before."""
    seen: tuple[int, int, int] | None = None
    while True:
        mark = _mark(path)
        # Gone for a moment is no change: editors put a new file in the place of the old one.
        if mark not in (seen, None):
            seen = mark
            yield
        await asyncio.sleep(LOOK_EVERY_S)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Tells one state of a file from another without reading it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class StopSignals:
    """SIGTERM and SIGINT: the first asks to drain, the second ends the process at once.

    A context manager; ``stopping`` is set by the first signal. Plain signal handlers rather than the loop's, so that
    the second signal also works while the loop is busy. Whoever starts a service in a terminal must give it a session
    of its own: a Ctrl-C that reaches parent and child, followed by the parent's SIGTERM, would be two signals.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._count = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            # Not sys.exit: threads of an engine or an exporter could hold the process for as long as they like.
            os._exit(128 + number)
        self._loop.call_soon_threadsafe(self.stopping.set)
