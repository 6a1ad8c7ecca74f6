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


async def joined(pieces: Sequence[bytes]) -> bytes:
    """Return the pieces of a body as one; a thread joins those of a large one, without the GIL."""
    if len(pieces) == 1:
        return pieces[0]
    if sum(map(len, pieces)) < HEAVY:
        return b"".join(pieces)
    return await asyncio.to_thread(b"".join, pieces)


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
    """One queue of all who have more to do than one turn: together they leave half of the time to everybody else.

    Among themselves they take turns, and lose nothing if nobody else wants anything.
    """

    def __init__(self) -> None:
        self._pace = Pace()
        self._heavy: WeakKeyDictionary[HasTurns, float] = WeakKeyDictionary()  # when each did heavy work last
        self._behind: dict[HasTurns, None] = {}
        self._owed = 0.0  # seconds of work since the last rest
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
        self._owed += seconds
        if not self._turning:
            self._turning = True
            owed, self._owed = self._owed, 0.0
            asyncio.get_running_loop().call_later(self._pace.rest(who, owed), self._next)

    def _next(self) -> None:
        self._turning = False
        began = time.monotonic()
        if (first := next(iter(self._behind), None)) is not None:
            del self._behind[first]
            first.go_on()
            if self._behind and not self._turning:  # that one has caught up, or is gone
                self._wait(first, time.monotonic() - began)


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
