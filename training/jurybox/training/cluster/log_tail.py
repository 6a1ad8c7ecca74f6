"""A process's log on its way to another machine: what is new in it, and not more than its end."""

from __future__ import annotations

import os
from pathlib import Path


class LogTail:
    """Follows one file.

    Args:
        path: the file; there need not be one yet.
        most: bytes that are handed out at once; of more that came, only the last.
    """

    def __init__(self, path: Path, most: int) -> None:
        self.path = path
        self._most = most
        self._told = 0

    def begin_anew(self) -> None:
        """The file begins from nothing."""
        self._told = 0

    def new(self) -> bytes:
        """What was written since the last call."""
        if not self.path.exists():
            return b""
        with self.path.open("rb") as log:
            size = os.fstat(log.fileno()).st_size
            log.seek(max(self._told, size - self._most))
            text = log.read()
        self._told = size
        return text
