"""Games as pictures, one after another; `jurybox.training.film` makes files of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jurybox.training.environments.hockey.bots import Opponent
from jurybox.training.environments.hockey.drawing import Frame, draw
from jurybox.training.environments.hockey.game import HockeyGame
from jurybox.training.environments.hockey.matches import Policy

_GOAL_FRAMES = 20  # that a goal stays in the picture


def film(
    policy: Policy,
    opponent: Opponent,
    *,
    games: int = 3,
    seed: int = 0,
    names: tuple[str, str] = ("policy", "opponent"),
    width: int = 640,
    every: int = 1,
) -> list[Frame]:
    """Frames of a few games, `policy` on the left.

    Args:
        every: steps between two frames: 1 for 50 frames a second.
    """
    game, score, frames = HockeyGame(), [0, 0], list[Frame]()
    for number in range(games):
        chance = int(np.random.default_rng((seed, number)).integers(2**31))
        seen: npt.NDArray[np.float32] = game.reset(chance, first=number % 2)
        opponent.reset(chance)
        while not game.over:
            turn = game.step(np.stack((policy(seen[:1])[0], opponent.act(seen[1]))))
            seen = turn.observations
            if winner := turn.infos[0]["winner"]:
                score[0 if winner > 0 else 1] += 1
            if game.taken % every == 0 or game.over:
                frames.append(draw(game, score=(score[0], score[1]), names=names, width=width))
        frames += [frames[-1]] * (_GOAL_FRAMES // every)
    return frames
