"""How a service's process begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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
