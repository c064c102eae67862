"""The process in which TensorRT-LLM runs: ``python -m headrace.worker.engines.tensorrt_llm_child FD PARENT``.

It translates between the parent's words (plain values, see ``tensorrt_llm.py``) and the LLM API of the releases 1.2 to
1.4, whose differences it reads from their signatures. All that needs ``import tensorrt_llm`` is here. What each
iteration brought for all requests leaves in one frame: the tasks that wait for results append to one list, which is
written once they have all had their turn.

Three things the API does shape this file. Results are one object with cumulative lists, so what was sent of each is
counted here. The sampling parameters that are passed get changed, so each request has its own. Polling for statistics
and events blocks its thread, in any release and in the asynchronous form too, so each has a thread; when such a call
never returns, generation goes on.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import inspect
import itertools
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.worker.engine import BlockChange
from headrace.worker.engines.hold_back import HoldBack
from headrace.worker.engines.tensorrt_llm_events import KvEvents, Scope
from headrace.worker.frames import Frames, pack, read
from headrace.worker.hashes import block_namer

log = logging.getLogger(__name__)

_SUPPORTED = (1, 2), (1, 5)
#: How long one poll may wait for rows, and the pause after it.
_POLL_S = 0.05
_POLL_EVERY_S = 0.05
_BEAT_S = 0.25
_WARM_UP_TIMEOUT_S = 600.0

#: What is asked of the API, beside what every release has. Found missing, the start is refused by name.
_GENERATE = ("inputs", "sampling_params", "lora_request", "streaming", "cache_salt", "kv_cache_retention_config")
_SAMPLING = (
    "end_id",
    "pad_id",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "embedding_bias",
    "logits_processor",
    "logprobs",
    "guided_decoding",
)


class Unsuitable(Exception):
    """This installation of TensorRT-LLM will not do; the text says why."""


class Adapter:
    """The API as it is installed."""

    def __init__(self, spec: dict[str, Any]) -> None:
        try:
            import tensorrt_llm
            from tensorrt_llm import llmapi
        except ImportError as failure:
            raise Unsuitable(f"tensorrt_llm cannot be imported: {failure}") from failure
        self.version = str(tensorrt_llm.__version__)
        release = tuple(int(part) for part in self.version.split(".")[:2])
        if not _SUPPORTED[0] <= release < _SUPPORTED[1]:
            raise Unsuitable(f"tensorrt_llm {self.version}: releases from 1.2 to 1.4 are known")
        self._api = llmapi
        self._generate = set(inspect.signature(llmapi.LLM.generate_async).parameters)
        self._require("LLM.generate_async", self._generate, _GENERATE)
        sampling = set(inspect.signature(llmapi.SamplingParams).parameters)
        self._require("SamplingParams", sampling, _SAMPLING)
        self._spec = spec
        arguments = self._arguments(spec)
        known = set(llmapi.TorchLlmArgs.model_fields)
        if unknown := sorted(set(arguments) - known):
            raise Unsuitable(f"tensorrt_llm {self.version} has no argument {', '.join(unknown)}")
        #: Occurrence penalties: the default sampler of 1.2 leaves them out without a word, and without that field they
        #: would count the prompt.
        penalises = release >= (1, 3) or arguments.get("sampler_type") == "TRTLLMSampler"
        self.penalties = penalises and "prompt_ignore_length" in sampling
        self._loras = {
            name: llmapi.LoRARequest(name, number, path) for number, (name, path) in enumerate(spec["lora"].items(), 1)
        }
        self.llm = llmapi.LLM(**arguments)
        self._digest = _blake3()

    def _require(self, what: str, found: set[str], wanted: tuple[str, ...]) -> None:
        if missing := [name for name in wanted if name not in found]:
            raise Unsuitable(f"tensorrt_llm {self.version}: {what} has no {', '.join(missing)}")

    def _arguments(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Of the constructor: the settings, then the operator's own file over them."""
        api, arguments = self._api, dict(spec["arguments"])
        if file := spec["options_file"]:
            arguments = _merged(arguments, _options(Path(file)))
        for name, kind in (
            ("kv_cache_config", "KvCacheConfig"),
            ("scheduler_config", "SchedulerConfig"),
            ("cuda_graph_config", "CudaGraphConfig"),
            ("lora_config", "LoraConfig"),
            ("moe_config", "MoeConfig"),
            ("attention_dp_config", "AttentionDpConfig"),
            ("cache_transceiver_config", "CacheTransceiverConfig"),
        ):
            if isinstance(arguments.get(name), dict):
                arguments[name] = getattr(api, kind)(**arguments[name])
        if isinstance(speculative := arguments.get("speculative_config"), dict):
            arguments["speculative_config"] = self._speculative(dict(speculative))
        return arguments

    def _speculative(self, options: dict[str, Any]) -> Any:
        kind = str(options.pop("decoding_type"))
        name = {"AUTO": "Auto", "Draft_Target": "DraftTarget"}.get(kind, kind) + "DecodingConfig"
        config = getattr(self._api, name, None)
        if config is None:
            raise Unsuitable(f"tensorrt_llm {self.version} has no {name} (speculative decoding {kind!r})")
        # It was called so in older builds.
        if "speculative_model" in options and "speculative_model" not in config.model_fields:
            options["speculative_model_dir"] = options.pop("speculative_model")
        return config(**options)

    def scope(self, wire: dict[str, Any]) -> Scope:
        """Under what its KV is kept."""
        lora = self._loras.get(wire["lora"])
        salt = wire["salt"]
        salt_id = int.from_bytes(self._digest(salt.encode())[:8], "little") if salt and self._digest else 0
        told = salt != _WARM_UP["salt"]
        return Scope(lora.adapter_id if lora else 0, salt, salt_id, wire["lora"], wire["salt_bytes"], told)

    def generate(self, wire: dict[str, Any]) -> Any:
        """Begins it; the result is a future that is iterated."""
        options: dict[str, Any] = {"streaming": True, "sampling_params": self._sampling(wire)}
        if wire["lora"]:
            options["lora_request"] = self._loras[wire["lora"]]
        if wire["salt"]:
            options["cache_salt"] = wire["salt"]
        if (priority := wire["retention"]) is not None:
            config = self._api.KvCacheRetentionConfig
            kept = config.TokenRangeRetentionConfig(0, None, priority)
            options["kv_cache_retention_config"] = config([kept], priority)
        if wire["handoff"] is not None:
            options["disaggregated_params"] = self._disaggregated(wire["handoff"])
        if "priority" in self._generate:
            options["priority"] = wire["priority"]
        return self.llm.generate_async(wire["prompt"], **options)

    def _disaggregated(self, reference: str) -> Any:
        kind = self._api.DisaggregatedParams
        if not reference:
            return kind(request_type="context_only")
        return kind(request_type="generation_only", **_opened(reference))

    def _sampling(self, wire: dict[str, Any]) -> Any:
        end_ids, ends = wire["eos_ids"], wire["stop_ids"]
        # The engine has one end id; the others are stop ids of one token, which it keeps when told so.
        end_id = end_ids[0] if end_ids else -1
        stops = ends if wire["ignore_eos"] else [*end_ids[1:], *ends]
        options: dict[str, Any] = {
            "end_id": end_id,
            "pad_id": max(end_id, 0),
            "max_tokens": wire["max_tokens"],
            "ignore_eos": wire["ignore_eos"] or end_id < 0,
            "stop_token_ids": stops or None,
            "include_stop_str_in_output": True,
            "detokenize": False,
        }
        if wire["min_tokens"]:
            options["min_tokens"] = wire["min_tokens"]
            # ``min_tokens`` holds back the end id alone.
            held_back = [*stops, *(end_ids if wire["ignore_eos"] else ())]
            if held_back:
                until = len(wire["prompt"]) + wire["min_tokens"]
                options["logits_processor"] = HoldBack(held_back, until)
        if wire["temperature"] == 0 or wire["top_k"] == 1:
            # What every release takes for greedy.
            options["top_k"] = 1
        else:
            options |= {"temperature": wire["temperature"], "top_k": wire["top_k"], "top_p": wire["top_p"]}
            options |= {"min_p": wire["min_p"] or None, "seed": wire["seed"]}
        if wire["penalties"] is not None:
            names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
            options |= dict(zip(names, wire["penalties"], strict=True))
            # Presence and frequency are of the answer; repetition looks at the prompt too, in any case.
            options["prompt_ignore_length"] = wire["own_prompt_tokens"]
        if wire["logit_bias"]:
            options["embedding_bias"] = _bias(wire["logit_bias"], self._spec["vocab_size"])
        if wire["top_logprobs"] is not None:
            # 0 would mean none at all in some releases.
            options["logprobs"] = max(1, wire["top_logprobs"])
        if wire["guided"] is not None:
            kind, text = wire["guided"]
            options["guided_decoding"] = self._api.GuidedDecodingParams(**{kind: text})
        return self._api.SamplingParams(**options)


def _bias(biases: dict[int, float], vocab_size: int) -> Any:
    import torch

    made = torch.zeros(vocab_size, dtype=torch.float32)
    for token, bias in biases.items():
        made[token] = bias
    return made


def _blake3() -> Callable[[bytes], bytes] | None:
    """By which the engine names salts."""
    try:
        from blake3 import blake3
    except ImportError:
        return None
    return lambda data: bytes(blake3(data).digest())


def _options(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        found = json.loads(text)
    else:
        import yaml  # type: ignore[import-untyped, unused-ignore]

        found = yaml.safe_load(text)
    if not isinstance(found, dict):
        raise Unsuitable(f"{path}: expected a mapping of arguments")
    return found


def _merged(below: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in over.items():
        under = merged.get(name)
        merged[name] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


class Server:
    """Serves one parent until it is told to stop, or the parent is gone."""

    def __init__(self, adapter: Adapter, spec: dict[str, Any]) -> None:
        self._adapter = adapter
        self._llm = adapter.llm
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self._link = Frames(self._on_commands, self._on_parent_gone)
        self._results: dict[int, Any] = {}
        #: Runs that have been asked for, and not begun.
        self._beginning: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)
        self._out: list[tuple[Any, ...]] = []
        self._costs: list[tuple[int, int, float]] = []
        self._blocks: list[BlockChange] = []
        self._used_blocks = self._capacity_blocks = 0
        self._drafted = self._accepted = 0
        self._iteration = 0
        self._flushing = False
        self._stopping = threading.Event()
        self._stopped: asyncio.Event = asyncio.Event()
        namer = block_namer(spec["model"], spec["block_tokens"]) if spec["events"] else None
        self._events = KvEvents(namer, spec["block_tokens"]) if namer is not None else None
        self._scope_lock = threading.Lock()
        self._engine_error = _error_class("RequestError")

    async def run(self, sock: socket.socket) -> None:
        """Warms up, says so, and serves."""
        await asyncio.wait_for(self._warm_up(), _WARM_UP_TIMEOUT_S)
        await self._loop.create_connection(lambda: self._link, sock=sock)
        self._poll("stats", lambda: self._llm.get_stats(_POLL_S), self._on_stats)
        if self._events is not None:
            self._poll("events", lambda: self._llm.get_kv_cache_events(_POLL_S), self._on_events)
        self._watch_ranks()
        if (capacity := await self._capacity()) == 0:
            self._fail(f"tensorrt_llm {self._adapter.version} does not say how much KV it has")
        facts = {"version": self._adapter.version, "kv_blocks": capacity, "penalties": self._adapter.penalties}
        self._link.send(("ready", facts))
        beat = asyncio.create_task(self._beat())
        await self._stopped.wait()
        beat.cancel()

    # --- start ------------------------------------------------------------------------------------------------------

    async def _warm_up(self) -> None:
        """What is compiled, captured or connected at first use is so now. Also, older releases can be asked for
        statistics and events only after a first request."""
        most = min(self._spec["context_tokens"] - 3, self._spec["warm_up_tokens"])
        for prompt in ([1], [1] * max(1, most)):
            wire = _WARM_UP | {"prompt": prompt}
            if self._events is not None:
                self._events.use(self._adapter.scope(wire))
            try:
                await self._adapter.generate(wire).aresult()
            except self._engine_error as refused:
                # Longer than the KV is.
                log.info("no warm-up with %d tokens: %s", len(prompt), refused)

    async def _capacity(self) -> int:
        """Blocks of KV; said by the API, else by the first event or the first row of statistics."""
        if hasattr(self._llm, "get_kv_cache_capacity"):
            return int(self._llm.get_kv_cache_capacity()["maxNumBlocks"])
        for _ in range(100):
            if found := (self._events.capacity_blocks if self._events is not None else 0) or self._capacity_blocks:
                return found
            await asyncio.sleep(_POLL_S)
        return 0

    def _watch_ranks(self) -> None:
        """The engine's own processes, started through MPI: when one dies, nobody in here is told."""
        for pid in _ranks(os.getpid()):
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                self._fail(f"rank process {pid} is gone")
                return
            self._loop.add_reader(descriptor, self._on_rank_gone, pid, descriptor)

    def _on_rank_gone(self, pid: int, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        if not self._stopping.is_set():
            self._fail(f"rank process {pid} died")

    # --- in ---------------------------------------------------------------------------------------------------------

    def _on_commands(self, commands: list[tuple[str, Any]]) -> None:
        for what, value in commands:
            if what == "begin":
                self._beginning.add(value["run"])
                task = asyncio.create_task(self._run(value["run"], value))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif what == "abort":
                if value in self._beginning:
                    # Its task has not had its turn yet.
                    self._beginning.discard(value)
                    self._out.append((value, [], None, "cancelled", 0, None))
                    self._flush_soon()
                elif (result := self._results.get(value)) is not None:
                    result.abort()
            else:
                self._stopping.set()
                self._stopped.set()

    def _on_parent_gone(self) -> None:
        self._stopping.set()
        self._stopped.set()

    async def _run(self, run: int, wire: dict[str, Any]) -> None:
        """One request, from its beginning to its end."""
        out, sent = self._out, 0
        if run not in self._beginning:
            return
        self._beginning.discard(run)
        try:
            if self._events is not None:
                with self._scope_lock:
                    self._events.use(self._adapter.scope(wire))
            result = self._results[run] = self._adapter.generate(wire)
            wants_logprobs = wire["top_logprobs"] is not None
            # No timeout on each of these waits, which would cost more than all else here: the parent knows since when
            # the engine has been silent, and ends this process.
            async for step in result:
                completion = step.outputs[0]
                token_ids = completion.token_ids
                ids = token_ids[sent:]
                reason = completion.finish_reason
                # Not before the whole answer is done is the reason that of the end.
                end = reason if step.finished else None
                if end == "stop" and completion.stop_reason is None and not ids and wire["eos_ids"]:
                    # The end id was drawn, and left out.
                    ids = [wire["eos_ids"][0]]
                logprobs = _logprobs(completion.logprobs, sent, ids, wire["top_logprobs"]) if wants_logprobs else None
                why = _reference(completion.disaggregated_params) if end == "not_finished" else None
                out.append((run, ids, logprobs, end, 0 if sent else getattr(step, "cached_tokens", 0), why))
                sent += len(ids)
                if not self._flushing:
                    self._flushing = True
                    self._loop.call_soon(self._flush)
        except self._engine_error as failure:
            self._end(run, "failed" if sent or run in self._results else "rejected", str(failure))
        except (ValueError, TypeError) as failure:
            self._end(run, "failed" if run in self._results else "rejected", str(failure))
        except Exception as failure:
            # Not of one request: the executor is gone.
            self._fail(f"{type(failure).__name__}: {failure}")
        finally:
            self._results.pop(run, None)

    # --- out --------------------------------------------------------------------------------------------------------

    def _end(self, run: int, how: str, why: str) -> None:
        self._out.append((run, [], None, how, 0, why))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush_with_results(self) -> None:
        """While requests run, an iteration's frame is about to leave anyway."""
        if not self._results:
            self._flush_soon()

    def _flush(self) -> None:
        self._flushing = False
        if self._out:
            self._iteration += 1
        held = self._events.held_blocks if self._events is not None else 0
        numbers = (self._used_blocks, held, self._drafted, self._accepted)
        self._link.send(("out", self._iteration, self._out[:], self._costs, self._blocks, numbers))
        # The running tasks have this very list at hand.
        self._out.clear()
        self._costs, self._blocks = [], []

    async def _beat(self) -> None:
        """What has waited for results that did not come."""
        while True:
            await asyncio.sleep(_BEAT_S)
            if self._costs or self._blocks:
                self._flush_soon()

    def _fail(self, reason: str) -> None:
        if not self._stopping.is_set():
            self._link.send(("failed", reason))
            self._stopping.set()
            self._stopped.set()

    # --- statistics and events --------------------------------------------------------------------------------------

    def _poll(self, what: str, ask: Callable[[], list[Any]], tell: Callable[[list[Any]], None]) -> None:
        def main() -> None:
            while not self._stopping.is_set():
                try:
                    rows = ask()
                except AssertionError:
                    # Older releases, while no request has been submitted.
                    rows = []
                except NotImplementedError:
                    log.warning("this executor has no %s", what)
                    return
                except Exception as failure:
                    log.warning("no %s: %s", what, failure)
                    rows = []
                if rows:
                    tell(rows)
                # A row for each iteration would wake this thread as often. Also, some releases return at once.
                self._stopping.wait(_POLL_EVERY_S)

        threading.Thread(target=main, name=what, daemon=True).start()

    def _on_stats(self, rows: list[dict[str, Any]]) -> None:
        costs = []
        used = total = drafted = accepted = 0
        for row in rows:
            batch, kv = row.get("inflightBatchingStats") or {}, row.get("kvCacheStats") or {}
            prefill, decoding = batch.get("numCtxTokens", 0), batch.get("numGenRequests", 0)
            if prefill or decoding:
                costs.append((prefill, decoding, row.get("iterLatencyMS", 0.0) / 1000))
            used, total = kv.get("usedNumBlocks", used), kv.get("maxNumBlocks", total)
            speculation = row.get("specDecodingStats") or {}
            drafted += speculation.get("numDraftTokens", 0)
            accepted += speculation.get("numAcceptedTokens", 0)

        def take() -> None:
            self._costs += costs
            self._used_blocks, self._capacity_blocks = used, total
            self._drafted += drafted
            self._accepted += accepted
            self._flush_with_results()

        self._call(take)

    def _on_events(self, rows: list[dict[str, Any]]) -> None:
        assert self._events is not None
        with self._scope_lock:
            changes = self._events.take(rows)

        def take() -> None:
            self._blocks += changes
            self._flush_with_results()

        if changes:
            self._call(take)

    def _call(self, take: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(take)
        except RuntimeError:
            # The loop is closed: the process is going.
            return


#: A request of nobody.
_WARM_UP: dict[str, Any] = {
    "max_tokens": 2,
    "min_tokens": 0,
    "eos_ids": [],
    "stop_ids": [],
    "ignore_eos": True,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "penalties": None,
    "logit_bias": None,
    "top_logprobs": None,
    "guided": None,
    "handoff": None,
    "lora": "",
    "salt": "warm-up",
    "salt_bytes": b"",
    "retention": None,
    "priority": 0.5,
    "own_prompt_tokens": 0,
}


def _reference(params: Any) -> str:
    """A hand-off's parameters as text: whatever this release has, but the kind of request."""
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    del fields["request_type"]
    told = {name: value for name, value in fields.items() if value is not None and not isinstance(value, bytes)}
    opaque = {name: base64.b64encode(value).decode() for name, value in fields.items() if isinstance(value, bytes)}
    return json.dumps({"told": told, "opaque": opaque}, separators=(",", ":"))


def _opened(reference: str) -> dict[str, Any]:
    """What ``_reference`` wrote. Raises ValueError."""
    try:
        read = json.loads(reference)
        return {**read["told"], **{name: base64.b64decode(value) for name, value in read["opaque"].items()}}
    except (KeyError, TypeError, AttributeError) as failure:
        raise ValueError(f"no reference to KV: {failure!r}") from failure


def _error_class(name: str) -> type[Exception]:
    from tensorrt_llm import llmapi

    found: type[Exception] = getattr(llmapi, name)
    return found


def _logprobs(rows: list[Any], sent: int, ids: list[int], top: int) -> list[tuple[Any, list[Any]]]:
    made: list[tuple[Any, list[Any]]] = []
    for place, token in enumerate(ids, sent):
        row = rows[place] if place < len(rows) else {}
        if not isinstance(row, dict):
            # The simple form: the drawn id's alone.
            made.append(((token, float(row)), []))
            continue
        ranked = sorted(((i, float(each.logprob)) for i, each in row.items()), key=lambda pair: -pair[1])
        drawn = row.get(token)
        made.append(((token, float(drawn.logprob) if drawn is not None else float("-inf")), ranked[:top]))
    return made


def _ranks(root: int) -> list[int]:
    """The processes below this one that MPI's pool started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # After the name, which may hold anything, in parentheses: state, parent.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, below = [], list(children.get(root, ()))
    while below:
        pid = below.pop()
        below += children.get(pid, ())
        try:
            if b"mpi4py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def _die_with(parent: int) -> None:
    """When the parent is gone, however that came: this process and all that it started."""

    def main() -> None:
        try:
            watched = os.pidfd_open(parent)
        except OSError:
            os.killpg(0, signal.SIGKILL)
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=main, name="parent watch", daemon=True).start()


def _shut_down(llm: Any, limit_s: float) -> None:
    """``shutdown`` may never return."""
    closing = threading.Thread(target=llm.shutdown, name="shutdown", daemon=True)
    closing.start()
    closing.join(limit_s)
    if closing.is_alive():
        log.warning("the engine did not shut down within %g s", limit_s)


def main() -> None:
    """See the module's text."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    # Ranks must not keep the link open when this process is gone.
    os.set_inheritable(descriptor, False)
    _die_with(parent)
    # The parent says when: a Ctrl-C in a terminal is for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", stream=sys.stderr)
    sock = socket.socket(fileno=descriptor)
    spec = read(sock)
    adapter = None
    try:
        began_s = time.monotonic()
        adapter = Adapter(spec)
        log.info("tensorrt_llm %s is loaded after %.1f s", adapter.version, time.monotonic() - began_s)

        async def serve() -> None:
            await Server(adapter, spec).run(sock)

        asyncio.run(serve())
    except Exception as failure:
        log.exception("the engine does not start")
        reason = str(failure) if isinstance(failure, Unsuitable) else f"{type(failure).__name__}: {failure}"
        with contextlib.suppress(OSError):
            sock.sendall(pack(("failed", reason)))
    if adapter is not None:
        _shut_down(adapter.llm, spec["shutdown_timeout_s"])
    # Not sys.exit: threads of the engine could hold the process for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
