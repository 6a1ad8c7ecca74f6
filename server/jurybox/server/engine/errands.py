"""What other threads want done in the loop's thread, between two turns."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Errands:
    """Actions in order, and a file that is readable while there are any.

    Args:
        failed: told what an action raised; the others are run all the same.
    """

    def __init__(self, failed: Callable[[BaseException], None] | None = None) -> None:
        self._failed = failed
        self._actions: list[Callable[[], None]] = []
        # List and file change together: apart, the file could be found empty, or stay readable for nothing.
        self._both = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._wake

    def put(self, action: Callable[[], None]) -> None:
        """From any thread: have an action run, soon."""
        with self._both:
            self._actions.append(action)
            os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """In the loop's thread: run what there is. Next to nothing where there is nothing."""
        if not self._actions:
            return
        with self._both:
            actions, self._actions = self._actions, []
            os.eventfd_read(self._wake)
        for action in actions:
            try:
                action()
            except BaseException as error:
                if self._failed is None:
                    raise
                self._failed(error)

    def close(self) -> None:
        """Close the file."""
        os.close(self._wake)
