"""``headrace batch run | list | show | cancel``: the options, and what the exit code says.

0: all lines were answered; 1: not all; 2: a user's mistake; 130: ended by Ctrl-C.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from headrace.batches.client import BatchClient

app = typer.Typer(help="Batch work: files of requests, answered behind everything else.", no_args_is_help=True)

BatchId = Annotated[str, typer.Argument(help="The batch.", metavar="ID")]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where answers go, a line each.")]
Errors = Annotated[
    Path | None, typer.Option("--errors", metavar="FILE", help="Where lines go that failed.", show_default="nowhere")
]


def _with_client(
    target: str,
    config: Path | None,
    authority: Path | None,
    certificate: Path | None,
    key: Path | None,
    work: Callable[[BatchClient], Awaitable[Any]],
) -> Any:
    """Do it with a client at the target. Raises ClientError in words that say what to do."""
    from headrace import chat
    from headrace.batches.client import BatchClient
    from headrace.client import Client, ClientError, grpc_target
    from headrace.config import split_address

    address, tls = grpc_target(target, client_tls(target, config, authority, certificate, key))
    split_address(address, "--target")

    async def do() -> Any:
        async with Client(address, tls=tls) as client:
            return await work(BatchClient(client))

    try:
        return asyncio.run(do())
    except ClientError as error:
        error.args = (chat.describe(error, address),)
        raise


@app.command("run")
def run_batch(
    file: Annotated[Path, typer.Argument(help="Requests in OpenAI's JSONL form.", metavar="FILE")],
    output: Output = None,
    errors: Errors = None,
    endpoint: Annotated[
        str, typer.Option(help="What all lines ask.", show_default="as the file's first line says")
    ] = "",
    window: Annotated[str, typer.Option(help="Time to its end: s, m, h or d.")] = "24h",
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Kept with the batch. May be repeated.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Print its id, and leave it running.")] = False,
    target: Target = DEFAULT_TARGET,
    config: ClientConfigFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: Key = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Answer each line of a file, and wait for it. Answers go to --output, or else to standard output.

    The batch outlives a lost connection and a closed terminal. Ctrl-C cancels it and fetches what was answered; with
    --detach it runs on by itself.
    """
    from headrace.batches import command
    from headrace.errors import ConfigError
    from headrace.terminal import BatchProgress

    pairs: dict[str, str] = {}
    for pair in metadata or ():
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--metadata: expected NAME=VALUE, got {pair!r}")
        pairs[name] = value
    job = command.Job(file, output, errors, endpoint, window, pairs, detach, as_json)
    stopped = False

    async def work(client: BatchClient) -> Any:
        nonlocal stopped
        stop = asyncio.Event()
        with interrupt(stop), BatchProgress(quiet=quiet or as_json) as progress:
            batch = await command.run(job, client, stop, progress)
        stopped = stop.is_set()
        return batch

    try:
        batch = _with_client(target, config, authority, certificate, key, work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        sys.stdout.write(command.dump(batch) + "\n")
    elif detach:
        sys.stdout.write(f"{batch.id}\n")
    if detach:
        return
    _tell(batch, quiet=quiet or as_json, fetched=errors is not None)
    raise typer.Exit(130 if stopped else _code(batch))


def _tell(batch: Any, *, quiet: bool, fetched: bool) -> None:
    from headrace.batches import command
    from headrace.terminal import stderr

    if not quiet:
        stderr().print(command.summary(batch), markup=False)
        command.say_errors(batch)
        if batch.error_file_id and not fetched:
            stderr().print(f"  headrace batch show {batch.id} --errors FILE fetches what failed", markup=False)


def _code(batch: Any) -> int:
    from headrace.batches.client import STATUSES

    return 0 if STATUSES.get(batch.status) == "completed" and not batch.request_counts.failed else 1


@app.command("list")
def list_batches(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many, the newest first.")] = 20,
    target: Target = DEFAULT_TARGET,
    config: ClientConfigFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """List batches, the newest first."""
    import json

    from headrace.batches.client import to_dict
    from headrace.terminal import show_batches

    batches = _with_client(target, config, authority, certificate, key, lambda client: client.list(limit))
    if as_json:
        sys.stdout.write(json.dumps([to_dict(batch) for batch in batches]) + "\n")
    else:
        show_batches([to_dict(batch) for batch in batches])


@app.command("show")
def show_batch(
    batch_id: BatchId,
    output: Output = None,
    errors: Errors = None,
    target: Target = DEFAULT_TARGET,
    config: ClientConfigFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Show a batch; with --output and --errors also fetch what it has written."""
    from headrace.batches import command
    from headrace.terminal import BatchProgress, show_batches

    async def work(client: BatchClient) -> Any:
        batch = await client.get(batch_id)
        with BatchProgress(quiet=as_json) as progress:
            if output is not None:
                await command.fetch(client, batch, output, errors, progress)
            elif errors is not None and batch.error_file_id:
                await client.download(batch.error_file_id, errors)
        return batch

    batch = _with_client(target, config, authority, certificate, key, work)
    if as_json:
        sys.stdout.write(command.dump(batch) + "\n")
    else:
        from headrace.batches.client import to_dict

        show_batches([to_dict(batch)])
        command.say_errors(batch)


@app.command("cancel")
def cancel_batch(
    batch_id: BatchId,
    target: Target = DEFAULT_TARGET,
    config: ClientConfigFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Cancel a batch. What was answered is kept."""
    from headrace.batches import command

    batch = _with_client(target, config, authority, certificate, key, lambda client: client.cancel(batch_id))
    sys.stdout.write((command.dump(batch) if as_json else command.summary(batch)) + "\n")
