"""Games as moving pictures: GIF for pages, MP4 for longer ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import imageio.v3 as imageio
import numpy as np
import numpy.typing as npt

from jurybox.training.environments.hockey.bots import Opponent
from jurybox.training.environments.hockey.drawing import Frame, draw
from jurybox.training.environments.hockey.game import HockeyGame
from jurybox.training.environments.hockey.matches import Policy
from jurybox.training.environments.hockey.rink import FPS

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


def save_film(frames: Sequence[Frame], path: Path, fps: float = FPS) -> None:
    """Write frames to a .gif or .mp4.

    Raises:
        ValueError: no frames, or another ending.
        OSError: the file cannot be written.
    """
    if not frames:
        raise ValueError("there is nothing to save: expected at least one frame")
    if path.suffix == ".gif":
        # Browsers play no faster than 50 frames a second, and GIF counts in hundredths.
        imageio.imwrite(path, np.stack(frames), extension=".gif", duration=max(20, round(1000 / fps / 10) * 10), loop=0)
    elif path.suffix == ".mp4":
        height, width = frames[0].shape[0] // 2 * 2, frames[0].shape[1] // 2 * 2
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
        if not writer.isOpened():
            raise OSError(f"{path} cannot be written: expected a writable folder")
        try:
            for frame in frames:
                writer.write(cv2.cvtColor(frame[:height, :width], cv2.COLOR_RGB2BGR))
        finally:
            writer.release()
    else:
        raise ValueError(f"{path.name}: expected a name that ends with .gif or .mp4")
