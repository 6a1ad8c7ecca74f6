"""Write the frames of an episode as a video (.mp4, .webm, .gif) or as a strip of images (.png)."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cv2
import imageio.v3 as imageio
import numpy as np
import numpy.typing as npt

Frame = npt.NDArray[np.uint8]
KINDS = (".mp4", ".webm", ".gif", ".png")
_CODECS = {".mp4": "mp4v", ".webm": "VP80"}  # browsers play the second
_IN_A_STRIP = 12
_IN_A_GIF = 1000
_WIDE = 480  # pixels of a GIF's width


def check_film(path: Path) -> None:
    """Raise ValueError for an unknown file extension. Call it before playing."""
    if path.suffix not in KINDS:
        raise ValueError(f"{path.name}: expected a name that ends with {', '.join(KINDS)}")


class Film:
    """Writes frames, uint8 (height, width, 3), to a file, which is created at the end of the ``with`` block.

    An .mp4 and a .webm are written frame by frame. A .gif has at most 1000 frames, a .png at most 12 side by side. If
    there are more, every second one is dropped, repeatedly if necessary, so that memory stays bounded.

    Args:
        path: NAME.mp4, .webm, .gif or .png.
        fps: frames per second.

    Raises:
        ValueError: the extension is unknown; or, at the end of the block, no frame was added.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, fps: float) -> None:
        check_film(path)
        self._path, self._fps = path, fps
        self._scratch = path.with_name(f".{path.stem}.writing{path.suffix}")
        self._most = {".gif": _IN_A_GIF, ".png": 2 * _IN_A_STRIP}.get(path.suffix, 0)
        self._kept: list[Frame] = []
        self._every, self._came = 1, 0
        self._writer: cv2.VideoWriter | None = None

    def add(self, frame: Frame) -> None:
        """Add a frame of the same shape as those before."""
        if not self._most:
            self._stream(frame)
        elif self._came % self._every == 0:
            self._kept.append(_small(frame) if self._path.suffix == ".gif" else frame.copy())
            if len(self._kept) > self._most:
                del self._kept[1::2]
                self._every *= 2
        self._came += 1

    def __enter__(self) -> Film:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._writer is not None:
                self._writer.release()
            if kind is None:
                self._finish()
                self._scratch.replace(self._path)
        finally:
            self._scratch.unlink(missing_ok=True)

    def _stream(self, frame: Frame) -> None:
        height, width = frame.shape[0] // 2 * 2, frame.shape[1] // 2 * 2
        if self._writer is None:
            fourcc = cv2.VideoWriter.fourcc(*_CODECS[self._path.suffix])
            with _without_tags():
                self._writer = cv2.VideoWriter(str(self._scratch), fourcc, self._fps, (width, height))
            if not self._writer.isOpened():
                raise OSError(f"{self._path} cannot be written: expected a writable folder")
        self._writer.write(cv2.cvtColor(np.ascontiguousarray(frame[:height, :width]), cv2.COLOR_RGB2BGR))

    def _finish(self) -> None:
        if not self._came:
            raise ValueError("there is nothing to save: expected at least one frame")
        if self._path.suffix == ".gif":
            # Browsers play at most 50 frames per second, and GIF durations are multiples of 10 ms.
            duration = max(20, round(1000 * self._every / self._fps / 10) * 10)
            imageio.imwrite(self._scratch, np.stack(self._kept), extension=".gif", duration=duration, loop=0)
        elif self._path.suffix == ".png":
            places = np.linspace(0, len(self._kept) - 1, min(_IN_A_STRIP, len(self._kept))).round().astype(int)
            imageio.imwrite(self._scratch, np.concatenate([self._kept[place] for place in places], axis=1))


@contextmanager
def _without_tags() -> Iterator[None]:
    """Keep OpenCV's line about a codec's tag, which .webm has not, out of stderr; all else comes after the block."""
    try:
        stderr = os.dup(2)
    except OSError:  # a process without one
        yield
        return
    with os.fdopen(stderr, "wb", 0) as own, tempfile.TemporaryFile() as said:
        sys.stderr.flush()
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            said.seek(0)
            own.writelines(line for line in said if not line.startswith(b"OpenCV: FFMPEG: tag"))


def _small(frame: Frame) -> Frame:
    """Return a copy of a frame, at most _WIDE pixels wide."""
    height, width = frame.shape[:2]
    if width <= _WIDE:
        return frame.copy()
    size = (_WIDE, round(height * _WIDE / width))
    return np.asarray(cv2.resize(frame, size, interpolation=cv2.INTER_AREA), np.uint8)


def save_film(frames: Sequence[Frame], path: Path, fps: float) -> None:
    """Write all frames; see `Film`."""
    with Film(path, fps) as film:
        for frame in frames:
            film.add(frame)
