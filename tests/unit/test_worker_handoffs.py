"""KV kept for other workers: who gets it, for how long, and that its bytes are counted and bounded."""

from __future__ import annotations

import contextlib
import random

import pytest

from headrace.worker.engine import Handoff, Request, Stopping
from headrace.worker.handoffs import Handoffs, Refused

SIZE = 4


def request(key: int, tokens: int = 18, salt: bytes = b"") -> Request:
    ids = list(range(key * 1000, key * 1000 + tokens))
    return Request(key=key, prompt_ids=ids, stopping=Stopping(1), cache_salt=salt, handoff=Handoff())


def opened(handoffs: Handoffs, key: int = 1, **how: int) -> str:
    assert handoffs.open(request(key, **how), f"r{key}", SIZE, 10.0)
    return f"r{key}"


def test_blocks_are_taken_as_they_come_and_the_end_is_known() -> None:
    handoffs = Handoffs(1000)
    kept = handoffs.take(opened(handoffs), "", b"", 0)
    news = []
    kept.on_news = lambda: news.append(1)
    assert handoffs.take_block(kept) is None
    assert not kept.over
    for block in range(4):
        handoffs.add(1, block, bytes([block]))
        assert len(news) == block + 1
        assert handoffs.take_block(kept) == (block, bytes([block]))
        assert kept.block_ids(block) == list(range(1000 + 4 * block, 1004 + 4 * block))
    # Two tokens more make no block.
    assert kept.over
    handoffs.computed(1, 0.0)
    handoffs.drop(kept)
    assert (len(handoffs), handoffs.bytes, kept.failed) == (0, 0, False)


def test_what_is_held_already_is_not_kept() -> None:
    handoffs = Handoffs(1000)
    reference = opened(handoffs)
    for block in range(2):
        handoffs.add(1, block, b"xx")
    kept = handoffs.take(reference, "", b"", 3)
    assert handoffs.bytes == 0
    handoffs.add(1, 2, b"xx")
    assert handoffs.take_block(kept) is None
    handoffs.add(1, 3, b"yy")
    assert handoffs.take_block(kept) == (3, b"yy")
    assert kept.over


def test_only_who_knows_it_under_the_same_salt_gets_it_and_once() -> None:
    handoffs = Handoffs(1000)
    assert handoffs.open(request(1, salt=b"a"), "r1", SIZE, 10.0)
    assert not handoffs.open(request(2), "r1", SIZE, 10.0)
    with pytest.raises(Refused) as unknown:
        handoffs.take("r2", "", b"a", 0)
    assert not unknown.value.known
    for lora, salt in (("", b""), ("", b"b"), ("x", b"a")):
        with pytest.raises(Refused) as other:
            handoffs.take("r1", lora, salt, 0)
        assert other.value.known
    handoffs.take("r1", "", b"a", 0)
    with pytest.raises(Refused):
        handoffs.take("r1", "", b"a", 0)


def test_its_time_begins_when_it_is_computed() -> None:
    handoffs = Handoffs(1000)
    reference = opened(handoffs)
    handoffs.add(1, 0, b"xxx")
    handoffs.expire(1e9)
    assert handoffs.bytes == 3
    assert handoffs.computed(1, 5.0) == 15.0
    handoffs.expire(14.9)
    assert len(handoffs) == 1
    handoffs.expire(15.0)
    assert (len(handoffs), handoffs.bytes) == (0, 0)
    with pytest.raises(Refused):
        handoffs.take(reference, "", b"", 0)


def test_a_prompt_that_will_not_be_computed_fails_who_waits_for_it() -> None:
    handoffs = Handoffs(1000)
    kept = handoffs.take(opened(handoffs), "", b"", 0)
    handoffs.add(1, 0, b"x")
    handoffs.give_up(1)
    assert kept.failed
    assert (len(handoffs), handoffs.bytes) == (0, 0)
    # One that was computed is kept for who may still come.
    opened(handoffs, 2)
    handoffs.computed(2, 0.0)
    handoffs.give_up(2)
    assert len(handoffs) == 1


def test_what_does_not_fit_ends_it() -> None:
    handoffs = Handoffs(10)
    opened(handoffs, 1)
    handoffs.add(1, 0, b"x" * 6)
    kept = handoffs.take(opened(handoffs, 2), "", b"", 0)
    handoffs.add(2, 0, b"x" * 4)
    handoffs.add(2, 1, b"x")
    # There would be room again, but not for what is between.
    assert handoffs.take_block(kept) == (0, b"x" * 4)
    handoffs.add(2, 2, b"x")
    assert kept.over
    assert (kept.cut_at, handoffs.cut_total) == (1, 1)


def test_the_oldest_goes_when_too_many_wait() -> None:
    handoffs = Handoffs(1000, max_kept=2)
    for key in (1, 2, 3):
        opened(handoffs, key)
        handoffs.computed(key, float(key))
    assert len(handoffs) == 2
    with pytest.raises(Refused):
        handoffs.take("r1", "", b"", 0)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_are_what_is_there_whatever_happens(seed: int) -> None:
    dice = random.Random(seed)
    handoffs = Handoffs(200, max_kept=3)
    made: dict[int, int] = {}
    taken = []
    for key in range(1, 120):
        what = dice.randrange(6)
        some = dice.choice(list(made)) if made else 0
        if what == 0 or not made:
            opened(handoffs, key, tokens=dice.randrange(1, 40))
            made[key] = 0
        elif what == 1:
            handoffs.add(some, made[some], dice.choice([None, b"x" * dice.randrange(30)]))
            made[some] += 1
        elif what == 2:
            handoffs.computed(some, float(key))
        elif what == 3:
            handoffs.give_up(some)
        elif what == 4:
            handoffs.expire(key - 12.0)
        else:
            with contextlib.suppress(Refused):
                taken.append(handoffs.take(f"r{some}", "", b"", dice.randrange(3)))
        for kept in taken:
            if dice.random() < 0.5:
                handoffs.take_block(kept)
            if dice.random() < 0.1:
                handoffs.drop(kept)
        assert handoffs.bytes == sum(kept.bytes for kept in handoffs._by_key.values()) <= 200, f"seed {seed}"
        assert len(handoffs) == len(handoffs._by_reference)
    for kept in list(handoffs._by_key.values()):
        handoffs.drop(kept)
    assert handoffs.bytes == 0
