"""What a batch does to interactive traffic, and what it brings: TTFT beside a batch against TTFT without one.

One mesh, rounds that take turns: interactive requests that arrive at random, alone and then beside a batch that has as
many lines under way as it finds worth while. The figure is the ratio of the two p99s (all rounds' requests pooled),
with the tokens a second that the batch added.

    .venv/bin/python benchmarks/batch_bench.py                       # the sim engine
    .venv/bin/python benchmarks/batch_bench.py --engine llama_cpp    # the real small model
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mesh import BenchError, Mesh, percentile

from headrace import bench
from headrace.batches.client import OVER, STATUSES, BatchClient
from headrace.client import Client, ClientError


class Recorded(bench.GrpcTarget):
    """Keeps each request's time to its first token."""

    def __init__(self, plan: bench.Plan, address: str) -> None:
        super().__init__(plan, address)
        self.ttft_s: list[float] = []
        self.failed = 0
        self._warm = plan.warmup_count

    async def run(self, prompt: str, output_tokens: int, sample: bench.Sample) -> None:
        await super().run(prompt, output_tokens, sample)
        if self._warm > 0:
            self._warm -= 1
        elif sample.first_s is None or sample.error:
            self.failed += 1
        else:
            self.ttft_s.append(sample.first_s - sample.sent_s)


async def interactive(address: str, options: argparse.Namespace, seed: int) -> Recorded:
    plan = bench.Plan(
        target=f"grpc://{address}",
        rate=options.rate,
        duration_s=options.seconds,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        request_class="interactive",
        reuse_prefix=False,
        seed=seed,
        warmup=2,
    )
    target = Recorded(plan, address)
    await bench.run(plan, target=target)
    return target


def write_batch(path: Path, model: str, options: argparse.Namespace) -> None:
    words = bench.Prompts(7, options.batch_prompt_tokens, 0, 1.0, 1)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(options.lines):
            body = {
                "model": model,
                "prompt": words.prompt(number),
                "max_tokens": options.batch_output_tokens,
                "ignore_eos": True,
            }
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


async def settled(client: BatchClient, batch: Any, seconds: float) -> None:
    """Until its first lines are done, and a while more, in which it finds its pace."""
    await until(client, batch, lambda now: now.request_counts.completed > 0)
    await asyncio.sleep(seconds)


async def until(client: BatchClient, batch: Any, there: Callable[[Any], bool]) -> None:
    """Until the batch is there, which nobody announces."""
    for _ in range(6000):
        if there(await client.get(batch.id)):
            return
        await asyncio.sleep(0.1)
    raise BenchError("the batch does not get on")


async def measure(mesh: Mesh, options: argparse.Namespace) -> dict[str, Any]:
    alone: list[float] = []
    beside: list[float] = []
    batch_tokens = batch_s = failed = 0.0
    async with Client(mesh.grpc) as connection:
        client = BatchClient(connection)
        model = await ready(connection)
        path = mesh.folder / "in.jsonl"
        write_batch(path, model, options)
        file = await client.upload(path)
        for number in range(options.rounds):
            run = await interactive(mesh.grpc, options, 1000 + number)
            alone += run.ttft_s
            failed += run.failed
            batch = await client.create(file.id, "/v1/completions")
            await settled(client, batch, options.settle)
            before, began_s = await client.get(batch.id), time.monotonic()
            run = await interactive(mesh.grpc, options, 1000 + number)
            after = await client.get(batch.id)
            if STATUSES[after.status] in OVER:
                raise BenchError("the batch was over before the round was: more --lines are needed")
            batch_tokens += after.usage.completion_tokens - before.usage.completion_tokens
            batch_s += time.monotonic() - began_s
            beside += run.ttft_s
            failed += run.failed
            await client.cancel(batch.id)
            await until(client, batch, lambda now: STATUSES[now.status] in OVER)
    report: dict[str, Any] = {
        "engine": options.engine,
        "requests": [len(alone), len(beside)],
        "failed": failed,
        "batch_output_tokens_per_s": batch_tokens / batch_s,
        "interactive_output_tokens_per_s": options.rate * options.output_tokens,
    }
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        without, with_ = percentile(alone, share), percentile(beside, share)
        assert without is not None
        assert with_ is not None
        report[f"ttft_{name}_ms"] = [without * 1000, with_ * 1000]
        report[f"ttft_{name}_ratio"] = with_ / without
    return report


async def ready(client: Client) -> str:
    """The model, once all workers serve it."""
    while True:
        try:
            model = (await client.list_models())[0]
        except ClientError:
            model = None
        if model is not None and model.ready_workers:
            return model.name
        await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("sim", "llama_cpp"), default="sim")
    parser.add_argument("--workers", type=int, default=0, help="0: 2 of the sim engine, 1 of the real one")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of interactive traffic, twice a round")
    parser.add_argument("--settle", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=0.0, help="interactive requests a second; 0: 8, or 0.8 really")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--batch-prompt-tokens", type=int, default=64)
    parser.add_argument("--batch-output-tokens", type=int, default=64)
    parser.add_argument("--lines-at-once", type=int, default=256)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    real = options.engine == "llama_cpp"
    options.workers = options.workers or (1 if real else 2)
    options.rate = options.rate or (0.8 if real else 8.0)
    with Mesh() as mesh:
        mesh.config.write_text(
            f"[batches]\ndata_dir = {json.dumps(str(mesh.folder / 'data'))}\n"
            f"max_lines_at_once = {options.lines_at_once}\n"
        )
        mesh.core()
        for number in range(options.workers):
            mesh.service(
                "worker",
                name=f"worker{number}",
                engine=options.engine,
                scheduler=mesh.scheduler,
                cache=mesh.cache,
                metrics_address="127.0.0.1:0",
                slots=options.slots,
            )
        report = asyncio.run(measure(mesh, options))
    if options.json:
        print(json.dumps(report))
        return
    print(f"{options.engine}, {options.workers} worker(s) of {options.slots} slots, {report['requests']} requests")
    for name in ("p50", "p90", "p99"):
        without, with_ = report[f"ttft_{name}_ms"]
        print(f"TTFT {name}: {without:8.1f} ms alone, {with_:8.1f} beside a batch: {report[f'ttft_{name}_ratio']:.2f}")
    print(
        f"the batch: {report['batch_output_tokens_per_s']:.0f} tokens/s beside "
        f"{report['interactive_output_tokens_per_s']:.0f} of interactive traffic; {report['failed']:.0f} failed"
    )


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(str(error))
