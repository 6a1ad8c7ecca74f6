"""Runs a server: prepares its folder, locks its address, sweeps old segments, runs the supervisor, cleans up.

A dry run is a server of its own, with an address in a folder of its own, so that it can run beside the one that serves.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from jurybox.protocol.address import ipc_path, prepare_folder, where_to
from jurybox.protocol.descriptors import raise_limit
from jurybox.protocol.errors import Error, Refused
from jurybox.protocol.segment import sweep
from jurybox.server.logs import configure
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.endpoints import CannotListen, listen
from jurybox.server.supervisor.control import Events
from jurybox.server.supervisor.supervisor import Supervisor

_DYING = 2.0  # seconds to wait for the address of a server that has just been killed
COULD_NOT_START = 3


class AddressTaken(Error):
    """Another server holds the address."""


def run(settings: Configuration, *, dry_run: bool = False) -> int:
    """Serve until a signal arrives, and return the exit status: 0, 1, 3 or 4.

    With `dry_run`, load and warm up every model, log what would be used, and stop; another server may serve meanwhile.
    """
    raise_limit()  # every client takes file descriptors; the limit changes for this process only
    if dry_run:
        with tempfile.TemporaryDirectory(prefix="jurybox-dry-run-") as folder:
            return _served(_rehearsal(settings, Path(folder)), shown=settings)
    return _served(settings)


def _served(settings: Configuration, shown: Configuration | None = None) -> int:
    server = settings.server
    events = Events()
    log = configure("supervisor", server.log_level, server.log_format, keep=events.keep)
    try:
        lock = _hold_address(server.address, shared=server.shared_folder)
    except (Error, OSError) as error:
        log.error("could not start", error=str(error))
        return COULD_NOT_START
    try:
        if stale := sweep():
            log.warning("removed shared memory of dead owners", segments=len(stale))
        with _Signals() as signals:
            try:
                require_free(settings)
                supervisor = Supervisor(settings, signals.socket, log, events)
            except (Error, OSError) as error:
                log.error("could not start", error=str(error))
                return COULD_NOT_START
            return supervisor.run(shown)
    finally:
        if lock is not None:
            os.close(lock)


def _doors(settings: Configuration) -> Iterator[tuple[str, str]]:
    """Yield the setting and the "host:port" of every port of the server."""
    server = settings.server
    yield from (("server.http", server.http), ("server.grpc", server.grpc), ("server.tcp", server.tcp))
    yield from ((f"dialects.{name}.port", one.listen) for name, one in settings.dialects.items())
    yield from ((f"robots.{name}.listen", one.listen) for name, one in settings.robots.items())


def require_free(settings: Configuration) -> None:
    """Check that the server's ports are free before models are loaded, which may take minutes.

    A port may still belong to a server that has just been killed, so a taken one gets a moment.

    Raises:
        CannotListen: a port is in use, or its host is not one of this machine.
    """
    until = time.monotonic() + _DYING
    for setting, where in _doors(settings):
        while where:
            try:
                listen(where, setting).close()
            except CannotListen as error:
                cause = error.__cause__
                if isinstance(cause, socket.gaierror) and setting == "server.tcp":
                    break  # the name of a network interface, which libzmq knows
                if getattr(cause, "errno", None) != errno.EADDRINUSE or time.monotonic() > until:
                    raise
                time.sleep(0.05)
            else:
                break


def _rehearsal(settings: Configuration, folder: Path) -> Configuration:
    """Return the settings of a server beside the one that may serve: with an address in `folder` and free ports.

    It saves no weights, because the other server holds their folders.
    """
    server = settings.server
    doors = {door: _any_port(where) for door in ("http", "grpc", "tcp") if (where := getattr(server, door))}
    own = {
        "server": server.model_copy(update={"address": f"ipc://{folder}/engine", **doors}),
        "robots": {n: one.model_copy(update={"listen": _any_port(one.listen)}) for n, one in settings.robots.items()},
        "dialects": {
            name: one if one.port is None else one.model_copy(update={"port": 0})
            for name, one in settings.dialects.items()
        },
        "models": {name: one.model_copy(update={"save_dir": None}) for name, one in settings.models.items()},
    }
    return settings.model_copy(update=own)


def _any_port(where: str) -> str:
    return f"{where.rpartition(':')[0]}:0"


def _hold_address(address: str, *, shared: bool = False) -> int | None:
    """Lock the address while this server is alive, so that a second one cannot take over its socket."""
    path = ipc_path(address)
    if path is None:
        return None
    prepare_folder(path.parent, shared=shared)
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
    """SIGTERM and SIGINT as bytes on a socket: the handlers do nothing else, so they cannot deadlock.

    Afterwards both are ignored. The process then only returns its status, which another signal would replace.
    """

    def __enter__(self) -> _Signals:
        self.socket, self._theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._theirs.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._handle(lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle(signal.SIG_IGN)
        signal.set_wakeup_fd(self._wakeup)
        self.socket.close()
        self._theirs.close()

    @staticmethod
    def _handle(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handler)
