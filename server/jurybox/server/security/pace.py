"""How the event loop's time is shared between work that comes in heaps and everything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

HEAVY = 1 << 20  # bytes of answers after which others come first
_ACTIVE = 0.05  # seconds for which somebody who was heard counts as active
_MOST = 0.1  # seconds of one rest


class Pace:
    """Gives heavy work at most half of the time while others want some.

    Whoever has worked for long asks how long to `rest`: as long as it has worked, if somebody else was active
    meanwhile. So the others are served between two pieces of heavy work, and heavy work alone loses nothing.
    """

    def __init__(self) -> None:
        self._who = 0  # the id of whoever was heard last
        self._heard = self._before = float("-inf")  # when, and when somebody else was; s of the monotonic clock

    def heard(self, who: object) -> None:
        """Note that `who` wants something."""
        number = id(who)
        if number != self._who:
            self._who, self._before = number, self._heard
        self._heard = time.monotonic()

    def rest(self, who: object, seconds: float) -> float:
        """Return how many seconds `who` should leave to others after it has worked for so many."""
        other = self._before if self._who == id(who) else self._heard
        return min(seconds, _MOST) if time.monotonic() - other < seconds + _ACTIVE else 0.0


class Breaks:
    """The rests of one that does heavy work in pieces.

    Args:
        go_on: called after each rest.
    """

    def __init__(self, pace: Pace, go_on: Callable[[], None]) -> None:
        self._pace = pace
        self._go_on = go_on
        self.resting = False

    def heard(self) -> None:
        """See `Pace.heard`."""
        self._pace.heard(self)

    def after(self, began: float) -> None:
        """Rest after a piece of work that began then (s of the monotonic clock) and ends with this turn of the loop."""
        if not self.resting:
            self.resting = True
            asyncio.get_running_loop().call_soon(self._rest, began)

    def _rest(self, began: float) -> None:
        if (seconds := self._pace.rest(self, time.monotonic() - began)) > 0:
            asyncio.get_running_loop().call_later(seconds, self._over)
        else:
            self._over()

    def _over(self) -> None:
        self.resting = False
        self._go_on()
