"""What the ledger says: sums of rows by tenant, variant, day or what else, what tokens cost and what each lever saved.

Reading has a connection of its own and never holds the writer up: SQLite keeps a log of writes beside what readers
see.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any

from headrace.errors import ConfigError
from headrace.ledger.store import Store
from headrace.tenants import Limits

DAY_MS = 86_400_000

#: What rows can be grouped by, and the column or term that it is.
GROUPS = {
    "tenant": "tenant",
    "model": "alias",
    "variant": "variant",
    "class": "class",
    "outcome": "outcome",
    "session": "session",
    "day": f"placed_ms / {DAY_MS}",
}

#: What a token of each kind cost on average in each variant, of all that was no batch work, for prices from rows.
_USUAL = """
    SELECT variant AS usual_variant,
        SUM(1.0 * prompt_price * (prompt_tokens - cached_tokens)) / NULLIF(SUM(prompt_tokens - cached_tokens), 0)
            AS usual_prompt,
        SUM(1.0 * output_price * output_tokens) / NULLIF(SUM(output_tokens), 0) AS usual_output
    FROM requests WHERE class <> 'batch' AND prompt_price + output_price > 0 AND {times} GROUP BY variant
"""
#: What a row of batch work would have cost beyond what it did, at those prices. They are thousandths of billionths.
_BATCH_SAVED = """CASE WHEN class = 'batch' AND shadow = 0 AND prompt_price + output_price > 0 THEN
    COALESCE((usual_prompt - prompt_price) * (prompt_tokens - cached_tokens), 0) / 1000
    + COALESCE((usual_output - output_price) * output_tokens, 0) / 1000 END"""

#: Fields of a line, and the sums that they are. Dollars are in billionths there.
_SUMS = {
    "requests": "COUNT(*)",
    "prompt_tokens": "SUM(prompt_tokens)",
    "cached_prompt_tokens": "SUM(cached_tokens)",
    "output_tokens": "SUM(output_tokens)",
    "wasted_tokens": "SUM(wasted_tokens)",
    "replayed_requests": "SUM(CASE WHEN replayed_prompt_tokens + replayed_output_tokens > 0 THEN 1 ELSE 0 END)",
    "replayed_tokens": "SUM(replayed_prompt_tokens + replayed_output_tokens)",
    "dollars": "SUM(nano_dollars)",
    "prefix_cache_saved_dollars": "SUM(prefix_saved_nano)",
    "response_cache_saved_dollars": "SUM(answer_saved_nano)",
    "variants_saved_dollars": "SUM(variant_saved_nano)",
    "batch_saved_dollars": f"SUM({_BATCH_SAVED})",
    "shadow_dollars": "SUM(CASE WHEN shadow = 1 THEN nano_dollars ELSE 0 END)",
    "mean_ttft_s": "AVG(CASE WHEN ttft_s > 0 THEN ttft_s END)",
}


@dataclass(frozen=True)
class Line:
    """Sums over rows that are alike. Dollars are those of the time that workers were busy for them."""

    #: By the names of what they were grouped by.
    group: dict[str, str]
    requests: int
    prompt_tokens: int
    #: Of these, whose KV was reused.
    cached_prompt_tokens: int
    output_tokens: int
    #: Thrown away when requests had to start again.
    wasted_tokens: int
    #: Requests answered from the response cache, and the tokens that were not computed for them.
    replayed_requests: int
    replayed_tokens: int
    dollars: float
    #: What reused KV and replayed answers would have cost.
    prefix_cache_saved_dollars: float
    response_cache_saved_dollars: float
    #: By other variants than the best, at the best one's price for the same tokens: with the two above and the dollars,
    #: what all tokens would have cost without these levers. Less than nothing where the best was the cheaper.
    variants_saved_dollars: float
    #: By batch work: what tokens of other classes cost in the same variant, in the time that was asked for, less what
    #: its own did. What ran beside it had the same price and shows no saving.
    batch_saved_dollars: float
    #: Of the dollars, those for shadows, which measure how far variants agree.
    shadow_dollars: float
    #: Of requests that had a first token.
    mean_ttft_s: float | None

    @property
    def tokens(self) -> int:
        """What counts against limits."""
        return self.prompt_tokens + self.output_tokens

    @property
    def dollars_per_1k_tokens(self) -> float | None:
        """Of all tokens that were served, replayed ones too."""
        served = self.tokens + self.replayed_tokens
        return self.dollars / served * 1000 if served else None

    def to_message(self) -> dict[str, Any]:
        """The fields of a ``UsageLine``."""
        return asdict(self) | {"dollars_per_1k_tokens": self.dollars_per_1k_tokens}

    def to_dict(self) -> dict[str, Any]:
        """For machines: the group's names first, and what follows from the sums."""
        values: dict[str, Any] = asdict(self)
        group: dict[str, Any] = values.pop("group")
        return group | values | {"tokens": self.tokens, "dollars_per_1k_tokens": self.dollars_per_1k_tokens}


@dataclass(frozen=True)
class Question:
    """Which rows, and how they are put together."""

    by: Sequence[str] = ("tenant", "variant", "day")
    #: None = everybody's.
    tenant: str | None = None
    #: Unix times; None = from the first, to the last.
    from_s: float | None = None
    to_s: float | None = None

    def __post_init__(self) -> None:
        for each in self.by:
            if each not in GROUPS:
                raise ConfigError(f"usage is by {', '.join(GROUPS)}, got {each!r}")
        if len(set(self.by)) != len(self.by):
            raise ConfigError(f"by: each once, got {', '.join(self.by)}")


@dataclass(frozen=True)
class Usage:
    """The answer: a line for each group, and one over all."""

    lines: list[Line]
    total: Line = field()

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return {"lines": [line.to_dict() for line in self.lines], "total": self.total.to_dict()}

    def to_csv(self) -> str:
        """The lines, with a head."""
        out = io.StringIO()
        rows = [line.to_dict() for line in self.lines]
        writer = csv.DictWriter(out, list(rows[0]) if rows else list(self.total.to_dict()), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()


def ask(store: Store, question: Question) -> Usage:
    """Adds up. Raises StoreError."""
    times = [
        ("placed_ms >= ?", None if question.from_s is None else int(question.from_s * 1000)),
        ("placed_ms < ?", None if question.to_s is None else int(question.to_s * 1000)),
    ]
    anywhen, bounds = _condition(times)
    which, values = _condition([("tenant = ?", question.tenant), *times])
    # Everybody's, whoever asks: a variant's price is no tenant's own.
    rows = f"requests LEFT JOIN ({_USUAL.format(times=anywhen)}) AS usual ON usual_variant = variant WHERE {which}"
    sums = ", ".join(_SUMS.values())
    terms = [GROUPS[each] for each in question.by]
    lines = []
    if terms:
        grouped = ", ".join(terms)
        statement = f"SELECT {grouped}, {sums} FROM {rows} GROUP BY {grouped} ORDER BY {grouped}"
        lines = [_line(question.by, row) for row in store.query(statement, [*bounds, *values])]
    (total,) = store.query(f"SELECT {sums} FROM {rows}", [*bounds, *values])
    return Usage(lines, _line((), total))


def _condition(terms: Sequence[tuple[str, Any]]) -> tuple[str, list[Any]]:
    """Those whose value is not None."""
    kept = [(term, value) for term, value in terms if value is not None]
    return " AND ".join(["1 = 1", *(term for term, _ in kept)]), [value for _, value in kept]


def _line(by: Sequence[str], row: tuple[Any, ...]) -> Line:
    group = {name: _shown(name, value) for name, value in zip(by, row, strict=False)}
    values: dict[str, Any] = {}
    for name, value in zip(_SUMS, row[len(by) :], strict=True):
        if name == "mean_ttft_s":
            values[name] = None if value is None else float(value)
        elif name.endswith("dollars"):
            values[name] = float(value or 0) / 1e9
        else:
            values[name] = int(value or 0)
    return Line(group, **values)


def _shown(name: str, value: Any) -> str:
    if name == "day":
        return f"{datetime.fromtimestamp(int(value) * 86_400, UTC):%Y-%m-%d}"
    return str(value)


def spent(store: Store, tenant: str, now_s: float) -> dict[str, float]:
    """What a tenant has spent of each limit that has a time, by its name. Raises StoreError."""
    now = datetime.fromtimestamp(now_s, UTC)
    minute = now.replace(second=0, microsecond=0)
    day = minute.replace(hour=0, minute=0)
    month = day.replace(day=1)
    begins = {"tokens_per_minute": minute, "tokens_per_day": day, "dollars_per_month": month}
    said: dict[str, float] = {}
    for name, begin in begins.items():
        what = "nano_dollars / 1e9" if name.startswith("dollars") else "prompt_tokens + output_tokens"
        statement = f"SELECT COALESCE(SUM({what}), 0) FROM requests WHERE tenant = ? AND placed_ms >= ?"
        ((spent,),) = store.query(statement, (tenant, int(begin.timestamp() * 1000)))
        said[name] = float(spent) if name.startswith("dollars") else int(spent)
    assert set(said) <= {each.name for each in fields(Limits)}
    return said


def day_s(text: str, *, after: bool = False) -> float:
    """The beginning of a day like 2026-11-30 in Unix time, or of the one after. Raises ConfigError."""
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as error:
        raise ConfigError(f"expected a day like 2026-11-30, got {text!r}") from error
    return (day + timedelta(days=1 if after else 0)).timestamp()
