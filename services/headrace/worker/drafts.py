"""Speculation: what a sequence may say next, guessed, and computed in the same step as the id that is due.

Each drafted id that the model would have drawn too saves a step. There are two who guess. *Prompt lookup*: the last ids
of a sequence are looked up in all before them, and what followed there is drafted; answers that repeat their prompt
(summaries, code to be changed, quotations) gain most, others nothing. A *drafting model*, smaller and of the same
vocabulary, which the engine computes after a step for those that are named to it; it costs time of its own.

Whether that pays is weighed each step (``Speculation``): times are learned as lines over the tokens computed, and
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
#: What a drafting model must promise to gain: a tie is not worth its time.
_WORTH = 1.03


class Guesser:
    """How well one sequence's drafts have done."""

    __slots__ = ("acceptance",)

    def __init__(self, acceptance: float = _PRIOR) -> None:
        self.acceptance = acceptance

    def learn(self, drafted: int, accepted: int) -> None:
        """So many of those drafted were drawn."""
        tried = accepted + (accepted < drafted)
        for place in range(tried):
            hit = 1.0 if place < accepted else 0.0
            self.acceptance = _FORGET * self.acceptance + (1 - _FORGET) * hit

    def rest(self) -> None:
        """It had a draft, and it did not pay: one day it is worth another try."""
        self.acceptance += _RECOVER * (_PRIOR - self.acceptance)


class Lookup(Guesser):
    """One sequence's ids by what follows them."""

    __slots__ = ("_ends", "_seen")

    def __init__(self) -> None:
        super().__init__()
        #: Where each run of ids was last seen, as the place after it.
        self._ends: dict[tuple[int, ...], int] = {}
        self._seen = 0

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


class Drafted(Guesser):
    """What a drafting model has guessed for one sequence, and how much of it that model has yet to read."""

    __slots__ = ("at", "behind", "ids")

    def __init__(self, acceptance: float, behind: int) -> None:
        super().__init__(acceptance)
        self.ids: list[int] = []
        #: The sequence's length when they were guessed: they are of no use at another.
        self.at = 0
        self.behind = behind


class Line:
    """A time as a base and a slope over tokens, from those seen; older ones count less."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        #: Weighted sums: 1, n, n², t, n·t.
        self._sums = [0.0] * 5

    def saw(self, tokens: float, duration_s: float) -> None:
        """So many took so long."""
        for place, value in enumerate((1.0, tokens, tokens * tokens, duration_s, tokens * duration_s)):
            self._sums[place] = _DECAY * self._sums[place] + value

    def value(self, unknown: float) -> tuple[float, float]:
        """Base and slope; the base is ``unknown`` until something was seen. Until sizes have differed tokens cost
        nothing, so that they come to differ."""
        one, n, nn, t, nt = self._sums
        spread = one * nn - n * n
        slope = max(0.0, (one * nt - n * t) / spread) if spread > 1e-9 * max(1.0, nn) else 0.0
        base = (t - slope * n) / one if one else unknown
        return max(base, 0.0), slope


class Speculation:
    """How much to draft in a step; and the books."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.drafted_total = 0
        self.accepted_total = 0
        #: How a drafting model's guesses do for everybody: what a new sequence begins with.
        self.of_all = Guesser()
        self._steps = Line()
        self._guessing = Line()

    def step_took(self, tokens: int, duration_s: float) -> None:
        """A step that computed so many tokens, and no prompts."""
        self._steps.saw(tokens, duration_s)

    def guessing_took(self, tokens: int, duration_s: float) -> None:
        """The drafting model computed so many tokens at once."""
        self._guessing.saw(tokens, duration_s)

    def count(self, acceptances: Seq[float], decoding: int) -> int:
        """How many ids each of those that have a draft should add, of ``decoding`` sequences in all; 0 = none."""
        base, slope = self._steps.value(1.0)
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

    def count_guessed(self, rows: Seq[tuple[Drafted, int]], decoding: int) -> int:
        """The same of ids that a drafting model is to guess after this step, for the next: its own time counts too.
        ``rows``: for whom, and how many ids their answers may still have."""
        base, slope = self._steps.value(1.0)
        own_base, own_slope = self._guessing.value(0.0)
        best, best_rate = 0, _WORTH * _rate(decoding, base + slope * decoding)
        chances = [1.0] * len(rows)
        gains = [0.0] * len(rows)
        for count in range(1, self.most + 1):
            own = count * own_base + (count - 1) * own_slope * len(rows)
            for place, (drafted, left) in enumerate(rows):
                chances[place] *= drafted.acceptance
                gains[place] += chances[place]
                # A prompt is read once for the whole answer.
                own += own_slope * max(1.0, drafted.behind * min(1.0, (1 + gains[place]) / max(1, left)))
            tokens = decoding + count * len(rows)
            rate = _rate(decoding + sum(gains), base + slope * tokens + own)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def learn(self, guesser: Guesser, drafted: int, accepted: int) -> None:
        """What became of a draft."""
        self.drafted_total += drafted
        self.accepted_total += accepted
        guesser.learn(drafted, accepted)
        if isinstance(guesser, Drafted):
            self.of_all.learn(drafted, accepted)


def _rate(tokens: float, time: float) -> float:
    return tokens / time if time > 0 else tokens
