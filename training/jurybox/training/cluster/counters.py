"""The scoreboard of a run, copied between machines.

Every record has one writer, so a copy needs no merging rule but this: whoever has the role's process has the role's
record, the orchestrator has the orders. Clocks of two machines differ: a copy says what its own read when it was made,
and moments are moved by the difference (and so seem younger by the time that the copy travelled).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from jurybox.training.runtime.scoreboard import Scoreboard, Told, Word

_MOMENTS = [Word.HEARTBEAT, Word.WAITS_SINCE, Word.READY_AT, Word.MOVED_AT]
_ORDER_MOMENTS = [Told.STARTED_AT]


@dataclass(frozen=True, slots=True)
class Counters:
    """Records of some roles at one moment.

    Attributes:
        clock: nanoseconds of the machine's CLOCK_MONOTONIC when they were read.
        roles: (n,) their numbers.
        records: (n, 32) int64, what roles say.
        orders: (n, 8) int64, what they are told; empty where only records travel.
    """

    clock: int
    roles: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64]
    orders: npt.NDArray[np.int64]

    @classmethod
    def of(cls, scoreboard: Scoreboard, roles: Collection[int], *, orders: bool) -> Counters:
        """What `scoreboard` shows of these roles now."""
        numbers = np.array(sorted(roles), np.int64)
        told = scoreboard.told[numbers] if orders else np.empty((0, scoreboard.told.shape[1]), np.int64)
        return cls(time.monotonic_ns(), numbers, scoreboard.records[numbers], told)

    def unfinished(self) -> Counters:
        """The same, but no learner is done yet: its last publication is still on its way to where this goes."""
        records = self.records.copy()
        records[:, Word.DONE] = 0
        return replace(self, records=records)

    def write(self, scoreboard: Scoreboard, roles: Collection[int], *, orders: bool, life: bool = False) -> None:
        """Put the records of those among `roles` on another machine's scoreboard.

        Args:
            orders: put the orders of all that came, too.
            life: leave out a record that an earlier life of its role wrote.
        """
        shift = time.monotonic_ns() - self.clock
        chosen = np.isin(self.roles, np.fromiter(roles, np.int64, len(roles)))
        if life:
            chosen &= self.records[:, Word.LIFE] == scoreboard.told[self.roles, Told.LIFE]
        records = self.records[chosen].copy()
        moments = records[:, _MOMENTS]
        records[:, _MOMENTS] = np.where(moments > 0, moments + shift, moments)
        scoreboard.records[self.roles[chosen]] = records
        if orders:
            told = self.orders.copy()
            moments = told[:, _ORDER_MOMENTS]
            told[:, _ORDER_MOMENTS] = np.where(moments > 0, moments + shift, moments)
            scoreboard.told[self.roles] = told
