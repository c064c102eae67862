"""The router's process: prepare the models, start the data plane, wait for a signal, drain.

The request's way itself is ``gateway_rs/src/plane/generation.rs``. What this module leaves to others: signals and the
ready line (``process.py``), the models' files (``models.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import socket

from headrace import models
from headrace._gateway import Router
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.process import StopSignals, configure_logging, print_ready


async def run(config: Config) -> None:
    """Serve until told to stop. Raises ConfigError when a setting is wrong or a port is taken."""
    configure_logging(config.telemetry)
    allow_connections()
    with StopSignals() as signals:
        try:
            router = await asyncio.to_thread(Router.start, plane_config(config))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            print_ready("router", http=router.http_address, grpc=router.grpc_address)
            await signals.stopping.wait()
            await asyncio.to_thread(router.drain)
        finally:
            await asyncio.to_thread(router.stop)


def allow_connections() -> None:
    """Take as many descriptors as this process may: each connection is one, and shells often begin with 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Systems without an upper bound still refuse what is beyond their own; then the limit stays as it is.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def plane_config(config: Config) -> str:
    """What the data plane is told, as JSON; the models' folders are prepared on the way. Raises ModelError."""
    settings = dataclasses.asdict(config.router)
    settings["router_id"] = f"{socket.gethostname()}-{os.getpid()}"
    settings["models"] = [
        {"name": model.name, "folder": str(models.prepare(model.source, model.quantization, weights=False).path)}
        for model in config.models
    ]
    settings["telemetry"] = dataclasses.asdict(config.telemetry)
    settings["tenants_file"] = config.tenants.file
    if config.tls.on:
        settings["tls"] = dataclasses.asdict(config.tls)
    return json.dumps(settings)
