"""The tokenizer as Python has it: the toy model by hand, the embedded model against Hugging Face `tokenizers`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.toy import EOS, EOT, toy_tokenizer_json

from headrace._gateway import StreamDecoder, Tokenizer

# 삼겹살 in two tokens, cut within the second syllable.
PIECES = {300: bytes.fromhex("EC82BCEAB2"), 301: bytes.fromhex("B9EC82B4")}


@pytest.fixture(scope="module")
def toy() -> Tokenizer:
    return Tokenizer.from_json(toy_tokenizer_json(PIECES))


def push_all(decoder: StreamDecoder, steps: list[list[int]]) -> list[str]:
    """What leaves at each step, and then at the end."""
    return ["".join(decoder.push(token_id) for token_id in step) for step in steps] + [decoder.finish()]


# --- the toy model ---


def test_the_toy_model_is_encoded_by_our_own_encoder(toy: Tokenizer) -> None:
    assert toy.plan == "fast:gpt2"
    assert toy.vocab_size == 902


@given(text=st.text(max_size=40))
def test_a_text_is_its_bytes_and_comes_back(toy: Tokenizer, text: str) -> None:
    ids = toy.encode(text, specials=False)
    assert ids == list(text.encode())
    assert toy.decode(ids) == text


def test_special_tokens_are_recognised_unless_typed_by_a_user(toy: Tokenizer) -> None:
    assert toy.encode("hi<eos><eot>") == [104, 105, EOS, EOT]
    assert toy.encode("<eos>", specials=False) == list(b"<eos>")
    assert toy.decode([104, EOS, 105]) == "hi"
    assert toy.decode([104, EOS, 105], skip_special=False) == "h<eos>i"
    assert toy.is_special(EOS)
    assert not toy.is_special(104)


def test_tokens_are_found_by_id_and_by_spelling(toy: Tokenizer) -> None:
    assert toy.token_bytes(300) == PIECES[300]
    assert toy.token_bytes(0) == b"\0"
    assert toy.token_bytes(899) is None
    assert toy.token_str(32) == "Ġ"
    assert toy.token_to_id("<eot>") == EOT
    assert toy.token_to_id("absent") is None


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ([[240, 159], [153, 130], [111, 107]], ["", "🙂", "ok", ""]),
        ([[300], [301]], ["삼", "겹살", ""]),
        ([[240, 159]], ["", "\ufffd"]),
        ([[195], [65], [66]], ["", "\ufffdA", "B", ""]),
        ([[153, 130], [120]], ["\ufffd\ufffd", "x", ""]),
        ([[101], [204, 129]], ["e", "\u0301", ""]),
        ([[240, 159], [EOS], [65]], ["", "\ufffd", "A", ""]),
    ],
)
def test_a_stream_shows_what_is_complete_and_holds_only_what_is_not(
    toy: Tokenizer, steps: list[list[int]], shown: list[str]
) -> None:
    assert push_all(toy.stream_decoder(), steps) == shown
    assert toy.decode([token_id for step in steps for token_id in step]) == "".join(shown)


@given(ids=st.lists(st.sampled_from([*range(256), 300, 301, 899, EOS])))
@example(ids=[240, 159, EOS, 153, 130])
def test_a_stream_gives_what_the_whole_gives(toy: Tokenizer, ids: list[int]) -> None:
    assert "".join(push_all(toy.stream_decoder(), [ids])) == toy.decode(ids)


def test_streams_share_no_state(toy: Tokenizer) -> None:
    first, second = toy.stream_decoder(), toy.stream_decoder()
    assert push_all(first, [[240, 159]])[0] == ""
    assert push_all(second, [[153, 130], [120]]) == ["\ufffd\ufffd", "x", ""]


def test_unusable_files_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="not a usable tokenizer"):
        Tokenizer.from_json("{}")


def test_a_file_and_its_text_are_one_tokenizer(toy: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(toy_tokenizer_json(PIECES))
    assert Tokenizer.from_file(path).hash == toy.hash


# --- the embedded model ---

# Pieces of trouble for pre-tokenisation, in any order; a newline divides them.
ATOMS = """a
 the
Hello
é
中
한국
's
'LL
<|
<|im_start|>
<|im_end|>
12
½
Ⅷ
.
!?
_
(
🙂""".splitlines()
BLANKS = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0301", "\u200b", "\x04", "\U000400c3"]
TEXTS = st.lists(st.sampled_from(ATOMS + BLANKS) | st.text(max_size=3), max_size=12).map("".join)


@pytest.fixture(scope="module")
def embedded_json() -> Path:
    models = pytest.importorskip("headrace.models")
    try:
        return Path(models.prepare("embedded", weights=False).tokenizer_json)
    except models.ModelError as error:
        pytest.skip(f"no embedded model: {error}")


@pytest.fixture(scope="module")
def embedded(embedded_json: Path) -> Tokenizer:
    return Tokenizer.from_file(embedded_json)


@pytest.mark.model
def test_the_embedded_model_has_the_ids_of_the_reference(embedded: Tokenizer, embedded_json: Path) -> None:
    reference = pytest.importorskip("tokenizers").Tokenizer.from_file(str(embedded_json))
    assert embedded.plan == "fast:gpt2-digits"

    @given(text=TEXTS)
    def same(text: str) -> None:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert embedded.encode(text) == ids
        assert embedded.decode(ids) == reference.decode(ids)

    same()


@pytest.mark.model
def test_threads_share_one_tokenizer(embedded: Tokenizer) -> None:
    texts = [f"Thread {n} says: {'ünïcödé words ' * n}" for n in range(40)]
    expected = [embedded.encode(text) for text in texts]
    results: list[list[list[int]]] = []
    threads = [threading.Thread(target=lambda: results.append(embedded.encode_batch(texts))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
