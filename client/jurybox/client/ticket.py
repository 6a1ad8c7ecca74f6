"""Tickets, which are futures of requests, and requests that are split into several tickets."""

from __future__ import annotations

import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from numpy.typing import NDArray

from jurybox.client.in_flight import LOOK_AFTER, Answer, InFlight, ModelLock
from jurybox.client.lane import Lane
from jurybox.client.row_allocator import RowRun
from jurybox.client.row_codec import Checked, shaped
from jurybox.protocol import forks
from jurybox.protocol.errors import Code, Error, Refused, SpecMismatch, Timeout

if TYPE_CHECKING:
    import asyncio


_CANCELLED = "this ticket was cancelled"

Seen: TypeAlias = tuple[dict[str, Any], int]  # outputs by name, which later tickets overwrite; weights version


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a request.

    `outputs` takes the model's form: one output is an array, several are a dict. Code that is to outlive another head
    of the model reads `named` or `array`, which are always the same.

    Args:
        outputs: array (n, *row shape) of the spec's dtype (a list of n arrays for an output of variable size), or a
            dict of these by name if the model has several outputs.
        version: of the weights, the oldest used; 0: the weights as loaded.
        only: the name of the output if it is the only one.

    Example:
        reply = model.infer_reply(observations)
        actions, version = reply.array, reply.version
        values = reply.named["value"]
    """

    outputs: Any
    version: int
    only: str = field(default="", repr=False, compare=False)

    @property
    def named(self) -> dict[str, Any]:
        """The outputs by name, also if there is one."""
        return self.outputs if isinstance(self.outputs, dict) else {self.only: self.outputs}

    @property
    def array(self) -> Any:
        """The only output. Raises SpecMismatch if the model has several, and names them."""
        if isinstance(self.outputs, dict):
            raise SpecMismatch(
                f"this reply has the outputs {', '.join(self.outputs)}: expected a single one; take one by its name, "
                f"reply.named[{next(iter(self.outputs))!r}]"
            )
        return self.outputs


class Ticket:
    """A request in flight, returned by `Model.submit`. A future with the interface of concurrent.futures.

    It occupies its rows until its outputs are collected, it is cancelled, or it is garbage-collected, and in any case
    until the engine has answered. Use it from any thread, or ``await`` it.

    Example:
        ticket = model.submit(images)
        scores = ticket.result(timeout=1.0).outputs

    Attributes:
        rows: number of rows in the request.
    """

    __reduce__ = forks.cannot_be_sent
    __slots__ = ("__weakref__", "_cancelled", "_failure", "_lane", "_reply", "_run", "_sent", "_turns", "first", "rows")

    def __init__(self, turns: ModelLock, lane: Lane, run: RowRun) -> None:
        self._turns = turns
        self._lane = lane
        self._run = run
        self.first = run.first
        self.rows = run.rows
        self._sent: InFlight | None = None
        self._failure: Error | None = None
        self._reply: Reply | None = None
        self._cancelled = False

    def __repr__(self) -> str:
        sent = self._sent
        state = (
            "cancelled"
            if self._cancelled
            else "failed"
            if self._failure is not None
            else "answered"
            if self._reply is not None or (sent is not None and sent.answer is not None)
            else "in flight"
        )
        return f"<Ticket of {self._lane.model!r}, {self.rows} rows, {state}>"

    def result(self, timeout: float | None = None) -> Reply:
        """Wait for the outputs. Later calls return the same reply.

        Args:
            timeout: seconds. Defaults to the model's.

        Raises:
            Timeout: no answer in time. The ticket stays valid: call `result` again, or `cancel` it.
            Busy: in a signal handler or a destructor, within a call that is reading the answer. The ticket stays valid.
            CancelledError: the ticket was cancelled.
            ModelFailed: the model raised, or is quarantined after several crashes.
            RowFailed: the model failed on single rows.
            Refused: the engine did not accept the request; the message states the reason.
            ServerGone: the server ended, and was not restarted in time.
        """
        if self._reply is not None:
            return self._reply
        deadline = self._turns.deadline(timeout)
        return self._turns.run(lambda: self._waited_for(deadline), deadline)

    def _waited_for(self, deadline: int) -> Reply:
        sent = self._in_flight()
        if sent is not None and sent.answer is None:
            self._lane.receive_now()
            self._lane.wait(sent, deadline)
        return self._collected()

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        if self._reply is not None or self._failure is not None or self._cancelled or self._lane.gone is not None:
            return True
        try:
            return self._turns.run(self._looked_for, 0)
        except Timeout:  # another thread's call holds the lock
            return False

    def _looked_for(self) -> bool:
        sent = self._in_flight()
        if sent is not None and sent.answer is None:
            self._lane.look_after((sent,))
        return sent is None or sent.answer is not None

    def cancel(self) -> bool:
        """Cancel the request; return False if it is done. If an engine already has it, it is still computed."""
        return self._turns.run(self._cancelled_now, self._turns.deadline(None))

    def _cancelled_now(self) -> bool:
        if self._reply is not None or (self._sent is not None and self._sent.answer is not None):
            return False
        self._cancelled = True
        self._give_up()
        return True

    def cancelled(self) -> bool:
        """Return whether the ticket was cancelled."""
        return self._cancelled

    def __await__(self) -> Generator[Any, None, Reply]:
        return self.result_async().__await__()

    async def result_async(self, timeout: float | None = None) -> Reply:
        """Like `result`, as a coroutine; ``await ticket`` calls it with the model's default time-out."""
        import asyncio  # most clients have no event loop, and importing it takes as long as ZeroMQ

        turns, lane, deadline = self._turns, self._lane, self._turns.deadline(timeout)
        loop = asyncio.get_running_loop()
        sent = self._in_flight() if self._reply is None else None
        if sent is not None and sent.answer is None:
            await turns.alone(lambda: turns.watch(lane, loop), deadline)
            while sent.answer is None:
                if lane.gone is not None:  # another task has closed the model
                    raise lane.lost()
                left = (deadline - time.monotonic_ns()) / 1e9
                if left <= 0:
                    raise Timeout(lane.why_late(sent))
                future = loop.create_future()
                sent.waiters = [*(sent.waiters or ()), (loop, future)]
                if self._settled(sent):  # another thread has just received the answer
                    break
                try:
                    await asyncio.wait_for(future, min(left, LOOK_AFTER))
                except asyncio.TimeoutError:  # TimeoutError itself from Python 3.11 on
                    sent.waiters = [waiter for waiter in sent.waiters or () if waiter[1] is not future]
                    if lane.gone is None:
                        await turns.alone(lambda: lane.look_after((sent,)), deadline)
        return await turns.alone(self._collected, deadline)

    # ---- for servers that forward requests from an event loop, without one task per ticket

    def watched(self, loop: asyncio.AbstractEventLoop, waiter: Any, *, again: bool) -> bool:
        """Return whether the request is answered or lost. If not, `waiter` is set later, like a future of the loop.

        Args:
            again: check that the engine is alive, because LOOK_AFTER seconds have passed since the last call.
        """
        return self._turns.run(lambda: self._watched(loop, waiter, again), self._turns.deadline(None))

    def _watched(self, loop: asyncio.AbstractEventLoop, waiter: Any, again: bool) -> bool:
        sent = self._in_flight()
        if sent is None or sent.answer is not None:
            return True
        if again:
            self._lane.look_after((sent,))
        else:
            sent.waiters = [*(sent.waiters or ()), (loop, waiter)]
            self._turns.watch(self._lane, loop)
        return sent.answer is not None

    def seen(self) -> Seen:
        """Return views of the outputs by name, and the weights version; call `give_up` after use.

        Only for outputs of fixed shapes. Raises the same errors as `result`.
        """
        answer = self._checked()
        return _seen(self._lane, self.first, self.rows, answer)

    def give_up(self) -> None:
        """Drop the outputs. The rows become free now, or once the engine has answered."""
        self._cancelled = True
        self._give_up()

    # ---- private; call with the lock held

    def _send(self, deadline: int, version: int) -> None:
        self._sent = self._lane.submit(self.first, self.rows, deadline, version, weakref.ref(self))

    def _in_flight(self) -> InFlight | None:
        """Return the request; None if it has failed. Raises if there will be no answer."""
        if self._cancelled:
            raise CancelledError(_CANCELLED)
        if self._failure is not None:
            return None
        if self._sent is None:
            raise Refused("this ticket was never sent: sending it was interrupted")
        if self._lane.gone is not None and self._sent.answer is None:
            raise self._lane.lost()
        return self._sent

    @staticmethod
    def _settled(sent: InFlight) -> bool:
        return sent.answer is not None

    def _collected(self) -> Reply:
        """Copy the outputs, free the rows and return the reply."""
        if self._reply is None:
            answer = self._checked()
            codec = self._lane.codec
            reply = Reply(shaped(codec.take(self._lane.columns, self.first, self.rows)), answer.version, codec.only)
            if self._reply is None:  # else a nested call has collected them, and the rows may be others' meanwhile
                self._reply = reply
            self._lane.give(self._run)
        return self._reply

    def take_into(self, outputs: dict[str, Any], at: int) -> int:
        """Copy the outputs to rows `at` and after, release the ticket's rows and return the weights version."""
        answer = self._checked()
        self._lane.codec.take_into(self._lane.columns, self.first, self.rows, outputs, at)
        self._cancelled = True
        self._lane.give(self._run)
        return answer.version

    def _checked(self) -> Answer:
        """Return the answer if its code is OK; otherwise raise its error."""
        sent = self._in_flight()
        if sent is not None:
            assert sent.answer is not None
            if sent.answer.code == Code.OK:
                if not self._lane.columns.outputs:
                    raise self._lane.lost()
                return sent.answer
            failure = self._lane.failure(sent.answer, self.first, self.rows)
            if self._failure is None:  # as in `_collected`
                self._failure = failure
            self._lane.give(self._run)
        assert self._failure is not None
        raise self._failure.with_traceback(None)  # raised again, it must not keep the frames of the first time

    def _give_up(self) -> None:
        if self._sent is not None:
            self._sent.owner = None
        self._lane.give(self._run)


def send_rows(ticket: Ticket, given: Checked, at: int, deadline: int, version: int) -> Ticket:
    """Send as many of the given rows as a ticket has, from index `at`; return it. Call with the lock held."""
    lane = ticket._lane
    try:
        lane.codec.put(lane.columns, given, at, ticket.rows, ticket.first)
        ticket._send(deadline, version)
    except BaseException:
        ticket._give_up()  # the traceback may keep it
        raise
    return ticket


def send_parts(
    turns: ModelLock,
    lane: Lane,
    parts: Sequence[tuple[Mapping[str, NDArray[Any]], int]],
    run: RowRun,
    deadline: int,
    version: int,
    brief: float,
) -> Ticket | Seen | None:
    """Like `send_rows`, for rows of several callers; return None if a reload changed the model's spec.

    If `brief` is above 0, wait so many seconds for the answer. If it comes in time, return the outputs instead of a
    ticket. Their rows are free again, so read them before the lane is used.
    """
    at = first = run.first
    codec, columns = lane.codec, lane.columns
    for arrays, n in parts:
        if codec.open:
            given, there = codec.checked(arrays)
            if there != n:
                return None
            codec.put(columns, given, 0, n, at)
            at += n
            continue
        for name, column in columns.inputs.items():
            array = arrays[name]
            if array.dtype != column.dtype or array.shape != (n, *column.shape[1:]):
                return None
            column[at : at + n] = array
        at += n
    ticket = Ticket(turns, lane, run)
    if not brief:
        ticket._send(deadline, version)
        return ticket
    sent = lane.exchange(first, run.rows, deadline, version, brief, weakref.ref(ticket))
    if (answer := sent.answer) is not None and answer.code == Code.OK and lane.columns.outputs:
        return _seen(lane, first, run.rows, answer)
    ticket._sent = sent
    return ticket


def _seen(lane: Lane, first: int, rows: int, answer: Answer) -> Seen:
    return {name: column[first : first + rows] for name, column in lane.columns.outputs.items()}, answer.version
