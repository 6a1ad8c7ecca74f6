"""Editing tools, and reproducible random degradations of photos."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

# A photographer's tools, combined in one recipe that is always applied to the original.
#
# A recipe (:class:`Edits`) is a point in the space of the tools' settings. Edit steps move that point; the picture is
# rendered from the untouched original every time, so ten steps quantise no more often than one.
#
# Tone and colour work follow what raw developers do: exposure and white balance are gains in linear light (sRGB's
# transfer curve, IEC 61966-2-1), contrast is a slope around middle grey in the encoded values, saturation scales the
# distance to the pixel's luma (Rec. 601, as JPEG), sharpness is an unsharp mask.


Image = npt.NDArray[np.uint8]
Vector = npt.NDArray[np.float64]
Stage = Callable[[Image, Image], None]

# Rec. 709 weights: the share of each linear primary in a pixel's luminance.
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])
_LEVELS = np.arange(256) / 255.0
LINEAR = np.where(_LEVELS <= 0.04045, _LEVELS / 12.92, ((_LEVELS + 0.055) / 1.055) ** 2.4)


@dataclass(frozen=True, slots=True)
class Edits:
    """One setting of every tool; all zeros leaves the photo as it is, bit for bit.

    Attributes:
        exposure: stops (EV): +1 doubles the light.
        contrast: stops of slope around middle grey: +1 doubles every distance from it.
        saturation: stops of chroma: +1 doubles the distance to grey, -1 halves it.
        temperature: stops that red gains on blue; positive is warmer. Luminance of grey is kept.
        tint: stops that red and blue gain on green; positive is towards magenta. Luminance of grey is kept.
        sharpness: share of the fine detail (what a Gaussian of 1.2 pixels removes) that is added once more.
        denoise: grey levels, of 255, that a pixel may move towards its smooth surroundings.
        straighten: degrees counter-clockwise; the corners that turn out of the frame are cropped away.
        crop: stops of enlargement around the centre: 1 leaves the middle half of the width and of the height.
    """

    exposure: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    temperature: float = 0.0
    tint: float = 0.0
    sharpness: float = 0.0
    denoise: float = 0.0
    straighten: float = 0.0
    crop: float = 0.0

    @classmethod
    def from_vector(cls, vector: npt.ArrayLike) -> Edits:
        """The recipe with these settings, in the order of :data:`TOOLS`, each clipped to its limits."""
        values = np.asarray(vector, dtype=np.float64)
        if values.shape != (len(TOOLS),) or not np.isfinite(values).all():
            raise ValueError(f"expected {len(TOOLS)} finite settings ({', '.join(TOOLS)}), got {vector!r}")
        return cls(*np.clip(values, LOWEST, HIGHEST).tolist())

    def vector(self) -> Vector:
        """float64 (9,) in the order of :data:`TOOLS`."""
        return np.array(astuple(self))

    def moved(self, deltas: npt.ArrayLike) -> Edits:
        """The recipe after one edit step: every tool moved by its delta (same units), clipped to its limits."""
        return Edits.from_vector(self.vector() + np.asarray(deltas, dtype=np.float64))

    def as_dict(self) -> dict[str, float]:
        """The settings by name."""
        return asdict(self)


TOOLS: tuple[str, ...] = tuple(field.name for field in fields(Edits))
"""Names of the edits, in the order of an action's numbers."""
LOWEST: Vector = np.array([-3.0, -2.0, -2.0, -1.5, -1.0, 0.0, 0.0, -15.0, 0.0])
HIGHEST: Vector = np.array([3.0, 2.0, 2.0, 1.5, 1.0, 2.0, 40.0, 15.0, 0.6])


def apply(photo: Image, edits: Edits, out: Image | None = None) -> Image:
    """Render a photo with a recipe.

    Args:
        photo: uint8 (side, side, 3) RGB, never written to.
        edits: the recipe.
        out: where to write, e.g. a row of a server's shared memory: uint8, C-contiguous, of the photo's shape, and not
            the photo itself. A new array when left out.

    Returns:
        ``out``.

    Raises:
        ValueError: when an array has another dtype, shape or layout, or ``out`` overlaps ``photo``.
    """
    if photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3 or photo.shape[0] != photo.shape[1]:
        raise ValueError(
            f"expected a photo of uint8 (side, side, 3), got {photo.dtype} {photo.shape}; crop it to a square first"
        )
    if out is None:
        out = np.empty_like(photo)
    elif out.dtype != np.uint8 or out.shape != photo.shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(
            f"expected out to be a writable C-contiguous uint8 {photo.shape}, got {out.dtype} {out.shape}, "
            f"contiguous={out.flags.c_contiguous}, writable={out.flags.writeable}"
        )
    elif np.may_share_memory(photo, out):
        raise ValueError("out overlaps the photo: a recipe is applied to the original, which must stay as it is")

    stages = _stages(edits)
    if not stages:
        np.copyto(out, photo)
        return out
    source = photo
    for stage in stages[:-1]:
        target = np.empty_like(photo)
        stage(source, target)
        source = target
    stages[-1](source, out)
    return out


def apply_full(picture: Image, edits: Edits, side: int) -> Image:
    """Render a picture of any size and shape with a recipe that was found on a square of `side` pixels.

    Sharpness and noise are judged at that size: their radii grow with the picture, so that it looks the same when it is
    shown as large. The picture is turned and enlarged around its own centre.

    Args:
        picture: uint8 (height, width, 3) RGB; not written to.
        side: of the square that was the picture's short side.
    """
    scale = min(picture.shape[:2]) / side
    image = picture
    if edits.denoise >= 0.5:
        bound = np.full_like(image, round(edits.denoise))
        smooth = cv2.GaussianBlur(image, (0, 0), 1.5 * scale)
        image = _image(cv2.min(cv2.max(smooth, cv2.subtract(image, bound)), cv2.add(image, bound)))
    if edits.straighten or edits.crop:
        image = _turned(image, edits.straighten, 2.0**edits.crop)
    if edits.exposure or edits.contrast or edits.temperature or edits.tint:
        image = _image(cv2.LUT(image, tone_table(edits)))
    if edits.saturation:
        target = np.empty_like(image)
        saturate(image, target, factor=2.0**edits.saturation)
        image = target
    if edits.sharpness:
        blurred = cv2.GaussianBlur(image, (0, 0), 1.2 * scale)
        image = _image(cv2.addWeighted(image, 1.0 + edits.sharpness, blurred, -edits.sharpness, 0.0))
    return image.copy() if image is picture else image


def _image(array: Any) -> Image:
    return np.asarray(array, np.uint8)


def _turned(source: Image, degrees: float, enlarge: float) -> Image:
    height, width = source.shape[:2]
    radians = abs(math.radians(degrees))
    ratio = max(width / height, height / width)
    factor = enlarge * (math.cos(radians) + math.sin(radians) * ratio)
    matrix = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), degrees, factor)
    return _image(
        cv2.warpAffine(source, matrix, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT_101)
    )


def _stages(edits: Edits) -> list[Stage]:
    """The stages of a recipe in order; tools at 0 are left out."""
    stages: list[Stage] = []
    # Noise is removed while neighbouring pixels are still independent and before contrast amplifies it.
    if edits.denoise >= 0.5:  # below half a grey level no pixel would move
        stages.append(partial(smooth_within, levels=round(edits.denoise)))
    if edits.straighten or edits.crop:
        stages.append(partial(turn, degrees=edits.straighten, enlarge=2.0**edits.crop))
    if edits.exposure or edits.contrast or edits.temperature or edits.tint:
        stages.append(partial(_through_table, table=tone_table(edits)))
    if edits.saturation:
        stages.append(partial(saturate, factor=2.0**edits.saturation))
    if edits.sharpness:
        stages.append(partial(sharpen, amount=edits.sharpness))
    return stages


def tone_table(edits: Edits) -> Image:
    """The look-up table of exposure, white balance and contrast for each channel: uint8 (1, 256, 3)."""
    stops = edits.exposure + white_balance_stops(edits.temperature, edits.tint)
    linear = LINEAR[:, None] * np.exp2(stops)[None, :]
    # Not clipped in between: contrast may bring back values that exposure moved past white.
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    contrasted = 0.5 + (encoded - 0.5) * 2.0**edits.contrast
    table: Image = np.rint(np.clip(contrasted, 0.0, 1.0) * 255.0).astype(np.uint8)
    return table[None]


def white_balance_stops(temperature: float, tint: float) -> Vector:
    """Gains of red, green and blue in stops, float64 (3,), that keep the luminance of grey."""
    stops = np.array([temperature / 2 + tint / 3, -2 * tint / 3, -temperature / 2 + tint / 3])
    kept: Vector = stops - math.log2(float(LUMINANCE @ np.exp2(stops)))
    return kept


def saturate(source: Image, out: Image, *, factor: float) -> None:
    """Scale every pixel's distance to its own luma."""
    luma = cv2.cvtColor(cv2.cvtColor(source, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    cv2.addWeighted(source, factor, luma, 1.0 - factor, 0.0, dst=out)


def sharpen(source: Image, out: Image, *, amount: float) -> None:
    """Unsharp mask: add ``amount`` times the difference to a Gaussian blur of 1.2 pixels."""
    blurred = cv2.GaussianBlur(source, (5, 5), 1.2)
    cv2.addWeighted(source, 1.0 + amount, blurred, -amount, 0.0, dst=out)


def smooth_within(source: Image, out: Image, *, levels: int) -> None:
    """Move every value towards its Gaussian surroundings (1.5 pixels), by at most ``levels``.

    Noise is smaller than that and goes; an edge is larger and keeps all but ``levels`` of its height. Four saturating
    8-bit operations, a tenth of the time of a bilateral filter.
    """
    bound = np.full_like(source, levels)
    lowest, highest = cv2.subtract(source, bound), cv2.add(source, bound)
    smooth = cv2.GaussianBlur(source, (7, 7), 1.5)
    cv2.min(cv2.max(smooth, lowest), highest, dst=out)


def turn(source: Image, out: Image, *, degrees: float, enlarge: float = 1.0) -> None:
    """Turn a square counter-clockwise around its centre, enlarged so far that no corner stays empty."""
    side = source.shape[0]
    radians = abs(math.radians(degrees))
    centre = ((side - 1) / 2, (side - 1) / 2)
    matrix = cv2.getRotationMatrix2D(centre, degrees, enlarge * (math.cos(radians) + math.sin(radians)))
    # Reflected, since interpolation may reach half a pixel beyond the last one.
    cv2.warpAffine(source, matrix, (side, side), dst=out, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101)


def _through_table(source: Image, out: Image, *, table: Image) -> None:
    cv2.LUT(source, table, dst=out)


# Random but repeatable degradations of a photo.
#
# A few faults at a time, each strong enough to be seen. They are faults of light and camera, not the editor's tools
# run backwards: haze pulls towards a veil of its own grey, over-exposure clips, noise comes after blur, and all of it
# is rounded to 8 bits before the editor sees it. So the tools repair most of the damage, but none of it exactly.


@dataclass(frozen=True, slots=True)
class Degradation:
    """A degradation; all zeros is none.

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
    """Sample uniformly in [low, high], with a random sign."""
    return float(rng.uniform(low, high) * rng.choice((-1.0, 1.0)))


def _exposure(rng: np.random.Generator, strength: float) -> dict[str, float]:
    # Clipped highlights cannot be restored, so over-exposure is the milder of the two.
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


def draw(rng: np.random.Generator, strength: float = 1.0, tilted: float = 0.0, lone: float = 0.0) -> Degradation:
    """Sample two to four different faults of random strength.

    Args:
        rng: the only source of randomness, also for the noise's seed.
        strength: scales every fault; 1 is ordinary.
        tilted: share of the others that are tilted beside their faults.
        lone: share that keeps only the first of its faults (and the tilt beside it).
    """
    if not strength > 0.0:
        raise ValueError(f"expected a positive strength, got {strength}")
    count = int(rng.integers(2, 5))
    chosen = rng.choice(len(_FAULTS), size=count, replace=False, p=_HOW_OFTEN / _HOW_OFTEN.sum())
    if lone and rng.random() < lone:
        chosen = chosen[:1]
    settings: dict[str, float] = {}
    for index in chosen:
        settings.update(_FAULTS[index](rng, strength))
    seed = int(rng.integers(2**31))
    if tilted and "tilt" not in settings and rng.random() < tilted:
        settings.update(_tilt(rng, strength))
    return Degradation(**settings, noise_seed=seed)


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


_FITTED = [TOOLS.index(name) for name in ("exposure", "contrast", "saturation", "temperature", "tint")]
_NUDGE, _LARGEST = 0.04, 0.7  # steps of a setting: for a slope above the rounding to 8 bits, and the largest
# Colours as photographs have them, uint8 (16, 16, 3): every brightness, most of them not far from grey.
_GREYS = np.repeat(np.linspace(4, 251, 16), 16)[:, None]
_SPREAD = np.random.default_rng(0).normal(0, 22, (256, 3))
_PALETTE: Image = np.clip(_GREYS + _SPREAD, 0, 255).astype(np.uint8).reshape(16, 16, 3)


@lru_cache(maxsize=256)
def cure(fault: Degradation) -> Edits:
    """Return edits that repair a degradation as far as the tools can, for demonstrations; takes about 5 ms.

    The tools that change colours are fitted together, so that a palette comes back as it was. Undoing fault by fault
    spoils every second picture: under-exposed haze is no longer dark, and the tools come in another order than the
    faults.
    """
    settings = np.zeros(len(TOOLS))
    colours = replace(fault, blur=0.0, noise=0.0, tilt=0.0, noise_seed=0)
    if any((fault.exposure, fault.haze, fault.saturation, fault.temperature, fault.tint)):
        inverse = (-fault.exposure, -math.log2(1 - fault.haze), -fault.saturation, -fault.temperature, -fault.tint)
        # Haze can hide most of the exposure's effect, so there are two local minima.
        starts = [np.array(inverse)] + [np.array(inverse) * (0.3, 1, 1, 0.5, 0.5)] * bool(fault.haze)
        damaged = degrade(_PALETTE, colours)
        settings[_FITTED] = min((_fitted(damaged, start) for start in starts), key=lambda each: each[1])[0]
    settings[TOOLS.index("sharpness")] = 0.8 * fault.blur
    settings[TOOLS.index("denoise")] = 2 * fault.noise
    settings[TOOLS.index("straighten")] = -fault.tilt
    return Edits.from_vector(settings)


def _fitted(damaged: Image, start: Vector) -> tuple[Vector, float]:
    """Fit settings that restore the palette, from a start (Levenberg-Marquardt); return them and the error."""
    lowest, highest = LOWEST[_FITTED], HIGHEST[_FITTED]

    def missed(settings: Vector) -> Vector:
        recipe = np.zeros(len(TOOLS))
        recipe[_FITTED] = settings
        found: Vector = (apply(damaged, Edits.from_vector(recipe)).astype(np.float64) - _PALETTE).reshape(-1) / 255
        return found

    settings = np.clip(start, lowest, highest)
    errors, damping = missed(settings), 0.05
    nudges = _NUDGE * np.eye(len(_FITTED))
    for _ in range(10):
        slopes = np.stack([missed(settings + n) - missed(settings - n) for n in nudges], axis=1) / (2 * _NUDGE)
        curvature = slopes.T @ slopes
        towards = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature) + 1e-3), -slopes.T @ errors)
        tried = np.clip(settings + np.clip(towards, -_LARGEST, _LARGEST), lowest, highest)
        left = missed(tried)
        if left @ left >= errors @ errors:
            damping *= 4
            continue
        close = np.abs(tried - settings).max() < 0.02
        settings, errors, damping = tried, left, damping * 0.3
        if close:
            break
    return settings, float(errors @ errors)
