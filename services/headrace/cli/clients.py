"""``headrace chat`` and ``headrace bench``: they ask a mesh that runs."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Annotated

import typer

from headrace.cli.options import (
    DEFAULT_TARGET,
    Authority,
    Certificate,
    ClientConfigFile,
    Json,
    Key,
    Quiet,
    Target,
    client_tls,
    interrupt,
)

app = typer.Typer()


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="What to say; '-' reads it from standard input.", show_default="a dialogue")
    ] = None,
    target: Target = DEFAULT_TARGET,
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
