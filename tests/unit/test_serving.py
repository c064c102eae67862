"""How a service runs: addresses, health, pages, readiness, signals, drain, batching on streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace import process, serving
from headrace.config import TelemetryConfig
from headrace.errors import ConfigError
from headrace.serving import Outbox, Service, StreamError, exchange
from headrace.v1 import cache_pb2, cache_pb2_grpc

NAME = "headrace.v1.CacheService"
TIMEOUT_S = 20.0


class Echo(cache_pb2_grpc.CacheServiceServicer):
    """Lookup answers each ask with a lead; stats are zeros."""

    def __init__(self) -> None:
        self.outboxes: list[Outbox[int]] = []
        self.ended = asyncio.Event()
        self.limit = 100

    async def Lookup(self, request_iterator: Any, context: Any) -> None:
        outbox: Outbox[int] = Outbox(self.limit)
        self.outboxes.append(outbox)

        def receive(message: cache_pb2.LookupRequest) -> None:
            for ask in message.asks:
                if ask.key == b"bad":
                    raise StreamError(grpc.StatusCode.INVALID_ARGUMENT, "bad key")
                if ask.key == b"bug":
                    raise RuntimeError("bug")
                outbox.put(ask.ask)

        def encode(items: list[int]) -> cache_pb2.LookupResponse:
            return cache_pb2.LookupResponse(replies=[cache_pb2.LookupResponse.Reply(ask=item) for item in items])

        try:
            await exchange(request_iterator, context, receive=receive, outbox=outbox, encode=encode)
        finally:
            self.ended.set()

    async def GetStats(self, request: Any, context: Any) -> cache_pb2.GetStatsResponse:
        return cache_pb2.GetStatsResponse()


@asynccontextmanager
async def serving_echo(**of: Any) -> AsyncIterator[tuple[Service, Echo, grpc.aio.Channel]]:
    service = Service("test", "127.0.0.1:0", metrics_address="127.0.0.1:0", **of)
    echo = Echo()
    service.add(cache_pb2_grpc.add_CacheServiceServicer_to_server, echo, NAME)
    await service.start()
    async with serving.channel(service.address) as channel:
        try:
            yield service, echo, channel
        finally:
            await service.stop(0.0)


async def http(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body."""
    host, port = serving.split_address(address)
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    raw = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    writer.close()
    head, _, body = raw.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


async def health_of(channel: grpc.aio.Channel, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
    return int(reply.status)


# Addresses.


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("host.name:65535", ("host.name", 65535))],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert serving.split_address(text) == expected
    assert serving.join_address(*expected) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:port", "host:-1", "host:65536", "host:８０"])
def test_bad_addresses_name_the_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cache\.address: "):
        serving.split_address(text, "cache.address")


async def test_a_taken_port_is_a_configuration_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"test\.address: cannot listen on {address}: Address already in use"):
            await Service("test", address).start()
        with pytest.raises(ConfigError, match=rf"test\.metrics_address: cannot listen on {address}"):
            await Service("test", "127.0.0.1:0", metrics_address=address).start()


async def test_two_services_cannot_share_a_port() -> None:
    async with serving_echo() as (service, _, _):
        with pytest.raises(ConfigError, match="Address already in use"):
            await Service("other", service.address).start()


async def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        await Service("test", "203.0.113.1:0").start()


# Health and pages.


async def test_health_follows_readiness() -> None:
    serves, waits = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    async with serving_echo() as (service, _, channel):
        for ready, status, code in ((False, waits, 503), (True, serves, 200), (False, waits, 503)):
            await service.set_ready(ready)
            assert await health_of(channel, "") == status
            assert await health_of(channel, NAME) == status
            assert (await http(service.metrics_address, "/health"))[0] == code
            assert (await http(service.metrics_address, "/live"))[0] == 200
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(channel, "no.such.Service")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_pages() -> None:
    async with serving_echo() as (service, _, _):
        await service.set_ready(True)
        status, body = await http(service.metrics_address, "/metrics?name=x")
        assert status == 200
        assert "process_cpu_seconds_total" in body
        status, body = await http(service.metrics_address, "/health")
        assert json.loads(body) == {"service": "test", "status": "ok"}
        assert (await http(service.metrics_address, "/nothing"))[0] == 404
        assert (await http(service.metrics_address, "/metrics", "POST"))[0] == 405
        assert await http(service.metrics_address, "/live", "HEAD") == (200, "")


async def test_pages_survive_nonsense() -> None:
    async with serving_echo() as (service, _, _):
        host, port = serving.split_address(service.metrics_address)
        for nonsense in (b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n", b"x" * 100_000, b""):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(nonsense)
            writer.write_eof()
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), TIMEOUT_S)
            writer.close()
        assert (await http(service.metrics_address, "/live"))[0] == 200


async def test_without_metrics_address_there_are_no_pages() -> None:
    service = Service("test", "127.0.0.1:0")
    await service.start()
    assert service.metrics_address == ""
    await service.stop()


async def test_reflection_lists_the_services() -> None:
    async with serving_echo() as (_, _, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=TIMEOUT_S)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        reply = await call.read()
        call.cancel()
        assert NAME in {service.name for service in reply.list_services_response.service}


async def test_large_messages_pass_in_both_directions() -> None:
    """C16 a, b: beyond gRPC's own 4 MiB."""
    async with serving_echo() as (_, _, channel):
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        call = stub.Lookup(timeout=TIMEOUT_S)
        asks = [cache_pb2.LookupRequest.Ask(ask=1, key=b"k" * 8 * 2**20)]
        await call.write(cache_pb2.LookupRequest(asks=asks))
        assert (await call.read()).replies[0].ask == 1


async def test_messages_beyond_the_limit_are_refused() -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with serving_echo() as (service, _, _), grpc.aio.insecure_channel(service.address, options) as channel:
        call = cache_pb2_grpc.CacheServiceStub(channel).Lookup(timeout=TIMEOUT_S)
        await call.write(lookup(b"k" * (serving.MAX_MESSAGE_BYTES + 1)))
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_pings_are_allowed_as_often_as_clients_send_them() -> None:
    """C16 c."""
    client, server = dict(serving.CHANNEL_OPTIONS), dict(serving.SERVER_OPTIONS)
    assert client["grpc.keepalive_permit_without_calls"] == 1
    assert client["grpc.keepalive_time_ms"] >= server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert server["grpc.http2.max_ping_strikes"] == 0


def test_unknown_log_levels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.log_level"):
        process.configure_logging(TelemetryConfig(log_level="loud"))


# The end.


async def test_drain_comes_after_not_ready_and_before_the_stop(capsys: pytest.CaptureFixture[str]) -> None:
    stopping = asyncio.Event()
    async with serving_echo() as (service, echo, channel):
        seen: list[Any] = []

        async def drain() -> None:
            # A late word that all is well doesn't bring new work in.
            await service.set_ready(True)
            seen.append(service.ready)
            seen.append(await health_of(channel, NAME))
            # New calls are still answered: it is the service that says when to refuse.
            await cache_pb2_grpc.CacheServiceStub(channel).GetStats(cache_pb2.GetStatsRequest(), timeout=TIMEOUT_S)
            for outbox in echo.outboxes:
                outbox.close(StreamError(grpc.StatusCode.UNAVAILABLE, "bye"))
            await echo.ended.wait()

        running = asyncio.create_task(
            service.run_until_stopped(announce=True, drain=drain, grace_s=TIMEOUT_S, stopping=stopping)
        )
        call = cache_pb2_grpc.CacheServiceStub(channel).Lookup(timeout=TIMEOUT_S)
        await call.write(cache_pb2.LookupRequest(asks=[cache_pb2.LookupRequest.Ask(ask=1)]))
        await call.read()
        stopping.set()
        assert await call.code() == grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "bye"
        await asyncio.wait_for(running, TIMEOUT_S)
        assert seen == [False, health_pb2.HealthCheckResponse.NOT_SERVING]
    ready = json.loads(capsys.readouterr().out)
    assert ready == {
        "ready": "test",
        "address": service.address,
        "metrics": service.metrics_address or ready["metrics"],
    }


async def test_a_drain_longer_than_its_grace_is_cut() -> None:
    stopping = asyncio.Event()
    stopping.set()
    async with serving_echo() as (service, _, channel):
        call = cache_pb2_grpc.CacheServiceStub(channel).Lookup(timeout=TIMEOUT_S)
        await call.write(cache_pb2.LookupRequest(asks=[cache_pb2.LookupRequest.Ask(ask=1)]))
        await call.read()

        async def forever() -> None:
            await asyncio.Event().wait()

        await asyncio.wait_for(service.run_until_stopped(drain=forever, grace_s=0.0, stopping=stopping), TIMEOUT_S)
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_failing_drain_does_not_keep_the_service() -> None:
    stopping = asyncio.Event()
    stopping.set()
    async with serving_echo() as (service, _, _):

        async def broken() -> None:
            raise RuntimeError("no")

        await asyncio.wait_for(service.run_until_stopped(drain=broken, grace_s=1.0, stopping=stopping), TIMEOUT_S)


async def test_a_task_that_fails_ends_the_service_with_its_error() -> None:
    async with serving_echo() as (service, _, _):

        async def broken() -> None:
            raise RuntimeError("the clock stopped")

        service.spawn(broken(), "clock")
        with pytest.raises(RuntimeError, match="the clock stopped"):
            await asyncio.wait_for(service.run_until_stopped(stopping=asyncio.Event()), TIMEOUT_S)


SCRIPT = """
import asyncio, sys
from headrace.config import CacheConfig, Config, TelemetryConfig
from headrace.serving import Service

async def main():
    service = Service("test", "127.0.0.1:0")
    await service.start()
    async def drain():
        if sys.argv[1] == "stubborn":
            sys.stdout.write("draining\\n")
            sys.stdout.flush()
            await asyncio.Event().wait()
    await service.run_until_stopped(announce=True, drain=drain, grace_s=60.0)

asyncio.run(main())
"""


async def started(kind: str) -> asyncio.subprocess.Process:
    environment = dict(os.environ, PYTHONPATH=str(Path(serving.__file__).parents[1]))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, kind, stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert process.stdout is not None
    ready = json.loads(await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S))
    assert ready["ready"] == "test"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_exits_with_zero(number: signal.Signals) -> None:
    process = await started("quick")
    process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0


async def test_a_second_signal_ends_at_once() -> None:
    """C14 f."""
    process = await started("stubborn")
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S) == b"draining\n"
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 128 + signal.SIGTERM


# Batching.


async def test_an_outbox_gathers_while_its_reader_is_away() -> None:
    outbox: Outbox[int] = Outbox(10, batch=4)
    for item in range(6):
        assert outbox.put(item)
    assert await outbox.take() == [0, 1, 2, 3]
    assert await outbox.take() == [4, 5]
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(6)
    assert await waiting == [6]
    outbox.put(7)
    outbox.close()
    assert not outbox.put(8)
    assert await outbox.take() == [7]
    assert await outbox.take() is None


async def test_a_full_outbox_ends_its_stream() -> None:
    outbox: Outbox[int] = Outbox(3)
    assert [outbox.put(item) for item in range(4)] == [True, True, True, False]
    assert outbox.closed
    with pytest.raises(StreamError, match=r"3 items wait \(limit 3\)"):
        await outbox.take()


async def test_an_outbox_of_large_items_counts_bytes() -> None:
    mebibyte = 2**20
    outbox: Outbox[int] = Outbox(1000, size=lambda item: item * mebibyte)
    for item in (1, 2, 1, 70, 1, 0):
        assert outbox.put(item)
    assert [await outbox.take() for _ in range(3)] == [[1, 2, 1], [70], [1, 0]]
    for _ in range(257):
        assert outbox.put(1)
    assert not outbox.put(1)
    with pytest.raises(StreamError, match="268435456"):
        await outbox.take()


async def test_an_outbox_gives_out_what_waits_before_its_error() -> None:
    outbox: Outbox[int] = Outbox(3)
    outbox.put(1)
    outbox.close(StreamError(grpc.StatusCode.UNAVAILABLE, "bye"))
    outbox.close()
    assert await outbox.take() == [1]
    with pytest.raises(StreamError, match="bye"):
        await outbox.take()


def lookup(*keys: bytes) -> cache_pb2.LookupRequest:
    return cache_pb2.LookupRequest(
        asks=[cache_pb2.LookupRequest.Ask(ask=number, key=key) for number, key in enumerate(keys, 1)]
    )


async def test_an_exchange_answers_all_and_ends_with_its_peer() -> None:
    async with serving_echo() as (_, echo, channel):
        call = cache_pb2_grpc.CacheServiceStub(channel).Lookup(timeout=TIMEOUT_S)
        await call.write(lookup(b"a", b"b"))
        await call.write(lookup(b"c"))
        await call.done_writing()
        numbers = [reply.ask async for response in call for reply in response.replies]
        assert numbers == [1, 2, 1]
        assert await call.code() == grpc.StatusCode.OK
        await asyncio.wait_for(echo.ended.wait(), TIMEOUT_S)


@pytest.mark.parametrize(
    ("key", "code"), [(b"bad", grpc.StatusCode.INVALID_ARGUMENT), (b"bug", grpc.StatusCode.INTERNAL)]
)
async def test_an_exchange_ends_with_a_status(key: bytes, code: grpc.StatusCode) -> None:
    async with serving_echo() as (_, echo, channel):
        call = cache_pb2_grpc.CacheServiceStub(channel).Lookup(timeout=TIMEOUT_S)
        await call.write(lookup(b"a", key))
        assert [reply.ask for reply in (await call.read()).replies] == [1]
        assert await call.code() == code
        await asyncio.wait_for(echo.ended.wait(), TIMEOUT_S)


async def cancel(call: Any, _channel: Any) -> None:
    call.cancel()


async def close(_call: Any, channel: Any) -> None:
    await channel.close()


@pytest.mark.parametrize("leave", [cancel, close])
async def test_an_exchange_ends_when_its_peer_goes(leave: Callable[[Any, Any], Awaitable[None]]) -> None:
    """C16 g: the handler stops soon, and its reader with it."""
    async with serving_echo() as (service, echo, _):
        before = asyncio.all_tasks()
        channel = serving.channel(service.address)
        call = cache_pb2_grpc.CacheServiceStub(channel).Lookup(timeout=TIMEOUT_S)
        await call.write(lookup(b"a"))
        await call.read()
        await leave(call, channel)
        await asyncio.wait_for(echo.ended.wait(), TIMEOUT_S)
        await channel.close()
        leftover = {task for task in asyncio.all_tasks() - before if "_read" in repr(task.get_coro())}
        assert not leftover
