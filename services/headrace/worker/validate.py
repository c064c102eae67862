"""A router's Submit becomes a Request that cannot be wrong, or an Error that says which field is.

Routers have validated already; a worker trusts none of them, because one bad id can end an engine for all.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from headrace.errors import error
from headrace.v1 import types_pb2, worker_pb2
from headrace.worker.engine import Guided, Handoff, LogprobOptions, Request, Sampling, Stopping

_MAX_TOP_LOGPROBS = 100
_MAX_STOP_IDS = 1024
#: Of a hand-off that the router names.
_MAX_REFERENCE = 256


class _Bad(Exception):
    def __init__(self, param: str, message: str, code: types_pb2.ErrorCode = types_pb2.ERROR_CODE_INVALID_ARGUMENT):
        super().__init__(message)
        self.error = error(code, message, param=param)


#: From a request's arrival to its first id, by class, where nothing else is configured.
CLASS_TTFT_S: Mapping[int, float] = {
    types_pb2.REQUEST_CLASS_INTERACTIVE: 1.0,
    types_pb2.REQUEST_CLASS_STANDARD: 5.0,
    types_pb2.REQUEST_CLASS_BATCH: 60.0,
}


def request_of(
    submit: worker_pb2.Submit,
    key: int,
    description: types_pb2.ModelDescription,
    now: Callable[[], float],
    class_ttft_s: Mapping[int, float] = CLASS_TTFT_S,
) -> Request | types_pb2.Error:
    """The request, with the number ``key``; or why not."""
    try:
        return _request(submit, key, description, now, class_ttft_s)
    except _Bad as bad:
        return bad.error


def begun(request: Request, ids: list[int], description: types_pb2.ModelDescription) -> Request | types_pb2.Error:
    """The same with the first ids of its answer, which another worker has drawn; ``max_tokens`` may be 0 then."""
    try:
        if ids and (largest := max(ids)) >= description.vocab_size:
            raise _Bad("proceed", f"id {largest} is not below the vocabulary's size, {description.vocab_size}")
        if len(ids) > request.stopping.max_tokens:
            raise _Bad("proceed", f"{len(ids)} ids; max_tokens is {request.stopping.max_tokens}")
    except _Bad as bad:
        return bad.error
    stopping = replace(
        request.stopping,
        max_tokens=request.stopping.max_tokens - len(ids),
        min_tokens=max(0, request.stopping.min_tokens - len(ids)),
    )
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *ids],
        stopping=stopping,
        resumed_tokens=request.resumed_tokens + len(ids),
        handoff=None,
    )


def malformed(guided: Guided) -> types_pb2.Error | None:
    """Why its text cannot be what it says it is, as far as that shows without an engine."""
    try:
        if guided.kind in ("json_schema", "choice"):
            json.loads(guided.text)
        elif guided.kind == "regex":
            re.compile(guided.text)
    except (ValueError, re.error, RecursionError) as failure:
        text = f"{guided.kind}: {failure}"
        return error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, text, param="response_format")
    return None


def _request(
    submit: worker_pb2.Submit,
    key: int,
    description: types_pb2.ModelDescription,
    now: Callable[[], float],
    class_ttft_s: Mapping[int, float],
) -> Request:
    if submit.model and submit.model != description.model:
        raise _Bad(
            "model",
            f"this worker serves {description.model!r}, not {submit.model!r}",
            types_pb2.ERROR_CODE_MODEL_NOT_FOUND,
        )
    prompt = _prompt(submit, description)
    request_class = getattr(submit, "class") or types_pb2.REQUEST_CLASS_STANDARD
    if submit.HasField("ttft_target_ms"):
        target_s = submit.ttft_target_ms / 1000
    else:
        # A class from a newer router is nobody's in particular.
        target_s = class_ttft_s.get(request_class, class_ttft_s[types_pb2.REQUEST_CLASS_STANDARD])
    if submit.lora and submit.lora not in description.capabilities.lora:
        raise _unsupported("lora", f"the adapter {submit.lora!r}", "lora")
    return Request(
        key=key,
        prompt_ids=prompt,
        stopping=_stopping(submit.stopping, description),
        sampling=_sampling(submit.sampling, description),
        logprobs=_logprobs(submit.logprobs, description),
        guided=_guided(submit, description),
        lora=submit.lora,
        cache_salt=submit.cache_salt,
        request_class=request_class,
        deadline_s=now() + submit.time_left_ms / 1000 if submit.HasField("time_left_ms") else None,
        due_s=now() + target_s - submit.spent_ms / 1000,
        resumed_tokens=submit.resumed_tokens,
        reuse_prefix=not submit.bypass_prefix_cache,
        handoff=_handoff(submit, description),
    )


def _unsupported(param: str, what: str, capability: str) -> _Bad:
    text = f"this engine does not do {what} (see capabilities.{capability})"
    return _Bad(param, text, types_pb2.ERROR_CODE_UNSUPPORTED)


def _handoff(submit: worker_pb2.Submit, description: types_pb2.ModelDescription) -> Handoff | None:
    if not submit.HasField("handoff"):
        return None
    if not description.capabilities.kv_handoff:
        raise _unsupported("handoff", "KV hand-off", "kv_handoff")
    if len(submit.sampling.seeds) > 1:
        raise _Bad("n", f"a KV hand-off is of one choice, got {len(submit.sampling.seeds)}")
    if submit.bypass_prefix_cache or submit.logprobs.prompt:
        raise _Bad("handoff", "a KV hand-off is not for a request that is to be computed whole in one place")
    if submit.handoff.WhichOneof("role") == "produce":
        if len(submit.handoff.produce.reference) > _MAX_REFERENCE:
            raise _Bad("handoff", f"its reference is longer than {_MAX_REFERENCE}")
        return Handoff()
    if not submit.handoff.HasField("fetch"):
        raise _Bad("handoff", "a KV hand-off needs a role")
    fetch = submit.handoff.fetch
    if fetch.kv_state_tag != description.kv_state_tag:
        text = f"KV of {fetch.kv_state_tag!r} is of no use here, where it is {description.kv_state_tag!r}"
        raise _Bad("handoff", text, types_pb2.ERROR_CODE_UNSUPPORTED)
    # Whether an engine fetches for itself shows later.
    return None


def _prompt(submit: worker_pb2.Submit, description: types_pb2.ModelDescription) -> list[int]:
    prompt = list(submit.prompt_ids)
    if not prompt:
        raise _Bad("prompt", "the prompt has no ids")
    if (largest := max(prompt)) >= description.vocab_size:
        raise _Bad("prompt", f"prompt id {largest} is not below the vocabulary's size, {description.vocab_size}")
    if len(prompt) + 1 > description.context_tokens:
        raise _Bad(
            "prompt",
            f"the prompt has {len(prompt)} tokens and the context holds {description.context_tokens}, answer included",
            types_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
        )
    if submit.resumed_tokens >= len(prompt):
        raise _Bad("resumed_tokens", f"{submit.resumed_tokens} resumed tokens in a prompt of {len(prompt)}")
    return prompt


def _sampling(sampling: types_pb2.Sampling, description: types_pb2.ModelDescription) -> Sampling:
    def bounded(name: str, low: float, high: float) -> float:
        value: float = getattr(sampling, name)
        if not (math.isfinite(value) and low <= value <= high):
            raise _Bad(name, f"{name} must be from {low:g} to {high:g}, got {value:g}")
        return value

    n = len(sampling.seeds)
    if not 1 <= n <= description.slots:
        raise _Bad("n", f"{n} choices; this worker does 1 to {description.slots} (its slots)")
    for token, bias in sampling.logit_bias.items():
        if token >= description.vocab_size:
            raise _Bad("logit_bias", f"id {token} is not below the vocabulary's size, {description.vocab_size}")
        if not (math.isfinite(bias) and -1000 <= bias <= 1000):
            raise _Bad("logit_bias", f"the bias of id {token} must be from -1000 to 1000, got {bias:g}")
    # "Every field is resolved", yet an unset message must not divide by zero.
    top_p = bounded("top_p", 0, 1) or 1.0
    repetition_penalty = bounded("repetition_penalty", 0, 100) or 1.0
    return Sampling(
        # Below this the exponentials overflow; the draw is the likeliest id anyway.
        temperature=value if (value := bounded("temperature", 0, 100)) >= 1e-3 else 0.0,
        top_k=sampling.top_k,
        top_p=top_p,
        min_p=bounded("min_p", 0, 1),
        repetition_penalty=repetition_penalty,
        frequency_penalty=bounded("frequency_penalty", -100, 100),
        presence_penalty=bounded("presence_penalty", -100, 100),
        logit_bias=dict(sampling.logit_bias),
        seeds=tuple(sampling.seeds),
    )


def _stopping(stopping: types_pb2.Stopping, description: types_pb2.ModelDescription) -> Stopping:
    if stopping.max_tokens < 1:
        raise _Bad("max_tokens", "max_tokens must be at least 1, got 0")
    if stopping.min_tokens > stopping.max_tokens:
        raise _Bad("min_tokens", f"min_tokens {stopping.min_tokens} is over max_tokens {stopping.max_tokens}")
    if len(stopping.stop_ids) > _MAX_STOP_IDS:
        raise _Bad("stop_ids", f"{len(stopping.stop_ids)} stop ids, the limit is {_MAX_STOP_IDS}")
    for name in ("stop_ids", "eos_ids"):
        ids = getattr(stopping, name)
        if ids and max(ids) >= description.vocab_size:
            raise _Bad(name, f"id {max(ids)} is not below the vocabulary's size, {description.vocab_size}")
    return Stopping(
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens,
        ignore_eos=stopping.ignore_eos,
        stop_ids=frozenset(stopping.stop_ids),
        eos_ids=frozenset(stopping.eos_ids) or frozenset(description.eos_ids),
    )


def _logprobs(options: types_pb2.LogprobOptions, description: types_pb2.ModelDescription) -> LogprobOptions:
    if options.enabled and not description.capabilities.logprobs:
        raise _unsupported("logprobs", "log-probabilities", "logprobs")
    if options.prompt and not description.capabilities.prompt_logprobs:
        raise _unsupported("prompt_logprobs", "log-probabilities of the prompt", "prompt_logprobs")
    if options.top > _MAX_TOP_LOGPROBS:
        raise _Bad("top_logprobs", f"top_logprobs must be at most {_MAX_TOP_LOGPROBS}, got {options.top}")
    return LogprobOptions(enabled=options.enabled, top=options.top, prompt=options.prompt)


def _guided(submit: worker_pb2.Submit, description: types_pb2.ModelDescription) -> Guided | None:
    if not submit.HasField("guided"):
        return None
    guided = submit.guided
    kind = guided.WhichOneof("kind")
    if kind is None or (kind == "json_object" and not guided.json_object):
        return None
    if kind not in description.capabilities.guided:
        raise _unsupported("response_format", kind, "guided")
    if kind == "json_object":
        return Guided(kind, "")
    if kind == "choice":
        if not guided.choice.texts:
            raise _Bad("response_format", "choice has no texts")
        return Guided(kind, json.dumps(list(guided.choice.texts)))
    return Guided(kind, getattr(guided, kind))
