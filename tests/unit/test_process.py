"""How a service's process begins, and that one which is killed leaves nothing once the next has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.process import available_memory_bytes, temporary_folder

#: A process that has such a folder, says which, and holds it until it is killed.
HOLDER = """
import sys
from headrace.process import temporary_folder
with temporary_folder("headrace-test-") as folder:
    (folder / "door.sock").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""

PROGRAM = """
import json, os, sys
from headrace.process import ask_for_huge_pages
ask_for_huge_pages()
print(json.dumps([os.getpid(), os.environ["GLIBC_TUNABLES"], sys.argv]))
"""


def run(environment: dict[str, str]) -> tuple[int, list[object]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, "one", "two words"], env=environment, stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return process.pid, json.loads(out)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_the_program_starts_again_once_as_the_same_process_with_the_same_arguments() -> None:
    bare = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    pid, said = run(bare)
    assert said == [pid, "glibc.malloc.hugetlb=1", ["-c", "one", "two words"]]


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_what_somebody_has_set_stays() -> None:
    pid, said = run(os.environ | {"GLIBC_TUNABLES": "glibc.malloc.check=0"})
    assert said == [pid, "glibc.malloc.check=0", ["-c", "one", "two words"]]


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 0),
        ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    7 kB\n"}, 7 << 10),
        ({"sys/fs/cgroup/a/memory.max": "900", "sys/fs/cgroup/a/memory.current": "300"}, 600),
        ({"sys/fs/cgroup/a/memory.max": "300", "sys/fs/cgroup/a/memory.current": "900"}, 0),
        (
            {
                "proc/meminfo": "MemAvailable: 7 kB\n",
                "sys/fs/cgroup/a/memory.max": "max",
                "sys/fs/cgroup/a/memory.current": "3",
            },
            7 << 10,
        ),
        (
            {
                "proc/meminfo": "MemAvailable: 7 kB\n",
                "sys/fs/cgroup/a/memory.max": "900",
                "sys/fs/cgroup/a/memory.current": "300",
            },
            600,
        ),
    ],
)
def test_memory_is_what_the_system_has_within_the_groups_bound(
    tmp_path: Path, files: dict[str, str], available: int
) -> None:
    for name, text in {"proc/self/cgroup": "4:memory:/other\n0::/a\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory_bytes(tmp_path) == available


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def names(base: Path) -> list[str]:
    return sorted(path.name for path in base.iterdir())


def test_what_a_killed_process_left_is_deleted_and_what_a_living_one_has_is_not(base: Path) -> None:
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        killed, living = (Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout is not None)
        # Of another kind, and no folder at all.
        (base / "headrace-other").mkdir()
        (base / "headrace-test-file").touch()
        holders[0].kill()
        holders[0].wait()
        assert (killed / "door.sock").exists()
        with temporary_folder("headrace-test-") as own:
            assert own.stat().st_mode & 0o077 == 0
            assert names(base) == sorted(["headrace-other", "headrace-test-file", living.name, own.name])
            assert (living / "door.sock").exists()
        assert not own.exists()
        holders[1].communicate("")
        assert names(base) == ["headrace-other", "headrace-test-file"]
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_link_in_its_place_is_not_followed(base: Path) -> None:
    (base / "precious").mkdir()
    (base / "precious" / "file").touch()
    (base / "headrace-test-link").symlink_to(base / "precious")
    with temporary_folder("headrace-test-"):
        pass
    assert (base / "precious" / "file").exists()


def test_one_that_was_taken_for_left_before_it_was_held_is_made_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    mkdtemp = tempfile.mkdtemp

    def taken_once(prefix: str) -> str:
        made.append(Path(mkdtemp(prefix=prefix)))
        if len(made) == 1:
            made[0].rmdir()
        return str(made[-1])

    monkeypatch.setattr("tempfile.mkdtemp", taken_once)
    with temporary_folder("headrace-test-") as folder:
        assert folder == made[1]
        assert folder.is_dir()
