"""The scripted worker itself, against a plain client of its contract: what the other tests stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from headrace.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from tests.support.scripted import Bench, ScriptedWorker, Step, counting, parse
from tests.support.toy import ToyModel


@pytest.mark.parametrize(
    ("script", "steps"),
    [
        ("'ab'", [Step((97, 98))]),
        ("[240 159]; [153 130]", [Step((240, 159)), Step((153, 130))]),
        ("'Q' [900] 'x' 'y'", [Step((81, 900, 120, 121))]),
        ("'a;\\n\\''; END", [Step((97, 59, 10, 39)), Step(end=types_pb2.OUTCOME_STOP)]),
        ("+50; 'é'; END:length", [Step(wait_s=0.05), Step((195, 169)), Step(end=types_pb2.OUTCOME_LENGTH)]),
        ("DIE", [Step(die=True)]),
        ("'a' END", [Step((97,), end=types_pb2.OUTCOME_STOP)]),
        ("HANG", [Step(hang=True)]),
        ("ERR:INVALID_ARGUMENT", [Step(error=types_pb2.ERROR_CODE_INVALID_ARGUMENT)]),
    ],
)
def test_scripts_are_read(script: str, steps: list[Step]) -> None:
    assert list(parse(script)) == steps


@pytest.mark.parametrize("script", ["'a", "ab", "END:never", "ERR:NO_SUCH_CODE", "[1 x]"])
def test_a_script_with_a_mistake_is_refused(script: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse(script)


def test_counting_waits_between_ids() -> None:
    assert counting(2, 10) == "'0'; +10; '1'; +10; END:length"


class Link:
    """One Run stream of a plain client."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self.channel = grpc.aio.insecure_channel(worker.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.call = worker_pb2_grpc.WorkerServiceStub(self.channel).Run()
        self.frames: list[worker_pb2.RunResponse] = []

    async def begin(self) -> Link:
        await self.call.write(worker_pb2.RunRequest(hello=worker_pb2.RunHello(router_id="r")))
        welcome = await self.call.read()
        assert welcome.HasField("welcome")
        return self

    async def submit(self, text: str, *, number: int = 1, seeds: int = 1, **more: object) -> None:
        submit = worker_pb2.Submit(request=number, epoch=1, model="toy", prompt_ids=text.encode(), **more)
        submit.sampling.seeds.extend(range(seeds))
        await self.call.write(worker_pb2.RunRequest(submits=[submit]))

    async def until_end(self, ends: int = 1) -> list[worker_pb2.TokenDelta]:
        deltas: list[worker_pb2.TokenDelta] = []
        async with asyncio.timeout(5):
            while sum(delta.HasField("finish") for delta in deltas) < ends:
                deltas += (await self.call.read()).deltas
        return deltas

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    worker = await ScriptedWorker(ToyModel(), slots=4).start()
    yield worker
    await worker.stop()


@pytest.fixture
async def link(worker: ScriptedWorker) -> AsyncIterator[Link]:
    link = await Link(worker).begin()
    yield link
    await link.close()


async def test_a_step_is_one_delta_and_the_end_has_the_books(worker: ScriptedWorker, link: Link) -> None:
    worker.bench.play("'ab'; [240 159]; END")
    await link.submit("hello")
    deltas = await link.until_end()
    assert [list(delta.ids) for delta in deltas] == [[97, 98], [240, 159], []]
    assert [delta.first_index for delta in deltas] == [0, 2, 4]
    finish = deltas[-1].finish
    assert finish.outcome == types_pb2.OUTCOME_STOP
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (5, 4)
    entry = await worker.bench.entry()
    assert (entry.prompt, entry.sent) == ("hello", [97, 98, 240, 159])
    assert worker.idle


async def test_each_choice_has_its_script(worker: ScriptedWorker, link: Link) -> None:
    worker.bench.play("'abc'; END", "'de'; END:length")
    await link.submit("x", seeds=2)
    deltas = await link.until_end(2)
    texts = {n: b"".join(bytes(delta.ids) for delta in deltas if delta.choice == n) for n in (0, 1)}
    assert texts == {0: b"abc", 1: b"de"}


async def test_full_blocks_are_reused_until_they_are_forgotten(worker: ScriptedWorker, link: Link) -> None:
    reused = []
    for number, text in enumerate(["abcdefghij", "abcdefghij", "abcdefgh", "abcdXXXX"], start=1):
        await link.submit(text, number=number)
        reused.append((await link.until_end())[0].cached_prompt_tokens)
    assert reused == [0, 8, 4, 4]
    worker.forget(b"abcdefgh")
    await link.submit("abcdefghij", number=5)
    assert (await link.until_end())[0].cached_prompt_tokens == 4


async def test_cancelling_stops_one_choice_or_all(worker: ScriptedWorker, link: Link) -> None:
    worker.bench.play("'a'; HANG")
    await link.submit("x", seeds=2)
    entry = await worker.bench.entry()
    cancel = worker_pb2.Cancel(request=1, epoch=1, choice=1, reason=types_pb2.OUTCOME_STOP)
    await link.call.write(worker_pb2.RunRequest(cancels=[cancel]))
    async with asyncio.timeout(5):
        await entry.choices[1].ended.wait()
    assert not entry.choices[0].ended.is_set()
    await link.call.write(worker_pb2.RunRequest(cancels=[worker_pb2.Cancel(request=1, epoch=1)]))
    await entry.ended()
    assert entry.cancelled
    assert entry.choices[1].cancel_reason == types_pb2.OUTCOME_STOP
    deltas = await link.until_end(2)
    assert {delta.finish.outcome for delta in deltas if delta.HasField("finish")} == {types_pb2.OUTCOME_CANCELLED}


async def test_a_gated_script_waits_for_the_test(worker: ScriptedWorker, link: Link) -> None:
    worker.bench.play("'a'; 'b'; END", gated=True)
    await link.submit("x")
    entry = await worker.bench.entry()
    assert entry.sent == []
    entry.release()
    assert [list(delta.ids) for delta in (await link.call.read()).deltas] == [[97]]
    entry.release(2)
    await link.until_end()


async def test_death_breaks_the_connection_after_what_was_sent(worker: ScriptedWorker, link: Link) -> None:
    worker.bench.play("'abc'; DIE")
    await link.submit("x")
    frame = await link.call.read()
    assert list(frame.deltas[0].ids) == [97, 98, 99]
    with pytest.raises(grpc.aio.AioRpcError) as broken:
        async with asyncio.timeout(5):
            await link.call.read()
    assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
    await (await worker.bench.entry()).ended()
    assert worker.idle


async def test_a_broken_link_ends_its_requests_only(worker: ScriptedWorker, link: Link) -> None:
    worker.bench.play("HANG")
    worker.bench.play("'a'; HANG")
    other = await Link(worker).begin()
    await link.submit("x")
    first = await worker.bench.entry(0)
    await other.submit("y")
    second = await worker.bench.entry(1)
    await other.close()
    await second.ended()
    assert not first.choices[0].ended.is_set()


async def test_an_error_before_the_first_id_is_a_refusal(worker: ScriptedWorker, link: Link) -> None:
    worker.bench.play("ERR:UNAVAILABLE")
    worker.bench.play("'a'; ERR:INTERNAL")
    await link.submit("x", number=1)
    refused = (await link.until_end())[-1].finish
    assert (refused.outcome, refused.error.retryable) == (types_pb2.OUTCOME_REJECTED, True)
    await link.submit("x", number=2)
    failed = (await link.until_end())[-1].finish
    assert (failed.outcome, failed.error.code) == (types_pb2.OUTCOME_FAILED, types_pb2.ERROR_CODE_INTERNAL)


async def test_one_slot_runs_one_choice_at_a_time() -> None:
    bench = Bench()
    worker = await ScriptedWorker(ToyModel(), bench, slots=1).start()
    link = await Link(worker).begin()
    try:
        bench.play("'a'; HANG")
        await link.submit("x", number=1)
        await bench.entry(0)
        await link.submit("y", number=2)
        await bench.entry(1)
        load = worker.load()
        assert (load.running_requests, load.waiting_requests) == (1, 1)
    finally:
        await link.close()
        await worker.stop()
