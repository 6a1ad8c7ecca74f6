"""The scoreboard: shared pages with the state of a server.

Engines write their state (heartbeat, load, counters), the supervisor writes the leases of lanes, and all processes may
read. Reading costs the engine nothing, so status, metrics and the choice of an engine use the scoreboard.

Each record has one writer. Values are aligned words, so that a reader sees either the old or the new value. A lane's
lease is written last when it is granted and first when it is revoked.

Any process of the user can write to these pages. So writers keep their own copies and rewrite them several times a
second, and readers check every value: a state with `state_of`, an index against its bounds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.segment import Maker, Segment

MAX_ENGINES = 64
MAX_MODELS = 128
MAX_LANES = 2048  # as many as a ring segment has, native/serving/shm_rings.hpp

# The priorities of a lane, as Triton numbers the levels of requests: those of a lower number are computed first.
FIRST, NORMAL, LAST = 1, 2, 3
PRIORITIES = (FIRST, NORMAL, LAST)

# A client locks byte LANE_LOCK + lane of the scoreboard's file as long as it holds the lane.
LANE_LOCK = 1 << 59
PAUSE_LOCK = LANE_LOCK - 1  # held by the process that has paused the engines

# Histograms count powers of two: bucket i holds values in [2^(i-1), 2^i).
BATCH_BUCKETS = 20  # rows
TIME_BUCKETS = 40  # nanoseconds, up to 9 minutes


class EngineState(IntEnum):
    """The state of an engine."""

    ABSENT = 0
    LOADING = 1
    SERVING = 2
    DRAINING = 3
    STOPPED = 4


def state_of(value: Any) -> EngineState:
    """Return the state in a record; an invalid value counts as absent."""
    number = int(value)
    return EngineState(number) if number <= EngineState.STOPPED else EngineState.ABSENT


_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("layout", "<u4"),
        ("engines", "<u4"),
        ("started", "<f8"),  # seconds since 1970
    ]
)

ENGINE = np.dtype(
    [
        ("incarnation", "<u8"),  # of the running engine process; 0 while there is none
        ("heartbeat", "<i8"),  # ns of CLOCK_MONOTONIC
        ("expected_wait", "<i8"),  # ns until a ticket that arrives now would be answered
        ("state", "<u4"),
        ("pid", "<u4"),
        ("restarts", "<u8"),
        ("device_bytes", "<u8"),
        ("rings", "<u8"),  # number of its shm transport's segment, new in every incarnation; 0: none
        ("computing", "<u4"),  # 1 + number of the model whose batch it runs; 0: none
        ("paused", "<u4"),  # 1: it was ordered to compute nothing
    ]
)

# Written by native.grant_lane and native.take_back_lane, and `deaths` by jurybox.server.supervisor.leases.
LANE = np.dtype(
    [
        ("lease", "<u8"),
        ("model", "<u4"),
        ("first", "<u4"),
        ("rows", "<u4"),
        ("pid", "<u4"),
        ("arena", "<u4"),  # number of the arena whose rows these are
        ("deaths", "<u2"),  # engines that ended while they computed or loaded its model, since the server's start
        ("priority", "<u2"),  # of its tickets: FIRST, NORMAL or LAST
    ]
)

COUNTERS = np.dtype(
    [
        ("requests", "<u8"),
        ("rows", "<u8"),
        ("batches", "<u8"),
        ("failed", "<u8"),  # the model raised an error or did not match its spec
        ("expired", "<u8"),  # the deadline had passed
        ("refused", "<u8"),  # not computed: stale lease, rows outside the lane
        ("not_held", "<u8"),  # requested a weights version that is not held
        ("cache_hits", "<u8"),  # rows answered from the response cache
        ("cache_misses", "<u8"),  # rows computed by a model that has one
        ("version", "<u8"),  # of the weights in use
        ("newest", "<u8"),  # version the channel holds
        ("updates", "<u8"),  # adoptions
        ("adopted", "<i8"),  # ns of CLOCK_MONOTONIC of the last adoption
        ("waiting", "<u8"),  # rows not yet in a batch
        ("sessions", "<u8"),  # with state
        ("queue_total_ns", "<u8"),  # sums of the histograms' values
        ("forward_total_ns", "<u8"),
        ("request_total_ns", "<u8"),
        ("adopt_total_ns", "<u8"),
        ("batch_rows", "<u8", (BATCH_BUCKETS,)),
        ("queue_ns", "<u8", (TIME_BUCKETS,)),  # submit to batch
        ("forward_ns", "<u8", (TIME_BUCKETS,)),  # stage, forward and scatter of a batch
        ("request_ns", "<u8", (TIME_BUCKETS,)),  # submit to reply
        ("adopt_ns", "<u8", (TIME_BUCKETS,)),  # publication to adoption
    ]
)

_MAGIC = b"jurybox\0"
# The layout of all shared memory of a server. It is not that of messages, which peers on other hosts send, too.
MEMORY_VERSION = 5


def _aligned(size: int) -> int:
    return -(-size // 4096) * 4096


_ENGINES_AT = _aligned(_HEADER.itemsize)
_LANES_AT = _ENGINES_AT + _aligned(ENGINE.itemsize * MAX_ENGINES)
_COUNTERS_AT = _LANES_AT + _aligned(LANE.itemsize * MAX_LANES)


def _size(engines: int) -> int:
    return _COUNTERS_AT + _aligned(COUNTERS.itemsize * MAX_MODELS * engines)


class Scoreboard:
    """The scoreboard's arrays: `engines` (MAX_ENGINES,), `lanes` (MAX_LANES,), `counters` (engines, MAX_MODELS)."""

    def __init__(self, segment: Segment, engines: int) -> None:
        self.segment = segment
        self.header: NDArray[Any] = segment.array(_HEADER, (1,))
        self.engines: NDArray[Any] = segment.array(ENGINE, (engines,), _ENGINES_AT)
        self.lanes: NDArray[Any] = segment.array(LANE, (MAX_LANES,), _LANES_AT)
        self.counters: NDArray[Any] = segment.array(COUNTERS, (engines, MAX_MODELS), _COUNTERS_AT)
        # The supervisor's copies of its records; empty in other processes.
        self._header = self.header[:0].copy()
        self._engines = self.engines[:0].copy()
        self.own_lanes = self.lanes[:0].copy()  # written as `lanes` is, by jurybox.server.supervisor.leases
        self._living = np.zeros(0, bool)

    @classmethod
    def create(cls, name: str, engines: int, started: float, make: Maker = Segment.create) -> Scoreboard:
        """Create the scoreboard for `engines` engines; `started` is in seconds since 1970."""
        scoreboard = cls(make(name, _size(engines)), engines)
        scoreboard.header[0] = (_MAGIC, MEMORY_VERSION, engines, started)
        scoreboard._header, scoreboard.own_lanes, scoreboard._engines = (
            scoreboard.header.copy(),
            scoreboard.lanes.copy(),
            scoreboard.engines.copy(),
        )
        scoreboard._living = np.zeros(engines, bool)
        return scoreboard

    @property
    def started(self) -> float:
        """The server's start in seconds since 1970."""
        return float(self._header["started"][0])

    def begin_life(self, engine: int, rings: int) -> None:
        """Begin an incarnation of an engine, which then writes its record, except for `restarts` and `rings`."""
        self._living[engine] = True
        self._engines["rings"][engine] = rings
        self.engines["rings"][engine] = rings

    def end_life(self, engine: int) -> None:
        """End an incarnation: count a restart, and write the engine's record until the next one begins."""
        self._living[engine] = False
        self._engines["restarts"][engine] += 1
        self.engines["restarts"][engine] = self._engines["restarts"][engine]

    def restore(self) -> bool:
        """Rewrite the supervisor's part if another process has overwritten it; return whether that was so."""
        damaged = self.header.tobytes() != self._header.tobytes()
        if damaged:
            self.header[:] = self._header
        words = (len(self.lanes), LANE.itemsize // 8)
        shown, own = self.lanes.view("<u8").reshape(words), self.own_lanes.view("<u8").reshape(words)
        if len(lanes := np.flatnonzero((shown != own).any(axis=1))):
            damaged = True
            shown[lanes, 0] = 0  # so that no process uses a half-restored lane
            shown[lanes, 1:] = own[lanes, 1:]
            shown[lanes, 0] = own[lanes, 0]
        for name in ("restarts", "rings"):
            if (self.engines[name] != self._engines[name]).any():
                damaged = True
                self.engines[name] = self._engines[name]
        for name in ("incarnation", "state"):
            self.engines[name][~self._living] = 0
        return damaged

    def engine_words(self, engine: int) -> memoryview:
        """Return an engine's record as eight words, for fast writes."""
        at = _ENGINES_AT + engine * ENGINE.itemsize
        return self.segment.buffer[at : at + ENGINE.itemsize].cast("Q")

    @classmethod
    def attach(cls, name: str, *, writable: bool = True) -> Scoreboard:
        """Map the scoreboard of a running server; observers map it with `writable` False."""
        segment = Segment.attach(name, writable=writable)
        if segment.size >= _size(1):
            header = segment.array(_HEADER, (1,))[0].copy()
            engines = int(header["engines"])
            known = header["magic"] == _MAGIC.rstrip(b"\0") and header["layout"] == MEMORY_VERSION
            if known and 0 < engines <= MAX_ENGINES and segment.size == _size(engines):
                return cls(segment, engines)
        segment.close()
        raise ProtocolMismatch(
            f"{name} is no scoreboard of layout {MEMORY_VERSION}: use the same jurybox on both sides (or another "
            "process wrote to it just now: ask again)"
        )

    def server_lives(self) -> bool:
        """Return whether the supervisor of this scoreboard still runs; the kernel drops its lock when it dies."""
        return self.segment.owner_lives()

    def close(self) -> None:
        """Close the segment; the owner also removes it."""
        self.segment.release()
