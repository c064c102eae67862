"""A started engine, and what it has said: for suites that hold engines to their protocol."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace._gateway import block_hashes
from headrace.v1 import worker_pb2
from headrace.worker.engine import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Delta,
    Engine,
    Finish,
    KvBlock,
    Request,
    Sampling,
    StepResult,
    Stopping,
    TokenLogprobs,
)
from tests.support import standin
from tests.support.waiting import eventually

PATIENCE_S = 60.0


def names(ids: list[int], lora: str, salt: bytes) -> list[int]:
    """Block names, as good as any."""
    ends = range(16, len(ids) + 1, 16)
    return [hash((tuple(ids[:end]), lora, salt)) & (2**64 - 1) for end in ends]


@dataclass
class Answer:
    """What came for one choice."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None


class Bench:
    """A started engine and what it has said."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[tuple[int, int], Answer] = {}
        self.cached: dict[int, int] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.held: set[int] = set()
        #: How often it was said that nothing is held.
        self.cleared = 0
        #: Of KV that waits to be fetched, by request.
        self.references: dict[int, str] = {}
        #: KV of hand-offs, by request, in order.
        self.kv: dict[int, list[KvBlock]] = {}
        self.failures: list[str] = []
        #: In place of an answer that has not begun.
        self.nothing = Answer()
        self._keys = itertools.count(1)
        self._news = asyncio.Event()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        await self.engine.start(
            lambda result: _soon(loop, self._on_step, result), lambda why: _soon(loop, self._on_failure, why)
        )

    def _on_step(self, result: StepResult) -> None:
        for delta in result.deltas:
            self._on_delta(delta)
        for block in result.kv:
            self.kv.setdefault(block.key, []).append(block)
        for change in result.blocks:
            if isinstance(change, BlocksStored):
                self.held |= set(change.hashes)
            elif isinstance(change, BlocksRemoved):
                self.held -= set(change.hashes)
            elif isinstance(change, BlocksCleared):
                self.held.clear()
                self.cleared += 1
        self._news.set()

    def _on_failure(self, why: str) -> None:
        self.failures.append(why)
        self._news.set()

    async def failed(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            while not self.failures:
                self._news.clear()
                await self._news.wait()
        return self.failures[0]

    def _on_delta(self, delta: Delta) -> None:
        answer = self.answers.setdefault((delta.key, delta.choice), Answer())
        assert answer.finish is None, "something came after the finish"
        assert delta.first_index == len(answer.ids)
        answer.ids += delta.ids
        answer.logprobs += delta.logprobs or []
        answer.finish = delta.finish
        if delta.cached_prompt_tokens is not None:
            self.cached[delta.key] = delta.cached_prompt_tokens
        if delta.kv_reference:
            self.references[delta.key] = delta.kv_reference
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[delta.key] = delta.prompt_logprobs

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._news.clear()
                assert not self.failures, self.failures
                await self._news.wait()

    def submit(self, prompt: list[int], *, max_tokens: int = 8, seeds: tuple[int, ...] = (0,), **more: Any) -> Request:
        eos = frozenset(self.engine.describe().eos_ids)
        stopping = {name: more.pop(name) for name in ("min_tokens", "ignore_eos", "stop_ids") if name in more}
        sampling = {name: more.pop(name) for name in list(more) if name in Sampling.__slots__}
        request = Request(
            key=next(self._keys),
            prompt_ids=prompt,
            stopping=Stopping(max_tokens, eos_ids=eos, **stopping),
            sampling=Sampling(seeds=seeds, **sampling),
            **more,
        )
        assert self.engine.submit(request) is None
        return request

    async def ended(self, request: Request) -> list[Answer]:
        def over() -> bool:
            answers = [self.answers.get((request.key, choice)) for choice in range(request.n)]
            return all(answer is not None and answer.finish is not None for answer in answers)

        await self.until(over)
        return [self.answers[request.key, choice] for choice in range(request.n)]

    async def ask(self, prompt: list[int], **options: Any) -> list[Answer]:
        return await self.ended(self.submit(prompt, **options))

    def names(self, ids: list[int], salt: bytes) -> list[int]:
        if self.engine.describe().engine == "tensorrt_llm":
            return block_hashes(ids, 16, standin.MODEL.name, "", salt)
        return names(ids, "", salt)

    async def at_rest(self) -> worker_pb2.Load:
        """Its load when all is over; the report may be one step behind the last finish."""

        async def quiet() -> worker_pb2.Load | None:
            load = self.engine.load()
            return None if load.waiting_requests or load.running_requests else load

        load = await eventually(quiet, "an engine at rest", PATIENCE_S)
        assert load is not None
        return load


def _soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], value: object) -> None:
    loop.call_soon_threadsafe(function, value)
