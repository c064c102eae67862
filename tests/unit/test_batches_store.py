"""Files and batches in SQLite and in PostgreSQL: tenants apart, leases, each line once, and what a crash leaves."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.batches import Opener, shared

from headrace.batches.store import (
    Answer,
    Batch,
    Bounds,
    Claim,
    Facts,
    File,
    LeaseLost,
    LineError,
    SqliteStore,
    Standing,
    Store,
    StoreError,
)

LEASE_S = 10.0


@pytest.fixture
def store(opener: Opener) -> Store:
    return opener("batches", 3, 2)


def upload(store: Store, tenant: str, name: str, content: bytes = b"{}\n", expires_s: int | None = None) -> File:
    store.begin_upload(tenant, name).write_bytes(content)
    file = File(name, "batch", f"{name}.jsonl", len(content), 100, expires_s)
    store.add_file(tenant, file)
    return file


def add(store: Store, tenant: str, name: str, input_file: str, expires_s: int = 10_000) -> Batch:
    facts = Facts("/v1/completions", input_file, "24h", 100, expires_s, {"about": "tests"})
    batch = Batch(name, tenant, "validating", facts)
    store.add_batch(batch, 100.0)
    return batch


def names() -> Callable[[], str]:
    count = itertools.count(1)
    return lambda: f"file-out{next(count)}"


def claim(store: Store, owner: str = "me", now_s: float = 100.0) -> Claim:
    found = store.claim(owner, now_s, LEASE_S)
    assert found is not None
    return found


def test_a_tenant_sees_its_own_files_only(store: Store) -> None:
    file = upload(store, "one", "file-1", b"secret\n")
    assert store.get_file("one", "file-1", 100.0) == file
    assert store.path(file).read_bytes() == b"secret\n"
    assert store.path(file).stat().st_mode & 0o077 == 0 or (store.path(file).parent.stat().st_mode & 0o077) == 0
    assert store.list_files("two", 100.0, after="", limit=10) == ([], False)
    for call in (
        lambda: store.get_file("two", "file-1", 100.0),
        lambda: store.delete_file("two", "file-1", 100.0),
        lambda: add(store, "two", "batch-x", "file-1"),
        lambda: store.list_files("two", 100.0, after="file-1", limit=1),
    ):
        with pytest.raises(StoreError) as refused:
            call()
        assert refused.value.kind == "not_found"


def test_pages_have_an_order_and_say_whether_there_is_more(store: Store) -> None:
    for name in ("a", "b", "c"):
        upload(store, "one", name)

    def page(**how: object) -> tuple[list[str], bool]:
        files, more = store.list_files("one", 100.0, **{"after": "", "limit": 2} | how)  # type: ignore[arg-type]
        return [file.id for file in files], more

    assert page() == (["c", "b"], True)
    assert page(after="b") == (["a"], False)
    assert page(ascending=True, after="a") == (["b", "c"], False)
    assert page(purpose="batch_output") == ([], False)


def test_a_tenant_has_bounds(store: Store) -> None:
    for name in ("a", "b"):
        upload(store, "one", name)
    add(store, "one", "batch-1", "a")
    add(store, "one", "batch-2", "a")
    with pytest.raises(StoreError, match="the limit is 2"):
        add(store, "one", "batch-3", "a")
    upload(store, "one", "c")
    for call in (lambda: store.begin_upload("one", "d"), lambda: add(store, "one", "batch-3", "a")):
        with pytest.raises(StoreError, match="the limit is 3") as refused:
            call()
        assert refused.value.kind == "limit"
    store.begin_upload("two", "d")


def test_each_line_has_one_answer_whoever_gives_it(store: Store) -> None:
    upload(store, "one", "file-1")
    add(store, "one", "batch-1", "file-1")
    first = claim(store, "first")
    assert store.begin(first, 3, 101.0).status == "in_progress"
    batch = store.add_answers(first, [Answer(1, True, b"by the first", 5, 2, 3), Answer(0, False, b"wrong")])
    assert (batch.total, batch.completed, batch.failed) == (3, 1, 1)
    assert (batch.prompt_tokens, batch.cached_prompt_tokens, batch.completion_tokens) == (5, 2, 3)
    # Its lease ran out, and another has taken over.
    assert store.claim("second", 105.0, LEASE_S) is None
    second = claim(store, "second", 111.0)
    assert store.answered_lines(second) == {0, 1}
    for call in (
        lambda: store.add_answers(first, [Answer(2, True, b"too late")]),
        lambda: store.renew(first, 112.0, LEASE_S),
        lambda: store.finalize(first, "completed", names(), 112.0, 0.0),
    ):
        with pytest.raises(LeaseLost):
            call()
    store.release(first)
    assert store.claim("third", 112.0, LEASE_S) is None, "who has lost a lease gives none back"
    batch = store.add_answers(second, [Answer(1, True, b"again", 5, 2, 3), Answer(2, True, b"by the second", 5, 0, 3)])
    assert (batch.completed, batch.failed, batch.completion_tokens) == (2, 1, 6)
    batch = store.finalize(second, "completed", names(), 113.0, 0.0)
    assert batch.status == "completed"
    output = store.get_file("one", batch.facts.output_file_id, 200.0)
    assert (output.purpose, output.bytes) == ("batch_output", len(b"by the first\nby the second\n"))
    assert store.path(output).read_bytes() == b"by the first\nby the second\n"
    assert store.path(store.get_file("one", batch.facts.error_file_id, 200.0)).read_bytes() == b"wrong\n"
    assert store.claim("third", 9_999.0, LEASE_S) is None


def test_finalising_again_after_a_crash_makes_the_same_files(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opener("batches")
    upload(store, "one", "file-1")
    add(store, "one", "batch-1", "file-1")
    mine = claim(store)
    store.begin(mine, 1, 101.0)
    store.add_answers(mine, [Answer(0, True, b"answer")])
    monkeypatch.setattr(Store, "_insert_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.finalize(mine, "completed", names(), 102.0, 60.0)
    monkeypatch.undo()
    store.close()
    store = opener("batches")
    assert [path.name for path in (tmp_path / "batches" / "files").iterdir()] == ["file-1"], "no row speaks of it"
    again = claim(store, "other", 113.0)
    assert again.batch.facts.ending == "completed"
    batch = store.finalize(again, "expired", names(), 113.0, 60.0)
    assert (batch.status, batch.facts.output_file_id, batch.facts.error_file_id) == ("completed", "file-out1", "")
    output = store.get_file("one", "file-out1", 113.0)
    assert (output.expires_s, store.path(output).read_bytes()) == (173, b"answer\n")


def test_an_end_that_was_written_and_not_heard_of_stands(store: Store) -> None:
    upload(store, "one", "file-1")
    add(store, "one", "batch-1", "file-1")
    mine = claim(store)
    store.begin(mine, 1, 101.0)
    store.add_answers(mine, [Answer(0, True, b"answer")])
    batch = store.finalize(mine, "completed", names(), 102.0, 0.0)
    for call in (
        lambda: store.renew(mine, 103.0, LEASE_S),
        lambda: store.finalize(mine, "completed", names(), 103.0, 0.0),
    ):
        with pytest.raises(LeaseLost):
            call()
    assert store.get_batch("one", "batch-1") == batch


def test_many_answers_are_written_out_in_order(store: Store) -> None:
    upload(store, "one", "file-1")
    add(store, "one", "batch-1", "file-1")
    mine = claim(store)
    store.begin(mine, 1203, 101.0)
    store.add_answers(mine, [Answer(line, line % 3 > 0, b"%d" % line) for line in reversed(range(1203))])
    batch = store.finalize(mine, "completed", names(), 102.0, 0.0)
    for file_id, kind in ((batch.facts.output_file_id, (1, 2)), (batch.facts.error_file_id, (0,))):
        lines = store.path(store.get_file("one", file_id, 103.0)).read_bytes().split()
        assert lines == [b"%d" % line for line in range(1203) if line % 3 in kind]


def test_an_input_stays_while_it_is_read(store: Store) -> None:
    upload(store, "one", "file-1", expires_s=150)
    add(store, "one", "batch-1", "file-1")
    with pytest.raises(StoreError, match="batch-1") as refused:
        store.delete_file("one", "file-1", 101.0)
    assert refused.value.kind == "invalid"
    mine = claim(store)
    assert store.expire(200.0, 1e9) == 0
    assert store.input_path(mine.batch).exists()
    store.refuse(mine, [LineError("empty_file", "no line")], 201.0)
    assert store.expire(202.0, 1e9) == 1
    assert not store.input_path(mine.batch).exists()
    failed = store.get_batch("one", "batch-1")
    assert (failed.status, failed.facts.errors) == ("failed", (LineError("empty_file", "no line"),))
    assert store.expire(1000.0, 60.0) == 1
    assert store.list_batches("one", after="", limit=5) == ([], False)


def test_cancelling_is_heard_of_at_the_next_renewal(store: Store) -> None:
    upload(store, "one", "file-1")
    add(store, "one", "batch-1", "file-1")
    mine = claim(store)
    store.begin(mine, 2, 101.0)
    store.add_answers(mine, [Answer(0, True, b"answer")])
    with pytest.raises(StoreError):
        store.cancel("two", "batch-1", 102.0)
    assert store.cancel("one", "batch-1", 102.0).status == "cancelling"
    assert store.cancel("one", "batch-1", 103.0).facts.cancelling_s == 102
    assert store.renew(mine, 104.0, LEASE_S).status == "cancelling"
    batch = store.finalize(mine, "cancelled", names(), 105.0, 0.0)
    assert (batch.status, batch.facts.cancelled_s) == ("cancelled", 105)
    assert store.path(store.get_file("one", batch.facts.output_file_id, 105.0)).read_bytes() == b"answer\n"
    with pytest.raises(StoreError, match="cancelled cannot be cancelled"):
        store.cancel("one", "batch-1", 106.0)


def test_tenants_take_turns_and_what_only_ends_does_not_wait(store: Store) -> None:
    for tenant in ("one", "two"):
        upload(store, tenant, f"file-{tenant}")
    add(store, "one", "batch-1", "file-one")
    add(store, "one", "batch-2", "file-one")
    add(store, "two", "batch-3", "file-two")
    assert [claim(store).batch.id for _ in range(2)] == ["batch-1", "batch-3"]
    assert store.claim("me", 100.0, LEASE_S, ending=True) is None
    store.cancel("one", "batch-2", 100.0)
    found = store.claim("me", 100.0, LEASE_S, ending=True)
    assert found is not None
    assert found.batch.id == "batch-2"
    assert store.claim("me", 1e6, LEASE_S) is None, "what is its own it does not claim again"


def test_a_folder_is_one_processes_and_goes_on_after_it(opener: Opener, batches_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "batches"
    store = opener("batches")
    with pytest.raises(StoreError, match="another router") as refused:
        opener("batches")
    assert refused.value.kind == "busy"
    upload(store, "one", "file-1")
    add(store, "one", "batch-1", "file-1")
    claim(store)
    (folder / "uploads" / "file-cut").write_bytes(b"half")
    (folder / "files" / "file-lost").write_bytes(b"whole, but never told of")
    store.close()
    store = opener("batches")
    assert os.listdir(folder / "uploads") == []
    assert os.listdir(folder / "files") == ["file-1"]
    if batches_url:
        assert store.claim("next", 109.0, LEASE_S) is None, "others may have what it had"
        assert claim(store, "next", 110.0).batch.id == "batch-1"
    else:
        assert claim(store, "next").batch.id == "batch-1", "its owner is gone with the lock"


def test_a_full_disk_is_said_so_and_nothing_half_is_kept(tmp_path: Path) -> None:
    store: Any = SqliteStore(tmp_path / "batches", Bounds(3, 2))
    upload(store, "one", "file-1")
    add(store, "one", "batch-1", "file-1")
    mine = claim(store)
    store.begin(mine, 1, 101.0)
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreError, match="takes no more") as refused:
        store.add_answers(mine, [Answer(0, True, b"x" * 1_000_000)])
    assert refused.value.kind == "full"
    store._db.execute("PRAGMA max_page_count = 1000000")
    assert store.answered_lines(mine) == set()
    assert store.add_answers(mine, [Answer(0, True, b"x" * 1_000_000)]).completed == 1
    store.close()


def test_how_it_stands_is_of_all_that_is_not_over(store: Store) -> None:
    assert store.standing(100.0) == Standing({}, 0, 0.0, 0.0)
    for tenant in ("one", "two", "three"):
        upload(store, tenant, f"file-{tenant}")
        add(store, tenant, f"batch-{tenant}", f"file-{tenant}", expires_s=400)
    first, second = claim(store), claim(store)
    store.begin(first, 5, 101.0)
    store.add_answers(first, [Answer(0, True, b"answer"), Answer(3, False, b"error")])
    assert store.standing(130.0) == Standing({"in_progress": 1, "validating": 2}, 3, 30.0, 270.0)
    store.refuse(second, [LineError("empty_file", "no line")], 131.0)
    store.finalize(first, "completed", names(), 132.0, 0.0)
    assert store.standing(500.0) == Standing({"validating": 1}, 0, 400.0, 0.0)


@shared
def test_what_one_router_keeps_another_has_too(opener: Opener, tmp_path: Path) -> None:
    here, there = opener("here"), opener("there")
    # More than a part.
    content = b"".join(b'{"line": %d}\n' % number for number in range(200_000))
    file = upload(here, "one", "file-1", content)
    assert os.listdir(tmp_path / "there" / "files") == []
    assert there.path(there.get_file("one", "file-1", 100.0)).read_bytes() == content
    add(there, "one", "batch-1", "file-1")
    mine = claim(here)
    assert there.claim("other", 105.0, LEASE_S) is None
    assert here.input_path(mine.batch).read_bytes() == content
    assert there.cancel("one", "batch-1", 105.0).status == "cancelling"
    assert here.renew(mine, 106.0, LEASE_S).status == "cancelling"
    here.add_answers(mine, [Answer(0, True, b"answer")])
    batch = here.finalize(mine, "cancelled", names(), 107.0, 60.0)
    output = there.get_file("one", batch.facts.output_file_id, 108.0)
    assert there.path(output).read_bytes() == b"answer\n"
    # Deleted by one, its bytes are nowhere once the other has looked.
    there.delete_file("one", file.id, 108.0)
    assert here.expire(200.0, 1e9) == 1
    assert there.expire(200.0, 1e9) == 0
    assert os.listdir(tmp_path / "here" / "files") == os.listdir(tmp_path / "there" / "files") == []
    assert here._rows("SELECT * FROM parts") == []


@shared
def test_a_database_that_goes_away_is_said_so_and_found_again(opener: Opener) -> None:
    store, other = opener("here"), opener("there")
    upload(store, "one", "file-1")
    add(store, "one", "batch-1", "file-1")
    mine = claim(store)
    store.begin(mine, 1, 101.0)

    def cut() -> None:
        other._rows("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    for call in (
        lambda: store.get_batch("one", "batch-1"),
        lambda: store.add_answers(mine, [Answer(0, True, b"answer")]),
    ):
        cut()
        with pytest.raises(StoreError, match="cannot be used now") as refused:
            call()
        assert refused.value.kind == "away"
        call()
    assert store.get_batch("one", "batch-1").completed == 1


@shared
def test_a_router_that_stands_still_in_mid_change_is_not_waited_for(opener: Opener) -> None:
    store, still = opener("here"), opener("there")
    upload(store, "one", "file-1")
    # Sooner than it would be, for the test.
    still._rows("SELECT set_config('idle_in_transaction_session_timeout', '200ms', false)")
    still._begin(())
    add(store, "one", "batch-1", "file-1")
    assert claim(store).batch.id == "batch-1"
    with pytest.raises(StoreError):
        still.get_batch("one", "batch-1")


@shared
def test_a_database_of_another_version_is_refused(opener: Opener) -> None:
    store = opener("here")
    store._rows("UPDATE version SET version = 9 RETURNING version")
    with pytest.raises(StoreError, match="of version 9, this program reads 1"):
        opener("there")
