"""A drafting model for the llama.cpp engine: a smaller one of the same vocabulary, with a context of its own.

After a step it is told whose next ids are to be guessed (``Step.guesses``) and what they have said by then. It reads
what it does not know yet, a bounded part of it at a time, and guesses greedily for all of them together. Its KV is
bounded: whose guesses were asked for least recently makes room. What it guesses changes no text, only how long that
takes; so nothing here may fail a request.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headrace.worker.composer import Sequence
from headrace.worker.engines.llama_api import Context

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Read:
    """What the model has in its KV for one sequence."""

    place: int
    ids: list[int] = field(default_factory=list)
    #: Of ids, those that were the sequence's own, and no guesses.
    certain: int = 0


class DraftingModel:
    """See the module's text. For one thread."""

    def __init__(
        self,
        weights: Path,
        *,
        kv_tokens: int,
        sequences: int,
        most_at_once: int,
        threads: int,
        copy_weights: bool = False,
    ) -> None:
        """``most_at_once``: ids read for all sequences after one step. ``copy_weights``: see ``Context``."""
        self._kv_tokens = kv_tokens
        self._most_at_once = max(most_at_once, sequences)
        # One more: a context keeps its last sequence for itself.
        self._context = Context(
            weights,
            kv_tokens=kv_tokens,
            sequences=sequences + 1,
            batch_tokens=self._most_at_once,
            threads=threads,
            copy_weights=copy_weights,
        )
        self._free = list(range(sequences))
        #: The one asked for least recently first.
        self._read: OrderedDict[Sequence, _Read] = OrderedDict()
        self._context.try_out(0, min(self._most_at_once, kv_tokens))
        self._context.remove(0, 0, -1)
        #: What its KV takes.
        self.kv_bytes = self._context.state_bytes(1) * kv_tokens

    def guess(
        self, wanted: Mapping[int, tuple[Sequence, list[int], int]]
    ) -> tuple[dict[int, tuple[list[int], int]], list[tuple[int, float]]]:
        """For each place a sequence, all its ids, and how many more to guess. The guesses and what is still to be read
        (then there are none); and the ids computed at once, with their seconds."""
        took: list[tuple[int, float]] = []
        told: dict[int, tuple[list[int], int]] = {}
        rows: list[tuple[int, _Read, list[int], int]] = []
        room = self._most_at_once
        for place, (sequence, ids, count) in wanted.items():
            read = self._opened(sequence, ids, count)
            if read is None:
                told[place] = ([], len(ids))
                continue
            new = ids[len(read.ids) : len(read.ids) + room]
            room -= len(new)
            if new:
                rows.append((place, read, new, count))
            read.certain = len(read.ids) + len(new)
            told[place] = ([], len(ids) - read.certain)
        if not rows:
            return told, took
        firsts = self._compute([(read, new) for _, read, new, _ in rows], took)
        if firsts is None:
            return told, took
        going = [
            (place, read, token, count)
            for (place, read, _, count), token in zip(rows, firsts, strict=True)
            if told[place][1] == 0
        ]
        guesses = {place: [token] for place, _, token, _ in going}
        while going := [row for row in going if len(guesses[row[0]]) < row[3]]:
            drawn = self._compute([(read, [guesses[place][-1]]) for place, read, _, _ in going], took)
            if drawn is None:
                break
            for (place, _, _, _), token in zip(going, drawn, strict=True):
                guesses[place].append(token)
        told |= {place: (ids, 0) for place, ids in guesses.items()}
        return told, took

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        read = self._read.pop(sequence, None)
        if read is not None:
            self._context.remove(read.place, 0, -1)
            self._free.append(read.place)

    def close(self) -> None:
        """Frees the model."""
        self._read.clear()
        self._context.close()

    def _opened(self, sequence: Sequence, ids: list[int], count: int) -> _Read | None:
        """What was read of it, without guesses that did not come true; None when there is no room."""
        read = self._read.get(sequence)
        if read is not None:
            known = read.certain
            while known < len(read.ids) and known < len(ids) and read.ids[known] == ids[known]:
                known += 1
            # The last one is computed in any case: what follows it is asked for.
            known = min(known, len(ids) - 1)
            if known < len(read.ids):
                self._context.remove(read.place, known, -1)
                del read.ids[known:]
            self._read.move_to_end(sequence)
        new = len(ids) + count - (len(read.ids) if read is not None else 0)
        while (not self._free and read is None) or self._held() + new > self._kv_tokens:
            oldest = next(iter(self._read), None)
            if oldest is None or oldest is sequence:
                return None
            self.forget(oldest)
        if read is None:
            read = self._read[sequence] = _Read(self._free.pop())
        return read

    def _held(self) -> int:
        return sum(len(read.ids) for read in self._read.values())

    def _compute(self, rows: list[tuple[_Read, list[int]]], took: list[tuple[int, float]]) -> list[int] | None:
        """The likeliest id after each; None when llama.cpp could not, and then nothing is known any more."""
        context, end = self._context, 0
        began_s = time.perf_counter()
        for read, new in rows:
            start, end = end, end + len(new)
            context.tokens[start:end] = new
            context.positions[start:end] = np.arange(len(read.ids), len(read.ids) + len(new))
            context.sequence_ids[start:end] = read.place
            context.wants_logits[start:end] = 0
            context.wants_logits[end - 1] = 1
        if (code := context.decode(end)) != 0:
            log.warning("the drafting model could not compute %d ids (code %d)", end, code)
            for sequence in list(self._read):
                self.forget(sequence)
            return None
        for read, new in rows:
            read.ids += new
        best: list[int] = context.logits(len(rows)).argmax(axis=1).tolist()
        took.append((end, time.perf_counter() - began_s))
        return best
