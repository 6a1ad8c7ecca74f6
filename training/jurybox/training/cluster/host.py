"""One machine's part of a run: its scoreboard, its way into the replays, its copies of the weights. Knows nothing of
Ray.

A run has one host a machine; that of the orchestrator's machine stands on the run's own `SharedResources`. Role
processes use their machine's host as if there were no other: counters and orders are copied to and from the
orchestrator's scoreboard, rows leave the local replay for the one that is sampled, publications come in as publications
of the local channel.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import Refused
from jurybox.protocol.segment import sweep
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.cluster.counters import Counters
from jurybox.training.cluster.folders import Folders
from jurybox.training.replay import Replay
from jurybox.training.replay.graft import Batch, Graft, Source
from jurybox.training.runtime.plan import Plan
from jurybox.training.runtime.shared_resources import SharedResources

# Rows that wait on a machine for the one that samples them; what comes beyond overwrites the oldest.
INBOX_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Publication:
    """One publication of a weights channel: the bytes of a slot, laid out as the channel says."""

    version: int
    flat: npt.NDArray[np.uint8]
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Instead:
    """What a role's process uses on its machine.

    Attributes:
        replays: by the plan's name, replays instead of the way in. folders: by the plan's name, paths.
    """

    replays: dict[str, str]
    folders: dict[str, str]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a host has for the others.

    Attributes:
        counters: of the roles on it.
        newest: by channel, the newest version in its copy.
        rows: by replay that was asked for, rows that came into its way in and have not left.
        missed: rows that were overwritten before they left.
        files: (folder, name) of files in the run's folders, those that came after the ones asked about.
    """

    counters: Counters
    newest: tuple[int, ...]
    rows: dict[str, int]
    missed: int
    files: tuple[tuple[str, str], ...] = ()


class Host:
    """A machine's part of a run; belongs to one thread at a time.

    Args:
        shared: the run's own, on the orchestrator's machine; None: this machine gets shared memory of its own.
    """

    def __init__(self, plan: Plan, shared: SharedResources | None = None) -> None:
        self._plan = plan
        if shared is None:
            sweep()
        self.shared = shared or SharedResources.create(plan, INBOX_ROWS)
        self._owns = shared is None
        self._homes: dict[str, Replay] = {}
        self._sources: dict[str, Source] = {}
        self._grafts: dict[tuple[str, str], Graft] = {}
        self._readers: dict[str, WeightsReader] = {}
        self._copies = None if shared is not None else tempfile.TemporaryDirectory(prefix="jurybox-run-")
        copies = {name: str(Path(self._copies.name) / name) for name in plan.folders} if self._copies else {}
        self.folders = Folders({**plan.folders, **copies})

    @property
    def scoreboard(self) -> str:
        """Name of its scoreboard."""
        return self.shared.scoreboard.segment.name

    # ---- counters

    def exchange(self, others: Counters, here: Collection[int], leaving: Sequence[str], files: int = 0) -> Seen:
        """Take what the orchestrator's scoreboard shows, and tell what there is.

        Args:
            here: roles that run on this machine. leaving: replays that are sampled, and whose rows so have a way to go.
            files: how many of this machine's files the orchestrator's knows of.
        """
        away = set(others.roles.tolist()) - set(here)
        others.write(self.shared.scoreboard, away, orders=True)
        return self.seen(here, leaving, files)

    def context(self, counters: Counters) -> None:
        """A role is about to start here: its counts go on from what the orchestrator's scoreboard shows."""
        counters.write(self.shared.scoreboard, counters.roles.tolist(), orders=True)

    def seen(self, here: Collection[int], leaving: Sequence[str], files: int = 0) -> Seen:
        """What there is for the others."""
        return Seen(
            Counters.of(self.shared.scoreboard, here, orders=False),
            tuple(self.newest(channel.name) for channel in self._plan.channels),
            {name: self._source(name).new.waiting for name in leaving},
            sum(source.new.missed for source in self._sources.values()),
            self.folders.after(files),
        )

    # ---- weights

    def newest(self, channel: str) -> int:
        """The newest version on this machine."""
        return self._reader(channel).newest

    def publication(self, channel: str) -> Publication:
        """The newest publication. Raises Timeout where there is none."""
        reader = self._reader(channel)
        flat = np.empty(reader.layout.nbytes, np.uint8)
        version, extra = reader.read_flat(flat, timeout=5.0)
        return Publication(version, flat, extra)

    def adopt(self, channel: str, publication: Publication) -> int:
        """Publish on this machine's channel what was published elsewhere; the newest version there now.

        A learner that publishes here is the one that everybody follows: it is not disturbed.
        """
        reader = self._reader(channel)
        if publication.version > reader.newest:
            try:
                with self.shared.publisher(channel) as publisher:
                    state = reader.layout.views(publication.flat)
                    publisher.publish(state, publication.extra, version=publication.version)
            except Refused:  # the learner that lives here has the place, or something newer just came
                return reader.newest
        return reader.newest

    # ---- rows

    def make_home(self, names: Sequence[str]) -> None:
        """Make the replays that are sampled on this machine; the orchestrator's machine has them from the start."""
        for spec in self._plan.replays:
            if self._owns and spec.name in names and spec.name not in self._homes:
                self._homes[spec.name] = Replay.create(
                    f"{dict(self.shared.scoreboard.named.replays)[spec.name]}-home",
                    spec.capacity,
                    spec.fields,
                    episodes=spec.episodes,
                    prioritized=spec.prioritized,
                    alpha=spec.alpha,
                    seed=self._plan.seed,
                )

    def instead(self) -> Instead:
        """What processes on this machine use in the place of what the plan names."""
        return Instead({name: str(replay.name) for name, replay in self._homes.items()}, self.folders.paths)

    def rows(self, name: str) -> Batch | None:
        """What came into this machine's way in, some of it; None where nothing did."""
        return self._source(name).batch()

    def put(self, name: str, source: str, batch: Batch | None) -> int:
        """Add rows of the host `source` to the replay that is sampled here; how many."""
        if batch is None:
            return 0
        home = self._home(name)
        key = (name, source)
        if key not in self._grafts:
            self._grafts[key] = Graft(home, max(INBOX_ROWS, home.layout.capacity))
        return self._grafts[key].put(batch)

    def replay_file(self, name: str) -> bytes:
        """The replay that is sampled here, as `Replay.save` writes it."""
        with tempfile.TemporaryDirectory(prefix="jurybox-replay-") as folder:
            path = Path(folder) / "replay.jbr"
            self.save_replay(name, path)
            return path.read_bytes()

    def save_replay(self, name: str, path: Path) -> None:
        """Write the replay that is sampled here to a file."""
        self._home(name).save(path)

    def close(self) -> None:
        """Let go of everything; what belongs to this host is removed."""
        for replay in self._homes.values():
            replay.unlink()
            replay.close()
        self._homes.clear()
        if self._owns:
            self.shared.close()
        if self._copies is not None:
            self._copies.cleanup()

    # ---- files

    def file(self, folder: str, name: str) -> bytes | None:
        """A file in one of the run's folders; None where it has been removed since."""
        try:
            return self.folders.read(folder, name)
        except FileNotFoundError:
            return None

    def keep_file(self, folder: str, name: str, content: bytes | None) -> None:
        """Put a file that was written elsewhere where it belongs here."""
        if content is not None:
            self.folders.keep(folder, name, content)

    # ---- inside

    def _home(self, name: str) -> Replay:
        # An empty replay is false.
        return self._homes[name] if name in self._homes else self.shared.replay(name)

    def _reader(self, channel: str) -> WeightsReader:
        if channel not in self._readers:
            self._readers[channel] = self.shared.reader(channel)
        return self._readers[channel]

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            self._sources[name] = Source(self.shared.replay(name))
        return self._sources[name]
