"""TD3, with n-step targets and importance weights.

Twin delayed deep deterministic policy gradients: S. Fujimoto et al., "Addressing Function Approximation Error in
Actor-Critic Methods", ICML 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jurybox.training.algorithms.acting import NumpyActor
from jurybox.training.algorithms.networks import Actor, Policy, TwinCritic
from jurybox.training.algorithms.normaliser import Normaliser
from jurybox.training.algorithms.td3_settings import CLIP, TD3Settings

__all__ = ["TD3", "TD3Settings", "Update"]


class Update(NamedTuple):
    """What a step of the learner did; tensors stay on the device until somebody reads them.

    Attributes:
        metrics: scalar tensors: critic_loss, value (mean of both critics), target; actor_loss in steps that moved it.
        errors: (n,) mean absolute TD errors of both critics, for priorities.
    """

    metrics: dict[str, Tensor]
    errors: Tensor


class TD3:
    """The learner. It knows batches only: no replay, environment or process.

    Args:
        observation_size, action_size: of a row.
        settings: see `TD3Settings`.
        device: where everything is computed.
        seed: of the first weights and the smoothing noise.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        settings: TD3Settings | None = None,
        *,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        self.settings = settings or TD3Settings()
        self.device = torch.device(device)
        self.updates = 0
        self.normaliser = Normaliser(observation_size)
        s = self.settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = Actor(observation_size, action_size, s.hidden_actor).to(self.device)
            self.critic = TwinCritic(observation_size, action_size, s.hidden_critic).to(self.device)
        self.policy = Policy(self.actor, observation_size, clip=CLIP).to(self.device)
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critic = deepcopy(self.critic).requires_grad_(False)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        # Fused: one call for all parameters instead of a dozen each.
        self._actor_optimizer = torch.optim.Adam(self.actor.parameters(), s.actor_rate, fused=True)
        self._critic_optimizer = torch.optim.Adam(self.critic.parameters(), s.critic_rate, fused=True)
        self._actor_parameters = list(self.actor.parameters())
        self._critic_parameters = list(self.critic.parameters())
        self._live: list[Tensor] = [*self._actor_parameters, *self._critic_parameters]
        self._targets: list[Tensor] = [*self.target_actor.parameters(), *self.target_critic.parameters()]

    def refresh_normaliser(self) -> None:
        """Compute with the normaliser's statistics as they are now."""
        mean, scale = self.normaliser.shift_and_scale()
        self.policy.observation_mean.copy_(torch.from_numpy(mean))
        self.policy.observation_scale.copy_(torch.from_numpy(scale))

    def update(self, batch: Mapping[str, Tensor], weights: Tensor | None = None) -> Update:
        """One step of the critics, and every `policy_delay`-th time one of actor and targets.

        Args:
            batch: observation (n, o), action (n, a), reward (n,), discount (n,) (gamma to the number of steps, 0 after
                an end), next_observation (n, o); float32, observations raw: a replay's sample with
                ``Windows(n_step=..., next="observation")``.
            weights: (n,) importance weights of prioritized samples.
        """
        s = self.settings
        observation = self.policy.normalised(batch["observation"])
        action = batch["action"]
        with torch.no_grad():
            following = self.policy.normalised(batch["next_observation"])
            noise = torch.empty_like(action).normal_(0.0, s.target_noise, generator=self._generator)
            noise.clamp_(-s.target_clip, s.target_clip)
            next_action = self.target_actor(following).add_(noise).clamp_(-1.0, 1.0)
            bootstrap = self.target_critic(following, next_action).amin(0)
            target = torch.addcmul(batch["reward"] * s.reward_scale, batch["discount"], bootstrap)
        values = self.critic(observation, action)
        errors = values - target
        squares = errors.square() if weights is None else errors.square() * weights
        loss = squares.mean(1).sum()
        self._step(self._critic_optimizer, self._critic_parameters, loss)
        metrics = {"critic_loss": loss.detach(), "value": values.detach().mean(), "target": target.mean()}
        self.updates += 1
        if self.updates % s.policy_delay == 0:
            raw = self.actor.before_tanh(observation)
            actor_loss = -self.critic.first(observation, torch.tanh(raw)).mean()
            if s.pre_tanh_penalty:
                actor_loss = actor_loss + s.pre_tanh_penalty * (raw.abs() - 1.0).relu_().square().mean()
            self._step(self._actor_optimizer, self._actor_parameters, actor_loss)
            metrics["actor_loss"] = actor_loss.detach()
            with torch.no_grad():
                torch._foreach_lerp_(self._targets, self._live, s.tau)
        return Update(metrics, errors.detach().abs().mean(0))

    @staticmethod
    def _step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], loss: Tensor) -> None:
        # Only these parameters' gradients: the actor's loss runs through the critic, whose own are of no use then.
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()

    def acting(self) -> Policy:
        """The module that is published: from raw observations to actions."""
        return self.policy

    def numpy_actor(self) -> NumpyActor:
        """A copy of the policy as it is now, for acting on this host without torch."""
        state = self.acting().state_dict()
        return NumpyActor({name: value.detach().cpu().numpy().copy() for name, value in state.items()}, clip=CLIP)

    def state_dict(self) -> dict[str, Any]:
        """All of it: networks, optimisers, statistics, counters, random state; what weights_only=True loads."""
        return {
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "target_actor": self.target_actor.state_dict(),
            "target_critic": self.target_critic.state_dict(),
            "actor_optimizer": self._actor_optimizer.state_dict(),
            "critic_optimizer": self._critic_optimizer.state_dict(),
            "normaliser": self.normaliser.state_dict(),
            "updates": self.updates,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken (on the same kind of device)."""
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        self.target_actor.load_state_dict(state["target_actor"])
        self.target_critic.load_state_dict(state["target_critic"])
        self._actor_optimizer.load_state_dict(state["actor_optimizer"])
        self._critic_optimizer.load_state_dict(state["critic_optimizer"])
        self.normaliser.load_state_dict(state["normaliser"])
        self.updates = int(state["updates"])
        self._generator.set_state(state["generator"].cpu())
        self.refresh_normaliser()
