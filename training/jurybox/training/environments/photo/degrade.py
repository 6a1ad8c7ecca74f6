"""What goes wrong with a photo, at random but repeatably.

A few faults at a time, each strong enough to be seen. They are faults of light and camera, not the editor's tools run
backwards: haze pulls towards a veil of its own grey, over-exposure clips, noise comes after blur, and all of it is
rounded to 8 bits before the editor sees it. So the tools mend most of the damage and undo none of it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import cv2
import numpy as np

from .edits import Edits, Image, saturate, tone_table, turn


@dataclass(frozen=True, slots=True)
class Degradation:
    """What was done to a photo; all zeros is nothing.

    Attributes:
        exposure: stops (EV).
        haze: share of every pixel that is replaced by the veil.
        veil: encoded grey of that veil, 0 to 1.
        saturation: stops of chroma.
        temperature: stops that red gains on blue.
        tint: stops that red and blue gain on green.
        blur: standard deviation of a Gaussian, pixels.
        noise: standard deviation, grey levels.
        tilt: degrees counter-clockwise.
        noise_seed: seed of the noise.
    """

    exposure: float = 0.0
    haze: float = 0.0
    veil: float = 0.5
    saturation: float = 0.0
    temperature: float = 0.0
    tint: float = 0.0
    blur: float = 0.0
    noise: float = 0.0
    tilt: float = 0.0
    noise_seed: int = 0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


Fault = Callable[[np.random.Generator, float], dict[str, float]]


def _either(rng: np.random.Generator, low: float, high: float) -> float:
    """Uniform in [low, high] with either sign."""
    return float(rng.uniform(low, high) * rng.choice((-1.0, 1.0)))


def _exposure(rng: np.random.Generator, strength: float) -> dict[str, float]:
    # Lost highlights stay lost, so over-exposure is the milder of the two.
    dark = rng.random() < 0.6
    return {"exposure": strength * float(rng.uniform(-2.6, -1.1) if dark else rng.uniform(0.7, 1.5))}


def _haze(rng: np.random.Generator, strength: float) -> dict[str, float]:
    return {"haze": min(0.85, strength * float(rng.uniform(0.4, 0.7))), "veil": float(rng.uniform(0.4, 0.65))}


def _cast(rng: np.random.Generator, strength: float) -> dict[str, float]:
    return {"temperature": strength * _either(rng, 0.5, 1.2), "tint": strength * _either(rng, 0.0, 0.4)}


def _saturation(rng: np.random.Generator, strength: float) -> dict[str, float]:
    pale = rng.random() < 0.7
    return {"saturation": strength * float(rng.uniform(-2.2, -1.0) if pale else rng.uniform(0.6, 1.1))}


def _detail(rng: np.random.Generator, strength: float) -> dict[str, float]:
    if rng.random() < 0.5:
        return {"blur": strength * float(rng.uniform(1.0, 2.2))}
    return {"noise": strength * float(rng.uniform(7.0, 16.0))}


def _tilt(rng: np.random.Generator, strength: float) -> dict[str, float]:
    return {"tilt": strength * _either(rng, 3.0, 9.0)}


_FAULTS: tuple[Fault, ...] = (_exposure, _haze, _cast, _saturation, _detail, _tilt)
# Wrong light is what editors mend most; a tilt or a soft lens is rarer.
_HOW_OFTEN = np.array([3.0, 2.5, 2.0, 2.0, 1.0, 1.0])


def draw(rng: np.random.Generator, strength: float = 1.0) -> Degradation:
    """Two to four different faults of random strength.

    Args:
        rng: all randomness comes from here, the noise's seed included.
        strength: scales every fault; 1 is what a careless amateur delivers.
    """
    if not strength > 0.0:
        raise ValueError(f"expected a positive strength, got {strength}")
    count = int(rng.integers(2, 5))
    chosen = rng.choice(len(_FAULTS), size=count, replace=False, p=_HOW_OFTEN / _HOW_OFTEN.sum())
    settings: dict[str, float] = {}
    for index in chosen:
        settings.update(_FAULTS[index](rng, strength))
    return Degradation(**settings, noise_seed=int(rng.integers(2**31)))


def degrade(photo: Image, fault: Degradation) -> Image:
    """A damaged copy of a photo, uint8 (side, side, 3)."""
    picture = photo.copy()
    if fault.tilt:
        source, picture = picture, np.empty_like(photo)
        turn(source, picture, degrees=fault.tilt)
    if fault.blur:
        picture = np.asarray(cv2.GaussianBlur(picture, (0, 0), fault.blur), dtype=np.uint8)
    if fault.saturation:
        source, picture = picture, np.empty_like(photo)
        saturate(source, picture, factor=2.0**fault.saturation)
    if fault.exposure or fault.temperature or fault.tint:
        light = Edits(exposure=fault.exposure, temperature=fault.temperature, tint=fault.tint)
        picture = np.asarray(cv2.LUT(picture, tone_table(light)), dtype=np.uint8)
    if fault.haze:
        veil = np.full_like(picture, round(255 * fault.veil))
        picture = np.asarray(cv2.addWeighted(picture, 1.0 - fault.haze, veil, fault.haze, 0.0), dtype=np.uint8)
    if fault.noise:
        noise = np.random.default_rng(fault.noise_seed).standard_normal(photo.shape, dtype=np.float32)
        picture = np.rint(np.clip(picture + fault.noise * noise, 0, 255)).astype(np.uint8)
    return picture
