"""How ids are drawn, as the caller says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class LogitsProcessor:
    """Changes logits in place before an id is drawn; called once an iteration and request."""

    def __call__(
        self, req_id: int, logits: Any, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None:
        raise NotImplementedError


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    """At most one of these."""

    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None

    def _validate(self) -> None:
        given = [bool(self.json), bool(self.regex), bool(self.grammar), self.json_object, bool(self.structural_tag)]
        if sum(given) > 1:
            raise ValueError("Only one guide can be used for a request")


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The committed fields, then the evolving ones."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int | None = 32
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logits_processor: LogitsProcessor | list[LogitsProcessor] | None = None
    apply_batched_logits_processor: bool = False
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    beam_search_diversity_rate: float | None = None
    early_stopping: int | None = None
    length_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    return_encoder_output: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    guided_decoding: GuidedDecodingParams | None = None
    lookahead_config: Any = None
    additional_model_outputs: list[Any] | None = None
    return_perf_metrics: bool = False
    beam_width_array: list[int] | None = None
    prompt_ignore_length: int | None = None
    _stream_interval: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        if self.best_of is None:
            self.best_of = self.n
        if self.best_of < self.n:
            raise ValueError(f"In SamplingParams, best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()

    @property
    def _greedy(self) -> bool:
        unset = self.temperature is None and self.top_k is None and self.top_p is None
        return unset or self.top_k == 1 or self.top_p == 0 or self.temperature == 0
