"""A worker that serves ``trtllm.TrtllmService``, and the engine that stands before it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from headrace import serving
from headrace.config import WorkerConfig
from headrace.models import ModelFolder
from headrace.serving import Service
from headrace.worker import trtllm_service
from headrace.worker.engine import Engine, StepResult
from headrace.worker.engines.trtllm_grpc import TrtllmGrpc
from headrace.worker.selfbatched import SelfBatched
from headrace.worker.service import WorkerService


async def serve(engine: Engine, folder: ModelFolder, config: WorkerConfig) -> tuple[Service, WorkerService]:
    """A worker on a free port, ready."""
    server = Service("worker", "127.0.0.1:0")
    service = WorkerService(config, engine, server.registry)
    server.add(trtllm_service.add_to_server, trtllm_service.TrtllmService(service, folder), trtllm_service.FULL_NAME)
    await server.start()
    await service.start("toy")
    return server, service


@asynccontextmanager
async def served(
    engine: Engine, folder: ModelFolder, config: WorkerConfig
) -> AsyncIterator[tuple[WorkerService, grpc.aio.Channel]]:
    """The same, with a channel to it."""
    server, service = await serve(engine, folder, config)
    try:
        async with serving.channel(server.address) as channel:
            yield service, channel
    finally:
        await service.stop()
        await server.stop(0)


class Fronted:
    """An engine before a worker around another engine."""

    def __init__(self, inner: Engine, folder: ModelFolder, config: WorkerConfig) -> None:
        self._inner, self._folder, self._config = inner, folder, config
        self._server: Service | None = None
        self._service: WorkerService | None = None
        self._front: SelfBatched | None = None

    async def start(self, on_step: Callable[[StepResult], None], on_failure: Callable[[str], None]) -> None:
        self._server, self._service = await serve(self._inner, self._folder, self._config)
        config = replace(self._config, engine_address=self._server.address, engine_start_timeout_s=20.0)
        self._front = SelfBatched(
            TrtllmGrpc(self._folder, config),
            slots=config.slots,
            max_waiting=config.max_waiting,
            stall_timeout_s=config.stall_timeout_s,
        )
        await self._front.start(on_step, on_failure)

    async def stop(self) -> None:
        assert self._server is not None
        assert self._service is not None
        assert self._front is not None
        await self._front.stop()
        await self._service.stop()
        await self._server.stop(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._front, name)
