"""Hockey for one learner: a Gymnasium environment with the opponent inside."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding

from jurybox.studies.hockey.bots import BotName, Opponent, make_opponent
from jurybox.studies.hockey.drawing import Frame, draw
from jurybox.studies.hockey.game import Action, HockeyGame, Mode, Observation, TimeOut
from jurybox.studies.hockey.original import make_game
from jurybox.studies.hockey.rink import FPS

# Discrete actions, one effect each: nothing, forces, torques, shoot.
DISCRETE_ACTIONS = np.array(
    [
        [0, 0, 0, 0],
        [-1, 0, 0, 0],
        [1, 0, 0, 0],
        [0, -1, 0, 0],
        [0, 1, 0, 0],
        [0, 0, -1, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ],
    np.float32,
)


class HockeyEnv(gymnasium.Env[Observation, Any]):
    """Play as player 0 (left) against `opponent`; observations, rewards and info are those of `HockeyGame`.

    Actions are a ``Box(-1, 1, (4,))``: force x, force y, torque, shoot (above 0.5); or, with ``discrete=True``, one of
    the rows of `DISCRETE_ACTIONS`. Without `keep` there is no shooting.

    Args:
        opponent: "weak", "strong", "random", or any object with ``reset(seed)`` and ``act(observation)``.
        mode, keep, time_out: see `HockeyGame`.
        environment: a game other than this package's, see `make_game`; it has no pictures.
        seed: seeds the first game and what follows, until ``reset(seed=...)`` says otherwise.
        render_mode: "rgb_array" or None.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}  # noqa: RUF012  (Gymnasium's own declaration)

    def __init__(
        self,
        opponent: BotName | Opponent = "weak",
        mode: Mode | int = Mode.NORMAL,
        *,
        keep: bool = True,
        discrete: bool = False,
        time_out: TimeOut = "truncate",
        seed: int | None = None,
        environment: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"expected render_mode to be 'rgb_array' or None, got {render_mode!r}")
        self.game = make_game(environment, mode, keep=keep, time_out=time_out)
        actions = self.game.action_size
        self.opponent = make_opponent(opponent, action_size=actions) if isinstance(opponent, str) else opponent
        self.discrete = discrete
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.game.observation_size,), np.float32)
        self._table = DISCRETE_ACTIONS[: len(DISCRETE_ACTIONS) if keep else -1, :actions]
        self.action_space: spaces.Space[Any] = (
            spaces.Discrete(len(self._table)) if discrete else spaces.Box(-1.0, 1.0, (actions,), np.float32)
        )
        self.score = [0, 0]
        self._games = 0
        self._seen = np.zeros((2, self.game.observation_size), np.float32)
        if seed is not None:
            self.np_random, self._np_random_seed = seeding.np_random(seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin a game.

        Args:
            seed: makes this game, those after it, and the opponent's random numbers repeatable.
            options: ``{"first": 0 or 1}`` says on whose side the puck begins; otherwise in turn.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._games = 0
        first = (options or {}).get("first", self._games % 2)
        if first not in (0, 1):
            raise ValueError(f"options['first']={first!r}: expected 0 or 1")
        self._games += 1
        chance = int(self.np_random.integers(2**31))
        self._seen = self.game.reset(chance, first=first)
        self.opponent.reset(chance)
        return self._seen[0], self._info()

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Advance a fiftieth of a second; see `HockeyGame.step`."""
        own: Action = self._table[int(action)] if self.discrete else np.asarray(action, np.float32)
        turn = self.game.step(np.stack((own, self.opponent.act(self._seen[1]))))
        self._seen = turn.observations
        winner = turn.infos[0]["winner"]
        if winner:
            self.score[0 if winner > 0 else 1] += 1
        return self._seen[0], turn.rewards[0], turn.terminated, turn.truncated, turn.infos[0]

    def render(self) -> Frame | None:
        """Return the current picture, uint8 (height, width, 3), when ``render_mode`` is "rgb_array"."""
        if self.render_mode is None or not isinstance(self.game, HockeyGame):
            return None
        return draw(self.game, score=(self.score[0], self.score[1]))

    def close(self) -> None:
        self.game.close()

    def _info(self) -> dict[str, Any]:
        return {
            "winner": 0,
            "reward_closeness_to_puck": 0.0,
            "reward_touch_puck": 0.0,
            "reward_puck_direction": 0.0,
        }
