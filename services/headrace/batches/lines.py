"""What a line of an input file may be, and how its answer is written: OpenAI's form of both.

A line is ``{"custom_id", "method": "POST", "url", "body"}``. What is wrong with a file is found before anything of it
runs; what only the model's own validation finds (a field of the body, a context that is too small) is that line's
answer, in the error file. Pure: bytes in, values out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from headrace.batches.store import Answer, LineError

#: What a batch may ask.
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")

#: Of what is wrong with a file, so much is told.
MAX_ERRORS = 100

MAX_CUSTOM_ID = 512


@dataclass(frozen=True)
class Line:
    """A request; ``number`` counts from 0."""

    number: int
    custom_id: str
    #: As it is sent.
    body: bytes


@dataclass(frozen=True)
class Bounds:
    """What a file may hold."""

    max_lines: int
    max_line_bytes: int


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that say something, with their numbers in the file, from 0."""
    for number, line in enumerate(lines):
        if text := line.strip():
            yield number, text


def bounded(file: Any, max_line_bytes: int) -> Iterator[bytes]:
    """A file's lines; of one that is too long only as much as shows it."""
    while line := file.readline(max_line_bytes + 2):
        yield line
        while not line.endswith(b"\n") and (line := file.readline(1 << 20)):
            pass


def check(
    lines: Iterable[bytes], endpoint: str, models: Collection[str] | None, bounds: Bounds
) -> tuple[int, list[LineError]]:
    """How many requests there are, and what is wrong, at most ``MAX_ERRORS``. ``models``: those that may be asked."""
    errors: list[LineError] = []
    seen: set[bytes] = set()
    count = 0
    for number, text in numbered(lines):
        count += 1
        if count > bounds.max_lines:
            errors.append(LineError("too_many_lines", f"there are more lines than the limit of {bounds.max_lines}"))
            break
        found = _check_line(text, endpoint, models, bounds, seen)
        if found is not None:
            code, message, param = found
            errors.append(LineError(code, message, number + 1, param))
            if len(errors) >= MAX_ERRORS:
                break
    if count == 0:
        errors.append(LineError("empty_file", "the input file has no line: it needs at least one request"))
    return count, errors


def _check_line(
    text: bytes, endpoint: str, models: Collection[str] | None, bounds: Bounds, seen: set[bytes]
) -> tuple[str, str, str] | None:
    """Code, message and field of what is wrong first."""
    if len(text) > bounds.max_line_bytes:
        return "line_too_long", f"this line is longer than the limit of {bounds.max_line_bytes} bytes", ""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        return "invalid_json_line", "this line is not parseable as valid JSON", ""
    if not isinstance(table, dict):
        return "invalid_json_line", "this line is not a JSON object", ""
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if name not in table:
            return "missing_required_parameter", f"missing required parameter: '{name}'", name
        if not isinstance(table[name], kind):
            return "invalid_type", f"'{name}' must be {'an object' if kind is dict else 'a string'}", name
    custom_id, body = table["custom_id"], table["body"]
    if not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        return "invalid_custom_id", f"custom_id must have 1 to {MAX_CUSTOM_ID} characters", "custom_id"
    # Two ids of the same digest are the same id: 16 bytes a line, however long they are.
    digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in seen:
        return "duplicate_custom_id", "this custom_id is that of another line: each must be unique", "custom_id"
    seen.add(digest)
    if table["method"] != "POST":
        return "invalid_method", "the method must be POST", "method"
    if table["url"] != endpoint:
        return "invalid_url", f"the url does not match the batch's endpoint {endpoint}", "url"
    model = body.get("model")
    if not isinstance(model, str) or not model:
        return "missing_required_parameter", "missing required parameter: 'body.model'", "body.model"
    if models is not None and model not in models:
        return "model_not_found", "the model of this line is not there, or not open to this key", "body.model"
    if body.get("stream"):
        return "invalid_request", "an answer in a batch cannot be streamed", "body.stream"
    return None


def parse(number: int, text: bytes) -> Line:
    """A line that :func:`check` has found nothing wrong with."""
    table = json.loads(text)
    return Line(number, table["custom_id"], json.dumps(table["body"], separators=(",", ":")).encode())


def answered(line: Line, line_id: str, status: int, request_id: str, body: bytes) -> Answer:
    """The answer to a line: to the output file when it succeeded, else to the error file."""
    try:
        content = json.loads(body)
    except ValueError:
        content = {"error": {"message": "the answer is no JSON", "type": "server_error", "param": None, "code": None}}
        status = 500
    response = {"status_code": status, "request_id": request_id, "body": content}
    text = _line(line_id, line.custom_id, response, None)
    usage = content.get("usage") or {} if isinstance(content, dict) else {}
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        line.number,
        200 <= status < 300,
        text,
        int(usage.get("prompt_tokens", 0)),
        int(details.get("cached_tokens", 0) or 0),
        int(usage.get("completion_tokens", 0)),
    )


def not_answered(line: Line, line_id: str, code: str, message: str) -> Answer:
    """A line that was not answered: a line of the error file."""
    return Answer(line.number, False, _line(line_id, line.custom_id, None, {"code": code, "message": message}))


def _line(line_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    table = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(table, separators=(",", ":")).encode()
