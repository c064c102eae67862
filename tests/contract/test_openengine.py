"""OpenEngine v1 both ways: this mesh before a server that does what TensorRT-LLM's does, and a worker that is asked.

What all engines promise is in ``test_engines.py``, which runs before both servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support import openengine_server, standin
from tests.support.engines import PATIENCE_S, Bench
from tests.support.fronted import Fronted, served, worker
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

from headrace import models
from headrace.config import WorkerConfig
from headrace.errors import EngineError
from headrace.openengine.v1 import openengine_pb2 as pb
from headrace.openengine.v1 import openengine_pb2_grpc
from headrace.v1 import types_pb2
from headrace.worker.composer import Limits
from headrace.worker.engine import Guided, Handoff, Request, Sampling, Stopping
from headrace.worker.engines import remote
from headrace.worker.engines.openengine import OpenEngineDialect
from headrace.worker.engines.sim import SimBackend
from headrace.worker.loop import BatchLoop
from headrace.worker.openengine_service import OpenEngineService
from headrace.worker.servicer import WorkerService
from headrace.worker.timing import Timing

CONFIG = WorkerConfig(slots=4, block_tokens=16, max_waiting=64)
PROMPT = [30, 31, 32, 33]
#: A prompt that begins so meets the fault.
BAD = 77
STOP, LENGTH = types_pb2.OUTCOME_STOP, types_pb2.OUTCOME_LENGTH
FAILED, REJECTED = types_pb2.OUTCOME_FAILED, types_pb2.OUTCOME_REJECTED
ARGUMENTS = {
    "max_seq_len": 1024,
    "max_batch_size": 8,
    "enable_chunked_prefill": True,
    "guided_decoding_backend": "xgrammar",
    "kv_cache_config": {"tokens_per_block": 32, "max_tokens": 4096},
}
APART = ARGUMENTS | {"cache_transceiver_config": {"backend": "NIXL", "kv_transfer_timeout_ms": 300}}


# --- asking -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def before(
    arguments: dict[str, Any] = ARGUMENTS, end_id: int = 2, eos_ids: tuple[int, ...] = (2,), **play: Any
) -> AsyncIterator[tuple[Bench, list[int]]]:
    """An engine before such a server; and the server's pid."""
    pids: list[int] = []

    @asynccontextmanager
    async def server() -> AsyncIterator[tuple[int, str]]:
        play.setdefault("step_s", 0.001)
        async with openengine_server.running(arguments, end_id, version="1.4.0rc4", **play) as found:
            pids.append(found[0])
            yield found

    folder = standin.folder(1024, eos_ids)
    bench = Bench(Fronted(server(), OpenEngineDialect(), folder, CONFIG))
    await bench.start()
    try:
        yield bench, pids
    finally:
        await bench.engine.stop()


async def test_the_server_says_how_much_of_it_there_is() -> None:
    async with before() as (bench, _):
        said = bench.engine.describe()
        assert (said.engine, said.engine_version) == ("openengine", "tensorrt_llm 1.4.0rc4")
        assert (said.slots, said.context_tokens, said.block_tokens, said.kv_blocks) == (4, 1024, 32, 128)
        assert set(said.capabilities.guided) == {"json_schema", "json_object", "regex", "grammar", "choice"}
        assert said.capabilities.logprobs
        assert not said.capabilities.kv_handoff
    async with before(ARGUMENTS | {"guided_decoding_backend": None}) as (bench, _):
        assert not bench.engine.describe().capabilities.guided


async def test_ends_are_kept_and_told_apart() -> None:
    async with before() as (bench, _):
        free = (await bench.ask(PROMPT, max_tokens=8, ignore_eos=True))[0].ids
    end = free[3]
    first = free.index(end) + 1
    # The server's own end, which it leaves in the answer; one of ours, which it is asked to leave there.
    for server_end, ends in ((end, (end,)), (2, (end,)), (end, (2, end))):
        async with before(end_id=server_end, eos_ids=ends) as (bench, _):
            (answer,) = await bench.ask(PROMPT, max_tokens=8)
            assert answer.finish is not None
            assert (answer.ids, answer.finish.outcome) == (free[:first], STOP)
            (held,) = await bench.ask(PROMPT, max_tokens=8, ignore_eos=True)
            assert held.ids == free
    async with before(end_id=end, eos_ids=(end,)) as (bench, _):
        (later,) = await bench.ask(PROMPT, max_tokens=8, min_tokens=6)
        assert end not in later.ids[:6]


async def test_reuse_is_told_with_the_end() -> None:
    async with before() as (bench, _):
        prompt = [40 + number % 900 for number in range(100)]
        first, second = (bench.submit(prompt, max_tokens=3, ignore_eos=True) for _ in range(2))
        await bench.ended(first)
        (again,) = await bench.ended(second)
        third = bench.submit(prompt, max_tokens=3, ignore_eos=True)
        (again,) = await bench.ended(third)
        assert (bench.cached[first.key], bench.cached[third.key]) == (0, 96)
        assert again.finish is not None
        assert again.finish.cached_prompt_tokens == 96
        assert bench.engine.load().cached_prompt_tokens_total >= 96


async def test_the_servers_load_is_told() -> None:
    async with before() as (bench, _):
        request = bench.submit([31] * 64, max_tokens=900, ignore_eos=True)

        async def some() -> bool:
            return bench.engine.load().kv_blocks_used > 0

        await eventually(some, "blocks in use", PATIENCE_S)
        bench.engine.cancel(request.key, None, types_pb2.OUTCOME_CANCELLED)
        await bench.ended(request)
        assert (await bench.at_rest()).kv_blocks_used == 0


async def test_what_cannot_be_said_is_refused_by_name() -> None:
    async with before() as (bench, _):
        for number, (name, change) in enumerate(
            {
                "logit_bias": {"sampling": Sampling(logit_bias={5: 1.0})},
                "frequency_penalty": {"sampling": Sampling(frequency_penalty=0.5)},
                "presence_penalty": {"sampling": Sampling(presence_penalty=0.5)},
                "min_tokens": {"stopping": Stopping(9, min_tokens=2, stop_ids=frozenset({5}))},
                "handoff": {"handoff": Handoff("nonsense")},
            }.items()
        ):
            request = Request(**({"key": 10**6 + number, "prompt_ids": PROMPT, "stopping": Stopping(9)} | change))
            refusal = bench.engine.submit(request)
            assert refusal is not None, name
            assert refusal.param == name
        # It lets repetition penalties through, which look at the prompt in any case.
        plain = (await bench.ask(PROMPT, max_tokens=4, ignore_eos=True))[0].ids
        changed = (await bench.ask([*PROMPT, *plain], max_tokens=4, ignore_eos=True, repetition_penalty=100.0))[0].ids
        assert not set(changed) & {*PROMPT, *plain}


async def test_what_the_server_refuses_is_the_requests_own_end() -> None:
    async with before() as (bench, _):
        many = frozenset(range(100, 180))
        (answer,) = await bench.ask(PROMPT, max_tokens=4, stop_ids=many)
        assert answer.finish is not None
        assert answer.finish.outcome == REJECTED
        assert answer.finish.error is not None
        assert "at most 64 conditions" in answer.finish.error.message
        guided = Guided("choice", '["red", "b.c"]')
        assert (await bench.ask(PROMPT, max_tokens=2, ignore_eos=True, guided=guided))[0].ids
        assert guided.as_regex() == r"red|b\.c"


async def test_one_requests_error_is_its_own() -> None:
    async with before(faults={f"decode:{BAD}": "request_error"}) as (bench, _):
        good = bench.submit(PROMPT, max_tokens=40, ignore_eos=True)
        (bad,) = await bench.ask([BAD, 30], max_tokens=9, ignore_eos=True)
        assert bad.finish is not None
        assert (len(bad.ids), bad.finish.outcome) == (2, FAILED)
        assert bad.finish.error is not None
        assert "the request failed" in bad.finish.error.message
        assert len((await bench.ended(good))[0].ids) == 40


async def test_a_server_that_is_killed_is_noticed_by_its_requests_and_by_its_health() -> None:
    async with before() as (bench, pids):
        running = bench.submit(PROMPT, max_tokens=900, ignore_eos=True)
        await bench.until(lambda: (running.key, 0) in bench.answers)
        os.kill(pids[0], signal.SIGKILL)
        began_s = asyncio.get_running_loop().time()
        assert "is gone" in await bench.failed()
        assert asyncio.get_running_loop().time() - began_s < PATIENCE_S
        answer = bench.answers[running.key, 0]
        assert answer.finish is not None
        assert answer.finish.outcome == FAILED


async def test_an_engine_that_is_dead_behind_its_server_is_not_healthy() -> None:
    async with before(faults={f"decode:{BAD}": "fatal"}) as (bench, _):
        bench.submit([BAD, 30], max_tokens=9, ignore_eos=True)
        assert "NOT_READY: engine health check failed" in await bench.failed()


async def test_one_look_without_an_answer_is_a_busy_server_and_two_in_a_row_a_dead_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = deque([True, False, True, True, False, False])
    healthy = OpenEngineService.Health

    async def health(self: OpenEngineService, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        if not answers.popleft():
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")
        return await healthy(self, request, context)

    monkeypatch.setattr(OpenEngineService, "Health", health)
    monkeypatch.setattr(remote, "HEALTH_EVERY_S", 0)
    folder = standin.folder()
    server = worker(standin.engine(CONFIG), folder, CONFIG)
    bench = Bench(Fronted(server, OpenEngineDialect(), folder, CONFIG))
    await bench.start()
    try:
        assert "is gone: DEADLINE_EXCEEDED" in await bench.failed()
        assert not answers
    finally:
        await bench.engine.stop()


async def test_kv_goes_from_one_request_to_another() -> None:
    prompt = [40 + number % 900 for number in range(70)]
    async with before(APART) as (bench, _):
        said = bench.engine.describe()
        assert said.capabilities.kv_handoff
        assert said.kv_state_tag.startswith("openengine-tensorrt_llm-1.4.0rc4-")
        whole = (await bench.ask(prompt, max_tokens=6, ignore_eos=True))[0].ids
        first = bench.submit(prompt, max_tokens=6, ignore_eos=True, handoff=Handoff())
        (answer,) = await bench.ended(first)
        assert answer.finish is not None
        assert (answer.ids, answer.finish.outcome) == (whole[:1], LENGTH)
        reference = bench.references[first.key]
        (rest,) = await bench.ask(prompt, max_tokens=6, ignore_eos=True, handoff=Handoff(reference))
        assert rest.ids == whole
        # Taken; who comes later fails alone when the transfer is given up.
        (late,) = await bench.ask(prompt, max_tokens=6, ignore_eos=True, handoff=Handoff(reference))
        assert late.finish is not None
        assert late.finish.outcome == FAILED
        # An answer that ends with its first id needs no second half.
        (whole_answer,) = await bench.ask(
            prompt, max_tokens=6, stop_ids=frozenset(whole[:1]), handoff=Handoff(), ignore_eos=True
        )
        assert whole_answer.finish is not None
        assert (whole_answer.ids, whole_answer.finish.outcome) == (whole[:1], STOP)


async def test_other_revisions_are_refused_in_words() -> None:
    dialect = OpenEngineDialect()

    class Control:
        info = pb.ServerInfo(engine_name="x", schema_revision=3, minimum_client_revision=2)

        async def GetServerInfo(self, request: Any) -> pb.ServerInfo:
            return self.info

    dialect._control = Control()
    with pytest.raises(EngineError, match="revision 3 and wants clients of 2 or later; this is 1"):
        await dialect.greet()
    Control.info = pb.ServerInfo(engine_name="x")
    with pytest.raises(EngineError, match="revision 0"):
        await dialect.greet()


# --- being asked ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def a_server(
    folder: models.ModelFolder | None = None, **play: Any
) -> AsyncIterator[tuple[Any, Any, WorkerService]]:
    """A worker around TensorRT-LLM's stand-in: Inference, Control, and itself."""
    engine = standin.engine(CONFIG, **({"step_s": 0.001} | play))
    async with served(engine, folder or standin.folder(), CONFIG) as (service, channel):
        yield openengine_pb2_grpc.InferenceStub(channel), openengine_pb2_grpc.ControlStub(channel), service


def ask(token_ids: list[int] = PROMPT, max_tokens: int = 5, **more: Any) -> pb.GenerateRequest:
    names = pb.SamplingParams.DESCRIPTOR.fields_by_name
    sampling = {name: more.pop(name) for name in list(more) if name in names}
    stopping = {"max_tokens": max_tokens} | more.pop("stopping", {})
    return pb.GenerateRequest(
        request_id=more.pop("request_id", "r"),
        model=more.pop("model", "toy"),
        **({"token_ids": pb.TokenIds(ids=token_ids)} if "prompt" not in more else {}),
        sampling=pb.SamplingParams(**({"temperature": 0.0} | sampling)),
        stopping=pb.StoppingOptions(**stopping),
        **more,
    )


async def answer(stub: Any, request: pb.GenerateRequest, **options: Any) -> tuple[dict[int, list[Any]], list[Any]]:
    """The tokens of each choice; and all messages. Holds the stream to its rules."""
    tokens: dict[int, list[Any]] = {}
    messages, ended = [], set()
    async with asyncio.timeout(PATIENCE_S):
        async for response in stub.Generate(request, **options):
            assert response.request_id == request.request_id
            assert not (messages and messages[-1].HasField("usage")), "something came after the last message"
            messages.append(response)
            kind = response.WhichOneof("event")
            if kind == "token":
                assert response.token.HasField("output_index")
                assert response.token.output_index not in ended
                tokens.setdefault(response.token.output_index, []).extend(response.token.tokens)
            elif kind == "finished":
                assert response.finished.HasField("output_index")
                ended.add(response.finished.output_index)
    assert messages[-1].HasField("usage")
    return tokens, messages


def ids(tokens: list[Any]) -> list[int]:
    return [token.token_id for token in tokens]


async def test_a_stream_of_what_is_new_and_one_end_with_the_books() -> None:
    async with a_server() as (stub, _, _service):
        tokens, messages = await answer(stub, ask(list(range(30, 70))))
        assert len(tokens[0]) == 5
        assert messages[-1].finished.reason == pb.FINISH_REASON_LENGTH
        usage = messages[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (40, 5, 45)
        again, messages = await answer(stub, ask(list(range(30, 70))))
        assert messages[-1].usage.cached_prompt_tokens == 32
        assert again == tokens
        salted = pb.KvOptions(cache_salt="other")
        assert (await answer(stub, ask(list(range(30, 70)), kv=salted)))[1][-1].usage.cached_prompt_tokens == 0
        alone = pb.KvOptions(bypass_prefix_cache=True)
        assert (await answer(stub, ask(list(range(30, 70)), kv=alone)))[1][-1].usage.cached_prompt_tokens == 0


async def test_sequences_have_their_own_ends() -> None:
    async with a_server() as (stub, _, _service):
        request = ask(max_tokens=6, num_sequences=3, temperature=1.5, seed=7)
        tokens, messages = await answer(stub, request)
        assert len({tuple(ids(each)) for each in tokens.values()}) == 3
        ends = [each.finished.output_index for each in messages if each.HasField("finished")]
        assert sorted(ends) == [0, 1, 2]
        assert messages[-1].usage.completion_tokens == 18
        assert (await answer(stub, request))[0] == tokens


async def test_what_ended_it_is_told() -> None:
    async with a_server() as (stub, _, _service):
        free = ids((await answer(stub, ask(max_tokens=6)))[0][0])
        for include in (False, True):
            condition = pb.StopCondition(stop_token_id=free[2])
            stopping = {"conditions": [condition], "include_stop_in_output": include}
            tokens, messages = await answer(stub, ask(max_tokens=6, stopping=stopping))
            assert ids(tokens[0]) == free[: 3 if include else 2]
            assert messages[-1].finished.reason == pb.FINISH_REASON_STOP
            assert messages[-1].finished.stop_match.stop_token_id == free[2]
    async with a_server(standin.folder(eos_ids=(free[2],)), eos_ids=(free[2],)) as (stub, _, _service):
        tokens, messages = await answer(stub, ask(max_tokens=6))
        assert ids(tokens[0]) == free[:3]
        assert messages[-1].finished.stop_match.eos_token_id == free[2]


async def test_a_stop_text_ends_a_sequence(tmp_path: Path) -> None:
    """With the toy model, whose ids are bytes, on the sim engine."""
    folder = models.prepare(str(ToyModel(context_tokens=512).write(tmp_path)))
    limits = Limits(4, 64, 16, 512, 64, 64, 8)
    timing = Timing(prefill_tokens_per_s=1e6, step_s=0.0005, step_s_per_sequence=0.0)
    engine = BatchLoop(SimBackend(limits, timing, vocab_size=128, eos_ids=(0,)))
    async with served(engine, folder, CONFIG) as (_, channel):
        stub = openengine_pb2_grpc.InferenceStub(channel)
        free = ids((await answer(stub, ask(max_tokens=400)))[0][0])
        stop = bytes(free[50:52]).decode()
        stopping = {"conditions": [pb.StopCondition(stop_text=stop)], "include_stop_in_output": True}
        tokens, messages = await answer(stub, ask(max_tokens=400, stopping=stopping))
        assert ids(tokens[0]) == free[: bytes(free).find(stop.encode()) + 2]
        assert messages[-1].finished.stop_match.stop_text == stop


async def test_log_probabilities() -> None:
    async with a_server() as (stub, _, _service):
        options = pb.ResponseOptions(return_output_logprobs=True, output_candidates=pb.CandidateTokenSelection(top_n=2))
        tokens, _ = await answer(stub, ask(max_tokens=3, response=options))
        for token in tokens[0]:
            assert [candidate.rank for candidate in token.candidates] == [1, 2]
            assert (token.candidates[0].token_id, token.rank) == (token.token_id, 1)
            assert token.candidates[0].logprob == token.logprob < 0


INVALID, UNIMPLEMENTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
REFUSED: list[tuple[dict[str, Any], grpc.StatusCode, str]] = [
    ({"request_id": ""}, INVALID, "request_id: must not be empty"),
    ({"model": ""}, INVALID, "model: must not be empty"),
    ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "this worker serves 'toy', not 'other'"),
    ({"prompt": "Hello"}, UNIMPLEMENTED, "prompt: this worker takes token_ids"),
    ({"num_sequences": 0}, INVALID, "num_sequences: must be at least 1"),
    ({"lora_name": "x"}, UNIMPLEMENTED, "the adapter 'x'"),
    ({"media": [pb.MediaItem()]}, UNIMPLEMENTED, "media: not supported"),
    ({"kv": pb.KvOptions(session=pb.KvSessionRef(session_id="1"))}, UNIMPLEMENTED, "kv.session"),
    ({"guided": pb.GuidedDecoding(structural_tag="{}")}, UNIMPLEMENTED, "guided.structural_tag"),
    ({"guided": pb.GuidedDecoding(regex="a", backend="outlines")}, UNIMPLEMENTED, "guided.backend"),
    (
        {
            "response": pb.ResponseOptions(
                return_output_logprobs=True, output_candidates=pb.CandidateTokenSelection(all=pb.AllCandidates())
            )
        },
        UNIMPLEMENTED,
        "response.output_candidates: only top_n",
    ),
    ({"response": pb.ResponseOptions(return_prompt_logprobs=True)}, UNIMPLEMENTED, "log-probabilities of the prompt"),
    ({"temperature": -1.0}, INVALID, "temperature must be from 0"),
]


@pytest.mark.parametrize(("change", "code", "message"), REFUSED)
async def test_what_cannot_be_done_is_refused(change: dict[str, Any], code: grpc.StatusCode, message: str) -> None:
    async with a_server() as (stub, _, _service):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(stub, ask(**change))
        assert caught.value.code() == code
        assert message in (caught.value.details() or "")
        assert len((await answer(stub, ask()))[0][0]) == 5


async def test_priorities() -> None:
    async with a_server() as (stub, _, _service):
        for value in ("7", "-7", "0"):
            assert await answer(stub, ask(), metadata=(("openengine-priority", value),))
        with pytest.raises(grpc.aio.AioRpcError, match="expected a number, got 'high'"):
            await answer(stub, ask(), metadata=(("openengine-priority", "high"),))


async def test_aborts_and_clients_that_leave_free_the_engine() -> None:
    async with a_server() as (stub, control, service):
        for target in ({"request_id": "long"}, {"all_requests": pb.AllRequests()}):
            ending = asyncio.create_task(answer(stub, ask(max_tokens=900, request_id="long")))

            async def running() -> bool:
                return (await control.GetLoad(pb.GetLoadRequest())).running_requests == 1

            await eventually(running, "a request that runs", PATIENCE_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer(stub, ask(request_id="long"))
            assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
            assert (await control.Abort(pb.AbortRequest(**target))).status == pb.ABORT_STATUS_ABORTED
            _, messages = await ending
            assert messages[-1].finished.reason == pb.FINISH_REASON_CANCELLED
            assert (await control.Abort(pb.AbortRequest(**target))).status == pb.ABORT_STATUS_ALREADY_FINISHED
        call = stub.Generate(ask(max_tokens=900))
        await call.read()
        call.cancel()

        async def at_rest() -> bool:
            return service.load().running_requests == 0 and not service._open

        await eventually(at_rest, "an engine at rest", PATIENCE_S)


async def test_who_it_is_and_how() -> None:
    async with a_server() as (_, control, _service):
        info = await control.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.engine_name, info.engine_version, info.supported_models) == ("tensorrt_llm", "1.2.1", ["toy"])
        assert (info.schema_revision, info.minimum_client_revision) == (1, 1)
        model = await control.GetModelInfo(pb.GetModelInfoRequest(model="toy"))
        assert (model.max_context_length, model.supports_token_ids_input, model.supports_text_input) == (
            1024,
            True,
            False,
        )
        health = await control.Health(pb.HealthRequest(include_inference_probe=True))
        assert health.state == pb.HEALTH_STATE_READY
        assert [check.name for check in health.checks] == ["model", "inference_probe"]


async def test_a_failure_in_mid_answer_is_a_message_and_a_dead_engine_a_status() -> None:
    faults = {f"decode:{BAD}": "request_error", f"decode:{BAD + 1}": "die"}
    async with a_server(faults=faults) as (stub, control, _service):
        _, messages = await answer(stub, ask([BAD, 30], max_tokens=50))
        assert messages[-1].error.code == pb.ERROR_CODE_INTERNAL
        assert messages[-1].usage.prompt_tokens == 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(stub, ask([BAD + 1, 30], max_tokens=50))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert (await control.Health(pb.HealthRequest())).state == pb.HEALTH_STATE_NOT_READY
