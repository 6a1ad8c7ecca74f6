"""Runs a server: prepares its folder, locks its address, sweeps old segments, runs the supervisor, cleans up."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import time
from pathlib import Path

from jurybox.protocol.address import ipc_path, prepare_folder, where_to
from jurybox.protocol.descriptors import raise_limit
from jurybox.protocol.errors import Error, Refused
from jurybox.protocol.segment import sweep
from jurybox.server.logs import configure
from jurybox.server.settings.config import Settings
from jurybox.server.supervisor.control import Events
from jurybox.server.supervisor.supervisor import Supervisor

_DYING = 2.0  # seconds to wait for the address of a server that has just been killed
COULD_NOT_START = 3


class AddressTaken(Error):
    """Another server holds the address."""


def run(settings: Settings, *, dry_run: bool = False) -> int:
    """Serve until a signal arrives, and return the exit status: 0, 1, 3 or 4.

    With `dry_run`, load and warm up every model, log the result, and stop.
    """
    raise_limit()  # every client takes file descriptors; the limit changes for this process only
    server = settings.server
    events = Events()
    log = configure("supervisor", server.log_level, server.log_format, keep=events.keep)
    try:
        lock = _hold_address(server.address)
    except (Error, OSError) as error:
        log.error("could not start", error=str(error))
        return COULD_NOT_START
    try:
        if stale := sweep():
            log.warning("removed shared memory of dead owners", segments=len(stale))
        with _Signals() as signals:
            try:
                supervisor = Supervisor(settings, signals.socket, log, events)
            except (Error, OSError) as error:
                log.error("could not start", error=str(error))
                return COULD_NOT_START
            return supervisor.run(dry_run=dry_run)
    finally:
        if lock is not None:
            os.close(lock)


def _hold_address(address: str) -> int | None:
    """Lock the address while this server is alive, so that a second one cannot take over its socket."""
    path = ipc_path(address)
    if path is None:
        return None
    prepare_folder(path.parent)
    lock_path = Path(f"{path}.lock")
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Refused(f"cannot write to {lock_path}: {error.strerror}. {where_to(path.parent)}") from error
    until = time.monotonic() + _DYING
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > until:
                os.close(fd)
                raise AddressTaken(
                    f"a server already runs at {address}: stop it, or start this one with another server.address"
                ) from error
            time.sleep(0.02)
        else:
            return fd


class _Signals:
    """SIGTERM and SIGINT as bytes on a socket: the handlers do nothing else, so they cannot deadlock."""

    def __enter__(self) -> _Signals:
        self.socket, self._theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._theirs.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.socket.close()
        self._theirs.close()
