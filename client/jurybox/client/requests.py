"""The requests of one model: its lane, the lock of its calls, and the rows that calls reuse."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from jurybox.client.call_rows import CallRow
from jurybox.client.in_flight import ModelLock
from jurybox.client.lane import Lane
from jurybox.client.pieces import Pieces
from jurybox.client.row_allocator import RowRun
from jurybox.client.row_codec import Checked, words
from jurybox.client.ticket import Reply
from jurybox.protocol import forks
from jurybox.protocol.errors import Busy, Refused, ServerGone, SpecMismatch, StaleLease, did_you_mean, plain
from jurybox.protocol.locks import NESTED, Taken, seconds
from jurybox.protocol.spec import ModelSpec


class Requests:
    """The requests of one model, on a lane that is leased again if it was lost. Used by `Model` and `Sessions`.

    Call the methods with the lock of `turns` held, except where their docstrings state otherwise.

    Args:
        lease: leases a lane; takes the number of rows (0: the server's default) and whether to wait for them.
        rows: the number of rows that the caller requested, or 0.
        timeout: default time-out of a call, in seconds.
        opened: called with it, and with those that `of_sessions` returns: whoever leased the lane can close it.

    Attributes:
        turns: the lock that serializes the model's calls.
        lane: the current lane; it may be gone, `usable` returns one that is not.
        spec, max_batch: those of the lane.
        kept: a slot for rows that are reused from call to call: one row, or one for each of all sessions. A call takes
            them out, and puts them back.
        kept_many: the same for calls of several rows.
    """

    def __init__(
        self,
        name: str,
        lease: Callable[[int, bool], tuple[Lane, ModelSpec, int]],
        rows: int,
        timeout: float,
        opened: Callable[[Requests], None],
    ) -> None:
        self.name = name
        self._opened = opened
        self.turns = ModelLock(name, timeout)
        self.kept: list[CallRow] = []
        self.kept_many: list[CallRow] = []
        self._outgrown: weakref.WeakSet[Lane] = weakref.WeakSet()  # in use until the last call on them has ended
        self._lease = lease
        self._rows = rows
        self._may_grow = rows == 0
        self._closed = False
        self.lane, self.spec, self.max_batch = lease(rows, True)
        forks.register(self)
        opened(self)

    def of_sessions(self, n: int) -> Requests:
        """Return the requests of n sessions, which have their own lane. Does not need the lock."""
        return Requests(self.name, self._lease, n, self.turns.timeout, self._opened)

    def require_stateless(self) -> None:
        """Raise Refused if the model keeps state."""
        if self.spec.state:
            kept = ", ".join(self.spec.state)
            raise Refused(
                f"model {self.name!r} keeps state ({kept}): open sessions with sessions(n), and call their methods"
            )

    def require_output(self, name: str) -> None:
        """Raise SpecMismatch if the model has no such output."""
        if name not in self.spec.outputs:
            hint = did_you_mean(came := plain(name, 80), self.spec.outputs)
            raise SpecMismatch(
                f"model {self.name!r} has the outputs {', '.join(self.spec.outputs)}: none is {came!r}{hint}"
            )

    def usable(self) -> Lane:
        """Return the lane; lease a new one after a server restart, a revoked lease or a fork (in the child)."""
        if self._closed:
            raise Refused(f"model {self.name!r} was closed: get it again from the server")
        if self.lane.gone is not None:
            self.lane.close()
            self.give_up_kept()
            self._adopt(*self._lease(self._rows, True))
        return self.lane

    def _adopt(self, lane: Lane, spec: ModelSpec, max_batch: int) -> None:
        """Use another lane. Raises SpecMismatch if the model's spec has changed."""
        self.lane, self.max_batch = lane, max_batch
        if spec != self.spec:
            old, self.spec = self.spec, spec
            raise SpecMismatch(f"model {self.name!r} has changed: it was {words(old)}, it is {words(spec)}")

    def roomy(self, n: int, *, at_once: bool = False) -> Lane:
        """Return the lane; lease a larger one if n rows exceed it and the caller did not set the lane's size.

        Args:
            at_once: all n rows must fit; otherwise those of one batch, because further ones are sent later.
        """
        lane = self.usable()
        if n <= lane.rows or not self._may_grow:
            return lane
        if (most := n if at_once else min(n, self.max_batch)) <= lane.rows:
            return lane
        self.give_up_kept()
        try:
            larger, spec, max_batch = self._lease(most, False)
        except (Busy, Refused):
            self._may_grow = False  # split requests instead
            return lane
        except ServerGone:  # it was too busy to answer at once; if it has really ended, the next request detects it
            return lane
        self._rows = larger.rows
        larger.replace(lane)
        self._outgrown.add(lane)  # it is released with the last call, ticket or rows that use it
        self._adopt(larger, spec, max_batch)
        return larger

    def taken_kept(self, n: int | None = None) -> CallRow | None:
        """Take the rows that calls reuse out of their slot, or take other rows; None if none are free.

        The caller has them until `put_back`. If a call is interrupted, they return by themselves.

        Args:
            n: for sessions: the number of rows, one for each, of requests of all sessions. None: one row.

        Raises:
            Refused: one row of a model that keeps state.
        """
        try:
            kept = self.kept.pop()
        except IndexError:  # at first, or another call on the stack has them
            pass
        else:
            if kept.lane is self.lane and kept.lane.gone is None:
                return kept
            kept.close()
        if n is None:
            self.require_stateless()
        lane = self.usable()
        if (run := lane.take(n or 1)) is None and self._give_up(self.kept_many):
            run = lane.take(n or 1)
        return None if run is None else CallRow(lane, run, single=n is None)

    def _taken_many(self, lane: Lane, n: int) -> CallRow | None:
        """Like `taken_kept`, for a call of n rows: those of the call before, if it had as many."""
        try:
            kept = self.kept_many.pop()
        except IndexError:
            pass
        else:
            if kept.rows == n and kept.lane is lane:
                return kept
            kept.close()
        run = lane.take(n)
        return None if run is None else CallRow(lane, run, single=False)

    def put_back(self, kept: CallRow, slot: list[CallRow] | None = None) -> None:
        """Put rows back into their slot, by default `kept`, after a call.

        They are dropped if an engine may still write to them, or somebody waits for rows.
        """
        lane, slot = kept.lane, self.kept if slot is None else slot
        if slot or lane.rows_awaited or (lane.in_flight and lane.asked(kept.first, kept.rows)):
            kept.close()
        else:
            slot.append(kept)

    def give_up_kept(self) -> bool:
        """Release the rows that are reused between calls; return False if there are none."""
        one, many = self._give_up(self.kept), self._give_up(self.kept_many)
        return one or many

    @staticmethod
    def _give_up(slot: list[CallRow]) -> bool:
        # Close explicitly: a traceback may still hold a reference, so collection cannot be relied on.
        found = False
        while slot:
            with contextlib.suppress(IndexError):
                slot.pop().close()
                found = True
        return found

    def found(self, lane: Lane, n: int) -> RowRun:
        """Take n contiguous free rows. Raises Busy."""
        run = lane.take(n)
        if run is None:
            self.give_up_kept()
            lane.look_after()
            run = lane.take(n)
        if run is None:
            remedy = f"collect results, or ask for a larger lane with model({self.name!r}, rows=...)"
            if lane.columns.sessions is not None:
                remedy = "collect results first; n sessions have n rows, one for each session in flight"
            raise Busy(
                f"{n} neighbouring rows were asked for, {lane.largest} of this lane's {lane.rows} are free: {remedy}"
            )
        return run

    def end(self) -> None:
        """Release the lane. Does not need the lock. Raises Timeout or Refused; see `Model.close`."""
        if self.turns.mine:
            raise Refused(f"a call of {self.name!r} is under way in this thread: {NESTED}; close afterwards")
        self.turns.run(self.close, self.turns.deadline(None))

    def close(self) -> None:
        """Release the lane."""
        if not self._closed:
            self._closed = True
            for lane in (*self._outgrown, self.lane):
                lane.close()

    def again(self, inputs: Any, timeout: float | None) -> Reply | None:
        """Compute an array of as many rows as the call before, on its rows; None: it is for `asked`. Takes the lock."""
        slot = self.kept_many
        if not slot or type(inputs) is not np.ndarray:
            return None
        try:
            with (turns := self.turns).now:
                try:
                    kept = slot.pop()
                except IndexError:  # a nested call has given them up
                    return None
                try:
                    lane = kept.lane
                    if inputs.shape[:1] != (kept.rows,) or lane is not self.lane or lane.gone is not None:
                        return None
                    kept.answer = None
                    outputs = kept.ask(inputs, turns.timeout if timeout is None else seconds(timeout))
                    return Reply(outputs, kept.version, lane.codec.only)
                finally:
                    self.put_back(kept, slot)
        except (Taken, StaleLease):
            return None

    def asked(self, check: Callable[[], tuple[Checked, int]], timeout: float | None, version: int) -> Reply:
        """Take the lock, check rows, send them and wait for their outputs."""
        deadline = self.turns.deadline(timeout)
        return self.turns.run(lambda: self._checked_and_answered(check, deadline, version), deadline)

    def _checked_and_answered(self, check: Callable[[], tuple[Checked, int]], deadline: int, version: int) -> Reply:
        given, n = check()
        self.require_stateless()
        try:
            return self.answered(given, n, deadline, version)
        except StaleLease:
            pass
        # The server replaced the model's arena. The inputs are still here, so retry once on a new lane.
        return self.answered(given, n, deadline, version)

    def answered(self, given: Checked, n: int, deadline: int, version: int) -> Reply:
        """Send n checked rows and wait for their outputs."""
        lane = self.roomy(n)
        if not 0 < n <= self.max_batch or (rows := self._taken_many(lane, n)) is None:
            return Pieces(self, lane, given, n, deadline, version).answered()
        try:
            return rows.reply(given, deadline, version)
        finally:
            self.put_back(rows, self.kept_many)

    async def answered_async(self, given: Checked, n: int, deadline: int, version: int) -> Reply:
        """Like `answered`, in an event loop and without the lock."""
        lane = self.lane
        if lane.gone is not None or (min(n, self.max_batch) > lane.rows and self._may_grow):
            import asyncio

            lane = await asyncio.to_thread(self.turns.run, lambda: self.roomy(n), deadline)
        return await Pieces(self, lane, given, n, deadline, version).answered_async()

    def _after_fork_in_child(self) -> None:
        self.turns.anew()
        self.kept, self.kept_many = [], []
