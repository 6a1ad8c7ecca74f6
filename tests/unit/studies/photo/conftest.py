"""A juror made of arithmetic, so that the environment is tested without a model or a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from jurybox.studies.photo.environment import PhotoEdit, PhotoLibrary

Image = npt.NDArray[np.uint8]


class Arithmetic:
    """Likes a middling brightness, contrast and colour; 0 to 1."""

    def __init__(self) -> None:
        self.buffer: Image = np.zeros((384, 384, 3), dtype=np.uint8)
        self.scored: list[Image] = []
        self.closed = 0

    def score(self) -> float:
        self.scored.append(self.buffer.copy())
        luma = cv2.cvtColor(self.buffer, cv2.COLOR_RGB2GRAY) / 255.0
        chroma = np.ptp(cv2.resize(self.buffer, (64, 64)).astype(float), axis=2).mean() / 255.0
        wrong = abs(luma.mean() - 0.5) / 0.3 + abs(luma.std() - 0.25) / 0.2 + abs(chroma - 0.3) / 0.3
        return float(np.exp(-wrong / 2))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="session")
def library() -> PhotoLibrary:
    shipped = PhotoLibrary.shipped()
    return replace(shipped, held_out=shipped.held_out[:2])  # of fourteen: what is shown on two is quick


@pytest.fixture
def scorer() -> Arithmetic:
    return Arithmetic()


@pytest.fixture
def make(library: PhotoLibrary) -> Callable[..., PhotoEdit]:
    def made(**settings: object) -> PhotoEdit:
        return PhotoEdit(settings.pop("scorer", None) or Arithmetic(), library=library, **settings)  # type: ignore[arg-type]

    return made


@pytest.fixture(scope="session")
def photo(library: PhotoLibrary) -> Image:
    return library.training[0].centre()
