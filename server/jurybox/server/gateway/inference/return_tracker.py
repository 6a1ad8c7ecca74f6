"""Which connections are about to send another request, and whether the next ticket waits for them.

A gRPC client in a closed loop uses 200 to 300 microseconds of CPU per request, gateway and engine half as much, and
most of their share is a cost per ticket, regardless of its number of rows. If all of them share one or two cores, a
ticket that waits for recently answered clients loses little time, because the clients run meanwhile. So the next ticket
waits for half of the clients that recently sent their next request at once, as the engine does (engine/batches.py), and
the other half runs while it is computed.

A ticket does not wait for clients on other hosts or with infrequent requests. A client that did not return in time is
waited for again only after another quick request. There are no waits at all if they are often in vain, if a model's
cost is proportional to its rows, or if more cores are available.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from jurybox.server.batch_cost import BatchCost
from jurybox.server.security.access import ClientConnection

_FEW = 2  # cores that clients, gateway and engine share
_MOST_AWAY = 1024  # a limit, because connections may have ended
_QUICK = 0.004  # seconds within which a client in a closed loop sends its next request, if all run at once
_MOST_WAIT = 0.002  # seconds; the resolution of uvloop's timers is one millisecond
_HURRY = 0.1  # seconds: a request with a shorter time-out does not wait for others
_SHARED = 0.3  # the smallest share of a ticket's duration that is independent of its rows for which waiting pays
_MOST_IN_VAIN = 0.25  # the largest share of waits in vain; above it, tickets do not wait
_OUTLIER = 8  # times the smoothed duration of a ticket: the longest that is recorded for one
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
        self._until = 0.0  # when the current wait ends; 0: there is none
        self._in_vain = 0.0  # the share of waits that timed out, smoothed

    def arrived(self, client: ClientConnection | None, seconds: float, waiting: int) -> bool:
        """Record a request with a time-out of `seconds`; return whether the `waiting` requests should keep waiting."""
        if seconds < _HURRY:
            self._forget()
        if client is None or not self._few:
            return False
        client.quick = client.near and self._clock() - client.answered < _QUICK
        self._away.pop(client, None)
        return self._until > 0.0 and waiting < len(self._away)

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
        if self._few:
            seconds = min(seconds, max(_OUTLIER * self._took, _MOST_WAIT))
            self._cost.observe(rows, int(seconds * 1e9))
            self._took += _SMOOTHING * (seconds - self._took)

    def together(self, client: ClientConnection | None) -> bool:
        """Return whether the event loop may block for a ticket of this client and others, since no core sits idle."""
        return self._few and client is not None and client.quick

    def wait(self, waiting: int) -> float:
        """Return the seconds for which the next ticket, of `waiting` requests so far, should still wait."""
        if waiting >= len(self._away):
            if self._until:
                self._until, self._in_vain = 0.0, (1 - _SMOOTHING) * self._in_vain
            return 0.0
        now = self._clock()
        if self._until > now:
            return self._until - now
        if self._until:
            self._until, self._in_vain = 0.0, self._in_vain + _SMOOTHING * (1 - self._in_vain)
            self._forget()
        elif self._in_vain > _MOST_IN_VAIN or self._cost.fixed < _SHARED * 1e9 * self._took:
            self._in_vain *= _FORGIVEN
        else:
            self._until = now + _MOST_WAIT
            return _MOST_WAIT
        return 0.0

    def _forget(self) -> None:
        """Stop waiting for the clients that are away now, until they are quick again."""
        for client in self._away:
            client.quick = False
        self._away.clear()
