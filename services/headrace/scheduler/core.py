"""The scheduler's decisions: ``step(now_s, event) -> actions`` and ``next_wakeup()``.

No clock, sockets, tasks or randomness of its own: time is an argument (seconds, monotonic), the generator is handed in.
The live service and tests (and a simulator) are drivers of this same core. The driver's duties, in this order:

1. turn what happened into one event and call ``step`` with the time of *now*;
2. carry out the actions in their order;
3. call ``step(now, Tick())`` when the time of ``next_wakeup()`` has come.

What holds after every step:

- an ask is answered once: granted or refused, or it was withdrawn, or its router is gone;
- nothing is granted after its deadline;
- a worker holds at most ``limit`` choices by grants of ours (leases that routers announce are facts and are counted
  too), except that a worker with nothing to do takes any request it can ever run;
- at most ``max_queued`` asks wait;
- whoever waits could not be placed when it was last looked at, and is looked at when a worker that could serve it
  changes.

The policy is plain: who fits, least loaded first, class and arrival decide whose turn it is. What this module leaves to
others: the order of the queue (``queue.py``), what a worker is believed to hold (``fleet.py``), messages
(``service.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from headrace.scheduler import events
from headrace.scheduler.actions import (
    Action,
    FleetChanged,
    Granted,
    JoinRefused,
    Refused,
    RouterDropped,
    Waits,
    Welcomed,
    WorkerDropped,
)
from headrace.scheduler.fleet import Fleet, Lease, Pool, Worker, kv_tokens
from headrace.scheduler.queue import Queue, Waiting
from headrace.v1 import types_pb2

#: Asks looked at when a worker has room and the first in line doesn't fit it.
LOOKAHEAD = 32

#: So many asks may be served past one that doesn't fit; then the next worker that could serve it keeps its room for it.
PASS_LIMIT = 64

#: Pools that one ask may name.
MAX_POOLS = 16

#: Routers hear of changes in the fleet at most so often: many workers that come at once are one change.
FLEET_INTERVAL_S = 0.05

#: The driver called later than agreed by more than this: we were stopped, not the workers silent.
LATE_S = 0.25

#: How long a worker takes to come back, more or less; the hint when there is none.
UNAVAILABLE_RETRY_MS = 1000


@dataclass(frozen=True)
class Policy:
    """The limits that the configuration sets."""

    max_queued: int = 4096
    heartbeat_s: float = 0.25
    heartbeats_missed: int = 12
    router_grace_s: float = 5.0
    queue_factor: float = 1.25

    @property
    def silence_s(self) -> float:
        """A worker that is silent for so long is out."""
        return self.heartbeat_s * self.heartbeats_missed


@dataclass(slots=True)
class Router:
    """A router, over its reconnections."""

    router_id: str
    #: Its stream; 0 = it is away.
    link: int
    leases: set[int] = field(default_factory=set)
    #: When its leases end, while it is away.
    expires_s: float = math.inf


class Rate:
    """Events per second over the last while, decaying exponentially."""

    _WINDOW_S = 10.0

    def __init__(self, now_s: float) -> None:
        self._started_s = self._at_s = now_s
        self._count = 0.0

    def add(self, now_s: float) -> None:
        """One more."""
        self._decay(now_s)
        self._count += 1.0

    def per_s(self, now_s: float) -> float:
        """How many a second."""
        self._decay(now_s)
        # What the window could have seen since the start: a young rate is not a low one.
        window_s = self._WINDOW_S * -math.expm1(-(now_s - self._started_s) / self._WINDOW_S)
        return self._count / max(window_s, 0.1)

    def _decay(self, now_s: float) -> None:
        self._count *= math.exp((self._at_s - now_s) / self._WINDOW_S)
        self._at_s = now_s


class Core:
    """All that the scheduler knows and decides."""

    def __init__(self, policy: Policy, rng: Random, now_s: float, first_lease: int = 1) -> None:
        """``first_lease``: numbers go up from here; from elsewhere at each start, so that old leases stay apart."""
        self.policy = policy
        self.fleet = Fleet(policy.queue_factor)
        self.queue = Queue()
        self.routers: dict[str, Router] = {}
        #: Things that should not happen, by a closed list of names.
        self.oddities = Counter(dict.fromkeys(("release_unknown", "release_foreign", "lease_collision"), 0))
        self._rng = rng
        self._now_s = now_s
        self._next_lease = first_lease
        self._workers_by_link: dict[int, Worker] = {}
        self._routers_by_link: dict[int, Router] = {}
        self._completions = Rate(now_s)
        self._fleet_told_s = -math.inf
        # Just started: routers may be quicker to come back than workers, so a pool nobody has heard of may still come.
        self._settled_s: float | None = now_s + policy.silence_s
        self._seen_pools: set[str] = set()
        self._silence_check_s = math.inf
        self._actions: list[Action] = []

    # The two functions of the driver's contract.

    def step(self, now_s: float, event: events.Event) -> list[Action]:
        """Take in an event and say what to do. ``now_s`` never goes back."""
        self._forgive_our_own_absence(now_s)
        self._now_s = now_s
        self._pass_time()
        match event:
            case events.Asked():
                self._asked(event.link, event.ask)
            case events.Released():
                self._released(event)
            case events.WorkerReported():
                self._worker_reported(event)
            case events.Withdrawn():
                self._withdrawn(event)
            case events.RouterJoined():
                self._router_joined(event)
            case events.RouterLost():
                self._router_lost(event.link)
            case events.WorkerJoined():
                self._worker_joined(event)
            case events.WorkerLost():
                if (worker := self._workers_by_link.get(event.link)) is not None:
                    self._remove_worker(worker)
            case events.Tick():
                pass
        if self.fleet.changed and self._now_s >= self._fleet_told_s + FLEET_INTERVAL_S:
            self.fleet.changed = False
            self._fleet_told_s = self._now_s
            self._actions.append(FleetChanged())
        actions, self._actions = self._actions, []
        return actions

    def next_wakeup(self) -> float | None:
        """When to call ``step`` at the latest; None = not before something happens."""
        times = [self._silence_check_s]
        times.extend(router.expires_s for router in self.routers.values() if router.link == 0)
        if (deadline_s := self.queue.next_deadline()) is not None:
            times.append(deadline_s)
        if self.fleet.changed:
            times.append(self._fleet_told_s + FLEET_INTERVAL_S)
        if self._settled_s is not None:
            times.append(self._settled_s)
        earliest = min(times)
        return None if earliest == math.inf else earliest

    # Time.

    def _forgive_our_own_absence(self, now_s: float) -> None:
        due_s = self.next_wakeup() if self.fleet.workers else None
        if due_s is not None and now_s - due_s > LATE_S:
            # Their reports may be waiting in our sockets, unread.
            for worker in self.fleet.workers.values():
                worker.heard_s += now_s - due_s

    def _pass_time(self) -> None:
        for waiting in self.queue.expired(self._now_s):
            self._refuse_waiting(waiting, types_pb2.ERROR_CODE_DEADLINE_EXCEEDED, _expired(self._now_s, waiting))
        if self._silence_check_s <= self._now_s:
            self._drop_silent_workers()
        for router in [each for each in self.routers.values() if each.link == 0 and each.expires_s <= self._now_s]:
            self._forget_router(router)
        if self._settled_s is not None and self._settled_s <= self._now_s:
            self._settled_s = None
            self._seen_pools.clear()
            self._refuse_stranded(self.queue.everything())

    def _drop_silent_workers(self) -> None:
        silence_s = self.policy.silence_s
        silent = [each for each in self.fleet.workers.values() if each.heard_s + silence_s <= self._now_s]
        for worker in silent:
            self._actions.append(WorkerDropped(worker.link, f"no report for {self._now_s - worker.heard_s:.2f} s"))
            self._remove_worker(worker)
        self._silence_check_s = self._next_silence()

    def _next_silence(self) -> float:
        # Gone through once per silence_s or so and not at each report: whoever reports meanwhile only moves later.
        heard = min((worker.heard_s for worker in self.fleet.workers.values()), default=math.inf)
        return heard + self.policy.silence_s

    # Routers.

    def _router_joined(self, event: events.RouterJoined) -> None:
        router = self.routers.get(event.router_id)
        if router is None:
            router = self.routers[event.router_id] = Router(event.router_id, event.link)
        elif router.link:
            self._actions.append(RouterDropped(router.link, "this router has opened another stream"))
            self._leave_queue(router.link)
            del self._routers_by_link[router.link]
        router.link, router.expires_s = event.link, math.inf
        self._routers_by_link[event.link] = router
        announced = {running.lease for running in event.running}
        for number in router.leases - announced:
            self._free(number)
        for running in event.running:
            self._take_over(router, running)

    def _take_over(self, router: Router, running: events.RunningLease) -> None:
        if (known := self.fleet.leases.get(running.lease)) is not None:
            if known.router_id != router.router_id:
                self.oddities["lease_collision"] += 1
            return
        lease = Lease(
            number=running.lease,
            router_id=router.router_id,
            instance_id=running.instance_id,
            request_id=running.request_id,
            tenant=running.tenant,
            choices=1,
            prompt_tokens=running.prompt_tokens,
            kv_tokens=running.prompt_tokens,
            granted_s=self._now_s,
        )
        self.fleet.hold(lease)
        router.leases.add(lease.number)

    def _router_lost(self, link: int) -> None:
        router = self._routers_by_link.pop(link, None)
        if router is None:
            return
        self._leave_queue(link)
        router.link, router.expires_s = 0, self._now_s + self.policy.router_grace_s
        if not router.leases:
            del self.routers[router.router_id]

    def _leave_queue(self, link: int) -> None:
        for waiting in self.queue.of_link(link):
            self._remove_waiting(waiting)

    def _forget_router(self, router: Router) -> None:
        del self.routers[router.router_id]
        for number in list(router.leases):
            self._free(number)

    # Asks.

    def _asked(self, link: int, ask: events.Ask) -> None:
        if link not in self._routers_by_link:
            return
        if self.queue.find(link, ask.number) is not None:
            self._actions.append(RouterDropped(link, f"ask {ask.number} was asked twice"))
            self._router_lost(link)
            return
        refused = self._refusal(link, ask)
        if refused is not None:
            self._actions.append(refused)
            return
        waiting = self.queue.add(self._now_s, link, ask)
        if self._place_newcomer(waiting):
            return
        if len(self.queue) > self.policy.max_queued:
            limit = self.policy.max_queued
            message = f"{len(self.queue) - 1} requests wait already (limit {limit})"
            self._refuse_waiting(waiting, types_pb2.ERROR_CODE_OVERLOADED, message, retry_after_ms=self._drain_ms())
            return
        self._actions.append(self._waits(waiting))

    def _refusal(self, link: int, ask: events.Ask) -> Refused | None:
        """Why an ask can't even wait, if so."""
        if ask.deadline_s is not None and ask.deadline_s <= self._now_s:
            code = types_pb2.ERROR_CODE_DEADLINE_EXCEEDED
            return Refused(link, ask.number, code, "the deadline had passed before the request was queued")
        if not 1 <= len(ask.pools) <= MAX_POOLS or len(set(ask.pools)) != len(ask.pools):
            message = f"pools: expected 1 to {MAX_POOLS} different ones, got {len(ask.pools)}"
            return Refused(link, ask.number, types_pb2.ERROR_CODE_INVALID_ARGUMENT, message)
        if ask.choices < 1:
            message = f"choices: must be at least 1, got {ask.choices}"
            return Refused(link, ask.number, types_pb2.ERROR_CODE_INVALID_ARGUMENT, message)
        return self._stranded(link, ask)

    def _stranded(self, link: int, ask: events.Ask) -> Refused | None:
        """The refusal of an ask that no worker as they are now could ever run; None when some could, or may come."""
        pools = [pool for name in ask.pools if (pool := self.fleet.pools.get(name)) is not None]
        if any(pool.can_ever_run(ask) for pool in pools):
            return None
        ready = [pool for pool in pools if pool.ready]
        longest = max((pool.max_prompt_tokens for pool in ready), default=0)
        if ready and ask.prompt_tokens > longest:
            message = f"the prompt has {ask.prompt_tokens} tokens; the longest that a worker takes is {longest}"
            return Refused(link, ask.number, types_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, message)
        if self._may_still_come(ask):
            return None
        if ready:
            message = "every worker that could run this has just failed it"
        else:
            message = f"no worker is ready in {', '.join(ask.pools)}"
        code = types_pb2.ERROR_CODE_UNAVAILABLE
        return Refused(link, ask.number, code, message, retryable=True, retry_after_ms=UNAVAILABLE_RETRY_MS)

    def _may_still_come(self, ask: events.Ask) -> bool:
        return self._settled_s is not None and self._seen_pools.isdisjoint(ask.pools)

    def _refuse_stranded(self, waitings: list[Waiting]) -> None:
        """Some workers are gone: refuse those of these asks that nobody is left for."""
        for waiting in waitings:
            refused = self._stranded(waiting.link, waiting.ask)
            if refused is not None:
                self._remove_waiting(waiting)
                self._actions.append(refused)

    def _refuse_waiting(
        self, waiting: Waiting, code: types_pb2.ErrorCode, message: str, retry_after_ms: int = 0
    ) -> None:
        self._remove_waiting(waiting)
        retryable = code != types_pb2.ERROR_CODE_DEADLINE_EXCEEDED
        self._actions.append(Refused(waiting.link, waiting.ask.number, code, message, retryable, retry_after_ms))

    def _withdrawn(self, event: events.Withdrawn) -> None:
        waiting = self.queue.find(event.link, event.ask)
        # Otherwise its answer is under way, and a Release will answer that.
        if waiting is not None:
            self._remove_waiting(waiting)

    def _remove_waiting(self, waiting: Waiting) -> None:
        self.queue.remove(waiting)
        if waiting.reserved:
            self._unreserve(waiting)

    def _waits(self, waiting: Waiting) -> Waits:
        position = min(self.queue.position(waiting, pool) for pool in waiting.ask.pools)
        rate = self._completions.per_s(self._now_s)
        estimate_ms = _milliseconds(position / rate) if rate > 0.0 else 0
        return Waits(waiting.link, waiting.ask.number, position, estimate_ms)

    def _drain_ms(self) -> int:
        """When a refused request may find room: once what waits now has been served, as far as one can tell."""
        rate = self._completions.per_s(self._now_s)
        wait_s = len(self.queue) / rate if rate > 0.0 else 1.0
        return _milliseconds(min(max(wait_s, 0.1), 60.0))

    # Placement.

    def _place_newcomer(self, waiting: Waiting) -> bool:
        """Try all workers for one ask. Those before it in line were tried when they came, and since."""
        for name in waiting.ask.pools:
            pool = self.fleet.pools.get(name)
            worker = pool.choose(waiting.ask, self._rng) if pool is not None else None
            if pool is not None and worker is not None:
                self._count_pass(pool, waiting)
                self._grant(pool, worker, waiting)
                return True
        return False

    def _offer(self, worker: Worker) -> None:
        """A worker may have room: give it to those whose turn it is."""
        pool = self.fleet.pools.get(worker.pool)
        while pool is not None and (waiting := self._next_for(pool, worker)) is not None:
            self._count_pass(pool, waiting)
            self._grant(pool, worker, waiting)

    def _next_for(self, pool: Pool, worker: Worker) -> Waiting | None:
        """The next in line that this worker can run now."""
        # Its order is left by a worker that is full, not ready, or keeps its room for one ask.
        if worker.order_key is None and not worker.reserved_for:
            return None
        for waiting in islice(self.queue.in_turn(self._now_s, pool.name), LOOKAHEAD):
            if worker.reserved_for not in (0, waiting.sequence) or not worker.can_ever_run(waiting.ask):
                continue
            if worker.has_room(waiting.ask):
                return waiting
            if waiting.passed >= PASS_LIMIT and not waiting.reserved:
                self._reserve(pool, worker, waiting)
                return None
        return None

    def _count_pass(self, pool: Pool, served: Waiting) -> None:
        first = self.queue.first(self._now_s, pool.name)
        if first is not None and first is not served:
            first.passed += 1

    def _reserve(self, pool: Pool, worker: Worker, waiting: Waiting) -> None:
        worker.reserved_for, waiting.reserved = waiting.sequence, worker.instance_id
        pool.reorder(worker)

    def _unreserve(self, waiting: Waiting) -> None:
        worker = self.fleet.workers.get(waiting.reserved)
        waiting.reserved = ""
        if worker is not None and worker.reserved_for == waiting.sequence:
            worker.reserved_for = 0
            self.fleet.pools[worker.pool].reorder(worker)

    def _grant(self, pool: Pool, worker: Worker, waiting: Waiting) -> None:
        self._remove_waiting(waiting)
        ask = waiting.ask
        router = self._routers_by_link[waiting.link]
        lease = Lease(
            number=self._next_lease,
            router_id=router.router_id,
            instance_id=worker.instance_id,
            request_id=ask.request_id,
            tenant=ask.tenant,
            choices=ask.choices,
            prompt_tokens=ask.prompt_tokens,
            kv_tokens=kv_tokens(ask),
            granted_s=self._now_s,
        )
        self._next_lease += 1
        self.fleet.hold(lease)
        router.leases.add(lease.number)
        self._actions.append(
            Granted(
                link=waiting.link,
                ask=ask.number,
                lease=lease.number,
                worker_id=worker.worker_id,
                instance_id=worker.instance_id,
                address=worker.address,
                queue_s=self._now_s - waiting.arrived_s,
                pool=pool.name,
                request_class=ask.request_class,
            )
        )

    # Leases.

    def _released(self, event: events.Released) -> None:
        router = self._routers_by_link.get(event.link)
        lease = self.fleet.leases.get(event.lease)
        if lease is None:
            # Its worker was lost, or it is released a second time.
            self.oddities["release_unknown"] += 1
        elif router is None or lease.router_id != router.router_id:
            self.oddities["release_foreign"] += 1
        else:
            self._completions.add(self._now_s)
            self._free(event.lease)

    def _free(self, number: int) -> None:
        """The one way by which a lease ends while its worker lives."""
        lease = self.fleet.leases[number]
        router = self.routers.get(lease.router_id)
        if router is not None:
            router.leases.discard(number)
        worker = self.fleet.free(number)
        if worker is not None:
            self._offer(worker)

    # Workers.

    def _worker_joined(self, event: events.WorkerJoined) -> None:
        missing = [name for name in ("worker_id", "instance_id", "pool", "address") if not getattr(event, name)]
        if missing:
            self._actions.append(JoinRefused(event.link, f"hello: {', '.join(missing)} must not be empty"))
            return
        if event.instance_id in self.fleet.workers:
            message = f"instance {event.instance_id} is joined already"
            self._actions.append(JoinRefused(event.link, message, already_joined=True))
            return
        # Two processes can't listen at one address, so whoever was there before is gone.
        for previous in self.fleet.at_address(event.address):
            message = f"instance {event.instance_id} is at {event.address} now"
            self._actions.append(WorkerDropped(previous.link, message))
            self._remove_worker(previous)
        contradiction = self.fleet.contradiction(event)
        if contradiction:
            message = f"contradicts the other workers of pool {event.pool}: {contradiction}"
            self._actions.append(JoinRefused(event.link, message))
            return
        if self._settled_s is not None:
            self._seen_pools.add(event.pool)
        worker = self.fleet.join(self._now_s, event)
        self._workers_by_link[event.link] = worker
        self._silence_check_s = min(self._silence_check_s, self._now_s + self.policy.silence_s)
        self._actions.append(Welcomed(event.link, _milliseconds(self.policy.heartbeat_s)))

    def _worker_reported(self, event: events.WorkerReported) -> None:
        worker = self._workers_by_link.get(event.link)
        if worker is None:
            return
        pool = self.fleet.pools[worker.pool]
        served_tokens = pool.max_prompt_tokens
        changed = self.fleet.report(self._now_s, worker, event.load, lag_s=self.policy.heartbeat_s)
        if changed and (not worker.ready or pool.max_prompt_tokens < served_tokens):
            self._serves_less(worker, pool.max_prompt_tokens < served_tokens)
        self._offer(worker)

    def _remove_worker(self, worker: Worker) -> None:
        del self._workers_by_link[worker.link]
        pool = self.fleet.pools[worker.pool]
        served_tokens = pool.max_prompt_tokens
        for lease in worker.held.leases.values():
            router = self.routers.get(lease.router_id)
            if router is not None:
                router.leases.discard(lease.number)
        self.fleet.remove(worker)
        self._serves_less(worker, pool.max_prompt_tokens < served_tokens)

    def _serves_less(self, worker: Worker, shorter: bool) -> None:
        """A worker takes nothing any more, or its pool only shorter prompts: who waits may have nobody left."""
        if worker.reserved_for:
            for waiting in self.queue.of_pool(worker.pool):
                if waiting.sequence == worker.reserved_for:
                    self._unreserve(waiting)
                    break
            worker.reserved_for = 0
        # With others left, only they who refuse some of them can be concerned.
        self._refuse_stranded(self.queue.of_pool(worker.pool) if shorter else self.queue.picky(worker.pool))


def _expired(now_s: float, waiting: Waiting) -> str:
    return f"the deadline passed in the queue, after {now_s - waiting.arrived_s:.2f} s"


def _milliseconds(seconds: float) -> int:
    return math.ceil(min(seconds, 3600.0) * 1000)
