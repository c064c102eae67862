"""The client against a scripted router: events, collected answers, errors, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tests.support import fake_router as fake
from tests.support.fake_router import FakeRouter

from headrace import client as module
from headrace.client import Answer, Choice, Client, ClientError, Delta, Finish, Model, Outcome, Started, Usage
from headrace.v1 import router_pb2, types_pb2

TIMEOUT_S = 10.0


async def two_words(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[fake.Response]:
    yield fake.started(request)
    yield fake.delta("one ", 1, 2)
    yield fake.delta("two", 3)
    yield fake.finish(types_pb2.OUTCOME_STOP, stop_string="END")
    yield fake.usage(3, 1, 4, cached_answer=True)


async def endless(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[fake.Response]:
    yield fake.started(request)
    yield fake.delta("a", 1)
    await asyncio.Event().wait()


async def test_events_come_typed_and_in_order() -> None:
    async with FakeRouter(two_words) as router, Client(router.address) as client:
        events = [event async for event in client.generate(model="toy", text="go")]
    assert events == [
        Started("r1", "toy", 3, 1),
        Delta(0, "one ", (1, 2)),
        Delta(0, "two", (3,)),
        Finish(0, Outcome.STOP, "END"),
        Usage(3, 1, 4, cached_answer=True),
    ]


async def test_complete_collects_each_choice() -> None:
    async def script(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[fake.Response]:
        yield fake.started(request)
        yield fake.delta("B", 7, choice=1)
        yield fake.delta("A", 8)
        yield fake.finish(types_pb2.OUTCOME_LENGTH)
        yield fake.delta("b", 9, choice=1)
        yield fake.finish(types_pb2.OUTCOME_STOP, choice=1, stop_id=0)
        yield fake.usage(3, 0, 3)

    async with FakeRouter(script) as router, Client(f"grpc://{router.address}") as client:
        answer = await client.complete(model="toy", text="go", n=2)
    assert answer == Answer(
        "r1",
        "toy",
        (Choice("A", (8,), Outcome.LENGTH), Choice("Bb", (7, 9), Outcome.STOP, 0)),
        Usage(3, 0, 3),
    )
    assert answer.text == "A"
    assert answer.outcome is Outcome.LENGTH


async def test_the_default_model_is_the_first_listed_and_asked_for_once() -> None:
    async with FakeRouter() as router, Client(router.address) as client:
        await client.complete(text="a")
        router.models = ("changed",)
        await client.complete(text="b")
    assert [request.model for request in router.requests] == ["toy", "toy"]


async def test_a_router_with_no_model() -> None:
    async with FakeRouter(models=()) as router, Client(router.address) as client:
        with pytest.raises(ClientError, match="lists no model"):
            await client.complete(text="a")


async def test_every_option_reaches_the_router() -> None:
    async with FakeRouter() as router, Client(router.address) as client:
        await client.complete(
            model="toy",
            messages=[
                {"role": "system", "content": ""},
                {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": "ann"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c1", "function": {"name": "clock", "arguments": {"tz": "UTC"}}}],
                },
                {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
            ],
            tools=[{"type": "function"}],
            tool_choice="f",
            parallel_tool_calls=False,
            template_kwargs={"think": False},
            max_tokens=5,
            min_tokens=1,
            temperature=0,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=2,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={5: -1},
            seed=2**64 - 1,
            n=1,
            stop="END",
            stop_ids=[9],
            include_stop=True,
            ignore_eos=True,
            json_schema={"type": "object"},
            logprobs=2,
            lora="l",
            request_class="batch",
            deadline_s=60,
            ttft_target_s=1.5,
            tpot_target_s=0.07,
            bypass_cache=True,
            bypass_prefix_cache=True,
            session_id="s",
            cache_salt="own",
            traceparent="00-11111111111111111111111111111111-2222222222222222-01",
        )
    (request,) = router.requests
    message = router_pb2.ChatMessage
    expected = router_pb2.GenerateRequest(
        model="toy",
        chat=router_pb2.Chat(
            messages=[
                message(role="system", content=""),
                message(role="user", parts=["a", "b"], name="ann"),
                message(
                    role="assistant",
                    tool_calls=[router_pb2.ToolCall(id="c1", name="clock", arguments_json='{"tz": "UTC"}')],
                ),
                message(role="tool", content="12:00", tool_call_id="c1"),
            ],
            tools_json=['{"type": "function"}'],
            tool_use=router_pb2.Chat.TOOL_USE_REQUIRED,
            required_tool="f",
            single_tool_call=True,
            template_kwargs_json='{"think": false}',
        ),
        sampling=router_pb2.SamplingOptions(
            temperature=0,
            top_k=3,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=2,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={5: -1},
            seed=2**64 - 1,
            n=1,
        ),
        stopping=router_pb2.StoppingOptions(
            max_tokens=5, min_tokens=1, ignore_eos=True, stop=["END"], stop_ids=[9], include_stop=True
        ),
        guided=types_pb2.Guided(json_schema='{"type": "object"}'),
        logprobs=types_pb2.LogprobOptions(enabled=True, top=2),
        lora="l",
        deadline_ms=60_000,
        ttft_target_ms=1500,
        tpot_target_ms=70,
        bypass_cache=True,
        bypass_prefix_cache=True,
        session_id="s",
        cache_salt="own",
        **{"class": types_pb2.REQUEST_CLASS_BATCH},
    )
    assert request == expected
    assert request.chat.messages[0].HasField("content")
    assert not request.chat.messages[2].HasField("content")
    assert router.metadata[0]["traceparent"] == "00-11111111111111111111111111111111-2222222222222222-01"
    left_s = router.times_left_s[0]
    # The router is to end it at the deadline, with its reasons; the call itself has a little longer.
    assert left_s is not None
    # gRPC rounds what it sends up to three digits.
    assert 60.0 < left_s <= (60.0 + module.DEADLINE_SLACK_S) * 1.01


def test_left_out_options_stay_absent() -> None:
    request = module.generate_request({"ids": []})
    assert request.WhichOneof("prompt") == "ids"
    assert not request.HasField("sampling") or not request.sampling.ListFields()
    assert not request.stopping.HasField("max_tokens")
    assert not request.HasField("ttft_target_ms")
    assert not request.HasField("tpot_target_ms")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of messages, text and ids, got none"),
        ({"text": "a", "ids": [1]}, "got text and ids"),
        ({"text": 5}, None),
        ({"text": "a", "max_tokens": -1}, None),
        ({"text": "a", "temperature": "hot"}, None),
        ({"text": "a", "seed": 2**64}, None),
        ({"ids": [-1]}, None),
        ({"text": "a", "deadline_s": -1}, "at least 0"),
        ({"text": "a", "deadline_s": float("nan")}, "at least 0"),
        ({"text": "a", "ttft_target_s": 0}, "ttft_target_s: expected seconds above 0"),
        ({"text": "a", "tpot_target_s": float("inf")}, "tpot_target_s: expected seconds above 0"),
        ({"text": "a", "regex": "a", "json_object": True}, "not several"),
        ({"text": "a", "request_class": "urgent"}, None),
        ({"messages": [{"role": "user", "content": "a", "audio": 1}]}, r"messages\[0\]: unknown key 'audio'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text parts"),
        ({"messages": ["hello"]}, None),
    ],
)
def test_options_that_make_no_request_fail_before_anything_is_sent(options: Any, message: str | None) -> None:
    with pytest.raises(ClientError, match=message) as caught:
        module.generate_request(options)
    assert caught.value.code == "invalid_argument"
    assert caught.value.status is None
    assert not caught.value.retryable


def test_a_deadline_that_is_over_is_not_sent_as_none() -> None:
    assert module.generate_request({"text": "a", "deadline_s": 0}).deadline_ms == 1
    assert module.generate_request({"text": "a", "deadline_s": 0.0001}).deadline_ms == 1
    assert module.generate_request({"text": "a", "deadline_s": 1e12}).deadline_ms == 2**32 - 1
    assert module.generate_request({"text": "a"}).deadline_ms == 0


def test_a_target_is_sent_as_whole_milliseconds_and_never_as_0() -> None:
    request = module.generate_request({"text": "a", "ttft_target_s": 1e12, "tpot_target_s": 0.0001})
    assert (request.ttft_target_ms, request.tpot_target_ms) == (2**32 - 1, 1)


async def test_breaking_out_of_the_loop_cancels_the_call() -> None:
    async with FakeRouter(endless) as router, Client(router.address) as client:
        async for event in client.generate(model="toy", text="go"):
            if isinstance(event, Delta):
                break
        gc.collect()
        await asyncio.wait_for(router.cancelled.wait(), TIMEOUT_S)


async def test_leaving_the_context_cancels_the_call() -> None:
    async with FakeRouter(endless) as router, Client(router.address) as client:
        async with client.generate(model="toy", text="go") as generation:
            assert isinstance(await anext(generation), Started)
        await asyncio.wait_for(router.cancelled.wait(), TIMEOUT_S)


async def test_cancelling_the_task_cancels_the_call_and_stays_a_cancellation() -> None:
    seen = asyncio.Event()

    async def read(client: Client) -> None:
        async for event in client.generate(model="toy", text="go"):
            if isinstance(event, Delta):
                seen.set()

    async with FakeRouter(endless) as router, Client(router.address) as client:
        task = asyncio.create_task(read(client))
        await asyncio.wait_for(seen.wait(), TIMEOUT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(router.cancelled.wait(), TIMEOUT_S)


async def test_cancel_from_another_task_is_an_error_not_a_cancellation() -> None:
    seen = asyncio.Event()

    async def read(generation: module.Generation) -> None:
        async for event in generation:
            if isinstance(event, Delta):
                seen.set()

    async with FakeRouter(endless) as router, Client(router.address) as client:
        generation = client.generate(model="toy", text="go")
        task = asyncio.create_task(read(generation))
        await asyncio.wait_for(seen.wait(), TIMEOUT_S)
        generation.cancel()
        generation.cancel()
        with pytest.raises(ClientError) as caught:
            await asyncio.wait_for(task, TIMEOUT_S)
        assert caught.value.code == "cancelled"
        assert caught.value.shown
        await asyncio.wait_for(router.cancelled.wait(), TIMEOUT_S)


async def test_closing_the_client_ends_what_runs() -> None:
    async with FakeRouter(endless) as router:
        client = Client(router.address)
        generation = client.generate(model="toy", text="go")
        await anext(generation)
        await client.close()
        with pytest.raises(ClientError):
            [event async for event in generation]
        await asyncio.wait_for(router.cancelled.wait(), TIMEOUT_S)


async def test_cancelled_before_it_began_nothing_is_sent() -> None:
    async with FakeRouter() as router, Client(router.address) as client:
        generation = client.generate(model="toy", text="go")
        generation.cancel()
        with pytest.raises(ClientError, match="cancelled"):
            await anext(generation)
        assert router.requests == []


async def test_an_ended_generation_stays_ended() -> None:
    async with FakeRouter(two_words) as router, Client(router.address) as client:
        generation = client.generate(model="toy", text="go")
        assert len([event async for event in generation]) == 5
        assert [event async for event in generation] == []


async def test_a_rich_status_becomes_a_typed_error() -> None:
    async def script(_request: Any, context: Any) -> AsyncIterator[fake.Response]:
        await fake.fail(
            context, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="OVERLOADED", retry_s=1.5, field="n"
        )
        yield fake.delta("never")

    async with FakeRouter(script) as router, Client(router.address) as client:
        with pytest.raises(ClientError, match="full") as caught:
            await client.complete(model="toy", text="go")
    error = caught.value
    assert (error.code, error.status) == ("overloaded", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (error.retry_after_s, error.param, error.shown, error.partial) == (1.5, "n", False, None)
    assert error.retryable


async def test_an_error_after_text_keeps_the_text_and_must_not_be_retried() -> None:
    async def script(request: router_pb2.GenerateRequest, context: Any) -> AsyncIterator[fake.Response]:
        yield fake.started(request)
        yield fake.delta("ab", 97, 98)
        yield fake.finish(types_pb2.OUTCOME_WORKER_LOST)
        await fake.fail(context, grpc.StatusCode.UNAVAILABLE, "worker lost", reason="WORKER_LOST")

    async with FakeRouter(script) as router, Client(router.address) as client:
        with pytest.raises(ClientError) as caught:
            await client.complete(model="toy", text="go")
    error = caught.value
    assert error.code == "worker_lost"
    assert not error.retryable
    assert error.partial is not None
    assert error.partial.choices == (Choice("ab", (97, 98), Outcome.WORKER_LOST),)
    assert error.partial.usage is None


@pytest.mark.parametrize(
    ("status", "retry_s", "retryable"),
    [
        (grpc.StatusCode.UNAVAILABLE, 0, True),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 0, False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 0.5, True),
        (grpc.StatusCode.INVALID_ARGUMENT, 0, False),
        (grpc.StatusCode.INTERNAL, 0, False),
    ],
)
async def test_what_may_be_retried(status: grpc.StatusCode, retry_s: float, retryable: bool) -> None:
    async def script(_request: Any, context: Any) -> AsyncIterator[fake.Response]:
        await fake.fail(context, status, "no", retry_s=retry_s)
        yield fake.delta("never")

    async with FakeRouter(script) as router, Client(router.address) as client:
        with pytest.raises(ClientError) as caught:
            await client.complete(model="toy", text="go")
    # With no reason given the code is the status.
    assert caught.value.code == status.name.lower()
    assert caught.value.retryable is retryable


async def test_a_status_with_broken_details_still_stands() -> None:
    async def script(_request: Any, context: Any) -> AsyncIterator[fake.Response]:
        await context.abort(grpc.StatusCode.NOT_FOUND, "gone", (("grpc-status-details-bin", b"\xff\xff"),))
        yield fake.delta("never")

    async with FakeRouter(script) as router, Client(router.address) as client:
        with pytest.raises(ClientError, match="gone") as caught:
            await client.complete(model="toy", text="go")
    assert caught.value.code == "not_found"


async def test_no_router_there() -> None:
    async with FakeRouter() as router:
        address = router.address
    async with Client(address) as client:
        with pytest.raises(ClientError) as caught:
            await client.list_models()
    assert caught.value.code == "unavailable"
    assert caught.value.retryable


async def test_a_router_that_does_not_end_a_call_at_its_deadline_is_cut_off() -> None:
    async with FakeRouter(endless) as router, Client(router.address) as client:
        with pytest.raises(ClientError) as caught:
            await client.complete(model="toy", text="go", deadline_s=0.05)
    assert caught.value.code == "deadline_exceeded"
    assert caught.value.partial is not None
    assert caught.value.partial.text == "a"


async def test_an_outcome_from_the_future_is_not_a_success() -> None:
    async def script(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[fake.Response]:
        yield fake.started(request)
        yield fake.Response(finish=fake.Response.Finish(outcome=99))

    async with FakeRouter(script) as router, Client(router.address) as client:
        answer = await client.complete(model="toy", text="go")
    assert answer.outcome is Outcome.FAILED


async def test_logprobs_come_with_their_bytes() -> None:
    async def script(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[fake.Response]:
        entry = router_pb2.TextLogprobs(
            drawn=router_pb2.TextLogprob(id=1, bytes=b"\xc3", logprob=-0.5),
            top=[router_pb2.TextLogprob(id=2, bytes=b"b", logprob=-0.25)],
        )
        yield fake.Response(delta=fake.Response.Delta(text="a", ids=[1], logprobs=[entry]))
        yield fake.finish()

    async with FakeRouter(script) as router, Client(router.address) as client:
        answer = await client.complete(model="toy", text="go", logprobs=1)
    expected = module.TokenLogprobs(module.Logprob(1, b"\xc3", -0.5), (module.Logprob(2, b"b", -0.25),))
    assert answer.choices[0].logprobs == (expected,)


async def test_models_and_tokens() -> None:
    async with FakeRouter() as router, Client(router.address) as client:
        assert await client.list_models() == (Model("toy", 64, 902, 1, "ab"), Model("other", 64, 902, 1, "ab"))
        assert await client.tokenize(text="a b c") == (0, 1, 2)
        assert await client.tokenize(text="") == ()
        assert await client.tokenize(messages=[{"role": "user", "content": "a b"}], model="other") == (0, 1)
        assert await client.detokenize([104, 105]) == "hi"
        with pytest.raises(ClientError) as caught:
            await client.tokenize(text="a", model="nope")
        assert caught.value.code == "model_not_found"
        with pytest.raises(ClientError, match="text or messages"):
            await client.tokenize()
        with pytest.raises(ClientError):
            await client.detokenize([-1])
