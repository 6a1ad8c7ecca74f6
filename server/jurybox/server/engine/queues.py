"""The queues of waiting tickets, one per model, and the choice of tickets for the next batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.scoreboard import MAX_LANES, NORMAL, PRIORITIES
from jurybox.protocol.wire import TICKET

Tickets = NDArray[Any]  # records of wire.TICKET

PASSED_OVER = 8  # batches without a priority's tickets after which its turn comes before that of all others


class Queue:
    """The waiting tickets of one model, in order of arrival.

    If they do not fit into one batch, those of a higher priority are taken first, and a lane's tickets all have one. A
    priority is passed over by PASSED_OVER batches at most, by one more if two are; then its tickets come first.

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
        self.ranked = False  # whether a waiting ticket may have another priority than NORMAL
        self.skipped = 0  # batches of other models that were computed first because of their priority
        self._passed = dict.fromkeys(PRIORITIES, 0)  # batches without tickets of a priority while some waited
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
        costs = None if self._costs is None else self._costs(waiting)
        if not self.pinned and self.rows <= self.max_batch and (costs is None or int(costs.sum()) <= self._max_cost):
            self._end = self.rows = 0
            if self.ranked:
                self._pass_over(waiting)
            return waiting
        among: slice | NDArray[np.intp] = self._of_one_version(waiting) if self.pinned else slice(None)
        some, turns, ranks = waiting[among], None, None
        if costs is not None:
            costs, turns = costs[among], self._turns[some["lane"]]
        if self.ranked:
            ranks = self._ranks(some)
        chosen = np.zeros(len(waiting), np.bool_)
        chosen[among] = fair_choice(some, self.max_batch, costs, self._max_cost, turns, ranks)
        batch: Tickets = waiting[chosen].copy()
        if costs is not None:
            self._turn += 1
            self._turns[batch["lane"]] = self._turn
        self._keep(~chosen)
        if self.pinned:
            self.pinned = bool(self.waiting["version"].any())
        if self.ranked:
            self._pass_over(batch)
        return batch

    @property
    def rank(self) -> int:
        """The rank of the next batch among those of other models: the lowest is computed first.

        It is the highest priority of a waiting ticket, unless other models' batches were preferred too often.
        """
        if self.skipped >= PASSED_OVER:
            return -self.skipped
        return int(self.waiting["priority"].min()) if self.ranked and self._end else NORMAL

    def _ranks(self, waiting: Tickets) -> NDArray[np.int64]:
        """Return the rank of each ticket: its priority, or a lower number if that was passed over too often."""
        ranks = waiting["priority"].astype(np.int64)
        for priority, passed in self._passed.items():
            if passed >= PASSED_OVER:
                ranks[waiting["priority"] == priority] = -passed
        return ranks

    def _pass_over(self, batch: Tickets) -> None:
        """Count the batches that had no tickets of a priority, after one was taken."""
        taken, waiting = set(batch["priority"].tolist()), set(self.waiting["priority"].tolist())
        for priority in PRIORITIES:
            self._passed[priority] = self._passed[priority] + 1 if priority in waiting - taken else 0
        self.ranked = bool(waiting - {NORMAL})

    def _of_one_version(self, waiting: Tickets) -> NDArray[np.intp]:
        """Return the indices of the tickets that request the same weights version as the first one.

        That is the oldest one, or of the lanes' oldest ones that of the highest priority. No ticket overtakes another
        one of its lane: otherwise a session's reset could be computed before the last step of its episode, and that
        step on the new episode's state.
        """
        lanes, order, first = waiting["lane"], np.arange(len(waiting)), 0
        if self.ranked:
            ranks = self._ranks(waiting)
            heads = np.sort(np.unique(lanes, return_index=True)[1])
            first = int(heads[np.argmin(ranks[heads])])
        same = waiting["version"] == waiting["version"][first]
        other = np.full(MAX_LANES, len(waiting))  # by lane: the first that requests another version
        np.minimum.at(other, lanes[~same], order[~same])
        return np.flatnonzero(same & (order < other[lanes]))

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
    ranks: NDArray[np.int64] | None = None,
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
        ranks: of each ticket, the same for all of a lane; those of a lower one come first. None: all are equal.
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
    keys = [place] if turns is None or costs is None else [turns, place]
    if ranks is not None:
        keys.append(ranks)
    order = np.argsort(place, kind="stable") if len(keys) == 1 else np.lexsort(keys)  # the last key is the first
    fits = int(np.searchsorted(np.cumsum(rows[order]), max_rows, side="right"))
    if costs is not None:
        fits = min(fits, int(np.searchsorted(np.cumsum(costs[order]), max_cost, side="right")))
    chosen = np.zeros(len(tickets), np.bool_)
    chosen[order[: max(fits, 1)]] = True
    return chosen
