"""``LLM``: takes requests and gives futures."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable
from typing import Any

from tensorrt_llm._engine import Engine, Work
from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import GenerationResult, IterationResult
from tensorrt_llm.executor.utils import RequestError
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.scheduling_params import SchedulingParams
from tensorrt_llm.version import RELEASE

from .llm_args import TENSORRT_ONLY, KvCacheRetentionConfig, TorchLlmArgs

RequestOutput = GenerationResult


class BaseLLM:
    """What both releases have."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        if wrong := TENSORRT_ONLY & kwargs.keys():
            raise ValueError(f"{', '.join(sorted(wrong))}: use tensorrt_llm._tensorrt_engine.LLM")
        self.args = TorchLlmArgs(
            model=model,
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,  # type: ignore[arg-type]
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            **kwargs,
        )
        experts = (self.args.moe_tensor_parallel_size or 1) * (self.args.moe_expert_parallel_size or 1)
        if experts not in (1, tensor_parallel_size):
            raise ValueError(
                f"tp_size must equal to moe_tp_size * moe_ep_size, but got {tensor_parallel_size} != {experts}"
            )
        self._ids = itertools.count(1)
        self._engine = Engine(self.args)
        self._submitted = False
        atexit.register(self.shutdown)

    @property
    def tokenizer(self) -> Any:
        return None

    @property
    def llm_id(self) -> str:
        return f"standin-{id(self):x}"

    def __enter__(self) -> BaseLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise RuntimeError("LLM object can not be pickled.")

    def _submit(
        self,
        inputs: Any,
        sampling_params: SamplingParams | None,
        lora_request: LoRARequest | None,
        streaming: bool,
        disaggregated_params: DisaggregatedParams | None,
        cache_salt: str | None,
    ) -> GenerationResult:
        params = sampling_params if sampling_params is not None else SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams or None, but got {type(params)}")
        if isinstance(inputs, dict) and "prompt_token_ids" in inputs:
            prompt = list(inputs["prompt_token_ids"])
        elif isinstance(inputs, list) and all(isinstance(token, int) for token in inputs):
            prompt = list(inputs)
        else:
            raise TypeError(f"The inputs must be token ids here, but got {type(inputs)}")
        self._engine.check_alive()
        self._engine.play("generate", prompt)
        # The caller's object is changed, as the real one does.
        if params.end_id is None:
            if self.args.skip_tokenizer_init:
                raise ValueError("end_id must be set when there is no tokenizer")
            params.end_id = 0
        if params.pad_id is None:
            params.pad_id = params.end_id
        params._stream_interval = self.args.stream_interval
        params.return_perf_metrics = params.return_perf_metrics or self.args.return_perf_metrics
        kind = disaggregated_params.request_type if disaggregated_params is not None else None
        if kind == "context_only":
            params.max_tokens = 1
        most = self.args.max_num_tokens or 8192
        if not self.args.enable_chunked_prefill and kind != "generation_only" and len(prompt) > most:
            raise RequestError(f"The sum of prompt length ({len(prompt)}) should not exceed max_num_tokens ({most})")
        if params.guided_decoding is not None and self.args.guided_decoding_backend is None:
            raise ValueError("guided_decoding needs a guided_decoding_backend")
        if lora_request is not None and not self.args.enable_lora:
            raise ValueError("lora_request needs enable_lora")
        result = GenerationResult(
            next(self._ids),
            prompt,
            params,
            self._engine.abort,
            streaming=streaming,
            check=self._engine.check_background_error,
        )
        self._submitted = True
        self._engine.submit(
            Work(
                result,
                prompt,
                params,
                lora_request.lora_int_id if lora_request else 0,
                cache_salt or "",
                disaggregated_params,
            )
        )
        return result

    def generate(
        self,
        inputs: Any,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: Any = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        scheduling_params: SchedulingParams | None = None,
        cache_salt: str | None = None,
    ) -> GenerationResult | list[GenerationResult]:
        one = isinstance(inputs, dict) or (isinstance(inputs, list) and all(isinstance(t, int) for t in inputs))
        prompts = [inputs] if one else inputs
        given = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        results = [
            self._submit(prompt, params, lora_request, False, disaggregated_params, cache_salt)
            for prompt, params in zip(prompts, given, strict=True)
        ]
        done = [result.result() for result in results]
        return done[0] if one else done

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._poll(self._engine.stats, timeout)

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        return self._later(self._engine.stats, timeout)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._poll(self._engine.events, timeout)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        return self._later(self._engine.events, timeout)

    def _poll(self, fetch: Callable[[float], list[dict[str, Any]]], timeout: float | None) -> list[dict[str, Any]]:
        # Older builds: nothing is there to be asked before the first request.
        assert self._submitted or RELEASE >= (1, 3), "no request has been submitted"
        return fetch(timeout or 0)

    def _later(self, fetch: Callable[[float], list[dict[str, Any]]], timeout: float | None) -> IterationResult:
        later = IterationResult(lambda wait: self._poll(fetch, wait))
        later.set_timeout(timeout or 0)
        return later

    def shutdown(self) -> None:
        self._engine.shutdown()


if RELEASE >= (1, 3):

    class LLM(BaseLLM):
        """As of the pre-releases after 1.2."""

        def generate_async(
            self,
            inputs: Any,
            sampling_params: SamplingParams | None = None,
            lora_request: LoRARequest | None = None,
            prompt_adapter_request: Any = None,
            streaming: bool = False,
            kv_cache_retention_config: KvCacheRetentionConfig | None = None,
            disaggregated_params: DisaggregatedParams | None = None,
            trace_headers: Any = None,
            _postproc_params: Any = None,
            scheduling_params: SchedulingParams | None = None,
            cache_salt: str | None = None,
            priority: float = 0.5,
        ) -> GenerationResult:
            if not 0 <= priority <= 1:
                raise ValueError(f"priority must be from 0 to 1, got {priority}")
            return self._submit(inputs, sampling_params, lora_request, streaming, disaggregated_params, cache_salt)

        def get_kv_cache_capacity(self) -> dict[str, int]:
            return self._engine.capacity()

else:

    class LLM(BaseLLM):  # type: ignore[no-redef]
        """As of 1.2."""

        def generate_async(
            self,
            inputs: Any,
            sampling_params: SamplingParams | None = None,
            lora_request: LoRARequest | None = None,
            prompt_adapter_request: Any = None,
            streaming: bool = False,
            kv_cache_retention_config: KvCacheRetentionConfig | None = None,
            disaggregated_params: DisaggregatedParams | None = None,
            _postproc_params: Any = None,
            scheduling_params: SchedulingParams | None = None,
            cache_salt: str | None = None,
        ) -> GenerationResult:
            return self._submit(inputs, sampling_params, lora_request, streaming, disaggregated_params, cache_salt)
