"""Prefill apart from decode: what long prompts that arrive do to the answers that are under way, with and without.

`mesh`: the real model on two workers of one thread each. So many answers run all the time, of short prompts; long
prompts arrive beside them at a steady pace. Once both workers do everything, once one of them computes the long prompts
and the other answers (`auto`: where the scheduler's rule says so). The gaps between the tokens of the running answers
are what the client sees; the long prompts' own first tokens are beside them. Both ways in turn, in one run.

`sim`: the same question for a fleet of so many workers in simulation: all alike, or a share of them for prompts only,
used always or by the rule; goodput, TTFT and TPOT over loads, one workload, one run.

    .venv/bin/python benchmarks/disaggregation_bench.py mesh
    .venv/bin/python benchmarks/disaggregation_bench.py sim --workers 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any

# --- the real engine -------------------------------------------------------------------------------------------------

#: Settings of the scheduler, and the roles of the workers.
WAYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "together": ({"disaggregation": "off"}, ("both", "both")),
    "apart": ({"disaggregation": "always"}, ("prefill", "decode")),
    "auto": ({"disaggregation": "auto"}, ("prefill", "decode")),
}


@dataclass
class Seen:
    """Of one way, over its rounds."""

    gaps_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    tokens: int = 0
    kv_bytes: int = 0


def at(values: list[float], share: float) -> float:
    """The value that so large a share is below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))] if ordered else math.nan


async def answers(client: Any, seen: Seen, until_s: float, dice: random.Random) -> None:
    """One answer after another, and the gaps between their tokens."""
    while time.monotonic() < until_s:
        prompt = [dice.randrange(1000, 40000) for _ in range(48)]
        last_s: float | None = None
        async with client.generate(
            ids=prompt, max_tokens=96, temperature=0.0, ignore_eos=True, bypass_cache=True
        ) as events:
            async for event in events:
                if not getattr(event, "ids", None):
                    continue
                now_s = time.monotonic()
                if last_s is not None:
                    seen.gaps_s.append(now_s - last_s)
                last_s = now_s
                seen.tokens += len(event.ids)


async def long_prompt(client: Any, seen: Seen, tokens: int, dice: random.Random) -> None:
    prompt = [dice.randrange(1000, 40000) for _ in range(tokens)]
    began_s = time.monotonic()
    async with client.generate(ids=prompt, max_tokens=8, temperature=0.0, ignore_eos=True, bypass_cache=True) as events:
        async for event in events:
            if getattr(event, "ids", None):
                seen.ttft_s.append(time.monotonic() - began_s)
                break
        async for _ in events:
            pass


async def load(address: str, seen: Seen, arguments: argparse.Namespace, seed: int) -> None:
    from headrace.client import Client

    dice = random.Random(seed)
    async with Client(address) as client:
        until_s = time.monotonic() + arguments.seconds
        running = [asyncio.create_task(answers(client, seen, until_s, dice)) for _ in range(arguments.running)]
        prompts = []
        await asyncio.sleep(1.0)
        while time.monotonic() < until_s - 1.0:
            prompts.append(asyncio.create_task(long_prompt(client, seen, arguments.prompt_tokens, dice)))
            await asyncio.sleep(arguments.every_s)
        await asyncio.gather(*running, *prompts)


def measure_way(name: str, seen: Seen, arguments: argparse.Namespace, seed: int) -> None:
    from mesh import Mesh

    scheduler, roles = WAYS[name]
    with Mesh() as mesh:
        mesh.core(scheduler={**scheduler, "disaggregation_min_tokens": 256})
        for number, role in enumerate(roles):
            mesh.service(
                "worker",
                name=f"worker-{number}",
                address="127.0.0.1:0",
                metrics_address="127.0.0.1:0",
                worker_id=f"worker-{number}",
                role=role,
                scheduler=mesh.scheduler,
                cache=mesh.cache,
                threads=1,
                slots=16,
                kv_tokens=32768,
            )
        # The cost model learns the engine's steps before anything is counted.
        warm = argparse.Namespace(**{**vars(arguments), "seconds": 6.0})
        asyncio.run(load(mesh.grpc, Seen(), warm, seed + 1000))
        asyncio.run(load(mesh.grpc, seen, arguments, seed))
        seen.kv_bytes += received(mesh)


def received(mesh: Any) -> int:
    """KV bytes that went from worker to worker."""
    import grpc

    from headrace.v1 import scheduler_pb2, scheduler_pb2_grpc

    with grpc.insecure_channel(mesh.scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        fleet = stub.GetFleet(scheduler_pb2.GetFleetRequest(), timeout=10)
        return sum(worker.load.kv_received_bytes_total for worker in fleet.workers)


def mesh_part(arguments: argparse.Namespace) -> None:
    ways = arguments.ways.split(",")
    seen = {name: Seen() for name in ways}
    for turn in range(arguments.rounds):
        for name in ways:
            measure_way(name, seen[name], arguments, turn)
    rows = [
        {
            "way": name,
            "gap_p50_ms": 1e3 * at(each.gaps_s, 0.5),
            "gap_p99_ms": 1e3 * at(each.gaps_s, 0.99),
            "gap_max_ms": 1e3 * max(each.gaps_s, default=math.nan),
            "ttft_p50_s": at(each.ttft_s, 0.5),
            "ttft_p90_s": at(each.ttft_s, 0.9),
            "running_tokens_per_s": each.tokens / (arguments.seconds * arguments.rounds),
            "long_prompts": len(each.ttft_s),
            "kv_mib": each.kv_bytes / 2**20,
        }
        for name, each in seen.items()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(
            f"{row['way']:9s} gaps of running answers: p50 {row['gap_p50_ms']:.1f} ms, p99 {row['gap_p99_ms']:.1f} ms, "
            f"longest {row['gap_max_ms']:.0f} ms; {row['running_tokens_per_s']:.0f} tokens/s; "
            f"{row['long_prompts']} long prompts: TTFT p50 {row['ttft_p50_s']:.2f} s, p90 {row['ttft_p90_s']:.2f} s; "
            f"{row['kv_mib']:.0f} MiB moved"
        )


# --- simulation ------------------------------------------------------------------------------------------------------


def sim_part(arguments: argparse.Namespace) -> None:
    from headrace import sim

    workload = sim.make_workload(
        {
            "requests": arguments.requests,
            "rate_per_s": arguments.rate_per_worker * arguments.workers,
            "prompt_tokens": arguments.prompt_tokens,
            "output_tokens": arguments.output_tokens,
            "shared_tokens": 0,
        },
        1,
    )
    fleets = [("together", 0, "off")]
    for share in (float(text) for text in arguments.shares.split(",")):
        prefill = max(1, round(share * arguments.workers))
        fleets += [(f"{how}, {prefill} for prompts", prefill, how) for how in ("always", "auto")]
    print(f"{arguments.requests} requests, {arguments.workers} workers, TPOT target {arguments.tpot_ms:g} ms")
    for load_ in (float(text) for text in arguments.loads.split(",")):
        for name, prefill, how in fleets:
            settings = {
                "groups": [
                    {
                        "workers": arguments.workers,
                        "prefill_workers": prefill,
                        "network_gb_per_s": arguments.network_gbps / 8,
                    }
                ],
                "scheduler": {"disaggregation": how},
                "tpot_target_s": arguments.tpot_ms / 1e3,
                "speed": load_,
            }
            began_s = time.monotonic()
            said = json.loads(sim.run_one(workload, settings).summary_json())
            print(
                f"load {load_:<4g} {name:24s} goodput {said['goodput']:.3f}  TTFT p50 {said['ttft_s']['p50']:.2f} s "
                f"p90 {said['ttft_s']['p90']:.2f} s  TPOT p50 {1e3 * said['tpot_s']['p50']:.1f} ms "
                f"p99 {1e3 * said['tpot_s']['p99']:.1f} ms  parted {said['parted'] / said['requests']:.2f}  "
                f"({time.monotonic() - began_s:.0f} s)",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    mesh = parts.add_parser("mesh")
    mesh.add_argument("--ways", default=",".join(WAYS))
    mesh.add_argument("--rounds", type=int, default=1)
    mesh.add_argument("--seconds", type=float, default=20.0)
    mesh.add_argument("--running", type=int, default=4, help="answers at any time")
    mesh.add_argument("--prompt-tokens", type=int, default=1500)
    mesh.add_argument("--every-s", type=float, default=4.0, help="between two long prompts")
    mesh.add_argument("--json", action="store_true")
    mesh.set_defaults(run=mesh_part)
    simulated = parts.add_parser("sim")
    simulated.add_argument("--workers", type=int, default=1000)
    simulated.add_argument("--requests", type=int, default=40_000)
    simulated.add_argument("--rate-per-worker", type=float, default=1.0)
    simulated.add_argument("--prompt-tokens", type=float, default=4000.0)
    simulated.add_argument("--output-tokens", type=float, default=250.0)
    simulated.add_argument("--shares", default="0.25,0.4", help="of workers that are for prompts only")
    simulated.add_argument("--loads", default="0.6,0.8,1.0")
    simulated.add_argument("--tpot-ms", type=float, default=50.0)
    simulated.add_argument("--network-gbps", type=float, default=100.0)
    simulated.set_defaults(run=sim_part)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
