"""The scheduler's main conversations, as scripts with their expected transcripts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.scheduler_bench import normal, play

SCENARIOS: dict[str, tuple[dict[str, Any], str]] = {
    "one after the other": (
        {},
        """
        router r
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2
        -> 2 waits as 1
        ask 3
        -> 3 waits as 2
        +2
        release 1
        -> 2 granted on A after 2 s
        release 2
        -> 3 granted on A after 2 s
        release 3
        """,
    ),
    "higher classes first, first come first served inside": (
        {},
        """
        router r
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2 cls=batch
        -> 2 waits as 1
        ask 3 cls=standard
        -> 3 waits as 1
        ask 4 cls=interactive left_s=5
        -> 4 waits as 1
        ask 5 cls=interactive left_s=1
        -> 5 waits as 2
        release 1
        -> 4 granted on A after 0 s
        release 4
        -> 5 granted on A after 0 s
        release 5
        -> 3 granted on A after 0 s
        release 3
        -> 2 granted on A after 0 s
        """,
    ),
    "a low class is passed over for two agings at most": (
        {},
        """
        router r
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2 cls=batch
        -> 2 waits as 1
        +30
        ask 3 cls=standard
        -> 3 waits as 1
        ask 4 cls=interactive
        -> 4 waits as 1
        release 1
        -> 4 granted on A after 0 s
        +30
        ask 5 cls=interactive
        -> 5 waits as 1
        release 4
        -> 2 granted on A after 60 s
        release 2
        -> 3 granted on A after 30 s
        """,
    ),
    "deadlines hold in the queue": (
        {},
        """
        router r
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2 left_s=1
        -> 2 waits as 1
        ask 3 left_s=0
        -> 3 refused: deadline_exceeded: the deadline had passed before the request was queued
        +1
        -> 2 refused: deadline_exceeded: the deadline passed in the queue, after 1.00 s
        +8
        release 1
        """,
    ),
    "a deadline in the same moment as the room": (
        {},
        """
        router r
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2 left_s=1
        -> 2 waits as 1
        ask 3
        -> 3 waits as 2
        +1
        -> 2 refused: deadline_exceeded: the deadline passed in the queue, after 1.00 s
        release 1
        -> 3 granted on A after 1 s
        """,
    ),
    "the queue is bounded": (
        {"max_queued": 1},
        """
        router r
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2
        -> 2 waits as 1
        ask 3
        -> 3 refused: overloaded: 1 requests wait already (limit 1), retry after 1000 ms
        withdraw 2
        ask 4
        -> 4 waits as 1
        """,
    ),
    "a client that leaves the queue": (
        {},
        """
        router r
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2
        -> 2 waits as 1
        ask 3
        -> 3 waits as 2
        withdraw 2
        withdraw 2
        release 1
        -> 3 granted on A after 0 s
        """,
    ),
    "no worker, then one that isn't ready, then one that is": (
        {},
        """
        router r
        ask 1
        -> 1 refused: unavailable: no worker is ready in p, retry after 1000 ms
        worker A state=starting
        -> A welcome
        ask 2
        -> 2 refused: unavailable: no worker is ready in p, retry after 1000 ms
        report A
        ask 3
        -> 3 granted on A after 0 s
        """,
    ),
    "a worker drains: nothing new, what runs ends": (
        {},
        """
        router r
        worker A
        -> A welcome
        worker B
        -> B welcome
        report A state=draining
        ask 1
        -> 1 granted on B after 0 s
        ask 2
        -> 2 waits as 1
        report B state=unhealthy
        -> 2 refused: unavailable: no worker is ready in p, retry after 1000 ms
        release 1
        report B
        ask 3
        -> 3 granted on B after 0 s
        """,
    ),
    "a silent worker is out, and who waited for it is told": (
        {},
        """
        router r
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2
        -> 2 waits as 1
        +3 silent
        -> A dropped: no report for 3.00 s
        -> 2 refused: unavailable: no worker is ready in p, retry after 1000 ms
        release 1
        """,
    ),
    "a worker restarts: another instance, an empty load": (
        {},
        """
        router r
        worker A slots=3
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2
        -> 2 granted on A after 0 s
        worker A slots=3
        -> worker dropped: instance A-3 is at A:1 now
        -> A welcome
        ask 3
        -> 3 granted on A after 0 s
        release 1
        release 2
        release 3
        """,
    ),
    "the same instance twice": (
        {},
        """
        worker A instance=same
        -> A welcome
        worker A instance=same
        -> join refused: instance same is joined already
        """,
    ),
    "a worker of another model in the pool": (
        {},
        """
        worker A
        -> A welcome
        worker B model=other
        -> join refused: contradicts the other workers of pool p: ('model', 'other') where the pool has ('model', 'm')
        """,
    ),
    "workers that failed it are avoided": (
        {},
        """
        router r
        worker A
        -> A welcome
        worker B
        -> B welcome
        ask 1 avoid=A
        -> 1 granted on B after 0 s
        ask 2 avoid=A
        -> 2 waits as 1
        ask 3 avoid=B
        -> 3 granted on A after 0 s
        ask 4 avoid=A,B
        -> 4 refused: unavailable: every worker that could run this has just failed it, retry after 1000 ms
        lose B
        -> 2 refused: unavailable: every worker that could run this has just failed it, retry after 1000 ms
        """,
    ),
    "prompts too long for every worker": (
        {},
        """
        router r
        worker A context=100
        -> A welcome
        worker B context=200
        -> B welcome
        ask 1 prompt=199
        -> 1 granted on B after 0 s
        ask 2 prompt=200
        -> 2 refused: context_length_exceeded: the prompt has 200 tokens; the longest that a worker takes is 199
        ask 3 prompt=150
        -> 3 waits as 1
        lose B
        -> 3 refused: context_length_exceeded: the prompt has 150 tokens; the longest that a worker takes is 99
        """,
    ),
    "pools in order of preference": (
        {},
        """
        router r
        worker A pool=p
        -> A welcome
        worker B pool=q model=small
        -> B welcome
        ask 1 pools=p,q
        -> 1 granted on A after 0 s
        ask 2 pools=p,q
        -> 2 granted on B after 0 s
        ask 3 pools=p,q
        -> 3 waits as 1
        ask 4 pools=q
        -> 4 waits as 2
        release 2
        -> 3 granted on B after 0 s
        release 1
        release 3
        -> 4 granted on B after 0 s
        ask 5 pools=p,p
        -> 5 refused: invalid_argument: pools: expected 1 to 16 different ones, got 2
        """,
    ),
    "choices take slots": (
        {},
        """
        router r
        worker A slots=4
        -> A welcome
        ask 1 n=3
        -> 1 granted on A after 0 s
        ask 2 n=2
        -> 2 waits as 1
        ask 3 n=9
        -> 3 waits as 2
        ask 4
        -> 4 granted on A after 0 s
        release 1
        -> 2 granted on A after 0 s
        release 4
        release 2
        -> 3 granted on A after 0 s
        """,
    ),
    "KV: full, then reported to be shared": (
        {},
        """
        router r
        worker A slots=8 kv_blocks=10
        -> A welcome
        ask 1 prompt=60 max_tokens=20
        -> 1 granted on A after 0 s
        ask 2 prompt=60 max_tokens=20
        -> 2 granted on A after 0 s
        ask 3 prompt=60 max_tokens=20
        -> 3 waits as 1
        +0.5
        -> 3 granted on A after 0.5 s
        report A kv_blocks_used=8
        +0.5 silent
        report A kv_blocks_used=8
        ask 4 prompt=60 max_tokens=20
        -> 4 waits as 1
        release 1
        report A kv_blocks_used=4
        -> 4 granted on A after 0 s
        """,
    ),
    "a router comes back within its grace": (
        {"router_grace_s": 5.0},
        """
        router r
        router s
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 2
        -> 2 waits as 1
        ask 7 router=s
        -> 7 waits as 2
        router-lost r
        +4
        router r
        -> 7 granted on A after 4 s
        """,
    ),
    "a router does not come back": (
        {"router_grace_s": 5.0},
        """
        router r
        router s
        worker A
        -> A welcome
        ask 1
        -> 1 granted on A after 0 s
        ask 7 router=s
        -> 7 waits as 1
        router-lost r
        +5
        -> 7 granted on A after 5 s
        """,
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    policy, script = SCENARIOS[name]
    assert play(script, **policy) == normal(script)
