"""The observation: a small view, statistics of the picture, its edges, the edits so far, the time and the score."""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from jurybox.studies.photo.environment.edits import HIGHEST, LINEAR, LOWEST, LUMINANCE, TOOLS, Edits, Image

# Statistics that describe what a photographer sees at a glance.
#
# Every number is scaled so that an ordinary photo lies within about [-1, 1] and the neutral value is near 0: a policy
# that is linear in them can already represent "too dark: more exposure", so it can learn in a few thousand
# steps.


Numbers = npt.NDArray[np.float32]
Columns = npt.NDArray[np.float64]

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_CHANNEL_QUANTILES = (0.05, 0.5, 0.95)
_BINS = 8
_SMALL, _TINY = 96, 48
_SLANTS = 15  # degrees
_BANDS = 4  # from top to bottom, which show where the sky is
_LIGHT = LINEAR + 1e-3  # levels below that are rounded too coarsely for ratios
_LEVELS = np.array([-7.5, -6.2, -4.2, -2.8, -1.6, -0.7, -0.3])  # quantiles of ordinary photos, in stops below white
# Pixels whose light is compared. Those of edges, of the brightest and of the least coloured part are estimates of the
# light's own colour: grey edges (van de Weijer et al., 2007), white patch (Land, 1977), grey world.
_LIT = (
    *("mean", "shades", "bright", "dark", "neutrals", "edges"),
    *(f"band_{i}" for i in range(_BANDS)),
    *(f"quantile_{q}" for q in (10, 50, 90)),
)

NAMES: tuple[str, ...] = (
    "luma_mean",
    "luma_deviation",
    *(f"luma_quantile_{round(100 * q):02d}" for q in _QUANTILES),
    "clipped_dark",
    "clipped_bright",
    *(f"luma_bin_{i}" for i in range(_BINS)),
    *(f"{channel}_quantile_{round(100 * q):02d}" for channel in ("red", "green", "blue") for q in _CHANNEL_QUANTILES),
    "warmth",
    "magenta",
    "warmth_of_neutrals",
    "magenta_of_neutrals",
    "chroma_mean",
    "chroma_deviation",
    "fine_detail",
    "coarse_detail",
    "noise",
    "tilt",
    "uprightness",
    "slant",
    "slant_of_lines",
    *(f"warm_stops_{part}" for part in _LIT),
    *(f"magenta_stops_{part}" for part in _LIT),
    *(f"stops_quantile_{round(100 * q):02d}" for q in _QUANTILES),
)


def measure(picture: Image, found: Columns | None = None) -> Numbers:
    """Statistics of a picture.

    Args:
        picture: uint8 (side, side, 3) RGB; about 1 ms at 384 pixels.
        found: its `directions`, if already known.

    Returns:
        float32 (len(NAMES),), clipped to [-1, 1], in the order of :data:`NAMES`:

        - luma (Rec. 601): mean, deviation, seven quantiles, shares clipped at either end, an 8-bin histogram;
        - quantiles of red, green and blue: where a cast shows in shadows, mid-tones and highlights;
        - warmth (red over blue) and magenta (red and blue over green), of all pixels and of the least coloured half
          of them (the grey-world idea, Buchsbaum 1980, without the colours that belong there);
        - mean and deviation of chroma;
        - log of the fine (3 pixels) and of the coarse (12 pixels) detail, and of the noise (Immerkaer, "Fast noise
          variance estimation", CVIU 64(2), 1996);
        - tilt and uprightness: sine and cosine of four times the edges' direction, averaged by their strength;
        - slant: how far clear edges that are nearly upright or level lean clockwise, on average and that of the most
          frequent directions, in 5 degrees; small if there are few such edges;
        - light: red over blue, and red and blue over green, in stops of linear light, of all pixels and of parts of
          them, and quantiles of luminance in stops. A cast adds the same to all of these ratios and an exposure the
          same to all of these levels, which encoded values do not show.
    """
    luma = np.asarray(cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY), dtype=np.uint8)
    small = np.asarray(cv2.resize(picture, (_SMALL, _SMALL), interpolation=cv2.INTER_AREA), dtype=np.uint8)
    small_luma = np.asarray(cv2.resize(luma, (_SMALL, _SMALL), interpolation=cv2.INTER_AREA), dtype=np.uint8)
    slant = _slant(directions(picture) if found is None else found)
    parts = [_light(luma), _channels(small), _colour(small), _detail(luma, small_luma), slant, _stops(small)]
    numbers = np.concatenate(parts)
    clipped: Numbers = np.clip(numbers, -1.0, 1.0).astype(np.float32)
    return clipped


def _light(luma: Image) -> Columns:
    shares = np.bincount(luma.reshape(-1), minlength=256) / luma.size
    levels = np.arange(256) / 255.0
    mean = float(shares @ levels)
    deviation = float(np.sqrt(shares @ (levels - mean) ** 2))
    clipped = 5.0 * np.array([shares[:3].sum(), shares[253:].sum()])
    bins = 4.0 * (shares.reshape(_BINS, -1).sum(axis=1) - 1.0 / _BINS)
    quantiles = _quantiles(shares, _QUANTILES)
    return np.concatenate([[4 * (mean - 0.45), 8 * (deviation - 0.22)], quantiles, clipped, bins])


def _channels(small: Image) -> Columns:
    shares = [np.bincount(channel, minlength=256) / channel.size for channel in small.reshape(-1, 3).T]
    return np.concatenate([_quantiles(share, _CHANNEL_QUANTILES) for share in shares])


def _quantiles(shares: Columns, wanted: tuple[float, ...]) -> Columns:
    """Levels below which these shares of the pixels lie, -1 for black to 1 for white."""
    # A cumulative share that rounding left just below a wanted one would skip to the next level.
    return np.searchsorted(np.cumsum(shares), np.array(wanted) - 1e-9) / 127.5 - 1.0


def _colour(small: Image) -> Columns:
    pixels = small.reshape(-1, 3).astype(np.float32) / 255.0
    red, green, blue = pixels.T
    warmth, magenta = red - blue, 0.5 * (red + blue) - green
    chroma = np.sqrt(warmth * warmth + 4.0 * magenta * magenta)
    # A colour cast shifts grey; the more coloured half depends more on the subject than on the light.
    neutral = chroma <= np.partition(chroma, chroma.size // 2)[chroma.size // 2]
    return np.array(
        [
            3 * warmth.mean(),
            6 * magenta.mean(),
            4 * warmth[neutral].mean(),
            8 * magenta[neutral].mean(),
            4 * (chroma.mean() - 0.2),
            5 * (chroma.std() - 0.15),
        ],
        dtype=np.float64,
    )


def _stops(small: Image) -> Columns:
    tiny = np.asarray(cv2.resize(small, (_TINY, _TINY), interpolation=cv2.INTER_AREA), np.uint8)
    light: Columns = _LIGHT[tiny]
    pixels = light.reshape(-1, 3)
    luminance = pixels @ LUMINANCE
    ordered, last = np.sort(luminance), len(luminance) - 1
    ratios = _ratios(pixels)
    coloured = np.hypot(*(ratios - np.median(ratios, axis=0)).T)
    whole = tiny.reshape(-1, 3).max(axis=1) < 251

    def mean_of(chosen: npt.NDArray[np.bool_]) -> Columns:  # grey if there are none
        found: Columns = (pixels[chosen].sum(axis=0) + 1e-3) / (chosen.sum() + 1e-3)
        return found

    parts = [
        pixels.mean(axis=0),
        np.mean(pixels**6, axis=0) ** (1 / 6),
        mean_of(whole & (luminance >= ordered[round(0.9 * last)])),
        mean_of(luminance <= ordered[last // 4]),
        mean_of(coloured <= np.partition(coloured, last // 4)[last // 4]),
        sum(np.abs(np.diff(light, axis=axis)).mean(axis=(0, 1)) for axis in (0, 1)) + 1e-4,
        *light.reshape(_BANDS, -1, 3).mean(axis=1),
    ]
    found = np.concatenate([_ratios(np.stack(parts)), np.quantile(ratios, (0.1, 0.5, 0.9), axis=0)])
    levels = np.log2(ordered[[round(q * last) for q in _QUANTILES]])
    return np.concatenate([0.5 * found[:, 0], found[:, 1], 0.25 * (levels - _LEVELS)])


def _ratios(light: Columns) -> Columns:
    """Return stops of red over blue, and of red and blue over green, (n, 2), of linear colours (n, 3)."""
    red, green, blue = np.log2(light).T
    return np.stack((red - blue, 0.5 * (red + blue) - green), axis=1)


def _detail(luma: Image, small: Image) -> Columns:
    fine = cv2.meanStdDev(cv2.Laplacian(luma, cv2.CV_16S))[1].item()
    coarse = cv2.meanStdDev(cv2.Laplacian(small, cv2.CV_16S))[1].item()
    kernel = np.array([[1, -2, 1], [-2, 4, -2], [1, -2, 1]], dtype=np.float32)
    # The median instead of Immerkaer's mean, so that the photo's own edges count for little.
    response = np.abs(cv2.filter2D(luma, cv2.CV_16S, kernel))[::3, ::3].reshape(-1)
    noise = np.partition(response, response.size // 2)[response.size // 2] / 4.0
    right, down = cv2.spatialGradient(small)
    direction = 4.0 * np.arctan2(down, right)
    strength = np.hypot(right, down)
    total = float(strength.sum()) + 1.0
    return np.array(
        [
            0.5 * (np.log(fine + 0.5) - 2.3),
            0.5 * (np.log(coarse + 0.5) - 3.5),
            0.5 * (np.log(noise + 0.25) - 0.5),
            2.0 * float((strength * np.sin(direction)).sum()) / total,
            2.0 * float((strength * np.cos(direction)).sum()) / total,
        ]
    )


def directions(picture: Image) -> Columns:
    """Return the directions of clear edges: shares of all edges' strength, float64 (2, 30), one degree per column.

    In the first row around the upright, in the second around the level, each from 15 degrees to one side to 15 to the
    other. A picture that is turned moves them along the rows.
    """
    luma = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    half = cv2.resize(luma, (2 * _SMALL, 2 * _SMALL), interpolation=cv2.INTER_AREA).astype(np.float32)
    smooth = cv2.GaussianBlur(half, (0, 0), 1.5)
    right, down = cv2.Sobel(smooth, cv2.CV_32F, 1, 0), cv2.Sobel(smooth, cv2.CV_32F, 0, 1)
    # The structure tensor: a direction for each neighbourhood, and its coherence.
    parts = [cv2.GaussianBlur(each, (0, 0), 2.0)[::2, ::2].ravel() for each in (right**2, down**2, right * down)]
    across, along, both = parts
    agreed = (np.square(across - along) + 4 * np.square(both)) / (np.square(across + along) + 1e-3)
    weights = np.sqrt(across + along) * agreed**2
    degrees = np.degrees(0.5 * np.arctan2(2 * both, across - along))
    upright = np.where(np.abs(degrees) > 45, degrees - np.copysign(90, degrees), degrees)
    axial = np.abs(upright) < _SLANTS
    level = np.abs(degrees[axial]) > 45
    bins = (upright[axial] + _SLANTS).astype(np.intp) + 2 * _SLANTS * level
    found = np.bincount(bins, weights[axial], 4 * _SLANTS) / (weights.sum() + 1e-3)
    found = found.reshape(2, -1)
    padded = np.pad(found, ((0, 0), (1, 1)))
    smoothed: Columns = 0.5 * found + 0.25 * (padded[:, :-2] + padded[:, 2:])
    return smoothed


def _slant(found: Columns) -> Columns:
    middles = np.arange(2 * _SLANTS) - _SLANTS + 0.5
    sharp = found**3
    return np.array(
        [
            float((found @ middles).sum() / (found.sum() + 1e-3)) / 5.0,
            float((sharp @ middles).sum() / (sharp.sum() + 1e-4)) / 5.0,
        ]
    )


# The observation: a small view, statistics of the picture, the edits so far, the time and the score.
#
# One flat float32 vector within [-1, 1], which every library's plain MLP accepts; the slices below name its parts, for
# users with a network for each part.
#
# The view's pixels are shrunk to :data:`VIEW_SCALE` of the statistics' range: 768 pixels at full range would outweigh
# fifty more informative numbers, and a new network would spend its first thousands of steps on learning to ignore them.


VIEW_SIDE = 16
VIEW_SCALE = 0.1

_VIEW_SIZE = VIEW_SIDE * VIEW_SIDE * 3
STATISTICS = slice(0, len(NAMES))
EDITS = slice(STATISTICS.stop, STATISTICS.stop + len(TOOLS))
TIME = slice(EDITS.stop, EDITS.stop + 1)
SCORE = slice(TIME.stop, TIME.stop + 1)
VIEW = slice(SCORE.stop, SCORE.stop + _VIEW_SIZE)
DIRECTIONS = slice(VIEW.stop, VIEW.stop + 4 * _SLANTS)
SIZE = DIRECTIONS.stop

# Numbers that change their sign in a mirrored picture.
_LEANING = [
    *(NAMES.index(name) for name in ("tilt", "slant", "slant_of_lines")),
    EDITS.start + TOOLS.index("straighten"),
]

Observation = npt.NDArray[np.float32]


def space() -> spaces.Box:
    """float32 (SIZE,) within [-1, 1]."""
    return spaces.Box(-1.0, 1.0, (SIZE,), np.float32)


def observe(picture: Image, edits: Edits, time: float, score: float) -> Observation:
    """Return the observation of the current state.

    Args:
        picture: the current picture, uint8 (384, 384, 3).
        edits: the recipe that made it; each setting is shown as a share of its limit.
        time: share of the episode that is over, 0 to 1.
        score: the juror's score of the picture, scaled to about [-1, 1].

    Returns:
        float32 (SIZE,) with the slices ``STATISTICS``, ``EDITS``, ``TIME``, ``SCORE``, ``VIEW`` (16 x 16 x 3) and
        ``DIRECTIONS`` (2 x 30), the logarithms of what `directions` tells.
    """
    seen = np.empty(SIZE, dtype=np.float32)
    found = directions(picture)
    seen[STATISTICS] = measure(picture, found)
    seen[EDITS] = edits.vector() / np.maximum(-LOWEST, HIGHEST)
    seen[TIME] = 2.0 * time - 1.0
    seen[SCORE] = np.clip(score, -1.0, 1.0)
    view = cv2.resize(picture, (VIEW_SIDE, VIEW_SIDE), interpolation=cv2.INTER_AREA)
    np.multiply(np.asarray(view, dtype=np.float32).reshape(-1) / 127.5 - 1.0, VIEW_SCALE, out=seen[VIEW])
    seen[DIRECTIONS] = np.clip(0.6 * (np.log(found.reshape(-1) + 2e-3) + 4.5), -1.0, 1.0)
    return seen


def leaning() -> tuple[list[int], list[int], list[float]]:
    """Return which numbers encode a picture's tilt, and how a mirrored picture changes them.

    Returns:
        The numbers of the observation that tell it: directions, slants, how far it is straightened already, and the
        time. For each of them the number that takes its place in `mirrored`, and the sign that it gets.
    """
    seen = [*range(DIRECTIONS.start, DIRECTIONS.stop), *_LEANING, TIME.start]
    places = mirrored(np.arange(1, SIZE + 1, dtype=np.float32)[None])[0][seen]
    return seen, (np.abs(places).astype(int) - 1).tolist(), np.sign(places).tolist()


def mirrored(seen: Observation) -> Observation:
    """Return the observations of the mirrored pictures, which lean to the other side; float32 (n, SIZE) of the same."""
    found = seen.copy()
    found[:, _LEANING] *= -1.0
    view = seen[:, VIEW].reshape(-1, VIEW_SIDE, VIEW_SIDE, 3)
    found[:, VIEW] = view[:, :, ::-1].reshape(len(seen), -1)
    found[:, DIRECTIONS] = seen[:, DIRECTIONS].reshape(-1, 2, 2 * _SLANTS)[..., ::-1].reshape(len(seen), -1)
    return found
