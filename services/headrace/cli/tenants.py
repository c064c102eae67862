"""``headrace tenants`` and ``headrace usage``: who may ask, and what they did."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import ConfigFile, Json, load

if TYPE_CHECKING:
    from headrace.ledger.store import Store

app = typer.Typer()
tenants_app = typer.Typer(help="Who may ask: tenants and their API keys.", no_args_is_help=True)
app.add_typer(tenants_app, name="tenants")

TenantName = Annotated[str, typer.Argument(help="The tenant.", metavar="NAME")]
TenantsFile = Annotated[
    Path | None, typer.Option("--file", help="The tenants' file.", show_default="[tenants] file of --config")
]
TenantModels = Annotated[
    list[str] | None, typer.Option("--model", help="A model that it may use. May be repeated.", show_default="all")
]
TenantClasses = Annotated[
    list[str] | None, typer.Option("--class", help="A class that it may use. May be repeated.", show_default="all")
]


TokensPerMinute = Annotated[
    int | None,
    typer.Option("--tokens-per-minute", help="Of prompts and answers; 0 = no limit.", min=0, show_default="as it is"),
]
TokensPerDay = Annotated[int | None, typer.Option("--tokens-per-day", help="UTC.", min=0, show_default="as it is")]
DollarsPerMonth = Annotated[
    float | None, typer.Option("--dollars-per-month", help="UTC.", min=0, show_default="as it is")
]
ConcurrentRequests = Annotated[
    int | None,
    typer.Option("--concurrent-requests", help="That wait or run.", min=0, show_default="as it is"),
]
SessionTokens = Annotated[
    int | None,
    typer.Option("--session-tokens", help="Of all requests with one session id.", min=0, show_default="as it is"),
]
Weight = Annotated[
    float | None,
    typer.Option("--weight", help="Share of capacity while others wait too.", show_default="as it is, 1 at first"),
]
Roles = Annotated[
    list[str] | None,
    typer.Option("--role", help="user, or admin: sees everybody's usage. May be repeated.", show_default="user"),
]


def _named(**limits: float | None) -> dict[str, float]:
    return {name: limit for name, limit in limits.items() if limit is not None}


def _tenants_file(file: Path | None, config: Path | None) -> Path:
    from headrace.errors import ConfigError

    if file is None:
        named = load(config, None).tenants.file
        if not named:
            raise ConfigError("tenants.file is not set: give --file, or --config with [tenants] file")
        file = Path(named)
    return file


def _show_key(name: str, key: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"tenant": name, "key": key}) + "\n")
    else:
        sys.stdout.write(f"{key}\n")
        sys.stderr.write("This is the only time that the key is shown.\n")


@tenants_app.command("add")
def add_tenant(
    name: TenantName,
    models: TenantModels = None,
    classes: TenantClasses = None,
    share_prefixes: Annotated[
        bool, typer.Option("--share-prefixes", help="Its KV is reused by others who share, and theirs by it.")
    ] = False,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    dollars_per_month: DollarsPerMonth = None,
    concurrent_requests: ConcurrentRequests = None,
    session_tokens: SessionTokens = None,
    weight: Weight = None,
    roles: Roles = None,
    file: TenantsFile = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Add a tenant, and print its API key."""
    from headrace import tenants

    with tenants.changing(_tenants_file(file, config)) as known:
        key = tenants.add(
            known,
            name,
            models=models or (),
            classes=classes or (),
            shares_prefixes=share_prefixes,
            limits=_named(
                tokens_per_minute=tokens_per_minute,
                tokens_per_day=tokens_per_day,
                dollars_per_month=dollars_per_month,
                concurrent_requests=concurrent_requests,
                session_tokens=session_tokens,
            ),
            weight=1.0 if weight is None else weight,
            roles=roles or ("user",),
            now_s=time.time(),
            token=secrets.token_hex,
        )
    _show_key(name, key, as_json=as_json)


@tenants_app.command("list")
def list_tenants(file: TenantsFile = None, config: ConfigFile = None, as_json: Json = False) -> None:
    """List tenants, what they may do and spend, what they have spent, and their keys' ids."""
    from headrace import tenants
    from headrace.errors import ConfigError
    from headrace.ledger import usage
    from headrace.terminal import show_tenants

    known = tenants.read(_tenants_file(file, config))
    spent: dict[str, dict[str, float]] = {}
    # Without a ledger nothing is known to be spent.
    with contextlib.suppress(ConfigError), _ledger(config) as store:
        spent = {name: usage.spent(store, name, time.time()) for name in known}
    if as_json:
        listed = [{"tenant": name} | dataclasses.asdict(each) for name, each in known.items()]
        for each in listed:
            each["keys"] = [{name: value for name, value in key.items() if name != "sha256"} for key in each["keys"]]
            each["spent"] = spent.get(each["tenant"])
        sys.stdout.write(json.dumps(listed) + "\n")
    else:
        show_tenants(known, spent)


@contextlib.contextmanager
def _ledger(config: Path | None) -> Iterator[Store]:
    """The ledger, to be read. Raises ConfigError, also for what goes wrong with it."""
    from headrace.errors import ConfigError
    from headrace.ledger.store import Store, StoreError, database_of

    database = database_of(load(config, None).ledger)
    if not database:
        raise ConfigError("ledger.database is empty: no ledger is kept")
    store = Store.open(database, "", write=False)
    try:
        yield store
    except StoreError as error:
        raise ConfigError(f"the ledger cannot be read: {error}") from error
    finally:
        store.close()


@app.command("usage")
def show_usage(
    by: Annotated[
        str, typer.Option(help="What to add up by, of tenant, model, variant, class, outcome, session, day.")
    ] = "tenant,variant,day",
    tenant: Annotated[str | None, typer.Option(help="Only this one's.", show_default="everybody's")] = None,
    since: Annotated[
        str | None, typer.Option(help="From this day on (2026-11-30, UTC).", show_default="the first")
    ] = None,
    until: Annotated[str | None, typer.Option(help="To the end of this day.", show_default="today")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV.")] = False,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Show what was used, what it cost and what was saved, from the ledger of --config."""
    from headrace.ledger import usage
    from headrace.terminal import show_usage as show

    question = usage.Question(
        [each.strip() for each in by.split(",") if each.strip()],
        tenant,
        None if since is None else usage.day_s(since),
        None if until is None else usage.day_s(until, after=True),
    )
    with _ledger(config) as store:
        answer = usage.ask(store, question)
    if as_json:
        sys.stdout.write(json.dumps(answer.to_dict()) + "\n")
    elif as_csv:
        sys.stdout.write(answer.to_csv())
    else:
        show(answer)


@tenants_app.command("limit")
def limit_tenant(
    name: TenantName,
    models: TenantModels = None,
    classes: TenantClasses = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="Any model.")] = False,
    all_classes: Annotated[bool, typer.Option("--all-classes", help="Any class.")] = False,
    share_prefixes: Annotated[
        bool | None,
        typer.Option("--share-prefixes/--own-prefixes", help="Reuse others' KV, too.", show_default="as it is"),
    ] = None,
    quality_floor: Annotated[
        float | None,
        typer.Option(help="Least agreement with a model's best variant, 0 to 1.", show_default="as it is"),
    ] = None,
    tokens_per_minute: TokensPerMinute = None,
    tokens_per_day: TokensPerDay = None,
    dollars_per_month: DollarsPerMonth = None,
    concurrent_requests: ConcurrentRequests = None,
    session_tokens: SessionTokens = None,
    weight: Weight = None,
    roles: Roles = None,
    file: TenantsFile = None,
    config: ConfigFile = None,
) -> None:
    """Change what a tenant may do and spend. What isn't named stays as it is; a limit of 0 is none."""
    from headrace import tenants

    with tenants.changing(_tenants_file(file, config)) as known:
        tenants.limit(
            known,
            name,
            models=() if all_models else models or None,
            classes=() if all_classes else classes or None,
            shares_prefixes=share_prefixes,
            quality_floor=quality_floor,
            limits=_named(
                tokens_per_minute=tokens_per_minute,
                tokens_per_day=tokens_per_day,
                dollars_per_month=dollars_per_month,
                concurrent_requests=concurrent_requests,
                session_tokens=session_tokens,
            ),
            weight=weight,
            roles=roles,
        )


@tenants_app.command("rotate")
def rotate_key(
    name: TenantName,
    grace: Annotated[float, typer.Option(help="Seconds for which the former keys go on.", min=0)] = 86_400.0,
    file: TenantsFile = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Give a tenant another API key, and print it."""
    from headrace import tenants

    with tenants.changing(_tenants_file(file, config)) as known:
        key = tenants.rotate(known, name, grace_s=grace, now_s=time.time(), token=secrets.token_hex)
    _show_key(name, key, as_json=as_json)


@tenants_app.command("revoke")
def revoke_key(
    name: TenantName,
    key_id: Annotated[
        str | None, typer.Option("--key", help="Only the key of this id.", show_default="the tenant and all its keys")
    ] = None,
    file: TenantsFile = None,
    config: ConfigFile = None,
) -> None:
    """Take a tenant's key away, or the tenant with all its keys. Routers follow within a second or two."""
    from headrace import tenants

    with tenants.changing(_tenants_file(file, config)) as known:
        count = tenants.revoke(known, name, key_id)
    sys.stderr.write(f"{count} key{'' if count == 1 else 's'} revoked\n")
