"""An engine that runs elsewhere and speaks ``trtllm.TrtllmService``: ``trtllm-serve --grpc``, or another worker.

For engines that somebody else starts and keeps. It batches there, so this is a ``Driver`` (``selfbatched.py``): one
call for each choice, whose chunks of the same turn of the loop leave in one frame. What this protocol cannot say
exactly is refused. It carries no statistics, and no KV events that name adapters and salts, so none are told; with the
engine in process (``tensorrt_llm.py``) they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from typing import Any

import grpc
from smg_grpc_proto import trtllm_service_pb2, trtllm_service_pb2_grpc

from headrace.config import WorkerConfig
from headrace.errors import EngineError, error
from headrace.models import ModelFolder
from headrace.serving import channel
from headrace.tls import Tls
from headrace.v1 import types_pb2
from headrace.worker.engine import Guided, Request, TokenLogprobs
from headrace.worker.selfbatched import Inbox, KvState, Room, Run
from headrace.worker.validate import malformed

log = logging.getLogger(__name__)

_HEALTH_EVERY_S, _HEALTH_TIMEOUT_S = 0.5, 5.0
_ENDS = {
    "stop": types_pb2.OUTCOME_STOP,
    "stop_word": types_pb2.OUTCOME_STOP,
    "length": types_pb2.OUTCOME_LENGTH,
    "timeout": types_pb2.OUTCOME_DEADLINE,
    "cancelled": types_pb2.OUTCOME_CANCELLED,
}
_GUIDES = trtllm_service_pb2.GuidedDecodingParams


class TrtllmGrpc:
    """See the module's text."""

    def __init__(self, folder: ModelFolder, worker: WorkerConfig, tls: Tls | None = None) -> None:
        self._folder = folder
        self._worker = worker
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._inbox: Inbox | None = None
        self._calls: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._version = ""
        self._iteration = 0
        self._stepping = False

    async def open(self, inbox: Inbox) -> Room:
        """Waits until the server is healthy."""
        self._inbox = inbox
        self._channel = channel(self._worker.engine_address, self._tls)
        self._stub = trtllm_service_pb2_grpc.TrtllmServiceStub(self._channel)
        try:
            async with asyncio.timeout(self._worker.engine_start_timeout_s):
                while (why := await self._sick()) is not None:
                    log.info("the engine at %s is not ready: %s", self._worker.engine_address, why)
                    await asyncio.sleep(_HEALTH_EVERY_S)
                info = await self._stub.GetModelInfo(trtllm_service_pb2.GetModelInfoRequest())
                server = await self._stub.GetServerInfo(trtllm_service_pb2.GetServerInfoRequest())
        except (TimeoutError, grpc.aio.AioRpcError) as failure:
            text = failure.details() if isinstance(failure, grpc.aio.AioRpcError) else "it is not ready in time"
            raise EngineError(f"the engine at {self._worker.engine_address}: {text}") from failure
        if info.vocab_size and info.vocab_size > self._folder.vocab_size:
            raise EngineError(
                f"the engine at {self._worker.engine_address} has a vocabulary of {info.vocab_size} ids, "
                f"the model's folder says {self._folder.vocab_size}"
            )
        self._version = server.version
        context = self._worker.context_tokens or self._folder.context_tokens
        self._watch = asyncio.create_task(self._look(), name="engine health")
        return Room(
            slots=min(self._worker.slots, info.max_batch_size or self._worker.slots),
            context_tokens=min(context, info.max_seq_len or context),
            block_tokens=self._worker.block_tokens,
            kv_blocks=self._worker.kv_tokens // self._worker.block_tokens,
        )

    async def close(self) -> None:
        """Ends the calls; the engine is somebody else's."""
        if self._watch is not None:
            self._watch.cancel()
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)

    def kill(self) -> None:
        """No more of its calls."""
        for task in self._tasks:
            task.cancel()

    def describe(self) -> types_pb2.ModelDescription:
        """Of the folder."""
        folder = self._folder
        return types_pb2.ModelDescription(
            engine="trtllm_grpc",
            engine_version=self._version,
            quantization=folder.quantization,
            tokenizer_sha256=folder.tokenizer_sha256,
            template_sha256=folder.template_sha256,
            vocab_size=folder.vocab_size,
            eos_ids=folder.eos_ids,
            capabilities=types_pb2.Capabilities(
                guided=["json_schema", "json_object", "regex", "grammar"], logprobs=True
            ),
        )

    async def check(self, request: Request) -> types_pb2.Error | None:
        """The form of its guide; the engine says the rest."""
        return malformed(request.guided) if request.guided is not None else None

    def refuse(self, request: Request) -> types_pb2.Error | None:
        """``min_tokens`` holds back one end id there."""
        stopping = request.stopping
        if stopping.min_tokens and (stopping.stop_ids or len(stopping.eos_ids) > 1):
            text = "this engine's min_tokens holds back one end-of-sequence id, and this request has more ends"
            return error(types_pb2.ERROR_CODE_UNSUPPORTED, text, param="min_tokens")
        return None

    def begin(self, run: Run) -> None:
        """See ``Driver.begin``."""
        call = self._calls[run.id] = self._stub.Generate(self._request_of(run))
        task = asyncio.create_task(self._run(run, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort(self, run: Run) -> None:
        """See ``Driver.abort``. A call that ends is an abort there."""
        call = self._calls.get(run.id)
        if call is not None:
            call.cancel()

    def kv(self) -> KvState:
        """Not told."""
        return KvState()

    # --- calls ------------------------------------------------------------------------------------------------------

    async def _run(self, run: Run, call: Any) -> None:
        sent = 0
        try:
            async for response in call:
                if response.HasField("chunk"):
                    chunk = response.chunk
                    self._tell(run, list(chunk.token_ids), chunk.logprobs, chunk.cached_tokens)
                    sent += len(chunk.token_ids)
                else:
                    self._on_complete(run, response.complete, sent)
                    return
            self._end(run, types_pb2.OUTCOME_FAILED, "the stream ended without an end")
        except asyncio.CancelledError:
            # The call's own cancellation looks the same as this task's; after the latter nobody listens any more.
            self._end(run, types_pb2.OUTCOME_CANCELLED)
        except grpc.aio.AioRpcError as failure:
            refused = failure.code() == grpc.StatusCode.INVALID_ARGUMENT and not sent
            if failure.code() == grpc.StatusCode.CANCELLED:
                self._end(run, types_pb2.OUTCOME_CANCELLED)
            else:
                outcome = types_pb2.OUTCOME_REJECTED if refused else types_pb2.OUTCOME_FAILED
                self._end(run, outcome, failure.details() or failure.code().name)
        finally:
            self._calls.pop(run.id, None)

    def _on_complete(self, run: Run, complete: trtllm_service_pb2.GenerateComplete, sent: int) -> None:
        ids = list(complete.output_token_ids[sent:])
        if not ids and complete.HasField("matched_token_id") and not sent:
            ids = [complete.matched_token_id]
        if ids:
            self._tell(run, ids, complete.logprobs[sent:], complete.cached_tokens)
        self._end(run, _ENDS.get(complete.finish_reason, types_pb2.OUTCOME_FAILED), complete.finish_reason)

    def _tell(self, run: Run, ids: list[int], rows: Any, cached_tokens: int) -> None:
        assert self._inbox is not None
        options = run.request.logprobs
        logprobs = None
        if options.enabled:
            logprobs = [
                TokenLogprobs(
                    (row.token_id, row.logprob),
                    [(each.token_id, each.logprob) for each in row.top_logprobs[: options.top]],
                )
                for row in rows
            ]
        self._inbox.tokens(run, ids, logprobs, cached_tokens)
        self._step_soon()

    def _end(self, run: Run, outcome: types_pb2.Outcome, why: str = "") -> None:
        assert self._inbox is not None
        failure = None
        if outcome == types_pb2.OUTCOME_FAILED:
            failure = error(types_pb2.ERROR_CODE_INTERNAL, f"the engine failed: {why}", retryable=True)
        elif outcome == types_pb2.OUTCOME_REJECTED:
            failure = error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, f"the engine refused it: {why}")
        self._inbox.ended(run, outcome, failure)
        self._step_soon()

    def _step_soon(self) -> None:
        """All that came in this turn of the loop goes out together."""
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        assert self._inbox is not None
        self._stepping = False
        self._iteration += 1
        self._inbox.stepped(self._iteration)

    def _request_of(self, run: Run) -> trtllm_service_pb2.GenerateRequest:
        request = run.request
        sampling, stopping, logprobs = request.sampling, request.stopping, request.logprobs
        ends = [*([] if stopping.ignore_eos else sorted(stopping.eos_ids)), *sorted(stopping.stop_ids)]
        message = trtllm_service_pb2.GenerateRequest(
            request_id=str(run.id),
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
        salt = request.cache_salt if request.reuse_prefix else b"alone %d" % run.id
        if salt:
            digest = hashlib.blake2b(salt, digest_size=8).digest()
            message.cache_salt_id = int.from_bytes(digest, "little", signed=True)
        return message

    # --- health -----------------------------------------------------------------------------------------------------

    async def _sick(self) -> str | None:
        """Why the server does not serve."""
        try:
            answer = await self._stub.HealthCheck(
                trtllm_service_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S, wait_for_ready=False
            )
        except grpc.aio.AioRpcError as failure:
            return f"{failure.code().name}: {failure.details()}"
        return None if answer.status == "OK" else str(answer.status)

    async def _look(self) -> None:
        assert self._inbox is not None
        while True:
            await asyncio.sleep(_HEALTH_EVERY_S)
            if (why := await self._sick()) is not None:
                self._inbox.failed(f"the engine at {self._worker.engine_address} is gone: {why}")
                return


def _guide(message: trtllm_service_pb2.GuidedDecodingParams, guided: Guided) -> None:
    message.guide = guided.text
    message.guide_type = {
        "json_object": _GUIDES.GUIDE_TYPE_JSON,
        "json_schema": _GUIDES.GUIDE_TYPE_JSON_SCHEMA,
        "regex": _GUIDES.GUIDE_TYPE_REGEX,
        "grammar": _GUIDES.GUIDE_TYPE_EBNF_GRAMMAR,
    }[guided.kind]
    if guided.kind == "json_object":
        # An empty guide is taken for none.
        message.guide = json.dumps({"type": "object"})
