"""OpenEngine v1 spoken to an engine (``remote.py``): ``trtllm-serve --grpc --grpc-protocol openengine``, for one.

Servers tell what they can do, so what can be asked of this engine depends on the server. What the protocol has no word
for (biases; whether the prompt counts for frequency and presence penalties) is refused. KV can go from one such engine
to another: the reference of a hand-off (``engine.Handoff``) is the server's ``KvSessionRef``, whole, in base64.

Numbers of the prompt's reuse come only with the end of a request. KV events do not come over gRPC here (servers publish
them over ZeroMQ), so none are told.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct

from headrace.errors import EngineError, error
from headrace.openengine.v1 import openengine_pb2 as pb
from headrace.openengine.v1 import openengine_pb2_grpc
from headrace.v1 import types_pb2
from headrace.worker.engine import Guided, Request, TokenLogprobs
from headrace.worker.engines.remote import Greeting, Heard, News, failed, refused
from headrace.worker.selfbatched import KvState, Run

#: Of the contract that is spoken here.
SCHEMA_REVISION = 1
_ENDS = {
    pb.FINISH_REASON_STOP: types_pb2.OUTCOME_STOP,
    pb.FINISH_REASON_LENGTH: types_pb2.OUTCOME_LENGTH,
    pb.FINISH_REASON_CANCELLED: types_pb2.OUTCOME_CANCELLED,
}
_REFUSALS = (pb.ERROR_CODE_INVALID_ARGUMENT, pb.ERROR_CODE_UNSUPPORTED_FEATURE, pb.ERROR_CODE_ROLE_MISMATCH)
_GUIDED = {
    pb.GUIDED_DECODING_MODE_JSON_SCHEMA: "json_schema",
    pb.GUIDED_DECODING_MODE_JSON_OBJECT: "json_object",
    pb.GUIDED_DECODING_MODE_REGEX: "regex",
    pb.GUIDED_DECODING_MODE_EBNF_GRAMMAR: "grammar",
    pb.GUIDED_DECODING_MODE_CHOICE: "choice",
}
#: More is sooner.
_PRIORITY = {types_pb2.REQUEST_CLASS_INTERACTIVE: 1, types_pb2.REQUEST_CLASS_BATCH: -1}


class OpenEngineDialect:
    """See ``remote.Dialect``."""

    name = "openengine"

    def __init__(self) -> None:
        self._inference: Any = None
        self._control: Any = None
        self._server = pb.ServerInfo()
        self._model = pb.ModelInfo()
        self._asked = ""

    def attach(self, link: grpc.aio.Channel) -> None:
        """See ``Dialect.attach``."""
        self._inference = openengine_pb2_grpc.InferenceStub(link)  # type: ignore[no-untyped-call]
        self._control = openengine_pb2_grpc.ControlStub(link)  # type: ignore[no-untyped-call]

    async def sick(self, timeout_s: float) -> str | None:
        """See ``Dialect.sick``. A degraded server serves."""
        answer = await self._control.Health(pb.HealthRequest(), timeout=timeout_s, wait_for_ready=False)
        if answer.state in (pb.HEALTH_STATE_READY, pb.HEALTH_STATE_DEGRADED):
            return None
        told = next((check.message for check in answer.checks if check.state == answer.state and check.message), "")
        return pb.HealthState.Name(answer.state).removeprefix("HEALTH_STATE_") + (f": {told}" if told else "")

    async def greet(self) -> Greeting:
        """See ``Dialect.greet``."""
        server = self._server = await self._control.GetServerInfo(pb.GetServerInfoRequest())
        if not server.schema_revision or server.minimum_client_revision > SCHEMA_REVISION:
            raise EngineError(
                f"{server.engine_name or 'the engine'} speaks OpenEngine revision {server.schema_revision} and wants "
                f"clients of {server.minimum_client_revision} or later; this is {SCHEMA_REVISION}"
            )
        if not server.supported_models:
            raise EngineError(f"{server.engine_name or 'the engine'} serves no model")
        self._asked = server.supported_models[0]
        model = self._model = await self._control.GetModelInfo(pb.GetModelInfoRequest(model=self._asked))
        if model.HasField("supports_token_ids_input") and not model.supports_token_ids_input:
            raise EngineError(f"{server.engine_name or 'the engine'} takes text alone, not token ids")
        capacity = server.capacity
        return Greeting(
            f"{server.engine_name} {server.engine_version}",
            slots=capacity.max_running_requests,
            context_tokens=model.max_context_length,
            block_tokens=capacity.kv_block_size,
            kv_blocks=capacity.total_kv_blocks,
        )

    def capabilities(self) -> types_pb2.Capabilities:
        """As the server tells."""
        generation = self._model.generation
        modes = [_GUIDED[mode] for mode in generation.guided_decoding.modes if mode in _GUIDED]
        if "regex" in modes and "choice" not in modes:
            modes.append("choice")
        return types_pb2.Capabilities(
            guided=modes if generation.guided_decoding.supported else [],
            logprobs=generation.output_logprobs.supported,
            kv_handoff=self._hands_over,
        )

    @property
    def _hands_over(self) -> bool:
        connector = self._server.kv_connector
        return connector.enabled and connector.supports_remote_prefill

    def kv_state_tag(self) -> str:
        """Release, model and transport must be the same."""
        if not self._hands_over:
            return ""
        server, blocks = self._server, self._server.capacity.kv_block_size
        model = hashlib.sha256(self._asked.encode()).hexdigest()[:16]
        transport = server.kv_connector.transfer_backend
        return f"openengine-{server.engine_name}-{server.engine_version}-{model}-{transport}-{blocks}"

    def refuse(self, request: Request) -> types_pb2.Error | None:
        """What cannot be said, or not to this server."""
        sampling, generation, engine = request.sampling, self._model.generation, self._server.engine_name
        if sampling.logit_bias:
            return _unsupported("OpenEngine has no word for it", "logit_bias")
        for name in ("frequency_penalty", "presence_penalty"):
            if getattr(sampling, name):
                return _unsupported("OpenEngine does not say whether the prompt counts for it", name)
        if request.cache_salt and not generation.supports_cache_salt:
            return _unsupported(f"{engine} does not keep the KV of tenants apart", "cache_salt")
        if not (request.reuse_prefix or generation.supports_prefix_cache_bypass or generation.supports_cache_salt):
            return _unsupported(f"{engine} cannot leave its prefix cache out", "bypass_prefix_cache")
        logprobs = generation.output_logprobs
        if request.logprobs.enabled and logprobs.HasField("max_top_n") and request.logprobs.top > logprobs.max_top_n:
            text = f"{engine} gives at most {logprobs.max_top_n} log-probabilities, got {request.logprobs.top}"
            return _unsupported(text, "top_logprobs")
        if request.handoff is None and self._server.engine_role == pb.ENGINE_ROLE_PREFILL:
            return _unsupported(f"{engine} computes prompts alone there", "handoff")
        if request.handoff is not None and request.handoff.reference:
            try:
                _session(request.handoff.reference)
            except ValueError as failure:
                return error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, str(failure), param="handoff")
        return None

    async def kv(self, timeout_s: float) -> KvState | None:
        """See ``Dialect.kv``."""
        load = await self._control.GetLoad(pb.GetLoadRequest(), timeout=timeout_s)
        return KvState(used_blocks=load.used_kv_blocks) if load.HasField("used_kv_blocks") else None

    # --- a run ------------------------------------------------------------------------------------------------------

    def generate(self, run: Run, request_id: str) -> Any:
        """See ``Dialect.generate``."""
        request, generation = run.request, self._model.generation
        sampling, stopping, logprobs = request.sampling, request.stopping, request.logprobs
        message = pb.GenerateRequest(
            request_id=request_id,
            model=self._asked,
            token_ids=pb.TokenIds(ids=run.prompt_ids),
            sampling=pb.SamplingParams(temperature=sampling.temperature, seed=run.seed, num_sequences=1),
            stopping=pb.StoppingOptions(
                max_tokens=run.max_tokens,
                conditions=[
                    pb.StopCondition(stop_token_id=token)
                    for token in [
                        *([] if stopping.ignore_eos else sorted(stopping.eos_ids)),
                        *sorted(stopping.stop_ids),
                    ]
                ],
                ignore_eos=stopping.ignore_eos,
            ),
        )
        if generation.supports_stop_in_output or not generation.HasField("supports_stop_in_output"):
            message.stopping.include_stop_in_output = True
        if run.min_tokens:
            message.stopping.min_tokens = run.min_tokens
        if sampling.temperature == 0:
            message.sampling.top_k = 1
        else:
            message.sampling.top_k, message.sampling.top_p = sampling.top_k, sampling.top_p
            if sampling.min_p:
                message.sampling.min_p = sampling.min_p
        if sampling.repetition_penalty != 1.0:
            message.sampling.repetition_penalty = sampling.repetition_penalty
        if logprobs.enabled:
            message.response.return_output_logprobs = True
            message.response.output_candidates.top_n = max(1, logprobs.top)
        if request.guided is not None:
            self._guide(message.guided, request.guided)
        if not request.reuse_prefix and generation.supports_prefix_cache_bypass:
            message.kv.bypass_prefix_cache = True
        elif not request.reuse_prefix:
            # KV under a salt of its own is nobody else's.
            message.kv.cache_salt = request_id
        if request.cache_salt and not message.kv.cache_salt:
            message.kv.cache_salt = request.cache_salt.hex()
        # Of TensorRT-LLM's server; others leave out what they do not know.
        message.extra["detokenize"] = False
        if request.handoff is not None and request.handoff.reference:
            message.kv.session.CopyFrom(_session(request.handoff.reference))
        elif request.handoff is not None:
            message.extra["request_type"] = "context_only"
        priority = _PRIORITY.get(request.request_class, 0) if generation.supports_priority else 0
        metadata = (("openengine-priority", str(priority)),) if priority else None
        return self._inference.Generate(message, metadata=metadata)

    def _guide(self, message: pb.GuidedDecoding, guided: Guided) -> None:
        match guided.kind:
            case "json_object":
                message.json_object.SetInParent()
            case "json_schema":
                message.json_schema = guided.text
            case "regex":
                message.regex = guided.text
            case "grammar":
                message.ebnf_grammar = guided.text
            case _:
                # Servers say it differently; a regular expression is the same everywhere.
                message.regex = guided.as_regex()

    def read(self, run: Run, heard: Heard, message: pb.GenerateResponse) -> News:
        """See ``Dialect.read``."""
        kind = message.WhichOneof("event")
        if kind == "token":
            tokens = message.token.tokens
            return News([each.token_id for each in tokens], _logprobs(run, tokens))
        usage = message.usage
        cached = usage.cached_prompt_tokens if usage.HasField("cached_prompt_tokens") else None
        if kind == "finished":
            news = _finished(run, heard, message.finished)
        elif kind == "prefill_ready":
            news = _prefilled(heard, message.prefill_ready.kv_session)
        elif kind == "error":
            news = _error(message.error, heard)
        else:
            # The prompt's own log-probabilities were not asked for; nor is anything that a later revision may add.
            return News()
        news.cached_tokens = cached
        return news


def _finished(run: Run, heard: Heard, finished: pb.GenerationFinished) -> News:
    end = _ENDS.get(finished.reason)
    if end is None:
        return failed(finished.message or "it ended without a reason")
    news = News(end=end)
    match = finished.stop_match
    found = {"stop_token_id": match.stop_token_id, "eos_token_id": match.eos_token_id}.get(
        match.WhichOneof("match") or "", -1
    )
    if end == types_pb2.OUTCOME_STOP and found != heard.last_id and found in run.request.stopping.end_ids:
        # Drawn, and left out of what was told.
        news.ids = [found]
    return news


def _prefilled(heard: Heard, session: pb.KvSessionRef) -> News:
    """The good end of a hand-off's first half: its one id, and where the KV waits."""
    news = News(end=types_pb2.OUTCOME_LENGTH, reference=base64.b64encode(session.SerializeToString()).decode())
    if not heard.count:
        first = _first_ids(session.attributes_struct)
        if not first:
            return failed("KV was left without the first id of the answer")
        news.ids = first[:1]
    return news


def _first_ids(attributes: Struct) -> list[int]:
    """As TensorRT-LLM's server carries them."""
    return [int(value.number_value) for value in attributes.fields["first_gen_tokens"].list_value.values]


def _error(told: pb.EngineError, heard: Heard) -> News:
    text = told.message or pb.ErrorCode.Name(told.code)
    if told.code == pb.ERROR_CODE_CANCELLED:
        return News(end=types_pb2.OUTCOME_CANCELLED)
    if told.code in _REFUSALS and not heard.count:
        return refused(text)
    if told.code == pb.ERROR_CODE_OVERLOADED:
        return failed(text, code=types_pb2.ERROR_CODE_OVERLOADED)
    return failed(text, retryable=told.retryable)


def _logprobs(run: Run, tokens: Any) -> list[TokenLogprobs] | None:
    options = run.request.logprobs
    if not options.enabled:
        return None
    return [
        TokenLogprobs(
            (each.token_id, each.logprob),
            [(candidate.token_id, candidate.logprob) for candidate in each.candidates[: options.top]],
        )
        for each in tokens
    ]


def _session(reference: str) -> pb.KvSessionRef:
    """What ``_prefilled`` wrote. Raises ValueError."""
    try:
        return pb.KvSessionRef.FromString(base64.b64decode(reference, validate=True))
    except DecodeError as failure:
        raise ValueError(f"no reference to KV: {failure}") from failure


def _unsupported(text: str, param: str) -> types_pb2.Error:
    return error(types_pb2.ERROR_CODE_UNSUPPORTED, f"{param}: {text}", param=param)
