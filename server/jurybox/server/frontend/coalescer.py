"""Coalesces requests: those that arrive while others are computed are sent as one ticket.

A ticket costs the gateway, the engine and the kernel the same regardless of its number of rows. Therefore rows of
different requests share tickets: while one ticket per engine is in flight, the requests that arrive form the next one.
A single request is sent immediately. Rows of different sessions of a stateful model share tickets in the same way. If
a rule of returns.py predicts that more requests are about to arrive, the next ticket waits for them.

Every caller gets an answer: an exception on the lane is raised to all requests of the ticket, and the lane is given
up, because its rows may be lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import numpy as np

from jurybox.client import Model, Ticket, Timeout
from jurybox.client.lane import row_failed
from jurybox.client.row_codec import shaped
from jurybox.client.sessions import Sessions
from jurybox.protocol.errors import Code, Error, ModelFailed, Refused, RowFailed, SessionLost, said
from jurybox.server.frontend.returns import BRIEF, QuickHalf, Returns
from jurybox.server.frontend.waiting_rows import OVERDUE, Arrays, PendingTicket, Put, Receiver, WaitingRows
from jurybox.server.security.pace import HEAVY, Breaks, WorkPace

_NONE: Arrays = {}  # the rows of a request that was dropped
_FEW = 64  # dropped requests may stay in the queue
_IN_FLIGHT = 1  # tickets per engine
_OVER = (Code.STALE_LEASE, Code.SERVER_GONE, Code.BUSY)  # the lane is no longer ours, or its rows are not returned
_DOUBT = 1.0  # seconds that a ticket has left once its answer may have been lost


class RequestCoalescer:
    """Coalesces the requests of one lane. Use it in one event loop only.

    Args:
        model: the model that holds the lane.
        most: the maximum number of rows of a ticket.
        broken: called when the lane must no longer be used for rows.
        idle: called when no request waits or is in flight.
        sessions: the sessions of a stateful model; None: the model keeps no state.
        returns: consulted before every ticket that is not full; None: `QuickHalf`.
        engines: the number of engines that answer this lane; each is sent a ticket before another waits.
        expired: called for every request that was not answered in time.
        pace: shared with other lanes, to which a ticket with large answers leaves time.
    """

    def __init__(
        self,
        model: Model,
        most: int,
        broken: Callable[[], None] = lambda: None,
        idle: Callable[[], None] = lambda: None,
        sessions: Sessions | None = None,
        returns: Returns | None = None,
        engines: int = 1,
        expired: Callable[[], None] = lambda: None,
        pace: WorkPace | None = None,
    ) -> None:
        self._model = model
        self._breaks = Breaks(pace or WorkPace(), self._go_on)
        self._expired = expired
        self._returns = returns or QuickHalf()
        self._most_in_flight = _IN_FLIGHT * engines
        self._gathered: asyncio.TimerHandle | None = None  # sends the ticket that waits for more requests
        self._rooms: list[dict[str, Any]] = []  # buffers in which rows were joined, to reuse for the next ticket
        self._sessions = sessions
        self._most = most
        self._broken = broken
        self._idle = idle
        self._outputs = list(model.spec.outputs)
        self._unread = f"the answer of model {model.name!r} could not be read"
        self._waiting: deque[WaitingRows] = deque()
        self._in_flight: dict[asyncio.Task[None] | PendingTicket, list[WaitingRows]] = {}
        self._plain = sessions is None and not any(output.variable for output in model.spec.outputs.values())
        self._called = False
        self._dropped = 0  # requests that are in the queue although they were dropped

    @property
    def busy(self) -> bool:
        """Whether a request waits or is in flight."""
        return bool(self._in_flight or self._waiting)

    async def ask(
        self,
        inputs: Arrays,
        n: int,
        seconds: float,
        version: int,
        sessions: Mapping[int, bool] | None = None,
        client: Any = None,
    ) -> tuple[Arrays, int]:
        """Compute n rows, at most `most`; return the outputs by name (views of the ticket's) and the weights' version.

        Args:
            sessions: for a stateful model, the session of each row, in order, and whether it begins.
            client: as in `put`.

        Raises:
            SessionLost: the sessions in its `sessions` have lost their state; nothing was computed.
            Timeout, Busy, ModelFailed, Refused, ServerGone.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Arrays, int]] = loop.create_future()
        put = self.put(inputs, n, seconds, version, answer, sessions, client)
        try:
            return await answer
        finally:
            put.over()

    def put(
        self,
        inputs: Arrays,
        n: int,
        seconds: float,
        version: int,
        answer: Receiver,
        sessions: Mapping[int, bool] | None = None,
        client: Any = None,
    ) -> Put:
        """Queue n rows as `ask` does, and deliver the result to `answer`. Call `over` of what is returned afterwards.

        Args:
            client: who sent the request and has no other request in flight, as `returns` knows it: a connection
                (`QuickHalf`); None: unknown. If it is the only active one for a while, `answer` may be set before this
                returns.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        self._breaks.heard()
        request = WaitingRows(inputs, n, version, now, now + seconds, answer, sessions, client)
        self._waiting.append(request)
        if self._returns.arrived(client, seconds, len(self._waiting)) and self._gathered is not None:
            pass  # the ticket that waits for more requests includes it
        elif self._returns.alone and self._may_send() and not self._called:
            self._send()
        elif not self._called and self._may_send():
            # Not immediately: requests that arrive in the same iteration of the loop share the ticket.
            self._called = True
            loop.call_soon(self._send)
        if self._in_flight:
            self._look()  # the thread that watches for answers would have to wait until the loop pauses
        late = None if answer.done() else loop.call_later(seconds, self._expire, request)
        return Put(self, request, late)

    def drop(self, request: WaitingRows) -> None:
        """Forget a request that no ticket has: the next one may be far away."""
        request.inputs, request.queued = _NONE, False
        self._dropped += 1
        if self._dropped > max(_FEW, len(self._waiting) // 2):
            self._waiting = deque(one for one in self._waiting if one.queued)
            self._dropped = 0

    def give_up(self, error: Error) -> None:
        """Fail all requests that wait or are in flight."""
        waiting, self._waiting = list(self._waiting), deque()
        self._fail(waiting, error)
        for batch in self._in_flight.values():
            self._fail(batch, error)

    def doubt(self) -> None:
        """Handle that an answer may have been lost: tickets in flight get a short time, then are sent again."""
        for task in self._in_flight:
            asyncio.get_running_loop().call_later(_DOUBT, self.end, task)

    def _look(self) -> None:
        try:
            self._model.look()
        except Error:
            pass  # the ticket itself raises it to its callers
        except Exception as error:  # noqa: BLE001  another request's answer must not fail the present caller
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Give up the lane after answers were lost; their requests are sent again on another lane."""
        self.give_up(Refused(f"{self._unread}: {said(error)}", Code.STALE_LEASE))
        self._broken()

    def left(self, client: Any) -> None:
        """Note that a client is gone: the next ticket does not wait for it."""
        self._returns.left(client)
        if self._gathered is not None:
            self._send()

    def _expire(self, request: WaitingRows) -> None:
        if request.answer.done():
            return
        self._expired()
        self._refuse(request, Timeout(self._late(request.until - request.arrived)))
        for task, batch in self._in_flight.items():
            if all(request.answer.done() for request in batch):
                asyncio.get_running_loop().call_later(OVERDUE, self.end, task)

    def _late(self, seconds: float) -> str:
        return f"model {self._model.name!r} did not answer within {max(0.0, seconds):.3f} s"

    def forget(self, task: PendingTicket) -> None:
        """Forget a ticket whose requests have ended."""
        self._in_flight.pop(task, None)

    def end(self, task: asyncio.Task[None] | PendingTicket) -> None:
        """Cancel a ticket that did not end by itself, so that nothing waits for it."""
        if task in self._in_flight:
            task.cancel()
            self._lose(TimeoutError("its ticket did not end"))

    def _may_send(self) -> bool:
        """Return whether another ticket may be sent. A full one may exceed the limit by one, if `returns` say so."""
        if self._breaks.resting:
            return False
        free = self._most_in_flight - len(self._in_flight)
        return free > 0 or (self._returns.sends_ahead and free == 0 and len(self._waiting) >= self._most)

    def _send(self) -> None:
        self._called = False
        if self._gathered is not None:
            self._gathered.cancel()
            self._gathered = None
        while self._waiting and self._may_send():
            if len(self._waiting) < self._most:
                computing = sum(map(len, self._in_flight.values()))
                if (wait := self._returns.wait(len(self._waiting), computing)) > 0:
                    self._gathered = asyncio.get_running_loop().call_later(wait, self._send)
                    return
            batch = self._take()
            if batch:
                self._returns.went(partial(_waits, batch))
                if not (self._plain and self._send_without_task(batch)):
                    self._begin(self._answer(batch), batch)
        if not self.busy:
            self._idle()

    def _begin(self, work: Coroutine[Any, Any, None], batch: list[WaitingRows]) -> None:
        task = asyncio.ensure_future(work)
        self._in_flight[task] = batch
        task.add_done_callback(self._on_done)

    def _send_without_task(self, batch: list[WaitingRows]) -> bool:
        """Send rows of fixed shapes without a task; return False if that is impossible and nothing was done."""
        until, began = max(request.until for request in batch), time.monotonic()
        brief = BRIEF if not self._waiting and self._returns.may_block(len(batch)) else 0.0
        try:
            parts = [(request.inputs, request.n) for request in batch]
            ticket = self._model.submit_parts(parts, int(until * 1e9), batch[0].version, brief)
        except Exception:  # noqa: BLE001  the normal path reports what is wrong
            return False
        if ticket is None:
            return False
        if isinstance(ticket, tuple):
            self._record(batch, began)
            self._give(batch, *ticket)
            self._leave_time(ticket[0], began, began)  # the loop waited, too
            return True
        if brief:
            self._returns.blocked_in_vain()
        sent = PendingTicket(self, ticket, until, began)
        self._in_flight[sent] = batch
        sent.look()
        return True

    def _leave_time(self, outputs: Arrays, sent: float, came: float) -> None:
        """Let others come first after a ticket with large answers that was sent and came then, see `Breaks.after`."""
        if _size(outputs) >= HEAVY:
            self._breaks.after(sent, came)

    def _go_on(self) -> None:
        if not self._called:
            self._send()

    def _record(self, batch: list[WaitingRows], began: float) -> None:
        """Record how long a ticket took that was sent without a task."""
        self._returns.took(sum(request.n for request in batch), time.monotonic() - began)

    def on_answer(self, sent: PendingTicket) -> None:
        """Distribute the outputs of a ticket that was sent without a task, or handle its error."""
        came = time.monotonic()
        batch = self._in_flight.pop(sent, None)
        if batch is None:
            return
        self._record(batch, sent.began)
        try:
            outputs, version = sent.ticket.seen()
        except Exception:  # noqa: BLE001  _answer gets it from the ticket and handles it
            self._begin(self._answer(batch, sent.ticket), batch)
        else:
            self._give(batch, outputs, version)
            sent.ticket.give_up()
            self._leave_time(outputs, sent.began, came)
        if self._waiting:
            self._send()
        elif not self.busy:
            self._idle()

    def _give(self, batch: list[WaitingRows], outputs: Arrays, version: int) -> None:
        """Deliver to each request its rows of `outputs`, whose memory later tickets overwrite."""
        at = 0
        for request in batch:
            end = at + request.n
            if not (answer := request.answer).done():
                self._returns.answered(request.client)
                copied = isinstance(answer, asyncio.Future)
                part = {name: rows[at:end].copy() if copied else rows[at:end] for name, rows in outputs.items()}
                try:
                    answer.set_result((part, version))
                except Exception as error:  # noqa: BLE001  one failing receiver must not cost the others their answers
                    answer.set_exception(ModelFailed(f"{self._unread}: {said(error)}"))
            at = end

    def _take(self) -> list[WaitingRows]:
        """Remove and return the requests of the next ticket: the oldest ones that ask for the same weights version.

        They fit into adjacent free rows. Otherwise the client would split the ticket and report the oldest version of
        its parts, which is wrong for a caller whose rows were all computed with a newer one.
        """
        batch: list[WaitingRows] = []
        rows = 0
        most = self._most if len(self._waiting) < 2 else min(self._most, self._model.room())
        while self._waiting:
            request = self._waiting[0]
            if batch and (
                rows + request.n > most or request.version != batch[0].version or _share_session(request, batch)
            ):
                break
            self._waiting.popleft()
            if not request.queued:
                self._dropped -= 1
            elif not request.answer.done():  # else its caller has given up
                request.queued = False
                batch.append(request)
                rows += request.n
        return batch

    def _on_done(self, task: asyncio.Task[None]) -> None:
        batch = self._in_flight.pop(task)
        if task.cancelled() or task.exception() is not None:  # only BaseExceptions that are not Exceptions
            self._fail(batch, Refused(f"the ticket of model {self._model.name!r} was given up", Code.STALE_LEASE))
        if self._waiting:
            self._send()
        elif not self.busy:
            self._idle()

    async def _answer(self, batch: list[WaitingRows], ticket: Ticket | None = None) -> None:
        try:
            await self._compute(batch, ticket)
        except Exception as error:  # noqa: BLE001  every waiting caller must get an answer
            if isinstance(error, SessionLost) and len(batch) > 1 and error.sessions:
                await self._answer_others(batch, error)
                return
            # After an unexpected exception, rows of the lane may be lost.
            ours = isinstance(error, Error)
            failure = error if isinstance(error, Error) else ModelFailed(f"{self._unread}: {said(error)}")
            if len(batch) > 1 and failure.code in (Code.MODEL_FAILED, Code.SPEC_MISMATCH):
                for request in batch:  # one fails the model or does not fit it; the others must not fail with it
                    if not request.answer.done():
                        await self._answer([request])
            self._fail(batch, failure)
            if not ours or failure.code in _OVER:
                self._broken()

    async def _answer_others(self, batch: list[WaitingRows], lost: SessionLost) -> None:
        """Fail the requests whose sessions are lost, and send the others again: nothing was computed."""
        rest = []
        for request in batch:
            if not (mine := [number for number in request.sessions or () if number in lost.sessions]):
                rest.append(request)
            elif not request.answer.done():
                self._refuse(request, SessionLost(str(lost), sessions=mine))
        if len(rest) < len(batch):
            if rest := [request for request in rest if not request.answer.done()]:
                await self._answer(rest)
        else:
            self._fail(batch, lost)

    async def _compute(self, batch: list[WaitingRows], ticket: Ticket | None = None) -> None:
        """Send these rows as one ticket, unless `ticket` is given, and distribute the answers."""
        first, began, room = batch[0], time.monotonic(), None
        if len(batch) == 1 or ticket is not None:
            inputs: Arrays = first.inputs
        else:
            room = self._rooms.pop() if self._rooms else {}
            inputs = {
                name: self._joined_in(room, name, [request.inputs[name] for request in batch]) for name in first.inputs
            }
        seconds = max(request.until for request in batch) - time.monotonic()
        failed: Mapping[int, str] = {}
        try:
            if ticket is not None:
                reply = await ticket.result_async(seconds)
                computed, version = reply.outputs, reply.version
            elif self._sessions is None:
                reply = await self._model.infer_reply_async(inputs, timeout=seconds, version=first.version or None)
                computed, version = reply.outputs, reply.version
            else:
                begins = {number: begin for request in batch for number, begin in (request.sessions or {}).items()}
                computed = await self._sessions.infer_async(
                    inputs, list(begins), list(begins.values()), timeout=seconds, version=first.version or None
                )
                version = self._sessions.version  # no other task runs between the end of infer_async and here
        except RowFailed as error:
            if len(batch) == 1 or not error.errors:
                raise
            computed, version, failed = error.outputs, error.version, error.errors
        came = time.monotonic()
        if room is not None:
            self._rooms.append(room)  # not after an error: it may still be read
        if ticket is None:  # else it is recorded already
            self._returns.took(sum(request.n for request in batch), came - began)
        outputs = computed if len(self._outputs) > 1 else {self._outputs[0]: computed}
        at = 0
        for request in batch:
            end = at + request.n
            if not request.answer.done():
                part = {name: array[at:end] for name, array in outputs.items()}
                mine = {row - at: reason for row, reason in failed.items() if at <= row < end} if failed else {}
                self._returns.answered(request.client)
                if mine:
                    request.answer.set_exception(row_failed(self._model.name, mine, request.n, shaped(part), version))
                else:
                    request.answer.set_result((part, version))
            at = end
        self._leave_time(outputs, began, came)

    def _joined_in(self, room: dict[str, Any], name: str, parts: list[Any]) -> Any:
        """Concatenate rows of several requests in a reused buffer: for images, new pages cost more than the copy."""
        if type(parts[0]) is list:
            return [row for part in parts for row in part]
        rows, kept = sum(map(len, parts)), room.get(name)
        first = parts[0]
        if kept is None or len(kept) < rows or kept.shape[1:] != first.shape[1:] or kept.dtype != first.dtype:
            kept = room[name] = np.empty((max(rows, self._most), *first.shape[1:]), first.dtype)
        # No casting: the model may have been reloaded with another dtype since these rows were read.
        return np.concatenate(parts, out=kept[:rows], casting="no")

    def _fail(self, batch: list[WaitingRows], error: Error) -> None:
        due = time.monotonic() if isinstance(error, Timeout) else 0.0
        for request in batch:
            if request.answer.done():
                continue
            if due >= request.until:  # the ticket ended just before the request's own timer
                self._refuse(request, Timeout(f"{self._late(request.until - request.arrived)}: {error}"))
            else:
                self._refuse(request, error)

    def _refuse(self, request: WaitingRows, error: Error) -> None:
        self._returns.answered(request.client)
        request.answer.set_exception(error)


def _waits(batch: list[WaitingRows]) -> list[float]:
    """Return the seconds that each request has waited."""
    now = time.monotonic()
    return [now - request.arrived for request in batch]


def _size(outputs: Arrays) -> int:
    """Return the bytes of some rows."""
    return sum(
        rows.nbytes if isinstance(rows, np.ndarray) else sum(getattr(row, "nbytes", None) or len(row) for row in rows)
        for rows in outputs.values()
    )


def _share_session(request: WaitingRows, batch: list[WaitingRows]) -> bool:
    """Return whether a session of this request is also in `batch`: the earlier step must be answered first."""
    if request.sessions is None:
        return False
    return any(other.sessions is not None and request.sessions.keys() & other.sessions.keys() for other in batch)
