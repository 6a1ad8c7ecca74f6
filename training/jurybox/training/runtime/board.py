"""The board of a run: what every role counts and does, in shared memory, for everybody to see.

Each role has a record that it alone writes, and beside it one that the orchestrator alone writes. Everything is an
aligned 8-byte word, so a reader sees an old or a new value and never a mixture. The counts belong to the role, not to
the process: who comes after a killed one goes on counting where that one stopped.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.segment import Segment
from jurybox.training.runtime.plan import Kind, Plan

INTERVALS = 4096  # of a role's timeline: as many as that are kept, the newest
_MAGIC = b"jbrun\0\0\0"
_VERSION = 1
_HEAD = struct.Struct("<8sIII")
_PAGE = 4096


class Word(IntEnum):
    """A role's record: which word holds what. Times are nanoseconds of CLOCK_MONOTONIC."""

    STATE = 0
    PID = 1
    LIFE = 2  # the one that writes here; 1 for the first
    HEARTBEAT = 3
    WAITS_FOR = 4  # a `Subject` in the upper half, which one of them in the lower
    WAITS_SINCE = 5
    ENV_STEPS = 6
    LEARNER_STEPS = 7
    EPOCHS = 8  # steps of an actor, however many environments each of them moved
    EPISODES = 9
    EVALUATED_AT = 10  # environment steps of the run at the last evaluation
    VERSION = 11  # published last, or in use (of the channel that is furthest behind)
    LAG = 12  # publications that an actor was behind when it last looked
    FORCED = 13  # looks for newer weights that max_lag brought about
    BUSY = 14  # nanoseconds
    WAITED = 15
    INTERVALS = 16  # of the timeline, ever written
    DROPPED = 17  # reports that the orchestrator was too slow for
    READY_AT = 18  # when this life's role was made
    DONE = 19  # 1: a learner that has learned from all steps of the budget
    MOVED_AT = 20  # when its steps last became more


class Told(IntEnum):
    """The orchestrator's record of a role."""

    ORDER = 0
    LIFE = 1
    RESTARTS = 2
    FAILURES = 3  # in a row
    STARTED_AT = 4
    CLOSING = 5  # 1: the time is up; no more environment steps
    BEST = 6  # bits of a float64: the highest value that an evaluation has had of what the plan calls best


class State(IntEnum):
    """Where a role is in its life."""

    ABSENT = 0
    STARTING = 1
    RUNNING = 2
    PAUSED = 3
    STOPPED = 4


class Order(IntEnum):
    """What the orchestrator wants of a role; looked at between two steps and while waiting."""

    RUN = 0
    PAUSE = 1
    STOP = 2


class Subject(IntEnum):
    """What a role waits for."""

    NOTHING = 0
    STEPS = 1  # a learner: environment steps
    LEARNERS = 2  # an actor: learners that are behind
    WEIGHTS = 3  # something whole on a channel, by its number
    READY = 4  # a learner: whatever its own `ready` asks for
    ORDERS = 5  # paused, or done
    WORK = 6  # an evaluator: the next evaluation
    OUTSIDE = 7  # something that is not the run's: a server, say


# Waits that are no sign of trouble, however long they take.
AT_REST = (Subject.NOTHING, Subject.ORDERS, Subject.WORK)

_ROLE_WORDS, _TOLD_WORDS = 32, 8
_INTERVAL = np.dtype([("start", "<i8"), ("end", "<i8"), ("subject", "<i8")])


@dataclass(frozen=True, slots=True)
class Named:
    """Who is who on a board."""

    roles: tuple[tuple[str, Kind], ...]
    replays: tuple[tuple[str, str], ...]  # (name in the plan, name of the Replay)
    channels: tuple[tuple[str, str], ...]  # (name in the plan, name of the segment)

    def to_json(self) -> bytes:
        roles = [[name, int(kind)] for name, kind in self.roles]
        return json.dumps({"roles": roles, "replays": self.replays, "channels": self.channels}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Named:
        said = json.loads(text)
        return cls(
            tuple((name, Kind(kind)) for name, kind in said["roles"]),
            tuple((name, replay) for name, replay in said["replays"]),
            tuple((name, segment) for name, segment in said["channels"]),
        )


class Board:
    """The board of a run. Make it with `create` (the orchestrator) or `attach`.

    Attributes:
        records, told: (roles, 32) and (roles, 8) int64; what a role says of itself, and what it is told.
        words, orders: the same, a role each, for reading and writing single words.
        timeline: (roles, INTERVALS), of what `intervals` tells.
        named: who is who.
    """

    def __init__(self, segment: Segment, named: Named, first: int) -> None:
        self.segment = segment
        self.named = named
        roles = len(named.roles)
        self.records: npt.NDArray[np.int64] = segment.array(np.int64, (roles, _ROLE_WORDS), first)
        at = first + self.records.nbytes
        self.told: npt.NDArray[np.int64] = segment.array(np.int64, (roles, _TOLD_WORDS), at)
        at += self.told.nbytes
        self.timeline: npt.NDArray[Any] = segment.array(_INTERVAL, (roles, INTERVALS), at)
        # Words through a memoryview: a third of the price of NumPy's single elements, and read in every step.
        self.words = [self._words(first + 8 * _ROLE_WORDS * number, _ROLE_WORDS) for number in range(roles)]
        told = first + self.records.nbytes
        self.orders = [self._words(told + 8 * _TOLD_WORDS * number, _TOLD_WORDS) for number in range(roles)]

    @classmethod
    def create(cls, name: str, plan: Plan, replays: dict[str, str], channels: dict[str, str]) -> Board:
        """Make the board of a run; `replays` and `channels` say what the plan's names are called in shared memory."""
        named = Named(
            tuple((role.name, role.kind) for role in plan.roles), tuple(replays.items()), tuple(channels.items())
        )
        text, roles = named.to_json(), len(plan.roles)
        first = -(-(_HEAD.size + len(text)) // _PAGE) * _PAGE
        size = first + roles * (8 * (_ROLE_WORDS + _TOLD_WORDS) + INTERVALS * _INTERVAL.itemsize)
        segment = Segment.create(name, size)
        segment.buffer[_HEAD.size : _HEAD.size + len(text)] = text
        segment.buffer[: _HEAD.size] = _HEAD.pack(_MAGIC, _VERSION, len(text), first)
        return cls(segment, named, first)

    @classmethod
    def attach(cls, name: str, *, keep_alive: bool = True) -> Board:
        """Map the board of a run.

        Raises:
            SharedMemoryError: there is none of that name.
            ProtocolMismatch: it is something else, or of another release.
        """
        segment = Segment.attach(name, keep_alive=keep_alive)
        magic, version, length, first = _HEAD.unpack_from(segment.buffer)
        if magic != _MAGIC or version != _VERSION:
            segment.close()
            raise ProtocolMismatch(f"{name} is no board of a run of version {_VERSION}: use one release of jurybox")
        return cls(segment, Named.from_json(bytes(segment.buffer[_HEAD.size : _HEAD.size + length])), first)

    def _words(self, start: int, count: int) -> memoryview:
        return self.segment.buffer[start : start + 8 * count].cast("q")

    @property
    def best(self) -> float:
        """The highest value so far of what the plan calls best; -inf before the first."""
        value: float = struct.unpack("<d", struct.pack("<q", self.orders[0][Told.BEST]))[0]
        return value

    def set_best(self, value: float) -> None:
        """Show it; the orchestrator's to call."""
        for orders in self.orders:
            orders[Told.BEST] = struct.unpack("<q", struct.pack("<d", value))[0]

    # ---- sums over all roles; each is a moment's picture

    @property
    def env_steps(self) -> int:
        return sum(words[Word.ENV_STEPS] for words in self.words)

    @property
    def learner_steps(self) -> int:
        return sum(words[Word.LEARNER_STEPS] for words in self.words)

    @property
    def epochs(self) -> int:
        return sum(words[Word.EPOCHS] for words in self.words)

    @property
    def episodes(self) -> int:
        return sum(words[Word.EPISODES] for words in self.words)

    def waits_for(self, number: int) -> tuple[Subject, int]:
        """What role `number` waits for, and which one of them."""
        word = self.words[number][Word.WAITS_FOR]
        return Subject(word >> 32), word & 0xFFFF_FFFF

    def intervals(self, number: int) -> npt.NDArray[Any]:
        """The newest entries of a role's timeline, oldest first: start, end, subject (0: busy). A copy."""
        written = self.words[number][Word.INTERVALS]
        kept = min(written, INTERVALS)
        order = np.arange(written - kept, written) % INTERVALS
        return np.array(self.timeline[number][order])

    def close(self) -> None:
        """Let go of the segment; its owner also removes it."""
        for words in (*self.words, *self.orders):
            words.release()
        self.words, self.orders = [], []
        self.segment.close()
        if self.segment.owned:
            self.segment.unlink()
