"""Notifies systemd of the server's state: starting, ready, stopping, alive (sd_notify(3))."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping

from jurybox.protocol.errors import cut

_EVERY = 1.0  # seconds between two extensions of the start or stop time-out
_MORE = 30  # seconds by which each extends it, from when it is sent
_LAST = 0.5  # seconds that `close` waits until the last notifications can be sent
_LONGEST = 2000  # bytes of a message


class ServiceManager:
    """Sends notifications to NOTIFY_SOCKET; does nothing if it is not set.

    The manager's socket queues few datagrams, ten by default, and accepts no more while the manager is busy. State
    changes are kept and sent again until the socket accepts them; keep-alives that it does not accept are dropped.

    Args:
        report: called with (event, fields) for what should be logged.
        environ: with NOTIFY_SOCKET, a path or "@" and an abstract name, and WATCHDOG_USEC, microseconds without a
            keep-alive after which the manager kills the server. None: those of this process.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        report: Callable[..., None],
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        environ = os.environ if environ is None else environ
        name = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        self._every = _microseconds(environ.get("WATCHDOG_USEC")) / 3
        self._report = report
        self._clock = clock
        self._next = 0.0
        self._next_word = 0.0
        self._unheard: list[str] = []  # state changes that could not be sent yet, the oldest first
        self._failing = ""

    def starting(self, status: str) -> None:
        """Report progress and extend the start time-out; call it often while the server starts."""
        self._go_on(f"STATUS={status}")

    def ready(self, status: str) -> None:
        """Report that the server is ready; `status` is one line for the manager's status."""
        self._must_hear(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Report that the server is stopping."""
        self._must_hear("STOPPING=1\nSTATUS=draining")

    def draining(self) -> None:
        """Extend the stop time-out; call it often while the server drains."""
        self._go_on("STATUS=draining")

    def alive(self) -> None:
        """Send unsent notifications, and three keep-alives in each watchdog period; call it often."""
        if not self._said_all():
            return
        if self._every and (now := self._clock()) >= self._next:
            self._next = now + self._every
            self._say("WATCHDOG=1")

    def close(self) -> None:
        """Send unsent notifications, within half a second, and close."""
        until = self._clock() + _LAST
        while not self._said_all() and self._clock() < until:
            time.sleep(0.01)

    def _go_on(self, status: str) -> None:
        """Extend the time-out; otherwise the manager kills the server if its start or stop takes too long."""
        if self._said_all() and (now := self._clock()) >= self._next_word:
            self._next_word = now + _EVERY
            self._say(f"EXTEND_TIMEOUT_USEC={_MORE * 1_000_000}\n{status}")

    def _must_hear(self, message: str) -> None:
        self._unheard.append(message)
        self._said_all()

    def _said_all(self) -> bool:
        while self._unheard:
            if not self._say(self._unheard[0]):
                return False
            del self._unheard[0]
        return True

    def _say(self, message: str) -> bool:
        """Send a message; return False if the socket is full."""
        if not self._address:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as speaker:
                speaker.setblocking(False)
                speaker.sendto(cut(message, _LONGEST), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            # The manager acts on what it does not receive; the server goes on in any case.
            if self._failing != str(error):
                self._failing = str(error)
                self._report("the service manager does not listen", address=self._address, error=self._failing)
        return True


def _microseconds(text: str | None) -> float:
    """Convert microseconds to seconds; 0.0 for invalid text."""
    with contextlib.suppress(ValueError):
        return max(0, int(text or 0)) / 1e6
    return 0.0
