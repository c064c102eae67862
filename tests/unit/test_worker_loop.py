"""The loop around the composer: which steps are broken off, for whom. The sim engine, whose waits the test decides."""

from __future__ import annotations

import threading
import time

import pytest
from tests.support.engines import Bench, names
from tests.support.waiting import eventually

from headrace.v1 import types_pb2
from headrace.worker.composer import Drawn, Limits, Step
from headrace.worker.engines.sim import SimBackend
from headrace.worker.kv import Operation, SaveBlock
from headrace.worker.loop import BatchLoop
from headrace.worker.timing import Timing

BATCH, INTERACTIVE = types_pb2.REQUEST_CLASS_BATCH, types_pb2.REQUEST_CLASS_INTERACTIVE
PROMPT = list(range(1, 101))


class Waits:
    """Each step waits until it is let go or broken off."""

    def __init__(self) -> None:
        self.steps = 0
        self.broken_off = 0
        self.go = threading.Event()
        self.backend: SimBackend

    def __call__(self, _duration: float) -> bool:
        self.steps += 1
        while not self.go.wait(0.001):
            if self.backend._broken_off.is_set():
                self.broken_off += 1
                return True
        return False


@pytest.mark.parametrize(
    ("first", "second", "breaks"),
    [(BATCH, INTERACTIVE, True), (BATCH, BATCH, False), (INTERACTIVE, INTERACTIVE, False)],
)
async def test_only_a_batch_prompt_is_broken_off_and_only_for_others(first: int, second: int, breaks: bool) -> None:
    waits = Waits()
    limits = Limits(4, 64, 16, 512, 256, 512, 100)
    waits.backend = SimBackend(limits, Timing(1.0, 1.0, 0.0), eos_ids=(0,), wait=waits)
    bench = Bench(BatchLoop(waits.backend))
    await bench.start()
    try:
        one = bench.submit(PROMPT, max_tokens=2, request_class=first, due_s=time.monotonic() + 60)

        async def begun() -> bool:
            return waits.steps == 1

        await eventually(begun, "a step under way")
        two = bench.submit(PROMPT[:20], max_tokens=1, request_class=second, due_s=time.monotonic() + 60)

        async def again() -> bool:
            return waits.steps == 2

        if breaks:
            await eventually(again, "the step is broken off, and the next one begun")
        else:
            assert not waits.backend._broken_off.is_set()
        assert (waits.steps, waits.broken_off) == ((2, 1) if breaks else (1, 0))
        waits.go.set()
        answers = [(await bench.ended(request))[0] for request in (one, two)]
        assert [len(answer.ids) for answer in answers] == [2, 1]
    finally:
        waits.go.set()
        await bench.engine.stop()


async def test_what_has_ended_is_kept_before_anybody_comes() -> None:
    """Whoever comes next does not wait for it."""
    saved: list[Operation] = []

    class Backend(SimBackend):
        def execute(self, step: Step) -> Drawn:
            if step.empty:
                saved.extend(step.operations)
            return super().execute(step)

    limits = Limits(4, 64, 16, 512, 256, 512, 100, keep_beside=64)
    backend = Backend(limits, Timing(1e6, 0.0, 0.0), eos_ids=(0,), wait=lambda _: False)
    bench = Bench(BatchLoop(backend, hash_blocks=names))
    await bench.start()
    try:
        await bench.ended(bench.submit(PROMPT, max_tokens=2))

        async def kept() -> bool:
            return sum(isinstance(each, SaveBlock) for each in saved) == len(PROMPT) // 16

        await eventually(kept, "all full blocks are saved with nothing to compute")
    finally:
        await bench.engine.stop()
