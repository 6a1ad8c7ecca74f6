"""The segment of an engine's shm transport, and the pipe that wakes the engine."""

from __future__ import annotations

import os

from jurybox.protocol.errors import SharedMemoryError
from jurybox.protocol.segment import Segment


class ShmRings:
    """A ring segment's memory and its pipe. The supervisor makes them for one incarnation of one engine (`create_rings`
    of its SegmentServer); everybody else attaches.

    Attributes:
        segment: native/serving/shm_rings.hpp says what is in it.
        pipe: descriptor: the engine reads from it, clients write to it; -1 with its owner, who does neither.
    """

    def __init__(self, segment: Segment, pipe: int) -> None:
        self.segment = segment
        self.pipe = pipe

    @classmethod
    def attach(cls, name: str) -> ShmRings:
        """Map the segment and receive the pipe.

        Raises:
            SharedMemoryError: they are not there (any more); TooManyFiles: this process may open no more.
        """
        segment, pipes = Segment.attach_with(name)
        if len(pipes) != 1:
            segment.close()
            raise SharedMemoryError(f"{name} is no rings: {len(pipes)} pipes came with it, expected 1")
        return cls(segment, pipes[0])

    def close(self) -> None:
        """Close both; the owner also removes them."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
        self.segment.release()
