"""Policies in an actor's or evaluator's process, without torch: the newest published one, and past ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.weights.reader import WeightsReader
from jurybox.studies.hockey.settings import LEAVING, POOL
from jurybox.training.algorithms.acting import NumpyActor
from jurybox.training.algorithms.base import Algorithm, Arrays
from jurybox.training.checkpoints import read_state, write_state
from jurybox.training.roles.policy_client import NEWEST, PAST, PolicyClient
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.spaces import ALONE

Rows = npt.NDArray[np.float32]
CLIP = 5.0  # deviations; bound of normalised observations
_CARRIED = 10.0  # seconds to wait for the file of a past self from the learner's machine


def actor_of(state: Mapping[str, Any]) -> NumpyActor:
    """Return the policy with these weights."""
    return NumpyActor(state, clip=CLIP)


class Pool:
    """Weights of past policies: a file for each, which the learner writes and actors read.

    The file of a policy that has left the league is removed a little later (`retain`). No process keeps more than
    `most` policies in memory. The learner's checkpoints contain the weights of the league's members.

    Args:
        timeout: seconds to wait for a file from another machine.
        most: maximum number of policies in memory; the least recently used one is evicted.
    """

    def __init__(self, folder: Path, timeout: float = 0.0, most: int = 32) -> None:
        self._folder, self._timeout, self._most = folder, timeout, max(1, most)
        self._actors: dict[str, NumpyActor] = {}  # the most recently used is last

    @classmethod
    def of(cls, context: RoleContext, members: int, games: int) -> Pool:
        """Return an actor's, which keeps those that its games are being played against, and a league's members."""
        return cls(context.folder(POOL), _CARRIED, members + LEAVING + games)

    def keep(self, name: str, state: Mapping[str, Any]) -> None:
        """Store weights under `name` ("pool:17")."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_state(self._path(name), {"state": dict(state)})

    def names(self) -> list[str]:
        """Return all names, oldest first."""
        return [f"{PAST}{int(path.stem)}" for path in sorted(self._folder.glob("*.weights"))]

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
        version = name.removeprefix(PAST)
        if not name.startswith(PAST) or not version.isdigit():
            raise KeyError(f"nobody plays as {name!r}: expected anchor:NAME or pool:VERSION")
        return self._folder / f"{int(version):012d}.weights"


class LocalPolicies(PolicyClient):
    """Policies that are computed in NumPy, in this process.

    Args:
        algorithm: has a `networks.DeterministicActor`.
        rows, splits, max_lag: see `players.policy_client`; what is computed here needs none but the number of games.
        pool: members of the league.
    """

    def __init__(
        self,
        context: RoleContext,
        channel: str,
        algorithm: Algorithm,
        *,
        rows: int,
        splits: int = 1,
        max_lag: int | None = None,
        pool: int = 0,
    ) -> None:
        self._published = _Published(context.reader(channel))
        context.follow(channel, self._published)
        self._pool = Pool.of(context, pool, rows * splits)

    @property
    def version(self) -> int:
        return self._published.version

    @property
    def updates(self) -> int:
        return int(self.extra["updates"])

    @property
    def extra(self) -> Mapping[str, Any]:
        return self._published.extra

    def submit(self, observation: Arrays, who: str = NEWEST, split: int = 0) -> Callable[[], Arrays]:
        rows = observation[ALONE]
        if who == NEWEST:
            return lambda: {"action": self._published(rows)}
        actor = self._pool.actor(who)
        return lambda: {"action": actor(rows)}


class _Published:
    """A `NumpyActor` with the newest published weights.

    Attributes:
        version: version of the weights; 0 before the first publication.
        extra: what was published beside them.
    """

    def __init__(self, reader: WeightsReader) -> None:
        self.version = 0
        self.extra: dict[str, Any] = {}
        self._actor: NumpyActor | None = None
        self._reader = reader
        self._spare, self._state = reader.buffers(), reader.buffers()

    def refresh(self, timeout: float = 1.0) -> bool:
        """Load the newest publication if it is newer; return whether it was. Raises Timeout."""
        if not self._reader.newer_than(self.version):
            return False
        state, self.version, self.extra = self._reader.read(out=self._spare, timeout=timeout)
        self._spare, self._state = self._state, state
        self._actor = actor_of(state)
        return True

    def __call__(self, rows: Rows) -> Rows:
        """Return actions (n, a) for observations (n, o)."""
        assert self._actor is not None, "the driver refreshes what a role follows before its first step"
        return self._actor(rows)
