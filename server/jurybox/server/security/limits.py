"""What clients may make a process of the server hold, and how long they may be silent; see docs/security.md.

Each process that serves clients has one `native.Budget`, and each connection one `native.Account` of it. Every door
asks it before it keeps a byte. What is beyond a limit is refused with the protocol's code for "later".
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from jurybox import native
from jurybox.protocol.errors import Code, Refused
from jurybox.server.memory import FreedMemory, bounded, memory_limit

RECEIVED, ANSWERS, CALLS = range(3)  # what is counted; bytes, bytes and calls
HTTP, GRPC, ROBOTS, TCP = range(4)  # the doors, by which refusals are counted
REASONS = ("connection", "all")  # of refusals, from 1: a connection holds its share, or all hold what there is

SHARE, ALL = 4, 8  # the largest messages that one connection may make the process hold, and all together
SMALL = 64 << 10  # bytes of a request or an answer that large ones do not shut out: an eighth of ALL is theirs
MOST_CALLS, MOST_CALLS_IN_ALL = 1024, 16_384  # calls in progress
HTTP_CONNECTIONS, GRPC_CONNECTIONS, RELAY_CONNECTIONS = 512, 4096, 8192
SILENCE = 30.0  # seconds between two bytes of a request
UNREAD = 10.0  # seconds after which the connection that owes most is ended, if there is no room for answers to others
_EVERY = 1.0  # seconds between two checks


def budget_of(max_message: int) -> native.Budget:
    """Return the budget of a process whose largest message has so many bytes; less under a memory limit."""
    most = _most(max_message)
    share = min(SHARE * max_message, most)
    return native.Budget((share, share, MOST_CALLS), (most, most, MOST_CALLS_IN_ALL))


def most_held(max_message: int) -> int:
    """Return the bytes that a process holds for its clients at most: their requests, and its answers to them."""
    return 2 * _most(max_message)


def _most(max_message: int) -> int:
    return bounded(ALL * max_message, memory_limit())


def refusal(account: native.Account, budget: native.Budget, found: int, kind: int = RECEIVED) -> Refused:
    """Return the error for a refusal of `native.Account.take`."""
    what = ("requests of {} bytes", "unread answers of {} bytes", "{} calls")[kind]
    if found == 1:
        held, most, whose = account.held(kind), budget.each[kind], "this connection holds"
    else:
        held, most, whose = budget.held(kind), budget.in_all[kind], "the server holds"
    return Refused(f"{whose} {what.format(held)}, of at most {most} at once: ask again later", Code.BUSY)


def no_room(most: int) -> Refused:
    """Return the error for a message over ZeroMQ that was dropped while it came, so what was held is known no more.

    Args:
        most: bytes of the largest message.
    """
    why = f"there is no room for this message now, of at most {most} bytes: ask again later, or send less"
    return Refused(why, Code.BUSY)


class Charge:
    """What one request holds of its connection's account.

    Args:
        account: that of the connection.
        kind: RECEIVED or ANSWERS.
    """

    __slots__ = ("_kind", "account", "budget", "size")

    def __init__(self, budget: native.Budget, account: native.Account, kind: int = RECEIVED) -> None:
        self.budget = budget
        self.account = account
        self._kind = kind
        self.size = 0

    def take(self, size: int, whole: int = 0) -> None:
        """Take `size` bytes more for a request of `whole` bytes. Raises Refused (code BUSY) if there is no room."""
        if found := self.account.take(self._kind, size, max(whole, self.size + size)):
            raise refusal(self.account, self.budget, found, self._kind)
        self.size += size

    def give(self, size: int | None = None) -> None:
        """Return `size` bytes, or everything."""
        size = self.size if size is None else size
        self.size -= size
        self.account.give(self._kind, size)


class DecodedCharge:
    """What is made of one request, in several threads: pixels, for example. It counts as received.

    Args:
        request: the request's own charge, whose connection holds this, too; None: nothing is counted.
    """

    def __init__(self, request: Charge | None) -> None:
        self._charge = None if request is None else Charge(request.budget, request.account)
        self._lock = threading.Lock()

    @property
    def most(self) -> int | None:
        """The bytes that one connection may hold; None: any number."""
        return None if self._charge is None else self._charge.budget.each[RECEIVED]

    def take(self, size: int) -> None:
        """Take `size` bytes more. Raises Refused (code BUSY) if there is no room."""
        if self._charge is not None:
            with self._lock:
                self._charge.take(size)

    def give(self, size: int | None = None) -> None:
        """Return `size` bytes, or everything."""
        if self._charge is not None:
            with self._lock:
                self._charge.give(size)


# The charge of the request that is answered in this task.
OF_REQUEST: ContextVar[Charge | None] = ContextVar("OF_REQUEST", default=None)
# What tells its connection from others; None: it is the server's own.
CALLER: ContextVar[Hashable] = ContextVar("CALLER", default=None)


def hold_text(text: bytes) -> None:
    """Count what Python takes for JSON, as text and as its strings, until the request of this task is answered.

    One character that is not ASCII makes a string take four bytes for each.

    Args:
        text: what is to be parsed.

    Raises:
        Refused: there is no room (code BUSY), or it is more than a connection may hold (code TOO_LARGE).
    """
    charge = OF_REQUEST.get()
    if charge is None or len(text) < SMALL:
        return
    size = len(text) * (2 if text.isascii() and b"\\u" not in text else 8)
    if charge.size + size > (most := charge.budget.each[RECEIVED]):
        raise Refused(
            f"the JSON takes {size} bytes as text, beside the {charge.size} of the body, and a request may take "
            f"at most {most} in all: send less, or large data as ASCII (base64)",
            Code.TOO_LARGE,
        )
    charge.take(size)


def sessions_share(share: float, sessions: int) -> int:
    """Return how many of a model's sessions one connection may hold (`server.sessions_share`)."""
    return max(1, int(share * sessions))


# The bytes of answers that are being computed, by account: nobody can have read them.
_computed: dict[native.Account, int] = {}


def unread(account: native.Account) -> int:
    """Return the bytes of answers that wait for their client to read them."""
    return account.held(ANSWERS) - _computed.get(account, 0)


@contextmanager
def room_for_answer(size: int) -> Iterator[None]:
    """Hold room for an answer of `size` bytes while it is computed. Use it in one event loop only.

    Raises:
        Refused: there is no room (code BUSY).
    """
    request = OF_REQUEST.get()
    if request is None:
        yield
        return
    answers = Charge(request.budget, request.account, ANSWERS)
    answers.take(size)
    account = answers.account
    _computed[account] = _computed.get(account, 0) + size
    try:
        yield
    finally:
        _computed[account] -= size
        if not _computed[account]:
            del _computed[account]
        answers.give()


class Limited(Protocol):
    """A connection, as `watch` needs it."""

    @property
    def account(self) -> native.Account: ...
    def end_silent(self, now: float) -> None:
        """End what has been silent within a request for SILENCE; `now` is a time of the monotonic clock in s."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


class Watch:
    """Ends requests that do not go on, and a connection whose unread answers leave no room for others.

    Args:
        doors: return the connections of each door.
    """

    def __init__(self, budget: native.Budget, doors: Iterable[Callable[[], Iterable[Limited]]]) -> None:
        self._budget = budget
        self._doors = list(doors)
        self._most: Limited | None = None  # the connection that owes most
        self._owed = 0
        self._since = 0.0
        self._freed = FreedMemory()

    async def run(self) -> None:
        """Check every second."""
        while True:
            await asyncio.sleep(_EVERY)
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Check all connections once; `now` is a time of the monotonic clock in s."""
        connections = [one for door in self._doors for one in door()]
        self._freed.look(self._budget.held(RECEIVED) + self._budget.held(ANSWERS), len(connections))
        for one in connections:
            one.end_silent(now)
        if not connections or self._budget.held(ANSWERS) < 3 * self._budget.in_all[ANSWERS] // 4:
            self._most = None
            return
        most = max(connections, key=lambda one: unread(one.account))
        owed = unread(most.account)
        if not owed:  # all of it is being computed
            self._most = None
            return
        if most is not self._most or owed < self._owed:
            self._most, self._since = most, now
        elif now - self._since >= UNREAD:
            self._most = None
            most.abort()
        self._owed = owed
