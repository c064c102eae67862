"""One trace slice through a live mesh of sim workers, and through the simulator: they agree.

Real processes, and the real core in both. All times are stretched (`sim_slowdown`), so that what processes and a busy
machine add is small beside the engine's steps; the sim engine keeps to its own time, so that it does not add up either.
The router asks for each request, or places it within what it is lent, as it does by default.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace import sim
from headrace._gateway import Workload
from tests.support import replay
from tests.support.mesh import Lab, Mesh
from tests.support.replay import Life, Row
from tests.support.toy import ToyModel
from tests.support.waiting import Lag

pytestmark = pytest.mark.timeout(300)

TABLE = "a100-llama3-8b"
WORKERS, SLOTS, KV_BLOCKS, CHUNK_TOKENS = 2, 32, 200, 2048
HEARTBEAT_S = 0.1

#: What is stated, of means over the slice and beside the width of the simulator's own seeds: so far apart may live and
#: simulated TTFT be (a share, and what processes add, 8 ms before stretching), and shares of good and refused requests.
TTFT_WITHIN = 0.15
TTFT_WITHIN_S = 0.05
SHARE_WITHIN = 0.06

#: On the way of a request to its first token a process is woken so often; each time as late as the machine is.
WAKINGS = 8
#: Later than that on average, and the figures would be the machine's.
BUSY_S = 0.008
BUSY_LOAD = 3.0

#: What a message between router and scheduler takes in the simulator: one of those wakings, more or less.
ROUTER_DELAY_S = 0.002


class Case:
    """A slice, its speed and its targets, all in stretched seconds; and whether the router places by itself."""

    def __init__(
        self, rows: Sequence[Row], slowdown: float, ttft_s: float, tpot_s: float, *, credits: bool = False
    ) -> None:
        self.rows, self.slowdown, self.ttft_s, self.tpot_s = rows, slowdown, ttft_s, tpot_s
        self.credits = credits

    def simulated(self, seeds: int) -> list[tuple[float, float, float]]:
        """Mean TTFT, goodput and share of refused ones, for each seed."""
        group = {
            "workers": WORKERS,
            "cost_table": TABLE,
            "slowdown": self.slowdown,
            "max_batch": SLOTS,
            "kv_blocks": KV_BLOCKS,
            "chunk_tokens": CHUNK_TOKENS,
        }
        settings = {
            "groups": [group],
            "chunk": "scheduler",
            "worker_shed": False,
            "scheduler": self.policy | {"heartbeat_s": HEARTBEAT_S, "chunk_tokens": [256, 8192]},
            # Reports are as old as half a heartbeat, on average.
            "staleness_s": HEARTBEAT_S / 2,
            "router_delay_s": ROUTER_DELAY_S if self.credits else 0.0,
            "ttft_target_s": self.ttft_s,
            "ttft_times_alone": 0.0,
            "tpot_target_s": self.tpot_s,
        }
        workload = Workload.mooncake(replay.mooncake(self.rows))
        figures = []
        for seed in range(1, seeds + 1):
            outcome = sim.run_one(workload, settings | {"seed": seed})
            ttft, tpot, rejected = (outcome.column(name) for name in ("ttft_s", "tpot_s", "rejected"))
            good = [
                first <= self.ttft_s and not pace > self.tpot_s and not gone
                for first, pace, gone in zip(ttft, tpot, rejected, strict=True)
            ]
            had = [value for value in ttft if not math.isnan(value)]
            figures.append((statistics.fmean(had), sum(good) / len(good), sum(rejected) / len(rejected)))
        return figures

    @property
    def policy(self) -> dict[str, float | bool]:
        """What the scheduler's configuration says in both, stretched like the rest."""
        return {"dispatch_ahead_s": 0.1 * self.slowdown, "queue_factor": 1.25, "credits": self.credits}

    async def live(self, mesh: Mesh) -> list[Life]:
        return await replay.play(mesh.grpc, "toy", self.rows, ttft_s=self.ttft_s, tpot_s=self.tpot_s)


def mesh_for(folder: Path, case: Case) -> Mesh:
    """A mesh whose workers are the simulator's group."""
    worker = {
        "engine": "sim",
        "model": "toy",
        "sim_cost_table": TABLE,
        "sim_slowdown": case.slowdown,
        "slots": SLOTS,
        "block_tokens": replay.BLOCK_TOKENS,
        "kv_tokens": KV_BLOCKS * replay.BLOCK_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
    }
    scheduler = case.policy | {"heartbeat_s": HEARTBEAT_S}
    mesh = Mesh(folder, [ToyModel("toy", context_tokens=65536)], scheduler=scheduler, worker=worker).start()
    for number in range(2, WORKERS + 1):
        further = mesh.launch("worker", key=f"worker-{number}", scheduler=mesh.scheduler, cache=mesh.cache)
        mesh.ready[f"worker-{number}"] = further.ready()
    return mesh


def agree(case: Case, lives: Sequence[Life], lag_s: float) -> None:
    """What holds on any machine, and what holds where processes are not kept waiting for a CPU."""
    for life, row in zip(lives, case.rows, strict=True):
        assert life.tokens == (0 if life.rejected else row.output_tokens)
    simulated = case.simulated(seeds=10)
    means, goodputs, refused = ([each[at] for each in simulated] for at in range(3))
    ttft_s = statistics.fmean(life.ttft_s for life in lives if not life.rejected)
    goodput = sum(not life.rejected and life.good(case.ttft_s, case.tpot_s) for life in lives) / len(lives)
    rejected = sum(life.rejected for life in lives) / len(lives)
    said = f"live {ttft_s:.3f} s, {goodput:.3f} good, {rejected:.3f} refused, lag {lag_s:.4f}; simulated {simulated}"
    # Nothing is ever quicker than simulated.
    assert ttft_s >= min(means) * (1 - TTFT_WITHIN) - TTFT_WITHIN_S, said
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if lag_s > BUSY_S or load > BUSY_LOAD:
        pytest.skip(f"the machine is too busy to compare times: load {load:.1f} a CPU, {lag_s * 1e3:.0f} ms late")
    assert ttft_s <= max(means) * (1 + TTFT_WITHIN) + TTFT_WITHIN_S + WAKINGS * lag_s, said
    assert min(goodputs) - SHARE_WITHIN <= goodput <= max(goodputs) + SHARE_WITHIN, said
    assert min(refused) - SHARE_WITHIN <= rejected <= max(refused) + SHARE_WITHIN, said


async def lived(case: Case, folder: Path) -> None:
    mesh = mesh_for(folder, case)
    try:
        lab = Lab(mesh)
        await lab.sees("toy", WORKERS)
        with Lag() as lag:
            lives = await case.live(mesh)
        agree(case, lives, lag.mean_s)
        # Nothing is left of any request, and every process leaves in order.
        await lab.close()
        mesh.stop()
    finally:
        mesh.kill()


async def test_a_slice_lives_as_it_is_simulated(tmp_path: Path) -> None:
    await lived(Case(replay.drawn(3, 60, 4.0), 6.0, 1.2, 0.6), tmp_path)


async def test_a_slice_that_the_router_places_lives_as_it_is_simulated(tmp_path: Path) -> None:
    await lived(Case(replay.drawn(3, 60, 4.0), 6.0, 1.2, 0.6, credits=True), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("credits", [False, True])
async def test_overload_lives_as_it_is_simulated(tmp_path: Path, credits: bool) -> None:
    """Long enough that the scheduler trusts its predictions, and gives up what would be late."""
    await lived(Case(replay.drawn(4, 400, 6.0), 5.0, 1.0, 0.5, credits=credits), tmp_path)


@pytest.mark.slow
async def test_a_public_trace_lives_as_it_is_simulated(tmp_path: Path) -> None:
    """Ten minutes into Mooncake's conversations, with prompts and answers a tenth as long."""
    trace = Path(__file__).parents[3] / "shared/traces/mooncake/conversation_trace.jsonl"
    if not trace.exists():
        pytest.skip(f"{trace} is not here")
    await lived(Case(replay.read(trace, 600.0, 240, 10), 4.0, 1.0, 0.4), tmp_path)
