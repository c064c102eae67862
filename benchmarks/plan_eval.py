"""``headrace plan`` against the simulator: do planned fleets hold, are they the cheapest, how far off is what is said?

    python benchmarks/plan_eval.py [--traces FOLDER] [--json]       # some twenty minutes on one core

counts: made-up traffic for eighteen fleets, with measured tables or the roofline's. Planned workers beside the fewest
that hold in the simulator, and predicted times beside simulated ones at the planned number. Then the same for fleets
drawn at random, to which nothing was fitted.

fleet: Azure's conversations (azure2023/ in FOLDER, skipped without it) at 5, 10 and 20 times their speed, an 8B model
on the four GPUs with measured tables, p99 of TTFT 1 s and of TPOT 100 ms. The fleet by arithmetic, and the one by
``--simulate``, beside brute force: every number of workers of every kind, and at 10 every fixed chunk too. To beat:
within 5% of the optimum, in less than 60 s.

A fleet holds when no request is refused and both 99th percentiles keep to their targets. One seed: the same figures on
every machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from headrace import plan, sim
from headrace.capacity import Serving, Targets, Traffic, fewest
from headrace.shapes import Worker, find_gpu, find_shape

#: Model, GPU, GPUs of a worker, weights; requests a second, prompt, answer, share in KV; targets.
CASES = [
    ("llama-3-8b", "a100-80gb", 1, "fp16", 20, 1000, 200, 0.0, 1.0, 0.1),
    ("llama-3-8b", "a100-80gb", 1, "fp16", 20, 1000, 200, 0.5, 1.0, 0.1),
    ("llama-3-8b", "a100-80gb", 1, "fp16", 50, 1000, 200, 0.0, 1.0, 0.1),
    ("llama-3-8b", "a100-80gb", 1, "fp16", 50, 1000, 200, 0.0, 0.5, 0.05),
    ("llama-3-8b", "a100-80gb", 1, "fp16", 150, 1000, 200, 0.0, 1.0, 0.1),
    ("llama-3.1-8b", "h100-80gb", 1, "fp16", 50, 1000, 500, 0.0, 1.0, 0.03),
    ("llama-3.1-8b", "h100-80gb", 1, "fp16", 50, 1000, 500, 0.0, 1.0, 0.05),
    ("llama-3.1-8b", "h100-80gb", 1, "fp16", 200, 500, 500, 0.0, 1.0, 0.05),
    ("llama-3.1-8b", "h100-80gb", 1, "fp8", 200, 1000, 200, 0.0, 1.0, 0.05),
    ("llama-3.1-8b", "rtx-4090", 1, "fp16", 20, 1000, 200, 0.0, 1.0, 0.1),
    ("llama-3.1-8b", "rtx-4090", 1, "fp16", 100, 1000, 200, 0.0, 2.0, 0.1),
    ("llama-3.1-70b", "a100-80gb", 4, "fp16", 20, 1000, 200, 0.0, 2.0, 0.1),
    ("llama-3.1-70b", "a100-80gb", 8, "fp16", 20, 1000, 200, 0.0, 2.0, 0.1),
    ("llama-3.1-70b", "h100-80gb", 4, "fp16", 20, 2000, 300, 0.0, 2.0, 0.05),
    ("llama-3.1-70b", "h200-141gb", 2, "fp16", 20, 2000, 300, 0.0, 2.0, 0.1),
    ("qwen3-32b", "rtx-pro-6000", 2, "fp16", 20, 1000, 500, 0.0, 2.0, 0.1),
    ("llama-3.1-8b", "l4", 1, "fp16", 5, 300, 200, 0.0, 2.0, 0.15),
    ("llama-2-7b", "a100-80gb", 1, "fp16", 20, 1000, 500, 0.0, 2.0, 0.1),
]

KINDS = ("a100-80gb", "h100-80gb", "rtx-4090", "rtx-pro-6000")
CHUNKS = ("512", "1024", "2048")

Row = tuple[str, str, bool | None]


Case = tuple[str, str, int, str, float, int, int, float, float, float]


def counts(cases: Iterable[Case] = CASES) -> Iterator[Row]:
    """Planned and needed workers, predicted and simulated times."""
    off: list[float] = []
    errors: dict[str, list[float]] = {"TTFT p50": [], "TTFT p99": [], "TPOT mean": [], "TPOT p99": []}
    for model, gpu, gpus, weights, rate, prompt, output, prefix, ttft_s, tpot_s in cases:
        question = plan.Question(
            model=model, rate_per_s=rate, prompt_tokens=prompt, output_tokens=output, prefix_share=prefix
        )
        worker = Worker(find_shape(model), find_gpu(gpu), gpus, weights)
        workload, targets = plan.made_up_workload(question), Targets(ttft_s, tpot_s)
        load = Serving(worker, Traffic.made_up(rate, prompt, output, prefix), targets).fewest()
        if load is None or load.workers > 60:
            continue
        least = least_that_holds(worker, workload, targets, load.workers)
        off.append(load.workers / least - 1)
        shown = plan.simulate(worker, workload, targets, load.workers)
        for name, predicted, simulated in (
            ("TTFT p50", load.ttft_p50_s, shown.ttft_p50_s),
            ("TTFT p99", load.ttft_p99_s, shown.ttft_p99_s),
            ("TPOT mean", load.tpot_mean_s, shown.tpot_mean_s),
            ("TPOT p99", load.tpot_p99_s, shown.tpot_p99_s),
        ):
            errors[name].append(predicted / simulated - 1)
        case = f"{model} on {gpus} {gpu} {weights}, {rate}/s of {prompt} + {output}, {prefix:.0%} in KV"
        source = "measured" if worker.table["source"].startswith("measured") else "roofline"
        figure = f"planned {load.workers}, needed {least}; TTFT p99 {load.ttft_p99_s:.2f} s, {shown.ttft_p99_s:.2f} s"
        within = abs(load.workers - least) <= max(1, round(0.05 * least))
        yield f"{case} ({source})", figure, within
    exact = sum(each == 0 for each in off)
    yield "all cases", f"{exact} of {len(off)} exact, off by {min(off):+.0%} to {max(off):+.0%}", None
    for name, each in errors.items():
        typical = statistics.median(abs(value) for value in each)
        yield f"{name}, predicted over simulated", f"{typical:.0%} (median), {min(each):+.0%} to {max(each):+.0%}", None


def others(count: int = 24, seed: int = 7) -> Iterator[Row]:
    """Drawn at random; what no fleet serves, or only one of more than 60 workers, is left out."""
    draw = random.Random(seed)
    kinds = [(model, gpu, gpus) for model, gpu, gpus, *_ in CASES]
    cases: list[Case] = []
    for _ in range(count):
        model, gpu, gpus = draw.choice(kinds)
        rate, prompt, output = draw.choice((10, 30, 80)), draw.choice((300, 1000, 3000)), draw.choice((50, 200, 600))
        prefix, ttft_s, tpot_s = draw.choice((0.0, 0.0, 0.5)), draw.choice((0.7, 1.5, 4.0)), draw.choice((0.05, 0.1))
        cases.append((model, gpu, gpus, "fp16", rate, prompt, output, prefix, ttft_s, tpot_s))
    for case, figure, _ in counts(cases):
        yield f"drawn (seed {seed}): {case}", figure, None


def least_that_holds(worker: Worker, workload: sim.Workload, targets: Targets, guess: int) -> int:
    """By the simulator."""
    least = fewest(lambda workers: plan.simulate(worker, workload, targets, workers).holds, guess)
    assert least is not None
    return least


def fleet(traces: Path) -> Iterator[Row]:
    """The cheapest fleet for Azure's conversations: planned, searched for, and by brute force."""
    trace = traces / "azure2023" / "AzureLLMInferenceTrace_conv.csv"
    workload = sim.read_trace(trace)
    targets = Targets(1.0, 0.1)
    for load in (5.0, 10.0, 20.0):
        question = plan.Question(
            gpus=KINDS, tensor_parallel=1, trace=trace, load=load, ttft_target_s=1.0, tpot_target_s=0.1
        )
        case = f"Azure's conversations at {load:g}"
        began = time.process_time()
        planned = plan.answer(question)
        planned_s = time.process_time() - began
        counted: list[int] = []
        began = time.process_time()
        found = plan.answer(question, counter(counted))
        found_s = time.process_time() - began
        best_usd, text, runs = brute_force(planned, workload, targets, load, ("dynamic",))
        yield case, f"brute force: {text}, ${best_usd:.2f} an hour, {runs} simulations", None
        kind = planned.best.worker.gpu.name
        holds = plan.simulate(planned.best.worker, workload, targets, planned.workers, load=load).holds
        over = planned.usd_per_hour / best_usd - 1
        yield (
            case,
            f"arithmetic: {planned.workers} {kind}, {over:+.1%}, holds: {'yes' if holds else 'no'}, {planned_s:.1f} s",
            None,
        )
        over = found.usd_per_hour / best_usd - 1
        figure = f"--simulate: {found.workers} {found.best.worker.gpu.name}, {over:+.1%}, {len(counted)} simulations"
        yield case, f"{figure}, {found_s:.1f} s", over <= 0.05 and found_s < 60
        if load == 10:
            chunk_usd, text, runs = brute_force(planned, workload, targets, load, CHUNKS, below=best_usd)
            other = f"{text}, ${chunk_usd:.2f}" if text else "nothing cheaper"
            yield case, f"fixed chunks too: {other}, {runs} simulations", found.usd_per_hour <= 1.05 * chunk_usd


def counter(counted: list[int]) -> Callable[[int, int], None]:
    """Notes each simulation."""
    return lambda count, _workers: counted.append(count)


def brute_force(
    planned: plan.Plan,
    workload: sim.Workload,
    targets: Targets,
    load: float,
    chunks: tuple[str, ...],
    below: float = float("inf"),
) -> tuple[float, str, int]:
    """Every number of workers of every kind up to twice the planned cost; what costs least, in words, and runs."""
    best, text, runs = below, "", 0
    most_usd = min(2 * planned.usd_per_hour, below)
    for each in planned.fleets:
        for chunk in chunks:
            for workers in range(1, int(most_usd / each.worker.usd_per_hour) + 1):
                runs += 1
                usd = workers * each.worker.usd_per_hour
                if plan.simulate(each.worker, workload, targets, workers, load=load, chunk=chunk).holds and usd < best:
                    best, text = usd, f"{workers} {each.worker.gpu.name}"
                    text += "" if chunk == "dynamic" else f" with chunks of {chunk}"
    return best, text, runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of the traces, for fleet")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    arguments = parser.parse_args()
    rows: list[Row] = []
    experiments = [counts(), others()] + ([fleet(arguments.traces)] if arguments.traces else [])
    for experiment in experiments:
        for case, figure, holds in experiment:
            rows.append((case, figure, holds))
            if not arguments.json:
                mark = {True: "ok  ", False: "MISS", None: "    "}[holds]
                print(f"{mark} {case}:  {figure}", flush=True)
    if arguments.json:
        print(json.dumps([{"case": case, "figure": figure, "holds": holds} for case, figure, holds in rows], indent=1))
    sys.exit(1 if any(holds is False for _, _, holds in rows) else 0)


if __name__ == "__main__":
    main()
