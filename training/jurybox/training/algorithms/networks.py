"""Networks of the built-in algorithms for any environment's observations: numbers, pictures, or both in one row.

Each takes rows as replays and env workers hold them (see `Features`) and returns the outputs that a policy server
returns: values of actions, an action, or the parameters of a distribution of actions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from jurybox.training.algorithms.dqn import ValueNetwork
from jurybox.training.algorithms.ppo import ActorCritic
from jurybox.training.algorithms.td3 import TwinCritic
from jurybox.training.algorithms.torch_states import perceptron

__all__ = [
    "DeterministicActor",
    "Features",
    "GaussianActorCritic",
    "QValues",
    "SeeingActorCritic",
    "SeeingCritic",
    "SquashedGaussianActor",
]

CLIP = 10.0  # deviations; bound of normalised numbers
_ALONE, _AMONG = 512, 256  # features of a picture: of the only part of an observation, and of one among others
_LOG_STD = (-20.0, 2.0)  # bounds of the logarithm of a deviation (Haarnoja et al., 2018, in their own code)


class Features(nn.Module):
    """Rows of observations (n, ...) to float32 (n, size).

    A row is `numbers` numbers, float32 or uint8; or, where there are pictures, bytes: the float32 of the numbers, then
    the pictures' pixels. Numbers are normalised where that is asked for, with statistics that lie in buffers: what is
    published and served has them in it. Pictures go through the convolutions of V. Mnih et al., "Human-level control
    through deep reinforcement learning" (Nature 518, 2015).

    Args:
        numbers: how many.
        pictures: (channels, height, width) of each, with sides of 36 or more.
        normalise: numbers to mean 0 and deviation 1, within `CLIP`.
        orthogonal: begin with orthogonal weights, as PPO does.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        numbers: int,
        pictures: Sequence[Sequence[int]] = (),
        *,
        normalise: bool = False,
        orthogonal: bool = False,
    ) -> None:
        super().__init__()
        self.numbers, self.normalise = numbers, normalise
        self._shapes = [tuple(shape) for shape in pictures]
        width = _ALONE if len(self._shapes) == 1 and not numbers else _AMONG
        self.pictures = nn.ModuleList(_convolutions(shape, width, orthogonal) for shape in self._shapes)
        self.size = numbers + width * len(self._shapes)
        if normalise:
            self.register_buffer("mean", torch.zeros(numbers))
            self.register_buffer("scale", torch.ones(numbers))

    def raw_numbers(self, rows: Tensor) -> Tensor:
        """Return the numbers of rows, (n, numbers) float32, not normalised."""
        if not self._shapes:
            return rows.float()
        return rows[:, : 4 * self.numbers].clone(memory_format=torch.contiguous_format).view(torch.float32)

    def forward(self, rows: Tensor) -> Tensor:
        """Features, float32 (n, size), of rows."""
        found: list[Tensor] = []
        if self.numbers:
            numbers = self.raw_numbers(rows)
            if self.normalise:
                numbers = ((numbers - self.mean) * self.scale).clamp(-CLIP, CLIP)
            found.append(numbers)
        first = 4 * self.numbers
        for shape, layers in zip(self._shapes, self.pictures, strict=True):
            size = math.prod(shape)
            pixels = rows[:, first : first + size].reshape(-1, *shape)
            found.append(layers(pixels.float() / 255.0))
            first += size
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def use(self, mean: npt.NDArray[Any], scale: npt.NDArray[Any]) -> None:
        """Normalise with these statistics, (numbers,) each, from now on."""
        with torch.no_grad():
            self.mean.copy_(torch.from_numpy(mean))
            self.scale.copy_(torch.from_numpy(scale))


def _convolutions(shape: Sequence[int], width: int, orthogonal: bool) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1),
        nn.ReLU(),
        nn.Flatten(),
    ]
    with torch.no_grad():
        flat = nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1]
    layers += [nn.Linear(flat, width), nn.ReLU()]
    if orthogonal:
        for layer in layers:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(layer.weight, 2**0.5)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class QValues(ValueNetwork):
    """Of DQN: rows to values (n, actions)."""

    def __init__(self, features: Features, actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.features = features
        self.layers = perceptron(features.size, hidden, actions)

    def forward(self, rows: Tensor) -> Tensor:
        """Action values, (n, actions)."""
        values: Tensor = self.layers(self.features(rows))
        return values


class DeterministicActor(nn.Module):
    """Of TD3: rows to actions (n, actions) in [-1, 1]."""

    def __init__(self, features: Features, actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.features = features
        self.layers = perceptron(features.size, hidden, actions)

    def before_tanh(self, rows: Tensor) -> Tensor:
        """Return the input of the last tanh, (n, actions)."""
        out: Tensor = self.layers(self.features(rows))
        return out

    def forward(self, rows: Tensor) -> Tensor:
        """Actions (n, actions) in [-1, 1]."""
        return torch.tanh(self.before_tanh(rows))


class SquashedGaussianActor(nn.Module):
    """Of SAC: rows to mean and logarithm of the deviation, (n, actions) each, of what is drawn before the tanh."""

    def __init__(self, features: Features, actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.features = features
        self.trunk = nn.Sequential(perceptron(features.size, hidden[:-1], hidden[-1]), nn.ReLU())
        self.mean = nn.Linear(hidden[-1], actions)
        self.log_std = nn.Linear(hidden[-1], actions)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the deviation, (n, actions) each."""
        found = self.trunk(self.features(rows))
        return self.mean(found), self.log_std(found).clamp(*_LOG_STD)


class SquashedMean(SquashedGaussianActor):
    """Of SAC without exploration: rows to actions (n, actions) in [-1, 1]."""

    def forward(self, rows: Tensor) -> Tensor:  # type: ignore[override]
        return torch.tanh(super().forward(rows)[0])


class SeeingCritic(nn.Module):
    """Two values (2, n) of rows and actions; `features` belong to both."""

    def __init__(self, features: Features, actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.features = features
        self.twins = TwinCritic(features.size, actions, hidden)

    def forward(self, rows: Tensor, action: Tensor) -> Tensor:
        """Values (2, n) of rows and actions (n, actions)."""
        values: Tensor = self.twins(self.features(rows), action)
        return values

    def first(self, rows: Tensor, action: Tensor) -> Tensor:
        """The first one's values alone, (n,)."""
        return self.twins.first(self.features(rows), action)


class SeeingActorCritic(ActorCritic):
    """Of PPO with discrete actions: rows to logits (n, actions) and value (n,)."""

    def __init__(self, features: Features, actions: int, hidden: Sequence[int]) -> None:
        super().__init__(features.size, actions, hidden)
        self.features = features

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (n, actions) and values (n,)."""
        found = self.features(observation)
        return self.actor(found), self.critic(found).squeeze(-1)

    def value(self, observation: Tensor) -> Tensor:
        """Values (n,) alone."""
        found: Tensor = self.critic(self.features(observation)).squeeze(-1)
        return found


class GaussianActorCritic(SeeingActorCritic):
    """Of PPO with actions that are numbers: rows to mean, logarithm of the deviation (n, actions) and value (n,).

    The deviation is the same for all observations.
    """

    def __init__(self, features: Features, actions: int, hidden: Sequence[int]) -> None:
        super().__init__(features, actions, hidden)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Mean and logarithm of the deviation, (n, actions) each, and value (n,)."""
        mean, value = super().forward(observation)
        # A sum, not a view of the parameter: a view would require a gradient even in inference mode.
        return mean, self.log_std + torch.zeros_like(mean), value

    def scores(self, observation: Tensor, actions: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of actions that were taken: logarithms of their densities, entropies, values; (n,) each."""
        mean, log_std, value = self(observation)
        return normal_log_prob(actions, mean, log_std).sum(-1), (log_std + _HALF_LOG_2_PI_E).sum(-1), value


class GaussianMean(GaussianActorCritic):
    """Of PPO without exploration: rows to actions (n, actions), -1 at the lower of their `bounds` and 1 at the upper.

    Attributes:
        bounds: (2, actions); set by the server, and not part of the weights.
    """

    bounds: Tensor

    def __init__(self, features: Features, actions: int, hidden: Sequence[int]) -> None:
        super().__init__(features, actions, hidden)
        self.register_buffer("bounds", torch.tensor([[-1.0], [1.0]]).repeat(1, actions), persistent=False)

    def forward(self, observation: Tensor) -> Tensor:  # type: ignore[override]
        low, high = self.bounds[0], self.bounds[1]
        mean: Tensor = self.actor(self.features(observation))
        return 2.0 * (mean - low) / (high - low) - 1.0


_HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)
_HALF_LOG_2_PI_E = _HALF_LOG_2_PI + 0.5


def normal_log_prob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Logarithm of a normal distribution's density at `x`, element by element."""
    return -0.5 * ((x - mean) * torch.exp(-log_std)).square() - log_std - _HALF_LOG_2_PI


def tanh_correction(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), element by element, without a difference of nearly equal numbers."""
    return 2.0 * (math.log(2.0) - u - functional.softplus(-2.0 * u))


# What each network gives, by name, in its order; the last two by whether actions are discrete.
OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "dqn": ("values",),
    "td3": ("action",),
    "sac": ("mean", "log_std"),
    "ppo": ("logits", "value"),
    "ppo of numbers": ("mean", "log_std", "value"),
}


def outputs_of(algorithm: str, discrete: bool) -> tuple[str, ...]:
    """Return the names of the outputs of an algorithm's acting network."""
    return OUTPUTS["ppo of numbers" if algorithm == "ppo" and not discrete else algorithm]


def acting_network(
    algorithm: str,
    numbers: int,
    pictures: Sequence[Sequence[int]],
    normalise: bool,
    discrete: bool,
    actions: int,
    hidden: Sequence[int],
    seed: int = 0,
    explores: bool = True,
) -> nn.Module:
    """The network that acts, the same one for the same seed; its `state_dict` is what learners publish.

    Without `explores`, networks that return a continuous distribution return its median, with the same weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        features = Features(numbers, pictures, normalise=normalise, orthogonal=algorithm == "ppo")
        if algorithm == "ppo":
            gaussian = GaussianActorCritic if explores else GaussianMean
            return (SeeingActorCritic if discrete else gaussian)(features, actions, hidden)
        drawn = SquashedGaussianActor if explores else SquashedMean
        made = {"dqn": QValues, "td3": DeterministicActor, "sac": drawn}[algorithm]
        network: nn.Module = made(features, actions, hidden)
        return network


def features_of(*modules: nn.Module) -> list[Features]:
    """All `Features` in these modules."""
    return [part for module in modules for part in module.modules() if isinstance(part, Features)]
