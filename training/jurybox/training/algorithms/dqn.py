"""DQN (Mnih et al., Nature 518, 2015) with double Q-learning (van Hasselt et al., 2016, arXiv:1509.06461)."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from jurybox.training.algorithms.base import (
    AlgorithmUnusable,
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

if TYPE_CHECKING:
    from jurybox.training.algorithms.networks import QuantileValues, QValues
    from jurybox.training.algorithms.torch_states import Part

__all__ = ["DQN", "DQNLearner", "ValueSettings"]


@dataclass(frozen=True, slots=True)
class ValueSettings:
    """Settings that DQN and IQN share.

    Attributes:
        learning_rate: of Adam (epsilon 0.01 / batch_size is the paper's for DQN; Adam's own is used here).
        gamma: the discount of one step.
        n_steps: steps of a return before it is bootstrapped.
        target_update_interval: learner steps between two copies of the network to the target network; 0: the owner
            of the learner calls `move_target`.
        hidden: units of the hidden layers.
        max_grad_norm: gradients are scaled down to it.
    """

    learning_rate: float = 0.00025
    gamma: float = 0.95
    n_steps: int = 3
    target_update_interval: int = 200
    hidden: tuple[int, ...] = (128, 128)
    max_grad_norm: float = 10.0


class ValueLearner(ABC):
    """A network, its target network and their optimiser.

    Args:
        network: the network; the target network is a copy of it.
        device: where both are.
        seed: of the loss's random numbers.

    Attributes:
        network: the one that learns.
        steps: updates made.
    """

    def __init__(
        self, network: torch.nn.Module, settings: ValueSettings, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self.settings = settings
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.network = network.to(self.device)
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.optimiser = torch.optim.Adam(self.network.parameters(), lr=settings.learning_rate)
        self.parts: dict[str, Part] = {
            "network": self.network, "target": self.target, "optimiser": self.optimiser, "random": self.generator,
        }  # fmt: skip
        self.steps = 0

    def update(self, batch: Mapping[str, npt.NDArray[Any]]) -> float:
        """Make one optimiser step; return its loss.

        Args:
            batch: "observation" and "next_observation" (n, ...), "action" (n,), "reward" (n,) of n-step returns, and
                "discount" (n,): the factor of the next observation's value, 0 after a termination.
        """
        return float(self.learn({name: torch.from_numpy(array).to(self.device) for name, array in batch.items()}))

    def learn(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`update` with tensors on the device; the loss stays there until it is read."""
        loss = self.loss(batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.max_grad_norm)
        self.optimiser.step()
        self.steps += 1
        interval = self.settings.target_update_interval
        if interval and self.steps % interval == 0:
            self.target.load_state_dict(self.network.state_dict())
        return loss.detach()

    def move_target(self, tau: float = 1.0) -> None:
        """Move the target network towards the network by the share `tau`; 1 copies it."""
        with torch.no_grad():
            torch._foreach_lerp_(list(self.target.parameters()), list(self.network.parameters()), tau)

    @abstractmethod
    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch, as a tensor with gradients."""

    def load_published(self, state: Mapping[str, Any]) -> None:
        """Load published weights into both networks."""
        tensors = torch_states.as_tensors(state)
        self.network.load_state_dict(tensors)
        self.target.load_state_dict(tensors)

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs: arrays, numbers, nested."""
        return {**torch_states.states_of(self.parts), "steps": self.steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        torch_states.restore_states(self.parts, state)
        self.steps = int(state["steps"])


class DQNLearner(ValueLearner):
    """Double DQN with the Huber loss."""

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The Huber loss of a batch, as a tensor with gradients; `batch` as in `update`."""
        values = self.network(batch["observation"]).gather(1, batch["action"].long()[:, None])[:, 0]
        with torch.no_grad():
            best = self.network(batch["next_observation"]).argmax(1, keepdim=True)
            following = self.target(batch["next_observation"]).gather(1, best)[:, 0]
            target = batch["reward"] + batch["discount"] * following
        return torch.nn.functional.smooth_l1_loss(values, target)


class DQN(LearnerAlgorithm):
    """Double DQN; names and defaults are Stable-Baselines3's."""

    class Settings(OffPolicySettings):
        """Settings of DQN."""

        learning_rate: float = Field(1e-4, gt=0, description="Learning rate of Adam.")
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

    metrics = ("loss", "epsilon")
    learners: ClassVar[type[ValueLearner]] = DQNLearner
    settings: Settings
    learner: ValueLearner

    def check(self) -> None:
        if not self.spec.action.discrete:
            raise AlgorithmUnusable("it chooses one of some actions, and these are numbers: take ppo, td3 or sac")

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        return {"values": (self.spec.action.size,)}

    @property
    def chooses(self) -> tuple[str, Choose]:
        return "values", "best"

    def network(self) -> QValues | QuantileValues:
        return networks.QValues(self.encoder(), self.spec.action.size, self.settings.hidden)

    def epsilon(self, progress: Progress) -> float:
        """The probability of a random action."""
        s = self.settings
        done = progress.env_steps / (s.exploration_fraction * progress.total)
        first, last = s.exploration_initial_eps, s.exploration_final_eps
        return float(last if done >= 1 else first + (last - first) * done)

    def exploration(self, progress: Progress) -> Mapping[str, float]:
        return {"epsilon": self.epsilon(progress)}

    def explore(self, outputs: Arrays, rng: np.random.Generator, progress: Progress) -> tuple[Array, Arrays]:
        best = outputs["values"].argmax(1)
        n, actions = outputs["values"].shape
        # All numbers are drawn every time, so that epsilon does not affect which numbers are drawn later.
        anything, explores = rng.integers(actions, size=n), rng.random(n) < self.epsilon(progress)
        return np.where(explores, anything, best), {}

    def setup(self, seed: int, device: str) -> None:
        s = self.settings
        self.acting = made = self.seeded(self.network, seed)
        values = ValueSettings(
            learning_rate=s.learning_rate, gamma=s.gamma, n_steps=s.n_steps, max_grad_norm=s.max_grad_norm,
            target_update_interval=0,
        )  # fmt: skip
        self.learner = self.learners(made, values, device, seed)

    def update(self, batch: Batch, progress: Progress) -> Update:
        """Make one; the target moves before the first update of a round, once for each interval's end in its steps."""
        s, envs = self.settings, self.envs
        collect, updates = s.round(envs)
        interval = max(s.target_update_interval // envs, 1) * envs  # all environments step together
        first, reached = self.learner.steps % updates == 0, progress.env_steps
        if first and (ends := reached // interval - (reached - collect) // interval):
            self.learner.move_target(1.0 - (1.0 - s.tau) ** ends)  # the network is the same at all of them
        return Update({"loss": self.learner.learn(batch)})

    def load_published(self, weights: Mapping[str, torch.Tensor], updates: int) -> None:
        self.learner.load_published(weights)
        self.learner.steps = updates
