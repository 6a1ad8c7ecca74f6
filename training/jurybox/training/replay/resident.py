"""A replay that lives in a device's memory: rows are copied there once, and sampled there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from jurybox.protocol import forks
from jurybox.protocol.errors import Refused, SpecMismatch
from jurybox.protocol.locks import TimedLock
from jurybox.training.replay.cursor import ENDED, FIRST, NOT_YET, UNKNOWN, NewRows
from jurybox.training.replay.layout import Layout
from jurybox.training.replay.options import FINITE_ERRORS, Codec, Field, NotEnoughRows, Windows
from jurybox.training.replay.part import Part

# Rows on a device: stored as in a shared replay, widened and linked to their neighbours when they are drawn.
#
# A row is known by its position: rows count up from 0 as they come, and row p lies at p modulo capacity.


# Flags as the native code has them.
FINAL, TERMINATED = 1, 2


@dataclass(slots=True)
class _Neighbours:
    """The rows around n drawn ones.

    Attributes:
        positions: (n, back + 1 + ahead), the drawn row in column `back`.
        before, after: (n,) how many rows there are on either side.
        transitions: (n,) rows from the drawn one on that are transitions.
        fits: (n,) whether the drawn row has all requested neighbours.
        steps, next, terminated: (n,) of n-step returns: transitions made, where they led, whether the episode is over.
        end: (n,) behind the last row that may be handed out as what follows.
    """

    back: int
    positions: torch.Tensor
    before: torch.Tensor
    after: torch.Tensor
    transitions: torch.Tensor
    fits: torch.Tensor
    steps: torch.Tensor
    next: torch.Tensor
    terminated: torch.Tensor
    end: torch.Tensor


class ResidentRows:
    """`capacity` slots on a device, and their links where the replay has episodes."""

    def __init__(self, layout: Layout, capacity: int, device: torch.device) -> None:
        self._layout = layout
        self._capacity = capacity
        self._device = device
        self._slots = torch.zeros((capacity, layout.slot.size), dtype=torch.uint8, device=device)
        self._before = self._after = self._flags = torch.empty(0, dtype=torch.int64, device=device)
        if layout.episodes is not None:
            self._before = torch.full((capacity,), FIRST, device=device)
            self._after = torch.full((capacity,), NOT_YET, device=device)
            self._flags = torch.zeros(capacity, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._slots, self._before, self._after, self._flags))

    def put(self, positions: npt.NDArray[np.int64], slots: torch.Tensor) -> None:
        """Copy slots (n, slot bytes), at most `capacity`, from the host to rows `positions`."""
        self._slots[self._at(positions)] = slots.to(self._device)

    def link(
        self,
        positions: npt.NDArray[np.int64],
        before: npt.NDArray[np.int64],
        after: npt.NDArray[np.int64],
        flags: npt.NDArray[np.uint8],
    ) -> None:
        """Link new rows with their predecessors."""
        at = self._at(positions)
        self._before[at] = torch.from_numpy(before).to(self._device)
        self._after[at] = torch.from_numpy(after).to(self._device)
        self._flags[at] = torch.from_numpy(flags).to(self._device)
        present = before > max(-1, int(positions[-1]) - self._capacity)
        self._after[self._at(before[present])] = torch.from_numpy(positions[present]).to(self._device)

    def end(self, positions: npt.NDArray[np.int64]) -> None:
        """Mark these rows as the last of their episodes."""
        self._after[self._at(positions)] = ENDED

    def _at(self, positions: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(positions % self._capacity).to(self._device)

    def fits(self, drawn: torch.Tensor, windows: Windows, taken: int) -> torch.Tensor:
        """(n,) bool: whether the windows of a row are complete."""
        return self._around(drawn, windows, taken).fits

    def columns(self, drawn: torch.Tensor, windows: Windows, taken: int) -> dict[str, torch.Tensor]:
        """The columns of these rows by name, as in a `Batch`; masks as "valid_<name>" (uint8)."""
        out: dict[str, torch.Tensor] = {}
        fields, w, n = self._layout.fields, windows, len(drawn)
        if not w.any:
            slots = self._slots[drawn % self._capacity]
            for name, spec in fields.items():
                at = self._layout.slot.offsets[name]
                out[name] = _widened(spec, slots[:, at : at + spec.stored_bytes])
            return out
        reward = self._layout.check(w).reward
        around = self._around(drawn, w, taken)
        for name, spec in fields.items():
            if w.n_step and name == reward:
                out[name], out["discount"] = self._returns(name, around, w)
                continue
            for each in w.columns(name):
                values, valid = self._window(name, around, each.first, each.rows, ahead=each.ahead)
                out[each.key] = values.reshape(n, *each.shape(spec.shape))
                if each.mask:
                    out.setdefault(f"valid_{each.mask}", valid.to(torch.uint8))
        return out

    def _window(
        self, name: str, around: _Neighbours, first: int, count: int, *, ahead: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values (n, count, ...) of a field, zeroes where there is no row, and (n, count) whether there is one."""
        origin = around.next[:, None] if ahead else torch.zeros_like(around.next)[:, None]
        offsets = origin + first + torch.arange(count, device=self._device)
        end = around.end if ahead else around.transitions
        valid = (offsets >= -around.before[:, None]) & (offsets < end[:, None])
        columns = (offsets + around.back).clamp(0, around.positions.shape[1] - 1)
        values = self._values(name, around.positions.gather(1, columns))
        shape = valid.shape + (1,) * (values.dim() - 2)
        return torch.where(valid.reshape(shape), values, torch.zeros_like(values)), valid

    def _values(self, name: str, positions: torch.Tensor) -> torch.Tensor:
        spec, at = self._layout.fields[name], self._layout.slot.offsets[name]
        stored = self._slots[positions.reshape(-1) % self._capacity, at : at + spec.stored_bytes]
        return _widened(spec, stored).reshape(*positions.shape, *spec.shape)

    def _returns(self, reward: str, around: _Neighbours, w: Windows) -> tuple[torch.Tensor, torch.Tensor]:
        """The discounted sums of the steps' rewards, and what a value after them counts."""
        step = torch.arange(w.n_step, device=self._device)
        rewards = self._values(reward, around.positions[:, around.back : around.back + w.n_step]).double()
        powers = torch.tensor(w.gamma, dtype=torch.float64, device=self._device) ** step
        made = step < around.steps[:, None]
        returns = torch.where(made, rewards * powers, 0.0).sum(1).float()
        discount = torch.where(around.terminated, 0.0, w.gamma ** around.steps.double()).float()
        return returns, discount

    def _around(self, drawn: torch.Tensor, w: Windows, taken: int) -> _Neighbours:
        """Follow the links of n rows side by side, as the native sampler follows those of one."""
        oldest, capacity = taken - self._capacity, self._capacity
        back, ahead = w.back, w.ahead
        fits = (self._flags[drawn % capacity] & FINAL) == 0
        before = torch.zeros_like(drawn)
        earlier: list[torch.Tensor] = []
        at, going = drawn, torch.ones_like(fits)
        for _ in range(back):
            link = self._before[at % capacity]
            going = going & (link != FIRST)
            fits = fits & ~(going & ((link == UNKNOWN) | (link < oldest)))
            going = going & (link >= 0)
            at = torch.where(going, link, at)
            before = before + going
            earlier.append(at)
        after, transitions = torch.zeros_like(drawn), torch.ones_like(drawn)
        left_none = torch.zeros_like(fits)  # the episode has ended, without a last observation
        later: list[torch.Tensor] = []
        at, going = drawn, torch.ones_like(fits)
        for _ in range(ahead):
            link = self._after[at % capacity]
            fits = fits & ~(going & (link == NOT_YET))
            left_none = left_none | (going & (link == ENDED))
            going = going & (link >= 0)
            at = torch.where(going, link, at)
            after = after + going
            final = (self._flags[at % capacity] & FINAL) != 0
            going = going & ~final
            transitions = transitions + going
            later.append(at)
        positions = torch.stack([*reversed(earlier), drawn, *later], 1)
        if w.length and w.next:
            last = positions.gather(1, (back + after)[:, None])[:, 0]
            transitions = transitions - (left_none & ((self._flags[last % capacity] & TERMINATED) == 0)).long()
            fits = fits & (transitions > 0)
        if w.full_length:
            fits = fits & (transitions >= w.length)
        steps = transitions.clamp(max=w.steps)
        following, terminated = steps, torch.zeros_like(fits)
        if w.steps:
            last = positions.gather(1, (back + steps - 1)[:, None])[:, 0]
            terminated = (self._flags[last % capacity] & TERMINATED) != 0
            cut = steps > after  # the episode ended and left no last observation
            if w.next:
                fits = fits & ~(cut & ~terminated)
            following = torch.where(cut, after, steps)
        end = after + 1 if w.length else following + 1
        return _Neighbours(back, positions, before, after, transitions, fits, steps, following, terminated, end)


def _widened(spec: Field, stored: torch.Tensor) -> torch.Tensor:
    """Unpack stored bytes (m, stored bytes) to values (m, ...)."""
    m, dtype = len(stored), torch.from_numpy(np.empty(0, spec.numpy_dtype)).dtype
    stored = stored.contiguous()
    match spec.codec:
        case Codec.RAW:
            values = stored.view(dtype)
        case Codec.BITS | Codec.BITS_OF_BYTES:
            places = torch.arange(8, dtype=torch.uint8, device=stored.device)
            values = ((stored[:, :, None] >> places) & 1).flatten(1)[:, : spec.elements].to(dtype)
        case Codec.BYTES:
            values = stored.float() * spec.scale
        case Codec.HALF:
            values = stored.view(torch.float16).float()
        case Codec.SPARSE:
            most = spec.nonzero or 0
            counts, rest = stored[:, :4].contiguous().view(torch.int32), stored[:, 4:].contiguous()
            indices, numbers = rest.view(torch.int32)[:, :most].long(), rest.view(torch.float32)[:, most:]
            used = torch.arange(most, device=stored.device) < counts
            # Unused elements go to a place behind the end.
            wide = torch.zeros((m, spec.elements + 1), device=stored.device)
            values = wide.scatter_(1, torch.where(used, indices, spec.elements), numbers)[:, :-1]
    return values.reshape(m, *spec.shape)


# Actors of any process write into the shared replay, `refresh` copies new rows to the device, in
# the form in which it is stored (planes as bits stay bits), and `sample` draws, gathers, widens and links rows there
# without touching the host. The shared replay may be small where it blocks or drops when full: `refresh` then gives
# its slots back to the writers, so nothing is lost. One that overwrites keeps its rows, and what it overwrites before
# a refresh is missed (and counted).


# Rows travel in pieces of this size, through one page-locked buffer.
_PIECE_BYTES = 8 << 20
_TRIES = 100
_PLAIN = Windows()
_PATIENCE = 60.0  # seconds to wait for another thread's call
P = ParamSpec("P")
T = TypeVar("T")


def _alone(call: Callable[Concatenate[Resident, P], T]) -> Callable[Concatenate[Resident, P], T]:
    """Make calls of a method come after each other."""

    @functools.wraps(call)
    def called(self: Resident, /, *args: P.args, **options: P.kwargs) -> T:
        with self._turn.once(_PATIENCE):
            return call(self, *args, **options)

    return called


class Resident:
    """Up to `capacity` rows of a replay on a device. Made by `Replay.resident`.

    Calls of several threads come after each other. Within a call, one of a signal handler or a destructor is refused:
    rows would change under it.

    A forked child may draw from the rows that were there, with draws of its own; `refresh` refuses there.

    Attributes:
        taken: rows that were copied to the device.
        missed: rows that the shared replay overwrote before they were taken, or whose writer was killed.

    Raises:
        Refused: the replay has an anchor.
    """

    def __init__(self, replay: Any, device: str, *, capacity: int, seed: int | None) -> None:
        layout = replay.layout
        if layout.anchor:
            raise Refused(
                "a replay with an anchor is not kept on a device; sample it on the host, or leave out anchor="
            )
        self.capacity = capacity
        self._replay = replay
        self._part: Part = replay.parts[0]
        self._layout = layout
        self.device = torch.device(device)
        self.rows = ResidentRows(layout, capacity, self.device)
        self._turn = TimedLock("a call of this copy of a replay")
        self._generator = torch.Generator(self.device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._new = NewRows(self._part)
        size = layout.slot.size
        piece = min(layout.capacity, capacity, max(1, _PIECE_BYTES // size))
        self._staging = torch.empty((piece, size), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self._priorities = (
            torch.zeros(capacity, dtype=torch.float64, device=self.device) if layout.prioritized else None
        )
        self._top = 1.0
        self._finals = False  # whether last observations were among the rows: they are not drawn
        forks.register(self)

    def _after_fork_in_child(self) -> None:
        self._turn.anew()
        if self.device.type == "cpu":  # CUDA itself refuses to go on in a forked child
            self._generator.seed()

    def __len__(self) -> int:
        return min(self.taken, self.capacity)

    @property
    def taken(self) -> int:
        return self._new.taken

    @property
    def missed(self) -> int:
        return self._new.missed

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        extra = 0 if self._priorities is None else self._priorities.nbytes
        return self.rows.nbytes + extra

    @_alone
    def refresh(self) -> int:
        """Copy the rows that were added since the last call; returns their number."""
        before, linked = self.taken, self._layout.episodes is not None
        for piece in self._new.take(self._staging.numpy()):
            positions = piece.positions
            self.rows.put(positions, self._staging[: len(piece)])
            final = np.zeros(len(piece), np.bool_)
            if linked:
                self.rows.link(positions, piece.before, piece.after, piece.flags)
                final = (piece.flags & FINAL) != 0
                self._finals = self._finals or bool(final.any())
            if self._priorities is not None:
                self._priorities[torch.from_numpy(positions % self.capacity).to(self.device)] = self._first_priority()
                if final.any():
                    self._priorities[torch.from_numpy(positions[final] % self.capacity).to(self.device)] = 0.0
        if linked:
            self.rows.end(self._new.ended())
        if self._layout.full != "overwrite":
            self._new.discard()
        return self.taken - before

    @_alone
    def sample(
        self, n: int, *, windows: Windows = _PLAIN, replace: bool = True, uniform: bool = False, beta: float = 0.4
    ) -> dict[str, torch.Tensor]:
        """Draw n rows: tensors on the device by field, and "indices", "weights" (from a prioritized replay) and
        "valid_<name>", as `Replay.prefetch` hands them out. The options are those of `Replay.sample`.

        Raises:
            NotEnoughRows: there are too few rows, or too few fit the windows.
        """
        prioritized = self._priorities is not None and not uniform
        if prioritized and not replace:
            raise SpecMismatch("prioritized samples are drawn with replacement: give uniform=True with replace=False")
        if len(self) == 0 or (not replace and n > len(self)):
            raise NotEnoughRows(f"{len(self)} rows came to {self.device}, expected {n}: add some, then call refresh()")
        if windows.any:
            self._layout.check(windows)
        drawn = self._fitting(n, windows, replace=replace, prioritized=prioritized)
        out = self.rows.columns(drawn, windows, self.taken)
        out["indices"] = drawn
        if self._priorities is not None:
            chances = self._priorities[drawn % self.capacity]
            weights = (chances.min() / chances) ** beta if prioritized else torch.ones_like(chances)
            out["weights"] = weights.float()
        return out

    def _fitting(self, n: int, windows: Windows, *, replace: bool, prioritized: bool) -> torch.Tensor:
        """Positions of rows with complete windows."""
        low = self.taken - len(self)
        if not replace:
            order = low + torch.randperm(len(self), generator=self._generator, device=self.device)
            if windows.any or self._finals:
                order = order[self.rows.fits(order, windows, self.taken)]
            if len(order) < n:
                raise NotEnoughRows(f"only {len(order)} different rows fit, expected {n}")
            return order[:n]
        drawn = self._candidates(n, prioritized=prioritized)
        if not windows.any and not self._finals:
            return drawn
        for _ in range(_TRIES):
            unfit = ~self.rows.fits(drawn, windows, self.taken)
            if not unfit.any():
                return drawn
            others = self._candidates(n, prioritized=prioritized)
            # Shuffled, so that every place draws from all strata: one may hold the newest rows alone, which never fit.
            order = torch.randperm(n, generator=self._generator, device=self.device)
            drawn = torch.where(unfit, others[order], drawn)
        raise NotEnoughRows(
            f"of {len(self)} rows on {self.device} too few fit: their episodes do not reach as far as the windows ask"
        )

    def _candidates(self, n: int, *, prioritized: bool) -> torch.Tensor:
        low = self.taken - len(self)
        if not prioritized or self._priorities is None:
            return low + torch.randint(len(self), (n,), generator=self._generator, device=self.device)
        # Stratified and proportional, as the shared replay draws (T. Schaul et al., arXiv:1511.05952).
        sums = self._priorities.cumsum(0)
        spread = torch.rand(n, generator=self._generator, device=self.device, dtype=torch.float64)
        targets = (torch.arange(n, device=self.device) + spread) / n * sums[-1]
        slots = torch.searchsorted(sums, targets, right=True).clamp_(max=len(self) - 1)
        return self.taken - 1 - (self.taken - 1 - slots) % self.capacity

    def _first_priority(self) -> float:
        """The priority of new rows, see `first_priority` in native/replay/ring.hpp."""
        assert self._priorities is not None
        total, rows = float(self._priorities.sum()), min(self.taken, self.capacity)
        return min(self._top, 100 * total / rows) if total else self._top

    @_alone
    def update_priorities(self, indices: torch.Tensor, errors: torch.Tensor) -> None:
        """Set the priorities of rows to (|error| + 1e-6) ** alpha; rows that were replaced since are ignored.

        Raises:
            Refused: the replay is not prioritized.
            SpecMismatch: an error is not finite. No priority has been changed then.
        """
        if self._priorities is None:
            raise Refused("this replay is not prioritized: make it with prioritized=True")
        ring = self._part.ring
        indices = indices.to(self.device)
        priorities = (errors.detach().to(self.device, torch.float64).abs() + ring.epsilon) ** ring.alpha
        if not math.isfinite(float(priorities.sum())):
            raise SpecMismatch(f"the sum of the errors' priorities is {float(priorities.sum())}: {FINITE_ERRORS}")
        fresh = indices >= self.taken - self.capacity
        slots = indices % self.capacity
        self._priorities[slots] = torch.where(fresh, priorities, self._priorities[slots])
        self._top = max(self._top, float(torch.where(fresh, priorities, 0.0).max()))
