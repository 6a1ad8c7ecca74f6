"""Who plays under a league's names where everything is in one process: bots for anchors, kept weights for the pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.training.algorithms.acting import NumpyActor
from jurybox.training.environments.hockey.bots import Opponent, make_opponent


class PastSelf:
    """An opponent that acts as a published actor did."""

    def __init__(self, actor: NumpyActor) -> None:
        self._actor = actor

    def reset(self, seed: int) -> None:
        """Nothing to forget: the policy has no memory."""

    def act(self, observation: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        action: npt.NDArray[np.float32] = self._actor(observation[None])[0]
        return action


class Opponents:
    """The opponents of one league, by name."""

    def __init__(self, action_size: int = 4) -> None:
        self._action_size = action_size
        self.actors: dict[str, NumpyActor] = {}

    def keep(self, name: str, actor: NumpyActor, instead_of: str | None = None) -> None:
        """`actor` plays under `name` from now on."""
        self.actors[name] = actor
        if instead_of is not None:
            self.actors.pop(instead_of, None)

    def player(self, name: str) -> Opponent:
        """A player of its own for one game at a time.

        Raises:
            KeyError: nobody plays under that name.
        """
        kind, _, which = name.partition(":")
        if kind == "anchor":
            return make_opponent(which, action_size=self._action_size)
        if name not in self.actors:
            raise KeyError(f"nobody plays as {name!r}: expected anchor:NAME or one of {', '.join(self.actors)}")
        return PastSelf(self.actors[name])

    def state_dict(self) -> dict[str, Any]:
        return {name: actor.state for name, actor in self.actors.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.actors = {name: NumpyActor(kept) for name, kept in state.items()}
