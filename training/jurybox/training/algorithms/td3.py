"""TD3, twin delayed deep deterministic policy gradients, with n-step targets and importance weights.

S. Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", ICML 2018, arXiv:1802.09477.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from jurybox.training.algorithms.td3_actor import CLIP, NumpyActor, TD3Settings
from jurybox.training.algorithms.td3_gradients import ClosedForm
from jurybox.training.algorithms.torch_states import Part, descend, perceptron, restore_states, states_of

__all__ = ["TD3", "TD3Settings", "Update"]


class Normaliser:
    """Running mean and variance by element (Chan et al., 1979, for whole batches), in float64.

    Call `see` with raw observations; a learner copies `shift_and_scale` into its policy, and they are published with
    that policy's weights.

    Gymnasium's RunningMeanStd (1.4.0) gives the same numbers with epsilon=0 and takes three times as long for eight
    observations of 18 elements (124 instead of 39 microseconds); no observations at all make its numbers NaN.

    Args:
        size: elements of an observation.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 0
        self.mean = np.zeros(size)
        self._squares = np.zeros(size)  # sum of squared differences from the mean

    def see(self, observations: npt.ArrayLike) -> None:
        """Update the statistics with observations (n, size)."""
        rows = np.asarray(observations, np.float64)
        if rows.ndim != 2 or rows.shape[1] != self.size:
            raise ValueError(f"expected observations of shape (n, {self.size}), got {rows.shape}")
        n = len(rows)
        if n == 0:
            return
        mean = rows.mean(0)
        difference = mean - self.mean
        total = self.count + n
        self._squares += ((rows - mean) ** 2).sum(0) + difference**2 * (self.count * n / total)
        self.mean = self.mean + difference * (n / total)
        self.count = total

    @property
    def std(self) -> npt.NDArray[np.float64]:
        """Standard deviation by element; 1 for constants."""
        std = np.sqrt(self._squares / max(self.count, 1))
        return np.where(std < 1e-6, 1.0, std)

    def shift_and_scale(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """(mean, 1 / std), both float32 (size,)."""
        return self.mean.astype(np.float32), (1.0 / self.std).astype(np.float32)

    def adopt(self, count: int, shift: npt.ArrayLike, scale: npt.ArrayLike) -> None:
        """Continue from what `shift_and_scale` gave after `count` observations; constants count as std 1."""
        self.count, self.mean = count, np.array(shift, np.float64)
        self._squares = count / np.asarray(scale, np.float64) ** 2

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean.tolist(), "squares": self._squares.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["mean"]) != self.size:
            raise ValueError(f"these statistics are of {len(state['mean'])} elements, expected {self.size}")
        self.count = int(state["count"])
        self.mean = np.array(state["mean"])
        self._squares = np.array(state["squares"])


class Actor(nn.Module):
    """Normalised observation (n, observation) to action (n, action) in [-1, 1]; float32."""

    def __init__(self, observation_size: int, action_size: int, hidden: Sequence[int] = (256, 256)) -> None:
        super().__init__()
        self.layers = perceptron(observation_size, hidden, action_size)
        # Small initial actions: saturated tanh units would learn slowly.
        with torch.no_grad():
            last = self.layers[-1]
            assert isinstance(last, nn.Linear)
            last.weight.mul_(0.1)
            last.bias.zero_()

    def forward(self, observation: Tensor) -> Tensor:
        return torch.tanh(self.before_tanh(observation))

    def before_tanh(self, observation: Tensor) -> Tensor:
        out: Tensor = self.layers(observation)
        return out


class Policy(nn.Module):
    """Raw observation (n, observation) to action (n, action): an actor and the statistics that it was trained with.

    The statistics are buffers, so they are published, served and pinned with the weights that they belong to, and
    change in the same moment.

    Args:
        actor: shared, not copied.
        clip: bound of normalised observations.
    """

    observation_mean: Tensor
    observation_scale: Tensor

    def __init__(self, actor: Actor, observation_size: int, *, clip: float) -> None:
        super().__init__()
        self.actor = actor
        self.clip = clip
        self.register_buffer("observation_mean", torch.zeros(observation_size))
        self.register_buffer("observation_scale", torch.ones(observation_size))

    def normalised(self, observation: Tensor) -> Tensor:
        x = torch.sub(observation, self.observation_mean)
        return x.mul_(self.observation_scale).clamp_(-self.clip, self.clip)

    def forward(self, observation: Tensor) -> Tensor:
        out: Tensor = self.actor(self.normalised(observation))
        return out


class TwinLinear(nn.Module):
    """Two linear layers as one batched product: (2, n, in) -> (2, n, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)

    def first(self, x: Tensor) -> Tensor:
        """The output of the first layer alone, (n, in) -> (n, out)."""
        return torch.addmm(self.bias[0], x, self.weight[0])


class TwinCritic(nn.Module):
    """Two values of an observation and an action, (n, observation), (n, action) -> (2, n)."""

    def __init__(self, observation_size: int, action_size: int, hidden: Sequence[int] = (256, 256)) -> None:
        super().__init__()
        sizes = (observation_size + action_size, *hidden, 1)
        self.layers = nn.ModuleList(TwinLinear(a, b) for a, b in pairwise(sizes))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        x = torch.cat((observation, action), -1).expand(2, -1, -1)
        for layer in self.layers[:-1]:
            x = functional.relu(layer(x))
        values: Tensor = self.layers[-1](x)
        return values.squeeze(-1)

    def first(self, observation: Tensor, action: Tensor) -> Tensor:
        """The first critic's values alone, (n,), which the actor maximises."""
        x = torch.cat((observation, action), -1)
        for layer in self.layers[:-1]:
            assert isinstance(layer, TwinLinear)
            x = functional.relu(layer.first(x))
        last = self.layers[-1]
        assert isinstance(last, TwinLinear)
        return last.first(x).squeeze(-1)


def _layers(network: Actor | TwinCritic) -> list[tuple[Tensor, Tensor]]:
    return [(layer.weight, layer.bias) for layer in network.layers if isinstance(layer, nn.Linear | TwinLinear)]


class Update(NamedTuple):
    """The result of a learner step; tensors stay on the device until they are read.

    Attributes:
        metrics: scalar tensors: critic_loss, value (mean of both critics), target; actor_loss in steps that moved it.
        errors: (n,) mean absolute TD errors of both critics, for priorities.
    """

    metrics: dict[str, Tensor]
    errors: Tensor


class TD3:
    """The learner, which takes batches.

    Args:
        observation_size: numbers of an observation's row.
        action_size: numbers of an action.
        settings: see `TD3Settings`.
        device: where everything is computed.
        seed: of the first weights and the smoothing noise.
        networks: an actor and a critic to be used instead of new ones of these sizes. They get observations
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
        networks: tuple[Any, Any] | None = None,
    ) -> None:
        self.settings = settings or TD3Settings()
        self.device = torch.device(device)
        self.updates = 0
        self.normaliser = Normaliser(observation_size)
        s = self.settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            actor, critic = networks or (
                Actor(observation_size, action_size, s.hidden_actor),
                TwinCritic(observation_size, action_size, s.hidden_critic),
            )
        self.actor: Actor = actor.to(self.device)
        self.critic: TwinCritic = critic.to(self.device)
        policy: Any = self.actor if networks else Policy(self.actor, observation_size, clip=CLIP)
        self.policy: Policy = policy.to(self.device)
        self._normalised: Callable[[Tensor], Tensor] = (lambda x: x) if networks else self.policy.normalised
        self.target_actor = deepcopy(self.actor).requires_grad_(False)
        self.target_critic = deepcopy(self.critic).requires_grad_(False)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        # Fused: one call for all parameters instead of a dozen each.
        self._actor_optimizer = torch.optim.Adam(self.actor.parameters(), s.actor_learning_rate, fused=True)
        self._critic_optimizer = torch.optim.Adam(self.critic.parameters(), s.critic_learning_rate, fused=True)
        self._parts: dict[str, Part] = {
            "actor": self.actor, "critic": self.critic, "target_actor": self.target_actor,
            "target_critic": self.target_critic, "actor_optimizer": self._actor_optimizer,
            "critic_optimizer": self._critic_optimizer, "generator": self._generator,
        }  # fmt: skip
        self._actor_parameters = list(self.actor.parameters())
        self._critic_parameters = list(self.critic.parameters())
        learned = (self.actor, self.critic, self.target_actor, self.target_critic)
        self._closed_form = None if networks else ClosedForm(*map(_layers, learned))
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
        descend(self._critic_optimizer, self._critic_parameters, loss)
        metrics = {"critic_loss": loss.detach(), "value": values.detach().mean(), "target": target.mean()}
        self.updates += 1
        if self.updates % s.policy_delay == 0:
            raw = self.actor.before_tanh(observation)
            actor_loss = -self.critic.first(observation, torch.tanh(raw)).mean()
            if s.pre_tanh_penalty:
                actor_loss = actor_loss + s.pre_tanh_penalty * (raw.abs() - 1.0).relu_().square().mean()
            descend(self._actor_optimizer, self._actor_parameters, actor_loss)
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
        return {**states_of(self._parts), "normaliser": self.normaliser.state_dict(), "updates": self.updates}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, exactly (on the same kind of device); its arrays may be NumPy's."""
        restore_states(self._parts, state)
        self.normaliser.load_state_dict(state["normaliser"])
        self.updates = int(state["updates"])
        if isinstance(self.policy, Policy):
            self.refresh_normaliser()
