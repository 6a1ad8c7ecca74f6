"""The state of sessions, read and written without a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.pieces import rows_come_back
from jurybox.client.session_book import SessionBook
from jurybox.client.ticket import Reply, Ticket
from jurybox.protocol.arena import LOAD, NO_FORWARD, STORE
from jurybox.protocol.errors import Busy, Refused, StaleLease

if TYPE_CHECKING:
    from jurybox.client.lane import Lane
    from jurybox.client.requests import Requests


class StateRequests:
    """Requests that read or write the state of sessions.

    Args:
        requests: of the sessions.
        book: knows their steps.
    """

    def __init__(self, requests: Requests, book: SessionBook) -> None:
        self._requests = requests
        self._book = book

    def exchanged(
        self, ids: NDArray[np.intp], flag: int, state: Mapping[str, NDArray[Any]], timeout: float | None
    ) -> dict[str, NDArray[Any]]:
        """Read (STORE) or write (LOAD) the state of sessions; return what was read.

        Raises:
            SessionLost, Timeout, Busy, ModelFailed, Refused, ServerGone.
        """
        deadline = self._requests.turns.deadline(timeout)
        exchange = partial(self._in_turn, ids, flag, state, deadline)
        try:
            return self._requests.turns.run(exchange, deadline)
        except StaleLease:
            pass
        return self._requests.turns.run(exchange, deadline)  # on a new lane: no state of the old one was needed

    def _in_turn(
        self, ids: NDArray[np.intp], flag: int, state: Mapping[str, NDArray[Any]], deadline: int
    ) -> dict[str, NDArray[Any]]:
        self._book.settle_broken_off()
        if flag == STORE:
            self._book.require(ids)
        lane, found = self._requests.usable(), []
        for part, steps, given in self._parts(lane, ids, flag, state):
            with (
                self._book.stepping(part, steps),
                self._sent(lane, part, steps, flag, given, deadline) as ticket,
            ):
                found.append(ticket.waited_for(deadline).outputs)
        return _concatenated(found)

    async def exchanged_async(
        self,
        ids: NDArray[np.intp],
        begin: NDArray[np.bool_],
        state: Mapping[str, NDArray[Any]] | None,
        timeout: float,
    ) -> dict[str, NDArray[Any]]:
        """Like `exchanged`, as a coroutine: read the state, or write it if one is given.

        Args:
            begin: mask of the sessions that are reset to the initial state before the state is read.
        """
        requests, deadline = self._requests, self._requests.turns.deadline(timeout)
        flag = STORE if state is None else LOAD

        def first_look() -> Lane:
            self._book.settle_broken_off()
            if flag == STORE:
                self._book.require(ids[~begin])
            return requests.usable()

        lane, found = await requests.turns.alone(first_look, deadline), []
        for part, steps, given in self._parts(lane, ids, flag, state or {}, begin):
            with self._book.stepping(part, steps):
                send = partial(self._sent, lane, part, steps, flag, given, deadline)
                while True:
                    try:
                        sent = await requests.turns.alone(send, deadline)
                        break
                    except Busy:
                        await rows_come_back(requests.turns, lane, deadline)
                with sent as ticket:
                    left = (deadline - time.monotonic_ns()) / 1e9
                    found.append((await ticket.result_async(left)).outputs)
        return _concatenated(found)

    def _parts(
        self,
        lane: Lane,
        ids: NDArray[np.intp],
        flag: int,
        state: Mapping[str, NDArray[Any]],
        begin: NDArray[np.bool_] | None = None,
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.uint32], dict[str, NDArray[Any]]]]:
        """Split the sessions into requests: yield the sessions of each, their steps and their state."""
        most = min(self._requests.max_batch, lane.rows)
        for at in range(0, len(ids), most):
            part = ids[at : at + most]
            steps = self._book.next[part] if flag == STORE else np.zeros(len(part), np.uint32)
            if begin is not None:
                steps[begin[at : at + most]] = 0
            yield part, steps, {name: array[at : at + most] for name, array in state.items()}

    def _sent(
        self,
        lane: Lane,
        ids: NDArray[np.intp],
        steps: NDArray[np.uint32],
        flag: int,
        state: Mapping[str, NDArray[Any]],
        deadline: int,
    ) -> _StateTicket:
        """Send a request that reads or writes state without computing."""
        requests, columns = self._requests, lane.columns
        if columns.sessions is None:
            raise Refused(f"model {requests.name!r} no longer keeps state")
        ticket = _StateTicket(requests.turns, lane, requests.found(lane, len(ids)))
        rows = slice(ticket.first, ticket.first + ticket.rows)
        columns.sessions["slot"][rows], columns.sessions["step"][rows] = ids, steps
        columns.sessions["flags"][rows] = flag | NO_FORWARD
        for extents in columns.input_extents.values():
            extents[rows] = 0
        for name, array in state.items():
            columns.state_in[name][rows] = array
        ticket.send(deadline)
        return ticket


class _StateTicket(Ticket):
    """A ticket whose outputs are the state of its rows after the request. Leaving a ``with`` gives it up."""

    __slots__ = ()

    def send(self, deadline: int) -> None:
        self._send(deadline, 0)

    def waited_for(self, deadline: int) -> Reply:
        return self._waited_for(deadline)

    def _collected(self) -> Reply:
        answer = self._checked()
        rows = slice(self.first, self.first + self.rows)
        return Reply({name: array[rows].copy() for name, array in self._lane.columns.state_out.items()}, answer.version)

    def __enter__(self) -> _StateTicket:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_up()


def _concatenated(parts: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
