"""What a juror's callers and its threads share: the calls that wait to be sent, and their answers.

A destructor or a signal handler may make a call at any point of another one, and wait for its answer there. So callers
hold no lock that a thread of the juror needs: they add a call in one step, and wait without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
TOGETHER = 4096  # rows at which no further calls join a request


class QueuedCall(Protocol):
    """A call, as the threads need it."""

    n: int

    def begin(self) -> bool:
        """Return whether its rows must be sent: unless it was cancelled before, or has failed."""


class CallPart(NamedTuple):
    """Rows of a call."""

    asked: Any
    first: int
    end: int

    @property
    def n(self) -> int:
        return self.end - self.first


class CallAnswer(Generic[T]):
    """The answer to a call, which is given once: a value, an error, or that it was cancelled before it was sent."""

    def __init__(self) -> None:
        self._turns = itertools.count()  # whoever draws 0 gives the answer
        self._value: T | None = None
        self._error: BaseException | None = None
        self._begun = self._over = False
        self._came = threading.Lock()  # released with the answer
        self._came.acquire()
        self._told: deque[Callable[[CallAnswer[T]], object]] = deque()

    def done(self) -> bool:
        """Return whether there is an answer."""
        return self._over

    def begin(self) -> bool:
        """Note that the call is being sent; return False if it was cancelled before."""
        self._begun = True
        return not isinstance(self._error, CancelledError)

    def cancel(self) -> bool:
        """Cancel the call; return False if it is being sent or has an answer."""
        return not self._begun and self._give(None, CancelledError("the call was cancelled"))

    def set_result(self, value: T) -> None:
        """Give the answer, unless there is one."""
        self._give(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Give an error for an answer, unless there is one."""
        self._give(None, error)

    def result(self, timeout: float) -> T:
        """Wait for the answer and return it. Raises TimeoutError, CancelledError, or the error that was given."""
        if not self._over and self._came.acquire(timeout=timeout):
            self._came.release()  # others may wait, too
        if not self._over:
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def when_done(self, told: Callable[[CallAnswer[T]], object]) -> None:
        """Call `told` with this object when there is an answer, in the thread that gives it, or now."""
        self._told.append(told)
        if self._over:
            self._tell()

    async def awaited(self, timeout: float) -> T:
        """Like `result`, as a coroutine; a cancelled task cancels the call."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def wake() -> None:
            if not done.done():
                done.set_result(None)

        def told(_: CallAnswer[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(wake)

        self.when_done(told)
        try:
            await asyncio.wait_for(done, timeout)
        except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
            raise TimeoutError from None
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result(0)

    def _give(self, value: T | None, error: BaseException | None) -> bool:
        if next(self._turns):
            return False
        self._value, self._error = value, error
        self._over = True
        self._came.release()
        self._tell()
        return True

    def _tell(self) -> None:
        while True:
            try:
                told = self._told.popleft()
            except IndexError:
                return
            told(self)


class WaitingCalls:
    """The calls of a juror that wait to be sent, in order, for its threads. True if there are any."""

    def __init__(self) -> None:
        # Its `put` may be called within itself.
        self._new: queue.SimpleQueue[Sequence[CallPart]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the threads; callers do not need it
        self._parts: deque[CallPart] = deque()
        self._idle = 0  # threads in `wait`
        self._closed = False

    def __bool__(self) -> bool:
        return bool(self._parts) or not self._new.empty()

    def put(self, calls: Sequence[QueuedCall]) -> None:
        """Add calls. In one step: otherwise a thread could send the first one alone."""
        self._new.put([CallPart(asked, 0, asked.n) for asked in calls])

    def put_back(self, parts: Sequence[CallPart]) -> None:
        """Put parts that were taken before all others."""
        with self._lock:
            self._parts.extendleft(reversed(parts))
        self._wake()

    def wait(self) -> bool:
        """Wait until there are calls; return False if there are none and none will come."""
        while True:
            with self._lock:
                if self._parts:
                    return True
                self._idle += 1
            try:
                new = self._new.get()
            finally:
                with self._lock:
                    self._idle -= 1
            with self._lock:
                self._parts.extend(new)
                if self._parts:
                    return True
                if self._closed and self._new.empty():
                    self._wake()  # the next thread, which ends, too
                    return False

    def take(self) -> list[CallPart]:
        """Return what the calling thread sends as one request: all rows, or its share if other threads are idle."""
        with self._lock:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._parts.extend(self._new.get_nowait())
            most = TOGETHER
            if self._idle:
                most = min(most, -(-sum(part.n for part in self._parts) // (1 + self._idle)))
            taken: list[CallPart] = []
            rows = 0
            while self._parts and (rows < most or not self._parts[0].n):
                part = self._parts.popleft()
                if not part.asked.begin():
                    continue
                if self._idle and part.n > most - rows:
                    at = part.first + most - rows
                    self._parts.appendleft(part._replace(first=at))
                    part = part._replace(end=at)
                taken.append(part)
                rows += part.n
            if self._parts or self._closed:
                self._wake()
            return taken

    def close(self) -> None:
        """End `wait` in all threads once no call is left."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._new.put(())
