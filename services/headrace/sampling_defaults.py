"""How ids are drawn for requests that say nothing of it: as the model's makers recommend, or as the operator says.

Read from a model's description (``models.py``, ``gguf_text.py``) and from the configuration (``router/service.py``).
The ranges, and that a request which names any of these fields gets none of the defaults, are the router's:
``gateway_rs/src/request/draft.rs``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import ConfigError

Sampling = Mapping[str, float]

#: What can have a default, by its name in requests; and of these, what ``generation_config.json`` may name.
NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
CHECKPOINT_KEYS = {name: name for name in NAMES[:5]}
GGUF_KEYS = {
    name: f"general.sampling.{theirs}"
    for name, theirs in {**CHECKPOINT_KEYS, "temperature": "temp", "repetition_penalty": "penalty_repeat"}.items()
}


def recommended(value: Callable[[str], Any], keys: Mapping[str, str]) -> dict[str, float]:
    """What a description says, by our names. ``value`` finds a key's; what is no number is as good as absent."""
    said: dict[str, float] = {}
    for name, key in keys.items():
        found = value(key)
        if isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found):
            said[name] = _number(name, found)
    return said


def configured(setting: str, makers: Sampling) -> Sampling:
    """By a model's ``sampling`` setting; ``makers``: what they recommend. Raises ConfigError."""
    if setting == "model":
        return makers
    if setting == "neutral":
        return {}
    said: dict[str, float] = {}
    for part in setting.split(","):
        name, _, number = (each.strip() for each in part.partition("="))
        try:
            found = float(number)
            if name not in NAMES or name in said or not math.isfinite(found):
                raise ValueError
            said[name] = _number(name, found)
        except ValueError:
            raise ConfigError(
                "models.sampling: must be 'model', 'neutral', or numbers as in 'temperature=0.2, top_p=0.9' for any of "
                f"{', '.join(NAMES)}; got {part.strip()!r} in {setting!r}"
            ) from None
    return said


def _number(name: str, value: float) -> float:
    return int(value) if name == "top_k" else value
