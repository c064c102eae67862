"""Whatever happens in whatever order, the scheduler keeps its promises.

A hypothesis state machine drives the core with random events under a virtual clock. ``Bench`` checks the promises after
each step; at the end capacity comes back, and then everything that waits must be served and every load must end at
zero.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tests.unit.scheduler_bench import CLASSES, STATES, Bench

from headrace.scheduler import events
from headrace.scheduler.core import PASS_LIMIT

ROUTERS = ("r", "s")
WORKERS = ("A", "B", "C", "D")
#: Each worker serves one pool.
POOL_OF = {"A": "p", "B": "p", "C": "p", "D": "q"}


class Scheduler(RuleBasedStateMachine):
    """Random routers and workers."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.number = 0
        self.passed_s = 0.0

    @initialize(
        seed=st.integers(0, 2**32),
        settled=st.booleans(),
        max_queued=st.sampled_from([0, 2, 30]),
        factor=st.sampled_from([1.0, 1.5]),
    )
    def begin(self, seed: int, settled: bool, max_queued: int, factor: float) -> None:
        self.bench = Bench(seed, settled=settled, max_queued=max_queued, queue_factor=factor)

    # Who is there.

    def joined(self) -> list[str]:
        alive = {worker.worker_id for worker in self.bench.core.fleet.workers.values()}
        return [name for name in WORKERS if name in alive]

    def here(self) -> list[str]:
        links = self.bench.core._routers_by_link
        return [name for name in ROUTERS if self.bench.links.get(name) in links]

    def held(self) -> list[tuple[str, int]]:
        """(router, lease) of all that is leased to routers that are here."""
        return [(name, lease) for name in self.here() for lease in sorted(self.bench.core.routers[name].leases)]

    # Workers.

    @rule(
        name=st.sampled_from(WORKERS),
        slots=st.integers(1, 4),
        context=st.sampled_from([50, 200]),
        kv_blocks=st.sampled_from([0, 8, 20]),
    )
    def worker_joins(self, name: str, slots: int, context: int, kv_blocks: int) -> None:
        self.bench.worker(name, state="", pool=POOL_OF[name], slots=slots, context=context, kv_blocks=kv_blocks)

    @precondition(lambda self: self.joined())
    @rule(
        data=st.data(),
        state=st.sampled_from(["ready", "ready", "ready", *STATES]),
        used=st.integers(0, 20),
        waiting=st.integers(0, 100),
        slots=st.integers(0, 4),
    )
    def worker_reports(self, data: Any, state: str, used: int, waiting: int, slots: int) -> None:
        name = data.draw(st.sampled_from(self.joined()))
        self.bench.report(name, state, kv_blocks_used=used, waiting_prompt_tokens=waiting, slots=slots)

    @precondition(lambda self: self.joined())
    @rule(data=st.data())
    def worker_lost(self, data: Any) -> None:
        self.bench.lose(data.draw(st.sampled_from(self.joined())))

    # Routers.

    @rule(data=st.data(), name=st.sampled_from(ROUTERS))
    def router_joins(self, data: Any, name: str) -> None:
        known = self.bench.core.routers.get(name)
        leases = [self.bench.core.fleet.leases[number] for number in sorted(known.leases)] if known else []
        kept = [lease for lease in leases if data.draw(st.booleans())]
        foreign = data.draw(st.lists(st.integers(1, 5), max_size=2, unique=True))
        announced = [events.RunningLease(lease.number, lease.instance_id, prompt_tokens=3) for lease in kept]
        announced += [
            events.RunningLease(number, data.draw(st.sampled_from(["gone", *self.bench.core.fleet.workers])))
            for number in foreign
        ]
        # The old stream, if there is one, is seen to break only later.
        if name in self.here():
            link = self.bench.links[name]
            self.bench.open = {key for key in self.bench.open if key[0] != link}
        self.bench.router(name, announced)

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def router_lost(self, data: Any) -> None:
        self.bench.router_lost(data.draw(st.sampled_from(self.here())))

    @precondition(lambda self: self.here())
    @rule(
        data=st.data(),
        cls=st.sampled_from(sorted(CLASSES)),
        pools=st.sampled_from([("p",), ("q",), ("p", "q"), ("q", "p"), ("nowhere", "p")]),
        prompt=st.integers(1, 220),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        left_s=st.sampled_from([None, 0.0, 0.3, 5.0]),
        avoid=st.sets(st.sampled_from(WORKERS), max_size=2),
    )
    def ask(self, data: Any, avoid: set[str], **of: Any) -> None:
        self.number += 1
        instances = [self.bench.instances[name] for name in sorted(avoid) if name in self.bench.instances]
        self.bench.ask(self.number, data.draw(st.sampled_from(self.here())), avoid=instances, **of)

    @precondition(lambda self: len(self.bench.core.queue) > 0)
    @rule(data=st.data(), passed=st.booleans())
    def withdraw_or_pass(self, data: Any, passed: bool) -> None:
        waiting = data.draw(st.sampled_from(self.bench.core.queue.everything()))
        if passed:
            # As if many had been served past it, which would take hundreds of steps.
            waiting.passed = PASS_LIMIT
            return
        name = {link: name for name, link in self.bench.links.items()}[waiting.link]
        self.bench.withdraw(waiting.ask.number, name)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: Any, twice: bool) -> None:
        router, lease = data.draw(st.sampled_from(self.held()))
        for _ in range(1 + twice):
            self.bench.step(events.Released(self.bench.links[router], lease))

    # Time.

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.25, 1.0, 4.0]), reporting=st.booleans())
    def time_passes(self, seconds: float, reporting: bool) -> None:
        (self.bench.live if reporting else self.bench.advance)(seconds)

    def teardown(self) -> None:
        """Capacity comes back: all that waits is served in the end, and nothing is left."""
        bench = self.bench
        bench.live(bench.policy.silence_s + bench.policy.router_grace_s)
        for name in WORKERS:
            if name not in self.joined():
                bench.worker(name, pool=POOL_OF[name], slots=2, context=200)
            bench.report(name)
        for _ in range(300):
            for router, lease in self.held():
                bench.step(events.Released(bench.links[router], lease))
            bench.live(0.5)
            if not len(bench.core.queue):
                break
        assert not bench.open
        for name in self.here():
            bench.router_lost(name)
        bench.live(bench.policy.router_grace_s + 1.0)
        core = bench.core
        assert core.fleet.leases == {}
        assert core.routers == {}
        assert core.fleet._unjoined == {}
        assert all(worker.held.choices == worker.held.kv_tokens == 0 for worker in core.fleet.workers.values())
        assert all(worker.reserved_for == 0 for worker in core.fleet.workers.values())
        assert core.queue._lines == core.queue._by_link == {}


def test_any_order_of_events() -> None:
    profile = settings(
        max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    run_state_machine_as_test(Scheduler, settings=profile)  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_order_of_events_for_long() -> None:
    profile = settings(
        max_examples=1500,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(Scheduler, settings=profile)  # type: ignore[no-untyped-call]
