"""Training a classifier of difficulty: what is there to find is found, and how much that is, is said."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from headrace import _gateway, config, routing
from headrace.errors import ConfigError

np = pytest.importorskip("numpy")


def examples(count: int, seed: int = 1) -> tuple[list[list[float]], list[float]]:
    """Short prompts agree mostly, long ones seldom; the rest is noise."""
    rng = random.Random(seed)
    names = _gateway.route_feature_names()
    features, agreements = [], []
    for _ in range(count):
        row = [rng.random() for _ in names]
        easy = rng.random() < 0.5
        row[names.index("prompt_length")] = rng.gauss(2.0 if easy else 4.0, 0.5)
        features.append(row)
        agreements.append(float(rng.random() < (0.9 if easy else 0.2)))
    return features, agreements


def test_what_tells_easy_from_hard_is_found_and_calibrated() -> None:
    trained = routing.train(*examples(800), l2=1.0, now_s=0.0)
    report = trained.report
    assert report["auc_low"] > 0.75
    assert report["brier"] < 0.7 * report["brier_without"]
    assert report["calibration_error"] < 0.08
    by_threshold = {row["threshold"]: row for row in report["routes"]}
    assert by_threshold[0.8]["low"] > 0.8
    names = _gateway.route_feature_names()
    text, row = json.dumps(trained.content), [0.5] * len(names)

    def estimate(length: float) -> float:
        row[names.index("prompt_length")] = length
        return _gateway.route_agreement(text, row)

    assert estimate(2.0) == pytest.approx(0.9, abs=0.1)
    assert estimate(4.0) == pytest.approx(0.2, abs=0.1)


def test_noise_teaches_nothing() -> None:
    rng = random.Random(3)
    features, _ = examples(600)
    trained = routing.train(features, [float(rng.random() < 0.6) for _ in features], l2=1.0, now_s=0.0)
    assert trained.report["brier"] >= 0.97 * trained.report["brier_without"]
    assert trained.report["auc_low"] < 0.5 < trained.report["auc_high"]


def test_what_was_learnt_of_its_kind_only_shows_on_kinds_that_were_not_trained_on() -> None:
    names, rng = _gateway.route_feature_names(), random.Random(4)
    kinds = [f"kind {rng.randrange(40)}" for _ in range(1200)]
    # What tells kinds apart says nothing of them all: each has a place of its own, and agrees or does not.
    rows, agreements = [], []
    for kind in kinds:
        place = random.Random(kind)
        rows.append([place.random() for _ in names])
        agreements.append(float(place.random() < 0.5))
    report = routing.train(rows, agreements, kinds, l2=0.01, now_s=0.0).report
    assert report["auc_low"] > report["unseen_kinds"]["auc_high"]
    assert "unseen_kinds" not in routing.train(rows, agreements, l2=0.01, now_s=0.0).report


def test_the_interval_of_an_auc_holds_it_nineteen_times_of_twenty() -> None:
    rng, held = np.random.default_rng(5), 0
    for _ in range(400):
        y = (rng.random(120) < 0.5).astype(float)
        # Two bells a distance apart: the normal distribution at 1 / sqrt(2) is 0.760.
        found = routing._auc_with_interval(y, rng.normal(size=120) + y)
        held += found["auc_low"] <= 0.760 <= found["auc_high"]
    assert 0.92 <= held / 400 <= 0.98


def test_training_again_gives_the_same() -> None:
    one, two = (routing.train(*examples(200), l2=1.0, now_s=0.0).content for _ in range(2))
    assert one == two


def test_the_curve_rises_whatever_the_labels() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        scores, values = routing.isotonic(rng.random(100), rng.integers(0, 2, 100).astype(float))
        assert (np.diff(scores) >= 0).all(), f"seed {seed}"
        assert (np.diff(values) >= 0).all(), f"seed {seed}"
        assert len(scores) <= 2 * routing.MOST_POINTS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ('{"prompt": "x"}', "agreement"),
        ('{"prompt": "x", "agreement": 2}', "from 0 to 1"),
        ('{"features": [1], "agreement": 1}', "features"),
        ('{"agreement": 1}', "line 2"),
    ],
)
def test_a_wrong_example_is_refused_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text('{"prompt": "hello", "agreement": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        routing.read_examples([path])


def test_too_little_to_learn_from_is_said() -> None:
    with pytest.raises(ConfigError, match="10 examples are too few"):
        routing.train(*examples(10), l2=1.0, now_s=0.0)
    features, _ = examples(60)
    with pytest.raises(ConfigError, match="nothing to tell apart"):
        routing.train(features, [1.0] * 60, l2=1.0, now_s=0.0)


CONFIG = """
[[models]]
name = "large"
[[models]]
name = "small"
[[aliases]]
name = "both"
[[aliases.variants]]
model = "large"
[[aliases.variants]]
model = "small"
threshold = {threshold}
"""


def test_explain_says_what_is_expected_and_who_is_asked() -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
    easy = routing.explain(config.parse(CONFIG.format(threshold=0.0)), "", body, "")
    assert (easy["meant"], easy["why"], easy["order"]) == ("small", "easy", ["small", "large"])
    hard = routing.explain(config.parse(CONFIG.format(threshold=1.0)), "both", body, "")
    assert (hard["meant"], hard["why"]) == ("large", "hard")
    wished = routing.explain(config.parse(CONFIG.format(threshold=0.0)), "", body, "full")
    assert (wished["meant"], wished["why"]) == ("large", "full")
    assert set(easy["features"]) == set(_gateway.route_feature_names())
    with pytest.raises(ConfigError, match="no alias is named"):
        routing.explain(config.parse(CONFIG.format(threshold=0.0)), "other", body, "")
    with pytest.raises(ConfigError, match=r"\[\[aliases\]\]"):
        routing.explain(config.parse(""), "", body, "")


def test_aliases_are_checked_and_written_back() -> None:
    read = config.parse(CONFIG.format(threshold=0.7))
    assert config.parse(config.to_toml(read)) == read
    assert read.served() == ("large", "small")
    assert json.loads(json.dumps(config.to_dict(read)))["aliases"][0]["variants"][1]["threshold"] == 0.7


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('[[aliases]]\nname = "large"', r"aliases\[1\].name: 'large' is a model or alias already"),
        ('[[aliases]]\nname = "none"', r"aliases\[1\].variants: expected 1 to 16, got 0"),
        ('[[aliases.variants]]\nmodel = "other"', "no model named 'other'"),
        ('[[aliases.variants]]\nmodel = "small"', "'small' is listed twice"),
        ("weight = 2.0", "weight: must be at most 1.0"),
        ('canary_of = "small"', "canary_of: expected another variant"),
        ('canary_of = "nobody"', "canary_of: expected another variant"),
    ],
)
def test_a_wrong_alias_is_refused_by_name(more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.parse(CONFIG.format(threshold=0.5) + more)


def test_a_fallback_must_be_known() -> None:
    text = CONFIG.format(threshold=0.5).replace('name = "both"', 'name = "both"\nfallback = ["cached", "tiny"]')
    with pytest.raises(ConfigError, match="fallback: expected 'cached', 'degraded' or one of large, small, got 'tiny'"):
        config.parse(text)
