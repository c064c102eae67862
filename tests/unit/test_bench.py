"""The load generator: what it draws, what it counts, and its two protocols against scripted servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import fake_router as fake
from tests.support.fake_router import FakeHttpRouter, FakeRouter

from headrace import bench
from headrace.bench import BenchError, Plan, Prompts, Sample, Spread, Tally
from headrace.errors import ConfigError
from headrace.v1 import router_pb2, types_pb2

TIMEOUT_S = 20.0


class FakeTarget:
    """A target without a server: each request waits until it may go on, and brings what it was told to."""

    def __init__(self, *, held: bool = False, error: str | None = None, tokens_per_word: int = 1) -> None:
        self.go_on = asyncio.Event()
        self.running = 0
        self.most_running = 0
        self._changed = asyncio.Condition()
        self.prompts: list[str] = []
        self.closed = False
        self._error = error
        self._tokens_per_word = tokens_per_word
        if not held:
            self.go_on.set()

    async def prepare(self) -> str:
        return "toy"

    async def count_tokens(self, text: str) -> int | None:
        return self._tokens_per_word * len(text.split())

    async def run(self, prompt: str, output_tokens: int, sample: Sample) -> None:
        now_s = asyncio.get_running_loop().time
        self.prompts.append(prompt)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        sample.sent_s = now_s()
        sample.text(now_s(), 1)
        try:
            async with self._changed:
                self._changed.notify_all()
            await self.go_on.wait()
            # Others get their turn, as with any server.
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        sample.output_tokens = output_tokens
        sample.done_s = now_s()
        if self._error:
            sample.fail(self._error, "as told")

    async def until_running(self, count: int) -> None:
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: self.running >= count)

    async def close(self) -> None:
        self.closed = True


async def run(plan: Plan, **options: Any) -> bench.Report:
    async with asyncio.timeout(TIMEOUT_S):
        return await bench.run(plan, **options)


# What is drawn.


@given(
    seed=st.integers(0, 100),
    tokens=st.integers(1, 300),
    share=st.floats(0, 1),
    per_word=st.sampled_from([1.0, 2.0, 4.5]),
)
def test_prompts_have_their_length_and_share_only_their_beginning(
    seed: int, tokens: int, share: float, per_word: float
) -> None:
    shared = int(tokens * share)
    prompts = Prompts(seed, tokens, shared, per_word)
    one, two = prompts.prompt(1).split(), prompts.prompt(2).split()
    assert len(one) == len(two) == max(1, round(tokens / per_word))
    same = round(shared / per_word)
    assert one[:same] == two[:same]
    assert Prompts(seed, tokens, shared, per_word).prompt(1).split() == one
    if len(one) - same > 12:
        assert one[same:] != two[same:]


@given(seed=st.integers(0, 1000), prefixes=st.integers(1, 5))
def test_prompts_share_their_beginning_with_those_of_the_same_prefix_alone(seed: int, prefixes: int) -> None:
    prompts = Prompts(seed, 60, 40, prefixes=prefixes)
    beginnings: dict[int, set[str]] = {}
    for name in range(100):
        words = prompts.prompt(name).split()
        beginnings.setdefault(prompts.prefix(name), set()).add(" ".join(words[:40]))
    assert set(beginnings) == set(range(prefixes))
    assert all(len(same) == 1 for same in beginnings.values())
    assert len(set.union(*beginnings.values())) == prefixes


def test_another_seed_gives_another_prompt() -> None:
    assert Prompts(1, 50, 50).prompt(1) != Prompts(2, 50, 50).prompt(1)


@given(rate=st.floats(0.01, 10_000), seed=st.integers(0, 1000))
def test_arrivals_never_go_back_and_repeat_with_their_seed(rate: float, seed: int) -> None:
    times = list(itertools.islice(bench.arrivals(rate, seed), 50))
    assert times == sorted(times)
    assert times == list(itertools.islice(bench.arrivals(rate, seed), 50))


def test_arrivals_come_at_their_rate() -> None:
    (last,) = itertools.islice(bench.arrivals(50.0, 7), 9_999, 10_000)
    assert 190 < last < 210


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_ordered_and_within_the_values(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread is not None
    assert min(values) <= spread.p50 <= spread.p90 <= spread.p99 <= spread.max == max(values)


def test_percentiles_are_interpolated() -> None:
    assert bench.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert bench.percentile([5.0], 0.99) == 5.0
    assert Spread.of([]) is None


# What is counted.


def test_a_tally_of_all_kinds_of_ends() -> None:
    tally = Tally()
    tally.add(Sample(sent_s=1.0, first_s=1.5, last_s=2.5, done_s=2.6, prompt_tokens=7, output_tokens=11))
    tally.add(Sample(sent_s=1.0, first_s=2.0, last_s=2.0, done_s=2.0, prompt_tokens=7, output_tokens=1))
    failed = Sample(sent_s=1.0, first_s=1.25, last_s=1.25, done_s=3.0, output_tokens=2)
    failed.fail("worker_lost", "gone")
    tally.add(failed)
    tally.add_unfinished(Sample(sent_s=1.0, first_s=1.25, last_s=5.0, output_tokens=6))
    tally.add_unsent()
    report = tally.report(Plan(), "toy", 1.0, interrupted=True)
    assert (report.requests, report.succeeded, report.unfinished) == (4, 2, 1)
    assert report.errors == {"worker_lost": 1, "not_sent": 1}
    assert report.error_examples["worker_lost"] == "gone"
    # Only what succeeded enters the times; all that came enters the throughput.
    assert report.ttft_s is not None
    assert (report.ttft_s.p50, report.ttft_s.max) == (0.75, 1.0)
    assert report.tpot_s is not None
    assert report.tpot_s.p99 == pytest.approx(0.1)
    assert (report.prompt_tokens, report.output_tokens, report.duration_s) == (14, 20, 4.0)
    assert report.output_tokens_per_s == 5.0


def test_a_run_in_which_nothing_came() -> None:
    report = Tally().report(Plan(), "toy", 1.0, interrupted=True)
    assert (report.requests, report.output_tokens_per_s, report.ttft_s) == (0, 0.0, None)
    assert json.loads(json.dumps(report.to_dict()))["ttft_s"] is None


def test_the_report_as_json_has_its_promised_keys() -> None:
    tally = Tally()
    tally.add(Sample(sent_s=1.0, first_s=1.5, last_s=2.5, done_s=2.6, output_tokens=11))
    table = json.loads(json.dumps(tally.report(Plan(), "toy", 1.0, interrupted=False).to_dict()))
    assert table["ttft_s"]["p50"] == table["ttft_s"]["p90"] == table["ttft_s"]["p99"] == 0.5
    assert table["tpot_s"]["p50"] == 0.1
    assert {"output_tokens_per_s", "requests", "errors"} <= set(table)
    assert table["requests"] == 1
    assert table["errors"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "--concurrency: must be at least 1, got 0"),
        ({"requests": 0}, "--requests"),
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"output_tokens": 0}, "--output-tokens"),
        ({"shared_prefix": -1}, "--shared-prefix"),
        ({"shared_prefixes": 0}, "--shared-prefixes: must be at least 1, got 0"),
        ({"shared_prefix": 200}, r"--shared-prefix: must be at most --prompt-tokens \(128\)"),
        ({"rate": 0.0}, "--rate: must be more than 0"),
        ({"rate": math.nan}, "--rate"),
        ({"duration_s": -1.0}, "--duration"),
    ],
)
def test_a_plan_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**options)


@pytest.mark.parametrize("target", ["ftp://a:1", "grpc://a", "a", "grpc://a:99999", "http://:80", "https://a:x"])
def test_a_target_that_cannot_be(target: str) -> None:
    with pytest.raises(ConfigError, match="--target"):
        bench.make_target(Plan(target=target))


def test_defaults_follow_from_what_is_given() -> None:
    assert (Plan().clients, Plan().request_count, Plan().warmup_count) == (8, 128, 8)
    assert (Plan(rate=1.0).clients, Plan(rate=1.0).request_count) == (bench.MAX_OPEN_REQUESTS, 256)
    assert Plan(duration_s=1.0).request_count is None
    assert Plan(concurrency=100).warmup_count == 16


# How it loads.


async def test_a_closed_loop_keeps_its_concurrency_and_its_number() -> None:
    target = FakeTarget()
    told: list[tuple[int, int]] = []
    plan = Plan(concurrency=4, requests=50, warmup=3, output_tokens=5)
    report = await run(plan, target=target, progress=lambda ended, tokens: told.append((ended, tokens)))
    assert (report.requests, report.succeeded, report.output_tokens) == (50, 50, 250)
    assert target.most_running == 4
    assert len(target.prompts) == 53
    assert len(set(target.prompts)) == 53
    assert told[-1] == (50, 250)
    assert target.closed
    assert not report.interrupted


async def test_the_same_seed_sends_the_same() -> None:
    one, two, other = FakeTarget(), FakeTarget(), FakeTarget()
    for target, seed in ((one, 1), (two, 1), (other, 2)):
        await run(Plan(requests=10, seed=seed), target=target)
    assert sorted(one.prompts) == sorted(two.prompts) != sorted(other.prompts)


async def test_a_duration_ends_the_run() -> None:
    report = await run(Plan(duration_s=0.05, concurrency=2), target=FakeTarget())
    assert report.requests > 0
    assert report.unfinished == 0


async def test_an_open_loop_sends_whatever_became_of_those_before() -> None:
    target = FakeTarget(held=True)
    plan = Plan(rate=2000.0, requests=20, warmup=0)
    running = asyncio.create_task(run(plan, target=target))
    await target.until_running(20)
    target.go_on.set()
    report = await running
    assert report.succeeded == 20


async def test_an_open_loop_is_bounded_and_says_what_it_did_not_send() -> None:
    target = FakeTarget(held=True)

    def told(ended: int, _tokens: int) -> None:
        if ended == 26:
            # The last of the others has arrived; now the four are answered.
            target.go_on.set()

    plan = Plan(rate=5000.0, requests=30, concurrency=4, warmup=0)
    report = await run(plan, target=target, progress=told)
    assert report.errors == {"not_sent": 26}
    assert (report.succeeded, report.requests) == (4, 30)
    assert target.most_running == 4


async def test_stopping_reports_what_was_measured_so_far() -> None:
    target = FakeTarget(held=True)
    stop = asyncio.Event()
    running = asyncio.create_task(run(Plan(concurrency=3, warmup=0), target=target, stop=stop))
    await target.until_running(3)
    stop.set()
    report = await running
    assert report.interrupted
    assert (report.requests, report.unfinished, report.output_tokens) == (0, 3, 3)
    assert target.running == 0
    assert target.closed


async def test_a_run_with_many_prefixes() -> None:
    target = FakeTarget()
    await run(Plan(requests=40, warmup=0, prompt_tokens=30, shared_prefix=20, shared_prefixes=3), target=target)
    assert len({" ".join(prompt.split()[:20]) for prompt in target.prompts}) == 3


async def test_errors_are_counted_by_kind() -> None:
    report = await run(Plan(requests=5, warmup=0), target=FakeTarget(error="overloaded"))
    assert report.errors == {"overloaded": 5}
    assert (report.requests, report.succeeded, report.ttft_s) == (5, 0, None)


async def test_a_warm_up_that_fails_altogether_stops_the_run() -> None:
    target = FakeTarget(error="model_not_found")
    with pytest.raises(BenchError, match="every request of the warm-up failed: as told"):
        await run(Plan(requests=5), target=target)
    assert target.closed


async def test_longer_words_make_shorter_prompts() -> None:
    target = FakeTarget(tokens_per_word=4)
    await run(Plan(requests=1, warmup=0, prompt_tokens=40), target=target)
    assert len(target.prompts[0].split()) == 10


# The native gRPC API.


async def test_grpc_end_to_end() -> None:
    async with FakeRouter() as router:
        plan = Plan(target=f"grpc://{router.address}", concurrency=20, requests=40, output_tokens=6, warmup=1)
        report = await run(plan)
    assert (report.model, report.succeeded, report.errors) == ("toy", 40, {})
    assert (report.prompt_tokens, report.output_tokens) == (120, 240)
    assert report.ttft_s is not None
    assert report.tpot_s is not None
    assert report.output_tokens_per_s > 0
    request = router.requests[-1]
    assert request.stopping == router_pb2.StoppingOptions(max_tokens=6, ignore_eos=True)
    assert request.bypass_cache
    assert not request.bypass_prefix_cache
    assert len(request.text.split()) == 128
    assert not request.sampling.HasField("temperature")


async def test_grpc_as_chat_with_the_cache() -> None:
    async with FakeRouter() as router:
        plan = Plan(target=router.address, requests=1, chat=True, use_cache=True, temperature=0.0, model="other")
        report = await run(plan)
    assert report.model == "other"
    request = router.requests[-1]
    assert request.chat.messages[0].role == "user"
    assert not request.bypass_cache
    assert request.sampling.HasField("temperature")


async def test_grpc_without_prefix_reuse() -> None:
    async with FakeRouter() as router:
        await run(Plan(target=router.address, requests=3, warmup=1, reuse_prefix=False))
    assert [request.bypass_prefix_cache for request in router.requests] == [True] * 4


async def test_grpc_errors_by_kind() -> None:
    async def script(request: router_pb2.GenerateRequest, context: Any) -> AsyncIterator[fake.Response]:
        number = len(router.requests)
        if number % 4 == 0:
            await fake.fail(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="OVERLOADED")
        yield fake.started(request)
        yield fake.delta("a", 1)
        if number % 4 == 1:
            yield fake.finish(types_pb2.OUTCOME_WORKER_LOST)
            await fake.fail(context, grpc.StatusCode.UNAVAILABLE, "lost", reason="WORKER_LOST")
        if number % 4 == 2:
            return
        yield fake.finish()
        yield fake.usage(3, 2, 1)

    async with FakeRouter(script) as router:
        report = await run(Plan(target=router.address, concurrency=1, requests=8, warmup=0))
    assert report.errors == {"worker_lost": 2, "incomplete": 2, "overloaded": 2}
    assert report.error_examples["worker_lost"] == "lost"
    assert (report.requests, report.succeeded, report.cached_prompt_tokens) == (8, 2, 4)
    assert report.tpot_s is None


async def test_grpc_request_that_takes_too_long() -> None:
    async def script(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[fake.Response]:
        yield fake.started(request)
        await asyncio.Event().wait()

    async with FakeRouter(script) as router:
        report = await run(Plan(target=router.address, requests=2, warmup=0, timeout_s=0.1))
        await asyncio.wait_for(router.cancelled.wait(), TIMEOUT_S)
    assert report.errors == {"timeout": 2}


async def test_grpc_nothing_there() -> None:
    async with FakeRouter() as router:
        address = router.address
    with pytest.raises(BenchError, match=address):
        await run(Plan(target=address))


async def test_grpc_model_with_a_context_too_small_to_calibrate(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tokenize(_self: object, _request: object, context: Any) -> None:
        await fake.fail(context, grpc.StatusCode.INVALID_ARGUMENT, "no", reason="CONTEXT_LENGTH_EXCEEDED")

    monkeypatch.setattr(FakeRouter, "Tokenize", tokenize)
    async with FakeRouter() as router:
        report = await run(Plan(target=router.address, requests=1, prompt_tokens=7))
    assert len(router.requests[-1].text.split()) == 7
    assert report.succeeded == 1


async def test_grpc_unknown_model() -> None:
    async with FakeRouter() as router:
        with pytest.raises(BenchError, match="no model nope"):
            await run(Plan(target=router.address, model="nope"))


# HTTP.


@pytest.mark.parametrize("chat", [False, True])
async def test_http_end_to_end(chat: bool) -> None:
    async with FakeHttpRouter() as router:
        plan = Plan(target=f"http://{router.address}/v1", concurrency=4, requests=20, output_tokens=5, chat=chat)
        report = await run(plan)
    assert (report.model, report.succeeded, report.errors) == ("toy", 20, {})
    assert (report.prompt_tokens, report.output_tokens, report.cached_prompt_tokens) == (60, 100, 20)
    assert report.ttft_s is not None
    assert report.tpot_s is not None
    # Connections are kept.
    assert router.connections == 4
    path, body = router.requests[-1]
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    prompt = body["messages"][0]["content"] if chat else body["prompt"]
    assert len(prompt.split()) == 128
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (5, True, True)
    assert body["stream_options"] == {"include_usage": True}
    assert body["bypass_cache"] is True
    assert "bypass_prefix_cache" not in body


@pytest.mark.parametrize("chat", [False, True])
async def test_http_without_prefix_reuse(chat: bool) -> None:
    async with FakeHttpRouter() as router:
        plan = Plan(target=f"http://{router.address}", requests=3, warmup=1, chat=chat, reuse_prefix=False)
        await run(plan)
    assert [body["bypass_prefix_cache"] for path, body in router.requests if "completions" in path] == [True] * 4


async def test_http_server_that_closes_each_connection() -> None:
    async with FakeHttpRouter(close=True) as router:
        report = await run(Plan(target=f"http://{router.address}", concurrency=2, requests=6, output_tokens=3))
    assert (report.succeeded, report.errors) == (6, {})


async def test_http_server_without_usage_or_tokenizer() -> None:
    def script(path: str, body: dict[str, Any]) -> list[bytes]:
        if path == "/tokenize":
            return [fake.http_response(404, b"<html>")]
        events = fake.event({"choices": [{"text": "a"}]}) * 3 + fake.event({"choices": [{"text": ""}]})
        return [fake.SSE_HEAD, events, fake.event("[DONE]"), b"0\r\n\r\n"]

    async with FakeHttpRouter(script) as router:
        report = await run(Plan(target=f"http://{router.address}", requests=2, model="m", warmup=0))
    assert (report.succeeded, report.output_tokens) == (2, 6)


async def test_http_errors_by_kind() -> None:
    full = {"error": {"message": "full", "type": "overloaded_error", "code": "overloaded", "param": None}}
    lost = {"error": {"message": "gone", "type": "server_error", "code": "worker_lost"}}
    text = {"choices": [{"text": "a"}]}
    answers = itertools.cycle(
        [
            [fake.http_response(429, json.dumps(full).encode(), "Retry-After: 1")],
            [fake.http_response(502, b"<html>bad gateway</html>")],
            [
                fake.http_response(
                    400, json.dumps({"error": {"message": "no", "type": "invalid", "code": None}}).encode()
                )
            ],
            [fake.SSE_HEAD, fake.event(text), fake.event(lost), b"0\r\n\r\n"],
            [fake.SSE_HEAD, fake.event(text), b"0\r\n\r\n"],
            [fake.http_response(200, b'{"choices":[]}')],
            [fake.SSE_HEAD, fake.event("not json"), b"0\r\n\r\n"],
            [fake.SSE_HEAD, fake.event({"choices": ["x"]}), b"0\r\n\r\n"],
            [fake.SSE_HEAD, fake.event(text), b"zz\r\n"],
        ]
    )

    def script(path: str, body: dict[str, Any]) -> list[bytes]:
        return next(answers) if path == "/v1/completions" else fake.http_as_asked(path, body)

    async with FakeHttpRouter(script) as router:
        plan = Plan(target=f"http://{router.address}", concurrency=1, requests=9, warmup=0, model="toy")
        report = await run(plan)
    assert report.errors == {
        "overloaded": 1,
        "http_502": 1,
        "invalid": 1,
        "worker_lost": 1,
        "incomplete": 4,
        "connection": 1,
    }
    assert report.error_examples["overloaded"] == "full"


def one_event_and_no_more(path: str, body: dict[str, Any]) -> list[bytes]:
    if path == "/tokenize":
        return fake.http_as_asked(path, body)
    return [fake.SSE_HEAD, fake.event({"choices": [{"text": "a"}]})]


async def test_http_request_that_takes_too_long() -> None:
    async with FakeHttpRouter(one_event_and_no_more) as router:
        report = await run(Plan(target=f"http://{router.address}", requests=1, warmup=0, model="m", timeout_s=0.1))
    assert report.errors == {"timeout": 1}


async def test_http_request_cut_by_the_stop() -> None:
    stop = asyncio.Event()

    def script(path: str, body: dict[str, Any]) -> list[bytes]:
        if path != "/tokenize":
            stop.set()
        return one_event_and_no_more(path, body)

    async with FakeHttpRouter(script) as router:
        report = await run(Plan(target=f"http://{router.address}", requests=1, warmup=0, model="m"), stop=stop)
    assert report.interrupted
    assert (report.requests, report.unfinished) == (0, 1)


async def test_http_nothing_there() -> None:
    async with FakeHttpRouter() as router:
        address = router.address
    with pytest.raises(BenchError, match=address):
        await run(Plan(target=f"http://{address}"))


async def test_http_server_that_lists_no_model() -> None:
    async with FakeHttpRouter(lambda _path, _body: [fake.http_response(200, b"[]")]) as router:
        with pytest.raises(BenchError, match="--model"):
            await run(Plan(target=f"http://{router.address}"))
