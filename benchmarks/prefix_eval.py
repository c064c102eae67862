"""What memory for KV is worth on public traces: how much of the prompts need not be computed, and how late the rest is.

`cache`: one cache for all requests, in order, with no time passing: the least recently used goes first (a prompt's end
before its beginning, as workers do it), beside the same in two segments (what was asked for twice has four fifths), the
best that any rule could do (Belady: what is wanted again last goes first, or does not come in) and a cache without a
bound. Share of the prompts' full blocks found, from the beginning on.

`fleet`: 8 workers of A100 with Llama-3-8B in the simulator, 830 blocks of 512 tokens on each device and so many on its
host; the live scheduler's core decides. Share of prompt tokens found, over what a cache without a bound for the whole
fleet would have had, and the mean time to the first token. Two requests that come at once find nothing of each other
in a cache without time either, and whoever is sent where its prefix is not, because it is answered sooner there, counts
as not found: the fleet's figure is below 1 for both.

`spread`: where the prompt tokens went that a cache without a bound would have had, in that fleet with all the memory
that it may want: never computed (or not yet), or held by another worker than the one that was chosen.

`beginnings`: many beginnings of 512 tokens, prompts 32 tokens longer, on two workers as slow as the embedded model is
on a CPU core. At a rate: 64 beginnings, KV for some 45 of them on each worker; what each rule of placing finds, and how
late first tokens are. From clients that ask again as soon as they are answered, with KV for all (as `prefix_bench.py
mesh` does with the real engine): what is computed over the least possible, each beginning once.

    python benchmarks/prefix_eval.py --traces FOLDER    # FOLDER/mooncake/*.jsonl, as Mooncake publishes them; minutes
    python benchmarks/prefix_eval.py --only beginnings  # needs no traces
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import sys
from collections import ChainMap, OrderedDict
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


def segmented(prompts: list[Prompt], size: int, kept: float = 0.8) -> float:
    """Least recently used, with most of the room for what was asked for more than once."""
    once: OrderedDict[int, None] = OrderedDict()
    again: OrderedDict[int, None] = OrderedDict()
    found = 0
    for prompt in prompts:
        found += leading(prompt.blocks, ChainMap(once, again))
        for block in reversed(prompt.blocks):
            known = block in once or block in again
            once.pop(block, None)
            again.pop(block, None)
            (again if known else once)[block] = None
        while len(again) > kept * size:
            once[again.popitem(last=False)[0]] = None
        while len(once) + len(again) > size:
            (once or again).popitem(last=False)
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


SHARED_TOKENS, OWN_TOKENS = 512, 32


def of_beginnings(
    policy: str, made: dict[str, Any], kv_blocks: int, seeds: int, *, closed_loop: bool
) -> list[tuple[dict[str, Any], int]]:
    """Each seed's summary, and the prompt tokens that were computed."""
    group = {"workers": 2, "table": CPU, "kv_blocks": kv_blocks, "max_batch": 8}
    settings = {
        "groups": [group],
        "policy": policy,
        "shed": False,
        "chunk": "1024",
        "order": "fcfs",
        "tpot_target_s": 1.0,
        "closed_loop": closed_loop,
    }
    runs = []
    for seed in range(1, seeds + 1):
        like = {
            "prompt_tokens": SHARED_TOKENS + OWN_TOKENS,
            "shared_tokens": SHARED_TOKENS,
            "output_tokens": 8,
            "block_tokens": 16,
            "sigma": 0.1,
        }
        outcome = sim.run_one(sim.make_workload({**like, **made}, seed), {**settings, "seed": seed})
        computed = sum(outcome.column("prompt_tokens")) - sum(outcome.column("cached_tokens"))
        runs.append((json.loads(outcome.summary_json()), int(computed)))
    return runs


def beginnings(seeds: int) -> None:
    """Tables of both cases."""
    for rate_per_s in (4.0, 7.0, 8.0):
        print(f"64 beginnings, 2 workers, {rate_per_s:g} requests/s:")
        made = {"requests": 1000, "roots": 64, "rate_per_s": rate_per_s}
        for policy in (*POLICIES, "preble"):
            runs = [run for run, _ in of_beginnings(policy, made, 1500, seeds, closed_loop=False)]
            hit = statistics.fmean(run["hit"] for run in runs)
            mean_s, p99_s = (statistics.fmean(run["ttft_s"][which] for run in runs) for which in ("mean", "p99"))
            print(f"  {policy}: {hit:.3f} of the tokens; TTFT mean {mean_s:.3f} s, p99 {p99_s:.2f} s")
    for roots, requests, clients in ((8, 64, 8), (16, 96, 4), (1, 64, 8)):
        print(f"{roots} beginnings, 2 workers, {requests} requests, {clients} at once:")
        made = {"requests": requests, "roots": roots, "clients": clients}
        least = requests * OWN_TOKENS + roots * SHARED_TOKENS
        for policy in (*POLICIES, "preble"):
            both = of_beginnings(policy, made, 2048, seeds, closed_loop=True)
            ratio = statistics.fmean(computed for _, computed in both) / least
            p50_s = statistics.fmean(run["ttft_s"]["p50"] for run, _ in both)
            print(f"  {policy}: {ratio:.2f} of the least possible; TTFT p50 {p50_s:.3f} s")


def spread(path: Path, speed: float, seed: int = 1) -> str:
    """Where the tokens went that a cache without a bound would have had."""
    workload = sim.read_trace(path)
    group = {"workers": 8, "cost_table": "a100-llama3-8b", "kv_blocks": 830, "host_blocks": 30_000}
    outcome = sim.run_one(workload, {"groups": [group], "speed": speed, "seed": seed})
    prompts = read(path)
    names = ("arrival_s", "first_token_s", "worker", "cached_tokens")
    arrival_s, first_s, worker, cached = (outcome.column(name) for name in names)
    came = sorted(range(len(prompts)), key=lambda at: arrival_s[at])
    # Requests that had no first token have NaN, and computed nothing.
    computed = iter(sorted((at for at in came if first_s[at] == first_s[at]), key=lambda at: first_s[at]))
    after = next(computed, None)
    held: list[set[int]] = [set() for _ in range(8)]
    seen: set[int] = set()
    ideal = found = missed = 0
    for at in came:
        prompt = prompts[at]
        while after is not None and first_s[after] <= arrival_s[at]:
            held[int(worker[after])].update(prompts[after].blocks)
            after = next(computed, None)
        tokens = [min(leading(prompt.blocks, of) * BLOCK_TOKENS, prompt.tokens - 1) for of in (seen, *held)]
        seen.update(prompt.blocks)
        if first_s[at] == first_s[at]:
            ideal += tokens[0]
            found += int(cached[at])
            missed += max(0, max(tokens[1:]) - int(cached[at]))
    ttft_s = json.loads(outcome.summary_json())["ttft_s"]["mean"]
    elsewhere, nowhere = missed / ideal, 1 - (found + missed) / ideal
    return f"found {found / ideal:.3f}, elsewhere {elsewhere:.3f}, nowhere {nowhere:.3f}; TTFT {ttft_s:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--only", default="cache,fleet,spread,beginnings")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--speed", type=float, default=1.0, help="of arrivals, fleet only")
    arguments = parser.parse_args()
    if "beginnings" in arguments.only:
        beginnings(arguments.seeds)
    for name, file in TRACES.items() if set(arguments.only.split(",")) & {"cache", "fleet", "spread"} else ():
        path = arguments.traces / "mooncake" / file
        if not path.exists():
            print(f"{name}: skipped, there is no {path}", file=sys.stderr)
            continue
        prompts = read(path)
        all_blocks, all_tokens = unbounded(prompts)
        if "cache" in arguments.only:
            print(f"{name}, one cache, without a bound {all_blocks:.3f} of the blocks:")
            for size in CACHE_BLOCKS:
                lru, twice = least_recent(prompts, size), segmented(prompts, size)
                print(f"  {size:6d} blocks: {lru:.3f}, segmented {twice:.3f}, at best {best(prompts, size):.3f}")
        if "fleet" in arguments.only:
            print(f"{name}, 8 workers, without a bound {all_tokens:.3f} of the tokens:")
            for policy in POLICIES:
                for host_blocks in HOST_BLOCKS:
                    hit, ttft_s = fleet(path, policy, host_blocks, arguments.seeds, arguments.speed)
                    share = f"{hit:.3f} = {hit / all_tokens:.2f} of that"
                    print(f"  {policy}, {host_blocks} host blocks each: {share}; TTFT {ttft_s:.2f} s", flush=True)
        if "spread" in arguments.only:
            for speed in (0.25, 1.0, 1.7):
                print(f"{name}, 8 workers, load {speed:g}: {spread(path, speed)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
