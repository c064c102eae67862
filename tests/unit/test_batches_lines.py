"""What a line may be, and how its answer is written."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from headrace.batches import lines
from headrace.batches.lines import Bounds, Line

URL = "/v1/chat/completions"
BOUNDS = Bounds(max_lines=3, max_line_bytes=400)


def line(custom_id: Any = "a", **other: Any) -> bytes:
    table = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "toy", "messages": []}} | other
    return json.dumps({name: value for name, value in table.items() if value is not None}).encode()


def found(*texts: bytes, models: set[str] | None = None) -> tuple[int, list[tuple[str, int]]]:
    file = io.BytesIO(b"\n".join(texts))
    count, errors = lines.check(lines.bounded(file, BOUNDS.max_line_bytes), URL, models, BOUNDS)
    return count, [(error.code, error.line) for error in errors]


def test_a_good_file_has_no_errors_and_blank_lines_are_none() -> None:
    assert found(line("a"), b"", b"  \r", line("b"), b"") == (2, [])
    assert found(line("a"), models={"toy"}) == (1, [])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (b"[" * 300, "invalid_json_line"),
        (line("a"), "duplicate_custom_id"),
        (line(None), "missing_required_parameter"),
        (line("b", body=None), "missing_required_parameter"),
        (line("b", body=[]), "invalid_type"),
        (line(7), "invalid_type"),
        (line(""), "invalid_custom_id"),
        (line("b", method="GET"), "invalid_method"),
        (line("b", url="/v1/embeddings"), "invalid_url"),
        (line("b", body={"messages": []}), "missing_required_parameter"),
        (line("b", body={"model": "other"}), "model_not_found"),
        (line("b", body={"model": "toy", "stream": True}), "invalid_request"),
        (line("b", body={"model": "toy", "prompt": "x" * 400}), "line_too_long"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: bytes, code: str) -> None:
    assert found(line("a"), text, line("c"), models={"toy"}) == (3, [(code, 2)])


def test_a_file_has_at_least_one_line_and_not_too_many() -> None:
    assert found() == (0, [("empty_file", 0)])
    assert found(*(line(str(each)) for each in range(4))) == (4, [("too_many_lines", 0)])
    bounds = Bounds(max_lines=10_000, max_line_bytes=400)
    _, errors = lines.check((b"x" for _ in range(5000)), URL, None, bounds)
    assert len(errors) == lines.MAX_ERRORS


def test_an_endless_line_is_never_held_whole() -> None:
    class Endless(io.RawIOBase):
        left = 50 * 2**20

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert 0 < size <= 2**20
            take = min(size, self.left)
            self.left -= take
            return b"x" * take

    read = list(lines.bounded(Endless(), 100))
    assert [len(each) for each in read] == [102]


def test_answers_have_openais_form() -> None:
    asked = Line(4, "mine", b"{}")
    body = {"id": "chat-1", "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    answer = lines.answered(asked, "batch_req_1", 200, "req-1", json.dumps(body).encode())
    assert (answer.line, answer.succeeded, answer.prompt_tokens, answer.completion_tokens) == (4, True, 7, 3)
    assert json.loads(answer.body) == {
        "id": "batch_req_1",
        "custom_id": "mine",
        "response": {"status_code": 200, "request_id": "req-1", "body": body},
        "error": None,
    }
    assert b"\n" not in answer.body
    refused = lines.answered(asked, "batch_req_1", 400, "req-1", b'{"error": {"message": "no"}}')
    assert (refused.succeeded, json.loads(refused.body)["response"]["status_code"]) == (False, 400)
    assert not lines.answered(asked, "batch_req_1", 200, "req-1", b"no json").succeeded
    late = lines.not_answered(asked, "batch_req_1", "batch_expired", "too late")
    assert json.loads(late.body)["error"] == {"code": "batch_expired", "message": "too late"}
