"""TD3, twin delayed deep deterministic policy gradients, with n-step targets and importance weights.

S. Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", ICML 2018, arXiv:1802.09477.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from jurybox.training.algorithms.base import (
    Array,
    Arrays,
    Batch,
    Choose,
    LearnerAlgorithm,
    OffPolicySettings,
    Progress,
    Update,
    networks,
    torch,
    torch_states,
)
from jurybox.training.algorithms.schedules import NoiseSchedule, Schedule, at
from jurybox.training.algorithms.statistics import Normaliser
from jurybox.training.algorithms.td3_actor import CLIP, NumpyActor, TD3Settings

if TYPE_CHECKING:
    from torch import Tensor

    from jurybox.training.algorithms.networks import Actor, DeterministicActor, Policy, TwinCritic
    from jurybox.training.algorithms.td3_gradients import ClosedForm
    from jurybox.training.algorithms.torch_states import Part

__all__ = ["TD3", "TD3Learner", "TD3Settings"]


def _layers(network: Actor | TwinCritic) -> list[tuple[Tensor, Tensor]]:
    linear = (torch.nn.Linear, networks.TwinLinear)
    return [(layer.weight, layer.bias) for layer in network.layers if isinstance(layer, linear)]


def _closed_form(*learned: Actor | TwinCritic) -> ClosedForm:
    from jurybox.training.algorithms.td3_gradients import ClosedForm

    return ClosedForm(*map(_layers, learned))


class TD3Learner:
    """The learner, which takes batches.

    Args:
        observation_size: numbers of an observation's row.
        action_size: numbers of an action.
        settings: see `TD3Settings`.
        device: where everything is computed.
        seed: of the first weights and the smoothing noise.
        given: an actor and a critic to be used instead of new ones of these sizes. They get observations
            unchanged, and normalise them if needed; methods as those of `Actor` and `TwinCritic`.
    """

    def __init__(
        self,
        observation_size: int,
        action_size: int,
        settings: TD3Settings | None = None,
        *,
        device: str | torch.device = "cpu",
        seed: int = 0,
        given: tuple[Any, Any] | None = None,
    ) -> None:
        self.settings = settings or TD3Settings()
        self.device = torch.device(device)
        self.updates = 0
        self.normaliser = Normaliser(observation_size)
        s = self.settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            actor, critic = given or (
                networks.Actor(observation_size, action_size, s.hidden_actor),
                networks.TwinCritic(observation_size, action_size, s.hidden_critic),
            )
        self.actor: Actor = actor.to(self.device)
        self.critic: TwinCritic = critic.to(self.device)
        policy: Any = self.actor if given else networks.Policy(self.actor, observation_size, clip=CLIP)
        self.policy: Policy = policy.to(self.device)
        self._normalised: Callable[[Tensor], Tensor] = (lambda x: x) if given else self.policy.normalised
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critic = deepcopy(self.critic).requires_grad_(False)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        # Fused: one call for all parameters instead of a dozen each.
        self._actor_optimizer = torch.optim.Adam(self.actor.parameters(), s.actor_learning_rate, fused=True)
        self._critic_optimizer = torch.optim.Adam(self.critic.parameters(), s.critic_learning_rate, fused=True)
        self.parts: dict[str, Part] = {
            "actor": self.actor, "critic": self.critic, "target_actor": self.target_actor,
            "target_critic": self.target_critic, "actor_optimizer": self._actor_optimizer,
            "critic_optimizer": self._critic_optimizer, "generator": self._generator,
        }  # fmt: skip
        self._actor_parameters = list(self.actor.parameters())
        self._critic_parameters = list(self.critic.parameters())
        learned = (self.actor, self.critic, self.target_actor, self.target_critic)
        self._closed_form = None if given else _closed_form(*learned)
        self._live: list[Tensor] = [*self._actor_parameters, *self._critic_parameters]
        self._targets: list[Tensor] = [*self.target_actor.parameters(), *self.target_critic.parameters()]

    def refresh_normaliser(self) -> None:
        """Copy the normaliser's statistics to the policy."""
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
        if self._closed_form is not None:
            with torch.no_grad():
                return self._update_in_closed_form(self._closed_form, batch, weights)
        s = self.settings
        observation = self._normalised(batch["observation"])
        action = batch["action"]
        with torch.no_grad():
            following = self._normalised(batch["next_observation"])
            noise = torch.empty_like(action).normal_(0.0, s.target_policy_noise, generator=self._generator)
            noise.clamp_(-s.target_noise_clip, s.target_noise_clip)
            next_action = self.target_actor(following).add_(noise).clamp_(-1.0, 1.0)
            bootstrap = self.target_critic(following, next_action).amin(0)
            target = torch.addcmul(batch["reward"] * s.reward_scale, batch["discount"], bootstrap)
        values = self.critic(observation, action)
        errors = values - target
        squares = errors.square() if weights is None else errors.square() * weights
        loss = squares.mean(1).sum()
        torch_states.descend(self._critic_optimizer, self._critic_parameters, loss)
        metrics = {"critic_loss": loss.detach(), "value": values.detach().mean(), "target": target.mean()}
        self.updates += 1
        if self.updates % s.policy_delay == 0:
            raw = self.actor.before_tanh(observation)
            actor_loss = -self.critic.first(observation, torch.tanh(raw)).mean()
            if s.pre_tanh_penalty:
                actor_loss = actor_loss + s.pre_tanh_penalty * (raw.abs() - 1.0).relu_().square().mean()
            torch_states.descend(self._actor_optimizer, self._actor_parameters, actor_loss)
            metrics["actor_loss"] = actor_loss.detach()
            with torch.no_grad():
                torch._foreach_lerp_(self._targets, self._live, s.tau)
        return Update(metrics, errors.detach().abs().mean(0))

    def _update_in_closed_form(self, form: ClosedForm, batch: Mapping[str, Tensor], weights: Tensor | None) -> Update:
        """The same step without autograd, operation for operation."""
        s = self.settings
        observation = self._normalised(batch["observation"])
        action = batch["action"]
        noise = torch.empty_like(action).normal_(0.0, s.target_policy_noise, generator=self._generator)
        noise.clamp_(-s.target_noise_clip, s.target_noise_clip)
        bootstrap = form.following(self._normalised(batch["next_observation"]), noise)
        target = torch.addcmul(batch["reward"] * s.reward_scale, batch["discount"], bootstrap)
        values, errors, loss = form.critics(observation, action, target, weights)
        self._critic_optimizer.step()
        metrics = {"critic_loss": loss, "value": values.mean(), "target": target.mean()}
        self.updates += 1
        if self.updates % s.policy_delay == 0:
            metrics["actor_loss"] = form.actor(observation, s.pre_tanh_penalty)
            self._actor_optimizer.step()
            torch._foreach_lerp_(self._targets, self._live, s.tau)
        return Update(metrics, errors.abs_().mean(0))

    def acting(self) -> Policy:
        """The module that is published: from raw observations to actions."""
        return self.policy

    def numpy_actor(self) -> NumpyActor:
        """A copy of the policy as it is now, for acting on this host without torch."""
        state = self.acting().state_dict()
        return NumpyActor({name: value.detach().cpu().numpy().copy() for name, value in state.items()}, clip=CLIP)

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs: networks, optimisers, statistics, counters, random state."""
        return {
            **torch_states.states_of(self.parts),
            "normaliser": self.normaliser.state_dict(),
            "updates": self.updates,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, exactly (on the same kind of device); its arrays may be NumPy's."""
        torch_states.restore_states(self.parts, state)
        self.normaliser.load_state_dict(state["normaliser"])
        self.updates = int(state["updates"])
        if isinstance(self.policy, networks.Policy):
            self.refresh_normaliser()


class TD3(LearnerAlgorithm):
    """TD3 of actions with finite bounds; names and defaults are Stable-Baselines3's."""

    class Settings(OffPolicySettings):
        """Settings of TD3."""

        learning_rate: Schedule = Field(  # type: ignore[assignment]  # wider, since it anneals
            1e-3, description="Learning rate of Adam; a number or a schedule."
        )
        hidden: tuple[int, ...] = Field((400, 300), description="Sizes of the hidden layers of every network.")
        tau: float = Field(0.005, gt=0, le=1, description="Coefficient of the soft update of target networks.")
        policy_delay: int = Field(2, ge=1, description="Critic steps per actor step.")
        action_noise: NoiseSchedule = Field(
            0.1,
            description="Standard deviation of the exploration noise, for actions in [-1, 1]; a number or a schedule.",
        )
        target_policy_noise: float = Field(0.2, ge=0, description="Standard deviation of the noise on target actions.")
        target_noise_clip: float = Field(0.5, ge=0, description="Bound of that noise.")

    metrics = ("critic_loss", "actor_loss", "value")
    hidden_after_pictures = (256, 256)
    settings: Settings
    learner: TD3Learner

    def check(self) -> None:
        self.check_bounded()

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        return {"action": (self.spec.action.size,)}

    @property
    def chooses(self) -> tuple[str, Choose]:
        return "action", "box"

    def network(self) -> DeterministicActor:
        return networks.DeterministicActor(self.encoder(), self.spec.action.size, self.settings.hidden)

    def explore(self, outputs: Arrays, rng: np.random.Generator, progress: Progress) -> tuple[Array, Arrays]:
        action = outputs["action"]
        noise = rng.normal(0.0, at(self.settings.action_noise, progress.remaining), action.shape)
        return np.clip(action + noise, -1.0, 1.0).astype(np.float32), {}

    def setup(self, seed: int, device: str) -> None:
        s = self.settings
        rate = at(s.learning_rate, 1.0)
        settings = TD3Settings(
            actor_learning_rate=rate, critic_learning_rate=rate, tau=s.tau,
            policy_delay=s.policy_delay, target_policy_noise=s.target_policy_noise,
            target_noise_clip=s.target_noise_clip, pre_tanh_penalty=0.0, reward_scale=1.0,
        )  # fmt: skip
        given = self.seeded(self.network, seed), self.seeded(self.critic, seed + 1)
        self.learner = TD3Learner(1, self.spec.action.size, settings, device=device, seed=seed, given=given)
        self.acting = self.learner.actor

    def update(self, batch: Batch, progress: Progress) -> Update:
        self.anneal(self.settings.learning_rate, progress)
        return self.learner.update(batch)

    def load_published(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Take them over beside restored critics only: new ones would ruin them. Before a checkpoint little is lost."""
        if self.restored:
            self.acting.load_state_dict(weights)
