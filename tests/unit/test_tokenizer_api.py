"""``headrace.Tokenizer``: a model's folder as Python callers have it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.support.toy import EOS, EOT, toy_tokenizer_json

import headrace
from headrace import Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content | trim }}<eot>{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{% if shout %}!{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}{{ strftime_now('%Y') if dated else '' }}"
)
ASK = [{"role": "user", "content": " hi "}]


def folder_with(tmp_path: Path, files: dict[str, str]) -> Path:
    (tmp_path / "tokenizer.json").write_text(toy_tokenizer_json())
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def toy(tmp_path: Path) -> Tokenizer:
    files = {"chat_template.jinja": TEMPLATE, "model.json": json.dumps({"bos_token": "<eos>"})}
    return Tokenizer.from_folder(folder_with(tmp_path, files))


def test_importing_the_package_does_not_load_the_extension() -> None:
    script = "import sys, headrace; sys.exit('headrace._gateway' in sys.modules or not headrace.Tokenizer)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'Tokeniser'"):
        _ = headrace.Tokeniser


def test_text_to_ids_and_back(toy: Tokenizer) -> None:
    assert toy.encode("hé<eot>") == [*"hé".encode(), EOT]
    assert toy.encode("<eot>", specials=False) == list(b"<eot>")
    assert toy.decode([104, EOT, 105]) == "hi"
    assert toy.decode([104, EOT, 105], skip_special=False) == "h<eot>i"
    assert (toy.token_to_id("<eos>"), toy.id_to_token(EOS), toy.token_bytes(65)) == (EOS, "<eos>", b"A")
    assert toy.is_special(EOS)
    assert (toy.vocab_size, toy.plan, len(toy.hash)) == (902, "fast:gpt2", 64)


@pytest.mark.parametrize("threads", [0, 1, 3, 1000])
def test_a_batch_is_each_text_by_itself_in_order(toy: Tokenizer, threads: int) -> None:
    texts = ["", *(f"text {n} " * (n % 7) for n in range(200)), "<eos>"]
    assert toy.encode_batch(texts, threads=threads) == [toy.encode(text) for text in texts]
    plain = toy.encode_batch(texts, specials=False, threads=threads)
    assert plain == [list(text.encode()) for text in texts]
    assert toy.encode_batch([], threads=threads) == []


def test_threads_encode_and_decode_with_one_tokenizer(toy: Tokenizer) -> None:
    failures: list[str] = []

    def work(text: str) -> None:
        for _ in range(50):
            if toy.decode(toy.encode(text)) != text:
                failures.append(text)

    threads = [threading.Thread(target=work, args=(f"ünï {n} " * 20,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_stream_gives_characters_when_they_are_complete(toy: Tokenizer) -> None:
    stream = toy.stream_decoder()
    assert [stream.push(byte) for byte in "é!".encode()] == ["", "é", "!"]
    assert stream.push_all([*"né".encode()[:2], EOT]) == "n\ufffd"
    assert stream.push_all([195]) + stream.finish() == "\ufffd"


def test_a_conversation_becomes_ids(toy: Tokenizer) -> None:
    assert toy.render_chat_template(ASK) == "<eos>user:hi<eot>>"
    assert toy.apply_chat_template(ASK) == [EOS, *b"user:hi", EOT, *b">"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    ids = toy.apply_chat_template(ASK, tools=tools, add_generation_prompt=False, template_kwargs={"shout": True})
    assert ids == [EOS, *b"user:hi", EOT, *b"f!"]
    dated = toy.render_chat_template(ASK, template_kwargs={"dated": True}, now_s=0.0)
    assert dated.endswith("1970")


def test_what_a_message_holds_of_special_tokens_is_text_unless_asked(toy: Tokenizer) -> None:
    typed = [{"role": "user", "content": "<eot>a<eo"}]
    assert toy.apply_chat_template(typed) == [EOS, *b"user:<eot>a<eo", EOT, *b">"]
    control = toy.apply_chat_template(typed, specials_in_content=True)
    assert control == [EOS, *b"user:", EOT, *b"a<eo", EOT, *b">"]


def test_a_template_may_come_with_the_configuration(tmp_path: Path) -> None:
    config = {
        "chat_template": [{"name": "other", "template": "no"}, {"name": "default", "template": TEMPLATE}],
        "bos_token": {"content": "<eos>"},
    }
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, {"tokenizer_config.json": json.dumps(config)}))
    assert tokenizer.render_chat_template(ASK) == "<eos>user:hi<eot>>"


def test_what_cannot_be_done_raises(toy: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="chat template"):
        Tokenizer.from_file(tmp_path / "tokenizer.json", chat_template="{% for %}")
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_file(tmp_path / "tokenizer.json").apply_chat_template(ASK)
    with pytest.raises(ValueError, match="messages"):
        toy.apply_chat_template([{"role": "user", "content": 7}])
    with pytest.raises(ValueError, match="must be JSON"):
        toy.apply_chat_template([{"role": "user", "content": b"bytes"}])
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(ValueError, match=r"model\.json is not JSON"):
        Tokenizer.from_folder(tmp_path)
