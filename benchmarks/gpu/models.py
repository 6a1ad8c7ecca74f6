"""Models that only these measurements serve; the small network and the juror are those of tests/gpu."""

from __future__ import annotations

import torch

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

PARTS = 16  # tensors of a heavy model
_ROW = {"x": TensorSpec("float32", (4,))}


def heavy_state(megabytes: float) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a heavy model's weights."""
    return {f"parts.{i}": (max(8, int(megabytes * 2**18 / PARTS)),) for i in range(PARTS)}


class Heavy(torch.nn.Module):
    """So many MiB of weights that are all one number; returns the least and the largest of them.

    If version v is published as weights that are all v, the outputs are v twice: anything else is a torn read.

    Args:
        every: reads one weight of so many, and each tensor's first and last.
    """

    def __init__(self, megabytes: float, every: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(shape) for shape in heavy_state(megabytes).values())
        self._every = every

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.stack([part[edge] for part in self.parts for edge in (0, -1)])
        some = [part[:: self._every] for part in self.parts]
        low = torch.minimum(seen.amin(), torch.stack([part.amin() for part in some]).amin())
        high = torch.maximum(seen.amax(), torch.stack([part.amax() for part in some]).amax())
        return low.float().expand(len(x)), high.float().expand(len(x))


def heavy(megabytes: float, every: int = 4097) -> ServedModel:
    return ServedModel(Heavy(megabytes, every), _ROW, {"low": TensorSpec("float32"), "high": TensorSpec("float32")})


class Picture(torch.nn.Module):
    """A square image's score, by a very cheap forward for any size: every 32nd pixel's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image[:, ::32, ::32].float().mean((1, 2, 3)) / 255 * self.one


def picture(side: int) -> ServedModel:
    return ServedModel(Picture(), {"image": TensorSpec("uint8", (side, side, 3))}, {"score": TensorSpec("float32")})


class Hungry(torch.nn.Module):
    """A row whose first number is h needs h bytes of the device while it is computed; returns each row's sum.

    Without a device, more than `enough` bytes in a batch raise the same error as torch.
    """

    def __init__(self, enough: float) -> None:
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))
        self._enough = enough

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = int(x[:, 0].double().sum().item())
        if x.is_cuda and wanted:
            torch.empty(wanted, dtype=torch.uint8, device=x.device)
        elif wanted > self._enough:
            raise torch.OutOfMemoryError(f"{wanted} bytes of {self._enough:.0f}")
        return x[:, 1:].sum(1) * self.one


def hungry(enough: float) -> ServedModel:
    return ServedModel(Hungry(enough), _ROW, {"sum": TensorSpec("float32")})
