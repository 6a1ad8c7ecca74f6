"""Named shared memory with one owner.

There are two kinds, and `Segment.attach` finds both by name, ``jurybox-<uid>-<owner id>-<kind>-<n>``:

- A file of that name in the shared-memory file system, mode 0600, for short-lived owners (trainings, replay). It
  appears only when it is complete (created unnamed with O_TMPFILE, allocated, locked, then linked), so a creator that
  is killed leaves nothing behind. Its owner holds a kernel lock on it: without the lock the owner is dead, and `sweep`
  removes the file.
- Memory without a file, sealed so that its size cannot change, which a server passes over its socket
  (jurybox.server.supervisor.segment_server). The kernel frees it with its last user.

`multiprocessing.shared_memory` is not used because its resource tracker unlinks segments that other processes still
need (cpython#82300).
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import stat
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.descriptors import SocketPath, ask_for_descriptors, exhausted, remedy
from jurybox.protocol.errors import Error, SharedMemoryError, TooManyFiles

try:
    import fcntl
except ModuleNotFoundError:  # on Windows, where clients connect over networks and need no locks
    fcntl = None  # type: ignore[assignment]

# Locks are far beyond any content, so that they never coincide with a data offset.
OWNER_LOCK = 1 << 60
_PREFIX = "jurybox"
_MADV_POPULATE_WRITE = 23

# The suffixes of a server's socket, after the prefix of its segments' names: when it is ready, and before.
SOCKET, UNFINISHED = ".sock", ".sock-new"
_MAKING = 1.0  # seconds after which an unfinished socket is stale; creating it takes microseconds
_unfinished: dict[int, float] = {}  # by inode: when this process first saw it, on the monotonic clock
_LONGEST_SOCKET = 80  # bytes of a socket's name; a replay's may be longer, which has no server and no socket
_TIMEOUT = 2.0  # seconds a server may take to pass a segment
_RETRY = 0.005
# The reply's first byte: descriptors follow, there is no such segment, or the server has no free descriptor.
HANDED, UNKNOWN, EXHAUSTED = b"\0", b"\1", b"\2"
MOST_NAME = 256  # bytes of a request


def directory() -> Path:
    """Return the folder of the segments: JURYBOX_SHM_DIR, or /dev/shm."""
    return Path(os.environ.get("JURYBOX_SHM_DIR", "/dev/shm"))


def segment_name(owner_id: str, kind: str, number: int = 0) -> str:
    """Return a segment's name: ``jurybox-<uid>-<owner id>-<kind>-<number>``; `kind` must not contain a slash."""
    return f"{_PREFIX}-{os.getuid()}-{owner_id}-{kind}-{number}"


def sibling(name: str, kind: str, number: int = 0) -> str:
    """Return the name of another segment of the owner of `name`, which may belong to another user."""
    return f"{name.rsplit('-', 2)[0]}-{kind}-{number}"


# Creates a segment: `Segment.create`, or a server's variant (jurybox.server.supervisor.segment_server).
Maker = Callable[[str, int], "Segment"]


class Segment:
    """A mapped segment. Create it with `create` (the owner) or `attach` (other processes).

    It closes its descriptor, and with it ends its locks, in `close`, or when it is garbage-collected.

    Attributes:
        name: its file name in `directory()`.
        size: bytes.
        owned: whether this object is the owner, which unlinks it.
    """

    def __init__(
        self,
        name: str,
        fd: int,
        size: int,
        *,
        owned: bool,
        writable: bool = True,
        withdraw: Callable[[str], None] | None = None,
    ) -> None:
        self._withdraw = withdraw  # removes the name if the segment has no file
        self.name = name
        self.size = size
        self.owned = owned
        self._fd = fd
        # Python's mmap keeps a duplicate of its descriptor, and with it every lock, as long as an array uses the
        # memory. So it gets a separate open file, and locks on `fd` end when `fd` is closed.
        own = os.open(f"/proc/self/fd/{fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        try:
            self._map: mmap.mmap | None = mmap.mmap(own, size, access=access)
        finally:
            os.close(own)
        self._close = weakref.finalize(self, os.close, fd)  # last: until here the descriptor is the caller's
        self._close.atexit = False

    @classmethod
    def create(cls, name: str, size: int, *, allocate: bool = True) -> Segment:
        """Create a segment of `size` zeroed bytes, with all pages allocated.

        Args:
            name: see `segment_name`.
            size: bytes.
            allocate: False: pages are allocated with `allocate` as needed, by any number of threads. Touching a page
                before may raise SIGBUS if memory is short.

        Raises:
            SharedMemoryError: too little memory is available (the message names the amount and the remedy), or the
                name is taken by a living owner.
            TooManyFiles: this process has too many files open.
        """
        folder = directory()
        if allocate and _too_much(folder, size):
            raise _no_room(folder, name, size)
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _not_made(folder, error) from error
        segment = None
        try:
            # Allocate now: a page that cannot be allocated later would raise SIGBUS in the process that touches it.
            if allocate:
                os.posix_fallocate(fd, 0, size)
            else:
                os.ftruncate(fd, size)
            try_lock(fd, OWNER_LOCK, shared=True)
            segment = cls(name, fd, size, owned=True)
            _link(fd, folder / name)
            return segment
        except OSError as error:
            if segment is None:
                os.close(fd)
            else:
                segment.close()
            if error.errno == errno.ENOSPC:
                raise _no_room(folder, name, size) from error
            if exhausted(error):
                raise _not_made(folder, error) from error
            if error.errno == errno.EEXIST:
                raise SharedMemoryError(
                    f"shared memory {name} exists and its owner lives; choose another name or stop that owner"
                ) from error
            raise

    @classmethod
    def attach(cls, name: str, *, keep_alive: bool = False, writable: bool = True) -> Segment:
        """Map an existing segment.

        Args:
            name: its name.
            keep_alive: hold the segment like its owner: it is not swept while this object is open.
            writable: False maps it read-only, with read-only arrays.

        Raises:
            SharedMemoryError: there is no segment of that name.
            TooManyFiles: this process has too many files open.
        """
        return cls.attach_with(name, keep_alive=keep_alive, writable=writable)[0]

    @classmethod
    def attach_with(
        cls, name: str, *, keep_alive: bool = False, writable: bool = True
    ) -> tuple[Segment, tuple[int, ...]]:
        """Do the same as `attach`; also return further descriptors of the server, which the caller owns."""
        if (handed := _handed(name, writable=writable)) is not None:
            fd, *more = handed
            removed = False
        else:
            fd, more = _open_file(name, writable=writable), []
            removed = keep_alive and (not try_lock(fd, OWNER_LOCK, shared=True) or os.fstat(fd).st_nlink == 0)
        if removed:
            # Its last holder ended between our open and our lock, and a sweep removed it.
            os.close(fd)
            raise SharedMemoryError(f"shared memory {name} was just removed: its owner is gone; make it anew")
        try:
            return cls(name, fd, os.fstat(fd).st_size, owned=False, writable=writable), tuple(more)
        except (OSError, ValueError) as error:  # no memory, no descriptor, or an empty file
            for number in (fd, *more):
                os.close(number)
            raise _not_opened(name, error) from error

    @property
    def buffer(self) -> memoryview:
        """The segment's bytes. Views of it keep the mapping alive after `close`."""
        if self._map is None:
            raise SharedMemoryError(f"shared memory {self.name} was closed in this process")
        return memoryview(self._map)

    @property
    def fd(self) -> int:
        """The descriptor of the open file, for locks; -1 after `close`."""
        return self._fd

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0) -> npt.NDArray[Any]:
        """Return an array over the bytes from `offset` on; it is writable unless the segment is mapped read-only."""
        return np.ndarray(shape, dtype, self.buffer, offset)

    def allocate(self, offset: int, size: int) -> None:
        """Allocate the pages of bytes [offset, offset + size), if `create` did not; from any thread.

        Raises:
            SharedMemoryError: too little memory is available.
        """
        if size == 0:
            return
        try:
            os.posix_fallocate(self._fd, offset, size)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise _no_room(directory(), self.name, self.size) from error
            raise

    def populate(self) -> None:
        """Map all pages now: slower now, but without page faults later.

        Uses madvise(2) with MADV_POPULATE_WRITE (Linux 5.14); on older kernels it reads a byte of every page.
        """
        if self._map is None:
            raise SharedMemoryError(f"shared memory {self.name} was closed in this process")
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, 0, self.size)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.array(np.uint8, (self.size,))[:: mmap.PAGESIZE].sum()

    def owner_lives(self) -> bool:
        """Return whether another open file holds the segment."""
        return is_locked(self._fd, OWNER_LOCK)

    def separate(self, *, hold: bool) -> None:
        """Reopen the file in a forked child, so that it shares no lock with the parent. The child is not the owner.

        Args:
            hold: hold the segment like the parent: it is not swept while this object is open.
        """
        self.owned = False
        if self._fd < 0:
            return
        import fcntl  # missing on Windows, where clients import this module but create no segments

        access = fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_ACCMODE
        own = os.open(f"/proc/self/fd/{self._fd}", access | os.O_CLOEXEC)
        try:
            os.dup2(own, self._fd, inheritable=False)
        finally:
            os.close(own)
        if hold:
            try_lock(self._fd, OWNER_LOCK, shared=True)

    def close(self) -> None:
        """Close the file and release its locks. The mapping is removed with the last array over it."""
        self._fd = -1
        self._close()
        self._map = None

    def unlink(self) -> None:
        """Remove the name; the memory is freed with the last mapping. May be called again."""
        if self._withdraw is not None:
            self._withdraw(self.name)
        else:
            (directory() / self.name).unlink(missing_ok=True)

    def release(self) -> None:
        """Close the segment; the owner also removes it."""
        self.close()
        if self.owned:
            self.unlink()

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def sweep() -> list[str]:
    """Remove this user's segments and sockets whose owners are dead; return the removed names."""
    files = sorted(directory().glob(f"{_PREFIX}-{os.getuid()}-*"))
    return [path.name for path in files if _remove_if_dead(path)]


def dead(path: Path) -> bool:
    """Return whether the owner of a segment's file or a server's socket is dead; False if unknown."""
    try:
        found = path.lstat()
        if stat.S_ISSOCK(found.st_mode):
            since = _unfinished.setdefault(found.st_ino, time.monotonic()) if path.suffix == UNFINISHED else 0.0
            return not _listens(path) and time.monotonic() - since > _MAKING
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # gone meanwhile, or not ours to judge
    try:
        return not is_locked(fd, OWNER_LOCK)
    finally:
        os.close(fd)


def available_bytes() -> int:
    """Return the free bytes of the shared-memory file system."""
    stat = os.statvfs(directory())
    return stat.f_bavail * stat.f_frsize


def _remove_if_dead(path: Path) -> bool:
    if path.suffix in (SOCKET, UNFINISHED):
        if is_dead := dead(path):
            path.unlink(missing_ok=True)
        return is_dead
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # gone meanwhile, or not ours to judge
    try:
        # Held while unlinking: no other process can replace this dead file with a living one meanwhile, and a process
        # that attaches to keep it alive either gets the lock before us or sees that the file is gone.
        if not try_lock(fd, OWNER_LOCK) or os.fstat(fd).st_nlink == 0:
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)


def socket_of(name: str) -> Path:
    """Return the path of the socket over which a server passes the segment `name`."""
    return directory() / f"{name.rsplit('-', 2)[0]}{SOCKET}"


def _user_of(name: str) -> int | None:
    """Return the user id in a segment's name; None for a name of another form."""
    parts = name.split("-", 2)
    return int(parts[1]) if len(parts) == 3 and parts[0] == _PREFIX and parts[1].isdecimal() else None


def _handed(name: str, *, writable: bool) -> list[int] | None:
    """Get the segment from the server that owns `name`; None if there is no such server.

    The descriptors belong to separate open files: locks on them are held by this process only.

    Raises:
        SharedMemoryError: it has no segment of that name, or does not answer.
        TooManyFiles: this process has too many files open.
    """
    path = socket_of(name)
    owner = _user_of(name)
    if owner is None or len(os.fsencode(path.name)) > _LONGEST_SOCKET:
        return None
    until = time.monotonic() + _TIMEOUT
    try:
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                reply = ask_for_descriptors(
                    connection, path, owner, (b"w" if writable else b"r") + os.fsencode(name), until
                )
            if reply is None:
                return None
            status, fds = reply
            if status == HANDED and fds:
                return fds
            if status in (UNKNOWN, EXHAUSTED):
                why = "no such segment (any more)" if status == UNKNOWN else "no descriptor left to hand it over"
                raise SharedMemoryError(f"shared memory {name}: the server that owns it has {why}")
            if time.monotonic() > until:
                raise SharedMemoryError(
                    f"shared memory {name}: the server that owns it does not answer at {path} within {_TIMEOUT:.0f} "
                    "s; it may be stopped or overloaded"
                )
            time.sleep(_RETRY)
    except Error:
        raise
    except OSError as error:
        raise _not_opened(name, error) from error


def _open_file(name: str, *, writable: bool) -> int:
    path = directory() / name
    try:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _not_opened(name, error) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or _user_of(name) not in (found.st_uid, None):
        # In /dev/shm every user can create files of any name.
        os.close(fd)
        raise SharedMemoryError(f"shared memory {name} in {directory()} is of user {found.st_uid}, not of its owner")
    return fd


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.setblocking(False)
        try:
            with SocketPath(path) as short:
                caller.connect(short)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # its queue is full, or it is not for us to judge
    return True


def _link(fd: int, path: Path) -> None:
    """Link the unnamed file; remove a dead owner's file of that name before."""
    # Naming a directory makes os.link call linkat(2) with AT_SYMLINK_FOLLOW; plain link(2) would not follow /proc.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for attempt in (1, 2):
            try:
                os.link(
                    f"/proc/self/fd/{fd}",
                    path.name,
                    src_dir_fd=folder,
                    dst_dir_fd=folder,
                    follow_symlinks=True,
                )
                return
            except FileExistsError:
                if attempt == 2 or not _remove_if_dead(path):
                    raise
    finally:
        os.close(folder)


def _not_made(folder: Path, error: OSError) -> Error:
    if exhausted(error):
        return TooManyFiles(f"cannot make shared memory: {remedy()}")
    if error.errno == errno.ENOSPC:
        why = "it has no inodes left (df -i): remove files, or mount it with a larger nr_inodes"
    else:
        why = "expected a writable tmpfs (in a container: --ipc or --shm-size; elsewhere: JURYBOX_SHM_DIR)"
    return SharedMemoryError(f"cannot make shared memory in {folder}: {error.strerror}; {why}")


def _not_opened(name: str, error: OSError | ValueError) -> Error:
    if isinstance(error, OSError) and exhausted(error):
        return TooManyFiles(f"shared memory {name} cannot be opened: {remedy()}")
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return SharedMemoryError(
        f"shared memory {name} cannot be opened in {directory()}: {why}; its owner may be gone, or this "
        "process sees another folder than the owner (containers: share one and set JURYBOX_SHM_DIR to it)"
    )


def _too_much(folder: Path, size: int) -> bool:
    """Return whether `size` exceeds the free memory; checked without allocating, which would take it from others."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False  # the next step reports the reason
    return found.f_blocks > 0 and size > found.f_bavail * found.f_frsize  # no blocks: a tmpfs without a limit


def _no_room(folder: Path, name: str, size: int) -> SharedMemoryError:
    free, total = available_bytes(), os.statvfs(folder)
    return SharedMemoryError(
        f"{folder} is full: {name} needs {size / 2**20:.1f} MiB, {free / 2**20:.1f} of "
        f"{total.f_blocks * total.f_frsize / 2**20:.1f} MiB are free; enlarge it (docker run --shm-size=1g, "
        "mount -o remount,size=4g /dev/shm), ask for fewer rows, or remove what is stale with 'jurybox doctor'"
    )


# Leases as kernel file locks: a lock lasts exactly as long as its holder, however that ends.
#
# Open-file-description locks (`fcntl(2)`, F_OFD_SETLK) belong to an open file, not to a process id: they vanish with
# the last descriptor, work across PID namespaces that share the file, and two of them in one process conflict as two
# processes would.


# struct flock of 64-bit Linux: l_type, l_whence, (pad) l_start, l_len, l_pid, (pad to 32 bytes).
_FLOCK = struct.Struct("hhqqi4x")
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37


def _call(fd: int, command: int, kind: int, at: int) -> int:
    """Run one lock command; return the lock type that the kernel wrote back."""
    request = _FLOCK.pack(kind, 0, at, 1, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(fd, command, request))[0])


def try_lock(fd: int, at: int, *, shared: bool = False) -> bool:
    """Lock a byte of the open file `fd` without waiting; return False if another open file has locked it."""
    try:
        _call(fd, _F_OFD_SETLK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, at)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, at: int) -> None:
    """Release the lock on a byte."""
    _call(fd, _F_OFD_SETLK, fcntl.F_UNLCK, at)


def is_locked(fd: int, at: int) -> bool:
    """Return whether another open file holds a lock, shared or exclusive, on a byte."""
    return _call(fd, _F_OFD_GETLK, fcntl.F_WRLCK, at) != fcntl.F_UNLCK
