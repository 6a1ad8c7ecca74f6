"""Which clients are about to send another request, and so whether the next ticket waits for them.

Whoever is about to send the next ticket asks one object, which has one of two rules for whom it is worth to wait:

`QuickHalf`: half of the clients that recently sent their next request at once. A gRPC client in a closed loop uses 200
to 300 microseconds of CPU per request, gateway and engine half as much, and most of their share is a cost per ticket,
regardless of its number of rows. If all of them share one or two cores, a ticket that waits for recently answered
clients loses little time, because the clients run meanwhile. The engine does the same (engine/batches.py), and the
other half runs while the ticket is computed. It does not wait if so few clients run that a core may have nothing to
do, for clients on other hosts or with infrequent requests, if a model's cost is proportional to its rows, or if more
cores are available. For the same reason the event loop may block for a short answer, as long as no core sits idle
meanwhile or a client is alone: a wake-up through the loop takes longer. Where a batch's fixed cost is large (a large
model, a GPU), two halves in turn would pay it twice as often as needed. There it waits, with any number of cores, for
all clients that returned within half of that cost the last time, and for no longer than that; the engine does the same
within a quarter, as its own clients return sooner.

`WholeGroup`: the whole group of those that returned at once the last time, which are the robots of one port. Those
that only wait for their answers send their next observations at once, one after another. An engine that starts on the
first of them computes it alone, and the rest in the next batch; from then on there are two groups that take turns, and
each batch has half of the robots. If all of them return in less time than the fixed cost of a batch, which does not
depend on its rows, one batch of all is faster than two of half of them: with n robots, a fixed cost F and a time R
until the last one returns, n are answered in F + R, against n / 2 in F. The batch waits for no robot longer than F.

With both, a client that did not return in time is waited for again only after another quick request, and there are no
waits at all if they are often in vain.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from jurybox import native
from jurybox.server.security.access import ClientConnection

_FEW = 2  # cores that clients, gateway and engine share
_BUSY = 4  # clients that keep these cores busy: with fewer, some of them wait for each other's threads at times
_MOST_AWAY = 1024  # a limit, because connections may have ended
_QUICK = 0.01  # seconds within which a client in a closed loop sends its next request, if many share two cores
_MOST_WAIT = (
    0.002,
    0.005,
)  # seconds: twice the time that quick clients take, but not less than the first, or more than the second
_EARLY = 0.0005  # seconds that a timer may fire early: those of uvloop have milliseconds
_HURRY = 0.1  # seconds: a request with a shorter time-out does not wait for others
_PROMPT = 0.5  # the share of a costly batch's fixed cost within which its clients return; the engine's own are quicker
_SHARED = 0.3  # the smallest share of a ticket's duration that is independent of its rows for which waiting pays
_OUTLIER = 8  # times the smoothed duration of a ticket: the longest that is recorded for one
BRIEF = 0.0005  # seconds for which the event loop may block for an answer; waking the loop takes a fifth of it
_ALONE = 4  # consecutive requests of one client after which it counts as alone
_BLOCKED_IN_VAIN = 16  # tickets without blocking after the loop has blocked in vain
_SMOOTHING = 0.1


class Returns:
    """What both rules have in common. This one waits for nobody. Use it in one event loop only.

    Args:
        clock: a monotonic clock in seconds.

    Attributes:
        sends_ahead: whether a full ticket may be sent although every engine has one.
        alone: whether the last requests all came from one client.
    """

    sends_ahead = False
    alone = False
    _most_in_vain, _forgiven = 1.0, 1.0  # the largest share of waits in vain; its decay with each ticket without one

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cost = native.BatchCost()
        self._away: dict[Any, float] = {}  # when quick ones were answered that have sent no request since, oldest first
        self._in_vain = 0.0  # the share of waits that ended in vain, smoothed

    def arrived(self, client: Any, seconds: float, waiting: int) -> bool:
        """Record a request with a time-out of `seconds`; return whether the `waiting` requests should keep waiting.

        Args:
            client: who sent it and has no other request in flight; None: unknown.
        """
        return False

    def answered(self, client: Any) -> None:
        """Record that a client got its answer or an error. Of a ticket, `took` comes before."""

    def left(self, client: Any) -> None:
        """Record that a client is gone."""

    def went(self, waits: Callable[[], Sequence[float]]) -> None:
        """Record that a ticket is sent; `waits` returns the seconds that each of its requests has waited."""

    def took(self, rows: int, seconds: float) -> None:
        """Record that a ticket of `rows` rows was answered after `seconds`."""

    def wait(self, waiting: int, computing: int = 0) -> float:
        """Return the seconds for which the next ticket should still wait. A full ticket is not asked about.

        Args:
            waiting: requests that wait to be sent.
            computing: requests in flight.
        """
        return 0.0

    def may_block(self, requests: int) -> bool:
        """Return whether the event loop may block for up to BRIEF for the answer to a ticket of so many requests."""
        return False

    def blocked_in_vain(self) -> None:
        """Record that the event loop has blocked, and the answer did not arrive."""

    @property
    def fixed(self) -> float:
        """Fixed cost of a batch, independent of its rows, in seconds (`native.BatchCost.possible`)."""
        return self._cost.possible / 1e9

    def _waited(self, weight: float, *, in_vain: bool) -> None:
        self._in_vain += weight * (in_vain - self._in_vain)

    @property
    def _hopeless(self) -> bool:
        """Whether waits are in vain too often."""
        return self._in_vain > self._most_in_vain


class QuickHalf(Returns):
    """Waits for half of the connections that recently sent their next request at once; for all if batches are costly.

    Args:
        cores: the number of cores that this process may use; None: those of its affinity mask.
        clock: see `Returns`.
    """

    _most_in_vain, _forgiven = 0.25, 0.995

    def __init__(self, cores: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._few = (len(os.sched_getaffinity(0)) if cores is None else cores) <= _FEW
        self._took = 0.0  # seconds of a ticket, smoothed
        self._prompt = 0.0  # seconds for which a ticket waits for all who return within them; 0: tickets are not costly
        self._delay = 0.0  # seconds that quick clients take, smoothed
        self._until = 0.0  # when the current wait ends; 0: there is none
        self._client: ClientConnection | None = None  # of the last request
        self._repeated = 0  # consecutive requests of it after its first
        self._brief = 0.0  # seconds of a ticket, smoothed, without the slow ones
        self._block_after = 0  # tickets until the loop may block again

    def arrived(self, client: ClientConnection | None, seconds: float, waiting: int) -> bool:
        """See `Returns.arrived`."""
        self._repeated = self._repeated + 1 if client is not None and client is self._client else 0
        self._client = client
        if seconds < _HURRY:
            self._forget()
        if client is None or not (self._few or self._prompt):
            return False
        delay = self._clock() - client.answered
        client.quick = delay < self._prompt if self._prompt else client.near and delay < _QUICK
        if client.quick:
            self._delay += _SMOOTHING * (delay - self._delay)
        self._away.pop(client, None)
        return self._until > 0.0 and not self._enough(waiting)

    def answered(self, client: ClientConnection | None) -> None:
        """See `Returns.answered`."""
        if client is not None and (self._few or self._prompt):
            client.answered = now = self._clock()
            if client.quick:
                if len(self._away) >= _MOST_AWAY:
                    self._forget()
                self._away[client] = now

    def took(self, rows: int, seconds: float) -> None:
        """See `Returns.took`."""
        brief = min(seconds, 2 * BRIEF)  # a slow ticket says little about the next one
        self._brief += 0.125 * (brief - self._brief) if self._brief else brief
        if self._few or seconds * 1e9 >= native.LARGE_NS:
            most = max(_OUTLIER * self._took, _MOST_WAIT[0])
            self._took += _SMOOTHING * (min(seconds, most) - self._took)
            if seconds <= most:  # what was cut would show a cost of its rows that they do not have
                self._cost.observe(rows, int(seconds * 1e9))
            self._prompt = self._cost.prompt(_PROMPT) / 1e9

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """See `Returns`."""
        return self._repeated > _ALONE

    def may_block(self, requests: int) -> bool:
        """See `Returns.may_block`."""
        if self._block_after > 0:
            self._block_after -= 1
            return False
        if self._brief >= BRIEF or self._client is None:
            return False
        return (self.alone and requests == 1) or (self._few and self._client.quick)

    def blocked_in_vain(self) -> None:
        """See `Returns.blocked_in_vain`."""
        self._block_after = _BLOCKED_IN_VAIN

    def wait(self, waiting: int, computing: int = 0) -> float:
        """See `Returns.wait`."""
        if self._enough(waiting):
            if self._until:
                self._until = 0.0
                self._waited(_SMOOTHING, in_vain=False)
            return 0.0
        now = self._clock()
        if self._until > now + _EARLY:
            return self._until - now
        if self._until:
            self._until = 0.0
            self._waited(_SMOOTHING, in_vain=True)
            self._forget()
        elif self._hopeless or (not self._prompt and self.fixed < _SHARED * self._took):
            self._in_vain *= self._forgiven
        else:
            most = self._prompt or min(max(2 * self._delay, _MOST_WAIT[0]), _MOST_WAIT[1])
            self._until = now + most
            return most
        return 0.0

    def _enough(self, waiting: int) -> bool:
        if self._prompt:
            return not self._away
        return waiting >= len(self._away) or len(self._away) <= _BUSY

    def _forget(self) -> None:
        """Stop waiting for the clients that are away now, until they are quick again."""
        for client in self._away:
            client.quick = False
        self._away.clear()


class WholeGroup(Returns):
    """Waits for all that returned at once the last time, if that pays. A lone client never waits.

    Args:
        most: rows of the largest batch.
        engines: number of engines that compute at the same time; each gets a part of the group.
        waited: called with the seconds that each request of a ticket waited before it was sent.
        clock: see `Returns`.
    """

    sends_ahead = True
    _most_in_vain, _forgiven = 0.4, 0.99

    def __init__(
        self,
        most: int,
        engines: int = 1,
        waited: Callable[[Sequence[float]], None] = lambda waits: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self._most, self._engines, self._reported = most, engines, waited
        self._answered: dict[Any, float] = {}  # answer times of the clients without a request since
        self._quick: set[Any] = set()  # those that returned at once the last time
        self._first, self._gap = 0.0, 0.0  # seconds until the first one returns, and between two that return
        self._batch = 0.0  # when the last batch was answered
        self._back = 0.0  # when the last of its clients returned; 0: none has
        self._waits = self._expired = False  # whether the next batch waits for a client, and whether one did not come

    def arrived(self, client: Any, seconds: float = 0.0, waiting: int = 1) -> bool:
        """See `Returns.arrived`."""
        if client is None:
            return False
        self._away.pop(client, None)
        answered = self._answered.pop(client, None)
        now = self._clock()
        if answered is None or now - answered > self.fixed:
            self._quick.discard(client)
            return False
        self._quick.add(client)
        if answered < self._batch:
            return False  # it belongs to an earlier batch
        if self._back:
            self._gap = _smoothed(self._gap, now - self._back)
        else:
            self._first = _smoothed(self._first, now - self._batch)
        self._back = now
        return False

    def answered(self, client: Any) -> None:
        """See `Returns.answered`."""
        if client is None:
            return
        self._answered[client] = now = self._clock()
        if client in self._quick:
            self._away.pop(client, None)
            self._away[client] = now

    def left(self, client: Any) -> None:
        """See `Returns.left`."""
        self._answered.pop(client, None)
        self._away.pop(client, None)
        self._quick.discard(client)

    def went(self, waits: Callable[[], Sequence[float]]) -> None:
        """See `Returns.went`."""
        self._reported(waits())

    def took(self, rows: int, seconds: float) -> None:
        """See `Returns.took`."""
        self._cost.observe(rows, int(seconds * 1e9))
        self._batch, self._back = self._clock(), 0.0
        if self._waits:
            self._waited(2 * _SMOOTHING, in_vain=self._expired)
            self._waits = self._expired = False
        else:
            self._in_vain *= self._forgiven

    def wait(self, waiting: int, computing: int = 0) -> float:
        """See `Returns.wait`."""
        now, fixed = self._clock(), self.fixed
        while self._away:
            client, answered = next(iter(self._away.items()))
            if now - answered < fixed:
                break
            self._expired = True
            del self._away[client]  # do not wait for it until it has returned quickly again
            self._quick.discard(client)
        if not self._away or self._hopeless:
            return 0.0
        together = min(self._most, -(-(waiting + len(self._away) + computing) // self._engines))
        if waiting >= together or self._first + self._gap * (together - 1) > fixed:
            return 0.0
        self._waits = True
        return next(reversed(self._away.values())) + fixed - now


def _smoothed(before: float, now: float) -> float:
    return before + _SMOOTHING * (now - before) if before else now
