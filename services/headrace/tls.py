"""TLS of the links and of clients: credentials from certificate files, which may change while a service runs.

A service loads its :class:`Tls` once (:func:`load`; None when the configuration has no TLS) and lets it
:meth:`Tls.watch` the files. Links are always mutual: a server takes only peers with a certificate of the authority, and
shows its own. New connections use what the files hold by then; those that are open go on. Which files are usable is
decided by the extension, for the router and for Python's services alike.

:class:`ClientTls` is for clients at the doors, who may have no certificate. What this module leaves to others: the
doors themselves (``gateway_rs/src/plane/tls.rs``) and gRPC's other options (``serving.py``).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import grpc

from headrace.config import TlsConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace._gateway import Certificates

log = logging.getLogger(__name__)

T = TypeVar("T")

#: How often the files are looked at.
LOOK_EVERY_S = 1.0

#: gRPC's name for "expect this name in the server's certificate instead of the address's host".
_NAME_OPTION = "grpc.ssl_target_name_override"


class ChannelTls(Protocol):
    """What a channel needs to speak TLS."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a new channel. Raises ConfigError when there are none."""

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Options that go with them."""


class Tls:
    """The certificates of a service, for both ends of its links."""

    def __init__(self, certificates: Certificates, server_name: str = "") -> None:
        self._certificates = certificates
        self._server_name = server_name
        self._pem = certificates.current()

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server. It asks at each handshake, so that one set of credentials serves for its whole life."""
        # Asked from gRPC's own threads; that two of them should give the same configuration twice does no harm.
        given = self._pem

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            now = self._pem
            if now is given:
                return None
            given = now
            return _server_configuration(now)

        # None, for "no change", is missing in the stubs.
        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(given),
            changed,  # type: ignore[arg-type]
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a new channel, which keeps them: a channel made later has newer ones."""
        certificate, key, authority = self._pem
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Options that go with them."""
        return ((_NAME_OPTION, self._server_name),) if self._server_name else ()

    def refresh(self) -> None:
        """Look at the files. New ones are used from now on; those that cannot be used are logged, once."""
        try:
            if self._certificates.refresh():
                self._pem = self._certificates.current()
                log.info("TLS: new certificates are in force")
        except ValueError as error:
            log.warning("TLS: the former certificates stay in force: %s", error)

    async def watch(self) -> None:
        """Look at the files for as long as the service runs. Never returns."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # Files may be slow to answer; streams must not wait for them.
            await asyncio.to_thread(self.refresh)


def _server_configuration(pem: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    certificate, key, authority = pem
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


def load(config: TlsConfig) -> Tls | None:
    """The service's certificates; None when TLS is off. Raises ConfigError when the files cannot be used."""
    if not config.on:
        return None
    # Only here: the scheduler and the cache need nothing else of the extension.
    from headrace._gateway import Certificates

    try:
        return Tls(Certificates.load(config.certificate, config.key, config.authority), config.server_name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class ClientTls:
    """How a client at a door speaks TLS."""

    #: PEM file: who may have issued the server's certificate; None = the public authorities.
    authority: Path | None = None
    #: PEM files: the client's own certificate and its key (None = in the same file), for doors that ask for one.
    certificate: Path | None = None
    key: Path | None = None
    #: The name that the server's certificate must carry; empty = the host of the address.
    server_name: str = ""

    @classmethod
    def of(cls, config: TlsConfig) -> Self | None:
        """For the doors of a mesh with this configuration; None when they speak plain text."""
        if not (config.on and config.doors):
            return None
        return cls(Path(config.authority), Path(config.certificate), Path(config.key), config.server_name)

    def but(self, authority: Path | None, certificate: Path | None, key: Path | None) -> Self:
        """With these files instead, those that are given. A certificate comes with its own key."""
        changed = self if authority is None else replace(self, authority=authority)
        return changed if certificate is None else replace(changed, certificate=certificate, key=key)

    def ssl_context(self) -> ssl.SSLContext:
        """For HTTPS. Raises ConfigError when a file cannot be used."""
        context = _explained("authority", self.authority, lambda: ssl.create_default_context(cafile=self.authority))
        if self.certificate is not None:
            certificate, key = self.certificate, self.key
            # The password: without, OpenSSL would ask on the terminal for an encrypted key's.
            _explained("certificate", certificate, lambda: context.load_cert_chain(certificate, key, password=""))
        context.set_alpn_protocols(["http/1.1"])
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For gRPC. Raises ConfigError when a file cannot be used."""
        # gRPC would say no more than that a handshake failed.
        self.ssl_context()
        key = self.key if self.key is not None else self.certificate
        read = (path.read_bytes() if path is not None else None for path in (self.authority, key, self.certificate))
        return grpc.ssl_channel_credentials(*read)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Options that go with them."""
        return ((_NAME_OPTION, self.server_name),) if self.server_name else ()


def _explained(what: str, path: Path | None, work: Callable[[], T]) -> T:
    try:
        return work()
    except OSError as error:
        # ssl's errors are such too, with a number of no meaning to people.
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"TLS: the {what} {path} cannot be used: {reason or error}") from error
