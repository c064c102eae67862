"""What all tests share: the --slow profile, and the services' last words beside a failure."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, no more. What a failure needs to happen again is printed.
settings.register_profile("headrace", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")

# A runner in the background (nohup, a shell's &) may have these ignored, and every process that a test starts would
# inherit that: whether they stop on a signal would depend on who started the tests.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# What a one-box mesh keeps from run to run is not the user's own.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="headrace-tests-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes long: soaks, long property profiles")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="takes long; run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def slow(request: pytest.FixtureRequest) -> bool:
    """Whether the long profile was asked for."""
    return bool(request.config.getoption("--slow"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if call.when == "call":
        item.stash[CALL_FAILED] = report.failed
    mesh = getattr(item, "funcargs", {}).get("mesh")
    if report.failed and hasattr(mesh, "logs"):
        report.sections.append(("services' logs", mesh.logs()))
    return report


#: Whether a test's own part failed, for fixtures that check something after it.
CALL_FAILED = pytest.StashKey[bool]()
