"""Models whose rows differ in size, or belong to sessions: what `Served` does for rows of fixed shapes.

Rows arrive one by one as (slot, extents). Extents are read once, checked, and only the copy is used: a client that
changes them later changes nothing. A row that does not fit fails alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.arena import LOAD, NO_FORWARD, SESSION, STORE, Columns
from jurybox.protocol.errors import Code, ModelFailed, plain
from jurybox.protocol.row_frames import elements
from jurybox.protocol.scoreboard import LANE
from jurybox.protocol.spec import BYTES, TensorSpec
from jurybox.server.engine.served import Outcome, Served, dtype_of, refuse_rows
from jurybox.server.models import ServedModel

_LOST = (
    "the state of this session is gone: its engine was started again, an earlier request of it was lost, or it was "
    "never begun. Begin its episode anew, with reset"
)


class OpenServed(Served):
    """As `Served`, for models with tensors of variable size or with state.

    Args:
        lanes: the scoreboard's (scoreboard.LANE), which say where a lane's sessions begin.
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
        self._open: Columns = columns
        self._collate = model.collate
        self._max_padding = model.max_padding
        self._max_elements = model.max_elements
        self._variable = {
            key: _Variable(key, t, columns, max_batch) for key, t in self.spec.inputs.items() if t.variable
        }
        if callable(self._collate):
            self._by_name = True
        elif self._collate == "pad":
            lengths = [f"{key}_lengths" for key in self._variable]
            self._by_name = self._by_name and _accepts(self.module, lengths)
        self._fixed = {item.name: item for item in self._inputs}
        self._states = States(model, columns, lanes, self.device) if self.spec.state else None
        # Whole batches in one call, as Served has them: nothing in them is looked at row by row.
        self._dense = (
            self._collate == "pad"
            and self._states is None
            and not self.shapes
            and not self._finite
            and len(self._outputs) == len(self.spec.outputs)
        )

    def _run_dense(self, tickets: NDArray[Any], rows: int) -> bool:
        """Compute a batch that needs no look at its rows one by one; False, and nothing is done, where it does."""
        staged: dict[str, Any] = {}
        for key, spec in self.spec.inputs.items():
            if not spec.variable:
                staged[key] = self._fixed[key].gather(tickets, rows)
                continue
            dense = self._variable[key].dense(tickets, rows, self._max_padding, self._max_elements)
            if dense is None:
                return False
            staged[key], staged[f"{key}_lengths"] = dense
        results = self._called(staged)
        if self._row_errors:
            return False  # the model is asked once more, row by row
        for item in self._outputs:
            native.scatter(item.array, tickets, item.checked(results, rows))
        return True

    @property
    def max_cost(self) -> int:
        """As Served.max_cost."""
        return self._max_elements if self._variable else 0

    def costs(self, tickets: NDArray[Any]) -> NDArray[np.int64]:
        """Elements of the rows that differ in size, by what their extents say now; they are read anew to be used."""
        rows = tickets["rows"].astype(np.int64)
        starts = np.cumsum(rows) - rows
        each = sum(variable.costs_now(tickets, int(rows.sum())) for variable in self._variable.values())
        assert isinstance(each, np.ndarray)
        totals: NDArray[np.int64] = np.add.reduceat(each, starts)
        return totals

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> Outcome | None:
        """As `Served.run`. Rows are computed in groups of their own where size, padding or a session asks for it."""
        self._use(version)
        if self._dense and self._run_dense(tickets, rows):
            return None
        outcome = Outcome()
        batch = _Rows(tickets, rows)
        for key, variable in self._variable.items():
            variable.read(tickets, rows)
            for row in np.flatnonzero(variable.counts < 0).tolist():
                spec = self.spec.inputs[key]
                batch.failed[row] = f"input {key!r} came with sizes {variable.sizes[row].tolist()}, expected {spec}"
        fixed = {key: item.gather(tickets, rows) for key, item in self._fixed.items()}
        if self._states is not None:
            self._states.read(batch, outcome)
        for number, wave in enumerate(batch.waves()):
            if number and self._states is not None:
                wave = self._states.still(wave, batch, outcome)  # noqa: PLW2901
            for group in self._groups(wave, batch):
                self._compute_group(group, fixed, batch, outcome)
        for number, refusal in refuse_rows(self._open, tickets, batch.failed).refused.items():
            outcome.refused.setdefault(number, refusal)
        return outcome if outcome.refused or outcome.errors else None

    def warm_up(self, example: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        """As `Served.warm_up`, with rows of a few sizes."""
        for rows in self.shapes or sorted({1, self.max_batch}):
            given = example(rows) if example else {}
            drawn = {key: given.get(key, _sample(spec, rows)) for key, spec in self.spec.inputs.items()}
            with torch.inference_mode():
                staged = self._staged(
                    np.arange(rows),
                    {key: torch.as_tensor(drawn[key]) for key in self._fixed},
                    {key: list(drawn[key]) for key in self._variable},
                )
                if self._states is not None:
                    staged |= self._states.initial(rows)
                results = self._called(staged)
                self._checked(results, rows)
                if self._states is not None:
                    self._states.checked(results, rows)
        if self.shapes:
            # With sizes that differ there are more shapes than can be compared: all batches are padded to the largest.
            self.shapes = self.shapes[-1:] if self._variable else self._agreeing(example)

    # ---- which rows go together

    def _groups(self, wave: NDArray[np.intp], batch: _Rows) -> list[NDArray[np.intp]]:
        """Rows to be computed in one forward each: within max_elements, like sizes together where they are padded."""
        wave = wave[[int(row) not in batch.failed for row in wave]] if batch.failed else wave
        idle = batch.idle
        if idle is not None:
            if len(still := wave[idle[wave]]):
                assert self._states is not None
                self._states.without_forward(still, batch)
            wave = wave[~idle[wave]]
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
            # Rows of as many elements may differ in shape: each is padded to the largest of every size.
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
        """Elements of a row that is padded to these sizes, of one variable input after another."""
        total, at = 0, 0
        for variable in self._variable.values():
            total += variable.padded(sizes[at : at + variable.extents])
            at += variable.extents
        return total

    # ---- one forward

    def _compute_group(
        self, group: NDArray[np.intp], fixed: Mapping[str, torch.Tensor], batch: _Rows, outcome: Outcome
    ) -> None:
        shape = self.shaped(len(group))
        padding = np.repeat(group[-1:], shape - len(group))  # its outputs are cut
        group_in = np.concatenate((group, padding)) if len(padding) else group
        try:
            whole = len(group_in) == batch.rows and not self._variable and bool((group_in[1:] > group_in[:-1]).all())
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
            told = self._take_row_errors()
            failed = self.failures(results, len(group), told) if told or self._finite else {}
            failed |= self._write(checked, group, batch, failed)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            numbers = batch.tickets_of(group)
            if len(numbers) == 1:
                outcome.errors.append((numbers, error))
                return
            # One of them may be what the model cannot bear: the others are answered.
            halves = np.isin(batch.owner[group], numbers[: len(numbers) // 2])
            for half in (group[halves], group[~halves]):
                self._compute_group(half, fixed, batch, outcome)
            return
        batch.failed.update({int(group[row]): reason for row, reason in failed.items()})
        if self._states is not None:
            good = np.array([row not in failed for row in range(len(group))])
            self._states.after(group, good, following, batch)

    def _called(self, staged: dict[str, Any]) -> Mapping[str, Any]:
        if self.device.type != "cpu":
            staged = {key: _moved(value, self.device) for key, value in staged.items()}
        return self.forward(staged)

    def _staged(
        self, group: NDArray[np.intp], fixed: Mapping[str, torch.Tensor], values: Mapping[str, list[Any]]
    ) -> dict[str, Any]:
        """The arguments of forward, in the spec's order."""
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
                staged[key], staged[f"{key}_lengths"] = _padded(values[key], spec)
        return staged

    def _checked(self, results: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """The outputs by name: arrays of fixed shapes, lists of what differs in size."""
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
        self, checked: Mapping[str, Any], group: NDArray[np.intp], batch: _Rows, failed: Mapping[int, str]
    ) -> dict[int, str]:
        """Write outputs to their rows; gives why some could not be."""
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
                    flat, sizes = _flat(spec, value)
                except Exception as error:  # noqa: BLE001  of one row
                    wrong[i] = f"output {key!r}: {plain(error, 200)}"
                    extents[places[i]] = 0
                    continue
                slots[places[i], : len(flat)] = flat
                extents[places[i]] = sizes
        return wrong


class _Rows:
    """The rows of a batch, one by one.

    Attributes:
        places: (rows,) where each lies in the arena.
        owner: (rows,) the number of its ticket.
        failed: why rows are not computed, by their number.
        idle: (rows,) of those that ask for their state only; None: none does.
        records: (rows,) of arena.SESSION, where there are sessions; `slots` (rows,) are their states' places.
    """

    def __init__(self, tickets: NDArray[Any], rows: int) -> None:
        self.tickets = tickets
        self.rows = rows
        counts = tickets["rows"].astype(np.intp)
        starts = np.cumsum(counts) - counts
        self.owner = np.repeat(np.arange(len(tickets)), counts)
        self.places = np.repeat(tickets["first"].astype(np.intp) - starts, counts) + np.arange(rows)
        self.failed: dict[int, str] = {}
        self.idle: NDArray[np.bool_] | None = None
        self.records: NDArray[Any] | None = None
        self.slots: NDArray[np.intp] = self.places
        self.left_out: NDArray[np.bool_] | None = None  # rows of tickets that are refused
        self.distinct = True  # whether no session stands here twice

    def tickets_of(self, group: NDArray[np.intp]) -> list[int]:
        """The numbers of the tickets that have rows in a group."""
        return [int(number) for number in np.unique(self.owner[group])]

    def waves(self) -> list[NDArray[np.intp]]:
        """Rows to be computed one wave after another: a session's later ticket follows its earlier one."""
        rows = np.arange(self.rows)
        if self.left_out is not None:
            rows = rows[~self.left_out]
        if self.records is None or self.distinct:
            return [rows] if len(rows) else []
        wave_of: dict[int, int] = {}
        waves: dict[int, list[int]] = {}
        for _, mine in itertools.groupby(rows.tolist(), key=lambda row: int(self.owner[row])):
            group = list(mine)
            slots = [int(self.slots[row]) for row in group]
            wave = max(wave_of.get(slot, -1) for slot in slots) + 1
            wave_of.update(dict.fromkeys(slots, wave))
            waves.setdefault(wave, []).extend(group)
        return [np.array(waves[wave]) for wave in sorted(waves)]


class States:
    """What a model keeps for its sessions, on the device: a tensor for each part of the state, a row for each session.

    A session's place is the row of the arena of its number in its lane, so there are as many as rows, and each is its
    lease's. Whose it is, and the step it expects, stand beside it: a state is used by the lease it was made for, in its
    order, or not at all.
    """

    def __init__(self, model: ServedModel, columns: Columns, lanes: NDArray[Any] | None, device: torch.device) -> None:
        assert columns.sessions is not None
        self._columns = columns
        self._lanes = np.zeros(0, LANE) if lanes is None else lanes
        self._device = device
        self._specs = dict(model.state)
        rows = len(columns.sessions)
        self._initial = {}
        self._kept = {}
        for name, spec in self._specs.items():
            given = model.initial_state.get(name)
            start = torch.zeros(spec.shape, dtype=dtype_of(spec)) if given is None else given.to(dtype_of(spec))
            if tuple(start.shape) != spec.shape:
                raise ModelFailed(
                    f"initial_state {name!r} has shape {list(start.shape)}, the spec says {list(spec.shape)}"
                )
            self._initial[name] = start.to(device)
            self._kept[name] = torch.zeros((rows, *spec.shape), dtype=dtype_of(spec), device=device)
        self._owner = np.zeros(rows, np.uint64)  # lease
        self._next = np.zeros(rows, np.uint32)
        self._records = np.zeros(0, SESSION)
        self._marks = np.zeros(rows, np.intp)

    def initial(self, rows: int) -> dict[str, torch.Tensor]:
        """The state of so many sessions that begin."""
        return {name: value.expand(rows, *value.shape) for name, value in self._initial.items()}

    def read(self, batch: _Rows, outcome: Outcome) -> None:
        """Take the batch's session records, once; refuse tickets of sessions whose state is not what they expect."""
        tickets = batch.tickets
        if len(self._records) < batch.rows:
            self._records = np.zeros(2 * batch.rows, SESSION)
        assert self._columns.sessions is not None
        native.gather(self._columns.sessions, tickets, self._records)
        records = batch.records = self._records[: batch.rows].copy()
        lanes = self._lanes[tickets["lane"]]
        sizes = lanes["rows"][batch.owner]
        inside = (records["slot"] < sizes) & (lanes["lease"] == tickets["lease"])[batch.owner]
        batch.slots = np.where(inside, lanes["first"][batch.owner] + records["slot"].astype(np.int64), 0)
        inside &= batch.slots < len(self._owner)
        batch.slots[~inside] = 0
        leases, steps = tickets["lease"][batch.owner], records["step"]
        begins = steps == 0
        # A later ticket of a session in this batch expects what the earlier one leaves.
        expected = self._next[batch.slots].astype(np.int64)
        known = self._owner[batch.slots] == leases
        ahead: dict[int, int] = {}
        lost = ~inside
        fits = inside & (begins | (known & (steps == expected)))
        # A session twice in a batch: the numbers written to their places are not all read again.
        self._marks[batch.slots] = numbers = np.arange(batch.rows)
        batch.distinct = bool((self._marks[batch.slots] == numbers).all())
        if not batch.distinct or not fits.all():
            for row in range(batch.rows):  # rare: something is lost, or a session stands here twice
                if lost[row]:
                    continue
                slot = int(batch.slots[row])
                want = ahead.get(slot, int(expected[row]) if known[row] else -1)
                if not begins[row] and int(steps[row]) != want:
                    lost[row] = True
                    ahead[slot] = -1
                else:
                    ahead[slot] = int(steps[row]) + 1
        if lost.any():
            self._refuse(batch, outcome, lost)
        flags = records["flags"]
        if flags.any():
            batch.idle = (flags & NO_FORWARD) != 0

    def still(self, wave: NDArray[np.intp], batch: _Rows, outcome: Outcome) -> NDArray[np.intp]:
        """Of a later wave what can be computed: where an earlier ticket of a session failed, the next is refused."""
        assert batch.records is not None
        steps, slots = batch.records["step"][wave], batch.slots[wave]
        lost = (steps != 0) & (
            (self._owner[slots] != batch.tickets["lease"][batch.owner[wave]]) | (self._next[slots] != steps)
        )
        if lost.any():
            mask = np.zeros(batch.rows, np.bool_)
            mask[wave[lost]] = True
            self._refuse(batch, outcome, mask)
            assert batch.left_out is not None
            wave = wave[~batch.left_out[wave]]
        return wave

    def before(self, group: NDArray[np.intp], batch: _Rows) -> dict[str, torch.Tensor]:
        """The state with which these rows are computed."""
        assert batch.records is not None
        index = torch.from_numpy(batch.slots[group]).to(self._device)
        begins = batch.records["step"][group] == 0
        state = {name: kept[index] for name, kept in self._kept.items()}
        if begins.any():
            mask = torch.from_numpy(begins).to(self._device)
            for name, start in self._initial.items():
                state[name][mask] = start
        return state

    def after(
        self, group: NDArray[np.intp], good: NDArray[np.bool_], following: Mapping[str, torch.Tensor], batch: _Rows
    ) -> None:
        """Keep the state that rows which were computed leave behind."""
        if not good.all():
            group = group[good]
            following = {name: value[torch.from_numpy(good).to(self._device)] for name, value in following.items()}
        index = torch.from_numpy(batch.slots[group]).to(self._device)
        for name, value in following.items():
            self._kept[name][index] = value
        self._stepped(group, batch)

    def checked(self, results: Mapping[str, Any], rows: int) -> dict[str, torch.Tensor]:
        """The next state among a module's results. Raises ModelFailed where it is not what the spec promises."""
        found = {}
        for name, spec in self._specs.items():
            value = results.get(name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != (rows, *spec.shape):
                came = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ModelFailed(f"state {name!r} came back as {came}, the spec promises {[rows, *spec.shape]}")
            found[name] = value.to(dtype_of(spec))
        return found

    def without_forward(self, group: NDArray[np.intp], batch: _Rows) -> None:
        """Rows that give a state, or ask for it."""
        assert batch.records is not None
        state = self.before(group, batch)
        places, flags = batch.places[group], batch.records["flags"][group]
        loads = (flags & LOAD) != 0
        for name, value in state.items():
            if loads.any():
                given = torch.from_numpy(self._columns.state_in[name][places[loads]]).to(self._device)
                value[torch.from_numpy(loads).to(self._device)] = given
            if (stores := (flags & STORE) != 0).any():
                self._columns.state_out[name][places[stores]] = value[torch.from_numpy(stores)].cpu().numpy()
        self.after(group, np.ones(len(group), np.bool_), state, batch)

    def _stepped(self, group: NDArray[np.intp], batch: _Rows) -> None:
        assert batch.records is not None
        slots = batch.slots[group]
        self._owner[slots] = batch.tickets["lease"][batch.owner[group]]
        self._next[slots] = batch.records["step"][group] + 1

    def _refuse(self, batch: _Rows, outcome: Outcome, lost: NDArray[np.bool_]) -> None:
        """Tickets with a lost session are not computed at all; their reasons say which of its rows is meant."""
        tickets = batch.tickets
        for number in np.unique(batch.owner[lost]).tolist():
            mine = np.flatnonzero(batch.owner == number)
            first = tickets["first"].item(number)
            self._columns.reasons[first : first + len(mine)] = 0
            for i, row in enumerate(mine.tolist()):
                if lost[row]:
                    self._columns.fail(first + i, "lost")
            outcome.refused[number] = Code.SESSION_LOST, _LOST
        refused = np.isin(batch.owner, list(outcome.refused))
        batch.left_out = refused


class _Variable:
    """One input whose rows differ in size."""

    def __init__(self, name: str, spec: TensorSpec, columns: Columns, max_batch: int) -> None:
        self._spec = spec
        self.extents = spec.extents
        self._fixed = math.prod(size for size in spec.shape if size > 0)
        self._slots = columns.inputs[name]
        self._tensor = torch.from_numpy(self._slots)
        self._extents = columns.input_extents[name]
        self._read = np.zeros((max_batch, spec.extents), np.int64)
        self._lengths = np.zeros(max_batch, np.int64)
        self._staging = np.zeros(0, np.uint8)
        self._bytes = self._slots.view(np.uint8) if self._slots.dtype != np.bool_ else self._slots
        self._unit = int(np.prod([size for size in spec.shape if size > 0], dtype=np.int64))
        self._dtype = dtype_of(spec)
        self._places: NDArray[np.intp] = np.zeros(0, np.intp)
        self.sizes = self._read[:0]
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)

    def dense(
        self, tickets: NDArray[Any], rows: int, max_padding: float, max_elements: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A batch's rows, padded, with their sizes, in one call; None where they must be looked at one by one."""
        native.gather(self._extents, tickets, self._read)
        sizes = self._read[:rows]  # read once: only this copy is used
        smallest, largest = sizes.min(axis=0), sizes.max(axis=0)
        spec = self._spec
        alike = bool((smallest == largest).all())
        if int(smallest.min()) < 0 or (not alike and (sizes.shape[1] > 1 or spec.shape[1:])):
            return None
        most = math.prod(largest.tolist()) * self._unit
        if most > spec.capacity or most == 0 or (max_elements and most * rows > max_elements):
            return None
        item = self._slots.itemsize
        lengths = self._lengths[:rows]
        if alike:
            lengths.fill(most * item)
        else:
            np.multiply(sizes[:, 0], self._unit * item, out=lengths)
            if most * item * rows - int(lengths.sum()) > max_padding * most * item * rows:
                return None
        needed = rows * most * item
        if len(self._staging) < needed:
            self._staging = np.zeros(needed, np.uint8)
        packed = self._staging[:needed].reshape(rows, most * item)
        native.gather_padded(self._bytes, tickets, lengths, packed)
        shape = (rows, *spec.measured(largest.tolist()))
        padded = torch.from_numpy(packed.reshape(-1)).view(self._dtype).reshape(shape)
        return padded, torch.from_numpy(sizes[:, 0].copy() if sizes.shape[1] == 1 else sizes.copy())

    def read(self, tickets: NDArray[Any], rows: int) -> None:
        """Take the extents of a batch's rows; from here on these copies count. `counts` is -1 where one is wrong."""
        native.gather(self._extents, tickets, self._read)
        self.sizes = self._read[:rows]
        self.counts = elements(self._spec, self.sizes)
        batch = _Rows(tickets, rows)
        self._places = batch.places

    def costs_now(self, tickets: NDArray[Any], rows: int) -> NDArray[np.int64]:
        """Elements of tickets' rows, at least one each, whatever is said of them."""
        read = np.empty((rows, self._spec.extents), np.int64)
        native.gather(self._extents, tickets, read)
        return np.maximum(elements(self._spec, read), 1)

    def padded(self, sizes: Sequence[int]) -> int:
        """Elements of a row of these sizes, at least one."""
        return max(1, self._fixed * math.prod(sizes))

    def costs(self, group: NDArray[np.intp]) -> NDArray[np.int64]:
        """Elements of rows, at least one each."""
        return np.maximum(self.counts[group], 1)

    def rows(self, group: NDArray[np.intp]) -> list[Any]:
        """Copies of rows: bytes, or tensors of their shapes. A client may change a row while it is computed."""
        if self._spec.dtype == BYTES:
            return [self._slots[self._places[row], : self.counts[row]].tobytes() for row in group]
        counts, places = self.counts[group], self._places[group]
        if len(group) and int(counts.min()) == int(counts.max()) and (self.sizes[group] == self.sizes[group[0]]).all():
            shape = self._spec.measured(self.sizes[group[0]].tolist())
            return list(torch.from_numpy(self._slots[places, : counts[0]]).reshape(len(group), *shape).unbind())
        return [
            self._tensor[place, :count].clone().reshape(self._spec.measured(sizes))
            for place, count, sizes in zip(places.tolist(), counts.tolist(), self.sizes[group].tolist(), strict=True)
        ]


def _padded(rows: list[Any], spec: TensorSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as one tensor, zeros behind each, and their sizes, int64 (n,) or (n, k)."""
    if spec.dtype == BYTES:
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        most = max(int(lengths.max(initial=0)), 1)
        joined = np.frombuffer(b"".join(row.ljust(most, b"\0") for row in rows), np.uint8).copy()
        return torch.from_numpy(joined.reshape(len(rows), most)), torch.from_numpy(lengths)
    shapes = [row.shape for row in rows]
    axes = [axis for axis, size in enumerate(spec.shape) if size < 0]
    sizes = torch.tensor([[shape[axis] for axis in axes] for shape in shapes], dtype=torch.int64)
    lengths_ = sizes[:, 0] if len(axes) == 1 else sizes
    if all(shape == shapes[0] for shape in shapes):
        return torch.stack(rows), lengths_
    largest = [max(sizes_) for sizes_ in zip(*shapes, strict=True)]
    padded = torch.zeros((len(rows), *largest), dtype=rows[0].dtype)
    for i, row in enumerate(rows):
        target = padded[i]
        for axis, size in enumerate(row.shape):
            target = target.narrow(axis, 0, size)
        target.copy_(row)
    return padded, lengths_


def _flat(spec: TensorSpec, value: Any) -> tuple[NDArray[Any], tuple[int, ...]]:
    """A row of an output that differs in size, flat, with its extents. Raises where it does not fit."""
    if spec.dtype == BYTES:
        if isinstance(value, str):
            value = value.encode("utf-8", "replace")
        array = np.frombuffer(bytes(value), np.uint8)
    else:
        tensor = torch.as_tensor(value).to("cpu", dtype_of(spec)).contiguous()
        array = tensor.numpy()
    extents = spec.extents_of(array.shape)
    if extents is None:
        raise ValueError(f"shape {array.shape} came, the spec promises {spec}")
    return array.reshape(-1), extents


def _sample(spec: TensorSpec, rows: int) -> Any:
    """Zeros of a spec, small ones where rows differ in size."""
    if spec.dtype == BYTES:
        return [b"0" * min(spec.capacity, 4) for _ in range(rows)]
    if not spec.variable:
        return torch.zeros((rows, *spec.shape), dtype=dtype_of(spec))
    fixed = int(np.prod([size for size in spec.shape if size > 0], dtype=np.int64))
    side = max(1, min(32, int((spec.capacity // fixed) ** (1 / spec.extents))))
    return [torch.zeros([side if size < 0 else size for size in spec.shape], dtype=dtype_of(spec)) for _ in range(rows)]


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    return [_moved(each, device) for each in value] if isinstance(value, list) else value


def _accepts(module: torch.nn.Module, names: Sequence[str]) -> bool:
    from jurybox.server.engine.served import takes_names

    return takes_names(module, names)
