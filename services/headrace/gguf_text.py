"""The text side of a GGUF file: its vocabulary as a ``tokenizer.json``, its chat template, its special ids.

The tokenizer written here and the one inside the GGUF must give the same ids for every text. That is known only for the
pre-tokenizers listed below; any other is refused by name rather than guessed. It is written by hand rather than by a
tokenizer library, so that its hash, by which router and worker know that they speak of the same tokenizer, does not
depend on that library's version. Used by ``models.py``, once for each file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError

#: The same numbers as a GGUF's ``general.file_type`` tells them, for naming what was shipped.
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
_CONTROL, _USER_DEFINED = 3, 4

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
    if kind != "gpt2":
        raise ModelError(f"{gguf}: tokenizer.ggml.model {kind!r} is not supported (supported: 'gpt2', byte-level BPE)")
    pre_name = value("tokenizer.ggml.pre", "gpt-2")
    pre = _PRE_TOKENIZERS.get(pre_name)
    if pre is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise ModelError(f"{gguf}: tokenizer.ggml.pre {pre_name!r} is not supported (supported: {known})")
    tokens: list[str] = value("tokenizer.ggml.tokens")
    types: list[int] = value("tokenizer.ggml.token_type", [1] * len(tokens or []))
    if not tokens or len(types) != len(tokens):
        raise ModelError(f"{gguf}: its vocabulary is missing or contradicts itself")
    document = tokenizer_document(tokens, types, value("tokenizer.ggml.merges", []), pre)
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
    spelled = [i for i, text in enumerate(tokens) if types[i] == _CONTROL and text in _END_TEXTS]
    return {
        "context_tokens": int(context),
        "vocab_size": len(tokens),
        "eos_ids": list(dict.fromkeys(int(i) for i in [*named, *spelled] if i is not None and 0 <= i < len(tokens))),
        "bos_token": tokens[bos] if bos is not None else "",
        "eos_token": tokens[eos] if eos is not None else "",
        "add_bos": bool(value("tokenizer.ggml.add_bos_token", pre.add_bos)),
        "quantization": _FTYPE_NAMES.get(value("general.file_type", -1), "as-shipped"),
    }


def tokenizer_document(tokens: list[str], types: list[int], merges: list[str], pre: _PreTokenizer) -> dict[str, object]:
    """The ``tokenizer.json`` of a byte-level BPE vocabulary.

    It is written by hand rather than by a tokenizer library, so that its hash, by which router and worker know that
    they speak of the same tokenizer, does not depend on that library's version.
    """
    added = [
        {
            "id": i,
            "content": tokens[i],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[i] == _CONTROL,
        }
        for i in range(len(tokens))
        if types[i] in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": pre.normalizer,
        "pre_tokenizer": pre.parts,
        "post_processor": None,
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
