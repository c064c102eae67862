"""How many lines of a batch run at once: as many as bring more tokens a second, and fewer when they are pushed back.

Nobody tells a batch how much room there is; what it sees is how fast answers come and who refuses. So it climbs: twice
as many, as long as that brings at least ``GAIN`` more; then it stays where the last gain was and tries one step up and
one down from time to time, because fleets and neighbours change. A refusal that may be tried again (429, 503) halves
the number, once for all that were on their way, and nothing is sent for as long as it asks (or, without a hint, for a
time that doubles).

A core without clock or sockets: times are arguments, in seconds of one monotonic clock. The bound is ``most``, always.
"""

from __future__ import annotations

import math

#: Twice as many lines have to bring so much more.
GAIN = 1.15
#: A step down is kept when it brings no less than this.
KEEP = 0.97
#: Between tries from where it stays.
FIRST_HOLD_S, LAST_HOLD_S = 10.0, 160.0
#: Waits after a refusal that names none.
FIRST_WAIT_S, LAST_WAIT_S = 0.25, 8.0


class Pace:
    """See the module's text."""

    def __init__(self, most: int, now_s: float, *, first: int = 8) -> None:
        self.most = max(1, most)
        #: Lines that may be under way.
        self.limit = min(first, self.most)
        #: Nothing is sent before.
        self.not_before_s = 0.0
        # Where it stays, and the rate there; None until that is measured.
        self._base: tuple[int, float] | None = None
        # Doubling up to here; afterwards it only tries.
        self._climb_to = self.most
        self._try_at_s = math.inf
        self._hold_s = FIRST_HOLD_S
        self._down_next = True
        self._wait_s = FIRST_WAIT_S
        # No answer came since the last refusal.
        self._refused = False
        self._measure(now_s)

    def _measure(self, now_s: float) -> None:
        """Rates are measured over lines that were sent since the limit changed."""
        self._since_s = now_s
        self._counted_s = math.inf
        self._ended = 0
        self._tokens = 0

    def room(self, under_way: int, now_s: float) -> int:
        """How many more may be sent now."""
        return max(0, self.limit - under_way) if now_s >= self.not_before_s else 0

    def ended(self, tokens: int, sent_s: float, now_s: float, *, full: bool) -> None:
        """An answer came. ``full``: as many were under way as may be, else it tells nothing about the limit."""
        self._wait_s = FIRST_WAIT_S
        self._refused = False
        if not full or sent_s < self._since_s:
            return
        if self._counted_s is math.inf:
            # From the first end on: before it, those that were sent together only began.
            self._counted_s = now_s
            return
        self._ended += 1
        self._tokens += tokens
        if self._ended >= max(2 * self.limit, 8) and now_s > self._counted_s:
            self._judge(self._tokens / (now_s - self._counted_s), now_s)

    def _judge(self, rate: float, now_s: float) -> None:
        limit = self.limit
        staying = self._base is None or self._base[0] == limit
        if self._base is None or staying or rate >= self._base[1] * self._needed(self._base[0]):
            if not staying:
                self._hold_s = FIRST_HOLD_S
            self._base = (limit, rate)
        else:
            # Back to where the last gain was, and less often tried.
            self._climb_to = 0
            self._hold_s = min(self._hold_s * 2, LAST_HOLD_S)
        stays = self._base[0]
        if stays < self._climb_to:
            self._go(min(2 * stays, self._climb_to), now_s)
        elif self._try_at_s is math.inf or not staying:
            self._try_at_s = now_s + self._hold_s
            self._go(stays, now_s)
        elif now_s >= self._try_at_s:
            self._try_at_s = math.inf
            down, self._down_next = self._down_next, not self._down_next
            self._go(stays * 3 // 4 if down else math.ceil(stays * 1.5), now_s)
        else:
            self._go(stays, now_s)

    def _needed(self, stays: int) -> float:
        if self.limit < stays:
            return KEEP
        return GAIN if self.limit >= 2 * stays else math.sqrt(GAIN)

    def _go(self, limit: int, now_s: float) -> None:
        self.limit = min(max(limit, 1), self.most)
        self._measure(now_s)

    def pushed_back(self, retry_after_s: float | None, sent_s: float, now_s: float) -> None:
        """A line was refused, to be tried again."""
        wait_s = self._wait_s if retry_after_s is None else retry_after_s
        self.not_before_s = max(self.not_before_s, now_s + wait_s)
        if sent_s < self._since_s:
            # One of those that were on their way when the number was halved.
            return
        self._wait_s = min(self._wait_s * 2, LAST_WAIT_S)
        if not self._refused:
            # The first since an answer: half of this is known to be borne. Further ones say that nobody is there.
            self._climb_to = max(1, self.limit // 2)
        self._refused = True
        self._base, self._try_at_s = None, math.inf
        self._go(self.limit // 2, now_s)
