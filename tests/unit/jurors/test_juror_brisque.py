"""Our BRISQUE against a plain one in double precision, and against what the method promises."""

from __future__ import annotations

import math
from itertools import pairwise

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch

from jurybox.server.jurors.criteria import Naturalness, split
from jurybox.server.jurors.scene_statistics import halve

Images = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]

SHAPES = np.arange(0.2, 10.0, 0.001)


def moment_ratio(shape: float) -> float:
    return math.gamma(2 / shape) ** 2 / (math.gamma(1 / shape) * math.gamma(3 / shape))


RATIOS = np.array([moment_ratio(shape) for shape in SHAPES])


def plain_fit(samples: Doubles) -> tuple[float, float, float, float]:
    """The paper's AGGD estimate as its authors wrote it: a search through a table of shapes."""
    left, right = (samples[samples < 0] ** 2).mean(), (samples[samples > 0] ** 2).mean()
    asymmetry = math.sqrt(left / right)
    ratio = np.abs(samples).mean() ** 2 / (samples**2).mean()
    ratio *= (asymmetry**3 + 1) * (asymmetry + 1) / (asymmetry**2 + 1) ** 2
    shape = float(SHAPES[np.abs(RATIOS - ratio).argmin()])
    scale = math.gamma(2 / shape) / math.sqrt(math.gamma(1 / shape) * math.gamma(3 / shape))
    return shape, (math.sqrt(right) - math.sqrt(left)) * scale, float(left), float(right)


def plain_features(image: Images) -> list[float]:
    grey = image @ np.array([0.299, 0.587, 0.114])
    offsets = np.arange(-3, 4)
    window = np.exp(-(offsets[:, None] ** 2 + offsets**2) / (2 * (7 / 6) ** 2))
    window /= window.sum()
    features: list[float] = []
    for _ in range(2):
        mean = cv2.filter2D(grey, cv2.CV_64F, window, borderType=cv2.BORDER_REPLICATE)
        square = cv2.filter2D(grey * grey, cv2.CV_64F, window, borderType=cv2.BORDER_REPLICATE)
        mscn = (grey - mean) / (np.sqrt(np.abs(square - mean * mean)) + 1)
        shape, _, left, right = plain_fit(mscn)
        features += [shape, (left + right) / 2]
        height, width = mscn.shape
        for down, across in ((0, 1), (1, 0), (1, 1), (-1, 1)):
            moved = np.zeros_like(mscn)
            for row in range(height):
                if 0 <= row + down < height:
                    moved[row, : width - across] = mscn[row + down, across:]
            features += plain_fit(mscn * moved)
        grey = cv2.resize(grey, (width // 2, height // 2), interpolation=cv2.INTER_CUBIC)
    return features


def plain_score(features: list[float], naturalness: Naturalness) -> float:
    regressor = naturalness.regressor
    low, high = regressor.feature_low.double().numpy(), regressor.feature_high.double().numpy()
    scaled = -1 + 2 * (np.array(features) - low) / (high - low)
    distance = ((regressor.support_vectors.double().numpy() - scaled) ** 2).sum(axis=1)
    kernel = np.exp(-0.05 * distance)
    return float(kernel @ regressor.coefficients.double().numpy() + regressor.offset.double().numpy()[0])


def brisque(naturalness: Naturalness, images: Images) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        return naturalness.brisque(split(torch.from_numpy(images))).numpy()


@pytest.fixture(scope="module")
def naturalness() -> Naturalness:
    return Naturalness().eval()


@pytest.mark.parametrize("name", ["astronaut", "coffee", "motorcycle"])
def test_features_and_score_equal_a_plain_implementation_in_double_precision(
    name: str, photographs: dict[str, Images], naturalness: Naturalness
) -> None:
    image = photographs[name][3]
    expected = plain_features(image)
    with torch.inference_mode():
        found = naturalness.statistics(split(torch.from_numpy(image[None])).luma)[0].numpy()
    span = (naturalness.regressor.feature_high - naturalness.regressor.feature_low).numpy()
    np.testing.assert_allclose(found / span, np.array(expected) / span, atol=2e-3)
    assert brisque(naturalness, image[None])[0] == pytest.approx(plain_score(expected, naturalness), abs=0.2)


def test_a_photograph_scores_as_the_method_promises(photographs: dict[str, Images], naturalness: Naturalness) -> None:
    scores = np.concatenate([brisque(naturalness, images) for images in photographs.values()])
    assert scores.min() > -15 and scores.max() < 60, "photographs lie in the lower half of the scale"
    assert np.median(scores) < 25


@pytest.mark.parametrize("name", ["astronaut", "china", "flower"])
def test_more_noise_or_blur_or_compression_scores_worse(
    name: str, photographs: dict[str, Images], naturalness: Naturalness
) -> None:
    image = photographs[name][0]
    noise = np.random.default_rng(0).normal(size=image.shape)
    noisy = [np.clip(image + level * noise, 0, 255).astype(np.uint8) for level in (8, 16, 32)]
    blurred = [cv2.GaussianBlur(image, (0, 0), sigma) for sigma in (0.8, 1.4, 2.5)]
    packed = [
        np.asarray(cv2.imdecode(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1], 1), np.uint8)
        for quality in (60, 25, 8)
    ]
    for steps in (noisy, blurred, packed):
        scores = brisque(naturalness, np.stack([image, *steps]))
        assert all(worse > better for better, worse in pairwise(scores.tolist())), scores


def test_halving_is_opencvs_bicubic() -> None:
    image = np.random.default_rng(1).uniform(0, 255, (50, 64)).astype(np.float32)
    expected = cv2.resize(image, (32, 25), interpolation=cv2.INTER_CUBIC)
    np.testing.assert_allclose(halve(torch.from_numpy(image)[None])[0].numpy(), expected, atol=1e-3)


def test_flat_regions_are_not_judged_by_their_rounding_noise(
    photographs: dict[str, Images], naturalness: Naturalness
) -> None:
    framed = photographs["astronaut"][0].copy()
    scores = []
    for level in (40, 41, 127, 128, 201, 254):
        framed[:100] = level
        scores.append(brisque(naturalness, framed[None])[0])
    assert np.ptp(scores) < 1.5, scores
