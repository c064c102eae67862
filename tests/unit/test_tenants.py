"""Tenants and their keys: what the commands make of the file, and that nothing is lost."""

from __future__ import annotations

import hashlib
import itertools
import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace import cli, tenants
from headrace.errors import ConfigError


def dice() -> Callable[[int], str]:
    count = itertools.count(1)
    return lambda size: f"{next(count):0{2 * size}x}"


def test_a_key_is_given_once_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "there" / "tenants.json"
    with tenants.changing(path) as known:
        key = tenants.add(known, "acme", models=["small"], classes=["batch"], now_s=100.5, token=dice())
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (kept,) = tenants.read(path)["acme"].keys
    assert kept.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert (kept.created_s, kept.expires_s) == (100, None)
    assert key.startswith(f"hr-{kept.id}-")


def test_rotation_leaves_the_former_key_its_grace() -> None:
    known: tenants.Tenants = {}
    token = dice()
    tenants.add(known, "acme", now_s=0.0, token=token)
    tenants.rotate(known, "acme", grace_s=60.0, now_s=100.0, token=token)
    assert [key.expires_s for key in known["acme"].keys] == [160, None]
    # A second rotation never gives a key more time than it had, and forgets what is over.
    tenants.rotate(known, "acme", grace_s=1000.0, now_s=120.0, token=token)
    assert [key.expires_s for key in known["acme"].keys] == [160, 1120, None]
    tenants.rotate(known, "acme", grace_s=0.0, now_s=200.0, token=token)
    assert [key.expires_s for key in known["acme"].keys] == [200, 200, None]


def test_revocation_takes_one_key_or_the_tenant() -> None:
    known: tenants.Tenants = {}
    token = dice()
    tenants.add(known, "acme", now_s=0.0, token=token)
    tenants.rotate(known, "acme", grace_s=60.0, now_s=0.0, token=token)
    first, second = known["acme"].keys
    assert tenants.revoke(known, "acme", first.id) == 1
    assert known["acme"].keys == [second]
    with pytest.raises(ConfigError, match=f"no key {first.id!r} .its keys: {second.id}"):
        tenants.revoke(known, "acme", first.id)
    assert tenants.revoke(known, "acme") == 1
    assert known == {}


@pytest.mark.parametrize(
    ("name", "classes", "said"),
    [("", [], "got ''"), ("a b", [], "got 'a b'"), ("acme", [], "already"), ("next", ["fast"], "got 'fast'")],
)
def test_what_cannot_be_added_says_why(name: str, classes: list[str], said: str) -> None:
    known: tenants.Tenants = {}
    tenants.add(known, "acme", now_s=0.0, token=dice())
    with pytest.raises(ConfigError, match=said):
        tenants.add(known, name, classes=classes, now_s=0.0, token=dice())
    assert list(known) == ["acme"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 2, "tenants": {}}', '{"version": 1, "tenants": {"a": {"x": 1}}}']
)
def test_a_file_that_is_none_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(text)
    with pytest.raises(ConfigError), tenants.changing(path) as known:
        tenants.add(known, "acme", now_s=0.0, token=dice())
    assert path.read_text() == text


def test_changes_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"

    def add(number: int) -> None:
        with tenants.changing(path) as known:
            tenants.add(known, f"tenant-{number}", now_s=0.0, token=lambda size: f"{number:0{2 * size}x}")

    threads = [threading.Thread(target=add, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tenants.read(path)) == sorted(f"tenant-{number}" for number in range(12))


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tenants.json"

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["tenants", *arguments, "--file", str(path)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    code, key, words = run("add", "acme", "--class", "batch")
    assert (code, "only time" in words) == (0, True)
    assert key.startswith("hr-")
    assert run("limit", "acme", "--all-classes", "--model", "small", "--share-prefixes")[0] == 0
    listed = json.loads(run("list", "--json")[1])
    assert [(each["tenant"], each["models"], each["classes"], each["shares_prefixes"]) for each in listed] == [
        ("acme", ["small"], [], True)
    ]
    assert "sha256" not in json.dumps(listed)
    rotated = json.loads(run("rotate", "acme", "--grace", "0", "--json")[1])
    assert rotated["key"] != key.strip()
    assert "small" in run("list")[1]
    assert run("revoke", "acme")[0] == 0
    code, _, words = run("revoke", "acme")
    assert (code, "no tenant 'acme'" in words) == (2, True)


def test_limits_weight_and_roles_are_kept_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    with tenants.changing(path) as known:
        limits = {"tokens_per_day": 1000, "dollars_per_month": 2.5}
        tenants.add(known, "acme", limits=limits, weight=3.0, roles=["admin"], now_s=0.0, token=dice())
        tenants.limit(known, "acme", limits={"tokens_per_minute": 60, "tokens_per_day": 0})
    (acme,) = tenants.read(path).values()
    assert acme.limits == tenants.Limits(tokens_per_minute=60, dollars_per_month=2.5)
    assert acme.limits.for_core()["nano_dollars_per_month"] == 2_500_000_000
    assert (acme.weight, acme.roles) == (3.0, ["admin"])
    with tenants.changing(path) as known:
        for wrong, message in (
            ({"limits": {"tokens_per_year": 1}}, "a limit is one of tokens_per_minute, "),
            ({"limits": {"tokens_per_day": -1}}, "tokens_per_day: must be 0"),
            ({"weight": 0.0}, "weight: must be 0.001 to 1000000, got 0.0"),
            ({"roles": ["king"]}, "a role is one of user, admin, got 'king'"),
        ):
            with pytest.raises(ConfigError, match=message):
                tenants.limit(known, "acme", **wrong)  # type: ignore[arg-type]


def test_a_file_of_before_there_were_limits_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('{"version": 1, "tenants": {"acme": {"keys": [], "models": ["small"]}}}')
    (acme,) = tenants.read(path).values()
    assert (acme.limits, acme.weight, acme.roles) == (tenants.Limits(), 1.0, ["user"])


def test_a_service_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    with tenants.changing(path) as known:
        tenants.add(known, "acme", now_s=0.0, token=dice())
    following = tenants.Following(path)
    assert list(following.tenants) == ["acme"]
    assert not following.refresh()
    with tenants.changing(path) as known:
        tenants.limit(known, "acme", limits={"tokens_per_day": 5})
    assert following.refresh()
    assert following.tenants["acme"].limits.tokens_per_day == 5
    path.write_text("{")
    assert not following.refresh()
    assert following.tenants["acme"].limits.tokens_per_day == 5
    assert tenants.Following(None).tenants == {}
