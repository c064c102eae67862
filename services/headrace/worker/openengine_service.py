"""OpenEngine v1 from any engine: what speaks it to ``trtllm-serve --grpc-protocol openengine`` can stand before this
worker. The rest is ``door.py``'s.

Token ids alone go in and out: the protocol's text side is left to whoever asks. KV does not travel through this door.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from headrace.models import ModelFolder
from headrace.openengine.v1 import openengine_pb2 as pb
from headrace.openengine.v1 import openengine_pb2_grpc
from headrace.serving import Service, StreamError
from headrace.status import STATUS
from headrace.v1 import types_pb2, worker_pb2
from headrace.worker.door import EPOCH, NUMBER, Answer, Door, Failed, Piece, Refused, Stops
from headrace.worker.engine import TokenLogprobs
from headrace.worker.servicer import WorkerService

SCHEMA_REVISION, MINIMUM_CLIENT_REVISION = 1, 1
#: Of the contract's releases, the one that this speaks.
SCHEMA_RELEASE = "v0.1.0"
_PROBE_TIMEOUT_S = 30.0
_MAX_TOP_LOGPROBS = 100
_MODES = {
    "json_schema": pb.GUIDED_DECODING_MODE_JSON_SCHEMA,
    "json_object": pb.GUIDED_DECODING_MODE_JSON_OBJECT,
    "regex": pb.GUIDED_DECODING_MODE_REGEX,
    "grammar": pb.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    "choice": pb.GUIDED_DECODING_MODE_CHOICE,
}
_REASONS = {types_pb2.OUTCOME_STOP: pb.FINISH_REASON_STOP, types_pb2.OUTCOME_LENGTH: pb.FINISH_REASON_LENGTH}
_CODES = {
    types_pb2.ERROR_CODE_INVALID_ARGUMENT: pb.ERROR_CODE_INVALID_ARGUMENT,
    types_pb2.ERROR_CODE_UNSUPPORTED: pb.ERROR_CODE_UNSUPPORTED_FEATURE,
    types_pb2.ERROR_CODE_OVERLOADED: pb.ERROR_CODE_OVERLOADED,
    types_pb2.ERROR_CODE_CANCELLED: pb.ERROR_CODE_CANCELLED,
}
#: As everywhere, but for what clients of this protocol look at.
_STATUS = STATUS | {types_pb2.ERROR_CODE_UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED}
_HEALTH = {
    worker_pb2.WORKER_STATE_STARTING: pb.HEALTH_STATE_STARTING,
    worker_pb2.WORKER_STATE_READY: pb.HEALTH_STATE_READY,
    # It goes, and takes nothing new.
    worker_pb2.WORKER_STATE_DRAINING: pb.HEALTH_STATE_NOT_READY,
}


def add(server: Service, worker: WorkerService, folder: ModelFolder) -> None:
    """Serves it too."""
    service = OpenEngineService(worker, folder)
    server.add(openengine_pb2_grpc.add_InferenceServicer_to_server, service, "openengine.v1.Inference")
    server.add(openengine_pb2_grpc.add_ControlServicer_to_server, service, "openengine.v1.Control")


class OpenEngineService:
    """The rpcs of both services."""

    def __init__(self, worker: WorkerService, folder: ModelFolder) -> None:
        self._worker = worker
        self._door = Door(worker, folder)

    # --- Inference --------------------------------------------------------------------------------------------------

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One request. What fails before anything was told of it is a status; later, a message."""
        told = None
        try:
            if request.request_id and self._door.runs(request.request_id):
                text = f"request_id: {request.request_id} is under way"
                raise Refused(text, grpc.StatusCode.ALREADY_EXISTS)
            submit = self._submit_of(request, context)
            answer = self._door.answer(submit, _stops(request))
            told = _Told(request, answer, list(submit.prompt_ids))
            async with contextlib.aclosing(self._door.run(request.request_id, submit, answer)) as pieces:
                async for piece in pieces:
                    for response in told.messages(piece):
                        yield response
        except Refused as refused:
            await context.abort(refused.code, str(refused))
        except Failed as failed:
            if told is None or not told.begun:
                await context.abort(_STATUS.get(failed.why.code, grpc.StatusCode.INTERNAL), str(failed))
            assert told is not None
            yield told.failed(failed.why)
        except StreamError as failure:
            await context.abort(failure.code, failure.details)

    def _submit_of(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> worker_pb2.Submit:
        described = self._worker.description
        _refuse_what_has_no_counterpart(request)
        if request.WhichOneof("input") != "token_ids":
            raise Refused("prompt: this worker takes token_ids", grpc.StatusCode.UNIMPLEMENTED)
        prompt, wanted, stopping = request.token_ids.ids, request.sampling, request.stopping
        if wanted.HasField("num_sequences") and not wanted.num_sequences:
            raise Refused("num_sequences: must be at least 1, got 0")
        seed = wanted.seed if wanted.HasField("seed") else random.getrandbits(63)
        left = max(1, described.context_tokens - len(prompt))
        max_tokens = min(stopping.max_tokens, left) if stopping.HasField("max_tokens") else left
        submit = worker_pb2.Submit(
            request=NUMBER,
            request_id=request.request_id,
            epoch=EPOCH,
            model=request.model,
            prompt_ids=prompt,
            sampling=types_pb2.Sampling(
                temperature=wanted.temperature if wanted.HasField("temperature") else 1.0,
                top_k=max(0, wanted.top_k),
                top_p=wanted.top_p if wanted.HasField("top_p") else 1.0,
                min_p=wanted.min_p,
                repetition_penalty=wanted.repetition_penalty if wanted.HasField("repetition_penalty") else 1.0,
                frequency_penalty=wanted.frequency_penalty,
                presence_penalty=wanted.presence_penalty,
                seeds=[(seed + choice) % 2**64 for choice in range(max(1, wanted.num_sequences))],
            ),
            stopping=types_pb2.Stopping(
                max_tokens=max_tokens,
                min_tokens=min(stopping.min_tokens, max_tokens),
                ignore_eos=stopping.ignore_eos,
                stop_ids=_stops(request).ids,
                eos_ids=described.eos_ids,
            ),
            lora=request.lora_name,
            cache_salt=request.kv.cache_salt.encode(),
            bypass_prefix_cache=request.kv.bypass_prefix_cache,
        )
        setattr(submit, "class", _class_of(context))
        if request.response.return_output_logprobs:
            submit.logprobs.enabled = True
            submit.logprobs.top = _top(request.response.output_candidates, "output_candidates")
        if request.response.return_prompt_logprobs:
            submit.logprobs.prompt = True
            top = _top(request.response.prompt_candidates, "prompt_candidates")
            submit.logprobs.top = max(submit.logprobs.top, top)
        _guide(submit.guided, request.guided)
        return submit

    # --- Control ----------------------------------------------------------------------------------------------------

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ServerInfo:
        """The engine, and how much of it there is."""
        described = self._worker.description
        return pb.ServerInfo(
            engine_name=described.engine,
            engine_version=described.engine_version,
            engine_role=pb.ENGINE_ROLE_AGGREGATED,
            instance_id=self._worker.instance_id,
            supported_models=[described.model],
            schema_revision=SCHEMA_REVISION,
            minimum_client_revision=MINIMUM_CLIENT_REVISION,
            schema_release=SCHEMA_RELEASE,
            capacity=pb.DeploymentCapacity(
                kv_block_size=described.block_tokens,
                total_kv_blocks=described.kv_blocks,
                max_running_requests=described.slots,
            ),
        )

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ModelInfo:
        """What it can do; exactly what Generate takes."""
        described = self._worker.description
        if request.model != described.model:
            text = f"this worker serves {described.model!r}, not {request.model!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        can = described.capabilities
        top_n = [pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N]
        return pb.ModelInfo(
            model_id=described.model,
            served_model_name=described.model,
            max_context_length=described.context_tokens,
            supports_text_input=False,
            supports_token_ids_input=True,
            supports_lora=bool(can.lora),
            supports_multimodal=False,
            generation=pb.GenerationCapabilities(
                prompt_logprobs=pb.LogprobCapabilities(
                    supported=can.prompt_logprobs, candidate_selection_modes=top_n, max_top_n=_MAX_TOP_LOGPROBS
                ),
                output_logprobs=pb.LogprobCapabilities(
                    supported=can.logprobs, candidate_selection_modes=top_n, max_top_n=_MAX_TOP_LOGPROBS
                ),
                guided_decoding=pb.GuidedDecodingCapabilities(
                    supported=bool(can.guided), modes=[_MODES[kind] for kind in can.guided if kind in _MODES]
                ),
                max_num_sequences=described.slots,
                supports_priority=True,
                supports_stop_in_output=True,
                supports_cache_salt=True,
                supports_prefix_cache_bypass=True,
            ),
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.LoadInfo:
        """As of a moment ago."""
        load = self._worker.load()
        return pb.LoadInfo(
            instance_id=self._worker.instance_id,
            timestamp_unix_nanos=time.time_ns(),
            running_requests=load.running_requests,
            queued_requests=load.waiting_requests,
            used_kv_blocks=load.kv_blocks_used,
            total_kv_blocks=load.kv_blocks_total,
            running_tokens=load.context_tokens,
            waiting_tokens=load.waiting_prompt_tokens,
        )

    async def Health(self, request: pb.HealthRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.HealthResponse:
        """The worker's state, and if so wished one token."""
        state = _HEALTH.get(self._worker.state, pb.HEALTH_STATE_NOT_READY)
        name = worker_pb2.WorkerState.Name(self._worker.state).removeprefix("WORKER_STATE_")
        checks = [pb.HealthCheck(name="model", state=state, message=name.lower())]
        if request.include_inference_probe and state == pb.HEALTH_STATE_READY:
            why = await self._probe()
            state = pb.HEALTH_STATE_DEGRADED if why else state
            checks.append(pb.HealthCheck(name="inference_probe", state=state, message=why))
        return pb.HealthResponse(state=state, checks=checks)

    async def _probe(self) -> str:
        """Why one token did not come."""
        submit = worker_pb2.Submit(request=NUMBER, epoch=EPOCH, request_id=f"probe-{uuid.uuid4().hex[:8]}")
        submit.prompt_ids.append(0)
        submit.sampling.seeds.append(0)
        submit.stopping.max_tokens, submit.stopping.ignore_eos = 1, True
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                run = self._door.run(submit.request_id, submit, self._door.answer(submit, Stops()))
                async with contextlib.aclosing(run) as pieces:
                    async for _ in pieces:
                        pass
        except TimeoutError:
            return f"not within {_PROBE_TIMEOUT_S:g} s"
        except (Refused, Failed, StreamError) as failure:
            return str(failure)
        return ""

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.AbortResponse:
        """Ends requests; their streams end with what they have."""
        target = request.WhichOneof("target")
        if target == "kv_session":
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "kv_session: KV does not travel through this door")
        if target is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "target: none is set")
        count = self._door.abort_all() if target == "all_requests" else int(self._door.abort(request.request_id))
        return pb.AbortResponse(
            status=pb.ABORT_STATUS_ABORTED if count else pb.ABORT_STATUS_ALREADY_FINISHED,
            message=f"{count} aborted",
        )


class _Told:
    """Pieces in, messages out."""

    def __init__(self, request: pb.GenerateRequest, answer: Answer, prompt: list[int]) -> None:
        self._request = request
        self._answer = answer
        self._prompt = prompt
        self._stop_ids = _stops(request).ids
        self.begun = False

    def messages(self, piece: Piece) -> Iterator[pb.GenerateResponse]:
        """Of that piece."""
        request = self._request
        if not self.begun and request.response.return_prompt_logprobs:
            rows = [None, *self._answer.prompt_logprobs]
            tokens = [_info(token, row) for token, row in zip(self._prompt, rows, strict=False)]
            yield pb.GenerateResponse(request_id=request.request_id, prompt=pb.PromptOutput(tokens=tokens))
        self.begun = True
        if piece.ids:
            tokens = [
                _info(token, piece.logprobs[place] if place < len(piece.logprobs) else None)
                for place, token in enumerate(piece.ids)
            ]
            token_output = pb.TokenOutput(output_index=piece.choice, tokens=tokens)
            yield pb.GenerateResponse(request_id=request.request_id, token=token_output)
        if piece.outcome is not None:
            yield pb.GenerateResponse(
                request_id=request.request_id,
                finished=self._finished(piece),
                usage=self._usage() if not self._answer.open_choices else None,
            )

    def failed(self, why: types_pb2.Error) -> pb.GenerateResponse:
        """The last message of a request that failed."""
        code = _CODES.get(why.code, pb.ERROR_CODE_INTERNAL)
        failure = pb.EngineError(code=code, message=why.message, retryable=why.retryable)
        return pb.GenerateResponse(request_id=self._request.request_id, error=failure, usage=self._usage())

    def _finished(self, piece: Piece) -> pb.GenerationFinished:
        assert piece.outcome is not None
        finished = pb.GenerationFinished(
            output_index=piece.choice, reason=_REASONS.get(piece.outcome, pb.FINISH_REASON_CANCELLED)
        )
        if piece.outcome == types_pb2.OUTCOME_DEADLINE:
            finished.message = "the deadline has passed"
        if piece.met:
            finished.stop_match.stop_text = piece.met
        elif piece.outcome == types_pb2.OUTCOME_STOP and piece.met_id is not None:
            if piece.met_id in self._stop_ids:
                finished.stop_match.stop_token_id = piece.met_id
            else:
                finished.stop_match.eos_token_id = piece.met_id
        return finished

    def _usage(self) -> pb.Usage:
        answer = self._answer
        return pb.Usage(
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            total_tokens=answer.prompt_tokens + answer.completion_tokens,
            cached_prompt_tokens=answer.cached_tokens,
        )


def _refuse_what_has_no_counterpart(request: pb.GenerateRequest) -> None:
    if not request.request_id:
        raise Refused("request_id: must not be empty")
    if not request.model:
        raise Refused("model: must not be empty")
    asked = request.extra.fields["request_type"].string_value if "request_type" in request.extra.fields else ""
    for name, found in (
        ("media", bool(request.media)),
        ("kv.session", request.kv.HasField("session")),
        ("extra.request_type", asked not in ("", "context_and_generation")),
        ("guided.backend", bool(request.guided.backend)),
        ("response.prompt_logprob_start", bool(request.response.prompt_logprob_start)),
    ):
        if found:
            raise Refused(f"{name}: not supported by this worker", grpc.StatusCode.UNIMPLEMENTED)
    if any(each.WhichOneof("condition") is None for each in request.stopping.conditions):
        raise Refused("stopping.conditions: each must be a text or an id")


def _stops(request: pb.GenerateRequest) -> Stops:
    conditions = request.stopping.conditions
    ids = frozenset(each.stop_token_id for each in conditions if each.HasField("stop_token_id"))
    texts = tuple(each.stop_text for each in conditions if each.stop_text)
    return Stops(ids, texts, request.stopping.include_stop_in_output)


def _class_of(context: grpc.aio.ServicerContext[Any, Any]) -> types_pb2.RequestClass:
    """Priorities have no scale: above and below none is all that can be said."""
    for key, value in context.invocation_metadata() or ():
        if key == "openengine-priority":
            try:
                priority = int(value)
            except ValueError:
                raise Refused(f"openengine-priority: expected a number, got {value!r}") from None
            if priority:
                return types_pb2.REQUEST_CLASS_INTERACTIVE if priority > 0 else types_pb2.REQUEST_CLASS_BATCH
        elif key == "openengine-target-dp-rank" and value != "0":
            raise Refused(f"openengine-target-dp-rank: this worker has one rank, got {value!r}")
    return types_pb2.REQUEST_CLASS_STANDARD


def _top(selection: pb.CandidateTokenSelection, name: str) -> int:
    kind = selection.WhichOneof("selection")
    if kind not in (None, "top_n"):
        raise Refused(f"response.{name}: only top_n is supported, got {kind}", grpc.StatusCode.UNIMPLEMENTED)
    return selection.top_n


def _guide(guided: types_pb2.Guided, wanted: pb.GuidedDecoding) -> None:
    match wanted.WhichOneof("guide"):
        case None:
            return
        case "json_object":
            guided.json_object = True
        case "json_schema":
            guided.json_schema = wanted.json_schema
        case "regex":
            guided.regex = wanted.regex
        case "ebnf_grammar":
            guided.grammar = wanted.ebnf_grammar
        case "choice":
            guided.choice.texts.extend(wanted.choice.choices)
        case other:
            raise Refused(f"guided.{other}: not supported by this worker", grpc.StatusCode.UNIMPLEMENTED)


def _info(token: int, row: TokenLogprobs | None) -> pb.TokenInfo:
    made = pb.TokenInfo(token_id=token)
    if row is not None:
        made.logprob = row.drawn[1]
        for rank, (candidate, logprob) in enumerate(row.top, 1):
            made.candidates.add(token_id=candidate, logprob=logprob, rank=rank)
            if candidate == token:
                made.rank = rank
    return made
