"""Spans with explicit parents: what comes out, under whom, and what it costs when nobody looks."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry import trace as otel
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace import tracing
from headrace.config import TelemetryConfig

TRACE, PARENT = "1" * 32, "2" * 16
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    before = tracing._tracing
    tracing.setup("scheduler", TelemetryConfig(), exporter)
    yield exporter
    tracing.shutdown()
    tracing._tracing = before


def ids(span: ReadableSpan) -> tuple[str, str, str]:
    """Trace, span, parent."""
    context = span.get_span_context()
    parent = f"{span.parent.span_id:016x}" if span.parent else ""
    return f"{context.trace_id:032x}", f"{context.span_id:016x}", parent


def test_a_child_of_a_traceparent(exporter: InMemorySpanExporter) -> None:
    """C15 a."""
    outer = tracing.start("scheduler.place", TRACEPARENT, kind="server", attributes={"a": 1})
    inner = tracing.start("inner", outer.traceparent)
    inner.end()
    outer.end()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    trace, span_id, parent = ids(spans["scheduler.place"])
    assert (trace, parent) == (TRACE, PARENT)
    assert ids(spans["inner"])[0::2] == (TRACE, span_id)
    assert outer.traceparent == tracing.traceparent_of(outer) == f"00-{TRACE}-{span_id}-01"
    assert spans["scheduler.place"].kind == otel.SpanKind.SERVER
    assert spans["scheduler.place"].resource.attributes["service.name"] == "headrace-scheduler"
    assert dict(spans["scheduler.place"].attributes or {}) == {"a": 1}


def test_times_can_be_given(exporter: InMemorySpanExporter) -> None:
    tracing.record("queue", TRACEPARENT, start_ns=1_000, end_ns=5_000)
    span = tracing.start("run", TRACEPARENT, start_ns=2_000)
    span.event("first token", {"index": 0}, at_ns=3_000)
    span.end(4_000)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert (spans["queue"].start_time, spans["queue"].end_time) == (1_000, 5_000)
    assert (spans["run"].start_time, spans["run"].end_time) == (2_000, 4_000)
    (event,) = spans["run"].events
    assert (event.name, event.timestamp) == ("first token", 3_000)


@pytest.mark.parametrize(
    "broken",
    [
        "nonsense",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE.replace('1', 'A')}-{PARENT}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"{TRACEPARENT}\n",
        "é" * 55,
    ],
)
def test_a_broken_traceparent_starts_a_new_trace(exporter: InMemorySpanExporter, broken: str) -> None:
    """C15 g."""
    tracing.start("x", broken).end()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert ids(span)[0] != TRACE


def test_later_versions_may_have_more_fields() -> None:
    assert tracing.parse_traceparent(f"01-{TRACE}-{PARENT}-03-more") == (int(TRACE, 16), int(PARENT, 16), 1)


def test_none_is_a_new_trace_and_empty_is_no_trace(exporter: InMemorySpanExporter) -> None:
    root = tracing.start("root", None)
    nothing = tracing.start("nothing", "")
    root.end()
    nothing.end()
    assert [span.name for span in exporter.get_finished_spans()] == ["root"]
    assert (nothing.recording, nothing.traceparent) == (False, "")


def test_unsampled_is_passed_on(exporter: InMemorySpanExporter) -> None:
    span = tracing.start("x", f"00-{TRACE}-{PARENT}-00")
    span.end()
    assert span.traceparent.endswith("-00")
    assert exporter.get_finished_spans() == ()


def test_tracestate_is_kept(exporter: InMemorySpanExporter) -> None:
    tracing.start("x", TRACEPARENT, tracestate="vendor=value").end()
    (span,) = exporter.get_finished_spans()
    assert span.get_span_context().trace_state.get("vendor") == "value"


def test_ends_once(exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture) -> None:
    span = tracing.start("x", None)
    with caplog.at_level(logging.WARNING):
        span.end(10)
        span.end(20)
    assert len(exporter.get_finished_spans()) == 1
    assert not caplog.records


def test_a_block_that_fails(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="secret"), tracing.span("x", TRACEPARENT):
        raise ValueError("secret")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code == otel.StatusCode.ERROR
    # The text of an exception may be a client's; its kind isn't.
    assert span.status.description == "ValueError"


async def test_interleaved_requests_keep_their_own_context(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    """C15 b: two streams by turns on one loop, one of them cancelled."""
    turns = (asyncio.Semaphore(1), asyncio.Semaphore(0))

    async def request(which: int, trace: str) -> None:
        with tracing.span(f"stream {which}", f"00-{trace}-{PARENT}-01") as outer:
            for _ in range(10):
                await turns[which].acquire()
                with tracing.span(f"id {which}", outer.traceparent):
                    assert not otel.get_current_span().get_span_context().is_valid
                turns[1 - which].release()
            if which:
                raise asyncio.CancelledError

    traces = ["a" * 32, "b" * 32]
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(*(request(which, trace) for which, trace in enumerate(traces)), return_exceptions=True)
    assert not caplog.records
    spans = exporter.get_finished_spans()
    assert len(spans) == 22
    for span in spans:
        assert ids(span)[0] == traces[int(span.name.split()[1])]
    assert not otel.get_current_span().get_span_context().is_valid


def test_without_an_endpoint_the_context_passes_through() -> None:
    made = tracing.Tracing("scheduler", TelemetryConfig())
    span = made.start("x", TRACEPARENT, kind="server", attributes={"a": 1})
    assert (span.recording, span.traceparent) == (False, TRACEPARENT)
    span.set("a", 1)
    span.event("b")
    span.fail("c")
    span.end()
    assert made.start("x", None).traceparent == ""
    made.shutdown()


def test_shutdown_sends_what_is_left_and_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()

    class Slow(InMemorySpanExporter):
        def shutdown(self) -> None:
            released.wait()

    made = tracing.Tracing("x", TelemetryConfig(), Slow())
    made.start("x", None).end()
    with caplog.at_level(logging.WARNING):
        made.shutdown(timeout_s=0.05)
    released.set()
    assert "could not be sent" in caplog.text
    # Afterwards spans cost nothing and go nowhere.
    assert not made.start("y", TRACEPARENT).recording


def test_a_collector_that_is_away_does_not_hold_the_exit() -> None:
    made = tracing.Tracing("x", TelemetryConfig(otlp_endpoint="http://127.0.0.1:9"))
    made.start("x", None).end()
    made.shutdown(timeout_s=0.1)


def test_spans_reach_a_collector_over_grpc() -> None:
    received: list[Any] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        made = tracing.Tracing("cache", TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{port}"))
        made.start("cache.lookup", TRACEPARENT).end()
        made.shutdown(timeout_s=20.0)
    finally:
        server.stop(None)
    names: Sequence[str] = [
        span.name for each in received for part in each.resource_spans for of in part.scope_spans for span in of.spans
    ]
    assert names == ["cache.lookup"]
