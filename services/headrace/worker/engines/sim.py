"""The sim engine: no model; it waits what ``timing.py`` says and draws ids that follow from the prompt alone.

A step that follows another without a pause begins where that one was to end, not where this process came to it: what
composing, drawing and a busy machine take is not added to the engine's time, step for step.

Batch, KV, prefix reuse, cancellation, deadlines and all else are the real thing (``loop.py``, ``composer.py``), so that
the mesh around it meets what it would meet with a model. An id is a hash of the prompt, the choice's seed (when it
isn't greedy) and its index: the same request gives the same ids on every worker, in every batch, and resumed in the
middle.

Every sampling field is accepted. Guided kinds are checked for form only; log-probabilities are made up, finite and
consistent in themselves.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable
from collections.abc import Sequence as Ids

from headrace.config import WorkerConfig
from headrace.errors import EngineError
from headrace.models import ModelFolder
from headrace.v1 import types_pb2
from headrace.worker.composer import Chunk, Drawn, Limits, Sequence, Step
from headrace.worker.engine import Request, TokenLogprobs
from headrace.worker.kv import FillPlace
from headrace.worker.loop import Interrupted
from headrace.worker.timing import Timing
from headrace.worker.validate import malformed

_MASK = (1 << 64) - 1
#: Of a block's KV, which is none: only its name.
_KV_BYTES = 32


def _kv_of(ids: Ids[int]) -> bytes:
    return hashlib.blake2b(b",".join(b"%d" % token for token in ids), digest_size=_KV_BYTES).digest()


#: Who is later than that by the machine's fault does not catch up: it would look like a very fast engine.
_CATCH_UP_S = 0.5


def mix(value: int) -> int:
    """A good 64-bit hash of a 64-bit number (splitmix64's finisher)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class _Stream:
    """One sequence's ids, as a function of their index."""

    __slots__ = ("end_at", "key", "skipped")

    def __init__(self, sequence: Sequence, output_tokens: int) -> None:
        request = sequence.request
        # The answer of an earlier attempt is not a part of the prompt.
        own = len(request.prompt_ids) - request.resumed_tokens
        prompt = b",".join(b"%d" % token for token in request.prompt_ids[:own])
        seed = 0 if request.sampling.temperature == 0 else request.sampling.seeds[sequence.choice] + 1
        self.key = mix(zlib.crc32(prompt) ^ (own << 32) ^ mix(seed))
        self.skipped = request.resumed_tokens
        # The id with this index is the one that ends the answer.
        self.end_at = output_tokens - 1 if output_tokens else -1


class SimBackend:
    """See the module's text. ``wait`` returns early, with True, when it was broken off. ``cost_table``: the name of the
    timing's table, for whoever predicts."""

    def __init__(
        self,
        limits: Limits,
        timing: Timing,
        folder: ModelFolder | None = None,
        *,
        vocab_size: int = 32000,
        eos_ids: tuple[int, ...] = (0,),
        output_tokens: int = 0,
        cost_table: str = "",
        wait: Callable[[float], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._timing = timing
        self._folder = folder
        self._vocab_size = folder.vocab_size if folder else vocab_size
        self._eos_ids = folder.eos_ids if folder else eos_ids
        self._output_tokens = output_tokens
        #: See ``Backend``.
        self.kv_block_bytes = _KV_BYTES
        #: What was last computed on each lane.
        self._texts: dict[int, list[int]] = {}
        self._cost_table = cost_table
        self._clock = clock
        #: When the last step was to end.
        self._ends_s = 0.0
        self._broken_off = threading.Event()
        self._wait = wait or self._broken_off.wait

    def open(self) -> Limits:
        """Nothing to load."""
        return self._limits

    def describe(self) -> types_pb2.ModelDescription:
        """Of the folder whose tokenizer it pretends to have."""
        folder = self._folder
        return types_pb2.ModelDescription(
            engine="sim",
            engine_version="1",
            quantization="none",
            tokenizer_sha256=folder.tokenizer_sha256 if folder else "",
            template_sha256=folder.template_sha256 if folder else "",
            vocab_size=self._vocab_size,
            eos_ids=self._eos_ids,
            cost_table=self._cost_table,
            capabilities=types_pb2.Capabilities(
                guided=["json_schema", "json_object", "regex", "grammar", "choice"],
                logprobs=True,
                prompt_logprobs=True,
                kv_handoff=True,
                batch_invariant=True,
            ),
            kv_state_tag=f"sim-{self._limits.block_tokens}",
        )

    async def check(self, request: Request) -> types_pb2.Error | None:
        """The form of what guides it."""
        return malformed(request.guided) if request.guided is not None else None

    def read_block(self, lane: int, start: int, end: int) -> bytes:
        """Made up: the block's ids, so that what comes elsewhere can be held against them."""
        return _kv_of(self._texts[lane][start:end])

    def execute(self, step: Step) -> Drawn:
        """Waits, then draws."""
        for operation in step.operations:
            if isinstance(operation, FillPlace) and operation.kv != _kv_of(operation.ids):
                raise EngineError("KV came that is another block's")
        self._texts.update((chunk.lane.id, chunk.sequence.ids) for chunk in step.chunks)
        decoding = sum(len(sequence.ids) for sequence in step.decodes)
        chunks = [(chunk.count, chunk.start) for chunk in step.chunks]
        duration = self._timing.step(len(step.decodes), decoding, chunks)
        now = self._clock()
        begins_s = max(self._ends_s, now - _CATCH_UP_S) if step.follows else now
        self._ends_s = begins_s + duration
        if self._ends_s > now and self._wait(self._ends_s - now):
            self._broken_off.clear()
            self._ends_s = self._clock()
            raise Interrupted
        ids = [self._draw(sequence) for sequence in step.rows]
        drawn = Drawn(ids)
        if any(sequence.request.logprobs.enabled for sequence in step.rows):
            drawn.logprobs = {
                row: _made_up(ids[row], sequence.request.logprobs.top, self._vocab_size)
                for row, sequence in enumerate(step.rows)
                if sequence.request.logprobs.enabled
            }
        if any(chunk.all_logits for chunk in step.chunks):
            drawn.prompt_logprobs = {
                place: self._of_prompt(chunk) for place, chunk in enumerate(step.chunks) if chunk.all_logits
            }
        return drawn

    def release(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def interrupt(self) -> None:
        """Ends the wait under way."""
        self._broken_off.set()

    def close(self) -> None:
        """Nothing to free."""

    async def aclose(self) -> None:
        """Nothing to end."""

    def _draw(self, sequence: Sequence) -> int:
        stream: _Stream = sequence.sampler
        if stream is None:
            stream = sequence.sampler = _Stream(sequence, self._output_tokens)
        index = len(sequence.ids) - sequence.prompt_tokens + stream.skipped
        stopping = sequence.request.stopping
        if (
            index == stream.end_at
            and self._eos_ids
            and not stopping.ignore_eos
            and sequence.drawn >= stopping.min_tokens
        ):
            return self._eos_ids[0]
        token = mix(stream.key + index * 0x9E3779B97F4A7C15) % self._vocab_size
        # An end is never met by chance: its place is `output_tokens`, or the request's own limit.
        while token in self._eos_ids or token in stopping.stop_ids:
            token = (token + 1) % self._vocab_size
        return token

    def _of_prompt(self, chunk: Chunk) -> list[TokenLogprobs]:
        ids, top = chunk.sequence.request.prompt_ids, chunk.sequence.request.logprobs.top
        following = ids[chunk.start + 1 : chunk.start + chunk.count + 1]
        return [_made_up(token, top, self._vocab_size) for token in following]


def _made_up(token: int, top: int, vocab_size: int) -> TokenLogprobs:
    ranked = [((token + place) % vocab_size, -0.5 * (place + 1)) for place in range(max(top, 1))]
    return TokenLogprobs(ranked[0], ranked[:top])


def sim_limits(config: WorkerConfig, folder: ModelFolder) -> Limits:
    """As configured; nothing binds a simulated engine but its settings."""
    return Limits(
        slots=config.slots,
        kv_blocks=config.kv_tokens // config.block_tokens,
        block_tokens=config.block_tokens,
        context_tokens=min(config.context_tokens or folder.context_tokens, config.kv_tokens),
        chunk_tokens=config.chunk_tokens,
        idle_chunk_tokens=max(config.chunk_tokens, 512),
        max_waiting=config.max_waiting,
    )
