"""Which release is played: what differs between releases asks here."""

from __future__ import annotations

import json
import os
from typing import Any


def settings() -> dict[str, Any]:
    """How the stand-in is set up: a JSON object in ``TRTLLM_STANDIN`` (see ``_engine.py``)."""
    found: dict[str, Any] = json.loads(os.environ.get("TRTLLM_STANDIN", "{}"))
    return found


__version__: str = settings().get("version", "1.2.1")
RELEASE = tuple(int(part) for part in __version__.split(".")[:2])
