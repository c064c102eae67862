"""The command line.

``headrace router | scheduler | cache | worker`` runs one service, ``headrace up`` all of them on this machine;
``chat``, ``bench`` and ``batch`` are clients; ``sim`` simulates a mesh, ``plan`` plans one; ``route`` is about names
with several variants; ``tenants`` says who may ask, ``usage`` what they did; ``config`` shows the configuration.

A user's mistake is one red line and exit code 2, never a traceback; what fails for other reasons ends with 1. Heavy
modules are imported by the command that needs them, so that ``--help`` is quick. What these files leave to others:
all work.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from headrace.cli import batches, clients, planning, routes, services, tenants

app = typer.Typer(
    help="An LLM serving mesh: one door for many engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for part in (services, clients, planning, tenants):
    app.add_typer(part.app)
app.add_typer(batches.app, name="batch")
app.add_typer(routes.app, name="route")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        app(args=list(arguments) if arguments is not None else None, prog_name="headrace")
    except Exception as error:
        sys.exit(_failed(error))


def _failed(error: Exception) -> int:
    """Show an error that is the user's or the world's; anything else is a bug, and goes on as one."""
    from headrace.client import ClientError
    from headrace.errors import ConfigError, HeadraceError
    from headrace.terminal import show_error

    if not isinstance(error, HeadraceError):
        raise error
    show_error(str(error), getattr(error, "details", ()))
    mistakes = ("invalid_argument", "model_not_found", "context_length_exceeded", "unsupported")
    if isinstance(error, ClientError):
        return 2 if error.code in mistakes else 1
    return 2 if isinstance(error, ConfigError) else 1
