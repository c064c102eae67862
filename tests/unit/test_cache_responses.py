"""The response cache's core, against a slow and obvious model: a dict of answers and a list of waiters for each key."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headrace.cache.responses import OVERHEAD_BYTES, Hit, Lead, Misuse, Responses, cost_bytes

R, S = 1, 2


def cache(max_bytes: int = 10_000, ttl_s: float = 100.0, max_waiters: int = 10) -> Responses:
    return Responses(max_bytes, ttl_s, max_waiters)


def test_lead_fill_hit() -> None:
    answers = cache()
    assert answers.ask(0.0, R, 1, b"k") == Lead(R, 1)
    assert answers.fill(0.0, R, 1, b"answer") == []
    assert answers.ask(0.0, S, 1, b"k") == Hit(S, 1, b"answer")
    assert answers.ask(0.0, S, 2, b"other") == Lead(S, 2)
    assert (answers.hits, answers.misses, answers.answers) == (1, 2, 1)


def test_identical_requests_share_one_generation() -> None:
    answers = cache()
    assert answers.ask(0.0, R, 1, b"k") == Lead(R, 1)
    assert [answers.ask(0.0, S, number, b"k") for number in (1, 2)] == [None, None]
    assert (answers.flights, answers.waiters) == (1, 2)
    assert answers.fill(0.0, R, 1, b"a") == [Hit(S, 1, b"a"), Hit(S, 2, b"a")]
    assert (answers.flights, answers.waiters, answers.leads) == (0, 0, 0)


def test_an_abandoned_lead_goes_to_who_waits_longest() -> None:
    """C11 f: nothing is stored of what was cancelled, failed or cut."""
    answers = cache()
    answers.ask(0.0, R, 1, b"k")
    answers.ask(0.0, S, 1, b"k")
    answers.ask(0.0, S, 2, b"k")
    assert answers.end(R, 1) == [Lead(S, 1)]
    assert answers.end(R, 1) == []
    assert (answers.answers, answers.waiters) == (0, 1)
    assert answers.fill(0.0, R, 1, b"late") == []
    assert answers.answers == 0
    assert answers.fill(0.0, S, 1, b"a") == [Hit(S, 2, b"a")]


def test_the_last_one_abandons() -> None:
    answers = cache()
    answers.ask(0.0, R, 1, b"k")
    assert answers.end(R, 1) == []
    assert answers.flights == 0
    assert answers.ask(0.0, R, 2, b"k") == Lead(R, 2)


def test_waiters_that_leave_are_not_answered() -> None:
    answers = cache()
    answers.ask(0.0, R, 1, b"k")
    answers.ask(0.0, S, 1, b"k")
    answers.ask(0.0, S, 2, b"k")
    assert answers.end(S, 1) == []
    assert answers.fill(0.0, R, 1, b"a") == [Hit(S, 2, b"a")]


def test_a_lost_router_abandons_all_and_waits_for_nothing() -> None:
    answers = cache()
    answers.ask(0.0, R, 1, b"k")
    answers.ask(0.0, R, 2, b"k")
    answers.ask(0.0, S, 1, b"k")
    answers.ask(0.0, S, 2, b"l")
    answers.ask(0.0, R, 3, b"l")
    assert answers.lose(R) == [Lead(S, 1)]
    assert answers.lose(R) == []
    assert (answers.waiters, answers.leads, answers.flights) == (0, 2, 2)
    assert answers.fill(0.0, S, 2, b"a") == []


def test_answers_grow_old() -> None:
    answers = cache(ttl_s=10.0)
    answers.ask(0.0, R, 1, b"k")
    answers.fill(5.0, R, 1, b"a")
    assert isinstance(answers.ask(14.9, R, 2, b"k"), Hit), "from the fill, and not from the ask"
    assert isinstance(answers.ask(15.0, R, 3, b"k"), Lead)
    assert (answers.answers, answers.bytes) == (0, 0)


def test_the_longest_unused_goes_first() -> None:
    answers = cache(max_bytes=3 * cost_bytes(b"a", b"x"))
    for number, key in enumerate((b"a", b"b", b"c")):
        answers.ask(0.0, R, number, key)
        answers.fill(0.0, R, number, b"x")
    answers.ask(0.0, R, 10, b"a")
    answers.ask(0.0, R, 11, b"d")
    answers.fill(0.0, R, 11, b"x")
    kinds = {key: type(answers.ask(0.0, R, 20 + i, key)) for i, key in enumerate((b"a", b"b", b"c", b"d"))}
    assert kinds == {b"a": Hit, b"b": Lead, b"c": Hit, b"d": Hit}
    assert answers.evictions == 1


def test_bytes_are_exact() -> None:
    answers = cache(max_bytes=10_000)
    answers.ask(0.0, R, 1, b"key")
    answers.fill(0.0, R, 1, b"x" * 100)
    assert answers.bytes == 3 + 100 + OVERHEAD_BYTES
    # An answer that just fits takes all the room; one byte more doesn't fit at all, and pushes nobody out.
    room = 10_000 - OVERHEAD_BYTES - 1
    answers.ask(0.0, R, 2, b"f")
    answers.fill(0.0, R, 2, b"x" * room)
    assert (answers.bytes, answers.answers) == (10_000, 1)
    answers.ask(0.0, R, 3, b"g")
    answers.fill(0.0, R, 3, b"x" * (room + 1))
    assert (answers.bytes, answers.answers) == (10_000, 1)


def test_who_waits_gets_even_what_is_too_large_to_keep() -> None:
    answers = cache(max_bytes=10)
    answers.ask(0.0, R, 1, b"k")
    answers.ask(0.0, S, 1, b"k")
    assert answers.fill(0.0, R, 1, b"large answer") == [Hit(S, 1, b"large answer")]
    assert answers.answers == 0


@pytest.mark.parametrize("of", [{"max_bytes": 0}, {"ttl_s": 0.0}])
def test_without_memory_or_time_nothing_is_kept(of: dict[str, Any]) -> None:
    answers = cache(**of)
    answers.ask(0.0, R, 1, b"k")
    answers.fill(0.0, R, 1, b"a")
    assert isinstance(answers.ask(0.0, R, 2, b"k"), Lead)


def test_too_many_waiters_lead_on_their_own() -> None:
    answers = cache(max_waiters=1)
    answers.ask(0.0, R, 1, b"k")
    assert answers.ask(0.0, R, 2, b"k") is None
    assert answers.ask(0.0, R, 3, b"k") == Lead(R, 3)
    # Whoever is first with the answer serves those who wait.
    assert answers.fill(0.0, R, 3, b"a") == [Hit(R, 2, b"a")]
    assert answers.fill(0.0, R, 1, b"a") == []
    assert (answers.answers, answers.leads, answers.waiters) == (1, 0, 0)


def test_a_number_in_use() -> None:
    answers = cache()
    answers.ask(0.0, R, 1, b"k")
    with pytest.raises(Misuse, match="ask 1 is open"):
        answers.ask(0.0, R, 1, b"l")
    answers.ask(0.0, S, 1, b"l")


class Model(RuleBasedStateMachine):
    """The oracle: obvious and slow. It says who must be told what; the cache must say the same."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(2000, 10.0, 2)

    @initialize(
        max_bytes=st.sampled_from([0, 700, 2000, 10_000]),
        ttl_s=st.sampled_from([0.0, 5.0, 50.0]),
        max_waiters=st.integers(0, 3),
    )
    def begin(self, max_bytes: int, ttl_s: float, max_waiters: int) -> None:
        self.answers = Responses(max_bytes, ttl_s, max_waiters)
        self.max_bytes, self.ttl_s, self.max_waiters = max_bytes, ttl_s, max_waiters
        self.now_s = 0.0
        self.number = 0
        #: key → (answer, filled at), longest unused first.
        self.stored: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()
        #: key → leader; and who waits, in order.
        self.leader: dict[bytes, tuple[int, int]] = {}
        self.waiting: list[tuple[bytes, tuple[int, int]]] = []
        #: All who lead.
        self.leads: dict[tuple[int, int], bytes] = {}

    def expire(self) -> None:
        for key, (_, at_s) in list(self.stored.items()):
            if at_s + self.ttl_s <= self.now_s:
                del self.stored[key]

    @rule(owner=st.sampled_from([R, S]), key=st.sampled_from([b"a", b"b", b"c"]))
    def ask(self, owner: int, key: bytes) -> None:
        self.expire()
        self.number += 1
        who = (owner, self.number)
        expected: Any = None
        if key in self.stored:
            self.stored.move_to_end(key)
            expected = Hit(*who, self.stored[key][0])
        elif key in self.leader and len(self.waiting) < self.max_waiters:
            self.waiting.append((key, who))
        else:
            self.leader.setdefault(key, who)
            self.leads[who] = key
            expected = Lead(*who)
        assert self.answers.ask(self.now_s, owner, self.number, key) == expected

    @precondition(lambda self: self.leads)
    @rule(data=st.data(), size=st.integers(0, 900))
    def fill(self, data: Any, size: int) -> None:
        self.expire()
        who = data.draw(st.sampled_from(sorted(self.leads)))
        key = self.leads.pop(who)
        answer = bytes([self.number % 256]) * size
        if len(key) + size + OVERHEAD_BYTES <= self.max_bytes and self.ttl_s > 0:
            self.stored.pop(key, None)
            while self.size() + len(key) + size + OVERHEAD_BYTES > self.max_bytes:
                self.stored.popitem(last=False)
            self.stored[key] = (answer, self.now_s)
        served = [waiter for wanted, waiter in self.waiting if wanted == key]
        self.waiting = [item for item in self.waiting if item[0] != key]
        self.leader.pop(key, None)
        assert self.answers.fill(self.now_s, *who, answer) == [Hit(*waiter, answer) for waiter in served]

    def size(self) -> int:
        return sum(len(key) + len(answer) + OVERHEAD_BYTES for key, (answer, _) in self.stored.items())

    def left(self, who: tuple[int, int]) -> list[Lead]:
        """What follows when this one leaves."""
        self.waiting = [item for item in self.waiting if item[1] != who]
        key = self.leads.pop(who, None)
        if key is None or self.leader.get(key) != who:
            return []
        del self.leader[key]
        for item in self.waiting:
            if item[0] == key:
                self.waiting.remove(item)
                self.leader[key] = item[1]
                self.leads[item[1]] = key
                return [Lead(*item[1])]
        return []

    @rule(data=st.data())
    def end(self, data: Any) -> None:
        everyone = sorted([*self.leads, *(who for _, who in self.waiting), (R, 10**9)])
        who = data.draw(st.sampled_from(everyone))
        assert self.answers.end(*who) == self.left(who)

    @rule(owner=st.sampled_from([R, S]))
    def lose(self, owner: int) -> None:
        expected: list[Lead] = []
        for who in [who for _, who in self.waiting if who[0] == owner] + [who for who in self.leads if who[0] == owner]:
            expected += self.left(who)
        got = self.answers.lose(owner)
        assert sorted(got, key=repr) == sorted(expected, key=repr)

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def teardown(self) -> None:
        """Everyone leaves, and nothing is left but answers."""
        self.answers.lose(R)
        self.answers.lose(S)
        assert (self.answers.flights, self.answers.waiters, self.answers.leads) == (0, 0, 0)
        assert self.answers._asks == {}
        self.answers.ask(self.now_s + 1e9, R, 10**9, b"z")
        assert (self.answers.answers, self.answers.bytes) == (0, 0)

    @invariant()
    def counts_agree(self) -> None:
        self.expire()
        self.answers._expire(self.now_s)
        assert self.answers.bytes == self.size() <= max(self.max_bytes, 0)
        assert self.answers.answers == len(self.stored)
        assert self.answers.waiters == len(self.waiting)
        assert self.answers.leads == len(self.leads)
        assert self.answers.flights == len(self.leader)


def test_against_the_model(slow: bool) -> None:
    profile = settings(
        max_examples=2000 if slow else 80,
        stateful_step_count=50,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    run_state_machine_as_test(Model, settings=profile)  # type: ignore[no-untyped-call]
