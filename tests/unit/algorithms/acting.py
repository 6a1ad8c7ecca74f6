"""The built-in algorithms: their networks that act, and algorithms that are ready to learn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from jurybox.training.algorithms.base import Algorithm, Array, Arrays, Progress
from jurybox.training.algorithms.ppo import PPO, PPOSettings, RefinedPPO
from jurybox.training.algorithms.registry import make
from jurybox.training.spaces import ActionSpec, AgentSpec, Leaf

START = Progress(0, 1)


def spec_of(numbers: int, pictures: Sequence[Sequence[int]], normalize: bool, discrete: bool, size: int) -> AgentSpec:
    """Return a specification of so many numbers, and of pictures (channels, height, width)."""
    leaves = [Leaf("numbers", (numbers,), "float32")] if numbers else []
    leaves += [Leaf(f"picture {n}", tuple(shape), "uint8", "picture", 1 / 255) for n, shape in enumerate(pictures)]
    bounds = () if discrete else (-1.0,) * size, () if discrete else (1.0,) * size
    return AgentSpec(tuple(leaves), ActionSpec(discrete, size, 0, *bounds), normalize)


def algorithm(name: str, spec: AgentSpec, **settings) -> Algorithm:
    """Return the algorithm of that name."""
    assert all(map(math.isfinite, spec.action.low))
    return make(name, settings, spec.as_dict())


def acting_network(name, numbers, pictures, normalize, discrete, size, hidden, seed=0):
    """Return the network of that algorithm that acts."""
    made = algorithm(name, spec_of(numbers, pictures, normalize, discrete, size), hidden=hidden)
    return made.seeded(made.network, seed)


def learning(name: str, spec: AgentSpec, *networks: nn.Module, seed: int = 0, **settings) -> Algorithm:
    """Return an algorithm that can learn, with these instead of its own `network` and `critic`."""
    return ready(algorithm(name, spec, **settings), seed, *networks)


def ready(made: Algorithm, seed: int, *networks: nn.Module) -> Algorithm:
    """Set up an algorithm, with these instead of its own `network` and `critic`."""
    for method, network in zip(("network", "critic"), networks, strict=False):
        setattr(made, method, lambda network=network: network)
    made.setup(seed, "cpu")
    return made


def refined(
    rules: PPOSettings, *networks: nn.Module, inputs: int = 2, actions: int = 5, seed: int = 0, masked: bool = False
) -> PPO:
    """Return PPO with these rules, ready to learn."""
    return ready(RefinedPPO.of(rules, inputs, actions, masked=masked), seed, *networks)  # type: ignore[return-value]


def outputs_of(learner: Algorithm, observations: Array, masks: Array | None = None) -> Arrays:
    """Return the outputs of the network that acts, as a policy client gives them."""
    seen = [observations] if masks is None else [observations, masks]
    with torch.inference_mode():
        found = learner.acting(*map(torch.from_numpy, seen))
    return {name: each.numpy() for name, each in zip(learner.outputs, found, strict=True)}
