"""Tracking of robots that are about to send their next request, for which the next batch should wait.

Robots whose observations share a batch are answered together. Those that only wait for their answers send their next
observations at once, one after another. An engine that starts on the first of them computes it alone, and the rest in
the next batch. From then on there are two groups that take turns, and each batch has half of the robots.

So the next batch waits for the robots that returned at once the last time, if all of them return in less time than the
fixed cost of a batch, which does not depend on its rows. Then one batch of all robots is faster than two of half of
them: with n robots, a fixed cost F and a time R until the last one returns, n are answered in F + R, against n / 2 in
F. The batch waits for no robot longer than F; a robot that stays away longer is ignored until it has returned quickly
again. A single robot never waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jurybox.server.batch_cost import BatchCost

_SMOOTHING = 0.1
_MOST_IN_VAIN = 0.4  # share of the waits that may end in vain; above it, batches do not wait
_FORGIVEN = 0.99  # factor by which that share decays with each batch that did not wait


class ArrivalTracker:
    """A coalescer's `Gathering` that tracks when the robots of one port return. Belongs to one event loop.

    Args:
        most: rows of the largest batch.
        engines: number of engines that compute at the same time; each gets a part of the robots.
        waited: called with the seconds that each observation of a batch waited before it was sent.
        clock: monotonic clock, in seconds.
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
        self._answered: dict[int, float] = {}  # answer times of the robots without a request since
        self._quick: set[int] = set()  # robots that returned at once the last time
        self._away: dict[int, float] = {}  # answer times of those among them without a request since, oldest first
        self._first, self._gap = 0.0, 0.0  # seconds until the first robot returns, and between two that return
        self._batch = 0.0  # when the last batch was answered
        self._back = 0.0  # when the last of its robots returned; 0: none has
        self._waits = self._expired = False  # whether the next batch waits for a robot, and whether one did not come
        self._in_vain = 0.0  # share of the waits in vain, smoothed

    @property
    def fixed(self) -> float:
        """Fixed cost of a batch, independent of its rows, in seconds; 0 until it is known."""
        return self._cost.fixed / 1e9

    def arrived(self, place: int) -> None:
        """Record a robot's request."""
        self._away.pop(place, None)
        answered = self._answered.pop(place, None)
        now = self._clock()
        if answered is None or now - answered > self.fixed:
            self._quick.discard(place)
            return
        self._quick.add(place)
        if answered < self._batch:
            return  # the robot belongs to an earlier batch
        if self._back:
            self._gap = _smoothed(self._gap, now - self._back)
        else:
            self._first = _smoothed(self._first, now - self._batch)
        self._back = now

    def answered(self, place: int) -> None:
        """Record that a robot got its answer or an error."""
        self._answered[place] = now = self._clock()
        if place in self._quick:
            self._away[place] = now

    def left(self, place: int) -> None:
        """Record that a robot disconnected."""
        self._answered.pop(place, None)
        self._away.pop(place, None)
        self._quick.discard(place)

    def took(self, rows: int, seconds: float) -> None:
        """Record that a batch was answered (see `Gathering.took`). Call it before `answered` for the batch's robots."""
        self._cost.observe(rows, int(seconds * 1e9))
        self._batch, self._back = self._clock(), 0.0
        if self._waits:
            self._in_vain += 2 * _SMOOTHING * (self._expired - self._in_vain)
            self._waits = self._expired = False
        else:
            self._in_vain *= _FORGIVEN

    def wait(self, waiting: int, computing: int) -> float:
        """Return the seconds for which the next batch should still wait; see `Gathering.wait`."""
        now, fixed = self._clock(), self.fixed
        while self._away:
            place, answered = next(iter(self._away.items()))
            if now - answered < fixed:
                break
            self._expired = True
            del self._away[place]  # do not wait for this robot until it has returned quickly again
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
