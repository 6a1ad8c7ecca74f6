"""A process that has imported what it needs and waits for the moment in which it is needed."""

from __future__ import annotations

import subprocess

from jurybox.protocol.lifeline import Lifeline, spawn

_AGAIN = 10.0  # seconds between two starts of one that does not stay


class Standby:
    """At most one such process, of any child that runs the same module in the same environment.

    Most of what a start takes is Python importing torch; a child that takes this one's place has that behind it.
    """

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        self._module = module
        self._environment = environment
        self._waiting: tuple[subprocess.Popen[bytes], Lifeline] | None = None
        self._start_at = 0.0

    def look(self, now: float) -> None:
        """Start one where none waits.

        Raises:
            OSError: memory or files are short. It is tried again ten seconds later.
        """
        if self._waiting is not None and self._waiting[0].poll() is not None:
            self.close()
        if self._waiting is None and now >= self._start_at:
            self._start_at = now + _AGAIN
            self._waiting = spawn(self._module, environment=self._environment)

    def take(self) -> tuple[subprocess.Popen[bytes], Lifeline] | None:
        """The one that waits, to be configured; None where there is none, or it has died."""
        taken, self._waiting = self._waiting, None
        if taken is not None and taken[0].poll() is not None:
            taken[1].close()
            return None
        if taken is not None:
            self._start_at = 0.0  # it did stay; the next one need not wait
        return taken

    def close(self) -> None:
        """End it."""
        if self._waiting is None:
            return
        process, lifeline = self._waiting
        self._waiting = None
        process.kill()
        process.wait()
        lifeline.close()
