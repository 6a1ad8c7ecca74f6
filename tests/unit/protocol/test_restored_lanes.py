"""Lanes that another process has overwritten, while they are written again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import segment_name


class Watched(np.ndarray[Any, np.dtype[Any]]):
    """The supervisor's own lanes: shows the leases that others see when it is read."""

    shown: Any = None
    seen: list[list[int]]

    def __array_finalize__(self, source: Any) -> None:
        self.shown, self.seen = getattr(source, "shown", None), getattr(source, "seen", [])

    def __getitem__(self, at: Any) -> Any:
        if self.shown is not None:
            self.seen.append(self.shown["lease"][:5].tolist())
        return super().__getitem__(at)


@pytest.mark.usefixtures("empty_shared_memory")
def test_a_lane_has_no_lease_while_its_other_words_are_written_again() -> None:
    board = Scoreboard.create(segment_name("t", "scoreboard"), 1, 1.7e9)
    try:
        for lane in (1, 3):
            board.own_lanes[lane] = board.lanes[lane] = (11 + lane, 1, 32, 8, 4321, 2, 0, 2)
        own = board.own_lanes.view(Watched)
        own.shown, own.seen = board.lanes, []
        board.own_lanes = own
        board.lanes["rows"][3] = 9999
        assert board.restore()
        assert own.seen == [[0, 12, 0, 0, 0]] * len(own.seen) and len(own.seen) > 1
        assert board.lanes[3].tolist() == (14, 1, 32, 8, 4321, 2, 0, 2)
        assert board.lanes["lease"][:5].tolist() == [0, 12, 0, 14, 0]
    finally:
        board.close()
