"""Showing how a training goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_LINE_EVERY = 10.0  # seconds between two lines where there is no terminal


class Watcher(Protocol):
    """Whoever wants to know how a run goes."""

    def say(self, text: str) -> None:
        """One line about what happens now."""

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """A stretch of work of `total` steps starts."""

    def advance(self, done: int, numbers: Mapping[str, float] | None = None) -> None:
        """`done` steps of it are done; `numbers` are worth showing."""

    def end(self) -> None:
        """The stretch is over, or was given up."""


class Silence:
    """Tells nobody."""

    def say(self, text: str) -> None: ...
    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, done: int, numbers: Mapping[str, float] | None = None) -> None: ...
    def end(self) -> None: ...


class ConsoleProgress:
    """Shows progress on a console: a bar when it is a terminal, else a line every ten seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._what = ""
        self._total = self._first = 0
        self._began = self._lined = 0.0
        self._numbers: dict[str, float] = {}

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.end()
        self._what, self._total, self._first = what, total, done
        self._began = self._lined = self._clock()
        self._numbers = {}
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task(what, total=total, completed=done, numbers="")
            self._bar.start()
        else:
            self.say(f"{what}: {total - done} steps")

    def advance(self, done: int, numbers: Mapping[str, float] | None = None) -> None:
        self._numbers.update(numbers or {})
        now = self._clock()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, numbers=self._described(done, now))
        elif now - self._lined >= _LINE_EVERY:
            self._lined = now
            share = done / self._total if self._total else 1.0
            self.say(f"{self._what}: {done}/{self._total} ({share:.0%}) {self._described(done, now)}")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _described(self, done: int, now: float) -> str:
        rate = (done - self._first) / (now - self._began) if now > self._began else 0.0
        shown = [f"{name} {value:.3f}" for name, value in self._numbers.items()]
        return "  ".join([*shown, f"{rate:.0f}/s"])
