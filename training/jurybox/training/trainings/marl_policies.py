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

from jurybox.training.algorithms.networks import ActorCritic
from jurybox.training.algorithms.registry import make
from jurybox.training.algorithms.served import raw_network
from jurybox.training.algorithms.torch_states import TorchWeights
from jurybox.training.runtime.plan import Kind
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.serving import LeasedModel, UpdatesByVersion
from jurybox.training.spaces import AgentSpec

Algorithm = Literal["dqn", "iqn", "ppo"]
ON_POLICY = "ppo"


def make_network(algorithm: str, hidden: Sequence[int], seed: int, **seen: Any) -> nn.Module:
    """Create a network for stacked observations; the same seed gives the same network.

    Args:
        seen: arguments of `AgentSpec.stacked`.
    """
    return raw_network(make(algorithm, {"hidden": hidden}, AgentSpec.stacked(**seen).as_dict()), seed)


def spec_of(network: Mapping[str, Any]) -> AgentSpec:
    """Return what a policy gets and chooses whose network has these arguments, without the seed."""
    return AgentSpec.stacked(**{name: value for name, value in network.items() if name not in ("algorithm", "hidden")})


Observation = npt.NDArray[Any]


class GroupPolicy(ABC):
    """A group's policy with the newest published weights.

    Args:
        channel: name of the channel that the weights are published on.
        network: network from `make_network`.
    """

    def __init__(self, context: RoleContext, channel: str, network: nn.Module) -> None:
        self._weights = TorchWeights(context.reader(channel), network.requires_grad_(False))
        context.follow(channel, self._weights)
        server = context.plan.server
        acts = context.spec.kind is Kind.ACTOR and server is not None and channel in server.models
        self._served = ServedNetwork(context, channel) if acts else None

    def close(self) -> None:
        """Release the policy's resources on a server."""
        if self._served is not None:
            self._served.close()

    @abstractmethod
    def act(self, stacked: Observation, random: np.random.Generator) -> tuple[int, Mapping[str, Any]]:
        """Return an action for training, and further fields of its replay row."""

    @abstractmethod
    def play(self, stacked: Observation, random: np.random.Generator) -> int:
        """Return an action for evaluations."""


class ServedNetwork:
    """A group's network on the plan's server, with the weights that its learner publishes.

    Attributes:
        version: version of the weights that computed the last answer.
    """

    def __init__(self, context: RoleContext, channel: str) -> None:
        self._model = LeasedModel(context, channel, 1)
        self._reader, self._max_lag = context.reader(channel), context.plan.max_lag
        self.version = 0

    def __call__(self, stacked: Observation) -> npt.NDArray[np.float32]:
        """Return the network's outputs, (1, actions), computed with weights within `max_lag` if possible.

        Raises:
            ServerGone, Timeout, ModelNotFound: the error lasted longer than the server's time-out.
        """
        until = time.monotonic() + self._model.timeout

        def fresh(version: int) -> bool:
            return self._max_lag is None or self._reader.newest - version <= self._max_lag or time.monotonic() > until

        reply = self._model.infer(stacked[None], fresh)
        self.version = reply.version
        found: Any = reply.outputs
        return np.asarray(found["logits"] if isinstance(found, Mapping) else found)

    def close(self) -> None:
        """Release the lane."""
        self._model.close()


class ValuePolicy(GroupPolicy):
    """A policy that chooses the best action, or with probability epsilon a random one.

    Args:
        epsilon: first value, last value, and the number of learner steps over which it falls linearly.
        actions: number of actions.
    """

    def __init__(
        self, context: RoleContext, channel: str, network: nn.Module, *, epsilon: tuple[float, float, int], actions: int
    ) -> None:
        super().__init__(context, channel, network)
        self._context, self._network, self._epsilon, self._actions = context, network, epsilon, actions

    @property
    def epsilon(self) -> float:
        """The probability of a random action with the newest weights."""
        high, low, steps = self._epsilon
        return max(low, high - (high - low) * int(self._weights.extra.get("updates", 0)) / max(1, steps))

    def act(self, stacked: Observation, random: np.random.Generator) -> tuple[int, Mapping[str, Any]]:
        self._context.metrics(epsilon=self.epsilon)
        return self.play(stacked, random), {}

    def play(self, stacked: Observation, random: np.random.Generator) -> int:
        epsilon = self.epsilon
        # Both numbers are drawn every time, so that epsilon does not affect which numbers are drawn later.
        explores, anything = random.random() < epsilon, int(random.integers(self._actions))
        if explores:
            return anything
        if self._served is not None:
            return int(self._served(stacked)[0].argmax())
        with torch.inference_mode():
            return int(self._network(torch.from_numpy(stacked)[None])[0].argmax())


class SampledPolicy(GroupPolicy):
    """A policy that draws actions from its distribution.

    An on-policy learner needs to know which policy acted. So the replay stores the action's log-probability, and the
    number of learner updates before the policy was published.
    """

    def __init__(self, context: RoleContext, channel: str, network: ActorCritic) -> None:
        super().__init__(context, channel, network)
        self._network = network
        self._updates = UpdatesByVersion()

    def act(self, stacked: Observation, random: np.random.Generator) -> tuple[int, Mapping[str, Any]]:
        action, log_prob = self._draw(stacked, random)
        return action, {"log_prob": log_prob, "updates": self._policy_updates()}

    def _policy_updates(self) -> int:
        """Return the number of updates before the policy that just acted was published; a lower bound if unknown."""
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
                logits = self._network.actor(self._network.features(torch.from_numpy(stacked)[None]))[0]
            log_probabilities = torch.log_softmax(logits, 0).double().numpy()
        reached = np.cumsum(np.exp(log_probabilities)) > random.random()
        action = int(reached.argmax()) if reached.any() else len(reached) - 1
        return action, float(log_probabilities[action])


def policies(
    context: RoleContext,
    groups: Mapping[str, str],
    networks: Mapping[str, Mapping[str, Any]],
    epsilon: Mapping[str, tuple[float, float, int]],
) -> dict[str, GroupPolicy]:
    """Create the policies by agent; the agents of a group share one.

    Args:
        groups: name of each agent's group, which is also its channel.
        networks: arguments of `make_network`, by group.
        epsilon: that of `ValuePolicy`, by group.
    """
    of_group: dict[str, GroupPolicy] = {}
    for group in dict.fromkeys(groups.values()):
        network = make_network(**networks[group], seed=0)
        if isinstance(network, ActorCritic):
            of_group[group] = SampledPolicy(context, group, network)
        else:
            actions = int(networks[group]["actions"])
            of_group[group] = ValuePolicy(context, group, network, epsilon=epsilon[group], actions=actions)
    return {agent: of_group[group] for agent, group in groups.items()}


class FrameStack:
    """The last frames of an agent, (stack, ...), the newest last; zeros before the first frame."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.frames: Observation = np.zeros(shape, dtype)

    def clear(self) -> None:
        self.frames[:] = 0

    def add(self, frame: Observation) -> Observation:
        """Add the newest frame; return all frames."""
        self.frames[:-1] = self.frames[1:]
        self.frames[-1] = frame
        return self.frames
