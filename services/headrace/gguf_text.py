"""The text side of a GGUF file: its vocabulary as a ``tokenizer.json``, its chat template, its special ids.

The tokenizer written here and the one inside the GGUF must give the same ids for every text. That is known only for
SentencePiece's BPE and for the byte-level pre-tokenizers listed below; any other is refused by name rather than
guessed, and so is a vocabulary whose merges have no order. It is written by hand rather than by a tokenizer library, so
that its hash, by which router and worker know that they speak of the same tokenizer, does not depend on that library's
version. Used by ``models.py``, once for each file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.sampling_defaults import GGUF_KEYS, recommended

#: Weight formats by the numbers of ``general.file_type``, for naming what was shipped.
_FTYPE_NAMES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    15: "Q4_K_M",
    18: "Q6_K",
    32: "BF16",
}

#: Texts of ids by which models say that they are done, besides the one marked as end of sequence.
_END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<EOT>",
    }
)
#: What a token is, in GGUF files as in SentencePiece's models.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
#: SentencePiece's space.
_SPACE = "▁"

#: Pattern of Llama 3's pre-tokenizer; Qwen 2's differs in taking digits one by one.
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(*, use_regex: bool) -> dict[str, object]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split_then_bytes(pattern: str) -> dict[str, object]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


@dataclass(frozen=True)
class _PreTokenizer:
    """How llama.cpp treats a ``tokenizer.ggml.pre``, in the words of ``tokenizer.json``."""

    parts: dict[str, object]
    ignore_merges: bool = False
    add_bos: bool = False
    normalizer: dict[str, object] | None = None


_GPT2 = _PreTokenizer(_byte_level(use_regex=True))
_SMOLLM = _PreTokenizer(
    {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)]}
)
_LLAMA3 = _PreTokenizer(_split_then_bytes(_LLAMA3_PATTERN), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer(_split_then_bytes(_QWEN2_PATTERN), normalizer={"type": "NFC"})

_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}


def derive(library: Any, gguf: Path, work: Path) -> dict[str, object]:
    """Writes tokenizer.json and the template; the contents of model.json, weights aside. ``library``: ``gguf``."""
    try:
        reader = library.GGUFReader(str(gguf))
    except Exception as error:  # The reader raises whatever its parsing meets: ValueError, IndexError, KeyError, ...
        raise ModelError(f"{gguf} is not a readable GGUF file: {error}") from error

    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(key)
        return default if field is None else field.contents()

    kind = value("tokenizer.ggml.model")
    tokens: list[str] = value("tokenizer.ggml.tokens")
    types: list[int] = value("tokenizer.ggml.token_type", [1] * len(tokens or []))
    if not tokens or len(types) != len(tokens):
        raise ModelError(f"{gguf}: its vocabulary is missing or contradicts itself")
    if kind == "llama":
        adds_bos = True
        scores: list[float] = value("tokenizer.ggml.scores", [])
        if len(scores) != len(tokens):
            raise ModelError(f"{gguf}: {len(tokens)} pieces have {len(scores)} scores")
        pieces = list(zip(tokens, scores, types, strict=True))
        style = "legacy" if value("tokenizer.ggml.add_space_prefix", True) else "none"
        try:
            document = sentencepiece_document(pieces, style)
        except ValueError as error:
            raise ModelError(f"{gguf}: {error}") from error
    elif kind == "gpt2":
        pre_name = value("tokenizer.ggml.pre", "gpt-2")
        pre = _PRE_TOKENIZERS.get(pre_name)
        if pre is None:
            known = ", ".join(sorted(_PRE_TOKENIZERS))
            raise ModelError(f"{gguf}: tokenizer.ggml.pre {pre_name!r} is not supported (supported: {known})")
        adds_bos = pre.add_bos
        document = byte_level_document(tokens, types, value("tokenizer.ggml.merges", []), pre)
    else:
        raise ModelError(
            f"{gguf}: tokenizer.ggml.model {kind!r} is not supported (supported: 'gpt2', byte-level BPE; 'llama',"
            " SentencePiece)"
        )
    (work / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    template = value("tokenizer.chat_template")
    if template:
        (work / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    architecture = value("general.architecture")
    context = value(f"{architecture}.context_length")
    if not context:
        raise ModelError(f"{gguf}: {architecture}.context_length is missing")
    bos, eos = value("tokenizer.ggml.bos_token_id"), value("tokenizer.ggml.eos_token_id")
    named = [eos, value("tokenizer.ggml.eot_token_id"), value("tokenizer.ggml.eom_token_id")]
    spelled = [i for i, text in enumerate(tokens) if types[i] == CONTROL and text in _END_TEXTS]
    return {
        "context_tokens": int(context),
        "vocab_size": len(tokens),
        "eos_ids": list(dict.fromkeys(int(i) for i in [*named, *spelled] if i is not None and 0 <= i < len(tokens))),
        "bos_token": tokens[bos] if bos is not None else "",
        "eos_token": tokens[eos] if eos is not None else "",
        "add_bos": bool(value("tokenizer.ggml.add_bos_token", adds_bos)),
        "quantization": _FTYPE_NAMES.get(value("general.file_type", -1), "as-shipped"),
        "sampling": recommended(value, GGUF_KEYS),
    }


def byte_level_document(
    tokens: list[str], types: list[int], merges: list[str], pre: _PreTokenizer
) -> dict[str, object]:
    """The ``tokenizer.json`` of a byte-level BPE vocabulary."""
    return _document(
        added={
            i: (token, types[i] == CONTROL) for i, token in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED)
        },
        normalizer=pre.normalizer,
        pre_tokenizer=pre.parts,
        decoder=_byte_level(use_regex=True),
        model={
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    )


#: A piece of a SentencePiece vocabulary: its text, its score, its kind.
Piece = tuple[str, float, int]


def sentencepiece_document(pieces: list[Piece], style: str) -> dict[str, object]:
    """The ``tokenizer.json`` of a SentencePiece BPE vocabulary. Raises ValueError where its ids cannot be foretold.

    As the usual converters do it: every way to split a piece into two others is a merge, those of better pieces first.
    The styles are those of Llama 2 (``legacy``: a space before every stretch), of its successors (``first``: before the
    text) and of Gemma (``none``).
    """
    texts = {text for text, _, _ in pieces}
    if any(f"<0x{byte:02X}>" not in texts for byte in range(256)):
        raise ValueError("its SentencePiece vocabulary has no piece for each byte")
    if any("\0" in text for text in texts):
        raise ValueError("its SentencePiece vocabulary has a piece with a NUL, where llama.cpp takes it to end")
    missing = sorted({char for text, _, kind in pieces if kind == NORMAL for char in text if char not in texts})
    if missing:
        raise ValueError(f"its SentencePiece vocabulary has pieces of characters that are none: {missing[:5]}")
    replace: dict[str, object] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
    normalizers: dict[str, dict[str, object]] = {
        "legacy": {"type": "Sequence", "normalizers": [prepend, replace]},
        "none": replace,
    }
    kinds = (UNKNOWN, CONTROL, USER_DEFINED)
    return _document(
        added={i: (text, kind != USER_DEFINED) for i, (text, _, kind) in enumerate(pieces) if kind in kinds},
        normalizer=normalizers.get(style),
        pre_tokenizer=metaspace if style == "first" else None,
        decoder={"type": "Sequence", "decoders": decoders if style == "none" else [*decoders, strip]},
        model={
            "unk_token": next((text for text, _, kind in pieces if kind == UNKNOWN), None),
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: i for i, (text, _, _) in enumerate(pieces)},
            "merges": _merges(pieces),
        },
    )


def _merges(pieces: list[Piece]) -> list[list[str]]:
    ids = {text: i for i, (text, _, _) in enumerate(pieces)}
    found = []
    results: dict[float, list[str]] = {}
    for text, score, kind in pieces:
        if kind not in (NORMAL, USER_DEFINED):
            continue
        splits = [(text[:at], text[at:]) for at in range(1, len(text))]
        known = [(left, right) for left, right in splits if left in ids and right in ids]
        if known and kind == NORMAL:
            results.setdefault(score, []).append(text)
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, left, right) for left, right in known]
    for alike in results.values():
        if len(alike) > 1 and not _are_runs(alike, pieces):
            raise ValueError(f"its SentencePiece pieces {alike[0]!r} and {alike[1]!r} have the same score")
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in found]


def _are_runs(alike: list[str], pieces: list[Piece]) -> bool:
    """Whether pieces of one score are runs of one character that nothing else has twice, as Llama 2's and Mistral's
    runs of spaces.

    Of merges with one score llama.cpp takes the leftmost, and the order here the one with the longest parts. Within a
    run of single characters these are the same, whatever lengths there are: what lies left of where it grows can grow
    no more.
    """
    character, texts = alike[0][0], set(alike)
    return all(set(text) == {character} for text in alike) and not any(
        character * 2 in text and text not in texts for text, _, kind in pieces if kind in (NORMAL, USER_DEFINED)
    )


def _document(
    *,
    added: dict[int, tuple[str, bool]],
    normalizer: dict[str, object] | None,
    pre_tokenizer: dict[str, object] | None,
    decoder: dict[str, object],
    model: dict[str, object],
) -> dict[str, object]:
    """``added``: texts that are found before all else, and whether they are special, by id."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    affixes = dict.fromkeys(("continuing_subword_prefix", "end_of_word_suffix"))
    fixed = {"type": "BPE", "dropout": None, "unk_token": None, **affixes}
    tokens = [{"id": i, "content": text, **flags, "special": special} for i, (text, special) in added.items()]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": fixed | model,
    }
