"""gRPC at its edges: limits on purpose, statuses that keep their meaning, streams that do not hold each other up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from headrace.v1 import router_pb2, types_pb2, worker_pb2
from tests.support.clients import MODES, STREAMED, GrpcAnswer, http, native
from tests.support.http2 import CANCEL, DATA, NO_ERROR, REFUSED_STREAM, Peer
from tests.support.mesh import Lab
from tests.support.waiting import eventually


@pytest.mark.parametrize("mode", MODES)
async def test_a_prompt_of_five_megabytes(lab: Lab, mode: str) -> None:
    await lab.worker("toy-long")
    lab.play("'ok'; END")
    text = "x" * 5_000_000
    answer = (await lab.ask(text, mode=mode, timeout_s=60)).succeeded()
    assert (answer.text, answer.usage) == ("ok", (5_000_000, 2, 5_000_002))
    assert len(lab.journal[0].submit.prompt_ids) == 5_000_000


def told_over_the_limit(address: str) -> bytes:
    """What a client reads that sends on as long as it can; asyncio would drop the answer when a write fails."""
    body = b'{"model":"toy-long","messages":[{"role":"user","content":"' + b"x" * (17 * 2**20) + b'"}]}'
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        with contextlib.suppress(ConnectionError):
            sock.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        return sock.recv(65536)


async def test_above_the_limit_is_refused_at_once(lab: Lab) -> None:
    await lab.worker("toy-long")
    answer = await lab.ask("x" * (17 * 2**20), mode="grpc", timeout_s=60)
    assert answer.grpc_status is grpc.StatusCode.RESOURCE_EXHAUSTED
    told = await asyncio.to_thread(told_over_the_limit, lab.mesh.http)
    assert told.startswith(b"HTTP/1.1 413 ")
    assert b'"too_large"' in told
    assert lab.journal == []
    assert lab.books.asks == {}


@pytest.mark.parametrize("mode", MODES)
async def test_a_reply_of_eight_megabytes(lab: Lab, mode: str) -> None:
    """Many log-probabilities."""
    await lab.worker("toy-long")
    ids = 6000
    lab.play("; ".join(["'" + "x" * 200 + "'"] * (ids // 200)) + "; END")
    params = {"logprobs": True, "top_logprobs": 20}
    answer = (await lab.ask("go", params, mode=mode, timeout_s=60)).succeeded()
    assert answer.text == "x" * ids
    assert len(answer.logprobs[0]) == ids
    assert all(len(entry["top_logprobs"]) == 20 for entry in answer.logprobs[0])


async def test_the_calls_deadline_ends_it_as_a_deadline(lab: Lab) -> None:
    await lab.worker()
    lab.play("'a'; HANG")
    request = native({"model": "toy", "messages": [{"role": "user", "content": "go"}]})
    # The client's own timer is kept out of it: the header alone goes over the wire.
    call = lab.client.stub.Generate(request, metadata=[("x-test", "1")], timeout=0.5)
    answer = await GrpcAnswer(call).rest()
    assert answer.grpc_status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer.text == "a"
    entry = await lab.entry()
    assert entry.time_left_ms is not None
    assert entry.time_left_ms <= 500
    await entry.ended()
    assert entry.cancelled


@pytest.mark.parametrize("mode", MODES)
async def test_a_deadline_in_mid_answer_keeps_the_partial_answer(lab: Lab, mode: str) -> None:
    await lab.worker()
    lab.play("'ab'; HANG")
    answer = await lab.ask("go", mode=mode, headers={"x-headrace-deadline-ms": "400"})
    if mode == "plain":
        answer.refused(504, code="deadline_exceeded")
    else:
        answer.broken("deadline", "deadline_exceeded")
        assert answer.text == "ab"
    entry = await lab.entry()
    await entry.ended()
    assert entry.cancelled
    assert entry.time_left_ms is not None
    assert entry.time_left_ms <= 400
    (release,) = await lab.released()
    assert release.outcome == types_pb2.OUTCOME_DEADLINE


@pytest.mark.parametrize("mode", MODES)
async def test_a_deadline_holds_in_the_queue(lab: Lab, mode: str) -> None:
    await lab.worker(slots=1)
    lab.play("'a'; END", gated=True)
    first = await lab.open("first", mode="stream")
    entry = await lab.entry()
    answer = await lab.ask("second", mode=mode, headers={"x-headrace-deadline-ms": "300"})
    # Told at once that it cannot be in time, or when its time was over.
    assert answer.status in (503, 504, 429)
    answer.refused(answer.status)
    entry.release(2)
    (await first.rest()).succeeded()
    await lab.nothing_remains()
    assert len(lab.journal) == 1


@pytest.mark.parametrize("mode", ["plain", "stream"])
@pytest.mark.parametrize(("value", "status"), [("0", 504), ("-5", 400), ("soon", 400), ("99999999999", 400)])
async def test_deadlines_that_are_none(lab: Lab, mode: str, value: str, status: int) -> None:
    await lab.worker()
    (await lab.ask("go", mode=mode, headers={"x-headrace-deadline-ms": value})).refused(status)
    assert lab.journal == []
    assert lab.books.asks == {}


@pytest.mark.parametrize("mode", STREAMED)
async def test_a_peer_that_resets_before_any_status_is_an_error(lab: Lab, mode: str) -> None:
    worker = await lab.worker()
    lab.play("'a'; HANG", gated=True)
    answer = await lab.open("go", mode=mode)
    entry = await lab.entry()
    entry.release()
    assert await answer.piece() == "a"
    await worker.cut_links(grpc.StatusCode.CANCELLED)
    (await answer.rest()).broken("worker_lost")


@pytest.fixture
async def peer(lab: Lab) -> AsyncIterator[Peer]:
    """A worker of the fleet whose every frame is the test's."""
    peer = await Peer().start()
    await lab.worker(served_by=peer)
    yield peer
    await peer.stop()


RESETS = {"CANCEL": CANCEL, "NO_ERROR": NO_ERROR, "REFUSED_STREAM": REFUSED_STREAM}


@pytest.mark.parametrize("mode", STREAMED)
@pytest.mark.parametrize("code", RESETS)
async def test_a_reset_in_mid_answer_is_no_end(lab: Lab, peer: Peer, mode: str, code: str) -> None:
    answer = await lab.open("go", mode=mode)
    connection, stream, submit = await peer.submits.get()
    peer.tell(connection, stream, submit, 0, b"ab")
    assert await answer.piece() == "ab"
    connection.reset(stream, RESETS[code])
    (await answer.rest()).broken("worker_lost")


@pytest.mark.parametrize("code", RESETS)
async def test_a_reset_before_anything_is_tried_elsewhere(lab: Lab, peer: Peer, code: str) -> None:
    asked = asyncio.create_task(lab.ask("go", mode="plain"))
    connection, stream, _ = await peer.submits.get()
    await lab.worker()
    lab.play("'ok'; END")
    peer.refuse = RESETS[code]
    connection.reset(stream, RESETS[code])
    assert (await asked).succeeded().text == "ok"


async def test_a_connection_that_grows_old_finishes_what_runs(lab: Lab, peer: Peer) -> None:
    """GOAWAY, as at the end of a connection's age: the stream goes on to its end, later ones take a new connection."""
    answer = await lab.open("go", mode="stream")
    connection, stream, submit = await peer.submits.get()
    peer.tell(connection, stream, submit, 0, b"a")
    assert await answer.piece() == "a"
    connection.go_away(stream)
    peer.tell(connection, stream, submit, 1, b"b")
    end = worker_pb2.TokenDelta.Finish(outcome=types_pb2.OUTCOME_STOP)
    delta = worker_pb2.TokenDelta(request=submit.request, epoch=submit.epoch, first_index=2, finish=end)
    peer.say(connection, stream, worker_pb2.RunResponse(iteration=3, deltas=[delta]))
    assert (await answer.rest()).succeeded().text == "ab"
    connection.close()
    asked = asyncio.create_task(lab.ask("go", mode="plain"))
    newer, stream, submit = await asyncio.wait_for(peer.submits.get(), 10)
    assert newer is not connection
    peer.tell(newer, stream, submit, 0, b"c")
    delta = worker_pb2.TokenDelta(request=submit.request, epoch=submit.epoch, first_index=1, finish=end)
    peer.say(newer, stream, worker_pb2.RunResponse(iteration=2, deltas=[delta]))
    assert (await asked).succeeded().text == "c"


async def test_a_workers_message_over_the_limit_is_not_gathered(lab: Lab, peer: Peer) -> None:
    answer = await lab.open("go", mode="stream")
    connection, stream, submit = await peer.submits.get()
    peer.tell(connection, stream, submit, 0, b"a")
    assert await answer.piece() == "a"
    connection.send(DATA, stream, b"\x00" + struct.pack(">I", 2**31 - 1) + b"\x0a")
    (await answer.rest()).broken("worker_lost")


async def test_a_clean_end_of_the_workers_stream_is_not_the_end_of_the_answer(lab: Lab) -> None:
    worker = await lab.worker()
    lab.play("'a'; HANG")
    answer = await lab.open("go", mode="stream")
    assert await answer.piece() == "a"
    await worker.cut_links(None)
    (await answer.rest()).broken("worker_lost")


async def test_a_cancelled_call_stops_a_handler_that_waits_to_write(lab: Lab) -> None:
    await lab.worker("toy-long", slots=2)
    step = f"[{' '.join(['1000'] * 20)}]"
    # Less than a slow reader is allowed to leave unread, but far more than the connection takes.
    lab.play("; ".join([step] * 190) + "; HANG")
    answer = await lab.open("go", mode="grpc")
    assert await answer.piece()
    entry = await lab.entry()
    answer.leave()
    await entry.ended()
    assert entry.cancelled
    await lab.nothing_remains()


STATUSES = {
    "INVALID_ARGUMENT": (grpc.StatusCode.INVALID_ARGUMENT, 400),
    "UNAUTHENTICATED": (grpc.StatusCode.UNAUTHENTICATED, 401),
    "PERMISSION_DENIED": (grpc.StatusCode.PERMISSION_DENIED, 403),
    "NOT_FOUND": (grpc.StatusCode.NOT_FOUND, 404),
    "RATE_LIMIT_EXCEEDED": (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    "TOO_LARGE": (grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
    "UNAVAILABLE": (grpc.StatusCode.UNAVAILABLE, 503),
    "DEADLINE_EXCEEDED": (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    "INTERNAL": (grpc.StatusCode.INTERNAL, 500),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("code", STATUSES)
async def test_a_status_keeps_its_meaning(lab: Lab, mode: str, code: str) -> None:
    await lab.worker()
    lab.play(f"ERR:{code}")
    answer = await lab.ask("go", mode=mode)
    status, http_status = STATUSES[code]
    answer.refused(http_status)
    if mode == "grpc":
        assert answer.grpc_status is status
    lab.bench.clear()


@pytest.mark.parametrize("reader", ["stream", "grpc"])
async def test_a_reader_that_stops_does_not_stop_its_neighbours(lab: Lab, reader: str) -> None:
    """Twenty other streams on the same connection."""
    await lab.worker("toy-long", slots=21)
    step = f"[{' '.join(['1000'] * 20)}]"
    lab.bench.play_for("stuck", "; ".join([step] * 3000) + "; HANG")
    stuck = await lab.open("stuck", mode=reader, receive_buffer=4096)
    assert await stuck.piece()
    for number in range(20):
        lab.bench.play_for(f"n{number}", "'a'; +5; 'b'; +5; 'c'; END")
    others = await asyncio.gather(*(lab.ask(f"n{number}", mode="grpc") for number in range(20)))
    assert [answer.succeeded().text for answer in others] == ["abc"] * 20
    stuck.leave()


async def test_a_hundred_streams_on_one_connection(lab: Lab) -> None:
    await lab.worker(slots=100)
    for number in range(100):
        lab.bench.play_for(f"n{number}", f"'{number}'; 'x'; END")
    answers = await asyncio.gather(*(lab.ask(f"n{number}", mode="grpc") for number in range(100)))
    assert [answer.succeeded().text for answer in answers] == [f"{number}x" for number in range(100)]


async def test_health_and_reflection(lab: Lab) -> None:
    await lab.worker()
    stub = health_pb2_grpc.HealthStub(lab.client.channel)
    for service in ("", "headrace.v1.InferenceService"):

        async def serving(service: str = service) -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        await eventually(serving, f"{service!r} is serving", 2)
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await stub.Check(health_pb2.HealthCheckRequest(service="nope"))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    # The messages of v1 are those of v1alpha, which is what the Python package has.
    calls = lab.client.channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    listed = [service.name async for reply in calls for service in reply.list_services_response.service]
    assert "headrace.v1.InferenceService" in listed


async def test_the_small_calls_of_the_native_api(lab: Lab) -> None:
    await lab.worker()
    stub = lab.client.stub
    made = await stub.Tokenize(router_pb2.TokenizeRequest(model="toy", text="é!"))
    assert (list(made.ids), made.context_tokens) == ([195, 169, 33], 64)
    text = await stub.Detokenize(router_pb2.DetokenizeRequest(model="toy", ids=[195, 169, 33]))
    assert text.text == "é!"
    for call in (
        stub.Tokenize(router_pb2.TokenizeRequest(model="nope", text="x")),
        stub.Detokenize(router_pb2.DetokenizeRequest(model="nope", ids=[1])),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await call
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError) as bad:
        await stub.Detokenize(router_pb2.DetokenizeRequest(model="toy", ids=[999999]))
    assert bad.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_prompt_in_text_or_ids(lab: Lab) -> None:
    await lab.worker()
    for request in (
        router_pb2.GenerateRequest(model="toy", text="abc"),
        router_pb2.GenerateRequest(model="toy", ids=router_pb2.TokenIds(ids=[97, 98, 99])),
    ):
        lab.play("'ok'; END")
        assert (await GrpcAnswer(lab.client.stub.Generate(request)).rest()).succeeded().text == "ok"
    assert [entry.prompt_ids for entry in lab.journal] == [[97, 98, 99]] * 2
    bad = router_pb2.GenerateRequest(model="toy", ids=router_pb2.TokenIds(ids=[999999]))
    (await GrpcAnswer(lab.client.stub.Generate(bad)).rest()).refused(400)


@pytest.mark.parametrize("given", ["my-own-id", ""])
async def test_request_ids_are_given_back_or_made(lab: Lab, given: str) -> None:
    await lab.worker()
    body = {"model": "toy", "messages": [{"role": "user", "content": "go"}]}
    status, headers, _ = await http(lab.mesh.http, "POST", "/v1/chat/completions", body, {"x-request-id": given})
    assert status == 200
    assert headers["x-request-id"]
    if given:
        assert headers["x-request-id"] == given
        assert lab.journal[0].submit.request_id == given
