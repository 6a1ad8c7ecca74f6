"""File descriptors: whether enough are left, what to say where they are not, and leases as locks on open files."""

from __future__ import annotations

import errno
import os
import struct

from jurybox.protocol.errors import TooManyFiles


def exhausted(error: OSError) -> bool:
    """Whether this is the kernel's word for too many open files, of the process or of the whole machine."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def remedy() -> str:
    """How many files this process may have open, and what to do about it."""
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
    """See that so many descriptors can be had; where they run out in its midst, libzmq ends the whole process.

    Raises:
        TooManyFiles: fewer are left.
    """
    if not hasattr(os, "eventfd"):
        return  # not Linux, where nothing is as cheap to try with
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
    """Let this process, and those it starts, have as many files open as the hard limit allows; gives how many."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


# ----
# Leases as kernel file locks: a lock lives exactly as long as its holder, whatever kills it.
#
# Open-file-description locks (`fcntl(2)`, F_OFD_SETLK) belong to an open file, not to a process id: they vanish with
# the last descriptor, work across PID namespaces that share the file, and two of them in one process conflict as two
# processes would.


try:
    import fcntl
except ModuleNotFoundError:  # on Windows: a client there connects over networks, and locks nothing
    fcntl = None  # type: ignore[assignment]

# struct flock of 64-bit Linux: l_type, l_whence, (pad) l_start, l_len, l_pid, (pad to 32 bytes).
_FLOCK = struct.Struct("hhqqi4x")
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37


def _call(fd: int, command: int, kind: int, start: int, length: int) -> int:
    """Run one lock command; gives the lock type the kernel wrote back."""
    request = _FLOCK.pack(kind, 0, start, length, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(fd, command, request))[0])


def try_lock(fd: int, start: int, length: int = 1, *, shared: bool = False) -> bool:
    """Lock bytes [start, start + length) of the open file `fd`, without waiting; False when another has them."""
    try:
        _call(fd, _F_OFD_SETLK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, start, length)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, start: int, length: int = 1) -> None:
    """Give up the lock on [start, start + length)."""
    _call(fd, _F_OFD_SETLK, fcntl.F_UNLCK, start, length)


def is_locked(fd: int, start: int, length: int = 1) -> bool:
    """Whether any other open file holds a lock, shared or not, on a byte of [start, start + length)."""
    return _call(fd, _F_OFD_GETLK, fcntl.F_WRLCK, start, length) != fcntl.F_UNLCK
