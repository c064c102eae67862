"""Dollars per thousand useful tokens with all levers against none, in one run, and what they cost in accuracy.

    .venv/bin/python benchmarks/routing_bench.py [--requests 240] [--rounds 2]

The real mesh with the embedded model as two variants of one name: Q8_0, the best, and Q4_0. The same traffic is asked
twice in each round, in turns: half of it repeats an earlier request, a third is easy, all is greedy. *None* asks the
best variant by its own name, without the response cache or reuse of prefixes; *all* asks the name, with routing by
difficulty, response cache, prefix reuse and shadows (whose cost counts).

A dollar is the price of an hour of a worker's CPU (the same for both variants), so the figure holds on a shared
machine: CPU seconds of all workers, measured, over the tokens that clients got. Accuracy is the agreement (F1 of words)
of *all*'s answers with what the best variant answered first to the same requests in *none*, with its interval of 95 %.
Answers that the best variant gives twice differ too, where batches differ; that is shown beside it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from difficulty_data import made_up
from mesh import BenchError, Mesh

from headrace import _gateway

CONFIG = """
[[models]]
name = "large"
source = "embedded"
quantization = "Q8_0"
[[models]]
name = "small"
source = "embedded"
quantization = "Q4_0"
[[aliases]]
name = "smart"
floor = {floor}
shadow_share = {shadow_share}
[[aliases.variants]]
model = "large"
[[aliases.variants]]
model = "small"
threshold = {threshold}
{difficulty}
[worker]
kv_tokens = 8192
slots = 8
"""


@dataclass
class Side:
    """One way of asking."""

    name: str
    answers: dict[str, str] = field(default_factory=dict)
    tokens: int = 0
    cpu_s: float = 0.0
    by: dict[str, int] = field(default_factory=dict)
    cached: int = 0
    agreements: dict[str, list[float]] = field(default_factory=dict)


def traffic(rng: random.Random, requests: int) -> list[dict[str, Any]]:
    """Half repeats an earlier one; of all, a third is easy."""
    asked: list[dict[str, Any]] = []
    while len(asked) < requests:
        if asked and rng.random() < 0.5:
            asked.append(rng.choice(asked))
            continue
        _, messages, max_tokens = made_up(rng)
        if rng.random() < 1 / 3:
            messages = [{"role": "user", "content": f"Repeat exactly: {rng.randint(10, 9999)}"}]
            if rng.random() < 0.5:
                messages = [{"role": "user", "content": f"Is {rng.randint(2, 99)} larger than {rng.randint(2, 99)}?"}]
            max_tokens = 8
        asked.append({"messages": messages, "max_tokens": max(max_tokens, 8), "temperature": 0})
    return asked


def ask(address: str, bodies: Sequence[dict[str, Any]], side: Side, clients: int, **more: Any) -> None:
    """Asks them in order, so many at once."""
    left, lock = iter(bodies), threading.Lock()
    failures: list[Any] = []
    headers = {"Content-Type": "application/json"}
    model = "smart" if side.name == "all" else "large"
    if side.name != "all":
        headers["x-headrace-cache"] = "bypass"
        more["bypass_prefix_cache"] = True

    def client() -> None:
        connection = http.client.HTTPConnection(address, timeout=120)
        while True:
            with lock:
                body = next(left, None)
            if body is None or failures:
                return
            connection.request("POST", "/v1/chat/completions", json.dumps(body | more | {"model": model}), headers)
            response = connection.getresponse()
            content = json.loads(response.read())
            with lock:
                if response.status != 200:
                    failures.append(content)
                    return
                key, text = json.dumps(body), content["choices"][0]["message"]["content"] or ""
                who = response.headers.get("x-headrace-variant", model)
                side.tokens += content["usage"]["completion_tokens"]
                side.by[who] = side.by.get(who, 0) + 1
                side.cached += response.headers.get("x-headrace-cached") == "true"
                if side.name == "all" or key in side.answers:
                    best = NONE_ANSWERS.get(key, side.answers.get(key))
                    if best is not None:
                        agreement = _gateway.route_compare("words", best, text)
                        side.agreements.setdefault(who, []).append(agreement)
                side.answers.setdefault(key, text)
                if side.name != "all":
                    NONE_ANSWERS.setdefault(key, text)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise BenchError(f"a request failed: {failures[0]}")


#: What the best variant said first to each request.
NONE_ANSWERS: dict[str, str] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--threshold", type=float, default=0.6)
    parser.add_argument("--floor", type=float, default=0.6)
    parser.add_argument("--shadow-share", type=float, default=0.05)
    parser.add_argument("--difficulty", default="", help="a classifier's file")
    parser.add_argument("--dollars", type=float, default=0.05, help="price of an hour of a worker's CPU")
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    sides = [Side("none"), Side("all")]
    with Mesh() as mesh:
        settings = {"floor": given.floor, "threshold": given.threshold, "shadow_share": given.shadow_share}
        difficulty = f"difficulty = {json.dumps(given.difficulty)}" if given.difficulty else ""
        mesh.config.write_text(CONFIG.format(difficulty=difficulty, **settings))
        mesh.core()
        cache = {"scheduler": mesh.scheduler, "cache": mesh.cache, "metrics_address": "127.0.0.1:0"}
        workers = [
            mesh.service("worker", name=name, model=name, worker_id=name, **cache) for name in ("large", "small")
        ]
        wait_for(mesh.http, ("large", "small"))
        rng = random.Random(given.seed)
        for number in range(given.rounds):
            bodies = traffic(rng, given.requests)
            for side in sides:
                before_s = sum(worker.cpu_s() for worker in workers)
                ask(mesh.http, bodies, side, given.clients)
                side.cpu_s += sum(worker.cpu_s() for worker in workers) - before_s
                sys.stderr.write(f"round {number + 1}, {side.name}: {side.cpu_s:.1f} CPU s so far\n")
        with urllib.request.urlopen(f"http://{mesh.http}/routes") as answer:
            state = json.load(answer)["aliases"][0]
    report(sides, given.dollars, state)


def wait_for(address: str, models: Sequence[str]) -> None:
    """Until the router sees a ready worker of each."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with urllib.request.urlopen(f"http://{address}/routes") as answer:
            variants = json.load(answer)["aliases"][0]["variants"]
        if all(variant["ready_workers"] for variant in variants):
            return
        time.sleep(0.1)
    raise BenchError(f"the router does not see workers of {', '.join(models)}")


def report(sides: Sequence[Side], dollars: float, state: dict[str, Any]) -> None:
    costs = []
    for side in sides:
        cost = side.cpu_s / 3600 * dollars / side.tokens * 1000
        costs.append(cost)
        who = ", ".join(f"{name} {count}" for name, count in sorted(side.by.items()))
        print(f"{side.name}: ${cost:.7f} per thousand useful tokens, at ${dollars:g} for an hour of CPU")
        print(
            f"  {side.tokens} useful tokens, {side.cpu_s:.1f} CPU s of the workers; {who}; "
            f"from the response cache {side.cached}"
        )
        for name, values in sorted(side.agreements.items()):
            mean, low, high = _gateway.route_interval(len(values), sum(values))
            print(
                f"  agreement of {name} with the best variant: {mean:.3f} ({low:.3f} to {high:.3f}), "
                f"{len(values)} answers"
            )
    everything = [value for values in sides[1].agreements.values() for value in values]
    mean, low, high = _gateway.route_interval(len(everything), sum(everything))
    print(
        f"all against none: {costs[1] / costs[0]:.3f} of the dollars; "
        f"agreement of all answers {mean:.3f} ({low:.3f} to {high:.3f})"
    )
    small = state["variants"][1]
    measured = small["agreement"]
    print(
        f"shadows say of {small['model']}: {measured['mean']:.3f} ({measured['low']:.3f} to {measured['high']:.3f}), "
        f"{measured['samples']} compared, {state['shadows_lost']} left out; threshold {small['threshold']:.3f}"
    )


if __name__ == "__main__":
    main()
