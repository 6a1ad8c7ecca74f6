"""Policies in a collector's process: the newest published policy, bots as anchors, and past policies."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.studies.hockey.bots import Opponent, make_opponent
from jurybox.training.algorithms.acting import NumpyActor
from jurybox.training.checkpoints import read_state, write_state

Rows = npt.NDArray[np.float32]
CLIP = 5.0  # deviations; bound of normalised observations


def actor_of(state: Mapping[str, Any]) -> NumpyActor:
    """Return the policy with these weights."""
    return NumpyActor(state, clip=CLIP)


class PublishedActor:
    """A `NumpyActor` with the newest published weights.

    Attributes:
        version: version of the weights; 0 before the first publication.
        actor: the actor; None before the first publication.
        curriculum: what the learner's `Opponents` published then.
    """

    def __init__(self, reader: WeightsReader) -> None:
        self.version = 0
        self.actor: NumpyActor | None = None
        self.curriculum: dict[str, Any] = {}
        self._reader = reader
        self._spare, self._state = reader.buffers(), reader.buffers()

    def refresh(self, timeout: float = 1.0) -> bool:
        """Load the newest publication if it is newer; return whether it was. Raises Timeout."""
        if not self._reader.newer_than(self.version):
            return False
        state, self.version, extra = self._reader.read(out=self._spare, timeout=timeout)
        self._spare, self._state = self._state, state
        self.actor = actor_of(state)
        self.curriculum = extra["curriculum"]
        return True

    def __call__(self, rows: Rows) -> Rows:
        """Return actions (n, a) for observations (n, o)."""
        assert self.actor is not None, "the driver refreshes what a role follows before its first step"
        return self.actor(rows)


class Pool:
    """Weights of past policies: a file for each, which the learner writes and collectors read.

    The file of a policy that has left the league is removed a little later (`retain`). No process keeps more than
    `most` policies in memory. The learner's checkpoints contain the weights of the league's members.

    Args:
        timeout: seconds to wait for a file from another machine.
        most: maximum number of policies in memory; the least recently used one is evicted.
    """

    def __init__(self, folder: Path, timeout: float = 0.0, most: int = 32) -> None:
        self._folder, self._timeout, self._most = folder, timeout, max(1, most)
        self._actors: dict[str, NumpyActor] = {}  # the most recently used is last

    def keep(self, name: str, state: Mapping[str, Any]) -> None:
        """Store weights under `name` ("pool:17")."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_state(self._path(name), {"state": dict(state)})

    def names(self) -> list[str]:
        """Return all names, oldest first."""
        return [f"pool:{int(path.stem)}" for path in sorted(self._folder.glob("*.weights"))]

    def retain(self, names: Collection[str]) -> None:
        """Remove all other policies, from the folder and from memory."""
        for name in set(self.names()) - set(names):
            self._path(name).unlink(missing_ok=True)
        self._actors = {name: actor for name, actor in self._actors.items() if name in names}

    def actor(self, name: str) -> NumpyActor:
        """Return the policy of that name.

        Raises:
            KeyError: there is no policy of that name.
        """
        if name not in self._actors:
            path, until = self._path(name), time.monotonic() + self._timeout
            while not path.exists() and time.monotonic() < until:
                time.sleep(0.01)
            if not path.exists():
                raise KeyError(f"nobody plays as {name!r}: expected anchor:NAME or one of {', '.join(self.names())}")
            self._actors[name] = actor_of(read_state(path)["state"])
        actor = self._actors[name] = self._actors.pop(name)
        if len(self._actors) > self._most:
            del self._actors[next(iter(self._actors))]
        return actor

    def _path(self, name: str) -> Path:
        kind, _, version = name.partition(":")
        if kind != "pool" or not version.isdigit():
            raise KeyError(f"nobody plays as {name!r}: expected anchor:NAME or pool:VERSION")
        return self._folder / f"{int(version):012d}.weights"


class PastSelf:
    """An opponent with the weights of a past policy."""

    def __init__(self, actor: NumpyActor) -> None:
        self._actor = actor

    def reset(self, seed: int) -> None:
        """Do nothing: the policy has no state."""

    def act(self, observation: Rows) -> Rows:
        action: Rows = self._actor(observation[None])[0]
        return action


class LocalPolicies:
    """`Policies` that are computed in the collector's process."""

    def __init__(self, published: PublishedActor, pool: Pool, action_size: int) -> None:
        self._published, self._pool, self._action_size = published, pool, action_size
        self._seen: dict[int, Rows] = {}

    def request(self, half: int, seen: Rows, opponents: Sequence[Opponent], opponent_rows: Rows) -> None:
        """Store the observations; `actions` computes the actions."""
        self._seen[half] = seen

    def actions(self, half: int) -> Rows:
        return self._published(self._seen.pop(half))

    def player(self, name: str) -> Opponent:
        kind, _, which = name.partition(":")
        if kind == "anchor":
            return make_opponent(which, action_size=self._action_size)
        return PastSelf(self._pool.actor(name))

    def curriculum(self) -> Mapping[str, Any]:
        return self._published.curriculum
