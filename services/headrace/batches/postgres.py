"""Files and batches in PostgreSQL: several routers share them, on one machine or many.

Files' bytes are in the database too, in parts. A router's folder holds what is on its way, and copies of files that
were asked for there: all of it can be lost. One lock of the database's is held through each change, so that changes
come one after another as they do in SQLite; the bytes of uploads are sent before it is taken, because that takes time.

Leases are by the routers' clocks, which must not differ by more than ``batches.lease_s``: else batches change hands
more often than they need to. Each of their lines is still answered once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from headrace import postgres
from headrace.batches.store import SCHEMA, Bounds, Store, StoreError, disk_error, private, tables

#: Tables stand in a schema of their own: other programs' may have the same names.
_SCHEMA = "headrace_batches"
#: What everybody who changes something holds; any number that others do not use for something else.
_LOCK = 0x68656164_62617463
_PREPARE = (
    f"SET search_path TO {_SCHEMA}",
    # A router that stands still in mid-change is not waited for.
    "SET lock_timeout = '10s'",
    "SET idle_in_transaction_session_timeout = '10s'",
)
_PARTS = """CREATE TABLE parts (
    file TEXT NOT NULL REFERENCES files (id) ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
    part BIGINT NOT NULL,
    data BYTEA NOT NULL,
    PRIMARY KEY (file, part)
)"""
_PART_BYTES = 1 << 20


class PostgresStore(Store):
    """In the database of that URL; ``folder`` is this process's own."""

    def __init__(self, url: str, folder: Path, bounds: Bounds) -> None:
        """Raises StoreError: "busy" when another process has the folder, "away" when there is no database."""
        self._url = url
        super().__init__(folder, bounds)

    def _open(self, folder: Path) -> None:
        self._db = postgres.Connection(self._url, prepare=_PREPARE)
        with self._change() as db:
            # Whether it is there has to be asked: who may not make a schema may not say IF NOT EXISTS either.
            if db.execute("SELECT to_regnamespace(?)", (_SCHEMA,)).fetchone() == (None,):
                db.execute(f"CREATE SCHEMA {_SCHEMA}")
            if db.execute("SELECT to_regclass(?)", (f"{_SCHEMA}.version",)).fetchone() == (None,):
                made = tables("BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", "BYTEA")
                for statement in (*made, _PARTS, "CREATE TABLE version (version BIGINT NOT NULL)"):
                    db.execute(statement)
                db.execute("INSERT INTO version VALUES (?)", (SCHEMA,))
            (version,) = db.execute("SELECT version FROM version").fetchone()
        if version != SCHEMA:
            raise StoreError("busy", f"batches.database is of version {version}, this program reads {SCHEMA}")

    @staticmethod
    def _failures() -> tuple[type[Exception], ...]:
        return postgres.failures()

    def _failed(self, error: Exception) -> StoreError:
        return StoreError("away", f"batches.database cannot be used now: {str(error).strip()}")

    @staticmethod
    def _fact(name: str) -> str:
        kind = "TEXT" if name.endswith("_id") else "BIGINT"
        return f"CAST(CAST(facts AS JSON) ->> '{name}' AS {kind})"

    def _begin(self, uploads: Sequence[str]) -> None:
        self._db.execute("BEGIN")
        for file_id in uploads:
            self._send(file_id)
        self._db.execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))

    def _send(self, file_id: str) -> None:
        upload = self._uploads / file_id
        try:
            with open(upload, "rb") as file:
                for part, data in enumerate(iter(lambda: file.read(_PART_BYTES), b"")):
                    self._db.execute("INSERT INTO parts (file, part, data) VALUES (?, ?, ?)", (file_id, part, data))
            # The first copy. If the row does not come to be, it is swept away like any that has none.
            os.replace(upload, self._files / file_id)
        except OSError as error:
            raise disk_error(error) from error

    def _path(self, file_id: str) -> Path:
        path = self._files / file_id
        if not path.exists() and self._row("SELECT 1 FROM files WHERE id = ?", (file_id,)) is not None:
            self._fetch(file_id, path)
        return path

    def _fetch(self, file_id: str, path: Path) -> None:
        fresh = self._uploads / f"{file_id}.copy"
        try:
            with open(fresh, "wb", opener=private) as file:
                part = 0
                while rows := self._rows("SELECT data FROM parts WHERE file = ? AND part = ?", (file_id, part)):
                    file.write(rows[0][0])
                    part += 1
            # Whoever deleted it meanwhile deleted all of its parts at once: then it may be cut off, and nobody's.
            if self._row("SELECT 1 FROM files WHERE id = ?", (file_id,)) is not None:
                os.replace(fresh, path)
        except OSError as error:
            raise disk_error(error) from error
        finally:
            fresh.unlink(missing_ok=True)
