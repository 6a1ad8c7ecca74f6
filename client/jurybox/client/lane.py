"""A leased lane: which of its rows are free, and the tickets in flight on it."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from jurybox.client.engine_choice import MOST_DEATHS, EngineChoice, EngineDeaths, fatal
from jurybox.client.in_flight import LOOK_AFTER, UNSENT, Answer, Claim, InFlight, Waiter, wake
from jurybox.client.row_allocator import RowAllocator, RowRun
from jurybox.client.row_codec import codec_of, shaped
from jurybox.client.transports.transport import SERVING, Caller, NotSent, RowPlace, Transport
from jurybox.protocol import forks
from jurybox.protocol.arena import Arena, Columns
from jurybox.protocol.errors import (
    Busy,
    Code,
    Error,
    ProtocolMismatch,
    Refused,
    RowFailed,
    ServerGone,
    SessionLost,
    Timeout,
    TooManyFiles,
    error_for,
)
from jurybox.protocol.locks import NESTED
from jurybox.protocol.scoreboard import Scoreboard

if TYPE_CHECKING:
    import asyncio

    from jurybox.client.link import OneEngine, RowsHere


class Lane:
    """Rows leased from one server. Not thread-safe: the model's lock serializes its use.

    The same thread may come in again at any point, from a signal handler or a destructor, and a KeyboardInterrupt may
    end a call there. `rows` records which rows are in use; a ticket that a call is sending is left alone by others; an
    answer stays with the transport until it is settled.

    Args:
        model: its name, for messages.
        arena: the memory of the rows.
        give_back: tells the server that the lease ends; not called if the lane is lost.
        leave: drops the lease without telling the server; called once, at the latest when the lane is collected.
        far: whether the server is reached over a network.
        engines: the engines that compute the model; empty: all.
        home: the one of them that the lane uses unless others are less busy.
        leased: the server's numbers of the lane and of its lease.
        charged: shape (1,), the engines' deaths that are charged to the model; None: each is.

    Attributes:
        runs: which of the rows are free.
        in_flight: the tickets that are not settled, by number.
        numbers: the numbers of the next tickets.
        watched_by: the event loop that receives the answers.
        one_engine: whether a single engine computes the model.
        engines: the number of engines that compute this lane's tickets at the same time.
    """

    def __init__(
        self,
        model: str,
        scoreboard: Scoreboard | OneEngine,
        arena: Arena | RowsHere,
        transport: Transport,
        lease: int,
        first: int,
        rows: int,
        give_back: Callable[[], None],
        *,
        leave: Callable[[], None] = lambda: None,
        far: bool = False,
        engines: Sequence[int] = (),
        home: int = 0,
        leased: tuple[int, int] = (0, 0),
        charged: NDArray[Any] | None = None,
    ) -> None:
        self.model = model
        self.rows = rows
        self.columns: Columns = arena.columns
        self.codec = codec_of(self.columns.spec)
        self.gone: Error | None = None  # the reason why this lane can no longer be used
        self.runs = RowAllocator(first, rows)
        self.in_flight = self.runs.lent
        # Numbers start at that of the lease, so that the lane's next lessee cannot mistake a late answer for its own.
        self.numbers = itertools.count(((lease & 0xFFFFFFFF) << 32) + 1)
        self.watched_by: asyncio.AbstractEventLoop | None = None
        self.leased = leased
        self._far = far
        self._scoreboard = scoreboard
        self._arena = arena
        self._transport = transport
        self._give_back = give_back
        self._incarnations = scoreboard.engines["incarnation"]
        self._choice = EngineChoice(scoreboard.engines, engines, home, one=self.columns.sessions is not None)
        self._states = self._choice.states
        self.one_engine, self.engines = self._choice.one_engine, self._choice.engines
        self._deaths = EngineDeaths(charged, far=far)
        self._looked = 0.0
        self._unsent_because = ""
        self._full = False  # whether tickets wait for room in the transport
        self._row_waiters: list[Waiter] = []
        self._let_go = weakref.finalize(self, _let_go, os.getpid(), transport, arena, leave)
        forks.register(self)

    # ---- rows

    @property
    def free(self) -> int:
        """The number of free rows."""
        return self.runs.free

    @property
    def largest(self) -> int:
        """The length of the longest run of free rows."""
        return self.runs.largest

    @property
    def rows_awaited(self) -> bool:
        """Whether somebody waits for rows to become free."""
        return bool(self._row_waiters)

    def take(self, n: int) -> RowRun | None:
        """Take n consecutive rows; see RowAllocator.take."""
        return self.runs.take(n)

    def give(self, run: RowRun) -> None:
        """Give rows back. They are free now, or once the engine has answered."""
        self.runs.give(run)
        if self._row_waiters:
            self._tell_row_waiters()

    def asked(self, first: int, rows: int) -> bool:
        """Return whether a ticket for one of these rows is in flight."""
        return self.runs.is_lent(first, rows)

    # ---- tickets

    def submit(
        self, first: int, rows: int, deadline: int, version: int = 0, owner: weakref.ref[Any] | None = None
    ) -> InFlight:
        """Send a ticket for rows already written. If no engine is serving, it is sent later.

        Args:
            owner: the object that wants the answer. Without one, a lost ticket is sent again only while a call waits
                for it.
        """
        self._require()
        ticket = InFlight(next(self.numbers), first, rows, deadline, version)
        ticket.owner = owner
        if self.in_flight and time.monotonic() - self._looked > LOOK_AFTER:
            self._look_after()
        claim = Claim()
        ticket.sender = weakref.ref(claim)
        self.in_flight[ticket.sequence] = ticket
        try:
            self._send(ticket)
        finally:
            ticket.sender = None
        return ticket

    def ask(self, first: int, rows: int, seconds: float, version: int = 0) -> Answer:
        """Send a request for rows already written and wait for its answer. The outputs stay while the rows are held.

        Raises:
            Timeout: no answer in time; the rows become free when the engine has answered or is gone.
            ServerGone: the server is dead; all tickets are lost.
        """
        deadline = time.monotonic_ns() + int(seconds * 1e9)
        made = Claim()
        claim = weakref.ref(made)
        brief = seconds if seconds < LOOK_AFTER else LOOK_AFTER
        ticket = self.exchange(first, rows, deadline, version, brief, claim, claim)
        try:
            return ticket.answer or self.wait(ticket, deadline)
        finally:
            ticket.owner = None

    def exchange(
        self,
        first: int,
        rows: int,
        deadline: int,
        version: int,
        seconds: float,
        owner: weakref.ref[Any] | None = None,
        sender: weakref.ref[Any] | None = None,
    ) -> InFlight:
        """Send a ticket as `submit` does; if no other one is in flight, wait at most `seconds` for its answer.

        The outputs of an answered ticket stay while the rows are held.

        Args:
            sender: the calling method's claim, if it has one.
        """
        engine = None if self.in_flight else self.choose_engine()
        if engine is None:
            return self.submit(first, rows, deadline, version, owner)
        if self.gone is not None:
            raise self.lost()
        ticket = InFlight(next(self.numbers), first, rows, deadline, version)
        ticket.engine, ticket.incarnation = engine, self._incarnations.item(engine)
        ticket.submitted, ticket.owner = time.monotonic_ns(), owner
        if sender is None:
            claim = Claim()
            sender = weakref.ref(claim)
        ticket.sender = sender
        self.in_flight[ticket.sequence] = ticket
        try:
            answer = self._transport.exchange(ticket, seconds)
            if answer is None:
                pass
            elif answer.sequence == ticket.sequence and answer.code == Code.OK:  # as a rule
                ticket.answer = answer
                self.in_flight.pop(ticket.sequence, None)
            else:
                self.settle((answer,), mine=ticket)
        except (TooManyFiles, NotSent) as error:
            ticket.engine, self._unsent_because = UNSENT, str(error)  # `look_after` sends it
        finally:
            ticket.sender = None
        return ticket

    def choose_engine(self) -> int | None:
        """Choose the engine for the next ticket; None if none is serving. See EngineChoice.choose."""
        if self.one_engine:
            home = self._choice.home
            return home if self._states.item(home) == SERVING else None
        return self._choice.choose(self.in_flight)

    def replace(self, lane: Lane) -> None:
        """Use the engine of a lane that this one replaces: the server has counted both."""
        self._choice.replace(lane._choice)

    def caller(self, place: RowPlace, engine: int) -> tuple[Caller | None, int]:
        """Return the native caller for some rows on an engine, and the engine's incarnation that it is for.

        None instead of a caller if the transport cannot open one. For each call the user adds a ticket to `in_flight`.
        """
        incarnation = self._incarnations.item(engine)
        place = place._replace(engine=self.record(engine), incarnation=incarnation, number=engine)
        try:
            return self._transport.caller(place), incarnation
        except (TooManyFiles, NotSent):
            return None, 0

    def able(self) -> tuple[tuple[int, int], ...]:
        """Return the serving engines for tickets that other code sends, each with its incarnation.

        The lane's own is first. With sessions, only one has their state.
        """
        return tuple((i, self._incarnations.item(i)) for i in self._choice.able(self.in_flight))

    def adopt(self, ticket: InFlight, engine: int, incarnation: int, submitted: int) -> None:
        """Take over a ticket that other code sent through this lane's transport, with a number of `advance`.

        Args:
            incarnation: that of the engine that it was sent to.
            submitted: ns of CLOCK_MONOTONIC.
        """
        ticket.engine, ticket.incarnation, ticket.submitted = engine, incarnation, submitted
        self.in_flight[ticket.sequence] = ticket

    def advance(self, number: int = 0) -> int:
        """Let other code number its tickets: return a number above which all are unused, and above `number`.

        Call it again with the highest that was used, before this lane sends tickets of its own.
        """
        unused = max(next(self.numbers), number + 1)
        self.numbers = itertools.count(unused + 1)
        return unused

    def record(self, engine: int) -> NDArray[Any]:
        """Return an engine's record of the scoreboard, (1,) of scoreboard.ENGINE."""
        return self._scoreboard.engines[engine : engine + 1]

    def wait(self, ticket: InFlight, deadline: int) -> Answer:
        """Wait for a ticket's answer until `deadline`, ns of CLOCK_MONOTONIC.

        Raises:
            Timeout: no answer in time; the ticket keeps its rows until the engine answers or is gone.
            Busy: a call that this one is nested in has the answer, or may have it.
            ServerGone: the server is dead; all tickets are lost.
        """
        while ticket.answer is None:
            left = deadline - time.monotonic_ns()
            if left <= 0:
                raise Timeout(self.why_late(ticket))
            self.receive(min(left / 1e9, LOOK_AFTER), (ticket,))
            if ticket.answer is None and self._transport.is_reading(ticket):
                raise Busy(
                    f"a call of model {self.model!r} is reading the answer to this ticket: {NESTED}. Ask for it "
                    "after that call"
                )
        return ticket.answer

    def may_free_rows(self) -> bool:
        """Return whether tickets are in flight whose answers a call can wait for, also one that is nested in another.

        Those do not count that a call is sending or reading: it goes on only after the calls that are nested in it.
        """
        tickets = list(self.in_flight.values())
        return not all(ticket.sending or self._transport.is_reading(ticket) for ticket in tickets)

    def wait_for_rows(self, deadline: int) -> bool:
        """Wait up to LOOK_AFTER for rows in flight. Return False if there are none, or the deadline has passed."""
        left = deadline - time.monotonic_ns()
        if left <= 0 or not self.may_free_rows():
            return False
        self.receive(min(left / 1e9, LOOK_AFTER))
        return True

    def row_waiter(self) -> asyncio.Future[None]:
        """Return a future of the running loop that is done when rows may have become free."""
        import asyncio  # most clients have no event loop, and importing it takes as long as ZeroMQ

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._row_waiters.append((loop, future))
        return future

    def receive(self, timeout: float, waited: Sequence[InFlight] = ()) -> None:
        """Receive answers, waiting at most `timeout` seconds. If none arrive, check for lost tickets.

        Args:
            waited: the tickets that the caller waits for.
        """
        answers = self._transport.receive(timeout)
        if answers:
            self.settle(answers)
        if (not answers or self.in_flight) and time.monotonic() - self._looked > LOOK_AFTER / 2:
            self._look_after(waited)

    def receive_now(self) -> None:
        """Receive the answers that have arrived."""
        while answers := self._transport.receive(0):
            self.settle(answers)

    def settle(self, answers: Iterable[Answer], mine: InFlight | None = None) -> None:
        """Assign answers to their tickets. The tickets' rows become free unless a run of them is held.

        Args:
            mine: the ticket of which the calling method is the sender.
        """
        wrong = ""
        for answer in answers:
            if answer.sequence == 0:
                wrong = answer.message
                self._transport.settled(answer)
                continue
            ticket = self.in_flight.get(answer.sequence)
            # Not if it was answered by the engine that it was sent to before, or this is the answer of an engine that
            # is dead: another one writes to these rows now, maybe by other weights.
            if ticket is not None and (answer.incarnation == ticket.incarnation or self._far):
                if answer.code == Code.MODEL_NOT_FOUND and not self.one_engine:
                    with ticket.being_sent(mine=ticket is mine) as sends:
                        if not sends or self._send_elsewhere(ticket, answer):
                            continue
                if answer.code == Code.STALE_LEASE:
                    self.gone = error_for(answer.code, answer.message)
                ticket.answer = answer
                self._forget(ticket)
                if ticket.waiters is not None:
                    wake(ticket.waiters)
            self._transport.settled(answer)
        if self._full:
            self._send_unsent()
        if wrong:
            raise ProtocolMismatch(wrong)

    @property
    def transport(self) -> Transport:
        """The transport that carries the lane's tickets."""
        return self._transport

    def watch(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """Register `arrived`, to be called in the loop's thread when answers may have arrived; it calls `receive_now`.

        Call it in that thread. `arrived` must not keep the lane alive.
        """
        self._transport.watch(loop, arrived)

    def close(self) -> None:
        """Release the lease. Tickets in flight are never answered."""
        if self.gone is None:
            self.gone = Refused(f"model {self.model!r} was closed: get it again from the server")
            self._give_back()
        self.columns = self.columns.nothing()
        self._let_go()

    def failure(self, answer: Answer, first: int, rows: int) -> Error:
        """Return the exception for an answer that is not OK. Call it before the rows are used again."""
        if answer.code == Code.SESSION_LOST:
            return SessionLost(answer.message, Code.SESSION_LOST, sorted(self.columns.failures(first, rows)))
        if answer.code != Code.ROW_FAILED:
            return error_for(answer.code, answer.message)
        errors = self.columns.failures(first, rows)
        outputs = self.codec.take(self.columns, first, rows)
        return row_failed(self.model, errors, rows, shaped(outputs), answer.version)

    def lost(self) -> Error:
        """Return the exception for a ticket or rows of a lane that is gone."""
        assert self.gone is not None
        return error_for(self.gone.code, str(self.gone))

    # ---- private

    def _require(self) -> None:
        """Raise the reason if the lane can no longer be used: a nested call may have closed it."""
        if self.gone is not None:
            raise self.lost()

    def _send(self, ticket: InFlight) -> None:
        engine = self.choose_engine()
        if engine is None:
            ticket.engine, self._unsent_because = UNSENT, "no engine serves"
            return
        ticket.submitted = time.monotonic_ns()
        ticket.engine, ticket.incarnation = engine, self._incarnations.item(engine)
        if ticket.answer is not None:
            return  # a nested call has settled it meanwhile; from here on it settles no answer to an earlier sending
        try:
            self._transport.send(ticket)
        except (TooManyFiles, NotSent) as error:
            # `look_after` tries again; after the next answers if only room was missing.
            ticket.engine, self._unsent_because = UNSENT, str(error)
            self._full = self._full or isinstance(error, NotSent)

    def _send_unsent(self) -> None:
        """Send the tickets for which the transport had no room."""
        self._full = False
        for ticket in list(self.in_flight.values()):
            if self._full:
                return
            if ticket.engine == UNSENT:
                with ticket.being_sent() as mine:
                    if mine and ticket.engine == UNSENT and ticket.answer is None:
                        self._send(ticket)

    def _send_elsewhere(self, ticket: InFlight, answer: Answer) -> bool:
        """Send a ticket again whose engine does not have the model: it could not load it, or has not done so yet.

        Return False if no other engine may have it.
        """
        if self.in_flight.get(ticket.sequence) is ticket and ticket.incarnation == answer.incarnation:
            if not self._choice.goes_on_without(ticket.engine):
                return False
            self._send(ticket)
        self._transport.settled(answer)
        return True

    def _forget(self, ticket: InFlight) -> None:
        """Remove a ticket that no engine has any more."""
        self.in_flight.pop(ticket.sequence, None)
        if self._row_waiters:
            self._tell_row_waiters()

    def _tell_row_waiters(self) -> None:
        waiters, self._row_waiters = self._row_waiters, []
        wake(waiters)

    def look_after(self, waited: Sequence[InFlight] = ()) -> None:
        """Receive the answers that have arrived, then resend tickets lost with an engine or in an interrupted call."""
        self.receive_now()
        self._look_after(waited)

    def _look_after(self, waited: Sequence[InFlight] = ()) -> None:
        self._looked = time.monotonic()
        if not self._scoreboard.server_lives():
            self.gone = ServerGone(
                f"the server died or was stopped with {len(self.in_flight)} tickets of {self.model!r} in flight; "
                "the next call reconnects if a server is running"
            )
            raise self.lost()
        for ticket in list(self.in_flight.values()):
            if ticket.answer is not None:
                self._forget(ticket)  # an interrupt came between its answer and its removal
                continue
            with ticket.being_sent() as mine:
                if mine and self.in_flight.get(ticket.sequence) is ticket and ticket.answer is None:
                    self._recover(ticket, ticket in waited)

    def _recover(self, ticket: InFlight, waited: bool) -> None:
        """Send a ticket again if no live engine has it, or drop it if nobody wants its answer."""
        sent = ticket.engine != UNSENT
        died = sent and int(self._incarnations[ticket.engine]) != ticket.incarnation
        if sent and not died and self._transport.holds(ticket):
            return
        ticket.deaths += died and self._deaths.blames(ticket.incarnation)
        if not (waited or ticket.wanted) and not (self._far and sent):  # if far, it outlives its connection
            self._forget(ticket)  # no live engine has it, so none can write to its rows
        elif ticket.deaths >= MOST_DEATHS:
            self.settle((fatal(self.model, ticket),))
        else:
            if sent and not died:  # its answer was lost in this process: restart its time-out
                now = time.monotonic_ns()
                ticket.deadline = max(ticket.deadline, now + ticket.deadline - ticket.submitted)
            self._send(ticket)

    def why_late(self, ticket: InFlight) -> str:
        """Return the message of a time-out."""
        if self._far and ticket.engine != UNSENT:
            return (
                f"model {self.model!r} did not answer in time ({ticket.rows} rows): its server is busy, or the network "
                "to it is broken. Ask again: it is connected to again by itself"
            )
        unsent = f"was not sent: {self._unsent_because}"
        sent = unsent if ticket.engine == UNSENT else f"is at engine {ticket.engine}"
        return (
            f"model {self.model!r} did not answer in time; the ticket ({ticket.rows} rows) {sent} "
            f"(engines: {self._choice.described()}). Its rows become free when it is answered"
        )

    def _after_fork_in_child(self) -> None:
        """Detach from the lane: its lock and its rows belong to the parent."""
        if self.gone is None:
            self.gone = Refused(
                f"these rows of {self.model!r} were taken before a fork, and belong to the parent: take new ones in "
                "the child"
            )
        self.columns = self.columns.nothing()
        self.runs.forget()
        self._row_waiters = []
        self._let_go.detach()
        self._transport.forked()
        self._arena.close()
        self._deaths.forget()
        self._choice.forget()
        del self._scoreboard, self._states, self._incarnations  # this unmaps the scoreboard


def row_failed(model: str, errors: dict[int, str], rows: int, outputs: Any, version: int) -> RowFailed:
    """Return the exception for a request with failed rows."""
    shown = "; ".join(f"row {index}: {reason}" for index, reason in list(errors.items())[:3])
    more = "" if len(errors) <= 3 else f"; and {len(errors) - 3} more"
    message = f"{len(errors)} of {rows} rows of {model!r} failed: {shown}{more}"
    return RowFailed(message, Code.ROW_FAILED, errors, outputs, version)


def _let_go(pid: int, transport: Transport, arena: Arena | RowsHere, leave: Callable[[], None]) -> None:
    """Close a lane's resources. Its lock is released last, when this client can no longer write to the rows."""
    if os.getpid() == pid:
        transport.close()
        arena.close()
        leave()
