"""Certificates: which are taken, what becomes of them when their files change, and whom a service's port lets in."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import re
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.certificates import Authority, Files, own, put, shown
from tests.support.waiting import eventually

from headrace import config, serving, tls
from headrace.client import grpc_target
from headrace.config import TlsConfig
from headrace.errors import ConfigError
from headrace.serving import Service
from headrace.tls import ClientTls, Tls
from headrace.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2
from headrace.worker.links import SchedulerLink

DAY = datetime.timedelta(days=1)
NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    return authority.issue(tmp_path / "own")


def loaded(files: Files, **more: str) -> Tls:
    made = tls.load(files.config(**more))
    assert made is not None
    return made


# -- the configuration


def test_it_is_off_by_default() -> None:
    assert not config.load(None).tls.on
    assert tls.load(TlsConfig()) is None
    assert ClientTls.of(TlsConfig()) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("certificate = 'c'\nauthority = 'a'", "tls.key: must not be empty when another of"),
        ("key = 'k'", "tls.certificate: must not be empty"),
        ("client_certificates = true", "tls.client_certificates: needs TLS at the doors"),
        (
            "certificate = 'c'\nkey = 'k'\nauthority = 'a'\ndoors = false\nclient_certificates = true",
            "tls.client_certificates: needs TLS at the doors",
        ),
    ],
)
def test_half_of_it_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(f"[tls]\n{text}")
    assert str(caught.value).startswith(message)


def test_clients_of_a_mesh_whose_doors_are_plain_speak_plain_text(files: Files) -> None:
    assert ClientTls.of(files.config(doors=False)) is None
    assert ClientTls.of(files.config()) == files.client()


# -- which files are taken


def no_file(files: Files) -> None:
    files.certificate.unlink()


def no_key(files: Files) -> None:
    files.key.write_bytes(files.certificate.read_bytes())


def no_certificate(files: Files) -> None:
    files.certificate.write_bytes(files.key.read_bytes())


def no_authority(files: Files) -> None:
    files.authority.write_bytes(b"")


def half_written(files: Files) -> None:
    files.certificate.write_bytes(files.certificate.read_bytes()[:300])


def anothers_key(files: Files) -> None:
    put(files.key, Authority().issue(files.key.parent / "other").key.read_bytes())


def anothers_authority(files: Files) -> None:
    put(files.authority, Authority().issue(files.key.parent / "other").authority.read_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_file, r"tls\.certificate: cannot read .*certificate\.pem: No such file"),
        (no_key, r"tls\.key: .*key\.pem has no private key"),
        (no_certificate, r"tls\.certificate: .* has no certificate"),
        (no_authority, r"tls\.authority: .* has no certificate"),
        (half_written, r"tls\.certificate: .* has a certificate that cannot be read"),
        (anothers_key, r"tls\.key: .*key\.pem is not the key of .*certificate\.pem"),
        (anothers_authority, r"tls\.certificate: .* was issued by none of tls\.authority"),
    ],
)
def test_files_of_no_use_are_refused_by_name(files: Files, damage: Callable[[Files], None], message: str) -> None:
    damage(files)
    with pytest.raises(ConfigError, match=f"^{message}"):
        tls.load(files.config())


@pytest.mark.parametrize(
    ("not_before", "not_after", "what"),
    [(NOW - 2 * DAY, NOW - DAY, "has expired"), (NOW + DAY, NOW + 2 * DAY, "is not valid yet")],
)
def test_a_certificate_out_of_its_time_is_refused(
    authority: Authority, tmp_path: Path, not_before: datetime.datetime, not_after: datetime.datetime, what: str
) -> None:
    files = authority.issue(tmp_path / "own", not_before=not_before, not_after=not_after)
    with pytest.raises(ConfigError, match=rf"^tls\.certificate: {re.escape(str(files.certificate))} {what}"):
        tls.load(files.config())


# -- change


def test_changed_files_are_used_and_broken_ones_told_once(
    authority: Authority, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    made = loaded(files)
    first = made.channel_credentials()
    caplog.set_level(logging.INFO, "headrace.tls")
    made.refresh()
    assert not caplog.records

    put(files.certificate, b"not yet written")
    made.refresh()
    assert not caplog.records, "it may be in the middle of being changed"
    for _ in range(3):
        made.refresh()
    (told,) = caplog.messages
    assert re.match(r"TLS: the former certificates stay in force: tls\.certificate: .* has no certificate", told)

    authority.issue(files.certificate.parent)
    caplog.clear()
    made.refresh()
    made.refresh()
    assert caplog.messages == ["TLS: new certificates are in force"]
    assert made.channel_credentials() is not first


def test_a_certificate_that_comes_before_its_key_is_no_failure(
    authority: Authority, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = loaded(files)
    caplog.set_level(logging.INFO, "headrace.tls")
    following = authority.issue(tmp_path / "next")
    put(files.certificate, following.certificate.read_bytes())
    made.refresh()
    put(files.key, following.key.read_bytes())
    made.refresh()
    assert caplog.messages == ["TLS: new certificates are in force"]


def test_files_that_change_by_their_folders_link_are_seen(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("first", "second"):
        authority.issue(tmp_path / name)
    link = tmp_path / "current"
    link.symlink_to("first")
    files = Files(link / "certificate.pem", link / "key.pem", link / "authority.pem")
    made = loaded(files)
    (tmp_path / "fresh").symlink_to("second")
    os.replace(tmp_path / "fresh", link)
    caplog.set_level(logging.INFO, "headrace.tls")
    made.refresh()
    assert caplog.messages == ["TLS: new certificates are in force"]


# -- a service's port


@contextlib.asynccontextmanager
async def serving_with(made: Tls | None, address: str = "127.0.0.1:0") -> AsyncIterator[Service]:
    service = Service("cache", address, tls=made)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def asks(address: str, credentials: tls.ChannelTls | None) -> str:
    """What a call comes to: OK, or its status."""
    async with serving.channel(address, credentials, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "OK"


async def test_only_peers_of_the_authority_are_served(authority: Authority, files: Files, tmp_path: Path) -> None:
    stranger = Authority().issue(tmp_path / "stranger")
    # Trusts the service, but shows a certificate of another authority.
    intruder = Files(stranger.certificate, stranger.key, files.authority)
    async with serving_with(loaded(files)) as service:
        assert await asks(service.address, loaded(files)) == "OK"
        assert await asks(service.address, loaded(authority.issue(tmp_path / "peer"))) == "OK"
        assert await asks(service.address, None) == "UNAVAILABLE"
        assert await asks(service.address, files.client(identified=False)) == "UNAVAILABLE"
        assert await asks(service.address, intruder.client()) == "UNAVAILABLE"
        assert await asks(service.address, loaded(stranger)) == "UNAVAILABLE"


async def test_a_peer_must_carry_the_expected_name(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own", "mesh.internal")
    async with serving_with(loaded(files)) as service:
        assert await asks(service.address, loaded(files)) == "UNAVAILABLE"
        assert await asks(service.address, loaded(files, server_name="mesh.internal")) == "OK"
        assert await asks(service.address, files.client(server_name="other.internal")) == "UNAVAILABLE"


async def test_a_new_certificate_is_for_new_connections(authority: Authority, files: Files) -> None:
    async with serving_with(loaded(files)) as service:
        before = own(files)
        assert await shown(service.address, files.client()) == before
        async with serving.channel(service.address, loaded(files)) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            authority.issue(files.certificate.parent)
            after = own(files)
            assert after != before

            async def changed() -> bool:
                return await shown(service.address, files.client()) == after

            await eventually(changed, "the new certificate is shown", 15)
            await service.set_ready(True)
            async with asyncio.timeout(10):
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()


class Members(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Counts who joins."""

    def __init__(self) -> None:
        self.joined = asyncio.Event()

    async def Join(self, request_iterator: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
        self.joined.set()
        await asyncio.Event().wait()
        yield


async def test_a_link_comes_back_with_the_new_certificate(files: Files) -> None:
    """Even when the authority is another by then, which its first channel would not trust."""
    made = loaded(files)
    link, address = None, "127.0.0.1:0"
    try:
        for _ in range(2):
            members, service = Members(), Service("scheduler", address, tls=loaded(files))
            service.add(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, members, "headrace.v1.Scheduler")
            await service.start()
            address = service.address
            if link is None:
                there = SchedulerLink(address, scheduler_pb2.JoinHello, worker_pb2.Load, lambda _: None, made)
                link = asyncio.create_task(there.run())
            async with asyncio.timeout(15):
                await members.joined.wait()
            await service.stop(0)
            Authority().issue(files.certificate.parent)
            made.refresh()
    finally:
        assert link is not None
        link.cancel()
        await asyncio.gather(link, return_exceptions=True)


@pytest.mark.parametrize(("host", "is_one"), [("127.0.0.1", 1), ("::1", 1), ("localhost", 1), ("0.0.0.0", 0), ("a", 0)])
def test_loopback(host: str, is_one: int) -> None:
    assert tls.is_loopback(host) == bool(is_one)


@pytest.mark.parametrize(
    ("address", "secured", "warnings"), [("0.0.0.0:0", 0, 1), ("127.0.0.1:0", 0, 0), ("0.0.0.0:0", 1, 0)]
)
async def test_plain_text_for_all_the_world_is_warned_of(
    files: Files, caplog: pytest.LogCaptureFixture, address: str, secured: int, warnings: int
) -> None:
    async with serving_with(loaded(files) if secured else None, address):
        found = [message for message in caplog.messages if "plain text" in message]
    assert len(found) == warnings
    assert all(message.startswith("cache.address: 0.0.0.0:") for message in found)


# -- clients


@pytest.mark.parametrize(
    ("target", "given", "secured"),
    [
        ("a:1", False, False),
        ("a:1", True, True),
        ("grpc://a:1", True, False),
        ("grpcs://a:1", False, True),
        ("grpcs://a:1", True, True),
    ],
)
def test_a_targets_scheme_decides(target: str, given: bool, secured: bool) -> None:
    mine = ClientTls(Path("ca.pem"))
    address, chosen = grpc_target(target, mine if given else None)
    assert address == "a:1"
    assert chosen == ((mine if given else ClientTls()) if secured else None)


def test_a_clients_files_are_named_when_they_are_of_no_use(files: Files, tmp_path: Path) -> None:
    missing = tmp_path / "none.pem"
    with pytest.raises(ConfigError, match=r"^TLS: the authority .*none\.pem cannot be used: No such file"):
        ClientTls(missing).channel_credentials()
    with pytest.raises(ConfigError, match=r"^TLS: the certificate .*none\.pem cannot be used: No such file"):
        ClientTls(files.authority, missing).ssl_context()
    anothers_key(files)
    with pytest.raises(ConfigError, match=r"^TLS: the certificate .* cannot be used: .*MISMATCH"):
        files.client().ssl_context()


def test_a_clients_key_may_stand_in_its_certificates_file(files: Files, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(files.key.read_bytes() + files.certificate.read_bytes())
    client = ClientTls().but(files.authority, both, None)
    assert isinstance(client.ssl_context(), ssl.SSLContext)
    client.channel_credentials()
