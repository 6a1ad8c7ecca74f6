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
_NETWORKS: dict[str, type[QNetwork] | type[QuantileNetwork] | type[ActorCritic]] = {
    "dqn": QNetwork,
    "iqn": QuantileNetwork,
    ON_POLICY: ActorCritic,
}


def make_network(algorithm: str, shape: Sequence[int], actions: int, hidden: Sequence[int], seed: int) -> nn.Module:
    """A network for stacked observations of `shape` (stack, ...); the same one for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _NETWORKS[algorithm](int(np.prod(shape)), actions, tuple(hidden))
