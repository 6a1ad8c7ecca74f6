"""A multi-agent world as one agent's environment, in which `jurybox policy` plays a policy of `train marl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from jurybox.training.environments.adapter import Moved, Waiting
from jurybox.training.environments.gymnasium_env import EnvironmentUnusable
from jurybox.training.environments.pettingzoo_env import World
from jurybox.training.spaces import ALONE, MASK, Leaf, as_action

Array = npt.NDArray[Any]
Chooses = Callable[[Mapping[str, Array]], Array]


class AgentEnv(gymnasium.Env[Any, Any]):
    """The world as one agent's environment; the other agents act when it is their turn.

    A step is this agent's action and everything that happens until its next turn. Its reward is the sum of the agent's
    rewards in that time. The episode lasts until the world's episode is over, even if the agent has left before. An
    observation is the newest ones together, as the policy's inputs; a mask of actions is ``info["action_mask"]``.

    Args:
        name, world: import path and keyword arguments of the PettingZoo environment; see `make_world`.
        agent: name of the agent.
        groups: group of each agent.
        stacks: by agent, how many observations it sees.
        partners: by group, a function from n observations, (n, ...) by input, to actions as the environment takes them.
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
        stacks: Mapping[str, int],
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
        arguments = dict(world) if render_mode is None else {**world, "render_mode": render_mode}
        self._world = World(1, name, arguments, stacks)
        self._agent = agent
        self._choosing = {each: partners[group] for each, group in groups.items() if group in partners}
        self._random = others == "random"
        self._view = self._world.views[agent]
        parts = {leaf.name: _space_of(leaf) for leaf in self._view.spec.inputs}
        self._alone = list(parts) == [ALONE]
        self.observation_space = parts[ALONE] if self._alone else spaces.Dict(parts)
        self.action_space = self._world.env.action_space(agent)
        self.render_mode = render_mode
        self.metadata = dict(getattr(self._world.env, "metadata", {}))
        self._ended = (False, False)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._world.begin(0, seed, options)
        self._ended = (False, False)
        observation, *_, info = self._until_turn(None)
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._until_turn(self._world.play(action))

    def _until_turn(self, moved: Moved | None) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Let the others act until it is this agent's turn or the world's episode is over."""
        total = 0.0
        while True:
            for result in () if moved is None else moved.results:
                if result.agent == self._agent:
                    total += float(result.reward[0])
                    if result.terminated[0] or result.truncated[0]:
                        self._ended = (bool(result.terminated[0]), bool(result.truncated[0]))
            if moved is not None and moved.over:
                ended = self._ended if any(self._ended) else (False, True)
                return self._seen(), total, *ended, self._info()
            waiting = self._world.waiting()
            if waiting.agent == self._agent:
                return self._seen(), total, False, False, self._info()
            moved = self._let_act(waiting)

    def _seen(self) -> Any:
        found = {leaf.name: self._view.inputs[leaf.name][0].copy() for leaf in self._view.spec.inputs}
        return found[ALONE] if self._alone else found

    def _info(self) -> dict[str, Any]:
        return {MASK: self._view.inputs[MASK][0].copy()} if self._view.spec.masked else {}

    def _let_act(self, waiting: Waiting) -> Moved:
        if self._random:
            spec = self._world.views[waiting.agent].spec.action
            return self._world.step(spec.sample(self.np_random, 1, waiting.observation.get(MASK)))
        found: Any = self._choosing[waiting.agent](waiting.observation)
        action = {name: each[0] for name, each in found.items()} if isinstance(found, Mapping) else found[0]
        space = self._world.env.action_space(waiting.agent)
        return self._world.play(as_action(action, space))

    def render(self) -> Any:
        return self._world.env.render()

    def close(self) -> None:
        self._world.close()


def _space_of(leaf: Leaf) -> spaces.Space[Any]:
    dtype = np.dtype(leaf.dtype)
    low, high = (-np.inf, np.inf) if dtype.kind == "f" else (False, True) if dtype.kind == "b" else _bounds(dtype)
    return spaces.Box(low, high, leaf.shape, dtype.type)


def _bounds(dtype: np.dtype[Any]) -> tuple[int, int]:
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
