"""Streams of a device: work queued on one runs in order, work on two at the same time.

The CPU has none. There everything is done when it has been said, and the same code runs, which is how tests without a
GPU reach it.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch


class Mark:
    """A point in a stream's work."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether the work up to here is done."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until it is."""
        if self.event is not None:
            self.event.synchronize()


class Stream:
    """A queue of work on a device; in a ``with``, what torch is asked to do goes there."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def running(self) -> AbstractContextManager[object]:
        """Queue what is done inside."""
        return torch.cuda.stream(self._cuda) if self._cuda is not None else contextlib.nullcontext()

    def after(self, mark: Mark) -> None:
        """What is queued from now on runs after that point of another stream."""
        if self._cuda is not None and mark.event is not None:
            self._cuda.wait_event(mark.event)

    def mark(self) -> Mark:
        """The end of what is queued now."""
        if self._cuda is None:
            return Mark(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._cuda)
        return Mark(event)
