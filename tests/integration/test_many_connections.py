"""More connections at once than the shell that started the router allowed by default."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator

import pytest

from tests.support.mesh import Mesh
from tests.support.toy import ToyModel

DESCRIPTORS = 128
CONNECTIONS = 300


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Its processes begin with few descriptors, and may have as many as this one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
    try:
        mesh = Mesh(tmp_path_factory.mktemp("many"), (ToyModel("toy"),)).start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    yield mesh
    mesh.stop()


async def test_idle_connections_beyond_the_default_limit_are_all_served(mesh: Mesh) -> None:
    host, port = mesh.http.rsplit(":", 1)

    async def knock() -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        return await reader.readline(), writer

    async with asyncio.timeout(30):
        # All stay open until the last one was answered.
        answered = await asyncio.gather(*(knock() for _ in range(CONNECTIONS)))
    assert {line for line, _ in answered} == {b"HTTP/1.1 200 OK\r\n"}
    for _, writer in answered:
        writer.close()
