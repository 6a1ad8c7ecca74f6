"""Rows of the game mirrored left to right, as a learner's batches may have them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from jurybox.studies.hockey.game import MIRROR_ACTION, MIRROR_OBSERVATION
from jurybox.training.algorithms.base import Batch


@cache
def _factors(device: torch.device) -> dict[str, Tensor]:
    observation, action = (torch.from_numpy(factors).to(device) for factors in (MIRROR_OBSERVATION, MIRROR_ACTION))
    return {"observation": observation, "next_observation": observation, "action": action}


def mirrored(batch: Batch) -> Batch:
    """Mirror every second row left to right, in place: the game is symmetric, and rows of a replay's anchor come first.

    Sizes are those of the game, or those of a game without holding the puck.
    """
    for name, factors in _factors(batch["action"].device).items():
        batch[name][::2].mul_(factors[: batch[name].shape[1]])
    return batch
