"""``trtllm.TrtllmService`` from any engine: what speaks to ``trtllm-serve --grpc`` can stand before this worker.

The messages are those of the package ``smg-grpc-proto``; the rest is ``door.py``'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import random
import zipfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from smg_grpc_proto import trtllm_service_pb2, trtllm_service_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from headrace.models import ModelFolder
from headrace.serving import Service, StreamError
from headrace.status import STATUS
from headrace.v1 import types_pb2, worker_pb2
from headrace.worker.door import EPOCH, NUMBER, Answer, Door, Failed, Piece, Refused, Stops
from headrace.worker.engine import TokenLogprobs
from headrace.worker.servicer import WorkerService

log = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
#: An id with this bias is never drawn.
_NEVER = -1000.0
_REASONS = {
    types_pb2.OUTCOME_STOP: "stop",
    types_pb2.OUTCOME_LENGTH: "length",
    types_pb2.OUTCOME_CANCELLED: "cancelled",
    types_pb2.OUTCOME_DEADLINE: "timeout",
}
_GUIDES = trtllm_service_pb2.GuidedDecodingParams


def add(server: Service, worker: WorkerService, folder: ModelFolder) -> None:
    """Serves it too."""
    service = TrtllmService(worker, folder)
    server.add(trtllm_service_pb2_grpc.add_TrtllmServiceServicer_to_server, service, "trtllm.TrtllmService")


class TrtllmService(trtllm_service_pb2_grpc.TrtllmServiceServicer):  # type: ignore[misc]
    """The rpcs."""

    def __init__(self, worker: WorkerService, folder: ModelFolder) -> None:
        self._worker = worker
        self._folder = folder
        self._door = Door(worker, folder)

    async def Generate(
        self, request: trtllm_service_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[trtllm_service_pb2.GenerateResponse]:
        """One request: chunks with what is new, then a last message for each choice."""
        try:
            submit = self._submit_of(request)
            stops = Stops(frozenset(request.stop_token_ids), tuple(request.stop), request.include_stop_token_in_output)
            answer = self._door.answer(submit, stops)
            told = _Told(request, answer, len(submit.sampling.seeds))
            async with contextlib.aclosing(self._door.run(request.request_id, submit, answer)) as pieces:
                async for piece in pieces:
                    for response in told.messages(piece):
                        yield response
        except Refused as refused:
            await context.abort(refused.code, str(refused))
        except Failed as failed:
            await context.abort(STATUS.get(failed.why.code, grpc.StatusCode.INTERNAL), str(failed))
        except StreamError as failure:
            await context.abort(failure.code, failure.details)

    async def Abort(
        self, request: trtllm_service_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trtllm_service_pb2.AbortResponse:
        """Ends a request that runs; its stream ends with what it has."""
        found = self._door.abort(request.request_id)
        said = "aborted" if found else "not found"
        return trtllm_service_pb2.AbortResponse(success=found, message=f"Request {request.request_id} {said}")

    async def HealthCheck(
        self, request: trtllm_service_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trtllm_service_pb2.HealthCheckResponse:
        """``OK``, or the worker's state."""
        if not self._worker.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is not ready")
        state = worker_pb2.WorkerState.Name(self._worker.state).removeprefix("WORKER_STATE_")
        return trtllm_service_pb2.HealthCheckResponse(status="OK" if state == "READY" else state)

    async def GetModelInfo(
        self, request: trtllm_service_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trtllm_service_pb2.GetModelInfoResponse:
        """The model by the name that clients ask for."""
        described = self._worker.description
        guided = ["guided_decoding"] if described.capabilities.guided else []
        return trtllm_service_pb2.GetModelInfoResponse(
            model_id=described.model,
            max_input_len=max(0, described.context_tokens - 1),
            max_seq_len=described.context_tokens,
            max_batch_size=described.slots,
            vocab_size=described.vocab_size,
            supported_features=guided,
        )

    async def GetServerInfo(
        self, request: trtllm_service_pb2.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trtllm_service_pb2.GetServerInfoResponse:
        """The engine behind it."""
        described = self._worker.description
        return trtllm_service_pb2.GetServerInfoResponse(
            version=described.engine_version,
            backend=described.engine,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            context_parallel_size=1,
            world_size=1,
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as a zip, in chunks; the last has the digest."""
        bundle = _bundle(self._folder)
        digest = hashlib.sha256(bundle).hexdigest()
        for start in range(0, len(bundle), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            yield common_pb2.GetTokenizerChunk(data=bundle[start:end], sha256=digest if end >= len(bundle) else "")

    async def Embed(
        self, request: trtllm_service_pb2.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trtllm_service_pb2.EmbedResponse:
        """Not here."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker generates")
        raise AssertionError

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Not here: it wants the ids of each block, and the worker keeps their names alone."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "block events go to headrace's cache")

    # --- in ---------------------------------------------------------------------------------------------------------

    def _submit_of(self, request: trtllm_service_pb2.GenerateRequest) -> worker_pb2.Submit:
        described = self._worker.description
        for name in ("prompt_tuning_config", "multimodal_input", "disaggregated_params", "lookahead_config"):
            if request.HasField(name) and not _is_default(request, name):
                raise Refused(f"{name}: not supported by this worker")
        if request.bad:
            raise Refused("bad: words are not supported, bad_token_ids are")
        prompt = request.tokenized.input_token_ids
        wanted, output = request.sampling_config, request.output_config
        if wanted.beam_width > 1:
            raise Refused(f"beam_width: this worker samples, got {wanted.beam_width}")
        if output.return_context_logits or output.return_generation_logits:
            raise Refused("output_config: logits are not supported")
        choices = max(1, wanted.num_return_sequences)
        seed = wanted.seed if wanted.HasField("seed") else random.getrandbits(63)
        sampling = types_pb2.Sampling(
            temperature=wanted.temperature if wanted.HasField("temperature") else 1.0,
            top_k=max(0, wanted.top_k),
            top_p=wanted.top_p if wanted.HasField("top_p") else 1.0,
            min_p=wanted.min_p,
            repetition_penalty=wanted.repetition_penalty if wanted.HasField("repetition_penalty") else 1.0,
            frequency_penalty=wanted.frequency_penalty,
            presence_penalty=wanted.presence_penalty,
            logit_bias={token: bias for token, bias in enumerate(request.embedding_bias) if bias},
            seeds=[(seed + choice) % 2**64 for choice in range(choices)],
        )
        sampling.logit_bias.update(dict.fromkeys(request.bad_token_ids, _NEVER))
        left = max(1, described.context_tokens - len(prompt))
        submit = worker_pb2.Submit(
            request=NUMBER,
            request_id=request.request_id,
            epoch=EPOCH,
            prompt_ids=prompt,
            sampling=sampling,
            stopping=types_pb2.Stopping(
                max_tokens=min(request.max_tokens or left, left),
                min_tokens=min(wanted.min_tokens, request.max_tokens or left, left),
                ignore_eos=request.ignore_eos,
                stop_ids=request.stop_token_ids,
                eos_ids=described.eos_ids,
            ),
        )
        if output.HasField("logprobs"):
            submit.logprobs.enabled, submit.logprobs.top = True, max(0, output.logprobs)
        if output.HasField("prompt_logprobs"):
            submit.logprobs.prompt = True
            submit.logprobs.top = max(submit.logprobs.top, output.prompt_logprobs, 0)
        if request.HasField("lora_config"):
            submit.lora = _adapter(request.lora_config)
        if request.HasField("cache_salt_id"):
            submit.cache_salt = request.cache_salt_id.to_bytes(8, "little", signed=True)
        if request.HasField("guided_decoding"):
            _guide(submit.guided, request.guided_decoding)
        return submit


class _Told:
    """Pieces in, messages out: what was told of each choice is told once more, whole, at its end."""

    def __init__(self, request: trtllm_service_pb2.GenerateRequest, answer: Answer, choices: int) -> None:
        self._request = request
        self._answer = answer
        self._ids: list[list[int]] = [[] for _ in range(choices)]
        self._logprobs: list[list[trtllm_service_pb2.TokenLogprob]] = [[] for _ in range(choices)]

    def messages(self, piece: Piece) -> Iterator[trtllm_service_pb2.GenerateResponse]:
        """Of that piece."""
        logprobs = [_logprob(each) for each in piece.logprobs]
        ids = self._ids[piece.choice]
        ids += piece.ids
        self._logprobs[piece.choice] += logprobs
        counts = {
            "sequence_index": piece.choice,
            "prompt_tokens": self._answer.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": self._answer.cached_tokens,
        }
        if piece.ids and self._request.streaming:
            chunk = trtllm_service_pb2.GenerateStreamChunk(token_ids=piece.ids, logprobs=logprobs, **counts)
            yield trtllm_service_pb2.GenerateResponse(request_id=self._request.request_id, chunk=chunk)
        if piece.outcome is not None:
            complete = trtllm_service_pb2.GenerateComplete(
                output_token_ids=ids,
                finish_reason=_REASONS.get(piece.outcome, "stop"),
                logprobs=self._logprobs[piece.choice],
                prompt_logprobs=[_logprob(each) for each in self._answer.prompt_logprobs],
                **counts,
            )
            if piece.met:
                complete.matched_stop_str = piece.met
            elif piece.met_id in self._request.stop_token_ids:
                complete.matched_token_id = piece.met_id
            yield trtllm_service_pb2.GenerateResponse(request_id=self._request.request_id, complete=complete)


def _is_default(request: trtllm_service_pb2.GenerateRequest, name: str) -> bool:
    """Set, but to what an absent one means."""
    value = getattr(request, name)
    return not value.ByteSize()


def _adapter(config: trtllm_service_pb2.LoraConfig) -> str:
    """Its name: in this protocol it stands, if anywhere, in the adapter's own description."""
    try:
        name = json.loads(config.config_json or "{}").get("lora_name", "")
    except (ValueError, AttributeError) as failure:
        raise Refused(f"lora_config.config_json: {failure}") from failure
    if not name:
        raise Refused("lora_config: this worker knows adapters by name (config_json with lora_name)")
    return str(name)


def _guide(guided: types_pb2.Guided, wanted: trtllm_service_pb2.GuidedDecodingParams) -> None:
    kind = wanted.guide_type
    if kind == _GUIDES.GUIDE_TYPE_JSON:
        guided.json_object = True
    elif kind == _GUIDES.GUIDE_TYPE_JSON_SCHEMA:
        guided.json_schema = wanted.guide
    elif kind == _GUIDES.GUIDE_TYPE_REGEX:
        guided.regex = wanted.guide
    elif kind == _GUIDES.GUIDE_TYPE_EBNF_GRAMMAR:
        guided.grammar = wanted.guide
    else:
        raise Refused(f"guided_decoding: {_GUIDES.GuideType.Name(kind)} is not supported")


def _logprob(row: TokenLogprobs) -> trtllm_service_pb2.TokenLogprob:
    token, logprob = row.drawn
    made = trtllm_service_pb2.TokenLogprob(token_id=token, logprob=logprob)
    for token, logprob in row.top:
        made.top_logprobs.add(token_id=token, logprob=logprob)
    return made


def _bundle(folder: ModelFolder) -> bytes:
    """The folder's text side, in the names that Hugging Face's libraries look for."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": folder.bos_token or None,
        "eos_token": folder.eos_token or None,
        "chat_template": folder.chat_template,
    }
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("tokenizer.json", folder.tokenizer_json.read_bytes())
        bundle.writestr("tokenizer_config.json", json.dumps(config))
    return written.getvalue()
