"""Workers that work, evict, cancel and restart, a cache that restarts, streams that break: at rest, what each worker
holds is what the cache's index says, and what a scheduler that follows it knows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from typing import Any

import pytest
from tests.support.waiting import eventually

from headrace import _gateway, serving
from headrace.cache.service import FULL_NAME, CacheService, add_to_server
from headrace.config import CacheConfig
from headrace.scheduler.blocks import BlocksLink
from headrace.serving import Service
from headrace.v1 import cache_pb2, cache_pb2_grpc, types_pb2
from headrace.worker.blocks import BlockLog
from headrace.worker.composer import Composer, Drawn, Limits
from headrace.worker.engine import Request, Sampling, Stopping
from headrace.worker.hashes import block_namer
from headrace.worker.links import CacheLink

BLOCK_TOKENS = 4
#: Little KV, so that blocks are given up all the time, kept in it and beside it.
IN_KV = Limits(4, 96, BLOCK_TOKENS, 128, 16, 32, 64)
BESIDE = Limits(4, 96, BLOCK_TOKENS, 128, 16, 32, 64, keep_beside=48)


class Worker:
    """A batch composer whose steps take no time, and its block news."""

    def __init__(self, number: int, limits: Limits, dice: random.Random) -> None:
        self.number, self.limits, self.dice = number, limits, dice
        self.starts = 0
        self.start()

    def start(self) -> None:
        """As a new instance, which holds nothing."""
        self.starts += 1
        self.instance_id = f"w{self.number}-{self.starts}"
        self.composer = Composer(self.limits, block_namer("m", BLOCK_TOKENS))
        # Short, so that falling behind is common.
        self.log = BlockLog(keep=16)
        self.keys: list[int] = []
        self.requests = 0
        self.link: CacheLink | None = None
        self.task: asyncio.Task[None] | None = None

    def hello(self) -> cache_pb2.BlocksHello:
        return cache_pb2.BlocksHello(
            worker_id=f"w{self.number}",
            instance_id=self.instance_id,
            pool="m",
            block_tokens=BLOCK_TOKENS,
            oldest_sequence=self.log.oldest_sequence,
            next_sequence=self.log.next_sequence,
        )

    def connect(self, address: str) -> None:
        self.link = CacheLink(address, self.hello, self.log)
        self.task = asyncio.create_task(self.link.run())

    async def disconnect(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    def submit(self) -> None:
        """A prompt that begins like many others, some of them under a salt of their own."""
        dice = self.dice
        root = dice.randrange(6)
        prompt = [root] * dice.randrange(1, 40) + [dice.randrange(8) for _ in range(dice.randrange(1, 40))]
        stopping = Stopping(dice.randrange(1, 20), ignore_eos=True)
        salt = dice.choice([b"", b"", b"salt"])
        self.requests += 1
        request = Request(
            self.requests, prompt, stopping, Sampling(seeds=tuple(range(dice.choice([1, 1, 2])))), cache_salt=salt
        )
        if self.composer.submit(request, 0.0) is None:
            self.keys.append(self.requests)

    def cancel(self) -> None:
        if self.keys:
            self.composer.cancel(self.dice.choice(self.keys), None, types_pb2.OUTCOME_CANCELLED, 0.0)

    def step(self) -> None:
        step = self.composer.plan(0.0)
        if not step.empty or step.operations:
            self.composer.complete(step, Drawn([self.dice.randrange(8) for _ in step.rows]), 0.0)
        deltas, blocks = self.composer.take_results()
        self.composer.take_released()
        ended = {delta.key for delta in deltas if delta.finish is not None}
        self.keys = [key for key in self.keys if key not in ended]
        self.log.add(blocks)
        if blocks and self.link is not None:
            self.link.grown()

    def holds(self) -> set[int]:
        """By the accounts themselves: every block in the tree."""
        found: set[int] = set()
        nodes = [node for root in self.composer.kv._roots.values() for node in root.children.values()]
        while nodes:
            node = nodes.pop()
            found.add(node.hash)
            nodes += node.children.values()
        return found


class World:
    def __init__(self, dice: random.Random) -> None:
        self.workers = [Worker(number, BESIDE if number % 2 else IN_KV, dice) for number in range(3)]
        self.address = "127.0.0.1:0"
        self.scheduler: Any = _gateway.Scheduler("{}", wait_buckets_s=[1.0], seed=1, now_s=0.0, first_lease=1)

    async def open_cache(self) -> None:
        self.service = Service("cache", self.address)
        servicer = CacheService(CacheConfig(address=self.address, metrics_address=""), self.service.registry)
        self.service.add(add_to_server, servicer, FULL_NAME)
        await self.service.start()
        self.service.spawn(servicer.keep_time(), "clock")
        # The next one is to be found where this one was.
        self.address = self.service.address

    async def start(self) -> None:
        await self.open_cache()
        self.following = asyncio.create_task(BlocksLink(self.address, self.scheduler).run())
        for worker in self.workers:
            worker.connect(self.address)

    async def stop(self) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)
        for worker in self.workers:
            await worker.disconnect()
        await self.service.stop(0.0)

    async def indexed(self) -> dict[str, set[int]]:
        """What the cache's index says, as somebody hears who comes now."""
        held: dict[str, set[int]] = {}
        async with serving.channel(self.address) as channel:
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            stats = await stub.GetStats(cache_pb2.GetStatsRequest(), timeout=10.0)
            call = stub.WatchBlocks()
            await call.write(cache_pb2.WatchBlocksRequest())
            with contextlib.suppress(TimeoutError):
                # Less comes when something has changed since.
                async with asyncio.timeout(2.0):
                    while sum(map(len, held.values())) < stats.blocks:
                        for news in (await call.read()).news:
                            held[news.instance_id] = {block for chain in news.snapshot.chains for block in chain.hashes}
            call.cancel()
        return {instance: blocks for instance, blocks in held.items() if blocks}


async def test_at_rest_the_index_is_what_workers_hold(slow: bool) -> None:
    seed = random.SystemRandom().getrandbits(32)
    dice = random.Random(seed)
    world = World(dice)
    await world.start()
    rounds, until_s = 0, time.monotonic() + (120.0 if slow else 0.0)
    try:
        while rounds < 1500 or time.monotonic() < until_s:
            rounds += 1
            worker = dice.choice(world.workers)
            match dice.random():
                case chance if chance < 0.35:
                    worker.submit()
                case chance if chance < 0.45:
                    worker.cancel()
                case chance if chance < 0.46:
                    # The stream breaks.
                    await worker.disconnect()
                    worker.connect(world.address)
                case chance if chance < 0.465:
                    # The process is killed, and another one takes its place.
                    await worker.disconnect()
                    worker.start()
                    worker.connect(world.address)
                case chance if chance < 0.467:
                    await world.service.stop(0.0)
                    await world.open_cache()
                case _:
                    worker.step()
            if rounds % 8 == 0:
                await asyncio.sleep(0)
        for worker in world.workers:
            # What a cancellation has left is told by the step after it, as in the engine's loop.
            worker.step()
            # One that was killed last has nothing yet.
            while not worker.composer.idle or not worker.holds():
                if worker.composer.idle:
                    worker.submit()
                worker.step()
        truth = {worker.instance_id: worker.holds() for worker in world.workers}
        assert all(truth.values()) or rounds < 100, f"seed {seed}: nothing is held"
        assert all(len(worker.log) == len(truth[worker.instance_id]) for worker in world.workers), f"seed {seed}"
        truth = {instance: blocks for instance, blocks in truth.items() if blocks}

        async def agreed() -> bool:
            known = json.loads(world.scheduler.stats())["blocks"]["holdings"]
            return await world.indexed() == truth and known == sum(map(len, truth.values()))

        # Instances that are gone are forgotten after a few seconds.
        await eventually(agreed, f"seed {seed}: the index says what workers hold, after {rounds} rounds", 30.0)
    finally:
        await world.stop()


@pytest.mark.parametrize("limits", [IN_KV, BESIDE], ids=["in", "beside"])
def test_nothing_is_shared_across_salts(limits: Limits) -> None:
    """The same prompt under another salt: other names, and nothing reused."""
    worker = Worker(0, limits, random.Random(1))
    prompt = list(range(40))
    reused, names = [], []
    for number, salt in enumerate((b"a", b"a", b"b", b"")):
        request = Request(number, prompt, Stopping(1, ignore_eos=True), Sampling(seeds=(1,)), cache_salt=salt)
        before = worker.composer.cached_prompt_tokens_total
        assert worker.composer.submit(request, 0.0) is None
        while not worker.composer.idle:
            worker.step()
        reused.append(worker.composer.cached_prompt_tokens_total - before)
        names.append(set(_gateway.block_hashes(prompt, BLOCK_TOKENS, "m", "", salt)))
    assert reused == [0, 39, 0, 0]
    a, b, none = names[1:]
    assert len(a | b | none) == len(a) + len(b) + len(none)
    assert worker.holds() <= a | b | none
