"""What acts in a multi-agent training: each agent's algorithm with its policy, and stacks of observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.training.algorithms.base import Algorithm, Arrays
from jurybox.training.algorithms.registry import make
from jurybox.training.roles.policy_client import PolicyClient, policy_client
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.spaces import ALONE

Observation = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Acting:
    """A group's algorithm and its policy."""

    algorithm: Algorithm
    policy: PolicyClient

    def outputs(self, stacked: Observation) -> Arrays:
        """Return the network's outputs, (1, ...) by name, for stacked observations (stack, ...)."""
        return self.policy.outputs({ALONE: stacked[None]})


def acting(
    context: RoleContext, groups: Mapping[str, str], algorithms: Mapping[str, Mapping[str, Any]]
) -> dict[str, Acting]:
    """Return what acts by agent; the agents of a group share it.

    Args:
        groups: name of each agent's group, which is also its channel.
        algorithms: arguments of `algorithms.make`, by group.
    """
    of_group = {}
    for group in dict.fromkeys(groups.values()):
        algorithm = make(**algorithms[group])
        of_group[group] = Acting(
            algorithm, policy_client(context, group, algorithm, rows=1, max_lag=context.plan.max_lag)
        )
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
