"""File descriptors: limits, error messages, and receiving descriptors from a server."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import time
from pathlib import Path

from jurybox.protocol.errors import TooManyFiles

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SUN_PATH = 107  # bytes of a socket's path, unix(7)
_MOST_FDS = 4  # descriptors in a reply
_SHORTEST = 0.005  # seconds to wait for a reply, even if no time is left


def exhausted(error: OSError) -> bool:
    """Return whether an error is EMFILE or ENFILE: too many open files in the process or on the machine."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def remedy() -> str:
    """Return this process's limit of open files and the remedy, as text."""
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return "this process has too many files open: close some"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process may have {soft} files open: close some, or raise the limit (ulimit -n 65536; "
        "systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536)"
    )


def require(count: int, purpose: str) -> None:
    """Check that `count` descriptors are free: libzmq aborts the process if they run out.

    Raises:
        TooManyFiles: fewer are left.
    """
    if not hasattr(os, "eventfd"):
        return  # not Linux: there is no equally cheap test
    taken: list[int] = []
    try:
        for _ in range(count):
            taken.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        if not exhausted(error):
            raise
        raise TooManyFiles(f"{purpose} takes {count} files, {len(taken)} can be had: {remedy()}") from error
    finally:
        for fd in taken:
            os.close(fd)


def raise_limit() -> int:
    """Raise the limit of open files, also for child processes, to the hard limit; return the limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the peer of a connected Unix socket, from the kernel (SO_PEERCRED)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


class SocketPath:
    """A path for bind and connect: the path itself, or one through /proc if it is too long for a socket."""

    def __init__(self, path: Path) -> None:
        self._folder = -1
        self._path = path

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= _SUN_PATH:
            return str(self._path)
        self._folder = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._folder}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        if self._folder >= 0:
            os.close(self._folder)


def ask_for_descriptors(
    connection: socket.socket, path: Path, owner: int, request: bytes, until: float
) -> tuple[bytes, list[int]] | None:
    """Send one request to the process of user `owner` that listens at `path`; wait until `until` (monotonic clock).

    Returns:
        The reply's first byte and its descriptors; no byte if the caller should try again; None if no process listens.

    Raises:
        PermissionError: another user's process listens there; OSError: this process may open no more.
    """
    connection.settimeout(max(_SHORTEST, until - time.monotonic()))
    try:
        with SocketPath(path) as short:
            connection.connect(short)
        if (user := peer_user(connection)) != owner:
            raise PermissionError(errno.EACCES, f"{path} is of user {user}")
        connection.send(request)
        return receive_descriptors(connection, 1, _MOST_FDS)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (BlockingIOError, TimeoutError, ConnectionResetError, BrokenPipeError):
        return b"", []  # its queue is full, or it did not answer in time


def receive_descriptors(connection: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive up to `size` bytes and `most` descriptors. Programs that this process starts do not inherit them.

    A helper program that inherited a segment would hold this process's locks on it, and thus its lanes, after its end.
    `socket.recv_fds` ignores its flags (CPython 3.10 to 3.13).

    Raises:
        OSError: EMFILE: more came, or this process may open no more. All are closed.
    """
    fds = array.array("i")
    room = socket.CMSG_LEN(most * fds.itemsize)
    data, ancillary, flags, _ = connection.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, came in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(came[: len(came) - len(came) % fds.itemsize])
    if flags & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return data, fds.tolist()
