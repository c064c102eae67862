"""Servers that speak an engine's protocol, and the engines that stand before them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from headrace import serving
from headrace.config import WorkerConfig
from headrace.models import ModelFolder
from headrace.serving import Service
from headrace.worker import openengine_service, trtllm_service
from headrace.worker.engine import Engine, StepResult
from headrace.worker.engines.remote import Dialect, RemoteEngine
from headrace.worker.selfbatched import SelfBatched
from headrace.worker.servicer import WorkerService


@asynccontextmanager
async def worker(engine: Engine, folder: ModelFolder, config: WorkerConfig) -> AsyncIterator[tuple[WorkerService, str]]:
    """A worker on a free port, ready, that speaks all protocols; and its address."""
    server = Service("worker", "127.0.0.1:0")
    service = WorkerService(config, engine, server.registry)
    trtllm_service.add(server, service, folder)
    openengine_service.add(server, service, folder)
    await server.start()
    await service.start("toy")
    try:
        yield service, server.address
    finally:
        await service.stop()
        await server.stop(0)


@asynccontextmanager
async def served(
    engine: Engine, folder: ModelFolder, config: WorkerConfig
) -> AsyncIterator[tuple[WorkerService, grpc.aio.Channel]]:
    """The same, with a channel to it."""
    async with worker(engine, folder, config) as (service, address), serving.channel(address) as channel:
        yield service, channel


class Fronted:
    """An engine before a server, which begins with it: what tells its address beside something else."""

    def __init__(
        self,
        server: AbstractAsyncContextManager[tuple[Any, str]],
        dialect: Dialect,
        folder: ModelFolder,
        config: WorkerConfig,
    ) -> None:
        self._server, self._dialect, self._folder, self._config = server, dialect, folder, config
        self._front: SelfBatched | None = None

    async def start(self, on_step: Callable[[StepResult], None], on_failure: Callable[[str], None]) -> None:
        _, address = await self._server.__aenter__()
        config = replace(self._config, engine_address=address, engine_start_timeout_s=60.0)
        self._front = SelfBatched(
            RemoteEngine(self._dialect, self._folder, config),
            slots=config.slots,
            max_waiting=config.max_waiting,
            stall_timeout_s=config.stall_timeout_s,
        )
        await self._front.start(on_step, on_failure)

    async def stop(self) -> None:
        if self._front is not None:
            await self._front.stop()
        await self._server.__aexit__(None, None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._front, name)
