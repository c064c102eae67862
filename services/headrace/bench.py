"""A load generator for the native gRPC API and for any OpenAI-shaped HTTP API: how soon, how fast, how much.

Two ways to load: a closed loop (``concurrency`` clients, each sends its next request when the last is answered) and an
open one (``rate``: requests arrive by a Poisson process whatever became of those before). Prompts, arrivals and so the
whole run are drawn from one seed. What is measured, for each request:

- *TTFT*: from the moment of sending to the first text.
- *TPOT*: from the first text to the last, over the tokens after the first.

Tokens are the server's own count where it gives one. A warm-up goes first and is not counted. Answers are of a fixed
length (``ignore_eos``) and never come from the response cache unless asked for, as a run is to load the engine.

Its place: ``headrace bench`` and the scripts in ``benchmarks/``. What it leaves to others: the progress bar and the
words of the report (``cli.py``), HTTP on the wire (``sse.py``). It is one process on one core; to load with more than
that core reads, run several.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import random
import urllib.parse
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from headrace.client import Client, ClientError, GenerateOptions, bearer, error_of, generate_request
from headrace.config import split_address
from headrace.errors import ConfigError, HeadraceError
from headrace.serving import CHANNEL_OPTIONS, channel
from headrace.sse import Connection, EventParser, HttpError
from headrace.tls import ClientTls

#: In an open loop requests pile up when the server falls behind; past this many, arrivals are counted and not sent.
MAX_OPEN_REQUESTS = 4096

#: A warm-up answer: enough to open the connection and touch every stage.
_WARMUP_TOKENS = 4
#: Calls that share a connection: one HTTP/2 connection is a bottleneck of its own long before the router is.
_CALLS_PER_CHANNEL = 16
_MAX_CHANNELS = 16


CLASSES = ("interactive", "standard", "batch")


class BenchError(HeadraceError):
    """The run could not begin: nothing answers, or every request of the warm-up failed."""


@dataclass(frozen=True)
class Plan:
    """What to send."""

    target: str = "grpc://127.0.0.1:8081"
    #: Clients of the closed loop; with ``rate`` the most requests open at once. None = 8, or MAX_OPEN_REQUESTS.
    concurrency: int | None = None
    #: None = until the duration is over; without that, 16 a client and 64 at least.
    requests: int | None = None
    duration_s: float | None = None
    prompt_tokens: int = 128
    output_tokens: int = 64
    #: So many tokens at the prompt's beginning are one of ``shared_prefixes``, drawn for each request.
    shared_prefix: int = 0
    shared_prefixes: int = 1
    #: Arrivals a second of the open loop; None = closed loop.
    rate: float | None = None
    model: str = ""
    seed: int = 0
    #: None = one for each client, 16 at most.
    warmup: int | None = None
    #: Send the prompt as a user's message rather than as text to continue.
    chat: bool = False
    #: None = the model's own.
    temperature: float | None = None
    #: "interactive", "standard" or "batch"; empty = the server's own default. Only headrace's routers know it.
    request_class: str = ""
    #: Answers may come from the response cache.
    use_cache: bool = False
    #: KV of earlier prompts may be reused. Without it, headrace's routers are told so; others may not know the field.
    reuse_prefix: bool = True
    #: A request that takes longer is given up, as error "timeout".
    timeout_s: float = 600.0
    #: For grpcs:// and https:// targets, and for those without a scheme; None = the public authorities, and plain text.
    tls: ClientTls | None = None

    def __post_init__(self) -> None:
        bounds: tuple[tuple[str, float | None, float], ...] = (
            ("concurrency", self.concurrency, 1),
            ("requests", self.requests, 1),
            ("prompt-tokens", self.prompt_tokens, 1),
            ("output-tokens", self.output_tokens, 1),
            ("shared-prefix", self.shared_prefix, 0),
            ("shared-prefixes", self.shared_prefixes, 1),
            ("warmup", self.warmup, 0),
        )
        for name, value, least in bounds:
            if value is not None and value < least:
                raise ConfigError(f"--{name}: must be at least {least}, got {value}")
        if self.request_class not in ("", *CLASSES):
            raise ConfigError(f"--class: must be one of {', '.join(CLASSES)}, got {self.request_class!r}")
        for name, value in (("rate", self.rate), ("duration", self.duration_s), ("timeout", self.timeout_s)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"--{name}: must be more than 0, got {value}")
        if self.shared_prefix > self.prompt_tokens:
            raise ConfigError(f"--shared-prefix: must be at most --prompt-tokens ({self.prompt_tokens})")

    @property
    def clients(self) -> int:
        """Requests open at once, at most."""
        return self.concurrency or (8 if self.rate is None else MAX_OPEN_REQUESTS)

    @property
    def request_count(self) -> int | None:
        """Requests to send; None = until the duration is over."""
        if self.requests is not None or self.duration_s is not None:
            return self.requests
        return max(64, 16 * self.clients) if self.rate is None else 256

    @property
    def warmup_count(self) -> int:
        """Requests of the warm-up."""
        return min(self.clients, 16) if self.warmup is None else self.warmup


@dataclass
class Sample:
    """One request. Times are of the loop's clock, in seconds."""

    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    done_s: float = 0.0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    #: As far as seen; at the end the server's own count.
    output_tokens: int = 0
    finished: bool = False
    #: Its kind: a code of the closed list, "http_502", "connection", "timeout", "incomplete".
    error: str | None = None
    message: str = ""

    def text(self, now_s: float, tokens: int) -> None:
        """Some text came."""
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        self.output_tokens += tokens

    def fail(self, kind: str, message: str) -> None:
        """It ended badly."""
        self.error, self.message = kind, message


class Target(Protocol):
    """What is loaded, over one protocol."""

    async def prepare(self) -> str:
        """Find the model to ask and return its name. Raises HeadraceError."""

    async def count_tokens(self, text: str) -> int | None:
        """How many tokens a text has; None when the server doesn't say."""

    async def run(self, prompt: str, output_tokens: int, sample: Sample) -> None:
        """One request. What goes wrong is put into the sample; only cancellation is raised."""

    async def close(self) -> None:
        """Drop all connections."""


class GrpcTarget:
    """The native gRPC API."""

    def __init__(self, plan: Plan, address: str, tls: ClientTls | None = None) -> None:
        self._plan = plan
        wanted = math.ceil(plan.clients / _CALLS_PER_CHANNEL)
        # Without a pool of its own each channel would share one connection.
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self._channels = [channel(address, tls, options) for _ in range(min(wanted, _MAX_CHANNELS))]
        self._clients = [Client(channel=channel) for channel in self._channels]
        self._turn = 0
        self._model = plan.model

    async def prepare(self) -> str:
        self._model = self._plan.model or await self._clients[0].default_model()
        return self._model

    async def count_tokens(self, text: str) -> int | None:
        try:
            return len(await self._clients[0].tokenize(text=text, model=self._model))
        except ClientError as error:
            # A model with a very small context says no to so many words; then a word counts as a token.
            if error.code in ("context_length_exceeded", "too_large"):
                return None
            raise

    async def run(self, prompt: str, output_tokens: int, sample: Sample) -> None:
        plan = self._plan
        options: GenerateOptions = {
            "model": self._model,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "bypass_cache": not plan.use_cache,
            "bypass_prefix_cache": not plan.reuse_prefix,
        }
        if plan.chat:
            options["messages"] = [{"role": "user", "content": prompt}]
        else:
            options["text"] = prompt
        if plan.temperature is not None:
            options["temperature"] = plan.temperature
        if plan.request_class:
            options["request_class"] = plan.request_class  # type: ignore[typeddict-item]
        request = generate_request(options)
        self._turn = (self._turn + 1) % len(self._clients)
        # The stub itself: making typed events of each message would take longer than all the rest.
        client = self._clients[self._turn]
        now_s = asyncio.get_running_loop().time
        sample.sent_s = now_s()
        try:
            async for message in client.stub.Generate(request, timeout=plan.timeout_s, metadata=client.metadata):
                _take_message(message, now_s(), sample)
        except grpc.aio.AioRpcError as error:
            failure = error_of(error)
            # A deadline of the server's own can't have passed: none was asked for.
            kind = "timeout" if failure.code == "deadline_exceeded" else failure.code
            sample.fail(kind, str(failure))
        sample.done_s = now_s()
        if not sample.finished and sample.error is None:
            sample.fail("incomplete", "the stream ended without a finish")

    async def close(self) -> None:
        for each in self._channels:
            await each.close(None)


def _take_message(message: Any, now_s: float, sample: Sample) -> None:
    kind = message.WhichOneof("event")
    if kind == "delta":
        delta = message.delta
        if delta.ids or delta.text:
            sample.text(now_s, len(delta.ids))
    elif kind == "finish":
        sample.finished = True
    elif kind == "usage":
        usage = message.usage.usage
        sample.prompt_tokens = usage.prompt_tokens
        sample.cached_prompt_tokens = usage.cached_prompt_tokens
        sample.output_tokens = usage.completion_tokens


class HttpTarget:
    """``/v1/completions`` or ``/v1/chat/completions`` as a stream of server-sent events."""

    def __init__(self, plan: Plan, host: str, port: int, path: str, tls: ClientTls | None = None) -> None:
        self._plan = plan
        self._host = host
        self._port = port
        self._base = path
        self._tls = tls
        self._context = tls.ssl_context() if tls is not None else None
        self._model = plan.model
        authorization = bearer()
        self._headers: tuple[str, ...] = (f"Authorization: {authorization}",) if authorization else ()
        if plan.request_class:
            self._headers += (f"x-headrace-class: {plan.request_class}",)
        #: Connections between requests. Never more than requests were open at once.
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()

    async def prepare(self) -> str:
        if not self._model:
            status, answer = await self._ask("GET", "/v1/models")
            try:
                self._model = str(answer["data"][0]["id"])
            except (TypeError, LookupError) as error:
                raise BenchError(f"/v1/models lists no model (status {status}); name one with --model") from error
        return self._model

    async def count_tokens(self, text: str) -> int | None:
        # "prompt" is ours and vLLM's, "content" llama-server's.
        body = {"model": self._model, "prompt": text, "content": text, "add_special_tokens": False}
        status, answer = await self._ask("POST", "/tokenize", body)
        tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        return len(tokens) if isinstance(tokens, list) else None

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = self._take()
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                text = json.dumps(body).encode() if body else b""
                await connection.send(method, self._base + path, text, self._headers)
                answer = await connection.body()
        except (HttpError, OSError, TimeoutError) as error:
            await self._drop(connection)
            scheme = "http" if self._tls is None else "https"
            raise BenchError(f"{scheme}://{self._host}:{self._port}{path}: {_reason(error)}") from error
        self._idle.append(connection)
        return connection.response.status, _json(answer)

    async def run(self, prompt: str, output_tokens: int, sample: Sample) -> None:
        path, body = self._request(prompt, output_tokens)
        connection = self._take()
        now_s = asyncio.get_running_loop().time
        whole = False
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                sample.sent_s = now_s()
                await connection.send("POST", path, body, self._headers)
                if connection.response.status == 200:
                    await self._read_stream(connection, sample)
                else:
                    sample.fail(*_http_failure(connection.response.status, await connection.body()))
                whole = True
        except TimeoutError:
            sample.fail("timeout", f"not answered within {self._plan.timeout_s} s")
        except (HttpError, OSError) as error:
            sample.fail("connection", _reason(error))
        finally:
            if whole:
                self._idle.append(connection)
            else:
                await self._drop(connection)
        sample.done_s = now_s()

    def _request(self, prompt: str, output_tokens: int) -> tuple[str, bytes]:
        plan = self._plan
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not plan.use_cache:
            body["bypass_cache"] = True
        if not plan.reuse_prefix:
            body["bypass_prefix_cache"] = True
        if plan.temperature is not None:
            body["temperature"] = plan.temperature
        if plan.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        path = "/v1/chat/completions" if plan.chat else "/v1/completions"
        return self._base + path, json.dumps(body).encode()

    async def _read_stream(self, connection: Connection, sample: Sample) -> None:
        now_s = asyncio.get_running_loop().time
        parser = EventParser()
        async for piece in connection.pieces():
            for event in parser.feed(piece):
                _take_event(event, now_s(), sample)
        if not sample.finished and sample.error is None:
            kind = connection.response.headers.get("content-type", "no content type")
            sample.fail("incomplete", f"the stream ({kind}) ended without [DONE]")

    def _take(self) -> Connection:
        if self._idle:
            return self._idle.pop()
        name = self._tls.server_name if self._tls is not None else ""
        connection = Connection(self._host, self._port, tls=self._context, server_name=name)
        self._all.add(connection)
        return connection

    async def _drop(self, connection: Connection) -> None:
        self._all.discard(connection)
        await connection.close()

    async def close(self) -> None:
        for connection in tuple(self._all):
            await self._drop(connection)


def _take_event(event: str, now_s: float, sample: Sample) -> None:
    if event == "[DONE]":
        sample.finished = True
        return
    data = _json(event)
    if isinstance(data, dict) and data.get("error"):
        sample.fail(*_failure(data, "failed"))
        return
    try:
        _take_chunk(data, now_s, sample)
    except (TypeError, AttributeError):
        sample.fail("incomplete", f"an event is not a chunk of a completion: {event[:80]}")


def _take_chunk(data: Any, now_s: float, sample: Sample) -> None:
    for choice in data.get("choices") or ():
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            # Some token at least; the usage at the end says how many.
            sample.text(now_s, 1)
    usage = data.get("usage")
    if usage:
        sample.prompt_tokens = usage.get("prompt_tokens", 0)
        sample.output_tokens = usage.get("completion_tokens", sample.output_tokens)
        sample.cached_prompt_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _http_failure(status: int, body: bytes) -> tuple[str, str]:
    return _failure(_json(body), f"http_{status}")


def _failure(data: Any, otherwise: str) -> tuple[str, str]:
    """Kind and message of an OpenAI-shaped error."""
    error = data.get("error") if isinstance(data, dict) else None
    if not isinstance(error, dict):
        return otherwise, str(error or otherwise)
    kind = next((word for word in (error.get("code"), error.get("type")) if isinstance(word, str) and word), otherwise)
    return kind, str(error.get("message", ""))


def _json(text: bytes | str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def make_target(plan: Plan) -> Target:
    """The target that an address names: ``grpc://host:port`` (or just ``host:port``) or ``http://host:port[/path]``.

    ``grpcs`` and ``https`` speak TLS.
    """
    scheme, separator, _ = plan.target.partition("://")
    if not separator:
        scheme = "grpc" if plan.tls is None else "grpcs"
    url = urllib.parse.urlsplit(plan.target if separator else f"grpc://{plan.target}")
    if scheme not in ("grpc", "grpcs", "http", "https"):
        raise ConfigError(
            f"--target: expected grpc://host:port or http://host:port (with TLS grpcs, https), got {plan.target!r}"
        )
    tls = (plan.tls or ClientTls()) if scheme.endswith("s") else None
    if scheme.startswith("grpc"):
        split_address(url.netloc, "--target")
        return GrpcTarget(plan, url.netloc, tls)
    usual_port = 80 if tls is None else 443
    has_port = ":" in url.netloc.rpartition("]")[2]
    host, port = split_address(url.netloc if has_port else f"{url.netloc}:{usual_port}", "--target")
    # SDKs are given the address with /v1; it comes with the paths here.
    return HttpTarget(plan, host, port, url.path.rstrip("/").removesuffix("/v1"), tls)


_WORD_TEXT = """
the of and to in is was for that on with as by at from it an be are this which or his had not but have first one also
were after new been who their two her has they more all when other there can its time people year over only into some
could them than most city world any many part both state being now such where between these under during while through
before used may well about made against three out up no school work life day war government high group family series
second system use number name known music since until national found end place called small large area long set line
home public house game team season play won album film song book history early later however around several same own
still each back down left right power water land sea air light fire food
"""
#: Common words: one token each in any vocabulary of a usual size.
WORDS = tuple(_WORD_TEXT.split())


@dataclass(frozen=True)
class Prompts:
    """Prompts of a given length, drawn from a seed: prompt *i* is the same in every run."""

    seed: int
    tokens: int
    shared_tokens: int
    #: Of the words used here, in the model's vocabulary.
    tokens_per_word: float = 1.0
    #: Different beginnings.
    prefixes: int = 1

    def prompt(self, name: int | str) -> str:
        """The prompt of that name."""
        words = max(1, round(self.tokens / self.tokens_per_word))
        shared = min(words, round(self.shared_tokens / self.tokens_per_word))
        return " ".join((*self._draw(f"shared {self.prefix(name)}", shared), *self._draw(name, words - shared)))

    def prefix(self, name: int | str) -> int:
        """Which of the beginnings that prompt has: drawn, as a turn could be in step with how requests are placed."""
        return random.Random(f"{self.seed}/{name}/prefix").randrange(self.prefixes)

    def _draw(self, name: int | str, count: int) -> list[str]:
        return random.Random(f"{self.seed}/{name}").choices(WORDS, k=count)


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """When requests arrive, in seconds from the start: a Poisson process."""
    draw = random.Random(f"{seed}/arrivals")
    at_s = 0.0
    while True:
        at_s += draw.expovariate(rate)
        yield at_s


@dataclass(frozen=True)
class Spread:
    """The distribution of one measure."""

    p50: float
    p90: float
    p99: float
    mean: float
    max: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None when there is no value."""
        if not values:
            return None
        ordered = sorted(values)
        return Spread(
            percentile(ordered, 0.5),
            percentile(ordered, 0.9),
            percentile(ordered, 0.99),
            math.fsum(ordered) / len(ordered),
            ordered[-1],
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the (sorted, not empty) values lies, interpolated between neighbours."""
    at = (len(ordered) - 1) * share
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True)
class Report:
    """What a run measured. Spreads are over the requests that succeeded; None when there was none."""

    target: str
    model: str
    concurrency: int
    rate: float | None
    seed: int
    #: Of the measured part, up to the last answer.
    duration_s: float
    #: Sent and answered, well or badly.
    requests: int
    succeeded: int
    #: Under way when the run was stopped.
    unfinished: int
    errors: dict[str, int]
    #: One message for each kind of error.
    error_examples: dict[str, str]
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    latency_s: Spread | None
    interrupted: bool

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON; times to the microsecond."""
        return {name: _rounded(value) for name, value in dataclasses.asdict(self).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return {key: _rounded(part) for key, part in value.items()} if isinstance(value, dict) else value


@dataclass
class Tally:
    """Samples to a report. It keeps three numbers a request, not the request."""

    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    latency_s: array[float] = field(default_factory=lambda: array("d"))
    succeeded: int = 0
    unfinished: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    last_s: float = 0.0

    @property
    def answered(self) -> int:
        """Requests that ended, well or badly."""
        return self.succeeded + self.errors.total()

    def add(self, sample: Sample) -> None:
        """A request that ended."""
        self._count(sample)
        if sample.error is not None:
            self.errors[sample.error] += 1
            self.examples.setdefault(sample.error, sample.message)
            return
        self.succeeded += 1
        self.latency_s.append(sample.done_s - sample.sent_s)
        if sample.first_s is not None:
            self.ttft_s.append(sample.first_s - sample.sent_s)
            if sample.output_tokens > 1:
                self.tpot_s.append((sample.last_s - sample.first_s) / (sample.output_tokens - 1))

    def add_unfinished(self, sample: Sample) -> None:
        """A request that was under way when the run was stopped; what it had brought counts for the throughput."""
        self._count(sample)
        self.unfinished += 1

    def add_unsent(self) -> None:
        """An arrival that was not sent, as too many requests were open."""
        self.errors["not_sent"] += 1
        self.examples.setdefault("not_sent", "as many requests were open as --concurrency allows")

    def _count(self, sample: Sample) -> None:
        self.prompt_tokens += sample.prompt_tokens
        self.cached_prompt_tokens += sample.cached_prompt_tokens
        self.output_tokens += sample.output_tokens
        self.last_s = max(self.last_s, sample.done_s, sample.last_s)

    def report(self, plan: Plan, model: str, started_s: float, *, interrupted: bool) -> Report:
        """What was measured since then."""
        elapsed_s = max(self.last_s - started_s, 0.0)
        per_s = 1.0 / elapsed_s if elapsed_s > 0 else 0.0
        return Report(
            target=plan.target,
            model=model,
            concurrency=plan.clients,
            rate=plan.rate,
            seed=plan.seed,
            duration_s=elapsed_s,
            requests=self.answered,
            succeeded=self.succeeded,
            unfinished=self.unfinished,
            errors=dict(self.errors.most_common()),
            error_examples=self.examples,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            output_tokens=self.output_tokens,
            output_tokens_per_s=self.output_tokens * per_s,
            requests_per_s=self.succeeded * per_s,
            ttft_s=Spread.of(self.ttft_s),
            tpot_s=Spread.of(self.tpot_s),
            latency_s=Spread.of(self.latency_s),
            interrupted=interrupted,
        )


#: Told after each request: requests ended and output tokens so far.
Progress = Callable[[int, int], None]


async def run(
    plan: Plan,
    *,
    stop: asyncio.Event | None = None,
    progress: Progress | None = None,
    target: Target | None = None,
) -> Report:
    """Warm up, load, report. ``stop`` ends it early with what was measured so far.

    Raises BenchError when the target can't be loaded at all, ConfigError when the plan names none.
    """
    target = target if target is not None else make_target(plan)
    stop = stop if stop is not None else asyncio.Event()
    try:
        try:
            model = await target.prepare()
            prompts = await _calibrated(plan, target)
        except ClientError as error:
            raise BenchError(f"{plan.target}: {error}") from error
        await _until(stop, _warm_up(plan, target, prompts))
        load = _Load(plan, target, prompts, progress)
        started_s = asyncio.get_running_loop().time()
        await _until(stop, load.closed_loop() if plan.rate is None else load.open_loop(plan.rate))
        return load.tally.report(plan, model, started_s, interrupted=stop.is_set())
    finally:
        await target.close()


async def _calibrated(plan: Plan, target: Target) -> Prompts:
    count = await target.count_tokens(" ".join(WORDS))
    # A token more is the model's own mark of the beginning.
    ratio = 1.0 if count is None or count <= len(WORDS) + 1 else count / len(WORDS)
    return Prompts(plan.seed, plan.prompt_tokens, plan.shared_prefix, ratio, plan.shared_prefixes)


async def _warm_up(plan: Plan, target: Target, prompts: Prompts) -> None:
    samples = [Sample() for _ in range(plan.warmup_count)]
    length = min(plan.output_tokens, _WARMUP_TOKENS)
    runs = (target.run(prompts.prompt(f"warm-up {at}"), length, sample) for at, sample in enumerate(samples))
    await asyncio.gather(*runs)
    if samples and all(sample.error for sample in samples):
        raise BenchError(f"{plan.target}: every request of the warm-up failed: {samples[0].message}")


async def _until(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Do the work, or as much of it as can be done before the stop."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait({working, stopping})
    if not working.cancelled():
        working.result()


class _Load:
    """The measured part."""

    def __init__(self, plan: Plan, target: Target, prompts: Prompts, progress: Progress | None) -> None:
        self.tally = Tally()
        self._plan = plan
        self._target = target
        self._prompts = prompts
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self._until_s = self._loop.time() + plan.duration_s if plan.duration_s is not None else math.inf

    async def closed_loop(self) -> None:
        """Each client sends its next request when its last is answered."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(self._plan.clients):
                clients.create_task(self._client())

    async def _client(self) -> None:
        while (number := self._next()) is not None:
            await self._one(number)

    async def open_loop(self, rate: float) -> None:
        """Requests are sent when they arrive, whatever became of those before."""
        began_s = self._loop.time()
        open_requests: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as requests:
            for at_s in arrivals(rate, self._plan.seed):
                if began_s + at_s >= self._until_s:
                    break
                await asyncio.sleep(began_s + at_s - self._loop.time())
                number = self._next()
                if number is None:
                    break
                if len(open_requests) >= self._plan.clients:
                    self.tally.add_unsent()
                    self._tell()
                    continue
                task = requests.create_task(self._one(number))
                open_requests.add(task)
                task.add_done_callback(open_requests.discard)

    def _next(self) -> int | None:
        """The number of the next request; None when the plan is fulfilled."""
        limit = self._plan.request_count
        if self._loop.time() >= self._until_s or (limit is not None and self._sent >= limit):
            return None
        self._sent += 1
        return self._sent

    async def _one(self, number: int) -> None:
        sample = Sample()
        prompt = self._prompts.prompt(number)
        try:
            await self._target.run(prompt, self._plan.output_tokens, sample)
        except asyncio.CancelledError:
            self.tally.add_unfinished(sample)
            raise
        self.tally.add(sample)
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self.tally.answered, self.tally.output_tokens)
