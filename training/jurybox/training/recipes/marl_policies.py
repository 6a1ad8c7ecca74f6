"""Policies of a multi-agent training: their networks, and how they choose actions."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from jurybox.training.algorithms.dqn import QNetwork, QuantileNetwork, ValueNetwork, as_floats
from jurybox.training.algorithms.ppo import ActorCritic
from jurybox.training.algorithms.torch_states import TorchWeights
from jurybox.training.runtime.plan import Kind
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.serving import LeasedModel, UpdatesByVersion

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


Observation = npt.NDArray[Any]


class GroupPolicy(ABC):
    """A group's policy, kept at its newest publication.

    Args:
        channel: that it is published on.
        network: as `make_network` makes it.
    """

    def __init__(self, context: RoleContext, channel: str, network: nn.Module) -> None:
        self._weights = TorchWeights(context.reader(channel), network.requires_grad_(False))
        context.follow(channel, self._weights)
        server = context.plan.server
        acts = context.spec.kind is Kind.ACTOR and server is not None and channel in server.models
        self._served = ServedNetwork(context, channel) if acts else None

    def close(self) -> None:
        """Give back what it has on a server."""
        if self._served is not None:
            self._served.close()

    @abstractmethod
    def act(self, stacked: Observation, random: np.random.Generator) -> tuple[int, Mapping[str, Any]]:
        """An action as in training, and what the replay keeps of the choice."""

    @abstractmethod
    def play(self, stacked: Observation, random: np.random.Generator) -> int:
        """An action as in an evaluation."""


class ServedNetwork:
    """A group's network on the plan's server, which has what its learner publishes.

    Attributes:
        version: of the weights that gave the last answer.
    """

    def __init__(self, context: RoleContext, channel: str) -> None:
        self._model = LeasedModel(context, channel, 1)
        self._reader, self._max_lag = context.reader(channel), context.plan.max_lag
        self.version = 0

    def __call__(self, stacked: Observation) -> npt.NDArray[np.float32]:
        """The network's outputs, (1, actions), of published weights that are not too old.

        Raises:
            ServerGone, Timeout, ModelNotFound: for longer than the server's time-out.
        """
        until = time.monotonic() + self._model.timeout

        def fresh(version: int) -> bool:
            return self._max_lag is None or self._reader.newest - version <= self._max_lag or time.monotonic() > until

        reply = self._model.ask(stacked[None], fresh)
        self.version = reply.version
        return np.asarray(reply.outputs)

    def close(self) -> None:
        """Release the lane."""
        self._model.close()


class ValuePolicy(GroupPolicy):
    """The best action, or with probability epsilon any.

    Args:
        epsilon: of evaluations; that of training is published beside the weights.
        actions: how many there are.
    """

    def __init__(
        self, context: RoleContext, channel: str, network: ValueNetwork, *, epsilon: float, actions: int
    ) -> None:
        super().__init__(context, channel, network)
        self._network, self._epsilon, self._actions = network, epsilon, actions

    def act(self, stacked: Observation, random: np.random.Generator) -> tuple[int, Mapping[str, Any]]:
        return self._choose(stacked, random, float(self._weights.extra.get("epsilon", 0.0))), {}

    def play(self, stacked: Observation, random: np.random.Generator) -> int:
        return self._choose(stacked, random, self._epsilon)

    def _choose(self, stacked: Observation, random: np.random.Generator, epsilon: float) -> int:
        # Both are drawn every time, so that what epsilon is does not move what is drawn later.
        explores, anything = random.random() < epsilon, int(random.integers(self._actions))
        if explores:
            return anything
        if self._served is not None:
            return int(self._served(stacked)[0].argmax())
        with torch.inference_mode():
            return int(self._network.values(torch.from_numpy(stacked)[None])[0].argmax())


class SampledPolicy(GroupPolicy):
    """An action drawn from the policy's distribution.

    The replay keeps the logarithm of its probability, and after how many of its learner's updates the policy was
    published: what an on-policy learner needs to know of whoever acted.
    """

    def __init__(self, context: RoleContext, channel: str, network: ActorCritic, *, scale: float) -> None:
        super().__init__(context, channel, network)
        self._network, self._scale = network, scale
        self._updates = UpdatesByVersion()

    def act(self, stacked: Observation, random: np.random.Generator) -> tuple[int, Mapping[str, Any]]:
        action, log_probability = self._draw(stacked, random)
        return action, {"log_probability": log_probability, "version": self._of_updates()}

    def _of_updates(self) -> int:
        """After how many updates the policy that has just acted was published; rather fewer where it is not known."""
        newest = int(self._weights.extra["updates"])
        if self._served is None:
            return newest
        self._updates.note(self._weights.version, newest)
        return self._updates.at(self._served.version)

    def play(self, stacked: Observation, random: np.random.Generator) -> int:
        return self._draw(stacked, random)[0]

    def _draw(self, stacked: Observation, random: np.random.Generator) -> tuple[int, float]:
        with torch.inference_mode():
            if self._served is not None:
                logits = torch.from_numpy(self._served(stacked)[0].copy())
            else:
                logits = self._network.actor(as_floats(torch.from_numpy(stacked)[None], self._scale))[0]
            log_probabilities = torch.log_softmax(logits, 0).double().numpy()
        reached = np.cumsum(np.exp(log_probabilities)) > random.random()
        action = int(reached.argmax()) if reached.any() else len(reached) - 1
        return action, float(log_probabilities[action])


def policies(
    context: RoleContext,
    groups: Mapping[str, str],
    networks: Mapping[str, Mapping[str, Any]],
    epsilon: Mapping[str, float] | None = None,
) -> dict[str, GroupPolicy]:
    """A policy for each agent; agents of one group have the same.

    Args:
        groups: by agent, the name of its channel.
        networks: by group, the arguments of `make_network`.
        epsilon: of evaluations, by group; 0 without it.
    """
    of_group: dict[str, GroupPolicy] = {}
    for group in dict.fromkeys(groups.values()):
        network = make_network(**networks[group], seed=0)
        if isinstance(network, ActorCritic):
            of_group[group] = SampledPolicy(context, group, network, scale=float(networks[group]["scale"]))
        else:
            assert isinstance(network, ValueNetwork)
            actions = int(networks[group]["actions"])
            explores = (epsilon or {}).get(group, 0.0)
            of_group[group] = ValuePolicy(context, group, network, epsilon=explores, actions=actions)
    return {agent: of_group[group] for agent, group in groups.items()}


class FrameStack:
    """The last frames of one agent: (stack, ...), the newest last, zeroes before the first."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.frames: Observation = np.zeros(shape, dtype)

    def clear(self) -> None:
        self.frames[:] = 0

    def add(self, frame: Observation) -> Observation:
        """Take in the newest frame; gives all of them."""
        self.frames[:-1] = self.frames[1:]
        self.frames[-1] = frame
        return self.frames
