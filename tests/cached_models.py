"""Models that show whether a row was computed: each computed row has another number."""

from __future__ import annotations

import torch

from jurybox.protocol import TensorSpec
from jurybox.server.models import RowErrors, ServedModel


class Numbered(torch.nn.Module):
    """y = scale * x, and the number of rows that were computed before. A row that begins with 13 fails."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.computed = 0

    def _numbers(self, rows: int) -> torch.Tensor:
        self.computed += rows
        return torch.arange(self.computed - rows, self.computed)

    def forward(self, x: torch.Tensor) -> object:
        outputs = {"y": self.scale * x, "number": self._numbers(len(x))}
        wrong = {int(row): "thirteen" for row in torch.nonzero(x[:, 0] == 13)}
        return RowErrors(wrong, outputs) if wrong else outputs


class Shouting(Numbered):
    def forward(self, text: list[bytes]) -> object:  # type: ignore[override]
        return {"y": [each.upper() for each in text], "number": self._numbers(len(text))}


NUMBER = {"number": TensorSpec("int64")}


def numbered() -> ServedModel:
    return ServedModel(Numbered(), {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,)), **NUMBER})


def shouting() -> ServedModel:
    text = TensorSpec("bytes", capacity=64)
    return ServedModel(Shouting(), {"text": text}, {"y": text, **NUMBER})
