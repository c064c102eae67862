"""Clients for tests: HTTP over a raw socket, and its gRPC twin, with one form of answer.

The HTTP client does nothing behind a test's back: no retries, no pools; it sees each event as it comes and closes its
socket by FIN or by RST when told to. Both twins turn the same request (OpenAI's parameters) into an `Answer`, so that a
case is written once and run in the modes of `MODES`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.rpc import error_details_pb2, status_pb2

from headrace.v1 import router_pb2, router_pb2_grpc, types_pb2

#: The same request, whole or as events over HTTP, or over gRPC.
MODES = ("plain", "stream", "grpc")
HTTP_MODES = ("plain", "stream")
STREAMED = ("stream", "grpc")

#: How a gRPC status reads on HTTP (a message that is too large is told apart by its reason).
HTTP_STATUS = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
MESSAGE_BYTES = 64 * 2**20


@dataclass
class Failure:
    """An error body, an error event, or a gRPC status with its details."""

    code: str
    message: str
    param: str | None = None
    type: str | None = None
    retry_after_s: float | None = None


@dataclass
class Answer:
    """What a client has of one request, in the words of no particular protocol."""

    mode: str
    #: The HTTP status; for gRPC the one that its status stands for (200 as soon as something of the answer was shown).
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    #: Each piece of text as it came: (choice, text).
    pieces: list[tuple[int, str]] = field(default_factory=list)
    finishes: dict[int, str] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    #: prompt, completion, total; and of the prompt, cached.
    usage: tuple[int, int, int] | None = None
    cached_tokens: int | None = None
    #: Entries of "content" logprobs, by choice.
    logprobs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    failure: Failure | None = None
    #: The end came as a success does: a whole plain body, [DONE], or OK.
    done: bool = False
    cached_answer: bool = False
    id: str = ""
    body: Any = None
    events: list[Any] = field(default_factory=list)
    grpc_status: grpc.StatusCode | None = None
    tool_calls: list[Any] = field(default_factory=list)

    def text_of(self, choice: int) -> str:
        return "".join(piece for index, piece in self.pieces if index == choice)

    @property
    def text(self) -> str:
        return self.text_of(0)

    @property
    def deltas(self) -> list[str]:
        """The pieces of choice 0 that have text."""
        return [piece for index, piece in self.pieces if index == 0 and piece]

    @property
    def finish(self) -> str | None:
        return self.finishes.get(0)

    @property
    def completion_tokens(self) -> int | None:
        return self.usage[1] if self.usage else None

    def succeeded(self) -> Answer:
        """This answer, which must be a whole and successful one."""
        assert self.failure is None, self.failure
        assert self.status == 200, (self.status, self.body)
        assert self.done
        assert self.finishes
        assert set(self.finishes.values()) <= {"stop", "length", "tool_calls"}
        return self

    def refused(self, status: int, param: str | None = None, code: str | None = None) -> Failure:
        """The failure of this answer, which must have come as a status, before anything was shown."""
        assert self.status == status, (self.status, self.failure, self.body, self.text)
        assert self.failure is not None
        assert self.failure.message
        assert not self.pieces
        assert not self.finishes
        assert not self.done
        if param is not None:
            named = self.failure.param or ""
            # A gRPC field stands where the message has it: sampling.temperature.
            assert named == param or (self.mode == "grpc" and named.split(".")[-1].startswith(param)), self.failure
        if code is not None:
            assert self.failure.code == code, self.failure
        return self.failure

    def broken(self, *codes: str) -> Failure:
        """The failure of this answer, which must have come after it began: nothing in it reads as success."""
        assert self.failure is not None, (self.status, self.text, self.finishes)
        assert not self.done
        assert not set(self.finishes.values()) & {"stop", "length", "tool_calls"}
        if codes:
            assert self.failure.code in codes, self.failure
        return self.failure


class Unsupported(Exception):
    """The native API has no field by which this could be asked."""


# --- HTTP -------------------------------------------------------------------------------------------------------------


class BrokenBody(Exception):
    """The connection went away before the response was whole."""


class HttpExchange:
    """One HTTP/1.1 request on a socket of its own, and its response as it comes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self._left: int | None = None
        self._chunked = False
        self._ended = False
        self._sse = b""

    @classmethod
    async def open(
        cls,
        address: str,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        receive_buffer: int | None = None,
    ) -> HttpExchange:
        """Connects and sends the request. A small receive buffer makes a reader that stops felt sooner."""
        host, port = address.rsplit(":", 1)
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        limit = receive_buffer or 2**16
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        exchange = cls(reader, writer)
        lines = [f"{method} {path} HTTP/1.1", f"host: {address}"]
        sent = {"content-type": "application/json"} if body is not None else {}
        sent |= {name.lower(): value for name, value in (headers or {}).items()}
        if body is not None:
            sent["content-length"] = str(len(body))
        lines += [f"{name}: {value}" for name, value in sent.items() if value]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))
        # A server may answer, and hang up, before it has read all.
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return exchange

    async def head(self, timeout_s: float = 30.0) -> int:
        """The status, as soon as the response's head is there."""
        async with asyncio.timeout(timeout_s):
            if self.status:
                return self.status
            try:
                raw = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise BrokenBody("no response") from error
        first, *lines = raw.decode("latin-1").strip().split("\r\n")
        self.status = int(first.split(" ")[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._chunked = self.headers.get("transfer-encoding", "") == "chunked"
        if not self._chunked:
            self._left = int(self.headers.get("content-length", "0"))
        return self.status

    async def some(self) -> bytes:
        """The next bytes of the body; empty at its proper end. Raises BrokenBody when it breaks off."""
        await self.head()
        if self._ended:
            return b""
        try:
            if self._chunked:
                size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
                data = await self.reader.readexactly(size)
                await self.reader.readexactly(2)
                self._ended = size == 0
                return data
            assert self._left is not None
            if self._left == 0:
                self._ended = True
                return b""
            data = await self.reader.read(min(self._left, 65536))
            if not data:
                raise BrokenBody("the body broke off")
            self._left -= len(data)
            return data
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise BrokenBody("the body broke off") from error

    async def body(self, timeout_s: float = 30.0) -> bytes:
        async with asyncio.timeout(timeout_s):
            parts = []
            while data := await self.some():
                parts.append(data)
            return b"".join(parts)

    async def event(self, timeout_s: float = 30.0) -> str | None:
        """The data of the next server-sent event; None at the end of the body."""
        async with asyncio.timeout(timeout_s):
            while True:
                raw, found, rest = self._sse.partition(b"\n\n")
                if found:
                    self._sse = rest
                    lines = [line[5:].removeprefix(b" ") for line in raw.split(b"\n") if line.startswith(b"data:")]
                    if lines:
                        return b"\n".join(lines).decode("utf-8")
                    continue
                data = await self.some()
                if not data:
                    assert not self._sse.strip(), f"an event without an end: {self._sse!r}"
                    return None
                self._sse += data

    def leave(self, *, reset: bool = False) -> None:
        """Closes the socket: by FIN, or by RST."""
        if reset:
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        else:
            self.writer.close()


async def http(
    address: str,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 30.0,
) -> tuple[int, dict[str, str], Any]:
    """One exchange: status, headers, and the body (parsed when it is JSON)."""
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    exchange = await HttpExchange.open(address, method, path, raw, headers)
    try:
        status = await exchange.head(timeout_s)
        data = await exchange.body(timeout_s)
    finally:
        exchange.leave()
    if exchange.headers.get("content-type", "").startswith("application/json"):
        return status, exchange.headers, json.loads(data, parse_constant=_refuse_constant)
    return status, exchange.headers, data.decode()


def _refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


# --- answers as they come ---------------------------------------------------------------------------------------------


class OpenAnswer(Protocol):
    """An answer that is still coming."""

    answer: Answer

    async def piece(self, timeout_s: float = 30.0) -> str | None:
        """The next text of choice 0; None when there is no more."""

    async def rest(self, timeout_s: float = 30.0) -> Answer:
        """Reads to the end."""

    def leave(self, *, reset: bool = False) -> None:
        """The client goes away."""


class HttpAnswer:
    """An HTTP answer, plain or streamed, that is still coming."""

    def __init__(self, mode: str, exchange: HttpExchange, legacy: bool) -> None:
        self.answer = Answer(mode)
        self.exchange = exchange
        self._legacy = legacy

    async def begin(self, timeout_s: float = 30.0) -> None:
        """Waits for the head of the response."""
        if not self.answer.status:
            self.answer.status = await self.exchange.head(timeout_s)
            self.answer.headers = self.exchange.headers
            self.answer.cached_answer = self.exchange.headers.get("x-headrace-cached") == "true"

    async def piece(self, timeout_s: float = 30.0) -> str | None:
        seen = len(self.answer.deltas)
        while await self._next(timeout_s):
            if len(self.answer.deltas) > seen:
                return self.answer.deltas[-1]
        return None

    async def rest(self, timeout_s: float = 30.0) -> Answer:
        try:
            await self.begin(timeout_s)
            if self.exchange.headers.get("content-type", "").startswith("text/event-stream"):
                while await self._next(timeout_s):
                    pass
            else:
                self._whole(await self.exchange.body(timeout_s))
        finally:
            self.exchange.leave()
        return self.answer

    def leave(self, *, reset: bool = False) -> None:
        self.exchange.leave(reset=reset)

    async def _next(self, timeout_s: float) -> bool:
        await self.begin(timeout_s)
        data = await self.exchange.event(timeout_s)
        if data is None:
            return False
        assert not self.answer.done, "an event after [DONE]"
        assert self.answer.failure is None, "an event after the error event"
        if data == "[DONE]":
            self.answer.events.append(None)
            self.answer.done = True
            return True
        event = json.loads(data, parse_constant=_refuse_constant)
        self.answer.events.append(event)
        if "error" in event:
            self.answer.failure = _failure(event["error"])
            return True
        self._take(event, "delta")
        return True

    def _whole(self, raw: bytes) -> None:
        answer = self.answer
        assert answer.headers.get("content-type", "").startswith("application/json"), (answer.headers, raw[:200])
        answer.body = json.loads(raw, parse_constant=_refuse_constant)
        if "error" in answer.body:
            answer.failure = _failure(answer.body["error"])
            if "retry-after" in answer.headers:
                answer.failure.retry_after_s = float(answer.headers["retry-after"])
            return
        self._take(answer.body, "message")
        answer.done = True

    def _take(self, event: dict[str, Any], part: str) -> None:
        answer = self.answer
        answer.id = answer.id or event.get("id", "")
        assert event.get("id") == answer.id, "the id changed"
        for choice in event["choices"]:
            index = choice["index"]
            said = {"content": choice.get("text")} if self._legacy else choice[part]
            if said.get("role"):
                answer.roles[index] = said["role"]
            if said.get("tool_calls"):
                answer.tool_calls += said["tool_calls"]
            if said.get("content") is not None:
                answer.pieces.append((index, said["content"]))
            if choice.get("logprobs") and not self._legacy:
                answer.logprobs.setdefault(index, []).extend(choice["logprobs"]["content"] or [])
            if choice.get("finish_reason"):
                assert index not in answer.finishes, "a second finish"
                answer.finishes[index] = choice["finish_reason"]
        if event.get("usage") is not None:
            usage = event["usage"]
            assert answer.usage is None, "usage twice"
            answer.usage = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
            answer.cached_tokens = usage.get("prompt_tokens_details", {}).get("cached_tokens")


def _failure(error: dict[str, Any]) -> Failure:
    assert set(error) >= {"message", "type", "param", "code"}, error
    return Failure(error["code"], error["message"], error["param"], error["type"])


class GrpcAnswer:
    """A native answer that is still coming."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
        self.answer = Answer("grpc")
        self.call = call

    async def begin(self, timeout_s: float = 30.0) -> None:
        """Waits for the first message (or the end)."""
        if not self.answer.events and self.answer.grpc_status is None:
            await self._next(timeout_s)

    async def piece(self, timeout_s: float = 30.0) -> str | None:
        seen = len(self.answer.deltas)
        while await self._next(timeout_s):
            if len(self.answer.deltas) > seen:
                return self.answer.deltas[-1]
        return None

    async def rest(self, timeout_s: float = 30.0) -> Answer:
        while await self._next(timeout_s):
            pass
        return self.answer

    def leave(self, *, reset: bool = False) -> None:
        self.call.cancel()

    async def _next(self, timeout_s: float) -> bool:
        if self.answer.grpc_status is not None:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                message = await self.call.read()
        except grpc.aio.AioRpcError as error:
            self._end(error.code(), error)
            return False
        if message is grpc.aio.EOF:
            self._end(await self.call.code(), None)
            return False
        self._take(message)
        return True

    def _take(self, message: router_pb2.GenerateResponse) -> None:
        answer = self.answer
        answer.events.append(message)
        kind = message.WhichOneof("event")
        assert (kind == "started") == (len(answer.events) == 1), "Started comes once, and first"
        assert answer.usage is None, "an event after the usage"
        if kind == "started":
            answer.id = message.started.request_id
        elif kind == "delta":
            delta = message.delta
            assert delta.choice not in answer.finishes, "a delta after the finish"
            answer.pieces.append((delta.choice, delta.text))
            answer.logprobs.setdefault(delta.choice, []).extend(_logprob_entry(entry) for entry in delta.logprobs)
        elif kind == "finish":
            assert message.finish.choice not in answer.finishes, "a second finish"
            answer.finishes[message.finish.choice] = outcome_name(message.finish.outcome)
        else:
            usage = message.usage.usage
            total = usage.prompt_tokens + usage.completion_tokens
            answer.usage = (usage.prompt_tokens, usage.completion_tokens, total)
            answer.cached_tokens = usage.cached_prompt_tokens
            answer.cached_answer = message.usage.cached_answer

    def _end(self, code: grpc.StatusCode, error: grpc.aio.AioRpcError | None) -> None:
        answer = self.answer
        answer.grpc_status = code
        if code is grpc.StatusCode.OK:
            answer.status, answer.done = 200, True
            return
        assert error is not None
        answer.failure = grpc_failure(error)
        if answer.pieces or answer.finishes:
            answer.status = 200
        elif answer.failure.code == "too_large":
            answer.status = 413
        else:
            answer.status = HTTP_STATUS.get(code, 500)


def outcome_name(outcome: int) -> str:
    return types_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()


def grpc_failure(error: grpc.aio.AioRpcError) -> Failure:
    """What the rich status says; a status that has none is taken by its name."""
    failure = Failure(error.code().name.lower(), error.details() or "")
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, bad, retry = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(info):
                assert info.domain == "headrace"
                failure.code = info.reason.lower()
            elif detail.Unpack(bad):
                failure.param = bad.field_violations[0].field
            elif detail.Unpack(retry):
                failure.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return failure


def _logprob_entry(entry: router_pb2.TextLogprobs) -> dict[str, Any]:
    def one(item: router_pb2.TextLogprob) -> dict[str, Any]:
        return {
            "token": item.bytes.decode("utf-8", "replace"),
            "bytes": list(item.bytes),
            "logprob": item.logprob,
        }

    return one(entry.drawn) | {"top_logprobs": [one(item) for item in entry.top]}


# --- the client -------------------------------------------------------------------------------------------------------


class Client:
    """Asks one user message, and whatever else, in any mode."""

    def __init__(self, http_address: str, grpc_address: str, model: str = "toy") -> None:
        self.http_address = http_address
        self.grpc_address = grpc_address
        self.model = model
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(
                self.grpc_address,
                options=[
                    ("grpc.max_receive_message_length", MESSAGE_BYTES),
                    ("grpc.max_send_message_length", MESSAGE_BYTES),
                    ("grpc.use_local_subchannel_pool", 1),
                ],
            )
        return self._channel

    @property
    def stub(self) -> router_pb2_grpc.InferenceServiceStub:
        return router_pb2_grpc.InferenceServiceStub(self.channel)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def ask(self, text: str = "go", params: dict[str, Any] | None = None, *, mode: str, **how: Any) -> Answer:
        """The whole answer. What else can be said: as in `open`."""
        return await (await self.open(text, params, mode=mode, **how)).rest(how.get("timeout_s", 30.0))

    async def open(
        self,
        text: str = "go",
        params: dict[str, Any] | None = None,
        *,
        mode: str,
        headers: dict[str, str] | None = None,
        path: str = "/v1/chat/completions",
        timeout_s: float = 30.0,
        receive_buffer: int | None = None,
    ) -> OpenAnswer:
        """Sends the text with those parameters; returns the answer as it comes. `headers` are metadata on gRPC."""
        legacy = path.endswith("/v1/completions")
        body: dict[str, Any] = {"model": self.model}
        body |= {"prompt": text} if legacy else {"messages": [{"role": "user", "content": text}]}
        if mode == "stream":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= params or {}
        body = {key: value for key, value in body.items() if value is not ABSENT}
        if mode == "grpc":
            request, metadata = native(body), dict(headers or {})
            deadline_ms = metadata.pop("x-headrace-deadline-ms", None)
            call = self.stub.Generate(
                request,
                metadata=list(metadata.items()),
                timeout=None if deadline_ms is None else int(deadline_ms) / 1000,
            )
            return GrpcAnswer(call)
        raw = json.dumps(body).encode()
        exchange = await HttpExchange.open(self.http_address, "POST", path, raw, headers, receive_buffer=receive_buffer)
        return HttpAnswer(mode, exchange, legacy)


#: A parameter that is not to be sent.
ABSENT: Any = object()

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
_STOPPING = ("max_tokens", "min_tokens", "ignore_eos")
_CLASSES = {"interactive": 1, "standard": 2, "batch": 3}


def native(body: dict[str, Any]) -> router_pb2.GenerateRequest:
    """The native request for an OpenAI body. Raises Unsupported for what the native API can't express."""
    request = router_pb2.GenerateRequest(model=body["model"])
    try:
        for key, value in body.items():
            if key in ("model", "stream", "stream_options"):
                continue
            if key == "prompt":
                request.text = value
            elif key == "messages":
                request.chat.SetInParent()
                for message in value:
                    request.chat.messages.append(_message(message))
            elif key == "tools":
                request.chat.tools_json.extend(json.dumps(tool) for tool in value)
            elif key in _SAMPLING:
                setattr(request.sampling, key, value)
            elif key in _STOPPING:
                setattr(request.stopping, key, value)
            elif key == "stop":
                texts = [value] if isinstance(value, str) else value or []
                request.stopping.stop.extend(texts)
            elif key == "stop_token_ids":
                request.stopping.stop_ids.extend(value)
            elif key == "logit_bias":
                for token_id, bias in value.items():
                    request.sampling.logit_bias[int(token_id)] = bias
            elif key == "logprobs":
                request.logprobs.enabled = value
            elif key == "top_logprobs":
                request.logprobs.top = value
            elif key == "response_format":
                _guide(request, value)
            elif key in ("cache_salt", "ttft_target_ms", "tpot_target_ms"):
                setattr(request, key, value)
            elif key == "class":
                request.__getattribute__("class")  # the field's name is a word of the language
            else:
                raise Unsupported(key)
    except (TypeError, ValueError) as error:
        raise Unsupported(str(error)) from error
    return request


def _guide(request: router_pb2.GenerateRequest, value: dict[str, Any]) -> None:
    if value["type"] == "json_schema":
        request.guided.json_schema = json.dumps(value["json_schema"]["schema"])
    elif value["type"] == "json_object":
        request.guided.json_object = True
    elif value["type"] != "text":
        raise Unsupported(value["type"])


def _message(message: dict[str, Any]) -> router_pb2.ChatMessage:
    made = router_pb2.ChatMessage(role=message["role"])
    content = message.get("content")
    if isinstance(content, str):
        made.content = content
    elif content is not None:
        made.parts.extend(part["text"] for part in content)
    for call in message.get("tool_calls", ()):
        arguments = call["function"].get("arguments")
        made.tool_calls.append(
            router_pb2.ToolCall(id=call.get("id", ""), name=call["function"]["name"], arguments_json=arguments or "")
        )
    if "tool_call_id" in message:
        made.tool_call_id = message["tool_call_id"]
    return made


async def events_of(answer: OpenAnswer) -> AsyncIterator[str]:
    """The pieces of choice 0 as they come."""
    while (piece := await answer.piece()) is not None:
        yield piece
