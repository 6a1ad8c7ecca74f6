"""The photos: those that are shipped and those in the wheels of scikit-image and scikit-learn, or a folder.

The split into training and held-out photos is by photo, never by crop, and depends only on the photos' content.
Copies of one picture, also renamed, re-encoded or resized, are on the same side, so that an evaluation contains no
scene of the training.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import numpy.typing as npt

from jurybox.protocol.revision import install_command
from jurybox.studies.photo.environment.edits import Image
from jurybox.training.errors import UsageError

SIDE = 384
SUFFIXES = (".jpg", ".jpeg", ".png")
Split = Literal["training", "held_out"]

# Colour photographs only: these packages' drawings, textures, microscopy and greyscale pictures make no sense here, and
# the right-hand view of the motorcycle is the left-hand one again. They are read where the packages are installed, not
# redistributed: the motorcycle is of the Middlebury stereo data of 2014, scikit-image's others are public domain or
# CC0, scikit-learn's CC BY 2.0.
_SHIPPED: tuple[tuple[str, str, Split], ...] = (
    ("skimage", "data/astronaut.png", "training"),
    ("skimage", "data/coffee.png", "training"),
    ("skimage", "data/motorcycle_left.png", "training"),
    ("skimage", "data/rocket.jpg", "training"),
    ("sklearn", "datasets/images/flower.jpg", "training"),
    ("skimage", "data/chelsea.png", "held_out"),
    ("sklearn", "datasets/images/china.jpg", "held_out"),
)
# Of Budgie Backgrounds (CC0-1.0, github.com/BuddiesOfBudgie/budgie-backgrounds, commit 82067426), shrunk to a short
# side of 448: all its colour photographs of scenes. Left out, before any result was seen: two drawings, a print, a
# greyscale picture, a planet, and two that are mostly black. Nothing that is shipped was trained on them.
_OWN = Path(__file__).with_name("photographs")
# Enough for a crop of half the width at full quality, and a hundred photos in some 100 MB a worker.
_KEPT_SHORT_SIDE = 448
_SMALLEST_SHORT_SIDE = 96
_SMALLEST_CROP = 0.65
# Pictures whose thumbnails differ by less than this on average (of 255) are copies. Encoding one badly or resizing it
# makes a difference of up to 2 or 3; that of two photographs is some tens.
_THUMBNAIL, _COPIES = 16, 5.0


class PhotoError(UsageError, ValueError):
    """A photo, or a folder of them, cannot be used; the message names the file and says what is wrong."""


@dataclass(frozen=True, slots=True)
class Photo:
    """One photo.

    Attributes:
        name: file name, unique in its library.
        pixels: uint8 (height, width, 3) RGB, its short side 448 at most.
    """

    name: str
    pixels: Image

    def centre(self) -> Image:
        """The largest square in the middle, uint8 (384, 384, 3)."""
        height, width = self.pixels.shape[:2]
        side = min(height, width)
        return self._square((height - side) // 2, (width - side) // 2, side)

    def crop(self, rng: np.random.Generator) -> Image:
        """A square anywhere, 65 to 100 % of the short side, mirrored half of the time: uint8 (384, 384, 3)."""
        height, width = self.pixels.shape[:2]
        side = round(min(height, width) * rng.uniform(_SMALLEST_CROP, 1.0))
        top, left = int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1))
        square = self._square(top, left, side)
        return np.ascontiguousarray(square[:, ::-1]) if rng.random() < 0.5 else square

    def _square(self, top: int, left: int, side: int) -> Image:
        square = self.pixels[top : top + side, left : left + side]
        shrinks = side > SIDE
        resized = cv2.resize(square, (SIDE, SIDE), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC)
        return np.asarray(resized, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class PhotoLibrary:
    """Photos to train on and photos held out of training.

    Attributes:
        training, held_out: the two sides of the split.
        skipped: one line for each file that was left out because it is broken.
        beyond_limit: how many files were not opened because the folder has more than the limit.
    """

    training: tuple[Photo, ...]
    held_out: tuple[Photo, ...]
    skipped: tuple[str, ...] = field(default=())
    beyond_limit: int = 0

    @property
    def left_out(self) -> str:
        """Return a sentence on the files of a folder that are not used; "" if all are."""
        used, parts = len(self.training) + len(self.held_out), []
        if self.beyond_limit:
            parts.append(f"{self.beyond_limit} more than are kept in memory")
        if self.skipped:
            parts.append(f"{len(self.skipped)} that are broken ({'; '.join(self.skipped[:3])})")
        return f"{used} photos of the folder are used, and not: {', '.join(parts)}" if parts else ""

    def of(self, split: Split) -> tuple[Photo, ...]:
        """The photos of a split."""
        return self.training if split == "training" else self.held_out

    @classmethod
    def shipped(cls) -> PhotoLibrary:
        """Five colour photographs of scikit-image and scikit-learn to train on; two of theirs and twelve held out.

        Nothing is downloaded, and neither package is imported: an env worker stays light.

        Raises:
            PhotoError: when fewer than one photo is found for a side of the split.
        """
        sides: dict[Split, list[Photo]] = {"training": [], "held_out": []}
        missing: list[str] = []
        for package, inside, side in _SHIPPED:
            root = _package_folder(package)
            if root is None or not (root / inside).is_file():
                missing.append(f"{package}/{inside}")
            else:
                sides[side].append(read_photo(root / inside))
        if not all(sides.values()):
            raise PhotoError(
                f"expected photos in the packages scikit-image and scikit-learn, not found: {', '.join(missing)}; "
                f"install them ({install_command('training')}), or name a folder of your own photos"
            )
        sides["held_out"] += [read_photo(path) for path in sorted(_OWN.glob("*.jpg"))]
        return cls(tuple(sides["training"]), tuple(sides["held_out"]), tuple(f"{name}: not there" for name in missing))

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        held_out_share: float = 0.25,
        on_broken: Literal["error", "skip"] = "error",
        limit: int = 256,
    ) -> PhotoLibrary:
        """Every .jpg, .jpeg and .png directly in a folder.

        Args:
            folder: the folder.
            held_out_share: share of the photos that is held out; at least one is, and at least one is not. It is
                about that share where pictures have copies, which stay together.
            on_broken: "error" raises for all broken files at once, "skip" lists them in ``skipped`` and goes on.
            limit: open this many at most, evenly spread over the names; every worker keeps them in memory, about
                0.9 MB each.

        Raises:
            PhotoError: when it is no folder, a file is broken, or fewer than two different photos are left.
        """
        root = Path(folder)
        if not root.is_dir():
            raise PhotoError(f"expected a folder of photos, {root} is none")
        if not 0.0 < held_out_share < 1.0 or limit < 2:
            raise ValueError(f"expected 0 < held_out_share < 1 and limit >= 2, got {held_out_share} and {limit}")
        files = sorted(path for path in root.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
        taken = files if len(files) <= limit else [files[i * len(files) // limit] for i in range(limit)]
        photos, broken = [], []
        for path in taken:
            try:
                photos.append(read_photo(path))
            except PhotoError as error:
                broken.append(str(error))
        if broken and on_broken == "error":
            raise PhotoError(
                f"{len(broken)} of {len(taken)} photos in {root} cannot be used; remove them or skip broken files: "
                + "; ".join(broken)
            )
        if len(photos) < 2:
            raise PhotoError(
                f"expected at least two usable photos (one to train on, one held out) in {root}, found {len(photos)} "
                f"({', '.join(SUFFIXES)}); {len(broken)} broken"
            )
        held_names = _held_out(photos, held_out_share)
        if len(held_names) == len(photos):
            raise PhotoError(
                f"all {len(photos)} photos in {root} are copies of one picture: expected at least two different ones, "
                "one to train on and one held out"
            )
        return cls(
            training=tuple(photo for photo in photos if photo.name not in held_names),
            held_out=tuple(photo for photo in photos if photo.name in held_names),
            skipped=tuple(broken),
            beyond_limit=len(files) - len(taken),
        )


def _held_out(photos: Sequence[Photo], share: float) -> set[str]:
    """Names of the held-out photos; all if all are copies of one."""
    # By a digest of the content, so that the split does not depend on a camera's numbering.
    pictures = sorted(_copies(photos), key=lambda alike: min(_digest(photo) for photo in alike))
    wanted, held = max(1, round(share * len(photos))), list[Photo]()
    for alike in pictures:
        if len(held) + len(alike) <= wanted and len(held) + len(alike) < len(photos):
            held += alike
    if not held:  # each has more copies than the number to hold out
        held = min(pictures, key=len)
    return {photo.name for photo in held}


def _copies(photos: Sequence[Photo]) -> list[list[Photo]]:
    """Group the photos by picture: copies, and copies of copies."""
    thumbnails = np.stack([_thumbnail(photo) for photo in photos])
    groups = [[photo] for photo in photos]
    of = list(range(len(photos)))  # by photo, its group
    for number, thumbnail in enumerate(thumbnails):
        for other in np.flatnonzero(np.abs(thumbnails[:number] - thumbnail).mean(axis=1) < _COPIES).tolist():
            one, another = of[number], of[other]
            if one != another:
                groups[another] += groups[one]
                groups[one] = []
                of = [another if group == one else group for group in of]
    return [group for group in groups if group]


def _thumbnail(photo: Photo) -> npt.NDArray[np.float32]:
    small = cv2.resize(photo.pixels, (_THUMBNAIL, _THUMBNAIL), interpolation=cv2.INTER_AREA)
    return np.asarray(small, np.float32).ravel()


def _digest(photo: Photo) -> bytes:
    return hashlib.sha256(repr(photo.pixels.shape).encode() + photo.pixels.tobytes()).digest()


def read_photo(path: Path) -> Photo:
    """Decode a photo (8-bit RGB, turned as its EXIF says) and shrink it to a short side of 448 at most.

    Raises:
        PhotoError: when the file cannot be read, is no picture, is cut off, or is smaller than 96 pixels.
    """
    picture = decoded(path, path.name)
    height, width = picture.shape[:2]
    if min(height, width) < _SMALLEST_SHORT_SIDE:
        raise PhotoError(f"{path.name}: {width}x{height} pixels, at least {_SMALLEST_SHORT_SIDE} wanted on each side")
    scale = _KEPT_SHORT_SIDE / min(height, width)
    if scale < 1.0:
        size = (round(width * scale), round(height * scale))
        picture = np.asarray(cv2.resize(picture, size, interpolation=cv2.INTER_AREA), np.uint8)
    picture.setflags(write=False)
    return Photo(path.name, picture)


def decoded(path: Path, shown: object) -> Image:
    """Decode a picture, as 8-bit RGB (height, width, 3), turned as its EXIF says; `shown` is its name in errors.

    Raises:
        PhotoError: when the file cannot be read, is no picture, or is cut off.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PhotoError(f"{shown}: cannot be read ({error.strerror})") from error
    if is_cut_off(data):
        raise PhotoError(f"{shown}: the file is cut off")
    try:
        found = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    except cv2.error as error:
        raise PhotoError(f"{shown}: cannot be decoded ({error.err})") from error
    if found is None:
        raise PhotoError(f"{shown}: not a picture that OpenCV can decode")
    return np.asarray(cv2.cvtColor(found, cv2.COLOR_BGR2RGB), np.uint8)


def is_cut_off(data: bytes) -> bool:
    """Whether a JPEG or PNG is truncated; decoders fill the rest with grey silently."""
    if data.startswith(b"\xff\xd8"):
        # Inside a scan 0xFF is stuffed, so the last end-of-image marker stands behind the last start-of-scan marker.
        return data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda")
    return data.startswith(b"\x89PNG") and b"IEND" not in data


def _package_folder(package: str) -> Path | None:
    """Where a package is installed, found without importing it."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
