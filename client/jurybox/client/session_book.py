"""What a client expects of the state of its sessions: which step each is at, and which have lost their state."""

from __future__ import annotations

from collections.abc import Sequence
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
    VersionNotHeld,
)

Numbers = Sequence[int] | NDArray[np.integer[Any]]
Mask = Sequence[bool] | NDArray[np.bool_]


def not_computed(error: BaseException) -> bool:
    """Whether a request that failed so was not computed, so that the state of its sessions is what it was."""
    if isinstance(error, Refused) and error.code == Code.UNSUPPORTED:
        return True  # a transport cannot carry it
    return isinstance(error, (Busy, ModelFailed, ModelNotFound, SpecMismatch, VersionNotHeld))


class SessionBook:
    """The book of n sessions. Under the model's lock, where threads share it.

    Attributes:
        next: (n,) uint32, the step of each session's next request; 0: it begins.
        all: (n,) their numbers.
    """

    def __init__(self, model: str, n: int) -> None:
        self.next = np.zeros(n, np.uint32)
        self.all = np.arange(n)
        self._model = model
        self._lost = np.zeros(n, np.bool_)
        self._some_lost = False  # whether there may be some
        self._steps = np.zeros(n, np.uint32)  # of the request of all sessions that is under way
        # Whether there is one. Still set when the next request comes, its end was broken off, by Ctrl-C perhaps.
        self._asking = False

    def ids(self, session: Numbers | None) -> NDArray[np.intp]:
        """Numbers of sessions as a caller gives them; None: all. Raises SpecMismatch where there are no such."""
        if session is None:
            return self.all
        ids = np.asarray(session)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise SpecMismatch(f"session is {ids.dtype} of shape {ids.shape}: expected whole numbers, one for each row")
        if int(ids.min()) < 0 or int(ids.max()) >= len(self.all):
            last = len(self.all) - 1
            raise SpecMismatch(f"session {int(ids.min())}..{int(ids.max())}: these are sessions 0..{last}")
        if len(np.unique(ids)) != len(ids):
            raise SpecMismatch("a session stands in one request twice: its second step needs the first one's answer")
        return ids.astype(np.intp)

    def require(self, ids: NDArray[np.intp]) -> None:
        """Raises SessionLost where one of these has lost its state."""
        if self._some_lost and len(lost := ids[self._lost[ids]]):
            raise SessionLost(
                f"sessions {lost.tolist()} of {self._model!r} have lost their state: begin them anew with reset",
                sessions=lost.tolist(),
            )

    def stepping(self, ids: NDArray[np.intp], steps: NDArray[np.uint32], most: int) -> Step:
        """A request of some sessions, for a ``with``; a ticket holds `most` rows."""
        # All of them in order are a slice, which NumPy reads and writes without an index.
        return Step(self, slice(None) if ids is self.all else ids, ids, steps, most)

    def stepped(self, ids: NDArray[np.intp], steps: NDArray[np.uint32]) -> None:
        """These are sent, and will take their step."""
        self.next[ids] = steps + 1
        self._lost[ids] = False

    # ---- a request of all sessions in order: nothing is marked but that it is under way

    def begin_all(self, reset: Mask | None) -> NDArray[np.uint32]:
        """The steps of a request that is about to be sent. Raises SpecMismatch, SessionLost."""
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
        """It was answered."""
        np.add(self._steps, 1, out=self.next)
        if self._some_lost:
            self._lost[:] = self._some_lost = False
        self._asking = False

    def fail_all(self, most: int) -> None:
        """It failed with the exception that is being handled. May raise SessionLost in its place."""
        with self.stepping(self.all, self._steps.copy(), most):
            self._asking = False
            raise  # noqa: PLE0704  in the ``except`` of who calls

    def settle_broken_off(self) -> None:
        """At the beginning of every request: nobody knows what became of one that was broken off."""
        if self._asking:
            self._lost[:] = self._some_lost = True
            self._asking = False


class Step:
    """Around a request: whatever becomes of it, sessions have taken the step, have not, or are lost."""

    __slots__ = ("_before", "_book", "_ids", "_most", "_steps", "_those")

    def __init__(
        self,
        book: SessionBook,
        those: slice | NDArray[np.intp],
        ids: NDArray[np.intp],
        steps: NDArray[np.uint32],
        most: int,
    ) -> None:
        self._book = book
        self._those = those
        self._ids = ids
        self._steps = steps
        self._most = most
        self._before = book._lost[those].copy()

    def __enter__(self) -> None:
        self._book._some_lost = True
        self._book._lost[self._those] = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        book, those = self._book, self._those
        if error is None:
            book.next[those] = self._steps + 1
            book._lost[those] = False
            return
        one_ticket = len(self._ids) <= self._most  # of several, some may have been computed
        if isinstance(error, RowFailed):
            failed = np.zeros(len(self._ids), np.bool_)
            failed[list(error.errors)] = True
            book.next[self._ids[~failed]] = self._steps[~failed] + 1
            book._lost[those] = self._before & failed
        elif isinstance(error, SessionLost):
            gone = self._ids[np.asarray(error.sessions, np.intp)]
            if one_ticket:
                book._lost[those] = self._before
                book._lost[gone] = True
            raise SessionLost(str(error), sessions=gone.tolist()) from None
        elif isinstance(error, Refused) and error.code == Code.STALE_LEASE:
            begun = self._steps > 0
            book._lost[those] = self._before | begun
            if begun.any():
                raise SessionLost(
                    f"the state of these sessions of {book._model!r} went down with a relay or a server: begin their "
                    "episodes anew, with reset",
                    sessions=self._ids[begun].tolist(),
                ) from error
        elif one_ticket and not_computed(error):
            book._lost[those] = self._before


def require_rows(n: int, sessions: int) -> None:
    """Raises SpecMismatch where so many rows came for another number of sessions."""
    if n != sessions:
        raise SpecMismatch(f"{n} rows came for {sessions} sessions: expected one row for each")


def resets(reset: Mask, n: int) -> NDArray[np.bool_]:
    """Which of n rows begin, as a caller gives them. Raises SpecMismatch."""
    begin = np.asarray(reset, np.bool_)
    if begin.shape != (n,):
        raise SpecMismatch(f"reset has shape {begin.shape}: expected one bool for each of {n} rows")
    return begin
