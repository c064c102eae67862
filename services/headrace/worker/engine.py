"""What an engine is, and the values that go in and out of it.

An engine takes requests and *yields step results*: after each of its iterations one value with all that the iteration
brought for all requests. It is called from the event loop's thread and never blocks it; it calls back (``on_step``,
``on_failure``) from a thread of its own, or from the loop.

The protocol is what engines of very different kinds have in common: one that batches here (llama.cpp, sim), and one
that batches inside itself and is driven through its own asynchronous API. It says nothing of batches, lanes or
kernels. What it leaves to others: validation (``validate.py``), streams and their bounds (``service.py``).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headrace.v1 import types_pb2, worker_pb2

Outcome = types_pb2.Outcome


@dataclass(frozen=True, slots=True)
class Sampling:
    """How ids are drawn; every field is resolved."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: One for each choice.
    seeds: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a choice ends."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a choice when drawn."""
        return self.stop_ids if self.ignore_eos else self.stop_ids | self.eos_ids


@dataclass(frozen=True, slots=True)
class Guided:
    """What an answer must look like: a kind of ``Capabilities.guided`` and its text (choices: a JSON list)."""

    kind: str
    text: str

    def as_regex(self) -> str:
        """Choices, for engines that know regular expressions. Not ``re.escape``: other dialects refuse some of it."""
        texts: list[str] = json.loads(self.text)
        return "|".join(
            "".join("\\" + letter if letter in r"\.^$*+?{}[]()|/" else letter for letter in text) for text in texts
        )


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Which log-probabilities go beside the ids."""

    enabled: bool = False
    top: int = 0
    prompt: bool = False


@dataclass(frozen=True, slots=True)
class Handoff:
    """Prefill and decode run apart: this is one of the two."""

    #: Of the KV that another worker has left, for an engine that fetches it itself; empty = compute the prompt and the
    #: first id, and leave it.
    reference: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, checked. ``deadline_s`` is on the engine's clock (``time.monotonic``)."""

    #: The service's number for it, unique while the process lives.
    key: int
    prompt_ids: list[int]
    stopping: Stopping
    sampling: Sampling = field(default_factory=Sampling)
    logprobs: LogprobOptions = field(default_factory=LogprobOptions)
    guided: Guided | None = None
    lora: str = ""
    cache_salt: bytes = b""
    request_class: types_pb2.RequestClass = types_pb2.REQUEST_CLASS_STANDARD
    deadline_s: float | None = None
    #: When its first id is due, on the same clock: whose turn it is.
    due_s: float = 0.0
    #: So many ids at the prompt's end are answer from an earlier attempt.
    resumed_tokens: int = 0
    reuse_prefix: bool = True
    handoff: Handoff | None = None

    @property
    def n(self) -> int:
        return len(self.sampling.seeds)


@dataclass(slots=True)
class TokenLogprobs:
    """Natural logarithms at one position: the drawn id's, and the likeliest ids'."""

    drawn: tuple[int, float]
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Finish:
    """How a choice ended, with the books of its request so far."""

    outcome: Outcome
    error: types_pb2.Error | None
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    kv_block_s: float


@dataclass(slots=True)
class Delta:
    """New ids of one choice; ``finish`` with the last."""

    key: int
    choice: int
    #: Index of ``ids[0]`` in this choice's answer of this attempt.
    first_index: int
    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: Finish | None = None
    #: With the request's first delta, or as soon as the engine has told.
    cached_prompt_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    #: Where the KV waits to be fetched, after a hand-off's first half.
    kv_reference: str = ""


@dataclass(frozen=True, slots=True)
class KvBlock:
    """The KV of a full block of a prompt whose answer is another worker's; None = it could not be read."""

    key: int
    index: int
    kv: bytes | None


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These blocks are held now, each the child of the one before it. ``parent`` 0 = none."""

    parent: int
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks are not held any more."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Nothing is held any more."""


BlockChange = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(frozen=True, slots=True)
class StepCost:
    """What an iteration computed and how long that took; cost models learn from it."""

    prefill_tokens: int
    decode_tokens: int
    #: Tokens in the KV of all that decoded.
    context_tokens: int
    duration_s: float
    #: Pairs of tokens that the prompts' attention looked at; 0 = not known.
    prefill_pairs: float = 0.0


@dataclass(slots=True)
class StepResult:
    """All that one iteration brought. ``cost`` is None when nothing was computed (a cancellation, a refusal)."""

    iteration: int
    deltas: list[Delta]
    cost: StepCost | None
    blocks: list[BlockChange]
    #: Of hand-offs, in order; those of the last step may follow the first id.
    kv: list[KvBlock] = field(default_factory=list)


class KvIntake(Protocol):
    """KV of one prompt that comes from another worker. Called on the event loop's thread."""

    #: Leading blocks that are held already.
    first_block: int

    def take(self, kv: bytes) -> Awaitable[bool]:
        """The next block's, to be kept for the request; returns at once, and what it returns is done when there may be
        more. False = no more is wanted."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What an iteration may take, as the scheduler has it; None = as it is."""

    #: Prompt tokens beside what decodes, at the beginning of a prompt; farther in, as many as take as long.
    chunk_tokens: int | None = None
    slots: int | None = None
    #: How many prompt tokens take as long as one pair of tokens in attention. Goes with ``chunk_tokens``, as all below.
    pair_tokens: float = 0.0
    #: Of ``chunk_tokens``, those of batch work while others decode; 0 = as many.
    batch_chunk_tokens: int = 0
    #: Sequences of batch work that decode beside others, in turns; 0 = all.
    batch_sequences: int = 0


class Engine(Protocol):
    """See the module's text. All methods are called from the event loop's thread and return at once, unless awaited."""

    @property
    def moves_kv(self) -> bool:
        """After ``start``: KV of hand-offs leaves by ``StepResult.kv`` and comes by ``intake``. Otherwise an engine
        that can hand over at all does so itself, by references of its own."""

    @property
    def kv_token_bytes(self) -> int:
        """KV of a token in bytes; 0 = not known."""

    async def intake(self, request: Request) -> KvIntake:
        """KV of its prompt comes from elsewhere, before the request itself. Only where ``moves_kv``."""

    async def start(self, on_step: Callable[[StepResult], None], on_failure: Callable[[str], None]) -> None:
        """Loads and warms up; returns when ready. Raises ModelError or EngineError. The callbacks come from any thread;
        ``on_failure`` is the last call ever: the engine is gone."""

    def describe(self) -> types_pb2.ModelDescription:
        """What it serves; ``model`` is left empty."""

    async def check(self, request: Request) -> types_pb2.Error | None:
        """Why it cannot do this request, or None. May take time (a grammar is compiled here) but holds nothing up."""

    def submit(self, request: Request) -> types_pb2.Error | None:
        """Takes a checked request; exactly one finish per choice will come. Or says why not, and nothing comes."""

    def cancel(self, key: int, choice: int | None, outcome: Outcome) -> None:
        """Ends it (or one choice) with that outcome within one iteration; its KV is free by then. Unknown keys are
        ignored: the end may have crossed the call."""

    def put_aside(self, key: int) -> None:
        """It stands still from the next iteration on and holds no slot and no KV. Unknown keys are ignored."""

    def go_on(self, key: int) -> None:
        """It goes on, if it was put aside."""

    def set_limits(self, limits: StepLimits) -> None:
        """From the next iteration on."""

    def load(self) -> worker_pb2.Load:
        """As of a moment ago; exact when idle. ``state`` and ``steps`` are left empty."""

    def step_age_s(self) -> float:
        """For how long the iteration under way has been running; 0 when none is. What the watchdog looks at."""

    async def stop(self) -> None:
        """Ends at once; what runs gets no finish. Call after draining. Idempotent."""
