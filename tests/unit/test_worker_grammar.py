"""From what clients ask for to GBNF, and what is refused."""

from __future__ import annotations

import json

import pytest

from headrace.worker.engine import Guided
from headrace.worker.grammar import MAX_SOURCE_BYTES, GrammarError, from_regex, to_gbnf


@pytest.mark.parametrize(
    ("pattern", "gbnf"),
    [
        ("abc", '"a" "b" "c"'),
        ("^abc$", '"a" "b" "c"'),
        ("", '""'),
        ("a|bc", '( "a" | "b" "c" )'),
        ("[a-z0-9_]", r"[a-z0-9\x5F]"),
        ("[^ab]", "[^ab]"),
        ("[^a]", "[^a]"),
        (r"\d{3}-\d+", r'( [0-9] ){3,3} "-" ( [0-9] )+'),
        (r"\S", r"[^ \t\n\r]"),
        ("(?:ab)*c?", '( "a" "b" )* ( "c" )?'),
        ("a{2,}", '( "a" ){2,}'),
        ("a+?", '( "a" )+'),
        (".", r"[^\n]"),
        ('é"\\\\', r'"\xE9" "\x22" "\x5C"'),
        ("🙂", r'"\U0001F642"'),
    ],
)
def test_regex(pattern: str, gbnf: str) -> None:
    assert from_regex(pattern) == f"root ::= {gbnf}"


@pytest.mark.parametrize("pattern", ["foo**", "(", "[", "a{3,2}", "(?P<x", "(" * 5000, "a{999999999999}"])
def test_a_regex_that_is_none(pattern: str) -> None:
    with pytest.raises(GrammarError) as caught:
        from_regex(pattern)
    assert not caught.value.unsupported


@pytest.mark.parametrize("pattern", [r"(?=a)b", r"(a)\1", r"\bword", "(?i)abc", "a^b"])
def test_a_regex_that_cannot_be_kept_to_is_named(pattern: str) -> None:
    with pytest.raises(GrammarError) as caught:
        from_regex(pattern)
    assert caught.value.unsupported


def test_repetitions_are_bounded_together() -> None:
    with pytest.raises(GrammarError, match="repeats a part 10000 times"):
        from_regex("((a{100}){100}){100}")


def test_choices_are_literals() -> None:
    gbnf = to_gbnf(Guided("choice", json.dumps(['a"b', "c\nd"])))
    assert gbnf == r'root ::= "a\x22b" | "c\x0Ad"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7", "must be an object"),
        ("{", "not JSON"),
        ('{"type":"string","pattern":"foo**"}', "multiple repeat"),
        ('{"type":"array","items":{"type":"string"},"maxItems":1000000}', "maxItems is 1000000"),
        (json.dumps({"a": "x" * MAX_SOURCE_BYTES}), "the limit is"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested"),
    ],
)
def test_a_schema_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        to_gbnf(Guided("json_schema", text))


@pytest.mark.model
@pytest.mark.parametrize(
    ("guided", "right", "wrong"),
    [
        (Guided("regex", r"(\d{2}|x+)y?"), ["12", "12y", "xxx", "xy"], ["1", "123", "y", "", "12yy"]),
        (Guided("regex", "[^a-c]é🙂"), ["zé🙂"], ["aé🙂", "zé"]),
        (Guided("choice", '["red", "re\\"d"]'), ["red", 're"d'], ["re", "blue"]),
        (Guided("json_object", ""), ["{}", '{"a": [1, 2.5e3, {"b": null}]}', '{"q":"\\u00e9\\n"}'], ["[1]", '{"a":}']),
        (
            Guided("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'),
            ['{"a": 5}'],
            ['{"a": "x"}', "{}"],
        ),
    ],
)
def test_llama_cpp_takes_the_right_texts_and_no_others(guided: Guided, right: list[str], wrong: list[str]) -> None:
    from headrace import models
    from headrace.worker.engines.llama_api import Grammar, Vocabulary

    folder = models.prepare("embedded")
    assert folder.weights is not None
    vocabulary = Vocabulary(folder.weights)
    end = folder.eos_ids[0]

    def takes(text: str) -> bool:
        grammar = Grammar(vocabulary, to_gbnf(guided))
        for token in vocabulary.tokenize(text):
            if not grammar.allows(token):
                return False
            grammar.accept(token)
        return grammar.allows(end)

    assert [text for text in right if not takes(text)] == []
    assert [text for text in wrong if takes(text)] == []
