"""``headrace plan``: what fleet given traffic and targets need, what binds it, what it costs, and what would help.

How many workers are enough is ``capacity.py``'s arithmetic, and where it is asked for the simulator's word. Here are
the question, the fleets to choose from, the levers, and the answer for machines; showing it is ``terminal.py``'s.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace import sim
from headrace._gateway import Workload
from headrace.capacity import MOST_WORKERS, Load, Serving, Targets, Traffic, fewest
from headrace.errors import ConfigError
from headrace.shapes import (
    KV,
    TENSOR_PARALLEL,
    WEIGHTS,
    Gpu,
    Shape,
    Worker,
    catalogue,
    find_gpu,
    find_shape,
    weights_read_s,
)


@dataclass(frozen=True)
class Fleet:
    """So many workers of one kind, and what they cost."""

    worker: Worker
    traffic: Traffic
    load: Load
    #: How many times the traffic it carries.
    capacity: float
    #: The limits that one worker fewer would pass; none where one is enough.
    binds: tuple[str, ...]

    @property
    def workers(self) -> int:
        """How many."""
        return self.load.workers

    @property
    def usd_per_hour(self) -> float:
        """All of them."""
        return self.workers * self.worker.usd_per_hour

    @property
    def full_usd_per_hour(self) -> float:
        """The share of it that the traffic takes: what is left of a worker counts for nothing."""
        return self.usd_per_hour / self.capacity

    @property
    def output_tokens_per_s(self) -> float:
        """That are asked for."""
        return self.traffic.rate_per_s * self.traffic.output_tokens

    @property
    def worker_tokens_per_s(self) -> float:
        """Output tokens that a worker can give within the limits."""
        return self.output_tokens_per_s * self.capacity / self.workers

    def usd_per_1k(self, tokens_per_s: float) -> float:
        """Dollars for a thousand such tokens."""
        return self.usd_per_hour / (tokens_per_s * 3.6)


def fleet(worker: Worker, traffic: Traffic, targets: Targets) -> Fleet | None:
    """The fewest workers of a kind; None where no number keeps within the targets."""
    if not worker.fits:
        return None
    serving = Serving(worker, traffic, targets)
    load = serving.fewest()
    if load is None:
        return None
    binds = serving.limits(load.workers - 1) if load.workers > 1 else ()
    return Fleet(worker, traffic, load, serving.capacity(load.workers), binds)


def divided(traffic: Traffic, worker_tokens_per_s: float) -> tuple[float, int]:
    """The textbook's division, for a worker whose output is known: exact, and whole workers."""
    exact = traffic.rate_per_s * traffic.output_tokens / worker_tokens_per_s
    return exact, max(1, math.ceil(exact - 1e-9))


@dataclass(frozen=True)
class Split:
    """Prompts computed by some workers, answered by others."""

    prefill: Fleet
    decode: Fleet
    #: KV that goes from the ones to the others.
    kv_bytes_per_s: float

    @property
    def usd_per_hour(self) -> float:
        """Both."""
        return self.prefill.usd_per_hour + self.decode.usd_per_hour

    @property
    def full_usd_per_hour(self) -> float:
        """The share that the traffic takes of both."""
        return self.prefill.full_usd_per_hour + self.decode.full_usd_per_hour


def split(worker: Worker, traffic: Traffic, targets: Targets) -> Split | None:
    """The same traffic with prefill and decode apart; None where no number keeps within the targets."""
    prefill = fleet(worker, traffic.prompts_only(), targets)
    decode = fleet(worker, traffic.answers_only(), targets)
    if prefill is None or decode is None:
        return None
    kv_bytes = worker.shape.kv_bytes_per_token(worker.kv)
    return Split(prefill, decode, traffic.rate_per_s * traffic.prompt_tokens * kv_bytes)


@dataclass(frozen=True)
class WhatIf:
    """What levers are tried with; each is an assumption until it is measured."""

    #: Share of requests whose answer the response cache has.
    repeats: float = 0.2
    #: Share of a prompt that is in KV, where the traffic has none.
    prefix: float = 0.5
    #: Share of requests that the smaller model can take.
    easy: float = 0.3
    #: Tokens guessed for each answer in a step, and the share of guesses that are right.
    draft: int = 3
    accepted: float = 0.6
    #: The smaller model; empty = the largest known one of at most a quarter of the parameters.
    small: str = ""

    def __post_init__(self) -> None:
        for name in ("repeats", "prefix", "easy", "accepted"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"--what-if: {name} must be 0 or above and below 1 (is {value:g})")
        if self.draft not in range(17):
            raise ConfigError(f"--what-if: draft must be a whole number, 0 to 16 (is {self.draft:g})")

    @classmethod
    def parse(cls, text: str, small: str = "") -> WhatIf:
        """From ``repeats=.3,draft=4``. Raises ConfigError."""
        pairs = sim.parse_pairs(text, "--what-if")
        known = [name for name in cls.__dataclass_fields__ if name != "small"]
        for name in pairs:
            if name not in known:
                raise ConfigError(f"--what-if: there is no {name}; there are {', '.join(known)}")
        return cls(**pairs, small=small)


@dataclass(frozen=True)
class Lever:
    """One thing changed, and what it does."""

    name: str
    #: What it costs besides money.
    gives_up: str
    workers: int | None
    usd_per_hour: float
    #: Cost of the traffic against the fleet's, whole workers not counted: .7 = it saves three tenths.
    cost_ratio: float


def levers(base: Fleet, targets: Targets, what_if: WhatIf) -> Iterator[Lever]:
    """What each would change, alone. One that no number of workers could serve has no workers."""
    worker, traffic = base.worker, base.traffic

    def lever(name: str, gives_up: str, *others: Fleet | None) -> Lever:
        fleets = [each for each in others if each is not None]
        if len(fleets) < len(others):
            return Lever(name, gives_up, None, math.inf, math.inf)
        full = math.fsum(each.full_usd_per_hour for each in fleets)
        hourly = math.fsum(each.usd_per_hour for each in fleets)
        return Lever(name, gives_up, sum(each.workers for each in fleets), hourly, full / base.full_usd_per_hour)

    def changed(**changes: Any) -> Fleet | None:
        return fleet(replace(worker, **changes), traffic, targets)

    if traffic.prompt_tokens > traffic.own_tokens:
        without = fleet(worker, traffic.without_prefixes(), targets)
        yield lever("no prefix cache", "what the one in use saves", without)
    elif what_if.prefix:
        cached = fleet(worker, traffic.with_prefixes(what_if.prefix), targets)
        yield lever(f"prefix cache, {what_if.prefix:.0%} of prompts", "nothing", cached)
    if what_if.repeats:
        fewer = fleet(worker, traffic.times(1 - what_if.repeats), targets)
        yield lever(f"response cache, {what_if.repeats:.0%} repeated", "answers may be as old as they are kept", fewer)
    for weights in WEIGHTS:
        if WEIGHTS[weights] < WEIGHTS[worker.weights]:
            yield lever(f"{weights} weights", "some accuracy: measure it", changed(weights=weights))
    for kv in KV:
        if KV[kv] < KV[worker.kv]:
            yield lever(f"{kv} KV", "some accuracy in long contexts", changed(kv=kv))
    if what_if.draft:
        guessed = changed(draft_tokens=what_if.draft, accepted=what_if.accepted)
        name = f"speculation, {what_if.draft} tokens at {what_if.accepted:.0%}"
        yield lever(name, "nothing in quality; arithmetic on wrong guesses", guessed)
    small = _smaller(base, what_if)
    if small is not None and what_if.easy:
        easy = fleet(small, traffic.times(what_if.easy), targets)
        hard = fleet(worker, traffic.times(1 - what_if.easy), targets)
        name = f"{what_if.easy:.0%} to {small.shape.name}"
        yield lever(name, "quality where difficulty is misjudged", hard, easy)
    apart = split(worker, traffic, targets)
    both = (apart.prefill, apart.decode) if apart is not None else (None,)
    yield lever("prefill and decode apart", "a network that carries the KV", *both)
    # Whoever keeps to the shorter ones keeps to these too.
    longer = fleet(worker, traffic, Targets(targets.ttft_s * 2, targets.tpot_s * 2))
    eased = min((each for each in (base, longer) if each is not None), key=lambda each: each.full_usd_per_hour)
    yield lever("targets twice as long", "latency", eased)
    # The tokens that idle time would give are paid for already.
    filled = base.full_usd_per_hour / base.usd_per_hour
    yield Lever("batch work in idle time", "needs work that can wait", base.workers, base.usd_per_hour, filled)


def _smaller(base: Fleet, what_if: WhatIf) -> Worker | None:
    """A worker with a smaller model on as few of the same GPUs as hold it."""
    if what_if.small:
        shape = find_shape(what_if.small)
    else:
        known = [Shape.of(*each) for each in catalogue()["models"].items()]
        known = [shape for shape in known if shape.parameters <= base.worker.shape.parameters / 4]
        if not known:
            return None
        shape = max(known, key=lambda each: each.parameters)
    return next(workers(shape, base.worker.gpu, base.worker), None)


def workers(shape: Shape, gpu: Gpu, like: Worker, tensor_parallel: int = 0) -> Iterator[Worker]:
    """Workers of that model and GPU, on each number of GPUs that holds it, or on so many."""
    for gpus in (tensor_parallel,) if tensor_parallel else TENSOR_PARALLEL:
        worker = replace(like, shape=shape, gpu=gpu, tensor_parallel=gpus)
        if shape.heads % gpus == 0 and worker.fits:
            yield worker


@dataclass(frozen=True)
class Simulated:
    """What the simulator says of so many workers."""

    workers: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    holds: bool


def simulate(
    worker: Worker,
    workload: Workload,
    targets: Targets,
    workers: int,
    *,
    load: float = 1.0,
    chunk: str = "dynamic",
    seed: int = 1,
) -> Simulated:
    """Run the workload on so many workers: nothing is given up, so that the targets count for all requests."""
    settings = {
        "groups": [{"workers": workers, "table": worker.table, "max_batch": worker.max_batch}],
        "shed": False,
        "chunk": chunk,
        "speed": load,
        "ttft_target_s": targets.ttft_s,
        "ttft_times_alone": 0.0,
        "tpot_target_s": targets.tpot_s,
        "seed": seed,
    }
    summary = json.loads(sim.run_one(workload, settings).summary_json())
    ttft, tpot = summary["ttft_s"], summary["tpot_s"]
    # What no worker could hold is refused even so.
    holds = summary["rejected"] == 0 and ttft["p99"] <= targets.ttft_s and tpot["p99"] <= targets.tpot_s
    return Simulated(workers, ttft["p50"], ttft["p99"], tpot["mean"], tpot["p99"], holds)


def cheapest(fleets: Sequence[Fleet], try_out: Callable[[Fleet, int], Simulated]) -> tuple[Fleet, Simulated] | None:
    """The kind and number of workers that cost least of those that hold when tried out.

    Begins where the arithmetic says; kinds that can't be cheaper than what was found are tried once.
    """
    best: tuple[Fleet, Simulated] | None = None
    for each in sorted(fleets, key=lambda fleet: fleet.usd_per_hour):
        most = MOST_WORKERS
        if best is not None:
            found = best[1].workers * best[0].worker.usd_per_hour
            most = min(most, math.ceil(found / each.worker.usd_per_hour - 1e-9) - 1)
            if most < 1 or not try_out(each, most).holds:
                continue
        tried: dict[int, Simulated] = {}

        def holds(count: int, each: Fleet = each, tried: dict[int, Simulated] = tried) -> bool:
            tried[count] = try_out(each, count)
            return tried[count].holds

        count = fewest(holds, each.workers, most)
        if count is not None:
            best = (each, tried[count])
    return best


@dataclass(frozen=True)
class Plan:
    """All that ``headrace plan`` says."""

    traffic: Traffic
    targets: Targets
    #: Kinds of workers that can serve the traffic, cheapest fleet first.
    fleets: tuple[Fleet, ...]
    #: Kinds that can't, and why.
    refused: tuple[tuple[Worker, str], ...]
    split: Split | None
    levers: tuple[Lever, ...]
    #: Kind and number that were cheapest of those that held in the simulator.
    simulated: tuple[Fleet, Simulated] | None = None
    #: Output tokens a second that a worker is known to give, in place of the model's.
    worker_tokens_per_s: float | None = None

    @property
    def best(self) -> Fleet:
        """The cheapest by arithmetic, or where it was asked, by the simulator."""
        return self.simulated[0] if self.simulated is not None else self.fleets[0]

    @property
    def workers(self) -> int:
        """How many the plan says: what is known goes before what was tried out, and that before arithmetic."""
        if self.worker_tokens_per_s is not None:
            return divided(self.traffic, self.worker_tokens_per_s)[1]
        return self.simulated[1].workers if self.simulated is not None else self.best.workers

    @property
    def binds(self) -> tuple[str, ...]:
        """The limits that one worker fewer would pass, by arithmetic."""
        return ("given",) if self.worker_tokens_per_s is not None else self.best.binds

    @property
    def usd_per_hour(self) -> float:
        """Of that many."""
        return self.workers * self.best.worker.usd_per_hour

    def usd_per_1k(self, tokens_per_s: float) -> float:
        """Dollars for a thousand such tokens."""
        return self.usd_per_hour / (tokens_per_s * 3.6)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what is not known or without bound is null."""
        worker, traffic = self.best.worker, self.traffic
        output, prompt = self.best.output_tokens_per_s, traffic.rate_per_s * traffic.prompt_tokens
        exact = divided(traffic, self.worker_tokens_per_s or self.best.worker_tokens_per_s)[0]
        return {
            "model": worker.shape.name,
            "gpu": worker.gpu.name,
            "tensor_parallel": worker.tensor_parallel,
            "memory": memory(worker, traffic),
            "times": times(worker),
            "traffic": {
                "requests_per_s": traffic.rate_per_s,
                "peak_requests_per_s": max(rate for rate, _ in traffic.rates),
                "prompt_tokens": traffic.prompt_tokens,
                "cached_prompt_tokens": traffic.prompt_tokens - traffic.own_tokens,
                "output_tokens": traffic.output_tokens,
                "prompt_tokens_per_s": prompt,
                "output_tokens_per_s": output,
            },
            "targets": {"ttft_p99_s": self.targets.ttft_s, "tpot_p99_s": self.targets.tpot_s},
            "workers": self.workers,
            "workers_exact": exact,
            "worker_output_tokens_per_s": self.worker_tokens_per_s or self.best.worker_tokens_per_s,
            "gpus": self.workers * worker.tensor_parallel,
            "binds": list(self.binds),
            "usd_per_hour": self.usd_per_hour,
            "usd_per_1k_output_tokens": self.usd_per_1k(output),
            "usd_per_1k_tokens": self.usd_per_1k(output + prompt),
            "predicted": _load_dict(self.best.load),
            "simulated": None if self.simulated is None else asdict(self.simulated[1]),
            "split": None
            if self.split is None
            else {
                "prefill_workers": self.split.prefill.workers,
                "decode_workers": self.split.decode.workers,
                "usd_per_hour": self.split.usd_per_hour,
                "kv_bytes_per_s": self.split.kv_bytes_per_s,
            },
            "candidates": [
                {
                    "gpu": fleet.worker.gpu.name,
                    "tensor_parallel": fleet.worker.tensor_parallel,
                    "workers": fleet.workers,
                    "usd_per_hour": fleet.usd_per_hour,
                    "usd_per_1k_output_tokens": fleet.usd_per_1k(output),
                    "capacity": fleet.capacity,
                    "binds": list(fleet.binds),
                    "times": fleet.worker.table["source"],
                }
                for fleet in self.fleets
            ],
            "refused": [
                {"gpu": kind.gpu.name, "tensor_parallel": kind.tensor_parallel, "reason": reason}
                for kind, reason in self.refused
            ],
            "levers": [{name: _finite(value) for name, value in asdict(lever).items()} for lever in self.levers],
        }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _load_dict(load: Load) -> dict[str, Any]:
    return {name: _finite(value) for name, value in asdict(load).items() if name not in ("workers", "limits")}


def memory(worker: Worker, traffic: Traffic) -> dict[str, float]:
    """A worker's memory, and how many requests of mean length it holds at their longest."""
    kv_bytes = worker.shape.kv_bytes_per_token(worker.kv)
    kv_tokens = worker.table["kv_tokens"]
    return {
        "gpus_bytes": worker.gpu.memory_gb * 1e9 * worker.tensor_parallel,
        "weights_bytes": worker.shape.weight_bytes(worker.weights),
        "kv_bytes": kv_tokens * kv_bytes * worker.shape.kv_copies(worker.tensor_parallel),
        "kv_bytes_per_token": kv_bytes,
        "kv_tokens": kv_tokens,
        "concurrency": int(kv_tokens / (traffic.prompt_tokens + traffic.output_tokens)),
    }


def times(worker: Worker) -> dict[str, Any]:
    """What a step takes there, and the least that it could."""
    bandwidth = worker.gpu.bandwidth * worker.tensor_parallel
    return {
        "source": worker.table["source"],
        "weights_read_s": weights_read_s(worker.shape, worker.weights, bandwidth),
        "token_at_batch_1_s": worker.costs.step_s(1, 0),
        "token_at_batch_64_s": worker.costs.step_s(64, 0),
        "prompt_of_2048_s": worker.costs.step_s(0, 0, [(2048, 0)]),
    }


def make(
    kinds: Sequence[Worker],
    traffic: Traffic,
    targets: Targets,
    what_if: WhatIf,
    *,
    worker_tokens_per_s: float | None = None,
    try_out: Callable[[Fleet, int], Simulated] | None = None,
) -> Plan:
    """Plan for the traffic with workers of one of these kinds, and try the plan out if asked. Raises ConfigError."""
    fleets: list[Fleet] = []
    refused: list[tuple[Worker, str]] = []
    for worker in kinds:
        found = fleet(worker, traffic, targets)
        if found is not None:
            fleets.append(found)
        else:
            refused.append((worker, _why(Serving(worker, traffic, targets).load(MOST_WORKERS), targets)))
    if not fleets:
        reasons = (f"{worker.tensor_parallel} x {worker.gpu.name}: {reason}" for worker, reason in refused)
        raise ConfigError(f"no fleet keeps within the targets: {'; '.join(reasons) or 'no GPU holds the model'}")
    fleets.sort(key=lambda each: each.usd_per_hour)
    simulated = None
    if try_out is not None:
        simulated = cheapest(fleets, try_out)
        if simulated is None:
            raise ConfigError("no fleet keeps within the targets when simulated")
    best = simulated[0] if simulated is not None else fleets[0]
    return Plan(
        traffic,
        targets,
        tuple(fleets),
        tuple(refused),
        split(best.worker, traffic, targets),
        tuple(levers(best, targets, what_if)),
        simulated,
        worker_tokens_per_s,
    )


def _why(load: Load, targets: Targets) -> str:
    """Why even so many workers don't do."""
    return {
        "ttft": f"a prompt alone takes up to {load.ttft_p99_s:.3g} s (target {targets.ttft_s:g} s)",
        "tpot": f"a token alone takes {load.tpot_p99_s * 1000:.3g} ms (target {targets.tpot_s * 1000:g} ms)",
        "kv": "its KV does not hold one request",
        "batch": f"{MOST_WORKERS} workers are not enough",
        "compute": f"{MOST_WORKERS} workers are not enough",
    }[load.limits[0]]


@dataclass(frozen=True)
class Question:
    """What the command was asked."""

    model: str = "llama-3.1-8b"
    gpus: tuple[str, ...] = ("h100-80gb",)
    #: 0 = whatever is cheapest.
    tensor_parallel: int = 0
    weights: str = "fp16"
    kv: str = "fp16"
    rate_per_s: float = 10.0
    prompt_tokens: int = 1000
    output_tokens: int = 200
    prefix_share: float = 0.0
    sigma: float = 0.8
    #: In place of the traffic above.
    trace: Path | None = None
    trace_format: str = "auto"
    load: float = 1.0
    ttft_target_s: float = 2.0
    tpot_target_s: float = 0.1
    max_batch: int = 256
    usd_per_gpu_hour: float | None = None
    worker_tokens_per_s: float | None = None
    what_if: str = ""
    small_model: str = ""


#: Requests of a simulation: ten minutes of traffic, within these.
_SIMULATED = (5_000, 100_000)


def answer(question: Question, tried: Callable[[int, int], object] | None = None) -> Plan:
    """The plan; with ``tried``, which hears of each simulation, one that held in the simulator. Raises ConfigError."""
    for option, value, known in (("--weights", question.weights, WEIGHTS), ("--kv", question.kv, KV)):
        if value not in known:
            raise ConfigError(f"{option} must be one of {', '.join(known)} (is {value})")
    shape = find_shape(question.model)
    gpus = [find_gpu(name) for name in question.gpus]
    if question.usd_per_gpu_hour is not None:
        gpus = [replace(gpu, usd_per_hour=question.usd_per_gpu_hour) for gpu in gpus]
    what_if = WhatIf.parse(question.what_if, question.small_model)
    if question.small_model:
        find_shape(question.small_model)
    like = Worker(shape, gpus[0], weights=question.weights, kv=question.kv, max_batch=question.max_batch)
    kinds = [kind for gpu in gpus for kind in workers(shape, gpu, like, question.tensor_parallel)]
    if not kinds:
        gigabytes = shape.weight_bytes(question.weights) / 1e9
        on = f"{question.tensor_parallel or max(TENSOR_PARALLEL)} x {' or '.join(question.gpus)}"
        raise ConfigError(f"--model: {shape.name} takes {gigabytes:.0f} GB in {question.weights}, too much for {on}")
    speed = question.load if question.trace is not None else 1.0
    if question.trace is not None:
        workload = sim.read_trace(question.trace, question.trace_format)
        traffic = Traffic.of(workload, speed)
    else:
        workload = made_up_workload(question)
        traffic = _made_up(question)
    targets = Targets(question.ttft_target_s, question.tpot_target_s)
    counter = itertools.count(1)

    def try_out(fleet: Fleet, workers: int) -> Simulated:
        result = simulate(fleet.worker, workload, targets, workers, load=speed)
        if tried is not None:
            tried(next(counter), workers)
        return result

    return make(
        kinds,
        traffic,
        targets,
        what_if,
        worker_tokens_per_s=question.worker_tokens_per_s,
        try_out=try_out if tried is not None else None,
    )


def _made_up(question: Question) -> Traffic:
    return Traffic.made_up(
        question.rate_per_s, question.prompt_tokens, question.output_tokens, question.prefix_share, question.sigma
    )


def made_up_workload(question: Question) -> Workload:
    """The same traffic for the simulator."""
    least, most = _SIMULATED
    shared = round(question.prompt_tokens * question.prefix_share)
    settings = {
        "requests": round(min(most, max(least, question.rate_per_s * 600))),
        "rate_per_s": question.rate_per_s,
        "prompt_tokens": question.prompt_tokens,
        "output_tokens": question.output_tokens,
        "sigma": question.sigma,
        "roots": 1,
        "shared_tokens": shared,
        "block_tokens": 16,
    }
    return sim.make_workload(settings, 1)
