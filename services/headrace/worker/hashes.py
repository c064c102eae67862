"""The names of KV blocks. The rule is Rust's (``gateway_rs/src/blocks.rs``), so that routers and workers say the same;
this is the one place that asks for it here."""

from __future__ import annotations

import logging
from typing import Protocol

log = logging.getLogger(__name__)


class NameBlocks(Protocol):
    """The names of the full blocks of these ids, which follow the block named ``parent`` (0 = none)."""

    def __call__(self, ids: list[int], lora: str, salt: bytes, parent: int = 0) -> list[int]: ...


try:
    from headrace import _gateway
except ImportError:  # A checkout whose extension is not built: everything works but block events.
    _gateway = None  # type: ignore[assignment]


def block_namer(model: str, block_tokens: int) -> NameBlocks | None:
    """How blocks of that model are named; None when the extension is missing, and then no events are published."""
    if _gateway is None:
        log.warning("headrace._gateway is not built: no block events are published")
        return None

    def names(ids: list[int], lora: str, salt: bytes, parent: int = 0) -> list[int]:
        return _gateway.block_hashes(ids, block_tokens, model, lora, salt, parent)

    return names
