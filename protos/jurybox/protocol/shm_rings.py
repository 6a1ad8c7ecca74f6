"""The segment of an engine's shm transport, and the pipe that wakes the engine."""

from __future__ import annotations

import os

from jurybox.protocol.descriptors import exhausted, remedy
from jurybox.protocol.errors import SharedMemoryError, TooManyFiles
from jurybox.protocol.segment import Segment
from jurybox.protocol.segment_server import SegmentServer


class ShmRings:
    """A ring segment's memory and its pipe; made by the supervisor for one life of one engine, attached by everybody
    else.

    Attributes:
        segment: native/serving/shm_rings.hpp says what is in it.
        pipe: descriptor: the engine reads from it, clients write to it; -1 with its owner, who does neither.
    """

    def __init__(self, segment: Segment, pipe: int) -> None:
        self.segment = segment
        self.pipe = pipe

    @classmethod
    def create(cls, server: SegmentServer, name: str, size: int) -> ShmRings:
        """Make segment and pipe. Raises SharedMemoryError where there is no room, TooManyFiles as Segment.create."""
        segment = server.create(name, size)
        try:
            # Its users get both ends in one descriptor, so that nobody writes to a pipe without a reader.
            reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            segment.close()
            segment.unlink()
            if exhausted(error):
                raise TooManyFiles(f"cannot make the pipe of {name}: {remedy()}") from error
            raise SharedMemoryError(f"cannot make the pipe of {name}: {error.strerror}") from error
        os.close(writing)
        server.add(name, reading)
        return cls(segment, -1)

    @classmethod
    def attach(cls, name: str) -> ShmRings:
        """Map the segment and take the pipe.

        Raises:
            SharedMemoryError: they are not there (any more); TooManyFiles: this process may open no more.
        """
        segment, pipes = Segment.attach_with(name)
        if len(pipes) != 1:
            segment.close()
            raise SharedMemoryError(f"{name} is no rings: {len(pipes)} pipes came with it, expected 1")
        return cls(segment, pipes[0])

    def close(self) -> None:
        """Let go; the owner also removes both."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
        self.segment.close()
        if self.segment.owned:
            self.segment.unlink()
