"""The toy model's tokenizer and folder: one id a byte, so that a test can write token ids by hand.

Ids 0 to 255 are the raw bytes, 900 is `<eos>` and 901 `<eot>` (special: no text when specials are skipped).
There are no merges, so a text encodes to exactly its UTF-8 bytes; longer pieces can be added for decoding.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

EOS, EOT = 900, 901

#: The contents one after another, so that a prompt's ids are its messages' bytes.
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def byte_alphabet() -> dict[int, str]:
    """Byte to the character that stands for it in a byte-level vocabulary (the GPT-2 mapping)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


def toy_tokenizer_json(extra_pieces: dict[int, bytes] | None = None) -> str:
    """The `tokenizer.json` of the toy model, with `extra_pieces` (id to bytes) that decode but are never encoded.

    An extra piece is two bytes or longer, for one byte has its id already; ids may be sparse.
    """
    alphabet = byte_alphabet()
    specials = {"<eos>": EOS, "<eot>": EOT}
    vocab = {alphabet[byte]: byte for byte in range(256)} | specials
    for token_id, piece in (extra_pieces or {}).items():
        spelling = "".join(alphabet[byte] for byte in piece)
        if len(piece) < 2 or spelling in vocab or token_id in vocab.values():
            raise ValueError(f"piece {piece!r} with id {token_id} is taken or too short")
        vocab[spelling] = token_id
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": token_id,
                    "content": content,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for content, token_id in specials.items()
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
            "post_processor": None,
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocab,
                "merges": [],
            },
        }
    )


@dataclass(frozen=True)
class ToyModel:
    """A variant of the toy model: its name, and the files by which a router and a worker agree about it."""

    name: str = "toy"
    context_tokens: int = 64
    eos_ids: tuple[int, ...] = (EOS,)
    template: str = PLAIN_TEMPLATE
    pieces: dict[int, bytes] = field(default_factory=dict)
    #: What its makers recommend.
    sampling: dict[str, float] = field(default_factory=dict)

    @property
    def tokenizer_json(self) -> str:
        return toy_tokenizer_json(self.pieces)

    @property
    def tokenizer_sha256(self) -> str:
        return hashlib.sha256(self.tokenizer_json.encode()).hexdigest()

    @property
    def template_sha256(self) -> str:
        return hashlib.sha256(self.template.encode()).hexdigest()

    @property
    def vocab_size(self) -> int:
        return max(EOT, *self.pieces, 0) + 1

    def write(self, parent: Path) -> Path:
        """Writes the model's folder under `parent`."""
        folder = parent / self.name
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text(self.tokenizer_json, encoding="utf-8")
        (folder / "chat_template.jinja").write_text(self.template, encoding="utf-8")
        description = {
            "context_tokens": self.context_tokens,
            "vocab_size": self.vocab_size,
            "eos_ids": list(self.eos_ids),
            "bos_token": "",
            "eos_token": "<eos>",
            "add_bos": False,
            "quantization": "",
            "sampling": self.sampling,
        }
        (folder / "model.json").write_text(json.dumps(description), encoding="utf-8")
        return folder
