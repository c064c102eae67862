"""Who holds which prefix blocks: an index fed by the workers' own events.

A block is named by its chained hash, so holding block *i* of a prompt means the whole prompt up to it; the index is a
hint for placement and never the ground for an answer. Events carry sequence numbers: one seen before is ignored, a
gap means that we no longer know what that worker holds, and then a snapshot is asked for and everything before it is
disregarded.

A worker whose stream ends is not found any more at once. What it held is kept for a little while, so that the same
instance can go on from its last event; a new instance at that worker's name ends the old one.

Bounded by *holdings* (a block held by a worker counts one), least recently touched first. Chains are touched from their
ends to their beginnings, so that what goes first is a leaf and never the root that a chain hangs on.

Narrow on purpose (``hello``, ``apply``, ``snapshot``, ``detach``, ``expire``, ``find``): the inside may be replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

#: How long the holdings of a broken stream are kept.
DETACHED_S = 5.0


@dataclass(frozen=True, slots=True)
class Stored:
    """These blocks came, each the child of the one before it."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """These blocks went."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All went."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    sequence: int
    what: Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class ResumeFrom:
    """Send events from this one on."""

    sequence: int


@dataclass(frozen=True, slots=True)
class WantSnapshot:
    """Send what is held now, then events."""


Want = ResumeFrom | WantSnapshot


@dataclass(frozen=True, slots=True)
class Holder:
    worker_id: str
    instance_id: str
    #: Of the prefix, from its start.
    blocks: int


@dataclass(slots=True, eq=False)
class _Instance:
    worker_id: str
    instance_id: str
    pool: str
    link: int
    #: The next event's number; None = a snapshot is awaited.
    next_sequence: int | None = None
    hashes: set[int] = field(default_factory=set)
    #: When what it held is forgotten; None = its stream is open.
    expires_s: float | None = None


class _PoolIndex:
    """One pool's blocks, least recently touched first, and who holds them."""

    def __init__(self) -> None:
        self.holders: OrderedDict[int, set[_Instance]] = OrderedDict()


class Prefixes:
    """The prefix index's core. A *link* is a worker's stream."""

    def __init__(self, max_blocks: int) -> None:
        #: Holdings now.
        self.blocks = 0
        self.evictions = 0
        #: Events that could not be applied for want of those before them.
        self.gaps = 0
        self._max_blocks = max_blocks
        self._pools: dict[str, _PoolIndex] = {}
        self._instances: dict[str, _Instance] = {}
        self._links: dict[int, _Instance] = {}

    @property
    def workers(self) -> int:
        """Workers whose stream is open."""
        return len(self._links)

    def hello(
        self, link: int, worker_id: str, instance_id: str, pool: str, oldest_sequence: int, next_sequence: int
    ) -> Want:
        """A worker opens its stream and can send events from ``oldest_sequence`` on."""
        for other in [each for each in self._instances.values() if (each.pool, each.worker_id) == (pool, worker_id)]:
            if other.instance_id != instance_id:
                self._forget(other)
        known = self._instances.get(instance_id)
        if known is not None and known.pool != pool:
            self._forget(known)
            known = None
        if known is None:
            known = self._instances[instance_id] = _Instance(worker_id, instance_id, pool, link)
        self._links.pop(known.link, None)
        known.link, known.expires_s, known.worker_id = link, None, worker_id
        self._links[link] = known
        if known.next_sequence is not None and oldest_sequence <= known.next_sequence <= next_sequence:
            return ResumeFrom(known.next_sequence)
        known.next_sequence = None
        return WantSnapshot()

    def apply(self, link: int, events: Iterable[BlockEvent]) -> Want | None:
        """Take in events. When one is missing, the answer is what to ask the worker for."""
        instance = self._links.get(link)
        if instance is None or instance.next_sequence is None:
            # Nothing makes sense before the snapshot that was asked for; what matters of these is in it.
            return None
        for event in events:
            if event.sequence < instance.next_sequence:
                continue
            if event.sequence > instance.next_sequence:
                self.gaps += 1
                instance.next_sequence = None
                self._clear(instance)
                return WantSnapshot()
            instance.next_sequence += 1
            match event.what:
                case Stored():
                    self._hold(instance, event.what.hashes)
                case Removed():
                    self._release(instance, event.what.hashes)
                case Cleared():
                    self._clear(instance)
        return None

    def snapshot(self, link: int, next_sequence: int, chains: Iterable[Sequence[int]]) -> None:
        """All that a worker holds, as of just before event ``next_sequence``."""
        instance = self._links.get(link)
        if instance is None or (instance.next_sequence is not None and instance.next_sequence > next_sequence):
            # Late: we have seen more than it knows.
            return
        self._clear(instance)
        for chain in chains:
            self._hold(instance, chain)
        instance.next_sequence = next_sequence

    def detach(self, now_s: float, link: int) -> None:
        """A worker's stream ended; it may come back. (A break and a goodbye can't be told apart for certain.)"""
        instance = self._links.pop(link, None)
        if instance is not None:
            instance.expires_s = now_s + DETACHED_S

    def expire(self, now_s: float) -> None:
        """Forget those that did not come back in time."""
        for instance in [each for each in self._instances.values() if each.expires_s is not None]:
            assert instance.expires_s is not None
            if instance.expires_s <= now_s:
                self._forget(instance)

    def next_wakeup(self) -> float | None:
        """When to call ``expire``; None = not before something happens."""
        times = [each.expires_s for each in self._instances.values() if each.expires_s is not None]
        return min(times, default=None)

    def find(self, pool: str, hashes: Sequence[int]) -> list[Holder]:
        """Who holds the beginning of this chain, longest first. Costs O(blocks found × their holders)."""
        index = self._pools.get(pool)
        if index is None:
            return []
        depths: dict[_Instance, int] = {}
        alive: set[_Instance] | None = None
        found = 0
        for block in hashes:
            holders = index.holders.get(block)
            holding = set() if holders is None else (holders.copy() if alive is None else alive & holders)
            if not holding:
                break
            found += 1
            alive = holding
            for instance in holding:
                depths[instance] = found
        for block in reversed(hashes[:found]):
            index.holders.move_to_end(block)
        reachable = [
            Holder(instance.worker_id, instance.instance_id, depth)
            for instance, depth in depths.items()
            if instance.expires_s is None
        ]
        return sorted(reachable, key=lambda holder: (-holder.blocks, holder.worker_id, holder.instance_id))

    def _hold(self, instance: _Instance, hashes: Sequence[int]) -> None:
        index = self._pools.setdefault(instance.pool, _PoolIndex())
        for block in reversed(hashes):
            holders = index.holders.get(block)
            if holders is None:
                holders = index.holders[block] = set()
            else:
                index.holders.move_to_end(block)
            if instance not in holders:
                holders.add(instance)
                instance.hashes.add(block)
                self.blocks += 1
        while self.blocks > self._max_blocks:
            self._evict()

    def _evict(self) -> None:
        # From the pool with most blocks: one full of quiet blocks doesn't keep another from growing.
        name, index = max(self._pools.items(), key=lambda item: len(item[1].holders))
        block, holders = index.holders.popitem(last=False)
        for instance in holders:
            instance.hashes.discard(block)
        self.blocks -= len(holders)
        self.evictions += len(holders)
        if not index.holders:
            del self._pools[name]

    def _release(self, instance: _Instance, hashes: Iterable[int]) -> None:
        index = self._pools.get(instance.pool)
        for block in hashes:
            if index is None or block not in instance.hashes:
                # Evicted here before.
                continue
            instance.hashes.discard(block)
            holders = index.holders[block]
            holders.discard(instance)
            self.blocks -= 1
            if not holders:
                del index.holders[block]
        if index is not None and not index.holders:
            del self._pools[instance.pool]

    def _clear(self, instance: _Instance) -> None:
        self._release(instance, list(instance.hashes))

    def _forget(self, instance: _Instance) -> None:
        self._clear(instance)
        del self._instances[instance.instance_id]
        if self._links.get(instance.link) is instance:
            del self._links[instance.link]
