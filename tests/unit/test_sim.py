"""``headrace sim``: runs over policies, loads and seeds, what they sum up to, and what the command refuses."""

import gzip
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace import sim
from headrace._gateway import CostTable, cost_tables
from headrace.cli import app
from headrace.errors import ConfigError, HeadraceError
from headrace.worker.timing import Timing

SMALL = {"requests": 300, "rate_per_s": 30}


def small_plan(**changes: object) -> sim.Plan:
    fields: dict[str, object] = {
        "workload": sim.make_workload(SMALL, 1),
        "policies": ("marginal_delay", "round_robin"),
        "loads": (1.0, 2.0),
        "seeds": (1, 2, 3),
        "settings": {"groups": [{"workers": 2}]},
    }
    return sim.Plan(**(fields | changes))  # type: ignore[arg-type]


def test_intervals_are_students() -> None:
    interval = sim.Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half == pytest.approx(4.303 / math.sqrt(3))
    assert math.isnan(sim.Interval.of([1.0]).half)


def test_the_knee_is_where_goodput_falls_through() -> None:
    knee = sim.knee([1.0, 2.0, 3.0], [[1.0, 1.0], [0.95, 0.91], [0.85, 0.81]])
    assert knee is not None
    assert knee.mean == pytest.approx((2.5 + 2.1) / 2)
    assert sim.knee([1.0, 2.0], [[1.0, 1.0], [0.8, 0.95]]) is None, "a seed doesn't cross"


def test_every_policy_load_and_seed_is_run_and_told() -> None:
    plan = small_plan()
    told: list[tuple[int, int]] = []
    results = sim.run(plan, lambda ended, everything: told.append((ended, everything)))
    assert [(point.policy, point.load) for point in results.points] == [
        ("marginal_delay", 1.0),
        ("marginal_delay", 2.0),
        ("round_robin", 1.0),
        ("round_robin", 2.0),
    ]
    assert told[-1] == (plan.runs * 300, plan.runs * 300)
    assert told == sorted(told)
    assert all(0 < point.figures["goodput"].mean <= 1 for point in results.points)
    again = sim.run(plan)
    assert json.dumps(again.to_dict()) == json.dumps(results.to_dict())


def test_fleets_with_and_without_workers_for_prompts_compare_in_one_run() -> None:
    plan = small_plan(
        workload=sim.make_workload({**SMALL, "prompt_tokens": 4000}, 1),
        policies=("marginal_delay",),
        loads=(1.0,),
        prefill_workers=(0, 1),
        settings={"groups": [{"workers": 4}], "scheduler": {"disaggregation": "always"}},
    )
    together, apart = sim.run(plan).points
    assert (together.policy, apart.policy) == ("marginal_delay 0p", "marginal_delay 1p")
    assert together.figures["parted"].mean == 0
    assert 0 < apart.figures["parted"].mean <= 300
    assert apart.figures["tpot_p99_s"].mean < together.figures["tpot_p99_s"].mean


def test_routers_that_place_by_themselves_are_compared_by_settings() -> None:
    known = {"groups": [{"workers": 4}], "staleness_s": 0.1, "router_delay_s": 0.002}
    lent = {**known, "routers": 3, "scheduler": {"credits": True}}
    plans = [small_plan(policies=("marginal_delay",), loads=(1.0,), settings=each) for each in (known, lent)]
    asked, placed = (sim.run(plan).points[0] for plan in plans)
    assert asked.figures["unasked"].mean == 0
    assert placed.figures["unasked"].mean > 0.5
    assert placed.figures["goodput"].mean >= asked.figures["goodput"].mean - 0.02


def test_progress_may_end_the_runs() -> None:
    class Enough(Exception):
        pass

    def stop(_ended: int, _all: int) -> None:
        raise Enough

    with pytest.raises(Enough):
        sim.run(small_plan(), stop)


def test_wrong_settings_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"speed must be a number above 0 \(is 0\)"):
        sim.run(small_plan(loads=(0.0,)))
    with pytest.raises(ConfigError, match="no requests"):
        sim.run(small_plan(workload=sim.make_workload(SMALL, 1).first(0)))
    with pytest.raises(ConfigError, match="sigma"):
        sim.make_workload({"sigma": -1}, 1)
    with pytest.raises(ConfigError, match="unknown field `speed`"):
        sim.make_workload({"speed": 1}, 1)


def test_formats_of_traces_are_told_apart(tmp_path: Path) -> None:
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text('{"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [0]}\n')
    azure = tmp_path / "a.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,374,44\n")
    measured = tmp_path / "r.jsonl"
    measured.write_text('{"request_id": "b", "input_toks": 5, "output_toks": 6, "arrival_time": 17.5}\n')
    folder = tmp_path / "pool"
    folder.mkdir()
    (folder / "chunk-3-trace.csv").write_text("0,2.0,1.0,Gamma,1,1\n")
    lengths = json.dumps({"0": {"input_tokens": "{7: 1.0}", "output_tokens": "{3: 1.0}"}})
    (folder / "chunk-3-dataset.json.gz").write_bytes(gzip.compress(lengths.encode()))
    assert sim.read_trace(mooncake).block_tokens == 512
    assert len(sim.read_trace(azure)) == len(sim.read_trace(measured)) == 1
    servegen = sim.read_trace(folder, duration_s=100)
    assert 150 < len(servegen) < 250
    assert servegen.tenants == ["chunk-3"]
    with pytest.raises(ConfigError, match="line 1"):
        sim.read_trace(azure, "mooncake")
    with pytest.raises(ConfigError, match="No such file"):
        sim.read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no chunk"):
        sim.read_trace(tmp_path)


def test_cost_tables_are_the_simulators() -> None:
    names = [table["name"] for table in json.loads(cost_tables())]
    assert "a100-llama3-8b" in names
    table = CostTable.named("a100-llama3-8b")
    assert table.step_s(8, 1000) == pytest.approx((10 + 1000 * 9.36e-5) / 1000)
    # A chunk of 248 behind 512, beside eight that decode.
    expected_ms = 19.6 + 1000 * 9.36e-5 + 3.36e-6 * 248 * (512 + 124)
    assert table.step_s(8, 1000, [(248, 512)]) == pytest.approx(expected_ms / 1000)
    assert CostTable.parse(table.to_json()).step_s(3, 10) == table.step_s(3, 10)
    with pytest.raises(ValueError, match="abacus"):
        CostTable.named("abacus")


def test_the_sim_engine_waits_what_the_simulator_adds() -> None:
    table = CostTable.named("a100-llama3-8b")
    timing = Timing(table=table)
    assert timing.step(8, 1000, [(248, 512)]) == table.step_s(8, 1000, [(248, 512)])
    # One request alone, in steps as the worker makes them: first token and end as the simulator has them.
    alone = {"requests": 1, "sigma": 0, "prompt_tokens": 400, "shared_tokens": 0, "output_tokens": 9}
    workload = sim.make_workload(alone, 1)
    outcome = sim.run_one(workload, {"chunk": "300"})
    clock_s = 0.0
    for chunk in ((300, 0), (100, 300)):
        clock_s += timing.step(0, 0, [chunk])
    assert outcome.column("ttft_s") == [pytest.approx(clock_s)]
    for said in range(1, 9):
        clock_s += timing.step(1, 400 + said, [])
    finished_s = outcome.column("finished_s")[0] - outcome.column("arrival_s")[0]
    assert finished_s == pytest.approx(clock_s)


def test_without_a_table_the_sim_engine_is_linear() -> None:
    timing = Timing(prefill_tokens_per_s=1000.0, step_s=0.01, step_s_per_sequence=0.001)
    assert timing.step(0, 0, [(50, 0), (50, 7)]) == pytest.approx(0.1)
    assert timing.step(3, 900, []) == pytest.approx(0.012)


def invoke(*arguments: str) -> tuple[int, str, Exception | None]:
    result = CliRunner().invoke(app, ["sim", *arguments])
    error = result.exception if isinstance(result.exception, Exception) else None
    return result.exit_code, result.stdout, error


def test_the_command_prints_points_and_json() -> None:
    arguments = (
        "--synthetic",
        "requests=200,rate_per_s=20",
        "--workers",
        "2",
        "--seeds",
        "2",
        "--load",
        "1",
        "--load",
        "3",
    )
    code, text, _ = invoke(*arguments)
    assert code == 0
    assert "marginal_delay" in text
    assert "±" in text
    code, text, _ = invoke(*arguments, "--json", "--fail", "1:0:2", "--gpu", "h100-llama3.1-8b:1", "--closed-loop")
    assert code == 0
    results = json.loads(text)
    assert [point["load"] for point in results["points"]] == [1.0, 3.0]
    assert results["points"][0]["goodput"]["half"] is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "best"), "--policy: there is no best"),
        (("--gpu", "abacus"), "no cost table abacus"),
        (("--gpu", "none.json"), "No such file"),
        (("--fail", "soon"), "AT:WORKER:DOWN"),
        (("--fail", "1:99:1"), "faults: worker must be one of the workers"),
        (("--synthetic", "requests"), "must be NAME=NUMBER"),
        (("--order", "lifo"), "order must be fcfs, edf"),
        (("--chunk", "7"), "chunk must be"),
        (("--plot", "picture.bmp"), "must end with .svg or .png"),
        (("--trace", "/nowhere"), "--trace: /nowhere"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], words: str) -> None:
    _, _, error = invoke(*arguments)
    assert isinstance(error, HeadraceError)
    assert words in str(error)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "goodput.svg"
    sim.plot(sim.run(small_plan(), keep_ttft=True), target)
    assert "<svg" in target.read_text()
    with pytest.raises(ConfigError, match="--plot"):
        sim.plot(sim.run(small_plan()), tmp_path / "no" / "folder.svg")


def test_ctrl_c_ends_a_run_quietly() -> None:
    # Seconds of work; the interrupt comes when the child says that it begins.
    script = (
        "import sys\nfrom headrace import sim\nfrom headrace._gateway import simulate\n"
        "workload = sim.make_workload({'requests': 400_000, 'rate_per_s': 100}, 1)\n"
        "print('ready', flush=True)\n"
        "try:\n    simulate(workload, '{}', None)\nexcept KeyboardInterrupt:\n    sys.exit(42)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) in (42, -signal.SIGINT, 130)
    process.stdout.close()
