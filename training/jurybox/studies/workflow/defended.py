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
from jurybox.studies.workflow.compliance import Orders
from jurybox.studies.workflow.networks import INPUTS, NO_ORDER, DefendedNetworks, Situation
from jurybox.studies.workflow.settings import WorkflowTraining, parse
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.spaces import MASK

Row = npt.NDArray[np.float32]


class Defended(gymnasium.Env[Row, int]):
    """Observations are the input of a search's network, float32 (INPUTS,); infos have the "action_mask", bool (145,).

    Args:
        order: the workflow that the policy sees, "enterprise > op_server > ..." or types' numbers; None for none.
        order_masks, use_masks, show_turns, red, env, quirk, episode_length: as in the search.

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
        show_turns: bool = False,
        render_mode: str | None = None,
    ) -> None:
        try:
            given = {"env": env, "red": red, "quirk": quirk, "episode_length": episode_length, "use_masks": use_masks}
            settings = WorkflowTraining.model_validate({**given, "envs": 1, "total_episodes": 1})
            parsed = parse(order) if isinstance(order, str) else order
            situation = Situation(NO_ORDER if parsed is None else tuple(parsed))
            Orders.of(situation.order, 1)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"there is no such network to defend: {error}") from error
        part = environments.maker(settings, range(1))()
        self._networks = DefendedNetworks(
            [part], episode_length, use_masks=use_masks, mask_orders=order_masks, show_turns=show_turns
        )
        self._networks.assign(0, situation)
        self.observation_space = spaces.Box(0.0, np.inf, (INPUTS,), np.float32)
        self.action_space = spaces.Discrete(N_ACTIONS)  # type: ignore[assignment]
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Row, dict[str, Any]]:
        super().reset(seed=seed)
        self._networks.reset(seed)
        return self._seen()

    def step(self, action: int) -> tuple[Row, float, bool, bool, dict[str, Any]]:
        (result,) = self._networks.step(np.array([action], np.int64)).results
        terminated = bool(result.terminated[0])
        row, told = self._seen()
        return row, float(result.reward[0]), terminated, bool(result.truncated[0]) and not terminated, told

    def close(self) -> None:
        self._networks.close()

    def _seen(self) -> tuple[Row, dict[str, Any]]:
        waiting = self._networks.waiting()
        return waiting.rows[0], {MASK: waiting.observation[MASK][0]}
