"""What a context server hands to a generation server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_TYPES = ("context_only", "generation_only", "context_and_generation")


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    """Opaque to all between the two servers."""

    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    multimodal_embedding_handles: list[dict[str, Any]] | None = None
    multimodal_hashes: list[list[int]] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in _TYPES:
                raise ValueError(f"Unknown request type: {self.request_type}. Must be one of {', '.join(_TYPES)}")
