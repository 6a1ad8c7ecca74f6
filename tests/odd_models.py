"""Models as users bring them, which an engine must serve rightly or refuse, for tests."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

ROW = TensorSpec("float32", (4,))


def served(module: nn.Module, inputs: str = "float32") -> ServedModel:
    return ServedModel(module, {"x": TensorSpec(inputs, (4,))}, {"y": ROW})


class Scale(nn.Module):
    """scale * x, by the weight itself, by a view of it, and by what was computed from it: they must agree."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.ones(4))
        self.views = [self.scale.detach()[:]]
        self.weights_changed()

    def weights_changed(self) -> None:
        self.twice = 2 * self.scale.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {"weight": self.scale, "view": self.views[0], "computed": self.twice / 2}[self.how] * x


class Derived(nn.Module):
    """What it computed from its weights, what it should be, and how often it computed it; never with a scale of 13."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        self.view = self.scale.detach()[...] if view else None  # for which weights are overwritten in place
        self.calls = 0
        self.weights_changed()

    def weights_changed(self) -> None:
        if self.scale.item() == 13:
            raise RuntimeError("thirteen")
        self.calls += 1
        self.sum = (self.scale + self.offset).detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.stack([self.sum, (self.scale + self.offset).detach(), torch.tensor(float(self.calls))])
        return found.expand(len(x), 3)


def derived(view: bool = False) -> ServedModel:
    return ServedModel(Derived(view), {"x": TensorSpec("float32", (4,))}, {"y": TensorSpec("float32", (3,))})


def scale(how: str) -> ServedModel:
    return served(Scale(how))


def compiled() -> ServedModel:
    return served(torch.compile(Scale("weight"), backend="eager"))


def parallel() -> ServedModel:
    return served(nn.DataParallel(Scale("weight")))


_ONE = Scale("weight")


def shared() -> ServedModel:
    """The same module in every call."""
    return served(_ONE)


class Thirds(nn.Module):
    """In the default dtype of the process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x / 3).float() + float(np.float32(0) / np.float32(1))


def thirds() -> ServedModel:
    return served(Thirds(), "int64")


def restless(seconds: float = 0.0, fails: bool = False) -> ServedModel:
    """Changes for the whole process what it can, as some libraries do while they load."""
    torch.set_default_dtype(torch.bfloat16)
    np.seterr(all="raise")
    os.chdir("/")
    torch.set_num_threads(torch.get_num_threads() + 1)
    time.sleep(seconds)
    if fails:
        raise RuntimeError("this factory fails")
    return served(Scale("weight").float())


class Slow(nn.Module):
    """Takes `seconds` for a batch with a negative number, and fails; for ever if `seconds` is none."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            while self.seconds is None:
                time.sleep(0.01)
            time.sleep(self.seconds)
            raise ValueError("negative")
        return x + 1


def slow(seconds: float | None = None) -> ServedModel:
    return served(Slow(seconds))


class Restless(nn.Module):
    """Changes for the whole process what it can, for a row of sevens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 7).all()):
            torch.set_default_dtype(torch.bfloat16)
            np.seterr(all="raise")
            os.chdir("/")
            torch.set_num_threads(torch.get_num_threads() + 1)
        return x + 1


def restless_forward() -> ServedModel:
    return served(Restless())
