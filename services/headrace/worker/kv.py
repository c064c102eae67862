"""KV accounts: what a batching engine may hold, and what it can reuse.

KV memory is counted in *blocks* of ``block_tokens`` tokens, with a hard bound. A *lane* is one running sequence as the
engine knows it (llama.cpp's ``seq_id``): a run of positions from 0. A lane's blocks are either *shared*, nodes of a
tree in which a full block of ids and all before it is stored once, or *private*, its unfinished tail.

The tree is a radix tree over full blocks: a child is found by its ids themselves, so that a hash (which is only a name
for others, in block events) can never make two texts the same. Its roots are scopes: adapter and tenant salt.
The invariant that all rests on: **a lane that is on a node is on all of the node's ancestors.** So any one lane of a
node can serve as the source from which its whole prefix is copied.

Where no further block is the same, one may begin alike: what a lane has in common with it is copied too, and computed
on from there. So of a beginning that ends inside a block nothing is computed twice either; the block is the lane's own.

What no lane uses any more is *kept* for reuse, block by block, each in a numbered *place*: saved when its last lane
leaves, loaded when a new one comes. Places are either **beside** the KV (``keep_beside`` of them: llama.cpp, whose
attention looks at every cell in use, so that what is kept among the cells would slow down every step of everybody; its
places are plain memory, and the last ``on_disk`` of them a file: what is saved is in memory first, and moves there when
others want its place) or **in** it, as cells that are free on demand. The least recently used goes first; a path is
touched from its end, so that a block always goes before those it follows. A *beginning* (all that has the same first
block) that has more than its share of what is kept makes room among its own, so that one hot prompt with ever new
continuations cannot push out all others.

Nothing here touches an engine: changes come out as operations (``take_operations``), to be applied in order before the
next step, and as block changes (``take_changes``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from headrace.worker.engine import BlockChange, BlocksRemoved, BlocksStored

#: Of what is kept, what one beginning may have while others want room: the share that the prefix index gives a root.
BEGINNING_SHARE = 0.5

#: Of a block that only begins alike, so many parts in one are worth being copied.
LEAST_PART = 4

#: When what is on disk takes longer to load than to compute, one find in so many is loaded all the same, to see.
DISK_TRIES = 16

#: Blocks that follow the same one and are looked at for how they begin, the newest first.
MOST_ALIKE = 8

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


@dataclass(frozen=True, slots=True)
class SaveBlock:
    """The KV of ``lane`` at positions ``start`` to ``end`` is written to ``place``, over what was there."""

    lane: int
    place: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Lane ``lane`` gets the KV that is in ``place``, which stays there: positions ``start`` to ``end``."""

    lane: int
    place: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class MoveBlock:
    """What is in place ``source`` is in ``target`` from now on."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class FillPlace:
    """KV that another worker has computed for these ids (and all before them) is written to ``place``."""

    place: int
    ids: tuple[int, ...]
    kv: bytes


Operation = CopyLane | TrimLane | SaveBlock | LoadBlock | MoveBlock | FillPlace


@dataclass(frozen=True, slots=True)
class Scope:
    """Within one scope KV may be shared. ``private`` is a request's own key when it must not share with others."""

    lora: str = ""
    salt: bytes = b""
    private: Hashable = None


class _Node:
    """A full block: on the lanes that run over it, or kept in a place, or both."""

    __slots__ = ("beginning", "children", "hash", "ids", "lanes", "parent", "place", "scope")

    def __init__(self, parent: _Node | None, scope: Scope, ids: tuple[int, ...], hash_: int) -> None:
        self.parent = parent
        #: The first block of its path; a root has none, and is above all beginnings.
        self.beginning: _Node = self if parent is None or parent.parent is None else parent.beginning
        self.scope = scope
        self.ids = ids
        self.hash = hash_
        self.children: dict[tuple[int, ...], _Node] = {}
        self.lanes: set[int] = set()
        #: Where it is kept; None = nowhere.
        self.place: int | None = None


@dataclass(eq=False, slots=True)
class Lane:
    """One sequence's KV."""

    id: int
    scope: Scope
    #: Its shared blocks, from the root's child on.
    path: list[_Node] = field(default_factory=list)
    private_blocks: int = 0
    #: Tokens behind the path that were copied from a block which begins alike, while nothing is computed after them.
    begun: int = 0
    hashes: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return len(self.path) + self.private_blocks


def _is_there(node: _Node) -> bool:
    return bool(node.lanes) or node.place is not None


def _common(these: Sequence[int], those: Sequence[int]) -> int:
    """How many ids both begin with."""
    count = 0
    for one, other in zip(these, those, strict=False):
        if one != other:
            break
        count += 1
    return count


class Intake:
    """A prompt whose KV comes from another worker, block by block, and how far it has come."""

    __slots__ = ("blocks", "hashes", "ids", "node", "scope")

    def __init__(self, ids: list[int], scope: Scope) -> None:
        self.ids = ids
        self.scope = scope
        #: Leading blocks that are held, and the last of them.
        self.blocks = 0
        self.node: _Node | None = None
        self.hashes: list[int] = []


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
        keep_beside: int | None = None,
        on_disk: int = 0,
    ) -> None:
        """``keep``: whether anything is kept for reuse; ``keep_beside``: so many blocks beside the KV, None = in it;
        ``on_disk``: so many of these."""
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self._hash_blocks = hash_blocks
        self._beside = keep_beside is not None
        places = total_blocks if keep_beside is None else keep_beside
        self._places = places if keep else 0
        #: Places from here on are on disk.
        self._in_memory = self._places - (on_disk if keep and self._beside else 0)
        self._free_places = list(range(self._in_memory - 1, -1, -1))
        self._free_on_disk = list(range(self._places - 1, self._in_memory - 1, -1))
        #: Whether what is on disk is sooner loaded than computed.
        self.disk_pays = True
        self._disk_finds = 0
        self._lane_ids = list(range(lanes - 1, -1, -1))
        self._roots: dict[Scope, _Node] = {}
        #: All that have a place; the least recently used first, no block before those that follow it.
        self._kept: OrderedDict[_Node, None] = OrderedDict()
        #: Those of them that are in memory, in that order.
        self._kept_in_memory: OrderedDict[_Node, None] = OrderedDict()
        #: The same by beginning, each in that order.
        self._kept_of: dict[_Node, OrderedDict[_Node, None]] = {}
        self._used_nodes = 0
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
        """Kept for reuse: free on demand when they are in the KV, otherwise beside it."""
        return len(self._kept)

    @property
    def available_blocks(self) -> int:
        """Free, or free on demand."""
        return self.total_blocks - self.used_blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    @property
    def has_operations(self) -> bool:
        return bool(self._operations)

    def take_operations(self) -> list[Operation]:
        operations, self._operations = self._operations, []
        return operations

    def take_changes(self) -> list[BlockChange]:
        changes, self._changes = self._changes, []
        return changes

    # --- a lane's life -----------------------------------------------------------------------------------------------

    def admit(self, ids: list[int], scope: Scope, *, reuse: bool, headroom: int) -> Lane | None:
        """A lane with blocks for all of the ids, of which :meth:`there` says how many are there already; None when they
        do not fit beside ``headroom`` further blocks. At least the last id is left to be computed."""
        if not self._lane_ids:
            return None
        path = self._match(self._roots.get(scope), 0, ids) if reuse else []
        revived = sum(1 for node in path if not node.lanes)
        wanted = self.blocks_for(len(ids)) - len(path)
        if wanted + revived + headroom > self.available_blocks:
            return None
        lane = Lane(self._lane_ids.pop(), scope)
        self._attach(lane, path)
        self._add_private(lane, wanted)
        if reuse:
            self._begin(lane, ids)
        return lane

    def there(self, lane: Lane) -> int:
        """Tokens that were there when it came; before anything is computed on it."""
        return len(lane.path) * self.block_tokens + lane.begun

    def advance(self, lane: Lane, ids: list[int], computed: int) -> int:
        """Looks again for blocks that others have computed since; the tokens that are there now."""
        if computed != self.there(lane):
            return computed
        found = self._match(lane.path[-1] if lane.path else self._roots.get(lane.scope), len(lane.path), ids)
        if found:
            if lane.begun:
                self._operations.append(TrimLane(lane.id, len(lane.path) * self.block_tokens))
                lane.begun = 0
            self._add_private(lane, -len(found))
            self._attach(lane, found)
        if not lane.begun:
            self._begin(lane, ids)
        return self.there(lane)

    def grow(self, lane: Lane, tokens: int) -> bool:
        """Makes the lane hold so many tokens, giving up kept blocks for it; False when there are none left."""
        wanted = self.blocks_for(tokens) - lane.blocks
        if wanted <= 0:
            return True
        if wanted > self.available_blocks:
            return False
        self._add_private(lane, wanted)
        return True

    def commit(self, lane: Lane, ids: list[int], computed: int) -> None:
        """The first ``computed`` ids have been computed: their full blocks become shared.

        A block that another lane has computed meanwhile is stored once: this lane gives up its own and takes that one.
        """
        lane.begun = 0
        full = computed // self.block_tokens
        first = len(lane.path)
        if full <= first:
            return
        parent = lane.path[-1] if lane.path else self._roots.setdefault(lane.scope, _Node(None, lane.scope, (), 0))
        hashes = self._hashes(lane, ids, full)
        stored: list[int] = []
        stored_parent = parent.hash
        for index in range(first, full):
            start = index * self.block_tokens
            end = start + self.block_tokens
            block = tuple(ids[start:end])
            node = parent.children.get(block)
            if node is None:
                node = _Node(parent, lane.scope, block, hashes[index] if hashes else 0)
                parent.children[block] = node
                stored.append(node.hash)
            else:
                self._announce(stored_parent, stored, lane.scope)
                stored, stored_parent = [], node.hash
                if node.lanes:
                    source = next(iter(node.lanes))
                    self._operations.append(TrimLane(lane.id, start, end))
                    self._operations.append(CopyLane(source, lane.id, start, end))
            self._add_private(lane, -1)
            self._enter(lane, node)
            parent = node
        self._announce(stored_parent, stored, lane.scope)

    def fork(self, lane: Lane) -> Lane | None:
        """A lane that will share what this one computes (``join``); None when there is no room. It holds one private
        block meanwhile: the copy of the unfinished tail, or the next block."""
        if self.available_blocks < 1 or not self._lane_ids:
            return None
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
        """The sequence is over. With ``keep`` those of its full blocks that nobody else runs on are kept for others."""
        keep = keep and self._places > 0 and lane.scope.private is None
        if keep:
            self.commit(lane, ids, computed)
        self._add_private(lane, -lane.private_blocks)
        removed: list[int] = []
        while lane.path:
            depth = len(lane.path)
            node = lane.path.pop()
            node.lanes.discard(lane.id)
            if node.lanes:
                self._touch(node)
                continue
            self._used_nodes -= 1
            # What lies deeper than there are places would only push out itself.
            if keep and node.place is None and depth <= self._places:
                self._save(lane, node, depth, removed)
            if node.place is None:
                self._remove(node, removed)
            else:
                self._touch(node)
        self._operations.append(TrimLane(lane.id, 0))
        self._lane_ids.append(lane.id)
        self._forget(removed)

    def undo(self, lane: Lane, computed: int) -> None:
        """What lies beyond the first ``computed`` tokens was written by a step that does not count."""
        self._operations.append(TrimLane(lane.id, computed))

    def clear_cached(self) -> None:
        """Gives up all that is kept for reuse."""
        removed: list[int] = []
        while self._kept:
            self._give_up_one(None, removed)
        self._forget(removed)

    # --- KV from elsewhere -------------------------------------------------------------------------------------------

    def begin_intake(self, intake: Intake) -> int:
        """Leading blocks of the prompt that are held already; the others may be taken in."""
        found: list[_Node] = []
        node = self._roots.get(intake.scope)
        for index in range(len(intake.ids) // self.block_tokens):
            node = node.children.get(self._block(intake.ids, index)) if node is not None else None
            if node is None:
                break
            found.append(node)
        intake.blocks = len(found)
        intake.node = found[-1] if found else None
        self._touch_path(intake.node)
        return intake.blocks

    def take_in(self, intake: Intake, kv: bytes) -> bool:
        """The KV of the prompt's next block: it is kept as if it had been computed here. False when there is no room
        that would not be its own beginning's, or that is gone; no more of it is wanted then."""
        parent, depth = intake.node, intake.blocks
        if parent is None:
            parent = self._roots.get(intake.scope) or _Node(None, intake.scope, (), 0)
        elif not _is_there(parent):
            return False
        ids = self._block(intake.ids, depth)
        node = parent.children.get(ids)
        if node is None:
            removed: list[int] = []
            place = self._place_for(depth, parent, removed)
            self._forget(removed)
            if place is None:
                self._touch_path(intake.node)
                return False
            if depth and not _is_there(parent):
                # Nobody had touched it for long.
                self._give_back(place)
                return False
            if not intake.hashes and self._hash_blocks is not None:
                intake.hashes = self._hash_blocks(intake.ids, intake.scope.lora, intake.scope.salt)
            node = _Node(parent, intake.scope, ids, intake.hashes[depth] if intake.hashes else 0)
            if parent.parent is None:
                self._roots[intake.scope] = parent
            parent.children[ids] = node
            self._keep(node, place)
            self._operations.append(FillPlace(place, ids, kv))
            self._announce(parent.hash, [node.hash], intake.scope)
        intake.node, intake.blocks = node, depth + 1
        # Now and then, and at the end: a beginning must not go before what follows it.
        if intake.blocks % 8 == 0 or intake.blocks == len(intake.ids) // self.block_tokens:
            self._touch_path(node)
        return True

    def _place_for(self, depth: int, parent: _Node, removed: list[int]) -> int | None:
        """A free place for a block behind ``depth`` others, of which ``parent`` is the last."""
        room = self._places if self._beside else self.available_blocks
        while not self._has_free_place or len(self._kept) >= room:
            # With so few kept, the oldest may be its own beginning.
            if len(self._kept) <= depth:
                return None
            alike = len(self._kept_of.get(parent.beginning, ()))
            self._give_up_one(parent.beginning if alike > depth else None, removed)
        return self._take_place() if depth < room else None

    def _touch_path(self, node: _Node | None) -> None:
        while node is not None and node.parent is not None:
            self._touch(node)
            node = node.parent

    def _block(self, ids: list[int], index: int) -> tuple[int, ...]:
        return tuple(ids[index * self.block_tokens : (index + 1) * self.block_tokens])

    # --- inside: the tree --------------------------------------------------------------------------------------------

    def _match(self, node: _Node | None, depth: int, ids: list[int]) -> list[_Node]:
        """The blocks of the ids that are there below ``node``, which is ``depth`` blocks deep."""
        found: list[_Node] = []
        size = self.block_tokens
        for index in range(depth, (len(ids) - 1) // size):
            if node is None:
                break
            node = node.children.get(tuple(ids[index * size : (index + 1) * size]))
            if node is not None:
                found.append(node)
        return found if self.disk_pays else self._without_disk(found)

    def _is_on_disk(self, node: _Node) -> bool:
        return not node.lanes and node.place is not None and node.place >= self._in_memory

    def _without_disk(self, found: list[_Node]) -> list[_Node]:
        """What of these is worth loading while the disk is slower than computing."""
        first = next((at for at, node in enumerate(found) if self._is_on_disk(node)), None)
        if first is None:
            return found
        self._disk_finds += 1
        return found if self._disk_finds % DISK_TRIES == 0 else found[:first]

    def _attach(self, lane: Lane, nodes: Sequence[_Node]) -> None:
        """The lane takes over blocks that are there: first those of running lanes, then those that are kept."""
        size = self.block_tokens
        start = position = len(lane.path) * size
        source: int | None = None
        for node in nodes:
            if node.lanes:
                source, position = next(iter(node.lanes)), position + size
        if source is not None:
            self._operations.append(CopyLane(source, lane.id, start, position))
        for node in nodes:
            if not node.lanes:
                assert node.place is not None
                self._operations.append(LoadBlock(lane.id, node.place, position, position + size))
                position += size
            self._enter(lane, node)
        for node in reversed(lane.path):
            self._touch(node)

    def _begin(self, lane: Lane, ids: list[int]) -> None:
        """Copies what the lane's next block has in common with one that is there, where that is worth it."""
        parent = lane.path[-1] if lane.path else self._roots.get(lane.scope)
        if parent is None:
            return
        start = len(lane.path) * self.block_tokens
        own = ids[start : start + self.block_tokens]
        # The very same when it is the last: of it, too, one id is to be computed.
        same = parent.children.get(tuple(own))
        alike = (same,) if same is not None else islice(reversed(parent.children.values()), MOST_ALIKE)
        most, best = max(self.block_tokens // LEAST_PART, 1) - 1, None
        for node in alike:
            common = min(_common(own, node.ids), len(ids) - 1 - start)
            if common > most and (self.disk_pays or not self._is_on_disk(node)):
                most, best = common, node
        if best is None:
            return
        lane.begun = most
        if best.lanes:
            self._operations.append(CopyLane(next(iter(best.lanes)), lane.id, start, start + most))
        else:
            assert best.place is not None
            self._operations.append(LoadBlock(lane.id, best.place, start, start + self.block_tokens))
            self._operations.append(TrimLane(lane.id, start + most))
        self._touch_path(best)

    def _enter(self, lane: Lane, node: _Node) -> None:
        if not node.lanes:
            self._used_nodes += 1
            if not self._beside and node.place is not None:
                self._vacate(node)
        node.lanes.add(lane.id)
        lane.path.append(node)

    def _remove(self, node: _Node, removed: list[int]) -> None:
        """A block that is neither running nor kept, and all that follows it: without it they can't be found."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.ids]
        if parent.parent is None and not parent.children:
            self._roots.pop(node.scope, None)
        pending = [node]
        while pending:
            gone = pending.pop()
            pending.extend(gone.children.values())
            if gone.place is not None:
                self._vacate(gone)
            if gone.scope.private is None:
                removed.append(gone.hash)

    def _add_private(self, lane: Lane, blocks: int) -> None:
        """Kept blocks make room for it where they are in the KV; the caller has seen that there is enough."""
        lane.private_blocks += blocks
        self._private_blocks += blocks
        if not self._beside and len(self._kept) > self.total_blocks - self.used_blocks:
            removed: list[int] = []
            while len(self._kept) > self.total_blocks - self.used_blocks:
                self._give_up_one(lane.path[0] if lane.path else None, removed)
            self._forget(removed)

    # --- inside: what is kept ----------------------------------------------------------------------------------------

    def _save(self, lane: Lane, node: _Node, depth: int, removed: list[int]) -> None:
        if not self._has_free_place:
            self._give_up_one(node.beginning, removed)
        self._keep(node, self._take_place())
        assert node.place is not None
        end = depth * self.block_tokens
        self._operations.append(SaveBlock(lane.id, node.place, end - self.block_tokens, end))

    @property
    def _has_free_place(self) -> bool:
        return bool(self._free_places or self._free_on_disk)

    def _take_place(self) -> int:
        """One that is free; in memory, if need be by moving to disk what has not been used for longest."""
        if self._free_places:
            return self._free_places.pop()
        place = self._free_on_disk.pop()
        if not self._kept_in_memory:
            return place
        oldest, _ = self._kept_in_memory.popitem(last=False)
        assert oldest.place is not None
        self._operations.append(MoveBlock(oldest.place, place))
        oldest.place, place = place, oldest.place
        return place

    def _give_back(self, place: int) -> None:
        (self._free_places if place < self._in_memory else self._free_on_disk).append(place)

    def _keep(self, node: _Node, place: int) -> None:
        node.place = place
        if place < self._in_memory:
            self._kept_in_memory[node] = None
        self._kept[node] = None
        self._kept_of.setdefault(node.beginning, OrderedDict())[node] = None

    def _touch(self, node: _Node) -> None:
        if node.place is not None:
            self._kept.move_to_end(node)
            if node in self._kept_in_memory:
                self._kept_in_memory.move_to_end(node)
            self._kept_of[node.beginning].move_to_end(node)

    def _vacate(self, node: _Node) -> None:
        assert node.place is not None
        del self._kept[node]
        self._kept_in_memory.pop(node, None)
        kept_of = self._kept_of[node.beginning]
        del kept_of[node]
        if not kept_of:
            del self._kept_of[node.beginning]
        self._give_back(node.place)
        node.place = None

    def _give_up_one(self, beginning: _Node | None, removed: list[int]) -> None:
        """The least recently used of all, or of the beginning that wants room when it has more than its share."""
        own = self._kept_of.get(beginning) if beginning is not None else None
        if own is None or len(own) <= BEGINNING_SHARE * len(self._kept):
            own = self._kept
        node = next(iter(own))
        self._vacate(node)
        if not node.lanes:
            self._remove(node, removed)

    # --- inside: what others hear ------------------------------------------------------------------------------------

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
