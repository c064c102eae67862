"""llama.cpp through the worker's engine against a plain loop on the same low-level API: same batch, same settings.

Both are given the same prompts, all at once, and the same number of ids to produce, greedily. The loop does the least
that serving several sequences takes: decode tokens and prompt chunks in one batch, an argmax for each row. The engine
does the same through composer, accounts, thread and callbacks; with ``--rpc`` also through the worker's gRPC service on
loopback. The runs are interleaved, because a shared machine drifts; a ratio is the median of the rounds' own ratios.

Two ratios: of wall time, and of the process's CPU time. The second is the cost alone; on a machine that does other work
it is the one to believe. (With a CPU to spare the engine's own work overlaps with llama.cpp's; the first is better.)

    PYTHONPATH=services python benchmarks/engine_bench.py --concurrency 1,8,32 --rounds 5 --json

Numbers depend on the machine and on what else runs on it: compare ratios, not tokens/s of different days.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from headrace import models, serving
from headrace.config import WorkerConfig
from headrace.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from headrace.worker.engine import Request, StepResult, Stopping
from headrace.worker.engines.llama_api import Context
from headrace.worker.engines.llama_cpp import LlamaBackend
from headrace.worker.loop import BatchLoop
from headrace.worker.servicer import FULL_NAME, WorkerService

Run = Callable[[list[list[int]], int], Awaitable[tuple[float, list[float]]]]


class PlainLoop:
    """Continuous batching in its shortest form."""

    def __init__(self, folder: models.ModelFolder, config: WorkerConfig) -> None:
        assert folder.weights is not None
        # The worker's own: so many beside what decodes, more while nothing does.
        self.chunk_tokens, self.idle_chunk_tokens = config.chunk_tokens, 512
        self.context = Context(
            folder.weights,
            kv_tokens=config.kv_tokens,
            sequences=config.slots,
            batch_tokens=config.slots + self.idle_chunk_tokens,
            threads=config.threads,
            copy_weights=True,
        )

    async def run(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[float]]:
        return await asyncio.to_thread(self._run, prompts, output_tokens)

    def _run(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[float]]:
        context = self.context
        tokens, positions, sequences, wants = (
            context.tokens,
            context.positions,
            context.sequence_ids,
            context.wants_logits,
        )
        began = time.perf_counter()
        first: list[float] = []
        waiting = [(lane, prompt, 0) for lane, prompt in enumerate(prompts)]
        #: lane -> last id, its position, ids produced
        running: dict[int, list[int]] = {}
        while waiting or running:
            size, rows = 0, []
            for lane, state in running.items():
                tokens[size], positions[size], sequences[size], wants[size] = state[0], state[1], lane, 1
                rows.append(lane)
                size += 1
            budget = self.chunk_tokens if running else self.idle_chunk_tokens
            while waiting and budget:
                lane, prompt, done = waiting[0]
                count = min(budget, len(prompt) - done)
                end = size + count
                tokens[size:end] = prompt[done : done + count]
                positions[size:end] = np.arange(done, done + count)
                sequences[size:end] = lane
                wants[size:end] = 0
                size, budget, done = end, budget - count, done + count
                if done < len(prompt):
                    waiting[0] = (lane, prompt, done)
                    break
                wants[size - 1] = 1
                rows.append(lane)
                running[lane] = [0, len(prompt) - 1, 0]
                waiting.pop(0)
            assert context.decode(size) == 0
            for lane, token in zip(rows, context.logits(len(rows)).argmax(axis=1).tolist(), strict=True):
                state = running[lane]
                state[0], state[1], state[2] = token, state[1] + 1, state[2] + 1
                if state[2] == 1:
                    first.append(time.perf_counter() - began)
                if state[2] == output_tokens:
                    del running[lane]
                    context.remove(lane, 0, -1)
        return time.perf_counter() - began, first


class ThroughEngine:
    """The worker's engine, called as the service calls it."""

    def __init__(self, folder: models.ModelFolder, config: WorkerConfig) -> None:
        # Prompts differ in their first block, and nothing of an earlier round may help.
        self.engine = BatchLoop(LlamaBackend(folder, config), keep_prefixes=False)
        self.keys = itertools.count(1)
        self.on_step: Callable[[StepResult], None] = lambda result: None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        await self.engine.start(lambda result: _later(loop, lambda: self.on_step(result)), sys.exit)

    async def run(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[float]]:
        began = time.perf_counter()
        first: list[float] = []
        left = len(prompts)
        done = asyncio.Event()

        def on_step(result: StepResult) -> None:
            nonlocal left
            for delta in result.deltas:
                if delta.first_index == 0:
                    first.append(time.perf_counter() - began)
                if delta.finish is not None:
                    left -= 1
                    if not left:
                        done.set()

        self.on_step = on_step
        for prompt in prompts:
            assert self.engine.submit(Request(next(self.keys), prompt, Stopping(output_tokens))) is None
        await done.wait()
        return time.perf_counter() - began, first


class ThroughRpc:
    """The worker's service, over gRPC on loopback, the client in this process."""

    def __init__(self, folder: models.ModelFolder, config: WorkerConfig) -> None:
        self.server = serving.Service("worker", "127.0.0.1:0")
        self.service = WorkerService(
            config, BatchLoop(LlamaBackend(folder, config), keep_prefixes=False), self.server.registry
        )
        self.server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, self.service, FULL_NAME)
        self.numbers = itertools.count(1)
        self.call: Any = None

    async def start(self) -> None:
        await self.server.start()
        await self.service.start("model")
        self.call = worker_pb2_grpc.WorkerServiceStub(serving.channel(self.server.address)).Run()
        await self.call.write(worker_pb2.RunRequest(hello=worker_pb2.RunHello(router_id="bench")))
        await self.call.read()

    async def run(self, prompts: list[list[int]], output_tokens: int) -> tuple[float, list[float]]:
        began = time.perf_counter()
        sampling = types_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, seeds=[0])
        stopping = types_pb2.Stopping(max_tokens=output_tokens, ignore_eos=True)
        submits = [
            worker_pb2.Submit(
                request=next(self.numbers), model="model", prompt_ids=prompt, sampling=sampling, stopping=stopping
            )
            for prompt in prompts
        ]
        await self.call.write(worker_pb2.RunRequest(submits=submits))
        first: list[float] = []
        left = len(prompts)
        while left:
            frame = await self.call.read()
            for delta in frame.deltas:
                if delta.first_index == 0 and delta.ids:
                    first.append(time.perf_counter() - began)
                left -= delta.HasField("finish")
        return time.perf_counter() - began, first


def _later(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    loop.call_soon_threadsafe(call)


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    folder = models.prepare("embedded", arguments.quantization)
    counts = [int(count) for count in arguments.concurrency.split(",")]
    config = WorkerConfig(slots=max(counts), threads=arguments.threads, kv_tokens=16384)
    engine = ThroughEngine(folder, config)
    await engine.start()
    ways: dict[str, Run] = {"loop": PlainLoop(folder, config).run, "engine": engine.run}
    rpc = ThroughRpc(folder, config) if arguments.rpc else None
    if rpc is not None:
        await rpc.start()
        ways["rpc"] = rpc.run
    dice = np.random.default_rng(1)
    rows = []
    for count in counts:
        wall: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        ttft: dict[str, list[float]] = {way: [] for way in ways}
        for round_ in range(arguments.rounds + 1):
            prompts = [dice.integers(100, 40000, arguments.prompt_tokens).tolist() for _ in range(count)]
            order = list(ways) if round_ % 2 else list(reversed(ways))
            for way in order:
                cpu_began = time.process_time()
                took, first = await ways[way](prompts, arguments.output_tokens)
                cpu_took = time.process_time() - cpu_began
                # The first round warms up.
                if round_:
                    wall[way].append(took)
                    cpu[way].append(cpu_took)
                    ttft[way].append(statistics.median(first))
        rate = {way: count * arguments.output_tokens / statistics.median(times) for way, times in wall.items()}
        rows.append(
            {
                "concurrency": count,
                "output_tokens_per_s": rate,
                "wall_ratio": _ratios(wall),
                "cpu_ratio": _ratios(cpu),
                "ttft_p50_s": {way: statistics.median(times) for way, times in ttft.items()},
            }
        )
    await engine.engine.stop()
    if rpc is not None:
        rpc.call.cancel()
        await rpc.service.stop()
        await rpc.server.stop(0)
    return rows


def _ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """How many times as fast as the loop; of each round, so that the machine's drift cancels."""
    pairs = {way: zip(times["loop"], took, strict=True) for way, took in times.items()}
    return {way: statistics.median(loop / took for loop, took in pair) for way, pair in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--rpc", action="store_true", help="also through the worker's gRPC service")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sys.setswitchinterval(0.0005)
    rows = asyncio.run(measure(arguments))
    if arguments.json:
        print(json.dumps({"settings": vars(arguments), "rows": rows}, indent=1))
        return
    for row in rows:
        for way, rate in row["output_tokens_per_s"].items():
            wall, cpu, first = row["wall_ratio"][way], row["cpu_ratio"][way], row["ttft_p50_s"][way] * 1e3
            print(
                f"{row['concurrency']:4d} {way:7s} {rate:8.1f} tok/s  wall ratio {wall:.3f}  cpu ratio {cpu:.3f}"
                f"  TTFT p50 {first:7.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
