"""Leases as kernel file locks: a lock lives exactly as long as its holder, whatever kills it.

Open-file-description locks (`fcntl(2)`, F_OFD_SETLK) belong to an open file, not to a process id: they vanish
with the last descriptor, work across PID namespaces that share the file, and two of them in one process
conflict as two processes would.
"""

from __future__ import annotations

import errno
import struct

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
