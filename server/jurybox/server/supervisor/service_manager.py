"""Tells systemd how the server is: ready, stopping, alive (the protocol of sd_notify(3), a datagram a message)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping


class ServiceManager:
    """Speaks where NOTIFY_SOCKET names somebody who listens; says nothing elsewhere.

    Args:
        environ: with NOTIFY_SOCKET, a path or "@" and an abstract name, and WATCHDOG_USEC, microseconds of silence
            after which the manager kills the server.
        report: called with (event, fields) for what should be logged.
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
        self._every = int(environ.get("WATCHDOG_USEC") or 0) / 1e6 / 3
        self._report = report
        self._clock = clock
        self._next = 0.0

    def ready(self, status: str) -> None:
        """Requests are answered from now on; `status` is a line for whoever asks the manager."""
        self._tell(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """It was told to end, and does."""
        self._tell("STOPPING=1\nSTATUS=draining")

    def alive(self) -> None:
        """Call it often; it speaks three times within the silence that the manager bears."""
        if self._every and (now := self._clock()) >= self._next:
            self._next = now + self._every
            self._tell("WATCHDOG=1")

    def _tell(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as speaker:
                speaker.setblocking(False)
                speaker.sendto(message.encode(), self._address)
        except OSError as error:
            # It decides by what it does not hear; the server has clients to serve in any case.
            self._report("the service manager does not listen", address=self._address, error=str(error))
