"""DQN (Mnih et al., Nature 518, 2015) with double Q-learning (van Hasselt et al., 2016, arXiv:1509.06461)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from jurybox.training.algorithms.base import (
    Algorithm,
    AlgorithmUnusable,
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
)
from jurybox.training.algorithms.schedules import Schedule, ShareSchedule, at
from jurybox.training.spaces import MASK

if TYPE_CHECKING:
    from jurybox.training.algorithms.networks import QuantileValues, QValues

__all__ = ["DQN"]


class DQN(Algorithm):
    """Double DQN; names and defaults are Stable-Baselines3's."""

    class Settings(RecurrentReplaySettings):
        """Settings of DQN."""

        learning_rate: Schedule = Field(  # type: ignore[assignment]  # wider, since it anneals
            1e-4, description="Learning rate of Adam; a number or a schedule."
        )
        batch_size: int = Field(32, ge=2, description="Transitions in one optimiser step.")
        train_freq: int = Field(4, ge=1, description="Steps per environment between two rounds of learning.")
        tau: float = Field(1.0, gt=0, le=1, description="Coefficient of the soft update of target networks.")
        target_update_interval: int = Field(10_000, ge=1, description="Env steps between two target updates.")
        max_grad_norm: float = Field(10.0, gt=0, description="Norm at which gradients are clipped.")
        exploration_fraction: float = Field(
            0.1, gt=0, le=1, description="Fraction of all steps over which epsilon falls to its final value."
        )
        exploration_initial_eps: float = Field(1.0, ge=0, le=1, description="Probability of a random action at first.")
        exploration_final_eps: float = Field(0.05, ge=0, le=1, description="Probability of a random action at last.")
        exploration: ShareSchedule | None = Field(
            None,
            description="Probability of a random action over the whole run, a number or a schedule; none: as the three "
            "settings exploration_... say.",
        )

        def unused(self) -> Mapping[str, str]:
            unused = super().unused()
            if self.exploration is None:
                return unused
            names = ("exploration_fraction", "exploration_initial_eps", "exploration_final_eps")
            return {**unused, **dict.fromkeys(names, "exploration says how probable a random action is")}

    masks = True
    memories = 1
    metrics = ("loss", "epsilon")
    kept = ("updates",)
    settings: Settings

    def check(self) -> None:
        if self.spec.action.counts:
            raise AlgorithmUnusable("it chooses one of some actions, and these are several choices at once: take ppo")
        if not self.spec.action.discrete:
            raise AlgorithmUnusable("it chooses one of some actions, and these are numbers: take ppo, td3 or sac")

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        return {"values": (self.spec.action.size,)}

    @property
    def chooses(self) -> tuple[str, Choose]:
        return "values", "best"

    def network(self) -> QValues | QuantileValues:
        of, masked = (self.spec.action.size, self.settings.hidden), self.spec.masked
        if self.remembers:
            return recurrent.RecurrentQValues(self.torsos(), *of, masked=masked)
        return networks.QValues(self.encoder(), *of, masked=masked)

    def epsilon(self, progress: Progress) -> float:
        """The probability of a random action."""
        s = self.settings
        if s.exploration is not None:
            return at(s.exploration, progress.remaining)
        done = progress.env_steps / (s.exploration_fraction * progress.total)
        first, last = s.exploration_initial_eps, s.exploration_final_eps
        return float(last if done >= 1 else first + (last - first) * done)

    def exploration(self, progress: Progress) -> Mapping[str, float]:
        return {"epsilon": self.epsilon(progress)}

    def explore(self, outputs: Arrays, rng: np.random.Generator, progress: Progress) -> tuple[Array, Arrays]:
        best = outputs["values"].argmax(1)
        n = len(best)
        # All numbers are drawn every time, so that epsilon does not affect which numbers are drawn later.
        # The network gives forbidden actions the lowest number.
        mask = outputs["values"] > np.finfo(np.float32).min if self.spec.masked else None
        anything = self.spec.action.sample(rng, n, mask)
        explores = rng.random(n) < self.epsilon(progress)
        return np.where(explores, anything, best), {}

    def setup(self, seed: int, device: str) -> None:
        self.acting = self.seeded(self.network, seed).to(device)
        self.target = copy.deepcopy(self.acting).requires_grad_(False)
        self.generator = torch.Generator(device).manual_seed(seed)
        self._live = list(self.acting.parameters())
        self.optimiser = compiling.Adam(self._live, at(self.settings.learning_rate, 1.0))
        self.updates = 0

    def seen(self, batch: Batch, which: str = "") -> tuple[torch.Tensor, ...]:
        """What the network takes of a batch: observations, and masks if there are any; `which` is "" or "next_"."""
        if not self.spec.masked:
            return (batch[f"{which}observation"],)
        mask = batch[f"{which}{MASK}"].bool()
        return batch[f"{which}observation"], mask | ~mask.any(1, keepdim=True)  # after an end nothing may be allowed

    def draws(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Random numbers that the loss of a batch takes, by name."""
        return {}

    def loss(self, batch: Batch) -> torch.Tensor:
        """The Huber loss of a batch, as a tensor with gradients; `batch` as in `update`, with the `draws`."""
        values = self.acting(*self.seen(batch)).gather(1, batch["action"].long()[:, None])[:, 0]
        with torch.no_grad():
            seen = self.seen(batch, "next_")
            best = self.acting(*seen).argmax(1, keepdim=True)
            following = self.target(*seen).gather(1, best)[:, 0]
            target = batch["reward"] + batch["discount"] * following
        return torch.nn.functional.smooth_l1_loss(values, target)

    def update(self, batch: Batch, progress: Progress) -> Update:
        """Make one; the target moves before the first update of a round, once for each interval's end in its steps."""
        s, envs = self.settings, self.envs
        self.anneal(s.learning_rate, progress)
        collect, updates = s.round(envs)
        interval = max(s.target_update_interval // envs, 1) * envs  # all environments step together
        first, reached = self.updates % updates == 0, progress.env_steps
        if first and (ends := reached // interval - (reached - collect) // interval):
            self.move_target(1.0 - (1.0 - s.tau) ** ends)  # the network is the same at all of them
        found = self.run(self._learn, {**batch, **self.draws(batch)})
        self.updates += 1
        return Update(found)

    def _learn(self, batch: Batch) -> dict[str, torch.Tensor]:
        loss = self.loss(batch)
        descend(self.optimiser, self._live, loss, self.settings.max_grad_norm)
        return {"loss": loss.detach()}

    def move_target(self, tau: float) -> None:
        """Move the target network towards the network by the share `tau`; 1 copies it."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.acting.parameters()), tau)

    def load_published(self, weights: Mapping[str, torch.Tensor], updates: int) -> None:
        self.acting.load_state_dict(weights)
        self.target.load_state_dict(weights)
        self.updates = updates
