"""From what a client asks for (JSON schema, regular expression, choices) to GBNF, llama.cpp's grammar notation. Pure.

All of it is untrusted text: it is bounded here, and compiled in a process of its own (``guided.py``). What cannot be
expressed is refused by name, never dropped.
"""

from __future__ import annotations

import json
import re
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from headrace.worker.engine import Guided

MAX_SOURCE_BYTES = 64 * 1024
MAX_GBNF_BYTES = 512 * 1024
#: Copies of one part, over all nested repetitions: each becomes rules of its own.
_MAX_REPEAT = 2000
_MAX_DEPTH = 64

#: Any JSON object. White space is bounded, so that a model that likes it comes to an end.
JSON_OBJECT_GBNF = r"""root ::= object
value ::= object | array | string | number | ("true" | "false" | "null")
object ::= "{" ws ( string ws ":" ws value ws ( "," ws string ws ":" ws value ws )* )? "}"
array ::= "[" ws ( value ws ( "," ws value ws )* )? "]"
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" ( ["\\bfnrt/] | "u" [0-9a-fA-F]{4} ) )* "\""
number ::= "-"? ( [0-9] | [1-9] [0-9]{0,15} ) ( "." [0-9]{1,16} )? ( [eE] [-+]? [0-9]{1,3} )?
ws ::= | " " | "\n" [ \t]{0,20}
"""


class GrammarError(Exception):
    """The text cannot be used; says why, for the client. ``unsupported``: it is right, but this engine cannot do it."""

    def __init__(self, message: str, *, unsupported: bool = False) -> None:
        super().__init__(message)
        self.unsupported = unsupported


def to_gbnf(guided: Guided) -> str:
    """The grammar. Raises GrammarError."""
    size = len(guided.text.encode())
    if size > MAX_SOURCE_BYTES:
        raise GrammarError(f"{guided.kind} has {size} bytes, the limit is {MAX_SOURCE_BYTES}")
    makers = {
        "json_schema": _from_schema,
        "json_object": lambda text: JSON_OBJECT_GBNF,
        "regex": from_regex,
        "grammar": lambda text: text,
        "choice": _from_choices,
    }
    try:
        gbnf: str = makers[guided.kind](guided.text)
    except RecursionError as error:
        raise GrammarError(f"{guided.kind} is nested too deeply") from error
    if not gbnf.strip():
        # llama.cpp takes the empty text for "no grammar at all".
        raise GrammarError(f"{guided.kind} is empty")
    if len(gbnf.encode()) > MAX_GBNF_BYTES:
        raise GrammarError(f"{guided.kind} makes a grammar of over {MAX_GBNF_BYTES} bytes")
    return gbnf


def _from_choices(text: str) -> str:
    choices = json.loads(text)
    if not choices:
        raise GrammarError("choice has no texts")
    return "root ::= " + " | ".join(_literal(choice) for choice in choices)


def _from_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"json_schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError(f"json_schema must be an object, got {type(schema).__name__}")
    _check_schema(schema, 0)
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        return str(json_schema_to_gbnf(text))
    except Exception as error:  # The converter raises whatever it stumbles over.
        raise GrammarError(f"json_schema cannot be used: {error}") from error


def _check_schema(node: Any, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise GrammarError(f"json_schema is nested more than {_MAX_DEPTH} deep")
    if isinstance(node, list):
        for each in node:
            _check_schema(each, depth + 1)
    elif isinstance(node, dict):
        if isinstance(pattern := node.get("pattern"), str):
            try:
                # Also for the refusals: the converter lets through what it doesn't understand.
                from_regex(pattern.removeprefix("^").removesuffix("$"))
            except GrammarError as error:
                raise GrammarError(
                    f"json_schema: pattern {pattern!r}: {error}", unsupported=error.unsupported
                ) from error
        for key in ("minLength", "maxLength", "minItems", "maxItems"):
            bound = node.get(key)
            if isinstance(bound, int) and not isinstance(bound, bool) and bound > _MAX_REPEAT:
                raise GrammarError(f"json_schema: {key} is {bound}, the limit is {_MAX_REPEAT}")
        for each in node.values():
            _check_schema(each, depth + 1)


# --- regular expressions ----------------------------------------------------------------------------------------------

_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"0-9",
    sre.CATEGORY_WORD: r"a-zA-Z0-9_",
    sre.CATEGORY_SPACE: r" \t\n\r",
}
_NOT_CATEGORIES = {
    sre.CATEGORY_NOT_DIGIT: sre.CATEGORY_DIGIT,
    sre.CATEGORY_NOT_WORD: sre.CATEGORY_WORD,
    sre.CATEGORY_NOT_SPACE: sre.CATEGORY_SPACE,
}


def from_regex(pattern: str) -> str:
    """A grammar of the texts that match the whole pattern (Python's syntax; classes like ``\\d`` are ASCII)."""
    try:
        tree = sre_parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise GrammarError(f"regex {pattern[:100]!r} is not valid: {error}") from error
    if tree.state.flags & (re.IGNORECASE | re.MULTILINE | re.VERBOSE | re.LOCALE):
        raise GrammarError("regex flags are not supported", unsupported=True)
    items = list(tree)
    # Anchors at the ends say what is meant anyway.
    if items and items[0] in ((sre.AT, sre.AT_BEGINNING), (sre.AT, sre.AT_BEGINNING_STRING)):
        items = items[1:]
    if items and items[-1] in ((sre.AT, sre.AT_END), (sre.AT, sre.AT_END_STRING)):
        items = items[:-1]
    return "root ::= " + _sequence(items, bool(tree.state.flags & re.DOTALL), 1, 0)


def _sequence(items: Any, dotall: bool, copies: int, depth: int) -> str:
    if depth > _MAX_DEPTH:
        raise GrammarError(f"regex is nested more than {_MAX_DEPTH} deep")
    return " ".join(_item(operator, argument, dotall, copies, depth) for operator, argument in items) or '""'


def _item(operator: Any, argument: Any, dotall: bool, copies: int, depth: int) -> str:
    if operator is sre.LITERAL:
        return _literal(chr(argument))
    if operator is sre.NOT_LITERAL:
        return f"[^{_in_class(argument)}]"
    if operator is sre.ANY:
        return r"[^\x00]" if dotall else r"[^\n]"
    if operator is sre.IN:
        return _class(argument)
    if operator is sre.BRANCH:
        return "( " + " | ".join(_sequence(branch, dotall, copies, depth + 1) for branch in argument[1]) + " )"
    if operator is sre.SUBPATTERN:
        _, add, remove, inner = argument
        if add or remove:
            raise GrammarError("regex flags are not supported", unsupported=True)
        return "( " + _sequence(inner, dotall, copies, depth + 1) + " )"
    if operator in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        return _repeat(argument, dotall, copies, depth)
    raise GrammarError(f"regex: {str(operator).lower()} is not supported", unsupported=True)


def _repeat(argument: Any, dotall: bool, copies: int, depth: int) -> str:
    low, high, inner = argument
    most = low if high is sre.MAXREPEAT else high
    copies *= max(int(most), 1)
    if copies > _MAX_REPEAT:
        raise GrammarError(f"regex repeats a part {copies} times, the limit is {_MAX_REPEAT}")
    part = "( " + _sequence(inner, dotall, copies, depth + 1) + " )"
    if high is sre.MAXREPEAT:
        return part + {0: "*", 1: "+"}.get(int(low), f"{{{low},}}")
    return part + ("?" if (low, high) == (0, 1) else f"{{{low},{high}}}")


def _class(items: Any) -> str:
    negated = items[0][0] is sre.NEGATE
    parts = []
    for operator, argument in items[1:] if negated else items:
        if operator is sre.LITERAL:
            parts.append(_in_class(argument))
        elif operator is sre.RANGE:
            parts.append(f"{_in_class(argument[0])}-{_in_class(argument[1])}")
        elif operator is sre.CATEGORY and argument in _CATEGORIES:
            parts.append(_CATEGORIES[argument])
        elif operator is sre.CATEGORY and argument in _NOT_CATEGORIES and len(items) == 1:
            return f"[^{_CATEGORIES[_NOT_CATEGORIES[argument]]}]"
        else:
            raise GrammarError(f"regex: {str(argument).lower()} in a set is not supported", unsupported=True)
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _in_class(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return _escape(code)


def _escape(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _literal(text: str) -> str:
    safe = (
        c if c.isascii() and (c.isalnum() or c in " .,:;_-+*/=<>()[]{}|!?@#$%&'~^`") else _escape(ord(c)) for c in text
    )
    return '"' + "".join(safe) + '"'
