"""A live worker with the sim engine, and one in the simulator: the same steps at the same moments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from tests.support import replay

from headrace import sim
from headrace._gateway import CostTable, Workload
from headrace.worker.composer import Composer, Drawn, Limits
from headrace.worker.engine import Request, Stopping
from headrace.worker.hashes import block_namer
from headrace.worker.timing import Timing


def test_a_live_worker_and_a_simulated_one_take_the_same_steps() -> None:
    """A trace on one worker, in virtual time: the composer with the sim engine's timing, and the simulator's engine.

    Each first token and each end is at the same moment: admission, order, chunks, reuse of prefixes and the times of
    steps are one rule. (The scheduler lets everything through at once, and tells no chunks.)
    """
    slots, blocks, chunk, slowdown = 6, 400, 700, 3.0
    rows = replay.drawn(7, 60, 2.0)
    group = {"workers": 1, "slowdown": slowdown, "max_batch": slots, "kv_blocks": blocks, "chunk_tokens": chunk}
    settings = {
        "groups": [group],
        "chunk": "scheduler",
        "worker_shed": False,
        "shed": False,
        "scheduler": {"dispatch_ahead_s": 1e9, "queue_factor": 1e6, "chunk_tokens": [1, 0]},
        "ttft_times_alone": 0.0,
    }
    outcome = sim.run_one(Workload.mooncake(replay.mooncake(rows)), settings)
    limits = Limits(slots, blocks, replay.BLOCK_TOKENS, 100_000, chunk, chunk, 1000)
    timing = Timing(table=CostTable.named("a100-llama3-8b"), slowdown=slowdown)
    first_s, finished_s, cached = composed(rows, limits, timing)
    assert first_s == pytest.approx(outcome.column("first_token_s"), abs=1e-6)
    assert finished_s == pytest.approx(outcome.column("finished_s"), abs=1e-6)
    assert cached == outcome.column("cached_tokens")
    # They waited for each other, and reused beginnings: the trace says something.
    waited_s = [first - row.at_s for first, row in zip(first_s, rows, strict=True)]
    assert max(waited_s) > 3 * min(waited_s)
    assert sum(cached) > 10_000


def composed(
    rows: Sequence[replay.Row], limits: Limits, timing: Timing
) -> tuple[list[float], list[float], list[float]]:
    """Drives a composer through a trace; when each first token and end came, and what was in KV."""
    composer = Composer(limits, block_namer("toy", limits.block_tokens))
    first_s, finished_s, cached = ([math.nan] * len(rows) for _ in range(3))
    now_s, to_come = 0.0, list(enumerate(rows))
    while to_come or not composer.idle:
        if composer.idle:
            now_s = max(now_s, to_come[0][1].at_s)
        while to_come and to_come[0][1].at_s <= now_s:
            number, row = to_come.pop(0)
            request = Request(number, row.ids(number), Stopping(row.output_tokens, ignore_eos=True))
            assert composer.submit(request, row.at_s) is None
        step = composer.plan(now_s)
        decoding = sum(len(sequence.ids) for sequence in step.decodes)
        now_s += timing.step(len(step.decodes), decoding, [(chunk.count, chunk.start) for chunk in step.chunks])
        composer.complete(step, Drawn([1] * len(step.rows)), now_s)
        for delta in composer.take_results()[0]:
            if delta.first_index == 0:
                first_s[delta.key] = now_s
            if delta.finish is not None:
                finished_s[delta.key] = now_s
                cached[delta.key] = float(delta.finish.cached_prompt_tokens)
    return first_s, finished_s, cached
