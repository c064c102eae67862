"""What of TensorRT-LLM was inferred and not seen: each point as an assertion, to be settled on a machine with a GPU.

    HEADRACE_TENSORRT_LLM_MODEL=/models/some-small-checkpoint .venv/bin/python -m pytest -m gpu tests/contract

A point that fails says where the engine or the stand-in has to change; docs/engines.md has the list. Those that need no
GPU's arithmetic hold on the stand-in, too: ``tests/unit/test_tensorrt_llm_standin.py`` runs this file on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import standin

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not standin.REAL_MODEL, reason="needs a GPU and HEADRACE_TENSORRT_LLM_MODEL"),
]

PROMPT = [100, 200, 300, 400] * 12
IMPORTED = """LLM SamplingParams GuidedDecodingParams DisaggregatedParams KvCacheConfig KvCacheRetentionConfig
CudaGraphConfig SchedulerConfig CacheTransceiverConfig TorchLlmArgs RequestError LoRARequest LoraConfig
NGramDecodingConfig MoeConfig AttentionDpConfig"""
METHODS = """FP8 FP8_BLOCK_SCALES FP8_PER_CHANNEL_PER_TOKEN NVFP4 W4A16_AWQ W4A8_AWQ W4A16_GPTQ W4A8_MXFP4_FP8
W4A16_MXFP4 W8A16 W4A16 MIXED_PRECISION NO_QUANT"""


@pytest.fixture(scope="module")
def trt() -> Any:
    import tensorrt_llm

    return tensorrt_llm


def engine(trt: Any, kv: dict[str, Any] | None = None, **arguments: Any) -> Any:
    kv = {"tokens_per_block": 16, "event_buffer_max_size": 4096, "max_tokens": 8192} | (kv or {})
    given = {
        "skip_tokenizer_init": True,
        "max_seq_len": 1024,
        "max_batch_size": 8,
        "enable_iter_perf_stats": True,
        "enable_chunked_prefill": True,
        "kv_cache_config": trt.llmapi.KvCacheConfig(**kv),
    }
    return trt.LLM(standin.REAL_MODEL, **(given | arguments))


@pytest.fixture(scope="module")
def llm(trt: Any) -> Iterator[Any]:
    made = engine(trt)
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
    await ask(trt, llm, [11] * 400, ignore_eos=True)
    rows = llm.get_stats(2)
    stats = max((row["kvCacheStats"] for row in rows), key=lambda stats: stats["usedNumBlocks"])
    assert stats["usedNumBlocks"] + stats["freeNumBlocks"] == stats["maxNumBlocks"]
    assert stats["usedNumBlocks"] >= 25
    assert stats["tokensPerBlock"] == 16
    assert {"numCtxTokens", "numGenRequests"} <= rows[-1]["inflightBatchingStats"].keys()
    # What it left can be found again, and counts as free.
    await ask(trt, llm, [12] * 20, ignore_eos=True)
    assert max(row["kvCacheStats"]["usedNumBlocks"] for row in llm.get_stats(2)[1:]) < 25


async def test_ranks_are_started_through_mpi(trt: Any, llm: Any) -> None:
    from headrace.worker.engines.tensorrt_llm_child import _ranks

    assert _ranks(os.getpid())


def test_every_argument_that_is_sent_is_known(trt: Any) -> None:
    from headrace.config import WorkerConfig

    arguments = standin.driver(WorkerConfig(block_tokens=16))._arguments()
    assert set(arguments) <= set(trt.llmapi.TorchLlmArgs.model_fields)
    assert "cache_salt" in inspect.signature(trt.LLM.generate_async).parameters
    assert _penalties_field(trt)


def _penalties_field(trt: Any) -> bool:
    """Without it penalties would count the prompt, and the engine refuses them."""
    return "prompt_ignore_length" in inspect.signature(trt.SamplingParams).parameters


def test_what_the_engine_imports_is_exported(trt: Any) -> None:
    assert [name for name in IMPORTED.split() if not hasattr(trt.llmapi, name)] == []
    assert hasattr(trt, "LLM")
    assert hasattr(trt, "SamplingParams")


def test_graphs_are_captured_unless_they_are_turned_off(trt: Any) -> None:
    assert trt.llmapi.TorchLlmArgs(model="x").cuda_graph_config is not None
    assert trt.llmapi.TorchLlmArgs(model="x", cuda_graph_config=None).cuda_graph_config is None


def test_weights_can_be_random_ones(trt: Any) -> None:
    from tensorrt_llm.llmapi.llm_args import LoadFormat

    assert {"AUTO", "DUMMY", "VISION_ONLY"} <= set(LoadFormat.__members__)
    assert trt.llmapi.TorchLlmArgs(model="x", load_format="dummy").load_format in (LoadFormat.DUMMY, "dummy")


def test_experts_divisions_must_multiply_to_the_tensor_parallel_size(trt: Any) -> None:
    sizes = {"tensor_parallel_size": 1, "moe_tensor_parallel_size": 2, "moe_expert_parallel_size": 1}
    with pytest.raises((ValueError, RuntimeError)):
        engine(trt, **sizes).shutdown()


def test_speculation_has_the_fields_that_are_sent(trt: Any) -> None:
    config = trt.llmapi.NGramDecodingConfig
    assert {"max_draft_len", "load_format"} <= set(config.model_fields)
    assert {"speculative_model", "speculative_model_dir"} & set(config.model_fields)


def test_a_rank_may_be_asked_for_and_is_not_insisted_on(trt: Any) -> None:
    from tensorrt_llm.scheduling_params import SchedulingParams

    assert SchedulingParams().attention_dp_rank is None
    assert SchedulingParams().attention_dp_relax in (True, None)


async def test_the_padding_is_the_end_id_and_no_end_is_minus_one(trt: Any, llm: Any) -> None:
    params = sampling(trt, max_tokens=1)
    await llm.generate_async(PROMPT, params, streaming=True)
    assert params.pad_id == params.end_id == 2
    # What the engine sends when there is no end: it must be taken.
    free = await ask(trt, llm, end_id=-1, pad_id=0, ignore_eos=True)
    assert len(free.outputs[0].token_ids) == 8


async def test_what_never_fits_the_kv_is_refused_and_holds_nobody_up(trt: Any) -> None:
    small = engine(trt, {"max_tokens": 256})
    try:
        with pytest.raises(trt.llmapi.RequestError):
            await asyncio.wait_for(ask(trt, small, [7] * 700, ignore_eos=True), 60.0)
        assert (await asyncio.wait_for(ask(trt, small, ignore_eos=True), 60.0)).outputs[0].token_ids
    finally:
        small.shutdown()


async def test_the_second_half_of_a_hand_over_begins_with_the_first_id(trt: Any) -> None:
    transceiver = trt.llmapi.CacheTransceiverConfig(backend="DEFAULT", max_tokens_in_buffer=1024)
    apart = engine(trt, cache_transceiver_config=transceiver, disable_overlap_scheduler=True)
    kind = trt.llmapi.DisaggregatedParams
    try:
        whole = (await ask(trt, apart, ignore_eos=True)).outputs[0].token_ids
        params = sampling(trt, ignore_eos=True)
        half = kind(request_type="context_only")
        first = await apart.generate_async(PROMPT, params, streaming=True, disaggregated_params=half)
        left = first.outputs[0].disaggregated_params
        assert left.first_gen_tokens == list(whole[:1])
        assert isinstance(left.opaque_state, bytes)
        left.request_type = "generation_only"
        params = sampling(trt, ignore_eos=True)
        second = apart.generate_async(PROMPT, params, streaming=True, disaggregated_params=left)
        assert list((await asyncio.wait_for(second, 60.0)).outputs[0].token_ids) == list(whole)
    finally:
        apart.shutdown()


async def test_nobody_who_waits_takes_a_shutdown_for_an_answer(trt: Any) -> None:
    going = engine(trt)
    result = going.generate_async(PROMPT, sampling(trt, max_tokens=900, ignore_eos=True), streaming=True)
    await anext(aiter(result))
    closing = threading.Thread(target=going.shutdown, daemon=True)
    closing.start()

    # It may raise or hang, and the engine's deadline is for both; but a good end it must not have.
    with contextlib.suppress(Exception):
        await asyncio.wait_for(result.aresult(), 10.0)
    assert result.outputs[0].finish_reason in (None, "cancelled")
    await asyncio.to_thread(closing.join, 60.0)
    assert not closing.is_alive(), "shutdown hangs beside a request that runs"


async def test_events_of_ranks_that_schedule_apart_are_numbered_apart(trt: Any) -> None:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    apart = engine(trt, tensor_parallel_size=2, enable_attention_dp=True)
    try:
        await asyncio.gather(*(ask(trt, apart, [20 + number] * 64, ignore_eos=True) for number in range(8)))
        numbers = defaultdict(list)
        for event in apart.get_kv_cache_events(2):
            numbers[event["attention_dp_rank"]].append(event["event_id"])
        assert len(numbers) == 2
        for of_rank in numbers.values():
            assert of_rank == list(range(of_rank[0], of_rank[0] + len(of_rank)))
    finally:
        apart.shutdown()


def test_one_gpu_can_be_kept_in_one_process() -> None:
    script = (
        "import os, sys; from tensorrt_llm import LLM; from headrace.worker.engines.tensorrt_llm_child import _ranks\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM(sys.argv[1], skip_tokenizer_init=True, max_seq_len=256)\n"
        "    print('ranks', len(_ranks(os.getpid()))); sys.stdout.flush(); os._exit(0)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, standin.REAL_MODEL],
        env=os.environ | {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "ranks 0" in run.stdout, run.stderr[-2000:]


def test_the_quantisation_is_read_from_the_checkpoint(trt: Any, llm: Any) -> None:
    file = Path(standin.REAL_MODEL) / "hf_quant_config.json"
    if not file.exists():
        pytest.skip("a checkpoint without hf_quant_config.json")
    wanted = json.loads(file.read_text())["quantization"]["quant_algo"]
    assert str(getattr(llm.args.quant_config.quant_algo, "value", llm.args.quant_config.quant_algo)) == wanted


def test_the_methods_have_the_names_that_the_guide_uses(trt: Any) -> None:
    assert [name for name in METHODS.split() if name not in trt.llmapi.QuantAlgo.__members__] == []


def test_servers_that_are_apart_can_be_found_without_a_list() -> None:
    """Of TensorRT-LLM's own orchestrator, which this mesh does not use: for the guide."""
    run = subprocess.run(["trtllm-serve", "disaggregated", "--help"], capture_output=True, text=True, timeout=300)
    assert "--metadata" in run.stdout or "-m" in run.stdout
