"""Batches worked off: through a door that plays what is wanted, with either store, and a clock of the test's own."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import pytest
from tests.support.batches import Opener
from tests.support.waiting import eventually

from headrace.batches import lines
from headrace.batches.runner import MAX_ATTEMPTS, Background, Reply, Runner, Settings
from headrace.batches.store import Batch, Facts, File, Store, StoreError

URL = "/v1/completions"
SETTINGS = Settings(lines.Bounds(10_000, 10_000), 16, 2, lease_s=0.3, keep_files_s=0.0)


class Door:
    """Answers each prompt as the test says: a status, or a callable that gives one."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.under_way = 0
        self.most = 0
        self.say: Callable[[str, int], int] = lambda _prompt, _time: 200
        self.gate: asyncio.Event | None = None
        self.tenants: set[str] = set()

    async def ask(self, tenant: str, endpoint: str, body: bytes, request_id: str) -> Reply:
        assert endpoint == URL
        prompt = json.loads(body)["prompt"]
        self.tenants.add(tenant)
        self.asked[prompt] += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await (self.gate.wait() if self.gate is not None else asyncio.sleep(0))
        finally:
            self.under_way -= 1
        status = self.say(prompt, self.asked[prompt])
        if status == 0:
            raise ConnectionResetError("gone")
        usage = {"prompt_tokens": 2, "completion_tokens": 3}
        said = {"text": prompt, "usage": usage} if status == 200 else {"error": {"message": "no"}}
        return Reply(status, json.dumps(said).encode(), request_id, 0.01 if status in (429, 503) else None)

    async def models(self, tenant: str) -> Collection[str]:
        return {"toy"}


class Bench:
    """A store, and runners on it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.background = Background(self.store)
        self.door = Door()
        self.now_s = 1000.0
        self.runners: list[tuple[Runner, asyncio.Task[None]]] = []
        self._names = itertools.count()

    def runner(self, owner: str = "me", settings: Settings = SETTINGS) -> Runner:
        names = (f"file-out-{owner}-{count}" for count in itertools.count())
        runner = Runner(self.background, self.door, settings, owner, lambda: next(names), wall_s=lambda: self.now_s)
        self.runners.append((runner, asyncio.create_task(runner.run())))
        return runner

    def add(self, prompts: Collection[str], *, window_s: int = 100, raw: bytes | None = None) -> str:
        number = next(self._names)
        texts = [
            {"custom_id": f"c{at}", "method": "POST", "url": URL, "body": {"model": "toy", "prompt": prompt}}
            for at, prompt in enumerate(prompts)
        ]
        content = raw if raw is not None else b"".join(json.dumps(text).encode() + b"\n" for text in texts)
        file = File(f"file-in{number}", "batch", "in.jsonl", len(content), 1000, None)
        self.store.begin_upload("acme", file.id).write_bytes(content)
        self.store.add_file("acme", file)
        facts = Facts(URL, file.id, "24h", 1000, 1000 + window_s)
        self.store.add_batch(Batch(f"batch-{number}", "acme", "validating", facts), self.now_s)
        for runner, _ in self.runners:
            runner.nudge()
        return f"batch-{number}"

    async def get(self, batch: str) -> Batch:
        return await self.background.do(self.store.get_batch, "acme", batch)

    async def ends(self, batch: str, timeout_s: float = 20.0) -> Batch:
        async def over() -> bool:
            return not (await self.get(batch)).open

        await eventually(over, f"{batch} is over", timeout_s)
        return await self.get(batch)

    def content(self, file_id: str) -> list[Any]:
        if not file_id:
            return []
        path = self.store.path(self.store.get_file("acme", file_id, self.now_s))
        return [json.loads(line) for line in path.read_bytes().splitlines()]

    async def close(self) -> None:
        for runner, task in self.runners:
            await runner.stop(0.0)
            task.cancel()
        self.background.close()


@pytest.fixture
async def bench(opener: Opener) -> AsyncIterator[Bench]:
    bench = Bench(opener("batches"))
    yield bench
    await bench.close()


async def test_a_batch_is_answered_in_its_order(bench: Bench) -> None:
    runner = bench.runner()
    prompts = [f"p{at}" for at in range(300)]
    batch = await bench.ends(bench.add(prompts))
    assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 300, 300, 0)
    assert (batch.prompt_tokens, batch.completion_tokens) == (600, 900)
    output = bench.content(batch.facts.output_file_id)
    assert [line["custom_id"] for line in output] == [f"c{at}" for at in range(300)]
    assert [line["response"]["body"]["text"] for line in output] == prompts
    assert len({line["id"] for line in output}) == 300
    assert (bench.door.most, bench.door.tenants) == (16, {"acme"})
    assert set(bench.door.asked.values()) == {1}
    assert (batch.facts.error_file_id, runner.lines_under_way) == ("", 0)


async def test_what_fails_goes_to_the_error_file(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.batches.runner.LOST_WAIT_S", 0.01)
    bench.runner()
    bench.door.say = lambda prompt, _: {"bad": 400, "lost": 502, "broken": 500}.get(prompt, 200)
    batch = await bench.ends(bench.add(["ok", "bad", "lost", "fine", "broken"]))
    assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 3)
    errors = bench.content(batch.facts.error_file_id)
    assert [(line["custom_id"], line["response"]["status_code"]) for line in errors] == [
        ("c1", 400),
        ("c2", 502),
        ("c4", 500),
    ]
    assert bench.door.asked == {"ok": 1, "fine": 1, "bad": 1, "lost": MAX_ATTEMPTS, "broken": MAX_ATTEMPTS}


async def test_later_is_not_an_answer(bench: Bench) -> None:
    bench.runner()
    bench.door.say = lambda prompt, time: 200 if time > (3 if prompt == "p1" else 0) else (429, 503, 0)[time - 1]
    batch = await bench.ends(bench.add(["p0", "p1", "p2"]))
    assert (batch.status, batch.completed) == ("completed", 3)
    assert bench.door.asked["p1"] == 4


async def test_a_bad_file_fails_before_anything_runs(bench: Bench) -> None:
    bench.runner()
    batch = await bench.ends(bench.add([], raw=b"{\n"))
    assert (batch.status, [error.code for error in batch.facts.errors]) == ("failed", ["invalid_json_line"])
    assert not bench.door.asked


async def test_an_input_that_was_taken_away_fails_the_batch(bench: Bench) -> None:
    name = bench.add(["a"])
    bench.store.input_path(await bench.get(name)).unlink()
    # In a database it would come back.
    bench.store._rows("DELETE FROM files RETURNING id")
    bench.runner()
    batch = await bench.ends(name)
    assert (batch.status, [error.code for error in batch.facts.errors]) == ("failed", ["input_lost"])


async def test_cancelling_ends_what_runs_and_keeps_what_is_done(bench: Bench) -> None:
    runner = bench.runner()
    name = bench.add([f"p{at}" for at in range(50)])

    async def some() -> bool:
        return (await bench.get(name)).completed >= 8

    bench.door.say = lambda prompt, _: 200
    # The first eight go through, then the door keeps all.
    original = bench.door.ask

    async def ask(*values: Any) -> Reply:
        if len(bench.door.asked) >= 8:
            bench.door.gate = asyncio.Event()
        return await original(*values)

    bench.door.ask = ask  # type: ignore[method-assign]
    await eventually(some, "some lines are done")
    await bench.background.do(bench.store.cancel, "acme", name, bench.now_s)
    runner.nudge()
    batch = await bench.ends(name)
    assert (batch.status, bench.door.under_way) == ("cancelled", 0)
    assert len(bench.content(batch.facts.output_file_id)) == batch.completed < 50


async def test_what_is_not_done_when_the_window_is_over_is_told_so(bench: Bench) -> None:
    bench.runner()
    bench.door.say = lambda prompt, _: 503 if prompt == "never" else 200
    name = bench.add(["a", "never", "b"])

    async def two() -> bool:
        return (await bench.get(name)).completed == 2

    await eventually(two, "the others are done")
    bench.now_s += 200
    batch = await bench.ends(name)
    assert (batch.status, batch.completed, batch.failed) == ("expired", 2, 1)
    (error,) = bench.content(batch.facts.error_file_id)
    assert (error["custom_id"], error["error"]["code"], error["response"]) == ("c1", "batch_expired", None)


async def test_another_takes_over_and_no_line_appears_twice(bench: Bench) -> None:
    first = bench.runner("first")
    bench.door.gate = asyncio.Event()
    name = bench.add([f"p{at}" for at in range(40)])

    async def asked() -> bool:
        return bench.door.under_way >= 8

    await eventually(asked, "it runs")
    # The first one freezes: it neither renews nor hears.
    frozen = bench.runners[0][1]
    frozen.cancel()
    for work in first._works.values():
        work.look = asyncio.Event()
    for task in asyncio.all_tasks():
        if "_keep_lease" in repr(task.get_coro()):
            task.cancel()
    bench.now_s += 10
    bench.runner("second")

    async def taken() -> bool:
        return bench.door.under_way >= 16

    await eventually(taken, "the second runs it")
    bench.door.gate.set()
    bench.door.gate = None
    batch = await bench.ends(name)
    assert (batch.status, batch.completed, batch.failed) == ("completed", 40, 0)
    output = bench.content(batch.facts.output_file_id)
    assert [line["custom_id"] for line in output] == [f"c{at}" for at in range(40)]


async def test_stopping_leaves_the_rest_to_the_next_start(bench: Bench) -> None:
    runner = bench.runner()
    bench.door.gate = asyncio.Event()
    name = bench.add([f"p{at}" for at in range(20)])

    async def asked() -> bool:
        return bench.door.under_way >= 8

    await eventually(asked, "it runs")
    gate, bench.door.gate = bench.door.gate, None
    asyncio.get_running_loop().call_soon(gate.set)
    await runner.stop(5.0)
    batch = await bench.get(name)
    assert (batch.status, batch.completed) == ("in_progress", 8), "what was under way is written down"
    bench.runner("next")
    batch = await bench.ends(name)
    assert (batch.status, batch.completed) == ("completed", 20)
    assert set(bench.door.asked.values()) == {1}


async def test_a_full_disk_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.batches.runner.RETRY_S", 0.01)
    bench.runner()
    add_answers, full = Store.add_answers, [True]

    def refuses(store: Store, *values: Any) -> Batch:
        if full[0]:
            raise StoreError("full", "the disk takes no more")
        return add_answers(store, *values)

    monkeypatch.setattr(Store, "add_answers", refuses)
    name = bench.add(["a", "b"])

    async def asked() -> bool:
        return len(bench.door.asked) == 2

    await eventually(asked, "it runs")
    assert (await bench.get(name)).completed == 0
    full[0] = False
    batch = await bench.ends(name)
    assert (batch.status, batch.completed, set(bench.door.asked.values())) == ("completed", 2, {1})
