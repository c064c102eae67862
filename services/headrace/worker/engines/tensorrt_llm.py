"""The TensorRT-LLM engine: the production engine on NVIDIA GPUs, in a process of its own.

TensorRT-LLM batches by itself, so this is a ``Driver`` (``selfbatched.py``). The engine lives in a child process
(``tensorrt_llm_child.py``), because it can hang in ways that no call of its API returns from, and because a part of it
that died would not be noticed within: here, the child's end of the link closes with it, and what does not shut down is
killed with its whole process group. Commands of one turn of the loop leave in one frame; each iteration's results come
in one.

What TensorRT-LLM does otherwise than this mesh, and what is made of it: one seed for all choices of a request, so each
choice is a request of its own; one end-of-sequence id, so the others are stop ids; a ``min_tokens`` that holds only
that one back, so a logits processor holds back the rest; an end by length before an end by stop id, which is put
right by the ids; no change of the step's size while it runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

from headrace.config import ModelConfig, TensorRtLlmConfig, WorkerConfig
from headrace.errors import ConfigError, EngineError, ModelError, error
from headrace.models import ModelFolder
from headrace.v1 import types_pb2
from headrace.worker.engine import Guided, Request, StepCost, TokenLogprobs
from headrace.worker.frames import Frames
from headrace.worker.sampling import LOGPROB_FLOOR
from headrace.worker.selfbatched import Inbox, KvState, Room, Run
from headrace.worker.validate import malformed

log = logging.getLogger(__name__)

_CHILD = "headrace.worker.engines.tensorrt_llm_child"
#: For a child that was killed to be gone, and to say how.
_REAP_S = 1.0
_ENDS = {
    "stop": types_pb2.OUTCOME_STOP,
    "length": types_pb2.OUTCOME_LENGTH,
    "timeout": types_pb2.OUTCOME_DEADLINE,
    "cancelled": types_pb2.OUTCOME_CANCELLED,
    "failed": types_pb2.OUTCOME_FAILED,
    "rejected": types_pb2.OUTCOME_REJECTED,
}
_PRIORITY = {types_pb2.REQUEST_CLASS_INTERACTIVE: 0.75, types_pb2.REQUEST_CLASS_BATCH: 0.25}


class TensorRtLlm:
    """See the module's text."""

    def __init__(
        self,
        folder: ModelFolder,
        worker: WorkerConfig,
        model: ModelConfig,
        settings: TensorRtLlmConfig,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``environment``: of the child, beside this process's own."""
        self._environment = environment or {}
        self._folder = folder
        self._worker = worker
        self._model = model
        self._settings = settings
        self._loras = adapters(settings.lora_adapters)
        self._child: asyncio.subprocess.Process | None = None
        self._link: Frames | None = None
        self._inbox: Inbox | None = None
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._facts: dict[str, Any] = {}
        self._runs: dict[int, Run] = {}
        self._commands: list[tuple[str, Any]] = []
        self._kv = KvState()
        self._closing = False
        self._watch: asyncio.Task[None] | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self, inbox: Inbox) -> Room:
        """Starts the child and waits until it has warmed up."""
        self._inbox = inbox
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", _CHILD, str(theirs.fileno()), str(os.getpid())]
            paths = (self._environment.get("PYTHONPATH", ""), *sys.path)
            environment = os.environ | self._environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            # Its output is for the log: this process's own tells who started it that it is ready. A group of its own,
            # because ranks that it starts must go with it.
            self._child = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                env=environment,
                start_new_session=True,
            )
        ours.setblocking(False)
        link = self._link = Frames(self._on_frame, self._on_lost)
        await loop.create_connection(lambda: link, sock=ours)
        self._watch = asyncio.create_task(self._on_exit(self._child))
        link.send(self._spec())
        limit_s = self._settings.start_timeout_s
        try:
            self._facts = await asyncio.wait_for(asyncio.shield(self._ready), limit_s)
        except TimeoutError as failure:
            text = f"TensorRT-LLM was not ready within {limit_s:g} s (tensorrt_llm.start_timeout_s)"
            raise EngineError(text) from failure
        return Room(
            slots=self._worker.slots,
            context_tokens=self._context_tokens,
            block_tokens=self._worker.block_tokens,
            kv_blocks=self._facts["kv_blocks"],
        )

    async def close(self) -> None:
        """Asks the child to shut down, and kills it when it does not."""
        self._closing = True
        child, self._child = self._child, None
        if self._watch is not None:
            self._watch.cancel()
        if child is None:
            return
        limit_s = self._settings.shutdown_timeout_s
        if self._facts and child.returncode is None and self._link is not None:
            self._link.send([("stop", None)])
            try:
                # A little more: the child looks at the same limit, and may say something.
                await asyncio.wait_for(child.wait(), limit_s + _REAP_S)
            except TimeoutError:
                log.warning("TensorRT-LLM did not shut down within %g s: it is killed", limit_s)
        _kill_group(child)
        await child.wait()
        if self._link is not None:
            self._link.close()

    def kill(self) -> None:
        """At once."""
        if self._child is not None:
            _kill_group(self._child)

    def _spec(self) -> dict[str, Any]:
        return {
            "arguments": self._arguments(),
            "options_file": self._settings.extra_llm_api_options,
            "lora": self._loras,
            "model": self._model.name,
            "block_tokens": self._worker.block_tokens,
            "events": self._worker.prefix_cache,
            "vocab_size": self._folder.vocab_size,
            "context_tokens": self._context_tokens,
            "warm_up_tokens": self._settings.max_num_tokens,
            "shutdown_timeout_s": self._settings.shutdown_timeout_s,
        }

    @property
    def _context_tokens(self) -> int:
        return min(self._worker.context_tokens or self._folder.context_tokens, self._folder.context_tokens)

    def _arguments(self) -> dict[str, Any]:
        """Of ``LLM``; 0 and the empty text are settings' way to say None."""
        settings, worker = self._settings, self._worker
        direct = (
            "backend",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "context_parallel_size",
            "moe_tensor_parallel_size",
            "moe_expert_parallel_size",
            "gpus_per_node",
            "enable_attention_dp",
            "dtype",
            "load_format",
            "trust_remote_code",
            "max_num_tokens",
            "enable_chunked_prefill",
            "disable_overlap_scheduler",
            "attn_backend",
            "allreduce_strategy",
            "sampler_type",
            "guided_decoding_backend",
            "stream_interval",
            "orchestrator_type",
        )
        arguments = {name: value for name in direct if (value := getattr(settings, name)) not in (0, "")}
        arguments |= {
            "model": settings.model or self._model.source,
            # Text is the router's; but a grammar needs the vocabulary.
            "skip_tokenizer_init": not settings.guided_decoding_backend,
            "max_batch_size": worker.slots,
            "max_seq_len": self._context_tokens,
            "enable_iter_perf_stats": True,
            "kv_cache_config": {
                "enable_block_reuse": worker.prefix_cache,
                "tokens_per_block": worker.block_tokens,
                "free_gpu_memory_fraction": settings.kv_cache_free_gpu_memory_fraction,
                "max_tokens": settings.kv_cache_max_tokens or None,
                "dtype": settings.kv_cache_dtype,
                "host_cache_size": settings.kv_cache_host_cache_size or None,
                "event_buffer_max_size": settings.kv_cache_event_buffer_max_size if worker.prefix_cache else 0,
            },
            "scheduler_config": {
                "capacity_scheduler_policy": settings.capacity_scheduler_policy,
                "context_chunking_policy": settings.context_chunking_policy or None,
            },
            "cuda_graph_config": {
                "max_batch_size": settings.cuda_graph_max_batch_size,
                "enable_padding": settings.cuda_graph_enable_padding,
            },
        }
        if settings.cache_transceiver_backend:
            arguments |= {
                # The one that leaves KV must not prepare steps ahead.
                "disable_overlap_scheduler": True,
                "cache_transceiver_config": {
                    "backend": settings.cache_transceiver_backend,
                    "max_tokens_in_buffer": self._context_tokens,
                    "kv_transfer_timeout_ms": settings.kv_transfer_timeout_ms,
                },
            }
        if self._loras:
            lora = {"max_lora_rank": settings.max_lora_rank}
            lora |= {"max_loras": settings.max_loras} if settings.max_loras else {}
            arguments |= {"enable_lora": True, "lora_config": lora}
        if settings.moe_backend:
            arguments["moe_config"] = {"backend": settings.moe_backend}
        if settings.enable_attention_dp and settings.attention_dp_balance:
            arguments["attention_dp_config"] = {"enable_balance": True}
        if settings.speculative_decoding_type:
            speculative = {"decoding_type": settings.speculative_decoding_type, "max_draft_len": settings.max_draft_len}
            if settings.speculative_model:
                speculative["speculative_model"] = settings.speculative_model
            arguments["speculative_config"] = speculative
        return arguments

    # --- what it does -----------------------------------------------------------------------------------------------

    def describe(self) -> types_pb2.ModelDescription:
        """Of the folder, and of the installed release."""
        folder, settings = self._folder, self._settings
        return types_pb2.ModelDescription(
            engine="tensorrt_llm",
            engine_version=self._facts["version"],
            quantization=folder.quantization,
            tokenizer_sha256=folder.tokenizer_sha256,
            template_sha256=folder.template_sha256,
            vocab_size=folder.vocab_size,
            eos_ids=folder.eos_ids,
            capabilities=types_pb2.Capabilities(
                guided=_GUIDED.get(settings.guided_decoding_backend, ()),
                logprobs=True,
                lora=sorted(self._loras),
                kv_handoff=bool(settings.cache_transceiver_backend),
            ),
            kv_state_tag=self._kv_state_tag,
        )

    @property
    def _kv_state_tag(self) -> str:
        """KV goes only to an engine of the same release, model and layout."""
        settings = self._settings
        if not settings.cache_transceiver_backend:
            return ""
        model = hashlib.sha256((settings.model or self._model.source).encode()).hexdigest()[:16]
        release, blocks = self._facts["version"], self._worker.block_tokens
        return f"tensorrt_llm-{release}-{model}-{settings.dtype}-{settings.kv_cache_dtype}-{blocks}"

    async def check(self, request: Request) -> types_pb2.Error | None:
        """The form of its guide; what the engine's compiler finds comes as the request's failure."""
        return malformed(request.guided) if request.guided is not None else None

    def refuse(self, request: Request) -> types_pb2.Error | None:
        """What this installation would do otherwise than asked, without a word."""
        if _penalties(request) is not None and not self._facts["penalties"]:
            release = f"TensorRT-LLM {self._facts['version']}"
            text = f"{release} does penalties only with tensorrt_llm.sampler_type TRTLLMSampler"
            return error(types_pb2.ERROR_CODE_UNSUPPORTED, text, param="repetition_penalty")
        return None

    def begin(self, run: Run) -> None:
        """See ``Driver.begin``."""
        self._runs[run.id] = run
        self._command("begin", self._wire(run))

    def abort(self, run: Run) -> None:
        """See ``Driver.abort``."""
        self._command("abort", run.id)

    def kv(self) -> KvState:
        """See ``Driver.kv``."""
        return self._kv

    def _wire(self, run: Run) -> dict[str, Any]:
        request = run.request
        sampling, stopping, logprobs = request.sampling, request.stopping, request.logprobs
        # KV under a salt of its own is nobody else's.
        salt = request.cache_salt if request.reuse_prefix else b"%d" % run.id
        return {
            "run": run.id,
            "prompt": run.prompt_ids,
            "own_prompt_tokens": run.own_prompt_tokens,
            "max_tokens": run.max_tokens,
            "min_tokens": run.min_tokens,
            "eos_ids": sorted(stopping.eos_ids),
            "stop_ids": sorted(stopping.stop_ids),
            "ignore_eos": stopping.ignore_eos,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": run.seed,
            "penalties": _penalties(request),
            "logit_bias": dict(sampling.logit_bias) or None,
            "top_logprobs": logprobs.top if logprobs.enabled else None,
            "guided": _guide(request.guided) if request.guided is not None else None,
            "lora": request.lora,
            "salt": salt.hex() if request.reuse_prefix else f"alone-{run.id}" if salt else "",
            "salt_bytes": salt,
            "retention": self._retention(request),
            "handoff": request.handoff.reference if request.handoff is not None else None,
            "priority": _PRIORITY.get(request.request_class, 0.5),
        }

    def _retention(self, request: Request) -> int | None:
        """How long its KV is kept, against others' (TensorRT-LLM: 0 to 100, 35 by default)."""
        settings = self._settings
        if request.request_class == types_pb2.REQUEST_CLASS_INTERACTIVE:
            return settings.interactive_retention_priority
        return settings.batch_retention_priority if request.request_class == types_pb2.REQUEST_CLASS_BATCH else None

    # --- the link ---------------------------------------------------------------------------------------------------

    def _command(self, what: str, value: Any) -> None:
        if not self._commands:
            asyncio.get_running_loop().call_soon(self._send)
        self._commands.append((what, value))

    def _send(self) -> None:
        commands, self._commands = self._commands, []
        if self._link is not None:
            self._link.send(commands)

    def _on_frame(self, frame: tuple[Any, ...]) -> None:
        assert self._inbox is not None
        assert self._ready is not None
        kind = frame[0]
        if kind == "out":
            self._on_out(self._inbox, *frame[1:])
        elif kind == "ready":
            self._ready.set_result(frame[1])
        elif kind == "failed":
            self._fail(frame[1])

    def _on_out(
        self,
        inbox: Inbox,
        iteration: int,
        out: list[tuple[Any, ...]],
        costs: list[tuple[int, int, float]],
        blocks: list[Any],
        numbers: tuple[int, int, int, int],
    ) -> None:
        self._kv = KvState(*numbers)
        runs = self._runs
        for number, ids, logprobs, end, cached, why in out:
            run = runs.get(number)
            if run is None:
                continue
            if ids:
                inbox.tokens(run, ids, [_finite(each) for each in logprobs] if logprobs is not None else None, cached)
            if end == "not_finished":
                # The first half of a hand-off: its one id, and where its KV waits.
                inbox.handed_over(run, why)
                end = "length"
            if end is not None:
                del runs[number]
                self._on_end(inbox, run, end, why)
        for prefill_tokens, decode_tokens, duration_s in costs[:-1]:
            inbox.stepped(iteration, StepCost(prefill_tokens, decode_tokens, 0, duration_s))
        last = StepCost(costs[-1][0], costs[-1][1], 0, costs[-1][2]) if costs else None
        inbox.stepped(iteration, last, blocks)

    def _on_end(self, inbox: Inbox, run: Run, end: str, why: str | None) -> None:
        outcome = _ENDS.get(end, types_pb2.OUTCOME_FAILED)
        failure = None
        if outcome == types_pb2.OUTCOME_REJECTED:
            failure = error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, f"TensorRT-LLM refused it: {why}")
        elif outcome == types_pb2.OUTCOME_FAILED:
            failure = error(types_pb2.ERROR_CODE_INTERNAL, f"TensorRT-LLM failed: {why or end}")
        inbox.ended(run, outcome, failure)

    def _on_lost(self) -> None:
        """Its end of the link is closed, so it is dead or dying; ``_on_exit`` knows how."""
        if not self._closing:
            self.kill()

    async def _on_exit(self, child: asyncio.subprocess.Process) -> None:
        code = await child.wait()
        # Ranks may outlive it.
        _kill_group(child)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self._fail(f"TensorRT-LLM's process was {how}" if code < 0 else f"TensorRT-LLM's process {how}")

    def _fail(self, reason: str) -> None:
        assert self._ready is not None
        if self._closing:
            return
        if not self._ready.done():
            self._ready.set_exception(EngineError(reason))
        elif self._inbox is not None and self._facts:
            self._inbox.failed(reason)


_GUIDED = {
    "xgrammar": ("json_schema", "json_object", "regex", "grammar", "choice"),
    # Its grammars are of another form.
    "llguidance": ("json_schema", "json_object", "regex", "choice"),
}


def adapters(text: str) -> dict[str, str]:
    """Adapters by name. Raises ConfigError."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, path = part.partition("=")
        if not equals or not name.strip() or not path.strip():
            raise ConfigError(f"tensorrt_llm.lora_adapters: expected name=folder, got {part!r}")
        found[name.strip()] = path.strip()
    return found


def _penalties(request: Request) -> tuple[float, float, float] | None:
    sampling = request.sampling
    values = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    return None if values == (1.0, 0.0, 0.0) else values


def _guide(guided: Guided) -> tuple[str, Any]:
    """The name of ``GuidedDecodingParams``' field, and its value."""
    match guided.kind:
        case "json_schema":
            return "json", guided.text
        case "json_object":
            return "json_object", True
        case "choice":
            return "regex", guided.as_regex()
        case _:
            return guided.kind, guided.text


def _finite(row: tuple[tuple[int, float], list[tuple[int, float]]]) -> TokenLogprobs:
    (token, logprob), top = row
    return TokenLogprobs(
        (token, max(LOGPROB_FLOOR, logprob)), [(each, max(LOGPROB_FLOOR, value)) for each, value in top]
    )


def _kill_group(child: asyncio.subprocess.Process) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def check_settings(worker: WorkerConfig, settings: TensorRtLlmConfig) -> None:
    """What single keys cannot say. Raises ConfigError or ModelError."""
    if worker.block_tokens < 2 or worker.block_tokens & (worker.block_tokens - 1):
        raise ConfigError(
            f"worker.block_tokens: TensorRT-LLM's blocks are a power of two above 1, got {worker.block_tokens}"
        )
    parts = (settings.moe_tensor_parallel_size, settings.moe_expert_parallel_size)
    # With one of them left to TensorRT-LLM it follows from the other.
    wrong = parts[0] * parts[1] != settings.tensor_parallel_size if all(parts) else False
    if wrong or any(part and settings.tensor_parallel_size % part for part in parts):
        raise ConfigError(
            "tensorrt_llm.moe_tensor_parallel_size: times moe_expert_parallel_size it must be tensor_parallel_size "
            f"({settings.tensor_parallel_size}), got {parts[0]} and {parts[1]}"
        )
    for name, path in adapters(settings.lora_adapters).items():
        if not os.path.exists(path):
            raise ModelError(f"tensorrt_llm.lora_adapters: {name}: {path} does not exist")
