"""Models whose rows or weights are bfloat16 and float8."""

from __future__ import annotations

import torch

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


class Echo(torch.nn.Module):
    """Doubles a row, and returns the bits that came as integers."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int8)
        return (x.float() * 2).to(x.dtype), bits.to(torch.int32)


def echo(dtype: str = "bfloat16") -> ServedModel:
    return ServedModel(
        Echo(), {"x": TensorSpec(dtype, (3,))}, {"y": TensorSpec(dtype, (3,)), "bits": TensorSpec("int32", (3,))}
    )


class Halves(torch.nn.Module):
    """y = x * weight, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def halves() -> ServedModel:
    return ServedModel(Halves(), {"x": TensorSpec("bfloat16", (3,))}, {"y": TensorSpec("bfloat16", (3,))})


class Lengths(torch.nn.Module):
    """Doubles rows that differ in size."""

    def forward(self, x: list[torch.Tensor]) -> list[torch.Tensor]:
        return [(row.float() * 2).to(row.dtype) for row in x]


def ragged(dtype: str = "bfloat16") -> ServedModel:
    spec = TensorSpec(dtype, (-1,), capacity=8)
    return ServedModel(Lengths(), {"x": spec}, {"y": spec})


class Sum(torch.nn.Module):
    """Adds to the state of a session."""

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = (total.float() + x.float()).to(total.dtype)
        return total, total


def summing(dtype: str = "bfloat16") -> ServedModel:
    spec = TensorSpec(dtype, (3,))
    return ServedModel(Sum(), {"x": spec}, {"y": spec}, state={"total": spec})
