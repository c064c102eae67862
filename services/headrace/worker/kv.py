"""KV accounts: what a batching engine may hold, and what it can reuse.

KV memory is counted in *blocks* of ``block_tokens`` tokens, with a hard bound. A *lane* is one sequence as the engine
knows it (llama.cpp's ``seq_id``): a run of positions from 0. A lane's blocks are either *shared*, nodes of a tree in
which a full block of ids and all before it is stored once, or *private*, its unfinished tail.

The tree is a radix tree over full blocks: a child is found by its ids themselves, so that a hash (which is only a name
for others, in block events) can never make two texts the same. Its roots are scopes: adapter and tenant salt.
The invariant that all rests on: **a lane that is on a node is on all of the node's ancestors.** So any one lane of a
node can serve as the source from which its whole prefix is copied, and a node without lanes has no KV.

A finished sequence's lane stays as a *holder* of its blocks, least recently used first to go, block by block from its
end.

Nothing here touches an engine: changes come out as operations (``take_operations``), to be applied in order before the
next step, and as block changes (``take_changes``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from headrace.worker.engine import BlockChange, BlocksRemoved, BlocksStored

#: The chained hashes of the full blocks of these ids: ``hash_blocks(ids, lora, salt)``.
HashBlocks = Callable[[list[int], str, bytes], list[int]]


@dataclass(frozen=True, slots=True)
class CopyLane:
    """Lane ``target`` shares the KV of ``source`` at positions ``start`` to ``end``."""

    source: int
    target: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TrimLane:
    """Lane ``lane`` gives up its KV at positions ``start`` to ``end``; -1 = to its end."""

    lane: int
    start: int
    end: int = -1


Operation = CopyLane | TrimLane


@dataclass(frozen=True, slots=True)
class Scope:
    """Within one scope KV may be shared. ``private`` is a request's own key when it must not share with others."""

    lora: str = ""
    salt: bytes = b""
    private: Hashable = None


class _Node:
    __slots__ = ("children", "hash", "ids", "lanes", "parent", "running")

    def __init__(self, parent: _Node | None, ids: tuple[int, ...], hash_: int) -> None:
        self.parent = parent
        self.ids = ids
        self.hash = hash_
        self.children: dict[tuple[int, ...], _Node] = {}
        self.lanes: set[int] = set()
        #: How many of the lanes are not holders.
        self.running = 0


@dataclass(eq=False, slots=True)
class Lane:
    """One sequence's KV."""

    id: int
    scope: Scope
    #: Its shared blocks, from the root's child on.
    path: list[_Node] = field(default_factory=list)
    private_blocks: int = 0
    hashes: list[int] = field(default_factory=list)
    #: The holder whose whole text this one continues.
    continues: int | None = None

    @property
    def blocks(self) -> int:
        return len(self.path) + self.private_blocks


class KvAccounts:
    """See the module's text."""

    def __init__(
        self,
        total_blocks: int,
        block_tokens: int,
        lanes: int,
        *,
        hash_blocks: HashBlocks | None,
        keep: bool = True,
        max_cached_blocks: int | None = None,
    ) -> None:
        self.total_blocks = total_blocks
        #: Kept for reuse at most; None: whatever room there is.
        self._max_cached_blocks = total_blocks if max_cached_blocks is None else max_cached_blocks
        self.block_tokens = block_tokens
        self._hash_blocks = hash_blocks
        #: Keep the blocks of finished sequences.
        self._keep = keep
        self._lane_ids = list(range(lanes - 1, -1, -1))
        self._roots: dict[Scope, _Node] = {}
        self._holders: OrderedDict[int, Lane] = OrderedDict()
        self._used_nodes = 0
        self._cached_nodes = 0
        self._private_blocks = 0
        self._operations: list[Operation] = []
        self._changes: list[BlockChange] = []

    # --- what is there -----------------------------------------------------------------------------------------------

    @property
    def used_blocks(self) -> int:
        """Held by running sequences."""
        return self._used_nodes + self._private_blocks

    @property
    def cached_blocks(self) -> int:
        """Held only for reuse."""
        return self._cached_nodes

    @property
    def available_blocks(self) -> int:
        """Free, or free on demand."""
        return self.total_blocks - self.used_blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def take_operations(self) -> list[Operation]:
        operations, self._operations = self._operations, []
        return operations

    def take_changes(self) -> list[BlockChange]:
        changes, self._changes = self._changes, []
        return changes

    # --- a lane's life -----------------------------------------------------------------------------------------------

    def admit(self, ids: list[int], scope: Scope, *, reuse: bool, headroom: int) -> Lane | None:
        """A lane with blocks for all of the ids, of which ``len(path)`` are there already; None when they do not fit
        beside ``headroom`` further blocks. At least the last id is left to be computed."""
        path = self._match(self._roots.get(scope), [], ids) if reuse else []
        revived = sum(1 for node in path if not node.running)
        wanted = self.blocks_for(len(ids)) - len(path)
        if wanted + revived + headroom > self.available_blocks:
            return None
        if not self._lane_ids:
            self._free_lane()
            # That may have taken a part of the path; the sum above stays the same.
            path = self._match(self._roots.get(scope), [], ids) if reuse else []
            wanted = self.blocks_for(len(ids)) - len(path)
        lane = Lane(self._lane_ids.pop(), scope)
        self._attach(lane, path)
        self._make_room(wanted)
        self._add_private(lane, wanted)
        return lane

    def advance(self, lane: Lane, ids: list[int], computed: int) -> int:
        """Looks again for blocks that others have computed since; the tokens that are there now."""
        if computed != len(lane.path) * self.block_tokens:
            return computed
        found = self._match(lane.path[-1] if lane.path else self._roots.get(lane.scope), lane.path, ids)
        if found:
            self._attach(lane, found)
            self._add_private(lane, -len(found))
        return len(lane.path) * self.block_tokens

    def grow(self, lane: Lane, tokens: int) -> bool:
        """Makes the lane hold so many tokens, giving up cached blocks for it; False when there are none left."""
        wanted = self.blocks_for(tokens) - lane.blocks
        if wanted <= 0:
            return True
        if wanted > self.available_blocks:
            return False
        self._make_room(wanted)
        self._add_private(lane, wanted)
        return True

    def commit(self, lane: Lane, ids: list[int], computed: int) -> None:
        """The first ``computed`` ids have been computed: their full blocks become shared.

        A block that another lane has computed meanwhile is stored once: this lane gives up its own and takes that one.
        """
        full = computed // self.block_tokens
        first = len(lane.path)
        if full <= first:
            return
        parent = lane.path[-1] if lane.path else self._roots.setdefault(lane.scope, _Node(None, (), 0))
        hashes = self._hashes(lane, ids, full)
        stored: list[int] = []
        stored_parent = parent.hash
        for index in range(first, full):
            start = index * self.block_tokens
            block = tuple(ids[start : start + self.block_tokens])
            node = parent.children.get(block)
            if node is None:
                node = _Node(parent, block, hashes[index] if hashes else 0)
                parent.children[block] = node
                # As if cached for a moment; _enter counts it as used.
                self._cached_nodes += 1
                stored.append(node.hash)
            else:
                self._announce(stored_parent, stored, lane.scope)
                stored, stored_parent = [], node.hash
                source = next(iter(node.lanes))
                self._operations.append(TrimLane(lane.id, start, start + self.block_tokens))
                self._operations.append(CopyLane(source, lane.id, start, start + self.block_tokens))
            self._enter(lane, node)
            self._add_private(lane, -1)
            parent = node
        self._announce(stored_parent, stored, lane.scope)

    def fork(self, lane: Lane) -> Lane | None:
        """A lane that will share what this one computes (``join``); None when there is no room. It holds one private
        block meanwhile: the copy of the unfinished tail, or the next block."""
        if self.available_blocks < 1:
            return None
        self._make_room(1)
        if not self._lane_ids:
            self._free_lane()
        twin = Lane(self._lane_ids.pop(), lane.scope)
        self._add_private(twin, 1)
        return twin

    def join(self, twin: Lane, lane: Lane, tokens: int) -> None:
        """The fork shares the first ``tokens`` of that lane, which are computed and committed."""
        for node in lane.path:
            self._enter(twin, node)
        twin.hashes = list(lane.hashes)
        self._operations.append(CopyLane(lane.id, twin.id, 0, tokens))

    def close(self, lane: Lane, ids: list[int], computed: int, *, keep: bool) -> None:
        """The sequence is over. With ``keep`` its full blocks stay for others until the room is needed."""
        keep = keep and self._keep and lane.scope.private is None
        if keep:
            self.commit(lane, ids, computed)
        self._add_private(lane, -lane.private_blocks)
        # Nothing to hold, or another lane holds all of it already.
        if not keep or not lane.path or len(lane.path[-1].lanes) > 1:
            self._drop(lane, running=True)
        else:
            self._hold(lane)
        self._shed(self._max_cached_blocks)

    def _hold(self, lane: Lane) -> None:
        """The lane's blocks stay, as the youngest of those held for reuse."""
        for node in lane.path:
            node.running -= 1
            if not node.running:
                self._used_nodes -= 1
                self._cached_nodes += 1
        self._operations.append(TrimLane(lane.id, len(lane.path) * self.block_tokens))
        if lane.continues is not None and (holder := self._holders.get(lane.continues)) is not None:
            depth = len(holder.path)
            if depth <= len(lane.path) and lane.path[depth - 1] is holder.path[-1]:
                self._drop(self._holders.pop(holder.id), running=False)
        self._holders[lane.id] = lane

    def undo(self, lane: Lane, computed: int) -> None:
        """What lies beyond the first ``computed`` tokens was written by a step that does not count."""
        self._operations.append(TrimLane(lane.id, computed))

    def clear_cached(self) -> None:
        """Gives up all that is held only for reuse."""
        while self._holders:
            self._drop(self._holders.popitem(last=False)[1], running=False)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _match(self, root: _Node | None, path: list[_Node], ids: list[int]) -> list[_Node]:
        found: list[_Node] = []
        node = root
        size = self.block_tokens
        for index in range(len(path), (len(ids) - 1) // size):
            if node is None:
                break
            node = node.children.get(tuple(ids[index * size : (index + 1) * size]))
            if node is not None:
                found.append(node)
        return found

    def _free_lane(self) -> None:
        # There are at least as many lanes as slots, so when none is free a holder has one.
        self._drop(self._holders.popitem(last=False)[1], running=False)

    def _attach(self, lane: Lane, nodes: list[_Node]) -> None:
        if not nodes:
            return
        source = next(iter(nodes[-1].lanes))
        start = len(lane.path) * self.block_tokens
        for node in nodes:
            self._enter(lane, node)
        self._operations.append(CopyLane(source, lane.id, start, len(lane.path) * self.block_tokens))
        if (holder := self._holders.get(source)) is not None:
            self._holders.move_to_end(source)
            if holder.path[-1] is nodes[-1]:
                lane.continues = source

    def _enter(self, lane: Lane, node: _Node) -> None:
        node.lanes.add(lane.id)
        if not node.running:
            self._cached_nodes -= 1
            self._used_nodes += 1
        node.running += 1
        lane.path.append(node)

    def _add_private(self, lane: Lane, blocks: int) -> None:
        lane.private_blocks += blocks
        self._private_blocks += blocks

    def _make_room(self, blocks: int) -> None:
        """Gives up cached blocks until so many are free. The caller has seen that there are enough."""
        self._shed(self.total_blocks - self.used_blocks - blocks)

    def _shed(self, most: int) -> None:
        """Gives up cached blocks, the longest unused first, until at most so many are left."""
        removed: list[int] = []
        while self._cached_nodes > most:
            lane = next(iter(self._holders.values()))
            if len(lane.path[-1].lanes) > 1:
                # Others hold all that this one does: it goes without loss.
                self._drop(self._holders.pop(lane.id), running=False)
                continue
            removed.append(self._leave(lane, running=False))
            if lane.path:
                self._operations.append(TrimLane(lane.id, len(lane.path) * self.block_tokens))
            else:
                self._drop(self._holders.pop(lane.id), running=False)
        self._forget(removed)

    def _drop(self, lane: Lane, *, running: bool) -> None:
        """The lane leaves all its nodes and its id is free."""
        removed = []
        while lane.path:
            gone = lane.path[-1]
            hash_ = self._leave(lane, running=running)
            if not gone.lanes:
                removed.append(hash_)
        if lane.scope.private is None:
            self._forget(removed)
        self._operations.append(TrimLane(lane.id, 0))
        self._lane_ids.append(lane.id)

    def _leave(self, lane: Lane, *, running: bool) -> int:
        """The lane gives up its last shared block; that block's hash."""
        node = lane.path.pop()
        node.lanes.discard(lane.id)
        if running:
            node.running -= 1
            if not node.running:
                self._used_nodes -= 1
                self._cached_nodes += 1
        if not node.lanes:
            self._cached_nodes -= 1
            parent = node.parent
            assert parent is not None
            del parent.children[node.ids]
            if parent.parent is None and not parent.children:
                self._roots.pop(lane.scope, None)
        return node.hash

    def _hashes(self, lane: Lane, ids: list[int], full: int) -> list[int]:
        if self._hash_blocks is None or lane.scope.private is not None:
            return []
        if len(lane.hashes) < full:
            # Of all ids known, so that a prompt computed in chunks is hashed once.
            lane.hashes = self._hash_blocks(ids, lane.scope.lora, lane.scope.salt)
        return lane.hashes

    def _announce(self, parent: int, hashes: list[int], scope: Scope) -> None:
        if hashes and self._hash_blocks is not None and scope.private is None:
            self._changes.append(BlocksStored(parent, tuple(hashes)))

    def _forget(self, hashes: list[int]) -> None:
        if hashes and self._hash_blocks is not None:
            self._changes.append(BlocksRemoved(tuple(hashes)))
