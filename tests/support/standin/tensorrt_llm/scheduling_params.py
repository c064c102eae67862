"""Which rank of attention data parallelism runs a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class SchedulingParams:
    """See the module's text."""

    attention_dp_rank: int | None = None
    attention_dp_relax: bool | None = None
