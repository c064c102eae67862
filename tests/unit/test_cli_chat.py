"""`headrace chat` in a process of its own, with pipes and in a pseudo-terminal, against a scripted router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support import fake_router as fake
from tests.support.fake_router import FakeRouter

from headrace.chat import Conversation
from headrace.terminal import harmless
from headrace.v1 import router_pb2, types_pb2

TIMEOUT_S = 60.0
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "services"), "PYTHONUTF8": "1", "TERM": "dumb"}


async def chat(router: FakeRouter, *arguments: str, **streams: Any) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    streams = {"stdin": asyncio.subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, **streams}
    command = (sys.executable, "-P", "-m", "headrace", "chat", "--target", router.address, *arguments)
    return await asyncio.create_subprocess_exec(*command, env=ENVIRONMENT, **streams)


async def ended(process: asyncio.subprocess.Process, words: bytes | None = None) -> tuple[int | None, str, str]:
    out, err = await asyncio.wait_for(process.communicate(words), TIMEOUT_S)
    return process.returncode, out.decode(), err.decode()


async def hello(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[fake.Response]:
    yield fake.started(request)
    yield fake.delta("Hel", 1)
    yield fake.delta("lo \u2603 \x1b[31m!", 2)
    yield fake.finish()
    yield fake.usage(5, 2, 3)


async def test_one_answer_alone_on_standard_output() -> None:
    async with FakeRouter(hello) as router:
        code, out, err = await ended(
            await chat(router, "hi", "--system", "be brief", "--max-tokens", "9", "--temperature", "0", "--seed", "4")
        )
    # Where it isn't shown by a terminal, text is passed on as it is.
    assert (code, out, err) == (0, "Hello \u2603 \x1b[31m!\n", "")
    (request,) = router.requests
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "be brief"),
        ("user", "hi"),
    ]
    assert (request.model, request.stopping.max_tokens) == ("toy", 9)
    assert (request.sampling.temperature, request.sampling.seed) == (0, 4)
    assert request.session_id
    assert getattr(request, "class") == types_pb2.REQUEST_CLASS_INTERACTIVE


async def test_stats_go_to_standard_error() -> None:
    async with FakeRouter(hello) as router:
        code, out, err = await ended(await chat(router, "hi", "--stats", "--model", "other"))
    assert code == 0
    assert out.startswith("Hello")
    assert err.startswith("5 prompt tokens (2 cached), 3 output tokens, first after ")
    assert router.requests[0].model == "other"


@pytest.mark.parametrize("arguments", [[], ["-"]])
async def test_the_prompt_from_a_pipe(arguments: list[str]) -> None:
    async with FakeRouter(hello) as router:
        process = await chat(router, *arguments, stdin=asyncio.subprocess.PIPE)
        code, out, _ = await ended(process, "wie geht's?\nzweite Zeile ü\n".encode())
    assert (code, out[:5]) == (0, "Hello")
    assert router.requests[0].chat.messages[0].content == "wie geht's?\nzweite Zeile ü\n"


async def test_an_empty_pipe_and_one_with_no_text() -> None:
    async with FakeRouter(hello) as router:
        code, _, err = await ended(await chat(router, stdin=asyncio.subprocess.PIPE), b" \n")
        assert (code, err) == (2, "error: the prompt is empty\n")
        code, _, err = await ended(await chat(router, stdin=asyncio.subprocess.PIPE), b"\xff\xfe")
        assert code == 2
        assert err.startswith("error: standard input is not text")
    assert router.requests == []


async def test_no_router_there() -> None:
    async with FakeRouter() as router:
        pass
    code, out, err = await ended(await chat(router, "hi"))
    assert (code, out) == (1, "")
    assert err.startswith(f"error: no router answers at {router.address} (")
    assert "headrace up" in err
    assert err.count("\n") == 1


async def test_an_error_after_some_text() -> None:
    async def script(request: router_pb2.GenerateRequest, context: Any) -> AsyncIterator[fake.Response]:
        yield fake.started(request)
        yield fake.delta("so far", 1)
        await fake.fail(context, grpc.StatusCode.UNAVAILABLE, "the worker was lost", reason="WORKER_LOST")

    async with FakeRouter(script) as router:
        code, out, err = await ended(await chat(router, "hi"))
    assert (code, out, err) == (1, "so far\n", "error: the worker was lost\n")


async def test_a_router_without_workers_is_a_router() -> None:
    async def script(_request: Any, context: Any) -> AsyncIterator[fake.Response]:
        await fake.fail(context, grpc.StatusCode.UNAVAILABLE, "no worker serves 'toy' now", reason="UNAVAILABLE")
        yield fake.delta("never")

    async with FakeRouter(script) as router:
        code, _, err = await ended(await chat(router, "hi"))
    assert (code, err) == (1, "error: no worker serves 'toy' now\n")


async def test_an_unknown_model_is_the_users_mistake() -> None:
    async def script(_request: Any, context: Any) -> AsyncIterator[fake.Response]:
        await fake.fail(context, grpc.StatusCode.NOT_FOUND, "no model 'nope'", reason="MODEL_NOT_FOUND")
        yield fake.delta("never")

    async with FakeRouter(script) as router:
        code, _, err = await ended(await chat(router, "hi", "--model", "nope"))
    assert (code, err) == (2, "error: no model 'nope'\n")


async def endless(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[fake.Response]:
    yield fake.started(request)
    yield fake.delta("on and on", 1)
    await asyncio.Event().wait()


async def test_interrupting_one_answer_cancels_it() -> None:
    async with FakeRouter(endless) as router:
        process = await chat(router, "hi")
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readexactly(9), TIMEOUT_S) == b"on and on"
        process.send_signal(signal.SIGINT)
        code, out, err = await ended(process)
        assert (code, out, err) == (130, "\n", "")
        await asyncio.wait_for(router.cancelled.wait(), TIMEOUT_S)


async def test_a_reader_that_has_seen_enough() -> None:
    async def script(request: router_pb2.GenerateRequest, _context: Any) -> AsyncIterator[fake.Response]:
        yield fake.started(request)
        while True:
            yield fake.delta("word " * 1000, 1)

    async with FakeRouter(script) as router:
        process = await chat(router, "hi")
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readexactly(10), TIMEOUT_S)
        # As `| head` does.
        process.stdout._transport.close()  # type: ignore[attr-defined]
        assert process.stderr is not None
        assert await asyncio.wait_for(process.stderr.read(), TIMEOUT_S) == b""
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0
        await asyncio.wait_for(router.cancelled.wait(), TIMEOUT_S)


class Terminal:
    """A pseudo-terminal with the program in front of it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.seen = ""
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Terminal:
        asyncio.get_running_loop().add_reader(self.master, self._on_output)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self.master)
        os.close(self.master)

    def _on_output(self) -> None:
        try:
            self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        except OSError:
            asyncio.get_running_loop().remove_reader(self.master)
        task = asyncio.create_task(self._notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def type(self, words: str) -> None:
        os.write(self.master, words.encode())

    async def until(self, there: Callable[[str], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S), self._changed:
            await self._changed.wait_for(lambda: there(self.seen))

    async def interrupt_prompt(self, there: Callable[[str], bool]) -> None:
        """Ctrl-C until it is noticed: between showing its prompt and waiting for a key, readline looks at no signal."""
        while not there(self.seen):
            self.type("\x03")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0), self._changed:
                    await self._changed.wait_for(lambda: there(self.seen))

    async def start(self, router: FakeRouter, *arguments: str) -> asyncio.subprocess.Process:
        # The pseudo-terminal becomes the program's own, so that its Ctrl-C is a real one.
        code = (
            "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        )
        command = (sys.executable, "-c", code, "-P", "-m", "headrace", "chat", "--target", router.address, *arguments)
        streams = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        process = await asyncio.create_subprocess_exec(*command, env=ENVIRONMENT, **streams)
        os.close(self.slave)
        return process


async def test_a_dialogue_remembers_forgets_and_survives_an_interrupt() -> None:
    async def script(request: router_pb2.GenerateRequest, context: Any) -> AsyncIterator[fake.Response]:
        last = request.chat.messages[-1].content
        stream = endless if last == "forever" else failing if last == "fail" else hello
        async for event in stream(request, context):
            yield event

    async def failing(_request: Any, context: Any) -> AsyncIterator[fake.Response]:
        await fake.fail(context, grpc.StatusCode.UNAVAILABLE, "draining", reason="DRAINING", retry_s=2)
        yield fake.delta("never")

    def said(number: int) -> list[str]:
        return [message.content for message in router.requests[number].chat.messages]

    async with FakeRouter(script) as router, Terminal() as terminal:
        process = await terminal.start(router)
        await terminal.until(lambda seen: seen.endswith("> "))
        assert "/reset" in terminal.seen
        terminal.type("one\n")
        # What could steer the terminal is left out.
        await terminal.until(lambda seen: "Hello \u2603 [31m!\r\n> " in seen)
        assert "\x1b[31m!" not in terminal.seen

        terminal.type("forever\n")
        await terminal.until(lambda seen: "on and on" in seen)
        terminal.type("\x03")
        await terminal.until(lambda seen: "stopped" in seen and seen.endswith("> "))
        await asyncio.wait_for(router.cancelled.wait(), TIMEOUT_S)

        terminal.type("fail\n")
        await terminal.until(lambda seen: "error: draining; try again in 2 s" in seen and seen.endswith("> "))

        terminal.type("two\n")
        await terminal.until(lambda seen: seen.count("Hello") == 2 and seen.endswith("> "))
        answer = "Hello \u2603 \x1b[31m!"
        assert said(3) == ["one", answer, "forever", "on and on", "two"]
        assert len({request.session_id for request in router.requests}) == 1

        terminal.type("/reset\n")
        await terminal.until(lambda seen: "forgotten" in seen and seen.endswith("> "))
        await terminal.interrupt_prompt(lambda seen: seen.count("> ") >= 7)
        terminal.type("three\n")
        await terminal.until(lambda seen: seen.count("Hello") == 3 and seen.endswith("> "))
        assert said(4) == ["three"]
        terminal.type("\x04")
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0


async def test_a_dialogue_is_left_by_a_command() -> None:
    async with FakeRouter(hello) as router, Terminal() as terminal:
        process = await terminal.start(router)
        await terminal.until(lambda seen: seen.endswith("> "))
        terminal.type("/what\n")
        await terminal.until(lambda seen: seen.count("/reset forgets") == 2)
        terminal.type("/quit\n")
        assert await asyncio.wait_for(process.wait(), TIMEOUT_S) == 0


def test_a_turn_without_an_answer_never_was() -> None:
    conversation = Conversation("s")
    conversation.answered("a", "")
    conversation.answered("b", "c")
    assert [turn["content"] for turn in conversation.asked("d")] == ["s", "b", "c", "d"]


def test_what_a_terminal_is_shown() -> None:
    assert harmless("a\tb\n\x1b]0;title\x07c\r\x9b31m\x7fü\u2603") == "a\tb\n]0;titlec31mü\u2603"
