"""A run's timeline: when each role worked and when it waited, and for what. A report draws it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jurybox.training.runlog import write_atomically
from jurybox.training.runtime.board import Board, Subject, Word


@dataclass(frozen=True, slots=True)
class Lane:
    """One role.

    Attributes:
        role: its name.
        busy: part of all its running time in which it did not wait, 0 to 1.
        intervals: (start, end, what): seconds from the timeline's beginning; "" for work, else what it waited for.
            The newest ones; waits below a tenth of a millisecond are counted in `busy` and not drawn.
    """

    role: str
    busy: float
    intervals: Sequence[tuple[float, float, str]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """All roles on one clock."""

    lanes: tuple[Lane, ...]

    @classmethod
    def of(cls, board: Board) -> Timeline:
        """What is on the board now."""
        everything = [board.intervals(number) for number in range(len(board.named.roles))]
        first = min((int(rows["start"][0]) for rows in everything if len(rows)), default=0)
        lanes = []
        for number, rows in enumerate(everything):
            words = board.words[number]
            share = words[Word.BUSY] / max(1, words[Word.BUSY] + words[Word.WAITED])
            intervals = [
                (
                    round((int(row["start"]) - first) / 1e9, 5),
                    round((int(row["end"]) - first) / 1e9, 5),
                    Subject(int(row["subject"])).name.lower() if row["subject"] else "",
                )
                for row in rows
            ]
            lanes.append(Lane(board.named.roles[number][0], share, intervals))
        return cls(tuple(lanes))

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        text = json.dumps([{"role": lane.role, "busy": lane.busy, "intervals": lane.intervals} for lane in self.lanes])
        write_atomically(path, text)

    @classmethod
    def read(cls, path: Path) -> Timeline:
        """What `save` wrote."""
        said = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            tuple(
                Lane(lane["role"], lane["busy"], [(start, end, what) for start, end, what in lane["intervals"]])
                for lane in said
            )
        )
