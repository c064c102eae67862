"""What a caller gets at once, and what happens to it while the engine runs."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.sampling_params import SamplingParams


@dataclass(slots=True)
class Logprob:
    """A logarithm and its id's place among all."""

    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sequence; its lists are cumulative and grow in place."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: Any = None
    additional_context_outputs: dict[str, Any] | None = None
    additional_generation_outputs: dict[str, Any] | None = None
    disaggregated_params: DisaggregatedParams | None = None
    request_perf_metrics: Any = None

    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self._last_logprobs_len :]


@dataclass(slots=True)
class Response:
    """What one iteration brought for one sequence."""

    sequence: int
    ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    #: The reason of the sequence's end.
    reason: str | None
    #: The whole request's.
    final: bool
    stop_ids: int = 0
    stop_reason: int | str | None = None
    disaggregated: DisaggregatedParams | None = None
    error: BaseException | None = None


class GenerationResult:
    """A future, and an iterator that yields itself after each response."""

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        abort: Callable[[int], None],
        *,
        streaming: bool,
        check: Callable[[], None],
    ) -> None:
        self.id = request_id
        self.prompt: str | None = None
        self.prompt_token_ids = prompt_token_ids
        self.sampling_params = params
        self.cached_tokens = 0
        self.decoding_iter = 0
        self.context_logits = None
        self.mm_embedding_handle = None
        self.disaggregated_params: DisaggregatedParams | None = None
        self.metrics_dict: dict[str, Any] = {}
        self._streaming = streaming
        self._abort = abort
        self._check = check
        self._done = False
        self._aborted = False
        self._outputs = [CompletionOutput(index) for index in range(params.best_of or 1)]
        # The kind of queue is chosen here, once.
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
            self._aqueue: asyncio.Queue[Response] = asyncio.Queue()
        except RuntimeError:
            self._loop = None
            self._queue: queue.Queue[Response] = queue.Queue()

    @property
    def request_id(self) -> int:
        return self.id

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self._outputs[: self.sampling_params.n]

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._aborted = True
        self._abort(self.id)

    def aborted(self) -> bool:
        return self._aborted

    def clear_logprob_params(self) -> None:
        self.sampling_params.logprobs = None

    def record_stats(self, output: CompletionOutput, stats: dict[str, float] | None = None) -> None:
        self.metrics_dict.update(stats or {})

    def _put(self, response: Response) -> None:
        """On the caller's loop, or from any thread when there is none."""
        if self._loop is not None:
            self._aqueue.put_nowait(response)
        else:
            self._queue.put(response)

    def _handle(self, response: Response) -> None:
        self._done = response.final
        if response.error is not None:
            self._done = True
            raise response.error
        output = self._outputs[response.sequence]
        output._last_token_ids_len = len(output.token_ids)
        output.token_ids.extend(response.ids)
        if response.logprobs is not None:
            output._last_logprobs_len = len(output.logprobs)
            output.logprobs.extend(response.logprobs)
        if response.reason is not None:
            output.finish_reason, output.stop_reason = response.reason, response.stop_reason
            if response.stop_ids and not self.sampling_params.include_stop_str_in_output:
                output.token_ids = output.token_ids[: -response.stop_ids]
        if response.disaggregated is not None:
            self.disaggregated_params = output.disaggregated_params = response.disaggregated
        self._check()

    async def _aresult_step(self) -> None:
        if self._loop is None:
            raise RuntimeError("the request was not made in an event loop")
        self._handle(await self._aqueue.get())

    def _result_step(self) -> None:
        self._handle(self._queue.get())

    async def aresult(self) -> GenerationResult:
        while not self._done:
            await self._aresult_step()
        return self

    def result(self, timeout: float | None = None) -> GenerationResult:
        while not self._done:
            self._result_step()
        return self

    def __await__(self) -> Any:
        return self.aresult().__await__()

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._done:
            raise StopAsyncIteration
        await self._aresult_step()
        return self

    def __iter__(self) -> GenerationResult:
        return self

    def __next__(self) -> GenerationResult:
        if self._done:
            raise StopIteration
        self._result_step()
        return self


class IterationResult:
    """Rows of statistics or events; ends on a timeout."""

    def __init__(self, fetch: Callable[[float], list[dict[str, Any]]]) -> None:
        self._fetch = fetch
        self._timeout: float | None = None
        self._done = False
        self._rows: list[dict[str, Any]] = []

    def set_timeout(self, timeout: float) -> None:
        self._timeout = timeout

    def mark_undone(self) -> None:
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        return self._fetch(self._timeout or 0)

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        if not self._rows:
            # As the real one: this blocks the loop's thread.
            self._rows = self._fetch(self._timeout or 0)
        if not self._rows:
            self._done = True
            raise StopAsyncIteration
        return self._rows.pop(0)
