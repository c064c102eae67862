"""A gateway of others before this worker: SMG, over ``trtllm.TrtllmService``, with the real model.

SMG is in an environment of its own, since it is a program and not a library: HEADRACE_SMG names its command, else it is
looked for where the benchmarks keep their peers.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from smg_grpc_proto import trtllm_service_pb2 as pb
from smg_grpc_proto import trtllm_service_pb2_grpc

from headrace import models, serving
from headrace.tokenizer import Tokenizer
from headrace.worker.trtllm_service import _bundle
from tests.support.waiting import eventually

SMG = Path(os.environ.get("HEADRACE_SMG", Path.home() / ".cache/headrace-peers/smg/bin/smg"))
PATIENCE_S = 60.0
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not SMG.exists(), reason="needs SMG (pip install smg in an environment of its own)"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[str, str]]:
    """SMG's and the worker's address."""
    folder = tmp_path_factory.mktemp("tokenizer")
    with zipfile.ZipFile(io.BytesIO(_bundle(models.prepare("embedded", weights=False)))) as files:
        files.extractall(folder)
    settings = ["scheduler=", "cache=", "trtllm_service=true", "address=127.0.0.1:0"]
    options = [part for setting in settings for part in ("--set", f"worker.{setting}")]
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace", "worker", *options, stdout=asyncio.subprocess.PIPE
        )
    ]
    try:
        assert processes[0].stdout is not None
        ready = await asyncio.wait_for(processes[0].stdout.readline(), PATIENCE_S)
        worker = json.loads(ready)["address"]
        ports = [str(_free_port()) for _ in range(2)]
        command = [str(SMG), "launch", "--host", "127.0.0.1", "--port", ports[0], "--worker-urls", f"grpc://{worker}"]
        command += ["--tokenizer-path", str(folder), "--prometheus-host", "127.0.0.1", "--prometheus-port", ports[1]]
        log = (folder / "smg.log").open("wb")
        processes.append(await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log))
        base = f"http://127.0.0.1:{ports[0]}"

        async def knows_it() -> bool:
            try:
                async with httpx.AsyncClient() as client:
                    found = (await client.get(f"{base}/v1/models")).json()["data"]
            except (httpx.HTTPError, ValueError, KeyError):
                return False
            return [model["id"] for model in found] == ["smollm2-135m"]

        await eventually(knows_it, "a gateway that knows the model", PATIENCE_S)
        yield base, worker
    finally:
        for process in reversed(processes):
            # It would settle for seconds.
            process.kill()
            await process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _expected(worker: str, max_tokens: int) -> tuple[str, int]:
    """The text as the worker says it, without SMG: rendered and decoded by our own tokenizer; and the prompt's size."""
    tokenizer = Tokenizer.from_folder(models.prepare("embedded", weights=False).path)
    prompt = tokenizer.apply_chat_template(QUESTION)
    async with serving.channel(worker) as channel:
        request = pb.GenerateRequest(
            request_id="direct",
            tokenized=pb.TokenizedInput(input_token_ids=prompt),
            sampling_config=pb.SamplingConfig(temperature=0.0),
            max_tokens=max_tokens,
        )
        ids: list[int] = []
        async for response in trtllm_service_pb2_grpc.TrtllmServiceStub(channel).Generate(request):
            ids += response.complete.output_token_ids
    return tokenizer.decode(ids), len(prompt)


async def _stream(base: str, **options: Any) -> tuple[str, list[str], dict[str, Any]]:
    """Text, finish reasons, usage."""
    body = {"model": "smollm2-135m", "messages": QUESTION, "stream": True, "temperature": 0} | options
    text, reasons, usage = "", [], {}
    async with (
        httpx.AsyncClient(timeout=PATIENCE_S) as client,
        client.stream("POST", f"{base}/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, reasons, usage


async def test_a_streamed_chat_has_the_right_text_usage_and_reason(gateway: tuple[str, str]) -> None:
    base, worker = gateway
    text, prompt_tokens = await _expected(worker, 24)
    got, reasons, usage = await _stream(base, max_tokens=24, stream_options={"include_usage": True})
    assert got == text
    assert reasons == ["length"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt_tokens, 24)


async def test_an_answer_that_ends_by_itself_and_one_that_is_stopped(gateway: tuple[str, str]) -> None:
    base, worker = gateway
    text, _ = await _expected(worker, 600)
    got, reasons, _ = await _stream(base, max_tokens=600)
    assert (got, reasons) == (text, ["stop"])
    got, reasons, _ = await _stream(base, max_tokens=600, stop=["scattering"])
    assert (got, reasons) == (text.partition("scattering")[0], ["stop"])


async def test_many_at_once(gateway: tuple[str, str]) -> None:
    base, worker = gateway
    text, _ = await _expected(worker, 4)
    answers = await asyncio.gather(*(_stream(base, max_tokens=4) for _ in range(12)))
    assert [answer[:2] for answer in answers] == [(text, ["length"])] * 12
