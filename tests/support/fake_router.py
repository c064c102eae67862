"""A router that answers by script, for tests of what talks to one: the client, chat, bench.

It speaks the native gRPC API and the OpenAI HTTP API's streaming form with no mesh behind it, and remembers what it was
asked and what was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from headrace.v1 import router_pb2, router_pb2_grpc, types_pb2

Response = router_pb2.GenerateResponse
Script = Callable[[router_pb2.GenerateRequest, Any], AsyncIterator[Response]]


def started(request: router_pb2.GenerateRequest, prompt_tokens: int = 3) -> Response:
    """The first event of every stream."""
    return Response(
        started=Response.Started(request_id="r1", model=request.model, prompt_tokens=prompt_tokens, created_s=1)
    )


def delta(text: str, *ids: int, choice: int = 0) -> Response:
    """A piece of text."""
    return Response(delta=Response.Delta(choice=choice, text=text, ids=ids))


def finish(outcome: types_pb2.Outcome = types_pb2.OUTCOME_STOP, choice: int = 0, **stop: Any) -> Response:
    """The end of a choice."""
    return Response(finish=Response.Finish(choice=choice, outcome=outcome, **stop))


def usage(prompt: int, cached: int, completion: int, *, cached_answer: bool = False) -> Response:
    """The books of the request."""
    numbers = types_pb2.Usage(prompt_tokens=prompt, cached_prompt_tokens=cached, completion_tokens=completion)
    return Response(usage=Response.FinalUsage(usage=numbers, cached_answer=cached_answer))


async def answer_as_asked(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[Response]:
    """As many ids as asked for, one a message."""
    count = request.stopping.max_tokens or 4
    yield started(request)
    for index in range(count):
        yield delta(f" w{index}", index)
    yield finish(types_pb2.OUTCOME_LENGTH)
    yield usage(3, 0, count)


async def fail(
    context: Any, status: grpc.StatusCode, message: str, *, reason: str = "", retry_s: float = 0.0, field: str = ""
) -> None:
    """End the call with a rich status."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=reason, domain="headrace")]
    if retry_s:
        delay = Duration()
        delay.FromNanoseconds(int(retry_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    rich = status_pb2.Status(code=status.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        rich.details.append(packed)
    await context.abort(status, message, (("grpc-status-details-bin", rich.SerializeToString()),))


@dataclass
class FakeRouter(router_pb2_grpc.InferenceServiceServicer):
    """The gRPC side. A context manager; ``address`` is known inside it."""

    script: Script = answer_as_asked
    models: tuple[str, ...] = ("toy", "other")
    address: str = ""
    requests: list[router_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    times_left_s: list[float | None] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        router_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> AsyncIterator[Response]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.times_left_s.append(context.time_remaining())
        try:
            async for event in self.script(request, context):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            # The second when it was about to write.
            self.cancelled.set()
            raise

    async def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        kind = router_pb2.ListModelsResponse.Model
        return router_pb2.ListModelsResponse(
            models=[
                kind(name=name, context_tokens=64, vocab_size=902, ready_workers=1, tokenizer_sha256="ab")
                for name in self.models
            ]
        )

    async def Tokenize(self, request: router_pb2.TokenizeRequest, context: Any) -> router_pb2.TokenizeResponse:
        if request.model not in self.models:
            await fail(context, grpc.StatusCode.NOT_FOUND, f"no model {request.model}", reason="MODEL_NOT_FOUND")
        text = request.text or "".join(message.content for message in request.chat.messages)
        # A token a word.
        return router_pb2.TokenizeResponse(ids=range(len(text.split())), context_tokens=64)

    async def Detokenize(self, request: router_pb2.DetokenizeRequest, context: Any) -> router_pb2.DetokenizeResponse:
        return router_pb2.DetokenizeResponse(text=bytes(request.ids).decode())


#: Of an HTTP request: its path and its body, to the bytes of the answer in the pieces in which they are written.
HttpScript = Callable[[str, dict[str, Any]], list[bytes]]


def http_response(status: int, body: bytes, *headers: str) -> bytes:
    """An answer whole."""
    return "\r\n".join((f"HTTP/1.1 {status} OK", f"Content-Length: {len(body)}", *headers, "", "")).encode() + body


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(payload: Any) -> bytes:
    """A server-sent event in a chunk of its own."""
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return chunk(f"data: {text}\n\n".encode())


def http_as_asked(path: str, body: dict[str, Any]) -> list[bytes]:
    """As many events as tokens were asked for."""
    if path == "/v1/models":
        return [http_response(200, json.dumps({"data": [{"id": "toy"}]}).encode())]
    if path == "/tokenize":
        count = len(str(body["prompt"]).split())
        return [http_response(200, json.dumps({"count": count, "tokens": list(range(count))}).encode())]
    count = body["max_tokens"]
    choices = [{"choices": [{"index": 0, "text": f" w{at}", "delta": {"content": f" w{at}"}}]} for at in range(count)]
    end = {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]}
    books = {
        "choices": [],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": count,
            "total_tokens": 3 + count,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    return [SSE_HEAD, *map(event, choices), event(end), event(books), event("[DONE]"), b"0\r\n\r\n"]


@dataclass
class FakeHttpRouter:
    """The HTTP side. A context manager; ``address`` is known inside it."""

    script: HttpScript = http_as_asked
    address: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    connections: int = 0
    #: Close after each answer.
    close: bool = False
    #: Hold the connection open after the last piece, for an answer that never ends.
    hang: bool = False

    async def __aenter__(self) -> Self:
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.hang_up()
        await self._server.wait_closed()

    def hang_up(self) -> None:
        """Close the connections that are open, without a word before."""
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        self._writers.discard(writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ", 2)[1]
        lengths = [line.split(":")[1] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        body = json.loads(await reader.readexactly(int(lengths[0])) or b"{}") if lengths else {}
        self.requests.append((path, body))
        for piece in self.script(path, body):
            if self.close:
                piece = piece.replace(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n")
            writer.write(piece)
            await writer.drain()
        if self.hang:
            await reader.read(1)
        return not self.close
