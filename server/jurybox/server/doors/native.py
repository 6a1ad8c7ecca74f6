"""The native door: tickets and answers through shared memory, on one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.bell import Bell
from jurybox.protocol.errors import plain


class NativeDoor:
    """The engine's side of its bell.

    Args:
        segment: name of the bell's segment.
        others: descriptors that also end `wait`.
        epoch: of this life of the engine; tickets for another are dropped.
        spin_us: how long `wait` may spin before it sleeps; what is useful below that it finds out itself.
    """

    number = 0

    def __init__(self, segment: str, others: Sequence[int], epoch: int, spin_us: int) -> None:
        self._memory = Bell.attach(segment)
        self._bell = native.BellEngine(
            self._memory.segment.array(np.uint8, (native.BELL_BYTES,)),
            [self._memory.pipe, *others],
            epoch,
            spin_us * 1000,
        )
        self.collect = self._bell.collect  # as Door.collect
        self.wait = self._bell.wait  # seconds
        self.pause = self._bell.pause  # seconds, tickets
        self.mend = self._bell.mend  # gives how many lanes were overwritten
        self.renew = self._bell.renew  # epoch

    def reply(self, tickets: NDArray[Any], code: int, version: int, message: str) -> None:
        """As Door.reply. An answer to a client that never reads is dropped."""
        self._bell.reply(tickets, code, version, plain(message) if message else "")

    def close(self) -> None:
        self._memory.close()
