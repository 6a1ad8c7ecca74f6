"""How the event loop's time is shared between work that comes in heaps and everything else."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")

HEAVY = 1 << 20  # bytes of answers after which others come first
HEAP = 1 << 16  # bytes of a read after which others come first: libuv reads 32 times before it looks at them
# Seconds for which somebody who was heard counts as active. Who wants something less often than that loses little to
# heavy work, whose turns are shorter: it is served between two of them.
_ACTIVE = 0.01
_MOST = 2.0  # seconds that are owed to others
# Seconds that are left to others for each second of heavy work: a little less than three, so that it gets a quarter of
# all. With one, a client that waits for its answers keeps less than half of its rate, since it needs the event loop
# twice for each; with two, it does where the kernel's part of the work is dear.
_LEFT = 2.8
_RECEIVE = 3e-10  # seconds that the event loop takes for each byte before its protocol gets it
_LEAST = 0.001  # seconds of one rest: the event loop's timers do not know less, and uvloop makes none of half of it
_READS = 3  # turns of the event loop within which somebody who reads on has read what is there, and it was counted
_HEAVY = 1.0  # seconds after its last turn for which somebody's wishes are no reason for others to rest


class Debt:
    """What all heavy work of one event loop owes to everything else: the time until which the latter comes first.

    Attributes:
        ended: when some of that work ended last, s of the monotonic clock. Nobody could be heard before.
    """

    def __init__(self) -> None:
        self.ended = float("-inf")
        self._until = float("-inf")  # s of the monotonic clock

    @property
    def left(self) -> float:
        """Seconds that are owed still."""
        return max(0.0, self._until - time.monotonic())

    def worked(self, seconds: float, elsewhere: float = 0.0) -> None:
        """Owe others their time for so much work, which has ended now, and as much as it took elsewhere before."""
        self.ended = now = time.monotonic()
        began = now - seconds
        if self._until > began - _LEAST:  # others still come first, or they did until now: a timer was late
            began = self._until
        self._until = min(began + (1 + _LEFT) * seconds + elsewhere, now + _MOST)

    def forgive(self) -> None:
        """Owe nothing: nobody wants it."""
        self._until = min(self._until, time.monotonic())


class WorkPace:
    """Knows who wants something, and so for how long heavy work should rest.

    Whoever has worked for long asks how long to `rest`: as long as is owed to others, while somebody else is active.
    So the others are served between two pieces of heavy work, and heavy work alone, or beside somebody who wants
    something now and then, loses nothing. Who does heavy work is no reason for others of that kind to rest.

    Args:
        debt: shared with the other paces of the event loop; None: one of its own.
    """

    def __init__(self, debt: Debt | None = None) -> None:
        self.debt = debt or Debt()
        self._who: ref[Any] | None = None  # whoever was heard last
        self._heard = self._before = float("-inf")  # when, and when somebody else was; s of the monotonic clock
        self._heavy: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # when each did heavy work last; inf: it waits

    def heard(self, who: Any) -> None:
        """Note that `who` wants something."""
        now = time.monotonic()
        if self._heavy and (last := self._heavy.get(who)) is not None:
            if now - last < _HEAVY:
                return
            del self._heavy[who]
        if self._who is None or self._who() is not who:
            self._who, self._before = ref(who), self._heard
        self._heard = now

    def heavy(self, who: Any, *, waits: bool = False) -> None:
        """Note that `who` has done heavy work, or waits until it may."""
        self._heavy[who] = float("inf") if waits else time.monotonic()

    def rest(self, who: object, owed: float, since: float | None = None) -> float:
        """Return for how many seconds `who` should leave others the time that is owed to them; then ask again.

        Args:
            owed: seconds.
            since: when this rest began, s of the monotonic clock; None: now, after work of at most as long as is owed.
        """
        now = time.monotonic()
        other = self._before if self._who is not None and self._who() is who else self._heard
        if since is None:
            if now - other >= owed + _ACTIVE:
                return 0.0
            since = now
        return max(0.0, min(owed, max(other, since, self.debt.ended) + _ACTIVE - now))

    def pay(self, who: object, then: Callable[[], None], since: float | None = None) -> None:
        """Rest for what is owed, while others want it, and then call. What is too little for a timer is owed on."""
        seconds = self.rest(who, self.debt.left, since)
        if not seconds:
            self.debt.forgive()
        if self.debt.left < _LEAST:
            then()
        else:
            since = time.monotonic() if since is None else since
            asyncio.get_running_loop().call_later(max(seconds, _LEAST), self.pay, who, then, since)


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
    """One queue of all who have more to do than one turn: together they leave three quarters of the time to all others.

    Among themselves they take turns, and lose nothing while nobody else wants anything.
    """

    def __init__(self, debt: Debt | None = None) -> None:
        self._pace = WorkPace(debt)
        self._behind: dict[HasTurns, Any] = {}  # whose turn each is
        self._turning = False  # whether one of them has its turn soon
        self._alone = asyncio.Lock()
        self._counted: deque[tuple[float, float]] = deque(maxlen=64)  # from when to when; s of the monotonic clock

    def heard(self, who: Any) -> None:
        """See `WorkPace.heard`."""
        self._pace.heard(who)

    def spent(self, began: float, size: int) -> float:
        """Return the seconds of work since then (s of the monotonic clock) and of having received so many bytes before.

        What was done for several in one turn of the event loop counts once.
        """
        now = time.monotonic()
        seconds, start = now - began, began
        while self._counted and self._counted[-1][1] > began:
            first, last = self._counted.pop()
            seconds -= last - max(first, began)
            start = min(start, first)
        self._counted.append((start, now))
        return seconds + size * _RECEIVE

    def rest(self, who: Any, seconds: float) -> float:
        """Return for how many seconds others come first after heavy work of so many; 0: `who` may go on."""
        self._pace.heavy(who)
        return self._pace.rest(who, max(seconds, self._pace.debt.left))

    def later(self, who: HasTurns, seconds: float) -> None:
        """Let somebody go on who has just had a turn of so many seconds, after all others that have more to do."""
        self._queue(who, who, seconds)

    def after(self, who: Any, seconds: float, call: Callable[[], None]) -> None:
        """Call it when all others have had their turns, after work of so many seconds for `who`, who has more to do."""
        if self.rest(who, seconds) > 0:
            self._queue(_Call(call), who, seconds)
        else:
            call()

    async def wait(self, who: Any, seconds: float) -> None:
        """Wait as `after` does; the event loop has a turn in any case."""
        came = asyncio.get_running_loop().create_future()
        self.after(who, seconds, lambda: None if came.done() else came.set_result(None))  # it may be cancelled
        await (came if not came.done() else asyncio.sleep(0))

    async def alone(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call something in a thread that holds the GIL for long, and leave others their time before the next call."""
        took = 0.0

        def timed() -> T:
            nonlocal took
            began = time.thread_time()
            try:
                return call(*arguments)
            finally:
                took = time.thread_time() - began

        async with self._alone:
            try:
                return await asyncio.to_thread(timed)
            finally:
                await self.wait(asyncio.current_task(), took)

    async def decoded(
        self,
        decode: Callable[[bytes], T],
        body: bytes,
        few: int = HEAVY,
        off_loop: Callable[[Callable[[bytes], T], bytes], Awaitable[T]] = asyncio.to_thread,
    ) -> T:
        """Return what `decode` makes of a body; a large one is decoded `alone`, whichever door it came through.

        Args:
            few: bytes of a body that is decoded in the event loop at most.
            off_loop: decodes what is between few and large.
        """
        if len(body) >= HEAVY:
            return await self.alone(decode, body)
        return decode(body) if len(body) <= few else await off_loop(decode, body)

    def _queue(self, turn: HasTurns, who: Any, seconds: float) -> None:
        self._behind[turn] = who
        self._pace.heavy(who, waits=True)
        self._wait(who, seconds)

    def _wait(self, who: Any, seconds: float) -> None:
        self._pace.debt.worked(seconds)
        if not self._turning:
            self._turning = True
            self._rest(who, _READS)

    def _rest(self, who: Any, turns: int) -> None:
        """Rest when the event loop has had so many turns."""
        if turns:
            asyncio.get_running_loop().call_soon(self._rest, who, turns - 1)
        else:
            self._pace.pay(who, self._next)

    def _next(self) -> None:
        self._turning = False
        began = time.monotonic()
        if (turn := next(iter(self._behind), None)) is not None:
            who = self._behind.pop(turn)
            self._pace.heavy(who)
            turn.go_on()
            if self._behind and not self._turning:  # that one has caught up, or reads on, or is gone
                self._wait(who, time.monotonic() - began)


class Breaks:
    """The rests of one that does heavy work in pieces, an engine's part and its own.

    Args:
        go_on: called after each rest.
    """

    def __init__(self, pace: WorkPace, go_on: Callable[[], None]) -> None:
        self._pace = pace
        self._go_on = go_on
        self.resting = False

    def heard(self) -> None:
        """See `WorkPace.heard`."""
        self._pace.heard(self)

    def after(self, sent: float, came: float) -> None:
        """Rest after a piece of work that ends with this turn of the loop.

        Args:
            sent, came: when its ticket was sent and answered, s of the monotonic clock. An engine computes, and copies,
                on the processors that all share: others get as much time as it took.
        """
        if not self.resting:
            self.resting = True
            asyncio.get_running_loop().call_soon(self._rest, sent, came)

    def _rest(self, sent: float, came: float) -> None:
        self._pace.heavy(self)
        self._pace.debt.worked(time.monotonic() - came, came - sent)
        self._pace.pay(self, self._over)

    def _over(self) -> None:
        self.resting = False
        self._go_on()
