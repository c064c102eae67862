"""Encoding and decoding speed of our tokenizer beside Hugging Face `tokenizers` and, where installed, tiktoken.

    python benchmarks/tokenize_bench.py                        # the embedded model's vocabulary
    python benchmarks/tokenize_bench.py --tokenizer path/to/tokenizer.json --rounds 7 --json

Every library runs in a fresh process, the libraries take turns within a round, and ratios are taken within a round
(the median over rounds is shown): a busy machine then slows all of them alike. One thread, called from Python.

cold   first pass over a text in a fresh process
new    words met before, documents not: what a server meets
200 B  one chat message of 200 bytes
batch  all texts in one call, on one thread and on two
stream ids to text, one id at a time; `decode`, 64 ids at a time, each answer of 1,000 ids
rss    memory that the loaded vocabulary keeps
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DOCUMENT_BYTES = 16_384
LIBRARIES = ("headrace", "tokenizers", "tiktoken")

# Sentences of 16 scripts, cut up and shuffled into the multilingual text.
SENTENCES = """
Съешь же ещё этих мягких французских булок, да выпей чаю, потому что вечер долгий и спешить нам некуда
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία και ταξιδεύω προς το φως με καλή παρέα και πολλή χαρά
العربية لغة جميلة يتحدث بها كثير من الناس في بلاد بعيدة وقريبة منذ زمن طويل
עברית היא שפה עתיקה שחזרה לחיים ומדברים בה היום מיליוני אנשים ברחבי העולם
हिन्दी भाषा भारत में बहुत से लोग बोलते हैं और यह देवनागरी लिपि में लिखी जाती है
বাংলা ভাষা পৃথিবীর অন্যতম বহুল ব্যবহৃত ভাষা এবং এর সাহিত্য খুব সমৃদ্ধ
தமிழ் மொழி மிகவும் பழமையான மொழிகளில் ஒன்று ஆகும் அதன் இலக்கியம் வளமானது
ภาษาไทยเป็นภาษาที่มีวรรณยุกต์และไม่มีการเว้นวรรคระหว่างคำในประโยค
日本語の文章には漢字とひらがなとカタカナが混ざっていて、単語の間に空白がありません。
中文的句子由汉字组成，词与词之间没有空格，标点符号也不一样，所以切分并不容易。
한국어 문장은 띄어쓰기를 하지만 조사와 어미가 낱말에 붙어서 형태가 다양합니다
Příliš žluťoučký kůň úpěl ďábelské ódy a nikdo mu nerozuměl ani trochu
Zażółć gęślą jaźń, powiedział mędrzec, i wszyscy zamilkli na długą chwilę
Tiếng Việt có nhiều dấu thanh và mỗi âm tiết được viết cách nhau bằng một khoảng trắng
ქართული ენა იყენებს საკუთარ ანბანს და აქვს რთული თანხმოვანთა ჯგუფები
Հայերենը հնդեվրոպական լեզու է և ունի իր ուրույն այբուբենը արդեն շատ դարեր
""".strip().splitlines()


def texts(size: int) -> dict[str, str]:
    """About `size` bytes each of English, code and 16 other languages; the same on one machine each time."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text("utf-8", "ignore") for path in sorted(stdlib.glob("*.py"))]
    # Every second part of a source split at triple quotes is nearly always a docstring.
    prose = ["\n".join(source.split('"""')[1::2]) for source in sources]
    prose += [path.read_text("utf-8", "ignore") for path in sorted(Path("/usr/share/common-licenses").glob("*"))]
    shuffled, length = [], 0
    source_of_order = random.Random(0)
    while length < size:
        sentence = source_of_order.choice(SENTENCES)
        start = source_of_order.randrange(len(sentence) // 2)
        part = sentence[start : start + source_of_order.randrange(10, 80)]
        shuffled.append(part)
        length += len(part.encode()) + 1
    whole = {"english": "\n".join(prose), "code": "".join(sources), "multilingual": "\n".join(shuffled)}
    return {name: text.encode()[:size].decode("utf-8", "ignore") for name, text in whole.items()}


def documents(text: str) -> list[str]:
    raw = text.encode()
    return [
        raw[start : start + DOCUMENT_BYTES].decode("utf-8", "ignore") for start in range(0, len(raw), DOCUMENT_BYTES)
    ]


# --- the libraries: encode(text) -> ids, encode many on so many threads, a fresh push(id) -> text for each answer ---

Encode = Callable[[str], list[int]]
Batch = Callable[[list[str], int], Any]
Stream = Callable[[], Callable[[int], Any]]
Push = Callable[[list[int]], Any]


def load(library: str, path: str) -> tuple[Encode, Batch, Stream, Callable[[], Push]]:
    if library == "headrace":
        from headrace import Tokenizer

        ours = Tokenizer.from_file(path)

        def batch(texts: list[str], threads: int) -> Any:
            return ours.encode_batch(texts, threads=threads)

        return ours.encode, batch, lambda: ours.stream_decoder().push, lambda: ours.stream_decoder().push_all
    if library == "tokenizers":
        import tokenizers
        from tokenizers.decoders import DecodeStream

        theirs = tokenizers.Tokenizer.from_file(path)

        def stream() -> Callable[[int], Any]:
            decoder = DecodeStream(skip_special_tokens=True)
            return lambda token_id: decoder.step(theirs, token_id)

        def batch(texts: list[str], threads: int) -> Any:
            # The number of its threads is the process's, so one thread is one call after another.
            if threads == 1:
                return [theirs.encode(text, add_special_tokens=False).ids for text in texts]
            return [encoding.ids for encoding in theirs.encode_batch_fast(texts, add_special_tokens=False)]

        encode = batch_of_one(batch)
        return encode, batch, stream, lambda: each(stream())
    return load_tiktoken(path)


def batch_of_one(batch: Batch) -> Encode:
    return lambda text: batch([text], 1)[0]


def each(push: Callable[[int], Any]) -> Push:
    return lambda ids: [push(token_id) for token_id in ids]


def load_tiktoken(path: str) -> tuple[Encode, Batch, Stream, Callable[[], Push]]:
    """The same vocabulary in tiktoken's form, where ranks are ids. Special tokens are left out."""
    import codecs

    import tiktoken

    file = json.loads(Path(path).read_text())
    special = {token["content"] for token in file["added_tokens"]}
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    byte_of = {chr(byte): byte for byte in kept} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
    ranks = {
        bytes(byte_of[char] for char in piece): token_id
        for piece, token_id in file["model"]["vocab"].items()
        if piece not in special
    }
    encoding = tiktoken.Encoding("bench", pat_str=expression(file), mergeable_ranks=ranks, special_tokens={})

    def stream() -> Callable[[int], Any]:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        return lambda token_id: decode(encoding.decode_single_token_bytes(token_id))

    def batch(texts: list[str], threads: int) -> Any:
        return encoding.encode_ordinary_batch(texts, num_threads=threads)

    return encoding.encode_ordinary, batch, stream, lambda: each(stream())


def expression(file: dict[str, Any]) -> str:
    """The pre-tokenisation of a tokenizer.json as one expression."""
    steps = file["pre_tokenizer"].get("pretokenizers", [file["pre_tokenizer"]])
    if steps[0]["type"] == "Split":
        return str(steps[0]["pattern"]["Regex"])
    if steps[0]["type"] == "Digits":
        return r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
    return r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


# --- one library in a process of its own ---


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(library: str, path: str, size: int) -> dict[str, float]:
    before_mb = resident_mb()
    start = time.perf_counter()
    encode, batch, stream, decoder = load(library, path)
    results = {"load_s": time.perf_counter() - start}
    gc.collect()
    results["rss_mb"] = resident_mb() - before_mb
    for name, text in texts(size).items():
        docs = documents(text)
        half = len(docs) // 2
        megabytes = [sum(len(doc.encode()) for doc in part) / 1e6 for part in (docs[:half], docs[half:])]
        results[f"{name}_cold_mb_s"] = megabytes[0] / seconds(lambda part=docs[:half]: [encode(doc) for doc in part])
        results[f"{name}_new_mb_s"] = megabytes[1] / seconds(lambda part=docs[half:]: [encode(doc) for doc in part])
        if name == "english":
            messages = [doc[start : start + 200] for doc in docs for start in range(0, len(doc) - 200, 200)][:2000]
            took = seconds(lambda messages=messages: [encode(message) for message in messages])
            results["message_us"] = took / len(messages) * 1e6
            ids = encode(text)[:200_000]
            push = stream()
            took = seconds(lambda ids=ids, push=push: [push(token_id) for token_id in ids])
            results["stream_mtok_s"] = len(ids) / took / 1e6
            answers = [ids[start : start + 1000] for start in range(0, len(ids), 1000)]
            steps = [[answer[at : at + 64] for at in range(0, len(answer), 64)] for answer in answers]

            def decode_all(steps: list[list[list[int]]] = steps) -> None:
                for answer in steps:
                    push = decoder()
                    for step in answer:
                        push(step)

            results["decode_mtok_s"] = len(ids) / seconds(decode_all) / 1e6
    everything = [doc for text in texts(size).values() for doc in documents(text)]
    megabytes_all = sum(len(doc.encode()) for doc in everything) / 1e6
    for threads in (1, 2):
        took = seconds(lambda threads=threads: batch(everything, threads))
        results[f"batch_{threads}_mb_s"] = megabytes_all / took
    return results


def run_library(library: str, arguments: argparse.Namespace) -> dict[str, float] | None:
    command = [sys.executable, __file__, "--library", library, "--tokenizer", arguments.tokenizer]
    done = subprocess.run([*command, "--bytes", str(arguments.bytes)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{library}: left out: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout)


def compare(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """Library, figure -> the median value and the median ratio to `tokenizers` in the same round (above 1: faster)."""
    rounds: list[dict[str, dict[str, float]]] = []
    libraries = list(LIBRARIES)
    for _ in range(arguments.rounds):
        cells = {library: run_library(library, arguments) for library in libraries}
        rounds.append({library: cell for library, cell in cells.items() if cell is not None})
        libraries = list(rounds[-1])
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for library in libraries:
        summary[library] = {}
        for figure in rounds[0][library]:
            values = [cells[library][figure] for cells in rounds if library in cells]
            cell = {"value": statistics.median(values)}
            if "tokenizers" in libraries:
                ratios = [cells[library][figure] / cells["tokenizers"][figure] for cells in rounds]
                if figure.endswith(("_s", "_us", "rss_mb")) and not figure.endswith(("mb_s", "mtok_s")):
                    ratios = [1 / ratio for ratio in ratios]
                cell["ratio"] = statistics.median(ratios)
            summary[library][figure] = cell
    return summary


def default_tokenizer() -> str:
    if path := os.environ.get("HEADRACE_TOKENIZER_JSON"):
        return path
    from headrace.models import prepare

    return str(prepare("embedded", weights=False).tokenizer_json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="a tokenizer.json; by default the embedded model's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="bytes of each text")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.tokenizer = arguments.tokenizer or default_tokenizer()
    if arguments.library:
        print(json.dumps(measure(arguments.library, arguments.tokenizer, arguments.bytes)))
        return
    summary = compare(arguments)
    if arguments.json:
        print(json.dumps(summary, indent=2))
        return
    figures = list(next(iter(summary.values())))
    print(f"{'':22}" + "".join(f"{library:>20}" for library in summary))
    for figure in figures:
        cells = (summary[library][figure] for library in summary)
        shown = (f"{cell['value']:.3g}" + (f" ({cell['ratio']:.1f}x)" if "ratio" in cell else "") for cell in cells)
        print(f"{figure:22}" + "".join(f"{cell:>20}" for cell in shown))


if __name__ == "__main__":
    main()
