"""Writers that know their episodes: one env after another row, or many envs side by side."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from jurybox import native
from jurybox.protocol import forks
from jurybox.training.replay.part import Part


class Adding(Protocol):
    """The fields of one row or of n, by name: numbers, NumPy arrays or CPU tensors, strided or not.

    Returns:
        The rows written: fewer than came (0 of 1) where the replay is full and drops.

    Raises:
        SpecMismatch: a field is missing, unknown, or of another shape or kind of dtype.
        Timeout: full="block" or the rate limiter let nothing in for `timeout` seconds.
    """

    def __call__(self, **fields: Any) -> int: ...


class Streams:
    """`n` independent runs of rows, each linked to its own predecessor; belongs to one thread of one process.

    A replay's own `add` is one such stream. Envs side by side want one each: otherwise their rows would be taken
    for one episode. In a forked child they begin anew: no row of a child's follows one of its parent's.
    """

    def __init__(self, part: Part, n: int, *, group: bool) -> None:
        self._native = native.ReplayStreams(part.ring, n, group)
        self._fields = part.layout.fields
        self.add: Adding = self._native.add
        self.extend: Adding = self._native.extend
        forks.register(self)

    def _after_fork_in_child(self) -> None:
        self._native.after_fork()

    def __len__(self) -> int:
        return len(self._native)

    def end(self, which: int = 0, **final: Any) -> None:
        """The episode of stream `which` is over.

        Args:
            final: the observation after its last step, by field (needed to bootstrap from an episode that was
                cut); fields that are left out are kept as zeroes. It may also be given when the last row's own
                `terminated` or `truncated` has already ended the episode.
        """
        if not final:
            self._native.end(which)
            return
        rest = {name: np.zeros(spec.shape, spec.dtype) for name, spec in self._fields.items() if name not in final}
        self._native.final(which, **final, **rest)
