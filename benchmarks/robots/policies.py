"""The policies: one with denoising steps like flow-matching policies, and a very cheap one.

On a CPU a forward of small layers costs its calls for any batch size, as a batch on a GPU does.
"""

from __future__ import annotations

import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

HORIZON, DIMENSION, SIDE = 50, 14, 224
IMAGE = TensorSpec("uint8", (SIDE, SIDE, 3))
# The names of the inputs, two images and the state, in each protocol of robots.
NAMES = {
    "openpi": ("images/top", "images/wrist", "state"),
    "act": ("images/top", "images/wrist", "state"),
    "gr00t": ("video/top", "video/wrist", "state/joints"),
    "lerobot": ("observation.images.top", "observation.images.wrist", "observation.state"),
}


class Policy(nn.Module):
    def __init__(self, width: int, layers: int, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.first = nn.Linear(2 * 3 * 14 * 14 + DIMENSION, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.last = nn.Linear(width, HORIZON * DIMENSION)

    def forward(self, top: torch.Tensor, wrist: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        # Every sixteenth pixel: the forward is to be the layers', not the images'.
        seen = torch.cat([image[:, ::16, ::16].flatten(1).float() / 255 for image in (top, wrist)], dim=1)
        x = torch.relu(self.first(torch.cat([seen, state], dim=1)))
        for _ in range(self.steps):
            for layer in self.layers:
                x = x + torch.relu(layer(x))
        return self.last(x).view(-1, HORIZON, DIMENSION)


def made(width: int, layers: int, steps: int) -> Policy:
    torch.manual_seed(0)
    return Policy(width, layers, steps).eval()


def policy(width: int, layers: int, steps: int, speaks: str = "openpi") -> ServedModel:
    inputs = dict(zip(NAMES[speaks], (IMAGE, IMAGE, TensorSpec("float32", (DIMENSION,))), strict=True))
    return ServedModel(made(width, layers, steps), inputs, {"actions": TensorSpec("float32", (HORIZON, DIMENSION))})
