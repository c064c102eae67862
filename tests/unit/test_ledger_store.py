"""The ledger's database: each row once, open bookings over restarts, and what was spent, on SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers import postgres_server, redis_server

from headrace.errors import ConfigError
from headrace.ledger import usage
from headrace.ledger.shared import SharedMeters
from headrace.ledger.store import COLUMNS, OPEN_COLUMNS, Store, StoreError

DAY_MS = 86_400_000
#: A day's beginning.
MIDNIGHT_MS = 20_454 * DAY_MS


def row(booking: int, **values: Any) -> tuple[Any, ...]:
    plain = dict.fromkeys(COLUMNS, 0) | {
        "booking": booking,
        "request_id": f"req-{booking}",
        "placed_ms": MIDNIGHT_MS + 1000,
        "tenant": "acme",
        "session": "",
        "alias": "toy",
        "variant": "toy",
        "class": "standard",
        "outcome": "stop",
    }
    assert set(values) <= set(plain)
    return ("row", *(plain | values).values())


def open_booking(booking: int) -> tuple[Any, ...]:
    plain: dict[str, Any] = dict.fromkeys(OPEN_COLUMNS, 7) | {"booking": booking, "router": "r", "request_id": "x"}
    for name in ("tenant", "session", "alias", "variant"):
        plain[name] = name
    plain["class"] = "batch"
    return ("keep", *plain.values())


def look(limit: str, which: str = "", days: tuple[int, int] = (0, 1)) -> tuple[Any, ...]:
    from_ms, to_ms = (MIDNIGHT_MS + day * DAY_MS for day in days)
    return ("look", "acme", limit, which, from_ms, to_ms, 0, 10**6)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database by its setting."""
    folder = tmp_path_factory.mktemp("ledger")
    if request.param == "sqlite":
        yield str(folder / "ledger.db")
        return
    with postgres_server(folder) as url:
        yield url


@pytest.fixture
def database(server: str) -> str:
    """Empty."""
    with contextlib.closing(Store.open(server, "clean")) as store:
        for table in ("requests", "open_bookings", "token_times"):
            store._run(f"DELETE FROM {table}")
    return server


def test_a_row_is_there_once_and_its_booking_is_open_no_more(database: str) -> None:
    with contextlib.closing(Store.open(database, "one")) as store:
        assert store.carry_out([open_booking(1), open_booking(-2)], shared=False) == [(0, 0), (0, 0)]
        assert sorted(kept[0] for kept in store.open_bookings()) == [-2, 1]
        entries = [row(1, prompt_tokens=10, output_tokens=5), row(5, output_tokens=3), ("forget", -2)]
        assert store.carry_out(entries, shared=False) == [(1, 0), (1, 0), (0, 0)]
        assert store.open_bookings() == []
        # Sent again, by a router that was not told.
        answers = store.carry_out([row(5, output_tokens=3), row(6, output_tokens=1)], shared=False)
        assert answers == [(0, 0), (1, 0)]
        assert store.query("SELECT SUM(output_tokens) FROM requests") == [(9,)]


def test_open_bookings_are_their_schedulers_and_come_back_as_they_were(database: str) -> None:
    with contextlib.closing(Store.open(database, "one")) as store:
        store.carry_out([open_booking(4)], shared=False)
    with contextlib.closing(Store.open(database, "other")) as store:
        assert store.open_bookings() == []
        store.carry_out([("forget", 4)], shared=False)
    with contextlib.closing(Store.open(database, "one")) as store:
        assert store.open_bookings() == [open_booking(4)[1:]]


def test_what_was_spent_is_of_the_tenant_the_time_and_the_session(database: str) -> None:
    with contextlib.closing(Store.open(database, "one")) as store:
        store.carry_out(
            [
                row(1, prompt_tokens=10, output_tokens=5, nano_dollars=70, session="s"),
                row(2, prompt_tokens=1, output_tokens=1, placed_ms=MIDNIGHT_MS - 1, nano_dollars=7, session="s"),
                row(3, prompt_tokens=100, tenant="other"),
            ],
            shared=False,
        )
        entries = [
            look("tokens_per_day"),
            look("dollars_per_month", days=(-20, 10)),
            look("session_tokens", "s"),
            look("session_tokens", "t"),
            look("concurrent_requests"),
        ]
        assert [spent for spent, _ in store.carry_out(entries, shared=False)] == [15, 77, 17, 0, 0]
    with contextlib.closing(Store.open(database, "other")) as store:
        store.carry_out([row(9, output_tokens=1000)], shared=False)
        assert store.carry_out([look("tokens_per_day")], shared=True) == [(1000, 0)]


def test_what_fails_is_not_half_done(database: str) -> None:
    with contextlib.closing(Store.open(database, "one")) as store:
        with pytest.raises(StoreError):
            store.carry_out([row(1), row(2, output_tokens="many")[:-1]], shared=False)
        assert store.query("SELECT COUNT(*) FROM requests") == [(0,)]
        assert store.carry_out([row(1)], shared=False) == [(1, 0)]


def test_rows_go_when_they_are_old_and_times_stay(database: str) -> None:
    with contextlib.closing(Store.open(database, "one")) as store:
        store.carry_out([row(1), row(2, placed_ms=MIDNIGHT_MS - DAY_MS)], shared=False)
        assert not store.forget_before(MIDNIGHT_MS / 1000)
        assert store.query("SELECT booking FROM requests") == [(1,)]
        store.keep_token_times({"toy": (0.001, 0.02)})
        store.keep_token_times({"toy": (0.002, 0.03)})
        assert store.token_times() == {"toy": (0.002, 0.03)}


def test_usage_adds_up_and_says_what_was_saved(database: str) -> None:
    with contextlib.closing(Store.open(database, "one")) as store:
        store.carry_out(
            [
                row(1, prompt_tokens=100, cached_tokens=40, output_tokens=50, nano_dollars=3_000_000_000, ttft_s=0.5),
                row(
                    2, prompt_tokens=10, output_tokens=40, nano_dollars=1_000_000_000, prefix_saved_nano=500, ttft_s=0.1
                ),
                row(3, replayed_prompt_tokens=150, replayed_output_tokens=50, answer_saved_nano=2_000_000_000),
                row(4, tenant="other", placed_ms=MIDNIGHT_MS + DAY_MS, output_tokens=5),
            ],
            shared=False,
        )
        answer = usage.ask(store, usage.Question(("tenant", "day")))
        assert [line.group for line in answer.lines] == [
            {"tenant": "acme", "day": "2026-01-01"},
            {"tenant": "other", "day": "2026-01-02"},
        ]
        acme = answer.lines[0]
        assert (acme.requests, acme.tokens, acme.cached_prompt_tokens, acme.replayed_requests) == (3, 200, 40, 1)
        assert acme.dollars == 4.0
        assert acme.dollars_per_1k_tokens == 10.0
        assert (acme.prefix_cache_saved_dollars, acme.response_cache_saved_dollars) == (5e-7, 2.0)
        assert acme.mean_ttft_s == pytest.approx(0.3)
        assert answer.total.requests == 4
        assert answer.to_csv().splitlines()[0].startswith("tenant,day,requests,")
        assert (acme.variants_saved_dollars, acme.batch_saved_dollars, acme.shadow_dollars) == (0, 0, 0)
        own = usage.ask(store, usage.Question((), "other", to_s=MIDNIGHT_MS / 1000))
        assert (own.lines, own.total.requests, own.total.dollars_per_1k_tokens) == ([], 0, None)
    with pytest.raises(ConfigError, match="usage is by tenant"):
        usage.Question(("colour",))


def test_batch_work_saved_what_others_paid_more_for_the_same_tokens(database: str) -> None:
    # By day a thousandth of a dollar for a token of a prompt, two hundredths for one of an answer.
    by_day = {"prompt_price": 1_000_000_000, "output_price": 20_000_000_000}
    by_night = {"prompt_price": 500_000_000, "output_price": 5_000_000_000, "class": "batch"}
    batch = {"prompt_tokens": 1000, "cached_tokens": 400, "output_tokens": 100}
    with contextlib.closing(Store.open(database, "one")) as store:
        store.carry_out(
            [
                row(1, tenant="other", prompt_tokens=100, output_tokens=10, **by_day),
                # Before anything was measured: it says nothing of prices.
                row(2, prompt_tokens=10_000, output_tokens=10_000),
                row(3, **batch, **by_night),
                row(4, variant="alone", **batch, **by_night),
                row(5, **batch, **by_night, shadow=1, nano_dollars=800_000_000),
                row(6, **batch, **{"class": "batch"}),
                row(7, **batch, **by_night, placed_ms=MIDNIGHT_MS - DAY_MS),
            ],
            shared=False,
        )
        today = usage.ask(store, usage.Question(("variant",), "acme", from_s=MIDNIGHT_MS / 1000))
        saved = {line.group["variant"]: line.batch_saved_dollars for line in today.lines}
        assert saved == {"toy": pytest.approx(600 * 0.0005 + 100 * 0.015), "alone": 0.0}
        assert today.total.batch_saved_dollars == pytest.approx(1.8)
        assert today.total.shadow_dollars == 0.8
        # The day before, nobody else asked.
        assert usage.ask(store, usage.Question((), to_s=MIDNIGHT_MS / 1000)).total.batch_saved_dollars == 0.0
        assert usage.ask(store, usage.Question(())).total.batch_saved_dollars == pytest.approx(3.6)


def test_what_a_tenant_has_spent_is_of_the_limits_times(database: str) -> None:
    with contextlib.closing(Store.open(database, "one")) as store:
        store.carry_out(
            [
                row(1, prompt_tokens=10, output_tokens=5, nano_dollars=70, placed_ms=MIDNIGHT_MS + 60_000),
                row(2, prompt_tokens=100, nano_dollars=7),
                row(3, output_tokens=1000, placed_ms=MIDNIGHT_MS - 1, nano_dollars=5),
                row(4, tenant="other", output_tokens=9),
            ],
            shared=False,
        )
        said = usage.spent(store, "acme", MIDNIGHT_MS / 1000 + 90)
        # 2026 begins.
        assert said == {"tokens_per_minute": 15, "tokens_per_day": 115, "dollars_per_month": pytest.approx(77e-9)}


def test_a_ledger_of_an_earlier_version_is_brought_up_to_this_one(database: str) -> None:
    with contextlib.closing(Store.open(database, "one")) as store:
        store.carry_out([row(1, output_tokens=5)], shared=False)
        for name in ("variant_saved_nano", "prompt_price", "output_price", "shadow"):
            store._run(f"ALTER TABLE requests DROP COLUMN {name}")
        store._run("UPDATE ledger_version SET version = 1")
    with pytest.raises(ConfigError, match="is of version 1, this program reads 2"):
        Store.open(database, "", write=False)
    with contextlib.closing(Store.open(database, "one")) as store:
        store.carry_out([row(2, output_tokens=7, variant_saved_nano=-3)], shared=False)
        total = usage.ask(store, usage.Question(())).total
        assert (total.output_tokens, total.variants_saved_dollars) == (12, pytest.approx(-3e-9))


def test_a_name_in_use_is_not_given_twice(tmp_path: Path) -> None:
    database = str(tmp_path / "ledger.db")
    first, second = Store.open(database, "127.0.0.1:8082"), Store.open(database, "127.0.0.1:8082")
    assert (first.name, second.name) == ("127.0.0.1:8082", "127.0.0.1:8082.2")
    first.close()
    third = Store.open(database, "127.0.0.1:8082")
    assert third.name == "127.0.0.1:8082"
    second.close()
    third.close()


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no scheduler has written one"):
        Store.open(str(tmp_path / "none.db"), "", write=False)
    (tmp_path / "text.db").write_text("no database at all, but a text that is long enough" * 50)
    with pytest.raises(ConfigError, match=r"ledger\.database"):
        Store.open(str(tmp_path / "text.db"), "one")
    Store.open(str(tmp_path / "new.db"), "one").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "new.db")) as connection:
        connection.execute("UPDATE ledger_version SET version = 9")
        connection.commit()
    with pytest.raises(ConfigError, match="is of version 9, this program reads 2"):
        Store.open(str(tmp_path / "new.db"), "one")


def test_two_draw_from_one_limit_and_never_more(tmp_path: Path) -> None:
    with redis_server(tmp_path) as url:
        one, two = SharedMeters(url, "one"), SharedMeters(url, "two")

        def draw(meters: SharedMeters, want: int) -> int:
            ((_, drawn),) = meters.carry_out([(*look("tokens_per_day", "20454")[:6], want, 100)], [(0, 0)])
            return drawn

        assert (draw(one, 60), draw(two, 60), draw(one, 60)) == (60, 40, 60)
        # What is given back is the other's to have; said twice it is the same.
        for _ in range(2):
            one.carry_out([("return", "acme", "tokens_per_day", "20454", 25)], [(0, 0)])
        assert (draw(two, 100), draw(one, 1)) == (75, 25)
        # A smaller limit takes nothing away, and gives nothing.
        assert one.carry_out([(*look("tokens_per_day", "20454")[:6], 10, 50)], [(3, 0)]) == [(3, 25)]
        one.close()
        two.close()
