"""Placements a second through the scheduler's own stream, and whether their cost grows with the fleet.

The scheduler is a process of its own; this one stands for all others: so many workers that have joined and report as
often as they are told, and one router whose ``Place`` stream carries asks and releases by the hundred, as a busy
router's does.
What is shown for each size of the fleet is the scheduler's CPU for 1,000 placements (ask, grant, release), less what
the heartbeats alone cost it in the same time, and placements a second of the wall, in which this process has its share.

    .venv/bin/python benchmarks/scheduler_bench.py --workers 10,1000,4000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from typing import Any

import grpc
from mesh import BenchError, Mesh, Process

from headrace.serving import channel
from headrace.v1 import scheduler_pb2, types_pb2, worker_pb2

#: Asks in one message.
BATCH = 256
#: Asks without an answer at most.
IN_FLIGHT = 2048
SLOTS = 64
#: Workers that join.
AT_A_TIME = 250
_READY_WITHIN_S = 120.0


class Fleet:
    """Workers that have joined and say that they are idle."""

    def __init__(self, link: grpc.aio.Channel) -> None:
        self._join = link.stream_stream("/headrace.v1.SchedulerService/Join")
        self._tasks: list[asyncio.Task[None]] = []
        self._report = scheduler_pb2.JoinRequest(load=worker_pb2.Load(state=worker_pb2.WORKER_STATE_READY))

    async def start(self, workers: int) -> None:
        """All join, some at a time: of more than a thousand calls that wait, gRPC's server cancels some by lot,
        and a worker would come again."""
        joined = asyncio.Semaphore(0)
        for first in range(0, workers, AT_A_TIME):
            group = range(first, min(first + AT_A_TIME, workers))
            self._tasks += [asyncio.create_task(self._live(index, joined)) for index in group]
            for _ in group:
                await asyncio.wait_for(joined.acquire(), _READY_WITHIN_S)

    async def _live(self, index: int, joined: asyncio.Semaphore) -> None:
        call = self._join()
        hello = scheduler_pb2.JoinHello(
            worker_id=f"w{index}",
            instance_id=f"i{index}",
            pool="p",
            address=f"w{index}:1",
            description=types_pb2.ModelDescription(model="m", slots=SLOTS, context_tokens=32768, block_tokens=16),
        )
        await call.write(scheduler_pb2.JoinRequest(hello=hello, load=self._report.load).SerializeToString())
        welcome = scheduler_pb2.JoinResponse.FromString(await call.read()).welcome
        heartbeat_s = welcome.heartbeat_ms / 1e3
        joined.release()

        async def heed() -> None:
            nonlocal heartbeat_s
            while (message := await call.read()) is not grpc.aio.EOF:
                command = scheduler_pb2.JoinResponse.FromString(message)
                if command.HasField("set_heartbeat"):
                    heartbeat_s = command.set_heartbeat.heartbeat_ms / 1e3

        self._tasks.append(asyncio.create_task(heed()))
        report = self._report.SerializeToString()
        # Not all at once.
        await asyncio.sleep(heartbeat_s * (index % 100) / 100)
        while True:
            await call.write(report)
            await asyncio.sleep(heartbeat_s)

    async def stop(self) -> None:
        """All leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def place(link: grpc.aio.Channel, placements: int) -> float:
    """Ask for so many and give each back when the next message goes; returns the seconds that it took."""
    call = link.stream_stream("/headrace.v1.SchedulerService/Place")()
    await call.write(scheduler_pb2.PlaceRequest(hello=scheduler_pb2.RouterHello(router_id="bench")).SerializeToString())
    await call.read()
    granted: deque[int] = deque()
    answered = asked = 0
    # What a router knows when it asks; the same text each time, so that this process has less to do.
    ask = scheduler_pb2.PlaceRequest.Ask(request_id="x" * 24, pools=["p"], prompt_tokens=300, max_tokens=64, n=1)
    began_s = time.perf_counter()

    async def write() -> None:
        nonlocal asked
        while answered < placements:
            full = asked == placements or asked - answered >= IN_FLIGHT
            # What was granted is given back even when nothing more can be asked: others wait for the room.
            if full and not granted:
                await asyncio.sleep(0)
                continue
            message = scheduler_pb2.PlaceRequest()
            for _ in range(0 if full else min(BATCH, placements - asked)):
                asked += 1
                ask.ask = asked
                ask.prompt_tokens = 100 + asked * 37 % 400
                message.asks.append(ask)
            while granted:
                message.releases.add(lease=granted.popleft(), outcome=types_pb2.OUTCOME_STOP)
            await call.write(message.SerializeToString())

    writer = asyncio.create_task(write())
    while answered < placements:
        response = scheduler_pb2.PlaceResponse.FromString(await call.read())
        for placement in response.placements:
            if placement.HasField("grant"):
                answered += 1
                granted.append(placement.grant.lease)
            elif placement.HasField("rejected"):
                raise BenchError(f"rejected: {placement.rejected.message}")
    await writer
    seconds = time.perf_counter() - began_s
    call.cancel()
    return seconds


async def measure(scheduler: Process, address: str, workers: int, placements: int) -> dict[str, Any]:
    """One size of the fleet."""
    async with channel(address) as members, channel(address) as router:
        fleet = Fleet(members)
        await fleet.start(workers)
        await place(router, placements // 10)
        idle_from_s, idle_cpu_s = time.perf_counter(), scheduler.cpu_s()
        await asyncio.sleep(4.0)
        idle_share = (scheduler.cpu_s() - idle_cpu_s) / (time.perf_counter() - idle_from_s)
        before_s = scheduler.cpu_s()
        seconds = await place(router, placements)
        cpu_s = scheduler.cpu_s() - before_s - idle_share * seconds
        await fleet.stop()
    return {
        "workers": workers,
        "placements_per_s": round(placements / seconds),
        "cpu_ms_per_1000": round(cpu_s / placements * 1e6, 2),
        "placements_per_cpu_s": round(placements / cpu_s) if cpu_s > 0 else None,
        "heartbeats_cpu_share": round(idle_share, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="10,1000,4000", help="sizes of the fleet")
    parser.add_argument("--placements", type=int, default=100_000)
    parser.add_argument("--reports-per-s", type=float, default=500.0, help="of all workers, as the scheduler asks")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    try:
        # One loop for all: gRPC keeps to the first.
        with asyncio.Runner() as loop:
            for workers in (int(each) for each in arguments.workers.split(",")):
                with Mesh() as mesh:
                    scheduler = mesh.service(
                        "scheduler", address="127.0.0.1:0", reports_per_s=arguments.reports_per_s, heartbeats_missed=120
                    )
                    address = mesh.ready["scheduler"]["address"]
                    result = loop.run(measure(scheduler, address, workers, arguments.placements))
                results.append(result)
                if not arguments.json:
                    print(
                        f"{workers:6,} workers: {result['placements_per_s']:7,} placements/s, "
                        f"CPU {result['cpu_ms_per_1000']:6.2f} ms for 1,000 "
                        f"({result['placements_per_cpu_s'] or 0:,} a CPU second), "
                        f"heartbeats {result['heartbeats_cpu_share']:.1%} of a core",
                        flush=True,
                    )
    except BenchError as error:
        sys.exit(f"scheduler_bench: {error}")
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
