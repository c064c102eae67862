"""Interactive requests' time to the first token, with and without a backlog of batch work, through a live mesh.

What the mesh can serve of the interactive requests is measured first. Then they arrive at half of that (a Poisson
process), in turns alone and beside batch requests, so many that all that is offered is three times what can be served:
the backlog grows for as long as it lasts. Claimed is that the 99th percentile of TTFT beside it is at most 1.5 times
the one alone.

    .venv/bin/python benchmarks/backlog_bench.py                              # the embedded model, one worker
    .venv/bin/python benchmarks/backlog_bench.py --engine sim --workers 8     # sim workers, timed like A100s
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from mesh import BenchError, Mesh, percentile

from headrace.serving import CHANNEL_OPTIONS, channel
from headrace.v1 import router_pb2, router_pb2_grpc, types_pb2

INTERACTIVE, BATCH = types_pb2.REQUEST_CLASS_INTERACTIVE, types_pb2.REQUEST_CLASS_BATCH
WORDS = ("river", "stone", "wheel", "light", "paper", "green", "north", "table", "sound", "cloud", "metal", "field")
#: Batch requests under way at once at most: a bound for this process, far beyond what the mesh has room for.
MOST_OPEN = 2000


@dataclass
class Shape:
    """What one class asks for."""

    kind: types_pb2.RequestClass
    words: int
    output_tokens: int


@dataclass
class Seen:
    """What came of one class in one phase."""

    ttft_s: list[float] = field(default_factory=list)
    answered: int = 0
    refused: int = 0

    def row(self) -> dict[str, Any]:
        p50, p99 = percentile(self.ttft_s, 0.5), percentile(self.ttft_s, 0.99)
        return {"requests": len(self.ttft_s), "p50_s": p50, "p99_s": p99, "refused": self.refused}


class Client:
    """Asks through the native door, over a few connections."""

    def __init__(self, address: str, model: str, seed: int) -> None:
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self._channels = [channel(address, None, options) for _ in range(8)]
        self._stubs = [router_pb2_grpc.InferenceServiceStub(each) for each in self._channels]
        self._model, self._dice, self._turn = model, random.Random(seed), 0

    async def ask(self, shape: Shape, seen: Seen) -> None:
        self._turn += 1
        text = " ".join(self._dice.choice(WORDS) for _ in range(shape.words))
        request = router_pb2.GenerateRequest(
            model=self._model,
            text=f"{self._turn} {text}",
            stopping=router_pb2.StoppingOptions(max_tokens=shape.output_tokens, ignore_eos=True),
            bypass_cache=True,
            **{"class": shape.kind},
        )
        now_s = asyncio.get_running_loop().time
        sent_s, first = now_s(), True
        try:
            async for event in self._stubs[self._turn % len(self._stubs)].Generate(request):
                if first and event.WhichOneof("event") == "delta" and event.delta.ids:
                    first = False
                    seen.ttft_s.append(now_s() - sent_s)
            seen.answered += 1
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            seen.refused += 1

    async def close(self) -> None:
        for each in self._channels:
            await each.close()


async def capacity(client: Client, shape: Shape, clients: int, seconds: float) -> float:
    """Requests a second that are answered when so many clients ask one after the other."""
    seen, now_s = Seen(), asyncio.get_running_loop().time
    warm_s = now_s() + seconds / 2
    counted = 0

    async def one() -> None:
        nonlocal counted
        while now_s() < warm_s + seconds:
            await client.ask(shape, seen)
            counted += warm_s <= now_s() < warm_s + seconds

    await asyncio.gather(*(one() for _ in range(clients)))
    return counted / seconds


async def arrivals(client: Client, shape: Shape, seen: Seen, per_s: float, seconds: float, seed: int) -> None:
    """They come by a Poisson process; returns when the last has been answered. Cancelled, it takes back the rest."""
    dice, loop = random.Random(seed), asyncio.get_running_loop()
    open_: set[asyncio.Task[None]] = set()
    next_s, until_s = loop.time(), loop.time() + seconds
    try:
        while (next_s := next_s + dice.expovariate(per_s)) < until_s:
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            if len(open_) < MOST_OPEN:
                task = asyncio.create_task(client.ask(shape, seen))
                open_.add(task)
                task.add_done_callback(open_.discard)
        while open_:
            await asyncio.gather(*open_)
    finally:
        for task in open_:
            task.cancel()
        await asyncio.gather(*open_, return_exceptions=True)


async def measure(address: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both phases, in turns."""
    client = Client(address, model, arguments.seed)
    interactive = Shape(INTERACTIVE, arguments.words, arguments.output_tokens)
    batch = Shape(BATCH, 2 * arguments.words, 2 * arguments.output_tokens)
    served = await capacity(client, interactive, arguments.clients * arguments.workers, arguments.seconds / 2)
    if not served:
        raise BenchError("nothing was answered while the capacity was measured")
    # A batch request is twice the work.
    rates = {"interactive": 0.5 * served, "batch": 2.5 * served / 2}
    alone, beside, backlog = Seen(), Seen(), Seen()
    for number in range(arguments.rounds):
        seed = arguments.seed + number
        await arrivals(client, interactive, alone, rates["interactive"], arguments.seconds, seed)
        seconds = arguments.seconds + arguments.lead_s
        flood = asyncio.create_task(arrivals(client, batch, backlog, rates["batch"], seconds + 3600, seed + 1000))
        await asyncio.sleep(arguments.lead_s)
        await arrivals(client, interactive, beside, rates["interactive"], arguments.seconds, seed)
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        # What the workers had begun of it is given up within a step.
        await asyncio.sleep(1.0)
    await client.close()
    rows = {"alone": alone.row(), "beside": beside.row()}
    return {
        "engine": arguments.engine,
        "workers": arguments.workers,
        "capacity_per_s": round(served, 2),
        **rows,
        "batch_answered": backlog.answered,
        "p50_ratio": ratio(rows, "p50_s"),
        "p99_ratio": ratio(rows, "p99_s"),
    }


def ratio(rows: dict[str, dict[str, Any]], name: str) -> float | None:
    """Beside the backlog to alone."""
    alone, beside = rows["alone"][name], rows["beside"][name]
    return round(beside / alone, 2) if alone and beside else None


def start(mesh: Mesh, arguments: argparse.Namespace) -> str:
    """Brings services and workers up; the model's name."""
    mesh.core()
    settings: dict[str, Any] = {"engine": arguments.engine, "slots": arguments.slots}
    if arguments.engine == "sim":
        settings |= {"sim_cost_table": arguments.cost_table, "kv_tokens": 400_000, "chunk_tokens": 2048}
    settings |= dict(pair.split("=", 1) for pair in arguments.worker)
    for number in range(arguments.workers):
        address = {"address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0"}
        mesh.service(
            "worker", name=f"worker-{number}", scheduler=mesh.scheduler, cache=mesh.cache, **address, **settings
        )
    return "smollm2-135m"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="llama_cpp", choices=("llama_cpp", "sim"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--slots", type=int, default=16, help="of each worker")
    parser.add_argument("--cost-table", default="a100-llama3-8b", help="of sim workers")
    parser.add_argument("--worker", action="append", default=[], metavar="KEY=VALUE", help="another setting of workers")
    parser.add_argument(
        "--words", type=int, default=100, help="of an interactive prompt; batch prompts have twice as many"
    )
    parser.add_argument("--output-tokens", type=int, default=32, help="likewise")
    parser.add_argument("--clients", type=int, default=8, help="for each worker, to measure what can be served")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--lead-s", type=float, default=5.0, help="batch requests come so long before")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        with Mesh() as mesh:
            model = start(mesh, arguments)
            result = asyncio.run(measure(mesh.grpc, model, arguments))
    except BenchError as error:
        sys.exit(f"backlog_bench: {error}")
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{result['engine']}, {result['workers']} workers: {result['capacity_per_s']} interactive requests/s at most")
    for name in ("alone", "beside"):
        row = result[name]
        p50_ms, p99_ms = row["p50_s"] * 1e3, row["p99_s"] * 1e3
        print(f"  {name:7} {row['requests']:5} requests: TTFT p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms")
    print(f"  beside / alone: p50 {result['p50_ratio']}, p99 {result['p99_ratio']} (at most 1.5)")
    print(f"  batch requests answered meanwhile: {result['batch_answered']}")
    if (result["p99_ratio"] or 99.0) > 1.5:
        sys.exit(1)


if __name__ == "__main__":
    main()
