"""The command line: what it prints, where, and with which exit code; never a traceback for a user's mistake."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_router import FakeHttpRouter, FakeRouter

from headrace import cli, config
from headrace.cli import services
from headrace.config import Config

TIMEOUT_S = 60.0
ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> int:
    """Run in this process; the exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    code = caught.value.code
    assert isinstance(code, int)
    return code


async def start(*arguments: str, **streams: Any) -> asyncio.subprocess.Process:
    """Run in a process of its own, its three streams being pipes unless said otherwise."""
    pipe = asyncio.subprocess.PIPE
    streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe, **streams}
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "services"), "PYTHONUTF8": "1"}
    command = (sys.executable, "-P", "-m", "headrace", *arguments)
    return await asyncio.create_subprocess_exec(*command, env=environment, **streams)


async def ended(process: asyncio.subprocess.Process, words: bytes = b"") -> tuple[int | None, str, str]:
    """Exit code, standard output, standard error."""
    out, err = await asyncio.wait_for(process.communicate(words), TIMEOUT_S)
    return process.returncode, out.decode(), err.decode()


def test_config_prints_what_can_be_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[worker]\nslots = 3\n")
    assert run("config", "--config", str(file), "--set", "router.http_address=a:1") == 0
    printed = capsys.readouterr().out
    read = config.parse(printed)
    assert (read.worker.slots, read.router.http_address) == (3, "a:1")
    assert "# choices generated at once (1 to 4096)\nslots = 3\n" in printed


def test_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--json") == 0
    table = json.loads(capsys.readouterr().out)
    assert table["models"][0]["source"] == "embedded"
    # An empty list of tables has no form of its own in TOML.
    assert table.pop("aliases") == []
    assert table == json.loads(json.dumps(tomllib.loads(config.to_toml(Config()))))


def test_the_configuration_file_may_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[worker]\nslots = 3\n")
    monkeypatch.setenv("HEADRACE_CONFIG", str(file))
    assert run("config", "--json") == 0
    assert json.loads(capsys.readouterr().out)["worker"]["slots"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["config", "--set", "worker.slots=x"], "worker.slots: expected a whole number, got 'x'"),
        (["config", "--config", "/no/such/file"], "cannot read configuration /no/such/file: No such file or directory"),
        (["scheduler", "--set", "scheduler.address=x"], "scheduler.address: expected host:port, got 'x'"),
        (["up", "--workers", "0"], "--workers: must be at least 1, got 0"),
        (
            ["up", "--engine", "gpu"],
            "worker.engine: must be one of llama_cpp, tensorrt_llm, trtllm_grpc, openengine, sim",
        ),
        (["up", "--model", "nope"], "--model: 'nope' is neither a model of the configuration"),
        (["up", "--http-port", "70000"], "router.http_address: port must be at most 65535, got 70000"),
        (["chat", "--target", "nowhere", "hi"], "--target: expected host:port, got 'nowhere'"),
        (["chat", ""], "the prompt is empty"),
        (["bench", "--target", "ftp://a:1"], "--target: expected grpc://host:port or http://host:port"),
        (["bench", "--concurrency", "0"], "--concurrency: must be at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_an_unknown_command_or_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve") == 2
    assert run("config", "--nope") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_markup_in_a_message_is_only_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "--set", "worker.[red]x=[/nope]") == 2
    assert "worker.[red]x: unknown key" in capsys.readouterr().err


def test_a_bug_stays_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(services, "load", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["config"])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version", "--json") == 0
    assert {"headrace", "python", "grpcio"} <= set(json.loads(capsys.readouterr().out))
    assert run("version") == 0
    assert capsys.readouterr().out.startswith("headrace ")


async def test_a_service_runs_until_it_is_told_to_stop() -> None:
    process = await start(
        *("scheduler", "--set", "scheduler.address=127.0.0.1:0", "--set", "scheduler.metrics_address=127.0.0.1:0")
    )
    assert process.stdout is not None
    ready = json.loads(await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S))
    assert ready["ready"] == "scheduler"
    process.send_signal(signal.SIGTERM)
    code, out, _ = await ended(process)
    assert (code, out) == (0, "")


async def test_a_service_whose_port_is_taken_says_so_in_one_line() -> None:
    async with FakeHttpRouter() as taken:
        process = await start("cache", "--set", f"cache.address={taken.address}", "--set", "cache.metrics_address=")
        code, out, err = await ended(process)
    assert (code, out) == (2, "")
    assert f"error: cache.address: cannot listen on {taken.address}" in err
    assert "Traceback" not in err


async def test_bench_as_json_over_both_protocols() -> None:
    async with FakeRouter() as grpc_side, FakeHttpRouter() as http_side:
        for target in (f"grpc://{grpc_side.address}", f"http://{http_side.address}"):
            process = await start(
                *(
                    "bench",
                    "--target",
                    target,
                    "--json",
                    "--requests",
                    "6",
                    "--concurrency",
                    "2",
                    "--output-tokens",
                    "5",
                    "--no-prefix-reuse",
                )
            )
            code, out, err = await ended(process)
            assert (code, err) == (0, "")
            report = json.loads(out)
            assert (report["requests"], report["errors"], report["output_tokens"]) == (6, {}, 30)
            assert report["ttft_s"]["p50"] > 0
            assert report["tpot_s"]["p99"] >= 0
    assert all(request.bypass_prefix_cache for request in grpc_side.requests)
    assert all(body["bypass_prefix_cache"] for path, body in http_side.requests if path == "/v1/completions")


async def test_bench_for_people_and_its_exit_code() -> None:
    async with FakeRouter() as router:
        process = await start("bench", "--target", router.address, "--requests", "2")
        code, out, _ = await ended(process)
        assert code == 0
        assert "requests       2 answered, 0 failed" in out
        assert "TTFT" in out
        address = router.address
    process = await start("bench", "--target", address)
    code, out, err = await ended(process)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {address}: ")


async def test_bench_interrupted_reports_what_it_has() -> None:
    asked = asyncio.Event()

    def script(path: str, body: dict[str, Any]) -> list[bytes]:
        if path != "/v1/completions":
            from tests.support.fake_router import http_as_asked

            return http_as_asked(path, body)
        asked.set()
        return []

    async with FakeHttpRouter(script) as router:
        process = await start("bench", "--target", f"http://{router.address}", "--json", "--warmup", "0")
        await asyncio.wait_for(asked.wait(), TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        code, out, err = await ended(process)
    assert (code, err) == (130, "")
    report = json.loads(out)
    assert report["interrupted"]
    assert report["requests"] == 0
    assert report["unfinished"] > 0
