"""Drawing one id from logits. Pure: numpy in, an id out; chance comes from (seed, index) alone.

The uniform number that decides an id is a hash of the choice's seed and the id's index in the answer. So a request
draws the same wherever and however often it is computed, beside whatever else, and an answer resumed in its middle
goes on as it would have (as far as the engine's logits are the same).

Order of the rules, as in vLLM: bias and penalties, then temperature, min-p, top-k, top-p. The repetition penalty
looks at prompt and answer; frequency and presence look at the answer. Structure (``TokenFilter``) is asked last: an
id is drawn first and checked then, because checking the whole vocabulary costs milliseconds. Drawing again until one
is allowed, or among those allowed, gives the same distribution.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.worker.engine import Sampling, TokenLogprobs

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]

#: JSON has no -inf.
LOGPROB_FLOOR = -9999.0

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
#: Draws before all of the vocabulary is checked.
_TRIES = 6
#: Likeliest ids that are checked before all of the vocabulary is, when greedy.
_GREEDY_CANDIDATES = 128


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int, attempt: int = 0) -> float:
    """A number in [0, 1) that depends on these alone."""
    return (_mix(_mix(seed) + _GOLDEN * (index + 1) + _mix(attempt)) >> 11) / float(1 << 53)


class TokenFilter(Protocol):
    """What an answer may look like, so far."""

    def allows(self, token: int) -> bool:
        """May this id come next?"""

    def allowed(self, tokens: Ids) -> Ids:
        """Those of the ids that may come next, in the same order."""

    def accept(self, token: int) -> None:
        """This id, which is allowed, has come."""


class Sampler:
    """One choice's dice, with what it remembers of its text."""

    def __init__(
        self,
        sampling: Sampling,
        choice: int,
        vocab_size: int,
        prompt_ids: Iterable[int],
        answer_ids: Iterable[int],
        token_filter: TokenFilter | None = None,
    ) -> None:
        """``answer_ids`` are those of an earlier attempt, which count as answer."""
        self._sampling = sampling
        self._seed = sampling.seeds[choice]
        self._filter = token_filter
        self._bias_ids = np.fromiter(sampling.logit_bias.keys(), dtype=np.intp, count=len(sampling.logit_bias))
        self._bias = np.fromiter(sampling.logit_bias.values(), dtype=np.float32, count=len(sampling.logit_bias))
        self._repeats = sampling.repetition_penalty != 1.0
        self._counts: dict[int, int] | None = None
        self._seen: npt.NDArray[np.bool_] | None = None
        if self._repeats:
            self._seen = np.zeros(vocab_size, dtype=np.bool_)
            self._seen[np.fromiter(prompt_ids, dtype=np.intp)] = True
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._counts = {}
        for token in answer_ids:
            self._remember(token)
        #: The likeliest id is the answer, whatever came before: such rows can be drawn together.
        self.plain = (
            sampling.temperature == 0
            and token_filter is None
            and not self._repeats
            and self._counts is None
            and not sampling.logit_bias
        )

    def draw(self, logits: Floats, index: int, forbidden: Iterable[int] = ()) -> int | None:
        """The next id; None when nothing may come next. ``forbidden`` ids are not drawn."""
        work = self._adjust(logits, forbidden)
        token = self._greedy(work) if self._sampling.temperature == 0 else self._random(work, index)
        if token is not None:
            self._remember(token)
            if self._filter is not None:
                self._filter.accept(token)
        return token

    def _remember(self, token: int) -> None:
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] = self._counts.get(token, 0) + 1

    def _adjust(self, logits: Floats, forbidden: Iterable[int]) -> Floats:
        sampling = self._sampling
        banned = list(forbidden)
        if not (banned or self._bias_ids.size or self._repeats or self._counts):
            return logits
        work = logits.copy()
        if self._bias_ids.size:
            work[self._bias_ids] += self._bias
        if self._seen is not None:
            seen = work[self._seen]
            penalty = np.float32(sampling.repetition_penalty)
            work[self._seen] = np.where(seen > 0, seen / penalty, seen * penalty)
        if self._counts:
            ids = np.fromiter(self._counts.keys(), dtype=np.intp, count=len(self._counts))
            counts = np.fromiter(self._counts.values(), dtype=np.float32, count=len(self._counts))
            work[ids] -= counts * np.float32(sampling.frequency_penalty) + np.float32(sampling.presence_penalty)
        if banned:
            work[banned] = -np.inf
        return work

    def _greedy(self, work: Floats) -> int | None:
        best = int(work.argmax())
        if self._filter is None or (self._filter.allows(best) and work[best] > -np.inf):
            return best
        few = top_ids(work, _GREEDY_CANDIDATES)
        for candidates in (few, None):
            if candidates is None:
                candidates = np.argsort(-work, kind="stable")
            allowed = self._filter.allowed(candidates)
            allowed = allowed[work[allowed] > -np.inf]
            if allowed.size:
                return int(allowed[0])
        return None

    def _random(self, work: Floats, index: int) -> int | None:
        ids, weights = self._candidates(work)
        cumulative = np.cumsum(weights, dtype=np.float64)
        for attempt in range(1 if self._filter is None else _TRIES):
            token = self._pick(ids, cumulative, index, attempt)
            if self._filter is None or self._filter.allows(token):
                return token
        assert self._filter is not None
        finite = np.flatnonzero(work > -np.inf)
        allowed = self._filter.allowed(finite)
        if not allowed.size:
            return None
        masked = np.full_like(work, -np.inf)
        masked[allowed] = work[allowed]
        ids, weights = self._candidates(masked)
        return self._pick(ids, np.cumsum(weights, dtype=np.float64), index, _TRIES)

    def _pick(self, ids: Ids | None, cumulative: npt.NDArray[np.float64], index: int, attempt: int) -> int:
        target = uniform(self._seed, index, attempt) * cumulative[-1]
        place = min(int(np.searchsorted(cumulative, target, side="right")), len(cumulative) - 1)
        return place if ids is None else int(ids[place])

    def _candidates(self, work: Floats) -> tuple[Ids | None, Floats]:
        """Ids that may be drawn (None = all) and their weights."""
        sampling = self._sampling
        scaled = work * np.float32(1.0 / sampling.temperature)
        scaled -= scaled.max()
        ids: Ids | None = None
        if sampling.min_p > 0:
            ids = np.flatnonzero(scaled >= np.float32(np.log(sampling.min_p)))
            scaled = scaled[ids]
        if 0 < sampling.top_k < scaled.size:
            kept = top_ids(scaled, sampling.top_k)
            ids = kept if ids is None else ids[kept]
            scaled = scaled[kept]
        if sampling.top_p < 1.0:
            kept = _nucleus(scaled, sampling.top_p)
            ids = kept if ids is None else ids[kept]
            scaled = scaled[kept]
        return ids, np.exp(scaled)


def top_ids(values: Floats, k: int) -> Ids:
    """The places of the k largest, largest first; of equals the first."""
    if k >= values.size:
        return np.argsort(-values, kind="stable")
    block = 256
    whole = values.size // block * block
    if whole // block > 2 * k:
        # The k-th largest of the blocks' maxima is a bound from below: few values reach it.
        bound = np.partition(values[:whole].reshape(-1, block).max(axis=1), -k)[-k]
        places = np.flatnonzero(values >= bound)
    else:
        places = np.argpartition(-values, k)[: k + 1]
        places = np.flatnonzero(values >= values[places].min())
    return places[np.argsort(-values[places], kind="stable")[:k]]


def _nucleus(scaled: Floats, top_p: float) -> Ids:
    """The fewest of the likeliest places whose weights reach that share of all. ``scaled`` has its maximum at 0."""
    weights = np.exp(scaled)
    wanted = float(weights.sum(dtype=np.float64)) * top_p
    for bound in (-4.0, -8.0, -14.0, -np.inf):
        places = np.flatnonzero(scaled >= np.float32(bound))
        if bound == -np.inf or float(weights[places].sum(dtype=np.float64)) >= wanted:
            break
    places = places[np.argsort(-scaled[places], kind="stable")]
    reached = np.cumsum(weights[places], dtype=np.float64)
    return places[: int(np.searchsorted(reached, wanted)) + 1]


def logprobs_of(logits: Floats, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities of the model itself: before bias, penalties and temperature."""
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())

    def finite(value: Any) -> float:
        return max(LOGPROB_FLOOR, float(value)) if value == value else LOGPROB_FLOOR

    best = top_ids(logits, top) if top > 0 else ()
    return TokenLogprobs((token, finite(exact[token])), [(int(i), finite(exact[i])) for i in best])
