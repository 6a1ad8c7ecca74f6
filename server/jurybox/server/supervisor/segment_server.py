"""The shared memory of a server: sealed, without files, passed to clients over a Unix socket.

Any process of the same user can truncate a file in /dev/shm; every process that has it mapped then gets a SIGBUS when
it accesses a page beyond the new end. Memory from memfd_create(2) with the seals F_SEAL_SHRINK and F_SEAL_GROW keeps
its size, whichever processes have a descriptor of it (Linux 3.17). It has no name in any file system, so nothing is
left to clean up, and the size of /dev/shm does not limit it: the limit is the memory of the machine or the container.

Only a Unix socket has a name, in the folder where files of segments would be. It has mode 0600 and passes descriptors
to processes of the same user and of root. A client sends one packet, ``r`` or ``w`` and the segment's name, and gets
one back: a status byte, and with it the descriptors. The server opens them anew for each client, because locks (those
of leases, and the one that shows that the server is alive) belong to an open file description: a duplicate of the
server's own descriptor would keep its lock after the server's death.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import threading
import time
from collections import OrderedDict
from pathlib import Path

from jurybox.protocol.descriptors import SocketPath, exhausted, peer_user, remedy
from jurybox.protocol.errors import SharedMemoryError, TooManyFiles
from jurybox.protocol.forks import Closing
from jurybox.protocol.segment import (
    EXHAUSTED,
    HANDED,
    MOST_NAME,
    OWNER_LOCK,
    UNFINISHED,
    UNKNOWN,
    Segment,
    segment_name,
    socket_of,
    try_lock,
)
from jurybox.protocol.shm_rings import ShmRings
from jurybox.server.memory import MORE, available_memory

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_BACKLOG = 1024
_SILENT = 2.0  # seconds a client may be connected without sending a request
_MOST_SILENT = 64  # such clients at a time; beyond that the oldest connection is closed
_TURN = 64  # connections accepted in one turn
_BREATH = 0.01  # seconds of sleep after a full turn, so that a flood of connections does not hold the GIL
_MARGIN = 16 << 20  # bytes that are left for other processes
_MIB = 1 << 20


class SegmentServer(Closing):
    """The segments of one owner, and a thread that passes them to clients. Thread-safe.

    Example:
        >>> with SegmentServer("0123abcd") as server:
        ...     segment = server.create(segment_name("0123abcd", "arena", 1), 1 << 20)
        ...     mapped = Segment.attach(segment.name)  # in any process of this user

    Args:
        owner_id: the owner's part of the segments' names.

    Raises:
        SharedMemoryError: the socket cannot be created in `segment.directory()`.
        TooManyFiles: this process may open no more files.
    """

    def __init__(self, owner_id: str) -> None:
        self._path = socket_of(segment_name(owner_id, "any"))
        self._lock = threading.Lock()
        self._held: dict[str, list[int]] = {}  # descriptors for clients to reopen; without locks
        self._sizes: dict[str, int] = {}
        self._users = {os.getuid(), 0}
        try:
            self._wake, self._stop = socket.socketpair()
            try:
                self._listener = _listen(self._path)
            except OSError:
                self._wake.close()
                self._stop.close()
                raise
        except OSError as error:
            expected = "; expected a folder that this process may write to (elsewhere: JURYBOX_SHM_DIR)"
            raise _cannot(f"create the socket {self._path}", error, expected) from error
        self._thread = threading.Thread(target=self._run, name="segments", daemon=True)
        self._thread.start()

    def create(self, name: str, size: int) -> Segment:
        """Create a sealed segment of `size` zeroed bytes, with all pages allocated.

        Raises:
            SharedMemoryError: there is not enough memory; the message says how much there is and what to change.
            TooManyFiles: this process may open no more files.
        """
        check_room(name, size)
        fds: list[int] = []
        try:
            fds.append(fd := os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.posix_fallocate(fd, 0, size)  # else a page that cannot be allocated later is a SIGBUS on access
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            try_lock(fd, OWNER_LOCK, shared=True)
            fds.append(own := os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
            segment = Segment(name, fd, size, owned=True, withdraw=self._withdraw)
        except OSError as error:
            for each in fds:
                os.close(each)
            raise _cannot(f"create shared memory {name} of {size} bytes", error) from error
        with self._lock:
            self._held[name], self._sizes[name] = [own], size
        return segment

    def create_rings(self, name: str, size: int) -> ShmRings:
        """Create a segment for an engine's shm transport, passed together with a pipe that wakes the engine.

        Raises:
            As `create`.
        """
        segment = self.create(name, size)
        try:
            # A client opens this end for reading and writing, so that it never writes to a pipe without a reader.
            reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            segment.release()
            raise _cannot(f"create the pipe of {name}", error) from error
        os.close(writing)
        with self._lock:
            self._held[name].append(reading)
        return ShmRings(segment, -1)

    def sizes(self) -> dict[str, int]:
        """Return the size of each segment in bytes, by name."""
        with self._lock:
            return dict(self._sizes)

    def close(self) -> None:
        """Stop serving; existing mappings stay valid."""
        if not self._thread.is_alive() and not self._held:
            return
        self._path.unlink(missing_ok=True)
        self._stop.close()
        self._thread.join()
        self._wake.close()
        self._listener.close()
        for name in list(self._held):
            self._withdraw(name)

    def _withdraw(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)
            for fd in self._held.pop(name, ()):
                os.close(fd)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        silent: OrderedDict[int, tuple[socket.socket, float]] = OrderedDict()

        def forget(fd: int) -> None:
            poll.unregister(fd)
            silent.pop(fd)[0].close()

        while True:
            ready = {fd for fd, _ in poll.poll(int(1000 * _SILENT) if silent else None)}
            if self._wake.fileno() in ready:
                for fd in list(silent):
                    forget(fd)
                return
            for fd in ready & silent.keys():
                self._answer(silent[fd][0])
                forget(fd)
            now = time.monotonic()
            while silent and next(iter(silent.values()))[1] < now:
                forget(next(iter(silent)))
            if self._listener.fileno() not in ready:
                continue
            for _ in range(_TURN):
                try:
                    connection = self._listener.accept()[0]
                except BlockingIOError:
                    break
                except OSError:  # no descriptor left: close the connections without a request
                    for fd in list(silent):
                        forget(fd)
                    time.sleep(_BREATH)
                    break
                if self._answer(connection):
                    connection.close()
                    continue
                if len(silent) >= _MOST_SILENT:
                    forget(next(iter(silent)))
                silent[connection.fileno()] = connection, now + _SILENT
                poll.register(connection, select.POLLIN)
            else:
                time.sleep(_BREATH)

    def _answer(self, connection: socket.socket) -> bool:
        """Answer a client's request; return False if it has not sent one yet."""
        connection.setblocking(False)
        fds: list[int] = []
        try:
            if peer_user(connection) not in self._users:
                return True
            request = connection.recv(1 + MOST_NAME)
            status = UNKNOWN
            try:
                if fds := self._opened(os.fsdecode(request[1:]), writable=request[:1] == b"w"):
                    status = HANDED
            except OSError:
                status = EXHAUSTED
            socket.send_fds(connection, [status], fds)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the client is gone
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _opened(self, name: str, *, writable: bool) -> list[int]:
        """Open new descriptors of a segment, each with its own open file description."""
        fds: list[int] = []
        try:
            with self._lock:
                for number, fd in enumerate(self._held.get(name, ())):
                    # Clients that only watch get read-only memory; a pipe is always opened for reading and writing.
                    mode = os.O_RDWR if writable or number else os.O_RDONLY
                    fds.append(os.open(f"/proc/self/fd/{fd}", mode | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds


def _cannot(what: str, error: OSError, expected: str = "") -> SharedMemoryError | TooManyFiles:
    """Return the error to raise for one of the system's."""
    if exhausted(error):
        return TooManyFiles(f"cannot {what}: {remedy()}")
    return SharedMemoryError(f"cannot {what}: {error.strerror}{expected}")


def check_room(name: str, size: int) -> None:
    """Refuse a segment that would use up the memory of the machine or the container.

    Raises:
        SharedMemoryError: the segment does not fit; the message says how much memory there is and what to change.
    """
    left, where = available_memory()
    if size + _MARGIN > left:
        raise SharedMemoryError(
            f"shared memory {name} needs {size / _MIB:.1f} MiB, {max(0, left) / _MIB:.1f} MiB are left of {where}; ask "
            f"for fewer rows, stop what else takes memory, or {MORE}"
        )


def _listen(path: Path) -> socket.socket:
    """Create a socket that listens before it is renamed to `path`.

    So a socket that refuses connections belongs to a dead server.
    """
    temporary = path.with_name(path.name.removesuffix(path.suffix) + UNFINISHED)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.fchmod(listener.fileno(), 0o600)  # sets the mode of the file that bind creates, independent of the umask
        with SocketPath(temporary) as short:
            listener.bind(short)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        temporary.rename(path)
    except OSError:
        listener.close()
        temporary.unlink(missing_ok=True)
        raise
    return listener
