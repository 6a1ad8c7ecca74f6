"""Rows that wait for a ticket, and tickets that were sent without a task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jurybox.client import Ticket
from jurybox.client.in_flight import LOOK_AFTER

Arrays = Mapping[str, Any]  # (n, *row shape) by name; a list of n arrays or bytes if the rows differ in size

OVERDUE = 2.0  # seconds after its last request's deadline within which a ticket ends by itself


@dataclass(slots=True)
class WaitingRows:
    """The rows of one request; `arrived` and `until` are in seconds of the monotonic clock.

    `sessions` maps the session of each row to whether it begins; None: the model keeps no state.
    """

    inputs: Arrays
    n: int
    version: int
    arrived: float
    until: float
    answer: Receiver
    sessions: Mapping[int, bool] | None
    client: Any = None
    queued: bool = True  # whether no ticket has it yet


class Coalescing(Protocol):
    """What waiting rows and tickets in flight need of their coalescer."""

    def drop(self, request: WaitingRows) -> None: ...
    def on_answer(self, sent: PendingTicket) -> None: ...
    def end(self, task: PendingTicket) -> None: ...
    def forget(self, task: PendingTicket) -> None: ...


class Put:
    """A request that was queued."""

    __slots__ = ("_coalescer", "_late", "_request")

    def __init__(self, coalescer: Coalescing, request: WaitingRows, late: asyncio.TimerHandle | None) -> None:
        self._coalescer = coalescer
        self._request = request
        self._late = late

    def over(self) -> None:
        """Note that the request is answered, or that nobody waits for its answer: free its timer, and its rows."""
        if self._late is not None:
            self._late.cancel()
        if self._request.queued:
            self._coalescer.drop(self._request)


class Receiver(Protocol):
    """The receiver of a request's answer: a future, or an object with its methods.

    A future gets copies of the arrays. Any other receiver must use them within `set_result`; they are overwritten
    afterwards.
    """

    def done(self) -> bool: ...
    def set_result(self, result: tuple[Arrays, int], /) -> None: ...
    def set_exception(self, error: Any, /) -> None: ...


class PendingTicket:
    """A ticket sent without a task: a future to its ticket, and a task to the coalescer."""

    __slots__ = ("_coalescer", "_done", "_looking", "_loop", "_until", "began", "ticket")

    def __init__(self, coalescer: Coalescing, ticket: Ticket, until: float, began: float) -> None:
        self._coalescer = coalescer
        self._loop = asyncio.get_running_loop()
        self._looking: asyncio.TimerHandle | None = None
        self._done = False
        self._until = until
        self.began = began
        self.ticket = ticket

    def look(self) -> None:
        """Wait for the answer, and check the engine meanwhile."""
        again = self._looking is not None
        if again and time.monotonic() > self._until + OVERDUE:
            self._coalescer.end(self)
            return
        try:
            answered = self.ticket.watched(self._loop, self, again=again)
        except Exception:  # noqa: BLE001  the ticket raises it again when its outputs are read
            answered = True
        if answered:
            self.set_result(None)
        elif not self._done:
            self._looking = self._loop.call_later(LOOK_AFTER, self.look)

    def done(self) -> bool:
        """See `asyncio.Future.done`."""
        return self._done

    def set_result(self, _: None) -> None:
        """See `asyncio.Future.set_result`."""
        if not self._done:
            self._over()
            self._loop.call_soon(self._coalescer.on_answer, self)

    def cancel(self) -> None:
        """See `asyncio.Task.cancel`; its requests have ended."""
        self._over()
        self._coalescer.forget(self)
        self.ticket.give_up()

    def _over(self) -> None:
        self._done = True
        if self._looking is not None:
            self._looking.cancel()
