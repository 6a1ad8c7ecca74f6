"""The networks of a multi-agent training, by the algorithm that teaches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn

from jurybox.training.algorithms.actor_critic import ActorCritic
from jurybox.training.algorithms.dqn import QNetwork
from jurybox.training.algorithms.iqn import QuantileNetwork

Algorithm = Literal["dqn", "iqn", "ppo"]
ON_POLICY = "ppo"
_OF_VALUES: dict[str, type[QNetwork] | type[QuantileNetwork]] = {"dqn": QNetwork, "iqn": QuantileNetwork}


def make_network(
    algorithm: str,
    shape: Sequence[int],
    actions: int,
    hidden: Sequence[int],
    seed: int,
    dtype: str = "uint8",
    scale: float = 1.0,
) -> nn.Module:
    """A network for stacked observations of `shape` (stack, ...); the same one for the same seed.

    Args:
        dtype: of the observations; any will do.
        scale: what they are multiplied by. An actor-critic wants that done: it takes rows of float32.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if algorithm == ON_POLICY:
            return ActorCritic(int(np.prod(shape)), actions, tuple(hidden))
        return _OF_VALUES[algorithm](int(np.prod(shape)), actions, tuple(hidden), scale)
