"""Where a replay lies: shared memory under a name, or a file of the user's that is mapped."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from jurybox.protocol.descriptors import try_lock
from jurybox.protocol.errors import SharedMemoryError
from jurybox.protocol.segment import OWNER_LOCK, Segment, directory, segment_name

_LONGEST_NAME = 100


def checked(where: str | Path) -> str | Path:
    """`where`, if it can name a replay.

    Raises:
        ValueError: it is a name that cannot.
    """
    if isinstance(where, Path):
        return where.absolute()
    if not where or "/" in where or "*" in where or len(where) > _LONGEST_NAME:
        raise ValueError(
            f"{where!r} names no replay: expected 1 to {_LONGEST_NAME} characters without '/' and '*' "
            "(a file to map is given as a pathlib.Path)"
        )
    return where


def path_of(where: str | Path) -> Path:
    return where if isinstance(where, Path) else directory() / segment_name(where, "replay")


def make(where: str | Path, size: int, *, allocate: bool = True) -> Segment:
    """New memory of `size` zeroed bytes.

    Args:
        allocate: get all of it now. False: whoever writes to it calls `Segment.allocate` before.

    Raises:
        SharedMemoryError: there is no room, or the name is taken.
    """
    if isinstance(where, str):
        return Segment.create(segment_name(where, "replay"), size, allocate=allocate)
    try:
        fd = os.open(where, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        hint = "attach to it, or remove it first" if error.errno == errno.EEXIST else "expected a writable folder"
        raise SharedMemoryError(f"cannot make {where}: {error.strerror}; {hint}") from error
    try:
        try_lock(fd, OWNER_LOCK, shared=True)
        os.ftruncate(fd, size)
        if allocate:
            os.posix_fallocate(fd, 0, size)
        return Segment(where.name, fd, size, owned=False)
    except OSError as error:
        os.close(fd)
        where.unlink(missing_ok=True)
        raise SharedMemoryError(
            f"cannot make {where} of {size / 2**20:.1f} MiB: {error.strerror}; make room or ask for fewer rows"
        ) from error


def join(where: str | Path) -> tuple[Segment, bool]:
    """Existing memory, held as by its maker; and whether nobody else has it (a file that its processes left).

    Raises:
        SharedMemoryError: there is none.
    """
    if isinstance(where, str):
        return Segment.attach(segment_name(where, "replay"), keep_alive=True), False
    try:
        fd = os.open(where, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SharedMemoryError(
            f"cannot open {where}: {error.strerror}; make it with Replay.create(Path(...))"
        ) from error
    try:
        alone = try_lock(fd, OWNER_LOCK)
        if not alone and not try_lock(fd, OWNER_LOCK, shared=True):
            raise SharedMemoryError(f"{where} is being opened by another process this very moment; try again")
        return Segment(where.name, fd, os.fstat(fd).st_size, owned=False), alone
    except BaseException:
        os.close(fd)
        raise


def share(segment: Segment) -> None:
    """Let others in again, after `join` found nobody."""
    try_lock(segment.fd, OWNER_LOCK, shared=True)
