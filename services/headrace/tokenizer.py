"""``headrace.Tokenizer``: a model's text and token ids, as the router has them.

The work is done by the extension (``headrace._gateway``), with the interpreter's lock released; this module finds a
model's files and turns Python's values into what the extension takes. It needs no service to run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from headrace import _gateway
from headrace._gateway import StreamDecoder

__all__ = ["StreamDecoder", "Tokenizer"]


class Tokenizer:
    """One model's tokenizer and chat template. Immutable; threads may share it.

    Ids are those of Hugging Face ``tokenizers`` with ``add_special_tokens=False``, on every text: ``plan`` says whether
    the fast encoder makes them, or that library, and then why.
    """

    def __init__(self, tokenizer: _gateway.Tokenizer, template: _gateway.ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        *,
        chat_template: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
    ) -> Tokenizer:
        """Load a ``tokenizer.json``; ``chat_template`` is Jinja's source, the tokens are what it may write.

        Raises FileNotFoundError or OSError when the file can't be read, ValueError when it or the template is unusable.
        """
        template = None if chat_template is None else _gateway.ChatTemplate(chat_template, bos_token, eos_token)
        return cls(_gateway.Tokenizer.from_file(path), template)

    @classmethod
    def from_folder(cls, folder: str | PathLike[str]) -> Tokenizer:
        """Load a model's folder: ``tokenizer.json``, and a chat template if there is one.

        The template is ``chat_template.jinja``, or the one in ``tokenizer_config.json``; its tokens are those of
        ``model.json`` or ``tokenizer_config.json``. Raises as ``from_file``.
        """
        folder = Path(folder)
        config = _object(folder / "tokenizer_config.json") | _object(folder / "model.json")
        jinja = folder / "chat_template.jinja"
        source = jinja.read_text(encoding="utf-8") if jinja.exists() else config.get("chat_template")
        if isinstance(source, list):  # Several, by name.
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        return cls.from_file(
            folder / "tokenizer.json",
            chat_template=source if isinstance(source, str) else None,
            bos_token=_token(config.get("bos_token")),
            eos_token=_token(config.get("eos_token")),
        )

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Token ids of ``text``; nothing is put around it.

        Special tokens written in the text are recognised; without ``specials`` (for what users type) they are text.
        """
        return self._tokenizer.encode(text, specials=specials)

    def encode_batch(self, texts: Sequence[str], *, specials: bool = True, threads: int = 0) -> list[list[int]]:
        """``encode`` for each text, on so many threads (0: one for each CPU). Raises OverflowError for threads < 0."""
        return self._tokenizer.encode_batch(texts, specials=specials, threads=threads)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of ``ids``, special tokens left out unless ``skip_special`` is false.

        Bytes that are no UTF-8 give U+FFFD, one for each maximal bad part; ids the vocabulary lacks have no text.
        """
        return self._tokenizer.decode(ids, skip_special=skip_special)

    def stream_decoder(self, *, skip_special: bool = True, continuing: bool = False) -> StreamDecoder:
        """A decoder for one answer: ``push`` an id, get the text it completes; ``finish`` at the end.

        ``continuing``: the ids go on after a prompt, so that a space before the first word is text.
        """
        return self._tokenizer.stream_decoder(skip_special, continuing=continuing)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        specials_in_content: bool = False,
        now_s: float | None = None,
    ) -> list[int]:
        """Token ids of a conversation, messages and tools as in OpenAI's API.

        What a message holds of a special token's text stays text, unless ``specials_in_content``. ``now_s`` is the Unix
        time for templates that tell the date; by default, the clock's. Raises ValueError with what the template or the
        router's checks refuse, and when the model has no chat template.
        """
        chat = self._chat(messages, tools, template_kwargs, add_generation_prompt, now_s)
        return self._chat_template().encode(self._tokenizer, typed_specials=specials_in_content, **chat)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        now_s: float | None = None,
    ) -> str:
        """The text of which ``apply_chat_template`` makes ids."""
        return self._chat_template().render(
            **self._chat(messages, tools, template_kwargs, add_generation_prompt, now_s)
        )

    @staticmethod
    def _chat(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        add_generation_prompt: bool,
        now_s: float | None,
    ) -> dict[str, Any]:
        try:
            return {
                "messages_json": json.dumps(list(messages)),
                "tools_json": json.dumps(list(tools)) if tools else None,
                "template_kwargs_json": json.dumps(dict(template_kwargs)) if template_kwargs else None,
                "add_generation_prompt": add_generation_prompt,
                "now_s": int(time.time() if now_s is None else now_s),
            }
        except TypeError as error:
            raise ValueError(f"messages, tools and template_kwargs must be JSON: {error}") from error

    def _chat_template(self) -> _gateway.ChatTemplate:
        if self._template is None:
            raise ValueError("the model has no chat template")
        return self._template

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token, maybe a part of a character; None for an id the vocabulary lacks."""
        return self._tokenizer.token_bytes(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id with the vocabulary's spelling ``token``, or None."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id, or None."""
        return self._tokenizer.token_str(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether an id is a special token."""
        return self._tokenizer.is_special(token_id)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._tokenizer.vocab_size

    @property
    def hash(self) -> str:
        """SHA-256 of ``tokenizer.json``, in hexadecimal digits."""
        return self._tokenizer.hash

    @property
    def plan(self) -> str:
        """Who encodes: ``fast:<family>``, or ``reference:<reason>``."""
        return self._tokenizer.plan

    def __repr__(self) -> str:
        return f"Tokenizer(plan={self.plan!r}, vocab_size={self.vocab_size})"


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; none where there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _token(value: Any) -> str:
    """A token as configurations write it: its text, or an object with its text."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""
