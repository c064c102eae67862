"""Prompt-lookup speculation: what a sequence may say next, guessed from what it and its prompt have said before.

The last ids of a sequence are looked up in all before them; what followed there is drafted, and computed in the same
step as the id that is due. Each drafted id that the model would have drawn too saves a step. Answers that repeat their
prompt (summaries, code to be changed, quotations) gain most, others nothing.

Whether that pays is weighed each step (``Speculation``): a step's time is learned as a line over the tokens in it, and
each sequence's acceptance from its own drafts. The more sequences decode, the steeper a step's time grows with tokens,
and drafts are fewer, down to none. A core without clock or engine.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

#: Longest and shortest run of ids that is looked up; one id alone says too little.
_LONGEST, _SHORTEST = 3, 2
#: Of a sequence that has not been tried, and to which an untried one comes back.
_PRIOR = 0.5
_FORGET, _RECOVER = 0.85, 0.002
#: A line needs steps of different sizes; older ones count less.
_DECAY = 0.98


class Lookup:
    """One sequence's ids by what follows them, and how well that has done."""

    __slots__ = ("_ends", "_seen", "acceptance")

    def __init__(self) -> None:
        #: Where each run of ids was last seen, as the place after it.
        self._ends: dict[tuple[int, ...], int] = {}
        self._seen = 0
        self.acceptance = _PRIOR

    def draft(self, ids: Seq[int], most: int) -> list[int]:
        """Up to ``most`` ids that may follow."""
        self._index(ids)
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            at = self._ends.get(tuple(ids[-length:]))
            if at is not None:
                return list(ids[at : at + most])
        return []

    def _index(self, ids: Seq[int]) -> None:
        # Not the run at the very end: it would find itself.
        for end in range(max(self._seen, _SHORTEST), len(ids)):
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(ids[end - length : end])] = end
        self._seen = max(self._seen, len(ids))

    def learn(self, drafted: int, accepted: int) -> None:
        """So many of those drafted were drawn."""
        tried = accepted + (accepted < drafted)
        for place in range(tried):
            hit = 1.0 if place < accepted else 0.0
            self.acceptance = _FORGET * self.acceptance + (1 - _FORGET) * hit

    def rest(self) -> None:
        """It had a draft, and it did not pay: one day it is worth another try."""
        self.acceptance += _RECOVER * (_PRIOR - self.acceptance)


class Speculation:
    """How much to draft in a step; and the books."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.drafted_total = 0
        self.accepted_total = 0
        #: Weighted sums over steps: 1, n, n², t, n·t.
        self._sums = [0.0] * 5

    def step_took(self, tokens: int, duration_s: float) -> None:
        """A step that computed so many tokens, and no prompts."""
        for place, value in enumerate((1.0, tokens, tokens * tokens, duration_s, tokens * duration_s)):
            self._sums[place] = _DECAY * self._sums[place] + value

    def _line(self) -> tuple[float, float]:
        """A step's time is the first, and the second for each token. Until sizes have differed tokens cost nothing, so
        that they come to differ."""
        one, n, nn, t, nt = self._sums
        spread = one * nn - n * n
        slope = max(0.0, (one * nt - n * t) / spread) if spread > 1e-9 * max(1.0, nn) else 0.0
        base = (t - slope * n) / one if one else 1.0
        return max(base, 0.0), slope

    def count(self, acceptances: Seq[float], decoding: int) -> int:
        """How many ids each of those that have a draft should add, of ``decoding`` sequences in all; 0 = none."""
        base, slope = self._line()
        tokens = sum(acceptances)
        best, best_rate = 0, _rate(decoding, base + slope * decoding)
        chances, gained = list(acceptances), 0.0
        for count in range(1, self.most + 1):
            gained += tokens
            chances = [chance * first for chance, first in zip(chances, acceptances, strict=True)]
            tokens = sum(chances)
            rate = _rate(decoding + gained, base + slope * (decoding + count * len(acceptances)))
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def learn(self, lookup: Lookup, drafted: int, accepted: int) -> None:
        """What became of a draft."""
        self.drafted_total += drafted
        self.accepted_total += accepted
        lookup.learn(drafted, accepted)


def _rate(tokens: float, time: float) -> float:
    return tokens / time if time > 0 else tokens
