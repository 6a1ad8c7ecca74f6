"""A request that may need several tickets: more rows than a batch or a lane holds, or than are free just now."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from jurybox.client.lane import Lane, row_failed
from jurybox.client.row_codec import Checked, shaped
from jurybox.client.ticket import Reply, Ticket
from jurybox.client.transports.transport import LOOK_AFTER
from jurybox.protocol.errors import Busy, RowFailed

if TYPE_CHECKING:
    from jurybox.client.model import Model


class Pieces:
    """n checked rows, cut into tickets as rows of the lane become free.

    Args:
        deadline: ns of CLOCK_MONOTONIC.
        version: of the weights to be answered by; 0: the newest.
    """

    def __init__(self, model: Model, lane: Lane, given: Checked, n: int, deadline: int, version: int) -> None:
        self._model = model
        self._lane = lane
        self._given = given
        self._n = n
        self._deadline = deadline
        self._version = version
        self._outputs = lane.codec.room(n)
        self._in_flight: deque[tuple[int, Ticket]] = deque()  # each with its first row's place among the n
        self._sent = 0
        self._versions: list[int] = []
        self._errors: dict[int, str] = {}

    def answered(self) -> Reply:
        """Send all and wait for the answers; the version is the oldest of theirs. Under the model's lock.

        Raises:
            RowFailed, Timeout, Busy, ModelFailed, Refused, ServerGone.
        """
        lane, deadline = self._lane, self._deadline
        try:
            while self._sent < self._n or self._in_flight:
                self._send_some()
                if not self._in_flight:
                    if not lane.wait_for_rows(deadline):
                        self._model._found(lane, 1)  # says that and why no row is free, or one has come back
                    continue
                at, ticket = self._in_flight[0]
                waited = ticket._in_flight()
                assert waited is not None
                lane.wait(waited, deadline)
                try:
                    self._versions.append(ticket._into(self._outputs, at))
                except RowFailed as error:
                    self._take_part(at, ticket.rows, error)
                self._in_flight.popleft()
        finally:
            self._give_up()
        return self._whole()

    async def answered_async(self) -> Reply:
        """As `answered`, in an event loop and without the lock."""
        lane, turns, deadline = self._lane, self._model.turns, self._deadline
        try:
            while self._sent < self._n or self._in_flight:
                await turns.alone(self._send_some, deadline)
                if self._in_flight:
                    at, ticket = self._in_flight[0]
                    try:
                        reply = await ticket.result_async((deadline - time.monotonic_ns()) / 1e9)
                    except RowFailed as error:
                        if ticket.rows == self._n:
                            raise
                        self._take_part(at, ticket.rows, error)
                    else:
                        if ticket.rows == self._n:
                            return reply
                        lane.codec.place(self._outputs, at, ticket.rows, reply.outputs)
                        self._versions.append(reply.version)
                    self._in_flight.popleft()
                elif self._sent < self._n:
                    await rows_come_back(self._model, lane, deadline)
        finally:
            self._give_up()
        return self._whole()

    def _send_some(self) -> None:
        """Send as many of the rows as there is room for."""
        model, lane = self._model, self._lane
        if lane.gone is not None:
            raise lane.lost()
        while self._sent < self._n:
            wanted = min(self._n - self._sent, model.max_batch)
            first, piece = lane.find(wanted), wanted
            if first is None and (model._row is not None or not (piece := lane.largest)):
                model._give_up_row()
                lane.receive_now()
                piece = min(wanted, lane.largest)
            if first is None and (not piece or (first := lane.find(piece)) is None):
                break
            ticket = model._sent(lane, self._given, self._sent, piece, first, self._deadline, self._version)
            self._in_flight.append((self._sent, ticket))
            self._sent += piece

    def _take_part(self, at: int, n: int, error: RowFailed) -> None:
        """Collect a piece of which rows failed."""
        self._lane.codec.place(self._outputs, at, n, error.outputs)
        self._errors.update({at + index: reason for index, reason in error.errors.items()})
        self._versions.append(error.version)

    def _whole(self) -> Reply:
        """The reply that the pieces make. Raises RowFailed where rows failed."""
        version, outputs = min(self._versions, default=0), shaped(self._outputs)
        if self._errors:
            raise row_failed(self._model.name, self._errors, self._n, outputs, version)
        return Reply(outputs, version)

    def _give_up(self) -> None:
        for _, ticket in self._in_flight:
            ticket._give_up()


async def rows_come_back(model: Model, lane: Lane, deadline: int) -> None:
    """Wait until rows of a lane may have become free. Raises Busy where the deadline is over."""
    import asyncio  # most clients have no event loop, and its import costs as much as ZeroMQ's

    left = (deadline - time.monotonic_ns()) / 1e9
    if left <= 0:
        raise Busy(f"no rows of this lane's {lane.rows} became free in time: ask for a larger lane")
    loop, future = asyncio.get_running_loop(), lane.row_waiter()
    await model.turns.alone(lambda: model.turns.watch(lane, loop), deadline)
    try:
        await asyncio.wait_for(future, min(left, LOOK_AFTER))
    except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
        await model.turns.alone(lane.look_after, deadline)
