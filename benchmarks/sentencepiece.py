"""Makes a tokenizer.json of a SentencePiece BPE model (`tokenizer.model`), for the benchmarks and for tests by hand.

    pip download --no-deps mistral-common && unzip mistral_common-*.whl 'mistral_common/data/*' -d mistral
    python benchmarks/sentencepiece.py mistral/mistral_common/data/tokenizer.model.v1 mistral-v1.json
    python benchmarks/sentencepiece.py --style first mistral/.../*.model.v3 mistral-v3.json

As the usual converters do it: every way to split a piece into two others is a merge, those of better pieces first.
The styles are those of Llama 2 (`legacy`: a space before every stretch), of its successors (`first`: before the text)
and of Gemma (`none`).
"""

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: `ModelProto.SentencePiece.Type`
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
MARK = "▁"


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        length = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, message[at : at + length]
        at += length


def pieces(model: bytes) -> list[tuple[str, float, int]]:
    """Text, score and type of each piece, in the order of their ids."""
    found = []
    for number, value in fields(model):
        if number == 1:
            piece = {1: b"", 2: b"\0\0\0\0", 3: 1} | dict(fields(value))
            found.append((piece[1].decode(), struct.unpack("<f", piece[2])[0], piece[3]))
    return found


def merges(of: list[tuple[str, float, int]]) -> list[list[str]]:
    ids = {text: index for index, (text, _, _) in enumerate(of)}
    found = []
    for text, score, _ in of:
        splits = [(text[:at], text[at:]) for at in range(1, len(text))]
        known = [(left, right) for left, right in splits if left in ids and right in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, left, right) for left, right in known]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in found]


def document(of: list[tuple[str, float, int]], style: str) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    prepend = {"type": "Prepend", "prepend": MARK}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": text, "special": kind != USER_DEFINED} | flags
            for index, (text, _, kind) in enumerate(of)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {
            "legacy": {"type": "Sequence", "normalizers": [prepend, replace]},
            "first": None,
            "none": replace,
        }[style],
        "pre_tokenizer": {"type": "Metaspace", "replacement": MARK, "prepend_scheme": "first", "split": False}
        if style == "first"
        else None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders + ([] if style == "none" else [strip])},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": next(text for text, _, kind in of if kind == UNKNOWN),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {text: index for index, (text, _, _) in enumerate(of)},
            "merges": merges(of),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a SentencePiece BPE model")
    parser.add_argument("out", type=Path, help="the tokenizer.json to write")
    parser.add_argument("--style", choices=("legacy", "first", "none"), default="legacy")
    arguments = parser.parse_args()
    made = document(pieces(arguments.model.read_bytes()), arguments.style)
    arguments.out.write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
