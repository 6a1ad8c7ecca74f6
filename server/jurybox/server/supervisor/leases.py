"""Leases of lanes: granting, detecting dead clients, and freeing rows once no engine uses them.

A lane goes free -> granted -> held -> retiring -> free. It is held once its client has locked it: a kernel lock on the
scoreboard's file, which the kernel drops however the client ends. A grant that no client locks within the grace period
expires. A lane is retiring while living engines have been asked to forget its tickets and have not all confirmed:
otherwise an engine that still computes one of them would write results into rows that another client has leased.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jurybox import native
from jurybox.protocol.errors import Busy
from jurybox.protocol.scoreboard import MAX_LANES, NORMAL, Scoreboard

GRACE = 2.0  # seconds from the grant to the client's lock


@dataclass(slots=True)
class GrantedLease:
    """A lane that is not free."""

    lane: int
    lease: int
    model: int
    first: int
    rows: int
    granted: float
    engine: int = 0
    held: bool = False
    retiring: set[int] | None = field(default=None)  # engines that have not confirmed yet; None: the lane is leased


class Leases:
    """The lanes of a server; the only writer of the scoreboard's lane table.

    Args:
        scoreboard: the scoreboard that shows the lanes.
        is_locked: returns whether a client holds the kernel lock of a lane.
        clock: seconds, monotonic.
    """

    def __init__(self, scoreboard: Scoreboard, is_locked: Callable[[int], bool], clock: Callable[[], float]) -> None:
        self._scoreboard = scoreboard
        self._is_locked = is_locked
        self._clock = clock
        self._lanes: dict[int, GrantedLease] = {}
        self._engines: dict[int, int] = {}  # of each model's last lane
        # The first number is random, so that tickets of an earlier server's clients are recognised as stale.
        self._next = (secrets.randbits(31) << 32) + 1

    def held(self, lane: int, lease: int) -> GrantedLease | None:
        """Return a lane if it has this lease and is not retiring; else None."""
        found = self._lanes.get(lane)
        return found if found is not None and found.lease == lease and found.retiring is None else None

    def grant(
        self,
        model: int,
        rows: int,
        arena_rows: int,
        arena: int = 0,
        engines: Sequence[int] = (0,),
        priority: int = NORMAL,
    ) -> GrantedLease:
        """Lease `rows` adjacent rows of a model's arena, whose number is `arena`.

        Args:
            engines: those that compute the model; the lane gets the one with the fewest lanes of the model.
            priority: of its tickets, one of scoreboard.PRIORITIES.

        Raises:
            Busy: no such run of rows, or no lane, is free; the message says how many are leased.
        """
        first = self._free_run(model, rows, arena_rows)
        lane = next((n for n in range(MAX_LANES) if n not in self._lanes and not self._is_locked(n)), None)
        if first is None or lane is None:
            leased = sum(held.rows for held in self._lanes.values() if held.model == model)
            raise Busy(
                f"no {rows} neighbouring rows are free: {leased} of the arena's {arena_rows} rows are leased in "
                f"{len(self._lanes)} of {MAX_LANES} lanes; close clients, ask for fewer rows, or raise the "
                "model's 'rows' in the server's configuration"
            )
        engine = self._least_leased(model, engines)
        leased_lane = GrantedLease(lane, self._next, model, first, rows, self._clock(), engine)
        self._next += 1
        self._lanes[lane] = leased_lane
        for lanes in (self._scoreboard.own_lanes, self._scoreboard.lanes):
            native.grant_lane(lanes, lane, model, first, rows, arena, leased_lane.lease, priority)
        return leased_lane

    def release(self, lane: int, lease: int, engines: Iterable[int]) -> GrantedLease | None:
        """Release a client's lane and return it; return None if the client does not hold it."""
        leased = self._lanes.get(lane)
        if leased is None or leased.lease != lease or leased.retiring is not None:
            return None
        self._retire(leased, engines)
        return leased

    def reclaim(self, engines: Iterable[int]) -> list[GrantedLease]:
        """Retire the lanes of clients that died or never locked them, and return these lanes."""
        now = self._clock()
        dead = []
        for leased in self._lanes.values():
            if leased.retiring is not None:
                continue
            if self._is_locked(leased.lane):
                leased.held = True
            elif leased.held or now - leased.granted > GRACE:
                dead.append(leased)
        for leased in dead:
            self._retire(leased, engines)
        return dead

    def revoke(self, model: int, engines: Iterable[int]) -> list[GrantedLease]:
        """Retire all lanes of a model whose arena is removed, and return them."""
        revoked = [leased for leased in self._lanes.values() if leased.model == model and leased.retiring is None]
        for leased in revoked:
            self._retire(leased, engines)
        return revoked

    def charge(self, model: int) -> None:
        """Show the clients of a model that an engine's death is charged to it."""
        own = self._scoreboard.own_lanes
        those = own["model"] == model
        own["deaths"][those] += 1
        self._scoreboard.lanes["deaths"][those] = own["deaths"][those]

    def confirmed(self, lane: int, lease: int, engine: int) -> None:
        """Record that an engine has forgotten a retiring lane. The lane is free once all engines have."""
        leased = self._lanes.get(lane)
        if leased is None or leased.lease != lease or leased.retiring is None:
            return
        leased.retiring.discard(engine)
        if not leased.retiring:
            del self._lanes[lane]

    def engine_died(self, engine: int) -> None:
        """Record that an engine is dead, so that no retiring lane waits for it."""
        for leased in list(self._lanes.values()):
            if leased.retiring is not None:
                self.confirmed(leased.lane, leased.lease, engine)

    def in_use(self) -> list[GrantedLease]:
        """Return all lanes that are not free."""
        return list(self._lanes.values())

    def _retire(self, leased: GrantedLease, engines: Iterable[int]) -> None:
        for lanes in (self._scoreboard.own_lanes, self._scoreboard.lanes):
            native.take_back_lane(lanes, leased.lane)
        leased.retiring = set(engines)
        if not leased.retiring:
            del self._lanes[leased.lane]

    def _least_leased(self, model: int, engines: Sequence[int]) -> int:
        """Return the engine with the fewest lanes of a model; equal ones take turns."""
        lanes = dict.fromkeys(engines, 0)
        for leased in self._lanes.values():
            if leased.model == model and leased.retiring is None and leased.engine in lanes:
                lanes[leased.engine] += 1
        last = self._engines.get(model, -1)
        engine = min(lanes, key=lambda one: (lanes[one], one <= last, one))
        self._engines[model] = engine
        return engine

    def _free_run(self, model: int, rows: int, arena_rows: int) -> int | None:
        """Return the first of `rows` free rows, or None. Takes the smallest gap that fits.

        A single row lies at the end of its gap, more rows at the start: a single row is often leased for a moment only,
        such as that of a first request, and between two larger lanes it would leave gaps that later lanes cannot use.
        """
        taken = sorted((held.first, held.rows) for held in self._lanes.values() if held.model == model)
        gaps, end = [], 0
        for first, length in [*taken, (arena_rows, 0)]:
            if first - end >= rows:
                gaps.append((first - end, end))
            end = first + length
        if not gaps:
            return None
        length, first = min(gaps)
        return first + length - 1 if rows == 1 else first
