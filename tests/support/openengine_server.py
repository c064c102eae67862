"""What TensorRT-LLM's OpenEngine server does, before the stand-in for TensorRT-LLM; a process of its own.

``python -m tests.support.openengine_server SETUP``: a JSON object with ``arguments`` of ``LLM`` and ``end_id``. It says
its port on standard output. Written after the server's sources (``tensorrt_llm/grpc/openengine``, the 1.4
line): what it takes, what it answers UNIMPLEMENTED, when it holds ids back, how a hand-off looks, what is a status and
what comes within the stream. Its text side is left out, since the stand-in has no tokenizer.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from headrace.openengine.v1 import openengine_pb2 as pb
from headrace.openengine.v1 import openengine_pb2_grpc

MODEL = "toy-on-openengine"
_MOST_CONDITIONS, _MOST_LOGPROBS = 64, 20
_FLOOR = -9999.0
_GUIDES = {
    "xgrammar": ("json_schema", "regex", "ebnf_grammar", "structural_tag", "json_object"),
    "llguidance": ("json_schema", "regex", "ebnf_grammar", "json_object"),
}
_MODES = {
    "json_schema": pb.GUIDED_DECODING_MODE_JSON_SCHEMA,
    "regex": pb.GUIDED_DECODING_MODE_REGEX,
    "ebnf_grammar": pb.GUIDED_DECODING_MODE_EBNF_GRAMMAR,
    "structural_tag": pb.GUIDED_DECODING_MODE_STRUCTURAL_TAG,
    "json_object": pb.GUIDED_DECODING_MODE_JSON_OBJECT,
}
_PARAMS = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar", "structural_tag": "structural_tag"}
_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "timeout": pb.FINISH_REASON_CANCELLED,
}


class _Unsupported(ValueError):
    """Has no counterpart in TensorRT-LLM."""


class Server:
    """Both services."""

    def __init__(self, llm: Any, end_id: int) -> None:
        from tensorrt_llm import __version__

        self._llm = llm
        self._end_id = end_id
        self._version = __version__
        args = llm.args
        self._transport = args.cache_transceiver_config.backend if args.cache_transceiver_config else ""
        self._guides: Sequence[str] = _GUIDES.get(args.guided_decoding_backend or "", ())
        self._running: dict[str, Any] = {}

    # --- Inference --------------------------------------------------------------------------------------------------

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        try:
            if not request.request_id:
                raise ValueError("request_id must be non-empty")
            if not request.model:
                raise ValueError("model must be non-empty")
            if request.request_id in self._running:
                await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{request.request_id} is already active")
            params, disaggregated = self._params(request, context), self._disaggregated(request)
            salt = request.kv.cache_salt if request.kv.HasField("cache_salt") else None
            if request.WhichOneof("input") != "token_ids":
                raise ValueError("exactly one of prompt or token_ids must be set")
            result = self._llm.generate_async(
                {"prompt_token_ids": list(request.token_ids.ids)},
                sampling_params=params,
                streaming=True,
                cache_salt=salt,
                disaggregated_params=disaggregated,
            )
        except _Unsupported as failure:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(failure))
        except ValueError as failure:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(failure))
        except RuntimeError as failure:
            await context.abort(grpc.StatusCode.INTERNAL, str(failure))
        over = False
        context.add_done_callback(lambda _: None if over else result.abort())
        self._running[request.request_id] = result
        told: dict[int, int] = {}
        ended: set[int] = set()
        handed = False
        apart = disaggregated is not None and disaggregated.request_type == "context_only"
        hold = 0 if params.include_stop_str_in_output or not params.stop_token_ids else 1
        try:
            async for step in result:
                for output in step.outputs:
                    until = len(output.token_ids) - (0 if output.finish_reason else hold)
                    since = min(told.get(output.index, 0), len(output.token_ids))
                    if ids := output.token_ids[since : max(since, until)]:
                        rows = output.logprobs[since : since + len(ids)] if output.logprobs else []
                        tokens = [
                            _info(token, rows[at] if at < len(rows) else None, params.logprobs or 0)
                            for at, token in enumerate(ids)
                        ]
                        yield pb.GenerateResponse(
                            request_id=request.request_id,
                            token=pb.TokenOutput(output_index=output.index, tokens=tokens),
                        )
                        told[output.index] = since + len(ids)
                    found = output.disaggregated_params
                    if apart and not handed and found is not None and found.ctx_request_id is not None:
                        handed = True
                        session = self._session(found)
                        ready = pb.PrefillReady(kv_session=session)
                        yield pb.GenerateResponse(
                            request_id=request.request_id, prefill_ready=ready, usage=_usage(step)
                        )
                    if output.finish_reason in _REASONS and output.index not in ended and not handed:
                        ended.add(output.index)
                        last = len(ended) == params.n
                        yield pb.GenerateResponse(
                            request_id=request.request_id,
                            finished=self._finished(output),
                            usage=_usage(step) if last else None,
                        )
                over = step.finished
            if not (over or handed):
                yield _error(request.request_id, "generation stream ended before all outputs finished")
        except Exception as failure:
            over = True
            yield _error(request.request_id, str(failure))
        finally:
            self._running.pop(request.request_id, None)

    def _params(self, request: pb.GenerateRequest, context: Any) -> Any:
        from tensorrt_llm import GuidedDecodingParams, SamplingParams

        for key, _ in context.invocation_metadata():
            if key in ("openengine-priority", "openengine-target-dp-rank"):
                raise _Unsupported(f"gRPC metadata key '{key}' is not supported")
        for wrong, text in (
            (request.media, "multimodal media"),
            (request.lora_name, "LoRA selection"),
            (request.kv.bypass_prefix_cache, "prefix cache bypass"),
            (request.guided.backend, "per-request guided decoding backend selection"),
            (request.response.prompt_logprob_start, "response.prompt_logprob_start"),
        ):
            if wrong:
                raise _Unsupported(f"{text} is not supported")
        options = {field.name: value for field, value in request.sampling.ListFields()}
        n = options.pop("num_sequences", 1)
        if n == 0:
            raise ValueError("sampling.num_sequences must be greater than zero")
        stopping = request.stopping
        for name in ("max_tokens", "min_tokens", "ignore_eos"):
            if stopping.HasField(name):
                options[name] = getattr(stopping, name)
        if len(stopping.conditions) > _MOST_CONDITIONS:
            raise ValueError(f"at most {_MOST_CONDITIONS} conditions are supported, got {len(stopping.conditions)}")
        if any(each.WhichOneof("condition") is None for each in stopping.conditions):
            raise ValueError("each stopping condition must set exactly one condition")
        stops = [each.stop_token_id for each in stopping.conditions if each.WhichOneof("condition") == "stop_token_id"]
        options["stop_token_ids"] = stops or None
        options["include_stop_str_in_output"] = stopping.include_stop_in_output
        if request.response.return_output_logprobs:
            kind = request.response.output_candidates.WhichOneof("selection")
            if kind not in (None, "top_n"):
                raise _Unsupported(f"output candidate selection '{kind}' is not supported; use top_n")
            options["logprobs"] = request.response.output_candidates.top_n
            if options["logprobs"] > _MOST_LOGPROBS:
                raise ValueError(f"logprobs must be at most {_MOST_LOGPROBS}")
        if (guide := request.guided.WhichOneof("guide")) is not None:
            if guide not in self._guides:
                raise _Unsupported(f"guided decoding mode '{guide}' is not supported")
            text = {"json_object": True} if guide == "json_object" else {_PARAMS[guide]: getattr(request.guided, guide)}
            options["guided_decoding"] = GuidedDecodingParams(**text)
        defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": None}
        return SamplingParams(**(defaults | {"end_id": self._end_id, "n": n, "detokenize": False} | options))

    def _disaggregated(self, request: pb.GenerateRequest) -> Any:
        from tensorrt_llm import DisaggregatedParams

        if request.kv.HasField("session"):
            session = request.kv.session
            attributes = MessageToDict(session.attributes_struct)
            if not session.endpoints and not attributes.get("opaque_state"):
                raise ValueError("kv.session carries neither a ctx_info_endpoint nor an opaque_state")
            if not session.session_id:
                raise ValueError("kv.session carries neither a session_id nor a disagg_request_id")
            return DisaggregatedParams(
                request_type="generation_only",
                ctx_request_id=int(session.session_id),
                opaque_state=base64.b64decode(attributes["opaque_state"], validate=True),
                first_gen_tokens=[int(token) for token in attributes.get("first_gen_tokens", ())] or None,
            )
        kind = MessageToDict(request.extra).get("request_type")
        if kind is None:
            return None
        if kind not in ("context_only", "context_and_generation"):
            raise ValueError("a generation_only request must carry its context handoff in kv.session")
        return DisaggregatedParams(request_type=kind)

    def _session(self, found: Any) -> pb.KvSessionRef:
        session = pb.KvSessionRef(session_id=str(found.ctx_request_id), transfer_backend=self._transport)
        session.attributes_struct.update(
            {
                "opaque_state": base64.b64encode(found.opaque_state).decode(),
                "first_gen_tokens": list(found.first_gen_tokens),
            }
        )
        return session

    def _finished(self, output: Any) -> pb.GenerationFinished:
        finished = pb.GenerationFinished(output_index=output.index, reason=_REASONS[output.finish_reason])
        if output.finish_reason == "stop":
            if output.stop_reason is not None:
                finished.stop_match.stop_token_id = output.stop_reason
            else:
                finished.stop_match.eos_token_id = self._end_id
        return finished

    # --- Control ----------------------------------------------------------------------------------------------------

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        args = self._llm.args
        info = pb.ServerInfo(
            engine_name="tensorrt_llm",
            engine_version=self._version,
            instance_id=self._llm.llm_id,
            supported_models=[MODEL],
            schema_revision=1,
            minimum_client_revision=1,
            parallelism=pb.ParallelismInfo(tensor_parallel_size=args.tensor_parallel_size),
            capacity=pb.DeploymentCapacity(
                max_running_requests=args.max_batch_size,
                max_batched_tokens=args.max_num_tokens,
                kv_block_size=args.kv_cache_config.tokens_per_block,
                total_kv_blocks=self._llm._engine.capacity()["maxNumBlocks"],
            ),
        )
        if self._transport:
            info.kv_connector.CopyFrom(
                pb.KvConnectorInfo(
                    enabled=True,
                    transfer_backend=self._transport,
                    supports_remote_prefill=True,
                    supports_decode_pull=False,
                    supports_abort_cleanup=False,
                    schema_version=1,
                )
            )
        return info

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.ModelInfo:
        logprobs = pb.LogprobCapabilities(
            supported=True,
            candidate_selection_modes=[pb.CANDIDATE_TOKEN_SELECTION_MODE_TOP_N],
            max_top_n=_MOST_LOGPROBS,
        )
        return pb.ModelInfo(
            model_id=MODEL,
            served_model_name=MODEL,
            max_context_length=self._llm.args.max_seq_len,
            supports_text_input=False,
            supports_token_ids_input=True,
            supports_lora=False,
            supports_multimodal=False,
            generation=pb.GenerationCapabilities(
                output_logprobs=logprobs,
                prompt_logprobs=logprobs,
                guided_decoding=pb.GuidedDecodingCapabilities(
                    supported=bool(self._guides), modes=[_MODES[guide] for guide in self._guides]
                ),
                supports_priority=False,
                supports_stop_in_output=True,
                supports_cache_salt=True,
                supports_prefix_cache_bypass=False,
            ),
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.LoadInfo:
        engine = self._llm._engine
        return pb.LoadInfo(
            running_requests=len(self._running),
            used_kv_blocks=engine._blocks_used,
            total_kv_blocks=engine.capacity()["maxNumBlocks"],
        )

    async def Health(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        well = self._llm._engine._fatal is None
        state = pb.HEALTH_STATE_READY if well else pb.HEALTH_STATE_NOT_READY
        check = pb.HealthCheck(name="model", state=state, message=MODEL if well else "engine health check failed")
        return pb.HealthResponse(state=state, checks=[check])

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        if request.WhichOneof("target") == "kv_session":
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "aborting by kv_session is not supported")
        result = self._running.get(request.request_id)
        if result is None:
            return pb.AbortResponse(status=pb.ABORT_STATUS_ALREADY_FINISHED)
        result.abort()
        return pb.AbortResponse(status=pb.ABORT_STATUS_ABORTED)


def _info(token: int, row: Any, top: int) -> pb.TokenInfo:
    if row is None:
        return pb.TokenInfo(token_id=token)
    drawn = row[token]
    ranked = sorted(((i, each) for i, each in row.items() if each.rank <= top), key=lambda pair: pair[1].rank)
    return pb.TokenInfo(
        token_id=token,
        logprob=max(_FLOOR, drawn.logprob),
        rank=drawn.rank,
        candidates=[pb.LogProb(token_id=i, logprob=max(_FLOOR, each.logprob), rank=each.rank) for i, each in ranked],
    )


def _usage(result: Any) -> pb.Usage:
    prompt, completion = len(result.prompt_token_ids), sum(len(output.token_ids) for output in result.outputs)
    return pb.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        cached_prompt_tokens=result.cached_tokens,
    )


def _error(request_id: str, text: str) -> pb.GenerateResponse:
    return pb.GenerateResponse(request_id=request_id, error=pb.EngineError(code=pb.ERROR_CODE_INTERNAL, message=text))


async def _serve(setup: dict[str, Any]) -> None:
    from tensorrt_llm import LLM, llmapi

    arguments = setup["arguments"]
    if (kv := arguments.get("kv_cache_config")) is not None:
        arguments["kv_cache_config"] = llmapi.KvCacheConfig(**kv)
    if (transport := arguments.get("cache_transceiver_config")) is not None:
        arguments["cache_transceiver_config"] = llmapi.CacheTransceiverConfig(**transport)
    service = Server(LLM("/nowhere", **arguments), setup["end_id"])
    server = grpc.aio.server()
    openengine_pb2_grpc.add_InferenceServicer_to_server(service, server)
    openengine_pb2_grpc.add_ControlServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    # Until whoever started it has gone.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


@asynccontextmanager
async def running(arguments: dict[str, Any], end_id: int, **play: Any) -> AsyncIterator[tuple[int, str]]:
    """Such a server in a process: its pid and address. ``play``: of the stand-in."""
    from tests.support import standin

    root = Path(__file__).parents[2]
    environment = standin.environment(**play)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(root), *filter(None, sys.path)])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.openengine_server",
        json.dumps({"arguments": arguments, "end_id": end_id}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | environment,
    )
    try:
        assert process.stdout is not None
        port = (await asyncio.wait_for(process.stdout.readline(), 60.0)).decode().strip()
        assert port, "the server did not start"
        yield process.pid, f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.argv[1])))
