r"""Prompts that begin alike: what the mesh computes of them, and what the index of who holds them costs.

`mesh`: a real model on so many workers, and `headrace bench` with common beginnings, once for each way: the default
placement, round robin, fewest requests, and the default where no request reuses anything. Each way starts a mesh of its
own. `prefilled` is what workers computed of the prompts (their own count), beside the least possible: each beginning
once, one at least on each worker that took part, and each rest.

`index`: 64 workers, prompts of 2,048 blocks of 16 tokens, an eighth of which is one of 32 beginnings; each is stored by
one worker as events of 64 blocks; then prompts of 1k, 8k and 32k tokens are matched: held, held by half, or not held.
One call is one call of Python on ready-made arguments: ours in arrays, the other's in lists, the only form it takes.
With `--dynamo PYTHON` (the interpreter of an environment that has ai-dynamo-runtime) the same runs on its RadixTree, in
a process of its own.

    .venv/bin/python benchmarks/prefix_bench.py index --dynamo ~/.cache/headrace-peers/dyn/bin/python
    .venv/bin/python benchmarks/prefix_bench.py mesh
    .venv/bin/python benchmarks/prefix_bench.py mesh --prefixes 8 --shared 512 --prompt-tokens 544
    .venv/bin/python benchmarks/prefix_bench.py mesh --ways default --workers 1 --prefixes 16 --shared 512 \
        --prompt-tokens 544 --concurrency 2 --worker prefix_cache_mib=32 --worker prefix_cache_disk_mib=1024
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

WORKERS, BEGINNINGS, PROMPT_BLOCKS, EVENT_BLOCKS, BLOCK_TOKENS = 64, 32, 2048, 64, 16


# --- the index -------------------------------------------------------------------------------------------------------


class Index(Protocol):
    """An index behind its Python calls. A block has a name of its own and one for it and all before it."""

    def event(self, worker: int, own: Sequence[int], names: Sequence[int], parent: int | None) -> Any: ...
    def insert(self, event: Any) -> None: ...
    def settle(self) -> None: ...
    def query(self, own: Sequence[int], names: Sequence[int]) -> Any: ...
    def find(self, query: Any) -> int: ...


class Headrace:
    def __init__(self) -> None:
        from headrace import _gateway

        self.index = _gateway.PrefixIndex(8 << 30, seed=random.getrandbits(64))

    def event(self, worker: int, own: Sequence[int], names: Sequence[int], parent: int | None) -> Any:
        return worker, parent or 0, array("Q", names)

    def insert(self, event: Any) -> None:
        self.index.store(*event)

    def settle(self) -> None:
        pass

    def query(self, own: Sequence[int], names: Sequence[int]) -> Any:
        return array("Q", names)

    def find(self, query: Any) -> int:
        return max((blocks for _, blocks in self.index.find(query)), default=0)


class Dynamo:
    def __init__(self) -> None:
        from dynamo._core import RadixTree

        self.tree, self.events = RadixTree(), 0

    def event(self, worker: int, own: Sequence[int], names: Sequence[int], parent: int | None) -> Any:
        self.events += 1
        blocks = [{"block_hash": name, "tokens_hash": each} for each, name in zip(own, names, strict=True)]
        stored = {"stored": {"parent_hash": parent, "blocks": blocks}}
        return worker, json.dumps({"event_id": self.events, "dp_rank": 0, "data": stored}).encode()

    def insert(self, event: Any) -> None:
        self.tree.apply_event(*event)

    def settle(self) -> None:
        self.tree.find_matches([1])

    def query(self, own: Sequence[int], names: Sequence[int]) -> Any:
        return list(own)

    def find(self, query: Any) -> int:
        return max(self.tree.find_matches(query).scores.values(), default=0)


def mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ (value >> 31)


def chain(own: Sequence[int]) -> list[int]:
    names, before = [], 0
    for each in own:
        before = mix(before ^ each)
        names.append(before)
    return names


def prompts(blocks: int) -> Iterator[tuple[int, list[int]]]:
    """Worker and blocks of each, until there are so many different blocks."""
    made = number = 0
    shared = PROMPT_BLOCKS // 8
    while made < blocks:
        family = number % BEGINNINGS
        beginning = [mix(family << 32 | at) for at in range(shared)]
        rest = [mix(1 << 60 | number << 24 | at) for at in range(PROMPT_BLOCKS - shared)]
        yield mix(number) % WORKERS, beginning + rest
        made += len(rest) + (shared if number < BEGINNINGS else 0)
        number += 1


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentile(values: list[float], share: float) -> float:
    values.sort()
    return values[min(len(values) - 1, int(share * len(values)))]


def measure_index(name: str, blocks: int) -> dict[str, Any]:
    drawn = list(prompts(blocks))
    named = [chain(own) for _, own in drawn]
    index: Index = Headrace() if name == "headrace" else Dynamo()
    events = [
        index.event(worker, own[at : at + EVENT_BLOCKS], names[at : at + EVENT_BLOCKS], names[at - 1] if at else None)
        for (worker, own), names in zip(drawn, named, strict=True)
        for at in range(0, PROMPT_BLOCKS, EVENT_BLOCKS)
    ]
    gc.collect()
    stored = len(events) * EVENT_BLOCKS
    before_bytes, began_s = rss_bytes(), time.perf_counter()
    for event in events:
        index.insert(event)
    index.settle()
    took_s = time.perf_counter() - began_s
    result: dict[str, Any] = {
        "index": name,
        "blocks": blocks,
        "insert_mblocks_per_s": stored / took_s / 1e6,
        "rss_bytes_per_block": (rss_bytes() - before_bytes) / blocks,
    }
    if isinstance(index, Headrace):
        result["own_bytes_per_block"] = index.index.memory_bytes / len(index.index)
    dice = random.Random(3)
    for tokens in (1024, 8192, 32768):
        length = tokens // BLOCK_TOKENS
        for kind, held in (("full", length), ("half", length // 2), ("miss", 0)):
            queries = []
            for _ in range(200):
                own = list(dice.choice(drawn)[1][:held]) + [dice.getrandbits(63) for _ in range(length - held)]
                queries.append(index.query(own, chain(own)))
            times_us = []
            for _ in range(3):
                for query in queries:
                    began_s = time.perf_counter()
                    found = index.find(query)
                    times_us.append((time.perf_counter() - began_s) * 1e6)
                    assert found == held, (name, found, held)
            result[f"{tokens}-{kind}"] = [percentile(times_us, 0.5), percentile(times_us, 0.99)]
    return result


def index_part(arguments: argparse.Namespace) -> None:
    rows = []
    for blocks in (int(count) for count in arguments.blocks.split(",")):
        ways = [("headrace", sys.executable)] + ([("dynamo", arguments.dynamo)] if arguments.dynamo else [])
        for name, python in ways:
            command = [os.path.expanduser(python), __file__, "one-index", "--name", name, "--blocks", str(blocks)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            rows.append(json.loads(done.stdout))
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(f"{row['index']}, {row['blocks']} blocks: {row['insert_mblocks_per_s']:.2f} M blocks/s in", end="")
        print(f", {row['rss_bytes_per_block']:.1f} bytes a block (RSS)", end="")
        print(f", {row['own_bytes_per_block']:.1f} by its own count" if "own_bytes_per_block" in row else "")
        for tokens in (1024, 8192, 32768):
            times = (f"{kind} {row[f'{tokens}-{kind}'][0]:.1f} / {row[f'{tokens}-{kind}'][1]:.1f}" for kind in KINDS)
            print(f"  {tokens:6d} tokens, us p50 / p99: {', '.join(times)}")


KINDS = ("full", "half", "miss")


# --- the mesh --------------------------------------------------------------------------------------------------------

#: Settings of the scheduler, and options of the load.
WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "default": ({}, []),
    "round_robin": ({"placement": "round_robin", "credits": "false"}, []),
    "least_requests": ({"placement": "least_requests", "credits": "false"}, []),
    "no_reuse": ({}, ["--no-prefix-reuse"]),
}
SEED = 1


def measure_way(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    from mesh import Mesh

    from headrace.bench import Prompts

    scheduler, options = WAYS[name]
    requests = arguments.requests if name != "no_reuse" else arguments.requests_without
    with Mesh() as mesh:
        mesh.core(scheduler=scheduler)
        for number in range(arguments.workers):
            mesh.service(
                "worker",
                name=f"worker-{number}",
                address="127.0.0.1:0",
                metrics_address="127.0.0.1:0",
                worker_id=f"worker-{number}",
                scheduler=mesh.scheduler,
                cache=mesh.cache,
                threads=1,
                slots=8,
                kv_tokens=arguments.kv_tokens,
                **dict(pair.split("=", 1) for pair in arguments.worker),
            )
        before = totals(mesh)
        command = [
            sys.executable,
            "-P",
            "-m",
            "headrace",
            "bench",
            "--target",
            f"grpc://{mesh.grpc}",
            "--json",
            "--quiet",
        ]
        command += ["--requests", str(requests), "--concurrency", str(arguments.concurrency), "--warmup", "0"]
        command += ["--prompt-tokens", str(arguments.prompt_tokens), "--shared-prefix", str(arguments.shared)]
        command += ["--shared-prefixes", str(arguments.prefixes), *options]
        command += ["--output-tokens", str(arguments.output_tokens), "--temperature", "0", "--seed", str(SEED)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ)
        said = json.loads(done.stdout)
        after = totals(mesh)
    prompt, cached = ({name: after[name][at] - before.get(name, (0, 0))[at] for name in after} for at in (0, 1))
    used = sum(1 for tokens in prompt.values() if tokens)
    computed = sum(prompt.values()) - sum(cached.values())
    prompts = Prompts(SEED, arguments.prompt_tokens, arguments.shared, prefixes=arguments.prefixes)
    # Requests are numbered from 1.
    drawn = len({prompts.prefix(number + 1) for number in range(requests)})
    once = max(used, drawn)
    least = sum(prompt.values()) - (requests - once) * arguments.shared
    return {
        "way": name,
        "requests": requests,
        "workers_used": used,
        "prefixes": drawn,
        "prompt_tokens": sum(prompt.values()),
        "prefilled_tokens": computed,
        "least_possible": least,
        "ratio": computed / least,
        "ttft_s": said["ttft_s"],
        "wall_s": said.get("duration_s"),
    }


def totals(mesh: Any) -> dict[str, tuple[int, int]]:
    """Prompt tokens of each worker since its start, and those of them that were there already; at rest."""
    import grpc

    from headrace.v1 import scheduler_pb2, scheduler_pb2_grpc

    with grpc.insecure_channel(mesh.scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        before = None
        while True:
            fleet = stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=10)
            found = {
                worker.worker_id: (worker.load.prompt_tokens_total, worker.load.cached_prompt_tokens_total)
                for worker in fleet.workers
            }
            busy = fleet.leases or any(worker.load.running_requests for worker in fleet.workers)
            if not busy and found == before:
                return found
            before = found
            # Two heartbeats.
            time.sleep(0.6)


def mesh_part(arguments: argparse.Namespace) -> None:
    rows = [measure_way(name, arguments) for name in arguments.ways.split(",")]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        ttft = row["ttft_s"]
        print(
            f"{row['way']:15s} {row['requests']} requests, {row['prefixes']} beginnings, {row['workers_used']} "
            f"workers: prefilled {row['prefilled_tokens']} of {row['prompt_tokens']} = {row['ratio']:.2f} x the least "
            f"possible; TTFT p50 {ttft['p50']:.3f} s, p99 {ttft['p99']:.3f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    index = parts.add_parser("index")
    index.add_argument("--blocks", default="1000000")
    index.add_argument("--dynamo", default="", help="a Python that has ai-dynamo-runtime")
    index.add_argument("--json", action="store_true")
    index.set_defaults(run=index_part)
    one = parts.add_parser("one-index")
    one.add_argument("--name", required=True)
    one.add_argument("--blocks", type=int, required=True)
    one.set_defaults(run=lambda arguments: print(json.dumps(measure_index(arguments.name, arguments.blocks))))
    mesh = parts.add_parser("mesh")
    mesh.add_argument("--ways", default=",".join(WAYS))
    mesh.add_argument("--workers", type=int, default=2)
    mesh.add_argument("--requests", type=int, default=64)
    mesh.add_argument(
        "--requests-without", type=int, default=64, help="of the way that reuses nothing, which takes long"
    )
    mesh.add_argument("--concurrency", type=int, default=8)
    mesh.add_argument("--shared", type=int, default=1500)
    mesh.add_argument("--prefixes", type=int, default=1, help="different beginnings")
    mesh.add_argument("--prompt-tokens", type=int, default=1550)
    mesh.add_argument("--output-tokens", type=int, default=8)
    mesh.add_argument("--kv-tokens", type=int, default=32768)
    mesh.add_argument("--worker", action="append", default=[], metavar="KEY=VALUE", help="another setting of workers")
    mesh.add_argument("--json", action="store_true")
    mesh.set_defaults(run=mesh_part)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
