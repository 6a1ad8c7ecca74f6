"""One network as an ordinary Gymnasium environment: a view of the vectorised one."""

from __future__ import annotations

from typing import Any, SupportsFloat, SupportsInt

import gymnasium
import numpy as np
import numpy.typing as npt

from jurybox.training.environments.cage.network import RedName
from jurybox.training.environments.cage.vector import ACTION_SPACE, OBSERVATION_SPACE, CageVectorEnv, Observations


class CageEnv(gymnasium.Env[Observations, Any]):
    """Defend one network. Observation int8 (52,), action in 0..144; see `CageVectorEnv` for the rest.

    Where there is a choice, step many networks with `CageVectorEnv`: it takes hardly longer for a hundred than for one.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (Gymnasium declares it so)

    def __init__(self, red: RedName = "B_line", *, episode_length: int = 100, quirk: bool = False) -> None:
        self.observation_space, self.action_space = OBSERVATION_SPACE, ACTION_SPACE
        self._vector = CageVectorEnv(1, red, episode_length=episode_length, quirk=quirk, autoreset_mode="Disabled")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, Any]]:
        super().reset(seed=seed)
        self._vector.networks.random = self.np_random
        observations, info = self._vector.reset()
        return observations[0], {"true_state": info["true_state"][0]}

    def step(self, action: SupportsInt) -> tuple[Observations, SupportsFloat, bool, bool, dict[str, Any]]:
        observations, rewards, _, truncated, info = self._vector.step(np.array([int(action)]))
        return observations[0], float(rewards[0]), False, bool(truncated[0]), {"true_state": info["true_state"][0]}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Actions that are not sure to fail, bool (145,)."""
        mask: npt.NDArray[np.bool_] = self._vector.action_masks()[0]
        return mask
