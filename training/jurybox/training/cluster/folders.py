"""The run's folders on one machine: files that are written once, on any machine, and are soon on all. No Ray."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from jurybox.training.run_folder import write_atomically

_TICK = 100_000_000  # ns


class Folders:
    """One machine's copies; belongs to one thread at a time.

    Args:
        paths: by the plan's name.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)
        self._found: dict[tuple[str, str], None] = {}  # in the order in which they were
        self._changed: dict[str, int] = {}
        for path in paths.values():
            Path(path).mkdir(parents=True, exist_ok=True)

    def after(self, count: int) -> tuple[tuple[str, str], ...]:
        """(folder, name) of the files there, without the first so many that were found."""
        for folder, path in self.paths.items():
            # Taken before the look: what comes in the midst of it is seen the next time.
            changed = Path(path).stat().st_mtime_ns
            if self._changed.get(folder) != changed:
                # One that has just changed may change again within a tick of the file system's clock.
                if time.time_ns() - changed > _TICK:
                    self._changed[folder] = changed
                for each in sorted(Path(path).iterdir()):
                    if not each.name.startswith("."):
                        self._found.setdefault((folder, each.name))
        return tuple(self._found)[count:] if count < len(self._found) else ()

    def read(self, folder: str, name: str) -> bytes:
        """A file's content."""
        return (Path(self.paths[folder]) / name).read_bytes()

    def keep(self, folder: str, name: str, content: bytes) -> None:
        """Put a file there that was written elsewhere."""
        path = Path(self.paths[folder]) / name
        if not path.exists():
            write_atomically(path, content)
