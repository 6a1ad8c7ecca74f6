"""Policies of the trainings as models of the server: what its engines load."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms.ppo import ActorCritic
from jurybox.training.algorithms.td3 import Actor, Policy
from jurybox.training.algorithms.td3_actor import CLIP
from jurybox.training.environments.cage.tables import N_ACTIONS
from jurybox.training.search.rollouts import INPUTS


def hockey_policy(observation: int, action: int, hidden: Sequence[int]) -> ServedModel:
    """Raw observations, float32 (observation,), to actions in [-1, 1], float32 (action,)."""
    return ServedModel(
        Policy(Actor(observation, action, hidden), observation, clip=CLIP),
        {"observation": TensorSpec("float32", (observation,))},
        {"action": TensorSpec("float32", (action,))},
    )


# ----
# The search's network as a model of the server.


class _Named(nn.Module):
    """The network with named outputs; its weights keep the names that the learner publishes."""

    def __init__(self) -> None:
        super().__init__()
        network = ActorCritic(INPUTS, N_ACTIONS, (64, 64))
        self.actor, self.critic = network.actor, network.critic

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        return {"logits": self.actor(observation), "value": self.critic(observation).squeeze(-1)}


def workflow_policy() -> ServedModel:
    """Observations with their workflow, float32 (77,), to logits (145,) and a value in the learner's scale."""
    return ServedModel(
        _Named(),
        {"observation": TensorSpec("float32", (INPUTS,))},
        {"logits": TensorSpec("float32", (N_ACTIONS,)), "value": TensorSpec("float32", ())},
    )
