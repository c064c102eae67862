"""KV that is kept for other workers: prompts that are computed here and answered there.

A core without clock, engine or network. A hand-off is *opened* when its request comes, gets the prompt's full blocks
one after another as they are computed, is *computed* when the first id has been drawn, and is *taken* once, by whoever
knows its reference and asks under the same adapter and salt. It is gone when all was taken, when the taking ends in
whatever way, when its time is over, or when its prompt will not be computed.

The bytes of all hand-offs are bounded. What does not fit is not kept, and the hand-off ends before it: whoever takes it
computes the rest. What this module leaves to others: the way over the network (``transfer.py``), computing, and
fetching on the other side.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from headrace.worker.engine import Request

#: Hand-offs that have been computed and wait; beyond it the oldest goes. Most hold nothing, when their blocks do not
#: fit.
MAX_KEPT = 4096


class Refused(Exception):
    """It is not to be had; ``known``: there is one, but not for who asks so."""

    def __init__(self, reason: str, *, known: bool = False) -> None:
        super().__init__(reason)
        self.known = known


class Kept:
    """One hand-off. ``on_news`` is called when there is more of it, or it is over."""

    __slots__ = (
        "blocks",
        "cut_at",
        "expires_s",
        "failed",
        "ids",
        "keep_s",
        "key",
        "lora",
        "made",
        "next",
        "on_news",
        "reference",
        "salt",
        "size",
        "taken",
        "total",
    )

    def __init__(self, request: Request, reference: str, size: int, keep_s: float) -> None:
        self.key = request.key
        self.reference = reference
        self.ids = request.prompt_ids
        self.lora = request.lora
        self.salt = request.cache_salt
        self.size = size
        self.keep_s = keep_s
        #: Full blocks of the prompt, and those of them that came.
        self.total = len(self.ids) // size
        self.made = 0
        #: No block from this one on is kept.
        self.cut_at = self.total
        self.taken = False
        self.failed = False
        #: Set when it has been computed.
        self.expires_s: float | None = None
        self.on_news: Callable[[], None] = lambda: None
        self.blocks: deque[bytes] = deque()
        #: The block that is taken next.
        self.next = 0

    @property
    def bytes(self) -> int:
        return sum(map(len, self.blocks))

    @property
    def over(self) -> bool:
        """All that there is of it was taken."""
        return not self.blocks and self.next >= min(self.cut_at, self.total)

    def block_ids(self, block: int) -> list[int]:
        return self.ids[block * self.size : (block + 1) * self.size]


class Handoffs:
    """See the module's text."""

    def __init__(self, max_bytes: int, max_kept: int = MAX_KEPT) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._max_kept = max_kept
        self._by_key: dict[int, Kept] = {}
        self._by_reference: dict[str, Kept] = {}
        #: Computed and not taken, the first to expire first.
        self._computed: OrderedDict[int, Kept] = OrderedDict()
        #: Hand-offs that were not to hold all their blocks.
        self.cut_total = 0

    def __len__(self) -> int:
        return len(self._by_key)

    # --- the side that computes ---------------------------------------------------------------------------------------

    def open(self, request: Request, reference: str, size: int, keep_s: float) -> bool:
        """Blocks of ``size`` tokens will come for it; it is kept for ``keep_s`` when it is computed. False when the
        reference is in use."""
        if reference in self._by_reference:
            return False
        kept = Kept(request, reference, size, keep_s)
        self._by_key[request.key] = self._by_reference[reference] = kept
        return True

    def add(self, key: int, block: int, kv: bytes | None) -> None:
        """The KV of its next block; None = it could not be read."""
        kept = self._by_key.get(key)
        if kept is None or block != kept.made:
            return
        kept.made += 1
        if block < kept.next or block >= kept.cut_at:
            return
        if kv is None or self.bytes + len(kv) > self.max_bytes:
            kept.cut_at = block
            self.cut_total += 1
        else:
            kept.blocks.append(kv)
            self.bytes += len(kv)
        kept.on_news()

    def computed(self, key: int, now: float) -> float | None:
        """Its prompt has been computed, and all its blocks come or have come. When to ``expire`` it; None = there is
        no such hand-off."""
        kept = self._by_key.get(key)
        if kept is None:
            return None
        kept.expires_s = now + kept.keep_s
        if not kept.taken:
            self._computed[key] = kept
            if len(self._computed) > self._max_kept:
                self.drop(next(iter(self._computed.values())))
        return kept.expires_s

    def give_up(self, key: int) -> None:
        """Its prompt will not be computed. One that has been computed is kept."""
        kept = self._by_key.get(key)
        if kept is not None and kept.expires_s is None:
            self.drop(kept)

    def expire(self, now: float) -> None:
        """Drops those whose time is over, and nobody has begun to take."""
        for kept in [kept for kept in self._computed.values() if kept.expires_s is not None and kept.expires_s <= now]:
            self.drop(kept)

    # --- the side that takes ------------------------------------------------------------------------------------------

    def take(self, reference: str, lora: str, salt: bytes, first_block: int) -> Kept:
        """It is this taker's until ``drop``; blocks before ``first_block`` are not wanted. Raises Refused."""
        kept = self._by_reference.get(reference)
        if kept is None or kept.taken:
            raise Refused("no such hand-off, or it has been taken")
        if (kept.lora, kept.salt) != (lora, salt):
            raise Refused("the hand-off is of another adapter or salt", known=True)
        kept.taken = True
        self._computed.pop(kept.key, None)
        for _ in range(min(first_block - kept.next, len(kept.blocks))):
            self.bytes -= len(kept.blocks.popleft())
        kept.next = max(kept.next, first_block)
        return kept

    def take_block(self, kept: Kept) -> tuple[int, bytes] | None:
        """The next block and its KV; None when it is not there (yet, or at all: see ``over`` and ``failed``)."""
        if not kept.blocks:
            return None
        kv = kept.blocks.popleft()
        self.bytes -= len(kv)
        kept.next += 1
        return kept.next - 1, kv

    def drop(self, kept: Kept) -> None:
        """It is gone."""
        if self._by_key.get(kept.key) is not kept:
            return
        del self._by_key[kept.key], self._by_reference[kept.reference]
        self._computed.pop(kept.key, None)
        self.bytes -= kept.bytes
        kept.blocks.clear()
        if not kept.over:
            kept.failed = True
        kept.on_news()
