"""``trtllm.TrtllmService`` spoken to an engine (``remote.py``): ``trtllm-serve --grpc``, or another worker.

It carries no statistics, and no KV events that name adapters and salts, so none are told; with the engine in process
(``tensorrt_llm.py``) they are.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import grpc
from smg_grpc_proto import trtllm_service_pb2, trtllm_service_pb2_grpc

from headrace.models import ModelFolder
from headrace.v1 import types_pb2
from headrace.worker.engine import Guided, Request, TokenLogprobs
from headrace.worker.engines.remote import Greeting, Heard, News, failed
from headrace.worker.selfbatched import KvState, Run

_ENDS = {
    "stop": types_pb2.OUTCOME_STOP,
    "stop_word": types_pb2.OUTCOME_STOP,
    "length": types_pb2.OUTCOME_LENGTH,
    "timeout": types_pb2.OUTCOME_DEADLINE,
    "cancelled": types_pb2.OUTCOME_CANCELLED,
}
_GUIDES = trtllm_service_pb2.GuidedDecodingParams


class TrtllmDialect:
    """See ``remote.Dialect``."""

    name = "trtllm_grpc"

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._stub: Any = None

    def attach(self, link: grpc.aio.Channel) -> None:
        """See ``Dialect.attach``."""
        self._stub = trtllm_service_pb2_grpc.TrtllmServiceStub(link)

    async def sick(self, timeout_s: float) -> str | None:
        """See ``Dialect.sick``."""
        request = trtllm_service_pb2.HealthCheckRequest()
        answer = await self._stub.HealthCheck(request, timeout=timeout_s, wait_for_ready=False)
        return None if answer.status == "OK" else str(answer.status)

    async def greet(self) -> Greeting:
        """See ``Dialect.greet``."""
        info = await self._stub.GetModelInfo(trtllm_service_pb2.GetModelInfoRequest())
        server = await self._stub.GetServerInfo(trtllm_service_pb2.GetServerInfoRequest())
        return Greeting(server.version, info.max_batch_size, info.max_seq_len, info.vocab_size)

    def capabilities(self) -> types_pb2.Capabilities:
        """What the protocol can say: servers do not tell what they can do."""
        return types_pb2.Capabilities(
            guided=["json_schema", "json_object", "regex", "grammar", "choice"], logprobs=True
        )

    def kv_state_tag(self) -> str:
        """KV does not travel."""
        return ""

    def refuse(self, request: Request) -> types_pb2.Error | None:
        """Nothing of its own."""
        return None

    async def kv(self, timeout_s: float) -> KvState | None:
        """Not told."""
        return None

    def read(self, run: Run, heard: Heard, message: trtllm_service_pb2.GenerateResponse) -> News:
        """See ``Dialect.read``."""
        if message.HasField("chunk"):
            chunk = message.chunk
            return News(list(chunk.token_ids), _logprobs(run, chunk.logprobs), chunk.cached_tokens)
        complete = message.complete
        ids = list(complete.output_token_ids[heard.count :])
        if not ids and complete.HasField("matched_token_id") and not heard.count:
            ids = [complete.matched_token_id]
        end = _ENDS.get(complete.finish_reason)
        news = failed(complete.finish_reason) if end is None else News(end=end)
        news.ids, news.logprobs = ids, _logprobs(run, complete.logprobs[heard.count :])
        news.cached_tokens = complete.cached_tokens
        return news

    def generate(self, run: Run, request_id: str) -> Any:
        """See ``Dialect.generate``."""
        request = run.request
        sampling, stopping, logprobs = request.sampling, request.stopping, request.logprobs
        ends = [*([] if stopping.ignore_eos else sorted(stopping.eos_ids)), *sorted(stopping.stop_ids)]
        message = trtllm_service_pb2.GenerateRequest(
            request_id=request_id,
            tokenized=trtllm_service_pb2.TokenizedInput(input_token_ids=run.prompt_ids),
            sampling_config=trtllm_service_pb2.SamplingConfig(
                beam_width=1,
                num_return_sequences=1,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=run.seed,
            ),
            max_tokens=run.max_tokens,
            streaming=True,
            stop_token_ids=ends,
            ignore_eos=stopping.ignore_eos,
            include_stop_token_in_output=True,
        )
        config = message.sampling_config
        if sampling.temperature == 0:
            config.top_k = 1
        elif sampling.top_k:
            config.top_k = sampling.top_k
        if sampling.min_p:
            config.min_p = sampling.min_p
        if run.min_tokens:
            config.min_tokens = run.min_tokens
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            config.repetition_penalty, config.presence_penalty, config.frequency_penalty = penalties
            config.prompt_ignore_length = run.own_prompt_tokens
        if logprobs.enabled:
            message.output_config.logprobs = max(1, logprobs.top)
        if sampling.logit_bias:
            bias = [0.0] * self._folder.vocab_size
            for token, value in sampling.logit_bias.items():
                bias[token] = value
            message.embedding_bias.extend(bias)
        if request.guided is not None:
            _guide(message.guided_decoding, request.guided)
        salt = request.cache_salt if request.reuse_prefix else request_id.encode()
        if salt:
            digest = hashlib.blake2b(salt, digest_size=8).digest()
            message.cache_salt_id = int.from_bytes(digest, "little", signed=True)
        return self._stub.Generate(message)


def _logprobs(run: Run, rows: Any) -> list[TokenLogprobs] | None:
    options = run.request.logprobs
    if not options.enabled:
        return None
    return [
        TokenLogprobs(
            (row.token_id, row.logprob), [(each.token_id, each.logprob) for each in row.top_logprobs[: options.top]]
        )
        for row in rows
    ]


def _guide(message: trtllm_service_pb2.GuidedDecodingParams, guided: Guided) -> None:
    kind, message.guide = guided.kind, guided.text
    if kind == "choice":
        kind, message.guide = "regex", guided.as_regex()
    message.guide_type = {
        "json_object": _GUIDES.GUIDE_TYPE_JSON,
        "json_schema": _GUIDES.GUIDE_TYPE_JSON_SCHEMA,
        "regex": _GUIDES.GUIDE_TYPE_REGEX,
        "grammar": _GUIDES.GUIDE_TYPE_EBNF_GRAMMAR,
    }[kind]
    if kind == "json_object":
        # An empty guide is taken for none.
        message.guide = json.dumps({"type": "object"})
