"""One machine's part of a run: scoreboard, replays, copies of the weights, folders. Does not import Ray."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import Refused
from jurybox.protocol.segment import sweep
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.checkpoints import write_atomically
from jurybox.training.replay import Replay
from jurybox.training.replay.transfer import Exporter, Importer, RowBatch
from jurybox.training.runtime.plan import Plan
from jurybox.training.runtime.scoreboard import ControlWord, RunScoreboard, Word
from jurybox.training.runtime.shared_resources import SharedResources, create_replay, repairable

# The scoreboard of a run, copied between machines.
#
# Every record has one writer, so copies need one merging rule only: the machine with the role's process owns the role's
# record, the orchestrator owns the orders. The clocks of two machines differ. So a copy holds the clock's time at which
# it was made, and timestamps are shifted by the difference (they look younger by the transfer time of the copy).


_TIMESTAMPS = [Word.HEARTBEAT, Word.WAITS_SINCE, Word.READY_AT, Word.MOVED_AT]
_CONTROL_TIMESTAMPS = [ControlWord.STARTED_AT]


@dataclass(frozen=True, slots=True)
class RoleCounters:
    """Counters of some roles.

    Attributes:
        clock: nanoseconds of the machine's CLOCK_MONOTONIC when they were read.
        roles: (n,) their numbers.
        records: (n, 32) int64, the records of the roles.
        orders: (n, 8) int64, their orders; empty where only records are sent.
    """

    clock: int
    roles: npt.NDArray[np.int64]
    records: npt.NDArray[np.int64]
    orders: npt.NDArray[np.int64]

    @classmethod
    def of(cls, scoreboard: RunScoreboard, roles: Collection[int], *, orders: bool) -> RoleCounters:
        """Return the counters of these roles on `scoreboard`."""
        numbers = np.array(sorted(roles), np.int64)
        control = scoreboard.control[numbers] if orders else np.empty((0, scoreboard.control.shape[1]), np.int64)
        return cls(time.monotonic_ns(), numbers, scoreboard.records[numbers], control)

    def unfinished(self) -> RoleCounters:
        """Return a copy in which no learner is done, because the last publication is still in transit."""
        records = self.records.copy()
        records[:, Word.DONE] = 0
        return replace(self, records=records)

    def write(self, scoreboard: RunScoreboard, roles: Collection[int], *, orders: bool, life: bool = False) -> None:
        """Write the counters of those among `roles` to another machine's scoreboard.

        Args:
            orders: also write the orders of all roles in this copy.
            life: skip a record from an earlier incarnation of its role.
        """
        shift = time.monotonic_ns() - self.clock
        chosen = np.isin(self.roles, np.fromiter(roles, np.int64, len(roles)))
        if life:
            chosen &= self.records[:, Word.LIFE] == scoreboard.control[self.roles, ControlWord.LIFE]
        records = self.records[chosen].copy()
        timestamps = records[:, _TIMESTAMPS]
        records[:, _TIMESTAMPS] = np.where(timestamps > 0, timestamps + shift, timestamps)
        scoreboard.records[self.roles[chosen]] = records
        if orders:
            control = self.orders.copy()
            timestamps = control[:, _CONTROL_TIMESTAMPS]
            control[:, _CONTROL_TIMESTAMPS] = np.where(timestamps > 0, timestamps + shift, timestamps)
            scoreboard.control[self.roles] = control


@dataclass(frozen=True, slots=True)
class TimelineCopy:
    """The timeline of one role's process.

    Attributes:
        clock: as in `RoleCounters`.
        rows: (INTERVALS,), as on the scoreboard; zeros where this process wrote none.
    """

    clock: int
    rows: npt.NDArray[Any]

    @classmethod
    def of(cls, scoreboard: RunScoreboard, number: int) -> TimelineCopy:
        """Return the timeline of a role on `scoreboard`."""
        return cls(time.monotonic_ns(), scoreboard.timeline[number].copy())

    def write(self, scoreboard: RunScoreboard, number: int) -> None:
        """Add it to the timeline of the role on another machine's scoreboard."""
        shift, written = time.monotonic_ns() - self.clock, self.rows["end"] != 0
        rows = self.rows[written]
        for side in ("start", "end"):
            rows[side] += shift
        scoreboard.timeline[number][written] = rows


_CLOCK_TICK = 100_000_000  # ns


class Folders:
    """The run's folders on one machine; belongs to one thread at a time.

    Args:
        paths: by the plan's name.
    """

    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)
        self._found: dict[tuple[str, str], None] = {}  # in the order of discovery
        self._changed: dict[str, int] = {}
        for path in paths.values():
            Path(path).mkdir(parents=True, exist_ok=True)

    def after(self, count: int) -> tuple[tuple[str, str], ...]:
        """Return (folder, name) of the files, without the first `count`."""
        for folder, path in self.paths.items():
            # Read before the listing: a file that arrives during it is found the next time.
            changed = Path(path).stat().st_mtime_ns
            if self._changed.get(folder) != changed:
                # A folder that has just changed may change again within a tick of the file system's clock.
                if time.time_ns() - changed > _CLOCK_TICK:
                    self._changed[folder] = changed
                for each in sorted(Path(path).iterdir()):
                    if not each.name.startswith("."):
                        self._found.setdefault((folder, each.name))
        return tuple(self._found)[count:] if count < len(self._found) else ()

    def read(self, folder: str, name: str) -> bytes:
        """Read a file."""
        return (Path(self.paths[folder]) / name).read_bytes()

    def keep(self, folder: str, name: str, content: bytes) -> None:
        """Store a file from another machine."""
        path = Path(self.paths[folder]) / name
        if not path.exists():
            write_atomically(path, content)


# A run has one host on each machine; on the orchestrator's machine it uses the run's own `SharedResources`. Role
# processes use their machine's host as if there were no other: counters and orders are copied to and from the
# orchestrator's scoreboard, rows move from the local replay to the one that is sampled, and publications arrive as
# publications of the local channel.


# Rows that wait on a machine for their transfer; further rows overwrite the oldest.
INBOX_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Publication:
    """One publication of a weights channel: the bytes of a slot."""

    version: int
    flat: npt.NDArray[np.uint8]
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LocalNames:
    """The names of shared memory and folders for roles on a machine.

    Attributes:
        replays: by the plan's name, the replay to use. folders: by the plan's name, paths.
    """

    replays: dict[str, str]
    folders: dict[str, str]


@dataclass(frozen=True, slots=True)
class HostReport:
    """News of a host for the others.

    Attributes:
        counters: of the roles on it.
        newest: by channel, the newest version in its copy.
        rows: by replay that was asked for, rows that wait for their transfer.
        missed: rows that were overwritten before their transfer.
        files: (folder, name) of new files in the run's folders, those after the given count.
    """

    counters: RoleCounters
    newest: tuple[int, ...]
    rows: dict[str, int]
    missed: int
    files: tuple[tuple[str, str], ...] = ()


class Host:
    """A machine's part of a run; belongs to one thread at a time.

    Args:
        shared: the run's own, on the orchestrator's machine; None: create shared memory for this machine.
    """

    def __init__(self, plan: Plan, shared: SharedResources | None = None) -> None:
        self._plan = plan
        if shared is None:
            sweep()
        self.shared = shared or SharedResources.create(plan, INBOX_ROWS)
        self._owns = shared is None
        self._homes: dict[str, Replay] = {}
        self._exporters: dict[str, Exporter] = {}
        self._importers: dict[tuple[str, str], Importer] = {}
        self._readers: dict[str, WeightsReader] = {}
        self._copies = None if shared is not None else tempfile.TemporaryDirectory(prefix="jurybox-run-")
        copies = {name: str(Path(self._copies.name) / name) for name in plan.folders} if self._copies else {}
        self.folders = Folders({**plan.folders, **copies})

    def scoreboard(self) -> str:
        """Name of its scoreboard."""
        return self.shared.scoreboard.segment.name

    def exchange(
        self, others: RoleCounters, roles: Collection[int], replays: Sequence[str], files: int = 0
    ) -> HostReport:
        """Write the orchestrator's counters here, and return this host's news.

        Args:
            roles: those that run on this machine. replays: those that are sampled, so their rows may have to move.
            files: number of this machine's files that the orchestrator's machine knows.
        """
        away = set(others.roles.tolist()) - set(roles)
        others.write(self.shared.scoreboard, away, orders=True)
        return self.report(roles, replays, files)

    def context(self, counters: RoleCounters) -> None:
        """Prepare the start of a role: its counters continue from the orchestrator's scoreboard."""
        counters.write(self.shared.scoreboard, counters.roles.tolist(), orders=True)
        self.shared.scoreboard.timeline[counters.roles] = 0  # an earlier process of the role may have been here

    def timeline(self, number: int) -> TimelineCopy:
        """Return the timeline of a role's process that has ended on this machine."""
        return TimelineCopy.of(self.shared.scoreboard, number)

    def report(self, roles: Collection[int], replays: Sequence[str], files: int = 0) -> HostReport:
        """Return this host's news for the others."""
        return HostReport(
            RoleCounters.of(self.shared.scoreboard, roles, orders=False),
            tuple(self.newest(channel.name) for channel in self._plan.channels),
            {name: self._exporter(name).new.waiting for name in replays},
            sum(source.new.missed for source in self._exporters.values()),
            self.folders.after(files),
        )

    def newest(self, channel: str) -> int:
        """Return the newest version on this machine."""
        return self._reader(channel).newest

    def publication(self, channel: str) -> Publication:
        """Return the newest publication. Raises Timeout if there is none."""
        reader = self._reader(channel)
        flat = np.empty(reader.layout.nbytes, np.uint8)
        version, extra = reader.read_flat(flat, timeout=5.0)
        return Publication(version, flat, extra)

    def adopt(self, channel: str, publication: Publication) -> int:
        """Publish on this machine's channel; returns its newest version.

        If a learner publishes on this machine, its channel is the source and is left unchanged.
        """
        reader = self._reader(channel)
        if publication.version > reader.newest:
            try:
                with self.shared.publisher(channel) as publisher:
                    state = reader.layout.views(publication.flat)
                    publisher.publish(state, publication.extra, version=publication.version)
            except Refused:  # a learner on this machine publishes here, or a newer version just arrived
                return reader.newest
        return reader.newest

    def make_home(self, names: Sequence[str]) -> None:
        """Create the replays that are sampled on this machine; the orchestrator's machine has them from the start."""
        for spec in self._plan.replays:
            if self._owns and spec.name in names and spec.name not in self._homes:
                name = f"{dict(self.shared.scoreboard.named.replays)[spec.name]}-home"
                self._homes[spec.name] = create_replay(spec, name, self._plan.seed)

    def local_names(self) -> LocalNames:
        """Return the names that processes on this machine use instead of those of the plan."""
        return LocalNames({name: str(replay.name) for name, replay in self._homes.items()}, self.folders.paths)

    def rows(self, name: str) -> RowBatch | None:
        """Return the next batch of this machine's new rows; None if there are none."""
        return self._exporter(name).batch()

    def put(self, name: str, source: str, batch: RowBatch | None) -> int:
        """Add rows of the host `source` to the replay that is sampled here; returns their number."""
        if batch is None:
            return 0
        home = self._home(name)
        key = (name, source)
        if key not in self._importers:
            self._importers[key] = Importer(home, max(INBOX_ROWS, home.layout.capacity))
        return self._importers[key].put(batch)

    def replay_file(self, name: str) -> bytes:
        """Return the replay that is sampled here, as `Replay.save` writes it."""
        with tempfile.TemporaryDirectory(prefix="jurybox-replay-") as folder:
            path = Path(folder) / "replay.jbr"
            self.save_replay(name, path)
            return path.read_bytes()

    def save_replay(self, name: str, path: Path) -> None:
        """Write the replay that is sampled here to a file, while actors and learners are paused."""
        if name in repairable(self._plan):
            self._home(name).repair()  # a role that was killed here may have been changing its priorities
        self._home(name).save(path)

    def close(self) -> None:
        """Close everything, and remove what this host owns."""
        for replay in self._homes.values():
            replay.unlink()
            replay.close()
        self._homes.clear()
        if self._owns:
            self.shared.close()
        if self._copies is not None:
            self._copies.cleanup()

    def file(self, folder: str, name: str) -> bytes | None:
        """Read a file of the run's folders; None if it was removed."""
        try:
            return self.folders.read(folder, name)
        except FileNotFoundError:
            return None

    def keep_file(self, folder: str, name: str, content: bytes | None) -> None:
        """Store a file from another machine."""
        if content is not None:
            self.folders.keep(folder, name, content)

    def _home(self, name: str) -> Replay:
        # An empty replay is falsy.
        return self._homes[name] if name in self._homes else self.shared.replay(name)

    def _reader(self, channel: str) -> WeightsReader:
        if channel not in self._readers:
            self._readers[channel] = self.shared.reader(channel)
        return self._readers[channel]

    def _exporter(self, name: str) -> Exporter:
        if name not in self._exporters:
            self._exporters[name] = Exporter(self.shared.replay(name))
        return self._exporters[name]
