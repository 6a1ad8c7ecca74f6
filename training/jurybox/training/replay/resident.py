"""A replay that lives in a device's memory: rows go there once, and every draw is made there.

The shared replay is the way in: actors of any process write into it, `refresh` brings what is new to the device, in
the form in which it is stored (planes as bits stay bits), and `sample` draws, gathers, widens and links rows there
without touching the host. The shared replay may be small where it blocks or drops when full: `refresh` then gives
its slots back to the writers, so nothing is lost. One that overwrites keeps its rows, and what it overwrites before
a refresh is missed (and counted).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from jurybox import native
from jurybox.protocol.errors import Refused, SpecMismatch
from jurybox.training.replay.errors import NotEnoughRows
from jurybox.training.replay.options import Windows
from jurybox.training.replay.part import Part
from jurybox.training.replay.resident_rows import ENDED, FIRST, NOT_YET, UNKNOWN, Rows

# Rows travel in pieces of this size, through one page-locked buffer.
_PIECE_BYTES = 8 << 20
# So long a reserved row may take to be written before it is given up: its writer was killed in the midst of it.
_PATIENCE = 1.0
_TRIES = 100
_PLAIN = Windows()


class Resident:
    """Up to `capacity` rows of a replay on a device; belongs to one thread. Made by `Replay.resident`.

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
        self.taken = 0
        self.missed = 0
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
        self._next = int(self._part.ring.tail)  # tickets below it have been looked at
        self._late: dict[int, float] = {}  # tickets whose row was not whole then, and since when
        self._open: dict[int, int] = {}  # tickets whose episode went on then, and the row's position
        # Where the rows that the shared replay still holds went: ticket and position by slot.
        self._ticket_at = np.full(layout.capacity, -1, np.int64)
        self._position_at = np.full(layout.capacity, -1, np.int64)
        size = layout.slot.size
        piece = min(layout.capacity, capacity, max(1, _PIECE_BYTES // size))
        self._staging = torch.empty((piece, size), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self._links = np.zeros((piece, 16), np.uint8) if layout.episodes is not None else None
        self._priorities = (
            torch.zeros(capacity, dtype=torch.float64, device=self.device) if layout.prioritized else None
        )
        self._top = 1.0

    def __len__(self) -> int:
        return min(self.taken, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        extra = 0 if self._priorities is None else self._priorities.nbytes
        return self.rows.nbytes + extra

    # ---- coming in

    def refresh(self) -> int:
        """Bring the rows that were added since the last call; how many came."""
        ring, before = self._part.ring, self.taken
        newest = int(ring.reserved)
        oldest = max(self._next, int(ring.tail), newest - self._layout.capacity)
        self.missed += oldest - self._next
        for first, n in self._runs(oldest, newest):
            self._take(first, n, newest)
        self._next = newest
        self._give_up(newest)
        self._close_episodes()
        if self._layout.full != "overwrite":
            # What is still being written stays, and all behind it.
            upto = min(self._late, default=newest)
            self._replay.discard(max(0, upto - max(int(ring.tail), newest - self._layout.capacity)))
        return self.taken - before

    def _runs(self, oldest: int, newest: int) -> Iterator[tuple[int, int]]:
        """Runs (ticket, length) of slots side by side: what was late, then what is new."""
        for ticket in sorted(self._late):
            yield ticket, 1
        longest = len(self._staging)
        while oldest < newest:
            n = min(newest - oldest, longest, self._layout.capacity - oldest % self._layout.capacity)
            yield oldest, n
            oldest += n

    def _take(self, first: int, n: int, newest: int) -> None:
        host = self._layout.capacity
        slot = first % host
        staged = self._staging[:n].numpy()
        links = None if self._links is None else self._links.reshape(-1)
        native.replay_snapshot(self._part.ring, slot, staged.reshape(-1), newest, links)
        tickets = np.arange(first, first + n)
        whole = staged[:, :8].copy().view(np.uint64)[:, 0] == (2 * tickets + 2).astype(np.uint64)
        now = time.monotonic()
        for ticket in tickets[~whole].tolist():
            self._late.setdefault(ticket, now)
        tickets = tickets[whole]
        count = len(tickets)
        for ticket in tickets.tolist() if self._late else ():
            self._late.pop(ticket, None)
        if count == 0:
            return
        if count < n:
            staged[:count] = staged[whole]
        positions = np.arange(self.taken, self.taken + count)
        self._ticket_at[tickets % host], self._position_at[tickets % host] = tickets, positions
        self.rows.put(positions, self._staging[:count])
        if self._links is not None:
            self._link(tickets, positions, self._links[:n][whole].view(np.uint64))
        if self._priorities is not None:
            self._priorities[torch.from_numpy(positions % self.capacity).to(self.device)] = self._top
        self.taken += count

    def _link(
        self, tickets: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], words: npt.NDArray[np.uint64]
    ) -> None:
        host = self._layout.capacity
        flags = (words[:, 0] & np.uint64(3)).astype(np.uint8)
        earlier = (words[:, 0] >> np.uint64(2)).astype(np.int64) - 1
        known = (earlier >= 0) & (self._ticket_at[earlier % host] == earlier)
        before = np.where(earlier < 0, FIRST, np.where(known, self._position_at[earlier % host], UNKNOWN))
        ended = words[:, 1] == np.uint64(2**64 - 1)
        after = np.where(ended, ENDED, NOT_YET)
        self.rows.link(positions, before, after, flags)
        for ticket, position in zip(tickets[~ended].tolist(), positions[~ended].tolist(), strict=True):
            self._open[ticket] = position
        for ticket in earlier[known].tolist():
            self._open.pop(ticket, None)

    def _close_episodes(self) -> None:
        """Episodes that were going on when their newest row came may have ended since."""
        if self._part.links is None or not self._open:
            return
        host = self._layout.capacity
        tickets = np.fromiter(self._open, np.int64, len(self._open))
        after = self._part.links.view(np.uint64)[tickets % host, 1]
        there = self._part.sequences[tickets % host] == (2 * tickets + 2).astype(np.uint64)
        closed = there & (after == np.uint64(2**64 - 1))
        self.rows.end(np.array([self._open[ticket] for ticket in tickets[closed].tolist()], np.int64))
        for ticket in tickets[closed | ~there].tolist():
            del self._open[ticket]

    def _give_up(self, newest: int) -> None:
        for ticket, since in list(self._late.items()):
            if ticket < newest - self._layout.capacity or time.monotonic() - since > _PATIENCE:
                del self._late[ticket]
                self.missed += 1

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
            drawn = torch.where(unfit, self._candidates(n, prioritized=prioritized), drawn)
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
