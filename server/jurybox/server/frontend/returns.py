"""Which connections are about to send another request, and so whether the next ticket waits for them.

A gRPC client in a closed loop uses 200 to 300 microseconds of CPU per request, gateway and engine half as much, and
most of their share is a cost per ticket, regardless of its number of rows. If all of them share one or two cores, a
ticket that waits for recently answered clients loses little time, because the clients run meanwhile. So the next ticket
waits for half of the clients that recently sent their next request at once, as the engine does (engine/batches.py), and
the other half runs while it is computed. It does not wait if so few clients run that a core may have nothing to do.

A ticket does not wait for clients on other hosts or with infrequent requests. A client that did not return in time is
waited for again only after another quick request. There are no waits at all if they are often in vain, if a model's
cost is proportional to its rows, or if more cores are available.

For the same reason the event loop may block for a short answer, as long as no core sits idle meanwhile or a client is
alone: a wake-up through the loop takes longer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from jurybox.server.batch_cost import BatchCost
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
_SHARED = 0.3  # the smallest share of a ticket's duration that is independent of its rows for which waiting pays
_MOST_IN_VAIN = 0.25  # the largest share of waits in vain; above it, tickets do not wait
_OUTLIER = 8  # times the smoothed duration of a ticket: the longest that is recorded for one
BRIEF = 0.0005  # seconds for which the event loop may block for an answer; waking the loop takes a fifth of it
_ALONE = 4  # consecutive requests of one client after which it counts as alone
_BLOCKED_IN_VAIN = 16  # tickets without blocking after the loop has blocked in vain
_SMOOTHING, _FORGIVEN = 0.1, 0.995  # the second: the decay of that share with each ticket that does not wait


class ReturnTracker:
    """A prediction of which clients of a model are about to send another request. Use it in one event loop only.

    Args:
        cores: the number of cores that this process may use; None: those of its affinity mask.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, cores: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._few = (len(os.sched_getaffinity(0)) if cores is None else cores) <= _FEW
        self._clock = clock
        self._cost = BatchCost()
        self._took = 0.0  # seconds of a ticket, smoothed
        self._away: dict[ClientConnection, None] = {}  # quick ones that were answered and have sent no request since
        self._delay = 0.0  # seconds that quick clients take, smoothed
        self._until = 0.0  # when the current wait ends; 0: there is none
        self._in_vain = 0.0  # the share of waits that timed out, smoothed
        self._client: ClientConnection | None = None  # of the last request
        self._repeated = 0  # consecutive requests of it after its first
        self._brief = 0.0  # seconds of a ticket, smoothed, without the slow ones
        self._block_after = 0  # tickets until the loop may block again

    def arrived(self, client: ClientConnection | None, seconds: float, waiting: int) -> bool:
        """Record a request with a time-out of `seconds`; return whether the `waiting` requests should keep waiting.

        Args:
            client: the connection that sent it and has no other request in flight; None: unknown.
        """
        self._repeated = self._repeated + 1 if client is not None and client is self._client else 0
        self._client = client
        if seconds < _HURRY:
            self._forget()
        if client is None or not self._few:
            return False
        delay = self._clock() - client.answered
        client.quick = client.near and delay < _QUICK
        if client.quick:
            self._delay += _SMOOTHING * (delay - self._delay)
        self._away.pop(client, None)
        return self._until > 0.0 and not self._enough(waiting)

    def answered(self, client: ClientConnection | None) -> None:
        """Record that a request was answered."""
        if client is not None and self._few:
            client.answered = self._clock()
            if client.quick:
                if len(self._away) >= _MOST_AWAY:
                    self._forget()
                self._away[client] = None

    def took(self, rows: int, seconds: float) -> None:
        """Record that a ticket of `rows` rows was answered after `seconds`."""
        brief = min(seconds, 2 * BRIEF)  # a slow ticket says little about the next one
        self._brief += 0.125 * (brief - self._brief) if self._brief else brief
        if self._few:
            seconds = min(seconds, max(_OUTLIER * self._took, _MOST_WAIT[0]))
            self._cost.observe(rows, int(seconds * 1e9))
            self._took += _SMOOTHING * (seconds - self._took)

    @property
    def alone(self) -> bool:
        """Whether the last requests all came from one client."""
        return self._repeated > _ALONE

    def may_block(self, requests: int) -> bool:
        """Return whether the event loop may block for up to BRIEF for the answer to the next ticket.

        Args:
            requests: the number of requests that the ticket answers.
        """
        if self._block_after > 0:
            self._block_after -= 1
            return False
        if self._brief >= BRIEF or self._client is None:
            return False
        return (self.alone and requests == 1) or (self._few and self._client.quick)

    def blocked_in_vain(self) -> None:
        """Record that the event loop has blocked, and the answer did not arrive."""
        self._block_after = _BLOCKED_IN_VAIN

    def wait(self, waiting: int) -> float:
        """Return the seconds for which the next ticket, of `waiting` requests so far, should still wait."""
        if self._enough(waiting):
            if self._until:
                self._until, self._in_vain = 0.0, (1 - _SMOOTHING) * self._in_vain
            return 0.0
        now = self._clock()
        if self._until > now + _EARLY:
            return self._until - now
        if self._until:
            self._until, self._in_vain = 0.0, self._in_vain + _SMOOTHING * (1 - self._in_vain)
            self._forget()
        elif self._in_vain > _MOST_IN_VAIN or self._cost.fixed < _SHARED * 1e9 * self._took:
            self._in_vain *= _FORGIVEN
        else:
            most = min(max(2 * self._delay, _MOST_WAIT[0]), _MOST_WAIT[1])
            self._until = now + most
            return most
        return 0.0

    def _enough(self, waiting: int) -> bool:
        return waiting >= len(self._away) or len(self._away) <= _BUSY

    def _forget(self) -> None:
        """Stop waiting for the clients that are away now, until they are quick again."""
        for client in self._away:
            client.quick = False
        self._away.clear()
