"""A service goes away: what runs goes on where it can, nothing is counted twice, and all is well when it is back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.integration.conftest import MODELS
from tests.support.clients import MODES, STREAMED, BrokenBody
from tests.support.mesh import Lab, Mesh
from tests.support.waiting import eventually

FIXED = {"temperature": 0}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One whose services are killed and started again."""
    scheduler = {"router_grace_s": 0.5, "heartbeats_missed": 20}
    mesh = Mesh(tmp_path_factory.mktemp("loss"), MODELS, scheduler=scheduler).start()
    yield mesh
    mesh.stop()


@pytest.fixture
async def own(mesh: Mesh, request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    """A lab at a router of its own, which ends with the test. The parameter: settings of it."""
    assert mesh.tap is not None
    settings = getattr(request, "param", {})
    process = mesh.launch("router", key="own", scheduler=mesh.tap.address, cache=mesh.cache, **settings)
    mesh.ready["own"] = process.ready()
    lab = Lab(mesh, "own")
    yield lab
    for worker in lab.workers:
        await worker.stop()
    process.kill()
    del mesh.processes["own"]
    await lab.hang_up()
    # Of what it did nothing is left, and the mesh's first router has seen the workers go.
    lab = Lab(mesh)
    await lab.sees("toy", 0)
    await lab.close()


async def killed(lab: Lab, name: str) -> None:
    await asyncio.to_thread(lab.mesh.processes[name].kill)


async def back(lab: Lab, name: str) -> None:
    """Starts it again where it was (from this thread, with which it ends)."""
    peers = {"cache": lab.mesh.cache} if name == "scheduler" else {}
    process = lab.mesh.launch(name, address=lab.mesh.ready[name]["address"], **peers)
    lab.mesh.ready[name] = await asyncio.to_thread(process.ready)


async def answers(lab: Lab) -> None:
    """Waits until all are connected again."""

    async def good() -> bool:
        return (await lab.ask("good", mode="plain")).status == 200

    await eventually(good, "requests are answered")


@pytest.mark.parametrize("mode", MODES)
async def test_without_the_cache_every_request_is_generated(lab: Lab, mode: str) -> None:
    await lab.worker()
    await killed(lab, "cache")
    for _ in range(2):
        answer = (await lab.ask(f"away {mode}", FIXED, mode=mode)).succeeded()
        assert not answer.cached_answer
    assert len(lab.journal) == 2
    await back(lab, "cache")

    async def hit() -> bool:
        return (await lab.ask(f"back {mode}", FIXED, mode=mode)).succeeded().cached_answer

    await eventually(hit, "the cache answers again")


async def test_who_waits_for_anothers_answer_goes_on_without_the_cache(lab: Lab) -> None:
    await lab.worker(slots=4)
    lab.play("'a'; 'b'; END", gated=True)
    lab.play("'ab'; END")
    first = asyncio.create_task(lab.ask("together", FIXED, mode="stream"))
    entry = await lab.entry()
    second = asyncio.create_task(lab.ask("together", FIXED, mode="plain"))

    async def waits() -> bool:
        return (await lab.cache_stats()).waiters == 1

    await eventually(waits, "the second waits")
    await killed(lab, "cache")
    assert (await second).succeeded().text == "ab"
    entry.release(3)
    assert (await first).succeeded().text == "ab"
    await back(lab, "cache")


@pytest.mark.parametrize("mode", STREAMED)
async def test_a_stream_outlives_the_scheduler(lab: Lab, mode: str) -> None:
    worker = await lab.worker()
    lab.play("'a'; 'b'; 'c'; END", gated=True)
    answer = await lab.open("go", mode=mode)
    entry = await lab.entry()
    entry.release()
    assert await answer.piece() == "a"
    await killed(lab, "scheduler")
    entry.release()
    assert await answer.piece() == "b"
    await back(lab, "scheduler")

    async def announced() -> bool:
        fleet = await lab.fleet()
        return fleet.leases == 1 and any(item.instance_id == worker.instance_id for item in fleet.workers)

    await eventually(announced, "the running lease is announced again")
    entry.release(2)
    assert (await answer.rest()).succeeded().text == "abc"
    await lab.nothing_remains()
    await answers(lab)


async def test_an_answer_that_ends_while_the_scheduler_is_away(lab: Lab) -> None:
    await lab.worker()
    lab.play("'a'; END", gated=True)
    answer = await lab.open("go", mode="stream")
    entry = await lab.entry()
    await killed(lab, "scheduler")
    entry.release(2)
    assert (await answer.rest()).succeeded().text == "a"
    await back(lab, "scheduler")
    await answers(lab)

    async def none_leased() -> bool:
        return (await lab.fleet()).leases == 0

    await eventually(none_leased, "all leases given back")
    (await lab.ask("go", mode="plain")).succeeded()
    # The old scheduler's lease has nobody to be told to.
    lab.books.grants.clear()


async def test_who_waits_in_the_queue_is_asked_for_again(lab: Lab) -> None:
    await lab.worker(slots=1)
    lab.bench.play_for("first", "'a'; END", gated=True)
    lab.bench.play_for("second", "'b'; END")
    first = await lab.open("first", mode="stream")
    entry = await lab.entry()
    second = asyncio.create_task(lab.ask("second", mode="plain"))

    async def queued() -> bool:
        return (await lab.fleet()).queued_asks == 1

    await eventually(queued, "the second is queued")
    await killed(lab, "scheduler")
    await back(lab, "scheduler")
    await eventually(queued, "the second is queued again")
    entry.release(2)
    assert (await first.rest()).succeeded().text == "a"
    assert (await second).succeeded().text == "b"


@pytest.mark.parametrize("mode", MODES)
async def test_without_a_scheduler_nobody_waits_for_ever(lab: Lab, mode: str) -> None:
    await lab.worker()
    await killed(lab, "scheduler")
    answer = await lab.ask("go", mode=mode, headers={"x-headrace-deadline-ms": "1000"})
    assert answer.status in (503, 504)
    await back(lab, "scheduler")
    await answers(lab)
    (await lab.ask("go", mode=mode)).succeeded()


async def test_a_router_that_is_gone_leaves_nothing(own: Lab) -> None:
    lab = own
    await lab.worker(slots=2)
    lab.play("'a'; HANG")
    answer = await lab.open("go", mode="stream")
    assert await answer.piece() == "a"
    entry = await lab.entry()
    await killed(lab, "own")
    with pytest.raises((BrokenBody, ConnectionError)):
        await answer.rest()
    await entry.ended()
    assert entry.cancelled

    async def forgotten() -> bool:
        fleet = await lab.fleet()
        return not fleet.leases and fleet.routers == 1 and not fleet.queued_asks

    await eventually(forgotten, "the scheduler has forgotten it")
    assert lab.workers[0].idle


@pytest.mark.parametrize("mode", STREAMED)
async def test_a_router_told_to_stop_finishes_its_streams(own: Lab, mode: str) -> None:
    lab = own
    await lab.worker(slots=2)
    lab.play("'a'; 'b'; END", gated=True)
    answer = await lab.open("go", mode=mode)
    entry = await lab.entry()
    entry.release()
    assert await answer.piece() == "a"
    router = lab.mesh.processes["own"]
    router.popen.send_signal(signal.SIGTERM)

    async def closed() -> bool:
        try:
            status, _, _ = await lab.get("/health")
        except (OSError, BrokenBody):
            return True
        return status == 503

    await eventually(closed, "it takes nothing new")
    entry.release(2)
    assert (await answer.rest()).succeeded().text == "ab"
    assert await asyncio.to_thread(router.popen.wait, 10) == 0
    assert len(lab.books.released) == 1


@pytest.mark.parametrize("own", [{"drain_grace_s": 0.1}], indirect=True)
@pytest.mark.parametrize("mode", STREAMED)
async def test_what_has_not_ended_within_the_grace_is_told_why(own: Lab, mode: str) -> None:
    lab = own
    await lab.worker()
    lab.play("'a'; HANG")
    answer = await lab.open("go", mode=mode)
    assert await answer.piece() == "a"
    entry = await lab.entry()
    router = lab.mesh.processes["own"]
    router.popen.send_signal(signal.SIGTERM)
    (await answer.rest()).broken("draining")
    await entry.ended()
    assert entry.cancelled
    assert await asyncio.to_thread(router.popen.wait, 10) == 0
    assert len(lab.books.released) == 1


async def test_a_second_signal_ends_it_at_once(own: Lab) -> None:
    lab = own
    await lab.worker()
    lab.play("'a'; HANG")
    answer = await lab.open("go", mode="stream")
    assert await answer.piece() == "a"
    router = lab.mesh.processes["own"]
    router.popen.send_signal(signal.SIGTERM)

    async def closed() -> bool:
        try:
            status, _, _ = await lab.get("/health")
        except (OSError, BrokenBody):
            return True
        return status == 503

    await eventually(closed, "it drains")
    router.popen.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(router.popen.wait, 5) == 128 + signal.SIGTERM
    answer.leave()
