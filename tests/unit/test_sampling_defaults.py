"""What requests that say nothing of sampling are drawn with."""

from __future__ import annotations

import math

import pytest

from headrace.errors import ConfigError
from headrace.sampling_defaults import CHECKPOINT_KEYS, configured, recommended


def test_a_description_is_read_and_what_is_no_number_is_not() -> None:
    said = {"temperature": 0.6, "top_k": 20.0, "top_p": None, "min_p": "0.1", "repetition_penalty": math.nan}
    found = recommended(said.get, CHECKPOINT_KEYS)
    assert found == {"temperature": 0.6, "top_k": 20}
    assert isinstance(found["top_k"], int)


def test_the_makers_or_nobody_or_the_operator() -> None:
    makers = {"temperature": 0.6}
    assert configured("model", makers) == makers
    assert configured("neutral", makers) == {}
    assert configured(" temperature=0.2,top_k = 5 ", makers) == {"temperature": 0.2, "top_k": 5}


@pytest.mark.parametrize("part", ["", "temperature", "warmth=1", "temperature=hot", "top_k=0.5.1", "top_p=nan"])
def test_what_cannot_be_read_is_named(part: str) -> None:
    with pytest.raises(ConfigError, match=r"models\.sampling") as refused:
        configured(f"min_p=0.1,{part}", {})
    assert repr(part) in str(refused.value)


def test_a_name_is_said_once() -> None:
    with pytest.raises(ConfigError, match=r"'top_p=0\.2'"):
        configured("top_p=0.1,top_p=0.2", {})
