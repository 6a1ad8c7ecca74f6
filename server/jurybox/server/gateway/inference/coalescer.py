"""Coalesces requests: those that arrive while others are computed are sent as one ticket.

A ticket costs the gateway, the engine and the kernel the same however many rows it has. So rows of different requests
share tickets, two in flight at most: one computes, one waits, and what comes meanwhile makes up the next. A lone
request waits for nobody. Rows of different sessions of a model with state share tickets in the same way.

Every caller gets an answer: an exception on the lane is raised to all requests of the ticket, and the lane, whose rows
may be lost, is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jurybox.client import Model, Timeout
from jurybox.client.lane import row_failed
from jurybox.client.row_codec import shaped
from jurybox.client.sessions import Sessions
from jurybox.protocol.errors import Code, Error, ModelFailed, Refused, RowFailed, SessionLost, said

Arrays = Mapping[str, Any]  # (n, *row shape) by name; a list of n arrays or bytes where rows differ in size

_IN_FLIGHT = 1
_OVERDUE = 2.0  # seconds after its last request's deadline within which a ticket ends by itself
_OVER = (Code.STALE_LEASE, Code.SERVER_GONE, Code.BUSY)  # the lane is not ours any more, or its rows don't come back
_DOUBT = 1.0  # seconds a ticket still has whose answer may have been lost on the way


@dataclass(slots=True)
class _Asked:
    """Rows of one request; `until` is in seconds of the monotonic clock.

    `sessions` are those that the rows are of, each with whether it begins; None: the model keeps no state.
    """

    inputs: Arrays
    n: int
    version: int
    until: float
    answer: asyncio.Future[tuple[Arrays, int]]
    sessions: Mapping[int, bool] | None


class RequestCoalescer:
    """Coalesces the requests of one lane. Belongs to one event loop.

    Args:
        model: whose lane it is.
        most: rows of a ticket.
        broken: called when the lane cannot be trusted with rows any more.
        idle: called when nothing is in flight and nobody waits.
        sessions: of a model with state.
    """

    def __init__(
        self,
        model: Model,
        most: int,
        broken: Callable[[], None] = lambda: None,
        idle: Callable[[], None] = lambda: None,
        sessions: Sessions | None = None,
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._most = most
        self._broken = broken
        self._idle = idle
        self._outputs = list(model.spec.outputs)
        self._unread = f"the answer of model {model.name!r} could not be read"
        self._waiting: deque[_Asked] = deque()
        self._in_flight: dict[asyncio.Task[None], list[_Asked]] = {}
        self._called = False

    @property
    def busy(self) -> bool:
        """Whether a request waits or is in flight."""
        return bool(self._in_flight or self._waiting)

    async def ask(
        self, inputs: Arrays, n: int, seconds: float, version: int, sessions: Mapping[int, bool] | None = None
    ) -> tuple[Arrays, int]:
        """Compute n rows, at most `most`; gives outputs by name, views of their ticket's, and the weights' version.

        Args:
            sessions: of a model with state those that the rows are of, in their order, and whether each begins.

        Raises:
            SessionLost: `sessions` of it have lost their state; nothing was computed.
            Timeout, Busy, ModelFailed, Refused, ServerGone.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Arrays, int]] = loop.create_future()
        self._waiting.append(_Asked(inputs, n, version, time.monotonic() + seconds, answer, sessions))
        if not self._called and len(self._in_flight) < _IN_FLIGHT:
            # Not at once: requests that came in the same turn of the loop come along.
            self._called = True
            loop.call_soon(self._send)
        if self._in_flight:
            self._look()  # the thread that watches for answers would have to wait for a pause
        late = loop.call_later(seconds, self._expire, answer, seconds)
        try:
            return await answer
        finally:
            late.cancel()

    def give_up(self, error: Error) -> None:
        """Fail all requests that wait or are in flight."""
        waiting, self._waiting = list(self._waiting), deque()
        self._fail(waiting, error)
        for taken in self._in_flight.values():
            self._fail(taken, error)

    def doubt(self) -> None:
        """An answer may have been lost: requests in flight get a short time, then they are sent again."""
        for task in self._in_flight:
            asyncio.get_running_loop().call_later(_DOUBT, self._end, task)

    def _look(self) -> None:
        try:
            self._model.look()
        except Error:
            pass  # whoever waits for the ticket is told by it
        except Exception as error:  # noqa: BLE001  what another's answer holds is nothing to whoever asks now
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Answers were lost: their requests are sent again on another lane."""
        self.give_up(Refused(f"{self._unread}: {said(error)}", Code.STALE_LEASE))
        self._broken()

    def _expire(self, answer: asyncio.Future[tuple[Arrays, int]], seconds: float) -> None:
        if answer.done():
            return
        answer.set_exception(Timeout(f"model {self._model.name!r} did not answer within {seconds:.3f} s"))
        for task, taken in self._in_flight.items():
            if all(asked.answer.done() for asked in taken):
                asyncio.get_running_loop().call_later(_OVERDUE, self._end, task)

    def _end(self, task: asyncio.Task[None]) -> None:
        """Cancel a ticket that did not end by itself, so that nothing waits for it."""
        if task in self._in_flight:
            task.cancel()
            self._lose(TimeoutError("its ticket did not end"))

    def _send(self) -> None:
        self._called = False
        while self._waiting and len(self._in_flight) < _IN_FLIGHT:
            taken = self._take()
            if taken:
                task = asyncio.ensure_future(self._answer(taken))
                self._in_flight[task] = taken
                task.add_done_callback(self._sent)
        if not self.busy:
            self._idle()

    def _take(self) -> list[_Asked]:
        """The requests of the next ticket: those that wait longest, of one weights version.

        They fit into neighbouring rows. What goes in pieces is answered with the oldest of their versions, which is not
        to be told to a caller all of whose rows were in a later one.
        """
        taken: list[_Asked] = []
        rows = 0
        most = self._most if len(self._waiting) < 2 else min(self._most, self._model.room())
        while self._waiting:
            asked = self._waiting[0]
            if taken and (rows + asked.n > most or asked.version != taken[0].version or _meet(asked, taken)):
                break
            self._waiting.popleft()
            if not asked.answer.done():  # its caller has given up
                taken.append(asked)
                rows += asked.n
        return taken

    def _sent(self, task: asyncio.Task[None]) -> None:
        taken = self._in_flight.pop(task)
        if task.cancelled() or task.exception() is not None:  # BaseExceptions alone come here
            self._fail(taken, Refused(f"the ticket of model {self._model.name!r} was given up", Code.STALE_LEASE))
        if self._waiting:
            self._send()
        elif not self.busy:
            self._idle()

    async def _answer(self, taken: list[_Asked]) -> None:
        try:
            await self._compute(taken)
        except Exception as error:  # noqa: BLE001  whatever it is, somebody waits for it
            if isinstance(error, SessionLost) and len(taken) > 1 and error.sessions:
                await self._answer_others(taken, error)
                return
            # What the lane should not raise may have cost it rows.
            ours = isinstance(error, Error)
            failure = error if isinstance(error, Error) else ModelFailed(f"{self._unread}: {said(error)}")
            if len(taken) > 1 and failure.code == Code.MODEL_FAILED:
                for asked in taken:  # one of them breaks the model; the others must not be told so
                    if not asked.answer.done():
                        await self._answer([asked])
            self._fail(taken, failure)
            if not ours or failure.code in _OVER:
                self._broken()

    async def _answer_others(self, taken: list[_Asked], lost: SessionLost) -> None:
        """Some have lost their sessions, so that nothing was computed: tell them, and ask for the others alone."""
        rest = []
        for asked in taken:
            if not (mine := [number for number in asked.sessions or () if number in lost.sessions]):
                rest.append(asked)
            elif not asked.answer.done():
                asked.answer.set_exception(SessionLost(str(lost), sessions=mine))
        if len(rest) < len(taken):
            if rest := [asked for asked in rest if not asked.answer.done()]:
                await self._answer(rest)
        else:
            self._fail(taken, lost)

    async def _compute(self, taken: list[_Asked]) -> None:
        """Send these rows as one ticket, and distribute the answers."""
        first = taken[0]
        if len(taken) == 1:
            inputs: Arrays = first.inputs
        else:
            inputs = {name: _joined([asked.inputs[name] for asked in taken]) for name in first.inputs}
        seconds = max(asked.until for asked in taken) - time.monotonic()
        failed: Mapping[int, str] = {}
        try:
            if self._sessions is None:
                reply = await self._model.infer_reply_async(inputs, timeout=seconds, version=first.version)
                came, version = reply.outputs, reply.version
            else:
                begins = {number: begin for asked in taken for number, begin in (asked.sessions or {}).items()}
                came = await self._sessions.infer_async(
                    inputs, list(begins), list(begins.values()), timeout=seconds, version=first.version
                )
                version = self._sessions.version  # nothing else runs between its last line and here
        except RowFailed as error:
            if len(taken) == 1 or not error.errors:
                raise
            came, version, failed = error.outputs, error.version, error.errors
        outputs = came if len(self._outputs) > 1 else {self._outputs[0]: came}
        at = 0
        for asked in taken:
            end = at + asked.n
            if not asked.answer.done():
                part = {name: array[at:end] for name, array in outputs.items()}
                mine = {row - at: reason for row, reason in failed.items() if at <= row < end} if failed else {}
                if mine:
                    asked.answer.set_exception(row_failed(self._model.name, mine, asked.n, shaped(part), version))
                else:
                    asked.answer.set_result((part, version))
            at = end

    def _fail(self, taken: list[_Asked], error: Error) -> None:
        for asked in taken:
            if not asked.answer.done():
                asked.answer.set_exception(error)


def _meet(asked: _Asked, taken: list[_Asked]) -> bool:
    """Whether a session of this request is in one of those: it needs the answer to that first."""
    if asked.sessions is None:
        return False
    return any(other.sessions is not None and asked.sessions.keys() & other.sessions.keys() for other in taken)


def _joined(parts: list[Any]) -> Any:
    """Concatenate the rows of several requests."""
    if type(parts[0]) is list:
        return [row for part in parts for row in part]
    return np.concatenate(parts)
