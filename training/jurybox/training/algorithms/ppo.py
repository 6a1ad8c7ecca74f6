"""Proximal policy optimisation (Schulman et al., 2017, arXiv:1707.06347), with each refinement a switch.

The defaults of `PPOSettings` are those of the order-conditioned design document (whole episodes of all environments
between two updates, 4 epochs, learning rate 0.002 with betas 0.9 and 0.99); generalised advantage estimation, clipped
value loss and the stop by divergence are good practice (Huang et al. 2022, "The 37 implementation details of PPO").
Those of `PPO.Settings` are Stable-Baselines3's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from jurybox.training.algorithms.base import (
    Algorithm,
    Array,
    Arrays,
    Batch,
    Choose,
    Floats,
    OnPolicySettings,
    Progress,
    RecurrentSettings,
    Rollout,
    Update,
    clipped,
    compiling,
    descend,
    draw_categorical,
    draw_choices,
    draw_normal,
    networks,
    recurrent,
    take,
    torch,
)
from jurybox.training.algorithms.schedules import AnySchedule, Schedule, at
from jurybox.training.spaces import ALONE, MEMORY, ActionSpec, AgentSpec, Leaf

if TYPE_CHECKING:
    from torch import Tensor

    from jurybox.training.algorithms.networks import ActorCritic, Features, Given
    from jurybox.training.algorithms.recurrent import RecurrentActorCritic

__all__ = ["PPO", "PPOSettings", "RefinedPPO", "advantages_of"]


_GRADIENT = "gradient "  # before the number of one, among tensors by name
_ROWS_AT_ONCE = 4096  # observations whose values are computed together: more pictures would take gigabytes, and seconds


@dataclass(frozen=True, slots=True)
class PPOSettings:
    """Settings of PPO.

    Attributes:
        learning_rate: learning rate of Adam, a number or a schedule.
        betas, adam_eps: of Adam.
        gamma: discount factor.
        n_epochs: passes over a rollout.
        batch_size: rows of one optimiser step.
        clip_range: maximum change of the probability ratio, a number or a schedule.
        ent_coef: weight of the entropy bonus, a number or a schedule.
        vf_coef: weight of the value loss.
        max_grad_norm: norm at which gradients are clipped.
        gae: generalised advantage estimation; else the discounted return minus the value.
        gae_lambda: lambda of generalised advantage estimation.
        bootstrap: add the value of the last state to a truncated episode; else add nothing.
        normalize_advantage: normalize advantages in each minibatch.
        normalise_returns: the critic learns returns scaled by their running mean and deviation.
        clip_value: keep new values within `clip_range` (of normalised returns) of the old ones.
        target_kl: stop an update when the policy has moved 1.5 times this far; None never stops.
        hidden: widths of the hidden layers.
    """

    learning_rate: Schedule = 0.002
    betas: tuple[float, float] = (0.9, 0.99)
    adam_eps: float = 1e-8
    gamma: float = 0.99
    n_epochs: int = 4
    batch_size: int = 2500
    clip_range: Schedule = 0.2
    ent_coef: AnySchedule = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    gae: bool = True
    gae_lambda: float = 0.95
    bootstrap: bool = True
    normalize_advantage: bool = True
    normalise_returns: bool = True
    clip_value: bool = True
    target_kl: float | None = 0.02
    hidden: tuple[int, ...] = (64, 64)


def _directly(step: Callable[[Batch], dict[str, Tensor]], given: Batch) -> dict[str, Tensor]:
    return step(given)


def advantages_of(rollout: Rollout, settings: PPOSettings) -> Floats:
    """Advantages, float32 (t, n): generalised (Schulman et al., 2016), or discounted return minus value."""
    if rollout.reward.shape[1] == 1:
        return _advantages_of_one(rollout, settings)
    found = np.zeros_like(rollout.reward)
    following = rollout.last_value
    advantage = np.zeros_like(following)
    decay = settings.gae_lambda if settings.gae else 1.0
    cut = np.where(rollout.terminated | (not settings.bootstrap), np.float32(0.0), rollout.next_value)
    for step in reversed(range(len(rollout.reward))):
        ended = rollout.ended[step]
        next_value = np.where(ended, cut[step], following)
        error = rollout.reward[step] + settings.gamma * next_value - rollout.value[step]
        advantage = error + settings.gamma * decay * np.where(ended, 0.0, advantage)
        found[step] = advantage
        following = rollout.value[step]
    return found


def _advantages_of_one(rollout: Rollout, settings: PPOSettings) -> Floats:
    """The same of one column, which may be long: with Python's numbers, since NumPy takes microseconds for each."""
    gamma, decay = settings.gamma, settings.gae_lambda if settings.gae else 1.0
    cut = np.where(rollout.terminated | (not settings.bootstrap), np.float32(0.0), rollout.next_value)[:, 0].tolist()
    rewards, values, ended = (column[:, 0].tolist() for column in (rollout.reward, rollout.value, rollout.ended))
    following, advantage = float(rollout.last_value[0]), 0.0
    found = [0.0] * len(rewards)
    for step in reversed(range(len(rewards))):
        if ended[step]:
            following, advantage = cut[step], 0.0
        advantage = rewards[step] + gamma * following - values[step] + gamma * decay * advantage
        found[step] = advantage
        following = values[step]
    return np.array(found, np.float32)[:, None]


class PPO(Algorithm):
    """Proximal policy optimisation of actions that are discrete, several choices or numbers, as in Stable-Baselines3.

    With a recurrent network it is sb3-contrib's RecurrentPPO: a rollout's steps stay in order, a minibatch is a stretch
    of them, and its sequences begin with what was remembered there when the rollout was made.

    Attributes:
        returns: running mean and deviation of returns, and the number of rollouts that are in them.
        gradient_steps: optimiser steps made.
    """

    class Settings(OnPolicySettings, RecurrentSettings):
        """Names and defaults are Stable-Baselines3's."""

        learning_rate: Schedule = Field(  # type: ignore[assignment]  # wider, since it anneals
            3e-4, description="Learning rate of Adam; a number or a schedule."
        )
        n_epochs: int = Field(10, ge=1, description="Passes over a rollout.")
        gae_lambda: float = Field(0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
        clip_range: Schedule = Field(
            0.2, description="Largest change of the probability ratio in an update; a number or a schedule."
        )
        ent_coef: AnySchedule = Field(0.0, description="Weight of the entropy bonus; a number or a schedule.")
        vf_coef: float = Field(0.5, ge=0, description="Weight of the value loss.")
        max_grad_norm: float = Field(0.5, gt=0, description="Norm at which gradients are clipped.")
        normalize_advantage: bool = Field(True, description="Normalize advantages in each minibatch.")
        target_kl: float | None = Field(
            None, gt=0, description="An update stops when the KL divergence exceeds 1.5 times this."
        )

    on_policy = masks = True
    memories = 2
    metrics = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance")
    kept = ("returns", "gradient_steps")
    acting: Any  # ActorCritic, or RecurrentActorCritic

    @cached_property
    def rules(self) -> PPOSettings:
        """How it updates."""
        s = self.settings
        assert isinstance(s, PPO.Settings)
        return PPOSettings(
            betas=(0.9, 0.999),
            adam_eps=1e-5,
            vf_coef=2.0 * s.vf_coef,  # here it weights half the squared error, in Stable-Baselines3 all of it
            normalise_returns=False,
            clip_value=False,
            **s.model_dump(exclude={"n_steps", "vf_coef", "recurrent", "hidden_size"}),
        )

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        size, action = (self.spec.action.size,), self.spec.action
        if action.mixed:
            numbers = (len(action.low),)
            return {"logits": size, "mean": numbers, "log_std": numbers, "value": ()}
        chosen = {"logits": size} if self.spec.action.chosen else {"mean": size, "log_std": size}
        return {**chosen, "value": ()}

    @property
    def chooses(self) -> tuple[str, Choose]:
        if self.spec.action.mixed:
            return "logits", "both"
        return ("logits", "best") if self.spec.action.chosen else ("mean", "clip")

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        return {"log_prob": ()}

    def network(self) -> ActorCritic | RecurrentActorCritic:
        s, encoder = self.settings, self.encoder(orthogonal=True)
        if isinstance(s, PPO.Settings) and s.recurrent is not None:
            return recurrent.RecurrentActorCritic(encoder, self._heads, s.recurrent, s.hidden_size)
        return self._heads(encoder)

    def _heads(self, features: Features | Given) -> ActorCritic:
        action = self.spec.action
        if action.mixed:
            numbers, masked = len(action.low), self.spec.masked
            return networks.MixedActorCritic(features, action.counts, numbers, self.rules.hidden, masked=masked)
        if action.chosen:
            masked = self.spec.masked
            return networks.ActorCritic(features, action.size, self.rules.hidden, action.counts, masked=masked)
        return networks.GaussianActorCritic(features, action.size, self.rules.hidden)

    def explore(self, outputs: Arrays, rng: np.random.Generator, progress: Progress) -> tuple[Array, Arrays]:
        spec = self.spec.action
        if spec.mixed:
            choices, chosen = draw_choices(outputs["logits"], spec.counts, rng)
            numbers, drawn = draw_normal(outputs["mean"], outputs["log_std"], rng)
            action, log_prob = np.concatenate((choices, numbers), 1).astype(np.float32), chosen + drawn
        elif spec.counts:
            action, log_prob = draw_choices(outputs["logits"], spec.counts, rng)
        elif spec.discrete:
            action, log_prob = draw_categorical(outputs["logits"], rng)
        else:
            action, log_prob = draw_normal(outputs["mean"], outputs["log_std"], rng)
        return action, {"log_prob": log_prob}

    def setup(self, seed: int, device: str) -> None:
        s = self.rules
        self.device = torch.device(device)
        self.acting = self.seeded(self.network, seed).to(self.device)
        self.generator = torch.Generator().manual_seed(seed)
        rate = at(s.learning_rate, 1.0)
        self._live = list(self.acting.parameters())
        self.optimiser = compiling.Adam(self._live, rate, betas=s.betas, eps=s.adam_eps)
        self.returns: tuple[float, float, int] = (0.0, 1.0, 0)
        self.gradient_steps = 0

    def steps_of(self, rows: int) -> int:
        return self.rules.n_epochs * -(-rows // self.rules.batch_size)

    def values(self, observation: Array, memory: Array | None = None) -> Floats:
        """Values float32 (n,) of rows (n, ...), and of the memory before them if it `remembers`."""
        found = self._in_parts(self.acting.value, (), observation, *(() if memory is None else (memory,)))
        return self.in_rewards(found)

    def remembered(self, observation: Array, memory: Array) -> Floats:
        """The memory float32 (n, numbers) after rows (n, ...), and that before them."""
        return self._in_parts(self.acting.remembered, (self.remembers,), observation, memory)

    def _in_parts(self, of: Callable[..., Tensor], shape: tuple[int, ...], *given: Array) -> Floats:
        """Compute a number or more of each row of arrays (n, ...)."""
        found = np.empty((len(given[0]), *shape), np.float32)
        for first in range(0, len(found), _ROWS_AT_ONCE):
            self.alive()
            with torch.inference_mode():
                rows = [torch.from_numpy(each[first : first + _ROWS_AT_ONCE]).to(self.device) for each in given]
                found[first : first + len(rows[0])] = of(*rows).cpu().numpy()
        return found

    def update(self, batch: Rollout, progress: Progress) -> Update:
        """Learn from a rollout of this policy; the metrics are mean losses and diagnostics."""
        rollout, settings = batch, self.rules
        self.anneal(settings.learning_rate, progress)
        now = {
            name: torch.tensor(at(each, progress.remaining), device=self.device)
            for name, each in (("clip_range", settings.clip_range), ("ent_coef", settings.ent_coef))
        }
        advantages = advantages_of(rollout, settings)
        if rollout.valid is not None and not rollout.valid.any():
            raise ValueError("no step of this rollout is valid: expected one to learn from")

        in_order = rollout.memory is not None

        def rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            valid = rollout.valid
            if in_order:  # environment by environment: what follows a step in its episode follows it here
                array, valid = array.swapaxes(0, 1), None if valid is None else valid.T
            return array.reshape(-1, *array.shape[2:]) if valid is None else array[valid]

        advantages, values = rows(advantages), rows(rollout.value)
        returns = advantages + values
        old = self._normalised(values)
        explained = 1.0 - float((returns - values).var() / (returns.var() + 1e-8))
        if settings.normalise_returns:
            self._observe(returns)
        columns = {
            "observation": rows(rollout.observation),
            "action": rows(rollout.action),
            "log_prob": rows(rollout.log_prob),
            "advantage": advantages,
            "target": self._normalised(returns),
            "value": old,
        }
        if rollout.mask is not None:
            columns["mask"] = rows(rollout.mask)
        if rollout.memory is not None:
            begins = np.ones_like(rollout.ended)
            begins[1:] = rollout.ended[:-1]
            columns |= {MEMORY: rows(rollout.memory), "starts": rows(begins)}
        given = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}
        count = len(given["action"])
        of_steps: list[dict[str, Tensor]] = []
        stopped = False
        for _ in range(settings.n_epochs):
            if in_order:  # only where it is cut into minibatches is drawn
                order = (torch.arange(count) + torch.randint(count, (1,), generator=self.generator)) % count
            else:
                order = torch.randperm(count, generator=self.generator)
            for first in range(0, count, settings.batch_size):
                self.alive()
                chosen = order[first : first + settings.batch_size]
                rows_now = {name: each.index_select(0, chosen).to(self.device) for name, each in given.items()}
                # Rollouts may end in batches of any size: those are not worth a graph each.
                run = self.run if len(chosen) == settings.batch_size and not in_order else _directly
                if in_order:
                    rows_now["starts"][0] = True
                if settings.target_kl is None:
                    found = run(self._learn, {**rows_now, **now})
                else:  # the divergence decides whether the step is made
                    found = run(self._gradients, {**rows_now, **now})
                    gradients = {name: found.pop(name) for name in list(found) if name.startswith(_GRADIENT)}
                    stopped = float(found["approx_kl"]) > 1.5 * settings.target_kl
                    if stopped:
                        break
                    run(self._descend, gradients)
                of_steps.append(found)
            if stopped:
                break
        self.gradient_steps += len(of_steps)
        names = of_steps[0] if of_steps else ()
        means = {name: float(torch.stack([each[name] for each in of_steps]).mean()) for name in names}
        return Update({**means, "explained_variance": explained})

    def _learn(self, batch: Batch) -> dict[str, Tensor]:
        """Make an optimiser step; returns metrics."""
        loss, metrics = self._loss(batch)
        descend(self.optimiser, self._live, loss, self.rules.max_grad_norm)
        return metrics

    def _gradients(self, batch: Batch) -> dict[str, Tensor]:
        """Return the same metrics, and the gradients of that step."""
        loss, metrics = self._loss(batch)
        gradients = clipped(torch.autograd.grad(loss, self._live), self.rules.max_grad_norm)
        return {**metrics, **{f"{_GRADIENT}{number}": each for number, each in enumerate(gradients)}}

    def _descend(self, gradients: Batch) -> dict[str, Tensor]:
        """Make the step of these gradients."""
        take(self.optimiser, self._live, list(gradients.values()))
        return {}

    def _loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        settings, clip_range = self.rules, batch["clip_range"]
        sequences = (batch[MEMORY], batch["starts"]) if MEMORY in batch else ()
        given = batch["observation"], batch["action"], batch.get("mask"), *sequences
        log_probs, entropies, values = self.acting.scores(*given)
        change = log_probs - batch["log_prob"]
        ratio = change.exp()
        advantages = batch["advantage"]
        if settings.normalize_advantage and len(advantages) > 1:  # a single one has no deviation
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        bounded = ratio.clamp(1 - clip_range, 1 + clip_range)
        policy_loss = -torch.min(ratio * advantages, bounded * advantages).mean()
        errors = (values - batch["target"]).square()
        if settings.clip_value:
            clipped_values = batch["value"] + (values - batch["value"]).clamp(-clip_range, clip_range)
            errors = torch.max(errors, (clipped_values - batch["target"]).square())
        value_loss = 0.5 * errors.mean()
        entropy = entropies.mean()
        loss = policy_loss + settings.vf_coef * value_loss - batch["ent_coef"] * entropy
        with torch.no_grad():
            metrics = {
                "policy_loss": policy_loss.detach(),
                "value_loss": value_loss.detach(),
                "entropy": entropy.detach(),
                # Schulman's estimator of the divergence: never negative, small variance.
                "approx_kl": (ratio - 1 - change).mean(),
                "clip_fraction": ((ratio - 1).abs() > clip_range).float().mean(),
            }
        return loss, metrics

    def _observe(self, returns: Floats) -> None:
        """Move mean and deviation of returns towards this rollout's. Returns change with the policy, so old ones are
        forgotten with a half-life of about seven rollouts."""
        mean, deviation, seen = self.returns
        weight = max(0.1, 1.0 / (seen + 1))
        variance = (1 - weight) * deviation**2 + weight * float(returns.var())
        variance += weight * (1 - weight) * (float(returns.mean()) - mean) ** 2
        if seen == 0:
            variance = float(returns.var())
        mean += weight * (float(returns.mean()) - mean)
        self.returns = mean, max(variance**0.5, 1e-3), seen + 1

    def in_rewards(self, values: Floats) -> Floats:
        """Return the network's values in units of rewards."""
        mean, deviation, _ = self.returns
        return (values * deviation + mean).astype(np.float32)

    def _normalised(self, values: Floats) -> Floats:
        mean, deviation, _ = self.returns
        return ((values - mean) / deviation).astype(np.float32)


class RefinedPPO(PPO):
    """PPO with each refinement a switch, by default as `PPOSettings` says."""

    class Settings(OnPolicySettings):
        """Those of rollouts, and the rules of an update."""

        rules: PPOSettings = PPOSettings()

    @cached_property
    def rules(self) -> PPOSettings:
        assert isinstance(self.settings, RefinedPPO.Settings)
        return self.settings.rules

    @classmethod
    def of(cls, rules: PPOSettings, inputs: int, actions: int, *, masked: bool = False) -> RefinedPPO:
        """Create one that sees so many numbers and chooses one of so many actions."""
        spec = AgentSpec((Leaf(ALONE, (inputs,), "float32"),), ActionSpec(True, actions), masked=masked)
        return cls(cls.Settings.model_validate({"rules": rules}), spec)
