"""What is guessed ahead, and when."""

from __future__ import annotations

import random

from headrace.worker.drafts import Drafted, Lookup, Speculation


def test_what_followed_the_last_ids_is_guessed() -> None:
    lookup = Lookup()
    ids = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert lookup.draft(ids, 2) == [4, 5]
    assert lookup.draft(ids, 9) == [4, 5, 6, 1, 2, 3]
    # Two ids will do when three have not been seen.
    assert lookup.draft([*ids, 9, 2, 3], 1) == [9]
    assert lookup.draft([*ids, 9, 2, 3, 8], 4) == []


def test_the_latest_place_is_taken() -> None:
    assert Lookup().draft([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_it_says_what_a_search_would_say() -> None:
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    lookup, ids = Lookup(), [dice.randrange(4) for _ in range(5)]
    for _ in range(300):
        ids.append(dice.randrange(4))
        expected: list[int] = []
        for length in (3, 2):
            ends = [end for end in range(length, len(ids)) if ids[end - length : end] == ids[-length:]]
            if ends:
                expected = ids[ends[-1] : ends[-1] + 5]
                break
        assert lookup.draft(ids, 5) == expected, f"seed {seed}"


def _learned(base_s: float, per_token_s: float) -> Speculation:
    speculation = Speculation(8)
    for tokens in (1, 3, 9, 2, 5):
        speculation.step_took(tokens, base_s + per_token_s * tokens)
    return speculation


def test_drafts_are_longer_the_surer_and_the_cheaper_they_are() -> None:
    cheap, dear = _learned(0.010, 0.0001), _learned(0.001, 0.002)
    assert cheap.count([0.95], 1) == 8
    assert 0 < cheap.count([0.5], 1) < 8
    assert dear.count([0.5], 1) == 0
    assert dear.count([1.0], 1) > 0


def test_they_stop_under_load() -> None:
    speculation = _learned(0.010, 0.003)
    counts = [speculation.count([0.7] * decoding, decoding) for decoding in (1, 2, 4, 8, 16, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    assert counts[-1] == 0


def test_who_guesses_wrong_is_asked_less_and_comes_back() -> None:
    speculation, lookup = _learned(0.010, 0.002), Lookup()
    for _ in range(30):
        speculation.learn(lookup, 4, 0)
    assert (speculation.drafted_total, speculation.accepted_total) == (120, 0)
    assert speculation.count([lookup.acceptance], 1) == 0
    waited = 0
    while speculation.count([lookup.acceptance], 1) == 0:
        lookup.rest()
        waited += 1
        assert waited < 2000
    assert waited > 50
    for _ in range(30):
        speculation.learn(lookup, 4, 4)
    assert lookup.acceptance > 0.9


def test_without_steps_of_different_sizes_it_tries() -> None:
    speculation = Speculation(4)
    assert speculation.count([0.5], 1) == 4
    for _ in range(50):
        speculation.step_took(1, 0.01)
    assert speculation.count([0.5], 1) == 4


def _drafting(speculation: Speculation, base_s: float, per_token_s: float) -> Speculation:
    for tokens in (1, 64, 1, 2, 1):
        speculation.guessing_took(tokens, base_s + per_token_s * tokens)
    return speculation


def test_a_drafting_model_is_asked_while_it_is_much_faster() -> None:
    sure, unsure = Drafted(0.8, 1), Drafted(0.1, 1)
    small = _drafting(_learned(0.010, 0.0001), 0.0005, 0.00001)
    assert small.count_guessed([(sure, 100)], 1) >= 4
    assert small.count_guessed([(unsure, 100)], 1) <= 1
    # As large as the model that it drafts for.
    assert _drafting(_learned(0.010, 0.0001), 0.010, 0.0001).count_guessed([(sure, 100)], 1) == 0
    # Untried, it is tried.
    assert _learned(0.010, 0.0001).count_guessed([(Drafted(0.5, 20), 100)], 1) > 0


def test_a_long_prompt_is_read_for_a_long_answer_alone() -> None:
    speculation = _drafting(_learned(0.010, 0.0001), 0.0005, 0.0002)
    assert speculation.count_guessed([(Drafted(0.8, 2000), 20)], 1) == 0
    assert speculation.count_guessed([(Drafted(0.8, 2000), 4000)], 1) > 0


def test_a_drafting_model_stops_under_load() -> None:
    speculation = _drafting(_learned(0.010, 0.002), 0.001, 0.0001)
    counts = [speculation.count_guessed([(Drafted(0.7, 1), 100)] * many, many) for many in (1, 2, 4, 8, 16, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    assert counts[-1] == 0


def test_what_one_sequence_has_taught_the_next_begins_with() -> None:
    speculation, drafted = Speculation(8), Drafted(0.5, 1)
    for _ in range(20):
        speculation.learn(drafted, 4, 0)
    assert drafted.acceptance < 0.1
    assert speculation.of_all.acceptance < 0.1
    assert (speculation.drafted_total, speculation.accepted_total) == (80, 0)
