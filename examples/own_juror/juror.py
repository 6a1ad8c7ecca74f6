"""A custom juror: does a text contain the requested JSON?"""

import json

import torch
from torch import nn

from jurybox.protocol import TensorSpec
from jurybox.server.models import RowErrors, ServedModel


class Fields(nn.Module):
    """The part of `wanted` that a text has, if it is a JSON object; else 0. An empty text has no score."""

    def __init__(self, wanted: list[str]) -> None:
        super().__init__()
        self.wanted = wanted

    def forward(self, text: list[bytes]) -> torch.Tensor | RowErrors:
        scores = torch.tensor([self.score(each) for each in text])
        empty = {row: "an empty text" for row, each in enumerate(text) if not each.strip()}
        return RowErrors(empty, scores) if empty else scores

    def score(self, text: bytes) -> float:
        try:
            found = json.loads(text)
        except ValueError:
            return 0.0
        return sum(key in found for key in self.wanted) / len(self.wanted) if isinstance(found, dict) else 0.0


def fields(wanted: list[str]) -> ServedModel:
    return ServedModel(Fields(wanted), {"text": TensorSpec("bytes", capacity=8192)}, {"score": TensorSpec("float32")})
