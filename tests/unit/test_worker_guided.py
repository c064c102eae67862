"""Grammars are compiled apart: whatever happens there is one request's refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace import models
from headrace.v1 import types_pb2
from headrace.worker.engine import Guided
from headrace.worker.guided import GuidedCompiler

pytestmark = pytest.mark.model


@pytest_asyncio.fixture
async def compiler() -> AsyncIterator[GuidedCompiler]:
    weights = models.prepare("embedded").weights
    assert weights is not None
    made = GuidedCompiler(weights, timeout_s=60.0)
    yield made
    await made.close()


def refusal(result: str | types_pb2.Error) -> types_pb2.Error:
    assert isinstance(result, types_pb2.Error)
    assert result.param == "response_format"
    return result


async def test_what_is_right_is_compiled_once(compiler: GuidedCompiler) -> None:
    first, second = await asyncio.gather(*(compiler.compile(Guided("choice", '["a"]')) for _ in range(2)))
    assert first == second == 'root ::= "a"'
    child = compiler._child
    assert child is not None
    child.kill()
    assert await compiler.compile(Guided("choice", '["a"]')) == first


@pytest.mark.parametrize(
    ("guided", "code"),
    [
        (Guided("grammar", "root ::= ("), types_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (Guided("grammar", "root ::= root"), types_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (Guided("grammar", "root ::= other"), types_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (Guided("grammar", 'top ::= "a"'), types_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (Guided("grammar", 'root ::= "a" \0'), types_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (Guided("grammar", ""), types_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (Guided("json_schema", '{"type":"string","pattern":"foo**"}'), types_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (Guided("json_schema", '{"$ref":"https://example.com/x"}'), types_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (Guided("json_schema", '{"$ref":"#/nowhere"}'), types_pb2.ERROR_CODE_INVALID_ARGUMENT),
        (Guided("regex", "(?=a)b"), types_pb2.ERROR_CODE_UNSUPPORTED),
    ],
)
async def test_what_is_wrong_is_refused_and_the_next_is_served(
    compiler: GuidedCompiler, guided: Guided, code: types_pb2.ErrorCode
) -> None:
    assert refusal(await compiler.compile(guided)).code == code
    assert isinstance(await compiler.compile(Guided("regex", "[ab]+")), str)


async def test_a_child_that_dies_costs_one_request(compiler: GuidedCompiler) -> None:
    assert isinstance(await compiler.compile(Guided("regex", "a")), str)
    assert compiler._child is not None
    compiler._child.kill()
    await compiler._child.wait()
    assert isinstance(await compiler.compile(Guided("regex", "b")), str)


async def test_over_the_time_limit(compiler: GuidedCompiler) -> None:
    assert isinstance(await compiler.compile(Guided("regex", "a")), str)
    child = compiler._child
    assert child is not None
    compiler._timeout_s = 0.0
    assert "takes more than" in refusal(await compiler.compile(Guided("regex", "b"))).message
    assert child.returncode is not None, "the child is stopped"
    compiler._timeout_s = 60.0
    assert isinstance(await compiler.compile(Guided("regex", "c")), str)
