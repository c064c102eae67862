"""The scheduler's promises under particular circumstances: placement, load, reconnection, time."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
from tests.unit.scheduler_bench import Bench, only

from headrace.scheduler import actions, core, events, fleet
from headrace.scheduler.core import PASS_LIMIT, Rate
from headrace.v1 import types_pb2, worker_pb2

# Placement.


@pytest.mark.parametrize("seed", range(5))
def test_ties_are_drawn_by_lot(seed: int) -> None:
    """C09 f: unique prompts one at a time, three idle workers."""
    bench = Bench(seed)
    bench.router()
    for name in "ABC":
        bench.worker(name, slots=4)
    placed: Counter[str] = Counter()
    for number in range(300):
        bench.ask(number)
        placed[bench.worker_of(number)] += 1
        bench.release(number)
    assert all(60 <= placed[name] <= 140 for name in "ABC"), placed


def test_load_spreads_evenly() -> None:
    """C09 g: 480 at once with one shared prefix, 8 workers of 64 slots."""
    bench = Bench(queue_factor=1.25)
    bench.router()
    names = [f"w{index}" for index in range(8)]
    for name in names:
        bench.worker(name, slots=64)
    for number in range(480):
        bench.ask(number, prompt=400)
    assert {bench.load(name) for name in names} == {60}


def test_aborted_requests_leave_nothing_behind() -> None:
    """C09 a: 400 aborted requests on A and B; C joins; 30 new prompts."""
    bench = Bench()
    bench.router()
    bench.worker("A", slots=8)
    bench.worker("B", slots=8)
    for number in range(400):
        bench.ask(number)
        if number >= 12:
            done = number - 12
            if (bench.links["r"], done) in bench.granted:
                bench.release(done)
            else:
                bench.withdraw(done)
    for number in range(388, 400):
        if (bench.links["r"], number) in bench.granted:
            bench.release(number)
    assert (bench.load("A"), bench.load("B"), len(bench.core.queue)) == (0, 0, 0)
    bench.worker("C", slots=8)
    bench.live(1.0)
    placed: Counter[str] = Counter()
    for number in range(1000, 1024):
        bench.ask(number)
        placed[bench.worker_of(number)] += 1
    assert all(5 <= placed[name] <= 15 for name in "ABC"), placed


def test_a_long_prompt_counts_for_several_short_ones() -> None:
    bench = Bench()
    bench.router()
    bench.worker("A", slots=8, context=100_000)
    bench.ask(0, prompt=4000)
    bench.worker("B", slots=8, context=100_000)
    for number in range(1, 6):
        bench.ask(number, prompt=10)
        assert bench.worker_of(number) == "B"
    # Once the long prompt is computed, only its answer counts.
    bench.live(1.0)
    bench.ask(9, prompt=10)
    assert bench.worker_of(9) == "A"


def test_bigger_workers_take_more() -> None:
    bench = Bench()
    bench.router()
    bench.worker("small", slots=2)
    bench.worker("big", slots=8)
    for number in range(10):
        bench.ask(number)
    assert (bench.load("small"), bench.load("big")) == (2, 8)
    bench2 = Bench()
    bench2.router()
    bench2.worker("small", slots=4)
    bench2.worker("big", slots=16)
    for number in range(10):
        bench2.ask(number)
    assert bench2.load("big") == 8


@pytest.mark.parametrize("state", ["draining", "unhealthy", "starting"])
def test_only_ready_workers_get_requests(state: str) -> None:
    """C09 h."""
    bench = Bench()
    bench.router()
    bench.worker("A", slots=50)
    bench.worker("B", slots=50)
    bench.ask(0)
    bench.report("A", state)
    loads = bench.load("A")
    for number in range(1, 40):
        bench.ask(number)
    assert bench.load("A") == loads
    assert {bench.worker_of(number) for number in range(1, 40)} == {"B"}


def test_reports_do_not_reset_load() -> None:
    """C09 b: the load is what is leased, whatever health checks and reports say."""
    bench = Bench()
    bench.router()
    bench.worker("A", slots=8)
    for number in range(8):
        bench.ask(number)
    for _ in range(20):
        bench.live(0.5)
        assert bench.load("A") == 8
    bench.ask(8)
    assert (bench.links["r"], 8) not in bench.granted


def test_a_slot_more_serves_who_waits() -> None:
    bench = Bench()
    bench.router()
    bench.worker("A", slots=1)
    bench.ask(1)
    bench.ask(2)
    bench.ask(3)
    granted = only(bench.report("A", slots=2), actions.Granted)
    assert [grant.ask for grant in granted] == [2]


def test_queue_factor_hides_the_round_trip() -> None:
    bench = Bench(queue_factor=1.25)
    bench.router()
    bench.worker("A", slots=16)
    for number in range(30):
        bench.ask(number)
    assert bench.load("A") == 20


def test_one_that_needs_much_room_is_not_passed_over_for_ever() -> None:
    bench = Bench(max_queued=100)
    bench.router()
    bench.worker("A", slots=4)
    bench.worker("B", slots=4)
    for number in range(8):
        bench.ask(number)
    bench.ask(1000, n=4)
    running = list(range(8))
    for number in range(8, 8 + 4 * PASS_LIMIT):
        bench.ask(number)
        # The oldest ends: on A and B by turns, so that neither is ever empty by itself.
        bench.release(running.pop(0))
        running = [each for each in range(number + 1) if _runs(bench, each)]
        if (bench.links["r"], 1000) in bench.granted:
            break
    assert (bench.links["r"], 1000) in bench.granted
    assert number <= 8 + 2 * PASS_LIMIT


def _runs(bench: Bench, number: int) -> bool:
    grant = bench.granted.get((bench.links["r"], number))
    return grant is not None and grant.lease in bench.core.fleet.leases


def test_room_kept_for_one_that_leaves_is_given_to_others() -> None:
    bench = Bench()
    bench.router()
    bench.worker("A", slots=2)
    bench.ask(1)
    bench.ask(2)
    bench.ask(3, n=2)
    waiting = bench.core.queue.find(bench.links["r"], 3)
    assert waiting is not None
    waiting.passed = PASS_LIMIT
    bench.ask(4)
    bench.release(1)
    assert bench.load("A") == 1, "the room is kept for 3"
    bench.withdraw(3)
    assert [grant.ask for grant in only(bench.report("A"), actions.Granted)] == [4]


def test_a_withdrawn_reservation_with_its_worker_lost() -> None:
    bench = Bench()
    bench.router()
    bench.worker("A", slots=2)
    bench.worker("B", slots=2, state="starting")
    bench.ask(1)
    bench.ask(2)
    bench.ask(3, n=2)
    waiting = bench.core.queue.find(bench.links["r"], 3)
    assert waiting is not None
    waiting.passed = PASS_LIMIT
    bench.release(1)
    assert waiting.reserved == bench.instances["A"]
    bench.report("B")
    bench.lose("A")
    assert bench.worker_of(3) == "B"


# The queue's answers.


def test_retry_after_comes_from_the_queue_and_the_recent_rate() -> None:
    bench = Bench(max_queued=20)
    bench.router()
    bench.worker("A", slots=1)
    # One request ends every half second.
    for number in range(60):
        bench.ask(number)
        bench.live(0.5)
        bench.release(number)
    bench.ask(60)
    for waiting in range(1000, 1020):
        bench.ask(waiting)
    (refused,) = only(bench.ask(2000), actions.Refused)
    assert refused.code == types_pb2.ERROR_CODE_OVERLOADED
    assert refused.retryable
    assert refused.retry_after_ms == pytest.approx(10_000, rel=0.15)
    (waits,) = only(bench.log, actions.Waits)[-1:]
    assert waits.position == 20
    assert waits.estimate_ms == pytest.approx(10_000, rel=0.15)


def test_each_ask_is_told_once_that_it_waits() -> None:
    bench = Bench()
    bench.router()
    bench.worker("A")
    for number in range(5):
        bench.ask(number)
    bench.live(3.0)
    assert [waits.ask for waits in only(bench.log, actions.Waits)] == [1, 2, 3, 4]


def test_the_deadline_is_a_timer() -> None:
    """C07 a: B is answered at its deadline, not when the slot frees."""
    bench = Bench()
    bench.router()
    bench.worker("A")
    bench.ask(1)
    bench.ask(2, left_s=1.0)
    assert not only(bench.live(0.99), actions.Refused)
    (refused,) = only(bench.live(0.02), actions.Refused)
    assert (refused.ask, refused.code) == (2, types_pb2.ERROR_CODE_DEADLINE_EXCEEDED)
    assert not refused.retryable
    assert bench.core.next_wakeup() is not None
    bench.release(1)
    assert bench.load("A") == 0


def test_never_granted_late_even_by_a_late_driver() -> None:
    bench = Bench()
    bench.router()
    bench.worker("A")
    bench.ask(1)
    bench.ask(2, left_s=0.1)
    bench.now_s += 0.2
    done = bench.release(1)
    assert not only(done, actions.Granted)
    assert [refused.ask for refused in only(done, actions.Refused)] == [2]


def test_withdrawn_deadlines_are_not_kept() -> None:
    bench = Bench()
    bench.router()
    bench.worker("A")
    bench.ask(0)
    for number in range(1, 5000):
        bench.ask(number, left_s=100.0)
        bench.withdraw(number)
    assert len(bench.core.queue._deadlines) <= 128


def test_the_same_number_twice_ends_the_stream() -> None:
    bench = Bench()
    link = bench.router()
    bench.worker("A")
    bench.ask(1)
    bench.ask(2)
    (dropped,) = only(bench.step(events.Asked(link, events.Ask(2, "again", ("p",), 1))), actions.RouterDropped)
    assert "twice" in dropped.message
    assert len(bench.core.queue) == 0


def test_nonsense_is_refused() -> None:
    bench = Bench()
    bench.router()
    bench.worker("A")
    for number, ask in enumerate([{"pools": ()}, {"n": 0}, {"pools": tuple(f"p{i}" for i in range(17))}]):
        (refused,) = only(bench.ask(number, **ask), actions.Refused)  # type: ignore[arg-type]
        assert refused.code == types_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert not refused.retryable


# Leases.


def test_a_lease_is_released_once() -> None:
    """C09: the second release is not another's."""
    bench = Bench()
    bench.router()
    bench.worker("A", slots=2)
    bench.ask(1)
    bench.ask(2)
    bench.release(1)
    bench.release(1)
    assert bench.load("A") == 1
    assert bench.core.oddities["release_unknown"] == 1


def test_a_lease_is_released_by_its_router_only() -> None:
    bench = Bench()
    bench.router("r")
    bench.router("s")
    bench.worker("A", slots=2)
    bench.ask(1, "r")
    lease = bench.granted[bench.links["r"], 1].lease
    bench.step(events.Released(bench.links["s"], lease))
    assert bench.load("A") == 1
    assert bench.core.oddities["release_foreign"] == 1


def test_old_instance_keeps_its_requests_to_itself() -> None:
    """C09 d: A restarts with 3 requests open; they end after A is back."""
    bench = Bench()
    bench.router()
    bench.worker("A", slots=8)
    for number in range(3):
        bench.ask(number)
    bench.lose("A")
    bench.worker("A", slots=8)
    for number in range(3):
        bench.release(number)
    assert bench.load("A") == 0
    bench.ask(9)
    assert bench.load("A") == 1


def test_late_words_of_an_old_stream_are_not_the_new_ones() -> None:
    bench = Bench()
    bench.router()
    old = bench.worker("A", instance="same")
    bench.lose("A")
    bench.worker("A", instance="same")
    bench.step(events.WorkerLost(old))
    bench.step(events.WorkerReported(old, worker_pb2.Load(state=worker_pb2.WORKER_STATE_DRAINING)))
    bench.ask(1)
    assert bench.load("A") == 1


def running(bench: Bench, number: int, router: str = "r") -> events.RunningLease:
    grant = bench.granted[bench.links[router], number]
    return events.RunningLease(grant.lease, grant.instance_id, f"req-{number}", prompt_tokens=10)


def test_a_router_comes_back_with_what_still_runs() -> None:
    bench = Bench()
    bench.router()
    bench.worker("A", slots=4)
    for number in range(3):
        bench.ask(number)
    held = [running(bench, 0), running(bench, 2)]
    bench.router_lost()
    bench.live(1.0)
    assert bench.load("A") == 3
    old = bench.links["r"]
    bench.router(running=held)
    assert bench.load("A") == 2
    bench.live(10.0)
    assert bench.load("A") == 2
    bench.granted[bench.links["r"], 0] = bench.granted[old, 0]
    bench.release(0)
    assert bench.load("A") == 1


def test_a_router_opens_a_new_stream_before_the_old_one_is_seen_to_break() -> None:
    bench = Bench()
    old = bench.router()
    bench.worker("A")
    bench.ask(1)
    bench.ask(2)
    held = [running(bench, 1)]
    bench.router(running=held)
    assert [dropped.link for dropped in only(bench.log, actions.RouterDropped)] == [old]
    assert len(bench.core.queue) == 0
    bench.step(events.RouterLost(old))
    bench.live(20.0)
    assert bench.load("A") == 1


def test_leases_of_a_lost_router_expire() -> None:
    bench = Bench(router_grace_s=5.0)
    bench.router()
    bench.worker("A", slots=4)
    for number in range(3):
        bench.ask(number)
    bench.router_lost()
    bench.live(4.9)
    assert bench.load("A") == 3
    bench.live(0.2)
    assert bench.load("A") == 0
    assert bench.core.routers == {}


@pytest.mark.parametrize("worker_first", [True, False])
def test_a_new_scheduler_learns_of_what_runs(worker_first: bool) -> None:
    """The scheduler restarts; routers and workers come back in any order."""
    bench = Bench(settled=False)
    lease = events.RunningLease(7, "inst-A", "req", prompt_tokens=10)
    if worker_first:
        bench.worker("A", instance="inst-A", slots=2)
    bench.router(running=[lease])
    if not worker_first:
        bench.worker("A", instance="inst-A", slots=2)
    assert bench.load("A") == 1
    bench.ask(1)
    bench.ask(2)
    assert bench.load("A") == 2
    bench.step(events.Released(bench.links["r"], 7))
    assert bench.load("A") == 2
    assert (bench.links["r"], 2) in bench.granted


def test_a_new_scheduler_lets_pools_come_back_before_it_refuses() -> None:
    bench = Bench(settled=False)
    bench.router()
    assert only(bench.ask(1), actions.Waits)
    bench.live(1.0)
    assert [grant.ask for grant in only(_log_of(bench, lambda: bench.worker("A")), actions.Granted)] == [1]
    # A pool that was there and is gone is another matter.
    bench.lose("A")
    (refused,) = only(bench.ask(2), actions.Refused)
    assert refused.code == types_pb2.ERROR_CODE_UNAVAILABLE


def test_a_new_scheduler_does_not_wait_for_ever() -> None:
    bench = Bench(settled=False)
    bench.router()
    bench.ask(1)
    (refused,) = only(bench.live(bench.policy.silence_s), actions.Refused)
    assert (refused.code, refused.retryable) == (types_pb2.ERROR_CODE_UNAVAILABLE, True)


def _log_of(bench: Bench, call: Any) -> list[actions.Action]:
    before = len(bench.log)
    call()
    return bench.log[before:]


def test_leases_announced_twice_or_by_two() -> None:
    bench = Bench()
    bench.worker("A", instance="inst-A", slots=4)
    lease = events.RunningLease(7, "inst-A", "req")
    bench.router("r", running=[lease, lease])
    bench.router("s", running=[lease])
    assert bench.load("A") == 1
    assert bench.core.oddities["lease_collision"] == 1


# Time and heartbeats.


def test_three_missed_reports_and_a_late_one() -> None:
    bench = Bench(heartbeat_s=1.0, heartbeats_missed=3)
    bench.worker("A")
    for _ in range(5):
        bench.advance(2.9)
        bench.report("A")
    assert "A" in {worker.worker_id for worker in bench.core.fleet.workers.values()}
    (dropped,) = only(bench.advance(3.1), actions.WorkerDropped)
    assert "3.00 s" in dropped.message


def test_our_own_absence_is_not_the_workers_silence() -> None:
    """The process was stopped for a while: reports wait unread, and nobody is out."""
    bench = Bench()
    bench.router()
    bench.worker("A", slots=2)
    bench.ask(1)
    bench.now_s += 60.0
    assert not only(bench.step(events.Tick()), actions.WorkerDropped)
    bench.report("A")
    bench.live(10.0)
    assert bench.load("A") == 1
    # But then they must be heard of.
    assert only(bench.advance(3.1), actions.WorkerDropped)


def test_reports_in_time_need_no_wakeups() -> None:
    bench = Bench(heartbeat_s=0.25, heartbeats_missed=12)
    for index in range(50):
        bench.worker(f"w{index}")
    bench.advance(0.1)
    wakeups = 0
    for _ in range(120):
        due_s = bench.core.next_wakeup()
        assert due_s is not None
        wakeups += due_s <= bench.now_s + 0.25
        bench.live(0.25)
    assert wakeups <= 120 * 0.25 / (bench.policy.silence_s - 0.25) + 1


# The fleet as routers see it.


def test_changes_of_the_fleet_are_told_and_gathered() -> None:
    bench = Bench()
    bench.advance(1.0)
    told = only(_log_of(bench, lambda: [bench.worker(f"w{i}") for i in range(100)]), actions.FleetChanged)
    assert len(told) == 1
    assert len(only(bench.advance(1.0), actions.FleetChanged)) == 1
    (pool,) = bench.core.fleet.view().pools
    assert (pool.name, pool.workers, pool.ready_workers, len(pool.addresses)) == ("p", 100, 100, 100)
    assert not only(bench.live(2.0), actions.FleetChanged)
    assert only(bench.report("w3", "draining"), actions.FleetChanged)
    (pool,) = bench.core.fleet.view().pools
    assert (pool.workers, pool.ready_workers) == (100, 99)
    assert "w3:1" not in pool.addresses


def test_a_view_promises_what_every_worker_can_do() -> None:
    bench = Bench()
    bench.worker("A", context=100)
    bench.worker("B", context=200)
    for name, guided in (("A", ["regex", "json_schema"]), ("B", ["json_schema"])):
        worker = bench.core.fleet.workers[bench.instances[name]]
        worker.description.capabilities.guided.extend(guided)
        worker.description.capabilities.logprobs = name == "A"
    bench.report("A", "draining")
    (pool,) = bench.core.fleet.view().pools
    assert pool.description.context_tokens == 200
    assert list(pool.description.capabilities.guided) == ["json_schema"]
    assert not pool.description.capabilities.logprobs


def test_a_pool_ends_with_its_last_worker() -> None:
    bench = Bench()
    bench.worker("A", model="one")
    bench.lose("A")
    assert bench.core.fleet.pools == {}
    assert list(bench.core.fleet.view().pools) == []
    bench.worker("A", model="two")
    assert bench.core.fleet.pools["p"].workers


@pytest.mark.parametrize("missing", ["worker_id", "instance_id", "pool", "address"])
def test_a_worker_must_say_who_it_is(missing: str) -> None:
    hello = {"worker_id": "w", "instance_id": "i", "pool": "p", "address": "h:1"} | {missing: ""}
    (refused,) = only(Bench().step(events.WorkerJoined(1, **hello)), actions.JoinRefused)
    assert missing in refused.message


def test_fifty_come_and_go() -> None:
    """C15 f at the core: nothing is left of workers that are gone."""
    bench = Bench()
    bench.router()
    for index in range(50):
        bench.worker(f"w{index}")
        bench.ask(index)
        bench.lose(f"w{index}")
    inside = bench.core.fleet
    assert (inside.workers, inside.pools, inside.leases, inside._unjoined) == ({}, {}, {}, {})
    assert bench.core._workers_by_link == {}


# Cost.


def test_work_per_placement_does_not_grow_with_the_fleet() -> None:
    """Function calls rather than time: 20,000 placements on 1,000 workers, against 10 workers."""
    small, large = _calls_per_placement(10, 500), _calls_per_placement(1000, 20_000)
    assert large < 3 * small, (small, large)


def _calls_per_placement(workers: int, placements: int) -> float:
    made = core.Core(core.Policy(queue_factor=1.0), Bench().core._rng, 0.0)
    ready = worker_pb2.Load(state=worker_pb2.WORKER_STATE_READY)
    for link in range(1, workers + 1):
        name = f"w{link}"
        kind = types_pb2.ModelDescription(slots=64, context_tokens=1000)
        made.step(0.0, events.WorkerJoined(link, name, name, "p", f"{name}:1", kind))
        made.step(0.0, events.WorkerReported(link, ready))
    router = workers + 1
    made.step(0.0, events.RouterJoined(router, "r"))
    leases: list[int] = []
    calls = 0

    def count(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for number in range(placements):
            ask = events.Ask(number, "x", ("p",), 10 + number % 50)
            (granted,) = made.step(0.0, events.Asked(router, ask))
            assert isinstance(granted, actions.Granted)
            leases.append(granted.lease)
            if len(leases) > workers * 8:
                made.step(0.0, events.Released(router, leases.pop(0)))
    finally:
        sys.setprofile(None)
    return calls / placements


def test_a_full_fleet_costs_nothing_to_ask() -> None:
    bench = Bench()
    bench.router()
    for index in range(100):
        bench.worker(f"w{index}")
        bench.ask(index)
    assert not bench.core.fleet.pools["p"].order
    assert only(bench.ask(1000), actions.Waits)


# Small parts.


def test_rate() -> None:
    rate = Rate(0.0)
    assert rate.per_s(0.0) == 0.0
    for step in range(100):
        rate.add(step / 10)
    assert rate.per_s(10.0) == pytest.approx(10.0, rel=0.1)
    assert rate.per_s(100.0) < 0.01


def test_kv_estimate() -> None:
    def ask(**of: Any) -> events.Ask:
        return events.Ask(1, "x", ("p",), 100, **of)

    assert fleet.kv_tokens(ask(max_tokens=16)) == 116
    assert fleet.kv_tokens(ask(max_tokens=5000)) == 100 + fleet.ANSWER_KV_TOKENS
    assert fleet.kv_tokens(ask(max_tokens=5000, expected_output_tokens=300, choices=2)) == 700
