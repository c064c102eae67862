"""The prefix index: who holds what, against sets in a dict; and events that are lost, doubled or out of order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.cache.prefixes import (
    DETACHED_S,
    BlockEvent,
    Cleared,
    Prefixes,
    Removed,
    ResumeFrom,
    Stored,
    Want,
    WantSnapshot,
)


class Publisher:
    """A worker's side: numbers its events, can send a snapshot, answers what is wanted of it."""

    def __init__(self, index: Prefixes, link: int, worker: str, instance: str = "", pool: str = "p") -> None:
        self.index, self.link, self.worker, self.pool = index, link, worker, pool
        self.instance = instance or f"{worker}-1"
        self.held: dict[int, None] = {}
        self.log: list[BlockEvent] = []

    def hello(self, oldest: int = 0) -> Want:
        want = self.index.hello(self.link, self.worker, self.instance, self.pool, oldest, len(self.log))
        self.answer(want)
        return want

    def answer(self, want: Want | None) -> None:
        match want:
            case ResumeFrom():
                self.answer(self.index.apply(self.link, self.log[want.sequence :]))
            case WantSnapshot():
                self.index.snapshot(self.link, len(self.log), [tuple(self.held)])

    def happen(self, what: Stored | Removed | Cleared) -> BlockEvent:
        """Something happens in the worker; the event is still to be sent."""
        match what:
            case Stored():
                self.held |= dict.fromkeys(what.hashes)
            case Removed():
                for block in what.hashes:
                    self.held.pop(block, None)
            case Cleared():
                self.held.clear()
        self.log.append(BlockEvent(len(self.log), what))
        return self.log[-1]

    def send(self, *events: BlockEvent) -> Want | None:
        want = self.index.apply(self.link, events)
        self.answer(want)
        return want

    def store(self, *hashes: int) -> None:
        self.send(self.happen(Stored(hashes)))

    def remove(self, *hashes: int) -> None:
        self.send(self.happen(Removed(hashes)))


def found(index: Prefixes, *hashes: int, pool: str = "p") -> dict[str, int]:
    return {holder.worker_id: holder.blocks for holder in index.find(pool, hashes)}


def two() -> tuple[Prefixes, Publisher, Publisher]:
    index = Prefixes(1000)
    a, b = Publisher(index, 1, "A"), Publisher(index, 2, "B")
    assert a.hello() == b.hello() == WantSnapshot()
    return index, a, b


def test_who_holds_how_much() -> None:
    index, a, b = two()
    a.store(1, 2, 3)
    b.store(1, 2)
    b.store(3, 4)
    a.store(9)
    assert found(index, 1, 2, 3, 4, 5) == {"B": 4, "A": 3}
    assert [holder.worker_id for holder in index.find("p", [1, 2, 3, 4])] == ["B", "A"]
    assert found(index, 7) == {}
    assert found(index, 9, 8) == {"A": 1}
    assert found(index, 1, pool="q") == {}
    assert found(index) == {}
    assert index.blocks == 8


def test_a_hole_ends_the_prefix() -> None:
    index, a, _ = two()
    a.store(1, 2, 3)
    a.remove(2)
    assert found(index, 1, 2, 3) == {"A": 1}
    a.remove(1)
    assert found(index, 1, 2, 3) == {}


def test_cleared_takes_only_that_workers() -> None:
    index, a, b = two()
    a.store(1)
    b.store(1)
    a.send(a.happen(Cleared()))
    assert found(index, 1) == {"B": 1}
    assert index.blocks == 1


def test_pools_are_apart() -> None:
    index, a, _ = two()
    c = Publisher(index, 3, "C", pool="q")
    c.hello()
    c.store(1)
    a.store(1, 2)
    assert found(index, 1, 2) == {"A": 2}
    assert found(index, 1, 2, pool="q") == {"C": 1}


def test_events_seen_before_are_ignored() -> None:
    index, a, _ = two()
    store, remove = a.happen(Stored((1,))), a.happen(Removed((1,)))
    assert a.send(store, remove, store) is None
    assert a.send(store) is None
    assert found(index, 1) == {}


def test_a_gap_asks_for_a_snapshot_once() -> None:
    index, a, _ = two()
    a.store(7)
    a.happen(Stored((1,)))
    late, later = a.happen(Stored((2,))), a.happen(Stored((3,)))
    assert index.apply(1, [late]) == WantSnapshot()
    assert found(index, 2) == {}
    assert found(index, 7) == {}, "what was lost may have taken it away"
    assert index.apply(1, [later]) is None, "it was asked already"
    assert index.gaps == 1
    a.answer(WantSnapshot())
    assert found(index, 1, 2, 3) == {"A": 3}
    # What was on its way when the snapshot was made is in it.
    assert a.send(late, later) is None
    a.store(4)
    assert found(index, 4) == {"A": 1}


def test_an_old_snapshot_does_not_undo_events() -> None:
    index, a, _ = two()
    a.store(1)
    a.remove(1)
    index.snapshot(1, 1, [(1,)])
    assert found(index, 1) == {}


def test_the_same_instance_goes_on_where_it_was() -> None:
    index, a, _ = two()
    a.store(1, 2)
    index.detach(10.0, 1)
    assert found(index, 1) == {}, "it can't be reached"
    a.happen(Stored((3,)))
    a.link = 7
    assert a.hello() == ResumeFrom(1)
    assert found(index, 1, 2, 3) == {"A": 3}
    index.expire(1000.0)
    assert found(index, 1, 2, 3) == {"A": 3}


def test_too_old_to_go_on() -> None:
    index, a, _ = two()
    a.store(1)
    index.detach(0.0, 1)
    a.happen(Stored((2,)))
    a.happen(Stored((3,)))
    a.link = 7
    assert a.hello(oldest=2) == WantSnapshot()
    assert found(index, 1, 2, 3) == {"A": 3}


def test_a_stream_opened_before_the_old_one_is_seen_to_break() -> None:
    index, a, _ = two()
    a.store(1)
    a.link = 7
    assert a.hello() == ResumeFrom(1)
    index.detach(0.0, 1)
    index.expire(1000.0)
    assert found(index, 1) == {"A": 1}
    assert index.workers == 2


def test_a_restarted_worker_leaves_nothing_of_its_old_instance() -> None:
    """C14 h."""
    index, a, _ = two()
    a.store(1, 2)
    again = Publisher(index, 7, "A", "A-2")
    assert again.hello() == WantSnapshot()
    again.store(2)
    assert found(index, 1, 2) == {}
    assert [holder.instance_id for holder in index.find("p", [2])] == ["A-2"]
    assert index.blocks == 1
    # The old one's last words are nobody's.
    assert a.send(a.happen(Stored((5,)))) is None
    assert found(index, 5) == {}


def test_who_does_not_come_back_is_forgotten() -> None:
    index, a, b = two()
    a.store(1, 2)
    b.store(1)
    index.detach(10.0, 1)
    assert index.next_wakeup() == 10.0 + DETACHED_S
    index.expire(9.9 + DETACHED_S)
    assert index.blocks == 3
    index.expire(10.0 + DETACHED_S)
    assert (index.blocks, index.workers, index.next_wakeup()) == (1, 1, None)
    index.detach(20.0, 2)
    index.expire(20.0 + DETACHED_S)
    assert (index.blocks, index.workers) == (0, 0)
    assert (index._pools, index._instances, index._links) == ({}, {}, {})


def test_the_bound_takes_leaves_first() -> None:
    index = Prefixes(5)
    a = Publisher(index, 1, "A")
    a.hello()
    a.store(1, 2, 3)
    a.store(7, 8)
    assert found(index, 1, 2, 3) == {"A": 3}
    a.store(9)
    assert index.blocks == 5
    assert index.evictions == 1
    # The chain just used keeps its root; the other loses its end.
    assert found(index, 7, 8) == {"A": 1}
    assert found(index, 1, 2, 3) == {"A": 3}
    # What was given up here may still be taken back by the worker.
    a.remove(8)
    a.store(8)
    assert index.blocks == 5
    # And of a chain that was found, too, the end goes before the root.
    a.store(20)
    a.store(21)
    assert found(index, 1, 2, 3) == {"A": 2}


def test_no_memory_at_all() -> None:
    index = Prefixes(0)
    a = Publisher(index, 1, "A")
    a.hello()
    a.store(1, 2, 3)
    assert (index.blocks, found(index, 1), index._pools) == (0, {}, {})


def test_a_full_pool_does_not_keep_others_out() -> None:
    index = Prefixes(4)
    a, c = Publisher(index, 1, "A"), Publisher(index, 3, "C", pool="q")
    a.hello()
    c.hello()
    a.store(1, 2, 3, 4)
    c.store(11)
    c.store(12)
    assert found(index, 11, pool="q") == {"C": 1}
    assert found(index, 12, pool="q") == {"C": 1}
    assert index.blocks == 4


BLOCKS = st.integers(1, 12)
CHANGES = st.one_of(
    st.lists(BLOCKS, min_size=1, max_size=5, unique=True).map(lambda hashes: Stored(tuple(hashes))),
    st.lists(BLOCKS, min_size=1, max_size=3, unique=True).map(lambda hashes: Removed(tuple(hashes))),
    st.just(Cleared()),
)
#: (which worker, what happens, how it travels)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        CHANGES,
        st.sampled_from(["sent", "sent", "sent", "sent", "lost", "twice", "swapped", "break", "restart"]),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(steps=STEPS, query=st.lists(BLOCKS, max_size=8, unique=True))
def test_whatever_is_lost_the_index_ends_up_right(steps: Any, query: list[int]) -> None:
    index = Prefixes(10_000)
    publishers = [Publisher(index, link, name) for link, name in enumerate("ABC", 1)]
    for publisher in publishers:
        publisher.hello()
    links = len(publishers)
    now_s = 0.0
    for which, what, travel in steps:
        publisher = publishers[which]
        event = publisher.happen(what)
        match travel:
            case "sent":
                publisher.send(event)
            case "twice":
                publisher.send(event, event)
            case "swapped":
                publisher.send(publisher.happen(Stored((1,))), event)
            case "break" | "restart":
                links += 1
                index.detach(now_s, publisher.link)
                if travel == "restart":
                    fresh = Publisher(index, links, publisher.worker, f"{publisher.worker}-{links}")
                    publisher = publishers[which] = fresh
                publisher.link = links
                publisher.hello()
                now_s += 1.0
                index.expire(now_s)
    for publisher in publishers:
        publisher.send(publisher.happen(Stored((99,))))
        if publisher.index._links[publisher.link].next_sequence is None:
            publisher.answer(WantSnapshot())
    oracle = {}
    for publisher in publishers:
        depth = 0
        while depth < len(query) and query[depth] in publisher.held:
            depth += 1
        if depth:
            oracle[publisher.worker] = depth
    index.expire(now_s + 1000.0)
    assert found(index, *query) == oracle
    assert index.blocks == sum(len(publisher.held) for publisher in publishers)


@pytest.mark.parametrize("max_blocks", [0, 1, 7])
@settings(max_examples=50, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 2), CHANGES), max_size=40))
def test_never_more_than_the_bound_and_never_a_false_holder(max_blocks: int, changes: Any) -> None:
    index = Prefixes(max_blocks)
    publishers = [Publisher(index, link, name) for link, name in enumerate("ABC", 1)]
    for publisher in publishers:
        publisher.hello()
    for which, what in changes:
        publishers[which].send(publishers[which].happen(what))
        assert index.blocks <= max_blocks
        for block in range(1, 13):
            for worker in found(index, block):
                assert block in publishers["ABC".index(worker)].held
