"""Zero-copy access to a model: arrays that are views of the arena's rows."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from jurybox.client.in_flight import Claim, ModelLock
from jurybox.client.lane import Lane, row_failed
from jurybox.client.row_allocator import RowRun, version_of, whole
from jurybox.protocol.errors import Busy, Code, Refused, SpecMismatch, did_you_mean, error_for, plain
from jurybox.protocol.forks import Closing
from jurybox.protocol.row_arrays import Held, RowArray, RowArrays
from jurybox.protocol.spec import TensorSpec


class Rows(Closing):
    """Zero-copy use of a model: write to `inputs`, `infer`, read `outputs`. Use it in a ``with`` statement.

    Attributes:
        inputs, outputs: arrays of shape (n, *row shape) by name, views of shared memory. Valid in the ``with`` block.
            A tensor of variable size has shape (n, capacity) here; `place` and `row` return its rows. Inputs begin as
            zeros, and are not cast: values of another dtype are refused with SpecMismatch, as by `Model.infer`; Python
            numbers are written if the dtype holds them.
        version: weights version that computed the outputs, the oldest if they took several batches; 0 before the first
            `infer`.
    """

    def __init__(self, turns: ModelLock, lane: Lane, run: RowRun, max_batch: int) -> None:
        self._turns = turns
        self._lane = lane
        self._run = run
        self.first = first = run.first
        self.rows = run.rows
        self._max_batch = max_batch
        self.version = 0
        end = first + run.rows
        model, self._held = lane.codec.spec.name, Held()
        inputs = {
            name: RowArray.over(array[first:end], f"input {name!r} of {model!r}", self._held)
            for name, array in lane.columns.inputs.items()
        }
        self._inputs = RowArrays(inputs, model, writable=True)
        self._outputs = RowArrays({name: array[first:end] for name, array in lane.columns.outputs.items()}, model)

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        return f"<Rows of {self._lane.model!r}, {self.rows} rows{', released' if self._held.released else ''}>"

    @property
    def inputs(self) -> RowArrays:
        """Arrays of the inputs, (n, *row shape) by name."""
        return self._inputs

    @property
    def outputs(self) -> RowArrays:
        """Arrays of the outputs, (n, *row shape) by name."""
        return self._outputs

    @property
    def leased(self) -> tuple[int, int]:
        """The server's numbers of the lane of these rows and of its lease."""
        return self._lane.leased

    def raw(self, name: str) -> NDArray[Any]:
        """Return the memory of an input as a plain array, (n, *row shape), for functions that write to an array.

        It checks nothing: what is written is cast to its dtype, as NumPy does, and after the rows were released they
        may be another request's. Write to it in the ``with`` block only.

        Example:
            cv2.resize(photo, (224, 224), dst=rows.raw("image")[0])

        Raises:
            SpecMismatch: there is no such input.
            Busy: an engine still has an earlier request for these rows.
            Refused: the rows were released.
        """
        self._check()
        self._spec_of(self._lane.codec.spec.inputs, name)
        end = self.first + self.rows
        return self._lane.columns.inputs[name][self.first : end]

    def place(self, name: str, row: int, shape: int | tuple[int, ...]) -> NDArray[Any]:
        """Return a writable array for one row of an input of variable size; uint8 for a byte string.

        Example:
            cv2.resize(photo, (width, height), dst=rows.place("image", 0, (height, width, 3)))

        Raises:
            SpecMismatch: there is no such input, or the shape does not match the spec or exceeds its capacity.
            ValueError: there is no such row.
        """
        self._check()
        spec = self._spec_of(self._lane.codec.spec.inputs, name)
        sizes = (shape,) if isinstance(shape, int) else shape
        extents = spec.extents_of(sizes) if spec.variable else None
        whole(row, "row", 0, self.rows - 1)
        if extents is None:
            raise SpecMismatch(f"input {name!r}: row {row} of {sizes} came, expected {spec}")
        self._lane.columns.input_extents[name][self.first + row] = extents
        array: NDArray[Any] = self.inputs[name]
        return array[row, : math.prod(sizes)].reshape(sizes)

    def row(self, name: str, row: int) -> NDArray[Any]:
        """Return one row of an output of variable size, a view of shared memory.

        Raises:
            SpecMismatch: there is no such output.
            ValueError: there is no such row.
        """
        self._check()
        whole(row, "row", 0, self.rows - 1)
        spec = self._spec_of(self._lane.codec.spec.outputs, name)
        sizes = spec.measured(self._lane.columns.output_extents[name][self.first + row].tolist())
        if not 0 <= math.prod(sizes) <= spec.capacity or min(sizes, default=0) < 0:
            raise Refused(f"output {name!r} came with sizes {sizes}: {spec} was expected")
        array: NDArray[Any] = self.outputs[name]
        return array[row, : math.prod(sizes)].reshape(sizes)

    def _spec_of(self, specs: Mapping[str, TensorSpec], name: str) -> TensorSpec:
        try:
            return specs[name]
        except KeyError:
            hint = did_you_mean(plain(name), specs)
            raise SpecMismatch(f"rows of {self._lane.model!r} have {sorted(specs)} here, {name!r} came{hint}") from None

    def infer(self, rows: int | None = None, *, timeout: float | None = None, version: int | None = None) -> int:
        """Compute the outputs of the first `rows` rows; of all rows by default. Return the weights version.

        Args:
            timeout: seconds. Defaults to the connection's.
            version: weights version to use, if the server still holds it; None: the newest.

        Raises:
            Timeout: no answer in time. The rows can be used again once the engine has answered.
            Busy: an engine still has an earlier request for these rows that timed out.
            ModelFailed: the model raised.
            ServerGone, Refused: the lane is lost; call `Model.rows` again.
        """
        n = self.rows if rows is None else whole(rows, "rows", 1, self.rows)
        version = version_of(version)
        deadline = self._turns.deadline(timeout)
        return self._turns.run(lambda: self._infer(n, deadline, version), deadline)

    def _infer(self, n: int, deadline: int, version: int) -> int:
        lane, first, batch = self._lane, self.first, self._max_batch
        self._check()
        if n <= batch:
            answer = lane.ask(first, n, (deadline - time.monotonic_ns()) / 1e9, version)
            if answer.code == Code.OK:
                self.version = answer.version
                return answer.version
            answers = [(answer, first, n)]
        else:
            claim = Claim()
            owner = weakref.ref(claim)
            tickets = [
                lane.submit(first + at, min(batch, n - at), deadline, version, owner) for at in range(0, n, batch)
            ]
            answers = [(lane.wait(ticket, deadline), ticket.first, ticket.rows) for ticket in tickets]
        errors: dict[int, str] = {}
        for answer, at, count in answers:
            if answer.code == Code.ROW_FAILED:
                failed = lane.columns.failures(at, count)
                errors |= {at - first + index: reason for index, reason in failed.items()}
            elif answer.code:
                raise error_for(answer.code, answer.message)
        self.version = used = min(answer.version for answer, _, _ in answers)
        if errors:
            raise row_failed(lane.model, errors, n, None, used)
        return used

    def clear(self) -> None:
        """Make the inputs zeros, and those of variable size empty."""
        columns, end = self._lane.columns, self.first + self.rows
        for name, spec in self._lane.codec.spec.inputs.items():
            if spec.variable:
                columns.input_extents[name][self.first : end] = 0
            else:
                columns.inputs[name][self.first : end] = 0

    def close(self) -> None:
        """Release the rows. Rows that an engine may still write to become free once it has answered."""
        self._held.released = True
        self._inputs = self._outputs = RowArrays({}, self._inputs.model)
        self._lane.give(self._run)

    def _check(self) -> None:
        lane = self._lane
        if lane.gone is not None:
            self.close()
            raise Refused(f"these rows are no longer yours ({lane.gone}): call rows() again")
        if not self.inputs:
            raise Refused("these rows were released: call rows() again")
        if lane.in_flight and lane.asked(self.first, self.rows):
            lane.look_after()
            if lane.asked(self.first, self.rows):
                raise Busy("an engine still has an earlier request for these rows: wait, or take other rows")
