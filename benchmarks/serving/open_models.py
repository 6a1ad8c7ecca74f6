"""The models of the open-rows benchmark, each with rows of a fixed shape and with open ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

VECTOR, LOGITS = (52,), TensorSpec("float32", (145,))
TEXT = 400


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(52, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 145))

    def forward(self, x: torch.Tensor, x_lengths: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU(), nn.Conv2d(8, 16, 4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor, x_lengths: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(x.permute(0, 3, 1, 2).float() / 255).mean(dim=(1, 2, 3))  # type: ignore[no-any-return]


class Bag(nn.Module):
    """The mean of embeddings of bytes, and a score of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head = nn.EmbeddingBag(256, 32, mode="sum"), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, x_lengths: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.bag(x.long()))[:, 0]  # type: ignore[no-any-return]


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.LSTMCell(52, 256), nn.Linear(256, 145)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> Any:
        hidden, cell = self.cell(x, (hidden, cell))
        return self.head(hidden), hidden, cell


class Stateless(Lstm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        zero = x.new_zeros(len(x), 256)
        return super().forward(x, zero, zero)[0]  # type: ignore[no-any-return]


def vector(*, open_: bool = False) -> ServedModel:
    spec = TensorSpec("float32", (-1,), capacity=52) if open_ else TensorSpec("float32", VECTOR)
    return ServedModel(Mlp(), {"x": spec}, {"y": LOGITS}, collate="pad", example=_vectors)


def _vectors(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(n, 52)}


def image(*, open_: bool = False) -> ServedModel:
    spec = TensorSpec("uint8", (-1, -1, 3), capacity=3 * 384 * 384) if open_ else TensorSpec("uint8", (384, 384, 3))
    return ServedModel(Cnn(), {"x": spec}, {"y": TensorSpec("float32")}, collate="pad")


def text(*, open_: bool = False) -> ServedModel:
    spec = TensorSpec("bytes", capacity=TEXT) if open_ else TensorSpec("uint8", (TEXT,))
    return ServedModel(Bag(), {"x": spec}, {"y": TensorSpec("float32")}, collate="pad", max_padding=0.9)


def memory(*, open_: bool = False) -> ServedModel:
    state = {name: TensorSpec("float32", (256,)) for name in ("hidden", "cell")}
    if not open_:
        return ServedModel(Stateless(), {"x": TensorSpec("float32", VECTOR)}, {"y": LOGITS})
    return ServedModel(Lstm(), {"x": TensorSpec("float32", VECTOR)}, {"y": LOGITS}, state=state)
