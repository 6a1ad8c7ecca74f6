"""Files that hold secrets: read only where nobody else can read them, written so that nobody else ever could."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS = stat.S_IRWXO | stat.S_IWGRP  # a group may read: that is how orchestrators mount a secret
_MOST_BYTES = 1 << 20


def too_open(path: Path) -> str | None:
    """Why a file is no place for a secret; None where it is one, or where there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_mode & _OTHERS:
        return f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, others can get at the secret in it: chmod 600 it"
    return None


def read_secret(path: Path) -> bytes:
    """The contents of a file that only its owner (and a group) can read.

    Raises:
        ValueError: it cannot be read, is no plain file, is larger than 1 MiB, or others can read or change it.
    """
    try:
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
        if why := too_open(path):
            raise ValueError(why)
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than 1 MiB, which no secret is")
    return content


def write_new(path: Path, content: str, mode: int) -> None:
    """Write a file that does not exist yet, with that mode from its first moment. Raises FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(content)
