"""The states of a model's sessions, and the rows of a batch that use them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.arena import LOAD, NO_FORWARD, SESSION, STORE, Columns
from jurybox.protocol.errors import Code, ModelFailed
from jurybox.protocol.scoreboard import LANE
from jurybox.server.engine.batch_shapes import dtype_of
from jurybox.server.engine.modules import array_over, comparable, require_kept, tensor_over
from jurybox.server.engine.served import BatchOutcome
from jurybox.server.models import ServedModel

_LOST = (
    "the state of this session is gone: its engine was started again, an earlier request of it was lost, or it was "
    "never begun. Begin its episode anew, with reset"
)
# torch has no indexed writes for these dtypes; a view in the other one has the same bytes.
_SIGNED = {
    getattr(torch, name): other
    for name, other in {
        "uint16": torch.int16,
        "uint32": torch.int32,
        "uint64": torch.int64,
        "float8_e4m3fn": torch.uint8,
        "float8_e5m2": torch.uint8,
    }.items()
    if hasattr(torch, name)
}
_TWICE = "session {} stands in this request twice: its second step needs the first one's answer"


class BatchRows:
    """The rows of a batch.

    Attributes:
        places: (rows,) the index of each row in the arena.
        owner: (rows,) the number of its ticket in the batch.
        failed: why rows are not computed, by their number.
        stepped: the numbers of tickets of which a session has made its step.
        idle: (rows,) whether a row only reads or writes its state; None: none does.
        records: (rows,) of arena.SESSION if the model has sessions; `slots` (rows,) are the indices of their states.
    """

    def __init__(self, tickets: NDArray[Any], rows: int) -> None:
        self.tickets = tickets
        self.rows = rows
        counts = tickets["rows"].astype(np.intp)
        starts = np.cumsum(counts) - counts
        self.owner = np.repeat(np.arange(len(tickets)), counts)
        self.places = np.repeat(tickets["first"].astype(np.intp) - starts, counts) + np.arange(rows)
        self.failed: dict[int, str] = {}
        self.stepped: set[int] = set()
        self.idle: NDArray[np.bool_] | None = None
        self.records: NDArray[Any] | None = None
        self.slots: NDArray[np.intp] = self.places
        self.left_out: NDArray[np.bool_] | None = None  # rows of tickets that are refused
        self.distinct = True  # whether no session has two rows

    def tickets_of(self, group: NDArray[np.intp]) -> list[int]:
        """Return the numbers of the tickets that have rows in a group."""
        return [int(number) for number in np.unique(self.owner[group])]

    def begun(self, group: NDArray[np.intp]) -> None:
        """Record that the sessions of these rows have made their step."""
        self.stepped.update(self.tickets_of(group))

    def not_behind(self, wave: NDArray[np.intp], again: set[int]) -> NDArray[np.intp]:
        """Return the rows of a later wave without those of tickets that must wait for an earlier one in `again`.

        These tickets are added to `again`.
        """
        if not again:
            return wave
        held = set(self.slots[np.isin(self.owner, list(again))].tolist())
        for number in self.tickets_of(wave):
            mine = self.slots[wave[self.owner[wave] == number]].tolist()
            if not held.isdisjoint(mine):
                again.add(number)
        return wave[~np.isin(self.owner[wave], list(again))]

    def waves(self) -> list[NDArray[np.intp]]:
        """Return the rows in waves to compute one after another: a session's later ticket is in a later wave."""
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
    """The states of a model's sessions on the device: a tensor for each part of the state, with a row per session.

    The index of a session is the arena row of its number in its lane, so there are as many indices as rows, and each
    belongs to one lease. The lease and the next step are recorded with each state: a state is only used for the lease
    that it was created for, and in the order of the steps.
    """

    def __init__(
        self, model: ServedModel, columns: Columns, lanes: NDArray[Any] | None, max_batch: int, device: torch.device
    ) -> None:
        assert columns.sessions is not None
        self._columns = columns
        self._lanes = np.zeros(0, LANE) if lanes is None else lanes
        self._device = device
        self._specs = dict(model.state)
        self._host = device.type == "cpu"
        rows = len(columns.sessions)
        self._initial = {}
        self._kept = {}
        for name, spec in self._specs.items():
            given = model.initial_state.get(name)
            start = torch.zeros(spec.shape, dtype=dtype_of(spec)) if given is None else given.to(dtype_of(spec))
            if given is not None and not torch.equal(comparable(start.to(given.dtype)), comparable(given)):
                raise ModelFailed(f"initial_state {name!r} is {given.dtype}; the spec's {spec.dtype} does not keep it")
            if tuple(start.shape) != spec.shape:
                raise ModelFailed(
                    f"initial_state {name!r} has shape {list(start.shape)}, the spec says {list(spec.shape)}"
                )
            self._initial[name] = start.to(device)
            self._kept[name] = torch.zeros((rows, *spec.shape), dtype=dtype_of(spec), device=device)
        self._arrays = {name: array_over(kept) for name, kept in self._kept.items()} if self._host else {}
        self._book = native.SessionBook(rows)
        # Buffers for the batch that is being computed; reused, with their views by length.
        self._records = np.zeros(max_batch, SESSION)
        self._places = np.zeros(max_batch, np.int64)
        self._verdicts = np.zeros(max_batch, np.uint8)
        self._index = torch.from_numpy(self._places)
        self._staged = {name: kept.new_zeros((max_batch, *kept.shape[1:])) for name, kept in self._kept.items()}
        self._staged_arrays = {name: array_over(staged) for name, staged in self._staged.items()} if self._host else {}
        self._views: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def in_use(self) -> int:
        """The number of sessions that have begun and were not forgotten."""
        return self._book.in_use

    def move(self, device: torch.device) -> int:
        """Move all states to a device and return the number of bytes. Nothing may compute with them meanwhile."""
        for tensors in (self._initial, self._kept, self._staged):
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(device)
        self._views = {}
        return sum(kept.nbytes for kept in self._kept.values())

    def forget(self, lease: int) -> None:
        """Drop the sessions of a lease that has ended."""
        self._book.forget(lease)

    def initial(self, rows: int) -> dict[str, torch.Tensor]:
        """Return the initial state of `rows` sessions, a copy, since a module may write to it."""
        return {name: value.repeat(rows, *[1] * value.dim()) for name, value in self._initial.items()}

    def read(self, tickets: NDArray[Any]) -> int:
        """Read a batch's session records, once. Return the flags of native.SessionBook.read, which describe them."""
        assert self._columns.sessions is not None
        return self._book.read(
            tickets, self._columns.sessions, self._lanes, self._records, self._places, self._verdicts
        )

    def whole(self, rows: int, shape: int, found: int) -> dict[str, torch.Tensor]:
        """Return the states of all rows that were read, padded to `shape` rows with copies of the last one."""
        state = self._views.get(shape)
        if state is None:
            state = self._views[shape] = {name: staged[:shape] for name, staged in self._staged.items()}
        if self._host:
            for name, table in self._arrays.items():
                self._book.load(table, self._staged_arrays[name])
                if shape > rows:
                    self._staged_arrays[name][rows:shape] = self._staged_arrays[name][rows - 1]
        else:
            self._places[rows:shape] = self._places[rows - 1]
            index = self._index[:shape].to(self._device)
            for name, kept in self._kept.items():
                torch.index_select(_writable(kept), 0, index, out=_writable(state[name]))
        if found & native.SESSION_BEGINS:
            self._records[rows:shape] = self._records[rows - 1]
            self._begun(self._records["step"][:shape] == 0, state)
        return state

    def keep(self, following: Mapping[str, torch.Tensor], good: list[int] | None) -> None:
        """Store the next states of the rows that were read; `good`: the rows that did not fail, None: all."""
        if good is None and self._host:
            for name, value in following.items():
                self._book.save(self._arrays[name], array_over(value.contiguous()))
            self._book.step()
        else:
            self.after(np.arange(len(next(iter(following.values())))), good, following)

    # ---- rows one by one

    def sort(self, batch: BatchRows, outcome: BatchOutcome, found: int) -> None:
        """Set a batch's records, and refuse the tickets of sessions whose state is not the one they expect."""
        batch.records, batch.slots = self._records[: batch.rows], self._places[: batch.rows]
        batch.distinct = not found & native.SESSION_AGAIN
        if found & native.SESSION_WRONG:
            verdicts = self._verdicts[: batch.rows]
            self._refuse(batch, outcome, verdicts == native.SESSION_LOST)
            for row in np.flatnonzero(verdicts == native.SESSION_TWICE).tolist():
                said = _TWICE.format(batch.records["slot"][row])
                outcome.refused[int(batch.owner[row])] = Code.SPEC_MISMATCH, said
            batch.left_out = np.isin(batch.owner, list(outcome.refused))
        if found & native.SESSION_FLAGS:
            batch.idle = (batch.records["flags"] & NO_FORWARD) != 0

    def still(self, wave: NDArray[np.intp], batch: BatchRows, outcome: BatchOutcome) -> NDArray[np.intp]:
        """Return the rows of a later wave that can be computed: a session's step after a failed one is refused."""
        lost = [row for row in wave.tolist() if not self._book.fits(row)]
        if lost:
            mask = np.zeros(batch.rows, np.bool_)
            mask[lost] = True
            self._refuse(batch, outcome, mask)
            batch.left_out = np.isin(batch.owner, list(outcome.refused))
            wave = wave[~batch.left_out[wave]]
        return wave

    def before(self, group: NDArray[np.intp], batch: BatchRows) -> dict[str, torch.Tensor]:
        """Return the states with which these rows are computed."""
        assert batch.records is not None
        index = torch.from_numpy(batch.slots[group]).to(self._device)
        state = {name: _writable(kept)[index].view(kept.dtype) for name, kept in self._kept.items()}
        begins = batch.records["step"][group] == 0
        if begins.any():
            self._begun(begins, state)
        return state

    def after(self, group: NDArray[np.intp], good: list[int] | None, following: Mapping[str, torch.Tensor]) -> None:
        """Store the next states of rows that were computed; `good`: the rows that did not fail, None: all."""
        rows = group if good is None else group[good]
        index = torch.from_numpy(self._places[rows]).to(self._device)
        for name, value in following.items():
            value = _writable(value)  # noqa: PLW2901
            _writable(self._kept[name]).index_copy_(0, index, value if good is None else value[good])
        self._book.step(rows.astype(np.int64, copy=False))

    def _begun(self, begins: NDArray[np.bool_], state: Mapping[str, torch.Tensor]) -> None:
        mask = torch.from_numpy(begins).to(self._device)
        for name, start in self._initial.items():
            _writable(state[name])[mask] = _writable(start)

    def checked(self, results: Mapping[str, Any], rows: int) -> dict[str, torch.Tensor]:
        """Return the next states among a module's results. Raises ModelFailed if they do not match the spec."""
        found = {}
        for name, spec in self._specs.items():
            value = results.get(name)
            if not isinstance(value, torch.Tensor) or value.shape != (rows, *spec.shape):
                came = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ModelFailed(f"state {name!r} came back as {came}, the spec promises {[rows, *spec.shape]}")
            dtype = self._kept[name].dtype
            require_kept(f"state {name!r}", value.dtype, dtype)
            found[name] = value if value.dtype == dtype and self._host else value.to(self._device, dtype)
        return found

    def without_forward(self, group: NDArray[np.intp], batch: BatchRows) -> None:
        """Handle rows that only write a state or read it."""
        assert batch.records is not None
        state = self.before(group, batch)
        places, flags = batch.places[group], batch.records["flags"][group]
        loads = (flags & LOAD) != 0
        for name, value in state.items():
            if loads.any():
                given = tensor_over(self._columns.state_in[name][places[loads]]).to(self._device)
                _writable(value)[torch.from_numpy(loads).to(self._device)] = _writable(given)
            if (stores := (flags & STORE) != 0).any():
                self._columns.state_out[name][places[stores]] = array_over(value[torch.from_numpy(stores)].cpu())
        self.after(group, None, state)

    def _refuse(self, batch: BatchRows, outcome: BatchOutcome, lost: NDArray[np.bool_]) -> None:
        """Refuse whole tickets with lost sessions; the reasons in the arena mark the rows concerned."""
        tickets = batch.tickets
        for number in np.unique(batch.owner[lost]).tolist():
            mine = np.flatnonzero(batch.owner == number)
            first = tickets["first"].item(number)
            self._columns.refuse(first, len(mine), dict.fromkeys(np.flatnonzero(lost[mine]).tolist(), "lost"))
            outcome.refused[number] = Code.SESSION_LOST, _LOST


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor in a dtype that torch can index and write in part."""
    signed = _SIGNED.get(tensor.dtype)
    return tensor if signed is None else tensor.view(signed)
