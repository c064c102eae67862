"""``python -m headrace``: the command line, and how a child of ``headrace up`` dies with its parent."""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """When ``headrace up`` started this process: have the kernel kill it should that one die without a word.

    SIGKILL, because nobody would be left to wait for a drain or to notice that it never ends. To be called first of
    all, by the main thread.
    """
    parent = os.environ.pop("HEADRACE_PARENT_PID", "")
    if not parent or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        # It died before the kernel was asked.
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent()
    from headrace.cli import main

    main()
