"""Whose turn it is: threads and event loops that share a model use its lane one after another."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from itertools import repeat, starmap
from typing import TYPE_CHECKING, Any, TypeVar

from jurybox.protocol.errors import Timeout

if TYPE_CHECKING:
    import asyncio

    from jurybox.client.lane import Lane

T = TypeVar("T")

_TURN = 0.001  # seconds between two looks of an event loop whether another thread's call is over


class Taken(Exception):
    """Another thread has the lock."""


class _Mine(dict[bool, None]):
    """What `acquire` said: True is looked up, anything else raises."""

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


class Turns:
    """The turns of one model.

    Attributes:
        lock: re-entrant, as a signal's handler or a destructor may use the model in the midst of a call.
        now: the turn that is there at once or not at all.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.anew()

    def anew(self) -> None:
        """In a forked child, whose parent's threads may have had the lock."""
        self.lock = threading.RLock()
        self.now = Turn(self.lock)
        self._watched: tuple[Lane, asyncio.AbstractEventLoop] | None = None

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

    def watch(self, lane: Lane, loop: asyncio.AbstractEventLoop) -> None:
        """Have answers taken in as they come to the lane, in the running loop, and take in what is there."""
        if self._watched is None or self._watched[0] is not lane or self._watched[1] is not loop:
            this, that = weakref.ref(self), weakref.ref(lane)  # what a loop or a thread calls must keep nothing alive

            def arrived() -> None:
                turns, watched = this(), that()
                if turns is not None and watched is not None:
                    turns._arrived(watched, loop, arrived)

            lane.watch(loop, arrived)
            self._watched = (lane, loop)
        lane.receive_now()

    def _arrived(self, lane: Lane, loop: asyncio.AbstractEventLoop, again: Callable[[], None]) -> None:
        try:
            with self.now:
                if lane.gone is None:
                    lane.receive_now()
        except Taken:  # by another thread, which takes in what it finds; perhaps it has looked already
            loop.call_later(_TURN, again)

    def _late(self) -> Timeout:
        return Timeout(f"another thread's call of {self._model!r} was not over in time: take a model for each")
