"""TD3 as hockey's learner computes it: the same numbers, with gradients in closed form instead of autograd's.

With networks of this size a learner step is some sixty small operations, and much of its time goes into building the
graph, walking it and allocating what it holds; here every product goes into memory that the last step used as well. A
step of 128 rows takes 1.4 times as long with autograd (docs/hockey.md). `tests/unit/studies/hockey/test_hockey_td3.py`
holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from jurybox.studies.hockey.game import MIRROR_ACTION, MIRROR_OBSERVATION
from jurybox.training.algorithms.base import Batch, Progress, Update, weighed
from jurybox.training.algorithms.networks import TwinLinear
from jurybox.training.algorithms.td3 import TD3

_relu_backward = torch.ops.aten.threshold_backward.grad_input


class Perceptron:
    """The layers of a perceptron with ReLU in between, or of several of the same shape side by side.

    What `forward` and `backward` return is overwritten by the next call of the same.

    Args:
        weights: of each layer, (in, out), or (k, in, out) for k perceptrons; views of the parameters.
        biases: likewise, (out,) or (k, 1, out).
        gradients: outputs of `backward` for weights and biases, in these shapes; None: not needed.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor],
        gradients: tuple[Sequence[Tensor], Sequence[Tensor]] | None = None,
    ) -> None:
        self._weights, self._biases = list(weights), list(biases)
        self._transposed = [weight.transpose(-1, -2) for weight in weights]
        self._gradients = gradients
        self._many = weights[0].dim() == 3
        self._affine = torch.baddbmm if self._many else torch.addmm
        self._product = torch.bmm if self._many else torch.mm
        self._rows = -1
        self._out: list[Tensor] = []
        self._back: list[Tensor] = []
        self._seen: list[Tensor] = []

    def forward(self, rows: Tensor) -> Tensor:
        """(n, in), or (k, n, in), to (n, out) or (k, n, out)."""
        if rows.shape[-2] != self._rows:
            self._make(rows)
        x, self._seen = rows, []
        last = len(self._weights) - 1
        for number, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            self._seen.append(x)
            x = self._affine(bias, x, weight, out=self._out[number])
            if number < last:
                x.relu_()
        return x

    def backward(self, gradient: Tensor, inputs: slice | None = None) -> Tensor | None:
        """From the gradient of the last `forward`'s result to those of the parameters, and of these of its inputs.

        Args:
            gradient: of the result, in its shape.
            inputs: which columns of the input are asked for; None: none, and None is returned.
        """
        for number in reversed(range(len(self._weights))):
            x = self._seen[number]
            if self._gradients is not None:
                weights, biases = self._gradients
                self._product(x.transpose(-1, -2), gradient, out=weights[number])
                torch.sum(gradient, -2, keepdim=self._many, out=biases[number])
            if number == 0:
                break
            before = self._back[number]
            if gradient.shape[-1] == 1:  # an outer product: an element-wise one costs a quarter
                torch.mul(gradient, self._transposed[number], out=before)
            else:
                self._product(gradient, self._transposed[number], out=before)
            gradient = _relu_backward(before, x, 0, grad_input=before)
        if inputs is None:
            return None
        return self._product(gradient, self._transposed[0][..., inputs])

    def _make(self, rows: Tensor) -> None:
        self._rows = n = rows.shape[-2]
        many = self._weights[0].shape[:-2]
        self._out = [weight.new_empty((*many, n, weight.shape[-1])) for weight in self._weights]
        self._back = [weight.new_empty((*many, n, weight.shape[-2])) for weight in self._weights]


class ClosedForm:
    """The forward and backward passes of a learner step. All of it belongs under ``torch.no_grad()``.

    Args:
        actor, critics: of the algorithm; their layers' parameters get their ``grad`` here.
        target_actor, target_critics: likewise, but without.
    """

    def __init__(
        self, actor: nn.Module, critics: nn.Module, target_actor: nn.Module, target_critics: nn.Module
    ) -> None:
        live, critic = _layers(actor), _layers(critics)
        aims, target_critic = _layers(target_actor), _layers(target_critics)
        for weight, bias in (*live, *critic):
            weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
        self._actor = Perceptron(
            [weight.detach().t() for weight, _ in live],
            [bias.detach() for _, bias in live],
            ([_grad(weight).t() for weight, _ in live], [_grad(bias) for _, bias in live]),
        )
        self._critics = Perceptron(
            [weight.detach() for weight, _ in critic],
            [bias.detach() for _, bias in critic],
            ([_grad(weight) for weight, _ in critic], [_grad(bias) for _, bias in critic]),
        )
        self._first = Perceptron(
            [weight.detach()[0] for weight, _ in critic], [bias.detach()[0, 0] for _, bias in critic]
        )
        self._target_actor = Perceptron(
            [weight.detach().t() for weight, _ in aims],
            [bias.detach() for _, bias in aims],
        )
        self._target_critics = Perceptron(
            [weight.detach() for weight, _ in target_critic],
            [bias.detach() for _, bias in target_critic],
        )

    def following(self, observation: Tensor, noise: Tensor) -> Tensor:
        """The lesser target value (n,) of normalised observations (n, o), with noise (n, a) on the target's actions."""
        action = self._target_actor.forward(observation).tanh_().add_(noise).clamp_(-1.0, 1.0)
        rows = torch.cat((observation, action), -1)
        return self._target_critics.forward(rows.expand(2, -1, -1)).squeeze(-1).amin(0)

    def critics(self, observation: Tensor, target: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Leaves the critics' gradients; returns values (2, n), errors (2, n) and the loss."""
        rows = torch.cat((observation, batch["action"]), -1)
        values = self._critics.forward(rows.expand(2, -1, -1)).squeeze(-1)
        errors = values - target
        weighted = weighed(errors, batch)
        loss = torch.dot(weighted.flatten(), errors.flatten()).div_(len(rows))
        self._critics.backward(torch.mul(weighted, 2.0 / len(rows)).unsqueeze(-1))
        return values, errors, loss

    def actor(self, observation: Tensor, penalty: float) -> Tensor:
        """Leaves the actor's gradients, for the first critic's value and the penalty before tanh; returns its loss."""
        n, observed = observation.shape
        raw = self._actor.forward(observation)
        action = raw.tanh()
        values = self._first.forward(torch.cat((observation, action), -1))
        loss = values.mean().neg_()
        wanted = self._first.backward(values.new_full((n, 1), -1.0 / n), slice(observed, None))
        assert wanted is not None
        gradient = torch.ops.aten.tanh_backward(wanted, action)
        if penalty:
            beyond = raw - raw.clamp(-1.0, 1.0)
            loss.add_(beyond.square().mean(), alpha=penalty)
            gradient.add_(beyond, alpha=2.0 * penalty / beyond.numel())
        self._actor.backward(gradient)
        return loss


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _layers(network: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The layers' weights and biases: (out, in) and (out,), or (2, in, out) and (2, 1, out) the twin critics'."""
    return [(layer.weight, layer.bias) for layer in network.modules() if isinstance(layer, nn.Linear | TwinLinear)]


class HockeyTD3(TD3):
    """TD3 of observations that are numbers; its update is TD3's, operation for operation."""

    def setup(self, seed: int, device: str) -> None:
        super().setup(seed, device)
        self._form = ClosedForm(self.acting, self.critics, self.target_actor, self.target_critics)

    @torch.no_grad()
    def update(self, batch: Batch, progress: Progress) -> Update:
        """Update the critics, and every `policy_delay`-th time the policy and the targets."""
        s, form, features = self.settings, self._form, self.acting.features
        observation = features(batch["observation"])  # all networks have the same statistics
        value = form.following(features(batch["next_observation"]), self.smoothing(batch["action"]))
        target = torch.addcmul(batch["reward"] * s.reward_scale, batch["discount"], value)
        values, errors, critic_loss = form.critics(observation, target, batch)
        self.critic_optimiser.step()
        metrics = {"critic_loss": critic_loss, "value": values.mean(), "target": target.mean()}
        self.updates += 1
        if self.updates % s.policy_delay == 0:
            metrics["actor_loss"] = form.actor(observation, s.pre_tanh_penalty)
            self.actor_optimiser.step()
            self.move_targets()
        return Update(metrics, errors.abs_().mean(0))


@cache
def _factors(device: torch.device) -> dict[str, Tensor]:
    observation, action = (torch.from_numpy(factors).to(device) for factors in (MIRROR_OBSERVATION, MIRROR_ACTION))
    return {"observation": observation, "next_observation": observation, "action": action}


def mirrored(batch: Batch) -> Batch:
    """Mirror every second row left to right, in place: the game is symmetric, and rows of a replay's anchor come first.

    Sizes are those of the game, or those of a game without holding the puck.
    """
    for name, factors in _factors(batch["action"].device).items():
        batch[name][::2].mul_(factors[: batch[name].shape[1]])
    return batch
