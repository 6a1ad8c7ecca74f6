"""State that a model keeps for its sessions, and the rows of a batch, one by one, that it is kept for."""

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
from jurybox.server.engine.served import Outcome, dtype_of
from jurybox.server.models import ServedModel

_LOST = (
    "the state of this session is gone: its engine was started again, an earlier request of it was lost, or it was "
    "never begun. Begin its episode anew, with reset"
)


class BatchRows:
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

    def read(self, batch: BatchRows, outcome: Outcome) -> None:
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

    def still(self, wave: NDArray[np.intp], batch: BatchRows, outcome: Outcome) -> NDArray[np.intp]:
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

    def before(self, group: NDArray[np.intp], batch: BatchRows) -> dict[str, torch.Tensor]:
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
        self, group: NDArray[np.intp], good: NDArray[np.bool_], following: Mapping[str, torch.Tensor], batch: BatchRows
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

    def without_forward(self, group: NDArray[np.intp], batch: BatchRows) -> None:
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

    def _stepped(self, group: NDArray[np.intp], batch: BatchRows) -> None:
        assert batch.records is not None
        slots = batch.slots[group]
        self._owner[slots] = batch.tickets["lease"][batch.owner[group]]
        self._next[slots] = batch.records["step"][group] + 1

    def _refuse(self, batch: BatchRows, outcome: Outcome, lost: NDArray[np.bool_]) -> None:
        """Tickets with a lost session are not computed at all; their reasons say which of its rows is meant."""
        tickets = batch.tickets
        for number in np.unique(batch.owner[lost]).tolist():
            mine = np.flatnonzero(batch.owner == number)
            first = tickets["first"].item(number)
            self._columns.refuse(first, len(mine), dict.fromkeys(np.flatnonzero(lost[mine]).tolist(), "lost"))
            outcome.refused[number] = Code.SESSION_LOST, _LOST
        refused = np.isin(batch.owner, list(outcome.refused))
        batch.left_out = refused
