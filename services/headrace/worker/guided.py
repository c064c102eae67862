"""Compiles grammars apart from everything else: in a child process, with limits, before a request is admitted.

A grammar is a stranger's text that goes through a parser in C++. Whatever it does there (crash, loop, eat memory)
ends in the child; the request is refused and a new child is started for the next. Only text that has passed reaches
the engine's process. Results, also refusals, are kept, so that a schema used again costs nothing.

``python -m headrace.worker.guided WEIGHTS`` is the child: a JSON line in, a JSON line out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import sys
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import error
from headrace.v1 import types_pb2
from headrace.worker.engine import Guided
from headrace.worker.grammar import MAX_GBNF_BYTES, GrammarError, to_gbnf

if TYPE_CHECKING:
    from headrace.worker.engines.llama_api import Grammar

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 60.0
_WALK_STEPS = 8
_MEMORY_BYTES = 4 * 2**30
_MAX_KEPT = 256
#: Requests that wait for the one child.
_MAX_WAITING = 32


class GuidedCompiler:
    """The parent's side. All on the event loop."""

    def __init__(self, weights: Path, *, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self._weights = weights
        self._timeout_s = timeout_s
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._kept: OrderedDict[Guided, str | types_pb2.Error] = OrderedDict()

    async def compile(self, guided: Guided) -> str | types_pb2.Error:
        """GBNF that llama.cpp accepts, or why there is none."""
        if (known := self._kept.get(guided)) is not None:
            self._kept.move_to_end(guided)
            return known
        if self._waiting >= _MAX_WAITING:
            return error(types_pb2.ERROR_CODE_OVERLOADED, "too many grammars wait to be compiled", retryable=True)
        self._waiting += 1
        try:
            async with self._turn:
                result = self._kept.get(guided) or await self._ask(guided)
        finally:
            self._waiting -= 1
        self._kept[guided] = result
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return result

    async def close(self) -> None:
        """Ends the child."""
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
        if child is not None:
            await child.wait()

    async def _ask(self, guided: Guided) -> str | types_pb2.Error:
        try:
            child = await self._started()
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps({"kind": guided.kind, "text": guided.text}).encode() + b"\n")
            line = await asyncio.wait_for(child.stdout.readline(), self._timeout_s)
            answer = json.loads(line) if line else None
        except TimeoutError:
            await self.close()
            return _refusal(guided, f"takes more than {self._timeout_s:g} s to compile")
        except asyncio.CancelledError:
            # The answer to this question must not be read as the answer to the next.
            await self.close()
            raise
        except (OSError, ValueError) as failure:
            log.warning("the grammar compiler failed: %s", failure)
            answer = None
        if answer is None:
            await self.close()
            return _refusal(guided, "cannot be compiled")
        if "gbnf" in answer:
            return str(answer["gbnf"])
        return _refusal(guided, answer["error"], unsupported=answer["unsupported"])

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None:
            # Its package path is this process's, also where headrace is not installed.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            command = [sys.executable, "-m", "headrace.worker.guided", str(self._weights)]
            pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            self._child = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=none, env=environment, limit=2 * MAX_GBNF_BYTES
            )
            assert self._child.stdout is not None
            try:
                await asyncio.wait_for(self._child.stdout.readline(), _START_TIMEOUT_S)
            except TimeoutError as failure:
                await self.close()
                raise OSError("it does not start") from failure
        return self._child


def _refusal(guided: Guided, why: str, *, unsupported: bool = False) -> types_pb2.Error:
    code = types_pb2.ERROR_CODE_UNSUPPORTED if unsupported else types_pb2.ERROR_CODE_INVALID_ARGUMENT
    text = why if why.startswith(guided.kind) else f"{guided.kind} {why}"
    return error(code, text, param="response_format")


def _walk(grammar: Grammar) -> None:
    """Takes a few steps with the whole vocabulary: what would be slow in the engine is slow here first."""
    for _ in range(_WALK_STEPS):
        allowed = grammar.next_ids()
        if not allowed.size:
            return
        token = int(allowed[len(allowed) // 2])
        grammar.accept(token)
        if grammar.is_end(token):
            return


def _child_main(weights: str) -> None:
    from headrace import models
    from headrace.worker.engines import llama_api

    # Of its own address space, model mapped: enough for any grammar that is worth having.
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    models.quiet_llama_cpp()
    vocabulary = llama_api.Vocabulary(Path(weights))
    answers = sys.stdout
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        guided = Guided(**json.loads(line))
        try:
            gbnf = to_gbnf(guided)
            _walk(llama_api.Grammar(vocabulary, gbnf))
            answer: dict[str, object] = {"gbnf": gbnf}
        except GrammarError as refused:
            answer = {"error": str(refused), "unsupported": refused.unsupported}
        except (ValueError, MemoryError, RecursionError) as failure:
            answer = {"error": f"cannot be compiled: {failure}", "unsupported": False}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _child_main(sys.argv[1])
