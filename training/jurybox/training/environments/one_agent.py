"""A multi-agent world as one agent's environment, in which `jurybox policy` plays a policy of `train marl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from jurybox.training.environments.adapter import Moved, Waiting
from jurybox.training.environments.gymnasium_env import EnvironmentUnusable
from jurybox.training.environments.pettingzoo_env import World
from jurybox.training.spaces import ALONE

Array = npt.NDArray[Any]
Chooses = Callable[[Array], Array]


class AgentEnv(gymnasium.Env[Array, int]):
    """The world as one agent's environment; the other agents act when it is their turn.

    A step is this agent's action and everything that happens until its next turn. Its reward is the sum of the agent's
    rewards in that time. The episode lasts until the world's episode is over, even if the agent has left before.

    Args:
        name, world: import path and keyword arguments of the PettingZoo environment; see `make_world`.
        agent: name of the agent.
        groups: group of each agent.
        frames: by group, the shape (stack, ...) and dtype of stacked observations.
        partners: by group, a function from rows of stacked observations to actions as the environment numbers them.
        others: "learned", or "random": all other agents act at random.

    Raises:
        EnvironmentUnusable: the agent is unknown, or a partner's policy is missing.
    """

    def __init__(
        self,
        name: str,
        world: Mapping[str, Any],
        agent: str,
        groups: Mapping[str, str],
        frames: Mapping[str, tuple[Sequence[int], str]],
        partners: Mapping[str, Chooses],
        others: Literal["learned", "random"] = "learned",
        render_mode: str | None = None,
    ) -> None:
        if agent not in groups:
            raise EnvironmentUnusable(f"there is no agent {agent!r}; the agents are {', '.join(groups)}")
        if others not in ("learned", "random"):
            raise EnvironmentUnusable(f"others = {others!r}: expected 'learned' or 'random'")
        missing = {group for each, group in groups.items() if each != agent} - partners.keys()
        if others == "learned" and missing:
            raise EnvironmentUnusable(
                f"the others in this world act by the policies {', '.join(sorted(missing))}, and an exported file has "
                "one: give the run's folder, or --set \"others='random'\""
            )
        stacks = {each: frames[group][0][0] for each, group in groups.items()}
        arguments = dict(world) if render_mode is None else {**world, "render_mode": render_mode}
        self._world = World(1, name, arguments, stacks, whole=tuple(groups))
        self._agent = agent
        self._choosing = {each: partners[group] for each, group in groups.items() if group in partners}
        self._random = others == "random"
        shape, dtype = frames[groups[agent]]
        self._last = np.zeros(tuple(shape), dtype)
        low, high = (0, 255) if dtype == "uint8" else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, tuple(shape), np.dtype(dtype).type)
        own = self._world.spaces[agent]
        self.action_space = spaces.Discrete(own.actions, start=own.first)  # type: ignore[assignment]
        self.render_mode = render_mode
        self.metadata = dict(getattr(self._world.env, "metadata", {}))
        self._ended = (False, False)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._world.begin(0, seed, options)
        self._ended = (False, False)
        return self._until_turn(None)[0], {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        moved = self._world.step(np.array([int(action) - self._world.spaces[self._agent].first]))
        return *self._until_turn(moved), {}

    def _until_turn(self, moved: Moved | None) -> tuple[Array, float, bool, bool]:
        """Let the others act until it is this agent's turn or the world's episode is over."""
        total = 0.0
        while True:
            for result in () if moved is None else moved.results:
                if result.agent == self._agent:
                    total, self._last = total + float(result.reward[0]), result.rows[0]
                    if result.terminated[0] or result.truncated[0]:
                        self._ended = (bool(result.terminated[0]), bool(result.truncated[0]))
            if moved is not None and moved.over:
                terminated, truncated = self._ended if any(self._ended) else (False, True)
                return self._last, total, terminated, truncated
            waiting = self._world.waiting()
            if waiting.agent == self._agent:
                self._last = waiting.rows[0]
                return self._last, total, False, False
            moved = self._world.step(np.array([self._chosen(waiting)]))

    def _chosen(self, waiting: Waiting) -> int:
        space = self._world.spaces[waiting.agent]
        if self._random:
            return int(self.np_random.integers(space.actions))
        return int(self._choosing[waiting.agent](waiting.observation[ALONE])[0]) - space.first

    def render(self) -> Any:
        return self._world.env.render()

    def close(self) -> None:
        self._world.close()
