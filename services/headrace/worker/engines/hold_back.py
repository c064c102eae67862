"""A logits processor for TensorRT-LLM: ends that may not be drawn yet.

It is copied to the engine's process and found there by this module's name; it has no base class, so that nothing needs
``tensorrt_llm`` to load it.
"""

from __future__ import annotations

from typing import Any


class HoldBack:
    """These ids cannot be drawn before the sequence has so many ids."""

    def __init__(self, ids: list[int], until: int) -> None:
        self._ids = ids
        self._until = until

    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None:
        """Changes the logits in place."""
        if len(token_ids[0]) >= self._until:
            return
        if stream_ptr is None:
            logits[..., self._ids] = float("-inf")
            return
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(stream_ptr)):
            logits[..., self._ids] = float("-inf")
