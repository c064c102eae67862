"""``headrace batch`` in a terminal of its own, at a real mesh: output, exit codes, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import http
from tests.support.mesh import SERVICES, Mesh
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("command")
    mesh = Mesh(
        folder,
        [ToyModel("toy", context_tokens=256)],
        batches={"data_dir": str(folder / "data")},
        worker={
            "address": "127.0.0.1:0",
            "metrics_address": "127.0.0.1:0",
            "model": "toy",
            "engine": "sim",
            "slots": 8,
            "sim_step_ms": 1.0,
            "sim_prefill_tokens_per_s": 1e6,
        },
    )
    mesh.start()
    yield mesh
    mesh.stop()


@pytest.fixture
async def up(mesh: Mesh) -> Mesh:
    async def ready() -> bool:
        return (await http(mesh.http, "GET", "/health"))[0] == 200 == (await http(mesh.http, "GET", "/v1/files"))[0]

    await eventually(ready, "the router is ready, with its batches")
    return mesh


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-P", "-m", "headrace", "batch", *arguments)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SERVICES), "PYTHONUTF8": "1"}
    return await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe)


async def ran(*arguments: str) -> tuple[int, str, str]:
    process = await start(*arguments)
    out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def requests(path: Path, count: int, **body: Any) -> Path:
    asked = {"model": "toy", "prompt": "hello", "max_tokens": 4, "ignore_eos": True} | body
    lines = [
        json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": asked})
        for number in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


async def test_a_file_goes_in_and_answers_come_out(up: Mesh, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", 30)
    code, out, err = await ran("run", str(file), "--target", up.grpc)
    assert code == 0, err
    assert [json.loads(line)["custom_id"] for line in out.splitlines()] == [f"c{number}" for number in range(30)]
    assert "completed: 30 of 30 answered\n" in err
    output = tmp_path / "out.jsonl"
    code, out, err = await ran("run", str(file), "--target", up.grpc, "--output", str(output), "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert (said["status"], said["request_counts"]) == ("completed", {"total": 30, "completed": 30, "failed": 0})
    assert len(output.read_text().splitlines()) == 30
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]


async def test_what_fails_is_counted_and_can_be_fetched(up: Mesh, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", 3, temperature=-1)
    code, out, err = await ran("run", str(file), "--target", up.grpc)
    assert (code, out) == (1, "")
    assert "0 of 3 answered, 3 failed" in err
    name = err.split()[1]
    errors = tmp_path / "errors.jsonl"
    code, out, err = await ran("show", name, "--errors", str(errors), "--target", up.grpc)
    assert code == 0, err
    assert name in out
    assert [json.loads(line)["response"]["status_code"] for line in errors.read_text().splitlines()] == [400] * 3


async def test_a_bad_file_is_told_of_by_line(up: Mesh, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", 2)
    file.write_text(file.read_text() + "{\n")
    code, out, err = await ran("run", str(file), "--target", up.grpc)
    assert (code, out) == (1, "")
    assert "line 3: invalid_json_line" in err


async def test_detached_it_runs_on_and_is_listed_shown_and_cancelled(up: Mesh, tmp_path: Path) -> None:
    file = requests(tmp_path / "in.jsonl", 2000, max_tokens=200)
    code, out, err = await ran("run", str(file), "--target", up.grpc, "--detach")
    assert code == 0, err
    name = out.strip()
    code, out, _ = await ran("list", "--target", up.grpc, "--json", "--limit", "1")
    assert (code, json.loads(out)[0]["id"]) == (0, name)
    code, out, _ = await ran("cancel", name, "--target", up.grpc)
    assert (code, out.split()[:2]) == (0, [name, "cancelling:"])

    async def cancelled() -> bool:
        _, out, _ = await ran("show", name, "--target", up.grpc, "--json")
        return bool(json.loads(out)["status"] == "cancelled")

    await eventually(cancelled, "it is cancelled", TIMEOUT_S)


async def test_ctrl_c_cancels_and_fetches_what_was_answered(up: Mesh, tmp_path: Path) -> None:
    file, output = requests(tmp_path / "in.jsonl", 2000, max_tokens=100), tmp_path / "out.jsonl"
    process = await start("run", str(file), "--target", up.grpc, "--output", str(output), "--json")

    async def some() -> bool:
        _, _, listed = await http(up.http, "GET", "/v1/batches?limit=1")
        newest = listed["data"][0]
        return bool(newest["status"] == "in_progress" and newest["request_counts"]["completed"])

    await eventually(some, "some lines are answered", TIMEOUT_S)
    process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == 130, err
    said = json.loads(out)
    assert said["status"] == "cancelled"
    assert len(output.read_text().splitlines()) == said["request_counts"]["completed"] > 0
    assert b"Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "none.jsonl"), "cannot read none.jsonl"),
        (("run", __file__), "its first line is no request"),
        (("show", "batch_none"), "there is no batch 'batch_none'"),
    ],
)
async def test_a_mistake_is_one_line(up: Mesh, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = await ran(*arguments, "--target", up.grpc)
    assert (out, message in err, "Traceback" in err) == ("", True, False)
    assert code == (2 if arguments[0] == "run" else 1)
