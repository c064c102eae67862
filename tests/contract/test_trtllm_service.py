"""What ``trtllm.TrtllmService`` promises of this worker, spoken with the messages of the package smg-grpc-proto."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import trtllm_service_pb2 as pb
from smg_grpc_proto import trtllm_service_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tests.support import standin
from tests.support.fronted import served
from tests.support.toy import ToyModel
from tests.support.waiting import eventually

from headrace import models
from headrace.config import WorkerConfig
from headrace.worker.composer import Limits
from headrace.worker.engines.sim import SimBackend
from headrace.worker.loop import BatchLoop
from headrace.worker.selfbatched import SelfBatched
from headrace.worker.servicer import WorkerService
from headrace.worker.timing import Timing

CONFIG = WorkerConfig(slots=4, block_tokens=16, max_waiting=8)
PATIENCE_S = 20.0
PROMPT = [30, 31, 32, 33]


@asynccontextmanager
async def a_server(folder: models.ModelFolder | None = None, **play: Any) -> AsyncIterator[tuple[Any, WorkerService]]:
    """Around TensorRT-LLM's stand-in."""
    engine = standin.engine(CONFIG, **({"step_s": 0.001} | play))
    async with served(engine, folder or standin.folder(), CONFIG) as (service, channel):
        yield trtllm_service_pb2_grpc.TrtllmServiceStub(channel), service


def ask(prompt: list[int] = PROMPT, max_tokens: int = 5, streaming: bool = True, **more: Any) -> pb.GenerateRequest:
    sampling = {name: more.pop(name) for name in list(more) if name in pb.SamplingConfig.DESCRIPTOR.fields_by_name}
    return pb.GenerateRequest(
        request_id=more.pop("request_id", "r"),
        tokenized=pb.TokenizedInput(input_token_ids=prompt),
        sampling_config=pb.SamplingConfig(**({"temperature": 0.0} | sampling)),
        max_tokens=max_tokens,
        streaming=streaming,
        **more,
    )


async def answer(stub: Any, request: pb.GenerateRequest) -> tuple[list[Any], dict[int, Any]]:
    """Chunks, and the last message of each choice."""
    chunks, ends = [], {}
    async with asyncio.timeout(PATIENCE_S):
        async for response in stub.Generate(request):
            assert response.request_id == request.request_id
            if response.HasField("chunk"):
                assert response.chunk.sequence_index not in ends
                chunks.append(response.chunk)
            else:
                ends[response.complete.sequence_index] = response.complete
    return chunks, ends


async def test_chunks_bring_what_is_new_and_the_last_message_all_of_it() -> None:
    async with a_server() as (stub, _):
        chunks, ends = await answer(stub, ask(list(range(30, 70)), 5))
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert len(ids) == 5
        assert list(ends[0].output_token_ids) == ids
        assert (ends[0].finish_reason, ends[0].prompt_tokens, ends[0].completion_tokens) == ("length", 40, 5)
        assert (chunks[0].cached_tokens, chunks[-1].completion_tokens) == (0, 5)
        again, ends = await answer(stub, ask(list(range(30, 70)), 5))
        assert (again[0].cached_tokens, ends[0].cached_tokens) == (32, 32)
        whole, ends = await answer(stub, ask(list(range(30, 70)), 5, streaming=False))
        assert whole == []
        assert list(ends[0].output_token_ids) == ids


async def test_choices_have_their_own_numbers() -> None:
    async with a_server() as (stub, _):
        request = ask(max_tokens=6, num_return_sequences=3, temperature=1.5, seed=7)
        chunks, ends = await answer(stub, request)
        assert set(ends) == {0, 1, 2}
        assert len({tuple(end.output_token_ids) for end in ends.values()}) == 3
        for number, end in ends.items():
            of_it = [token for chunk in chunks if chunk.sequence_index == number for token in chunk.token_ids]
            assert of_it == list(end.output_token_ids)
        assert (await answer(stub, request))[1] == ends


async def test_ends() -> None:
    async with a_server() as (stub, _):
        free = list((await answer(stub, ask(max_tokens=6)))[1][0].output_token_ids)
        for include in (False, True):
            _, ends = await answer(
                stub, ask(max_tokens=6, stop_token_ids=[free[2]], include_stop_token_in_output=include)
            )
            assert list(ends[0].output_token_ids) == free[: 3 if include else 2]
            assert (ends[0].finish_reason, ends[0].matched_token_id) == ("stop", free[2])
        bias = [0.0] * standin.VOCAB_SIZE
        bias[standin.EOS_IDS[1]] = 500.0
        _, ends = await answer(stub, ask(max_tokens=6, embedding_bias=bias))
        assert list(ends[0].output_token_ids) == [standin.EOS_IDS[1]]
        assert ends[0].finish_reason == "stop"
        _, ends = await answer(stub, ask(max_tokens=6, embedding_bias=bias, ignore_eos=True))
        assert (len(ends[0].output_token_ids), ends[0].finish_reason) == (6, "length")
        _, ends = await answer(stub, ask(max_tokens=6, bad_token_ids=[free[0]]))
        assert free[0] not in ends[0].output_token_ids


async def test_a_stop_string_ends_a_choice_and_stops_the_engine(tmp_path: Path) -> None:
    """With the toy model, whose ids are bytes, on the sim engine."""
    folder = models.prepare(str(ToyModel(context_tokens=512).write(tmp_path)))
    limits = Limits(4, 64, 16, 512, 64, 64, 8)
    timing = Timing(prefill_tokens_per_s=1e6, step_s=0.0005, step_s_per_sequence=0.0)
    engine = BatchLoop(SimBackend(limits, timing, vocab_size=128, eos_ids=(0,)))
    async with served(engine, folder, CONFIG) as (service, channel):
        stub = trtllm_service_pb2_grpc.TrtllmServiceStub(channel)
        free = list((await answer(stub, ask(max_tokens=400)))[1][0].output_token_ids)
        stop = bytes(free[50:52]).decode()
        at = bytes(free).find(stop.encode())
        for include in (False, True):
            request = ask(max_tokens=400, stop=["never", stop], include_stop_token_in_output=include)
            chunks, ends = await answer(stub, request)
            ids = [token for chunk in chunks for token in chunk.token_ids]
            # Without it the part that had been sent before the rest came stays.
            assert ids == list(ends[0].output_token_ids)
            assert len(ids) in ((at + 2,) if include else (at, at + 1))
            assert ids == free[: len(ids)]
            assert (ends[0].finish_reason, ends[0].matched_stop_str) == ("stop", stop)

        async def at_rest() -> bool:
            return service.load().running_requests == 0

        await eventually(at_rest, "an engine at rest", PATIENCE_S)


async def test_log_probabilities() -> None:
    async with a_server() as (stub, _):
        request = ask(max_tokens=3, output_config=pb.OutputConfig(logprobs=2))
        chunks, ends = await answer(stub, request)
        rows = [row for chunk in chunks for row in chunk.logprobs]
        assert rows == list(ends[0].logprobs)
        assert [row.token_id for row in rows] == list(ends[0].output_token_ids)
        for row in rows:
            assert len(row.top_logprobs) == 2
            assert row.top_logprobs[0].logprob == row.logprob < 0


REFUSED = [
    ({"bad": ["word"]}, "bad: words are not supported"),
    ({"beam_width": 2}, "beam_width: this worker samples, got 2"),
    ({"prompt": []}, "the prompt has no ids"),
    ({"prompt": [5000]}, "prompt id 5000 is not below"),
    ({"temperature": -1.0}, "temperature must be from 0"),
    ({"lora_config": pb.LoraConfig(task_id=1)}, "lora_config: this worker knows adapters by name"),
    ({"output_config": pb.OutputConfig(return_context_logits=True)}, "output_config: logits"),
    (
        {"disaggregated_params": pb.DisaggregatedParams(request_type=1)},
        "disaggregated_params: not supported by this worker",
    ),
    (
        {"guided_decoding": pb.GuidedDecodingParams(guide_type=5, guide="x")},
        "guided_decoding: GUIDE_TYPE_STRUCTURAL_TAG is not supported",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
async def test_what_cannot_be_done_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    async with a_server() as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(stub, ask(**change))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert message in (caught.value.details() or "")
        assert (await answer(stub, ask()))[1][0].finish_reason == "length"


async def test_aborts_and_clients_that_leave_free_the_engine() -> None:
    async with a_server() as (stub, service):
        ending = asyncio.create_task(answer(stub, ask(max_tokens=900, request_id="long")))

        async def running() -> bool:
            return service.load().running_requests == 1

        await eventually(running, "a request that runs", PATIENCE_S)
        said = await stub.Abort(pb.AbortRequest(request_id="long"))
        assert said.success
        _, ends = await ending
        assert ends[0].finish_reason == "cancelled"
        assert not (await stub.Abort(pb.AbortRequest(request_id="long"))).success
        call = stub.Generate(ask(max_tokens=900))
        await call.read()
        call.cancel()

        async def at_rest() -> bool:
            return service.load().running_requests == 0 and not service._open

        await eventually(at_rest, "an engine at rest", PATIENCE_S)


async def test_who_it_is(tmp_path: Path) -> None:
    folder = models.prepare(str(ToyModel().write(tmp_path)))
    async with a_server(folder) as (stub, _):
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).status == "OK"
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model_id, info.max_seq_len, info.vocab_size, info.max_batch_size) == ("toy", 1024, 1000, 4)
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.backend, server.version) == ("tensorrt_llm", "1.2.1")
        bundle = b""
        async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest()):
            bundle += chunk.data
            digest = chunk.sha256
        assert hashlib.sha256(bundle).hexdigest() == digest
        with zipfile.ZipFile(io.BytesIO(bundle)) as files:
            assert files.read("tokenizer.json") == folder.tokenizer_json.read_bytes()
            assert json.loads(files.read("tokenizer_config.json"))["chat_template"] == folder.chat_template
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(pb.EmbedRequest())
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_an_engine_that_dies_ends_the_streams_and_the_health() -> None:
    async with a_server(faults={"decode:77": "die"}) as (stub, service):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(stub, ask([77, 78], max_tokens=50))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.HealthCheck(pb.HealthCheckRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert isinstance(service._engine, SelfBatched)
