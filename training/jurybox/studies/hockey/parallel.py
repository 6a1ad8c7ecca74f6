"""Hockey for two learners: a PettingZoo parallel environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from jurybox.studies.hockey.drawing import Frame, draw
from jurybox.studies.hockey.game import Action, HockeyGame, Mode, Observation, TimeOut
from jurybox.studies.hockey.rink import FPS

PLAYERS = ("left", "right")


class HockeyParallel(ParallelEnv[str, Observation, Action]):  # type: ignore[misc]
    """Both players act at once, each in its own frame, so one policy can play either side.

    Args:
        mode, keep, time_out: see `HockeyGame`, whose observations, rewards and info these are.
        render_mode: "rgb_array" or None.
    """

    metadata = {"render_modes": ["rgb_array"], "name": "jurybox_hockey_v0", "render_fps": FPS}  # noqa: RUF012

    def __init__(
        self,
        mode: Mode | int = Mode.NORMAL,
        *,
        keep: bool = True,
        time_out: TimeOut = "truncate",
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"expected render_mode to be 'rgb_array' or None, got {render_mode!r}")
        self.game = HockeyGame(mode, keep=keep, time_out=time_out)
        self.render_mode = render_mode
        self.possible_agents = list(PLAYERS)
        self.agents: list[str] = []
        self.score = [0, 0]
        # One object for each player: PettingZoo wants the same one at every call.
        self._observation_spaces = {
            name: spaces.Box(-np.inf, np.inf, (self.game.observation_size,), np.float32) for name in PLAYERS
        }
        self._action_spaces = {name: spaces.Box(-1.0, 1.0, (self.game.action_size,), np.float32) for name in PLAYERS}

    def observation_space(self, agent: str) -> spaces.Box:
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Box:
        return self._action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, dict[str, Any]]]:
        """Begin a game; ``options={"first": 0 or 1}`` says on whose side the puck begins."""
        seen = self.game.reset(seed, first=(options or {}).get("first"))
        self.agents = list(PLAYERS)
        return dict(zip(PLAYERS, seen, strict=True)), {name: {} for name in PLAYERS}

    def step(
        self, actions: dict[str, Action]
    ) -> tuple[dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Advance a fiftieth of a second; a goal or a time-out ends the game for both players."""
        turn = self.game.step(np.stack([actions[name] for name in PLAYERS]))
        winner = turn.infos[0]["winner"]
        if winner:
            self.score[0 if winner > 0 else 1] += 1
        if turn.terminated or turn.truncated:
            self.agents = []
        return (
            dict(zip(PLAYERS, turn.observations, strict=True)),
            dict(zip(PLAYERS, turn.rewards, strict=True)),
            dict.fromkeys(PLAYERS, turn.terminated),
            dict.fromkeys(PLAYERS, turn.truncated),
            dict(zip(PLAYERS, turn.infos, strict=True)),
        )

    def render(self) -> Frame | None:
        """Return the current picture, uint8 (height, width, 3), when ``render_mode`` is "rgb_array"."""
        return None if self.render_mode is None else draw(self.game, score=(self.score[0], self.score[1]))

    def close(self) -> None:
        self.game.close()
