"""The one-box supervisor, with small programs in place of the services.

Each of them reports to the test over a connection that the kernel closes when the process ends, however it ends; so the
test waits for ends and beginnings rather than looking for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_router import FakeRouter

from headrace import config as configuration
from headrace import process, up
from headrace.config import Config
from headrace.errors import ConfigError, HeadraceError
from headrace.up import Backoff, Child, Log, Mesh, Plan, Spec, Supervisor, UpError

TIMEOUT_S = 30.0
ROOT = Path(__file__).parents[2]

#: A service's stand-in. It says hello with its settings, then does what the test tells it.
STUB = """
import json, os, signal, socket, subprocess, sys
from headrace.__main__ import die_with_parent
die_with_parent()
name, service, settings, control, mode = sys.argv[1:]
settings = dict(setting.split("=", 1) for setting in json.loads(settings))
host, port = control.split(":")
connection = socket.create_connection((host, int(port)))
say = lambda **words: connection.sendall(json.dumps(words).encode() + b"\\n")
def on_term(*_):
    say(got="term")
    if mode != "stubborn":
        os._exit(0)
signal.signal(signal.SIGTERM, on_term)
if mode == "grandchild":
    # It holds the connection too, so the test sees its end only when both are gone.
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[connection.fileno()])
say(name=name, settings=settings, pid=os.getpid(), parent=os.getppid())
print("some words before")
print("{not json")
print('{"ready": "somebody else"}')
print("trouble ahead", file=sys.stderr)
if mode == "fails":
    sys.exit(3)
fields = {"router": ["http_address", "grpc_address"]}.get(service, ["address", "metrics_address"])
names = {"http_address": "http", "grpc_address": "grpc", "metrics_address": "metrics"}
own = {}
for at, key in enumerate(fields):
    own[names.get(key, key)] = settings.get(f"{service}.{key}", f"127.0.0.1:{os.getpid() % 60000 + at}")
if mode == "vague":
    own = {}
if mode != "silent":
    print(json.dumps({"ready": service, **own, "worker_id": settings.get("worker.worker_id", "")}), flush=True)
for line in connection.makefile():
    if line.startswith("exit"):
        os._exit(int(line.split()[1]))
    if line.startswith("flood"):
        sys.stdout.write("x" * 300_000 + "\\n")
        sys.stdout.flush()
        say(got="flooded")
    if line.startswith("segv"):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@dataclass
class Life:
    """One process of a child, as the test sees it."""

    name: str
    settings: dict[str, str]
    pid: int
    parent: int
    writer: asyncio.StreamWriter
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    heard: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def tell(self, words: str) -> None:
        self.writer.write(words.encode() + b"\n")


class Control:
    """Where the stubs report."""

    def __init__(self) -> None:
        self.address = ""
        self.modes: dict[str, str] = {}
        self.lives: list[Life] = []
        #: What happened, in order: "scheduler begins", "router told to end", "router ends".
        self.story: list[str] = []
        self._changed = asyncio.Condition()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        life: Life | None = None
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                words = json.loads(line)
                if "got" in words:
                    assert life is not None
                    life.heard.put_nowait(words["got"])
                    if words["got"] == "term":
                        await self._note(f"{life.name} told to end")
                else:
                    life = Life(**words, writer=writer)
                    self.lives.append(life)
                    await self._note(f"{life.name} begins")
        if life is not None:
            life.ended.set()
            await self._note(f"{life.name} ends")
        writer.close()

    async def _note(self, words: str) -> None:
        async with self._changed:
            self.story.append(words)
            self._changed.notify_all()

    async def life(self, name: str, number: int = 1) -> Life:
        """The so-manieth process of that name."""
        found: list[Life] = []

        def there() -> bool:
            found[:] = [life for life in self.lives if life.name == name]
            return len(found) >= number

        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(there)
        return found[number - 1]

    async def all_ended(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            for life in self.lives:
                await life.ended.wait()

    def command(self, spec: Spec, settings: Sequence[str], _config_file: Path) -> list[str]:
        mode = self.modes.get(spec.name, "")
        return [sys.executable, "-c", STUB, spec.name, spec.service, json.dumps(settings), self.address, mode]


@pytest.fixture
async def control(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Control]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "services"))
    monkeypatch.setattr(up, "RESTART_FIRST_S", 0.001)
    control = Control()
    server = await asyncio.start_server(control.serve, "127.0.0.1", 0)
    control.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield control
    await control.all_ended()
    server.close()
    await server.wait_closed()


@dataclass
class Recorder:
    """A reporter that remembers."""

    phases: list[str] = field(default_factory=list)
    warnings: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    changes: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    mesh: asyncio.Future[Mesh] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    stopped: int = 0

    def begin(self, phase: str) -> None:
        self.phases.append(phase)

    def progress(self, phase: str, text: str, fraction: float) -> None:
        self.phases.append(f"{phase}: {text} {fraction:.0%}")

    def end(self, phase: str) -> None:
        self.phases.append(f"{phase} done")

    def warn(self, text: str) -> None:
        self.warnings.put_nowait(text)

    def changed(self, text: str) -> None:
        self.changes.put_nowait(text)

    def ready(self, mesh: Mesh) -> None:
        self.mesh.set_result(mesh)

    def stopping(self) -> None:
        self.stopped += 1


def any_ports(**more: str) -> Config:
    """The configuration of `up` with ports for people chosen by the system too."""
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in more.items()]
    return up.effective_config(None, overrides, http_port=0, grpc_port=0)


def no_model(*_: object, **__: object) -> None:
    """In place of preparing one."""


async def all_seen(_address: str, _model: str, _count: int) -> None:
    """The router sees all workers at once."""


def supervisor(control: Control, plan: Plan, **options: Any) -> tuple[Supervisor, Recorder]:
    recorder = Recorder()
    options = {"prepare": no_model, "probe": all_seen, **options}
    return Supervisor(plan, recorder, command=control.command, **options), recorder


async def brought_up(supervisor: Supervisor, recorder: Recorder) -> tuple[asyncio.Task[None], Mesh]:
    running = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.wait({running, recorder.mesh}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
    return running, recorder.mesh.result()


async def finished(running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await running


async def test_up_in_order_and_down_in_order(control: Control) -> None:
    probed: list[tuple[str, str, int]] = []

    async def probe(address: str, model: str, count: int) -> None:
        probed.append((address, model, count))

    def prepare(source: str, quantization: str, *_: str, weights: bool, progress: Callable[[str, float], None]) -> None:
        progress(f"{source} {quantization} {weights}", 0.5)

    boss, recorder = supervisor(control, Plan(any_ports(), workers=2), prepare=prepare, probe=probe)
    running, mesh = await brought_up(boss, recorder)
    assert recorder.phases == [
        "model",
        "model: embedded auto True 50%",
        "model done",
        "services",
        "services done",
        "engine",
        "engine done",
    ]
    begun = [words.split()[0] for words in control.story]
    assert begun[:2] == ["cache", "scheduler"]
    assert set(begun[2:]) == {"router", "worker-1", "worker-2"}

    router, worker = await control.life("router"), await control.life("worker-2")
    assert (await control.life("scheduler")).settings["scheduler.cache"] == mesh.cache
    assert router.settings == {"router.scheduler": mesh.scheduler, "router.cache": mesh.cache}
    assert worker.settings == {
        "worker.worker_id": "worker-2",
        "worker.scheduler": mesh.scheduler,
        "worker.cache": mesh.cache,
    }
    assert [sorted(found) for found in mesh.workers] == [["address", "metrics", "worker_id"]] * 2
    assert probed == [(mesh.grpc, "smollm2-135m", 2)]
    assert "trouble ahead" in (mesh.logs / "router.log").read_text()
    assert json.loads(json.dumps(mesh.to_dict()))["ready"] == "up"

    boss.stop.set()
    await finished(running)
    await control.all_ended()
    ends = [words.split()[0] for words in control.story if words.endswith("told to end")]
    assert ends[0] == "router"
    assert set(ends[1:3]) == {"worker-1", "worker-2"}
    assert set(ends[3:]) == {"scheduler", "cache"}
    assert recorder.stopped == 1
    assert recorder.warnings.empty()
    assert not mesh.logs.exists()


async def test_children_get_the_effective_configuration(control: Control) -> None:
    files: list[str] = []

    def command(spec: Spec, settings: Sequence[str], config_file: Path) -> list[str]:
        files.append(config_file.read_text())
        return control.command(spec, settings, config_file)

    boss = Supervisor(Plan(any_ports(worker__slots="3")), Recorder(), command=command, prepare=no_model, probe=all_seen)
    running = asyncio.create_task(boss.run())
    await control.life("worker-1")
    boss.stop.set()
    await finished(running)
    assert "slots = 3" in files[0]
    assert len(set(files)) == 1


MODELS = """
[[models]]
name = "q8"
source = "embedded"
quantization = "Q8_0"
[[models]]
name = "q4"
source = "embedded"
quantization = "Q4_0"
"""
NEW_MODEL = """
[[models]]
name = "q5"
source = "embedded"
quantization = "BF16"
"""
ALIAS = """
[[aliases]]
name = "smart"
[[aliases.variants]]
model = "q8"
[[aliases.variants]]
model = "q4"
"""


@dataclass
class Followed:
    """A mesh that follows a file, and how to write it."""

    path: Path
    recorder: Recorder
    boss: Supervisor
    mesh: Mesh

    def write(self, text: str) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.path)

    def shown(self) -> Config:
        """What the router sees."""
        return configuration.load(self.mesh.logs / "headrace.toml")


@pytest.fixture
async def followed(control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Followed]:
    monkeypatch.setattr(process, "LOOK_EVERY_S", 0.01)
    path = tmp_path / "headrace.toml"
    path.write_text(MODELS)

    def read() -> Config:
        return up.effective_config(path, http_port=0, grpc_port=0)

    prepared: list[str] = []

    def prepare(source: str, quantization: str, *_: str, weights: bool, progress: object) -> None:
        prepared.append(f"{quantization} {weights}")

    plan = Plan(read(), workers=2, log_dir=tmp_path / "logs")
    boss, recorder = supervisor(control, plan, again=(path, read), prepare=prepare)
    running, mesh = await brought_up(boss, recorder)
    assert prepared == ["Q8_0 True", "Q4_0 False"]
    yield Followed(path, recorder, boss, mesh)
    boss.stop.set()
    await finished(running)


async def test_new_aliases_are_followed_with_workers_for_what_they_need(control: Control, followed: Followed) -> None:
    recorder = followed.recorder
    followed.write(MODELS + ALIAS)
    async with asyncio.timeout(TIMEOUT_S):
        assert await recorder.changes.get() == "the aliases have changed; workers of q4 were started"
    assert [alias.name for alias in followed.shown().aliases] == ["smart"]
    workers = {life.name: life for life in control.lives if life.name.startswith("worker")}
    assert sorted(workers) == ["worker-1", "worker-2", "worker-3", "worker-4"]
    assert [workers[f"worker-{number}"].settings.get("worker.model") for number in (1, 2, 3, 4)] == [
        *(None, None),
        *("q4", "q4"),
    ]
    # They are kept like all others.
    workers["worker-3"].tell("exit 1")
    await control.life("worker-3", 2)
    followed.write(MODELS)
    async with asyncio.timeout(TIMEOUT_S):
        assert "those of q4 stay" in await recorder.changes.get()
    assert followed.shown().aliases == ()
    followed.write(MODELS + ALIAS)
    async with asyncio.timeout(TIMEOUT_S):
        assert await recorder.changes.get() == "the aliases have changed"
    assert len({life.name for life in control.lives if life.name.startswith("worker")}) == 4


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[[aliases]\n", "stay in force"),
        (MODELS + "[worker]\nslots = 9\n", "what changed under worker needs a restart of headrace up"),
        (MODELS + ALIAS.replace("q4", "q5") + NEW_MODEL, "q5 was not under [[models]] when headrace up was started"),
    ],
    ids=["broken", "another section", "a new model"],
)
async def test_what_is_not_followed_is_said(control: Control, followed: Followed, text: str, warning: str) -> None:
    followed.write(text)
    seen: list[str] = []
    async with asyncio.timeout(TIMEOUT_S):
        while not any(warning in each for each in seen):
            seen.append(await followed.recorder.warnings.get())
    # And what comes after it is.
    followed.write(MODELS + ALIAS)
    async with asyncio.timeout(TIMEOUT_S):
        assert "workers of q4" in await followed.recorder.changes.get()


async def test_workers_that_cannot_be_started_leave_the_former_aliases(control: Control, followed: Followed) -> None:
    control.modes["worker-4"] = "fails"
    followed.write(MODELS + ALIAS)
    async with asyncio.timeout(TIMEOUT_S):
        warning = await followed.recorder.warnings.get()
        assert "stay in force: worker-4 ended before it was ready" in warning
        await (await control.life("worker-3")).ended.wait()
    assert followed.shown().aliases == ()
    del control.modes["worker-4"]
    followed.write(MODELS + ALIAS + "# again")
    async with asyncio.timeout(TIMEOUT_S):
        assert "workers of q4" in await followed.recorder.changes.get()


async def test_a_child_that_dies_is_started_again_where_it_was(control: Control) -> None:
    boss, recorder = supervisor(control, Plan(any_ports()))
    running, mesh = await brought_up(boss, recorder)
    first = await control.life("scheduler")
    first.tell("segv")
    second = await control.life("scheduler", 2)
    async with asyncio.timeout(TIMEOUT_S):
        assert "scheduler ended (killed by SIGSEGV); starting it again in" in await recorder.warnings.get()
        assert await recorder.warnings.get() == "scheduler is ready again"
    assert second.settings["scheduler.address"] == mesh.scheduler
    assert "scheduler.metrics_address" in second.settings
    # And again, and another one.
    second.tell("exit 7")
    await control.life("scheduler", 3)
    (await control.life("worker-1")).tell("exit 0")
    again = await control.life("worker-1", 2)
    assert again.settings["worker.address"] == mesh.workers[0]["address"]
    boss.stop.set()
    await finished(running)
    await control.all_ended()
    # Something went wrong: the logs are kept.
    assert (mesh.logs / "scheduler.log").read_text().count("\ntrouble ahead\n") == 3
    shutil.rmtree(mesh.logs)


async def test_a_child_that_cannot_be_started_again_is_tried_on(control: Control) -> None:
    boss, recorder = supervisor(control, Plan(any_ports()))
    running, mesh = await brought_up(boss, recorder)
    control.modes["cache"] = "fails"
    (await control.life("cache")).tell("exit 1")
    await control.life("cache", 3)
    del control.modes["cache"]
    async with asyncio.timeout(TIMEOUT_S):
        seen = [await recorder.warnings.get()]
        while seen[-1] != "cache is ready again":
            seen.append(await recorder.warnings.get())
    assert any("cache ended before it was ready (exit code 3)" in words for words in seen)
    boss.stop.set()
    await finished(running)
    shutil.rmtree(mesh.logs)


@pytest.mark.parametrize("name", ["scheduler", "worker-1"])
async def test_a_child_that_fails_at_first_ends_it_all(control: Control, name: str) -> None:
    control.modes[name] = "fails"
    boss, _ = supervisor(control, Plan(any_ports()))
    with pytest.raises(UpError, match=f"{name} ended before it was ready \\(exit code 3\\); its log: ") as caught:
        await finished(asyncio.create_task(boss.run()))
    assert "trouble ahead" in caught.value.details
    await control.all_ended()
    assert str(caught.value).endswith(f"its log: {boss._folder}/{name}.log")
    assert "trouble ahead" in (boss._folder / f"{name}.log").read_text()
    shutil.rmtree(boss._folder)


async def test_a_ready_line_must_say_where(control: Control) -> None:
    control.modes["scheduler"] = "vague"
    boss, _ = supervisor(control, Plan(any_ports()))
    with pytest.raises(UpError, match="ready line does not say 'address'"):
        await finished(asyncio.create_task(boss.run()))
    shutil.rmtree(boss._folder)


def one_spec(**more: Any) -> Spec:
    values: dict[str, Any] = {
        "name": "scheduler",
        "service": "scheduler",
        "settings": (),
        "addresses": {"address": "scheduler.address"},
        "ready_timeout_s": TIMEOUT_S,
        "grace_s": 0.0,
    }
    return Spec(**{**values, **more})


async def test_a_child_that_is_never_ready_is_given_up(control: Control, tmp_path: Path) -> None:
    control.modes["scheduler"] = "silent"
    child = Child(one_spec(ready_timeout_s=0.5), control.command, tmp_path, Log(tmp_path / "log"))
    with pytest.raises(UpError, match=r"scheduler was not ready within 0\.5 s"):
        await child.start()
    assert not child.running
    await control.all_ended()


async def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    child = Child(one_spec(), lambda *_: ["/no/such/program"], tmp_path, Log(tmp_path / "log"))
    with pytest.raises(UpError, match="cannot start /no/such/program: No such file"):
        await child.start()


async def test_a_long_line_neither_stops_the_child_nor_is_lost(control: Control, tmp_path: Path) -> None:
    child = Child(one_spec(), control.command, tmp_path, Log(tmp_path / "log"))
    await child.start()
    life = await control.life("scheduler")
    life.tell("flood")
    async with asyncio.timeout(TIMEOUT_S):
        assert await life.heard.get() == "flooded"
    child.kill()
    await child.wait()
    assert (tmp_path / "log").read_text().count("x") >= 300_000


async def test_what_a_child_has_started_ends_with_it(control: Control, tmp_path: Path) -> None:
    control.modes["scheduler"] = "grandchild"
    child = Child(one_spec(), control.command, tmp_path, Log(tmp_path / "log"))
    await child.start()
    life = await control.life("scheduler")
    life.tell("exit 0")
    await child.wait()
    async with asyncio.timeout(TIMEOUT_S):
        await life.ended.wait()


async def test_a_child_that_does_not_end_is_killed(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "STOP_MARGIN_S", 0.2)
    control.modes["cache"] = "stubborn"
    boss, recorder = supervisor(control, Plan(any_ports(cache__drain_grace_s="0")))
    running, _ = await brought_up(boss, recorder)
    boss.stop.set()
    await finished(running)
    await control.all_ended()
    assert "cache did not end within 0.2 s and is killed" in recorder.warnings.get_nowait()


async def test_a_second_signal_kills_at_once(control: Control) -> None:
    control.modes["router"] = "stubborn"
    boss, recorder = supervisor(control, Plan(any_ports()))
    running, _ = await brought_up(boss, recorder)
    router = await control.life("router")
    boss.stop.set()
    async with asyncio.timeout(TIMEOUT_S):
        assert await router.heard.get() == "term"
    boss.kill.set()
    await finished(running)
    await control.all_ended()


async def test_stopped_while_the_model_is_prepared(control: Control) -> None:
    preparing, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def prepare(*_: object, **__: object) -> None:
        loop.call_soon_threadsafe(preparing.set)
        go_on.wait(TIMEOUT_S)

    boss, recorder = supervisor(control, Plan(any_ports()), prepare=prepare)
    running = asyncio.create_task(boss.run())
    await asyncio.wait_for(preparing.wait(), TIMEOUT_S)
    boss.stop.set()
    await finished(running)
    go_on.set()
    assert control.lives == []
    assert recorder.stopped == 0


async def test_stopped_while_the_engine_loads(control: Control) -> None:
    control.modes["worker-1"] = "silent"
    boss, _ = supervisor(control, Plan(any_ports()))
    running = asyncio.create_task(boss.run())
    await control.life("worker-1")
    boss.stop.set()
    await finished(running)
    await control.all_ended()


async def test_a_model_that_cannot_be_prepared(control: Control) -> None:
    def prepare(*_: object, **__: object) -> None:
        raise HeadraceError("no such model")

    boss, _ = supervisor(control, Plan(any_ports()), prepare=prepare)
    with pytest.raises(HeadraceError, match="no such model"):
        await finished(asyncio.create_task(boss.run()))
    assert control.lives == []
    assert not boss._folder.exists()


async def test_a_router_that_never_sees_the_workers(control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "MESH_READY_TIMEOUT_S", 0.05)

    async def probe(*_: object) -> None:
        await asyncio.Event().wait()

    boss, _ = supervisor(control, Plan(any_ports()), probe=probe)
    with pytest.raises(UpError, match=r"does not see 1 ready worker\(s\) within 0\.05 s"):
        await finished(asyncio.create_task(boss.run()))
    await control.all_ended()
    shutil.rmtree(boss._folder)


async def test_a_port_that_is_taken_is_named_before_anything_starts(control: Control) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = up.effective_config(None, http_port=0, grpc_port=port)
        boss, recorder = supervisor(control, Plan(config))
        with pytest.raises(ConfigError, match=f"grpc_address: cannot listen on 127.0.0.1:{port}: .*--grpc-port"):
            await boss.run()
    assert recorder.phases == []


async def test_a_mesh_without_cache(control: Control) -> None:
    config = any_ports(router__cache="", worker__cache="")
    boss, recorder = supervisor(control, Plan(config))
    running, mesh = await brought_up(boss, recorder)
    assert mesh.cache == ""
    assert {life.name for life in control.lives} == {"scheduler", "router", "worker-1"}
    assert "worker.cache" not in (await control.life("worker-1")).settings
    assert (await control.life("scheduler")).settings["scheduler.cache"] == ""
    boss.stop.set()
    await finished(running)


async def test_the_sim_engine_needs_no_weights(control: Control) -> None:
    asked: list[bool] = []

    def prepare(*_: str, weights: bool, progress: object) -> None:
        asked.append(weights)

    boss, recorder = supervisor(control, Plan(any_ports(worker__engine="sim")), prepare=prepare)
    running, _ = await brought_up(boss, recorder)
    boss.stop.set()
    await finished(running)
    assert asked == [False]


#: A supervisor in a process of its own, with stubs for children.
BOSS = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, ROOT)
from tests.unit import test_up
from headrace import up
async def main():
    control = test_up.Control()
    control.address = sys.argv[1]
    boss, recorder = test_up.supervisor(control, up.Plan(test_up.any_ports(), log_dir=Path(sys.argv[2])))
    with up.stop_signals(boss):
        running, mesh = await test_up.brought_up(boss, recorder)
        print("up", flush=True)
        await running
    print("down", flush=True)
asyncio.run(main())
"""


async def start_boss(control: Control, log_dir: Path) -> asyncio.subprocess.Process:
    code = BOSS.replace("ROOT", repr(str(ROOT)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, control.address, str(log_dir)),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S) == b"up\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_everything(control: Control, tmp_path: Path, number: signal.Signals) -> None:
    process = await start_boss(control, tmp_path)
    process.send_signal(number)
    out, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert (out, process.returncode) == (b"down\n", 0)
    await control.all_ended()
    assert len(control.lives) == 4


async def test_children_do_not_outlive_a_supervisor_that_is_killed(control: Control, tmp_path: Path) -> None:
    process = await start_boss(control, tmp_path)
    assert {life.parent for life in control.lives} == {process.pid}
    process.kill()
    await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    # Nobody is there to tell them: only the kernel can have ended them.
    await control.all_ended()
    assert not [words for words in control.story if words.endswith("told to end")]


# Values.


def test_internal_ports_are_the_systems_choice_unless_configured(tmp_path: Path) -> None:
    plain = up.effective_config(None)
    assert (plain.scheduler.address, plain.cache.metrics_address) == ("127.0.0.1:0", "127.0.0.1:0")
    assert (plain.router.http_address, plain.router.grpc_address) == ("127.0.0.1:8080", "127.0.0.1:8081")
    file = tmp_path / "mesh.toml"
    file.write_text('[scheduler]\naddress = "127.0.0.1:8082"\n[router]\nhttp_address = "0.0.0.0:1"\n')
    got = up.effective_config(file, http_port=5, engine="sim")
    assert got.scheduler.address == "127.0.0.1:8082"
    assert got.router.http_address == "0.0.0.0:5"
    assert got.worker.engine == "sim"


def test_a_model_by_name_by_file_and_the_embedded_one(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text('[[models]]\nname = "a"\n[[models]]\nname = "b"\n')
    assert up.effective_config(file, model="b").worker.model == "b"
    weights = tmp_path / "my model.Q8.gguf"
    weights.touch()
    chosen = up.effective_config(file, model=str(weights))
    assert [(model.name, model.source) for model in chosen.models] == [("my-model.Q8", str(weights))]
    assert chosen.worker.model == "my-model.Q8"
    assert up.effective_config(file, model="embedded").models[0].source == "embedded"
    with pytest.raises(ConfigError, match=r"--model: 'c' is neither a model of the configuration \(a, b\) nor a file"):
        up.effective_config(file, model="c")


@pytest.mark.parametrize(
    ("settings", "workers", "message"),
    [
        ([], 0, "--workers: must be at least 1, got 0"),
        (["worker.address=127.0.0.1:9"], 2, "worker.address: 2 workers cannot share 127.0.0.1:9"),
        (["worker.metrics_address=127.0.0.1:9"], 2, "worker.metrics_address"),
        (["worker.advertise=me:9"], 2, "worker.advertise"),
        (["worker.scheduler="], 1, "worker.scheduler"),
    ],
)
def test_a_plan_that_cannot_be(settings: list[str], workers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(up.effective_config(None, settings), workers=workers)


def test_workers_for_prompts_are_beside_the_others() -> None:
    specs = Plan(up.effective_config(None), workers=2, prefill_workers=1).outer_specs("a:1", "b:2", ["smollm2-135m"])
    assert [spec.name for spec in specs] == ["router", "worker-1", "worker-2", "prefill-1"]
    assert ["worker.role=prefill" in spec.settings for spec in specs] == [False, False, False, True]
    assert "worker.worker_id=prefill-1" in specs[3].settings
    with pytest.raises(ConfigError, match="2 workers cannot share"):
        Plan(up.effective_config(None, ["worker.address=127.0.0.1:9"]), prefill_workers=1)
    with pytest.raises(ConfigError, match="--prefill-workers: must be at least 0"):
        Plan(up.effective_config(None), prefill_workers=-1)


def test_a_configured_worker_name_is_kept() -> None:
    config = up.effective_config(None, ["worker.worker_id=w"])
    one = Plan(config).outer_specs("a:1", "b:2", ["smollm2-135m"])
    two = Plan(config, workers=2).outer_specs("a:1", "b:2", ["smollm2-135m"])
    assert "worker.worker_id=w" in one[1].settings
    assert ["worker.worker_id=w-1" in two[1].settings, "worker.worker_id=w-2" in two[2].settings] == [True, True]


@pytest.mark.parametrize(
    ("address", "expected"),
    [("0.0.0.0:1", "127.0.0.1:1"), ("[::]:1", "[::1]:1"), ("box:1", "box:1"), ("127.0.0.1:1", "127.0.0.1:1")],
)
def test_where_to_reach_who_listens_everywhere(address: str, expected: str) -> None:
    assert up.reachable(address) == expected


@given(st.lists(st.floats(0, 200), max_size=40))
def test_pauses_grow_are_bounded_and_are_forgiven(runs_s: list[float]) -> None:
    backoff = Backoff()
    before_s = 0.0
    for ran_s in runs_s:
        pause_s = backoff.next(ran_s)
        assert up.RESTART_FIRST_S <= pause_s <= up.RESTART_LONGEST_S
        if ran_s >= up.RESTART_FORGIVEN_S:
            assert pause_s == up.RESTART_FIRST_S
        else:
            assert pause_s >= before_s or before_s == 0.0
        before_s = pause_s


def test_a_log_is_bounded_and_keeps_its_last_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "a.log", max_bytes=100)
    for number in range(100):
        log.write(f"line {number}".encode())
    log.close()
    assert log.tail()[-1] == "line 99"
    assert len(log.tail()) == up.TAIL_LINES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.1.log", "a.log"]
    assert all(path.stat().st_size <= 110 for path in tmp_path.iterdir())
    assert (tmp_path / "a.log").read_text().endswith("line 99\n")


def test_a_log_that_cannot_be_written_still_has_its_last_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "none" / "a.log")
    log.write(b"words")
    assert log.tail() == ["words"]


def test_the_real_command_does_not_see_the_current_folder() -> None:
    spec = one_spec(settings=())
    command = up.headrace_command(spec, ["a.b=c"], Path("/x.toml"))
    assert command[0] == sys.executable
    assert command[1:] == ["-P", "-m", "headrace", "scheduler", "--config", "/x.toml", "--set", "a.b=c"]


async def test_waiting_for_workers_to_be_seen() -> None:
    async with FakeRouter() as router, asyncio.timeout(TIMEOUT_S):
        await up.workers_seen(router.address, "other", 1)
    with pytest.raises(TimeoutError):
        async with FakeRouter() as router, asyncio.timeout(0.3):
            await up.workers_seen(router.address, "toy", 2)


def test_a_process_whose_parent_is_gone_already_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.__main__ import die_with_parent

    # Not ours: so that parent must have died. (The kernel's part is undone by the next line's own exit.)
    monkeypatch.setenv(up.PARENT_PID, "1" if os.getppid() != 1 else "2")
    monkeypatch.setattr("ctypes.CDLL", lambda *_a, **_k: type("C", (), {"prctl": staticmethod(lambda *_: 0)}))
    with pytest.raises(SystemExit):
        die_with_parent()
    assert up.PARENT_PID not in os.environ
    die_with_parent()
