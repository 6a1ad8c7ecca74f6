"""Does the picture look like an undistorted photograph: BRISQUE, turned round to 0..1."""

from __future__ import annotations

import torch
from torch import Tensor

from jurybox.server.jurors.criteria.criterion import Criterion
from jurybox.server.jurors.criteria.pixels import Pixels
from jurybox.server.jurors.criteria.regressor import SupportVectorRegressor
from jurybox.server.jurors.criteria.scene_statistics import SceneStatistics

# A logistic curve keeps a gradient where the regressor leaves 0..100; 50 gives half marks, 0 and 100 give 0.97
# and 0.03.
_MIDDLE, _SLOPE = 50.0, 15.0


class Naturalness(Criterion):
    """``1 / (1 + exp((brisque - 50) / 15))``."""

    name = "naturalness"

    def __init__(self) -> None:
        super().__init__()
        self.statistics = SceneStatistics()
        self.regressor = SupportVectorRegressor()

    def brisque(self, pixels: Pixels) -> Tensor:
        """BRISQUE score, float32 (n,): about 0 (pristine) to 100 (ruined), lower is better."""
        score: Tensor = self.regressor(self.statistics(pixels.luma))
        return score

    def judge(self, pixels: Pixels) -> Tensor:
        return torch.sigmoid((_MIDDLE - self.brisque(pixels)) / _SLOPE)
