"""The llama.cpp engine: a real model on a CPU (or whatever llama.cpp was built for), one context, one batch a step.

Greedy rows without conditions are drawn together by one argmax over the logits; all else goes through
``sampling.py``, row by row. Grammars have been compiled before (``guided.py``); an id is drawn first and checked
then.

What to expect of determinism: the same request draws the same *numbers* however it is run, but llama.cpp's logits
differ in their last bits with the shape of the batch, so that a near-tie may fall the other way beside other
requests. With BF16 weights none was seen to (8 of 8; on another CPU 3 of 12), with Q8_0 about one in eight, in AMX's
matrices none (12 of 12). Prompts in parts of another length, or partly reused, move the distance between the two
likeliest ids by 0.02 nats in the mean in BF16, and by 0.1 with quantized weights. ``Capabilities.batch_invariant`` is
therefore false.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from headrace.config import WorkerConfig
from headrace.errors import EngineError, ModelError, error
from headrace.models import ModelFolder
from headrace.process import available_memory_bytes
from headrace.v1 import types_pb2
from headrace.worker.composer import Chunk, Drawn, Limits, Sequence, Step
from headrace.worker.engine import Guided, Request, TokenLogprobs
from headrace.worker.engines.llama_api import MAX_SEQUENCES, Context, Grammar
from headrace.worker.engines.llama_draft import DraftingModel
from headrace.worker.engines.llama_kept import KeptBlocks
from headrace.worker.guided import GuidedCompiler
from headrace.worker.kv import CopyLane, FillPlace, LoadBlock, MoveBlock, Operation, SaveBlock, TrimLane
from headrace.worker.loop import Interrupted
from headrace.worker.sampling import Floats, Sampler, logprobs_of

log = logging.getLogger(__name__)

#: One micro-batch of llama.cpp: a larger step would be no faster, only longer.
_IDLE_CHUNK_TOKENS = 512
_MAX_GRAMMARS = 128
#: Weights are copied where they take no more than this part of the memory that is available.
_COPIED_PART = 0.25


class LlamaBackend:
    """See the module's text."""

    def __init__(self, folder: ModelFolder, config: WorkerConfig, draft: ModelFolder | None = None) -> None:
        """``draft``: of the drafting model."""
        if folder.weights is None:
            raise ModelError(f"model folder {folder.path} has no weights, which the llama_cpp engine needs")
        self._folder = folder
        self._weights = folder.weights
        self._config = config
        self._draft = draft
        self._drafting: DraftingModel | None = None
        self._compiler = GuidedCompiler(folder.weights)
        self._context: Context | None = None
        self._kept: KeptBlocks | None = None
        #: See ``Backend``; KV that comes is put where KV is kept.
        self.kv_block_bytes = 0
        #: Ready to be copied; the engine's thread takes them by what the request asked for.
        self._grammars: OrderedDict[Guided, Grammar] = OrderedDict()

    def open(self) -> Limits:
        """Loads, checks that it is the model the folder speaks of, and computes once with every kind of step."""
        config, folder = self._config, self._folder
        # One sequence more than lanes: the one by which blocks are saved and loaded.
        if config.slots + 1 > MAX_SEQUENCES:
            raise ModelError(
                f"worker.slots: llama.cpp has {MAX_SEQUENCES} sequences, at most {MAX_SEQUENCES - 1} slots"
            )
        context_tokens = min(config.context_tokens or folder.context_tokens, folder.context_tokens, config.kv_tokens)
        chunk = min(config.chunk_tokens, config.kv_tokens)
        limits = Limits(
            slots=config.slots,
            kv_blocks=config.kv_tokens // config.block_tokens,
            block_tokens=config.block_tokens,
            context_tokens=context_tokens,
            chunk_tokens=chunk,
            idle_chunk_tokens=max(chunk, min(_IDLE_CHUNK_TOKENS, config.kv_tokens)),
            max_waiting=config.max_waiting,
            draft_tokens=config.draft_tokens,
            drafting=self._draft is not None and config.draft_tokens > 0,
        )
        self._context = Context(
            self._weights,
            kv_tokens=config.kv_tokens,
            sequences=config.slots + 1,
            batch_tokens=config.slots * (1 + config.draft_tokens) + limits.idle_chunk_tokens,
            threads=config.threads,
            copy_weights=self._copies(self._weights),
        )
        if self._context.vocabulary.size != folder.vocab_size:
            raise ModelError(
                f"{self._weights} has {self._context.vocabulary.size} tokens, its model.json says {folder.vocab_size}"
            )
        self._warm_up(limits)
        if limits.drafting:
            self._open_drafting(limits)
        if not config.prefix_cache:
            return replace(limits, keep_beside=0)
        kept = self._kept = KeptBlocks(
            block_bytes=self._context.state_bytes(min(config.block_tokens, config.kv_tokens)),
            block_tokens=config.block_tokens,
            memory_bytes=config.prefix_cache_mib << 20,
            disk_bytes=config.prefix_cache_disk_mib << 20,
            folder=Path(config.prefix_cache_dir) if config.prefix_cache_dir else self._weights.parent,
        )
        if config.kv_tokens >= config.block_tokens and kept.places:
            self.kv_block_bytes = kept.block_bytes
        return replace(limits, keep_beside=kept.places, on_disk=kept.on_disk)

    def _open_drafting(self, limits: Limits) -> None:
        draft, config = self._draft, self._config
        assert draft is not None
        if draft.weights is None:
            raise ModelError(f"worker.draft_model: model folder {draft.path} has no weights")
        if draft.tokenizer_sha256 != self._folder.tokenizer_sha256:
            raise ModelError(f"worker.draft_model: {draft.weights} has another vocabulary than {self._weights}")
        self._drafting = DraftingModel(
            draft.weights,
            kv_tokens=config.draft_kv_tokens,
            sequences=limits.slots,
            most_at_once=limits.chunk_tokens,
            threads=config.threads,
            copy_weights=self._copies(draft.weights),
        )
        log.info(
            "the drafting model %s keeps KV of %d tokens: %d MiB",
            draft.weights,
            config.draft_kv_tokens,
            self._drafting.kv_bytes >> 20,
        )

    def _copies(self, weights: Path) -> bool:
        """Whether they are read into memory of our own, which can lie on huge pages."""
        if self._config.weights_memory != "auto":
            return self._config.weights_memory == "own"
        return weights.stat().st_size <= available_memory_bytes() * _COPIED_PART

    def describe(self) -> types_pb2.ModelDescription:
        """Of the folder."""
        folder = self._folder
        release = version("llama_cpp_python")
        return types_pb2.ModelDescription(
            engine="llama_cpp",
            engine_version=release,
            weights_sha256=folder.weights_sha256,
            quantization=folder.quantization,
            tokenizer_sha256=folder.tokenizer_sha256,
            template_sha256=folder.template_sha256,
            vocab_size=folder.vocab_size,
            eos_ids=folder.eos_ids,
            capabilities=types_pb2.Capabilities(
                guided=["json_schema", "json_object", "regex", "grammar", "choice"],
                logprobs=True,
                prompt_logprobs=True,
                kv_handoff=self.kv_block_bytes > 0,
            ),
            # llama.cpp takes a state of other weights without a word: the tag must tell them apart.
            kv_state_tag=f"llama_cpp-{release}-{folder.weights_sha256[:16]}-f16-{self._config.block_tokens}",
        )

    async def check(self, request: Request) -> types_pb2.Error | None:
        """Compiles its grammar, first in the child, then here, off the loop and off the engine's thread."""
        guided = request.guided
        if guided is None or guided in self._grammars:
            return None
        compiled = await self._compiler.compile(guided)
        if isinstance(compiled, types_pb2.Error):
            return compiled
        if guided not in self._grammars:
            try:
                grammar = await asyncio.to_thread(self._grammar, compiled)
            except ValueError as failure:
                return error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, str(failure), param="response_format")
            self._grammars[guided] = grammar
            while len(self._grammars) > _MAX_GRAMMARS:
                # The object frees itself when its last user is done.
                self._grammars.popitem(last=False)
        return None

    def _grammar(self, gbnf: str) -> Grammar:
        assert self._context is not None
        return Grammar(self._context.vocabulary, gbnf)

    def interrupt(self) -> None:
        """See ``Backend.interrupt``."""
        if self._context is not None:
            self._context.interrupt()

    def release(self, sequence: Sequence) -> None:
        """Drops its dice, and with them its grammar; and what was read for its guesses."""
        sequence.sampler = None
        if self._drafting is not None:
            self._drafting.forget(sequence)

    def close(self) -> None:
        """Frees everything but the grammars' child, which ``aclose`` ends."""
        context, self._context = self._context, None
        self._grammars.clear()
        if self._drafting is not None:
            self._drafting.close()
            self._drafting = None
        if context is not None:
            context.close()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    async def aclose(self) -> None:
        """Ends the grammars' child."""
        await self._compiler.close()

    # --- a step ------------------------------------------------------------------------------------------------------

    def execute(self, step: Step) -> Drawn:
        """See ``Backend.execute``."""
        context = self._context
        assert context is not None
        self._apply(context, step.operations)
        if step.empty:
            return Drawn([])
        began_s = time.perf_counter()
        logits = self._compute(context, step)
        if not step.decodes and self._kept is not None:
            self._kept.computed(step.prefill_tokens, time.perf_counter() - began_s)
        drawn = self._draw(step, logits)
        drawn.disk_pays = self._kept is None or self._kept.disk_pays
        if step.guesses and self._drafting is not None:
            wanted = {
                place: (sequence, [*sequence.ids, drawn.ids[place], *drawn.further.get(place, ())], count)
                for place, count in step.guesses.items()
                if (sequence := step.decodes[place]).lane is not None
            }
            drawn.guessed, drawn.guessing = self._drafting.guess(wanted)
        return drawn

    def _apply(self, context: Context, operations: Iterable[Operation]) -> None:
        kept = self._kept
        if kept is not None:
            kept.will_load(each.place for each in operations if isinstance(each, LoadBlock))
        for operation in operations:
            match operation:
                case CopyLane(source, target, start, end):
                    context.share(source, target, start, end)
                case TrimLane(lane, start, end):
                    context.remove(lane, start, end)
                case SaveBlock(lane, place, start, end):
                    assert kept is not None
                    context.save(lane, start, end, kept[place])
                case LoadBlock(lane, place, start, end):
                    assert kept is not None
                    with kept.loading(place) as kv:
                        context.load(lane, start, end, kv)
                case MoveBlock(source, target):
                    assert kept is not None
                    kept[target][:] = kept[source]
                case FillPlace(place, _, kv):
                    assert kept is not None
                    kept[place][:] = np.frombuffer(kv, np.uint8)

    def read_block(self, lane: int, start: int, end: int) -> bytes:
        """See ``Backend.read_block``."""
        context = self._context
        assert context is not None
        kv = np.empty(self.kv_block_bytes, np.uint8)
        context.save(lane, start, end, kv)
        return kv.tobytes()

    def _compute(self, context: Context, step: Step) -> Floats:
        """The step's logits."""
        size, outputs = self._fill(context, step)
        decoding = step.decode_tokens
        # In one batch a tile of rows that decode would see the cells of all of them, most of which each of them masks:
        # 16 sequences of 300 tokens and a chunk of 102 take twice as long together as one after the other.
        if not decoding or context.tile_rows is None or not decoding < context.tile_rows <= size:
            self._decode(context, 0, size)
            return context.logits(outputs)
        self._decode(context, 0, decoding)
        first = context.logits(decoding).copy()
        self._decode(context, decoding, size)
        if outputs == decoding:
            return first
        return np.concatenate((first, context.logits(outputs - decoding)))

    def _decode(self, context: Context, start: int, end: int) -> None:
        code = context.decode(end, start)
        if code == 2:
            context.resume()
            raise Interrupted
        if code != 0:
            # 1 = no room in the KV: the accounts are wrong, so what is there can't be trusted either.
            reason = "it has no room in its KV" if code == 1 else f"code {code}"
            raise EngineError(f"llama.cpp could not compute a step of {end - start} tokens: {reason}")

    def _fill(self, context: Context, step: Step) -> tuple[int, int]:
        """Writes the step into the batch; its places, and those of them that give logits."""
        tokens, positions = context.tokens, context.positions
        sequence_ids, wants = context.sequence_ids, context.wants_logits
        size = outputs = step.decode_tokens
        if step.drafts:
            self._fill_drafts(context, step)
        elif size:
            tokens[:size] = [sequence.ids[-1] for sequence in step.decodes]
            positions[:size] = [len(sequence.ids) - 1 for sequence in step.decodes]
            sequence_ids[:size] = [sequence.lane.id for sequence in step.decodes]  # type: ignore[union-attr]
            wants[:size] = 1
        for chunk in step.chunks:
            start, count = chunk.start, chunk.count
            end = size + count
            tokens[size:end] = chunk.sequence.ids[start : start + count]
            positions[size:end] = np.arange(start, start + count)
            sequence_ids[size:end] = chunk.lane.id
            wants[size:end] = chunk.all_logits
            outputs += count if chunk.all_logits else int(chunk.last)
            if chunk.last:
                wants[end - 1] = 1
            size = end
        return size, outputs

    def _fill_drafts(self, context: Context, step: Step) -> None:
        end = 0
        for place, sequence in enumerate(step.decodes):
            ids = [sequence.ids[-1], *step.drafts.get(place, ())]
            start, end = end, end + len(ids)
            context.tokens[start:end] = ids
            context.positions[start:end] = np.arange(len(sequence.ids) - 1, len(sequence.ids) - 1 + len(ids))
            context.sequence_ids[start:end] = sequence.lane.id  # type: ignore[union-attr]
        context.wants_logits[:end] = 1

    def _draw(self, step: Step, logits: Floats) -> Drawn:
        rows, outputs = step.rows, step.outputs
        samplers = [sequence.sampler or self._sampler(sequence) for sequence in rows]
        # One pass for all; the rows with conditions are drawn again below.
        best = logits.argmax(axis=1) if rows else None
        ids: list[int] = best[outputs].tolist() if best is not None else []
        drawn = Drawn(ids)
        if best is not None and step.drafts:
            drawn.further = {
                row: _further(draft, best[outputs[row] : outputs[row] + len(draft) + 1].tolist())
                for row, draft in step.drafts.items()
            }
        logprobs: dict[int, TokenLogprobs] = {}
        errors: dict[int, types_pb2.Error] = {}
        ended: list[int] = []
        for row, sequence in enumerate(rows):
            request, sampler = sequence.request, samplers[row]
            stopping = request.stopping
            if not sampler.plain or sequence.drawn < stopping.min_tokens:
                if isinstance(sampler, _Refused):
                    errors[row] = sampler.why
                    continue
                index = sequence.drawn + request.resumed_tokens
                forbidden = stopping.eos_ids | stopping.stop_ids if sequence.drawn < stopping.min_tokens else ()
                token = sampler.draw(logits[outputs[row]], index, forbidden)
                if token is None:
                    # The grammar is complete and only an end could follow, which min_tokens or the bias forbids.
                    token = next(iter(self._folder.eos_ids), 0)
                    ended.append(row)
                elif request.guided is not None and self._is_end(token):
                    ended.append(row)
                ids[row] = token
            if request.logprobs.enabled:
                logprobs[row] = logprobs_of(logits[outputs[row]], ids[row], request.logprobs.top)
        drawn.logprobs, drawn.errors, drawn.ended = logprobs, errors, frozenset(ended)
        if any(chunk.all_logits for chunk in step.chunks):
            drawn.prompt_logprobs = self._of_prompts(step, logits)
        return drawn

    def _is_end(self, token: int) -> bool:
        """After these a grammar allows nothing, whatever the request says of them."""
        assert self._context is not None
        return token in self._folder.eos_ids or self._context.vocabulary.is_end(token)

    def _sampler(self, sequence: Sequence) -> Sampler | _Refused:
        """The sequence's dice, made when its first id is drawn (and kept when it is pushed out and comes back)."""
        request = sequence.request
        prompt = request.prompt_ids
        resumed = prompt[len(prompt) - request.resumed_tokens :] if request.resumed_tokens else []
        grammar = None
        if request.guided is not None:
            prototype = self._grammars.get(request.guided)
            if prototype is None:
                why = error(types_pb2.ERROR_CODE_OVERLOADED, "its grammar was given up for others", retryable=True)
                return _refused(sequence, why)
            grammar = prototype.copy()
            for token in resumed:
                if not grammar.allows(token):
                    text = "the resumed answer does not follow its own grammar"
                    return _refused(sequence, error(types_pb2.ERROR_CODE_INVALID_ARGUMENT, text))
                grammar.accept(token)
        made = Sampler(request.sampling, sequence.choice, self._folder.vocab_size, prompt, resumed, grammar)
        sequence.sampler = made
        return made

    def _of_prompts(self, step: Step, logits: Floats) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
        output = step.decode_tokens
        for place, chunk in enumerate(step.chunks):
            if chunk.all_logits:
                found[place] = _of_prompt(chunk, logits[output:])
            output += chunk.count if chunk.all_logits else int(chunk.last)
        return found

    def _warm_up(self, limits: Limits) -> None:
        """llama.cpp plans its memory and touches the weights when it first computes; no request should wait."""
        context = self._context
        assert context is not None
        full = min(limits.idle_chunk_tokens, limits.kv_blocks * limits.block_tokens)
        for count in (full, 1):
            context.try_out(0, count)
            context.remove(0, 0, -1)


class _Refused:
    """In place of dice: why there are none."""

    plain = False

    def __init__(self, why: types_pb2.Error) -> None:
        self.why = why


def _refused(sequence: Sequence, why: types_pb2.Error) -> _Refused:
    refused = sequence.sampler = _Refused(why)
    return refused


def _further(draft: list[int], best: list[int]) -> list[int]:
    """The ids after the first of ``best``, each drawn after one more of the drafted ids that had been drawn itself."""
    further = []
    for guessed, token, following in zip(draft, best, best[1:], strict=False):
        if guessed != token:
            break
        further.append(following)
    return further


def _of_prompt(chunk: Chunk, logits: Floats) -> list[TokenLogprobs]:
    ids, top = chunk.sequence.request.prompt_ids, chunk.sequence.request.logprobs.top
    following = ids[chunk.start + 1 : chunk.start + chunk.count + 1]
    return [logprobs_of(logits[place], token, top) for place, token in enumerate(following)]
