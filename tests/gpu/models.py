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


class Waits(nn.Module):
    """Reads a result on the host, which no capture of a CUDA graph allows."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.one if float(x.sum()) >= 0 else x - self.one


class Draws(nn.Module):
    """Draws random numbers on its device."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.one * torch.rand_like(x)


class Table(nn.Module):
    """Looks numbers up; one that is not there is a failed assertion in a kernel."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def forward(self, number):
        return self.table(number)


def waits() -> ServedModel:
    return ServedModel(Waits(), {"x": TensorSpec("float32", (4,))}, {"y": TensorSpec("float32", (4,))})


def draws() -> ServedModel:
    return ServedModel(Draws(), {"x": TensorSpec("float32", (4,))}, {"y": TensorSpec("float32", (4,))})


def table() -> ServedModel:
    return ServedModel(Table(), {"number": TensorSpec("int64")}, {"y": TensorSpec("float32", (4,))})


class Places(nn.Module):
    """Names its device in its operations."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + torch.arange(4, device=x.device)
