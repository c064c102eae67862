"""The worker's process: its engine, its doors, its links, and their beginning and end.

What this module leaves to others: what the worker answers (``servicer.py``, and ``door.py`` for other protocols), whom
it calls (``links.py``), how it computes (``engines/``).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace import models, process, tls, tracing
from headrace._gateway import CostTable
from headrace.config import Config, ModelConfig, WorkerConfig
from headrace.errors import ConfigError, EngineError
from headrace.serving import Service
from headrace.tls import Tls
from headrace.v1 import cache_pb2, scheduler_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from headrace.worker.engine import BlocksCleared, Engine
from headrace.worker.links import CacheLink, SchedulerLink
from headrace.worker.servicer import FULL_NAME, READY, WorkerService

if TYPE_CHECKING:
    from headrace.worker.engines.remote import Dialect

log = logging.getLogger(__name__)

_ROLES = {
    "both": worker_pb2.WORKER_ROLE_UNSPECIFIED,
    "prefill": worker_pb2.WORKER_ROLE_PREFILL,
    "decode": worker_pb2.WORKER_ROLE_DECODE,
}

#: For the cache to hear that its blocks are gone.
_GOODBYE_S = 0.5


def make_engine(
    settings: Config,
    model: ModelConfig,
    folder: models.ModelFolder,
    certificates: Tls | None = None,
    draft: models.ModelFolder | None = None,
) -> Engine:
    """The engine that is asked for. Raises ConfigError or ModelError."""
    config = settings.worker
    if config.engine in ("tensorrt_llm", "trtllm_grpc", "openengine"):
        return _self_batched(settings, model, folder, certificates)
    from headrace.worker.hashes import block_namer
    from headrace.worker.loop import Backend, BatchLoop

    backend: Backend
    if config.engine == "llama_cpp":
        from headrace.worker.engines.llama_cpp import LlamaBackend

        backend = LlamaBackend(folder, config, draft)
    elif config.engine == "sim":
        from headrace.worker.engines.sim import SimBackend, sim_limits
        from headrace.worker.timing import Timing

        timing = Timing(
            prefill_tokens_per_s=config.sim_prefill_tokens_per_s,
            step_s=config.sim_step_ms / 1000,
            step_s_per_sequence=config.sim_step_ms_per_sequence / 1000,
            table=_cost_table(config.sim_cost_table) if config.sim_cost_table else None,
            slowdown=config.sim_slowdown,
        )
        backend = SimBackend(
            sim_limits(config, folder),
            timing,
            folder,
            output_tokens=config.sim_output_tokens,
            cost_table=config.sim_cost_table,
        )
    else:
        raise ConfigError(f"worker.engine: no engine {config.engine!r}")
    hash_blocks = block_namer(model.name, config.block_tokens) if config.prefix_cache else None
    return BatchLoop(backend, hash_blocks=hash_blocks, keep_prefixes=config.prefix_cache)


def _self_batched(settings: Config, model: ModelConfig, folder: models.ModelFolder, certificates: Tls | None) -> Engine:
    from headrace.worker.selfbatched import Driver, SelfBatched

    config = settings.worker
    driver: Driver
    if config.engine == "tensorrt_llm":
        from headrace.worker.engines.tensorrt_llm import TensorRtLlm, check_settings

        check_settings(config, settings.tensorrt_llm)
        driver = TensorRtLlm(folder, config, model, settings.tensorrt_llm)
    else:
        from headrace.worker.engines.remote import RemoteEngine

        driver = RemoteEngine(_dialect(config, folder), folder, config, certificates)
    return SelfBatched(
        driver,
        slots=config.slots,
        max_waiting=config.max_waiting,
        stall_timeout_s=config.stall_timeout_s,
        canary_s=settings.tensorrt_llm.canary_s,
    )


def _dialect(config: WorkerConfig, folder: models.ModelFolder) -> Dialect:
    if config.engine == "openengine":
        from headrace.worker.engines.openengine import OpenEngineDialect

        return OpenEngineDialect()
    try:
        from headrace.worker.engines.trtllm_grpc import TrtllmDialect
    except ImportError as missing:
        raise ConfigError(f"worker.engine: needs the extra headrace[trtllm-grpc] ({missing})") from missing
    return TrtllmDialect(folder)


def _cost_table(name: str) -> CostTable:
    try:
        return CostTable.named(name)
    except ValueError as error:
        raise ConfigError(f"worker.sim_cost_table: {error}") from error


async def run(config: Config) -> None:
    """Runs a worker until it is told to stop and has drained. Raises ConfigError, ModelError or EngineError."""
    began_s = time.monotonic()
    worker, model = config.worker, config.model(config.worker.model)
    process.configure_logging(config.telemetry)
    tracing.setup("worker", config.telemetry)
    # The engine's thread gives the interpreter away for a whole step and wants it back at once: 5 ms is half a step.
    sys.setswitchinterval(0.0005)
    try:
        certificates = tls.load(config.tls)
        folder = await asyncio.to_thread(_prepare, model, needs_weights=worker.engine == "llama_cpp")
        draft = None
        if worker.engine == "llama_cpp" and worker.draft_model:
            guessing = ModelConfig("draft_model", worker.draft_model, worker.draft_quantization)
            draft = await asyncio.to_thread(_prepare, guessing, needs_weights=True)
        engine = make_engine(config, model, folder, certificates, draft)
        await _serve(config, model.name, folder, engine, certificates, began_s)
    finally:
        await asyncio.to_thread(tracing.shutdown)


def _prepare(model: ModelConfig, *, needs_weights: bool) -> models.ModelFolder:
    said = ""

    def progress(phase: str, fraction: float) -> None:
        nonlocal said
        if phase != said:
            said = phase
            log.info("model %s: %s", model.name, phase)

    return models.prepare(
        model.source, model.quantization, model.chat_template, weights=needs_weights, progress=progress
    )


def _add_doors(server: Service, servicer: WorkerService, folder: models.ModelFolder, config: WorkerConfig) -> None:
    """Other protocols that were asked for."""
    if config.openengine_service:
        from headrace.worker import openengine_service

        openengine_service.add(server, servicer, folder)
    if config.trtllm_service:
        try:
            from headrace.worker import trtllm_service
        except ImportError as missing:
            raise ConfigError(f"worker.trtllm_service: needs the extra headrace[trtllm-grpc] ({missing})") from missing
        trtllm_service.add(server, servicer, folder)


async def _serve(
    settings: Config,
    model: str,
    folder: models.ModelFolder,
    engine: Engine,
    certificates: Tls | None,
    began_s: float,
) -> None:
    config, targets = settings.worker, settings.scheduler
    server = Service("worker", config.address, metrics_address=config.metrics_address, tls=certificates)
    class_ttft_s: dict[int, float] = {
        types_pb2.REQUEST_CLASS_INTERACTIVE: targets.interactive_ttft_s,
        types_pb2.REQUEST_CLASS_STANDARD: targets.standard_ttft_s,
        types_pb2.REQUEST_CLASS_BATCH: targets.batch_ttft_s,
    }
    servicer = WorkerService(config, engine, server.registry, tls=certificates, class_ttft_s=class_ttft_s)
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, FULL_NAME)
    _add_doors(server, servicer, folder, config)
    scheduler, cache = _links(config, model, servicer, engine, lambda: server.address, certificates, began_s)
    publishing: list[asyncio.Task[None]] = []
    await server.start()

    async def live() -> None:
        await servicer.start(model)
        servicer.on_state = lambda: _state_changed(server, servicer, scheduler)
        servicer.on_blocks = cache.grown if cache is not None else servicer.on_blocks
        server.spawn(servicer.watch(), "watchdog")
        if scheduler is not None:
            server.spawn(scheduler.run(), "scheduler link")
        if cache is not None:
            publishing.append(server.spawn(cache.run(), "cache link"))
        await server.announce(worker_id=servicer.worker_id, instance_id=servicer.instance_id)
        # Whoever started this process starts it again.
        raise EngineError(f"the engine is gone: {await servicer.failure}")

    server.spawn(live(), "engine")

    async def drain() -> None:
        await servicer.drain()
        if cache is not None and publishing:
            # A stream's end alone could be a break, after which the cache would wait for its return.
            servicer.blocks.add([BlocksCleared()])
            cache.leave()
            # The cache may be away.
            await asyncio.wait(publishing, timeout=_GOODBYE_S)

    try:
        await server.run_until_stopped(drain=drain, grace_s=config.drain_grace_s)
    finally:
        await servicer.stop()


def _state_changed(server: Service, servicer: WorkerService, scheduler: SchedulerLink | None) -> None:
    server.spawn(server.set_ready(servicer.state == READY), "readiness")
    if scheduler is not None:
        scheduler.state_changed()


def _links(
    config: WorkerConfig,
    model: str,
    servicer: WorkerService,
    engine: Engine,
    address: Callable[[], str],
    certificates: Tls | None,
    began_s: float,
) -> tuple[SchedulerLink | None, CacheLink | None]:
    def hello() -> scheduler_pb2.JoinHello:
        return scheduler_pb2.JoinHello(
            worker_id=servicer.worker_id,
            instance_id=servicer.instance_id,
            pool=model,
            address=config.advertise or address(),
            description=servicer.description,
            startup_s=startup_s(),
            role=_ROLES[config.role],
            kv_token_bytes=engine.kv_token_bytes,
        )

    ready_s: list[float] = []

    def startup_s() -> float:
        if not ready_s:
            ready_s.append(time.monotonic() - began_s)
        return ready_s[0]

    def blocks_hello() -> cache_pb2.BlocksHello:
        return cache_pb2.BlocksHello(
            worker_id=servicer.worker_id,
            instance_id=servicer.instance_id,
            pool=model,
            block_tokens=config.block_tokens,
            oldest_sequence=servicer.blocks.oldest_sequence,
            next_sequence=servicer.blocks.next_sequence,
        )

    scheduler = cache = None
    if config.scheduler:
        scheduler = SchedulerLink(
            config.scheduler, hello, servicer.report, servicer.on_command, certificates, servicer.on_scheduler_lost
        )
        scheduler.known_orphans = lambda: list(servicer.orphans)
        servicer.on_orphans = scheduler.tell_of
    if config.cache and config.prefix_cache:
        cache = CacheLink(config.cache, blocks_hello, servicer.blocks, certificates)
    return scheduler, cache
