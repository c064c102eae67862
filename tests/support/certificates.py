"""Certificates for tests: an authority that issues them, into files as a configuration names them."""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme

from headrace.config import TlsConfig
from headrace.tls import ClientTls


@dataclass(frozen=True)
class Files:
    """A certificate, its key and its authority, as PEM files."""

    certificate: Path
    key: Path
    authority: Path

    def config(self, **more: Any) -> TlsConfig:
        return TlsConfig(**self.table(), **more)

    def table(self) -> dict[str, str]:
        """As in a configuration."""
        return {name: str(getattr(self, name)) for name in ("certificate", "key", "authority")}

    def client(self, *, identified: bool = True, server_name: str = "") -> ClientTls:
        """A client that trusts the authority, with or without a certificate of its own."""
        if not identified:
            return ClientTls(self.authority, server_name=server_name)
        return ClientTls(self.authority, self.certificate, self.key, server_name)


class Authority:
    """Who issues certificates."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def issue(
        self,
        folder: Path,
        *names: str,
        not_before: datetime.datetime | None = None,
        not_after: datetime.datetime | None = None,
    ) -> Files:
        """Makes a new certificate and puts it into that folder's files, each replaced as a whole."""
        issued = self._ca.issue_cert(*(names or ("127.0.0.1", "localhost")), not_before=not_before, not_after=not_after)
        folder.mkdir(exist_ok=True)
        files = Files(folder / "certificate.pem", folder / "key.pem", folder / "authority.pem")
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        put(files.certificate, chain)
        put(files.key, issued.private_key_pem.bytes())
        put(files.authority, self._ca.cert_pem.bytes())
        return files


def put(path: Path, content: bytes) -> None:
    """Replaces a file as a whole."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    os.replace(fresh, path)


def own(files: Files) -> bytes:
    """The certificate in the files, as a peer is shown it."""
    return ssl.PEM_cert_to_DER_cert(files.certificate.read_text().partition("-----END CERTIFICATE-----")[0] + _END)


_END = "-----END CERTIFICATE-----\n"


async def shown(address: str, client: ClientTls, protocol: str = "h2") -> bytes:
    """The certificate that a new connection to that address is shown."""
    host, _, port = address.rpartition(":")
    context = client.ssl_context()
    context.set_alpn_protocols([protocol])
    async with asyncio.timeout(10):
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        assert tls.selected_alpn_protocol() == protocol
        found = tls.getpeercert(binary_form=True)
        assert found is not None
        return found
    finally:
        writer.transport.abort()
