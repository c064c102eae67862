"""What several commands share: their options, the configuration, how to speak to the mesh, and Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.tls import ClientTls

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="HEADRACE_CONFIG", help="TOML file that configures all services.", show_default="none"
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key. May be repeated.")
]
ClientConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", envvar="HEADRACE_CONFIG", help="The mesh's TOML file, for its [tls].", show_default="none"
    ),
]
Target = Annotated[str, typer.Option(help="The router's native gRPC API; grpcs://HOST:PORT with TLS.")]
DEFAULT_TARGET = "127.0.0.1:8081"
Authority = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", help="TLS: who may have issued the server's certificate.", show_default="public ones"
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option("--cert", metavar="FILE", help="TLS: certificate to show to the server.", show_default="none"),
]
Key = Annotated[
    Path | None, typer.Option("--key", metavar="FILE", help="TLS: its private key.", show_default="the --cert file")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what went wrong.")]


def load(path: Path | None, overrides: list[str] | None) -> Config:
    """The effective configuration."""
    from headrace import config

    return config.load(path, overrides or ())


def client_tls(
    target: str, config: Path | None, authority: Path | None, certificate: Path | None, key: Path | None
) -> ClientTls | None:
    """How to speak TLS at the target, unless its scheme says plain text; None when nothing asks for it."""
    from headrace.errors import ConfigError
    from headrace.tls import ClientTls

    if key is not None and certificate is None:
        raise ConfigError("--key: needs --cert")
    given = authority is not None or certificate is not None
    if given and target.startswith(("grpc://", "http://")):
        raise ConfigError(f"--target: {target} is plain text, without TLS; use grpcs:// or https://")
    configured = ClientTls.of(load(config, None).tls) if config is not None else None
    return (configured or ClientTls()).but(authority, certificate, key) if given else configured


@contextlib.contextmanager
def interrupt(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C sets the event; the second is as usual."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
