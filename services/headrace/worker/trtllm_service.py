"""``trtllm.TrtllmService`` from any engine: what speaks to ``trtllm-serve --grpc`` can stand before this worker.

The messages are those of the package ``smg-grpc-proto``. A request becomes what a router would have sent, and goes
through the same validation, books and spans (``service.py``). What differs from a router: the parts of a request that
have no counterpart here are refused rather than left out; stop strings are looked for here, because this protocol
expects it of the engine.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import random
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from smg_grpc_proto import trtllm_service_pb2, trtllm_service_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from headrace.models import ModelFolder
from headrace.serving import StreamError
from headrace.status import STATUS
from headrace.tokenizer import StreamDecoder, Tokenizer
from headrace.v1 import types_pb2, worker_pb2
from headrace.worker.engine import Delta, TokenLogprobs
from headrace.worker.service import RouterStream, WorkerService

log = logging.getLogger(__name__)

FULL_NAME = "trtllm.TrtllmService"
add_to_server = trtllm_service_pb2_grpc.add_TrtllmServiceServicer_to_server

_CHUNK_BYTES = 1 << 20
#: Of the one request on each stream.
_NUMBER, _EPOCH = 1, 1
#: An id with this bias is never drawn.
_NEVER = -1000.0
_REASONS = {
    types_pb2.OUTCOME_STOP: "stop",
    types_pb2.OUTCOME_LENGTH: "length",
    types_pb2.OUTCOME_CANCELLED: "cancelled",
    types_pb2.OUTCOME_DEADLINE: "timeout",
}
_GUIDES = trtllm_service_pb2.GuidedDecodingParams


class _Refused(Exception):
    """The request cannot be done; the text says which field."""

    def __init__(self, text: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(text)
        self.code = code


class TrtllmService(trtllm_service_pb2_grpc.TrtllmServiceServicer):  # type: ignore[misc]
    """The rpcs."""

    def __init__(self, worker: WorkerService, folder: ModelFolder) -> None:
        self._worker = worker
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        #: By their client's id.
        self._running: dict[str, RouterStream] = {}

    async def Generate(
        self, request: trtllm_service_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[trtllm_service_pb2.GenerateResponse]:
        """One request: chunks with what is new, then a last message for each choice."""
        try:
            submit = self._submit_of(request)
        except _Refused as refused:
            await context.abort(refused.code, str(refused))
        if not self._worker.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker is not ready")
        with self._worker.attached() as stream:
            self._running[request.request_id] = stream
            try:
                self._worker.submit(stream, submit)
                answer = _Answer(request, submit, self._decoder, lambda choice: self._stop(stream, choice))
                while answer.open_choices and (items := await stream.outbox.take()) is not None:
                    for item in items:
                        assert isinstance(item, tuple)
                        for response in answer.take(item[1]):
                            yield response
            except _Refused as refused:
                await context.abort(refused.code, str(refused))
            except StreamError as failure:
                await context.abort(failure.code, failure.details)
            finally:
                if self._running.get(request.request_id) is stream:
                    del self._running[request.request_id]

    async def Abort(
        self, request: trtllm_service_pb2.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trtllm_service_pb2.AbortResponse:
        """Ends a request that runs; its stream ends with what it has."""
        stream = self._running.get(request.request_id)
        if stream is not None:
            reason = types_pb2.OUTCOME_CANCELLED
            self._worker.cancel(stream, worker_pb2.Cancel(request=_NUMBER, epoch=_EPOCH, reason=reason))
        said = "aborted" if stream is not None else "not found"
        return trtllm_service_pb2.AbortResponse(
            success=stream is not None, message=f"Request {request.request_id} {said}"
        )

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
                raise _Refused(f"{name}: not supported by this worker")
        if request.bad:
            raise _Refused("bad: words are not supported, bad_token_ids are")
        prompt = request.tokenized.input_token_ids
        wanted, output = request.sampling_config, request.output_config
        if wanted.beam_width > 1:
            raise _Refused(f"beam_width: this worker samples, got {wanted.beam_width}")
        if output.return_context_logits or output.return_generation_logits:
            raise _Refused("output_config: logits are not supported")
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
            request=_NUMBER,
            request_id=request.request_id,
            epoch=_EPOCH,
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

    def _decoder(self) -> StreamDecoder:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_folder(self._folder.path)
        return self._tokenizer.stream_decoder()

    def _stop(self, stream: RouterStream, choice: int) -> None:
        """A stop string was met."""
        cancel = worker_pb2.Cancel(request=_NUMBER, epoch=_EPOCH, choice=choice, reason=types_pb2.OUTCOME_STOP)
        self._worker.cancel(stream, cancel)


@dataclass(slots=True)
class _Choice:
    """What has come of one."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[trtllm_service_pb2.TokenLogprob] = field(default_factory=list)
    text: str = ""
    decoder: StreamDecoder | None = None
    #: The stop string that ended it.
    met: str = ""
    ended: bool = False


class _Answer:
    """Deltas in, messages out."""

    def __init__(
        self,
        request: trtllm_service_pb2.GenerateRequest,
        submit: worker_pb2.Submit,
        decoder: Callable[[], StreamDecoder],
        stop: Callable[[int], None],
    ) -> None:
        self._request = request
        self._stop = stop
        self._stop_ids = frozenset(request.stop_token_ids)
        self._longest_stop = max(map(len, request.stop), default=0)
        self._prompt_tokens = len(submit.prompt_ids)
        self._cached_tokens = 0
        self._prompt_logprobs: list[trtllm_service_pb2.TokenLogprob] = []
        self._choices = [_Choice() for _ in submit.sampling.seeds]
        if request.stop:
            for choice in self._choices:
                choice.decoder = decoder()

    @property
    def open_choices(self) -> int:
        return sum(not choice.ended for choice in self._choices)

    def take(self, delta: Delta) -> Iterator[trtllm_service_pb2.GenerateResponse]:
        """What the client is told of it. Raises _Refused when the request failed."""
        if delta.cached_prompt_tokens is not None:
            self._cached_tokens = delta.cached_prompt_tokens
        self._prompt_logprobs += [_logprob(each) for each in delta.prompt_logprobs or ()]
        choice = self._choices[delta.choice]
        if choice.ended:
            return
        ids = list(delta.ids)
        finish = delta.finish
        if finish is not None and (failure := finish.error) is not None:
            raise _Refused(failure.message, STATUS.get(failure.code, grpc.StatusCode.INTERNAL))
        if choice.decoder is not None:
            ids = self._until_stop(choice, choice.decoder, ids)
        stop_id = ids[-1] if ids and ids[-1] in self._stop_ids and finish is not None else None
        if stop_id is not None and not self._request.include_stop_token_in_output:
            ids.pop()
        logprobs = [_logprob(each) for each in (delta.logprobs or [])[: len(ids)]]
        choice.ids += ids
        choice.logprobs += logprobs
        if ids and self._request.streaming:
            yield self._chunk(delta.choice, choice, ids, logprobs)
        if choice.met and finish is None:
            self._stop(delta.choice)
        if choice.met or finish is not None:
            choice.ended = True
            reason = "stop" if choice.met or finish is None else _REASONS.get(finish.outcome, "stop")
            yield self._complete(delta.choice, choice, reason, stop_id)

    def _until_stop(self, choice: _Choice, decoder: StreamDecoder, ids: list[int]) -> list[int]:
        """The ids up to the one whose text completes a stop string; without those that are all of it, if so wished."""
        begins = []
        for place, token in enumerate(ids):
            begins.append(len(choice.text))
            choice.text += decoder.push(token)
            since = max(0, begins[-1] - self._longest_stop)
            found = [(at, stop) for stop in self._request.stop if stop and (at := choice.text.find(stop, since)) >= 0]
            if found:
                at, choice.met = min(found)
                if self._request.include_stop_token_in_output:
                    return ids[: place + 1]
                return [token for token, begin in zip(ids[: place + 1], begins, strict=True) if begin < at]
        return ids

    def _chunk(
        self, number: int, choice: _Choice, ids: list[int], logprobs: list[trtllm_service_pb2.TokenLogprob]
    ) -> trtllm_service_pb2.GenerateResponse:
        return trtllm_service_pb2.GenerateResponse(
            request_id=self._request.request_id,
            chunk=trtllm_service_pb2.GenerateStreamChunk(
                token_ids=ids,
                sequence_index=number,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(choice.ids),
                cached_tokens=self._cached_tokens,
                logprobs=logprobs,
            ),
        )

    def _complete(
        self, number: int, choice: _Choice, reason: str, stop_id: int | None
    ) -> trtllm_service_pb2.GenerateResponse:
        complete = trtllm_service_pb2.GenerateComplete(
            output_token_ids=choice.ids,
            sequence_index=number,
            finish_reason=reason,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(choice.ids),
            cached_tokens=self._cached_tokens,
            logprobs=choice.logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )
        if choice.met:
            complete.matched_stop_str = choice.met
        elif stop_id is not None:
            complete.matched_token_id = stop_id
        return trtllm_service_pb2.GenerateResponse(request_id=self._request.request_id, complete=complete)


def _is_default(request: trtllm_service_pb2.GenerateRequest, name: str) -> bool:
    """Set, but to what an absent one means."""
    value = getattr(request, name)
    return not value.ByteSize()


def _adapter(config: trtllm_service_pb2.LoraConfig) -> str:
    """Its name: in this protocol it stands, if anywhere, in the adapter's own description."""
    try:
        name = json.loads(config.config_json or "{}").get("lora_name", "")
    except (ValueError, AttributeError) as failure:
        raise _Refused(f"lora_config.config_json: {failure}") from failure
    if not name:
        raise _Refused("lora_config: this worker knows adapters by name (config_json with lora_name)")
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
        raise _Refused(f"guided_decoding: {_GUIDES.GuideType.Name(kind)} is not supported")


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
