"""Where batches are kept, for tests of both stores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.batches.service import open_store
from headrace.batches.store import Store
from headrace.config import BatchesConfig
from tests.support.servers import postgres_server

#: Opens a store on a folder of that name, with bounds if they matter; in PostgreSQL all are on one database.
Opener = Callable[..., Store]

#: A folder is one process's, a database is not.
shared = pytest.mark.parametrize("batches_url", ["postgres"], indirect=True)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def batches_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database; empty = SQLite."""
    if request.param == "sqlite":
        yield ""
        return
    with postgres_server(tmp_path_factory.mktemp("batches")) as url:
        yield url


@pytest.fixture
def opener(batches_url: str, tmp_path: Path) -> Iterator[Opener]:
    """Of stores that are empty at first. Those that a test leaves open are closed."""
    if batches_url:
        clean(batches_url)
    with contextlib.ExitStack() as opened:

        def open_one(folder: str, max_files: int = 1000, max_open_batches: int = 100) -> Store:
            data_dir = str(tmp_path / folder)
            config = BatchesConfig(data_dir, batches_url, max_files=max_files, max_open_batches=max_open_batches)
            return opened.enter_context(contextlib.closing(open_store(config)))

        yield open_one


def clean(url: str) -> None:
    """A database as before any router had it."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS headrace_batches CASCADE")
