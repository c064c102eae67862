"""Traces that hold together, and metrics that stay small: context is a value that travels with its request, a span ends
with its stream however that ends, and labels take values only from closed lists."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Iterator

import pytest

from tests.integration.conftest import MODELS
from tests.support.clients import MODES, STREAMED
from tests.support.mesh import Lab, Mesh
from tests.support.otlp import Collector, Span

STAGES = {"prepare", "lookup", "place", "run"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Mesh]:
    """One whose services export their spans."""
    mesh = Mesh(tmp_path_factory.mktemp("traced"), MODELS, otlp_endpoint=collector.endpoint).start()
    yield mesh
    mesh.stop()


def new_trace() -> tuple[str, str, str]:
    """A client's trace: its id, its span, and the traceparent of both."""
    trace_id, span_id = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    return trace_id, span_id, f"00-{trace_id}-{span_id}-01"


def one(spans: list[Span], name: str) -> Span:
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, (name, [span.name for span in spans])
    return found[0]


def names(spans: list[Span]) -> set[str]:
    return {span.name for span in spans}


async def spans_of(collector: Collector, trace_id: str, *wanted: str) -> list[Span]:
    """The trace, once all spans of those names have arrived."""
    return await asyncio.to_thread(collector.wait, trace_id, lambda spans: set(wanted) <= names(spans))


@pytest.mark.parametrize("mode", MODES)
async def test_one_trace_through_all_services(lab: Lab, collector: Collector, mode: str) -> None:
    await lab.worker()
    trace_id, client_span, traceparent = new_trace()
    lab.play("'a'; 'b'; END")
    text = f"t{next(_numbers)}"
    answer = await lab.ask(text, {"temperature": 0}, mode=mode, headers={"traceparent": traceparent})
    answer.succeeded()
    wanted = ("chat toy", *STAGES, "scheduler.place", "cache.lookup")
    spans = await spans_of(collector, trace_id, *wanted)
    root = one(spans, "chat toy")
    assert root.service == "headrace-router"
    assert root.parent_id == client_span
    for stage in STAGES:
        assert one(spans, stage).parent_id == root.span_id
    assert one(spans, "scheduler.place").parent_id == one(spans, "place").span_id
    # Why that worker.
    reasons = {"hit_tokens", "prefill_ms", "pending_prefill_ms", "decoding", "waiting", "score"}
    assert {f"headrace.place.{reason}" for reason in reasons} <= set(one(spans, "place").attributes)
    assert one(spans, "scheduler.place").service == "headrace-scheduler"
    assert one(spans, "cache.lookup").parent_id == one(spans, "lookup").span_id
    assert one(spans, "cache.lookup").service == "headrace-cache"
    # The worker was given the run's own span to continue from.
    assert lab.journal[0].traceparent == f"00-{trace_id}-{one(spans, 'run').span_id}-01"
    assert root.end_s >= one(spans, "run").end_s


_numbers = itertools.count()


@pytest.mark.parametrize("mode", STREAMED)
async def test_each_attempt_is_a_child_of_the_same_request(lab: Lab, collector: Collector, mode: str) -> None:
    await lab.worker()
    await lab.worker()
    trace_id, _, traceparent = new_trace()
    lab.play("ERR:UNAVAILABLE")
    lab.play("'ok'; END")
    (await lab.ask("go", mode=mode, headers={"traceparent": traceparent})).succeeded()
    spans = await spans_of(collector, trace_id, "chat toy")
    runs = [span for span in spans if span.name == "run"]
    assert len(runs) == 2
    assert {run.parent_id for run in runs} == {one(spans, "chat toy").span_id}
    assert {entry.traceparent.split("-")[2] for entry in lab.journal} == {run.span_id for run in runs}


@pytest.mark.parametrize("mode", STREAMED)
async def test_neighbours_do_not_mix(lab: Lab, collector: Collector, mode: str) -> None:
    await lab.worker(slots=2)
    traces = [new_trace() for _ in range(2)]
    answers, entries = [], []
    for number, (_, _, traceparent) in enumerate(traces):
        lab.bench.play_for(f"n{number}", "; ".join(["'x'"] * 10) + "; END", gated=True)
        answers.append(await lab.open(f"n{number}", mode=mode, headers={"traceparent": traceparent}))
        entries.append(await lab.entry(number))
    for _ in range(11):
        for entry in entries:
            entry.release()
    for answer in answers:
        (await answer.rest()).succeeded()
    for (trace_id, client_span, _), entry in zip(traces, entries, strict=True):
        spans = await spans_of(collector, trace_id, "chat toy", "run")
        assert one(spans, "chat toy").parent_id == client_span
        assert one(spans, "run").span_id == entry.traceparent.split("-")[2]
        assert entry.traceparent.split("-")[1] == trace_id
    assert "detach" not in lab.mesh.logs(1000).lower()


@pytest.mark.parametrize("mode", STREAMED)
async def test_spans_end_when_the_client_leaves(lab: Lab, collector: Collector, mode: str) -> None:
    await lab.worker()
    trace_id, _, traceparent = new_trace()
    lab.play("'a'; HANG")
    answer = await lab.open("go", mode=mode, headers={"traceparent": traceparent})
    assert await answer.piece() == "a"
    answer.leave()
    spans = await spans_of(collector, trace_id, "chat toy", "run")
    root = one(spans, "chat toy")
    assert one(spans, "run").end_s <= root.end_s + 0.001
    assert root.attributes["headrace.outcome"] == "cancelled"


@pytest.mark.parametrize("mode", MODES)
async def test_a_span_lasts_as_long_as_its_stream(lab: Lab, collector: Collector, mode: str) -> None:
    """Ten ids with 100 ms before each: the span and the histograms agree."""
    await lab.worker()
    trace_id, _, traceparent = new_trace()
    label = '{model="toy"}'
    before = await lab.metrics()
    lab.play("; ".join(["+100; 'x'"] * 10) + "; END")
    (await lab.ask("go", mode=mode, headers={"traceparent": traceparent})).succeeded()
    spans = await spans_of(collector, trace_id, "chat toy")
    root = one(spans, "chat toy")
    assert root.duration_s >= 1.0
    after = await lab.metrics()

    def added(name: str) -> float:
        return after[f"{name}{label}"] - before.get(f"{name}{label}", 0)

    assert added("headrace_router_request_duration_seconds_count") == 1
    assert added("headrace_router_request_duration_seconds_sum") >= 1.0
    ttft_s = added("headrace_router_time_to_first_token_seconds_sum")
    # Long before the end; the exact moment depends on the machine.
    assert 0.1 <= ttft_s < 0.8
    assert root.attributes["gen_ai.usage.input_tokens"] == 2
    assert root.attributes["gen_ai.usage.output_tokens"] == 10


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "broken",
    [
        "garbage",
        "00-11111111111111111111111111111111-2222222222222222",
        "00-00000000000000000000000000000000-2222222222222222-01",
        "ff-11111111111111111111111111111111-2222222222222222-01",
        "00-1111111111111111111111111111111g-2222222222222222-01",
    ],
)
async def test_a_broken_traceparent_starts_a_new_trace(lab: Lab, collector: Collector, mode: str, broken: str) -> None:
    await lab.worker()
    (await lab.ask("go", mode=mode, headers={"traceparent": broken})).succeeded()
    version, trace_id, _, flags = lab.journal[0].traceparent.split("-")
    assert (version, flags) == ("00", "01")
    assert trace_id != "1" * 32
    spans = await spans_of(collector, trace_id, "chat toy")
    assert one(spans, "chat toy").parent_id == ""


@pytest.mark.parametrize("mode", MODES)
async def test_an_untraced_caller_is_not_traced(lab: Lab, collector: Collector, mode: str) -> None:
    """The sampled flag of the caller holds."""
    await lab.worker()
    trace_id, _, traceparent = new_trace()
    (await lab.ask("go", mode=mode, headers={"traceparent": traceparent[:-2] + "00"})).succeeded()
    assert lab.journal[0].traceparent.split("-")[1] == trace_id
    assert lab.journal[0].traceparent.endswith("-00")
    assert collector.trace(trace_id) == []


@pytest.mark.parametrize("mode", MODES)
async def test_a_stored_answer_has_a_span_but_no_run(lab: Lab, collector: Collector, mode: str) -> None:
    await lab.worker()
    text = f"hit {next(_numbers)}"
    (await lab.ask(text, {"temperature": 0}, mode=mode)).succeeded()
    trace_id, _, traceparent = new_trace()
    await lab.nothing_remains()
    again = await lab.ask(text, {"temperature": 0}, mode=mode, headers={"traceparent": traceparent})
    assert again.succeeded().cached_answer
    spans = await spans_of(collector, trace_id, "chat toy", "lookup", "cache.lookup")
    assert not names(spans) & {"run", "place", "scheduler.place", "worker.run"}
    assert one(spans, "chat toy").attributes["headrace.cached_answer"] is True


@pytest.mark.parametrize("mode", MODES)
async def test_a_refused_request_has_a_span_that_says_so(lab: Lab, collector: Collector, mode: str) -> None:
    await lab.worker()
    trace_id, _, traceparent = new_trace()
    (await lab.ask("go", {"temperature": 9}, mode=mode, headers={"traceparent": traceparent})).refused(400)
    (root,) = await asyncio.to_thread(collector.wait, trace_id, lambda spans: len(spans) >= 1)
    assert root.name.startswith("chat")


async def test_no_client_can_make_series(lab: Lab, slow: bool) -> None:
    """Random models, paths, tenants, users and request ids."""
    await lab.worker(slots=8)
    for mode in MODES:
        await lab.ask("go", mode=mode)
        (await lab.ask("go", {"model": "nope"}, mode=mode)).refused(404)
        await lab.get("/nothing")
    before = set(await lab.metrics())

    async def ask(number: int) -> None:
        name = uuid.uuid4().hex
        headers = {"x-headrace-tenant": name, "x-request-id": name, "x-headrace-session": name}
        mode = MODES[number % 3]
        if number % 5 == 0:
            await lab.get(f"/v1/{name}")
        elif number % 2:
            (await lab.ask("go", {"model": name}, mode=mode, headers=headers)).refused(404)
        else:
            params = {} if mode == "grpc" else {"user": name}
            (await lab.ask("go", params, mode=mode, headers=headers)).succeeded()

    for start in range(0, 10_000 if slow else 200, 20):
        await asyncio.gather(*(ask(number) for number in range(start, start + 20)))
    fresh = set(await lab.metrics()) - before
    assert not fresh, fresh


@pytest.mark.parametrize("service", ["scheduler", "cache"])
async def test_every_service_has_its_metrics_and_health(lab: Lab, service: str) -> None:
    from tests.support.clients import http

    address = lab.mesh.ready[service]["metrics"]
    status, headers, text = await http(address, "GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert f"headrace_{service}_" in text
    assert (await http(address, "GET", "/health"))[0] == 200
