"""Spans with explicit parents: the trace context of a request is a value that travels with it.

Links between services are multiplexed and one loop serves many requests, so nothing here is ever left on a task or a
thread: a span's parent is given as a W3C ``traceparent`` string, and :attr:`Span.traceparent` is what its children get.
Times may be given (nanoseconds since the epoch), because a span is often known only when it is over.

Without an OTLP endpoint every function here costs one small object and passes the context through untouched.

What the strings mean: ``None`` starts a new trace; ``""`` is "not traced", as in the protos, and makes no span; one
that can't be read starts a new trace, since a caller's mistake must not fail its request.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from headrace import __version__
from headrace.config import TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

Kind = Literal["internal", "server", "client"]
Value = str | bool | int | float

# Version 00 has exactly these fields; later versions may add some at the end.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Span:
    """A span, or the lack of one: this class itself records nothing and hands its parent's context on."""

    __slots__ = ("traceparent",)

    #: Whether anything is recorded; ask before computing costly attributes.
    recording = False

    def __init__(self, traceparent: str) -> None:
        #: For the children.
        self.traceparent = traceparent

    def set(self, key: str, value: Value) -> None:
        """Set an attribute."""

    def event(self, name: str, attributes: Mapping[str, Value] | None = None, at_ns: int | None = None) -> None:
        """Note a moment."""

    def fail(self, message: str) -> None:
        """Mark as failed; the message is for people and holds no client's text."""

    def end(self, end_ns: int | None = None) -> None:
        """End it; further ends are ignored, so that whoever comes first may do it."""


class _RecordedSpan(Span):
    __slots__ = ("_ended", "_span")

    recording = True

    def __init__(self, span: otel.Span) -> None:
        context = span.get_span_context()
        super().__init__(f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}")
        self._span = span
        self._ended = False

    def set(self, key: str, value: Value) -> None:
        self._span.set_attribute(key, value)

    def event(self, name: str, attributes: Mapping[str, Value] | None = None, at_ns: int | None = None) -> None:
        self._span.add_event(name, attributes, timestamp=at_ns)

    def fail(self, message: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, message))

    def end(self, end_ns: int | None = None) -> None:
        if not self._ended:
            self._ended = True
            self._span.end(end_ns)


class Tracing:
    """Where a service's spans go. One a process in production (:func:`setup`); tests may have several."""

    def __init__(self, service_name: str, telemetry: TelemetryConfig, exporter: SpanExporter | None = None) -> None:
        """``exporter`` replaces the OTLP one, and gets each span as it ends."""
        self._provider: TracerProvider | None = None
        self._tracer: otel.Tracer | None = None
        if telemetry.otlp_endpoint or exporter is not None:
            self._provider = _provider(service_name, telemetry, exporter)
            self._tracer = self._provider.get_tracer("headrace", __version__)

    def start(
        self,
        name: str,
        traceparent: str | None,
        *,
        kind: Kind = "internal",
        tracestate: str = "",
        start_ns: int | None = None,
        attributes: Mapping[str, Value] | None = None,
    ) -> Span:
        """A span under that parent; whoever starts it ends it."""
        if self._tracer is None or traceparent == "":
            return Span(traceparent or "")
        from opentelemetry.trace import SpanKind

        kinds = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
        span = self._tracer.start_span(
            name, _context(traceparent, tracestate), kinds[kind], attributes=attributes, start_time=start_ns
        )
        return _RecordedSpan(span)

    def shutdown(self, timeout_s: float = 3.0) -> None:
        """Send what is still to be sent, for so long at most: a collector that is away must not hold the exit."""
        provider, self._provider, self._tracer = self._provider, None, None
        if provider is None:
            return
        thread = threading.Thread(target=provider.shutdown, name="tracing-shutdown", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            log.warning("spans could not be sent within %.1f s and are lost", timeout_s)


def _provider(service_name: str, telemetry: TelemetryConfig, exporter: SpanExporter | None) -> TracerProvider:
    # Here and not above: importing the SDK takes a third of a second, and most runs need none of it.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    name = service_name if service_name.startswith("headrace-") else f"headrace-{service_name}"
    resource = Resource.create(
        {
            "service.name": name,
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
    )
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(telemetry.sample_ratio)),
        resource=resource,
        # Ours is bounded in time.
        shutdown_on_exit=False,
    )
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    else:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        insecure = not telemetry.otlp_endpoint.startswith("https://")
        otlp = OTLPSpanExporter(endpoint=telemetry.otlp_endpoint, insecure=insecure, timeout=5)
        # A second, so that people see a request's trace soon after it; spans beyond the queue are dropped.
        provider.add_span_processor(BatchSpanProcessor(otlp, max_queue_size=16384, schedule_delay_millis=1000))
    return provider


def _context(traceparent: str | None, tracestate: str) -> Context:
    from opentelemetry import trace as otel
    from opentelemetry.context import Context

    # An explicit, empty context: without it the SDK would look at what the running task has.
    context = Context()
    parsed = parse_traceparent(traceparent) if traceparent is not None else None
    if parsed is None:
        return context
    trace_id, span_id, flags = parsed
    state = otel.TraceState.from_header([tracestate]) if tracestate else None
    parent = otel.SpanContext(trace_id, span_id, is_remote=True, trace_flags=otel.TraceFlags(flags), trace_state=state)
    return otel.set_span_in_context(otel.NonRecordingSpan(parent), context)


def parse_traceparent(traceparent: str) -> tuple[int, int, int] | None:
    """Trace id, span id and flags, or None when it isn't a W3C traceparent."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    # Of the flags only "sampled" is defined.
    return int(match[2], 16), int(match[3], 16), int(match[4], 16) & 1


_tracing = Tracing("headrace", TelemetryConfig())


def setup(service_name: str, telemetry: TelemetryConfig, exporter: SpanExporter | None = None) -> Tracing:
    """Say where this process's spans go; once, at start (after any fork). ``service_name`` as in ``headrace-NAME``."""
    global _tracing
    _tracing = Tracing(service_name, telemetry, exporter)
    return _tracing


def start(
    name: str,
    traceparent: str | None,
    *,
    kind: Kind = "internal",
    tracestate: str = "",
    start_ns: int | None = None,
    attributes: Mapping[str, Value] | None = None,
) -> Span:
    """A span of this process under that parent; whoever starts it ends it."""
    return _tracing.start(name, traceparent, kind=kind, tracestate=tracestate, start_ns=start_ns, attributes=attributes)


def record(
    name: str,
    traceparent: str | None,
    *,
    start_ns: int,
    end_ns: int,
    kind: Kind = "internal",
    attributes: Mapping[str, Value] | None = None,
) -> str:
    """A span that is over already. Returns its traceparent."""
    made = start(name, traceparent, kind=kind, start_ns=start_ns, attributes=attributes)
    made.end(end_ns)
    return made.traceparent


@contextmanager
def span(
    name: str,
    traceparent: str | None,
    *,
    kind: Kind = "internal",
    start_ns: int | None = None,
    attributes: Mapping[str, Value] | None = None,
) -> Iterator[Span]:
    """A span around a block of code; an exception (also a cancellation) marks it failed. Sets no current span."""
    made = start(name, traceparent, kind=kind, start_ns=start_ns, attributes=attributes)
    try:
        yield made
    except BaseException as error:
        made.fail(type(error).__name__)
        raise
    finally:
        made.end()


def traceparent_of(span: Span) -> str:
    """What to give to the span's children."""
    return span.traceparent


def shutdown(timeout_s: float = 3.0) -> None:
    """Send what is still to be sent, at the process's end."""
    _tracing.shutdown(timeout_s)
