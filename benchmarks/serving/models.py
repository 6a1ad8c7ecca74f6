"""The two models that everybody serves, the first of them in any width.

Needs torch alone, so that it can be imported in every peer's environment.
"""

from __future__ import annotations

import torch
from torch import nn


class Vector(nn.Module):
    """A policy: float32 (n, 52) to logits (n, 145) and value (n)."""

    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(52, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.logits = nn.Linear(hidden, 145)
        self.value = nn.Linear(hidden, 1)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(observation)
        return self.logits(hidden), self.value(hidden).squeeze(1)


class Image(nn.Module):
    """A juror: uint8 (n, 384, 384, 3) to score (n).

    Images become floats a few at a time, in a buffer that is kept: those of a whole batch would fall out of the cache
    before they are read (16 of them are 28 MB), and a fresh buffer would cost a page fault every 4 KiB besides.
    """

    def __init__(self, together: int = 2) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 4, stride=4)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.third = nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.score = nn.Linear(32, 1)
        with torch.no_grad():
            self.first.weight /= 255
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch leaves this form untyped
        self._floats = torch.empty((together, 384, 384, 3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        parts = []
        together = len(self._floats)
        for first in range(0, len(image), together):
            part = image[first : first + together]
            floats = self._floats[: len(part)].copy_(part)
            parts.append(torch.relu(self.first(floats.permute(0, 3, 1, 2))))
        hidden = torch.cat(parts) if len(parts) > 1 else parts[0]
        hidden = torch.relu(self.second(hidden))
        hidden = torch.relu(self.third(hidden))
        score: torch.Tensor = self.score(hidden.mean((2, 3))).squeeze(1)
        return score


MODELS = {"vector": Vector, "image": Image}


def build(name: str) -> nn.Module:
    """A model with fixed random weights, on one thread: of MODELS, or ``hidden512``, Vector in that width."""
    torch.set_num_threads(1)
    torch.manual_seed(20)
    module: nn.Module = MODELS[name]() if name in MODELS else Vector(int(name.removeprefix("hidden")))
    return module.eval()


def forward(module: nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One batch in, a tuple of outputs out."""
    with torch.inference_mode():
        outputs = module(inputs)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def packed(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """One batch in, all outputs side by side: (n, output_width) floats, for those who send bytes."""
    outputs = forward(module, inputs)
    if len(outputs) == 1:
        return outputs[0].reshape(len(inputs), -1)
    return torch.cat([output.reshape(len(inputs), -1) for output in outputs], dim=1)
