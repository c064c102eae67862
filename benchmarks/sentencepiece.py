"""Makes a tokenizer.json of a SentencePiece BPE model (`tokenizer.model`), for the benchmarks and for tests by hand.

    pip download --no-deps mistral-common && unzip mistral_common-*.whl 'mistral_common/data/*' -d mistral
    python benchmarks/sentencepiece.py mistral/mistral_common/data/tokenizer.model.v1 mistral-v1.json
    python benchmarks/sentencepiece.py --style first mistral/.../*.model.v3 mistral-v3.json

How, and what the styles are, says `headrace.gguf_text.sentencepiece_document`.
"""

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.gguf_text import Piece, sentencepiece_document


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


def pieces(model: bytes) -> list[Piece]:
    """Text, score and type of each piece, in the order of their ids."""
    found = []
    for number, value in fields(model):
        if number == 1:
            piece = {1: b"", 2: b"\0\0\0\0", 3: 1} | dict(fields(value))
            found.append((piece[1].decode(), struct.unpack("<f", piece[2])[0], piece[3]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a SentencePiece BPE model")
    parser.add_argument("out", type=Path, help="the tokenizer.json to write")
    parser.add_argument("--style", choices=("legacy", "first", "none"), default="legacy")
    arguments = parser.parse_args()
    made = sentencepiece_document(pieces(arguments.model.read_bytes()), arguments.style)
    arguments.out.write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
