"""``headrace plan``: the textbook's arithmetic, cost tables, fleets, levers, and what the simulator says to them."""

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace import capacity, plan, shapes, sim
from headrace._gateway import CostTable, cost_tables
from headrace.capacity import Serving, Targets, Traffic, fewest
from headrace.cli import app
from headrace.errors import ConfigError, HeadraceError
from headrace.shapes import Worker, find_gpu, find_shape

#: Parameters that the models' publishers name, in thousands of millions.
PUBLISHED = {
    "llama-2-7b": 6.74,
    "llama-2-70b": 68.98,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.1-405b": 405.9,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "mistral-7b": 7.25,
    "mixtral-8x7b": 46.7,
    "qwen2.5-7b": 7.62,
    "qwen2.5-72b": 72.7,
    "qwen3-8b": 8.19,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "deepseek-v3": 671,
    "smollm2-135m": 0.135,
}


def worker(model: str = "llama-3.1-8b", gpu: str = "a100-80gb", tensor_parallel: int = 1, **more: object) -> Worker:
    return Worker(find_shape(model), find_gpu(gpu), tensor_parallel, **more)  # type: ignore[arg-type]


# The textbook


def test_seventy_billion_parameters_take_140_gb_and_41_ms() -> None:
    shape = replace(find_shape("llama-3.1-70b"), parameters=70e9)
    assert shape.weight_bytes("fp16") == 140e9
    assert shapes.weights_read_s(shape, "fp16", 3.4e12) == pytest.approx(0.041, abs=0.0005)
    assert find_shape("llama-3.1-70b").weight_bytes("fp16") == pytest.approx(140e9, rel=0.01)


def test_fifty_requests_of_500_tokens_are_25000_a_second_and_some_12_workers_of_2000() -> None:
    traffic = Traffic.made_up(50, 1000, 500)
    assert traffic.rate_per_s * traffic.output_tokens == 25_000
    assert plan.divided(traffic, 2000) == (12.5, 13)
    said = asked("--model", "llama-3.1-70b", "--rate", "50", "--output-tokens", "500", "--tokens-per-s", "2000")
    assert (said["traffic"]["output_tokens_per_s"], said["workers_exact"], said["workers"]) == (25_000, 12.5, 13)
    assert said["binds"] == ["given"]


def test_a_token_of_kv_is_128_kib_of_an_8b_and_320_of_a_70b_model() -> None:
    assert find_shape("llama-3-8b").kv_bytes_per_token("fp16") == 128 * 1024
    assert find_shape("llama-3-70b").kv_bytes_per_token("fp16") == 320 * 1024
    assert find_shape("llama-3-70b").kv_bytes_per_token("fp8") == 160 * 1024
    # Latent attention keeps one vector of 512 + 64 a layer.
    assert find_shape("deepseek-v3").kv_bytes_per_token("fp16") == 61 * 576 * 2


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_parameters_are_as_published(name: str, billions: float) -> None:
    assert find_shape(name).parameters == pytest.approx(billions * 1e9, rel=0.005)


# What a step takes


def test_measured_tables_go_before_the_roofline() -> None:
    measured = worker().table
    named = json.loads(CostTable.named("a100-llama3-8b").to_json())
    assert measured["source"] == "measured: a100-llama3-8b", "3.1 has the shape of 3"
    assert {**measured, "source": ""} == {**named, "source": ""}
    assert worker("qwen2.5-7b").table["source"] == "roofline"
    assert worker(tensor_parallel=2).table["source"] == "roofline"


def test_other_precisions_scale_a_measured_table() -> None:
    plain, small = worker(gpu="h100-80gb"), worker(gpu="h100-80gb", weights="fp8", kv="fp8")
    assert small.table["source"].startswith("measured: h100-llama3.1-8b, scaled")
    # Half the bytes to read and twice the rate of arithmetic; what layers take beside stays.
    assert 0.5 < small.costs.step_s(1, 0) / plain.costs.step_s(1, 0) < 0.6
    assert 0.5 < small.costs.step_s(2048, 0) / plain.costs.step_s(2048, 0) < 0.6
    assert small.table["context_token_ms"] == plain.table["context_token_ms"] / 2
    freed = plain.shape.weight_bytes("fp8")
    assert small.table["kv_tokens"] == pytest.approx((plain.table["kv_tokens"] * 131072 + freed) / 65536, abs=1)
    # A GPU without FP8 arithmetic gains memory and reading only.
    a100 = worker(weights="fp8").costs.step_s(2048, 0) / worker().costs.step_s(2048, 0)
    assert a100 == pytest.approx(1.0, abs=0.01)


def roofline_for(table: dict[str, object]) -> CostTable:
    gpu, model = str(table["gpu"]).lower().replace(" ", "-"), str(table["model"]).lower()
    made = shapes._roofline(find_shape(model), find_gpu(gpu), int(str(table["tensor_parallel"])), "fp16", "fp16")
    return CostTable.parse(json.dumps(made))


def test_the_roofline_is_near_the_measured_tables() -> None:
    off = []
    for table in json.loads(cost_tables()):
        made = roofline_for(table)
        off += [abs(made.step_s(tokens, 0) * 1000 / ms - 1) for tokens, ms in table["step_ms"]]
    off.sort()
    assert statistics.median(off) < 0.13
    assert off[int(len(off) * 0.9)] < 0.42


def test_memory_is_counted_as_the_measured_tables_do() -> None:
    # The one's KV is from a log, the other is one of two ranks that share experts.
    others = ("rtx4090-llama3.1-8b", "rtxpro6000-qwen3-30b-a3b")
    for table in json.loads(cost_tables()):
        if table["name"] not in others:
            # Tables of Llama-2-70b have Llama-3-70b's size.
            assert roofline_for(table).kv_tokens == pytest.approx(table["kv_tokens"], rel=0.05), table["name"]


def test_few_tokens_read_few_experts() -> None:
    shape = find_shape("qwen3-30b-a3b")
    assert shape.read_bytes("fp16", 1) == pytest.approx(2 * 3.3e9, rel=0.1)
    assert shape.read_bytes("fp16", 10_000) == pytest.approx(shape.weight_bytes("fp16"), rel=0.01)
    dense = find_shape("llama-3-8b")
    assert dense.read_bytes("fp16", 1) == dense.weight_bytes("fp16")


def test_gpus_that_share_a_head_hold_its_kv_twice() -> None:
    shape = find_shape("qwen2.5-7b")
    assert (shape.kv_copies(4), shape.kv_copies(8), find_shape("deepseek-v3").kv_copies(8)) == (1, 2, 8)


# How many are enough


@given(st.integers(1, 300), st.integers(-5, 600), st.integers(1, 300))
def test_fewest_is_the_least_that_holds(least: int, guess: int, most: int) -> None:
    assert fewest(lambda count: count >= least, guess, most) == (least if least <= most else None)


def test_who_has_to_wait() -> None:
    assert capacity._erlang_c(1, 0.7) == pytest.approx(0.7)
    assert capacity._erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert capacity._erlang_c(10, 0.0) == 0.0
    assert capacity._erlang_c(10, 8.0) == pytest.approx(0.409, abs=0.001)


def test_a_fleet_holds_and_one_worker_fewer_does_not() -> None:
    for rate, targets in ((50.0, Targets(1.0, 0.1)), (200.0, Targets(0.5, 0.05)), (5.0, Targets(2.0, 0.1))):
        serving = Serving(worker(), Traffic.made_up(rate, 1000, 200), targets)
        load = serving.fewest()
        assert load is not None
        assert not load.limits
        assert load.ttft_p50_s < load.ttft_p99_s <= targets.ttft_s
        assert load.tpot_mean_s <= load.tpot_p99_s <= targets.tpot_s
        assert load.workers == 1 or serving.limits(load.workers - 1)
        carried = serving.capacity(load.workers)
        assert carried >= 1
        assert serving.limits(load.workers, carried * 1.01)
        assert not serving.limits(load.workers, carried * 0.99)


@pytest.mark.parametrize(
    ("kind", "traffic", "targets", "limit"),
    [
        (worker(), Traffic.made_up(50, 1000, 200), Targets(2.0, 0.1), "compute"),
        (worker(gpu="rtx-4090"), Traffic.made_up(20, 1000, 200), Targets(2.0, 0.1), "kv"),
        (worker(gpu="h100-80gb"), Traffic.made_up(200, 300, 500), Targets(2.0, 0.1), "batch"),
        (worker("llama-3.1-70b", tensor_parallel=4), Traffic.made_up(20, 1000, 200), Targets(1.5, 0.1), "ttft"),
        (worker("llama-3.1-70b", tensor_parallel=4), Traffic.made_up(50, 1, 500), Targets(2.0, 0.036), "tpot"),
    ],
)
def test_what_binds_is_named(kind: Worker, traffic: Traffic, targets: Targets, limit: str) -> None:
    found = plan.fleet(kind, traffic, targets)
    assert found is not None
    assert found.binds[0] == limit


def test_a_trace_is_summed_up() -> None:
    settings = {"requests": 3000, "rate_per_s": 10, "prompt_tokens": 1000, "shared_tokens": 512, "roots": 1}
    workload = sim.make_workload(settings, 1)
    traffic = Traffic.of(workload)
    assert traffic.rate_per_s == pytest.approx(10, rel=0.05)
    assert traffic.prompt_tokens == pytest.approx(1000, rel=0.05)
    assert traffic.prompt_tokens - traffic.own_tokens == pytest.approx(512, rel=0.01)
    assert traffic.output_tokens == pytest.approx(200, rel=0.05)
    made = Traffic.made_up(10, 1000, 200, 0.512)
    assert traffic.context_tokens == pytest.approx(made.context_tokens, rel=0.05)
    assert traffic.held_tokens == pytest.approx(made.held_tokens, rel=0.05)
    assert sum(share for _, share in traffic.rates) == pytest.approx(1)
    assert Traffic.of(workload, 4.0).rate_per_s == pytest.approx(40, rel=0.05)


# Levers


def lever_ratios(base: plan.Fleet, what_if: plan.WhatIf | None = None) -> dict[str, plan.Lever]:
    return {lever.name: lever for lever in plan.levers(base, Targets(2.0, 0.1), what_if or plan.WhatIf())}


def test_levers_say_what_they_change() -> None:
    base = plan.fleet(worker(gpu="h100-80gb"), Traffic.made_up(200, 1000, 200), Targets(2.0, 0.1))
    assert base is not None
    levers = lever_ratios(base)
    assert levers["response cache, 20% repeated"].cost_ratio == pytest.approx(0.8, abs=0.02)
    assert 0.45 < levers["fp8 weights"].cost_ratio < 0.8
    assert levers["prefix cache, 50% of prompts"].cost_ratio < 0.85
    assert levers["30% to llama-3.2-1b"].cost_ratio < 0.85
    assert levers["targets twice as long"].cost_ratio <= 1
    idle = levers["batch work in idle time"]
    assert (idle.workers, idle.cost_ratio) == (base.workers, pytest.approx(1 / base.capacity))
    assert "no prefix cache" not in levers


def test_the_prefix_cache_in_use_is_weighed_by_leaving_it_out() -> None:
    base = plan.fleet(worker(), Traffic.made_up(100, 1000, 200, prefix_share=0.6), Targets(2.0, 0.1))
    assert base is not None
    assert lever_ratios(base)["no prefix cache"].cost_ratio > 1.3


def test_guesses_help_where_memory_binds_and_not_where_arithmetic_does() -> None:
    sped = replace(worker("llama-3.1-70b", tensor_parallel=8), draft_tokens=3, accepted=0.6)
    assert sped.advance == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    one = Serving(replace(sped, draft_tokens=0), Traffic.made_up(0.1, 100, 200), Targets()).load(1)
    fast = Serving(sped, Traffic.made_up(0.1, 100, 200), Targets()).load(1)
    assert fast.tpot_mean_s < 0.6 * one.tpot_mean_s


def test_a_lever_that_nobody_could_serve_says_so() -> None:
    base = plan.fleet(worker("llama-3.1-70b", tensor_parallel=4), Traffic.made_up(5, 1000, 200), Targets(2.0, 0.1))
    assert base is not None
    tight = plan.Fleet(base.worker, Traffic.made_up(5, 20_000, 200, prefix_share=0.97), base.load, 1.0, ())
    assert lever_ratios(tight)["no prefix cache"].workers is None


# The simulator's word

#: Model, GPU, GPUs of a worker; requests a second, prompt, answer, share in KV; targets.
CASES = [
    ("llama-3-8b", "a100-80gb", 1, 20, 1000, 200, 0.0, 1.0, 0.1),
    ("llama-3-8b", "a100-80gb", 1, 20, 1000, 200, 0.5, 1.0, 0.1),
    ("llama-3.1-8b", "rtx-4090", 1, 20, 1000, 200, 0.0, 1.0, 0.1),
    ("llama-3.1-70b", "a100-80gb", 8, 20, 1000, 200, 0.0, 2.0, 0.1),
    ("llama-3.1-70b", "h200-141gb", 2, 20, 2000, 300, 0.0, 2.0, 0.1),
    ("qwen3-32b", "rtx-pro-6000", 2, 20, 1000, 500, 0.0, 2.0, 0.1),
    ("llama-2-7b", "a100-80gb", 1, 20, 1000, 500, 0.0, 2.0, 0.1),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} on {case[2]} {case[1]}, {case[6]:.0%} cached")
def test_what_is_planned_holds_in_the_simulator(
    case: tuple[str, str, int, float, int, int, float, float, float],
) -> None:
    model, gpu, tensor_parallel, rate, prompt, output, prefix, ttft_s, tpot_s = case
    question = plan.Question(
        model, (gpu,), tensor_parallel, rate_per_s=rate, prompt_tokens=prompt, output_tokens=output, prefix_share=prefix
    )
    workload, targets = plan.made_up_workload(question), Targets(ttft_s, tpot_s)
    found = plan.fleet(worker(model, gpu, tensor_parallel), plan._made_up(question), targets)
    assert found is not None
    tried: dict[int, plan.Simulated] = {}

    def holds(count: int) -> bool:
        tried[count] = plan.simulate(found.worker, workload, targets, count)
        return tried[count].holds

    least = fewest(holds, found.workers)
    assert least is not None
    assert abs(found.workers - least) <= max(1, round(0.05 * least))
    planned = plan.simulate(found.worker, workload, targets, found.workers)
    assert found.load.tpot_mean_s == pytest.approx(planned.tpot_mean_s, rel=0.2)
    assert found.load.ttft_p50_s == pytest.approx(planned.ttft_p50_s, rel=0.35)
    assert found.load.ttft_p99_s == pytest.approx(planned.ttft_p99_s, rel=0.35)


def fleets_that(needs: list[tuple[float, int, int]]) -> tuple[list[plan.Fleet], Callable[..., plan.Simulated]]:
    """Kinds of workers by (dollars, workers that the arithmetic says, workers that hold)."""
    base = plan.fleet(worker(), Traffic.made_up(1, 100, 100), Targets())
    assert base is not None
    fleets, least = [], {}
    for at, (usd, planned, holding) in enumerate(needs):
        gpu = replace(base.worker.gpu, name=str(at), usd_per_hour=usd)
        kind = replace(base.worker, gpu=gpu)
        fleets.append(replace(base, worker=kind, load=replace(base.load, workers=planned)))
        least[gpu.name] = holding

    def try_out(each: plan.Fleet, workers: int) -> plan.Simulated:
        return plan.Simulated(workers, 0.0, 0.0, 0.0, 0.0, workers >= least[each.worker.gpu.name])

    return fleets, try_out


KINDS = st.tuples(st.sampled_from([0.5, 1.0, 1.8, 4.0]), st.integers(1, 60), st.integers(1, 60))


@given(st.lists(KINDS, min_size=1, max_size=5))
def test_the_cheapest_of_all_kinds_is_found(needs: list[tuple[float, int, int]]) -> None:
    fleets, try_out = fleets_that(needs)
    found = plan.cheapest(fleets, try_out)
    assert found is not None
    chosen, simulated = found
    assert simulated.holds
    cost = simulated.workers * chosen.worker.usd_per_hour
    assert cost == pytest.approx(min(usd * holding for usd, _, holding in needs))


def test_none_is_the_cheapest_when_none_holds() -> None:
    fleets, _ = fleets_that([(1.0, 3, 3)])
    never = plan.Simulated(1, 0.0, 0.0, 0.0, 0.0, holds=False)
    assert plan.cheapest(fleets, lambda _fleet, _workers: never) is None


# The command


def invoke(*arguments: str) -> tuple[str, Exception | None]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.stdout, result.exception if isinstance(result.exception, Exception) else None


def asked(*arguments: str) -> dict[str, dict[str, object]]:
    text, error = invoke(*arguments, "--json")
    assert error is None
    said: dict[str, dict[str, object]] = json.loads(text)
    return said


def test_the_command_prints_a_plan_and_json() -> None:
    arguments = ("--gpu", "h100-80gb", "--gpu", "a100-80gb", "--rate", "30", "--prefix-share", ".3")
    text, error = invoke(*arguments)
    assert error is None
    for words in ("30 requests/s", "measured: a100-llama3-8b", "workers", "binds", "levers", "no prefix cache"):
        assert words in text
    said = asked(*arguments)
    assert said["gpu"] == "a100-80gb"
    assert said["simulated"] is None
    costs = [each["usd_per_hour"] for each in said["candidates"]]  # type: ignore[index]
    assert costs == sorted(costs)
    hourly, tokens = float(str(said["usd_per_hour"])), float(str(said["traffic"]["output_tokens_per_s"]))
    assert said["usd_per_1k_output_tokens"] == pytest.approx(hourly / 3600 / tokens * 1000)


def test_the_command_asks_the_simulator() -> None:
    said = asked("--gpu", "a100-80gb", "--tp", "1", "--rate", "12", "--simulate", "--price", "2.5")
    simulated = said["simulated"]
    assert simulated["holds"]
    assert simulated["workers"] == said["workers"]
    assert said["usd_per_hour"] == 2.5 * int(str(said["workers"]))


def test_the_command_plans_for_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = (f"2023-11-16 18:{at // 120:02}:{at / 2 % 60:09.6f},{500 + at},50" for at in range(600))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    said = asked("--trace", str(trace), "--load", "10")
    assert said["traffic"]["requests_per_s"] == pytest.approx(20, rel=0.05)
    assert said["traffic"]["prompt_tokens"] == pytest.approx(799.5, rel=0.01)


def test_known_models_and_gpus_are_listed() -> None:
    for option, name in (("--gpu", "h200-141gb"), ("--model", "qwen3-32b")):
        text, _ = invoke(option, "list")
        assert name in text
        text, _ = invoke(option, "list", "--json")
        assert name in json.loads(text)


def test_files_of_ones_own(tmp_path: Path) -> None:
    model, gpu = tmp_path / "config.json", tmp_path / "card.json"
    model.write_text(json.dumps({**shapes.catalogue()["models"]["llama-3-8b"], "rope_theta": 5e5, "torch_dtype": "x"}))
    gpu.write_text(json.dumps({**shapes.catalogue()["gpus"]["l40s"], "usd_per_hour": 1.25}))
    said = asked("--model", str(model), "--gpu", str(gpu), "--rate", "1")
    assert (said["model"], said["gpu"]) == ("config", "card")
    assert said["usd_per_hour"] == 1.25 * int(str(said["gpus"]))
    gpu.write_text("{}")
    _, error = invoke("--gpu", str(gpu))
    assert "GPU card: bandwidth_tb_per_s must be a number above 0 (is None)" in str(error)
    model.write_text(json.dumps({"num_hidden_layers": 0}))
    _, error = invoke("--model", str(model))
    assert "num_hidden_layers must be a number above 0 (is 0)" in str(error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "gpt"), "--model: there is no gpt; there are llama-2-7b"),
        (("--gpu", "tpu"), "--gpu: there is no tpu; there are a100-80gb"),
        (("--gpu", "none.json"), "--gpu: none.json"),
        (("--weights", "q4"), "--weights must be one of fp16, fp8, int4 (is q4)"),
        (("--kv", "int4"), "--kv must be one of fp16, fp8 (is int4)"),
        (("--model", "llama-3.1-405b", "--gpu", "l4"), "takes 812 GB in fp16, too much for 8 x l4"),
        (("--what-if", "luck=1"), "--what-if: there is no luck"),
        (("--what-if", "easy=1"), "easy must be 0 or above and below 1 (is 1)"),
        (("--what-if", "draft=2.5"), "draft must be a whole number, 0 to 16 (is 2.5)"),
        (("--small-model", "tiny"), "there is no tiny"),
        (("--ttft-target-ms", "2"), "a prompt alone takes up to"),
        (("--tpot-target-ms", "2"), "a token alone takes 8"),
        (("--trace", "/nowhere"), "--trace: /nowhere"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], words: str) -> None:
    _, error = invoke(*arguments)
    assert isinstance(error, HeadraceError)
    assert isinstance(error, ConfigError)
    assert words in str(error)
