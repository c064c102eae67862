"""A small OTLP collector: takes spans over gRPC as any collector does, and lets a test read them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Span:
    """An exported span, in plain values."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    events: dict[str, float]
    failed: bool

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a port of 127.0.0.1, in threads of its own."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._arrived = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4, "otlp"))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.stop(0).wait()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._arrived:
            for resource in request.resource_spans:
                service = _attributes(resource.resource.attributes).get("service.name", "")
                for scope in resource.scope_spans:
                    self._spans += [_span(service, span) for span in scope.spans]
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Span]:
        """The spans of that trace that have arrived."""
        with self._arrived:
            return [span for span in self._spans if span.trace_id == trace_id]

    def spans(self) -> list[Span]:
        with self._arrived:
            return list(self._spans)

    def wait(self, trace_id: str, enough: Callable[[list[Span]], bool], timeout_s: float = 15.0) -> list[Span]:
        """The trace's spans, as soon as they are enough. Raises AssertionError when they never are."""
        until_s = time.monotonic() + timeout_s
        with self._arrived:
            while True:
                spans = [span for span in self._spans if span.trace_id == trace_id]
                if enough(spans):
                    return spans
                left_s = until_s - time.monotonic()
                assert left_s > 0, f"spans of {trace_id}: {[(span.service, span.name) for span in spans]}"
                self._arrived.wait(left_s)


def _span(service: str, span: trace_pb2.Span) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        attributes=_attributes(span.attributes),
        events={event.name: event.time_unix_nano / 1e9 for event in span.events},
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
