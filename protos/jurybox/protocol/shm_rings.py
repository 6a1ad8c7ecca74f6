"""The segment of an engine's shm transport, and the pipe that wakes the engine."""

from __future__ import annotations

import os

from jurybox.protocol.errors import SharedMemoryError
from jurybox.protocol.segment import Segment


class ShmRings:
    """A ring segment's memory and its pipe.

    The supervisor creates them for one incarnation of one engine (`create_rings` of its SegmentServer); engine and
    clients attach.

    Attributes:
        segment: the segment; native/serving/shm_rings.hpp defines its contents.
        pipe: the descriptor that the engine reads and clients write; -1 in the owner, which does neither.
    """

    def __init__(self, segment: Segment, pipe: int) -> None:
        self.segment = segment
        self.pipe = pipe

    @classmethod
    def attach(cls, name: str) -> ShmRings:
        """Map the segment and receive the pipe.

        Raises:
            SharedMemoryError: they do not exist, or not any more.
            TooManyFiles: this process has too many files open.
        """
        segment, pipes = Segment.attach_with(name)
        if len(pipes) != 1:
            segment.close()
            for pipe in pipes:
                os.close(pipe)
            raise SharedMemoryError(f"{name} is no rings: {len(pipes)} pipes came with it, expected 1")
        return cls(segment, pipes[0])

    def close(self) -> None:
        """Close segment and pipe; the owner also removes them."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
        self.segment.release()
