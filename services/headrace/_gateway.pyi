"""The Rust extension: what ``gateway_rs/src/python`` offers. Checked against the built module by stubtest.

Work that grows with its input is done with the interpreter's lock released.
"""

from array import array
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypeAlias, final

__all__ = [
    "BlockHub",
    "Certificates",
    "ChatTemplate",
    "CostTable",
    "Outcome",
    "PrefixIndex",
    "Router",
    "Scheduler",
    "StepBudget",
    "StopMatcher",
    "StreamDecoder",
    "Tokenizer",
    "Workload",
    "block_hashes",
    "cost_tables",
    "placement_policies",
    "route_agreement",
    "route_compare",
    "route_explain",
    "route_feature_names",
    "route_features",
    "route_interval",
    "simulate",
    "slots_to_stay",
]

_Effects: TypeAlias = tuple[
    list[tuple[int, bytes]],
    bool,
    list[tuple[int, str, str]],
    list[tuple[str, int, int, tuple[Any, ...], tuple[str, ...]]],
    list[str],
    bool,
]

@final
class BlockHub:
    """The cache's part of block news: follows workers, and lets schedulers and routers (watchers) follow.

    A *link* is a stream, by a number that is never used again. No clock: ``now_s`` is the caller's and never goes back.
    """

    def __new__(cls, max_bytes: int, *, root_share: float = 0.5, seed: int = 0) -> BlockHub:
        """One that knows nobody. ``seed`` should be secret: it decides which blocks share a bucket."""

    def worker_message(self, link: int, message: bytes) -> tuple[bytes | None, list[int]]:
        """A ``PublishBlocksRequest``: what to send back, and the watchers that there is news for.

        Raises ValueError when its stream must end for it."""

    def worker_lost(self, now_s: float, link: int) -> None: ...
    def watcher_message(self, now_s: float, link: int, message: bytes) -> None:
        """A ``WatchBlocksRequest``; there may be news for it now. Raises ValueError when its stream must end for it."""

    def watcher_lost(self, link: int) -> None: ...
    def news(self, link: int) -> tuple[bytes, bool]:
        """What a watcher is to hear next, and whether there is more: a ``WatchBlocksResponse``, empty when there is
        nothing."""

    def tick(self, now_s: float) -> list[int]:
        """Time has passed: the watchers that there is news for."""

    def next_wakeup(self) -> float | None:
        """When to tick at the latest; None = not before something happens."""

    def find(self, pool: str, hashes: Sequence[int]) -> list[tuple[str, str, int]]:
        """Who holds the beginning of a prefix, longest first: ``(worker_id, instance_id, blocks)``."""

    @property
    def holdings(self) -> int:
        """Blocks held, each counted for each of its holders."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the index."""

    @property
    def evicted(self) -> int:
        """Blocks given up for want of room."""

    @property
    def gaps(self) -> int:
        """Lost events."""

    @property
    def workers(self) -> int:
        """Workers whose stream is open."""

    @property
    def watchers(self) -> int:
        """Schedulers and routers that follow."""

@final
class Certificates:
    """A certificate, its key and the authority of peers, in PEM files that may change."""

    @staticmethod
    def load(
        certificate: str | PathLike[str], key: str | PathLike[str], authority: str | PathLike[str]
    ) -> Certificates:
        """Read and check the files. Raises ValueError, naming the setting."""

    def refresh(self) -> bool:
        """Look at the files; True when new ones are in force. Raises ValueError, once, when new ones cannot be used."""

    def current(self) -> tuple[bytes, bytes, bytes]:
        """Certificate, key and authority, as PEM, all of the same state of the files."""

@final
class PrefixIndex:
    """Who holds which prefix blocks, in bounded memory. Shareable between threads; workers are small numbers.

    Hashes in an ``array("Q")`` are copied as they are, which is much faster than a list."""

    def __new__(cls, max_bytes: int, *, root_share: float = 0.5, seed: int = 0) -> PrefixIndex: ...
    def store(self, worker: int, parent: int, hashes: Sequence[int] | array[int]) -> None:
        """The worker holds these blocks now, each the child of the one before it; parent 0 = a prompt begins there."""

    def remove(self, worker: int, hashes: Sequence[int]) -> None: ...
    def clear(self, worker: int) -> None: ...
    def find(self, hashes: Sequence[int] | array[int]) -> list[tuple[int, int]]:
        """Workers that hold the first block, each with how many leading blocks it holds without a gap."""

    def __len__(self) -> int: ...
    @property
    def holdings(self) -> int:
        """Blocks held, each counted for each of its holders."""

    @property
    def memory_bytes(self) -> int:
        """Memory allocated."""

@final
class Router:
    """The data plane of one router process."""

    @staticmethod
    def start(config_json: str) -> Router:
        """Open both ports and the links. Raises ValueError when a setting is wrong."""

    @property
    def http_address(self) -> str: ...
    @property
    def grpc_address(self) -> str: ...
    def set_aliases(self, aliases_json: str) -> None:
        """Put these aliases in the place of the former ones: a JSON list. Raises ValueError when a setting is wrong."""

    def show_batches(self, standing_json: str) -> None:
        """Show this of batches on the page of metrics: a JSON object. Raises ValueError when it is none."""

    def drain(self) -> None:
        """Take nothing new and wait for open streams, within the grace of the configuration."""

    def stop(self) -> None:
        """End what still runs and close the ports."""

@final
class Scheduler:
    """The scheduler behind its wire messages. No clock: ``now_s`` is the caller's and never goes back.

    What something led to comes as ``(sends, fleet_changed, ends, spans, notes, ledger)``:

    - ``sends``: ``(link, message)``; those to one router's stream may be concatenated into one message;
    - ``fleet_changed``: all routers are owed ``fleet_view()``;
    - ``ends``: ``(link, status, message)`` of streams that must end after what was sent;
    - ``spans``: what began and ended of asks whose trace is recorded, ``(kind, link, ask, attributes, context)`` with
      ``began, (request_id, class, prompt_tokens), (traceparent, tracestate)``, ``granted, (worker_id, queue_s)``,
      ``rejected, (code,)`` and ``cancelled, ()``;
    - ``notes``: for the log;
    - ``ledger``: there is something for ``ledger_take``.
    """

    def __new__(
        cls,
        policy_json: str,
        *,
        wait_buckets_s: Sequence[float],
        seed: int,
        now_s: float,
        first_lease: int,
        max_index_bytes: int = 268_435_456,
    ) -> Scheduler:
        """One that knows nobody. ``policy_json`` sets what differs from the defaults. Raises ValueError."""

    def router_message(self, now_s: float, link: int, message: bytes) -> _Effects:
        """A ``PlaceRequest``. Raises ValueError when its stream must end for it."""

    def router_lost(self, now_s: float, link: int) -> _Effects: ...
    def worker_message(self, now_s: float, link: int, message: bytes) -> _Effects:
        """A ``JoinRequest``. Raises ValueError when its stream must end for it."""

    def worker_lost(self, now_s: float, link: int) -> _Effects: ...
    def tick(self, now_s: float) -> _Effects:
        """Time has passed."""

    def next_wakeup(self) -> float | None:
        """When to tick at the latest; None = not before something happens."""

    def open_books(self, now_s: float, books_json: str, tenants_json: str, kept: list[tuple[Any, ...]]) -> None:
        """Before anything else. ``books_json`` has ``keeps`` (there is a ledger), ``shared`` (limits are drawn),
        ``unix_offset_s``, ``worker_hour``, ``worker_hours`` by pool, and ``measured``; ``tenants_json`` is that of
        ``set_tenants``; ``kept`` are the open bookings of the last start. Raises ValueError."""

    def set_tenants(self, now_s: float, tenants_json: str) -> None:
        """``{name: {"limits": {...}, "weight": 1.0}}`` of all tenants. Raises ValueError."""

    def ledger_take(self, most: int) -> list[tuple[Any, ...]]:
        """What the ledger has to do next, in order; the same until ``ledger_done``. By their first word:

        - ``row`` and ``keep``: the columns of a row and of an open booking, as ``headrace.ledger.store`` has them;
        - ``forget, booking``: it is open no more;
        - ``look, tenant, limit, id, from_ms, to_ms, want, at_most``: answer what rows have spent, and what is drawn;
        - ``return, tenant, limit, id, drawn``: only so much is drawn now."""

    def ledger_done(self, now_s: float, answers: list[tuple[int, int]]) -> _Effects:
        """All of it is durable. For a ``row`` the first number is whether it was new."""

    def measured(self) -> dict[str, tuple[float, float]]:
        """Seconds for a token of a prompt and of an answer, by pool."""

    def blocks_known(self) -> bytes:
        """The first message of a stream that follows the cache's block news: a ``WatchBlocksRequest``."""

    def blocks_message(self, message: bytes) -> bytes | None:
        """A ``WatchBlocksResponse``; what to send back when something was missing.

        Raises ValueError when its stream must end for it."""

    def blocks_away(self) -> None:
        """The cache has been away for long: what is known of blocks is forgotten."""

    def fleet_view(self) -> bytes:
        """What routers are told of the fleet: a ``PlaceResponse``."""

    def fleet(self, now_s: float) -> bytes:
        """The fleet as believed: a ``GetFleetResponse``."""

    def stats(self) -> str:
        """Figures for metrics, as JSON."""

@final
class Tokenizer:
    """One model's tokenizer, exact to Hugging Face ``tokenizers``. Shareable between threads."""

    @staticmethod
    def from_file(path: str | PathLike[str]) -> Tokenizer:
        """Load a ``tokenizer.json``. Raises ValueError or OSError."""

    @staticmethod
    def from_json(json: str) -> Tokenizer:
        """Load the text of a ``tokenizer.json``. Raises ValueError."""

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Token ids; without ``specials``, special tokens in the text are plain text."""

    def encode_batch(self, texts: Sequence[str], *, specials: bool = True, threads: int = 0) -> list[list[int]]:
        """`encode` for each text, on so many threads (0: one for each CPU)."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...
    def stream_decoder(self, skip_special: bool = True, *, continuing: bool = False) -> StreamDecoder:
        """A decoder for one answer; `continuing` after a prompt keeps a space at its start."""

    def token_bytes(self, id: int) -> bytes | None: ...
    def token_str(self, id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def is_special(self, id: int) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hash(self) -> str:
        """SHA-256 of the file, in hexadecimal digits."""

    @property
    def plan(self) -> str:
        """``fast:<name>``, or ``reference:<reason>``."""

@final
class StreamDecoder:
    """Ids to text, one at a time; never a part of a character."""

    def push(self, id: int) -> str: ...
    def push_all(self, ids: Sequence[int]) -> str:
        """`push` for each id; the texts together."""

    def finish(self) -> str: ...

@final
class ChatTemplate:
    """A model's chat template."""

    def __new__(cls, source: str, bos_token: str = "", eos_token: str = "") -> ChatTemplate: ...
    def render(
        self,
        messages_json: str,
        *,
        tools_json: str | None = None,
        template_kwargs_json: str | None = None,
        add_generation_prompt: bool = True,
        now_s: int = 0,
        max_bytes: int = 16_777_216,
    ) -> str:
        """The prompt text of messages. Raises ValueError with what the template or the checks refuse."""

    def encode(
        self,
        tokenizer: Tokenizer,
        messages_json: str,
        *,
        tools_json: str | None = None,
        template_kwargs_json: str | None = None,
        add_generation_prompt: bool = True,
        typed_specials: bool = False,
        now_s: int = 0,
        max_bytes: int = 16_777_216,
    ) -> list[int]:
        """The ids of that text. Special tokens written in the messages stay text, unless ``typed_specials``."""

@final
class StopMatcher:
    """Finds stop strings in text that comes in pieces."""

    def __new__(cls, stops: Sequence[str], include_stop: bool = False) -> StopMatcher: ...
    def push(self, text: str) -> str:
        """What is safe to show."""

    def finish(self) -> str:
        """What was held."""

    @property
    def stopped(self) -> int | None:
        """The place in the list of the stop string that ended the answer."""

def block_hashes(
    ids: Sequence[int],
    block_tokens: int,
    model: str,
    adapter: str = "",
    salt: bytes | None = None,
    parent: int = 0,
) -> list[int]:
    """Chained names (XXH3-64) of the full prefix blocks of ``ids``; ``parent`` continues a chain."""

@final
class CostTable:
    """Measured step times of one model on one kind of worker."""

    @staticmethod
    def named(name: str) -> CostTable:
        """A built-in one. Raises ValueError, which says which there are."""

    @staticmethod
    def parse(json: str) -> CostTable:
        """One of one's own. Raises ValueError."""

    def to_json(self) -> str: ...
    def step_s(self, decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]] = ...) -> float:
        """Seconds that a step takes: sequences that decode, the tokens in their KV, and (tokens, tokens before them) of
        each prompt chunk."""

    @property
    def kv_tokens(self) -> int:
        """KV that one worker holds."""

@final
class StepBudget:
    """What of prompts one step of a worker may take, in tokens without attention. The simulator's workers share it.

    ``told``, ``own`` and ``idle`` are prompt tokens at a prompt's beginning: as the scheduler last said, the worker's
    own beside running streams, and where little runs beside what begins. ``pair_tokens``: of attention, 0 = not known.
    """

    def __new__(
        cls, told: int, own: int, idle: int, pair_tokens: float, decoding: int, beginning: int
    ) -> StepBudget: ...
    @property
    def open(self) -> bool:
        """Whether another part of a prompt may begin."""

    def take(self, left: int, computed: int) -> int:
        """The next part: of ``left`` tokens behind ``computed`` of the same prompt; at least 1 while it is open."""

@final
class Workload:
    """Requests in the order of their arrival: of a trace, or made up. Readers raise ValueError, naming the line."""

    @staticmethod
    def mooncake(text: str) -> Workload: ...
    @staticmethod
    def azure(text: str) -> Workload: ...
    @staticmethod
    def measured(text: str) -> Workload: ...
    @staticmethod
    def servegen(clients: Sequence[tuple[str, str, str]], start_s: float, duration_s: float, seed: int) -> Workload:
        """ServeGen's clients, each a tenant: (name, text of the trace file, text of the data set)."""

    @staticmethod
    def synthetic(settings_json: str, seed: int) -> Workload: ...
    def with_sessions(self) -> Workload:
        """The same with conversations found, for closed loops."""

    def first(self, requests: int) -> Workload:
        """The first so many requests."""

    def __len__(self) -> int: ...
    @property
    def span_s(self) -> float: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def tenants(self) -> list[str]: ...

@final
class Outcome:
    """What a simulation showed."""

    def summary_json(self, *, request_class: str | None = None, tenant: int | None = None) -> str:
        """Figures as a JSON object, over all requests, or those of a class or tenant."""

    def column(self, name: str) -> list[float]:
        """A value of each request, in the workload's order; NaN where it has none. Raises ValueError."""

    def __len__(self) -> int: ...

def cost_tables() -> str:
    """The built-in cost tables, as a JSON array."""

def placement_policies() -> list[str]:
    """Names of the placement rules."""

def simulate(workload: Workload, settings_json: str, progress: Callable[[int, int], object] | None = None) -> Outcome:
    """Run a workload. ``progress`` is called with requests ended and requests in all; what it raises ends the run.

    Raises ValueError when a setting is wrong; KeyboardInterrupt within moments of Ctrl-C.
    """

def route_feature_names() -> list[str]:
    """What is seen of a request, in order."""

def route_features(body: str) -> list[float]:
    """The features of a request: the JSON body of a chat or a completion. Raises ValueError."""

def route_agreement(classifier: str, features: list[float]) -> float:
    """The agreement that a classifier (its file's text) expects. Raises ValueError."""

def route_compare(measure: str, one: str, other: str) -> float:
    """How far two answers agree, from 0 to 1; ``measure`` is "words" or "exact". Raises ValueError."""

def route_interval(count: int, sum: float) -> tuple[float, float, float]:
    """The mean of so many numbers from 0 to 1 with that sum, and its interval of 95 %: (mean, low, high)."""

def route_explain(alias_json: str, body: str, quality: str) -> str:
    """Where a request of an alias would go, with every variant there and nothing measured: JSON. Raises ValueError."""

def slots_to_stay(slots: int) -> int:
    """Of a worker's or a pool's slots, those that overdue batch work may keep: one in sixteen, at least one."""
