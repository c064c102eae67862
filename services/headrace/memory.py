"""Memory that was needed for a while: loading a vocabulary takes many times what it keeps."""

from __future__ import annotations

import ctypes


def release_freed() -> None:
    """Give memory that is free, but kept by the C library for later, back to the system. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
