"""The segment of an engine's native door, and the pipe that wakes the engine."""

from __future__ import annotations

import os
from pathlib import Path

from jurybox.protocol.descriptors import exhausted, remedy
from jurybox.protocol.errors import SharedMemoryError, TooManyFiles
from jurybox.protocol.segment import WAKE, Segment, directory


def wake_path(name: str) -> Path:
    """The pipe beside the bell's segment."""
    return directory() / f"{name}{WAKE}"


class Bell:
    """A bell's memory and its pipe; made by the supervisor for one life of one engine, attached by everybody else.

    Attributes:
        segment: native/doorbell.hpp says what is in it.
        pipe: descriptor: the engine reads from it, clients write to it.
    """

    def __init__(self, segment: Segment, pipe: int) -> None:
        self.segment = segment
        self.pipe = pipe

    @classmethod
    def create(cls, name: str, size: int) -> Bell:
        """Make segment and pipe. Raises SharedMemoryError where there is no room, TooManyFiles as Segment.create."""
        segment = Segment.create(name, size)
        try:
            os.mkfifo(wake_path(name), 0o600)
        except OSError as error:
            segment.close()
            segment.unlink()
            raise SharedMemoryError(f"cannot make the pipe {wake_path(name)}: {error.strerror}") from error
        return cls(segment, -1)

    @classmethod
    def attach(cls, name: str) -> Bell:
        """Map the segment and open the pipe, without waiting for its other end.

        Raises:
            SharedMemoryError: they are not there (any more); TooManyFiles: this process may open no more.
        """
        segment = Segment.attach(name)
        try:
            return cls(segment, os.open(wake_path(name), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            segment.close()
            if exhausted(error):
                raise TooManyFiles(f"the pipe of {name} cannot be opened: {remedy()}") from error
            raise SharedMemoryError(f"the pipe of {name} cannot be opened: {error.strerror}") from error

    def close(self) -> None:
        """Let go; the owner also removes both."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
        self.segment.close()
        if self.segment.owned:
            self.segment.unlink()
            wake_path(self.segment.name).unlink(missing_ok=True)
