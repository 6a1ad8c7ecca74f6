"""A replay that lives in a device's memory: rows go there once, and every draw is made there.

The shared replay is the way in: actors of any process write into it, `refresh` brings what is new to the device, in
the form in which it is stored (planes as bits stay bits), and `sample` draws, gathers, widens and links rows there
without touching the host. The shared replay may be small where it blocks or drops when full: `refresh` then gives
its slots back to the writers, so nothing is lost. One that overwrites keeps its rows, and what it overwrites before
a refresh is missed (and counted).
"""

from __future__ import annotations

from typing import Any

import torch

from jurybox.protocol import forks
from jurybox.protocol.errors import Refused, SpecMismatch
from jurybox.training.replay.errors import NotEnoughRows
from jurybox.training.replay.new_rows import NewRows
from jurybox.training.replay.options import Windows
from jurybox.training.replay.part import Part
from jurybox.training.replay.resident_rows import Rows

# Rows travel in pieces of this size, through one page-locked buffer.
_PIECE_BYTES = 8 << 20
_TRIES = 100
_PLAIN = Windows()


class Resident:
    """Up to `capacity` rows of a replay on a device; belongs to one thread. Made by `Replay.resident`.

    A forked child may draw from the rows that were there, with draws of its own; `refresh` refuses there.

    Attributes:
        taken: rows that came to the device.
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
        self.rows = Rows(layout, capacity, self.device)
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
        forks.register(self)

    def _after_fork_in_child(self) -> None:
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

    # ---- coming in

    def refresh(self) -> int:
        """Bring the rows that were added since the last call; how many came."""
        before, linked = self.taken, self._layout.episodes is not None
        for piece in self._new.take(self._staging.numpy()):
            positions = piece.positions
            self.rows.put(positions, self._staging[: len(piece)])
            if linked:
                self.rows.link(positions, piece.before, piece.after, piece.flags)
            if self._priorities is not None:
                self._priorities[torch.from_numpy(positions % self.capacity).to(self.device)] = self._top
        if linked:
            self.rows.end(self._new.ended())
        if self._layout.full != "overwrite":
            self._new.discard()
        return self.taken - before

    # ---- drawing

    def sample(
        self, n: int, *, windows: Windows = _PLAIN, replace: bool = True, uniform: bool = False, beta: float = 0.4
    ) -> dict[str, torch.Tensor]:
        """Draw n rows: tensors on the device by field, and "indices", "weights" (from a prioritized replay) and
        "valid_<name>", as `Replay.prefetch` hands them out. The options are those of `Replay.sample`.

        Raises:
            NotEnoughRows: too few rows came, or too few fit the windows.
        """
        prioritized = self._priorities is not None and not uniform
        if prioritized and not replace:
            raise SpecMismatch("prioritized samples are drawn with replacement: give uniform=True with replace=False")
        if len(self) == 0 or (not replace and n > len(self)):
            raise NotEnoughRows(f"{len(self)} rows came to {self.device}, expected {n}: add some, then call refresh()")
        if windows.any and self._layout.episodes is None:
            raise SpecMismatch("this replay does not know its episodes: make it with episodes=Episodes(...)")
        drawn = self._fitting(n, windows, replace=replace, prioritized=prioritized)
        out = self.rows.columns(drawn, windows, self.taken)
        out["indices"] = drawn
        if self._priorities is not None:
            chances = self._priorities[drawn % self.capacity]
            weights = (chances.min() / chances) ** beta if prioritized else torch.ones_like(chances)
            out["weights"] = weights.float()
        return out

    def _fitting(self, n: int, windows: Windows, *, replace: bool, prioritized: bool) -> torch.Tensor:
        """Positions of rows that have around them what the windows ask for."""
        low = self.taken - len(self)
        if not replace:
            order = low + torch.randperm(len(self), generator=self._generator, device=self.device)
            if windows.any:
                order = order[self.rows.fits(order, windows, self.taken)]
            if len(order) < n:
                raise NotEnoughRows(f"only {len(order)} different rows fit, expected {n}")
            return order[:n]
        drawn = self._candidates(n, prioritized=prioritized)
        if not windows.any:
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

    def update_priorities(self, indices: torch.Tensor, errors: torch.Tensor) -> None:
        """Set the priorities of rows to (|error| + 1e-6) ** alpha; rows that were replaced since are passed by.

        Raises:
            Refused: the replay is not prioritized.
        """
        if self._priorities is None:
            raise Refused("this replay is not prioritized: make it with prioritized=True")
        ring = self._part.ring
        priorities = (errors.detach().to(self.device, torch.float64).abs() + ring.epsilon) ** ring.alpha
        fresh = indices >= self.taken - self.capacity
        slots = indices % self.capacity
        self._priorities[slots] = torch.where(fresh, priorities, self._priorities[slots])
        self._top = max(self._top, float(priorities.max()))
