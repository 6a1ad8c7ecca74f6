"""Pictures of requests: encoded ones become pixels, each in a thread (Pillow releases the global interpreter lock).

A picture is rotated according to its EXIF data and converted to RGB; transparency is dropped. With a size it is resized
with Pillow's bicubic filter, which is antialiased when it shrinks. Encodings and filters change scores: see
docs/reward_hygiene.md.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from jurybox import native
from jurybox.client.juror_rows import PICTURE_MODES
from jurybox.protocol.errors import Code, Refused, SpecMismatch, said
from jurybox.protocol.spec import VARIABLE, ModelSpec, TensorSpec
from jurybox.server.frontend.threads import WORKERS, ThreadPool
from jurybox.server.security.limits import DecodedCharge

_FORMATS = ("JPEG", "PNG", "WEBP")
MOST_PIXELS = 1 << 25  # of one picture, about 100 MB decoded
_PER_PIXEL = 11  # bytes while it is decoded: Pillow's own of two modes, four each, and the array's


class NoPicture(str):
    """The reason why a picture cannot be decoded."""

    __slots__ = ()


class Pictures:
    """Makes pixels of pictures for one model.

    Args:
        pool: threads that decode.
        size: (height, width) to resize to; None: no resizing.
        spec: returns the model's spec, as far as it is known.
    """

    def __init__(self, pool: ThreadPool, size: tuple[int, int] | None, spec: Callable[[], ModelSpec | None]) -> None:
        self._pool = pool
        self._size = size
        self._spec = spec

    def check(self, pictures: Iterable[Sequence[Any]], held: DecodedCharge) -> None:
        """Refuse a request whose pictures would take more memory than it may have, by their headers.

        Raises:
            Refused (code TOO_LARGE).
        """
        if (most := held.most) is None:
            return
        kept = largest = 0
        for some in pictures:
            for one in _each(some):
                width, height = pixels_of(one)
                if width * height > MOST_PIXELS or self._unfit(width, height):
                    continue  # it is refused without being decoded
                largest = max(largest, width * height)
                kept += 3 * (width * height if self._size is None else self._size[0] * self._size[1])
        whole = kept + WORKERS * _PER_PIXEL * largest
        if whole > most:
            why = f"these pictures take {whole / (1 << 30):.1f} GiB decoded, at most {most >> 20} MiB: send fewer"
            raise Refused(why, Code.TOO_LARGE)

    def _unfit(self, width: int, height: int) -> str:
        """Return why the model takes no picture of this size; "" if it may, or is not known yet."""
        spec = self._spec()
        if spec is None or self._size is not None:
            return ""
        pictures = [item for item in spec.inputs.values() if len(item.shape) >= 3]
        if not pictures or any(_may_take(item, width, height) for item in pictures):
            return ""
        return f"a picture of {width} x {height} pixels: the model takes {' or '.join(map(str, pictures))}"

    async def decoded(self, pictures: Sequence[Any], held: DecodedCharge) -> list[Any]:
        """Return decoded pictures, or the reason for each that cannot be decoded. A large request uses a few tasks."""
        if self.ready(pictures):
            return list(pictures)
        step = 1 + len(pictures) // (4 * WORKERS)
        parts = (pictures[i : i + step] for i in range(0, len(pictures), step))
        images = await asyncio.gather(*(self._pool.run(self.several, part, held) for part in parts))
        return [image for part in images for image in part]

    def several(self, pictures: Sequence[Any], held: DecodedCharge) -> list[Any]:
        """Return decoded pictures, or the reason for each that cannot be decoded, in this thread."""
        return [self._picture(one, held) for one in pictures]

    def ready(self, pictures: Sequence[Any]) -> bool:
        """Return whether all pictures are arrays of the right size, or the reason for none: none must be decoded."""
        return all((isinstance(one, np.ndarray) and self._fits(one)) or type(one) is NoPicture for one in pictures)

    def _fits(self, picture: NDArray[np.uint8]) -> bool:
        return self._size is None or picture.shape[:2] == self._size

    def _picture(self, given: Any, held: DecodedCharge) -> NDArray[np.uint8] | NoPicture:
        """Decode a picture or the frames of a video; return the reason if it cannot be decoded."""
        if type(given) is list:
            return self._video(given, held)
        if isinstance(given, np.ndarray):
            if self._fits(given) or self._size is None:
                return given
            copied = 8 * given.size // 3  # Pillow's pixels and the array's
            held.take(copied)
            pixels = _pixels(_resized(Image.fromarray(given), self._size))
            held.give(max(0, copied - pixels.nbytes))
            return pixels
        try:
            data = encoded_bytes(given)
            return decoded(data, self._size, held, self._unfit)
        except SpecMismatch as error:
            return NoPicture(error)

    def _video(self, frames: list[Any], held: DecodedCharge) -> NDArray[np.uint8] | NoPicture:
        """Decode frames to (frames, height, width, 3); together they have the size limit of one picture."""
        pictures: list[NDArray[np.uint8]] = []
        for frame in frames:
            picture = self._picture(frame, held) if type(frame) is not list else NoPicture("a frame is a list")
            if isinstance(picture, NoPicture):
                return NoPicture(f"frame {len(pictures)}: {picture}")
            if pictures and picture.shape != pictures[0].shape:
                return NoPicture(f"frames of {pictures[0].shape} and {picture.shape}, expected all of one size")
            if (len(pictures) + 1) * picture.size > 3 * MOST_PIXELS:
                return NoPicture(f"a video of more than {MOST_PIXELS} pixels in its frames")
            pictures.append(picture)
        return np.stack(pictures) if pictures else NoPicture("a video without frames")


def encoded_bytes(given: Any) -> bytes:
    """Return the bytes of a picture given as bytes, base64 text or a ``data:`` URL. Raises SpecMismatch."""
    if type(given) is bytes:
        return given
    if type(given) is not str:
        raise SpecMismatch(f"expected the bytes of a picture or base64 text, came {type(given).__name__}")
    try:
        text = given[given.index(",", 0, 100) + 1 :] if given.startswith("data:") else given
        found = native.base64_decoded(text)
        return base64.b64decode(text, validate=True) if found is None else found  # b64decode has the error message
    except (binascii.Error, ValueError) as error:
        raise SpecMismatch(f"expected a picture in base64: {said(error, 100)}") from error


def _may_take(item: TensorSpec, width: int, height: int) -> bool:
    """Return whether an input may take a picture of this size, or does not take pictures as they are."""
    sizes = (height, width, 3), (width, height, 3)  # EXIF data may swap them
    return (
        len(item.shape) != 3
        or item.shape[2] not in (3, VARIABLE)
        or any(item.extents_of(size) is not None for size in sizes)
    )


def _each(pictures: Sequence[Any]) -> Iterator[Any]:
    """Return the pictures that must be decoded; those of videos, too."""
    for one in pictures:
        for part in one if type(one) is list else (one,):
            if not isinstance(part, (np.ndarray, list)):
                yield part


def pixels_of(given: Any) -> tuple[int, int]:
    """Return width and height from the header of a picture, without decoding it; (0, 0) if it is no picture."""
    try:
        data = encoded_bytes(given)
        if data[:4] == b"RIFF":
            return _webp_size(data)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            return image.size
    except Exception:  # noqa: BLE001  whatever is wrong is reported when it is decoded
        return 0, 0


def decoded(
    data: bytes,
    size: tuple[int, int] | None = None,
    held: DecodedCharge | None = None,
    unfit: Callable[[int, int], str] = lambda *_: "",
) -> NDArray[np.uint8]:
    """Decode the bytes of a JPEG, PNG or WebP file; of an animation only the first frame.

    The size is read from the header and checked before the pixels are decoded.

    Args:
        data: contents of the file.
        size: (height, width) to resize to.
        held: counts the pixels.
        unfit: called with width and height before the pixels are decoded; returns why they are of no use.

    Returns:
        RGB pixels, uint8 (height, width, 3).

    Raises:
        SpecMismatch: the file has another format, or is truncated, damaged or too large.
    """
    try:
        if data[:4] == b"RIFF":  # Pillow allocates a WebP's pixels when it opens the file
            _check_pixels(*_webp_size(data))
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_pixels(*image.size)
            if why := unfit(*image.size):
                raise SpecMismatch(why)
            if image.mode not in PICTURE_MODES:
                raise SpecMismatch(f"a picture of mode {image.mode!r}, expected 8 bits a channel")
            peak = _PER_PIXEL * image.width * image.height
            if held is not None:
                held.take(peak)
            try:
                pixels = _rgb(image, size)
            except BaseException:
                if held is not None:
                    held.give(peak)
                raise
            if held is not None:
                held.give(max(0, peak - pixels.nbytes))
            return pixels
    except (SpecMismatch, Refused):
        raise
    except UnidentifiedImageError as error:  # its message is only a memory address
        raise SpecMismatch("expected a complete JPEG, PNG or WebP file: the header is of another format") from error
    except Exception as error:
        raise SpecMismatch(f"expected a complete JPEG, PNG or WebP file: {said(error, 150)}") from error


def _rgb(image: Image.Image, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    ImageOps.exif_transpose(image, in_place=True)  # otherwise it copies pictures that need no rotation
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return _pixels(rgb if size is None else _resized(rgb, size))


def _pixels(rgb: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels like np.asarray, which copies them twice, in half the time with Pillow 11.2 or later."""
    with suppress(AttributeError, ValueError):  # an older Pillow; a large picture, which Pillow stores in blocks
        schema, array = rgb.__arrow_c_array__()
        pixels = np.empty((rgb.height, rgb.width, 3), np.uint8)
        if native.drop_fourth(schema, array, pixels):
            return pixels
    return np.asarray(rgb)


def _resized(rgb: Image.Image, size: tuple[int, int]) -> Image.Image:
    return rgb if rgb.size == size[::-1] else rgb.resize(size[::-1], Image.Resampling.BICUBIC)


def _check_pixels(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise SpecMismatch(f"a picture of {width} x {height} pixels, expected at most {MOST_PIXELS} in all")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return width and height from a WebP file's header (RFC 9649)."""
    kind = data[12:16]
    if len(data) < 30 or data[8:12] != b"WEBP" or kind not in (b"VP8X", b"VP8 ", b"VP8L"):
        raise SpecMismatch("expected a complete JPEG, PNG or WebP file: the header is truncated or of another format")
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    bits = int.from_bytes(data[21:25], "little")
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
