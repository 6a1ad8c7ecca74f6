"""Which engine gets a lane's next ticket, and whether the end of one is charged to the lane's model."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from jurybox.client.in_flight import Answer, InFlight
from jurybox.client.transports.transport import SERVING
from jurybox.protocol.errors import Code
from jurybox.protocol.scoreboard import state_of

# A program's seeded random numbers must not depend on its requests, and forked clients must not all draw the same.
_random = random.SystemRandom()
_WITHOUT = 1.0  # seconds without tickets for an engine that did not have the model
MOST_DEATHS = 3  # after this many, charged to its model, with a ticket in flight, the ticket is assumed to be the cause


class EngineChoice:
    """The engines that may compute a lane's tickets.

    Args:
        records: all engines' records of scoreboard.ENGINE.
        engines: those that compute the model; empty: all.
        home: the one that the lane uses unless others are less busy.
        one: all tickets go to one of them, because it has the state of their sessions.

    Attributes:
        states: of all engines.
        home: the one that the lane uses unless others are less busy.
        one_engine: whether there is only one.
        engines: the number that compute this lane's tickets at the same time.
    """

    def __init__(self, records: NDArray[Any], engines: Sequence[int], home: int, *, one: bool) -> None:
        self.states = records["state"]
        self._waits = records["expected_wait"]
        self._mine = [engine for engine in engines if engine < len(self.states)] or list(range(len(self.states)))
        self.home = home if home in self._mine else self._mine[0]
        self._one = one
        self.one_engine = len(self._mine) == 1
        self.engines = 1 if one else len(self._mine)
        self._stays = -1  # the engine of the sessions
        self._without: dict[int, float] = {}  # engines without the model, and until when they get no ticket, s

    def choose(self, in_flight: Mapping[int, InFlight]) -> int | None:
        """Choose one of several engines: the one with the fewest of the lane's tickets unless others are less busy.

        Return None if none is serving. Of equal ones, it is the lane's own: an engine knows how fast its clients
        return, and waits for them or not; so few clients change engines.
        """
        serving = self._able()
        if not serving:
            return None
        home = self.home
        if self._one:  # the first engine used, as long as it is serving
            if self._stays not in serving:
                self._stays = home if home in serving else _random.choice(serving)
            return self._stays
        waits = self._waits.tolist()
        bound = 1.5 * max(0, min([waits[i] for i in serving]))  # negative: another process corrupted it
        best = [i for i in serving if waits[i] <= bound]
        if in_flight:
            at = [ticket.engine for ticket in list(in_flight.values())]
            tickets = {i: at.count(i) for i in best}
            least = min(tickets.values())
            best = [i for i in best if tickets[i] == least]
        return home if home in best else _random.choice(best)

    def able(self, in_flight: Mapping[int, InFlight]) -> list[int]:
        """Return the serving engines that may have the model, the lane's own first; with `one`, only that."""
        if self._one:
            engine = self.choose(in_flight)
            return [] if engine is None else [engine]
        return sorted(self._able(), key=lambda i: (i < self.home, i))

    def replace(self, other: EngineChoice) -> None:
        """Use the engine of another lane, which is replaced: the server has counted both."""
        if other.home in self._mine:
            self.home = other.home

    def goes_on_without(self, engine: int) -> bool:
        """Send nothing to an engine for a while, because it has not the model; return whether another may have it."""
        self._without[engine] = time.monotonic() + _WITHOUT
        return bool(self._with_model(self._serving()))

    def described(self) -> str:
        """Return the states of all engines, for messages."""
        return ", ".join(state_of(state).name.lower() for state in self.states)

    def forget(self) -> None:
        """Drop the scoreboard, so that it is unmapped."""
        del self.states, self._waits

    def _serving(self) -> list[int]:
        states = self.states.tolist()
        return [i for i in self._mine if states[i] == SERVING]

    def _able(self) -> list[int]:
        """Return the serving engines that may have the model; if none may, all that serve."""
        serving = self._serving()
        return (self._with_model(serving) or serving) if self._without else serving

    def _with_model(self, engines: Sequence[int]) -> list[int]:
        """Return those engines that may have the model."""
        now = time.monotonic()
        return [i for i in engines if self._without.get(i, 0.0) <= now]


class EngineDeaths:
    """Which ends of engines, found with tickets of a lane, are charged to the lane's model.

    Args:
        charged: shape (1,), the deaths that are charged to the model; None: each is.
        far: a connection broke, and the relay handles engines: none is.
    """

    def __init__(self, charged: NDArray[Any] | None, *, far: bool) -> None:
        self._charged = charged
        self._far = far
        self._before = 0 if charged is None else charged.item(0)
        self._blamed: dict[int, bool] = {}  # by incarnation

    def blames(self, incarnation: int) -> bool:
        """Return whether the end of this incarnation is charged to the model."""
        if self._far or self._charged is None:
            return not self._far
        if incarnation not in self._blamed:
            charged = self._charged.item(0)
            self._blamed[incarnation] = charged != self._before
            self._before = charged
        return self._blamed[incarnation]

    def forget(self) -> None:
        """Drop the scoreboard, so that it is unmapped."""
        self._charged = None


def fatal(model: str, ticket: InFlight) -> Answer:
    """Return an error in place of an engine's answer, so that a ticket that kills engines is not sent again."""
    why = (
        f"{MOST_DEATHS} engines died one after another with this ticket of model {model!r} ({ticket.rows} rows) "
        "in flight; it is not sent again. See the server's log for what ended them"
    )
    return Answer(ticket.sequence, Code.MODEL_FAILED, why, 0, ticket.incarnation)
