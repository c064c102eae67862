"""The way to the router's inner door: its HTTP API on a socket of this process's own, where tenants are named.

Lines thus are ordinary requests, validated, limited, counted and answered as any other, and in OpenAI's form already.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from headrace.batches.runner import Reply
from headrace.errors import HeadraceError
from headrace.sse import Connection


class InnerDoor:
    """Connections are kept for the next line; there are never more than lines under way."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._idle: list[Connection] = []

    async def ask(self, tenant: str, endpoint: str, body: bytes, request_id: str) -> Reply:
        """See :class:`headrace.batches.runner.Door`."""
        status, headers, content = await self._send(
            "POST", endpoint, body, tenant, "x-headrace-class: batch", f"x-request-id: {request_id}"
        )
        after = headers.get("retry-after", "")
        return Reply(status, content, headers.get("x-request-id", ""), float(after) if after.isdigit() else None)

    async def models(self, tenant: str) -> Collection[str] | None:
        """See :class:`headrace.batches.runner.Door`."""
        status, _, content = await self._send("GET", "/v1/models", b"", tenant)
        if status == 401:
            return None
        if status != 200:
            raise HeadraceError(f"the inner door answered {status}")
        return {str(model["id"]) for model in json.loads(content)["data"]}

    async def _send(
        self, method: str, path: str, body: bytes, tenant: str, *headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = self._idle.pop() if self._idle else Connection.to_socket(self._socket)
        try:
            named = f"x-headrace-tenant: {tenant.encode().hex()}"
            await connection.send(method, path, body, (named, *headers))
            response = connection.response
            content = await connection.body()
        except BaseException:
            # Also when the line is given up: the router sees it, and stops the generation.
            await connection.close()
            raise
        self._idle.append(connection)
        return response.status, response.headers, content

    async def close(self) -> None:
        """Drops the connections that nobody uses."""
        while self._idle:
            await self._idle.pop().close()
