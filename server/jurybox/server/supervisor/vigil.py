"""Which children hang: they live and do not do what they are there for.

Time in which the supervisor itself did not run (stopped, a paused container, a machine without a free core) is held
against nobody: then the others may not have run either, and to kill them would make a pause an outage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jurybox.protocol.board import Board
from jurybox.server.supervisor.child import Child

_AHEAD = 1.0  # seconds; `now` was read a moment before the beats are
_AWAY = 2.0  # seconds between two looks from which on the supervisor was away


class Vigil:
    """Looks at children several times a second.

    Args:
        board: on which engines show their heartbeats, ns of CLOCK_MONOTONIC.
        silence: seconds without a sign of life after which a serving child hangs.
        patience: seconds from its start after which a child that does not serve hangs.
        now: seconds of CLOCK_MONOTONIC, as later for `hanging`.
    """

    def __init__(self, board: Board, silence: float, patience: float, now: float) -> None:
        self._board = board
        self._silence = silence
        self._patience = patience
        self._beats = [0.0] * len(board.engines)  # seconds of CLOCK_MONOTONIC
        self._looked = now
        self._since = now  # when the supervisor came back last

    def hanging(self, engines: Sequence[Child], edges: Sequence[Child], now: float) -> Iterator[tuple[Child, str]]:
        """Those that hang, each with what is the matter."""
        if now - self._looked > _AWAY:
            self._since = now
        self._looked = now
        # Other processes can write to the board: a beat goes neither back nor beyond now.
        shown = [int(beat) / 1e9 for beat in self._board.engines["heartbeat"]]
        self._beats = beats = [
            beat if last <= beat <= now + _AHEAD else last for last, beat in zip(self._beats, shown, strict=True)
        ]
        for child, heard in [*zip(engines, beats, strict=True), *((edge, edge.heard_at) for edge in edges)]:
            silent = now - max(heard, self._since)
            waited = now - max(child.started_at, self._since)
            if child.alive and child.serving and silent > self._silence:
                yield child, f"no sign of life for {silent:.1f} s"
            elif child.alive and not child.serving and waited > self._patience:
                yield child, f"does not serve {waited:.1f} s after its start"
