"""Servers of other people that tests use where they are installed and start: Redis or Valkey, and PostgreSQL.

One that is installed but dies before it serves says nothing about our code (an `initdb` was seen to end with a
segmentation fault): its tests are skipped with what it said. What fails once it serves is a failure.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Its URL."""
    pytest.importorskip("redis")
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    port = free_port()
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL) as server:
        try:
            _wait_for_port(port, server)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()


@contextlib.contextmanager
def postgres_server(folder: Path) -> Iterator[str]:
    """Its URL."""
    pytest.importorskip("psycopg")
    found = [str(path) for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    program = shutil.which("postgres") or (sorted(found)[-1] if found else None)
    if program is None:
        pytest.skip("PostgreSQL is not installed")
    data, port = folder / "postgres", free_port()
    user: dict[str, str] = {}
    if os.getuid() == 0:
        # It refuses to run as root.
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        user = {"user": "postgres"}
        data.mkdir()
        shutil.chown(data, "postgres")
        for parent in data.parents:
            if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
    initdb = [str(Path(program).with_name("initdb")), "-D", str(data), "-U", "tester", "-A", "trust", "-N"]
    made = subprocess.run(  # type: ignore[call-overload]
        initdb, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/", **user
    )
    if made.returncode != 0:
        pytest.skip(f"PostgreSQL's initdb fails on this machine ({made.returncode}): {made.stderr.strip()}")
    arguments = ["-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", str(data), "-F"]
    with subprocess.Popen(  # type: ignore[call-overload]
        [program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **user
    ) as server:
        try:
            _wait_for_port(port, server)
            url = f"postgresql://tester@127.0.0.1:{port}/postgres"
            _wait_for_postgres(url)
            yield url
        finally:
            server.terminate()


def _wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s:
        if server.poll() is not None:
            pytest.skip(f"{server.args!r} ended with {server.returncode} before it served")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens at port {port}")


def _wait_for_postgres(url: str) -> None:
    import psycopg

    until_s = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            # It says so while it starts.
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
