"""How a service's process begins and ends: its log, the ready line, signals.

Apart from ``serving.py`` because the router, whose ports are the extension's, needs this and no gRPC of Python's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Self

from headrace.config import TelemetryConfig
from headrace.errors import ConfigError


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

    llama.cpp's KV and working memory are gone through each step: on pages of 4 KiB a step takes some 8 % longer where
    the system gives huge pages only to those who ask. glibc asks for what its malloc gets, and is told of it only when
    a program begins.
    """
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ:
        return
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def print_ready(name: str, **fields: str) -> None:
    """Tell whoever started this process that it serves, and where: one line of JSON on standard output."""
    sys.stdout.write(json.dumps({"ready": name, **fields}) + "\n")
    sys.stdout.flush()


def state_folder() -> Path:
    """Where a one-box mesh keeps what it must not forget: ``$XDG_STATE_HOME/headrace``, else ``~/.local/state``."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "headrace"


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
