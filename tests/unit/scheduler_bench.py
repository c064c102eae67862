"""A driver of the scheduler's core for tests: a virtual clock that keeps the driver's duties, and short builders.

Everything that the core says is checked against its promises as it comes: each ask answered once, grants only to known
asks, limits kept, loads true. :func:`play` runs a conversation written as text and returns its transcript.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterable
from typing import Any

from headrace.scheduler import actions, events
from headrace.scheduler.core import Core, Policy
from headrace.scheduler.queue import RANK
from headrace.v1 import types_pb2, worker_pb2

CLASSES = {
    "interactive": types_pb2.REQUEST_CLASS_INTERACTIVE,
    "standard": types_pb2.REQUEST_CLASS_STANDARD,
    "batch": types_pb2.REQUEST_CLASS_BATCH,
}
STATES = {
    "starting": worker_pb2.WORKER_STATE_STARTING,
    "ready": worker_pb2.WORKER_STATE_READY,
    "draining": worker_pb2.WORKER_STATE_DRAINING,
    "unhealthy": worker_pb2.WORKER_STATE_UNHEALTHY,
}


def description(*, slots: int = 1, context: int = 1000, kv_blocks: int = 0, model: str = "m") -> Any:
    """What a worker says of itself."""
    return types_pb2.ModelDescription(
        model=model, slots=slots, context_tokens=context, kv_blocks=kv_blocks, block_tokens=16
    )


class Bench:
    """A core, its clock, and who is there."""

    def __init__(self, seed: int = 1, *, settled: bool = True, **policy: Any) -> None:
        self.policy = Policy(**({"queue_factor": 1.0} | policy))
        self.core = Core(self.policy, random.Random(seed), 0.0, first_lease=100)
        self.now_s = 0.0
        self.log: list[actions.Action] = []
        self.links: dict[str, int] = {}
        self.instances: dict[str, str] = {}
        self.descriptions: dict[str, Any] = {}
        self.open: set[tuple[int, int]] = set()
        self.granted: dict[tuple[int, int], actions.Granted] = {}
        self._last_link = 0
        if settled:
            self.advance(self.policy.silence_s)

    # Time.

    def advance(self, seconds: float) -> list[actions.Action]:
        """Let time pass, waking the core when it asks for it."""
        until_s, done = self.now_s + seconds, []
        while (wakeup_s := self.core.next_wakeup()) is not None and wakeup_s <= until_s:
            assert wakeup_s > self.now_s or not done or done[-1], "the core asks to be woken again and again"
            self.now_s = max(wakeup_s, self.now_s)
            done += self.step(events.Tick())
        self.now_s = until_s
        return done

    def step(self, event: events.Event) -> list[actions.Action]:
        """One event, now."""
        done = self.core.step(self.now_s, event)
        for action in done:
            self._check(action)
        self.log += done
        self.check()
        return done

    # Workers.

    def worker(self, name: str, *, state: str = "ready", pool: str = "p", instance: str = "", **of: Any) -> int:
        """A worker joins and reports."""
        link = self.links[name] = self._new_link()
        self.instances[name] = instance or f"{name}-{link}"
        self.descriptions[name] = description(**of)
        self.step(events.WorkerJoined(link, name, self.instances[name], pool, f"{name}:1", self.descriptions[name]))
        if state:
            self.report(name, state)
        return link

    def report(self, name: str, state: str = "ready", **load: Any) -> list[actions.Action]:
        """A worker reports."""
        return self.step(events.WorkerReported(self.links[name], worker_pb2.Load(state=STATES[state], **load)))

    def lose(self, name: str) -> list[actions.Action]:
        """A worker's stream ends."""
        return self.step(events.WorkerLost(self.links[name]))

    def live(self, seconds: float) -> list[actions.Action]:
        """Time passes in which all workers report as they last did."""
        done, until_s = [], self.now_s + seconds
        while self.now_s < until_s:
            done += self.advance(min(self.policy.heartbeat_s, until_s - self.now_s))
            for worker in list(self.core.fleet.workers.values()):
                done += self.step(events.WorkerReported(worker.link, worker.load))
        return done

    def load(self, name: str) -> int:
        """Leases of a worker."""
        worker = self.core.fleet.workers.get(self.instances[name])
        return len(worker.held) if worker else 0

    # Routers.

    def router(self, name: str = "r", running: Iterable[events.RunningLease] = ()) -> int:
        """A router joins."""
        link = self.links[name] = self._new_link()
        self.step(events.RouterJoined(link, name, tuple(running)))
        return link

    def router_lost(self, name: str = "r") -> list[actions.Action]:
        """A router's stream ends; its asks are nobody's any more."""
        link = self.links[name]
        self.open = {key for key in self.open if key[0] != link}
        return self.step(events.RouterLost(link))

    def ask(
        self,
        number: int,
        router: str = "r",
        *,
        pools: tuple[str, ...] = ("p",),
        prompt: int = 10,
        cls: str = "standard",
        left_s: float | None = None,
        n: int = 1,
        avoid: Iterable[str] = (),
        max_tokens: int = 16,
        expect: int = 0,
    ) -> list[actions.Action]:
        """A router asks."""
        link = self.links[router]
        if (link, number) not in self.open:
            self.open.add((link, number))
            self.granted.pop((link, number), None)
        ask = events.Ask(
            number=number,
            request_id=f"req-{number}",
            pools=pools,
            prompt_tokens=prompt,
            max_tokens=max_tokens,
            choices=n,
            request_class=CLASSES[cls],
            deadline_s=None if left_s is None else self.now_s + left_s,
            avoid_instances=frozenset(avoid),
            expected_output_tokens=expect,
        )
        return self.step(events.Asked(link, ask))

    def withdraw(self, number: int, router: str = "r") -> list[actions.Action]:
        """The client of an ask left."""
        link = self.links[router]
        self.open.discard((link, number))
        return self.step(events.Withdrawn(link, number))

    def release(self, number: int, router: str = "r") -> list[actions.Action]:
        """The request of that ask ends."""
        link = self.links[router]
        return self.step(events.Released(link, self.granted[link, number].lease))

    def worker_of(self, number: int, router: str = "r") -> str:
        """Who got that ask."""
        return self.granted[self.links[router], number].worker_id

    # Promises.

    def check(self) -> None:
        """What holds after every step."""
        core = self.core
        assert len(core.queue) <= self.policy.max_queued
        held = [number for worker in core.fleet.workers.values() for number in worker.held.leases]
        assert len(held) == len(set(held))
        assert set(held) <= set(core.fleet.leases)
        by_router = [number for router in core.routers.values() for number in router.leases]
        assert sorted(by_router) == sorted(core.fleet.leases)
        for worker in core.fleet.workers.values():
            for part in (worker.held, worker.unreported):
                leases = part.leases.values()
                assert part.choices == sum(lease.choices for lease in leases)
                assert part.prompt_tokens == sum(lease.prompt_tokens for lease in leases)
                assert part.kv_tokens == sum(lease.kv_tokens for lease in leases)
            assert set(worker.unreported.leases) <= set(worker.held.leases)
            pool = core.fleet.pools[worker.pool]
            open_ = worker.ready and not worker.reserved_for and worker.held.choices < worker.limit
            assert (worker.order_key is not None) == open_
            assert (worker.instance_id in pool.ready) == worker.ready
        for line in core.queue._lines.values():
            waiting = [each for rank in line.ranks for each in rank.values()]
            assert list(line.picky.values()) == [each for each in line.picky.values() if each in waiting]
        # Nobody waits that the core doesn't know of, and the other way round.
        assert len(core.queue) == len(self.open)

    def _check(self, action: actions.Action) -> None:
        if isinstance(action, actions.Granted | actions.Refused):
            key = (action.link, action.ask)
            assert key in self.open, f"answered twice, or never asked: {action}"
            self.open.remove(key)
        if isinstance(action, actions.Granted):
            self.granted[action.link, action.ask] = action
            worker = self.core.fleet.workers[action.instance_id]
            assert worker.held.choices <= worker.limit or len(worker.held) == 1
        if isinstance(action, actions.RouterDropped):
            self.open = {key for key in self.open if key[0] != action.link}

    def _new_link(self) -> int:
        self._last_link += 1
        return self._last_link


def only(done: Iterable[actions.Action], kind: type) -> list[Any]:
    """The actions of that kind."""
    return [action for action in done if isinstance(action, kind)]


# Conversations as text.


def play(script: str, **policy: Any) -> str:
    """Run a script; return it with what the core did after each line, indented with ``->``.

    Lines: ``worker NAME [key=value...]``, ``report NAME [state=...]``, ``lose NAME``, ``router NAME``,
    ``router-lost NAME``, ``ask NUMBER [key=value...]``, ``withdraw N``, ``release N``, ``+SECONDS`` (workers report
    meanwhile), ``+SECONDS silent``. Expected lines in the script are ignored, so a script is its own transcript.
    """
    bench = Bench(**policy)
    bench.log.clear()
    out = []
    for line in script.strip().splitlines():
        line = line.strip()
        if line.startswith("->") or not line:
            continue
        out.append(line)
        out += [f"    -> {text}" for action in _command(bench, line) if (text := show(bench, action))]
    return "\n".join(out)


def normal(script: str) -> str:
    """A script as :func:`play` would write it."""
    lines = [line.strip() for line in script.strip().splitlines() if line.strip()]
    return "\n".join(f"    {line}" if line.startswith("->") else line for line in lines)


def _command(bench: Bench, line: str) -> list[actions.Action]:
    before = len(bench.log)
    command, *words = shlex.split(line)
    plain = [word for word in words if "=" not in word]
    options: dict[str, Any] = dict(word.split("=", 1) for word in words if "=" in word)
    for key in ("slots", "context", "kv_blocks", "prompt", "n", "max_tokens", "kv_blocks_used", "expect"):
        if key in options:
            options[key] = int(options[key])
    if "left_s" in options:
        options["left_s"] = float(options["left_s"])
    if "pools" in options:
        options["pools"] = tuple(options["pools"].split(","))
    if "avoid" in options:
        options["avoid"] = [bench.instances[name] for name in options["avoid"].split(",")]
    match command:
        case "worker":
            bench.worker(plain[0], **options)
        case "report":
            bench.report(plain[0], **options)
        case "lose":
            bench.lose(plain[0])
        case "router":
            bench.router(plain[0])
        case "router-lost":
            bench.router_lost(plain[0])
        case "ask":
            bench.ask(int(plain[0]), **options)
        case "withdraw":
            bench.withdraw(int(plain[0]), **options)
        case "release":
            bench.release(int(plain[0]), **options)
        case _ if command.startswith("+"):
            (bench.advance if plain else bench.live)(float(command[1:]))
        case _:
            raise ValueError(f"unknown command {line!r}")
    return bench.log[before:]


def show(bench: Bench, action: actions.Action) -> str:
    """An action for a transcript."""
    names = {link: name for name, link in bench.links.items()}
    match action:
        case actions.Granted():
            return f"{action.ask} granted on {action.worker_id} after {action.queue_s:g} s"
        case actions.Waits():
            return f"{action.ask} waits as {action.position}"
        case actions.Refused():
            code = types_pb2.ErrorCode.Name(action.code).removeprefix("ERROR_CODE_").lower()
            retry = f", retry after {action.retry_after_ms} ms" if action.retry_after_ms else ""
            return f"{action.ask} refused: {code}: {action.message}{retry}"
        case actions.Welcomed():
            return f"{names[action.link]} welcome"
        case actions.JoinRefused():
            return f"join refused: {action.message}"
        case actions.WorkerDropped():
            return f"{names.get(action.link, 'worker')} dropped: {action.message}"
        case actions.RouterDropped():
            return f"{names.get(action.link, 'router')} dropped: {action.message}"
        case actions.FleetChanged():
            return ""
    raise ValueError(action)


assert set(CLASSES.values()) <= set(RANK)
