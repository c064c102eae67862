"""``headrace route``: train a classifier of difficulty, say where a request would go, show how quality is measured.

What is seen of a request, and what follows from it, is Rust's (``gateway_rs/core/src/routing``) and only called here.
Training is this module's: logistic regression by Newton's method, then isotonic regression on estimates that each come
from a model which did not see their example, so that an estimate of 0.8 means that so many answers agree.

Examples are JSON, one a line. Labelled by hand or by ``benchmarks/difficulty_data.py``: ``{"prompt" or "messages",
"max_tokens", "agreement"}``; of a router's ``router.shadow_log``: ``{"features", "agreement"}``. Agreement is from 0
(the smaller variant's answer is another) to 1 (it is the same). Where each has a ``"kind"``, it is also said how well
kinds are told that were not trained on: prompts that are made alike are easy to know again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace import _gateway
from headrace.config import AliasConfig, Config
from headrace.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

VERSION = 1
#: Fewer say nothing.
LEAST_EXAMPLES = 50
FOLDS = 5
#: Points of the calibration curve.
MOST_POINTS = 32
#: A feature counts so many deviations from its mean at most: beyond, nothing was learned.
REACH = 3.0


@dataclass(frozen=True)
class Trained:
    """A classifier's file, and how good it is on examples that it did not see."""

    content: dict[str, Any]
    report: dict[str, Any]


def read_examples(paths: Sequence[Path]) -> tuple[list[list[float]], list[float], list[str]]:
    """Features, agreement and kind of each example. Raises ConfigError, naming the line."""
    names = _gateway.route_feature_names()
    features: list[list[float]] = []
    agreements: list[float] = []
    kinds: list[str] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                example = json.loads(line)
                agreement = float(example["agreement"])
                row = example.get("features")
                if row is None:
                    row = _gateway.route_features(json.dumps(body_of(example)))
                if len(row) != len(names) or not 0.0 <= agreement <= 1.0:
                    raise ValueError(f"expected {len(names)} features and an agreement from 0 to 1")
                features.append([float(value) for value in row])
                agreements.append(agreement)
                kinds.append(str(example.get("kind", "")))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ConfigError(f"{path}, line {number}: {error!r} is wrong with it") from error
    return features, agreements, kinds


def body_of(example: dict[str, Any]) -> dict[str, Any]:
    """The example as the body of a request."""
    kept = ("prompt", "messages", "max_tokens", "tools", "response_format")
    return {"model": "any"} | {key: example[key] for key in kept if example.get(key) is not None}


def train(
    features: Sequence[Sequence[float]],
    agreements: Sequence[float],
    kinds: Sequence[str] = (),
    *,
    l2: float,
    now_s: float,
) -> Trained:
    """Fit and calibrate. Deterministic. Raises ConfigError when there is too little to learn from."""
    import numpy as np

    if len(agreements) < LEAST_EXAMPLES:
        raise ConfigError(f"{len(agreements)} examples are too few; at least {LEAST_EXAMPLES} are needed")
    x, y = np.asarray(features, dtype=np.float64), np.asarray(agreements, dtype=np.float64)
    if y.min() == y.max():
        raise ConfigError(f"all examples have the agreement {y[0]:g}: there is nothing to tell apart")
    mean, scale = x.mean(axis=0), x.std(axis=0)
    # A feature that never changes says nothing, and must not say much when it does.
    scale[scale < 1e-6] = 1.0
    x = np.clip((x - mean) / scale, -REACH, REACH)
    folds = np.random.default_rng(0).permutation(len(y)) % FOLDS
    unseen = _unseen(x, y, folds, l2)
    weights, bias = fit(x, y, l2)
    scores, values = isotonic(unseen, y)
    # The curve judged by folds of its own: it may not have seen what it is judged by either.
    calibrated = np.empty(len(y))
    for fold in range(FOLDS):
        train_on = folds != fold
        curve = isotonic(unseen[train_on], y[train_on])
        calibrated[~train_on] = np.interp(unseen[~train_on], *curve)
    content = {
        "version": VERSION,
        "features": _gateway.route_feature_names(),
        "mean": _rounded(mean),
        "scale": _rounded(scale),
        "reach": REACH,
        "weights": _rounded(weights),
        "bias": round(float(bias), 6),
        "isotonic": {"scores": _rounded(scores), "values": _rounded(values)},
        "trained": {"examples": len(y), "mean_agreement": round(float(y.mean()), 4), "unix_s": int(now_s)},
    }
    report = _report(y, calibrated)
    known = sorted(set(kinds))
    if len(known) >= FOLDS:
        fold_of = dict(zip(known, np.random.default_rng(0).permutation(len(known)) % FOLDS, strict=True))
        by_kind = _unseen(x, y, np.array([fold_of[kind] for kind in kinds]), l2)
        report["unseen_kinds"] = _auc_with_interval(y, by_kind)
    return Trained(content, report)


def _unseen(x: Floats, y: Floats, folds: NDArray[np.int_], l2: float) -> Floats:
    """An estimate of each example by a model that did not see its fold."""
    import numpy as np

    unseen = np.empty(len(y))
    for fold in range(FOLDS):
        train_on = folds != fold
        weights, bias = fit(x[train_on], y[train_on], l2)
        unseen[~train_on] = _sigmoid(x[~train_on] @ weights + bias)
    return unseen


def fit(x: Floats, y: Floats, l2: float) -> tuple[Floats, float]:
    """Weights and bias of a logistic regression on labels from 0 to 1, by Newton's method."""
    import numpy as np

    design = np.hstack([x, np.ones((len(x), 1))])
    penalty = np.full(design.shape[1], l2)
    penalty[-1] = 0.0
    theta = np.zeros(design.shape[1])
    for _ in range(50):
        p = _sigmoid(design @ theta)
        gradient = design.T @ (p - y) + penalty * theta
        curvature = (design * (p * (1 - p))[:, None]).T @ design + np.diag(penalty + 1e-9)
        step = np.linalg.solve(curvature, gradient)
        theta -= step
        if np.abs(step).max() < 1e-8:
            break
    return theta[:-1], float(theta[-1])


def isotonic(scores: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The rising curve nearest to the labels (pool adjacent violators), as at most so many points."""
    import numpy as np

    order = np.argsort(scores, kind="stable")
    blocks: list[list[float]] = []
    for score, label in zip(scores[order], y[order], strict=True):
        blocks.append([float(score), float(label), 1.0])
        while len(blocks) > 1 and blocks[-2][1] >= blocks[-1][1]:
            right, left = blocks.pop(), blocks.pop()
            count = left[2] + right[2]
            blocks.append([(a * left[2] + b * right[2]) / count for a, b in zip(left[:2], right[:2], strict=True)])
            blocks[-1].append(count)
    # The last few of a handful of examples say little: small blocks join their neighbours.
    least = max(3.0, len(y) / MOST_POINTS)
    joined: list[list[float]] = []
    for block in blocks:
        if joined and (joined[-1][2] < least or (block[2] < least and block is blocks[-1])):
            left = joined.pop()
            count = left[2] + block[2]
            block = [*((a * left[2] + b * block[2]) / count for a, b in zip(left[:2], block[:2], strict=True)), count]
        joined.append(block)
    return np.array([block[0] for block in joined]), np.clip(np.array([block[1] for block in joined]), 0.0, 1.0)


def _sigmoid(z: Floats) -> Floats:
    import numpy as np

    sigmoid: Floats = 1.0 / (1.0 + np.exp(-np.clip(z, -40, 40)))
    return sigmoid


def _rounded(values: Floats) -> list[float]:
    return [round(float(value), 6) for value in values]


def _report(y: Floats, estimates: Floats) -> dict[str, Any]:
    """How estimates of unseen examples came true."""
    import numpy as np

    brier, base = float(((estimates - y) ** 2).mean()), float(((y.mean() - y) ** 2).mean())
    bins = np.array_split(np.argsort(estimates, kind="stable"), 10)
    off = sum(abs(float(estimates[part].mean() - y[part].mean())) * len(part) for part in bins if len(part)) / len(y)
    routes = []
    for threshold in (0.5, 0.6, 0.7, 0.8, 0.9):
        easy = estimates >= threshold
        mean, low, high = _gateway.route_interval(int(easy.sum()), float(y[easy].sum()))
        routes.append(
            {"threshold": threshold, "share": round(float(easy.mean()), 4), "agreement": mean, "low": low, "high": high}
        )
    return {
        "examples": len(y),
        "mean_agreement": round(float(y.mean()), 4),
        **_auc_with_interval(y, estimates),
        "brier": round(brier, 4),
        "brier_without": round(base, 4),
        "calibration_error": round(off, 4),
        "routes": routes,
    }


def _auc_with_interval(y: Floats, estimates: Floats) -> dict[str, float]:
    """How often an example that agrees more than half of all is put above one that does not, with its interval of 95 %
    (Hanley and McNeil 1982)."""
    import numpy as np

    # Where half agree fully, they are those above.
    above = y > np.median(y) if (y > np.median(y)).any() else y >= np.median(y)
    good, bad = estimates[above], estimates[~above]
    if not len(good) or not len(bad):
        return {"auc": 0.5, "auc_low": 0.0, "auc_high": 1.0}
    wins = (good[:, None] > bad[None, :]).mean() + 0.5 * (good[:, None] == bad[None, :]).mean()
    auc = float(wins)
    spread = (len(good) - 1) * (auc / (2 - auc) - auc**2) + (len(bad) - 1) * (2 * auc**2 / (1 + auc) - auc**2)
    error = float(np.sqrt((auc * (1 - auc) + spread) / (len(good) * len(bad))))
    low, high = max(auc - 1.96 * error, 0.0), min(auc + 1.96 * error, 1.0)
    return {"auc": round(auc, 4), "auc_low": round(low, 4), "auc_high": round(high, 4)}


def write(path: Path, content: dict[str, Any]) -> None:
    """Put the file in place whole. Raises ConfigError."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def explain(config: Config, alias: str, body: dict[str, Any], quality: str) -> dict[str, Any]:
    """Where a request would go, with every variant there. Raises ConfigError."""
    found = alias_of(config, alias)
    try:
        told = _gateway.route_explain(json.dumps(dataclasses.asdict(found)), json.dumps(body), quality)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    explained: dict[str, Any] = json.loads(told)
    return explained


def alias_of(config: Config, name: str) -> AliasConfig:
    """The alias of that name, or the first. Raises ConfigError."""
    if not config.aliases:
        raise ConfigError("aliases: the configuration has none; [[aliases]] lists them")
    for alias in config.aliases:
        if name in ("", alias.name):
            return alias
    raise ConfigError(f"no alias is named {name!r} (there are: {', '.join(each.name for each in config.aliases)})")


def status(target: str) -> dict[str, Any]:
    """What a router says of its aliases. Raises HeadraceError."""
    url = target.rstrip("/") + "/routes"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--target: expected http://HOST:PORT or https://HOST:PORT, got {target!r}")
    key = os.environ.get("HEADRACE_API_KEY", "")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            said: dict[str, Any] = json.load(answer)
            return said
    except urllib.error.HTTPError as error:
        raise HeadraceError(f"{target} refused it: {error.code} {error.reason}") from error
    except (OSError, ValueError) as error:
        raise HeadraceError(f"{target} cannot be asked: {error}") from error


def trained_now(paths: Sequence[Path], output: Path, l2: float) -> Trained:
    """``headrace route train``."""
    trained = train(*read_examples(paths), l2=l2, now_s=time.time())
    write(output, trained.content)
    return trained
