"""Whose turn it is: the asks that wait, for each pool in the order in which they will be served.

The order: class first (interactive, standard, batch), first come first served inside a class. An ask that has waited
``AGING_S`` counts as one class higher, after twice that as two: the limit on how long a low class can be passed over.

An ask that may run in several pools stands in line in each of them and leaves all lines at once. Adding, withdrawing
and taking cost O(pools of the ask), the next in line O(1). How many may wait is the core's rule, and so is what fits
where.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.scheduler.events import Ask
from headrace.v1 import types_pb2

#: Batch work is interactive after a minute: long enough to matter under load, short enough to promise.
AGING_S = 30.0

#: Lower goes first. What isn't said is standard.
RANK: dict[int, int] = {
    types_pb2.REQUEST_CLASS_INTERACTIVE: 0,
    types_pb2.REQUEST_CLASS_STANDARD: 1,
    types_pb2.REQUEST_CLASS_UNSPECIFIED: 1,
    types_pb2.REQUEST_CLASS_BATCH: 2,
}
_RANKS = 3


@dataclass(slots=True, eq=False)
class Waiting:
    """An ask in the queue."""

    #: Order of arrival.
    sequence: int
    link: int
    ask: Ask
    arrived_s: float
    rank: int
    #: Asks from behind that were served while this one was first in line and did not fit.
    passed: int = 0
    #: The worker instance that keeps room for it; empty = none.
    reserved: str = ""

    def turn(self, now_s: float) -> tuple[int, int]:
        """Lower is served first."""
        return max(self.rank - int((now_s - self.arrived_s) / AGING_S), 0), self.sequence


@dataclass(slots=True)
class _Line:
    """The asks of one pool, by rank, each in order of arrival."""

    ranks: tuple[OrderedDict[int, Waiting], ...] = field(
        default_factory=lambda: tuple(OrderedDict() for _ in range(_RANKS))
    )
    #: Those that refuse some workers; a worker's loss may leave them without any.
    picky: dict[int, Waiting] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(rank) for rank in self.ranks)


class Queue:
    """All asks that wait."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._by_ask: dict[tuple[int, int], Waiting] = {}
        self._by_link: dict[int, dict[int, Waiting]] = {}
        # (deadline, sequence, entry) with entries that left still in it; rebuilt when those are more than half.
        self._deadlines: list[tuple[float, int, Waiting]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._by_ask)

    def __contains__(self, key: tuple[int, int]) -> bool:
        return key in self._by_ask

    def depth(self, pool: str) -> int:
        """Asks that wait for that pool."""
        line = self._lines.get(pool)
        return len(line) if line else 0

    def depth_by_rank(self) -> list[int]:
        """Asks that wait, for each rank."""
        depths = [0] * _RANKS
        for waiting in self._by_ask.values():
            depths[waiting.rank] += 1
        return depths

    def add(self, now_s: float, link: int, ask: Ask) -> Waiting:
        """Put an ask at the end of its class."""
        self._sequence += 1
        waiting = Waiting(self._sequence, link, ask, now_s, RANK.get(ask.request_class, 1))
        self._by_ask[link, ask.number] = waiting
        self._by_link.setdefault(link, {})[ask.number] = waiting
        for pool in ask.pools:
            line = self._lines.setdefault(pool, _Line())
            line.ranks[waiting.rank][waiting.sequence] = waiting
            if ask.avoid_instances:
                line.picky[waiting.sequence] = waiting
        if ask.deadline_s is not None:
            heapq.heappush(self._deadlines, (ask.deadline_s, waiting.sequence, waiting))
        return waiting

    def find(self, link: int, number: int) -> Waiting | None:
        """The ask of that number, if it waits."""
        return self._by_ask.get((link, number))

    def remove(self, waiting: Waiting) -> None:
        """Take an ask out of all lines."""
        del self._by_ask[waiting.link, waiting.ask.number]
        of_link = self._by_link[waiting.link]
        del of_link[waiting.ask.number]
        if not of_link:
            del self._by_link[waiting.link]
        for pool in waiting.ask.pools:
            line = self._lines[pool]
            del line.ranks[waiting.rank][waiting.sequence]
            line.picky.pop(waiting.sequence, None)
            if not len(line):
                del self._lines[pool]
        if len(self._deadlines) > 64 + 2 * len(self._by_ask):
            self._deadlines = [item for item in self._deadlines if self._waits(item[2])]
            heapq.heapify(self._deadlines)

    def of_link(self, link: int) -> list[Waiting]:
        """All asks of one router's stream."""
        return list(self._by_link.get(link, {}).values())

    def everything(self) -> list[Waiting]:
        """All asks."""
        return list(self._by_ask.values())

    def of_pool(self, pool: str) -> list[Waiting]:
        """All asks that stand in line for that pool, in no order."""
        line = self._lines.get(pool)
        return [waiting for rank in line.ranks for waiting in rank.values()] if line else []

    def picky(self, pool: str) -> list[Waiting]:
        """Those of a pool that refuse some workers."""
        line = self._lines.get(pool)
        return list(line.picky.values()) if line else []

    def in_turn(self, now_s: float, pool: str) -> Iterator[Waiting]:
        """The asks of a pool, next first. Invalid after the queue has changed."""
        line = self._lines.get(pool)
        if line is None:
            return iter(())
        lines = [rank.values() for rank in line.ranks if rank]
        if len(lines) == 1:
            return iter(lines[0])
        # Inside a rank who came first is at least as far up by age, so each rank is sorted by turn.
        return heapq.merge(*lines, key=lambda waiting: waiting.turn(now_s))

    def first(self, now_s: float, pool: str) -> Waiting | None:
        """The next of that pool."""
        return next(self.in_turn(now_s, pool), None)

    def position(self, waiting: Waiting, pool: str) -> int:
        """Its place in that line, from 1, as of a newcomer: behind all of its class and of higher ones."""
        line = self._lines[pool]
        return sum(len(rank) for rank in line.ranks[: waiting.rank + 1])

    def expired(self, now_s: float) -> Iterator[Waiting]:
        """Those whose deadline has come, earliest first. The caller removes each before asking for the next."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            waiting = heapq.heappop(self._deadlines)[2]
            if self._waits(waiting):
                yield waiting

    def next_deadline(self) -> float | None:
        """When the next one expires."""
        while self._deadlines and not self._waits(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _waits(self, waiting: Waiting) -> bool:
        return self._by_ask.get((waiting.link, waiting.ask.number)) is waiting
