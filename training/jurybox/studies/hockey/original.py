"""Making games: this package's own, or an environment with the original's interface, played as a `Game`.

``hockey.hockey_env:HockeyEnv`` (github.com/martius-lab/hockey-env) is the original. It is not a dependency:
if it is installed, ``--env hockey.hockey_env:HockeyEnv`` uses it. It must have ``reset(one_starting=, mode=,
seed=)``, ``step(action of both)``, ``obs_agent_two()`` and ``get_info_agent_two()``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.protocol.errors import missing_name
from jurybox.studies.hockey.game import GOAL_REWARD, Game, GameStep, HockeyGame, Mode, Observation, TimeOut


def make_game(
    environment: str | None = None,
    mode: Mode | int = Mode.NORMAL,
    *,
    keep: bool = True,
    time_out: TimeOut = "truncate",
    seed: int | None = None,
) -> Game:
    """Make a game for two players.

    Args:
        environment: None for `HockeyGame`; ``module:Class`` for an environment with the original's interface, such as
            ``hockey.hockey_env:HockeyEnv`` where that is installed.

    Raises:
        ValueError: the name has another form.
        ImportError: the module is not installed, or has no such class; the message says which.
    """
    if environment is None:
        return HockeyGame(mode, keep=keep, time_out=time_out, seed=seed)
    module, colon, kind = environment.partition(":")
    if not colon or not module or not kind:
        raise ValueError(f"environment={environment!r}: expected module:Class, such as hockey.hockey_env:HockeyEnv")
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{environment} cannot be imported ({error}): install it (pip install "
            "git+https://github.com/martius-lab/hockey-env), or leave the option out for the built-in game"
        ) from error
    if (made := getattr(imported, kind, None)) is None:
        raise ImportError(f"{missing_name(imported, kind)}: expected a class with the hockey interface")
    # The original's Mode is an Enum of its own with the same numbers; it takes the number's member.
    own_mode = getattr(imported, "Mode", int)(int(mode))
    return OriginalGame(made(keep_mode=keep, mode=own_mode), Mode(mode), time_out, seed)


class OriginalGame:
    """A game over such an environment.

    The original reports a time-out as ``terminated``. This class reports a game that ended so, after its full time
    without a winner, as truncated, unless ``time_out="original"``.

    Args:
        environment: the object; closed with this.
        mode: see `HockeyGame`.
        time_out: see `HockeyGame`.
        seed: of the first game, and of what follows until `reset(seed)`.
    """

    def __init__(self, environment: Any, mode: Mode, time_out: TimeOut, seed: int | None) -> None:
        self.environment = environment
        self.mode = mode
        self.time_out = time_out
        # Read from a game: the original declares a space of 18 values even without keeping the puck.
        self.observation_size = len(environment.reset(seed=0)[0])
        self.action_size = int(environment.action_space.shape[0]) // 2
        self._taken = 0
        self._rng = np.random.default_rng(seed)

    def reset(self, seed: int | None = None, *, first: int | None = None) -> Observation:
        self._taken = 0
        if seed is None:  # the original would draw one from the system, so later games could not be repeated
            seed = int(self._rng.integers(2**31))
        else:
            self._rng = np.random.default_rng(seed)
        options: dict[str, Any] = {} if first is None else {"one_starting": first == 0}
        seen, _ = self.environment.reset(seed=seed, **options)
        return self._both(seen)

    def step(self, actions: Sequence[Sequence[float]] | npt.NDArray[Any]) -> GameStep:
        joined = np.clip(np.asarray(actions, np.float64), -1.0, 1.0).reshape(-1)
        seen, _, terminated, truncated, info = self.environment.step(joined)
        self._taken += 1
        infos = (dict(info), dict(self.environment.get_info_agent_two()))
        rewards = (_reward(infos[0]), _reward(infos[1]))
        if terminated and not infos[0]["winner"] and self._taken >= self.mode.steps and self.time_out == "truncate":
            terminated, truncated = False, True
        return GameStep(self._both(seen), rewards, bool(terminated), bool(truncated), infos)

    def close(self) -> None:
        self.environment.close()

    def _both(self, seen: Any) -> Observation:
        return np.stack((seen, self.environment.obs_agent_two())).astype(np.float32)


def _reward(info: dict[str, Any]) -> float:
    return float(GOAL_REWARD * info["winner"] + info["reward_closeness_to_puck"])
