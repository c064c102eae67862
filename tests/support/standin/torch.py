"""The few words of torch that a program around TensorRT-LLM says, on numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Tensor = np.ndarray
float32 = np.float32


def zeros(size: int, dtype: Any = float32) -> npt.NDArray[Any]:
    """A tensor of zeros."""
    return np.zeros(size, dtype)


class cuda:
    """There is none."""

    @staticmethod
    def device_count() -> int:
        return 0
