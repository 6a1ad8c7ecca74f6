"""Sequences: requests that share a state which the model keeps, identified by a name that the client chooses.

As in Triton's sequence batcher, a request with `sequence_start` is the first, one with `sequence_end` the last.
Sessions of our own client (jurybox.client.Sessions over grpc://) are sequences too. The client numbers their steps, and
this module checks the numbers.

A request of a sequence is answered from the state that its client expects, or fails:
- the requests of a sequence are computed one after another, in the order of their arrival;
- if one fails, those queued behind it are refused, since they assumed its success;
- if one fails in a stream, its sequence is lost: it is unknown which requests were sent before its failure was seen;
- if a client does not receive the result of a request (a time-out, a cancelled call), its sequence is lost;
- if an engine, a lane or this process ends, the states that it held are lost, and their sequences with them.
The requests of a lost sequence fail with SESSION_LOST until it is started again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jurybox.client.session_book import not_computed
from jurybox.protocol.errors import (
    Busy,
    Error,
    RowFailed,
    SessionLost,
    SpecMismatch,
    Timeout,
    plain,
)
from jurybox.server.frontend.lanes import ModelRows, SharedLane
from jurybox.server.frontend.requests import SET, Steps
from jurybox.server.frontend.waiting_rows import Arrays
from jurybox.server.security.limits import CALLER, sessions_share

Key = tuple[Any, ...]  # the model, then the sequence's name

SESSIONS_SHARE = 1.0  # of a model's sessions, that one connection may hold
IDLE = 60.0  # seconds without a request after which a sequence ends
_OVERTAKEN = 0.25  # seconds that a step waits for its predecessor, which it may have overtaken on the way
_LOOK = 0.005  # seconds between two checks whether the predecessor has arrived


class NoSession(Busy):
    """No session is free for a new sequence. Nothing was computed, and `SequenceTurn.infer` may be called again."""


class _Sequence:
    """One sequence.

    Attributes:
        coming: the step number that the next request to arrive must have.
        next: the step for which the state is valid; None: the state is lost.
        held, slot: the lane and number of its session; None and -1: it has none.
        caller: the connection that its session counts for.
        tail: a future that is done when the request that arrived last has ended.
        pending: the number of requests that have not ended; `used`: when the last one ended (s of the monotonic clock).
    """

    __slots__ = ("caller", "coming", "held", "next", "pending", "slot", "tail", "used")

    def __init__(self, now: float) -> None:
        self.coming = 0
        self.next: int | None = None
        self.held: SharedLane | None = None
        self.slot = -1
        self.caller: Hashable = None
        self.tail: asyncio.Future[None] | None = None
        self.pending = 0
        self.used = now


class SequenceTurn:
    """The position of a request in the order of its sequences. Enter its ``with`` block before the first await."""

    def __init__(self, sequences: Sequences, model: str, steps: Steps) -> None:
        self._all = sequences
        self.model = model
        self.keys: list[Key] = [(model, *name) for name in steps.sequences]
        self.reports_loss = steps.reports_loss
        self._asked = steps.steps
        self._end = steps.end
        self.steps: list[int] = []
        self._came: list[int] = []  # `coming` of each sequence when this request arrived
        self._waited = False
        self._of: list[_Sequence] = []
        self._before: list[asyncio.Future[None]] = []
        self._ended: asyncio.Future[None] | None = None
        if not self._overtook():
            self._take()

    def __enter__(self) -> SequenceTurn:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._ended is None:
            return
        # A request that was refused before its turn counts as not sent. After a time-out or a cancelled call it counts
        # as sent: the client does not know that it was not computed.
        refused = not self._waited and isinstance(error, Error) and not isinstance(error, Timeout)
        _end_after(self._before, self._ended)
        for key, sequence, step, came in zip(self.keys, self._of, self.steps, self._came, strict=True):
            if refused and sequence.coming == step + 1:
                sequence.coming = came
            sequence.pending -= 1
            if error is not None and sequence.next is None and not sequence.pending:
                self._all.release(sequence)  # its state is lost, so only other sequences can use the session
            self._all.used(key, sequence)

    @property
    def begins(self) -> bool:
        """Whether the request needs no earlier state."""
        return not any(self.steps)

    async def infer(
        self, lanes: ModelRows, held: SharedLane, inputs: Arrays, n: int, until: float, version: int, state: str = ""
    ) -> tuple[Arrays, int]:
        """Compute one row of each sequence, in order.

        Args:
            state: GET: return the state, SET: replace it by the inputs; in both cases nothing is computed.

        Raises:
            SessionLost: its `sessions` are the rows whose sequences have lost their state; nothing was computed.
            Timeout, Busy, ModelFailed, SpecMismatch, RowFailed, Refused, ServerGone.
        """
        if n != len(self.keys) or n > held.model.max_batch:
            many = f"{len(self.keys)} sequences" if self.reports_loss else "a sequence, which takes one row per request"
            raise SpecMismatch(f"{n} rows came for {many}: expected 1 row each, at most {held.model.max_batch} in all")
        await self._my_turn(until)
        self._require(held)
        self._place(held)
        slots = [sequence.slot for sequence in self._of]
        begin = [step == 0 for step in self.steps]
        before = [sequence.next for sequence in self._of]
        for sequence in self._of:
            sequence.next = None  # until the outcome of this step is known
        try:
            left = until - time.monotonic()
            if state:
                answer = await lanes.exchange_state(held, slots, begin, inputs if state == SET else None, left), 0
            else:
                answer = await lanes.ask_sessions(held, inputs, slots, begin, left, version)
        except RowFailed as error:
            self._stepped([row for row in range(n) if row not in error.errors])
            self._still(list(error.errors), before)
            raise
        except SessionLost as error:
            gone = [row for row, slot in enumerate(slots) if slot in error.sessions]
            self._still([row for row in range(n) if row not in gone], before)
            raise self._lost(gone) from None
        except Error as error:
            if not_computed(error):
                self._still(range(n), before)
            raise
        self._stepped(range(n))
        return answer

    def lost(self) -> SessionLost:
        """Mark the sequences as lost and return the error to raise if their lane is gone."""
        return self._lost(range(len(self.keys)))

    def _overtook(self) -> bool:
        """Return whether a step arrived before its predecessor."""
        for key, step in zip(self.keys, self._asked, strict=True):
            if step and ((sequence := self._all.known(key)) is None or sequence.coming < step):
                return True
        return False

    def _take(self) -> None:
        """Queue behind earlier requests, without an await, so that no two requests can wait for each other."""
        self._ended = asyncio.get_running_loop().create_future()
        for key, asked in zip(self.keys, self._asked, strict=True):
            sequence = self._all.known(key) or self._all.new(key)
            self._came.append(sequence.coming)
            step = sequence.coming if asked is None else asked
            if asked is None and not sequence.coming:
                step = 1  # the sequence never began; _require refuses it
            sequence.coming = step + 1
            sequence.pending += 1
            if sequence.tail is not None and not sequence.tail.done():
                self._before.append(sequence.tail)
            sequence.tail = self._ended
            self.steps.append(step)
            self._of.append(sequence)

    async def _my_turn(self, until: float) -> None:
        self._waited = True
        if self._ended is None:
            give_up = min(until, time.monotonic() + _OVERTAKEN)
            while self._overtook() and time.monotonic() < give_up:  # noqa: ASYNC110  rare and short
                await asyncio.sleep(_LOOK)
            self._take()
        if self._before:
            _, late = await asyncio.wait(set(self._before), timeout=max(0.0, until - time.monotonic()))
            if late:
                raise Timeout(f"an earlier request of this sequence of model {self.model!r} was not answered in time")

    def _require(self, held: SharedLane) -> None:
        """Check that every state is the one that its step expects. Raises SessionLost."""
        gone = [
            row
            for row, (sequence, step) in enumerate(zip(self._of, self.steps, strict=True))
            if step and (sequence.next != step or sequence.held is not held)
        ]
        if gone:
            raise self._lost(gone)

    def _lost(self, rows: Sequence[int]) -> SessionLost:
        for row in rows:
            self._of[row].next = None
        if self.reports_loss:
            return SessionLost(f"sessions of {len(rows)} rows have lost their state", sessions=list(rows))
        return SessionLost(
            f"sequence {plain(self.keys[0][1])!r} of model {self.model!r} has no state here: it never began, was idle "
            f"for {self._all.idle:g} s, an earlier request of it failed, or its engine ended. Start it with "
            "sequence_start (the START flag)",
            sessions=list(rows),
        )

    def _place(self, held: SharedLane) -> None:
        """Assign a session to each new sequence. Raises NoSession if none is free, or the connection has its share."""
        wanting = [sequence for sequence in self._of if sequence.held is not held]
        caller, most = CALLER.get(), sessions_share(self._all.share, max(1, held.rows - 1))
        crowds = caller is not None and held.callers[caller] + len(wanting) > most
        if len(wanting) > len(held.free) or crowds:
            self._all.sweep()
        if len(wanting) > len(held.free):
            raise NoSession(
                f"{held.rows - len(held.free)} sequences of model {self.model!r} are open, as many as the gateway has "
                f"rows for ({len(held.free)} are left, {len(wanting)} were asked for): end some with sequence_end, or "
                "raise the model's 'rows' in the server's configuration"
            )
        if wanting and crowds and (mine := held.callers[caller]) + len(wanting) > most:
            raise NoSession(
                f"this connection holds {mine} sequences of model {self.model!r}, and asks for {len(wanting)} more, "
                f"expected at most {most} at once: end some with sequence_end, or raise 'rows' of the model or "
                f"'sessions_share' of the server ({self._all.share:g}) in its configuration"
            )
        for sequence in wanting:
            self._all.release(sequence)  # of another lane, if it is started again with another priority
            sequence.held, sequence.slot, sequence.next = held, held.free.pop(), None
            sequence.caller = caller
            held.callers[caller] += 1

    def _stepped(self, rows: Sequence[int]) -> None:
        for row in rows:
            sequence = self._of[row]
            sequence.next = self.steps[row] + 1
            if self._end:
                self._all.release(sequence)

    def _still(self, rows: Sequence[int], before: Sequence[int | None]) -> None:
        """Restore the sequences of rows that were not computed, unless later requests assumed their success."""
        for row in rows:
            sequence = self._of[row]
            if sequence.coming == self.steps[row] + 1:
                sequence.next, sequence.coming = before[row], before[row] or 0


class Sequences:
    """The sequences of all models. Use it in one event loop only.

    Args:
        idle: seconds without a request after which a sequence ends.
        clock: a monotonic clock in seconds.
        share: the part of a model's sessions that one connection may hold.
    """

    def __init__(
        self, idle: float = IDLE, clock: Callable[[], float] = time.monotonic, share: float = SESSIONS_SHARE
    ) -> None:
        self.idle = idle
        self.share = share
        self._clock = clock
        self._known: OrderedDict[Key, _Sequence] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._known)

    def over(self, model: str, client: str) -> None:
        """End all sessions of our own client `client`."""
        for key in [key for key in self._known if key[:2] == (model, client) and len(key) == 3]:
            self._drop(key)

    def lose(self, model: str, name: int | str) -> None:
        """Refuse every step of this sequence until it is started again."""
        if (sequence := self._known.get((model, name))) is not None:
            sequence.coming += 1  # no state can ever be valid for that step

    def known(self, key: Key) -> _Sequence | None:
        """Return a sequence, or None if it has ended."""
        sequence = self._known.get(key)
        if sequence is not None and self._is_over(sequence):
            self._drop(key)
            return None
        return sequence

    def new(self, key: Key) -> _Sequence:
        """Create and return a sequence."""
        sequence = self._known[key] = _Sequence(self._clock())
        return sequence

    def used(self, key: Key, sequence: _Sequence) -> None:
        """Record that a request of it has ended."""
        sequence.used = self._clock()
        if self._known.get(key) is not sequence:
            return
        if sequence.held is None and not sequence.pending:
            del self._known[key]
        else:
            self._known.move_to_end(key)

    def release(self, sequence: _Sequence) -> None:
        """Release its session."""
        if sequence.held is not None:
            sequence.held.free.append(sequence.slot)
            sequence.held.callers[sequence.caller] -= 1
            if not sequence.held.callers[sequence.caller]:
                del sequence.held.callers[sequence.caller]
        sequence.held, sequence.slot, sequence.next, sequence.caller = None, -1, None, None

    def sweep(self) -> None:
        """Remove sequences that have ended."""
        for key in list(self._known):
            sequence = self._known[key]
            if self._is_over(sequence):
                self._drop(key)
            elif not sequence.pending:
                break  # all that follow were used later

    def _is_over(self, sequence: _Sequence) -> bool:
        return not sequence.pending and self._clock() - sequence.used >= self.idle

    def _drop(self, key: Key) -> None:
        sequence = self._known[key]
        if not sequence.pending:
            del self._known[key]
            self.release(sequence)


def _end_after(before: Sequence[asyncio.Future[None]], ended: asyncio.Future[None]) -> None:
    """Set `ended` when all of `before` are done: later requests wait for it, so a cancelled one must not end early."""
    waiting = next((each for each in before if not each.done()), None)
    if waiting is not None:
        waiting.add_done_callback(lambda _: _end_after(before, ended))
    elif not ended.done():
        ended.set_result(None)
