"""The router's process: prepare the models, start the data plane, and batches beside it; wait for a signal, drain.

The request's way itself is ``gateway_rs/src/plane/generation.rs``. What this module leaves to others: signals and the
ready line (``process.py``), the models' files (``models.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from headrace import models
from headrace._gateway import Router
from headrace.config import Config, ModelConfig
from headrace.errors import ConfigError, HeadraceError
from headrace.process import StopSignals, changes, configure_logging, print_ready, temporary_folder
from headrace.sampling_defaults import configured

#: Where the data plane asks for files and batches, and where these ask the data plane.
BATCHES_SOCKET, DOOR_SOCKET = "batches.sock", "door.sock"

log = logging.getLogger(__name__)

#: The configuration's file, and how it is read again.
Again = tuple[Path, Callable[[], Config]]


async def run(config: Config, again: Again | None = None) -> None:
    """Serve until told to stop. Raises ConfigError when a setting is wrong or a port is taken."""
    configure_logging(config.telemetry)
    allow_connections()
    with StopSignals() as signals, _socket_folder(config) as sockets:
        try:
            router = await asyncio.to_thread(Router.start, plane_config(config, sockets))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            async with _batches(config, sockets, router):
                print_ready("router", http=router.http_address, grpc=router.grpc_address)
                following = asyncio.create_task(follow(router, config, again)) if again is not None else None
                await signals.stopping.wait()
                if following is not None:
                    following.cancel()
                draining = asyncio.create_task(asyncio.to_thread(router.drain))
            await draining
        finally:
            await asyncio.to_thread(router.stop)


@contextlib.contextmanager
def _socket_folder(config: Config) -> Iterator[Path]:
    """Who reaches its sockets is this process, or could be. Made where it is needed."""
    if not config.batches.data_dir:
        yield Path()
        return
    with temporary_folder("headrace-router-") as folder:
        yield folder


@contextlib.asynccontextmanager
async def _batches(config: Config, sockets: Path, router: Router) -> AsyncIterator[None]:
    """Files and batches, where they are kept. What is under way ends within the router's own grace."""
    if not config.batches.data_dir:
        yield
        return
    # Here, so that a router without batches needs no gRPC of Python's.
    from headrace.batches.service import BatchService

    service = BatchService(config.batches, router_id(), sockets / DOOR_SOCKET, show=router.show_batches)
    await service.start(sockets / BATCHES_SOCKET)
    try:
        yield
    finally:
        await service.stop(config.router.drain_grace_s)


async def follow(router: Router, config: Config, again: Again) -> None:
    """Put changed aliases in force; what cannot be read is told of once and leaves the former. Never returns."""
    path, read = again
    async for _ in changes(path):
        try:
            fresh = await asyncio.to_thread(read)
            if fresh.aliases != config.aliases:
                told = json.dumps([dataclasses.asdict(alias) for alias in fresh.aliases])
                await asyncio.to_thread(router.set_aliases, told)
                config = dataclasses.replace(config, aliases=fresh.aliases)
                log.info("the aliases have changed and are in force")
        except (HeadraceError, ValueError) as error:
            log.warning("the former aliases stay in force: %s", error)


def router_id() -> str:
    """This process's name in the mesh."""
    return f"{socket.gethostname()}-{os.getpid()}"


def allow_connections() -> None:
    """Take as many descriptors as this process may: each connection is one, and shells often begin with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Systems without an upper bound still refuse what is beyond their own; then the limit stays as it is.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def plane_config(config: Config, sockets: Path) -> str:
    """What the data plane is told, as JSON; the models' folders are prepared on the way. Raises ModelError, and
    ConfigError."""
    settings = dataclasses.asdict(config.router)
    settings["router_id"] = router_id()
    settings["models"] = [_model(model) for model in config.models]
    settings["aliases"] = [dataclasses.asdict(alias) for alias in config.aliases]
    settings["telemetry"] = dataclasses.asdict(config.telemetry)
    settings["tenants_file"] = config.tenants.file
    if config.tls.on:
        settings["tls"] = dataclasses.asdict(config.tls)
    if config.batches.data_dir:
        settings["batches"] = {
            "service": str(sockets / BATCHES_SOCKET),
            "door": str(sockets / DOOR_SOCKET),
            "max_file_bytes": config.batches.max_file_bytes,
        }
    return json.dumps(settings)


def _model(model: ModelConfig) -> dict[str, Any]:
    folder = models.prepare(model.source, model.quantization, model.chat_template, weights=False)
    sampling = configured(model.sampling, folder.sampling)
    return {"name": model.name, "folder": str(folder.path), "sampling": dict(sampling)}
