"""``headrace sim``: runs workloads through the simulator, over policies, loads and seeds, and sums up what it showed.

The simulation is Rust's (``gateway_rs/core/src/sim``). Here are the experiment around it: which runs, means with
intervals over seeds, the load at which goodput falls through a share, and a picture. Showing is ``terminal.py``'s.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace._gateway import Outcome, Workload, placement_policies, simulate
from headrace.errors import ConfigError, HeadraceError

#: Formats of traces; ``auto`` tells them by what the file looks like.
FORMATS = ("auto", "mooncake", "azure", "measured", "servegen")

#: The knee: where goodput falls through this share.
KNEE = 0.9

#: Two-sided 95% quantiles of Student's t by degrees of freedom, from 1.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and half the width of its 95% interval; NaN for a single seed."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of one value a seed."""
        count = len(values)
        mean = math.fsum(values) / count
        if count < 2:
            return cls(mean, math.nan)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
        t95 = _T95[count - 2] if count - 2 < len(_T95) else 1.96
        return cls(mean, t95 * deviation / math.sqrt(count))


@dataclass(frozen=True)
class Plan:
    """All runs of an experiment: each policy with each fleet at each load with each seed."""

    workload: Workload
    policies: tuple[str, ...]
    loads: tuple[float, ...]
    seeds: tuple[int, ...]
    #: Of a run, as the simulator's settings are written; policy, speed and seed are set for each.
    settings: dict[str, Any] = field(default_factory=dict)
    #: Of each group's workers, those that compute prompts only: a fleet for each number.
    prefill_workers: tuple[int, ...] = (0,)

    @property
    def runs(self) -> int:
        """How many."""
        return len(self.policies) * len(self.prefill_workers) * len(self.loads) * len(self.seeds)

    def kinds(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each policy with each fleet, by a name for people, and the settings that make it."""
        for policy, prefill in itertools.product(self.policies, self.prefill_workers):
            name = f"{policy} {prefill}p" if self.prefill_workers != (0,) else policy
            settings = {**self.settings, "policy": policy}
            if prefill:
                groups = settings.get("groups", [{}])
                settings["groups"] = [{**group, "prefill_workers": prefill} for group in groups]
            yield name, settings


#: The figures of a run that are averaged, and where the summary has them.
FIGURES: dict[str, tuple[str, ...]] = {
    "goodput": ("goodput",),
    "ttft_mean_s": ("ttft_s", "mean"),
    "ttft_p50_s": ("ttft_s", "p50"),
    "ttft_p90_s": ("ttft_s", "p90"),
    "ttft_p99_s": ("ttft_s", "p99"),
    "tpot_mean_s": ("tpot_s", "mean"),
    "tpot_p99_s": ("tpot_s", "p99"),
    "latency_mean_s": ("latency_s", "mean"),
    "hit": ("hit",),
    "output_tokens_per_s": ("output_tokens_per_s",),
    "preemptions": ("preemptions",),
    "parted": ("parted",),
    "unasked": ("unasked",),
}


@dataclass(frozen=True)
class Point:
    """What one policy did at one load, over seeds. Where fleets are compared, its name says which."""

    policy: str
    load: float
    figures: dict[str, Interval]
    #: Share of requests that were refused or given up.
    rejected: Interval
    #: Seconds to the first token of all requests of all seeds, rising; for a picture.
    ttft_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Results:
    """An experiment's points, and each policy's knee where the loads enclose it."""

    requests: int
    seeds: tuple[int, ...]
    points: tuple[Point, ...]
    knees: dict[str, Interval | None]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is not known is null."""
        return {
            "requests": self.requests,
            "seeds": list(self.seeds),
            "points": [
                {
                    "policy": point.policy,
                    "load": point.load,
                    "rejected": _interval_dict(point.rejected),
                    **{name: _interval_dict(value) for name, value in point.figures.items()},
                }
                for point in self.points
            ],
            "knees": {policy: knee and _interval_dict(knee) for policy, knee in self.knees.items()},
        }


def _interval_dict(value: Interval) -> dict[str, float | None]:
    return {"mean": value.mean, "half": None if math.isnan(value.half) else value.half}


def run_one(
    workload: Workload, settings: dict[str, Any], progress: Callable[[int, int], object] | None = None
) -> Outcome:
    """One run. Raises ConfigError for settings that the simulator refuses."""
    try:
        return simulate(workload, json.dumps(settings), progress)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def run(plan: Plan, progress: Callable[[int, int], object] | None = None, *, keep_ttft: bool = False) -> Results:
    """Run all. ``progress`` hears of requests ended and in all, over all runs; an exception of it ends them."""
    if len(plan.workload) == 0:
        raise ConfigError("the workload has no requests")
    all_requests = plan.runs * len(plan.workload)
    done = 0
    points: list[Point] = []
    goodput: dict[str, list[list[float]]] = {}
    for policy, of_policy in plan.kinds():
        for load in plan.loads:
            summaries: list[dict[str, Any]] = []
            ttft_s: list[float] = []
            for seed in plan.seeds:
                settings = {**of_policy, "speed": load, "seed": seed}
                before = done

                def on_progress(ended: int, _all: int, before: int = before) -> None:
                    if progress is not None:
                        progress(before + ended, all_requests)

                outcome = run_one(plan.workload, settings, on_progress)
                summaries.append(json.loads(outcome.summary_json()))
                if keep_ttft:
                    ttft_s += [value for value in outcome.column("ttft_s") if not math.isnan(value)]
                done += len(plan.workload)
            figures = {name: Interval.of([_at(each, path) for each in summaries]) for name, path in FIGURES.items()}
            rejected = Interval.of([each["rejected"] / each["requests"] for each in summaries])
            points.append(Point(policy, load, figures, rejected, tuple(sorted(ttft_s))))
            goodput.setdefault(policy, []).append([each["goodput"] for each in summaries])
    knees = {policy: knee(plan.loads, rows) for policy, rows in goodput.items()}
    return Results(len(plan.workload), plan.seeds, tuple(points), knees)


def _at(summary: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = summary
    for name in path:
        value = value[name]
    return float(value)


def knee(loads: Sequence[float], goodput: Sequence[Sequence[float]], share: float = KNEE) -> Interval | None:
    """The load at which goodput first falls through ``share``, linear between loads.

    ``goodput`` has a row for each load with a value for each seed. None when a seed never crosses within the loads.
    """
    crossings: list[float] = []
    for seed in zip(*goodput, strict=True):
        points = sorted(zip(loads, seed, strict=True))
        for (low, before), (high, after) in itertools.pairwise(points):
            if before >= share > after:
                crossings.append(low + (high - low) * (before - share) / (before - after))
                break
        else:
            return None
    return Interval.of(crossings) if crossings else None


def all_policies() -> tuple[str, ...]:
    """Names of the placement rules."""
    return tuple(placement_policies())


def check_policies(policies: Sequence[str]) -> None:
    """Raises ConfigError for one that is unknown, before anything runs."""
    known = placement_policies()
    for policy in policies:
        if policy not in known and not policy.startswith("smg:"):
            raise ConfigError(f"--policy: there is no {policy}; there are {', '.join(known)} (smg:GAP sets its gap)")


def read_trace(path: Path, trace_format: str = "auto", *, seed: int = 1, duration_s: float = 3600.0) -> Workload:
    """Read a trace: a file, or for ServeGen a folder of clients, of which ``duration_s`` from the start are drawn.

    Raises ConfigError for what is no such trace.
    """
    if trace_format not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)} (is {trace_format})")
    try:
        if trace_format == "servegen" or (trace_format == "auto" and path.is_dir()):
            return _read_servegen(path, seed, duration_s)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {path}: {error}") from error
    if trace_format == "auto":
        trace_format = _guess(text)
    readers = {"mooncake": Workload.mooncake, "azure": Workload.azure, "measured": Workload.measured}
    try:
        return readers[trace_format](text)
    except ValueError as error:
        raise ConfigError(f"--trace: {path}: {error}") from error


def _guess(text: str) -> str:
    head = text[:2000].lstrip()
    if head.startswith("TIMESTAMP,"):
        return "azure"
    return "measured" if '"input_toks"' in head else "mooncake"


def _read_servegen(folder: Path, seed: int, duration_s: float) -> Workload:
    clients: list[tuple[str, str, str]] = []
    for dataset in sorted(folder.glob("chunk-*-dataset.json*")):
        name = dataset.name.split("-dataset")[0]
        raw = dataset.read_bytes()
        text = (gzip.decompress(raw) if dataset.suffix == ".gz" else raw).decode()
        clients.append((name, (folder / f"{name}-trace.csv").read_text(encoding="utf-8"), text))
    if not clients:
        raise ConfigError(f"--trace: {folder} has no chunk-*-dataset.json[.gz]")
    try:
        return Workload.servegen(clients, 0.0, duration_s, seed)
    except ValueError as error:
        raise ConfigError(f"--trace: {folder}: {error}") from error


def make_workload(settings: dict[str, Any], seed: int) -> Workload:
    """A made-up workload. Raises ConfigError for settings that can't be drawn from."""
    try:
        return Workload.synthetic(json.dumps(settings), seed)
    except ValueError as error:
        raise ConfigError(f"--synthetic: {error}") from error


def parse_pairs(text: str, option: str) -> dict[str, Any]:
    """``a=1,b=2.5`` as a dictionary of numbers. Raises ConfigError."""
    pairs: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        try:
            pairs[name.strip()] = int(value) if value.strip().isdigit() else float(value)
        except ValueError as error:
            raise ConfigError(f"{option}: {pair!r} must be NAME=NUMBER") from error
        if not equals:
            raise ConfigError(f"{option}: {pair!r} must be NAME=NUMBER")
    return pairs


def parse_group(text: str, workers: int) -> dict[str, Any]:
    """``TABLE[:WORKERS]`` as a group of workers; a table with a ``.json`` suffix is read. Raises ConfigError."""
    table, _, count = text.partition(":")
    try:
        group: dict[str, Any] = {"workers": int(count) if count else workers}
        if table.endswith(".json"):
            group["table"] = json.loads(Path(table).read_text(encoding="utf-8"))
        else:
            group["cost_table"] = table
    except (OSError, ValueError) as error:
        raise ConfigError(f"--gpu: {text}: {error}") from error
    return group


def parse_fault(text: str) -> tuple[float, int, float]:
    """``AT:WORKER:DOWN``: a worker is lost at a second, for seconds. Raises ConfigError."""
    try:
        at_s, worker, down_s = text.split(":")
        return float(at_s), int(worker), float(down_s)
    except ValueError as error:
        raise ConfigError(f"--fail: {text!r} must be AT:WORKER:DOWN") from error


def check_plot(path: Path) -> None:
    """Raises ConfigError for a suffix that can't be drawn, HeadraceError without matplotlib; before anything runs."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--plot: {path} must end with .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise HeadraceError("a picture needs matplotlib; install headrace[plot]")


def plot(results: Results, path: Path) -> None:
    """Draw goodput over load, and the distribution of TTFT at the highest load, as PNG or SVG by the file's name.

    Raises ConfigError for another suffix, HeadraceError without matplotlib.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for policy, points in _by_policy(results.points):
        loads = [point.load for point in points]
        means = [point.figures["goodput"].mean for point in points]
        halves = [0.0 if math.isnan(half := point.figures["goodput"].half) else half for point in points]
        left.errorbar(loads, means, yerr=halves, marker="o", markersize=3, capsize=2, label=policy)
        last = max(points, key=lambda point: point.load)
        if last.ttft_s:
            # Every picture has room for so many steps only.
            ranks = range(0, len(last.ttft_s), max(1, len(last.ttft_s) // 2000))
            right.plot([last.ttft_s[at] for at in ranks], [(at + 1) / len(last.ttft_s) for at in ranks], label=policy)
    left.axhline(KNEE, color="grey", linewidth=0.8, linestyle=":")
    left.set(xlabel="load", ylabel="goodput", ylim=(None, 1.01))
    right.set(xlabel="TTFT (s)", ylabel="share of requests with a first token", xscale="log")
    right.set_title(f"load {max(point.load for point in results.points):g}", fontsize="medium")
    left.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: {path}: {error}") from error


def _by_policy(points: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    for policy in dict.fromkeys(point.policy for point in points):
        yield policy, sorted((point for point in points if point.policy == policy), key=lambda point: point.load)
