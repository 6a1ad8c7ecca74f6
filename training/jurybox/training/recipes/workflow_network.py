"""The search's network as a model of the server."""

from __future__ import annotations

from torch import Tensor, nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.training.algorithms.actor_critic import ActorCritic
from jurybox.training.environments.cage.tables import N_ACTIONS
from jurybox.training.search.rollouts import INPUTS


class _Named(nn.Module):
    """The network with named outputs; its weights keep the names that the learner publishes."""

    def __init__(self) -> None:
        super().__init__()
        network = ActorCritic(INPUTS, N_ACTIONS, (64, 64))
        self.actor, self.critic = network.actor, network.critic

    def forward(self, observation: Tensor) -> dict[str, Tensor]:
        return {"logits": self.actor(observation), "value": self.critic(observation).squeeze(-1)}


def policy() -> ServedModel:
    """Observations with their workflow, float32 (77,), to logits (145,) and a value in the learner's scale."""
    return ServedModel(
        _Named(),
        {"observation": TensorSpec("float32", (INPUTS,))},
        {"logits": TensorSpec("float32", (N_ACTIONS,)), "value": TensorSpec("float32", ())},
    )
