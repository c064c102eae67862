"""Fixtures of the unit tests that live beside what they need."""

from __future__ import annotations

from tests.support.batches import batches_url, opener

__all__ = ["batches_url", "opener"]
