"""One suite for every engine: what the engine protocol promises, whoever keeps it.

The sim engine always runs, and so does TensorRT-LLM's on the stand-in, as two releases; llama.cpp runs with the
embedded model (marked ``model``); the real TensorRT-LLM runs where HEADRACE_TENSORRT_LLM_MODEL names a checkpoint's
folder (marked ``gpu``). An engine added later joins by one more entry in ``ENGINES``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.support import openengine_server, standin
from tests.support.engines import PATIENCE_S, Bench, names
from tests.support.fronted import Fronted, worker
from tests.support.waiting import eventually

from headrace.config import WorkerConfig
from headrace.v1 import types_pb2
from headrace.worker.engine import (
    Engine,
    Guided,
    LogprobOptions,
    Request,
    Stopping,
)
from headrace.worker.engines.openengine import OpenEngineDialect
from headrace.worker.engines.remote import Dialect
from headrace.worker.loop import BatchLoop
from headrace.worker.selfbatched import SelfBatched

STOP, LENGTH = types_pb2.OUTCOME_STOP, types_pb2.OUTCOME_LENGTH
CANCELLED, DEADLINE = types_pb2.OUTCOME_CANCELLED, types_pb2.OUTCOME_DEADLINE

#: The weights whose logits differ least with the shape of a batch, on any CPU: quantized ones turn near ties.
EXACT = "BF16"
CONFIG = WorkerConfig(slots=4, kv_tokens=1024, block_tokens=16, chunk_tokens=64, max_waiting=64)


def sim() -> BatchLoop:
    from headrace.worker.composer import Limits
    from headrace.worker.engines.sim import SimBackend
    from headrace.worker.timing import Timing

    limits = Limits(
        slots=4,
        kv_blocks=64,
        block_tokens=16,
        context_tokens=1024,
        chunk_tokens=64,
        idle_chunk_tokens=512,
        max_waiting=64,
    )
    timing = Timing(prefill_tokens_per_s=1e5, step_s=0.0005, step_s_per_sequence=0.0)
    return BatchLoop(SimBackend(limits, timing, vocab_size=1000, output_tokens=12), hash_blocks=names)


def llama_cpp() -> BatchLoop:
    from headrace import models
    from headrace.worker.engines.llama_cpp import LlamaBackend

    return BatchLoop(LlamaBackend(models.prepare("embedded", EXACT), CONFIG), hash_blocks=names)


def tensorrt_llm(version: str) -> SelfBatched:
    """On the stand-in, with KV of the size of the others'."""
    return standin.engine(CONFIG, kv_tokens=1024, context_tokens=1024, step_s=0.001, version=version)


def tensorrt_llm_on_gpu() -> SelfBatched:
    """The real one, with the checkpoint that the environment names."""
    return standin.real_engine(CONFIG, kv_tokens=1024, context_tokens=1024)


#: With one end id, for which all is exact.
ONE_END = standin.folder(1024, standin.EOS_IDS[:1])


def before_a_worker(dialect: Dialect) -> Engine:
    """Before another worker that serves the protocol; on the stand-in."""
    inner = standin.engine(CONFIG, kv_tokens=1024, context_tokens=1024, step_s=0.001, eos_ids=standin.EOS_IDS[:1])
    return Fronted(worker(inner, ONE_END, CONFIG), dialect, ONE_END, CONFIG)


def trtllm_grpc() -> Engine:
    from headrace.worker.engines.trtllm_grpc import TrtllmDialect

    return before_a_worker(TrtllmDialect(ONE_END))


def openengine() -> Engine:
    """Before what TensorRT-LLM's own server does."""
    arguments = {
        "max_seq_len": 1024,
        "max_batch_size": CONFIG.slots,
        "enable_chunked_prefill": True,
        "guided_decoding_backend": "xgrammar",
        "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 1024},
    }
    server = openengine_server.running(arguments, standin.EOS_IDS[0], step_s=0.001, version="1.4.0rc4")
    return Fronted(server, OpenEngineDialect(), ONE_END, CONFIG)


def llama_cpp_guessing() -> BatchLoop:
    from headrace import models
    from headrace.worker.engines.llama_cpp import LlamaBackend

    config = dataclasses.replace(CONFIG, draft_tokens=6)
    return BatchLoop(LlamaBackend(models.prepare("embedded", EXACT), config), hash_blocks=names)


def llama_cpp_drafting() -> BatchLoop:
    """With a drafting model of other weights, whose KV holds few of the sequences."""
    from headrace import models
    from headrace.worker.engines.llama_cpp import LlamaBackend

    config = dataclasses.replace(CONFIG, draft_tokens=4, draft_kv_tokens=256)
    backend = LlamaBackend(models.prepare("embedded", EXACT), config, models.prepare("embedded", "Q4_0"))
    return BatchLoop(backend, hash_blocks=names)


ENGINES: dict[str, Callable[[], Engine]] = {
    "sim": sim,
    "llama_cpp": llama_cpp,
    "llama_cpp guessing ahead": llama_cpp_guessing,
    "llama_cpp drafting": llama_cpp_drafting,
    "tensorrt_llm 1.2": lambda: tensorrt_llm("1.2.1"),
    "tensorrt_llm 1.4": lambda: tensorrt_llm("1.4.0rc4"),
    "tensorrt_llm on a GPU": tensorrt_llm_on_gpu,
    "trtllm_grpc": trtllm_grpc,
    "openengine": openengine,
    "openengine before a worker": lambda: before_a_worker(OpenEngineDialect()),
}
BEHIND_GRPC = ("trtllm_grpc", "openengine")
MARKS = {
    "llama_cpp": [pytest.mark.model],
    "llama_cpp guessing ahead": [pytest.mark.model],
    "llama_cpp drafting": [pytest.mark.model],
    "tensorrt_llm on a GPU": [
        pytest.mark.gpu,
        pytest.mark.skipif(not standin.REAL_MODEL, reason="needs a GPU and HEADRACE_TENSORRT_LLM_MODEL"),
    ],
}


@pytest_asyncio.fixture(
    params=[pytest.param(name, marks=MARKS.get(name, ())) for name in ENGINES],
    scope="module",
    loop_scope="module",
)
async def _engine(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    bench = Bench(ENGINES[request.param]())
    await bench.start()
    yield bench
    await bench.engine.stop()


@pytest.fixture
def bench(_engine: Bench) -> Bench:
    return _engine


pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [1, 690, 198, 683, 359, 253, 356, 646]


def long_prompt(seed: int, length: int = 50) -> list[int]:
    return [(seed * 7919 + 31 * index) % 900 + 20 for index in range(length)]


async def test_ids_in_ids_out(bench: Bench) -> None:
    (answer,) = await bench.ask(PROMPT, max_tokens=5, ignore_eos=True)
    assert len(answer.ids) == 5
    assert answer.finish is not None
    assert answer.finish.outcome == LENGTH
    assert (answer.finish.prompt_tokens, answer.finish.completion_tokens) == (8, 5)
    assert all(0 <= token < bench.engine.describe().vocab_size for token in answer.ids)


async def test_load_returns_to_zero(bench: Bench) -> None:
    requests = [bench.submit(long_prompt(seed), max_tokens=4, ignore_eos=True) for seed in range(10)]
    for request in requests:
        await bench.ended(request)
    load = await bench.at_rest()
    assert load.kv_blocks_used == 0
    assert load.waiting_prompt_tokens == load.running_prompt_tokens == load.context_tokens == 0


async def test_greedy_is_the_same_again_and_in_company(bench: Bench) -> None:
    """Short answers, so that a near-tie of an engine that isn't batch-invariant does not come in."""
    alone = (await bench.ask(PROMPT, max_tokens=4, ignore_eos=True))[0].ids
    again = [bench.submit(PROMPT, max_tokens=4, ignore_eos=True) for _ in range(4)]
    assert [(await bench.ended(request))[0].ids for request in again] == [alone] * 4


async def test_seeds_decide(bench: Bench) -> None:
    async def ids(*seeds: int) -> list[list[int]]:
        answers = await bench.ask(PROMPT, max_tokens=6, seeds=seeds, temperature=1.5, ignore_eos=True)
        return [answer.ids for answer in answers]

    first, second = await ids(1), await ids(1)
    assert first == second
    choices = await ids(1, 2, 3)
    assert len({tuple(choice) for choice in choices}) == 3
    # The first id is drawn before there is company; after it, logits may differ in their last bits beside others, and
    # where a CPU computes larger batches by other instructions (AMX) in more than those.
    same = len(first[0]) if bench.engine.describe().capabilities.batch_invariant else 1
    assert choices[0][:same] == first[0][:same]


async def test_choices_are_counted_together(bench: Bench) -> None:
    answers = await bench.ask(long_prompt(3), max_tokens=5, seeds=(1, 2, 3), temperature=1.0, ignore_eos=True)
    assert [len(answer.ids) for answer in answers] == [5, 5, 5]
    assert max(answer.finish.completion_tokens for answer in answers if answer.finish) == 15


async def test_end_of_sequence_and_what_holds_it_back(bench: Bench) -> None:
    if bench.engine.describe().engine == "openengine":
        pytest.skip("its protocol has no biases: test_openengine.py has ends of another model")
    eos = bench.engine.describe().eos_ids[0]
    # A bias that makes the end certain; the sim engine ends by itself at 12.
    options: dict[str, Any] = {"logit_bias": {eos: 500.0}}
    (answer,) = await bench.ask(PROMPT, max_tokens=20, **options)
    assert answer.ids[-1] == eos
    assert answer.ids.count(eos) == 1
    assert answer.finish is not None
    assert answer.finish.outcome == STOP
    (held,) = await bench.ask(PROMPT, max_tokens=20, min_tokens=15, **options)
    assert eos not in held.ids[:15]
    (ignored,) = await bench.ask(PROMPT, max_tokens=20, ignore_eos=True, **options)
    assert len(ignored.ids) == 20
    assert ignored.finish is not None
    assert ignored.finish.outcome == LENGTH


async def test_stop_ids(bench: Bench) -> None:
    if bench.engine.describe().engine == "sim":
        pytest.skip("its ids are never stop ids: there is no model that could mean them")
    free = (await bench.ask(PROMPT, max_tokens=6, ignore_eos=True))[0].ids
    stop = free[2]
    (answer,) = await bench.ask(PROMPT, max_tokens=6, ignore_eos=True, stop_ids=frozenset({stop}))
    assert answer.ids == free[: free.index(stop) + 1]
    assert answer.finish is not None
    assert answer.finish.outcome == STOP
    if bench.engine.describe().engine in BEHIND_GRPC:
        pytest.skip("its protocol holds back no stop ids, and such requests are refused")
    (later,) = await bench.ask(PROMPT, max_tokens=6, ignore_eos=True, stop_ids=frozenset({stop}), min_tokens=4)
    assert stop not in later.ids[:4]


async def test_logprobs(bench: Bench) -> None:
    of_prompt = bench.engine.describe().capabilities.prompt_logprobs
    options = LogprobOptions(enabled=True, top=3, prompt=of_prompt)
    prompt = long_prompt(5, 40)
    request = bench.submit(prompt, max_tokens=4, ignore_eos=True, logprobs=options)
    (answer,) = await bench.ended(request)
    assert [each.drawn[0] for each in answer.logprobs] == answer.ids
    prompt_logprobs = bench.prompt_logprobs.get(request.key, [])
    assert [each.drawn[0] for each in prompt_logprobs] == (prompt[1:] if of_prompt else [])
    for each in [*answer.logprobs, *prompt_logprobs]:
        assert len(each.top) == 3
        values = [logprob for _, logprob in each.top]
        assert values == sorted(values, reverse=True)
        assert all(-9999.0 <= value <= 0.0 for value in [each.drawn[1], *values])
        assert len({token for token, _ in each.top}) == 3
    # Greedy, so the drawn one is the likeliest.
    assert all(each.drawn == each.top[0] for each in answer.logprobs)


async def test_no_top_when_none_is_asked_for(bench: Bench) -> None:
    (answer,) = await bench.ask(PROMPT, max_tokens=3, ignore_eos=True, logprobs=LogprobOptions(enabled=True))
    assert [each.top for each in answer.logprobs] == [[], [], []]


async def test_a_prefix_is_reused_and_counted(bench: Bench) -> None:
    prompt = long_prompt(11, 50)
    first, second = (bench.submit(prompt, max_tokens=3, ignore_eos=True, cache_salt=b"reuse") for _ in range(2))
    ids = [(await bench.ended(request))[0].ids for request in (first, second)]
    third = bench.submit(prompt, max_tokens=3, ignore_eos=True, cache_salt=b"reuse")
    ids.append((await bench.ended(third))[0].ids)
    assert bench.cached[first.key] == 0
    assert bench.cached[third.key] == 48
    assert ids[0] == ids[1] == ids[2]
    other = bench.submit(prompt, max_tokens=3, ignore_eos=True, cache_salt=b"other")
    private = bench.submit(prompt, max_tokens=3, ignore_eos=True, cache_salt=b"reuse", reuse_prefix=False)
    assert (await bench.ended(other))[0].ids == (await bench.ended(private))[0].ids == ids[0]
    assert bench.cached[other.key] == bench.cached[private.key] == 0
    # An engine with a process of its own tells of its blocks when it is asked.
    told = bench.engine.describe().engine not in BEHIND_GRPC
    await bench.until(lambda: not told or set(bench.names(prompt, b"reuse")) <= bench.held)
    load = await bench.at_rest()
    assert load.kv_blocks_cached == len(bench.held)


async def test_cancel_frees_at_once(bench: Bench) -> None:
    requests = [
        bench.submit(long_prompt(20 + seed), max_tokens=500, ignore_eos=True, seeds=(1, 2)) for seed in range(4)
    ]
    await bench.until(lambda: (requests[0].key, 0) in bench.answers)
    for request in requests:
        bench.engine.cancel(request.key, None, CANCELLED)
        bench.engine.cancel(request.key, None, CANCELLED)
    for request in requests:
        for answer in await bench.ended(request):
            assert answer.finish is not None
            assert answer.finish.outcome == CANCELLED
    load = await bench.at_rest()
    assert load.kv_blocks_used == 0
    assert (await bench.ask(PROMPT, max_tokens=2, ignore_eos=True))[0].finish is not None


async def test_cancel_within_a_long_prefill(bench: Bench) -> None:
    """The step may be broken off; whatever it had computed must not be taken for a prefix."""
    prompt = long_prompt(40, 900)
    request = bench.submit(prompt, max_tokens=3, ignore_eos=True)

    async def in_step() -> bool:
        # On a busy machine a quick engine may be done before anybody looks.
        answer = bench.answers.get((request.key, 0))
        return bench.engine.step_age_s() > 0 or (answer is not None and answer.finish is not None)

    await eventually(in_step, "a step under way", PATIENCE_S)
    bench.engine.cancel(request.key, None, CANCELLED)
    (answer,) = await bench.ended(request)
    assert answer.finish is not None
    assert answer.finish.outcome in (CANCELLED, LENGTH)
    short = prompt[:100]
    warm = (await bench.ask(short, max_tokens=4, ignore_eos=True))[0].ids
    assert warm == (await bench.ask(short, max_tokens=4, ignore_eos=True, reuse_prefix=False))[0].ids


async def test_a_batch_prompt_makes_way_and_is_answered_all_the_same(bench: Bench) -> None:
    """Its step may be broken off for somebody else's request, and is computed again."""
    prompt = long_prompt(41, 900)
    batch = bench.submit(prompt, max_tokens=3, ignore_eos=True, request_class=types_pb2.REQUEST_CLASS_BATCH)

    async def in_step() -> bool:
        return bench.engine.step_age_s() > 0 or (batch.key, 0) in bench.answers

    await eventually(in_step, "a step under way", PATIENCE_S)
    for _ in range(3):
        (other,) = await bench.ask(PROMPT, max_tokens=2, ignore_eos=True)
        assert len(other.ids) == 2
    (answer,) = await bench.ended(batch)
    assert answer.finish is not None
    assert (answer.finish.outcome, len(answer.ids)) == (LENGTH, 3)


async def test_one_choice_is_cancelled_alone(bench: Bench) -> None:
    request = bench.submit(long_prompt(30), max_tokens=10, ignore_eos=True, seeds=(1, 2))
    await bench.until(lambda: (request.key, 1) in bench.answers)
    bench.engine.cancel(request.key, 1, STOP)
    kept, cut = await bench.ended(request)
    assert kept.finish is not None
    assert cut.finish is not None
    assert (len(kept.ids), kept.finish.outcome) == (10, LENGTH)
    assert cut.finish.outcome in (STOP, LENGTH)


async def test_a_deadline_ends_a_request(bench: Bench) -> None:
    (answer,) = await bench.ask(PROMPT, max_tokens=900, ignore_eos=True, deadline_s=time.monotonic() + 0.3)
    assert answer.finish is not None
    assert answer.finish.outcome in (DEADLINE, LENGTH)
    late = bench.submit(PROMPT, max_tokens=5, deadline_s=time.monotonic() - 1)
    (nothing,) = await bench.ended(late)
    assert nothing.finish is not None
    assert (nothing.ids, nothing.finish.outcome) == ([], DEADLINE)


async def test_more_than_fits_waits_and_all_come_to_their_end(bench: Bench) -> None:
    """Six requests of some 20 blocks, in 64 blocks and 4 slots."""
    requests = [
        bench.submit(long_prompt(100 + seed, 300 + seed), max_tokens=6, ignore_eos=True, seeds=(seed,))
        for seed in range(6)
    ]
    for request in requests:
        (answer,) = await bench.ended(request)
        assert answer.finish is not None
        assert answer.finish.outcome == LENGTH
    assert (await bench.at_rest()).kv_blocks_used == 0


async def test_what_never_fits_is_rejected_with_numbers(bench: Bench) -> None:
    too_long = bench.submit(long_prompt(1, 1024), max_tokens=5)
    (answer,) = await bench.ended(too_long)
    assert answer.finish is not None
    assert answer.finish.outcome == types_pb2.OUTCOME_REJECTED
    assert answer.finish.error is not None
    assert "1024" in answer.finish.error.message


async def test_a_resumed_answer_goes_on_as_it_would_have(bench: Bench) -> None:
    # The numbers drawn are the same on every engine; the logits only where the batch's shape does not move them.
    exact = bench.engine.describe().capabilities.batch_invariant
    options: dict[str, Any] = {"ignore_eos": True, "temperature": 0.9 if exact else 0.0, "seeds": (7,)}
    whole = (await bench.ask(PROMPT, max_tokens=6, **options))[0].ids
    (rest,) = await bench.ask(PROMPT + whole[:3], max_tokens=3, resumed_tokens=3, **options)
    assert rest.ids == whole[3:]


async def test_a_bad_grammar_is_refused_and_harms_nobody(bench: Bench) -> None:
    request = Request(
        key=10**9,
        prompt_ids=PROMPT,
        stopping=Stopping(5),
        guided=Guided("regex", "foo**"),
    )
    for _ in range(2):
        refusal = await bench.engine.check(request)
        assert refusal is not None
        assert refusal.code == types_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert refusal.param == "response_format"
    assert (await bench.ask(PROMPT, max_tokens=2, ignore_eos=True))[0].finish is not None


# --- llama.cpp alone --------------------------------------------------------------------------------------------------


def _text(bench: Bench, ids: list[int]) -> str:
    import ctypes

    assert isinstance(bench.engine, BatchLoop)
    vocabulary = bench.engine._backend._context.vocabulary  # type: ignore[attr-defined]
    piece, out = ctypes.create_string_buffer(256), b""
    for token in ids:
        out += piece[: vocabulary.library.llama_token_to_piece(vocabulary.pointer, token, piece, 256, 0, False)]
    return out.decode()


@pytest.fixture
def real(bench: Bench) -> Bench:
    if bench.engine.describe().engine != "llama_cpp":
        pytest.skip("needs a model")
    return bench


@pytest.mark.model
async def test_what_was_moved_to_disk_is_what_was_computed(tmp_path: Path) -> None:
    """Memory for two blocks or so: nearly all of a prompt's KV comes from the file."""
    from headrace import models
    from headrace.worker.engines.llama_cpp import LlamaBackend

    config = dataclasses.replace(
        CONFIG, prefix_cache_mib=1, prefix_cache_disk_mib=32, prefix_cache_dir=str(tmp_path / "kv")
    )
    bench = Bench(BatchLoop(LlamaBackend(models.prepare("embedded", EXACT), config), hash_blocks=names))
    await bench.start()
    try:
        prompts, cached, ids = (long_prompt(7, 200), long_prompt(8, 200)), [], []
        for prompt in (*prompts, *prompts):
            request = bench.submit(prompt, max_tokens=9, ignore_eos=True)
            ids.append((await bench.ended(request))[0].ids)
            cached.append(bench.cached[request.key])
        assert ids[:2] == ids[2:]
        assert cached[:2] == [0, 0]
        # All but one id, as from memory.
        assert cached[2:] == [199, 199]
        assert (await bench.at_rest()).kv_blocks_cached == 2 * (208 // 16)
    finally:
        await bench.engine.stop()
    assert not list((tmp_path / "kv").iterdir())


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_schema_is_kept_to(real: Bench, temperature: float) -> None:
    guided = Guided("json_schema", json.dumps(SCHEMA))
    request = Request(1 << 40, PROMPT, Stopping(40), guided=guided)
    assert await real.engine.check(request) is None
    (answer,) = await real.ask(PROMPT, max_tokens=40, guided=guided, temperature=temperature, seeds=(3,))
    assert answer.finish is not None
    assert answer.finish.outcome == STOP
    assert isinstance(json.loads(_text(real, answer.ids))["a"], int)
    (cut,) = await real.ask(PROMPT, max_tokens=3, guided=guided, temperature=temperature, seeds=(3,))
    assert cut.finish is not None
    assert cut.finish.outcome == LENGTH
    assert _text(real, cut.ids).lstrip().startswith("{")


@pytest.mark.parametrize(
    ("guided", "allowed"),
    [
        (Guided("choice", '["red", "blue"]'), {"red", "blue"}),
        (Guided("regex", "(ab|cd)e?"), {"ab", "cd", "abe", "cde"}),
        (Guided("grammar", 'root ::= "yes" | "no"'), {"yes", "no"}),
    ],
)
async def test_other_guides_are_kept_to(real: Bench, guided: Guided, allowed: set[str]) -> None:
    assert await real.engine.check(Request(1 << 40, PROMPT, Stopping(9), guided=guided)) is None
    answers = await real.ask(PROMPT, max_tokens=9, guided=guided, temperature=1.0, seeds=(1, 2, 3), min_tokens=0)
    assert {_text(real, answer.ids) for answer in answers} <= allowed
    assert all(answer.finish is not None and answer.finish.outcome == STOP for answer in answers)


@pytest.mark.parametrize("copy_weights", [False, True])
async def test_greedy_ids_are_those_of_llama_cpp_driven_by_hand(real: Bench, copy_weights: bool) -> None:
    from headrace import models
    from headrace.worker.engines.llama_api import Context

    weights = models.prepare("embedded", EXACT).weights
    assert weights is not None
    context = Context(weights, kv_tokens=512, sequences=1, batch_tokens=512, threads=1, copy_weights=copy_weights)
    try:
        for prompt in (PROMPT, long_prompt(77, 30)):
            ids, computed = list(prompt), 0
            while len(ids) < len(prompt) + 12:
                count = len(ids) - computed
                context.tokens[:count] = ids[computed:]
                context.positions[:count] = range(computed, len(ids))
                context.sequence_ids[:count] = 0
                context.wants_logits[:count] = 0
                context.wants_logits[count - 1] = 1
                assert context.decode(count) == 0
                computed = len(ids)
                ids.append(int(context.logits(1)[0].argmax()))
            context.remove(0, 0, -1)
            (answer,) = await real.ask(prompt, max_tokens=12, ignore_eos=True, reuse_prefix=False)
            assert answer.ids == ids[len(prompt) :]
    finally:
        context.close()


async def test_a_prompt_is_the_same_beside_what_decodes(real: Bench) -> None:
    """A step of both is computed in two parts, and nothing of one is taken for the other's."""

    def decoding() -> Request:
        enabled = LogprobOptions(enabled=True)
        return real.submit(long_prompt(11, 20), max_tokens=24, ignore_eos=True, reuse_prefix=False, logprobs=enabled)

    def coming() -> Request:
        of_all = LogprobOptions(enabled=True, prompt=True)
        return real.submit(long_prompt(9, 200), max_tokens=4, ignore_eos=True, reuse_prefix=False, logprobs=of_all)

    async def said(*requests: Request) -> list[tuple[list[int], list[float]]]:
        answers = [(await real.ended(request))[0] for request in requests]
        prompts = [real.prompt_logprobs.get(request.key, []) for request in requests]
        return [
            (answer.ids[:4], [each.drawn[1] for each in [*prompt, *answer.logprobs[:4]]])
            for answer, prompt in zip(answers, prompts, strict=True)
        ]

    alone = await said(decoding()) + await said(coming())
    first = decoding()
    await real.until(lambda: bool(real.answers.get((first.key, 0), real.nothing).ids))
    together = await said(first, coming())
    assert [ids for ids, _ in together] == [ids for ids, _ in alone]
    assert [len(logprobs) for _, logprobs in together] == [4, 199 + 4]
    for one, other in zip(alone, together, strict=True):
        assert one[1] == pytest.approx(other[1], abs=0.2)


async def test_penalties_change_what_is_said(real: Bench) -> None:
    plain = (await real.ask(PROMPT, max_tokens=24, ignore_eos=True))[0].ids
    fresh = (await real.ask(PROMPT, max_tokens=24, ignore_eos=True, frequency_penalty=100.0))[0].ids
    assert len(set(fresh)) == 24
    assert len(set(plain)) < 24
    repeated = (await real.ask(PROMPT, max_tokens=24, ignore_eos=True, repetition_penalty=100.0))[0].ids
    assert not set(repeated) & set(PROMPT)


async def test_what_is_guessed_ahead_is_what_would_have_been_said(real: Bench) -> None:
    words = [690, 198, 683, 359, 253, 356, 646, 1043, 877]
    prompt = [1, *words * 4, *words[:3]]
    before = real.engine.load()
    free = (await real.ask(prompt, max_tokens=32, ignore_eos=True))[0].ids
    # Log-probabilities are asked for, so nothing is guessed.
    options = LogprobOptions(enabled=True)
    exact = (await real.ask(prompt, max_tokens=32, ignore_eos=True, logprobs=options))[0].ids
    assert free == exact
    after = await real.at_rest()
    guessed = after.draft_tokens_total - before.draft_tokens_total
    assert guessed == 0 or after.accepted_draft_tokens_total > before.accepted_draft_tokens_total
