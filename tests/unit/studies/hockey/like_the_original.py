"""A stand-in for github.com/martius-lab/hockey-env 2.6, module `hockey.hockey_env`: its interface, over our own game.

Its behaviour: actions are those of both players, concatenated; the time limit is reported as terminated, one step late,
and never as truncated; a finished game can be stepped; 18 observations are declared even if the puck is not kept;
observations are float64; modes are an Enum of its own, given as one, by number or by name; `reset` without a seed draws
one, lets the players begin in turn by default, player two first, and fails with a mode.
`test_the_stand_in_has_the_originals_interface` compares both where the original can be imported.
"""

from __future__ import annotations

import enum
from typing import ClassVar

import gymnasium
import numpy as np
from gymnasium.utils import EzPickle, seeding

from jurybox.studies.hockey import HockeyGame

FPS = 50


class Mode(enum.Enum):
    NORMAL = 0
    TRAIN_SHOOTING = 1
    TRAIN_DEFENSE = 2


class HockeyEnv(gymnasium.Env, EzPickle):
    metadata: ClassVar = {"render.modes": ["human", "rgb_array"], "render_fps": FPS}
    continuous = False

    def __init__(self, keep_mode: bool = True, mode: int | str | Mode = Mode.NORMAL, verbose: bool = False):
        EzPickle.__init__(self)
        self.seed()
        self.mode = mode
        self.keep_mode, self.verbose = keep_mode, verbose
        self.done, self.winner, self.time = False, 0, 0
        self.one_starts = True
        self.isopen = True
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape=(18,), dtype=np.float32)
        self.num_actions = 4 if keep_mode else 3
        self.action_space = gymnasium.spaces.Box(-1, +1, (self.num_actions * 2,), dtype=np.float32)
        self.discrete_action_space = gymnasium.spaces.Discrete(7)
        self._game = HockeyGame(self.mode.value, keep=keep_mode, time_out="original")
        self.reset(self.one_starts)

    @property
    def mode(self) -> Mode:
        return self._mode

    @mode.setter
    def mode(self, value: str | int | Mode) -> None:
        if isinstance(value, str):
            self._mode = Mode[value]
        elif isinstance(value, int | Mode):
            self._mode = Mode(value)
        else:
            raise TypeError(f"{value!r} is no mode")

    def seed(self, seed=None):
        self.np_random, seed = seeding.np_random(seed)
        return [seed]

    def reset(self, one_starting=None, mode=None, seed=None, options=None):
        if mode is not None:
            raise TypeError("attribute name must be string, not 'Mode'")
        self.seed(seed)
        self.done, self.winner, self.time = False, 0, 0
        self.max_timesteps = 250 if self.mode is Mode.NORMAL else 80
        if self.mode is Mode.NORMAL:
            self.one_starts = one_starting if one_starting is not None else not self.one_starts
        begun = int(self.np_random.integers(2**31)) if seed is None else seed
        self._seen = self._game.reset(begun, first=0 if self.one_starts else 1)
        return self._get_obs(), self._get_info()

    def step(self, action):
        action = np.clip(action, -1, +1).astype(np.float32)  # a list would fail here
        assert action.shape == self.action_space.shape
        if self._game.over:
            self._game.over = False
        turn = self._game.step(action.reshape(2, -1))
        self._seen, self.time = turn.observations, self.time + 1
        self.done, self.winner = self.done or turn.terminated, turn.infos[0]["winner"]
        info = self._get_info()
        return self._get_obs(), self.get_reward(info), self.done, False, info

    def _get_obs(self):
        return self._seen[0].astype(np.float64)

    def obs_agent_two(self):
        return self._seen[1].astype(np.float64)

    def _get_info(self):
        return dict(self._game._info(0, self._game.rink.scorer))

    def get_info_agent_two(self):
        return dict(self._game._info(1, self._game.rink.scorer))

    def get_reward(self, info):
        return float(10 * self.winner * self.done + info["reward_closeness_to_puck"])

    def get_reward_agent_two(self, info_two):
        return float(-10 * self.winner * self.done + info_two["reward_closeness_to_puck"])

    def set_state(self, state):
        raise NotImplementedError

    def discrete_to_continous_action(self, discrete_action):
        moves = [float(discrete_action == up) - float(discrete_action == down) for down, up in ((1, 2), (3, 4), (5, 6))]
        return moves + [float(discrete_action == 7)] * self.keep_mode

    def render(self, mode="human"):
        return None

    def close(self):
        self.isopen = False
