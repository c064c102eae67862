"""How a Python service runs, the same for all: start, health, metrics, batching on streams, drain.

A service makes a :class:`Service`, adds its servicers, starts it, says that it is ready, and waits to be told to stop::

    service = Service("cache", config.address, metrics_address=config.metrics_address)
    service.add(cache_pb2_grpc.add_CacheServiceServicer_to_server, servicer, "headrace.v1.CacheService")
    await service.start()
    await service.run_until_stopped(announce=True, drain=servicer.drain, grace_s=config.drain_grace_s)

Leaving goes in this order: not ready (gRPC health NOT_SERVING, ``/health`` 503), the service's own ``drain`` under its
grace, then the server stops and what still runs is cut. A second signal ends the process at once.

Streams between services carry whatever is ready in each message. :class:`Outbox` does that gathering, and
:func:`exchange` runs both directions of a server's stream with it.

gRPC options stand here and nowhere else. What this module leaves to others: what a service answers, its metrics, its
spans.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from headrace import metrics
from headrace.errors import ConfigError, HeadraceError
from headrace.process import StopSignals, print_ready
from headrace.tls import ChannelTls, Tls, is_loopback

log = logging.getLogger(__name__)

#: A prompt of 5 MB or an answer with many log-probabilities is one message; gRPC's own 4 MiB is too little for both.
MAX_MESSAGE_BYTES = 64 * 2**20

_MESSAGE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without a word is noticed after 40 s even when nothing is being sent.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Links are quiet for minutes during a long prefill; pings must go on meanwhile.
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_MESSAGE_OPTIONS,
    # Services restart within a second; gRPC's own backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_MESSAGE_OPTIONS,
    # Every ping interval a client of ours uses is allowed, with and without open calls: no GOAWAY for pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Links are one stream each; people and probes need a few more.
    ("grpc.max_concurrent_streams", 4096),
    # A peer that connects and says nothing is hung up on.
    ("grpc.server_handshake_timeout_ms", 15_000),
    # With it, two processes could share a port without either noticing.
    ("grpc.so_reuseport", 0),
)

#: After the service's own drain only probes and short calls are left.
_STOP_GRACE_S = 0.5

T = TypeVar("T")


def channel(
    address: str, tls: ChannelTls | None = None, options: Sequence[tuple[str, Any]] = CHANNEL_OPTIONS
) -> grpc.aio.Channel:
    """A channel to another service of the mesh; in plain text without ``tls``. Raises ConfigError."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=(*options, *tls.channel_options()))


def split_address(address: str, key: str = "address") -> tuple[str, int]:
    """Host and port of ``host:port`` (``[::1]:8080`` for IPv6). Raises ConfigError, naming the key."""
    host, colon, port_text = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port_text.isascii() and port_text.isdigit()):
        raise ConfigError(f"{key}: expected host:port, got {address!r}")
    port = int(port_text)
    if port > 65535:
        raise ConfigError(f"{key}: port must be at most 65535, got {port}")
    return host, port


def join_address(host: str, port: int) -> str:
    """``host:port``, with brackets where IPv6 needs them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Service:
    """One gRPC server with health, reflection, metrics and an orderly end.

    It starts not ready; :meth:`set_ready` moves gRPC health (overall and of each service) and ``/health`` together.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        metrics_address: str = "",
        registry: CollectorRegistry | None = None,
        address_key: str = "",
        tls: Tls | None = None,
    ) -> None:
        """``address_key`` is how error messages call the address's setting; by default ``NAME.address``.

        With ``tls`` only peers with a certificate of the authority are served, and the certificates are watched; the
        metrics pages are plain HTTP all the same.
        """
        self.name = name
        self.registry = registry if registry is not None else metrics.new_registry()
        self.ready = False
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        self._tls = tls
        self._key = address_key or f"{name}.address"
        self._wanted = address
        self._wanted_metrics = metrics_address
        self._port = 0
        self._names: list[str] = []
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._pages: _Pages | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._leaving = False

    @property
    def address(self) -> str:
        """host:port as bound; known once started."""
        return join_address(split_address(self._wanted, self._key)[0], self._port)

    @property
    def metrics_address(self) -> str:
        """host:port of the metrics pages; empty when there are none."""
        return self._pages.address if self._pages else ""

    def add(self, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: object, full_name: str) -> None:
        """Serve this too. ``full_name`` is the proto service's, like ``headrace.v1.CacheService``."""
        add_to_server(servicer, self.server)
        self._names.append(full_name)

    async def start(self) -> None:
        """Open the ports. Raises ConfigError when an address is wrong or taken."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)
        await self.set_ready(False)
        self._port = await self._bind()
        try:
            if self._wanted_metrics:
                self._pages = _Pages(self)
                await self._pages.start(self._wanted_metrics, f"{self.name}.metrics_address")
            await self.server.start()
        except BaseException:
            await self.stop(0.0)
            raise
        if self._tls is not None:
            self.spawn(self._tls.watch(), "certificates")
        elif not is_loopback(split_address(self._wanted, self._key)[0]):
            log.warning(
                "%s: %s can be reached from other machines in plain text and by anybody; [tls] in the configuration "
                "changes that",
                self._key,
                self.address,
            )

    async def _bind(self) -> int:
        host, port = split_address(self._wanted, self._key)
        # Asked with a socket of our own first: its error says what is wrong, gRPC's only that something is.
        await _check_can_bind(host, port, self._key)
        try:
            where = join_address(host, port)
            if self._tls is None:
                bound = self.server.add_insecure_port(where)
            else:
                bound = self.server.add_secure_port(where, self._tls.server_credentials())
        except RuntimeError as error:
            raise ConfigError(f"{self._key}: cannot listen on {self._wanted}: {error}") from error
        if bound == 0:
            raise ConfigError(f"{self._key}: cannot listen on {self._wanted}")
        return bound

    async def set_ready(self, ready: bool) -> None:
        """Say whether new work is welcome. Calls that are under way do not notice. Who leaves is not ready again."""
        ready = ready and not self._leaving
        self.ready = ready
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, serving if ready else not_serving)

    async def announce(self, **extra: str) -> None:
        """Become ready and print the ready line; ``extra`` are further fields of it."""
        await self.set_ready(True)
        print_ready(self.name, address=self.address, metrics=self.metrics_address, **extra)
        log.info("%s serves on %s", self.name, self.address)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run this beside the server for as long as it serves. If it fails, the service ends with that error."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._failure is None:
            log.error("%s: task %s failed", self.name, task.get_name(), exc_info=error)
            self._failure = error
            self._failed.set()

    async def run_until_stopped(
        self,
        *,
        announce: bool = False,
        drain: Callable[[], Awaitable[None]] | None = None,
        grace_s: float = 0.0,
        stopping: asyncio.Event | None = None,
    ) -> None:
        """Serve until a signal (or ``stopping``, for tests) asks to stop; drain within the grace; stop.

        ``announce``: become ready first. Whoever isn't ready yet (a worker whose engine warms up) calls
        :meth:`announce` later, from a task of its own. Raises what a task of :meth:`spawn` failed with.
        """
        with contextlib.ExitStack() as stack:
            if stopping is None:
                # Ahead of the ready line: who reads it may send a signal at once.
                stopping = stack.enter_context(StopSignals()).stopping
            if announce:
                await self.announce()
            await self._wait(stopping)
            await self._leave(drain, grace_s)
        if self._failure is not None:
            raise self._failure

    async def _wait(self, stopping: asyncio.Event) -> None:
        waits = [asyncio.create_task(stopping.wait()), asyncio.create_task(self._failed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _leave(self, drain: Callable[[], Awaitable[None]] | None, grace_s: float) -> None:
        log.info("%s drains, for %.1f s at most", self.name, grace_s)
        self._leaving = True
        await self.set_ready(False)
        if drain is not None:
            try:
                # wait_for even at grace 0: the drain still gets to say goodbye to whom it can without waiting.
                await asyncio.wait_for(_run(drain), timeout=max(grace_s, 0.05))
            except TimeoutError:
                log.warning("%s: grace of %.1f s is over, ending what still runs", self.name, grace_s)
            except Exception:
                log.exception("%s: drain failed", self.name)
        await self.stop(_STOP_GRACE_S)
        log.info("%s stopped", self.name)

    async def stop(self, grace_s: float | None = None) -> None:
        """Close the ports and end the tasks; calls still running are cut after the grace. May be called again."""
        self.ready = False
        await self.server.stop(grace_s)
        if self._pages is not None:
            await self._pages.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(drain: Callable[[], Awaitable[None]]) -> None:
    await drain()


async def _check_can_bind(host: str, port: int, key: str) -> None:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC and asyncio do; it doesn't allow a second listener.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{key}: cannot listen on {join_address(host, port)}: {reason}") from error


class _Pages:
    """``/metrics``, ``/health`` (ready?) and ``/live`` (running?) over HTTP/1.1, one request a connection.

    On the service's own loop, so that ``/live`` fails when the loop is stuck. Small, because that is all it must do.
    """

    _MAX_CONNECTIONS = 64
    _MAX_HEAD_BYTES = 16 * 1024
    _REQUEST_TIMEOUT_S = 5.0

    def __init__(self, service: Service) -> None:
        self.address = ""
        self._service = service
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, address: str, key: str) -> None:
        host, port = split_address(address, key)
        await _check_can_bind(host, port, key)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=self._MAX_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(f"{key}: cannot listen on {address}: {error.strerror or error}") from error
        self.address = join_address(host, self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._connections) >= self._MAX_CONNECTIONS:
                return
            self._connections.add(task)
            async with asyncio.timeout(self._REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        status, kind, body = self._page(method, path)
        reasons = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
        lines = (
            f"HTTP/1.1 {status} {reasons[status]}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode() + (b"" if method == "HEAD" else body)

    def _page(self, method: str, path: str) -> tuple[int, str, bytes]:
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"only GET\n"
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._service.registry)
        if path == "/health":
            ready = self._service.ready
            body = json.dumps({"service": self._service.name, "status": "ok" if ready else "not ready"})
            return (200 if ready else 503), "application/json", body.encode() + b"\n"
        if path == "/live":
            return (
                200,
                "application/json",
                json.dumps({"service": self._service.name, "status": "live"}).encode() + b"\n",
            )
        return 404, "text/plain", b"no such page: /metrics, /health, /live\n"


class StreamError(HeadraceError):
    """Ends a stream with a gRPC status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.details = details


class Outbox(Generic[T]):
    """What waits to be written to one stream: natural batching with a bound.

    While one message is being written, :meth:`put` gathers; the next :meth:`take` gets all of it at once. So a quiet
    stream sends each item at once and a busy one sends few, full messages, and no timer is needed.
    ``put`` never waits: a reader who falls ``limit`` items (or ``LIMIT_BYTES``) behind is not reading, and its stream
    ends.
    """

    #: Of items that have a size: what may wait, and what one message holds unless a single item is larger.
    LIMIT_BYTES = 256 * 2**20
    BATCH_BYTES = 4 * 2**20

    def __init__(self, limit: int, *, batch: int = 1024, size: Callable[[T], int] | None = None) -> None:
        """``batch`` bounds the items of one message; where these can be large, ``size`` says how many bytes one is."""
        self._items: deque[T] = deque()
        self._limit = limit
        self._batch = batch
        self._size = size
        self._bytes = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._error: StreamError | None = None
        #: Set when the bound was met.
        self.overflowed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        """Nothing more is taken in."""
        return self._closed

    def put(self, item: T) -> bool:
        """Add an item. False when it isn't taken: the outbox is closed, or was full and is closed now."""
        if self._closed:
            return False
        if len(self._items) >= self._limit or self._bytes > self.LIMIT_BYTES:
            full = f"the peer does not read: {len(self._items)} items wait (limit {self._limit})"
            if self._size is not None:
                full += f", of {self._bytes} bytes (limit {self.LIMIT_BYTES})"
            self._items.clear()
            self.close(StreamError(grpc.StatusCode.RESOURCE_EXHAUSTED, full))
            self.overflowed.set()
            return False
        self._items.append(item)
        if self._size is not None:
            self._bytes += self._size(item)
        self._wake.set()
        return True

    def close(self, error: StreamError | None = None) -> None:
        """Take no more. What waits is still given out; then ``take`` says so, with the error when there is one."""
        if not self._closed:
            self._closed = True
            self._error = error
        self._wake.set()

    async def take(self) -> list[T] | None:
        """All that waits (up to a batch), once there is something. None when closed and empty, or raises its error."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        if self._size is not None:
            return self._take_sized(self._size)
        if len(self._items) <= self._batch:
            items = list(self._items)
            self._items.clear()
            return items
        return [self._items.popleft() for _ in range(self._batch)]

    def _take_sized(self, size: Callable[[T], int]) -> list[T]:
        items = [self._items.popleft()]
        taken = size(items[0])
        while self._items and len(items) < self._batch and taken + size(self._items[0]) <= self.BATCH_BYTES:
            taken += size(self._items[0])
            items.append(self._items.popleft())
        self._bytes -= taken
        return items


async def exchange(
    requests: AsyncIterable[Any],
    context: grpc.aio.ServicerContext[Any, Any],
    *,
    receive: Callable[[Any], None],
    outbox: Outbox[T],
    encode: Callable[[list[T]], Any],
) -> None:
    """Run both directions of one stream in its handler until one of them ends it.

    ``receive`` gets each request message and may raise StreamError; ``encode`` makes one response message of all that
    the outbox gathered. The peer closing its half ends the stream once the outbox is empty; closing the outbox ends it
    too. However it ends (also by cancellation), the reader is gone when this returns.
    """
    # The peer's call returns with the headers, which would otherwise wait for the first message.
    await context.send_initial_metadata(())
    reader = asyncio.create_task(_read(requests, receive, outbox))
    writer = asyncio.create_task(_write(context, outbox, encode))
    overflow = asyncio.create_task(outbox.overflowed.wait())
    failure: StreamError | None = None
    try:
        await asyncio.wait((writer, overflow), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((writer,), timeout=_STOP_GRACE_S if overflow.done() else None)
        if not writer.done():
            # Its write is blocked, and a status would queue behind what is not being read. This resets the stream.
            log.warning("a peer does not read: its stream is cut")
            raise asyncio.CancelledError
        await writer
    except StreamError as error:
        failure = error
    finally:
        outbox.close()
        for task in (reader, writer, overflow):
            task.cancel()
        # Their failures were passed on already.
        await asyncio.gather(reader, writer, overflow, return_exceptions=True)
    if failure is not None:
        # Not while the reader still reads: it would fail for it.
        await context.abort(failure.code, failure.details)


async def _write(
    context: grpc.aio.ServicerContext[Any, Any], outbox: Outbox[T], encode: Callable[[list[T]], Any]
) -> None:
    while (items := await outbox.take()) is not None:
        await context.write(encode(items))


async def _read(requests: AsyncIterable[Any], receive: Callable[[Any], None], outbox: Outbox[T]) -> None:
    try:
        async for message in requests:
            try:
                receive(message)
            except StreamError as error:
                return outbox.close(error)
            except Exception:
                log.exception("a stream's message could not be handled")
                return outbox.close(StreamError(grpc.StatusCode.INTERNAL, "the message could not be handled"))
    except grpc.aio.BaseError:
        # The call ended under the reader.
        pass
    finally:
        outbox.close()
