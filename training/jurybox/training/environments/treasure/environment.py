"""The treasure hunt with PettingZoo's AEC interface: agents take turns, each sees what the ones before it have done."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import AECEnv

from jurybox.training.environments.treasure.world import FIRST_GEM, FLOOR, WALL, Move, TreasureConfig, World

Observation = npt.NDArray[np.uint8]

_COLOURS = np.array(
    [[238, 236, 230], [70, 72, 80], [11, 122, 83], [232, 185, 74], [194, 87, 12], [138, 166, 255], [176, 92, 190]],
    np.uint8,
)
_AGENT = np.array([53, 86, 184], np.uint8)
_PIXELS = 12  # a tile's side


class TreasureHunt(AECEnv):  # type: ignore[misc]
    """Agents "agent_0", "agent_1", ... hunt gems for `turns` turns; then the episode is truncated for all of them.

    Observations are (planes, view, view) uint8 of 0 and 1 (`World.pov`), actions `Move`, rewards the values of gems.

    Args:
        config: of the world; keyword arguments change single fields of it.
        render_mode: "rgb_array", "ansi" or None.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "treasure_hunt_v0", "render_modes": ["rgb_array", "ansi"]}

    def __init__(self, config: TreasureConfig | None = None, *, render_mode: str | None = None, **changes: Any) -> None:
        super().__init__()
        self.config = config or TreasureConfig(**changes)
        self.render_mode = render_mode
        self.possible_agents = [f"agent_{number}" for number in range(self.config.agents)]
        self._numbers = {name: number for number, name in enumerate(self.possible_agents)}
        view = self.config.view
        seen = spaces.Box(0, 1, (self.config.planes, view, view), np.uint8)
        self._observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self._action_spaces = {name: spaces.Discrete(len(Move)) for name in self.possible_agents}
        self.world: World | None = None
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """A new episode; without a seed the generator goes on."""
        if self.world is None or seed is not None:
            self.world = World(self.config, np.random.default_rng(seed))
        else:
            self.world.reset()
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {name: {} for name in self.agents}
        self._next = 0
        self.agent_selection = self.agents[0]
        self.world.entities_act()

    def observe(self, agent: str) -> Observation:
        return self._world.pov(self._numbers[agent])

    def step(self, action: int | None) -> None:
        """Let the selected agent act; None where its episode is over."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        world = self._world
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.rewards[agent] = world.act(self._numbers[agent], int(action))  # type: ignore[arg-type]
        self._accumulate_rewards()
        self._next += 1
        if self._next == len(self.agents):
            self._next = 0
            world.turn += 1
            if world.turn >= self.config.turns:
                self.truncations = dict.fromkeys(self.agents, True)
            else:
                world.entities_act()
        self.agent_selection = self.agents[self._next]

    def render(self) -> npt.NDArray[np.uint8] | str | None:
        """A picture (height, width, 3) uint8, or lines of characters: # wall, 1 2 3 gems by kind, A B agents."""
        world = self._world
        if self.render_mode == "ansi":
            signs = {FLOOR: ".", WALL: "#"}
            rows = [[signs.get(int(tile), str(tile - FIRST_GEM + 1)) for tile in row] for row in world.tiles]
            for number, (row, column) in enumerate(world.places):
                rows[row][column] = chr(ord("A") + number % 26)
            return "\n".join("".join(row) for row in rows)
        if self.render_mode == "rgb_array":
            picture = _COLOURS[np.minimum(world.tiles, len(_COLOURS) - 1)]
            for row, column in world.places:
                picture[row, column] = _AGENT
            return np.kron(picture, np.ones((_PIXELS, _PIXELS, 1), np.uint8))
        return None

    def close(self) -> None:
        self.world = None

    @property
    def _world(self) -> World:
        if self.world is None:
            raise RuntimeError("there is no world yet: call reset() first")
        return self.world
