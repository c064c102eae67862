"""A conversation in the terminal, over the native gRPC API.

With a prompt it prints one answer and ends; without, it is a dialogue that keeps what was said. The answer alone goes
to standard output. Ctrl-C stops an answer, not the program; Ctrl-D leaves.

Its place: ``headrace chat``. What it leaves to others: the API (``client.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from headrace.client import Client, ClientError, Delta, GenerateOptions, Usage
from headrace.terminal import harmless, show_error, stderr
from headrace.tls import ClientTls

_HELP = "/reset forgets what was said, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"


@dataclass(frozen=True)
class Settings:
    """What to ask, and how. None = the model's own default."""

    target: str = "127.0.0.1:8081"
    model: str = ""
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    #: Tell counts and times after each answer, on standard error.
    stats: bool = False
    #: None = plain text.
    tls: ClientTls | None = None

    def options(self) -> GenerateOptions:
        """For the client."""
        options: GenerateOptions = {"request_class": "interactive"}
        if self.model:
            options["model"] = self.model
        if self.max_tokens is not None:
            options["max_tokens"] = self.max_tokens
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.seed is not None:
            options["seed"] = self.seed
        return options


@dataclass
class Conversation:
    """What was said so far, in OpenAI's form."""

    system: str = ""
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def asked(self, prompt: str) -> list[dict[str, Any]]:
        """All of it, with this as the next thing that the user says."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.turns, {"role": "user", "content": prompt}]

    def answered(self, prompt: str, answer: str) -> None:
        """Keep a turn. One without any answer never was: many templates insist on taking turns."""
        if answer:
            self.turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


class Voice:
    """Where an answer goes. To a terminal without what could steer it; elsewhere as it is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._clean: Callable[[str], str] = harmless if stream.isatty() else str
        self._last = "\n"

    def say(self, text: str) -> None:
        """Print this part at once. Raises BrokenPipeError when nobody reads any more."""
        self._stream.write(self._clean(text))
        self._stream.flush()
        self._last = text[-1:] or self._last

    def end(self) -> None:
        """An answer is over: the next words begin on a line of their own."""
        if self._last != "\n":
            self.say("\n")


class Chat:
    """One conversation with one model."""

    def __init__(self, settings: Settings, stream: TextIO) -> None:
        self.conversation = Conversation(settings.system)
        self.settings = settings
        self._voice = Voice(stream)
        self._client: Client | None = None

    async def answer(self, prompt: str) -> None:
        """Ask and print. Raises ClientError after what had arrived; what was printed is kept in any case."""
        if self._client is None:
            self._client = Client(self.settings.target, tls=self.settings.tls)
        options = self.settings.options()
        options["messages"] = self.conversation.asked(prompt)
        options["session_id"] = self.conversation.session_id
        said: list[str] = []
        began_s = time.monotonic()
        first_s: float | None = None
        usage: Usage | None = None
        try:
            async with self._client.generate(**options) as generation:
                async for event in generation:
                    if isinstance(event, Delta) and event.choice == 0 and event.text:
                        first_s = first_s if first_s is not None else time.monotonic()
                        said.append(event.text)
                        self._voice.say(event.text)
                    elif isinstance(event, Usage):
                        usage = event
        finally:
            self.conversation.answered(prompt, "".join(said))
            with contextlib.suppress(BrokenPipeError):
                self._voice.end()
        if self.settings.stats and usage is not None:
            stderr().print(_stats(usage, began_s, first_s, time.monotonic()), style="dim")

    async def close(self) -> None:
        """Drop the connection."""
        if self._client is not None:
            await self._client.close()
            self._client = None


def _stats(usage: Usage, began_s: float, first_s: float | None, ended_s: float) -> str:
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    parts = [f"{usage.prompt_tokens} prompt tokens{cached}", f"{usage.completion_tokens} output tokens"]
    if first_s is not None:
        parts.append(f"first after {(first_s - began_s) * 1000:.0f} ms")
        if usage.completion_tokens > 1 and ended_s > first_s:
            parts.append(f"then {(usage.completion_tokens - 1) / (ended_s - first_s):.1f} tokens/s")
    if usage.cached_answer:
        parts.append("from the response cache")
    return ", ".join(parts)


def run_once(settings: Settings, prompt: str) -> int:
    """Answer one prompt; the exit code. Raises ClientError."""
    stream = _text_out()

    async def once() -> None:
        chat = Chat(settings, stream)
        try:
            await chat.answer(prompt)
        finally:
            await chat.close()

    try:
        asyncio.run(once())
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _nobody_reads()
    return 0


def run_dialogue(settings: Settings) -> int:
    """Answer until the user leaves; the exit code."""
    with contextlib.suppress(ImportError):
        # With it, input() has history and editing.
        import readline  # noqa: F401
    try:
        _dialogue(settings, _text_out())
    except BrokenPipeError:
        _nobody_reads()
    return 0


def _dialogue(settings: Settings, stream: TextIO) -> None:
    console = stderr()
    console.print(_HELP, style="dim")
    chat = Chat(settings, stream)
    # A loop for all answers: each run() turns Ctrl-C into the cancellation of just its answer.
    with asyncio.Runner() as runner:
        try:
            while (prompt := _next_prompt(console.print)) is not None:
                if prompt == "/reset":
                    chat.conversation = Conversation(settings.system)
                    console.print("forgotten", style="dim")
                elif prompt.startswith("/"):
                    console.print(_HELP, style="dim")
                else:
                    _one_answer(runner, chat, prompt)
        finally:
            runner.run(chat.close())


def _next_prompt(say: Callable[..., None]) -> str | None:
    """The next thing the user says; None when they leave."""
    while True:
        try:
            prompt = _read_line().strip()
        except EOFError:
            say()
            return None
        except KeyboardInterrupt:
            say()
            continue
        if prompt in ("/quit", "/exit"):
            return None
        if prompt:
            return prompt


def _read_line() -> str:
    if sys.stdout.isatty():
        return input("> ")
    # Standard output is for answers alone.
    sys.stderr.write("> ")
    sys.stderr.flush()
    return input()


def _one_answer(runner: asyncio.Runner, chat: Chat, prompt: str) -> None:
    try:
        runner.run(chat.answer(prompt))
    except KeyboardInterrupt:
        stderr().print("stopped", style="dim")
    except ClientError as error:
        show_error(describe(error, chat.settings.target))


def describe(error: ClientError, target: str) -> str:
    """An error in words that say what to do."""
    if error.code == "unavailable" and not error.shown and not error.from_router:
        # gRPC tells the whole way down to the socket; the last part says why.
        reason = str(error).rpartition(": ")[2]
        return f"no router answers at {target} ({reason}); start one with `headrace up`, or name another with --target"
    if error.code == "context_length_exceeded":
        return f"{error} (/reset forgets what was said)"
    retry = f"; try again in {error.retry_after_s:g} s" if error.retry_after_s else ""
    return f"{error}{retry}"


def _nobody_reads() -> None:
    """`headrace chat … | head` has seen enough. Python would complain once more when it flushes at the end."""
    with contextlib.suppress(OSError):
        sys.stdout.close()


def _text_out() -> TextIO:
    """Standard output; what its encoding lacks is shown as a question mark rather than ending the answer."""
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return sys.stdout
