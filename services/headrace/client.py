"""An asynchronous client of the native gRPC API: text in, typed events out.

::

    async with Client("127.0.0.1:8081") as client:
        async for event in client.generate(messages=[{"role": "user", "content": "Hello"}], max_tokens=64):
            if isinstance(event, Delta):
                print(event.text, end="")
        answer = await client.complete(text="Once upon a time", temperature=0, deadline_s=10)

Leaving the loop early, :meth:`Generation.cancel` or cancelling the task cancels the call, and with it the generation
on the worker. Every failure is a :class:`ClientError` with a code of the closed list. Nothing is retried here: whether
to say a thing twice is the caller's to decide (``ClientError.retryable`` says when it is safe).

Its place: the same API serves ``headrace chat`` and the tests. What it leaves to others: HTTP (any OpenAI SDK speaks to
the router), and load generation (``bench.py`` shares :func:`generate_request` and :func:`error_of`).
"""

from __future__ import annotations

import asyncio
import enum
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypedDict, Unpack

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from headrace.errors import HeadraceError
from headrace.serving import channel as open_channel
from headrace.tls import ClientTls
from headrace.v1 import router_pb2, router_pb2_grpc, types_pb2

#: How much longer than its deadline a call may take: the router ends it at the deadline with the partial answer and the
#: reason, and only a router that doesn't answer any more is cut off from here.
DEADLINE_SLACK_S = 1.0

#: The environment's API key, for routers that want one.
API_KEY_VARIABLE = "HEADRACE_API_KEY"
#: Listing and tokenising take milliseconds; a router that takes longer is not answering.
SHORT_CALL_TIMEOUT_S = 30.0

_MAX_MS = 2**32 - 1


class Outcome(enum.StrEnum):
    """How a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    DEADLINE = "deadline"
    BUDGET = "budget"
    CANCELLED = "cancelled"
    WORKER_LOST = "worker_lost"
    REJECTED = "rejected"
    FAILED = "failed"


@dataclass(frozen=True)
class Logprob:
    """One token and how likely it was (natural logarithm)."""

    id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """The token that was drawn at one position, and the likeliest ones."""

    drawn: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True)
class Started:
    """The request was taken in. ``created_s`` is Unix time."""

    request_id: str
    model: str
    prompt_tokens: int
    created_s: int


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, or in a :class:`Delta` more of one.

    ``index`` says which of the choice's calls. ``id`` and ``name`` come with its first part; ``arguments`` (JSON) goes
    on where the last part ended.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """Text that will not be taken back, the ids that are complete with it, and parts of tool calls."""

    choice: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Finish:
    """The end of one choice, with the stop string or id that was met, if one was."""

    choice: int
    outcome: Outcome
    stop: str | int | None = None


@dataclass(frozen=True)
class Usage:
    """What the request cost, in tokens. Of ``prompt_tokens``, ``cached_prompt_tokens`` were not computed again."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    cached_answer: bool = False


Event = Started | Delta | Finish | Usage


@dataclass(frozen=True)
class Choice:
    """One of the answers to a request. ``outcome`` is None when its end was never heard of."""

    text: str
    ids: tuple[int, ...]
    outcome: Outcome | None
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: Whole ones.
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A collected answer. ``usage`` is None only on a partial one."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text if self.choices else ""

    @property
    def outcome(self) -> Outcome | None:
        """How the first choice ended."""
        return self.choices[0].outcome if self.choices else None


@dataclass(frozen=True)
class Model:
    """A model that can be asked. ``ready_workers`` take new requests now."""

    name: str
    context_tokens: int
    vocab_size: int
    ready_workers: int
    tokenizer_sha256: str


class ClientError(HeadraceError):
    """A call failed. Its text is the router's message."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        status: grpc.StatusCode | None = None,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        #: A code of the closed list in lower case, like "model_not_found" or "overloaded".
        self.code = code
        #: The gRPC status; None when nothing was sent.
        self.status = status
        #: When to try again, as the router asks; None = it gave no hint.
        self.retry_after_s = retry_after_s
        #: The field at fault, as the router names it.
        self.param = param
        #: The router itself said so; else it is what the connection came to.
        self.from_router = False
        #: Some of the answer had arrived already.
        self.shown = False
        #: What had arrived, when :meth:`Client.complete` collected it.
        self.partial: Answer | None = None

    @property
    def retryable(self) -> bool:
        """The same request may be sent again without saying anything twice."""
        if self.shown:
            return False
        if self.status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            # Without a time to come back it is too large, and will be so again.
            return self.retry_after_s is not None
        return self.status is grpc.StatusCode.UNAVAILABLE


class GenerateOptions(TypedDict, total=False):
    """What :meth:`Client.generate` and :meth:`Client.complete` take. Exactly one of messages, text and ids is needed.

    What is left out takes the model's own default.
    """

    #: Name of the model; left out = the first that the router lists.
    model: str
    #: A conversation in OpenAI's form: {"role", "content"}, and "name", "tool_calls", "tool_call_id" where they belong.
    messages: Iterable[Mapping[str, Any]]
    #: A text to continue as it is.
    text: str
    #: Token ids to continue as they are.
    ids: Iterable[int]
    #: Tools in OpenAI's form, with messages.
    tools: Iterable[Mapping[str, Any]]
    #: "auto", "none", "required" (the answer is a call), or the name of the tool that is to be called.
    tool_choice: str
    #: False = the answer ends with its first call.
    parallel_tool_calls: bool
    #: Extra variables for the chat template, with messages.
    template_kwargs: Mapping[str, Any]

    #: Tokens to produce for each choice, at most and at least.
    max_tokens: int
    min_tokens: int
    #: 0 = always the likeliest token.
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    #: Added to the logits of these ids.
    logit_bias: Mapping[int, float]
    seed: int
    #: Choices.
    n: int
    #: Texts that end the answer (4 at most), and ids that do.
    stop: str | Iterable[str]
    stop_ids: Iterable[int]
    #: Leave the stop string in the answer.
    include_stop: bool
    #: The model's own end does not end the answer.
    ignore_eos: bool

    #: What the answer must look like; one of these at most.
    json_schema: str | Mapping[str, Any]
    json_object: bool
    regex: str
    grammar: str
    choices: Iterable[str]

    #: Log-probability of each token, and of so many likeliest ones beside it (0 = only the token's own).
    logprobs: int
    #: A LoRA adapter by name.
    lora: str
    request_class: Literal["interactive", "standard", "batch"]
    #: Time to the whole answer, in seconds. At its end the partial answer stands and ClientError "deadline_exceeded"
    #: follows.
    deadline_s: float
    #: Wanted time to the first token, and between tokens after it, in seconds; left out = the targets of its class. A
    #: request that can't have its first token in time any more is refused as "overloaded", with when to try again.
    ttft_target_s: float
    tpot_target_s: float
    #: Neither answer from nor store in the response cache.
    bypass_cache: bool
    #: Do not reuse KV of earlier prompts.
    bypass_prefix_cache: bool
    #: Requests of one conversation; routing keeps them together where it pays.
    session_id: str
    cache_salt: str
    #: W3C trace context of the caller's span.
    traceparent: str


class Generation:
    """The events of one request, as an asynchronous iterator: one Started, Deltas, a Finish a choice, one Usage.

    Iteration raises ClientError when the request failed, after what it had to show. Dropping it before its end cancels
    the request; ``async with`` does so at a certain point, and :meth:`cancel` at once.
    """

    def __init__(self, call: Callable[[], Any], resolve: Callable[[], Any]) -> None:
        # The call opens at the first event, so that the default model can be asked for first.
        self._open = call
        self._resolve = resolve
        self._call: Any = None
        self._messages: Any = None
        self._cancelled = False
        self._shown = False
        self._done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._done:
            raise StopAsyncIteration
        try:
            message = await self._read()
        except BaseException as error:
            # The end of the stream too.
            self._done = True
            if isinstance(error, ClientError):
                error.shown = self._shown
            raise
        event = _event(message)
        self._shown = self._shown or isinstance(event, Delta)
        return event

    async def _read(self) -> Any:
        try:
            if self._call is None and not self._cancelled:
                await self._resolve()
            if self._cancelled:
                raise _cancelled()
            if self._call is None:
                self._call = self._open()
                # Not its read(): that skips messages which wait unread once the status is there.
                self._messages = aiter(self._call)
            return await anext(self._messages)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Not the caller's task: the call was ended by cancel() or by closing the client, from another task.
            raise _cancelled() from None

    def cancel(self) -> None:
        """Stop the generation now. A pending or later iteration raises ClientError "cancelled". Safe to call again."""
        self._cancelled = True
        if self._call is not None and not self._done:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        # `break` out of a loop drops the last reference; this is what makes it end the work on the worker.
        if not self._done and self._call is not None:
            self._call.cancel()


def bearer(api_key: str | None = None) -> str:
    """What says who asks: the key given, or else the environment's HEADRACE_API_KEY; empty when there is none."""
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    return f"Bearer {key}" if key else ""


def grpc_target(target: str, tls: ClientTls | None) -> tuple[str, ClientTls | None]:
    """host:port, and how to speak TLS there: the target's scheme decides, and without one whether ``tls`` is given."""
    scheme, separator, address = target.partition("://")
    if separator and scheme == "grpcs":
        return address, tls if tls is not None else ClientTls()
    return (address, None) if separator and scheme == "grpc" else (target, tls)


class Client:
    """A connection to a router's native gRPC API. Use it from one event loop; calls run side by side on it.

    The connection is made at the first call and made again when it breaks.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:8081",
        *,
        tls: ClientTls | None = None,
        api_key: str | None = None,
        channel: grpc.aio.Channel | None = None,
    ) -> None:
        """``target`` is host:port: in plain text after ``grpc://``, with TLS after ``grpcs://``, else as ``tls`` says.

        ``api_key`` None is the environment's HEADRACE_API_KEY, if there is one.

        A ``channel`` given is used instead, and left open. Raises ConfigError when files of ``tls`` cannot be used.
        """
        self.target, tls = grpc_target(target, tls)
        self._owns_channel = channel is None
        self._channel = channel if channel is not None else open_channel(self.target, tls)
        #: The generated stub, for callers that count every microsecond.
        self.stub: Any = router_pb2_grpc.InferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]
        authorization = bearer(api_key)
        #: What says who asks, with each call.
        self.metadata: tuple[tuple[str, str], ...] = (("authorization", authorization),) if authorization else ()
        self._default_model = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        if self._owns_channel:
            await self._channel.close(None)

    def generate(self, **options: Unpack[GenerateOptions]) -> Generation:
        """Ask, and get the answer as it is made. Raises ClientError at once when the options make no request."""
        request = generate_request(options)

        async def resolve() -> None:
            if not request.model:
                request.model = await self.default_model()

        def open_call() -> Any:
            return self.stub.Generate(
                request,
                timeout=call_timeout_s(options.get("deadline_s")),
                metadata=self.metadata + _metadata(options),
            )

        return Generation(open_call, resolve)

    async def complete(self, **options: Unpack[GenerateOptions]) -> Answer:
        """Ask, and get the whole answer. Raises ClientError; what had arrived by then is its ``partial``."""
        collected = _Collector()
        async with self.generate(**options) as generation:
            try:
                async for event in generation:
                    collected.add(event)
            except ClientError as error:
                error.partial = collected.answer() if error.shown else None
                raise
        return collected.answer()

    async def list_models(self) -> tuple[Model, ...]:
        """The models that can be asked, in the router's order. Raises ClientError."""
        listed = await self._short(self.stub.ListModels, router_pb2.ListModelsRequest())
        return tuple(
            Model(model.name, model.context_tokens, model.vocab_size, model.ready_workers, model.tokenizer_sha256)
            for model in listed.models
        )

    async def default_model(self) -> str:
        """The first model that the router lists; asked once. Raises ClientError."""
        if not self._default_model:
            models = await self.list_models()
            if not models:
                raise ClientError("model_not_found", "the router lists no model")
            self._default_model = models[0].name
        return self._default_model

    async def tokenize(
        self, *, text: str | None = None, messages: Iterable[Mapping[str, Any]] | None = None, model: str = ""
    ) -> tuple[int, ...]:
        """The ids of a text, or of a conversation as the model's template renders it. Raises ClientError."""
        if (text is None) == (messages is None):
            raise _invalid("give text or messages", "text")
        model = model or await self.default_model()
        with _BuildErrors():
            if messages is not None:
                request = router_pb2.TokenizeRequest(model=model, chat=_chat(messages))
            else:
                request = router_pb2.TokenizeRequest(model=model, text=text or "")
        return tuple((await self._short(self.stub.Tokenize, request)).ids)

    async def detokenize(self, ids: Iterable[int], *, skip_special: bool = False, model: str = "") -> str:
        """The text of these ids. Raises ClientError."""
        model = model or await self.default_model()
        with _BuildErrors():
            request = router_pb2.DetokenizeRequest(model=model, ids=ids, skip_special=skip_special)
        return str((await self._short(self.stub.Detokenize, request)).text)

    async def _short(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return await method(request, timeout=SHORT_CALL_TIMEOUT_S, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None


def generate_request(options: GenerateOptions) -> router_pb2.GenerateRequest:
    """The request that these options make. Raises ClientError, naming the option at fault as far as it is known."""
    prompts = [name for name in ("messages", "text", "ids") if name in options]
    if len(prompts) != 1:
        raise _invalid(f"give exactly one of messages, text and ids, got {' and '.join(prompts) or 'none'}", "messages")
    request = router_pb2.GenerateRequest()
    with _BuildErrors():
        request.model = options.get("model", "")
        _set_prompt(request, options)
        for name in _SAMPLING:
            if name in options:
                setattr(request.sampling, name, options[name])  # type: ignore[literal-required]
        request.sampling.logit_bias.update(options.get("logit_bias", {}))
        _set_stopping(request.stopping, options)
        _set_guided(request, options)
        if "logprobs" in options:
            request.logprobs.enabled = True
            request.logprobs.top = options["logprobs"]
        request.deadline_ms = _deadline_ms(options.get("deadline_s"))
        if "ttft_target_s" in options:
            request.ttft_target_ms = _target_ms("ttft_target_s", options["ttft_target_s"])
        if "tpot_target_s" in options:
            request.tpot_target_ms = _target_ms("tpot_target_s", options["tpot_target_s"])
        for name in ("lora", "bypass_cache", "bypass_prefix_cache", "session_id", "cache_salt"):
            if name in options:
                setattr(request, name, options[name])  # type: ignore[literal-required]
        if "request_class" in options:
            value = types_pb2.RequestClass.Value(f"REQUEST_CLASS_{options['request_class'].upper()}")
            setattr(request, "class", value)
    return request


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "n",
)


_TOOL_USES: Mapping[str, router_pb2.Chat.ToolUse] = {
    "auto": router_pb2.Chat.TOOL_USE_AUTO,
    "none": router_pb2.Chat.TOOL_USE_NONE,
    "required": router_pb2.Chat.TOOL_USE_REQUIRED,
}


def _set_prompt(request: router_pb2.GenerateRequest, options: GenerateOptions) -> None:
    if "text" in options:
        request.text = options["text"]
    elif "ids" in options:
        request.ids.ids.extend(options["ids"])
        request.ids.SetInParent()
    else:
        request.chat.CopyFrom(_chat(options["messages"]))
        request.chat.tools_json.extend(json.dumps(tool) for tool in options.get("tools", ()))
        if (choice := options.get("tool_choice")) is not None:
            named = choice not in _TOOL_USES
            request.chat.tool_use = _TOOL_USES["required" if named else choice]
            request.chat.required_tool = choice if named else ""
        request.chat.single_tool_call = not options.get("parallel_tool_calls", True)
        if "template_kwargs" in options:
            request.chat.template_kwargs_json = json.dumps(options["template_kwargs"])


def _chat(messages: Iterable[Mapping[str, Any]]) -> router_pb2.Chat:
    return router_pb2.Chat(messages=[_message(message, index) for index, message in enumerate(messages)])


def _message(message: Mapping[str, Any], index: int) -> router_pb2.ChatMessage:
    """A message in OpenAI's form as the proto's. What it can't carry is refused rather than lost."""
    known = {"role", "content", "name", "tool_calls", "tool_call_id"}
    if unknown := set(message) - known:
        raise _invalid(f"messages[{index}]: unknown key {min(unknown)!r}", f"messages[{index}]")
    sent = router_pb2.ChatMessage(
        role=message.get("role", ""),
        name=message.get("name") or "",
        tool_call_id=message.get("tool_call_id") or "",
        tool_calls=[_tool_call(call) for call in message.get("tool_calls") or ()],
    )
    content = message.get("content")
    if isinstance(content, str):
        sent.content = content
    elif content is not None:
        sent.parts.extend(_part(part, f"messages[{index}].content[{at}]") for at, part in enumerate(content))
    return sent


def _part(part: str | Mapping[str, Any], where: str) -> str:
    if isinstance(part, str):
        return part
    if part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _invalid(f"{where}: only text parts can be sent", where)
    return str(part["text"])


def _tool_call(call: Mapping[str, Any]) -> router_pb2.ToolCall:
    function = call.get("function", {})
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return router_pb2.ToolCall(id=call.get("id", ""), name=function.get("name", ""), arguments_json=arguments)


def _set_stopping(stopping: router_pb2.StoppingOptions, options: GenerateOptions) -> None:
    for name in ("max_tokens", "min_tokens", "ignore_eos", "include_stop"):
        if name in options:
            setattr(stopping, name, options[name])
    stop = options.get("stop", ())
    stopping.stop.extend([stop] if isinstance(stop, str) else stop)
    stopping.stop_ids.extend(options.get("stop_ids", ()))


def _set_guided(request: router_pb2.GenerateRequest, options: GenerateOptions) -> None:
    kinds = [name for name in ("json_schema", "json_object", "regex", "grammar", "choices") if name in options]
    if len(kinds) > 1:
        raise _invalid(f"give one of {', '.join(kinds)}, not several", kinds[1])
    if "json_schema" in options:
        schema = options["json_schema"]
        request.guided.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
    elif "choices" in options:
        request.guided.choice.texts.extend(options["choices"])
        request.guided.choice.SetInParent()
    elif kinds:
        setattr(request.guided, kinds[0], options[kinds[0]])


def _deadline_ms(deadline_s: float | None) -> int:
    """0 is no deadline on the wire, so one that is over already is sent as the shortest there is."""
    if deadline_s is None:
        return 0
    if not math.isfinite(deadline_s) or deadline_s < 0:
        raise _invalid(f"deadline_s: expected seconds of at least 0, got {deadline_s}", "deadline_s")
    return min(max(math.ceil(deadline_s * 1000), 1), _MAX_MS)


def _target_ms(name: str, target_s: float) -> int:
    if not math.isfinite(target_s) or target_s <= 0:
        raise _invalid(f"{name}: expected seconds above 0, got {target_s}", name)
    return min(max(round(target_s * 1000), 1), _MAX_MS)


def call_timeout_s(deadline_s: float | None) -> float | None:
    """The gRPC timeout for a call with that deadline."""
    return None if deadline_s is None else deadline_s + DEADLINE_SLACK_S


def _metadata(options: GenerateOptions) -> tuple[tuple[str, str], ...]:
    traceparent = options.get("traceparent")
    return (("traceparent", traceparent),) if traceparent else ()


class _BuildErrors:
    """What protobuf raises for values that a field can't take, as ClientError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, TypeError | ValueError | AttributeError):
            raise _invalid(str(error), None) from error


def _cancelled() -> ClientError:
    return ClientError("cancelled", "cancelled by the caller", status=grpc.StatusCode.CANCELLED)


def _invalid(message: str, param: str | None) -> ClientError:
    return ClientError("invalid_argument", message, param=param)


def error_of(error: grpc.aio.AioRpcError) -> ClientError:
    """A failed call as a typed error, from its rich status where it has one."""
    status = error.code()
    made = ClientError(status.name.lower(), error.details() or status.name.lower().replace("_", " "), status=status)
    for detail in _details(error):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            if info.domain == "headrace" and info.reason:
                made.from_router = True
                made.code = info.reason.lower().removeprefix("error_code_")
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            made.retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            if bad.field_violations:
                made.param = bad.field_violations[0].field or None
    return made


def _details(error: grpc.aio.AioRpcError) -> Sequence[Any]:
    metadata: Any = error.trailing_metadata()
    for key, value in metadata or ():
        if key == "grpc-status-details-bin":
            try:
                return tuple(status_pb2.Status.FromString(value).details)
            except DecodeError:
                # The status itself still stands.
                return ()
    return ()


def _event(message: router_pb2.GenerateResponse) -> Event:
    kind = message.WhichOneof("event")
    if kind == "delta":
        delta = message.delta
        logprobs = tuple(_logprobs(entry) for entry in delta.logprobs)
        calls = tuple(ToolCall(call.index, call.id, call.name, call.arguments_json) for call in delta.tool_calls)
        return Delta(delta.choice, delta.text, tuple(delta.ids), logprobs, calls)
    if kind == "started":
        started = message.started
        return Started(started.request_id, started.model, started.prompt_tokens, started.created_s)
    if kind == "finish":
        return _finish(message.finish)
    if kind == "usage":
        usage = message.usage.usage
        return Usage(
            usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens, message.usage.cached_answer
        )
    raise ClientError("internal", "the router sent an event that this client doesn't know; it may be newer")


def _finish(finish: router_pb2.GenerateResponse.Finish) -> Finish:
    stop: str | int | None = finish.stop_string or None
    if finish.HasField("stop_id"):
        stop = finish.stop_id
    try:
        outcome = Outcome(types_pb2.Outcome.Name(finish.outcome).removeprefix("OUTCOME_").lower())
    except ValueError:
        # An outcome that this client doesn't know is not a success.
        outcome = Outcome.FAILED
    return Finish(finish.choice, outcome, stop)


def _logprobs(entry: router_pb2.TextLogprobs) -> TokenLogprobs:
    return TokenLogprobs(_logprob(entry.drawn), tuple(_logprob(likely) for likely in entry.top))


def _logprob(entry: router_pb2.TextLogprob) -> Logprob:
    return Logprob(entry.id, entry.bytes, entry.logprob)


@dataclass
class _Part:
    """One choice while it is collected."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish: Finish | None = None

    def call(self, part: ToolCall) -> None:
        if part.index < len(self.calls):
            begun = self.calls[part.index]
            self.calls[part.index] = replace(begun, arguments=begun.arguments + part.arguments)
        else:
            self.calls.append(part)

    def choice(self) -> Choice:
        finish = self.finish
        return Choice(
            "".join(self.texts),
            tuple(self.ids),
            finish.outcome if finish else None,
            finish.stop if finish else None,
            tuple(self.logprobs),
            tuple(self.calls),
        )


class _Collector:
    """Events to an answer."""

    def __init__(self) -> None:
        self._started = Started("", "", 0, 0)
        self._parts: dict[int, _Part] = {}
        self._usage: Usage | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, Delta):
            part = self._parts.setdefault(event.choice, _Part())
            part.texts.append(event.text)
            part.ids.extend(event.ids)
            part.logprobs.extend(event.logprobs)
            for call in event.tool_calls:
                part.call(call)
        elif isinstance(event, Finish):
            self._parts.setdefault(event.choice, _Part()).finish = event
        elif isinstance(event, Started):
            self._started = event
        else:
            self._usage = event

    def answer(self) -> Answer:
        choices = tuple(self._parts[index].choice() for index in sorted(self._parts))
        return Answer(self._started.request_id, self._started.model, choices, self._usage)


__all__ = [
    "Answer",
    "Choice",
    "Client",
    "ClientError",
    "Delta",
    "Event",
    "Finish",
    "GenerateOptions",
    "Generation",
    "Logprob",
    "Model",
    "Outcome",
    "Started",
    "TokenLogprobs",
    "ToolCall",
    "Usage",
]
