"""How long it takes until a fault of an engine is noticed, and what is left behind: on the stand-in for TensorRT-LLM.

Each case runs so many times. `noticed`: from the fault to the report that the engine is gone (or, where it goes on, to
the end of all). `those beside`: how they ended. `blocks left`: KV in use when all is over.

    PYTHONPATH=services .venv/bin/python benchmarks/engine_faults.py [--runs 5] [--json]

An engine that hangs is noticed by its silence: `worker.stall_timeout_s`, here 1 s, is the least that takes.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import statistics
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import openengine_server, standin  # noqa: E402
from tests.support.engines import Bench  # noqa: E402
from tests.support.fronted import Fronted  # noqa: E402

from headrace.config import WorkerConfig  # noqa: E402
from headrace.v1 import types_pb2  # noqa: E402
from headrace.worker.engine import Handoff  # noqa: E402
from headrace.worker.engines.openengine import OpenEngineDialect  # noqa: E402

#: A request whose prompt begins with this id meets the fault.
BAD, BESIDE = 77, 8
CONFIG = WorkerConfig(slots=64, block_tokens=16, max_waiting=512)
APART = {"cache_transceiver_backend": "DEFAULT", "kv_transfer_timeout_ms": 300, "kv_cache_max_tokens": 4096}
CANCELLED = types_pb2.OUTCOME_CANCELLED


@dataclasses.dataclass
class Seen:
    """Of one run."""

    noticed_s: float
    ends: collections.Counter[str]
    blocks: int


def prompt(first: int, length: int = 40) -> list[int]:
    return [first, *((first * 31 + 7 * index) % 900 + 20 for index in range(1, length))]


def ends_of(bench: Bench, keys: list[int]) -> collections.Counter[str]:
    """``gone`` = by the report that the engine is; the worker ends those streams."""
    found: collections.Counter[str] = collections.Counter()
    for key in keys:
        answer = bench.answers.get((key, 0))
        finish = answer.finish if answer is not None else None
        name = types_pb2.Outcome.Name(finish.outcome).removeprefix("OUTCOME_").lower() if finish else "gone"
        found[name] += 1
    return found


@asynccontextmanager
async def an_engine(stall_timeout_s: float = 20.0, **options: Any) -> Any:
    config = dataclasses.replace(CONFIG, stall_timeout_s=stall_timeout_s)
    bench = Bench(standin.engine(config, **({"step_s": 0.002} | options)))
    await bench.start()
    try:
        yield bench
    finally:
        await bench.engine.stop()


async def beside(bench: Bench, tokens: int = 400) -> list[int]:
    requests = [bench.submit(prompt(100 + n), max_tokens=tokens, ignore_eos=True) for n in range(BESIDE)]
    await bench.until(lambda: all((each.key, 0) in bench.answers for each in requests))
    return [each.key for each in requests]


async def dies(place: str, kind: str = "die", stall_timeout_s: float = 20.0) -> Seen:
    """The engine ends, or hangs, at that place of one request."""
    async with an_engine(stall_timeout_s, faults={f"{place}:{BAD}": kind}) as bench:
        keys = await beside(bench)
        began_s = time.perf_counter()
        bench.submit(prompt(BAD), max_tokens=10, ignore_eos=True)
        await bench.failed()
        return Seen(time.perf_counter() - began_s, ends_of(bench, keys), 0)


async def dies_idle() -> Seen:
    async with an_engine() as bench:
        began_s = time.perf_counter()
        os.kill(bench.engine._driver._child.pid, signal.SIGKILL)
        await bench.failed()
        return Seen(time.perf_counter() - began_s, collections.Counter(), 0)


async def fails_one() -> Seen:
    """One request's own error."""
    async with an_engine(faults={f"decode:{BAD}": "request_error"}) as bench:
        keys = await beside(bench, 50)
        began_s = time.perf_counter()
        await bench.ask(prompt(BAD), max_tokens=10, ignore_eos=True)
        noticed_s = time.perf_counter() - began_s
        await bench.until(lambda: all(bench.answers[key, 0].finish for key in keys))
        return Seen(noticed_s, ends_of(bench, keys), (await bench.at_rest()).kv_blocks_used)


async def statistics_block() -> Seen:
    """They never return: what is asked beside goes on as without."""
    async with an_engine(faults={"stats": "hang"}, version="1.4.0rc4") as bench:
        began_s = time.perf_counter()
        keys = await beside(bench, 50)
        await bench.until(lambda: all(bench.answers[key, 0].finish for key in keys))
        return Seen(time.perf_counter() - began_s, ends_of(bench, keys), (await bench.at_rest()).kv_blocks_used)


async def events_overflow() -> Seen:
    """More events than the engine keeps, from the first prompt until it is told that nothing is known any more."""
    async with an_engine(settings={"kv_cache_event_buffer_max_size": 4}) as bench:
        began_s, noticed_s, keys, numbers = time.perf_counter(), 0.0, [], itertools.count(100)
        while not bench.cleared:
            # A gap shows with the events after it.
            requests = [bench.submit(prompt(next(numbers), 200), max_tokens=9, ignore_eos=True) for _ in range(20)]
            for request in requests:
                await bench.ended(request)
            keys += [request.key for request in requests]
            noticed_s = time.perf_counter() - began_s
        return Seen(noticed_s, ends_of(bench, keys), (await bench.at_rest()).kv_blocks_used)


async def aborts_in_hand_over() -> Seen:
    """Half of the first halves are cancelled, then half of the second; then a crowd that needs all of the KV."""
    async with an_engine(settings=APART) as bench:
        began_s = time.perf_counter()
        firsts = [bench.submit(prompt(100 + n), max_tokens=2, ignore_eos=True, handoff=Handoff()) for n in range(40)]
        for request in firsts[::2]:
            bench.engine.cancel(request.key, None, CANCELLED)
        for request in firsts:
            await bench.ended(request)
        seconds = [
            bench.submit(prompt(100 + n), max_tokens=9, ignore_eos=True, handoff=Handoff(bench.references[each.key]))
            for n, each in enumerate(firsts)
            if each.key in bench.references
        ]
        for request in seconds[::2]:
            bench.engine.cancel(request.key, None, CANCELLED)
        for request in seconds:
            await bench.ended(request)
        crowd = [bench.submit(prompt(300 + n), max_tokens=9, ignore_eos=True) for n in range(64)]
        for request in crowd:
            await bench.ended(request)
        ends = ends_of(bench, [each.key for each in [*firsts, *seconds, *crowd]])
        return Seen(time.perf_counter() - began_s, ends, (await bench.at_rest()).kv_blocks_used)


async def server_dies() -> Seen:
    """An engine behind gRPC: SIGKILL of its server, until the first request has ended."""
    arguments = {"max_seq_len": 1024, "max_batch_size": 64, "kv_cache_config": {"tokens_per_block": 16}}
    pids: list[int] = []

    @asynccontextmanager
    async def server() -> Any:
        async with openengine_server.running(arguments, 2, step_s=0.002, version="1.4.0rc4") as found:
            pids.append(found[0])
            yield found

    bench = Bench(Fronted(server(), OpenEngineDialect(), standin.folder(1024, (2,)), CONFIG))
    await bench.start()
    try:
        keys = await beside(bench)
        began_s = time.perf_counter()
        os.kill(pids[0], signal.SIGKILL)
        with contextlib.suppress(AssertionError):
            # The report that it is gone may come between two ends.
            await bench.until(lambda: all(bench.answers[key, 0].finish for key in keys))
        noticed_s = time.perf_counter() - began_s
        return Seen(noticed_s, ends_of(bench, keys), 0)
    finally:
        await bench.engine.stop()


CASES = {
    "SIGKILL in generate": lambda: dies("generate"),
    "SIGKILL in prefill": lambda: dies("prefill"),
    "SIGKILL in decode": lambda: dies("decode"),
    "SIGKILL when idle": dies_idle,
    "SIGKILL of the server behind gRPC": server_dies,
    "fatal error": lambda: dies("decode", "fatal"),
    "hang in generate": lambda: dies("generate", "hang", 1.0),
    "hang in a step": lambda: dies("decode", "hang", 1.0),
    "the engine's thread ends": lambda: dies("decode", "silent", 1.0),
    "one request's error": fails_one,
    "statistics that block (8 answers of 50)": statistics_block,
    "events overflow": events_overflow,
    "aborts while KV is handed over (124 requests)": aborts_in_hand_over,
}


async def run(options: argparse.Namespace) -> None:
    """All cases."""
    if not options.json:
        print("| fault | noticed: median | most | those beside | blocks left |")
        print("|---|---|---|---|---|")
    for name, case in CASES.items():
        seen = [await case() for _ in range(options.runs)]
        times = [each.noticed_s for each in seen]
        ends = sum((each.ends for each in seen), collections.Counter())
        blocks = max(each.blocks for each in seen)
        row = {"fault": name, "median_s": statistics.median(times), "most_s": max(times), "ends": dict(ends)}
        if options.json:
            print(json.dumps(row | {"blocks": blocks}), flush=True)
        else:
            told = ", ".join(f"{count} {end}" for end, count in ends.most_common()) or "none"
            print(
                f"| {name} | {1000 * row['median_s']:.0f} ms | {1000 * row['most_s']:.0f} ms | {told} | {blocks} |",
                flush=True,
            )


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
