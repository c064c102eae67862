"""``headrace sim`` and ``headrace plan``: meshes that don't run, simulated and planned."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import Json, Quiet

app = typer.Typer()


@app.command()
def sim(
    trace: Annotated[
        Path | None, typer.Option(help="Trace to replay; a folder of clients for ServeGen's.", show_default="made up")
    ] = None,
    trace_format: Annotated[
        str, typer.Option("--format", help="mooncake, azure, measured, servegen or auto.")
    ] = "auto",
    synthetic: Annotated[
        str,
        typer.Option(
            metavar="NAME=NUMBER,...",
            help="A made-up workload: requests, rate_per_s, prompt_tokens, output_tokens, sigma, roots, shared_tokens, "
            "block_tokens, tenants, batch_share, clients (with --closed-loop).",
            show_default="10,000 requests",
        ),
    ] = "",
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first so many.", show_default="all")] = None,
    duration: Annotated[float, typer.Option(min=1, help="Seconds of a ServeGen trace.")] = 3600.0,
    workers: Annotated[int, typer.Option(min=1, max=4096, help="Workers of each kind.")] = 8,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu",
            "--cost-table",
            metavar="TABLE[:WORKERS]",
            help="Cost table of the workers, by name or as a JSON file; repeated for a mixed pool. 'list' shows them.",
            show_default="a100-llama3-8b",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Placement rule; repeated, or 'all'.", show_default="marginal_delay"),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(help="Times the workload's own speed; repeated.", show_default="1"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each kind, with seeds 1, 2, ...")] = 1,
    staleness_ms: Annotated[float, typer.Option(min=0, help="Mean age of what is known of workers.")] = 0.0,
    routers: Annotated[int, typer.Option(min=1, max=64, help="Routers; each request comes to one by lot.")] = 1,
    router_delay_ms: Annotated[
        float, typer.Option(min=0, help="What a message takes between a router and the scheduler.")
    ] = 0.0,
    shares: Annotated[
        bool,
        typer.Option(
            "--shares",
            help="Routers place within lent room, as live ones do by default, or ask for each request.",
        ),
    ] = False,
    prefill_workers: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Of each kind, workers that compute prompts only, for others to answer; repeated to compare fleets.",
            show_default="0",
        ),
    ] = None,
    disaggregation: Annotated[
        str, typer.Option(help="When they are used: auto = where that delays least, always, or off.")
    ] = "auto",
    network_gbps: Annotated[float, typer.Option(min=0.001, help="Gbit/s of each worker, for KV.")] = 100.0,
    kv_blocks: Annotated[int, typer.Option(min=0, help="KV blocks of a worker; 0 = as the cost table says.")] = 0,
    host_blocks: Annotated[int, typer.Option(min=0, help="KV blocks that a worker keeps in host memory.")] = 0,
    order: Annotated[str, typer.Option(help="Whose prompt first: fcfs, edf, sjf or shortest_output.")] = "edf",
    chunk: Annotated[str, typer.Option(help="Tokens of a step, or dynamic: as many as the pace allows.")] = "dynamic",
    shed: Annotated[bool, typer.Option(help="Give up what can't have its first token in time.")] = True,
    closed_loop: Annotated[
        bool, typer.Option("--closed-loop", help="A turn of a conversation waits for the answer before it.")
    ] = False,
    ttft_target_ms: Annotated[
        float, typer.Option(min=0, help="Due time of the first token; 3 times the prompt's own if that is longer.")
    ] = 2000.0,
    tpot_target_ms: Annotated[float, typer.Option(min=0.001, help="Time between tokens.")] = 100.0,
    fail: Annotated[
        list[str] | None,
        typer.Option(metavar="AT:WORKER:DOWN", help="Lose a worker at a second, for seconds; repeated."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw goodput and TTFT as .svg or .png.", show_default="none")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Simulate a mesh on a trace: what would placement rules, fleets and loads give?

    Means over seeds come with 95% intervals. Ctrl-C ends it without results.
    """
    from headrace import sim as simulator
    from headrace.terminal import SimProgress, show_cost_tables, show_simulation

    if gpu == ["list"]:
        show_cost_tables(as_json=as_json)
        return
    policies = tuple(policy or ("marginal_delay",))
    if policies == ("all",):
        policies = simulator.all_policies()
    simulator.check_policies(policies)
    if plot is not None:
        simulator.check_plot(plot)
    workload = (
        simulator.read_trace(trace, trace_format, duration_s=duration)
        if trace is not None
        else simulator.make_workload(simulator.parse_pairs(synthetic, "--synthetic"), 1)
    )
    if requests is not None:
        workload = workload.first(requests)
    if closed_loop:
        workload = workload.with_sessions()
    groups = [
        {
            **simulator.parse_group(each, workers),
            "kv_blocks": kv_blocks,
            "host_blocks": host_blocks,
            "network_gb_per_s": network_gbps / 8,
        }
        for each in gpu or ("a100-llama3-8b",)
    ]
    settings = {
        "groups": groups,
        "order": order,
        "chunk": chunk,
        "shed": shed,
        "closed_loop": closed_loop,
        "staleness_s": staleness_ms / 1000,
        "routers": routers,
        "router_delay_s": router_delay_ms / 1000,
        "ttft_target_s": ttft_target_ms / 1000,
        "tpot_target_s": tpot_target_ms / 1000,
        "faults": [simulator.parse_fault(each) for each in fail or ()],
        "scheduler": {"disaggregation": disaggregation, "credits": shares},
    }
    plan = simulator.Plan(
        workload,
        policies,
        tuple(load or (1.0,)),
        tuple(range(1, seeds + 1)),
        settings,
        prefill_workers=tuple(prefill_workers or (0,)),
    )
    try:
        with SimProgress(plan, quiet=quiet or as_json) as progress:
            results = simulator.run(plan, progress, keep_ttft=plot is not None)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if plot is not None:
        simulator.plot(results, plot)
    if as_json:
        sys.stdout.write(json.dumps(results.to_dict()) + "\n")
    else:
        show_simulation(results)


@app.command()
def plan(
    model: Annotated[
        str, typer.Option(help="A known model, or a file like its config.json. 'list' shows the known ones.")
    ] = "llama-3.1-8b",
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            help="A known GPU, or a .json file with its figures; repeated, the cheapest is planned with. 'list' shows "
            "the known ones.",
            show_default="h100-80gb",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", "--tp", min=0, max=64, help="GPUs of a worker; 0 = the cheapest.")
    ] = 0,
    weights: Annotated[str, typer.Option(help="fp16, fp8 or int4.")] = "fp16",
    kv: Annotated[str, typer.Option(help="KV: fp16 or fp8.")] = "fp16",
    rate: Annotated[float, typer.Option(min=1e-6, help="Requests a second, arriving at random.")] = 10.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean length of a prompt.")] = 1000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean length of an answer.")] = 200,
    prefix_share: Annotated[float, typer.Option(min=0, max=0.999, help="Share of a prompt that is in KV.")] = 0.0,
    sigma: Annotated[float, typer.Option(min=0, max=2, help="Deviation of the lengths' logarithms.")] = 0.8,
    trace: Annotated[
        Path | None, typer.Option(help="Trace to plan for, in place of such traffic.", show_default="none")
    ] = None,
    trace_format: Annotated[
        str, typer.Option("--format", help="mooncake, azure, measured, servegen or auto.")
    ] = "auto",
    load: Annotated[float, typer.Option(min=1e-6, help="Times the trace's own speed.")] = 1.0,
    ttft_target_ms: Annotated[float, typer.Option(min=1, help="First token, for 99 requests in 100.")] = 2000.0,
    tpot_target_ms: Annotated[float, typer.Option(min=0.1, help="Between tokens, for 99 requests in 100.")] = 100.0,
    max_batch: Annotated[int, typer.Option(min=1, max=4096, help="Answers that a worker has under way at most.")] = 256,
    price: Annotated[
        float | None, typer.Option(min=0.0001, help="Dollars of a GPU-hour.", show_default="list prices")
    ] = None,
    worker_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            "--tokens-per-s", min=0.001, help="Output of a worker, where it is known.", show_default="by arithmetic"
        ),
    ] = None,
    what_if: Annotated[
        str,
        typer.Option(
            metavar="NAME=NUMBER,...",
            help="What levers are tried with: repeats, prefix, easy, draft, accepted.",
            show_default="repeats=.2,prefix=.5,easy=.3,draft=3,accepted=.6",
        ),
    ] = "",
    small_model: Annotated[
        str, typer.Option(help="What takes the easy requests.", show_default="a known one, a quarter of the size")
    ] = "",
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Look in the simulator for the cheapest fleet that keeps to the targets.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Plan a fleet: memory, concurrency, workers, dollars, what limits them, and what would help.

    Times come from a measured cost table where there is one for the model and GPU, else from the roofline.
    """
    from headrace import plan as planning
    from headrace.terminal import SearchProgress, show_catalogue, show_plan

    if model == "list" or gpu == ["list"]:
        show_catalogue("models" if model == "list" else "gpus", as_json=as_json)
        return
    question = planning.Question(
        model=model,
        gpus=tuple(gpu or ("h100-80gb",)),
        tensor_parallel=tensor_parallel,
        weights=weights,
        kv=kv,
        rate_per_s=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefix_share=prefix_share,
        sigma=sigma,
        trace=trace,
        trace_format=trace_format,
        load=load,
        ttft_target_s=ttft_target_ms / 1000,
        tpot_target_s=tpot_target_ms / 1000,
        max_batch=max_batch,
        usd_per_gpu_hour=price,
        worker_tokens_per_s=worker_tokens_per_s,
        what_if=what_if,
        small_model=small_model,
    )
    with SearchProgress(quiet=quiet or as_json or not simulate) as tried:
        answer = planning.answer(question, tried if simulate else None)
    if as_json:
        sys.stdout.write(json.dumps(answer.to_dict()) + "\n")
    else:
        show_plan(answer)
