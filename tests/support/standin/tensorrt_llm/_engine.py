"""The engine of the stand-in: a thread that goes round, with blocks, events, statistics and faults.

``TRTLLM_STANDIN`` is a JSON object with any of:

- ``version``: the release that is played, ``1.2.1`` by default;
- ``vocab_size`` (1000), ``step_s`` (how long an iteration takes, 0), ``gpu_tokens`` (room for KV, when no other
  setting says it: 4096);
- ``faults``: what goes wrong at a place. Keys are a place, or ``generate``, ``prefill``, ``decode``, ``abort`` and a
  prompt's first id, as in ``decode:77``; values are ``die`` (SIGKILL), ``hang``, ``silent`` (the engine's thread ends
  without a word), ``request_error``, ``fatal``, ``ignore``. Places: ``load``, ``shutdown``, ``stats``, ``events``.

The model: after ids with hash h the likeliest id is a function of h. All else has a logit drawn from h, far below it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .disaggregated_params import DisaggregatedParams
from .executor.result import GenerationResult, Logprob, Response
from .executor.utils import CppExecutorError, RequestError
from .sampling_params import SamplingParams
from .version import RELEASE, settings

_MASK = (1 << 64) - 1
#: Ids below are special: never likely by themselves.
_FIRST_WORD = 20
#: KV that waits in a context engine of this process to be fetched, by its reference.
_HANDOFFS: dict[bytes, tuple[Engine, Work]] = {}


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(eq=False)
class Work:
    """One sequence (a request has ``best_of`` of them)."""

    result: GenerationResult
    prompt: list[int]
    params: SamplingParams
    lora_id: int
    salt: str
    disaggregated: DisaggregatedParams | None
    sequence: int = 0
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    state: int = 0
    blocks: list[_Block] = field(default_factory=list)
    reserved: int = 0
    reused: int = 0
    cancelled: bool = False
    #: Held for a generation server until then.
    held_until_s: float | None = None

    @property
    def drawn(self) -> int:
        return len(self.ids) - len(self.prompt)


@dataclass(eq=False)
class _Block:
    hash: int
    key: tuple[Any, ...]
    users: int = 0


class Engine:
    """See the module's text."""

    def __init__(self, args: Any) -> None:
        setup = settings()
        self._faults: dict[str, str] = setup.get("faults", {})
        self.vocab_size = int(setup.get("vocab_size", 1000))
        self._step_s = float(setup.get("step_s", 0.0))
        self._args = args
        kv = args.kv_cache_config
        self._per_block = kv.tokens_per_block
        self._blocks_total = (kv.max_tokens or int(setup.get("gpu_tokens", 4096))) // self._per_block
        self._blocks_used = 0
        self._reuse = kv.enable_block_reuse
        #: Blocks that can be found again; those without users are given up in this order.
        self._tree: OrderedDict[tuple[Any, ...], _Block] = OrderedDict()
        self._wake = threading.Condition()
        self._waiting: deque[Work] = deque()
        self._running: list[Work] = []
        self._aborts: set[int] = set()
        self._stopping = False
        self._fatal: BaseException | None = None
        self._fatal_raised = False
        self._iteration = 0
        self._event_id = 0
        self._events: deque[dict[str, Any]] = deque()
        self._events_most = kv.event_buffer_max_size if self._reuse else 0
        self._events_wake = threading.Condition()
        self._events_done = False
        self._stats: deque[dict[str, Any]] = deque(maxlen=args.max_stats_len)
        self._stats_wake = threading.Condition()
        self._stats_done = False
        self._never = threading.Event()
        self._fault("load")
        world = args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size
        if world > int(setup.get("gpus", 8)):
            raise RuntimeError(f"the world size {world} is over the number of visible GPUs")
        #: One process a rank, started through MPI's pool.
        self.ranks = [
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)", "mpi4py.futures.server"])
            for _ in range(world if world > 1 else 0)
        ]
        self._emit("created", {"num_blocks_per_cache_level": [self._blocks_total, 0]})
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- faults -----------------------------------------------------------------------------------------------------

    def play(self, place: str, prompt: list[int]) -> None:
        """The fault at that place of a request that begins so."""
        self._fault(f"{place}:{prompt[0] if prompt else ''}")

    def _fault(self, place: str) -> str:
        kind = self._faults.get(place, "")
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            self._never.wait()
        return kind

    # --- the caller's side ------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        if self._stopping:
            raise RuntimeError("LLM is shutting down")
        if self._fatal is not None:
            self._raise_fatal()
            raise RuntimeError("the executor is gone")

    def check_background_error(self) -> None:
        if self._fatal is not None:
            self._raise_fatal()

    def _raise_fatal(self) -> None:
        # Whoever sees it first gets it; the others stay blocked.
        if not self._fatal_raised and self._fatal is not None:
            self._fatal_raised = True
            raise self._fatal

    def submit(self, work: Work) -> None:
        with self._wake:
            for sequence in range(work.params.best_of or 1):
                each = Work(
                    work.result, work.prompt, work.params, work.lora_id, work.salt, work.disaggregated, sequence
                )
                each.ids = list(work.prompt)
                self._waiting.append(each)
            self._events_done = self._stats_done = False
            self._wake.notify()

    def abort(self, request_id: int) -> None:
        with self._wake:
            self._aborts.add(request_id)
            self._wake.notify()

    def capacity(self) -> dict[str, int]:
        total = self._blocks_total
        return {"maxNumBlocks": total, "tokensPerBlock": self._per_block, "maxNumTokens": total * self._per_block}

    def stats(self, timeout: float) -> list[dict[str, Any]]:
        self._fault("stats")
        if not self._args.enable_iter_perf_stats:
            return []
        rows, self._stats_done = self._drain(self._stats_wake, self._stats, timeout, self._stats_done)
        return rows

    def events(self, timeout: float) -> list[dict[str, Any]]:
        self._fault("events")
        rows, self._events_done = self._drain(self._events_wake, self._events, timeout, self._events_done)
        return rows

    def _drain(
        self, wake: threading.Condition, rows: deque[dict[str, Any]], timeout: float, done: bool
    ) -> tuple[list[dict[str, Any]], bool]:
        if done and RELEASE < (1, 3):
            return [], True
        with wake:
            wake.wait_for(lambda: bool(rows) or self._stopping, timeout)
            found = list(rows)
            rows.clear()
        return found, not found

    def shutdown(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._fault("shutdown")
        for wake in (self._wake, self._stats_wake, self._events_wake):
            with wake:
                wake.notify_all()
        self._thread.join()
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                with self._wake:
                    self._wake.wait_for(lambda: self._stopping or self._waiting or self._running or self._aborts)
                    if self._stopping:
                        return
                if self._step() == "silent":
                    return
        except BaseException as failure:
            self._fatal = failure if isinstance(failure, CppExecutorError) else CppExecutorError(repr(failure))
            # One waiter hears of it; it is the one whose response comes next.
            with self._wake:
                someone = next(iter([*self._running, *self._waiting]), None)
            if someone is not None:
                self._send([(someone.result, Response(0, [], None, None, True, error=self._fatal))])
                self._fatal_raised = True

    def _step(self) -> str:
        began = time.perf_counter()
        out: list[tuple[GenerationResult, Response]] = []
        with self._wake:
            self._end_aborted(out)
            self._admit(out)
        room = self._args.max_num_tokens or 8192
        ctx_tokens = contexts = generations = 0
        for work in list(self._running):
            if work.held_until_s is not None:
                self._hold(work)
                continue
            if work.computed < len(work.prompt):
                if (kind := self._at("prefill", work, out)) is not None:
                    if kind == "silent":
                        return kind
                    continue
                left = len(work.prompt) - work.computed
                # A chunk as far as there is room; without chunking a prompt goes whole.
                count = min(left, room) if self._args.enable_chunked_prefill else left
                if count == 0 or count > room:
                    continue
                room -= count
                work.computed += count
                contexts, ctx_tokens = contexts + 1, ctx_tokens + count
                if work.computed < len(work.prompt):
                    continue
                self._store(work, len(work.prompt) - 1)
            else:
                if work.drawn == 2 and (kind := self._at("decode", work, out)) is not None:
                    if kind == "silent":
                        return kind
                    continue
                generations += 1
            self._draw(work, out)
        if self._step_s:
            time.sleep(self._step_s)
        if contexts or generations:
            self._iteration += 1
            self._row(began, contexts, generations, ctx_tokens)
        self._send(out)
        if not out and not contexts and not generations:
            time.sleep(0.0005)
        return ""

    def _at(self, place: str, work: Work, out: list[tuple[GenerationResult, Response]]) -> str | None:
        kind = self._fault(f"{place}:{work.prompt[0]}")
        if kind == "request_error":
            self._leave(work)
            out.append((work.result, Response(0, [], None, None, True, error=RequestError("the request failed"))))
            return kind
        if kind == "fatal":
            raise CppExecutorError("CUDA error: an illegal memory access was encountered")
        return kind if kind == "silent" else None

    def _end_aborted(self, out: list[tuple[GenerationResult, Response]]) -> None:
        for request_id in self._aborts:
            for work in [w for w in (*self._running, *self._waiting) if w.result.id == request_id]:
                if self._fault(f"abort:{work.prompt[0]}") == "ignore":
                    continue
                if work in self._running:
                    self._leave(work)
                else:
                    self._waiting.remove(work)
                others = any(w.result is work.result for w in (*self._running, *self._waiting))
                out.append((work.result, Response(work.sequence, [], None, "cancelled", not others)))
        self._aborts.clear()

    def _admit(self, out: list[tuple[GenerationResult, Response]]) -> None:
        while self._waiting and len(self._running) < (self._args.max_batch_size or 2048):
            work = self._waiting[0]
            most = self._args.max_seq_len or self._blocks_total * self._per_block
            length = min(len(work.prompt) + (work.params.max_tokens or most), most)
            need = -(-length // self._per_block)
            if len(work.prompt) >= most or need > self._blocks_total:
                self._waiting.popleft()
                why = RequestError(f"the prompt of {len(work.prompt)} tokens does not fit ({most})")
                out.append((work.result, Response(0, [], None, None, True, error=why)))
                continue
            # GUARANTEED_NO_EVICT: what it may need in the end must be there now. A context request needs its prompt.
            if self._blocks_used + need > self._blocks_total:
                return
            self._waiting.popleft()
            self._enter(work, need)

    def _enter(self, work: Work, need: int) -> None:
        work.reserved = need
        self._blocks_used += need
        kind = work.disaggregated.request_type if work.disaggregated is not None else None
        if kind == "generation_only":
            assert work.disaggregated is not None
            handed = _HANDOFFS.pop(work.disaggregated.opaque_state or b"", None)
            if handed is None:
                # The transfer never ends by itself; the configured timeout is the only end.
                config = self._args.cache_transceiver_config
                timeout_ms = config.kv_transfer_timeout_ms if config is not None else None
                work.held_until_s = float("inf") if timeout_ms is None else time.monotonic() + timeout_ms / 1000
            else:
                handed[1].held_until_s = 0.0
                work.computed = len(work.prompt)
        if self._reuse and work.computed == 0:
            for key, _ in self._keys(work, work.prompt[:-1]):
                block = self._tree.get(key)
                if block is None:
                    break
                self._tree.move_to_end(key)
                block.users += 1
                work.blocks.append(block)
            work.reused = work.computed = len(work.blocks) * self._per_block
            work.result.cached_tokens = max(work.result.cached_tokens, work.reused) if work.sequence == 0 else 0
        state = 0
        for token in work.ids:
            state = _mix(state ^ (token + 1))
        work.state = state
        self._running.append(work)

    def _hold(self, work: Work) -> None:
        assert work.held_until_s is not None
        if work.held_until_s > time.monotonic():
            return
        self._leave(work)
        if work.disaggregated is not None and work.disaggregated.request_type == "generation_only":
            error = RequestError("the KV transfer timed out")
            self._send([(work.result, Response(0, [], None, None, True, error=error))])

    def _leave(self, work: Work) -> None:
        """Its KV is free, or only kept for reuse."""
        self._running.remove(work)
        self._store(work, len(work.ids) - 1)
        for block in work.blocks:
            block.users -= 1
        self._blocks_used -= work.reserved
        work.blocks, work.reserved = [], 0
        self._give_up()

    def _keys(self, work: Work, ids: list[int]) -> list[tuple[tuple[Any, ...], list[int]]]:
        keys, parent = [], ()
        for start in range(0, len(ids) - self._per_block + 1, self._per_block):
            tokens = ids[start : start + self._per_block]
            parent = (parent, tuple(tokens), work.lora_id, work.salt)
            keys.append((parent, tokens))
        return keys

    def _store(self, work: Work, count: int) -> None:
        """Full blocks of its first ``count`` ids can be found by others from now on."""
        if not self._reuse or count <= 0:
            return
        held = len(work.blocks)
        keys = self._keys(work, work.ids[:count])
        parent_hash = work.blocks[-1].hash if work.blocks else None
        stored = []
        for key, tokens in keys[held:]:
            block = self._tree.get(key)
            if block is None:
                value = _block_key(tokens, parent_hash or 0, work.lora_id, work.salt)
                block = self._tree[key] = _Block(value, key)
                stored.append((block, tokens))
            elif stored:
                self._emit_stored(stored, parent_of(stored, work, held), work)
                stored = []
            block.users += 1
            work.blocks.append(block)
            parent_hash = block.hash
        if stored:
            self._emit_stored(stored, parent_of(stored, work, held), work)
        self._give_up()

    def _give_up(self) -> None:
        """Kept blocks are free on demand: never more in the tree than fit beside what is reserved."""
        removed = []
        while len(self._tree) > self._blocks_total:
            key = next((key for key, block in self._tree.items() if not block.users and not self._has_child(key)), None)
            if key is None:
                break
            removed.append(self._tree.pop(key).hash)
        if removed:
            self._emit("removed", {"block_hashes": removed})

    def _has_child(self, key: tuple[Any, ...]) -> bool:
        return any(other[0] == key for other in self._tree)

    # --- drawing ----------------------------------------------------------------------------------------------------

    def _draw(self, work: Work, out: list[tuple[GenerationResult, Response]]) -> None:
        params = work.params
        token, logprobs = self._next(work)
        work.ids.append(token)
        work.state = _mix(work.state ^ (token + 1))
        work.computed = len(work.ids) - 1
        if len(work.ids) % self._per_block == 0:
            self._store(work, len(work.ids) - 1)
        most = self._args.max_seq_len or self._blocks_total * self._per_block
        reason, stop_ids, stop_reason = None, 0, None
        if token == params.end_id and not params.ignore_eos:
            reason = "stop"
        elif work.drawn >= (params.max_tokens or most) or len(work.ids) >= most:
            reason = "length"
        elif token in (params.stop_token_ids or ()):
            reason, stop_ids, stop_reason = "stop", 1, token
        handed = None
        if reason == "length" and work.disaggregated is not None and work.disaggregated.request_type == "context_only":
            reason = "not_finished"
            state = b"standin %d %d" % (id(self), work.result.id)
            handed = DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=[token],
                ctx_request_id=work.result.id,
                opaque_state=state,
            )
            _HANDOFFS[state] = (self, work)
            config = self._args.cache_transceiver_config
            timeout_ms = config.kv_transfer_timeout_ms if config is not None else None
            work.held_until_s = float("inf") if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        elif reason is not None:
            self._leave(work)
        final = reason is not None and not any(
            w.result is work.result and w is not work for w in (*self._running, *self._waiting)
        )
        work.result.decoding_iter += 1
        if work.result._streaming or reason is not None:
            ids = [token] if work.result._streaming else work.ids[len(work.prompt) :]
            row = None if logprobs is None else [logprobs]
            out.append((work.result, Response(work.sequence, ids, row, reason, final, stop_ids, stop_reason, handed)))

    def _next(self, work: Work) -> tuple[int, dict[int, Logprob] | None]:
        params = work.params
        likely = _FIRST_WORD + work.state % (self.vocab_size - _FIRST_WORD)
        held_back = work.drawn < (params.min_tokens or 0)
        plain = (
            params._greedy
            and not (held_back and likely == params.end_id)
            and params.embedding_bias is None
            and params.logprobs is None
            and params.logits_processor is None
            and (params.repetition_penalty or 1.0) == 1.0
            and not params.presence_penalty
            and not params.frequency_penalty
        )
        if plain:
            return likely, None
        raw = np.random.Generator(np.random.PCG64(work.state)).random(self.vocab_size, np.float32)
        raw[:_FIRST_WORD] -= 20.0
        raw[likely] += 10.0
        work_logits = raw.copy()
        self._penalise(work, work_logits)
        if params.embedding_bias is not None:
            work_logits += params.embedding_bias
        processors = params.logits_processor or []
        for processor in processors if isinstance(processors, list) else [processors]:
            processor(work.result.id, work_logits.reshape(1, 1, -1), [work.ids], None, work.result.id)
        if held_back and params.end_id is not None:
            work_logits[params.end_id] = -np.inf
        token = int(work_logits.argmax()) if params._greedy else self._sample(work, work_logits)
        if params.logprobs is None:
            return token, None
        exact = raw.astype(np.float64)
        exact -= np.log(np.exp(exact).sum())
        order = np.argsort(-exact, kind="stable")
        wanted = [int(i) for i in order[: params.logprobs]]
        ranks = {int(i): rank for rank, i in enumerate(order, 1)}
        ids = wanted if token in wanted else [*wanted, token]
        return token, {i: Logprob(float(exact[i]), ranks[i]) for i in ids}

    def _penalise(self, work: Work, logits: npt.NDArray[np.float32]) -> None:
        params = work.params
        if (repetition := params.repetition_penalty or 1.0) != 1.0:
            seen = np.unique(work.ids)
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
        if params.presence_penalty or params.frequency_penalty:
            counted = work.ids[min(params.prompt_ignore_length or 0, len(work.prompt)) :]
            seen, counts = np.unique(counted, return_counts=True)
            if seen.size:
                logits[seen] -= (params.presence_penalty or 0.0) + (params.frequency_penalty or 0.0) * counts

    def _sample(self, work: Work, logits: npt.NDArray[np.float32]) -> int:
        params = work.params
        scaled = logits / (params.temperature or 1.0)
        scaled -= scaled.max()
        weights = np.exp(scaled.astype(np.float64))
        if params.min_p:
            weights[weights < params.min_p] = 0.0
        order = np.argsort(-weights, kind="stable")
        if params.top_k:
            weights[order[params.top_k :]] = 0.0
        if params.top_p is not None and params.top_p < 1.0:
            reached = np.cumsum(weights[order]) / weights.sum()
            weights[order[int(np.searchsorted(reached, params.top_p)) + 1 :]] = 0.0
        seed = _mix((params.seed or 0) + 1 + work.sequence * 0x9E3779B97F4A7C15)
        number = _mix(seed + len(work.ids)) / 2.0**64
        return int(np.searchsorted(np.cumsum(weights), number * weights.sum(), side="right"))

    # --- out --------------------------------------------------------------------------------------------------------

    def _send(self, out: list[tuple[GenerationResult, Response]]) -> None:
        loops: dict[asyncio.AbstractEventLoop | None, list[tuple[GenerationResult, Response]]] = {}
        for result, response in out:
            loops.setdefault(result._loop, []).append((result, response))
        for loop, responses in loops.items():
            if loop is None:
                _deliver(responses)
                continue
            try:
                loop.call_soon_threadsafe(_deliver, responses)
            except RuntimeError:
                # The caller's loop is closed.
                return

    def _row(self, began: float, contexts: int, generations: int, ctx_tokens: int) -> None:
        if not self._args.enable_iter_perf_stats:
            return
        row = {
            "timestamp": time.strftime("%m-%d-%Y %H:%M:%S"),
            "iter": self._iteration,
            "iterLatencyMS": (time.perf_counter() - began) * 1000,
            "numNewActiveRequests": contexts,
            "numActiveRequests": len(self._running),
            "numQueuedRequests": len(self._waiting),
            "numCompletedRequests": 0,
            "maxNumActiveRequests": self._args.max_batch_size,
            "gpuMemUsage": 0,
            "cpuMemUsage": 0,
            "pinnedMemUsage": 0,
            "kvCacheStats": {
                "maxNumBlocks": self._blocks_total,
                "freeNumBlocks": self._blocks_total - self._blocks_used,
                "usedNumBlocks": self._blocks_used,
                "tokensPerBlock": self._per_block,
                "allocTotalBlocks": 0,
                "allocNewBlocks": 0,
                "reusedBlocks": 0,
                "missedBlocks": 0,
                "cacheHitRate": 0.0,
            },
            "inflightBatchingStats": {
                "numScheduledRequests": contexts + generations,
                "numContextRequests": contexts,
                "numGenRequests": generations,
                "numPausedRequests": 0,
                "numCtxTokens": ctx_tokens,
                "microBatchId": 0,
                "avgNumDecodedTokensPerIter": 1.0,
            },
        }
        if self._args.speculative_config is not None:
            row["specDecodingStats"] = {"numDraftTokens": 4 * generations, "numAcceptedTokens": generations}
        with self._stats_wake:
            self._stats.append(row)
            self._stats_wake.notify()

    def _emit_stored(self, stored: list[tuple[_Block, list[int]]], parent: int | None, work: Work) -> None:
        blocks = []
        for block, tokens in stored:
            row = {
                "type": "stored_block",
                "block_hash": block.hash,
                "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
                "cache_level": 0,
                "priority": 35,
            }
            if RELEASE >= (1, 3):
                row |= {"mm_keys": [], "cache_salt": work.salt or None, "lora_id": work.lora_id or None}
            blocks.append(row)
        self._emit("stored", {"parent_hash": parent, "blocks": blocks})

    def _emit(self, kind: str, data: dict[str, Any]) -> None:
        if not self._events_most:
            return
        event = {"event_id": self._event_id, "data": {"type": kind, **data}, "window_size": 4096}
        if RELEASE >= (1, 3):
            event["hash_algo"] = "v1_block_key"
        self._event_id += 1
        with self._events_wake:
            self._events.append(event)
            # The oldest are lost without a word: a gap in event_id is all that tells.
            while len(self._events) > self._events_most:
                self._events.popleft()
            self._events_wake.notify()


def parent_of(stored: list[tuple[_Block, list[int]]], work: Work, held: int) -> int | None:
    """The hash of the block before the first of these."""
    first = stored[0][0]
    chain = work.blocks
    for index, block in enumerate(chain):
        if block is first:
            return chain[index - 1].hash if index else None
    return chain[-1].hash if chain else None


def _deliver(responses: list[tuple[GenerationResult, Response]]) -> None:
    for result, response in responses:
        result._put(response)


def _block_key(tokens: list[int], parent: int, lora_id: int, salt: str) -> int:
    from blake3 import blake3

    from headrace.worker.engines.tensorrt_llm_events import v1_block_key

    salt_id = int.from_bytes(blake3(salt.encode()).digest()[:8], "little") if salt else 0
    return v1_block_key(tokens, parent, lora_id, salt_id)
