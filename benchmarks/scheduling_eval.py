"""The scheduler's claims on public traces, in simulation: fidelity, placement, prefill apart, overload, and more.

    python benchmarks/scheduling_eval.py --traces FOLDER            # five seeds; most of an hour on two cores
    python benchmarks/scheduling_eval.py --traces FOLDER --short    # two seeds, the main cases; minutes
    python benchmarks/scheduling_eval.py --traces FOLDER --only fidelity,placement --json

FOLDER holds mooncake/, azure2023/, servegen/ and vllm-measured/ as their projects publish them (names in the code
below); an experiment whose files are missing is skipped and said so. Each figure stands beside the one to beat:
published, or of the prototype in which the placement rule was found ("prototype"). Means are over seeds, which spread
arrivals within what the stamps tell; ± is half of the 95% interval.

Set-up, where nothing else is said: 8 workers, A100 with Llama-3-8B, 830 blocks of 512 tokens on the device and 2,000 on
the host; the live scheduler's core decides, as configured by default; workers compute what is due first; the chunk is
sized to the pace; what can't be in time any more is given up. Load 1 is the trace's own speed. Goodput is the share of
all requests whose first token came within max(2 s, 3 x its prompt alone) and whose mean pace was within 100 ms a token.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import sim
from headrace._gateway import CostTable, Outcome, Workload

OURS = "marginal_delay"

#: As if there were no queue: whatever comes is sent to its worker at once.
AT_ONCE = {"dispatch_ahead_s": 1e9, "queue_factor": 1e6}

#: Workers as live ones are: chunks as the scheduler tells, and what is late is given up by the scheduler alone.
AS_LIVE = {"chunk": "scheduler", "worker_shed": False}

BASELINES = (
    "lmetric",
    "dynamo",
    "smg:8",
    "smg",
    "preble",
    "predicted_ttft",
    "vllm_v1",
    "least_requests",
    "round_robin",
)
MAIN = (OURS, "lmetric", "dynamo", "smg:8")
TRACES = {
    "conversation": "conversation_trace.jsonl",
    "synthetic": "synthetic_trace.jsonl",
    "trace_1000": "mooncake_trace_1000.jsonl",
}

#: Goodput of the prototype with the host tier at loads 1.3, 1.7, 2.0 (mean of five seeds).
PROTOTYPE = {
    ("conversation", OURS): (0.993, 0.947, 0.892),
    ("conversation", "lmetric"): (0.988, 0.892, 0.805),
    ("conversation", "dynamo"): (0.949, 0.766, 0.655),
    ("conversation", "smg:8"): (0.964, 0.824, 0.744),
    ("conversation", "preble"): (0.993, 0.795, 0.694),
    ("conversation", "predicted_ttft"): (0.987, 0.759, 0.661),
    ("conversation", "vllm_v1"): (0.944, 0.785, 0.708),
    ("conversation", "least_requests"): (0.930, 0.775, 0.691),
    ("conversation", "round_robin"): (0.903, 0.784, 0.719),
    ("synthetic", OURS): (0.991, 0.963, 0.930),
    ("synthetic", "lmetric"): (0.987, 0.924, 0.875),
    ("synthetic", "dynamo"): (0.968, 0.883, 0.821),
    ("synthetic", "smg:8"): (0.965, 0.906, 0.871),
    ("synthetic", "preble"): (0.991, 0.927, 0.870),
    ("synthetic", "predicted_ttft"): (0.984, 0.902, 0.845),
    ("synthetic", "vllm_v1"): (0.894, 0.821, 0.784),
    ("synthetic", "least_requests"): (0.883, 0.804, 0.769),
    ("synthetic", "round_robin"): (0.875, 0.810, 0.776),
}


@dataclass
class Row:
    """One figure beside the one to beat."""

    experiment: str
    case: str
    figure: str
    to_beat: str
    holds: bool | None = None


@dataclass
class Eval:
    """What all experiments share: the traces, the seeds, and threads that run simulations."""

    traces: Path
    seeds: tuple[int, ...]
    short: bool
    threads: ThreadPoolExecutor
    cache: dict[Path, Workload]

    def workload(self, *path: str) -> Workload:
        """A trace, read once."""
        full = self.traces.joinpath(*path)
        if full not in self.cache:
            self.cache[full] = sim.read_trace(full)
        return self.cache[full]

    def runs(self, workload: Workload, many: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The summaries of each of these settings, over all seeds; as many at once as there are threads."""
        many = list(many)
        jobs = [
            [self.threads.submit(summary, workload, {**settings, "seed": seed}) for seed in self.seeds]
            for settings in many
        ]
        return [[job.result() for job in each] for each in jobs]

    def goodput(self, workload: Workload, many: Iterable[dict[str, Any]]) -> list[list[float]]:
        """Goodput of each of these settings, over all seeds."""
        return [[each["goodput"] for each in summaries] for summaries in self.runs(workload, many)]


def summary(workload: Workload, settings: dict[str, Any]) -> dict[str, Any]:
    """One run in figures."""
    value: dict[str, Any] = json.loads(sim.run_one(workload, settings).summary_json())
    return value


def fleet(
    workers: int = 8, host_blocks: int = 2000, table: str = "a100-llama3-8b", **more: Any
) -> list[dict[str, Any]]:
    """Workers that are alike."""
    kv_blocks = CostTable.named(table).kv_tokens // 512
    return [{"workers": workers, "cost_table": table, "kv_blocks": kv_blocks, "host_blocks": host_blocks, **more}]


def pm(values: list[float], digits: int = 3) -> str:
    """A mean with its interval."""
    value = sim.Interval.of(values)
    return f"{value.mean:.{digits}f}" + ("" if math.isnan(value.half) else f" ±{value.half:.{digits}f}")


def mean(values: list[float]) -> float:
    return statistics.fmean(values)


# Fidelity.

MEASURED = {
    # KV of the log's engine where it says it, batch, workers.
    "RTX4090_Llama-3.1-8B": ("rtx4090-llama3.1-8b", 256, 1),
    "RTXPRO6000_Llama-3.1-8B": ("rtxpro6000-llama3.1-8b", 128, 1),
    "RTXPRO6000_Qwen3-32B": ("rtxpro6000-qwen3-32b-tp2", 128, 1),
    "RTXPRO6000_Qwen3-30B-A3B-Instruct-2507": ("rtxpro6000-qwen3-30b-a3b", 128, 2),
}


def fidelity(ev: Eval) -> Iterable[Row]:
    """Four logs of vLLM, replayed at their arrivals.

    The cost tables were fitted to the even-numbered requests of each log, so what counts is the odd-numbered half: that
    the batch behaves as vLLM's.
    """
    for name, (table, max_batch, workers) in MEASURED.items():
        path = ev.traces / "vllm-measured" / f"{name}__requests.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows.sort(key=lambda row: row["arrival_time"])
        group = {"cost_table": table, "max_batch": max_batch, "workers": workers}
        settings = {
            "groups": [group],
            "policy": "vllm_v1",
            "order": "fcfs",
            "chunk": "2048",
            "shed": False,
            "scheduler": AT_ONCE,
        }
        outcome = sim.run_one(ev.workload("vllm-measured", path.name), settings)
        ttft = [row["first_token_ts"] - row["queued_ts"] for row in rows]
        tpot = [
            (row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1)
            if row["output_toks"] > 1
            else math.nan
            for row in rows
        ]
        for what, measured, simulated in (
            ("TTFT", ttft, outcome.column("ttft_s")),
            ("TPOT", tpot, outcome.column("tpot_s")),
        ):
            pairs = [(m, s) for m, s in list(zip(measured, simulated, strict=True))[1::2] if not math.isnan(m + s)]
            real, ours = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            off = mean(ours) / mean(real) - 1
            p99 = percentile(ours, 0.99) / percentile(real, 0.99) - 1
            figure = f"mean {off:+.1%}, p99 {p99:+.1%}"
            yield Row("E1 fidelity", f"{name} {what}", figure, "5%, 10%", abs(off) <= 0.05 and abs(p99) <= 0.10)


def pace(row: dict[str, Any]) -> float:
    """Seconds between tokens; NaN for answers of one."""
    gaps = row["output_toks"] - 1
    return (row["last_token_ts"] - row["first_token_ts"]) / gaps if gaps else math.nan


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


# Placement.


def sweep(
    ev: Eval, workload: Workload, policies: Iterable[str], loads: list[float], settings: dict[str, Any]
) -> dict[str, list[list[float]]]:
    """Goodput of each policy, load and seed."""
    policies = list(policies)
    many = [{**settings, "policy": policy, "speed": load} for policy in policies for load in loads]
    values = ev.goodput(workload, many)
    return {policy: values[at * len(loads) : (at + 1) * len(loads)] for at, policy in enumerate(policies)}


def crossing(loads: list[float], rows: list[list[float]]) -> float | None:
    """Where goodput falls through .9, mean over seeds."""
    value = sim.knee(loads, rows)
    return None if value is None else value.mean


def compared(
    name: str, loads: list[float], swept: dict[str, list[list[float]]], *, targets: bool, against: dict[str, float]
) -> Iterable[Row]:
    """Rows of a sweep: each policy's goodput and crossing, ours beside the others'."""
    ours = crossing(loads, swept[OURS])
    for policy, rows in swept.items():
        at = crossing(loads, rows)
        text = "  ".join(f"{load:g}: {pm(values)}" for load, values in zip(loads, rows, strict=True))
        trace = name.split(",")[0]
        published = PROTOTYPE.get((trace, policy)) if targets else None
        beat = "prototype at 1.3/1.7/2: " + "/".join(f"{value:.3f}" for value in published) if published else ""
        yield Row("E2 placement", f"{name}: {policy}", f"knee {at:.2f}  {text}" if at else text, beat)
        if policy in against and ours and at:
            wanted = against[policy]
            yield Row(
                "E2 placement",
                f"{name}: knee of ours / {policy}",
                f"{ours / at:.2f}",
                f">= {wanted}",
                ours / at >= wanted,
            )
    others = [rows for policy, rows in swept.items() if policy != OURS]
    gaps = [mean(mine) - max(mean(rows[at]) for rows in others) for at, mine in enumerate(swept[OURS])]
    yield Row(
        "E2 placement",
        f"{name}: ours less the best other, at worst",
        f"{min(gaps):+.4f}",
        ">= -.01",
        min(gaps) >= -0.01,
    )


def placement(ev: Eval) -> Iterable[Row]:
    """Rules beside each other, load swept over the knee."""
    loads = [1.3, 1.7, 2.0, 2.6] if ev.short else [0.7, 1.0, 1.3, 1.5, 1.7, 2.0, 2.3, 2.6, 3.0]
    policies = MAIN if ev.short else (OURS, *BASELINES)
    cases = [("conversation", 2000), ("synthetic", 2000)]
    if not ev.short:
        cases += [("conversation", 0), ("synthetic", 0), ("trace_1000", 2000), ("trace_1000", 0)]
    for trace, host_blocks in cases:
        workload = ev.workload("mooncake", TRACES[trace])
        swept = sweep(ev, workload, policies, loads, {"groups": fleet(host_blocks=host_blocks)})
        name = f"{trace}, host tier" if host_blocks else f"{trace}, no tier"
        tier = trace != "trace_1000" and host_blocks > 0
        wanted = {"lmetric": 1.13, "dynamo": 1.25, "smg:8": 1.25} if trace != "trace_1000" else {"lmetric": 1.13}
        yield from compared(name, loads, swept, targets=tier, against=wanted)
        if tier:
            settings = {"groups": fleet(host_blocks=host_blocks), **AS_LIVE}
            rows = sweep(ev, workload, (OURS,), loads, settings)[OURS]
            at = crossing(loads, rows)
            text = "  ".join(f"{load:g}: {pm(values)}" for load, values in zip(loads, rows, strict=True))
            yield Row("E2 placement", f"{name}: ours, workers as live", f"knee {at:.2f}  {text}" if at else text, "")
        if trace == "conversation" and host_blocks:
            for load, target in ((1.3, 0.99), (1.7, 0.94), (2.0, 0.89)):
                values = swept[OURS][loads.index(load)]
                # Three digits, as the targets are said in two.
                yield Row(
                    "E2 placement",
                    f"{name}: ours at {load:g}",
                    pm(values),
                    f">= {target}",
                    mean(values) >= target - 0.0005,
                )


def tables(ev: Eval) -> Iterable[Row]:
    """The same on larger models and newer GPUs. A load of 1 gives a worker as much of its prefill time to do."""
    base = CostTable.named("a100-llama3-8b").step_s(0, 0, [(2048, 0)])
    names = ["h100-llama2-70b-tp8"] if ev.short else ["h100-llama2-70b-tp8", "a100-llama3-70b-tp4", "h100-llama3.1-8b"]
    loads = [2.0, 3.0, 4.0] if ev.short else [1.3, 1.7, 2.0, 2.4, 3.0, 3.6, 4.2]
    workload = ev.workload("mooncake", TRACES["conversation"])
    for table in names:
        relative = base / CostTable.named(table).step_s(0, 0, [(2048, 0)])
        settings = {"groups": fleet(table=table)}
        swept = sweep(ev, workload, MAIN, [load * relative for load in loads], settings)
        for row in compared(f"conversation on {table}", loads, swept, targets=False, against={"lmetric": 1.0}):
            row.experiment = "E2 cost tables"
            yield row


def staleness(ev: Eval) -> Iterable[Row]:
    """What is known of workers is late; a router's own placements always count."""
    prototype = {0: (0.992, 0.955, 0.911), 50: (0.991, 0.951, 0.904), 500: (0.988, 0.948, 0.904)}
    loads = [1.3, 1.7, 2.0]
    for late_ms, published in prototype.items():
        by_policy: dict[str, list[list[float]]] = {}
        for trace in ("conversation", "synthetic"):
            workload = ev.workload("mooncake", TRACES[trace])
            settings = {"groups": fleet(), "staleness_s": late_ms / 1000}
            for policy, rows in sweep(ev, workload, (OURS, "lmetric"), loads, settings).items():
                kept = by_policy.setdefault(policy, [[] for _ in loads])
                for at, values in enumerate(rows):
                    kept[at].append(mean(values))
        for policy, rows in by_policy.items():
            figure = "/".join(f"{mean(values):.3f}" for values in rows)
            beat = "prototype " + "/".join(f"{value:.3f}" for value in published) if policy == OURS else ""
            holds = all(mean(v) >= p - 0.02 for v, p in zip(rows, published, strict=True)) if policy == OURS else None
            yield Row("E2 staleness", f"{late_ms} ms, both traces at 1.3/1.7/2: {policy}", figure, beat, holds)


def shares(ev: Eval) -> Iterable[Row]:
    """Routers that place within what they are lent, as by default, a millisecond away from the scheduler; or ask it."""
    conversation, short = ev.workload("mooncake", TRACES["conversation"]), {"requests": 30_000, "rate_per_s": 640.0}
    fleets = (
        ("conversation", conversation, {"groups": fleet(), **AS_LIVE}),
        ("made up, 64 workers", sim.make_workload(short, 1), {"groups": [{"workers": 64}], **AS_LIVE}),
    )
    loads = [0.6, 1.3, 2.0] if ev.short else [0.3, 0.6, 0.9, 1.0, 1.3, 1.7, 2.0]
    for name, workload, settings in fleets:
        for load in loads:
            known = {**settings, "speed": load, "staleness_s": 0.125, "router_delay_s": 0.001}
            lent = [{**known, "routers": routers, "scheduler": {"credits": True}} for routers in (1, 4, 16)]
            asked, *placed = ev.runs(workload, [known, *lent])
            beat = mean([each["goodput"] for each in asked])
            ttft_s = mean([each["ttft_s"]["mean"] for each in asked])
            for settings_of, summaries in zip(lent, placed, strict=True):
                goodput = mean([each["goodput"] for each in summaries])
                unasked = mean([each["unasked"] for each in summaries])
                of_s = mean([each["ttft_s"]["mean"] for each in summaries])
                case = f"{name} at {load}, {settings_of['routers']} routers: goodput, mean TTFT, placed without asking"
                figure = f"{goodput:.3f}, {of_s:.3f} s, {unasked:.2f}"
                yield Row("shares", case, figure, f"asked {beat:.3f}, {ttft_s:.3f} s", goodput >= beat - 0.02)


def closed_loop(ev: Eval) -> Iterable[Row]:
    """Conversations found by their prefixes: a turn comes after the answer before it, and the client's own pause."""
    workload = ev.workload("mooncake", TRACES["conversation"]).with_sessions()
    loads = [1.7] if ev.short else [1.3, 1.7, 2.0, 2.6]
    policies = MAIN if ev.short else (OURS, "lmetric", "dynamo", "smg:8", "preble", "vllm_v1", "round_robin")
    swept = {
        way: sweep(ev, workload, policies, loads, {"groups": fleet(), "closed_loop": way == "closed"})
        for way in ("open", "closed")
    }
    for at, load in enumerate(loads):
        ranks = {way: sorted(rows, key=lambda policy: -mean(rows[policy][at])) for way, rows in swept.items()}
        for way, rows in swept.items():
            figure = "  ".join(f"{policy} {pm(rows[policy][at])}" for policy in ranks[way])
            first = ranks[way][0]
            level = mean(rows[first][at]) - mean(rows[OURS][at])
            yield Row("E3 closed loop", f"load {load:g}, {way}", figure, "ours first, or within .01", level <= 0.01)


# How workers run.


def chunks(ev: Eval) -> Iterable[Row]:
    """The chunk sized to the pace, beside fixed ones."""
    workload = ev.workload("mooncake", TRACES["conversation"])
    published = {"2048": 0.822, "1024": 0.856, "512": 0.966, "dynamic": 0.986}
    many = [{"groups": fleet(), "policy": "lmetric", "speed": 1.3, "chunk": chunk} for chunk in published]
    values = dict(zip(published, ev.goodput(workload, many), strict=True))
    for chunk, goodput in values.items():
        best = mean(values["dynamic"]) >= max(mean(each) for each in values.values()) - 0.005
        holds = best if chunk == "dynamic" else None
        yield Row(
            "E4 chunk", f"conversation at 1.3, lmetric, {chunk}", pm(goodput), f"prototype {published[chunk]}", holds
        )
    loads = [0.5, 0.7, 1.0, 1.4, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0]
    for trace in () if ev.short else ("conv", "code"):
        workload = ev.workload("azure2023", f"AzureLLMInferenceTrace_{trace}.csv")
        knees = {}
        for chunk in published:
            settings = {"groups": fleet(workers=2, host_blocks=0, kv_blocks=0), "chunk": chunk}
            knees[chunk] = crossing(loads, sweep(ev, workload, (OURS,), loads, settings)[OURS])
        figure = "  ".join(f"{chunk} {at:.2f}" if at else f"{chunk} -" for chunk, at in knees.items())
        known = [at for at in knees.values() if at]
        holds = knees["dynamic"] is not None and knees["dynamic"] >= max(known) * 0.98
        yield Row("E4 chunk", f"azure {trace}, 2 workers: knee", figure, "dynamic at least the best fixed", holds)


#: DistServe's fitted model of OPT-13B on an A100 (its `simdistserve` profile): a prompt's line from 128 tokens on, an
#: answer's below. KV as its `max_num_tokens` has it; a token of it is 40 layers of 5,120 values, twice, in 16 bits.
OPT_13B = {
    "name": "distserve-opt-13b",
    "gpu": "A100-80GB",
    "model": "OPT-13B",
    "tensor_parallel": 1,
    "source": "DistServe's profile: prefill 18.1 + .1019 n + 7.12e-6 n^2; decode 19.9 + 6.27e-4 C + .0385 B",
    "step_ms": [[1, 19.9], [94, 23.5], [128, 31.1], [1024, 122.4], [4096, 435.5]],
    "attention_pair_ms": 1.424e-5,
    "context_token_ms": 6.27e-4,
    "kv_tokens": 66_000,
}
OPT_13B_KV_BYTES = 40 * 5120 * 2 * 2


def apart(ev: Eval) -> Iterable[Row]:
    """Prompts computed beside answers, or on workers of their own: the load carried with nine in ten in time.

    Four workers with DistServe's model and targets (TTFT 0.25 s for conversations, 0.125 s for code, or three times the
    prompt alone; 0.1 and 0.2 s between tokens), 25 GB/s between them. Whole prompts are vLLM's old way; chunks are
    sized to the pace; workers for prompts are used always, or by the scheduler's rule.
    """
    cases = {"conv": (0.25, 0.1), "code": (0.125, 0.2)}
    for trace, (ttft_s, tpot_s) in cases.items():
        workload = ev.workload("azure2023", f"AzureLLMInferenceTrace_{trace}.csv")
        targets = {"ttft_target_s": ttft_s, "tpot_target_s": tpot_s}
        ways = {
            "together, whole prompts": {**of_four(0, "16384", "off"), **targets},
            "together, chunks": {**of_four(0, "dynamic", "off"), **targets},
        }
        for prefill in (1, 2, 3):
            ways[f"{prefill} of 4 for prompts, always"] = {**of_four(prefill, "dynamic", "always"), **targets}
            ways[f"{prefill} of 4 for prompts, by the rule"] = {**of_four(prefill, "dynamic", "auto"), **targets}
        jobs = {way: ev.threads.submit(bisected, workload, each) for way, each in ways.items()}
        knees = {way: job.result() for way, job in jobs.items()}
        whole, chunked = knees["together, whole prompts"], knees["together, chunks"]
        static = max(knee for way, knee in knees.items() if way.endswith("always"))
        ruled = max(knee for way, knee in knees.items() if way.endswith("rule"))
        for way, knee in knees.items():
            yield Row(
                "E5 apart", f"azure {trace}, {way}: load at .9", f"{knee:.2f} = {knee / whole:.2f} x whole prompts", ""
            )
        name = f"azure {trace}: best by the rule / best always, / together in chunks"
        figure = f"{ruled / static:.2f}, {ruled / chunked:.2f}"
        yield Row("E5 apart", name, figure, "TaiChi 1.29 to 1.77, 1.09 to 1.47", ruled >= max(static, chunked) * 0.99)


def of_four(prefill: int, chunk: str, how: str) -> dict[str, Any]:
    """Settings of four such workers, of which so many are for prompts."""
    group = {
        "workers": 4,
        "prefill_workers": prefill,
        "table": OPT_13B,
        "kv_token_bytes": OPT_13B_KV_BYTES,
        "network_gb_per_s": 25.0,
    }
    scheduler = {"disaggregation": how, "disaggregation_min_tokens": 1 if how == "always" else 1024}
    return {"groups": [group], "chunk": chunk, "scheduler": scheduler}


def bisected(workload: Workload, settings: dict[str, Any], most: float = 4.0, rounds: int = 6) -> float:
    """The load at which goodput falls through .9, one seed."""
    low, high = 0.0, most
    for _ in range(rounds):
        middle = (low + high) / 2
        good = summary(workload, {**settings, "speed": middle, "seed": 1})["goodput"]
        low, high = (middle, high) if good >= 0.9 else (low, middle)
    return (low + high) / 2


def overload(ev: Eval) -> Iterable[Row]:
    """Whose turn, and giving up what can't be in time."""
    workload = ev.workload("mooncake", TRACES["conversation"])
    published = {
        ("fcfs", True): (0.989, 0.954, 0.855),
        ("sjf", True): (0.994, 0.981, 0.894),
        ("edf", True): (1.000, 0.987, 0.893),
        ("edf", False): None,
    }
    loads = (1.0, 1.3, 1.7)
    for policy in ("lmetric", OURS):
        values: dict[tuple[str, bool], list[list[float]]] = {}
        for order, shed in published:
            many = [
                {"groups": fleet(), "policy": policy, "speed": load, "order": order, "shed": shed} for load in loads
            ]
            values[order, shed] = ev.goodput(workload, many)
        for (order, shed), rows in values.items():
            target = published[order, shed] if policy == "lmetric" else None
            beat = "prototype " + "/".join(f"{value:.3f}" for value in target) if target else ""
            holds = None
            if policy == OURS and (order, shed) == ("edf", True):
                holds = all(
                    mean(row) >= value - 0.01 for row, value in zip(rows, published["edf", True] or (), strict=True)
                )
                beat = "at least LMetric's prototype 1.000/.987/.893"
            figure = "/".join(pm(row) for row in rows)
            name = f"at 1/1.3/1.7, {policy}, {order}{', gives up' if shed else ''}"
            yield Row("E7 overload", name, figure, beat, holds)


def lengths(ev: Eval) -> Iterable[Row]:
    """Shortest expected answer first, with perfect and noisy knowledge of lengths, beside first come, first served."""
    cases: list[tuple[str, Workload, float, int, int]] = []
    conv = ev.traces / "azure2023" / "AzureLLMInferenceTrace_conv.csv"
    if conv.exists():
        cases.append(("azure conv x2.5, 2 workers, batch 32", ev.workload("azure2023", conv.name), 2.5, 2, 32))
    reason = ev.traces / "servegen" / "reason" / "deepseek-r1"
    if reason.exists():
        workload = sim.read_trace(reason, duration_s=1200)
        cases.append(("deepseek-r1, 20 min, 4 workers, batch 64", workload, 1.0, 4, 64))
    for name, workload, speed, workers, batch in cases:
        base = {
            "groups": fleet(workers=workers, host_blocks=0, kv_blocks=0, max_batch=batch),
            "speed": speed,
            "shed": False,
            # Whose turn it is among answers is the workers' in this experiment.
            "scheduler": AT_ONCE,
        }
        sigmas: list[float | None] = [None, 0.0, 0.3, 1.0]
        many = [
            {**base, "order": "fcfs" if sigma is None else "shortest_output", "length_sigma": sigma} for sigma in sigmas
        ]
        runs = ev.runs(workload, many)
        latency = [mean([each["latency_s"]["mean"] for each in summaries]) for summaries in runs]
        for sigma, value in zip(sigmas[1:], latency[1:], strict=True):
            ratio = latency[0] / value
            yield Row("E8 lengths", f"{name}: mean latency FCFS / shortest, sigma {sigma}", f"{ratio:.2f}", "LTR 2.8")


#: A token of an answer weighs so many prompt tokens in VTC and in the scheduler's accounts.
OUTPUT_WEIGHT = 2.0


def fairness(ev: Eval) -> Iterable[Row]:
    """Tenants that all ask for more than their share, one for twice as much as the others, on one worker.

    What two of them have had, per weight, may differ over any interval by 2 max(L, 2 M) tokens (VTC, arXiv 2401.00588):
    L the longest prompt, M the KV of a batch.
    """
    blocks, block_tokens, tenants = 512, 64, 3
    workload = sim.make_workload(
        {
            "requests": 1500 if ev.short else 4000,
            "rate_per_s": 30,
            "roots": 1500,
            "shared_tokens": 0,
            "tenants": tenants,
        },
        1,
    )
    for weights in ({}, {"tenant-0": 2.0}):
        settings = {
            "groups": [{"workers": 1, "kv_blocks": blocks}],
            "shed": False,
            "scheduler": {"max_queued": 100_000, "tenant_weights": weights},
        }
        worst, bound = [], 0.0
        for seed in ev.seeds:
            outcome = sim.run_one(workload, {**settings, "seed": seed})
            longest = max(outcome.column("prompt_tokens"))
            bound = 2 * max(longest, OUTPUT_WEIGHT * blocks * block_tokens)
            worst.append(widest_gap(outcome, [weights.get(f"tenant-{each}", 1.0) for each in range(tenants)]))
        name = "weights 2, 1, 1" if weights else "equal weights"
        figure = f"{pm(worst, 0)} tokens"
        yield Row(
            "E9 fairness", f"{tenants} tenants, {name}: widest gap", figure, f"<= {bound:.0f}", max(worst) <= bound
        )


def widest_gap(outcome: Outcome, weights: list[float]) -> float:
    """By how much what two tenants have had, per weight, drifted apart over any interval in which all waited."""
    names = ("tenant", "arrival_s", "first_token_s", "finished_s", "prompt_tokens", "cached_tokens", "output_tokens")
    rows = list(zip(*(outcome.column(name) for name in names), strict=True))
    # From when each has something waiting until the first has nothing left to ask for.
    from_s = 5.0
    until_s = min(max(row[1] for row in rows if row[0] == tenant) for tenant in range(len(weights)))
    times = [from_s + (until_s - from_s) * at / 400 for at in range(401)]
    had = [[0.0] * len(times) for _ in weights]
    for number, _, first_s, finished_s, prompt, cached, output in rows:
        tenant = int(number)
        for at, now_s in enumerate(times):
            if now_s >= first_s:
                part = min(1.0, (now_s - first_s) / max(finished_s - first_s, 1e-9))
                had[tenant][at] += (prompt - cached + OUTPUT_WEIGHT * output * part) / weights[tenant]
    gaps = [
        [one - other for one, other in zip(had[first], had[second], strict=True)]
        for first in range(len(weights))
        for second in range(first)
    ]
    return max(max(gap) - min(gap) for gap in gaps)


def failures(ev: Eval) -> Iterable[Row]:
    """One worker of eight is lost every minute, for twenty seconds."""
    workload = ev.workload("mooncake", TRACES["conversation"])
    span_s = workload.span_s / 1.3
    faults = [(60.0 * (at + 1), at % 8, 20.0) for at in range(int(span_s / 60))]
    many = [{"groups": fleet(), "speed": 1.3, "faults": each} for each in ([], faults)]
    calm, stormy = ev.runs(workload, many)
    ended = all(each["finished"] + each["rejected"] == each["requests"] for each in stormy)
    for what, of in (
        ("goodput", lambda each: each["goodput"]),
        ("TTFT p99 s", lambda each: each["ttft_s"]["p99"]),
    ):
        figure = f"{pm([of(each) for each in stormy])} (without {pm([of(each) for each in calm])})"
        yield Row("E12 failure", f"conversation at 1.3: {what}", figure, "every request ends once", ended)


def scale(ev: Eval) -> Iterable[Row]:
    """How fast the simulator is."""
    workload = sim.make_workload({"requests": 100_000, "rate_per_s": 400}, 1)
    began = time.process_time()
    outcome: Outcome = sim.run_one(workload, {"groups": [{"workers": 64}]})
    took_s = time.process_time() - began
    figure = f"{took_s:.1f} s CPU for {len(outcome):,} requests on 64 workers"
    yield Row("speed", "marginal delay, exact index", figure, "< 60 s", took_s < 60)


EXPERIMENTS: dict[str, Callable[[Eval], Iterable[Row]]] = {
    "fidelity": fidelity,
    "placement": placement,
    "tables": tables,
    "staleness": staleness,
    "shares": shares,
    "closed_loop": closed_loop,
    "chunks": chunks,
    "apart": apart,
    "overload": overload,
    "lengths": lengths,
    "fairness": fairness,
    "failures": failures,
    "scale": scale,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    parser.add_argument("--only", default="", help=f"some of {','.join(EXPERIMENTS)}")
    parser.add_argument("--short", action="store_true", help="two seeds and the main cases")
    parser.add_argument("--seeds", type=int, default=0, help="how many (5; 2 with --short)")
    parser.add_argument("--threads", type=int, default=2, help="simulations at once")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(EXPERIMENTS)
    unknown = [name for name in chosen if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"--only: there is no {unknown[0]}; there are {', '.join(EXPERIMENTS)}")
    seeds = arguments.seeds or (2 if arguments.short else 5)
    rows: list[Row] = []
    with ThreadPoolExecutor(arguments.threads) as threads:
        ev = Eval(arguments.traces, tuple(range(1, seeds + 1)), arguments.short, threads, {})
        for name in chosen:
            began = time.monotonic()
            try:
                for row in EXPERIMENTS[name](ev):
                    rows.append(row)
                    if not arguments.json:
                        mark = {True: "ok  ", False: "MISS", None: "    "}[row.holds]
                        beat = f"   [{row.to_beat}]" if row.to_beat else ""
                        print(f"{mark} {row.experiment:14} {row.case}:  {row.figure}{beat}", flush=True)
            except (OSError, sim.ConfigError) as error:
                print(f"skip {name}: {error}", file=sys.stderr)
            print(f"     {name} took {time.monotonic() - began:.0f} s", file=sys.stderr)
    if arguments.json:
        print(json.dumps([vars(row) for row in rows], indent=1))
    sys.exit(1 if any(row.holds is False for row in rows) else 0)


if __name__ == "__main__":
    main()
