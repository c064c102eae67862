"""``headrace route``: names that several variants serve. Work is ``routing.py``'s; this file is words and tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.options import Json

app = typer.Typer(help="Names that several variants serve: who answers what, and how well.", no_args_is_help=True)

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="HEADRACE_CONFIG", help="TOML file that names aliases.", show_default="none"),
]


@app.command()
def train(
    examples: Annotated[list[Path], typer.Argument(help="JSON lines: labelled, or a router's shadow log.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The classifier's file.")] = Path("difficulty.json"),
    l2: Annotated[float, typer.Option(help="How much large weights are held against the fit.", min=0.0)] = 1.0,
    as_json: Json = False,
) -> None:
    """Train a classifier of difficulty, and say how good it is on examples that it did not see.

    An alias's variant uses it by `difficulty = "FILE"`. Needs numpy, which the extra `llama` brings.
    """
    from headrace import routing
    from headrace.errors import HeadraceError

    try:
        trained = routing.trained_now(examples, output, l2)
    except ImportError as error:
        raise HeadraceError(f"training needs numpy ({error}); install headrace[llama]") from error
    if as_json:
        sys.stdout.write(json.dumps(trained.report) + "\n")
        return
    report = trained.report
    sys.stdout.write(
        f"{output}: {report['examples']} examples, mean agreement {report['mean_agreement']:.3f}\n"
        f"on unseen examples: AUC {_auc(report)}, Brier {report['brier']:.4f} (without: "
        f"{report['brier_without']:.4f}), calibration off by {report['calibration_error']:.3f}\n"
    )
    if "unseen_kinds" in report:
        sys.stdout.write(f"on kinds of examples that were not trained on: AUC {_auc(report['unseen_kinds'])}\n")
    rows = [
        [
            f"{row['threshold']:.1f}",
            f"{row['share']:.0%}",
            f"{row['agreement']:.3f} ({row['low']:.3f} to {row['high']:.3f})" if row["share"] else "-",
        ]
        for row in report["routes"]
    ]
    _show("what thresholds would do", ["threshold", "to the smaller", "agreement there"], rows)


@app.command()
def explain(
    prompt: Annotated[str, typer.Argument(help="What would be asked.")],
    config: ConfigFile = None,
    alias: Annotated[str, typer.Option(help="The name that would be asked.", show_default="the first alias")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.", show_default="open")] = None,
    quality: Annotated[str, typer.Option(help="full or tolerant.", show_default="the alias's")] = "",
    as_json: Json = False,
) -> None:
    """Say what is expected of each variant for a prompt, and which would be asked, were all of them there."""
    from headrace import config as configuration
    from headrace import routing

    body: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": prompt}]}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    told = routing.explain(configuration.load(config), alias, body, quality)
    if as_json:
        sys.stdout.write(json.dumps(told) + "\n")
        return
    rows = [
        [each["model"], f"{each['expected']:.3f}" if number else "-", f"{each['threshold']:.3f}" if number else "-"]
        for number, each in enumerate(told["variants"])
    ]
    _show(told["alias"], ["variant", "expected agreement", "threshold"], rows)
    sys.stdout.write(f"{told['why']}: {told['meant']}; asked in this order: {', '.join(told['order'])}\n")


@app.command()
def status(
    target: Annotated[str, typer.Option(help="The router's HTTP API.")] = "http://127.0.0.1:8080",
    as_json: Json = False,
) -> None:
    """Show each variant's measured agreement, its threshold, and how new versions do, as one router sees it.

    With tenants, HEADRACE_API_KEY is the key.
    """
    from headrace import routing

    said = routing.status(target)
    if as_json:
        sys.stdout.write(json.dumps(said) + "\n")
        return
    if not said["aliases"]:
        sys.stdout.write("no alias is configured\n")
    for alias in said["aliases"]:
        title = f"{alias['name']} (floor {alias['floor']:g}, measured by {alias['measure']})"
        _show(
            title,
            ["variant", "ready", "requests", "threshold", "agreement", "new version"],
            [_row(number, each) for number, each in enumerate(alias["variants"])],
        )


def _auc(report: dict[str, Any]) -> str:
    return f"{report['auc']:.3f} ({report['auc_low']:.3f} to {report['auc_high']:.3f})"


def _row(number: int, variant: dict[str, Any]) -> list[str]:
    measured, trial = variant["agreement"], ""
    if variant["canary_of"]:
        trial = f"{variant['share']:.0%} of {variant['canary_of']}"
        if variant["rolled_back"]:
            trial = f"rolled back: {variant['rolled_back']}"
    agreement = "the best" if number == 0 else "not measured"
    if measured["samples"]:
        agreement = f"{measured['mean']:.3f} ({measured['low']:.3f} to {measured['high']:.3f}, {measured['samples']})"
    compared = number and not variant["canary_of"]
    return [
        variant["model"],
        str(variant["ready_workers"]),
        str(variant["meant"]),
        f"{variant['threshold']:.3f}" if compared else "-",
        agreement if compared or number == 0 else "-",
        trial or "-",
    ]


def _show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table

    from headrace.terminal import stdout

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    stdout().print(table)
