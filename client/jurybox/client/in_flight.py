"""Requests in flight, and the lock that serializes the threads and event loops that share a model."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from jurybox.protocol.errors import Busy, Refused, Timeout
from jurybox.protocol.locks import IN_SERVICE, LockTurn, Taken, is_serving, seconds

if TYPE_CHECKING:
    import asyncio

    from jurybox.client.lane import Lane

T = TypeVar("T")

UNSENT = -1  # replaces an engine's number
LOOK_AFTER = 0.1  # seconds without an answer after which the scoreboard is checked for the engine's state

# An awaited future and its loop.
Waiter: TypeAlias = "tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]"


class Claim:
    """What a call holds while it is under way. Weak references to it show whether it still is."""

    __slots__ = ("__weakref__",)


class InFlight:
    """A request whose answer has not been settled. Until then its rows are lent to it.

    It is being sent while `sender` lives. Then it is sent, answered once `answer` is set, and settled once it is not
    in the lane's table any more. Each is one step of the interpreter, and tolerates that another call has made it.

    Attributes:
        sequence: its number on its lane, never reused.
        first, rows: its first row and its number of rows.
        deadline, submitted: ns of CLOCK_MONOTONIC.
        version: the requested weights version; 0: the newest.
        engine, incarnation: the engine that it was last sent to, or UNSENT, and that engine's incarnation.
        deaths: the number of engines that died with it in flight, and whose deaths are charged to its model.
        answer: the answer, once it has arrived.
        owner: the call or the object that wants the answer; if it is gone, a lost request is not sent again.
        sender: the call that is sending it. Others leave it alone: they cannot know whether the transport has it.
        waiters: futures to set when it is answered, with their event loops.
    """

    __slots__ = (
        "answer",
        "deadline",
        "deaths",
        "engine",
        "first",
        "incarnation",
        "owner",
        "rows",
        "sender",
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
        self.owner: weakref.ref[Any] | None = None
        self.sender: weakref.ref[Any] | None = None
        self.waiters: list[Waiter] | None = None

    @property
    def wanted(self) -> bool:
        """Whether its owner lives."""
        return (owner := self.owner) is not None and owner() is not None

    @property
    def sending(self) -> bool:
        """Whether a call is sending it."""
        return (sender := self.sender) is not None and sender() is not None

    @contextlib.contextmanager
    def being_sent(self, *, mine: bool = False) -> Iterator[bool]:
        """Within the ``with`` block other calls leave this ticket alone. False: another call is sending it.

        Args:
            mine: the calling method is its sender already.
        """
        if mine or self.sending:
            yield mine
            return
        claim = Claim()
        self.sender = weakref.ref(claim)
        try:
            yield True
        finally:
            self.sender = None


class Answer(NamedTuple):
    """The answer to a ticket."""

    sequence: int
    code: int
    message: str
    version: int
    incarnation: int


def wake(waiters: Sequence[Waiter]) -> None:
    """Set the result of futures, in the threads of their loops."""
    import asyncio  # already imported, since the waiters' loops exist

    here = asyncio._get_running_loop()
    for loop, future in waiters:
        if loop is here:
            _done(future)
            continue
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(_done, future)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_TURN = 0.001  # seconds between an event loop's attempts to acquire the lock


class ModelLock:
    """The lock of one model: threads and event loops take turns.

    Args:
        model: its name, for messages.
        timeout: default time-out of a call, in seconds.

    Attributes:
        lock: re-entrant, because a signal handler or a destructor may use the model during a call.
        now: a context manager that acquires the lock without waiting, or raises Taken.
    """

    def __init__(self, model: str, timeout: float) -> None:
        self.model = model
        self.timeout = timeout
        self.anew()

    def seconds(self, timeout: float | None) -> float:
        """Return the time-out, or the default if it is None."""
        return self.timeout if timeout is None else seconds(timeout)

    def deadline(self, timeout: float | None) -> int:
        """Return the end of a time-out that begins now, in ns of CLOCK_MONOTONIC."""
        return time.monotonic_ns() + int((self.timeout if timeout is None else seconds(timeout)) * 1e9)

    def anew(self) -> None:
        """Create the lock, also again in a forked child: a thread of the parent may have held it during the fork."""
        self.lock: Any = threading.RLock()
        self.now = LockTurn(self.lock)

    @property
    def mine(self) -> bool:
        """Whether this thread is within a call."""
        return bool(self.lock._is_owned())

    def run(self, action: Callable[[], T], deadline: int) -> T:
        """Call `action` with the lock held and return its result.

        Raises:
            Timeout: another thread's call did not end by `deadline`, ns of CLOCK_MONOTONIC.
            Refused: another thread's call may wait for this thread, which carries its answer.
        """
        try:
            with self.now:
                return action()
        except Taken:
            pass
        if is_serving():
            raise self._in_service()
        try:
            with LockTurn(self.lock, (deadline - time.monotonic_ns()) / 1e9):
                return action()
        except Taken:
            raise self._late() from None

    async def alone(self, action: Callable[[], T], deadline: int) -> T:
        """Like `run`, for a short action; the event loop is not blocked while waiting for the lock."""
        import asyncio  # most clients have no event loop, and importing it takes as long as ZeroMQ

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
        """Receive the answers that have arrived, and from now on the lane's answers in the running loop."""
        if lane.watched_by is not loop:
            this, that = weakref.ref(self), weakref.ref(lane)  # the callback must keep neither alive

            def arrived() -> None:
                turns, watched = this(), that()
                if turns is not None and watched is not None:
                    turns._arrived(watched, loop, arrived)

            lane.watched_by = None
            with contextlib.suppress(Busy):  # the callers look every LOOK_AFTER seconds, too
                lane.watch(loop, arrived)
                lane.watched_by = loop
        lane.receive_now()

    def _arrived(self, lane: Lane, loop: asyncio.AbstractEventLoop, again: Callable[[], None]) -> None:
        try:
            with self.now:
                if lane.gone is None:
                    lane.receive_now()
        except Taken:  # the thread with the lock may have checked for answers before this one arrived: try again
            loop.call_later(_TURN, again)

    def _in_service(self) -> Refused:
        return Refused(f"another thread's call of {self.model!r} is under way, and may need this one: {IN_SERVICE}")

    def _late(self) -> Timeout:
        return Timeout(f"another thread's call of {self.model!r} did not end in time: use one model per thread")
