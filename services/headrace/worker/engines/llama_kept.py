"""Where the llama.cpp engine keeps blocks of KV that no lane uses: numbered places in memory, then in a file.

The file has no name once it is open, so that nothing of it is left whatever ends the worker. Its room is taken at the
start: a disk that fills up later cannot take it away (the system would end the process for touching it). It is mapped,
so the system reads ahead what is about to be loaded, keeps in memory what is loaded often while there is memory, and
writes back in its own time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError

Bytes = npt.NDArray[np.uint8]

#: The latest of these many measurements weighs one part.
_SPAN = 32


class _Mean:
    """A running mean of seconds; None before the first."""

    def __init__(self) -> None:
        self.value_s: float | None = None
        self._count = 0

    def add(self, value_s: float) -> None:
        self._count = min(self._count + 1, _SPAN)
        before = self.value_s or 0.0
        self.value_s = before + (value_s - before) / self._count


class KeptBlocks:
    """See the module's text."""

    def __init__(
        self, *, block_bytes: int, block_tokens: int, memory_bytes: int, disk_bytes: int, folder: Path
    ) -> None:
        """``folder``: of the file. Raises ModelError when it cannot have so many bytes there."""
        self.block_bytes = block_bytes
        self._block_tokens = block_tokens
        # Pages of it are taken from the system when they are first written.
        self._memory: Bytes = np.empty((memory_bytes // block_bytes, block_bytes), np.uint8)
        # A block begins with a page of its own: that is what the system reads ahead.
        self._stride = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.on_disk = disk_bytes // self._stride
        self._map: mmap.mmap | None = None
        self._disk: Bytes = np.empty((0, self._stride), np.uint8)
        if self.on_disk:
            self._map = _map_file(folder, self.on_disk * self._stride)
            self._disk = np.frombuffer(self._map, np.uint8).reshape(self.on_disk, self._stride)
        self._load = _Mean()
        self._compute = _Mean()

    @property
    def places(self) -> int:
        """All; the last ``on_disk`` of them on disk."""
        return len(self._memory) + self.on_disk

    def __getitem__(self, place: int) -> Bytes:
        """A place's bytes, to read and to write."""
        in_memory = len(self._memory)
        return self._memory[place] if place < in_memory else self._disk[place - in_memory, : self.block_bytes]

    def will_load(self, places: Iterable[int]) -> None:
        """Has the system read ahead what is on disk of these."""
        if self._map is not None:
            for place in places:
                if (at := place - len(self._memory)) >= 0:
                    self._map.madvise(mmap.MADV_WILLNEED, at * self._stride, self._stride)

    @contextlib.contextmanager
    def loading(self, place: int) -> Iterator[Bytes]:
        """The same as ``[place]``, and learns from disk's how long that takes."""
        if place < len(self._memory):
            yield self._memory[place]
            return
        began_s = time.perf_counter()
        yield self[place]
        self._load.add(time.perf_counter() - began_s)

    def computed(self, tokens: int, duration_s: float) -> None:
        """So many tokens of prompts took so long, alone in their step."""
        if tokens >= self._block_tokens:
            self._compute.add(duration_s / tokens * self._block_tokens)

    @property
    def disk_pays(self) -> bool:
        """Whether a block is sooner loaded from disk than computed, as far as is known."""
        load_s, compute_s = self._load.value_s, self._compute.value_s
        return load_s is None or compute_s is None or load_s < compute_s

    def close(self) -> None:
        """Gives memory and file back; nothing may be read any more."""
        self._memory = self._disk = np.empty((0, 0), np.uint8)
        if self._map is not None:
            # A view that somebody still has keeps it until he lets go.
            with contextlib.suppress(BufferError):
                self._map.close()
            self._map = None


def _map_file(folder: Path, size: int) -> mmap.mmap:
    asked = f"worker.prefix_cache_disk_mib: {size >> 20} MiB cannot be had in {folder}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Asked for first: the system might take all that there is before it finds that it is not enough.
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        if free < size:
            raise ModelError(f"{asked}, where {free >> 20} MiB are free")
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return mmap.mmap(file.fileno(), size)
    except OSError as failure:
        raise ModelError(f"{asked}: {failure.strerror}") from None
