"""A client's record of its sessions' states: the step of each, and which have lost their state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import (
    Busy,
    Code,
    ModelFailed,
    ModelNotFound,
    Refused,
    RowFailed,
    SessionLost,
    SpecMismatch,
    StaleLease,
    VersionNotHeld,
)
from jurybox.protocol.row_arrays import array_of

Numbers = Sequence[int] | NDArray[np.integer[Any]]
Mask = Sequence[bool] | NDArray[np.bool_]


def not_computed(error: BaseException) -> bool:
    """Return whether a request that failed with `error` was not computed, so that its sessions' state is unchanged."""
    if isinstance(error, Refused) and error.code == Code.UNSUPPORTED:
        return True  # the transport does not support the request
    return isinstance(error, (Busy, ModelFailed, ModelNotFound, SpecMismatch, VersionNotHeld))


class SessionBook:
    """The steps and losses of n sessions. If threads share it, use it with the model's lock held.

    Attributes:
        next: (n,) uint32, the step of each session's next request; 0: the session begins.
        all: (n,) the session numbers.
        advances: how often sessions have advanced, or may have.
    """

    def __init__(self, model: str, n: int) -> None:
        self.next = np.zeros(n, np.uint32)
        self.advances = 0
        self.all = np.arange(n)
        self._model = model
        self._lost = np.zeros(n, np.bool_)
        self._some_lost = False  # False: none is lost; True: some may be
        self._steps = np.zeros(n, np.uint32)  # those of the current request of all sessions
        # Whether such a request is in flight. If still set when the next one starts, the last one was interrupted, for
        # example by Ctrl-C.
        self._asking = False

    def ids(self, session: Numbers | None) -> NDArray[np.intp]:
        """Check a caller's session numbers and return them as an array; None: all.

        Raises:
            SpecMismatch: they are not integers, out of range, or not distinct.
        """
        if session is None:
            return self.all
        ids = array_of("session", "whole numbers", session)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise SpecMismatch(f"session is {ids.dtype} of shape {ids.shape}: expected whole numbers, one for each row")
        if int(ids.min()) < 0 or int(ids.max()) >= len(self.all):
            last = len(self.all) - 1
            raise SpecMismatch(f"session {int(ids.min())}..{int(ids.max())}: these are sessions 0..{last}")
        if len(np.unique(ids)) != len(ids):
            raise SpecMismatch("a session occurs twice in one request: its second step needs the first one's answer")
        return ids.astype(np.intp)

    def require(self, ids: NDArray[np.intp]) -> None:
        """Raise SessionLost if one of these sessions has lost its state."""
        if self._some_lost and len(lost := ids[self._lost[ids]]):
            raise SessionLost(
                f"sessions {lost.tolist()} of {self._model!r} have lost their state: reset them",
                sessions=lost.tolist(),
            )

    def stepping(self, ids: NDArray[np.intp], steps: NDArray[np.uint32]) -> Step:
        """Return a context manager for a request of some sessions."""
        # For all sessions in order use a slice, which NumPy reads and writes without fancy indexing.
        return Step(self, slice(None) if ids is self.all else ids, ids, steps)

    def stepped(self, ids: NDArray[np.intp], steps: NDArray[np.uint32]) -> None:
        """Record that a request of these sessions was sent and will advance them."""
        self.advances += 1
        self.next[ids] = steps + 1
        self._lost[ids] = False

    def lose(self, ids: NDArray[np.intp]) -> None:
        """Record that these sessions have lost their state."""
        self._lost[ids] = self._some_lost = True

    def interrupted(self, session: Numbers | None, advances: int) -> None:
        """Record that the caller of a request gets neither its answer nor its ticket, because it was interrupted.

        Its sessions are lost if they may have advanced: a repeated request would be their second step.

        Args:
            session: the caller's session numbers; None: all.
            advances: the attribute at the beginning of the request.
        """
        if self.advances != advances:
            with suppress(SpecMismatch):
                self.lose(self.ids(session))

    # ---- a request of all sessions in order: only a flag marks it as in flight

    def begin_all(self, reset: Mask | None) -> NDArray[np.uint32]:
        """Begin a request of all sessions and return its steps. Raises SpecMismatch, SessionLost."""
        self.settle_broken_off()
        steps = self._steps
        np.copyto(steps, self.next)
        if reset is not None:
            begin = resets(reset, len(steps))
            steps[begin] = 0
            if self._some_lost:
                self.require(self.all[~begin])
        elif self._some_lost:
            self.require(self.all)
        self._asking = True
        return steps

    def end_all(self) -> None:
        """Record that the request was answered."""
        self.advances += 1
        np.add(self._steps, 1, out=self.next)
        if self._some_lost:
            self._lost[:] = self._some_lost = False
        self._asking = False

    def fail_all(self) -> None:
        """Record that the request failed, and re-raise the exception being handled, or SessionLost in its place."""
        with self.stepping(self.all, self._steps.copy()):
            self._asking = False
            raise  # noqa: PLE0704  called in an ``except`` block

    def settle_broken_off(self) -> None:
        """If the last request was interrupted, mark all sessions as lost: it may or may not have been computed.

        Call it at the beginning of every request.
        """
        if self._asking:
            self._lost[:] = self._some_lost = True
            self._asking = False


class Step:
    """A context manager around a request; when it exits, each session has advanced, has not, or is lost."""

    __slots__ = ("_before", "_book", "_ids", "_steps", "_those")

    def __init__(
        self, book: SessionBook, those: slice | NDArray[np.intp], ids: NDArray[np.intp], steps: NDArray[np.uint32]
    ) -> None:
        self._book = book
        self._those = those
        self._ids = ids
        self._steps = steps
        self._before = book._lost[those].copy()

    def __enter__(self) -> None:
        self._book._some_lost = True
        self._book._lost[self._those] = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        book, those = self._book, self._those
        book.advances += 1
        if error is None:
            book.next[those] = self._steps + 1
            book._lost[those] = False
            return
        if isinstance(error, RowFailed):
            failed = np.zeros(len(self._ids), np.bool_)
            failed[list(error.errors)] = True
            book.next[self._ids[~failed]] = self._steps[~failed] + 1
            book._lost[those] = self._before & failed
        elif isinstance(error, SessionLost):
            gone = self._ids[np.asarray(error.sessions, np.intp)]
            book._lost[those] = self._before
            book._lost[gone] = True
            raise SessionLost(str(error), sessions=gone.tolist()) from None
        elif isinstance(error, StaleLease):
            begun = self._steps > 0
            book._lost[those] = self._before | begun
            if begun.any():
                raise SessionLost(
                    f"the state of these sessions of {book._model!r} was lost with a relay or a server: begin new "
                    "episodes with reset",
                    sessions=self._ids[begun].tolist(),
                ) from error
        elif not_computed(error):  # no part of it: otherwise SessionLost came
            book._lost[those] = self._before


def require_rows(n: int, sessions: int) -> None:
    """Raise SpecMismatch if the number of rows differs from the number of sessions."""
    if n != sessions:
        raise SpecMismatch(f"{n} rows came for {sessions} sessions: expected one row for each")


def resets(reset: Mask, n: int) -> NDArray[np.bool_]:
    """Check a caller's reset mask of n rows and return it as an array. Raises SpecMismatch."""
    begin = array_of("reset", "bool", reset)
    if begin.dtype != np.bool_:
        # [0, 1] may be the numbers of two sessions; flags are never kept as whole numbers of more than a byte.
        if begin.dtype.kind not in "iuf" or (begin.dtype.kind in "iu" and begin.dtype.itemsize > 1):
            raise SpecMismatch(f"reset is {begin.dtype}: expected one bool for each row, not the numbers of sessions")
        if not ((begin == 0) | (begin == 1)).all():
            raise SpecMismatch(f"reset is {begin.dtype} with other values than 0 and 1: expected one bool for each row")
        begin = begin.astype(np.bool_)
    if begin.shape != (n,):
        raise SpecMismatch(f"reset has shape {begin.shape}: expected one bool for each of {n} rows")
    return begin
