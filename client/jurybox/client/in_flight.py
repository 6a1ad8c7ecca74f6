"""A request in flight, and whose turn it is to make one: threads and event loops that share a model go one by one."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from jurybox.protocol.errors import Timeout

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

UNSENT = -1  # in place of an engine's number
LOOK_AFTER = 0.1  # seconds of silence after which the scoreboard is asked what became of the engine
LONGEST = 1e8  # seconds, three years: no wait is longer, and none overflows

# A future that is waited for, and its loop.
Waiter: TypeAlias = "tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]"


def seconds(timeout: float) -> float:
    """A time-out as it is used: 0 for what is over already, some years for ever. Raises ValueError for nan."""
    if 0.0 <= timeout <= LONGEST:
        return timeout
    if math.isnan(timeout):
        raise ValueError(f"timeout={timeout!r}: expected seconds")
    return 0.0 if timeout < 0.0 else LONGEST


class InFlight:
    """A request between the taking of its rows and its answer, in which time the rows are its own.

    Attributes:
        sequence: its number on its lane, never used again.
        first, rows: the rows it asks for.
        deadline, submitted: ns of CLOCK_MONOTONIC.
        version: of the weights that is asked for; 0: the newest.
        engine, incarnation: where it was sent last; UNSENT.
        deaths: of engines that it was with.
        answer: what came back.
        holder: who wants the answer, where that is not a call that waits for it.
        waiters: event loops, and what to wake in them when it is answered.
    """

    __slots__ = (
        "answer",
        "deadline",
        "deaths",
        "engine",
        "first",
        "holder",
        "incarnation",
        "rows",
        "sequence",
        "submitted",
        "version",
        "waiters",
    )  # fmt: skip

    def __init__(self, sequence: int, first: int, rows: int, deadline: int, version: int) -> None:
        self.sequence = sequence
        self.first = first
        self.rows = rows
        self.deadline = deadline
        self.version = version
        self.submitted = 0
        self.engine = UNSENT
        self.incarnation = 0
        self.deaths = 0
        self.answer: Answer | None = None
        self.holder: weakref.ref[Any] | None = None
        self.waiters: list[Waiter] | None = None


class Answer(NamedTuple):
    """What came back for a ticket."""

    sequence: int
    code: int
    message: str
    version: int
    incarnation: int


_TURN = 0.001  # seconds between two looks of an event loop whether another thread's call is over


class Taken(Exception):
    """Another thread has the lock."""


class _Mine(dict[bool, None]):
    """A table of what `acquire` returned: the lookup of False raises Taken."""

    def __missing__(self, _: bool) -> None:
        raise Taken


_MINE = _Mine({True: None})


class Turn:
    """The lock in a ``with`` that waits so many seconds for it, or not at all, and then raises Taken.

    Entering and leaving are single calls of C, as a lock's own are: a KeyboardInterrupt never falls between taking the
    lock and the ``with`` knowing of it. And it costs no more than ``with lock``.
    """

    __slots__ = ("__enter__", "__exit__")

    def __init__(self, lock: Any, seconds: float = 0.0) -> None:
        how = (True, seconds) if seconds > 0 else (False,)
        self.__enter__ = map(_MINE.__getitem__, starmap(lock.acquire, repeat(how))).__next__
        self.__exit__ = lock.__exit__


class Watched(Protocol):
    """What the turns use of a lane."""

    gone: Any

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None: ...

    def receive_now(self) -> None: ...


class Turns:
    """The turns of one model.

    Args:
        model: its name, for messages.
        timeout: seconds of a call whose caller says nothing else.

    Attributes:
        lock: re-entrant, as a signal's handler or a destructor may use the model in the midst of a call.
        now: the turn that is there at once or not at all.
    """

    def __init__(self, model: str, timeout: float) -> None:
        self.model = model
        self.timeout = timeout
        self.anew()

    def seconds(self, timeout: float | None) -> float:
        """A time-out, or the connection's default."""
        return self.timeout if timeout is None else seconds(timeout)

    def deadline(self, timeout: float | None) -> int:
        """The end of a time-out that begins now, ns of CLOCK_MONOTONIC."""
        return time.monotonic_ns() + int((self.timeout if timeout is None else seconds(timeout)) * 1e9)

    def anew(self) -> None:
        """In a forked child, whose parent's threads may have had the lock."""
        self.lock = threading.RLock()
        self.now = Turn(self.lock)
        self._watched: tuple[Watched, asyncio.AbstractEventLoop] | None = None

    def run(self, action: Callable[[], T], deadline: int) -> T:
        """Do something while no other thread uses the lane.

        Raises:
            Timeout: another thread's call was not over by `deadline`, ns of CLOCK_MONOTONIC.
        """
        try:
            with self.now:
                return action()
        except Taken:
            pass
        try:
            with Turn(self.lock, (deadline - time.monotonic_ns()) / 1e9):
                return action()
        except Taken:
            raise self._late() from None

    async def alone(self, action: Callable[[], T], deadline: int) -> T:
        """As `run`, of something short; the event loop goes on until then."""
        import asyncio  # most clients have no event loop, and its import costs as much as ZeroMQ's

        while True:
            try:
                with self.now:
                    return action()
            except Taken:
                pass
            if time.monotonic_ns() > deadline:
                raise self._late()
            await asyncio.sleep(_TURN)

    def watch(self, lane: Watched, loop: asyncio.AbstractEventLoop) -> None:
        """Receive the lane's answers in the running loop from now on, and those that have arrived."""
        if self._watched is None or self._watched[0] is not lane or self._watched[1] is not loop:
            this, that = weakref.ref(self), weakref.ref(lane)  # what a loop or a thread calls must keep nothing alive

            def arrived() -> None:
                turns, watched = this(), that()
                if turns is not None and watched is not None:
                    turns._arrived(watched, loop, arrived)

            lane.watch(loop, arrived)
            self._watched = (lane, loop)
        lane.receive_now()

    def _arrived(self, lane: Watched, loop: asyncio.AbstractEventLoop, again: Callable[[], None]) -> None:
        try:
            with self.now:
                if lane.gone is None:
                    lane.receive_now()
        except Taken:  # by another thread, which takes in what it finds; perhaps it has looked already
            loop.call_later(_TURN, again)

    def _late(self) -> Timeout:
        return Timeout(f"another thread's call of {self.model!r} was not over in time: take a model for each")
