"""``headrace batch``: a file of requests in, its answers out, and a look at what runs.

``run`` uploads, waits with a progress bar and fetches. The batch is the mesh's: it outlives a lost connection, a closed
terminal and a router that starts again. Ctrl-C cancels it, as it ends any command in the foreground, and what was
answered by then is fetched; a second one leaves at once. ``--detach`` is for those who want to go.

What this module leaves to others: the API (``client.py``), options and exit codes (``cli_batches.py``).
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from headrace.batches.client import OVER, STATUSES, BatchClient, to_dict
from headrace.client import ClientError
from headrace.errors import ConfigError
from headrace.terminal import BatchProgress, stderr
from headrace.v1 import batches_pb2

#: Between looks at a batch that runs.
LOOK_EVERY_S = 0.5
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class Job:
    """What to run. ``output`` None = standard output; ``errors`` None = they are counted and not fetched."""

    file: Path
    output: Path | None = None
    errors: Path | None = None
    #: Empty: as the file's first line says.
    endpoint: str = ""
    window: str = "24h"
    metadata: dict[str, str] = field(default_factory=dict)
    detach: bool = False
    #: Answers are not fetched to standard output, which is for machines.
    as_json: bool = False


def endpoint_of(path: Path) -> str:
    """What the file's first line asks. Raises ConfigError when it says nothing that can be asked."""
    try:
        with open(path, "rb") as file:
            first = next((line for line in iter(lambda: file.readline(1 << 24), b"") if line.strip()), b"")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        url = json.loads(first)["url"]
    except (ValueError, LookupError, TypeError):
        url = None
    if url not in _ENDPOINTS:
        raise ConfigError(
            f"{path}: its first line is no request: expected JSON with custom_id, method, body, "
            f"and a url of {' or '.join(_ENDPOINTS)}"
        )
    return str(url)


async def run(job: Job, client: BatchClient, stop: asyncio.Event, progress: BatchProgress) -> batches_pb2.Batch:
    """See the module's text; the batch as it ended, or as it began when it is left. Raises HeadraceError."""
    endpoint = job.endpoint or await asyncio.to_thread(endpoint_of, job.file)
    with progress.moving("uploading") as moved:
        file = await client.upload(job.file, moved)
    batch = await client.create(file.id, endpoint, job.window, job.metadata)
    progress.began(batch.id)
    if job.detach:
        return batch
    batch = await wait(client, batch, stop, progress)
    if job.output is not None or not job.as_json:
        await fetch(client, batch, job.output, job.errors, progress)
    return batch


async def wait(
    client: BatchClient, batch: batches_pb2.Batch, stop: asyncio.Event, progress: BatchProgress
) -> batches_pb2.Batch:
    """Until it is over; ``stop`` cancels it. A router that is away is waited for."""
    told = cancelled = False
    with progress.running() as shown:
        while STATUSES.get(batch.status) not in OVER:
            try:
                if stop.is_set() and not cancelled:
                    progress.say(f"cancelling {batch.id}; Ctrl-C again to leave it at that")
                    batch = await _cancelled(client, batch.id)
                    cancelled = True
                else:
                    batch = await client.get(batch.id)
                told = False
                shown(batch)
            except ClientError as error:
                if error.code not in ("unavailable", "draining", "overloaded", "deadline_exceeded"):
                    raise
                if not told:
                    progress.say(f"the router does not answer; {batch.id} goes on without us, waiting for it")
                told = True
            if STATUSES.get(batch.status) not in OVER:
                await _pause(stop, cancelled)
    return batch


async def _cancelled(client: BatchClient, batch_id: str) -> batches_pb2.Batch:
    try:
        return await client.cancel(batch_id)
    except ClientError as error:
        # It was just over.
        if error.code != "invalid_argument":
            raise
        return await client.get(batch_id)


async def _pause(stop: asyncio.Event, cancelled: bool) -> None:
    """A moment, or until it is to be cancelled."""
    if cancelled or stop.is_set():
        await asyncio.sleep(LOOK_EVERY_S)
        return
    try:
        await asyncio.wait_for(stop.wait(), LOOK_EVERY_S)
    except TimeoutError:
        return


async def fetch(
    client: BatchClient, batch: batches_pb2.Batch, output: Path | None, errors: Path | None, progress: BatchProgress
) -> None:
    """Answers to that file or to standard output, and what failed to the other. What is not there leaves no file."""
    for file_id, path, what in (
        (batch.output_file_id, output, "fetching answers"),
        (batch.error_file_id, errors, "fetching errors"),
    ):
        if not file_id:
            continue
        if path is not None:
            with progress.moving(what) as moved:
                await client.download(file_id, path, moved)
        elif file_id == batch.output_file_id:
            async for data in client.content(file_id):
                sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()


def summary(batch: batches_pb2.Batch) -> str:
    """One line for people."""
    counts = batch.request_counts
    status = STATUSES.get(batch.status, "unknown")
    failed = f", {counts.failed} failed" if counts.failed else ""
    return f"{batch.id} {status}: {counts.completed} of {counts.total} answered{failed}"


def say_errors(batch: batches_pb2.Batch, limit: int = 10) -> None:
    """What is wrong with its file, for people."""
    console = stderr()
    for error in batch.errors[:limit]:
        where = f"line {error.line}: " if error.line else ""
        console.print(f"  {where}{error.code}: {error.message}", markup=False)
    if len(batch.errors) > limit:
        console.print(f"  and {len(batch.errors) - limit} more")


def dump(batch: batches_pb2.Batch) -> str:
    """A batch as one line of JSON."""
    return json.dumps(to_dict(batch))
