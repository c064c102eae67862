"""Drawing ids: the rules against slow, obvious versions of themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.worker.engine import Sampling
from headrace.worker.sampling import LOGPROB_FLOOR, Ids, Sampler, logprobs_of, top_ids, uniform

VOCAB = 600


def logits(seed: int, size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def sampler(token_filter: Only | None = None, prompt: tuple[int, ...] = (), **options: object) -> Sampler:
    sampling = Sampling(**({"seeds": (1,)} | options))  # type: ignore[arg-type]
    return Sampler(sampling, 0, VOCAB, prompt, (), token_filter)


class Only:
    """Allows these ids."""

    def __init__(self, ids: set[int]) -> None:
        self.ids = ids
        self.accepted: list[int] = []

    def allows(self, token: int) -> bool:
        return token in self.ids

    def allowed(self, tokens: Ids) -> Ids:
        return tokens[[int(token) in self.ids for token in tokens]]

    def accept(self, token: int) -> None:
        assert token in self.ids
        self.accepted.append(token)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000), st.integers(0, 9))
def test_uniform_is_a_function_of_its_arguments_alone(seed: int, index: int, attempt: int) -> None:
    value = uniform(seed, index, attempt)
    assert 0 <= value < 1
    assert value == uniform(seed, index, attempt)


def test_uniform_is_uniform() -> None:
    for values in (
        [uniform(7, index) for index in range(20_000)],
        [uniform(seed, 0) for seed in range(20_000)],
        [uniform(7, 3, attempt) for attempt in range(20_000)],
    ):
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert abs(counts - 1000).max() < 150


@given(st.integers(0, 10**6), st.sampled_from([1, 5, 256, 257, 3000, 49152]), st.integers(1, 300), st.booleans())
def test_top_ids(seed: int, size: int, k: int, ties: bool) -> None:
    values = logits(seed, size)
    if ties:
        values = np.round(values)
    assert top_ids(values, k).tolist() == np.argsort(-values, kind="stable")[:k].tolist()


def slow_support(values: np.ndarray, sampling: Sampling) -> set[int]:
    """The ids that may be drawn, by the book."""
    scaled = values.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = [int(i) for i in np.argsort(-weights, kind="stable") if weights[i] >= sampling.min_p]
    if sampling.top_k:
        order = order[: sampling.top_k]
    wanted = sum(weights[i] for i in order) * sampling.top_p
    kept, reached = set(), 0.0
    for i in order:
        kept.add(i)
        reached += weights[i]
        if reached >= wanted and sampling.top_p < 1:
            break
    return kept


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 2.0),
    top_k=st.sampled_from([0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
)
def test_nothing_outside_the_support_is_drawn(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    values = logits(seed)
    dice = sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    support = slow_support(values, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    drawn = {dice.draw(values, index) for index in range(50)}
    # float32 against float64: one id at the edge may fall either way.
    assert len(drawn - support) <= (0 if top_p == 1.0 and min_p == 0 else 1)


def test_frequencies_are_the_probabilities() -> None:
    values = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    for token_filter, expected in ((None, [0.5, 0.3, 0.15, 0.05]), (Only({1, 3}), [0, 0.3 / 0.35, 0, 0.05 / 0.35])):
        dice = Sampler(Sampling(temperature=1.0, seeds=(5,)), 0, 4, (), (), token_filter)
        counts = np.bincount([dice.draw(values, index) or 0 for index in range(8000)], minlength=4) / 8000
        assert abs(counts - np.array(expected)).max() < 0.02


def test_a_seed_and_an_index_are_all_that_decides() -> None:
    values = [logits(index) for index in range(20)]
    first = [sampler(temperature=1.0, seeds=(42,)).draw(row, index) for index, row in enumerate(values)]
    dice = sampler(temperature=1.0, seeds=(42,))
    assert [dice.draw(row, index) for index, row in enumerate(values)] == first
    assert [sampler(temperature=1.0, seeds=(43,)).draw(row, index) for index, row in enumerate(values)] != first


def test_greedy_bias_and_forbidden() -> None:
    values = logits(1)
    best = top_ids(values, 3).tolist()
    assert sampler().draw(values, 0) == best[0]
    assert sampler().draw(values, 0, forbidden=best[:2]) == best[2]
    assert sampler(logit_bias={7: 100.0}).draw(values, 0) == 7
    assert sampler(logit_bias={best[0]: -100.0}).draw(values, 0) == best[1]
    assert values.tolist() == logits(1).tolist(), "the engine's own row is not changed"


def test_penalties() -> None:
    values = np.zeros(VOCAB, dtype=np.float32)
    values[[1, 2, 3]] = [3.0, 2.5, 2.2]
    frequency = sampler(frequency_penalty=0.4)
    assert [frequency.draw(values, index) for index in range(4)] == [1, 1, 2, 1]
    presence = sampler(presence_penalty=0.6)
    assert [presence.draw(values, index) for index in range(3)] == [1, 2, 1]
    # The prompt counts for repetition, and for nothing else.
    assert sampler(prompt=(1,), repetition_penalty=1.3).draw(values, 0) == 2
    assert sampler(prompt=(1,), presence_penalty=2.0).draw(values, 0) == 1


def test_a_resumed_answer_remembers() -> None:
    values = np.zeros(VOCAB, dtype=np.float32)
    values[[1, 2]] = [3.0, 2.5]
    sampling = Sampling(presence_penalty=1.0)
    assert Sampler(sampling, 0, VOCAB, (1,), (1,)).draw(values, 1) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_filter_is_kept_to(temperature: float) -> None:
    values = logits(3)
    worst = np.argsort(values)[:2]
    only = Only({int(token) for token in worst})
    dice = sampler(only, temperature=temperature)
    for index in range(20):
        assert dice.draw(values, index) in only.ids
    assert len(only.accepted) == 20
    if temperature == 0:
        assert set(only.accepted) == {int(worst[1])}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_allowed_is_nothing_drawn(temperature: float) -> None:
    assert sampler(Only(set()), temperature=temperature).draw(logits(1), 0) is None
    assert sampler(Only({5}), temperature=temperature).draw(logits(1), 0, forbidden=[5]) is None


def test_logprobs_are_the_models_and_finite() -> None:
    values = logits(4)
    exact = values.astype(np.float64) - np.log(np.exp(values.astype(np.float64)).sum())
    result = logprobs_of(values, 17, 3)
    assert result.drawn == (17, pytest.approx(exact[17], abs=1e-9))
    assert [token for token, _ in result.top] == np.argsort(-values)[:3].tolist()
    values[5] = -np.inf
    assert logprobs_of(values, 5, 0).drawn == (5, LOGPROB_FLOOR)
    values[5] = np.nan
    assert logprobs_of(values, 5, 0).drawn == (5, LOGPROB_FLOOR)
