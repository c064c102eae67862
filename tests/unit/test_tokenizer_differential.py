"""Our ids against those of Hugging Face `tokenizers`, on many and on large documents, for each family of models.

The vocabularies are trained here on sources of Python's library and on sentences in many scripts; the embedded model's,
and those that `HEADRACE_TOKENIZER_JSON` names (files, separated by colons), are checked too. `--slow` is the long run:
a hundred times the documents, and megabytes where the short run has some ten thousand bytes.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import Tokenizer

reference = pytest.importorskip("tokenizers")

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SENTENCES = """
Съешь же ещё этих мягких французских булок, да выпей чаю
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία και ταξιδεύω προς το φως
العربية لغة جميلة يتحدث بها كثير من الناس في بلاد بعيدة وقريبة
हिन्दी भाषा भारत में बहुत से लोग बोलते हैं और यह देवनागरी लिपि में लिखी जाती है
ภาษาไทยเป็นภาษาที่มีวรรณยุกต์และไม่มีการเว้นวรรคระหว่างคำในประโยค
日本語の文章には漢字とひらがなとカタカナが混ざっていて、単語の間に空白がありません。
中文的句子由汉字组成，词与词之间没有空格，标点符号也不一样，所以切分并不容易。
한국어 문장은 띄어쓰기를 하지만 조사와 어미가 낱말에 붙어서 형태가 다양합니다
Příliš žluťoučký kůň úpěl ďábelské ódy, Zażółć gęślą jaźń, Tiếng Việt có nhiều dấu thanh
👩‍👩‍👧 🏳️‍🌈 e\u0301 \u1100\u1161\u11a8 ½ Ⅷ ٣٤ ① ∑∫√ ≤≥ ℝ⊂ℂ
""".strip().splitlines()
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


@functools.cache
def corpus() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text("utf-8", "ignore") for path in sorted(folder.glob("[a-d]*.py"))]
    return "".join(sources)[:1_500_000]


def added(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True} | flags


def trained(pre_tokenizer: Any, vocab_size: int, lines: list[str], alphabet: list[str]) -> dict[str, Any]:
    """The model part of a BPE tokenizer trained on these lines."""
    tokenizer = reference.Tokenizer(reference.models.BPE())
    tokenizer.normalizer = None if alphabet else reference.normalizers.Replace(" ", "▁")
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    trainer = reference.trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, limit_alphabet=1000, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return dict(json.loads(tokenizer.to_str())["model"])


def document(model: dict[str, Any], normalizer: Any, pre_tokenizer: Any, decoder: Any) -> str:
    first = max(model["vocab"].values()) + 1
    tokens = [added(model["vocab"].get(text, first + n), text) for n, text in enumerate(SPECIALS)]
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "post_processor": None}
    parts = {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
    return json.dumps(head | parts)


def byte_level(expression: str) -> str:
    lines = corpus()[:300_000].splitlines(keepends=True) + SENTENCES * 20
    level = reference.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = trained(level, 4000, lines, level.alphabet())
    level_json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return document(model, None, {"type": "Sequence", "pretokenizers": [split, level_json]}, level_json)


def sentencepiece(style: str, *, across_words: bool, byte_fallback: bool) -> str:
    lines = corpus()[: 60_000 if across_words else 300_000].splitlines() + SENTENCES[:-3] * 5
    words = None if across_words else reference.pre_tokenizers.Metaspace()
    model = trained(words, 1500 if across_words else 4000, lines, [])
    specials = ["<unk>", "<s>", "</s>"] + ([f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else [])
    vocab = {text: n for n, text in enumerate(dict.fromkeys([*specials, "▁", *model["vocab"]]))}
    model |= {"vocab": vocab, "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": byte_fallback}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": style, "split": style == "always"}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer = {"legacy": {"type": "Sequence", "normalizers": [prepend, replace]}, "none": replace}.get(style)
    decoder = {"type": "Sequence", "decoders": decoders}
    return document(model, normalizer, None if normalizer else metaspace, decoder)


FAMILIES = {
    "cl100k": lambda: byte_level(CL100K),
    "o200k": lambda: byte_level(O200K),
    "llama2": lambda: sentencepiece("legacy", across_words=False, byte_fallback=True),
    "mistral3": lambda: sentencepiece("first", across_words=False, byte_fallback=True),
    "gemma": lambda: sentencepiece("none", across_words=True, byte_fallback=True),
    "unknown": lambda: sentencepiece("always", across_words=True, byte_fallback=False),
}


def unicode_noise(source: random.Random, size: int) -> str:
    limit = source.choice([0x80, 0x800, 0x3000, 0x10000, 0x110000])
    points = (source.randrange(limit) for _ in range(size // 3))
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def code(source: random.Random, size: int) -> str:
    start = source.randrange(len(corpus()) - size) if size < len(corpus()) else 0
    return corpus()[start : start + size]


def scripts(source: random.Random, size: int) -> str:
    parts: list[str] = []
    while sum(map(len, parts)) < size // 2:
        sentence = source.choice(SENTENCES)
        start = source.randrange(len(sentence))
        parts.append(sentence[start : start + source.randrange(60)] + source.choice(["", " ", "\n", "▁", "'s "]))
    return "".join(parts)


def blanks(source: random.Random, size: int) -> str:
    runs = []
    while sum(map(len, runs)) < size:
        blank = source.choice([" ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\x0b", "▁"])
        runs.append(
            blank * source.randrange(1, 1 + source.choice([3, 40, size])) + source.choice(["", "x", "1", ".", "中"])
        )
    return "".join(runs)[:size]


def long_word(source: random.Random, size: int) -> str:
    letters = source.choice(["a", "ab", "abcdefghijklmnopqrstuvwxyz", "éèà", "日本語中文字", "0123456789", "-=", "aA"])
    return "".join(source.choices(letters, k=size // len(letters[0].encode())))


def specials(source: random.Random, size: int) -> str:
    parts = [*SPECIALS, "<|im_", "<unk>", "<0x41>", " ", "\n", "word", " word", "<", "é"]
    return "".join(source.choices(parts, k=size // 5))


KINDS = (unicode_noise, code, scripts, blanks, long_word, specials)


def documents(source: random.Random, slow: bool) -> Iterator[str]:
    for _ in range(6000 if slow else 60):
        yield source.choice(KINDS)(source, source.choice([8, 60, 500, 4000]))
        yield "".join(source.choice(KINDS)(source, source.randrange(4, 40)) for _ in range(6))
    for kind in KINDS:
        yield kind(source, 1_000_000 if slow else 30_000)


def compare(path: Path, slow: bool) -> None:
    ours, theirs = Tokenizer.from_file(path), reference.Tokenizer.from_file(str(path))
    assert ours.plan.startswith("fast:"), ours.plan
    seed = random.randrange(2**32)
    source = random.Random(seed)
    for text in documents(source, slow):
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, f"seed {seed}: {text[:200]!r}, {len(text)} characters"
        if len(text) < 100_000:
            decoder = ours.stream_decoder()
            decoded = decoder.push_all(expected) + decoder.finish()
            assert decoded == theirs.decode(expected), f"seed {seed}: {text[:200]!r}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_document_has_the_ids_and_the_text_of_the_reference(tmp_path: Path, slow: bool, family: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(FAMILIES[family](), encoding="utf-8")
    compare(path, slow)


@pytest.mark.model
def test_every_document_with_the_embedded_vocabulary(slow: bool) -> None:
    models = pytest.importorskip("headrace.models")
    try:
        path = models.prepare("embedded", weights=False).tokenizer_json
    except models.ModelError as error:
        pytest.skip(f"no embedded model: {error}")
    compare(Path(path), slow)


def test_every_document_with_the_named_vocabularies(slow: bool) -> None:
    named = [name for name in os.environ.get("HEADRACE_TOKENIZER_JSON", "").split(":") if name]
    if not named:
        pytest.skip("HEADRACE_TOKENIZER_JSON names no files")
    for name in named:
        compare(Path(name), slow)
