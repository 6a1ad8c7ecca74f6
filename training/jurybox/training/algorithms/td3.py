"""TD3, twin delayed deep deterministic policy gradients, with n-step targets and importance weights.

S. Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", ICML 2018, arXiv:1802.09477.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from jurybox.training.algorithms.base import (
    Algorithm,
    Array,
    Arrays,
    Batch,
    Choose,
    Progress,
    RecurrentReplaySettings,
    Update,
    compiling,
    descend,
    networks,
    recurrent,
    torch,
    weighed,
)
from jurybox.training.algorithms.schedules import NoiseSchedule, Schedule, at

if TYPE_CHECKING:
    from torch import Tensor

    from jurybox.training.algorithms.networks import DeterministicActor, SeeingCritic

__all__ = ["TD3"]


class TD3(Algorithm):
    """TD3 of actions with finite bounds; names and defaults are Stable-Baselines3's."""

    class Settings(RecurrentReplaySettings):
        """Settings of TD3."""

        learning_rate: Schedule = Field(  # type: ignore[assignment]  # wider, since it anneals
            1e-3, description="Learning rate of Adam; a number or a schedule."
        )
        critic_learning_rate: Schedule | None = Field(
            None, description="Learning rate of the critics; none: that of the policy."
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
        pre_tanh_penalty: float = Field(
            0.0,
            ge=0,
            description="Weight of the squared input, beyond 1, of the policy's last tanh: actions at their bounds "
            "have no gradient. 0 is plain TD3.",
        )
        reward_scale: float = Field(1.0, gt=0, description="Rewards are multiplied by it.")

    memories = 2
    metrics = ("critic_loss", "actor_loss", "value")
    hidden_after_pictures = (256, 256)
    kept = ("updates",)
    acting: DeterministicActor
    settings: Settings

    def check(self) -> None:
        self.check_bounded()

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        return {"action": (self.spec.action.size,)}

    @property
    def chooses(self) -> tuple[str, Choose]:
        return "action", "box"

    def network(self) -> DeterministicActor:
        of = self.spec.action.size, self.settings.hidden
        if self.remembers:
            return recurrent.RecurrentDeterministicActor(self.torsos(), *of)
        return networks.DeterministicActor(self.encoder(), *of)

    def explore(self, outputs: Arrays, rng: np.random.Generator, progress: Progress) -> tuple[Array, Arrays]:
        action = outputs["action"]
        noise = rng.normal(0.0, at(self.settings.action_noise, progress.remaining), action.shape)
        return np.clip(action + noise, -1.0, 1.0).astype(np.float32), {}

    def setup(self, seed: int, device: str) -> None:
        s = self.settings
        self.acting = self.seeded(self.network, seed).to(device)
        self.critics: SeeingCritic = self.seeded(self.critic, seed + 1).to(device)
        self.target_actor = deepcopy(self.acting).requires_grad_(False)
        self.target_critics = deepcopy(self.critics).requires_grad_(False)
        self.generator = torch.Generator(device).manual_seed(seed)
        self._of_actor, self._of_critics = self.own_parameters(self.acting), list(self.critics.parameters())
        self._of_targets = [*self.own_parameters(self.target_actor), *self.target_critics.parameters()]
        self.actor_optimiser = compiling.Adam(self._of_actor, at(s.learning_rate, 1.0))
        self.critic_optimiser = compiling.Adam(self._of_critics, at(self._critics_rate, 1.0))
        self.updates = 0

    @property
    def _critics_rate(self) -> float | str:
        rate: float | str | None = self.settings.critic_learning_rate
        return self.settings.learning_rate if rate is None else rate

    def target(self, batch: Batch) -> Tensor:
        """What the critics learn, (n,): the lesser target value of what follows, after a noisy target action.

        Args:
            batch: as in `update`, with the "noise" on target actions.
        """
        following = batch["next_observation"]
        action = self.target_actor(following).add_(batch["noise"]).clamp_(-1.0, 1.0)
        value = self.target_critics(following, action).amin(0)
        return torch.addcmul(batch["reward"] * self.settings.reward_scale, batch["discount"], value)

    def smoothing(self, action: Tensor) -> Tensor:
        """Draw the noise on target actions like these."""
        s = self.settings
        noise = torch.empty_like(action).normal_(0.0, s.target_policy_noise, generator=self.generator)
        return noise.clamp_(-s.target_noise_clip, s.target_noise_clip)

    def move_targets(self) -> None:
        """Move the target networks a little towards the networks."""
        with torch.no_grad():
            torch._foreach_lerp_(self._of_targets, [*self._of_actor, *self._of_critics], self.settings.tau)

    def actor_loss(self, observation: Tensor) -> Tensor:
        """The first critic's value of the policy's own actions, negative, and the penalty before the tanh."""
        before = self.acting.before_tanh(observation)
        loss = -self.critics.first(observation, torch.tanh(before)).mean()
        if penalty := self.settings.pre_tanh_penalty:
            loss = loss + penalty * (before - before.clamp(-1.0, 1.0)).square().mean()
        return loss

    def update(self, batch: Batch, progress: Progress) -> Update:
        """Update the critics, and every `policy_delay`-th time the policy and the targets."""
        s = self.settings
        self.anneal(s.learning_rate, progress, self.actor_optimiser)
        self.anneal(self._critics_rate, progress, self.critic_optimiser)
        self.updates += 1
        step = self._learn_all if self.updates % s.policy_delay == 0 else self._learn
        found = self.run(step, {**batch, "noise": self.smoothing(batch["action"])})
        return Update(found, found.pop("priorities"))

    def _learn(self, batch: Batch) -> dict[str, Tensor]:
        """Update the critics; returns metrics and priorities."""
        with torch.no_grad():
            target = self.target(batch)
        values = self.critics(batch["observation"], batch["action"])
        errors = values - target
        critic_loss = (weighed(errors, batch) * errors).mean(1).sum()
        descend(self.critic_optimiser, self._of_critics, critic_loss)
        return {
            "critic_loss": critic_loss.detach(),
            "value": values.detach().mean(),
            "priorities": errors.detach().abs().mean(0),
        }

    def _learn_all(self, batch: Batch) -> dict[str, Tensor]:
        """The same, then update the policy and move the targets."""
        found = self._learn(batch)
        actor_loss = self.actor_loss(batch["observation"])
        descend(self.actor_optimiser, self._of_actor, actor_loss)
        self.move_targets()
        return {**found, "actor_loss": actor_loss.detach()}

    def load_published(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Take them over beside restored critics only: new ones would ruin them. Before a checkpoint little is lost."""
        if self.restored:
            self.acting.load_state_dict(weights)
