"""What memory for KV is worth on public traces: how much of the prompts need not be computed, and how late the rest is.

`cache`: one cache for all requests, in order, with no time passing: the least recently used goes first (a prompt's end
before its beginning, as workers do it), beside the best that any rule could do (Belady: what is wanted again last goes
first, or does not come in) and a cache without a bound. Share of the prompts' full blocks found, from the beginning on.

`fleet`: 8 workers of A100 with Llama-3-8B in the simulator, 830 blocks of 512 tokens on each device and so many on its
host; the live scheduler's core decides. Share of prompt tokens found, over what a cache without a bound for the whole
fleet would have had, and the mean time to the first token. Two requests that come at once find nothing of each other
in a cache without time either, and whoever is sent where its prefix is not, because it is answered sooner there, counts
as not found: the fleet's figure is below 1 for both.

`beginnings`: 64 beginnings of 512 tokens, prompts 32 tokens longer, on two workers as slow as the embedded model is
on a CPU core, each with KV for some 45 of them: what each rule of placing finds, and how late first tokens are.

    python benchmarks/prefix_eval.py --traces FOLDER    # FOLDER/mooncake/*.jsonl, as Mooncake publishes them; minutes
    python benchmarks/prefix_eval.py --only beginnings  # needs no traces
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import sim

TRACES = {
    "conversation": "conversation_trace.jsonl",
    "synthetic": "synthetic_trace.jsonl",
    "trace_1000": "mooncake_trace_1000.jsonl",
}
BLOCK_TOKENS = 512
CACHE_BLOCKS = (1_000, 3_000, 10_000, 30_000)
HOST_BLOCKS = (0, 2_000, 6_000, 30_000)
POLICIES = ("marginal_delay", "lmetric", "round_robin")


@dataclass(frozen=True)
class Prompt:
    tokens: int
    #: Names of its full blocks.
    blocks: tuple[int, ...]


def read(path: Path) -> list[Prompt]:
    """A trace's prompts in order of arrival."""
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["timestamp"])
    return [Prompt(row["input_length"], tuple(row["hash_ids"][: row["input_length"] // BLOCK_TOKENS])) for row in rows]


def leading(blocks: Iterable[int], held: Any) -> int:
    found = 0
    for block in blocks:
        if block not in held:
            break
        found += 1
    return found


def unbounded(prompts: list[Prompt]) -> tuple[float, float]:
    """Shares of blocks and of tokens that have come before; at least a prompt's last token is computed."""
    seen: set[int] = set()
    blocks = tokens = 0
    for prompt in prompts:
        found = leading(prompt.blocks, seen)
        blocks += found
        tokens += min(found * BLOCK_TOKENS, prompt.tokens - 1)
        seen.update(prompt.blocks)
    return blocks / sum(len(each.blocks) for each in prompts), tokens / sum(each.tokens for each in prompts)


def least_recent(prompts: list[Prompt], size: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    found = 0
    for prompt in prompts:
        found += leading(prompt.blocks, held)
        for block in reversed(prompt.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > size:
            held.popitem(last=False)
    return found / sum(len(each.blocks) for each in prompts)


def best(prompts: list[Prompt], size: int) -> float:
    """Belady's rule, block by block."""
    never = len(prompts)
    wanted: dict[int, list[int]] = {}
    for at in range(len(prompts) - 1, -1, -1):
        for block in prompts[at].blocks:
            wanted.setdefault(block, []).append(at)
    held: dict[int, int] = {}
    # Who is wanted last comes first; entries of before are passed over.
    order: list[tuple[int, int]] = []
    found = 0
    for prompt in prompts:
        found += leading(prompt.blocks, held)
        for block in prompt.blocks:
            wanted[block].pop()
            again = wanted[block][-1] if wanted[block] else never
            if again == never:
                held.pop(block, None)
                continue
            held[block] = again
            heapq.heappush(order, (-again, block))
        while len(held) > size:
            again, block = heapq.heappop(order)
            if held.get(block) == -again:
                del held[block]
    return found / sum(len(each.blocks) for each in prompts)


def fleet(path: Path, policy: str, host_blocks: int, seeds: int, speed: float) -> tuple[float, float]:
    """Share of prompt tokens found, and mean seconds to the first token."""
    workload = sim.read_trace(path)
    group = {"workers": 8, "cost_table": "a100-llama3-8b", "kv_blocks": 830, "host_blocks": host_blocks}
    runs = []
    for seed in range(1, seeds + 1):
        settings = {"groups": [group], "policy": policy, "speed": speed, "seed": seed}
        runs.append(json.loads(sim.run_one(workload, settings).summary_json()))
    return statistics.fmean(run["hit"] for run in runs), statistics.fmean(run["ttft_s"]["mean"] for run in runs)


#: About the embedded model in BF16 on one thread (`engine_bench.py`). The scheduler has to learn it from steps.
CPU = {
    "name": "cpu",
    "gpu": "none",
    "model": "embedded",
    "tensor_parallel": 1,
    "source": "engine_bench.py, rounded",
    "step_ms": [[1, 7.5], [8, 13], [64, 62], [256, 245], [1024, 1000]],
    "attention_pair_ms": 5e-5,
    "context_token_ms": 5e-4,
    "kv_tokens": 24_000,
}


def beginnings(policy: str, rate_per_s: float, seeds: int) -> tuple[float, float, float]:
    """Share of prompt tokens found, mean seconds to the first token, and their 99th percentile."""
    made = {"requests": 1000, "prompt_tokens": 544, "shared_tokens": 512, "roots": 64, "block_tokens": 16, "sigma": 0.1}
    group = {"workers": 2, "table": CPU, "kv_blocks": 1500, "max_batch": 8}
    settings = {
        "groups": [group],
        "policy": policy,
        "shed": False,
        "chunk": "1024",
        "order": "fcfs",
        "tpot_target_s": 1.0,
    }
    runs = []
    for seed in range(1, seeds + 1):
        workload = sim.make_workload({**made, "rate_per_s": rate_per_s, "output_tokens": 8}, seed)
        runs.append(json.loads(sim.run_one(workload, {**settings, "seed": seed}).summary_json()))
    ttft_s = [[run["ttft_s"][which] for run in runs] for which in ("mean", "p99")]
    return statistics.fmean(run["hit"] for run in runs), statistics.fmean(ttft_s[0]), statistics.fmean(ttft_s[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--only", default="cache,fleet,beginnings")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--speed", type=float, default=1.0, help="of arrivals, fleet only")
    arguments = parser.parse_args()
    if "beginnings" in arguments.only:
        for rate_per_s in (4.0, 7.0):
            print(f"64 beginnings, 2 workers, {rate_per_s:g} requests/s:")
            for policy in (*POLICIES, "preble"):
                hit, mean_s, p99_s = beginnings(policy, rate_per_s, arguments.seeds)
                print(f"  {policy}: {hit:.3f} of the tokens; TTFT mean {mean_s:.3f} s, p99 {p99_s:.2f} s")
    for name, file in TRACES.items() if "cache" in arguments.only or "fleet" in arguments.only else ():
        path = arguments.traces / "mooncake" / file
        if not path.exists():
            print(f"{name}: skipped, there is no {path}", file=sys.stderr)
            continue
        prompts = read(path)
        all_blocks, all_tokens = unbounded(prompts)
        if "cache" in arguments.only:
            print(f"{name}, one cache, without a bound {all_blocks:.3f} of the blocks:")
            for size in CACHE_BLOCKS:
                print(f"  {size:6d} blocks: {least_recent(prompts, size):.3f}, at best {best(prompts, size):.3f}")
        if "fleet" in arguments.only:
            print(f"{name}, 8 workers, without a bound {all_tokens:.3f} of the tokens:")
            for policy in POLICIES:
                for host_blocks in HOST_BLOCKS:
                    hit, ttft_s = fleet(path, policy, host_blocks, arguments.seeds, arguments.speed)
                    share = f"{hit:.3f} = {hit / all_tokens:.2f} of that"
                    print(f"  {policy}, {host_blocks} host blocks each: {share}; TTFT {ttft_s:.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
