"""Soft actor-critic (T. Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", 2018, arXiv:1812.05905).

With twin critics and a temperature that is learned, which keeps the policy's entropy at a target. Equations 5 and 6
there are the critics', 9 the policy's, 18 the temperature's; appendix C corrects the density for the tanh.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

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
    draw_normal,
    networks,
    recurrent,
    torch,
    torch_states,
    weighed,
)
from jurybox.training.algorithms.schedules import Schedule, at, is_schedule

if TYPE_CHECKING:
    from torch import Tensor

    from jurybox.training.algorithms.networks import SeeingCritic, SquashedGaussianActor

__all__ = ["SAC"]


def first_temperature(ent_coef: float | str) -> tuple[bool, float]:
    """Whether the temperature is learned, and its first value.

    Raises:
        ValueError: it is neither a number above 0, a schedule from one on, nor "auto" or "auto_NUMBER".
    """
    if is_schedule(ent_coef) and min(at(ent_coef, 1.0), at(ent_coef, 0.0)) >= 0:
        ent_coef = at(ent_coef, 1.0)
    learns = isinstance(ent_coef, str) and ent_coef.startswith("auto")
    try:
        first = 1.0 if ent_coef == "auto" else float(str(ent_coef).removeprefix("auto_"))
    except ValueError:
        first = 0.0
    if first <= 0:
        raise ValueError(f"ent_coef={ent_coef!r}: expected a number above 0, 'lin_0.2_0.01', 'auto' or 'auto_0.1'")
    return learns, first


class SAC(Algorithm):
    """Soft actor-critic of actions with finite bounds; names and defaults are Stable-Baselines3's."""

    class Settings(RecurrentReplaySettings):
        """Settings of SAC."""

        learning_rate: Schedule = Field(  # type: ignore[assignment]  # wider, since it anneals
            3e-4, description="Learning rate of Adam; a number or a schedule."
        )
        hidden: tuple[int, ...] = Field((256, 256), description="Sizes of the hidden layers of every network.")
        tau: float = Field(0.005, gt=0, le=1, description="Coefficient of the soft update of target networks.")
        target_update_interval: int = Field(1, ge=1, description="Learner steps between two target updates.")
        ent_coef: float | str = Field(
            "auto",
            description='The temperature: a number or a schedule, or "auto", which learns it; "auto_0.1" from 0.1 on.',
        )
        target_entropy: float | Literal["auto"] = Field(
            "auto", description="The entropy aimed at; auto: minus the number of actions."
        )

        @field_validator("ent_coef")
        @classmethod
        def _is_a_temperature(cls, ent_coef: float | str) -> float | str:
            first_temperature(ent_coef)
            return ent_coef

        @model_validator(mode="after")
        def _has_a_layer(self) -> SAC.Settings:
            if not self.hidden:
                raise ValueError("hidden=(): expected one layer or more, of one unit or more")
            return self

    memories = 2
    metrics = ("critic_loss", "actor_loss", "value", "ent_coef", "entropy")
    hidden_after_pictures = (256, 256)
    kept = ("updates",)
    settings: Settings

    def check(self) -> None:
        self.check_bounded()

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        return {"mean": (self.spec.action.size,), "log_std": (self.spec.action.size,)}

    @property
    def chooses(self) -> tuple[str, Choose]:
        return "mean", "tanh"

    def network(self) -> SquashedGaussianActor:
        of = self.spec.action.size, self.settings.hidden
        if self.remembers:
            return recurrent.RecurrentSquashedGaussianActor(self.torsos(), *of)
        return networks.SquashedGaussianActor(self.encoder(), *of)

    def explore(self, outputs: Arrays, rng: np.random.Generator, progress: Progress) -> tuple[Array, Arrays]:
        return np.tanh(draw_normal(outputs["mean"], outputs["log_std"], rng)[0]), {}

    def setup(self, seed: int, device: str) -> None:
        s = self.settings
        self.acting = self.seeded(self.network, seed).to(device)
        self.critics: SeeingCritic = self.seeded(self.critic, seed + 1).to(device)
        self.target = deepcopy(self.critics).requires_grad_(False)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.target_entropy = -float(self.spec.action.size) if s.target_entropy == "auto" else s.target_entropy
        self._learns_temperature, first = first_temperature(s.ent_coef)
        self.log_temperature = torch.tensor(first, device=device).log().requires_grad_(self._learns_temperature)
        self._temperature_is_scheduled = is_schedule(s.ent_coef)
        rate = at(s.learning_rate, 1.0)
        self._of_actor, self._of_critics = self.own_parameters(self.acting), list(self.critics.parameters())
        self._of_target = list(self.target.parameters())
        self.actor_optimiser = compiling.Adam(self._of_actor, rate)
        self.critic_optimiser = compiling.Adam(self._of_critics, rate)
        self.temperature_optimiser = compiling.Adam([self.log_temperature], rate)
        self.updates = 0

    def draw(self, rows: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions (n, actions) in [-1, 1] from the policy, by standard normal noise of their shape.

        Returns:
            Them, and their log-densities (n,).
        """
        mean, log_std = self.acting(rows)
        before = mean + log_std.exp() * noise
        log_prob = networks.normal_log_prob(before, mean, log_std) - networks.tanh_correction(before)
        return torch.tanh(before), log_prob.sum(-1)

    def update(self, batch: Batch, progress: Progress) -> Update:
        """Update temperature, critics and policy, in this order, and the target critics."""
        s = self.settings
        self.anneal(s.learning_rate, progress)
        if self._temperature_is_scheduled:
            now = max(at(s.ent_coef, progress.remaining), 1e-30)  # whose logarithm is a number
            with torch.no_grad():
                self.log_temperature.copy_(torch.tensor(now).log())
        noise = {
            name: torch.empty_like(batch["action"]).normal_(generator=self.generator)
            for name in ("noise", "next_noise")
        }
        self.updates += 1
        follow = self.updates % s.target_update_interval == 0
        found = self.run(self._learn_and_follow if follow else self._learn, {**batch, **noise})
        return Update(found, found.pop("priorities"))

    def _learn(self, batch: Batch) -> dict[str, Tensor]:
        """Update temperature, critics and policy; returns metrics and priorities."""
        observation, following = batch["observation"], batch["next_observation"]
        drawn, log_prob = self.draw(observation, batch["noise"])
        temperature = self.log_temperature.detach().exp()
        if self._learns_temperature:
            # The gradient is by the temperature's logarithm, as if that were what the loss is linear in.
            loss = -(self.log_temperature * (log_prob.detach() + self.target_entropy)).mean()
            descend(self.temperature_optimiser, [self.log_temperature], loss)
        with torch.no_grad():
            next_action, next_log_prob = self.draw(following, batch["next_noise"])
            next_value = self.target(following, next_action).amin(0) - temperature * next_log_prob
            target = torch.addcmul(batch["reward"], batch["discount"], next_value)
        values = self.critics(observation, batch["action"])
        errors = values - target
        critic_loss = 0.5 * weighed(errors.square(), batch).mean(1).sum()
        descend(self.critic_optimiser, self._of_critics, critic_loss)
        actor_loss = (temperature * log_prob - self.critics(observation, drawn).amin(0)).mean()
        descend(self.actor_optimiser, self._of_actor, actor_loss)
        return {
            "ent_coef": temperature,
            "entropy": -log_prob.detach().mean(),
            "critic_loss": critic_loss.detach(),
            "actor_loss": actor_loss.detach(),
            "value": values.detach().mean(),
            "priorities": errors.detach().abs().mean(0),
        }

    def _learn_and_follow(self, batch: Batch) -> dict[str, Tensor]:
        """The same, and move the target critics."""
        found = self._learn(batch)
        with torch.no_grad():
            torch._foreach_lerp_(self._of_target, self._of_critics, self.settings.tau)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log_temperature": self.log_temperature.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        with torch.no_grad():
            self.log_temperature.copy_(torch_states.as_tensors(state["log_temperature"]).reshape(()))

    def load_published(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Take them over beside restored critics only: new ones would ruin them. Before a checkpoint little is lost."""
        if self.restored:
            self.acting.load_state_dict(weights)
