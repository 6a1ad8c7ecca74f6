"""A multi-agent world as one agent's environment, in which `jurybox policy` plays a policy of `train marl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from jurybox.training.runtime.plan import ConfigError
from jurybox.training.trainings.marl_policies import FrameStack
from jurybox.training.trainings.marl_worlds import agent_spaces, encoders, make_world

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
        ConfigError: the agent is unknown, or a partner's policy is missing.
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
            raise ConfigError(f"there is no agent {agent!r}; the agents are {', '.join(groups)}")
        if others not in ("learned", "random"):
            raise ConfigError(f"others = {others!r}: expected 'learned' or 'random'")
        missing = {group for each, group in groups.items() if each != agent} - partners.keys()
        if others == "learned" and missing:
            raise ConfigError(
                f"the others in this world act by the policies {', '.join(sorted(missing))}, and an exported file has "
                "one: give the run's folder, or --set \"others='random'\""
            )
        self._world = make_world((name, dict(world) if render_mode is None else {**world, "render_mode": render_mode}))
        self._agent, self._encoders, self._spaces = agent, encoders(self._world), agent_spaces(self._world)
        self._seen = {each: FrameStack(*frames[group]) for each, group in groups.items()}
        self._choosing = {each: partners[group] for each, group in groups.items() if group in partners}
        self._random = others == "random"
        shape, dtype = frames[groups[agent]]
        low, high = (0, 255) if dtype == "uint8" else (-np.inf, np.inf)
        self.observation_space = spaces.Box(low, high, tuple(shape), np.dtype(dtype).type)
        own = self._spaces[agent]
        self.action_space = spaces.Discrete(own.actions, start=own.first)  # type: ignore[assignment]
        self.render_mode = render_mode
        self.metadata = dict(getattr(self._world, "metadata", {}))
        self._ended = (False, False)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self._world.reset(seed=seed, options=options)
        for seen in self._seen.values():
            seen.clear()
        self._ended = (False, False)
        row, *_ = self._advance_to_agent()
        return row, {}

    def step(self, action: int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._world.step(int(action))
        row, reward, terminated, truncated = self._advance_to_agent()
        return row, reward, terminated, truncated, {}

    def _advance_to_agent(self) -> tuple[Array, float, bool, bool]:
        """Let the others act until it is this agent's turn or the world's episode is over."""
        world, total = self._world, 0.0
        while world.agents:
            agent = world.agent_selection
            observed, reward, terminated, truncated, _ = world.last()
            if agent == self._agent:
                total += float(reward)
            if terminated or truncated:
                self._seen[agent].clear()
                if agent == self._agent:
                    self._ended = (bool(terminated), bool(truncated))
                world.step(None)
                continue
            stacked = self._seen[agent].add(self._encoders[agent].row(observed))
            if agent == self._agent:
                return stacked.copy(), total, False, False
            world.step(self._chosen(agent, stacked))
        terminated, truncated = self._ended if any(self._ended) else (False, True)
        return self._seen[self._agent].frames.copy(), total, terminated, truncated

    def _chosen(self, agent: str, stacked: Array) -> int:
        if self._random:
            agent_space = self._spaces[agent]
            return int(self.np_random.integers(agent_space.actions)) + agent_space.first
        return int(self._choosing[agent](stacked[None])[0])

    def render(self) -> Any:
        return self._world.render()

    def close(self) -> None:
        self._world.close()
