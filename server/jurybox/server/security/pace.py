"""How the event loop's time is shared between work that comes in heaps and everything else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

HEAVY = 1 << 20  # bytes of answers after which others come first
HEAP = 1 << 16  # bytes of a read after which others come first: libuv reads 32 times before it looks at them
_ACTIVE = 0.05  # seconds for which somebody who was heard counts as active
_MOST = 0.1  # seconds of one rest
# Seconds that are left to others for each second of heavy work. With one, a client that waits for its answers keeps
# less than half of its rate: it needs the event loop twice for each.
_LEFT = 2.0
_RECEIVE = 2e-10  # seconds that the event loop takes for each byte before its protocol gets it
_LEAST = 0.001  # seconds of one rest: the event loop's timers do not know less, and uvloop makes none of half of it


class WorkPace:
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


async def joined(pieces: Sequence[bytes]) -> bytes:
    """Return the pieces of a body as one; a thread joins those of a large one, without the GIL."""
    if len(pieces) == 1:
        return pieces[0]
    if sum(map(len, pieces)) < HEAVY:
        return b"".join(pieces)
    return await asyncio.to_thread(b"".join, pieces)


def spent(began: float, size: int) -> float:
    """Return the seconds of work since then (s of the monotonic clock) and of having received so many bytes before."""
    return time.monotonic() - began + size * _RECEIVE


class HasTurns(Protocol):
    """Somebody with more to do than one turn."""

    def go_on(self) -> None:
        """Have the next turn."""
        ...


class _Call:
    """Something that is called once it has its turn."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.go_on = call


class Turns:
    """One queue of all who have more to do than one turn: together they leave two thirds of the time to everybody else.

    Among themselves they take turns, and lose nothing if nobody else wants anything.
    """

    def __init__(self) -> None:
        self._pace = WorkPace()
        self._heavy: WeakKeyDictionary[HasTurns, float] = WeakKeyDictionary()  # when each did heavy work last
        self._behind: dict[HasTurns, None] = {}
        self._owed = 0.0  # seconds that others did not get yet for the work that was done
        self._rests = False  # whether others have the event loop now
        self._began = 0.0  # when that rest began; s of the monotonic clock
        self._turning = False  # whether one of them has its turn soon

    def heard(self, who: Any) -> None:
        """Note that somebody wants something. Who does heavy work is no reason for others of that kind to rest."""
        if self._heavy and (last := self._heavy.get(who)) is not None:
            if time.monotonic() - last < _ACTIVE:
                return
            del self._heavy[who]
        self._pace.heard(who)

    def rest(self, who: HasTurns, seconds: float) -> float:
        """Return how many seconds should be left to others after heavy work of so many; 0: `who` may go on."""
        self._heavy[who] = time.monotonic()
        return self._pace.rest(who, seconds)

    def later(self, who: HasTurns, seconds: float) -> None:
        """Let somebody go on who has just had a turn of so many seconds, after all others that have more to do."""
        self._behind[who] = None
        self._heavy[who] = time.monotonic()
        self._wait(who, seconds)

    def after(self, who: Any, seconds: float, call: Callable[[], None]) -> None:
        """Call it when all others have had their turns, after work of so many seconds for `who`, who has more to do."""
        if self.rest(who, seconds) > 0:
            self.later(_Call(call), seconds)
        else:
            call()

    async def wait(self, who: Any, seconds: float) -> None:
        """Wait as `after` does; the event loop has a turn in any case."""
        came = asyncio.get_running_loop().create_future()
        self.after(who, seconds, lambda: None if came.done() else came.set_result(None))  # it may be cancelled
        await (came if not came.done() else asyncio.sleep(0))
        self._heavy[who] = time.monotonic()

    def _wait(self, who: HasTurns, seconds: float) -> None:
        self._owed += (_LEFT + 1 if self._rests else _LEFT) * seconds  # work within a rest also shortens the rest
        if not self._turning:
            self._turning = True
            self._begin_rest(who)

    def _begin_rest(self, who: HasTurns) -> None:
        """Rest for what is owed, and then have the next turn. What is too little for a timer is owed on."""
        self._owed = min(self._owed, _MOST)
        seconds = self._pace.rest(who, self._owed)
        if not seconds:
            self._owed = 0.0
        self._rests, self._began = seconds >= _LEAST, time.monotonic()
        asyncio.get_running_loop().call_later(seconds if self._rests else 0.0, self._next, who)

    def _next(self, who: HasTurns) -> None:
        if self._rests:  # uvloop's timers are up to a millisecond early
            self._rests, self._owed = False, max(0.0, self._owed - (time.monotonic() - self._began))
        if self._owed >= _LEAST:
            self._begin_rest(who)
            return
        self._turning = False
        began = time.monotonic()
        if (first := next(iter(self._behind), None)) is not None:
            del self._behind[first]
            first.go_on()
            if self._behind and not self._turning:  # that one has caught up, or reads on, or is gone
                self._wait(first, time.monotonic() - began)


class Breaks:
    """The rests of one that does heavy work in pieces.

    Args:
        go_on: called after each rest.
    """

    def __init__(self, pace: WorkPace, go_on: Callable[[], None]) -> None:
        self._pace = pace
        self._go_on = go_on
        self._owed = 0.0  # seconds of work after which there was no rest
        self.resting = False

    def heard(self) -> None:
        """See `WorkPace.heard`."""
        self._pace.heard(self)

    def after(self, began: float) -> None:
        """Rest after a piece of work that began then (s of the monotonic clock) and ends with this turn of the loop."""
        if not self.resting:
            self.resting = True
            asyncio.get_running_loop().call_soon(self._rest, began)

    def _rest(self, began: float) -> None:
        self._owed += time.monotonic() - began
        seconds = self._pace.rest(self, self._owed)
        if 0 < seconds < _LEAST:
            self._over()
            return
        self._owed = 0.0
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._over)
        else:
            self._over()

    def _over(self) -> None:
        self.resting = False
        self._go_on()
