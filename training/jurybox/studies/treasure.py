"""A treasure hunt on a grid for several agents that move one after another, with PettingZoo's AEC interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from pettingzoo import AECEnv

# The world of the treasure hunt: walls, gems, agents, and the rules. Arrays and one random generator, nothing else.
#
# A turn begins without agents: gems that were taken may grow again elsewhere. Then the agents move in their order, each
# with the result of earlier moves. A tile holds one agent at most; an agent that walks into a wall or another agent
# stands still. Walking onto a gem takes it and is rewarded with its value.


Grid = npt.NDArray[np.uint8]

FLOOR, WALL = 0, 1
FIRST_GEM = 2  # kinds of gems follow


class Move(IntEnum):
    """Actions of an agent."""

    UP = 0
    DOWN = 1
    LEFT = 2
    RIGHT = 3
    STAY = 4


_STEPS = {Move.UP: (-1, 0), Move.DOWN: (1, 0), Move.LEFT: (0, -1), Move.RIGHT: (0, 1), Move.STAY: (0, 0)}


@dataclass(frozen=True, slots=True)
class TreasureConfig:
    """Settings of a world.

    Attributes:
        agents: number of agents.
        height, width: tiles, outer walls included.
        view: side of the square window that an agent sees, odd; the agent stands in the middle.
        values: value of each kind of gem.
        gems: number of each kind at the start, which is also the maximum.
        growth: probability, each turn, that a missing gem grows on a free tile.
        walls: share of the inner tiles that are walls, 0 to 0.4; the floor stays connected.
        turns: length of an episode.
    """

    agents: int = 2
    height: int = 21
    width: int = 21
    view: int = 5
    values: tuple[float, ...] = (1.0, 5.0, 10.0)
    gems: tuple[int, ...] = (20, 8, 4)
    growth: float = 0.1
    walls: float = 0.08
    turns: int = 100

    def __post_init__(self) -> None:
        if self.agents < 1 or self.view < 1 or self.view % 2 == 0 or self.turns < 1:
            raise ValueError(f"expected agents and turns >= 1 and an odd view, got {self}")
        if len(self.values) != len(self.gems) or not self.values:
            raise ValueError(f"every kind of gem has a value and a number: got {self.values} and {self.gems}")
        if not 0 <= self.walls <= 0.4 or not 0 <= self.growth <= 1:
            raise ValueError("expected walls from 0 to 0.4 and growth from 0 to 1")
        inner = (self.height - 2) * (self.width - 2)
        if min(self.height, self.width) < 3 or (1 - self.walls) * inner < self.agents + sum(self.gems):
            raise ValueError(f"{self.height} x {self.width} tiles are too few for the walls, agents and gems")

    @property
    def planes(self) -> int:
        """Return the number of planes of an observation: wall, other agents, and a plane for each kind of gem."""
        return 2 + len(self.values)


class TreasureWorld:
    """One world and its state.

    Attributes:
        tiles: (height, width) uint8: FLOOR, WALL, or FIRST_GEM + kind.
        places: (agents, 2) int64: row and column of each.
        turn: number of completed turns in this episode.
    """

    def __init__(self, config: TreasureConfig, random: np.random.Generator) -> None:
        self.config = config
        self.random = random
        self.turn = 0
        self._margin = config.view // 2
        self._values = np.array(config.values)
        self.tiles: Grid = np.zeros((config.height, config.width), np.uint8)
        self.places: npt.NDArray[np.int64] = np.zeros((config.agents, 2), np.int64)
        self.reset()

    def reset(self) -> None:
        """Create a new random world."""
        self.turn = 0
        self.tiles = self._walled()
        for kind, number in enumerate(self.config.gems):
            for _ in range(number):
                self._grow(kind, self.tiles == FLOOR)
        free = np.argwhere(self.tiles == FLOOR)
        self.places = free[self.random.choice(len(free), self.config.agents, replace=False)]
        self._see()

    def restore(self, tiles: Grid, places: npt.NDArray[np.int64], turn: int) -> None:
        """Restore what these attributes were."""
        self.tiles[:], self.places[:], self.turn = tiles, places, turn
        self._see()

    def _see(self) -> None:
        # Padded planes of all that agents can see, so that windows are slices; every move updates them.
        margin, config = self._margin, self.config
        shape = (config.planes, config.height + 2 * margin, config.width + 2 * margin)
        self._planes: npt.NDArray[np.uint8] = np.zeros(shape, np.uint8)
        self._planes[0] = 1
        inside = self._planes[:, margin : margin + config.height, margin : margin + config.width]
        inside[0] = self.tiles == WALL
        for kind in range(len(config.values)):
            inside[2 + kind] = self.tiles == FIRST_GEM + kind
        for row, column in self.places:
            inside[1, row, column] = 1
        self._inside = inside
        self._missing = [
            most - int(np.count_nonzero(self.tiles == FIRST_GEM + kind)) for kind, most in enumerate(self.config.gems)
        ]

    def entities_act(self) -> None:
        """Do the first part of a turn: each missing gem may grow somewhere."""
        for kind, missing in enumerate(self._missing):
            for _ in range(int(self.random.binomial(missing, self.config.growth)) if missing else 0):
                place = self._grow(kind, (self.tiles == FLOOR) & (self._inside[1] == 0))
                if place is not None:
                    self._inside[2 + kind][place] = 1
                    self._missing[kind] -= 1

    def pov(self, agent: int) -> npt.NDArray[np.uint8]:
        """Return the observation of an agent: (planes, view, view) uint8 of 0 and 1. Outside of the world are walls.

        Planes: walls, other agents, then gems by kind. It does not see itself.
        """
        row, column = self.places[agent]
        view = self.config.view
        window = self._planes[:, row : row + view, column : column + view].copy()
        window[1, self._margin, self._margin] = 0
        return window

    def act(self, agent: int, move: int) -> float:
        """Move an agent; return its reward: the value of the gem it took, or 0."""
        row, column = self.places[agent]
        down, right = _STEPS[Move(move)]
        position = (int(row + down), int(column + right))
        if self.tiles[position] == WALL or self._inside[1][position]:
            return 0.0
        self._inside[1, row, column] = 0
        self._inside[1][position] = 1
        self.places[agent] = position
        tile = int(self.tiles[position])
        if tile < FIRST_GEM:
            return 0.0
        self.tiles[position] = FLOOR
        self._inside[tile][position] = 0  # planes from 2 on are the kinds, as tiles are
        self._missing[tile - FIRST_GEM] += 1
        return float(self._values[tile - FIRST_GEM])

    def _grow(self, kind: int, free: npt.NDArray[np.bool_]) -> tuple[int, int] | None:
        places = np.flatnonzero(free)
        if not len(places):
            return None
        place = divmod(int(places[self.random.integers(len(places))]), self.config.width)
        self.tiles[place] = FIRST_GEM + kind
        return place

    def _walled(self) -> Grid:
        """Create the outer wall, and random inner walls one by one as long as all floor stays connected."""
        tiles = np.zeros((self.config.height, self.config.width), np.uint8)
        tiles[0], tiles[-1], tiles[:, 0], tiles[:, -1] = WALL, WALL, WALL, WALL
        inner = np.argwhere(tiles == FLOOR)
        wanted = round(self.config.walls * len(inner))
        for row, column in self.random.permutation(inner):
            if not wanted:
                break
            # If the floor among a tile's eight neighbours is one contiguous run, a wall here disconnects nothing.
            ring = [bool(tiles[row + r, column + c] == FLOOR) for r, c in _RING]
            if sum(ring[i] != ring[i - 1] for i in range(8)) <= 2:
                tiles[row, column] = WALL
                wanted -= 1
        return tiles


_RING = ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))


Observation = npt.NDArray[np.uint8]

_COLOURS = np.array(
    [[238, 236, 230], [70, 72, 80], [11, 122, 83], [232, 185, 74], [194, 87, 12], [138, 166, 255], [176, 92, 190]],
    np.uint8,
)
_AGENT = np.array([53, 86, 184], np.uint8)
_PIXELS = 12  # a tile's side


class TreasureHunt(AECEnv):  # type: ignore[misc]
    """Agents "agent_0", "agent_1", ... hunt gems for `turns` turns; then the episode is truncated for all of them.

    Observations are (planes, view, view) uint8 0 and 1 (`TreasureWorld.pov`), actions `Move`, rewards gems' values.

    Args:
        render_mode: "rgb_array" or None.
        settings: of the world; see `TreasureConfig`.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "treasure_hunt_v0", "render_modes": ["rgb_array"]}

    def __init__(self, *, render_mode: str | None = None, **settings: Any) -> None:
        super().__init__()
        self.config = TreasureConfig(**settings)
        self.render_mode = render_mode
        self.possible_agents = [f"agent_{number}" for number in range(self.config.agents)]
        self._numbers = {name: number for number, name in enumerate(self.possible_agents)}
        view = self.config.view
        seen = spaces.Box(0, 1, (self.config.planes, view, view), np.uint8)
        self._observation_spaces = dict.fromkeys(self.possible_agents, seen)
        self._action_spaces = {name: spaces.Discrete(len(Move)) for name in self.possible_agents}
        self.world: TreasureWorld | None = None
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Begin an episode; without a seed the generator continues."""
        if self.world is None or seed is not None:
            self.world = TreasureWorld(self.config, np.random.default_rng(seed))
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

    def episode_state(self) -> dict[str, Any]:
        """Return what `restore_episode` needs, so that a resumed training goes on in the midst of an episode."""
        world = self._world
        place = {"tiles": world.tiles, "places": world.places, "turn": world.turn}
        paid = {"rewards": self.rewards, "cumulative": self._cumulative_rewards, "next": self._next}
        return {**place, **paid, "random": world.random.bit_generator.state}

    def restore_episode(self, state: Mapping[str, Any]) -> None:
        """Restore what `episode_state` returned, instead of `reset`."""
        self.reset(seed=0)
        self._world.restore(state["tiles"], state["places"], state["turn"])
        self._world.random.bit_generator.state = state["random"]
        self.rewards, self._cumulative_rewards = dict(state["rewards"]), dict(state["cumulative"])
        self._next = state["next"]
        self.agent_selection = self.agents[self._next]

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

    def render(self) -> npt.NDArray[np.uint8] | None:
        """Return a picture (height, width, 3) uint8; None unless `render_mode` is "rgb_array"."""
        world = self._world
        if self.render_mode == "rgb_array":
            picture = _COLOURS[np.minimum(world.tiles, len(_COLOURS) - 1)]
            for row, column in world.places:
                picture[row, column] = _AGENT
            return np.kron(picture, np.ones((_PIXELS, _PIXELS, 1), np.uint8))
        return None

    def close(self) -> None:
        self.world = None

    @property
    def _world(self) -> TreasureWorld:
        if self.world is None:
            raise RuntimeError("there is no world yet: call reset() first")
        return self.world
