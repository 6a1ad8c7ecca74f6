"""A leased lane and the tickets in flight on it: submit, wait, resubmit when an engine restarts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from jurybox.client.doors.door import LOOK_AFTER, Answer, CalledRow, Caller, Door, Outgoing
from jurybox.client.free_rows import FreeRows
from jurybox.protocol.board import EngineState
from jurybox.protocol.errors import Busy, Code, ProtocolMismatch, ServerGone, Timeout, TooManyFiles

_NOT_SENT = -1
_DEATHS = 3  # engines that die with a ticket in flight before the ticket is taken for the cause
_SERVING = int(EngineState.SERVING)


class BoardView(Protocol):
    """What a lane reads of a board: records of board.ENGINE, and whether the server lives."""

    engines: NDArray[Any]

    def server_lives(self) -> bool: ...


class RowMemory(Protocol):
    """What a lane uses of an arena: arrays of shape (rows, *row shape) by name."""

    inputs: dict[str, NDArray[Any]]
    outputs: dict[str, NDArray[Any]]

    def close(self) -> None: ...


class Ticket:
    """A request in flight. Hand it to `Model.result` once; until then its rows are its own."""

    __slots__ = ("answer", "deadline", "deaths", "engine", "epoch", "first", "future", "keeps_rows", "lane", "rows",
                 "sequence", "version")  # fmt: skip

    def __init__(self, lane: Lane, sequence: int, first: int, rows: int, deadline: int, version: int) -> None:
        self.lane = lane
        self.sequence = sequence
        self.first = first
        self.rows = rows
        self.deadline = deadline  # ns of CLOCK_MONOTONIC
        self.version = version  # asked for; 0: the newest
        self.engine = _NOT_SENT
        self.epoch = 0
        self.deaths = 0  # of engines that it was with
        self.answer: Answer | None = None
        self.keeps_rows = True  # False once nobody waits for it: its rows go free with the answer
        self.future: asyncio.Future[None] | None = None


class Lane:
    """Rows leased from one server. Not thread-safe: the model sees to that.

    Args:
        model: its name, for messages.
        arena: whose rows these are.
        give_back: called once at the end to release the lease.
        far: whether a network is between it and the server.
    """

    def __init__(
        self,
        model: str,
        board: BoardView,
        arena: RowMemory,
        door: Door,
        lease: int,
        first: int,
        rows: int,
        give_back: Callable[[], None],
        *,
        far: bool = False,
    ) -> None:
        self.model = model
        self._far = far
        self.free = FreeRows(first, rows)
        self.inputs: dict[str, NDArray[Any]] = arena.inputs
        self.outputs: dict[str, NDArray[Any]] = arena.outputs
        self.gone: str | None = None  # why this lane can be used no longer
        self._board = board
        self._arena = arena
        self._door = door
        self._give_back = give_back
        self.in_flight: dict[int, Ticket] = {}
        # A lane's next holder must not take a late answer to this one for its own.
        self.sequence = (lease & 0xFFFFFFFF) << 32
        self._states = board.engines["state"]
        self._epochs = board.engines["epoch"]
        self._waits = board.engines["expected_wait"]
        self._one_engine = len(self._states) == 1
        self._looked = 0.0
        self._unsent_because = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._row_waiters: list[asyncio.Future[None]] = []

    def submit(self, first: int, rows: int, deadline: int, version: int = 0) -> Ticket:
        """Send a ticket for rows already written. It is sent later where no engine serves just now."""
        self.sequence += 1
        ticket = Ticket(self, self.sequence, first, rows, deadline, version)
        self.in_flight[ticket.sequence] = ticket
        self._send(ticket)
        return ticket

    def ask(self, first: int, rows: int, seconds: float, version: int = 0) -> Answer | Ticket:
        """Submit and wait a while; gives the answer, or the ticket where none has come yet.

        The common case, nothing else in flight and a prompt answer, needs no ticket and no book-keeping.
        """
        now = time.monotonic_ns()
        deadline = now + int(seconds * 1e9)
        engine = None if self.in_flight else self._choose_engine()
        if engine is None:
            return self.submit(first, rows, deadline, version)
        self.sequence = sequence = self.sequence + 1
        epoch = self._epochs.item(engine)
        outgoing = Outgoing(sequence, engine, epoch, first, rows, now, deadline, version)
        try:
            answer = self._door.exchange(outgoing, seconds if seconds < LOOK_AFTER else LOOK_AFTER)
        except TooManyFiles:
            return self.submit(first, rows, deadline, version)  # which keeps trying
        if answer is None or answer.sequence != sequence:
            ticket = self.sent(Ticket(self, sequence, first, rows, deadline, version), engine, epoch)
            if answer is not None:
                self._dispatch((answer,))
            return ticket
        if answer.code == Code.STALE_LEASE:
            self.gone = answer.message
        return answer

    def caller(self, row: CalledRow) -> tuple[Caller | None, int]:
        """What makes whole calls of a row, and the engine's life it is for; None where there is no such thing.

        Its user counts `sequence` up for every call and makes none while anything is `in_flight`.
        """
        engine = self._choose_engine() if self._one_engine else None
        if engine is None:
            return None, 0
        epoch = self._epochs.item(engine)
        try:
            return self._door.caller(row, self._board.engines[engine : engine + 1], epoch), epoch
        except TooManyFiles:
            return None, 0

    def sent(self, ticket: Ticket, engine: int, epoch: int) -> Ticket:
        """Keep a ticket that the door has sent to an engine already."""
        ticket.engine, ticket.epoch = engine, epoch
        self.in_flight[ticket.sequence] = ticket
        return ticket

    def wait(self, ticket: Ticket, deadline: int) -> Answer:
        """Wait for a ticket's answer until `deadline`, ns of CLOCK_MONOTONIC.

        Raises:
            Timeout: none came; the ticket keeps its rows until the engine answers or is gone.
            ServerGone: the server is dead, and with it all tickets.
        """
        while ticket.answer is None:
            left = deadline - time.monotonic_ns()
            if left <= 0:
                raise Timeout(self._why_late(ticket))
            self.receive(min(left / 1e9, LOOK_AFTER))
        return ticket.answer

    async def wait_async(self, ticket: Ticket, deadline: int) -> Answer:
        """As `wait`, in an event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._door.watch(loop, self.receive_now)
        self.receive_now()
        while ticket.answer is None:
            left = (deadline - time.monotonic_ns()) / 1e9
            if left <= 0:
                raise Timeout(self._why_late(ticket))
            ticket.future = loop.create_future()
            await self._until(ticket.future, left)
        return ticket.answer

    async def wait_for_rows(self, deadline: int) -> None:
        """Wait until rows may have become free.

        Raises:
            Busy: none did until `deadline`, ns of CLOCK_MONOTONIC.
        """
        left = (deadline - time.monotonic_ns()) / 1e9
        if left <= 0:
            raise Busy(f"no rows of this lane's {self.free.total} became free in time: ask for a larger lane")
        future = asyncio.get_running_loop().create_future()
        self._row_waiters.append(future)
        await self._until(future, left)

    async def _until(self, future: asyncio.Future[None], left: float) -> None:
        """Wait for a future, at most `left` seconds; silence makes it look after the tickets."""
        try:
            await asyncio.wait_for(future, min(left, LOOK_AFTER))
        except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
            self.receive_now()
            self._look_after()

    def receive(self, timeout: float) -> None:
        """Take in answers, waiting at most `timeout` seconds; silence makes it look after the tickets."""
        answers = self._door.receive(timeout)
        if answers:
            self._dispatch(answers)
        elif time.monotonic() - self._looked > LOOK_AFTER / 2:
            self._look_after()

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """Have `arrived` called in the loop's thread when answers may have come: it calls `receive_now`."""
        self._door.watch(loop, arrived)

    def receive_now(self) -> None:
        """Take in the answers that are there."""
        while answers := self._door.receive(0):
            self._dispatch(answers)

    def let_go(self, ticket: Ticket) -> None:
        """Nobody needs the ticket's rows any more: they are free now, or once it is answered or its engine gone."""
        if ticket.keeps_rows:
            ticket.keeps_rows = False
            if ticket.answer is not None:
                self._give(ticket)

    def _give(self, ticket: Ticket) -> None:
        self.free.give(ticket.first, ticket.rows)
        for future in self._row_waiters:
            if not future.done():
                future.set_result(None)
        self._row_waiters.clear()

    def close(self) -> None:
        """Release the lease; tickets in flight stay unanswered."""
        if self.gone is None:
            self.gone = "the model was closed"
            self._give_back()
        self._door.close()
        self._arena.close()
        self.inputs, self.outputs = {}, {}

    def _send(self, ticket: Ticket) -> None:
        engine = self._choose_engine()
        if engine is None:
            ticket.engine, self._unsent_because = _NOT_SENT, "no engine serves"
            return
        epoch, now = self._epochs.item(engine), time.monotonic_ns()
        ticket.engine, ticket.epoch = engine, epoch
        try:
            self._door.send(
                Outgoing(
                    ticket.sequence, engine, epoch, ticket.first, ticket.rows, now, ticket.deadline, ticket.version
                )
            )
        except TooManyFiles as error:
            ticket.engine, self._unsent_because = _NOT_SENT, str(error)  # tried again when looked after

    def _choose_engine(self) -> int | None:
        """A serving engine with about the shortest expected wait; by chance among those, so that a crowd spreads."""
        if self._one_engine:
            return 0 if self._states.item(0) == _SERVING else None
        serving = [i for i, state in enumerate(self._states.tolist()) if state == _SERVING]
        if not serving:
            return None
        waits = self._waits.tolist()
        bound = 1.5 * min(waits[i] for i in serving)
        return random.choice([i for i in serving if waits[i] <= bound])

    def _dispatch(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if answer.sequence == 0:
                raise ProtocolMismatch(answer.message)
            ticket = self.in_flight.pop(answer.sequence, None)
            if ticket is None:
                continue  # answered already, by the engine it was sent to before
            if answer.code == Code.STALE_LEASE:
                self.gone = answer.message
            ticket.answer = answer
            if not ticket.keeps_rows:
                self._give(ticket)
            if ticket.future is not None and not ticket.future.done():
                ticket.future.set_result(None)

    def _look_after(self) -> None:
        """See on the board whether server and engines live; send again what went down with an engine."""
        self._looked = time.monotonic()
        if not self._board.server_lives():
            self.gone = "the server is gone"
            raise ServerGone(
                f"the server died or was stopped with {len(self.in_flight)} tickets of {self.model!r} in flight; "
                "the next call connects again if one is there"
            )
        for ticket in list(self.in_flight.values()):
            if ticket.engine != _NOT_SENT and int(self._epochs[ticket.engine]) == ticket.epoch:
                continue
            ticket.deaths += ticket.engine != _NOT_SENT
            if ticket.keeps_rows and ticket.deaths == _DEATHS:
                self._dispatch((self._fatal(ticket),))
            elif ticket.keeps_rows:
                self._send(ticket)
            else:  # the engine that might have written to its rows is gone
                del self.in_flight[ticket.sequence]
                self._give(ticket)

    def _fatal(self, ticket: Ticket) -> Answer:
        """In place of an engine's answer: a ticket that brings engines down must not bring down the server."""
        why = (
            f"{_DEATHS} engines died one after another with this ticket of model {self.model!r} ({ticket.rows} rows) "
            "in flight; it is not sent again. See the server's log for what ended them"
        )
        return Answer(ticket.sequence, Code.MODEL_FAILED, why, 0, ticket.epoch)

    def _why_late(self, ticket: Ticket) -> str:
        if self._far and ticket.engine != _NOT_SENT:
            return (
                f"model {self.model!r} did not answer in time ({ticket.rows} rows): its server is busy, or the network "
                "to it is broken. Ask again: it is connected to again by itself"
            )
        states = [EngineState(int(state)).name.lower() for state in self._states]
        unsent = f"was not sent: {self._unsent_because}"
        sent = unsent if ticket.engine == _NOT_SENT else f"is at engine {ticket.engine}"
        return (
            f"model {self.model!r} did not answer in time; the ticket ({ticket.rows} rows) {sent} "
            f"(engines: {', '.join(states)}). Its rows go free when it is answered"
        )
