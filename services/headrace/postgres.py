"""PostgreSQL, for those who keep something there: a connection that comes back after it broke, and what can go wrong.

Statements have ``?`` for their values, as SQLite's have, so that a store can say the same to both. psycopg comes with
the extra ``postgres``; what is kept, and what a transaction is, is each store's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError

SCHEMES = ("postgresql://", "postgres://")


def check(key: str) -> None:
    """Raises ConfigError, in the name of the setting that wants it, where psycopg is not installed."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{key}: PostgreSQL needs `pip install 'headrace[postgres]'`") from error


def failures() -> tuple[type[Exception], ...]:
    """What a connection may raise; nothing where psycopg is not installed."""
    try:
        import psycopg
    except ImportError:
        return ()
    return (psycopg.Error,)


class Connection:
    """Opened at the first statement, and again after it broke; then a transaction has to be done again as a whole."""

    def __init__(self, url: str, *, prepare: Sequence[str] = ()) -> None:
        """``prepare``: said first on each new connection."""
        self._url = url
        self._prepare = prepare
        self._connection: Any = None

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Any:
        """Its cursor."""
        if self._connection is None or self._connection.broken or self._connection.closed:
            self._connection = self._open()
        return self._connection.execute(statement.replace("?", "%s"), tuple(values))

    def _open(self) -> Any:
        import psycopg

        connection = psycopg.connect(self._url, autocommit=True, connect_timeout=10)
        try:
            for statement in self._prepare:
                connection.execute(statement)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Until the next statement."""
        if self._connection is not None:
            self._connection.close()
