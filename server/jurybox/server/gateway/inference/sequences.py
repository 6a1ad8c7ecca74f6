"""Sequences: requests that share a state which the model keeps, identified by a name that the client chooses.

After Triton's sequence batcher: a request with `sequence_start` is the first, one with `sequence_end` the last.
Sessions of our own client (jurybox.client.Sessions over grpc://) are sequences too; it numbers their steps, which are
compared here.

A request of a sequence is answered from the state that its client expects, or not at all:
- requests of one sequence are computed one after another, in the order in which they came;
- where one fails, those that were queued behind it are refused, since they assumed its success;
- where one fails in a stream, its sequence is lost: nobody knows which requests were sent before its failure was seen;
- a client that does not get the result of a request (a time-out, a cancelled call) has lost the sequence;
- a state that an engine, a lane or this process held when it ended is lost, and its sequence with it.
A lost sequence gets SESSION_LOST until it is started again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
from jurybox.server.gateway.inference.coalescer import Arrays
from jurybox.server.gateway.inference.lanes import Held, Lanes
from jurybox.server.gateway.inference.tensors import SET, Steps

Key = tuple[Any, ...]  # model, and the sequence's name

IDLE = 60.0  # seconds without a request after which a sequence is over
_OVERTAKEN = 0.25  # seconds that a step waits for the one before it, where both were under way at once
_LOOK = 0.005  # seconds between two looks whether it has come


class NoSession(Busy):
    """No session is left for a sequence that begins; nothing was computed, and the turn may be asked again."""


class _Sequence:
    """One sequence.

    Attributes:
        coming: the step that the next request to come has.
        next: the step that the state is for; None where it is lost.
        held, slot: whose session it is; None, -1 before it begins.
        tail: done when the request that came last has ended.
        pending: requests that have not ended; `used`: when the last one did, s of the monotonic clock.
    """

    __slots__ = ("coming", "held", "next", "pending", "slot", "tail", "used")

    def __init__(self, now: float) -> None:
        self.coming = 0
        self.next: int | None = None
        self.held: Held | None = None
        self.slot = -1
        self.tail: asyncio.Future[None] | None = None
        self.pending = 0
        self.used = now


class Turn:
    """The position of a request in the order of its sequences. Use it in a ``with``, from before the first wait."""

    def __init__(self, sequences: Sequences, model: str, steps: Steps) -> None:
        self._all = sequences
        self.model = model
        self.keys: list[Key] = [(model, *name) for name in steps.sequences]
        self.told = steps.told
        self._asked = steps.steps
        self._end = steps.end
        self.steps: list[int] = []
        self._came: list[int] = []  # what each sequence expected to come when this did
        self._waited = False
        self._of: list[_Sequence] = []
        self._before: list[asyncio.Future[None]] = []
        self._ended: asyncio.Future[None] | None = None
        if not self._overtook():
            self._take()

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._ended is None:
            return
        # What was refused before it was looked at has not come. Who was given up knows nothing of that.
        refused = not self._waited and isinstance(error, Error) and not isinstance(error, Timeout)
        _end_after(self._before, self._ended)
        for key, sequence, step, came in zip(self.keys, self._of, self.steps, self._came, strict=True):
            if refused and sequence.coming == step + 1:
                sequence.coming = came
            sequence.pending -= 1
            if error is not None and sequence.next is None and not sequence.pending:
                self._all.release(sequence)  # its state is lost: the session is of use to others alone
            self._all.used(key, sequence)

    @property
    def begins(self) -> bool:
        """Whether the request needs no earlier state."""
        return not any(self.steps)

    async def infer(
        self, lanes: Lanes, held: Held, inputs: Arrays, n: int, until: float, version: int, state: str = ""
    ) -> tuple[Arrays, int]:
        """Compute one row of each sequence, in order.

        Args:
            state: GET, to be given their state and nothing computed; SET, where the inputs are what it shall be.

        Raises:
            SessionLost: `sessions` of it are the rows whose sequences have lost their state; nothing was computed.
            Timeout, Busy, ModelFailed, SpecMismatch, RowFailed, Refused, ServerGone.
        """
        if n != len(self.keys) or n > held.model.max_batch:
            many = f"{len(self.keys)} sequences" if self.told else "a sequence, which goes on row by row"
            raise SpecMismatch(f"{n} rows came for {many}: expected 1 row each, at most {held.model.max_batch} in all")
        await self._my_turn(until)
        self._require(held)
        self._place(held)
        slots = [sequence.slot for sequence in self._of]
        begin = [step == 0 for step in self.steps]
        before = [sequence.next for sequence in self._of]
        for sequence in self._of:
            sequence.next = None  # until it is known what became of this step
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
        """The error to raise if the lane of its sequences is gone."""
        return self._lost(range(len(self.keys)))

    def _overtook(self) -> bool:
        """Whether a step arrived before its predecessor."""
        for key, step in zip(self.keys, self._asked, strict=True):
            if step and ((sequence := self._all.known(key)) is None or sequence.coming < step):
                return True
        return False

    def _take(self) -> None:
        """Queue behind earlier requests. This does not wait, so no two requests can wait for each other."""
        self._ended = asyncio.get_running_loop().create_future()
        for key, asked in zip(self.keys, self._asked, strict=True):
            sequence = self._all.known(key) or self._all.new(key)
            self._came.append(sequence.coming)
            step = sequence.coming if asked is None else asked
            if asked is None and not sequence.coming:
                step = 1  # of a sequence that never began: refused when its turn comes
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
            while self._overtook() and time.monotonic() < give_up:  # noqa: ASYNC110  rare, and over soon
                await asyncio.sleep(_LOOK)
            self._take()
        if self._before:
            _, late = await asyncio.wait(set(self._before), timeout=max(0.0, until - time.monotonic()))
            if late:
                raise Timeout(f"an earlier request of this sequence of model {self.model!r} was not answered in time")

    def _require(self, held: Held) -> None:
        """Raises SessionLost if a state is not the one that its step expects."""
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
            if self._end:
                self._all.release(self._of[row])
        if self.told:
            return SessionLost(f"sessions of {len(rows)} rows have lost their state", sessions=list(rows))
        return SessionLost(
            f"sequence {plain(self.keys[0][1])!r} of model {self.model!r} has no state here: it never began, was idle "
            f"for {self._all.idle:g} s, an earlier request of it failed, or its engine ended. Begin it with "
            "sequence_start (the START flag)",
            sessions=list(rows),
        )

    def _place(self, held: Held) -> None:
        """Assign a session to each new sequence. Raises Busy if none is left."""
        wanting = [sequence for sequence in self._of if sequence.held is not held]
        if len(wanting) > len(held.free):
            self._all.sweep()
        if len(wanting) > len(held.free):
            raise NoSession(
                f"{held.rows - len(held.free)} sequences of model {self.model!r} are open, as many as the gateway has "
                f"rows for ({len(held.free)} are left, {len(wanting)} were asked for): end some with sequence_end, or "
                "raise the model's 'rows' in the server's configuration"
            )
        for sequence in wanting:
            sequence.held, sequence.slot, sequence.next = held, held.free.pop(), None

    def _stepped(self, rows: Sequence[int]) -> None:
        for row in rows:
            sequence = self._of[row]
            sequence.next = self.steps[row] + 1
            if self._end:
                self._all.release(sequence)

    def _still(self, rows: Sequence[int], before: Sequence[int | None]) -> None:
        """These rows were not computed: they can be sent again unless later requests assumed their success."""
        for row in rows:
            sequence = self._of[row]
            if sequence.coming == self.steps[row] + 1:
                sequence.next, sequence.coming = before[row], before[row] or 0


class Sequences:
    """The sequences of all models. Belongs to one event loop.

    Args:
        idle: seconds without a request after which a sequence is over.
    """

    def __init__(self, idle: float = IDLE, clock: Callable[[], float] = time.monotonic) -> None:
        self.idle = idle
        self._clock = clock
        self._known: OrderedDict[Key, _Sequence] = OrderedDict()  # those used longest ago come first

    def __len__(self) -> int:
        return len(self._known)

    def turn(self, model: str, steps: Steps) -> Turn:
        """The position of a new request."""
        return Turn(self, model, steps)

    def over(self, model: str, client: str) -> None:
        """Our own client has closed its sessions."""
        for key in [key for key in self._known if key[:2] == (model, client) and len(key) == 3]:
            self._drop(key)

    def lose(self, model: str, name: int | str) -> None:
        """Refuse every step of this sequence until it is started again."""
        if (sequence := self._known.get((model, name))) is not None:
            sequence.coming += 1  # no state will ever be for that step

    def known(self, key: Key) -> _Sequence | None:
        """Get a sequence if it has not ended."""
        sequence = self._known.get(key)
        if sequence is not None and self._is_over(sequence):
            self._drop(key)
            return None
        return sequence

    def new(self, key: Key) -> _Sequence:
        """Create a sequence."""
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
        sequence.held, sequence.slot, sequence.next = None, -1, None

    def sweep(self) -> None:
        """Remove sequences that have ended."""
        for key in list(self._known):
            sequence = self._known[key]
            if self._is_over(sequence):
                self._drop(key)
            elif not sequence.pending:
                break  # used later than it, all that follow

    def _is_over(self, sequence: _Sequence) -> bool:
        return not sequence.pending and self._clock() - sequence.used >= self.idle

    def _drop(self, key: Key) -> None:
        sequence = self._known[key]
        if not sequence.pending:
            del self._known[key]
            self.release(sequence)


def _end_after(before: Sequence[asyncio.Future[None]], ended: asyncio.Future[None]) -> None:
    """A cancelled request ends after those before it, because later ones wait for it."""
    waiting = next((each for each in before if not each.done()), None)
    if waiting is not None:
        waiting.add_done_callback(lambda _: _end_after(before, ended))
    elif not ended.done():
        ended.set_result(None)
