"""The published BRISQUE regressor: a radial-basis support-vector machine over 36 features."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

# Converted from the PyPI package brisque 0.2.0 (Apache-2.0); the file's metadata and NOTICE say from what.
PUBLISHED = Path(__file__).with_name("brisque_live.safetensors")


class SupportVectorRegressor(nn.Module):
    """Features to BRISQUE score, about 0 (pristine) to 100 (ruined), trained on the LIVE database's DMOS."""

    support_vectors: Tensor
    coefficients: Tensor
    feature_low: Tensor
    feature_high: Tensor
    offset: Tensor

    def __init__(self, path: Path = PUBLISHED) -> None:
        super().__init__()
        with safe_open(path, framework="pt") as file:
            for name in ("support_vectors", "coefficients", "feature_low", "feature_high", "offset"):
                self.register_buffer(name, file.get_tensor(name))
            self.gamma = float(file.metadata()["gamma"])

    def forward(self, features: Tensor) -> Tensor:
        """float32 (n, 36) to float32 (n,); lower is better. Can leave 0..100 by some tens at either end."""
        scaled = (features - self.feature_low) * (2 / (self.feature_high - self.feature_low)) - 1
        distance = (scaled.unsqueeze(1) - self.support_vectors).square_().sum(dim=2)
        # Coefficients of +-1024 cancel to a score below 100: in float32 the order of this sum would show in it.
        kernel = torch.exp(distance.double() * -self.gamma)
        return (kernel @ self.coefficients.double()).float() + self.offset
