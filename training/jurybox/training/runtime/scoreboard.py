"""The scoreboard of a run: counters and orders of every role, in shared memory.

Each role has a record that it alone writes, and one that the orchestrator alone writes. Every entry is an aligned
8-byte word, so a reader sees an old or a new value and never a mixture. The counters belong to the role, not to the
process: the next process of a killed role goes on counting where that one stopped. `debug_state` prints all of it.
"""

from __future__ import annotations

import json
import struct
import time
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import ProtocolMismatch, SharedMemoryError
from jurybox.protocol.segment import Segment
from jurybox.protocol.weights import WeightsChannel
from jurybox.training.replay import Replay
from jurybox.training.runtime.plan import Kind, NotRunning, Plan

INTERVALS = 4096  # of a role's timeline: as many as that are kept, the newest
_MAGIC = b"jbrun\0\0\0"
_VERSION = 1
_HEAD = struct.Struct("<8sIII")
_PAGE = 4096


class Word(IntEnum):
    """The words of a role's record. Times are nanoseconds of CLOCK_MONOTONIC."""

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
    DONE = 19  # 1 + the environment steps of a run that collects no more, from all of which this learner has learned
    MOVED_AT = 20  # when its steps last became more, or its last evaluation ended
    UNREADY = 21  # 1: steps of this learner are due, and it waits for more rows
    RESETS_SINCE = 22  # when the reset of an environment began that is going on; 0: none is
    ROWS_DROPPED = 23  # rows that a learner came too late for: of too old a policy, or overwritten
    UNDER_WAY = 24  # environment steps of the step that a trainer is in: not counted yet


PROGRESS = (Word.ENV_STEPS, Word.LEARNER_STEPS, Word.EVALUATED_AT)


class ControlWord(IntEnum):
    """The orchestrator's record of a role."""

    ORDER = 0
    LIFE = 1
    RESTARTS = 2
    FAILURES = 3  # in a row
    STARTED_AT = 4
    CLOSING = 5  # 1: the time is up, no more environment steps; 2: no more learner steps either
    BEST = 6  # bits of a float64: the highest value that an evaluation has had of what the plan calls best


class State(IntEnum):
    """The state of a role."""

    ABSENT = 0
    STARTING = 1
    RUNNING = 2
    PAUSED = 3
    STOPPED = 4


class Order(IntEnum):
    """An order for a role, which reads it between two steps and while waiting."""

    RUN = 0
    PAUSE = 1
    STOP = 2


class Subject(IntEnum):
    """The object of a role's wait."""

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

_ROLE_WORDS, _CONTROL_WORDS = 32, 8
_INTERVAL = np.dtype([("start", "<i8"), ("end", "<i8"), ("subject", "<i8")])


@dataclass(frozen=True, slots=True)
class Named:
    """The names on a scoreboard."""

    roles: tuple[tuple[str, Kind], ...]
    replays: tuple[tuple[str, str], ...]  # (name in the plan, name of the Replay)
    channels: tuple[tuple[str, str], ...]  # (name in the plan, name of the segment)

    @classmethod
    def from_json(cls, text: bytes) -> Named:
        """The names of `asdict` as JSON."""
        document = json.loads(text)
        roles = tuple((name, Kind(kind)) for name, kind in document["roles"])
        return cls(roles, *(tuple(map(tuple, document[what])) for what in ("replays", "channels")))


class RunScoreboard:
    """The scoreboard of a run. Make it with `create` (the orchestrator) or `attach`.

    Attributes:
        records, control: (roles, 32) and (roles, 8) int64; the roles' states, and their orders.
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
        self.control: npt.NDArray[np.int64] = segment.array(np.int64, (roles, _CONTROL_WORDS), at)
        at += self.control.nbytes
        self.timeline: npt.NDArray[Any] = segment.array(_INTERVAL, (roles, INTERVALS), at)
        # Words through a memoryview: a third of the price of NumPy's single elements, and read in every step.
        self.words = [self._words(first + 8 * _ROLE_WORDS * number, _ROLE_WORDS) for number in range(roles)]
        control = first + self.records.nbytes
        self.orders = [self._words(control + 8 * _CONTROL_WORDS * number, _CONTROL_WORDS) for number in range(roles)]

    @classmethod
    def create(cls, name: str, plan: Plan, replays: dict[str, str], channels: dict[str, str]) -> RunScoreboard:
        """Create the scoreboard of a run; `replays` and `channels` map the plan's names to those of shared memory."""
        named = Named(
            tuple((role.name, role.kind) for role in plan.roles), tuple(replays.items()), tuple(channels.items())
        )
        text, roles = json.dumps(asdict(named)).encode(), len(plan.roles)
        first = -(-(_HEAD.size + len(text)) // _PAGE) * _PAGE
        size = first + roles * (8 * (_ROLE_WORDS + _CONTROL_WORDS) + INTERVALS * _INTERVAL.itemsize)
        segment = Segment.create(name, size)
        segment.buffer[_HEAD.size : _HEAD.size + len(text)] = text
        segment.buffer[: _HEAD.size] = _HEAD.pack(_MAGIC, _VERSION, len(text), first)
        return cls(segment, named, first)

    @classmethod
    def attach(cls, name: str, *, keep_alive: bool = True) -> RunScoreboard:
        """Map the scoreboard of a run.

        Raises:
            SharedMemoryError: there is none of that name.
            ProtocolMismatch: it is something else, or of another release.
        """
        segment = Segment.attach(name, keep_alive=keep_alive)
        magic, version, length, first = _HEAD.unpack_from(segment.buffer)
        if magic != _MAGIC or version != _VERSION:
            segment.close()
            raise ProtocolMismatch(
                f"{name} is no scoreboard of a run of version {_VERSION}: use one release of jurybox"
            )
        return cls(segment, Named.from_json(bytes(segment.buffer[_HEAD.size : _HEAD.size + length])), first)

    def _words(self, start: int, count: int) -> memoryview:
        return self.segment.buffer[start : start + 8 * count].cast("q")

    @property
    def best(self) -> float:
        """The highest value of the plan's `best` so far; -inf before the first."""
        value: float = struct.unpack("<d", struct.pack("<q", self.orders[0][ControlWord.BEST]))[0]
        return value

    def set_best(self, value: float) -> None:
        """Set `best`; only the orchestrator calls it."""
        for orders in self.orders:
            orders[ControlWord.BEST] = struct.unpack("<q", struct.pack("<d", value))[0]

    @property
    def env_steps(self) -> int:
        return sum(words[Word.ENV_STEPS] for words in self.words)

    @property
    def under_way(self) -> int:
        """Environment steps of trainers' steps that have not ended: for displays."""
        return sum(words[Word.UNDER_WAY] for words in self.words)

    @property
    def learner_steps(self) -> int:
        return sum(words[Word.LEARNER_STEPS] for words in self.words)

    @property
    def epochs(self) -> int:
        return sum(words[Word.EPOCHS] for words in self.words)

    @property
    def episodes(self) -> int:
        return sum(words[Word.EPISODES] for words in self.words)

    @property
    def rows_dropped(self) -> dict[str, int]:
        """By role, the rows that it came too late for; those that dropped none are left out."""
        names = (name for name, _ in self.named.roles)
        counts = {name: words[Word.ROWS_DROPPED] for name, words in zip(names, self.words, strict=True)}
        return {name: count for name, count in counts.items() if count}

    @property
    def progress(self) -> tuple[int, ...]:
        """The sums of `PROGRESS` over all roles; as long as they are the same, a checkpoint is up to date."""
        return tuple(sum(words[word] for words in self.words) for word in PROGRESS)

    def waits_for(self, number: int) -> tuple[Subject, int]:
        """What role `number` waits for, and which one of them."""
        word = self.words[number][Word.WAITS_FOR]
        return Subject(word >> 32), word & 0xFFFF_FFFF

    def intervals(self, number: int) -> npt.NDArray[Any]:
        """The newest entries of a role's timeline, oldest first: start, end, subject (0: busy). A copy.

        Those of a process that was lost with its machine are missing.
        """
        rows = self.timeline[number][self.timeline[number]["end"] != 0]
        return np.sort(rows, order="start", kind="stable")

    def close(self) -> None:
        """Close the segment; its owner also removes it."""
        for words in (*self.words, *self.orders):
            words.release()
        self.words, self.orders = [], []
        self.segment.close()
        if self.segment.owned:
            self.segment.unlink()


# Says which shared memory a run uses, for as long as it runs.
RUNNING = "running.json"


def debug_state(folder: Path) -> str:
    """The shared state of the run in `folder`, as text.

    Raises:
        NotRunning: there is none, or it ended just now.
    """
    mark = folder / RUNNING
    try:
        scoreboard = RunScoreboard.attach(json.loads(mark.read_text(encoding="utf-8"))["scoreboard"], keep_alive=False)
    except (OSError, ValueError, SharedMemoryError) as error:
        raise NotRunning(
            f"no run is going on in {folder} ({type(error).__name__}): expected {mark} and its shared memory; give the "
            "folder that a run was started with"
        ) from error
    try:
        owner = "runs" if scoreboard.segment.owner_lives() else "is gone; the next start frees this memory"
        return "\n".join(
            [
                f"run {scoreboard.segment.name}, whose owner {owner}",
                f"epoch {scoreboard.epochs:,}  environment steps {scoreboard.env_steps:,}  "
                f"learner steps {scoreboard.learner_steps:,}  episodes {scoreboard.episodes:,}",
                "",
                *_roles(scoreboard),
                "",
                *_channels(scoreboard),
                *_replays(scoreboard),
            ]
        )
    finally:
        scoreboard.close()


def _roles(scoreboard: RunScoreboard) -> list[str]:
    now, lines = time.monotonic_ns(), []
    for number, (name, kind) in enumerate(scoreboard.named.roles):
        words, orders = scoreboard.words[number], scoreboard.orders[number]
        subject, which = scoreboard.waits_for(number)
        total = max(1, words[Word.BUSY] + words[Word.WAITED])
        waits = "works"
        if subject not in AT_REST or words[Word.WAITS_FOR]:
            of = f" {scoreboard.named.channels[which][0]}" if subject.name == "WEIGHTS" else ""
            waits = f"waits for {subject.name.lower()}{of} since {(now - words[Word.WAITS_SINCE]) / 1e9:.1f} s"
        lines.append(
            f"{name:<14} {kind.name.lower():<9} {State(words[Word.STATE]).name.lower():<8} "
            f"told to {Order(orders[ControlWord.ORDER]).name.lower():<5} pid {words[Word.PID]:<7} "
            f"life {words[Word.LIFE]} "
            f"steps {words[Word.ENV_STEPS] + words[Word.LEARNER_STEPS]:,}  version {words[Word.VERSION]}  "
            f"lag {words[Word.LAG]}  busy {words[Word.BUSY] / total:.0%}  "
            f"{_heartbeat(words[Word.HEARTBEAT], now)}  restarts {orders[ControlWord.RESTARTS]}  {waits}"
            + (f"  {dropped:,} rows dropped" if (dropped := words[Word.ROWS_DROPPED]) else "")
        )
    return lines


def _heartbeat(at: int, now: int) -> str:
    return f"heartbeat {(now - at) / 1e9:.1f} s ago" if at else "no heartbeat yet"


def _channels(scoreboard: RunScoreboard) -> list[str]:
    lines = []
    for name, segment in scoreboard.named.channels:
        with WeightsChannel.attach(segment) as channel:
            claim = channel.claim()
            age = f", {channel.age_seconds(claim):.1f} s old, in slot {claim.slot}" if claim.version else ""
            lines.append(
                f"weights {name:<14} {channel.mode}, {channel.layout.nbytes:,} bytes, version {channel.newest}{age}"
            )
    return lines


def _replays(scoreboard: RunScoreboard) -> list[str]:
    lines = []
    for name, attached in scoreboard.named.replays:
        replay = Replay.attach(attached)
        try:
            counted = replay.counters
            lines.append(
                f"replay  {name:<14} {len(replay):,} of {replay.capacity:,} rows, {counted.added:,} added, "
                f"{counted.sampled:,} sampled, {counted.overwritten:,} overwritten, {replay.nbytes:,} bytes"
            )
        finally:
            replay.close()
    return lines
