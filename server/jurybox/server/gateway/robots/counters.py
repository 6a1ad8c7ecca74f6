"""Counters of a robot port since the start of the gateway, for `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jurybox.client.chunks import DROPPED
from jurybox.protocol.errors import Code, Error, plain
from jurybox.protocol.scoreboard import TIME_BUCKETS
from jurybox.server.gateway.robots.msgpack_arrays import Malformed

REFUSALS = ("token", "full")  # why a connection was refused
FAILURES = ("malformed", "observation", "row", "late", "session", "model", "server")  # why an observation got an error
_REASONS = {
    Code.MALFORMED: "malformed",
    Code.SPEC_MISMATCH: "observation",
    Code.ROW_FAILED: "row",
    Code.TIMEOUT: "late",
    Code.SESSION_LOST: "session",
    Code.MODEL_FAILED: "model",
}
_JITTER = 1 / 16
_MOST_SECONDS, _MOST_COUNT = 3600.0, 1_000_000


class Times:
    """A histogram of durations with the scoreboard's buckets: bucket i counts those from 2^(i-1) to 2^i ns.

    Attributes:
        counts: (TIME_BUCKETS,) uint64.
        total: sum of the durations, seconds.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(TIME_BUCKETS, np.uint64)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self.counts[min(int(seconds * 1e9).bit_length(), TIME_BUCKETS - 1)] += np.uint64(1)
        self.total += seconds


class Jitter:
    """The smoothed difference between successive delays of the same robot (RFC 3550, 6.4.1).

    Attributes:
        seconds: the jitter over all robots.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, last: float | None, delay: float) -> float:
        """Add a robot's delay, given its previous one (None: there is none), and return the delay."""
        if last is not None:
            self.seconds += _JITTER * (abs(delay - last) - self.seconds)
        return delay


class PortCounters:
    """The counters of one port. Belongs to the gateway's event loop.

    Attributes:
        connected: robots connected now.
        opened, refused: connections accepted, and refused ones by reason.
        sessions: episodes begun.
        requests, failures: observations answered, and by reason those that got an error.
        delay, jitter: time from receiving an observation to sending its answer.
        batch_wait: time from receiving an observation to sending its batch to an engine.
        client_delay, client_jitter, dropped, starved: as reported by robots that execute chunks (`AsyncChunkPolicy`).
    """

    def __init__(self) -> None:
        self.connected = self.opened = self.sessions = self.requests = self.starved = 0
        self.refused: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.delay, self.batch_wait, self.client_delay = Times(), Times(), Times()
        self.jitter, self.client_jitter = Jitter(), Jitter()

    def failed(self, error: Error) -> None:
        """Count an observation that got an error."""
        self.failures[_REASONS.get(error.code, "server")] += 1

    def waited(self, waits: Sequence[float]) -> None:
        """Add the waiting times of one batch's observations, in seconds."""
        for seconds in waits:
            self.batch_wait.add(seconds)


class RobotDelays:
    """The delays of one connection, which adds them to its port's counters."""

    def __init__(self, counters: PortCounters) -> None:
        self._counters = counters
        self._last: float | None = None
        self._last_reported: float | None = None

    def answered(self, seconds: float, report: ChunkReport | None) -> None:
        """Count an answered observation.

        Args:
            seconds: time from its arrival to its answer.
            report: the report that came with it, if any.
        """
        counters = self._counters
        counters.requests += 1
        counters.delay.add(seconds)
        self._last = counters.jitter.add(self._last, seconds)
        if report is None:
            return
        if report.delay is not None:
            counters.client_delay.add(report.delay)
            self._last_reported = counters.client_jitter.add(self._last_reported, report.delay)
        counters.dropped.update(report.dropped)
        counters.starved += report.starved


class ChunkReport:
    """A robot's report of the chunks it executed since its last request (jurybox.client.chunks.REPORT).

    Raises:
        Malformed: the value is not a valid report.
    """

    def __init__(self, report: Any) -> None:
        if not isinstance(report, Mapping):
            raise Malformed(f"chunk_report: expected a map, came {type(report).__name__}")
        if unknown := [key for key in report if key not in ("delay", "starved", *DROPPED)]:
            raise Malformed(
                f"chunk_report: expected delay, starved, {', '.join(DROPPED)}; came {plain(unknown[0], 80)}"
            )
        delay = report.get("delay")
        if delay is not None and not (type(delay) in (int, float) and 0 <= delay <= _MOST_SECONDS):
            raise Malformed(f"chunk_report: expected a delay from 0 to {_MOST_SECONDS:.0f} s, came {plain(delay, 80)}")
        self.delay: float | None = None if delay is None else float(delay)
        counts = {name: report.get(name, 0) for name in ("starved", *DROPPED)}
        for name, count in counts.items():
            if type(count) is not int or not 0 <= count <= _MOST_COUNT:
                raise Malformed(
                    f"chunk_report: expected {name} as a number from 0 to {_MOST_COUNT}, came {plain(count, 80)}"
                )
        self.starved: int = counts.pop("starved")
        self.dropped: dict[str, int] = counts
