"""The queues of waiting tickets, one per model, and the choice of tickets for the next batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.scoreboard import MAX_LANES
from jurybox.protocol.wire import TICKET

Tickets = NDArray[Any]  # records of wire.TICKET


class Queue:
    """The waiting tickets of one model, in order of arrival.

    Args:
        max_batch: rows of the largest batch; no ticket is larger.
        min_batch, max_wait_ns: hold a batch back until it has `min_batch` rows or its oldest ticket is
            `max_wait_ns` old. The defaults never hold one back.
        costs, max_cost: returns each ticket's cost if that is not its number of rows, and the maximum of a batch.
    """

    def __init__(
        self,
        max_batch: int,
        min_batch: int = 1,
        max_wait_ns: int = 0,
        costs: Callable[[Tickets], NDArray[np.int64]] | None = None,
        max_cost: int = 0,
    ) -> None:
        self._costs = costs if max_cost else None
        self._turns = np.zeros(MAX_LANES if max_cost else 0, np.int64)  # by lane: the turn in which it was last served
        self._turn = 0
        self._max_cost = max_cost
        self.max_batch = max_batch
        self.min_batch = min_batch
        self.max_wait_ns = max_wait_ns
        self.rows = 0
        self.pinned = False  # whether a waiting ticket may ask for a weights version
        self._tickets = np.zeros(256, TICKET)
        self._end = 0

    def __len__(self) -> int:
        return self._end

    @property
    def waiting(self) -> Tickets:
        return self._tickets[: self._end]

    def push(self, tickets: Tickets, rows: int | None = None) -> None:
        """Append copies of tickets. `rows`: the number of their rows, if it is known."""
        n = len(tickets)
        if self._end + n > len(self._tickets):
            self._make_room(n)
        native.copy_tickets(tickets, self._tickets, self._end)  # NumPy copies records field by field
        self._end += n
        self.rows += int(tickets["rows"].sum()) if rows is None else rows

    def ready_in(self, now: int) -> int | None:
        """Return the nanoseconds until `take` may be called: 0 now, None while nothing waits."""
        if not self._end:
            return None
        if self.rows >= self.min_batch or not self.max_wait_ns:
            return 0
        oldest = int(self._tickets["submitted"][0])
        return max(0, oldest + self.max_wait_ns - now)

    def expired(self, now: int) -> Tickets | None:
        """Remove and return the tickets whose deadline has passed; None, the usual case, if there are none."""
        if not native.any_expired(self._tickets, 0, self._end, now):
            return None
        waiting = self.waiting
        late = (waiting["deadline"] < now) & (waiting["deadline"] != 0)
        gone: Tickets = waiting[late].copy()
        self._keep(~late)
        return gone

    def take(self) -> Tickets:
        """Remove and return the tickets of the next batch, at most `max_batch` rows. The view is valid until `push`.

        It is a new object for every batch: a group recognises its batch by it (groups/group.py).
        """
        waiting = self._tickets[: self._end]
        if self.pinned:
            return self._take_of_one_version(waiting)
        costs = None if self._costs is None else self._costs(waiting)
        if self.rows <= self.max_batch and (costs is None or int(costs.sum()) <= self._max_cost):
            self._end = self.rows = 0
            return waiting
        turns = None if costs is None else self._turns[waiting["lane"]]
        chosen = fair_choice(waiting, self.max_batch, costs, self._max_cost, turns)
        batch = waiting[chosen].copy()
        if costs is not None:
            self._turn += 1
            self._turns[batch["lane"]] = self._turn
        self._keep(~chosen)
        return batch

    def _take_of_one_version(self, waiting: Tickets) -> Tickets:
        """Do the same as `take` with the tickets that request the same weights version as the oldest one.

        No ticket overtakes another one of its lane: otherwise a session's reset could be computed before the last step
        of its episode, and that step on the new episode's state.
        """
        same = waiting["version"] == waiting["version"][0]
        lanes, order = waiting["lane"], np.arange(len(waiting))
        other = np.full(MAX_LANES, len(waiting))  # by lane: the first that requests another version
        np.minimum.at(other, lanes[~same], order[~same])
        same &= order < other[lanes]
        chosen = np.zeros(len(waiting), np.bool_)
        chosen[np.flatnonzero(same)[fair_choice(waiting[same], self.max_batch)]] = True
        batch: Tickets = waiting[chosen].copy()
        self._keep(~chosen)
        self.pinned = bool(self.waiting["version"].any())
        return batch

    def drop(self, lane: int) -> Tickets:
        """Remove and return the tickets of a lane that was revoked."""
        waiting = self.waiting
        return self._drop(waiting["lane"] == lane)

    def withdraw(self, model: int) -> Tickets:
        """Remove and return the tickets of one of the models that share this queue."""
        return self._drop(self.waiting["model"] == model)

    def _drop(self, those: NDArray[np.bool_]) -> Tickets:
        dropped: Tickets = self.waiting[those].copy()
        if len(dropped):
            self._keep(~those)
        return dropped

    def _keep(self, keep: NDArray[np.bool_]) -> None:
        kept = self.waiting[keep]
        self._end = len(kept)
        self._tickets[: len(kept)] = kept
        self.rows = int(kept["rows"].sum())

    def _make_room(self, n: int) -> None:
        waiting = self.waiting
        self._tickets = np.zeros(2 * (len(waiting) + n), TICKET)
        self._tickets[: len(waiting)] = waiting


def fair_choice(
    tickets: Tickets,
    max_rows: int,
    costs: NDArray[np.int64] | None = None,
    max_cost: int = 0,
    turns: NDArray[np.int64] | None = None,
) -> NDArray[np.bool_]:
    """Choose the next tickets when more wait than fit into a batch. Return a mask over `tickets`.

    Lanes take turns by rows (deficit round robin in the limit): tickets are sorted by the number of rows that wait
    before them in their own lane, then by arrival. So the oldest ticket of every lane precedes the second one of any
    lane, and one greedy client cannot delay fifteen modest ones. If rows differ in cost, lanes take turns by cost, and
    of two lanes that are equal the one precedes whose last turn (`turns`) was earlier, since a batch may hold a single
    long row.

    Args:
        tickets: the waiting tickets in order of arrival.
        max_rows: the maximum number of rows in the batch.
        costs, max_cost: each ticket's cost and the maximum of the batch; None: only rows count.
        turns: the turn in which each ticket's lane was last served.
    """
    rows = tickets["rows"].astype(np.int64)
    weights = rows if costs is None else costs
    lanes = tickets["lane"]
    by_lane = np.argsort(lanes, kind="stable")
    behind = np.cumsum(weights[by_lane]) - weights[by_lane]  # rows before this one, including all earlier lanes
    first_of_lane = np.r_[True, lanes[by_lane][1:] != lanes[by_lane][:-1]]
    behind -= np.maximum.accumulate(np.where(first_of_lane, behind, 0))
    place = np.empty(len(tickets), np.int64)
    place[by_lane] = behind
    order = np.argsort(place, kind="stable") if turns is None or costs is None else np.lexsort((turns, place))
    fits = int(np.searchsorted(np.cumsum(rows[order]), max_rows, side="right"))
    if costs is not None:
        fits = min(fits, int(np.searchsorted(np.cumsum(costs[order]), max_cost, side="right")))
    chosen = np.zeros(len(tickets), np.bool_)
    chosen[order[: max(fits, 1)]] = True
    return chosen
