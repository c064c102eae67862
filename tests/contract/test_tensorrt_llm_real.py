"""What of TensorRT-LLM was inferred and not seen: each point as an assertion, to be settled on a machine with a GPU.

    HEADRACE_TENSORRT_LLM_MODEL=/models/some-small-checkpoint .venv/bin/python -m pytest -m gpu tests/contract

A point that fails says where the engine or the stand-in has to change.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support import standin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not standin.REAL_MODEL, reason="needs a GPU and HEADRACE_TENSORRT_LLM_MODEL"),
]

PROMPT = [100, 200, 300, 400] * 12


@pytest.fixture(scope="module")
def trt() -> Any:
    import tensorrt_llm

    return tensorrt_llm


@pytest.fixture(scope="module")
def llm(trt: Any) -> Iterator[Any]:
    kv = {"tokens_per_block": 16, "event_buffer_max_size": 4096, "max_tokens": 8192}
    made = trt.LLM(
        standin.REAL_MODEL,
        skip_tokenizer_init=True,
        max_seq_len=1024,
        max_batch_size=8,
        enable_iter_perf_stats=True,
        enable_chunked_prefill=True,
        kv_cache_config=trt.llmapi.KvCacheConfig(**kv),
    )
    yield made
    made.shutdown()


def sampling(trt: Any, **options: Any) -> Any:
    return trt.SamplingParams(**({"end_id": 2, "detokenize": False, "max_tokens": 8, "top_k": 1} | options))


async def ask(trt: Any, llm: Any, prompt: list[int] = PROMPT, *, salt: str = "", **options: Any) -> Any:
    more = {"cache_salt": salt} if salt else {}
    return await llm.generate_async(prompt, sampling(trt, **options), streaming=True, **more)


async def test_dictionaries_will_do_for_nested_arguments(trt: Any) -> None:
    assert trt.llmapi.TorchLlmArgs(model="x", kv_cache_config={"tokens_per_block": 64}).kv_cache_config.tokens_per_block


async def test_zero_temperature_and_top_k_one_are_the_same_greedy(trt: Any, llm: Any) -> None:
    greedy = (await ask(trt, llm, ignore_eos=True)).outputs[0].token_ids
    zero = await ask(trt, llm, ignore_eos=True, top_k=None, temperature=0.0)
    assert zero.outputs[0].token_ids == greedy


async def test_the_end_id_is_among_the_ids(trt: Any, llm: Any) -> None:
    free = (await ask(trt, llm, ignore_eos=True)).outputs[0].token_ids
    output = (await ask(trt, llm, end_id=free[3])).outputs[0]
    assert output.finish_reason == "stop"
    assert output.stop_reason is None
    assert output.token_ids == free[: free.index(free[3]) + 1]


async def test_a_stop_id_is_kept_when_asked_for(trt: Any, llm: Any) -> None:
    free = (await ask(trt, llm, ignore_eos=True)).outputs[0].token_ids
    output = (await ask(trt, llm, stop_token_ids=[free[3]], include_stop_str_in_output=True)).outputs[0]
    assert output.token_ids == free[: free.index(free[3]) + 1]
    assert output.finish_reason == "stop"


async def test_one_logprob_is_the_drawn_ids_own_and_of_the_raw_logits(trt: Any, llm: Any) -> None:
    output = (await ask(trt, llm, ignore_eos=True, logprobs=1)).outputs[0]
    assert len(output.logprobs) == len(output.token_ids)
    assert all(token in row for token, row in zip(output.token_ids, output.logprobs, strict=True))
    hot = (
        await ask(trt, llm, ignore_eos=True, logprobs=1, top_k=None, temperature=1e-3, seed=1, max_tokens=1)
    ).outputs[0]
    first = output.logprobs[0][output.token_ids[0]].logprob
    assert math.isclose(hot.logprobs[0][output.token_ids[0]].logprob, first, abs_tol=0.05)


async def test_a_seed_decides(trt: Any, llm: Any) -> None:
    options = {"ignore_eos": True, "top_k": 0, "temperature": 1.5, "max_tokens": 12}
    first, again, other = [(await ask(trt, llm, seed=seed, **options)).outputs[0].token_ids for seed in (1, 1, 2)]
    assert first == again != other


async def test_the_held_back_ids_are_held_back(trt: Any, llm: Any) -> None:
    from headrace.worker.engines.hold_back import HoldBack

    free = (await ask(trt, llm, ignore_eos=True)).outputs[0].token_ids
    processor = HoldBack(free[:1], len(PROMPT) + 3)
    output = (await ask(trt, llm, ignore_eos=True, logits_processor=processor)).outputs[0]
    assert free[0] not in output.token_ids[:3]


async def test_a_bias_moves_the_choice(trt: Any, llm: Any) -> None:
    import torch

    free = (await ask(trt, llm, ignore_eos=True)).outputs[0].token_ids
    bias = torch.zeros(standin.real_folder().vocab_size)
    bias[free[0]] = -1000.0
    assert (await ask(trt, llm, ignore_eos=True, embedding_bias=bias)).outputs[0].token_ids[0] != free[0]


async def test_an_abort_frees_the_blocks_and_says_cancelled(trt: Any, llm: Any) -> None:
    result = llm.generate_async(PROMPT, sampling(trt, max_tokens=900, ignore_eos=True), streaming=True)
    async for step in result:
        if step.outputs[0].length == 2:
            result.abort()
    assert result.outputs[0].finish_reason == "cancelled"


async def test_events_have_the_hash_and_the_salt_we_know(trt: Any, llm: Any) -> None:
    from blake3 import blake3

    from headrace.worker.engines.tensorrt_llm_events import v1_block_key

    llm.get_kv_cache_events(1)
    await ask(trt, llm, [7] * 40, salt="aa", ignore_eos=True, max_tokens=2)
    stored = [event for event in llm.get_kv_cache_events(2) if event["data"]["type"] == "stored"]
    block = stored[0]["data"]["blocks"][0]
    assert stored[0]["data"]["parent_hash"] is None
    salt_id = int.from_bytes(blake3(b"aa").digest()[:8], "little")
    assert block.get("cache_salt", "aa") == "aa"
    assert block["block_hash"] == v1_block_key([7] * 16, salt_id=salt_id)


async def test_a_prompt_is_found_as_soon_as_another_has_computed_it(trt: Any, llm: Any) -> None:
    first = llm.generate_async([9] * 100, sampling(trt, max_tokens=200, ignore_eos=True), streaming=True)
    async for step in first:
        if step.outputs[0].length == 1:
            second = await ask(trt, llm, [9] * 100, ignore_eos=True, max_tokens=1)
            assert second.cached_tokens >= 80


async def test_used_blocks_are_those_of_running_requests(trt: Any, llm: Any) -> None:
    await ask(trt, llm, ignore_eos=True)
    row = llm.get_stats(2)[-1]
    stats = row["kvCacheStats"]
    assert stats["usedNumBlocks"] + stats["freeNumBlocks"] == stats["maxNumBlocks"]
    assert stats["tokensPerBlock"] == 16
    assert {"numCtxTokens", "numGenRequests"} <= row["inflightBatchingStats"].keys()


async def test_ranks_are_started_through_mpi(trt: Any, llm: Any) -> None:
    from headrace.worker.engines.tensorrt_llm_child import _ranks

    assert _ranks(os.getpid())


def test_every_argument_that_is_sent_is_known(trt: Any) -> None:
    from headrace.config import WorkerConfig

    arguments = standin.driver(WorkerConfig(block_tokens=16))._arguments()
    assert set(arguments) <= set(trt.llmapi.TorchLlmArgs.model_fields)
    assert "cache_salt" in inspect.signature(trt.LLM.generate_async).parameters
