"""What we believe of each worker, and since when.

Load is the set of leases held for a worker *instance*, never a number moved by hand: :class:`Held` is that set and
the only place where its sums are written. A worker that restarts is a new instance with an empty set. What workers
report refines the belief (prompts already computed, KV shared between requests) but doesn't replace it: a report is
always a little old.

Each pool keeps its workers that can take something now in an :class:`Order`, least loaded first. Moving one costs
O(log n) comparisons and a memmove of a list of at most n floats (microseconds at 1,000 workers); finding the best is
O(1) when it fits. No request scans the fleet. What this module leaves to ``core.py``: whose turn it is, and all
answers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

from headrace.scheduler.events import Ask, WorkerJoined
from headrace.v1 import scheduler_pb2, types_pb2, worker_pb2

#: A running answer weighs on its batch as much as so many prompt tokens still to be computed. A stand-in for the cost
#: model: with it, requests of like size spread by count and a long prompt counts for several.
ANSWER_WEIGHT_TOKENS = 64

#: Differences below this don't decide: what is nearly equal is drawn by lot.
GRAIN_TOKENS = 16

#: KV that an answer is expected to take when nobody says. Optimistic on purpose: a worker that runs out lets its
#: requests wait, while room kept for answers that end early is lost.
ANSWER_KV_TOKENS = 64

#: Workers looked at for one ask that doesn't fit on the better ones. A bound on work, not on luck: whoever isn't looked
#: at is asked the other way round at its next report.
MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run one request on one worker instance."""

    number: int
    router_id: str
    instance_id: str
    request_id: str
    tenant: str
    choices: int
    prompt_tokens: int
    kv_tokens: int
    granted_s: float


class Held:
    """A set of leases and what they add up to."""

    __slots__ = ("choices", "kv_tokens", "leases", "prompt_tokens")

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.choices = 0
        self.prompt_tokens = 0
        self.kv_tokens = 0

    def __len__(self) -> int:
        return len(self.leases)

    def add(self, lease: Lease) -> None:
        """Add a lease that isn't in the set."""
        assert lease.number not in self.leases
        self.leases[lease.number] = lease
        self.choices += lease.choices
        self.prompt_tokens += lease.prompt_tokens
        self.kv_tokens += lease.kv_tokens

    def discard(self, number: int) -> None:
        """Take a lease out, if it is in the set."""
        lease = self.leases.pop(number, None)
        if lease is not None:
            self.choices -= lease.choices
            self.prompt_tokens -= lease.prompt_tokens
            self.kv_tokens -= lease.kv_tokens

    def discard_before(self, granted_s: float) -> None:
        """Take out what was granted before that time."""
        while self.leases:
            oldest = next(iter(self.leases.values()))
            if oldest.granted_s >= granted_s:
                return
            self.discard(oldest.number)


def kv_tokens(ask: Ask) -> int:
    """KV that a request is expected to take."""
    expected = ask.expected_output_tokens or ANSWER_KV_TOKENS
    return ask.prompt_tokens + ask.choices * min(ask.max_tokens or expected, expected)


class Worker:
    """One instance of a worker, as believed."""

    def __init__(self, joined: WorkerJoined, now_s: float, queue_factor: float, held: Held) -> None:
        self.link = joined.link
        self.worker_id = joined.worker_id
        self.instance_id = joined.instance_id
        self.pool = joined.pool
        self.address = joined.address
        self.description = joined.description
        self.load = worker_pb2.Load()
        self.heard_s = now_s
        self.held = held
        #: Of those, what the last report may not know of yet.
        self.unreported = Held()
        for lease in held.leases.values():
            self.unreported.add(lease)
        #: Sequence of the one ask that this worker keeps its room for; 0 = none.
        self.reserved_for = 0
        #: The longest prompt its pool counts on it for; None = it isn't ready.
        self.serves_prompt_tokens: int | None = None
        #: Where it stands in its pool's order; None = it can't take anything.
        self.order_key: float | None = None
        self.order_index = 0
        self._queue_factor = queue_factor
        self._derive()

    @property
    def ready(self) -> bool:
        """Takes new requests when it has room."""
        return self.load.state == worker_pb2.WORKER_STATE_READY

    @property
    def pending_prompt_tokens(self) -> int:
        """Leased prompt tokens that are still to be computed."""
        return min(self.held.prompt_tokens, self._reported_prompt_tokens + self.unreported.prompt_tokens)

    @property
    def kv_demand_tokens(self) -> int:
        """KV held by requests, and what is known to come."""
        return self._reported_kv_tokens + self.unreported.kv_tokens

    @property
    def pressure(self) -> float:
        """How loaded it is, to compare workers of one pool. Lower is better; 0 is idle."""
        work = self.pending_prompt_tokens + ANSWER_WEIGHT_TOKENS * self.held.choices
        return (work // GRAIN_TOKENS) / self.slots

    def can_ever_run(self, ask: Ask) -> bool:
        """Whether it may have this ask when there is room."""
        return (
            self.ready and ask.prompt_tokens <= self.max_prompt_tokens and self.instance_id not in ask.avoid_instances
        )

    def has_room(self, ask: Ask) -> bool:
        """Whether there is room for this ask now. Who has nothing to do has room for anything."""
        if not self.held:
            return True
        if self.held.choices + ask.choices > self.limit:
            return False
        total = self.kv_tokens_total
        return total == 0 or self.kv_demand_tokens + kv_tokens(ask) <= total

    def hold(self, lease: Lease) -> None:
        """A lease begins."""
        self.held.add(lease)
        self.unreported.add(lease)

    def free(self, number: int) -> None:
        """A lease ends."""
        self.held.discard(number)
        self.unreported.discard(number)

    def report(self, now_s: float, load: worker_pb2.Load, lag_s: float) -> None:
        """Take in a report. What was granted up to ``lag_s`` ago may not be in it."""
        self.load = load
        self.heard_s = now_s
        self._derive()
        self.unreported.discard_before(now_s - lag_s)

    def _derive(self) -> None:
        """What follows from description and report; kept, because placement asks for it all the time."""
        self.block_tokens = max(self.description.block_tokens, 1)
        #: Choices in its batch at most.
        self.slots = max(self.load.slots or self.description.slots, 1)
        #: Choices leased at most: a full batch, and a few that hide the round trip.
        self.limit = max(math.floor(self.slots * self._queue_factor), 1)
        #: Tokens of KV it has in all; 0 = it doesn't say.
        self.kv_tokens_total = (self.load.kv_blocks_total or self.description.kv_blocks) * self.block_tokens
        bounds = [bound for bound in (self.description.context_tokens, self.kv_tokens_total) if bound]
        #: The longest prompt it can serve, with room for one token of answer.
        self.max_prompt_tokens = min(bounds, default=2**32) - 1
        self._reported_prompt_tokens = self.load.waiting_prompt_tokens + self.load.running_prompt_tokens
        self._reported_kv_tokens = self.load.kv_blocks_used * self.block_tokens + self._reported_prompt_tokens


class Order:
    """Workers by pressure, least first; those of equal pressure form a bucket, in no order."""

    def __init__(self) -> None:
        self._keys: list[float] = []
        self._buckets: dict[float, list[Worker]] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def put(self, worker: Worker, key: float) -> None:
        """Put a worker in, or move it."""
        if worker.order_key == key:
            return
        self.remove(worker)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = []
            insort(self._keys, key)
        worker.order_key, worker.order_index = key, len(bucket)
        bucket.append(worker)

    def remove(self, worker: Worker) -> None:
        """Take a worker out, if it is in."""
        key = worker.order_key
        if key is None:
            return
        bucket = self._buckets[key]
        last = bucket.pop()
        if last is not worker:
            bucket[worker.order_index] = last
            last.order_index = worker.order_index
        if not bucket:
            del self._buckets[key]
            del self._keys[bisect_left(self._keys, key)]
        worker.order_key = None

    def from_least(self, rng: Random) -> Iterator[Worker]:
        """Least loaded first, among equals starting anywhere. Invalid after the order has changed."""
        for key in self._keys:
            bucket = self._buckets[key]
            start = rng.randrange(len(bucket)) if len(bucket) > 1 else 0
            for index in range(len(bucket)):
                yield bucket[start + index - len(bucket)]


class Pool:
    """The workers that serve one variant."""

    def __init__(self, name: str, identity: tuple[object, ...]) -> None:
        self.name = name
        self.identity = identity
        self.workers: dict[str, Worker] = {}
        self.ready: dict[str, Worker] = {}
        self.order = Order()
        #: The longest prompt that a ready worker can serve.
        self.max_prompt_tokens = 0
        # How many ready workers serve prompts up to that length.
        self._serve: Counter[int] = Counter()

    def reorder(self, worker: Worker) -> None:
        """Put a worker where it belongs after any change to it."""
        if worker.ready and not worker.reserved_for and worker.held.choices < worker.limit:
            self.order.put(worker, worker.pressure)
        else:
            self.order.remove(worker)

    def refresh_ready(self, worker: Worker) -> bool:
        """Note what a worker can serve; True when it is another thing than before."""
        serves = worker.max_prompt_tokens if worker.ready and worker.instance_id in self.workers else None
        # Almost every report changes nothing.
        if serves == worker.serves_prompt_tokens:
            return False
        if worker.serves_prompt_tokens is not None:
            del self.ready[worker.instance_id]
            self._serve[worker.serves_prompt_tokens] -= 1
            if not self._serve[worker.serves_prompt_tokens]:
                del self._serve[worker.serves_prompt_tokens]
        if serves is not None:
            self.ready[worker.instance_id] = worker
            self._serve[serves] += 1
        worker.serves_prompt_tokens = serves
        # Over the few different lengths, not over the workers.
        self.max_prompt_tokens = max(self._serve, default=0)
        return True

    def can_ever_run(self, ask: Ask) -> bool:
        """Whether some ready worker may have this ask when there is room."""
        if not ask.avoid_instances:
            return bool(self.ready) and ask.prompt_tokens <= self.max_prompt_tokens
        return any(worker.can_ever_run(ask) for worker in self.ready.values())

    def choose(self, ask: Ask, rng: Random) -> Worker | None:
        """The least loaded worker that can run this now."""
        for worker in islice(self.order.from_least(rng), MAX_CANDIDATES):
            if worker.can_ever_run(ask) and worker.has_room(ask):
                return worker
        return None


def identity(description: types_pb2.ModelDescription) -> tuple[object, ...]:
    """What must be the same for all workers of a pool, or one request could have two answers."""
    return (
        ("model", description.model),
        ("weights_sha256", description.weights_sha256),
        ("quantization", description.quantization),
        ("tokenizer_sha256", description.tokenizer_sha256),
        ("template_sha256", description.template_sha256),
        ("vocab_size", description.vocab_size),
        ("eos_ids", tuple(description.eos_ids)),
        # Routers hash a prompt's blocks once for the whole pool.
        ("block_tokens", description.block_tokens),
    )


def difference(pool: tuple[object, ...], worker: tuple[object, ...]) -> str:
    """What contradicts, for people; empty = nothing."""
    return "; ".join(
        f"{theirs!r} where the pool has {ours!r}" for ours, theirs in zip(pool, worker, strict=True) if ours != theirs
    )


class Fleet:
    """All workers and all leases."""

    def __init__(self, queue_factor: float) -> None:
        self.pools: dict[str, Pool] = {}
        self.workers: dict[str, Worker] = {}
        self.leases: dict[int, Lease] = {}
        #: Routers must be told.
        self.changed = False
        self._queue_factor = queue_factor
        # Leases announced for instances that haven't joined (yet): a scheduler that comes back hears from routers and
        # workers in any order.
        self._unjoined: dict[str, Held] = {}
        self._view: scheduler_pb2.FleetView | None = None

    def join(self, now_s: float, joined: WorkerJoined) -> Worker:
        """Take in a worker whose description fits its pool's."""
        held = self._unjoined.pop(joined.instance_id, None) or Held()
        worker = Worker(joined, now_s, self._queue_factor, held)
        self.workers[worker.instance_id] = worker
        pool = self.pools.get(worker.pool)
        if pool is None:
            pool = self.pools[worker.pool] = Pool(worker.pool, identity(joined.description))
        pool.workers[worker.instance_id] = worker
        self._touch()
        return worker

    def contradiction(self, joined: WorkerJoined) -> str:
        """How a worker's description differs from its pool's; empty = it fits."""
        pool = self.pools.get(joined.pool)
        return difference(pool.identity, identity(joined.description)) if pool else ""

    def at_address(self, address: str) -> list[Worker]:
        """The instances that say they listen there. Joins are rare, so going through all is fine."""
        return [worker for worker in self.workers.values() if worker.address == address]

    def remove(self, worker: Worker) -> None:
        """The worker is gone, and its leases with it."""
        del self.workers[worker.instance_id]
        pool = self.pools[worker.pool]
        pool.order.remove(worker)
        del pool.workers[worker.instance_id]
        pool.refresh_ready(worker)
        for number in list(worker.held.leases):
            del self.leases[number]
            worker.free(number)
        if not pool.workers:
            del self.pools[worker.pool]
        self._touch()

    def report(self, now_s: float, worker: Worker, load: worker_pb2.Load, lag_s: float) -> bool:
        """Take in a report; True when what the pool can serve changed."""
        pool = self.pools[worker.pool]
        worker.report(now_s, load, lag_s)
        pool.reorder(worker)
        changed = pool.refresh_ready(worker)
        if changed:
            self._touch()
        return changed

    def hold(self, lease: Lease) -> None:
        """A lease begins."""
        self.leases[lease.number] = lease
        worker = self.workers.get(lease.instance_id)
        if worker is None:
            self._unjoined.setdefault(lease.instance_id, Held()).add(lease)
        else:
            worker.hold(lease)
            self.pools[worker.pool].reorder(worker)

    def free(self, number: int) -> Worker | None:
        """A lease ends; returns the worker that has more room now. A lease that isn't held is no matter."""
        lease = self.leases.pop(number, None)
        if lease is None:
            return None
        worker = self.workers.get(lease.instance_id)
        if worker is not None:
            worker.free(number)
            self.pools[worker.pool].reorder(worker)
            return worker
        held = self._unjoined[lease.instance_id]
        held.discard(number)
        if not held:
            del self._unjoined[lease.instance_id]
        return None

    def view(self) -> scheduler_pb2.FleetView:
        """What routers are told; not to be changed by the caller."""
        if self._view is None:
            self._view = scheduler_pb2.FleetView(pools=[_pool_view(pool) for pool in self.pools.values()])
        return self._view

    def _touch(self) -> None:
        self.changed = True
        self._view = None


def _pool_view(pool: Pool) -> scheduler_pb2.FleetView.Pool:
    workers = list(pool.workers.values())
    description = types_pb2.ModelDescription()
    description.CopyFrom(workers[0].description)
    # A request that fits one worker is welcome; a capability must be everyone's, because any may be chosen.
    description.context_tokens = max(worker.description.context_tokens for worker in workers)
    description.capabilities.CopyFrom(_common([worker.description.capabilities for worker in workers]))
    return scheduler_pb2.FleetView.Pool(
        name=pool.name,
        description=description,
        ready_workers=len(pool.ready),
        workers=len(workers),
        addresses=[worker.address for worker in pool.ready.values()],
    )


def _common(capabilities: list[types_pb2.Capabilities]) -> types_pb2.Capabilities:
    first = capabilities[0]
    return types_pb2.Capabilities(
        guided=[kind for kind in first.guided if all(kind in each.guided for each in capabilities)],
        lora=[name for name in first.lora if all(name in each.lora for each in capabilities)],
        logprobs=all(each.logprobs for each in capabilities),
        prompt_logprobs=all(each.prompt_logprobs for each in capabilities),
        kv_handoff=all(each.kv_handoff for each in capabilities),
        batch_invariant=all(each.batch_invariant for each in capabilities),
    )
