"""Limits that several schedulers share, in Redis or Valkey: each draws its part of a meter before it spends it.

A meter is a hash: what each scheduler has drawn, by its name. One script looks at the sum and adds, so two schedulers
can never have more than the limit together. What may be spent of what is drawn is the core's to say, as ever.
The server must keep its data over restarts (``appendonly yes``) for as long as limits last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.errors import ConfigError
from headrace.ledger.store import Answer, Entry, StoreError

_PREFIX = "headrace:meter:"
#: Meters without an end are forgotten when nobody has drawn from them for so long.
_IDLE_S = 90 * 86_400
#: A meter outlives its time by this: requests that were placed in it end later.
_AFTER_S = 86_400

_DRAW = """
local total = 0
for _, drawn in ipairs(redis.call('HVALS', KEYS[1])) do total = total + tonumber(drawn) end
local give = math.max(0, math.min(tonumber(ARGV[2]), tonumber(ARGV[3]) - total))
local own = redis.call('HINCRBY', KEYS[1], ARGV[1], give)
redis.call('EXPIRE', KEYS[1], ARGV[4])
return own
"""


class SharedMeters:
    """A connection to the server. Used from one thread."""

    def __init__(self, url: str, name: str) -> None:
        """``name``: the scheduler's, the same over restarts. Raises ConfigError."""
        try:
            import redis
        except ImportError as error:
            raise ConfigError("ledger.shared: Redis needs `pip install 'headrace[redis]'`") from error
        try:
            self._client = redis.Redis.from_url(
                url, socket_timeout=5.0, socket_connect_timeout=5.0, decode_responses=True
            )
        except ValueError as error:
            raise ConfigError(f"ledger.shared: {error}") from error
        self._failure = redis.RedisError
        self._draw: Any = self._client.register_script(_DRAW)
        self._name = name

    def carry_out(self, entries: Sequence[Entry], answers: list[Answer]) -> list[Answer]:
        """The answers, with what is drawn for each look. May be done again: what is drawn twice is given back later.
        Raises StoreError."""
        done = list(answers)
        try:
            for index, entry in enumerate(entries):
                if entry[0] == "look":
                    _, tenant, kind, which, _, to_ms, want, limit = entry
                    done[index] = (answers[index][0], self._drawn(tenant, kind, which, to_ms, want, limit))
                elif entry[0] == "return":
                    _, tenant, kind, which, drawn = entry
                    self._client.hset(_key(tenant, kind, which), self._name, drawn)
        except self._failure as error:
            raise StoreError(f"the shared limits cannot be reached: {error}") from error
        return done

    def _drawn(self, tenant: str, kind: str, which: str, to_ms: int, want: int, limit: int) -> int:
        keep_s = int(to_ms / 1000 - time.time() + _AFTER_S) if to_ms else _IDLE_S
        return int(self._draw(keys=[_key(tenant, kind, which)], args=[self._name, want, limit, max(keep_s, 60)]))

    def close(self) -> None:
        """No more."""
        self._client.close()


def _key(tenant: str, kind: str, which: str) -> str:
    return f"{_PREFIX}{kind}:{tenant}:{which}"
