"""What so many workers give under given traffic, and how many are enough: the arithmetic of ``headrace plan``.

A steady state over a worker's cost table (``shapes.py``): answers under way by Little's law, prompts in a queue before
workers that compute them between tokens (Erlang C). No clock and no chance: the simulator has those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

from headrace import sim
from headrace._gateway import Workload
from headrace.errors import ConfigError
from headrace.shapes import EMPTY_TABLE, Worker

#: How engines size a step (``core/src/sim/engine.rs``): the share of the target that it fills, and a chunk's bounds.
STEP_SHARE = 0.9
CHUNK_FLOOR = 128
CHUNK_MOST = 8192

#: Targets are for all but this share of requests.
MISSES = 0.01
#: Answers under way vary as a Poisson number does; room is kept for all but one moment in a hundred, in deviations.
_Z99 = NormalDist().inv_cdf(0.99)

#: What placement leaves uneven between workers, in the same deviations (fitted to the simulator).
UNEVEN = 1.0

#: A request that is placed when it comes waits so many times as long as in one queue for all (fitted to the simulator).
PLACED = 2.0

MOST_WORKERS = 4096
#: Different lengths of prompts that are looked at.
_QUANTILES = 64
#: A trace's rate is taken by windows of so long.
_WINDOW_S = 15.0


@dataclass(frozen=True)
class Traffic:
    """What is asked for."""

    #: (requests a second, share of requests that come at that rate).
    rates: tuple[tuple[float, float], ...]
    #: (prompt tokens to compute, prompt tokens before them that are in KV), all equally likely.
    prompts: tuple[tuple[int, int], ...]
    output_tokens: float
    #: Context of an answer under way, as decoding sees it in the mean: longer answers are seen for longer.
    context_tokens: float
    #: The same without what is shared in KV.
    held_tokens: float

    @classmethod
    def made_up(
        cls,
        rate_per_s: float,
        prompt_tokens: float,
        output_tokens: float,
        prefix_share: float = 0.0,
        sigma: float = 0.8,
    ) -> Traffic:
        """Poisson arrivals and log-normal lengths behind a part that is in KV, as the simulator makes them up."""
        cached = round(prompt_tokens * prefix_share)
        own = max(1.0, prompt_tokens - cached)
        normal = NormalDist(0.0, sigma) if sigma > 0 else None
        ranks = [(at + 0.5) / _QUANTILES for at in range(_QUANTILES)]
        lengths = [math.exp(normal.inv_cdf(rank)) if normal is not None else 1.0 for rank in ranks]
        scale = own * len(lengths) / math.fsum(lengths)
        prompts = tuple((max(1, round(length * scale)), cached) for length in lengths)
        answered = output_tokens * math.exp(sigma * sigma) / 2
        return cls(((rate_per_s, 1.0),), prompts, output_tokens, prompt_tokens + answered, own + answered)

    @classmethod
    def of(cls, workload: Workload, load: float = 1.0) -> Traffic:
        """A trace's, so many times as fast. A worker without limits shows what it asks for."""
        if len(workload) == 0:
            raise ConfigError("the workload has no requests")
        table = {**EMPTY_TABLE, "step_ms": [(1, 1e-6), (2, 1e-6)], "kv_tokens": 10**12}
        group = {"workers": 1, "table": table, "max_batch": 1_000_000, "kv_blocks": 1_000_000_000}
        outcome = sim.run_one(workload, {"groups": [group], "shed": False, "speed": load})
        columns = (outcome.column(name) for name in ("arrival_s", "prompt_tokens", "cached_tokens", "output_tokens"))
        rows = list(zip(*columns, strict=True))
        windows: dict[int, int] = {}
        for arrival_s, *_ in rows:
            windows[int(arrival_s / _WINDOW_S)] = windows.get(int(arrival_s / _WINDOW_S), 0) + 1
        last_s = max(row[0] for row in rows)
        length_s = {at: min(_WINDOW_S, max(1.0, last_s - at * _WINDOW_S)) for at in windows}
        rates = tuple((count / length_s[at], count / len(rows)) for at, count in sorted(windows.items()))
        own = sorted((int(prompt - cached) or 1, int(cached)) for _, prompt, cached, _ in rows)
        # Means of equal slices, the last of which has the longest.
        slices = [own[at * len(own) // _QUANTILES : (at + 1) * len(own) // _QUANTILES] for at in range(_QUANTILES)]
        prompts = tuple(
            (round(math.fsum(a for a, _ in each) / len(each)), round(math.fsum(b for _, b in each) / len(each)))
            for each in slices
            if each
        )
        outputs = math.fsum(row[3] for row in rows)
        context = math.fsum(output * (prompt + output / 2) for _, prompt, _, output in rows) / outputs
        shared = math.fsum(output * cached for _, _, cached, output in rows) / outputs
        return cls(rates, prompts, outputs / len(rows), context, context - shared)

    @property
    def rate_per_s(self) -> float:
        """In the mean over time."""
        return 1.0 / math.fsum(share / rate for rate, share in self.rates)

    @cached_property
    def own_tokens(self) -> float:
        """Of a prompt, in the mean, that have to be computed."""
        return math.fsum(own for own, _ in self.prompts) / len(self.prompts)

    @cached_property
    def prompt_tokens(self) -> float:
        """Of a prompt, in the mean."""
        return self.own_tokens + math.fsum(cached for _, cached in self.prompts) / len(self.prompts)

    def times(self, factor: float) -> Traffic:
        """So many times as many requests."""
        return replace(self, rates=tuple((rate * factor, share) for rate, share in self.rates))

    def without_prefixes(self) -> Traffic:
        """Nothing of a prompt is in KV."""
        return replace(
            self, prompts=tuple((own + cached, 0) for own, cached in self.prompts), held_tokens=self.context_tokens
        )

    def with_prefixes(self, share: float) -> Traffic:
        """That share of every prompt is in KV."""
        parts = [(own + cached, round((own + cached) * share)) for own, cached in self.prompts]
        shared = self.prompt_tokens * share
        return replace(
            self,
            prompts=tuple((max(1, whole - cached), cached) for whole, cached in parts),
            held_tokens=max(1.0, self.context_tokens - shared),
        )

    def prompts_only(self) -> Traffic:
        """As workers see it that compute prompts for others to answer."""
        return replace(self, output_tokens=0.0)

    def answers_only(self) -> Traffic:
        """As workers see it that get prompts computed; what they hold is all their own."""
        return replace(self, prompts=((0, 0),), held_tokens=self.context_tokens)


@dataclass(frozen=True)
class Targets:
    """For all but one request in a hundred."""

    ttft_s: float = 2.0
    #: Between tokens.
    tpot_s: float = 0.1


@dataclass(frozen=True)
class Load:
    """What so many workers would have to do, and how well."""

    workers: int
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    #: Answers under way at a worker, at the busiest.
    batch: int
    #: Share of its KV that those hold.
    kv_share: float
    #: Share of its time that prompts take.
    prefill_share: float
    #: Which limits are passed, the worst first: ``compute``, ``kv``, ``batch``, ``ttft``, ``tpot``.
    limits: tuple[str, ...]


@dataclass(frozen=True)
class _Pace:
    """A worker's steps while it has so many answers under way."""

    step_s: float
    chunk_tokens: int
    chunk_step_s: float


@dataclass(frozen=True)
class _Steady:
    """The steady state at one rate."""

    batch: int = 0
    utilisation: float = 0.0
    prefill_share: float = 0.0
    tpot_s: float = 0.0
    #: At the busiest.
    tpot_p99_s: float = math.inf
    #: What can't be kept up, if anything.
    limit: str = ""


class Serving:
    """Traffic served by workers of one kind within targets."""

    def __init__(self, worker: Worker, traffic: Traffic, targets: Targets) -> None:
        self.worker = worker
        self.traffic = traffic
        self.targets = targets
        self._paces: dict[int, _Pace] = {}
        self._alone: dict[int, Sequence[float]] = {}
        own = [own for own, _ in traffic.prompts]
        mean = traffic.own_tokens
        self._variation = math.fsum((each - mean) ** 2 for each in own) / len(own) / mean**2 if mean else 0.0
        self._cached = round(traffic.prompt_tokens - mean)

    def load(self, workers: int) -> Load:
        """What so many workers would give."""
        states = self._states(workers)
        late = self._late(states, workers)
        busiest, _ = max(states, key=lambda each: each[0].batch)
        return Load(
            workers=workers,
            ttft_p50_s=_quantile(late, 0.5),
            ttft_p99_s=_quantile(late, MISSES),
            tpot_mean_s=math.fsum(state.tpot_s * share for state, share in states),
            tpot_p99_s=_weighted([(state.tpot_p99_s, share) for state, share in states], MISSES),
            batch=busiest.batch,
            kv_share=self._room(busiest.batch, workers) / self.worker.table["kv_tokens"],
            prefill_share=max(state.prefill_share for state, _ in states),
            limits=self._limits(states, late),
        )

    def limits(self, workers: int, factor: float = 1.0) -> tuple[str, ...]:
        """Which limits so many workers would pass under so many times the traffic, the worst first."""
        states = self._states(workers, factor)
        return self._limits(states, self._late(states, workers))

    def _states(self, workers: int, factor: float = 1.0) -> list[tuple[_Steady, float]]:
        return [(self._steady(rate * factor / workers, workers), share) for rate, share in self.traffic.rates]

    def _limits(self, states: Sequence[tuple[_Steady, float]], late: Callable[[float], float]) -> tuple[str, ...]:
        """What more requests than may miss a target owe it to; all there is, if they do so only together."""
        missed = dict.fromkeys(("compute", "kv", "batch", "ttft", "tpot"), 0.0)
        for state, share in states:
            if state.limit:
                missed[state.limit] += share
            elif state.tpot_p99_s > self.targets.tpot_s:
                missed["tpot"] += share
        missed["ttft"] = late(self.targets.ttft_s) - missed["compute"] - missed["kv"] - missed["batch"]
        ranked = sorted(missed, key=lambda limit: -missed[limit])
        alone = tuple(limit for limit in ranked if missed[limit] > MISSES)
        if alone or late(self.targets.ttft_s) <= MISSES:
            return alone
        return tuple(limit for limit in ranked if missed[limit] > 0 and limit != "tpot")

    def fewest(self) -> Load | None:
        """The fewest workers that keep within all limits; None if no number does."""
        count = fewest(lambda workers: not self.limits(workers), self._guess())
        return self.load(count) if count is not None else None

    def capacity(self, workers: int) -> float:
        """How many times the traffic so many workers could carry within all limits."""

        def carries(factor: float) -> bool:
            return not self.limits(workers, factor)

        low, high = 0.0, 1.0
        while carries(high) and high < 1e6:
            low, high = high, high * 2
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if carries(middle) else (low, middle)
        return low

    def _guess(self) -> int:
        pace = self._pace(min(self.worker.max_batch, 64))
        per_token_s = pace.step_s / (64 * self.worker.advance)
        busy = self.traffic.rate_per_s * self.traffic.output_tokens * per_token_s
        if self.traffic.own_tokens:
            busy += self.traffic.rate_per_s * self.traffic.own_tokens * pace.chunk_step_s / pace.chunk_tokens
        return min(MOST_WORKERS, max(1, round(busy)))

    def _step(self, batch: int, chunks: Sequence[tuple[int, int]] = ()) -> float:
        decodes = batch * (1 + self.worker.draft_tokens)
        return self.worker.costs.step_s(decodes, round(batch * self.traffic.context_tokens), chunks)

    def _pieces(self, tokens: int) -> list[tuple[int, int]]:
        """A chunk of so many tokens, of prompts as long as the one that a token is usually in."""
        own = max(1, round(self.traffic.own_tokens * (1 + self._variation)))
        if tokens <= own:
            return [(tokens, self._cached + (own - tokens) // 2)]
        whole, rest = divmod(tokens, own)
        return [(own, self._cached)] * whole + [(rest, self._cached)] * (rest > 0)

    def _pace(self, batch: int) -> _Pace:
        pace = self._paces.get(batch)
        if pace is None:
            pace = self._paces[batch] = self._make_pace(batch)
        return pace

    def _make_pace(self, batch: int) -> _Pace:
        step_s = self._step(batch)
        if not self.traffic.own_tokens:
            return _Pace(step_s, 0, step_s)
        # Without answers there is nobody whose pace a chunk could spoil.
        limit_s = STEP_SHARE * self.targets.tpot_s if self.traffic.output_tokens else math.inf
        low, high = CHUNK_FLOOR, CHUNK_MOST
        while low < high:
            middle = high - (high - low) // 2
            if self._step(batch, self._pieces(middle)) <= limit_s:
                low = middle
            else:
                high = middle - 1
        # A smaller one may be computed at a better rate.
        sizes = [rows - batch for rows, _ in self.worker.table["step_ms"] if CHUNK_FLOOR <= rows - batch < low]
        best = max([*sizes, low], key=lambda tokens: tokens / self._step(batch, self._pieces(tokens)))
        return _Pace(step_s, best, self._step(batch, self._pieces(best)))

    def _steady(self, rate_per_s: float, workers: int) -> _Steady:
        """The least number of answers under way that keeps itself up at that rate for a worker."""
        # From below, each number leads to what it needs: it rises to the least that is enough.
        batch = 1 if self.traffic.output_tokens else 0
        while True:
            state = self._turn(batch, rate_per_s)
            needed = math.ceil(rate_per_s * self.traffic.output_tokens * state.tpot_s - 1e-9)
            if state.limit:
                return state
            if needed <= batch:
                # At the busiest, too, prompts must be computed as fast as they come.
                busiest = self._turn(round(_busiest(batch)), rate_per_s)
                return replace(state, tpot_p99_s=busiest.tpot_s, limit=busiest.limit)
            if _busiest(needed, workers) > self.worker.max_batch:
                return replace(state, limit="batch")
            if self._room(needed, workers) > self.worker.table["kv_tokens"]:
                return replace(state, limit="kv")
            batch = needed

    def _turn(self, batch: int, rate_per_s: float) -> _Steady:
        """A worker's time between prompts and answers, with so many of these under way."""
        own, advance, pace = self.traffic.own_tokens, self.worker.advance, self._pace(batch)
        if not own:
            return _Steady(batch, 0.0, 0.0, pace.step_s / advance)
        utilisation = rate_per_s * own * pace.chunk_step_s / pace.chunk_tokens
        if utilisation >= 1:
            return _Steady(batch, utilisation, 1.0, pace.chunk_step_s / advance, limit="compute")
        # Prompts that wait together are computed together.
        tokens = min(pace.chunk_tokens, max(1, round(own / (1 - utilisation))))
        prefill_s = self._step(batch, self._pieces(tokens))
        share = min(1.0, rate_per_s * own * prefill_s / tokens)
        token_s = 1 / (share / prefill_s + (1 - share) / pace.step_s) if batch else 0.0
        return _Steady(batch, utilisation, share, token_s / advance)

    def _room(self, batch: int, workers: int) -> float:
        """KV tokens at the busiest."""
        return _busiest(batch, workers) * self.traffic.held_tokens

    def _late(self, states: Sequence[tuple[_Steady, float]], workers: int) -> Callable[[float], float]:
        """The share of requests whose first token takes longer than so long."""
        unserved = math.fsum(share for state, share in states if state.limit)
        if not self.traffic.own_tokens:
            return lambda _: unserved
        queues: list[tuple[float, float, float, float, Sequence[float]]] = []
        for state, share in states:
            if state.limit:
                continue
            pace = self._pace(state.batch)
            served_s = self.traffic.own_tokens * pace.chunk_step_s / pace.chunk_tokens
            waits = _erlang_c(workers, workers * state.utilisation)
            decay = 2 * workers * (1 - state.utilisation) / (served_s * (1 + self._variation)) / PLACED
            # It comes in the middle of a step.
            current_s = pace.step_s if state.batch else 0.0
            begun_s = (state.prefill_share * pace.chunk_step_s + (1 - state.prefill_share) * current_s) / 2
            queues.append((share, waits, decay, begun_s, self._alone_s(state.batch)))

        def late(after_s: float) -> float:
            total = unserved
            for share, waits, decay, begun_s, alone_s in queues:
                spare_s = after_s - begun_s
                each = math.fsum(waits * math.exp(-decay * (spare_s - s)) if s <= spare_s else 1.0 for s in alone_s)
                total += share * each / len(alone_s)
            return total

        return late

    def _alone_s(self, batch: int) -> Sequence[float]:
        """What each prompt's own steps take, beside so many answers."""
        found = self._alone.get(batch)
        if found is None:
            pace = self._pace(batch)
            found = self._alone[batch] = [self._prompt_s(batch, pace, *prompt) for prompt in self.traffic.prompts]
        return found

    def _prompt_s(self, batch: int, pace: _Pace, own: int, cached: int) -> float:
        chunk = pace.chunk_tokens
        full, rest = divmod(own, chunk)
        # Attention grows along the prompt: a chunk in the middle stands for all.
        middle = self._step(batch, [(chunk, cached + (full - 1) * chunk // 2)]) if full else 0.0
        last = self._step(batch, [(rest, cached + full * chunk)]) if rest else 0.0
        return full * middle + last


def _busiest(batch: int, workers: int = 1) -> float:
    """Answers under way at the busiest moment, where placement evens out so many workers."""
    alone = _Z99 * math.sqrt(batch)
    return batch + min(alone, alone / math.sqrt(workers) + UNEVEN * math.sqrt(batch))


def _quantile(late: Callable[[float], float], share: float) -> float:
    """After how long only that share is late; infinite if always more are."""
    if late(1e6) > share:
        return math.inf
    low, high = 0.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if late(middle) <= share else (middle, high)
    return high


def _weighted(values: Sequence[tuple[float, float]], share: float) -> float:
    """The value above which there is at most that share."""
    above = 0.0
    for value, weight in sorted(values, reverse=True):
        above += weight
        if above > share:
            return value
    return 0.0


def _erlang_c(servers: int, offered: float) -> float:
    """How likely one who comes has to wait."""
    if offered <= 0:
        return 0.0
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for server in range(1, servers + 1):
        blocked = offered * blocked / (server + offered * blocked)
    busy = offered / servers
    return blocked / (1 - busy + busy * blocked)


def fewest(holds: Callable[[int], bool], guess: int, most: int = MOST_WORKERS) -> int | None:
    """The least number from 1 to ``most`` that holds, where more never hold less; None if none does."""
    low, high, step = 0, min(most, max(1, guess)), 1
    while not holds(high):
        if high == most:
            return None
        low, high, step = high, min(most, high + step), step * 2
    step = 1
    while high - low > 1:
        # Near the guess first: it is mostly right.
        middle = max((low + high) // 2, high - step)
        step *= 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
