"""Models with rows that differ in size, or with sessions: the counterpart of `Served` for rows of fixed shapes.

Rows arrive as (slot, extents). The extents are copied and checked once, and only the copy is used, so that a client
that changes them later has no effect. A row that does not match the spec fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import ModelFailed, plain
from jurybox.protocol.spec import BYTES
from jurybox.server.engine.device import forget_frames
from jurybox.server.engine.loads import Disturbed
from jurybox.server.engine.modules import given_tensor, tensor_over
from jurybox.server.engine.served import OUT_OF_MEMORY, BatchOutcome, Served, refuse_rows
from jurybox.server.engine.session_states import BatchRows, States
from jurybox.server.engine.variable_rows import VariableInput, flattened, padded
from jurybox.server.models import ServedModel


def _as_tensor(row: Any) -> Any:
    return tensor_over(row) if isinstance(row, np.ndarray) else row


class OpenServed(Served):
    """A `Served` for models with tensors of variable size or with state.

    Args:
        lanes: the scoreboard's records of the lanes (scoreboard.LANE), which contain the first session of each.

    Attributes:
        beat: called between two forwards of tickets that must be divided within a turn.
    """

    def __init__(
        self,
        name: str,
        model: ServedModel,
        columns: Columns,
        max_batch: int,
        device: torch.device | str = "cpu",
        compute: torch.dtype | None = None,
        lanes: NDArray[Any] | None = None,
        shapes: Sequence[int] = (),
    ) -> None:
        super().__init__(name, model, columns.inputs, columns.outputs, max_batch, device, compute, columns, shapes)
        self.beat: Callable[[], None] = lambda: None
        self._open: Columns = columns
        self._collate = model.collate
        self._max_padding = model.max_padding
        self._max_elements = model.max_elements
        self._alone = False  # whether each row has a forward of its own
        self._variable = {
            key: VariableInput(key, t, columns, max_batch, pads=self._collate == "pad")
            for key, t in self.spec.inputs.items()
            if t.variable
        }
        self._fixed = [item.name for item in self._inputs]
        self._states = States(model, columns, lanes, max_batch, self.device) if self.spec.state else None
        # Whether whole batches may be computed as in Served, without handling rows one by one.
        self._whole = (
            len(self._outputs) == len(self.spec.outputs)
            and not callable(self._collate)
            and not (self._variable and self.shapes)
            and not (self._collate == "list" and any(t.dtype == BYTES for t in self.spec.inputs.values()))
        )

    def _arguments(self, model: ServedModel) -> list[str] | None:
        if callable(model.collate):
            return None
        names = []
        for key, spec in self.spec.inputs.items():
            names += [key, f"{key}_lengths"] if spec.variable and model.collate == "pad" else [key]
        return [*names, *self.spec.state]

    @property
    def sessions(self) -> int:
        return self._states.in_use if self._states is not None else 0

    def forget(self, lease: int) -> None:
        if self._states is not None:
            self._states.forget(lease)

    def _move(self, device: torch.device, how: str) -> int:
        moved = super()._move(device, how)
        return moved + self._states.move(device) if self._states is not None and self._away else moved

    @property
    def max_cost(self) -> int:
        return self._max_elements if self._variable else 0

    def costs(self, tickets: NDArray[Any]) -> NDArray[np.int64]:
        """Return the tickets' numbers of elements, from their present extents; `run` reads the extents again."""
        rows = tickets["rows"].astype(np.int64)
        starts = np.cumsum(rows) - rows
        each = sum(variable.costs_now(tickets, int(rows.sum())) for variable in self._variable.values())
        assert isinstance(each, np.ndarray)
        totals: NDArray[np.int64] = np.add.reduceat(each, starts)
        return totals

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> BatchOutcome | None:
        """Answer a batch as `Served.run` does. Size, padding and sessions may require several forwards."""
        self._use(version)
        found = self._states.read(tickets) if self._states is not None else 0
        if self._whole and not found & ~native.SESSION_BEGINS:
            staged = self._staged_whole(tickets, rows, found)
            if staged is not None:
                return self._run_whole(staged, tickets, rows)
        return self._run_by_rows(tickets, rows, found)

    def _staged_whole(self, tickets: NDArray[Any], rows: int, found: int) -> dict[str, Any] | None:
        """Return the arguments of one forward for the whole batch; None if its rows cannot be computed together."""
        shape, left = self.shaped(rows), self._max_elements
        staged: dict[str, Any] = {}
        for key, spec in self.spec.inputs.items():
            if not spec.variable:
                staged[key] = None  # its place among the arguments
                continue
            variable = self._variable[key]
            values = variable.whole(tickets, rows, self._max_padding, left)
            if values is None:
                return None
            if left:
                left = max(1, left - values.numel())
            if self._collate == "list":
                staged[key] = list(values.unbind())
            else:
                staged[key], staged[f"{key}_lengths"] = values, variable.lengths(rows)
        if self._fixed:
            staged |= self._gather(tickets, rows, shape)
        return staged | self._states.whole(rows, shape, found) if self._states is not None else staged

    def _run_whole(self, staged: dict[str, Any], tickets: NDArray[Any], rows: int) -> BatchOutcome | None:
        results = self._called(staged)
        if self.shapes:
            results = {key: value[:rows] for key, value in results.items()}
        following = self._states.checked(results, rows) if self._states is not None else {}
        for item in self._outputs:
            native.scatter(item.array, tickets, item.checked(results, rows))
        failed = {}
        if self._row_errors or self._finite:
            failed = self.failures(results, rows, self._take_row_errors())
        if self._states is not None:
            self._states.keep(following, [row for row in range(rows) if row not in failed] if failed else None)
        return refuse_rows(self._open, tickets, failed) if failed else None

    # ---- rows one by one: they differ in size, must follow a session's order, or are not computed at all

    def _run_by_rows(self, tickets: NDArray[Any], rows: int, found: int) -> BatchOutcome | None:
        outcome = BatchOutcome()
        batch = BatchRows(tickets, rows)
        for key, variable in self._variable.items():
            variable.read(tickets, rows, batch.places)
            for row in np.flatnonzero(variable.counts < 0).tolist():
                spec = self.spec.inputs[key]
                batch.failed[row] = f"input {key!r} came with sizes {variable.sizes[row].tolist()}, expected {spec}"
        fixed = self._gather(tickets, rows, rows)
        if self._states is not None:
            self._states.sort(batch, outcome, found)
        for number, wave in enumerate(batch.waves()):
            if number and self._states is not None:
                wave = self._states.still(batch.not_behind(wave, outcome.again), batch, outcome)  # noqa: PLW2901
            for group in self._groups(wave, batch):
                self._compute_group(group, fixed, batch, outcome)
        for number, refusal in refuse_rows(self._open, tickets, batch.failed).refused.items():
            outcome.refused.setdefault(number, refusal)
        return outcome if outcome.refused or outcome.errors or outcome.again else None

    def _try(self, rows: int, given: Mapping[str, Any]) -> None:
        with torch.inference_mode(False):  # inference tensors do not count writes
            inputs = self._staged(
                np.arange(rows),
                {key: given_tensor(given[key]) for key in self._fixed},
                {key: [_as_tensor(row) for row in given[key]] for key in self._variable},
            )
        staged = inputs | self._states.initial(rows) if self._states is not None else inputs
        results = self._watched(self._called, staged, inputs)
        if self._writes:
            for variable in self._variable.values():
                variable.never_in_place()
        self._checked(results, rows)
        if self._states is not None:
            self._states.checked(results, rows)

    def _agreeing(self, example: Callable[[int], Mapping[str, Any]] | None) -> tuple[int, ...]:
        if callable(self._collate) or (self._variable and self._collate == "list"):
            self._alone = True  # otherwise the module may pad rows to the longest, and so change their bytes
            return (1,)
        # With variable sizes there are too many shapes to compare, so all batches are padded to the largest.
        return self.shapes[-1:] if self._variable else super()._agreeing(example)

    # ---- which rows go together

    def _groups(self, wave: NDArray[np.intp], batch: BatchRows) -> list[NDArray[np.intp]]:
        """Split rows into groups for one forward each, within max_elements; padded rows are grouped by size.

        Rows that the module itself collates are computed one by one if the model is deterministic.
        """
        wave = wave[[int(row) not in batch.failed for row in wave]] if batch.failed else wave
        idle = batch.idle
        if idle is not None:
            if len(still := wave[idle[wave]]):
                assert self._states is not None
                self._states.without_forward(still, batch)
                batch.begun(still)
            wave = wave[~idle[wave]]
        if self._alone:
            return [wave[at : at + 1] for at in range(len(wave))]
        if not self._variable or not len(wave):
            return [wave] if len(wave) else []
        costs = sum(variable.costs(wave) for variable in self._variable.values())
        assert isinstance(costs, np.ndarray)
        padded = self._collate == "pad"
        if not padded and (not self._max_elements or int(costs.sum()) <= self._max_elements):
            return [wave]
        sizes = np.concatenate([variable.sizes[wave] for variable in self._variable.values()], axis=1)
        if padded and not self.shapes and bool((sizes == sizes[0]).all()):
            most = max(1, self._max_elements // max(1, int(costs[0]))) if self._max_elements else len(wave)
            return [wave[at : at + most] for at in range(0, len(wave), most)]
        order = np.lexsort((*sizes.T, costs))
        sorted_costs, sorted_sizes = costs[order].tolist(), sizes[order].tolist()
        groups, start, total, largest = [], 0, 0, sorted_sizes[0]
        for at, (cost, size) in enumerate(zip(sorted_costs, sorted_sizes, strict=True)):
            total += cost
            # Rows with equally many elements may differ in shape: each is padded to the maximum of every size.
            reach = list(map(max, largest, size))
            bound = self._padded_elements(reach) * (at - start + 1) if padded else total
            over = self._max_elements and bound > self._max_elements
            padding = padded and bound - total > self._max_padding * bound
            unlike = bool(self.shapes) and size != sorted_sizes[start]  # padding may change a row's bytes
            if at > start and (over or padding or unlike):
                groups.append(wave[order[start:at]])
                start, total, reach = at, cost, size
            largest = reach
        groups.append(wave[order[start:]])
        return groups

    def _padded_elements(self, sizes: list[int]) -> int:
        """Return the elements of a row padded to these sizes, which are those of all variable inputs in order."""
        total, at = 0, 0
        for variable in self._variable.values():
            total += variable.padded(sizes[at : at + variable.extents])
            at += variable.extents
        return total

    # ---- one forward

    def _compute_group(
        self, group: NDArray[np.intp], fixed: Mapping[str, torch.Tensor], batch: BatchRows, outcome: BatchOutcome
    ) -> None:
        """Compute rows, and add to `outcome` what could not be computed.

        The model may fail on one ticket only, or on too many rows: the tickets of a group that failed are computed
        again, in other turns. Tickets with a session that has made its step cannot be: they are divided here.
        """
        try:
            failed, following = self._computed_group(group, fixed, batch)
        except Exception as error:
            if isinstance(error, (OUT_OF_MEMORY, Disturbed)) and not batch.stepped:
                raise
            failure = error
        else:
            batch.failed.update({int(group[row]): reason for row, reason in failed.items()})
            if self._states is not None:
                good = [row for row in range(len(group)) if row not in failed] if failed else None
                self._states.after(group, good, following)
                batch.begun(group)
            return
        if isinstance(failure, OUT_OF_MEMORY):
            # The whole batch cannot be computed again, since some sessions have made their step.
            forget_frames(failure)
            self.free_memory()
        numbers = batch.tickets_of(group)
        if len(numbers) == 1:
            outcome.errors.append((numbers, failure))
        del failure  # it refers to this frame, so that only the garbage collector would free the two
        if len(numbers) == 1:
            return
        outcome.again.update(set(numbers) - batch.stepped)
        here = [number for number in numbers if number in batch.stepped]
        for half in (here[: len(here) // 2], here[len(here) // 2 :]):
            if half:
                self.beat()
                self._compute_group(group[np.isin(batch.owner[group], half)], fixed, batch, outcome)

    def _computed_group(
        self, group: NDArray[np.intp], fixed: Mapping[str, torch.Tensor], batch: BatchRows
    ) -> tuple[dict[int, str], Any]:
        """Compute rows and write their outputs; return the reasons of failed rows, and the sessions' next states."""
        shape = self.shaped(len(group))
        padding = np.repeat(group[-1:], shape - len(group))  # its outputs are cut off
        group_in = np.concatenate((group, padding)) if len(padding) else group
        ordered = len(group_in) == batch.rows and bool((group_in[1:] > group_in[:-1]).all())
        whole = ordered and not self._variable and not self._writes
        chosen = fixed if whole else {key: value[torch.from_numpy(group_in)] for key, value in fixed.items()}
        values = {key: variable.rows(group_in) for key, variable in self._variable.items()}
        staged = self._staged(group_in, chosen, values)
        if self._states is not None:
            staged |= self._states.before(group_in, batch)
        results = self._called(staged)
        if shape > len(group):
            results = {key: value[: len(group)] for key, value in results.items()}
        checked = self._checked(results, len(group))
        following = self._states.checked(results, len(group)) if self._states is not None else {}
        row_errors = self._take_row_errors()
        failed = self.failures(results, len(group), row_errors) if row_errors or self._finite else {}
        failed |= self._write(checked, group, batch, failed)
        return failed, following

    def _called(self, staged: dict[str, Any]) -> Mapping[str, Any]:
        if self.device.type != "cpu":
            staged = {key: _moved(value, self.device) for key, value in staged.items()}
        return self.forward(staged)

    def _staged(
        self, group: NDArray[np.intp], fixed: Mapping[str, torch.Tensor], values: Mapping[str, list[Any]]
    ) -> dict[str, Any]:
        """Return the arguments of forward in the order of the spec."""
        if callable(self._collate):
            columns = {key: [fixed[key][i] for i in range(len(group))] for key in fixed} | dict(values)
            rows = [{key: columns[key][i] for key in self.spec.inputs} for i in range(len(group))]
            return dict(self._collate(rows))
        staged: dict[str, Any] = {}
        for key, spec in self.spec.inputs.items():
            if not spec.variable:
                staged[key] = fixed[key]
            elif self._collate == "list":
                staged[key] = values[key]
            else:
                staged[key], staged[f"{key}_lengths"] = padded(values[key], spec)
        return staged

    def _checked(self, results: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Return the outputs by name: arrays for fixed shapes, lists for variable ones."""
        checked: dict[str, Any] = {item.name: item.checked(results, rows) for item in self._outputs}
        for key, spec in self.spec.outputs.items():
            if spec.variable:
                if key not in results:
                    raise ModelFailed(f"the model gave no output {key!r}; it gave {', '.join(results)}")
                values = results[key]
                count = len(values) if isinstance(values, (Sequence, torch.Tensor)) else type(values).__name__
                if count != rows:
                    raise ModelFailed(f"output {key!r}: a list of {rows} rows was expected, came {count}")
                checked[key] = values
        return checked

    def _write(
        self, checked: Mapping[str, Any], group: NDArray[np.intp], batch: BatchRows, failed: Mapping[int, str]
    ) -> dict[int, str]:
        """Write the outputs to their rows; return the reasons of rows that could not be written."""
        places, wrong = batch.places[group], {}
        for key, values in checked.items():
            spec, slots = self.spec.outputs[key], self._open.outputs[key]
            if not spec.variable:
                slots[places] = values
                continue
            extents = self._open.output_extents[key]
            for i, value in enumerate(values):
                if i in failed:
                    extents[places[i]] = 0
                    continue
                try:
                    values_of, sizes = flattened(spec, value)
                except Exception as error:  # noqa: BLE001  it fails this row only
                    wrong[i] = f"output {key!r}: {plain(error, 200)}"
                    extents[places[i]] = 0
                    continue
                slots[places[i], : len(values_of)] = values_of
                extents[places[i]] = sizes
        return wrong


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    return [_moved(each, device) for each in value] if isinstance(value, list) else value
