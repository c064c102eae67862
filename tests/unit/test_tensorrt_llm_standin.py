"""The stand-in for TensorRT-LLM has the surface of the real one, and its habits that a serving worker meets.

The lists are those of TensorRT-LLM's own tests of the stability of its API; on a machine with a GPU and
HEADRACE_TENSORRT_LLM_MODEL they are held against the real one.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import standin


def _names(text: str) -> set[str]:
    return set(text.split())


SAMPLING = _names("""
n best_of use_beam_search beam_search_diversity_rate early_stopping max_tokens min_tokens end_id pad_id seed
temperature top_k top_p top_p_decay top_p_min top_p_reset_ids min_p repetition_penalty presence_penalty
frequency_penalty length_penalty no_repeat_ngram_size stop stop_token_ids include_stop_str_in_output bad bad_token_ids
logits_processor apply_batched_logits_processor guided_decoding embedding_bias lookahead_config ignore_eos detokenize
add_special_tokens truncate_prompt_tokens skip_special_tokens spaces_between_special_tokens logprobs prompt_logprobs
return_context_logits return_generation_logits exclude_input_from_output return_encoder_output
additional_model_outputs return_perf_metrics beam_width_array prompt_ignore_length
""")
KV_CACHE = _names("""
enable_block_reuse max_tokens free_gpu_memory_fraction max_gpu_total_bytes tokens_per_block dtype max_attention_window
sink_token_length use_uvm cross_kv_cache_fraction host_cache_size onboard_blocks secondary_offload_min_priority
event_buffer_max_size attention_dp_events_gather_period_ms enable_partial_reuse copy_on_partial_reuse
mamba_ssm_cache_dtype use_kv_cache_manager_v2 max_util_for_resume
""")
ARGUMENTS = _names("""
model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code custom_tokenizer revision tokenizer_revision
tensor_parallel_size pipeline_parallel_size context_parallel_size moe_tensor_parallel_size moe_expert_parallel_size
moe_cluster_parallel_size gpus_per_node enable_attention_dp attention_dp_config dtype load_format kv_cache_config
max_batch_size max_num_tokens max_seq_len max_input_len max_beam_width enable_chunked_prefill scheduler_config
batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio disable_overlap_scheduler cuda_graph_config
attn_backend moe_config allreduce_strategy sampler_type speculative_config guided_decoding_backend
batched_logits_processor enable_lora lora_config peft_cache_config stream_interval num_postprocess_workers
reasoning_parser cache_transceiver_config kv_connector_config enable_iter_perf_stats enable_iter_req_stats
max_stats_len return_perf_metrics perf_metrics_max_requests print_iter_log otlp_traces_endpoint orchestrator_type
garbage_collection_gen0_threshold backend
""")
GENERATE_ASYNC = _names("""
inputs sampling_params lora_request prompt_adapter_request streaming kv_cache_retention_config disaggregated_params
_postproc_params scheduling_params cache_salt
""")
LLM = _names("""
generate generate_async get_kv_cache_events get_kv_cache_events_async get_stats get_stats_async shutdown tokenizer
llm_id
""")
RESULT = _names("""
aresult result abort aborted clear_logprob_params record_stats request_id prompt prompt_token_ids outputs
context_logits finished mm_embedding_handle cached_tokens __await__ __aiter__ __anext__ __iter__ __next__
""")
COMPLETION = _names("""
index text token_ids finish_reason stop_reason generation_logits logprobs prompt_logprobs cumulative_logprob
disaggregated_params request_perf_metrics additional_context_outputs additional_generation_outputs
""")

Load = Callable[..., Any]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """The module as one release, played so; it is forgotten afterwards."""

    def forget() -> None:
        for name in list(sys.modules):
            if name.split(".")[0] in ("tensorrt_llm", "torch", "blake3"):
                del sys.modules[name]

    def importing(**play: Any) -> Any:
        forget()
        monkeypatch.setenv("TRTLLM_STANDIN", json.dumps(play))
        if not standin.REAL_MODEL:
            monkeypatch.syspath_prepend(str(standin.PATH))
        importlib.import_module("tensorrt_llm.llmapi")
        return importlib.import_module("tensorrt_llm")

    yield importing
    forget()


def test_names_and_defaults(load: Load) -> None:
    trt = load()
    api = trt.llmapi
    sampling = inspect.signature(trt.SamplingParams).parameters
    assert set(sampling) >= SAMPLING
    assert trt.SamplingParams().max_tokens == 32
    assert set(api.KvCacheConfig.model_fields) >= KV_CACHE
    assert set(api.TorchLlmArgs.model_fields) >= ARGUMENTS
    assert list(inspect.signature(trt.LLM.__init__).parameters)[1:6] == [
        "model",
        "tokenizer",
        "tokenizer_mode",
        "skip_tokenizer_init",
        "trust_remote_code",
    ]
    assert set(inspect.signature(trt.LLM.generate_async).parameters) >= GENERATE_ASYNC
    assert not inspect.iscoroutinefunction(trt.LLM.generate_async)
    assert all(hasattr(trt.LLM, name) for name in LLM)
    assert set(inspect.signature(api.CompletionOutput).parameters) >= COMPLETION
    for name in ("get_stats", "get_kv_cache_events", "get_stats_async", "get_kv_cache_events_async"):
        assert inspect.signature(getattr(trt.LLM, name)).parameters["timeout"].default == 2


def test_releases_differ_where_the_real_ones_do(load: Load) -> None:
    if standin.REAL_MODEL:
        pytest.skip("the real one is one release")
    old = inspect.signature(load(version="1.2.1").LLM.generate_async).parameters
    assert "priority" not in old
    assert "trace_headers" not in old
    new = load(version="1.4.0rc4").LLM
    assert {"priority", "trace_headers"} <= set(inspect.signature(new.generate_async).parameters)
    assert hasattr(new, "get_kv_cache_capacity")


@pytest.fixture
def an_llm(load: Load) -> Iterator[Callable[..., Any]]:
    """The module and a small LLM."""
    if standin.REAL_MODEL:
        pytest.skip("it plays what the real one does by itself")
    made: list[Any] = []

    def make(play: dict[str, Any] | None = None, **arguments: Any) -> tuple[Any, Any]:
        trt = load(**(play or {}))
        kv = {"max_tokens": 512, "tokens_per_block": 16, "event_buffer_max_size": 1024} | arguments.pop("kv", {})
        defaults = {"skip_tokenizer_init": True, "enable_iter_perf_stats": True, "max_seq_len": 256}
        llm = trt.LLM("/nowhere", kv_cache_config=trt.llmapi.KvCacheConfig(**kv), **(defaults | arguments))
        made.append(llm)
        return trt, llm

    yield make
    for llm in made:
        llm.shutdown()


def test_unknown_arguments_are_refused_before_anything_loads(load: Load) -> None:
    trt = load(faults={"load": "die"})
    with pytest.raises(ValueError, match="wheels"):
        trt.LLM("/nowhere", wheels=4)
    with pytest.raises(ValueError, match="_tensorrt_engine"):
        trt.LLM("/nowhere", build_config=None)
    with pytest.raises(ValueError, match="power of two"):
        trt.llmapi.KvCacheConfig(tokens_per_block=24)


async def test_a_result_is_one_object_that_grows(an_llm: Callable[..., Any]) -> None:
    trt, llm = an_llm()
    params = trt.SamplingParams(end_id=2, max_tokens=5)
    result = llm.generate_async([7, 8, 9], params, streaming=True)
    assert all(hasattr(result, name) for name in RESULT)
    seen, lengths = set(), []
    async for step in result:
        seen.add(id(step.outputs[0].token_ids))
        lengths.append((step.outputs[0].length, len(step.outputs[0].token_ids_diff)))
    assert len(seen) == 1
    assert lengths == [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    assert result.finished
    assert result.outputs[0].finish_reason == "length"
    # What was passed has been changed.
    assert params.pad_id == 2
    assert params._stream_interval == 1
    # The same prompt goes on the same way, and at once when it is not streamed.
    again = await llm.generate_async([7, 8, 9], trt.SamplingParams(end_id=2, max_tokens=5))
    assert again.outputs[0].token_ids == result.outputs[0].token_ids


async def test_sequences_of_a_request_take_turns(an_llm: Callable[..., Any]) -> None:
    trt, llm = an_llm()
    params = trt.SamplingParams(end_id=2, max_tokens=3, n=2, temperature=1.0, seed=5)
    before = [0, 0]
    async for step in llm.generate_async([7, 8], params, streaming=True):
        after = [output.length for output in step.outputs]
        assert sum(after) - sum(before) == 1
        before = after
    assert before == [3, 3]


async def test_stop_ids_are_cut_unless_asked_for(an_llm: Callable[..., Any]) -> None:
    trt, llm = an_llm()
    free = (await llm.generate_async([7, 8], trt.SamplingParams(end_id=2, max_tokens=4))).outputs[0].token_ids
    for include in (False, True):
        options = {"stop_token_ids": [free[2]], "include_stop_str_in_output": include}
        output = (await llm.generate_async([7, 8], trt.SamplingParams(end_id=2, max_tokens=4, **options))).outputs[0]
        assert output.token_ids == free[: 3 if include else 2]
        assert (output.finish_reason, output.stop_reason) == ("stop", free[2])


async def test_an_abort_ends_with_a_step_that_says_so(an_llm: Callable[..., Any]) -> None:
    trt, llm = an_llm({"step_s": 0.001})
    result = llm.generate_async([7], trt.SamplingParams(end_id=2, max_tokens=200), streaming=True)
    async for step in result:
        if step.outputs[0].length == 3 and not result.aborted():
            result.abort()
            result.abort()
    assert result.outputs[0].finish_reason == "cancelled"
    assert 3 <= result.outputs[0].length < 200


async def test_errors_have_their_classes(an_llm: Callable[..., Any]) -> None:
    trt, llm = an_llm({"faults": {"prefill:9": "request_error", "prefill:10": "fatal"}}, max_num_tokens=32)
    with pytest.raises(trt.llmapi.RequestError, match="max_num_tokens"):
        llm.generate_async([1] * 33, trt.SamplingParams(end_id=2))
    with pytest.raises(ValueError, match="end_id"):
        llm.generate_async([1], trt.SamplingParams())
    with pytest.raises(TypeError):
        llm.generate_async([1], {"max_tokens": 3})
    with pytest.raises(trt.llmapi.RequestError):
        await llm.generate_async([9], trt.SamplingParams(end_id=2))
    assert (await llm.generate_async([8], trt.SamplingParams(end_id=2, max_tokens=1))).finished
    with pytest.raises(RuntimeError, match="illegal memory access"):
        await llm.generate_async([10], trt.SamplingParams(end_id=2))
    with pytest.raises(RuntimeError):
        llm.generate_async([8], trt.SamplingParams(end_id=2))


async def test_polling_before_the_first_request(an_llm: Callable[..., Any]) -> None:
    trt, llm = an_llm({"version": "1.2.1"})
    with pytest.raises(AssertionError):
        llm.get_stats(0.01)
    await llm.generate_async([7] * 20, trt.SamplingParams(end_id=2, max_tokens=2))
    events = llm.get_kv_cache_events(1)
    assert [event["event_id"] for event in events] == list(range(len(events)))
    assert events[0]["data"] == {"type": "created", "num_blocks_per_cache_level": [32, 0]}
    assert events[1]["data"]["type"] == "stored"
    assert "cache_salt" not in events[1]["data"]["blocks"][0]
    row = llm.get_stats(1)[0]
    assert row["kvCacheStats"]["maxNumBlocks"] == 32
    # After one time without rows nothing more is given until the next request.
    assert llm.get_stats(0.01) == []
    trt, new = an_llm({"version": "1.3.0rc26"})
    assert new.get_stats(0.01) == []
    assert new.get_kv_cache_capacity()["maxNumBlocks"] == 32


async def test_the_oldest_events_are_lost_without_a_word(an_llm: Callable[..., Any]) -> None:
    trt, llm = an_llm(kv={"event_buffer_max_size": 2})
    for first in range(10, 16):
        await llm.generate_async([first] * 40, trt.SamplingParams(end_id=2, max_tokens=1))
    assert [event["event_id"] for event in llm.get_kv_cache_events(1)] == [5, 6]


async def test_a_prompt_is_handed_over_once(an_llm: Callable[..., Any]) -> None:
    config = {"backend": "DEFAULT", "kv_transfer_timeout_ms": 200}
    trt, context = an_llm(cache_transceiver_config=config)
    _, generation = (
        trt,
        trt.LLM(
            "/nowhere",
            skip_tokenizer_init=True,
            kv_cache_config=trt.llmapi.KvCacheConfig(max_tokens=512, tokens_per_block=16),
            cache_transceiver_config=config,
        ),
    )
    try:
        whole = await generation.generate_async([7] * 20, trt.SamplingParams(end_id=2, max_tokens=4))
        asked = trt.DisaggregatedParams(request_type="context_only")
        params = trt.SamplingParams(end_id=2, max_tokens=4)
        first = await context.generate_async([7] * 20, params, disaggregated_params=asked)
        output = first.outputs[0]
        assert params.max_tokens == 1
        assert output.finish_reason == "not_finished"
        handed = output.disaggregated_params
        assert handed.first_gen_tokens == output.token_ids
        handed.request_type = "generation_only"
        again = trt.SamplingParams(end_id=2, max_tokens=4)
        rest = await generation.generate_async([7] * 20, again, disaggregated_params=handed)
        assert rest.outputs[0].token_ids == whole.outputs[0].token_ids
        with pytest.raises(trt.llmapi.RequestError, match="timed out"):
            await generation.generate_async([7] * 20, trt.SamplingParams(end_id=2), disaggregated_params=handed)
    finally:
        generation.shutdown()


async def test_a_result_needs_the_loop_it_was_made_in(an_llm: Callable[..., Any]) -> None:
    trt, llm = an_llm()
    # A thread without a loop gets a queue for threads.
    result = await asyncio.to_thread(llm.generate, [7, 8], trt.SamplingParams(end_id=2, max_tokens=3))
    assert result.outputs[0].length == 3


#: They need ranks, or TensorRT-LLM's own server.
OPEN_POINTS = "tests/contract/test_tensorrt_llm_real.py"
ONLY_THERE = "not ranks_are_started and not servers_that_are_apart"


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc4"])
def test_the_open_points_hold_on_the_stand_in(version: str) -> None:
    """``test_tensorrt_llm_real.py`` with the stand-in in the real one's place: what it plays is what is assumed."""
    root = Path(__file__).parents[2]
    environment = standin.environment(version=version)
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(root), *filter(None, sys.path)])
    run = subprocess.run(
        [*f"{sys.executable} -m pytest -q -p no:cacheprovider {OPEN_POINTS} -k".split(), ONLY_THERE],
        cwd=root,
        env=os.environ | environment | {"HEADRACE_TENSORRT_LLM_MODEL": standin.ITSELF},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    assert " passed" in run.stdout
