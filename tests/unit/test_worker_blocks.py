"""The block log against a plain set: whoever follows the events, from wherever, holds what is held."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.v1 import cache_pb2
from headrace.worker.blocks import BlockLog
from headrace.worker.engine import BlocksCleared, BlocksRemoved, BlocksStored


class Follower:
    """A cache: it starts from a snapshot and takes events without a gap."""

    def __init__(self, snapshot: cache_pb2.BlockSnapshot) -> None:
        self.next = snapshot.next_sequence
        self.held: dict[int, int] = {}
        for chain in snapshot.chains:
            self.store(chain)

    def store(self, stored: cache_pb2.BlockEvent.Stored) -> None:
        parent = stored.parent
        for block in stored.hashes:
            assert parent == 0 or parent in self.held, "a block before its parent"
            self.held[block] = parent
            parent = block

    def follow(self, event: cache_pb2.BlockEvent) -> None:
        assert event.sequence == self.next
        self.next += 1
        match event.WhichOneof("what"):
            case "stored":
                self.store(event.stored)
            case "removed":
                for block in event.removed.hashes:
                    del self.held[block]
            case "cleared":
                self.held.clear()


@given(st.integers(0, 10_000), st.integers(1, 30))
def test_followers_agree(seed: int, keep: int) -> None:
    dice = random.Random(seed)
    log = BlockLog(keep)
    parents: dict[int, int] = {}
    followers = [Follower(log.snapshot())]
    fresh = 1
    for _ in range(60):
        what = dice.random()
        if what < 0.6:
            parent = dice.choice([0, *parents])
            chain = tuple(range(fresh, fresh + dice.randint(1, 4)))
            fresh = chain[-1] + 1
            log.add([BlocksStored(parent, chain)])
            for each in chain:
                parents[each], parent = parent, each
        elif what < 0.9:
            leaves = [block for block in parents if block not in parents.values()]
            if leaves:
                gone = dice.choice(leaves)
                del parents[gone]
                log.add([BlocksRemoved((gone,))])
        elif what < 0.92:
            parents.clear()
            log.add([BlocksCleared()])
        if dice.random() < 0.1:
            followers.append(Follower(log.snapshot()))
        for number, follower in enumerate(followers):
            if dice.random() < 0.5:
                continue
            events = log.since(follower.next, 1000)
            if events is None:
                followers[number] = Follower(log.snapshot())
                continue
            for event in events:
                follower.follow(event)
            assert follower.held == parents
    assert Follower(log.snapshot()).held == parents
    assert len(log) == len(parents)


def test_what_is_not_kept_is_not_given() -> None:
    log = BlockLog(keep=2)
    assert log.since(1, 10) == []
    log.add([BlocksStored(n - 1, (n,)) for n in range(1, 5)])
    assert (log.oldest_sequence, log.next_sequence) == (3, 5)
    assert log.since(2, 10) is None
    assert [event.sequence for event in log.since(3, 10) or []] == [3, 4]
    assert [event.sequence for event in log.since(3, 1) or []] == [3]
    assert log.since(5, 10) == []
    assert log.since(6, 10) is None
