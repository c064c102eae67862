"""The names of KV blocks. The rule is Rust's (``gateway_rs/src/blocks.rs``), so that routers and workers say the same;
this is the one place that asks for it here."""

from __future__ import annotations

import logging

from headrace.worker.kv import HashBlocks

log = logging.getLogger(__name__)

try:
    from headrace import _gateway
except ImportError:  # A checkout whose extension is not built: everything works but block events.
    _gateway = None  # type: ignore[assignment]


def block_namer(model: str, block_tokens: int) -> HashBlocks | None:
    """How blocks of that model are named; None when the extension is missing, and then no events are published."""
    if _gateway is None:
        log.warning("headrace._gateway is not built: no block events are published")
        return None

    def names(ids: list[int], lora: str, salt: bytes) -> list[int]:
        return _gateway.block_hashes(ids, block_tokens, model, lora, salt)

    return names
