"""Models as they are served on a GPU."""

import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(52, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.logits, self.value = nn.Linear(256, 145), nn.Linear(256, 1)

    def forward(self, observation):
        hidden = self.body(observation)
        return self.logits(hidden), self.value(hidden).squeeze(1)


class Juror(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 4, stride=4), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()
        )
        self.score = nn.Linear(32, 1)

    def forward(self, image):
        floats = image.permute(0, 3, 1, 2).to(self.score.weight.dtype) / 255
        return self.score(self.body(floats).mean((2, 3))).squeeze(1)


def vector() -> ServedModel:
    torch.manual_seed(0)
    outputs = {"logits": TensorSpec("float32", (145,)), "value": TensorSpec("float32")}
    return ServedModel(Policy(), {"observation": TensorSpec("float32", (52,))}, outputs)


def image() -> ServedModel:
    torch.manual_seed(0)
    return ServedModel(Juror(), {"image": TensorSpec("uint8", (384, 384, 3))}, {"score": TensorSpec("float32")})
