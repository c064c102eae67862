"""What is known of files and batches: facts and answers in a database, and files' bytes.

:class:`Store` has all that is the same wherever that is; :class:`SqliteStore` keeps it in a folder, ``postgres.py`` in
PostgreSQL. Every change is one transaction, so a process that is killed at any point leaves a state from which another
goes on. Two rules make each line of a batch appear once, whoever runs it:

- a batch is worked on under a **lease** (an owner, a time until which it holds, and a number that grows with each
  owner); whatever a runner writes names the number, and is refused once another has taken over;
- a line's answer is a row whose key is the line, written together with the counts. The output files are made of these
  rows at the end, in the order of the input, and appear by a rename under names that were drawn before.

A row of ``files`` is written after its bytes are on disk and deleted before they are; bytes without a row are swept
away. Time and the dice are arguments. All methods block; :mod:`headrace.batches.service` calls them from one thread.
SQL and paths stand here and in ``postgres.py`` and nowhere else.

What this module leaves to others: what lines mean (``lines.py``), who may ask (the doors).
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError

#: Grows with each change of the tables below that an older program could not read.
SCHEMA = 1

_ANSWERS_AT_ONCE = 500

#: A batch is still worked on.
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")


def tables(place: str, blob: str) -> tuple[str, ...]:
    """What makes them. ``place``: the type of a number that counts rows; ``blob``: of bytes."""
    return (
        f"""CREATE TABLE files (
            place {place},
            id TEXT NOT NULL UNIQUE,
            tenant TEXT NOT NULL,
            purpose TEXT NOT NULL,
            filename TEXT NOT NULL,
            bytes BIGINT NOT NULL,
            created_s BIGINT NOT NULL,
            expires_s BIGINT
        )""",
        "CREATE INDEX files_of_tenant ON files (tenant, place)",
        f"""CREATE TABLE batches (
            place {place},
            id TEXT NOT NULL UNIQUE,
            tenant TEXT NOT NULL,
            status TEXT NOT NULL,
            facts TEXT NOT NULL,
            total BIGINT NOT NULL DEFAULT 0,
            completed BIGINT NOT NULL DEFAULT 0,
            failed BIGINT NOT NULL DEFAULT 0,
            prompt_tokens BIGINT NOT NULL DEFAULT 0,
            cached_prompt_tokens BIGINT NOT NULL DEFAULT 0,
            completion_tokens BIGINT NOT NULL DEFAULT 0,
            owner TEXT NOT NULL DEFAULT '',
            leased_until_s DOUBLE PRECISION NOT NULL DEFAULT 0,
            epoch BIGINT NOT NULL DEFAULT 0
        )""",
        "CREATE INDEX batches_of_tenant ON batches (tenant, place)",
        "CREATE INDEX batches_by_status ON batches (status)",
        f"""CREATE TABLE answers (
            batch BIGINT NOT NULL,
            line BIGINT NOT NULL,
            succeeded BIGINT NOT NULL,
            body {blob} NOT NULL,
            PRIMARY KEY (batch, line)
        )""",
    )


class StoreError(HeadraceError):
    """The store cannot do what was asked.

    ``kind`` is "not_found", "invalid", "limit" (of the tenant), "full" (the disk), "busy" (the folder) or "away" (the
    database).
    """

    def __init__(self, kind: str, message: str, param: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.param = param


class LeaseLost(Exception):
    """Somebody else works on this batch now, or it is gone: whoever is told this must leave it alone."""


@dataclass(frozen=True)
class File:
    """What is known of a file. Times are Unix seconds; ``expires_s`` None = never."""

    id: str
    purpose: str
    filename: str
    bytes: int
    created_s: int
    expires_s: int | None


@dataclass(frozen=True)
class LineError:
    """What is wrong with an input file; ``line`` counts from 1, 0 = the file as a whole."""

    code: str
    message: str
    line: int = 0
    param: str = ""


@dataclass(frozen=True)
class Facts:
    """What of a batch no query looks for: kept as one JSON text."""

    endpoint: str
    input_file_id: str
    completion_window: str
    created_s: int
    expires_s: int
    metadata: dict[str, str] = field(default_factory=dict)
    #: Seconds that the output files are kept; None = as configured.
    output_expires_after_s: int | None = None
    in_progress_s: int | None = None
    finalizing_s: int | None = None
    completed_s: int | None = None
    failed_s: int | None = None
    expired_s: int | None = None
    cancelling_s: int | None = None
    cancelled_s: int | None = None
    #: Drawn when the batch is finalised, so that doing it again makes the same files.
    output_file_id: str = ""
    error_file_id: str = ""
    #: How it ends once it is finalised: "completed", "expired" or "cancelled".
    ending: str = ""
    errors: tuple[LineError, ...] = ()


@dataclass(frozen=True)
class Batch:
    """A batch as it stands."""

    id: str
    tenant: str
    status: str
    facts: Facts
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def open(self) -> bool:
        """Whether it is still worked on."""
        return self.status in OPEN_STATUSES


@dataclass(frozen=True)
class Standing:
    """Batches that are not over, of all tenants."""

    #: How many, by status.
    open: dict[str, int]
    #: Lines without an answer; those of batches that are not validated yet are not known.
    lines: int
    #: Since the oldest was created, and until the first window ends; 0 = there is none.
    oldest_s: float
    due_s: float


@dataclass(frozen=True)
class Claim:
    """The right to work on a batch, and the number that proves it."""

    batch: Batch
    epoch: int


@dataclass(frozen=True)
class Answer:
    """What became of a line (counted from 0): a line of the output file, or of the error file."""

    line: int
    succeeded: bool
    body: bytes
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Bounds:
    """How much one tenant may keep here."""

    max_files: int
    max_open_batches: int


class Store(abc.ABC):
    """What is the same wherever it is kept. ``folder`` belongs to the process that has it open, until that ends."""

    def __init__(self, folder: Path, bounds: Bounds) -> None:
        """Raises StoreError: "busy" when another process has the folder."""
        self._bounds = bounds
        self._files = folder / "files"
        self._uploads = folder / "uploads"
        try:
            for each in (folder, self._files, self._uploads):
                # Prompts and answers: nobody else's.
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = open(folder / "lock", "w", encoding="ascii")  # noqa: SIM115
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise StoreError("busy", f"{folder} is in use by another router; each needs its own") from None
        except OSError as error:
            raise StoreError("full", f"cannot use {folder}: {error.strerror or error}") from error
        self._db: Any = None
        try:
            self._open(folder)
            for path in self._uploads.iterdir():
                path.unlink(missing_ok=True)
            self._sweep()
        except BaseException:
            self.close()
            raise

    # -- what is another's elsewhere

    @abc.abstractmethod
    def _open(self, folder: Path) -> None:
        """Sets ``_db``, with the tables. Raises StoreError."""

    @staticmethod
    @abc.abstractmethod
    def _failures() -> tuple[type[Exception], ...]:
        """What ``_db`` may raise."""

    @abc.abstractmethod
    def _failed(self, error: Exception) -> StoreError:
        """What that means."""

    @staticmethod
    @abc.abstractmethod
    def _fact(name: str) -> str:
        """One of a batch's facts in a statement, as a text or a number."""

    @abc.abstractmethod
    def _begin(self, uploads: Sequence[str]) -> None:
        """A transaction beside which nobody changes anything. These uploads are files when it is committed."""

    @abc.abstractmethod
    def _path(self, file_id: str) -> Path:
        """Where a file's bytes are on this machine. Raises StoreError."""

    # -- statements

    def close(self) -> None:
        """Lets another process have it."""
        if self._db is not None:
            self._db.close()
        self._lock.close()

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """What the database says becomes a StoreError."""
        try:
            yield
        except self._failures() as error:
            raise self._failed(error) from error

    @contextlib.contextmanager
    def _change(self, *uploads: str) -> Iterator[Any]:
        """One transaction, which speaks of these uploads too. Raises StoreError when nothing can be changed now."""
        with self._answering():
            try:
                self._begin(uploads)
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(*self._failures()):
                    self._db.execute("ROLLBACK")
                raise

    def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._answering():
            found: list[Any] = self._db.execute(statement, tuple(values)).fetchall()
            return found

    def _row(self, statement: str, values: Sequence[Any]) -> Any:
        """The first, or None."""
        return next(iter(self._rows(statement, values)), None)

    def _sweep(self) -> None:
        """Bytes here that no row speaks of."""
        known = {name for (name,) in self._rows("SELECT id FROM files")}
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    # -- files

    def begin_upload(self, tenant: str, file_id: str) -> Path:
        """Where to write a file's bytes before :meth:`add_file`. Raises StoreError."""
        self._check_files(tenant)
        return self._uploads / file_id

    def _check_files(self, tenant: str) -> None:
        (count,) = self._row("SELECT COUNT(*) FROM files WHERE tenant = ?", (tenant,))
        if count >= self._bounds.max_files:
            raise StoreError("limit", f"{count} files are kept, the limit is {self._bounds.max_files}: delete some")

    def add_file(self, tenant: str, file: File) -> None:
        """The upload is complete: its bytes lie where :meth:`begin_upload` said, and are on the disk."""
        with self._change(file.id) as db:
            self._insert_file(db, tenant, file)

    @staticmethod
    def _insert_file(db: Any, tenant: str, file: File) -> None:
        db.execute(
            "INSERT INTO files (id, tenant, purpose, filename, bytes, created_s, expires_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.id, tenant, file.purpose, file.filename, file.bytes, file.created_s, file.expires_s),
        )

    def get_file(self, tenant: str, file_id: str, now_s: float) -> File:
        """Raises StoreError "not_found": also for another tenant's, and for one whose time is over."""
        row = self._row(
            "SELECT id, purpose, filename, bytes, created_s, expires_s FROM files WHERE id = ? AND tenant = ?",
            (file_id, tenant),
        )
        if row is None or (row[5] is not None and row[5] <= now_s):
            raise StoreError("not_found", f"there is no file {_shown(file_id)}", "id")
        return File(*row)

    def path(self, file: File) -> Path:
        """Where its bytes are, on this machine."""
        return self._path(file.id)

    def input_path(self, batch: Batch) -> Path:
        """Where its input's bytes are, on this machine; they stay until it is over."""
        return self._path(batch.facts.input_file_id)

    def list_files(
        self, tenant: str, now_s: float, *, after: str, limit: int, purpose: str = "", ascending: bool = False
    ) -> tuple[list[File], bool]:
        """A page, and whether there is more. The newest first unless ``ascending``. Raises StoreError "not_found"."""
        rows, more = self._page(
            "SELECT id, purpose, filename, bytes, created_s, expires_s FROM files "
            "WHERE tenant = ? AND (expires_s IS NULL OR expires_s > ?) AND (? = '' OR purpose = ?)",
            (tenant, now_s, purpose, purpose),
            "files",
            tenant,
            after,
            limit,
            ascending,
        )
        return [File(*row) for row in rows], more

    def _page(
        self, query: str, values: tuple[Any, ...], table: str, tenant: str, after: str, limit: int, ascending: bool
    ) -> tuple[list[Any], bool]:
        if after:
            # `table` is one of two literals.
            row = self._row(f"SELECT place FROM {table} WHERE id = ? AND tenant = ?", (after, tenant))
            if row is None:
                raise StoreError("not_found", f"after: there is no {_shown(after)}", "after")
            query += " AND place > ?" if ascending else " AND place < ?"
            values = (*values, row[0])
        query += f" ORDER BY place {'ASC' if ascending else 'DESC'} LIMIT ?"
        rows = self._rows(query, (*values, limit + 1))
        return rows[:limit], len(rows) > limit

    def delete_file(self, tenant: str, file_id: str, now_s: float) -> None:
        """Raises StoreError: "not_found", or "invalid" while a batch reads it."""
        file = self.get_file(tenant, file_id, now_s)
        with self._change() as db:
            if (batch := self._reader_of(db, file_id)) is not None:
                raise StoreError("invalid", f"the file is the input of {batch}, which is not finished", "id")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        (self._files / file.id).unlink(missing_ok=True)

    def _reader_of(self, db: Any, file_id: str) -> str | None:
        row = db.execute(
            f"SELECT id FROM batches WHERE status IN {OPEN_STATUSES} AND {self._fact('input_file_id')} = ?", (file_id,)
        ).fetchone()
        return None if row is None else str(row[0])

    def expire(self, now_s: float, keep_batches_s: float) -> int:
        """Deletes files whose time is over, but for those that are read, and batches that ended long ago; how many."""
        with self._change() as db:
            gone = [
                name
                for (name,) in db.execute("SELECT id FROM files WHERE expires_s <= ?", (now_s,)).fetchall()
                if self._reader_of(db, name) is None
            ]
            for name in gone:
                db.execute("DELETE FROM files WHERE id = ?", (name,))
            ended: int = db.execute(
                f"DELETE FROM batches WHERE status NOT IN {OPEN_STATUSES} AND {self._fact('created_s')} < ?",
                (now_s - keep_batches_s,),
            ).rowcount
        # Those of which others have deleted the rows, too.
        self._sweep()
        return len(gone) + ended

    # -- batches, for those who ask

    def add_batch(self, batch: Batch, now_s: float) -> None:
        """Takes it in, to be validated. Raises StoreError."""
        file = self.get_file(batch.tenant, batch.facts.input_file_id, now_s)
        if file.purpose != "batch":
            raise StoreError("invalid", f"the file's purpose is {file.purpose}, not batch", "input_file_id")
        # It will add two.
        self._check_files(batch.tenant)
        with self._change() as db:
            (count,) = db.execute(
                f"SELECT COUNT(*) FROM batches WHERE tenant = ? AND status IN {OPEN_STATUSES}", (batch.tenant,)
            ).fetchone()
            if count >= self._bounds.max_open_batches:
                raise StoreError(
                    "limit", f"{count} batches are not finished, the limit is {self._bounds.max_open_batches}"
                )
            db.execute(
                "INSERT INTO batches (id, tenant, status, facts) VALUES (?, ?, ?, ?)",
                (batch.id, batch.tenant, batch.status, _dump(batch.facts)),
            )

    _COLUMNS = (
        "id, tenant, status, facts, total, completed, failed, prompt_tokens, cached_prompt_tokens, completion_tokens"
    )

    def get_batch(self, tenant: str, batch_id: str) -> Batch:
        """Raises StoreError "not_found": also for another tenant's."""
        row = self._row(f"SELECT {self._COLUMNS} FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant))
        if row is None:
            raise StoreError("not_found", f"there is no batch {_shown(batch_id)}", "id")
        return _batch(row)

    def list_batches(self, tenant: str, *, after: str, limit: int) -> tuple[list[Batch], bool]:
        """A page, the newest first, and whether there is more. Raises StoreError "not_found"."""
        query = f"SELECT {self._COLUMNS} FROM batches WHERE tenant = ?"
        rows, more = self._page(query, (tenant,), "batches", tenant, after, limit, False)
        return [_batch(row) for row in rows], more

    def cancel(self, tenant: str, batch_id: str, now_s: float) -> Batch:
        """Asks its runner to stop; again changes nothing. Raises StoreError: "not_found", "invalid" if it is over."""
        with self._change() as db:
            batch = self.get_batch(tenant, batch_id)
            if batch.status not in ("validating", "in_progress", "cancelling"):
                raise StoreError("invalid", f"a batch that is {batch.status} cannot be cancelled", "id")
            if batch.status != "cancelling":
                batch = replace(batch, status="cancelling", facts=replace(batch.facts, cancelling_s=int(now_s)))
                self._put(db, batch)
        return batch

    def standing(self, now_s: float) -> Standing:
        """How it stands. Raises StoreError."""
        rows = self._rows(
            f"SELECT status, COUNT(*), SUM(total - completed - failed), MIN({self._fact('created_s')}), "
            f"MIN({self._fact('expires_s')}) FROM batches WHERE status IN {OPEN_STATUSES} GROUP BY status"
        )
        if not rows:
            return Standing({}, 0, 0.0, 0.0)
        statuses, counts, lines, created_s, expires_s = zip(*rows, strict=True)
        oldest_s, due_s = now_s - min(created_s), min(expires_s) - now_s
        return Standing(dict(zip(statuses, counts, strict=True)), int(sum(lines)), max(oldest_s, 0.0), max(due_s, 0.0))

    # -- batches, for their runner

    def claim(self, owner: str, now_s: float, lease_s: float, *, ending: bool = False) -> Claim | None:
        """A batch that nobody works on, for ``lease_s``; None when there is none. ``ending``: only one that needs no
        more than its end. Tenants take turns, each with its oldest.
        """
        only, values = "", [now_s, owner]
        if ending:
            only = f" AND (status IN ('cancelling', 'finalizing') OR {self._fact('expires_s')} <= ?)"
            values.append(now_s)
        with self._change() as db:
            row = db.execute(
                f"SELECT {self._COLUMNS}, epoch FROM batches AS each WHERE status IN {OPEN_STATUSES} "
                # What this one has, it has, even where it was too busy to say so.
                f"AND leased_until_s <= ? AND owner != ?{only} ORDER BY (SELECT COUNT(*) FROM batches "
                "WHERE tenant = each.tenant AND leased_until_s > ?), place LIMIT 1",
                (*values, now_s),
            ).fetchone()
            if row is None:
                return None
            claim = Claim(_batch(row[:-1]), row[-1] + 1)
            db.execute(
                "UPDATE batches SET owner = ?, leased_until_s = ?, epoch = ? WHERE id = ?",
                (owner, now_s + lease_s, claim.epoch, claim.batch.id),
            )
        return claim

    def renew(self, claim: Claim, now_s: float, lease_s: float) -> Batch:
        """Goes on with it; the batch as it stands now, which may have been cancelled. Raises LeaseLost."""
        with self._change() as db:
            batch = self._mine(db, claim)
            db.execute("UPDATE batches SET leased_until_s = ? WHERE id = ?", (now_s + lease_s, batch.id))
        return batch

    def release(self, claim: Claim) -> None:
        """Leaves it to whoever comes. A lease that was lost is none to give back."""
        with self._change() as db:
            db.execute(
                "UPDATE batches SET owner = '', leased_until_s = 0 WHERE id = ? AND epoch = ?",
                (claim.batch.id, claim.epoch),
            )

    def begin(self, claim: Claim, total: int, now_s: float) -> Batch:
        """The input is valid and has so many lines. Raises LeaseLost."""
        with self._change() as db:
            batch = self._mine(db, claim)
            if batch.status == "validating":
                batch = replace(
                    batch, status="in_progress", total=total, facts=replace(batch.facts, in_progress_s=int(now_s))
                )
                self._put(db, batch)
        return batch

    def refuse(self, claim: Claim, errors: Sequence[LineError], now_s: float) -> Batch:
        """The input is not valid: the batch has failed. Raises LeaseLost."""
        with self._change() as db:
            batch = self._mine(db, claim)
            facts = replace(batch.facts, errors=tuple(errors), failed_s=int(now_s))
            batch = replace(batch, status="failed", facts=facts)
            self._put(db, batch, over=True)
            db.execute("DELETE FROM answers WHERE batch = ?", (self._place(claim),))
        return batch

    def answered_lines(self, claim: Claim) -> set[int]:
        """Those that are not to be asked again."""
        return {line for (line,) in self._rows("SELECT line FROM answers WHERE batch = ?", (self._place(claim),))}

    def add_answers(self, claim: Claim, answers: Sequence[Answer]) -> Batch:
        """Writes them down, all or none. A line that has an answer keeps it. Raises LeaseLost."""
        with self._change() as db:
            batch = self._mine(db, claim)
            place = self._place(claim)
            for answer in answers:
                added = db.execute(
                    "INSERT INTO answers (batch, line, succeeded, body) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    (place, answer.line, int(answer.succeeded), answer.body),
                )
                if added.rowcount == 1:
                    batch = replace(
                        batch,
                        completed=batch.completed + answer.succeeded,
                        failed=batch.failed + (not answer.succeeded),
                        prompt_tokens=batch.prompt_tokens + answer.prompt_tokens,
                        cached_prompt_tokens=batch.cached_prompt_tokens + answer.cached_prompt_tokens,
                        completion_tokens=batch.completion_tokens + answer.completion_tokens,
                    )
            self._put(db, batch)
        return batch

    def finalize(self, claim: Claim, ending: str, draw: Callable[[], str], now_s: float, keep_s: float) -> Batch:
        """Makes the output files of the answers, and ends the batch as ``ending``, or as was decided before a crash.

        May take long, and may be done again after a crash. ``draw`` gives the names. Raises LeaseLost, StoreError.
        """
        with self._change() as db:
            batch = self._mine(db, claim)
            facts = batch.facts
            if not facts.ending:
                facts = replace(facts, ending=ending, output_file_id=draw(), error_file_id=draw())
            if ending != "cancelled":
                facts = replace(facts, finalizing_s=facts.finalizing_s or int(now_s))
                batch = replace(batch, status="finalizing")
            batch = replace(batch, facts=facts)
            self._put(db, batch)
        kept_s = facts.output_expires_after_s or (keep_s or None)
        expires_s = None if kept_s is None else int(now_s + kept_s)
        written = []
        for file_id, succeeded in ((facts.output_file_id, True), (facts.error_file_id, False)):
            if size := self._write_out(self._place(claim), file_id, succeeded):
                name = f"{batch.id}_{'output' if succeeded else 'error'}.jsonl"
                written.append(File(file_id, "batch_output", name, size, int(now_s), expires_s))
        with self._change(*(file.id for file in written)) as db:
            self._mine(db, claim)
            for file in written:
                self._insert_file(db, batch.tenant, file)
            names = {file.id for file in written}
            facts = replace(
                facts,
                output_file_id=facts.output_file_id if facts.output_file_id in names else "",
                error_file_id=facts.error_file_id if facts.error_file_id in names else "",
            )
            facts = Facts(**vars(facts) | {f"{facts.ending}_s": int(now_s)})
            batch = replace(batch, status=facts.ending, facts=facts)
            self._put(db, batch, over=True)
            db.execute("DELETE FROM answers WHERE batch = ?", (self._place(claim),))
        return batch

    def _write_out(self, place: int, file_id: str, succeeded: bool) -> int:
        """The answers of that kind as an upload; its size, and no file when there are none."""
        path = self._uploads / file_id
        size, after = 0, -1
        try:
            with open(path, "wb", opener=private) as file:
                # Some at a time: all of them may be more than fits in memory.
                while rows := self._rows(
                    "SELECT line, body FROM answers WHERE batch = ? AND succeeded = ? AND line > ? "
                    f"ORDER BY line LIMIT {_ANSWERS_AT_ONCE}",
                    (place, int(succeeded), after),
                ):
                    for _, body in rows:
                        size += file.write(body) + file.write(b"\n")
                    after = rows[-1][0]
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            path.unlink(missing_ok=True)
            raise disk_error(error) from error
        if size == 0:
            path.unlink()
        return size

    def _mine(self, db: Any, claim: Claim) -> Batch:
        row = db.execute(
            # One that is over is nobody's: also where its end was written and not heard of.
            f"SELECT {self._COLUMNS} FROM batches WHERE id = ? AND epoch = ? AND status IN {OPEN_STATUSES}",
            (claim.batch.id, claim.epoch),
        ).fetchone()
        if row is None:
            raise LeaseLost(claim.batch.id)
        return _batch(row)

    def _place(self, claim: Claim) -> int:
        row = self._row("SELECT place FROM batches WHERE id = ?", (claim.batch.id,))
        if row is None:
            raise LeaseLost(claim.batch.id)
        return int(row[0])

    @staticmethod
    def _put(db: Any, batch: Batch, *, over: bool = False) -> None:
        """``over``: nobody works on it any more."""
        lease = ", owner = '', leased_until_s = 0" if over else ""
        db.execute(
            "UPDATE batches SET status = ?, facts = ?, total = ?, completed = ?, failed = ?, prompt_tokens = ?, "
            f"cached_prompt_tokens = ?, completion_tokens = ?{lease} WHERE id = ?",
            (
                batch.status,
                _dump(batch.facts),
                batch.total,
                batch.completed,
                batch.failed,
                batch.prompt_tokens,
                batch.cached_prompt_tokens,
                batch.completion_tokens,
                batch.id,
            ),
        )


def disk_error(error: OSError) -> StoreError:
    """What the disk said."""
    return StoreError("full", f"the disk of batches.data_dir takes no more: {error.strerror or error}")


def private(path: str, flags: int) -> int:
    """Opens what nobody else may read."""
    return os.open(path, flags, 0o600)


class SqliteStore(Store):
    """In a folder of this process's own."""

    def _open(self, folder: Path) -> None:
        path = folder / "batches.sqlite3"
        try:
            # One thread at a time, but not always the same.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
            os.chmod(path, 0o600)
            self._db.execute("PRAGMA journal_mode = WAL")
            # A committed answer is not asked for again, so it has to be on the disk.
            self._db.execute("PRAGMA synchronous = FULL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0:
                made = tables("INTEGER PRIMARY KEY AUTOINCREMENT", "BLOB")
                self._db.executescript(f"BEGIN; {'; '.join(made)}; PRAGMA user_version = {SCHEMA}; COMMIT;")
            elif version != SCHEMA:
                raise StoreError("busy", f"{path} is of version {version}, this program reads {SCHEMA}")
        except (OSError, sqlite3.Error) as error:
            raise StoreError("full", f"cannot use {path}: {error}") from error
        with self._change() as db:
            # The lock says that no other process is there: whoever had a lease is gone.
            db.execute("UPDATE batches SET owner = '', leased_until_s = 0 WHERE owner != ''")

    @staticmethod
    def _failures() -> tuple[type[Exception], ...]:
        return (sqlite3.Error,)

    def _failed(self, error: Exception) -> StoreError:
        return StoreError("full", f"the disk of batches.data_dir takes no more: {error}")

    @staticmethod
    def _fact(name: str) -> str:
        return f"facts ->> '{name}'"

    def _begin(self, uploads: Sequence[str]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for file_id in uploads:
                os.replace(self._uploads / file_id, self._files / file_id)
            if uploads:
                handle = os.open(self._files, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        except OSError as error:
            raise disk_error(error) from error

    def _path(self, file_id: str) -> Path:
        return self._files / file_id


def _batch(row: Sequence[Any]) -> Batch:
    identity, tenant, status, facts, *counts = row
    return Batch(identity, tenant, status, _facts(facts), *counts)


def _dump(facts: Facts) -> str:
    table = {name: value for name, value in vars(facts).items() if value not in (None, "", ())}
    table["errors"] = [vars(error) for error in facts.errors]
    return json.dumps(table)


def _facts(text: str) -> Facts:
    table = json.loads(text)
    table["errors"] = tuple(LineError(**error) for error in table["errors"])
    return Facts(**table)


def _shown(name: str) -> str:
    """A client's word in a message, as far as it helps."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
