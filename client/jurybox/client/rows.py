"""Rows held for a while: arrays that are the arena's rows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

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
        self._first = first
        self._rows = rows
        self._max_batch = max_batch
        self._unanswered: list[Ticket] = []
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
        with self._model.lock:
            self._check()
            deadline = time.monotonic_ns() + int(self._model.seconds(timeout) * 1e9)
            tickets = [
                self._lane.submit(self._first + at, min(self._max_batch, n - at), deadline, version)
                for at in range(0, n, self._max_batch)
            ]
            self._unanswered = tickets
            answers = [self._lane.wait(ticket, deadline) for ticket in tickets]
            self._unanswered = []
        for answer in answers:
            if answer.code != Code.OK:
                raise error_for(answer.code, answer.message)
        self.version = answers[-1].version

    def close(self) -> None:
        """Give the rows back; those an engine may still write to go free when it has answered."""
        if not self.inputs:
            return
        self.inputs, self.outputs = {}, {}
        if self._lane.gone is not None:
            return
        with self._model.lock:
            at, end = self._first, self._first + self._rows
            for ticket in self._unanswered:
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

    def _check(self) -> None:
        if self._lane.gone is not None:
            raise Refused(f"these rows are no longer yours ({self._lane.gone}): take rows again")
        if not self.inputs:
            raise Refused("these rows were given back: take rows again")
        if self._unanswered:
            self._lane.receive_now()
            waiting = [ticket for ticket in self._unanswered if ticket.answer is None]
            if waiting:
                raise Busy(
                    f"an earlier request on these rows timed out and {len(waiting)} of its tickets are still with the "
                    "engine: wait, or take other rows"
                )
            self._unanswered = []
