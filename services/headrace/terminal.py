"""What the commands show in a terminal: errors, progress, and text that must not steer it.

Answers and ready lines go to standard output, everything else to standard error, so that output can be piped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from headrace import plan, sim, tenants
    from headrace.bench import Plan, Report, Spread
    from headrace.ledger import usage
    from headrace.up import Mesh
    from headrace.v1.batches_pb2 import Batch


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

    def changed(self, text: str) -> None:
        """Something else is in force now."""
        if not self._quiet:
            self._console.print(f"[green]✓[/green] {escape(harmless(text))}")

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


class BatchProgress:
    """``headrace batch run`` in a terminal: bars on standard error, for bytes that are moved and lines answered."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = stderr()
        self._quiet = quiet
        self._shown = self._console.is_terminal and not quiet

    def __enter__(self) -> BatchProgress:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def began(self, batch_id: str) -> None:
        """The mesh has it."""
        if not self._quiet:
            self._console.print(f"batch {batch_id}", markup=False)

    def say(self, text: str) -> None:
        """Something happened; quiet or not."""
        self._console.print(f"[yellow]![/yellow] {escape(harmless(text))}")

    @contextlib.contextmanager
    def moving(self, doing: str) -> Iterator[Callable[[int, int], None]]:
        """Entered, it takes bytes that were moved, and how many there are."""
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=self._console, transient=True, disable=not self._shown) as progress:
            task = progress.add_task(doing, total=None)
            yield lambda moved, size: progress.update(task, completed=moved, total=size or None)

    @contextlib.contextmanager
    def running(self) -> Iterator[Callable[[Batch], None]]:
        """Entered, it takes the batch as it stands."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._console, transient=True, disable=not self._shown) as progress:
            task = progress.add_task("validating", total=None, failed=0)

            def shown(batch: Batch) -> None:
                counts = batch.request_counts
                progress.update(
                    task,
                    description=_BATCH_STATUSES.get(batch.status, "running"),
                    completed=counts.completed + counts.failed,
                    total=counts.total or None,
                    failed=counts.failed,
                )

            yield shown


#: While it runs, by number.
_BATCH_STATUSES = {1: "validating", 3: "running", 4: "finalizing", 7: "cancelling"}


def show_batches(batches: Sequence[dict[str, Any]]) -> None:
    """Batches for people."""
    table = _titled("batches")
    for column in ("batch", "status", "answered", "failed", "of", "tokens in", "out", "created", "ends by"):
        table.add_column(
            column, justify="right" if column in ("answered", "failed", "of", "tokens in", "out") else "left"
        )
    for each in batches:
        counts, usage = each["request_counts"], each["usage"]
        table.add_row(
            *(each["id"], each["status"], str(counts["completed"]), str(counts["failed"]), str(counts["total"])),
            *(f"{usage['input_tokens']:,}", f"{usage['output_tokens']:,}"),
            *(_utc(each["created_at"]), _utc(each["expires_at"])),
        )
    console = stdout()
    # Ids are for copying: rather a line that the terminal breaks than one that lacks its middle.
    console.width = max(console.width, 160)
    console.print(table)


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
    headings = ["policy", "load", "goodput", "refused", "TTFT s", "p99", "TPOT ms", "p99", "hit"]
    # A terminal has eighty columns: only where routers placed anything by themselves.
    lent = any(point.figures["unasked"].mean > 0 for point in results.points)
    headings += ["unasked"] if lent else []
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
            *([f"{figures['unasked'].mean:.3f}"] if lent else []),
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


class SearchProgress(_Bar):
    """The bar of ``headrace plan --simulate``: fleets tried; the figure is the last one's workers."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__("simulating", None, TextColumn("{task.fields[figure]} workers"), quiet=quiet)


def show_catalogue(kind: str, *, as_json: bool = False) -> None:
    """The known models or GPUs, with their sources."""
    import json

    from headrace import shapes

    catalogue = shapes.catalogue()
    if as_json:
        sys.stdout.write(json.dumps(catalogue[kind]) + "\n")
        return
    console = stdout()
    table = Table(box=None, pad_edge=False)
    models = kind == "models"
    headings = (
        ("model", "parameters", "layers", "KV bytes/token")
        if models
        else ("GPU", "GB", "TB/s", "FP16 TFLOP/s", "FP8", "link GB/s", "$/hour")
    )
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if at == 0 else "right", no_wrap=True)
    for name in catalogue[kind]:
        if models:
            shape = shapes.find_shape(name)
            kv_bytes = shape.kv_bytes_per_token("fp16")
            table.add_row(name, f"{shape.parameters / 1e9:.2f} B", str(shape.layers), f"{kv_bytes:,.0f}")
        else:
            gpu = shapes.find_gpu(name)
            figures = (gpu.memory_gb, gpu.bandwidth_tb_per_s, gpu.fp16_tflops, gpu.fp8_tflops, gpu.link_gb_per_s)
            table.add_row(name, *(f"{value:g}" if value else "-" for value in figures), f"{gpu.usd_per_hour:.2f}")
    console.print(table)
    for source in (kind, "prices") if kind == "gpus" else (kind,):
        console.print(f"[dim]{source}: {escape(catalogue['sources'][source])}[/dim]")


#: What a limit is called.
LIMITS = {
    "compute": "prompts could not be computed as fast as they come",
    "kv": "KV memory would be full",
    "batch": "more answers would be under way than --max-batch",
    "ttft": "first tokens would be late",
    "tpot": "tokens would be too far apart",
    "given": "the given output of a worker would not do",
}


def show_tenants(known: tenants.Tenants, spent: dict[str, dict[str, float]]) -> None:
    """Who may ask, and for what; what each may spend, and has."""
    table = _titled("tenants")
    for column in ("tenant", "keys", "models", "classes", "KV", "weight", "limits"):
        table.add_column(column)
    for name, each in known.items():
        keys = [f"{key.id}{'' if key.expires_s is None else f' until {_utc(key.expires_s)}'}" for key in each.keys]
        shares = "shared" if each.shares_prefixes else "its own"
        may = ["\n".join(keys), "\n".join(each.models) or "all", "\n".join(each.classes) or "all", shares]
        table.add_row(name, *may, f"{each.weight:g}", _limits(each, spent.get(name)))
    stdout().print(table)


def _limits(tenant: tenants.Tenant, spent: dict[str, float] | None) -> str:
    lines = []
    for name, limit in dataclasses.asdict(tenant.limits).items():
        if limit:
            used = (spent or {}).get(name)
            shown = "" if used is None else f" ({used:,.10g} spent)"
            lines.append(f"{name} {limit:,.10g}{shown}")
    return "\n".join(lines) or "none"


def show_usage(answer: usage.Usage) -> None:
    """What was used: a line for each group, and one over all."""
    table = _titled("usage")
    by = list(answer.lines[0].group) if answer.lines else []
    for column in by:
        table.add_column(column)
    counts = ("requests", "prompt", "reused", "output", "replayed")
    lines = [*answer.lines, answer.total]
    levers = {
        "saved by KV": "prefix_cache_saved_dollars",
        "by answers": "response_cache_saved_dollars",
        "by variants": "variants_saved_dollars",
        "by batch": "batch_saved_dollars",
        "for shadows": "shadow_dollars",
    }
    # Those that nobody uses take no room.
    used = {title: name for title, name in levers.items() if any(getattr(line, name) for line in lines)}
    for column in (*counts, "dollars", "$/1k tokens", *used):
        table.add_column(column, justify="right")
    for line in lines:
        per_1k = line.dollars_per_1k_tokens
        table.add_row(
            *(line.group.get(name, "all") or "-" for name in by),
            f"{line.requests:,}",
            f"{line.prompt_tokens:,}",
            f"{line.cached_prompt_tokens:,}",
            f"{line.output_tokens:,}",
            f"{line.replayed_tokens:,}",
            f"{line.dollars:.6f}",
            "-" if per_1k is None else f"{per_1k:.6f}",
            *(f"{getattr(line, name):.6f}" for name in used.values()),
        )
    stdout().print(table)


def _utc(time_s: int) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M} UTC"


def show_plan(answer: plan.Plan) -> None:
    """A plan for people: what was asked, one worker, the fleet, the other kinds, the levers."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for about, text in _plan_lines(answer, answer.to_dict()):
        table.add_row(about, text)
    stdout().print(table)
    if len(answer.fleets) + len(answer.refused) > 1:
        _show_candidates(answer)
    _show_levers(answer)


def _plan_lines(answer: plan.Plan, said: dict[str, Any]) -> Iterator[tuple[str, str]]:
    traffic, memory, times = said["traffic"], said["memory"], said["times"]
    peak = traffic["peak_requests_per_s"]
    burst = f", at most {peak:.4g}" if peak > 1.001 * traffic["requests_per_s"] else ""
    yield (
        "traffic",
        f"{traffic['requests_per_s']:.4g} requests/s{burst}; {traffic['prompt_tokens_per_s']:,.0f} prompt tokens/s "
        f"({traffic['prompt_tokens']:,.0f} each, {traffic['cached_prompt_tokens']:,.0f} of them in KV), "
        f"{traffic['output_tokens_per_s']:,.0f} output tokens/s ({traffic['output_tokens']:,.0f} each)",
    )
    yield "targets", f"p99 of TTFT {answer.targets.ttft_s:g} s, of TPOT {answer.targets.tpot_s * 1000:g} ms"
    yield "worker", escape(f"{said['model']} on {said['tensor_parallel']} × {said['gpu']}")
    yield (
        "memory",
        f"{memory['gpus_bytes'] / 1e9:,.0f} GB: weights {memory['weights_bytes'] / 1e9:,.1f} GB, KV "
        f"{memory['kv_bytes'] / 1e9:,.1f} GB, which is {memory['kv_tokens']:,} tokens of "
        f"{memory['kv_bytes_per_token'] / 1024:,.4g} KiB or {memory['concurrency']:,} requests at full length",
    )
    yield (
        "times",
        f"a token alone {times['token_at_batch_1_s'] * 1000:.1f} ms (reading the weights at full rate "
        f"{times['weights_read_s'] * 1000:.1f} ms), a prompt of 2,048 {times['prompt_of_2048_s'] * 1000:.0f} ms; "
        f"{escape(times['source'])}",
    )
    how = "given" if answer.worker_tokens_per_s is not None else "within the targets"
    yield (
        "fleet",
        f"[green]{_count(said['workers'], 'worker')}[/green], {_count(said['gpus'], 'GPU')}: "
        f"{traffic['output_tokens_per_s']:,.0f} tokens/s at {said['worker_output_tokens_per_s']:,.0f} a worker ({how}) "
        f"are {said['workers_exact']:.2f}",
    )
    fewer = "; ".join(LIMITS[limit] for limit in said["binds"])
    yield "binds", f"with one worker fewer {fewer}" if fewer else "nothing: one worker is enough"
    yield (
        "cost",
        f"${said['usd_per_hour']:,.2f} an hour, ${said['usd_per_1k_output_tokens']:.5f} per 1,000 output tokens, "
        f"${said['usd_per_1k_tokens']:.5f} per 1,000 tokens",
    )
    load = answer.best.load
    yield (
        "predicted",
        f"{_count(load.workers, 'worker')}: TTFT p50 {load.ttft_p50_s:.3f} s, p99 {load.ttft_p99_s:.3f} s; TPOT mean "
        f"{load.tpot_mean_s * 1000:.1f} ms, p99 {load.tpot_p99_s * 1000:.1f} ms; {load.batch:.0f} answers under way at "
        f"each, {load.kv_share:.0%} of KV at the busiest",
    )
    if answer.simulated is not None:
        shown = answer.simulated[1]
        yield (
            "simulated",
            f"{_count(shown.workers, 'worker')}: TTFT p50 {shown.ttft_p50_s:.3f} s, p99 {shown.ttft_p99_s:.3f} s; "
            f"TPOT mean {shown.tpot_mean_s * 1000:.1f} ms, p99 {shown.tpot_p99_s * 1000:.1f} ms",
        )
    if answer.split is not None:
        split = said["split"]
        yield (
            "apart",
            f"{split['prefill_workers']} prefill and {split['decode_workers']} decode workers, "
            f"${split['usd_per_hour']:,.2f} an hour, {split['kv_bytes_per_s'] / 1e9:.2f} GB/s of KV between them",
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _titled(title: str) -> Table:
    return Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")


def _show_candidates(answer: plan.Plan) -> None:
    table = Table(
        box=None, pad_edge=False, title="kinds of workers, by arithmetic", title_justify="left", title_style="bold"
    )
    for at, heading in enumerate(("worker", "workers", "$/hour", "$/1k output", "carries", "binds", "times")):
        table.add_column(heading, justify="right" if 1 <= at <= 4 else "left", no_wrap=at <= 4)
    for fleet in answer.fleets:
        table.add_row(
            escape(f"{fleet.worker.tensor_parallel} × {fleet.worker.gpu.name}"),
            str(fleet.workers),
            f"{fleet.usd_per_hour:,.2f}",
            f"{fleet.usd_per_1k(fleet.output_tokens_per_s):.5f}",
            f"{fleet.capacity:.2f}×",
            ", ".join(fleet.binds) or "-",
            escape(fleet.worker.table["source"]),
        )
    for worker, reason in answer.refused:
        table.add_row(escape(f"{worker.tensor_parallel} × {worker.gpu.name}"), "-", "-", "-", "-", escape(reason), "")
    stdout().print(table)


def _show_levers(answer: plan.Plan) -> None:
    table = _titled("levers, each alone")
    for at, heading in enumerate(("lever", "workers", "$/hour", "cost", "gives up")):
        table.add_column(heading, justify="right" if 1 <= at <= 3 else "left", no_wrap=at <= 3)
    for lever in answer.levers:
        if lever.workers is None:
            table.add_row(escape(lever.name), "-", "-", "-", "no number of workers would do")
            continue
        table.add_row(
            escape(lever.name),
            str(lever.workers),
            f"{lever.usd_per_hour:,.2f}",
            f"{lever.cost_ratio - 1:+.0%}",
            escape(lever.gives_up),
        )
    stdout().print(table)
    stdout().print("[dim]cost: of the traffic, parts of a worker counted; accuracy is not planned but measured[/dim]")
