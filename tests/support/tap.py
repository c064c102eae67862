"""A tap on the line between a router and its scheduler: passes every message on and keeps the books of all leases."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from headrace.serving import CHANNEL_OPTIONS, SERVER_OPTIONS
from headrace.tls import Tls
from headrace.v1 import scheduler_pb2, scheduler_pb2_grpc


@dataclass
class Books:
    """What was asked, granted and released since a test began."""

    asks: dict[int, scheduler_pb2.PlaceRequest.Ask] = field(default_factory=dict)
    withdrawals: list[int] = field(default_factory=list)
    #: By lease: the grant, and the ask it answers.
    grants: dict[int, tuple[scheduler_pb2.Grant, scheduler_pb2.PlaceRequest.Ask | None]] = field(default_factory=dict)
    queued: dict[int, scheduler_pb2.Queued] = field(default_factory=dict)
    releases: dict[int, list[scheduler_pb2.Release]] = field(default_factory=dict)
    #: What requests came to, in the order of their ends.
    settlements: list[scheduler_pb2.Settlement] = field(default_factory=list)

    def note(self, request: scheduler_pb2.PlaceRequest) -> None:
        """Takes in what a router said."""
        self.asks |= {ask.ask: ask for ask in request.asks}
        for placed in request.placed:
            # It needed no asking: the router's own word is the grant.
            self.asks[placed.ask.ask] = placed.ask
            self.grants[placed.lease] = (scheduler_pb2.Grant(lease=placed.lease), placed.ask)
        self.withdrawals += request.withdrawals
        for release in request.releases:
            self.releases.setdefault(release.lease, []).append(release)
        self.settlements += request.settlements

    @property
    def balanced(self) -> bool:
        """Each grant was released, exactly once."""
        return all(len(self.releases.get(lease, ())) == 1 for lease in self.grants)

    @property
    def released(self) -> list[scheduler_pb2.Release]:
        return [release for releases in self.releases.values() for release in releases]


class SchedulerTap:
    """Serves `Place` to routers in threads of its own, by asking the real scheduler."""

    def __init__(self, scheduler: str, tls: Tls | None = None) -> None:
        self.books = Books()
        self._lock = threading.Lock()
        if tls is None:
            self._channel = grpc.insecure_channel(scheduler, options=CHANNEL_OPTIONS)
        else:
            options = (*CHANNEL_OPTIONS, *tls.channel_options())
            self._channel = grpc.secure_channel(scheduler, tls.channel_credentials(), options=options)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._server = grpc.server(ThreadPoolExecutor(8, "tap"), options=SERVER_OPTIONS)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(_Tapped(self), self._server)
        if tls is None:
            self.port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            self.port = self._server.add_secure_port("127.0.0.1:0", tls.server_credentials())
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def turn_page(self) -> Books:
        """Begins new books."""
        with self._lock:
            self.books = Books()
            return self.books

    def stop(self) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def place(
        self, requests: Iterator[scheduler_pb2.PlaceRequest], context: grpc.ServicerContext
    ) -> Iterator[scheduler_pb2.PlaceResponse]:
        call: Any = self._stub.Place(self._asked(requests))
        if not context.add_callback(call.cancel):
            call.cancel()
        try:
            for response in call:
                self._answered(response)
                yield response
        except grpc.RpcError as error:
            if context.is_active():
                context.abort(error.code(), error.details())

    def usage(self, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return self._stub.GetUsage(request)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    def _asked(self, requests: Iterator[scheduler_pb2.PlaceRequest]) -> Iterator[scheduler_pb2.PlaceRequest]:
        # The router's stream may break at any moment; then there are simply no more requests.
        with contextlib.suppress(grpc.RpcError):
            for request in requests:
                with self._lock:
                    self.books.note(request)
                yield request

    def _answered(self, response: scheduler_pb2.PlaceResponse) -> None:
        with self._lock:
            for placement in response.placements:
                if placement.HasField("grant"):
                    grant, ask = placement.grant, self.books.asks.get(placement.ask)
                    self.books.grants[grant.lease] = (grant, ask)
                    if grant.HasField("prefill"):
                        self.books.grants[grant.prefill.lease] = (grant, ask)
                elif placement.HasField("queued"):
                    self.books.queued[placement.ask] = placement.queued


class _Tapped(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self, tap: SchedulerTap) -> None:
        self._tap = tap

    def Place(self, request_iterator: Any, context: grpc.ServicerContext) -> Any:
        return self._tap.place(request_iterator, context)

    def GetUsage(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._tap.usage(request, context)
