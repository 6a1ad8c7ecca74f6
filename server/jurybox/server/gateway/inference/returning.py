"""Which connections are about to ask again, and whether the next ticket waits for them.

A gRPC client in closed loop uses 200 to 300 microseconds of CPU a request, gateway and engine half as much, and most of
their part is a ticket's, however many rows it has. Where all of them share one or two cores, little is lost by a
ticket that waits for clients that were just answered: they run meanwhile. So it waits there for half of those who
lately came back at once, as the engine does (engine/batches.py), and the other half runs while it is computed. Nobody
is waited for who asks from another host, or now and then; who is missed must be quick again first; where waits
are often in vain, or a model's cost is all by the row, there are none. With cores to spare a ticket waits for nobody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from jurybox.server.batch_cost import BatchCost
from jurybox.server.security.access import Source

_FEW = 2  # cores that clients, gateway and engine share
_MOST_AWAY = 1024  # connections may have ended
_QUICK = 0.004  # seconds within which a client in closed loop is back, where all run at once
_MOST_WAIT = 0.002  # seconds; uvloop's timers know no less than one thousandth
_HURRY = 0.1  # seconds: a request that has no more waits for nobody
_SHARED = 0.3  # of what a ticket takes: where it has less in common, waiting does not pay
_MOST_IN_VAIN = 0.25  # of the waits; where more are, nobody is waited for
_SMOOTHING, _FORGIVEN = 0.1, 0.995  # what is left of that share after a ticket that waited for nobody


class Returning:
    """Who of a model's clients is about to come back. Belongs to one event loop.

    Args:
        cores: that this process may use.
        clock: seconds, monotonic.
    """

    def __init__(self, cores: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._few = (len(os.sched_getaffinity(0)) if cores is None else cores) <= _FEW
        self._clock = clock
        self._cost = BatchCost()
        self._took = 0.0  # seconds of a ticket, smoothed
        self._away: dict[Source, None] = {}  # quick ones that were answered and have not asked since
        self._until = 0.0  # when the wait that goes on is over; 0: none does
        self._in_vain = 0.0  # the share of waits that nobody ended, smoothed

    def asked(self, source: Source | None, seconds: float, waiting: int) -> bool:
        """A request came, which has so many seconds. Gives whether the `waiting` go on waiting."""
        if seconds < _HURRY:
            self._forget()
        if source is None or not self._few:
            return False
        source.quick = source.near and self._clock() - source.answered < _QUICK
        self._away.pop(source, None)
        return self._until > 0.0 and waiting < len(self._away)

    def answered(self, source: Source | None) -> None:
        """A request was answered."""
        if source is not None and self._few:
            source.answered = self._clock()
            if source.quick:
                if len(self._away) >= _MOST_AWAY:
                    self._forget()
                self._away[source] = None

    def took(self, rows: int, seconds: float) -> None:
        """A ticket of so many rows was answered."""
        if self._few:
            self._cost.observe(rows, int(seconds * 1e9))
            self._took += _SMOOTHING * (seconds - self._took)

    def together(self, source: Source | None) -> bool:
        """Whether a ticket of this and others has the loop to itself: nobody's core is kept from work by its wait."""
        return self._few and source is not None and source.quick

    def wait(self, waiting: int) -> float:
        """Seconds for which the next ticket, of so many requests, should still wait."""
        if waiting >= len(self._away):
            if self._until:
                self._until, self._in_vain = 0.0, (1 - _SMOOTHING) * self._in_vain
            return 0.0
        now = self._clock()
        if self._until > now:
            return self._until - now
        if self._until:
            self._until, self._in_vain = 0.0, self._in_vain + _SMOOTHING * (1 - self._in_vain)
            self._forget()
        elif self._in_vain > _MOST_IN_VAIN or self._cost.fixed < _SHARED * 1e9 * self._took:
            self._in_vain *= _FORGIVEN
        else:
            self._until = now + _MOST_WAIT
            return _MOST_WAIT
        return 0.0

    def _forget(self) -> None:
        """Who is away now is not waited for, before it was quick once more."""
        for source in self._away:
            source.quick = False
        self._away.clear()
