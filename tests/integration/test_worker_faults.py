"""Dead, stuck or only busy: success is only what the worker said was success, and liveness is work done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from headrace.v1 import worker_pb2
from tests.integration.conftest import MODELS
from tests.support.clients import MODES, STREAMED
from tests.support.mesh import Lab, Mesh, outcomes

STALL_S = 0.6


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One whose router is impatient with workers that send nothing."""
    mesh = Mesh(tmp_path_factory.mktemp("impatient"), MODELS, router={"stall_timeout_s": STALL_S}).start()
    yield mesh
    mesh.stop()


@pytest.mark.parametrize("mode", STREAMED)
@pytest.mark.parametrize("way", ["connection", "process"])
async def test_death_in_mid_stream_is_no_end(lab: Lab, mode: str, way: str) -> None:
    worker = await lab.worker()
    lab.play("'abc'; DIE", gated=True)
    answer = await lab.open("go", mode=mode)
    entry = await lab.entry()
    entry.release()
    assert await answer.piece() == "abc"
    if way == "process":
        await worker.crash()
    entry.release()
    whole = await answer.rest()
    whole.broken("worker_lost")
    assert whole.text == "abc"
    if mode == "grpc":
        assert whole.grpc_status.name == "UNAVAILABLE"
    assert outcomes(await lab.released()) == ["worker_lost"]


async def test_death_in_a_plain_answer(lab: Lab) -> None:
    await lab.worker()
    lab.play("'abc'; DIE")
    (await lab.ask("go", mode="plain")).refused(502, code="worker_lost")


@pytest.mark.parametrize("mode", MODES)
async def test_death_before_anything(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("DIE")
    answer = await lab.ask("go", mode=mode)
    assert answer.status in (502, 503)
    answer.refused(answer.status)


@pytest.mark.parametrize("mode", STREAMED)
async def test_a_worker_that_makes_nothing_is_given_up(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'a'; HANG")
    answer = await lab.open("go", mode=mode)
    assert await answer.piece() == "a"
    (await answer.rest()).broken("worker_lost")
    entry = await lab.entry()
    await entry.ended()
    assert entry.cancelled
    assert outcomes(await lab.released()) == ["worker_lost"]


async def test_what_a_stuck_worker_held_goes_on_elsewhere(lab: Lab) -> None:
    await lab.worker()
    lab.play("'a'; HANG")
    answer = await lab.open("go", mode="stream")
    assert await answer.piece() == "a"
    other = await lab.worker()
    lab.play("'b'; END")
    assert (await answer.rest()).succeeded().text == "ab"
    assert lab.journal[1].worker is other
    assert lab.journal[0].cancelled


@pytest.mark.parametrize("mode", MODES)
async def test_a_long_prefill_is_no_stall(lab: Lab, mode: str) -> None:
    """The step count moves, though no id comes for three times the limit."""
    await lab.worker()
    lab.play(f"+{int(STALL_S * 3000)}; 'a'; END")
    assert (await lab.ask("go", mode=mode)).succeeded().text == "a"


@pytest.mark.parametrize("mode", STREAMED)
async def test_an_idle_worker_is_ready(lab: Lab, mode: str) -> None:
    """A link without requests owes nothing."""
    await lab.worker()
    (await lab.ask("go", mode=mode)).succeeded()
    # The quiet time itself is what is tried, not a state that one could wait for.
    await asyncio.sleep(STALL_S * 2)
    assert await lab.ready_workers("toy") == 1
    links = lab.workers[0].links_opened
    (await lab.ask("go", mode=mode)).succeeded()
    assert lab.workers[0].links_opened == links


@pytest.mark.parametrize("mode", MODES)
async def test_no_usable_worker_at_all(lab: Lab, mode: str) -> None:
    answer = await lab.ask("go", mode=mode)
    answer.refused(503)
    assert (await lab.get("/live"))[0] == 200
    assert (await lab.get("/health"))[0] == 503
    await lab.worker()
    assert (await lab.get("/health"))[0] == 200
    (await lab.ask("go", mode=mode)).succeeded()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", ["DRAINING", "UNHEALTHY", "STARTING"])
async def test_a_worker_that_says_it_is_not_ready_gets_nothing(lab: Lab, mode: str, state: str) -> None:
    worker = await lab.worker()
    worker.set_state(worker_pb2.WorkerState.Value(f"WORKER_STATE_{state}"))
    await lab.sees("toy", 0)
    (await lab.ask("go", mode=mode)).refused(503)
    assert lab.journal == []
    worker.set_state(worker_pb2.WORKER_STATE_READY)
    await lab.sees("toy", 1)
    (await lab.ask("go", mode=mode)).succeeded()


@pytest.mark.parametrize("mode", STREAMED)
async def test_an_error_in_place_of_ids_is_that_error(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'ab'; ERR:INTERNAL", message="the engine fell over")
    answer = await lab.ask("go", mode=mode)
    failure = answer.broken("internal", "failed")
    assert answer.text == "ab"
    assert "the engine fell over" in failure.message
    assert outcomes(await lab.released()) == ["failed"]


async def test_a_slow_client_is_not_the_workers_stall(lab: Lab) -> None:
    """The client reads nothing for longer than the stall limit; the worker, that has sent all, is not blamed."""
    await lab.worker("toy-long", slots=2)
    lab.play("'a'; 'b'; END", gated=True)
    slow = await lab.open("slow", mode="stream")
    entry = await lab.entry()
    entry.release(3)
    await entry.ended()
    await asyncio.sleep(STALL_S * 2)  # the slowness itself
    assert (await slow.rest()).succeeded().text == "ab"
    assert outcomes(lab.books.released) == ["stop"]
    assert await lab.ready_workers("toy-long") == 1


async def test_a_client_that_reads_nothing_of_a_flood_ends_by_its_own_fault(lab: Lab) -> None:
    await lab.worker("toy-long", slots=2)
    step = f"[{' '.join(['1000'] * 20)}]"
    lab.play("; ".join([step] * 3000) + "; HANG")
    slow = await lab.open("slow", mode="stream", receive_buffer=4096)
    await (await lab.entry()).ended(20)
    assert outcomes(await lab.released()) == ["cancelled"]
    slow.leave(reset=True)
    (await lab.ask("go", mode="plain")).succeeded()


@pytest.mark.parametrize("mode", MODES)
async def test_ids_out_of_order_or_twice_are_not_shown(lab: Lab, mode: str) -> None:
    """Each index counts once; a gap is the worker's fault and never a shorter answer."""
    worker = await lab.worker()
    worker.index_shift = 1
    answer = await lab.ask("go", mode=mode)
    assert answer.failure is not None
    assert not answer.done
    worker.index_shift = 0
    (await lab.ask("go", mode=mode)).succeeded()


@pytest.mark.parametrize("mode", MODES)
async def test_a_worker_with_another_tokenizer_is_never_used(lab: Lab, mode: str) -> None:
    from tests.support.scripted import ScriptedWorker
    from tests.support.toy import ToyModel

    stranger = ScriptedWorker(ToyModel("toy", pieces={500: b"other"}), lab.bench)
    lab.workers.append(stranger)
    await stranger.start(lab.mesh.scheduler)
    (await lab.ask("go", mode=mode)).refused(503)
    assert stranger.journal == []
