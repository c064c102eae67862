"""The block log: what the cache is told of this worker's KV blocks, in order, and again when it missed something.

A core without streams: block changes go in and get sequence numbers; events from a number on, or a snapshot of what is
held, come out. The last ``keep`` events can be sent again; the snapshot needs none of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from headrace.v1 import cache_pb2
from headrace.worker.engine import BlockChange, BlocksRemoved, BlocksStored

Event = cache_pb2.BlockEvent


class BlockLog:
    """See the module's text."""

    def __init__(self, keep: int = 4096) -> None:
        self._events: deque[Event] = deque(maxlen=keep)
        self._next = 1
        #: Each block that is held, and its parent.
        self._parents: dict[int, int] = {}

    @property
    def next_sequence(self) -> int:
        return self._next

    @property
    def oldest_sequence(self) -> int:
        """The first event that can still be sent."""
        return self._events[0].sequence if self._events else self._next

    def __len__(self) -> int:
        """Blocks that are held."""
        return len(self._parents)

    def add(self, changes: Iterable[BlockChange]) -> None:
        """These changes have happened."""
        for change in changes:
            event = Event(sequence=self._next)
            if isinstance(change, BlocksStored):
                event.stored.parent = change.parent
                event.stored.hashes.extend(change.hashes)
                for parent, block in zip((change.parent, *change.hashes), change.hashes, strict=False):
                    self._parents[block] = parent
            elif isinstance(change, BlocksRemoved):
                event.removed.hashes.extend(change.hashes)
                for block in change.hashes:
                    self._parents.pop(block, None)
            else:
                event.cleared.SetInParent()
                self._parents.clear()
            self._next += 1
            self._events.append(event)

    def since(self, sequence: int, most: int) -> list[Event] | None:
        """Up to ``most`` events from that number on; None when some of them are not kept any more."""
        if sequence < self.oldest_sequence or sequence > self._next:
            return None
        skip = sequence - self.oldest_sequence
        return [self._events[index] for index in range(skip, min(skip + most, len(self._events)))]

    def snapshot(self) -> cache_pb2.BlockSnapshot:
        """All that is held, as chains."""
        children: dict[int, list[int]] = {}
        for block, parent in self._parents.items():
            children.setdefault(parent, []).append(block)
        snapshot = cache_pb2.BlockSnapshot(next_sequence=self._next)
        # A block whose parent is not held cannot be: the tree gives up children first.
        begins = [(0, block) for block in children.get(0, ())]
        while begins:
            parent, block = begins.pop()
            chain = snapshot.chains.add(parent=parent)
            following = [block]
            while following:
                block = following[0]
                chain.hashes.append(block)
                begins.extend((chain.hashes[-2], other) for other in following[1:])
                following = children.get(block, [])
        return snapshot
