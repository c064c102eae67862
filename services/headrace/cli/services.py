"""``headrace up`` and the four services; their configuration and versions."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace import __version__
from headrace.cli.options import ConfigFile, Json, Overrides, Quiet, load

if TYPE_CHECKING:
    from headrace.config import Config

app = typer.Typer()


@app.command()
def up(
    config: ConfigFile = None,
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(help="Workers to start.")] = 1,
    prefill_workers: Annotated[
        int, typer.Option(help="Workers beside those, that only compute long prompts, for the others to answer.")
    ] = 0,
    engine: Annotated[
        str,
        typer.Option(
            help="llama_cpp, tensorrt_llm, trtllm_grpc, openengine or sim.", show_default="the configured one"
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(help="A configured model's name, or a .gguf file or folder.", show_default="the configured one"),
    ] = "",
    http_port: Annotated[
        int | None, typer.Option(help="Port of the OpenAI HTTP API; 0 = any.", show_default="8080")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the native gRPC API; 0 = any.", show_default="8081")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for the services' logs.", show_default="temporary, kept after trouble")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Start all services on this machine, and stop them on Ctrl-C.

    With --json one line is printed when all is up. Ports other than the router's are chosen by the system unless they
    are configured. Changes of [[aliases]] in the file come into force while all is up, with workers for models that
    become needed; what else changes there needs a restart.
    """
    from headrace import up as one_box
    from headrace.terminal import UpView

    def read() -> Config:
        return one_box.effective_config(
            config, overrides or (), model=model, engine=engine, http_port=http_port, grpc_port=grpc_port
        )

    again = None if config is None else (config, read)
    plan = one_box.Plan(read(), workers=workers, prefill_workers=prefill_workers, log_dir=log_dir)
    view = UpView(quiet=quiet or as_json, json_line=(lambda mesh: json.dumps(mesh.to_dict())) if as_json else None)
    try:
        asyncio.run(one_box.run(plan, view, again))
    finally:
        view.close()


def _serve(service: str, effective: Config, **more: Any) -> None:
    """Run a service until it has drained."""
    from headrace.errors import HeadraceError

    try:
        run = importlib.import_module(f"headrace.{service}.service").run
    except ImportError as error:
        if error.name == "headrace._gateway":
            raise HeadraceError("the extension headrace._gateway is not built; install the package") from error
        raise
    if inspect.iscoroutinefunction(run):
        asyncio.run(run(effective, **more))
    else:
        run(effective, **more)


@app.command()
def router(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the router: clients come in here. Changes of aliases in the file come into force while it serves."""
    again = None if config is None else (config, lambda: load(config, overrides))
    _serve("router", load(config, overrides), again=again)


@app.command()
def scheduler(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the scheduler: who runs it, and when?"""
    _serve("scheduler", load(config, overrides))


@app.command()
def cache(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run the cache: what do we already have?"""
    _serve("cache", load(config, overrides))


@app.command()
def worker(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run a worker: one engine and its batch."""
    from headrace.process import ask_for_huge_pages

    effective = load(config, overrides)
    if effective.worker.engine == "llama_cpp":
        ask_for_huge_pages()
    _serve("worker", effective)


@app.command("config")
def show_config(config: ConfigFile = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the effective configuration as TOML, each key with its meaning. It can be read back with --config."""
    from headrace import config as configuration

    effective = load(config, overrides)
    if as_json:
        sys.stdout.write(json.dumps(configuration.to_dict(effective), indent=2) + "\n")
    else:
        sys.stdout.write(configuration.to_toml(effective))


@app.command()
def version(as_json: Json = False) -> None:
    """Print versions of this package and of what it stands on."""
    versions: dict[str, Any] = {"headrace": __version__, "python": platform.python_version()}
    for package in ("grpcio", "protobuf", "llama-cpp-python"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if as_json:
        sys.stdout.write(json.dumps(versions) + "\n")
    else:
        sys.stdout.write("".join(f"{name} {value}\n" for name, value in versions.items()))
