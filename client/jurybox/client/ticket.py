"""A ticket, as its caller sees it: a future."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jurybox.client.lane import Lane
from jurybox.client.row_codec import shaped
from jurybox.client.transports.transport import LOOK_AFTER, Answer, InFlight
from jurybox.protocol.errors import Code, Error, Refused, Timeout

if TYPE_CHECKING:
    import asyncio

    from jurybox.client.model import Model

_CANCELLED = "this ticket was cancelled"


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: `outputs` (an array where the model has one output, else by name) and the weights' `version`."""

    outputs: Any
    version: int


class Ticket:
    """A request in flight, as `Model.submit` gives it: a future, as those of concurrent.futures are.

    Its rows are its own until its outputs are collected, it is cancelled, or nobody refers to it any more; and even
    then until the engine has answered, which might write to them. Use it from any thread, or ``await`` it.

    Example:
        ticket = model.submit(images)
        scores = ticket.result(timeout=1.0).outputs

    Attributes:
        rows: how many it asks for.
    """

    __slots__ = ("__weakref__", "_cancelled", "_failure", "_lane", "_model", "_reply", "_sent", "first", "rows")

    def __init__(self, model: Model, lane: Lane, first: int, rows: int) -> None:
        self._model = model
        self._lane = lane
        self.first = first
        self.rows = rows
        self._sent: InFlight | None = None
        self._failure: Error | None = None
        self._reply: Reply | None = None
        self._cancelled = False
        lane.hold(self)

    def result(self, timeout: float | None = None) -> Reply:
        """Wait for the outputs. Asked again, it gives them again.

        Args:
            timeout: seconds; the model's default without it.

        Raises:
            Timeout: none came in time. The ticket goes on: ask again, or `cancel` it.
            CancelledError: it was cancelled.
            ModelFailed: the model raised, or was given up after several crashes.
            RowFailed: the model failed on single rows.
            Refused: the engine did not accept the request; the message says why.
            ServerGone: the server ended, and none came back in time.
        """
        if self._reply is not None:
            return self._reply
        deadline = self._model.deadline(timeout)
        return self._model.turns.run(lambda: self._waited_for(deadline), deadline)

    def _waited_for(self, deadline: int) -> Reply:
        sent = self._in_flight()
        if sent is not None and sent.answer is None:
            self._lane.receive_now()
            self._lane.wait(sent, deadline)
        return self._collected()

    def done(self) -> bool:
        """Whether `result` would give something, or raise, at once."""
        if self._reply is not None or self._failure is not None or self._cancelled or self._lane.gone is not None:
            return True
        try:
            return self._model.turns.run(self._looked_for, 0)
        except Timeout:  # another thread's call has the lane
            return False

    def _looked_for(self) -> bool:
        sent = self._in_flight()
        if sent is not None and sent.answer is None:
            self._lane.look_after((sent,))
        return sent is None or sent.answer is not None

    def cancel(self) -> bool:
        """Give the request up; an engine that has it already computes it all the same. False if it is done."""
        return self._model.turns.run(self._cancelled_now, self._model.deadline(None))

    def _cancelled_now(self) -> bool:
        if self._reply is not None or (self._sent is not None and self._sent.answer is not None):
            return False
        self._cancelled = True
        self._give_up()
        return True

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled

    def __await__(self) -> Generator[Any, None, Reply]:
        return self.result_async().__await__()

    async def result_async(self, timeout: float | None = None) -> Reply:
        """As `result`, in an event loop; ``await ticket`` is this with the model's default time-out."""
        import asyncio  # most clients have no event loop, and its import costs as much as ZeroMQ's

        model, lane, deadline = self._model, self._lane, self._model.deadline(timeout)
        loop = asyncio.get_running_loop()
        sent = self._in_flight() if self._reply is None else None
        if sent is not None and sent.answer is None:
            await model.turns.alone(lambda: model.turns.watch(lane, loop), deadline)
            while sent.answer is None:
                left = (deadline - time.monotonic_ns()) / 1e9
                if left <= 0:
                    raise Timeout(lane.why_late(sent))
                future = loop.create_future()
                sent.waiters = [*(sent.waiters or ()), (loop, future)]
                if self._settled(sent):  # by another thread, just now
                    break
                try:
                    await asyncio.wait_for(future, min(left, LOOK_AFTER))
                except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
                    sent.waiters = [waiter for waiter in sent.waiters or () if waiter[1] is not future]
                    await model.turns.alone(lambda: lane.look_after((sent,)), deadline)
        return await model.turns.alone(self._collected, deadline)

    # ---- for programs that answer others from an event loop, without a task for each ticket

    def watched(self, loop: asyncio.AbstractEventLoop, waiter: Any, *, again: bool) -> bool:
        """Whether it is answered, or lost. If not, `waiter`, in place of a future of the running loop, is told.

        Args:
            again: LOOK_AFTER seconds have gone by since it was asked last: what became of the engine?
        """
        return self._model.turns.run(lambda: self._watched(loop, waiter, again), self._model.deadline(None))

    def _watched(self, loop: asyncio.AbstractEventLoop, waiter: Any, again: bool) -> bool:
        sent = self._in_flight()
        if sent is None or sent.answer is not None:
            return True
        if again:
            self._lane.look_after((sent,))
        else:
            sent.waiters = [*(sent.waiters or ()), (loop, waiter)]
            self._model.turns.watch(self._lane, loop)
        return sent.answer is not None

    def seen(self) -> tuple[dict[str, Any], int]:
        """The outputs of fixed shapes where they lie, by name, and the weights' version; then `give_up` the ticket.

        Raises: as `result`.
        """
        answer = self._checked()
        end = self.first + self.rows
        return {name: rows[self.first : end] for name, rows in self._lane.columns.outputs.items()}, answer.version

    def give_up(self) -> None:
        """Nobody wants the outputs any more: the rows go free, or when an engine that has them answers."""
        self._cancelled = True
        self._give_up()

    # ---- for the model, under its lock

    def _send(self, deadline: int, version: int, brief: float = 0.0) -> None:
        self._sent = self._lane.submit(self.first, self.rows, deadline, version, weakref.ref(self), brief)

    def _in_flight(self) -> InFlight | None:
        """What was sent; None where it has failed. Raises where there will be no answer."""
        if self._cancelled:
            raise CancelledError(_CANCELLED)
        if self._failure is not None:
            return None
        if self._sent is None:
            raise Refused("this ticket was never sent: its sending was broken off")
        if self._lane.gone is not None and self._sent.answer is None:
            raise self._lane.lost()
        return self._sent

    @staticmethod
    def _settled(sent: InFlight) -> bool:
        return sent.answer is not None

    def _collected(self) -> Reply:
        """The outputs, copied; the rows are free then."""
        if self._reply is None:
            answer = self._checked()
            outputs = self._lane.codec.take(self._lane.columns, self.first, self.rows)
            self._reply = Reply(shaped(outputs), answer.version)
            self._lane.release(self)
        return self._reply

    def _into(self, outputs: dict[str, Any], at: int) -> int:
        """Copy the outputs to rows `at` and after, and give up the ticket; gives the weights' version."""
        answer = self._checked()
        self._lane.codec.take_into(self._lane.columns, self.first, self.rows, outputs, at)
        self._cancelled = True
        self._lane.release(self)
        return answer.version

    def _checked(self) -> Answer:
        """The answer, where it says that the outputs are there."""
        sent = self._in_flight()
        if sent is not None:
            assert sent.answer is not None
            if sent.answer.code == Code.OK:
                if not self._lane.columns.outputs:
                    raise self._lane.lost()
                return sent.answer
            self._failure = self._lane.failure(sent.answer, self.first, self.rows)
            self._lane.release(self)
        assert self._failure is not None
        raise self._failure.with_traceback(None)  # asked again, it must not keep the frames of the first time

    def _give_up(self) -> None:
        if self._sent is not None:
            self._sent.holder = None
        self._lane.release(self)
