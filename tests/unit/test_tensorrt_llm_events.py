"""TensorRT-LLM's KV events in our names: order, gaps, scopes, ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace._gateway import block_hashes
from headrace.worker.engine import BlockChange, BlocksCleared, BlocksRemoved, BlocksStored
from headrace.worker.engines.tensorrt_llm_events import KvEvents, Scope, v1_block_key

BLOCK = 4


def name(ids: list[int], lora: str, salt: bytes, parent: int = 0) -> list[int]:
    return block_hashes(ids, BLOCK, "m", lora, salt, parent)


class Engine:
    """Says what an engine would say."""

    def __init__(self) -> None:
        self.next_id = 0

    def event(self, data: dict[str, Any], window: int = 64, **more: Any) -> dict[str, Any]:
        self.next_id += 1
        return {"event_id": self.next_id - 1, "data": data, "window_size": window, **more}

    def created(self, blocks: int = 100, **more: Any) -> dict[str, Any]:
        return self.event({"type": "created", "num_blocks_per_cache_level": [blocks, 0]}, **more)

    def stored(self, ids: list[int], done: int = 0, lora: int = 0, salt: int = 0, **more: Any) -> dict[str, Any]:
        """Blocks of these ids after the first ``done`` blocks."""
        fields = more.pop("fields", {})
        hashes = chain(ids, lora, salt)
        blocks = [
            {
                "type": "stored_block",
                "block_hash": value,
                "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
                "cache_level": 0,
                "priority": 35,
                **fields,
            }
            for value, tokens in hashes[done:]
        ]
        parent = hashes[done - 1][0] if done else None
        return self.event({"type": "stored", "parent_hash": parent, "blocks": blocks}, **more)

    def removed(self, *hashes: int, **more: Any) -> dict[str, Any]:
        return self.event({"type": "removed", "block_hashes": list(hashes)}, **more)


def chain(ids: list[int], lora: int = 0, salt: int = 0) -> list[tuple[int, list[int]]]:
    found, parent = [], 0
    for start in range(0, len(ids), BLOCK):
        tokens = ids[start : start + BLOCK]
        parent = v1_block_key(tokens, parent, lora, salt)
        found.append((parent, tokens))
    return found


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (([1, 2, 3],), 14332563581206),
        ((list(range(32)),), 17461474797406555673),
        ((list(range(32, 64)), 17461474797406555673), 949730894463544763),
        (([1, 2, 3], 0, 0, 7), 17112679496117676201),
        (([1, 2, 3], 0, 7), 1346990406027235716),
    ],
)
def test_the_engines_own_hash(arguments: tuple[Any, ...], value: int) -> None:
    assert v1_block_key(*arguments) == value


def test_blocks_are_named_by_our_rule_along_their_chain() -> None:
    engine, events = Engine(), KvEvents(name, BLOCK)
    ids = list(range(50, 62))
    ours = name(ids, "", b"")
    changes = events.take([engine.created(), engine.stored(ids[:8]), engine.stored(ids, done=2)])
    assert changes == [BlocksStored(0, tuple(ours[:2])), BlocksStored(ours[1], (ours[2],))]
    assert (events.capacity_blocks, events.held_blocks) == (100, 3)
    last = chain(ids)[2][0]
    assert events.take([engine.removed(last, 12345)]) == [BlocksRemoved((ours[2],))]
    assert events.held_blocks == 2


def test_partial_blocks_and_short_windows_are_left_out() -> None:
    engine, events = Engine(), KvEvents(name, BLOCK)
    ids = list(range(50, 56))
    changes = events.take(
        [engine.created(window=16), engine.created(window=64), engine.stored([1] * 4, window=16), engine.stored(ids)]
    )
    assert changes == [BlocksStored(0, tuple(name(ids, "", b"")))]


def test_a_gap_forgets_all_and_learns_anew() -> None:
    engine, events = Engine(), KvEvents(name, BLOCK)
    ids, others = list(range(50, 62)), list(range(80, 88))
    events.take([engine.created(), engine.stored(ids[:8])])
    engine.next_id += 1
    changes = events.take([engine.stored(others), engine.stored(ids, done=2), engine.stored(ids)])
    # The third block's parents were forgotten; it is known again when they are.
    assert changes == [
        BlocksCleared(),
        BlocksStored(0, tuple(name(others, "", b""))),
        BlocksStored(0, tuple(name(ids, "", b""))),
    ]
    assert events.gaps == 1


def test_an_engine_that_starts_again_begins_at_nought() -> None:
    engine, events = Engine(), KvEvents(name, BLOCK)
    events.take([engine.created(), engine.stored([1] * 4)])
    assert events.take([Engine().created(50)]) == [BlocksCleared()]
    assert events.capacity_blocks == 50


def test_scopes_are_found_by_the_engines_hash_until_it_says_them() -> None:
    legal = Scope(lora_id=1, lora="legal")
    salted = Scope(salt_text="aa", salt_id=77, salt=b"\xaa")
    secret = Scope(salt_text="bb", salt_id=78, salt=b"\xbb", told=False)
    ids = list(range(50, 58))
    engine, events = Engine(), KvEvents(name, BLOCK)
    for scope in (legal, salted, secret):
        events.use(scope)
    events.take([engine.created()])
    for scope in (legal, salted, Scope()):
        changes = events.take([engine.stored(ids, lora=scope.lora_id, salt=scope.salt_id)])
        assert changes == [BlocksStored(0, tuple(name(ids, scope.lora, scope.salt)))]
    assert events.take([engine.stored(ids, salt=78), engine.stored(ids, salt=99)]) == []
    # From 1.3 on.
    said = {"cache_salt": "aa", "lora_id": None}
    assert events.take([engine.stored([9] * 4, fields=said)]) == [BlocksStored(0, tuple(name([9] * 4, "", b"\xaa")))]


def test_ranks_count_for_themselves_and_a_block_is_held_while_any_holds_it() -> None:
    ranks = [Engine(), Engine()]
    events = KvEvents(name, BLOCK)
    ids = [5] * 4
    (ours,), (theirs, _) = name(ids, "", b""), chain(ids)[0]
    for number, engine in enumerate(ranks):
        events.take([engine.created(attention_dp_rank=number), engine.stored(ids, attention_dp_rank=number)])
    assert events.held_blocks == 1
    assert events.take([ranks[0].removed(theirs, attention_dp_rank=0)]) == []
    assert events.take([ranks[1].removed(theirs, attention_dp_rank=1)]) == [BlocksRemoved((ours,))]
    assert events.gaps == 0


def test_what_is_told_is_what_is_held_whatever_is_lost() -> None:
    """Against a set: what a reader believes is never more than the engine holds, once it has heard of the gap."""
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    engine, events = Engine(), KvEvents(name, BLOCK)
    held: dict[int, int] = {}
    believed: set[int] = set()
    pending = [engine.created()]
    for _ in range(2000):
        if dice.random() < 0.6 or not held:
            ids = [dice.randrange(3)] * 4 + [dice.randrange(3)] * 4
            pending.append(engine.stored(ids))
            held.update(zip([value for value, _ in chain(ids)], name(ids, "", b""), strict=True))
        else:
            gone = dice.choice(list(held))
            pending.append(engine.removed(gone))
            del held[gone]
        if dice.random() < 0.05:
            # The oldest are lost.
            del pending[: dice.randrange(len(pending) + 1)]
        if dice.random() < 0.3 and pending:
            _believe(believed, events.take(pending))
            pending = []
            assert believed <= set(held.values()), f"seed {seed}"
            assert len(believed) == events.held_blocks, f"seed {seed}"


def _believe(believed: set[int], changes: list[BlockChange]) -> None:
    for change in changes:
        if isinstance(change, BlocksStored):
            believed |= set(change.hashes)
        elif isinstance(change, BlocksRemoved):
            believed -= set(change.hashes)
        else:
            believed.clear()
