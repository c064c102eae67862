"""Rows on disk: SQLite (a file) or PostgreSQL (a URL), by the same statements.

A batch of the core's entries is one transaction: when :meth:`Store.carry_out` returns, all of it is durable, and a row
that came twice is there once. A scheduler has a *name* here, so that several can share a database: open bookings are
their scheduler's. One thread uses a store.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from headrace import postgres, process
from headrace.config import LedgerConfig
from headrace.errors import ConfigError

#: Of the tables. Whoever writes brings a database of an earlier version up to it; any other is refused.
VERSION = 2

#: A row as the core gives it, in its order (``entry_to_python`` in ``gateway_rs/src/python/scheduler.rs``).
COLUMNS = (
    "booking",
    "request_id",
    "placed_ms",
    "tenant",
    "session",
    "alias",
    "variant",
    "class",
    "outcome",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "wasted_tokens",
    "replayed_prompt_tokens",
    "replayed_output_tokens",
    "queue_s",
    "ttft_s",
    "decode_s",
    "kv_block_s",
    "nano_dollars",
    "prefix_saved_nano",
    "answer_saved_nano",
    "variant_saved_nano",
    "prompt_price",
    "output_price",
    "shadow",
)

#: An open booking, the same way.
OPEN_COLUMNS = (
    "booking",
    "router",
    "request_id",
    "tenant",
    "session",
    "alias",
    "variant",
    "class",
    "placed_ms",
    "prompt_tokens",
    "tokens",
    "nano_dollars",
    "allowance",
    "prompt_price",
    "output_price",
)

_TEXTS = {"request_id", "tenant", "session", "alias", "variant", "class", "outcome", "router"}


def _columns(names: Sequence[str]) -> str:
    def kind(name: str) -> str:
        return "TEXT" if name in _TEXTS else "DOUBLE PRECISION" if name.endswith("_s") else "BIGINT"

    return ", ".join(f"{name} {kind(name)} NOT NULL" for name in names)


_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS ledger_version (version BIGINT NOT NULL)",
    f"CREATE TABLE IF NOT EXISTS requests (scheduler TEXT NOT NULL, {_columns(COLUMNS)},"
    " PRIMARY KEY (booking, request_id))",
    "CREATE INDEX IF NOT EXISTS requests_by_tenant ON requests (tenant, placed_ms)",
    "CREATE INDEX IF NOT EXISTS requests_by_session ON requests (tenant, session) WHERE session <> ''",
    "CREATE INDEX IF NOT EXISTS requests_by_time ON requests (placed_ms)",
    f"CREATE TABLE IF NOT EXISTS open_bookings (scheduler TEXT NOT NULL, {_columns(OPEN_COLUMNS)},"
    " PRIMARY KEY (scheduler, booking))",
    "CREATE TABLE IF NOT EXISTS token_times (variant TEXT PRIMARY KEY, prompt_s DOUBLE PRECISION NOT NULL,"
    " output_s DOUBLE PRECISION NOT NULL)",
)

#: What makes a database of one version one of the next.
_UPGRADES = {
    1: tuple(
        f"ALTER TABLE requests ADD COLUMN {name} BIGINT NOT NULL DEFAULT 0"
        for name in ("variant_saved_nano", "prompt_price", "output_price", "shadow")
    )
}

#: An entry of the core: its kind, and what belongs to it.
Entry = tuple[Any, ...]
#: What the core wants to hear of an entry.
Answer = tuple[int, int]

_ROWS_AT_ONCE = 200
_DELETE_AT_ONCE = 10_000
_MS = 1000


def database_of(config: LedgerConfig) -> str:
    """Where the ledger is; empty = there is none."""
    return str(process.state_folder() / "ledger.db") if config.database == "auto" else config.database


class Store:
    """One connection. Any method may raise :class:`StoreError`, after which it can be tried again."""

    def __init__(self, connection: Any, name: str, *, begin: str, locks: Sequence[IO[str]] = ()) -> None:
        self.name = name
        self._connection = connection
        self._begin = begin
        self._locks = locks

    @classmethod
    def open(cls, database: str, name: str, *, write: bool = True) -> Self:
        """A database by its file or ``postgresql://`` URL. To ``write``, as the scheduler of that name: where another
        process has it, as the next free one (``name.2``). Raises ConfigError."""
        if database.startswith(postgres.SCHEMES):
            postgres.check("ledger.database")
            store = cls(postgres.Connection(database), name, begin="BEGIN")
        else:
            path = Path(database)
            locks = []
            try:
                if write:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    name, lock = _claim(path, name)
                    locks.append(lock)
                elif not path.exists():
                    raise ConfigError(f"there is no ledger {path}: no scheduler has written one (ledger.database)")
                connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
                connection.execute("PRAGMA journal_mode = WAL")
                # A power cut may cost the last commits, a crash of ours never.
                connection.execute("PRAGMA synchronous = NORMAL")
            except (OSError, sqlite3.Error) as error:
                raise ConfigError(f"ledger.database: cannot use {path}: {error}") from error
            store = cls(connection, name, begin="BEGIN IMMEDIATE", locks=locks)
        try:
            store._prepare(database, write=write)
        except StoreError as error:
            store.close()
            raise ConfigError(f"ledger.database: {error}") from error
        return store

    def _prepare(self, database: str, *, write: bool) -> None:
        if write:
            with self._transaction():
                for statement in _SCHEMA:
                    self._run(statement)
                if not self.query("SELECT version FROM ledger_version"):
                    self._run("INSERT INTO ledger_version VALUES (?)", (VERSION,))
                while (steps := _UPGRADES.get(version := self._version())) is not None:
                    for statement in steps:
                        self._run(statement)
                    self._run("UPDATE ledger_version SET version = ?", (version + 1,))
        if (version := self._version()) != VERSION:
            raise StoreError(f"{database} is of version {version}, this program reads {VERSION}")

    def _version(self) -> int:
        ((version,),) = self.query("SELECT version FROM ledger_version")
        return int(version)

    def close(self) -> None:
        """No more."""
        self._connection.close()
        for lock in self._locks:
            lock.close()

    # --- what the core wants ------------------------------------------------------------------------------------------

    def carry_out(self, entries: Sequence[Entry], *, shared: bool) -> list[Answer]:
        """Does it all in one transaction; one answer for each. ``shared``: only this scheduler's rows are what it has
        spent. Drawing is not done here (``shared.py``): the second number is 0."""
        answers: list[Answer] = []
        with self._transaction():
            for kind, group in itertools.groupby(entries, key=lambda entry: entry[0]):
                match kind:
                    case "row":
                        answers += self._add_rows([entry[1:] for entry in group])
                    case "keep":
                        for entry in group:
                            self._insert("open_bookings", OPEN_COLUMNS, [entry[1:]])
                            answers.append((0, 0))
                    case "forget":
                        for _, booking in group:
                            self._run(
                                "DELETE FROM open_bookings WHERE scheduler = ? AND booking = ?", (self.name, booking)
                            )
                            answers.append((0, 0))
                    case "look":
                        answers += [(self._spent(*entry[1:6], shared=shared), 0) for entry in group]
                    case _:
                        answers += [(0, 0) for _ in group]
        return answers

    def _add_rows(self, rows: list[tuple[Any, ...]]) -> list[Answer]:
        answers: list[Answer] = []
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            new = set(self._insert("requests", COLUMNS, part, returning="booking, request_id"))
            answers += [(int((row[0], row[1]) in new), 0) for row in part]
            bookings = ", ".join("?" for _ in part)
            self._run(
                f"DELETE FROM open_bookings WHERE scheduler = ? AND booking IN ({bookings})",
                (self.name, *(row[0] for row in part)),
            )
        return answers

    def _insert(
        self, table: str, columns: Sequence[str], rows: list[tuple[Any, ...]], *, returning: str = ""
    ) -> list[tuple[Any, ...]]:
        places = "(" + ", ".join("?" for _ in range(len(columns) + 1)) + ")"
        statement = (
            f"INSERT INTO {table} (scheduler, {', '.join(columns)}) VALUES {', '.join(places for _ in rows)}"
            " ON CONFLICT DO NOTHING"
        )
        values = [value for row in rows for value in (self.name, *row)]
        if returning:
            return self.query(f"{statement} RETURNING {returning}", values)
        self._run(statement, values)
        return []

    def _spent(self, tenant: str, kind: str, which: str, from_ms: int, to_ms: int, *, shared: bool) -> int:
        """What rows have counted against a meter."""
        if kind == "concurrent_requests":
            return 0
        what = "nano_dollars" if kind == "dollars_per_month" else "prompt_tokens + output_tokens"
        where, values = ["tenant = ?"], [tenant]
        if kind == "session_tokens":
            where.append("session = ?")
            values.append(which)
        else:
            where.append("placed_ms >= ? AND placed_ms < ?")
            values += [from_ms, to_ms]  # type: ignore[list-item]
        if shared:
            where.append("scheduler = ?")
            values.append(self.name)
        ((spent,),) = self.query(f"SELECT COALESCE(SUM({what}), 0) FROM requests WHERE {' AND '.join(where)}", values)
        return int(spent)

    def open_bookings(self) -> list[tuple[Any, ...]]:
        """What this scheduler's last start left open."""
        return self.query(f"SELECT {', '.join(OPEN_COLUMNS)} FROM open_bookings WHERE scheduler = ?", (self.name,))

    def token_times(self) -> dict[str, tuple[float, float]]:
        """Seconds for a token of a prompt and of an answer, by variant, as last measured."""
        return {name: (prompt_s, output_s) for name, prompt_s, output_s in self.query("SELECT * FROM token_times")}

    def keep_token_times(self, measured: dict[str, tuple[float, float]]) -> None:
        """The same, for the next start."""
        with self._transaction():
            for variant, (prompt_s, output_s) in measured.items():
                self._run(
                    "INSERT INTO token_times VALUES (?, ?, ?) ON CONFLICT (variant) DO UPDATE"
                    " SET prompt_s = excluded.prompt_s, output_s = excluded.output_s",
                    (variant, prompt_s, output_s),
                )

    def forget_before(self, time_s: float) -> bool:
        """Deletes rows that are older, some at a time; whether there may be more."""
        inner = f"SELECT booking, request_id FROM requests WHERE placed_ms < ? LIMIT {_DELETE_AT_ONCE}"
        with self._transaction():
            count = self._run(
                f"DELETE FROM requests WHERE (booking, request_id) IN ({inner})", (int(time_s * _MS),)
            ).rowcount
        return bool(count >= _DELETE_AT_ONCE)

    # --- statements ---------------------------------------------------------------------------------------------------

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a statement with ``?`` for its values."""
        return list(self._run(statement, values).fetchall())

    def _run(self, statement: str, values: Sequence[Any] = ()) -> Any:
        try:
            return self._connection.execute(statement, tuple(values))
        except Exception as error:
            if not isinstance(error, _failures()):
                raise
            raise StoreError(str(error).strip()) from error

    @contextlib.contextmanager
    def _transaction(self) -> Any:
        self._run(self._begin)
        try:
            yield
            self._run("COMMIT")
        except BaseException:
            with contextlib.suppress(StoreError):
                self._run("ROLLBACK")
            raise


class StoreError(Exception):
    """The database cannot be used now; its text is for people."""


def _claim(path: Path, name: str) -> tuple[str, IO[str]]:
    """A name that no other process has."""
    for number in itertools.count(1):
        claimed = name if number == 1 else f"{name}.{number}"
        safe = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in claimed)
        lock = open(path.with_name(f"{path.name}.{safe}.lock"), "w", encoding="ascii")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return claimed, lock
    raise AssertionError("unreachable")


def _failures() -> tuple[type[Exception], ...]:
    return (sqlite3.Error, *postgres.failures())
