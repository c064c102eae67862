"""What the commands show in a terminal: errors, progress, and text that must not steer it.

Answers and ready lines go to standard output, everything else to standard error, so that output can be piped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from headrace import sim
    from headrace.bench import Plan, Report, Spread
    from headrace.up import Mesh


def stderr() -> Console:
    """The console for words about the work. Made when needed: tests and callers exchange the stream."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def stdout() -> Console:
    """The console for results."""
    return Console(highlight=False, soft_wrap=True)


def show_error(message: str, details: tuple[str, ...] = ()) -> None:
    """A mistake or a failure in one red line, and lines that explain it."""
    console = stderr()
    console.print(f"[red]error:[/red] {escape(harmless(message))}")
    for line in details:
        console.print(f"  [dim]{escape(harmless(line))}[/dim]")


_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def harmless(text: str) -> str:
    """Text without control characters, by which a model or a log could steer the terminal."""
    return text.translate(_CONTROLS)


PHASES = {
    "model": ("preparing the model", "model prepared"),
    "services": ("starting scheduler and cache", "scheduler and cache ready"),
    "engine": ("starting router and workers, loading the engine", "router and workers ready"),
}


class UpView:
    """``headrace up`` in a terminal: a line for each phase, a bar for what has one, then the addresses."""

    def __init__(self, *, quiet: bool = False, json_line: Callable[[Mesh], str] | None = None) -> None:
        """``json_line`` makes the ready line for a machine, in place of the words for people."""
        self._console = stderr()
        self._quiet = quiet
        self._json_line = json_line
        self._began_s = 0.0
        self._task: TaskID | None = None
        self._progress: Progress | None = None

    def begin(self, phase: str) -> None:
        """A phase begins."""
        self._began_s = time.monotonic()
        if self._quiet or not self._console.is_terminal:
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task(PHASES[phase][0], total=None)
        self._progress.start()

    def progress(self, phase: str, text: str, fraction: float) -> None:
        """How far it is. From any thread; rich has a lock of its own."""
        progress, task = self._progress, self._task
        if progress is not None and task is not None:
            description = f"{PHASES[phase][0]}: {escape(harmless(text))}"
            progress.update(task, description=description, total=1.0, completed=fraction)

    def end(self, phase: str) -> None:
        """It is done."""
        self.close()
        if not self._quiet:
            self._console.print(f"[green]✓[/green] {PHASES[phase][1]} ({time.monotonic() - self._began_s:.1f} s)")

    def warn(self, text: str) -> None:
        """Something happened that people should know; quiet or not."""
        self._console.print(f"[yellow]![/yellow] {escape(harmless(text))}")

    def ready(self, mesh: Mesh) -> None:
        """All is up."""
        if self._json_line is not None:
            sys.stdout.write(self._json_line(mesh) + "\n")
            sys.stdout.flush()
        elif not self._quiet:
            stdout().print(_words(mesh), markup=False)

    def stopping(self) -> None:
        """All is being stopped."""
        self.close()
        if not self._quiet:
            self._console.print("stopping; again to stop at once")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None


def _words(mesh: Mesh) -> str:
    body = f'{{"model": "{mesh.model}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
    # Where TLS is on, whoever asks also needs --ca (curl: --cacert), and --cert and --key where clients must show them.
    scheme, trust, ca = ("https", " --cacert CA.pem", " --ca CA.pem") if mesh.tls else ("http", "", "")
    target = "" if mesh.grpc == "127.0.0.1:8081" else f" --target {mesh.grpc}"
    return (
        f"\nheadrace is up, serving {mesh.model} with {len(mesh.workers)} worker(s)\n"
        f"  OpenAI HTTP  {scheme}://{mesh.http}/v1\n"
        f"  native gRPC  {mesh.grpc}\n"
        f"  logs         {mesh.logs}\n\n"
        f'  headrace chat{target}{ca} "Hello!"\n'
        f"  curl -N{trust} {scheme}://{mesh.http}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
    )


class _Bar:
    """A progress bar on standard error, when that is a terminal. Entered, it takes what is done and one figure more."""

    def __init__(self, doing: str, total: int | None, *more: TextColumn, quiet: bool) -> None:
        """``more`` are columns between the count and the clock; the figure is ``task.fields[figure]`` there."""
        console = stderr()
        self._shown = console.is_terminal and not quiet
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *more, TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task(doing, total=total, figure=0)

    def __enter__(self) -> Callable[[int, int], None]:
        if self._shown:
            self._progress.start()
        return self._on_progress

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

    def _on_progress(self, ended: int, figure: int) -> None:
        if self._shown:
            self._progress.update(self._task, completed=ended, figure=figure)


class BenchProgress(_Bar):
    """The progress of a load: requests ended, and their tokens."""

    def __init__(self, plan: Plan, *, quiet: bool) -> None:
        super().__init__("loading", plan.request_count, TextColumn("{task.fields[figure]} tokens"), quiet=quiet)


def show_report(report: Report) -> None:
    """A bench's report for people."""
    console = stdout()
    load = f"{report.concurrency} at once" if report.rate is None else f"{report.rate:g} requests/s"
    cut = ", stopped early" if report.interrupted else ""
    about = f"{report.target}, model {report.model}, {load}, seed {report.seed}, {report.duration_s:.2f} s{cut}"
    console.print(about, markup=False)
    failed = report.requests - report.succeeded
    unfinished = f", {report.unfinished} unfinished" if report.unfinished else ""
    console.print(f"requests       {report.succeeded} answered, {failed} failed{unfinished}")
    console.print(f"output tokens  {report.output_tokens}  ({report.output_tokens_per_s:.1f}/s)")
    console.print(f"prompt tokens  {report.prompt_tokens}  ({report.cached_prompt_tokens} cached)")
    table = Table(box=None, pad_edge=False)
    for heading in ("ms", "p50", "p90", "p99", "mean", "max"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for name, spread in (("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("latency", report.latency_s)):
        table.add_row(name, *_milliseconds(spread))
    console.print(table)
    for kind, count in report.errors.items():
        example = escape(harmless(report.error_examples.get(kind, "")))
        console.print(f"[red]{count} × {escape(harmless(kind))}[/red]  [dim]{example}[/dim]")


def _milliseconds(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * 5
    return [f"{value * 1000:.2f}" for value in (spread.p50, spread.p90, spread.p99, spread.mean, spread.max)]


class SimProgress(_Bar):
    """The bar of ``headrace sim``: requests ended over all runs; the figure, all of them, says nothing new."""

    def __init__(self, plan: sim.Plan, *, quiet: bool = False) -> None:
        super().__init__("simulating", plan.runs * len(plan.workload), quiet=quiet)


def show_simulation(results: sim.Results) -> None:
    """A simulation's points and knees for people."""
    console = stdout()
    seeds = len(results.seeds)
    console.print(f"{results.requests} requests, {seeds} seed{'s' if seeds > 1 else ''}", markup=False)
    table = Table(box=None, pad_edge=False)
    headings = ("policy", "load", "goodput", "refused", "TTFT s", "p99", "TPOT ms", "p99", "hit")
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at == 0 else "right", no_wrap=True)
    for point in results.points:
        figures = point.figures
        table.add_row(
            point.policy,
            f"{point.load:g}",
            _interval(figures["goodput"], 3),
            f"{point.rejected.mean:.3f}",
            _interval(figures["ttft_mean_s"], 2),
            f"{figures['ttft_p99_s'].mean:.2f}",
            f"{figures['tpot_mean_s'].mean * 1000:.1f}",
            f"{figures['tpot_p99_s'].mean * 1000:.1f}",
            f"{figures['hit'].mean:.3f}",
        )
    console.print(table)
    for policy, knee in results.knees.items():
        if knee is not None:
            console.print(f"{policy}: goodput falls through .9 at load {_interval(knee, 2)}", markup=False)


def _interval(value: sim.Interval, digits: int) -> str:
    half = "" if value.half != value.half else f" ±{value.half:.{digits}f}"
    return f"{value.mean:.{digits}f}{half}"


def show_cost_tables(*, as_json: bool = False) -> None:
    """The built-in cost tables, with their sources."""
    import json

    from headrace._gateway import cost_tables

    if as_json:
        sys.stdout.write(cost_tables() + "\n")
        return
    console = stdout()
    for table in json.loads(cost_tables()):
        gpus = f"{table['tensor_parallel']} × {table['gpu']}"
        console.print(f"[bold]{table['name']}[/bold]  {table['model']} on {gpus}, {table['kv_tokens']} KV tokens")
        console.print(f"  [dim]{escape(table['source'])}[/dim]")
