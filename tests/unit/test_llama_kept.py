"""Where the llama.cpp engine keeps KV: places in memory and in a file, and whether the file is worth it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import ModelError
from headrace.worker.engines.llama_kept import KeptBlocks


def kept(folder: Path, memory: int, disk: int) -> KeptBlocks:
    return KeptBlocks(block_bytes=5000, block_tokens=16, memory_bytes=memory, disk_bytes=disk, folder=folder)


def test_a_place_gives_back_what_was_put_there_and_leaves_no_file(tmp_path: Path) -> None:
    blocks = kept(tmp_path / "made", 10_000, 3 * 8192 + 100)
    assert (blocks.places, blocks.on_disk) == (5, 3)
    for place in range(blocks.places):
        assert blocks[place].shape == (5000,)
        blocks[place][:] = place + 1
    blocks[4][:] = blocks[0]
    blocks.will_load(range(blocks.places))
    for place, value in enumerate((1, 2, 3, 4, 1)):
        with blocks.loading(place) as kv:
            assert np.all(kv == value)
    assert not os.listdir(tmp_path / "made")
    blocks.close()
    assert kept(tmp_path, 0, 8192).places == 1
    assert kept(tmp_path, 4999, 0).places == 0


def test_disk_pays_while_loading_takes_less_than_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("headrace.worker.engines.llama_kept.time.perf_counter", lambda: now_s)
    blocks = kept(tmp_path, 5000, 8192)

    def load(place: int, duration_s: float) -> None:
        nonlocal now_s
        with blocks.loading(place):
            now_s += duration_s

    blocks.computed(160, 1.0)
    assert blocks.disk_pays
    load(1, 0.09)
    assert blocks.disk_pays
    # Memory says nothing of the disk, nor a few tokens of what computing takes.
    load(0, 9.0)
    blocks.computed(3, 0.0)
    assert blocks.disk_pays
    for _ in range(3):
        load(1, 0.2)
    assert not blocks.disk_pays
    # Bad times pass.
    for _ in range(100):
        load(1, 0.01)
    assert blocks.disk_pays


def test_a_disk_without_that_room_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"prefix_cache_disk_mib: 1073741824 MiB cannot be had in .*, where \d+ MiB are free"
    ):
        kept(tmp_path, 0, 1 << 50)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ModelError, match=r"cannot be had in .*: "):
        kept(file, 0, 8192)
