"""One defended network as a Gymnasium environment, in which `jurybox policy` plays the policy of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from jurybox.studies.workflow import environments
from jurybox.studies.workflow.cage.tables import N_ACTIONS
from jurybox.studies.workflow.rollouts import INPUTS, Doubts, Orders, network_input, order_masks, possible_actions
from jurybox.studies.workflow.settings import WorkflowTraining, parse
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.spaces import MASK

Row = npt.NDArray[np.float32]


class Defended(gymnasium.Env[Row, int]):
    """Observations are the input of a search's network, float32 (INPUTS,); infos have the "action_mask", bool (145,).

    Args:
        order: the workflow that the policy sees, "enterprise > op_server > ..." or types' numbers; None for none.
        order_masks, use_masks, red, env, quirk, episode_length: as in the search.

    Raises:
        ConfigError: there is no such workflow or attacker.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 (as Gymnasium declares it)

    def __init__(
        self,
        order: str | Sequence[int] | None = None,
        *,
        env: str = "cage",
        red: str = "B_line",
        quirk: bool = False,
        episode_length: int = 100,
        use_masks: bool = False,
        order_masks: bool = True,
        render_mode: str | None = None,
    ) -> None:
        try:
            given = {"env": env, "red": red, "quirk": quirk, "episode_length": episode_length, "use_masks": use_masks}
            settings = WorkflowTraining.model_validate({**given, "envs": 1, "total_episodes": 1})
            parsed = parse(order) if isinstance(order, str) else order
            self._orders = Orders.of(parsed, 1)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"there is no such network to defend: {error}") from error
        self._networks = environments.maker(settings, range(1))()
        self._masks_order, self._masks_impossible, self._length = order_masks, use_masks, episode_length
        self.observation_space = spaces.Box(0.0, np.inf, (INPUTS,), np.float32)
        self.action_space = spaces.Discrete(N_ACTIONS)  # type: ignore[assignment]
        self.render_mode = render_mode
        self._doubts, self._steps = Doubts(1), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Row, dict[str, Any]]:
        super().reset(seed=seed)
        observation, info = self._networks.reset(seed=seed, options=options)
        self._doubts, self._steps = Doubts(1), 0
        return self._seen(observation, info)

    def step(self, action: int) -> tuple[Row, float, bool, bool, dict[str, Any]]:
        chosen = np.array([action], np.int64)
        observation, rewards, terminated, _, info = self._networks.step(chosen)
        self._doubts.see(chosen, observation)
        self._steps += 1
        over = bool(terminated[0])
        row, told = self._seen(observation, info)
        return row, float(rewards[0]), over, not over and self._steps >= self._length, told

    def close(self) -> None:
        self._networks.close()

    def _seen(self, observation: npt.NDArray[Any], info: dict[str, Any]) -> tuple[Row, dict[str, Any]]:
        allowed = np.ones((1, N_ACTIONS), np.bool_)
        if self._masks_impossible:
            allowed &= possible_actions(self._networks, info)
        if self._masks_order:
            allowed &= order_masks(self._doubts.hosts(observation), self._orders)
        seen = np.zeros((1, INPUTS), np.float32)
        network_input(seen, observation, self._orders, self._doubts)
        return seen[0], {MASK: allowed[0]}
