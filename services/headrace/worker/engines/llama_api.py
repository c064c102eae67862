"""llama.cpp's C interface as few Python objects: a model, its vocabulary, a context with one batch, a grammar.

Written against llama-cpp-python's ctypes declarations of exactly one version (the extra pins it): structs change
between versions. Objects here own what they wrap and free it in ``close``. Nothing here decides; ``llama_cpp.py``
does.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import EngineError, ModelError
from headrace.models import quiet_llama_cpp
from headrace.worker.sampling import Floats, Ids

#: llama.cpp keeps a bit for each sequence of a KV cell.
MAX_SEQUENCES = 256

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)], align=True)


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))


#: ``GGML_FA_TILE_Q`` of ggml's CPU kernels.
_TILE_ROWS = 64


class Vocabulary:
    """A model's vocabulary; alone (without weights), when made from a file."""

    def __init__(self, path: Path | None = None, model: Any = None) -> None:
        self.library = quiet_llama_cpp()
        self._own = None
        if model is None:
            parameters = self.library.llama_model_default_params()
            parameters.vocab_only = True
            model = self._own = self.library.llama_model_load_from_file(str(path).encode(), parameters)
            if not model:
                raise ModelError(f"llama.cpp cannot load {path}")
        self.pointer = self.library.llama_model_get_vocab(model)
        self.size = int(self.library.llama_vocab_n_tokens(self.pointer))

    def is_end(self, token: int) -> bool:
        """llama.cpp itself takes it for an end of generation."""
        return bool(self.library.llama_vocab_is_eog(self.pointer, token))

    def tokenize(self, text: str) -> list[int]:
        """With special tokens parsed; for tests, as services leave text to the router."""
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) + 8))()
        count = self.library.llama_tokenize(self.pointer, data, len(data), out, len(out), False, True)
        return list(out[:count])

    def close(self) -> None:
        """Frees a vocabulary that was loaded alone."""
        if self._own is not None:
            self.library.llama_model_free(self._own)
            self._own = None


class Grammar:
    """A grammar and how far an answer has come in it. A ``TokenFilter``."""

    def __init__(self, vocabulary: Vocabulary, gbnf: str | None, copy_of: Grammar | None = None) -> None:
        """Raises ValueError when llama.cpp does not accept the text."""
        self._vocabulary = vocabulary
        self._library = vocabulary.library
        self._sampler: Any = None
        if copy_of is not None:
            self._sampler = self._library.llama_sampler_clone(copy_of._sampler)
        else:
            text = (gbnf or "").encode()
            if b"\0" in text:
                raise ValueError("the grammar holds a NUL")
            self._sampler = self._library.llama_sampler_init_grammar(vocabulary.pointer, text, b"root")
        # Never pass it on: llama.cpp follows it blindly.
        if not self._sampler:
            raise ValueError("llama.cpp does not accept the grammar")
        self._one = np.zeros(1, _TOKEN_DATA)

    def copy(self) -> Grammar:
        """Another answer in the same grammar, as far as this one has come."""
        return Grammar(self._vocabulary, None, self)

    def allows(self, token: int) -> bool:
        """See ``TokenFilter``."""
        one = self._one
        one[0] = (token, 0.0, 0.0)
        self._apply(one)
        return bool(one["logit"][0] > -np.inf)

    def allowed(self, tokens: Ids) -> Ids:
        """See ``TokenFilter``."""
        data = np.zeros(len(tokens), _TOKEN_DATA)
        data["id"] = tokens
        self._apply(data)
        return tokens[data["logit"] > -np.inf]

    def accept(self, token: int) -> None:
        """See ``TokenFilter``. The id must be allowed: llama.cpp ends the process otherwise."""
        self._library.llama_sampler_accept(self._sampler, token)

    def next_ids(self) -> Ids:
        """All ids that may come next."""
        return self.allowed(np.arange(self._vocabulary.size, dtype=np.intp))

    def is_end(self, token: int) -> bool:
        """After it nothing may come."""
        return self._vocabulary.is_end(token)

    def close(self) -> None:
        """Frees it."""
        if self._sampler:
            self._library.llama_sampler_free(self._sampler)
            self._sampler = None

    def __del__(self) -> None:
        self.close()

    def _apply(self, data: npt.NDArray[Any]) -> None:
        view = self._library.llama_token_data_array(
            data=ctypes.cast(data.ctypes.data, ctypes.POINTER(self._library.llama_token_data)),
            size=len(data),
            selected=-1,
            sorted=False,
        )
        self._library.llama_sampler_apply(self._sampler, ctypes.byref(view))


class Context:
    """A loaded model, its KV and one batch."""

    def __init__(
        self,
        path: Path,
        *,
        kv_tokens: int,
        sequences: int,
        batch_tokens: int,
        threads: int,
        copy_weights: bool = False,
    ) -> None:
        """``copy_weights``: into memory of its own, and not the file's pages, which its other readers share."""
        library = self.library = quiet_llama_cpp()
        self._context: Any = None
        parameters = library.llama_model_default_params()
        if copy_weights:
            parameters.load_mode = library.LLAMA_LOAD_MODE_NONE
        self._model = library.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ModelError(f"llama.cpp cannot load {path}")
        self.vocabulary = Vocabulary(model=self._model)
        if library.llama_model_is_recurrent(self._model) or library.llama_model_is_hybrid(self._model):
            self.close()
            raise ModelError(f"{path}: a recurrent model has no KV that could be shared or cut")
        context = library.llama_context_default_params()
        context.n_ctx, context.n_seq_max = kv_tokens, sequences
        # The last one is ours: llama.cpp saves and loads whole sequences only.
        self._scratch = sequences - 1
        # A whole step is one batch; 512 tokens are computed at a time.
        context.n_batch, context.n_ubatch = batch_tokens, min(512, batch_tokens)
        context.n_threads = context.n_threads_batch = threads
        # One pool of cells for all sequences: prefixes are shared by reference, and mixed batches stay whole.
        context.kv_unified, context.swa_full = True, True
        context.no_perf = True
        self._context = library.llama_init_from_model(self._model, context)
        if not self._context:
            self.close()
            raise EngineError(f"llama.cpp cannot make a context of {kv_tokens} KV tokens and {sequences} sequences")
        self._memory = library.llama_get_memory(self._context)
        #: Rows of a batch from which attention is computed in tiles of rows, each over all cells that any of its rows
        #: sees; None where it is not on the CPU.
        self.tile_rows = None if library.llama_supports_gpu_offload() else _TILE_ROWS
        self.trained_context = int(library.llama_model_n_ctx_train(self._model))
        self._logits: Floats | None = None
        self._logits_at = 0
        # llama.cpp asks before each of a graph's thousand nodes, and a function of Python's would wait for the GIL each
        # time. libc's strlen reads the answer without: an empty text is no.
        self._interrupted = ctypes.create_string_buffer(2)
        self._ask = ctypes.cast(ctypes.CDLL(None).strlen, library.ggml_abort_callback)
        library.llama_set_abort_callback(self._context, self._ask, ctypes.addressof(self._interrupted))
        self._make_batch(batch_tokens)

    def _make_batch(self, size: int) -> None:
        """The batch's arrays, as numpy's: filled by slices. Each position belongs to one sequence."""
        self.tokens = np.zeros(size, np.int32)
        self.positions = np.zeros(size, np.int32)
        self.sequence_ids = np.zeros(size, np.int32)
        self.wants_logits = np.zeros(size, np.int8)
        self._counts = np.ones(size, np.int32)
        self._addresses = self.sequence_ids.ctypes.data + 4 * np.arange(size, dtype=np.uint64)
        self._batch = self._batch_from(0)

    def _batch_from(self, start: int) -> Any:
        batch = self.library.llama_batch()
        batch.token = _pointer(self.tokens[start:], ctypes.c_int32)
        batch.pos = _pointer(self.positions[start:], ctypes.c_int32)
        batch.n_seq_id = _pointer(self._counts[start:], ctypes.c_int32)
        batch.seq_id = _pointer(self._addresses[start:], ctypes.POINTER(ctypes.c_int32))
        batch.logits = _pointer(self.wants_logits[start:], ctypes.c_int8)
        return batch

    def decode(self, end: int, start: int = 0) -> int:
        """Computes the batch's places from ``start`` to ``end``. 0, 1 (no room in the KV), 2 (interrupted), or an error
        below 0."""
        batch = self._batch if start == 0 else self._batch_from(start)
        batch.n_tokens = end - start
        return int(self.library.llama_decode(self._context, batch))

    def logits(self, rows: int) -> Floats:
        """Of the places that asked for them, in order. Valid until the next ``decode``."""
        pointer = self.library.llama_get_logits(self._context)
        address = ctypes.addressof(pointer.contents)
        if self._logits is None or self._logits_at != address or self._logits.shape[0] < rows:
            self._logits = np.ctypeslib.as_array(pointer, (rows, self.vocabulary.size))
            self._logits_at = address
        return self._logits[:rows]

    def interrupt(self) -> None:
        """Ends the ``decode`` under way, from any thread, until ``resume``."""
        self._interrupted.value = b"!"

    def resume(self) -> None:
        """Lets ``decode`` run again."""
        self._interrupted.value = b""

    def remove(self, sequence: int, start: int, end: int) -> None:
        """Gives up KV; ``end`` -1 = to the end."""
        if not self.library.llama_memory_seq_rm(self._memory, sequence, start, end):
            raise EngineError(f"llama.cpp cannot give up positions {start} to {end} of a sequence")

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """KV of one sequence becomes that of another, too."""
        self.library.llama_memory_seq_cp(self._memory, source, target, start, end)

    def try_out(self, sequence: int, tokens: int) -> None:
        """Computes so many positions of a sequence that has none, as a prompt. What they hold is of no use."""
        self.tokens[:tokens], self.positions[:tokens] = 1, np.arange(tokens)
        self.sequence_ids[:tokens], self.wants_logits[:tokens] = sequence, 0
        self.wants_logits[tokens - 1] = 1
        if (code := self.decode(tokens)) != 0:
            raise EngineError(f"llama.cpp could not compute a step of {tokens} tokens (code {code})")
        self.logits(1)

    def state_bytes(self, tokens: int) -> int:
        """What ``save`` writes for so many positions. Before any sequence has KV."""
        self.try_out(self._scratch, tokens)
        size = int(self.library.llama_state_seq_get_size(self._context, self._scratch))
        self.remove(self._scratch, 0, -1)
        return size

    def save(self, sequence: int, start: int, end: int, place: npt.NDArray[np.uint8]) -> None:
        """Writes the KV of a sequence's positions to ``place``, which has ``state_bytes``."""
        self.share(sequence, self._scratch, start, end)
        wrote = self.library.llama_state_seq_get_data(
            self._context, _pointer(place, ctypes.c_uint8), place.size, self._scratch
        )
        self.remove(self._scratch, 0, -1)
        if wrote != place.size:
            raise EngineError(f"llama.cpp wrote {wrote} of {place.size} bytes of KV")

    def load(self, sequence: int, start: int, end: int, place: npt.NDArray[np.uint8]) -> None:
        """Gives a sequence the KV that ``save`` has written, at the positions it had."""
        read = self.library.llama_state_seq_set_data(
            self._context, _pointer(place, ctypes.c_uint8), place.size, self._scratch
        )
        if read != place.size:
            raise EngineError(f"llama.cpp took {read} of {place.size} bytes of KV")
        self.share(self._scratch, sequence, start, end)
        self.remove(self._scratch, 0, -1)

    def close(self) -> None:
        """Frees context and model."""
        if self._context:
            self.library.llama_free(self._context)
            self._context = None
        if self._model:
            self.library.llama_model_free(self._model)
            self._model = None
