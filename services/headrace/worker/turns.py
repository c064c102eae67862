"""Whose turn is next in an engine: the order of its queues.

By when first ids are due, by the request's own target or its class's; batch work comes after all others. What of it is
overdue makes way no more, but only in some slots at a time (``slots_to_stay``, the scheduler's rule for a pool): so it
does not starve, and a backlog that is older than its target does not take the worker.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from headrace._gateway import slots_to_stay
from headrace.v1 import types_pb2
from headrace.worker.engine import Request

#: Whether it makes way for others, when it is due, its request's arrival, its choice.
Order = tuple[bool, float, int, int]

#: Before all that makes way, and after all that does not.
FIRST_TO_MAKE_WAY: Order = (True, float("-inf"), 0, 0)


class Queued(Protocol):
    """One choice of a request."""

    order: Order

    @property
    def aside(self) -> bool:
        """Its request stands still: it holds nothing."""
        ...


T = TypeVar("T", bound=Queued)


def order_of(request: Request, arrival: int, choice: int) -> Order:
    """The order in which it comes."""
    return (request.request_class == types_pb2.REQUEST_CLASS_BATCH, request.due_s, arrival, choice)


def by_order(queued: Queued) -> Order:
    """To sort by."""
    return queued.order


def _first_that_makes_way(queue: list[T]) -> T | None:
    at = bisect.bisect_left(queue, FIRST_TO_MAKE_WAY, key=by_order)
    return queue[at] if at < len(queue) else None


class Turns(Generic[T]):
    """Which overdue batch work stays."""

    def __init__(self) -> None:
        self._staying: set[T] = set()

    def stay(self, queues: Iterable[list[T]], slots: int, now: float) -> None:
        """What of batch work has been overdue longest makes way no more, while there is room for it to stay. The queues
        are in order, and stay so."""
        room = slots_to_stay(slots) - sum(not each.aside for each in self._staying)
        while room > 0:
            firsts = [(first, queue) for queue in queues if (first := _first_that_makes_way(queue)) is not None]
            oldest, queue = min(firsts, key=lambda each: each[0].order, default=(None, []))
            if oldest is None or oldest.order[1] > now:
                return
            queue.remove(oldest)
            oldest.order = (False, *oldest.order[1:])
            bisect.insort(queue, oldest, key=by_order)
            self._staying.add(oldest)
            room -= 1

    def ended(self, queued: T) -> None:
        """It has gone: another one may stay."""
        self._staying.discard(queued)
