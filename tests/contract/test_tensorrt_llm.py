"""TensorRT-LLM's engine when things go wrong, on the stand-in: what is noticed, what is released, how requests end.

What engines promise when all is well is in ``test_engines.py``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support import standin
from tests.support.engines import PATIENCE_S, Bench
from tests.support.waiting import eventually

from headrace import serving
from headrace._gateway import block_hashes
from headrace.config import TensorRtLlmConfig, WorkerConfig
from headrace.errors import ConfigError, EngineError
from headrace.serving import Service
from headrace.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from headrace.worker import selfbatched
from headrace.worker.engine import Guided, Handoff, Request, Sampling, Stopping
from headrace.worker.engines.tensorrt_llm import check_settings
from headrace.worker.selfbatched import SelfBatched
from headrace.worker.servicer import FULL_NAME, WorkerService

CONFIG = WorkerConfig(slots=8, block_tokens=16, max_waiting=512, stall_timeout_s=20.0)
#: A request whose prompt begins with this id meets the fault.
BAD = 77
LENGTH, STOP = types_pb2.OUTCOME_LENGTH, types_pb2.OUTCOME_STOP
CANCELLED, FAILED = types_pb2.OUTCOME_CANCELLED, types_pb2.OUTCOME_FAILED


def prompt(first: int, length: int = 40) -> list[int]:
    return [first, *((first * 31 + 7 * index) % 900 + 20 for index in range(1, length))]


@asynccontextmanager
async def started(config: WorkerConfig = CONFIG, **options: Any) -> AsyncIterator[Bench]:
    bench = Bench(standin.engine(config, **({"step_s": 0.001} | options)))
    await bench.start()
    try:
        yield bench
    finally:
        await bench.engine.stop()


def child_of(bench: Bench) -> int:
    assert isinstance(bench.engine, SelfBatched)
    child = bench.engine._driver._child  # type: ignore[attr-defined]
    assert child is not None
    return int(child.pid)


def gone(pid: int) -> bool:
    """No such process any more, nor a zombie of somebody else's child."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def until_gone(pid: int) -> None:
    async def look() -> bool:
        return gone(pid)

    await eventually(look, f"process {pid} gone", PATIENCE_S)


# --- death ------------------------------------------------------------------------------------------------------------


async def test_an_engine_that_dies_while_it_loads_does_not_start() -> None:
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        async with started(faults={"load": "die"}):
            pass


async def test_an_engine_that_loads_for_ever_is_given_up_and_killed() -> None:
    bench = Bench(standin.engine(CONFIG, faults={"load": "hang"}, settings={"start_timeout_s": 1.5}))
    starting = asyncio.create_task(bench.start())

    async def look() -> bool:
        return bench.engine._driver._child is not None  # type: ignore[attr-defined]

    await eventually(look, "a child", PATIENCE_S)
    pid = child_of(bench)
    with pytest.raises(EngineError, match=r"not ready within 1\.5 s \(tensorrt_llm.start_timeout_s\)"):
        await starting
    assert gone(pid)


@pytest.mark.parametrize("place", ["generate", "prefill", "decode"])
async def test_a_killed_engine_is_noticed_at_once_in_each_phase(place: str) -> None:
    """At once: by the closed link and the dead process, not by a timeout (which is longer than the test's patience)."""
    config = WorkerConfig(slots=8, block_tokens=16, stall_timeout_s=10 * PATIENCE_S)
    async with started(config, faults={f"{place}:{BAD}": "die"}) as bench:
        pid = child_of(bench)
        others = [bench.submit(prompt(seed), max_tokens=900, ignore_eos=True) for seed in (100, 101)]
        await bench.until(lambda: all((other.key, 0) in bench.answers for other in others))
        bench.submit(prompt(BAD), max_tokens=10, ignore_eos=True)
        assert "killed by SIGKILL" in await bench.failed()
        assert gone(pid)
        refusal = bench.engine.submit(Request(10**6, [1], Stopping(1)))
        assert refusal is not None
        assert (refusal.code, refusal.retryable) == (types_pb2.ERROR_CODE_UNAVAILABLE, True)


async def test_a_kill_from_outside_is_noticed_when_nothing_runs() -> None:
    async with started() as bench:
        os.kill(child_of(bench), signal.SIGKILL)
        assert "killed by SIGKILL" in await bench.failed()


async def test_a_rank_that_dies_takes_the_engine_with_it() -> None:
    """Within TensorRT-LLM nobody would notice."""
    config = WorkerConfig(slots=8, block_tokens=16, stall_timeout_s=10 * PATIENCE_S)
    async with started(config, settings={"tensor_parallel_size": 2}) as bench:
        from headrace.worker.engines.tensorrt_llm_child import _ranks

        pid = child_of(bench)
        ranks = _ranks(pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert f"rank process {ranks[1]} died" in await bench.failed()
    for each in (pid, *ranks):
        await until_gone(each)


async def test_the_engine_goes_when_its_worker_is_killed(tmp_path: Path) -> None:
    """A worker's own death must not leave a GPU taken."""
    script = (
        "import asyncio, json, sys\n"
        "from tests.support import standin\n"
        "from tests.contract.test_tensorrt_llm import CONFIG, Bench, child_of\n"
        "async def main():\n"
        "    bench = Bench(standin.engine(CONFIG))\n"
        "    await bench.start()\n"
        "    print(child_of(bench), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        assert worker.stdout is not None
        pid = int(await asyncio.wait_for(worker.stdout.readline(), PATIENCE_S))
    finally:
        worker.kill()
        await worker.wait()
    await until_gone(pid)


# --- hanging ----------------------------------------------------------------------------------------------------------

IMPATIENT = WorkerConfig(slots=8, block_tokens=16, stall_timeout_s=0.6)


@pytest.mark.parametrize(
    "fault", [{f"generate:{BAD}": "hang"}, {f"prefill:{BAD}": "hang"}, {f"decode:{BAD}": "silent"}]
)
async def test_a_hanging_engine_is_ended(fault: dict[str, str]) -> None:
    async with started(IMPATIENT, faults=fault) as bench:
        pid = child_of(bench)
        bench.submit(prompt(BAD), max_tokens=10, ignore_eos=True)
        assert "no sign of life" in await bench.failed()
        await until_gone(pid)


async def test_a_dead_engine_is_found_by_the_canary_before_a_request_is() -> None:
    # The canary's prompt is the id 0.
    async with started(IMPATIENT, faults={"prefill:0": "silent"}, canary_s=0.2) as bench:
        assert "no sign of life" in await bench.failed()


async def test_the_canary_shows_nowhere_else() -> None:
    async with started(canary_s=0.05) as bench:

        async def sung() -> bool:
            return bench.engine.load().iteration > 3

        await eventually(sung, "some canaries", PATIENCE_S)
        load = bench.engine.load()
        assert (load.running_requests, load.waiting_requests) == (0, 0)
        assert not bench.answers
        assert (await bench.ask(prompt(30), max_tokens=3, ignore_eos=True))[0].ids


async def test_statistics_that_block_hold_nothing_up() -> None:
    async with started(faults={"stats": "hang"}) as bench:
        (answer,) = await bench.ask(prompt(30), max_tokens=20, ignore_eos=True)
        assert answer.finish is not None
        assert (len(answer.ids), answer.finish.outcome) == (20, LENGTH)
        load = await bench.at_rest()
        assert load.completion_tokens_total == 20
        assert load.kv_blocks_total == 4096 // 16


async def test_a_shutdown_that_hangs_is_cut_short() -> None:
    async with started(faults={"shutdown": "hang"}, settings={"shutdown_timeout_s": 0.3}) as bench:
        pid = child_of(bench)
    assert gone(pid)


# --- one request ------------------------------------------------------------------------------------------------------


async def test_one_requests_error_is_its_own() -> None:
    async with started(faults={f"prefill:{BAD}": "request_error"}) as bench:
        other = bench.submit(prompt(30), max_tokens=50, ignore_eos=True)
        (answer,) = await bench.ask(prompt(BAD), max_tokens=5)
        assert answer.finish is not None
        assert answer.finish.outcome == FAILED
        assert answer.finish.error is not None
        assert answer.finish.error.message == "TensorRT-LLM failed: the request failed"
        (whole,) = await bench.ended(other)
        assert len(whole.ids) == 50
        assert (await bench.at_rest()).kv_blocks_used == 0


async def test_a_fatal_error_ends_the_engine() -> None:
    async with started(faults={f"decode:{BAD}": "fatal"}) as bench:
        bench.submit(prompt(BAD), max_tokens=10, ignore_eos=True)
        assert "illegal memory access" in await bench.failed()


async def test_an_abort_that_is_not_heard_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfbatched, "ABORT_TIMEOUT_S", 0.2)
    async with started(faults={f"abort:{BAD}": "ignore"}) as bench:
        request = bench.submit(prompt(BAD), max_tokens=900, ignore_eos=True)
        await bench.until(lambda: (request.key, 0) in bench.answers)
        bench.engine.cancel(request.key, None, CANCELLED)
        (answer,) = await bench.ended(request)
        assert answer.finish is not None
        assert answer.finish.outcome == CANCELLED
        assert bench.engine.load().running_requests == 0


async def test_an_abort_on_the_heels_of_its_request_is_heard() -> None:
    """Both reach the engine's process in one frame."""
    async with started() as bench:
        request = bench.submit(prompt(30), max_tokens=900, ignore_eos=True)
        bench.engine.cancel(request.key, None, CANCELLED)
        (answer,) = await bench.ended(request)
        assert answer.finish is not None
        assert (answer.ids, answer.finish.outcome) == ([], CANCELLED)
        # It would have taken 900.
        assert (await bench.at_rest()).iteration < 100


async def test_a_storm_of_aborts_leaves_nothing_behind() -> None:
    seed = random.randrange(1 << 32)
    dice = random.Random(seed)
    async with started() as bench:
        for _ in range(2):
            requests = [
                bench.submit(prompt(dice.randrange(20, 900)), max_tokens=30, ignore_eos=True, seeds=(1, 2))
                for _ in range(60)
            ]
            asked: dict[int, set[int | None]] = {}
            for request in dice.sample(requests, 50):
                choice = dice.choice([None, 0, 1])
                asked.setdefault(request.key, set()).add(choice)
                bench.engine.cancel(request.key, choice, CANCELLED)
                if dice.random() < 0.2:
                    await asyncio.sleep(0)
            for request in requests:
                for number, answer in enumerate(await bench.ended(request)):
                    assert answer.finish is not None
                    wanted = asked.get(request.key, set()) & {None, number}
                    # One that was not cancelled comes to its end, whatever happens around it.
                    expected = {CANCELLED, LENGTH} if wanted else {LENGTH}
                    assert answer.finish.outcome in expected, f"seed {seed}"
                    assert answer.finish.outcome == CANCELLED or len(answer.ids) == 30, f"seed {seed}"
        load = await bench.at_rest()
        assert (load.kv_blocks_used, load.context_tokens, load.running_prompt_tokens) == (0, 0, 0), f"seed {seed}"


async def test_a_request_that_is_put_aside_goes_on_where_it_was() -> None:
    async with started() as bench:
        whole = (await bench.ask(prompt(40), max_tokens=200, ignore_eos=True))[0].ids
        request = bench.submit(prompt(40), max_tokens=200, ignore_eos=True)
        await bench.until(lambda: len(bench.answers.get((request.key, 0), bench.nothing).ids) > 3)
        bench.engine.put_aside(request.key)
        await bench.at_rest()
        cut = len(bench.answers[request.key, 0].ids)
        assert 3 < cut < 200
        assert bench.answers[request.key, 0].finish is None
        bench.engine.go_on(request.key)
        assert (await bench.ended(request))[0].ids == whole


# --- what it is asked for ---------------------------------------------------------------------------------------------


async def test_events_that_were_lost_are_learned_anew() -> None:
    async with started(settings={"kv_cache_event_buffer_max_size": 4}) as bench:
        requests = [bench.submit(prompt(100 + seed, 200), max_tokens=40, ignore_eos=True) for seed in range(40)]
        for request in requests:
            await bench.ended(request)
        await bench.until(lambda: bench.cleared > 0)
        # A text that was never seen is learned; what is said to be held is.
        fresh = prompt(60, 64)
        await bench.ask(fresh, max_tokens=2, ignore_eos=True)
        await bench.until(lambda: set(bench.names(fresh, b"")[:3]) <= bench.held)


async def test_several_ends_and_a_least_length_are_exact() -> None:
    async with started() as bench:
        first, second = standin.EOS_IDS
        for eos in (first, second):
            # The bias makes it certain, at every place.
            (answer,) = await bench.ask(prompt(30), max_tokens=9, logit_bias={eos: 500.0})
            assert answer.ids == [eos]
            assert answer.finish is not None
            assert answer.finish.outcome == STOP
            (later,) = await bench.ask(prompt(30), max_tokens=9, min_tokens=4, logit_bias={eos: 500.0})
            assert len(later.ids) == 5
            assert later.ids[-1] == eos
            assert later.ids.count(eos) == 1
            (last,) = await bench.ask(prompt(30), max_tokens=1, logit_bias={eos: 500.0})
            assert last.finish is not None
            assert last.finish.outcome == STOP


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc26"])
async def test_penalties_are_exact_or_refused(version: str) -> None:
    options = {"frequency_penalty": 100.0, "max_tokens": 60, "ignore_eos": True}
    async with started(settings={"sampler_type": "auto"}, version=version) as bench:
        request = Request(10**6, prompt(30), Stopping(60), Sampling(frequency_penalty=100.0))
        refusal = bench.engine.submit(request)
        if version.startswith("1.2"):
            assert refusal is not None
            assert refusal.code == types_pb2.ERROR_CODE_UNSUPPORTED
            assert "TRTLLMSampler" in refusal.message
            return
        assert refusal is None
        # Of the answer alone: the prompt's ids may come once.
        free = (await bench.ask(prompt(30), max_tokens=1, ignore_eos=True))[0].ids
        (answer,) = await bench.ask([*prompt(30), *free, free[0]], **options)
        assert len(set(answer.ids)) == 60


async def test_a_guide_needs_its_compiler() -> None:
    async with started(settings={"guided_decoding_backend": ""}) as bench:
        assert list(bench.engine.describe().capabilities.guided) == []
    async with started() as bench:
        assert "json_schema" in bench.engine.describe().capabilities.guided
        for guided in (Guided("choice", '["a b", "c|d"]'), Guided("json_object", ""), Guided("json_schema", "{}")):
            assert await bench.engine.check(Request(1, [1], Stopping(1), guided=guided)) is None
            assert (await bench.ask(prompt(30), max_tokens=3, guided=guided))[0].finish is not None


async def test_adapters_by_name(tmp_path: Path) -> None:
    settings = {"lora_adapters": f"legal={tmp_path}, sql={tmp_path}"}
    async with started(settings=settings) as bench:
        assert list(bench.engine.describe().capabilities.lora) == ["legal", "sql"]
        for lora in ("legal", "sql", "", "legal"):
            request = bench.submit(prompt(30, 50), max_tokens=3, ignore_eos=True, lora=lora)
            await bench.ended(request)
            # KV is shared under the same adapter only.
        assert bench.cached == {1: 0, 2: 0, 3: 0, 4: 48}
        names = {name for lora in ("", "legal", "sql") for name in block_hashes(prompt(30, 48), 16, "toy", lora, b"")}
        await bench.until(lambda: bench.held == names)


async def test_speculation_is_passed_on_and_its_acceptance_told() -> None:
    settings = {"speculative_decoding_type": "NGram", "max_draft_len": 4}
    async with started(settings=settings) as bench:
        await bench.ask(prompt(30), max_tokens=30, ignore_eos=True)

        async def told() -> bool:
            load = bench.engine.load()
            # The stand-in's rows say four drafted and one accepted for each sequence that decodes.
            return load.draft_tokens_total == 4 * load.accepted_draft_tokens_total > 0

        await eventually(told, "statistics of speculation", PATIENCE_S)
    with pytest.raises(EngineError, match=r"has no MedusaDecodingConfig \(speculative decoding 'Medusa'\)"):
        async with started(settings={"speculative_decoding_type": "Medusa"}):
            pass


async def test_what_large_models_need_is_passed_on() -> None:
    """An unknown value would not start: the stand-in's arguments are as strict as the real ones."""
    settings = {"tensor_parallel_size": 2, "moe_expert_parallel_size": 2, "moe_backend": "WIDEEP"}
    settings |= {"enable_attention_dp": True, "attention_dp_balance": True}
    async with started(settings=settings) as bench:
        arguments = bench.engine._driver._arguments()  # type: ignore[attr-defined]
        assert arguments["moe_config"] == {"backend": "WIDEEP"}
        assert arguments["attention_dp_config"] == {"enable_balance": True}
        assert len((await bench.ask(prompt(30), max_tokens=3, ignore_eos=True))[0].ids) == 3
    with pytest.raises(
        ConfigError, match=r"moe_expert_parallel_size it must be tensor_parallel_size \(2\), got 3 and 2"
    ):
        check_settings(
            CONFIG, TensorRtLlmConfig(tensor_parallel_size=2, moe_tensor_parallel_size=3, moe_expert_parallel_size=2)
        )


async def test_an_unknown_release_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"tensorrt_llm 1\.1\.0: releases from 1\.2 to 1\.4 are known"):
        async with started(version="1.1.0"):
            pass


async def test_an_argument_that_the_release_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    options = tmp_path / "options.json"
    options.write_text('{"kv_cache_config": {"host_cache_size": 1024}, "num_wheels": 4}')
    with pytest.raises(EngineError, match="has no argument num_wheels"):
        async with started(settings={"extra_llm_api_options": str(options)}):
            pass
    options.write_text('{"max_batch_size": 2, "kv_cache_config": {"max_tokens": 512}}')
    async with started(settings={"extra_llm_api_options": str(options)}) as bench:
        assert bench.engine.load().kv_blocks_total == 512 // 16


# --- the worker around it ---------------------------------------------------------------------------------------------


async def test_clients_are_told_when_the_engine_dies() -> None:
    server = Service("worker", "127.0.0.1:0")
    engine = standin.engine(CONFIG, step_s=0.001, faults={f"decode:{BAD}": "die"})
    service = WorkerService(CONFIG, engine, server.registry)
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, service, FULL_NAME)
    await server.start()
    try:
        await service.start("toy")
        async with serving.channel(server.address) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Run()
            message = worker_pb2.RunRequest(hello=worker_pb2.RunHello(router_id="r"))
            message.submits.add(
                request=1,
                epoch=1,
                prompt_ids=prompt(BAD),
                sampling=types_pb2.Sampling(top_p=1, repetition_penalty=1, seeds=[1]),
                stopping=types_pb2.Stopping(max_tokens=100, ignore_eos=True),
            )
            await call.write(message)
            ids: list[int] = []

            async def read() -> None:
                async for frame in call:
                    for delta in frame.deltas:
                        assert not delta.HasField("finish")
                        ids.extend(delta.ids)

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read()
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "the engine is gone"
            # Those that came before it died.
            assert len(ids) <= 2
            assert service.state == worker_pb2.WORKER_STATE_UNHEALTHY
            assert "killed by SIGKILL" in service.failure.result()
            assert not service._open
    finally:
        await service.stop()
        await server.stop(0)


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc4"])
async def test_classes_become_priorities(version: str) -> None:
    """Of KV in every release, of the request where the release has it: the stand-in checks both."""
    async with started(version=version) as bench:
        for class_ in (types_pb2.REQUEST_CLASS_INTERACTIVE, types_pb2.REQUEST_CLASS_BATCH):
            (answer,) = await bench.ask(prompt(30), max_tokens=3, ignore_eos=True, request_class=class_)
            assert len(answer.ids) == 3
    settings = {"interactive_retention_priority": 101}
    async with started(version=version, settings=settings) as bench:
        (answer,) = await bench.ask(
            prompt(30), max_tokens=3, ignore_eos=True, request_class=types_pb2.REQUEST_CLASS_INTERACTIVE
        )
        assert answer.finish is not None
        assert answer.finish.outcome == types_pb2.OUTCOME_REJECTED
        assert answer.finish.error is not None
        assert "priority must be from 0 to 100" in answer.finish.error.message


# --- prefill and decode apart -----------------------------------------------------------------------------------------

APART = {"cache_transceiver_backend": "DEFAULT", "kv_transfer_timeout_ms": 300}


async def test_kv_is_handed_over_once_and_the_answer_is_the_same() -> None:
    async with started(settings=APART) as bench:
        assert bench.engine.describe().capabilities.kv_handoff
        whole = (await bench.ask(prompt(30), max_tokens=6, ignore_eos=True))[0].ids
        first = bench.submit(prompt(30), max_tokens=6, ignore_eos=True, handoff=Handoff())
        (answer,) = await bench.ended(first)
        assert answer.finish is not None
        assert (answer.ids, answer.finish.outcome) == (whole[:1], LENGTH)
        reference = bench.references[first.key]
        (rest,) = await bench.ask(prompt(30), max_tokens=6, ignore_eos=True, handoff=Handoff(reference))
        assert rest.ids == whole
        # It was taken: who comes later waits until the transfer is given up, and fails alone.
        late = bench.submit(prompt(30), max_tokens=6, ignore_eos=True, handoff=Handoff(reference))
        other = bench.submit(prompt(31), max_tokens=6, ignore_eos=True)
        (failed,) = await bench.ended(late)
        assert failed.finish is not None
        assert failed.finish.outcome == FAILED
        assert failed.finish.error is not None
        assert "timed out" in failed.finish.error.message
        assert len((await bench.ended(other))[0].ids) == 6


async def test_a_reference_that_is_none_is_refused() -> None:
    async with started(settings=APART) as bench:
        for reference in ("nonsense", "[]", '{"told": {"wheels": 4}, "opaque": {}}'):
            (answer,) = await bench.ask(prompt(30), max_tokens=6, handoff=Handoff(reference))
            assert answer.finish is not None
            assert answer.finish.outcome == types_pb2.OUTCOME_REJECTED
        assert (await bench.ask(prompt(30), max_tokens=2, ignore_eos=True))[0].ids


async def test_aborts_while_kv_is_handed_over_leave_room_for_others() -> None:
    """KV for 64 requests of 4 blocks: it is all used again and again by those that were given up."""
    async with started(settings=APART | {"kv_cache_max_tokens": 256 * 16}) as bench:
        for _ in range(3):
            firsts = [
                bench.submit(prompt(100 + number), max_tokens=2, ignore_eos=True, handoff=Handoff())
                for number in range(40)
            ]
            for request in firsts[::2]:
                bench.engine.cancel(request.key, None, CANCELLED)
            for request in firsts:
                (answer,) = await bench.ended(request)
                assert answer.finish is not None
                assert answer.finish.outcome in (CANCELLED, LENGTH)
            seconds = [
                bench.submit(
                    prompt(100 + number), max_tokens=9, ignore_eos=True, handoff=Handoff(bench.references[key])
                )
                for number, key in ((n, request.key) for n, request in enumerate(firsts))
                if key in bench.references
            ]
            for request in seconds[::2]:
                bench.engine.cancel(request.key, None, CANCELLED)
            for request in seconds:
                await bench.ended(request)
        # What nobody fetched has been given up by its timeout.
        crowd = [bench.submit(prompt(300 + number), max_tokens=9, ignore_eos=True) for number in range(64)]
        for request in crowd:
            assert len((await bench.ended(request))[0].ids) == 9


async def test_the_wire_of_a_hand_over() -> None:
    server = Service("worker", "127.0.0.1:0")
    service = WorkerService(CONFIG, standin.engine(CONFIG, settings=APART), server.registry)
    server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, service, FULL_NAME)
    await server.start()
    try:
        await service.start("toy")
        async with serving.channel(server.address) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Run()

            async def ask(
                number: int, handoff: worker_pb2.KvHandoff, seeds: int = 1, first: list[int] | None = None
            ) -> list[worker_pb2.TokenDelta]:
                message = worker_pb2.RunRequest()
                if number == 1:
                    message.hello.router_id = "r"
                message.submits.add(
                    request=number,
                    epoch=1,
                    prompt_ids=prompt(30),
                    sampling=types_pb2.Sampling(top_p=1, repetition_penalty=1, seeds=range(seeds)),
                    stopping=types_pb2.Stopping(max_tokens=4, ignore_eos=True),
                    handoff=handoff,
                )
                if first is not None:
                    message.proceeds.add(request=number, epoch=1, ids=first)
                await call.write(message)
                found: list[worker_pb2.TokenDelta] = []
                async with asyncio.timeout(PATIENCE_S):
                    while not found or not found[-1].HasField("finish"):
                        found += (await call.read()).deltas
                return found

            made = await ask(1, worker_pb2.KvHandoff(produce=worker_pb2.KvHandoff.Produce(keep_ms=100)))
            reference = made[-1].kv_reference
            assert reference
            tag = service.description.kv_state_tag
            fetch = worker_pb2.KvHandoff.Fetch(reference=reference, kv_state_tag=tag)
            first = [token for delta in made for token in delta.ids]
            rest = await ask(2, worker_pb2.KvHandoff(fetch=fetch), first=first)
            # Such an engine finds the first id with the KV, and says it again: by its index it is taken once.
            answer = [token for delta in rest for token in delta.ids]
            assert (len(answer), answer[:1], rest[0].first_index) == (4, first, 0)
            # It is gone now: the engine waits for it in vain, and then it is computed here, from the same id on.
            again = await ask(6, worker_pb2.KvHandoff(fetch=fetch), first=first)
            assert [token for delta in again for token in delta.ids] == answer[1:]
            assert again[0].first_index == 1
            assert (again[-1].finish.usage.prompt_tokens, again[-1].finish.usage.completion_tokens) == (40, 4)
            wrong = worker_pb2.KvHandoff.Fetch(reference=reference, kv_state_tag="another")
            for number, handoff, seeds, said in (
                (3, worker_pb2.KvHandoff(fetch=wrong), 1, "'another' is of no use here"),
                (4, worker_pb2.KvHandoff(), 1, "needs a role"),
                (5, worker_pb2.KvHandoff(fetch=fetch), 2, "of one choice, got 2"),
            ):
                (refused, *_) = await ask(number, handoff, seeds)
                assert refused.finish.outcome == types_pb2.OUTCOME_REJECTED
                assert said in refused.finish.error.message
            call.cancel()
    finally:
        await service.stop()
        await server.stop(0)
