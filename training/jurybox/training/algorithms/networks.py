"""Networks of the built-in algorithms for any environment's observations: numbers, pictures, or both.

Each takes rows as replays hold them, or the environment's own observation (see `Features`), and returns the outputs
that a policy server returns: values of actions, an action, or the parameters of a distribution of actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from jurybox.training.algorithms.torch_states import perceptron
from jurybox.training.spaces import CLIP, Leaf, places

__all__ = [
    "ActorCritic", "DeterministicActor", "Features", "GaussianActorCritic", "Given", "MixedActorCritic", "QValues",
    "QuantileValues", "SeeingCritic", "SquashedGaussianActor", "TwinCritic", "chosen_log_prob",
    "normal_log_prob", "side_by_side", "tanh_correction",
]  # fmt: skip

HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)
_ALONE, _AMONG = 512, 256  # features of a picture: of the only part of an observation, and of one among others
_LOG_STD = (-20.0, 2.0)  # bounds of the logarithm of a deviation (Haarnoja et al., 2018, in their own code)


class Features(nn.Module):
    """Observations to float32 (n, size): rows (n, ...), or the environment's own, one tensor for each input.

    A row is `numbers` numbers, float32 or uint8; or, where there are pictures, bytes: the float32 of the numbers, then
    the pictures' pixels. Bytes are divided by 255 here and nowhere else. Numbers are normalised where that is asked
    for, with statistics that lie in buffers: what is published and served has them in it. Pictures go through the
    convolutions of V. Mnih et al., "Human-level control through deep reinforcement learning" (Nature 518, 2015).

    Args:
        numbers: how many.
        pictures: (channels, height, width) of each, with sides of 36 or more.
        normalise: numbers to mean 0 and deviation 1.
        clip: bound of normalised numbers, in deviations.
        orthogonal: begin with orthogonal weights, as PPO does.
        inputs: the named inputs whose numbers these are, see `spaces.Leaf`; left out: numbers that are not scaled.
        raw: whether it takes the inputs instead of rows, in their order. A policy that is served or exported does.

    Attributes:
        size: features of an observation.
    """

    mean: Tensor
    scale: Tensor
    units: Tensor

    def __init__(
        self,
        numbers: int,
        pictures: Sequence[Sequence[int]] = (),
        *,
        normalise: bool = False,
        clip: float = CLIP,
        orthogonal: bool = False,
        inputs: Sequence[Leaf] = (),
        raw: bool = False,
    ) -> None:
        super().__init__()
        self.numbers, self.normalise, self._clip = numbers, normalise, clip
        self._inputs, self._raw = tuple(inputs), raw
        units = [leaf.scale for leaf in self._inputs for _ in range(leaf.size)]
        self._scaled = any(unit != 1 for unit in units)
        if self._scaled:
            self.register_buffer("units", torch.tensor(units), persistent=False)
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
            numbers = rows.float()
        else:
            numbers = rows[:, : 4 * self.numbers].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return numbers * self.units if self._scaled else numbers

    def forward(self, *seen: Tensor) -> Tensor:
        """Features, float32 (n, size), of rows or inputs."""
        numbers, pictures = self._of_inputs(seen) if self._raw else self._of_rows(*seen)
        if self.normalise:
            numbers = [(each - self.mean).mul_(self.scale).clamp_(-self._clip, self._clip) for each in numbers]
        seen_pictures = [layers(each.float() / 255.0) for each, layers in zip(pictures, self.pictures, strict=True)]
        found = [*numbers, *seen_pictures]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _of_rows(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The numbers of rows, if there are any, and their pictures."""
        pictures, first = [], 4 * self.numbers
        for shape in self._shapes:
            size = math.prod(shape)
            pictures.append(rows[:, first : first + size].reshape(-1, *shape))
            first += size
        return [self.raw_numbers(rows)] if self.numbers else [], pictures

    def _of_inputs(self, seen: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The same of the environment's own observations."""
        numbers, pictures = [], []
        for leaf, each in zip(self._inputs, seen, strict=True):
            if leaf.kind == "picture":
                pictures.append(each.permute(0, 3, 1, 2) if leaf.channels_last else each)
                continue
            flat = each.reshape(each.shape[0], -1)
            if leaf.kind == "numbers":
                numbers.append(flat.float())
                continue
            for place, (first, count) in enumerate(zip(leaf.start, leaf.counts, strict=True)):
                values = torch.arange(first, first + count, device=each.device)
                numbers.append((flat[:, place : place + 1] == values).float())
        if not numbers:
            return [], pictures
        whole = numbers[0] if len(numbers) == 1 else torch.cat(numbers, 1)
        return [whole * self.units if self._scaled else whole], pictures

    def use(self, mean: npt.NDArray[Any], scale: npt.NDArray[Any]) -> None:
        """Normalise with these statistics, (numbers,) each, from now on."""
        with torch.no_grad():
            self.mean.copy_(torch.from_numpy(mean))
            self.scale.copy_(torch.from_numpy(scale))


def parted(seen: Sequence[Tensor], masked: bool) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return the arguments of a network without the mask, which is the last one, and the mask."""
    return (seen[:-1], seen[-1]) if masked else (seen, None)


def allowed(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values (n, actions) with the lowest number where a mask, bool (n, actions), is False."""
    return values if mask is None else values.masked_fill(~mask, torch.finfo(values.dtype).min)


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


COSINES = 64  # n in the paper
QUANTILES = 8  # N and N' there
POLICY_QUANTILES = 32  # K there


class QValues(nn.Module):
    """Of DQN: rows to values (n, actions). If it is `masked`, the last argument is a mask, see `allowed`."""

    def __init__(
        self, features: Features | Given, actions: int, hidden: Sequence[int], *, masked: bool = False
    ) -> None:
        super().__init__()
        self.features, self.masked = features, masked
        self.layers = perceptron(features.size, hidden, actions)

    def forward(self, *seen: Tensor) -> Tensor:
        """Action values, (n, actions)."""
        parts, mask = parted(seen, self.masked)
        return allowed(self.layers(self.features(*parts)), mask)


class QuantileValues(nn.Module):
    """Of IQN (Dabney et al., 2018): rows to values (n, actions).

    They are means over fixed, evenly spread quantiles, without random numbers. The `quantiles` of returns are computed
    through an embedding of their levels by cosines (section 3.1 and eq. 4 there). If it is `masked`, the last argument
    is a mask, see `allowed`.
    """

    cosines: Tensor
    spread: Tensor

    def __init__(
        self, features: Features | Given, actions: int, hidden: Sequence[int], *, masked: bool = False
    ) -> None:
        super().__init__()
        self.features, self.masked = features, masked
        self.seen = perceptron(features.size, hidden[:-1], hidden[-1])
        self.embedding = nn.Linear(COSINES, hidden[-1])
        self.head = perceptron(hidden[-1], hidden[-1:], actions)
        self.register_buffer("cosines", math.pi * torch.arange(COSINES, dtype=torch.float32), persistent=False)
        spread = (torch.arange(POLICY_QUANTILES, dtype=torch.float32) + 0.5) / POLICY_QUANTILES
        self.register_buffer("spread", spread, persistent=False)

    def quantiles(self, seen: Tensor, taus: Tensor) -> Tensor:
        """Quantiles (n, taus, actions) of rows; `taus` are (n, taus), or (taus,) for all rows alike; 0 to 1."""
        return self._of_features(self.features(seen), taus)

    def forward(self, *seen: Tensor) -> Tensor:
        """Action values, (n, actions)."""
        parts, mask = parted(seen, self.masked)
        return allowed(self._of_features(self.features(*parts), self.spread).mean(1), mask)

    def _of_features(self, features: Tensor, taus: Tensor) -> Tensor:
        embedded = torch.relu(self.embedding(torch.cos(taus[..., None] * self.cosines)))
        values: Tensor = self.head(torch.relu(self.seen(features))[:, None, :] * embedded)
        return values


class DeterministicActor(nn.Module):
    """Of TD3: rows to actions (n, actions) in [-1, 1]."""

    def __init__(self, features: Features | Given, actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.features = features
        self.layers = perceptron(features.size, hidden, actions)

    def before_tanh(self, *seen: Tensor) -> Tensor:
        """Return the input of the last tanh, (n, actions)."""
        out: Tensor = self.layers(self.features(*seen))
        return out

    def forward(self, *seen: Tensor) -> Tensor:
        """Actions (n, actions) in [-1, 1]."""
        return torch.tanh(self.before_tanh(*seen))


class SquashedGaussianActor(nn.Module):
    """Of SAC: rows to mean and logarithm of the deviation, (n, actions) each, of what is drawn before the tanh."""

    def __init__(self, features: Features | Given, actions: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.features = features
        self.trunk = nn.Sequential(perceptron(features.size, hidden[:-1], hidden[-1]), nn.ReLU())
        self.mean = nn.Linear(hidden[-1], actions)
        self.log_std = nn.Linear(hidden[-1], actions)

    def forward(self, *seen: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the deviation, (n, actions) each."""
        found = self.trunk(self.features(*seen))
        return self.mean(found), self.log_std(found).clamp(*_LOG_STD)


class TwinLinear(nn.Module):
    """Two linear layers as one batched product: (2, n, in) -> (2, n, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(2, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return _affine(torch.baddbmm, x, self.weight, self.bias)

    def first(self, x: Tensor) -> Tensor:
        """The output of the first layer alone, (n, in) -> (n, out)."""
        return _affine(torch.addmm, x, self.weight[0], self.bias[0])


def _affine(product: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if weight.shape[-1] > 1:
        return product(bias, x, weight)
    return (x * weight.transpose(-1, -2)).sum(-1, keepdim=True) + bias  # with its gradients, half a product's time


class TwinCritic(nn.Module):
    """Two values of an observation and an action, (n, observation), (n, action) -> (2, n)."""

    def __init__(self, observation_size: int, action_size: int, hidden: Sequence[int] = (256, 256)) -> None:
        super().__init__()
        sizes = (observation_size + action_size, *hidden, 1)
        self.layers = nn.ModuleList(TwinLinear(a, b) for a, b in pairwise(sizes))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        x = torch.cat((observation, action), -1).expand(2, -1, -1)
        for layer in self.layers[:-1]:
            x = functional.relu_(layer(x))
        values: Tensor = self.layers[-1](x)
        return values.squeeze(-1)

    def first(self, observation: Tensor, action: Tensor) -> Tensor:
        """The first critic's values alone, (n,), which the actor maximises."""
        x = torch.cat((observation, action), -1)
        for layer in self.layers[:-1]:
            assert isinstance(layer, TwinLinear)
            x = functional.relu_(layer.first(x))
        last = self.layers[-1]
        assert isinstance(last, TwinLinear)
        return last.first(x).squeeze(-1)


class SeeingCritic(nn.Module):
    """Two values (2, n) of rows and actions; `features` belong to both."""

    def __init__(self, features: Features | Given, actions: int, hidden: Sequence[int]) -> None:
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


class Given(nn.Identity):
    """Features (n, size) as they are: the first layer behind another network, such as a memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


class ActorCritic(nn.Module):
    """Of PPO with discrete actions: rows to logits (n, actions) and value (n,).

    Args:
        features: the first layer of both networks.
        hidden: widths of the hidden layers of both.
        counts: actions of each of several choices, whose logits are side by side; empty: there is one.
        masked: whether the last argument is a mask of actions, see `allowed`.
    """

    def __init__(
        self,
        features: Features | Given,
        actions: int,
        hidden: Sequence[int],
        counts: tuple[int, ...] = (),
        *,
        masked: bool = False,
    ) -> None:
        super().__init__()
        self.counts, self.masked = counts, masked
        # Small last layers: the first policy is nearly uniform, the first values nearly 0 (Andrychowicz et al. 2021,
        # "What matters for on-policy deep actor-critic methods?").
        self.actor = perceptron(features.size, hidden, actions, activation=nn.Tanh, last_gain=0.01)
        self.critic = perceptron(features.size, hidden, 1, activation=nn.Tanh, last_gain=1.0)
        self.features = features

    def forward(self, *seen: Tensor) -> tuple[Tensor, ...]:
        """Logits (n, actions) and values (n,)."""
        parts, mask = parted(seen, self.masked)
        found = self.features(*parts)
        return self.decided(found, found, mask)

    def decided(self, actor: Tensor, critic: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """The outputs for features (n, size), the policy's and the value's, and the mask if there is one."""
        return allowed(self.actor(actor), mask), self.critic(critic).squeeze(-1)

    def value(self, observation: Tensor) -> Tensor:
        """Values (n,) alone."""
        found: Tensor = self.critic(self.features(observation)).squeeze(-1)
        return found

    def scores(self, observation: Tensor, actions: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of actions that were taken: logarithms of their probabilities, entropies of the policy, values; (n,) each."""
        return self.scored(self(observation, mask) if self.masked else self(observation), actions, mask)

    def scored(
        self, outputs: tuple[Tensor, ...], actions: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same, of the outputs for these observations."""
        logits, values = outputs
        return *chosen_log_prob(logits, actions, self.counts, mask), values


class GaussianActorCritic(ActorCritic):
    """Of PPO with actions that are numbers: rows to mean, logarithm of the deviation (n, actions) and value (n,).

    The deviation is the same for all observations.
    """

    def __init__(self, features: Features | Given, actions: int, hidden: Sequence[int]) -> None:
        super().__init__(features, actions, hidden)
        self.log_std = nn.Parameter(torch.zeros(actions))

    def decided(self, actor: Tensor, critic: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Mean and logarithm of the deviation, (n, actions) each, and value (n,)."""
        mean, value = super().decided(actor, critic, mask)
        # A sum, not a view of the parameter: a view would require a gradient even in inference mode.
        return mean, self.log_std + torch.zeros_like(mean), value

    def scored(
        self, outputs: tuple[Tensor, ...], actions: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of actions that were taken: logarithms of their densities, entropies, values; (n,) each."""
        mean, log_std, value = outputs
        return normal_log_prob(actions, mean, log_std).sum(-1), (log_std + (HALF_LOG_2_PI + 0.5)).sum(-1), value


class MixedActorCritic(ActorCritic):
    """Of PPO with choices and numbers at once: rows to logits, mean, logarithm of the deviation, and value.

    Args:
        features, hidden, masked: see `ActorCritic`.
        counts: actions of each choice.
        numbers: how many.
    """

    def __init__(
        self, features: Features | Given, counts: tuple[int, ...], numbers: int, hidden: Sequence[int], *, masked: bool
    ) -> None:
        super().__init__(features, sum(counts) + numbers, hidden, counts, masked=masked)
        self.log_std = nn.Parameter(torch.zeros(numbers))

    def decided(self, actor: Tensor, critic: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """Logits (n, sum of counts), mean and logarithm of the deviation (n, numbers), value (n,)."""
        both, value = super().decided(actor, critic, None)
        logits, mean = torch.split(both, [sum(self.counts), len(self.log_std)], 1)
        return allowed(logits, mask), mean, self.log_std + torch.zeros_like(mean), value

    def scored(
        self, outputs: tuple[Tensor, ...], actions: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of actions (n, choices + numbers): log-probability and log-density together, entropies, values; (n,) each."""
        logits, mean, log_std, value = outputs
        choices, numbers = actions[:, : len(self.counts)].long(), actions[:, len(self.counts) :]
        chosen, entropy = chosen_log_prob(logits, choices, self.counts, mask)
        drawn = normal_log_prob(numbers, mean, log_std).sum(-1)
        return chosen + drawn, entropy + (log_std + (HALF_LOG_2_PI + 0.5)).sum(-1), value


# ---- distributions of actions


def side_by_side(logits: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Logits (n, sum of counts) as (n, choices, most), the lowest number where a choice has fewer actions."""
    none = logits.new_full((logits.shape[0], 1), torch.finfo(logits.dtype).min)
    found: Tensor = torch.cat((logits, none), 1)[:, torch.from_numpy(places(counts)).to(logits.device)]
    return found


def chosen_log_prob(
    logits: Tensor, action: Tensor, counts: tuple[int, ...], mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of actions, and entropies, (n,) each; of several choices the sums.

    Args:
        logits: (n, actions).
        action: int64 (n,), or (n, choices).
        counts: actions of each of several choices; empty: there is one.
        mask: bool (n, actions), of the actions that may be chosen.
    """
    logits = allowed(logits, mask)
    if not counts:
        log_probs = torch.log_softmax(logits, dim=-1)
        entropy = -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum(-1)
        return log_probs.gather(1, action[:, None]).squeeze(1), entropy
    log_probs = torch.log_softmax(side_by_side(logits, counts), dim=-1)
    entropy = -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum((-2, -1))
    return log_probs.gather(2, action[..., None]).squeeze(2).sum(-1), entropy


def normal_log_prob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Logarithm of a normal distribution's density at `x`, element by element."""
    return -0.5 * ((x - mean) * torch.exp(-log_std)).square() - log_std - HALF_LOG_2_PI


def tanh_correction(u: Tensor) -> Tensor:
    """log(1 - tanh(u)^2), element by element, without a difference of nearly equal numbers."""
    return 2.0 * (math.log(2.0) - u - functional.softplus(-2.0 * u))


def features_of(*modules: nn.Module) -> list[Features]:
    """All `Features` in these modules."""
    return [part for module in modules for part in module.modules() if isinstance(part, Features)]
