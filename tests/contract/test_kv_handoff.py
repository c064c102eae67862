"""Prefill on one worker, decode on another: what ``PullKv``, ``Produce``, ``Fetch`` and ``Proceed`` promise.

Two workers with the sim engine, whose "KV" of a block names its ids, so that a block taken for another is found out.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.contract.test_engines import llama_cpp, sim
from tests.contract.test_worker_rpc import CANCELLED, FAST, LENGTH, REJECTED, Answer, Router, Worker, a_worker, submit
from tests.support.certificates import Authority
from tests.support.engines import Bench
from tests.support.waiting import eventually

from headrace.serving import channel
from headrace.tls import load
from headrace.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from headrace.worker import transfer
from headrace.worker.engine import Handoff, Request, Stopping
from headrace.worker.engines.sim import SimBackend
from headrace.worker.loop import BatchLoop
from headrace.worker.timing import Timing

PATIENCE_S = 20.0
#: 25 full blocks of 4, and two tokens more.
PROMPT = list(range(100, 202))
BLOCKS = 25
#: A step of a chunk of 16 tokens takes 20 ms.
SLOW_PROMPTS = Timing(prefill_tokens_per_s=800.0, step_s=0.0005, step_s_per_sequence=0.0)
#: The whole of a prompt takes four seconds.
LONG = Timing(prefill_tokens_per_s=25.0, step_s=0.0005, step_s_per_sequence=0.0)


def produce(reference: str = "r1", keep_ms: int = 5000) -> worker_pb2.KvHandoff:
    return worker_pb2.KvHandoff(produce=worker_pb2.KvHandoff.Produce(reference=reference, keep_ms=keep_ms))


def fetch(source: Worker, reference: str = "r1", tag: str = "sim-4") -> worker_pb2.KvHandoff:
    return worker_pb2.KvHandoff(
        fetch=worker_pb2.KvHandoff.Fetch(worker_address=source.server.address, reference=reference, kv_state_tag=tag)
    )


async def proceed(router: Router, number: int, ids: list[int]) -> None:
    await router.call.write(worker_pb2.RunRequest(proceeds=[worker_pb2.Proceed(request=number, epoch=1, ids=ids)]))


class Pull:
    """A taker that only looks."""

    def __init__(self, worker: Worker, reference: str = "r1", **changes: Any) -> None:
        wanted = {"reference": reference, "kv_state_tag": "sim-4", **changes}
        self.call = worker.stub.PullKv(worker_pb2.PullKvRequest(**wanted))
        self.parts: list[worker_pb2.PullKvResponse] = []

    async def read(self) -> grpc.StatusCode:
        async with asyncio.timeout(PATIENCE_S):
            try:
                async for part in self.call:
                    self.parts.append(part)
            except grpc.aio.AioRpcError as failure:
                return failure.code()
            return await self.call.code()


@asynccontextmanager
async def two(prefill: Timing = FAST, decode: Timing = FAST, **settings: Any) -> AsyncIterator[tuple[Worker, Worker]]:
    async with a_worker(prefill, **settings) as one, a_worker(decode, **settings) as other:
        yield one, other
        for worker in (one, other):
            await worker.at_rest()
            await eventually(lambda worker=worker: _nothing_kept(worker), "no hand-off is left", PATIENCE_S)


async def _nothing_kept(worker: Worker) -> bool:
    return not len(worker.service._handoffs) and not worker.service._handoffs.bytes


async def whole(worker: Worker, **changes: Any) -> Answer:
    """The answer in one place, computed afresh."""
    router = worker.router()
    await router.send(submit(1, PROMPT, bypass_prefix_cache=True, **changes))
    return await router.ended(1)


# --- both halves -----------------------------------------------------------------------------------------------------


async def test_the_answer_is_the_same_and_only_the_tail_is_computed() -> None:
    stopping = types_pb2.Stopping(max_tokens=9)
    async with two() as (one, other):
        expected = await whole(one, stopping=stopping)
        before = (await other.load()).cached_prompt_tokens_total
        first, second = one.router(), other.router()
        await second.send(submit(7, PROMPT, stopping=stopping, handoff=fetch(one)))
        await first.send(submit(3, PROMPT, stopping=stopping, handoff=produce()))
        beginning = await first.ended(3)
        assert beginning.finish is not None
        assert (beginning.ids, beginning.finish.outcome) == (expected.ids[:1], LENGTH)
        assert (7, 0) not in second.answers
        second.answers[7, 0] = Answer(ids=list(beginning.ids))
        await proceed(second, 7, beginning.ids)
        rest = await second.ended(7)
        assert rest.ids == expected.ids
        assert rest.finish is not None
        # What was fetched is not what the client was spared.
        assert rest.finish.usage == types_pb2.Usage(prompt_tokens=102, completion_tokens=9)
        load = await other.load()
        assert load.cached_prompt_tokens_total - before == 4 * BLOCKS
        assert load.kv_received_bytes_total == 32 * BLOCKS


async def test_blocks_come_while_the_prompt_is_computed() -> None:
    async with two(prefill=SLOW_PROMPTS) as (one, other):
        router = one.router()
        await router.send(submit(1, PROMPT, handoff=produce()))
        pull = Pull(one, wait_ms=5000)
        assert await pull.read() == grpc.StatusCode.OK
        *blocks, end = pull.parts
        assert [part.block for part in blocks] == list(range(BLOCKS))
        assert [token for part in blocks for token in part.ids] == PROMPT[:100]
        assert end.end_blocks == BLOCKS
        # A chunk is 16 to 32 tokens, so they came in several bursts.
        assert sum(part.waited for part in blocks) >= 3
        await router.ended(1)
        assert (await other.load()).kv_handoff_bytes == 0


async def test_a_taker_may_come_first_and_names_what_it_holds() -> None:
    async with two() as (one, _):
        pull = Pull(one, wait_ms=5000, first_block=20)
        reading = asyncio.create_task(pull.read())
        await eventually(lambda: _waits(one), "the taker waits", PATIENCE_S)
        router = one.router()
        await router.send(submit(1, PROMPT, handoff=produce()))
        await router.ended(1)
        assert await reading == grpc.StatusCode.OK
        assert [part.block for part in pull.parts[:-1]] == list(range(20, BLOCKS))


async def _waits(worker: Worker) -> bool:
    return bool(worker.service._takers._waiting)


async def test_what_both_hold_is_not_sent_again() -> None:
    async with two() as (one, other):
        for worker in (one, other):
            router = worker.router()
            await router.send(submit(1, PROMPT))
            await router.ended(1)
        second, first = other.router(), one.router()
        await second.send(submit(7, PROMPT, handoff=fetch(one)))
        await first.send(submit(3, PROMPT, handoff=produce(keep_ms=200)))
        beginning = await first.ended(3)
        assert beginning.cached == 101
        second.answers[7, 0] = Answer(ids=list(beginning.ids))
        await proceed(second, 7, beginning.ids)
        rest = await second.ended(7)
        assert rest.cached == 102
        assert (await other.load()).kv_received_bytes_total == 0


# --- what is refused -------------------------------------------------------------------------------------------------


async def test_kv_goes_only_to_who_may_have_it() -> None:
    async with two() as (one, _):
        router = one.router()
        await router.send(submit(1, PROMPT, cache_salt=b"mine", handoff=produce(keep_ms=400)))
        await router.ended(1)
        for changes, code in (
            ({"reference": "other", "cache_salt": b"mine"}, grpc.StatusCode.NOT_FOUND),
            ({"cache_salt": b"theirs"}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"cache_salt": b"mine", "lora": "x"}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"cache_salt": b"mine", "kv_state_tag": "sim-8"}, grpc.StatusCode.FAILED_PRECONDITION),
        ):
            pull = Pull(one, **changes)
            assert await pull.read() == code
            assert not pull.parts
        assert await Pull(one, cache_salt=b"mine").read() == grpc.StatusCode.OK
        # Once.
        assert await Pull(one, cache_salt=b"mine").read() == grpc.StatusCode.NOT_FOUND


async def test_it_is_gone_when_its_time_is_over() -> None:
    async with two() as (one, _):
        router = one.router()
        await router.send(submit(1, PROMPT, handoff=produce(keep_ms=50)))
        await router.ended(1)
        await eventually(lambda: _nothing_kept(one), "it has expired", PATIENCE_S)
        assert await Pull(one).read() == grpc.StatusCode.NOT_FOUND


async def test_a_prompt_that_is_given_up_ends_the_taking() -> None:
    async with two(prefill=LONG) as (one, _):
        router = one.router()
        await router.send(submit(1, PROMPT, handoff=produce()))
        reading = asyncio.create_task((pull := Pull(one, wait_ms=5000)).read())
        await eventually(lambda: _taken(one), "it is being taken", PATIENCE_S)
        await router.send(cancels=[worker_pb2.Cancel(request=1, epoch=1)])
        assert await reading == grpc.StatusCode.ABORTED
        # What was computed by then may have come.
        assert sum(len(part.ids) for part in pull.parts) < BLOCKS * 4
        # The same when its router is gone.
        router = one.router()
        await router.send(submit(1, PROMPT, handoff=produce("r2")))
        reading = asyncio.create_task(Pull(one, "r2", wait_ms=5000).read())
        await eventually(lambda: _taken(one), "it is being taken", PATIENCE_S)
        router.call.cancel()
        assert await reading == grpc.StatusCode.ABORTED


async def _taken(worker: Worker) -> bool:
    return any(kept.taken for kept in worker.service._handoffs._by_key.values())


async def test_a_taking_that_is_broken_off_gives_the_rest_up() -> None:
    async with two(prefill=SLOW_PROMPTS) as (one, _):
        router = one.router()
        await router.send(submit(1, PROMPT, handoff=produce()))
        pull = Pull(one, wait_ms=5000)
        async with asyncio.timeout(PATIENCE_S):
            await pull.call.read()
        pull.call.cancel()
        answer = await router.ended(1)
        assert len(answer.ids) == 1


async def test_what_does_not_fit_is_left_to_the_taker(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as (one, other):
        one.service._handoffs.max_bytes = 32 * 10
        expected = await whole(one)
        first, second = one.router(), other.router()
        await first.send(submit(3, PROMPT, handoff=produce()))
        beginning = await first.ended(3)
        assert one.service._handoffs.bytes == 32 * 10
        await second.send(submit(7, PROMPT, handoff=fetch(one)))
        second.answers[7, 0] = Answer(ids=list(beginning.ids))
        await proceed(second, 7, beginning.ids)
        assert (await second.ended(7)).ids == expected.ids
        assert (await other.load()).kv_received_bytes_total == 32 * 10


@pytest.mark.parametrize(
    ("handoff", "changes", "said"),
    [
        (worker_pb2.KvHandoff(), {}, "needs a role"),
        (produce(""), {}, "needs a reference"),
        (produce("x" * 300), {}, "longer than 256"),
        (produce(), {"bypass_prefix_cache": True}, "computed whole"),
        (produce(), {"logprobs": types_pb2.LogprobOptions(prompt=True)}, "computed whole"),
    ],
)
async def test_a_hand_off_that_makes_no_sense_is_refused(
    handoff: worker_pb2.KvHandoff, changes: dict[str, Any], said: str
) -> None:
    async with a_worker() as worker:
        router = worker.router()
        await router.send(submit(1, PROMPT, handoff=handoff, **changes))
        answer = await router.ended(1)
        assert answer.finish is not None
        assert answer.finish.outcome == REJECTED
        assert said in answer.finish.error.message


async def test_a_reference_has_one_hand_off_and_a_tag_must_fit() -> None:
    async with two(prefill=LONG) as (one, other):
        router = one.router()
        await router.send(submit(1, PROMPT, handoff=produce()), submit(2, PROMPT, handoff=produce()))
        answer = await router.ended(2)
        assert answer.finish is not None
        assert "in use" in answer.finish.error.message
        await router.send(submit(3, PROMPT, handoff=fetch(other, tag="sim-8")))
        answer = await router.ended(3)
        assert answer.finish is not None
        assert "'sim-8' is of no use here" in answer.finish.error.message
        router.call.cancel()


# --- a taker that goes on without ------------------------------------------------------------------------------------


async def test_without_a_first_id_all_is_computed_here() -> None:
    async with two(prefill=LONG) as (one, other):
        expected = await whole(other)
        first, second = one.router(), other.router()
        await first.send(submit(3, PROMPT, handoff=produce()))
        await second.send(submit(7, PROMPT, handoff=fetch(one)))
        await eventually(lambda: _taken(one), "it is being taken", PATIENCE_S)
        await proceed(second, 7, [])
        assert (await second.ended(7)).ids == expected.ids
        first.call.cancel()


async def test_a_source_that_is_not_there_costs_the_prompt_and_no_token() -> None:
    async with two() as (one, other):
        expected = await whole(other)
        second = other.router()
        nowhere = worker_pb2.KvHandoff.Fetch(worker_address="127.0.0.1:9", reference="r", kv_state_tag="sim-4")
        await second.send(submit(7, PROMPT, handoff=worker_pb2.KvHandoff(fetch=nowhere)))
        second.answers[7, 0] = Answer(ids=expected.ids[:1])
        await proceed(second, 7, expected.ids[:1])
        assert (await second.ended(7)).ids == expected.ids
        # The same when it knows of nothing; it need not be waited for.
        await second.send(submit(8, PROMPT, handoff=fetch(one, "unknown")))
        second.answers[8, 0] = Answer(ids=expected.ids[:1])
        await proceed(second, 8, expected.ids[:1])
        assert (await second.ended(8)).ids == expected.ids


async def test_a_source_that_is_too_slow_is_not_waited_for() -> None:
    async with two(prefill=LONG, handoff_timeout_s=0.1) as (one, other):
        expected = await whole(other)
        first, second = one.router(), other.router()
        await first.send(submit(3, PROMPT, handoff=produce()))
        await second.send(submit(7, PROMPT, handoff=fetch(one)))
        await eventually(lambda: _taken(one), "it is being taken", PATIENCE_S)
        second.answers[7, 0] = Answer(ids=expected.ids[:1])
        await proceed(second, 7, expected.ids[:1])
        assert (await second.ended(7)).ids == expected.ids
        first.call.cancel()


async def test_an_answer_that_waits_can_be_cancelled_and_ends_its_taking() -> None:
    async with two(prefill=LONG) as (one, other):
        first, second = one.router(), other.router()
        await first.send(submit(3, PROMPT, handoff=produce()))
        await second.send(submit(7, PROMPT, handoff=fetch(one)))
        await eventually(lambda: _taken(one), "it is being taken", PATIENCE_S)
        await second.send(cancels=[worker_pb2.Cancel(request=7, epoch=1)])
        answer = await second.ended(7)
        assert answer.finish is not None
        assert answer.finish.outcome == CANCELLED
        await eventually(lambda: _nothing_kept(one), "its hand-off is gone", PATIENCE_S)
        # And when the router is gone.
        await first.send(submit(4, PROMPT, handoff=produce("r2")))
        await second.send(submit(8, PROMPT, handoff=fetch(one, "r2")))
        await eventually(lambda: _taken(one), "it is being taken", PATIENCE_S)
        second.call.cancel()
        await eventually(lambda: _nothing_kept(one), "its hand-off is gone", PATIENCE_S)
        first.call.cancel()


async def test_an_answer_of_one_token_needs_no_second_half() -> None:
    async with two() as (one, other):
        second = other.router()
        await second.send(submit(7, PROMPT, stopping=types_pb2.Stopping(max_tokens=1), handoff=fetch(one, "unknown")))
        second.answers[7, 0] = Answer(ids=[5])
        await proceed(second, 7, [5])
        answer = await second.ended(7)
        assert answer.finish is not None
        assert (answer.ids, answer.finish.outcome) == ([5], LENGTH)
        # And how it begins must be possible.
        await second.send(submit(8, PROMPT, handoff=fetch(one, "unknown")))
        await proceed(second, 8, [5000])
        refused = await second.ended(8)
        assert refused.finish is not None
        assert "id 5000" in refused.finish.error.message


async def test_a_proceed_that_nobody_waits_for_is_no_matter() -> None:
    async with a_worker() as worker:
        router = worker.router()
        await router.send(submit(1, PROMPT))
        await proceed(router, 1, [1])
        await proceed(router, 99, [1])
        assert len((await router.ended(1)).ids) == 4


# --- over TLS --------------------------------------------------------------------------------------------------------


async def test_kv_goes_over_mutual_tls_and_to_no_stranger(tmp_path: Path) -> None:
    authority = Authority()
    certificates = load(authority.issue(tmp_path / "mesh").config())
    stranger = load(Authority().issue(tmp_path / "stranger").config())
    async with a_worker(tls=certificates) as one, a_worker(tls=certificates) as other:
        expected = await whole(one)
        first, second = one.router(), other.router()
        await second.send(submit(7, PROMPT, handoff=fetch(one)))
        await first.send(submit(3, PROMPT, handoff=produce()))
        beginning = await first.ended(3)
        second.answers[7, 0] = Answer(ids=list(beginning.ids))
        await proceed(second, 7, beginning.ids)
        assert (await second.ended(7)).ids == expected.ids
        assert (await other.load()).kv_received_bytes_total == 32 * BLOCKS
        await first.send(submit(4, PROMPT, handoff=produce("r2", keep_ms=30_000)))
        await first.ended(4)
        for link in (channel(one.server.address), channel(one.server.address, stranger)):
            async with link:
                pull = Pull(dataclasses.replace(one, channel=link), "r2")
                assert await pull.read() == grpc.StatusCode.UNAVAILABLE
        assert one.service._handoffs.bytes == 32 * BLOCKS


# --- engines alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pytest.param(llama_cpp, marks=pytest.mark.model), sim])
async def test_kv_of_one_engine_is_as_good_in_another(make: Callable[[], BatchLoop]) -> None:
    one, other = Bench(make()), Bench(make())
    await one.start()
    await other.start()
    try:
        prompt = [(7 * at) % 900 + 20 for at in range(213)]
        (expected,) = await other.ask(prompt, max_tokens=24, reuse_prefix=False)
        request = one.submit(prompt, max_tokens=24, handoff=Handoff())
        (beginning,) = await one.ended(request)
        assert beginning.ids == expected.ids[:1]
        await eventually(lambda: _has(one, request.key, 13), "13 blocks of KV", PATIENCE_S)
        blocks = one.kv[request.key]
        assert [block.index for block in blocks] == list(range(13))
        second = dataclasses.replace(request, key=999, handoff=None)
        intake = await other.engine.intake(second)
        assert intake.first_block == 0
        assert not await intake.take(b"of another length")
        for block in blocks:
            assert block.kv is not None
            assert await intake.take(block.kv)
        (rest,) = await other.ask([*prompt, *beginning.ids], max_tokens=23, resumed_tokens=1)
        assert rest.ids == expected.ids[1:]
        assert rest.finish is not None
        assert rest.finish.cached_prompt_tokens == 13 * 16
        # A second hand-off of the same prompt finds all of it there.
        assert (await other.engine.intake(second)).first_block == 13
        again = one.submit(prompt, max_tokens=24, handoff=Handoff())
        await one.ended(again)
        await eventually(lambda: _has(one, again.key, 13), "13 blocks of KV", PATIENCE_S)
        # Of a prompt that was reused, its KV leaves all the same: as it was, or as good.
        assert [len(block.kv or b"") for block in one.kv[again.key]] == [len(block.kv or b"") for block in blocks]
    finally:
        await one.engine.stop()
        await other.engine.stop()
    # Nobody waits for an engine that has gone.
    assert not await intake.take(blocks[0].kv or b"")


async def _has(bench: Bench, key: int, blocks: int) -> bool:
    return len(bench.kv.get(key, ())) >= blocks


# --- a giver that is not to be believed ------------------------------------------------------------------------------


def part(block: int, kv: bytes = b"x" * 32, **changes: Any) -> worker_pb2.PullKvResponse:
    ids = PROMPT[4 * block : 4 * block + 4]
    made = {"block": block, "block_bytes": 32, "kv": kv, "ids": ids, **changes}
    return worker_pb2.PullKvResponse(**made)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (part(2), "where 1 from 0 was due"),
        (part(1, offset=4), "where 1 from 0 was due"),
        (part(1, ids=[1, 2, 3, 4]), "of another prompt"),
        (part(1, ids=[]), "of another prompt"),
        (part(1, kv=b""), "a part of 0 bytes"),
        (part(1, kv=b"x" * 33), "a part of 33 bytes"),
        (part(1, kv=b"x" * (transfer.PART_BYTES + 1), block_bytes=2**22), "a part of 1048577 bytes"),
        (part(1, kv=b"x", block_bytes=2**30), "the limit is"),
    ],
)
def test_parts_are_held_against_what_was_asked(bad: worker_pb2.PullKvResponse, said: str) -> None:
    block = transfer._Block(Request(key=1, prompt_ids=PROMPT, stopping=Stopping(1)), 4, 0)
    assert block.add(part(0)) == b"x" * 32
    with pytest.raises(transfer._Broken, match=said):
        block.add(bad)


def test_a_large_block_comes_in_parts_and_no_more_than_the_prompt_has() -> None:
    block = transfer._Block(Request(key=1, prompt_ids=PROMPT[:7], stopping=Stopping(1)), 4, 0)
    assert block.add(part(0, kv=b"x" * 20)) is None
    assert block.add(part(0, kv=b"y" * 12, offset=20, ids=[])) == b"x" * 20 + b"y" * 12
    with pytest.raises(transfer._Broken, match="more blocks"):
        block.add(part(1))


class Liar(worker_pb2_grpc.WorkerServiceServicer):
    """Gives KV of another prompt, or ends without an end."""

    def __init__(self, parts: list[worker_pb2.PullKvResponse]) -> None:
        self.parts = parts

    async def PullKv(self, request: worker_pb2.PullKvRequest, context: Any) -> None:
        for each in self.parts:
            await context.write(each)


@pytest.mark.parametrize("parts", [[part(0, ids=[9, 9, 9, 9])], [part(0)], [part(0, kv=b"short", block_bytes=5)], []])
async def test_what_a_liar_sends_changes_no_answer(
    parts: list[worker_pb2.PullKvResponse], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The one right block is right.
    parts = [worker_pb2.PullKvResponse.FromString(each.SerializeToString()) for each in parts]
    for each in parts:
        if each.block_bytes == 32 and each.ids[0] != 9:
            each.kv = _kv(list(each.ids))
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Liar(parts), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with a_worker() as worker:
            expected = await whole(worker)
            router = worker.router()
            source = worker_pb2.KvHandoff.Fetch(worker_address=f"127.0.0.1:{port}", reference="r", kv_state_tag="sim-4")
            await router.send(submit(7, PROMPT, handoff=worker_pb2.KvHandoff(fetch=source)))
            router.answers[7, 0] = Answer(ids=expected.ids[:1])
            await proceed(router, 7, expected.ids[:1])
            assert (await router.ended(7)).ids == expected.ids
            assert worker.service._received.broken == 1
            assert worker.service.state == worker_pb2.WORKER_STATE_READY
    finally:
        await server.stop(0)


def _kv(ids: list[int]) -> bytes:
    backend = object.__new__(SimBackend)
    backend._texts = {0: ids}
    return backend.read_block(0, 0, len(ids))
