"""Trainings on the live page: the newest numbers and the newest film of the runs in a folder.

They are read from the files that every run writes (metrics.csv, films/), so a run needs to know of no server.
"""

from __future__ import annotations

import csv
import heapq
import io
import math
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEPTH = 3  # of a run's folder below the folder: a fleet's are OUT/VARIATION/seed-N
_MOST_RUNS = 16  # the newest
_MOST_LOOKED_AT = 4096  # folders
_MOST_BYTES = 1 << 20  # of the end of a metrics.csv
_MOST_FILM = 32 << 20
_POINTS = 120
_AGAIN = 2.0  # seconds between two looks
_EVALUATED = ("eval_return", "eval_points")


@dataclass(slots=True)
class _Known:
    """A run as it was read when its metrics.csv had this state."""

    state: tuple[int, int]
    rows: list[dict[str, float]]


class RunFolders:
    """The runs in a folder. Not thread-safe.

    Args:
        folder: of a run, or of folders of runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, _Known] = {}
        self._films: dict[str, Path] = {}
        self._document: list[dict[str, Any]] = []
        self._looked = -math.inf

    def document(self) -> list[dict[str, Any]]:
        """Return the runs, the newest first, as values of JSON; files are looked at every two seconds at most.

        Of each: "name", "env_steps", "return" and "returns" (at most 120 points of the mean return of its last
        episodes), "evaluated", "lag", "steps_per_second", "age" (seconds since its newest row) and "film" (a mark
        of the newest film; "" if there is none). Numbers that it has not written are None.
        """
        if time.monotonic() - self._looked >= _AGAIN:
            found = heapq.nlargest(_MOST_RUNS, self._metrics())
            known, films = {}, {}
            self._document = []
            for changed, size, name, path in found:
                before = self._known.get(name)
                state = (changed, size)
                known[name] = (
                    before if before and before.state == state else _Known(state, _rows_of(path / "metrics.csv"))
                )
                if (film := _newest_film(path / "films")) is not None:
                    films[name] = film
                self._document.append(_told(name, known[name].rows, time.time() - changed / 1e9, films.get(name)))
            self._known, self._films, self._looked = known, films, time.monotonic()
        return self._document

    def film(self, name: str) -> bytes | None:
        """Return the newest film of a run in the last document; None: it has none, or one that is too large."""
        path = self._films.get(name)
        if path is None:
            return None
        try:
            with open(path, "rb", opener=_no_link) as file:
                status = os.fstat(file.fileno())
                return file.read(_MOST_FILM) if stat.S_ISREG(status.st_mode) and status.st_size <= _MOST_FILM else None
        except OSError:  # the run was removed meanwhile
            return None

    def _metrics(self) -> Iterator[tuple[int, int, str, Path]]:
        """Yield (time of change in ns, size, name, folder) of each run."""
        level, looked = [self._folder], 0
        for depth in range(_DEPTH + 1):
            below: list[Path] = []
            for folder in level:
                looked += 1
                if looked > _MOST_LOOKED_AT:
                    return
                try:
                    status = (folder / "metrics.csv").stat()
                    name = folder.relative_to(self._folder).as_posix() if depth else folder.name
                    yield status.st_mtime_ns, status.st_size, name, folder
                    continue  # what is in a run's folder is no run
                except OSError:
                    pass
                try:
                    with os.scandir(folder) as entries:
                        below += sorted(Path(each) for each in entries if each.is_dir(follow_symlinks=False))
                except OSError:
                    pass
            level = below


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _rows_of(path: Path) -> list[dict[str, float]]:
    """Return the last rows of a metrics.csv; empty if it cannot be read."""
    try:
        with open(path, "rb", opener=_no_link) as file:
            head = file.readline(_MOST_BYTES)
            whole = os.fstat(file.fileno()).st_size
            if whole - len(head) > _MOST_BYTES:
                file.seek(-_MOST_BYTES, os.SEEK_END)
                file.readline()
            body = file.read(_MOST_BYTES)
    except OSError:
        return []
    text = (head + body[: body.rfind(b"\n") + 1]).decode("utf-8", "replace")  # the last line may be unfinished
    rows = []
    for row in csv.DictReader(io.StringIO(text, newline="")):
        numbers = {}
        for name, cell in row.items():
            try:
                number = float(cell)
            except (TypeError, ValueError):
                continue
            if math.isfinite(number):
                numbers[name] = number
        rows.append(numbers)
    return rows


def _newest_film(folder: Path) -> Path | None:
    """Return the film of the most env steps: its name is their number."""
    try:
        found = [path for path in folder.iterdir() if path.suffix == ".webm" and path.stem.isdecimal()]
    except OSError:
        return None
    return max(found, key=lambda path: int(path.stem), default=None)


def _told(name: str, rows: list[dict[str, float]], age: float, film: Path | None) -> dict[str, Any]:
    newest: dict[str, float] = {}
    for row in rows:
        newest |= row
    returns = [row["return_mean"] for row in rows if "return_mean" in row]
    step = max(1, math.ceil(len(returns) / _POINTS))
    return {
        "name": name,
        "env_steps": newest.get("env_steps"),
        "return": newest.get("return_mean"),
        "returns": returns[(len(returns) - 1) % step :: step] if returns else [],
        "evaluated": next((newest[each] for each in _EVALUATED if each in newest), None),
        "lag": newest.get("lag"),
        "steps_per_second": newest.get("steps_per_second"),
        "age": max(0.0, age),
        "film": film.stem if film is not None else "",
    }
