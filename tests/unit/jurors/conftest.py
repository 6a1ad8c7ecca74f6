"""Real photographs, from the wheels of scikit-image and scikit-learn alone: no test touches a network."""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt
import pytest

Images = npt.NDArray[np.uint8]

SIZE = 384


def crops(photograph: Images) -> Images:
    """Six square crops, two large and four smaller ones, at the size that the jurors serve: (6, 384, 384, 3)."""
    height, width = photograph.shape[:2]
    pieces = []
    for share, corners in ((0.92, ((0, 0), (1, 1))), (0.75, ((0, 0), (0, 1), (1, 0), (1, 1)))):
        side = int(min(height, width) * share)
        interpolation = cv2.INTER_AREA if side >= SIZE else cv2.INTER_CUBIC
        for down, across in corners:
            top, left = down * (height - side), across * (width - side)
            piece = photograph[top : top + side, left : left + side]
            pieces.append(cv2.resize(piece, (SIZE, SIZE), interpolation=interpolation))
    return np.stack(pieces).astype(np.uint8)


@pytest.fixture(scope="session")
def photographs() -> dict[str, Images]:
    """Crops of every colour photograph of a scene that the two wheels hold (one of the stereo pair)."""
    import skimage.data
    from sklearn.datasets import load_sample_image

    whole = {
        "astronaut": skimage.data.astronaut(),
        "coffee": skimage.data.coffee(),
        "rocket": skimage.data.rocket(),
        "china": load_sample_image("china.jpg"),
        "flower": load_sample_image("flower.jpg"),
        "chelsea": skimage.data.chelsea(),
        "motorcycle": skimage.data.stereo_motorcycle()[0],
    }
    return {name: crops(photograph) for name, photograph in whole.items()}
