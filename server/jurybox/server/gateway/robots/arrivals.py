"""Which robots are about to ask again, and whether the next batch should wait for them.

Robots whose observations share a batch are answered together, and those that only wait for their answers ask again one
after another, as fast as their messages are read. An engine that starts on the first of them computes it alone, then
the rest; as soon as there are two groups they take turns, and each batch has half of the robots. So the next batch
waits for those that came back at once the last time, by this rule: where all come back in less time than
a batch costs however few rows it has, one batch of all is sooner done than two of halves (with n robots, a fixed cost
F and a time R until the last is back, n answers in F + R, against n / 2 in F). Nobody is waited for longer than F: who
stays away is waited for no more until it was quick again. A lone robot waits for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jurybox.server.batch_cost import BatchCost

_SMOOTHING = 0.1
_MOST_IN_VAIN = 0.4  # of the waits; where more are, nobody is waited for
_FORGIVEN = 0.99  # what is left of that share after a batch that waited for nobody


class ArrivalTracker:
    """When the robots of one port come back, as a coalescer's `Gathering`. Belongs to one event loop.

    Args:
        most: rows of a batch.
        engines: that compute at the same time; each gets its part of the robots.
        waited: called with the seconds that a batch's observations waited to be sent.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        most: int,
        engines: int = 1,
        waited: Callable[[Sequence[float]], None] = lambda waits: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._engines, self._clock = most, engines, clock
        self.went = waited
        self._cost = BatchCost()
        self._answered: dict[int, float] = {}  # when each was answered that has not asked since
        self._quick: set[int] = set()  # who came back at once the last time
        self._away: dict[int, float] = {}  # of those who has been answered and has not asked since, the oldest first
        self._first, self._gap = 0.0, 0.0  # seconds until the first comes back, and between two that do
        self._batch = 0.0  # when the last batch was answered
        self._back = 0.0  # when the last of its robots came back; 0: none has
        self._waits = self._expired = False  # whether the next batch waits for somebody, or has in vain
        self._in_vain = 0.0  # the share of such waits, smoothed

    @property
    def fixed(self) -> float:
        """Seconds that a batch costs however few rows it has; 0 before it is known."""
        return self._cost.fixed / 1e9

    def asked(self, place: int) -> None:
        """A robot asks."""
        self._away.pop(place, None)
        answered = self._answered.pop(place, None)
        now = self._clock()
        if answered is None or now - answered > self.fixed:
            self._quick.discard(place)
            return
        self._quick.add(place)
        if answered < self._batch:
            return  # of the batch before
        if self._back:
            self._gap = _smoothed(self._gap, now - self._back)
        else:
            self._first = _smoothed(self._first, now - self._batch)
        self._back = now

    def answered(self, place: int) -> None:
        """A robot has got its answer, or an error."""
        self._answered[place] = now = self._clock()
        if place in self._quick:
            self._away[place] = now

    def left(self, place: int) -> None:
        """A robot has disconnected."""
        self._answered.pop(place, None)
        self._away.pop(place, None)
        self._quick.discard(place)

    def took(self, rows: int, seconds: float) -> None:
        """As Gathering.took; called before the robots of the batch are `answered`."""
        self._cost.observe(rows, int(seconds * 1e9))
        self._batch, self._back = self._clock(), 0.0
        if self._waits:
            self._in_vain += 2 * _SMOOTHING * (self._expired - self._in_vain)
            self._waits = self._expired = False
        else:
            self._in_vain *= _FORGIVEN

    def wait(self, waiting: int, computing: int) -> float:
        """As Gathering.wait."""
        now, fixed = self._clock(), self.fixed
        while self._away:
            place, answered = next(iter(self._away.items()))
            if now - answered < fixed:
                break
            self._expired = True
            del self._away[place]  # no longer to be waited for, until it has been quick once more
            self._quick.discard(place)
        if not self._away or self._in_vain > _MOST_IN_VAIN:
            return 0.0
        together = min(self._most, -(-(waiting + len(self._away) + computing) // self._engines))
        if waiting >= together or self._first + self._gap * (together - 1) > fixed:
            return 0.0
        self._waits = True
        return next(reversed(self._away.values())) + fixed - now


def _smoothed(before: float, now: float) -> float:
    return before + _SMOOTHING * (now - before) if before else now
