"""The KV accounts alone, against a ledger that is counted anew from the lanes after each call.

Texts are over two ids and blocks of two, so that nearly everything is shared with something.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.worker.engine import BlocksRemoved, BlocksStored
from headrace.worker.kv import (
    DISK_TRIES,
    CopyLane,
    FillPlace,
    Intake,
    KvAccounts,
    Lane,
    LoadBlock,
    MoveBlock,
    SaveBlock,
    Scope,
    TrimLane,
)

SIZE = 2


def names(ids: list[int], lora: str, salt: bytes) -> list[int]:
    return [hash((tuple(ids[: (n + 1) * SIZE]), lora, salt)) & (2**64 - 1) for n in range(len(ids) // SIZE)]


class Ledger:
    """What each lane's KV holds, by the operations alone; and what the events say is held."""

    def __init__(self, kv: KvAccounts, beside: int | None) -> None:
        self.kv = kv
        self.beside = beside
        self.cells: dict[int, dict[int, tuple[int, ...]]] = {}
        self.places: dict[int, list[tuple[int, ...]]] = {}
        self.running: dict[int, tuple[Lane, list[int], int]] = {}
        self.held: set[int] = set()

    def settle(self) -> None:
        for operation in self.kv.take_operations():
            if isinstance(operation, SaveBlock):
                saved = self.cells[operation.lane]
                self.places[operation.place] = [saved[p] for p in range(operation.start, operation.end)]
            elif isinstance(operation, LoadBlock):
                target = self.cells.setdefault(operation.lane, {})
                for position, text in zip(
                    range(operation.start, operation.end), self.places[operation.place], strict=True
                ):
                    assert position not in target
                    target[position] = text
            elif isinstance(operation, MoveBlock):
                self.places[operation.target] = self.places.pop(operation.source)
            elif isinstance(operation, FillPlace):
                self.places[operation.place] = pickle.loads(operation.kv)
                assert self.places[operation.place][-1][-SIZE:] == operation.ids
            elif isinstance(operation, TrimLane):
                lane = self.cells.setdefault(operation.lane, {})
                for position in [p for p in lane if p >= operation.start and (operation.end < 0 or p < operation.end)]:
                    del lane[position]
            else:
                assert isinstance(operation, CopyLane)
                source, target = self.cells[operation.source], self.cells.setdefault(operation.target, {})
                for position in range(operation.start, operation.end):
                    assert position not in target
                    target[position] = source[position]
        for change in self.kv.take_changes():
            if isinstance(change, BlocksStored):
                assert change.parent == 0 or change.parent in self.held
                assert not self.held & set(change.hashes)
                self.held |= set(change.hashes)
            else:
                assert isinstance(change, BlocksRemoved)
                assert set(change.hashes) <= self.held
                self.held -= set(change.hashes)
        self.check()

    def check(self) -> None:
        kv = self.kv
        nodes: dict[int, set[int]] = {}
        private = 0
        for lane, ids, computed in self.running.values():
            for node in lane.path:
                nodes.setdefault(id(node), set()).add(lane.id)
            private += lane.private_blocks
            assert lane.private_blocks >= 0
            text = self.cells.get(lane.id, {})
            assert text == {p: tuple(ids[: p + 1]) for p in range(computed)}, "the lane's KV is not its text's"
            flat = [token for node in lane.path for token in node.ids]
            assert flat == ids[: len(flat)]
        assert kv.used_blocks == len(nodes) + private
        assert kv.used_blocks <= kv.total_blocks
        assert kv.cached_blocks <= (kv.total_blocks - kv.used_blocks if self.beside is None else self.beside)
        # Every public block is announced, and nothing else.
        public = {node.hash for lane, _, _ in self.running.values() if lane.scope.private is None for node in lane.path}
        assert public <= self.held
        assert len(self.held) >= kv.cached_blocks


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(3, 14),
    lanes=st.integers(2, 6),
    beside=st.none() | st.integers(0, 9),
    on_disk=st.integers(0, 9),
)
def test_the_accounts_are_what_is_there(seed: int, blocks: int, lanes: int, beside: int | None, on_disk: int) -> None:
    dice = random.Random(seed)
    kv = KvAccounts(blocks, SIZE, lanes, hash_blocks=names, keep_beside=beside, on_disk=min(on_disk, beside or 0))
    ledger = Ledger(kv, beside)
    fresh = iter(range(10**6))

    def text() -> list[int]:
        return [dice.choice((0, 0, 0, 1)) for _ in range(dice.randint(1, blocks * SIZE))]

    def admit() -> None:
        if len(ledger.running) == lanes:
            return
        ids, private = text(), dice.random() < 0.1
        scope = Scope(salt=dice.choice((b"", b"", b"s")), private=next(fresh) if private else None)
        headroom = dice.randint(0, 2)
        lane = kv.admit(ids, scope, reuse=not private, headroom=headroom)
        if lane is None:
            # Alone everything fits, whatever is held for reuse.
            assert ledger.running or headroom + kv.blocks_for(len(ids)) > blocks
            return
        assert lane.id not in ledger.running
        reused = kv.there(lane)
        assert len(lane.path) * SIZE <= reused < len(ids)
        ledger.running[lane.id] = (lane, ids, reused)

    def find_the_disk_slow_or_not() -> None:
        kv.disk_pays = dice.random() < 0.5

    def some() -> tuple[Lane, list[int], int] | None:
        return dice.choice(list(ledger.running.values())) if ledger.running else None

    def compute() -> None:
        if (found := some()) is None:
            return
        lane, ids, computed = found
        if lane.scope.private is None:
            computed = kv.advance(lane, ids, computed)
        ledger.running[lane.id] = (lane, ids, computed)
        ledger.settle()
        end = dice.randint(computed, len(ids))
        for position in range(computed, end):
            ledger.cells.setdefault(lane.id, {})[position] = tuple(ids[: position + 1])
        ledger.running[lane.id] = (lane, ids, end)
        kv.commit(lane, ids, end)

    def grow() -> None:
        if (found := some()) is None:
            return
        lane, ids, computed = found
        longer = [*ids, dice.choice((0, 1))]
        if kv.grow(lane, len(longer)):
            assert lane.blocks * SIZE >= len(longer)
            # Grown ids are known to the accounts only when they are computed.
            lane.hashes = []
            ledger.running[lane.id] = (lane, longer, computed)
        else:
            assert kv.available_blocks == 0

    def fork() -> None:
        if (found := some()) is None or len(ledger.running) == lanes:
            return
        lane, ids, computed = found
        if computed != len(ids) or (twin := kv.fork(lane)) is None:
            return
        kv.join(twin, lane, computed)
        ledger.running[twin.id] = (twin, list(ids), computed)

    def close() -> None:
        if (found := some()) is None:
            return
        lane, ids, computed = found
        del ledger.running[lane.id]
        kv.close(lane, ids, computed, keep=dice.random() < 0.8)

    intakes: list[Intake] = []

    def take_in() -> None:
        """KV comes from elsewhere, a block now and a block then; what it was begun behind may be gone."""
        if not intakes or dice.random() < 0.3:
            intakes.append(Intake(text(), Scope(salt=dice.choice((b"", b"s")))))
            kv.begin_intake(intakes[-1])
        intake = dice.choice(intakes)
        for _ in range(dice.randint(1, 3)):
            if (intake.blocks + 1) * SIZE > len(intake.ids):
                return
            ends = range(intake.blocks * SIZE + 1, (intake.blocks + 1) * SIZE + 1)
            if not kv.take_in(intake, pickle.dumps([tuple(intake.ids[:end]) for end in ends])):
                intakes.remove(intake)
                return

    calls: list[Callable[[], None]] = [admit, admit, compute, compute, compute, grow, fork, close, take_in]
    calls.append(find_the_disk_slow_or_not)
    for _ in range(60):
        dice.choice(calls)()
        ledger.settle()
    while ledger.running:
        close()
        ledger.settle()
    assert kv.used_blocks == 0
    assert kv.cached_blocks == len(ledger.held)
    kv.clear_cached()
    ledger.settle()
    assert kv.cached_blocks == 0
    assert not ledger.held
    assert not any(ledger.cells.values())


def test_the_least_recently_used_goes_first_from_its_end() -> None:
    kv = KvAccounts(6, SIZE, 8, hash_blocks=names)

    def use(ids: list[int]) -> int:
        lane = kv.admit(ids, Scope(), reuse=True, headroom=0)
        assert lane is not None
        reused = len(lane.path)
        kv.commit(lane, ids, len(ids))
        kv.close(lane, ids, len(ids), keep=True)
        return reused

    old, new = [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]
    assert [use(old), use(new), use(old)] == [0, 0, 2]
    assert kv.cached_blocks == 4
    # Four blocks are wanted and two are free: of the one used longest ago both go.
    assert use([3] * 8) == 0
    assert kv.cached_blocks == 6
    assert use(old) == 2
    assert use(new) == 0


def test_what_is_kept_beside_is_bounded_and_takes_nothing_from_those_that_run() -> None:
    accounts = KvAccounts(3, 4, 16, hash_blocks=None, keep_beside=3)
    for start in range(0, 5000, 1000):
        ids = list(range(start, start + 9))
        # All of the KV, beside whatever is kept.
        lane = accounts.admit(ids, Scope(), reuse=True, headroom=0)
        assert lane is not None
        assert lane.blocks == 3
        accounts.close(lane, ids, len(ids), keep=True)
        assert accounts.cached_blocks <= 3
    # The youngest stays: its two full blocks are found again, and are still kept while they are used.
    again = accounts.admit([*range(4000, 4009), 1], Scope(), reuse=True, headroom=0)
    assert again is not None
    assert len(again.path) == 2
    assert accounts.cached_blocks == 3


def test_what_memory_has_no_room_for_goes_to_disk_and_is_loaded_from_there_while_that_pays() -> None:
    kv = KvAccounts(8, SIZE, 4, hash_blocks=None, keep_beside=6, on_disk=4)

    def use(start: int) -> list[object]:
        ids = [start] * (2 * SIZE + 1)
        lane = kv.admit(ids, Scope(), reuse=True, headroom=0)
        assert lane is not None
        kv.commit(lane, ids, len(ids))
        kv.close(lane, ids, len(ids), keep=True)
        return [each for each in kv.take_operations() if isinstance(each, (SaveBlock, LoadBlock, MoveBlock))]

    def loaded(start: int) -> list[int]:
        return [each.place for each in use(start) if isinstance(each, LoadBlock)]

    assert all(isinstance(each, SaveBlock) for each in use(1))
    # The oldest make room, from their end, and are moved before their places are written over.
    first, second, third, fourth = use(2)
    assert (first, third) == (MoveBlock(1, 2), MoveBlock(0, 3)) or (first, third) == (MoveBlock(0, 2), MoveBlock(1, 3))
    assert isinstance(second, SaveBlock)
    assert isinstance(fourth, SaveBlock)
    assert {second.place, fourth.place} == {0, 1}
    use(3)
    assert kv.cached_blocks == 6
    assert all(place >= 2 for place in loaded(1))
    assert len(loaded(1)) == 2
    kv.disk_pays = False
    # Now and then all the same: it may have become quicker.
    tries = [len(loaded(1)) for _ in range(2 * DISK_TRIES)]
    assert (tries.count(2), tries.count(0)) == (2, 2 * DISK_TRIES - 2)
    assert len(loaded(3)) == 2
    # Full: the least recently used goes, wherever it is.
    kv.disk_pays = True
    use(4)
    assert kv.cached_blocks == 6
    assert not loaded(2)


def test_kv_from_elsewhere_is_found_by_whoever_comes_and_pushes_out_no_beginning_of_its_own() -> None:
    for beside in (None, 4):
        kv = KvAccounts(4, SIZE, 4, hash_blocks=names, keep_beside=beside)
        intake = Intake([1] * 12, Scope())
        assert kv.begin_intake(intake) == 0
        assert [kv.take_in(intake, b"") for _ in range(5)] == [True] * 4 + [False]
        assert kv.cached_blocks == 4
        # What was there goes for the next, from its end.
        other = Intake([2] * 6, Scope())
        kv.begin_intake(other)
        assert all(kv.take_in(other, b"") for _ in range(3))
        assert kv.begin_intake(Intake([1] * 12, Scope())) == 1
        assert kv.begin_intake(Intake([2] * 6, Scope(salt=b"s"))) == 0
        lane = kv.admit([2] * 7, Scope(), reuse=True, headroom=0)
        assert lane is not None
        assert len(lane.path) == 3


def test_a_block_that_begins_alike_is_computed_from_where_it_differs() -> None:
    """Of a head that ends inside a block nothing is computed twice, whoever holds it; few ids are not worth it."""

    def eights(ids: list[int], lora: str, salt: bytes) -> list[int]:
        return [hash((tuple(ids[: end + 8]), lora, salt)) & (2**64 - 1) for end in range(0, len(ids) - 7, 8)]

    for beside in (None, 8):
        ledger = Ledger(kv := KvAccounts(16, 8, 4, hash_blocks=eights, keep_beside=beside), beside)

        def admit(ids: list[int], kv: KvAccounts = kv, ledger: Ledger = ledger) -> Lane:
            lane = kv.admit(ids, Scope(), reuse=True, headroom=0)
            assert lane is not None
            ledger.running[lane.id] = (lane, ids, kv.there(lane))
            ledger.settle()
            return lane

        def compute(lane: Lane, ids: list[int], kv: KvAccounts = kv, ledger: Ledger = ledger) -> None:
            for position in range(kv.there(lane), len(ids)):
                ledger.cells.setdefault(lane.id, {})[position] = tuple(ids[: position + 1])
            ledger.running[lane.id] = (lane, ids, len(ids))
            kv.commit(lane, ids, len(ids))
            ledger.settle()

        head = list(range(100, 113))
        first, second, third, fourth = (
            [*head, *range(10)],
            [*head, *range(20, 30)],
            [*head[:9], 7, 7, 7, 7],
            [*head, 20, 1],
        )
        one = admit(first)
        compute(one, first)
        # From whoever runs.
        other = admit(second)
        assert kv.there(other) == len(head)
        compute(other, second)
        del ledger.running[one.id]
        kv.close(one, first, len(first), keep=True)
        ledger.settle()
        # One id is nothing; of two blocks that begin alike the one with more.
        assert kv.there(admit(third)) == 8
        last = admit(fourth)
        assert kv.there(last) == len(head) + 1
        compute(last, fourth)
        del ledger.running[other.id], ledger.running[last.id]
        kv.close(other, second, len(second), keep=True)
        kv.close(last, fourth, len(fourth), keep=True)
        ledger.settle()
        # From what is kept; of the same text all but one id.
        assert kv.there(admit([*head, *range(40, 50)])) == len(head)
        assert kv.there(admit([*head, 20, 21, 22])) == len(head) + 2


def test_who_has_begun_with_another_block_follows_the_same_one_when_it_comes() -> None:
    kv = KvAccounts(16, 4, 4, hash_blocks=None, keep_beside=8)
    old, head = [1, 2, 3, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8]
    lane = kv.admit(old, Scope(), reuse=True, headroom=0)
    assert lane is not None
    kv.commit(lane, old, len(old))
    first = kv.admit([*head, 1], Scope(), reuse=True, headroom=0)
    second = kv.admit([*head, 2], Scope(), reuse=True, headroom=0)
    assert first is not None
    assert second is not None
    assert (kv.there(first), kv.there(second)) == (3, 3)
    kv.commit(first, [*head, 1], 9)
    assert kv.advance(second, [*head, 2], 3) == 8
    assert second.blocks == 3


def test_what_is_kept_already_is_not_saved_again() -> None:
    accounts = KvAccounts(8, SIZE, 4, hash_blocks=None, keep_beside=8)
    saved = []
    for _ in range(3):
        lane = accounts.admit([1, 2, 3, 4, 5], Scope(), reuse=True, headroom=0)
        assert lane is not None
        accounts.close(lane, [1, 2, 3, 4, 5], 5, keep=True)
        saved.append(sum(isinstance(each, SaveBlock) for each in accounts.take_operations()))
    assert saved == [2, 0, 0]


def test_a_hot_beginning_cannot_push_out_all_others() -> None:
    for beside in (16, None):
        accounts = KvAccounts(16, SIZE, 4, hash_blocks=names, keep_beside=beside)

        def use(ids: list[int], accounts: KvAccounts = accounts) -> int:
            lane = accounts.admit(ids, Scope(), reuse=True, headroom=0)
            assert lane is not None
            reused = len(lane.path)
            accounts.commit(lane, ids, len(ids))
            accounts.close(lane, ids, len(ids), keep=True)
            return reused

        quiet = [[100 * each] * 5 for each in range(1, 4)]
        assert [use(ids) for ids in quiet] == [0, 0, 0]
        # One first block with ever new continuations, a hundred times as many blocks as there are places.
        for number in range(800):
            use([1, 1, number, number, -number, -number, 0])
        assert [use(ids) for ids in quiet] == [2, 2, 2]
        # Nobody else wants room: it may have all that is left.
        assert accounts.cached_blocks > 12


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), beside=st.none() | st.integers(0, 40))
def test_nothing_grows_under_prompts_that_are_made_to(seed: int, beside: int | None) -> None:
    """New beginnings, endless continuations of one, deep repetitions, new scopes, none ever alike: what is remembered
    stays within the blocks that there are, in the KV and beside it."""
    dice = random.Random(seed)
    blocks, lanes = 24, 4
    kv = KvAccounts(blocks, SIZE, lanes, hash_blocks=names, keep_beside=beside)
    most = blocks + (blocks if beside is None else beside)
    running: list[tuple[Lane, list[int]]] = []

    def prompt(number: int) -> tuple[list[int], Scope]:
        length = dice.randint(1, blocks * SIZE)
        kind = dice.randrange(4)
        if kind == 0:
            return [number] * length, Scope()
        if kind == 1:
            return [0] * (length // 2) + [number] * (length - length // 2), Scope()
        if kind == 2:
            return [0] * length, Scope(salt=number.to_bytes(4), private=dice.choice((None, number)))
        return [dice.randrange(3) for _ in range(length)], Scope(lora=dice.choice(("", "a")))

    for number in range(1, 300):
        ids, scope = prompt(number)
        while (lane := kv.admit(ids, scope, reuse=scope.private is None, headroom=0)) is None:
            old, text = running.pop(dice.randrange(len(running)))
            kv.close(old, text, dice.randint(len(old.path) * SIZE, len(text)), keep=dice.random() < 0.9)
        kv.commit(lane, ids, len(ids))
        running.append((lane, ids))
        kv.take_operations()
        kv.take_changes()
        nodes = list(kv._roots.values())
        for node in nodes:
            nodes += node.children.values()
        assert len(nodes) - len(kv._roots) <= most
        assert len(kv._roots) <= most
        places = [node.place for node in nodes if node.place is not None]
        assert sorted([*places, *kv._free_places]) == list(range(most - blocks))
        assert sum(map(len, kv._kept_of.values())) == len(kv._kept) == len(places)
        assert kv.used_blocks <= blocks
