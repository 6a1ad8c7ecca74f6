"""Environments with observations of every kind that an agent may have; each defines what it rewards."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

SPACES = {
    "float32": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "float64": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "bounded": spaces.Box(-1.0, 1.0, (2, 3), np.float32),
    "uint8": spaces.Box(0, 255, (4, 4, 1), np.uint8),
    "uint16": spaces.Box(0, 65535, (3,), np.uint16),
    "int32": spaces.Box(-(2**31), 2**31 - 1, (3,), np.int32),
    "int64": spaces.Box(-(2**40), 2**40, (3,), np.int64),
    "bool": spaces.Box(0, 1, (3,), np.bool_),
    "discrete": spaces.Discrete(5, start=-1),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(4),
}


class Kinds(ParallelEnv):
    """Agents act in parallel; observations are drawn from their spaces, action 2 is rewarded.

    Args:
        kinds: by agent, which of `SPACES` it observes. length: of an episode. first: number of the first action.
        says: the observation instead of a draw, for environments that are wrong.
    """

    metadata = {"name": "kinds_v0", "render_modes": []}
    render_mode = None

    def __init__(self, kinds, length=8, first=0, says=None):
        self.possible_agents = list(kinds)
        self.agents = []
        self.length, self.first, self.says = length, first, says
        self._observed = {agent: SPACES[kind] for agent, kind in kinds.items()}
        self._actions = {agent: spaces.Discrete(3, start=first) for agent in kinds}
        self.rng = np.random.default_rng(0)

    def observation_space(self, agent):
        return self._observed[agent]

    def action_space(self, agent):
        return self._actions[agent]

    def reset(self, seed=None, options=None):
        self.agents, self.now = list(self.possible_agents), 0
        self.rng = np.random.default_rng(seed)
        return self._observations(), {agent: {} for agent in self.agents}

    def step(self, actions):
        for agent, action in actions.items():
            assert self._actions[agent].contains(np.int64(action)), f"{action} is none of {self._actions[agent]}"
        self.now += 1
        rewards = {agent: float(action - self.first == 2) for agent, action in actions.items()}
        over = dict.fromkeys(self.agents, self.now >= self.length)
        never = dict.fromkeys(self.agents, False)
        observations, infos = self._observations(), {agent: {} for agent in self.agents}
        if self.now >= self.length:
            self.agents = []
        return observations, rewards, never, over, infos

    def _observations(self):
        if self.says is not None:
            return {agent: np.asarray(self.says) for agent in self.possible_agents}
        found = {}
        for agent in self.possible_agents:
            space = self._observed[agent]
            space.seed(int(self.rng.integers(2**31)))
            found[agent] = space.sample()
        return found

    def close(self):
        pass


class Guests(ParallelEnv):
    """One agent stays; another stays three turns, is away for two, and returns. It observes (visit, turn of it).

    Args:
        says: whether it is terminated when it leaves, or just missing in `agents`. rounds: visits in an episode.
    """

    metadata = {"name": "guests_v0", "render_modes": []}
    render_mode = None

    def __init__(self, says=True, rounds=3):
        self.possible_agents = ["host", "guest"]
        self.agents = []
        self.says, self.rounds = says, rounds

    def observation_space(self, agent):
        return spaces.Box(0, 100, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2 if agent == "host" else 3)

    def reset(self, seed=None, options=None):
        self.now, self.agents = 0, list(self.possible_agents)
        return self._observations(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions) == set(self.agents), f"{sorted(actions)} acted, {self.agents} are there"
        before, self.now = self.agents, self.now + 1
        over = self.now >= 5 * self.rounds
        self.agents = [] if over else ["host", *(["guest"] if self.now % 5 < 3 else [])]
        left = "guest" in before and "guest" not in self.agents
        reported = [*self.agents, *(["guest"] if left and self.says else []), *(["host"] if over else [])]
        ended = {agent: agent == "guest" and left for agent in reported}
        cut = {agent: agent == "host" and over for agent in reported}
        return (
            self._observations(reported),
            {agent: float(agent == "guest") for agent in reported},
            ended,
            cut,
            {agent: {} for agent in reported},
        )

    def _observations(self, agents):
        return {agent: np.array([1 + self.now // 5, 1 + self.now % 5], np.float32) for agent in agents}

    def close(self):
        pass
