"""Rows held for a while: arrays that are the arena's rows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.doors.door import LOOK_AFTER, NOT_ANSWERED, NOT_SENT, Answer, CalledRow
from jurybox.client.lane import Lane, Ticket
from jurybox.protocol.errors import Busy, Code, Refused, error_for

if TYPE_CHECKING:
    from jurybox.client.model import Model


class Rows:
    """Zero-copy use of a model: write to `inputs`, `infer`, read `outputs`. Use it in a ``with``.

    Attributes:
        inputs, outputs: arrays of shape (n, *row shape) by name, views of shared memory. Valid inside the ``with``.
        version: of the weights that computed the outputs; 0 before the first `infer`.
    """

    def __init__(self, model: Model, lane: Lane, first: int, rows: int, max_batch: int) -> None:
        self._model = model
        self._lane = lane
        self.first = first
        self._rows = rows
        self._max_batch = max_batch
        self.unanswered: list[Ticket] = []
        self.version = 0
        end = first + rows
        self.inputs: dict[str, NDArray[Any]] = {name: array[first:end] for name, array in lane.inputs.items()}
        self.outputs: dict[str, NDArray[Any]] = {name: array[first:end] for name, array in lane.outputs.items()}

    def __len__(self) -> int:
        return self._rows

    def infer(self, rows: int | None = None, *, timeout: float | None = None, version: int = 0) -> None:
        """Compute the outputs of the first `rows` rows (all without it).

        Args:
            timeout: seconds; the connection's default without it.
            version: of the weights to be answered by, where it is still held; 0: the newest.

        Raises:
            Timeout: no answer in time. The rows can be used again once the engine has answered.
            Busy: they have not been answered since an earlier time-out.
            ModelFailed: the model raised.
            ServerGone, Refused: the lane is lost; take rows again.
        """
        n = self._rows if rows is None else rows
        if not 0 < n <= self._rows:
            raise ValueError(f"rows={n}: these are {self._rows} rows")
        lane, first, batch = self._lane, self.first, self._max_batch
        with self._model.lock:
            self._check()
            seconds = self._model.seconds(timeout)
            if n <= batch:
                answer = lane.ask(first, n, seconds, version)
                answers = [answer] if isinstance(answer, Answer) else self.wait([answer])
            else:
                deadline = time.monotonic_ns() + int(seconds * 1e9)
                answers = self.wait(
                    [lane.submit(first + at, min(batch, n - at), deadline, version) for at in range(0, n, batch)]
                )
        for answer in answers:
            if answer.code:
                raise error_for(answer.code, answer.message)
            self.version = answer.version

    def close(self) -> None:
        """Give the rows back; those an engine may still write to go free when it has answered."""
        if not self.inputs:
            return
        self.inputs, self.outputs = {}, {}
        if self._lane.gone is not None:
            return
        with self._model.lock:
            at, end = self.first, self.first + self._rows
            for ticket in self.unanswered:
                if ticket.answer is None:
                    if ticket.first > at:
                        self._lane.free.give(at, ticket.first - at)
                    ticket.keeps_rows = False
                    at = ticket.first + ticket.rows
            if end > at:
                self._lane.free.give(at, end - at)

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, tickets: list[Ticket]) -> list[Answer]:
        """The answers to tickets on these rows; those that do not come in time stay in `unanswered`."""
        self.unanswered = tickets
        answers = [self._lane.wait(ticket, ticket.deadline) for ticket in tickets]
        self.unanswered = []
        return answers

    def _check(self) -> None:
        if self._lane.gone is not None:
            raise Refused(f"these rows are no longer yours ({self._lane.gone}): take rows again")
        if not self.inputs:
            raise Refused("these rows were given back: take rows again")
        if self.unanswered:
            self._lane.receive_now()
            waiting = [ticket for ticket in self.unanswered if ticket.answer is None]
            if waiting:
                raise Busy(
                    f"an earlier request on these rows timed out and {len(waiting)} of its tickets are still with the "
                    "engine: wait, or take other rows"
                )
            self.unanswered = []


class CallRow:
    """A row kept between calls of one row, so that a call is a copy in, a request and a copy out, and nothing else."""

    __slots__ = ("_call", "_epoch", "_row", "lane", "rows")

    def __init__(self, rows: Rows, lane: Lane) -> None:
        self.rows = rows
        self.lane = lane
        (inputs,) = rows.inputs.values()
        # Reshaped, since indexing a row of scalars would give a copy.
        outputs = {name: array.reshape(array.shape[1:]) for name, array in rows.outputs.items()}
        only = next(iter(outputs.values())) if len(outputs) == 1 else None
        self._row = CalledRow(rows.first, inputs.reshape(inputs.shape[1:]), outputs if only is None else only)
        self._call, self._epoch = lane.caller(self._row)

    def ask(self, row: NDArray[Any], seconds: float) -> Any:
        """The outputs for one C-contiguous row of the input's dtype and shape: a copy, or a dict of copies."""
        lane = self.lane
        if self._call is None or lane.in_flight:
            return self._ask(row, seconds)
        lane.sequence += 1
        result = self._call(row, lane.sequence, seconds)
        return result if type(result) is not int else self._failed(result, row, seconds)

    def _ask(self, row: NDArray[Any], seconds: float) -> Any:
        """As `ask`, by way of a ticket."""
        if self.rows.unanswered:
            self.rows.infer(timeout=seconds)  # says what is the matter, or goes on
        np.copyto(self._row.place, row)
        return self._settled(self.lane.ask(self._row.first, 1, seconds))

    def _settled(self, answer: Answer | Ticket) -> Any:
        if not isinstance(answer, Answer):
            (answer,) = self.rows.wait([answer])
        if answer.code:
            raise error_for(answer.code, answer.message)
        return self._row.copied()

    def _failed(self, code: int, row: NDArray[Any], seconds: float) -> Any:
        """The short way gave no outputs: go the long one, or raise."""
        lane = self.lane
        assert self._call is not None
        if code == NOT_SENT:
            outputs = self._ask(row, seconds)
            self._call, self._epoch = lane.caller(self._row)  # of the engine that serves now
            return outputs
        if code == NOT_ANSWERED:
            deadline = time.monotonic_ns() + int((seconds - min(seconds, LOOK_AFTER)) * 1e9)
            ticket = Ticket(lane, lane.sequence, self._row.first, 1, deadline, 0)
            return self._settled(lane.sent(ticket, 0, self._epoch))
        message = self._call.message()
        if code == Code.STALE_LEASE:
            lane.gone = message
        raise error_for(code, message)
