"""Rows that are reused from call to call, with a native call that does most of the work."""

from __future__ import annotations

import time
import weakref
from typing import Any

from numpy.typing import NDArray

from jurybox.client.in_flight import Answer, InFlight
from jurybox.client.lane import Lane
from jurybox.client.row_allocator import RowRun
from jurybox.client.row_codec import Checked, shaped
from jurybox.client.ticket import Reply
from jurybox.client.transports.transport import NOT_ANSWERED, NOT_FIT, NOT_SENT, Caller, RowPlace
from jurybox.protocol.errors import Code, error_for


class CallRow:
    """Rows that are reused from call to call: a call copies the input in, sends a request and copies the outputs out.

    A call takes this object out of its slot (`Requests.kept`) and puts it back, so no two calls use it at once.

    Args:
        run: its rows.
        single: for one row, whose input and outputs have no leading dimension of rows.
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_calls",
        "_engine",
        "_place",
        "_run",
        "_single",
        "_this",
        "_ticket",
        "answer",
        "first",
        "lane",
        "rows",
        "steps",
    )

    def __init__(self, lane: Lane, run: RowRun, *, single: bool) -> None:
        self._run = run
        self.first = first = run.first
        self.rows = run.rows
        self._single = single
        self.lane = lane
        self.answer: Answer | None = None  # the last one, if it did not arrive within the native call
        self.steps: NDArray[Any] | None = None  # for sessions: the column of their steps
        self._this = weakref.ref(self)
        columns, spec = lane.columns, lane.codec.spec
        ((name, only),) = spec.inputs.items() if len(spec.inputs) == 1 else (("", None),)
        outputs = {name: self._rows_of(array) for name, array in columns.outputs.items()}
        self._place = RowPlace(
            first,
            self.rows,
            only,
            # Rows of variable size are written one by one.
            None if only is None or (not single and only.variable) else self._rows_of(columns.inputs[name]),
            columns.input_extents[name][first] if only is not None and only.variable and single else None,
            None
            if any(output.variable for output in spec.outputs.values())
            else next(iter(outputs.values()))
            if len(outputs) == 1
            else outputs,
        )
        # By engine: its caller, and the incarnation that the caller is for.
        self._calls: dict[int, tuple[Caller | None, int]] = {}
        self._prepare()

    def _rows_of(self, array: NDArray[Any]) -> NDArray[Any]:
        own = array[self.first : self.first + self.rows]
        return own.reshape(array.shape[1:]) if self._single else own  # indexing would copy a scalar row

    def _prepare(self) -> None:
        """Create the native caller for an engine that is serving now."""
        self._calls.clear()
        self._turn_to(self.lane.choose_engine())

    def _turn_to(self, engine: int | None) -> None:
        """Send the next calls to this engine; None: through the lane."""
        if engine is not None and engine not in self._calls:
            self._calls[engine] = self.lane.caller(self._place, engine)
        self._engine = engine
        self._renew()

    def _renew(self) -> None:
        """Create the ticket of the next calls, whose number is 0 between them; the last one may still be in flight."""
        call, ticket = None, InFlight(0, self.first, self.rows, 0, 0)
        ticket.owner = self._this
        if self._engine is not None:
            ticket.engine = self._engine
            call, ticket.incarnation = self._calls[self._engine]
        self._call, self._ticket = call, ticket  # last: an interrupt must not leave those of two engines

    @property
    def version(self) -> int:
        """The weights version of the last call. Valid only if `answer` was set to None before that call."""
        if self.answer is not None or self._call is None:
            return self.answer.version if self.answer is not None else 0
        return self._call.version

    def ask(self, row: Any, seconds: float) -> Any:
        """Compute the rows and return copies of the outputs, in the form that `Model.infer` returns them.

        Args:
            row: the input, or inputs, as the caller gave them; None: `put` has written them.
            seconds: the time-out.

        Raises:
            SpecMismatch: the input is not as the spec describes it.
        """
        lane = self.lane
        if type(row) is dict:
            self.put(self._checked(row))
            row = None
        if not (lane.one_engine or lane.in_flight) and (engine := lane.choose_engine()) != self._engine:
            self._turn_to(engine)
        if (call := self._call) is None or lane.in_flight:
            return self._ask(row, seconds)
        if self._ticket.sequence:  # the last call was interrupted: its answer may be in the ticket
            self._renew()
        ticket = self._ticket
        ticket.sequence = sequence = next(lane.numbers)
        ticket.sender = self._this
        lane.in_flight[sequence] = ticket
        result = call(row, sequence, seconds)
        if type(result) is not int:
            lane.in_flight.pop(sequence, None)
            ticket.sequence = 0
            return self._taken() if result is None else result
        return self._failed(result, ticket, row, seconds)

    def reply(self, checked: Checked, deadline: int, version: int) -> Reply:
        """Compute several rows that the lane's codec has checked.

        Args:
            deadline: ns of CLOCK_MONOTONIC.
            version: of the weights; 0: the newest.
        """
        self.put(checked)
        self.answer = None
        left = (deadline - time.monotonic_ns()) / 1e9
        outputs = self._ask(None, left, version) if version else self.ask(None, left)
        return Reply(outputs, self.version, self.lane.codec.only)

    def put(self, checked: Checked) -> None:
        """Write inputs that the lane's codec has checked."""
        self.lane.codec.put(self.lane.columns, checked, 0, self.rows, self.first)

    def close(self) -> None:
        """Release the rows; those in flight become free once the engine has answered."""
        self._ticket.owner = self._ticket.sender = None  # a traceback may keep this object
        self.lane.give(self._run)

    def _ask(self, row: Any, seconds: float, version: int = 0) -> Any:
        """Like `ask`, through the lane."""
        lane = self.lane
        if row is not None and not self._place.write(row):
            self.put(self._checked(row))
        return self._answered(lane.ask(self.first, self.rows, seconds, version))

    def _checked(self, row: Any) -> Checked:
        """Return the input as the codec checked it. Raises SpecMismatch."""
        codec = self.lane.codec
        return (codec.one(row) if self._single else codec.checked(row))[0]

    def _answered(self, answer: Answer) -> Any:
        self.answer = answer
        if answer.code:
            raise self.lane.failure(answer, self.first, self.rows)
        return self._taken() if self._place.outputs is None else self._place.copied()

    def _failed(self, code: int, ticket: InFlight, row: Any, seconds: float) -> Any:
        """Handle a native call that returned no outputs: fall back to the lane, or raise."""
        lane, call = self.lane, self._call
        assert call is not None
        elsewhere = code == Code.MODEL_NOT_FOUND and not lane.one_engine  # another engine may have the model
        if code == NOT_ANSWERED or elsewhere:
            try:
                ticket.submitted = time.monotonic_ns()
                ticket.deadline = call.deadline
                if elsewhere:
                    answer = Answer(ticket.sequence, code, call.message(), call.version, ticket.incarnation)
                    lane.settle((answer,), mine=ticket)
                ticket.sender = None
                return self._answered(lane.wait(ticket, ticket.deadline))
            finally:
                ticket.owner = ticket.sender = None
                self._renew()
        lane.in_flight.pop(ticket.sequence, None)
        if code == NOT_FIT:
            self.put(self._checked(row))
            return self.ask(None, seconds)
        if code == NOT_SENT:
            outputs = self._ask(row, seconds)
            self._prepare()
            return outputs
        message = call.message()
        if code == Code.STALE_LEASE:
            lane.gone = error_for(code, message)
        raise lane.failure(Answer(ticket.sequence, code, message, call.version, 0), self.first, self.rows)

    def _taken(self) -> Any:
        """Copy outputs that include tensors of variable size."""
        outputs = self.lane.codec.take(self.lane.columns, self.first, self.rows)
        if self._single:
            outputs = {name: value[0] for name, value in outputs.items()}
        return shaped(outputs)
