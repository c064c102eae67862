"""Tenants and their API keys: the file that routers read, and what ``headrace tenants`` does with it.

The file (``[tenants] file``) is JSON, written whole: a reader sees the former or the new one. Routers look at it every
second, and so do schedulers. Keys are random, shown once and kept as their SHA-256, so the file cannot be used to ask.
What a router makes of it is in ``gateway_rs/src/plane/tenants.rs``; limits are ``gateway_rs/core/src/budgets``'s.

Everything here takes the time and the dice as arguments.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError

log = logging.getLogger(__name__)

VERSION = 1
#: How often a service looks at the file.
LOOK_EVERY_S = 1.0
CLASSES = ("interactive", "standard", "batch")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass
class ApiKey:
    """A key, as far as it is kept."""

    #: The key's first part: names it without giving it away.
    id: str
    sha256: str
    created_s: int
    #: Unix time after which it is of no use; None = never.
    expires_s: int | None = None


#: What a tenant may be, beside one who asks.
ROLES = ("user", "admin")


@dataclass
class Limits:
    """What a tenant may spend; 0 = as much as it likes. A token is one of a prompt or of an answer."""

    #: Of requests that were placed within one minute of the clock.
    tokens_per_minute: int = 0
    #: Of one day, UTC.
    tokens_per_day: int = 0
    #: Of one month, UTC.
    dollars_per_month: float = 0.0
    #: Requests that wait or run.
    concurrent_requests: int = 0
    #: Of all requests with one session id.
    session_tokens: int = 0

    def for_core(self) -> dict[str, int]:
        """As the scheduler's books count: dollars in billionths."""
        limits: dict[str, Any] = asdict(self)
        limits["nano_dollars_per_month"] = round(limits.pop("dollars_per_month") * 1e9)
        return limits


@dataclass
class Tenant:
    """One of those who ask."""

    keys: list[ApiKey] = field(default_factory=list)
    #: Empty = all.
    models: list[str] = field(default_factory=list)
    #: Empty = all.
    classes: list[str] = field(default_factory=list)
    #: Its KV may be reused by others who share, and theirs by it.
    shares_prefixes: bool = False
    #: The least agreement with a model's best variant that it accepts of another; 0 = as models are configured.
    quality_floor: float = 0.0
    limits: Limits = field(default_factory=Limits)
    #: Its share of a pool's capacity while others wait too.
    weight: float = 1.0
    roles: list[str] = field(default_factory=lambda: ["user"])


Tenants = dict[str, Tenant]


def read(path: Path) -> Tenants:
    """What the file says; nobody when there is none. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the tenants' file {path}: {error}") from error
    try:
        content = json.loads(text)
        if content["version"] != VERSION:
            raise ConfigError(f"{path} is of version {content['version']}, this program reads {VERSION}")
        return {str(name): _tenant(entry) for name, entry in content["tenants"].items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no tenants' file: {error}") from error


def _tenant(entry: dict[str, Any]) -> Tenant:
    known = {each.name for each in fields(Tenant)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"unknown field {unknown[0]!r}")
    limits = Limits(**entry.get("limits", {}))
    return Tenant(**entry | {"keys": [ApiKey(**key) for key in entry["keys"]], "limits": limits})


@contextmanager
def changing(path: Path) -> Iterator[Tenants]:
    """The tenants, to be changed; written when the block ends well. One at a time. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(f".{path.name}.lock"), "w", encoding="ascii")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot write the tenants' file {path}: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tenants = read(path)
        yield tenants
        _write(path, tenants)


def _write(path: Path, tenants: Tenants) -> None:
    text = json.dumps({"version": VERSION, "tenants": {name: asdict(each) for name, each in tenants.items()}}, indent=1)
    try:
        # Of mode 0600, as mkstemp makes it; a router of another user needs it opened by hand, as its owner decides.
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            if path.exists():
                os.chmod(name, path.stat().st_mode & 0o777)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write the tenants' file {path}: {error}") from error


def add(
    tenants: Tenants,
    name: str,
    *,
    models: Sequence[str] = (),
    classes: Sequence[str] = (),
    shares_prefixes: bool = False,
    limits: Mapping[str, float] | None = None,
    weight: float = 1.0,
    roles: Sequence[str] = ("user",),
    now_s: float,
    token: Callable[[int], str],
) -> str:
    """A new tenant; its key, which can't be had again. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a tenant's name is 1 to 63 of letters, digits, '.', '_' and '-', got {name!r}")
    if name in tenants:
        raise ConfigError(f"there is a tenant {name!r} already; `rotate` gives it another key")
    tenant = Tenant(models=list(models), classes=_classes(classes), shares_prefixes=shares_prefixes)
    tenants[name] = tenant
    _spend(tenant, limits or {}, weight, roles)
    return _give_key(tenants[name], now_s, token)


def limit(
    tenants: Tenants,
    name: str,
    *,
    models: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    shares_prefixes: bool | None = None,
    quality_floor: float | None = None,
    limits: Mapping[str, float] | None = None,
    weight: float | None = None,
    roles: Sequence[str] | None = None,
) -> None:
    """Changes what a tenant may do; None leaves a limit as it is. Raises ConfigError."""
    tenant = _known(tenants, name)
    if models is not None:
        tenant.models = list(models)
    if classes is not None:
        tenant.classes = _classes(classes)
    if shares_prefixes is not None:
        tenant.shares_prefixes = shares_prefixes
    if quality_floor is not None:
        if not 0.0 <= quality_floor <= 1.0:
            raise ConfigError(f"a quality floor is from 0 to 1, got {quality_floor}")
        tenant.quality_floor = quality_floor
    _spend(tenant, limits or {}, weight, roles)


def rotate(tenants: Tenants, name: str, *, grace_s: float, now_s: float, token: Callable[[int], str]) -> str:
    """Another key for a tenant; those it had go on for ``grace_s``. Raises ConfigError."""
    tenant = _known(tenants, name)
    expires_s = int(now_s + grace_s)
    tenant.keys = [key for key in tenant.keys if key.expires_s is None or key.expires_s > now_s]
    for key in tenant.keys:
        key.expires_s = expires_s if key.expires_s is None else min(key.expires_s, expires_s)
    return _give_key(tenant, now_s, token)


def revoke(tenants: Tenants, name: str, key_id: str | None = None) -> int:
    """Takes a tenant's key away, or without an id the tenant with all of them; how many keys. Raises ConfigError."""
    tenant = _known(tenants, name)
    if key_id is None:
        del tenants[name]
        return len(tenant.keys)
    left = [key for key in tenant.keys if key.id != key_id]
    if len(left) == len(tenant.keys):
        known = ", ".join(key.id for key in tenant.keys) or "none"
        raise ConfigError(f"tenant {name!r} has no key {key_id!r} (its keys: {known})")
    tenant.keys = left
    return 1


def _give_key(tenant: Tenant, now_s: float, token: Callable[[int], str]) -> str:
    identity = token(4)
    key = f"hr-{identity}-{token(32)}"
    tenant.keys.append(ApiKey(identity, hashlib.sha256(key.encode()).hexdigest(), int(now_s)))
    return key


def _known(tenants: Tenants, name: str) -> Tenant:
    if name not in tenants:
        raise ConfigError(f"there is no tenant {name!r} (there are: {', '.join(tenants) or 'none'})")
    return tenants[name]


def _spend(tenant: Tenant, limits: Mapping[str, float], weight: float | None, roles: Sequence[str] | None) -> None:
    kinds = {name: type(value) for name, value in asdict(Limits()).items()}
    for name, limit in limits.items():
        if name not in kinds:
            raise ConfigError(f"a limit is one of {', '.join(kinds)}, got {name!r}")
        if not 0 <= limit < 2**53:
            raise ConfigError(f"{name}: must be 0 (no limit) or more, and less than 2^53, got {limit}")
        setattr(tenant.limits, name, kinds[name](limit))
    if weight is not None:
        if not 0.001 <= weight <= 1e6:
            raise ConfigError(f"weight: must be 0.001 to 1000000, got {weight}")
        tenant.weight = weight
    if roles is not None:
        for role in roles:
            if role not in ROLES:
                raise ConfigError(f"a role is one of {', '.join(ROLES)}, got {role!r}")
        tenant.roles = list(roles) or ["user"]


class Following:
    """The tenants as the file has them, for a service that must follow it. What cannot be read leaves the former."""

    def __init__(self, path: Path | None) -> None:
        """None: there are none. Raises ConfigError."""
        self._path = path
        self._mark = self._look()
        self.tenants: Tenants = {} if path is None else read(path)

    def _look(self) -> tuple[int, int, int] | None:
        try:
            stat = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return None if stat is None else (stat.st_mtime_ns, stat.st_ino, stat.st_size)

    def refresh(self) -> bool:
        """Looks at the file; whether there is something new."""
        mark = self._look()
        if self._path is None or mark == self._mark:
            return False
        self._mark = mark
        try:
            fresh = read(self._path)
        except ConfigError as error:
            # Told once for each state of the file.
            log.warning("the former tenants stay in force: %s", error)
            return False
        changed, self.tenants = fresh != self.tenants, fresh
        return changed

    async def watch(self, tell: Callable[[Tenants], None]) -> None:
        """Looks at the file for as long as the service runs. Never returns."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            # A file may be slow to answer; streams must not wait for it.
            if await asyncio.to_thread(self.refresh):
                tell(self.tenants)


def _classes(classes: Sequence[str]) -> list[str]:
    for each in classes:
        if each not in CLASSES:
            raise ConfigError(f"a class is one of {', '.join(CLASSES)}, got {each!r}")
    return list(classes)
