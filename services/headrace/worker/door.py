"""A worker's door in another protocol: what is the same whatever messages its clients speak.

A request becomes what a router would have sent, and goes through the same validation, books and spans
(``service.py``). What differs from a router: one request on each stream; and stop strings are looked for here, because
such protocols expect it of the engine. Parts of a request that have no counterpart here are refused by their name
rather than left out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import grpc

from headrace.models import ModelFolder
from headrace.tokenizer import StreamDecoder, Tokenizer
from headrace.v1 import types_pb2, worker_pb2
from headrace.worker.engine import Delta, Outcome, TokenLogprobs
from headrace.worker.servicer import RouterStream, WorkerService

#: Of the one request on each stream.
NUMBER, EPOCH = 1, 1


class Refused(Exception):
    """The request cannot be done; the text says which field."""

    def __init__(self, text: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(text)
        self.code = code


class Failed(Exception):
    """The request was taken, and failed."""

    def __init__(self, why: types_pb2.Error) -> None:
        super().__init__(why.message)
        self.why = why


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends an answer beside the model's own end, and whether that stays in it."""

    ids: frozenset[int] = frozenset()
    texts: tuple[str, ...] = ()
    include: bool = False


@dataclass(slots=True)
class Piece:
    """What is new of one choice; the last of it has an ``outcome``."""

    choice: int
    ids: list[int]
    logprobs: list[TokenLogprobs]
    outcome: Outcome | None = None
    #: What ended it: a stop string, or an id of ``Stops`` or the model's end.
    met: str = ""
    met_id: int | None = None


class Door:
    """The requests of one protocol."""

    def __init__(self, worker: WorkerService, folder: ModelFolder) -> None:
        self.worker = worker
        self.folder = folder
        self._tokenizer: Tokenizer | None = None
        #: By their client's id.
        self._running: dict[str, RouterStream] = {}

    def runs(self, request_id: str) -> bool:
        """Whether a request of that id is under way."""
        return request_id in self._running

    def answer(self, submit: worker_pb2.Submit, stops: Stops) -> Answer:
        """To be filled by ``run``."""
        return Answer(submit, stops, self._decoder if stops.texts else None)

    async def run(self, request_id: str, submit: worker_pb2.Submit, answer: Answer) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices. Raises Refused, Failed, StreamError; who leaves off cancels it."""
        if not self.worker.serving:
            raise Refused("the worker is not ready", grpc.StatusCode.UNAVAILABLE)
        with self.worker.attached() as stream:
            self._running[request_id] = stream
            try:
                self.worker.submit(stream, submit)
                while answer.open_choices and (items := await stream.outbox.take()) is not None:
                    for item in items:
                        assert isinstance(item, tuple)
                        piece = answer.take(item[1])
                        if piece is None:
                            continue
                        if piece.met:
                            cancel = worker_pb2.Cancel(request=NUMBER, epoch=EPOCH, choice=piece.choice)
                            cancel.reason = types_pb2.OUTCOME_STOP
                            self.worker.cancel(stream, cancel)
                        yield piece
            finally:
                if self._running.get(request_id) is stream:
                    del self._running[request_id]

    def abort(self, request_id: str) -> bool:
        """Ends a request that runs; its stream ends with what it has."""
        stream = self._running.get(request_id)
        if stream is not None:
            reason = types_pb2.OUTCOME_CANCELLED
            self.worker.cancel(stream, worker_pb2.Cancel(request=NUMBER, epoch=EPOCH, reason=reason))
        return stream is not None

    def abort_all(self) -> int:
        """All of them; how many."""
        return sum(self.abort(request_id) for request_id in list(self._running))

    def _decoder(self) -> StreamDecoder:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_folder(self.folder.path)
        return self._tokenizer.stream_decoder()


@dataclass(slots=True)
class _Choice:
    """What has come of one."""

    count: int = 0
    text: str = ""
    decoder: StreamDecoder | None = None
    ended: bool = False


class Answer:
    """Deltas in, pieces out; and what is known of the whole request."""

    def __init__(
        self, submit: worker_pb2.Submit, stops: Stops, decoder: Callable[[], StreamDecoder] | None = None
    ) -> None:
        self._stops = stops
        self._end_ids = stops.ids if submit.stopping.ignore_eos else stops.ids | frozenset(submit.stopping.eos_ids)
        self._longest_stop = max(map(len, stops.texts), default=0)
        self.prompt_tokens = len(submit.prompt_ids)
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        #: Where the KV waits to be fetched.
        self.kv_reference = ""
        self._choices = [_Choice(decoder=decoder() if decoder is not None else None) for _ in submit.sampling.seeds]

    @property
    def open_choices(self) -> int:
        """That have not ended."""
        return sum(not choice.ended for choice in self._choices)

    @property
    def completion_tokens(self) -> int:
        """Of all choices, as far as they were told."""
        return sum(choice.count for choice in self._choices)

    def take(self, delta: Delta) -> Piece | None:
        """What the client is told of it. Raises Failed when the request did."""
        if delta.cached_prompt_tokens is not None:
            self.cached_tokens = delta.cached_prompt_tokens
        if delta.kv_reference:
            self.kv_reference = delta.kv_reference
        self.prompt_logprobs += delta.prompt_logprobs or ()
        choice = self._choices[delta.choice]
        if choice.ended:
            return None
        finish = delta.finish
        if finish is not None and finish.error is not None:
            raise Failed(finish.error)
        piece = Piece(delta.choice, list(delta.ids), [])
        if choice.decoder is not None:
            self._until_stop(choice, choice.decoder, piece)
        if piece.met:
            piece.outcome = types_pb2.OUTCOME_STOP
        elif finish is not None:
            piece.outcome = finish.outcome
            if piece.ids and piece.ids[-1] in self._end_ids:
                piece.met_id = piece.ids[-1]
                if piece.met_id in self._stops.ids and not self._stops.include:
                    piece.ids.pop()
        piece.logprobs = (delta.logprobs or [])[: len(piece.ids)]
        choice.count += len(piece.ids)
        choice.ended = piece.outcome is not None
        return piece

    def _until_stop(self, choice: _Choice, decoder: StreamDecoder, piece: Piece) -> None:
        """Keeps the ids up to the one whose text completes a stop string; without those that are all of it, if so
        wished."""
        begins = []
        for place, token in enumerate(piece.ids):
            begins.append(len(choice.text))
            choice.text += decoder.push(token)
            since = max(0, begins[-1] - self._longest_stop)
            found = [(at, stop) for stop in self._stops.texts if stop and (at := choice.text.find(stop, since)) >= 0]
            if found:
                at, piece.met = min(found)
                kept = zip(piece.ids[: place + 1], begins, strict=True)
                piece.ids = [token for token, begin in kept if self._stops.include or begin < at]
                return
