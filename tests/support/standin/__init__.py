"""Engines around the stand-in for TensorRT-LLM, which lies beside this file.

It is put on the import path of the engine's child only: ``tensorrt_llm``, ``torch`` and ``blake3`` must not be found by
anybody else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from headrace import models
from headrace.config import ModelConfig, TensorRtLlmConfig, WorkerConfig
from headrace.models import ModelFolder
from headrace.worker.engines.tensorrt_llm import TensorRtLlm
from headrace.worker.selfbatched import SelfBatched

PATH = Path(__file__).parent
MODEL = ModelConfig(name="toy", source="/nowhere")
VOCAB_SIZE, EOS_IDS = 1000, (2, 3)
#: A checkpoint's folder, on a machine with a GPU; or this, where the stand-in plays the real one.
ITSELF = "/stand-in"
REAL_MODEL = os.environ.get("HEADRACE_TENSORRT_LLM_MODEL", "")


def folder(context_tokens: int = 1024, eos_ids: tuple[int, ...] = EOS_IDS) -> ModelFolder:
    """What the stand-in's model is said to be."""
    return ModelFolder(
        path=PATH,
        weights=None,
        tokenizer_json=PATH,
        chat_template=None,
        context_tokens=context_tokens,
        vocab_size=VOCAB_SIZE,
        eos_ids=eos_ids,
        bos_token="",
        eos_token="",
        tokenizer_sha256=hashlib.sha256(b"").hexdigest(),
        template_sha256="",
        quantization="FP8",
        weights_sha256="",
        sampling={},
    )


def environment(**play: Any) -> dict[str, str]:
    """For a process that is to find the stand-in: ``play`` is described in ``tensorrt_llm/_engine.py``."""
    return {"PYTHONPATH": str(PATH), "TRTLLM_STANDIN": json.dumps(play)}


def driver(
    worker: WorkerConfig,
    *,
    context_tokens: int = 1024,
    eos_ids: tuple[int, ...] = EOS_IDS,
    settings: dict[str, Any] | None = None,
    **play: Any,
) -> TensorRtLlm:
    """A driver whose child finds the stand-in."""
    made = TensorRtLlmConfig(**({"sampler_type": "TRTLLMSampler", "canary_s": 0.0} | (settings or {})))
    return TensorRtLlm(folder(context_tokens, eos_ids), worker, MODEL, made, environment(**play))


def engine(
    worker: WorkerConfig,
    *,
    slots: int | None = None,
    kv_tokens: int = 4096,
    context_tokens: int = 1024,
    settings: dict[str, Any] | None = None,
    canary_s: float = 0.0,
    **play: Any,
) -> SelfBatched:
    """An engine on the stand-in."""
    settings = {"kv_cache_max_tokens": kv_tokens} | (settings or {})
    made = driver(worker, context_tokens=context_tokens, settings=settings, **play)
    return SelfBatched(
        made,
        slots=slots or worker.slots,
        max_waiting=worker.max_waiting,
        stall_timeout_s=worker.stall_timeout_s,
        canary_s=canary_s,
    )


def real_folder() -> ModelFolder:
    """The checkpoint's text side."""
    if REAL_MODEL == ITSELF:
        return folder()
    return models.prepare(REAL_MODEL, weights=False)


def real_engine(worker: WorkerConfig, *, kv_tokens: int, context_tokens: int) -> SelfBatched:
    """The same around the real TensorRT-LLM."""
    model = ModelConfig(name=MODEL.name, source=REAL_MODEL)
    settings = TensorRtLlmConfig(sampler_type="TRTLLMSampler", canary_s=0.0, kv_cache_max_tokens=kv_tokens)
    real = dataclasses.replace(real_folder(), context_tokens=context_tokens)
    return SelfBatched(
        TensorRtLlm(real, worker, model, settings),
        slots=worker.slots,
        max_waiting=worker.max_waiting,
        stall_timeout_s=worker.stall_timeout_s,
    )
