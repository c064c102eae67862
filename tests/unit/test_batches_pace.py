"""How many lines run at once, against fleets of which it is told nothing."""

from __future__ import annotations

import heapq
import random

import pytest

from headrace.batches.pace import Pace


def drive(pace: Pace, slots: float, until_s: float, begin_s: float = 0.0, seed: int = 0) -> float:
    """A fleet that computes `slots` lines of about a second side by side, and more of them slower. Lines ended."""
    dice = random.Random(seed)
    now_s, ended, under_way = begin_s, 0, []
    while now_s < until_s:
        while pace.room(len(under_way), now_s):
            slow = max(1.0, (len(under_way) + 1) / slots)
            heapq.heappush(under_way, (now_s + dice.uniform(0.8, 1.2) * slow, now_s))
        if not under_way:
            now_s = pace.not_before_s
            continue
        now_s, sent_s = heapq.heappop(under_way)
        full = len(under_way) + 1 >= pace.limit
        pace.ended(100, sent_s, now_s, full=full)
        ended += 1
        assert 1 <= pace.limit <= pace.most
    return ended


@pytest.mark.parametrize("slots", [4, 16, 64])
def test_it_finds_what_a_fleet_can_do(slots: int) -> None:
    pace = Pace(512, 0.0)
    drive(pace, slots, 60.0)
    rate = drive(pace, slots, 160.0, 60.0) / 100.0
    assert rate >= 0.8 * slots
    assert pace.limit <= 4 * slots, "more than that brought nothing"


def test_it_never_passes_its_bound_and_reaches_it_where_that_pays() -> None:
    pace = Pace(32, 0.0)
    drive(pace, 1000, 60.0)
    assert pace.limit >= 24


def test_it_follows_a_fleet_that_grows() -> None:
    pace = Pace(512, 0.0)
    drive(pace, 8, 60.0)
    small = pace.limit
    drive(pace, 64, 600.0, 60.0)
    assert pace.limit > 1.4 * small


def test_a_refusal_halves_once_for_all_that_were_on_their_way() -> None:
    pace = Pace(64, 0.0, first=32)
    for _ in range(32):
        pace.pushed_back(2.0, 0.0, 1.0)
    assert pace.limit == 16
    assert pace.room(0, 2.9) == 0
    assert pace.room(0, 3.0) == 16


def test_without_a_hint_it_waits_longer_each_time_and_begins_anew_after_an_answer() -> None:
    pace = Pace(64, 0.0, first=32)
    now_s, waits = 0.0, []
    for _ in range(8):
        now_s = max(now_s, pace.not_before_s) + 0.001
        pace.pushed_back(None, now_s, now_s)
        waits.append(pace.not_before_s - now_s)
    assert waits == pytest.approx(sorted(waits))
    assert waits[0] == pytest.approx(0.25)
    assert waits[-1] == pytest.approx(8.0)
    assert pace.limit == 1
    now_s = pace.not_before_s
    pace.ended(1, now_s, now_s + 1, full=True)
    pace.pushed_back(None, now_s + 1, now_s + 1)
    assert pace.not_before_s == pytest.approx(now_s + 1.25)


def test_after_an_outage_it_climbs_back() -> None:
    pace = Pace(256, 0.0)
    drive(pace, 32, 60.0)
    before, now_s = pace.limit, 60.0
    for _ in range(6):
        now_s = max(now_s, pace.not_before_s) + 0.001
        pace.pushed_back(None, now_s, now_s)
    assert pace.limit == 1
    drive(pace, 32, now_s + 120.0, now_s)
    assert pace.limit >= before // 2
