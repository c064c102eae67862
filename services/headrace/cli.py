"""The command line.

``headrace router | scheduler | cache | worker`` runs one service, ``headrace up`` all of them on this machine;
``chat``, ``bench`` and ``batch`` (``cli_batches.py``) are clients; ``sim`` simulates a mesh, ``plan`` plans one;
``route`` (``cli_routes.py``) is about names with several variants;
``tenants`` says who may ask; ``config`` shows the configuration.

A user's mistake is one red line and exit code 2, never a traceback; what fails for other reasons ends with 1. Heavy
modules are imported by the command that needs them, so that ``--help`` is quick. What this module leaves to others: all
work.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import json
import platform
import random
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace import __version__, cli_batches, cli_routes

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.ledger.store import Store
    from headrace.tls import ClientTls

app = typer.Typer(
    help="An LLM serving mesh: one door for many engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="HEADRACE_CONFIG", help="TOML file that configures all services.", show_default="none"
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key. May be repeated.")
]
ClientConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="HEADRACE_CONFIG", help="The mesh's TOML file, for its [tls].", show_default="none"
    ),
]
Authority = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", help="TLS: who may have issued the server's certificate.", show_default="public ones"
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option("--cert", metavar="FILE", help="TLS: certificate to show to the server.", show_default="none"),
]
Key = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="TLS: its private key.", show_default="the --cert file")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what went wrong.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="headrace")
    except Exception as error:
        sys.exit(_failed(error))


def _failed(error: Exception) -> int:
    """Show an error that is the user's or the world's; anything else is a bug, and goes on as one."""
    from headrace.client import ClientError
    from headrace.errors import ConfigError, HeadraceError
    from headrace.terminal import show_error

    if not isinstance(error, HeadraceError):
        raise error
    show_error(str(error), getattr(error, "details", ()))
    mistakes = ("invalid_argument", "model_not_found", "context_length_exceeded", "unsupported")
    if isinstance(error, ClientError):
        return 2 if error.code in mistakes else 1
    return 2 if isinstance(error, ConfigError) else 1


def _load(path: Path | None, overrides: list[str] | None) -> Config:
    from headrace import config

    return config.load(path, overrides or ())


def client_tls(
    target: str, config: Path | None, authority: Path | None, certificate: Path | None, key: Path | None
) -> ClientTls | None:
    """How to speak TLS at the target, unless its scheme says plain text; None when nothing asks for it."""
    from headrace.errors import ConfigError
    from headrace.tls import ClientTls

    if key is not None and certificate is None:
        raise ConfigError("--key: needs --cert")
    given = authority is not None or certificate is not None
    if given and target.startswith(("grpc://", "http://")):
        raise ConfigError(f"--target: {target} is plain text, without TLS; use grpcs:// or https://")
    configured = ClientTls.of(_load(config, None).tls) if config is not None else None
    return (configured or ClientTls()).but(authority, certificate, key) if given else configured


@app.command()
def up(
    config: ConfigFile = None,
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(help="Workers to start.")] = 1,
    prefill_workers: Annotated[
        int, typer.Option(help="Workers beside those, that only compute long prompts, for the others to answer.")
    ] = 0,
    engine: Annotated[
        str,
        typer.Option(
            help="llama_cpp, tensorrt_llm, trtllm_grpc, openengine or sim.", show_default="the configured one"
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(help="A configured model's name, or a .gguf file or folder.", show_default="the configured one"),
    ] = "",
    http_port: Annotated[
        int | None, typer.Option(help="Port of the OpenAI HTTP API; 0 = any.", show_default="8080")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the native gRPC API; 0 = any.", show_default="8081")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for the services' logs.", show_default="temporary, kept after trouble")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Start all services on this machine, and stop them on Ctrl-C.

    With --json one line is printed when all is up. Ports other than the router's are chosen by the system unless they
    are configured.
    """
    from headrace import up as one_box
    from headrace.terminal import UpView

    effective = one_box.effective_config(
        config, overrides or (), model=model, engine=engine, http_port=http_port, grpc_port=grpc_port
    )
    plan = one_box.Plan(effective, workers=workers, prefill_workers=prefill_workers, log_dir=log_dir)
    view = UpView(quiet=quiet or as_json, json_line=(lambda mesh: json.dumps(mesh.to_dict())) if as_json else None)
    try:
        asyncio.run(one_box.run(plan, view))
    finally:
        view.close()


def _serve(service: str, effective: Config, **more: Any) -> None:
    """Run a service until it has drained."""
    from headrace.errors import HeadraceError

    try:
        run = importlib.import_module(f"headrace.{service}.service").run
    except ImportError as error:
        if error.name == "headrace._gateway":
            raise HeadraceError("the extension headrace._gateway is not built; install the package") from error
        raise
    if inspect.iscoroutinefunction(run):
        asyncio.run(run(effective, **more))
    else:
        run(effective, **more)


@app.command()
def router(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the router: clients come in here. Changes of [[aliases]] in the file come into force while it serves."""
    again = None if config is None else (config, lambda: _load(config, overrides))
    _serve("router", _load(config, overrides), again=again)


@app.command()
def scheduler(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the scheduler: who runs it, and when?"""
    _serve("scheduler", _load(config, overrides))


@app.command()
def cache(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the cache: what do we already have?"""
    _serve("cache", _load(config, overrides))


@app.command()
def worker(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run a worker: one engine and its batch."""
    from headrace.process import ask_for_huge_pages

    effective = _load(config, overrides)
    if effective.worker.engine == "llama_cpp":
        ask_for_huge_pages()
    _serve("worker", effective)


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="What to say; '-' reads it from standard input.", show_default="a dialogue")
    ] = None,
    target: Annotated[
        str, typer.Option(help="The router's native gRPC API; grpcs://HOST:PORT with TLS.")
    ] = "127.0.0.1:8081",
    model: Annotated[str, typer.Option(help="Model to ask.", show_default="the first listed")] = "",
    system: Annotated[str, typer.Option(help="System message.", show_default="none")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer.", show_default="what the context leaves")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 = always the likeliest.", show_default="the model's")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats an answer.", show_default="random")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Tell tokens and times after each answer.")] = False,
    config: ClientConfigFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: Key = None,
) -> None:
    """Ask a model, and see the answer as it is made.

    Without a prompt this is a dialogue, or, when standard input is a pipe or a file, the answer to what that says.
    """
    from headrace import chat as talking
    from headrace.client import ClientError, grpc_target
    from headrace.config import split_address
    from headrace.errors import ConfigError

    target, tls = grpc_target(target, client_tls(target, config, authority, certificate, key))
    split_address(target, "--target")
    settings = talking.Settings(target, model, system, max_tokens, temperature, seed, stats, tls)
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = _standard_input()
    try:
        if prompt is None:
            code = talking.run_dialogue(settings)
        elif prompt.strip():
            code = talking.run_once(settings, prompt)
        else:
            raise ConfigError("the prompt is empty")
    except ClientError as error:
        error.args = (talking.describe(error, target),)
        raise
    raise typer.Exit(code)


def _standard_input() -> str:
    from headrace.errors import ConfigError

    # Not sys.stdin's own decoding, which lets wrong bytes through in some locales.
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not text: {error}") from error


@app.command()
def bench(
    target: Annotated[
        str, typer.Option(help="grpc://HOST:PORT or http://HOST:PORT; with TLS grpcs or https.")
    ] = "grpc://127.0.0.1:8081",
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at once; with --rate the most.", show_default="8, or 4096")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests to send.", show_default="16 x concurrency")] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds to go on sending.", show_default="none")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of a prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 64,
    shared_prefix: Annotated[int, typer.Option(help="So many tokens at the prompt's beginning are shared.")] = 0,
    shared_prefixes: Annotated[int, typer.Option(help="Different shared prefixes; each request draws one.")] = 1,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second, arriving at random (open loop).", show_default="closed loop"),
    ] = None,
    model: Annotated[str, typer.Option(help="Model to ask.", show_default="the first listed")] = "",
    seed: Annotated[int | None, typer.Option(help="Draws prompts and arrivals.", show_default="random")] = None,
    warmup: Annotated[int | None, typer.Option(help="Requests before measuring.", show_default="one a client")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy.", show_default="the model's")] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a chat message.")] = False,
    request_class: Annotated[
        str, typer.Option("--class", help="interactive, standard or batch.", show_default="the router's")
    ] = "",
    use_cache: Annotated[bool, typer.Option("--use-cache", help="Let the response cache answer.")] = False,
    no_prefix_reuse: Annotated[
        bool,
        typer.Option("--no-prefix-reuse", help="Compute each prompt anew (headrace's routers; others may ignore it)."),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is given up.")] = 600.0,
    config: ClientConfigFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: Key = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Load a router (or any OpenAI-shaped server) and measure it. Ctrl-C reports what was measured so far."""
    from headrace import bench as load
    from headrace.terminal import BenchProgress, show_report

    plan = load.Plan(
        target=target,
        concurrency=concurrency,
        requests=requests,
        duration_s=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared_prefix=shared_prefix,
        shared_prefixes=shared_prefixes,
        rate=rate,
        model=model,
        # Not always the same: the second run would find the first one's prompts in the prefix cache.
        seed=random.randrange(2**31) if seed is None else seed,
        warmup=warmup,
        chat=as_chat,
        temperature=temperature,
        request_class=request_class,
        use_cache=use_cache,
        reuse_prefix=not no_prefix_reuse,
        timeout_s=timeout,
        tls=client_tls(target, config, authority, certificate, key),
    )

    async def run() -> load.Report:
        stop = asyncio.Event()
        with interrupt(stop), BenchProgress(plan, quiet=quiet) as progress:
            return await load.run(plan, stop=stop, progress=progress)

    report = asyncio.run(run())
    if as_json:
        sys.stdout.write(json.dumps(report.to_dict()) + "\n")
    else:
        show_report(report)
    if report.interrupted:
        raise typer.Exit(130)
    raise typer.Exit(0 if report.succeeded else 1)


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
            "block_tokens, tenants, batch_share.",
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
        "ttft_target_s": ttft_target_ms / 1000,
        "tpot_target_s": tpot_target_ms / 1000,
        "faults": [simulator.parse_fault(each) for each in fail or ()],
        "scheduler": {"disaggregation": disaggregation},
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


app.add_typer(cli_batches.app, name="batch")
app.add_typer(cli_routes.app, name="route")

tenants_app = typer.Typer(help="Who may ask: tenants and their API keys.", no_args_is_help=True)
app.add_typer(tenants_app, name="tenants")

TenantName = Annotated[str, typer.Argument(help="The tenant.", metavar="NAME")]
TenantsFile = Annotated[
    Path | None, typer.Option("--file", help="The tenants' file.", show_default="[tenants] file of --config")
]
TenantModels = Annotated[
    list[str] | None, typer.Option("--model", help="A model that it may use. May be repeated.", show_default="all")
]
TenantClasses = Annotated[
    list[str] | None, typer.Option("--class", help="A class that it may use. May be repeated.", show_default="all")
]


TokensPerMinute = Annotated[
    int | None,
    typer.Option("--tokens-per-minute", help="Of prompts and answers; 0 = no limit.", min=0, show_default="as it is"),
]
TokensPerDay = Annotated[int | None, typer.Option("--tokens-per-day", help="UTC.", min=0, show_default="as it is")]
DollarsPerMonth = Annotated[
    float | None, typer.Option("--dollars-per-month", help="UTC.", min=0, show_default="as it is")
]
ConcurrentRequests = Annotated[
    int | None,
    typer.Option("--concurrent-requests", help="That wait or run.", min=0, show_default="as it is"),
]
SessionTokens = Annotated[
    int | None,
    typer.Option("--session-tokens", help="Of all requests with one session id.", min=0, show_default="as it is"),
]
Weight = Annotated[
    float | None,
    typer.Option("--weight", help="Share of capacity while others wait too.", show_default="as it is, 1 at first"),
]
Roles = Annotated[
    list[str] | None,
    typer.Option("--role", help="user, or admin: sees everybody's usage. May be repeated.", show_default="user"),
]


def _named(**limits: float | None) -> dict[str, float]:
    return {name: limit for name, limit in limits.items() if limit is not None}


def _tenants_file(file: Path | None, config: Path | None) -> Path:
    from headrace.errors import ConfigError

    if file is None:
        named = _load(config, None).tenants.file
        if not named:
            raise ConfigError("tenants.file is not set: give --file, or --config with [tenants] file")
        file = Path(named)
    return file


def _show_key(name: str, key: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"tenant": name, "key": key}) + "\n")
    else:
        sys.stdout.write(f"{key}\n")
        sys.stderr.write("This is the only time that the key is shown.\n")


@tenants_app.command("add")
def add_tenant(
    name: TenantName,
    models: TenantModels = None,
    classes: TenantClasses = None,
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Its KV is reused by others who share, and theirs by it.")
    ] = False,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    dollars_per_month: DollarsPerMonth = None,
    concurrent_requests: ConcurrentRequests = None,
    session_tokens: SessionTokens = None,
    weight: Weight = None,
    roles: Roles = None,
    file: TenantsFile = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Add a tenant, and print its API key."""
    from headrace import tenants

    with tenants.changing(_tenants_file(file, config)) as known:
        key = tenants.add(
            known,
            name,
            models=models or (),
            classes=classes or (),
            shares_prefixes=share_prefixes,
            limits=_named(
                tokens_per_minute=tokens_per_minute,
                tokens_per_day=tokens_per_day,
                dollars_per_month=dollars_per_month,
                concurrent_requests=concurrent_requests,
                session_tokens=session_tokens,
            ),
            weight=1.0 if weight is None else weight,
            roles=roles or ("user",),
            now_s=time.time(),
            token=secrets.token_hex,
        )
    _show_key(name, key, as_json=as_json)


@tenants_app.command("list")
def list_tenants(file: TenantsFile = None, config: ConfigFile = None, as_json: Json = False) -> None:
    """List tenants, what they may do and spend, what they have spent, and their keys' ids."""
    from headrace import tenants
    from headrace.errors import ConfigError
    from headrace.ledger import usage
    from headrace.terminal import show_tenants

    known = tenants.read(_tenants_file(file, config))
    spent: dict[str, dict[str, float]] = {}
    # Without a ledger nothing is known to be spent.
    with contextlib.suppress(ConfigError), _ledger(config) as store:
        spent = {name: usage.spent(store, name, time.time()) for name in known}
    if as_json:
        listed = [{"tenant": name} | dataclasses.asdict(each) for name, each in known.items()]
        for each in listed:
            each["keys"] = [{name: value for name, value in key.items() if name != "sha256"} for key in each["keys"]]
            each["spent"] = spent.get(each["tenant"])
        sys.stdout.write(json.dumps(listed) + "\n")
    else:
        show_tenants(known, spent)


@contextlib.contextmanager
def _ledger(config: Path | None) -> Iterator[Store]:
    """The ledger, to be read. Raises ConfigError, also for what goes wrong with it."""
    from headrace.errors import ConfigError
    from headrace.ledger.store import Store, StoreError, database_of

    database = database_of(_load(config, None).ledger)
    if not database:
        raise ConfigError("ledger.database is empty: no ledger is kept")
    store = Store.open(database, "", write=False)
    try:
        yield store
    except StoreError as error:
        raise ConfigError(f"the ledger cannot be read: {error}") from error
    finally:
        store.close()


@app.command("usage")
def show_usage(
    by: Annotated[
        str, typer.Option(help="What to add up by, of tenant, model, variant, class, outcome, session, day.")
    ] = "tenant,variant,day",
    tenant: Annotated[str | None, typer.Option(help="Only this one's.", show_default="everybody's")] = None,
    since: Annotated[
        str | None, typer.Option(help="From this day on (2026-11-30, UTC).", show_default="the first")
    ] = None,
    until: Annotated[str | None, typer.Option(help="To the end of this day.", show_default="today")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV.")] = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Show what was used, what it cost and what was saved, from the ledger of --config."""
    from headrace.ledger import usage
    from headrace.terminal import show_usage as show

    question = usage.Question(
        [each.strip() for each in by.split(",") if each.strip()],
        tenant,
        None if since is None else usage.day_s(since),
        None if until is None else usage.day_s(until, after=True),
    )
    with _ledger(config) as store:
        answer = usage.ask(store, question)
    if as_json:
        sys.stdout.write(json.dumps(answer.to_dict()) + "\n")
    elif as_csv:
        sys.stdout.write(answer.to_csv())
    else:
        show(answer)


@tenants_app.command("limit")
def limit_tenant(
    name: TenantName,
    models: TenantModels = None,
    classes: TenantClasses = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="Any model.")] = False,
    all_classes: Annotated[bool, typer.Option("--all-classes", help="Any class.")] = False,
    share_prefixes: Annotated[
        bool | None,
        typer.Option("--share-prefixes/--own-prefixes", help="Reuse others' KV, too.", show_default="as it is"),
    ] = None,
    quality_floor: Annotated[
        float | None,
        typer.Option(help="Least agreement with a model's best variant, 0 to 1.", show_default="as it is"),
    ] = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    dollars_per_month: DollarsPerMonth = None,
    concurrent_requests: ConcurrentRequests = None,
    session_tokens: SessionTokens = None,
    weight: Weight = None,
    roles: Roles = None,
    file: TenantsFile = None,
    config: ConfigFile = None,
) -> None:
    """Change what a tenant may do and spend. What isn't named stays as it is; a limit of 0 is none."""
    from headrace import tenants

    with tenants.changing(_tenants_file(file, config)) as known:
        tenants.limit(
            known,
            name,
            models=() if all_models else models or None,
            classes=() if all_classes else classes or None,
            shares_prefixes=share_prefixes,
            quality_floor=quality_floor,
            limits=_named(
                tokens_per_minute=tokens_per_minute,
                tokens_per_day=tokens_per_day,
                dollars_per_month=dollars_per_month,
                concurrent_requests=concurrent_requests,
                session_tokens=session_tokens,
            ),
            weight=weight,
            roles=roles,
        )


@tenants_app.command("rotate")
def rotate_key(
    name: TenantName,
    grace: Annotated[float, typer.Option(help="Seconds for which the former keys go on.", min=0)] = 86_400.0,
    file: TenantsFile = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Give a tenant another API key, and print it."""
    from headrace import tenants

    with tenants.changing(_tenants_file(file, config)) as known:
        key = tenants.rotate(known, name, grace_s=grace, now_s=time.time(), token=secrets.token_hex)
    _show_key(name, key, as_json=as_json)


@tenants_app.command("revoke")
def revoke_key(
    name: TenantName,
    key_id: Annotated[
        str | None, typer.Option("--key", help="Only the key of this id.", show_default="the tenant and all its keys")
    ] = None,
    file: TenantsFile = None,
    config: ConfigFile = None,
) -> None:
    """Take a tenant's key away, or the tenant with all its keys. Routers follow within a second or two."""
    from headrace import tenants

    with tenants.changing(_tenants_file(file, config)) as known:
        count = tenants.revoke(known, name, key_id)
    sys.stderr.write(f"{count} key{'' if count == 1 else 's'} revoked\n")


@contextlib.contextmanager
def interrupt(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C sets the event; the second is as usual."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@app.command("config")
def show_config(config: ConfigFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the effective configuration as TOML, each key with its meaning. It can be read back with --config."""
    from headrace import config as configuration

    effective = _load(config, overrides)
    if as_json:
        sys.stdout.write(json.dumps(configuration.to_dict(effective), indent=2) + "\n")
    else:
        sys.stdout.write(configuration.to_toml(effective))


@app.command()
def version(as_json: Json = False) -> None:
    """Print versions of this package and of what it stands on."""
    versions: dict[str, Any] = {"headrace": __version__, "python": platform.python_version()}
    for package in ("grpcio", "protobuf", "llama-cpp-python"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if as_json:
        sys.stdout.write(json.dumps(versions) + "\n")
    else:
        sys.stdout.write("".join(f"{name} {value}\n" for name, value in versions.items()))
