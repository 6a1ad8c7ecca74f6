"""What the policy sees: a small view, the picture's statistics, the edits so far, the time and the score.

One flat float32 vector within [-1, 1], because that is what every library's plain MLP takes; the slices below say where
each part lies for whoever wants to give the parts to networks of their own.

The view's pixels are shrunk to :data:`VIEW_SCALE` of the statistics' range: 768 pixels at full range would drown fifty
numbers that say more, and a young network would spend its first thousands of steps on unlearning them.
"""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from .edits import HIGHEST, LOWEST, TOOLS, Edits, Image
from .statistics import NAMES, measure

VIEW_SIDE = 16
VIEW_SCALE = 0.1

_VIEW_SIZE = VIEW_SIDE * VIEW_SIDE * 3
STATISTICS = slice(0, len(NAMES))
EDITS = slice(STATISTICS.stop, STATISTICS.stop + len(TOOLS))
TIME = slice(EDITS.stop, EDITS.stop + 1)
SCORE = slice(TIME.stop, TIME.stop + 1)
VIEW = slice(SCORE.stop, SCORE.stop + _VIEW_SIZE)
SIZE = VIEW.stop

Observation = npt.NDArray[np.float32]


def space() -> spaces.Box:
    """float32 (SIZE,) within [-1, 1]."""
    return spaces.Box(-1.0, 1.0, (SIZE,), np.float32)


def observe(picture: Image, edits: Edits, time: float, score: float) -> Observation:
    """The observation of one moment.

    Args:
        picture: the current picture, uint8 (384, 384, 3).
        edits: the recipe that made it; each setting is shown as a share of its limit.
        time: share of the episode that is over, 0 to 1.
        score: the juror's score of the picture, scaled to about [-1, 1].

    Returns:
        float32 (SIZE,) with the slices ``STATISTICS``, ``EDITS``, ``TIME``, ``SCORE`` and ``VIEW`` (16 x 16 x 3).
    """
    seen = np.empty(SIZE, dtype=np.float32)
    seen[STATISTICS] = measure(picture)
    seen[EDITS] = edits.vector() / np.maximum(-LOWEST, HIGHEST)
    seen[TIME] = 2.0 * time - 1.0
    seen[SCORE] = np.clip(score, -1.0, 1.0)
    view = cv2.resize(picture, (VIEW_SIDE, VIEW_SIDE), interpolation=cv2.INTER_AREA)
    np.multiply(np.asarray(view, dtype=np.float32).reshape(-1) / 127.5 - 1.0, VIEW_SCALE, out=seen[VIEW])
    return seen


def view_of(observation: Observation) -> Image:
    """The small view inside an observation, uint8 (16, 16, 3)."""
    pixels = (observation[VIEW].reshape(VIEW_SIDE, VIEW_SIDE, 3) / VIEW_SCALE + 1.0) * 127.5
    view: Image = np.rint(np.clip(pixels, 0, 255)).astype(np.uint8)
    return view
