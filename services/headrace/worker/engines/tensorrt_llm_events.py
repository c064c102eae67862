"""TensorRT-LLM's KV events become block changes in headrace's own names.

An event names blocks by the engine's hash and brings their token ids; those are hashed again by our rule, so that
routers, which know nothing of engines, mean the same blocks. Rules of the source (releases 1.2 to 1.4):

- ``event_id`` counts up by one (for each rank of attention data parallelism); a gap means that events were lost, and
  there is no way to ask again: all that was held is forgotten, and told as forgotten. What is stored from then on is
  known; children of forgotten blocks are not, until their parents are stored again.
- Partial blocks, and attention windows shorter than the longest, are of no use to others: left out.
- Until 1.3 an event does not say under which adapter and salt a block is held, though both enter its hash. There the
  first block's hash is computed for each scope in use, and the one that fits is it. A block that fits none is left out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.worker.engine import BlockChange, BlocksCleared, BlocksRemoved, BlocksStored
from headrace.worker.hashes import NameBlocks

log = logging.getLogger(__name__)

_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
#: Scopes whose blocks can be told apart until 1.3; each is one hash of a block for each first block that is stored.
_MAX_SCOPES = 64


def _mix32(value: int, seed: int) -> int:
    for _ in range(2):
        value = (((value >> 16) ^ value) * 0x45D9F3B) & _MASK_32
    value = (((value >> 16) ^ value) + 0x9E3779B9) & _MASK_32
    return seed ^ ((value + (seed << 6) + (seed >> 2)) & _MASK_64)


def _mix64(value: int, seed: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    value ^= value >> 31
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK_64)


def v1_block_key(tokens: Sequence[int], parent: int = 0, lora_id: int = 0, salt_id: int = 0) -> int:
    """The engine's own hash of a block (``v1_block_key``); 0 = no parent, adapter, salt."""
    value = len(tokens) ^ ((parent * 0xBF58476D1CE4E5B9) & _MASK_64)
    if not parent and salt_id:
        value = _mix64(salt_id, value)
    for token in tokens:
        value = _mix32(token, value)
    return _mix64(lora_id, value) if lora_id else value


@dataclass(frozen=True, slots=True)
class Scope:
    """Under what a request's KV is kept: as the engine says it, and as we do."""

    lora_id: int = 0
    #: Empty = none.
    salt_text: str = ""
    #: What the salt is in the engine's hash; 0 = none, or not known.
    salt_id: int = 0
    lora: str = ""
    salt: bytes = b""
    #: Others may come to look for what is held under it.
    told: bool = True


@dataclass(slots=True)
class _Held:
    """A block that the engine holds."""

    name: int
    scope: Scope


@dataclass(slots=True)
class _Rank:
    """What one rank has said."""

    next_id: int | None = None
    #: By the engine's hash.
    held: dict[int | str, _Held] = field(default_factory=dict)


class KvEvents:
    """See the module's text."""

    def __init__(self, name_blocks: NameBlocks, block_tokens: int) -> None:
        self._name_blocks = name_blocks
        self._block_tokens = block_tokens
        self._ranks: dict[int, _Rank] = {}
        #: How many ranks hold a block of that name.
        self._holders: dict[int, int] = {}
        self._window = 0
        self._scopes: OrderedDict[tuple[int, str], Scope] = OrderedDict()
        self.use(Scope())
        #: Blocks of the GPU's KV, once the engine has said it.
        self.capacity_blocks = 0
        self._unknown = False
        #: Times that events were lost.
        self.gaps = 0

    @property
    def held_blocks(self) -> int:
        """Blocks that can be found again, as far as they are known."""
        return len(self._holders)

    def use(self, scope: Scope) -> None:
        """A request under that scope is about to run."""
        self._scopes[scope.lora_id, scope.salt_text] = scope
        self._scopes.move_to_end((scope.lora_id, scope.salt_text))
        if len(self._scopes) > _MAX_SCOPES:
            self._scopes.popitem(last=False)

    def take(self, events: Iterable[dict[str, Any]]) -> list[BlockChange]:
        """What these events change, in order."""
        changes: deque[BlockChange] = deque()
        for event in events:
            rank = self._ranks.setdefault(event.get("attention_dp_rank") or 0, _Rank())
            self._check_order(event["event_id"], rank, changes)
            data, window = event["data"], event.get("window_size") or 0
            if data["type"] == "created":
                self._created(data, window, rank, changes)
            elif window >= self._window:
                self._window = window
                if data["type"] == "stored":
                    self._stored(data, rank, changes)
                elif data["type"] == "removed":
                    self._removed(data["block_hashes"], rank, changes)
            # "updated" moves a block between levels of memory: it can be reused from either.
        return list(changes)

    def _check_order(self, event_id: int, rank: _Rank, changes: deque[BlockChange]) -> None:
        expected, rank.next_id = rank.next_id, event_id + 1
        if (expected is None and event_id == 0) or event_id == expected:
            return
        self.gaps += 1
        log.warning("KV events %s to %d were lost: what the engine holds is learned anew", expected or 0, event_id - 1)
        self._forget(changes)

    def _created(self, data: dict[str, Any], window: int, rank: _Rank, changes: deque[BlockChange]) -> None:
        if window >= self._window:
            self._window = window
            self.capacity_blocks = data["num_blocks_per_cache_level"][0]
        if rank.held:
            # The engine has started again.
            self._forget(changes)

    def _forget(self, changes: deque[BlockChange]) -> None:
        # A name may be held by several ranks: all of them begin again, rather than one be wrong.
        for rank in self._ranks.values():
            rank.held.clear()
        if self._holders:
            self._holders.clear()
            changes.append(BlocksCleared())

    def _stored(self, data: dict[str, Any], rank: _Rank, changes: deque[BlockChange]) -> None:
        parent_hash = data["parent_hash"]
        parent = rank.held.get(parent_hash) if parent_hash is not None else None
        if parent_hash is not None and parent is None:
            return
        begins, names = parent.name if parent is not None else 0, []
        for block in data["blocks"]:
            tokens = [token["token_id"] for token in block["tokens"]]
            if len(tokens) != self._block_tokens:
                break
            scope = parent.scope if parent is not None else self._scope(block, tokens)
            if scope is None or not scope.told:
                break
            above = parent.name if parent is not None else 0
            (name,) = self._name_blocks(tokens, scope.lora, scope.salt, above)
            parent = _Held(name, scope)
            if rank.held.setdefault(block["block_hash"], parent) is parent:
                self._holders[name] = self._holders.get(name, 0) + 1
            names.append(name)
        if names:
            changes.append(BlocksStored(begins, tuple(names)))

    def _scope(self, block: dict[str, Any], tokens: list[int]) -> Scope | None:
        """Of a block without a parent."""
        if "cache_salt" in block or "lora_id" in block:
            return self._scopes.get((block.get("lora_id") or 0, str(block.get("cache_salt") or "")))
        for scope in reversed(self._scopes.values()):
            known = not scope.salt_text or scope.salt_id
            if known and v1_block_key(tokens, 0, scope.lora_id, scope.salt_id) == block["block_hash"]:
                return scope
        if not self._unknown:
            self._unknown = True
            log.warning("blocks of an unknown salt or adapter, or hashes by another rule: they are not told of")
        return None

    def _removed(self, hashes: list[int | str], rank: _Rank, changes: deque[BlockChange]) -> None:
        gone = []
        for block_hash in hashes:
            held = rank.held.pop(block_hash, None)
            if held is None:
                continue
            left = self._holders[held.name] - 1
            if left:
                self._holders[held.name] = left
            else:
                del self._holders[held.name]
                gone.append(held.name)
        if gone:
            changes.append(BlocksRemoved(tuple(gone)))
