"""`headrace up`: one command starts the mesh, keeps it alive, and leaves no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.clients import http
from tests.support.mesh import Process
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)


def children(pid: int) -> dict[int, str]:
    """All processes below that one that still run, with their command lines."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if state != "Z":
                    found[int(entry.name)] = (int(parent), command)
    below: dict[int, str] = {}
    fresh = {pid}
    while fresh:
        fresh = {child for child, (parent, _) in found.items() if parent in fresh}
        below |= {child: found[child][1] for child in fresh}
    return below


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Up:
    """`headrace up` with the toy model and a simulated engine."""

    def __init__(self, folder: Path) -> None:
        models = [ToyModel(name, context_tokens=512) for name in ("toy", "small")]
        self.config = folder / "headrace.toml"
        self.config.write_text(
            "".join(f'[[models]]\nname = "{model.name}"\nsource = "{model.write(folder)}"\n' for model in models)
            + '[scheduler]\naddress = "127.0.0.1:0"\nmetrics_address = "127.0.0.1:0"\n'
            '[cache]\naddress = "127.0.0.1:0"\nmetrics_address = "127.0.0.1:0"\n'
            '[worker]\nengine = "sim"\nmodel = "toy"\n'
        )
        arguments = ["up", "--config", str(self.config), "--http-port", "0", "--grpc-port", "0", "--json"]
        # It is asked, not killed, so that it can take its own children along.
        self.process = Process("up", arguments, folder / "up.log", death=signal.SIGTERM)
        self.http = ""

    async def ready(self) -> Up:
        said = await asyncio.to_thread(self.process.ready, 90)
        self.http = said["http"].removeprefix("http://")
        return self

    async def answers(self, model: str = "toy") -> bool:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        with contextlib.suppress(OSError):
            return (await http(self.http, "POST", "/v1/chat/completions", body))[0] == 200
        return False


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Up]:
    up = Up(tmp_path)
    try:
        yield await up.ready()
    finally:
        below = children(up.process.pid)
        up.process.kill()
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_it_starts_serves_and_leaves_nothing(up: Up, number: signal.Signals) -> None:
    assert await up.answers()
    below = children(up.process.pid)
    for name in ("router", "scheduler", "cache", "worker"):
        assert len(named(up, name)) == 1, (name, below)
    assert up.process.stop(number) == 0

    async def gone() -> bool:
        return not any(alive(pid) for pid in below)

    await eventually(gone, "no process is left", 10)
    with pytest.raises(OSError):
        await http(up.http, "GET", "/live")


async def test_a_child_that_dies_is_started_again(up: Up) -> None:
    for name in ("worker", "router", "scheduler", "cache"):
        (victim,) = named(up, name)
        os.kill(victim, signal.SIGKILL)

        async def another(name: str = name, victim: int = victim) -> bool:
            return bool(named(up, name)) and victim not in named(up, name)

        await eventually(another, f"another {name}", 30)
        await eventually(up.answers, f"it serves again after the {name}'s death", 60)
    below = children(up.process.pid)
    assert up.process.stop() == 0
    assert not any(alive(pid) for pid in below)


async def test_aliases_that_come_while_it_is_up_are_served(up: Up) -> None:
    assert not await up.answers("smart")
    alias = "".join(f'[[aliases.variants]]\nmodel = "{model}"\n' for model in ("toy", "small"))
    with up.config.open("a") as config:
        config.write(f'[[aliases]]\nname = "smart"\n{alias}')
    await eventually(lambda: up.answers("smart"), "the name is there", 60)
    status, _, page = await http(up.http, "GET", "/routes")
    assert status == 200
    (smart,) = page["aliases"]
    assert [(each["model"], each["ready_workers"]) for each in smart["variants"]] == [("toy", 1), ("small", 1)]
    assert len(named(up, "worker")) == 2
    assert up.process.stop() == 0


def named(up: Up, name: str) -> list[int]:
    """The children that run that service."""
    return [pid for pid, command in children(up.process.pid).items() if f" {name} " in f"{command} "]
