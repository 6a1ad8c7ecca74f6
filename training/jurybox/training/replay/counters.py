"""What happened to a replay, counted in its shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jurybox.training.replay.part import Part


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened to a replay since it was made, all processes together.

    Attributes:
        added: rows written, those of killed writers included.
        overwritten: rows that newer ones replaced (or that were discarded).
        dropped: rows that a full replay refused.
        retried: slots that were passed by, because another writer was in them or a killed one had been.
        sampled: rows handed out.
        redrawn: draws thrown away, because their row was being written or did not fit what was asked for.
        stale_priorities: priorities that came after their row was overwritten.
    """

    added: int
    overwritten: int
    dropped: int
    retried: int
    sampled: int
    redrawn: int
    stale_priorities: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Counters:
        """The sums over a replay's parts."""
        reserved, retried, dropped, stale, sampled, redrawn = (
            sum(values) for values in zip(*(part.ring.counters() for part in parts), strict=True)
        )
        added = reserved - retried
        there = sum(int(part.ring.size) for part in parts)
        return cls(added, max(0, added - there), dropped, retried, sampled, redrawn, stale)
