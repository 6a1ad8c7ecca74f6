"""Requests that may need several tickets: of more rows than a batch or a lane holds, or than are currently free."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from jurybox.client.in_flight import LOOK_AFTER, ModelLock
from jurybox.client.lane import Lane, row_failed
from jurybox.client.row_codec import SESSIONS, Checked, shaped
from jurybox.client.session_book import not_computed
from jurybox.client.ticket import Reply, Ticket, send_rows
from jurybox.protocol.errors import Busy, Error, RowFailed, SessionLost, VersionNotHeld

if TYPE_CHECKING:
    from jurybox.client.requests import Requests


class Pieces:
    """A request of n checked rows, split into tickets as rows of the lane become free.

    If one batch could hold the rows, all of them are computed by one weights version, however they are split: pieces
    computed by an older version are sent again. A larger request may mix versions. So may a request of sessions: each
    of its pieces is sent once, because it makes their step. If one fails, SessionLost names the rows of the others.

    Args:
        deadline: ns of CLOCK_MONOTONIC.
        version: weights version to use; 0: the newest.
    """

    def __init__(self, model: Requests, lane: Lane, given: Checked, n: int, deadline: int, version: int) -> None:
        self._model = model
        self._lane = lane
        self._given = given
        self._n = n
        self._of_sessions = SESSIONS in given
        self._deadline = deadline
        self._wanted = self._version = version
        self._outputs = lane.codec.room(n)
        self._unsent: deque[tuple[int, int]] = deque([(0, n)] if n else [])  # (first, number of rows) among the n
        self._in_flight: deque[tuple[int, Ticket]] = deque()  # each with the index of its first row among the n
        self._answered: dict[tuple[int, int], int] = {}  # the weights version of each piece
        self._errors: dict[int, str] = {}
        self._failures: list[tuple[int, Error]] = []  # of pieces of sessions, each with the index of its first row

    def answered(self) -> Reply:
        """Send all rows and wait for the answers; the reply's version is the oldest. Call with the model's lock held.

        Raises:
            RowFailed, SessionLost, Timeout, Busy, ModelFailed, Refused, ServerGone.
        """
        lane, deadline = self._lane, self._deadline
        try:
            while self._left():
                try:
                    self._send_some()
                    if not self._in_flight:
                        if not lane.wait_for_rows(deadline):
                            # Raises Busy with the reason, unless a row has become free.
                            lane.give(self._model.found(lane, 1))
                        continue
                    at, ticket = self._in_flight[0]
                    waited = ticket._in_flight()
                    assert waited is not None
                    lane.wait(waited, deadline)
                    self._answered[at, ticket.rows] = ticket.take_into(self._outputs, at)
                except RowFailed as error:
                    self._take_part(at, ticket.rows, error)
                except Error as error:
                    if not self._goes_on_after(error):
                        raise
                    continue
                self._in_flight.popleft()
        finally:
            self._give_up()
        return self._whole()

    async def answered_async(self) -> Reply:
        """Like `answered`, in an event loop and without the lock."""
        lane, turns, deadline = self._lane, self._model.turns, self._deadline
        try:
            while self._left():
                try:
                    await turns.alone(self._send_some, deadline)
                    if not self._in_flight:
                        await rows_come_back(turns, lane, deadline)
                        continue
                    at, ticket = self._in_flight[0]
                    reply = await ticket.result_async((deadline - time.monotonic_ns()) / 1e9)
                except RowFailed as error:
                    if ticket.rows == self._n:
                        raise
                    self._take_part(at, ticket.rows, error)
                except Error as error:
                    if not self._goes_on_after(error):
                        raise
                    continue
                else:
                    if ticket.rows == self._n:
                        return reply
                    lane.codec.place(self._outputs, at, ticket.rows, reply.outputs)
                    self._answered[at, ticket.rows] = reply.version
                self._in_flight.popleft()
        finally:
            self._give_up()
        return self._whole()

    def _left(self) -> bool:
        """Return whether answers are missing.

        If one batch could hold the rows, queue the pieces of older versions than the newest again.
        """
        if self._unsent or self._in_flight or self._of_sessions:
            return bool(self._unsent or self._in_flight)
        if self._n <= self._model.max_batch and len(versions := set(self._answered.values())) > 1:
            self._version = max(versions)
            for (at, rows), version in list(self._answered.items()):
                if version != self._version:
                    self._unsent.append((at, rows))
                    del self._answered[at, rows]
                    self._errors = {row: why for row, why in self._errors.items() if not at <= row < at + rows}
        return bool(self._unsent)

    def _goes_on_after(self, error: Error) -> bool:
        """Return whether to wait for further answers after an error; the rest of a sessions' request is not sent.

        Its other pieces in flight may still make their step: only their answers tell which sessions have advanced.
        """
        if not self._of_sessions:
            if again := isinstance(error, VersionNotHeld) and not self._wanted:
                self._begin_again()
            return again
        if not (isinstance(error, SessionLost) or not_computed(error)):
            return False
        at, ticket = self._in_flight[0] if self._in_flight else (0, None)
        if ticket is not None:
            if ticket._failure is not error:
                return False
            self._in_flight.popleft()
        self._failures.append((at, error))
        self._unsent.clear()
        return True

    def _failure(self) -> Error:
        """Return the exception for a request of sessions of which pieces failed.

        If no piece made its step, it is the first piece's error. Otherwise SessionLost names the rows that did, too.
        """
        advanced = {row for at, n in self._answered for row in range(at, at + n)} - self._errors.keys()
        lost = {at + row for at, error in self._failures if isinstance(error, SessionLost) for row in error.sessions}
        first = next((error for _, error in self._failures if isinstance(error, SessionLost)), self._failures[0][1])
        if not advanced:
            return SessionLost(str(first), sessions=sorted(lost)) if lost else first
        return SessionLost(
            f"a part of a request for sessions of {self._lane.model!r} failed after others had made their step "
            f"({first}): reset the sessions of the others",
            sessions=sorted(lost | advanced),
        )

    def _begin_again(self) -> None:
        """Send all rows again: the server no longer holds the version that the other pieces have."""
        self._give_up()
        self._in_flight.clear()
        self._answered.clear()
        self._errors.clear()
        self._version = 0
        self._unsent = deque([(0, self._n)])

    def _send_some(self) -> None:
        """Send as many of the unsent rows as the lane has free rows for."""
        model, lane = self._model, self._lane
        if lane.gone is not None:
            raise lane.lost()
        while self._unsent:
            at, left = self._unsent[0]
            wanted = min(left, model.max_batch)
            run = lane.take(wanted)
            if run is None:
                if model.give_up_kept() or not lane.largest:
                    lane.receive_now()
                if not (piece := min(wanted, lane.largest)) or (run := lane.take(piece)) is None:
                    break
            ticket = send_rows(Ticket(model.turns, lane, run), self._given, at, self._deadline, self._version)
            self._in_flight.append((at, ticket))
            if run.rows == left:
                self._unsent.popleft()
            else:
                self._unsent[0] = (at + run.rows, left - run.rows)

    def _take_part(self, at: int, n: int, error: RowFailed) -> None:
        """Collect a piece that has failed rows."""
        self._lane.codec.place(self._outputs, at, n, error.outputs)
        self._errors.update({at + index: reason for index, reason in error.errors.items()})
        self._answered[at, n] = error.version

    def _whole(self) -> Reply:
        """Return the reply of all pieces. Raises RowFailed if rows failed, and SessionLost."""
        if self._failures:
            raise self._failure()
        version, outputs = min(self._answered.values(), default=0), shaped(self._outputs)
        if self._errors:
            raise row_failed(self._lane.model, self._errors, self._n, outputs, version)
        return Reply(outputs, version, self._lane.codec.only)

    def _give_up(self) -> None:
        for _, ticket in self._in_flight:
            ticket._give_up()


async def rows_come_back(turns: ModelLock, lane: Lane, deadline: int) -> None:
    """Wait until rows of a lane may have become free. Raises Busy if the deadline has passed."""
    import asyncio  # most clients have no event loop, and importing it takes as long as ZeroMQ

    left = (deadline - time.monotonic_ns()) / 1e9
    if left <= 0 or (turns.mine and not lane.may_free_rows()):  # the latter in a handler, within a call with the rows
        raise Busy(f"no rows of this lane's {lane.rows} became free in time: ask for a larger lane")
    loop, future = asyncio.get_running_loop(), lane.row_waiter()
    await turns.alone(lambda: turns.watch(lane, loop), deadline)
    try:
        await asyncio.wait_for(future, min(left, LOOK_AFTER))
    except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
        await turns.alone(lane.look_after, deadline)
