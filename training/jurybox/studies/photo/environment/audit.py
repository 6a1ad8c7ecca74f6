"""Measures the distance of a picture from the undamaged photo, which no juror scores and no reward includes.

A picture is compared with the photo before its damage, turned and enlarged in the same way: the tilts of the damage and
of the edits are known, so the two are registered exactly, and an edit that only turns adds no distance. A separate
number measures the tilt that is left.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from jurybox.studies.photo.environment.edits import Edits, Image, apply, turn

Perceptual = Callable[[Image, Image], float]

# By name: whether more is better.
MEASURES: Mapping[str, bool] = {"psnr": True, "ssim": True, "ciede2000": False}
_HIGHEST_PSNR = 60.0  # decibels; undefined for equal pictures
_SIDE = 192  # of the pictures whose colours and structure are compared: the detail visible at arm's length

# Kinds of damage, and the settings of a Degradation that belong to them.
DAMAGES: Mapping[str, tuple[str, ...]] = {
    "exposure": ("exposure",),
    "haze": ("haze",),
    "colour cast": ("temperature", "tint"),
    "saturation": ("saturation",),
    "blur": ("blur",),
    "noise": ("noise",),
    "tilt": ("tilt",),
}


def damages_of(degradation: Mapping[str, float]) -> tuple[str, ...]:
    """Return the kinds of damage in a degradation; none for an intact photo."""
    return tuple(kind for kind, names in DAMAGES.items() if any(degradation.get(name) for name in names))


def registered(photo: Image, tilt: float, edits: Mapping[str, float]) -> Image:
    """The undamaged photo, turned and enlarged as a picture that was tilted and then edited: uint8 (side, side, 3)."""
    found = photo
    if tilt:
        source, found = found, np.empty_like(photo)
        turn(source, found, degrees=tilt)
    return apply(found, Edits(straighten=edits.get("straighten", 0.0), crop=edits.get("crop", 0.0)))


def psnr(picture: Image, reference: Image) -> float:
    """Peak signal-to-noise ratio in decibels, 60 at most."""
    error = float(np.mean(np.square(cv2.absdiff(picture, reference).astype(np.float32))))
    return _HIGHEST_PSNR if error == 0 else min(_HIGHEST_PSNR, float(10.0 * np.log10(255.0**2 / error)))


def distance(one: Image, other: Image) -> float:
    """Return the mean CIELAB distance of two small pictures of one size, in a fifth of CIEDE2000's time."""
    first, second = (cv2.cvtColor(each.astype(np.float32) / 255, cv2.COLOR_RGB2LAB) for each in (one, other))
    return float(np.linalg.norm(first - second, axis=2).mean())


def measure(picture: Image, reference: Image, perceptual: Perceptual | None = None) -> dict[str, float]:
    """Measure the difference between a picture and its registered reference, both uint8 (side, side, 3).

    Args:
        perceptual: a learned distance of the two, if available.

    Returns:
        ``psnr`` in decibels, ``ssim`` of the luma (Wang et al., 2004, with its Gaussian window), ``ciede2000``, the
        mean difference of colours (Sharma et al., 2005; 1 is just noticeable), and ``perceptual``.
    """
    import skimage.color
    import skimage.metrics

    colour: Any = skimage.color  # neither has types
    structural_similarity: Any = skimage.metrics.structural_similarity
    small = [cv2.resize(each, (_SIDE, _SIDE), interpolation=cv2.INTER_AREA) for each in (picture, reference)]
    luma = [cv2.cvtColor(each, cv2.COLOR_RGB2GRAY) for each in small]
    window = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    similarity = structural_similarity(*luma, data_range=255, **window)
    colours: npt.NDArray[Any] = colour.deltaE_ciede2000(*(colour.rgb2lab(each) for each in small))
    found = {"psnr": psnr(picture, reference), "ssim": float(similarity), "ciede2000": float(colours.mean())}
    if perceptual is not None:
        found["perceptual"] = float(perceptual(picture, reference))
    return found


def load_perceptual(name: str) -> Perceptual:
    """Load the function ``"package.module:function"``, which makes a learned distance of two pictures.

    Raises:
        ValueError: there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        made: Perceptual = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"expected 'package.module:function' that returns a distance of two pictures, got {name!r}: {error}"
        ) from error
    return made
