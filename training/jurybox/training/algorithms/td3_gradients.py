"""TD3's gradients in closed form, for its own perceptrons: the same numbers as autograd's, 1.4 times as many a second.

With networks of this size a learner step is some sixty small operations, and much of its time goes into building the
graph, walking it and allocating what it holds; here every product goes into memory that the last step used as well. Of
the hockey's networks and batches of 128 one thread makes 850 to 990 updates in a second of CPU time, and 590 to 700
with autograd (1.40, 1.43 and 1.47 times, in three interleaved runs on two cores with torch 2). `tests/unit/algorithms/
test_td3.py` holds them against autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
        actor, critic: each a list of its layers' (weight, bias) parameters: (out, in) and (out,) the actor's, (2, in,
            out) and (2, 1, out) the twin critics'. They get their ``grad`` here.
        target_actor, target_critic: likewise.
    """

    def __init__(
        self,
        actor: Sequence[tuple[Tensor, Tensor]],
        critic: Sequence[tuple[Tensor, Tensor]],
        target_actor: Sequence[tuple[Tensor, Tensor]],
        target_critic: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        for weight, bias in (*actor, *critic):
            weight.grad, bias.grad = torch.zeros_like(weight), torch.zeros_like(bias)
        self._actor = Perceptron(
            [weight.detach().t() for weight, _ in actor],
            [bias.detach() for _, bias in actor],
            ([_grad(weight).t() for weight, _ in actor], [_grad(bias) for _, bias in actor]),
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
            [weight.detach().t() for weight, _ in target_actor],
            [bias.detach() for _, bias in target_actor],
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

    def critics(
        self, observation: Tensor, action: Tensor, target: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Leaves the critics' gradients; returns values (2, n), errors (2, n) and the loss."""
        rows = torch.cat((observation, action), -1)
        values = self._critics.forward(rows.expand(2, -1, -1)).squeeze(-1)
        errors = values - target
        weighted = errors if weights is None else errors * weights
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
